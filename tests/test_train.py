"""train.py: exact resume, stopping, the files of a run, and the arithmetic of a step."""
import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import train
from fork_server import run_python
from nanote import checkpoint, fp8_health, models, roofline
from nanote import metrics as metrics_module
from nanote.config import TrainConfig, pick_vocab_size, read_options
from nanote.dataset import Loader
from nanote.metrics import Log, Meter, describe_corpus, flops_per_token, peak_flops, read_metrics
from trainer_tools import OPTIONS, ROOT, metrics, run_train, spawn_train


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def slow_writer(monkeypatch):
    """A checkpoint is written only once BackgroundSaver.wait is called."""
    waited = threading.Event()
    plain_wait, plain_write = checkpoint.BackgroundSaver.wait, checkpoint._write_parts

    def wait(saver):
        if saver.writing is not None:
            waited.set()
            plain_wait(saver)
            waited.clear()

    def write_parts(*arguments):
        return waited.wait(20) and plain_write(*arguments)

    monkeypatch.setattr(checkpoint.BackgroundSaver, "wait", wait)
    monkeypatch.setattr(checkpoint, "_write_parts", write_parts)


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def no_closing_report(monkeypatch):
    """A sample and plots take longer than a run of a few steps."""
    monkeypatch.setattr(train, "sample_text", lambda run: "text")
    monkeypatch.setattr(train, "draw", lambda name, *_: name)


@pytest.mark.parametrize("recipe", ["delayed", "none"])
def test_killed_and_resumed_equals_uninterrupted(tokens, recipe):
    options = f"{OPTIONS} --fp8-recipe {recipe}"
    assert run_train(f"{options} --out-dir whole", tokens) == 0
    killed = spawn_train(f"{options} --out-dir killed", tokens, f"""
plain = train.learning_rate
def learning_rate(step, config):
    while step == 16:
        if os.path.exists("killed/step-12"):  # written by a thread
            {KILL}
    return plain(step, config)
train.learning_rate = learning_rate""")
    assert killed.returncode == -signal.SIGKILL
    assert metrics("killed")[-1]["step"] == 15 and checkpoint.latest("killed").name == "step-12"
    assert run_train("--resume --out-dir killed") == 0
    assert metrics("killed") == metrics("whole")  # every loss, gradient norm and validation loss, bit for bit
    evaluated = [record["step"] for record in metrics("whole") if "val_loss" in record]
    assert len(metrics("whole")) == 24 and evaluated == [1, 8, 16, 24]


def test_killed_while_saving_resumes_from_the_checkpoint_before(tokens):
    killed = spawn_train(f"{OPTIONS} --checkpoint-interval 8 --out-dir killed", tokens, f"""
plain = checkpoint._checksums
checkpoint._checksums = lambda folder: {KILL} if 'step-16' in str(folder) else plain(folder)""")
    assert killed.returncode == -signal.SIGKILL
    assert Path("killed/.saving-step-16").is_dir() and checkpoint.latest("killed").name == "step-8"
    assert run_train("--resume --out-dir killed") == 0
    assert sorted(path.name for path in Path("killed").glob("*step-*")) == ["step-16", "step-24"]
    assert not list(Path("killed").glob(".*")), "what the kill left behind is removed"
    assert run_train(f"{OPTIONS} --out-dir whole", tokens) == 0
    assert metrics("killed") == metrics("whole")


FORMATS = {"FP8": "--fp8-recipe delayed --dtype float32", "current": "--fp8-recipe current --dtype float32",
           "BF16": "--fp8-recipe none --dtype bfloat16"}


def test_killed_while_evaluating_a_saved_step(tokens, monkeypatch, capsys, no_closing_report):
    plain = train.evaluate
    options = (f"{OPTIONS} --n-layer 1 --max-steps 4 --eval-interval 2 --checkpoint-interval 1 "
               "--fp8-health-interval 2 --no-background-saves")
    assert run_train(f"{options} --out-dir whole", tokens) == 0
    begun = set()

    def evaluate(*arguments):  # killed at the first evaluation of steps 2 and 4
        step = checkpoint.latest("run").name
        if step != "step-1" and step not in begun:
            begun.add(step)
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(train, "evaluate", evaluate)
    assert run_train(f"{options} --out-dir run", tokens) == 130 and metrics("run")[-1]["step"] == 1
    assert run_train("--resume --out-dir run") == 130 and metrics("run")[-1]["step"] == 3
    said = []
    for _ in range(2):  # the second time nothing is left to do but to report
        capsys.readouterr()
        assert run_train("--resume --out-dir run") == 0
        assert metrics("run") == metrics("whole")
        said.append(capsys.readouterr().out.partition("--- a sample ---")[2])
    assert said[0] == said[1] and f"validation loss {metrics('run')[-1]['val_loss']:.4f}" in said[0]
    assert read_metrics("run/fp8_health.jsonl") == read_metrics("whole/fp8_health.jsonl")


