"""train.py on two processes that communicate by gloo, as torchrun starts them."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanote import checkpoint, ddp, parallel
from trainer_tools import ROOT, finish, metrics, run_train, start_ranks

STEPS = 8
OPTIONS = (f"--n-layer 2 --n-head 2 --n-embd 64 --seq-len 64 --max-steps {STEPS} --warmup-steps 2 --lr 1e-3 "
           "--fp8-amax-history-len 4 --log-interval 1 --eval-interval 4 --eval-tokens 1024 "
           "--checkpoint-interval 4 --keep-checkpoints 9 --device cpu")
TOGETHER = {  # runs of two processes; the same samples a step as "one"
    "ddp": "--micro-batch-size 4", "ddp-accumulation": "--micro-batch-size 2 --grad-accum 2",
    "fsdp": "--micro-batch-size 4 --parallel fsdp", "hsdp": "--micro-batch-size 4 --parallel hsdp",
    "fsdp-accumulation": "--micro-batch-size 2 --grad-accum 2 --parallel fsdp",
    "one-to-ddp": "--resume --micro-batch-size 4", "ddp-to-fsdp": "--resume --parallel fsdp",
    "nan": "--micro-batch-size 4 --fp8-recipe none --model own.py:NanOnRank1"}
OWN_MODEL = """
import os
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
class NanOnRank1(OptimizedGPT2Model):
    def __init__(self, config: OptimizedConfig):
        super().__init__(config)
        self.passes = 0
    def forward(self, input_ids, labels=None):
        loss = super().forward(input_ids, labels)
        self.passes += self.training
        return loss * float("nan") if os.environ["RANK"] == "1" and self.passes == 4 else loss
"""
WORKER = """
import json, os, shutil, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
import train
from bench.step import forget_models
from nanote import parallel
ranks = parallel.start()
for name, options in json.loads(sys.argv[2]).items():
    source, _, goal = name.partition("-to-")
    if goal and ranks.rank == 0:
        shutil.copytree(source, name, ignore=shutil.ignore_patterns("step-8"))
    dist.barrier()
    forget_models()
    assert train.run([*options.split(), "--out-dir", name]) == 0, name
parallel.exit(0)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokens):
    """The folder of the runs of TOGETHER, and of "one" with the same samples in one process."""
    folder, before = tmp_path_factory.mktemp("runs"), os.getcwd()
    os.chdir(folder)
    Path("own.py").write_text(OWN_MODEL)
    options = f"{OPTIONS} --data {tokens}"
    assert run_train(f"{options} --micro-batch-size 8 --out-dir one") == 0
    all_options = {name: extra if "--resume" in extra else f"{options} {extra}"
                   for name, extra in TOGETHER.items()}
    finish(start_ranks([sys.executable, "-c", WORKER, str(ROOT), json.dumps(all_options)]))
    yield folder
    os.chdir(before)


def losses(run, key="loss"):
    return [record[key] for record in metrics(run) if key in record]


@pytest.mark.parametrize("run", [name for name in TOGETHER if name != "nan"])
def test_two_processes_train_as_one(runs, run):
    assert losses(run) == pytest.approx(losses("one"), rel=2e-3)
    assert losses(run, "grad_norm") == pytest.approx(losses("one", "grad_norm"), rel=0.02)
    assert losses(run, "val_loss") == pytest.approx(losses("one", "val_loss"), rel=2e-3)


def test_a_sharded_run_continues_in_one_process(runs):
    shutil.copytree("fsdp", "fsdp-to-one", ignore=shutil.ignore_patterns("step-8"))
    assert run_train("--resume --parallel ddp --micro-batch-size 8 --out-dir fsdp-to-one") == 0
    assert losses("fsdp-to-one") == pytest.approx(losses("one"), rel=2e-3)


def test_a_nan_on_one_rank_skips_the_step_on_all(runs):
    assert [record["skipped"] for record in metrics("nan")][-1] == 1
    assert len(metrics("nan")) == STEPS


def test_a_signal_to_one_rank_stops_all_after_a_step(tmp_path, tokens, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(ROOT / "train.py"), *OPTIONS.split(), "--max-steps", "4000",
               "--data", tokens, "--out-dir", "run"]
    processes = start_ranks(command)
    wait_for(lambda: Path("run/step-4").exists())
    processes[1].send_signal(signal.SIGTERM)
    outputs = finish(processes)
    assert "stopped after step" in outputs[0] and "resume with" in outputs[0]
    assert checkpoint.step_of(checkpoint.latest("run")) == metrics("run")[-1]["step"]


def test_torchrun_restarts_a_killed_rank_from_a_checkpoint(tmp_path, tokens, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--max-restarts", "1", str(ROOT / "train.py"), *OPTIONS.split(), "--max-steps", "120",
               "--checkpoint-interval", "20", "--eval-interval", "0", "--micro-batch-size", "2",
               "--data", tokens]
    with open("log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for(lambda: Path("out/tiny/step-20").exists())
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert process.wait(timeout=240) == 0, Path("log").read_text()
    assert os.listdir("out") == ["tiny"]
    assert [record["step"] for record in metrics("out/tiny")] == list(range(1, 121))


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_model_without_blocks_is_not_sharded(monkeypatch):
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "broadcast", lambda tensor, src: None)
    import torch

    with pytest.raises(ValueError, match="--parallel fsdp: shards block by block.*or pass --parallel ddp"):
        ddp.distribute(torch.nn.Linear(3, 3), "fsdp")
