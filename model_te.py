"""GPT in FP8 on NVIDIA Transformer Engine (TE), built from `te.TransformerLayer`: the shortest of the models.

Copy this file, `model_te_optimized.py` (all that is not architecture) and an engine, one that it names.

Lesson 1 of five: what FP8 asks of a model, with a block that is one line. Next: `model_te_custom.py`.

- A block is one TE module: both norms, QKV, attention (TE chooses the backend), output projection, MLP,
  dropout and both residual additions. `model_te_fused.py` spells it out; start from there to change it.
- Some arguments override TE's defaults: dropout 0.1, sequence-first layout, weights of std 0.023, three QKV
  parameters. `fuse_qkv_params=True, qkv_weight_interleaved=False` gives one QKV weight whose rows are q, then
  k, then v, as in the other models; only a single weight can be an FP8 parameter.
- The architecture is GPT-2's (Radford et al. 2019): learned positions, pre-norm LayerNorm, GELU.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from model_te_optimized import (
    ENGINE,
    FP8Model,
    cross_entropy,
    fp8_forward,
    normal_init,
    residual_init,
    set_sizes,
    te,
)


@dataclass
class TEConfig:
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


class Block(te.TransformerLayer):
    """Residual block: x + attention(x), then x + MLP(x). (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config):
        super().__init__(
            config.n_embd, config.n_inner, config.n_head, layernorm_epsilon=config.layernorm_epsilon,
            bias=config.bias, hidden_dropout=config.dropout, attention_dropout=config.attn_dropout,
            attn_input_format="bshd", fuse_qkv_params=True, qkv_weight_interleaved=False,
            init_method=normal_init, output_layer_init_method=residual_init(config))

    if ENGINE == "te":  # torch.compile fails on a comparison of two tuples in TE's attention
        forward = torch.compiler.disable(te.TransformerLayer.forward, reason="TE's attention does not trace")


class TEGPT2Model(FP8Model):
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
        # A tied weight has no FP8 values, which nn.Embedding cannot read
        with self.fp8_weights_if(config.fp8_lm_head and not config.tie_embeddings):
            self.lm_head = te.LayerNormLinear(config.n_embd, config.vocab_size, bias=False,
                                              eps=config.layernorm_epsilon, init_method=normal_init)
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
                    x = block(x, is_first_microbatch=is_first_microbatch)
            return self.output(x, labels, is_first_microbatch)

    def output(self, x, labels=None, is_first_microbatch=None):
        """Apply the final norm and lm_head: x (B, S, n_embd) -> logits, or the loss if labels are given."""
        with self.fp8_if(self.config.fp8_lm_head):
            logits = self.lm_head(x, is_first_microbatch=is_first_microbatch)
        if labels is None:
            return logits
        return cross_entropy(logits, labels)
