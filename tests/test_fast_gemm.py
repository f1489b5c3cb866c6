"""Products by an algorithm of cuBLASLt's that was chosen by timing: the product whichever it is, chosen once, and never while a graph is recorded."""

import pytest
import torch

import fast_gemm

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(2304, 768, 4096), (768, 3072, 4096), (768, 4096, 2304), (64, 32, 48), (50304, 768, 256)]  # M, K, N


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("FP8 products need a GPU that has them")
    monkeypatch.setattr(fast_gemm, "_products", {})


def make(m, k, n, a_type=E4M3, b_type=E4M3, with_bias=False):
    """Operands, and their product in float64."""
    a, b = (torch.randn(rows, k, device="cuda").to(dtype) for rows, dtype in ((m, a_type), (n, b_type)))
    scales = torch.tensor([0.5], device="cuda"), torch.tensor([0.25], device="cuda")
    bias = torch.randn(m, device="cuda", dtype=torch.bfloat16) if with_bias else None
    exact = b.double() @ a.double().T / 8
    return (a, scales[0], b, scales[1], bias), exact + bias.double() if with_bias else exact


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("a_type, b_type, with_bias, fast", [(E4M3, E4M3, False, True), (E4M3, E4M3, True, True), (E4M3, E5M2, False, False)])
@pytest.mark.parametrize("m, k, n", SHAPES)
def test_every_algorithm_gives_the_product(m, k, n, a_type, b_type, with_bias, fast):
    operands, exact = make(m, k, n, a_type, b_type, with_bias)
    out = fast_gemm.multiply(*operands, fast=fast)
    assert out.shape == (n, m) and out.dtype == torch.bfloat16
    product, = fast_gemm._products.values()
    assert 0 <= product.best < product.found
    errors = []
    for number in range(product.found):
        out = torch.full((n, m), float("nan"), device="cuda", dtype=torch.bfloat16)
        product.run(number, *operands, out)
        errors.append(error(out, exact))
    assert errors[0] < 1e-2 and max(errors) <= 1.2 * errors[0] + 1e-4, errors  # the first is what Transformer Engine takes


def test_chosen_once_for_a_shape(monkeypatch):
    chosen, choose = [], fast_gemm._Product.choose
    monkeypatch.setattr(fast_gemm._Product, "choose", lambda product, operands: chosen.append(product) or choose(product, operands))
    for m in (256, 512, 256, 512):
        operands, exact = make(m, 256, 128)
        assert error(fast_gemm.multiply(*operands), exact) < 1e-2
    assert len(chosen) == 2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(64, 48), (2048, 1040)])
def test_what_algorithms_are_tried_on(dtype, shape):
    """Values of either sign up to the type's largest, whatever comes by: zeros take less power, and the clock is higher."""
    state = torch.cuda.get_rng_state()
    values = fast_gemm._random_like(torch.zeros(shape, device="cuda").to(dtype))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert values.shape == shape and values.dtype == dtype and values.is_contiguous()
    values, largest = values.double(), torch.finfo(dtype).max
    assert values.isfinite().all() and values.abs().max() > largest / 3 and values.mean().abs() < values.std() / 10
    assert 0.15 * largest < values.std() < 0.25 * largest


@pytest.mark.parametrize("known", [True, False])
def test_in_a_cuda_graph(known):
    """Recorded with what is known; a shape that is not is not timed, nor remembered."""
    operands, _ = make(256, 256, 128)
    if known:
        fast_gemm.multiply(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast_gemm.multiply(*operands)
    (a, a_scale, b, b_scale, _), exact = make(256, 256, 128)
    operands[0].copy_(a), operands[2].copy_(b)
    graph.replay()
    assert error(out, exact) < 1e-2 and len(fast_gemm._products) == known


def test_nothing_is_chosen_where_results_must_repeat():
    assert fast_gemm.available()
    torch.use_deterministic_algorithms(True)
    try:
        assert not fast_gemm.available()
    finally:
        torch.use_deterministic_algorithms(False)
