"""Train the preset tiny on the CPU with three seeds: the numbers to expect from `make train` on a laptop.

    python bench/laptop.py    # minutes; writes results/laptop.json, from which README.md is filled

The corpus is data/stdlib, which is built if it is missing: the standard library of the Python that runs this.
The first seed is train.py's default, so its loss is that of `make train`.
"""

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
from bench.report import write_report
from nanote import cli, fp8
from nanote.config import PRESETS, TrainConfig
from nanote.metrics import read_metrics

SEEDS = (TrainConfig.seed, 1, 2)
SAMPLE = ("--prompt", "def ", "--max-new-tokens", "300", "--top-k", "50")


@dataclass
class Options:
    max_steps: int | None = None  # Steps of each run; default: those of the preset.
    runs: Path | None = None
    """Keep the runs in this folder, and reuse those that it has; default: a temporary folder."""
    json: Path = ROOT / "results/laptop.json"  # Write the figures here, after each run.


def call(*arguments) -> str:
    """Run a script of the kit and return what it prints; OSError with stderr's last line if it fails."""
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True,
                          encoding="utf-8")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"{' '.join(arguments)}: exit code {done.returncode}: {last}")
    return done.stdout


def train(seed, folder, options) -> dict:
    """Train with one seed, unless `folder` holds the finished run -> its figures."""
    steps = options.max_steps or PRESETS["tiny"]["max_steps"]
    records = read_metrics(folder / "metrics.jsonl")
    if not records or records[-1]["step"] != steps:
        call("train.py", "--preset", "tiny", "--seed", str(seed), "--max-steps", str(steps),
             "--out-dir", str(folder))
        records = read_metrics(folder / "metrics.jsonl")
    last = records[-1]
    print(f"seed {seed}: validation loss {last['val_loss']:.4f} after {last['step']} steps, "
          f"{last['seconds']:.0f} s", flush=True)
    return {"seed": seed, "steps": last["step"], "val_loss": last["val_loss"], "seconds": last["seconds"]}


def sample_block(result) -> str:
    """Return the sample as a code block of Markdown."""
    return f"```text\n{result['sample']}\n```"


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/laptop.py", description=__doc__)
    if not fp8.IS_REFERENCE:
        raise ValueError("this study is of a machine without a GPU; set CUDA_VISIBLE_DEVICES= and "
                         "NANOTE_REFERENCE=1")
    if not (ROOT / "data/stdlib/meta.json").is_file():
        call("data.py", "stdlib")
    corpus, runs, sample = json.loads((ROOT / "data/stdlib/meta.json").read_text()), [], None
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        for seed in SEEDS:
            runs.append(train(seed, folder / str(seed), options))
            sample = sample or call("sample.py", str(folder / str(seed)), *SAMPLE).strip()
            losses = [run["val_loss"] for run in runs]
            write_report("bench/laptop.py", argv, {
                "corpus": corpus["source"], "train_tokens": corpus["train_tokens"], "cores": os.cpu_count(),
                "runs": runs, "val_loss": statistics.mean(losses), "spread": max(losses) - min(losses),
                "sample": sample,
            }, options.json)


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/laptop.py"))
