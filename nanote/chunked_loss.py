"""Compute lm_head and the loss in chunks of the tokens, so that only one chunk of logits exists at a time.

It is applied to a model from outside (--loss-chunks) and changes no result but for rounding. Each
chunk's forward pass is followed by its backward pass, inside the forward pass of the model, so nothing
is computed twice. The gradients are kept until the backward pass of the model.
"""
import contextlib
import math
from functools import partial

import torch

from nanote.recipes import round_up


def chunk_loss(model, chunks) -> None:
    """Compute `model.output` in `chunks` chunks of the tokens if labels are given.

    To delayed scaling the chunks are one pass, with one row of the amax history.
    """
    if not hasattr(type(model), "output"):
        raise ValueError(f"--loss-chunks {chunks}: {type(model).__name__} has no method output(x, labels, "
                         "is_first_microbatch), as the model files have; leave it out")
    model.output = partial(_chunked_output, model, type(model).output, chunks)


@torch.compiler.disable  # it goes backward inside a forward pass
def _chunked_output(model, output, chunks, x, labels=None, is_first_microbatch=None, *others):
    """Return output(model, x, labels, …): logits, or the loss, computed in chunks.

    others: shape and tied_gradient of model_te_fast. Without tied_gradient autograd adds the two gradients of
    a tied weight.
    """
    if labels is None:
        return output(model, x, labels, is_first_microbatch, *others)
    is_stream = not torch.is_tensor(x)  # the residual of model_te_fast
    hidden = x.value() if is_stream else x.flatten(0, 1)  # (tokens, n_embd)
    labels = labels.flatten()
    label_count = (labels != -100).sum().clamp(min=1)
    rows = math.ceil(len(hidden) / chunks)
    rows = round_up(rows, 32)  # FP8 GEMMs need multiples of 16 rows, MXFP8's of 32
    chunk_pairs = zip(hidden.split(rows), labels.split(rows))

    def loss_share(chunk, chunk_labels, is_first):
        """Return what a chunk adds to the mean loss over all labels."""
        share = (chunk_labels != -100).sum() / label_count
        chunk_labels = chunk_labels[None]  # (1, rows)
        if is_stream:
            return output(model, type(x)(chunk), chunk_labels, is_first, chunk_labels.shape) * share
        return output(model, chunk[None], chunk_labels, is_first) * share

    if torch.is_grad_enabled():
        is_first = is_first_microbatch is not False
        loss, hidden_gradient, gradients = _forward_backward(model, loss_share, chunk_pairs, is_first)
        return _WithGradients.apply(loss, [hidden_gradient, *gradients.values()], hidden, *gradients)
    loss = 0.0
    for chunk, chunk_labels in chunk_pairs:
        # None: evaluation leaves the FP8 weights of training as they are
        loss = loss + loss_share(chunk, chunk_labels, None)
    return loss


def _forward_backward(model, loss_share, chunk_pairs, is_first):
    """Return the loss, the gradient of `hidden`, and {parameter of lm_head: its gradient}."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = 0.0
    hidden_gradients = []
    sums = {}  # {parameter of lm_head: its gradient in float32, summed over chunks}
    with _without_main_grad(parameters):
        for chunk, chunk_labels in chunk_pairs:
            chunk = chunk.detach().requires_grad_()
            share = loss_share(chunk, chunk_labels, is_first)
            is_first = False  # the first chunk quantizes the weights for all
            inputs = [chunk, *parameters]
            chunk_gradient, *gradients = torch.autograd.grad(share, inputs, allow_unused=True)
            hidden_gradients.append(chunk_gradient)
            for parameter, gradient in zip(parameters, gradients):
                if gradient is None:  # a parameter of another module
                    continue
                if parameter in sums:
                    sums[parameter].add_(gradient)
                else:
                    sums[parameter] = gradient.to(torch.float32, copy=True)
            loss = loss + share.detach()
    parameter_gradients = {parameter: total.to(parameter.dtype) for parameter, total in sums.items()}
    return loss, torch.cat(hidden_gradients), parameter_gradients


@contextlib.contextmanager
def _without_main_grad(parameters):
    """Remove `main_grad` of the parameters inside the context, so that wgrad GEMMs return gradients.

    Those of a chunk cannot be added to `main_grad` yet: they lack the factor of the loss's own gradient.
    """
    main_grads = {p: p.main_grad for p in parameters if hasattr(p, "main_grad")}
    for parameter in main_grads:
        del parameter.main_grad
    try:
        yield
    finally:
        for parameter, main_grad in main_grads.items():
            parameter.main_grad = main_grad


class _WithGradients(torch.autograd.Function):
    """Return a loss whose gradients are known; backward multiplies them by the loss's own."""

    @staticmethod
    def forward(ctx, loss, gradients, *inputs):
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx, d_loss):
        return None, None, *(gradient * d_loss for gradient in ctx.saved_tensors)
