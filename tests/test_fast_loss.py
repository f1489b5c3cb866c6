"""The fused loss: cross-entropy and gradient against float64; the FP8 gradient, byte for byte, against the
cast of the BF16 gradient."""

import pytest
import torch
import torch.nn.functional as F

import te_reference

pytest.importorskip("triton")
from fast_kernels import loss as fast_loss
from fast_kernels.fp8 import Float8Tensor
from fast_kernels.loss import cross_entropy, cross_entropy_reference
from kernel_tools import DEVICE, _as_on_a_gpu, _free_memory, _poisoned_memory, capture, needs_memory, on_gpu  # noqa: F401

FORMATS = [torch.float8_e5m2, torch.float8_e4m3fn]
OPTIONS = [{}, {"label_smoothing": 0.1}, {"softcap": 5.0}, {"label_smoothing": 0.2, "softcap": 30.0}]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothing", "softcap", "both"])


def make_inputs(rows, vocab_size, dtype=torch.bfloat16, size=3.0, ignored=0.3):
    logits = (size * torch.randn(rows, vocab_size, device=DEVICE)).to(dtype)
    labels = torch.randint(vocab_size, (rows,))
    labels[torch.rand(rows) < ignored] = -100
    labels[0], labels[-1] = 0, vocab_size - 1
    return logits, labels.to(DEVICE)


def loss_and_gradient(logits, labels, factor=1.0, **options):
    """Return loss times `factor`, and its gradient; backward overwrites a copy of the logits."""
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf.clone(), labels, **options) * factor
    loss.backward()
    return loss.detach(), leaf.grad


def exact_loss_and_gradient(logits, labels, factor=1.0, softcap=None, **options):
    """The same in float64, with nothing but PyTorch."""
    leaf = logits.double().requires_grad_()
    capped = leaf if softcap is None else softcap * (leaf / softcap).tanh()
    loss = factor * F.cross_entropy(capped, labels, **options)
    loss.backward()
    return loss.detach(), leaf.grad


class Head(torch.autograd.Function):
    """Stands in for an FP8 output head: receives the gradient of its output as autograd hands it on."""

    @staticmethod
    def forward(ctx, x, received):
        ctx.received = received
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.received.append(gradient)
        return None, None


def fp8_gradient(logits, labels, scale, amax, fp8_dtype, factor=1.0, **options):
    """Return the Float8Tensor that the output head receives."""
    received = []
    logits = Head.apply(logits.clone().requires_grad_(), received)
    loss = cross_entropy(logits, labels, (scale, amax, fp8_dtype), **options)
    (loss * factor).backward()
    gradient, = received
    assert isinstance(gradient, Float8Tensor) and gradient.shape == logits.shape
    assert gradient.dtype == logits.dtype and gradient.rowwise.dtype == fp8_dtype
    assert torch.equal(gradient.columnwise.view(torch.uint8), gradient.rowwise.view(torch.uint8).T)
    assert gradient.scale_inv.shape == (1,) and gradient.scale_inv.item() == scale.reciprocal().item()
    return gradient


@every_option
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("rows, vocab_size", [
    (5, 96), (4, 5000), on_gpu(2048, 50304), on_gpu(33, 262144)])
def test_loss_and_gradient(rows, vocab_size, dtype, tolerance, options):
    logits, labels = make_inputs(rows, vocab_size, dtype)
    loss, gradient = loss_and_gradient(logits, labels, factor=-2.5, **options)
    expected, exact = exact_loss_and_gradient(logits, labels, factor=-2.5, **options)
    assert loss.shape == () and loss.dtype == torch.float32 and gradient.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    reference = cross_entropy_reference(logits, labels, **options)
    assert loss.item() == pytest.approx(-2.5 * reference.item(), rel=2e-6)
    assert (gradient - exact).abs().max() <= tolerance * exact.abs().max()
    # relative errors of small values, too; with smoothing, they are differences of larger ones
    small = exact.abs() < exact.abs().max() / 100
    atol = 1e-8 if options else 1e-12
    torch.testing.assert_close(gradient[small].double(), exact[small], rtol=max(tolerance, 1e-5), atol=atol)


@every_option
@pytest.mark.parametrize("offset, size", [(0.0, 500.0), (-3e4, 1.0)])
def test_large_logits(offset, size, options):
    logits, labels = make_inputs(4, 5000, torch.float32, size)
    logits += offset
    loss, gradient = loss_and_gradient(logits, labels, **options)
    expected, exact = exact_loss_and_gradient(logits, labels, **options)
    assert loss.item() == pytest.approx(expected.item(), rel=2e-5 if options else 2e-6)
    # float32 has 24 bits: its resolution at 3e4 is 0.002
    assert (gradient - exact).abs().max() <= 2e-3 * exact.abs().max()


