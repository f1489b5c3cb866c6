"""Packed attention, forward and backward, against QK-norm, RoPE and attention in float64."""


import pytest
import torch
from torch.utils._pytree import tree_map_only

pytest.importorskip("triton")
import model_te_optimized
from fast_kernels import attention as fast_attention
from fast_kernels.attention import packed_attention, packed_attention_reference
from kernel_tools import DEVICE, _free_memory, capture, needs_memory  # noqa: F401
from model_te_optimized import OptimizedConfig

EPS = 1e-5
# of a batch of two rows with 11 tokens: one token, empty ones at the end
DOCUMENTS = torch.tensor([0, 4, 5, 11, 22, 22], dtype=torch.int32, device=DEVICE)
ROUNDING = 1e-5  # float32 rounding error of these small shapes


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("starts", [None, [0, 5, 6, 22, 24, 40, 48, 48], [0, 30, 48]])  # one crosses the row
def test_reference_is_softmax_attention(starts, window):
    q, k, v = qkv = torch.randn(3, 2, 24, 2, 16, dtype=torch.float64)
    cu_seqlens = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    out = fast_attention.sdpa(*qkv, cu_seqlens, window).flatten(0, 1)
    for token in range(48):
        first = max(start for start in starts or (0, 24) if start <= token)
        seen = slice(max(first, token + 1 - (window or 48)), token + 1)
        scores = torch.einsum("hd,thd->ht", q.flatten(0, 1)[token], k.flatten(0, 1)[seen]) / 4
        expected = torch.einsum("ht,thd->hd", scores.softmax(-1), v.flatten(0, 1)[seen])
        torch.testing.assert_close(out[token], expected)


def make_inputs(batch, length, n_head, n_kv_head, dim, rope, norm, dtype=torch.float32, device=DEVICE):
    """Make qkv, (cos, sin), q_weight, k_weight and dout, in `dtype` except for cos and sin."""
    qkv = torch.randn(batch, length, (n_head + 2 * n_kv_head) * dim, device=device, dtype=dtype)
    tables = q_weight = k_weight = None
    if rope:
        frequencies = 1e4 ** (-torch.arange(0, dim, 2, device=device).float() / dim)
        angles = torch.arange(length, device=device).float()[:, None, None] * frequencies
        tables = angles.cos(), angles.sin()
    if norm:
        q_weight = (1 + 0.3 * torch.randn(dim, device=device)).to(dtype)
        k_weight = (1 + 0.3 * torch.randn(dim, device=device)).to(dtype)
    dout = torch.randn(batch, length, n_head * dim, device=device, dtype=dtype)
    return qkv, tables, q_weight, k_weight, dout


def run(function, n_head, n_kv_head, qkv, rope, q_weight, k_weight, dout, **options):
    """Return the output and the gradients of qkv and of the weights that are not None."""
    qkv = qkv.detach().clone().requires_grad_()
    leaves = [qkv]
    if q_weight is not None:
        q_weight = q_weight.detach().clone().requires_grad_()
        k_weight = k_weight.detach().clone().requires_grad_()
        leaves += [q_weight, k_weight]
    out = function(qkv, n_head, n_kv_head, rope, q_weight, k_weight, **options)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def errors(n_head, n_kv_head, inputs, **options):
    """Return ||ours - reference|| / ||reference|| of the output and of each gradient."""
    ours = run(packed_attention, n_head, n_kv_head, *inputs, **options)
    in_float64 = tree_map_only(torch.Tensor, torch.Tensor.double, inputs)
    exact = run(packed_attention_reference, n_head, n_kv_head, *in_float64, **options)
    dtype = inputs[0].dtype
    for x, y in zip(ours, exact, strict=True):
        assert x.dtype == dtype and x.shape == y.shape
    return [relative_error(x, y) for x, y in zip(ours, exact)]


def relative_error(x, expected):
    return float((x.double() - expected.double()).norm() / expected.double().norm())


features = pytest.mark.parametrize("rope, norm", [(False, False), (True, False), (False, True), (True, True)],
                                   ids=["plain", "rope", "qk-norm", "both"])


@pytest.mark.parametrize("n_head, n_kv_head, length, dim, options, rope, norm", [
    (2, 2, 37, 16, {}, True, False), (4, 2, 19, 64, {}, False, True), (3, 1, 8, 24, {}, True, True),
    (4, 2, 11, 16, {"window": 3}, True, True), (4, 2, 11, 16, {"cu_seqlens": DOCUMENTS}, True, True),
    (4, 2, 11, 16, {"cu_seqlens": DOCUMENTS, "window": 3}, False, False)])
def test_equals_reference(monkeypatch, n_head, n_kv_head, length, dim, options, rope, norm):
    monkeypatch.setattr(fast_attention, "TILE", 256)
    # so that a program has several tiles, and not all programs the same number
    monkeypatch.setattr(fast_attention, "PROGRAMS", 3)
    inputs = make_inputs(2, length, n_head, n_kv_head, dim, rope, norm)
    assert max(errors(n_head, n_kv_head, inputs, **options)) < ROUNDING


