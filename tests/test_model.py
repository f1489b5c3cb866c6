"""model_te_optimized: the logits of Hugging Face's models, every option, errors, and the guide's snippets."""

import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import te_reference
from model_te_optimized import (
    DelayedScaling,
    OptimizedConfig,
    OptimizedGPT2Model,
    apply_rope,
    rope_tables,
    te,
)

transformers = pytest.importorskip("transformers")
TINY = dict(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4)
LLAMA = dict(use_rmsnorm=True, use_rotary=True, activation="swiglu", bias=False, tie_embeddings=False)


def tokens(batch=2, length=32, vocab=96):
    return torch.randint(0, vocab, (batch, length), device="cuda" if torch.cuda.is_available() else "cpu")


def make(**switches):
    return OptimizedGPT2Model(OptimizedConfig(**{**TINY, **switches}))


# ---- the same logits as Hugging Face's models, from the same random weights


def randomize(model):
    """Randomize all parameters, norms and biases too, so that a missing one shows."""
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.2) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))
    return model.eval().float()


def copy_weights(model, weights):
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing), (missing, unexpected)
    return model.eval()


def from_gpt2(hf):
    w = {
        "wte.weight": hf.transformer.wte.weight, "wpe.weight": hf.transformer.wpe.weight,
        "lm_head.weight": hf.lm_head.weight, "lm_head.layer_norm_weight": hf.transformer.ln_f.weight,
        "lm_head.layer_norm_bias": hf.transformer.ln_f.bias}
    for i, h in enumerate(hf.transformer.h):
        b = f"blocks.{i}."
        w |= {b + "attn.qkv.layer_norm_weight": h.ln_1.weight, b + "attn.qkv.layer_norm_bias": h.ln_1.bias,
              # Conv1D weights are (in, out)
              b + "attn.qkv.weight": h.attn.c_attn.weight.T, b + "attn.qkv.bias": h.attn.c_attn.bias,
              b + "attn.proj.weight": h.attn.c_proj.weight.T, b + "attn.proj.bias": h.attn.c_proj.bias,
              b + "mlp.layer_norm_weight": h.ln_2.weight, b + "mlp.layer_norm_bias": h.ln_2.bias,
              b + "mlp.fc1_weight": h.mlp.c_fc.weight.T, b + "mlp.fc1_bias": h.mlp.c_fc.bias,
              b + "mlp.fc2_weight": h.mlp.c_proj.weight.T, b + "mlp.fc2_bias": h.mlp.c_proj.bias}
    return w


def from_llama(hf):
    w = {
        "wte.weight": hf.model.embed_tokens.weight, "lm_head.weight": hf.lm_head.weight,
        "lm_head.layer_norm_weight": hf.model.norm.weight}
    for i, h in enumerate(hf.model.layers):
        b, a = f"blocks.{i}.", h.self_attn
        w |= {
            b + "attn.qkv.layer_norm_weight": h.input_layernorm.weight,
            b + "attn.qkv.weight": torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)),
            b + "attn.proj.weight": a.o_proj.weight,
            b + "mlp.layer_norm_weight": h.post_attention_layernorm.weight,
            b + "mlp.fc1_weight": torch.cat((h.mlp.gate_proj.weight, h.mlp.up_proj.weight)),
            b + "mlp.fc2_weight": h.mlp.down_proj.weight}
        if hasattr(a, "q_norm"):  # Qwen3
            w |= {b + "attn.q_norm.weight": a.q_norm.weight, b + "attn.k_norm.weight": a.k_norm.weight}
    return w


def gpt2():
    config = transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    return randomize(transformers.GPT2LMHeadModel(config)), make(), from_gpt2


def llama():
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=50000.0,
        tie_word_embeddings=False)
    hf = transformers.LlamaForCausalLM(config)
    return randomize(hf), make(**LLAMA, n_kv_head=2, n_inner=96, rope_theta=50000.0), from_llama


def qwen3():
    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e6,
        tie_word_embeddings=True)
    hf = transformers.Qwen3ForCausalLM(config)
    switches = {
        **LLAMA, "tie_embeddings": True, "use_qk_norm": True, "head_dim": 32, "layernorm_epsilon": 1e-6,
        "rope_theta": 1e6}
    return randomize(hf), make(**switches, n_kv_head=2, n_inner=96), from_llama


@pytest.mark.parametrize("pair", [gpt2, llama, qwen3])
def test_logits_equal_hugging_face(pair):
    hf, model, mapping = pair()
    if te is not te_reference:
        model.cuda(), hf.cuda()
    copy_weights(model, mapping(hf))
    x = tokens()
    with torch.no_grad():
        expected, logits = hf(x).logits, model(x)
    assert logits.shape == (2, 32, 96)
    # TE runs float32 GEMMs in TF32: nine GEMMs in sequence
    tolerance = 2e-5 if te is te_reference else 9 * 2.0**-11
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    labels = x.roll(-1, 1)
    labels[:, -1] = -100
    with torch.no_grad():
        loss = model(x, labels)
    expected_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert loss.shape == () and loss.dtype == torch.float32


