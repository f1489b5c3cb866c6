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

    from bench.reference_vs_te import give_same_weights

FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}  # TE's name: PyTorch's type


def heavy_tailed(*shape, dtype):
    """Return random values over many orders of magnitude, with zeros and values beyond FP8's range."""
    x = torch.randn(shape, device="cuda") * torch.exp(3 * torch.randn(shape, device="cuda"))
    x.view(-1)[::97] = 0
    x.view(-1)[::1001] *= 1e6
    return x.to(dtype)


def relative_error(value, expected):
    value, expected = value.float(), expected.float()
    return ((value - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x[:, :-1], lambda x: 30 * (x / 30).tanh()])
def test_the_loss_of_logits_as_an_edit_changes_them(change):
    model = model_file("model_te_optimized", "te")
    logits = torch.randn(2, 9, 64, device="cuda", requires_grad=True)
    labels = torch.randint(64, change(logits).shape[:2], device="cuda")
    loss = model.cross_entropy(change(logits), labels)
    expected_loss = torch.nn.functional.cross_entropy(change(logits).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected_loss)
    [expected] = torch.autograd.grad(expected_loss, logits)
    loss.backward()
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_delayed_scaling_gives_the_same_bytes(name, dtype):
    for factor in (1.0, 3.7, 1234.567, 1e-3, 2.0**-20):
        scale = torch.tensor([factor], device="cuda")
        x = heavy_tailed(512, 256, dtype=dtype)
        x[3, 4] = math.nan
        x[5, 6] = 1e30
        x[7, 8] = -1e30
        amax = torch.zeros(1, device="cuda")
        theirs = Float8Quantizer(scale, amax, getattr(tex.DType, name), columnwise=True)(x)
        ours = ref.quantize(x, scale, FORMATS[name])
        assert torch.equal(theirs._data, ours.view(torch.uint8))
        assert torch.equal(theirs._transpose, ours.view(torch.uint8).T)
        torch.testing.assert_close(
            theirs.dequantize(dtype=torch.float32), ref.dequantize(ours, scale),
            rtol=0, atol=0, equal_nan=True)
        assert amax.item() == ref.amax_of(x).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_current_scaling_gives_the_same_bytes_and_scales(name, dtype, power_of_2):
    fp8 = FORMATS[name]
    for factor in (1e-30, 1e-4, 1.0, 77.7, 1e20):
        x = heavy_tailed(256, 128, dtype=dtype) * factor
        quantizer = Float8CurrentScalingQuantizer(
            getattr(tex.DType, name), device="cuda", force_pow_2_scales=power_of_2)
        quantizer.set_usage(rowwise=True, columnwise=False)
        theirs = quantizer(x)
        scale = ref.current_scale(ref.amax_of(x), ref.FP8_MAX[fp8], power_of_2)
        assert theirs._scale_inv.item() == scale.reciprocal().item()
        assert torch.equal(theirs._data, ref.quantize(x, scale, fp8).view(torch.uint8))


def random_amaxes(n):
    """Return amaxes of n tensors, with special values; some of 0, of tensors that a step does not use."""
    amax = torch.exp(8 * torch.randn(n, device="cuda"))
    special = [0.0, torch.inf, torch.nan, 1e-38, 1e-44, 3e38, 7.0, 14.0]
    amax[:8] = torch.tensor(special, device="cuda")
    unused = 8 + torch.randint(0, n - 8, (500,), device="cuda")
    amax[unused] = 0.0
    return amax


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_histories_roll_the_same(algo, margin, length, name):
    n = 4096
    recipe = ref.DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algo)
    state = ref._ScalingState(recipe, n, "cuda")
    state.scale.fill_(5.0)
    history, scale = state.amax_history.clone(), state.scale.clone()  # TE's
    for _ in range(6):
        amax = random_amaxes(n)
        history[0] = amax
        state.amax_history[0] = amax
        tex.fused_amax_and_scale_update_after_reduction(
            amax.clone(), [history], [scale], algo, getattr(tex.DType, name), margin)
        state.roll(recipe, ref.FP8_MAX[FORMATS[name]])
        assert torch.equal(state.scale, scale)
        assert torch.equal(state.amax_history.nan_to_num(nan=-1), history.nan_to_num(nan=-1))


