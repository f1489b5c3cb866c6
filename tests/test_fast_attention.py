"""Packed attention, forward and backward, against QK-norm, RoPE and attention in float64."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

pytest.importorskip("triton")
import model_te_optimized  # noqa: E402
from fast_kernels import attention as fast_attention  # noqa: E402
from fast_kernels.attention import packed_attention  # noqa: E402
from model_te_optimized import OptimizedConfig  # noqa: E402

EPS = 1e-5
ROUNDING = 1e-5  # float32 rounding error of these small shapes


def rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def apply_rope(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def reference(qkv, n_head, n_kv_head, rope, q_weight, k_weight):
    batch, length = qkv.shape[:2]
    q, k, v = qkv.view(batch, length, n_head + 2 * n_kv_head, -1).split([n_head, n_kv_head, n_kv_head], dim=2)
    if q_weight is not None:
        q, k = rms_norm(q, q_weight), rms_norm(k, k_weight)
    if rope is not None:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    q, k, v = (
        x.transpose(1, 2)
        for x in (q, k.repeat_interleave(n_head // n_kv_head, 2), v.repeat_interleave(n_head // n_kv_head, 2))
    )
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(
        torch.ones(length, length, device=q.device).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def make_inputs(batch, length, n_head, n_kv_head, dim, rope, norm, dtype=torch.float32, device=DEVICE):
    """Make qkv, (cos, sin), q_weight, k_weight and dout, in `dtype` except for cos and sin."""
    qkv = torch.randn(batch, length, (n_head + 2 * n_kv_head) * dim, device=device, dtype=dtype)
    angles = torch.arange(length, device=device).float()[:, None, None] * 1e4 ** (
        -torch.arange(0, dim, 2, device=device).float() / dim)
    weights = (
        [(1 + 0.3 * torch.randn(dim, device=device)).to(dtype) for _ in range(2)] if norm else [None, None])
    dout = torch.randn(batch, length, n_head * dim, device=device, dtype=dtype)
    return qkv, (angles.cos(), angles.sin()) if rope else None, *weights, dout


def run(function, n_head, n_kv_head, qkv, rope, q_weight, k_weight, dout):
    """Return the output and the gradients of qkv and of the weights that are not None."""
    leaves = [
        x.detach().clone().requires_grad_() if x is not None else None for x in (qkv, q_weight, k_weight)]
    out = function(leaves[0], n_head, n_kv_head, rope, *leaves[1:])
    out.backward(dout)
    return [out.detach()] + [x.grad for x in leaves if x is not None]


def double(x):
    return tuple(map(double, x)) if isinstance(x, tuple) else x.double() if x is not None else None


def errors(n_head, n_kv_head, inputs):
    """Return ||ours - reference|| / ||reference|| of the output and of each gradient."""
    ours = run(packed_attention, n_head, n_kv_head, *inputs)
    exact = run(reference, n_head, n_kv_head, *map(double, inputs))
    assert all(x.dtype == inputs[0].dtype and x.shape == y.shape for x, y in zip(ours, exact))
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(ours, exact)]


features = pytest.mark.parametrize("rope, norm", [(False, False), (True, False), (False, True), (True, True)],
                                   ids=["plain", "rope", "qk-norm", "both"])


@features
@pytest.mark.parametrize("n_head, n_kv_head, length, dim", [(2, 2, 37, 16), (4, 2, 19, 64), (3, 1, 8, 24)])
def test_equals_reference(monkeypatch, n_head, n_kv_head, length, dim, rope, norm):
    monkeypatch.setattr(fast_attention, "TILE", 256)
    # so that a program has several tiles, and not all programs the same number
    monkeypatch.setattr(fast_attention, "PROGRAMS", 3)
    inputs = make_inputs(2, length, n_head, n_kv_head, dim, rope, norm)
    assert max(errors(n_head, n_kv_head, inputs)) < ROUNDING


def test_other_layouts_of_the_inputs():
    """qkv with four dimensions; cos and sin with two, strided or float64; an expanded dout; no_grad."""
    qkv, (cos, sin), q_weight, k_weight, _ = make_inputs(2, 9, 2, 1, 16, True, True)
    dout = torch.tensor(0.5, device=DEVICE).expand(2, 9, 32)
    assert max(errors(2, 1, (qkv, (cos, sin), q_weight, k_weight, dout))) < ROUNDING
    expected = packed_attention(qkv, 2, 1, (cos, sin), q_weight, k_weight)
    with torch.no_grad():
        out = packed_attention(
            qkv.requires_grad_().view(2, 9, 4, 16), 2, 1,
            (cos[:, 0].t().contiguous().t(), sin[:, 0].double()), q_weight, k_weight)
    assert torch.equal(out, expected) and not out.requires_grad


def test_invalid_arguments_raise():
    qkv, rope, q_weight, k_weight, _ = make_inputs(1, 4, 4, 2, 16, True, True)
    for arguments, message in (((qkv, 5, 2), "n_head=5"), ((qkv, 4, 2, None, q_weight), "both"),
                               ((qkv, 4, 2, None, q_weight[:8], k_weight[:8]), r"shape \(16,\)"),
                               ((qkv[:, :3], 4, 2, rope), r"\(3, 8\) fit"), ((qkv, 2, 3), "n_kv_head=3"),
                               ((qkv.view(1, 4, 16, 8), 4, 2), "does not hold")):
        with pytest.raises(ValueError, match=message):
            packed_attention(*arguments)


@pytest.mark.parametrize("version", ["fa4", "fa2"])
@pytest.mark.parametrize("capability, widest", [((7, 5), (0, 0)), ((8, 0), (0, 256)), ((9, 0), (256, 256)),
                                                ((10, 0), (128, 256)), ((12, 0), (128, 256))])
@pytest.mark.parametrize("dim", [20, 64, 96, 128, 136, 192, 256, 264])
def test_flash_attention_is_picked_only_where_its_package_has_a_kernel(
    monkeypatch, version, capability, widest, dim):
    """attention="auto" of the model and the packed kernels follow what the packages document for compute
    capability and head size."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    for name in ("fa4", "fa2"):
        monkeypatch.setattr(fast_attention, f"{name}_forward", print if name == version else None)

    def flash_attn_func():
        pass

    package = "flash_attn.cute" if version == "fa4" else "flash_attn.flash_attn_interface"
    flash_attn_func.__module__ = package
    monkeypatch.setattr(model_te_optimized, "flash_attn_func", flash_attn_func)
    runs = (
        dim % 8 == 0
        and dim <= widest[version == "fa2"]
        or (version, capability, dim) == ("fa4", (10, 0), 256))
    assert fast_attention._flash_version(dim) == (version if runs else None)
    config = OptimizedConfig(n_head=2, n_embd=2 * dim, head_dim=dim, vocab_size=64, attention="auto")
    assert (model_te_optimized.attention_kernel(config) == "flash") == runs
    config.attention = "flash"
    if runs:
        assert model_te_optimized.attention_kernel(config) == "flash"
        config.attn_dropout = 0.1
    with pytest.raises(ValueError, match="attention='flash': .*; 'sdpa' works"):
        model_te_optimized.attention_kernel(config)


