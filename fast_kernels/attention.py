"""Causal attention on a GPT's packed QKV projection: QK-norm, RoPE and FlashAttention; one packed gradient.

Use `packed_attention` on the output of one QKV GEMM. The kernel is the first of these that supports the
inputs: FlashAttention 4 (Hopper, Blackwell: `pip install flash-attn-4`), cuDNN's (Hopper, Blackwell) and
FlashAttention 2, both in PyTorch, and SDPA (any machine, dtype and head size; not fast).

- After a `split`, autograd concatenates the gradients of q, k and v. Here all kernels read slices of qkv, and
  FlashAttention 4 writes dq, dk and dv into slices of one gradient: nothing is copied. PyTorch's kernels
  allocate them, which costs one copy. `sdpa` is PyTorch's, differentiated by autograd.
- `attention` takes q, k and v as three tensors. It allocates their gradients, which are slices of one tensor
  under torch.compile only.
- QK-norm and RoPE are one Triton kernel forward and one, in place, backward, which compute in float32.
- The kernels here are deterministic; FlashAttention's backward is under `torch.use_deterministic_algorithms`.

References: FlashAttention (Dao et al. 2022, Shah et al. 2024); RoPE (Su et al. 2021); QK-norm (Henry et al.
2020).
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fast_kernels.launch import Launch, per_shape
from fast_kernels.library import ceil_div, is_fake, is_tracing, next_power_of_2, operation

try:
    from flash_attn.cute.interface import _flash_attn_bwd as fa4_backward
    from flash_attn.cute.interface import _flash_attn_fwd as fa4_forward
except ImportError:
    fa4_forward = None

aten = torch.ops.aten
PROGRAMS = 1056  # of the backward kernel, 8 per SM of a Hopper GPU; each writes partial weight gradients
TILE = 1024  # pairs (x[i], x[i + D/2]) of a program: per thread 8 of each half, 16 bytes of BF16


def packed_attention_reference(qkv, n_head, n_kv_head, rope=None, q_weight=None, k_weight=None, eps=1e-5,
                               cu_seqlens=None, window=None):
    """`packed_attention` in plain PyTorch."""
    qkv = qkv.flatten(2).unflatten(2, (n_head + 2 * n_kv_head, -1))
    q, k, v = qkv.split([n_head, n_kv_head, n_kv_head], dim=2)
    length, head_dim = q.shape[1], q.shape[3]
    if q_weight is not None:
        q = F.rms_norm(q, (head_dim,), q_weight, eps)
        k = F.rms_norm(k, (head_dim,), k_weight, eps)
    if rope is not None:
        cos, sin = (table.reshape(-1, length, 1, head_dim // 2) for table in rope)
        q = _rotate_reference(q, cos, sin)
        k = _rotate_reference(k, cos, sin)
    return sdpa(q, k, v, cu_seqlens, window).flatten(2)


def _rotate_reference(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def packed_attention(qkv, n_head, n_kv_head, rope=None, q_weight=None, k_weight=None, eps=1e-5,
                     cu_seqlens=None, window=None):
    """Compute causal softmax(q · kᵀ / √D) · v, (B, S, n_head · D), differentiable in qkv and both weights.

    The fast kernels support BF16 and FP16, and D divisible by 8 and at most 256; other inputs use SDPA.

    Args:
        qkv: (B, S, (n_head + 2 n_kv_head) · D) or (B, S, n_head + 2 n_kv_head, D): heads of q, then k and v.
        n_head, n_kv_head: n_kv_head divides n_head (GQA).
        rope: (cos, sin) float32, (S, D/2) or (S, 1, D/2), or with one angle per token (B, S, 1, D/2). Rotates
            the pairs (x[i], x[i + D/2]) of q and k (Llama's convention).
        q_weight, k_weight: (D,), both or neither: QK-norm, an RMSNorm of each head with `eps`, before RoPE.
        cu_seqlens: int32, the start of each document in the packed batch of B·S tokens, then B·S, once or
            more: CUDA graphs need a fixed length. A token attends to its own document only, which has at
            most S tokens and may cross rows; not checked, which would need a host synchronization. None: each
            sequence is one document.
        window: a token attends to itself and the window - 1 tokens before it. None: to all before it.
    """
    batch, length = qkv.shape[:2]
    heads = n_head + 2 * n_kv_head
    token_size = math.prod(qkv.shape[2:])
    has_other_heads = qkv.dim() == 4 and qkv.shape[2] != heads
    if n_head % n_kv_head or token_size % heads or has_other_heads:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not hold n_head={n_head} + 2 · n_kv_head={n_kv_head} "
                         "heads, n_kv_head dividing n_head")
    qkv = qkv.contiguous().view(batch, length, heads, -1)
    head_dim = qkv.shape[3]
    _check_norm_weights(q_weight, k_weight, head_dim)
    if head_dim % 2 and (rope is not None or q_weight is not None):
        raise ValueError(f"head dimension {head_dim}: RoPE and QK-norm need an even one")
    cos, sin = (None, None) if rope is None else _check_rope(rope, qkv)
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be None or at least 1, the token itself")
    if cu_seqlens is not None:
        if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
            raise ValueError(f"cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}: no int32 vector")
        cu_seqlens = cu_seqlens.to(qkv.device).contiguous()
    out, _, _ = _attention(qkv, cos, sin, q_weight, k_weight, cu_seqlens, n_head, n_kv_head, eps, window)
    return out.flatten(2)


def _check_norm_weights(q_weight, k_weight, head_dim):
    if q_weight is None and k_weight is None:
        return
    shape = (head_dim,)
    if q_weight is None or k_weight is None or not q_weight.shape == k_weight.shape == shape:
        raise ValueError(f"q_weight and k_weight: give both, of shape ({head_dim},), or neither")


def _check_rope(rope, qkv):
    """Return cos and sin in float32, contiguous."""
    batch, length, _, head_dim = qkv.shape
    cos, sin = rope
    of_positions = length * head_dim // 2
    if cos.numel() != sin.numel() or cos.numel() not in (of_positions, batch * of_positions):
        raise ValueError(f"rope tables {tuple(cos.shape)}: ({length}, {head_dim // 2}) fit qkv")
    return cos.float().contiguous(), sin.float().contiguous()


def _setup_context(ctx, inputs, output):
    qkv, cos, sin, q_weight, k_weight, cu_seqlens, *options = inputs
    out, qk, lse = output
    ctx.save_for_backward(qkv, qk, out, lse, cos, sin, q_weight, k_weight, cu_seqlens)
    ctx.options = options  # n_head, n_kv_head, eps, window
    ctx.mark_non_differentiable(qk, lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dqk, dlse):
    # saved_tensors is read once: under checkpointing a second read fails
    qkv, qk, out, lse, cos, sin, q_weight, k_weight, cu_seqlens = ctx.saved_tensors
    dqkv, dq_weight, dk_weight = _attention_backward(
        dout.contiguous(), qkv, qk, out, lse, cos, sin, q_weight, k_weight, cu_seqlens, *ctx.options)
    if q_weight is None:
        dq_weight = dk_weight = None
    no_gradients = [None] * 5  # of cu_seqlens and the options
    return dqkv, None, None, dq_weight, dk_weight, *no_gradients


@operation(
    "(Tensor qkv, Tensor? cos, Tensor? sin, Tensor? q_weight, Tensor? k_weight, Tensor? cu_seqlens, "
    "int n_head, int n_kv_head, float eps, int? window) -> (Tensor out, Tensor qk, Tensor lse)",
    _setup_context, _differentiate)
def _attention(qkv, cos, sin, q_weight, k_weight, cu_seqlens, n_head, n_kv_head, eps, window):
    """Return the output (B, S, n_head, D), q and k after norm and rotation, and the log-sum-exp."""
    q, k, v = qkv.split_with_sizes((n_head, n_kv_head, n_kv_head), dim=2)
    if cos is None and q_weight is None:
        qk = qkv.new_empty(0)
    else:
        qk = _norm_rope(qkv, n_head, n_head + n_kv_head, cos, sin, q_weight, k_weight, eps)
        q, k = qk[:, :, :n_head], qk[:, :, n_head:]
    out, lse = _attend(q, k, v, cu_seqlens, window)
    return out, qk, lse


@operation(
    "(Tensor dout, Tensor qkv, Tensor qk, Tensor out, Tensor lse, Tensor? cos, Tensor? sin, "
    "Tensor? q_weight, Tensor? k_weight, Tensor? cu_seqlens, int n_head, int n_kv_head, float eps, "
    "int? window) -> (Tensor dqkv, Tensor dq_weight, Tensor dk_weight)")
def _attention_backward(dout, qkv, qk, out, lse, cos, sin, q_weight, k_weight, cu_seqlens, n_head, n_kv_head,
                        eps, window):
    q, k, v = qkv.split_with_sizes((n_head, n_kv_head, n_kv_head), dim=2)
    if cos is not None or q_weight is not None:
        q, k = qk[:, :, :n_head], qk[:, :, n_head:]
    dqkv = torch.empty_like(qkv)
    if not is_fake(qkv):
        _write_gradients(dqkv, dout, q, k, v, out, lse, cu_seqlens, window)
    dq_weight, dk_weight = _norm_rope_backward(
        qkv, dqkv, n_head, n_head + n_kv_head, cos, sin, q_weight, k_weight, eps)
    return dqkv, dq_weight, dk_weight


def attention(q, k, v, cu_seqlens=None):
    """Compute causal softmax(q · kᵀ / √D) · v, (B, S, n_head, D), of q (B, S, n_head, D) and k and v
    (B, S, n_kv_head, D), with the kernels of `packed_attention`; cu_seqlens as there."""
    out, _ = _separate_attention(q, k, v, cu_seqlens)
    return out


def _setup_separate(ctx, inputs, output):
    q, k, v, cu_seqlens = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, cu_seqlens, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate_separate(ctx, dout, dlse):
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    dout = dout.contiguous()
    if is_tracing():  # where q, k, v are parts of one tensor, Inductor drops this split and a concatenation
        dqkv = _separate_attention_backward(dout, q, k, v, cu_seqlens, out, lse)
        dq, dk, dv = dqkv.split((q.shape[2], k.shape[2], v.shape[2]), dim=2)
    else:
        dq, dk, dv = _new_gradients(dout, q, k, v, out, lse, cu_seqlens)
    return dq, dk, dv, None


@operation("(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens) -> (Tensor out, Tensor lse)",
           _setup_separate, _differentiate_separate)
def _separate_attention(q, k, v, cu_seqlens):
    return _attend(q, k, v, cu_seqlens, None)


@operation(
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor out, Tensor lse) -> Tensor")
def _separate_attention_backward(dout, q, k, v, cu_seqlens, out, lse):
    """Return the gradients of q, k and v in one tensor, (B, S, heads, D)."""
    batch, length, n_head, head_dim = q.shape
    dqkv = q.new_empty((batch, length, n_head + 2 * k.shape[2], head_dim))
    if not is_fake(q):
        _write_gradients(dqkv, dout, q, k, v, out, lse, cu_seqlens, None)
    return dqkv


# ---------------------------------------------------------------- attention, in four kernels
# q is (B, S, n_head, D), k and v are (B, S, n_kv_head, D); only the last dimension is contiguous.

def _pick_kernel(q, cu_seqlens, window):
    """Return the first of these that supports the inputs, the fastest first:

    - "fa4": FlashAttention 4, where it is installed; see `_fa4_supports`
    - "cudnn": on Hopper and Blackwell, nondeterministic; see `_cudnn_supports`
    - "flash": FlashAttention 2 in PyTorch, from Ampere on
    - "sdpa": everything else, such as float32 and the CPU
    """
    length, head_dim = q.shape[1], q.shape[3]
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if not q.is_cuda or not is_half or head_dim % 8 or head_dim > 256:
        return "sdpa"
    major, _ = torch.cuda.get_device_capability(q.get_device())
    if _fa4_supports(head_dim, major):
        return "fa4"
    if _cudnn_supports(length, head_dim, cu_seqlens, window, major):
        return "cudnn"
    return "flash" if major >= 8 else "sdpa"


def _fa4_supports(head_dim, major):
    """Return whether FlashAttention 4 is used. For heads of 16 its gradients are wrong without an error
    (version 4.0.0b36), for heads of 24 they are right. Its documentation also lists 256 on Blackwell,
    never run."""
    if fa4_forward is None or head_dim % 8 or not 24 <= head_dim <= 256:
        return False
    return major == 9 or (major in (10, 11, 12) and head_dim <= 128)


def _cudnn_supports(length, head_dim, cu_seqlens, window, major):
    if cu_seqlens is not None or window is not None:
        return False
    is_enabled = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    if not is_enabled or torch.are_deterministic_algorithms_enabled():
        return False
    return major in (9, 10) and head_dim <= 128 and length > 1


def _attend(q, k, v, cu_seqlens, window):
    """Return the output (B, S, n_head, D), and the log-sum-exp, float32, (B, n_head, S) or, with documents,
    (n_head, B·S). SDPA has none."""
    kernel = _pick_kernel(q, cu_seqlens, window)
    if not is_fake(q):
        return FORWARD[kernel](q, k, v, cu_seqlens, window)
    batch, length, heads, _ = q.shape
    lse_shape = (batch, heads, length) if cu_seqlens is None else (heads, batch * length)
    if kernel == "sdpa":
        lse_shape = (0,)
    return q.new_empty(q.shape), q.new_empty(lse_shape, dtype=torch.float32)


def _write_gradients(dqkv, dout, q, k, v, out, lse, cu_seqlens, window):
    """Write the gradients of q, k and v to the heads of dqkv."""
    kernel = _pick_kernel(q, cu_seqlens, window)
    if kernel == "fa4":
        slices = dqkv.split_with_sizes((q.shape[2], k.shape[2], v.shape[2]), dim=2)
        _backward_fa4(slices, dout, q, k, v, out, lse, cu_seqlens, window)
    else:
        gradients = BACKWARD[kernel](dout, q, k, v, out, lse, cu_seqlens, window)
        torch.cat(gradients, dim=2, out=dqkv)


def _new_gradients(dout, q, k, v, out, lse, cu_seqlens):
    """Return the gradients of q, k and v, each contiguous."""
    kernel = _pick_kernel(q, cu_seqlens, None)
    if kernel == "fa4":
        gradients = [q.new_empty(x.shape) for x in (q, k, v)]
        _backward_fa4(gradients, dout, q, k, v, out, lse, cu_seqlens, None)
        return gradients
    return [x.contiguous() for x in BACKWARD[kernel](dout, q, k, v, out, lse, cu_seqlens, None)]


# FlashAttention 4, which writes gradients to given tensors

def _forward_fa4(q, k, v, cu_seqlens, window):
    shape = q.shape
    options = _window_options(window)
    is_small = shape[1] <= 1024 and shape[3] <= 64
    if cu_seqlens is not None:
        options |= _varlen_options(q, cu_seqlens)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # each (B·S, heads, D)
    elif is_small and torch.cuda.get_device_capability(q.get_device())[0] == 9:
        # the default, 192 x 128, computes 50 % more than a causal mask of 1,024 tokens needs, not 12.5 %
        options |= dict(tile_mn=(128, 128))
    out, lse, *_ = fa4_forward(q, k, v, causal=True, return_lse=True, **options)
    return out.contiguous().view(shape), lse


def _backward_fa4(gradients, dout, q, k, v, out, lse, cu_seqlens, window):
    """Write the gradients of q, k and v to `gradients`."""
    dq, dk, dv = gradients
    options = _window_options(window)
    if cu_seqlens is not None:
        options |= _varlen_options(q, cu_seqlens)
        dq, dk, dv = (x.flatten(0, 1) for x in (dq, dk, dv))  # views
        dout, q, k, v, out = (x.flatten(0, 1) for x in (dout, q, k, v, out))
    fa4_backward(
        q, k, v, out, dout, lse, causal=True, dq=dq, dk=dk, dv=dv,
        deterministic=torch.are_deterministic_algorithms_enabled(), **options)


def _varlen_options(q, cu_seqlens):
    length = q.shape[1]  # an upper bound of a document's: the maximum would need a host synchronization
    return dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=length, max_seqlen_k=length)


def _window_options(window):
    if window is None:
        return {}
    return dict(window_size_left=window - 1, window_size_right=0)


# cuDNN's, without documents and window

def _forward_cudnn(q, k, v, cu_seqlens, window):
    batch, length, heads, _ = q.shape
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_bias=None, compute_log_sumexp=True,
        dropout_p=0.0, is_causal=True)
    return out.transpose(1, 2).contiguous(), lse.view(batch, heads, length)


def _backward_cudnn(dout, q, k, v, out, lse, cu_seqlens, window):
    length = q.shape[1]
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout; not read
    q, k, v, out, dout = (x.transpose(1, 2) for x in (q, k, v, out, dout))
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), philox_seed=seed, philox_offset=seed, attn_bias=None,
        cum_seq_q=None, cum_seq_k=None, max_q=length, max_k=length, dropout_p=0.0, is_causal=True)
    return [x.transpose(1, 2) for x in gradients]


# FlashAttention 2 in PyTorch

def _forward_flash(q, k, v, cu_seqlens, window):
    shape = q.shape
    length = shape[1]
    if cu_seqlens is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # each (B·S, heads, D)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, max_q=length, max_k=length, dropout_p=0.0, is_causal=True,
        return_debug_mask=False, **_window_options(window))
    return out.contiguous().view(shape), lse


def _backward_flash(dout, q, k, v, out, lse, cu_seqlens, window):
    shapes = q.shape, k.shape, v.shape
    length = q.shape[1]
    if cu_seqlens is not None:
        dout, q, k, v, out = (x.flatten(0, 1) for x in (dout, q, k, v, out))  # views
    seed = torch.empty(2, dtype=torch.int64, device=q.device)  # of dropout; not read
    gradients = aten._flash_attention_backward(
        dout, q, k, v, out, lse, cu_seqlens, cu_seqlens, max_q=length, max_k=length, dropout_p=0.0,
        is_causal=True, rng_state=seed, unused=seed, **_window_options(window))
    return [x.view(shape) for x, shape in zip(gradients, shapes)]


# SDPA of PyTorch, which computes the output again in the backward pass

def sdpa(q, k, v, cu_seqlens=None, window=None, dropout_p=0.0):
    """Return causal attention of q (B, S, heads, D) by PyTorch. k and v may have fewer heads."""
    shape = q.shape
    if cu_seqlens is not None:  # a document of the flattened batch
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    mask = None
    if cu_seqlens is not None or window is not None:
        mask = _sdpa_mask(q.shape[1], q.device, cu_seqlens, window)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2], dropout_p=dropout_p)
    return y.transpose(1, 2).contiguous().view(shape)


def _sdpa_mask(length, device, cu_seqlens, window):
    """Return which tokens (second dimension) a token attends to, (length, length) bool."""
    token = torch.arange(length, device=device, dtype=torch.int32)
    distance = token[:, None] - token[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens, token, right=True)
        mask &= document[:, None] == document[None, :]
    return mask


def _forward_sdpa(q, k, v, cu_seqlens, window):
    return sdpa(q, k, v, cu_seqlens, window), q.new_empty(0, dtype=torch.float32)


def _backward_sdpa(dout, q, k, v, out, lse, cu_seqlens, window):
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(sdpa(*inputs, cu_seqlens, window), inputs, dout)


FORWARD = {"fa4": _forward_fa4, "cudnn": _forward_cudnn, "flash": _forward_flash, "sdpa": _forward_sdpa}
# without FlashAttention 4: these return new tensors
BACKWARD = {"cudnn": _backward_cudnn, "flash": _backward_flash, "sdpa": _backward_sdpa}


# ---------------------------------------------------------------- QK-norm and RoPE
# A row is one head of one token. A tile is several rows in halves, x[:D/2] and x[D/2:].

def _norm_rope(qkv, n_head, qk_heads, cos, sin, q_weight, k_weight, eps):
    """Normalize and rotate the first `qk_heads` heads of qkv (B, S, all heads, D): (B, S, qk_heads, D)."""
    batch, length, _, head_dim = qkv.shape
    qk = qkv.new_empty(batch, length, qk_heads, head_dim)
    if not is_fake(qkv):
        sizes = qkv.shape, qkv.stride(1), _positions(qkv, cos), n_head, qk_heads
        _norm_rope_launch(*sizes, eps).run(qkv, qk, cos, sin, q_weight, k_weight)
    return qk


def _positions(qkv, cos):
    """Return the number of rows of cos and sin, S or B·S."""
    length, head_dim = qkv.shape[1], qkv.shape[3]
    return length if cos is None else cos.numel() // (head_dim // 2)


@per_shape
def _norm_rope_launch(qkv_shape, token_stride, positions, n_head, qk_heads, eps):
    tiles, options = _norm_rope_options(qkv_shape, token_stride, positions, n_head, qk_heads)
    return Launch(_norm_rope_kernel, (tiles,), eps=eps, **options)


@per_shape
def _norm_rope_backward_launch(qkv_shape, token_stride, positions, n_head, qk_heads, eps):
    tiles, options = _norm_rope_options(qkv_shape, token_stride, positions, n_head, qk_heads)
    return Launch(_norm_rope_backward_kernel, (min(tiles, PROGRAMS),), eps=eps, **options)


def _norm_rope_options(qkv_shape, token_stride, positions, n_head, qk_heads):
    """Return (tiles, launch parameters) of both kernels."""
    batch, length, _, head_dim = qkv_shape
    half = next_power_of_2(head_dim // 2)
    rows = batch * length * qk_heads
    tile_rows = max(TILE // half, 1)
    options = dict(
        rows=rows, positions=positions, n_head=n_head, qk_heads=qk_heads, token_stride=token_stride,
        D=head_dim, HALF=half, ROWS=tile_rows)
    return ceil_div(rows, tile_rows), options


def _norm_rope_backward(qkv, dqkv, n_head, qk_heads, cos, sin, q_weight, k_weight, eps):
    """Replace dqkv's first `qk_heads` heads, the gradient of `_norm_rope`'s output, by that of its input.
    Return the gradients of q_weight and k_weight, (0,) without them."""
    has_norm = q_weight is not None
    dq_weight = torch.empty_like(q_weight) if has_norm else qkv.new_empty(0)
    dk_weight = torch.empty_like(k_weight) if has_norm else qkv.new_empty(0)
    if is_fake(qkv) or (cos is None and not has_norm):
        return dq_weight, dk_weight
    sizes = qkv.shape, qkv.stride(1), _positions(qkv, cos), n_head, qk_heads
    launch = _norm_rope_backward_launch(*sizes, eps)
    partial_sums = None
    if has_norm:
        programs, = launch.grid
        partial_sums = qkv.new_empty(programs, 2, qkv.shape[3], dtype=torch.float32)
    launch.run(qkv, dqkv, cos, sin, q_weight, k_weight, partial_sums)
    if has_norm:
        of_q, of_k = partial_sums.sum(0)
        dq_weight.copy_(of_q)
        dk_weight.copy_(of_k)
    return dq_weight, dk_weight


@triton.jit
def _load_halves(x, offset, mask, D: tl.constexpr):
    a = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + offset + D // 2, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _load_weights(q_weight, k_weight, is_k, i, D: tl.constexpr):
    """Return each row's weight in halves: k_weight's where is_k, else q_weight's."""
    q_a, q_b = _load_halves(q_weight, i, i < D // 2, D)
    k_a, k_b = _load_halves(k_weight, i, i < D // 2, D)
    return tl.where(is_k, k_a[None, :], q_a[None, :]), tl.where(is_k, k_b[None, :], q_b[None, :])


@triton.jit
def _norm_rope_kernel(qkv, qk, cos, sin, q_weight, k_weight, rows, positions, n_head, qk_heads,
                      token_stride, eps, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Normalize and rotate one tile of q and k."""
    i = tl.arange(0, HALF)  # element of a half of a head
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // qk_heads, row % qk_heads
    mask = (row < rows)[:, None] & (i < D // 2)[None, :]
    offset = (token.to(tl.int64) * token_stride + head * D)[:, None] + i[None, :]
    a, b = _load_halves(qkv, offset, mask, D)
    if q_weight is not None:  # QK-norm
        w_a, w_b = _load_weights(q_weight, k_weight, (head >= n_head)[:, None], i, D)
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a, b = a * rstd * w_a, b * rstd * w_b
    if cos is not None:  # RoPE
        angle = (token % positions)[:, None] * (D // 2) + i[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        a, b = a * c - b * s, b * c + a * s
    out = qk + (row.to(tl.int64) * D)[:, None] + i[None, :]
    tl.store(out, a, mask=mask)
    tl.store(out + D // 2, b, mask=mask)


@triton.jit
def _norm_rope_backward_kernel(qkv, dqkv, cos, sin, q_weight, k_weight, partial_sums, rows, positions, n_head,
                               qk_heads, token_stride, eps, D: tl.constexpr, HALF: tl.constexpr,
                               ROWS: tl.constexpr):
    """Stride over the tiles of dq and dk. partial_sums (programs, 2, D): gradients of q_weight and k_weight.

    With x̂ = rstd · x and g = weight · dy: dweight = Σ dy · x̂, dx = rstd · (g - x̂ · mean(g · x̂))."""
    i = tl.arange(0, HALF)
    if q_weight is not None:  # this program's sums for dweight of q and of k, in halves
        dwq_a = tl.zeros((ROWS, HALF), tl.float32)
        dwq_b = tl.zeros((ROWS, HALF), tl.float32)
        dwk_a = tl.zeros((ROWS, HALF), tl.float32)
        dwk_b = tl.zeros((ROWS, HALF), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        token, head = row // qk_heads, row % qk_heads
        mask = (row < rows)[:, None] & (i < D // 2)[None, :]
        offset = (token.to(tl.int64) * token_stride + head * D)[:, None] + i[None, :]
        a, b = _load_halves(dqkv, offset, mask, D)
        if cos is not None:  # rotate back
            angle = (token % positions)[:, None] * (D // 2) + i[None, :]
            c = tl.load(cos + angle, mask=mask, other=0.0)
            s = tl.load(sin + angle, mask=mask, other=0.0)
            a, b = a * c + b * s, b * c - a * s
        if q_weight is not None:
            is_k = (head >= n_head)[:, None]
            w_a, w_b = _load_weights(q_weight, k_weight, is_k, i, D)
            x_a, x_b = _load_halves(qkv, offset, mask, D)
            # recomputed, not saved: x must be read for x̂ in any case
            rstd = tl.rsqrt((tl.sum(x_a * x_a, 1) + tl.sum(x_b * x_b, 1)) / D + eps)[:, None]
            x_a, x_b = x_a * rstd, x_b * rstd  # x̂
            # dweight += dy · x̂
            dwq_a += tl.where(is_k, 0.0, a * x_a)
            dwq_b += tl.where(is_k, 0.0, b * x_b)
            dwk_a += tl.where(is_k, a * x_a, 0.0)
            dwk_b += tl.where(is_k, b * x_b, 0.0)
            # dx = rstd · (g - x̂ · mean(g · x̂))
            a, b = a * w_a, b * w_b
            mean = ((tl.sum(a * x_a, 1) + tl.sum(b * x_b, 1)) / D)[:, None]
            a, b = (a - x_a * mean) * rstd, (b - x_b * mean) * rstd
        tl.store(dqkv + offset, a, mask=mask)
        tl.store(dqkv + offset + D // 2, b, mask=mask)
    if q_weight is not None:
        dw = partial_sums + tl.program_id(0) * 2 * D + i
        inside = i < D // 2
        tl.store(dw, tl.sum(dwq_a, 0), mask=inside)
        tl.store(dw + D // 2, tl.sum(dwq_b, 0), mask=inside)
        tl.store(dw + D, tl.sum(dwk_a, 0), mask=inside)
        tl.store(dw + D + D // 2, tl.sum(dwk_b, 0), mask=inside)