# ---------------------------------------------------------------- modules

MODULES = {  # name: (class, its sizes, its arguments)
    "Linear": ("Linear", (256, 512), {}),
    "LayerNormLinear": ("LayerNormLinear", (256, 512), {}),
    "LayerNormLinear RMSNorm": (
        "LayerNormLinear", (256, 512), dict(normalization="RMSNorm", zero_centered_gamma=True, bias=False)),
    "LayerNormLinear returning": (
        "LayerNormLinear", (256, 512), dict(return_layernorm_output=True, return_bias=True)),
    "LayerNormMLP gelu": ("LayerNormMLP", (256, 512), dict(activation="gelu")),
    "LayerNormMLP geglu": ("LayerNormMLP", (256, 512), dict(activation="geglu")),
    "LayerNormMLP relu": ("LayerNormMLP", (256, 512), dict(activation="relu")),
    "LayerNormMLP srelu": ("LayerNormMLP", (256, 512), dict(activation="srelu")),
    "LayerNormMLP swiglu": ("LayerNormMLP", (256, 512), dict(activation="swiglu")),
}
RECIPES = {  # functions of the module that has TE's recipes, or te_reference's
    "none": lambda recipe: None,
    "delayed": lambda recipe: recipe.DelayedScaling(amax_history_len=3),
    "delayed e4m3 most_recent": lambda recipe: recipe.DelayedScaling(
        amax_history_len=3, margin=1, fp8_format=recipe.Format.E4M3, amax_compute_algo="most_recent"),
    "current": lambda recipe: recipe.Float8CurrentScaling(),
    "current e4m3": lambda recipe: recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3),
}


def make_module(library, name):
    class_name, sizes, arguments = MODULES[name]
    return getattr(library, class_name)(*sizes, **arguments, params_dtype=torch.bfloat16)


def forward(library, module, recipe, x, way, step):
    """Run a forward pass, in one of the ways of test_modules_agree_over_several_steps; return the output."""
    enabled = recipe is not None
    if way == "evaluation":
        with torch.no_grad(), library.autocast(enabled=True, recipe=recipe):
            module(2 * x)
    with library.autocast(enabled=enabled, recipe=recipe):
        if way == "checkpoint":
            out = library.checkpoint(module, x)
        elif way == "micro-batches":
            out = module(x, is_first_microbatch=step % 2 == 0)
        else:
            out = module(x)
    return out[0] if isinstance(out, tuple) else out


def backward(module, x, out, grad):
    """Run the backward pass; return output and gradients by name."""
    out.backward(grad)
    results = {"y": out, "dx": x.grad}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            results[f"d{name}"] = parameter.grad
    return results


def assert_same_fp8_state(theirs, ours, rtol):
    for key in ("scaling_fwd", "scaling_bwd"):
        if hasattr(theirs.fp8_meta.get(key), "amax_history"):  # of delayed scaling
            expected, found = theirs.fp8_meta[key], ours.fp8_meta[key]
            torch.testing.assert_close(found.amax_history, expected.amax_history, rtol=rtol, atol=0)
            torch.testing.assert_close(found.scale, expected.scale, rtol=rtol, atol=0)


