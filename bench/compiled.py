"""Time compiled training steps: fast_kernels' FP8, edits of it, plain BF16, torchao's and nanochat's FP8.

    NANOTE_ENGINE=fast NANOCHAT=FOLDER_OF_FP8_PY python bench/compiled.py --json results/compiled.json

All arms train the network of model_te_optimized.py in one torch.compile graph, with the optimizer, masters
and clipping of train.py, BF16 weights and the same random tokens. Each arm takes turns with `bf16`, each edit
with `fp8`; a ratio is the median over their steps, with its 95 % interval. Field `fa4` of a row says whether
FlashAttention 4 was installed, which fast_kernels then uses.

- bf16       bench/plain_gpt.py: nn.Linear, PyTorch's attention and cross-entropy
- fp8        model_te_optimized.py on fast_kernels, delayed scaling; edits: examples/edits/compiled
- graph      model_te_optimized.py on fast_kernels, uncompiled, in CUDA graphs
- torchao-tensorwise, torchao-rowwise     bf16 with the blocks' layers converted by torchao, as its README
             recommends: all linear layers but the last
- nanochat   bf16 converted by nanochat's fp8.py, as its training script does: all linear layers
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_interrupt  # Ctrl-C while importing prints no traceback

import dataclasses
import os
import tempfile
import types
from dataclasses import dataclass

import torch

from bench import step
from bench.edits import edited_file
from bench.measure import Agreement, Timing, attempt
from bench.plain_gpt import PlainGPT
from bench.report import Rows
from fast_kernels.attention import fa4_forward
from model_te_optimized import OptimizedConfig
from nanote.command import parse, require_at_least, run_command
from nanote.models import pick_device
from nanote.own_model import import_path

EDITS = sorted(path.stem for path in (ROOT / "examples" / "edits" / "compiled").glob("*.diff"))
ARMS = ("bf16", "fp8", "graph", "nanochat", "torchao-tensorwise", "torchao-rowwise", *EDITS)


class Nanochat(PlainGPT):
    def __init__(self, config: OptimizedConfig):
        super().__init__(config)
        nanochat = types.ModuleType("nanochat.common")  # of which fp8.py uses one name
        nanochat.COMPUTE_DTYPE = torch.bfloat16
        sys.modules |= {"nanochat": nanochat, "nanochat.common": nanochat}
        fp8 = import_path(Path(os.environ["NANOCHAT"]) / "fp8.py", "nanochat_fp8")
        fp8.convert_to_float8_training(self)


class Tensorwise(PlainGPT):
    recipe = "tensorwise"

    def __init__(self, config: OptimizedConfig):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        super().__init__(config)
        convert_to_float8_training(
            self, config=Float8LinearConfig.from_recipe_name(self.recipe),
            module_filter_fn=lambda module, name: name != "lm_head")


class Rowwise(Tensorwise):
    recipe = "rowwise"


CLASSES = {  # of this file, by arm
    "bf16": "PlainGPT", "nanochat": "Nanochat", "torchao-tensorwise": "Tensorwise",
    "torchao-rowwise": "Rowwise"}


@dataclass
class Options:
    shapes: tuple[str, ...] = ("124m-b32", "c2048", "c4096")  # Of benchmark_te.py.
    arms: tuple[str, ...] = ARMS
    mode: str = "default"  # torch.compile's mode.
    steps: int = 20  # Steps to time, of each.
    json: Path | None = None  # Write the rows here; those of other shapes and arms in the file stay.


def arm_model(arm: str, folder: Path) -> str:
    """Return the --model argument of an arm: a name, or FILE:CLASS."""
    if arm in CLASSES:
        return f"{Path(__file__)}:{CLASSES[arm]}"
    if arm in EDITS:
        return f"{edited_file('compiled', arm, folder)}:OptimizedGPT2Model"
    return "optimized"


def measure_shape(shape, options, device, rows, folder):
    torch._dynamo.reset()
    config = dataclasses.replace(
        step.make_config(step.SHAPES[shape], device), compile=True, compile_fullgraph=True, cuda_graph="off",
        compile_mode=options.mode)
    timing = Timing(device, options.steps, warmup=4, phases=0, ratio="over_bf16")
    timing_of_edits = dataclasses.replace(timing, ratio="ratio")
    agreement = Agreement()
    baselines = {}  # {arm: its training}
    for arm in dict.fromkeys(("bf16", "fp8", *options.arms)):  # each once
        changed = dataclasses.replace(config, model=arm_model(arm, folder))
        if arm == "graph":
            changed = dataclasses.replace(
                changed, compile=False, compile_fullgraph=False, compile_mode="default", cuda_graph="auto")
        kind = "bf16" if arm in CLASSES else "fp8"
        if arm in EDITS:
            figures, training = attempt(kind, changed, timing_of_edits, baselines.get("fp8"))
        else:
            figures, training = attempt(kind, changed, timing, baselines.get("bf16"), agreement)
        rows.add(figures | {"shape": shape, "arm": arm, "mode": options.mode, "fa4": fa4_forward is not None})
        if arm in ("bf16", "fp8"):
            baselines[arm] = training
        del training
    baselines.clear()
    step.free()


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/compiled.py", __doc__)
    require_at_least(4, options, "steps")
    for arm in options.arms:
        if arm not in ARMS:
            raise ValueError(f"--arms {arm}: unknown; use {', '.join(ARMS)}")
    device = pick_device("auto")
    rows = Rows(options.json, ["shape", "arm", "mode", "fa4"], "bench/compiled.py", argv)
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            measure_shape(shape, options, device, rows, Path(folder))


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/compiled.py"))
