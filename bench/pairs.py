"""Train every pair of train.py's options, try every refused pair, and count what is missing.

    python bench/pairs.py                                # this machine's part: te_reference, on a CPU
    python bench/pairs.py --part gpu --jobs 8            # on one GPU: Transformer Engine and fast_kernels
    python bench/pairs.py --part gpus --jobs 4           # on two GPUs: ddp and fsdp
    python bench/pairs.py --part gpu --list              # print the commands of the rows; train nothing
    python bench/pairs.py --page                         # write guide/pairs.md

A row is a command line of train.py. For each way to run the GEMMs ("stack" below) the rows are a covering
array: every two values of two options stand together in some row, but for those that train.py refuses
(`REFUSED` in nanote/config.py, and the options that a model file lacks). Three ideas:

- A row trains 4 steps, evaluates, saves, and resumes from step 3, which must give step 4 again. Its losses
  and gradient norms are those of the plain row: the same network and data on te_reference, in one process,
  without FP8 and without any option that only changes how a step is computed.
- Each refused pair is a command of its own, which must end with one line that names both options.
- The parts that need a GPU write the rows that they trained to results/pairs.json, with `--json`. All parts
  read it, so that a pair that no part has trained is "missing" on any machine.

bench/pair_rows.py makes the rows, bench/pair_runs.py trains them.
"""
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing: no traceback

import contextlib
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.pair_rows import (  # noqa: E402
    OTHER_CARD,
    PARAMETERS,
    PARTS,
    PLACES,
    STACKS,
    Refused,
    Rules,
    arguments_of,
    command_of,
    lacked_options,
    layers_of,
    make_corpora,
    pairs_of,
    parameters_of,
    plain_row,
    refused_arguments,
    refused_command,
    refused_pairs,
    rows_of,
    wanted_pairs,
)
from bench.pair_runs import Worker, divided, results_of  # noqa: E402
from nanote import config  # noqa: E402

JSON = ROOT / "results/pairs.json"
PAGE = ROOT / "guide/pairs.md"
MISSING_SHOWN = 20  # lines
# Largest relative difference from the plain row: of loss, validation loss, gradient norm. Measured on a CPU:
# FP8 0.2 % and 9 %, dropout 0.7 % and 10 %, BF16 0.01 % and 0.5 %, which is one bit of a norm in BF16.
COMPARED = ("loss", "val_loss", "grad_norm")
BOUNDS = {"high precision": (1e-3, 1e-3, 0.02), "FP8": (5e-3, 5e-3, 0.2), "dropout": (2e-2, 2e-2, 0.25)}
RESUME_BOUND = 5e-3  # on a GPU, whose sums may have another order; te_reference repeats step 4 bit for bit


def try_refused(refused: Refused, corpora: str) -> str:
    """Return what is wrong with how train.py refuses a pair, in this process; "" if nothing is."""
    import train as program
    arguments, before = refused_arguments(refused, corpora), os.environ.pop("NANOTE_ENGINE", None)
    if engine := dict(refused.options).get("NANOTE_ENGINE"):
        os.environ["NANOTE_ENGINE"] = engine
    out, error = (io.TextIOWrapper(io.BytesIO()) for _ in range(2))
    run = f"{corpora}/refused"
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(out):
            code = config.run_command(lambda: program.run([*arguments, "--out-dir", run]), "train.py")
    except (Exception, SystemExit) as failure:
        return f"{type(failure).__name__} instead of a line: {config.in_a_line(failure)}"
    finally:
        os.environ.pop("NANOTE_ENGINE", None)
        os.environ |= {"NANOTE_ENGINE": before} if before else {}
    line = error.buffer.getvalue().decode().strip()
    names = [name if name == "NANOTE_ENGINE" else config.as_typed(name, value).split()[0]
             for name, value in refused.options]
    if code != 2 or "\n" in line or not all(name in line for name in names) or os.path.exists(run):
        shutil.rmtree(run, ignore_errors=True)
        return f"code {code}, and must be 2; one line must name {' and '.join(names)}: {line}"
    return ""


# ---------------------------------------------------------------- training

