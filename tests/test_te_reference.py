"""te_reference against values that Transformer Engine (TE) gave on an H200, hand calculation, or PyTorch.

Literals are TE 2.20's results or follow from the formats: between two powers of two E4M3 has 8 steps and E5M2
has 4, so at scale 1 a value of 0.3 becomes 0.3125 in both. Functions with a counterpart in PyTorch are
compared with it.
"""

import copy
import doctest
import importlib
import importlib.util
import inspect
import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F

import te_reference as te
from model_te_advanced import apply_rope, rope_tables

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32_MAX = 3.4028234663852886e38
nan, inf = math.nan, math.inf


def delayed(history=4, **kwargs):
    return te.DelayedScaling(amax_history_len=history, **kwargs)


def diagonal(*values):
    """Return a (16, 16) matrix that is zero except for the first values of the diagonal: easy to multiply."""
    return torch.diag(torch.tensor(list(values) + [0.0] * (16 - len(values))))


def linear(weight, bias=False):
    layer = te.Linear(16, 16, bias=bias, device="cpu")
    layer.weight.data = weight.clone()
    return layer


def step(module, x, dy, recipe, of=None, **kwargs):
    """Run a forward and backward pass in FP8 and return (y, dx, dw). `of`: the layer that `module` calls."""
    x, layer = x.clone().requires_grad_(), of or module
    layer.zero_grad()
    with te.autocast(recipe=recipe):
        y = module(x, **kwargs)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def fwd(module):
    return module.fp8_meta["scaling_fwd"]


def bwd(module):
    return module.fp8_meta["scaling_bwd"]


def history(state, tensor=0):
    """Return the amax history of one tensor: forward 0 is the input, 1 the weight; backward 0 is dy."""
    return state.amax_history[:, tensor].tolist()


@pytest.mark.parametrize("value, e4m3, e5m2", [
    (nan, 127, 127), (inf, 126, 123), (-inf, 254, 251),  # infinity saturates
    (-0.0, 128, 128), (0.0, 0, 0), (1e-30, 0, 0),
    (500, 126, 96), (-1e9, 254, 251),
    (464, 126, 95), (463.9, 126, 95),
    (2**-10, 0, 20), (1.5 * 2**-9, 2, 26)])
def test_quantized_bytes(value, e4m3, e5m2):
    x, scale = torch.tensor([value]), torch.tensor(1.0)
    assert te.quantize(x, scale, E4M3).view(torch.uint8).item() == e4m3
    assert te.quantize(x, scale, E5M2).view(torch.uint8).item() == e5m2


# Amaxes of six tensors; an older step has 9.0 for the first
THIS_STEP, OLDER = [1.7, 0, inf, nan, 1e-38, 1e-44], [9.0, 0, 2, 3, 0, 0]
OLD_SCALE = 5


@pytest.mark.parametrize("length, algorithm, margin, first, fourth", [
    (1, "max", 0, 448 / 1.7, OLD_SCALE), (1, "most_recent", 0, 448 / 1.7, OLD_SCALE),
    (1, "max", 1, 224 / 1.7, OLD_SCALE), (1, "most_recent", 2, 112 / 1.7, OLD_SCALE),
    (4, "max", 0, 448 / 9, 448 / 3), (4, "max", 1, 224 / 9, 224 / 3),
    (4, "most_recent", 0, 448 / 1.7, OLD_SCALE)])
