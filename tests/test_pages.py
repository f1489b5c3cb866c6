"""The pages: their figures are those of the JSON, links lead somewhere, files exist.

Their commands and loops are in test_page_commands.py.
"""
import re
from pathlib import Path

import pytest

from bench import measured

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


def test_each_file_of_measured_md_says_at_which_commit_it_was_measured():
    origins = re.findall(r"(?m)^# \w+\.json: .*", measured.PAGE.read_text())
    assert len(origins) > 20
    assert [line for line in origins if "measured at " not in line] == []


NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(rf"({NUMBER}) ?(?:%(?! interval)|×|ms\b|GiB\b|k tokens)")
DECIMAL = re.compile(r"(?<!PyTorch )(?<!Python )(?<!TE )(\d[\d,]*\.\d+)")  # not a version
PAGES_OF_FIGURES = ("README.md", "compile.md", "evidence.md", "several_gpus.md", "speed.md")


def sections_of(text):
    return re.split(r"(?m)^(?=## )", text)


MEASURED = {anchors_of(section)[0]: set(re.findall(NUMBER, section))
            for section in sections_of(measured.PAGE.read_text())}


def figures_of(section, page):
    """Return the numbers with a unit, and in tables of five pages those with a decimal point."""
    text = re.sub(r"(?m)^\|[^|\n]*\|", "|", without_code(section))
    figures = set(FIGURE.findall(text))
    if page.name in PAGES_OF_FIGURES:
        tables = "\n".join(re.findall(r"(?m)^\|.*", text))
        figures |= set(DECIMAL.findall(tables))
    return figures


def sources_of(section, page):
    """Return the anchors in measured.md that a section links to, or that a page links to which it names."""
    texts = [section]
    for target in re.findall(r"\]\(([\w/]+\.md)", section):
        texts.append((page.parent / target).read_text())
    return re.findall(r"measured\.md#([\w-]+)", "\n".join(texts))


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_figures_are_in_linked_sections_of_measured_md(page):
    if page == measured.PAGE:
        return
    for section in sections_of(page.read_text()):
        in_linked = set().union(*(MEASURED[anchor] for anchor in sources_of(section, page)))
        assert sorted(figures_of(section, page) - in_linked) == [], section.partition("\n")[0]


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
