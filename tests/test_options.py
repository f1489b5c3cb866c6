"""Options that a model or another option would ignore: said in a line, or refused if they were typed."""
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import train
from nanote import recipes
from nanote.config import TrainConfig
from nanote.loader import Loader
from nanote.options import read_config
from nanote.parallel import Ranks
from nanote.tokens import write_tokens
from trainer_tools import ROOT, run_train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SHORT = ("--n-layer 1 --n-head 2 --n-embd 64 --seq-len 64 --micro-batch-size 2 --max-steps 2 "
         "--warmup-steps 1 --eval-interval 0 --checkpoint-interval 1 --device cpu")


@pytest.fixture(scope="module")
def run_of_custom(tmp_path_factory, tokens):
    """The folder of a run of --preset tiny --model custom; copy it before changing it."""
    run = tmp_path_factory.mktemp("custom") / "run"
    assert run_train(f"{SHORT} --model custom --out-dir {run}", tokens) == 0
    return run


def lines_beginning(start: str, capsys) -> list[str]:
    """Return the lines with this start that were printed since the last call."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]


def typed(text: str) -> set[str]:
    return set(read_config(text.split()).typed)


# ---------------------------------------------------------------- what was typed

def test_typed_options_are_those_of_command_line_and_file(run_of_custom):
    assert typed("") == set()
    assert typed("--lr=1e-3 --no-bias --grad_accum 2 --n-kv-head None") == {
        "lr", "bias", "grad_accum", "n_kv_head"}
    Path("a.yaml").write_text("lr: 6e-5\nuse-qk-norm: false\nset: {}\n")
    assert typed("--config a.yaml --seed 3") == {"config", "lr", "use_qk_norm", "seed", "set"}
    assert typed(f"--config {run_of_custom}/config.json --seed 3") == {"config", "seed"}
    assert typed(f"--resume --out-dir {run_of_custom} --seed 3") == {"resume", "out_dir", "seed"}


@pytest.mark.parametrize("given", ["--gc-interval 5", "--fp8-interval=1", "--attention fused"])
def test_a_mistake_names_the_pages_of_other_options(given, capsys):
    with pytest.raises(SystemExit) as end:
        read_config(given.split())
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and given.split("=")[0].split()[0] in "".join(lines)
    assert lines[-1] == "options of Megatron: guide/older_guides.md; of older versions: CHANGELOG.md"


# ---------------------------------------------------------------- options that a model lacks

@pytest.mark.parametrize("name, preset, line", [
    ("custom", "tiny", "--model custom: has no activation=swiglu, use_rmsnorm, use_rotary of --preset tiny: "
                       "trains with GELU, LayerNorm, learned positions"),
    ("te", "llama3-1b --vocab-size 512", "--model te: has no n_kv_head=8, head_dim=64, activation=swiglu, "
     "use_rmsnorm, use_rotary, rope_theta=500000.0 of --preset llama3-1b: trains with as many key and value "
     "heads as heads, head_dim = n_embd / n_head, GELU, LayerNorm, learned positions"),
    ("fused", "gpt2-124m", ""),
    ("advanced", "tiny", ""),
    ("optimized", "tiny", "")])
def test_a_line_says_what_a_model_lacks_of_a_preset(tokens, capsys, name, preset, line):
    options = f"{SHORT} --preset {preset} --model {name} --grad-accum 1 --n-inner 64 --max-steps 1"
    assert run_train(f"{options} --checkpoint-interval 0 --out-dir run", tokens) == 0
    assert lines_beginning("--model", capsys) == ([line] if line else [])


@pytest.mark.parametrize("name", ["custom", "fused", "te"])
@pytest.mark.parametrize("option, field", [
    ("--use-rmsnorm", "use_rmsnorm"), ("--no-use-rotary", "use_rotary"),
    ("--activation swiglu", "activation"), ("--n-kv-head 2", "n_kv_head"), ("--attention auto", "attention"),
    ("--gradient-checkpointing", "gradient_checkpointing")])
def test_a_typed_option_that_a_model_lacks_is_refused(tokens, refused, name, option, field):
    """Even if its value is the preset's or the default."""
    line = refused(train.run, f"{SHORT} --model {name} {option} --data {tokens}", "train.py")
    assert f"{option}: the config of --model {name} has no field {field}; leave the option out" in line