@pytest.mark.parametrize("error, last", [(BrokenPipeError(errno.EPIPE, "Broken pipe"), 2),
                                         (OSError(errno.ENOSPC, "No space left on device"), 4)])
def test_lines_that_cannot_be_printed(tokens, monkeypatch, capsys, no_closing_report, error, last):
    lines = []

    def write(line):
        lines.append(line)
        if line.startswith("step 1/"):
            raise error

    monkeypatch.setattr(metrics_module.tqdm, "write", write)
    assert run_train(f"{OPTIONS} --n-layer 1 --max-steps 4 --out-dir run", tokens) == 0
    assert [record["step"] for record in metrics("run")] == list(range(1, last + 1))
    assert checkpoint.latest("run").name == f"step-{last}"
    stopped = "stopped by a closed stdout after step 2: saved run/step-2; resume with: python"
    assert (stopped in capsys.readouterr().err) == (last == 2)


def test_a_folder_that_is_renamed_while_training(tokens, monkeypatch, capsys, no_closing_report):
    plain = train.learning_rate

    def learning_rate(step, config):
        if step == 3:
            os.rename("run", "renamed")
        return plain(step, config)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    options = f"{OPTIONS} --n-layer 1 --max-steps 5 --checkpoint-interval 2 --no-background-saves"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    assert "step 3: run was renamed or deleted; training goes on in a new folder" in capsys.readouterr().out
    assert [path.name for path in checkpoint.list_checkpoints("run")] == ["step-4", "step-5"]
    assert [[record["step"] for record in metrics(run)] for run in ("renamed", "run")] == [[1, 2], [3, 4, 5]]


def test_a_tokenizer_that_is_missing_is_reported_before_training(tokens, monkeypatch, capsys):
    def get_tokenizer(*_):
        raise ValueError("tokenizer hf:/x: no such folder; name its new place with --tokenizer hf:DIR")

    monkeypatch.setattr(train, "get_tokenizer", get_tokenizer)
    assert run_train(f"{OPTIONS} --n-layer 1 --max-steps 1 --out-dir run", tokens) == 0
    before, _, after = capsys.readouterr().out.partition("step 1/1")
    assert "tokenizer hf:/x: no such folder: training does not need it" in before
    assert "no sample: there is no tokenizer byte here" in after and "--tokenizer" not in before + after


@pytest.mark.parametrize("before, others", [("FP8", ["BF16", "current"]), ("BF16", ["FP8"])])
def test_precision_may_change_on_resume(tokens, before, others):
    options = f"{OPTIONS} --dropout 0 --lr 3e-3 --max-steps 40 --checkpoint-interval 30"
    assert run_train(f"{options} {FORMATS[before]} --out-dir same", tokens) == 0
    same = [record["loss"] for record in metrics("same")]
    for after in others:
        shutil.copytree("same/step-30", f"{after}/step-30")
        assert run_train(f"--resume --out-dir {after} {FORMATS[after]}") == 0
        changed = [record["loss"] for record in metrics(after)]
        assert len(changed) == 11 and changed[0] == same[29] and same[30:] != changed[1:]
        assert changed == pytest.approx(same[29:], rel=0.01)
    assert same[39] < same[0] / 3, "the loss has fallen so far that a bad resume would show"


def test_a_resumed_run_with_other_batches_goes_on_with_the_next_samples(tokens, monkeypatch):
    plain, read = train.get_batches, []

    def get_batches(loader, step, grad_accum):
        batches = plain(loader, step, grad_accum)
        read.extend(row.tolist() for inputs, _ in batches for row in inputs)
        return batches

    monkeypatch.setattr(train, "get_batches", get_batches)
    options = OPTIONS.replace("--checkpoint-interval 12", "--checkpoint-interval 1")
    assert run_train(f"{options} --grad-accum 1 --max-steps 1 --out-dir run", tokens) == 0  # of 4 samples
    for steps, changes in ((4, "--micro-batch-size 2"), (5, "--grad-accum 4"), (6, "--micro-batch-size 4")):
        assert run_train(f"--resume --out-dir run --max-steps {steps} {changes}") == 0
    loader = Loader(tokens, "train", seq_len=64, micro_batch_size=1, seed=TrainConfig().seed)
    expected = [loader.batch(index)[0][0].tolist() for index in range(4 + 3 * 2 + 8 + 16)]
    loader.close()
    assert read == expected


@pytest.mark.parametrize("changes, is_found", [
    ("", False), ("--fp8-format hybrid", False), ("--micro-batch-size 8 --grad-accum 1", False),
    ("--fp8-format e4m3", True), ("--fp8-lm-head", True), ("--fp8-skip-first 0", True),
    ("--grad-accum 1", True), ("--grad-accum 4", False)])
def test_scales_are_found_again_where_they_do_not_fit(tokens, monkeypatch, changes, is_found):
    options = f"{OPTIONS} --no-fp8-lm-head --fp8-skip-first 1 --max-steps 1 --checkpoint-interval 1"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    found = []
    monkeypatch.setattr(train, "warm_up_scales", lambda *_: found.append(True))
    assert run_train(f"--resume --out-dir run --max-steps 2 {changes}") == 0
    assert bool(found) == is_found


