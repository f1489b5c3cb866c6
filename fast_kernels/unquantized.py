"""Norm and activation of a GPT without FP8: the kernels of casts.py with BF16 outputs, and autograd.

`add_norm` adds a branch to the residual and normalizes the sum; `activate` applies an activation. Each is one
kernel forward and, with the sum that gives the gradient of the bias of the GEMM before it, two backward.
PyTorch would run addition and norm as kernels of their own, each of which reads and writes all values.

Without a Hopper GPU, and in other dtypes and sizes, both are PyTorch's operations (`…_reference`).
"""

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from fast_kernels import casts
from fast_kernels.library import input_names, is_supported, is_transforming, operation

AddNormInputs = input_names("AddNormInputs", "x branch branch_bias weight bias eps")


def add_norm(x, branch, branch_bias, weight, bias, eps):
    """Return residual = x + branch and its norm, both (N, C). branch_bias: the bias that the branch contains,
    which is here to get its gradient, or None. For the other arguments see `casts.norm`."""
    is_too_wide = x.shape[-1] > casts.MAX_WIDTH
    if is_too_wide or not _runs_kernels(x, branch, branch_bias, weight, bias):
        return add_norm_reference(x, branch, branch_bias, weight, bias, eps)
    x = x.contiguous()
    if branch is not None:
        branch = branch.contiguous()
    residual, y, _, _ = _add_norm(x, branch, branch_bias, weight, bias, eps)
    if branch is None:
        residual = x  # an operation must not return its input
    return residual, y


def add_norm_reference(x, branch, branch_bias, weight, bias, eps):
    """`add_norm` in plain PyTorch."""
    residual = x
    if branch is not None:
        residual = x + with_gradient_of(branch_bias, branch)
    if bias is None:
        return residual, F.rms_norm(residual, weight.shape, weight, eps)
    return residual, F.layer_norm(residual, weight.shape, weight, bias, eps)


def with_gradient_of(bias, y):
    """Return y, (N, C), plus zero, through which autograd gives `bias`, (C,) or None, its gradient. The bias
    is in y already."""
    if bias is None:
        return y
    return y + (bias - bias.detach())


def activate(activation, x, bias):
    """Return activation(x), (N, D). bias: the bias that x contains, which is here to get its gradient, or
    None. For the other arguments see `casts.activate`."""
    is_uneven = activation in casts.GATED and x.shape[-1] % 32 != 0  # its halves are not multiples of 16
    if is_uneven or not _runs_kernels(x, bias):
        return activate_reference(activation, x, bias)
    return _activate_bf16(activation, x.contiguous(), bias)


def activate_reference(activation, x, bias):
    """`activate` in plain PyTorch."""
    return casts.activation_reference(activation, with_gradient_of(bias, x))


def _runs_kernels(x, *others):
    """Return whether the kernels take x (N, C) and the other tensors (None is skipped). Without a GPU that is
    Triton's interpreter, in tests."""
    has_fitting_sizes = x.dim() == 2 and x.shape[0] > 0 and x.shape[0] % 16 == 0 and x.shape[1] % 16 == 0
    is_off_the_gpu = not x.is_cuda and torch.cuda.is_available()
    if not has_fitting_sizes or is_off_the_gpu or not is_supported():
        return False
    if not torch.compiler.is_compiling() and _is_transformed():
        return False
    return all(tensor is None or tensor.dtype == torch.bfloat16 for tensor in (x, *others))


def _is_transformed():
    """Return whether torch.func or forward-mode differentiation is active: operations do not support them."""
    return is_transforming() or forward_ad._current_level >= 0


def _setup_add_norm(ctx, inputs, output):
    inputs = AddNormInputs(*inputs)
    residual, _, mean, rstd = output
    if inputs.branch is None:
        residual = inputs.x
    ctx.save_for_backward(residual, inputs.weight, inputs.bias, mean, rstd)
    ctx.eps = inputs.eps
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate_add_norm(ctx, dresidual, dy, dmean, drstd):
    """Return the gradients of `_add_norm`'s arguments. dresidual, dy: None if that output was not used."""
    needs = AddNormInputs(*ctx.needs_input_grad)
    dweight = dbias = dbranch_bias = None
    if dy is None:
        dx = dresidual
    elif torch.is_grad_enabled():  # create_graph=True
        dx, dweight, dbias = _differentiate_norm_in_pytorch(ctx, dresidual, dy)
    else:
        residual, weight, bias, mean, rstd = ctx.saved_tensors
        if bias is None:
            mean = None
        if dresidual is not None:
            dresidual = dresidual.contiguous()
        norm = casts.norm_backward(
            dy.contiguous(), residual, mean, rstd, weight, dresidual, with_dbranch_bias=needs.branch_bias)
        dx = norm.dx
        dbranch_bias = norm.dbranch_bias
        dweight = norm.dweight
        dbias = norm.dbias
    if needs.branch_bias and dbranch_bias is None:
        dbranch_bias = dx.sum(0)
    dbranch = dx if needs.branch else None  # the same tensor, which autograd does not write to
    return tuple(AddNormInputs(
        x=dx, branch=dbranch, branch_bias=dbranch_bias, weight=dweight, bias=dbias))


def _differentiate_norm_in_pytorch(ctx, dresidual, dy):
    """Return the gradients of the residual and of the norm's weight and bias, to differentiate again."""
    residual, weight, bias, _, _ = ctx.saved_tensors
    _, y = add_norm_reference(residual, None, None, weight, bias, ctx.eps)
    dx, dweight, dbias = _gradients_in_pytorch(y, dy, [residual, weight, bias])
    if dx is None:  # the residual needs no gradient
        dx = dresidual
    elif dresidual is not None:
        dx = dx + dresidual
    return dx, dweight, dbias


@operation(
    "(Tensor x, Tensor? branch, Tensor? branch_bias, Tensor weight, Tensor? bias, float eps) "
    "-> (Tensor residual, Tensor y, Tensor mean, Tensor rstd)", _setup_add_norm, _differentiate_add_norm)
def _add_norm(x, branch, branch_bias, weight, bias, eps):
    """`add_norm` as an operation. residual is (0,) without a branch; mean and rstd are (N,), mean of RMSNorm
    (0,)."""
    residual, y, mean, rstd = casts.norm_bf16(x, branch, weight, bias, eps)
    if branch is None:
        residual = x.new_empty(0)
    if mean is None:
        mean = rstd.new_empty(0)
    return residual, y, mean, rstd


def _setup_activate(ctx, inputs, output):
    ctx.activation, x, bias = inputs
    ctx.save_for_backward(x, bias)


def _differentiate_activate(ctx, dy):
    x, bias = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        y = activate_reference(ctx.activation, x, bias)
        return None, *_gradients_in_pytorch(y, dy, [x, bias])
    dx, dbias = casts.activate_backward_bf16(
        ctx.activation, dy.contiguous(), x, with_dbias=ctx.needs_input_grad[2])
    return None, dx, dbias


@operation("(str activation, Tensor x, Tensor? bias) -> Tensor", _setup_activate, _differentiate_activate)
def _activate_bf16(activation, x, bias):
    """`activate` as an operation."""
    return casts.activate_bf16(activation, x)


def _gradients_in_pytorch(y, dy, inputs):
    """Return the gradients of the inputs, which can be differentiated again; None for one that needs none."""
    needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = torch.autograd.grad(y, needed, dy, create_graph=True)
    gradients = dict(zip(map(id, needed), found))
    return [gradients.get(id(tensor)) for tensor in inputs]
