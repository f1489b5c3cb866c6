"""Cross-entropy of a GPT's logits, and its gradient, each in one pass over memory; for an FP8 output head the
gradient is born in FP8.

The logits are the largest tensor of a training step (32,768 tokens x 50,304 words in BF16: 3.3 GB), and the
arithmetic on them is trivial: all that counts is how often they move. What is notable:

- Forward reads the logits once (online softmax: maximum and sum are corrected as the row is read) and keeps a
  log-sum-exp for each row.
- Backward computes softmax - onehot from that and writes the gradient over the logits: no second tensor of
  that size.
- An FP8 matrix product needs the gradient in FP8, by rows for the input's gradient and by columns for the
  weight's. Given a BF16 gradient, Transformer Engine (TE) reads it again, casts and transposes. Here the
  backward kernel does so while it has the values in registers, and hands over a finished `Float8Tensor`: 4
  bytes moved for each logit instead of 8. It goes through BF16 on the way and rounds as TE does, and it
  reports the largest value to the same amax history, so bytes, scales and training are those of the long way
  round.
- No host synchronisation: everything runs inside a CUDA graph.

References: online softmax (Milakov and Gimelshein 2018), delayed scaling (Micikevicius et al. 2022, and TE's
`DelayedScaling`).
"""

import torch
import triton
import triton.language as tl

from fast_kernels import casts as fast_casts
from fast_kernels import support as fast_support

# What a program holds at a time: 16 logits a thread, two loads of 16 bytes in BF16; for FP8 a tile, of which
# a thread has 32. Chosen by trying sizes on an H200; another GPU may like others.
FORWARD = dict(BLOCK=2048, num_warps=4)
BACKWARD = dict(BLOCK=2048, num_warps=4)
BACKWARD_FP8 = dict(ROWS=128, COLUMNS=64, num_warps=8)
IGNORE = tl.constexpr(-100)


@torch.compiler.disable  # backward writes over an input, which a compiled graph cannot express
def cross_entropy(logits, labels, head=None):
    """Mean cross-entropy over the labels that are not -100 (0 if all are), in float32: (N, V), (N,) -> ().

    logits: (N, V) BF16 or float32, contiguous. Backward may overwrite them: do not use them afterwards, and
    go backward once. labels: (N,) int64. head: the `te.LayerNormLinear` that `logits` came out of; if it runs
    in FP8 under delayed scaling, its backward pass gets the gradient in FP8. Use the logits for nothing else
    then: gradients that meet there are added up dequantised. ValueError: shapes or types that do not fit.
    RuntimeError: a second backward pass.
    """
    if (
        logits.dim() != 2
        or not logits.is_contiguous()
        or logits.dtype not in (torch.bfloat16, torch.float32)
        or not logits.numel()
    ):
        raise ValueError(
            f"logits {tuple(logits.shape)} {logits.dtype}: (N, V), contiguous, bfloat16 or float32, and not empty, is needed"
        )
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"labels {tuple(labels.shape)} {labels.dtype}: ({logits.shape[0]},) int64 is needed, one for each row of logits"
        )
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        return _CrossEntropy.apply(logits, labels.contiguous(), gradient_quantizer(logits, head))