def test_delayed_scale_and_history_after_a_step(length, algorithm, margin, first, fourth):
    recipe = delayed(length, amax_compute_algo=algorithm, margin=margin)
    state = te._ScalingState(recipe, 6, "cpu")
    state.scale.fill_(OLD_SCALE)
    state.amax_history[:] = torch.tensor([THIS_STEP] + [OLDER] * (length - 1))
    state.roll(recipe, 448.0)
    # An amax of zero, infinity or NaN keeps the scale; a quotient that overflows is the largest float32
    expected = torch.tensor([first, OLD_SCALE, OLD_SCALE, fourth, FP32_MAX, FP32_MAX])
    torch.testing.assert_close(state.scale, expected, rtol=2e-7, atol=0)
    rows = [[0.0] * 6, OLDER, OLDER, THIS_STEP] if length == 4 else [[0.0] * 6]
    torch.testing.assert_close(state.amax_history, torch.tensor(rows), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("x, scale, scale_inv, expected", [
    ([0.0, 0.0], 1.0, 1.0, [0, 0]),
    ([inf, 1.5], 1.0, 1.0, [126, 60]),
    ([nan, 0.5], 896.0, 0.0011160714784637094, [127, 126]),
    ([1e-38, 0.0], FP32_MAX, 2.938735877055719e-39, [70, 0]),  # 1e-38 · FP32_MAX = 3.403 -> 3.5
    ([1e-44, 0.0], FP32_MAX, 2.938735877055719e-39, [0, 0]),
    ([1.7, 0.0], 263.5294189453125, 0.0037946428637951612, [126, 0])])
def test_current_scaling(x, scale, scale_inv, expected):
    x = torch.tensor(x)
    amax = te.amax_of(x)
    found = te.current_scale(amax, 448.0)
    assert found.item() == scale
    assert found.reciprocal().item() == pytest.approx(scale_inv, rel=1e-7)
    assert te.quantize(x, found, E4M3).view(torch.uint8).tolist() == expected
    power_of_2 = te.current_scale(amax, 448.0, power_of_2=True).item()
    mantissa, _ = math.frexp(power_of_2)
    assert mantissa == 0.5
    assert scale / 2 < power_of_2 <= scale


@pytest.mark.parametrize("fp8_format, dx1, dw1, bwd_scale", [
    # dy = 0.28, 0.116. E5M2: 0.25, 0.109375. E4M3: 0.28125, 0.1171875.
    (te.Format.HYBRID, [0.078125, 0.0341796875], [0.28125, 0.0341796875], 204800.0),
    (te.Format.E4M3, [0.087890625, 0.03662109375], [0.31640625, 0.03662109375], 1600.0)])
def test_all_three_gemms_are_quantized(fp8_format, dx1, dw1, bwd_scale):
    layer, x, dy = linear(diagonal(0.3, 0.3)), diagonal(1.1, 0.3), diagonal(0.28, 0.116)
    y, dx, dw = step(layer, x, dy, delayed(fp8_format=fp8_format))  # scale 1: 1.1 -> 1.125, 0.3 -> 0.3125
    assert y.diagonal()[:2].tolist() == [0.3515625, 0.09765625]
    assert dx.diagonal()[:2].tolist() == dx1 and dw.diagonal()[:2].tolist() == dw1
    assert fwd(layer).scale.tolist() == pytest.approx([448 / 1.1, 448 / 0.3, 1.0], rel=1e-6)
    assert bwd(layer).scale.tolist() == pytest.approx([bwd_scale, 1.0], rel=1e-6)
    # Now each tensor's amax maps to FP8's maximum. x: 0.3 -> 120 · 1.1/448 = 0.29464. dy: 0.116 -> 0.12 in
    # both formats.
    y, dx, dw = step(layer, x, dy, delayed(fp8_format=fp8_format))
    assert y.diagonal()[:2].tolist() == pytest.approx([0.33, 0.3 * 0.2946428571], rel=1e-6)
    assert dx.diagonal()[:2].tolist() == pytest.approx([0.084, 0.036], rel=1e-6)
    assert dw.diagonal()[:2].tolist() == pytest.approx([0.308, 0.12 * 0.2946428571], rel=1e-6)


def test_both_layers_of_the_mlp_are_quantized_not_biases():
    mlp = te.LayerNormMLP(16, 16, normalization="RMSNorm", activation="relu", device="cpu")
    for weight in (mlp.fc1_weight, mlp.fc2_weight):
        weight.data = 0.3 * torch.eye(16) + 0.04 * torch.eye(16).roll(1, 1)  # E4M3: 0.3125 and 0.0390625
    mlp.fc2_bias.data.fill_(0.3)  # bfloat16: 0.30078125
    with te.autocast(recipe=delayed()):
        # norm 0.999995 -> 1; fc1 0.3515625 -> 0.34375; fc2 0.34375 · 0.3515625 + 0.30078125
        y = mlp(torch.ones(16, 16))
    assert y.unique().tolist() == [0.120849609375 + 0.30078125]
    # -> 0.25; fc1 gets 0.25 · 0.3515625 = 0.087890625 -> 0.09375; 16 rows
    y.backward(torch.full((16, 16), 0.28))
    assert mlp.fc1_weight.grad.unique().tolist() == [16 * 0.09375]
    assert mlp.fc2_weight.grad.unique().tolist() == [16 * 0.25 * 0.34375]
    assert mlp.fc1_bias.grad.tolist() == [16 * 0.087890625] * 16  # from the gradients before the cast
    assert mlp.fc2_bias.grad.tolist() == pytest.approx([16 * 0.28] * 16)
    forward_amax = [0.999995, 0.3, 0, 0.3515625, 0.3, 0]
    assert fwd(mlp).amax_history[-1].tolist() == pytest.approx(forward_amax, rel=1e-6)
    assert bwd(mlp).amax_history[-1].tolist() == pytest.approx([0.087890625, 0, 0.28, 0], rel=1e-6)


def test_forward_histories_roll_after_the_outermost_region():
    layer, recipe = linear(diagonal(0.5)), delayed()
    with te.autocast(recipe=recipe):
        with te.autocast(recipe=recipe):
            layer(diagonal(2.0))
        assert history(fwd(layer)) == [2, 0, 0, 0]
        assert fwd(layer).scale[0] == 1
    assert history(fwd(layer)) == [0, 0, 0, 2]
    assert fwd(layer).scale[0] == 224
    layer.eval()  # training mode makes no difference; grad mode does
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(diagonal(7.0))
    assert history(fwd(layer)) == [7, 0, 0, 2]
    assert fwd(layer).scale[0] == 224
    with te.autocast(recipe=recipe):
        layer(diagonal(1.0))
    assert history(fwd(layer)) == [0, 0, 2, 7]
    assert fwd(layer).scale[0] == 64


def test_backward_histories_roll_once_after_backward():
    first, second, seen = linear(diagonal(0.5)), linear(diagonal(0.5)), []
    with te.autocast(recipe=delayed()):
        hidden = first(diagonal(1.0).requires_grad_())
        hidden.register_hook(lambda _: seen.append(history(bwd(second))))
        y = second(hidden)
    y.backward(diagonal(4.0))
    assert seen == [[4, 0, 0, 0]]  # nothing rolled between the two backward passes
    assert history(bwd(second)) == [0, 0, 0, 4]
    assert bwd(second).scale.tolist() == [14336, 1]
    assert history(bwd(first)) == [0, 0, 0, 2]
    assert bwd(first).scale.tolist() == [28672, 1]


def test_is_first_microbatch_caches_the_quantized_weight():
    layer = linear(diagonal(0.3))

    def y(weight, is_first_microbatch):
        """Return one output for the input 1, which is the quantized weight."""
        layer.weight.data.fill_(weight)
        one = diagonal(1.0)
        out, _, _ = step(layer, one, one, delayed(), is_first_microbatch=is_first_microbatch)
        return out[0, 0].item()

    assert y(0.3, None) == 0.3125  # scale 1
    assert y(0.3, True) == pytest.approx(0.3)
    assert y(0.25, None) == pytest.approx(384 / 448 * 0.3)
    assert y(100, False) == pytest.approx(0.3)  # of the second call
    # The last pass did not quantize the weight, so only the input's history rolled and its scale changed
    assert history(fwd(layer), tensor=1) == pytest.approx([0, 0.3, 0.3, 0.25])
    assert fwd(layer).scale[1].item() == pytest.approx(448 / 0.3)
    assert history(fwd(layer)) == [0, 1, 1, 1]
    assert y(100, None) == pytest.approx(0.3)  # saturates at the old scale
    assert y(100, True) == pytest.approx(100)


@pytest.mark.parametrize("has_bias", [False, True])  # a bias is trained, but its gradient is not quantized
def test_the_module_after_a_frozen_one_rolls_histories(has_bias):
    first, second = linear(diagonal(0.5), has_bias), linear(diagonal(0.5))
    first.weight.requires_grad_(False)
    with te.autocast(recipe=delayed()):
        y = second(first(diagonal(1.0)))
    y.backward(diagonal(4.0))
    assert history(bwd(second)) == [0, 0, 0, 4]
    assert bwd(second).scale[0] == 14336


def test_a_disabled_region_inside_an_enabled_one():
    outer, inner, after = (linear(torch.randn(16, 16)) for _ in range(3))
    x = torch.randn(16, 16)
    with te.autocast(recipe=delayed()):
        h = outer(x)
        with te.autocast(enabled=False):
            y = inner(h)
        z = after(y)
    assert not torch.equal(h, x @ outer.weight.T)
    assert torch.equal(y, h @ inner.weight.T) and "scaling_fwd" not in inner.fp8_meta
    assert not torch.equal(z, y @ after.weight.T)
    assert torch.equal(outer(x), x @ outer.weight.T)  # FP8 is off again outside


@pytest.mark.parametrize("length, expected", [
    (4, [0, 0, 1.1, 1.1]), (6, [0, 0, 1.1, 0, 0, 1.1]), (3, [0, 0, 1.1])])
def test_another_length_keeps_the_first_rows_of_the_history(length, expected):
    """As in TE, although the newest row is the last."""
    layer, x, dy = linear(diagonal(0.3)), diagonal(1.1), diagonal(1.0)
    step(layer, x, dy, delayed(4))
    step(layer, x, dy, delayed(length))
    assert history(fwd(layer)) == pytest.approx(expected)


def test_another_recipe_drops_scales_and_cached_weights():
    layer, x, dy = linear(diagonal(0.3)), diagonal(1.1), diagonal(1.0)

    def y(recipe, **options):
        return step(layer, x, dy, recipe, **options)[0][0, 0].item()

    y(delayed(), is_first_microbatch=True)
    layer.weight.data = diagonal(0.25)
    with pytest.warns(UserWarning, match="Recipe type changed from DelayedScaling to Float8CurrentScaling"):
        assert y(te.Float8CurrentScaling(), is_first_microbatch=False) == pytest.approx(1.1 * 0.25)
    with pytest.warns(UserWarning, match="Recipe type changed"):
        assert y(delayed()) == pytest.approx(1.125 * 0.25)  # starts at scale 1 again
    assert y(delayed()) == pytest.approx(1.1 * 0.25)


def train_blocks(recipe, run):
    """Train blocks that `run(block, x)` calls; return all outputs, gradients, scales and histories.

    Of three forward passes a step, the first has no backward pass and the other two precede theirs."""
    torch.manual_seed(1)
    mlp = te.LayerNormMLP(16, 32, device="cpu")
    first, second = te.Linear(16, 16, device="cpu"), te.Linear(16, 16, device="cpu")
    layers = torch.nn.ModuleList([mlp, first, second])

    def block(h):
        return h + first(F.dropout(mlp(h), 0.5))

    found = []
    for size in (1, 3, 9):  # growing inputs, so that the scales change in each forward pass
        inputs = [(size * factor * torch.randn(16, 16)).requires_grad_() for factor in (2, 1, 1.5)]
        outputs = []
        for x in inputs:
            with te.autocast(recipe=recipe):
                outputs.append(run(second, run(block, x)))
        for y in outputs[1:]:
            y.square().sum().backward()
            if recipe.delayed():
                for layer in layers:
                    for state in (fwd(layer), bwd(layer)):
                        found += [state.scale.clone(), state.amax_history.clone()]
        found += outputs
        found += [x.grad for x in inputs[1:]]
        found += [p.grad.clone() for p in layers.parameters()]
    return found


@pytest.mark.parametrize("recipe", [delayed(), te.Float8CurrentScaling()])
def test_checkpoint_changes_nothing(recipe):
    checkpointed = train_blocks(recipe, te.checkpoint)
    expected = train_blocks(recipe, lambda block, x: block(x))
    for a, b in zip(checkpointed, expected, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


def norm_of(module, x):
    """Randomize the module's parameters and return the expected output of its norm."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = x if module.normalization == "RMSNorm" else x - x.mean(-1, keepdim=True)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.layer_norm_weight
    return normed if module.normalization == "RMSNorm" else normed + module.layer_norm_bias


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_layernorm_linear_and_its_extra_outputs(normalization, bias):
    x = torch.randn(2, 3, 16)  # without FP8 any shape is valid
    module = te.LayerNormLinear(16, 24, bias=bias, normalization=normalization, device="cpu")
    normed = norm_of(module, x)
    expected = F.linear(normed, module.weight, module.bias if bias else None)
    torch.testing.assert_close(module(x), expected)
    module.return_layernorm_output = True
    torch.testing.assert_close(module(x), (expected, normed))
    module.return_bias = True  # y without the bias, the bias, the norm's output
    torch.testing.assert_close(module(x), (F.linear(normed, module.weight), module.bias, normed))


def gelu(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("normalization, bias, activation, function", [
    ("LayerNorm", True, "gelu", gelu), ("RMSNorm", False, "geglu", gelu), ("RMSNorm", True, "relu", F.relu),
    ("LayerNorm", False, "srelu", lambda x: x.relu() ** 2), ("RMSNorm", True, "swiglu", F.silu)])
def test_layernorm_mlp_equals_its_parts(normalization, bias, activation, function):
    module = te.LayerNormMLP(
        16, 32, bias=bias, normalization=normalization, activation=activation, device="cpu")
    x = torch.randn(2, 3, 16)
    normed = norm_of(module, x)
    hidden = F.linear(normed, module.fc1_weight, module.fc1_bias if bias else None)
    if activation.endswith("glu"):
        gate, value = hidden.chunk(2, -1)
        hidden = function(gate) * value
    else:
        hidden = function(hidden)
    close = dict(rtol=1e-5, atol=1e-4)
    expected = F.linear(hidden, module.fc2_weight, module.fc2_bias if bias else None)
    torch.testing.assert_close(module(x), expected, **close)
    module.return_bias = module.return_layernorm_output = True
    without_bias = F.linear(hidden, module.fc2_weight)
    torch.testing.assert_close(module(x), (without_bias, module.fc2_bias, normed), **close)


@pytest.mark.parametrize("name, sizes, defaults", [
    ("Linear", (64, 64), dict(tp_group=None, tp_size=1, parallel_mode=None, name="fc")),
    ("LayerNormLinear", (64, 64), dict(fuse_wgrad_accumulation=False)),
    ("LayerNormMLP", (64, 64), dict(seq_length=512, micro_batch_size=4, activation_params=None)),
    ("LayerNorm", (64,), {}), ("TransformerLayer", (64, 64, 4), {}),
    ("DotProductAttention", (4, 16), dict(softcap=0.0, window_size=None, cp_comm_type="p2p"))])
def test_arguments_that_have_no_effect_are_refused(name, sizes, defaults):
    module = getattr(te, name)
    module(*sizes, sequence_parallel=False, **defaults)  # TE's
    with pytest.raises(TypeError, match=f"{name}.*biass"):
        module(*sizes, biass=False)
    for option in ("sequence_parallel", "fuse_wgrad_accumulation"):
        with pytest.raises(ValueError, match=f"^{name}.{option}=True.: te_reference supports False only"):
            module(*sizes, **{option: True})


def test_fp8_shape_rules():
    layer, narrow = linear(diagonal(1.0)), te.Linear(24, 16, device="cpu")
    with te.autocast(recipe=delayed()):
        layer(torch.zeros(2, 8, 16))
        with pytest.raises(ValueError, match="divisible by 16.*weight gradient"):
            layer(torch.zeros(8, 16))
        with torch.no_grad():
            layer(torch.zeros(8, 16))
            for module, shape in ((layer, (12, 16)), (narrow, (16, 24))):
                with pytest.raises(ValueError, match="divisible by 8 and the last dimension"):
                    module(torch.zeros(shape))


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_attention(mask):
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)  # (B, S, heads, D)
    all_k, all_v = k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2)
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2), all_k.transpose(1, 2), all_v.transpose(1, 2), is_causal=mask == "causal")
    expected = expected.transpose(1, 2).flatten(2)

    bshd = te.DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=mask)
    torch.testing.assert_close(bshd(q, all_k, all_v), expected)
    grouped = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd", attn_mask_type=mask)
    torch.testing.assert_close(grouped(q, k, v), expected)
    sbhd = te.DotProductAttention(4, 8, num_gqa_groups=2, attn_mask_type=mask)  # TE's default format
    y = sbhd(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    torch.testing.assert_close(y, expected.transpose(0, 1))


NO_PADDING = torch.zeros(2, 6, dtype=torch.bool)
PADDING = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])


def plain_attention(q, k, v, mask_type, padding, window):
    """Return softmax(q·kᵀ / √D)·v in format bhsd, one query after the other, by TE's definition of masks."""
    queries, keys = q.shape[2], k.shape[2]
    shift = keys - queries if mask_type == "no_mask" else 0  # of a query's position among the keys
    left, right = [math.inf if side < 0 else side for side in window or (-1, -1)]
    if "causal" in mask_type:
        right = 0
    out = torch.zeros_like(q)
    for batch in range(len(q)):
        for i in range(queries):
            seen = [j for j in range(keys) if -left <= j - (i + shift) <= right]
            if "padding" in mask_type and padding[batch, i]:
                continue
            if "padding" in mask_type:
                seen = [j for j in seen if not padding[batch, j]]
            if seen:
                query = q[batch][:, i, :, None]  # (H, D, 1)
                scores = k[batch][:, seen] @ query / math.sqrt(q.shape[-1])
                out[batch][:, i] = (scores.softmax(1) * v[batch][:, seen]).sum(1)
    return out


@pytest.mark.parametrize("window", [None, (-1, -1), (2, 0), (1, 2), (0, 3)])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding", "padding_causal"])
@pytest.mark.filterwarnings("ignore:window_size should be")
def test_masks_and_windows_equal_plain_attention(mask_type, window):
    q, k, v = leaves = [torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2)]
    all_k, all_v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    dy = torch.randn(2, 4, 6, 8)
    expected = plain_attention(q, all_k, all_v, mask_type, PADDING, window)
    gradients = torch.autograd.grad(expected, leaves, dy)

    options = dict(attn_mask_type=mask_type, window_size=window)
    ways = [{}]  # to say which tokens are padding
    if "padding" in mask_type:
        ways = [dict(attention_mask=PADDING[:, None, None]),
                dict(cu_seqlens_q=torch.tensor([0, 6, 9], dtype=torch.int32))]
    for qkv_format, order in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))):
        inputs = [leaf.permute(order) for leaf in leaves]
        expected_y, expected_dy = expected.permute(order).flatten(2), dy.permute(order).flatten(2)
        attention = te.DotProductAttention(4, 8, 2, qkv_format=qkv_format)
        for way in ways:
            y = attention(*inputs, **way, **options)
            torch.testing.assert_close(y, expected_y)
            torch.testing.assert_close(torch.autograd.grad(y, leaves, expected_dy), gradients)
        attention = te.DotProductAttention(4, 8, 2, qkv_format=qkv_format, **options)
        torch.testing.assert_close(attention(*inputs, **ways[0]), y)  # options of the constructor


