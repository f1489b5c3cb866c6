"""Train every pair of train.py's options, try every refused pair, and count what is missing.

    python bench/pairs.py                                # this machine's part: te_reference, on a CPU
    python bench/pairs.py --part gpu --jobs 8            # on one GPU: Transformer Engine and fast_kernels
    python bench/pairs.py --part gpus --jobs 4           # on two GPUs: ddp and fsdp
    python bench/pairs.py --part gpu --list              # print the commands of the rows; train nothing
    python bench/pairs.py --page                         # write guide/pairs.md

A row is a command line of train.py. For each way to run the GEMMs ("stack" below) every two values of two
options stand together in some row, but for those that train.py refuses (`REFUSED` in nanote/config.py, and
the options that a model file lacks). Three ideas:

- A row trains 4 steps, evaluates, saves, and resumes from step 3, which must give step 4 again. Its losses
  and gradient norms are those of the plain row: the same network and data on te_reference, in one process,
  without FP8 and without any option that only changes how a step is computed.
- Each refused pair is a command of its own, which must end with one line that names both options.
- The parts that need a GPU write the rows that they trained to results/pairs.json, with `--json`. All parts
  read it, so that a pair that no part has trained is "missing" on any machine.

bench/pair_rows.py makes the rows, bench/pair_runs.py trains them, bench/pair_refusals.py has the refused
pairs.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import json
import shutil
from dataclasses import dataclass
from typing import Literal

from bench import pair_refusals
from bench.pair_rows import (
    OPTIONS,
    STACKS,
    Row,
    all_pairs,
    allowed_pairs,
    make_corpora,
    pairs_of,
    rows_of,
    values_of,
)
from bench.pair_runs import Run, results_of
from nanote import config
from nanote.command import parse, run_command

JSON = ROOT / "results/pairs.json"
PAGE = ROOT / "guide/pairs.md"
MISSING_SHOWN = 20  # lines
COMPARED = ("loss", "val_loss", "grad_norm")
# The largest relative difference from the plain row of each of COMPARED. Measured on a CPU: FP8 0.2 % and
# 9 %, dropout 0.7 % and 10 %, BF16 0.01 % and 0.5 %, which is one bit of a norm in BF16.
BOUNDS = {"high precision": (1e-3, 1e-3, 0.02), "FP8": (5e-3, 5e-3, 0.2), "dropout": (2e-2, 2e-2, 0.25)}
RESUME_BOUND = 5e-3  # on a GPU, whose sums may have another order; te_reference repeats step 4 bit for bit


# ---------------------------------------------------------------- training

def train_in_groups(rows: list[Row], folder: Path, jobs: int):
    """Train rows; yield (row, its result, that of its plain row) when both have ended."""
    corpora = f"{folder}/corpora"
    make_corpora(corpora)
    own_runs = [run_of(row, corpora, resumes=True) for row in rows]
    plain_runs = [run_of(row.plain(), corpora, resumes=False) for row in rows]
    runs = {run.name: run for run in plain_runs + own_runs}  # a run that is in both lists resumes
    waiting = list(zip(rows, own_runs, plain_runs))
    results = {}
    for result in results_of(list(runs.values()), folder, jobs):
        results[result["name"]] = result
        for item in list(waiting):
            row, run, plain_run = item
            if run.name in results and plain_run.name in results:
                waiting.remove(item)
                yield row, results[run.name], results[plain_run.name]


def run_of(row: Row, corpora: str, resumes: bool) -> Run:
    return Run(
        name=row.command(corpora), arguments=row.arguments(corpora), environment=row.environment,
        ranks=row.ranks, steps=row.place.steps, resumes=resumes)


# ---------------------------------------------------------------- what is right

def problems_of(row: Row, found: dict, plain: dict) -> list[str]:
    """Return what is wrong with the results of a row's run, beside those of its plain row; a line each."""
    if "error" in found:
        return [f"{found['error']}; its log: {found['log']}"]
    if "error" in plain:
        return [f"the plain row: {plain['error']}; its log: {plain['log']}"]
    for records in (found["metrics"], found["resumed"], plain["metrics"]):
        steps = [record["step"] for record in records]
        for step in range(1, row.place.steps + 1):
            if step not in steps:
                return [f"metrics.jsonl lacks step {step}"]
    problems = []
    for record, again, expected in zip(found["metrics"], found["resumed"], plain["metrics"]):
        problems += wrong_numbers(row, record, again, expected)
    return problems


def wrong_numbers(row: Row, record: dict, again: dict, expected: dict) -> list[str]:
    """Compare a step with the same step after the resume, and with the plain row's."""
    resume_bound = 0
    if record["step"] == row.place.steps and row.stack != "te_reference":  # trained again, on a GPU
        resume_bound = RESUME_BOUND
    problems = []
    for name, bound in zip(COMPARED, bounds_of(row)):
        if name not in record:
            continue
        where = f"step {record['step']}: {name} {record[name]}"
        if not is_near(again[name], record[name], resume_bound):
            problems.append(f"{where}, and {again[name]} after a resume")
        if not is_near(record[name], expected[name], bound):
            problems.append(f"{where}, the plain row's {expected[name]}")
    return problems


def bounds_of(row: Row) -> tuple:
    if row.choice["dropout"]:
        return BOUNDS["dropout"]
    return BOUNDS["high precision"] if row.choice["fp8_recipe"] == "none" else BOUNDS["FP8"]


def is_near(value: float, expected: float, bound: float) -> bool:
    return abs(value - expected) <= bound * abs(expected)


# ---------------------------------------------------------------- counting

@dataclass
class Count:
    """The pairs of a stack: how many are trained or refused, and which are missing."""

    trained: int
    refused: int
    missing: list


