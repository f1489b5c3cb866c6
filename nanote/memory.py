"""Save memory in training: keep activations on the host (--offload-activations), compute the loss in chunks.

Both are applied to a model from outside and change no result but for rounding.
"""
from functools import partial

import torch

from nanote.recipes import round_up, te


def offload_activations(model, blocks) -> None:
    """Keep what the first `blocks` blocks save in host memory, by Transformer Engine, which counts blocks."""
    n_layer = len(getattr(model, "blocks", ()))
    if not blocks < n_layer or getattr(model.config, "gradient_checkpointing", False):
        raise ValueError(f"--offload-activations {blocks}: must be less than the model's {n_layer} blocks, "
                         "and 0 with --gradient-checkpointing; leave it out")
    context, wait = te.get_cpu_offload_context(True, blocks, n_layer)

    def enter(block, inputs):
        if block.training and torch.is_grad_enabled():
            context.__enter__()

    def leave(block, inputs, output):
        if block.training and torch.is_grad_enabled():
            context.__exit__(None, None, None)
            return wait(output)

    for block in model.blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)


def chunk_loss(model, chunks) -> None:
    """Compute `model.output` in `chunks` chunks of the tokens if labels are given.

    Each chunk goes forward and at once backward, so that only one chunk of logits exists at a time and
    nothing is computed twice. To delayed scaling the chunks are one pass, with one row of the amax history.
    """
    if not hasattr(type(model), "output"):
        raise ValueError(f"--loss-chunks {chunks}: {type(model).__name__} has no method output(x, labels, "
                         "is_first_microbatch), as the model files have; leave it out")
    model.output = partial(_chunked_output, model, type(model).output, chunks)


@torch.compiler.disable  # it goes backward inside a forward pass
def _chunked_output(model, output, chunks, x, labels=None, is_first_microbatch=None, *others):
    """Return output(model, x, labels, …): logits, or the loss, computed in chunks."""
    if labels is None:
        return output(model, x, labels, is_first_microbatch, *others)
    is_tensor, labels, needs_grad = torch.is_tensor(x), labels.flatten(), torch.is_grad_enabled()
    hidden = x.flatten(0, 1) if is_tensor else x.value()  # of the stream of model_te_fast
    # FP8 GEMMs need multiples of 16 rows, MXFP8's of 32
    rows = round_up((len(hidden) + chunks - 1) // chunks, 32)
    count, total = (labels != -100).sum().clamp(min=1), 0.0
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # wgrad GEMMs must return gradients: those of a chunk are not yet those of the step
    main_grads = {p: vars(p).pop("main_grad") for p in parameters if needs_grad and hasattr(p, "main_grad")}
    sums, d_hidden = {}, []  # {parameter of the head: its gradient in float32}
    for i, (chunk, y) in enumerate(zip(hidden.split(rows), labels.split(rows))):
        # Evaluation leaves the FP8 weights of training as they are
        first = i == 0 and is_first_microbatch is not False if needs_grad else None
        chunk = chunk.detach().requires_grad_(needs_grad)
        part = chunk[None] if is_tensor else type(x)(chunk)
        loss = output(model, part, y[None], first) * ((y != -100).sum() / count)
        if needs_grad:
            inputs = [chunk, *(sums or parameters)]
            d_chunk, *gradients = torch.autograd.grad(loss, inputs, allow_unused=not sums)
            d_hidden.append(d_chunk)
            for parameter, gradient in zip(inputs[1:], gradients):
                if parameter in sums:
                    sums[parameter].add_(gradient)
                elif gradient is not None:
                    sums[parameter] = gradient.to(torch.float32, copy=True)
        total = total + loss.detach()
    if not needs_grad:
        return total
    for parameter, main_grad in main_grads.items():
        parameter.main_grad = main_grad
    gradients = [torch.cat(d_hidden), *(sum_.to(parameter.dtype) for parameter, sum_ in sums.items())]
    return _WithGradients.apply(total, gradients, hidden, *sums)


class _WithGradients(torch.autograd.Function):
    """Return the loss; its gradients of the inputs are known already, and are only multiplied by its own."""

    @staticmethod
    def forward(ctx, loss, gradients, *inputs):
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx, d_loss):
        return None, None, *(gradient * d_loss for gradient in ctx.saved_tensors)
