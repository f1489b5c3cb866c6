"""Norm and activation of a GPT without FP8: the kernels of casts.py with BF16 outputs, and autograd.

`add_norm` adds a branch and its bias to the residual and normalizes the sum; `activate` adds a bias and
applies an activation. Each is one kernel forward and, with the sum that gives the bias's gradient, two
backward. PyTorch runs a kernel for each of these steps, which reads and writes memory again.

On another GPU, and in other dtypes and sizes, both are PyTorch's operations (`…_reference`).
"""

import torch
import torch.nn.functional as F

from fast_kernels import casts
from fast_kernels.library import is_supported_device, operation


def add_norm(x, branch, branch_bias, weight, bias, eps):
    """Return residual = x + branch + branch_bias and its norm, both (N, C). For the arguments see
    `casts.norm`."""
    is_too_wide = x.shape[1] > casts.MAX_WIDTH
    if is_too_wide or not _runs_kernels(x, branch, branch_bias, weight, bias):
        return add_norm_reference(x, branch, branch_bias, weight, bias, eps)
    x = x.contiguous()
    if branch is not None:
        branch = branch.contiguous()
    residual, y, _, _ = _add_norm(x, branch, branch_bias, weight, bias, eps)
    if branch is None:
        residual = x  # which an operation must not return
    return residual, y


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
    """Return whether the kernels take x (N, C) and the other tensors (None is skipped)."""
    if not is_supported_device(x):
        return False
    rows, columns = x.shape
    if rows == 0 or rows % 16 or columns % 32:  # 32: a gated activation has two halves
        return False
    return all(tensor is None or tensor.dtype == torch.bfloat16 for tensor in (x, *others))


def _setup_add_norm(ctx, inputs, output):
    *tensors, eps = inputs
    residual, _, mean, rstd = output
    ctx.save_for_backward(*tensors, residual, mean, rstd)
    ctx.eps = eps
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate_add_norm(ctx, dresidual, dy, dmean, drstd):
    """Return the gradients of `_add_norm`'s arguments. dresidual, dy: None if that output was not used."""
    *inputs, residual, mean, rstd = ctx.saved_tensors
    x, branch, _, weight, bias = inputs
    *needs, _ = ctx.needs_input_grad  # without eps
    _, needs_branch, needs_branch_bias, _, _ = needs
    if torch.is_grad_enabled():  # create_graph=True
        outputs = add_norm_reference(*inputs, ctx.eps)
        gradients = _gradients_in_pytorch(outputs, (dresidual, dy), inputs, needs)
        return *gradients, None
    if dy is None:
        # twice the same tensor: autograd does not write to what a backward function returns
        dbranch = dresidual if needs_branch else None
        dbranch_bias = dresidual.sum(0) if needs_branch_bias else None
        return dresidual, dbranch, dbranch_bias, None, None, None
    if branch is None:
        residual = x
    if bias is None:
        mean = None
    if dresidual is not None:
        dresidual = dresidual.contiguous()
    norm = casts.norm_backward(
        dy.contiguous(), residual, mean, rstd, weight, dresidual, with_dbranch_bias=needs_branch_bias)
    dbranch = norm.dx if needs_branch else None
    return norm.dx, dbranch, norm.dbranch_bias, norm.dweight, norm.dbias, None


@operation(
    "(Tensor x, Tensor? branch, Tensor? branch_bias, Tensor weight, Tensor? bias, float eps) "
    "-> (Tensor residual, Tensor y, Tensor mean, Tensor rstd)", _setup_add_norm, _differentiate_add_norm)
def _add_norm(x, branch, branch_bias, weight, bias, eps):
    """`add_norm` as an operation. residual is (0,) without a branch; mean and rstd are (N,), mean of RMSNorm
    (0,)."""
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
        y = activate_reference(ctx.activation, x, bias)
        _, *needs = ctx.needs_input_grad
        gradients = _gradients_in_pytorch([y], [dy], [x, bias], needs)
        return None, *gradients
    dx, dbias = casts.activate_backward_bf16(ctx.activation, dy.contiguous(), x, bias)
    return None, dx, dbias


@operation("(str activation, Tensor x, Tensor? bias) -> Tensor", _setup_activate, _differentiate_activate)
def _activate_bf16(activation, x, bias):
    """`activate` as an operation."""
    return casts.activate_bf16(activation, x, bias)


def _gradients_in_pytorch(outputs, output_gradients, inputs, needs):
    """Return the gradients of the inputs, which can be differentiated again. output_gradients: None for an
    output that was not used. needs: whether each input needs a gradient; else None is returned for it."""
    used = [(output, dy) for output, dy in zip(outputs, output_gradients) if dy is not None]
    used_outputs, used_gradients = zip(*used)
    needed = [tensor for tensor, is_needed in zip(inputs, needs) if is_needed]
    gradients = iter(torch.autograd.grad(
        used_outputs, needed, used_gradients, create_graph=True, allow_unused=True))
    return [next(gradients) if is_needed else None for is_needed in needs]