def count_pairs(stack: str, choices: list[dict]) -> Count:
    """Count the pairs of a stack. `choices`: those of its rows that were trained, by all parts."""
    values = values_of(stack)
    allowed = allowed_pairs(values)
    found = set().union(*map(pairs_of, choices))
    missing = [pair for pair in allowed if pair not in found]
    return Count(len(allowed) - len(missing), len(all_pairs(values)) - len(allowed), missing)


def read_parts(path: Path) -> dict:
    """Return what the parts on GPUs have written: {part: report}."""
    return json.loads(path.read_text()) if path.exists() else {}


def choices_in(report: dict, stack: str) -> list[dict]:
    """Return the choices of a stack that a part has trained."""
    rows = report["rows"].get(stack, [])
    return [dict(zip(values_of(stack), values)) for values in rows]


def write_part(path: Path, part: str, trained: dict, failed: int, argv: list) -> None:
    """Write what a part has trained to the JSON of all parts."""
    # here, because it imports PyTorch and the engine, which --list need not wait for
    from bench.report import row_origin, write_json
    rows = {}
    for stack, choices in trained.items():
        if choices:
            rows[stack] = [list(choice.values()) for choice in choices]
    report = row_origin("bench/pairs.py", argv) | {"failed": failed, "rows": rows}
    write_json(path, read_parts(path) | {part: report})


def summarize(part: str, own: dict, parts: dict) -> tuple[str, int]:
    """Return a table of all pairs, and how many are missing.

    own: {stack: choices that this part has trained}. parts: {part: report} of the others.
    """
    from bench.report import markdown
    rows = []
    lines = []
    missing = 0
    for stack in STACKS:
        if stack == "te_reference" and part != "cpu":
            continue  # the CPU's part trains it everywhere
        choices = list(own.get(stack, []))
        for report in parts.values():
            choices += choices_in(report, stack)
        count = count_pairs(stack, choices)
        rows.append([stack, str(count.trained), str(count.refused), str(len(count.missing))])
        lines += [f"missing: {stack}: {as_typed(pair)}" for pair in count.missing[:MISSING_SHOWN]]
        missing += len(count.missing)
    lines.append(markdown(("GEMMs by", "pairs trained", "refused", "missing"), rows))
    lines.append(f"missing: {missing}")
    return "\n".join(lines), missing


def as_typed(pair) -> str:
    """Return a pair as it is typed, or what stands for it."""
    texts = []
    for name, value in pair:
        if name in ("layout", "data"):
            texts.append(f"{name} {value}")
        elif name == "NANOTE_ENGINE":
            texts.append(f"{name}={value or 'unset'}")
        else:
            texts.append(config.as_typed(name, value))
    return " with ".join(texts)


# ---------------------------------------------------------------- the command

@dataclass
class Options:
    part: Literal["cpu", "gpu", "gpus"] = "cpu"  # cpu: te_reference; gpu: one GPU; gpus: two.
    jobs: int = 2  # Processes, or pairs of processes, at a time.
    folder: str | None = None  # Folder of token files, runs and logs; None: out/pairs-<part>, made anew.
    json: str | None = None  # Write the rows that were trained to this file, after each of them.
    list: bool = False  # Print the commands of the rows and of the refused pairs; train nothing.
    page: bool = False  # Write guide/pairs.md; train nothing.


def main(argv=None) -> int:
    options = parse(Options, argv, prog="bench/pairs.py", description=__doc__)
    if options.page:
        PAGE.write_text(pair_refusals.page(OPTIONS))
        return 0
    folder = Path(options.folder or ROOT / f"out/pairs-{options.part}").resolve()
    corpora = f"{folder}/corpora"
    rows = rows_of(options.part)
    refused = pair_refusals.refused_pairs() if options.part == "cpu" else []
    if options.list:
        for row in rows:
            print(row.command(corpora))
        for pair in refused:
            print(pair_refusals.command_of(pair, corpora))
        return 0

    shutil.rmtree(folder, ignore_errors=True)
    trained, failed = train_rows(rows, folder, options, sys.argv[1:] if argv is None else argv)
    for pair in refused:
        problem = pair_refusals.what_is_wrong(pair, corpora)
        if problem:
            failed += 1
            print(f"FAILED: {pair_refusals.command_of(pair, corpora)}\n    {problem}")
    parts = read_parts(Path(options.json) if options.json else JSON)
    parts.pop(options.part, None)
    for name, report in parts.items():
        if report["failed"]:
            failed += report["failed"]
            print(f"FAILED: {report['failed']} rows of --part {name}, on {report['date']}")
    text, missing = summarize(options.part, trained, parts)
    print(f"{text}\nfailed: {failed}")
    if options.part == "cpu" and missing:  # a GPU's part has only its own rows
        return 1
    return 1 if failed else 0


def train_rows(rows: list[Row], folder: Path, options: Options, argv: list) -> tuple[dict, int]:
    """Train the rows of a part and print the outcome of each -> ({stack: choices that are right}, failed)."""
    trained = {stack: [] for stack in STACKS}
    failed = 0
    for number, (row, result, plain_result) in enumerate(train_in_groups(rows, folder, options.jobs), 1):
        problems = problems_of(row, result, plain_result)
        if problems:
            failed += 1
        else:
            trained[row.stack].append(row.choice)
        state = "FAILED" if problems else "trained"
        print("\n    ".join([f"{number}/{len(rows)} {state}: {result['name']}", *problems]), flush=True)
        if options.json:
            write_part(Path(options.json), options.part, trained, failed, argv)
    return trained, failed


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/pairs.py"))
