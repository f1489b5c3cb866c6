"""What the README and the guide show works: their Python runs, their commands run (training for twelve
steps), their links lead somewhere."""

import ast
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nanote import models
from trainer_tools import run_train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "GUIDE.md", *sorted((ROOT / "guide").glob("*.md"))]
COMMANDS = list(
    dict.fromkeys(
        line.split("#")[0].strip()
        for page in PAGES
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
        for line in block.splitlines()
    )
)
SCRIPTS = [c for c in COMMANDS if re.search(r"\b(python|torchrun) .*?\w+\.py", c)]


def test_the_models_ten_lines_run(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(code, {})
    # ln 512 = 6.2: random tokens cannot be learned, only not diverge
    assert float(capsys.readouterr().out) < 6.5


def parts(command):
    """-> script, its arguments; what stands before (environment, torchrun, a pipe) aside."""
    words = shlex.split(command)
    at = next(i for i, w in enumerate(words) if w.endswith(".py"))
    return words[at], words[at + 1:]


@pytest.mark.parametrize("command", SCRIPTS)
def test_every_option_exists(command, capsys):
    script, arguments = parts(command)
    options = [w for w in arguments if w.startswith("--") and w != "--help"]
    main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
    subcommand = arguments[:1] if script == "data.py" else []
    with pytest.raises(SystemExit):
        main([*subcommand, "--help"])
    text = capsys.readouterr().out
    assert options == [o for o in options if re.search(rf"{o}\b", text)]


@pytest.mark.parametrize(
    "command",
    [c for c in SCRIPTS if parts(c)[0] == "train.py" and not {"--help", "--resume"} & set(parts(c)[1])],
)
def test_training_commands_train(command, tokens, tmp_path, monkeypatch):
    """As they stand, but for twelve steps of a small model on this test's tokens."""
    monkeypatch.chdir(tmp_path)
    _, arguments = parts(command)
    given = " ".join(arguments)
    if "--data" in arguments:
        arguments[arguments.index("--data") + 1] = tokens
    small = f"--data {tokens} --n-layer 2 --n-head 2 --n-embd 64 --vocab-size 288 --seq-len 32 --micro-batch-size 2 --grad-accum 1"
    assert run_train(f"{given} {small} --max-steps 12 --warmup-steps 1 --eval-steps 1 --out-dir run") == 0


@pytest.mark.parametrize("command", [c for c in SCRIPTS if parts(c)[0] == "doctor.py"])
def test_doctors_commands_run(command):
    done = subprocess.run(
        ["bash", "-c", command.replace("python ", f"{sys.executable} ")], cwd=ROOT, capture_output=True,
        text=True, timeout=120,
    )
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
    for name in re.findall(r"`((?:results|tests)/[\w.]+)`", text):
        assert (ROOT / name).exists(), name


def test_the_table_of_files_names_files():
    for target in re.findall(r"^\| (`[^|]*`) \|", README.split("## What is here")[1].split("##")[0], re.M):
        for name in re.findall(r"[\w./]+", target):
            assert (ROOT / name).exists(), name


def local_modules(path):
    """Files of this kit that a script imports, or names in a string for a guarded import."""
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
