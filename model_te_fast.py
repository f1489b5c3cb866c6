"""GPT in FP8 for a Hopper GPU: `model_te_optimized.py`, fused across modules. It needs torch and Triton.

Copy this file and the folder `fast_kernels`. The network, the parameter names and the state dict are those of
`model_te_optimized.py`. There is no dropout of attention, no choice of its kernel and no KV cache: generate
with `model_te_optimized.py`. The diff of the two files shows what is fused:

- Blocks pass a `Stream` on: the residual, and the branch still to be added to it. The kernel of the next
  norm adds them, normalizes the sum and writes it in FP8.
- A gradient is written in FP8 by the kernel that computes it, for the GEMMs that read it.
- Attention reads the packed output of the QKV GEMM and writes one packed gradient. QK-norm and RoPE are one
  kernel.
- The gradient of the logits is written in FP8. With tied embeddings, the backward pass of the embedding adds
  to lm_head's weight gradient in place.

To edit it, take plain tensors and put changed ones back:

- `branch.value()` is the output of a linear layer; `fused.Branch(x)` makes a branch.
- `stream.value()` is the residual plus the branch; `Stream(x)` makes a stream.

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

# ------------------------------------------------------------------------------
# FP8 of any model: the recipe, the region in which GEMMs run in FP8, and its rules for the input


class FP8Model(nn.Module):
    """Base class of a model in FP8."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fp8_recipe = DelayedScaling(margin=config.fp8_margin, fp8_format=Format.HYBRID,
                                         amax_history_len=1024, amax_compute_algo="max")
        self.register_state_dict_post_hook(save_fp8_state)
        self.register_load_state_dict_pre_hook(load_fp8_state)

    def autocast(self, enabled=True):
        """Return a context in which TE's GEMMs run in FP8. With enabled=False they do not, even inside
        another one."""
        return te.autocast(enabled=self.config.use_fp8 and enabled, recipe=self.fp8_recipe)

    def fp8_if(self, condition):
        """Return a context inside that of `autocast`: FP8 stays as it is if `condition`, else it is off."""
        if condition:
            # Not autocast(): the scales of gradients would then be updated after the backward pass of each
            # block, not once
            return nullcontext()
        return self.autocast(enabled=False)

    def in_fp8(self, layer):
        """Return whether the config runs this block in FP8."""
        config = self.config
        return config.fp8_skip_first <= layer < config.n_layer - config.fp8_skip_last

    def check_input(self, batch, length):
        """Raise ValueError for input_ids (batch, length) that do not fit."""
        n_positions = self.config.n_positions
        if length > n_positions:
            raise ValueError(f"input_ids: {length} positions, but n_positions={n_positions}: too long")
        tokens = batch * length
        if self.config.use_fp8 and tokens % 16:  # tokens are the K dimension of wgrad
            raise ValueError(f"input_ids {batch} x {length} = {tokens} tokens: FP8 needs a multiple of 16; "
                             f"{round_up(tokens, 16)} tokens work, or use_fp8=False")


# ------------------------------------------------------------------------------
# The architecture

normal_init = partial(nn.init.normal_, mean=0.0, std=0.02)  # as in GPT-2


def residual_init(config):  # as in GPT-2: smaller for the projections onto the residual
    return partial(nn.init.normal_, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))


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
    rope_scaling: str | None = None  # "8:1:4:8192": FACTOR:LOW:HIGH:CONTEXT of Llama 3.1; None: unscaled
    use_fp8: bool = False
    fp8_margin: int = 0
    head_dim: int | None = None  # None: n_embd / n_head
    n_inner: int | None = None  # MLP width; None: 4 n_embd, or 8/3 n_embd rounded up to 64s for swiglu
    activation: str = "gelu"  # gelu (tanh approximation) | swiglu
    bias: bool = True
    qkv_bias: bool = False  # biases of q, k and v even if `bias` is False, as in Qwen2
    tie_embeddings: bool = True  # lm_head and wte share one weight
    gradient_checkpointing: bool = False  # recompute blocks in backward: less memory, a third more compute
    fp8_lm_head: bool = True  # False: lm_head runs in high precision
    fp8_skip_first: int = 0  # run this many blocks at the start in high precision
    fp8_skip_last: int = 0  # run this many blocks at the end in high precision

    def __post_init__(self):  # LayerNormMLP checks the activation
        set_sizes(self)
        if self.rope_scaling is not None:
            read_scaling(self.rope_scaling)  # raises ValueError for a wrong one


