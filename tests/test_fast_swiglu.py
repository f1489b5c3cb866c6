"""The fast SwiGLU: against float64, and against Transformer Engine byte for byte as far as the last bit of an exponential allows."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import te_reference

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import fast_swiglu  # noqa: E402
from test_fast_loss import _casts_that_round, after_three_calls  # noqa: E402, F401  the first: on the CPU repairs casts of Triton's interpreter

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@triton.jit
def _reciprocal(x):
    return 1.0 / x


@triton.jit
def _round(x):
    return x.to(tl.bfloat16)


@pytest.fixture(autouse=True)
def _instructions(monkeypatch):
    """In place of the GPU's own instructions, which Triton's interpreter cannot run."""
    if not HAS_GPU:
        monkeypatch.setattr(fast_swiglu, "_reciprocal", _reciprocal)
        monkeypatch.setattr(fast_swiglu, "_round", _round)


def make_inputs(rows, columns, size=2.0):
    torch.manual_seed(rows + columns)
    x = (size * torch.randn(rows, 2 * columns)).to(DEVICE, torch.bfloat16)
    return x, torch.randn(rows, columns).to(DEVICE, torch.bfloat16)


def exact(x, gradient):
    """SwiGLU and the gradient of x, in float64."""
    x = x.double().requires_grad_()
    a, b = x.chunk(2, 1)
    y = F.silu(a) * b
    y.backward(gradient.double())
    return y.detach(), x.grad


def assert_same_bytes(ours, theirs, fp8, share, noise=0.0):
    """Except where float32 is rounded otherwise: of the values, `share` may be the next FP8 number, and all may differ by `noise`."""
    a, b = ours.view(fp8).float(), theirs.view(fp8).float()
    assert torch.equal(a.isnan(), b.isnan())
    other = (a - b).abs() > noise  # 0 and -0 are the same
    assert other.float().mean() <= share
    assert (ours.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs()[other].le(1).all()


SHAPES = [(64, 128), (48, 144), (16, 16), (80, 48)]  # whole tiles or not
SCALES = [50.0, 1e9, 1e-6, 0.1]  # as in training, all saturated, all flushed to zero, many subnormal


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_forward(rows, columns, fp8):
    x, gradient = make_inputs(rows, columns)
    y, _ = exact(x, gradient)
    for scale in SCALES[::1 if rows < 64 else 4]:
        scale, amax = torch.tensor(scale, device=DEVICE), torch.zeros(1, device=DEVICE)
        by_rows, by_columns, scale_inv = fast_swiglu.activate(x, scale, amax, fp8)
        assert by_rows.shape == (rows, columns) and torch.equal(by_columns, by_rows.T) and by_columns.is_contiguous()
        assert_same_bytes(by_rows, te_reference.quantize(y.bfloat16().float(), scale, fp8), fp8, 1e-3)
        assert amax.item() == pytest.approx(y.abs().max().item(), rel=1e-6)
        assert scale_inv.shape == (1,) and scale_inv.item() == scale.reciprocal().item()
    amax.fill_(1e5)
    only_rows, none, _ = fast_swiglu.activate(x, scale, amax, fp8, transpose=False)
    assert torch.equal(only_rows, by_rows) and none is None
    assert amax.item() == 1e5  # a second micro-batch's joins the first one's


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_backward(rows, columns, fp8):
    x, gradient = make_inputs(rows, columns)
    _, dx = exact(x, gradient)
    for scale in SCALES[::1 if rows < 64 else 4]:
        scale, amax = torch.tensor(scale, device=DEVICE), torch.zeros(1, device=DEVICE)
        by_rows, by_columns, scale_inv = fast_swiglu.differentiate(gradient, x, scale, amax, fp8)
        assert by_rows.shape == x.shape and torch.equal(by_columns, by_rows.T) and by_columns.is_contiguous()
        assert_same_bytes(by_rows, te_reference.quantize(dx.bfloat16().float(), scale, fp8), fp8, 1e-3)
        assert amax.item() == pytest.approx(dx.abs().max().item(), rel=1e-6)
        assert scale_inv.item() == scale.reciprocal().item()


def test_large_values_and_nan():
    """Far from zero an activation is 0 or the identity, without overflow on the way; NaN stays NaN and does not count as amax."""
    x, gradient = make_inputs(16, 32)
    x[0, :4] = torch.tensor([1e4, -1e4, 1e18, -1e18], device=DEVICE)
    x[1, 3] = float("nan")
    y, dx = exact(x, gradient)
    scale, amax = torch.tensor(1e-3, device=DEVICE), torch.zeros(1, device=DEVICE)
    by_rows = fast_swiglu.activate(x, scale, amax, E5M2)[0].view(E5M2).float()
    assert by_rows[1, 3].isnan() and by_rows.isnan().sum() == 1
    assert by_rows[0, 1] == 0 and by_rows[0, 2].abs() == 57344 and by_rows[0, 3] == 0
    assert amax.item() == pytest.approx(y.nan_to_num().abs().max().item(), rel=1e-6)
    by_rows, _, _ = fast_swiglu.differentiate(gradient, x, scale.fill_(1.0), amax, E5M2)
    assert by_rows.view(E5M2)[1, 3].isnan() and not by_rows.view(E5M2)[0].isnan().any()


# What is put into Transformer Engine, and when it is used


class Quantizer(SimpleNamespace):
    """As much of TE's Float8Quantizer as is used."""

    def set_usage(self, **usage):
        self.__dict__.update({f"{key}_usage": value for key, value in usage.items()})