def test_no_rank_prints_a_sample_if_one_has_no_tokenizer(monkeypatch):
    """The ranks of a sharded model generate it together."""
    sharded = TrainConfig(parallel="fsdp")
    monkeypatch.setattr(train.parallel, "is_sharded", lambda config: config is sharded)
    monkeypatch.setattr(train.parallel, "reason_of_any_rank", lambda reason: reason or "no tokenizer x")
    said = []
    log = SimpleNamespace(say=said.append)
    assert train.find_tokenizer(sharded, "byte", log) is None
    assert train.find_tokenizer(TrainConfig(), "byte", log) is not None, "rank 0 generates alone"
    assert said == ["no tokenizer x: training does not need it, but will print no sample at the end"]


def test_resume_takes_the_newest_run_and_its_options(tokens):
    for _ in range(2):
        assert run_train(f"{OPTIONS} --max-steps 4", tokens) == 0
    assert sorted(os.listdir("out")) == ["tiny", "tiny-2"]
    assert run_train("--resume --max-steps 6") == 0
    assert [record["step"] for record in metrics("out/tiny-2")] == [1, 2, 3, 4, 5, 6]
    assert len(metrics("out/tiny")) == 4


def test_options_without_an_effect_are_named(tokens, capsys):
    options = f"{OPTIONS} --max-steps 2 --no-fp8-lm-head --out-dir"
    assert run_train(f"{options} quiet --fp8-recipe delayed --warmup-steps 0", tokens) == 0
    told = capsys.readouterr().out
    assert "effect" not in told and "--warmup-steps" not in told
    more = "--fp8-recipe none --hsdp-replicas 2 --warmup-steps 2 --lr 1e-4"
    assert run_train(f"{options} told {more}", tokens) == 0
    told = capsys.readouterr().out
    assert "without FP8 these options have no effect: --fp8-amax-history-len, --fp8-lm-head\n" in told
    assert "--parallel ddp: --hsdp-replicas has no effect\n" in told
    assert "--warmup-steps 2: the learning rate rises in all 2 steps; pass fewer, such as 0\n" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_saves_and_exits_0(tokens, monkeypatch, capsys, slow_writer, number):
    send_at_step_5(monkeypatch, number)
    assert run_train(f"{OPTIONS} --out-dir stopped", tokens) == 0
    assert checkpoint.latest("stopped").name == "step-5" and metrics("stopped")[-1]["step"] == 5
    resume = "resume with: python train.py --resume --out-dir stopped"
    assert f"saved stopped/step-5; {resume}" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def send_at_step_5(monkeypatch, *numbers):
    plain = train.learning_rate

    def learning_rate(step, config):
        for number in numbers if step == 5 else ():
            signal.raise_signal(number)
        return plain(step, config)

    monkeypatch.setattr(train, "learning_rate", learning_rate)


def test_ctrl_c_is_answered_at_once(tokens, monkeypatch, capfd):
    """By the signal handler: a step of a large model takes seconds."""
    plain, answers = train.TrainStep.__call__, []

    def step(self, *arguments, **options):
        if len(answers) < 5:
            capfd.readouterr()
            if len(answers) == 4:
                signal.raise_signal(signal.SIGINT)
            answers.append(capfd.readouterr().err)
        return plain(self, *arguments, **options)

    monkeypatch.setattr(train.TrainStep, "__call__", step)
    assert run_train(f"{OPTIONS} --out-dir stopped", tokens) == 0
    assert answers == [""] * 4 + ["\nstopping after this step; Ctrl-C again stops now\n"]
    assert checkpoint.latest("stopped").name == "step-5"


def test_the_log_says_epochs_and_the_time_left(tokens, capsys):
    count = json.loads(Path(tokens, "meta.json").read_text())["train_tokens"]
    assert run_train(f"{OPTIONS} --max-steps 12 --log-interval 4 --out-dir run", tokens) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{tokens}: {count:,} tokens, {12 * 512 / count:.2g} epochs in 12 steps" in lines[0]
    assert not [line for line in lines if "--max-steps" in line], "less than 10 epochs: no warning"
    timed = {line.split("/")[0]: " ETA " in line for line in lines if line.startswith("step ")}
    assert timed == {"step 1": False, "step 4": True, "step 8": True, "step 12": False}


def test_too_many_epochs_are_warned_of_in_one_line():
    config = TrainConfig(data="data/small", max_steps=101)
    meta = {"train_tokens": 10_000, "tokenizer": "byte"}
    assert describe_corpus(config, meta, 990)[1] == ""  # 9.999 epochs
    size, warning = describe_corpus(config, meta, 1000)
    assert size == "data/small: 10,000 tokens, 10.1 epochs in 101 steps"
    commands = "python data.py packages", "python data.py hf ", "--max-steps 10 "
    assert "10.1 epochs" in warning and all(command in warning for command in commands)
    assert "\n" not in warning and "--tokenizer" not in warning, "a run in bytes refuses other tokens"
    assert "--max-steps 1 " in describe_corpus(config, meta | {"train_tokens": 900}, 1000)[1]
    warning = describe_corpus(config, meta | {"tokenizer": "hf:my models/Q@de55ae29be14"}, 1000)[1]
    assert warning.count(" --tokenizer 'hf:my models/Q'") == 2 and "gpt2" not in warning


