"""Two maps of benchmark_te.py, each of many rows that are measured as far as --time-budget goes.

- --sweep: where FP8 pays, against BF16 over width and tokens per step.
- --compile: torch.compile's modes on the five models, by recipe. Each row is one training step, beside the
  same step uncompiled and as a CUDA graph: its speed, the graph breaks and their reasons, the number of
  graphs and the seconds of compiling. An error of the compiler is a result like any other.
"""

import dataclasses
import itertools
import statistics
import time

import torch

from bench.measure import LR, Agreement, attempt, error_text
from bench.report import Rows
from bench.step import SHAPES, Step, free, make_batches, make_config
from bench.timing import timed
from nanote import models

WIDTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)  # per step
STEPS = 8  # timed, of each arm
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


def measure_rows(measure, keys: dict, options, argv):
    """Call measure(*values) -> figures for each combination of the values in `keys`.

    Skips those that options.json holds already, and marks those for which options.time_budget has no time.
    """
    start, rows = time.time(), Rows(options.json, tuple(keys), "benchmark_te.py", argv)
    for values in itertools.product(*keys.values()):
        row = dict(zip(keys, values))
        if rows.has(row):
            continue
        late = time.time() - start > options.time_budget
        row |= {"error": "not run: time budget"} if late else measure(*values)
        rows.add(row)
        shown = [f"{name} {row[name]:,.4g}" for name in ("eager", "graph", "ms", "graph_breaks", "graphs",
                                                         "compile_s") if row.get(name) is not None]
        print(*(f"{value:<12}" for value in values), *shown, row.get("error", ""), flush=True)


def run_sweep(options, device, argv):
    """Measure FP8 and BF16 at each width and number of tokens per step."""
    def measure(width, tokens):
        # two layers and a small vocabulary, so that the blocks dominate
        shape = dict(n_layer=2, n_embd=width, n_head=width // 64, micro_batch_size=tokens // 1024,
                     seq_len=1024, vocab_size=1024)
        config, agreement, row = make_config(shape, device), Agreement(), {}
        for arm in ("bf16-eager", "fp8-eager", "bf16", "fp8"):
            figures, _ = attempt(arm, config, device, STEPS, None, agreement, warmup=3, phases=0)
            row[f"{arm}_ms"] = figures.get("ms")
            if "error" in figures:
                row["error"] = figures["error"]
        for name, suffix in (("eager", "-eager"), ("graph", "")):
            fp8_ms, bf16_ms = row[f"fp8{suffix}_ms"], row[f"bf16{suffix}_ms"]
            row[name] = bf16_ms / fp8_ms if fp8_ms and bf16_ms else None
        return row

    count = None if device.type == "cuda" else 2
    measure_rows(measure, {"width": WIDTHS[:count], "tokens": TOKENS[:count]}, options, argv)


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
    """Measure each mode of torch.compile, recipe and model."""
    base, agreement = make_config(SHAPES["guide"], device), Agreement()

    def measure(recipe, mode, model):
        changes = dict(model=model, fp8_recipe=recipe, cuda_graph="off") | COMPILE_MODES[mode]
        free()  # also what a row that failed left behind
        try:
            config = dataclasses.replace(base, **changes)
            return measure_compiled(f"{mode}, {recipe}, {model}", config, device, agreement)
        except Exception as error:  # whatever the compiler raises is the result
            return {"error": error_text(error)}

    keys = {"recipe": COMPILE_RECIPES, "mode": COMPILE_MODES, "model": models.MODELS}
    measure_rows(measure, keys, options, argv)
