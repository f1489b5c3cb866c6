"""train.py on fast_kernels without a GPU: its kernels in Triton's interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
import train
from fast_kernels import interpreter, modules
from kernel_tools import HAS_GPU
from nanote import recipes
from trainer_tools import ROOT, losses, run_train

OPTIONS = ("--n-layer 1 --n-head 2 --n-embd 32 --seq-len 16 --micro-batch-size 2 --max-steps 3 "
           "--warmup-steps 1 --fp8-amax-history-len 8 --log-interval 1 --eval-interval 3 --eval-tokens 32 "
           "--device cpu --dtype bfloat16")


@pytest.mark.skipif(HAS_GPU, reason="Triton runs kernels on the GPU")
def test_train_py_runs_on_fast_kernels_without_a_gpu(in_tmp_path, tokens):
    command = f"{ROOT}/train.py --model fast {OPTIONS} --out-dir fast --data {tokens}"
    environment = os.environ | {"NANOTE_ENGINE": "fast", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command.split()], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FastGPT2Model" in done.stdout and "on fast_kernels" in done.stdout
    assert run_train(f"--model optimized {OPTIONS} --out-dir reference", tokens) == 0
    assert losses("fast") == pytest.approx(losses("reference"), rel=3e-3)
    assert losses("fast")[2] < losses("fast")[0] - 0.02


@pytest.mark.skipif(HAS_GPU, reason="a machine without a GPU")
def test_without_the_interpreter_the_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(recipes, "ENGINE", "fast")
    monkeypatch.setattr(recipes, "IS_REFERENCE", False)
    monkeypatch.setattr(recipes, "te", modules)
    monkeypatch.setattr(modules, "unsupported_reason", lambda: "there is no GPU here")
    with pytest.raises(ValueError, match="--device cpu: fast_kernels.modules needs a GPU; set NANOTE_ENGINE"):
        train.prepare_cpu(2**20)


def test_install_is_refused_where_kernels_run_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="start Python with TRITON_INTERPRET=1"):
        interpreter.install.__wrapped__()
