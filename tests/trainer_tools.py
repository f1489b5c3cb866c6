"""What the trainer's tests share: a small corpus, the options of a run of a second, and ways to run the
scripts."""
import os
import subprocess
import sys
from pathlib import Path

import data
import sample
import train
from nanote import cli, dataset
from nanote.metrics import OF_ONE_RUN, read_metrics

ROOT = Path(train.__file__).parent
# 2 layers, width 64, 24 steps of 2 micro batches of 4 x 64 tokens; dropout, so that random numbers matter; a
# line for every step
OPTIONS = (
    "--n-layer 2 --n-head 2 --n-embd 64 --dropout 0.1 --seq-len 64 --micro-batch-size 4 --grad-accum 2 --max-steps 24 "
    "--warmup-steps 4 --fp8-amax-history-len 8 --log-interval 1 "
    "--eval-interval 8 --eval-steps 2 --checkpoint-interval 12 --device cpu"
)


def make_tokens(folder) -> str:
    """A folder of byte-level token files of about 40,000 tokens."""
    documents = [
        "".join(f"line {i * j % 97} of document {i}: {'abc' * (j % 5)}\n" for j in range(20 + i))
        for i in range(40)
    ]
    dataset.write_tokens(iter(documents), folder, val_fraction=0.2)
    return str(folder)


def run_train(arguments: str, tokens: str | None = None) -> int:
    """train.py in this process: its exit code."""
    argv = [*arguments.split(), *(["--data", tokens] if tokens else [])]
    try:
        return cli.run(lambda: train.main(argv), "train.py")
    except SystemExit as stop:
        return stop.code


def run_script(script: str, argv: list[str]) -> int:
    """Any of the three scripts in this process: its exit code."""
    try:
        return cli.run(
            lambda: {"data.py": data, "train.py": train, "sample.py": sample}[script].main(argv), script
        )
    except SystemExit as stop:
        return stop.code


def spawn_train(arguments: str, tokens: str, sabotage: str = "") -> subprocess.CompletedProcess:
    """train.py in a process of its own, after the Python lines `sabotage`."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport os, signal, train\nfrom nanote import checkpoint, cli\n{sabotage}\n"
        "sys.exit(cli.run(train.main, 'train.py'))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments.split(), "--data", tokens], capture_output=True, text=True,
        timeout=120, env=os.environ | {"NANOTE_REFERENCE": "1"},
    )


def metrics(run) -> list[dict]:
    """metrics.jsonl without the figures that no two runs share."""
    return [{k: v for k, v in record.items() if k not in OF_ONE_RUN}
            for record in read_metrics(Path(run, "metrics.jsonl"))]
