"""nanote/meter.py and logs.py: what a run measures and logs, and traces of its steps."""
import gzip
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanote import logs
from nanote.command import error_line
from nanote.config import TrainConfig
from nanote.evaluation import val_record
from nanote.meter import Diverged, StepMeter, flops_per_token
from nanote.parallel import Ranks
from nanote.profiling import Profiler
from trainer_tools import largest_file, losses

CPU = torch.device("cpu")
ONE_PROCESS = Ranks()


@pytest.fixture(autouse=True)
def start(in_tmp_path):
    """A function that starts a log in the folder run; returns it and the meter of its steps."""
    def start(first_step=1, ranks=ONE_PROCESS, device=CPU, tokens_per_step=1000, **options):
        loader = SimpleNamespace(meta={"train_tokens": 10_000}, device=device, ranks=ranks,
                                 tokens_per_step=tokens_per_step, samples_before=lambda step: step - 1,
                                 first_step=first_step)
        config = dict(max_steps=100, model="own.py:Model", data="data/small", fp8_recipe="none") | options
        config = TrainConfig(out_dir=os.path.abspath("run"), **config)
        log = logs.Log(config, loader)
        return log, StepMeter(config, torch.nn.Linear(2, 2), loader, [], log.say)

    Path("run").mkdir()
    return start


def train(log, meter, values, first_step=1):
    """Log each of the losses as a step of its own."""
    for step, loss in enumerate(values, first_step):
        meter.add(step, torch.tensor(loss), torch.tensor(1.0))
        log.move_bar(step)
        write(log, meter, step)
        meter.restart_clock()


def write(log, meter, step, lr=1e-3, **others):
    """Write the record of a step, as train.py does."""
    record = meter.collect(step, lr)
    if record is not None:
        log.write(record | others)


# ---------------------------------------------------------------- records

def test_a_line_has_the_fields_of_the_contract(start, capsys):
    log, meter = start()
    train(log, meter, [4.0, 3.0])
    meter.add(3, torch.tensor(2.0), torch.tensor(0.5))
    write(log, meter, 3, lr=2e-3, **val_record(2.5, {"val_bytes": 100, "val_tokens": 50}))
    log.close()
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in records] == [4, 3, 2]
    last = records[-1]
    assert last["val_bits_per_byte"] == pytest.approx(2.5 * 50 / 100 / math.log(2))
    assert (last["step"], last["lr"], last["grad_norm"], last["skipped"]) == (3, 2e-3, 0.5, 0)
    assert last["tokens_per_s"] > 0
    assert last["seconds"] > 0
    assert last["mfu"] is None and last["peak_gib"] is None, "on a CPU"
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("step 3/100  loss 2.0000  grad norm 0.500  lr 2.00e-03  ")
    assert "val loss 2.5000  (1.8034 bits a byte)  ETA " in line
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")


def test_speed_counts_the_tokens_of_all_ranks(start, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    _, meter = start(ranks=Ranks(0, 0, 4), device=torch.device("cuda"), tokens_per_step=192)
    meter.flops_per_token = 1e9
    for step in (1, 2):
        meter.add(step, torch.tensor(1.0), torch.tensor(1.0))
        now[0] += 2.0
    record = meter.collect(2, 1e-3)
    assert record["tokens_per_s"] == 192 * 2 / 4.0
    assert record["mfu"] == pytest.approx(record["tokens_per_s"] * 1e9 / (4 * 989e12))
    assert record["peak_gib"] == 3
    now[0] += 60  # an evaluation
    meter.restart_clock()
    meter.add(3, torch.tensor(1.0), torch.tensor(1.0))
    now[0] += 1.0
    assert meter.collect(3, 1e-3)["tokens_per_s"] == 192


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (2.0, math.inf)])
def test_more_than_ten_skipped_steps_end_a_run(start, capsys, loss, norm):
    log, meter = start()
    train(log, meter, [4.0])
    for step in range(2, 13):
        meter.add(step, torch.tensor(loss), torch.tensor(norm))
    with pytest.raises(Diverged, match=f"step 12: loss {loss}, .*{norm}, after 10 skipped steps"):
        meter.collect(12, 1e-3)
    said = capsys.readouterr().out
    assert f"step 2: loss {loss}" in said and "skipped (1 of 10)" in said


