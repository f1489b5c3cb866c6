"""Cross-entropy of a GPT's logits and its gradient, in FP8 for an FP8 head, each in one pass over memory.

Use `cross_entropy` in place of `F.cross_entropy` where nothing else reads the logits, the largest tensor of a
training step (32,768 tokens x 50,304 vocabulary entries in BF16: 3.3 GB).

- Forward reads the logits once (online softmax, Milakov and Gimelshein 2018) and saves each log-sum-exp.
- Backward computes softmax - onehot and overwrites the logits with it: no second tensor of that size. A
  compiled graph cannot express that, so under torch.compile the gradient is a new tensor.
- For an FP8 GEMM, the backward kernel quantizes the values in its registers: 4 bytes moved per logit.
  Transformer Engine (TE) reads a BF16 gradient again: 8 bytes. The kernel rounds to BF16 first, as TE's path
  does, and raises the same amax, so that data, scales and training are bit for bit TE's.

References: label smoothing (Szegedy et al. 2016); soft-capped logits (Gemma 2, 2024).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fast_kernels import cast_kernels as kernels
from fast_kernels import casts
from fast_kernels.fp8 import Float8Tensor, Quantization, as_arguments
from fast_kernels.launch import Launch, per_shape
from fast_kernels.library import ceil_div, is_fake, is_tracing, operation

# The fastest of those tried on an H200: 16 logits per thread; for FP8 a tile with 32 per thread.
LAUNCH = dict(BLOCK=2048, num_warps=4)
BACKWARD_FP8 = dict(ROWS=128, COLUMNS=64, num_warps=8)
IGNORE_INDEX = tl.constexpr(-100)


def cross_entropy_reference(logits, labels, label_smoothing=0.0, softcap=None):
    """`cross_entropy` in plain PyTorch, in float32."""
    logits = logits.float() if softcap is None else softcap * (logits.float() / softcap).tanh()
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="sum")
    return loss / (labels != -100).sum().clamp(min=1)


def cross_entropy(logits, labels, quantization=None, label_smoothing=0.0, softcap=None):
    """Compute the mean cross-entropy over the labels that are not -100, () float32; 0 if all are -100.

    Differentiable in the logits, once: backward may overwrite them, so do not use them afterwards.

    Args:
        logits: (N, V) BF16 or float32, contiguous.
        labels: (N,) int64.
        quantization: how to quantize the logits' gradient; backward then returns a `Float8Tensor`. N and V
            must be multiples of 16. None, or under torch.compile: the gradient has the logits' dtype.
        label_smoothing: the share of the target that is spread over the vocabulary, as in F.cross_entropy.
        softcap: c, for the loss of c · tanh(logits / c), as in Gemma 2; None: of the logits.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing}: must be from 0 to 1; 0.1 works")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap}: must be None or above 0; 30.0 works")
    is_matrix = logits.dim() == 2 and logits.numel() > 0 and logits.is_contiguous()
    if not is_matrix or logits.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}: (N, V), contiguous, bfloat16 or "
                         "float32, and not empty, is needed")
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(f"labels {tuple(labels.shape)} {labels.dtype}: ({len(logits)},) int64 is needed")
    if quantization is not None and (logits.shape[0] % 16 or logits.shape[1] % 16):
        raise ValueError(f"logits {tuple(logits.shape)}: a gradient in FP8 needs multiples of 16; pad them")
    if torch.compiler.is_compiling():
        quantization = None
    # a kernel takes each number always as a float
    label_smoothing = float(label_smoothing)
    softcap = None if softcap is None else float(softcap)
    loss, _, _ = _cross_entropy(
        logits, labels.contiguous(), label_smoothing, softcap, *as_arguments(quantization))
    return loss


def _setup_context(ctx, inputs, output):
    logits, labels, label_smoothing, softcap, *quantization = inputs
    _, lse, count = output
    ctx.save_for_backward(logits, labels, lse, count)
    ctx.mark_non_differentiable(lse, count)
    ctx.set_materialize_grads(False)
    ctx.label_smoothing = label_smoothing
    ctx.softcap = softcap
    ctx.quantization = Quantization(*quantization)
    ctx.did_backward = False


def _cross_entropy_backward(ctx, grad_loss, *_):
    if ctx.did_backward:
        raise RuntimeError("cross_entropy: a second backward pass; the first one overwrote the logits")
    ctx.did_backward = True
    logits, labels, lse, count = ctx.saved_tensors
    factor = (grad_loss / count).float()
    arguments = logits, labels, lse, factor, ctx.label_smoothing, ctx.softcap
    if ctx.quantization.scale is not None:
        quantized = cast_gradient(*arguments, *ctx.quantization)
        gradient = Float8Tensor(*quantized, dtype=logits.dtype)
    elif is_tracing():
        gradient = torch.empty_like(logits)
        logits_gradient(*arguments, gradient)
    else:
        gradient = logits.detach()  # overwrite them
        logits_gradient(*arguments, gradient)
        torch.autograd.graph.increment_version(logits)  # an error where another function saved the logits
    return gradient, None, None, None, None, None, None


