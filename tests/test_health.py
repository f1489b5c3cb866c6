"""nanote/health.py: amax, scale, saturated and flushed shares of each FP8 tensor, and their picture."""
import json
import math
from pathlib import Path

import pytest
import torch

from nanote import models, recipes
from nanote.health import plot, watch
from nanote.logs import read_metrics
from test_recipes import DEVICE, TE_FACTORIES, make, make_recipe, step


def look(model):
    with watch(model) as health:
        step(model)
    return health


# ---------------------------------------------------------------- the numbers

@pytest.mark.parametrize("name", models.MODELS)
def test_every_gemm_in_fp8_is_seen(name, skipped=1):
    model = make(name, fp8_skip_first=skipped)
    step(model, 2)
    found = look(model)
    assert {module.split(".")[1] for module in found if module.startswith("blocks")} == set("012"[skipped:])
    for tensors in found.values():
        gemms = ("fc1_", "fc2_") if "fc1_input" in tensors else ("",)
        kinds = ("input", "weight", "output_gradient")
        assert set(tensors) == {gemm + kind for gemm in gemms for kind in kinds}
        for tensor, values in tensors.items():
            assert values["amax"] > 0 and values["scale"] > 0
            assert (values["saturated"] is None) == (tensor in ("fc2_input", "fc1_output_gradient"))
    assert len(found) >= 3 * (3 - skipped)


PLACES = {  # of a tensor's scale in TE's state: direction and index
    "input": ("scaling_fwd", 0), "fc1_input": ("scaling_fwd", 0), "fc2_input": ("scaling_fwd", 3),
    "weight": ("scaling_fwd", 1), "fc1_weight": ("scaling_fwd", 1), "fc2_weight": ("scaling_fwd", 4),
    "output_gradient": ("scaling_bwd", 0),
    "fc1_output_gradient": ("scaling_bwd", 0), "fc2_output_gradient": ("scaling_bwd", 2)}


@pytest.mark.parametrize("options", [
    {}, {"gradient_checkpointing": True}, {"use_rmsnorm": True, "activation": "swiglu", "bias": False}])
def test_amax_and_scale_are_those_of_delayed_scaling(options):
    """The scale is that before the step. TE takes amax of a norm's BF16 output, the hook of float32."""
    model = make(**options)
    step(model, 2)
    before = recipes.get_state(model)
    found = look(model)
    after = recipes.get_state(model)
    tolerance = 1e-6 if recipes.IS_REFERENCE else 2**-8
    for module, tensors in found.items():
        for tensor, values in tensors.items():
            direction, index = PLACES[tensor]
            scale = before[f"{module}.{direction}.scale"][index].item()
            amax = after[f"{module}.{direction}.amax_history"][-1, index].item()
            assert values["scale"] == scale
            assert values["amax"] == pytest.approx(amax, rel=tolerance)


def test_shares_are_those_of_the_bytes():
    x = torch.randn(16, 64, device=DEVICE)
    x[0, :8] = 1000.0  # saturates: scales start at 1
    x[1, :16] = 1e-4  # becomes zero
    x[2, :4] = 0.0  # is zero
    x[3, :2] = 460.0  # rounds to 448
    model = torch.nn.Sequential(recipes.te.Linear(64, 32, bias=False)).to(DEVICE)
    with watch(model) as health, recipes.te.autocast(recipe=make_recipe()):
        model(x)
    values = health["0"]["input"]
    quantized = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    is_flushed = (quantized == 0) & (x != 0)
    flushed, nonzero = is_flushed.sum().item(), (x != 0).sum().item()
    assert (values["amax"], values["scale"], values["saturated"]) == (1000, 1, 8 / 1024)
    assert flushed >= 16
    assert values["flushed"] == pytest.approx(flushed / nonzero)
    assert "output_gradient" not in health["0"], "there was no backward pass"


@pytest.mark.parametrize("recipe, saturated", [
    ("block", 0.0), ("mxfp8", 0.0), (TE_FACTORIES + "current_scaling_factory", None)])
def test_other_recipes_have_an_amax_alone(recipe, saturated):
    if recipes.unsupported_reason(recipe):
        pytest.skip("this machine does not run it")
    values = look(make(recipe=recipe))["lm_head"]["weight"]
    assert values["amax"] > 0 and values["scale"] is values["flushed"] is None
    assert values["saturated"] == saturated


# ---------------------------------------------------------------- the picture

@pytest.mark.parametrize("recipe, value", [
    ("delayed", None), ("mxfp8", math.nan), ("delayed", math.inf), ("current", 0.0)])
def test_any_model_is_logged_read_and_drawn(tmp_path, recipe, value):
    model = make(recipe=recipe, n_layer=1)
    if value is not None:
        with torch.no_grad():
            model.blocks[0].attn.proj.weight.fill_(value)
    records = [{"step": number, "health": look(model)} for number in (100, 200)]
    log = Path(tmp_path, "fp8_health.jsonl")
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_metrics(log) == records
    plot(read_metrics(log), tmp_path / "fp8_health.png", "run", "auto")
    assert (tmp_path / "fp8_health.png").read_bytes().startswith(b"\x89PNG")