def make_workers(rows: list, folder: Path, jobs: int) -> list[Worker]:
    """Return workers for the runs of rows, as (row, place), and of their plain rows."""
    runs, corpora = {}, f"{folder}/corpora"  # {(engine, place, ranks): {name: run}}
    make_corpora(corpora)
    for row, place in rows:
        where_plain = "gpu" if place == "gpu" else "cpu"
        for made, where, resumes in ((row, place, True), (plain_row(row), where_plain, False)):
            arguments = arguments_of(made, place, corpora, layers_of(row, place))
            resume = ["--no-compile"] if made["compile"] and where == "cpu" else []  # it traces once
            run = {"arguments": arguments, "resume": resume if resumes else None, "steps": PLACES[place][0],
                   "cost": 5 if made["compile"] or where == "interpreter" else 1}
            key = made["NANOTE_ENGINE"], where, 1 if made["layout"] == "one process" else 2
            runs.setdefault(key, {}).setdefault(name_of(made, arguments), run)
    workers = []
    total = sum(run["cost"] * ranks for (_, _, ranks), some in runs.items() for run in some.values())
    for (engine, where, ranks), some in runs.items():
        cost = sum(run["cost"] * ranks for run in some.values())
        for part in divided(some, max(1, round(jobs * cost / total))):
            workers.append(Worker(engine, where, ranks, part, folder / f"worker-{len(workers)}"))
    return workers


def name_of(row: dict, arguments: list) -> str:
    """Return a name of a run that is a folder, too."""
    text = f"{row['NANOTE_ENGINE']} {row['layout']} {arguments}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---------------------------------------------------------------- what is right

def problems(row: dict, steps: int, found: dict, plain: dict) -> list[str]:
    """Return what is wrong with a row's run, a line each."""
    for name, result in (("", found), ("the plain row: ", plain)):
        if "error" in result:
            return [f"{name}{result['error']}; its log: {result.get('log')}"]
    resumed = 0 if row["NANOTE_ENGINE"] == "reference" else RESUME_BOUND
    wrong = []
    for number in range(steps):
        records = [result[number:number + 1] for result in (
            found["metrics"], found["resumed"], plain["metrics"])]
        if not all(records) or records[0][0]["step"] != number + 1:
            return [*wrong, f"metrics.jsonl lacks step {number + 1}"]
        record, again, expected = (some[0] for some in records)
        for name, bound in zip(COMPARED, BOUNDS[kind_of(row)]):
            if name not in record:
                continue
            if not is_near(again[name], record[name], resumed if number == steps - 1 else 0):
                wrong.append(f"step {number + 1}: {name} {record[name]}, and {again[name]} after a resume")
            if not is_near(record[name], expected[name], bound):
                wrong.append(f"step {number + 1}: {name} {record[name]}, the plain row's {expected[name]}")
    return wrong


def kind_of(row: dict) -> str:
    """Return which of BOUNDS a row has."""
    return "dropout" if row["dropout"] else "FP8" if row["fp8_recipe"] != "none" else "high precision"


def differences(found: dict, plain: dict) -> list[float]:
    """Return the largest relative difference from the plain row of each of COMPARED."""
    records = [*zip(found.get("metrics", ()), plain.get("metrics", ()))]
    return [max((abs(record[name] / expected[name] - 1) for record, expected in records if name in record),
                default=0.0) for name in COMPARED]


def is_near(value: float, expected: float, bound: float) -> bool:
    return abs(value - expected) <= bound * abs(expected)


@dataclass
class Outcome:
    """What became of a row."""

    stack: str
    row: dict
    command: str
    wrong: list
    differences: list
    seconds: float


def train(rows: list, folder: Path, jobs: int):
    """Train rows, as (stack, row, place), and yield the outcome of each, compared with its plain row."""
    corpora, found = f"{folder}/corpora", {}
    left = {}  # {(name of the run, of the plain row's): (stack, row, place)}
    for stack, row, place in rows:
        layers, plain = layers_of(row, place), plain_row(row)
        names = [name_of(made, arguments_of(made, place, corpora, layers)) for made in (row, plain)]
        left[tuple(names)] = stack, row, place
    for name, result in results_of(make_workers([row[1:] for row in rows], folder, jobs), jobs):
        found[name] = result
        for names in [names for names in left if found.keys() >= set(names)]:
            stack, row, place = left.pop(names)
            results = [found[name] for name in names]
            wrong = problems(row, PLACES[place][0], *results)
            yield Outcome(stack, row, command_of(row, place, corpora), wrong, differences(*results),
                          results[0].get("seconds", 0))


# ---------------------------------------------------------------- counting