def test_the_time_left_leaves_the_first_steps_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now[0])
    meter = metrics_module.Meter(TrainConfig(n_positions=8, vocab_size=32), 10**6, torch.device("cpu"), 1)
    meter.start()
    meter.add(1, torch.tensor(1.0), torch.tensor(1.0))
    now[0] = 1000.0  # capture and warm-up
    assert meter.seconds_left(100) is None
    meter.restart()
    for step in range(2, 12):
        meter.add(step, torch.tensor(1.0), torch.tensor(1.0))
        now[0] += 3.0
    assert meter.seconds_left(100) == pytest.approx(89 * 3)
    meter.restart()
    assert meter.seconds_left(100) == pytest.approx(89 * 3) and meter.seconds_left(11) is None
    assert [metrics_module.shown_time(seconds) for seconds in (59, 125, 12_600, 200_000)] == [
        "59 s", "2 min", "3.5 h", "2.3 days"]


def test_bits_per_byte_are_logged(tokens, tmp_path, capsys):
    assert run_train(f"{OPTIONS} --max-steps 1 --out-dir run", tokens) == 0
    record, = metrics("run")
    meta = json.loads(Path(tokens, "meta.json").read_text())
    bits = record["val_loss"] * meta["val_tokens"] / meta["val_bytes"] / math.log(2)
    assert record["val_bits_per_byte"] == pytest.approx(bits)
    out = capsys.readouterr().out
    assert f"val loss {record['val_loss']:.4f} ({bits:.4f} bits a byte)" in out
    assert f"validation loss {record['val_loss']:.4f} nats a byte, {bits:.4f} bits a byte after 1 step" in out
    older = shutil.copytree(tokens, tmp_path / "older")
    kept = {key: value for key, value in meta.items() if key not in ("val_bytes", "format", "sha256")}
    (older / "meta.json").write_text(json.dumps(kept))
    assert run_train(f"{OPTIONS} --max-steps 1 --out-dir older-run", str(older)) == 0
    assert "val_bits_per_byte" not in metrics("older-run")[0] and "bits a" not in capsys.readouterr().out


