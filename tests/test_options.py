"""Options that a model or another option would ignore: said in a line, or refused if they were typed."""
import json
import shutil
from pathlib import Path

import pytest

import train
from nanote.config import read_options
from trainer_tools import run_train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SHORT = ("--n-layer 1 --n-head 2 --n-embd 64 --seq-len 64 --micro-batch-size 2 --max-steps 2 "
         "--warmup-steps 1 --eval-interval 0 --checkpoint-interval 1 --device cpu")


@pytest.fixture(scope="module")
def run_of_custom(tmp_path_factory, tokens):
    """The folder of a run of --preset tiny --model custom; copy it before changing it."""
    run = tmp_path_factory.mktemp("custom") / "run"
    assert run_train(f"{SHORT} --model custom --out-dir {run}", tokens) == 0
    return run


def typed(text: str) -> set[str]:
    return set(read_options(text.split()).typed)


# ---------------------------------------------------------------- what was typed

def test_typed_options_are_those_of_command_line_and_file(run_of_custom):
    assert typed("") == set()
    assert typed("--lr=1e-3 --no-bias --grad_accum 2 --n-kv-head None") == {
        "lr", "bias", "grad_accum", "n_kv_head"}
    Path("a.yaml").write_text("lr: 6e-5\nuse-qk-norm: false\nset: {}\n")
    assert typed("--config a.yaml --seed 3") == {"config", "lr", "use_qk_norm", "seed", "set"}
    assert typed(f"--config {run_of_custom}/config.json --seed 3") == {"config", "seed"}
    assert typed(f"--resume --out-dir {run_of_custom} --seed 3") == {"resume", "out_dir", "seed"}


# ---------------------------------------------------------------- options that a model lacks

@pytest.mark.parametrize("name, preset, line", [
    ("custom", "tiny", "--model custom: has no activation=swiglu, use_rmsnorm, use_rotary of --preset tiny: "
                       "trains with GELU, LayerNorm, learned positions"),
    ("te", "llama3-1b --vocab-size 512", "--model te: has no n_kv_head=8, head_dim=64, activation=swiglu, "
     "use_rmsnorm, use_rotary, rope_theta=500000.0 of --preset llama3-1b: trains with as many key and value "
     "heads as heads, head_dim = n_embd / n_head, GELU, LayerNorm, learned positions"),
    ("fused", "gpt2-124m", ""), ("advanced", "tiny", ""), ("optimized", "tiny", "")])
def test_a_line_says_what_a_model_lacks_of_a_preset(tokens, capsys, name, preset, line):
    options = f"{SHORT} --preset {preset} --model {name} --grad-accum 1 --n-inner 64 --max-steps 1"
    assert run_train(f"{options} --checkpoint-interval 0 --out-dir run", tokens) == 0
    lines = [text for text in capsys.readouterr().out.splitlines() if text.startswith("--model")]
    assert lines == [line] * bool(line)


@pytest.mark.parametrize("name", ["custom", "fused", "te"])
@pytest.mark.parametrize("option, field", [
    ("--use-rmsnorm", "use_rmsnorm"), ("--no-use-rotary", "use_rotary"),
    ("--activation swiglu", "activation"), ("--n-kv-head 2", "n_kv_head"), ("--attention auto", "attention"),
    ("--gradient-checkpointing", "gradient_checkpointing")])
def test_a_typed_option_that_a_model_lacks_is_refused(tokens, refused, name, option, field):
    """Even if its value is the preset's or the default."""
    line = refused(train.run, f"{SHORT} --model {name} {option} --data {tokens}", "train.py")
    flag = f"--{field.replace('_', '-')}"
    assert f"{flag}: the config of --model {name} has no field {field}; leave the option out" in line


def test_a_file_is_typed_and_another_run_is_not(tokens, run_of_custom, refused, capsys):
    Path("a.json").write_text('{"model": "custom", "use_rotary": true}')
    arguments = f"{SHORT} --config a.json --data {tokens}"
    assert "--use-rotary: the config of --model custom has no" in refused(train.run, arguments, "train.py")
    assert json.loads((run_of_custom / "config.json").read_text())["use_rotary"]
    assert run_train(f"--config {run_of_custom}/config.json --out-dir again") == 0
    shutil.copytree(run_of_custom, "run")
    assert run_train("--resume --out-dir run --max-steps 3") == 0
    assert capsys.readouterr().out.count("--model custom: has no activation=swiglu") == 2
