"""Cross-entropy of a GPT's logits and its gradient, each in one pass over memory; for an FP8 output head, the
gradient is written in FP8.

Use `cross_entropy` in place of `F.cross_entropy` where nothing else reads the logits. They are the largest
tensor of a training step (32,768 tokens x 50,304 vocabulary entries in BF16: 3.3 GB), and the kernels are
bound by memory.

- Forward reads the logits once (online softmax) and saves each row's log-sum-exp.
- Backward computes softmax - onehot and overwrites the logits with it: no second tensor of that size.
- FP8 GEMMs need the gradient in FP8, rowwise for dgrad and transposed for wgrad. Transformer Engine (TE)
  reads a BF16 gradient again to cast and transpose it. Here the backward kernel quantizes the values in its
  registers and returns a `Float8Tensor`: 4 bytes moved per logit instead of 8. It rounds to BF16 first, as
  TE's path does, and raises the same amax, so that data, scales and training are bit for bit TE's.
- On request FP8 rounding is stochastic. To nearest, a probability that many tokens share is moved by the same
  amount in all of them, and the error does not average out over a batch (guide/evidence.md).
- No host synchronization: it can be captured in a CUDA graph.

References: online softmax (Milakov and Gimelshein 2018); delayed scaling (Micikevicius et al. 2022, and TE's
`DelayedScaling`).
"""

import torch
import triton
import triton.language as tl

from fast_kernels import casts, support

# Launch parameters: 16 logits per thread, two 16-byte loads in BF16; for FP8 a tile with 32 logits per
# thread. The fastest of those tried on an H200.
FORWARD = dict(BLOCK=2048, num_warps=4)
BACKWARD = dict(BLOCK=2048, num_warps=4)
BACKWARD_FP8 = dict(ROWS=128, COLUMNS=64, num_warps=8)
IGNORE_INDEX = tl.constexpr(-100)


@torch.compiler.disable  # backward overwrites an input, which a compiled graph cannot express
def cross_entropy(logits, labels, head=None, rounding="nearest"):
    """Compute the mean cross-entropy over the labels that are not -100, () float32; 0 if all are -100.

    Args:
        logits: (N, V) BF16 or float32, contiguous. Backward may overwrite them: do not use them afterwards.
        labels: (N,) int64.
        head: the `te.LayerNormLinear` that computed `logits`. If it runs in FP8 under delayed scaling, its
            backward pass gets the gradient in FP8. Then use the logits for nothing else: autograd would sum
            two gradients of them dequantized.
        rounding: of that gradient. "nearest", as in Transformer Engine; "stochastic": to one of the two FP8
            neighbors, with the probabilities that make the mean exact.

    Raises:
        ValueError: shapes or dtypes do not fit, or rounding is unknown.
        RuntimeError: in a second backward pass.
    """
    dtype_fits = logits.dtype in (torch.bfloat16, torch.float32)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding={rounding!r}: must be nearest or stochastic")
    if logits.dim() != 2 or not logits.is_contiguous() or not dtype_fits or not logits.numel():
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}: (N, V), contiguous, bfloat16 or "
                         "float32, and not empty, is needed")
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"labels {tuple(labels.shape)} {labels.dtype}: ({logits.shape[0]},) int64 is "
                         "needed, one for each row of logits")
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        quantizer = gradient_quantizer(logits, head)
        return _CrossEntropy.apply(logits, labels.contiguous(), quantizer, rounding)


def gradient_quantizer(logits, head):
    """Return the quantizer of `logits`' gradient in `head`'s backward pass; None where the gradient must be
    BF16."""
    node = logits.grad_fn  # the ctx of TE's backward pass, if TE computed the logits
    quantizer = getattr(node, "grad_output_quantizer", None)  # None in BF16
    if head is None or quantizer is None or quantizer is not head.quantizers["scaling_bwd"][0]:
        return None  # the logits are not the unchanged output of an FP8 head
    if support.environment_reason():
        support.warn_once(support.environment_reason())
        return None
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    if not isinstance(quantizer, Float8Quantizer):
        return None  # not delayed scaling
    if node.use_bias or node.debug or logits._backward_hooks or logits.retains_grad:
        # dbias, TE's debug tools and hooks need the values in BF16
        return None
    if logits.shape[0] % 16 or logits.shape[1] % 16:
        return None
    return quantizer


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, quantizer, rounding):
        rows, vocab_size = logits.shape
        losses, lse = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
        _forward_kernel[(rows,)](logits, labels, losses, lse, vocab_size, **FORWARD)
        count = (labels != IGNORE_INDEX.value).sum().clamp(min=1)
        ctx.save_for_backward(logits.detach(), labels, lse, count)
        ctx.quantizer, ctx.rounding, ctx.did_backward = quantizer, rounding, False
        return losses.sum() / count

    @staticmethod
    def backward(ctx, grad_loss):
        if ctx.did_backward:
            raise RuntimeError("fast_kernels.loss.cross_entropy: a second backward pass, but the first one "
                               "overwrote the logits with their gradient")
        ctx.did_backward = True
        logits, labels, lse, count = ctx.saved_tensors
        factor = (grad_loss / count).float()
        if ctx.quantizer is not None:
            gradient = gradient_fp8(logits, labels, lse, factor, ctx.quantizer, ctx.rounding)
            return gradient, None, None, None
        rows, vocab_size = logits.shape
        _backward_kernel[(rows * triton.cdiv(vocab_size, BACKWARD["BLOCK"]),)](
            logits, labels, lse, factor, vocab_size, **BACKWARD
        )
        # makes autograd raise an error where another function saved the logits for its backward pass
        torch.autograd.graph.increment_version(logits)
        return logits, None, None, None


