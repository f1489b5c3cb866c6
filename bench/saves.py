"""How much time do checkpoints cost that are written in the background?

    python data.py stdlib
    python bench/saves.py --gpus 2 --layouts ddp fsdp    # three minutes each; writes results/saves.json

GPT-2 350M, 16 x 1,024 tokens a step and GPU, 1,600 steps, a checkpoint at steps 400, 800 and 1,200. The 200
steps from each on are compared with the mean of the 200 before and the 200 after them, so that a drift of the
clocks does not count. `cost_percent` is the median of the differences, `seconds_per_save`, over the time of
200 steps. For `seconds_waited` of it training stands still, while state is collected and copied; else steps
may be slower, while the copy is written. Should that take longer than 200 steps, the cost is underestimated:
`interval_ms`, the milliseconds a step of each log interval, shows it.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.report import Rows, check_folder, check_more
from nanote import cli
from nanote.config import read_options
from nanote.metrics import read_metrics

LOG, SAVE, TIMES = 10, 200, 3  # steps, steps, saves
OPTIONS = (f"--preset gpt2-350m --micro-batch-size 16 --grad-accum 1 --warmup-steps 50 --eval-interval 0 "
           f"--log-interval {LOG} --checkpoint-interval {2 * SAVE} --keep-checkpoints 1 --eval-tokens 65536 "
           f"--max-steps {2 * (1 + TIMES) * SAVE}")
FIXED = ("--max-steps", "--log-interval", "--checkpoint-interval", "--keep-checkpoints", "--eval-interval",
         "--out-dir", "--parallel")  # not for --more: the figures rely on them


@dataclass
class Options:
    gpus: tuple[int, ...] = (2,)
    layouts: tuple[str, ...] = ("ddp",)  # Values of train.py's --parallel.
    data: str = "data/stdlib"  # A folder of token files.
    out_dir: Path | None = None  # Where the checkpoints go; default: a temporary folder.
    more: str = ""  # More options of train.py: --more="--preset gpt2-124m".
    json: Path = ROOT / "results/saves.json"  # Write the rows here.


def options_of(layout: str, options: Options, folder: Path) -> list[str]:
    """Return the options of train.py."""
    return [*OPTIONS.split(), "--data", options.data, "--out-dir", str(folder), "--parallel", layout,
            *options.more.split()]


def check_options(options: Options) -> None:
    """ValueError for options that train.py refuses, or that the measurement sets itself."""
    check_folder(options.json)
    for gpus in options.gpus:
        if gpus < 1:
            raise ValueError(f"--gpus {gpus}: must be at least 1, such as 2")
    check_more(options.more, FIXED)
    for layout in options.layouts:
        read_options(options_of(layout, options, Path("run")))


def train(gpus: int, layout: str, options: Options, folder: Path) -> list[dict]:
    """Train on the first GPUs of the machine; return the records of metrics.jsonl."""
    launcher = [sys.executable]
    if gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launcher, "train.py", *options_of(layout, options, folder)]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        raise OSError(f"{' '.join(command)}: exit code {code}, see above")
    return read_metrics(folder / "metrics.jsonl")


def cost_of(records: list[dict], tokens: int) -> dict:
    """Return the figures of a row. `tokens`: of a step. A record's `seconds` include the checkpoint of its
    step, its `tokens_per_s` does not."""
    seconds = {record["step"]: record["seconds"] for record in records}
    in_steps = {record["step"]: LOG * tokens / record["tokens_per_s"] for record in records}
    saves = range(2 * SAVE, 2 * (1 + TIMES) * SAVE, 2 * SAVE)  # the last is written in the foreground

    def window(first: int) -> float:
        """Return the time from the record before step `first` to the one SAVE steps later."""
        return seconds[first - LOG + SAVE] - seconds[first - LOG]

    without = {save: (window(save - SAVE) + window(save + SAVE)) / 2 for save in saves}
    costs = [window(save) - without[save] for save in saves]
    median = statistics.median(without.values())
    return {"step_ms": 1e3 * median / SAVE, "seconds_per_save": costs,
            "seconds_waited": [seconds[save] - seconds[save - LOG] - in_steps[save] for save in saves],
            "interval_ms": [round(1e3 * (seconds[step] - seconds[step - LOG]) / LOG, 3)
                            for step in range(2 * LOG, 2 * (1 + TIMES) * SAVE, LOG)],
            "cost_percent": 100 * statistics.median(costs) / median}


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/saves.py", description=__doc__)
    check_options(options)
    rows = Rows(options.json, ("gpu", "gpus", "parallel", "steps_between"), "bench/saves.py", argv)
    for gpus, layout in itertools.product(options.gpus, options.layouts):
        with tempfile.TemporaryDirectory(dir=options.out_dir) as scratch:
            records = train(gpus, layout, options, Path(scratch, "run"))
            used = json.loads(Path(scratch, "run", "config.json").read_text())["config"]
            size = sum(file.stat().st_size for file in Path(scratch).rglob("step-*/*") if file.is_file())
        row = {"gpus": gpus, "parallel": layout, "steps_between": SAVE, "gib": size / 2**30,
               "compared_with": "the steps before and after"}
        tokens = gpus * used["micro_batch_size"] * used["seq_len"] * used["grad_accum"]
        row |= cost_of(records, tokens)
        rows.add(row)
        print(f"{gpus} GPUs, {layout}: a checkpoint of {row['gib']:.1f} GiB costs "
              f"{row['cost_percent']:.2f} % of the time of {SAVE} steps of {row['step_ms']:.1f} ms",
              flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/saves.py"))
