"""The fused kernels between FP8 GEMMs, each against its plain PyTorch version in float64.

Without a GPU they run in Triton's interpreter, on small shapes only.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

import te_reference

pytest.importorskip("triton")
from fast_kernels import casts as fast_casts
from fast_kernels.fp8 import Quantization
from kernel_tools import DEVICE, _as_on_a_gpu, _free_memory, _poisoned_memory, needs_memory, on_gpu  # noqa: F401

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = 2**-8  # largest relative error of rounding to BF16
KINDS, TYPES, EPS = ["LayerNorm", "RMSNorm"], [E4M3, E5M2], 1e-5
# as in training; all saturated; all flushed to zero; many subnormal in E4M3; many subnormal in E5M2
SCALES = [50.0, 1e9, 1e-6, 0.01, 2e-5]
LARGE = [(4096, 768), (272, 1040), (2048, 4096)]
FORMAT_AND_SCALE = [*((E4M3, scale) for scale in SCALES[:4]), (E5M2, SCALES[0]), (E5M2, SCALES[4])]
# Training sizes and sizes near them: rows that are (not) a multiple of 32, widths that are no power of two
TRAINING = [
    (8208, 16), (8208, 48), (8208, 768), (16400, 1040), (8208, 2064), (16400, 4080), (8208, 4096),
    (16384, 4096), (8208, 5136), (8208, 9216), (8208, 12288), (8208, 16368)]


def normal(*shape, size=1.0, mean=0.0):
    return (mean + size * torch.randn(*shape, device=DEVICE)).bfloat16()


def scale_and_amax(scale=50.0, amax=0.0):
    return torch.tensor(scale, device=DEVICE), torch.full((1,), amax, device=DEVICE)


def bytes_of(x):
    return x.view(torch.uint8)


def assert_same_bytes(ours, theirs, fp8_dtype, share, noise=0.0):
    """Compare FP8 data. A `share` of the values may be the next FP8 number, and all may differ by `noise`,
    since float32 rounding differs."""
    a, b = ours.view(fp8_dtype).float(), theirs.view(fp8_dtype).float()
    assert torch.equal(a.isnan(), b.isnan())
    differs = (a - b).abs() > noise  # 0 equals -0
    assert differs.float().mean() <= share
    steps = (bytes_of(ours).int() - bytes_of(theirs).int()).abs()
    assert steps[differs].le(1).all()


def assert_fp8(quantized, amax, expected, expected_amax, scale, share=1e-3):
    """Assert that an FP8 tensor and amax are those of the reference."""
    rowwise, columnwise, scale_inv = quantized
    expected_rowwise, _, expected_scale_inv = expected
    assert rowwise.dtype == columnwise.dtype == expected_rowwise.dtype
    assert rowwise.shape == expected_rowwise.shape
    assert rowwise.is_contiguous() and columnwise.is_contiguous()
    assert torch.equal(bytes_of(columnwise), bytes_of(rowwise).T)
    # float32 cancellation; with an extreme scale, less than FP8's smallest number
    noise = min(5e-6 * scale.item(), 5e-4)
    assert_same_bytes(rowwise, expected_rowwise, rowwise.dtype, share, noise)
    assert amax.shape == (1,)
    assert amax.item() == pytest.approx(expected_amax.item(), rel=1e-5)
    assert scale_inv.shape == (1,) and torch.equal(scale_inv, expected_scale_inv)


def assert_close(ours, exact, summed=1):
    """Assert equality up to rounding to BF16, and up to the float32 rounding of a sum of `summed` values."""
    assert (ours is None) == (exact is None)
    if exact is not None:
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(
            ours.double(), exact.double(), rtol=1.01 * BF16, atol=2e-5 * summed**0.5, equal_nan=True)


def test_the_reference_activations_are_those_of_te_reference():
    assert set(fast_casts.ACTIVATIONS) == set(te_reference.ACTIVATIONS)
    x = torch.randn(16, 32, dtype=torch.float64)
    for name, function in te_reference.ACTIVATIONS.items():
        torch.testing.assert_close(fast_casts.activation_reference(name, x), function(x))


@pytest.mark.parametrize("fp8_dtype, value", zip(TYPES, SCALES))
def test_the_reference_quantization_is_that_of_te_reference(fp8_dtype, value):
    """That one is Transformer Engine's (tests/test_te_gpu.py)."""
    x = normal(48, 80)
    x[3, 4], x[5, 6], x[7, 8] = float("nan"), 1e30, -1e30
    scale, amax = scale_and_amax(value)
    rowwise, _, scale_inv = fast_casts.quantize_reference(x, Quantization(scale, amax, fp8_dtype))
    assert torch.equal(bytes_of(rowwise), bytes_of(te_reference.quantize(x, scale, fp8_dtype)))
    assert scale_inv == scale.reciprocal()
    assert amax.item() == te_reference.amax_of(x).item()


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_norm_is_that_of_pytorch(kind):
    x, dy = normal(48, 80), normal(48, 80)
    weight, bias = make_norm(kind, 80)
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    if kind == "LayerNorm":
        exact_bias = bias.double().requires_grad_()
        inputs = exact_x, exact_weight, exact_bias
        y = F.layer_norm(exact_x, (80,), exact_weight, exact_bias, EPS)
    else:
        inputs = exact_x, exact_weight
        y = F.rms_norm(exact_x, (80,), exact_weight, EPS)

    quantization = Quantization(*scale_and_amax(), E4M3)
    _, quantized, mean, rstd = fast_casts.norm_reference(x, None, weight, bias, EPS, quantization)
    expected = fast_casts.quantize_reference(y.detach(), quantization)
    assert_same_bytes(quantized[0], expected[0], E4M3, share=0.0)

    dx, _, _, dweight, dbias = fast_casts.norm_backward_reference(dy, x, mean, rstd, weight, None)
    gradients = [dx, dweight] if bias is None else [dx, dweight, dbias]
    for ours, theirs in zip(gradients, torch.autograd.grad(y, inputs, dy.double()), strict=True):
        torch.testing.assert_close(ours, theirs)


