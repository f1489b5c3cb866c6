"""GPT in FP8 on NVIDIA Transformer Engine (TE), built from single layers: every operation is visible.

Copy this file, `model_te_optimized.py` (all that is not architecture) and an engine, one that it names.

Lesson 2 of five: every layer in sight, and where FP8 casts read memory once more. Next: `model_te_fused.py`.

- `te.Linear` and `te.LayerNorm` replace `nn.Linear` and `nn.LayerNorm`, and `te.autocast` around the blocks
  turns FP8 on. Start from this file if your model's layers differ from TE's: replace the linear layers.
- A `te.Linear` casts its own input to FP8: each norm and the GELU write their output in bfloat16, and the
  cast reads it again. `model_te_fused.py`, the same network built from fused modules, avoids that.
- Attention is plain PyTorch in the precision of the activations, with the softmax in float32. It saves the
  S x S probabilities of every head for backward; `model_te_advanced.py` uses a kernel that does not.
- The architecture is GPT-2's (Radford et al. 2019): learned positions, pre-norm LayerNorm, GELU.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model_te_optimized import FP8Model, cross_entropy, fp8_forward, normal_init, residual_init, set_sizes, te


@dataclass
class CustomConfig:
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

    # No fields: always GPT-2's. set_sizes reads and fills them in
    n_kv_head = None  # n_head
    head_dim = None  # n_embd / n_head
    activation = "gelu"
    use_rotary = False

    def __post_init__(self):
        set_sizes(self)


class Attention(nn.Module):
    """Norm, QKV, causal attention, output projection: (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.norm = te.LayerNorm(config.n_embd, eps=config.layernorm_epsilon)
        self.qkv = te.Linear(
            config.n_embd, 3 * config.n_embd, bias=config.bias, init_method=normal_init)
        self.proj = te.Linear(
            config.n_embd, config.n_embd, bias=config.bias, init_method=residual_init(config))

    def forward(self, x, is_first_microbatch=None):
        config = self.config
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm(x), is_first_microbatch=is_first_microbatch)
        qkv = qkv.view(batch, length, -1, config.head_dim)
        q, k, v = qkv.split(config.n_head, dim=2)  # (B, S, n_head, D)
        q = q.transpose(1, 2)  # (B, n_head, S, D)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        scores = (q @ k.transpose(2, 3)).float() / math.sqrt(config.head_dim)  # (B, n_head, queries, keys)
        is_future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(is_future, -math.inf)
        # softmax in float32: a sum of S exponentials needs more precision than bfloat16
        probs = F.softmax(scores, dim=-1).to(v.dtype)
        probs = F.dropout(probs, config.attn_dropout, self.training)
        y = (probs @ v).transpose(1, 2)
        return self.proj(y.reshape(batch, length, -1), is_first_microbatch=is_first_microbatch)


class MLP(nn.Module):
    """Norm, linear, GELU (tanh approximation), linear: (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.norm = te.LayerNorm(config.n_embd, eps=config.layernorm_epsilon)
        self.fc1 = te.Linear(
            config.n_embd, config.n_inner, bias=config.bias, init_method=normal_init)
        self.fc2 = te.Linear(
            config.n_inner, config.n_embd, bias=config.bias, init_method=residual_init(config))

    def forward(self, x, is_first_microbatch=None):
        x = self.fc1(self.norm(x), is_first_microbatch=is_first_microbatch)
        x = F.gelu(x, approximate="tanh")
        return self.fc2(x, is_first_microbatch=is_first_microbatch)


class Block(nn.Module):
    """Residual block: x + attention(x), then x + MLP(x). (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, is_first_microbatch=None):
        x = x + self.dropout(self.attn(x, is_first_microbatch))
        return x + self.dropout(self.mlp(x, is_first_microbatch=is_first_microbatch))


class CustomGPT2Model(FP8Model):
    """GPT: `model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy.
    Labels are already shifted. `OptimizedGPT2Model` says more."""

    def __init__(self, config):
        super().__init__(config)
        device = "cuda" if torch.cuda.is_available() else "cpu"  # where TE creates its parameters
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, device=device)
        normal_init(self.wte.weight)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd, device=device)
        normal_init(self.wpe.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layer):
            with self.fp8_weights_if(self.in_fp8(layer)):
                self.blocks.append(Block(config))
        self.norm = te.LayerNorm(config.n_embd, eps=config.layernorm_epsilon)
        # A tied weight has no FP8 values, which nn.Embedding cannot read
        with self.fp8_weights_if(config.fp8_lm_head and not config.tie_embeddings):
            self.lm_head = te.Linear(config.n_embd, config.vocab_size, bias=False, init_method=normal_init)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.make_picklable()

    @fp8_forward
    def forward(self, input_ids, labels=None, is_first_microbatch=None):
        """Return logits, or the loss if labels are given. With gradient accumulation, is_first_microbatch is
        True for the first micro-batch of a step and False for the others, which reuse its FP8 weights."""
        self.check_input(*input_ids.shape)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.wte(input_ids) + self.wpe(positions))  # (B, S, n_embd)
        with self.autocast():
            for layer, block in enumerate(self.blocks):
                with self.fp8_if(self.in_fp8(layer)):
                    x = block(x, is_first_microbatch)
            return self.output(x, labels, is_first_microbatch)

    def output(self, x, labels=None, is_first_microbatch=None):
        """Apply the final norm and lm_head: x (B, S, n_embd) -> logits, or the loss if labels are given."""
        x = self.norm(x)
        with self.fp8_if(self.config.fp8_lm_head):
            logits = self.lm_head(x, is_first_microbatch=is_first_microbatch)
        if labels is None:
            return logits
        return cross_entropy(logits, labels)
