"""The kernels between FP8 products, alone: against float64, and against Transformer Engine's own as far as
rounding allows.

Without a GPU they run in Triton's interpreter, and only on the small shapes.
"""

import pytest
import torch
import torch.nn.functional as F

import te_reference

pytest.importorskip("triton")
from fast_kernels import casts as fast_casts  # noqa: E402
from kernel_tools import HAS_GPU, _casts_that_round, _instructions, _poisoned_memory  # noqa: E402, F401

DEVICE = "cuda" if HAS_GPU else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = 2**-8  # the largest share of a value that rounding to BF16 takes or adds


def normal(*shape, size=1.0, mean=0.0):
    return (mean + size * torch.randn(*shape)).to(DEVICE, torch.bfloat16)


def scale_and_amax(scale=50.0, amax=0.0):
    return torch.tensor(scale, device=DEVICE), torch.full((1,), amax, device=DEVICE)


def assert_same_bytes(ours, theirs, fp8, share, noise=0.0):
    """Except where float32 is rounded otherwise: of the values, `share` may be the next FP8 number, and all
    may differ by `noise`."""
    a, b = ours.view(fp8).float(), theirs.view(fp8).float()
    assert torch.equal(a.isnan(), b.isnan())
    other = (a - b).abs() > noise  # 0 and -0 are the same
    assert other.float().mean() <= share
    assert (ours.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs()[other].le(1).all()


def assert_fp8(quantized, exact, scale, amax, fp8, share=1e-3):
    """FP8's three, and amax, are those of float64's `exact`."""
    rowwise, columnwise, scale_inv = quantized
    assert (
        rowwise.dtype == columnwise.dtype == fp8 and rowwise.shape == exact.shape and rowwise.is_contiguous()
    )
    assert (
        torch.equal(columnwise.view(torch.uint8), rowwise.view(torch.uint8).T) and columnwise.is_contiguous()
    )
    # of what is a difference; less than FP8 can hold where the scale is extreme
    noise = min(5e-6 * scale.item(), 5e-4)
    assert_same_bytes(rowwise, te_reference.quantize(exact.float(), scale, fp8), fp8, share, noise)
    # NaN does not count
    assert amax.shape == (1,) and amax.item() == pytest.approx(
        exact.nan_to_num().abs().max().item(), rel=1e-5
    )
    assert (
        scale_inv.shape == (1,)
        and scale_inv.dtype == torch.float32
        and scale_inv.item() == scale.reciprocal().item()
    )


def assert_close(ours, exact, summed=1, equal_nan=False):
    """Equal but for rounding to BF16, and float32's of `added_up` values that may cancel out."""
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(
        ours.double(), exact, rtol=1.01 * BF16, atol=2e-5 * summed**0.5, equal_nan=equal_nan
    )


def on_gpu(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


LARGE = [on_gpu(4096, 768), on_gpu(272, 1040), on_gpu(2048, 4096)]
# whole tiles, or not in columns, in rows, in both
SHAPES = [(64, 128), (64, 144), (48, 128), (16, 16), (80, 272), *LARGE]
# Sizes that people train with, and their neighbours: rows that are no multiple of 32, widths that are no
# power of two
TRAINING = [
    (8208, 16), (8208, 48), (8208, 768), (16400, 1040), (8208, 2064), (16400, 4080), (8208, 4096),
    (32784, 4096), (8208, 5136), (8208, 9216), (8208, 12288), (8208, 16368),
]
KINDS = ["LayerNorm", "RMSNorm"]
TYPES = [E4M3, E5M2]
EPS = 1e-5
# as in training, all saturated, all flushed to zero, many subnormal in E4M3, and in E5M2
SCALES = [50.0, 1e9, 1e-6, 0.01, 2e-5]


# The norm


def make_norm(kind, columns):
    """Its weight and shift."""
    return normal(columns, size=0.3, mean=1.0), normal(columns) if kind == "LayerNorm" else None


def exact_norm(residual, weight, bias):
    if bias is None:
        return F.rms_norm(residual, residual.shape[1:], weight, EPS)
    return F.layer_norm(residual, residual.shape[1:], weight, bias, EPS)


def exact_statistics(residual, bias):
    """Mean (None for RMSNorm) and 1/deviation, from float64."""
    residual = residual.double()
    if bias is None:
        return None, (residual.square().mean(1) + EPS).rsqrt().float()
    return residual.mean(1).float(), (residual.var(1, correction=0) + EPS).rsqrt().float()


def assert_statistics(mean, rstd, residual, bias, equal_nan=False):
    exact_mean, exact_rstd = exact_statistics(residual, bias)
    assert rstd.shape == residual.shape[:1] and rstd.dtype == torch.float32
    torch.testing.assert_close(rstd, exact_rstd, rtol=1e-5, atol=0, equal_nan=equal_nan)
    if bias is None:
        assert mean is None
    else:
        torch.testing.assert_close(mean, exact_mean, rtol=1e-6, atol=1e-6, equal_nan=equal_nan)


def check_norm(x, branch, branch_bias, weight, bias, fp8=E4M3, scale=50.0):
    scale, amax = scale_and_amax(scale)
    residual, quantized, mean, rstd = fast_casts.norm(x, branch, branch_bias, weight, bias, EPS, scale, amax, fp8)
    if branch is None:
        assert residual is x
    else:
        added = x.float() + branch.float() + (0.0 if branch_bias is None else branch_bias.float())
        torch.testing.assert_close(residual, added.bfloat16(), rtol=0, atol=0, equal_nan=True)
    nan = bool(residual.isnan().any())
    assert_statistics(mean, rstd, residual, bias, equal_nan=nan)
    exact = exact_norm(residual.double(), weight.double(), None if bias is None else bias.double())
    assert_fp8(quantized, exact, scale, amax, fp8)
    return residual, quantized, amax


@pytest.mark.parametrize("added", ["nothing", "branch", "branch and bias"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_norm(rows, columns, kind, added):
    x, weight_and_bias = normal(rows, columns, size=2.0), make_norm(kind, columns)
    branch = normal(rows, columns) if "branch" in added else None
    branch_bias = normal(columns, size=3.0) if "bias" in added else None
    before = x.clone()
    check_norm(x, branch, branch_bias, *weight_and_bias)
    assert torch.equal(x, before)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fp8", TYPES)
def test_norm_in_fp8(fp8, scale):
    x, branch, branch_bias = normal(48, 144), normal(48, 144), normal(144)
    weight, bias = make_norm("LayerNorm", 144)
    _, quantized, amax = check_norm(x, branch, branch_bias, weight, bias, fp8, scale)
    before = amax.item()
    for more in (0.5, 2.0):  # a second micro-batch's joins the first one's
        fast_casts.norm(
            x, branch, branch_bias, more * weight, more * bias, EPS, torch.tensor(scale, device=DEVICE), amax, fp8
        )
        assert amax.item() == pytest.approx(max(1.0, more) * before, rel=1e-5)


@pytest.mark.parametrize("ratio", [100.0, -100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_far_from_zero(kind, ratio):
    """A mean of 100 times the deviation leaves the variance as accurate, which a difference of squares would
    not."""
    x, (weight, bias) = normal(48, 272, mean=ratio), make_norm(kind, 272)
    scale, amax = scale_and_amax()
    residual, quantized, mean, rstd = fast_casts.norm(x, None, None, weight, bias, EPS, scale, amax, E4M3)
    assert_statistics(mean, rstd, x, bias)
    exact = exact_norm(x.double(), weight.double(), None if bias is None else bias.double())
    # y is the difference of two that are 100 times larger
    assert_fp8(quantized, exact, scale, amax, E4M3, share=0.01)


def test_norm_of_constant_rows():
    """LayerNorm leaves nothing of them but the shift."""
    x, (weight, bias) = normal(48, 1, size=100.0).expand(48, 272).contiguous(), make_norm("LayerNorm", 272)
    scale, amax = scale_and_amax()
    _, (rowwise, _, _), mean, rstd = fast_casts.norm(x, None, None, weight, bias, EPS, scale, amax, E4M3)
    assert_statistics(mean, rstd, x, bias)
    # E4M3's precision; 1/deviation is 316
    torch.testing.assert_close(rowwise.float() / scale, bias.float().expand(48, 272), rtol=0.07, atol=0.03)


@pytest.mark.parametrize("where", ["x", "branch"])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_of_nan(kind, where):
    """It stays in its row."""
    x, branch, branch_bias = normal(48, 144), normal(48, 144), normal(144)
    dict(x=x, branch=branch)[where][37, 130] = float("nan")
    residual, (rowwise, _, _), amax = check_norm(x, branch, branch_bias, *make_norm(kind, 144))
    assert residual.isnan().sum() == 1
    rows_of_nan = rowwise.float().isnan().sum(1)
    assert rows_of_nan[37] == 144 and rows_of_nan.sum() == 144 and amax.item() > 1


def exact_norm_backward(dy, residual, weight, bias):
    """-> the gradients of stream, weight and shift, float64."""
    inputs = [t.double().requires_grad_() for t in (residual, weight, bias) if t is not None]
    exact_norm(*inputs, *([None] if bias is None else [])).backward(dy.double())
    return [t.grad for t in inputs] + ([None] if bias is None else [])


@pytest.mark.parametrize("wanted", ["stream", "FP8", "FP8 and sums"])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_norm_backward(rows, columns, kind, elsewhere, wanted):
    x, (weight, bias), dy = (
        normal(rows, columns, size=2.0, mean=1.0), make_norm(kind, columns), normal(rows, columns),
    )
    dresidual, (scale, amax) = normal(rows, columns) if elsewhere else None, scale_and_amax()
    residual, _, mean, rstd = fast_casts.norm(x, None, None, weight, bias, EPS, scale, amax.clone(), E4M3)
    dx, quantized, dbranch_bias, dweight, dbias = fast_casts.norm_backward(
        dy, residual, mean, rstd, weight, dresidual, (scale, amax, E5M2) if "FP8" in wanted else None,
        with_dbranch_bias="sums" in wanted,
    )
    exact, exact_dweight, exact_dbias = exact_norm_backward(dy, residual, weight, bias)
    assert_close(dx, exact + dresidual.double() if elsewhere else exact)
    if "FP8" in wanted:
        # Wide rows are computed in two layouts, for the BF16 and for the FP8 copy, and RMSNorm's mean may
        # differ in its last bit. One value in 10^8 is then rounded otherwise to BF16, at a tie of FP8's: of
        # small tensors none.
        assert_fp8(quantized, dx.double(), scale, amax, E5M2, share=1e-6)
    else:
        assert quantized is None and amax.item() == 0
    if "sums" in wanted:
        assert_close(dbranch_bias, dx.double().sum(0), summed=rows)
    else:
        assert dbranch_bias is None
    assert_close(dweight, exact_dweight, summed=rows)
    if bias is None:
        assert dbias is None
    else:
        assert_close(dbias, exact_dbias, summed=rows)


@pytest.mark.parametrize("kind", KINDS)
def test_norm_backward_of_nan(kind):
    """A NaN stays in its row and in the sums, and does not count in the amax, which is as large as before."""
    x, (weight, bias), dy, (scale, amax) = (
        normal(48, 144), make_norm(kind, 144), normal(48, 144), scale_and_amax(amax=100.0),
    )
    dy[5, 130] = float("nan")
    residual, _, mean, rstd = fast_casts.norm(x, None, None, weight, bias, EPS, scale, amax.clone(), E4M3)
    dx, (rowwise, columnwise, _), dbranch_bias, dweight, _ = fast_casts.norm_backward(
        dy, residual, mean, rstd, weight, None, (scale, amax, E5M2), True
    )
    assert (
        dx.isnan().sum()
        == dx[5].isnan().sum()
        == rowwise.float().isnan().sum()
        == columnwise.float()[:, 5].isnan().sum()
        == 144
    )
    assert dbranch_bias.isnan().all() and dweight.isnan().nonzero().tolist() == [[130]] and amax.item() == 100.0


# The activation


ACTIVATIONS = ["gelu", "swiglu"]


def make_activation(activation, rows, columns, size=2.0, with_bias=True):
    """x, its bias or None, and the gradient of the result."""
    width = columns * (2 if activation == "swiglu" else 1)
    return normal(rows, width, size=size), normal(width) if with_bias else None, normal(rows, columns)


def exact_activation(activation, x, bias, dy):
    """The result, and the gradients of x and bias (its length, also of None), in float64."""
    x = x.double().requires_grad_()
    bias = torch.zeros_like(x[0]) if bias is None else bias.double()
    bias = bias.detach().requires_grad_()
    if activation == "gelu":
        y = F.gelu(x + bias, approximate="tanh")
    else:
        a, b = (x + bias).chunk(2, 1)
        y = F.silu(a) * b
    y.backward(dy.double())
    return y.detach(), x.grad, bias.grad


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_activate(rows, columns, activation, with_bias):
    x, bias, dy = make_activation(activation, rows, columns, with_bias=with_bias)
    y, dx, dbias = exact_activation(activation, x, bias, dy)
    scale, amax = scale_and_amax()
    assert_fp8(fast_casts.activate(activation, x, bias, scale, amax, E4M3), y, scale, amax, E4M3)
    quantized, our_dbias = fast_casts.activate_backward(activation, dy, x, bias, scale, amax.zero_(), E5M2)
    assert_fp8(quantized, dx, scale, amax, E5M2)
    if with_bias:
        assert_close(our_dbias, dbias, rows)
    else:
        assert our_dbias is None


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fp8", TYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_in_fp8(activation, fp8, scale):
    x, bias, dy = make_activation(activation, 48, 80)
    y, dx, dbias = exact_activation(activation, x, bias, dy)
    scale, amax = scale_and_amax(scale)
    assert_fp8(fast_casts.activate(activation, x, bias, scale, amax, fp8), y, scale, amax, fp8)
    fast_casts.activate(activation, x[:16] / 4, None, scale, amax, fp8)
    # a second micro-batch's joins the first one's
    assert amax.item() == pytest.approx(y.abs().max().item(), rel=1e-5)
    quantized, our_dbias = fast_casts.activate_backward(activation, dy, x, bias, scale, amax.zero_(), fp8)
    assert_fp8(quantized, dx, scale, amax, fp8)
    assert_close(our_dbias, dbias, len(x))  # whatever becomes of the bytes
    fast_casts.activate_backward(activation, dy[:16] / 4, x[:16], None, scale, amax, fp8)
    assert amax.item() == pytest.approx(dx.abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate_outside_of_the_tensor(activation):
    """A tile's rows beyond the last one, where nothing but the bias would be left, do not count as amax."""
    x, bias, dy = make_activation(activation, 16, 48)
    bias.fill_(32.0)
    x -= bias
    y, _, _ = exact_activation(activation, x, bias, dy)
    scale, amax = scale_and_amax()
    assert_fp8(fast_casts.activate(activation, x, bias, scale, amax, E4M3), y, scale, amax, E4M3)
    assert y.abs().max() < 32


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter: 1/(1 + infinity) is 0 as it should be
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fp8", TYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_values_and_nan(activation, fp8, with_bias):
    """Far from zero an activation is 0 or the identity, without overflow on the way; NaN stays NaN and does
    not count as amax."""
    x, bias, dy = make_activation(activation, 16, 32, with_bias=with_bias)
    x[0, :8] = torch.tensor([1e4, -1e4, 1e18, -1e18, 12.0, -12.0, 90.0, -90.0], device=DEVICE)
    x[1, 3] = float("nan")
    y, dx, dbias = exact_activation(activation, x, bias, dy)
    scale, amax = scale_and_amax(1e-3)
    quantized = fast_casts.activate(activation, x, bias, scale, amax, fp8)
    assert_fp8(quantized, y, scale, amax, fp8)
    rowwise = quantized[0].float()
    assert rowwise[1, 3].isnan() and rowwise.isnan().sum() == 1
    assert not rowwise[0, [1, 3]].any() and rowwise[0, 2].abs() == torch.finfo(fp8).max
    scale, amax = scale_and_amax(1.0)
    quantized, our_dbias = fast_casts.activate_backward(activation, dy, x, bias, scale, amax, fp8)
    assert_fp8(quantized, dx, scale, amax, fp8)
    assert quantized[0].float().isnan().sum() == dx.isnan().sum() == (2 if activation == "swiglu" else 1)
    if with_bias:
        assert_close(our_dbias, dbias, len(x), equal_nan=True)


# The cast, and sums


@pytest.mark.parametrize("fp8", TYPES)
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_cast(rows, columns, fp8):
    """x is in BF16 as it is, so all bytes are the same."""
    x = normal(rows, columns, size=2.0)
    for value in SCALES[::1 if rows == 48 else 5]:
        scale, amax = scale_and_amax(value)
        quantized, dbias = fast_casts.cast(x, scale, amax, fp8, with_dbias=True)
        assert_fp8(quantized, x.double(), scale, amax, fp8, share=0)
        assert torch.equal(
            quantized[0].view(torch.uint8), te_reference.quantize(x.float(), scale, fp8).view(torch.uint8)
        )
        assert amax.item() == x.abs().max().item()
        assert_close(dbias, x.double().sum(0), rows)
    amax.fill_(1e5)
    without, none = fast_casts.cast(x, scale, amax, fp8)
    assert none is None and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(without, quantized)
    )
    assert amax.item() == 1e5  # a second micro-batch's joins the first one's


@pytest.mark.parametrize("fp8", TYPES)
def test_cast_of_infinity_and_nan(fp8):
    x = normal(16, 48)
    x[3, 4], x[5, 6], x[7, 8] = float("nan"), float("inf"), -float("inf")
    scale, amax = scale_and_amax()
    (rowwise, columnwise, _), _ = fast_casts.cast(x, scale, amax, fp8)
    assert_same_bytes(rowwise, te_reference.quantize(x, scale, fp8), fp8, share=0)
    assert (
        rowwise.float().isnan().sum() == 1
        and rowwise[5, 6].float() == -rowwise[7, 8].float() == torch.finfo(fp8).max
    )
    assert torch.equal(columnwise.view(torch.uint8), rowwise.view(torch.uint8).T) and amax.item() == float(
        "inf"
    )


@pytest.mark.parametrize("fp8", TYPES)
@pytest.mark.parametrize(
    "shapes",
    [
        [(64, 64)], [(48, 144), (16, 16), (80, 272)],
        on_gpu([(2304, 768), (768, 768), (16, 4096), (3072, 1040)]),
    ],
)
def test_cast_all(shapes, fp8):
    """As one after the other."""
    tensors = [normal(*shape) for shape in shapes]
    places = [scale_and_amax(30.0 + number, float(number)) for number in range(len(shapes))]
    outputs = [fast_casts.allocate_fp8(x, *x.shape, fp8) for x in tensors]
    table = fast_casts.make_cast_table([(x, out, *place) for x, out, place in zip(tensors, outputs, places)])
    fast_casts.cast_all(table)
    for number, (x, out, (scale, amax)) in enumerate(zip(tensors, outputs, places)):
        expected_amax = torch.full((1,), float(number), device=DEVICE)
        expected, _ = fast_casts.cast(x, scale, expected_amax, fp8)
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(out, expected)
        ) and torch.equal(amax, expected_amax)
    again = [(x, out, *place) for x, out, place in zip(tensors, outputs, places)]
    assert fast_casts.make_cast_table(again, table) is table
    again[-1] = (tensors[-1].clone(), *again[-1][1:])
    assert fast_casts.make_cast_table(again, table) is not table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(1, 5), (3, 40), (64, 2, 16), (65, 33), (130, 3, 48), on_gpu((128, 3, 4096)), on_gpu((5000, 1040))],
)
def test_reduce_rows(shape, dtype):
    x = torch.randn(shape, device=DEVICE)
    total, exact = fast_casts.reduce_rows(x, dtype), x.double().sum(0)
    assert total.dtype == dtype and total.shape == shape[1:]
    torch.testing.assert_close(
        total.double(), exact, rtol=1.01 * BF16 if dtype == torch.bfloat16 else 1e-6,
        atol=1e-5 * shape[0] ** 0.5,
    )


# Sizes of training


@pytest.mark.parametrize("columns", [16, 768, 2064, 4096, 8192, 9216, 12288, 16384])
def test_programs_of_a_norm_take_every_row(columns):
    """Its kernel has no partial last program, so a program's rows must divide all rows."""
    for rows in range(16, 70_000, 16):
        assert rows % fast_casts._norm_sizes(rows, columns)["ROWS"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns", TRAINING)
def test_sizes_of_training(rows, columns):
    """Every kernel, each with all its outputs, in memory that held NaN before."""
    for kind in KINDS:
        test_norm(rows, columns, kind, "branch and bias")
        test_norm_backward(rows, columns, kind, True, "FP8 and sums")
    for activation in ACTIVATIONS:
        test_activate(rows, columns, activation, True)
    test_cast(rows, columns, E5M2)
    test_cast_all([(rows, columns), (48, 144)], E4M3)


@pytest.mark.parametrize(
    "call, problem",
    [
        (
            lambda x: fast_casts.norm(x[:24], None, None, x[0], x[0], EPS, *scale_and_amax(), E4M3),
            r"\(32, 48\) works",
        ),
        (lambda x: fast_casts.cast(x[:, :40].contiguous(), *scale_and_amax(), E4M3), r"\(32, 48\) works"),
        (lambda x: fast_casts.cast(x[:, :32], *scale_and_amax(), E4M3), "must be contiguous"),
        (lambda x: fast_casts.activate("gelu", x.float(), None, *scale_and_amax(), E4M3), "must be bfloat16"),
        (
            lambda x: fast_casts.norm(
                normal(16, 16400), None, None, x[0], None, EPS, *scale_and_amax(), E4M3
            ),
            "at most 16384",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, problem):
    with pytest.raises(ValueError, match=problem):
        call(normal(32, 48))


# With Transformer Engine


@pytest.fixture
def tex():
    """Transformer Engine's own kernels."""
    pytest.importorskip("transformer_engine.pytorch")  # finds the next one
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Transformer Engine has other kernels for other GPUs than Hopper's")
    import transformer_engine_torch

    return transformer_engine_torch


def te_quantizer(tex, scale, fp8, columnwise):
    """For a tensor of its own in FP8, with its transpose or without."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    kind = tex.DType.kFloat8E5M2 if fp8 == E5M2 else tex.DType.kFloat8E4M3
    scale, amax = scale_and_amax(scale)
    return Float8Quantizer(scale, amax, kind, columnwise=columnwise)


def assert_as_transformer_engines(quantized, amax, theirs, quantizer, exact, fp8, noise=0.0):
    """The bytes are the same but for what BF16 rounds to halfway between two FP8 numbers, and as near to the
    exact values."""
    rowwise, columnwise, scale_inv = quantized
    assert rowwise.shape == theirs._data.shape
    assert_same_bytes(rowwise, theirs._data, fp8, 0.05, noise)
    assert torch.equal(columnwise.view(torch.uint8), rowwise.view(torch.uint8).T)
    torch.testing.assert_close(scale_inv, theirs._scale_inv.reshape(1), rtol=2e-7, atol=0)
    # some of TE's take it from BF16
    torch.testing.assert_close(amax, quantizer.amax, rtol=1.01 * BF16, atol=0)
    ours, theirs = (
        (data.view(fp8).double() * scale_inv.double() - exact).norm() for data in (rowwise, theirs._data)
    )
    assert ours <= 1.03 * theirs


TE_SHAPES = [(4096, 768), (272, 1040), (2048, 4096), (64, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", TE_SHAPES)
def test_norm_is_transformer_engines(tex, rows, columns, kind):
    from transformer_engine.pytorch.constants import TE_DType

    x, branch, (weight, bias) = normal(rows, columns), normal(rows, columns), make_norm(kind, columns)
    scale, amax = scale_and_amax()
    residual, quantized, mean, rstd = fast_casts.norm(x, branch, None, weight, bias, EPS, scale, amax, E4M3)
    quantizer = te_quantizer(tex, 50.0, E4M3, columnwise=False)
    parameters, forward = (
        ((weight,), tex.rmsnorm_fwd) if bias is None else ((weight, bias), tex.layernorm_fwd)
    )
    y, te_mean, te_rstd = forward(
        residual, *parameters, EPS, None, quantizer, TE_DType[torch.bfloat16], 0, False
    )
    exact = exact_norm(residual.double(), weight.double(), None if bias is None else bias.double())
    assert_as_transformer_engines(quantized, amax, y, quantizer, exact, E4M3)
    torch.testing.assert_close(rstd, te_rstd, rtol=1e-5, atol=0)
    if bias is not None:
        torch.testing.assert_close(mean, te_mean, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", TE_SHAPES)
def test_norm_backward_is_as_near_as_transformer_engines(tex, rows, columns, kind):
    """As near to float64's as its is, which is rounded to BF16 once more before the gradient from elsewhere
    is added."""
    x, (weight, bias), dy, dresidual = (
        normal(rows, columns), make_norm(kind, columns), normal(rows, columns), normal(rows, columns),
    )
    residual, _, mean, rstd = fast_casts.norm(x, None, None, weight, bias, EPS, *scale_and_amax(), E4M3)
    exact = exact_norm_backward(dy, residual, weight, bias)
    if bias is None:
        theirs = [*tex.rmsnorm_bwd(dy, residual, rstd, weight, 0, False), None]
    else:
        theirs = tex.layernorm_bwd(dy, residual, mean, rstd, weight, 0, False)
    dx, _, _, *ours = fast_casts.norm_backward(dy, residual, mean, rstd, weight, dresidual)
    for a, b, to in zip(
        (dx, *ours), (theirs[0] + dresidual, *theirs[1:]), (exact[0] + dresidual.double(), *exact[1:])
    ):
        assert (a is None) == (to is None)
        if to is not None:
            assert (a.double() - to).norm() <= 1.03 * (b.double() - to).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows, columns", TE_SHAPES)
def test_activation_is_transformer_engines(tex, rows, columns, activation):
    x, _, dy = make_activation(activation, rows, columns)
    bias = torch.zeros_like(x[0])  # TE's is in x by now
    y, dx, _ = exact_activation(activation, x, None, dy)
    scale, amax = scale_and_amax(40.0)
    quantized = fast_casts.activate(activation, x, bias, scale, amax, E4M3)
    quantizer = te_quantizer(tex, 40.0, E4M3, columnwise=False)
    theirs = getattr(tex, activation)(x, quantizer)
    assert_as_transformer_engines(quantized, amax, theirs, quantizer, y, E4M3)

    scale, amax = scale_and_amax(3e3)
    quantized, dbias = fast_casts.activate_backward(activation, dy, x, bias, scale, amax, E5M2)
    quantizer = te_quantizer(tex, 3e3, E5M2, columnwise=True)
    if activation == "gelu":
        te_dbias, theirs = tex.dbias_dgelu(dy, x, quantizer)
    else:
        te_dbias, theirs = tex.bgrad_quantize(tex.dswiglu(dy, x, None), quantizer)
    noise = 4e-6 * 3e3 * dy.abs().max().item()  # where the slope is 0, as a difference
    assert_as_transformer_engines(quantized, amax, theirs, quantizer, dx, E5M2, noise)
    error, te_error = ((t.double() - dx.sum(0)).norm() for t in (dbias, te_dbias))
    assert error <= 1.03 * te_error


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", TYPES)
@pytest.mark.parametrize("rows, columns", TE_SHAPES)
def test_cast_is_transformer_engines(tex, rows, columns, fp8):
    """Byte for byte, in both layouts."""
    x = normal(rows, columns)
    scale, amax = scale_and_amax()
    (rowwise, columnwise, scale_inv), dbias = fast_casts.cast(x, scale, amax, fp8, with_dbias=True)
    quantizer = te_quantizer(tex, 50.0, fp8, columnwise=True)
    te_dbias, theirs = tex.bgrad_quantize(x, quantizer)
    assert torch.equal(rowwise.view(torch.uint8), theirs._data) and torch.equal(
        columnwise.view(torch.uint8), theirs._transpose
    )
    assert torch.equal(amax, quantizer.amax) and torch.equal(scale_inv, theirs._scale_inv.reshape(1))
    torch.testing.assert_close(dbias, te_dbias, rtol=2 * BF16, atol=1e-3)
