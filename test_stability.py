"""Test what disturbs FP8 training and what lets it recover, by recipe, format, margin and amax history.

    python test_stability.py --json FILE   # the whole table, in minutes
    python test_stability.py --quick       # format hybrid and margin 0 only
    pytest test_stability.py               # what must hold, in seconds

Each row trains a small byte-level GPT on the Python standard library's sources: undisturbed up to 40 % of the
steps, and from there once per disturbance, from the same weights, optimizer and FP8 state, on the same
batches. In a cell: how many steps until the loss is back for good within 5 % of the undisturbed run's, and
how far the last tenth's mean loss is from high precision's (BF16 on a GPU, float32 on a CPU) after the same
disturbance. The disturbances:

- outlier   one token of a sequence x1000, for one step, where each block's attention output enters its
            projection (the inputs of the other GEMMs come out of a norm). "outlier 1e6": x1,000,000.
- zeros     a batch of zeros: both embeddings return zeros and all gradients are zero, for one step.
- weight    the largest weight of each block's attention projection x1000, for one step, then put back.
- lr        ten times the learning rate, for 20 steps.
- loss up   from here on, the loss is scaled by 2^15 and its gradients are divided by as much before the
            optimizer, as in FP16 training; loss down: by 2^-15.

History 1 is the algorithm `most_recent`, too.
"""

if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["NANOTE_ENGINE"] = "reference"  # before the kit's modules choose; processes inherit it
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import stability
from bench.report import check_output, write_report
from bench.stability import Run, Setting, recovered_after, run_row, settings_of
from nanote import recipes
from nanote.command import parse, run_command

pytestmark = [pytest.mark.gpu] if HAS_GPU else []  # on a GPU these are tests of Transformer Engine

CAN_RUN = tuple(name for name in stability.FP8_RECIPES if not recipes.unsupported_reason(name))


@dataclass
class Options:
    steps: int = 500 if HAS_GPU else 150  # Of each cell.
    recipes: tuple[Literal[stability.FP8_RECIPES], ...] = CAN_RUN
    formats: tuple[Literal["hybrid", "e4m3"], ...] = ("hybrid", "e4m3")
    margins: tuple[int, ...] = (0, 1, 2)
    histories: tuple[int, ...] = (1, 16, 1024)  # With the algorithm max; 1 is most_recent, too.
    # "none" is always among them.
    disturbances: tuple[Literal[stability.DISTURBANCES], ...] = stability.DISTURBANCES
    model: Literal[tuple(stability.MODELS)] = "optimized"  # optimized or te (te.TransformerLayer).
    sizes: tuple[str, ...] = ("4x256",) if HAS_GPU else ("2x64",)  # Layers x width.
    lr: float = 1e-3 if HAS_GPU else 2e-3
    seed: int = 0
    quick: bool = False  # The first format and margin 0 only.
    jobs: int = 4 if HAS_GPU else 2  # Rows at a time, each a process.
    json: Path | None = None  # Write the figures here.


def main(argv=None):
    options = parse(Options, argv, "test_stability.py", __doc__)
    rows = settings_of(options)
    check_output(options.json)
    names = [name for name in stability.DISTURBANCES if name in (*options.disturbances, "none")]
    at = stability.disturbed_from(options.steps)
    titles = "".join(f"{name:>15}" for name in names)
    print(f"{recipes.describe()}: {len(rows)} rows x {len(names)} disturbances, {options.steps} steps each, "
          f"disturbed from step {at}\n{' ' * 46}{titles}")
    start = time.time()
    cells = []
    work = [(row, options.steps, names, options.seed, options.lr) for row in rows]
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(rows))) as pool:
        for setting, losses, seconds in pool.imap(run_row, work):
            if setting.recipe == "none":  # the first row of each size
                baseline = losses
            row = [stability.cell_figures(setting, name, losses, baseline) for name in names]
            cells += row
            text = "".join(f"{stability.cell_text(cell):>15}" for cell in row)
            print(f"{str(setting):46}{text}  {seconds / len(names):.1f} s a cell", flush=True)
            figures = {"seconds": round(time.time() - start), "steps": options.steps,
                       "disturbed_from_step": at, "lr": options.lr, "cells": cells}
            write_report("test_stability.py", argv, figures, options.json)  # after every row


# ---------------------------------------------------------------- under pytest

def losses_of(disturbances=("none",), steps=40 if HAS_GPU else 25, **setting):
    """Train a setting under disturbances; return {disturbance: losses}."""
    reason = recipes.unsupported_reason(setting.get("recipe", "none"))
    if reason:
        pytest.skip(reason)
    _, found, _ = run_row((Setting(**setting), steps, disturbances, 0, 2e-3))
    return {name: torch.tensor(losses) for name, losses in found.items()}


@lru_cache
def final_loss_of_high_precision():
    return stability.final(losses_of()["none"])


@pytest.mark.parametrize("recipe, format, margin, model", [
    ("delayed", "hybrid", 0, "optimized"), ("current", "e4m3", 0, "te"), ("block", "e4m3", 0, "optimized"),
    ("mxfp8", "e4m3", 0, "optimized")])
def test_fp8_trains_as_well_as_high_precision(recipe, format, margin, model):
    losses = losses_of(recipe=recipe, format=format, margin=margin, model=model)["none"]
    assert losses.isfinite().all()
    assert losses[0] > 5
    assert stability.final(losses) < 1.05 * final_loss_of_high_precision()


@pytest.mark.parametrize("recipe", stability.FP8_RECIPES)
def test_every_disturbance_leaves_the_loss_finite(recipe):
    steps = 25 if HAS_GPU else 12
    found = losses_of(stability.DISTURBANCES, steps, recipe=recipe, format="e4m3")
    for disturbance, losses in found.items():
        assert losses.isfinite().all(), disturbance


def states_around(disturbance, steps_after, **setting):
    """Train, disturb a step, train some more -> (FP8 state before the disturbance, FP8 state at the end)."""
    run = Run(Setting("delayed", **setting), steps=60)
    at = 20 if HAS_GPU else 6
    run.train(0, at)
    before = recipes.get_state(run.model)
    run.train(at, at + 1 + steps_after, disturbance, at=at)
    return before, recipes.get_state(run.model)


@pytest.mark.parametrize("algo, history, after, forgotten", [
    ("most_recent", 1024, 2, True), ("max", 16, 18, True), ("max", 1024, 18, False)])
def test_an_outlier_is_forgotten_when_the_history_ends(algo, history, after, forgotten):
    before, now = states_around("outlier", after, algo=algo, history=history)
    names = [name for name in before if name.endswith("proj.scaling_fwd.scale")]
    assert len(names) == 2
    for name in names:
        lowered = (before[name][0] / now[name][0]).item()  # [0]: the scale of the input
        if forgotten:
            assert lowered < 10
        else:
            assert lowered > 300


def test_a_short_history_recovers_from_an_outlier_in_steps():
    losses = losses_of(("none", "outlier 1e6"), steps=80, recipe="delayed", history=1)
    at = stability.disturbed_from(80)
    recovered = recovered_after(losses["outlier 1e6"], losses["none"], at)
    assert recovered is not None
    assert recovered <= 8


def test_a_batch_of_zeros_keeps_the_scales_of_gradients():
    before, now = states_around("zeros", 0, algo="most_recent")
    names = [name for name in before if "scaling_bwd" in name]
    assert names
    for name in names:
        assert torch.equal(before[name], now[name]), name


if __name__ == "__main__":
    sys.exit(run_command(main, "test_stability.py"))
