"""GPT in FP8 for a Hopper GPU: `model_te_optimized.py`, fused across modules. It needs torch and Triton.

Copy this file and the folder `fast_kernels`. The network, the parameter names and the state dict are those of
`model_te_optimized.py`, without dropout of attention, other attention kernels and the KV cache: generate with
that file. Their diff shows what is fused:

- Blocks pass a `Stream` on: the residual, and the branch and bias still to be added to it. The kernel
  of the next norm adds them, normalizes the sum and writes it in FP8.
- A gradient is written in FP8 by the kernel that computes it, for the GEMMs that read it.
- Attention reads the packed output of the QKV GEMM and writes one packed gradient. QK-norm and RoPE are one
  kernel.
- The gradient of the logits is written in FP8. With tied embeddings, the backward pass of the embedding adds
  to lm_head's weight gradient in place.

To edit it: `branch.value()` is a GEMM's output plus its bias, a plain tensor, and `fused.Branch(x)` makes a
branch of a changed one; `stream.value()` is the residual plus the branch, and `Stream(x)` makes a stream.

References: those of `model_te_optimized.py`; the fusions are explained in `fast_kernels/fused.py`.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn

from fast_kernels import fused
from fast_kernels import modules as te
from fast_kernels.attention import packed_attention
from fast_kernels.embedding import TiedGradient, embed
from fast_kernels.fused import Stream
from fast_kernels.loss import cross_entropy
from fast_kernels.modules import DelayedScaling, Format
from fast_kernels.state_dict import load_fp8_state, save_fp8_state

normal_init = partial(nn.init.normal_, mean=0.0, std=0.02)  # as in GPT-2


def residual_init(config):
    """Return GPT-2's initializer for the projections onto the residual: std 0.02 / sqrt(2 n_layer)."""
    return partial(nn.init.normal_, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))


def round_up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


@dataclass
class FastConfig:
    """The architecture. An invalid value raises ValueError: field, value, rule, and a value that works."""

    vocab_size: int = 50304  # GPT-2's 50,257, padded
    n_positions: int = 1024  # maximum sequence length
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None  # grouped-query attention: fewer key/value heads; None: n_head
    dropout: float = 0.0
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
    gradient_checkpointing: bool = False  # recompute blocks in backward: less memory, a third more compute
    fp8_lm_head: bool = True  # False: lm_head runs in high precision
    fp8_skip_first: int = 0  # run this many blocks at the start in high precision
    fp8_skip_last: int = 0  # run this many blocks at the end in high precision

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        default = round_up(8 * self.n_embd // 3, 64) if self.activation == "swiglu" else 4 * self.n_embd
        self.n_inner = default if self.n_inner is None else self.n_inner
        has_own_head_dim = bool(self.head_dim)
        if not has_own_head_dim:
            self.head_dim = self.n_embd // self.n_head
        fp8 = 16 if self.use_fp8 else 1  # the dimensions of an FP8 GEMM are multiples of 16
        self.check_multiple("vocab_size", 32)
        self.check_multiple("n_embd", fp8 if has_own_head_dim else math.lcm(fp8, self.n_head))
        self.check_multiple("n_inner", fp8)
        # n_kv_head · head_dim is a dimension of a GEMM, and RoPE rotates pairs
        of_gemm = fp8 // math.gcd(fp8, self.n_kv_head)
        self.check_multiple("head_dim", math.lcm(of_gemm, 2) if self.use_rotary else of_gemm)
        heads = [n for n in range(self.n_head, 0, -1) if self.n_head % n == 0]
        if self.n_kv_head not in heads:
            raise ValueError(f"{type(self).__name__}.n_kv_head={self.n_kv_head!r}: must be one of {heads}")

    def check_multiple(self, field, multiple):
        """Raise ValueError unless a field is a multiple of this number."""
        value = getattr(self, field)
        if value % multiple:
            works = round_up(value, 128 if field == "vocab_size" else multiple)
            rule = f"{multiple} (n_head={self.n_head}, use_fp8={self.use_fp8}); {works} works"
            raise ValueError(f"{type(self).__name__}.{field}={value!r}: must be a multiple of {rule}")

    @property
    def norm(self):  # arguments of TE's modules
        return dict(normalization="RMSNorm" if self.use_rmsnorm else "LayerNorm", eps=self.layernorm_epsilon)

    def in_fp8(self, layer):
        return self.fp8_skip_first <= layer < self.n_layer - self.fp8_skip_last


def document_positions(cu_seqlens, batch, length):
    """Return each token's position in its document, (B, S) int64, as `embed` takes it."""
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=torch.int32).view(batch, length)
    document = torch.searchsorted(cu_seqlens, tokens, right=True)  # its number, from 1
    return (tokens - cu_seqlens[document - 1]).long()


