"""The pages: their figures are those of the JSON, links and files exist, they read as text. What they tell a
user to run: README's loop trains, commands have their options."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import measured
from nanote.options import read_config

ROOT = Path(__file__).resolve().parent.parent
GUIDE = [ROOT / "README.md", ROOT / "GUIDE.md", *sorted((ROOT / "guide").glob("*.md"))]
PAGES = [*GUIDE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES_OF_TODAY = [page for page in PAGES if page not in (measured.PAGE, ROOT / "CHANGELOG.md")]  # no history


def without_code(text):
    return re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", text)


def anchors_of(text):
    headings = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_measured_md_is_what_its_script_writes():
    assert measured.PAGE.read_text() == measured.page()


def test_no_column_of_measured_md_is_empty():
    for table in re.findall(r"(?m)(?:^\|.*\n)+", measured.PAGE.read_text()):
        titles, _, *rows = [line.strip("|\n").split("|") for line in table.splitlines()]
        for number, title in enumerate(titles):
            assert any(row[number].strip() for row in rows), title


FIGURE = re.compile(r"(\d[\d,]*(?:\.\d+)?) ?(?:%|×|ms\b|GiB\b|k tokens)")
DECIMAL = re.compile(r"(?<!PyTorch )(?<!Python )(?<!TE )(\d[\d,]*\.\d+)")  # not a version
PAGES_OF_FIGURES = ("README.md", "compile.md", "evidence.md", "several_gpus.md", "speed.md")


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_figures_are_in_measured_md(page):
    """Numbers with a unit, and those with a decimal point in the tables of five pages; no labels of rows."""
    text = re.sub(r"(?m)^\|[^|\n]*\|", "|", without_code(page.read_text()))
    figures = set(FIGURE.findall(text))
    if page.name in PAGES_OF_FIGURES:
        tables = "\n".join(re.findall(r"(?m)^\|.*", text))
        figures |= set(DECIMAL.findall(tables))
    in_measured_md = set(re.findall(r"\d[\d,]*(?:\.\d+)?", measured.PAGE.read_text()))
    assert sorted(figures - in_measured_md) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path.read_text()), target


@pytest.mark.parametrize("page", PAGES_OF_TODAY, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    folders = "results|tests|fast_kernels|nanote|tools|bench|examples"
    names = re.findall(rf"`((?:{folders})/[\w.]+\.\w+)`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []


# ---------------------------------------------------------------- commands and loops

TEXT = "\n".join(page.read_text() for page in PAGES_OF_TODAY)
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.S)).replace("\\\n", " ")  # a command a line
INLINE = re.findall(r"`((?:python|torchrun) [^`\n]*\.py[^`\n]*)`", TEXT)
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


LOOPS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


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
    _, arguments = split(command)
    config = read_config(arguments)
    assert "--preset" not in arguments or config.preset == arguments[arguments.index("--preset") + 1]