class Recorder:
    """Stands in for FlashAttention 4 and 2, with their signatures: runs SDPA and records its arguments."""

    def fa4_forward(self, q, k, v, causal, return_lse, tile_mn=None):
        return self.fa2_forward(q, k, v, 0.0, q.shape[-1] ** -0.5, causal, -1, -1, 0.0, None, False)[:2] + (
            None, None, None)

    def fa4_backward(self, q, k, v, out, dout, lse, causal, deterministic, dq, dk, dv):
        self.fa2_backward(
            dout, q, k, v, out, lse, dq, dk, dv, 0.0, q.shape[-1] ** -0.5, causal, -1, -1, 0.0, None,
            deterministic)

    def fa2_forward(
        self,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax):
        assert (
            causal
            and softmax_scale == q.shape[-1] ** -0.5
            and (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0))
        return fast_attention._sdpa(q, k, v), q.new_zeros(q.shape[0], q.shape[2], q.shape[1]), None, None

    def fa2_backward(
        self,
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None):
        assert (
            causal
            and softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1])
            and out.shape == dout.shape == q.shape)
        self.dout, self.targets = dout, (dq, dk, dv)
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            for target, gradient in zip(
                self.targets, torch.autograd.grad(fast_attention._sdpa(*inputs), inputs, dout)):
                target.copy_(gradient)