# The norm


def make_norm(kind, columns):
    """Make weight and bias, None for RMSNorm."""
    return normal(columns, size=0.3, mean=1.0), normal(columns) if kind == "LayerNorm" else None


def assert_statistic(ours, exact):
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)


def check_norm(x, branch, weight, bias, fp8_dtype=E4M3, scale=50.0, share=1e-3):
    inputs = x, branch, weight, bias, EPS
    scale, amax = scale_and_amax(scale)
    expected_amax = amax.clone()
    residual, quantized, mean, rstd = fast_casts.norm(*inputs, Quantization(scale, amax, fp8_dtype))
    exact_residual, exact_quantized, exact_mean, exact_rstd = fast_casts.norm_reference(
        *inputs, Quantization(scale, expected_amax, fp8_dtype))
    assert (residual is x) == (branch is None)
    torch.testing.assert_close(residual, exact_residual, rtol=0, atol=0, equal_nan=True)
    assert (mean is None) == (exact_mean is None)
    if mean is not None:
        assert_statistic(mean, exact_mean)
    assert_statistic(rstd, exact_rstd)
    assert_fp8(quantized, amax, exact_quantized, expected_amax, scale, share)
    # the same without FP8
    residual_again, y, mean, rstd = fast_casts.norm_bf16(*inputs)
    torch.testing.assert_close(residual_again, exact_residual, rtol=0, atol=0, equal_nan=True)
    assert (mean is None) == (exact_mean is None)
    if mean is not None:
        assert_statistic(mean, exact_mean)
    assert_statistic(rstd, exact_rstd)
    assert_close(y, fast_casts.norm_bf16_reference(*inputs)[1])
    return residual, quantized, amax


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns, added", [  # whole tiles; partial tiles in rows, in rows and columns
    (64, 128, "nothing"), (48, 128, "branch"), (80, 272, "branch"),
    *(on_gpu(*shape, added) for shape in LARGE for added in ("nothing", "branch"))])
def test_norm(rows, columns, kind, added):
    x = normal(rows, columns, size=2.0)
    weight, bias = make_norm(kind, columns)
    branch = normal(rows, columns) if added == "branch" else None
    before = x.clone()
    check_norm(x, branch, weight, bias)
    assert torch.equal(x, before)