def test_a_run_without_a_finite_step_has_diverged(start):
    log, meter = start(max_steps=2)
    with pytest.raises(Diverged, match="step 2"):
        train(log, meter, [math.nan, math.nan])
    assert not Path("run/metrics.jsonl").exists()


# ---------------------------------------------------------------- what fails

@pytest.mark.parametrize("room", [0, 10])  # bytes
def test_a_full_disk_does_not_stop_a_run(start, monkeypatch, capsys, room):
    log, meter = start()
    train(log, meter, [4.0])
    with largest_file(Path("run/metrics.jsonl").stat().st_size + room):
        train(log, meter, [3.0], first_step=2)
    assert losses("run") == [4.0] and Path("run/metrics.jsonl").read_text().endswith("}\n")
    train(log, meter, [2.0], first_step=3)
    assert "step 2: metrics.jsonl is not written: " in capsys.readouterr().out
    assert losses("run") == [4.0, 3.0, 2.0], "written later"


@pytest.mark.parametrize("missing, other", [("wandb", "tensorboard"), ("tensorboard", "logged")])
def test_a_missing_logger_is_a_line_and_the_rest_is_written(start, monkeypatch, capsys, missing, other):
    pytest.importorskip("tensorboard")
    make_wandb(monkeypatch)
    for module in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)  # not installed
    log, meter = start(wandb="mine")
    train(log, meter, [4.0])
    log.close()
    name = "--wandb mine" if missing == "wandb" else missing
    assert capsys.readouterr().out.startswith(f"step 0: {name} is not written: {missing} is not installed; "
                                              f"pip install {missing}; training continues\n")
    assert losses("run") == [4.0] and (Path("run", other).exists() or Path(other).exists())
    assert not Path("run", missing).exists()


def test_a_resumed_run_leaves_no_file_on_a_full_disk(start):
    train(*start(), [4.0, 3.0])
    before = Path("run/metrics.jsonl").read_text()
    with largest_file(10), pytest.raises(OSError) as error:
        logs.cut("run", 2)
    assert error_line(error.value) == "run/metrics.jsonl: File too large"
    assert Path("run/metrics.jsonl").read_text() == before and not Path("run/metrics.tmp").exists()


def test_training_losses_are_drawn_without_an_evaluation(start):
    log, meter = start()
    train(log, meter, [4.0, 3.0])
    assert not Path("run/loss.png").exists()
    log.close()
    assert Path("run/loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_without_a_label_has_no_loss(start, capsys):
    log, meter = start(log_interval=1)
    meter.add_without_labels(1)
    write(log, meter, 1)
    train(log, meter, [4.0], first_step=2)
    meter.add_without_labels(3)
    write(log, meter, 3, val_loss=2.0)
    log.close()
    records = logs.read_metrics("run/metrics.jsonl")
    assert [(r["loss"], r["grad_norm"]) for r in records] == [(None, None), (4.0, 1.0), (None, None)]
    assert [r["skipped"] for r in records] == [0, 0, 0] and records[0]["tokens_per_s"] == 0
    said = capsys.readouterr().out
    assert "step 3: no token is a label: skipped\n" in said
    assert "step 3/100  no label  lr 1.00e-03  val loss 2.0000\n" in said, "without a speed and an ETA"


@pytest.mark.parametrize("recipe, shown", [
    ("none", "--fp8-recipe none; "), ("delayed", "delayed hybrid, 0 of 1 GEMMs in FP8 (use te.Linear")])
def test_the_first_line_names_the_recipe(start, capsys, recipe, shown):
    log, _ = start(fp8_recipe=recipe)
    log.say_start(torch.nn.Linear(2, 2), "")
    assert shown in capsys.readouterr().out


def make_wandb(monkeypatch):
    """A stand-in of wandb, which writes to the working folder."""
    monkeypatch.syspath_prepend(os.getcwd())
    Path("wandb.py").write_text("""
import json
class Run:
    def log(self, scalars, step):
        print(json.dumps([step, scalars]), file=open("logged", "a"))
    def finish(self):
        open("finished", "w")
def init(**options):
    json.dump(options, open("options", "w"))
    return Run()
""")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


def test_wandb_gets_the_numbers_and_the_options(start, monkeypatch):
    make_wandb(monkeypatch)
    log, meter = start(wandb="mine")
    train(log, meter, [4.0])
    log.close()
    options = json.loads(Path("options").read_text())
    assert (options["project"], options["name"], options["config"]["preset"]) == ("mine", "run", "tiny")
    step, scalars = json.loads(Path("logged").read_text())
    assert step == 1 and scalars["loss"] == 4 and "mfu" not in scalars and Path("finished").exists()


def test_tensorboard_shows_the_curves(start):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log, meter = start()
    train(log, meter, [4.0, 3.0])
    log.close()
    scalars = accumulator.EventAccumulator("run/tensorboard").Reload().Scalars("loss")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(1, 4.0), (2, 3.0)]


