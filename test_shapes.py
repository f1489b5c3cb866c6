"""Which shapes FP8 takes: token counts, widths, vocabularies, by recipe. On a GPU as Transformer Engine
rules, else as te_reference does.

    python test_shapes.py [--json FILE] # a table: the shape, the recipe, forward, training, and what the
    configuration says pytest test_shapes.py # what the configuration takes trains, what it refuses fails,
    nothing in between

Each shape goes through the products of a GPT without its checks: norm and linear, linear, norm and MLP, norm
and output head. "Forward" is a pass without gradients, "training" one with its backward pass. Rows are
tokens, micro-batch times sequence.

The configuration is stricter than TE in one place, on purpose: a vocabulary must be a multiple of 32, where
TE trains with any multiple of 16 (MXFP8: 32). It is one rule for every recipe, and no tokenizer's vocabulary
is worse off.
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

from bench import stability_report as report  # noqa: E402
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model  # noqa: E402
from nanote import (
    cli,  # noqa: E402
    fp8,  # noqa: E402
)

# on a GPU these are tests of Transformer Engine: `make test-gpu`
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
DEVICE = "cuda" if HAS_GPU else "cpu"
RECIPES = ("delayed", "current", "block", "mxfp8")

# (micro-batch, sequence, width, vocabulary). Each list varies one thing.
TOKENS = [
    (batch, length, 64, 96)
    for batch, length in [
        (1, 1),
        (1, 4),
        (1, 8),
        (1, 12),
        (1, 16),
        (1, 24),
        (1, 32),
        (1, 48),
        (2, 7),
        (2, 8),
        (2, 16),
        (1, 64),
        (3, 64),
        (5, 48),
        (7, 24),
        # (7, 24) after batches of (8, 24): the last one of an epoch, partly filled
        (7, 32),
        (3, 1000),
        (4, 1000),
        (1, 1023),
        (1, 1024),
    ]
]
WIDTHS = [(2, 32, width, 96) for width in (8, 16, 24, 32, 40, 48, 72, 80, 96, 120, 128)]
VOCABULARIES = [
    (2, 32, 64, vocab)
    for vocab in (17, 24, 32, 48, 64, 72, 80, 88, 96, 256, 257, 272, 288, 50257, 50264, 50272, 50304)
]
SHAPES = list(dict.fromkeys(TOKENS + WIDTHS + VOCABULARIES))


def refusal(recipe, shape, training):
    """What the kit says against a shape before anything runs, in one line; "" where it takes it."""
    batch, length, width, vocab = shape
    try:
        config = OptimizedConfig(
            vocab_size=vocab, n_positions=length, n_embd=width, n_layer=1, n_head=1, use_fp8=True
        )
        if training:  # the trainer's check; a forward pass alone is checked by the model, for 8 tokens
            fp8.check_shapes(config, batch, length, recipe)
        elif batch * length % 8:
            raise ValueError(f"{batch * length} tokens")
    except ValueError as error:
        return str(error)
    return ""


def failure(recipe, shape, training):
    """What happens when the shape runs unchecked: the error's first line, or "" where it works."""
    batch, length, width, vocab = shape
    torch.manual_seed(0)
    te = fp8.te
    try:
        products = torch.nn.Sequential(
            te.LayerNormLinear(width, 3 * width), te.Linear(3 * width, width),
            te.LayerNormMLP(width, 4 * width), te.LayerNormLinear(width, vocab, bias=False),
        ).to(DEVICE)
        x = torch.randn(batch, length, width, device=DEVICE)
        with torch.set_grad_enabled(training):
            with (
                torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_GPU),
                te.autocast(enabled=True, recipe=fp8.make_recipe(recipe)),
            ):
                y = products(x)
            if training:
                y.float().square().mean().backward()
        if HAS_GPU:
            torch.cuda.synchronize()
    except (ValueError, RuntimeError, AssertionError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def train_model(recipe, shape):
    """One training step of the model itself -> (loss, gradient norm)."""
    batch, length, width, vocab = shape
    torch.manual_seed(0)
    config = OptimizedConfig(
        vocab_size=vocab, n_positions=length, n_embd=width, n_layer=1, n_head=1, use_fp8=True
    )
    model = OptimizedGPT2Model(config).to(DEVICE)
    model.fp8_recipe = fp8.make_recipe(recipe)
    tokens = torch.randint(vocab, (batch, length), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_GPU):
        loss = model(tokens, tokens)
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


# ----------------------------------------------------------------------------------------------------------------------
# Under pytest


def can_run(recipe):
    if fp8.unsupported_reason(recipe):
        pytest.skip(fp8.unsupported_reason(recipe))


def only_our_rule(recipe, vocab):
    """The one place where the configuration refuses what trains: a vocabulary that is a multiple of 16, but
    not of 32."""
    return recipe != "mxfp8" and vocab % 32 == 16


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_accepted_trains_and_what_is_refused_fails(recipe, shape):
    can_run(recipe)
    said, happened = refusal(recipe, shape, training=True), failure(recipe, shape, training=True)
    if said and only_our_rule(recipe, shape[3]):
        assert "vocab_size" in said and not happened
    else:
        assert bool(said) == bool(happened), f"the configuration says {said!r}, training {happened!r}"
    if not said:
        loss, norm = train_model(recipe, shape)
        assert 0 < loss < 20 and 0 < norm < 1000


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("shape", [*TOKENS, *WIDTHS], ids=str)
def test_a_forward_pass_takes_eights_of_tokens(recipe, shape):
    can_run(recipe)
    said, happened = refusal(recipe, shape, training=False), failure(recipe, shape, training=False)
    assert bool(said) == bool(happened), f"the configuration says {said!r}, a forward pass {happened!r}"


def test_every_refusal_names_a_shape_that_trains():
    """The user who follows the advice gets through: (the refused, the field at fault, the advice followed).
    """
    for refused, words, followed in [((3, 100, 64, 96), "--micro-batch-size 4 works", (4, 100, 64, 96)),
                                     ((2, 32, 40, 96), "; 48 works", (2, 32, 48, 96)),
                                     ((2, 32, 64, 50257), "50257 → 50304", (2, 32, 64, 50304))]:
        assert words in refusal("delayed", refused, training=True)
        assert not refusal("delayed", followed, training=True) and not failure(
            "delayed", followed, training=True
        )


# ----------------------------------------------------------------------------------------------------------------------
# As a script


@dataclass
class Options:
    json: Path | None = None  # Write the table here.


def main(argv=None):
    options = cli.parse(
        Options, argv, prog="test_shapes.py", description=__doc__.partition("\n\nEach shape")[0]
    )
    report.check_folder(options.json)
    print(
        f"{fp8.describe()}\n{'batch x sequence':>17} {'width':>6} {'vocab':>6}  {'recipe':8} {'forward':8} {'training':9} configuration"
    )
    rows = []
    for shape in SHAPES:
        for recipe in (r for r in RECIPES if not fp8.unsupported_reason(r)):
            row = dict(
                zip(("micro_batch", "sequence", "width", "vocab"), shape), recipe=recipe,
                forward=failure(recipe, shape, False) or "works",
                training=failure(recipe, shape, True) or "works",
                configuration=refusal(recipe, shape, True) or "accepts",
            )
            rows.append(row)
            works = ["works" if row[key] == "works" else "fails" for key in ("forward", "training")]
            error = next((row[key] for key in ("forward", "training") if row[key] != "works"), "")
            print(
                f"{f'{shape[0]} x {shape[1]}':>17} {shape[2]:>6} {shape[3]:>6}  {recipe:8} {works[0]:8} {works[1]:9} "
                f"{'accepts' if row['configuration'] == 'accepts' else 'refuses'}  {error[:120]}",
                flush=True,
            )
    report.write("test_shapes.py", argv, {"rows": rows}, options.json)


if __name__ == "__main__":
    sys.exit(cli.run(main, "test_shapes.py"))