@pytest.mark.parametrize("fp8_dtype, scale", FORMAT_AND_SCALE)
def test_norm_in_fp8(fp8_dtype, scale):
    x, branch = normal(16, 144), normal(16, 144)
    weight, bias = make_norm("LayerNorm", 144)
    x[5, 130] = branch[7, 3] = float("nan")  # it stays in its row and does not count in the amax
    residual, (rowwise, _, _), amax = check_norm(x, branch, weight, bias, fp8_dtype, scale)
    assert residual.isnan().sum() == 2 and rowwise.float().isnan().all(1).nonzero().tolist() == [[5], [7]]
    before = amax.item()
    for more in (0.5, 2.0):  # a second micro-batch raises the first one's amax or leaves it
        quantization = Quantization(torch.tensor(scale, device=DEVICE), amax, fp8_dtype)
        fast_casts.norm(x, branch, more * weight, more * bias, EPS, quantization)
        assert amax.item() == pytest.approx(max(1.0, more) * before, rel=1e-5)


@pytest.mark.parametrize("kind, ratio", [("LayerNorm", -100.0), ("RMSNorm", 100.0)])
def test_norm_far_from_zero(kind, ratio):
    """The variance is accurate with a mean of 100 standard deviations; E[x²] - E[x]² would not be. y is the
    difference of numbers 100 times larger."""
    check_norm(normal(48, 272, mean=ratio), None, *make_norm(kind, 272), share=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns, with_dresidual, wanted", [
    (64, 128, False, "FP8 and dbranch_bias"), (48, 128, False, "dx"), (16, 16, True, "FP8"),
    (80, 272, True, "FP8 and dbranch_bias"),
    *(on_gpu(*shape, *options) for shape in LARGE for options in itertools.product(
        (False, True), ("dx", "FP8", "FP8 and dbranch_bias")))])
def test_norm_backward(rows, columns, kind, with_dresidual, wanted):
    x = normal(rows, columns, size=2.0, mean=1.0)
    weight, bias = make_norm(kind, columns)
    dresidual = normal(rows, columns) if with_dresidual else None
    scale, amax = scale_and_amax()
    forward = Quantization(scale, amax.clone(), E4M3)
    _, _, mean, rstd = fast_casts.norm(x, None, weight, bias, EPS, forward)
    inputs = normal(rows, columns), x, mean, rstd, weight, dresidual
    quantization = Quantization(scale, amax, E5M2) if "FP8" in wanted else None
    with_dbranch_bias = "dbranch_bias" in wanted
    dx, quantized, dbranch_bias, *gradients = fast_casts.norm_backward(
        *inputs, quantization, with_dbranch_bias)
    exact, _, _, *exact_gradients = fast_casts.norm_backward_reference(*inputs)
    assert_close(dx, exact)
    if quantization:
        # of the dx that was computed. Triton computes wide rows in two layouts, for the BF16 and for the FP8
        # copy, and RMSNorm's mean may differ in its last bit: one value in 10^8 then rounds differently.
        expected_amax = torch.zeros_like(amax)
        expected = fast_casts.quantize_reference(dx, Quantization(scale, expected_amax, E5M2))
        assert_fp8(quantized, amax, expected, expected_amax, scale, share=1e-6)
    else:
        assert quantized is None and amax.item() == 0
    if with_dbranch_bias:  # of the same two layouts: one value of a column may round differently
        one_rounding = BF16 * dx.abs().amax(0).double()
        difference = (dbranch_bias.double() - dx.double().sum(0)).abs()
        assert (difference <= 1.01 * BF16 * dbranch_bias.abs() + 2e-5 * rows**0.5 + one_rounding).all()
    else:
        assert dbranch_bias is None
    for ours, theirs in zip(gradients, exact_gradients):
        assert_close(ours, theirs, summed=rows)


