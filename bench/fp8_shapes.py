"""Compare the shapes that the configuration accepts with those that run in FP8 (test_shapes.py).

A shape goes through the GEMMs of a GPT without the model's checks (`failure`), and through the checks alone
(`refusal`). The two should agree.
"""

import torch

from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote import fp8

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
RECIPES = ("delayed", "current", "block", "mxfp8")

# (micro-batch, sequence length, width, vocabulary). Each list varies one of them.
# (7, 24) is what the last batch of an epoch may be, after batches of (8, 24).
BATCHES = [(1, 1), (1, 4), (1, 8), (1, 12), (1, 16), (1, 24), (1, 32), (1, 48), (2, 7), (2, 8), (2, 16),
           (1, 64), (3, 64), (5, 48), (7, 24), (7, 32), (3, 1000), (4, 1000), (1, 1023), (1, 1024)]
TOKENS = [(batch, length, 64, 96) for batch, length in BATCHES]
WIDTHS = [(2, 32, width, 96) for width in (8, 16, 24, 32, 40, 48, 72, 80, 96, 120, 128)]
VOCAB_SIZES = (17, 24, 32, 48, 64, 72, 80, 88, 96, 256, 257, 272, 288, 50257, 50264, 50272, 50304)
VOCABULARIES = [(2, 32, 64, vocab) for vocab in VOCAB_SIZES]
SHAPES = list(dict.fromkeys(TOKENS + WIDTHS + VOCABULARIES))


def make_config(shape):
    """Return the configuration of a model of one layer; ValueError if it refuses the shape."""
    _, length, width, vocab = shape
    return OptimizedConfig(
        vocab_size=vocab, n_positions=length, n_embd=width, n_layer=1, n_head=1, use_fp8=True
    )


def refusal(recipe, shape, training):
    """Return what the checks say against a shape, in one line; "" if they accept it."""
    batch, length, *_ = shape
    try:
        config = make_config(shape)
        if training:  # the trainer's check; for a forward pass alone, the model asks for 8 tokens
            fp8.check_shapes(config, batch, length, recipe)
        elif batch * length % 8:
            raise ValueError(f"{batch * length} tokens")
    except ValueError as error:
        return str(error)
    return ""


def failure(recipe, shape, training):
    """Run a shape without checks: return the error in one line, "" if it works."""
    batch, length, width, vocab = shape
    torch.manual_seed(0)
    te = fp8.te
    try:
        modules = torch.nn.Sequential(
            te.LayerNormLinear(width, 3 * width), te.Linear(3 * width, width),
            te.LayerNormMLP(width, 4 * width), te.LayerNormLinear(width, vocab, bias=False),
        ).to(DEVICE)
        x = torch.randn(batch, length, width, device=DEVICE)
        with torch.set_grad_enabled(training):
            with (
                torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_GPU),
                te.autocast(enabled=True, recipe=fp8.make_recipe(recipe)),
            ):
                y = modules(x)
            if training:
                y.float().square().mean().backward()
        if HAS_GPU:
            torch.cuda.synchronize()
    except (ValueError, RuntimeError, AssertionError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def train_model(recipe, shape):
    """Train the model for one step -> (loss, gradient norm)."""
    batch, length, _, vocab = shape
    torch.manual_seed(0)
    model = OptimizedGPT2Model(make_config(shape)).to(DEVICE)
    model.fp8_recipe = fp8.make_recipe(recipe)
    tokens = torch.randint(vocab, (batch, length), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_GPU):
        loss = model(tokens, tokens)
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
