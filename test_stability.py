"""Test what disturbs FP8 training and what lets it recover, by recipe, format, margin, amax history,
algorithm and disturbance.

    python test_stability.py --json FILE --png FILE   # the whole table, in minutes
    python test_stability.py --quick                  # format hybrid and margin 0 only
    python test_stability.py --model te --sizes 2x128 12x768 --disturbances none    # te.TransformerLayer
    pytest test_stability.py                          # what must hold, in seconds

Each row trains a small byte-level GPT on the Python standard library's sources: undisturbed up to 40 % of the
steps, and from there once per disturbance, from the same weights, optimizer and FP8 state, on the same
batches. In a cell: how many steps until the loss is back for good within 5 % of the undisturbed run's, and
how far the last tenth's mean loss is from high precision's (BF16 on a GPU, float32 on a CPU) after the same
disturbance. The disturbances:

- none      nothing, to the end.
- outlier   one token of a sequence x1000, for one step, where each block's attention output enters its
            projection. (At the embedding it would hardly reach FP8: the inputs of the other GEMMs come out of
            a norm, which divides it away.) "outlier 1e6" is the same x1,000,000.
- zeros     a batch of zeros: both embeddings return zeros and all gradients are zero, for one step.
- weight    the largest weight of each block's attention projection x1000, for one step, then put back.
- lr        ten times the learning rate, for 20 steps.
- loss up   from here on, the loss is scaled by 2^15 and its gradients are divided by as much before the
            optimizer, as in FP16 training; loss down: by 2^-15.

History 1 stands for `most_recent` too: that uses the newest row of a history of any length, so the numbers
are the same (a test says so).
"""

import json
import multiprocessing
import os
import re
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # before the kit's modules choose; processes that are started from here inherit it
    os.environ["NANOTE_REFERENCE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import stability_report as report
from bench.report import check_folder, write_report
from bench.stability import DISTURBANCES, FP8_RECIPES, MODELS, Run, run_row
from bench.stability_report import Setting, disturbed_from
from nanote import cli, fp8

# on a GPU these are tests of Transformer Engine: `make test-gpu`
pytestmark = [pytest.mark.gpu] if HAS_GPU else []


# ---------------------------------------------------------------- as a script

@dataclass
class Options:
    steps: int = 500 if HAS_GPU else 150  # Of each cell.
    recipes: tuple[str, ...] = tuple(name for name in FP8_RECIPES if not fp8.unsupported_reason(name))
    """By default all that this machine can run."""
    formats: tuple[str, ...] = ("hybrid", "e4m3")
    margins: tuple[int, ...] = (0, 1, 2)
    histories: tuple[int, ...] = (1, 16, 1024)  # With the algorithm max; 1 is most_recent, too.
    disturbances: tuple[str, ...] = DISTURBANCES  # "none" is always among them.
    model: str = "optimized"  # optimized or te (te.TransformerLayer).
    sizes: tuple[str, ...] = ("4x256",) if HAS_GPU else ("2x64",)  # Layers x width.
    lr: float = 1e-3 if HAS_GPU else 2e-3
    seed: int = 0
    quick: bool = False  # The first format and margin 0 only.
    jobs: int = 4 if HAS_GPU else 2  # Rows at a time, each a process.
    json: Path | None = None  # Write the figures here.
    png: Path | None = None  # Draw them here.


def check_options(options):
    choices = (("recipes", options.recipes, FP8_RECIPES), ("model", [options.model], MODELS),
               ("disturbances", options.disturbances, DISTURBANCES))
    for name, given, known in choices:
        for unknown in set(given) - set(known):
            raise ValueError(f"--{name} {unknown!r} is unknown; use {', '.join(map(repr, known))}")
    least_values = (("steps", options.steps, 20), ("jobs", options.jobs, 1),
                    ("margins", min(options.margins, default=0), 0))
    for name, value, least in least_values:
        if value < least:
            raise ValueError(f"--{name} {value}: must be {least} or more; {least + 1} works")
    for size in options.sizes:
        if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", size) or int(size.split("x")[1]) % 64:
            raise ValueError(f"--sizes {size!r}: must be layers x width, the width a multiple of 64; "
                             "2x64 works")


def settings_of(options):
    """Return the rows: for each size high precision first, then every distinct setting.

    Raises ValueError for options that no row can run with.
    """
    check_options(options)
    formats = options.formats[:1] if options.quick else options.formats
    rows = []
    for size in options.sizes:
        rows.append(Setting(model=options.model, size=size))
        for recipe, format in product(options.recipes, formats):
            margins, histories = (0,), (1024,)
            if recipe == "delayed":
                margins, histories = options.margins, options.histories
            for margin, history in product(margins[:1] if options.quick else margins, histories):
                fp8.make_recipe(recipe, format, history, "max", margin)  # ValueError now, not in a process
                rows.append(Setting(recipe, format, margin, history, "max", options.model, size))
    return rows


def main(argv=None):
    description = __doc__.partition("\n\nEach row")[0]
    options = cli.parse(Options, argv, prog="test_stability.py", description=description)
    rows = settings_of(options)
    check_folder(options.json, options.png)
    names = ["none", *(d for d in DISTURBANCES if d in options.disturbances and d != "none")]
    at = disturbed_from(options.steps)
    print(f"{fp8.describe()}: {len(rows)} rows x {len(names)} disturbances, {options.steps} steps each, "
          f"disturbed from step {at}")
    print(" " * 46 + "".join(f"{name:>15}" for name in names))
    start, cells, baseline = time.time(), [], None
    work = [(row, options.steps, names, options.seed, options.lr) for row in rows]
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(rows))) as pool:
        for setting, losses, seconds in pool.imap(run_row, work):
            baseline = losses if setting.recipe == "none" else baseline
            found = [report.cell_figures(setting, name, losses, baseline) for name in names]
            cells += found
            text = "".join(f"{report.cell_text(cell):>15}" for cell in found)
            print(f"{str(setting):46}{text}  {seconds / len(names):.1f} s a cell", flush=True)
            figures = {
                "seconds": round(time.time() - start), "steps": options.steps, "disturbed_from_step": at,
                "lr": options.lr, "cells": cells,
            }
            # after every row, so that an interrupted run keeps what it measured
            result = write_report("test_stability.py", argv, figures, options.json)
    if options.png:
        report.plot(result, options.png)


