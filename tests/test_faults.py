"""Faults: steps that are not finite, two runs in one folder, files of other versions, full disks, flipped
bytes, hostile pickles.

test_train.py and test_checkpoint.py kill a run at chosen points; bench/faults.py does it at random moments.
"""
import builtins
import errno
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from bench import faults
from nanote import checkpoint, cli, dataset, fp8, models
from nanote.metrics import read_losses, read_metrics
from trainer_tools import OPTIONS as LARGER
from trainer_tools import ROOT, metrics, run_train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = f"{LARGER} --n-layer 1 --micro-batch-size 2"
NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokens):
    """A run with two checkpoints, of steps 2 and 4; copy it before changing it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    options = f"{OPTIONS} --max-steps 4 --checkpoint-interval 2 --eval-interval 0"
    assert run_train(f"{options} --out-dir {run}", tokens) == 0
    return run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small for more
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- a step that is not finite

def make_step(**options):
    """Return a TrainStep with two micro-batches on a small model, and its batches."""
    small = dict(
        n_layer=1, n_head=2, n_embd=64, vocab_size=288, n_positions=32, seq_len=32, grad_accum=2, device="cpu"
    )
    config = train.TrainConfig(**small | options)
    model_options = vars(config) | {"use_fp8": config.fp8_recipe != "none"}
    model_config = models.make_model_config("optimized", model_options)
    recipe = fp8.make_recipe(config.fp8_recipe, config.fp8_format, 8)
    weights_recipe = recipe if config.fp8_param else None
    model = models.build_model("optimized", model_config, fp8_weights_recipe=weights_recipe)
    model.fp8_recipe = recipe or model.fp8_recipe
    ids = torch.randint(0, 257, (2, 2, 33), generator=torch.Generator().manual_seed(0))
    batches = [(part[:, :-1], part[:, 1:]) for part in ids]
    optimizer = train.make_optimizer(model, config)
    return train.TrainStep(model, model, optimizer, config, torch.device("cpu")), batches


def trained_state(step):
    """Return copies of the weights, the optimizer state and its step counts."""
    tensors = [checkpoint._plain(p).clone() for p in step.model.parameters()]
    tensors += [value.clone() for p in step.model.parameters() for value in step.optimizer.state[p].values()]
    return tensors + [torch.as_tensor(group["step"]).clone() for group in step.optimizer.param_groups]


def same(before, after):
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after))


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(
    "options",
    [dict(fp8_recipe="none"), dict(fp8_recipe="delayed"), dict(fp8_recipe="delayed", fp8_param=True)],
)
def test_a_gradient_that_is_not_finite_changes_nothing(options, value):
    step, batches = make_step(**options)
    step(batches, 1e-2)
    before = trained_state(step)
    row = torch.tensor(5)
    hook = step.model.wte.weight.register_hook(lambda gradient: gradient.index_fill(0, row, value))
    loss, norm = step(batches, 1e-2)
    assert loss.isfinite() and not norm.isfinite() and same(before, trained_state(step))
    hook.remove()
    loss, norm = step(batches, 1e-2)
    assert norm.isfinite() and not same(before, trained_state(step))


def test_a_loss_that_is_not_finite_changes_nothing_though_its_gradients_are_finite():
    step, batches = make_step()
    step(batches, 1e-2)
    before, model = trained_state(step), step.model

    def net(*batch, is_first_microbatch):
        loss = model(*batch, is_first_microbatch=is_first_microbatch)
        return loss if is_first_microbatch else loss + math.inf

    step.net = net
    loss, norm = step(batches, 1e-2)
    assert loss == math.inf and not norm.isfinite() and same(before, trained_state(step))


@pytest.mark.parametrize(
    "options, value",
    [
        (dict(), math.nan), (dict(), math.inf), (dict(store_param_remainders=False), math.nan),
        (dict(moment_dtype=torch.bfloat16), math.nan), (dict(dtype=torch.float32), math.nan),
    ],
)
def test_fast_adam_skips_a_step(options, value):
    pytest.importorskip("triton")
    from fast_kernels.adam import CHUNK, FastAdam

    options = dict(options)
    dtype = options.pop("dtype", torch.bfloat16)

    def run(scales):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(size, device=DEVICE).to(dtype)) for size in (CHUNK + 5, 7)]
        optimizer = FastAdam(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **options)
        random = torch.Generator().manual_seed(1)
        for scale in scales:
            for parameter in params:
                if math.isfinite(scale):
                    gradient = torch.randn(parameter.shape, generator=random)
                else:
                    gradient = torch.full(parameter.shape, math.nan)
                parameter.grad = gradient.to(DEVICE, dtype)
            optimizer.step(grad_scale=torch.tensor(scale, device=DEVICE))
        moments = [value for p in params for value in optimizer.state[p].values()]
        return [*params, *moments, optimizer.param_groups[0]["step"]]

    assert same(run([0.5, value, 1.0, value]), run([0.5, 1.0])) and same(run([value]), run([]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {}, {"grad_accum": 2}, {"fp8_recipe": "none"}, {"fp8_recipe": "current"}, {"cuda_graph": "off"},
        {"fp8_param": True},
    ],
)
def test_on_a_gpu_a_graph_skips_a_step(options):
    from test_step_gpu import batches, make

    model, step = make(**options)
    poison = torch.ones((), device="cuda")
    model.wte.weight.register_hook(lambda gradient: gradient * poison)  # captured with the rest
    accum = step.config.grad_accum
    for number in range(2):
        step(batches(number, accum), 1e-3)
    before = trained_state(step)
    for value in NOT_FINITE:
        poison.fill_(value)
        loss, norm = step(batches(2, accum), 1e-3)
        assert loss.isfinite() and not norm.isfinite() and same(before, trained_state(step))
    poison.fill_(1)
    loss, norm = step(batches(2, accum), 1e-3)
    assert loss.isfinite() and norm.isfinite() and not same(before, trained_state(step))
    assert step.optimizer.param_groups[0]["step"] == 3


@pytest.mark.gpu
def test_on_a_gpu_a_step_does_not_wait_for_the_device():
    from test_step_gpu import batches, make

    model, step = make()
    given = batches(0, 1)
    for _ in range(3):
        step(given, 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(given, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def poisoned(monkeypatch):
    """poisoned(steps): make the gradients of these steps NaN in the runs that follow."""
    def choose(steps):
        numbers, plain_rate, plain = [], train.learning_rate, train.TrainStep.update

        def learning_rate(step, config):
            numbers.append(step)
            return plain_rate(step, config)

        def update(self):
            if numbers[-1] in steps:
                next(self.model.parameters()).grad.view(-1)[0] = math.nan
            return plain(self)

        monkeypatch.setattr(train, "learning_rate", learning_rate)
        monkeypatch.setattr(train.TrainStep, "update", update)
    return choose


def test_a_skipped_step_is_counted_and_reported_and_the_log_stays_json(tokens, poisoned, capsys):
    poisoned({4, 6})
    assert run_train(f"{OPTIONS} --max-steps 9 --log-interval 3 --eval-interval 0 --out-dir run", tokens) == 0
    out = capsys.readouterr().out
    skipped = re.findall(r"step (\d+): loss [\d.]+, gradient norm nan: skipped \((\d) of 10\)", out)
    assert skipped == [("4", "1"), ("6", "2")]
    records = metrics("run")
    assert [(record["step"], record["skipped"]) for record in records] == [(1, 0), (3, 0), (6, 2), (9, 2)]
    assert all(math.isfinite(record["loss"] + record["grad_norm"]) for record in records)
    assert "NaN" not in Path("run/metrics.jsonl").read_text()
    every = {record["step"]: record for record in metrics("run")}
    options = f"{OPTIONS} --max-steps 9 --log-interval 1 --eval-interval 0"
    assert run_train(f"{options} --out-dir each", tokens) == 0
    each = {record["step"]: record for record in metrics("each")}
    assert every[6]["loss"] == each[5]["loss"] == each[6]["loss"], "the loss of the last finite step"


@pytest.mark.parametrize("limit, words", [(1, ", after 1 skipped step$"), (2, ", after 2 skipped steps$"),
                                          (0, "gradient norm 1.0$")])
def test_how_many_steps_were_skipped(limit, words):
    pending = [(step, torch.tensor(math.nan), torch.tensor(1.0)) for step in range(1, limit + 2)]
    with pytest.raises(train.Diverged, match=words):
        read_losses(pending, 0, limit, print)


def test_the_run_stops_after_max_skipped_steps(tokens, poisoned, capsys):
    poisoned({2, 4, 6, 8})
    options = f"{OPTIONS} --max-skipped-steps 3 --checkpoint-interval 1 --keep-checkpoints 9"
    assert run_train(f"{options} --out-dir run", tokens) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step 8: " in error
    assert "after 3 skipped steps; stopped; the last good checkpoint is run/step-7" in error
    # a save that is due after a skipped step is made after the next finite step
    saved = [path.name for path in checkpoint.list_checkpoints("run")]
    assert saved == ["step-1", "step-3", "step-5", "step-7"]
    assert run_train("--resume --out-dir run --max-steps 10") == 0, "the count restarts"


def test_no_step_was_finite(tokens, poisoned, capsys):
    poisoned({1, 2, 3})
    assert run_train(f"{OPTIONS} --max-steps 3 --out-dir run", tokens) == 1
    error = capsys.readouterr().err
    assert "no step of this run had a finite loss and gradient norm; stopped; there is no checkpoint" in error


def test_a_validation_loss_that_is_not_finite_stops_the_run(tokens, monkeypatch, capsys):
    monkeypatch.setattr(train, "evaluate", lambda *_: math.nan)
    intervals = "--eval-interval 4 --checkpoint-interval 2 --log-interval 2"
    assert run_train(f"{OPTIONS} --max-steps 8 {intervals} --out-dir run", tokens) == 1
    assert "step 1: validation loss nan; stopped" in capsys.readouterr().err


def test_a_stop_is_postponed_until_a_step_is_finite(tokens, poisoned, monkeypatch, capsys):
    poisoned({5, 6})
    plain = train.learning_rate

    def learning_rate(step, config):
        if step == 5:
            signal.raise_signal(signal.SIGTERM)
        return plain(step, config)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    assert run_train(f"{OPTIONS} --out-dir run", tokens) == 0
    assert "stopped by SIGTERM after step 7: saved run/step-7" in capsys.readouterr().out


# ---------------------------------------------------------------- SIGTERM in a save, two runs on one folder

def test_sigterm_in_a_save(tokens, monkeypatch):
    options = f"{OPTIONS} --eval-interval 0 --max-steps 12 --checkpoint-interval 4 --keep-checkpoints 9"
    assert run_train(f"{options} --out-dir whole", tokens) == 0
    plain, done = checkpoint._write_parts, []

    def write_parts(parts, folder):
        if not done:
            done.append(os.kill(os.getpid(), signal.SIGTERM))
        plain(parts, folder)

    monkeypatch.setattr(checkpoint, "_write_parts", write_parts)
    assert run_train(f"{options} --out-dir run", tokens) == 0
    first, last = checkpoint.list_checkpoints("run")
    assert first.name == "step-4" and not checkpoint._damage(first) and not checkpoint._damage(last)
    assert run_train("--resume --out-dir run") == 0
    assert metrics("run") == metrics("whole")


def test_two_runs_on_one_folder(finished, tokens, capsys):
    shutil.copytree(finished, "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    descriptor = checkpoint.lock("run")
    assert run_train("--resume --out-dir run --max-steps 6") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"run: process {os.getpid()} on " in error and "--out-dir" in error
    assert before == {path: path.read_bytes() for path in before}
    checkpoint.unlock("run", descriptor)
    assert run_train("--resume --out-dir run --max-steps 6") == 0
    assert not Path("run/.lock").exists()


def test_links_in_a_run_are_not_written_through(finished, capsys):
    shutil.copytree(finished, "run")
    shutil.rmtree("run/tensorboard")
    Path("run/profile").mkdir()
    Path("target").write_text("precious")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for make_link in (os.symlink, os.link):
        for name in (".lock", "metrics.tmp", "fp8_health.png", "profile/table.txt", "tensorboard"):
            make_link(Path("target").absolute(), f"run/{name}")
            with pytest.raises(ValueError, match=f"run/{name}: a link .* remove it, or train in a copy"):
                checkpoint.lock("run")
            Path("run", name).unlink()
    os.symlink(Path("target").absolute(), "run/metrics.tmp")
    assert run_train("--resume --out-dir run --max-steps 6") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "run/metrics.tmp: a link" in error
    Path("run/metrics.tmp").unlink()
    assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    shutil.move("run/step-4", "elsewhere")
    os.symlink(Path("elsewhere").absolute(), "run/step-4")
    checkpoint.unlock("run", checkpoint.lock("run"))


def test_another_corpus_under_the_same_path_is_reported(finished, capsys):
    shutil.copytree(finished, "run")
    words = "data holds another corpus than when run/step-"
    for number, said in ((4, False), (5, True)):
        dataset.write_tokens(iter(["abc" * 4000, f"{number}" * 4000]), "data", val_fraction=0.4, force=True)
        if number == 4:
            rewrite_meta("run/step-4", lambda meta: meta.pop("corpus"))  # a version that did not store it
        capsys.readouterr()
        assert run_train(f"--resume --out-dir run --max-steps {number + 1} --data data") == 0
        assert (words in capsys.readouterr().out) == said


def test_a_run_killed_before_its_first_checkpoint_is_started_again(finished, tokens, monkeypatch, capsys):
    plain = train.learning_rate

    def learning_rate(step, config):
        if step == 3:
            raise KeyboardInterrupt
        return plain(step, config)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    options = f"{OPTIONS} --max-steps 4 --eval-interval 0 --out-dir run"
    assert run_train(options, tokens) == 130
    monkeypatch.setattr(train, "learning_rate", plain)
    Path("run/.lock").touch()  # as kill -9 leaves it
    Path("run/.saving-step-3").mkdir()
    capsys.readouterr()
    assert len(metrics("run")) == 2 and run_train("--resume --out-dir run") == 2
    assert "start it again with train.py, without --resume" in capsys.readouterr().err
    assert run_train(options, tokens) == 0
    assert metrics("run") == metrics(finished)


# ---------------------------------------------------------------- versions

def rewrite_meta(folder, change):
    """Apply `change` to meta.json, and write a valid SHA256SUMS for it."""
    path = Path(folder, "meta.json")
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))
    sums = "".join(f"{checksum}  {name}\n" for name, checksum in checkpoint._checksums(path.parent).items())
    Path(folder, "SHA256SUMS").write_text(sums)


def test_checkpoints_of_other_versions(finished, capsys):
    def make_old(meta):
        del meta["format"], meta["config"]["max_skipped_steps"]
        meta["config"]["forgotten"] = 1

    shutil.copytree(finished, "old")
    rewrite_meta("old/step-4", make_old)
    assert run_train("--resume --out-dir old --max-steps 6") == 0  # files without "format" are read
    assert json.loads(Path("old/step-6/meta.json").read_text())["format"] == checkpoint.FORMAT == 1

    shutil.copytree(finished, "new")
    rewrite_meta("new/step-4", lambda meta: meta.update(format=2))
    capsys.readouterr()
    assert run_train("--resume --out-dir new --max-steps 6") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "new/step-4 is of format 2" in error and "up to 1: update" in error


def test_token_files_of_the_version_before_are_read(tokens):
    shutil.copytree(tokens, "old")
    meta = json.loads(Path("old/meta.json").read_text())
    del meta["format"], meta["sha256"]
    Path("old/meta.json").write_text(json.dumps(meta))
    assert dataset.open_tokens("old", "val")[1] == meta


def test_a_checkpoint_that_names_switches_of_the_kernels_as_the_model_s_is_resumed(finished, tokens):
    """fused_block and fused_loss were fields of the model's config."""
    shutil.copytree(finished, "run")
    folder = checkpoint.latest("run")
    meta = json.loads((folder / "meta.json").read_text())
    meta["model_config"] |= {"fused_block": True, "fused_loss": False}
    meta["config"].pop("fast_kernels")
    (folder / "meta.json").write_text(json.dumps(meta))
    sums = [
        f"{dataset.sha256(path)}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(sums))
    assert run_train(f"--resume --out-dir run --max-steps {meta['step'] + 1}") == 0


# ---------------------------------------------------------------- flipped bytes

def test_every_byte_of_the_small_files_counts(finished, tokens, monkeypatch):
    shutil.copytree(finished, "run")
    shutil.copytree(tokens, "altered")
    known = {path: dataset.sha256(path) for path in Path("run").rglob("*.safetensors")}
    # the large files do not change here
    monkeypatch.setattr(checkpoint, "sha256", lambda path: known.get(path) or dataset.sha256(path))

    def refused(function, *arguments):
        with pytest.raises(ValueError) as error:
            function(*arguments)
        return "\n" not in str(error.value)

    for path, opens in (
        (Path("run/step-4/SHA256SUMS"), lambda: checkpoint.read_meta("run/step-4")),
        (Path("altered/meta.json"), lambda: dataset.open_tokens("altered", "val", verify=False)),
    ):
        content = path.read_bytes()
        for place in range(len(content)):
            damaged = bytearray(content)
            # not \v, which also ends a line for Python
            damaged[place] ^= 1 if content[place] == ord("\n") else 1 << place % 8
            path.write_bytes(damaged)
            assert refused(opens), (path, place)
        path.write_bytes(content)
        opens()


# ---------------------------------------------------------------- full disks

def test_a_disk_that_fails_at_any_call_of_a_save(tmp_path):
    parts = {
        "model.a": (torch.arange(10.0), [0]), "model.b": (torch.arange(3, dtype=torch.uint8), [0]),
        "model.c": (torch.ones(4, dtype=torch.bfloat16), [0]),
    }
    calls, good = faults.save_that_fails(tmp_path / "run", parts, '{"step": 2}\n', None)
    counts = {name: calls.count(name) for name in set(calls)}
    assert good and counts == {"mkdir": 1, "write": 6, "sync": 5, "rename": 1}
    for number in range(len(calls)):
        made, good = faults.save_that_fails(tmp_path / "run", parts, '{"step": 2}\n', number)
        assert good and made == calls[:number + 1], f"call {number}, {calls[number]}"


class HalfWritten:
    """A file on a disk that fills up in the middle of a write."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        self.file.write(content[:len(content) // 2])
        self.file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk_full_at(monkeypatch):
    """disk_full_at(name, number): the disk fills up in this write to this log, counted from 1."""
    def choose(name, number):
        writes, plain = [], open

        def opened(path, mode="r", *arguments, **options):
            file = plain(path, mode, *arguments, **options)
            if Path(str(path)).name != name or not mode.startswith("a"):
                return file
            writes.append(path)
            return HalfWritten(file) if len(writes) == number else file

        monkeypatch.setattr(builtins, "open", opened)
    return choose


LOGS = "--log-interval 1 --eval-interval 0 --fp8-health-interval 1"


@pytest.mark.parametrize("name", ["metrics.jsonl", "fp8_health.jsonl"])
@pytest.mark.parametrize("number", [2, 3])  # a record in the middle, and the last
def test_a_disk_that_fills_up_within_a_log_line(tokens, disk_full_at, capsys, name, number):
    disk_full_at(name, number)
    assert run_train(f"{OPTIONS} {LOGS} --max-steps 3 --out-dir run", tokens) == 0
    out = capsys.readouterr().out
    assert f"step {number}: run/{name} is not written: No space left on device; training continues" in out
    assert "--- a sample ---" in out and Path("run/loss.png").exists() and Path("run/fp8_health.png").exists()
    assert [record["step"] for record in read_metrics(f"run/{name}")] == [1, 2, 3], "written later"
    assert run_train("--resume --out-dir run --max-steps 4") == 0
    assert [record["step"] for record in read_metrics(f"run/{name}")] == [1, 2, 3, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_log_that_cannot_be_written_does_not_end_a_run(tokens, monkeypatch, capsys):
    plain = train.Log.__init__

    def init(log, *arguments, **options):
        plain(log, *arguments, **options)
        Path("run/metrics.jsonl").symlink_to("/dev/full")

    monkeypatch.setattr(train.Log, "__init__", init)
    assert run_train(f"{OPTIONS} --max-steps 2 --out-dir run", tokens) == 0
    out = capsys.readouterr().out
    assert "step 2: run/metrics.jsonl is not written: No space left on device; training continues" in out
    assert "loss.png is not drawn: run/metrics.jsonl: not a regular file" in out and "--- a sample ---" in out
    assert checkpoint.latest("run").name == "step-2"


@pytest.mark.parametrize("max_skipped, code", [(0, 1), (10, 0)])
def test_a_damaged_log_and_a_full_disk_do_not_hide_how_a_run_ended(
    tokens, poisoned, monkeypatch, capsys, max_skipped, code
):
    def damage(log, step, health):
        Path("run/fp8_health.jsonl").write_text("{\n{}\n")

    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train.Log, "write_health", damage)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", no_room)
    poisoned({2})
    argv = f"{OPTIONS} {LOGS} --max-steps 3 --max-skipped-steps {max_skipped} --out-dir run"
    assert run_train(argv, tokens) == code
    told = capsys.readouterr()
    assert "fp8_health.png is not drawn: run/fp8_health.jsonl:1: not JSON" in told.out
    if code:
        assert "step 2: loss" in told.err and told.err.count("\n") == 1
    else:
        assert "loss.png is not drawn: No space left on device" in told.out and "--- a sample ---" in told.out


@pytest.mark.parametrize("file, told", [
    ("config", "run/config.json: not written: No space left on device"),
    ("metrics", "run/metrics.jsonl: not rewritten: No space left on device")])
def test_a_resume_without_room_for_the_logs_leaves_them(finished, monkeypatch, capsys, file, told):
    shutil.copytree(finished, "run")
    before, write_text = {path: path.read_bytes() for path in Path("run").glob("*.*")}, Path.write_text

    def no_room(path, text):
        if path.stem != file:
            return write_text(path, text)
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", no_room)
    assert run_train("--resume --out-dir run --max-steps 6") == 2
    assert f"{told}; free some space" in capsys.readouterr().err
    if file == "metrics":  # config.json lists each attempt to resume
        before.pop(Path("run/config.json"))
    assert before and before.items() <= {path: path.read_bytes() for path in Path("run").glob("*.*")}.items()
    assert not list(Path("run").glob("*.tmp"))


# ---------------------------------------------------------------- pickles

class Hostile:
    """Creates the file `ran` when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("ran").absolute(),)


