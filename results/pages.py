"""Every picture of measurements, and every table of them in README.md and GUIDE.md, from the JSON beside this file. Nothing is measured.

    python results/pages.py            # what `make benchmark` ends with
    python results/pages.py --check    # writes nothing; exit code 1 if a table in the pages is not the JSON's
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
sys.path.insert(0, str(RESULTS.parent))
import benchmark_attention  # noqa: E402
import cli  # noqa: E402
from results import accumulation, first_run, memory, speed_report, stability_report, training  # noqa: E402

PICTURES = {  # file -> what draws its content; the picture lies beside it
    "speed": speed_report.draw_speed, "stack": speed_report.draw_stack, "crossover": speed_report.draw_crossover,
    "attention": benchmark_attention.plot, "training": training.plot, "first_run": lambda result, path: first_run.plot(result),
    "accumulation": accumulation.plot,
    "stability_h200": stability_report.plot, "stability_cpu": stability_report.plot,
}
TABLES = {  # mark in the page -> page, file, what makes a Markdown table of its content
    "speed": ("README.md", "speed", speed_report.table), "memory": ("GUIDE.md", "memory", memory.table),
    "compile": ("GUIDE.md", "compile", speed_report.compile_table),
}


@dataclass
class Options:
    check: bool = False  # Write nothing, and tell whether the tables are right.


def read(name):
    """The content of a JSON file, or None if it was not measured yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def replace_table(text, mark, table):
    """`text` with `table` between the two comments of that mark; ValueError unless there are two."""
    comment = f"<!-- {mark} -->"
    if text.count(comment) != 2:
        raise ValueError(f"{comment} must stand twice, before and after the table")
    before, _, after = text.split(comment)
    return f"{before}{comment}\n{table}\n{comment}{after}"


def main(argv=None):
    options, texts, wrong = cli.parse(Options, argv, prog="results/pages.py", description=__doc__), {}, []
    for mark, (page, name, make) in TABLES.items():
        content = read(name)
        if content is None:
            continue
        path = RESULTS.parent / page
        text = texts.get(path) or path.read_text()
        texts[path] = replace_table(text, mark, make(content))
        wrong += [f"{page}, {mark}"] * (texts[path] != text)
    for path, text in texts.items():  # only now: a mark that is missing leaves every page as it was
        if not options.check:
            path.write_text(text)
    for name, draw in PICTURES.items():
        content = read(name)
        if content is not None and not options.check:
            draw(content, RESULTS / f"{name}.png")
    print("\n".join(f"{'differs from' if options.check else 'made anew from'} the JSON: {place}" for place in wrong) or "every table is the JSON's")
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(cli.run(main, "results/pages.py"))
