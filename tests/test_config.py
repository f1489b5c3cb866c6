"""Options: presets, --config, the options of a checkpoint, numbers out of range; and how a command ends."""
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from nanote.command import error_line, run_command
from nanote.config import PRESETS, TrainConfig
from nanote.options import read_config
from trainer_tools import OPTIONS, ROOT, run_train, sign

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokens):
    """The folder of a run with checkpoints of steps 2 and 4; copy it before changing it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    options = "--n-layer 1 --max-steps 4 --checkpoint-interval 2 --eval-interval 0"
    assert run_train(f"{OPTIONS} {options} --out-dir {run}", tokens) == 0
    return run


def options(text: str) -> TrainConfig:
    return read_config(text.split())


def error_of(text: str) -> str:
    with pytest.raises(ValueError) as error:
        options(text)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------- a new run

def test_options_win_over_the_preset():
    assert options("") == TrainConfig(**PRESETS["tiny"])
    config = options("--preset gpt2-350m --lr 1e-3 --grad_accum=2 --no-bias --n-kv-head None")
    expected = TrainConfig(preset="gpt2-350m", **PRESETS["gpt2-350m"])
    assert config == dataclasses.replace(expected, lr=1e-3, grad_accum=2, bias=False)


def test_two_dashes_end_the_options():
    assert options("--lr 0.5 --") == options("--lr 0.5")


def test_help_explains_every_option_at_its_preset(capsys):
    with pytest.raises(SystemExit) as stop:
        options("--preset gpt2-350m --help")
    text = capsys.readouterr().out
    assert stop.value.code == 0 and "Peak learning rate. (default: 0.0003)" in text
    for field in dataclasses.fields(TrainConfig):
        _, _, after = text.partition(f" --{field.name.replace('_', '-')}")
        assert "(default:" in after and after.index("(default:") < 400, field.name


def test_help_ends_in_a_terminal_of_one_column():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from nanote.options import read_config"
    done = subprocess.run([sys.executable, "-c", f"{code}; read_config(['--help'])"], timeout=60, text=True,
                          capture_output=True, env=os.environ | {"COLUMNS": "1"})
    assert done.returncode == 0 and "--fp8-health-interval" in done.stdout


@pytest.mark.parametrize("name, text", [
    ("a.yaml", "preset: gpt2-350m\nlr: 6e-5\nuse-qk-norm: true\nn_kv_head: null\ncuda_graph: 'off'\n"),
    ("a.json", '{"preset": "gpt2-350m", "lr": 6e-5, "use_qk_norm": true, "n_kv_head": null, '
               '"cuda_graph": "off"}')])
def test_config_files_lie_between_preset_and_command_line(name, text):
    Path(name).write_text(text)
    in_file = dict(preset="gpt2-350m", lr=6e-5, use_qk_norm=True, n_kv_head=None)
    typed = dict(config=name, seed=3, cuda_graph="on")
    expected = PRESETS["gpt2-350m"] | in_file | typed
    assert options(f"--config {name} --seed 3 --cuda-graph on") == TrainConfig(**expected)
    assert options(f"--config {name} --preset tiny").n_layer == 4


@pytest.mark.parametrize("line, name, value", [
    ("profile: 10:12", "profile", "10:12"),
    ("profile: 1:30", "profile", "1:30"),
    ("rope_scaling: 8:1:4:8192", "rope_scaling", "8:1:4:8192"),
    ("wandb: 007", "wandb", "007"),
    ("wandb: 1.10", "wandb", "1.10"),
    ("wandb: 0x1f", "wandb", "0x1f"),
    ("wandb: yes", "wandb", "yes"),
    ("wandb: true", "wandb", "true"),
    ("out_dir: 2026-01-01", "out_dir", "2026-01-01"),
    ("cuda_graph: on", "cuda_graph", "on"),
    ("cuda-graph: off", "cuda_graph", "off"),
    ("use-rotary: off", "use_rotary", False),
    ("use_qk_norm: Yes", "use_qk_norm", True),
    ("use_qk_norm: TRUE", "use_qk_norm", True),
    ("lr: 1e-3", "lr", 1e-3),
    ("lr: .5", "lr", 0.5),
    ("max_steps: 1_000", "max_steps", 1000),
    ("seed: 010", "seed", 10),
    ("vocab_size: ~", "vocab_size", None),
    ("vocab_size:", "vocab_size", None),
    ("set: {a: 1, b: 1e-3, c: yes, d: 10:12, e: true, f: [1, x]}", "set",
     (("a=1", "b=1e-3", "c=yes", "d=10:12", "e=true", 'f=[1, "x"]'),)),
    ("set: {a: {x: true, y: [1]}}", "set", (('a={"x": true, "y": [1]}',),))])
def test_yaml_gives_an_option_what_is_written(line, name, value):
    """Not a number of base 60 or 8, a date or a boolean, which YAML 1.1 makes of some texts."""
    Path("a.yaml").write_text(line)
    assert getattr(options("--config a.yaml"), name) == value


@pytest.mark.parametrize("text, words", [
    ("set: 5", "a.yaml: set 5: must be fields with values, such as set: {window: 32}"),
    ("set: null", "a.yaml: set null: must be fields"), ("set: [a=1]", "set ['a=1']: must be fields"),
    ('{"set": 5, "command": "train.py"}', "set 5: must be fields"),
    ("[1, 2]", "holds no options"), ("", "holds no options"), ("a: [", "a.yaml: not YAML"),
    ("lr: abc", "a.yaml: lr abc: must be of type float"),
    ("bias: 3", "a.yaml: bias 3: must be true or false"),
    ("activation: relu", "a.yaml: activation relu: must be one of gelu, swiglu"),
    ("n_layerz: 3", "a.yaml: n_layerz: unknown option; did you mean n_layer?"),
    ("model: mine.py:Net", "pass --model mine.py:Net on the command line"),
    ("fp8_recipe: custom:evil.f", "pass --fp8-recipe custom:evil.f on the command line"),
    ("lr: 0", "--lr 0.0: must be above 0")])
def test_config_files_are_refused_in_one_line(text, words):
    Path("a.yaml").write_text(text)
    assert words in error_of("--config a.yaml")


def test_a_json_file_has_values():
    fields = {"a": 1, "b": "1.10", "c": None, "d": [1, 2.5]}
    Path("a.json").write_text(json.dumps({"set": fields, "max-steps": 7, "bias": False, "n_kv_head": None}))
    config = options("--config a.json")
    assert config.set == (("a=1", "b=1.10", "c=null", "d=[1, 2.5]"),)
    assert (config.max_steps, config.bias, config.n_kv_head) == (7, False, None)
    Path("a.json").write_text('{"max_steps": 2.5}')
    assert "a.json: max_steps 2.5: must be of type int" in error_of("--config a.json")


def test_config_json_of_a_run_repeats_it(finished, capsys):
    config = options(f"--config {finished}/config.json --lr 1e-4")
    assert (config.n_layer, config.n_embd) == (1, 64)  # of the run
    assert config.lr == 1e-4  # typed
    assert config.out_dir is None  # a run has its own
    gone = {"gc_interval": 0, "checkpoint_every": 2}  # the first has its default
    old = dataclasses.asdict(config) | {"out_dir": "out/old"} | gone
    of_0_1 = {"config": old, "command": "train.py", "resumed": []}
    Path("old.json").write_text(json.dumps(of_0_1))
    capsys.readouterr()
    assert options("--config old.json") == dataclasses.replace(config, config="old.json")
    assert capsys.readouterr().out.splitlines() == [
        "old.json: left out, since this version has no such options: checkpoint_every 2"]


@pytest.mark.parametrize("given, words", [
    ("--max-steps 0", "--max-steps 0: must be at least 1"), ("--lr nan", "--lr nan: must be a number"),
    ("--weight-decay 1e39", "--weight-decay 1e+39: must be a number that float32 can hold"),
    ("--lr -1", "--lr -1.0: must be above 0"), ("--warmup-steps -1", "--warmup-steps -1: must be 0 or more"),
    ("--fp8-recipe none --fp8-health-interval 9",
     "--fp8-recipe none: does not go with --fp8-health-interval 9: there is no FP8"),
    *((f"--{name} {number}", f"--{name} {number}: must be at least 1")
      for name in ("n-inner", "head-dim", "n-kv-head", "n-embd") for number in (0, -8)),
    ("--compile-fullgraph", "without effect; pass --compile too"),
    ("--compile --fp8-health-interval 9", "--compile: does not go with --fp8-health-interval 9: compiled"),
    ("--parallel hsdp --compile", "--parallel hsdp: does not go with --compile: not tested with sharded")])
def test_options_that_are_impossible_are_refused(given, words):
    assert words in error_of(given)


# ---------------------------------------------------------------- --resume, --eval-only

def test_resume_keeps_the_options_of_the_run(finished):
    config = options(f"--resume --out-dir {finished} --max-steps 9 --lr 1e-4")
    assert (config.n_layer, config.dropout) == (1, 0.1)  # of the run
    assert (config.max_steps, config.lr) == (9, 1e-4)  # typed
    assert config.resume and config.out_dir == str(finished)
    assert config.config is None and config.profile is None
    assert options(f"--eval-only --out-dir {finished}/step-2").out_dir == f"{finished}/step-2"


@pytest.mark.parametrize("given, words", [
    ("--n-layer 3", "--n-layer 3: RUN/step-4 has 1"), ("--optimizer muon", "RUN/step-4 has adamw"),
    ("--no-bias --use-qk-norm", "--use-qk-norm True: RUN/step-4 has False"),
    ("--rope-scaling 8:1:4:64", "--rope-scaling 8:1:4:64: RUN/step-4 has None"),
    ("--preset gpt2-124m", "--preset gpt2-124m: RUN/step-4 has tiny"),
    ("--max-steps 3", "--max-steps 3: RUN/step-4 has done 4 steps; pass 8"),
    ("--out-dir RUN/step-2", "RUN has later checkpoints than step-2")])
def test_resume_refuses_what_does_not_fit(finished, given, words):
    message = error_of(f"--resume --out-dir {finished} {given}".replace("RUN", str(finished)))
    assert words.replace("RUN", str(finished)) in message


def test_resume_continues_the_newest_run_of_the_preset(finished):
    with pytest.raises((ValueError, OSError), match="out/tiny"):
        options("--resume")
    for time, name in enumerate(("tiny", "tiny-2", "tiny-other")):
        shutil.copytree(finished, f"out/{name}")
        os.utime(f"out/{name}", (time, time))
    assert options("--resume").out_dir == "out/tiny-2"


def test_options_of_version_0_1_are_dropped_or_named(finished, capsys):
    shutil.copytree(finished, "run")
    path = Path("run/step-4/meta.json")
    meta = json.loads(path.read_text())
    meta["config"] |= dict(nsys=None, eval_steps=None, fused_block=False, max_skipped_steps=3)
    path.write_text(json.dumps(meta))
    sign(path.parent)
    assert options("--resume --out-dir run").n_layer == 1
    assert capsys.readouterr().out == ("run/step-4: left out, since this version has no such options: "
                                       "fused_block False, max_skipped_steps 3\n")


def test_a_restart_by_torchrun_stays_in_the_folder():
    """Of a run without a checkpoint; with one: test_parallel.py."""
    Path("begun").mkdir()
    config = read_config("--n-layer 1 --preset tiny --max-steps 9".split(), "begun")
    expected = PRESETS["tiny"] | {"n_layer": 1, "max_steps": 9, "out_dir": "begun"}
    assert config == TrainConfig(**expected)


# ---------------------------------------------------------------- how a command ends

def test_mistakes_are_one_line_and_exit_code_2(capsys):
    cases = (
        (None, 0, ""),
        (ValueError("a: wrong\nmore"), 2, "x.py: a: wrong\n"),
        (ValueError(), 2, "x.py: ValueError\n"),
        (OSError(28, "No space", "f"), 2, "x.py: f: No space\n"),
        (KeyboardInterrupt(), 130, "x.py: interrupted\n"),
        (BrokenPipeError(), 141, ""),
    )
    for error, code, line in cases:
        assert run_command(Mock(side_effect=error, return_value=None), "x.py") == code
        assert capsys.readouterr().err == line
    with pytest.raises(RuntimeError):  # not a user's mistake: the traceback is needed
        run_command(Mock(side_effect=RuntimeError), "x.py")
    assert error_line(FileNotFoundError(2, "No such file", "a.txt")) == "a.txt: No such file"


SCRIPT = """
import sys
sys.path.insert(0, ROOT)
from nanote.command import run_command
def main():
    print("text")
    if len(sys.argv) > 1: raise ValueError("wrong")
sys.exit(run_command(main, "x.py"))"""


@pytest.mark.parametrize("command, code, said", [
    ("x.py mistake 2>&-", 2, ""),
    ("x.py mistake >&-", 2, "x.py: wrong\n"),
    ("x.py 2>&- >&-", 0, ""),
    ("-u x.py >/dev/full", 2, "x.py: stdout: No space left on device\n"),
    ("x.py >/dev/full", 1, "x.py: stdout: No space left on device\n"),
    ("-u x.py | sleep 0", 141, "")])
def test_closed_or_full_streams_give_no_traceback(command, code, said):
    Path("x.py").write_text(SCRIPT.replace("ROOT", repr(str(ROOT))))
    shell = f"set -o pipefail; {sys.executable} {command}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (code, said)
