"""The stand-in for Transformer Engine, against numbers that Transformer Engine gave on an H200 or that were worked out by hand.

Nothing here is computed by the code under test and then compared with itself: literals are TE 2.20's own results or follow from the
formats (E4M3 has 8 steps between two powers of two, E5M2 has 4), and what has a counterpart in plain PyTorch is compared with that.
"""

import copy
import math
import pickle
import subprocess
import sys
import types
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

import te_reference as te

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32_MAX = 3.4028234663852886e38
nan, inf = math.nan, math.inf


def delayed(history=4, **kwargs):
    return te.DelayedScaling(amax_history_len=history, **kwargs)


def diagonal(*values):
    """(16, 16), zero but for the first values of the diagonal: products of these can be done in the head."""
    return torch.diag(torch.tensor(list(values) + [0.0] * (16 - len(values))))


def linear(weight, **kwargs):
    kwargs.setdefault("bias", False)
    layer = te.Linear(16, 16, device="cpu", **kwargs)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def step(module, x, dy, recipe, **kwargs):
    """One forward and backward in FP8 -> (y, dx, dw)."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with te.autocast(recipe=recipe):
        y = module(x, **kwargs)
    y.backward(dy)
    return y.detach(), x.grad, module.weight.grad


def fwd(module):
    return module.fp8_meta["scaling_fwd"]


def bwd(module):
    return module.fp8_meta["scaling_bwd"]


def equal_bits(a, b):
    return torch.equal(a.nan_to_num(nan=-7.0), torch.as_tensor(b).nan_to_num(nan=-7.0))


# Casting and scales


@pytest.mark.parametrize("dtype, expected", [
    (E4M3, [127, 126, 254, 128, 0, 0, 126, 254, 126, 126, 0, 0, 2]),
    (E5M2, [127, 123, 251, 128, 0, 0, 96, 251, 95, 95, 20, 20, 26]),
])
def test_quantized_bytes(dtype, expected):
    x = torch.tensor([nan, inf, -inf, -0.0, 0.0, 1e-30, 500, -1e9, 464, 463.9, 2**-10, 2**-10, 1.5 * 2**-9])
    assert te.quantize(x, torch.tensor(1.0), dtype).view(torch.uint8).tolist() == expected


AMAX = [1.7, 0, inf, nan, 1e-38, 1e-44]
OLDER = [9.0, 0, 2, 3, 0, 0]


@pytest.mark.parametrize("length, algo, margin, expected", [
    (1, "max", 0, [263.5294189453125, 5, 5, 5, FP32_MAX, FP32_MAX]),
    (1, "most_recent", 0, [263.5294189453125, 5, 5, 5, FP32_MAX, FP32_MAX]),
    (1, "max", 1, [131.76470947265625, 5, 5, 5, FP32_MAX, FP32_MAX]),
    (1, "most_recent", 2, [65.88235473632812, 5, 5, 5, FP32_MAX, FP32_MAX]),
    (4, "max", 0, [49.77777862548828, 5, 5, 149.3333282470703, FP32_MAX, FP32_MAX]),
    (4, "max", 1, [24.88888931274414, 5, 5, 74.66666412353516, FP32_MAX, FP32_MAX]),
    (4, "most_recent", 0, [263.5294189453125, 5, 5, 5, FP32_MAX, FP32_MAX]),
])
def test_delayed_scale_and_history_after_a_step(length, algo, margin, expected):
    recipe = delayed(length, amax_compute_algo=algo, margin=margin)
    state = te._ScalingState(recipe, 6, "cpu")
    state.scale.fill_(5)
    state.amax_history[:] = torch.tensor([AMAX] + [OLDER] * (length - 1))
    state.roll(recipe, 448.0)
    assert state.scale.tolist() == torch.tensor(expected).tolist()
    # The second tensor was not used in this step: its column is not rolled, which shows in the older rows alone (0 there too).
    rows = [[0.0] * 6] if length == 1 else [[0.0] * 6, OLDER, OLDER, AMAX]
    assert equal_bits(state.amax_history, torch.tensor(rows))


def test_custom_amax_and_scale_functions():
    recipe = delayed(2, amax_compute_algo=lambda history: history.amax(0) * 2,
                     scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: amax + scale + fp8_max)
    state = te._ScalingState(recipe, 1, "cpu")
    state.amax_history[:] = torch.tensor([[3.0], [4.0]])
    state.roll(recipe, 448.0)
    assert state.scale.tolist() == [8 + 1 + 448] and state.amax_history.tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize("x, scale, scale_inv, expected", [
    ([0.0, 0.0], 1.0, 1.0, [0, 0]),
    ([inf, 1.5], 1.0, 1.0, [126, 60]),
    ([nan, 0.5], 896.0, 0.0011160714784637094, [127, 126]),
    ([1e-38, 0.0], FP32_MAX, 2.938735877055719e-39, [68, 0]),  # 1e-38 · FP32_MAX = 3.403: E4M3 3.5
    ([1e-44, 0.0], FP32_MAX, 2.938735877055719e-39, [0, 0]),
    ([1.7, 0.0], 263.5294189453125, 0.0037946428637951612, [126, 0]),
])
def test_current_scaling(x, scale, scale_inv, expected):
    x = torch.tensor(x)
    s = te.current_scale(te.amax_of(x), 448.0)
    assert s.item() == scale and s.reciprocal().item() == pytest.approx(scale_inv, rel=1e-7)
    assert te.quantize(x, s, E4M3).view(torch.uint8).tolist() == expected


@pytest.mark.parametrize("amax, expected", [(1.7, 256.0), (1.75, 256.0), (1.8, 128.0), (0.0, 1.0), (1e-44, 2.0**127)])
def test_power_of_two_scales_round_down(amax, expected):
    assert te.current_scale(torch.tensor(amax), 448.0, power_of_2=True).item() == expected


def test_current_scaling_in_a_layer_has_no_state_and_uses_this_steps_amax():
    layer = linear(diagonal(0.3, 0.3))
    y, _, _ = step(layer, diagonal(1.1, 0.3), diagonal(1.0), te.Float8CurrentScaling())
    assert y.diagonal()[:2].tolist() == pytest.approx([0.33, 120 / 448 * 1.1 * 0.3], rel=1e-6)  # 0.3 · 448/1.1 = 122.2 -> 120
    y, _, _ = step(layer, diagonal(1.1, 0.3), diagonal(1.0), te.Float8CurrentScaling(use_power_2_scales=True))
    # powers of two leave the grid where it was: 1.1 -> 1.125 and 0.3 -> 0.3125, as with scale 1
    assert y.diagonal()[:2].tolist() == [0.3515625, 0.09765625]
    assert layer.state_dict()["_extra_state"].numel() == 0


# The three products


@pytest.mark.parametrize("fp8_format, dx1, dw1, dx2, dw2, bwd_scale", [
    # dy = 0.28, 0.116. E5M2: 0.25, 0.109375. E4M3: 0.28125, 0.1171875.
    (te.Format.HYBRID, [0.078125, 0.0341796875], [0.28125, 0.0341796875], [0.084, 0.036], [0.308, 0.12 * 0.2946428571], 204800.0),
    (te.Format.E4M3, [0.087890625, 0.03662109375], [0.31640625, 0.03662109375], [0.084, 0.036], [0.308, 0.12 * 0.2946428571], 1600.0),
])
def test_all_three_products_are_quantized(fp8_format, dx1, dw1, dx2, dw2, bwd_scale):
    layer, x, dy = linear(diagonal(0.3, 0.3)), diagonal(1.1, 0.3), diagonal(0.28, 0.116)
    y, dx, dw = step(layer, x, dy, delayed(fp8_format=fp8_format))  # scale 1: 1.1 -> 1.125, 0.3 -> 0.3125
    assert y.diagonal()[:2].tolist() == [0.3515625, 0.09765625]
    assert dx.diagonal()[:2].tolist() == dx1 and dw.diagonal()[:2].tolist() == dw1
    assert fwd(layer).scale.tolist() == pytest.approx([448 / 1.1, 448 / 0.3, 1.0], rel=1e-6)
    assert bwd(layer).scale.tolist() == pytest.approx([bwd_scale, 1.0], rel=1e-6)
    # Now each tensor's largest value falls on the largest of FP8. x: 0.3 · 448/1.1 = 122.2 -> 120 -> 0.29464. dy: 0.116 -> 0.12 in both formats.
    y, dx, dw = step(layer, x, dy, delayed(fp8_format=fp8_format))
    assert y.diagonal()[:2].tolist() == pytest.approx([0.33, 0.3 * 0.2946428571], rel=1e-6)
    assert dx.diagonal()[:2].tolist() == pytest.approx(dx2, rel=1e-6) and dw.diagonal()[:2].tolist() == pytest.approx(dw2, rel=1e-6)


def test_both_layers_of_the_mlp_are_quantized():
    mlp = te.LayerNormMLP(16, 16, bias=False, normalization="RMSNorm", activation="relu", device="cpu")
    weight = 0.3 * torch.eye(16) + 0.04 * torch.eye(16).roll(1, 1)  # E4M3: 0.3125 and 0.0390625
    with torch.no_grad():
        mlp.fc1_weight.copy_(weight)
        mlp.fc2_weight.copy_(weight)
    with te.autocast(recipe=delayed()):
        y = mlp(torch.ones(16, 16))  # the norm gives 0.999995 -> 1; fc1 0.3515625 -> 0.34375; fc2 0.34375 · 0.3515625
    assert y.unique().tolist() == [0.120849609375]
    y.backward(torch.full((16, 16), 0.28))  # -> 0.25; through fc2 0.25 · 0.3515625 = 0.0879 -> 0.09375; times ones and 0.34375, over 16 rows
    assert mlp.fc1_weight.grad.unique().tolist() == [1.5] and mlp.fc2_weight.grad.unique().tolist() == [1.375]
    assert fwd(mlp).amax_history[-1].tolist() == pytest.approx([0.999995, 0.3, 0, 0.3515625, 0.3, 0], rel=1e-6)
    assert bwd(mlp).amax_history[-1].tolist() == pytest.approx([0.28, 0, 0.087890625, 0], rel=1e-6)


def test_bias_is_rounded_to_bfloat16_and_its_gradient_is_not_quantized():
    layer = linear(diagonal(1.0), bias=True)
    with torch.no_grad():
        layer.bias.fill_(0.3)
    y, _, _ = step(layer, torch.zeros(16, 16), torch.full((16, 16), 0.28), delayed())
    assert y.unique().tolist() == [0.30078125]
    assert layer.bias.grad.tolist() == pytest.approx([16 * 0.28] * 16, rel=1e-6)  # 4.0 if dy had been quantised


# When histories roll


def test_amax_is_a_running_maximum_within_a_region():
    layer = linear(diagonal(0.5))
    with te.autocast(recipe=delayed()):
        for largest, expected in ((7.0, 7.0), (3.0, 7.0), (nan, 7.0), (inf, inf)):
            layer(diagonal(largest, 1.0))
            assert fwd(layer).amax_history[0].tolist() == [expected, 0.5, 0.0]
    assert fwd(layer).amax_history[:, 0].tolist() == [0, 0, 0, inf] and fwd(layer).scale.tolist() == [1, 896, 1]


def test_forward_histories_roll_at_the_end_of_the_outermost_region_when_training():
    layer, recipe = linear(diagonal(0.5)), delayed()
    with te.autocast(recipe=recipe):
        with te.autocast(recipe=recipe):
            layer(diagonal(2.0))
        assert fwd(layer).amax_history[:, 0].tolist() == [2, 0, 0, 0] and fwd(layer).scale[0] == 1
    assert fwd(layer).amax_history[:, 0].tolist() == [0, 0, 0, 2] and fwd(layer).scale[0] == 224
    layer.eval()  # the mode makes no difference, whether gradients are on does
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(diagonal(7.0))
    assert fwd(layer).amax_history[:, 0].tolist() == [7, 0, 0, 2] and fwd(layer).scale[0] == 224
    with te.autocast(recipe=recipe):
        layer(diagonal(1.0))
    assert fwd(layer).amax_history[:, 0].tolist() == [0, 0, 2, 7] and fwd(layer).scale[0] == 64


def test_backward_histories_roll_once_after_the_first_modules_backward():
    first, second, seen = linear(diagonal(0.5)), linear(diagonal(0.5)), []
    with te.autocast(recipe=delayed()):
        hidden = first(diagonal(1.0).requires_grad_())
        hidden.register_hook(lambda _: seen.append(bwd(second).amax_history[:, 0].tolist()))
        y = second(hidden)
    y.backward(diagonal(4.0))
    assert seen == [[4, 0, 0, 0]]  # between the two backwards nothing had rolled
    assert bwd(second).amax_history[:, 0].tolist() == [0, 0, 0, 4] and bwd(second).scale.tolist() == [14336, 1]
    assert bwd(first).amax_history[:, 0].tolist() == [0, 0, 0, 2] and bwd(first).scale.tolist() == [28672, 1]


def test_is_first_microbatch_keeps_the_quantized_weight():
    layer, x, dy = linear(diagonal(0.3)), diagonal(1.0), diagonal(1.0)
    y = [step(layer, x, dy, delayed(), is_first_microbatch=None)[0][0, 0].item()]
    y.append(step(layer, x, dy, delayed(), is_first_microbatch=True)[0][0, 0].item())
    with torch.no_grad():
        layer.weight.fill_(100.0)
    y.append(step(layer, x, dy, delayed(), is_first_microbatch=False)[0][0, 0].item())
    assert y == pytest.approx([0.3125, 0.3, 0.3])
    # Not quantised, so not rolled; the input was.
    assert fwd(layer).amax_history[:, 1].tolist() == pytest.approx([0, 0, 0.3, 0.3]) and fwd(layer).scale[1].item() == pytest.approx(448 / 0.3)
    assert fwd(layer).amax_history[:, 0].tolist() == [0, 1, 1, 1]
    assert step(layer, x, dy, delayed(), is_first_microbatch=None)[0][0, 0].item() == pytest.approx(0.3)  # 100 saturates at the old scale
    assert step(layer, x, dy, delayed(), is_first_microbatch=True)[0][0, 0].item() == pytest.approx(100)


def test_a_disabled_region_inside_an_enabled_one():
    outer, inner, after = (linear(torch.randn(16, 16)) for _ in range(3))
    x = torch.randn(16, 16)
    with te.autocast(recipe=delayed()):
        h = outer(x)
        with te.autocast(enabled=False):
            y = inner(h)
        z = after(y)
    assert torch.equal(y, h @ inner.weight.T) and "scaling_fwd" not in inner.fp8_meta
    assert not torch.equal(h, x @ outer.weight.T) and not torch.equal(z, y @ after.weight.T)
    assert torch.equal(outer(x), x @ outer.weight.T)  # and outside, FP8 is off again


@pytest.mark.parametrize("recipe", [delayed(), te.Float8CurrentScaling()])
def test_checkpoint_changes_nothing(recipe):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.out = te.LayerNormMLP(16, 32, device="cpu"), te.Linear(16, 16, device="cpu")

        def forward(self, x):
            return x + self.out(F.dropout(self.mlp(x), 0.5))

    def train(use_checkpoint):
        torch.manual_seed(1)
        blocks, seen = [Block(), Block()], []
        for i in range(4):
            x = (torch.randn(16, 16) * (i + 1)).requires_grad_()  # growing: the scale of this step and the next differ
            h = x
            with te.autocast(recipe=recipe):
                for block in blocks:
                    h = te.checkpoint(block, h) if use_checkpoint else block(h)
            h.square().sum().backward()
            seen += [h.detach(), x.grad]
            for block in blocks:
                for parameter in block.parameters():
                    seen.append(parameter.grad.clone())
                    parameter.data -= 0.1 * parameter.grad
                    parameter.grad = None
                for module in (block.mlp, block.out) if isinstance(recipe, te.DelayedScaling) else ():
                    seen += [t.clone() for s in (fwd(module), bwd(module)) for t in (s.scale, s.amax_history)]
        return seen

    plain, checkpointed = train(False), train(True)
    assert len(plain) == len(checkpointed) and all(torch.equal(a, b) for a, b in zip(plain, checkpointed))


def test_changing_the_recipe():
    layer, x, dy = linear(diagonal(0.3)), diagonal(1.1), diagonal(1.0)
    for _ in range(2):
        step(layer, x, dy, delayed(4))
    step(layer, x, dy, delayed(6))
    # TE keeps the first rows and appends zeros, although the newest row was the last
    assert fwd(layer).amax_history[:, 0].tolist() == pytest.approx([0, 1.1, 1.1, 0, 0, 1.1])
    step(layer, x, dy, delayed(3))
    assert fwd(layer).amax_history[:, 0].tolist() == pytest.approx([0, 1.1, 1.1])
    with pytest.warns(UserWarning, match="Recipe type changed from DelayedScaling to Float8CurrentScaling"):
        y, _, _ = step(layer, x, dy, te.Float8CurrentScaling())
    assert y[0, 0].item() == pytest.approx(0.33)
    with pytest.warns(UserWarning, match="Recipe type changed"):
        y, _, _ = step(layer, x, dy, delayed())
    assert y[0, 0].item() == 0.3515625  # from scale 1 again
    assert step(layer, x, dy, delayed())[0][0, 0].item() == pytest.approx(0.33)


# Modules without FP8


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms(zero_centered):
    x, gamma, beta = torch.randn(4, 16) * 3, torch.rand(16), torch.randn(16)
    layer_norm = te.LayerNorm(16, zero_centered_gamma=zero_centered, device="cpu")
    rms_norm = te.RMSNorm(16, eps=1e-3, zero_centered_gamma=zero_centered, device="cpu")
    assert layer_norm.weight.unique().tolist() == rms_norm.weight.unique().tolist() == [0.0 if zero_centered else 1.0]
    torch.testing.assert_close(layer_norm(x), F.layer_norm(x, (16,)))  # as made, both are plain norms
    for norm in (layer_norm, rms_norm):
        norm.weight.data.copy_(gamma - 1 if zero_centered else gamma)
    layer_norm.bias.data.copy_(beta)
    torch.testing.assert_close(layer_norm(x), F.layer_norm(x, (16,), gamma, beta))
    torch.testing.assert_close(rms_norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gamma)
    assert layer_norm.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def plain_norm(module, x):
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, (16,), module.layer_norm_weight, 1e-5)
    return F.layer_norm(x, (16,), module.layer_norm_weight, module.layer_norm_bias, 1e-5)


def randomized(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_layernorm_linear_and_its_extra_outputs(normalization, bias):
    x = torch.randn(2, 3, 16)  # no FP8, no rule about shapes
    module = randomized(te.LayerNormLinear(16, 24, bias=bias, normalization=normalization, device="cpu"))
    normed = plain_norm(module, x)
    expected = F.linear(normed, module.weight, module.bias if bias else None)
    torch.testing.assert_close(module(x), expected)
    module.return_layernorm_output = True
    torch.testing.assert_close(module(x), (expected, normed))
    module.return_bias = True  # y without the bias, the bias, the norm's output
    y, b, n = module(x)
    torch.testing.assert_close((y, n), (F.linear(normed, module.weight), normed))
    assert torch.equal(b, module.bias) and b.numel() == (24 if bias else 0)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "geglu", "relu", "srelu", "swiglu"])
def test_layernorm_mlp_is_its_parts(normalization, bias, activation):
    module = randomized(te.LayerNormMLP(16, 32, bias=bias, normalization=normalization, activation=activation, device="cpu"))
    x = torch.randn(2, 3, 16)
    h = F.linear(plain_norm(module, x), module.fc1_weight, module.fc1_bias if bias else None)
    assert h.shape[-1] == (64 if activation.endswith("glu") else 32)
    gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    h = {"gelu": gelu, "relu": h.clamp(min=0), "srelu": h.clamp(min=0) ** 2, "geglu": gelu[..., :32] * h[..., 32:],
         "swiglu": h[..., :32] * torch.sigmoid(h[..., :32]) * h[..., 32:]}[activation]
    torch.testing.assert_close(module(x), F.linear(h, module.fc2_weight, module.fc2_bias if bias else None), rtol=1e-5, atol=1e-4)
    module.return_bias = module.return_layernorm_output = True
    y, b, normed = module(x)
    torch.testing.assert_close((y, normed), (F.linear(h, module.fc2_weight), plain_norm(module, x)), rtol=1e-5, atol=1e-4)
    assert torch.equal(b, module.fc2_bias)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="normalization='Batch'"):
        te.LayerNormLinear(16, 16, normalization="Batch", device="cpu")
    with pytest.raises(NotImplementedError, match="tanh"):
        te.LayerNormMLP(16, 16, activation="tanh", device="cpu")
    with pytest.raises(ValueError, match="E5M2"):
        te.DelayedScaling(fp8_format=te.Format.E5M2)
    with pytest.raises(TypeError, match="Data types for parameters must match"):
        te.Linear(16, 16, device="cpu")(torch.zeros(16, 16, dtype=torch.bfloat16))


def test_rows_and_columns_that_fp8_can_take():
    layer, narrow = linear(diagonal(1.0)), te.Linear(24, 16, device="cpu")
    with te.autocast(recipe=delayed()):
        layer(torch.zeros(2, 8, 16))  # 16 rows
        with pytest.raises(ValueError, match="divisible by 16"):
            narrow(torch.zeros(16, 24))
        with pytest.raises(ValueError, match="divisible by 8"):
            layer(torch.zeros(12, 16))
        with pytest.raises(ValueError, match="divisible by 16"):  # 8 rows would do, but for the weight gradient
            layer(torch.zeros(8, 16))
        with torch.no_grad():
            assert layer(torch.ones(8, 16)).shape == (8, 16)


def test_attention():
    def reference(q, k, v, causal):  # (B, S, H, D), one position at a time
        out = torch.zeros_like(q)
        for i in range(q.shape[1]):
            seen = i + 1 if causal else k.shape[1]
            weights = torch.einsum("bhd,bshd->bhs", q[:, i], k[:, :seen]).div(math.sqrt(8)).softmax(-1)
            out[:, i] = torch.einsum("bhs,bshd->bhd", weights, v[:, :seen])
        return out.flatten(2)

    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    repeated = [t.repeat_interleave(2, dim=2) for t in (k, v)]
    for mask in ("causal", "no_mask"):
        expected = reference(q, *repeated, mask == "causal")
        bshd = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd", attn_mask_type=mask)
        sbhd = te.DotProductAttention(4, 8, num_gqa_groups=2, attn_mask_type=mask)  # TE's default format
        torch.testing.assert_close(bshd(q, k, v), expected)
        torch.testing.assert_close(sbhd(*(t.transpose(0, 1) for t in (q, k, v))), expected.transpose(0, 1))
        torch.testing.assert_close(te.DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=mask)(q, *repeated), expected)


def test_cross_entropy():
    logits = torch.zeros(2, 2, 4)
    logits[0, 0] = torch.tensor([0, 0, 0, 1.0986123])  # e = 3: probabilities 1/6, 1/6, 1/6, 1/2
    labels = torch.tensor([[3, 0], [-100, 1]])
    losses = te.parallel_cross_entropy(logits.bfloat16().float(), labels)
    assert losses.dtype == torch.float32 and losses.tolist() == [pytest.approx([math.log(2), math.log(4)], abs=2e-3), pytest.approx([0, math.log(4)])]
    mean = te.parallel_cross_entropy(logits, labels, reduce_loss=True)
    assert mean.item() == pytest.approx((math.log(2) + 2 * math.log(4)) / 3)  # the ignored one does not count
    assert te.parallel_cross_entropy(logits, torch.full((2, 2), -100), reduce_loss=True).item() == 0


# State


KEYS = {
    "linear": (lambda: te.Linear(16, 16, device="cpu"), "weight bias"),
    "layer norm": (lambda: te.LayerNorm(16, device="cpu"), "weight bias"),
    "rms norm": (lambda: te.RMSNorm(16, device="cpu"), "weight"),
    "norm linear": (lambda: te.LayerNormLinear(16, 16, device="cpu"), "layer_norm_weight layer_norm_bias weight bias"),
    "rms linear": (lambda: te.LayerNormLinear(16, 16, normalization="RMSNorm", bias=False, device="cpu"), "layer_norm_weight weight"),
    "mlp": (lambda: te.LayerNormMLP(16, 32, device="cpu"), "layer_norm_weight layer_norm_bias fc1_weight fc1_bias fc2_weight fc2_bias"),
    "attention": (lambda: te.DotProductAttention(2, 8), ""),
}


@pytest.mark.parametrize("make, keys", KEYS.values(), ids=KEYS)
def test_state_dict_has_tes_keys(make, keys):
    state = make().state_dict()
    assert list(state) == keys.split() + ["_extra_state"]
    assert state["_extra_state"].numel() == 0 and state["_extra_state"].dtype == torch.uint8  # FP8 has not run


def test_state_dict_restores_scales_and_histories(tmp_path):
    old, x = te.LayerNormMLP(16, 32, device="cpu"), torch.randn(16, 16)
    for i in range(3):
        with te.autocast(recipe=delayed(4)):
            y = old(x * (i + 1))
        y.square().sum().backward()
    torch.save(old.state_dict(), tmp_path / "state.pt")
    new = te.LayerNormMLP(16, 32, device="cpu")
    new.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for state, expected in ((fwd(new), fwd(old)), (bwd(new), bwd(old))):
        assert torch.equal(state.scale, expected.scale) and not torch.equal(expected.scale, torch.ones_like(expected.scale))
        assert torch.equal(state.amax_history[:4], expected.amax_history) and not state.amax_history[4:].any()
    results = []
    for module in (old, new):
        module.zero_grad()
        with te.autocast(recipe=delayed(4)):
            y = module(x)
        y.square().sum().backward()
        results.append((y, module.fc1_weight.grad, fwd(module).scale, fwd(module).amax_history, bwd(module).amax_history))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_state_that_te_pickled(monkeypatch):
    # TE stores its recipe object in the state. Stand-ins of the same names give the same pickle.
    recipe_module = types.ModuleType("transformer_engine.common.recipe")

    @dataclass(frozen=True)
    class _FormatHelper:
        max_fwd: float = 448
        max_bwd: float = 57344

        def __reduce__(self):
            return _FormatHelper, (self.max_fwd, self.max_bwd)

    class Format:
        def __reduce__(self):
            return Format, (_FormatHelper(),)

    @dataclass
    class DelayedScaling:
        margin: int = 0
        amax_history_len: int = 2
        amax_compute_algo: str = "max"
        backward_override: str = None
        fp8_format: Format = field(default_factory=Format)

    for cls in (_FormatHelper, Format, DelayedScaling):
        cls.__module__, cls.__qualname__ = recipe_module.__name__, cls.__name__
        setattr(recipe_module, cls.__name__, cls)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, recipe_module.__name__, recipe_module)
    state = {"recipe": DelayedScaling(), "scale_fwd": torch.tensor([2.0, 4, 1]), "amax_history_fwd": torch.tensor([[0.0, 0, 0], [3, 3, 0]]),
             "scale_bwd": torch.tensor([8.0, 1]), "amax_history_bwd": torch.tensor([[0.0, 0], [5, 0]]), "extra_fp8_variables": {"num_gemms": 1}}
    layer = linear(diagonal(1.0))
    layer.set_extra_state(torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8))
    assert fwd(layer).scale.tolist() == [2, 4, 1] and bwd(layer).scale.tolist() == [8, 1] and fwd(layer).amax_history[1].tolist() == [3, 3, 0]


def test_code_in_a_state_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return subprocess.check_call, (["touch", str(tmp_path / "ran")],)

    for evil in (Evil(), {"scale_fwd": Evil()}):
        state = torch.frombuffer(bytearray(pickle.dumps(evil)), dtype=torch.uint8)
        with pytest.raises(pickle.UnpicklingError, match="subprocess.check_call"):
            linear(diagonal(1.0)).set_extra_state(state)
    assert not (tmp_path / "ran").exists()


# Optimizer and FP8 parameters


@pytest.mark.parametrize("adam_w_mode, other", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_is_adam(adam_w_mode, other):
    ours = torch.nn.Parameter(torch.randn(8, 8))
    theirs = torch.nn.Parameter(ours.detach().clone())
    options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    a, b = te.optimizers.FusedAdam([ours], adam_w_mode=adam_w_mode, **options), other([theirs], **options)
    for _ in range(5):
        ours.grad = torch.randn(8, 8)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert a.param_groups[0]["step"] == 5


def test_master_weights_keep_what_bfloat16_loses(tmp_path):
    def train(p, optimizer, steps):
        for _ in range(steps):
            p.grad = torch.ones_like(p)  # Adam moves by lr a step, a fortieth of what bfloat16 can resolve at 1
            optimizer.step()
            if optimizer.master_weights:
                assert torch.equal(p, optimizer.state[p]["master_param"].bfloat16())

    p, lost = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = te.optimizers.FusedAdam([p], lr=1e-4, master_weights=True)
    train(p, optimizer, 100)
    train(lost, te.optimizers.FusedAdam([lost], lr=1e-4), 100)
    assert optimizer.state[p]["master_param"].tolist() == pytest.approx([0.99] * 4, abs=1e-5)
    assert p[0].item() == 0.98828125 and lost[0].item() == 1.0  # 0.99 on bfloat16's grid

    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    copied = torch.nn.Parameter(p.detach().clone())
    restored = te.optimizers.FusedAdam([copied], lr=1.0, master_weights=True)
    restored.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    for name, value in optimizer.state[p].items():
        assert restored.state[copied][name].dtype == torch.float32 and torch.equal(restored.state[copied][name], value)
    train(p, optimizer, 20)
    train(copied, restored, 20)
    assert torch.equal(optimizer.state[p]["master_param"], restored.state[copied]["master_param"]) and torch.equal(p, copied)


def test_parameters_kept_in_fp8():
    def made(init):
        torch.manual_seed(3)
        with init:
            return te.Linear(16, 16, bias=False, device="cpu")

    plain = made(torch.enable_grad()).weight.detach()
    layer = made(te.quantized_model_init(recipe=delayed(), preserve_high_precision_init_val=True))
    weight = layer.weight
    assert torch.equal(weight, plain.to(E4M3).float()) and not torch.equal(weight, plain)
    assert torch.equal(weight.get_high_precision_init_val(), plain)

    optimizer = te.optimizers.FusedAdam([weight], lr=1e-6, master_weights=True)
    optimizer.initialize_state(weight, False)
    optimizer.set_scaled_state(weight, "master_param", weight.get_high_precision_init_val())
    master, before = optimizer.state[weight]["master_param"], None
    for i in range(20):
        x = torch.ones(16, 16)
        with te.autocast(recipe=delayed()):
            y = layer(x)
        torch.testing.assert_close(y, x @ weight.T)  # used as it is, not quantised again
        y.sum().backward()  # the gradient is 16 everywhere: Adam moves by lr a step
        optimizer.step()
        weight.grad = None
        if i == 1:  # from here on the scale stands still, and so does FP8
            before = weight.detach().clone()
    torch.testing.assert_close(master, plain - 20e-6, rtol=0, atol=1e-7)
    assert (weight == before).float().mean() > 0.95
    error = (weight - master).abs()
    assert (error <= (master.abs() / 16).clamp(min=plain.abs().max() * 2**-17) * 1.001).all() and error.max() > 0  # half a step of E4M3


# torch.compile


def compiled_and_eager(recipe):
    module, x = te.LayerNormMLP(16, 32, normalization="RMSNorm", activation="swiglu", device="cpu"), torch.randn(16, 16)
    other = copy.deepcopy(module)

    def run(m, x):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return m(x)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for m, function in ((module, run), (other, compiled)):
        y = function(m, x)
        y.square().sum().backward()
        yield [y.detach(), *(p.grad for p in m.parameters())]


@pytest.mark.parametrize("recipe", [None, te.Float8CurrentScaling()], ids=["no FP8", "current"])
def test_compiles_into_one_graph(recipe):
    eager, compiled = compiled_and_eager(recipe)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled))


def test_delayed_scaling_does_not_compile():
    with pytest.raises(RuntimeError, match="DelayedScaling is not supported under torch.compile"):
        list(compiled_and_eager(delayed()))
