"""Time the training steps of two checkouts of this kit in turns, on one GPU or on two.

    python bench/turns.py OLD NEW --json results/turns.json --cases fp8:124m-b32 loops ddp:124m-b32

A case is ARM:SHAPE of benchmark_te.py, LAYOUT:SHAPE on two GPUs (ddp or fsdp), loops (those of README, as
bench/minimal.py makes them), or host (the same with so few tokens that their times are Python's).

Each checkout gets one process per GPU, which runs in the checkout and imports from it. It makes the step and
warms up; then the two take turns in an order that alternates. A turn's figure is its median step. Printed are
the medians over the turns, and the median of the ratios of speed, the second checkout over the first, with
its range over the turns. The exit code is 1 if a case has an error.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import argparse
import json
import os
import socket
import statistics
import subprocess

import torch

from bench.report import write_report
from nanote.command import run_command

TURNS = 5
STEPS = 30  # in each turn


class Side:
    """The processes of one checkout: one, or one for each of two GPUs."""

    def __init__(self, tree: Path, case: str):
        self.tree = tree
        self.workers = []
        count = 2 if case.startswith(("ddp:", "fsdp:")) else 1
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(count):
            environment = dict(os.environ)
            environment["PYTHONPATH"] = f"{tree.resolve()}:{environment.get('PYTHONPATH', '')}"
            if count > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                                "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            command = [sys.executable, str(ROOT / "bench/turns_worker.py"), case, str(STEPS)]
            self.workers.append(subprocess.Popen(
                command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def answers(self) -> list[dict]:
        """Return what each process prints next."""
        lines = [worker.stdout.readline() for worker in self.workers]
        if not all(lines):
            raise OSError(f"{self.tree}: a process ended; its message is above")
        return [json.loads(line) for line in lines]

    def run_turn(self) -> dict:
        """Run a turn. Return {function: ms of its median step, on the slowest GPU}."""
        for worker in self.workers:
            worker.stdin.write("turn\n")
            worker.stdin.flush()
        answers = self.answers()
        return {name: max(statistics.median(answer[name]) for answer in answers) for name in answers[0]}

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait()


def compare(case: str, trees: list[Path]) -> list[dict]:
    """Run both checkouts in turns. Return a row for each function of the case."""
    old, new = [Side(tree, case) for tree in trees]
    old_turns = []
    new_turns = []
    try:
        # rank 0's; each answers when it is warm
        old_losses = old.answers()[0]
        new_losses = new.answers()[0]
        for number in range(TURNS):
            if number % 2 == 0:
                old_turns.append(old.run_turn())
                new_turns.append(new.run_turn())
            else:
                new_turns.append(new.run_turn())
                old_turns.append(old.run_turn())
    finally:
        old.end()
        new.end()
    rows = []
    common = [name for name in new_losses if name in old_losses]  # an older checkout has fewer loops
    for name in common:
        old_ms = [result[name] for result in old_turns]
        new_ms = [result[name] for result in new_turns]
        ratios = [old_time / new_time for old_time, new_time in zip(old_ms, new_ms)]
        rows.append({
            "case": case, "function": name, "ms": [old_ms, new_ms],
            "median_ms": [statistics.median(old_ms), statistics.median(new_ms)],
            "ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)],
            "loss": [old_losses[name], new_losses[name]]})
    return rows


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--commits", nargs=2, help="of the two checkouts, for the JSON")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here; run it where there is one")
    rows = []
    for case in options.cases:
        try:
            rows += compare(case, options.trees)
        except OSError as error:
            rows.append({"case": case, "error": str(error)})
        write_report("bench/turns.py", argv, {"commits": options.commits, "rows": rows}, options.json)
    for row in rows:
        if "error" in row:
            print(row["case"], row["error"])
            continue
        old, new = row["median_ms"]
        low, high = row["ratio_range"]
        print(f"{row['case']:16} {row['function']:16} {old:8.3f} -> {new:8.3f} ms, "
              f"speed {row['ratio']:.4f} [{low:.4f}, {high:.4f}]  "
              f"loss {row['loss'][0]:.4f} {row['loss'][1]:.4f}")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/turns.py"))
