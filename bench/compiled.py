"""Time compiled training steps: fast_kernels' FP8, edits of it, plain BF16, torchao's and nanochat's FP8.

    NANOTE_ENGINE=fast NANOCHAT=FOLDER_OF_FP8_PY python bench/compiled.py --json results/compiled.json

All arms train the network of model_te_optimized.py in one torch.compile graph, with the optimizer, masters
and clipping of train.py, BF16 weights and the same random tokens. Each arm takes turns with `bf16`, each edit
with `fp8`; a ratio is that of their median steps. Field `fa4` of a row says whether FlashAttention 4 was
installed, which fast_kernels then uses.

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
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import dataclasses
import os
import tempfile
import types
from dataclasses import dataclass

import torch

from bench import step
from bench.edits import edited_file
from bench.measure import Agreement, Timing, attempt, measure_arm
from bench.plain_gpt import PlainGPT
from bench.report import Rows
from fast_kernels.attention import fa4_forward
from model_te_optimized import OptimizedConfig
from nanote.command import parse, require_at_least, run_command
from nanote.models import pick_device
from nanote.own_model import import_path

EDITS = sorted(path.stem for path in (ROOT / "examples" / "edits" / "compiled").glob("*.diff"))


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


@dataclass(frozen=True)
class Arm:
    """A training step. It takes turns with the arm `baseline`; its row has the speed over it as `ratio`."""

    model: str  # Of train.py.
    precision: str  # An arm of benchmark_te.py: bf16 or fp8.
    baseline: str = "bf16"
    ratio: str = "over_bf16"
    is_compiled: bool = True


OWN_ARMS = {
    "bf16": Arm(f"{__file__}:PlainGPT", "bf16"),
    "fp8": Arm("optimized", "fp8"),
    "graph": Arm("optimized", "fp8", is_compiled=False),
    "nanochat": Arm(f"{__file__}:Nanochat", "bf16"),
    "torchao-tensorwise": Arm(f"{__file__}:Tensorwise", "bf16"),
    "torchao-rowwise": Arm(f"{__file__}:Rowwise", "bf16"),
}
ARMS = (*OWN_ARMS, *EDITS)


@dataclass
class Options:
    shapes: tuple[str, ...] = ("124m-b32", "c2048", "c4096")  # Of benchmark_te.py.
    arms: tuple[str, ...] = ARMS
    mode: str = "default"  # torch.compile's mode.
    steps: int = 20  # Steps to time, of each.
    json: Path | None = None  # Write the rows here; those of other shapes and arms in the file stay.


def make_arms(names, folder: Path) -> dict[str, Arm]:
    """Return arms by name. Writes the model files of edits to a folder."""
    arms = {}
    for name in names:
        if name in OWN_ARMS:
            arms[name] = OWN_ARMS[name]
        else:
            file = edited_file("compiled", name, folder)
            arms[name] = Arm(f"{file}:OptimizedGPT2Model", "fp8", baseline="fp8", ratio="ratio")
    return arms


def config_of(arm: Arm, shape: str, mode: str, device):
    """Return train.py's options for an arm."""
    config = step.make_config(step.SHAPES[shape] | {"model": arm.model}, device)
    if not arm.is_compiled:
        return config  # in CUDA graphs
    return dataclasses.replace(
        config, compile=True, compile_fullgraph=True, compile_mode=mode, cuda_graph="off")


def measure_shape(shape, arms, options, device, rows):
    torch._dynamo.reset()
    agreement = Agreement()
    baselines = {}  # {arm: its training}
    for name, arm in arms.items():
        config = config_of(arm, shape, options.mode, device)
        timing = Timing(device, options.steps, warmup=4, phases=0, ratio=arm.ratio)
        figures, training = attempt(
            measure_arm, arm.precision, config, timing, baselines.get(arm.baseline),
            None if name in EDITS else agreement)  # an edit may compute something else
        row = {"shape": shape, "arm": name, "mode": options.mode, "fa4": fa4_forward is not None}
        rows.add(figures | row)
        if name in ("bf16", "fp8"):
            baselines[name] = training
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
        names = dict.fromkeys(("bf16", "fp8", *options.arms))  # each once
        arms = make_arms(names, Path(folder))
        for shape in options.shapes:
            measure_shape(shape, arms, options, device, rows)


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/compiled.py"))