def gradient_fp8(logits, labels, lse, factor, quantizer, rounding="nearest"):
    """Compute (softmax(logits) - onehot) · factor as a `Float8Tensor` (N, V) with its transpose.

    Raises `quantizer.amax`. Rounded to nearest, it equals `quantizer(gradient)` for that gradient in BF16.

    Args:
        labels: (N,) int64.
        lse: (N,) float32, each row's log-sum-exp.
        factor: () float32.
    """
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    rowwise, columnwise = cast_gradient(
        logits, labels, lse, factor, quantizer.scale, quantizer.amax, TE_DType_To_Torch[quantizer.dtype],
        rounding,
    )
    # TE's backward pass reshapes the gradient to 2-D, which it already is; its `reshape` then gives the
    # transposed copy the shape (N, V). This is harmless: GEMMs use the shape of the rowwise copy.
    return Float8Tensor(
        shape=logits.shape,
        dtype=logits.dtype,
        data=rowwise,
        data_transpose=columnwise,
        fp8_dtype=quantizer.dtype,
        # computed now, since TE updates the scale at the end of this backward pass
        fp8_scale_inv=quantizer.scale.reciprocal().reshape(1),
        quantizer=quantizer,
        device=logits.device,
    )


def cast_gradient(logits, labels, lse, factor, scale, amax, fp8, rounding="nearest"):
    """Compute the gradient times `scale` in the FP8 type `fp8`; return data (N, V) and its transpose, uint8.

    scale, amax: (1,) float32; amax is raised to the gradient's largest magnitude.
    """
    rows, vocab_size = logits.shape
    rowwise = torch.empty((rows, vocab_size), dtype=torch.uint8, device=logits.device)
    columnwise = torch.empty((vocab_size, rows), dtype=torch.uint8, device=logits.device)
    tiles = triton.cdiv(rows, BACKWARD_FP8["ROWS"]) * triton.cdiv(vocab_size, BACKWARD_FP8["COLUMNS"])
    _backward_fp8_kernel[(tiles,)](
        logits, labels, lse, factor, scale, amax, rowwise.view(fp8), columnwise.view(fp8), rows, vocab_size,
        STOCHASTIC=rounding == "stochastic", **BACKWARD_FP8,
    )
    return rowwise, columnwise