def norm_options(config):
    """Return the arguments of TE's modules that choose their norm."""
    normalization = "RMSNorm" if config.use_rmsnorm else "LayerNorm"
    return dict(normalization=normalization, eps=config.layernorm_epsilon)


def rope_tables(positions, head_dim, theta, scaling=None):
    """Return cos and sin of position · theta^(-2i/head_dim), float32: (…, S) -> (…, S, 1, head_dim/2)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    frequencies = 1 / theta**exponents  # bit for bit as transformers computes them
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling)
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def scale_frequencies(frequencies, scaling):
    """Scale RoPE's frequencies as Llama 3.1 does, to read more tokens than the `context` of its first
    training. One with at most `low` periods in `context` tokens is divided by `factor`, one with at least
    `high` is kept, and between them it is interpolated."""
    factor, low, high, context = read_scaling(scaling)
    periods = context * frequencies / (2 * math.pi)
    kept = ((periods - low) / (high - low)).clamp(0, 1)  # the share that is not divided
    return (1 - kept) * frequencies / factor + kept * frequencies


class Attention(nn.Module):
    """Norm, QKV, (QK-norm, RoPE,) causal attention, projection: Stream -> (stream, branch).

    A Stream is flat, (B·S, n_embd); shape is (B, S)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        q_size = config.n_head * config.head_dim
        kv_size = config.n_kv_head * config.head_dim
        has_qkv_bias = config.bias or config.qkv_bias
        self.qkv = te.LayerNormLinear(
            config.n_embd, q_size + 2 * kv_size, bias=has_qkv_bias, init_method=normal_init,
            **norm_options(config))
        if config.use_qk_norm:
            self.q_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
            self.k_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
        self.proj = te.Linear(q_size, config.n_embd, bias=config.bias, init_method=residual_init(config))

    def forward(self, stream, shape, rope=None, cu_seqlens=None, is_first_microbatch=None):
        config = self.config
        batch, length = shape
        stream, qkv = fused.norm_linear(stream, self.qkv, is_first_microbatch=is_first_microbatch)
        qkv = qkv.view(batch, length, -1)  # (B, S, (n_head + 2 n_kv_head) · D)
        q_weight = None
        k_weight = None
        if config.use_qk_norm:
            q_weight = self.q_norm.weight
            k_weight = self.k_norm.weight
        y = packed_attention(
            qkv, config.n_head, config.n_kv_head, rope, q_weight, k_weight, config.layernorm_epsilon,
            cu_seqlens=cu_seqlens)
        y = y.flatten(0, 1)  # (B·S, n_head · D)
        branch = fused.linear(y, self.proj, is_first_microbatch)
        return fused.Output(stream, branch)


class MLP(te.LayerNormMLP):
    """Norm, linear, activation, linear: Stream -> (stream, branch)."""

    def forward(self, stream, is_first_microbatch=None):
        stream, hidden = fused.norm_fc1(stream, self, is_first_microbatch)
        branch = fused.activation_linear(hidden, self, is_first_microbatch)
        return fused.Output(stream, branch)


