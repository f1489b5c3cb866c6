"""The commands as a user types them: mistakes, signals, closed streams, what a run records; and that nothing
in damaged or hostile run folders and token files is run as code."""
import importlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sample
import train
from nanote import checkpoint
from nanote.command import run_command
from nanote.tokens import write_tokens
from trainer_tools import OPTIONS, ROOT, fork_ranks, make_tokens, metrics, run_script, run_train, sign, tree

SHORT = f"{OPTIONS} --n-layer 1 --max-steps 2"
TRAIN = f"{SHORT} --data tokens"
READERS = {"train.py": "--resume --out-dir run --max-steps 3", "sample.py": "run --max-new-tokens 2"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with good token files, a good run, and one example of each kind of bad input."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_tokens("tokens")
        assert run_train(f"{SHORT} --out-dir out/good", "tokens") == 0
        for name in ("altered", "truncated", "no-val"):
            shutil.copytree("tokens", name)
        content = bytearray(Path("altered/train.bin").read_bytes())
        content[99] ^= 1
        Path("altered/train.bin").write_bytes(content)
        os.truncate("truncated/val.bin", os.path.getsize("truncated/val.bin") - 2)
        Path("no-val/val.bin").unlink()
        Path("file.txt").write_text("some text\n")
        Path("unknown.yaml").write_text("max_stepz: 3\n")
    return folder


# ---------------------------------------------------------------- mistakes

@pytest.mark.parametrize("script, arguments, words", [
    # names and numbers
    ("train.py", f"{TRAIN} --model best", "best optimized"),
    ("train.py", f"{TRAIN} --model custom --use-qk-norm", "--use-qk-norm custom"),
    ("train.py", f"{TRAIN} --fp8-recipe fp4", "fp4 delayed mxfp8"),
    ("train.py", f"{SHORT} --data nowhere --fp8-recipe tensorwise", "tensorwise: current"),
    ("train.py", f"{TRAIN} --device tpu", "tpu cpu"),
    ("train.py", f"{TRAIN} --lr 0", "--lr above"),
    ("train.py", f"{TRAIN} --cuda-graph on", "--cuda-graph GPU"),
    # shapes
    ("train.py", f"{TRAIN} --vocab-size 256", "256 tokens 257 288"),
    ("train.py", f"{TRAIN} --vocab-size 300", "vocab_size=300 32 320"),
    ("train.py", f"{TRAIN} --attention flash", "attention='flash' flash-attn-4 'sdpa'"),
    ("train.py", f"{TRAIN} --n-embd 72", "n_embd 80"),
    ("train.py", f"{TRAIN} --micro-batch-size 3 --seq-len 20", "60 4"),
    ("train.py", f"{TRAIN} --seq-len 64 --n-positions 32", "64 32"),
    # data
    ("train.py", f"{SHORT} --data nowhere", "nowhere data.py"),
    ("train.py", f"{SHORT} --data altered", "altered/train.bin --force"),
    ("train.py", f"{SHORT} --data truncated", "truncated/val.bin --force"),
    ("train.py", f"{SHORT} --data no-val", "no-val/val.bin"),
    # runs
    ("train.py", f"{TRAIN} --out-dir out/good", "out/good --resume"),
    ("train.py", f"{TRAIN} --out-dir file.txt/run", "file.txt"),
    ("train.py", "--resume --out-dir out/none", "out/none checkpoint"),
    ("train.py", "--config missing.yaml", "missing.yaml"),
    ("sample.py", "out/none", "out/none checkpoint out/good train.py"),
    ("sample.py", "out", "out: checkpoint out/good train.py"),
    ("sample.py", "out/good/step-9", "out/good/step-9: checkpoint (out/good, train.py"),
    ("sample.py", "none/here", "none/here: checkpoint train.py"),
    ("sample.py", "out/good --temperature -1", "--temperature -1"),
], ids=lambda value: value.replace(OPTIONS, "")[:60])
def test_a_mistake_is_one_line_and_writes_nothing(world, monkeypatch, refused, script, arguments, words):
    monkeypatch.chdir(world)
    error = refused({"train.py": train.run, "sample.py": sample.main}[script], arguments, script)
    assert all(word in error for word in words.split()), error


@pytest.mark.parametrize("script, arguments, words", [
    ("train.py", f"{TRAIN} --max-step 1", "--max-step --max-steps"),
    ("train.py", "--preset gpt3", "gpt3 llama3-8b"), ("train.py", f"{TRAIN} stray", "stray"),
    ("train.py", "--config unknown.yaml", "max_stepz max_steps"),
    ("sample.py", "", "RUN out/tiny"), ("data.py", "", "stdlib text")])
def test_an_unknown_option_is_explained(world, monkeypatch, capsys, script, arguments, words):
    monkeypatch.chdir(world)
    before = tree()
    assert run_script(script, arguments.split()) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words.split()), error
    assert tree() == before


