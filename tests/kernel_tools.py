"""Fixtures for tests of Triton kernels: replacements for what the interpreter cannot run or computes
differently than a GPU, and memory filled with NaN. Import a fixture to use it."""

import sys

import pytest
import torch
from torch.utils._pytree import tree_map

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from fast_kernels import cast_kernels  # noqa: E402
from fast_kernels import casts as fast_casts  # noqa: E402
from fast_kernels import scales as fast_scales  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def on_gpu(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


def needs_memory(gib):
    """Skip a test if the GPU, which other test processes may share, has too little free memory for it."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, and {free:.1f} GiB are free")


def capture(step):
    """Run a step once, which compiles its kernels, then capture it; return the graph and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, step()


@pytest.fixture(autouse=True)
def _free_memory():
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
    _truncate = interpreter._convert_float


def _convert(x, source, target, rounding):
    """Cast with PyTorch: to nearest even and, to FP8, with saturation, as a GPU does."""
    narrow = {"bf16": torch.bfloat16, "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn}
    if str(source) != "fp32" or str(target) not in narrow:
        return _truncate(x, source, target, rounding)
    values, dtype = torch.from_numpy(x.copy()), narrow[str(target)]
    if dtype.itemsize == 1:
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    values = values.to(dtype)
    return values.view(torch.uint16 if values.itemsize == 2 else torch.uint8).numpy()


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
def _as_on_a_gpu(monkeypatch):
    """Replace in Triton's interpreter casts, which truncate, inline PTX, which it cannot run, and a reduction
    that is slow in it."""
    if HAS_GPU:
        return
    monkeypatch.setattr(interpreter, "_convert_float", _convert)
    for function in (_reciprocal, round_bf16, widen, _pack_fp8, two_sums):
        monkeypatch.setattr(cast_kernels, function.fn.__name__, function)
    sizes = fast_casts._norm_backward_sizes  # several rows per program, not the same number for all
    monkeypatch.setattr(
        fast_casts, "_norm_backward_sizes", lambda rows, columns: (min(rows, 3), sizes(rows, columns)[1]))


@pytest.fixture(autouse=True)
def _plain_casts(monkeypatch):
    """On a CPU run casts by their plain PyTorch versions: the interpreter takes seconds for each layer, and
    the kernels have their own tests."""
    if HAS_GPU:
        return

    def narrowed(reference, dtype):
        def to_dtype(x):
            return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x

        return lambda *arguments, **options: tree_map(to_dtype, reference(*arguments, **options))

    def cast(x, scale, amax, fp8, with_dbias=False, out=None):
        quantized = fast_casts.quantize_reference(x, scale, amax, fp8)
        for written, tensor in zip(out or (), quantized):
            written.copy_(tensor)
        return out or quantized, x.double().sum(0).bfloat16() if with_dbias else None

    def cast_all(*tensors):
        for x, *out, scale, amax in zip(*tensors):
            cast(x, scale, amax, out[0].dtype, out=out)

    for name in ("norm", "norm_backward", "activate", "activate_backward"):
        reference = getattr(fast_casts, f"{name}_reference")
        dtype = torch.float32 if name == "norm" else torch.bfloat16  # of its statistics, or of gradients
        monkeypatch.setattr(fast_casts, name, narrowed(reference, dtype))
    monkeypatch.setattr(fast_casts, "cast", cast)
    monkeypatch.setattr(fast_casts, "cast_all", cast_all)
    monkeypatch.setattr(fast_scales, "update", fast_scales.update_reference)
