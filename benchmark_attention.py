"""Compare kernels of causal attention: their speed, and their error against float64.

    python benchmark_attention.py --json FILE               # in about a minute
    python benchmark_attention.py --shapes 4x4096x32x8x128

A shape is batch x length x heads x KV heads x head width. All attention is causal, in BF16 except where a
name says FP8. Before a kernel is timed, its output and gradients are compared with float64. One that is wrong
is marked WRONG, however fast it is; one that fails has the reason in place of its figures. What the times
mean:

- Medians of GPU time (CUDA events). The GPU is kept waiting while Python queues a pass, so launch overhead is
  not included: a small model that is bound by launches needs a CUDA graph or torch.compile, not another
  kernel.
- A pass is forward followed by backward, as in training, over several sets of inputs in turn, so that none
  is still in the L2 cache.
- Inputs have the layout (B, S, heads, D) of a QKV GEMM's output, in three tensors.

For attention inside a model: python benchmark_te.py --shapes 124m-b32 --arms fp8 fp8-sdpa fp8-te_attention
"""

if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from bench import attention
from bench.attention import HAS_GPU, Shape, row_of
from bench.report import check_output, write_report
from nanote import recipes
from nanote.command import parse, run_command

PACKAGES = ("transformer_engine", "transformer-engine", "flash_attn", "flash-attn", "flash_attn_4",
            "flash-attn-4", "triton")  # whose versions are reported
HEAD = f"{'':32}{'forward':>9}{'backward':>10}{'both ms':>9}{'TFLOP/s':>9}{'GiB':>8}{'error':>10}"


@dataclass
class Options:
    # Batch x length x heads x KV heads x head width.
    shapes: tuple[str, ...] = ("32x1024x12x12x64", "8x2048x12x12x64", "4x4096x32x32x128", "1x16384x32x8x128",
                               "8x2048x16x4x128") if HAS_GPU else ("2x128x4x2x32",)
    json: Path | None = None  # Write the figures here.


def kernel_rows(shape):
    """Yield a row per kernel."""
    query = (shape.batch, shape.length, shape.heads, shape.head_dim)
    key = (shape.batch, shape.length, shape.kv_heads, shape.head_dim)
    sets = attention.random_sets([query, key, key])
    inputs, grad = sets[0]
    expected = attention.reference(*inputs, grad)
    for name, make in attention.KERNELS.items():
        measure = partial(attention.measure_kernel, make, shape, sets, expected)
        yield row_of(measure, part="attention", shape=str(shape), name=name)


def main(argv=None):
    options = parse(Options, argv, "benchmark_attention.py", __doc__)
    shapes = [Shape.of(text, "--shapes") for text in options.shapes]
    check_output(options.json)
    start = time.time()
    rows = []
    versions = {}
    for package in metadata.distributions():
        if package.name in PACKAGES:
            versions[package.name] = package.version
    versions["cudnn"] = torch.backends.cudnn.version()
    figures = {"versions": versions, "limits": attention.LIMITS, "times_mean_something": HAS_GPU,
               "rows": rows}

    def add(row):
        rows.append(row)
        print(attention.text_of(row), flush=True)
        figures["seconds"] = round(time.time() - start)
        # after every row, so that an interrupted run keeps what it measured
        write_report("benchmark_attention.py", argv, figures, options.json)

    print(recipes.describe() + ("" if HAS_GPU else ": no GPU, so these times mean nothing; the errors do"))
    for shape in shapes:
        print(f"\nattention {shape}: batch x length x heads x KV heads x head width\n{HEAD}")
        for row in kernel_rows(shape):
            add(row)


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmark_attention.py"))
