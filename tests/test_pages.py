"""The pages: every figure is the JSON's, none is typed in, links and files exist, and they read as text."""

import json
import re
from pathlib import Path

import pytest

from bench import pages

ROOT = Path(pages.__file__).resolve().parent.parent
GUIDE = [ROOT / "README.md", ROOT / "GUIDE.md", *sorted((ROOT / "guide").glob("*.md"))]
PAGES = [*GUIDE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def without_code(text):
    return re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", text)


def anchors_of(text):
    headings = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", text), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_pages_show_what_was_measured():
    assert pages.update(ROOT) == []


@pytest.fixture
def site(tmp_path):
    """A README and a guide over one JSON file."""
    for folder in ("results", "guide"):
        (tmp_path / folder).mkdir()
    rows = [{"shape": "wide", "arm": "bf16", "ms": 30.0}, {"shape": "wide", "arm": "fp8", "ms": 20.04},
            {"shape": "slim", "arm": "fp8", "ms": 5.0}]
    (tmp_path / "results" / "speed.json").write_text(json.dumps(rows))
    (tmp_path / "README.md").write_text("FP8 takes 0 ms,\nor 0.00 times less. Later: 0 ms. Within 5 %.\n")
    (tmp_path / "GUIDE.md").write_text("The change is +0.0 %.\n")
    table = "| arm | ms | slim |\n| --- | --- | --- |\n| old | 1 | 2 |\n\nend\n"
    (tmp_path / "guide" / "more.md").write_text(table)
    (tmp_path / "guide" / "figures.txt").write_text("""
let fp8 = speed("wide", "fp8")
== README.md
FP8 takes {:.1f} ms, or {:.2f} times
    fp8.ms
    speed("wide", "bf16").ms / fp8.ms
Later: {:.0f} ms
    later.ms
Within 5 %
== GUIDE.md
change is {:+.1f} %
    speed("slim").ms
== guide/more.md
| arm | ms | slim |
    rows: [row for row in speed if row.shape == "wide"]
    row.arm
    f"{row.ms:.0f}"
    f'{speed("slim", row.arm).ms:.0f}'
""")
    return tmp_path


def test_figures_and_tables_are_written(site):
    assert len(pages.update(site)) == 4 and "takes 0 ms" in (site / "README.md").read_text()
    pages.update(site, write=True)
    assert pages.update(site) == []
    assert (site / "README.md").read_text() == (
        "FP8 takes 20.0 ms,\nor 1.50 times less. Later: not measured ms. Within 5 %.\n")
    assert (site / "GUIDE.md").read_text() == "The change is +5.0 %.\n"
    assert (site / "guide" / "more.md").read_text() == (
        "| arm | ms | slim |\n| --- | --- | --- |\n| bf16 | 30 |  |\n| fp8 | 20 | 5 |\n\nend\n")


@pytest.mark.parametrize("text, found", [
    ("It is 1.33 times as fast.", "1.33"), ("24 % more", "24"), ("takes +1.3 %", "+1.3"),
    ("505 k tokens/s", "505"), ("saves 4 GiB", "4"), ("| FP8 adds 20 % | 22 % |", "22"),
    ("by 24\n% of it", "24"),
    ("a history of 1,024 steps", None), ("PyTorch 2.11, TE 2.20.2; capability 8.9", None),
    ("8B, 32 x 1,024", None), ("`--lr 0.1` and [here](page-1.5.md)", None), ("```\n24 %\n```", None)])
def test_a_number_typed_in_is_found(site, text, found):
    pages.update(site, write=True)
    (site / "GUIDE.md").write_text((site / "GUIDE.md").read_text() + f"\n{text}\n")
    complaints = [line.split(": ")[2].split()[0] for line in pages.update(site)]
    assert complaints == ([found] if found else [])


def test_a_page_is_plain_text_and_not_too_long():
    for page in PAGES:
        assert "<!--" not in page.read_text(), page.name
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert sum(len(page.read_text().split()) for page in (ROOT / "guide").glob("*.md")) <= 14_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path.read_text()), target


def test_every_page_is_in_the_index():
    index = (ROOT / "GUIDE.md").read_text()
    listed = re.findall(r"\(guide/(\w+\.md)\)", index)
    assert set(listed) == {path.name for path in (ROOT / "guide").glob("*.md")}


@pytest.mark.parametrize("page", PAGES[:-1], ids=lambda page: page.name)  # the changelog names what is gone
def test_files_that_a_page_names_exist(page):
    folders = "results|tests|fast_kernels|nanote|tools|bench|examples"
    names = re.findall(rf"`((?:{folders})/[\w.]+\.\w+)`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []
