"""GPT in FP8 on NVIDIA Transformer Engine (TE), built from fused layers, with attention written out.

Copy this file into your project to use the model. It needs torch and TE. Without TE or a GPU,
`te_reference.py` beside it provides the same modules in plain PyTorch.

- `te.LayerNormLinear` is a norm and a linear layer; `te.LayerNormMLP` is a norm, two linear layers and the
  activation between them. Such a module knows that an FP8 GEMM reads the output of its norm or activation, so
  with delayed scaling TE writes that output in FP8 directly. Nothing is written in bfloat16 only to be read
  again and cast. `model_te_custom.py` is the same network built from single layers.
- Only the linear layers run in FP8. Attention between them is plain PyTorch in the precision of the
  activations, with the softmax in float32. It saves the S x S probabilities of every head for the backward
  pass; `model_te_advanced.py` uses a kernel that does not.
- The architecture is GPT-2's (Radford et al. 2019): learned positions, pre-norm LayerNorm, GELU.
"""

import math
import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    if os.environ.get("NANOTE_REFERENCE") == "1" or not torch.cuda.is_available():
        raise ImportError
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format
except ImportError:  # no GPU build here: the same modules in plain PyTorch, FP8 emulated
    import te_reference as te
    from te_reference import DelayedScaling, Format


@dataclass
class FusedConfig:
    """The architecture. An invalid value raises ValueError: field, value, rule, and a value that works."""

    vocab_size: int = 50304  # GPT-2's 50,257, padded
    n_positions: int = 1024  # maximum sequence length
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0
    attn_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    use_fp8: bool = False
    fp8_margin: int = 0
    n_inner: int | None = None  # MLP width; None: 4 n_embd
    bias: bool = True
    tie_embeddings: bool = True  # lm_head and wte share one weight
    fp8_lm_head: bool = True  # False: lm_head runs in high precision
    fp8_skip_first: int = 0  # run this many blocks at the start in high precision
    fp8_skip_last: int = 0  # run this many blocks at the end in high precision

    def __post_init__(self):
        for field in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            default = type(self).__dataclass_fields__[field].default
            self.check(getattr(self, field) >= 1, field, "must be 1 or more", default)
        for field in ("dropout", "attn_dropout"):
            self.check(0 <= getattr(self, field) < 1, field, "must be at least 0 and less than 1", 0.0)
        padded, fast = round_up(self.vocab_size, 32), round_up(self.vocab_size, 128)
        works = f"{self.vocab_size} → {fast} (a multiple of 128, which multiplies fastest)"
        if padded != fast:
            works += f" or {padded}"
        self.check(self.vocab_size % 32 == 0, "vocab_size", "must be a multiple of 32", works)
        rule, works = f"must be a multiple of n_head={self.n_head}", round_up(self.n_embd, self.n_head)
        self.check(self.n_embd % self.n_head == 0, "n_embd", rule, works)
        self.n_kv_head, self.head_dim = self.n_head, self.n_embd // self.n_head
        if self.n_inner is None:
            self.n_inner = 4 * self.n_embd
        self.check(self.n_inner >= 1, "n_inner", "must be 1 or more", 4 * self.n_embd)
        for field in ("fp8_skip_first", "fp8_skip_last"):
            in_range = 0 <= getattr(self, field) <= self.n_layer
            self.check(in_range, field, f"must be from 0 to n_layer={self.n_layer}", 1)
        most = self.n_layer - self.fp8_skip_last
        rule = f"with fp8_skip_last={self.fp8_skip_last} more blocks than n_layer={self.n_layer}"
        self.check(self.fp8_skip_first <= most, "fp8_skip_first", rule, most)
        if self.use_fp8:
            for field, size in (("n_embd", self.n_embd), ("n_inner", self.n_inner)):
                rule = f"FP8 needs dimensions divisible by 16, not {size}"
                self.check(size % 16 == 0, field, rule, round_up(getattr(self, field), 16))

    def check(self, ok, field, rule, works):
        if not ok:
            value = getattr(self, field)
            raise ValueError(f"{type(self).__name__}.{field}={value!r}: {rule}; {works} works")

    def in_fp8(self, layer):
        return self.fp8_skip_first <= layer < self.n_layer - self.fp8_skip_last


class Attention(nn.Module):
    """Norm, QKV, causal attention, output projection: (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        width, bias = config.n_embd, config.bias
        self.qkv = te.LayerNormLinear(
            width, 3 * width, eps=config.layernorm_epsilon, bias=bias, init_method=normal_init
        )
        self.proj = te.Linear(width, width, bias=bias, init_method=residual_init(config))

    def forward(self, x, is_first_microbatch=None):
        config = self.config
        batch, length, _ = x.shape
        qkv = self.qkv(x, is_first_microbatch=is_first_microbatch)
        qkv = qkv.view(batch, length, -1, config.head_dim)
        q, k, v = qkv.split(config.n_head, dim=2)  # each (B, S, heads, D)
        y = self.attend(q, k, v)
        return self.proj(y.reshape(batch, length, -1), is_first_microbatch=is_first_microbatch)

    def attend(self, q, k, v):
        """Compute softmax(q·kᵀ / √D)·v with a causal mask. q, k, v and the result: (B, S, n_head, D)."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, n_head, S, D)
        scores = (q @ k.transpose(2, 3)).float() / math.sqrt(q.shape[-1])  # (B, n_head, S, S): query, key
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        # softmax in float32: a sum of S exponentials needs more precision than bfloat16
        probs = F.softmax(scores.masked_fill(future, -math.inf), dim=-1).to(v.dtype)
        probs = F.dropout(probs, self.config.attn_dropout, self.training)
        return (probs @ v).transpose(1, 2)