def rope_tables(positions, head_dim, theta):
    """Return cos and sin of position · theta^(-2i/head_dim), for positions (S,) or (B, S).

    Each is float32, (S, 1, head_dim / 2) or (B, S, 1, head_dim / 2)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Norm, QKV, (QK-norm, RoPE,) causal attention, projection: Stream -> fused.Output."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        q_size, kv_size = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.qkv = te.LayerNormLinear(
            config.n_embd, q_size + 2 * kv_size, bias=config.bias, init_method=normal_init, **config.norm)
        if config.use_qk_norm:
            self.q_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
            self.k_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
        self.proj = te.Linear(q_size, config.n_embd, bias=config.bias, init_method=residual_init(config))

    def forward(self, stream, size, rope=None, cu_seqlens=None, is_first_microbatch=None):
        config = self.config
        q_weight = k_weight = None
        if config.use_qk_norm:
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        # qkv: (B·S, (n_head + 2 n_kv_head) · D)
        stream, qkv = fused.norm_linear(stream, self.qkv, is_first_microbatch=is_first_microbatch)
        y = packed_attention(
            qkv.view(*size, -1), config.n_head, config.n_kv_head, rope, q_weight, k_weight,
            config.layernorm_epsilon, cu_seqlens=cu_seqlens)  # (B, S, n_head · D)
        y = y.flatten(0, 1)
        return fused.Output(stream, fused.linear(y, self.proj, is_first_microbatch))


class MLP(te.LayerNormMLP):
    """Norm, linear, activation, linear: Stream -> fused.Output."""

    def forward(self, stream, is_first_microbatch=None):
        stream, hidden = fused.norm_fc1(stream, self, is_first_microbatch)
        return fused.Output(stream, fused.activation_linear(hidden, self, is_first_microbatch))


class Block(nn.Module):
    """Residual block: x + attention(x), then x + MLP(x). Stream -> Stream."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attn = Attention(config)
        self.mlp = MLP(
            config.n_embd, config.n_inner, bias=config.bias, activation=config.activation, **config.norm,
            init_method=normal_init, output_layer_init_method=residual_init(config))

    def forward(self, stream, size, rope=None, cu_seqlens=None, is_first_microbatch=None):
        stream, branch = self.attn(stream, size, rope, cu_seqlens, is_first_microbatch)
        stream = stream.add(fused.dropout(branch, self.config.dropout, self.training))
        stream, branch = self.mlp(stream, is_first_microbatch)
        return stream.add(fused.dropout(branch, self.config.dropout, self.training))