@operation(
    "(Tensor logits, Tensor labels, float label_smoothing, float? softcap, Tensor? scale, Tensor? amax, "
    "ScalarType? fp8_dtype) -> (Tensor loss, Tensor lse, Tensor count)",
    _setup_context, _cross_entropy_backward)
def _cross_entropy(logits, labels, label_smoothing, softcap, scale, amax, fp8_dtype):
    """Return the loss, each row's log-sum-exp (N,) float32, and the number of labels."""
    rows, vocab_size = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not is_fake(logits):
        _forward_launch(rows, vocab_size, label_smoothing, softcap).run(logits, labels, losses, lse)
    count = (labels != IGNORE_INDEX.value).sum().clamp(min=1)
    return losses.sum() / count, lse, count


@per_shape
def _forward_launch(rows, vocab_size, label_smoothing, softcap):
    return Launch(
        _forward_kernel, (rows,), V=vocab_size, smoothing=label_smoothing or None, softcap=softcap, **LAUNCH)


ARGUMENTS = "Tensor labels, Tensor lse, Tensor factor, float label_smoothing, float? softcap"


@operation(f"(Tensor logits, {ARGUMENTS}, Tensor(a!) out) -> ()")
def logits_gradient(logits, labels, lse, factor, label_smoothing, softcap, out):
    """Write the logits' gradient, that of the sum over rows times factor, () float32, to `out`."""
    rows, vocab_size = logits.shape
    if not is_fake(logits):
        _backward_launch(rows, vocab_size, label_smoothing, softcap).run(logits, out, labels, lse, factor)


@per_shape
def _backward_launch(rows, vocab_size, label_smoothing, softcap):
    programs = rows * ceil_div(vocab_size, LAUNCH["BLOCK"])
    return Launch(
        _backward_kernel, (programs,), V=vocab_size, smoothing=label_smoothing or None, softcap=softcap,
        **LAUNCH)


@operation(
    f"(Tensor logits, {ARGUMENTS}, Tensor scale, Tensor(a!) amax, ScalarType fp8_dtype) "
    "-> (Tensor, Tensor, Tensor)")
def cast_gradient(logits, labels, lse, factor, label_smoothing, softcap, scale, amax, fp8_dtype):
    """Return the logits' gradient as an FP8 tensor, and raise amax to its largest magnitude."""
    rows, vocab_size = logits.shape
    rowwise, columnwise, scale_inv = casts.allocate_fp8(logits, rows, vocab_size, fp8_dtype)
    if not is_fake(logits):
        _backward_fp8_launch(rows, vocab_size, label_smoothing, softcap).run(
            logits, labels, lse, factor, scale, amax, rowwise, columnwise, scale_inv)
    return rowwise, columnwise, scale_inv


@per_shape
def _backward_fp8_launch(rows, vocab_size, label_smoothing, softcap):
    tiles = ceil_div(rows, BACKWARD_FP8["ROWS"]) * ceil_div(vocab_size, BACKWARD_FP8["COLUMNS"])
    return Launch(
        _backward_fp8_kernel, (tiles,), N=rows, V=vocab_size, smoothing=label_smoothing or None,
        softcap=softcap, **BACKWARD_FP8)


