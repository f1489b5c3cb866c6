"""Measure torch.compile's modes on the five models, by recipe (benchmark_te.py --compile).

Each row is one training step, beside the same step uncompiled and as a CUDA graph: its speed, the graph
breaks and their reasons, the number of graphs and the seconds of compiling. An error of the compiler is a
result like any other.
"""

import dataclasses
import itertools
import statistics
import time

import torch

from bench.measure import LR, Agreement, error_text
from bench.report import Rows
from bench.step import SHAPES, Step, free, make_batches, make_config
from bench.timing import timed
from nanote import models

COMPILE_RECIPES = ("none", "current", "delayed", "block")
COMPILE_MODES = {  # row of the table -> options of train.py
    "cuda-graph": dict(cuda_graph="auto"),
    "eager": {},
    "default": dict(compile=True),
    "fullgraph": dict(compile=True, compile_fullgraph=True),
    "reduce-overhead": dict(compile=True, compile_mode="reduce-overhead"),
    "max-autotune": dict(compile=True, compile_mode="max-autotune"),
    "max-autotune-no-cudagraphs": dict(compile=True, compile_mode="max-autotune-no-cudagraphs"),
}


def measure_compiled(name, config, device, agreement) -> dict:
    """Make a step, run and verify it, and time it -> the figures of its row."""
    from torch._dynamo.utils import counters  # imports the compiler, which is slow

    torch._dynamo.reset()
    counters.clear()
    batches, began = make_batches(config, device), time.time()
    step = Step(config, device, batches)
    loss = agreement.verify(name, step, batches)["loss"]  # five steps, in which graphs are recorded
    seconds = time.time() - began
    ms = statistics.median(timed([lambda: step(batches, LR)] * 11, device)[3:])
    reasons = {reason.splitlines()[0][:150]: count for reason, count in counters["graph_break"].items()}
    return {
        "ms": ms,
        "tokens_per_s": 1e3 * config.micro_batch_size * config.seq_len / ms,
        "loss": loss,
        "graph_breaks": sum(reasons.values()),
        "reasons": reasons,
        "graphs": counters["stats"].get("unique_graphs", 0),
        "compile_s": max(0.0, seconds - 5 * ms / 1e3) if config.compile else 0.0,
    }


def run_compile(options, device, argv):
    """Measure every row that options.json does not hold yet, as far as options.time_budget goes."""
    start, rows = time.time(), Rows(options.json, ("mode", "recipe", "model"), "benchmark_te.py", argv)
    base, agreement = make_config(SHAPES["guide"], device), Agreement()
    for recipe, mode, model in itertools.product(COMPILE_RECIPES, COMPILE_MODES, models.MODELS):
        row = {"mode": mode, "recipe": recipe, "model": model}
        if rows.has(row):
            continue
        changes = dict(model=model, fp8_recipe=recipe, cuda_graph="off") | COMPILE_MODES[mode]
        config = dataclasses.replace(base, **changes)
        if time.time() - start > options.time_budget:
            row["error"] = shown = "not run: time budget"
        else:
            free()  # also what a row that failed left behind
            try:
                row |= measure_compiled(f"{mode}, {recipe}, {model}", config, device, agreement)
                shown = (f"{row['tokens_per_s']:>9,.0f} tokens/s  {row['graph_breaks']} breaks, "
                         f"{row['graphs']} graphs, {row['compile_s']:.0f} s")
            except Exception as error:  # whatever the compiler raises is the result
                row["error"] = shown = error_text(error)
        rows.add(row)
        print(f"{mode:28} {recipe:8} {model:10} {shown}", flush=True)