@triton.jit
def _forward_kernel(logits_ptr, labels_ptr, losses_ptr, lse_ptr, V, BLOCK: tl.constexpr):
    """Compute loss and log-sum-exp of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    offsets = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    target = tl.load(logits_ptr + label, mask=(label >= 0) & (label < V), other=float("-inf")).to(tl.float32)
    maximum = -3.4e38  # finite: a block of nothing but -inf must not give inf - inf
    # one partial sum per element of a block: only the maximum needs a reduction in every iteration
    sums = tl.zeros([BLOCK], tl.float32)
    prefetched = tl.load(logits_ptr + offsets, mask=offsets < V, other=float("-inf"))
    for start in range(0, V, BLOCK):
        x = prefetched.to(tl.float32)
        columns = start + BLOCK + offsets
        prefetched = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(x))
        sums = sums * tl.exp(maximum - new_maximum) + tl.exp(x - new_maximum)
        maximum = new_maximum
    log_sum = tl.log(tl.sum(sums))
    tl.store(lse_ptr + row, maximum + log_sum)
    tl.store(losses_ptr + row, tl.where(label == IGNORE_INDEX, 0.0, maximum - target + log_sum))


@triton.jit
def _gradient(x, label, lse, columns, factor):
    """Return (softmax - onehot) · factor in float32; 0 in ignored rows."""
    # 1.44 = log2(e). tl.exp takes three more instructions, for results below 2^-126.
    p = tl.exp2((x.to(tl.float32) - lse) * 1.4426950409)
    gradient = tl.where(columns == label, p - 1.0, p) * factor
    return tl.where(label == IGNORE_INDEX, 0.0, gradient)


@triton.jit
def _backward_kernel(logits_ptr, labels_ptr, lse_ptr, factor_ptr, V, BLOCK: tl.constexpr):
    """Replace one block of one row of the logits by its gradient."""
    blocks = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row * V
    x = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf"))
    label = tl.load(labels_ptr + row).to(tl.int32)
    gradient = _gradient(x, label, tl.load(lse_ptr + row), columns, tl.load(factor_ptr))
    tl.store(logits_ptr + columns, gradient.to(x.dtype), mask=columns < V)


@triton.jit
def _backward_fp8_kernel(logits_ptr, labels_ptr, lse_ptr, factor_ptr, scale_ptr, amax_ptr, rowwise_ptr,
                         columnwise_ptr, N, V, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr):
    """Compute one tile (ROWS, COLUMNS) of the gradient; store it in FP8, rowwise and transposed."""
    tile_columns = tl.cdiv(V, COLUMNS)
    first_row, first_column = (
        tl.program_id(0) // tile_columns * ROWS, tl.program_id(0) % tile_columns * COLUMNS)
    # offsets inside the tile: only the tile's own offset needs 64 bits
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    rows, columns, factor = first_row + 4 * i, first_column + j, tl.load(factor_ptr)
    mask = (first_row // 4 + i < N // 4)[:, None] & (columns < V)[None, :]
    x = casts.load_rows(
        logits_ptr + first_row.to(tl.int64) * V + first_column + 4 * i[:, None] * V + j[None, :], V, mask,
        float("-inf"),
    )
    a = _rounded_gradient(x[0], labels_ptr, lse_ptr, rows, columns, factor, N)
    b = _rounded_gradient(x[1], labels_ptr, lse_ptr, rows + 1, columns, factor, N)
    c = _rounded_gradient(x[2], labels_ptr, lse_ptr, rows + 2, columns, factor, N)
    d = _rounded_gradient(x[3], labels_ptr, lse_ptr, rows + 3, columns, factor, N)
    tl.atomic_max(amax_ptr, tl.max(casts.abs_max(a, b, c, d, ROWS, COLUMNS)), sem="relaxed")
    scale = tl.load(scale_ptr)
    if STOCHASTIC:
        fp8: tl.constexpr = rowwise_ptr.dtype.element_ty
        bits = _random_bits(lse_ptr, rows, columns, N)
        # each row has its own bits in the high places, which decide
        a = _round_stochastically(a * scale, bits, fp8)
        b = _round_stochastically(b * scale, bits << 24 | bits >> 8, fp8)
        c = _round_stochastically(c * scale, bits << 16 | bits >> 16, fp8)
        d = _round_stochastically(d * scale, bits << 8 | bits >> 24, fp8)
        scale = 1.0
    casts.store_fp8(
        a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, V, mask, ROWS, COLUMNS
    )


@triton.jit
def _random_bits(lse_ptr, rows, columns, N):
    """Return 32 random bits for every fourth row and each column: a hash of row, column and log-sum-exp,
    which differs from step to step. So nothing has to be kept, and a run that resumes draws the same bits."""
    lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0).to(tl.uint32, bitcast=True)
    bits = (lse ^ _hash(rows.to(tl.uint32)))[:, None] ^ (columns.to(tl.uint32) * 0x9E3779B9)[None, :]
    return _hash(bits)


@triton.jit
def _hash(x):
    """Mix 32 bits; the constants of lowbias32 (Wellons 2018)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_stochastically(x, bits, FP8: tl.constexpr):
    """Round x to one of its two neighbors in FP8, in float32: random low bits are added to its significand,
    and what FP8 cannot hold is cut off. A value that FP8 holds stays; the cast that follows saturates."""
    if FP8 == tl.float8e5:  # values below its normal range are 2^-30 of the largest, and rounded to nearest
        return _cut_off(x, bits, 21)
    # Subnormal values of E4M3 have the spacing of the smallest normal ones: move them there and back.
    shift = tl.where(tl.abs(x) < 2.0**-6, tl.where(x < 0.0, -(2.0**-6), 2.0**-6), 0.0)
    return _cut_off(x + shift, bits, 20) - shift


@triton.jit
def _cut_off(x, bits, DROPPED: tl.constexpr):
    """Drop low bits of float32's significand, after random ones were added."""
    rounded = x.to(tl.uint32, bitcast=True) + (bits >> (32 - DROPPED))
    rounded = (rounded >> DROPPED << DROPPED).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # a GPU's NaN has all bits set: the sum would overflow to -0


@triton.jit
def _rounded_gradient(x, labels_ptr, lse_ptr, rows, columns, factor, N):
    """Return the gradient of `rows`, every fourth row, rounded to the logits' dtype as in `_backward_kernel`.
    """
    label = tl.load(labels_ptr + rows, mask=rows < N, other=IGNORE_INDEX).to(tl.int32)
    lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
    gradient = _gradient(x, label[:, None], lse[:, None], columns[None, :], factor)
    return casts.widen(casts.round_bf16(gradient)) if x.dtype == tl.bfloat16 else gradient
