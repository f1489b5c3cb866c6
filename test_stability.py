"""What throws FP8 training off, and what brings it back: recipe x format x margin x amax history x algorithm
x disturbance.

    python test_stability.py --json FILE --png FILE # the whole table: minutes, on a CPU through te_reference,
    on a GPU through TE python test_stability.py --quick # format hybrid and margin 0 only python
    test_stability.py --model te --sizes 2x128 12x768 --disturbances none # is te.TransformerLayer stable at
    all? pytest test_stability.py # what must hold, in seconds

Each row trains a small byte-level GPT on the Python standard library's sources: undisturbed up to 40 % of the
steps, and from there on once for each disturbance, from the same weights, optimizer and FP8 state, on the
same batches. In a cell: how many steps until the loss is back for good within 5 % of the undisturbed run's,
and how far the last tenth's mean loss is from high precision's (BF16 on a GPU, float32 on a CPU) after the
same disturbance. The disturbances:

- none      nothing, to the end.
- outlier one token a sequence x1000, for one step, where each block's attention output enters its projection.
  (At the embedding it would
            hardly reach FP8: other products' inputs come out of a norm, which divides it away.) "outlier 1e6"
            is the same x1,000,000.
- zeros     a batch of nothing: both embeddings give zeros and all gradients are zero, for one step.
- weight    the largest weight of each block's attention projection x1000, for one step, then put back.
- lr        ten times the learning rate, for 20 steps.
- loss up from here on the loss x2^15, its gradients divided again before the optimizer, as in FP16 training;
  loss down: x2^-15.

History 1 stands for `most_recent` too: that takes the newest row of a history of any length, so the numbers
are the same (a test says so).
"""

import copy
import json
import multiprocessing
import os
import re
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # before the kit's modules choose; processes started from here see it too
    os.environ["NANOTE_REFERENCE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import stability_report as report  # noqa: E402
from bench.stability_report import Setting  # noqa: E402
from model_te import TEConfig, TEGPT2Model  # noqa: E402
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model  # noqa: E402
from nanote import cli, documents, fp8  # noqa: E402

# on a GPU these are tests of Transformer Engine: `make test-gpu`
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
DEVICE = "cuda" if HAS_GPU else "cpu"
DISTURBANCES = ("none", "outlier", "outlier 1e6", "zeros", "weight", "lr", "loss up", "loss down")
FP8_RECIPES = ("delayed", "current", "block", "mxfp8")
MODELS = {"optimized": (OptimizedConfig, OptimizedGPT2Model), "te": (TEConfig, TEGPT2Model)}


class Run:
    """A model in training whose steps can be disturbed, and that can go back to where it was."""

    def __init__(self, setting, steps, seed=0, lr=2e-3):
        self.steps, self.lr = steps, lr
        layers, width = map(int, setting.size.split("x"))
        self.batch_size, self.seq_len = (8, 256) if HAS_GPU else (4, 64)
        config_class, model_class = MODELS[setting.model]
        fp8.forget_models()
        torch.manual_seed(seed)
        config = config_class(vocab_size=288, n_positions=self.seq_len, n_embd=width, n_layer=layers,
                              n_head=width // (32 if width < 256 else 64), use_fp8=setting.recipe != "none")
        self.model = model_class(config).to(DEVICE)
        if setting.recipe != "none":
            self.model.fp8_recipe = fp8.make_recipe(
                setting.recipe, setting.format, setting.history, setting.algo, setting.margin
            )
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        # as train.py: delayed scaling starts with every scale at 1, which would flush the first gradients to
        # zero
        self.loss(0).backward()
        self.optimizer.zero_grad()

    def loss(self, step):
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(corpus()) - self.seq_len - 1, (self.batch_size, 1), generator=random)
        windows = corpus()[starts + torch.arange(self.seq_len + 1)].long().to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_GPU):
            return self.model(windows[:, :-1], windows[:, 1:].contiguous())

    def train(self, start, stop, disturbance="none", at=0):
        """Steps start … stop - 1, disturbed from step `at` on -> their losses, float32 (stop - start,)."""
        losses = []
        for step in range(start, stop):
            age = step - at  # of the disturbance
            lr_factor = 10 if disturbance == "lr" and 0 <= age < 20 else 1
            scale = 2.0 ** {"loss up": 15, "loss down": -15}.get(disturbance, 0) if age >= 0 else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * lr_factor * min(1, (step + 1) / (0.1 * self.steps))
            with disturbed(self.model, disturbance) if age == 0 else nullcontext():
                loss = self.loss(step)
                (loss * (0.0 if disturbance == "zeros" and age == 0 else scale)).backward()
                if scale != 1:
                    torch._foreach_mul_([p.grad for p in self.parameters], 1 / scale)
                torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).float().cpu()

    def save(self):
        return (
            [p.detach().clone() for p in self.parameters], copy.deepcopy(self.optimizer.state_dict()),
            fp8.get_state(self.model),
        )

    def restore(self, saved):
        parameters, optimizer, scales = saved
        torch._foreach_copy_([p.detach() for p in self.parameters], parameters)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        fp8.set_state(self.model, scales)