def make_quantizer(kind=Quantizer, columnwise=True, fast=True):
    return kind(scale=torch.tensor(40.0), amax=torch.zeros(1), dtype="E4M3", internal=True, rowwise_usage=True, columnwise_usage=columnwise,
                fast=fast)


@pytest.fixture
def te_stub(monkeypatch):
    """TE's LayerNormMLP, as far as it is replaced; `called` lists TE's own functions that ran."""
    called = []

    def function(name, result):
        return lambda *args, **kwargs: called.append(name) or result

    tex = ModuleType("transformer_engine_torch")
    tex.swiglu, tex.dswiglu, tex.bgrad_quantize = (
        function(name, result) for name, result in [("swiglu", "y"), ("dswiglu", "dx"), ("bgrad_quantize", ("dbias", "dx"))])

    class LayerNormMLP:
        def __init__(self, activation="swiglu", quantizer=None, use_bias=False):
            self.activation, self.quantizer, self.use_bias = activation, quantizer, use_bias

        def _get_quantizers(self, fp8_output, is_grad_enabled):
            if self.quantizer:
                self.quantizer.set_usage(columnwise=False)
            return (None,) * 5 + (SimpleNamespace(), self.quantizer) + (None,) * 5

    def _act_func(activation, recipe=None):
        return "TE's", activation

    wrapper = lambda **inside: SimpleNamespace(**inside)
    modules = {"module.layernorm_mlp": dict(_act_func=_act_func, LayerNormMLP=LayerNormMLP, tex=tex),
               "tensor.float8_tensor": dict(Float8Quantizer=Quantizer, Float8Tensor=wrapper, Float8TensorStorage=wrapper),
               "constants": dict(TE_DType_To_Torch={"E4M3": E4M3}), "module": {}, "": {}}
    for name, names in modules.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, f"transformer_engine.pytorch.{name}".strip("."), module)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", tex)
    mlp = sys.modules["transformer_engine.pytorch.module.layernorm_mlp"]
    sys.modules["transformer_engine.pytorch.module"].layernorm_mlp = mlp
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield SimpleNamespace(mlp=mlp, called=called)
    fast_swiglu.restore()


cpu_only = pytest.mark.skipif(HAS_GPU, reason="there Transformer Engine itself is asked, below")
DELAYED, OTHER = (SimpleNamespace(delayed=lambda delayed=delayed: delayed) for delayed in (True, False))


@cpu_only
def test_accelerate_and_restore(te_stub):
    mlp = te_stub.mlp
    act_func, get_quantizers = mlp._act_func, mlp.LayerNormMLP._get_quantizers
    for other in (mlp.LayerNormMLP("gelu"), mlp.LayerNormMLP(use_bias=True)):
        assert not fast_swiglu.accelerate(other) and mlp._act_func is act_func
    for _ in range(2):
        assert fast_swiglu.accelerate(mlp.LayerNormMLP()) and fast_swiglu.available()
        assert mlp._act_func("swiglu", DELAYED) == (fast_swiglu.swiglu, mlp.tex.dswiglu, fast_swiglu.dbias_dswiglu)
        for activation, recipe in [("gelu", DELAYED), ("swiglu", None), ("swiglu", OTHER)]:
            assert mlp._act_func(activation, recipe) == ("TE's", activation)
        assert mlp._act_func("swiglu") == ("TE's", "swiglu")
    fast_swiglu.restore()
    assert mlp._act_func is act_func and mlp.LayerNormMLP._get_quantizers is get_quantizers
    fast_swiglu.restore()


@cpu_only
def test_other_versions_and_gpus_are_left_alone(te_stub, monkeypatch):
    act_func = te_stub.mlp._act_func
    for attribute, value in [("_act_func", lambda activation: None), ("_act_func", None)]:
        with monkeypatch.context() as patch:
            patch.setattr(te_stub.mlp, attribute, value)
            assert not fast_swiglu.accelerate(te_stub.mlp.LayerNormMLP()) and te_stub.mlp._act_func is value
            assert "2.20" in fast_swiglu.available(return_reason=True)[1]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert not fast_swiglu.accelerate(te_stub.mlp.LayerNormMLP()) and te_stub.mlp._act_func is act_func
    assert "9.0" in fast_swiglu.available(return_reason=True)[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fast_swiglu.available(return_reason=True) == (False, "no CUDA device")


@cpu_only
@pytest.mark.parametrize("activation, bias, gradients", [
    ("swiglu", False, True), ("swiglu", False, False), ("swiglu", True, True), ("gelu", False, True)])
def test_which_activations_are_transposed(te_stub, activation, bias, gradients):
    quantizer = make_quantizer(fast=False)
    mlp, other = (te_stub.mlp.LayerNormMLP(activation, quantizer, bias) for _ in range(2))
    assert fast_swiglu.accelerate(mlp) == (activation == "swiglu" and not bias)
    other._get_quantizers(False, gradients)
    assert not quantizer.fast and not quantizer.columnwise_usage  # another module is as it was
    quantizers = mlp._get_quantizers(False, gradients)
    assert len(quantizers) == 12 and quantizer.columnwise_usage == (activation == "swiglu" and not bias and gradients)
    te_stub.mlp.LayerNormMLP(activation)._get_quantizers(False, gradients)  # BF16


@cpu_only
@pytest.mark.parametrize("case", ["", "float32", "odd rows", "odd columns", "3-D", "strided", "parameters", "another recipe", "no quantizer",
                                  "another GPU", "another module"])
def test_what_does_not_fit_goes_to_transformer_engine(te_stub, monkeypatch, case):
    x, gradient = make_inputs(24 if case == "odd rows" else 32, 24 if case == "odd columns" else 32)
    if case == "float32":
        x, gradient = x.float(), gradient.float()
    if case == "3-D":
        x, gradient = x[None], gradient[None]
    if case == "strided":
        x, gradient = x.T.contiguous().T, gradient.T.contiguous().T
    if case == "another GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    kind = SimpleNamespace if case == "another recipe" else Quantizer
    quantizer = None if case == "no quantizer" else make_quantizer(kind, fast=case != "another module")
    parameters = dict(limit=7.0) if case == "parameters" else {}
    y = fast_swiglu.swiglu(x, quantizer, **parameters)
    if case:
        assert y == "y" and te_stub.called == ["swiglu"]
        assert quantizer is None or case == "another recipe" or not quantizer.columnwise_usage  # as TE's functions expect
        assert fast_swiglu.dbias_dswiglu(gradient, x, quantizer, **parameters) == ("dbias", "dx")
        assert te_stub.called[1:] == ["dswiglu", "bgrad_quantize"]
        return
    dbias, dx = fast_swiglu.dbias_dswiglu(gradient, x, quantizer)
    assert not te_stub.called and dbias is None
    for tensor, shape in ((y, (32, 32)), (dx, x.shape)):
        assert tensor.data.shape == shape and torch.equal(tensor.data_transpose, tensor.data.T) and tensor.fake_dtype == torch.bfloat16
        assert tensor.fp8_dtype == "E4M3" and tensor.quantizer is quantizer and tensor.fp8_scale_inv.item() == pytest.approx(1 / 40)
    assert quantizer.amax.item() > 0
    quantizer.internal = False
    y = fast_swiglu.swiglu(x, quantizer)
    assert (y.shape, y.dtype) == ((32, 32), torch.bfloat16)
    quantizer.set_usage(columnwise=False)
    assert fast_swiglu.swiglu(x, quantizer).data_transpose is None


# With Transformer Engine


@pytest.fixture
def hopper():
    if not fast_swiglu.available():
        pytest.skip(fast_swiglu.available(return_reason=True)[1])
    yield
    fast_swiglu.restore()


def te_quantizer(scale, fp8, columnwise=True, internal=True):
    import transformer_engine.pytorch  # noqa: F401  finds the next one
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    kind = tex.DType.kFloat8E5M2 if fp8 == E5M2 else tex.DType.kFloat8E4M3
    quantizer = Float8Quantizer(torch.tensor(scale, device="cuda"), torch.zeros(1, device="cuda"), kind, columnwise=columnwise)
    quantizer.internal, quantizer.fast = internal, True
    return quantizer


def assert_same_tensor(ours, theirs, fp8, noise=0.0):
    assert type(ours) is type(theirs) and ours._fp8_dtype == theirs._fp8_dtype and ours._dtype == theirs._dtype
    assert ours._data.shape == theirs._data.shape and ours._data.dtype == theirs._data.dtype
    assert torch.equal(ours._scale_inv, theirs._scale_inv) and ours._scale_inv.shape == theirs._scale_inv.shape
    assert_same_bytes(ours._data, theirs._data, fp8, 0.05, noise)  # values halfway between two numbers, after being rounded to BF16


def assert_as_near(ours, theirs, exact):
    """To the exact values, as Transformer Engine's."""
    ours, theirs = ((t.dequantize().double() - exact).norm() for t in (ours, theirs))
    assert ours <= 1.03 * theirs


@pytest.mark.gpu
@pytest.mark.parametrize("internal", [True, False])
@pytest.mark.parametrize("rows, columns, size", [(4096, 3072, 1.0), (272, 1040, 3.0), (64, 2048, 0.1)])
def test_tensors_are_transformer_engines(hopper, rows, columns, size, internal):
    import transformer_engine_torch as tex

    x, gradient = make_inputs(rows, columns, size)
    exact_y, exact_dx = exact(x, gradient)
    ours, theirs = (te_quantizer(40.0 / size, E4M3, internal=internal) for _ in range(2))
    theirs.set_usage(columnwise=False)
    y, expected = fast_swiglu.swiglu(x, ours), tex.swiglu(x, theirs)
    assert_same_tensor(y, expected, E4M3)
    assert_as_near(y, expected, exact_y)
    assert torch.equal(y._transpose, y._data.T) and not y._transpose_invalid
    torch.testing.assert_close(ours.amax, theirs.amax, rtol=1e-6, atol=0)
    ours.set_usage(columnwise=False)
    y = fast_swiglu.swiglu(x, ours)
    assert y._transpose is None and y._transpose_invalid
    assert_same_tensor(y, expected, E4M3)

    ours, theirs = (te_quantizer(3e3, E5M2, internal=internal) for _ in range(2))
    _, dx = fast_swiglu.dbias_dswiglu(gradient, x, ours)
    _, expected = tex.bgrad_quantize(tex.dswiglu(gradient, x, None), theirs)
    assert_same_tensor(dx, expected, E5M2, noise=4e-6 * 3e3 * gradient.abs().max().item())  # where the slope is 0, as a difference
    assert_as_near(dx, expected, exact_dx)
    assert torch.equal(dx._transpose, dx._data.T) and not dx._transpose_invalid
    torch.testing.assert_close(ours.amax, theirs.amax, rtol=2**-7, atol=0)  # TE takes it from the BF16 gradient


def make_mlp(fp8_format="HYBRID", fast=True, bias=False, **options):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    torch.manual_seed(3)
    mlp = te.LayerNormMLP(256, 1040, activation="swiglu", bias=bias, params_dtype=torch.bfloat16, **options)
    assert not fast or fast_swiglu.accelerate(mlp)
    recipe = DelayedScaling(fp8_format=Format[fp8_format], amax_history_len=4)

    def forward(x, function=mlp):
        with te.autocast(enabled=True, recipe=recipe):
            return function(x)

    return mlp, forward


def scaling_state(mlp):
    if "scaling_fwd" not in mlp.fp8_meta:
        return []  # it never ran in FP8
    return [getattr(mlp.fp8_meta[key], name).clone() for key in ("scaling_fwd", "scaling_bwd") for name in ("amax_history", "scale")]


def train_steps(mlp, forward, steps=3):
    torch.manual_seed(4)
    results = []
    for _ in range(steps):
        x = torch.randn(288, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        mlp.zero_grad()
        y = forward(x)
        y.backward(torch.randn_like(y))
        results.append(([y.detach(), x.grad, *(p.grad.clone() for p in mlp.parameters())], scaling_state(mlp)))
    return results


NEAR = 0.03  # FP8 rounds each tensor by about as much; one byte in thirty is another


def assert_same_training(fast, plain):
    for (tensors, state), (expected, expected_state) in zip(fast, plain):
        for a, b in zip(tensors, expected):
            assert (a.double() - b.double()).norm() <= NEAR * b.double().norm()
        for a, b in zip(state, expected_state):
            torch.testing.assert_close(a, b, rtol=0.1, atol=1e-30)  # of later amaxes, which come out of products with rounded bytes
    torch.testing.assert_close(fast[0][1][0], plain[0][1][0], rtol=1e-6, atol=0)  # the first step's forward amaxes


def count_kernels(monkeypatch):
    calls = []
    for name in ("activate", "differentiate"):
        function = getattr(fast_swiglu, name)
        monkeypatch.setattr(fast_swiglu, name, lambda *args, name=name, function=function: calls.append(name) or function(*args))
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_an_mlp_trains_the_same(hopper, monkeypatch, fp8_format):
    calls = count_kernels(monkeypatch)
    fast = train_steps(*make_mlp(fp8_format))
    assert calls == ["activate", "differentiate"] * 3
    plain = train_steps(*make_mlp(fp8_format, fast=False))
    assert len(calls) == 6  # another module is not concerned
    assert_same_training(fast, plain)
    mlp, _ = make_mlp(fast=False)
    for (ours, _), (theirs, _), (exact, _) in zip(fast, plain, train_steps(mlp, mlp)):  # without FP8
        for a, b, c in zip(ours, theirs, exact):
            assert (a - c).double().norm() <= 1.05 * (b - c).double().norm()


@pytest.mark.gpu
def test_a_module_with_biases_is_as_before(hopper, monkeypatch):
    alone = train_steps(*make_mlp(fast=False, bias=True))
    make_mlp()  # TE is changed from here on
    calls = count_kernels(monkeypatch)
    for (tensors, state), (expected, expected_state) in zip(train_steps(*make_mlp(fast=False, bias=True)), alone):
        for a, b in zip(tensors + state, expected + expected_state):
            assert torch.equal(a, b)
    assert not calls


@pytest.mark.gpu
def test_no_transpose_is_left_to_do(hopper, monkeypatch):
    """What TE transposes one by one in backward: without these kernels the activation, with them nothing."""
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    shapes, create = [], Float8TensorStorage._create_transpose
    monkeypatch.setattr(Float8TensorStorage, "_create_transpose", lambda self: shapes.append(tuple(self._data.shape)) or create(self))
    train_steps(*make_mlp(), steps=1)
    assert (288, 1040) not in shapes
    train_steps(*make_mlp(fast=False), steps=1)
    assert (288, 1040) in shapes


@pytest.mark.gpu
def test_inference(hopper, monkeypatch):
    transposed, run = [], fast_swiglu.activate
    monkeypatch.setattr(fast_swiglu, "activate", lambda *args: transposed.append(args[4]) or run(*args))
    x = torch.randn(288, 256, device="cuda", dtype=torch.bfloat16)
    mlp, forward = make_mlp()
    with torch.no_grad():
        y = forward(x)
    forward(x).sum().backward()
    assert transposed == [False, True]  # and only rows again after training:
    with torch.no_grad():
        forward(x)
    assert transposed[2:] == [False]
    mlp, forward = make_mlp(fast=False)
    with torch.no_grad():
        assert (y - forward(x)).float().norm() <= NEAR * y.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "module"])
