"""Check that the figures on the pages are those of the JSON in results/, or write them. Nothing is measured.

    python bench/pages.py            # write every figure and table into the pages
    python bench/pages.py --check    # write nothing; exit code 1 if a page and the JSON differ

The pages (README.md, GUIDE.md, guide/*.md) are plain Markdown. guide/figures.txt names the source of figures:

    let best = speed("124m-b32", "fp8")        a name for the expressions below
    == guide/speed.md                          the page of the lines that follow
    FP8 is {:.2f} × as fast                    text on the page; in braces the format of a figure
        best.ratio                             the expression of each of its figures, indented
    within 5 %                                 no expression: these numbers are not measured
    | shape | ms a step |                      the first row of a table, of which the other rows are computed
        rows: speed                            a list, and an expression for each cell of a `row`
        row.shape
        f"{row.ms:.1f}"

In an expression each JSON file is a name; `speed("124m-b32", "fp8")` is the one row with these values.
A file that does not exist yet gives "not measured", a missing row an empty cell. A number with a unit or a
decimal point that figures.txt does not name is an error: none is typed in by hand.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing: no traceback

import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from nanote import config

SLOT = re.compile(r"\{(?::[^}]*)?\}")  # the place of a figure, with its format
VALUE = r"([+-]?\d[\d,]*(?:\.\d+)?|not measured)"
UNITS = r"\s?(?:%|×|times\b|m?s\b|seconds\b|[GMk]i?B\b|MHz\b|W\b|TFLOP/s|TB/s|nats\b|tokens/s)|\s[kMB]\b"
MEASURED = re.compile(rf"(?<![\w.,/^])[+-]?\d[\d,]*(?:\.\d+|(?={UNITS}))")
VERSION = (r"(?:Engine|TE|[Vv]ersion|PyTorch|CUDA|cuDNN|Python|glibc|capability|below)[^\S\n]\d[\d.]*"
           r"|\d+\.\d+\.\d+|\d\.x|\d+\.\d+-py3")
UNCHECKED = (r"```.*?```", r"`[^`\n]*`", r"\]\([^)]*\)", r"(?m:^)\|[^|\n]*\|", VERSION)  # code, first column


@dataclass
class Options:
    check: bool = False  # Write nothing; report what is wrong.


class Row(dict):  # a JSON object; its fields are attributes too
    def __getattr__(self, name):
        return Table(self[name]) if isinstance(self[name], list) else self[name]


class Table(list):
    def __call__(self, *values):
        """Return the one JSON object that has every value in some field."""
        found = [row for row in self if all(value in row.values() for value in values)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} rows have {', '.join(map(repr, values))}")
        return found[0]


def evaluate(expression, names, missing):
    """Return the value of an expression; None if it raises the exception `missing`."""
    try:
        return eval(expression, dict(names))
    except missing:
        return None


def read_figures(root):
    """Return (names for expressions, {page: [(text on it, [expression])]}) of guide/figures.txt."""
    pages, names = {}, {"mean": statistics.mean, "median": statistics.median, "stdev": statistics.stdev}
    for path in (root / "results").glob("*.json"):
        content = json.loads(path.read_text(), object_hook=Row)
        names[path.stem] = Table(content) if isinstance(content, list) else content
    for line in filter(str.strip, (root / "guide" / "figures.txt").read_text().splitlines()):
        if line.startswith("let "):
            name, expression = line.removeprefix("let ").split(" = ", 1)
            names[name] = eval(expression, names)
        elif line.startswith("== "):
            entries = pages.setdefault(line.removeprefix("== "), [])
        elif line.startswith("    "):
            entries[-1][1].append(line.strip())
        else:
            entries.append((line.strip(), []))
    return names, pages


def find(template, text):
    """Return the match of a line of figures.txt on a page, a group for each figure."""
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in SLOT.split(template)]
    found = list(re.finditer(VALUE.join(parts), text))
    if len(found) != 1:
        raise ValueError(f"it stands {len(found)} times on the page; it must once")
    return found[0]


def fill(text, template, expressions, names):
    """Compute an entry again. Return the page's text, and the spans in it that need no other source."""
    match = find(template, text)
    if expressions and expressions[0].startswith("rows: "):
        rule, _, rest = text[match.end() + 1:].partition("\n")
        rows, (source, *cells) = "", expressions
        for row in eval(source.removeprefix("rows: "), names):
            values = [evaluate(cell, names | {"row": row}, LookupError) for cell in cells]
            rows += f"| {' | '.join('' if value is None else str(value) for value in values)} |\n"
        text = f"{text[:match.end()]}\n{rule}\n{rows}" + re.sub(r"\A(?:\|.*\n)*", "", rest)
        return text, [(match.start(), match.end() + len(rule) + len(rows) + 2)]
    slots = SLOT.findall(template)
    for number in range(len(slots), 0, -1):  # from the right, so that the spans before it stay
        value = evaluate(expressions[number - 1], names, NameError)  # None: the JSON is not there yet
        value = "not measured" if value is None else slots[number - 1].format(value)
        text = text[:match.start(number)] + value + text[match.end(number):]
    match = find(template, text)
    return text, match.regs[1:] or [match.span()]


def update(root, write=False):
    """Compute every figure again, and write it if asked. Return a line for each that was wrong."""
    wrong, texts, (names, entries) = [], {}, read_figures(root)
    for path in [root / "README.md", root / "GUIDE.md", *sorted((root / "guide").glob("*.md"))]:
        page, text = path.relative_to(root).as_posix(), path.read_text()
        for template, expressions in entries.get(page, []):
            try:
                before, (text, _) = text, fill(text, template, expressions, names)
            except Exception as error:  # whatever an expression raises
                raise ValueError(f"guide/figures.txt: {page}: {template}: {error}") from error
            wrong += [f"{page}: not what the JSON says: {template}"] if text != before else []
        spans = [span for entry in entries.get(page, []) for span in fill(text, *entry, names)[1]]
        spans += [match.span() for form in UNCHECKED for match in re.finditer(form, text, re.DOTALL)]
        for match in MEASURED.finditer(text):
            if not any(start <= match.start() < end for start, end in spans):
                line = text.count("\n", 0, match.start()) + 1
                wrong.append(f"{page}: line {line}: {match[0]} is not in guide/figures.txt")
        texts[path] = text
    for path, text in texts.items() if write else ():  # only now: an error leaves every page as it was
        path.write_text(text)
    return wrong


def main(argv=None):
    options = config.parse(Options, argv, prog="bench/pages.py", description=__doc__)
    wrong = update(ROOT, write=not options.check)
    print("\n".join(wrong) or "every figure and table is the JSON's")
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(config.run_command(main, "bench/pages.py"))
