"""Norm and activation of a GPT without FP8, as autograd functions on the kernels of casts.py.

`add_norm` adds a branch and its bias to the residual and normalizes the sum; `activate` adds a bias and
applies an activation. Each is one kernel, and its backward pass sums the gradient of the bias, too. PyTorch
takes a kernel for every step, each of which reads and writes memory again.

Where the kernels do not run, both compute the same with PyTorch's operations: in other dtypes and sizes, on
other GPUs, and under torch.compile, which fuses these operations itself.
"""

import torch
import torch.nn.functional as F

from fast_kernels import casts
from fast_kernels.library import is_supported_device, is_tracing


def add_norm(x, branch, branch_bias, weight, bias, eps):
    """Return residual = x + branch + branch_bias and its norm, both (N, C). For the arguments see
    `casts.norm`."""
    if _runs_kernels(x, branch, branch_bias, weight, bias) and x.shape[1] <= casts.MAX_WIDTH:
        return _AddNorm.apply(x, branch, branch_bias, weight, bias, eps)
    return add_norm_reference(x, branch, branch_bias, weight, bias, eps)


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
    if _runs_kernels(x, bias):
        return _Activate.apply(activation, x, bias)
    return activate_reference(activation, x, bias)


def activate_reference(activation, x, bias):
    """`activate` in plain PyTorch."""
    return casts.activation_reference(activation, x if bias is None else x + bias)


def _runs_kernels(x, *others):
    """Return whether the kernels take x (N, C) and the other tensors, or None."""
    if is_tracing() or not is_supported_device(x):
        return False
    has_fitting_sizes = x.shape[0] > 0 and x.shape[0] % 16 == 0 and x.shape[1] % 32 == 0
    tensors = [x, *(tensor for tensor in others if tensor is not None)]
    return has_fitting_sizes and all(tensor.dtype == torch.bfloat16 for tensor in tensors)


class _AddNorm(torch.autograd.Function):
    """`add_norm`."""

    @staticmethod
    def forward(ctx, x, branch, branch_bias, weight, bias, eps):
        inputs = x, branch, branch_bias, weight, bias
        x = x.contiguous()
        if branch is not None:
            branch = branch.contiguous()
        residual, y, mean, rstd = casts.norm_bf16(x, branch, branch_bias, weight, bias, eps)
        if branch is None:
            residual = x.view_as(x)  # an output that is not an input
        ctx.save_for_backward(*inputs, residual, mean, rstd)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return residual, y

    @staticmethod
    def backward(ctx, dresidual, dy):
        *inputs, residual, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            outputs = add_norm_reference(*inputs, ctx.eps)
            return (*_gradients(ctx, outputs, inputs, (dresidual, dy)), None)
        needs_x, needs_branch, needs_branch_bias, *_ = ctx.needs_input_grad
        if dy is None:  # only the sum was used
            dbranch_bias = dresidual.sum(0) if needs_branch_bias else None
            return dresidual, dresidual if needs_branch else None, dbranch_bias, None, None, None
        if dresidual is not None:
            dresidual = dresidual.contiguous()
        weight = inputs[3]
        dx, _, dbranch_bias, dweight, dbias = casts.norm_backward(
            dy.contiguous(), residual, mean, rstd, weight, dresidual, with_dbranch_bias=needs_branch_bias)
        return dx, dx if needs_branch else None, dbranch_bias, dweight, dbias, None


class _Activate(torch.autograd.Function):
    """`activate`."""

    @staticmethod
    def forward(ctx, activation, x, bias):
        ctx.save_for_backward(x, bias)
        ctx.activation = activation
        return casts.activate_bf16(activation, x.contiguous(), bias)

    @staticmethod
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            outputs = activate_reference(ctx.activation, x, bias),
            return None, *_gradients(ctx, outputs, (x, bias), (dy,), first=1)
        dx, dbias = casts.activate_backward_bf16(ctx.activation, dy.contiguous(), x.contiguous(), bias)
        return None, dx, dbias


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