# ---------------------------------------------------------------- processes

def start(arguments: str, cwd, **options) -> subprocess.Popen:
    environment = os.environ | {"NANOTE_ENGINE": "reference", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, ROOT / "train.py", *arguments.split()], cwd=cwd, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="shows which libraries are loaded")
@pytest.mark.parametrize("seconds", [0.0, 0.9])
def test_ctrl_c_while_importing_prints_no_traceback(world, tmp_path, seconds):
    process = start(f"{TRAIN} --max-steps 100000 --out-dir {tmp_path}/run", world)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)  # until PyTorch is being imported
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert "Traceback" not in out + error
    assert process.returncode in (-signal.SIGINT, 130, 0)


def is_command(path):
    text = path.read_text()
    return "run_command(" in text and '__name__ == "__main__"' in text


FOLDERS = (ROOT, ROOT / "tools", ROOT / "bench")
COMMANDS = [path for folder in FOLDERS for path in sorted(folder.glob("*.py")) if is_command(path)]


INTERRUPTED = """import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    os._exit(9)
time.sleep(60)
"""


def run_interrupted(path, folder) -> tuple:
    """Run a command whose first import of a library sends SIGINT; return its exit code and its output."""
    for name in ("torch", "numpy", "tyro", "yaml", "pytest"):
        (folder / f"{name}.py").write_text(INTERRUPTED)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, path], cwd=folder, capture_output=True, text=True, timeout=50,
                          env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_ctrl_c_in_an_import_of_any_command_is_silent(tmp_path, path):
    """Imports take seconds. SIGINT stays ignored under nohup, or after & in a script."""
    assert run_interrupted(path, tmp_path) == (-signal.SIGINT, "", "")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a child inherits
    assert run_interrupted(path, tmp_path) == (9, "", "")


@pytest.mark.parametrize("path", [path for path in COMMANDS if path.name != "doctor.py"],
                         ids=lambda path: f"{path.parent.name}/{path.name}")
def test_without_packages_a_command_says_how_to_install(path):
    """doctor.py needs none."""
    command = [sys.executable, "-S", path, "--help"]  # -S: without site-packages
    done = subprocess.run(command, capture_output=True, text=True)
    line = re.fullmatch(rf"{path}: needs the package (\w+), which is not installed: (.*)\n", done.stderr)
    assert done.returncode == 2 and done.stdout == "" and line, done.stderr
    package, installing = line.groups()
    assert ("pip install pytest" if package == "pytest" else "pip install -r requirements.txt") in installing


@pytest.mark.parametrize("engine, line", [
    ("tee", "NANOTE_ENGINE=tee: must be te, fast or reference; reference runs on any machine\n"),
    ("te", "engine te: OSError('libcudnn.so.9'); NANOTE_ENGINE=reference works on any machine, ")],
    ids=["unknown", "broken"])
