"""Measure what each memory switch of train.py costs and saves, at GPT-2 124M and width 4,096, on a GPU.

    python bench/memory.py --json results/memory.json

Each switch is measured alone against the defaults, in a separate process, so that the memory of the one
before is gone. A row has milliseconds per step (median and slowest of 20, `defaults_ms` those of the
defaults), the peak of allocated memory, and the peak of memory that the allocator reserved on the GPU, which
is what decides about an out-of-memory error.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import measure, step
from bench.report import Rows
from nanote import recipes
from nanote.config import parse, run_command

SWITCHES = {  # name -> options of train.py
    "defaults": {},
    "no CUDA graph": {"cuda_graph": "off"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "activations of half the blocks to the host": {"offload_activations": "half"},
    "BF16 moments": {"moment_dtype": "bfloat16"},
    "float32 masters": {"param_remainders": False},
    "weights in FP8": {"fp8_param": True},
    "loss in 4 chunks": {"loss_chunks": 4},
    "Transformer Engine's modules": {"model": "optimized"},
}


@dataclass
class Options:
    shapes: tuple[Literal[tuple(step.SHAPES)], ...] = ("124m-b32", "c4096")  # Shapes of benchmark_te.py.
    switches: tuple[Literal[tuple(SWITCHES)], ...] = tuple(SWITCHES)
    json: Path | None = None  # Write the rows here; those of other shapes and switches in the file stay.


def measure_switch(shape, switch) -> dict:
    """Measure one switch in this process -> its row."""
    device = torch.device("cuda")
    config = step.make_config(step.SHAPES[shape] | SWITCHES[switch], device)
    if config.offload_activations == "half":
        config.offload_activations = config.n_layer // 2
    figures = measure.attempt("fp8", config, device, 20, phases=0)[0]
    return figures | {"shape": shape, "switch": switch,
                      "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30}


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/memory.py", __doc__)
    rows = Rows(options.json, ("shape", "switch"), "bench/memory.py", argv)
    if recipes.IS_REFERENCE:
        raise ValueError("memory is measured on a GPU with Transformer Engine, and there is none here")
    for shape in options.shapes:
        for switch in dict.fromkeys(["defaults", *options.switches]):  # times are compared within a run
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                row = process.submit(measure_switch, shape, switch).result()
            if switch == "defaults":
                defaults_ms = row.get("ms")
            rows.add(row | {"defaults_ms": defaults_ms})


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/memory.py"))
