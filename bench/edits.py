"""Time each edit of examples/edits beside the unedited model, in the training step of train.py, on a GPU.

    python bench/edits.py --model fast --json results/fast_edits.json
    NANOTE_ENGINE=fast python bench/edits.py --model optimized --json results/fast_edits.json
    NANOTE_ENGINE=te python bench/edits.py --model optimized --edits offload --json results/fast_edits.json

The edited model is a copy of the model file with the diff applied. Its step and the unedited model's take
turns, on the same random tokens. `ratio` is the unedited model's median step over the edit's;
`ratio_interval` is the 95 % interval of the median ratio of their steps.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import dataclasses
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Literal

from bench import step
from bench.measure import Timing, attempt, measure_arm
from bench.report import Rows
from nanote import recipes
from nanote.command import parse, require_at_least, run_command
from nanote.models import pick_device

FILES = {  # folder of diffs: the file that they change
    "fast": "model_te_fast.py", "optimized": "model_te_optimized.py", "compiled": "model_te_optimized.py"}
CLASSES = {"fast": "FastGPT2Model", "optimized": "OptimizedGPT2Model"}
OPTIONS = {"offload": {"cuda_graph": "off"}}  # of train.py; offloading allocates host memory in every step


@dataclass
class Options:
    model: Literal["fast", "optimized"] = "fast"  # The model file that is edited.
    edits: tuple[str, ...] = ()  # Names of diffs; none: all.
    shape: Literal[tuple(step.SHAPES)] = "124m-b32"  # A shape of benchmark_te.py.
    steps: int = 60  # Steps to time, of each.
    json: Path | None = None  # Write the rows here.


def edited_file(diffs: str, edit: str, folder: Path) -> Path:
    """Write a copy of a model file with the diff of an edit applied. diffs: a key of FILES."""
    path = folder / f"{edit}.py"
    shutil.copy(ROOT / FILES[diffs], path)
    diff = ROOT / "examples" / "edits" / diffs / f"{edit}.diff"
    subprocess.run(["patch", "-s", str(path), str(diff)], check=True)
    return path


def timed_edits(model: str) -> list[str]:
    """Return the edits of a model file that one GPU can run."""
    untimed = {"tensor_parallel"}  # it needs several GPUs
    if recipes.ENGINE == "fast":
        untimed.add("offload")  # fast_kernels has no get_cpu_offload_context
    diffs = sorted((ROOT / "examples" / "edits" / model).glob("*.diff"))
    return [diff.stem for diff in diffs if diff.stem not in untimed]


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/edits.py", __doc__)
    require_at_least(4, options, "steps")
    device = pick_device("auto")
    config = step.make_config(step.SHAPES[options.shape] | {"model": options.model}, device)
    rows = Rows(options.json, ["model", "edit", "shape"], "bench/edits.py", argv)
    timing = Timing(device, options.steps, phases=0, ratio="ratio")
    _, unedited = measure_arm("fp8", config, timing)
    engine = "fast" if options.model == "fast" else recipes.ENGINE
    common = {"model": options.model, "shape": options.shape, "engine": engine}
    with tempfile.TemporaryDirectory() as folder:
        for edit in options.edits or timed_edits(options.model):
            path = edited_file(options.model, edit, Path(folder))
            model = f"{path}:{CLASSES[options.model]}"
            changed = dataclasses.replace(config, model=model, **OPTIONS.get(edit, {}))
            figures, _ = attempt(measure_arm, "fp8", changed, timing, unedited)
            rows.add(figures | common | {"edit": edit})


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/edits.py"))