@pytest.mark.parametrize("kind", KINDS)
def test_norm_backward_of_nan(kind):
    """A NaN affects its row and the sums over rows, and does not count in the amax."""
    x, dy = normal(48, 144), normal(48, 144)
    weight, bias = make_norm(kind, 144)
    scale, amax = scale_and_amax(amax=100.0)
    dy[5, 130] = float("nan")
    forward = Quantization(scale, amax.clone(), E4M3)
    residual, _, mean, rstd = fast_casts.norm(x, None, weight, bias, EPS, forward)
    dx, (rowwise, columnwise, _), dbranch_bias, dweight, _ = fast_casts.norm_backward(
        dy, residual, mean, rstd, weight, None, Quantization(scale, amax, E5M2), True)
    for values in (dx, rowwise.float(), columnwise.float().T):
        rows = values.isnan().all(1).nonzero().tolist()
        assert rows == [[5]] and values.isnan().sum() == 144
    assert dbranch_bias.isnan().all() and dweight.isnan().nonzero().tolist() == [[130]]
    assert amax.item() == 100.0


# The activation


def make_activation(activation, rows, columns, size=2.0):
    """Make x and the gradient of the output."""
    width = columns * (2 if activation in fast_casts.GATED else 1)
    return normal(rows, width, size=size), normal(rows, columns)


def check_activation(activation, x, dy, with_dbias=True, fp8_dtypes=(E4M3, E5M2), scale=50.0):
    """Compare output and gradients with the reference's; return the FP8 data of output and dx."""
    scale, amax = scale_and_amax(scale)
    forward = Quantization(scale, amax, fp8_dtypes[0])
    y = fast_casts.activate(activation, x, forward)
    expected_amax = torch.zeros_like(amax)
    expected = fast_casts.activate_reference(
        activation, x, Quantization(scale, expected_amax, fp8_dtypes[0]))
    assert_fp8(y, amax, expected, expected_amax, scale)
    if len(x) > 16:  # smaller values of a second micro-batch leave the amax as it is
        amax.clamp_(min=1e3)
        before = amax.item()
        fast_casts.activate(activation, x[:16] / 4, forward)
        assert amax.item() == before
    dx, dbias = fast_casts.activate_backward(
        activation, dy, x, Quantization(scale, amax.zero_(), fp8_dtypes[1]), with_dbias)
    expected, exact_dbias = fast_casts.activate_backward_reference(
        activation, dy, x, Quantization(scale, expected_amax.zero_(), fp8_dtypes[1]), with_dbias)
    assert_fp8(dx, amax, expected, expected_amax, scale)
    assert_close(dbias, exact_dbias, len(x))
    # the same without FP8
    assert_close(fast_casts.activate_bf16(activation, x), fast_casts.activate_bf16_reference(activation, x))
    dx_bf16, dbias = fast_casts.activate_backward_bf16(activation, dy, x, with_dbias)
    exact_dx, exact_dbias = fast_casts.activate_backward_bf16_reference(activation, dy, x, with_dbias)
    assert_close(dx_bf16, exact_dx)
    assert_close(dbias, exact_dbias, len(x))
    return y[0].float(), dx[0].float()


@pytest.mark.parametrize("activation", fast_casts.ACTIVATIONS)
@pytest.mark.parametrize("rows, columns, with_dbias", [
    (64, 128, False), (80, 272, True),
    *(on_gpu(*shape, with_dbias) for shape in LARGE for with_dbias in (False, True))])
def test_activate(rows, columns, activation, with_dbias):
    check_activation(activation, *make_activation(activation, rows, columns), with_dbias)


@pytest.mark.parametrize("fp8_dtype, scale", FORMAT_AND_SCALE)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activate_in_fp8(activation, fp8_dtype, scale):
    x, dy = make_activation(activation, 48, 80)
    check_activation(activation, x, dy, fp8_dtypes=(fp8_dtype, fp8_dtype), scale=scale)