def gradient_quantizer(logits, head):
    """The quantizer with which `head`'s backward pass would cast the gradient of `logits`, if that cast can
    be done here; else None."""
    node = logits.grad_fn  # if TE made the logits: the ctx that its backward pass will get
    quantizer = getattr(node, "grad_output_quantizer", None)  # none in BF16
    if head is None or quantizer is None or quantizer is not head.quantizers["scaling_bwd"][0]:
        return None  # the logits are not, or not straight, what an FP8 head put out
    if fast_support.environment_reason():
        fast_support.say_once(fast_support.environment_reason())
        return None
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    if not isinstance(quantizer, Float8Quantizer):
        return None  # another recipe than delayed scaling
    if node.use_bias or node.debug or logits._backward_hooks or logits.retains_grad:
        # someone wants to see the values themselves: for a bias's gradient, TE's debugging tools, a hook
        return None
    if logits.shape[0] % 16 or logits.shape[1] % 16:
        return None
    return quantizer


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, quantizer):
        rows, vocab_size = logits.shape
        losses, lse = torch.empty((2, rows), dtype=torch.float32, device=logits.device)
        _forward_kernel[(rows,)](logits, labels, losses, lse, vocab_size, **FORWARD)
        count = (labels != IGNORE.value).sum().clamp(min=1)
        ctx.save_for_backward(logits.detach(), labels, lse, count)
        ctx.quantizer, ctx.did_backward = quantizer, False
        return losses.sum() / count

    @staticmethod
    def backward(ctx, grad_loss):
        if ctx.did_backward:
            raise RuntimeError(
                "fast_loss.cross_entropy: a second backward pass, but the first one wrote its gradient over the logits"
            )
        ctx.did_backward = True
        logits, labels, lse, count = ctx.saved_tensors
        factor = (grad_loss / count).float()
        if ctx.quantizer is not None:
            return gradient_fp8(logits, labels, lse, factor, ctx.quantizer), None, None
        rows, vocab_size = logits.shape
        _backward_kernel[(rows * triton.cdiv(vocab_size, BACKWARD["BLOCK"]),)](
            logits, labels, lse, factor, vocab_size, **BACKWARD
        )
        # whoever else kept the logits for backward gets an error, not nonsense
        torch.autograd.graph.increment_version(logits)
        return logits, None, None


def gradient_fp8(logits, labels, lse, factor, quantizer):
    """`quantizer(gradient)` without the gradient: (softmax(logits) - onehot) · factor -> (N, V)
    `Float8Tensor` with both layouts.

    labels (N,) int64, lse (N,) float32: each row's log-sum-exp, factor () float32. Takes the amax up into
    `quantizer.amax`.
    """
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    by_rows, by_columns = cast_gradient(
        logits, labels, lse, factor, quantizer.scale, quantizer.amax, TE_DType_To_Torch[quantizer.dtype]
    )
    # TE's backward pass reshapes the gradient to 2-D, which it is already; its `reshape` then misnames the
    # transposed copy's shape (N, V). That does no harm: matrix products take the shape from the copy by rows.
    return Float8Tensor(
        shape=logits.shape,
        dtype=logits.dtype,
        data=by_rows,
        data_transpose=by_columns,
        fp8_dtype=quantizer.dtype,
        # now: the scale moves at the end of this backward pass
        fp8_scale_inv=quantizer.scale.reciprocal().reshape(1),
        quantizer=quantizer,
        device=logits.device,
    )


def cast_gradient(logits, labels, lse, factor, scale, amax, fp8):
    """The gradient times `scale` in the torch type `fp8`: bytes (N, V) and, transposed, (V, N), uint8. scale,
    amax: one float32; amax grows."""
    rows, vocab_size = logits.shape
    by_rows, by_columns = (
        torch.empty(shape, dtype=torch.uint8, device=logits.device)
        for shape in ((rows, vocab_size), (vocab_size, rows))
    )
    tiles = triton.cdiv(rows, BACKWARD_FP8["ROWS"]) * triton.cdiv(vocab_size, BACKWARD_FP8["COLUMNS"])
    _backward_fp8_kernel[(tiles,)](
        logits, labels, lse, factor, scale, amax, by_rows.view(fp8), by_columns.view(fp8), rows, vocab_size,
        **BACKWARD_FP8,
    )
    return by_rows, by_columns


