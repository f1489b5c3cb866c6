"""train.py on two GPUs, with NCCL inside CUDA graphs and the fast kernels, trains as one process does."""
import os
import shutil
import statistics
import subprocess
import sys

import pytest

from trainer_tools import ROOT, metrics

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]
STEPS = 200
OPTIONS = (f"--n-layer 4 --n-head 4 --n-embd 256 --seq-len 256 --max-steps {STEPS} --warmup-steps 20 "
           "--lr 1e-3 --fp8-amax-history-len 16 --log-interval 1 --eval-interval 0 --eval-tokens 16384 "
           "--checkpoint-interval 100 --keep-checkpoints 9")


def start(arguments, gpus=(0,)):
    """Start train.py on some of the machine's GPUs."""
    launcher = [sys.executable]
    if len(gpus) > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(gpus)}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    return subprocess.Popen([*launcher, str(ROOT / "train.py"), *arguments.split()], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes):
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output[-3000:]
    return outputs


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokens):
    """Make the runs that the tests compare; return what the ones on two GPUs printed."""
    folder, before = tmp_path_factory.mktemp("runs"), os.getcwd()
    os.chdir(folder)
    options, bf16 = f"{OPTIONS} --data {tokens}", "--fp8-recipe none"
    one, half = "--micro-batch-size 16", "--micro-batch-size 8"
    alone = {"one": (one, 0), "one-bf16": (f"{one} {bf16}", 1), "halves": (f"{half} --grad-accum 2", 0),
             "halves-bf16": (f"{half} --grad-accum 2 {bf16}", 1)}
    finish(*[start(f"{options} {words} --out-dir {name}", (gpu,)) for name, (words, gpu) in alone.items()])
    together = {"ddp": half, "ddp-bf16": f"{half} {bf16}", "ddp-accum": "--micro-batch-size 4 --grad-accum 2",
                "fsdp": f"{half} --parallel fsdp",
                "fsdp-accum": "--micro-batch-size 4 --grad-accum 2 --parallel fsdp "
                              "--no-reshard-after-forward"}
    printed = {}
    for name, words in together.items():  # one by one: NCCL's kernels of two runs would wait for each other
        printed[name], = finish(start(f"{options} {words} --out-dir {name}", (0, 1)))
    for name in ("ddp", "fsdp"):
        shutil.copytree("ddp", f"ddp-{name}-resumed")
        shutil.rmtree(f"ddp-{name}-resumed/step-{STEPS}")
        finish(start(f"--resume --parallel {name} --out-dir ddp-{name}-resumed", (0, 1)))
    yield printed
    os.chdir(before)


def losses(run, first=0):
    return [record["loss"] for record in metrics(run)][first:]


def distance(run, other):
    """Return the mean difference of the losses of two runs, step by step."""
    return statistics.mean(abs(a - b) for a, b in zip(losses(run), losses(other), strict=True))


@pytest.mark.parametrize("run, one, halves", [
    ("ddp", "one", "halves"), ("ddp-bf16", "one-bf16", "halves-bf16"), ("ddp-accum", "one", "halves"),
    ("fsdp", "one", "halves"), ("fsdp-accum", "one", "halves"),
    ("ddp-ddp-resumed", "one", "halves"), ("ddp-fsdp-resumed", "one", "halves")])
def test_two_gpus_train_as_one_process(runs, run, one, halves):
    """The tolerance is what rounding alone changes: one process with each step's samples in two halves."""
    assert losses(run)[-1] < 0.7 * losses(run)[0]
    assert distance(run, one) <= 3 * distance(halves, one)
    assert losses(run)[0] == pytest.approx(losses(one)[0], rel=1e-4)


@pytest.mark.parametrize("run", ["ddp", "fsdp", "fsdp-accum"])
def test_the_step_is_captured_with_the_fast_kernels(runs, run):
    """A pass that they do not take says so once, after the line that says which are on."""
    printed = runs[run]
    assert "fast kernels: blocks" in printed
    assert "fast kernels are not used" not in printed and "CUDA graphs are off" not in printed


def test_ranks_have_the_same_weights(runs):
    """Rank 0 writes the checkpoint; what it resumes to on both ranks must go on as the run did."""
    first, resumed = losses("ddp", 100), losses("ddp-ddp-resumed", 100)
    assert statistics.mean(abs(a - b) for a, b in zip(first, resumed)) <= 3 * distance("halves", "one")
