"""The variants of a compiled kernel that `Launch` finds, with a stand-in for Triton's compiler."""

import types

import pytest
import torch

triton = pytest.importorskip("triton")
from fast_kernels import launch
from fast_kernels.launch import Launch


class Kernel(triton.JITFunction):
    """A kernel whose compiled variants record what they are launched with."""

    arg_names = ["x_ptr", "y_ptr", "N", "SCALE"]

    def __init__(self):
        self.compiled = 0
        self.launched = []

    def __getitem__(self, grid):
        def compile_and_launch(*tensors, **options):
            self.compiled += 1
            return types.SimpleNamespace(
                run=lambda *arguments: self.launched.append(arguments), function=f"variant {self.compiled}",
                packed_metadata="metadata")
        return compile_and_launch


def test_a_variant_is_launched_only_for_tensors_like_those_it_was_compiled_for(monkeypatch):
    """Of the same dtypes, which are None and which start at a multiple of 16 bytes."""
    stream = types.SimpleNamespace(get_current_stream=lambda device_index: "stream")
    monkeypatch.setattr(launch, "driver", types.SimpleNamespace(active=stream))
    kernel = Kernel()
    double = Launch(kernel, (5, 2), SCALE=2.0, N=3, num_warps=4)
    x = torch.zeros(64)
    cases = [(x, x), (x, None), (x[1:], x), (x, x[1:]), (x.half(), x)]
    for number, tensors in enumerate(cases, 1):
        double.run(*tensors)
        assert kernel.compiled == number
    for number, tensors in enumerate(cases, 1):
        double.run(*tensors)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        assert kernel.launched.pop() == (
            5, 2, 1, "stream", f"variant {number}", "metadata", None, None, None, *addresses, 3, 2.0)
    assert kernel.compiled == len(cases)
