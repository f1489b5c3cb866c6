"""SwiGLU inside `te.LayerNormMLP`, forward and backward, each in one pass over memory that leaves FP8 behind.

An activation function moves far more bytes than it computes, so all that counts is how often its tensors are read and written. Under
delayed scaling on Hopper, Transformer Engine (TE) writes SwiGLU's output in FP8 by rows and reads it again in backward to transpose it
(Hopper's FP8 matrix products sum along rows only); the gradient it writes in BF16, for another kernel to cast and transpose. What is notable:

- Here one kernel reads the BF16 input, computes in float32, records the amax, and writes both layouts.
- Values pass through BF16 on their way to FP8, as TE's gradient does, so that they change layout between threads in 16 bits: half of what 32
  would move, and 8 bits Triton 3.6 gets wrong on Hopper. What BF16 rounds to halfway between two FP8 numbers may become the other one.
- Instructions count here as much as bytes: hence a reciprocal and a rounding of one instruction each, where Triton's own take several.
- The price: the transposed activation is there from forward to backward, one byte for each token and inner feature of a layer.
- `accelerate(mlp)` replaces two things in TE: the table in which LayerNormMLP looks its activation up, and the method in which it tells the
  activation's quantizer that no transpose is wanted. Modules that were not accelerated, and what these kernels are not made for, go on to
  TE, call by call.

Formula: SwiGLU (Shazeer 2020), SiLU(a) · b with SiLU(a) = a / (1 + exp(-a)), of an input whose rows hold a, then b.
"""

import inspect

import torch
import triton
import triton.language as tl

# A program's part of the output: 16-byte accesses in both layouts, 32 values a thread. The best of those tried on an H200.
TILE = dict(ROWS=64, COLUMNS=64, num_warps=4)
_originals = {}  # what accelerate() replaced


def available(return_reason=False):
    """Whether `accelerate` can work here: bool, or (bool, why not) as Transformer Engine's functions of this kind do."""
    reason = _why_not()
    return (not reason, reason) if return_reason else not reason


def _why_not():
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "compute capability 9.0 is needed: Ada cannot cast float32 to FP8 in one rounding, Blackwell needs no transposed copy"
    try:
        from transformer_engine.pytorch.module import layernorm_mlp
    except ImportError as error:
        return f"Transformer Engine cannot be imported: {error}"
    if _originals:
        return ""
    parameters = [list(inspect.signature(f).parameters) if f else None for f in (
        getattr(layernorm_mlp, "_act_func", None), getattr(layernorm_mlp.LayerNormMLP, "_get_quantizers", None))]
    if parameters != [["activation", "recipe"], ["self", "fp8_output", "is_grad_enabled"]]:
        return "this Transformer Engine's LayerNormMLP finds its activation functions in another way than release 2.20"
    return ""


def accelerate(mlp):
    """Have this `te.LayerNormMLP` use these kernels: a SwiGLU without biases, on a GPU that they run on. Returns whether it does."""
    if mlp.activation == "swiglu" and not mlp.use_bias and available():
        if not _originals:
            _replace()
        mlp.fast_swiglu = True
    return getattr(mlp, "fast_swiglu", False)


def _replace():
    from transformer_engine.pytorch.module import layernorm_mlp

    act_func, get_quantizers = layernorm_mlp._act_func, layernorm_mlp.LayerNormMLP._get_quantizers
    _originals.update(act_func=act_func, get_quantizers=get_quantizers)

    def our_act_func(activation, recipe=None):
        """(forward, backward, backward with the bias's gradient): TE goes by the third wherever there is one, and it quantises."""
        if activation != "swiglu" or recipe is None or not recipe.delayed():
            return act_func(activation, recipe)
        return swiglu, layernorm_mlp.tex.dswiglu, dbias_dswiglu

    def our_get_quantizers(self, fp8_output, is_grad_enabled):
        quantizers = get_quantizers(self, fp8_output, is_grad_enabled)
        gradient, activation = quantizers[5:7]
        if getattr(self, "fast_swiglu", False) and _is_delayed(activation):
            activation.fast = True
            if is_grad_enabled:
                activation.set_usage(columnwise=True)  # for the weight's gradient
                gradient.fast = True
        return quantizers

    layernorm_mlp._act_func, layernorm_mlp.LayerNormMLP._get_quantizers = our_act_func, our_get_quantizers