class Block(nn.Module):
    """Residual block: x + attention(x), then x + MLP(x). Stream -> Stream."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attn = Attention(config)
        self.mlp = MLP(
            config.n_embd, config.n_inner, bias=config.bias, activation=config.activation,
            init_method=normal_init, output_layer_init_method=residual_init(config), **norm_options(config))

    def forward(self, stream, shape, rope=None, cu_seqlens=None, is_first_microbatch=None):
        stream, branch = self.attn(stream, shape, rope, cu_seqlens, is_first_microbatch)
        stream = stream.add(fused.dropout(branch, self.config.dropout, self.training))
        stream, branch = self.mlp(stream, is_first_microbatch)
        return stream.add(fused.dropout(branch, self.config.dropout, self.training))


class FastGPT2Model(FP8Model):
    """GPT: `model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy.

    input_ids and labels are (B, S) int64; labels are already shifted, and -100 is ignored. `fp8_recipe` and
    `output` may be replaced before the first forward pass.

    quantizes_weights_first: whether a pass begins by quantizing all weights in one launch. Set it to False
    with fully_shard, which gathers the weights of a block when it runs: each module then quantizes its own.
    """

    quantizes_weights_first = True

    def __init__(self, config):
        super().__init__(config)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, device=device)
        normal_init(self.wte.weight)
        if not config.use_rotary:
            self.wpe = nn.Embedding(config.n_positions, config.n_embd, device=device)
            normal_init(self.wpe.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = te.LayerNormLinear(
            config.n_embd, config.vocab_size, bias=False, init_method=normal_init, **norm_options(config))
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight

    @torch.compiler.disable(reason="model_te_fast.py runs uncompiled, fastest in CUDA graphs")
    def forward(self, input_ids, labels=None, cu_seqlens=None, is_first_microbatch=None):
        """Return logits, or the loss if labels are given.

        Args:
            cu_seqlens: int32, for a packed batch: the start of each document in its B·S tokens, then B·S,
                once or more: CUDA graphs need a fixed length.
            is_first_microbatch: with gradient accumulation, True for the first micro-batch of a step and
                False for the others, which reuse its FP8 weights. None: no accumulation.
        """
        config = self.config
        batch, length = input_ids.shape
        self.check_input(batch, length)
        positions = torch.arange(length, device=input_ids.device)
        if cu_seqlens is not None:
            positions = document_positions(cu_seqlens, batch, length)

        tied_gradient = None
        if config.tie_embeddings and config.fp8_lm_head and config.use_fp8:
            # The backward pass of embed adds to lm_head's gradient of the shared weight, in place
            tied_gradient = TiedGradient()
        rope = None
        if config.use_rotary:
            rope = rope_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
            x = embed(input_ids, self.wte.weight, tied_gradient=tied_gradient)  # (B, S, n_embd)
        else:
            x = embed(input_ids, self.wte.weight, positions, self.wpe.weight, tied_gradient)
        x = self.dropout(x)
        stream = Stream(x.flatten(0, 1))
        recomputes = config.gradient_checkpointing and self.training and torch.is_grad_enabled()
        with self.autocast():
            if config.use_fp8 and self.quantizes_weights_first:
                if is_first_microbatch is not False:
                    self.quantize_weights()
                is_first_microbatch = False  # so modules do not quantize their weights again
            for layer, block in enumerate(self.blocks):
                with self.fp8_if(self.in_fp8(layer)):
                    if recomputes:
                        stream = te.checkpoint(
                            block, stream, input_ids.shape, rope, cu_seqlens, is_first_microbatch)
                    else:
                        stream = block(stream, input_ids.shape, rope, cu_seqlens, is_first_microbatch)
            return self.output(stream, labels, is_first_microbatch, input_ids.shape, tied_gradient)

    def quantize_weights(self):
        """Quantize all weights of FP8 GEMMs in one launch."""
        modules = [block for layer, block in enumerate(self.blocks) if self.in_fp8(layer)]
        if self.config.fp8_lm_head:
            modules.append(self.lm_head)
        te.quantize_weights(modules)

    def output(self, stream, labels, is_first_microbatch, shape, tied_gradient=None):
        """Apply the final norm and lm_head: Stream -> logits (B, S, vocab_size), or the loss if labels are
        given. shape: (B, S)."""
        with self.fp8_if(self.config.fp8_lm_head):
            _, logits = fused.norm_linear(
                stream, self.lm_head, tied_gradient=tied_gradient, is_first_microbatch=is_first_microbatch)
        if labels is None:
            return logits.view(*shape, -1)
        # The loss writes the gradient of the logits in FP8, as lm_head's backward pass reads it
        return cross_entropy(logits, labels.flatten(), self.lm_head.gradient_quantization())


# ------------------------------------------------------------------------------
# Sizes and choices of the config


def round_up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


def check_multiples(config, **multiples):
    """Raise ValueError unless each field of the config is a multiple of its number."""
    for field, multiple in multiples.items():
        value = getattr(config, field)
        if value % multiple == 0:
            continue
        works = round_up(value, multiple)
        deciding = ["n_head", "n_kv_head", "use_rotary", "use_fp8"]
        reason = ", ".join(f"{name}={getattr(config, name)}" for name in deciding)
        if field == "vocab_size":
            works = round_up(value, 32 if value <= 1024 else 128)  # 50,304 for GPT-2's 50,257: faster
            reason = "any FP8 recipe can then run its GEMMs"
        raise ValueError(f"{type(config).__name__}.{field}={value!r}: must be a multiple of {multiple} "
                         f"({reason}); {works} works")


def read_scaling(text):
    """Return the four numbers of `rope_scaling`. Raise ValueError for another value."""
    try:
        factor, low, high, context = map(float, text.split(":"))
        is_right = factor > 0 and 0 <= low < high and context > 0
    except (AttributeError, ValueError):  # no text, or no four numbers
        is_right = False
    if not is_right:
        raise ValueError(f"rope_scaling={text!r}: must be a text FACTOR:LOW:HIGH:CONTEXT, FACTOR above 0 and "
                         "LOW below HIGH; 8:1:4:8192 works, of Llama 3.1")
    return factor, low, high, context


def set_sizes(config):
    """Set the sizes that are None. Raise ValueError for one that GEMMs, RoPE or attention do not take."""
    if config.n_kv_head is None:
        config.n_kv_head = config.n_head
    divisors = [n for n in range(config.n_head, 0, -1) if config.n_head % n == 0]
    if config.n_kv_head not in divisors:
        raise ValueError(f"{type(config).__name__}.n_kv_head={config.n_kv_head!r}: must divide "
                         f"n_head={config.n_head}; one of {divisors} works")
    if config.n_inner is None:
        config.n_inner = 4 * config.n_embd
        if config.activation == "swiglu":  # it has a third weight: 8/3 n_embd gives as many parameters
            config.n_inner = round_up(8 * config.n_embd // 3, 64)

    gemm_multiple = 16 if config.use_fp8 else 1  # FP8 GEMMs need dimensions in multiples of 16
    width_multiple = gemm_multiple
    if config.head_dim is None:
        width_multiple = math.lcm(gemm_multiple, config.n_head)  # n_embd must divide into heads, too
        config.head_dim = config.n_embd // config.n_head
    # n_kv_head · head_dim, the size of all keys, must be a multiple of gemm_multiple
    head_multiple = gemm_multiple // math.gcd(gemm_multiple, config.n_kv_head)
    if config.use_rotary:
        head_multiple = math.lcm(head_multiple, 2)  # RoPE rotates pairs
    check_multiples(
        config, vocab_size=32, n_embd=width_multiple, n_inner=gemm_multiple, head_dim=head_multiple)


# ------------------------------------------------------------------------------
# Packed documents


def document_positions(cu_seqlens, batch, length):
    """Return each token's position in its document, (B, S) int64, as `embed` takes it."""
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=torch.int32).view(batch, length)
    document = torch.searchsorted(cu_seqlens, tokens, right=True)  # its number, from 1
    positions = tokens - cu_seqlens[document - 1]
    return positions.long()
