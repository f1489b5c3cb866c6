"""How runs are recorded, repeated and compared: config.json, --config, --eval-only, --wandb."""
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from nanote import fp8
from nanote.config import read_options, saved_options
from trainer_tools import OPTIONS, ROOT, metrics, run_train

SHORT = f"{OPTIONS} --n-layer 1 --max-steps 3"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokens):
    """The folder of a run of three steps; copy it before changing it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    options = f"{SHORT} --eval-steps None --eval-tokens 700 --fp8-recipe delayed"
    assert run_train(f"{options} --out-dir {run}", tokens) == 0
    return run


def files(folder="."):
    return {str(path): path.is_file() and path.stat().st_mtime_ns for path in Path(folder).rglob("*")}


# ---------------------------------------------------------------- config.json

def test_a_run_records_how_it_was_made(tokens, monkeypatch):
    plain, seen = train.learning_rate, []

    def learning_rate(step, config):
        seen.append(json.loads(Path("run/config.json").read_text()))
        return plain(step, config)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    arguments = f"{SHORT} --max-steps 2 --out-dir run"
    assert run_train(arguments, tokens) == 0
    first = seen[0]
    assert first["command"] == f"train.py {arguments} --data {tokens}" and first["resumed"] == []
    assert (first["config"]["max_steps"], first["config"]["out_dir"]) == (2, "run")
    assert set(first["config"]) == set(vars(train.TrainConfig()))
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert first["git_commit"] == (commit.stdout.strip() or None)
    assert first["python"] in sys.version and first["torch"] == train.torch.__version__
    assert first["device"] and first["date"][:2] == "20" and first["processes"] == 1

    assert run_train("--resume --out-dir run --max-steps 3") == 0
    document = json.loads(Path("run/config.json").read_text())
    resumed, = document["resumed"]
    assert (resumed["from_step"], resumed["command"]) == (2, "train.py --resume --out-dir run --max-steps 3")
    assert document["command"] == first["command"] and document["config"]["max_steps"] == 3
    assert document["config"]["vocab_size"] is None, "of the data, which another run may replace"


def test_a_damaged_record_refuses_a_resume_and_loses_nothing(finished, capsys):
    shutil.copytree(finished, "run")
    Path("run/config.json").write_text('{"config": 3}')
    before = files("run")
    assert run_train("--resume --out-dir run --max-steps 4") == 2
    error = capsys.readouterr().err
    assert "run/config.json: config is 3" in error and "remove it" in error and error.count("\n") == 1
    assert files("run") == before
    Path("run/config.json").unlink()  # the folder of an older version has none
    assert run_train("--resume --out-dir run --max-steps 4") == 0
    assert json.loads(Path("run/config.json").read_text())["resumed"][0]["from_step"] == 3


# ---------------------------------------------------------------- --config

def test_a_run_is_repeated_from_its_config(finished, capsys):
    assert run_train(f"--config {finished}/config.json") == 0
    assert metrics("out/tiny") == metrics(finished)
    config, *_ = read_options(shlex.split(f"--config {finished}/config.json --lr 1e-4"))
    assert (config.lr, config.n_layer) == (1e-4, 1), "the command line wins"
    config, *_ = read_options(shlex.split("--resume --out-dir out/tiny --max-steps 4"))
    assert config.config is None, "it is a run like any other"


def test_a_config_written_by_hand(tmp_path):
    Path("mine.yaml").write_text("preset: gpt2-124m\nlr: 6e-4\nn-layer: 3\ncuda_graph: off\n"
                                 "use_qk_norm: yes\nhead_dim: null\nfp8_recipe: none\nout_dir: runs/mine\n")
    config, *_ = read_options(shlex.split("--config mine.yaml --n-head 4"))
    assert (config.lr, config.n_layer, config.n_head, config.cuda_graph) == (6e-4, 3, 4, "off")
    assert (config.preset, config.n_embd, config.fp8_recipe) == ("gpt2-124m", 768, "none")
    assert config.use_qk_norm is True and config.out_dir == "runs/mine" and config.config == "mine.yaml"
    Path("mine.json").write_text('{"n_layer": 3, "grad_clip": 2}')
    config, *_ = read_options(shlex.split("--config mine.json --preset gpt2-124m"))
    assert (config.preset, config.n_layer, config.n_embd) == ("gpt2-124m", 3, 768)
    assert type(config.grad_clip) is float


@pytest.mark.parametrize("name, content, more, words", [
    ("a.yaml", "n_layers: 3", "", ["a.yaml: n_layers", "use n-layer", "--help"]),
    ("a.yaml", "learning_rate: 3", "", ["a.yaml: learning_rate", "use lr"]),
    ("a.yaml", "n_laver: 3", "", ["a.yaml: n_laver", "use perhaps n_layer"]),
    ("a.yaml", "n_layer: two", "", ["a.yaml: n_layer is \"two\"", "an integer"]),
    ("a.yaml", "n_layer: 2.5", "", ["a.yaml: n_layer is 2.5", "an integer"]),
    ("a.yaml", "bias: 1", "", ["a.yaml: bias is 1", "true or false"]),
    ("a.yaml", "lr: [1, 2]", "", ["a.yaml: lr", "a list"]),
    ("a.yaml", "data: 2024-01-01", "", ["a.yaml: data", "a date"]),
    ("a.yaml", "lr: nan", "", ["a.yaml: lr", "a finite number"]),
    ("a.yaml", "lr_schedule: linear", "", ["a.yaml: lr_schedule", "cosine"]),
    ("a.yaml", "resume: true", "", ["a.yaml: resume", "command line"]),
    ("a.yaml", "preset: gpt3", "", ["gpt3", "tiny"]),
    ("a.yaml", "preset: tiny", "--preset gpt2-124m", ["--preset gpt2-124m", "a.yaml", "tiny"]),
    ("a.yaml", "lr: {", "", ["a.yaml: not YAML"]),
    ("a.yaml", "- lr", "", ["a.yaml: holds no options"]),
    ("a.yaml", "[" * 600, "", ["a.yaml: not YAML"]),
    ("a.json", "lr: 3", "", ["a.json: not JSON"]),
    ("a.json", '{"config": {"n_layer": "x"}}', "", ["a.json: n_layer is \"x\""]),
    ("a.yaml", "lr: -1", "", ["--lr -1", "above 0"]),
    ("b.yaml", "", "", ["a.yaml", "missing"]),
])
def test_bad_configs_are_one_line(capsys, name, content, more, words):
    Path(name).write_text(content)
    before = files()
    given = name.replace("b", "a")
    assert run_train(f"--config {given} {more}") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error
    assert files() == before


def test_config_with_resume_and_without_yaml(finished, monkeypatch, capsys):
    assert run_train(f"--resume --out-dir {finished} --config {finished}/config.json") == 2
    assert "step-3 has its own options; leave --config out" in capsys.readouterr().err
    Path("a.yaml").write_text("lr: 1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert run_train("--config a.yaml") == 2
    error = capsys.readouterr().err
    assert "pip install pyyaml" in error and error.count("\n") == 1


def test_a_config_that_the_user_names_may_name_code(monkeypatch):
    monkeypatch.setattr(fp8, "unsupported_reason", lambda name: "")  # Transformer Engine's answer on a GPU
    monkeypatch.syspath_prepend(".")
    Path("my_recipe.py").write_text("def f(role): return None\n")
    Path("a.yaml").write_text("fp8_recipe: custom:my_recipe.f")
    assert read_options(["--config", "a.yaml"])[0].fp8_recipe == "custom:my_recipe.f"


# ---------------------------------------------------------------- evaluation

def test_eval_only_prints_the_loss_of_the_run_and_writes_nothing(finished, tokens, tmp_path, capsys):
    shutil.copytree(finished, "run")
    shutil.copytree(tokens, "other")
    before = files()
    logged = metrics("run")[-1]
    for arguments in ("--out-dir run", "--resume --out-dir run", "--out-dir run --data other"):
        assert run_train(f"--eval-only {arguments}") == 0
        data = "other" if "other" in arguments else tokens
        assert capsys.readouterr().out == (
            f"run/step-3 on {data}, FP8 delayed (hybrid): validation loss {logged['val_loss']:.4f} nats a "
            f"byte, {logged['val_bits_per_byte']:.4f} bits a byte\n")
    assert run_train("--eval-only --out-dir nowhere") == 2
    assert files() == before
    assert run_train("--eval-only --out-dir run --fp8-recipe none") == 0
    assert 0 < abs(logged["val_loss_without_fp8"] / logged["val_loss"] - 1) < 0.01
    assert f"loss {logged['val_loss_without_fp8']:.4f} nats" in capsys.readouterr().out


def test_the_validation_loss_depends_on_no_batch_size_and_no_seed(finished, monkeypatch):
    losses, plain = [], train.describe_val_loss
    keep = lambda loss, meta: losses.append(loss) or plain(loss, meta)  # noqa: E731
    monkeypatch.setattr(train, "describe_val_loss", keep)
    for more in ("--micro-batch-size 1", "--micro-batch-size 3", "--micro-batch-size 8 --seed 7"):
        assert run_train(f"--eval-only --out-dir {finished} --fp8-recipe none {more}") == 0
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    assert run_train(f"--eval-only --out-dir {finished} --fp8-recipe none --eval-tokens 70") == 0
    assert losses[3] != pytest.approx(losses[0], rel=1e-4), "of other tokens"


def test_eval_steps_of_old_and_new_checkpoints(finished):
    old = {"config": {"eval_steps": 20, "micro_batch_size": 8, "seq_len": 128}}
    config = saved_options(Path("out/old/step-1"), old)
    assert (config.eval_tokens, config.eval_steps) == (20 * 8 * 128, None)
    shutil.copytree(finished, "run")
    given = "--resume --out-dir run --max-steps 9"
    assert read_options(shlex.split(f"{given} --eval-steps 5"))[0].eval_steps == 5
    saved = {"config": {"eval_steps": 5, "eval_tokens": 64}}
    assert saved_options(Path("out/new/step-1"), saved).eval_steps == 5


# ---------------------------------------------------------------- --wandb

FAKE = '''
import json
class Run:
    def log(self, scalars, step):
        if FAILS:
            raise RuntimeError("no network")
        json.dump([step, scalars], open("wandb.jsonl", "a"))
        open("wandb.jsonl", "a").write("\\n")
    def finish(self):
        open("finished", "w")
def init(project, name, dir, config):
    if project == "private":
        raise ValueError("api_key not configured\\n(no-tty)")
    json.dump([project, name, dir, config], open("init.json", "w"))
    return Run()
'''


@pytest.fixture
def fake_wandb(monkeypatch):
    monkeypatch.syspath_prepend(os.getcwd())
    Path("wandb.py").write_text(FAKE.replace("FAILS", "False"))
    yield
    sys.modules.pop("wandb", None)


def test_wandb_gets_the_scalars_and_the_config(tokens, fake_wandb):
    assert run_train(f"{SHORT} --fp8-health-interval 3 --wandb mine --out-dir run", tokens) == 0
    project, name, folder, config = json.loads(Path("init.json").read_text())
    assert (project, name, folder, config["n_embd"], config["vocab_size"]) == ("mine", "run", "run", 64, 288)
    logged = [json.loads(line) for line in Path("wandb.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    expected = [{key: value for key, value in record.items() if value is not None} for record in records]
    scalars = [{"step": step} | values for step, values in logged if "loss" in values]
    assert scalars == expected and "val_bits_per_byte" in scalars[-1]
    assert any("fp8_amax/" in name for step, values in logged for name in values)
    assert Path("finished").exists()


def test_wandb_that_fails(tokens, fake_wandb, capsys):
    assert run_train(f"{SHORT} --wandb private --out-dir run", tokens) == 2
    error = capsys.readouterr().err
    assert "--wandb private: api_key not configured (no-tty); " in error and "WANDB_MODE=offline" in error
    Path("wandb.py").write_text(FAKE.replace("FAILS", "True"))
    sys.modules.pop("wandb", None)
    assert run_train(f"{SHORT} --wandb mine --out-dir run", tokens) == 0
    out = capsys.readouterr().out
    assert "step 3: not logged to wandb: no network; training continues" in out and len(metrics("run")) == 3


def test_wandb_that_is_not_installed_is_one_line_at_the_start(tokens, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not Path(path or ".", "wandb").is_dir()])
    monkeypatch.syspath_prepend(os.getcwd())
    Path("wandb").mkdir()  # the logs of an earlier run, which Python takes for a package
    assert run_train(f"{SHORT} --wandb mine --out-dir run", tokens) == 2
    error = capsys.readouterr().err
    assert "--wandb mine: " in error and "pip install wandb" in error and error.count("\n") == 1
    assert not Path("run").exists()