@contextmanager
def disturbed(model, disturbance):
    """The model, for one step, with what the disturbance changes in it (see the top of the file)."""
    projections = [module for name, module in model.named_modules() if name.endswith(".proj")]

    def outlier(module, args):
        factor = torch.ones_like(args[0])
        factor[:, 0] = 1e6 if disturbance == "outlier 1e6" else 1e3
        return (args[0] * factor, *args[1:])

    undo = []
    if disturbance.startswith("outlier"):
        undo = [module.register_forward_pre_hook(outlier).remove for module in projections]
    elif disturbance == "zeros":
        undo = [
            module.register_forward_hook(lambda module, args, output: output * 0).remove
            for module in (model.wte, model.wpe)
        ]
    elif disturbance == "weight":
        weights = [module.weight.detach().view(-1) for module in projections]
        largest = [weight.narrow(0, int(weight.abs().argmax()), 1) for weight in weights]
        spikes = [999 * value for value in largest]
        torch._foreach_add_(largest, spikes)
        undo = [lambda: torch._foreach_sub_(largest, spikes)]
    yield
    for call in undo:
        call()


@lru_cache
def corpus():
    """The first 200 files of the standard library, uint8 (n,)."""
    text = "".join(islice(documents.stdlib_documents()[0], 200))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def run_row(work):
    """(setting, steps, disturbances, seed, lr) -> (setting, {disturbance: losses of all steps, a list},
    seconds)."""
    setting, steps, disturbances, seed, lr = work
    start, at = time.time(), steps * 2 // 5
    if not HAS_GPU:
        torch.set_num_threads(1)  # at this size a second thread is worth less than a second row
    run = Run(setting, steps, seed, lr)
    before, saved, losses = run.train(0, at), run.save(), {}
    for disturbance in disturbances:
        run.restore(saved)
        losses[disturbance] = torch.cat((before, run.train(at, steps, disturbance, at))).tolist()
    return setting, losses, time.time() - start


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


def settings_of(options):
    """The rows: for each size high precision first, then every distinct setting. ValueError for what cannot
    be."""
    choices = (
        ("recipes", options.recipes, FP8_RECIPES), ("disturbances", options.disturbances, DISTURBANCES),
        ("model", [options.model], MODELS),
    )
    for name, given, known in choices:
        for unknown in set(given) - set(known):
            raise ValueError(f"--{name} {unknown!r} is unknown; use {', '.join(map(repr, known))}")
    for name, value, least in (
        ("steps", options.steps, 20), ("jobs", options.jobs, 1),
        ("margins", min(options.margins, default=0), 0),
    ):
        if value < least:
            raise ValueError(f"--{name} {value}: must be {least} or more; {least + 1} works")
    rows = []
    for size in options.sizes:
        if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", size) or int(size.split("x")[1]) % 64:
            raise ValueError(
                f"--sizes {size!r}: must be layers x width, the width a multiple of 64; 2x64 works"
            )
        rows.append(Setting(model=options.model, size=size))
        for recipe, format in product(
            options.recipes, options.formats[:1] if options.quick else options.formats
        ):
            margins, histories = (
                (options.margins, options.histories) if recipe == "delayed" else ((0,), (1024,))
            )
            for margin, history in product(margins[:1] if options.quick else margins, histories):
                # ValueError now rather than from a row
                fp8.make_recipe(recipe, format, history, "max", margin)
                rows.append(Setting(recipe, format, margin, history, "max", options.model, size))
    return rows


