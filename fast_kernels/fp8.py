"""FP8 tensors: `FP8Data` between kernels, and `Float8Tensor`, which passes through autograd. A `Quantization`
says how a kernel makes one.

A kernel that computes a gradient writes it in FP8, rowwise and transposed, for the two GEMMs of the backward
pass that read it, and autograd hands it on as a `Float8Tensor`. To every other operation it is a BF16 tensor:
it dequantizes, so that an edited branch of a model gets a BF16 gradient. Operations in place raise.

Reference: docs.pytorch.org/docs/stable/notes/extending.html#extending-torch-python-api.
"""

from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten
KEPT = {aten.detach.default, aten.alias.default}  # the same tensor, outside autograd's graph


class FP8Data(NamedTuple):
    """A tensor (N, D), quantized: value = data · scale_inv."""

    rowwise: torch.Tensor | None  # (N, D) FP8; None in a backward pass, which reads the transpose only
    columnwise: torch.Tensor | None  # (D, N) FP8, the transpose; None of a frozen weight that is kept once
    scale_inv: torch.Tensor  # (1,) float32

    def for_backward(self):
        """Return the part that a backward pass needs: the transpose, or what it is made from."""
        return self if self.columnwise is None else FP8Data(None, self.columnwise, self.scale_inv)


class Quantization(NamedTuple):
    """How to quantize a tensor under delayed scaling: saturate(value · scale) in `fp8_dtype`.

    The kernel that quantizes the tensor raises `amax` to its largest magnitude, without NaN, as TE does. Both
    are views of the state of the module whose GEMM reads the tensor."""

    scale: torch.Tensor  # (1,) float32
    amax: torch.Tensor  # (1,) float32
    fp8_dtype: torch.dtype


def gradient_dtype(fp8_format):
    """Return the FP8 type of gradients in a recipe's format, of fast_kernels or of TE."""
    return torch.float8_e5m2 if fp8_format.name == "HYBRID" else torch.float8_e4m3fn


def as_arguments(quantization):
    """Return scale, amax and fp8_dtype, as an operation takes them. quantization None: each is None, and the
    operation writes BF16."""
    return (None, None, None) if quantization is None else quantization


class Float8Tensor(torch.Tensor):
    """A tensor with the attributes of FP8Data."""

    @staticmethod
    def __new__(cls, rowwise, columnwise, scale_inv, dtype=torch.bfloat16):
        return torch.Tensor._make_wrapper_subclass(cls, rowwise.shape, dtype=dtype, device=rowwise.device)

    def __init__(self, rowwise, columnwise, scale_inv, dtype=torch.bfloat16):
        self.rowwise, self.columnwise, self.scale_inv = rowwise, columnwise, scale_inv

    def fp8_data(self):
        return FP8Data(self.rowwise, self.columnwise, self.scale_inv)

    def alias(self):
        """Return the same tensor, outside autograd's graph."""
        return Float8Tensor(self.rowwise, self.columnwise, self.scale_inv, self.dtype)

    def dequantize(self):
        """Return the values in this tensor's dtype."""
        return (self.rowwise.float() * self.scale_inv).to(self.dtype)

    def __repr__(self):
        return f"Float8Tensor({tuple(self.shape)}, {self.rowwise.dtype}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in KEPT:
            tensor, = args
            return tensor.alias()
        if function._schema.is_mutable and isinstance(args[0], cls):
            raise RuntimeError(f"{function}: an FP8 gradient is read-only; do not change it in place")
        args, kwargs = pytree.tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return function(*args, **kwargs)