class Block(nn.Module):
    """Residual block: x + attention(x), then x + MLP(x). (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = te.LayerNormMLP(
            config.n_embd, config.n_inner, eps=config.layernorm_epsilon, bias=config.bias, activation="gelu",
            init_method=normal_init, output_layer_init_method=residual_init(config),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, is_first_microbatch=None):
        x = x + self.dropout(self.attn(x, is_first_microbatch))
        return x + self.dropout(self.mlp(x, is_first_microbatch=is_first_microbatch))


class FusedGPT2Model(nn.Module):
    """GPT: `model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy.

    input_ids and labels are (B, S) int64. Labels are already shifted, and -100 is ignored. The loss is a
    float32 scalar. `fp8_recipe` may be replaced before the first forward pass. In FP8, B·S must be divisible
    by 16 for training and by 8 otherwise, which TE's FP8 GEMMs require.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fp8_recipe = DelayedScaling(
            margin=config.fp8_margin, fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo="max"
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"  # where TE creates its parameters
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, device=device)
        normal_init(self.wte.weight)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd, device=device)
        normal_init(self.wpe.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layer):
            with nullcontext() if config.in_fp8(layer) else te.quantized_model_init(enabled=False):
                self.blocks.append(Block(config))
        # nn.Embedding cannot read an FP8 parameter, so a tied weight stays in high precision
        fp8_weight = config.fp8_lm_head and not config.tie_embeddings
        with nullcontext() if fp8_weight else te.quantized_model_init(enabled=False):
            self.lm_head = te.LayerNormLinear(
                config.n_embd, config.vocab_size, eps=config.layernorm_epsilon, bias=False,
                init_method=normal_init,
            )
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, labels=None, is_first_microbatch=None):
        """Return logits, or the loss if labels are given.

        Args:
            is_first_microbatch: with gradient accumulation, True for the first micro-batch of a step and
                False for the others: weights are then cast to FP8 once per step.
        """
        config, recipe = self.config, self.fp8_recipe
        if torch.compiler.is_compiling() and config.use_fp8 and recipe.delayed():
            return run_uncompiled(self, input_ids, labels, is_first_microbatch)
        batch, length = input_ids.shape
        self.check_input(batch, length)
        positions = torch.arange(length, device=input_ids.device)

        x = self.wte(input_ids) + self.wpe(positions)
        x = self.dropout(x)
        with te.autocast(enabled=config.use_fp8, recipe=recipe):
            for layer, block in enumerate(self.blocks):
                with nullcontext() if config.in_fp8(layer) else te.autocast(enabled=False, recipe=recipe):
                    x = block(x, is_first_microbatch)
            with te.autocast(enabled=config.use_fp8 and config.fp8_lm_head, recipe=recipe):
                logits = self.lm_head(x, is_first_microbatch=is_first_microbatch)
        if labels is None:
            return logits
        return te.parallel_cross_entropy(logits, labels, reduce_loss=True).reshape(())

    def check_input(self, batch, length):
        n_positions, tokens = self.config.n_positions, batch * length
        if length > n_positions:
            raise ValueError(
                f"input_ids: {length} positions, but n_positions={n_positions}; shorten the sequence"
            )
        multiple = 16 if torch.is_grad_enabled() else 8  # tokens are the K dimension of wgrad
        if self.config.use_fp8 and tokens % multiple:
            raise ValueError(
                f"input_ids {batch} x {length} = {tokens} tokens: FP8 needs a multiple of {multiple}; "
                f"{round_up(tokens, multiple)} tokens work, or use_fp8=False"
            )


@torch.compiler.disable(reason="Transformer Engine cannot trace DelayedScaling")
def run_uncompiled(model, *args):
    """Run forward eagerly: torch.compile does not see TE update scales and amax histories."""
    warnings.warn(
        "torch.compile: Transformer Engine cannot trace DelayedScaling, so the model runs uncompiled; "
        "set model.fp8_recipe = Float8CurrentScaling() to compile it",
        stacklevel=2,
    )
    return FusedGPT2Model.forward(model, *args)  # not model.forward, which a subclass may override


normal_init = partial(nn.init.normal_, mean=0.0, std=0.02)  # as in GPT-2


def residual_init(config):
    """Return GPT-2's initializer for the projections onto the residual: std 0.02 / sqrt(2 n_layer)."""
    return partial(nn.init.normal_, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))


def round_up(n, multiple):
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple
