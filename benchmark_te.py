"""Measure training speed on random tokens: FP8 against BF16, and this kit against plain PyTorch.

    python benchmark_te.py                                # BF16, E4M3 and HYBRID at 4 layers of 768, 8 x 512
    python benchmark_te.py --shape 12 768 12 32 1024      # at your layers, width, heads, batch, sequence
    python benchmark_te.py --shapes all --json results/speed.json     # the first table of guide/measured.md
    python benchmark_te.py --sweep | --stack | --compile  # where FP8 pays; what each part adds; torch.compile

The first two print one table of three models: forward, backward, their total and FP8's speed-up. Those passes
are launched from Python, as in a training loop of your own. The training step beside them is train.py's, a
CUDA graph where that is possible. MXFP8 and NVFP4 are in the table on a GPU that has them
(Blackwell).

Arms:
    plain                   bench/plain_gpt.py in float32 under BF16 autocast, compiled, PyTorch's fused AdamW
    plain-eager             not compiled
    plain-by-hand           not compiled, and without SDPA
    plain-graph             compiled with mode="reduce-overhead"
    bf16                    as train.py trains, on Hopper model_te_fast.py, without FP8
    fp8                     the same with delayed scaling, HYBRID

Suffixes of bf16 and fp8, such as fp8-current-eager (nanoGPT itself: python bench/nanogpt.py PATH):

    -current -block         --fp8-recipe; -mxfp8 and -nvfp4 need Blackwell
    -e4m3 -hybrid           --fp8-format, as in fp8-block-hybrid
    -bf16_head              --no-fp8-lm-head
    -skip_first1            --fp8-skip-first 1; -skip_last1: --fp8-skip-last 1
    -te_modules             --model optimized; -fused -te -custom -advanced: the other files
    -sdpa -te_attention     --attention
    -libraries              -te_modules and -sdpa
    -eager                  --cuda-graph off
    -accum4                 --grad-accum 4
    -muon                   --optimizer muon
    -bf16_moments           --moment-dtype bfloat16
    -float32_masters        --no-param-remainders
    -loss4                  --loss-chunks 4
    -checkpointing          --gradient-checkpointing

The baseline, plain, stays in memory, and an arm's steps are timed in turns with its steps: `ratio_to_plain`
comes from these. Times are medians between CUDA events. Before anything is timed, an arm's loss, gradient
norm and progress are checked against the first arm's.
"""

if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bench.report import check_output
from bench.speed import run_compile, run_formats, run_shapes, run_stack, run_sweep
from bench.step import SHAPES, arm_config
from nanote import recipes
from nanote.command import parse, run_command
from nanote.config import PRESETS, TrainConfig
from nanote.models import pick_device

MODES = {"shape": run_formats, "shapes": run_shapes, "preset": run_shapes, "sweep": run_sweep,
         "stack": run_stack, "compile": run_compile}


@dataclass
class Options:
    shapes: tuple[str, ...] = ()  # Measure these shapes, or all, against arm plain.
    # gpt2: LayerNorm, GELU, learned positions, biases. modern: RMSNorm, RoPE, QK-norm, GQA, SwiGLU, no
    # biases. By default gpt2, and for three shapes modern too.
    blocks: tuple[Literal["gpt2", "modern"], ...] = ()
    arms: tuple[str, ...] = ()  # By default all of the table or block; for llama3-8b, fp8 and fp8-accum4.
    steps: int = 20  # Steps to time, of each arm.
    json: Path | None = None  # Write the rows here; those of other shapes, blocks and arms in the file stay.
    preset: str | None = None  # A preset of train.py as the shape, without gradient accumulation.
    # The shape of the table of formats: layers, width, heads, batch, sequence; default: 4 768 12 8 512.
    shape: tuple[int, int, int, int, int] | None = None
    sweep: bool = False  # FP8 against BF16 over width and tokens per step.
    stack: bool = False  # From plain PyTorch to this kit, change by change, at the first of --shapes.
    compile: bool = False  # torch.compile's modes on the five models.
    # Seconds for --sweep and --compile. What does not fit is marked "not run"; run the same command again to
    # continue, since these two skip the rows that --json already holds.
    time_budget: int = 170


def check_shape(shape):
    _, width, heads, batch, sequence = shape
    if min(shape) < 1 or width % heads or batch * sequence % 16:
        raise ValueError(f"--shape {' '.join(map(str, shape))}: must be layers width heads batch sequence; "
                         "the width a multiple of the heads, batch x sequence of 16; 4 768 12 8 512 works")


def pick_mode(options) -> str:
    """Return the key of MODES that the options ask for. ValueError for two."""
    modes = [name for name in MODES if getattr(options, name)]
    if options.stack and options.shapes:  # --stack measures at the first of them
        modes.remove("shapes")
    if len(modes) > 1:
        raise ValueError(f"--{modes[0]} and --{modes[1]}: one at a time")
    return modes[0] if modes else "shape"


def check_options(options, mode: str) -> None:
    """Raise ValueError for an option that is wrong, or of no use to the mode."""
    known = [*SHAPES] if options.stack else [*SHAPES, "all"]
    for name in options.shapes:
        if name not in known:
            raise ValueError(f"--shapes {name!r}: unknown; use {', '.join(known)}")
    if options.blocks and mode == "shape":
        raise ValueError("--blocks: the table of formats has none; add --shapes guide, for example")
    if options.preset and options.preset not in PRESETS:
        raise ValueError(f"--preset {options.preset!r}: unknown; use {', '.join(PRESETS)}")
    if options.steps < 4:
        raise ValueError(f"--steps {options.steps}: must be 4 or more; 20 works")
    if options.shape:
        check_shape(options.shape)
    for arm in options.arms:
        arm_config(arm, TrainConfig())
    check_output(options.json)


def main(argv=None) -> int:
    options = parse(Options, argv, "benchmark_te.py", __doc__)
    mode = pick_mode(options)
    check_options(options, mode)
    device = pick_device("auto")
    if device.type == "cpu":
        recipes.check_cpu()
    print(f"{recipes.describe()}, torch {torch.__version__}")
    if device.type != "cuda":
        print("no GPU: tiny shapes through te_reference, and the times mean nothing")
    elif recipes.IS_REFERENCE:
        print("te_reference in place of Transformer Engine: the times mean nothing")
    else:
        torch.cuda.set_device(device)
    return MODES[mode](options, device, argv) or 0


if __name__ == "__main__":
    sys.exit(run_command(main, "benchmark_te.py"))
