"""te_reference against Transformer Engine on a GPU: FP8 bytes, scales and amax histories must be equal; GEMM
outputs may differ by rounding."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

import te_reference as ref
from trainer_tools import ROOT, model_file

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.common import recipe as te_recipe
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

FORMATS = [("kFloat8E4M3", torch.float8_e4m3fn), ("kFloat8E5M2", torch.float8_e5m2)]


def heavy_tailed(*shape, dtype):
    """Return random values over many orders of magnitude, with zeros and values beyond FP8's range."""
    x = torch.randn(shape, device="cuda") * torch.exp(3 * torch.randn(shape, device="cuda"))
    x.view(-1)[::97] = 0
    x.view(-1)[::1001] *= 1e6
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name, fp8", FORMATS)
def test_delayed_scaling_gives_the_same_bytes(name, fp8, dtype):
    for scale in (1.0, 3.7, 1234.567, 1e-3, 2.0**-20):
        x, scale = heavy_tailed(512, 256, dtype=dtype), torch.tensor([scale], device="cuda")
        x[3, 4], x[5, 6], x[7, 8] = math.nan, 1e30, -1e30
        amax = torch.zeros(1, device="cuda")
        quantized = Float8Quantizer(scale, amax, getattr(tex.DType, name), columnwise=True)(x)
        ours = ref.quantize(x, scale, fp8)
        assert torch.equal(quantized._data, ours.view(torch.uint8))
        assert torch.equal(quantized._transpose, ours.view(torch.uint8).T)
        theirs = quantized.dequantize(dtype=torch.float32)
        torch.testing.assert_close(theirs, ref.dequantize(ours, scale), rtol=0, atol=0, equal_nan=True)
        assert amax.item() == ref.amax_of(x).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name, fp8", FORMATS)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_current_scaling_gives_the_same_bytes_and_scales(name, fp8, dtype, power_of_2):
    for factor in (1e-30, 1e-4, 1.0, 77.7, 1e20):
        x = heavy_tailed(256, 128, dtype=dtype) * factor
        quantizer = Float8CurrentScalingQuantizer(
            getattr(tex.DType, name), device="cuda", force_pow_2_scales=power_of_2)
        quantizer.set_usage(rowwise=True, columnwise=False)
        quantized = quantizer(x)
        scale = ref.current_scale(ref.amax_of(x), ref.FP8_MAX[fp8], power_of_2)
        assert quantized._scale_inv.item() == scale.reciprocal().item()
        assert torch.equal(quantized._data, ref.quantize(x, scale, fp8).view(torch.uint8))


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name, fp8", FORMATS)
def test_scales_and_histories_roll_the_same(algo, margin, length, name, fp8):
    n = 4096
    recipe = ref.DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algo)
    state = ref._ScalingState(recipe, n, "cuda")
    state.scale.fill_(5.0)
    theirs = (state.amax_history.clone(), state.scale.clone())
    for _ in range(6):
        amax = torch.exp(8 * torch.randn(n, device="cuda"))
        amax[:8] = torch.tensor([0.0, torch.inf, torch.nan, 1e-38, 1e-44, 3e38, 7.0, 14.0], device="cuda")
        amax[8 + torch.randint(0, n - 8, (500,), device="cuda")] = 0.0  # tensors not used in this step
        theirs[0][0] = state.amax_history[0] = amax
        tex.fused_amax_and_scale_update_after_reduction(
            amax.clone(), [theirs[0]], [theirs[1]], algo, getattr(tex.DType, name), margin)
        state.roll(recipe, ref.FP8_MAX[fp8])
        assert torch.equal(state.scale, theirs[1])
        assert torch.equal(state.amax_history.nan_to_num(nan=-1), theirs[0].nan_to_num(nan=-1))


def make_mlp(activation):
    return lambda t, d: t.LayerNormMLP(256, 512, activation=activation, params_dtype=d)


MODULES = {
    "Linear": lambda t, d: t.Linear(256, 512, params_dtype=d),
    "LayerNormLinear": lambda t, d: t.LayerNormLinear(256, 512, params_dtype=d),
    "LayerNormLinear RMSNorm": lambda t, d: t.LayerNormLinear(
        256, 512, normalization="RMSNorm", zero_centered_gamma=True, bias=False, params_dtype=d),
    "LayerNormLinear returning": lambda t, d: t.LayerNormLinear(
        256, 512, return_layernorm_output=True, return_bias=True, params_dtype=d),
    **{f"LayerNormMLP {name}": make_mlp(name) for name in ("gelu", "geglu", "relu", "srelu", "swiglu")}}