def test_a_file_is_typed_and_another_run_is_not(tokens, run_of_custom, refused, capsys):
    Path("a.json").write_text('{"model": "custom", "use_rotary": true}')
    arguments = f"{SHORT} --config a.json --data {tokens}"
    assert "--use-rotary: the config of --model custom has no" in refused(train.run, arguments, "train.py")
    assert json.loads((run_of_custom / "config.json").read_text())["use_rotary"]
    assert run_train(f"--config {run_of_custom}/config.json --out-dir again") == 0
    shutil.copytree(run_of_custom, "run")
    assert run_train("--resume --out-dir run --max-steps 3") == 0
    assert capsys.readouterr().out.count("--model custom: has no activation=swiglu") == 2


# ---------------------------------------------------------------- options without effect

@pytest.mark.parametrize("given, line", [
    ("--fp8-recipe current --fp8-margin 1", "--fp8-margin 1: no effect with --fp8-recipe current"),
    ("--fp8-recipe none --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
     "--fp8-amax-history-len 1024, --fp8-amax-compute-algo max: no effect with --fp8-recipe none"),
    ("--fp8-recipe none --fp8-lm-head --fp8-skip-last 1",
     "--fp8-lm-head, --fp8-skip-last 1: no effect with --fp8-recipe none"),
    ("--no-use-rotary --rope-theta 5e5", "--rope-theta 500000.0: no effect with --no-use-rotary"),
    ("--dtype float32 --param-remainders", "--param-remainders: no effect with --dtype float32"),
    ("--eval-interval 0 --eval-tokens 512", "--eval-tokens 512: no effect with --eval-interval 0"),
    ("--checkpoint-interval 0 --keep-checkpoints 9",
     "--keep-checkpoints 9: no effect with --checkpoint-interval 0"),
    ("--max-steps 5 --fp8-health-interval 9", "--fp8-health-interval 9: no effect with --max-steps 5"),
    ("--eval-only --out-dir RUN --lr 1e-3 --grad-accum 2 --eval-tokens 64",
     "--grad-accum 2, --lr 0.001: no effect with --eval-only"),
    ("--fp8-recipe none --fp8-margin 0 --fp8-skip-first 0 --no-fp8-lm-head --fp8-format auto", ""),
    ("--preset llama3-8b --no-use-rotary", ""), ("--model own.py:Net --rope-theta 5e5 --no-use-rotary", ""),
    ("--config RUN/config.json --fp8-recipe none", ""), ("--resume --out-dir RUN --fp8-recipe none", "")])
def test_typed_options_without_effect_are_named(run_with_history, capsys, given, line):
    read_config(given.replace("RUN", str(run_with_history)).split())
    assert capsys.readouterr().out.splitlines() == ([line] if line else [])


@pytest.fixture(scope="module")
def run_with_history(tmp_path_factory, tokens):
    """The folder of a run that set what only delayed scaling uses."""
    run = tmp_path_factory.mktemp("history") / "run"
    assert run_train(f"{SHORT} --fp8-amax-history-len 8 --fp8-margin 1 --out-dir {run}", tokens) == 0
    return run


@pytest.mark.parametrize("given, reached", [
    ("--warmup-steps 100 --max-steps 2", "6.0e-05 of --lr 3.0e-03"),
    ("--warmup-steps 2 --max-steps 2", "3.0e-03 of --lr 3.0e-03"), ("--warmup-steps 1 --max-steps 2", "")])
def test_a_warmup_as_long_as_the_run_is_said(tokens, capsys, given, reached):
    assert run_train(f"{SHORT} {given} --checkpoint-interval 0 --out-dir run", tokens) == 0
    lines = lines_beginning("--warmup-steps", capsys)
    if not reached:
        assert not lines
    else:
        [line] = lines
        assert f"--max-steps 2 is warm-up; the learning rate reaches {reached}" in line


# ---------------------------------------------------------------- what the first line says