@features
@pytest.mark.parametrize("kernel", ["fa4", "fa2"])
def test_flash_attention_writes_into_the_packed_gradient(monkeypatch, kernel, rope, norm):
    """dq, dk and dv are adjacent slices of the gradient of qkv: nothing is copied."""
    flash = Recorder()
    monkeypatch.setattr(fast_attention, "_pick_kernel", lambda q: kernel)
    for name in ("forward", "backward"):
        monkeypatch.setattr(
            fast_attention, f"{kernel}_{name}", getattr(flash, f"{kernel}_{name}"), raising=False)
    inputs = make_inputs(2, 11, 4, 2, 16, rope, norm)
    assert max(errors(4, 2, inputs)) < ROUNDING
    qkv = inputs[0].requires_grad_()
    packed_attention(qkv, 4, 2, *inputs[1:4]).backward(
        inputs[-1].transpose(1, 2).contiguous().transpose(1, 2))
    start, size = qkv.grad.data_ptr(), qkv.grad.element_size()
    assert [(x.data_ptr() - start) // size for x in flash.targets] == [0, 4 * 16, 6 * 16]
    assert flash.dout.is_contiguous() and all(x.stride() == (11 * 128, 128, 16, 1) for x in flash.targets)


@pytest.mark.parametrize(
    "shape, capability, has_option, tile",
    [
        ((2, 1024, 4, 64), (9, 0), True, (128, 128)), ((2, 1040, 4, 64), (9, 0), True, None),
        ((2, 1024, 4, 96), (9, 0), True, None), ((2, 1024, 4, 64), (10, 0), True, None),
        ((2, 1024, 4, 64), (9, 0), False, None)])
def test_smaller_tiles_for_short_sequences(monkeypatch, shape, capability, has_option, tile):
    monkeypatch.setattr(fast_attention, "FA4_HAS_TILE_OPTION", has_option)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert fast_attention._tile_option(torch.empty(shape)).get("tile_mn") == tile


gpu_shapes = pytest.mark.parametrize(
    "batch, length, n_head, n_kv_head, dim",
    [(2, 512, 12, 12, 64), (1, 333, 6, 2, 64), (2, 384, 8, 8, 128), (1, 777, 8, 2, 128), (2, 256, 6, 2, 96)])


@pytest.mark.gpu
@features
@gpu_shapes
def test_bf16_on_a_gpu(batch, length, n_head, n_kv_head, dim, rope, norm):
    """Rounding to BF16 has an error of at most 2^-9 = 2e-3, about 1e-3 in the norm. Probabilities, output and
    qk are each rounded once."""
    inputs = make_inputs(batch, length, n_head, n_kv_head, dim, rope, norm, torch.bfloat16)
    poison = torch.full((8, *inputs[0].shape), torch.nan, device="cuda", dtype=torch.bfloat16)
    del poison  # memory allocated next holds NaN, so that gaps in the gradient are noticed
    assert max(errors(n_head, n_kv_head, inputs)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("n_kv_head, dim", [(4, 64), (2, 128)])
def test_in_a_cuda_graph(n_kv_head, dim):
    qkv, rope, q_weight, k_weight, dout = make_inputs(2, 256, 4, n_kv_head, dim, True, True, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (qkv, q_weight, k_weight)]

    def step():
        out = packed_attention(leaves[0], 4, n_kv_head, rope, *leaves[1:], EPS)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles the kernels, which is not possible during a capture
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        qkv.copy_(torch.randn_like(qkv))
    graph.replay()
    eager = step()
    assert torch.equal(captured[0], eager[0])
    # FlashAttention sums dq (and dk, dv with GQA) in no fixed order
    for x, y in zip(captured[1:], eager[1:]):
        assert float((x.double() - y.double()).norm() / y.double().norm()) < 5e-3


@pytest.mark.gpu
def test_deterministic_algorithms_give_equal_gradients():
    inputs = make_inputs(2, 1024, 8, 2, 64, True, True, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(packed_attention, 8, 2, *inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second))
