"""train.py on two GPUs, with NCCL inside CUDA graphs and the fast kernels, trains as one process does."""
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from nanote.metrics import read_metrics
from trainer_tools import ROOT, metrics

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]
STEPS = 200
OPTIONS = (f"--n-layer 4 --n-head 4 --n-embd 256 --seq-len 256 --max-steps {STEPS} --warmup-steps 20 "
           "--lr 1e-3 --fp8-amax-history-len 16 --log-interval 1 --eval-interval 0 --eval-tokens 16384 "
           "--checkpoint-interval 100 --keep-checkpoints 9")
ONE, HALF, QUARTER = (f"--micro-batch-size {size}" for size in (16, 8, 4))
BF16 = "--fp8-recipe none"
ALONE = [{"one": ONE, "halves": f"{HALF} --grad-accum 2"},
         {"one-bf16": f"{ONE} {BF16}", "halves-bf16": f"{HALF} --grad-accum 2 {BF16}"}]
TOGETHER = {
    "ddp": HALF, "ddp-all_reduce": HALF, "ddp-bf16": f"{HALF} {BF16}",
    "ddp-accum": f"{QUARTER} --grad-accum 2", "fsdp": f"{HALF} --parallel fsdp",
    "fsdp-nccl": f"{HALF} --parallel fsdp",
    "fsdp-accum": f"{QUARTER} --grad-accum 2 --parallel fsdp --no-reshard-after-forward",
    "ddp-ddp-resumed": "--parallel ddp", "ddp-fsdp-resumed": "--parallel fsdp",
    "ddp-health": f"{HALF} --fp8-health-interval 50",  # steps without graphs among those with
}
# Runs one after the other in the same processes, since a process takes longer to start than to train.
TRAIN = """
import hashlib, json, shutil, sys
from pathlib import Path
from unittest import mock
import torch
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import train
from nanote import checkpoint, fp8, parallel, peers
ranks = parallel.init()
plain_save, plain_load = checkpoint.BackgroundSaver.save, checkpoint.load

def save(self, run, step, *, model, **others):
    weights = {key: parallel.local(p).detach().float().cpu() for key, p in model.named_parameters()}
    Path(run, f"weights-{ranks.rank}-{step}.json").write_text(json.dumps(
        {key: hashlib.sha256(value.numpy()).hexdigest() for key, value in weights.items()}))
    plain_save(self, run, step, model=model, **others)

def load(folder, meta, model, optimizer):
    torch.cuda.reset_peak_memory_stats()
    plain_load(folder, meta, model, optimizer)
    used, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    state = sum(parallel.local(p).nbytes for p in model.parameters()) + sum(
        value.nbytes for values in optimizer.state.values() for value in values.values())
    print(f"rank {ranks.rank} loaded {state} bytes with {peak - used} more", flush=True)

checkpoint.BackgroundSaver.save, checkpoint.load = save, load
with mock.patch.object(parallel, "init", return_value=ranks), mock.patch.object(parallel, "shut_down"):
    for name, options in json.loads(sys.argv[2]).items():
        if name.endswith("-resumed"):
            if ranks.is_first:
                shutil.copytree("ddp", name, ignore=shutil.ignore_patterns("step-STEPS"))
            dist.barrier()
            options = f"--resume {options} --out-dir {name}"
        else:
            options = f"{sys.argv[3]} {options} --out-dir {name}"
        if ranks.is_first:
            print(f"\\n=== {name} ===", flush=True)
        fp8.forget_models()
        as_chosen = peers.no_access_reason
        if name in ("ddp-all_reduce", "fsdp-nccl"):
            peers.no_access_reason = lambda *_: "not asked for"
        assert train.main(options.split()) == 0, name
        peers.no_access_reason = as_chosen
parallel.shut_down(ranks)
""".replace("STEPS", str(STEPS))