def test_an_engine_that_does_not_run_is_one_line(tmp_path, engine, line):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("raise OSError('libcudnn.so.9')")
    environment = os.environ | {"NANOTE_ENGINE": engine, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "train.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"train.py: {line}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("code", [
    "import nanote.absent", "import torch._C", "raise ImportError('nanote.absent torch._C')"])
def test_a_mistake_in_the_code_of_a_command_keeps_its_traceback(tmp_path, code):
    """And a package that is installed but broken, here torch."""
    (tmp_path / "torch.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, ROOT / "train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "not installed" not in done.stderr


def test_a_package_that_a_command_lacks_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    assert run_command(lambda: importlib.import_module("transformers"), "export_hf.py") == 2
    assert capsys.readouterr().err == (
        "export_hf.py: needs the package transformers, which is not installed: pip install transformers\n")


def test_a_part_that_a_package_lacks_is_no_missing_package():
    with pytest.raises(ModuleNotFoundError, match="torch.absent"):
        run_command(lambda: importlib.import_module("torch.absent"), "export_hf.py")


def test_training_needs_no_streams_and_no_triton(world, tmp_path):
    """As after the terminal was closed, on a machine without Triton and fast_kernels."""
    program = tmp_path / "program.py"
    program.write_text("import runpy, sys\nsys.modules['triton'] = sys.modules['fast_kernels'] = None\n"
                       f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')")
    command = f"PYTHONPATH={ROOT} exec {sys.executable} {program} {TRAIN} --out-dir {tmp_path}/run >&- 2>&-"
    environment = os.environ | {"NANOTE_ENGINE": "reference"}
    assert subprocess.run(["bash", "-c", command], cwd=world, env=environment).returncode == 0
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2]


def test_a_reader_that_goes_away_stops_the_run_in_order(world, tmp_path):
    process = start(f"{TRAIN} --max-steps 100000 --out-dir {tmp_path}/run", world)
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=60) in (0, 141) and "Traceback" not in error
    assert list((tmp_path / "run").glob("step-*/meta.json"))


@pytest.mark.parametrize("rights", [0o000, 0o444, 0o111])
def test_a_folder_without_rights_is_said_to_be_unreadable(world, in_tmp_path, rights):
    """Also to a superuser's test, which gives its own rights up in a fork."""
    shutil.copytree(world / "out/good", "run")
    shutil.copytree(world / "tokens", "tokens")
    os.chmod(".", 0o755)
    os.chmod("run", rights)

    def commands():
        if os.geteuid() == 0:
            os.setuid(65534)
        codes = [run_train("--resume --out-dir run"), run_train(f"{TRAIN} --init-from run"),
                 run_script("sample.py", ["run"])]
        assert codes == [2, 2, 2]

    try:
        [said] = fork_ranks(commands, count=1)
    finally:
        os.chmod("run", 0o755)
    for line in said.splitlines():
        assert re.match(r"(train|sample).py: run(/tokenizer.json)?: .*Permission denied", line), said
    assert "train.py: run: cannot be read (Permission denied); change its rights" in said


# ---------------------------------------------------------------- what a run records

def test_the_last_lines_name_what_is_there(world, in_tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    arguments = f"{SHORT} --eval-interval 0 --fp8-recipe none --wandb mine --out-dir run"
    assert run_train(arguments, f"{world}/tokens") == 0
    said = capsys.readouterr().out
    assert "tensorboard is not written: " in said and "--wandb mine is not written: wandb is not inst" in said
    assert "--fp8-recipe none; " in said, "the first line"
    summary = said[said.index("2 steps are done"):]
    assert "tensorboard" not in summary
    for name in ("loss.png", "metrics.jsonl", "step-2"):
        assert f" run/{name}\n" in summary and Path("run", name).exists()


@pytest.mark.parametrize("recipe, advice", [
    ("none", "try --lr 3.3e+37 or --grad-clip 0.5\n"), ("current", "--grad-clip 0.5 or --fp8-recipe none\n"),
    ("delayed", "--grad-clip 0.5 or --fp8-recipe current\n")])
def test_a_run_that_diverges_is_not_advised_what_it_did(world, in_tmp_path, capsys, recipe, advice):
    run = f"{OPTIONS} --n-layer 1 --max-steps 20 --fp8-recipe {recipe} --lr 1e38 --warmup-steps 0"
    assert run_train(f"{run} --eval-interval 0 --checkpoint-interval 0 --out-dir run", f"{world}/tokens") == 1
    assert capsys.readouterr().err.endswith(advice)


@pytest.mark.parametrize("options", [
    "--fp8-health-interval 1", pytest.param("--device cuda", marks=pytest.mark.gpu)])
def test_a_step_without_a_label_changes_nothing(in_tmp_path, capsys, options):
    """On a GPU steps are CUDA graphs."""
    write_tokens([["q" * 250, "an answer"] for _ in range(60)], "set", val_fraction=0.2, answers_only=True)
    run = (f"{OPTIONS} --n-layer 1 --micro-batch-size 1 --grad-accum 2 --max-steps 12 --log-interval 1 "
           "--eval-interval 5 --checkpoint-interval 1 --keep-checkpoints 20")
    assert run_train(f"{run} --out-dir run {options}", "set") == 0
    said = capsys.readouterr().out
    without = [int(step) for step in re.findall(r"step (\d+): no token is a label: skipped", said)]
    assert 0 < len(without) < 12 and said.count("  no label  ") == len(without)
    records = metrics("run")
    assert [record["step"] for record in records if record["loss"] is None] == without
    assert [record["step"] for record in records] == [*range(1, 13)]
    stored = {step: checkpoint.read_tensors(f"run/step-{step}", ("model.", "optimizer.", "fp8."))
              for step in range(1, 13)}
    for step in range(2, 13):
        before, after = stored[step - 1], stored[step]
        is_equal = all(torch.equal(value, after[name]) for name, value in before.items())
        assert is_equal == (step in without), step


def test_eval_only_prints_the_loss_and_writes_nothing(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    before, logged = tree(), metrics("out/good")[-1]
    assert run_train("--eval-only --out-dir out/good") == 0
    assert f"validation loss {logged['val_loss']:.4f} nats a byte" in capsys.readouterr().out
    assert run_train("--eval-only --out-dir out/good/step-2 --fp8-recipe none") == 0
    assert f"loss {logged['val_loss_without_fp8']:.4f} nats" in capsys.readouterr().out
    assert tree() == before


def test_printed_commands_quote_paths_with_spaces(world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(world)
    assert run_script("train.py", [*shlex.split(TRAIN), "--out-dir", f"{tmp_path}/my run"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "sample.py" in line]
    _, _, command = line.partition("sample.py ")
    assert run_script("sample.py", [*shlex.split(command), "--max-new-tokens", "2"]) == 0


# ---------------------------------------------------------------- files from elsewhere

@pytest.fixture
def copied(world, in_tmp_path):
    """In a copy of the world."""
    shutil.copytree(world, ".", dirs_exist_ok=True)


class Hostile:
    """Creates the file `ran` when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("ran").absolute(),)


def hostile_contents() -> list[bytes]:
    archive = io.BytesIO()
    torch.save({"model.wte.weight": Hostile()}, archive)
    return [pickle.dumps(Hostile()), archive.getvalue()]


@pytest.mark.parametrize("script", READERS)
@pytest.mark.parametrize("name", ["meta.json", "*.safetensors", "model.pt", ".metadata"])
def test_no_code_in_a_checkpoint_is_run(copied, capsys, script, name):
    for content in hostile_contents():
        shutil.copytree("out/good", "run")
        replaced = next(Path("run/step-2").glob(name), None)
        (replaced or Path("run/step-2", name)).write_bytes(content)
        sign("run/step-2")
        assert run_script(script, READERS[script].split()) == (2 if replaced else 0)
        assert capsys.readouterr().err.count("\n") == bool(replaced) and not Path("ran").exists()
        shutil.rmtree("run")


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "train.npy"])
def test_no_code_in_token_files_is_run(copied, name):
    Path("tokens", name).write_bytes(pickle.dumps(Hostile()))
    assert run_train(f"{TRAIN} --out-dir run") == (0 if name == "train.npy" else 2)
    assert not Path("ran").exists()


@pytest.mark.parametrize("script, arguments", [*READERS.items(), ("train.py", "--eval-only --out-dir run")])
@pytest.mark.parametrize("option, code", [("model", "evil.py:Net"), ("fp8_recipe", "custom:evil.f")])
def test_a_checkpoint_names_no_code(copied, capsys, script, arguments, option, code):
    shutil.copytree("out/good", "run")
    Path("evil.py").write_text("open('ran', 'w')")
    path = Path("run/step-2/meta.json")
    meta = json.loads(path.read_text())
    meta["config"][option] = code
    meta["model"] = code if option == "model" else meta["model"]
    path.write_text(json.dumps(meta))
    sign(path.parent)
    is_refused = script == "train.py" or option == "model"  # sample.py generates without FP8
    assert run_script(script, arguments.split()) == (2 if is_refused else 0)
    error, flag = capsys.readouterr().err, "--" + option.replace("_", "-")
    assert (f"pass {flag} {code}" in error) == is_refused and not Path("ran").exists()
