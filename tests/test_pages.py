"""The pages: every figure is the JSON's, none is typed in, links and files exist, and they read as text."""

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


@pytest.mark.parametrize("page", PAGES[:-1], ids=lambda page: page.name)  # the changelog names what is gone
def test_files_that_a_page_names_exist(page):
    folders = "results|tests|fast_kernels|nanote|tools|bench|examples"
    names = re.findall(rf"`((?:{folders})/[\w.]+\.\w+)`", page.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []
