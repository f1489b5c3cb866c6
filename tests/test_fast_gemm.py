"""Autotuned GEMMs: correct with every candidate algorithm, and on any stream, thread and device."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F

from fast_kernels import gemm as fast_gemm
from kernel_tools import DEVICE, _free_memory, needs_memory, on_gpu  # noqa: F401

# without test_schema, which multiplies the inputs: PyTorch cannot in FP8
OPCHECKS = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(4096, 768, 2304), (8208, 3072, 768), (2304, 4096, 768), (48, 32, 64), (256, 768, 50304)]  # M, K, N
FORWARD = [(E4M3, E4M3, False, "fast"), (E4M3, E4M3, True, "fast")]
BACKWARD = [(E5M2, E4M3, False, "precise"), (E5M2, E4M3, False, "fast"), (E5M2, E4M3, False, "either")]


@pytest.fixture(autouse=True)
def empty_autotune_cache(monkeypatch):
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("FP8 GEMMs need compute capability 9.0 or higher")
    monkeypatch.setattr(fast_gemm, "_plans", type(fast_gemm._plans)())
    monkeypatch.setattr(fast_gemm._Plan, "tuned_count", 0)


def make(m, k, n, a_type=E4M3, b_type=E4M3, with_bias=False, device=DEVICE):
    """Make operands, and the expected output in float64."""
    a = torch.randn(m, k, device=device).to(a_type)
    b = torch.randn(n, k, device=device).to(b_type)
    a_scale_inv = torch.tensor([0.25], device=device)
    b_scale_inv = torch.tensor([0.5], device=device)
    bias = torch.randn(n, device=device, dtype=torch.bfloat16) if with_bias else None
    exact = a.double() @ b.double().T / 8
    if with_bias:
        exact += bias.double()
    return (a, a_scale_inv, b, b_scale_inv, bias), exact


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


def error_of_torch(operands, exact):
    """Return the error of torch._scaled_mm with precise accumulation; that of fast accumulation is larger."""
    a, a_scale, b, b_scale, _ = operands
    errors = {}
    for is_fast in (False, True):
        out = torch._scaled_mm(
            a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.float32, use_fast_accum=is_fast)
        errors[is_fast] = error(out, exact)
    assert errors[False] < errors[True] / 4, errors
    return errors[False]


@pytest.mark.gpu
@pytest.mark.parametrize("a_type, b_type, with_bias, accumulation", FORWARD + BACKWARD)
@pytest.mark.parametrize("m, k, n", SHAPES)
def test_every_algorithm_is_correct(m, k, n, a_type, b_type, with_bias, accumulation):
    operands, exact = make(m, k, n, a_type, b_type, with_bias)
    out = fast_gemm.gemm(*operands, accumulation=accumulation)
    assert out.shape == (m, n) and out.dtype == torch.bfloat16 and error(out, exact) < 1e-2
    plan, = fast_gemm._plans.values()
    assert plan.is_tuned and plan.chosen in plan.candidates
    used = {id(descriptor) for descriptor, _ in plan.candidates}
    assert len(used) == (2 if accumulation == "either" else 1)
    errors = []
    for algorithm in plan.candidates:
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        plan.run(algorithm, *operands, out)
        errors.append(error(out, exact))
    # The error of rounding to BF16 is 0.17 %. Fast accumulation adds 0.3 % at K = 4,096.
    limit = 2.5e-3 if accumulation == "precise" else 6e-3
    assert min(errors) < 2.5e-3 and max(errors) < limit, errors


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m, k, n", [(3072, 32768, 768), (12288, 16384, 4096), (16384, 8208, 272)])
def test_a_result_is_written_or_added_to_out(m, k, n, dtype, accumulate):
    """As weight gradients are. Timing must not add the result more than once."""
    operands, exact = make(m, k, n, E5M2, E4M3)
    limit = 1.5 * error_of_torch(operands, exact) if dtype == torch.float32 else 5e-3
    out = torch.full((m, n), 3.0, device="cuda", dtype=dtype)
    for times in (1, 2):
        assert fast_gemm.gemm(*operands, out=out, accumulate=accumulate) is out
        expected = 3 + times * exact if accumulate else exact
        assert error(out, expected) < limit
    plan, = fast_gemm._plans.values()
    assert plan.is_tuned


@pytest.mark.gpu
def test_number_of_timed_shapes_is_bounded(monkeypatch):
    """With many token counts, the first ones are timed, each once, and all are correct."""
    monkeypatch.setattr(fast_gemm, "MAX_TUNED", 2)
    timed = []
    for tokens in (128, 128, 144, 160, 176, 192, 128):
        operands, exact = make(tokens, 256, 256)
        assert error(fast_gemm.gemm(*operands), exact) < 1e-2
        timed.append(fast_gemm._Plan.tuned_count)
    assert timed == [1, 1, 2, 2, 2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("a_type", [E4M3, E5M2])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_timing_waits_for_operands_that_are_not_zeros(a_type, zero):
    """Gradients of a first step are 0 or -0, for which other algorithms are the fastest; those of a new model
    with 96 blocks are zeros in three passes."""
    operands, exact = make(128, 256, 256, a_type, E4M3)
    zeros = torch.full((128, 256), zero, device="cuda").to(a_type)
    for _ in range(3 * 96):
        fast_gemm.gemm(zeros, *operands[1:])
    plan, = fast_gemm._plans.values()
    assert not plan.is_tuned
    assert error(fast_gemm.gemm(*operands), exact) < 1e-2 and fast_gemm._Plan.tuned_count == 1


@pytest.mark.gpu
def test_zeros_are_checked_a_limited_number_of_times(monkeypatch):
    monkeypatch.setattr(fast_gemm, "MAX_ATTEMPTS", 4)
    operands, _ = make(256, 256, 128)
    checks, check = [], fast_gemm._is_mostly_nonzero
    monkeypatch.setattr(fast_gemm, "_is_mostly_nonzero", lambda x: checks.append(1) or check(x))
    for _ in range(3 * fast_gemm.MAX_ATTEMPTS):
        assert not fast_gemm.gemm(torch.zeros_like(operands[0]), *operands[1:]).any()
    assert len(checks) == fast_gemm.MAX_ATTEMPTS


@pytest.mark.gpu
def test_timing_copies_no_operand():
    """With a vocabulary of 50,304, the FP8 gradient of 65,536 tokens' logits takes 3.3 GB."""
    needs_memory(12)
    operands, _ = make(50304, 16384, 768, E5M2, E4M3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fast_gemm.gemm(*operands)
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert extra <= fast_gemm.WORKSPACE_BYTES + 2**21


def runs_on_torch(monkeypatch, reason):
    """Make gemm use torch._scaled_mm, for one of its reasons."""
    if reason == "no algorithm":
        monkeypatch.setattr(fast_gemm._Plan, "_ask_heuristic", lambda *_: [])
    elif reason == "none runs":
        monkeypatch.setattr(fast_gemm._Plan, "_can_run", lambda *_: False)
    elif reason == "no library":
        monkeypatch.setattr(fast_gemm, "_library", lambda: None)
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(fast_gemm._Plan, "run", None)


@pytest.mark.parametrize("reason", [
    "no library", on_gpu("no algorithm"), on_gpu("none runs"), on_gpu("deterministic")])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_torch_runs_where_cublaslt_cannot(monkeypatch, reason, dtype, with_bias, accumulate):
    runs_on_torch(monkeypatch, reason)
    operands, exact = make(64, 96, 48, E5M2, E4M3, with_bias)
    if dtype is None:
        out = fast_gemm.gemm(*operands)
        assert out.dtype == torch.bfloat16 and error(out, exact) < 5e-3
    else:
        out = torch.full((64, 48), 3.0, device=DEVICE, dtype=dtype)
        assert fast_gemm.gemm(*operands, out=out, accumulate=accumulate) is out
        assert error(out, exact + 3 if accumulate else exact) < (5e-3 if dtype == torch.bfloat16 else 1e-3)
    assert error(fast_gemm.gemm_reference(*operands), exact) < 1e-6


def test_operations_are_registered():
    operands, _ = make(64, 96, 48, with_bias=True)
    fast_gemm.gemm(*operands)  # chooses the algorithm
    fast_gemm.gemm(*operands, out=torch.zeros(64, 48, device=DEVICE))
    ops, out = torch.ops.fast_kernels, torch.zeros(64, 48, device=DEVICE)
    torch.library.opcheck(
        ops.gemm.default, (*operands, out, "precise", True), test_utils=OPCHECKS, atol=1e-2, rtol=1e-2)
    graph = torch.compile(
        lambda out: (fast_gemm.gemm(*operands), fast_gemm.gemm(*operands, out=out)), fullgraph=True,
        backend="aot_eager")
    new, written = graph(out)
    assert written is out and error(new, out.double()) < 5e-3


def shifted(x, elements):
    """Return a copy of x whose address is `elements` elements past a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    return memory[elements:].view(x.shape).copy_(x)


@pytest.mark.parametrize("change, message", [
    (dict(a=lambda x: shifted(x, 8)), "a starts 8 bytes after"),
    (dict(b=lambda x: shifted(x, 1)), "b starts 1 bytes after"),
    (dict(bias=lambda x: shifted(x, 1)), "bias starts 2 bytes after"),
    (dict(out=lambda x: shifted(x, 2)), "out starts 8 bytes after"),
    (dict(bias=lambda x: x.float()), r"must be \(48,\) torch.bfloat16"),
    (dict(bias=lambda x: x[:32]), r"must be \(48,\) torch.bfloat16"),
    (dict(bias=lambda x: x.repeat(2)[::2]), "contiguous"),
    (dict(a=lambda x: x.to(E5M2), b=lambda x: x.to(E5M2)), "not both float8_e5m2"),
    (dict(a=lambda x: x.bfloat16()), "a and b must be"),
    (dict(b=lambda x: x[:, :64].contiguous()), r"b \(48, 64\) .* must be \(48, 96\)"),
    (dict(out=lambda x: x[:16]), r"out \(16, 48\) .* must be \(64, 48\)"),
    (dict(a=lambda x: x.T.contiguous().T), "call .contiguous()"),
    (dict(out=lambda x: x.half()), "out must be"), (dict(accumulation=lambda x: "exact"), "precise, fast or"),
    (dict(a_scale_inv=lambda x: x.double()), "must be torch.float32, one element"),
    (dict(a=lambda x: x[:40], out=lambda x: x[:40]), "with zeros")])
def test_invalid_arguments_raise(change, message):
    """Also after a call of the same shape, whose checks are remembered."""
    operands, _ = make(64, 96, 48, with_bias=True)
    values = dict(zip(("a", "a_scale_inv", "b", "b_scale_inv", "bias"), operands), accumulation="precise")
    values["out"] = torch.zeros(64, 48, device=DEVICE)
    fast_gemm.gemm(**values)
    with pytest.raises(ValueError, match=message):
        fast_gemm.gemm(**values | {name: made(values[name]) for name, made in change.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("tuned", [True, False])
def test_in_a_cuda_graph(tuned):
    """The algorithm of a timed shape is captured; no shape is timed during a capture."""
    operands, _ = make(256, 256, 128)
    if tuned:
        fast_gemm.gemm(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast_gemm.gemm(*operands)
    plan, = fast_gemm._plans.values()
    assert plan.is_tuned == tuned
    (a, _, b, _, _), exact = make(256, 256, 128)
    operands[0].copy_(a)
    operands[2].copy_(b)
    graph.replay()
    assert error(out, exact) < 1e-2


@pytest.mark.gpu
def test_concurrent_streams_and_threads():
    """Two threads, each on its stream, use one shape with different operands."""
    errors = []

    def work(seed):
        torch.manual_seed(seed)
        some = [make(1024, 2048, 1040, E5M2, E4M3, with_bias=False) for _ in range(4)]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                outs = [fast_gemm.gemm(*operands) for operands, _ in some]
            torch.cuda.current_stream().synchronize()
        errors.extend(error(out, exact) for out, (_, exact) in zip(outs, some))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 8 and max(errors) < 1e-2


@pytest.mark.multigpu
def test_on_a_device_that_is_not_the_current_one():
    torch.cuda.set_device(0)
    operands, exact = make(768, 768, 512, device="cuda:1")
    out = fast_gemm.gemm(*operands)
    assert out.device.index == 1 and error(out, exact) < 1e-2 and torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="all must be on one device"):
        fast_gemm.gemm(*operands[:2], operands[2].to("cuda:0"), *operands[3:])


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """The logits of 43,008 tokens with a vocabulary of 50,304."""
    needs_memory(6)
    a = torch.randn(43008, 128, device="cuda").to(E4M3)
    b = torch.randn(50304, 128, device="cuda").to(E4M3)
    one = torch.ones(1, device="cuda")
    out = fast_gemm.gemm(a, one, b, one, accumulation="fast")
    assert out.numel() > 2**31
    for rows in (slice(0, 16), slice(21500, 21516), slice(-16, None)):
        assert error(out[rows], a[rows].double() @ b.double().T) < 1e-2


# ---------------------------------------------------------------- BF16

# (is a, is b the transpose of a contiguous matrix)
LAYOUTS = {"forward": (False, False), "dgrad": (False, True), "wgrad": (True, True), "other": (True, False)}
BF16_SHAPES = [  # M, N, K
    (16384, 3072, 1024), (8208, 1024, 4096), (1024, 4096, 16384), (16384, 50304, 1024), (1000, 520, 776),
    (2064, 1040, 3088)]


def make_bf16(m, n, k, layout):
    is_transposed = LAYOUTS[layout]
    a, b = (torch.randn(shape[::-1] if transposed else shape, device=DEVICE, dtype=torch.bfloat16)
            for shape, transposed in zip([(m, k), (n, k)], is_transposed))
    return a.T if is_transposed[0] else a, b.T if is_transposed[1] else b


def check_bf16(out, a, b, added=0, was_added=False):
    """Assert that `out` is one rounding of a float32 sum away from a @ bᵀ + added in float64. was_added: to a
    BF16 tensor. On a Hopper GPU cuBLAS, also in torch.addmm, then rounds the product, too."""
    rounding = 2**-8 if out.dtype == torch.bfloat16 else 0
    sum_error = 1e-3 * math.sqrt(a.shape[1])  # tensor cores truncate; a rounded part of a sum is off by more
    for rows in torch.arange(len(a), device=a.device).split(4096):
        product = a[rows].double() @ b.double().T
        exact = product + added
        error = (out[rows].double() - exact).abs() - rounding * exact.abs()
        if was_added:
            error -= rounding * product.abs()
        assert error.max() <= sum_error, error.max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m, n, k", BF16_SHAPES)
def test_every_bf16_algorithm_is_correct(m, n, k, layout, dtype):
    needs_memory(16)
    a, b = make_bf16(m, n, k, layout)
    out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    assert fast_gemm.gemm_bf16(a, b, out=out) is out
    check_bf16(out, a, b)
    plan, = fast_gemm._plans.values()
    assert plan.is_tuned and plan.chosen in plan.candidates
    for algorithm in plan.candidates:
        out.fill_(float("nan"))
        plan.run(algorithm, a, None, b, None, None, out)
        check_bf16(out, a, b)


def result_bf16(a, b, bias, dtype, accumulate):
    """Return the result, and what is expected beside a @ bᵀ."""
    added = 0 if bias is None else bias.double()
    if dtype is None:
        return fast_gemm.gemm_bf16(a, b, bias), added
    out = torch.full((len(a), len(b)), 3.0, device=a.device, dtype=dtype)
    assert fast_gemm.gemm_bf16(a, b, bias, out=out, accumulate=accumulate) is out
    return out, added + 3 if accumulate else added


RESULTS = [  # dtype of out, accumulate, with a bias
    (None, False, False), (None, False, True), (torch.bfloat16, False, False), (torch.bfloat16, True, False),
    (torch.float32, False, False), (torch.float32, True, False), (torch.float32, True, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, accumulate, with_bias", RESULTS)
@pytest.mark.parametrize("m, n, k", [(1024, 3072, 16384), (8208, 1032, 776)])
def test_a_bf16_result_is_written_or_added(m, n, k, dtype, accumulate, with_bias, layout):
    """Timing must not add the result more than once."""
    a, b = make_bf16(m, n, k, layout)
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if with_bias else None
    for _ in range(2):  # timed, and not
        out, added = result_bf16(a, b, bias, dtype, accumulate)
        check_bf16(out, a, b, added, was_added=accumulate)
    plan, = fast_gemm._plans.values()
    assert plan.is_tuned


@pytest.mark.gpu
def test_bf16_timing_waits_for_nonzeros_and_copies_none():
    a, b = make_bf16(16384, 1024, 8192, "wgrad")
    zeros = torch.zeros_like(a.T).T
    assert not fast_gemm.gemm_bf16(zeros, b).any()
    plan, = fast_gemm._plans.values()
    assert not plan.is_tuned
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fast_gemm.gemm_bf16(a, b)
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert plan.is_tuned and extra <= fast_gemm.WORKSPACE_BYTES + 2**21


@pytest.mark.gpu
@pytest.mark.parametrize("tuned", [True, False])
def test_bf16_in_a_cuda_graph(tuned):
    a, b = make_bf16(256, 512, 768, "wgrad")
    if tuned:
        fast_gemm.gemm_bf16(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast_gemm.gemm_bf16(a, b)
    plan, = fast_gemm._plans.values()
    assert plan.is_tuned == tuned
    a.copy_(torch.randn_like(a))
    graph.replay()
    check_bf16(out, a, b)


def test_a_result_is_added_to_a_given_tensor_only():
    operands, _ = make(32, 32, 32)
    x = torch.ones(32, 32, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="pass out="):
        fast_gemm.gemm(*operands, accumulate=True)
    with pytest.raises(ValueError, match="pass out="):
        fast_gemm.gemm_bf16(x, x, accumulate=True)


@pytest.mark.parametrize("reason", [
    "no library", on_gpu("no algorithm"), on_gpu("none runs"), on_gpu("deterministic")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_runs_in_bf16_where_cublaslt_cannot(monkeypatch, reason, layout):
    runs_on_torch(monkeypatch, reason)
    a, b = make_bf16(64, 48, 96, layout)
    bias = torch.randn(48, device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(fast_gemm.gemm_bf16(a, b, bias), F.linear(a, b, bias))
    for dtype, accumulate, with_bias in RESULTS:
        out, added = result_bf16(a, b, bias if with_bias else None, dtype, accumulate)
        check_bf16(out, a, b, added, was_added=accumulate)


OTHER_OPERANDS = {
    "M": lambda x, weight: (x[:7], weight), "N": lambda x, weight: (x, weight[:1]),
    "K": lambda x, weight: (x[:, :20].contiguous(), weight[:, :20].contiguous()),
    "address": lambda x, weight: (shifted(x, 1), weight), "rows": lambda x, weight: (x[::2], weight),
    "expanded": lambda x, weight: (x[:1].expand(16, -1), weight),
    "float32": lambda x, weight: (x.float(), weight.float())}


@pytest.mark.parametrize("kind", OTHER_OPERANDS)
def test_torch_runs_other_operands_than_cublaslts(monkeypatch, kind):
    """Sizes, addresses, strides and dtypes that cuBLASLt cannot run."""
    monkeypatch.setattr(fast_gemm._Plan, "run", None)
    x, weight = OTHER_OPERANDS[kind](*make_bf16(64, 48, 96, "forward"))
    assert torch.equal(fast_gemm.gemm_bf16(x, weight), x @ weight.T)
    out = torch.ones(len(x), len(weight), device=DEVICE, dtype=x.dtype)
    expected = torch.addmm(out, x, weight.T)
    assert torch.equal(fast_gemm.gemm_bf16(x, weight, out=out, accumulate=True), expected)
