"""model_te_optimized: the KV cache, errors, and the snippets of the guide and of Transformer Engine's README.

The network and its options: tests/test_family.py. The logits of Hugging Face's models: tests/test_hf.py.
"""

import math
import sys
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import model_te_optimized
import te_reference
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model, flash_attention, split_heads
from nanote.generate import generate

TINY = dict(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4)
LLAMA = dict(use_rmsnorm=True, use_rotary=True, activation="swiglu", bias=False, tie_embeddings=False)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "switches", [{}, {**LLAMA, "n_kv_head": 2, "use_qk_norm": True}], ids=["gpt2", "llama"])
def test_kv_cache_gives_the_same_logits(switches):
    model = OptimizedGPT2Model(OptimizedConfig(**TINY | switches)).eval()
    x = torch.randint(0, 96, (2, 24), device=DEVICE)
    with torch.no_grad():
        whole = model(x)
        cache = model.make_kv_cache(2, 24)
        ranges = [(0, 10), (10, 11), (11, 16), (16, 24)]  # a prompt, one token, several tokens
        parts = [model(x[:, start:end], kv_cache=cache) for start, end in ranges]
    assert cache.length == 24
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_a_model_generates_in_inference_mode_and_trains_on():
    model = OptimizedGPT2Model(OptimizedConfig(**TINY, use_fp8=True))
    expected = generate(model, [1, 2, 3], 8, temperature=0)
    with torch.inference_mode():
        assert generate(model, [1, 2, 3], 8, temperature=0) == expected
        cache = model.make_kv_cache(1, 16)
    x = torch.randint(0, 96, (2, 32), device=DEVICE)
    model(x, x).backward()
    model.config.use_fp8 = False
    with torch.no_grad():  # the cache of one mode in the other
        torch.testing.assert_close(model(x[:1, :8], kv_cache=cache), model(x[:1, :8]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields, words", [
    (dict(n_embd=100, n_head=12), ("n_embd", "100", "multiple of 12 (n_head=12", "108 works")),
    (dict(n_head=12, n_kv_head=5), ("n_kv_head", "5", "n_head=12", "one of [12, 6, 4, 3, 2, 1] works")),
    (dict(n_embd=60, n_head=4, use_rotary=True), ("head_dim", "15", "multiple of 2", "16 works")),
    (dict(n_head=4, n_kv_head=1, head_dim=24, use_fp8=True), ("head_dim", "24", "use_fp8=True", "32 works")),
    *((dict(rope_scaling=value), ("rope_scaling", "FACTOR:LOW:HIGH:CONTEXT", "8:1:4:8192"))
      for value in ("8:1:4", "0:1:4:8192", "8:4:4:8192", {"rope_type": "llama3"}, (8, 1, 4, 8192))),
    (dict(activation="relu6"), ("activation", "relu6", "gelu")),
    (dict(attention="fast"), ("attention", "fast", "sdpa"))])
def test_a_bad_configuration_says_what_works(fields, words):
    with pytest.raises(ValueError) as error:
        OptimizedConfig(**fields)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# ---- the guide's snippets, without comments and blank lines