def test_other_layouts_of_the_inputs():
    """qkv with four dimensions; cos and sin with two, strided or float64, or of each token; an expanded dout;
    no_grad."""
    qkv, (cos, sin), q_weight, k_weight, _ = make_inputs(2, 9, 2, 1, 16, True, True)
    dout = torch.tensor(0.5, device=DEVICE).expand(2, 9, 32)
    of_each_token = [table[torch.randint(9, (2, 9))] for table in (cos, sin)]
    for tables in ((cos, sin), tuple(of_each_token)):
        assert max(errors(2, 1, (qkv, tables, q_weight, k_weight, dout))) < ROUNDING
    expected = packed_attention(qkv, 2, 1, (cos, sin), q_weight, k_weight)
    with torch.no_grad():
        out = packed_attention(
            qkv.requires_grad_().view(2, 9, 4, 16), 2, 1,
            (cos[:, 0].t().contiguous().t(), sin[:, 0].double()), q_weight, k_weight)
    assert torch.equal(out, expected) and not out.requires_grad


def test_invalid_arguments_raise():
    qkv, rope, q_weight, k_weight, _ = make_inputs(1, 4, 4, 2, 16, True, True)
    odd = torch.randn(1, 4, 8 * 15, device=DEVICE)
    for arguments, options, message in (
            ((qkv, 5, 2), {}, "n_head=5"),
            ((qkv, 2, 3), {}, "n_kv_head=3"),
            ((qkv.view(1, 4, 16, 8), 4, 2), {}, "does not hold"),
            ((qkv, 4, 2), {"q_weight": q_weight}, "both"),
            ((qkv, 4, 2), {"q_weight": q_weight[:8], "k_weight": k_weight[:8]}, r"shape \(16,\)"),
            ((qkv[:, :3], 4, 2), {"rope": rope}, r"\(3, 8\) fit"),
            ((odd, 4, 2), {"rope": rope}, "head dimension 15: .* need an even one"),
            ((qkv, 4, 2), {"window": 0}, "at least 1"),
            ((qkv, 4, 2), {"cu_seqlens": torch.tensor([0, 4])}, "no int32 vector")):
        with pytest.raises(ValueError, match=message):
            packed_attention(*arguments, **options)


@pytest.mark.parametrize("version", ["fa4", "fa2"])
@pytest.mark.parametrize("capability, widest", [((7, 5), (0, 0)), ((8, 0), (0, 256)), ((9, 0), (256, 256)),
                                                ((10, 0), (128, 256)), ((12, 0), (128, 256))])
