"""LoRA beside a linear layer in FP8: y = x @ weightᵀ + scale · (x @ aᵀ) @ bᵀ, a (rank, in) and b (out, rank).

An adapter stays in BF16. Its input and its output's gradient are those of the layer's own GEMMs in FP8, which
are there rowwise and transposed. With N tokens and low = scale · x @ aᵀ, (N, rank):

    forward     low = narrow_gemm(x, a)            y = low @ bᵀ, to which the layer's GEMM adds x @ weightᵀ
    backward    dlow = narrow_gemm(dy, bᵀ)         dx = dlow @ a, to which the layer's GEMM adds dy @ weight
                da = narrow_gemm(xᵀ, dlowᵀ)ᵀ       db = narrow_gemm(dyᵀ, lowᵀ)

Computed, not measured, for a block of Llama-3-8B with 4,096 tokens and rank 16 on an H100:

- Memory: narrow_gemm reads 0.57 GB in FP8, and y and dx are written once more, 0.57 GB in BF16. At 3.2 TB/s
  this takes 0.36 ms. The GEMMs that add to y and dx read them while they compute.
- FLOPs: forward GEMMs and dgrad take 3.2 ms at 1.1 PFLOP/s. The adapters add 0.6 % to their FLOPs.
- Not done: append the rows of a to the layer's weight, which gives rank more columns of y. This saves the
  forward reads of x, 0.11 GB or 0.03 ms. But each of the four GEMMs computes one more tile of 256 columns,
  0.05 ms, and a gets the weight's scale, with which its values underflow or saturate if the amaxes differ.
"""

import torch
import triton
import triton.language as tl

from fast_kernels.casts import TRITON_TYPES
from fast_kernels.launch import Launch, per_shape
from fast_kernels.library import ceil_div, check_shape, is_fake, next_power_of_2, operation

MAX_RANK = 256  # a program has all ranks of w
ROWS = 32  # of x per program: 128 programs for 4,096 tokens, about one per SM
# COLUMNS of x and w per iteration. While one stage is computed, the loads of the others are in flight.
NARROW_TILE = dict(COLUMNS=256, num_stages=4, num_warps=4)  # rank up to 64: 24 KiB of x in flight
WIDE_TILE = dict(COLUMNS=64, num_stages=3, num_warps=4)  # above it 4 KiB; w takes most of the shared memory


def narrow_gemm_reference(x, scale_inv, w, factor=1.0):
    """`narrow_gemm` in float64."""
    return factor * scale_inv.double() * (x.double() @ w.double().T)


def narrow_gemm(x, scale_inv, w, factor=1.0, transposes=False):
    """Compute factor · (x · scale_inv) @ wᵀ, (N, rank) BF16, accumulated in float32.

    Args:
        x: (N, K) in FP8, contiguous.
        scale_inv: (1,) float32.
        w: (rank, K) BF16 of any strides; the rank is a multiple of 16 up to 256.
        factor: multiplies the result.
        transposes: return the transpose, (rank, N).

    Raises:
        ValueError: an argument of another shape or dtype.
    """
    if x.dim() != 2 or x.dtype not in TRITON_TYPES or not x.is_contiguous():
        raise ValueError(f"narrow_gemm: x {tuple(x.shape)} {x.dtype}: must be a contiguous matrix in FP8")
    check_shape("narrow_gemm", (1,), torch.float32, scale_inv=scale_inv)
    if w.dim() != 2 or w.shape[1] != x.shape[1]:
        raise ValueError(f"narrow_gemm: w {tuple(w.shape)}: must be (rank, {x.shape[1]}), as x has "
                         f"{x.shape[1]} columns")
    check_rank("narrow_gemm: w", w.shape[0])
    if w.dtype != torch.bfloat16:
        raise ValueError(f"narrow_gemm: w is {w.dtype}; it must be torch.bfloat16")
    return _narrow_gemm(x, scale_inv, w, factor, transposes)


def check_rank(name, rank):
    """Raise ValueError for a rank that `narrow_gemm` does not compute."""
    if rank % 16 or not 0 < rank <= MAX_RANK:
        raise ValueError(f"{name} has rank {rank}: must be a multiple of 16 up to {MAX_RANK}; 16 works")


@operation("(Tensor x, Tensor scale_inv, Tensor w, float factor, bool transposes) -> Tensor")
def _narrow_gemm(x, scale_inv, w, factor, transposes):
    rows, columns = x.shape
    rank = w.shape[0]
    out = torch.empty((rank, rows) if transposes else (rows, rank), dtype=torch.bfloat16, device=x.device)
    if is_fake(x):
        return out
    out_strides = out.stride() if not transposes else out.stride()[::-1]
    launch = _narrow_gemm_launch(rows, columns, rank, w.stride(), out_strides, float(factor), not x.is_cuda)
    launch.run(x, scale_inv, w, out)
    return out


@per_shape
def _narrow_gemm_launch(rows, columns, rank, w_strides, out_strides, factor, in_float32):
    w_rank_stride, w_column_stride = w_strides
    out_row_stride, out_rank_stride = out_strides
    tile = NARROW_TILE if rank <= 64 else WIDE_TILE
    return Launch(
        _narrow_gemm_kernel, (ceil_div(rows, ROWS),), N=rows, K=columns, W_RANK_STRIDE=w_rank_stride,
        W_COLUMN_STRIDE=w_column_stride, OUT_ROW_STRIDE=out_row_stride, OUT_RANK_STRIDE=out_rank_stride,
        FACTOR=factor, RANK=rank, PADDED_RANK=next_power_of_2(rank), ROWS=ROWS, IN_FLOAT32=in_float32, **tile)


@triton.jit
def _narrow_gemm_kernel(
        x_ptr, scale_inv_ptr, w_ptr, out_ptr, N, K, W_RANK_STRIDE, W_COLUMN_STRIDE, OUT_ROW_STRIDE,
        OUT_RANK_STRIDE, FACTOR: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """Each program computes ROWS rows of the output. PADDED_RANK: RANK, rounded up to a power of 2."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, PADDED_RANK)
    total = tl.zeros((ROWS, PADDED_RANK), tl.float32)
    for start in range(0, K, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + rows[:, None] * K + columns[None, :],
                    mask=(rows[:, None] < N) & (columns[None, :] < K), other=0.0)
        w = tl.load(w_ptr + columns[:, None].to(tl.int64) * W_COLUMN_STRIDE + ranks[None, :] * W_RANK_STRIDE,
                    mask=(columns[:, None] < K) & (ranks[None, :] < RANK), other=0.0)
        if IN_FLOAT32:  # Triton's interpreter calculates wrongly with BF16
            total += tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(x.to(tl.bfloat16), w)  # FP8 values are BF16 values
    total *= tl.load(scale_inv_ptr) * FACTOR
    tl.store(out_ptr + rows[:, None] * OUT_ROW_STRIDE + ranks[None, :] * OUT_RANK_STRIDE,
             total.to(out_ptr.dtype.element_ty), mask=(rows[:, None] < N) & (ranks[None, :] < RANK))
