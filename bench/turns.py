"""Compare the training step of two checkouts of this kit, or of two environments, on one GPU, in turns.

    python bench/turns.py --trees ../old . --variables "" "NANOTE_ENGINE=fast" --shapes 124m-b32 --json x.json

Each tree has a process of its own, whose working directory and first import folder are that tree. It makes
the step of train.py with that tree's parts and warms up. Then the two take turns of --steps steps, in an
order that alternates; the median step is a turn's figure. Printed are the median over the turns with its 95 %
interval, and the median of the ratios of speed, the last tree over the first, paired by turn. Version 0.1 has
the step in bench/arms.py, later ones in bench/step.py.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.measure import interval_of_median
from bench.report import check_output, write_report
from nanote.config import parse, run_command

WORKER = """
import json, sys, torch
try:
    from bench import step as parts
    from bench.measure import timed
except ImportError:  # version 0.1
    from bench import arms as parts
    from nanote.profiling import timed
answers, sys.stdout = sys.stdout, sys.stderr
arm, shape, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
import dataclasses
config = parts.arm_config(arm.replace("-muon", ""), parts.make_config(parts.SHAPES[shape], device))
config = dataclasses.replace(config, optimizer="muon" if "muon" in arm else "adamw")
batches = parts.make_batches(config, device)
if hasattr(parts, "Step"):
    step = parts.Step(config, device, batches)
else:
    step = parts.build_te(config, device, batches[0])
for _ in range(10 if device.type == "cuda" else 2):
    loss, norm = step(batches, 1e-5)
figures = {"loss": loss.item(), "norm": norm.item(), "kernels": getattr(step, "kernels", "")}
figures["te"] = sys.modules["transformer_engine"].__version__ if "transformer_engine" in sys.modules else None
figures["fa4"] = "flash_attn.cute" in sys.modules
print(json.dumps(figures), file=answers, flush=True)
for line in sys.stdin:
    figures["times"] = timed([lambda: step(batches, 1e-5)] * count, device)
    figures["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None
    print(json.dumps(figures), file=answers, flush=True)
"""


@dataclass
class Options:
    trees: tuple[Path, Path]  # Two checkouts, the first of which is the baseline.
    variables: tuple[str, str] = ("", "")  # NAME=VALUE …, of each tree's process.
    shapes: tuple[str, ...] = ("124m-b32", "350m-b16", "c4096")  # Shapes of benchmark_te.py.
    arms: tuple[str, ...] = ("fp8",)  # Arms of benchmark_te.py, such as bf16 or fp8-accum4.
    turns: int = 5
    steps: int = 40  # Steps to time, in each turn.
    python: Path = Path(sys.executable)  # Interpreter of both trees.
    json: Path | None = None  # Write the figures here.


def start(tree: Path, variables: str, arm: str, shape: str, options) -> subprocess.Popen:
    """Start the process of a tree."""
    environment = os.environ | dict(variable.split("=", 1) for variable in variables.split())
    environment["PYTHONPATH"] = f"{tree.resolve()}:{environment.get('PYTHONPATH', '')}"
    command = [str(options.python), "-c", WORKER, arm, shape, str(options.steps)]
    log = tempfile.TemporaryFile("w+")
    worker = subprocess.Popen(command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=log)
    worker.name, worker.log = f"{tree}, {arm} at {shape}", log
    return worker


def answer(worker: subprocess.Popen) -> dict:
    """Return what a process prints next; OSError with the last line of its stderr if it has ended."""
    line = worker.stdout.readline()
    if not line:
        worker.log.seek(0)
        raise OSError(f"{worker.name}: {(worker.log.read().strip().splitlines() or ['no message'])[-1]}")
    return json.loads(line)


def compare(arm: str, shape: str, options) -> dict:
    """Run both trees in turns at one shape -> a row."""
    sides = list(zip(options.trees, options.variables))
    workers = {side: start(*side, arm, shape, options) for side in sides}
    found = {side: [] for side in sides}
    try:
        for worker in workers.values():  # both are warm before the first turn
            answer(worker)
        for turn in range(options.turns):
            for side in sides if turn % 2 == 0 else reversed(sides):
                workers[side].stdin.write("turn\n")
                workers[side].stdin.flush()
                found[side].append(answer(workers[side]))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    ms = [[statistics.median(run["times"]) for run in runs] for runs in found.values()]
    ratios = [first / last for first, last in zip(*ms)]
    return {
        "shape": shape, "arm": arm, "ms": ms, "median_ms": [statistics.median(values) for values in ms],
        "ms_interval": [interval_of_median(values) for values in ms], "ratio": statistics.median(ratios),
        "ratio_interval": interval_of_median(ratios),
        "loss": [runs[-1]["loss"] for runs in found.values()],
        **{name: [runs[-1][name] for runs in found.values()] for name in ("te", "fa4", "kernels")},
        "grad_norm": [runs[-1]["norm"] for runs in found.values()],
        "peak_reserved_gib": [runs[-1]["peak_reserved_gib"] for runs in found.values()],
    }


def describe(row, trees) -> str:
    lines = [f"{row['shape']} {row['arm']}"]
    for number, tree in enumerate(trees):
        low, high = row["ms_interval"][number]
        lines.append(f"  {str(tree):24} {row['median_ms'][number]:8.3f} ms [{low:.3f}, {high:.3f}]  "
                     f"loss {row['loss'][number]:.4f}  norm {row['grad_norm'][number]:.4f}")
    low, high = row["ratio_interval"]
    return "\n".join([*lines, f"  speed, last over first: {row['ratio']:.4f} [{low:.4f}, {high:.4f}]"])


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/turns.py", __doc__)
    check_output(options.json)
    for tree in options.trees:
        if not (tree / "nanote").is_dir():
            raise ValueError(f"--trees {tree}: is no checkout of this kit, which has a folder nanote")
    rows = []
    for shape, arm in itertools.product(options.shapes, options.arms):
        rows.append(compare(arm, shape, options))
        print(describe(rows[-1], options.trees), flush=True)
        # after every row, so that an interrupted run keeps what it measured
        figures = {"trees": list(map(str, options.trees)), "variables": options.variables, "rows": rows}
        write_report("bench/turns.py", argv, figures, options.json)


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/turns.py"))
