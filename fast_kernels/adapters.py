"""LoRA beside a linear layer in FP8: y = x @ weightᵀ + scale · (x @ aᵀ) @ bᵀ, a (rank, in) and b (out, rank).

An adapter stays in BF16. Its input and its output's gradient are those of the layer's own GEMMs in FP8, which
are there rowwise and transposed. With N tokens and low = scale · x @ aᵀ, (N, rank):

    forward     low = narrow_gemm(x, a)            y = low @ bᵀ, to which the layer's GEMM adds x @ weightᵀ
    backward    dlow = narrow_gemm(dy, bᵀ)         dx = dlow @ a, to which the layer's GEMM adds dy @ weight
                da = narrow_gemm(xᵀ, dlowᵀ)ᵀ       db = narrow_gemm(dyᵀ, lowᵀ)

What that costs by arithmetic, in a block of Llama-3-8B with 4,096 tokens and rank 16 on an H100: narrow_gemm
reads 0.57 GB in FP8, and y and dx are written once more, 0.57 GB in BF16. The GEMMs that add to them read
them while they compute. At 3.2 TB/s this is 0.36 ms, beside 3.2 ms of forward GEMMs and dgrad at 1.1 PFLOP/s.
The adapters' own FLOPs are 0.6 % of theirs.

Rows of a could instead be further rows of the layer's weight. That saves the forward reads of x, 0.11 GB or
0.03 ms, but each of the four GEMMs computes another tile of 256 columns for them, 0.05 ms, and its output has
rows that no kernel here reads. They would share the weight's scale, which flushes or saturates values of a
where the amaxes differ. The backward pass has no such way: dlow depends on dy.
"""

import torch
import triton
import triton.language as tl

from fast_kernels.launch import launch
from fast_kernels.library import ceil_div, is_fake, next_power_of_2, operation

MAX_RANK = 256
ROWS = 32  # of x per program: 128 programs for 4,096 tokens, about one per SM
# COLUMNS of x and w per iteration. The loads of all stages but one are in flight: of x 24 KiB and 4 KiB
NARROW_TILE = dict(COLUMNS=256, num_stages=4, num_warps=4)  # rank up to 64
WIDE_TILE = dict(COLUMNS=64, num_stages=3, num_warps=4)  # w takes most of the shared memory


def narrow_gemm_reference(x, scale_inv, w, factor=1.0):
    """`narrow_gemm` in float64."""
    return factor * scale_inv.double() * (x.double() @ w.double().T)


def narrow_gemm(x, scale_inv, w, factor=1.0, transposes=False):
    """Compute factor · (x · scale_inv) @ wᵀ, (N, R) BF16, accumulated in float32.

    Args:
        x: (N, K) in FP8, contiguous.
        scale_inv: (1,) float32.
        w: (R, K) BF16 of any strides, R a multiple of 16 up to 256.
        transposes: return the transpose, (R, N).
    """
    rank = w.shape[0]
    fits = x.dim() == 2 and w.dim() == 2 and w.shape[1] == x.shape[1]
    if not fits or rank % 16 or not 0 < rank <= MAX_RANK or x.itemsize != 1 or not x.is_contiguous():
        raise ValueError(f"fast_kernels.adapters: x {tuple(x.shape)} {x.dtype}, w {tuple(w.shape)}: must be "
                         f"(N, K) in FP8, contiguous, and (R, K), R a multiple of 16 up to {MAX_RANK}")
    if w.dtype != torch.bfloat16:
        raise ValueError(f"fast_kernels.adapters: w is {w.dtype}; it must be torch.bfloat16")
    return _narrow_gemm(x, scale_inv, w, factor, transposes)


@operation("(Tensor x, Tensor scale_inv, Tensor w, float factor, bool transposes) -> Tensor")
def _narrow_gemm(x, scale_inv, w, factor, transposes):
    rows, columns = x.shape
    rank = w.shape[0]
    out = torch.empty((rank, rows) if transposes else (rows, rank), dtype=torch.bfloat16, device=x.device)
    if is_fake(x):
        return out
    strides = out.stride() if not transposes else out.stride()[::-1]
    tile = NARROW_TILE if rank <= 64 else WIDE_TILE
    launch(
        _narrow_gemm_kernel, (ceil_div(rows, ROWS),),
        x, scale_inv, w, out, rows, columns, *w.stride(), *strides, FACTOR=float(factor), R=rank,
        RANK=next_power_of_2(rank), ROWS=ROWS, IN_FLOAT32=not x.is_cuda, **tile)
    return out


@triton.jit
def _narrow_gemm_kernel(
        x_ptr, scale_inv_ptr, w_ptr, out_ptr, N, K, W_RANK_STRIDE, W_STRIDE, OUT_STRIDE, OUT_RANK_STRIDE,
        FACTOR: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
        COLUMNS: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """Each program computes ROWS rows of the output. RANK: R, rounded up to a power of 2."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, RANK)
    total = tl.zeros((ROWS, RANK), tl.float32)
    for start in range(0, K, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + rows[:, None] * K + columns[None, :],
                    mask=(rows[:, None] < N) & (columns[None, :] < K), other=0.0)
        w = tl.load(w_ptr + columns[:, None].to(tl.int64) * W_STRIDE + ranks[None, :] * W_RANK_STRIDE,
                    mask=(columns[:, None] < K) & (ranks[None, :] < R), other=0.0)
        if IN_FLOAT32:  # Triton's interpreter calculates wrongly with BF16
            total += tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(x.to(tl.bfloat16), w)  # FP8 values are BF16 values
    total *= tl.load(scale_inv_ptr) * FACTOR
    tl.store(out_ptr + rows[:, None] * OUT_STRIDE + ranks[None, :] * OUT_RANK_STRIDE,
             total.to(out_ptr.dtype.element_ty), mask=(rows[:, None] < N) & (ranks[None, :] < R))
