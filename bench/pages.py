"""Write the tables, figures and pictures of the pages from the JSON in results/. Nothing is measured.

    python bench/pages.py            # what `make benchmark` ends with
    python bench/pages.py --check    # writes nothing; exit code 1 if a page does not say what the JSON says

The pages are README.md, GUIDE.md and guide/*.md. Every measured number on them is one of two things:

    <!-- memory -->                    a pair of these has the generated table TABLES["memory"] between
    1.61<!--= speed("124m-b32", "gpt2", "fp8").ratio_to_plain -->    a figure: the value of the expression

The comments are invisible in rendered Markdown and move with the text around them. A figure keeps the
decimals, the sign and the thousands separator that it is written with, so 0.0<!--= … --> asks for one
decimal. In an expression each JSON file is a name. A list of objects is a Table: called with values, it
returns the one row that has them all; all(field, name=value, …) returns a field of several rows. Fields of
a row are its attributes. Besides functions of Python there are `gaps`, `interval_of`, `losses` and
`pooled_interval` of bench/convergence_report.py.

A number with a unit or a decimal point that is neither is an error, so that none is typed in by hand. Code
and the first column of a table are exempt. <!-- given --> after a number (and its unit) marks it as not
measured.
"""

import difflib
import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import (
    accumulation,
    accumulation_bias,
    attention_report,
    convergence_report,
    first_run,
    gqa_rmsnorm,
    laptop,
    memory,
    multi_gpu,
    nanogpt,
    optimizer,
    plan_table,
    rounding,
    speed_report,
    stability_report,
    training,
)
from nanote import cli

PICTURES = {  # JSON file -> function that draws it; the picture is next to it
    "speed": speed_report.draw_speed, "convergence": convergence_report.plot,
    "convergence_switched_small": convergence_report.plot_switched,
    "stack": speed_report.draw_stack,
    "crossover": speed_report.draw_crossover,
    "attention": attention_report.plot,
    "training": training.plot,
    "first_run": lambda result, path: first_run.plot(result),
    "accumulation": accumulation.plot,
    "stability_h200": stability_report.plot,
    "stability_cpu": stability_report.plot,
}
TABLES = {  # comment in a page -> JSON file, function that makes a Markdown table of it
    "speed": ("speed", speed_report.table), "compile": ("compile", speed_report.compile_table),
    "nanogpt": ("nanogpt", nanogpt.table), "laptop": ("laptop", laptop.sample_block),
    "mfu": ("speed", speed_report.mfu_table),
    "profile": ("speed", speed_report.profile_table), "variants": ("speed", speed_report.variants_table),
    "stack": ("stack", speed_report.stack_table), "crossover": ("crossover", speed_report.crossover_table),
    "formats": ("formats", speed_report.formats_table), "memory": ("memory", memory.table),
    "gqa_rmsnorm": ("gqa_rmsnorm", gqa_rmsnorm.table), "optimizer": ("optimizer", optimizer.table),
    "attention": ("attention", attention_report.kernels_table),
    "attention_blocks": ("attention", attention_report.blocks_table),
    "accumulation": ("accumulation", accumulation.errors_table),
    "accumulation_bias": ("accumulation_bias", accumulation_bias.table),
    "convergence": ("convergence", convergence_report.main_table),
    "convergence_rates": ("convergence", convergence_report.rates_table),
    "convergence_small": ("convergence_small", convergence_report.small_table),
    "rounding": ("rounding", rounding.table), "rounding_bpe": ("rounding_bpe", rounding.table),
    "convergence_switched": ("convergence_switched", convergence_report.switched_table),
    "convergence_early": ("convergence_early", convergence_report.switched_table),
    "convergence_width128": ("convergence_switched_width128", convergence_report.switched_table),
    "convergence_bfloat16": ("convergence_switched_bfloat16", convergence_report.switched_table),
    "convergence_negatives": ("convergence", convergence_report.negatives_table),
    "accumulation_times": ("accumulation", accumulation.times_table),
    "multi_gpu": ("multi_gpu", multi_gpu.table),
    "plan": ("speed", plan_table.table),  # an estimate; one GPU's speed is measured
    "stability": ("stability_h200", stability_report.table),
    "stability_te": ("stability_te_h200", stability_report.sizes_table),
}
FIGURE = re.compile(r"([+-]?)(\d[\d,]*)(\.\d+)?<!--=\s*(.+?)\s*-->")
FUNCTIONS = {"abs": abs, "len": len, "max": max, "min": min, "sum": sum, "zip": zip, "mean": statistics.mean,
             "median": statistics.median, "stdev": statistics.stdev, "gaps": convergence_report.gaps,
             "interval_of": convergence_report.interval_of, "losses": convergence_report.losses,
             "pooled_interval": convergence_report.pooled_interval}

# A number counts as measured if it has a unit or a decimal point
UNITS = r"\s?(?:%|×|times\b|m?s\b|seconds\b|[GMk]i?B\b|MHz\b|W\b|TFLOP/s|TB/s|nats\b|tokens/s)|\s[kMB]\b"
MEASURED = re.compile(rf"(?<![\w.,/^])[+-]?\d[\d,]*(?:\.\d+|(?={UNITS}))")
VERSION = (r"(?:Engine|TE|PyTorch|CUDA|cuDNN|Python|glibc|capability|below)[^\S\n]\d[\d.]*"
           r"|\d+\.\d+\.\d+|\d\.x|\d+\.\d+-py3")