def test_logits_of_minus_infinity():
    """-inf means probability 0 and gradient 0, also if a whole block of a row is -inf."""
    logits, labels = make_inputs(3, 9000, torch.float32, ignored=0)
    logits[:, :5000] = float("-inf")
    labels[:] = torch.tensor([5000, 6000, 8999])
    loss, gradient = loss_and_gradient(logits, labels)
    assert loss.item() == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=2e-6)
    assert gradient[:, :5000].eq(0).all() and gradient.isfinite().all()


@every_option
def test_ignored_rows(options):
    logits, labels = make_inputs(6, 300, torch.float32, ignored=0)
    labels[2], labels[4] = -100, -100
    logits[4, 7] = float("nan")  # the values of an ignored row do not matter
    ignored, others = [2, 4], [0, 1, 3, 5]
    loss, gradient = loss_and_gradient(logits, labels, **options)
    expected, _ = exact_loss_and_gradient(logits[others], labels[others], **options)
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    assert gradient[ignored].eq(0).all() and gradient[others].ne(0).all()
    loss, gradient = loss_and_gradient(logits, torch.full_like(labels, -100), **options)
    assert loss.item() == 0 and gradient.eq(0).all()  # as in TE; PyTorch divides by zero


@pytest.mark.parametrize("fp8_dtype", [None, torch.float8_e5m2])
def test_backward_runs_once(fp8_dtype):
    logits, labels = make_inputs(32, 96)
    leaf = logits.clone().requires_grad_()
    quantization = None
    if fp8_dtype is not None:
        quantization = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE), fp8_dtype
    output = leaf * 1
    loss = cross_entropy(output, labels, quantization)
    square = output.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
    if fp8_dtype is None:
        assert torch.equal(output.detach(), leaf.grad)  # overwritten
        with pytest.raises(RuntimeError, match="inplace operation"):  # no silent use of it
            square.backward()


@pytest.mark.parametrize("logits, labels, options, message", [
    (torch.zeros(2, 3, 32), torch.zeros(6), {}, "is needed"),
    (torch.zeros(32, 4).T, torch.zeros(4), {}, "is needed"),
    (torch.zeros(4, 32).half(), torch.zeros(4), {}, "is needed"),
    (torch.zeros(0, 32), torch.zeros(0), {}, "is needed"),
    (torch.zeros(4, 32), torch.zeros(5), {}, "is needed"),
    (torch.zeros(4, 32), torch.zeros(4).int(), {}, "is needed"),
    (torch.zeros(4, 32), torch.zeros(4), {"label_smoothing": 1.5}, "from 0 to 1; 0.1 works"),
    (torch.zeros(4, 32), torch.zeros(4), {"softcap": 0.0}, "above 0; 30.0 works"),
    (torch.zeros(24, 32), torch.zeros(24), {"quantization": (None, None, None)}, "multiples of 16")])
def test_invalid_arguments_raise(logits, labels, options, message):
    labels = labels if labels.dtype == torch.int32 else labels.long()
    with pytest.raises(ValueError, match=message):
        cross_entropy(logits.to(DEVICE), labels.to(DEVICE), **options)


# The gradient in FP8


@pytest.mark.parametrize("rows, vocab_size, factor, scale, fp8_dtype, options", [
    (48, 144, 1.0, 1.0, FORMATS[0], OPTIONS[3]), (16, 48, 3.0, 1e9, FORMATS[0], OPTIONS[0]),
    (48, 64, 2**-12, 1e-3, FORMATS[1], OPTIONS[1]), (64, 80, -1.0, 777.7, FORMATS[1], OPTIONS[2]),
    *(on_gpu(4096, 50304, 1.0, 1e6, fp8_dtype, options) for fp8_dtype in FORMATS for options in OPTIONS)])
def test_fp8_gradient_is_the_cast_of_the_bf16_one(
        monkeypatch, rows, vocab_size, factor, scale, fp8_dtype, options):
    """Scales from all values flushed to zero to all saturated; rowwise and transposed; partial tiles."""
    monkeypatch.setitem(fast_loss.BACKWARD_FP8, "ROWS", 32 if rows < 128 else 128)  # several tiles
    logits, labels = make_inputs(rows, vocab_size)
    logits[3, 5] = float("nan")
    scale, amax = torch.tensor(scale, device=DEVICE), torch.zeros(1, device=DEVICE)
    ours = fp8_gradient(logits, labels, scale, amax, fp8_dtype, factor, **options)
    _, gradient = loss_and_gradient(logits, labels, factor, **options)
    expected = te_reference.quantize(gradient, scale, fp8_dtype)
    assert torch.equal(ours.rowwise.view(torch.uint8), expected.view(torch.uint8))
    assert amax.item() == te_reference.amax_of(gradient).item() > 0
    amax.fill_(1e5)
    fp8_gradient(logits, labels, scale, amax, fp8_dtype, factor, **options)
    assert amax.item() == 1e5  # a larger amax from an earlier micro-batch stays


