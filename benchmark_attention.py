"""Compare attention kernels: alone, and inside a block, where the layout of their inputs changes the order.

    python benchmark_attention.py --json FILE --png FILE            # both parts, in about a minute
    python benchmark_attention.py --shapes 4x4096x32x8x128 --block-shapes     # one shape, no blocks

A shape is batch x length x heads x KV heads x head width.

All attention is causal, in BF16 except where a name says FP8. Before a kernel is timed, its output and
gradients are compared with float64. One that is wrong is marked WRONG, however fast it is; one that fails has
the reason in place of its figures. What the times mean:

- Medians of GPU time (CUDA events). The GPU is kept waiting while Python queues a pass, so launch overhead is
  not included: a small model that is bound by launches needs a CUDA graph or torch.compile, not another
  kernel.
- A pass is forward followed by backward, as in training, over several sets of inputs in turn, so that none
  is still in the L2 cache.
- Inputs have the layout (B, S, heads, D) of a QKV GEMM's output. Alone, queries, keys and values are three
  tensors. In a block they are slices of one, so most kernels need their gradients concatenated; "packed" is
  the kernel of the model that avoids it.
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from bench.attention import (
    BLOCK_ARMS,
    HAS_GPU,
    KERNELS,
    LIMITS,
    Shape,
    measure_block,
    measure_kernel,
    random_sets,
    reference,
    row_of,
)
from bench.attention_report import plot, text_of
from bench.report import check_folder, write_report
from nanote import cli, fp8

PACKAGES = ("transformer_engine", "transformer-engine", "flash_attn", "flash-attn", "flash_attn_4",
            "flash-attn-4", "triton")  # whose versions are reported


@dataclass
class Options:
    shapes: tuple[str, ...] = ("32x1024x12x12x64", "8x2048x12x12x64", "4x4096x32x32x128", "1x16384x32x8x128",
                               "8x2048x16x4x128") if HAS_GPU else ("2x128x4x2x32",)
    """Batch x length x heads x KV heads x head width."""
    block_shapes: tuple[str, ...] = ("32x1024x12x12x64", "4x4096x32x32x128") if HAS_GPU else ("2x64x4x4x16",)
    """The same, of blocks; without a value: no blocks."""
    json: Path | None = None  # Write the figures here.
    png: Path | None = None  # Draw them here.


def kernel_rows(shape):
    """Yield a row per kernel."""
    query, key = ((shape.batch, shape.length, heads, shape.head_dim)
                  for heads in (shape.heads, shape.kv_heads))
    sets = random_sets([query, key, key])
    expected = reference(*sets[0][0], sets[0][1])
    for name, make in KERNELS.items():
        measure = partial(measure_kernel, make, shape, sets, expected)
        yield row_of(measure, part="attention", shape=str(shape), name=name)


def block_rows(shape):
    """Yield a row per attention of the block and precision."""
    sets = random_sets([(shape.batch, shape.length, shape.heads * shape.head_dim)])
    for precision in ("bf16",) if fp8.unsupported_reason("delayed") else ("bf16", "fp8"):
        expected = []
        for arm in BLOCK_ARMS:
            measure = partial(measure_block, arm, precision, shape, sets, expected)
            name = f"{arm}, {precision}"
            yield row_of(measure, part="block", shape=str(shape), precision=precision, name=name)


def main(argv=None):
    description = __doc__.partition("\n\nAll attention")[0]
    options = cli.parse(Options, argv, prog="benchmark_attention.py", description=description)
    shapes = [Shape.of(text, "--shapes") for text in options.shapes]
    block_shapes = [Shape.of(text, "--block-shapes") for text in options.block_shapes]
    check_folder(options.json, options.png)
    start, rows = time.time(), []
    versions = {d.name: d.version for d in metadata.distributions() if d.name in PACKAGES}
    versions["cudnn"] = torch.backends.cudnn.version()
    figures = {"versions": versions, "limits": LIMITS, "times_mean_something": HAS_GPU, "rows": rows}

    def add(row):
        rows.append(row)
        print(text_of(row), flush=True)
        figures["seconds"] = round(time.time() - start)
        # after every row, so that an interrupted run keeps what it measured
        write_report("benchmark_attention.py", argv, figures, options.json)

    print(fp8.describe() + ("" if HAS_GPU else ": no GPU, so these times mean nothing; the errors do"))
    head = f"{'':32}{'forward':>9}{'backward':>10}{'both ms':>9}{'TFLOP/s':>9}{'GiB':>8}{'error':>10}"
    for shape in shapes:
        print(f"\nattention {shape}: batch x length x heads x KV heads x head width\n{head}")
        for row in kernel_rows(shape):
            add(row)
    for shape in block_shapes:
        print(f"\nnorm + QKV, attention, projection {shape}; error: against sdpa")
        print(head.replace("TFLOP/s", " " * 7))
        for row in block_rows(shape):
            add(row)
    if options.png:
        plot({"machine": fp8.describe(), **figures}, options.png)


if __name__ == "__main__":
    sys.exit(cli.run(main, "benchmark_attention.py"))
