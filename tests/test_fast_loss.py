"""The fused loss: cross-entropy and gradient against float64; the FP8 gradient, byte for byte, against
Transformer Engine's cast of the BF16 gradient."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import te_reference

pytest.importorskip("triton")
from fast_kernels import loss as fast_loss  # noqa: E402
from fast_kernels.loss import cross_entropy  # noqa: E402
from kernel_tools import HAS_GPU, _casts_that_round, _instructions, _poisoned_memory  # noqa: E402, F401

DEVICE = "cuda" if HAS_GPU else "cpu"
FORMATS = [torch.float8_e5m2, torch.float8_e4m3fn]


def make_inputs(rows, vocab_size, dtype=torch.bfloat16, size=3.0, ignored=0.3):
    logits = (size * torch.randn(rows, vocab_size)).to(DEVICE, dtype)
    labels = torch.randint(vocab_size, (rows,)).where(torch.rand(rows) >= ignored, -100).to(DEVICE)
    labels[0], labels[-1] = 0, vocab_size - 1
    return logits, labels


def loss_and_gradient(logits, labels, factor=1.0):
    """Return loss times `factor`, and its gradient; backward overwrites a copy of the logits."""
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf.clone(), labels) * factor
    loss.backward()
    return loss.detach(), leaf.grad


def saved_lse(logits, labels):
    loss = cross_entropy(logits.clone().requires_grad_(), labels)  # in a variable: it owns the saved tensors
    return loss.grad_fn.saved_tensors[2]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("rows, vocab_size", [(5, 96), (3, 4096), (4, 5000), (2, 12289)])
def test_loss_and_gradient(rows, vocab_size, dtype, tolerance):
    logits, labels = make_inputs(rows, vocab_size, dtype)
    loss, gradient = loss_and_gradient(logits, labels, factor=-2.5)
    exact = logits.double().requires_grad_()
    expected = -2.5 * F.cross_entropy(exact, labels)
    expected.backward()
    assert loss.shape == () and loss.dtype == torch.float32 and gradient.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    assert (gradient - exact.grad).abs().max() <= tolerance * exact.grad.abs().max()
    # relative errors of small values, too
    small = exact.grad.abs() < exact.grad.abs().max() / 100
    torch.testing.assert_close(
        gradient[small].double(), exact.grad[small], rtol=max(tolerance, 1e-5), atol=1e-12)


@pytest.mark.parametrize("offset, size", [(0.0, 500.0), (3e4, 1.0), (-3e4, 1.0)])
def test_large_logits(offset, size):
    logits, labels = make_inputs(4, 5000, torch.float32, size)
    loss, gradient = loss_and_gradient(logits + offset, labels)
    exact = (logits + offset).double().requires_grad_()
    expected = F.cross_entropy(exact, labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    # float32 has 24 bits: its resolution at 3e4 is 0.002
    assert (gradient - exact.grad).abs().max() < 2e-3 * exact.grad.abs().max()


def test_logits_of_minus_infinity():
    """-inf means probability 0 and gradient 0, also if a whole block of a row is -inf."""
    logits, labels = make_inputs(3, 9000, torch.float32, ignored=0)
    logits[:, :5000] = float("-inf")
    labels[:] = torch.tensor([5000, 6000, 8999])
    loss, gradient = loss_and_gradient(logits, labels)
    assert loss.item() == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=2e-6)
    assert gradient[:, :5000].eq(0).all() and gradient.isfinite().all()


def test_ignored_rows():
    logits, labels = make_inputs(6, 300, torch.float32, ignored=0)
    labels[2], labels[4] = -100, -100
    logits[4, 7] = float("nan")  # the values of an ignored row do not matter
    loss, gradient = loss_and_gradient(logits, labels)
    expected = F.cross_entropy(logits[[0, 1, 3, 5]].double(), labels[[0, 1, 3, 5]])
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    assert gradient[[2, 4]].eq(0).all() and gradient[[0, 1, 3, 5]].ne(0).all()
    loss, gradient = loss_and_gradient(logits, torch.full_like(labels, -100))
    assert loss.item() == 0 and gradient.eq(0).all()  # as in TE; PyTorch divides by zero


def test_backward_overwrites_the_logits_and_runs_once():
    logits, labels = make_inputs(4, 96)
    leaf = logits.clone().requires_grad_()
    output = leaf * 1
    loss = cross_entropy(output, labels)
    square = output.square().sum()
    loss.backward(retain_graph=True)
    assert torch.equal(output.detach(), leaf.grad)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
    with pytest.raises(RuntimeError, match="inplace operation"):  # no silent use of the overwritten logits
        square.backward()


@pytest.mark.parametrize(
    "logits, labels",
    [
        (torch.zeros(2, 3, 32), torch.zeros(6, dtype=torch.int64)),
        (torch.zeros(32, 4).T, torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(4, 32, dtype=torch.float16), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(0, 32), torch.zeros(0, dtype=torch.int64)),
        (torch.zeros(4, 32), torch.zeros(5, dtype=torch.int64)),
        (torch.zeros(4, 32), torch.zeros(4, dtype=torch.int32))])
def test_invalid_arguments_raise(logits, labels):
    with pytest.raises(ValueError, match="is needed"):
        cross_entropy(logits.to(DEVICE), labels.to(DEVICE))


# The gradient in FP8


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize(
    "rows, vocab_size, factor, scale",
    [
        (48, 144, 1.0, 1.0), (32, 128, 2**-9, 3e4), (16, 48, 3.0, 1e9), (48, 64, 2**-12, 1e-3),
        (64, 80, -1.0, 777.7)])
def test_fp8_gradient_is_the_cast_of_the_bf16_one(monkeypatch, rows, vocab_size, factor, scale, fp8):
    """Scales from all values flushed to zero to all saturated; rowwise and transposed; partial tiles."""
    monkeypatch.setitem(fast_loss.BACKWARD_FP8, "ROWS", 32)  # several tiles even in a small matrix
    logits, labels = make_inputs(rows, vocab_size)
    logits[3, 5] = float("nan")
    lse = saved_lse(logits, labels)
    scale, amax = torch.tensor(scale, device=DEVICE), torch.zeros(1, device=DEVICE)
    per_label = torch.tensor(factor, device=DEVICE) / (labels != -100).sum()
    rowwise, columnwise = fast_loss.cast_gradient(logits, labels, lse, per_label, scale, amax, fp8)
    _, gradient = loss_and_gradient(logits, labels, factor)
    expected = te_reference.quantize(gradient, scale, fp8)
    assert torch.equal(rowwise, expected.view(torch.uint8)) and torch.equal(columnwise, rowwise.T)
    assert amax.item() == te_reference.amax_of(gradient).item() > 0
    amax.fill_(1e5)
    fast_loss.cast_gradient(logits, labels, lse, per_label, scale, amax, fp8)
    assert amax.item() == 1e5  # a larger amax from an earlier micro-batch stays


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, vocab_size, size", [  # size: no value is below E5M2's normal range
    (96, 272, 3.0), (64, 144, 3.0), pytest.param(8192, 50304, 1.5, marks=pytest.mark.gpu),
    pytest.param(16400, 16016, 1.5, marks=pytest.mark.gpu)])
def test_stochastic_rounding_keeps_the_mean(rows, vocab_size, size, dtype, fp8):
    """Tokens that share their probabilities are rounded to both neighbors, and sums over tokens, or over the
    vocabulary, miss by as much as those of independent draws. Rounded to nearest, all miss alike."""
    logits, _ = make_inputs(1, vocab_size, dtype, size)
    logits, labels = logits.repeat(rows, 1), torch.randint(vocab_size, (rows,), device=DEVICE)
    labels[7] = -100
    lse = saved_lse(logits, labels)
    _, gradient = loss_and_gradient(logits, labels)
    # 0.75: the labels' gradients, nearly all alike, come to lie between two FP8 values
    scale = 0.75 * torch.finfo(fp8).max / gradient.abs().max().float()
    exact = gradient.float() * scale
    factor = torch.tensor(1.0, device=DEVICE) / (rows - 1)

    def cast(rounding, lse=lse):
        amax = torch.zeros(1, device=DEVICE)
        rowwise, columnwise = fast_loss.cast_gradient(
            logits, labels, lse, factor, scale, amax, fp8, rounding)
        assert torch.equal(columnwise, rowwise.T)
        assert amax.item() == gradient.abs().max().item()
        return rowwise

    bits, smallest = (2, -14) if fp8 == torch.float8_e5m2 else (3, -6)
    spacing = 2.0 ** (exact.abs().log2().floor().clamp(min=smallest) - bits)  # of the neighbors in FP8
    place = (exact / spacing).frac().abs()  # between them

    def variance_ratio(rowwise, dim):
        """Return the sums' squared errors over those of independent draws, on average."""
        error = rowwise.view(fp8).float() - exact
        draws = (spacing.square() * place * (1 - place)).sum(dim)
        return (error.sum(dim).square()[draws > 0] / draws[draws > 0]).mean().item()

    rowwise = cast("stochastic")
    values = rowwise.view(fp8).float()
    assert ((values - exact).abs() < spacing).all() and (values[place == 0] == exact[place == 0]).all()
    for dim in (0, 1):
        assert variance_ratio(rowwise, dim) == pytest.approx(1, abs=0.5)
    assert variance_ratio(cast("nearest"), 0) > 3
    assert torch.equal(cast("stochastic"), rowwise)  # the same step again
    other = lse.view(torch.int32).add(1).view(torch.float32)
    assert (cast("stochastic", other) != rowwise).float().mean() > 0.2  # another step


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nan_stays_nan(rounding, fp8):
    """The step is skipped then. The bits are those that a GPU gives NaN."""
    logits, labels = make_inputs(32, 64, torch.float32, ignored=0.0)
    lse = saved_lse(logits, labels)
    factor = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    scale, amax = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    rowwise, _ = fast_loss.cast_gradient(logits, labels, lse, factor, scale, amax, fp8, rounding)
    assert rowwise.view(fp8).float().isnan().all()


class FakeFloat8Tensor(torch.Tensor):
    """Stands in for TE's class: to autograd a BF16 tensor, with FP8 data inside."""

    @staticmethod
    def __new__(cls, shape, dtype, device, **inside):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.inside = SimpleNamespace(**inside)
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


class FakeHead(torch.autograd.Function):
    """x @ Wᵀ, with the attributes of ctx in TE's backward pass."""

    @staticmethod
    def forward(ctx, x, weight, quantizer, use_bias, received):
        ctx.grad_output_quantizer, ctx.received = quantizer, received
        ctx.use_bias, ctx.debug = use_bias, False
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        ctx.received.append(gradient)
        return None, None, None, None, None


@pytest.mark.skipif(HAS_GPU, reason="GPU tests below use Transformer Engine itself")
@pytest.mark.parametrize(
    "case, in_fp8",
    [
        ("", True), ("no head", False), ("another head", False), ("not straight from it", False),
        ("bias", False), ("bf16", False), ("other recipe", False), ("hook", False), ("odd", False),
        ("another GPU", False), ("stochastic", True)])
@pytest.mark.filterwarnings("ignore:fast kernels are not used")
def test_which_gradients_are_in_fp8(monkeypatch, case, in_fp8):
    quantizer_class = type("Float8Quantizer", (SimpleNamespace,), {})
    for name, names in {
        "tensor.float8_tensor": dict(Float8Quantizer=quantizer_class, Float8Tensor=FakeFloat8Tensor),
        "constants": dict(TE_DType_To_Torch={"E5M2": torch.float8_e5m2}),
    }.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}", module)
    reason = "not made for this GPU" if case == "another GPU" else ""
    monkeypatch.setattr(fast_loss.support, "environment_reason", lambda: reason)
    state = dict(scale=torch.tensor(5e3), amax=torch.zeros(1), dtype="E5M2")
    quantizer = quantizer_class(**state)
    if case == "other recipe":
        quantizer = SimpleNamespace(**state)
    if case == "bf16":
        quantizer = None
    head = SimpleNamespace(
        quantizers={"scaling_bwd": [quantizer_class(**state) if case == "another head" else quantizer, None]})

    rows, received = 24 if case == "odd" else 32, []
    x = torch.randn(rows, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(96, 16, dtype=torch.bfloat16)
    labels = torch.randint(96, (rows,))
    logits = FakeHead.apply(x, weight, quantizer, case == "bias", received)
    if case == "hook":
        logits.register_hook(lambda gradient: None)
    if case == "not straight from it":
        logits = logits * 1
    values = logits.detach().clone()
    rounding = "stochastic" if case == "stochastic" else "nearest"
    cross_entropy(logits, labels, None if case == "no head" else head, rounding).backward()
    (gradient,) = received
    _, expected = loss_and_gradient(values, labels)
    assert isinstance(gradient, FakeFloat8Tensor) == in_fp8
    if not in_fp8:
        assert torch.equal(gradient, expected)
        return
    inside = gradient.inside
    expected_data = te_reference.quantize(expected, quantizer.scale, torch.float8_e5m2).view(torch.uint8)
    assert torch.equal(inside.data, expected_data) == (rounding == "nearest")
    assert torch.equal(inside.data_transpose, inside.data.T)
    assert inside.fp8_dtype == "E5M2" and inside.quantizer is quantizer
    assert inside.fp8_scale_inv.shape == (1,)
    assert inside.fp8_scale_inv.item() == quantizer.scale.reciprocal().item()
    assert quantizer.amax.item() == expected.abs().max().item()


# With Transformer Engine


def make_head(recipe="delayed", fp8_format="HYBRID", bias=False, dtype=torch.bfloat16):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

    torch.manual_seed(3)
    head = te.LayerNormLinear(256, 1040, bias=bias, params_dtype=dtype)
    recipe = (
        DelayedScaling(fp8_format=Format[fp8_format], amax_history_len=4)
        if recipe == "delayed"
        else Float8CurrentScaling())
    return head, lambda x: _in_fp8(te, recipe, head, x)


def _in_fp8(te, recipe, head, x):
    with te.autocast(enabled=True, recipe=recipe):
        return head(x)


def train_steps(forward, head, loss_function, steps=3):
    """Return, for each step, the loss, the gradients of input, weight and norm weight, and the scaling state
    of the backward pass."""
    torch.manual_seed(4)
    results = []
    for _ in range(steps):
        x = torch.randn(288, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(1040, (288,), device="cuda").where(torch.rand(288, device="cuda") > 0.2, -100)
        head.zero_grad()
        loss = loss_function(forward(x), labels)
        loss.backward()
        state = head.fp8_meta["scaling_bwd"]
        scaling = [getattr(state, name).clone() for name in ("amax_history", "scale") if hasattr(state, name)]
        results.append(
            [
                loss.detach().reshape(()), x.grad, head.weight.grad.clone(),
                head.layer_norm_weight.grad.clone(), *scaling])
    return results


def count_fp8_gradients(monkeypatch):
    calls, gradient_fp8 = [], fast_loss.gradient_fp8
    monkeypatch.setattr(fast_loss, "gradient_fp8", lambda *args: calls.append(1) or gradient_fp8(*args))
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize(
    "rows, vocab_size, factor, scale",
    [(4096, 50304, 1.0, 1e6), (272, 1040, 2**-10, 1e9), (64, 144, 1.0, 1.0)])
def test_bytes_are_transformer_engines(rows, vocab_size, factor, scale, fp8):
    import transformer_engine.pytorch  # noqa: F401  puts transformer_engine_torch on the path
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    def make_quantizer():
        kind = tex.DType.kFloat8E5M2 if fp8 == torch.float8_e5m2 else tex.DType.kFloat8E4M3
        return Float8Quantizer(torch.tensor(scale, device="cuda"), torch.zeros(1, device="cuda"), kind)

    logits, labels = make_inputs(rows, vocab_size)
    logits[3, 5] = float("nan")
    theirs, ours = make_quantizer(), make_quantizer()
    expected = theirs(loss_and_gradient(logits, labels, factor)[1])
    per_label = torch.tensor(factor, device="cuda") / (labels != -100).sum()
    gradient = fast_loss.gradient_fp8(logits, labels, saved_lse(logits, labels), per_label, ours)
    assert torch.equal(gradient._data, expected._data)
    assert torch.equal(gradient._transpose, expected._transpose)
    assert torch.equal(gradient._scale_inv, expected._scale_inv) and torch.equal(ours.amax, theirs.amax)
    assert gradient._fp8_dtype == expected._fp8_dtype
    assert gradient.dtype == expected.dtype and gradient.shape == expected.shape


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits():
    """43,008 tokens, vocabulary of 50,304: loss, BF16 gradient and FP8 gradient in the first, middle and last
    rows."""
    rows, vocab_size, places = 43008, 50304, (slice(0, 16), slice(21504, 21520), slice(-16, None))
    logits = torch.randn(rows, vocab_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(vocab_size, (rows,), device="cuda")
    assert logits.numel() > 2**31
    loss = cross_entropy(logits, labels)
    values, lse = logits.detach(), loss.grad_fn.saved_tensors[2]
    parts = zip(values.split(1024), labels.split(1024))
    exact = sum(F.cross_entropy(part.float(), own, reduction="sum").double() for part, own in parts) / rows
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)

    def gradient(place):
        one_hot = F.one_hot(labels[place], vocab_size)
        return (values[place].double().softmax(1) - one_hot) / rows

    expected = [gradient(place) for place in places]
    scale, amax = torch.tensor(57344.0 * rows, device="cuda"), torch.zeros(1, device="cuda")
    rowwise, columnwise = fast_loss.cast_gradient(
        values, labels, lse, torch.tensor(1 / rows, device="cuda"), scale, amax, torch.float8_e5m2)
    for place, of_place in zip(places, expected):
        of_fp8 = rowwise[place].view(torch.float8_e5m2).double() / scale
        assert (of_fp8 - of_place).norm() < 0.06 * of_place.norm()  # E5M2 keeps 2 bits
        assert torch.equal(columnwise[:, place], rowwise[place].T)
    loss.backward()
    for place, of_place in zip(places, expected):
        assert (logits.grad[place] - of_place).norm() < 4e-3 * of_place.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # of the weights
def test_a_head_trains_the_same(monkeypatch, fp8_format, dtype):
    import transformer_engine.pytorch as te

    calls = count_fp8_gradients(monkeypatch)

    def run(loss_function):
        head, forward = make_head(fp8_format=fp8_format, dtype=dtype)

        def in_autocast(x):
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
                return forward(x)

        return train_steps(in_autocast, head, lambda logits, labels: loss_function(logits, labels, head))

    fused = run(cross_entropy)
    assert len(calls) == (3 if torch.cuda.get_device_capability() == (9, 0) else 0)
    unfused = run(lambda logits, labels, head: cross_entropy(logits, labels))
    reference = run(
        lambda logits, labels, head: te.parallel_cross_entropy(logits[None], labels[None], reduce_loss=True))
    for ours, by_te, plain in zip(fused, unfused, reference):
        # the FP8 data are equal, so the results are equal bit for bit
        assert all(torch.equal(a, b) for a, b in zip(ours, by_te))
        for a, b in zip(ours, plain):
            assert (a - b).norm() <= 5e-3 * b.norm()  # TE's softmax rounds differently


@pytest.mark.gpu
@pytest.mark.parametrize("options", [dict(bias=True), dict(recipe="current")])
def test_other_heads_get_their_gradient_in_bf16(monkeypatch, options):
    calls = count_fp8_gradients(monkeypatch)
    results = []
    for with_head in (True, False):
        head, forward = make_head(**options)
        results.append(
            train_steps(
                forward, head,
                lambda logits, labels: cross_entropy(logits, labels, head if with_head else None)))
    assert not calls
    assert all(torch.equal(a, b) for with_head, without in zip(*results) for a, b in zip(with_head, without))


@pytest.mark.gpu
def test_second_backward_through_an_fp8_head_raises():
    head, forward = make_head()
    loss = cross_entropy(
        forward(torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)), torch.arange(32, device="cuda"),
        head)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def after_three_calls(step, graphed):
    """Call `step` three times, which compiles its kernels; return `step`, or its replay as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    if not graphed:
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return lambda: graph.replay() or captured


@pytest.mark.gpu
def test_a_step_as_a_cuda_graph():
    """3 eager steps and 2 replays give the loss, gradients, amax history and scale of 5 eager steps."""

    def run(graphed):
        head, forward = make_head()
        torch.manual_seed(5)
        x = torch.randn(288, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(1040, (288,), device="cuda")

        def step():
            loss = cross_entropy(forward(x), labels, head)
            return [loss, *torch.autograd.grad(loss, [x, head.weight, head.layer_norm_weight])]

        step = after_three_calls(step, graphed)
        for _ in range(2):
            with torch.no_grad():
                x.mul_(-1.5)
                labels.add_(1).remainder_(1040)
            results = step()
        state = head.fp8_meta["scaling_bwd"]
        return [t.detach().clone() for t in (*results, state.amax_history, state.scale)]

    for eager, graphed in zip(run(False), run(True)):
        assert torch.equal(eager, graphed)