@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_nan_stays_nan(fp8_dtype):
    """The step is skipped then. The bits are those that a GPU gives NaN."""
    logits, labels = make_inputs(32, 64, torch.float32, ignored=0.0)
    factor = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    scale, amax = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    assert fp8_gradient(logits, labels, scale, amax, fp8_dtype, factor).rowwise.float().isnan().all()


# As operations


def test_operations_are_registered():
    logits, labels = make_inputs(32, 48, torch.float32)
    ops, own = torch.ops.fast_kernels, (0.2, 30.0)  # label_smoothing, softcap
    torch.library.opcheck(
        ops.cross_entropy.default, (logits.clone().requires_grad_(), labels, *own, None, None, None),
        atol=1e-6, rtol=1e-5)
    _, lse, count = ops.cross_entropy(logits, labels, *own, None, None, None)
    arguments = logits, labels, lse, 1 / count, *own
    scale, amax = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    torch.library.opcheck(ops.logits_gradient.default, (*arguments, torch.empty_like(logits)))
    torch.library.opcheck(ops.cast_gradient.default, (*arguments, scale, amax, FORMATS[0]))


# On a GPU only


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits():
    """43,008 tokens, vocabulary of 50,304: the first, middle and last rows equal those of float64."""
    needs_memory(16)
    rows, vocab_size = 43008, 50304
    places = slice(0, 16), slice(21504, 21520), slice(-16, None)
    logits = torch.randn(rows, vocab_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(vocab_size, (rows,), device="cuda")
    assert logits.numel() > 2**31
    exact = 0.0
    for part, of_part in zip(logits.detach().split(1024), labels.split(1024)):
        exact += F.cross_entropy(part.float(), of_part, reduction="sum").double() / rows
    expected = []  # gradients
    for place in places:
        softmax = logits.detach()[place].double().softmax(1)
        expected.append((softmax - F.one_hot(labels[place], vocab_size)) / rows)
    scale, amax = torch.tensor(57344.0 * rows, device="cuda"), torch.zeros(1, device="cuda")
    received = []
    loss = cross_entropy(Head.apply(logits, received), labels, (scale, amax, torch.float8_e5m2))
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    loss.backward()
    gradient, = received
    for place, of_place in zip(places, expected):
        of_fp8 = gradient.rowwise[place].double() / scale
        assert (of_fp8 - of_place).norm() < 0.06 * of_place.norm()  # E5M2 keeps 2 bits
        assert torch.equal(
            gradient.columnwise[:, place].view(torch.uint8), gradient.rowwise[place].view(torch.uint8).T)
    del received[:], gradient
    cross_entropy(logits, labels).backward()
    for place, of_place in zip(places, expected):
        assert (logits.grad[place] - of_place).norm() < 4e-3 * of_place.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_dtype", [None, torch.float8_e5m2])
def test_in_a_cuda_graph(fp8_dtype):
    inputs, labels = make_inputs(288, 1040)
    scale, amax = torch.full((1,), 1e5, device="cuda"), torch.zeros(1, device="cuda")

    def step():
        received = []
        logits = Head.apply(inputs.requires_grad_(), received)
        loss = cross_entropy(logits, labels, None if fp8_dtype is None else (scale, amax, fp8_dtype))
        loss.backward()
        gradient, = received
        gradient = gradient.clone() if fp8_dtype is None else gradient.rowwise.float()
        return loss.detach(), gradient

    graph, captured = capture(step)
    with torch.no_grad():
        inputs.mul_(-1.5)
        labels.add_(1).remainder_(1040)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step()))


def test_an_fp8_tensor_as_logits_is_dequantized():
    """A class of tensors says itself what operations do, and is not passed to the kernel."""
    rowwise = torch.randn(16, 32, device=DEVICE).to(torch.float8_e4m3fn)
    logits = Float8Tensor(rowwise, rowwise.T.contiguous(), torch.full((1,), 0.5, device=DEVICE))
    labels = torch.arange(16, device=DEVICE)
    torch.testing.assert_close(cross_entropy(logits, labels), cross_entropy(logits.dequantize(), labels))


def test_vmap_calls_it_for_each_batch():
    logits = torch.randn(3, 16, 32, device=DEVICE)
    labels = torch.arange(16, device=DEVICE)
    losses = torch.vmap(lambda x: cross_entropy(x, labels))(logits)
    torch.testing.assert_close(losses, torch.stack([cross_entropy(x, labels) for x in logits]))


def test_a_cap_may_be_a_whole_number():
    logits = torch.randn(16, 32, device=DEVICE)
    labels = torch.arange(16, device=DEVICE)
    losses = [cross_entropy(logits, labels, softcap=cap) for cap in (30, 30.0)]
    expected = cross_entropy_reference(logits, labels, softcap=30.0).item()
    assert losses[0] == losses[1] == pytest.approx(expected)