def first_line(arguments: str, tokens: str, capsys) -> str:
    assert run_train(f"{SHORT} --checkpoint-interval 0 {arguments} --out-dir run", tokens) == 0
    [line] = lines_beginning("run from step 1: ", capsys)
    return line


@pytest.mark.parametrize("given, count", [
    ("", "5 of 5"), ("--no-fp8-lm-head", "4 of 5"), ("--n-layer 2 --fp8-skip-first 3", "1 of 9"),
    ("--n-layer 3 --fp8-skip-first 1 --fp8-skip-last 1 --model te", "5 of 13"),
    ("--model custom --no-fp8-lm-head", "4 of 5"), ("--model fused", "5 of 5"),
    ("--model advanced", "5 of 5")])
def test_the_first_line_counts_gemms_in_fp8(tokens, capsys, given, count):
    line = first_line(f"{given} --max-steps 1", tokens, capsys)
    assert f", --fp8-recipe delayed hybrid, {count} GEMMs in FP8; " in line
    assert " parameters, on te_reference, which emulates FP8" in line


@pytest.mark.gpu
@pytest.mark.parametrize("name, engine", [("fast", "fast"), ("optimized", recipes.ENGINE)])
def test_the_first_line_names_the_engine_on_a_gpu(tokens, capsys, name, engine):
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if name == "fast" and ("NANOTE_ENGINE" in os.environ or not is_hopper):
        pytest.skip("needs a Hopper GPU and no NANOTE_ENGINE")
    options = f"{SHORT} --device cuda --model {name} --n-layer 2 --n-embd 128 --no-fp8-lm-head --out-dir run"
    assert run_train(options, tokens) == 0
    [line] = lines_beginning("run from step 1: ", capsys)
    assert f"tiny on {torch.cuda.get_device_name()}, --fp8-recipe delayed hybrid, 8 of 9 GEMMs" in line
    assert {"te": "on Transformer Engine 2", "fast": "on fast_kernels",
            "reference": "on te_reference"}[engine] in line


def test_fp8_that_is_in_no_gemm_is_refused(tokens, refused):
    given = "--n-layer 2 --fp8-skip-first 3 --no-fp8-lm-head"
    line = refused(train.run, f"{SHORT} {given} --data {tokens}", "train.py")
    assert "--fp8-skip-first 3, --fp8-skip-last 0, --no-fp8-lm-head: leave no GEMM of 2 blocks in FP8" in line
    assert "pass --fp8-recipe none" in line
    assert run_train(f"{SHORT} {given} --fp8-recipe none --max-steps 1 --out-dir run", tokens) == 0