def test_a_run_that_was_started_with_sigint_ignored_keeps_it_ignored(tokens, monkeypatch):
    """As under nohup, or in the background of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    send_at_step_5(monkeypatch, signal.SIGINT)
    assert run_train(f"{OPTIONS} --max-steps 6 --out-dir run", tokens) == 0
    assert checkpoint.latest("run").name == "step-6"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    send_at_step_5(monkeypatch, signal.SIGTERM, signal.SIGINT)
    assert run_train(f"{OPTIONS} --out-dir stopped", tokens) == 0, "the second signal must not interrupt"
    assert checkpoint.latest("stopped").name == "step-5" and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("limit, last", [("", "step 21"), ("--max-skipped-steps 0", "step 11")])
def test_non_finite_loss_stops_names_the_step_and_keeps_the_last_good(
    tokens, monkeypatch, capsys, slow_writer, limit, last
):
    plain = train.learning_rate

    def learning_rate(step, config):
        return 1e38 if step == 10 else plain(step, config)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    options = f"{OPTIONS} --checkpoint-interval 8 --eval-interval 0 --log-interval 1000 {limit} --out-dir bad"
    assert run_train(options, tokens) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{last}: " in error
    assert "bad/step-8" in error and "--fp8-recipe current" in error
    assert [path.name for path in checkpoint.list_checkpoints("bad")] == ["step-8"]


def test_what_a_run_leaves_behind(tokens, capsys):
    intervals = "--checkpoint-interval 2 --keep-checkpoints 3 --log-interval 3"
    options = f"{OPTIONS} {intervals} --max-steps 9 --out-dir run"
    assert run_train(options, tokens, ending=contextlib.nullcontext) == 0
    out = capsys.readouterr().out
    assert "te_reference" in out.splitlines()[0] and "512 tokens a step" in out
    files = "run/loss.png", "run/metrics.jsonl", "run/tensorboard", "run/step-9"
    for wanted in ("validation loss", "nats a byte", *files):
        assert wanted in out
    assert [path.name for path in checkpoint.list_checkpoints("run")] == ["step-6", "step-8", "step-9"]
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")
    assert list(Path("run/tensorboard").iterdir())
    assert [record["step"] for record in metrics("run")] == [1, 3, 6, 8, 9]  # 8: an evaluation
    seconds = [record["seconds"] for record in read_metrics("run/metrics.jsonl")]
    assert seconds == sorted(seconds) and seconds[0] > 0
    fields = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "roofline", "peak_gib"}
    for record in read_metrics("run/metrics.jsonl"):
        assert fields <= set(record) and record["tokens_per_s"] > 0
    config = json.loads(Path("run/step-9/meta.json").read_text())["config"]
    assert (config["n_embd"], config["vocab_size"], config["n_positions"]) == (64, 288, 64)


def test_evaluation_and_logging_leave_training_as_it_was(tokens):
    assert run_train(f"{OPTIONS} --max-steps 12 --eval-interval 3 --out-dir often", tokens) == 0
    assert run_train(f"{OPTIONS} --max-steps 12 --eval-interval 0 --out-dir once", tokens) == 0
    assert [record["loss"] for record in metrics("often")] == [record["loss"] for record in metrics("once")]


def test_gradient_accumulation_equals_a_larger_batch(tokens):
    options = f"{OPTIONS} --dropout 0 --fp8-recipe none --max-steps 6"
    assert run_train(f"{options} --micro-batch-size 2 --grad-accum 4 --out-dir small", tokens) == 0
    assert run_train(f"{options} --micro-batch-size 8 --grad-accum 1 --out-dir large", tokens) == 0
    small, large = ([record["loss"] for record in metrics(run)] for run in ("small", "large"))
    assert small == pytest.approx(large, rel=1e-5)


@pytest.mark.parametrize("how", ["", "--no-background-saves"])
def test_full_disk_is_reported_and_does_not_end_a_run(tokens, monkeypatch, capsys, how):
    plain = checkpoint._sync

    def sync(path):
        return raise_full_disk() if "step-4" in str(path) else plain(path)

    monkeypatch.setattr(checkpoint, "_sync", sync)
    options = f"{OPTIONS} {how} --checkpoint-interval 2 --keep-checkpoints 9 --max-steps 6"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    told, = [line for line in capsys.readouterr().out.splitlines() if "not written" in line]
    assert "run/step-4 not written: No space left on device; the last good checkpoint is run/step-2" in told
    assert told.endswith("; training continues")
    assert [path.name for path in checkpoint.list_checkpoints("run")] == ["step-2", "step-6"]
    assert not list(Path("run").glob(".*"))


def test_full_disk_is_reported_before_the_next_save(tokens, monkeypatch, capsys):
    failed, plain_sync, plain_rate = threading.Event(), checkpoint._sync, train.learning_rate

    def sync(path):
        if "step-4" in str(path):
            failed.set()
            raise_full_disk()
        plain_sync(path)

    def learning_rate(step, config):
        if step == 6:
            assert failed.wait(60)
            time.sleep(0.5)  # until the writer has handled the error
        return plain_rate(step, config)

    monkeypatch.setattr(checkpoint, "_sync", sync)
    monkeypatch.setattr(train, "learning_rate", learning_rate)
    assert run_train(f"{OPTIONS} --checkpoint-interval 4 --max-steps 8 --out-dir run", tokens) == 0
    lines = capsys.readouterr().out.splitlines()
    told, = [number for number, line in enumerate(lines) if "not written" in line]
    after, = [number for number, line in enumerate(lines) if line.startswith("step 6/")]
    assert told < after


def test_full_disk_at_the_end_is_an_error(tokens, monkeypatch, capsys, slow_writer):
    monkeypatch.setattr(checkpoint, "_sync", lambda path: raise_full_disk())
    assert run_train(f"{OPTIONS} --checkpoint-interval 4 --max-steps 8 --out-dir run", tokens) == 2
    streams = capsys.readouterr()
    assert "run/step-4 not written" in streams.out and "training continues" in streams.out
    assert "step-8" not in streams.out and streams.err.count("\n") == 1
    assert "run/step-8 not written: No space left on device; there is no earlier one" in streams.err
    assert not list(Path("run").glob("*step-*"))


def test_training_continues_while_a_checkpoint_is_written(tokens, monkeypatch):
    options = f"{OPTIONS} --checkpoint-interval 6 --max-steps 12 --keep-checkpoints 9"
    assert run_train(f"{options} --no-background-saves --out-dir waits", tokens) == 0
    at_10, plain_write, plain_rate = threading.Event(), checkpoint._write_parts, train.learning_rate

    def write_parts(parts, folder):
        assert at_10.wait(60), "training waits for the writer"
        plain_write(parts, folder)

    def learning_rate(step, config):
        if step == 10:
            assert not Path("run/step-6").exists()
            at_10.set()
        return plain_rate(step, config)

    monkeypatch.setattr(checkpoint, "_write_parts", write_parts)
    monkeypatch.setattr(train, "learning_rate", learning_rate)
    assert run_train(f"{options} --out-dir run", tokens) == 0
    assert metrics("run") == metrics("waits")
    for step in (6, 12):
        files = (next(Path(folder, f"step-{step}").glob("*.safetensors")) for folder in ("run", "waits"))
        run, waits = map(load_file, files)
        # rng0.host holds the state of Python's generator, which a run does not seed.
        different = [name for name in run if name != "rng0.host" and not torch.equal(run[name], waits[name])]
        assert run.keys() == waits.keys() and different == [], "the tensors must be those of the saved step"


def test_an_error_waits_for_the_writer(tokens, monkeypatch, slow_writer):
    plain = train.learning_rate

    def learning_rate(step, config):
        return 1 / 0 if step == 7 else plain(step, config)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    with pytest.raises(ZeroDivisionError):
        run_train(f"{OPTIONS} --checkpoint-interval 6 --out-dir run", tokens)
    assert [path.name for path in Path("run").glob("*step-*")] == ["step-6"]


def raise_full_disk():
    raise OSError(28, "No space left on device")


def test_two_processes_train_as_one_and_one_resumes_from_two(tokens):
    """Started with torchrun. test_parallel.py has the same without FP8, and closer."""
    options = (f"{OPTIONS} --dropout 0 --lr-schedule constant "
               "--eval-steps None --eval-tokens 700")  # 11 windows: the last batch is not full
    command = (f"-m torch.distributed.run --standalone --nproc_per_node 2 {ROOT / 'train.py'} {options} "
               "--micro-batch-size 2 --max-steps 4 --out-dir two")
    done = subprocess.run(
        [sys.executable, *command.split(), "--data", tokens], capture_output=True, text=True, timeout=120,
        env=os.environ | {"NANOTE_REFERENCE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 4/4") == 1 and len(metrics("two")) == 4  # only rank 0 prints
    assert run_train(f"{options} --max-steps 8 --out-dir one", tokens) == 0
    assert run_train("--resume --out-dir two --micro-batch-size 4 --max-steps 8") == 0
    # sums in another order may round to another FP8 value: losses stay close, gradient norms diverge after a
    # few steps
    two, one = metrics("two"), metrics("one")
    assert two[0]["val_loss"] == pytest.approx(one[0]["val_loss"], rel=1e-2)  # of the same windows
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-2)
    expected = [r["grad_norm"] for r in one[:4]]
    assert [r["grad_norm"] for r in two[:4]] == pytest.approx(expected, rel=5e-2)


# ---------------------------------------------------------------- options and arithmetic

@pytest.mark.parametrize("name, module", [
    ("triton", "None"), ("fast_kernels", "None"),
    ("fast_kernels", "types.ModuleType('fast_kernels')")])  # of which bytecode is left
def test_the_trainer_and_the_doctor_need_no_kernels(tokens, name, module):
    code = f"""if True:
        import sys, types
        sys.path.insert(0, {str(ROOT)!r})
        sys.modules[{name!r}] = {module}
        import doctor
        import train
        doctor.diagnose(doctor.Facts())
        sys.exit(train.main({f"{OPTIONS} --max-steps 1 --out-dir run --data {tokens}".split()}))"""
    done = run_python("-c", code, env={"NANOTE_REFERENCE": "1"})
    assert done.returncode == 0 and len(metrics("run")) == 1, done.stderr


# Parameters of the published models. The vocabulary of GPT-2 and of llama-160m (32,000) is padded to 50,304.
COUNTS = {
    "gpt2-124m": 124_439_808 + 47 * 768, "gpt2-350m": 354_823_168 + 47 * 1024,
    "gpt2-774m": 774_030_080 + 47 * 1280, "gpt2-1.5b": 1_557_611_200 + 47 * 1600,
    "llama-160m": 162_417_408 + 2 * 18_304 * 768, "llama3-1b": 1_235_814_400, "llama3-8b": 8_030_261_248,
}


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_the_published_shapes(preset, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode
    monkeypatch.setattr(train.Loader, "__init__", None)
    config, *_ = read_options(["--preset", preset])
    vocabulary = config.vocab_size or 50304
    options = vars(config) | {"vocab_size": vocabulary, "n_positions": config.seq_len, "use_fp8": True}
    with FakeTensorMode():  # no memory behind the tensors
        model = models.model_classes("optimized")[0](models.make_model_config("optimized", options))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[preset]


def test_preset_gives_defaults_that_options_override(capsys):
    for argv in (["--preset", "llama3-1b", "--n-layer", "3"], ["--n-layer=3", "--preset=llama3-1b"]):
        config, *_ = read_options(argv)
        chosen = config.preset, config.n_layer, config.n_kv_head, config.rope_theta
        assert chosen == ("llama3-1b", 3, 8, 500000.0)
    config, *_ = read_options(["--compile", "--no-fp8-lm-head", "--fp8-recipe", "current"])
    assert config.compile and not config.fp8_lm_head
    with pytest.raises(SystemExit) as stop:
        read_options(["--preset", "gpt2-350m", "--help"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    for wanted in ("--n-embd", "(default: 1024)", "--fp8-amax-history-len"):
        assert wanted in help_text


def test_help_is_grouped_and_begins_with_examples(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run_train("--help") == 0
    beginning, *rest = re.split(r"\n\W*([a-z, ]+) options\W*\n", capsys.readouterr().out)
    assert sum("train.py --" in line for line in beginning.splitlines()) == 3
    groups = dict(zip(rest[::2], rest[1::2]))
    for group, option in {"run": "--preset STR", "model": "--n-layer INT", "precision": "--fp8-recipe STR",
                          "training": "--lr FLOAT", "diagnostics": "--profile "}.items():
        assert option in groups[group]
    assert "--eval-tokens INT" in groups["evaluation, logging and checkpoints"]
    assert "Peak learning rate." in groups["training"], "help from a comment"
    assert "constant, then" in groups["training"], "help from a docstring"
    fields = "".join(groups.values())
    assert all(f"--{field.name.replace('_', '-')}" in fields for field in dataclasses.fields(TrainConfig))


@pytest.mark.parametrize("given, hint", [
    ("--learning-rate 1e-3", "--lr "), ("--batch_size=4", "--micro-batch-size "),
    ("--epochs 2", "--max-steps"), ("--max_iters 10", "--max-steps "), ("--block_size 64", "--seq-len "),
    ("--n-layers 2", "--n-layer "), ("--dtype fp8", "--fp8-recipe delayed"),
    ("--dtype=fp8", "--fp8-recipe delayed")])
def test_options_of_other_programs_name_ours(capsys, given, hint):
    assert run_train(given) == 2
    error = capsys.readouterr().err
    name = given.split("=")[0].split()[0]
    assert error.startswith(f"train.py: {name}") and f"; use {hint}" in error and error.count("\n") == 1


def test_a_reader_that_stops_reading_is_no_error():
    for length in (10, 100_000):  # as in: python train.py --help | head -1
        line = f"import sys; from nanote import cli; sys.exit(cli.run(lambda: print('x' * {length}), 'a.py'))"
        shown = subprocess.Popen([sys.executable, "-c", line], stdout=subprocess.PIPE, cwd=ROOT,
                                 stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": ""})
        shown.stdout.close()
        assert shown.stderr.read() == b"" and shown.wait(60) == 141


@pytest.mark.parametrize("model, lacks", [("te", "activation, use_rmsnorm, use_rotary"), ("optimized", None)])
def test_options_of_the_preset_that_the_model_does_not_have_are_reported(tokens, capsys, model, lacks):
    """The preset tiny is a Llama, model_te.py a GPT-2."""
    assert run_train(f"{OPTIONS} --model {model} --max-steps 1 --eval-interval 0 --out-dir run", tokens) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(said) == (lacks is not None)
    assert all(f"'{model}' has no " in line and "'tiny'" in line for line in said)
    if lacks:
        assert all(name in said[0] for name in lacks.split(", "))


@pytest.mark.parametrize("steps, words", [(1, "after 1 step, on "), (2, "after 2 steps, on ")])
def test_the_summary_names_the_steps(tokens, capsys, steps, words):
    assert run_train(f"{OPTIONS} --n-layer 1 --max-steps {steps} --out-dir run", tokens) == 0
    assert words in capsys.readouterr().out


def test_a_run_says_and_keeps_its_fp8_format(tokens, monkeypatch, capsys):
    """auto is the recipe's default; an earlier checkpoint, saved with hybrid, continues with hybrid."""
    drawn, options = [], f"{OPTIONS} --n-layer 1 --max-steps 1 --fp8-recipe block --fp8-health-interval 1"
    plot = lambda records, path, title, fp8_format: drawn.append((title, fp8_format))  # noqa: E731
    monkeypatch.setattr(fp8_health, "plot", plot)
    assert run_train(f"{options} --out-dir own", tokens) == 0
    assert "FP8 block (e4m3)" in capsys.readouterr().out and drawn == [("own, FP8 block (e4m3)", "e4m3")]
    assert run_train(f"{options} --fp8-format hybrid --out-dir before", tokens) == 0
    assert run_train("--resume --max-steps 2 --out-dir before", tokens) == 0
    assert capsys.readouterr().out.count("FP8 block (hybrid)") == 2
    assert drawn[-1] == ("before, FP8 block (hybrid)", "hybrid")
    assert run_train("--resume --max-steps 3 --fp8-format auto --out-dir before", tokens) == 0
    assert "FP8 block (e4m3)" in capsys.readouterr().out


