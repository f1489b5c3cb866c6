"""Acceleration of `model_te_optimized.py` on a Hopper GPU, as one call on a model that works without it.

    from fast_kernels import accelerate
    report = accelerate(model)      # in place
    print(report)                   # what was replaced, and why other parts were not

The weights, the state_dict and, within rounding, the numbers stay the same. Each part is one file:

- block.py       the training pass under delayed scaling, with casts.py, embedding.py and gemm.py
- attention.py   FlashAttention on the packed QKV tensor, with QK-norm and RoPE in one kernel
- loss.py        cross-entropy whose gradient is written in FP8
- adam.py        AdamW with clipping in one pass; an optimizer, which `accelerate` does not touch
- support.py     which models and passes the kernels support, and why any other falls back to the modules
"""

import importlib.util
import types
from dataclasses import dataclass

from fast_kernels import support

# The largest K of a dgrad GEMM that may use fast accumulation. Up to it, in the median GEMM of models in
# training, the FP8 tensor-core accumulator adds less error than the rounding to BF16 after it, and about as
# much in the worst (results/accumulation.json). The K of a wgrad GEMM is the number of tokens, where it would
# add about 3 %.
DGRAD_FAST_ACCUM_K = 3072


@dataclass
class Report:
    """What `accelerate` did, part by part: "" where the kernels run, else the reason why they do not."""

    blocks: str = ""
    attention: str = ""
    loss: str = ""
    dgrad_fast_accum_k: int = 0
    logits_rounding: str = "nearest"

    def __str__(self):
        parts = {"blocks": self.blocks, "attention": self.attention, "loss": self.loss}
        on = [part for part, reason in parts.items() if not reason]
        if not on and len(set(parts.values())) == 1:
            return f"fast kernels are off: {self.blocks}"
        off = [f"{part} ({reason})" for part, reason in parts.items() if reason]
        line = f"fast kernels: {', '.join(on) or 'none'} on" + (f"; off: {', '.join(off)}" if off else "")
        if not self.blocks and self.dgrad_fast_accum_k:
            gemms = f"dgrad GEMMs with K up to {self.dgrad_fast_accum_k:,}"
            line += f"; {gemms} use fast accumulation where it is faster"
        if not self.loss and self.logits_rounding != "nearest":
            line += "; the FP8 gradient of the logits is rounded stochastically"
        return line


def accelerate(
    model, *, blocks=True, attention=True, loss=True, dgrad_fast_accum_k=DGRAD_FAST_ACCUM_K,
    logits_rounding="nearest",
) -> Report:
    """Replace parts of a model of model_te_optimized.py by the kernels, in place.

    Passes that the kernels are not made for (evaluation, another recipe, frozen parameters) fall back
    to the modules; a warning says so once for each reason. So does a part whose methods, modules or hooks
    were edited, before this call or after it.

    Args:
        blocks: replace the training pass of the embedding, the blocks and lm_head.
        attention: replace attention, where the model uses FlashAttention.
        loss: replace the cross-entropy.
        dgrad_fast_accum_k: the largest K of a dgrad GEMM that may use FP8 fast accumulation, which is then
            used where it is faster. 0: never, as in Transformer Engine's recipe.
        logits_rounding: how the kernel of the loss rounds the logits' gradient to FP8, "nearest" or
            "stochastic".

    Returns:
        A Report, which prints as one line.

    Raises:
        ValueError: dgrad_fast_accum_k is negative, or logits_rounding unknown.
    """
    if dgrad_fast_accum_k < 0:
        raise ValueError(
            f"dgrad_fast_accum_k={dgrad_fast_accum_k}: must be 0 or more; {DGRAD_FAST_ACCUM_K} works"
        )
    if logits_rounding not in ("nearest", "stochastic"):
        raise ValueError(f"logits_rounding={logits_rounding!r}: must be nearest or stochastic")
    reason = support.structure_reason(model)
    if not reason and importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed"
    if reason:
        return Report(reason, reason, reason)
    _undo(model)
    model.dgrad_fast_accum_k, model.logits_rounding = dgrad_fast_accum_k, logits_rounding
    return Report(
        _replace_blocks(model) if blocks else "not asked for",
        _replace_attention(model) if attention else "not asked for",
        _replace_loss(model) if loss else "not asked for",
        dgrad_fast_accum_k,
        logits_rounding if _head_is_in_fp8(model) else "nearest",
    )


def _head_is_in_fp8(model):
    """Whether the loss writes the logits' gradient in FP8."""
    return model.config.use_fp8 and model.config.fp8_lm_head and model.fp8_recipe.delayed()


def _undo(model):
    """Remove what an earlier call has put in place, or a pickle of an accelerated model."""
    methods = [(model, "forward"), (model, "cross_entropy"), *((block.attn, "mix") for block in model.blocks)]
    for module, name in methods:
        if support.method_of(module, name) is getattr(type(module), name):
            vars(module).pop(name, None)


def _replace_blocks(model):
    from fast_kernels import block  # needs Triton

    if "forward" in vars(model):
        return "the forward method of the model was replaced"
    model.forward = types.MethodType(block.forward, model)
    return support.unsupported_reason(model, is_reported=True)


def _replace_attention(model):
    from fast_kernels import block  # needs Triton

    attentions = [transformer_block.attn for transformer_block in model.blocks]
    for attention in attentions:
        if attention.kernel != "flash":
            return f"{attention.kernel} is used, not FlashAttention"
        reason = support.attention_reason(attention)
        if reason:
            return reason
    for attention in attentions:
        attention.takes_packed_attention = True  # see `support.takes_attention`
        attention.mix = types.MethodType(block.mix, attention)
    return ""


def _replace_loss(model):
    from fast_kernels import block  # needs Triton

    reason = support.loss_reason(model)
    if reason:
        return reason
    model.takes_fast_loss = True  # see `support.takes_loss`
    model.cross_entropy = types.MethodType(block.cross_entropy, model)
    return "" if model.wte.weight.is_cuda else "the model is not on a GPU"