@pytest.mark.parametrize("way", ["plain", "micro-batches", "checkpoint", "evaluation"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", MODULES)
def test_modules_agree_over_several_steps(module, recipe, way):
    if way != "plain" and (recipe != "delayed" or module not in ("Linear", "LayerNormMLP gelu")):
        pytest.skip("the FP8 state is updated in the same way in the others")
    # Up to the activation all operands are equal and only the outputs are rounded to bfloat16: 2^-8. After
    # it, and after a dgrad, bfloat16 values differ by up to one unit, d = 2^-8. That moves a fraction d / s
    # of the FP8 values by one step, s = 2^-2 in E5M2, which gives a relative error of sqrt(d · s) = 2^-5. dx
    # depends on two such operands: sqrt(2) · 2^-5.
    bound = 2.0**-4.5 if "MLP" in module else 2.0**-8
    # Norms differ in summation order. The amax of an activation can be a product of two bfloat16 values, each
    # off by one unit (up to 2^-7).
    if module == "Linear":
        state_rtol = 0
    elif "MLP" in module:
        state_rtol = 2.0**-6
    else:
        state_rtol = 1e-6
    theirs, ours = make_module(te, module), make_module(ref, module)
    give_same_weights(theirs, ours)
    their_recipe, our_recipe = RECIPES[recipe](te_recipe), RECIPES[recipe](ref)
    for step in range(6):
        x = torch.randn(64, 4, 256, device="cuda") * torch.exp(torch.randn(256, device="cuda"))
        x = x.bfloat16()
        their_x, our_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        theirs.zero_grad()
        ours.zero_grad()
        their_out = forward(te, theirs, their_recipe, their_x, way, step)
        our_out = forward(ref, ours, our_recipe, our_x, way, step)
        grad = torch.randn_like(their_out) * 1e-3
        expected = backward(theirs, their_x, their_out, grad)
        found = backward(ours, our_x, our_out, grad)
        assert found.keys() == expected.keys()
        for name in expected:
            error = relative_error(found[name], expected[name])
            assert error <= bound, f"step {step}, {name}: relative error {error:.1e}"
        assert_same_fp8_state(theirs, ours, state_rtol)


LAYOUTS = {
    "split": {}, "groups": {"fuse_qkv_params": True},
    "rows of q, k, v": {"fuse_qkv_params": True, "qkv_weight_interleaved": False}}


def make_layer(library, layout):
    return library.TransformerLayer(
        64, 128, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
        **LAYOUTS[layout])


def rotary_angles(length, width):
    """Return the angles of RoPE, float32 (length, 1, 1, width)."""
    frequencies = 1e4 ** (-torch.arange(width // 2) / (width / 2))
    angles = torch.outer(torch.arange(float(length)), frequencies).repeat(1, 2)
    return angles[:, None, None].cuda()


def pass_of(layer, library, recipe, use_fp8, x, grad):
    """Run both passes of a layer -> {"y": …, "dx": …, "dw": gradients of all parameters}."""
    x = x.clone().requires_grad_()
    with library.autocast(enabled=use_fp8, recipe=recipe):
        y = layer(x, rotary_pos_emb=rotary_angles(32, 16))
    y.backward(grad)
    gradients = [parameter.grad.flatten() for parameter in layer.parameters()]
    return {"y": y, "dx": x.grad, "dw": torch.cat(gradients)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use_fp8", [False, True])
def test_transformer_layer_equals_tes(layout, use_fp8):
    theirs, ours = make_layer(te, layout), make_layer(ref, layout)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    names = [name for name, _ in theirs.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    weights = {}
    for name, value in theirs.state_dict().items():
        if "_extra_state" not in name:
            weights[name] = value + 0.1 * torch.randn_like(value)
    theirs.load_state_dict(weights, strict=False)
    ours.load_state_dict(weights, strict=False)

    x, grad = torch.randn(2, 32, 4, 64, device="cuda", dtype=torch.bfloat16)
    expected = pass_of(theirs, te, te_recipe.Float8CurrentScaling(), use_fp8, x, grad)
    found = pass_of(ours, ref, ref.Float8CurrentScaling(), use_fp8, x, grad)
    # Rounding with unit roundoff u has an RMS error of u / sqrt(3). R roundings in sequence give sqrt(R / 3)
    # u, and the difference of two such results has twice the variance. BF16 (u = 2^-8) rounds 13 times: norm,
    # QKV, RoPE, scores, probabilities, context, projection, residual, norm, fc1, GELU, fc2, residual; and
    # again in the backward pass. FP8 rounds the inputs of four GEMMs (E4M3, u = 2^-4) and their four output
    # gradients (E5M2, u = 2^-3).
    forward_variance = 2 / 3 * 13 * 2.0**-16
    backward_variance = 2 * forward_variance
    if use_fp8:
        forward_variance += 2 / 3 * 4 * 2.0**-8
        backward_variance = 2 * forward_variance + 2 / 3 * 4 * 2.0**-6
    bounds = {
        "y": math.sqrt(forward_variance), "dx": math.sqrt(backward_variance),
        "dw": math.sqrt(backward_variance)}
    for name, bound in bounds.items():
        error = relative_error(found[name], expected[name])
        assert error <= bound, f"{name}: {error:.1e}, bound {bound:.1e}"


# ---------------------------------------------------------------- models and checkpoints

def model_on(engine):
    """Return a small model of model_te_optimized.py on an engine."""
    module = model_file("model_te_optimized", engine)
    config = module.OptimizedConfig(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, use_fp8=True)
    return module.OptimizedGPT2Model(config).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("source, target", [
    ("te", "reference"), ("reference", "te"), ("te", "fast"), ("fast", "te"), ("fast", "reference")])
def test_engines_exchange_state_dicts_with_fp8_state(source, target, tmp_path):
    model, other = model_on(source), model_on(target)
    tokens = torch.randint(128, (4, 32), device="cuda")
    for _ in range(4):
        model(tokens, tokens).backward()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    state, other_state = model.state_dict(), other.state_dict()
    assert state.keys() == other_state.keys()
    assert any("scaling_bwd.scale" in name for name in state)
    for name in state:
        assert torch.equal(state[name], other_state[name]), name
    with torch.no_grad():
        assert relative_error(other(tokens), model(tokens)) <= 2.0**-4


LOGITS = """
import sys, torch
from nanote import checkpoint, models, recipes
from nanote.config import TrainConfig
folder = checkpoint.find(sys.argv[1])
meta = checkpoint.read_meta(folder)
config = models.make_model_config(meta["model"], meta["model_config"])
model = models.instantiate(meta["model"], config, device=torch.device("cuda"), dtype=torch.bfloat16)
model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe="delayed", fp8_amax_history_len=16))
checkpoint.load(folder, model)
stored = checkpoint.read_tensors(folder, ("fp8.",))
recipes.set_state(model, {name.removeprefix("fp8."): value for name, value in stored.items()})
x = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()
with torch.no_grad():
    torch.save(model.eval()(x).float().cpu(), sys.argv[2])
"""


def run(*arguments, on_reference=False):
    """Run a script on Transformer Engine, or on te_reference."""
    environment = {name: value for name, value in os.environ.items() if name != "NANOTE_ENGINE"}
    if on_reference:
        environment["NANOTE_ENGINE"] = "reference"
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("reference_first", [True, False])
def test_a_checkpoint_of_one_loads_in_the_other(tmp_path, reference_first):
    run("data.py", "stdlib", "--out-dir", tmp_path / "data")
    options = [
        "--preset", "tiny", "--data", tmp_path / "data", "--out-dir", tmp_path / "run", "--n-layer", 2,
        "--log-interval", 1, "--eval-tokens", 4096, "--fp8-amax-history-len", 16]
    run("train.py", *options, "--max-steps", 20, on_reference=reference_first)
    logits = []
    for on_reference in (reference_first, not reference_first):
        run("-c", LOGITS, tmp_path / "run", tmp_path / "logits.pt", on_reference=on_reference)
        logits.append(torch.load(tmp_path / "logits.pt", weights_only=True))
    assert relative_error(logits[1], logits[0]) <= 2.0**-5

    run("train.py", *options, "--resume", "--max-steps", 24, on_reference=not reference_first)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 24
    assert abs(losses[20] - losses[19]) < 0.3