RECIPES = {
    "none": lambda r: None,
    "delayed": lambda r: r.DelayedScaling(amax_history_len=3),
    "delayed e4m3 most_recent": lambda r: r.DelayedScaling(
        amax_history_len=3, margin=1, fp8_format=r.Format.E4M3, amax_compute_algo="most_recent"),
    "current": lambda r: r.Float8CurrentScaling(),
    "current e4m3": lambda r: r.Float8CurrentScaling(fp8_format=r.Format.E4M3)}


@pytest.mark.parametrize("way", ["plain", "micro-batches", "checkpoint", "evaluation"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", MODULES)
def test_modules_agree_over_several_steps(module, recipe, way, dtype=torch.bfloat16):
    if way != "plain" and (recipe != "delayed" or module not in ("Linear", "LayerNormMLP gelu")):
        pytest.skip("the FP8 state is updated in the same way in the others")
    # Up to the activation all operands are equal and only the outputs are rounded to bfloat16: 2^-8. After
    # it, and after a dgrad, bfloat16 values differ by up to one unit, d = 2^-8. That moves a fraction d / s
    # of the FP8 values by one step, s = 2^-2 in E5M2, which gives a relative error of sqrt(d · s) = 2^-5. dx
    # depends on two such operands: sqrt(2) · 2^-5.
    bound = 2.0**-8 if "MLP" not in module else 2.0**-4.5
    pairs = [(te, te_recipe), (ref, ref)]
    theirs, ours = (MODULES[module](t, dtype) for t, _ in pairs)
    weights = {
        k: v + 0.1 * torch.randn_like(v) if v.dim() == 1 else v
        for k, v in theirs.state_dict().items()
        if "extra" not in k}
    theirs.load_state_dict(weights, strict=False)
    ours.load_state_dict(weights, strict=False)
    recipes = [RECIPES[recipe](r) for _, r in pairs]
    for step in range(6):
        x = (torch.randn(64, 4, 256, device="cuda") * torch.exp(torch.randn(256, device="cuda"))).to(dtype)
        grad, results = None, []
        for m, (t, _), r in zip((theirs, ours), pairs, recipes):
            inp = x.clone().requires_grad_()
            m.zero_grad()
            if way == "evaluation":
                with torch.no_grad(), t.autocast(enabled=True, recipe=r):
                    m(2 * x)
            first = {"is_first_microbatch": step % 2 == 0} if way == "micro-batches" else {}
            with t.autocast(enabled=r is not None, recipe=r):
                out = t.checkpoint(m, inp) if way == "checkpoint" else m(inp, **first)
            out = out[0] if isinstance(out, tuple) else out
            grad = torch.randn_like(out) * 1e-3 if grad is None else grad
            out.backward(grad)
            gradients = {"d" + k: p.grad for k, p in m.named_parameters() if p.grad is not None}
            results.append({"y": out, "dx": inp.grad, **gradients})
        assert results[0].keys() == results[1].keys()
        for name, a in results[0].items():
            error = (a.float() - results[1][name].float()).norm() / a.float().norm()
            assert error <= bound, f"step {step}, {name}: relative error {error:.1e}"
        for key in ("scaling_fwd", "scaling_bwd"):
            if hasattr(theirs.fp8_meta.get(key), "amax_history"):
                a, b = theirs.fp8_meta[key], ours.fp8_meta[key]
                # Norms differ in summation order. The amax of an activation can be a product of two bfloat16
                # values, each off by one unit (up to 2^-7).
                rtol = 0 if module == "Linear" else 1e-6 if "MLP" not in module else 2.0**-6
                torch.testing.assert_close(b.amax_history, a.amax_history, rtol=rtol, atol=0)
                torch.testing.assert_close(b.scale, a.scale, rtol=rtol, atol=0)


LAYOUTS = {"split": {}, "groups": {"fuse_qkv_params": True},
           "rows of q, k, v": {"fuse_qkv_params": True, "qkv_weight_interleaved": False}}
SIZES, NO_DROPOUT = (64, 128, 4, 2), {"hidden_dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("use_fp8", [False, True])
def test_transformer_layer_equals_tes(way, use_fp8):
    # Rounding with unit roundoff u has an RMS error of u / sqrt(3). R roundings in sequence give sqrt(R / 3)
    # u, and the difference of two such results has twice the variance. BF16 (u = 2^-8) rounds 13 times: norm,
    # QKV, RoPE, scores, probabilities, context, projection, residual, norm, fc1, GELU, fc2, residual; and
    # again in the backward pass. FP8 rounds the inputs of four GEMMs (E4M3, u = 2^-4) and their four output
    # gradients (E5M2, u = 2^-3).
    forward = 2 / 3 * (13 * 2.0**-16 + use_fp8 * 4 * 2.0**-8)
    backward = 2 * forward + 2 / 3 * use_fp8 * 4 * 2.0**-6
    layers = [
        t.TransformerLayer(*SIZES, **NO_DROPOUT, params_dtype=torch.bfloat16, **LAYOUTS[way])
        for t in (te, ref)]
    assert list(layers[0].state_dict()) == list(layers[1].state_dict())
    assert [n for n, _ in layers[0].named_parameters()] == [n for n, _ in layers[1].named_parameters()]
    weights = {
        k: v + 0.1 * torch.randn_like(v) for k, v in layers[0].state_dict().items() if "_extra_state" not in k
    }
    x, grad = torch.randn(2, 32, 4, 64, device="cuda", dtype=torch.bfloat16)
    angles = torch.outer(torch.arange(32.0), 1e4 ** (-torch.arange(8) / 8.0)).repeat(1, 2)
    angles = angles[:, None, None].cuda()
    results = []
    for t, layer, r in zip((te, ref), layers, (te_recipe, ref)):
        layer.load_state_dict(weights, strict=False)
        inp = x.clone().requires_grad_()
        with t.autocast(enabled=use_fp8, recipe=r.Float8CurrentScaling()):
            y = layer(inp, rotary_pos_emb=angles)
        y.backward(grad)
        results.append([y, inp.grad, torch.cat([p.grad.flatten() for p in layer.parameters()])])
    for name, bound, a, b in zip(("y", "dx", "dw"), (forward, backward, backward), *results):
        error = ((a - b).float().norm() / a.float().norm()).item()
        assert error <= math.sqrt(bound), f"{name}: {error:.1e}, bound {math.sqrt(bound):.1e}"


def model_on(engine):
    """Return a small model of model_te_optimized.py on an engine."""
    module = model_file("model_te_optimized", engine)
    config = module.OptimizedConfig(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, use_fp8=True)
    return module.OptimizedGPT2Model(config).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("source, target", [
    ("te", "reference"), ("reference", "te"), ("te", "fast"), ("fast", "te"), ("fast", "reference")])
def test_engines_exchange_state_dicts_with_fp8_state(source, target, tmp_path):
    a, b = (model_on(engine) for engine in (source, target))
    ids = torch.randint(128, (4, 32), device="cuda")
    for _ in range(4):
        a(ids, ids).backward()
    torch.save(a.state_dict(), tmp_path / "model.pt")
    b.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    state, other = a.state_dict(), b.state_dict()
    assert state.keys() == other.keys() and any("scaling_bwd.scale" in name for name in state)
    assert all(torch.equal(state[name], other[name]) for name in state)
    with torch.no_grad():
        y, z = a(ids).float(), b(ids).float()
    assert (y - z).norm() <= 2.0**-4 * y.norm()


LOGITS = """
import sys, torch
from nanote import checkpoint, models, recipes
from nanote.config import TrainConfig
folder = checkpoint.find(sys.argv[1])
meta = checkpoint.read_meta(folder)
config = models.make_model_config(meta["model"], meta["model_config"])
model = models.build_model(meta["model"], config, device=torch.device("cuda"), dtype=torch.bfloat16)
model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe="delayed", fp8_amax_history_len=16))
checkpoint.load(folder, model)
stored = checkpoint.read_tensors(folder, ("fp8.",))
recipes.set_state(model, {name.removeprefix("fp8."): value for name, value in stored.items()})
x = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()
with torch.no_grad():
    torch.save(model.eval()(x).float().cpu(), sys.argv[2])
"""


def run(*arguments, reference=False):
    environment = {k: v for k, v in os.environ.items() if k != "NANOTE_ENGINE"}
    if reference:
        environment["NANOTE_ENGINE"] = "reference"
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("reference_first", [True, False])
def test_a_checkpoint_of_one_loads_in_the_other(tmp_path, reference_first):
    run("data.py", "stdlib", "--out-dir", tmp_path / "data")
    options = [
        "--preset", "tiny", "--data", tmp_path / "data", "--out-dir", tmp_path / "run", "--n-layer", 2,
        "--log-interval", 1, "--eval-tokens", 4096, "--fp8-amax-history-len", 16]
    run("train.py", *options, "--max-steps", 20, reference=reference_first)
    logits = []
    for reference in (reference_first, not reference_first):
        run("-c", LOGITS, tmp_path / "run", tmp_path / "logits.pt", reference=reference)
        logits.append(torch.load(tmp_path / "logits.pt", weights_only=True))
    assert (logits[0] - logits[1]).norm() <= 2.0**-5 * logits[0].norm()
    run("train.py", *options, "--resume", "--max-steps", 24, reference=not reference_first)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 24 and abs(losses[20] - losses[19]) < 0.3
