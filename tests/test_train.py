"""train.py: what a step does, what a run says and leaves behind, and how it stops and goes on."""
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

import train
from nanote import checkpoint, logs, models
from nanote.config import TrainConfig
from nanote.loader import Loader
from nanote.logs import plot_losses, read_metrics
from nanote.options import read_config
from nanote.parallel import Ranks
from nanote.schedule import learning_rate
from nanote.tokens import write_tokens
from trainer_tools import OPTIONS, largest_file, losses, metrics, run_train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SHORT = f"{OPTIONS} --n-layer 1 --grad-accum 1 --max-steps 6 --checkpoint-interval 3"
WHOLE = f"{OPTIONS} --max-steps 12 --checkpoint-interval 4 --eval-interval 6 --out-dir run"
OLD_RUN = Path(__file__).parent / "data/run-0.1"  # 6 steps of version 0.1, and its checkpoint of step 3
OWN_MODEL = """
import random, signal, numpy
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
class Model(OptimizedGPT2Model):
    step = -1  # the first pass is a check
    def __init__(self, config: OptimizedConfig):
        super().__init__(config)
    def forward(self, input_ids, labels=None):
        loss = super().forward(input_ids, labels)
        self.step += self.training
        if self.training:
            EVENT
        return loss
"""


def model_where(event: str) -> str:
    """Return the options that train a model in which `event` happens in every training pass."""
    Path("own.py").write_text(OWN_MODEL.replace("EVENT", event))
    return f"--fp8-recipe none --model {Path.cwd()}/own.py:Model"


def saved_steps(run):
    return [checkpoint.step_of(folder) for folder in checkpoint.list_checkpoints(run)]


# ---------------------------------------------------------------- steps

def rates(steps, **options):
    config = TrainConfig(lr=1.0, max_steps=110, **{"warmup_steps": 10} | options)
    return pytest.approx([learning_rate(step, config) for step in steps])


def test_learning_rate_schedules():
    assert [0.1, 0.5, 1.0, 0.55, 0.1] == rates([1, 5, 10, 60, 110])  # cosine
    assert [0.5, 1, 1, 0.55, 0.1] == rates([5, 11, 88, 99, 110], lr_schedule="wsd")
    assert [0.5, 1] == rates([5, 110], lr_schedule="constant")
    # a decay may begin during the warm-up
    expected = [min(step / 105, 0.1 + 0.9 * (110 - step) / 22) for step in range(111)]
    assert expected == rates(range(111), lr_schedule="wsd", warmup_steps=105)


def test_the_loss_falls(tokens):
    assert run_train(f"{OPTIONS} --n-layer 1 --lr 1e-2 --out-dir run", tokens) == 0
    assert losses("run")[0] > 5 and losses("run")[-1] < 3.5
    assert losses("run", "val_loss")[-1] == pytest.approx(losses("run")[-1], abs=0.5)


