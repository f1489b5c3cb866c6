"""Test which shapes run in FP8: token counts, widths and vocabularies, by recipe.

    python test_shapes.py [--json FILE]   # a table: shape, recipe, forward, training, configuration
    pytest test_shapes.py                 # what the configuration accepts trains, and what it refuses fails

On a GPU the rules are Transformer Engine's, elsewhere those of te_reference. Each shape goes through the
GEMMs of a GPT without its checks. "Forward" is a pass without gradients, "training" one with its backward
pass. The configuration is stricter than TE in one place, on purpose: a vocabulary must be a multiple of 32,
where TE trains with any multiple of 16. It is one rule for every recipe, and padding costs little.
"""

if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["NANOTE_ENGINE"] = "reference"  # before the kit's modules choose
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench.report import check_output, write_report
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote import recipes
from nanote.command import parse, run_command
from nanote.config import TrainConfig
from nanote.recipes import te

pytestmark = [pytest.mark.gpu] if HAS_GPU else []  # on a GPU these are tests of Transformer Engine
DEVICE = "cuda" if HAS_GPU else "cpu"
RECIPES = ("delayed", "current", "block", "mxfp8")
# (micro-batch, sequence length, width, vocabulary); (7, 24) is what the last batch of an epoch may be
BATCHES = (
    (1, 1), (1, 4), (1, 8), (1, 12), (1, 16), (1, 24), (1, 32), (1, 48), (2, 7), (2, 8), (2, 16), (1, 64),
    (3, 64), (5, 48), (7, 24), (7, 32), (3, 1000), (4, 1000), (1, 1023), (1, 1024))
WIDTHS = (8, 16, 24, 32, 40, 48, 72, 80, 96, 120, 128)
VOCABULARIES = (17, 24, 32, 48, 64, 72, 80, 88, 96, 256, 257, 272, 288, 50257, 50264, 50272, 50304)
WITH_VOCABULARIES = [(2, 32, 64, vocabulary) for vocabulary in VOCABULARIES]
SHAPES = [(batch, length, 64, 96) for batch, length in BATCHES]
SHAPES += [(2, 32, width, 96) for width in WIDTHS]
SHAPES += WITH_VOCABULARIES
SHAPES = list(dict.fromkeys(SHAPES))  # each once


def make_config(shape):
    """Return the configuration of a model of one layer; ValueError if it refuses the shape."""
    _, length, width, vocab = shape
    return OptimizedConfig(
        vocab_size=vocab, n_positions=length, n_embd=width, n_layer=1, n_head=1, use_fp8=True)


def refusal(recipe, shape, training):
    """Return what the checks say against a shape, in one line; "" if they accept it."""
    batch, length, *_ = shape
    try:
        config = make_config(shape)
        if training:
            recipes.check_shapes(config, batch, length, recipe)
    except ValueError as error:
        return str(error)
    if not training and batch * length % 8:
        return f"{batch * length} tokens"
    return ""


def run_model(model, inputs, recipe, training):
    """Run forward and, for training, backward under autocast -> the loss."""
    bf16 = torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_GPU)
    with torch.set_grad_enabled(training):
        with bf16, te.autocast(enabled=True, recipe=recipe):
            loss = model(*inputs).float().square().mean()
        if training:
            loss.backward()
    return loss.item()  # waits for the GPU


def failure(recipe, shape, training):
    """Run a shape without checks: return the error in one line, "" if it works."""
    batch, length, width, vocab = shape
    torch.manual_seed(0)
    try:
        modules = torch.nn.Sequential(
            te.LayerNormLinear(width, 3 * width), te.Linear(3 * width, width),
            te.LayerNormMLP(width, 4 * width), te.LayerNormLinear(width, vocab, bias=False)).to(DEVICE)
        inputs = [torch.randn(batch, length, width, device=DEVICE)]
        run_model(modules, inputs, recipes.make(TrainConfig(fp8_recipe=recipe)), training)
    except (ValueError, RuntimeError, AssertionError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def measure_row(recipe, shape):
    batch, length, width, vocabulary = shape
    return {
        "micro_batch": batch, "sequence": length, "width": width, "vocab": vocabulary, "recipe": recipe,
        "forward": failure(recipe, shape, training=False) or "works",
        "training": failure(recipe, shape, training=True) or "works",
        "configuration": refusal(recipe, shape, training=True) or "accepts"}


def text_of(row):
    """Return a line of the printed table."""
    forward = "works" if row["forward"] == "works" else "fails"
    training = "works" if row["training"] == "works" else "fails"
    configuration = "accepts" if row["configuration"] == "accepts" else "refuses"
    return (f"{row['micro_batch']:>7} x {row['sequence']:<6} {row['width']:>6} {row['vocab']:>6}  "
            f"{row['recipe']:8} {forward:8} {training:9} {configuration}  {row['training'][:120]}")


@dataclass
class Options:
    json: Path | None = None  # Write the table here.


def main(argv=None):
    options = parse(Options, argv, "test_shapes.py", __doc__)
    check_output(options.json)
    print(f"{recipes.describe()}\n batch x sequence  width  vocab  recipe   forward  training  configuration")
    can_run = [name for name in RECIPES if not recipes.unsupported_reason(name)]
    rows = []
    for shape, recipe in itertools.product(SHAPES, can_run):
        row = measure_row(recipe, shape)
        rows.append(row)
        print(text_of(row), flush=True)
    write_report("test_shapes.py", argv, {"rows": rows}, options.json)


# ---------------------------------------------------------------- under pytest

@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if HAS_GPU or max(shape) < 1000], ids=str)
def test_what_is_accepted_trains_and_what_is_refused_fails(recipe, shape):
    if reason := recipes.unsupported_reason(recipe):
        pytest.skip(reason)
    refused = refusal(recipe, shape, training=True)
    failed = failure(recipe, shape, training=True)
    _, _, _, vocabulary = shape
    if recipe != "mxfp8" and vocabulary % 32 == 16:  # only the model's own rule refuses it
        assert "vocab_size" in refused
        assert not failed
    else:
        assert bool(refused) == bool(failed), f"the configuration says {refused!r}, training {failed!r}"
    if recipe != "mxfp8" and shape not in WITH_VOCABULARIES:
        refused_forward = refusal(recipe, shape, training=False)
        assert bool(refused_forward) == bool(failure(recipe, shape, training=False))
    if not refused:
        assert_model_trains(recipe, shape)


def assert_model_trains(recipe, shape):
    batch, length, _, _ = shape
    model = OptimizedGPT2Model(make_config(shape)).to(DEVICE)
    model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe=recipe))
    tokens = torch.zeros(batch, length, dtype=torch.int64, device=DEVICE)
    square_of_loss = run_model(model, [tokens, tokens], model.fp8_recipe, training=True)
    assert 0 < square_of_loss < 20**2


@pytest.mark.parametrize("shape, advice, advised", [
    ((3, 100, 64, 96), "--micro-batch-size 4 works", (4, 100, 64, 96)),
    ((2, 32, 40, 96), "; 48 works", (2, 32, 48, 96)),
    ((2, 32, 64, 50257), "50304 works", (2, 32, 64, 50304))])
def test_every_refusal_names_a_shape_that_trains(shape, advice, advised):
    assert advice in refusal("delayed", shape, True)
    assert not refusal("delayed", advised, True) and not failure("delayed", advised, True)


if __name__ == "__main__":
    sys.exit(run_command(main, "test_shapes.py"))
