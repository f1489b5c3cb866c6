"""bench/multi_gpu.py with two processes on a CPU, and a small stand-in for nanoGPT's model.py."""

import json
import os
import subprocess
import sys

import pytest
import torch
from test_nanogpt import STAND_IN

from bench import multi_gpu
from nanote.config import run_command

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU")
SCRIPT = multi_gpu.__file__


def test_layouts_are_timed_beside_one_process_and_nanogpt(tmp_path):
    (tmp_path / "model.py").write_text(STAND_IN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT,
               *"--layouts ddp nanogpt --shapes 124m-b16 --recipes none --steps 4 --nanogpt .".split(),
               "--json", "rows.json"]
    variables = os.environ | {
        "NANOTE_ENGINE": "reference", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    other, ours = json.loads((tmp_path / "rows.json").read_text())
    assert (other["parallel"], ours["parallel"]) == ("nanogpt", "ddp")
    assert len(other["model_py_sha256"]) == 64 and "model_py_sha256" not in ours
    for row in (other, ours):
        assert row["gpus"] == 2 and row["recipe"] == "none" and row["efficiency"] > 0
    ratio = ours["tokens_per_s_per_gpu"] / other["tokens_per_s_per_gpu"]
    assert ours["over_nanogpt"] == pytest.approx(ratio, rel=1e-4) and "over_nanogpt" not in other
    assert done.stdout.count("2 GPUs") == 2  # rank 0 alone prints


@pytest.mark.parametrize("arguments, complaint", [
    ("", "one process; start it with torchrun --nproc-per-node 2"),
    ("--layouts nanogpt", "--layouts nanogpt: needs a nanoGPT checkout; name its folder with --nanogpt"),
    ("--layouts nanogpt --nanogpt .", "there is no model.py; name the folder of a nanoGPT checkout"),
    ("--layouts nanogpt --nanogpt . --accum 2", "has no gradient accumulation and no Llama"),
    ("--layouts ddp2", "--layouts 'ddp2': unknown; use ddp, ddp-eager")])
def test_a_mistake_is_one_line(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_command(lambda: multi_gpu.main(arguments.split()), "bench/multi_gpu.py") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