def test_every_recipe_option_reaches_the_model(tokens, monkeypatch):
    seen = {}
    monkeypatch.setattr(train, "evaluate", lambda model, loader, steps: seen.update(model=model) or 0.0)
    fp8_options = ("--fp8-format e4m3 --fp8-amax-history-len 5 --fp8-amax-compute-algo most_recent "
                   "--fp8-margin 2 --no-fp8-lm-head")
    assert run_train(f"{OPTIONS} --max-steps 1 {fp8_options} --out-dir run", tokens) == 0
    recipe, config = seen["model"].fp8_recipe, seen["model"].config
    assert (recipe.fp8_format.name, recipe.amax_history_len) == ("E4M3", 5)
    assert (recipe.amax_compute_algo, recipe.margin) == ("most_recent", 2)
    assert config.use_fp8 and not config.fp8_lm_head


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_weights_kept_in_fp8_train_and_resume_exactly(tokens, recipe):
    options = (f"{OPTIONS} --n-layer 1 --fp8-param --fp8-recipe {recipe} --max-steps 12 "
               "--checkpoint-interval 6")
    assert run_train(f"{options} --out-dir whole", tokens) == 0
    shutil.copytree("whole", "half")
    shutil.rmtree("half/step-12")
    assert run_train("--resume --out-dir half") == 0
    assert metrics("half") == metrics("whole")
    whole, half = (load_file(next(Path(run, "step-12").glob("*.safetensors"))) for run in ("whole", "half"))
    assert whole.keys() == half.keys()
    python_generator = "rng0.host"  # tqdm and others use it
    whole.pop(python_generator)
    assert not [name for name in whole if not torch.equal(whole[name], half[name])]


