"""Fixtures for tests of Triton kernels: replacements for what the interpreter cannot run or computes
differently than a GPU, and memory filled with NaN. Import a fixture to use it."""

import sys

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from fast_kernels import cast_kernels  # noqa: E402
from fast_kernels import casts as fast_casts  # noqa: E402
from fast_kernels import scales as fast_scales  # noqa: E402

HAS_GPU = torch.cuda.is_available()


def needs_memory(gib):
    """Skip a test if the GPU, which other test processes may share, has too little free memory for it."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, and {free:.1f} GiB are free")


@pytest.fixture(autouse=True)
def _released_memory():
    """Give the memory of a large test back to the GPU, for other test processes."""
    yield
    if HAS_GPU and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


def _speed_up(interpreter):
    """Replace Triton's functions once per launch, and look up the dtype of each type once.

    The interpreter does the first at each call of a function within a kernel as well, when they are replaced
    already, and makes its dictionary of dtypes anew for each tensor: half of its time in all.
    """
    patch, find_dtype, dtypes = interpreter._patch_lang, interpreter._get_np_dtype, {}

    def patch_lang(function):
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(module.load) for module in modules):
            return patch(function)
        return interpreter._LangPatchScope()

    def numpy_dtype(triton_type):
        if triton_type.name not in dtypes:
            dtypes[triton_type.name] = find_dtype(triton_type)
        return dtypes[triton_type.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, numpy_dtype


if not HAS_GPU:
    from triton.runtime import interpreter

    _speed_up(interpreter)


@pytest.fixture(autouse=True)
def _casts_that_round(monkeypatch):
    """Cast with PyTorch in Triton's interpreter, which truncates instead of rounding: to nearest even and, to
    FP8, with saturation, as a GPU does."""
    if HAS_GPU:
        return
    narrow = {"bf16": torch.bfloat16, "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn}
    convert = interpreter._convert_float

    def cast(x, source, target, rounding):
        if str(source) != "fp32" or str(target) not in narrow:
            return convert(x, source, target, rounding)
        values, dtype = torch.from_numpy(x.copy()), narrow[str(target)]
        if dtype.itemsize == 1:
            values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        values = values.to(dtype)
        return values.view(torch.uint16 if values.itemsize == 2 else torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", cast)


class _PoisonedTorch:
    """torch, with `empty` and `empty_like` filled with NaN."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *args, **options):
        return self._poison(torch.empty(*args, **options))

    def empty_like(self, *args, **options):
        return self._poison(torch.empty_like(*args, **options))

    def _poison(self, tensor):
        if tensor.is_floating_point() or tensor.dtype == torch.uint8:
            tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Fill new memory with NaN, so that elements that a kernel does not write are noticed."""
    for name in ("fast_kernels.casts", "fast_kernels.embedding", "fast_kernels.loss", "fast_kernels.gemm"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "torch", _PoisonedTorch())


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
def _byte(x, FP8: tl.constexpr):
    return x.to(FP8).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _pack_fp8(a, b, c, d, FP8: tl.constexpr):
    return _byte(a, FP8) | (_byte(b, FP8) << 8) | (_byte(c, FP8) << 16) | (_byte(d, FP8) << 24)


@triton.jit
def two_sums(a, b):
    return tl.sum(a), tl.sum(b)


@pytest.fixture(autouse=True)
def _instructions(monkeypatch):
    """Replace inline PTX, which Triton's interpreter cannot run, and a reduction that is slow in it."""
    if not HAS_GPU:
        monkeypatch.setattr(cast_kernels, "_reciprocal", _reciprocal)
        monkeypatch.setattr(cast_kernels, "round_bf16", round_bf16)
        monkeypatch.setattr(cast_kernels, "widen", widen)
        monkeypatch.setattr(cast_kernels, "_pack_fp8", _pack_fp8)
        monkeypatch.setattr(cast_kernels, "two_sums", two_sums)
        sizes = fast_casts._norm_backward_sizes  # several rows per program, not the same number for all
        monkeypatch.setattr(
            fast_casts, "_norm_backward_sizes", lambda rows, columns: (min(rows, 3), sizes(rows, columns)[1]))


@pytest.fixture(autouse=True)
def _plain_casts(monkeypatch):
    """On a CPU run casts by their plain PyTorch versions: the interpreter takes seconds for each layer, and
    the kernels have their own tests."""
    if HAS_GPU:
        return

    def in_bf16(*tensors):
        return [None if x is None else x.bfloat16() if x.dtype == torch.float64 else x for x in tensors]

    def norm(*arguments):
        residual, quantized, mean, rstd = fast_casts.norm_reference(*arguments)
        return residual, quantized, None if mean is None else mean.float(), rstd.float()

    def norm_backward(*arguments, **options):
        dx, quantized, *sums = fast_casts.norm_backward_reference(*arguments, **options)
        return dx.bfloat16(), quantized, *in_bf16(*sums)

    def activate_backward(*arguments):
        quantized, dbias = fast_casts.activate_backward_reference(*arguments)
        return quantized, *in_bf16(dbias)

    def cast(x, scale, amax, fp8, with_dbias=False, out=None):
        quantized = fast_casts.quantize_reference(x, scale, amax, fp8)
        for written, tensor in zip(out or (), quantized):
            written.copy_(tensor)
        return out or quantized, x.double().sum(0).bfloat16() if with_dbias else None

    def cast_all(casts):
        for x, out, scale, amax in casts:
            cast(x, scale, amax, out[0].dtype, out=out)

    for function in (norm, norm_backward, activate_backward, cast, cast_all):
        monkeypatch.setattr(fast_casts, function.__name__, function)
    monkeypatch.setattr(fast_casts, "activate", fast_casts.activate_reference)
    monkeypatch.setattr(fast_scales, "update", fast_scales.update_reference)