@pytest.mark.filterwarnings("ignore:overflow")  # in the interpreter; 1/(1 + inf) = 0 is correct
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("activation", fast_casts.ACTIVATIONS)
def test_large_values_and_nan(activation, fp8_dtype):
    """Far from zero an activation is 0 or the identity (squared), without an overflow; NaN stays NaN and does
    not count in the amax."""
    x, dy = make_activation(activation, 16, 32)
    x[0, :8] = torch.tensor([1e4, -1e4, 1e18, -1e18, 12.0, -12.0, 90.0, -90.0], device=DEVICE)
    x[1, 3] = float("nan")
    y, _ = check_activation(activation, x, dy, fp8_dtypes=(fp8_dtype, fp8_dtype), scale=1e-3)
    assert y[1, 3].isnan() and y.isnan().sum() == 1
    assert not y[0, [1, 3]].any() and y[0, 2].abs() == torch.finfo(fp8_dtype).max


# Casts and sums over rows


CAST_SHAPES = [(64, 128), (80, 272), *(on_gpu(*shape) for shape in LARGE)]


def check_cast(x, scale, amax, fp8_dtype):
    """Compare a cast with the reference. The input is BF16, so all bytes are equal. Return the FP8 tensor."""
    expected_amax = amax.clone()
    expected = fast_casts.quantize_reference(x, Quantization(scale, expected_amax, fp8_dtype))
    quantized, dbias = fast_casts.cast(x, Quantization(scale, amax, fp8_dtype), with_dbias=True)
    assert torch.equal(bytes_of(quantized[0]), bytes_of(expected[0]))
    assert_fp8(quantized, amax, expected, expected_amax, scale, share=0)
    assert_close(dbias, x.double().sum(0), len(x))
    return quantized


def assert_equal_fp8(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(bytes_of(a), bytes_of(b))


@pytest.mark.parametrize("fp8_dtype", TYPES)
@pytest.mark.parametrize("rows, columns", CAST_SHAPES)
def test_cast(rows, columns, fp8_dtype):
    x = normal(rows, columns, size=2.0)
    values = SCALES if rows == 80 else SCALES[:1]
    for value in values:
        scale, amax = scale_and_amax(value)
        check_cast(x, scale, amax, fp8_dtype)


@pytest.mark.parametrize("offset", [0, 1, 4, 8, 0])  # elements; a kernel is compiled for each alignment
def test_a_cast_of_memory_that_is_not_aligned(offset):
    rows, columns = 64, 128
    x = normal(1, rows * columns + offset)[0, offset:].view(rows, columns)
    check_cast(x, *scale_and_amax(), E4M3)


@pytest.mark.parametrize("fp8_dtype", TYPES)
@pytest.mark.parametrize("rows, columns", CAST_SHAPES)
def test_a_cast_into_memory_that_is_there(rows, columns, fp8_dtype):
    x = normal(rows, columns, size=2.0)
    quantization = Quantization(*scale_and_amax(amax=1e5), fp8_dtype)
    quantized, dbias = fast_casts.cast(x, quantization)
    out = fast_casts.allocate_fp8(x, rows, columns, fp8_dtype)
    written, _ = fast_casts.cast(x, quantization, out=out)
    assert all(a is b for a, b in zip(written, out, strict=True))
    assert_equal_fp8(written, quantized)
    assert dbias is None
    assert quantization.amax.item() == 1e5  # a larger amax from an earlier micro-batch stays


@pytest.mark.parametrize("fp8_dtype", TYPES)
def test_a_cast_of_nan_and_infinity(fp8_dtype):
    x = normal(80, 272, size=2.0)
    x[3, 4], x[5, 6], x[7, 8] = float("nan"), float("inf"), -float("inf")
    scale, amax = scale_and_amax()
    expected_amax = amax.clone()
    expected = fast_casts.quantize_reference(x, Quantization(scale, expected_amax, fp8_dtype))
    quantized, _ = fast_casts.cast(x, Quantization(scale, amax, fp8_dtype))
    assert_fp8(quantized, amax, expected, expected_amax, scale, share=0)
    values = quantized[0].float()
    assert values.isnan().sum() == 1 and amax.item() == float("inf")
    assert values[5, 6] == torch.finfo(fp8_dtype).max and values[7, 8] == -torch.finfo(fp8_dtype).max


@pytest.mark.parametrize("fp8_dtype", TYPES)
@pytest.mark.parametrize("shapes", [
    [(64, 64)], [(48, 144), (16, 16), (80, 272)],
    on_gpu([(2304, 768), (768, 768), (16, 4096), (3072, 1040)])])
def test_cast_all(shapes, fp8_dtype):
    """One launch equals a cast of each tensor, also without transposed copies."""
    tensors = [normal(*shape) for shape in shapes]
    outputs = [fast_casts.allocate_fp8(x, *x.shape, fp8_dtype) for x in tensors]
    scales = [torch.tensor(30.0 + number, device=DEVICE) for number in range(len(shapes))]
    amaxes = [torch.full((1,), float(number), device=DEVICE) for number in range(len(shapes))]
    expected_amaxes = [amax.clone() for amax in amaxes]
    rowwise, columnwise, scale_inv = map(list, zip(*outputs))
    fast_casts.cast_all(tensors, rowwise, columnwise, scale_inv, scales, amaxes)
    for x, out, scale, amax, expected_amax in zip(tensors, outputs, scales, amaxes, expected_amaxes):
        expected, _ = fast_casts.cast(x, Quantization(scale, expected_amax, fp8_dtype))
        assert_equal_fp8(out, expected)
        assert torch.equal(amax, expected_amax)
    again = [torch.empty_like(data) for data in rowwise]
    fast_casts.cast_all(tensors, again, [], scale_inv, scales, amaxes)
    for data, expected in zip(again, rowwise):
        assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [
    (1, 5), (3, 40), (64, 2, 16), (65, 33), (130, 3, 48), on_gpu((128, 3, 4096)), on_gpu((5000, 1040))])