def test_learning_rate_schedules():
    def at(step, **options):
        config = TrainConfig(lr=1.0, max_steps=110, warmup_steps=10, min_lr_ratio=0.1, **options)
        return train.learning_rate(step, config)

    assert [at(1), at(5), at(10)] == pytest.approx([0.1, 0.5, 1.0])
    assert [at(60), at(110)] == pytest.approx([0.55, 0.1])  # half of the cosine, its end
    wsd = dict(lr_schedule="wsd", decay_fraction=0.2)
    rates = [at(step, **wsd) for step in (5, 11, 88, 99, 110)]
    assert rates == pytest.approx([0.5, 1, 1, 0.55, 0.1])
    assert [at(5, lr_schedule="constant"), at(110, lr_schedule="constant")] == pytest.approx([0.5, 1])


def test_flops_per_token_by_hand():
    gpt2 = TrainConfig(
        n_layer=12, n_head=12, n_embd=768, seq_len=1024, n_positions=1024, vocab_size=50304
    )
    parameters = 124_475_904
    assert flops_per_token(parameters, gpt2) == 6 * (parameters - 1024 * 768) + 12 * 12 * 768 * 1024
    llama = TrainConfig(
        n_layer=2, n_head=4, head_dim=32, n_embd=64, seq_len=16, vocab_size=288, use_rotary=True,
        tie_embeddings=False,
    )
    assert flops_per_token(100_000, llama) == 6 * (100_000 - 288 * 64) + 12 * 2 * 128 * 16