def test_no_code_of_a_file_is_run(finished, tokens, capsys):
    from test_hf import make_folder

    from tools import import_hf

    evil = pickle.dumps(Hostile())
    pickle.loads(evil)
    assert Path("ran").exists(), "unpickling runs its code"
    Path("ran").unlink()
    torch.save({"model.wte.weight": Hostile()}, "evil.pt")
    hostile = [evil, Path("evil.pt").read_bytes()]

    def resume(run):
        folder = Path(run, "step-4")
        sums = "".join(f"{checksum}  {file}\n" for file, checksum in checkpoint._checksums(folder).items())
        (folder / "SHA256SUMS").write_text(sums)  # as an attacker would
        return run_train(f"--resume --out-dir {run} --max-steps 5")

    for number, content in enumerate(hostile):
        # a checkpoint: besides its files, under names of PyTorch's formats, and instead of each of them
        shutil.copytree(finished, f"beside-{number}")
        for name in (".metadata", "__0_0.distcp", "model.pt", "optimizer.bin", "tensors.pkl"):
            Path(f"beside-{number}/step-4", name).write_bytes(content)
        assert resume(f"beside-{number}") == 0
        for name in ("meta.json", "*.safetensors"):
            run = f"run-{number}-{name.strip('*.')}"
            shutil.copytree(finished, run)
            next(Path(run, "step-4").glob(name)).write_bytes(content)
            assert resume(run) == 2, name
        # token files
        for name in ("train.bin", "meta.json", "train.npy"):
            folder = Path(f"tokens-{number}-{name}")
            shutil.copytree(tokens, folder)
            padded = content + b"." * (len(content) % 2)
            (folder / name).write_bytes(padded)
            if name == "train.bin":
                meta = json.loads((folder / "meta.json").read_text())
                meta |= {"train_tokens": len(padded) // 2, "train_sha256": hashlib.sha256(padded).hexdigest()}
                meta["sha256"] = dataset._meta_checksum(meta)
                (folder / "meta.json").write_text(json.dumps(meta))
            try:
                dataset.open_tokens(folder, "train")
            except ValueError as error:
                assert name == "meta.json" and "meta.json: not " in str(error)
        # a Hugging Face folder
        for name in ("pytorch_model.bin", "model.safetensors", "training_args.bin"):
            folder = Path(f"hf-{number}-{name}")
            make_folder(folder, "gpt2")
            if name == "pytorch_model.bin":
                (folder / "model.safetensors").unlink()
            (folder / name).write_bytes(content)
            code = cli.run(lambda: import_hf.main([str(folder), f"run-of-{folder}"]), "tools/import_hf.py")
            assert code == (0 if name == "training_args.bin" else 2)
    assert not Path("ran").exists()


def test_code_that_comes_with_a_hugging_face_folder_is_not_run():
    from test_hf import make_folder

    from tools import import_hf

    make_folder("folder", "gpt2")
    config = json.loads(Path("folder/config.json").read_text())
    Path("folder/evil.py").write_text(
        f"import pathlib\npathlib.Path({str(Path('ran').absolute())!r}).touch()\nclass C: pass\n"
    )
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoTokenizer": "evil.C"}}
    Path("folder/config.json").write_text(json.dumps(config))
    assert cli.run(lambda: import_hf.main(["folder", "run"]), "tools/import_hf.py") == 2
    assert not Path("ran").exists()


def test_a_custom_recipe_is_never_taken_from_a_checkpoint(finished, monkeypatch, capsys):
    monkeypatch.setattr(fp8, "unsupported_reason", lambda name: "")  # Transformer Engine's answer on a GPU
    monkeypatch.syspath_prepend(".")
    shutil.copytree(finished, "run")
    touch = f"import pathlib\npathlib.Path({str(Path('ran').absolute())!r}).touch()\n"
    Path("payload.py").write_text(touch + "def f(role): return None\n")
    rewrite_meta("run/step-4", lambda meta: meta["config"].update(fp8_recipe="custom:payload.f"))
    for more in ("", "--no-resume --resume", "--lr 1e-4"):
        assert run_train(f"--resume --out-dir run --max-steps 5 {more}") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "run/step-4" in error
        assert "pass --fp8-recipe custom:payload.f again" in error
        assert not Path("ran").exists()
    assert run_train("--resume --out-dir run --max-steps 5 --fp8-recipe delayed") == 0
    assert not Path("ran").exists()
    train.read_options("--resume --out-dir run --max-steps 6 --fp8-recipe=custom:payload.f".split())
    assert Path("ran").exists(), "the command line may import code"


def test_nothing_here_unpickles():
    """Except te_reference's reader of TE's state, which takes only tensors and plain containers."""
    folders = (ROOT, *(ROOT / name for name in ("nanote", "fast_kernels", "tools", "bench")))
    for path in [path for folder in folders for path in folder.glob("*.py")]:
        source = path.read_text()
        loads = re.findall(r"torch\.load\(.*", source)
        assert all("weights_only=True" in line for line in loads), path
        unsafe = (r"pickle\.loads?\(", r"allow_pickle=True", r"trust_remote_code=True", r"joblib",
                  r"weights_only=False", r"add_safe_globals")
        for call in unsafe:
            assert not re.search(call, source), (path, call)
        assert ("Unpickler" in source) == (path.name == "te_reference.py"), path


# ---------------------------------------------------------------- the script

def test_numbers_that_make_no_study(capsys):
    for option in ("--kills", "--others", "--jobs"):
        assert cli.run(lambda: faults.main([option, "-1"]), "bench/faults.py") == 2
        error = capsys.readouterr().err
        assert error == f"bench/faults.py: {option} -1: must be at least 1, such as {option} 2\n"


def test_the_script(tmp_path):
    command = [sys.executable, ROOT / "bench/faults.py", "--kills", "1", "--others", "1", "--json",
               str(tmp_path / "faults.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "faults.json").read_text())
    counts = figures["killed"]["counts"]
    assert counts["kills"] == counts["resumed"] == counts["equal_to_the_uninterrupted_run"] == 1
    assert counts["unreadable_checkpoints"] == 0
    assert figures["terminated"]["counts"]["equal_to_the_uninterrupted_run"] == 1
    assert figures["not_a_number"]["counts"]["unchanged"] == 1
    assert all(file["detected"] == file["flipped"] > 0 for file in figures["flipped_bytes"].values())
    assert figures["every_call_fails"]["good"] == figures["every_call_fails"]["tried"] > 10
    assert figures["two_runs"]["second_exit_code"] == 2 and figures["two_runs"]["equal"]
    disk = figures["disk_fills"]
    if "skipped" not in disk:
        assert disk["last_good_stands"] == disk["told"] == disk["failed"]
        assert disk["failed"] >= disk["blocks_of_a_checkpoint"] > 10