# One run, of which rank 1 is killed once. before.jsonl keeps what was logged until then.
TRAIN_KILLED = """
import os, shutil, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import train
from nanote import cli, elastic
plain = train.get_batches

def get_batches(loader, step, grad_accum):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], step) == ("1", "0", 190):
        shutil.copy("killed/metrics.jsonl", "before.jsonl")
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(loader, step, grad_accum)

train.get_batches = get_batches
elastic.exit_process(cli.run(train.main, "train.py"))
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(runs, options, gpus):
    """Start train.py's runs on some of the machine's GPUs."""
    launcher = TORCHRUN if len(gpus) > 1 else [sys.executable]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    return subprocess.Popen([*launcher, "train_all.py", str(ROOT), json.dumps(runs), options],
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes):
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output[-3000:]
    return outputs


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokens):
    """Make the runs that the tests compare; return what the ones on two GPUs printed."""
    folder, before = tmp_path_factory.mktemp("runs"), os.getcwd()
    os.chdir(folder)
    (folder / "train_all.py").write_text(TRAIN)
    options = f"{OPTIONS} --data {tokens}"
    finish(*[start(some, options, (gpu,)) for gpu, some in enumerate(ALONE)])
    output, = finish(start(TOGETHER, options, (0, 1)))
    parts = output.split("\n=== ")[1:]
    yield {name: printed for name, _, printed in (part.partition(" ===\n") for part in parts)}
    os.chdir(before)


def losses(run, first=0):
    return [record["loss"] for record in metrics(run)][first:]


def distance(run, other, first=0):
    """Return the mean difference of the losses of two runs, step by step."""
    pairs = zip(losses(run, first), losses(other, first), strict=True)
    return statistics.mean(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("run, one, halves", [
    ("ddp", "one", "halves"), ("ddp-all_reduce", "one", "halves"), ("ddp-bf16", "one-bf16", "halves-bf16"),
    ("ddp-accum", "one", "halves"), ("fsdp", "one", "halves"), ("fsdp-accum", "one", "halves"),
    ("fsdp-nccl", "one", "halves"),
    ("ddp-ddp-resumed", "one", "halves"), ("ddp-fsdp-resumed", "one", "halves"),
    ("ddp-health", "one", "halves")])
def test_two_gpus_train_as_one_process(runs, run, one, halves):
    """The tolerance is what rounding alone changes: one process with each step's samples in two halves."""
    assert losses(run)[-1] < 0.7 * losses(run)[0]
    assert distance(run, one) <= 3 * distance(halves, one)
    assert losses(run)[0] == pytest.approx(losses(one)[0], rel=1e-4)


@pytest.mark.parametrize("run", ["ddp", "ddp-all_reduce", "fsdp", "fsdp-accum", "fsdp-nccl"])
def test_the_step_is_captured_with_the_fast_kernels(runs, run):
    """A pass that they do not take says so once, after the line that says which are on."""
    printed = runs[run]
    assert "fast kernels: blocks" in printed
    assert ("each rank updates a part of the weights" in printed) == (run == "ddp")
    assert ("copy engines gather weights" in printed) == (run in ("fsdp", "fsdp-accum"))
    assert "fast kernels are not used" not in printed and "CUDA graphs are off" not in printed


def test_each_log_line_compares_the_gpus(runs):
    records = read_metrics(Path("ddp", "metrics.jsonl"))
    assert all(record["slowest_rank"] in (0, 1) and record["slowest_ratio"] >= 1 for record in records)


@pytest.mark.parametrize("run", ["ddp", "ddp-all_reduce", "ddp-accum", "ddp-ddp-resumed"])
def test_ranks_have_the_same_weights(runs, run):
    """To the last bit, though each updates a part of them."""
    for step in (STEPS,) if run.endswith("-resumed") else (100, STEPS):
        weights, other = (json.loads(Path(run, f"weights-{rank}-{step}.json").read_text()) for rank in (0, 1))
        assert weights == other and len(set(weights.values())) > 10


def test_a_resumed_run_goes_on_as_the_run_did(runs):
    assert distance("ddp", "ddp-ddp-resumed", 100) <= 3 * distance("halves", "one")


def test_loading_a_sharded_run_takes_no_memory_twice(runs):
    """Meanwhile a GPU holds at most 30 % more than its weights and optimizer state, and no copy of them."""
    found = re.findall(r"loaded (\d+) bytes with (\d+) more", runs["ddp-fsdp-resumed"])
    assert len(found) == 2 and all(int(more) < 0.3 * int(state) for state, more in found), found


def test_a_killed_run_goes_on_from_its_last_checkpoint(runs, tokens):
    """torchrun ends the process that is left, and starts both again. The steps from the checkpoint to the
    kill then have about the losses that they had: the first ones nearly exactly, the rest up to rounding."""
    Path("train_killed.py").write_text(TRAIN_KILLED)
    command = [*TORCHRUN, "--max-restarts=1", "train_killed.py", str(ROOT), *OPTIONS.split(), *HALF.split(),
               "--data", tokens, "--out-dir", "killed"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = process.communicate(timeout=180)
    finally:
        process.terminate()  # on time-out: torchrun then ends its processes, subprocess.run would leave them
    assert process.returncode == 0, errors[-3000:]
    assert "killed from step 100" in printed and "exitcode: -9" in errors
    assert len(losses("killed")) == STEPS
    before = [json.loads(line)["loss"] for line in Path("before.jsonl").read_text().splitlines()[100:180]]
    assert len(before) == 80
    again = losses("killed")[100:180]
    assert again[:3] == pytest.approx(before[:3], rel=1e-3)
    assert statistics.mean(abs(a - b) for a, b in zip(before, again)) <= 3 * distance("halves", "one", 100)
