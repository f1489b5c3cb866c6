"""train.py --resume: after kill -9, with damaged files, from a run of version 0.1, after weights went bad."""
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

import train
from nanote import checkpoint
from trainer_tools import OPTIONS, metrics, run_train

OLD_RUN = Path(__file__).parent / "data/run-0.1"  # 6 steps of version 0.1, and its checkpoint of step 3
SHORT = f"{OPTIONS} --max-steps 12 --checkpoint-interval 4 --eval-interval 6 --out-dir run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokens):
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_train(SHORT.replace("--out-dir run", f"--out-dir {folder / 'run'}"), tokens) == 0
    return folder / "run"


@pytest.fixture(autouse=True)
def refuse(refused, in_tmp_path):
    """refuse(arguments): a resume with a mistake, which changes nothing; its line."""
    return lambda arguments: refused(train.run, f"--resume --out-dir run {arguments}", "train.py")


def tensors(run):
    """Return the tensors of a run's last checkpoint."""
    return load_file(next(checkpoint.latest(run).glob("*.safetensors")))


def equals(run, whole):
    one, other = tensors(run), tensors(whole)
    return metrics(run) == metrics(whole) and all(
        torch.equal(value, other[name]) for name, value in one.items() if name != "rng0.host")


def train_in_fork(*arguments):
    tqdm.set_lock(threading.RLock())  # processes share tqdm's: one that is killed may hold it
    os._exit(run_train(*arguments))


def logged(count):
    log = Path("run/metrics.jsonl")
    return log.exists() and log.read_bytes().count(b"\n") >= count


@pytest.mark.parametrize("moment", [
    lambda: Path("run/step-4").exists() and logged(6), lambda: Path("run/.saving-step-8").exists(),
    lambda: Path("run/step-8").exists()], ids=["in a step", "in a save", "after a save"])
def test_a_run_killed_by_kill_9_continues_exactly(tokens, whole, moment):
    process = multiprocessing.get_context("fork").Process(target=train_in_fork, args=(SHORT, tokens))
    process.start()
    while process.is_alive() and not moment():
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert process.exitcode == -9 and checkpoint.latest("run").name in ("step-4", "step-8")
    assert run_train("--resume --out-dir run") == 0
    assert equals("run", whole) and not list(Path("run").glob(".*ing-*"))


@pytest.mark.parametrize("name", ["*.safetensors", "meta.json", "SHA256SUMS"])
def test_a_damaged_file_stops_a_resume_in_one_line(whole, name, refuse):
    for number in range(7):
        shutil.copytree(whole, "run", dirs_exist_ok=True)
        path = next(Path("run/step-12").glob(name))
        content = bytearray(path.read_bytes())
        content[len(content) * number // 7] ^= 1 << number
        path.write_bytes(content if number % 2 else content[:len(content) * number // 7])
        if number == 6:
            path.unlink()
        named = "run/step-12" if name == "SHA256SUMS" else f"run/step-12/{path.name}: "
        assert named in refuse("--max-steps 13")
    shutil.copytree(whole, "run", dirs_exist_ok=True)
    Path("run/step-12/._shard.safetensors").write_bytes(b"of another system")
    assert "/._shard.safetensors: " in refuse("--max-steps 13")
    shutil.rmtree("run/step-12")  # as the message says
    assert run_train("--resume --out-dir run") == 0
    assert equals("run", whole)


def test_a_run_of_version_0_1_continues():
    shutil.copytree(OLD_RUN, "run")
    expected = metrics("run")
    assert run_train("--resume --out-dir run --data run/tokens") == 0
    found = metrics("run")
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    for field in ("loss", "grad_norm", "lr"):
        assert [r[field] for r in found] == pytest.approx([r[field] for r in expected], rel=1e-5), field
    assert found[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=1e-5)


def test_good_weights_stay_when_a_learning_rate_ruins_them(tokens, capsys):
    options = f"{OPTIONS} --checkpoint-interval 1 --keep-checkpoints 1 --eval-interval 0 --out-dir run"
    assert run_train(f"{options} --max-steps 3", tokens) == 0
    good = tensors("run")
    capsys.readouterr()
    assert run_train("--resume --out-dir run --lr 1e38 --max-steps 30") == 1
    error = capsys.readouterr().err
    assert "run/step-3" in error and error.count("\n") == 1, "the last one after which a step was finite"
    shutil.rmtree("run/step-4")
    assert all(torch.equal(value, good[name]) for name, value in tensors("run").items())
    assert run_train("--resume --out-dir run --lr 1e-3 --max-steps 5") == 0
    assert metrics("run")[-1]["skipped"] == 0


def test_a_run_is_trained_by_one_process(whole, refuse):
    shutil.copytree(whole, "run")
    with checkpoint.lock("run"):
        assert "another process trains there" in refuse("--max-steps 13 --lr 0.5")
    assert run_train("--resume --out-dir run --max-steps 13") == 0


def test_fp8_begins_in_a_resumed_run_with_larger_steps(tokens):
    options = f"{OPTIONS} --max-steps 6 --checkpoint-interval 6 --fp8-recipe none --out-dir run"
    assert run_train(options, tokens) == 0
    assert run_train("--resume --out-dir run --fp8-recipe delayed --micro-batch-size 16 --max-steps 8") == 0
    assert len(metrics("run")) == 8