# ---------------------------------------------------------------- under pytest

def losses_of(disturbances=("none",), steps=40, **setting):
    _, found, _ = run_row((Setting(**setting), steps, disturbances, 0, 2e-3))
    return {name: torch.tensor(losses) for name, losses in found.items()}


high_precision = lru_cache(lambda: report.final(losses_of()["none"]))
can_run = {
    name: pytest.mark.skipif(
        bool(fp8.unsupported_reason(name)), reason=fp8.unsupported_reason(name) or "runs"
    )
    for name in FP8_RECIPES
}


@pytest.mark.parametrize("recipe, format, margin, model", [
    *(("delayed", format, 0, model) for format in ("hybrid", "e4m3") for model in MODELS),
    *(("delayed", format, margin, "optimized") for format in ("hybrid", "e4m3") for margin in (1, 2)),
    *(pytest.param(name, "e4m3", 0, model, marks=can_run[name])
      for name in ("current", "block", "mxfp8") for model in MODELS)])
def test_undisturbed_training_is_as_good_as_high_precision(recipe, format, margin, model):
    losses = losses_of(recipe=recipe, format=format, margin=margin, model=model)["none"]
    assert losses.isfinite().all() and losses[0] > 5
    assert report.final(losses) < 1.05 * high_precision()


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=can_run[name]) for name in FP8_RECIPES])
def test_every_disturbance_leaves_the_loss_finite(recipe):
    found = losses_of(DISTURBANCES, 25, recipe=recipe, format="e4m3")
    assert all(losses.isfinite().all() for losses in found.values())


def test_history_1_is_most_recent_of_any_length():
    ours = losses_of(recipe="delayed", history=1)["none"]
    theirs = losses_of(recipe="delayed", algo="most_recent")["none"]
    # attention's backward pass on a GPU sums in any order
    torch.testing.assert_close(ours, theirs, rtol=0.02 if HAS_GPU else 0, atol=0)


def one_step(disturbance, after, **setting):
    """Train, disturb a step, train `after` more -> (FP8 state before, FP8 state after)."""
    run = Run(Setting("delayed", **setting), steps=60)
    run.train(0, 20)
    before = fp8.get_state(run.model)
    run.train(20, 21 + after, disturbance, at=20)
    return before, fp8.get_state(run.model)


@pytest.mark.parametrize("algo, history, after, forgotten", [
    ("most_recent", 1024, 2, True), ("max", 16, 18, True), ("max", 1024, 18, False)])
def test_an_outlier_is_forgotten_when_the_history_ends(algo, history, after, forgotten):
    before, now = one_step("outlier", after, algo=algo, history=history)
    names = [name for name in before if name.endswith("proj.scaling_fwd.scale")]
    ratios = [(before[name][0] / now[name][0]).item() for name in names]  # [0]: the scale of the input
    assert len(ratios) == 2 and all(ratio < 10 if forgotten else ratio > 300 for ratio in ratios)


def test_recovery_from_a_huge_outlier_takes_a_few_steps_with_a_short_history():
    losses = losses_of(("none", "outlier 1e6"), 80, recipe="delayed", history=1)
    recovered = report.recovered_after(losses["outlier 1e6"], losses["none"], 32)
    assert recovered is not None and recovered <= 8


def test_a_batch_of_zeros_keeps_the_gradients_scales():
    before, now = one_step("zeros", 0, algo="most_recent")
    names = [name for name in before if "scaling_bwd" in name]
    assert names and all(torch.equal(before[name], now[name]) for name in names)


def test_the_script_writes_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main("--steps 20 --recipes current --formats hybrid --disturbances outlier --sizes 1x64 --jobs 1 "
         "--json t.json --png t.png".split())
    cells = json.loads(Path("t.json").read_text())["cells"]
    assert [(c["recipe"], c["disturbance"]) for c in cells] == [
        *product(("none", "current"), ("none", "outlier"))
    ]
    assert all(c["finite"] for c in cells) and Path("t.png").stat().st_size > 5000
    assert "current hybrid" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--sizes 2by64", "2x64 works"), ("--recipes int8", "delayed"), ("--disturbances quake", "outlier"),
        ("--steps 3", "20 or more"), ("--formats e5m2", "hybrid"), ("--json none/x.json", "no folder none"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    with pytest.raises((ValueError, OSError), match=words) as error:
        main(arguments.split())
    assert "\n" not in str(error.value)


if __name__ == "__main__":
    sys.exit(cli.run(main, "test_stability.py"))
