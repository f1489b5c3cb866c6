"""te_reference.TransformerLayer: TE's parameter names and defaults; on a GPU equality with TE's module."""

import math

import pytest
import torch

import te_reference as ref
from model_te_advanced import apply_rope, rope_tables

QKV = [f"{name}_{kind}" for kind in ("weight", "bias") for name in ("query", "key", "value")]
NORM, FC = ("layer_norm_weight", "layer_norm_bias"), ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
KEYS = {
    "self_attention.layernorm_qkv": [*NORM, *QKV], "self_attention.core_attention": [],
    "self_attention.proj": ["weight", "bias"], "layernorm_mlp": [*NORM, *FC]}
LAYOUTS = {"split": {}, "groups": {"fuse_qkv_params": True},
           "rows of q, k, v": {"fuse_qkv_params": True, "qkv_weight_interleaved": False}}
SIZES, NO_DROPOUT = (64, 128, 4, 2), {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def test_transformer_layer_has_tes_names_and_defaults():
    layer = ref.TransformerLayer(64, 128, 4)
    assert list(layer.state_dict()) == [
        f"{module}.{key}" for module, keys in KEYS.items() for key in [*keys, "_extra_state"]]
    assert (layer.hidden_dropout, layer.self_attention.core_attention.attention_dropout) == (0.1, 0.1)
    assert abs(layer.layernorm_mlp.fc2_weight.std().item() - 0.023) < 0.001
    angles = torch.outer(torch.arange(40.0), 1e4 ** (-torch.arange(8) / 8.0)).repeat(1, 2)[:, None, None]
    q = torch.randn(32, 2, 4, 16)
    expected = apply_rope(q.transpose(0, 1), *rope_tables(torch.arange(32), 16, 1e4)).transpose(0, 1)
    torch.testing.assert_close(layer._rotate(q, angles), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="layer_type='decoder'"):
        ref.TransformerLayer(64, 128, 4, layer_type="decoder")
    with pytest.raises(RuntimeError, match="Splitting QuantizedTensor"), ref.quantized_model_init():
        ref.TransformerLayer(64, 128, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("way", LAYOUTS)
@pytest.mark.parametrize("use_fp8", [False, True])
def test_transformer_layer_equals_tes(way, use_fp8):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

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
    for t, layer, recipe in zip((te, ref), layers, (Float8CurrentScaling(), ref.Float8CurrentScaling())):
        layer.load_state_dict(weights, strict=False)
        inp = x.clone().requires_grad_()
        with t.autocast(enabled=use_fp8, recipe=recipe):
            y = layer(inp, rotary_pos_emb=angles)
        y.backward(grad)
        results.append([y, inp.grad, torch.cat([p.grad.flatten() for p in layer.parameters()])])
    for name, bound, a, b in zip(("y", "dx", "dw"), (forward, backward, backward), *results):
        error = ((a - b).float().norm() / a.float().norm()).item()
        assert error <= math.sqrt(bound), f"{name}: {error:.1e}, bound {math.sqrt(bound):.1e}"