def test_reduce_rows(shape, dtype):
    x = torch.randn(shape, device=DEVICE)
    total = fast_casts.reduce_rows(x, torch.empty(shape[1:], dtype=dtype, device=DEVICE))
    exact = x.double().sum(0)
    torch.testing.assert_close(
        total.double(), exact, rtol=1.01 * BF16 if dtype == torch.bfloat16 else 1e-6,
        atol=1e-5 * shape[0] ** 0.5)


# As operations


def test_operations_are_registered():
    x, (weight, bias), ops = normal(16, 32), make_norm("LayerNorm", 32), torch.ops.fast_kernels
    _, amax = quantization = scale_and_amax()  # each operation raises the amax, which shows in the schema
    _, _, mean, rstd = fast_casts.norm_bf16_reference(x, x, weight, bias, EPS)
    out, half = make_fp8(16, 32), x[:, :16].contiguous()
    for op, arguments in (
        (ops.norm, (x, x, weight, bias, EPS, *quantization, E4M3)),
        (ops.norm, (x, None, weight, None, EPS, *quantization, E4M3)),
        (ops.norm_backward, (x, x, mean.float(), rstd.float(), weight, x, *quantization, E5M2, True)),
        (ops.norm_backward, (x, x, None, rstd.float(), weight, None, None, None, None, False)),
        (ops.activate, ("swiglu", x, *quantization, E4M3)),
        (ops.activate_backward, ("swiglu", half, x, *quantization, E5M2, True)),
        (ops.activate_backward, ("gelu", x, x, *quantization, E5M2, False)),
        (ops.cast, (x, *quantization, *out, torch.empty_like(x[0]))),
        (ops.cast, (x, *quantization, *out, None)),
        (ops.cast_all, ([x], *([t] for t in out), *([t] for t in quantization)))):
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if op not in (ops.cast, ops.cast_all):  # it multiplies the inputs, which PyTorch cannot in FP8
            checks.append("test_schema")
        torch.library.opcheck(op.default, tuple(arguments), test_utils=checks)
        assert not amax.item()  # opcheck works on copies


def make_fp8(*shape, dtype=E4M3):
    return fast_casts.allocate_fp8(torch.empty(0, device=DEVICE), *shape, dtype)


