"""Fixtures for tests of Triton kernels: without a GPU the replacements of fast_kernels/interpreter.py, and
memory filled with NaN. Import a fixture to use it."""

import sys

import pytest
import torch

pytest.importorskip("triton")
from fast_kernels import casts as fast_casts
from fast_kernels import interpreter

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


if not HAS_GPU:
    interpreter.speed_up()


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
    for name in ("casts", "embedding", "loss", "gemm", "adapters"):
        if f"fast_kernels.{name}" in sys.modules:
            monkeypatch.setattr(sys.modules[f"fast_kernels.{name}"], "torch", _PoisonedTorch())


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Replace what Triton's interpreter cannot run, and let each program of a norm take several rows."""
    if HAS_GPU:
        return
    for module, name, function in interpreter.primitives():
        monkeypatch.setattr(module, name, function)
    sizes = fast_casts._norm_backward_sizes  # several rows per program, not the same number for all
    monkeypatch.setattr(
        fast_casts, "_norm_backward_sizes", lambda rows, columns: (min(rows, 3), sizes(rows, columns)[1]))


@pytest.fixture(autouse=True)
def _plain_casts(monkeypatch):
    """On a CPU run casts by their plain PyTorch versions: the kernels have their own tests."""
    if HAS_GPU:
        return
    for module, name, function in interpreter.plain_casts():
        monkeypatch.setattr(module, name, function)