def test_peak_flops_by_name(monkeypatch):
    for name, tflops in {
        "NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835,
        "NVIDIA L40S": 362, "NVIDIA L4": 121, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA B200": 2250,
        "NVIDIA GeForce RTX 4090": 165,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == tflops * 1e12, name
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Future 1")
    assert peak_flops(torch.device("cuda")) is None and peak_flops(torch.device("cpu")) is None


def test_the_log_says_which_share_of_the_roofline_a_step_reaches(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    config = TrainConfig(n_layer=1, n_head=1, n_embd=64, vocab_size=96, seq_len=16, n_positions=16,
                         micro_batch_size=1, grad_accum=2, moment_dtype="bfloat16")
    # weights of the block 12·64², of the head 96·64; the data sheet: 989 TFLOP/s, twice that in FP8, 4.8 TB/s
    gemms, attention = 6 * 32 * (49_152 + 6_144) / (2 * 989e12), 7 * 2 * 16**2 * 64 / 989e12
    moved = (4 + 8 + 8) * (49_152 + 6_144) + 4 * 32 * 96
    least = gemms + attention + moved / 4.8e12
    meter = Meter(config, 100_000, torch.device("cuda"), 1)
    meter.finite, meter.steps, meter.seconds = (3.0, 1.0), 10, 10 * 4 * least
    record = meter.record(10, 1e-3)
    assert record["roofline"] == pytest.approx(0.25)
    log = Log(str(tmp_path), 1, 10, enabled=True)
    log.write(record)
    log.write(record | {"mfu": None, "roofline": None})
    log.close()
    known, unknown = capsys.readouterr().out.splitlines()
    assert "  roofline 25.0 %" in known and "roofline" not in unknown
    for unknown in ({"fp8_recipe": "nvfp4"}, {"dtype": "float32"}):
        assert roofline.least_ms(replace(config, **unknown), torch.device("cuda")) is None
    assert roofline.least_ms(config, torch.device("cpu")) is None
    bf16 = roofline.least_ms(replace(config, fp8_recipe="none"), torch.device("cuda"))
    assert bf16 == pytest.approx(1e3 * (least + gemms))


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    decayed, plain = train.make_optimizer(model, TrainConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decayed["params"] == [model[0].weight] and len(plain["params"]) == 3


def test_vocabulary_is_padded_for_fp8():
    def rows(needed, **options):
        return pick_vocab_size(TrainConfig(**options), {"vocab_size": needed, "tokenizer": "byte"})

    assert [rows(257), rows(50257), rows(100277), rows(1024)] == [288, 50304, 100352, 1024]
    assert rows(257, vocab_size=512) == 512