class FastGPT2Model(nn.Module):
    """GPT. `model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy,
    scalar float32.

    input_ids and labels are (B, S) int64. Labels are already shifted; -100 is ignored. `fp8_recipe` may be
    replaced before the first pass. In FP8, B·S must be divisible by 16, as FP8 GEMMs demand.

    quantizes_weights_first: whether a pass begins by quantizing all weights in one launch. Set it to False
    with fully_shard, which gathers the weights of a block when it runs: each module then quantizes its own.
    """

    quantizes_weights_first = True

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fp8_recipe = DelayedScaling(config.fp8_margin, Format.HYBRID, 1024, amax_compute_algo="max")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, device=device)
        normal_init(self.wte.weight)
        if not config.use_rotary:
            self.wpe = nn.Embedding(config.n_positions, config.n_embd, device=device)
            normal_init(self.wpe.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = te.LayerNormLinear(
            config.n_embd, config.vocab_size, bias=False, init_method=normal_init, **config.norm)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.register_state_dict_post_hook(save_fp8_state)
        self.register_load_state_dict_pre_hook(load_fp8_state)

    @torch.compiler.disable(reason="model_te_fast.py runs uncompiled, fastest in CUDA graphs")
    def forward(self, input_ids, labels=None, cu_seqlens=None, is_first_microbatch=None):
        """Compute logits, or the loss if labels are given.

        Args:
            cu_seqlens: int32, the start of each document of a packed batch in its B·S tokens, then B·S,
                repeated as needed. No token sees another document, and positions restart in each. None: a row
                is one document.
            is_first_microbatch: with gradient accumulation, True for the first micro-batch of a step and
                False for the others, so that weights are quantized once a step.
        """
        config, (batch, length) = self.config, input_ids.shape
        self.check_input(batch, length)
        positions = torch.arange(length, device=input_ids.device)
        if cu_seqlens is not None:
            positions = document_positions(cu_seqlens, batch, length)
        # FP8: the embedding's gradient is added in place to that of lm_head, which has the same weight
        tied_gradient = None
        if config.tie_embeddings and config.fp8_lm_head and config.use_fp8:
            tied_gradient = TiedGradient()
        if config.use_rotary:
            rope = rope_tables(positions, config.head_dim, config.rope_theta)
            x = embed(input_ids, self.wte.weight, tied_gradient=tied_gradient)  # (B, S, n_embd)
        else:
            rope = None
            x = embed(input_ids, self.wte.weight, positions, self.wpe.weight, tied_gradient)
        x = self.dropout(x)
        with self.autocast():
            first = self.quantize_weights(is_first_microbatch)
            stream = Stream(x.flatten(0, 1))
            for layer, block in enumerate(self.blocks):
                with nullcontext() if config.in_fp8(layer) else te.autocast(enabled=False):
                    run = partial(te.checkpoint, block) if self.recomputes() else block
                    stream = run(stream, input_ids.shape, rope, cu_seqlens, first)
            return self.output(stream, labels, first, input_ids.shape, tied_gradient)

    def autocast(self, enabled=True):
        """Return the context in which GEMMs run in FP8."""
        return te.autocast(enabled=self.config.use_fp8 and enabled, recipe=self.fp8_recipe)

    def check_input(self, batch, length):
        n_positions, tokens = self.config.n_positions, batch * length
        if length > n_positions:
            raise ValueError(
                f"input_ids: {length} positions, but n_positions={n_positions}; shorten the sequence"
            )
        if self.config.use_fp8 and tokens % 16:
            raise ValueError(
                f"input_ids {batch} x {length} = {tokens} tokens: FP8 needs a multiple of 16; "
                f"{round_up(tokens, 16)} tokens work, or use_fp8=False"
            )

    def recomputes(self):
        return self.config.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def quantize_weights(self, is_first_microbatch):
        """Quantize all FP8 weights in one launch, unless an earlier micro-batch has. Return what modules take
        as is_first_microbatch: False, since their weights are quantized."""
        config = self.config
        if not config.use_fp8 or not self.quantizes_weights_first:
            return is_first_microbatch
        if is_first_microbatch is not False:
            in_fp8 = [block for layer, block in enumerate(self.blocks) if config.in_fp8(layer)]
            if config.fp8_lm_head:
                in_fp8.append(self.lm_head)
            te.quantize_weights(in_fp8)
        return False

    def output(self, stream, labels=None, is_first_microbatch=None, size=None, tied_gradient=None):
        """Apply the final norm and lm_head: Stream -> logits (B, S, vocab_size), or with labels the loss."""
        with nullcontext() if self.config.fp8_lm_head else self.autocast(False):
            _, logits = fused.norm_linear(stream, self.lm_head, tied_gradient, is_first_microbatch)
        if labels is None:
            return logits.view(*size, -1)
        return cross_entropy(logits, labels.flatten(), self.lm_head.gradient_quantization())
