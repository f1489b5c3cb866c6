"""What the README shows works: its Python runs, its commands' options exist, its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

import data
import export_hf
import sample
import train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]


def test_the_models_ten_lines_run(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(code, {})
    assert float(capsys.readouterr().out) < 6.5  # ln 512 = 6.2: random tokens cannot be learned, only not diverge


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.match(r"(python|torchrun .*) ?\w+\.py", c)])
def test_every_option_exists(command, capsys):
    words = shlex.split(command)
    script = next(w for w in words if w.endswith(".py"))
    assert (ROOT / script).exists()
    options = [w for w in words[words.index(script) + 1:] if w.startswith("--") and w != "--help"]
    main = {"data.py": data.main, "train.py": train.main, "sample.py": sample.main, "export_hf.py": export_hf.main}[script]
    subcommand = words[words.index(script) + 1:][:1] if script == "data.py" else []
    with pytest.raises(SystemExit):
        main([*subcommand, "--help"])
    text = capsys.readouterr().out
    assert options == [o for o in options if re.search(rf"{o}\b", text)]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in (c.split()[1] for c in COMMANDS if c.startswith("make ")):
        assert re.search(rf"^{target}:", makefile, re.M)


def test_links_and_files_exist():
    for target in re.findall(r"\]\(([^)h][^)]*)\)", README) + re.findall(r"^\| (`[^|]*`) \|", README.split("## What is here")[1].split("##")[0], re.M):
        for name in re.findall(r"[\w./]+", target):
            assert (ROOT / name).exists(), name
