"""Norm and activation of a GPT without FP8: the kernels of casts.py with BF16 outputs, and autograd.

`add_norm` adds a branch and its bias to the residual and normalizes the sum; `activate` adds a bias and
applies an activation. Each is one kernel, and its backward pass sums the gradient of the bias, too. PyTorch
takes a kernel for every step, each of which reads and writes memory again.

Where the kernels do not run, in other dtypes and sizes or on another GPU, both are PyTorch's operations.
"""

import torch
import torch.nn.functional as F

from fast_kernels import casts
from fast_kernels.library import is_supported_device, operation


def add_norm(x, branch, branch_bias, weight, bias, eps):
    """Return residual = x + branch + branch_bias and its norm, both (N, C). For the arguments see
    `casts.norm`."""
    if not _runs_kernels(x, branch, branch_bias, weight, bias) or x.shape[1] > casts.MAX_WIDTH:
        return add_norm_reference(x, branch, branch_bias, weight, bias, eps)
    x = x.contiguous()
    branch = None if branch is None else branch.contiguous()
    residual, y, _, _ = _add_norm(x, branch, branch_bias, weight, bias, eps)
    return x if branch is None else residual, y


def add_norm_reference(x, branch, branch_bias, weight, bias, eps):
    """`add_norm` in plain PyTorch."""
    residual = x
    if branch_bias is not None:
        branch = branch + branch_bias
    if branch is not None:
        residual = x + branch
    if bias is None:
        return residual, F.rms_norm(residual, weight.shape, weight, eps)
    return residual, F.layer_norm(residual, weight.shape, weight, bias, eps)


def activate(activation, x, bias):
    """Return activation(x + bias), (N, D). For the arguments see `casts.activate`."""
    if not _runs_kernels(x, bias):
        return activate_reference(activation, x, bias)
    return _activate_bf16(activation, x.contiguous(), bias)


def activate_reference(activation, x, bias):
    """`activate` in plain PyTorch."""
    return casts.activation_reference(activation, x if bias is None else x + bias)


def _runs_kernels(x, *others):
    """Return whether the kernels take x (N, C) and the other tensors, or None."""
    if not is_supported_device(x):
        return False
    has_fitting_sizes = x.shape[0] > 0 and x.shape[0] % 16 == 0 and x.shape[1] % 32 == 0
    tensors = [x, *(tensor for tensor in others if tensor is not None)]
    return has_fitting_sizes and all(tensor.dtype == torch.bfloat16 for tensor in tensors)


def _setup_add_norm(ctx, inputs, output):
    *tensors, eps = inputs
    residual, _, mean, rstd = output
    ctx.save_for_backward(*tensors, residual, mean, rstd)
    ctx.eps = eps
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate_add_norm(ctx, dresidual, dy, dmean, drstd):
    *inputs, residual, mean, rstd = ctx.saved_tensors
    x, branch, _, weight, bias = inputs
    if torch.is_grad_enabled():  # create_graph=True
        outputs = add_norm_reference(*inputs, ctx.eps)
        return *_gradients(ctx, outputs, inputs, (dresidual, dy)), None
    _, needs_branch, needs_branch_bias, *_ = ctx.needs_input_grad
    if dy is None:  # only the sum was used
        dbranch_bias = dresidual.sum(0) if needs_branch_bias else None
        return dresidual, dresidual if needs_branch else None, dbranch_bias, None, None, None
    if dresidual is not None:
        dresidual = dresidual.contiguous()
    dx, _, dbranch_bias, dweight, dbias = casts.norm_backward(
        dy.contiguous(), x if branch is None else residual, None if bias is None else mean, rstd, weight,
        dresidual, with_dbranch_bias=needs_branch_bias)
    return dx, dx if needs_branch else None, dbranch_bias, dweight, dbias, None


@operation(
    "(Tensor x, Tensor? branch, Tensor? branch_bias, Tensor weight, Tensor? bias, float eps) "
    "-> (Tensor residual, Tensor y, Tensor mean, Tensor rstd)", _setup_add_norm, _differentiate_add_norm)
def _add_norm(x, branch, branch_bias, weight, bias, eps):
    """Return the residual, (0,) without a branch, its norm, and mean, (0,) for RMSNorm, and rstd, (N,)."""
    residual, y, mean, rstd = casts.norm_bf16(x, branch, branch_bias, weight, bias, eps)
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
        outputs = activate_reference(ctx.activation, x, bias),
        return None, *_gradients(ctx, outputs, (x, bias), (dy,), first=1)
    dx, dbias = casts.activate_backward_bf16(ctx.activation, dy.contiguous(), x, bias)
    return None, dx, dbias


@operation("(str activation, Tensor x, Tensor? bias) -> Tensor", _setup_activate, _differentiate_activate)
def _activate_bf16(activation, x, bias):
    return casts.activate_bf16(activation, x, bias)


def _gradients(ctx, outputs, inputs, output_gradients, first=0):
    """Return PyTorch's gradients of the inputs, which can be differentiated again; None for one that is not
    needed. The inputs are arguments of the function from the `first` on."""
    used = [(output, dy) for output, dy in zip(outputs, output_gradients) if dy is not None]
    outputs, output_gradients = zip(*used)
    needed = [tensor for tensor, is_needed in zip(inputs, ctx.needs_input_grad[first:]) if is_needed]
    gradients = iter(torch.autograd.grad(
        outputs, needed, output_gradients, create_graph=True, allow_unused=True))
    are_needed = ctx.needs_input_grad[first:first + len(inputs)]
    return [next(gradients) if is_needed else None for is_needed in are_needed]