@pytest.mark.parametrize("line, reason", [
    ("{", "Expecting"), ("[1]", "list"), ('{"loss": 1}', "step"), ("\xff", "utf")])
def test_a_damaged_log_names_file_and_line(start, line, reason):
    Path("run/metrics.jsonl").write_bytes(b'{"step": 1, "loss": 4}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"^run/metrics\.jsonl:2: damaged .*; remove this line$") as error:
        logs.read_metrics("run/metrics.jsonl")
    assert reason in str(error.value)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        logs.cut("run", 1)


def test_a_resumed_run_repeats_no_line(start):
    """Nor one that is incomplete."""
    train(*start(), [4.0, 3.0])
    Path("run/fp8_health.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    with open("run/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert losses("run") == [4.0, 3.0]
    logs.cut("run", 2)
    assert losses("run") == [4.0] and logs.read_metrics("run/fp8_health.jsonl") == []
    train(*start(first_step=2), [2.0], first_step=2)
    assert losses("run") == [4.0, 2.0]
    logs.cut("elsewhere", 1)  # a run without logs


# ---------------------------------------------------------------- units

def test_flops_per_token_by_hand():
    gpt2 = SimpleNamespace(n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50304,
                           tie_embeddings=True)
    position_table = 1024 * 768
    expected = 6 * (124_475_904 - position_table) + 12 * 12 * 768 * 1024
    assert flops_per_token(gpt2, 124_475_904, seq_len=1024) == expected
    llama = SimpleNamespace(n_layer=2, n_head=4, n_embd=64, n_positions=1024, vocab_size=288,
                            tie_embeddings=False, use_rotary=True, head_dim=32)
    embedding = 288 * 64
    expected = 6 * (100_000 - embedding) + 12 * 2 * (4 * 32) * 16
    assert flops_per_token(llama, 100_000, seq_len=16) == expected


# ---------------------------------------------------------------- --profile

def profile(steps, count=6):
    with Profiler(steps, "run", CPU) as profiler:
        for step in range(1, count + 1):
            with profiler.step(step):
                torch.ones(8, 8) @ torch.ones(8, 8)


@pytest.mark.parametrize("steps, traced", [
    ("3:4", ["step 3", "step 4"]), ("5:90", ["step 5", "step 6"]), ("90", [])])
def test_a_trace_has_its_steps_and_no_others(capsys, steps, traced):
    """Also of a run that ends before."""
    profile(steps)
    names = []
    if Path("run/profile/trace.json.gz").exists():
        with gzip.open("run/profile/trace.json.gz") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert "aten::mm" in Path("run/profile/table.txt").read_text()
        assert "run/profile" in capsys.readouterr().out
    assert sorted({name for name in names if name.startswith("step ")}) == traced
    assert names.count("aten::mm") == len(traced)


@pytest.mark.parametrize("steps", ["5:3", "0:3", "three", "3:", "3-5"])
def test_a_bad_range_is_one_line(steps):
    with pytest.raises(ValueError, match=f"^--profile {steps}: must be START:STOP, such as 10:12"):
        Profiler(steps, "run", CPU)