@triton.jit
def _cap(x, softcap):
    """Return c · tanh(x / c), with tanh u = (1 - e) / (1 + e) for u >= 0 and e = exp(-2u)."""
    e = tl.exp(-2.0 / softcap * tl.abs(x))
    size = softcap * ((1.0 - e) / (1.0 + e))
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _forward_kernel(logits_ptr, labels_ptr, losses_ptr, lse_ptr, V, smoothing, softcap, BLOCK: tl.constexpr):
    """Compute loss and log-sum-exp of one row. smoothing, softcap: None where they do nothing."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    offsets = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    target = tl.load(logits_ptr + label, mask=(label >= 0) & (label < V), other=float("-inf")).to(tl.float32)
    if softcap is not None:
        target = tl.where((label >= 0) & (label < V), _cap(target, softcap), target)
    maximum = -3.4e38  # finite: a block of nothing but -inf must not give inf - inf
    # one partial sum per element of a block: only the maximum needs a reduction in every iteration
    sums = tl.zeros([BLOCK], tl.float32)
    if smoothing is not None:
        total = tl.zeros([BLOCK], tl.float32)
    prefetched = tl.load(logits_ptr + offsets, mask=offsets < V, other=float("-inf"))
    for start in range(0, V, BLOCK):
        x = prefetched.to(tl.float32)
        if softcap is not None:
            x = tl.where(start + offsets < V, _cap(x, softcap), float("-inf"))
        if smoothing is not None:
            total += tl.where(start + offsets < V, x, 0.0)
        columns = start + BLOCK + offsets
        prefetched = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(x))
        sums = sums * tl.exp(maximum - new_maximum) + tl.exp(x - new_maximum)
        maximum = new_maximum
    log_sum = tl.log(tl.sum(sums))
    tl.store(lse_ptr + row, maximum + log_sum)
    loss = maximum - target + log_sum
    if smoothing is not None:
        loss += smoothing * (target - tl.sum(total) / V)
    tl.store(losses_ptr + row, tl.where(label == IGNORE_INDEX, 0.0, loss))


@triton.jit
def _gradient(x, label, lse, columns, factor, V, smoothing, softcap):
    """Return (softmax - target) · factor in float32; 0 in ignored rows. The target is onehot without
    smoothing. With a softcap, the softmax is that of y = c · tanh(x / c), and dy/dx = 1 - (y / c)²."""
    x = x.to(tl.float32)
    if softcap is not None:
        x = _cap(x, softcap)
    # 1.44 = log2(e). tl.exp takes three more instructions, for results below 2^-126.
    p = tl.exp2((x - lse) * 1.4426950409)
    if smoothing is None:
        gradient = tl.where(columns == label, p - 1.0, p) * factor
    else:
        # div_rn: ptxas may fuse p - smoothing / V into one FMA, and did so in one of the two kernels
        p -= tl.div_rn(smoothing, V.to(tl.float32))
        gradient = tl.where(columns == label, p - (1.0 - smoothing), p) * factor
    if softcap is not None:
        gradient *= 1.0 - (x / softcap) * (x / softcap)
    if smoothing is not None or softcap is not None:
        gradient = tl.where(columns < V, gradient, 0.0)  # counts in the amax
    return tl.where(label == IGNORE_INDEX, 0.0, gradient)


@triton.jit
def _backward_kernel(logits_ptr, out_ptr, labels_ptr, lse_ptr, factor_ptr, V, smoothing, softcap,
                     BLOCK: tl.constexpr):
    """Compute one block of one row of the gradient. out_ptr may be logits_ptr."""
    blocks = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row * V
    x = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf"))
    label = tl.load(labels_ptr + row).to(tl.int32)
    gradient = _gradient(
        x, label, tl.load(lse_ptr + row), columns, tl.load(factor_ptr), V, smoothing, softcap)
    tl.store(out_ptr + row * V + columns, gradient.to(x.dtype), mask=columns < V)


@triton.jit
def _backward_fp8_kernel(logits_ptr, labels_ptr, lse_ptr, factor_ptr, scale_ptr, amax_ptr, rowwise_ptr,
                         columnwise_ptr, scale_inv_ptr, N, V, smoothing, softcap, ROWS: tl.constexpr,
                         COLUMNS: tl.constexpr):
    """Compute one tile (ROWS, COLUMNS) of the gradient; store it in FP8, rowwise and transposed."""
    first_row, first_column = kernels.tile_corner(tl.program_id(0), V, ROWS, COLUMNS)
    rows, columns = first_row + 4 * tl.arange(0, ROWS // 4), first_column + tl.arange(0, COLUMNS)
    factor = tl.load(factor_ptr)
    mask, _ = kernels.tile_mask(first_row, first_column, N, V, False, ROWS, COLUMNS)
    logits_ptr += kernels.tile_offsets(first_row, first_column, V, ROWS, COLUMNS)
    x = kernels.load_rows(logits_ptr, V, mask, float("-inf"))
    a = _rounded_gradient(x[0], labels_ptr, lse_ptr, rows, columns, factor, N, V, smoothing, softcap)
    b = _rounded_gradient(x[1], labels_ptr, lse_ptr, rows + 1, columns, factor, N, V, smoothing, softcap)
    c = _rounded_gradient(x[2], labels_ptr, lse_ptr, rows + 2, columns, factor, N, V, smoothing, softcap)
    d = _rounded_gradient(x[3], labels_ptr, lse_ptr, rows + 3, columns, factor, N, V, smoothing, softcap)
    tl.atomic_max(amax_ptr, tl.max(kernels.abs_max(a, b, c, d)), sem="relaxed")
    scale = kernels.load_scale(scale_ptr, scale_inv_ptr)
    kernels.store_fp8(a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, V, mask)


@triton.jit
def _rounded_gradient(x, labels_ptr, lse_ptr, rows, columns, factor, N, V, smoothing, softcap):
    """Return the gradient of every fourth row, rounded to the logits' dtype as in `_backward_kernel`."""
    label = tl.load(labels_ptr + rows, mask=rows < N, other=IGNORE_INDEX).to(tl.int32)
    lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
    gradient = _gradient(x, label[:, None], lse[:, None], columns[None, :], factor, V, smoothing, softcap)
    return kernels.widen(kernels.round_bf16(gradient)) if x.dtype == tl.bfloat16 else gradient