def restore():
    """Undo what `accelerate` replaced in TE, for all modules."""
    if _originals:
        from transformer_engine.pytorch.module import layernorm_mlp

        layernorm_mlp._act_func, layernorm_mlp.LayerNormMLP._get_quantizers = _originals["act_func"], _originals["get_quantizers"]
        _originals.clear()


# ---------------------------------------------------------------- what TE calls

def swiglu(x, quantizer, **parameters):
    """`quantizer(SwiGLU(x))`: (N, 2D) BF16 -> (N, D) FP8, by rows and, if the quantizer wants that, transposed.

    `parameters`, here and below: those of other kinds of SwiGLU, which are TE's.
    """
    if parameters or not _fits(x, quantizer):
        import transformer_engine_torch as tex

        if _is_delayed(quantizer):
            quantizer.set_usage(columnwise=False)  # as it was before `our_get_quantizers`
        return tex.swiglu(x, quantizer, **parameters)
    return _wrap(quantizer, x.dtype, *activate(x, quantizer.scale, quantizer.amax, _torch_type(quantizer), quantizer.columnwise_usage))


def dbias_dswiglu(gradient, x, quantizer, **parameters):
    """From the gradient (N, D) BF16 of SwiGLU(x), the gradient of x: its sum over rows, for a bias, and FP8 (N, 2D), both layouts.

    The sum is None where these kernels do the work: `accelerate` takes no module with a bias.
    """
    if parameters or not (_fits(x, quantizer) and gradient.is_contiguous() and gradient.dtype == x.dtype and quantizer.columnwise_usage):
        import transformer_engine_torch as tex

        return tex.bgrad_quantize(tex.dswiglu(gradient, x, None, **parameters), quantizer)
    return None, _wrap(quantizer, x.dtype, *differentiate(gradient, x, quantizer.scale, quantizer.amax, _torch_type(quantizer)))


def _is_delayed(quantizer):
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    return isinstance(quantizer, Float8Quantizer)


def _fits(x, quantizer):
    """TE's kernels take any shape, type and GPU; these do not."""
    return (_is_delayed(quantizer) and getattr(quantizer, "fast", False) and quantizer.rowwise_usage and x.dtype == torch.bfloat16 and x.dim() == 2
            and x.is_contiguous() and x.numel() > 0 and x.shape[0] % 16 == 0 and x.shape[1] % 32 == 0
            and torch.cuda.get_device_capability(x.device) == (9, 0))


def _torch_type(quantizer):
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return TE_DType_To_Torch[quantizer.dtype]