PLAIN = """
from dataclasses import dataclass
import torch.nn as nn

@dataclass
class Config:
    vocab_size: int = 288
    n_positions: int = 64
    use_fp8: bool = False

class Net(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, 32)
        self.head = nn.Linear(32, config.vocab_size)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.wte(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""
OWN = ("--seq-len 64 --micro-batch-size 2 --max-steps 1 --warmup-steps 0 --eval-interval 0 "
       "--checkpoint-interval 0 --device cpu --out-dir run")


def test_the_first_line_of_a_model_of_your_own_is_true(tokens, capsys, compiles):
    Path("plain.py").write_text(PLAIN)
    copied = (ROOT / "model_te_optimized.py").read_text()
    old = "self.mlp = te.LayerNormMLP("
    assert old in copied
    Path("edited.py").write_text(copied.replace(old, "self.old = nn.Linear(4, 4)\n        " + old))
    old = "self.fp8_if(self.in_fp8(layer))"
    assert old in copied
    Path("head.py").write_text(copied.replace(old, "self.autocast(False)"))
    for options, words in (
            ("--model head.py:OptimizedGPT2Model --n-layer 2 --n-embd 64 --n-head 2",
             "--fp8-recipe delayed hybrid, 1 of 9 GEMMs in FP8; "),
            ("--model plain.py:Net", "--fp8-recipe delayed hybrid, 0 of 1 GEMMs in FP8 (use te.Linear"),
            ("--model plain.py:Net --fp8-recipe none", "none; Net, 18,720 parameters, on PyTorch"),
            ("--model edited.py:OptimizedGPT2Model --n-layer 2 --n-embd 64 --n-head 2 --fp8-skip-last 1",
             "--fp8-recipe delayed hybrid, 5 of 11 GEMMs in FP8; "),
            ("--model edited.py:OptimizedGPT2Model --n-layer 1 --n-embd 64 --n-head 2 --compile",
             "--fp8-recipe delayed hybrid, 5 of 6 GEMMs in FP8; ")):
        assert run_train(f"{OWN} {options}", tokens) == 0
        assert words in capsys.readouterr().out


# ---------------------------------------------------------------- the data of a resumed run

class Recorded(Loader):
    """Notes the windows that each step reads."""
    read = []

    def batches(self, step):
        batches = super().batches(step)
        if self.split == "train":
            Recorded.read += [row.tolist() for batch in batches for row in batch.inputs[0]]
        return batches


@pytest.fixture
def read(monkeypatch):
    """The windows that runs read, in their order."""
    monkeypatch.setattr(train, "Loader", Recorded)
    monkeypatch.setattr(Recorded, "read", [])
    return Recorded.read


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two token files of 20 and 12 windows of 64 tokens that no other window equals."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, count in (("one", 21), ("two", 13)):
        text = "".join(f"{name}{number:05}" for number in range(8 * count))
        write_tokens([(text, 0.9), ("val" * 50, 0.0)], folder / name)
    return folder


def windows_of(loader_options: dict, first: int, last: int) -> list:
    """Return the samples from `first` to before `last` of an uninterrupted run."""
    config = TrainConfig(micro_batch_size=1, seq_len=64, grad_accum=last, **loader_options)
    batches = Loader(config, "train", Ranks()).batches(1)
    windows = [batch.inputs[0][0].tolist() for batch in batches]
    return windows[first:]


RESUME = "--resume --out-dir run"


def begin(corpora, steps: int, capsys, read) -> None:
    options = f"{SHORT} --fp8-recipe none --n-head 1 --n-embd 32 --max-steps {steps}"
    assert run_train(f"{options} --out-dir run", str(corpora / "one")) == 0
    capsys.readouterr()
    read.clear()


@pytest.mark.parametrize("option", ["--seq-len 32", "--seed 5"])
def test_resume_refuses_to_read_data_twice(corpora, read, capsys, refused, option):
    begin(corpora, 2, capsys, read)
    line = refused(train.run, f"{RESUME} --max-steps 4 {option}", "train.py")
    assert f"{option}: run/step-2 has " in line and f"--init-from run/step-2 {option}" in line
    new = f"--config run/config.json --init-from run/step-2 {option} --out-dir new"
    assert run_train(new) == 0, "as the message says"
    assert run_train(f"--eval-only --out-dir run {option}") == 0


def test_resume_reads_unread_data_and_counts_epochs(corpora, read, capsys):
    """With other micro-batches, and packed or not: 20 windows are an epoch."""
    begin(corpora, 2, capsys, read)  # 4 of them
    first = windows_of({"data": str(corpora / "one"), "seed": 1337}, 4, 20)
    assert run_train(f"{RESUME} --max-steps 4 --micro-batch-size 4 --grad-accum 2") == 0
    assert read == first
    tokens = 21 * 64 + 1
    assert f"one: {tokens:,} tokens, {20 * 64 / tokens:.3g} epochs, 512 tokens" in capsys.readouterr().out


def test_resume_reads_other_data_from_their_start(corpora, read, capsys):
    begin(corpora, 2, capsys, read)
    assert run_train(f"{RESUME} --max-steps 5 --micro-batch-size 2", str(corpora / "two")) == 0
    out = capsys.readouterr().out
    assert "--data: other tokens than those that run/step-2 has read: read from their start" in out
    assert run_train(f"{RESUME} --max-steps 8") == 0
    assert "--data: other tokens" not in capsys.readouterr().out
    assert read == windows_of({"data": str(corpora / "two"), "seed": 1337}, 0, 12)
    assert len({tuple(row) for row in read}) == 12, "each window of the new data once"
    more = f"{RESUME} --max-steps 9 --seq-len 32"
    assert run_train(more, str(corpora / "one")) == 0, "of these, nothing is read"