@dataclass
class Count:
    """The pairs of a stack: sets, but for `refused`, a number."""

    trained: set
    refused: int
    other_card: set
    missing: set


def count(stack: str, rules: Rules, trained_rows: list) -> Count:
    """Count the pairs of a stack. `trained_rows`: its rows that were trained, of all parts."""
    parameters = parameters_of(stack)
    wanted = wanted_pairs(parameters, rules)
    pairs = (len(parameters[one]) * len(parameters[other])
             for one, other in itertools.combinations(parameters, 2))
    trained = set(itertools.chain(*map(pairs_of, trained_rows))) & wanted
    needed = {pair for pair in wanted - trained if stack == "te" and needs_other_card(pair)}
    return Count(trained, sum(pairs) - len(wanted), needed, wanted - trained - needed)


def needs_other_card(pair) -> bool:
    return any(name == "fp8_recipe" and value in OTHER_CARD for name, value in pair)


def read_parts(path: Path) -> dict:
    """Return what the parts on GPUs have written: {part: report}."""
    return json.loads(path.read_text()) if path.exists() else {}


def rows_in(report: dict, stack: str) -> list[dict]:
    """Return the rows of a stack that a part has trained."""
    return [dict(zip(parameters_of(stack), values)) for values in report.get("rows", {}).get(stack, ())]


def summary(part: str, own: dict, parts: dict) -> tuple[str, int]:
    """Return a table of all pairs, and how many are missing. `own`: {stack: rows that were trained here}."""
    from bench.report import markdown
    rules, lines, missing = Rules(), [], []
    for stack in STACKS:
        if stack == "te_reference" and part != "cpu":
            continue  # the CPU's part trains it everywhere
        rows = own.get(stack, []) + [row for report in parts.values() for row in rows_in(report, stack)]
        found = count(stack, rules, rows)
        lines.append([stack, *(str(number) for number in (
            len(found.trained), found.refused, len(found.other_card), len(found.missing)))])
        missing += [f"missing: {stack}: {describe(pair)}" for pair in sorted(found.missing, key=repr)]
    table = markdown(("GEMMs by", "pairs trained", "refused", "not on this card", "missing"), lines)
    reasons = parts.get("gpu", {}).get("not_on_this_card", {})
    notes = [f"not on this card: --fp8-recipe {recipe}: {reason}" for recipe, reason in reasons.items()]
    shown = missing[:MISSING_SHOWN]
    if len(missing) > len(shown):
        shown.append(f"missing: and {len(missing) - len(shown)} more")
    return "\n".join([*notes, *shown, table, f"missing: {len(missing)}"]), len(missing)


def describe(options) -> str:
    """Return options as they are typed, or what stands for them."""
    return " with ".join(f"{name} {value}" if name in ("layout", "data") else
                         f"{name}={value or 'unset'}" if name == "NANOTE_ENGINE" else
                         config.as_typed(name, value) for name, value in options)


# ---------------------------------------------------------------- the page

PAGE_TEXT = """# What goes with what

`python bench/pairs.py` trains every two of these options together, on every engine, and tries each pair that
is refused: {options}.

The tables are those of the code: `python bench/pairs.py --page` writes them from `REFUSED` in
`nanote/config.py` and from the configs of the model files.

## Options that exclude each other

{refused}

## Options that a model file lacks

`optimized` has them all. What a preset sets and a model lacks is left out, and one line says so. What you
type is refused.

{lacked}
"""


def page() -> str:
    """Return the text of guide/pairs.md."""
    from bench.report import markdown
    lines = []
    for refusal in config.REFUSED:
        *others, last = [shown(setting) for setting in refusal.settings]
        lines.append([" with ".join(others), last, refusal.reason])
    models_without = {}  # {options: models}
    for model in ("advanced", "fused", "custom", "te"):
        names = ", ".join(f"`{config.flag(name)}`" for name, _ in lacked_options(model))
        models_without.setdefault(names, []).append(f"`{model}`")
    lacked = [[", ".join(some), names] for names, some in models_without.items()]
    trained = [f"`{config.flag(name)}`" if name not in ("layout", "data") else name for name in PARAMETERS]
    tables = dict(options=", ".join(trained), refused=markdown(("option", "not with", "why"), lines, left=3),
                  lacked=markdown(("`--model`", "has no"), lacked, left=2))
    return PAGE_TEXT.format(**tables)


