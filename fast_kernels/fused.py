"""The training pass of a GPT in FP8, fused across modules: what `model_te_fast.py` is built from.

    stream = Stream(x)                                  # x (N, C): the embeddings of N tokens
    stream, qkv = norm_linear(stream, qkv_module)       # te.LayerNormLinear
    stream = stream.add(linear(y, proj_module))         # te.Linear
    stream, hidden = norm_linear(stream, mlp, "fc1")    # te.LayerNormMLP
    stream = stream.add(activation_linear(hidden, mlp))

- The kernel that reads a GEMM's output adds residual and bias; `Stream` and `Branch` carry them.
- A gradient is quantized by the kernel that writes it, for the GEMMs that read it, and passed through
  autograd as a `Float8Tensor`: delayed scaling knows the scale before the values. `Branch.gradient` says how.
  A branch whose value was changed is made anew as `Branch(x)`, without it.
- Forward GEMMs use fast accumulation, as in Transformer Engine's recipe; wgrad accumulates in float32, and
  dgrad too unless K is small and fast accumulation is faster (DGRAD_FAST_ACCUM_K).
- Without FP8 the same functions run in plain PyTorch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fast_kernels import casts
from fast_kernels.fp8 import Float8Tensor
from fast_kernels.gemm import gemm

# The largest K of a dgrad GEMM that may use fast accumulation. Up to it, in the median GEMM of models in
# training, the FP8 tensor-core accumulator adds less error than the rounding to BF16 after it
# (results/accumulation.json). The K of a wgrad GEMM is the number of tokens, where it would add about 3 %.
DGRAD_FAST_ACCUM_K = 3072


class Quantization(NamedTuple):
    """How to quantize a tensor under delayed scaling: value · scale in `dtype`; `amax` is raised to its amax.

    Both are (1,) float32, in the memory of the module whose GEMM reads the tensor."""

    scale: torch.Tensor
    amax: torch.Tensor
    dtype: torch.dtype


@dataclass
class Layer:
    """One linear layer of a module in one FP8 pass; `module.layer(…)` makes it."""

    parameter: torch.nn.Parameter  # the weight (out, in), BF16
    bias: torch.Tensor | None  # (out,)
    weight: tuple  # the weight in FP8: rowwise (out, in), columnwise (in, out), scale_inv
    input: Quantization
    gradient: Quantization  # of the output
    after_backward: Callable | None  # in the first module of the pass, updates gradients' scales; FP8 only


def _no_arithmetic(self, other):
    """Raise TypeError where a tuple would be repeated or concatenated."""
    raise TypeError(f"{type(self).__name__}: has no + and *, for instance in a hook of attention or MLP; "
                    "compute with branch.value() or stream.value(), and make fused.Branch(x) or Stream(x)")


class Branch(NamedTuple):
    """The output of a GEMM, to which its bias is still to be added: x (N, C) + bias (C,)."""

    x: torch.Tensor
    bias: torch.Tensor | None = None
    gradient: Quantization | None = None  # how x's gradient is quantized; None: it is not

    def value(self) -> torch.Tensor:
        """Return x + bias, (N, C), for an operation that is not one of these."""
        return self.x if self.bias is None else self.x + self.bias

    __add__ = __radd__ = __mul__ = __rmul__ = _no_arithmetic


class Stream(NamedTuple):
    """The residual (N, C), and the branch that is still to be added to it."""

    residual: torch.Tensor
    branch: Branch | None = None

    def add(self, branch: Branch) -> "Stream":
        """Add a branch; one that is still to be added is added to the residual first."""
        return Stream(self.value(), branch) if self.branch else Stream(self.residual, branch)

    def value(self) -> torch.Tensor:
        """Return the sum, (N, C)."""
        return self.residual if self.branch is None else self.residual + self.branch.value()

    __add__ = __radd__ = __mul__ = __rmul__ = _no_arithmetic


class Output(NamedTuple):
    """What attention and MLP return: the stream, and the branch that is to be added to it."""

    stream: Stream
    branch: Branch

    __add__ = __radd__ = __mul__ = __rmul__ = _no_arithmetic


def norm_linear(stream: Stream, module, name="", tied_dweight=None, is_first_microbatch=None):
    """Add the stream's branch to its residual; return (the sum as a Stream, norm(sum) @ weightᵀ).

    module: LayerNormLinear; or LayerNormMLP with the name "fc1", whose bias `activation_linear` adds.
    tied_dweight: a list that the weight's gradient is appended to, not passed through autograd; see `embed`.
        It may be passed at each of several uses of the weight.
    """
    if not isinstance(stream, Stream):
        raise TypeError(f"norm_linear: a {type(stream).__name__}, not a Stream, as torch.utils.checkpoint "
                        "with use_reentrant=True returns; use te.checkpoint, and Stream(x) for a tensor x")
    weights = module.layer_norm_weight, module.layer_norm_bias
    branch, branch_bias, gradient = stream.branch or Branch(None)
    layer = module.layer(name, (stream.residual, branch, branch_bias, *weights), is_first_microbatch)
    bias = layer.bias if not name else None
    if layer.weight is None:
        residual = stream.value()
        y = F.linear(module.norm(residual), layer.parameter, bias)
        return Stream(residual), Branch(y, layer.bias) if name else y
    residual, y = _NormLinear.apply(
        stream.residual, branch, branch_bias, *weights, layer.parameter, bias, module.eps, layer, gradient,
        tied_dweight)
    return Stream(residual), Branch(y, layer.bias, layer.gradient) if name else y


def linear(x, module, is_first_microbatch=None, adds_bias=False) -> Branch:
    """Return x @ weightᵀ of a Linear, x (N, inputs), to which the GEMM adds the bias if `adds_bias`."""
    return _linear(Branch(x), module, "", None, is_first_microbatch, adds_bias)


def activation_linear(hidden: Branch, module, is_first_microbatch=None, adds_bias=False) -> Branch:
    """Return activation(hidden + bias) @ fc2_weightᵀ of a LayerNormMLP."""
    return _linear(hidden, module, "fc2", module.activation, is_first_microbatch, adds_bias)


def _linear(x: Branch, module, name, activation, is_first_microbatch, adds_bias):
    layer = module.layer(name, (x.x, x.bias), is_first_microbatch)
    own, later = (layer.bias, None) if adds_bias else (None, layer.bias)
    if later is not None and dist.is_initialized():
        later = later.clone()  # FSDP2 frees a block's parameters before the next block adds it
    if activation and (layer.weight is None or x.gradient is None):  # no FP8, or x was changed since its GEMM
        x, activation = Branch(casts.activation_reference(activation, x.value())), None
    if layer.weight is None:
        return Branch(F.linear(x.x, layer.parameter, own), later)
    y = _Linear.apply(x.x, x.bias, layer.parameter, own, activation, layer, x.gradient)
    return Branch(y, later, layer.gradient)


def dropout(branch: Branch, p: float, training: bool) -> Branch:
    """Apply dropout to a branch and its bias; without dropout return it as it is."""
    return Branch(F.dropout(branch.value(), p)) if p and training else branch


# ---------------------------------------------------------------- GEMMs and their gradients

# gemm(a, b) is b @ aᵀ, the order of cuBLAS: a forward GEMM is gemm(weight, x).

def _backward_gemms(layer, dy, weight, x, needs_dx, needs_dweight, needs_dbias):
    """Return the gradients of a linear layer's input, weight and bias, or None for each that is not needed.

    dy: (N, out), BF16 or FP8; weight and x: see `input_gradient` and `_weight_gradient`."""
    dbias = dx = dweight = None
    if isinstance(dy, Float8Tensor):
        quantized = dy.rowwise, dy.columnwise, dy.scale_inv
        if needs_dbias:
            dbias = dy.dequantize().sum(0)
    else:
        quantized, dbias = casts.cast(dy.contiguous(), *layer.gradient, with_dbias=needs_dbias)
    if needs_dx:
        dx = input_gradient(quantized, weight)
    if needs_dweight:
        dweight = _weight_gradient(layer.parameter, x, *quantized[1:])
    return dx, dweight, dbias


def forward_gemm(bias, rowwise, columnwise, scale_inv, weight, weight_columnwise, weight_inv):
    """Return x @ weightᵀ + bias of two FP8 tensors."""
    return gemm(weight, weight_inv, rowwise, scale_inv, bias, "fast")


def input_gradient(dy, weight):
    """Return dgrad, dy @ weight, of an FP8 tensor dy; weight (in, out): columnwise, with its scale_inv."""
    rowwise, _, scale_inv = dy
    accumulation = "either" if rowwise.shape[1] <= DGRAD_FAST_ACCUM_K else "precise"
    return gemm(*weight, rowwise, scale_inv, None, accumulation)


def _weight_gradient(parameter, x, dy, dy_inv):
    """Return wgrad, dyᵀ @ x, of dy (out, N) and x (in, N), columnwise; in `main_grad` of a weight that has
    one, as Megatron-LM and TE do."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or parameter._backward_hooks:  # a hook may change the gradient
        return gemm(*x, dy, dy_inv)
    backward_pass = torch._C._current_graph_task_id()
    if backward_pass != -1 and getattr(parameter, "main_grad_pass", None) == backward_pass:
        # A weight that is used twice. Autograd has `main_grad` already and adds what is returned to it.
        return gemm(*x, dy, dy_inv, out=torch.empty_like(main_grad))
    parameter.main_grad_pass = backward_pass
    gemm(*x, dy, dy_inv, out=main_grad, accumulate=not getattr(parameter, "overwrite_main_grad", False))
    parameter.overwrite_main_grad = False
    parameter.grad_added_to_main_grad = True
    return main_grad.detach()  # autograd wants a gradient; this one is not copied


