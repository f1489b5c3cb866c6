"""Weights that are not trained and stay in FP8 alone: `FrozenWeight`, which `modules.freeze_in_fp8` makes.

Its scale is E4M3's largest value over the weight's own amax. Delayed scaling with a margin of 0 has the same
scale after its first step, if the BF16 weight does not change; so a GEMM reads the same bytes. The recipe's
margin has no effect here: it leaves room for values that grow, and these do not.
"""

import torch
from torch.utils._pytree import tree_leaves

from fast_kernels import casts
from fast_kernels.fp8 import KEPT, Float8Tensor, FP8Data, Quantization

FP8 = torch.float8_e4m3fn  # dtype of weights in every recipe


# te_reference.py has a copy of this function
def tensors_written_by(function, args, kwargs):
    """Return the tensors that an operation changes, as _foreach_copy_ does those of its first list."""
    written = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return tree_leaves(written)


class FrozenWeight(Float8Tensor):
    """A weight (out, in) in FP8. To operations other than the GEMMs here it is a tensor of its `dtype`, which
    they dequantize. `copy_` quantizes new values. columnwise None: each backward pass makes the transpose."""

    is_frozen_in_fp8 = True

    @staticmethod
    def __new__(cls, data, scale, dtype):
        return Float8Tensor.__new__(cls, *data, dtype)

    def __init__(self, data: FP8Data, scale, dtype):
        super().__init__(*data, dtype)
        self.scale = scale  # (1,) float32, of which data.scale_inv is the reciprocal

    def alias(self):
        return FrozenWeight(self.fp8_data(), self.scale, self.dtype)

    @torch.no_grad()
    def copy_(self, values, non_blocking=False, *, scale=None):
        """Quantize values (out, in).

        scale: (1,), of the frozen weight that these values were dequantized from; its bytes are then
            restored. None: the scale of their amax."""
        values = values.to(self.device, self.dtype)
        self.scale.copy_(scale_of(values) if scale is None else scale)
        quantize(values, self.scale, self.fp8_data())
        return self

    @staticmethod
    def scale_of(values):
        """Return the scale of some values, (1,) float32."""
        return scale_of(values)

    @property
    def requires_grad(self):
        return False

    @requires_grad.setter
    def requires_grad(self, value):
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad=True):
        if requires_grad:  # the same message: model_te_optimized.refuse_to_train, te_reference.FrozenWeight
            raise ValueError(f"requires_grad_: a weight {tuple(self.shape)} is frozen in FP8, without the "
                             "bits that an update changes; name it in freeze_in_fp8(…, except_for=[…])")
        return self

    def map(self, function):
        """Apply a function such as .to(device) to each tensor, and return the weight of the results. They are
        viewed as integers, since .bfloat16() converts floats; only the weight's own dtype follows it."""
        def apply(tensor, integer_dtype):
            return None if tensor is None else function(tensor.view(integer_dtype)).view(tensor.dtype)

        rowwise = apply(self.rowwise, torch.uint8)
        columnwise = apply(self.columnwise, torch.uint8)
        scale_inv = apply(self.scale_inv, torch.int32)
        scale = apply(self.scale, torch.int32)
        dtype = function(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return as_parameter(FP8Data(rowwise, columnwise, scale_inv), scale, dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in KEPT:
            weight, = args
            return weight.alias()
        if function is torch.ops.aten.as_strided.default and _is_whole(*args):
            return args[0].alias()  # by as_strided FSDP2 makes the parameter
        if function is torch.ops.aten.copy_.default and isinstance(args[0], cls):  # DDP broadcasts with copy_
            return args[0].copy_(args[1])
        if any(isinstance(tensor, cls) for tensor in tensors_written_by(function, args, kwargs or {})):
            raise ValueError(f"{function}: a weight is frozen in FP8; only copy_ changes it")
        return super().__torch_dispatch__(function, types, args, kwargs)

    # for torch.compile, copy.deepcopy and pickle

    def __tensor_flatten__(self):
        names = ["rowwise", "scale_inv", "scale"]
        if self.columnwise is not None:
            names.append("columnwise")
        return names, self.dtype

    @staticmethod
    def __tensor_unflatten__(tensors, dtype, size, stride):
        data = FP8Data(tensors["rowwise"], tensors.get("columnwise"), tensors["scale_inv"])
        return FrozenWeight(data, tensors["scale"], dtype)

    def __deepcopy__(self, memo):
        copied = self.map(torch.clone)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):  # as integers: PyTorch 2.11 does not unpickle FP8
        columnwise = None if self.columnwise is None else self.columnwise.view(torch.uint8)
        rowwise = self.rowwise.view(torch.uint8)
        return _unpickle, (rowwise, columnwise, self.scale_inv, self.scale, self.dtype)


def as_parameter(data, scale, dtype):
    """Return a FrozenWeight as a parameter of a module."""
    return torch.nn.Parameter(FrozenWeight(data, scale, dtype), requires_grad=False)


def _unpickle(rowwise, columnwise, scale_inv, scale, dtype):
    if columnwise is not None:
        columnwise = columnwise.view(FP8)
    return as_parameter(FP8Data(rowwise.view(FP8), columnwise, scale_inv), scale, dtype)


def _is_whole(weight, size, stride, offset=None):
    """Return whether these arguments of `as_strided` give the weight itself."""
    return (tuple(size), tuple(stride), offset or 0) == (weight.shape, weight.stride(), 0)


@torch.no_grad()
def make_frozen_weight(weight, keeps_transpose):
    """Return a weight (out, in) as a frozen parameter. keeps_transpose: see `modules.freeze_in_fp8`."""
    rows, columns = weight.shape
    rowwise = torch.empty((rows, columns), dtype=FP8, device=weight.device)
    columnwise = torch.empty((columns, rows), dtype=FP8, device=weight.device) if keeps_transpose else None
    scale_inv = torch.empty(1, dtype=torch.float32, device=weight.device)
    scale = torch.empty_like(scale_inv)
    frozen = as_parameter(FP8Data(rowwise, columnwise, scale_inv), scale, weight.dtype)
    frozen.copy_(weight.detach())
    return frozen


def scale_of(weight):
    """Return the scale of a weight, (1,) float32. An amax of 0, infinity or NaN gives 1."""
    lowest, highest = torch.aminmax(weight)
    amax = torch.maximum(-lowest, highest).float().view(1)
    # a tensor as the numerator: PyTorch computes number / tensor with the reciprocal, which rounds twice
    scale = torch.full_like(amax, torch.finfo(FP8).max) / amax
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def quantize(weight, scale, out: FP8Data):
    """Quantize a weight (out, in) to `out`, whose columnwise may be None."""
    amax = torch.zeros_like(scale)  # is not read
    if weight.numel() == 0:  # the part of a rank that has no rows
        out.scale_inv.copy_(scale.reciprocal())
        return
    if weight.is_cuda and len(weight) % 16 == 0:  # not the part of a rank that has other numbers of rows
        columnwise = [] if out.columnwise is None else [out.columnwise]
        casts.cast_all(
            [weight.to(torch.bfloat16)], [out.rowwise], columnwise, [out.scale_inv], [scale], [amax])
        return
    quantized = casts.quantize_reference(weight, Quantization(scale, amax, FP8))
    for target, values in zip(out, quantized):
        if target is not None:
            target.copy_(values)
