"""The kernels on a CPU, in Triton's interpreter: what `install()` replaces, so that a model trains there.

    TRITON_INTERPRET=1 NANOTE_ENGINE=fast python train.py --model fast --device cpu --dtype bfloat16 …

For tests and for a look at this engine without a GPU, at a tiny size: a step of 256 tokens takes a second.
TRITON_INTERPRET must be set before Triton is imported. On a machine with a GPU also hide that
(CUDA_VISIBLE_DEVICES=""). Three kinds of functions are replaced:

- `primitives`: what it cannot run (inline PTX) or computes otherwise than a GPU (its casts truncate).
- `plain_casts`: norms, activations, casts and the update of the scales run in plain PyTorch, by the reference
  beside each operation. Interpreted, they take seconds for each layer.
- `speed_up`: two functions of the interpreter itself, which take half of its time.

Embedding, loss and AdamW are interpreted. GEMMs are torch._scaled_mm, and attention is PyTorch's.
"""

import functools
import os

import torch
import triton
import triton.language as tl
from torch.utils._pytree import tree_map
from triton.runtime import interpreter

from fast_kernels import cast_kernels, casts, scales
from fast_kernels.fp8 import Quantization

_truncate = interpreter._convert_float  # the interpreter's own


@functools.cache
def install() -> None:
    """Replace functions of Triton and of this package in this process, for good."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("fast_kernels.interpreter.install: Triton does not interpret kernels here; start "
                         'Python with TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=""')
    speed_up()
    for module, name, function in (*primitives(), *plain_casts()):
        setattr(module, name, function)


@functools.cache
def speed_up() -> None:
    """Replace Triton's functions once per launch, and look up the dtype of each type once.

    The interpreter also replaces them at each call inside a kernel, and makes its dictionary of dtypes anew
    for each tensor: half of its time in all.
    """
    patch = interpreter._patch_lang
    find_dtype = interpreter._get_np_dtype
    dtypes = {}

    def patch_lang(function):
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules):
            return patch(function)
        return interpreter._LangPatchScope()

    def numpy_dtype(triton_type):
        if triton_type.name not in dtypes:
            dtypes[triton_type.name] = find_dtype(triton_type)
        return dtypes[triton_type.name]

    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = numpy_dtype


# ---------------------------------------------------------------- what the interpreter cannot run

def primitives() -> list:
    """Return (module, name, replacement) of casts, inline PTX, and a reduction that is slow in it."""
    functions = _reciprocal, round_bf16, widen, _pack_fp8, two_sums
    replaced = [(cast_kernels, function.fn.__name__, function) for function in functions]
    return [(interpreter, "_convert_float", _convert_float), *replaced]


def _convert_float(x, source, target, rounding):
    """Cast with PyTorch: to nearest even and, to FP8, with saturation, as a GPU does."""
    narrow = {"bf16": torch.bfloat16, "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn}
    if str(source) != "fp32" or str(target) not in narrow:
        return _truncate(x, source, target, rounding)
    values, dtype = torch.from_numpy(x.copy()), narrow[str(target)]
    if dtype.itemsize == 1:
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    values = values.to(dtype)
    return values.view(torch.uint16 if values.itemsize == 2 else torch.uint8).numpy()


@triton.jit
def _reciprocal(x):
    return 1.0 / x


@triton.jit
def round_bf16(x):
    return x.to(tl.bfloat16)


@triton.jit
def widen(x):
    return x.to(tl.float32)


@triton.jit
def _byte(x, position: tl.constexpr, FP8_DTYPE: tl.constexpr):
    """Cast to FP8, and move the byte to this position in 32 bits."""
    return x.to(FP8_DTYPE).to(tl.uint8, bitcast=True).to(tl.int32) << (8 * position)


@triton.jit
def _pack_fp8(a, b, c, d, FP8_DTYPE: tl.constexpr):
    low = _byte(a, 0, FP8_DTYPE) | _byte(b, 1, FP8_DTYPE)
    high = _byte(c, 2, FP8_DTYPE) | _byte(d, 3, FP8_DTYPE)
    return low | high


@triton.jit
def two_sums(a, b):
    return tl.sum(a), tl.sum(b)


# ---------------------------------------------------------------- what is slow in it

def plain_casts() -> list:
    """Return (module, name, replacement) of the operations of casts.py and scales.py in plain PyTorch."""
    # what the float64 results are rounded to: statistics of a norm, outputs and gradients
    dtypes = dict(norm=torch.float32, norm_backward=torch.bfloat16, activate=torch.bfloat16,
                  activate_backward=torch.bfloat16, activate_bf16=torch.bfloat16,
                  activate_backward_bf16=torch.bfloat16)
    replaced = [(casts, name, _rounded(getattr(casts, f"{name}_reference"), dtype))
                for name, dtype in dtypes.items()]
    return [*replaced, (casts, "norm_bf16", _norm_bf16), (casts, "cast", _cast),
            (casts, "cast_all", _cast_all), (scales, "update", scales.update_reference)]


def _rounded(reference, dtype):
    """Return a reference in float64 whose results are rounded to `dtype`."""
    def to_dtype(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x

    return lambda *arguments, **options: tree_map(to_dtype, reference(*arguments, **options))


def _norm_bf16(*arguments):
    residual, y, mean, rstd = casts.norm_bf16_reference(*arguments)
    return residual, y.bfloat16(), None if mean is None else mean.float(), rstd.float()


def _cast(x, quantization, with_dbias=False, out=None):
    quantized = casts.quantize_reference(x, quantization)
    if out is not None:
        for written, tensor in zip(out, quantized):
            written.copy_(tensor)
        quantized = out
    dbias = x.double().sum(0).bfloat16() if with_dbias else None
    return quantized, dbias


def _cast_all(x, rowwise, columnwise, *others):
    columnwise = columnwise or [torch.empty_like(data.T) for data in rowwise]
    for own_x, *out, scale, amax in zip(x, rowwise, columnwise, *others):
        _cast(own_x, Quantization(scale, amax, out[0].dtype), out=out)