def first_derivative_only(backward):
    """Decorate the backward method of an autograd function: create_graph=True raises RuntimeError.

    `once_differentiable` is not enough: torch.autograd.grad skips its error if another path leads to the
    inputs, and returns the part of the derivative that goes there."""
    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():  # in a backward pass only with create_graph=True
            raise RuntimeError("create_graph=True: fast_kernels has no second derivatives in FP8; use "
                               "autocast(enabled=False)")
        return backward(ctx, *gradients)
    return checked


class _NormLinear(torch.autograd.Function):
    """`norm_linear`. The GEMM reads `layer.weight`; `weight` is an input only to receive a gradient."""

    @staticmethod
    def forward(ctx, x, branch, branch_bias, norm_weight, norm_bias, weight, bias, eps, layer,
                branch_gradient, tied_dweight):
        residual, quantized, mean, rstd = casts.norm(
            x, branch, branch_bias, norm_weight, norm_bias, eps, *layer.input)
        ctx.save_for_backward(residual, mean, rstd, norm_weight, *quantized[1:], *layer.weight[1:])
        ctx.layer, ctx.branch_gradient, ctx.tied_dweight = layer, branch_gradient, tied_dweight
        ctx.set_materialize_grads(False)
        return residual, forward_gemm(bias, *quantized, *layer.weight)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dresidual, dy):
        residual, mean, rstd, norm_weight, *operands = ctx.saved_tensors
        needs_x, needs_branch, needs_branch_bias, *needs_norm, needs_weight, needs_bias = (
            ctx.needs_input_grad[:7])
        if dy is None:  # only the sum was used: no GEMM
            ctx.layer.after_backward()
            dbranch_bias = dresidual.sum(0) if needs_branch_bias else None
            return dresidual, dresidual if needs_branch else None, dbranch_bias, *[None] * 8
        dresidual = None if dresidual is None else dresidual.contiguous()
        needs_dx = needs_x or needs_branch or any(needs_norm)
        dnorm, dweight, dbias = _backward_gemms(
            ctx.layer, dy, operands[2:], operands[:2], needs_dx, needs_weight, needs_bias)
        if ctx.tied_dweight is not None and needs_weight:
            ctx.tied_dweight.append(dweight)
            dweight = None
        dx = dbranch = dbranch_bias = dnorm_weight = dnorm_bias = None
        if needs_dx:
            quantization = ctx.branch_gradient if needs_branch else None
            dx, quantized, dbranch_bias, dnorm_weight, dnorm_bias = casts.norm_backward(
                dnorm, residual, mean, rstd, norm_weight, dresidual, quantization,
                with_dbranch_bias=needs_branch_bias)
            dbranch = Float8Tensor(*quantized) if quantization else dx
        ctx.layer.after_backward()
        return (dx, dbranch if needs_branch else None, dbranch_bias, dnorm_weight, dnorm_bias, dweight, dbias,
                None, None, None, None)


class _Linear(torch.autograd.Function):
    """`linear` and `activation_linear`. For `weight` see `_NormLinear`."""

    @staticmethod
    def forward(ctx, x, x_bias, weight, bias, activation, layer, x_gradient):
        before = None, None
        if activation:
            before, quantized = (x, x_bias), casts.activate(activation, x, x_bias, *layer.input)
        else:
            quantized, _ = casts.cast(x.contiguous(), *layer.input)
        ctx.save_for_backward(*before, *quantized[1:], *layer.weight[1:])
        ctx.layer, ctx.activation, ctx.x_gradient = layer, activation, x_gradient
        return forward_gemm(bias, *quantized, *layer.weight)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, x_bias, *operands = ctx.saved_tensors
        needs_x, needs_x_bias, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        dx, dweight, dbias = _backward_gemms(
            ctx.layer, dy, operands[2:], operands[:2], needs_x or needs_x_bias, needs_weight, needs_bias)
        dx_bias = None
        if ctx.activation and dx is not None:
            dx, dx_bias = casts.activate_backward(ctx.activation, dx, x, x_bias, *ctx.x_gradient)
            dx = Float8Tensor(*dx)
        ctx.layer.after_backward()
        return dx, dx_bias, dweight, dbias, None, None, None
