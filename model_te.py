"""GPT in FP8 on NVIDIA Transformer Engine (TE), from `te.TransformerLayer`: the least code.

Copy this file and you have the model. It needs torch and TE; where TE or a GPU is missing, `te_reference.py`
beside it does the same in plain PyTorch. What is worth noticing:

- A block is one TE module: norms, QKV, attention with TE's own choice of kernel, output projection, MLP,
  dropout, both residual additions.
- Mind its defaults, hence the arguments: dropout of 0.1 in two places, sequence before batch, weights with a
  standard deviation of 0.023, and three parameters for QKV. `fuse_qkv_params=True,
  qkv_weight_interleaved=False` is one weight, the rows of q, then k, then v, as in the sibling models; only a
  single weight can be kept in FP8.
- What happens inside is what `model_te_fused.py` writes out, and what cannot be changed here is changed
  there.
- The network is GPT-2's (Radford et al. 2019): learned positions, LayerNorm before each branch, GELU.
"""

import math
import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn

try:
    if os.environ.get("NANOTE_REFERENCE") == "1" or not torch.cuda.is_available():
        raise ImportError
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format
except ImportError:  # no GPU build here: the same modules in plain PyTorch, FP8 emulated
    import te_reference as te
    from te_reference import DelayedScaling, Format