# ---- every option trains


SWITCHES = {
    "gpt2": {}, "llama": {**LLAMA, "n_kv_head": 2},
    "qwen3": {**LLAMA, "use_qk_norm": True, "head_dim": 32, "n_kv_head": 1}, "rmsnorm": {"use_rmsnorm": True},
    "swiglu with bias": {"activation": "swiglu"}, "untied": {"tie_embeddings": False},
    "head in high precision": {"fp8_lm_head": False}, "te attention": {"use_pytorch_sdpa": False},
    "checkpointing": {"gradient_checkpointing": True}, "dropout": {"dropout": 0.1, "attn_dropout": 0.1},
    "margin": {"fp8_margin": 1}}


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_every_option_learns_a_batch(switches, use_fp8):
    model = make(**switches, use_fp8=use_fp8)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=5e-3)
    x, y = tokens(), tokens()
    losses = []
    for _ in range(8):
        loss = model(x, y)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - 4.56) < 0.3  # ln 96: nothing learned yet
    assert losses[-1] < losses[0] - 1


def test_the_default_recipe_and_its_replacement():
    model = make(use_fp8=True, fp8_margin=2)
    recipe = model.fp8_recipe
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (2, 1024, "max")
    x = tokens()
    model(x, x).backward()
    assert model.blocks[0].attn.qkv.fp8_meta["scaling_fwd"].amax_history.shape[0] == 1024
    model = make(use_fp8=True)
    # before the first pass: TE 2.20 fails if the length of the history changes later
    model.fp8_recipe = DelayedScaling(amax_history_len=4)
    model(x, x).backward()
    assert model.blocks[0].attn.qkv.fp8_meta["scaling_fwd"].amax_history.shape[0] == 4


def test_fp8_changes_the_logits_only_slightly():
    model = make(use_fp8=True).eval()
    x = tokens()
    with torch.no_grad():
        model(x)  # delayed scaling starts with scales of 1
    model(x, x).backward()
    with torch.no_grad():
        in_fp8 = model(x)
        model.config.use_fp8 = False
        exact = model(x)
    error = ((in_fp8 - exact).norm() / exact.norm()).item()
    assert 1e-4 < error < 0.1


def test_head_in_high_precision_has_no_fp8_state():
    x = tokens()
    for switch in (True, False):
        model = make(use_fp8=True, fp8_lm_head=switch)
        model(x, x).backward()
        assert ("scaling_fwd" in model.lm_head.fp8_meta) == switch
        assert "scaling_fwd" in model.blocks[0].mlp.fp8_meta


@pytest.mark.parametrize("use_fp8", [False, True])
def test_gradient_checkpointing_changes_nothing(use_fp8):
    x, results = tokens(), []
    for switch in (False, True):
        torch.manual_seed(1)
        model = make(use_fp8=use_fp8, gradient_checkpointing=switch, dropout=0.1)
        torch.manual_seed(2)
        for _ in range(2):
            model.zero_grad()
            loss = model(x, x)
            loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    for a, b in zip(results[0][1], results[1][1]):
        assert torch.equal(a, b)


def test_accumulated_micro_batches_equal_one_batch():
    x, y = tokens(4), tokens(4)
    model = make(use_fp8=False)
    model(x, y).backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for micro in range(2):
        part = slice(2 * micro, 2 * micro + 2)
        loss = model(x[part], y[part], is_first_microbatch=micro == 0)
        (loss / 2).backward()
    for a, p in zip(whole, model.parameters()):
        torch.testing.assert_close(p.grad, a, rtol=1e-3, atol=1e-6 if te is te_reference else 1e-5)


@pytest.mark.parametrize(
    "switches", [{}, {**LLAMA, "n_kv_head": 2, "use_qk_norm": True}], ids=["gpt2", "llama"])
def test_kv_cache_gives_the_same_logits(switches):
    model = make(**switches).eval()
    x = tokens(2, 24)
    with torch.no_grad():
        whole = model(x)
        cache = model.make_kv_cache(2, 24)
        # a prompt, one token, several tokens
        parts = [model(part, kv_cache=cache) for part in (x[:, :10], x[:, 10:11], x[:, 11:16], x[:, 16:])]
    assert cache.length == 24
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_attention_is_causal():
    model = make(**LLAMA).eval()
    x = tokens()
    with torch.no_grad():
        before = model(x)
        x[:, 20] = (x[:, 20] + 1) % 96
        after = model(x)
    assert torch.equal(before[:, :20], after[:, :20]) and not torch.equal(before[:, 20:], after[:, 20:])


