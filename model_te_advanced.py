"""GPT in FP8 on NVIDIA Transformer Engine (TE), built from fused modules, with options of Llama and Qwen3.

Copy this file, `model_te_optimized.py` (all that is not architecture) and an engine, one that it names.

Lesson 4 of five: the switches of Llama and Qwen3, and a kernel for attention. Next: `model_te_optimized.py`.

- The defaults are GPT-2's. Llama is `use_rmsnorm, use_rotary, activation="swiglu", bias=False,
  tie_embeddings=False, n_kv_head=…`. Qwen3 adds `use_qk_norm` and `head_dim`.
- Norm and activation are arguments of TE's fused modules. Grouped-query attention is a narrower QKV
  projection. RoPE and QK-norm come between that projection and attention, in high precision.
- Attention is PyTorch's SDPA, which never stores the S x S probabilities. `model_te_optimized.py` adds other
  kernels, packed documents, generation and gradient checkpointing, and gives the references.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model_te_optimized import (
    FP8Model,
    apply_rope,
    check_choices,
    cross_entropy,
    fp8_forward,
    norm_options,
    normal_init,
    residual_init,
    rope_tables,
    set_sizes,
    te,
)


@dataclass
class AdvancedConfig:
    """The architecture. An invalid value raises ValueError: field, value, rule, and a value that works."""

    vocab_size: int = 50304  # GPT-2's 50,257, padded
    n_positions: int = 1024  # maximum sequence length
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None  # grouped-query attention: fewer key/value heads; None: n_head
    dropout: float = 0.0
    attn_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    use_rmsnorm: bool = False
    use_qk_norm: bool = False  # RMSNorm on each head's query and key, before RoPE
    use_rotary: bool = False  # RoPE, in Llama's half-split convention; False: learned positions
    rope_theta: float = 10000.0
    use_fp8: bool = False
    fp8_margin: int = 0
    head_dim: int | None = None  # None: n_embd / n_head
    n_inner: int | None = None  # MLP width; None: 4 n_embd, or 8/3 n_embd rounded up to 64s for swiglu
    activation: str = "gelu"  # gelu (tanh approximation) | swiglu
    bias: bool = True
    tie_embeddings: bool = True  # lm_head and wte share one weight
    fp8_lm_head: bool = True  # False: lm_head runs in high precision
    fp8_skip_first: int = 0  # run this many blocks at the start in high precision
    fp8_skip_last: int = 0  # run this many blocks at the end in high precision

    def __post_init__(self):
        check_choices(self, activation=["gelu", "swiglu"])
        set_sizes(self)


class Attention(nn.Module):
    """Norm, QKV, (QK-norm, RoPE,) causal attention, output projection: (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        q_size = config.n_head * config.head_dim
        kv_size = config.n_kv_head * config.head_dim
        self.qkv = te.LayerNormLinear(
            config.n_embd, q_size + 2 * kv_size, bias=config.bias, init_method=normal_init,
            **norm_options(config))
        if config.use_qk_norm:
            self.q_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
            self.k_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
        self.proj = te.Linear(q_size, config.n_embd, bias=config.bias, init_method=residual_init(config))

    def forward(self, x, rope=None, is_first_microbatch=None):
        config = self.config
        batch, length, _ = x.shape
        qkv = self.qkv(x, is_first_microbatch=is_first_microbatch)
        qkv = qkv.view(batch, length, -1, config.head_dim)
        q, k, v = qkv.split((config.n_head, config.n_kv_head, config.n_kv_head), dim=2)  # (B, S, heads, D)
        if config.use_qk_norm:
            q = self.q_norm(q.contiguous())
            k = self.k_norm(k.contiguous())
        if rope is not None:
            q = apply_rope(q, *rope)
            k = apply_rope(k, *rope)
        q = q.transpose(1, 2)  # (B, heads, S, D)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        dropout = config.attn_dropout if self.training else 0.0
        grouped = config.n_kv_head != config.n_head
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        y = y.transpose(1, 2)
        return self.proj(y.reshape(batch, length, -1), is_first_microbatch=is_first_microbatch)


class Block(nn.Module):
    """Residual block: x + attention(x), then x + MLP(x). (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = te.LayerNormMLP(
            config.n_embd, config.n_inner, bias=config.bias, activation=config.activation,
            init_method=normal_init, output_layer_init_method=residual_init(config), **norm_options(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, is_first_microbatch=None):
        x = x + self.dropout(self.attn(x, rope, is_first_microbatch))
        return x + self.dropout(self.mlp(x, is_first_microbatch=is_first_microbatch))


class AdvancedGPT2Model(FP8Model):
    """GPT: `model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy.
    Labels are already shifted. `OptimizedGPT2Model` says more."""

    def __init__(self, config):
        super().__init__(config)
        device = "cuda" if torch.cuda.is_available() else "cpu"  # where TE creates its parameters
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, device=device)
        normal_init(self.wte.weight)
        if not config.use_rotary:
            self.wpe = nn.Embedding(config.n_positions, config.n_embd, device=device)
            normal_init(self.wpe.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layer):
            with self.fp8_weights_if(self.in_fp8(layer)):
                self.blocks.append(Block(config))
        # A tied weight has no FP8 values, which nn.Embedding cannot read
        with self.fp8_weights_if(config.fp8_lm_head and not config.tie_embeddings):
            self.lm_head = te.LayerNormLinear(
                config.n_embd, config.vocab_size, bias=False, init_method=normal_init, **norm_options(config))
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.make_picklable()

    @fp8_forward
    def forward(self, input_ids, labels=None, is_first_microbatch=None):
        """Return logits, or the loss if labels are given. With gradient accumulation, is_first_microbatch is
        True for the first micro-batch of a step and False for the others, which reuse its FP8 weights."""
        config = self.config
        self.check_input(*input_ids.shape)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids)  # (B, S, n_embd)
        rope = None
        if config.use_rotary:
            rope = rope_tables(positions, config.head_dim, config.rope_theta)
        else:
            x = x + self.wpe(positions)
        x = self.dropout(x)
        with self.autocast():
            for layer, block in enumerate(self.blocks):
                with self.fp8_if(self.in_fp8(layer)):
                    x = block(x, rope, is_first_microbatch)
            return self.output(x, labels, is_first_microbatch)

    def output(self, x, labels=None, is_first_microbatch=None):
        """Apply the final norm and lm_head: x (B, S, n_embd) -> logits, or the loss if labels are given."""
        with self.fp8_if(self.config.fp8_lm_head):
            logits = self.lm_head(x, is_first_microbatch=is_first_microbatch)
        if labels is None:
            return logits
        return cross_entropy(logits, labels)