@triton.jit
def _forward_kernel(logits_ptr, labels_ptr, losses_ptr, lse_ptr, V, BLOCK: tl.constexpr):
    """One row: loss and log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    offsets = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    target = tl.load(logits_ptr + label, mask=(label >= 0) & (label < V), other=float("-inf")).to(tl.float32)
    maximum = -3.4e38  # finite: a block of nothing but -inf must not give inf - inf
    # as many as elements in a block, added up at the end: only the maximum needs all threads each time
    sums = tl.zeros([BLOCK], tl.float32)
    ahead = tl.load(logits_ptr + offsets, mask=offsets < V, other=float("-inf"))
    for start in range(0, V, BLOCK):
        x = ahead.to(tl.float32)
        columns = start + BLOCK + offsets  # the next block is under way while this one is summed up
        ahead = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(x))
        sums = sums * tl.exp(maximum - new_maximum) + tl.exp(x - new_maximum)
        maximum = new_maximum
    log_sum = tl.log(tl.sum(sums))
    tl.store(lse_ptr + row, maximum + log_sum)
    tl.store(losses_ptr + row, tl.where(label == IGNORE, 0.0, maximum - target + log_sum))


@triton.jit
def _gradient(x, label, lse, columns, factor):
    """(softmax - onehot) · factor, 0 in ignored rows, float32."""
    # log2(e): tl.exp spends three instructions more, on results below 2^-126
    p = tl.exp2((x.to(tl.float32) - lse) * 1.4426950409)
    gradient = tl.where(columns == label, p - 1.0, p) * factor
    return tl.where(label == IGNORE, 0.0, gradient)


@triton.jit
def _backward_kernel(logits_ptr, labels_ptr, lse_ptr, factor_ptr, V, BLOCK: tl.constexpr):
    """One block of one row, in place."""
    blocks = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row * V
    x = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf"))
    label = tl.load(labels_ptr + row).to(tl.int32)
    gradient = _gradient(x, label, tl.load(lse_ptr + row), columns, tl.load(factor_ptr))
    tl.store(logits_ptr + columns, gradient.to(x.dtype), mask=columns < V)


@triton.jit
def _backward_fp8_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    factor_ptr,
    scale_ptr,
    amax_ptr,
    by_rows_ptr,
    by_columns_ptr,
    N,
    V,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile (ROWS, COLUMNS): written as it is and transposed, its largest value taken up into amax."""
    tiles = tl.cdiv(V, COLUMNS)
    first_row, first_column = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles * COLUMNS
    # inside the tile, so that only the tile's own place needs 64 bits
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    rows, columns, factor = first_row + 4 * i, first_column + j, tl.load(factor_ptr)
    mask = (first_row // 4 + i < N // 4)[:, None] & (columns < V)[None, :]
    x = fast_casts.load_rows(
        logits_ptr + first_row.to(tl.int64) * V + first_column + 4 * i[:, None] * V + j[None, :], V, mask,
        float("-inf"),
    )
    a = _rounded_gradient(x[0], labels_ptr, lse_ptr, rows, columns, factor, N)
    b = _rounded_gradient(x[1], labels_ptr, lse_ptr, rows + 1, columns, factor, N)
    c = _rounded_gradient(x[2], labels_ptr, lse_ptr, rows + 2, columns, factor, N)
    d = _rounded_gradient(x[3], labels_ptr, lse_ptr, rows + 3, columns, factor, N)
    tl.atomic_max(amax_ptr, tl.max(fast_casts.largest_of(a, b, c, d, ROWS, COLUMNS)), sem="relaxed")
    fast_casts.store_fp8(
        a, b, c, d, tl.load(scale_ptr), by_rows_ptr, by_columns_ptr, first_row, first_column, N, V, mask,
        ROWS, COLUMNS,
    )


@triton.jit
def _rounded_gradient(x, labels_ptr, lse_ptr, rows, columns, factor, N):
    """Of one row in four, rounded to the logits' type: the values that the kernel for BF16 writes."""
    label = tl.load(labels_ptr + rows, mask=rows < N, other=IGNORE).to(tl.int32)
    lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
    gradient = _gradient(x, label[:, None], lse[:, None], columns[None, :], factor)
    return fast_casts.widen(fast_casts.round_bf16(gradient)) if x.dtype == tl.bfloat16 else gradient