@pytest.mark.parametrize("answers_only, options", [(False, ""), (True, ""), (True, "--pack-documents")])
def test_gradient_accumulation_equals_a_larger_batch(answers_only, options):
    """Each label counts alike, in an evaluation, too; some micro-batches have no answer."""
    pairs = [["q" * (9 + 7 * i % 120), "answer"[:1 + i % 6]] for i in range(200)]
    write_tokens(pairs, "pairs", val_fraction=0.2, answers_only=answers_only)
    options = f"{SHORT} --dropout 0 --fp8-recipe none --max-steps 3 --eval-interval 2 {options}"
    assert run_train(f"{options} --micro-batch-size 1 --grad-accum 8 --out-dir small", "pairs") == 0
    assert run_train(f"{options} --micro-batch-size 8 --out-dir large", "pairs") == 0
    for key, tolerance in (("loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-4)):
        assert losses("small", key) == pytest.approx(losses("large", key), rel=tolerance)
    # the loss of answers is not that of all bytes
    assert bool(losses("small", "val_bits_per_byte")) != answers_only


def test_evaluation_and_logging_leave_training_as_it_was(tokens):
    often = "--eval-interval 2 --fp8-health-interval 3 --checkpoint-interval 2"
    assert run_train(f"{SHORT} {often} --out-dir often", tokens) == 0
    assert run_train(f"{SHORT} --eval-interval 0 --checkpoint-interval 0 --out-dir never", tokens) == 0
    assert losses("often") == losses("never")
    assert len(losses("often", "val_loss")) == 4 and not losses("never", "val_loss")


def test_a_step_that_is_not_finite_changes_nothing(tokens, capsys):
    event = "loss = loss * float('nan') if self.step == 3 else loss"
    options = f"{SHORT} {model_where(event)} --eval-interval 1"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    assert "step 3: loss nan" in capsys.readouterr().out
    val_losses = losses("run", "val_loss")
    assert losses("run")[2] == losses("run")[1], "the log has the last finite loss"
    assert val_losses[1] == val_losses[2] and len(set(val_losses)) == 5
    assert losses("run", "skipped") == [0, 0, 1, 1, 1, 1]
    assert saved_steps("run") == [3, 6]


def test_a_run_stops_and_resumes_exactly_in_a_skipped_step(tokens):
    """Losses, and every tensor of the last checkpoint. Step 3 is the eighth pass of a new run: one finds
    mistakes, four find scales."""
    event = "loss = loss * float('nan') if self.step == 7 and not resumed() else loss"
    stop = "signal.raise_signal(signal.SIGTERM) if self.step == 7 and stops() else None"
    own = model_where(f"{event}\n            {stop}").replace("--fp8-recipe none", "--fp8-recipe delayed")
    Path("own.py").write_text("import os\nresumed = lambda: os.path.exists('resumed')\n"
                              "stops = lambda: os.path.exists('stops')\n" + Path("own.py").read_text())
    assert run_train(f"{SHORT} {own} --out-dir whole", tokens) == 0
    Path("stops").touch()
    assert run_train(f"{SHORT} {own} --checkpoint-interval 5 --out-dir run", tokens) == 0
    assert saved_steps("run") == [3] and losses("run", "skipped")[-1] == 1
    Path("resumed").touch()
    assert run_train(f"--resume --out-dir run --checkpoint-interval 3 {own}") == 0
    assert losses("run") == losses("whole") and losses("run", "val_loss") == losses("whole", "val_loss")
    found, expected = tensors("run"), tensors("whole")
    assert all(torch.equal(value, found[name]) for name, value in expected.items() if name != "rng0.host")
    meta = json.loads((checkpoint.latest("run") / "meta.json").read_text())
    assert meta["skipped"] == [3], "still known, to find the last good checkpoint"


def test_the_log_names_a_scale_that_fell(tokens, capsys):
    """Step 3 is the eighth pass: one finds mistakes, four find scales."""
    own = model_where("loss = loss * 1e12 if self.step == 7 else loss")
    own = own.replace("--fp8-recipe none", "--fp8-recipe delayed")
    assert run_train(f"{SHORT} {own} --log-interval 4 --out-dir run", tokens) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "fell by more than 2^20" in line]
    assert len(lines) == 1 and " for 8 steps; " in lines[0]
    assert lines[0].startswith("step 3: the scale of lm_head output_gradient fell")


def test_random_generators_repeat_and_resume(tokens):
    """The checkpoint of step 4 is after five gauss(), with the first pass: Python keeps the sixth number."""
    own = model_where("loss = loss * (9 + random.gauss(0, 1)) * numpy.random.rand()")
    own += " --checkpoint-interval 2"
    for run in ("one", "other"):
        np.random.seed(5)
        assert run_train(f"{SHORT} {own} --out-dir {run}", tokens) == 0
    assert metrics("one") == metrics("other")
    shutil.rmtree("other/step-6")
    assert run_train(f"--resume --out-dir other {own}") == 0
    assert metrics("one") == metrics("other")


# ---------------------------------------------------------------- first scales

def test_the_first_step_loses_no_gradient(tokens):
    """Scales start at 1, which would flush small gradients to zero."""
    options = f"{OPTIONS} --dropout 0 --max-steps 1 --fp8-format e4m3"
    assert run_train(f"{options} --out-dir fp8", tokens) == 0
    assert run_train(f"{options} --fp8-recipe none --out-dir exact", tokens) == 0
    assert losses("fp8", "grad_norm") == pytest.approx(losses("exact", "grad_norm"), rel=0.05)


# ---------------------------------------------------------------- what a run says and leaves

def test_what_a_run_says_and_leaves(tokens, capsys, monkeypatch):
    monkeypatch.setattr(logs, "plot_losses", plot_losses)  # which conftest.py replaces
    options = f"{SHORT} --grad-accum 2 --checkpoint-interval 2 --keep-checkpoints 2 --log-interval 4"
    assert run_train(f"{options} --fp8-recipe block --out-dir run", tokens) == 0
    out = capsys.readouterr().out
    _, engine, corpus, *_ = out.splitlines()  # the first line: --fp8-amax-history-len has no effect
    assert engine.startswith("run from step 1: tiny on ") and "--fp8-recipe block e4m3" in engine
    assert corpus.startswith(f"{tokens}: ") and corpus.endswith(" epochs, 512 tokens a step")
    for wanted in ("6 steps are done", "run/loss.png", "run/metrics.jsonl", "run/step-6", "sample.py run"):
        assert wanted in out
    assert saved_steps("run") == [4, 6] and os.listdir("run/tensorboard")
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")
    records = read_metrics("run/metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 4, 6]  # 2 is saved
    assert {"val_loss", "val_bits_per_byte", "val_loss_without_fp8"} <= set(records[-1])
    config = json.loads(Path("run/config.json").read_text())
    assert (config["n_embd"], config["vocab_size"], config["n_positions"]) == (64, 288, 64)


def test_runs_get_folders_of_their_own(tokens):
    for _ in range(2):
        assert run_train(f"{SHORT} --max-steps 1 --eval-interval 0", tokens) == 0
    assert sorted(os.listdir("out")) == ["tiny", "tiny-2"]


# Parameters of the published models. The vocabulary of GPT-2 and of llama-160m (32,000) is padded to 50,304.
COUNTS = {
    "gpt2-124m": 124_439_808 + 47 * 768, "gpt2-350m": 354_823_168 + 47 * 1024,
    "gpt2-774m": 774_030_080 + 47 * 1280, "gpt2-1.5b": 1_557_611_200 + 47 * 1600,
    "llama-160m": 162_417_408 + 2 * 18_304 * 768, "llama3-1b": 1_235_814_400, "llama3-8b": 8_030_261_248}


@pytest.mark.parametrize("preset", COUNTS)
def test_presets_have_the_published_shapes(preset):
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = read_config(["--preset", preset])
    options = vars(config) | {"n_positions": config.seq_len, "use_fp8": True,
                              "vocab_size": config.vocab_size or 50304}
    with FakeTensorMode():  # no memory behind the tensors
        model = models.model_classes("optimized")[0](models.make_model_config("optimized", options))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[preset]


# ---------------------------------------------------------------- stopping, and going on

def test_ctrl_c_finishes_the_step_and_saves(tokens, capfd):
    own = model_where("self.step == 4 and signal.raise_signal(signal.SIGINT)")
    assert run_train(f"{SHORT} {own} --out-dir run", tokens) == 0
    assert saved_steps("run")[-1] == 4 and len(losses("run")) == 4
    out, error = capfd.readouterr()
    assert "stopping after this step; Ctrl-C stops now" in error
    command = "python train.py --resume --out-dir run"
    assert f"stopped after step 4; saved run/step-4; resume with: {command}" in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once(tokens, capsys):
    own = model_where("""if self.step == 5:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)""")
    assert run_train(f"{SHORT} {own} --out-dir run", tokens) == 130
    assert saved_steps("run") == [3] and "Traceback" not in capsys.readouterr().err


def test_sigint_stays_ignored_in_the_background(tokens):
    """As under nohup, or after & in a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = model_where("signal.raise_signal(signal.SIGINT)")
    assert run_train(f"{SHORT} {own} --out-dir run", tokens) == 0
    assert len(losses("run")) == 6 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_full_disk_does_not_stop_a_run(tokens, capsys):
    assert run_train(f"{SHORT} --max-steps 2 --keep-checkpoints 1 --out-dir run", tokens) == 0
    with largest_file(200_000):  # smaller than a checkpoint
        assert run_train("--resume --out-dir run --max-steps 6") == 2
    out, error = capsys.readouterr()
    assert "step-6: not written: " in error and error.count("\n") == 1
    assert "step-3: not written: " in out and "; training continues" in out
    assert len(losses("run")) == 6 and saved_steps("run") == [2]
    assert run_train("--resume --out-dir run --max-steps 7") == 0 and saved_steps("run") == [6, 7]


@pytest.mark.parametrize("before, after", [
    ("--fp8-recipe delayed --dtype float32", "--fp8-recipe none --dtype bfloat16"),
    ("--fp8-recipe delayed --dtype float32", "--fp8-recipe current"),
    ("--fp8-recipe none --dtype bfloat16", "--fp8-recipe delayed --dtype float32")])
def test_precision_may_change_on_resume(tokens, before, after):
    options = f"{SHORT} --dropout 0 --lr 1e-2 --max-steps 20 --checkpoint-interval 14 --eval-interval 0"
    assert run_train(f"{options} {before} --out-dir same", tokens) == 0
    shutil.copytree("same", "changed", ignore=shutil.ignore_patterns("step-20"))
    assert run_train(f"--resume --out-dir changed {after}") == 0
    same, changed = losses("same"), losses("changed")
    assert same[:14] == changed[:14] and same[14:] != changed[14:]
    assert changed == pytest.approx(same, rel=0.02)
    assert same[-1] < 0.8 * same[0], "the loss has fallen so far that a bad resume would show"


def test_a_resumed_run_reads_the_next_samples(tokens, monkeypatch):
    read = []

    class Recorded(Loader):
        def batches(self, step):
            batches = super().batches(step)
            for batch in batches:
                read.extend(batch.inputs[0].tolist())
            return batches

    monkeypatch.setattr(train, "Loader", Recorded)
    options = f"{SHORT} --fp8-recipe none --eval-interval 0"
    assert run_train(f"{options} --max-steps 1 --out-dir run", tokens) == 0  # 4 samples
    for steps, changes in ((4, "--micro-batch-size 2"), (5, "--grad-accum 4"), (6, "--micro-batch-size 4")):
        assert run_train(f"--resume --out-dir run --max-steps {steps} {changes}") == 0
    config = TrainConfig(data=tokens, seq_len=64, micro_batch_size=1, grad_accum=4 + 3 * 2 + 8 + 16)
    loader = Loader(config, "train", Ranks())
    assert read == [batch.inputs[0].flatten().tolist() for batch in loader.batches(1)]


# ---------------------------------------------------------------- kills, damage, old runs, bad weights

@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokens):
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_train(WHOLE.replace("--out-dir run", f"--out-dir {folder / 'run'}"), tokens) == 0
    return folder / "run"


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
    process = multiprocessing.get_context("fork").Process(target=train_in_fork, args=(WHOLE, tokens))
    process.start()
    while process.is_alive() and not moment():
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert process.exitcode == -9 and checkpoint.latest("run").name in ("step-4", "step-8")
    assert run_train("--resume --out-dir run") == 0
    assert equals("run", whole) and not list(Path("run").glob(".*ing-*"))


@pytest.mark.parametrize("name", ["*.safetensors", "meta.json", "SHA256SUMS"])
def test_a_damaged_file_stops_a_resume_in_one_line(whole, name, refused):
    resume = "--resume --out-dir run --max-steps 13"
    for number in (1, 3, 4, 6):
        shutil.copytree(whole, "run", dirs_exist_ok=True)
        path = next(Path("run/step-12").glob(name))
        content = bytearray(path.read_bytes())
        content[len(content) * number // 7] ^= 1 << number
        path.write_bytes(content if number % 2 else content[:len(content) * number // 7])
        if number == 6:
            path.unlink()
        named = "run/step-12" if name == "SHA256SUMS" else f"run/step-12/{path.name}: "
        assert named in refused(train.run, resume)
    shutil.copytree(whole, "run", dirs_exist_ok=True)
    Path("run/step-12/._shard.safetensors").write_bytes(b"of another system")
    assert "/._shard.safetensors: " in refused(train.run, resume)
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
    assert saved_steps("run") == [3, 14]
    shutil.rmtree("run/step-14")
    assert all(torch.equal(value, good[name]) for name, value in tensors("run").items())
    assert run_train("--resume --out-dir run --lr 1e-3 --max-steps 5") == 0
    assert metrics("run")[-1]["skipped"] == 0


def test_a_run_is_trained_by_one_process(whole, refused):
    shutil.copytree(whole, "run")
    resume = "--resume --out-dir run --max-steps 13 --lr 0.5"
    with checkpoint.locked("run"):
        assert "another process trains there" in refused(train.run, resume)
    assert run_train(resume) == 0


def test_fp8_begins_in_a_resumed_run_with_larger_steps(tokens):
    options = f"{SHORT} --max-steps 2 --eval-interval 0 --fp8-recipe none --out-dir run"
    assert run_train(options, tokens) == 0
    assert run_train("--resume --out-dir run --fp8-recipe delayed --micro-batch-size 16 --max-steps 4") == 0
    assert len(metrics("run")) == 4