@pytest.mark.parametrize("window", [None, (2, 0), (1, 2)])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "causal,padding"])
@pytest.mark.filterwarnings("ignore:window_size should be")
def test_packed_sequences_equal_padded_ones(mask_type, window):
    q, k, v = (torch.randn(2, 6, heads, 8) for heads in (4, 2, 2))
    attention = te.DotProductAttention(4, 8, 2, attn_mask_type=mask_type, window_size=window)
    padded = attention(q, k, v, PADDING[:, None, None], "bshd")
    is_token = ~PADDING
    assert not padded[PADDING].any() and padded[is_token].all()
    starts = torch.tensor([0, 6, 9], dtype=torch.int32)
    packed = attention(q[is_token], k[is_token], v[is_token], qkv_format="thd", cu_seqlens_q=starts,
                       cu_seqlens_kv=starts.clone())
    torch.testing.assert_close(packed, padded[is_token])


@pytest.mark.parametrize("mask_type, as_mask_type", [
    ("no_mask", "no_mask"), ("causal_bottom_right", "no_mask"), ("causal", "causal")])
def test_windows_of_fewer_queries_end_at_the_last_key(mask_type, as_mask_type):
    """But with a mask that is causal from the first key."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    attention = te.DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=mask_type)
    y = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), window_size=(2, 0))
    expected = plain_attention(q, k, v, as_mask_type, None, (2, 0))
    torch.testing.assert_close(y, expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("options, message", [
    (dict(attention_mask=PADDING[:, None, None]), "'no_mask' uses no attention_mask.*'padding'"),
    (dict(attn_mask_type="padding"), "give attention_mask, .2, 1, 1, 6. bool and true at padding, or cu_seq"),
    (dict(attn_mask_type="padding", attention_mask=PADDING), "a tensor .2, 6. torch.bool: must be .*1, 1, 6"),
    (dict(attn_mask_type="padding", attention_mask=(PADDING, PADDING)), "self-attention only"),
    (dict(attn_mask_type="padding", attention_mask=PADDING[:, None, None].int()), "torch.int32: must be"),
    (dict(attn_mask_type="padding", attention_mask=PADDING.flip(1)[:, None, None]), "pad at the end"),
    (dict(attn_mask_type="arbitrary"), "'arbitrary': te_reference has bshd"),
    (dict(qkv_format="thd", attn_mask_type="padding"), "give cu_seqlens_q"),
    (dict(qkv_format="bhsd"), "qkv_format='bhsd'"),
    (dict(window_size=(-1, 2)), "window_size=.-1, 2.*numbers of keys before and after"),
    (dict(window_size=(-1, 2), attn_mask_type="causal"), "window_size=.-1, 2"),
    (dict(attn_mask_type="padding", cu_seqlens_q=torch.tensor([0, 6, 9]),
          cu_seqlens_kv=torch.tensor([0, 6, 12])), "must equal cu_seqlens_q"),
    (dict(core_attention_bias=torch.ones(1, 4, 6, 6)), "core_attention_bias=a tensor .1, 4, 6, 6. torch"),
    (dict(softcap=torch.ones(4)), "softcap=a tensor .4,. torch.float32")])
def test_a_refused_mask_is_one_line_without_its_values(options, message):
    q = torch.randn(2, 6, 4, 8)
    attention = te.DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="no_mask")
    with pytest.raises(ValueError, match=message) as error:
        attention(q, q, q, **options)
    assert "\n" not in str(error.value) and "tensor([" not in str(error.value)


def test_a_window_after_a_causal_query_is_warned_of():
    q = torch.randn(2, 6, 4, 8)
    attention = te.DotProductAttention(4, 8, qkv_format="bshd")
    with pytest.warns(UserWarning, match="window_size should be"):  # TE's
        y = attention(q, q, q, window_size=(2, 2))
    torch.testing.assert_close(y, attention(q, q, q, window_size=(2, 0)))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, (2, 0), (8, 16)])
@pytest.mark.parametrize("qkv_format, mask_type", [
    ("bshd", "no_mask"), ("bshd", "causal"), ("sbhd", "padding"), ("bshd", "padding"),
    ("bshd", "padding_causal"), ("thd", "padding"), ("thd", "padding_causal")])
@pytest.mark.filterwarnings("ignore:window_size should be")
def test_masks_and_windows_equal_tes(qkv_format, mask_type, window):
    theirs = pytest.importorskip("transformer_engine.pytorch")
    q, k, v = (torch.randn(2, 64, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    padding = torch.arange(64, device="cuda") >= torch.tensor([[64], [40]], device="cuda")
    starts = torch.tensor([0, 64, 104], dtype=torch.int32, device="cuda")
    options = dict(attn_mask_type=mask_type, window_size=window)
    if qkv_format == "thd":
        q, k, v = (t[~padding] for t in (q, k, v))
        options |= dict(cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=64, max_seqlen_kv=64)
    elif "padding" in mask_type:
        options |= dict(attention_mask=padding[:, None, None])
    is_token = ~padding
    if qkv_format == "sbhd":
        q, k, v, is_token = (t.transpose(0, 1).contiguous() for t in (q, k, v, is_token))
    results = []
    for engine in (te, theirs):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        attention = engine.DotProductAttention(4, 64, 2, qkv_format=qkv_format, attn_mask_type=mask_type)
        y = attention(*leaves, **options)
        if "padding" in mask_type and qkv_format != "thd":
            y = y[is_token]
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for ours, other in zip(*results):
        assert (ours - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("attn_input_format", ["sbhd", "bshd"])
def test_an_encoder_reads_no_padding(attn_input_format):
    layer = te.TransformerLayer(
        32, 32, 4, hidden_dropout=0, attention_dropout=0, self_attn_mask_type="padding", window_size=(3, 3),
        attn_input_format=attn_input_format, device="cpu")

    def run(x, padding, **options):
        x = x if attn_input_format == "bshd" else x.transpose(0, 1)
        y = layer(x, padding[:, None, None], **options)
        return y if attn_input_format == "bshd" else y.transpose(0, 1)

    x = torch.randn(2, 6, 32)
    other_padding = torch.where(PADDING[..., None], torch.randn(2, 6, 32), x)
    y = run(x, PADDING)
    assert torch.equal(y[~PADDING], run(other_padding, PADDING)[~PADDING])
    torch.testing.assert_close(y[1:, :3], run(x[1:, :3], NO_PADDING[1:, :3]))
    with pytest.raises(ValueError, match="'causal' uses no attention_mask"):
        run(x, PADDING, self_attn_mask_type="causal")

    other_first = x.clone()
    other_first[:, 0] = torch.randn(2, 32)
    for window, options in ((3, {}), (1, dict(window_size=(1, 1)))):
        is_changed = run(x, PADDING, **options) != run(other_first, PADDING, **options)
        positions = is_changed[0].any(-1).nonzero().flatten()
        assert positions.tolist() == list(range(window + 1))


# ---- what has no effect here is refused

@pytest.mark.parametrize("make, message", [
    (lambda: te.DelayedScaling(fp8_dpa=True), r"DelayedScaling\(fp8_dpa=True\): .*use Transformer Engine"),
    (lambda: te.DelayedScaling(fp8_mha=True), "fp8_mha=True"),
    (lambda: te.Float8CurrentScaling(fp8_dpa=True), r"Float8CurrentScaling\(fp8_dpa=True"),
    (lambda: te.Float8CurrentScaling(fp8_mha=True), "fp8_mha=True"),
    (lambda: te.MXFP8BlockScaling(margin=1), "margin=1.*leave it at 0"),
    (lambda: te.DelayedScaling(amax_compute_algo="mean"), "'mean'.*'max', 'most_recent' or a function"),
    (lambda: te.DelayedScaling(fp8_format="HYBRID"), "'HYBRID'.*Format.HYBRID"),
    (lambda: te.Float8BlockScaling(fp8_format="E4M3"), "'E4M3'.*Format.HYBRID"),
    (lambda: te.MXFP8BlockScaling(fp8_format=te.Format.E5M2), "pure E5M2"),
    (lambda: te.optimizers.FusedAdam([torch.zeros(2)], use_decoupled_grad=True), "use_decoupled_grad=True"),
    (lambda: te.optimizers.FusedAdam([torch.zeros(2)], set_grad_none=False), r"set_to_none=False"),
    (lambda: te.optimizers.FusedAdam([torch.zeros(2)]).step(grad_scaler="scaler"), "unscale_"),
    (lambda: te.parallel_cross_entropy(torch.zeros(1, 1, 4), torch.zeros(1, 1).long(), dist_process_group=0),
     "dist_process_group.*does not split the vocabulary")])
def test_what_would_have_no_effect_is_refused(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# ---- second derivatives

def squared_gradient(module, x, **options):
    """Return |dL/dx|² with L = Σ y³."""
    gradient, = torch.autograd.grad(module(x).pow(3).sum(), x, **options)
    return gradient.square().sum()


def curvature(module, x, direction):
    """Return the derivative of |dL/dx|² in a direction."""
    x = x.clone().requires_grad_()
    second, = torch.autograd.grad(squared_gradient(module, x, create_graph=True), x)
    return (second * direction).sum().item()


SECOND = [("Linear", (16, 16)), ("LayerNormLinear", (16, 16)), ("LayerNormMLP", (16, 32))]
RECIPES = [delayed(), te.Float8CurrentScaling(), te.Float8BlockScaling()]


@pytest.mark.parametrize("name, sizes", SECOND)
@pytest.mark.parametrize("recipe", RECIPES, ids=["delayed", "current", "block"])
def test_a_second_derivative_in_fp8_is_refused(name, sizes, recipe):
    module, x = getattr(te, name)(*sizes, device="cpu"), torch.randn(16, 16)
    with te.autocast(recipe=recipe):
        with pytest.raises(RuntimeError, match="create_graph=True: .*autocast.enabled=False"):
            curvature(module, x, torch.ones_like(x))


@pytest.mark.parametrize("name, sizes", SECOND)
def test_a_second_derivative_without_fp8_is_right(name, sizes):
    module = getattr(te, name)(*sizes, device="cpu", params_dtype=torch.float64)
    x, direction = torch.randn(16, 16).double(), torch.randn(16, 16).double()
    step = 1e-5 * direction
    after = squared_gradient(module, (x + step).requires_grad_())
    before = squared_gradient(module, (x - step).requires_grad_())
    expected = ((after - before) / 2e-5).item()
    assert curvature(module, x, direction) == pytest.approx(expected, rel=1e-5)


# ---- names

@pytest.fixture(params=["te_reference", "fast_kernels.modules"])
def engine(request):
    if request.param == "fast_kernels.modules":
        pytest.importorskip("triton")
    return importlib.import_module(request.param)


SNIPPETS = """
import transformer_engine.pytorch as te
self.ln_qkv = te.LayerNormLinear(hidden_size, 3 * hidden_size)
self.ln_mlp = te.LayerNormMLP(hidden_size, 4 * hidden_size)
te.TransformerLayer, te.DotProductAttention
with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
model = te.Linear(in_features, out_features, bias=True)
with te.autocast(enabled=True, recipe=fp8_recipe):
te.fp8_model_init, te.quantized_model_init, te.checkpoint, te.RMSNorm, te.LayerNorm
te.is_fp8_available, te.is_mxfp8_available, te.is_nvfp4_available, te.is_fp8_block_scaling_available
from transformer_engine.common.recipe import DelayedScaling, Format
fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
"""  # of the guides and of TE's README


def test_names_of_the_guides_are_in_every_engine(engine):
    names = set(re.findall(r"te\.(\w+)", SNIPPETS.replace("as te", ""))) | {"DelayedScaling", "Format"}
    assert len(names) > 15 and [name for name in sorted(names) if not hasattr(engine, name)] == []
    assert [name for name in engine.__all__ if not hasattr(engine, name)] == []
    of_te = inspect.signature(te.fp8_autocast).parameters
    assert list(inspect.signature(engine.fp8_autocast).parameters) == list(of_te)
    with engine.fp8_autocast(enabled=False, fp8_recipe=engine.DelayedScaling(), fp8_group=None) as region:
        assert not region.enabled and region.recipe == engine.DelayedScaling()


@pytest.mark.parametrize("name", ["MultiheadAttention", "GroupedLinear", "NVFP4BlockScaling", "ops"])
def test_a_missing_name_says_what_there_is(engine, name):
    with pytest.raises(AttributeError, match=rf"{name}.*DotProductAttention") as error:
        getattr(engine, name)
    assert "\n" not in str(error.value)
    with pytest.raises(AttributeError, match="FusedSGD: not emulated.*FusedAdam"):
        _ = te.optimizers.FusedSGD


def test_pythons_tools_see_an_ordinary_module(engine):
    assert not hasattr(engine, "GroupedLinear") and getattr(engine, "GroupedLinear", 1) == 1
    assert not hasattr(engine, "__path__") and not hasattr(engine, "__wrapped__")
    assert importlib.util.find_spec(engine.__name__).name == engine.__name__
    assert dict(inspect.getmembers(engine))["Linear"] is engine.Linear
    assert isinstance(doctest.DocTestFinder().find(engine), list)
    layer = engine.LayerNormLinear(16, 16, device="cpu")
    recipe = engine.DelayedScaling(margin=1)
    for copied in (copy.deepcopy((layer, recipe)), pickle.loads(pickle.dumps((layer, recipe)))):
        assert torch.equal(copied[0].weight, layer.weight) and copied[1] == recipe
    assert copy.copy(recipe) == recipe and pickle.loads(pickle.dumps(engine.Linear)) is engine.Linear


@pytest.mark.parametrize("name, sizes", [
    ("LayerNormLinear", (16, 16)), ("LayerNormMLP", (16, 16)), ("LayerNorm", (16,)), ("RMSNorm", (16,))])
def test_zero_centered_gamma_set_later_counts(engine, name, sizes):
    module, x = getattr(engine, name)(*sizes, device="cpu"), torch.randn(16, 16)
    if engine is not te:
        with pytest.raises(ValueError, match=f"{name}: zero_centered_gamma=True: fast_kernels supports"):
            module.zero_centered_gamma = True
        module.zero_centered_gamma = False
        return
    y = module(x)
    module.zero_centered_gamma = True
    norm_weight = module.weight if name in ("LayerNorm", "RMSNorm") else module.layer_norm_weight
    norm_weight.data.zero_()
    torch.testing.assert_close(module(x), y)


@pytest.mark.parametrize("options", [
    dict(fp8_dpa=True), dict(fp8_mha=True), dict(scaling_factor_compute_algo=len)])
def test_fast_kernels_refuse_options_without_an_effect(options):
    pytest.importorskip("triton")
    from fast_kernels import modules

    (name, value), = options.items()
    with pytest.raises(ValueError, match=rf"DelayedScaling.{name}=.*fast_kernels supports"):
        modules.DelayedScaling(**options)
    modules.DelayedScaling(0, modules.Format.HYBRID, 16, "max", None, True, False, False)  # TE's order
    layer = modules.Linear(16, 16, device="cpu")
    with pytest.raises(ValueError, match="Linear: return_bias=True"):
        layer.return_bias = True
    with pytest.raises(ValueError, match=r"tp_group=a tensor \(3,\)") as error:
        modules.Linear(16, 16, tp_group=torch.ones(3))
    assert "tensor(" not in str(error.value)


def test_cross_entropy():
    logits = torch.zeros(2, 2, 4)
    logits[0, 0] = torch.tensor([0, 0, 0, 1.0986123])  # e = 3: probabilities 1/6, 1/6, 1/6, 1/2
    labels = torch.tensor([[3, 0], [-100, 1]])
    losses = te.parallel_cross_entropy(logits, labels)
    log2, log4 = math.log(2), math.log(4)
    torch.testing.assert_close(losses, torch.tensor([[log2, log4], [0, log4]]))
    mean = te.parallel_cross_entropy(logits, labels, reduce_loss=True)
    assert mean.shape == (1,)
    assert mean.item() == pytest.approx((log2 + 2 * log4) / 3)  # without the ignored label


@pytest.mark.parametrize("name, sizes, options, keys", [
    ("Linear", (16, 16), {}, "weight bias"), ("LayerNorm", (16,), {}, "weight bias"),
    ("RMSNorm", (16,), {}, "weight"), ("DotProductAttention", (2, 8), {}, ""),
    ("LayerNormLinear", (16, 16), {}, "layer_norm_weight layer_norm_bias weight bias"),
    ("LayerNormLinear", (16, 16), dict(normalization="RMSNorm", bias=False), "layer_norm_weight weight"),
    ("LayerNormMLP", (16, 32), {},
     "layer_norm_weight layer_norm_bias fc1_weight fc1_bias fc2_weight fc2_bias")])
def test_state_dict_has_tes_keys(name, sizes, options, keys):
    state = getattr(te, name)(*sizes, **options).state_dict()
    assert list(state) == keys.split() + ["_extra_state"]
    # FP8 has not run
    assert state["_extra_state"].numel() == 0 and state["_extra_state"].dtype == torch.uint8


QKV = [f"{name}_{kind}" for kind in ("weight", "bias") for name in ("query", "key", "value")]
NORM, FC = ("layer_norm_weight", "layer_norm_bias"), ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
KEYS = {
    "self_attention.layernorm_qkv": [*NORM, *QKV], "self_attention.core_attention": [],
    "self_attention.proj": ["weight", "bias"], "layernorm_mlp": [*NORM, *FC]}


def test_transformer_layer_has_tes_names_and_defaults():
    layer = te.TransformerLayer(64, 128, 4)
    assert list(layer.state_dict()) == [
        f"{module}.{key}" for module, keys in KEYS.items() for key in [*keys, "_extra_state"]]
    assert (layer.hidden_dropout, layer.self_attention.core_attention.attention_dropout) == (0.1, 0.1)
    assert abs(layer.layernorm_mlp.fc2_weight.std().item() - 0.023) < 0.001
    frequencies = 1e4 ** (-torch.arange(8) / 8.0)
    angles = torch.outer(torch.arange(40.0), frequencies).repeat(1, 2)[:, None, None]  # (40, 1, 1, 16)
    q = torch.randn(32, 2, 4, 16)  # (S, B, heads, D)
    cos, sin = rope_tables(torch.arange(32), 16, 1e4)
    expected = apply_rope(q.transpose(0, 1), cos, sin).transpose(0, 1)
    torch.testing.assert_close(layer._rotate(q, angles), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="layer_type='decoder'"):
        te.TransformerLayer(64, 128, 4, layer_type="decoder")
    with pytest.raises(RuntimeError, match="Splitting QuantizedTensor"), te.quantized_model_init():
        te.TransformerLayer(64, 128, 4)


@pytest.mark.parametrize("adam_w_mode, other", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_is_adam(adam_w_mode, other):
    start = torch.randn(8, 8)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    a, b = te.optimizers.FusedAdam([ours], adam_w_mode=adam_w_mode, **options), other([theirs], **options)
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(8, 8)
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert a.param_groups[0]["step"] == 5


def test_fused_adam_calls_its_closure():
    ours, theirs = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizers = te.optimizers.FusedAdam([ours]), torch.optim.AdamW([theirs], 1e-3)
    for p, optimizer in zip((ours, theirs), optimizers):
        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        optimizer.param_groups[0]["weight_decay"] = 0.0
        assert [optimizer.step(closure).item() for _ in range(2)] == pytest.approx([4, 3.992004])
        assert optimizer.step() is None
    torch.testing.assert_close(ours, theirs)


def test_capturable_keeps_lr_and_step_as_tensors():
    start = torch.randn(8)
    p, captured_p = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    plain = te.optimizers.FusedAdam([p], lr=1e-2)
    captured = te.optimizers.FusedAdam([captured_p], lr=1e-2, capturable=True)
    steps = captured.param_groups[0]["step"]
    for _ in range(3):
        p.grad = captured_p.grad = torch.randn(8)
        plain.step()
        captured.step()
        plain.param_groups[0]["lr"] *= 0.5
        captured.param_groups[0]["lr"].mul_(0.5)
    torch.testing.assert_close(p, captured_p, rtol=1e-6, atol=1e-6)
    assert steps is captured.param_groups[0]["step"] and steps == 3


def test_a_later_step_leaves_a_saved_step_count_as_it_is():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = te.optimizers.FusedAdam([p], lr=1e-2, capturable=True)
    saved = optimizer.state_dict()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert saved["param_groups"][0]["step"] == 0 and optimizer.state_dict()["param_groups"][0]["step"] == 1


def test_a_remainder_is_no_master_weight():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = te.optimizers.FusedAdam([p], master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["master_param"] = torch.zeros(4, dtype=torch.int16)  # of store_param_remainders on TE
    with pytest.raises(ValueError, match="master_param is torch.int16.*store_param_remainders=False"):
        optimizer.load_state_dict(state)


def test_master_weights_keep_what_bfloat16_loses(tmp_path):
    def train(p, optimizer):
        for _ in range(100):
            # Adam's update is lr, 1/40 of bfloat16's spacing below 1
            p.grad = torch.ones_like(p)
            optimizer.step()
            if optimizer.master_weights:
                assert torch.equal(p, optimizer.state[p]["master_param"].bfloat16())
        return p

    p, lost, copied = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(3))
    optimizer = te.optimizers.FusedAdam([p], lr=1e-4, master_weights=True)
    assert train(p, optimizer)[0].item() == 0.98828125  # 0.99 rounded to bfloat16
    assert optimizer.state[p]["master_param"].tolist() == pytest.approx([0.99] * 4, abs=1e-5)
    assert train(lost, te.optimizers.FusedAdam([lost], lr=1e-4))[0].item() == 1.0

    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    restored = te.optimizers.FusedAdam([copied], lr=1.0, master_weights=True)
    restored.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for name, value in optimizer.state[p].items():
        found = restored.state[copied][name]
        assert found.dtype == torch.float32 and torch.equal(found, value)
    assert torch.equal(train(p, optimizer), train(copied, restored))
    assert torch.equal(optimizer.state[p]["master_param"], restored.state[copied]["master_param"])


def test_parameters_kept_in_fp8():
    def made(context):
        torch.manual_seed(3)
        with context:
            return te.Linear(16, 16, bias=False, device="cpu")

    plain = made(te.quantized_model_init(enabled=False)).weight.detach()
    layer = made(te.quantized_model_init(recipe=delayed(), preserve_high_precision_init_val=True))
    weight = layer.weight
    assert torch.equal(weight, plain.to(E4M3).float()) and not torch.equal(weight, plain)
    assert torch.equal(weight.get_high_precision_init_val(), plain)

    optimizer = te.optimizers.FusedAdam([weight], lr=1e-6, master_weights=True)
    optimizer.initialize_state(weight)
    optimizer.set_scaled_state(weight, "master_param", weight.get_high_precision_init_val())
    for _ in range(20):
        # the second pass has another scale: the FP8 weight is used unchanged, not quantized again
        for _ in range(2):
            with te.autocast(recipe=delayed()):
                y = layer(torch.ones(16, 16))
            torch.testing.assert_close(y, torch.ones(16, 16) @ weight.T)
        weight.grad = None
        y.sum().backward()  # gradient 16 everywhere: Adam's update is lr, far below FP8's spacing
        optimizer.step()
    master = optimizer.state[weight]["master_param"]
    torch.testing.assert_close(master, plain - 20e-6, rtol=0, atol=1e-7)
    error = (weight - master).abs()
    # at most half of E4M3's spacing
    assert (error <= master.abs() / 16 * 1.001 + 1e-6).all() and error.mean() > 20e-6


# ---- block scaling


def test_block_scales_are_powers_of_two_that_follow_each_block():
    def power_of_2(amax, fp8_max):
        return te.current_scale(amax, fp8_max, power_of_2=True)

    x = torch.zeros(2, 300)  # three blocks per row, the last of 44 columns
    x[0, 5] = 3.5  # 448/3.5 = 128
    x[0, 200] = -1000.0  # 448/1000 -> 1/4
    x[1, 299] = 0.3  # 448/0.3 = 1493 -> 1024
    q, scale, value = te.quantize_in_blocks(x, (1, 128), power_of_2, E4M3)
    assert scale.tolist() == [[128, 0.25, 1], [1, 1, 1024]]
    assert q.shape == value.shape == x.shape
    assert value[0, 5] == 3.5
    assert value[0, 200] == -1024  # 250 -> 256
    assert value[1, 299] == 0.3125  # 307.2 -> 320
    _, exact, _ = te.quantize_in_blocks(x, (1, 128), te.current_scale, E4M3)
    assert exact[0, 1] == torch.tensor(0.448)

    x = torch.zeros(130, 256)
    x[127, 127], x[128, 0], x[0, 128] = 448.0, 224.0, 4480.0
    _, scale, _ = te.quantize_in_blocks(x, (128, 128), power_of_2, E4M3)
    assert scale.tolist() == [[1, 0.0625], [2, 1]]


def test_mxfp8_follows_the_ocp_specification():
    amax = torch.tensor([448.0, 449.0, 1.0, 0.0, 3e38, 2.0**-140, 7.0])
    inverse = te.mx_scale(amax, 448.0).reciprocal()
    assert inverse[:3].tolist() == [1, 2, 2.0**-8] and inverse[6] == 2.0**-6  # 1/448 and 7/448 = 2^-6
    # E8M0 represents every scale exactly
    assert torch.equal(inverse.to(torch.float8_e8m0fnu).float(), inverse)
    x = torch.randn(64, 96) * torch.exp(4 * torch.randn(64, 96))
    q, scale, value = te.quantize_in_blocks(x, (1, 32), te.mx_scale, E4M3)
    blocks = x.view(64, 3, 32)
    assert scale.shape == (64, 3)
    largest = blocks.abs().amax(2) * scale
    assert (largest <= 448).all() and (largest > 224).all()  # the largest power of two that saturates nothing
    scaled = blocks * scale[..., None]
    rounded = scaled.to(E4M3).float() / scale[..., None]
    assert torch.equal(value.view(64, 3, 32), rounded)


@pytest.mark.parametrize("recipe, block", [(te.Float8BlockScaling(), 128), (te.MXFP8BlockScaling(), 32)])
def test_each_gemm_has_blocks_along_its_k_dimension(recipe, block):
    layer = te.Linear(64, 32, bias=True, device="cpu")
    x, grad = torch.randn(96, 64) * torch.exp(2 * torch.randn(96, 64)), torch.randn(96, 32)
    inp = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(inp)
    y.backward(grad)
    scale_of = te.mx_scale if block == 32 else lambda a, m: te.current_scale(a, m, True)

    def held(t, along):
        shape = (1, block) if along == 1 else (block, 1)
        if block == 128 and t is layer.weight:
            shape = (128, 128)
        return te.quantize_in_blocks(t, shape, scale_of, E4M3)[2]

    torch.testing.assert_close(y, held(x, 1) @ held(layer.weight, 1).T + layer.bias)
    torch.testing.assert_close(inp.grad, held(grad, 1) @ held(layer.weight, 0))
    torch.testing.assert_close(layer.weight.grad, held(grad, 0).T @ held(x, 0))
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))
    assert (y - x @ layer.weight.T).norm() < 0.06 * y.norm()
    assert block == 128 or not torch.equal(held(x, 0), held(x, 1))