def test_rope_rotates_pairs_half_a_head_apart():
    cos, sin = rope_tables(torch.tensor([0, 3]), 4, 100.0)
    assert torch.allclose(cos[1, 0], torch.tensor([3.0, 0.3]).cos())  # 3·100^0, 3·100^(-1/2)
    assert torch.equal(sin[0, 0], torch.zeros(2))
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 2, 1, 4)
    rotated = apply_rope(x, cos, sin)
    assert torch.equal(rotated[0, 0, 0], x[0, 0, 0])
    c, s = torch.tensor([3.0, 0.3]).cos(), torch.tensor([3.0, 0.3]).sin()
    assert torch.allclose(rotated[0, 1, 0], torch.stack((c[0], -2 * s[1], s[0], 2 * c[1])))


@pytest.mark.skipif(
    te is not te_reference, reason="Transformer Engine's fused modules break the graph; te_reference does not"
)
@pytest.mark.parametrize("recipe", [None, "current"])
def test_compiles_without_a_graph_break(recipe):
    model = make(**LLAMA, n_kv_head=2, n_layer=1, use_fp8=recipe is not None)
    model.fp8_recipe = te_reference.Float8CurrentScaling()
    x = tokens()
    eager = model(x, x)
    eager.backward()
    gradient = model.blocks[0].mlp.fc1_weight.grad.clone()
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x, x)
    compiled.backward()
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(model.blocks[0].mlp.fc1_weight.grad, gradient, rtol=1e-3, atol=1e-6)


# ---- errors: one line that names a value that works


@pytest.mark.parametrize("fields, words", [
    (dict(vocab_size=50257), ("vocab_size", "50257", "multiple of 32", "50304 works")),
    (dict(n_embd=100, n_head=12), ("n_embd", "100", "multiple of 12 (n_head=12", "108 works")),
    (dict(n_head=12, n_kv_head=5), ("n_kv_head", "5", "one of [12, 6, 4, 3, 2, 1]")),
    (dict(n_embd=72, n_head=4, use_fp8=True), ("n_embd", "72", "16", "80 works")),
    (dict(n_embd=64, n_head=4, n_inner=100, use_fp8=True), ("n_inner", "100", "112 works")),
    (dict(n_embd=60, n_head=4, use_rotary=True), ("head_dim", "15", "multiple of 2", "16 works")),
    (dict(n_head=4, n_kv_head=1, head_dim=24, use_fp8=True), ("head_dim", "24", "use_fp8=True", "32 works")),
    (dict(activation="relu6"), ("activation", "relu6", "gelu")),
    (dict(attention="fast"), ("attention", "fast", "sdpa"))])
def test_a_bad_configuration_says_what_works(fields, words):
    with pytest.raises(ValueError) as error:
        OptimizedConfig(**fields)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_a_bad_batch_says_what_works():
    model = make(use_fp8=True)
    with pytest.raises(ValueError, match="3 x 9 = 27 tokens: FP8 needs a multiple of 16; 32"):
        model(tokens(3, 9))
    with pytest.raises(ValueError, match="65 positions, but n_positions=64"):
        model(tokens(1, 65))
    with pytest.raises(ValueError, match="flash-attn"):
        make(attention="flash", attn_dropout=0.1)


# ---- the guide's snippets, verbatim

MODULE_SELECTION = """
self.ln_qkv = te.LayerNormLinear(hidden_size, 3 * hidden_size)
self.ln_mlp = te.LayerNormMLP(hidden_size, 4 * hidden_size)
out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
FP8_CONFIGURATION = """
# Recommended FP8 recipe
fp8_recipe = DelayedScaling(
    margin=0,  # Don't use margin=1
    fp8_format=Format.HYBRID  # E4M3 fwd, E5M2 bwd
)

# Wrap TE modules with fp8_autocast
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    # Only TE Linear modules benefit from FP8
    x = self.ln_mlp(x)  # FP8 acceleration
    logits = self.lm_head(x)  # FP8 acceleration
"""
ARCHITECTURE = """
config = OptimizedConfig(
    vocab_size=50304,      # Must be divisible by 32
    n_head=12,
    n_kv_head=4,          # GQA reduces memory by 66%
    use_rmsnorm=True,     # Faster than LayerNorm
    use_pytorch_sdpa=True # 10x faster attention
)
"""
TRAINING = """
import torch
from model_te_optimized import OptimizedGPT2Model, OptimizedConfig

# Configuration
config = OptimizedConfig(
    vocab_size=50304,      # Divisible by 32 for FP8
    n_positions=2048,
    n_embd=768,
    n_layer=12,
    n_head=12,
    n_kv_head=4,          # GQA with 3:1 ratio
    use_rmsnorm=True,     # Faster normalization
    use_pytorch_sdpa=True,# Best attention backend
    use_fp8=True,         # Enable FP8 training
)