def shown(setting: config.Setting) -> str:
    """Return a setting of REFUSED for the page: "`--parallel fsdp`, `hsdp`"."""
    if not setting.values:
        return f"`{config.flag(setting.option)}`"
    first, *rest = setting.values
    texts = [config.as_typed(setting.option, first), *rest]
    return ", ".join(f"`{text}`" for text in texts)


# ---------------------------------------------------------------- the command

@dataclass
class Options:
    part: Literal[PARTS] = "cpu"  # cpu: te_reference; gpu: one GPU; gpus: two.
    jobs: int = 2  # Processes, or pairs of processes, at a time.
    folder: str | None = None  # Folder of token files, runs and logs; None: out/pairs-<part>, made anew.
    json: str | None = None  # Write the rows that were trained to this file, after each of them.
    list: bool = False  # Print the commands of the rows and of the refused pairs; train nothing.
    page: bool = False  # Write guide/pairs.md; train nothing.


def main(argv=None) -> int:
    options = config.parse(Options, argv, prog="bench/pairs.py", description=__doc__)
    if options.page:
        PAGE.write_text(page())
        return 0
    folder = Path(options.folder or ROOT / f"out/pairs-{options.part}").resolve()
    rows = rows_of(options.part)
    if options.list:
        print("\n".join(command_of(row, place, f"{folder}/corpora") for _, row, place in rows))
        if options.part == "cpu":
            print("\n".join(refused_command(refused, f"{folder}/corpora") for refused in refused_pairs()))
        return 0
    return run(options, rows, folder, sys.argv[1:] if argv is None else argv)


def run(options: Options, rows: list, folder: Path, argv: list) -> int:
    """Train the rows of a part, try the refused pairs on a CPU, print the table; return the exit code."""
    shutil.rmtree(folder, ignore_errors=True)
    failed = 0
    trained = {stack: [] for stack in STACKS}
    largest = {kind: [0.0] * len(COMPARED) for kind in BOUNDS}
    for number, outcome in enumerate(train(rows, folder, options.jobs), 1):
        state = "FAILED" if outcome.wrong else "trained"
        print(f"{number}/{len(rows)} {state} {outcome.seconds} s: {outcome.command}", flush=True)
        print("".join(f"    {line}\n" for line in outcome.wrong), end="", flush=True)
        failed += bool(outcome.wrong)
        kind = kind_of(outcome.row)
        largest[kind] = [*map(max, largest[kind], outcome.differences)]
        if not outcome.wrong:
            trained[outcome.stack].append(outcome.row)
        if options.json:
            write_part(Path(options.json), options.part, trained, failed, argv)
    for refused in refused_pairs() if options.part == "cpu" else ():
        if wrong := try_refused(refused, f"{folder}/corpora"):
            failed += 1
            print(f"FAILED: {refused_command(refused, f'{folder}/corpora')}\n    {wrong}")
    parts = read_parts(Path(options.json) if options.json else JSON)
    parts.pop(options.part, None)
    for name, report in parts.items():
        if report["failed"]:
            failed += report["failed"]
            print(f"FAILED: {report['failed']} rows of --part {name}, on {report['date']}")
    table, missing = summary(options.part, trained, parts)
    for kind, values in largest.items():
        figures = (f"{name} {value:.2%} (bound {bound:.1%})"
                   for name, value, bound in zip(COMPARED, values, BOUNDS[kind]))
        print(f"largest difference from the plain rows, {kind}: {', '.join(figures)}")
    print(f"{table}\nfailed: {failed}")
    return int(failed > 0 or options.part == "cpu" and missing > 0)


def write_part(path: Path, part: str, trained: dict, failed: int, argv: list) -> None:
    """Write what a part has trained to the JSON of all parts."""
    from bench import report
    from nanote import recipes
    reasons = {recipe: recipes.unsupported_reason(recipe) for recipe in OTHER_CARD} if recipes.HAS_TE else {}
    rows = {stack: [list(row.values()) for row in some] for stack, some in trained.items() if some}
    origin = report.Rows(None, (), "bench/pairs.py", argv).origin
    content = {**origin, "failed": failed, "not_on_this_card": reasons, "rows": rows}
    report.write_json(path, read_parts(path) | {part: content})


if __name__ == "__main__":
    sys.exit(config.run_command(main, "bench/pairs.py"))
