"""Time each edit of examples/edits beside the unedited model, in the training step of train.py, on a GPU.

    python bench/edits.py --model fast --json results/fast_edits.json
    NANOTE_ENGINE=fast python bench/edits.py --model optimized --json results/fast_edits.json

The edited model is a copy of the model file with the diff applied. Its step and the unedited model's take
turns, on the same random tokens; `ratio` is the speed of the edit over the unedited model: the median over
turns with its 95 % interval.
"""
import dataclasses
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import step
from bench.report import Rows
from bench.timing import interval_of_median, timed
from nanote import recipes
from nanote.config import parse, run_command

CLASSES = {"fast": "FastGPT2Model", "optimized": "OptimizedGPT2Model"}
LARGEST_LOSS = 11.5  # of random tokens, after the warm-up


@dataclass
class Options:
    model: Literal["fast", "optimized"] = "fast"  # The model file that is edited.
    edits: tuple[str, ...] = ()  # Names of diffs; none: all.
    shape: Literal[tuple(step.SHAPES)] = "124m-b32"  # A shape of benchmark_te.py.
    turns: int = 5
    steps: int = 15  # Steps to time, in each turn.
    json: Path | None = None  # Write the rows here.


def edited_file(model: str, edit: str, folder: Path) -> Path:
    """Write a copy of the model file with the diff applied."""
    path = folder / f"{edit}.py"
    shutil.copy(ROOT / f"model_te_{model}.py", path)
    diff = ROOT / "examples" / "edits" / model / f"{edit}.diff"
    subprocess.run(["patch", "-s", str(path), str(diff)], check=True)
    return path


def warm(name: str, config, device, batches):
    """Return a function that trains one step, after steps that compile, choose algorithms and capture."""
    training = step.Step(dataclasses.replace(config, model=name), device, batches)
    for _ in range(8):
        loss, norm = training(batches, 1e-5)
    if not (0 < loss.item() < LARGEST_LOSS and norm.isfinite()):
        raise ValueError(f"{name}: loss {loss.item()}, norm {norm.item()} after the warm-up: nothing timed")
    return lambda: training(batches, 1e-5)


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/edits.py", __doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = step.make_config(step.SHAPES[options.shape], device)
    batches, rows = step.make_batches(config, device), Rows(options.json, ["model", "edit", "shape"],
                                                           "bench/edits.py", argv)
    unedited = warm(options.model, config, device, batches)
    diffs = sorted((ROOT / "examples" / "edits" / options.model).glob("*.diff"))
    with tempfile.TemporaryDirectory() as folder:
        for edit in options.edits or [path.stem for path in diffs if path.stem != "tensor_parallel"]:
            path = edited_file(options.model, edit, Path(folder))
            changed = warm(f"{path}:{CLASSES[options.model]}", config, device, batches)
            ms = {"unedited": [], "edited": []}
            for _ in range(options.turns):
                for name, function in (("unedited", unedited), ("edited", changed)):
                    ms[name].append(statistics.median(timed([function] * options.steps, device)))
            ratios = [before / after for before, after in zip(*ms.values())]
            engine = "fast" if options.model == "fast" else recipes.ENGINE
            row = {"model": options.model, "edit": edit, "shape": options.shape, "engine": engine,
                   "unedited_ms": statistics.median(ms["unedited"]), "ms": statistics.median(ms["edited"]),
                   "ratio": statistics.median(ratios), "ratio_interval": interval_of_median(ratios)}
            rows.add(row)
            print(f"{options.model} {edit:16} {row['ms']:8.2f} ms, unedited {row['unedited_ms']:8.2f} ms: "
                  f"{row['ratio']:.3f} [{row['ratio_interval'][0]:.3f}, {row['ratio_interval'][1]:.3f}]",
                  flush=True)
            del changed
            step.free()


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/edits.py"))