MODULES = """
self.ln_qkv = te.LayerNormLinear(hidden_size, 3 * hidden_size)
self.ln_mlp = te.LayerNormMLP(hidden_size, 4 * hidden_size)
out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
fp8_recipe = DelayedScaling(
    margin=0,
    fp8_format=Format.HYBRID
)
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    x = self.ln_mlp(x)
    logits = self.lm_head(x)
"""
TRAINING = """
import torch
from model_te_optimized import OptimizedGPT2Model, OptimizedConfig
config = OptimizedConfig(
    vocab_size=50304,
    n_positions=2048,
    n_embd=768,
    n_layer=12,
    n_head=12,
    n_kv_head=4,
    use_rmsnorm=True,
    use_pytorch_sdpa=True,
    use_fp8=True,
)
model = OptimizedGPT2Model(config).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for batch in dataloader:
    logits = model(batch['input_ids'])
    loss = F.cross_entropy(
        logits.reshape(-1, config.vocab_size),
        batch['labels'].reshape(-1)
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PRODUCTION = """
config = OptimizedConfig(
    vocab_size=50304,
    n_kv_head=n_head//4,
    use_rmsnorm=True,
    use_pytorch_sdpa=True,
    use_fp8=True,
)
model = OptimizedGPT2Model(config).cuda()
model = torch.compile(model, mode="reduce-overhead")
"""
QUICKSTART = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
in_features = 768
out_features = 3072
hidden_size = 2048
model = te.Linear(in_features, out_features, bias=True)
inp = torch.randn(hidden_size, in_features, device="cuda")
fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    out = model(inp)
loss = out.sum()
loss.backward()
"""  # from Transformer Engine's README
NEW_QUICKSTART = QUICKSTART.replace("fp8_autocast(enabled=True, fp8_recipe", "autocast(enabled=True, recipe")
IMPORTS = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
"""


@pytest.fixture
def snippets(monkeypatch):
    """Return a function that runs a snippet with variables and returns all names. Without a GPU, te_reference
    replaces `transformer_engine` and `.cuda()` does nothing."""
    if DEVICE == "cpu":
        for name in ("transformer_engine", "transformer_engine.common"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te_reference)
        monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", te_reference)
        monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)

    def run(code, **variables):
        names = dict(OptimizedConfig=OptimizedConfig, OptimizedGPT2Model=OptimizedGPT2Model)
        exec(IMPORTS, names)
        names |= variables
        exec(code, names)
        return names

    return run


def test_the_guides_module_and_fp8_snippets(snippets):
    q, k, v = torch.randn(3, 1, 4, 32, 16)
    lm_head = snippets("head = te.Linear(64, 96)")["head"]
    names = snippets(MODULES, self=types.SimpleNamespace(lm_head=lm_head), hidden_size=64, q=q, k=k, v=v,
                     x=torch.randn(32, 64, device=DEVICE))
    assert names["out"].shape == (1, 4, 32, 16)
    assert names["logits"].shape == (32, 96) and "scaling_fwd" in lm_head.fp8_meta


def test_the_guides_training_snippet(snippets):
    x = torch.randint(0, 50304, (1, 16), device=DEVICE)
    code = TRAINING if DEVICE == "cuda" else TRAINING.replace("n_layer=12", "n_layer=1")
    names = snippets(code, dataloader=[{"input_ids": x, "labels": x.roll(-1, 1)}] * 2)
    assert names["loss"].item() < 10.5  # less than the initial ln 50304 = 10.8
    assert names["model"].wte.weight.dtype == torch.bfloat16
    assert "scaling_fwd" in names["model"].lm_head.fp8_meta


def test_the_guides_production_snippet(snippets, compiles):
    small = partial(OptimizedConfig, n_layer=1, n_embd=192)  # 12 blocks take half a minute
    names = snippets(PRODUCTION, n_head=12, OptimizedConfig=small)
    assert names["config"].n_kv_head == 3
    x = torch.randint(0, 50304, (1, 16), device=DEVICE)
    loss = names["model"](x, x.roll(-1, 1))
    loss.backward()
    assert abs(loss.item() - math.log(50304)) < 1 and names["model"].wte.weight.grad.isfinite().all()


@pytest.mark.parametrize("code", [
    QUICKSTART, NEW_QUICKSTART, pytest.param(QUICKSTART, marks=pytest.mark.gpu),
    pytest.param(NEW_QUICKSTART, marks=pytest.mark.gpu)])
def test_transformer_engines_quickstart(snippets, code):
    names = snippets(code.replace('device="cuda"', f'device="{DEVICE}"'))
    model, inp, out = names["model"], names["inp"], names["out"].detach()
    assert out.shape == (2048, 3072) and torch.isfinite(names["loss"])
    with torch.no_grad():
        exact = F.linear(inp.double(), model.weight.double(), model.bias.double())
    error = (out.double() - exact).norm() / exact.norm()
    assert 1e-3 < error < 2**-3.5  # two E4M3 operands, each rounded by at most 2^-4; below 1e-3 it is not FP8
    assert torch.equal(model.bias.grad, torch.full_like(model.bias, 2048.0))  # dy is 1
    summed = inp.double().sum(0).expand(3072, -1)
    assert (model.weight.grad.double() - summed).norm() / summed.norm() < 2**-4
    history = model.fp8_meta["scaling_fwd"].amax_history  # after the step the last row holds the amaxes
    largest = [tensor.detach().abs().max() for tensor in (inp, model.weight)]
    torch.testing.assert_close(history[-1, :2], torch.stack(largest))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["in_order", "swapped"])
@pytest.mark.parametrize("is_one_tensor", [True, False])
def test_split_heads_has_the_gradient_of_torch_split(order, is_one_tensor):
    """Also where an attention kernel writes the gradients of q, k and v to parts of one tensor."""
    written = torch.randn(2, 8, 6, 4, dtype=torch.bfloat16)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q + k + v

        @staticmethod
        def backward(ctx, dy):
            parts = written.split(2, dim=2)
            if not is_one_tensor:
                parts = [part.clone() for part in parts]
            return tuple(parts[i] for i in order)

    gradients = []
    for split in (partial(split_heads, kernel="flash"), partial(torch.Tensor.split, dim=2)):
        qkv = torch.zeros(2, 8, 6, 4, dtype=torch.bfloat16, requires_grad=True)
        Attention.apply(*split(qkv, (2, 2, 2))).sum().backward()
        gradients.append(qkv.grad)
    assert torch.equal(*gradients)


@pytest.mark.gpu
@pytest.mark.skipif(model_te_optimized.flash_version != 4, reason="needs FlashAttention 4")
@pytest.mark.parametrize("shape", [(8, 1024, 12, 12, 64), (2, 1040, 12, 4, 64), (1, 8192, 8, 2, 128)])
def test_flash_attention_is_as_exact_as_sdpa(shape):
    """Output and gradient of qkv against float32's; bit for bit twice with deterministic algorithms."""
    batch, length, n_head, n_kv_head, head_dim = shape
    heads = (n_head, n_kv_head, n_kv_head)
    qkv = torch.randn(batch, length, sum(heads), head_dim, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(batch, length, n_head, head_dim, device="cuda", dtype=torch.bfloat16)

    def run(kernel, dtype=torch.bfloat16):
        x = qkv.to(dtype).requires_grad_()
        q, k, v = split_heads(x, heads, kernel)
        if kernel == "flash":
            y = flash_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)
        y.backward(dy.to(dtype))
        return y.detach(), x.grad

    def error(found, expected):
        return float((found.float() - expected).norm() / expected.norm())

    expected = run("sdpa", torch.float32)
    for found, sdpa, exact in zip(run("flash"), run("sdpa"), expected):
        assert error(found, exact) < 1.1 * error(sdpa, exact)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(run("flash")[1], run("flash")[1])
    finally:
        torch.use_deterministic_algorithms(False)
