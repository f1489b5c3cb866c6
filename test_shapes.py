"""Test which shapes run in FP8: token counts, widths and vocabularies, by recipe.

    python test_shapes.py [--json FILE]   # a table: shape, recipe, forward, training, configuration
    pytest test_shapes.py                 # what the configuration accepts trains, and what it refuses fails

On a GPU the rules are Transformer Engine's, elsewhere those of te_reference.

Each shape goes through the GEMMs of a GPT without its checks: norm and linear, linear, norm and MLP, norm and
output head. "Forward" is a pass without gradients, "training" one with its backward pass. The number of
tokens is micro-batch times sequence length.

The configuration is stricter than TE in one place, on purpose: a vocabulary must be a multiple of 32, where
TE trains with any multiple of 16 (MXFP8: 32). It is one rule for every recipe, and padding to 32 costs a
tokenizer's vocabulary next to nothing.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["NANOTE_REFERENCE"] = "1"  # before the kit's modules choose
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench.fp8_shapes import RECIPES, SHAPES, TOKENS, WIDTHS, failure, refusal, train_model
from bench.report import check_folder, write_report
from nanote import cli, fp8

# on a GPU these are tests of Transformer Engine: `make test-gpu`
pytestmark = [pytest.mark.gpu] if HAS_GPU else []


# ---------------------------------------------------------------- under pytest

def can_run(recipe):
    if fp8.unsupported_reason(recipe):
        pytest.skip(fp8.unsupported_reason(recipe))


def only_our_rule(recipe, vocab):
    """Return whether only the model's rule refuses this: a vocabulary of 16s that are no 32s."""
    return recipe != "mxfp8" and vocab % 32 == 16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_accepted_trains_and_what_is_refused_fails(recipe, shape):
    can_run(recipe)
    refused, failed = refusal(recipe, shape, training=True), failure(recipe, shape, training=True)
    if refused and only_our_rule(recipe, shape[3]):
        assert "vocab_size" in refused and not failed
    else:
        assert bool(refused) == bool(failed), f"the configuration says {refused!r}, training {failed!r}"
    if not refused:
        loss, norm = train_model(recipe, shape)
        assert 0 < loss < 20 and 0 < norm < 1000


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("shape", [*TOKENS, *WIDTHS], ids=str)
def test_a_forward_pass_needs_a_multiple_of_8_tokens(recipe, shape):
    can_run(recipe)
    refused, failed = refusal(recipe, shape, training=False), failure(recipe, shape, training=False)
    assert bool(refused) == bool(failed), f"the configuration says {refused!r}, a forward pass {failed!r}"


@pytest.mark.parametrize("shape, advice, advised", [
    ((3, 100, 64, 96), "--micro-batch-size 4 works", (4, 100, 64, 96)),
    ((2, 32, 40, 96), "; 48 works", (2, 32, 48, 96)),
    ((2, 32, 64, 50257), "50257 → 50304", (2, 32, 64, 50304))])
def test_every_refusal_names_a_shape_that_trains(shape, advice, advised):
    assert advice in refusal("delayed", shape, training=True)
    assert not refusal("delayed", advised, training=True)
    assert not failure("delayed", advised, training=True)


# ---------------------------------------------------------------- as a script

@dataclass
class Options:
    json: Path | None = None  # Write the table here.


def measure_row(recipe, shape):
    fields = dict(zip(("micro_batch", "sequence", "width", "vocab"), shape))
    return fields | {
        "recipe": recipe,
        "forward": failure(recipe, shape, training=False) or "works",
        "training": failure(recipe, shape, training=True) or "works",
        "configuration": refusal(recipe, shape, training=True) or "accepts",
    }


def text_of(row):
    """Return a line of the printed table."""
    size = f"{row['micro_batch']} x {row['sequence']}"
    forward, training = ("works" if row[key] == "works" else "fails" for key in ("forward", "training"))
    configuration = "accepts" if row["configuration"] == "accepts" else "refuses"
    error = next((row[key] for key in ("forward", "training") if row[key] != "works"), "")
    return (f"{size:>17} {row['width']:>6} {row['vocab']:>6}  {row['recipe']:8} {forward:8} {training:9} "
            f"{configuration}  {error[:120]}")


def main(argv=None):
    description = __doc__.partition("\n\nEach shape")[0]
    options = cli.parse(Options, argv, prog="test_shapes.py", description=description)
    check_folder(options.json)
    print(f"{fp8.describe()}\n{'batch x sequence':>17} {'width':>6} {'vocab':>6}  {'recipe':8} {'forward':8} "
          f"{'training':9} configuration")
    rows, recipes = [], [recipe for recipe in RECIPES if not fp8.unsupported_reason(recipe)]
    for shape in SHAPES:
        for recipe in recipes:
            rows.append(measure_row(recipe, shape))
            print(text_of(rows[-1]), flush=True)
    write_report("test_shapes.py", argv, {"rows": rows}, options.json)


if __name__ == "__main__":
    sys.exit(cli.run(main, "test_shapes.py"))