def test_gradient_checkpointing(hopper, how):
    """Recomputed activations are the same ones, with and without these kernels."""
    import transformer_engine.pytorch as te

    def run(fast):
        mlp, forward = make_mlp(fast=fast, **(dict(checkpoint=True) if how == "module" else {}))
        if how == "module":
            return train_steps(mlp, forward)
        return train_steps(mlp, lambda x: forward(x, lambda x: te.checkpoint(mlp, x, use_reentrant=how == "reentrant")))

    recomputed = run(True)
    assert_same_training(recomputed, run(False))
    for (tensors, _), (kept, _) in zip(recomputed, train_steps(*make_mlp())):
        for a, b in zip(tensors, kept):
            assert (a.double() - b.double()).norm() <= 1e-3 * b.double().norm()


@pytest.mark.gpu
def test_a_step_as_a_cuda_graph(hopper):
    """Output, gradients, amax histories and scales after 3 eager steps and 2 replays are those of 5 eager steps."""
    def run(graphed):
        mlp, forward = make_mlp()
        torch.manual_seed(5)
        x = torch.randn(288, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def step():
            y = forward(x)
            return [y, *torch.autograd.grad(y.float().square().sum(), [x, *mlp.parameters()])]

        step = after_three_calls(step, graphed)
        for _ in range(2):
            with torch.no_grad():
                x.mul_(-1.5)
            results = step()
        return [t.detach().clone() for t in (*results, *scaling_state(mlp))]

    for eager, graphed in zip(run(False), run(True)):
        assert torch.equal(eager, graphed)