GIVEN = r"[^\s|]*[^\S\n]?[^\s|]*<!-- given -->"
EXEMPT = (r"```.*?```", r"`[^`\n]*`", r"\]\([^)]*\)", r"(?m:^)\|[^|\n]*\|", GIVEN, r"<!--.*?-->", VERSION)


@dataclass
class Options:
    check: bool = False  # Write nothing; report whether the pages are up to date.


class Row(dict):
    """A JSON object; its fields are attributes too."""

    def __getitem__(self, name):
        if name not in self:
            raise ValueError(f"no field {name!r}; there are {', '.join(self)}")
        return wrap(super().__getitem__(name))

    __getattr__ = __getitem__


class Table(list):
    """A list of JSON objects."""

    def __call__(self, *values):
        """Return the one row that has every value in some field; ValueError if none or several do."""
        found = [row for row in self if all(holds(row, value) for value in values)]
        if len(found) != 1:
            told = ", ".join(map(repr, values))
            raise ValueError(f"{len(found)} rows have {told}; name values that one row has")
        return Row(found[0])

    def all(self, field, **fields):
        """Return the values of `field`, None left out, in the rows whose other fields are as given."""
        rows = [row for row in self if all(row.get(name) == value for name, value in fields.items())]
        return [row[field] for row in rows if row.get(field) is not None]


def holds(row, value):
    # 1 is not True
    return any(value == other and type(value) is type(other) for other in row.values())


def wrap(value):
    if isinstance(value, dict):
        return Row(value)
    return Table(value) if isinstance(value, list) and value and isinstance(value[0], dict) else value


def read(folder):
    """Return {name: content} of the JSON files in a folder."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def fill_tables(text, contents):
    """Return `text` with each table of TABLES between its two comments.

    Raises ValueError for an unknown comment, and for one without its pair.
    """
    for mark, (name, make) in TABLES.items():
        comment = f"<!-- {mark} -->"
        if text.count(comment) not in (0, 2):
            many = text.count(comment)
            raise ValueError(f"{comment}: stands {many} times; put one before and one after the table")
        if comment in text and name in contents:  # or it is not measured yet, and the table stays as it is
            before, _, after = text.split(comment)
            text = f"{before}{comment}\n{make(contents[name])}\n{comment}{after}"
    for comment in re.findall(r"<!--(?!=)\s*(.*?)\s*-->", text):
        if comment not in (*TABLES, "given"):
            raise ValueError(f"<!-- {comment} -->: unknown; tables are {', '.join(TABLES)}")
    return text


def fill_figures(text, contents):
    """Return `text` with every figure computed again."""
    names = {name: wrap(content) for name, content in contents.items()} | FUNCTIONS

    def compute(match):
        sign, whole, decimals, expression = match.groups()
        try:
            value = eval(expression, {"__builtins__": {}} | names)
        except Exception as error:  # whatever the expression raises
            raise ValueError(f"<!--= {expression} -->: {type(error).__name__}: {error}") from error
        if type(value) not in (int, float):
            raise ValueError(f"<!--= {expression} -->: not a number: {str(value)[:50]}")
        comma = "," if "," in whole or abs(value) >= 10_000 else ""
        form = f"{'+' if sign else ''}{comma}.{len(decimals or '.') - 1}f"
        value = round(value, len(decimals or ".") - 1) + 0.0  # no -0.00
        return f"{value:{form}}<!--= {expression} -->"

    return FIGURE.sub(compute, text)


def unmarked(text):
    """Return the measured numbers in `text` that do not come from the JSON: ["line 12: 1.61", …]."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])  # keeps line numbers

    def line(match):
        return text.count("\n", 0, match.start()) + 1

    for mark in TABLES:
        text = re.sub(f"<!-- {mark} -->.*?<!-- {mark} -->", blank, text, flags=re.DOTALL)
    text = FIGURE.sub(blank, text)
    for pattern in EXEMPT:
        text = re.sub(pattern, blank, text, flags=re.DOTALL)
    return [f"line {line(match)}: {match[0]}" for match in MEASURED.finditer(text)]


def ragged(text):
    """Return the table rows that do not have as many cells as the row above them, a message each."""
    found, above = [], 0
    for number, line in enumerate(re.sub(r"<!--.*?-->|`[^`\n]*`", "", text).splitlines(), 1):
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.lstrip().startswith("|") else 0
        if cells and above and cells != above:
            found.append(f"line {number}: {cells} cells, and {above} in the row above")
        above = cells
    return found


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/pages.py", description=__doc__)
    contents, wrong, texts = read(ROOT / "results"), [], {}
    for path in (ROOT / "README.md", ROOT / "GUIDE.md", *sorted((ROOT / "guide").glob("*.md"))):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        try:
            texts[path] = fill_figures(fill_tables(text, contents), contents)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for line in list(difflib.unified_diff(text.splitlines(), texts[path].splitlines(), n=0))[2:]:
            if not line.startswith("@@"):
                wrong.append(f"{name}: {'page' if line[0] == '-' else 'JSON'} has {line[1:100]}")
        wrong += [f"{name}: {found}" for found in ragged(text)]
        wrong += [f"{name}: no file in results/ is behind this number, {found}" for found in unmarked(text)]
    if not options.check:
        for path, text in texts.items():  # only now, so that an error leaves every page as it was
            path.write_text(text)
        for name, draw in PICTURES.items():
            if name in contents:
                draw(contents[name], ROOT / "results" / f"{name}.png")
    print("\n".join(wrong) or "every table and figure is the JSON's")
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/pages.py"))