# Model
model = OptimizedGPT2Model(config).cuda().bfloat16()

# Training
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
    vocab_size=50304,        # Multiple of 32
    n_kv_head=n_head//4,    # GQA for memory savings
    use_rmsnorm=True,       # Computational efficiency
    use_pytorch_sdpa=True,  # Fastest attention
    use_fp8=True,          # Training acceleration
)

# Add torch.compile for extra 10-30% speedup
model = OptimizedGPT2Model(config).cuda()
model = torch.compile(model, mode="reduce-overhead")
"""
QUICKSTART = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

# Set dimensions.
in_features = 768
out_features = 3072
hidden_size = 2048

# Initialize model and inputs.
model = te.Linear(in_features, out_features, bias=True)
inp = torch.randn(hidden_size, in_features, device="cuda")

# Create an FP8 recipe. Note: All input args are optional.
fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)

# Enable autocasting for the forward pass
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
    """Return a function that runs snippets in one namespace. Without a GPU, te_reference replaces
    `transformer_engine` and `.cuda()` does nothing."""
    if not torch.cuda.is_available():
        for name in ("transformer_engine", "transformer_engine.common"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te_reference)
        monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", te_reference)
        monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    namespace = {"OptimizedConfig": OptimizedConfig, "OptimizedGPT2Model": OptimizedGPT2Model}

    def run(code):
        exec(code, namespace)
        return namespace

    return run


def test_the_guides_fp8_snippets(snippets):
    names = snippets(IMPORTS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    self = types.SimpleNamespace()
    names.update(
        self=self, hidden_size=64, q=torch.randn(1, 4, 32, 16), k=torch.randn(1, 4, 32, 16),
        v=torch.randn(1, 4, 32, 16))
    snippets(MODULE_SELECTION)
    assert names["out"].shape == (1, 4, 32, 16)
    self.lm_head = names["te"].Linear(64, 96)
    names["x"] = torch.randn(32, 64, device=device)
    snippets(FP8_CONFIGURATION)
    assert names["logits"].shape == (32, 96) and "scaling_fwd" in self.lm_head.fp8_meta


def test_the_guides_training_snippet(snippets):
    names = snippets(IMPORTS)
    x = tokens(1, 16, 50304)
    names["dataloader"] = [{"input_ids": x, "labels": x.roll(-1, 1)}] * 2
    snippets(TRAINING)
    assert names["loss"].item() < 10.5  # less than the initial ln 50304 = 10.8
    assert names["model"].wte.weight.dtype == torch.bfloat16
    assert "scaling_fwd" in names["model"].lm_head.fp8_meta


def test_the_guides_other_snippets(snippets):
    names = snippets(IMPORTS)
    names["n_head"] = 12
    snippets(ARCHITECTURE)
    assert names["config"].n_kv_head == 4
    snippets(PRODUCTION)
    assert names["config"].n_kv_head == 3
    x = tokens(1, 16, 50304)
    with pytest.warns(UserWarning, match="runs uncompiled"):  # the default recipe is delayed scaling
        loss = names["model"](x, x.roll(-1, 1))
    loss.backward()
    assert abs(loss.item() - math.log(50304)) < 1 and names["model"].wte.weight.grad.isfinite().all()


def run_quickstart(snippets, code):
    names = snippets(code if torch.cuda.is_available() else code.replace('device="cuda"', 'device="cpu"'))
    model, inp, out = names["model"], names["inp"], names["out"].detach()
    assert out.shape == (2048, 3072) and torch.isfinite(names["loss"])
    with torch.no_grad():
        exact = torch.nn.functional.linear(inp.double(), model.weight.double(), model.bias.double())
    error = (out.double() - exact).norm() / exact.norm()
    assert 1e-3 < error < 2**-3.5  # two E4M3 operands, each rounded by at most 2^-4; below 1e-3 it is not FP8
    assert torch.equal(model.bias.grad, torch.full_like(model.bias, 2048.0))  # dy is 1
    summed = inp.double().sum(0).expand(3072, -1)
    assert (model.weight.grad.double() - summed).norm() / summed.norm() < 2**-4
    history = model.fp8_meta["scaling_fwd"].amax_history  # after the step the last row holds the amaxes
    largest = [tensor.detach().abs().max() for tensor in (inp, model.weight)]
    torch.testing.assert_close(history[-1, :2], torch.stack(largest))


@pytest.mark.parametrize("code", [QUICKSTART, NEW_QUICKSTART])
def test_transformer_engines_quickstart(snippets, code):
    run_quickstart(snippets, code)


@pytest.mark.gpu
def test_transformer_engines_quickstart_on_a_gpu(snippets):
    run_quickstart(snippets, QUICKSTART)
    run_quickstart(snippets, NEW_QUICKSTART)
