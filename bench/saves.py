"""How much time do checkpoints cost that are written in the background?

    python data.py stdlib
    python bench/saves.py --gpus 2 --layouts ddp fsdp    # two minutes each; writes results/saves.json

GPT-2 350M, 16 x 1,024 tokens a step and GPU, a log line every 10 steps. Each of three times 200 steps begins
with a checkpoint. `cost_percent` compares their time with 20 times the median log interval of the 100 steps
before the first checkpoint. Of the `seconds_per_save`, training stands still for `seconds_waited`, while
state is collected and copied to host memory; the rest is that steps are slower than before it, while the copy
is written or for another reason.
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
from bench.report import Rows, check_folder
from nanote import cli
from nanote.metrics import read_metrics

LOG, SAVE, TIMES = 10, 200, 3  # steps, steps, saves
OPTIONS = (f"--preset gpt2-350m --micro-batch-size 16 --grad-accum 1 --warmup-steps 50 --eval-interval 0 "
           f"--log-interval {LOG} --checkpoint-interval {SAVE} --keep-checkpoints 1 --eval-tokens 65536 "
           f"--max-steps {(1 + TIMES) * SAVE}")


@dataclass
class Options:
    gpus: tuple[int, ...] = (2,)
    layouts: tuple[str, ...] = ("ddp",)  # Values of train.py's --parallel.
    data: str = "data/stdlib"  # A folder of token files.
    out_dir: Path | None = None  # Where the checkpoints go; default: a temporary folder.
    more: str = ""  # More options of train.py: --more="--preset gpt2-124m".
    json: Path = ROOT / "results/saves.json"  # Write the rows here.


def train(gpus: int, layout: str, options: Options, folder: Path) -> list[dict]:
    """Train on the first GPUs of the machine; return the records of metrics.jsonl."""
    launcher = [sys.executable]
    if gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launcher, "train.py", *OPTIONS.split(), "--data", options.data, "--out-dir", str(folder),
               "--parallel", layout, *options.more.split()]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        raise OSError(f"{' '.join(command)}: exit code {code}, see above")
    return read_metrics(folder / "metrics.jsonl")


def cost_of(records: list[dict], tokens: int) -> dict:
    """Return the figures of a row. `tokens`: of a step. A record's `seconds` include the checkpoint of its
    step, its `tokens_per_s` does not."""
    seconds = {record["step"]: record["seconds"] for record in records}
    # from the record before a checkpoint to the one before the next; the last is written in the foreground
    times = [seconds[first + SAVE - LOG] - seconds[first - LOG]
             for first in range(SAVE, (1 + TIMES) * SAVE, SAVE)]
    interval = statistics.median(seconds[step] - seconds[step - LOG] for step in range(SAVE // 2, SAVE, LOG))
    without = SAVE / LOG * interval
    in_steps = {record["step"]: LOG * tokens / record["tokens_per_s"] for record in records}
    waited = [seconds[first] - seconds[first - LOG] - in_steps[first]
              for first in range(SAVE, (1 + TIMES) * SAVE, SAVE)]
    return {"step_ms": 1e3 * interval / LOG, "seconds_per_save": [time - without for time in times],
            "seconds_waited": waited,
            "cost_percent": 100 * (statistics.median(times) / without - 1)}


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/saves.py", description=__doc__)
    check_folder(options.json)
    rows = Rows(options.json, ("gpu", "gpus", "parallel", "steps_between"), "bench/saves.py", argv)
    for gpus, layout in itertools.product(options.gpus, options.layouts):
        with tempfile.TemporaryDirectory(dir=options.out_dir) as scratch:
            records = train(gpus, layout, options, Path(scratch, "run"))
            used = json.loads(Path(scratch, "run", "config.json").read_text())["config"]
            size = sum(file.stat().st_size for file in Path(scratch).rglob("step-*/*") if file.is_file())
        row = {"gpus": gpus, "parallel": layout, "steps_between": SAVE, "gib": size / 2**30}
        tokens = gpus * used["micro_batch_size"] * used["seq_len"] * used["grad_accum"]
        row |= cost_of(records, tokens)
        rows.add(row)
        print(f"{gpus} GPUs, {layout}: a checkpoint of {row['gib']:.1f} GiB every {SAVE} steps of "
              f"{row['step_ms']:.1f} ms costs {row['cost_percent']:.2f} % of the time", flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/saves.py"))
