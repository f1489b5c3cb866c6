"""Shared by the trainer's tests: a small corpus, options of a one-second run, and ways to run the scripts."""
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import data
import sample
import train
from fork_server import run_python
from nanote import cli, dataset
from nanote.metrics import VARYING_FIELDS, read_metrics

ROOT = Path(train.__file__).parent
# 24 steps of 2 micro-batches of 4 x 64 tokens; with dropout, so that the random state matters
OPTIONS = (
    "--n-layer 2 --n-head 2 --n-embd 64 --dropout 0.1 --seq-len 64 --micro-batch-size 4 --grad-accum 2 "
    "--max-steps 24 --warmup-steps 4 --fp8-amax-history-len 8 --log-interval 1 "
    "--eval-interval 8 --eval-steps 2 --checkpoint-interval 12 --device cpu"
)


def make_tokens(folder) -> str:
    """Write byte-level token files of about 40,000 tokens; return their folder."""
    documents = [
        "".join(f"line {i * j % 97} of document {i}: {'abc' * (j % 5)}\n" for j in range(20 + i))
        for i in range(40)
    ]
    dataset.write_tokens(iter(documents), folder, val_fraction=0.2)
    return str(folder)


@contextlib.contextmanager
def short_endings():
    """End runs with a sample of 2 tokens and small plots. In full they take half of a short run's time."""
    generate, savefig = train.generate, Figure.savefig

    def save_small(figure, path, dpi):
        figure.set_layout_engine("none")
        savefig(figure, path, dpi=20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "generate", lambda model, ids, _, **more: generate(model, ids, 2, **more))
        patch.setattr(Figure, "savefig", save_small)
        yield


def run_train(arguments: str, tokens: str | None = None, ending=short_endings) -> int:
    """Run train.py in this process; return its exit code. `ending`: contextlib.nullcontext for a full one."""
    argv = [*arguments.split(), *(["--data", tokens] if tokens else [])]
    try:
        with ending():
            return cli.run(lambda: train.main(argv), "train.py")
    except SystemExit as stop:
        return stop.code


def run_groups(*arguments: str, **environment: str) -> str:
    """Run tests/parallel_worker.py; return what it printed."""
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "parallel_worker.py"), *arguments],
                          capture_output=True, text=True, timeout=240,
                          env=os.environ | {"NANOTE_REFERENCE": "1", "OMP_NUM_THREADS": "1"} | environment)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def run_script(script: str, argv: list[str]) -> int:
    """Run data.py, train.py or sample.py in this process; return its exit code."""
    module = {"data.py": data, "train.py": train, "sample.py": sample}[script]
    try:
        return cli.run(lambda: module.main(argv), script)
    except SystemExit as stop:
        return stop.code


def spawn_train(arguments: str, tokens: str, sabotage: str = "") -> subprocess.CompletedProcess:
    """Run train.py in a subprocess, after the Python lines `sabotage`."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import os, signal, train
from nanote import checkpoint, cli
{sabotage}
sys.exit(cli.run(train.main, 'train.py'))"""
    return run_python("-c", code, *arguments.split(), "--data", tokens, env={"NANOTE_REFERENCE": "1"})


def metrics(run) -> list[dict]:
    """Return metrics.jsonl without the fields that differ between equal runs."""
    return [{k: v for k, v in record.items() if k not in VARYING_FIELDS}
            for record in read_metrics(Path(run, "metrics.jsonl"))]