@dataclass
class TEConfig:
    """The architecture. Checked when it is built: a ValueError names the field, its value, the rule and a
    value that works."""

    vocab_size: int = 50304  # GPT-2's 50,257, padded
    n_positions: int = 1024  # the longest sequence
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0
    attn_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    use_fp8: bool = False
    fp8_margin: int = 0
    n_inner: int | None = None  # width of the MLP; None: 4 n_embd
    bias: bool = True
    tie_embeddings: bool = True  # the output head shares the embedding's weight
    fp8_lm_head: bool = True  # False: the output head stays in high precision
    fp8_skip_first: int = 0  # so many blocks at the start stay in high precision,
    fp8_skip_last: int = 0  # and so many at the end

    def __post_init__(self):
        def check(ok, field, rule, works):
            if not ok:
                raise ValueError(
                    f"{type(self).__name__}.{field}={getattr(self, field)!r}: {rule}; {works} works"
                )

        for field in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            check(
                getattr(self, field) >= 1, field, "must be 1 or more",
                type(self).__dataclass_fields__[field].default,
            )
        for field in ("dropout", "attn_dropout"):
            check(0 <= getattr(self, field) < 1, field, "must be at least 0 and less than 1", 0.0)
        padded, fast = -(-self.vocab_size // 32) * 32, -(-self.vocab_size // 128) * 128
        check(
            self.vocab_size % 32 == 0,
            "vocab_size",
            "must be a multiple of 32",
            f"{self.vocab_size} → {fast} (a multiple of 128, which multiplies fastest)"
            + (f" or {padded}" if padded != fast else ""),
        )
        check(self.n_embd % self.n_head == 0, "n_embd", f"must be a multiple of n_head={self.n_head}",
              -(-self.n_embd // self.n_head) * self.n_head)
        self.n_kv_head, self.head_dim = self.n_head, self.n_embd // self.n_head
        if self.n_inner is None:
            self.n_inner = 4 * self.n_embd
        check(self.n_inner >= 1, "n_inner", "must be 1 or more", 4 * self.n_embd)
        for field in ("fp8_skip_first", "fp8_skip_last"):
            check(
                0 <= getattr(self, field) <= self.n_layer, field, f"must be from 0 to n_layer={self.n_layer}",
                1,
            )
        check(
            self.fp8_skip_first + self.fp8_skip_last <= self.n_layer, "fp8_skip_first",
            f"with fp8_skip_last={self.fp8_skip_last} more blocks than n_layer={self.n_layer}",
            self.n_layer - self.fp8_skip_last,
        )
        if self.use_fp8:  # what an FP8 matrix product needs of its dimensions
            for field, size in (("n_embd", self.n_embd), ("n_inner", self.n_inner)):
                check(
                    size % 16 == 0, field, f"FP8 needs dimensions divisible by 16, not {size}",
                    -(-getattr(self, field) // 16) * 16,
                )

    def in_fp8(self, layer):
        return self.fp8_skip_first <= layer < self.n_layer - self.fp8_skip_last


class Block(te.TransformerLayer):
    """x + attention, then x + MLP; both normalise their input themselves. (B, S, n_embd) -> (B, S, n_embd).
    """

    def __init__(self, config):
        super().__init__(
            config.n_embd, config.n_inner, config.n_head, layernorm_epsilon=config.layernorm_epsilon,
            bias=config.bias, hidden_dropout=config.dropout, attention_dropout=config.attn_dropout,
            attn_input_format="bshd", fuse_qkv_params=True, qkv_weight_interleaved=False,
            init_method=normal_init, output_layer_init_method=residual_init(config),
        )

    if te.__name__ != "te_reference":  # torch.compile fails in TE's attention, on a comparison of two tuples
        forward = torch.compiler.disable(te.TransformerLayer.forward, reason="TE's attention is no graph")


class TEGPT2Model(nn.Module):
    """GPT. `model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy,
    () float32.

    input_ids, labels: (B, S) int64; labels are shifted already, -100 is ignored. `fp8_recipe` may be replaced
    before the first pass. In FP8, B·S must be divisible by 8, and by 16 when training (TE's matrix products
    ask for it).
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fp8_recipe = DelayedScaling(
            margin=config.fp8_margin, fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo="max"
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"  # where TE makes its parameters
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, device=device)
        normal_init(self.wte.weight)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd, device=device)
        normal_init(self.wpe.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layer):
            with nullcontext() if config.in_fp8(layer) else te.quantized_model_init(enabled=False):
                self.blocks.append(Block(config))
        keep_precision = config.tie_embeddings or not config.fp8_lm_head  # an embedding cannot be kept in FP8
        with te.quantized_model_init(enabled=False) if keep_precision else nullcontext():
            self.lm_head = te.LayerNormLinear(
                config.n_embd, config.vocab_size, eps=config.layernorm_epsilon, bias=False,
                init_method=normal_init,
            )
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, labels=None, is_first_microbatch=None):
        """`is_first_microbatch`: under gradient accumulation, True for the first micro-batch of a step and
        False for the others, so that weights are cast to FP8 once a step."""
        config = self.config
        if torch.compiler.is_compiling() and config.use_fp8 and self.fp8_recipe.delayed():
            return run_uncompiled(self, input_ids, labels, is_first_microbatch)
        batch, length = input_ids.shape
        if length > config.n_positions:
            raise ValueError(
                f"input_ids: {length} positions, but n_positions={config.n_positions}; shorten the sequence"
            )
        if config.use_fp8:
            multiple = 16 if torch.is_grad_enabled() else 8
            if batch * length % multiple:
                raise ValueError(
                    f"input_ids {batch} x {length} = {batch * length} tokens: FP8 needs a multiple of {multiple}; "
                    f"{-(-batch * length // multiple) * multiple} tokens work, or use_fp8=False"
                )
        positions = torch.arange(length, device=input_ids.device)

        x = self.wte(input_ids) + self.wpe(positions)
        x = self.dropout(x)
        with te.autocast(enabled=config.use_fp8, recipe=self.fp8_recipe):
            for layer, block in enumerate(self.blocks):
                with (
                    nullcontext()
                    if config.in_fp8(layer)
                    else te.autocast(enabled=False, recipe=self.fp8_recipe)
                ):
                    x = block(x, is_first_microbatch=is_first_microbatch)
            with te.autocast(enabled=config.use_fp8 and config.fp8_lm_head, recipe=self.fp8_recipe):
                logits = self.lm_head(x, is_first_microbatch=is_first_microbatch)
        if labels is None:
            return logits
        return te.parallel_cross_entropy(logits, labels, reduce_loss=True).reshape(())


@torch.compiler.disable(reason="Transformer Engine cannot trace DelayedScaling")
def run_uncompiled(model, *args):
    """Run the class's forward uncompiled: torch.compile does not see TE update scales and amax histories."""
    warnings.warn("torch.compile: Transformer Engine cannot trace DelayedScaling, the model runs uncompiled; "
                  "model.fp8_recipe = Float8CurrentScaling() can be compiled", stacklevel=2)
    return TEGPT2Model.forward(model, *args)  # not model.forward, which a subclass may have replaced


normal_init = partial(nn.init.normal_, mean=0.0, std=0.02)  # GPT-2's


def residual_init(config):
    """GPT-2's for what is added to the residual stream: smaller with depth, two additions a layer."""
    return partial(nn.init.normal_, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
