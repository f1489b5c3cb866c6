"""What the pages tell a user to run: README's loop trains, commands have their options."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = [README, CONTRIBUTING, *(path.read_text() for path in sorted((ROOT / "guide").glob("*.md")))]
BLOCKS = "\n".join(block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page, re.S))
INLINE = [text for page in PAGES for text in re.findall(r"`((?:python|torchrun) [^`\n]*\.py[^`\n]*)`", page)]
COMMANDS = [line.split("#")[0].split("|")[-1].strip() for line in [*BLOCKS.splitlines(), *INLINE]]
COMMANDS = list(dict.fromkeys(command for command in COMMANDS if "…" not in command))


def split(command):
    """Return (script, its arguments); ("", []) if the command runs none of this kit's."""
    words = shlex.split(command)
    for number, word in enumerate(words):
        if word.endswith(".py") and {"python", "torchrun"} & set(words[:number]):
            return word, words[number + 1:]
    return "", []


WITH_OPTIONS = [split(command) for command in COMMANDS if " --" in command and split(command)[0]]
TRAINING = [command for command in COMMANDS if split(command)[0] == "train.py"
            and not {"--resume", "--eval-only", "--config", "--help"} & set(split(command)[1])]


LOOPS = re.findall(r"```python\n(.*?)```", README, re.S)


# ln 512 = 6.2, ln 50304 = 10.8: random tokens cannot be learned, so the loss may only not diverge
@pytest.mark.parametrize("loop, files, largest_loss", [
    (0, ["model_te_optimized.py", "te_reference.py"], 6.5),
    pytest.param(1, ["model_te_fast.py", "nanote/graphs.py", "fast_kernels"], 11.3, marks=pytest.mark.gpu)])
def test_a_loop_runs_beside_the_files_that_are_copied(loop, files, largest_loss, tmp_path):
    for name in files:
        source, target = ROOT / name, tmp_path / Path(name).name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    code = LOOPS[loop].replace("range(10)", "range(3)") if loop == 0 else LOOPS[loop]  # BF16 on a CPU is slow
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and float(done.stdout.split()[-1]) < largest_loss, done.stderr
    assert len(LOOPS) == 2


@pytest.mark.parametrize("script", sorted({script for script, _ in WITH_OPTIONS}))
def test_every_option_of_a_command_exists(script, monkeypatch, capsys):
    used = {}  # {subcommand of data.py, or "": its options}
    for arguments in (arguments for name, arguments in WITH_OPTIONS if name == script):
        options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        used.setdefault(arguments[0] if script == "data.py" else "", set()).update(options)
    for subcommand, options in used.items():
        monkeypatch.setattr(sys, "argv", [script, *subcommand.split(), "--help"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        printed = capsys.readouterr().out
        assert [option for option in sorted(options) if not re.search(rf"{option}\b", printed)] == []


@pytest.mark.parametrize("command", TRAINING)
def test_a_command_that_trains_has_valid_options(command):
    from nanote.config import read_options

    _, arguments = split(command)
    config = read_options(arguments)
    assert "--preset" not in arguments or config.preset == arguments[arguments.index("--preset") + 1]