def _wrap(quantizer, dtype, by_rows, by_columns, scale_inv):
    """The tensor that TE's own functions would return."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor, Float8TensorStorage

    inside = dict(data=by_rows, data_transpose=by_columns, fp8_scale_inv=scale_inv, fp8_dtype=quantizer.dtype, quantizer=quantizer)
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=dtype, **inside)
    return Float8Tensor(shape=by_rows.shape, dtype=dtype, device=by_rows.device, **inside)


# ---------------------------------------------------------------- the kernels

def activate(x, scale, amax, fp8, transpose=True):
    """SwiGLU(x) times `scale` in the torch type `fp8`: (N, 2D) -> bytes (N, D) and, if asked for, transposed (D, N), uint8, and 1/scale (1,).

    scale, amax: one float32 each; amax grows.
    """
    rows, columns = x.shape[0], x.shape[1] // 2
    by_rows, by_columns, scale_inv = _outputs(x, rows, columns, transpose)
    _swiglu_kernel[_tiles(rows, columns)](x, scale, amax, scale_inv, by_rows.view(fp8), by_columns.view(fp8) if transpose else None,
                                          rows, columns, **TILE)
    return by_rows, by_columns, scale_inv


def differentiate(gradient, x, scale, amax, fp8):
    """From SwiGLU's gradient (N, D) and its input (N, 2D): the gradient of x times `scale`, as `activate`'s three, but (N, 2D)."""
    rows, columns = gradient.shape
    by_rows, by_columns, scale_inv = _outputs(x, *x.shape, True)
    _dswiglu_kernel[_tiles(rows, columns)](gradient, x, scale, amax, scale_inv, by_rows.view(fp8), by_columns.view(fp8), rows, columns, **TILE)
    return by_rows, by_columns, scale_inv


def _outputs(x, rows, columns, transpose):
    by_rows = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    by_columns = torch.empty((columns, rows), dtype=torch.uint8, device=x.device) if transpose else None
    return by_rows, by_columns, torch.empty(1, dtype=torch.float32, device=x.device)


def _tiles(rows, columns):
    return (triton.cdiv(rows, TILE["ROWS"]) * triton.cdiv(columns, TILE["COLUMNS"]),)


@triton.jit
def _reciprocal(x):
    """1/x to the last bit but one, in one instruction."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _round(x):
    """To BF16, two values an instruction."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _sigmoid(x):
    return _reciprocal(1.0 + tl.exp2(-1.4426950409 * x))  # log2(e): a power of 2 is what the GPU has an instruction for


@triton.jit
def _cast_and_store(values, scale, by_rows_ptr, by_columns_ptr, first_row, first_column, N, D, mask,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of the (N, D) output, BF16, in FP8: as it is and, if there is where to, transposed. The cast saturates."""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    fp8 = (values.to(tl.float32) * scale).to(by_rows_ptr.dtype.element_ty)  # ties to even
    tl.store(by_rows_ptr + first_row.to(tl.int64) * D + first_column + i[:, None] * D + j[None, :], fp8, mask=mask)
    if by_columns_ptr is not None:
        corner = first_column.to(tl.int64) * N + first_row
        tl.store(by_columns_ptr + corner + j[:, None] * N + i[None, :], tl.trans(fp8), mask=tl.trans(mask))


@triton.jit
def _swiglu_kernel(x_ptr, scale_ptr, amax_ptr, scale_inv_ptr, by_rows_ptr, by_columns_ptr, N, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile (ROWS, COLUMNS) of the (N, D) output."""
    tiles = tl.cdiv(D, COLUMNS)
    first_row, first_column = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles * COLUMNS
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)  # inside the tile, so that only the tile's own place needs 64 bits
    mask = (first_row + i < N)[:, None] & (first_column + j < D)[None, :]
    x_ptr += first_row.to(tl.int64) * 2 * D + first_column + i[:, None] * 2 * D + j[None, :]
    a = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    y = a * _sigmoid(a) * tl.load(x_ptr + D, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    tl.atomic_max(amax_ptr, tl.max(tl.abs(y)), sem="relaxed")  # NaN does not count, neither here nor in TE
    _cast_and_store(_round(y), scale, by_rows_ptr, by_columns_ptr, first_row, first_column, N, D, mask, ROWS, COLUMNS)


@triton.jit
def _dswiglu_kernel(gradient_ptr, x_ptr, scale_ptr, amax_ptr, scale_inv_ptr, by_rows_ptr, by_columns_ptr, N, D,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile (ROWS, COLUMNS) of SwiGLU's gradient (N, D): two tiles of x's gradient, a's on the left and b's D columns further."""
    tiles = tl.cdiv(D, COLUMNS)
    first_row, first_column = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles * COLUMNS
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (first_row + i < N)[:, None] & (first_column + j < D)[None, :]
    x_ptr += first_row.to(tl.int64) * 2 * D + first_column + i[:, None] * 2 * D + j[None, :]
    a = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + D, mask=mask, other=0.0).to(tl.float32)
    gradient_ptr += first_row.to(tl.int64) * D + first_column + i[:, None] * D + j[None, :]
    gradient = tl.load(gradient_ptr, mask=mask, other=0.0).to(tl.float32)
    sigmoid = _sigmoid(a)
    silu = a * sigmoid
    da, db = (silu * (1.0 - sigmoid) + sigmoid) * gradient * b, silu * gradient
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    tl.atomic_max(amax_ptr, tl.max(tl.maximum(tl.abs(da), tl.abs(db))), sem="relaxed")
    _cast_and_store(_round(db), scale, by_rows_ptr, by_columns_ptr, first_row, D + first_column, N, 2 * D, mask, ROWS, COLUMNS)
    _cast_and_store(_round(da), scale, by_rows_ptr, by_columns_ptr, first_row, first_column, N, 2 * D, mask, ROWS, COLUMNS)