@pytest.mark.parametrize("dim", [16, 20, 24, 128, 136, 256, 264])
def test_flash_attention_is_picked_where_it_has_a_kernel(monkeypatch, version, capability, widest, dim):
    """attention="auto" of the model and FlashAttention 4 here take no more than the packages document for
    compute capability and head size, and no narrow heads, of which version 4 returns wrong gradients."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(fast_attention, "fa4_forward", print if version == "fa4" else None)
    monkeypatch.setattr(model_te_optimized, "flash_version", 4 if version == "fa4" else 2)
    narrowest = 8 if version == "fa2" else 24
    runs = dim % 8 == 0 and narrowest <= dim <= widest[version == "fa2"]
    assert fast_attention._fa4_supports(dim, capability[0]) == (runs and version == "fa4")
    config = OptimizedConfig(n_head=2, n_embd=2 * dim, head_dim=dim, vocab_size=64, attention="auto")
    assert (model_te_optimized.attention_kernel(config) == "flash") == runs
    config.attention = "flash"
    if runs:
        assert model_te_optimized.attention_kernel(config) == "flash"
        config.attn_dropout = 0.1
    with pytest.raises(ValueError, match="attention='flash': .*; 'sdpa' works"):
        model_te_optimized.attention_kernel(config)


@pytest.mark.parametrize("options, rope, norm", [
    ({}, True, False), ({"window": 3}, False, True), ({"cu_seqlens": DOCUMENTS}, True, True)])
def test_operations_are_registered(options, rope, norm):
    torch._dynamo.reset()
    qkv, tables, q_weight, k_weight, dout = make_inputs(2, 11, 4, 2, 16, rope, norm)
    qkv, (cos, sin) = qkv.view(2, 11, 8, 16).requires_grad_(), tables or (None, None)
    inputs = qkv, cos, sin, q_weight, k_weight, options.get("cu_seqlens")
    torch.library.opcheck(
        torch.ops.fast_kernels.attention.default, (*inputs, 4, 2, EPS, options.get("window")), atol=1e-5,
        rtol=1e-5)
    graph = torch.compile(packed_attention, fullgraph=True, backend="aot_eager")
    results = []
    for function in (packed_attention, graph):
        out = function(qkv, 4, 2, tables, q_weight, k_weight, EPS, **options)
        results.append([out, *torch.autograd.grad(out, qkv, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


gpu_shapes = pytest.mark.parametrize(
    "batch, length, n_head, n_kv_head, dim",
    [(1, 333, 4, 2, 16),
     (2, 512, 12, 12, 64), (1, 333, 6, 2, 64), (2, 384, 8, 8, 128), (1, 777, 8, 2, 128), (2, 256, 6, 2, 96)])


@pytest.mark.gpu
@features
@gpu_shapes
def test_bf16_on_a_gpu(installed, batch, length, n_head, n_kv_head, dim, rope, norm):
    """Rounding to BF16 has an error of at most 2^-9 = 2e-3, about 1e-3 in the norm. Probabilities, output and
    qk are each rounded once."""
    inputs = make_inputs(batch, length, n_head, n_kv_head, dim, rope, norm, torch.bfloat16)
    poison = torch.full((8, *inputs[0].shape), torch.nan, device="cuda", dtype=torch.bfloat16)
    del poison  # memory allocated next holds NaN, so that gaps in the gradient are noticed
    assert max(errors(n_head, n_kv_head, inputs)) < 1e-2


@pytest.fixture(params=["as installed", "of PyTorch"])
def installed(request, monkeypatch):
    """Run with the packages that are installed, and without."""
    if request.param == "of PyTorch":
        monkeypatch.setattr(fast_attention, "fa4_forward", None)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {}, {"window": 100}, {"cu_seqlens": [0, 1, 200, 333, 600, 666, 666]}, {"cu_seqlens": [0, 200, 500, 666]},
    {"window": 50, "cu_seqlens": [0, 200, 333, 666]}], ids=["", "window", "packed", "crossing", "both"])
@pytest.mark.parametrize("n_head, n_kv_head, dim", [(6, 2, 64), (4, 4, 128), (2, 1, 256)])
def test_windows_and_documents_on_a_gpu(installed, n_head, n_kv_head, dim, options):
    """All kernels agree on documents that cross a row: one document of the flattened batch."""
    options = {name: torch.tensor(value, dtype=torch.int32, device="cuda") if name == "cu_seqlens" else value
               for name, value in options.items()}
    inputs = make_inputs(2, 333, n_head, n_kv_head, dim, True, True, torch.bfloat16)
    assert max(errors(n_head, n_kv_head, inputs, **options)) < 1e-2


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """The last row of a batch equals that row without the others."""
    needs_memory(20)
    row, (cos, sin), q_weight, k_weight, dout = make_inputs(1, 2048, 12, 12, 64, True, True, torch.bfloat16)
    batch, row = 2**31 // row.numel() + 1, row.view(1, 2048, 36, 64)

    def attend(qkv, dout):
        out = packed_attention(qkv.requires_grad_(), 12, 12)
        return out.detach()[-1:], torch.autograd.grad(out, qkv, dout)[0][-1:]

    def norm_rope(qkv, dout):  # its backward replaces the gradient that it is given, here a copy of qkv
        dqkv, options = qkv.clone(), (12, 24, cos, sin, q_weight, k_weight, EPS)
        fast_attention._norm_rope_backward(qkv, dqkv, *options)
        return fast_attention._norm_rope(qkv, *options)[-1:], dqkv[-1:]

    for function in (attend, norm_rope):
        qkv = row.repeat(batch, 1, 1, 1)
        assert qkv.numel() > 2**31
        ours = function(qkv, dout.expand(batch, -1, -1))
        expected = function(row.clone(), dout)
        for x, y in zip(ours, expected):
            assert relative_error(x, y) < 5e-3
        del qkv, ours
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("n_kv_head, dim", [(4, 64), (2, 128)])
def test_in_a_cuda_graph(installed, n_kv_head, dim):
    qkv, rope, q_weight, k_weight, dout = make_inputs(2, 256, 4, n_kv_head, dim, True, True, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (qkv, q_weight, k_weight)]

    def step():
        out = packed_attention(leaves[0], 4, n_kv_head, rope, *leaves[1:], EPS)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    graph, captured = capture(step)
    with torch.no_grad():
        qkv.copy_(torch.randn_like(qkv))
    graph.replay()
    eager = step()
    assert torch.equal(captured[0], eager[0])
    # FlashAttention sums dq (and dk, dv with GQA) in no fixed order
    for x, y in zip(captured[1:], eager[1:]):
        assert relative_error(x, y) < 5e-3


@pytest.mark.gpu
def test_deterministic_algorithms_give_equal_gradients(installed):
    inputs = make_inputs(2, 1024, 8, 2, 64, True, True, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(packed_attention, 8, 2, *inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second))
