"""What the pages show works: Python runs, commands run (training for twelve steps), and links, files and
functions exist."""

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import run_python
from nanote import models
from trainer_tools import run_train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
NAMES = ("README.md", "GUIDE.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "guide").glob("*.md"))]


def commands_of(page):
    """The lines of a page's shell blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
    lines = (line.split("#")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))
SCRIPTS = [c for c in COMMANDS if re.search(r"\b(python|torchrun) .*?\w+\.py", c)]


def test_the_models_ten_lines_run(capsys):
    train, accelerated, _ = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {}
    exec(train, names)
    # ln 512 = 6.2: random tokens cannot be learned, so the loss may only not diverge
    assert float(capsys.readouterr().out) < 6.5
    exec(accelerated, names)
    assert "fast kernels" in capsys.readouterr().out


def test_the_loop_of_ones_own_runs_beside_the_files_that_the_page_names(tmp_path):
    """In an empty folder, with what the last column of the table names."""
    code = re.findall(r"```python\n(.*?)```", README, re.S)[2]
    rows = re.findall(r"^\| (?:the first|`make_train_step`).*\| (.*) \|$", README, re.M)
    assert len(rows) == 3
    for name in {name for row in rows for name in re.findall(r"`([\w.]+)`", row)} | {"te_reference.py"}:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.suffix == ".py":
            shutil.copy(path, tmp_path)
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0 and float(done.stdout) < 6.5, done.stderr


def parts(command):
    """Return (script, its arguments); drop the environment, torchrun or a pipe before the script."""
    arguments = shlex.split(command)
    at = next(i for i, argument in enumerate(arguments) if argument.endswith(".py"))
    return arguments[at], arguments[at + 1:]


@pytest.mark.parametrize("command", SCRIPTS)
def test_every_option_exists(command, capsys):
    script, arguments = parts(command)
    options = [a for a in arguments if a.startswith("--") and a != "--help"]
    main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
    subcommand = arguments[:1] if script == "data.py" else []
    with pytest.raises(SystemExit):
        main([*subcommand, "--help"])
    text = capsys.readouterr().out
    assert options == [o for o in options if re.search(rf"{o}\b", text)]


def is_new_run(command):
    script, arguments = parts(command)
    others = {"--help", "--resume", "--config", "--eval-only", "--wandb"}
    return script == "train.py" and not others & set(arguments)


@pytest.mark.parametrize("command", [c for c in SCRIPTS if is_new_run(c)])
def test_training_commands_train(command, tokens, tmp_path, monkeypatch, compiles):
    """Run each as it stands, but for twelve steps of a small model on this test's tokens."""
    monkeypatch.chdir(tmp_path)
    _, arguments = parts(command)
    given = " ".join(arguments)
    if "--data" in arguments:
        arguments[arguments.index("--data") + 1] = tokens
    small = ("--n-layer 1 --n-head 2 --n-embd 64 --vocab-size 288 --seq-len 32 --micro-batch-size 2 "
             f"--grad-accum 1 --data {tokens}")
    assert run_train(f"{given} {small} --max-steps 12 --warmup-steps 1 --eval-steps 1 --out-dir run") == 0


@pytest.mark.parametrize("command", [c for c in SCRIPTS if parts(c)[0] == "doctor.py" and parts(c)[1]])
def test_doctors_commands_run(command):
    """Those with options. In test_doctor.py it examines this machine."""
    line = command.replace("python ", f"{sys.executable} ")
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in (c.split()[1] for c in COMMANDS if c.startswith("make ")):
        assert re.search(rf"^{target}:", makefile, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#h][^)#]*)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:results|tests|fast_kernels|nanote|tools|bench)/[\w.]+)`", text):
        assert (ROOT / name).exists(), name


def test_contributing_names_functions_that_exist():
    """Every name in a second or third column is defined or imported in the file of the column before it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\|(?:[^|`]*\|)? `([\w/]+\.py)` \| (.*) \|$", text, re.M)
    assert len(rows) > 15
    for file, description in rows:
        source = (ROOT / file).read_text()
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", description):
            if not name.endswith(".py"):
                assert re.search(rf"\b{name.split('.')[-1]}\b", source), f"{name} in {file}"


def test_the_table_of_files_names_files():
    section = README.split("## What is where")[1].split("##")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.M)
    assert len(rows) > 10
    for target in rows:
        for name in re.findall(r"[\w./]+", target):
            assert (ROOT / name).exists(), name


def local_modules(path):
    """Return the files of this kit that a script imports, or names in a string for a guarded import."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if re.fullmatch(r"\w+", name) and (ROOT / f"{name}.py").exists()}


def test_the_readme_names_what_a_model_file_uses_of_this_kit():
    paragraph = re.search(r"A model file stands alone.*?\n\n", README, re.S)[0]
    named = set(re.findall(r"`(\w+)\.py`", paragraph))
    for name, (module, *_) in models.MODELS.items():
        expected = named - {module} if name == "optimized" else {"te_reference"}
        assert local_modules(ROOT / f"{module}.py") == expected, name