@pytest.mark.parametrize("call, problem", [
    (lambda x, q: fast_casts.norm(x[:24], None, x[0], x[0], EPS, q), r"\(32, 48\) works"),
    (lambda x, q: fast_casts.norm(x, x[:16], x[0], x[0], EPS, q), r"branch .* be \(32, 48\)"),
    (lambda x, q: fast_casts.norm(x, x, x[0, :16], x[0], EPS, q), r"weight .* \(48,\)"),
    (lambda x, q: fast_casts.norm(normal(16, 16400), None, x[0], None, EPS, q), "at most 16384"),
    (lambda x, q: fast_casts.norm_backward(x, x, None, x[0], x[0], x.T), "dresidual .* must be"),
    (lambda x, q: fast_casts.cast(x[:, :40].contiguous(), q), r"\(32, 48\) works"),
    (lambda x, q: fast_casts.cast(x[:, :32], q), "must be a contiguous"),
    (lambda x, q: fast_casts.cast(x, q, out=make_fp8(32, 32)), r"rowwise .* be \(32, 48\)"),
    (lambda x, q: fast_casts.cast(x, q, out=make_fp8(32, 48, dtype=E5M2)), "rowwise .* torch.float8_e4m3fn"),
    (lambda x, q: fast_casts.cast_all(*([t] for t in (x, *make_fp8(32, 32), *q[:2]))), r"must be \(32, 48\)"),
    (lambda x, q: fast_casts.cast_all(*([t] for t in (x.float(), *make_fp8(32, 48), *q[:2]))),
     "bfloat16 matrix"),
    (lambda x, q: fast_casts.activate("gelu", x.float(), q), "contiguous bfloat16 matrix"),
    (lambda x, q: fast_casts.activate("tanh", x, q), "must be one of gelu, relu"),
    (lambda x, q: fast_casts.activate("swiglu", x, q), "64 works"),
    (lambda x, q: fast_casts.activate_backward("gelu", x[:16], x, q), r"dy .* be \(32, 48\)")])
def test_unsupported_inputs_raise(call, problem):
    with pytest.raises(ValueError, match=problem):
        call(normal(32, 48), (*scale_and_amax(), E4M3))


# Training sizes


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns", TRAINING)
def test_training_sizes(rows, columns):
    """Run every kernel with all outputs, in memory that held NaN."""
    needs_memory(min(20, 2 + 150 * rows * columns / 2**30))
    for kind in KINDS:
        test_norm(rows, columns, kind, "branch and bias")
        test_norm_backward(rows, columns, kind, True, "FP8 and dbranch_bias")
        torch.cuda.empty_cache()  # for other test processes on this GPU
    for activation in fast_casts.ACTIVATIONS:
        test_activate(rows, columns, activation, True)
        torch.cuda.empty_cache()
    test_cast(rows, columns, E5M2)
    test_a_cast_into_memory_that_is_there(rows, columns, E5M2)
    test_cast_all([(rows, columns), (48, 144)], E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["norm", "norm_backward", "gelu", "swiglu", "cast", "cast_all"])
def test_more_than_2_to_the_31_elements(name):
    """The last rows equal these rows without the others."""
    rows, columns = 131_200, 16_384
    needs_memory(16)
    few = normal(128, columns)
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-128:] = few
    assert x.numel() > 2**31

    def run(x):
        quantization = Quantization(*scale_and_amax(), E4M3)
        if name == "norm":
            yield fast_casts.norm(x, None, few[0], few[1], EPS, quantization)[1]
        elif name == "norm_backward":
            rstd = torch.ones(len(x), device="cuda")
            yield fast_casts.norm_backward(x, x, None, rstd, few[0], None, quantization)[1]
        elif name == "cast":
            yield fast_casts.cast(x, quantization)[0]
        elif name == "cast_all":
            out = fast_casts.allocate_fp8(x, *x.shape, E4M3)
            fast_casts.cast_all(*([t] for t in (x, *out, *quantization[:2])))
            yield out
        else:
            yield fast_casts.activate(name, x, quantization)
            dy = x[:, :columns // 2].contiguous() if name == "swiglu" else x
            yield fast_casts.activate_backward(name, dy, x, quantization)[0]

    for (rowwise, columnwise, _), (expected, _, _) in zip(run(x), run(few)):
        assert torch.equal(bytes_of(rowwise[-128:]), bytes_of(expected)) and expected.float().any()
        assert torch.equal(bytes_of(columnwise[:, -128:].contiguous()), bytes_of(expected).T)