def main(argv=None):
    options = cli.parse(
        Options, argv, prog="test_stability.py", description=__doc__.partition("\n\nEach row")[0]
    )
    rows = settings_of(options)
    report.check_folder(options.json, options.png)
    names = ["none", *(d for d in DISTURBANCES if d in options.disturbances and d != "none")]
    at = options.steps * 2 // 5
    print(
        f"{fp8.describe()}: {len(rows)} rows x {len(names)} disturbances, {options.steps} steps each, disturbed from step {at}"
    )
    print(" " * 46 + "".join(f"{name:>15}" for name in names))
    start, cells, baseline = time.time(), [], None
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(rows))) as pool:
        for setting, losses, seconds in pool.imap(
            run_row, [(row, options.steps, names, options.seed, options.lr) for row in rows]
        ):
            baseline = losses if setting.recipe == "none" else baseline
            cells += (found := [report.cell(setting, name, losses, baseline) for name in names])
            print(
                f"{str(setting):46}{''.join(f'{report.text_of(c):>15}' for c in found)}  {seconds / len(names):.1f} s a cell",
                flush=True,
            )
            figures = {
                "seconds": round(time.time() - start), "steps": options.steps, "disturbed_from_step": at,
                "lr": options.lr, "cells": cells,
            }
            # after every row: what is done is kept if the run is cut short
            report.write("test_stability.py", argv, figures, options.json)
    report.write("test_stability.py", argv, figures, None, options.png)


def losses_of(disturbances=("none",), steps=40, **setting):
    return {
        name: torch.tensor(losses)
        for name, losses in run_row((Setting(**setting), steps, disturbances, 0, 2e-3))[1].items()
    }


high_precision = lru_cache(lambda: report.final(losses_of()["none"]))
can_run = {
    name: pytest.mark.skipif(bool(fp8.unsupported_reason(name)),
                             reason=fp8.unsupported_reason(name) or "runs")
    for name in FP8_RECIPES
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recipe, format, margin", [
    *(("delayed", format, margin) for format in ("hybrid", "e4m3") for margin in (0, 1, 2)),
    *(pytest.param(name, "e4m3", 0, marks=can_run[name]) for name in ("current", "block", "mxfp8"))])
def test_undisturbed_training_is_as_good_as_high_precision(model, recipe, format, margin):
    losses = losses_of(recipe=recipe, format=format, margin=margin, model=model)["none"]
    assert losses.isfinite().all() and losses[0] > 5
    assert report.final(losses) < 1.05 * high_precision()


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=can_run[name]) for name in FP8_RECIPES])
def test_every_disturbance_leaves_the_loss_finite(recipe):
    assert all(
        losses.isfinite().all()
        for losses in losses_of(DISTURBANCES, 25, recipe=recipe, format="e4m3").values()
    )


def test_history_1_is_most_recent_of_any_length():
    ours, theirs = (
        losses_of(recipe="delayed", history=1)["none"],
        losses_of(recipe="delayed", algo="most_recent")["none"],
    )
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
    # [0]: of the input
    ratios = [
        (before[name][0] / now[name][0]).item() for name in before if name.endswith("proj.scaling_fwd.scale")
    ]
    assert len(ratios) == 2 and all(ratio < 10 if forgotten else ratio > 300 for ratio in ratios)


def test_recovery_from_a_huge_outlier_takes_no_longer_with_most_recent():
    losses = [
        losses_of(("none", "outlier 1e6"), 80, recipe="delayed", history=history) for history in (1, 1024)
    ]
    recent, longest = (report.recovered_after(each["outlier 1e6"], each["none"], 32) for each in losses)
    assert recent is not None and (longest is None or recent <= longest)


def test_a_batch_of_nothing_keeps_the_gradients_scales():
    before, now = one_step("zeros", 0, algo="most_recent")
    names = [name for name in before if "scaling_bwd" in name]
    assert names and all(torch.equal(before[name], now[name]) for name in names)


def test_the_script_writes_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(
        "--steps 20 --recipes current --formats hybrid --disturbances outlier --sizes 1x64 --jobs 1 --json t.json --png t.png".split()
    )
    cells = json.loads(Path("t.json").read_text())["cells"]
    assert [(c["recipe"], c["disturbance"]) for c in cells] == [
        *product(("none", "current"), ("none", "outlier"))
    ]
    assert (
        all(c["finite"] for c in cells)
        and Path("t.png").stat().st_size > 5000
        and "current hybrid" in capsys.readouterr().out
    )


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
