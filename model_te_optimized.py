"""GPT in FP8 on NVIDIA Transformer Engine (TE): the model to use.

Copy this file and an engine: TE, `fast_kernels/` (Hopper, without TE), or `te_reference.py` (FP8 emulated).

- A block is three TE modules: `te.LayerNormLinear` (norm and QKV), `te.Linear` (output projection) and
  `te.LayerNormMLP` (norm and both MLP layers). A norm inside the module of its GEMM writes FP8 at once.
- FP8 is a region, not a dtype. Parameters stay in BF16 (or float32). Inside `te.autocast`, TE quantizes both
  operands of every GEMM. Attention, norms, residuals and the loss stay in high precision.
- The defaults are GPT-2's. Llama is `use_rmsnorm, use_rotary, activation="swiglu", bias=False,
  tie_embeddings=False, n_kv_head=…`. Llama 3.1 adds `rope_scaling`, Qwen2 `qkv_bias`, Qwen3 `use_qk_norm`.

The file has seven parts: engine, FP8 of any model, architecture, sizes, attention kernels, frozen weights in
FP8, FP8 state. Begin with the architecture; it uses `te`, the engine's module, and `FP8Model`, which turns on
FP8.

References: GPT-2 (Radford et al. 2019), RoPE (Su et al. 2021), RMSNorm (Zhang and Sennrich 2019), SwiGLU
(Shazeer 2020), GQA (Ainslie et al. 2023), QK-norm (Henry et al. 2020), FP8 (Micikevicius et al. 2022).
"""

import math
import os
import warnings
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module, metadata, util
from inspect import signature
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

# ------------------------------------------------------------------------------
# The engine: `te` is Transformer Engine or a module with the same interface

MODULES = {"te": "transformer_engine.pytorch", "fast": "fast_kernels.modules", "reference": "te_reference"}


def best_engine():
    """Return TE on a GPU; without TE, Triton kernels on Hopper; else plain PyTorch, which emulates FP8."""
    if not torch.cuda.is_available():
        return "reference"
    if util.find_spec("transformer_engine"):
        return "te"
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if is_hopper and util.find_spec("fast_kernels") and util.find_spec("triton"):
        return "fast"
    return "reference"


def import_engine(name):
    """Return the modules of an engine and of its recipes."""
    te = import_module(MODULES[name])
    if name != "te":
        return te, te
    major, minor = metadata.version("transformer_engine").split(".")[:2]
    if (int(major), int(minor)) < (2, 18):
        raise ImportError("before Transformer Engine 2.18 the loss or its gradient is wrong")
    return te, import_module("transformer_engine.common.recipe")


ENGINE = os.environ.get("NANOTE_ENGINE") or best_engine()
if ENGINE not in MODULES:
    raise ImportError(f"NANOTE_ENGINE={ENGINE}: must be te, fast or reference; reference runs on any machine")
try:
    te, te_recipe = import_engine(ENGINE)
except Exception as error:  # a broken TE raises more than ImportError
    raise ImportError(f"engine {ENGINE}: {error!r}; NANOTE_ENGINE=reference works on any machine, with "
                      "te_reference.py beside this file; fast needs fast_kernels and a Hopper GPU, te needs "
                      "TE") from error
DelayedScaling = te_recipe.DelayedScaling
Format = te_recipe.Format


# ------------------------------------------------------------------------------
# FP8 of any model: the recipe, the region in which GEMMs run in FP8, and its rules for the input


class FP8Model(nn.Module):
    """Base class of a model in FP8. Call `make_picklable` at the end of `__init__`, and decorate `forward`
    with `fp8_forward`."""

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

    def fp8_weights_if(self, condition):
        """Return a context for creating modules. Inside a caller's te.quantized_model_init(), their weights
        become FP8 only if `condition`."""
        if condition:
            return nullcontext()
        return te.quantized_model_init(enabled=False)

    def in_fp8(self, layer):
        """Return whether the config runs this block in FP8."""
        config = self.config
        return config.fp8_skip_first <= layer < config.n_layer - config.fp8_skip_last

    def check_input(self, batch, length, past=0):
        """Raise ValueError for input_ids (batch, length), after `past` cached tokens, that do not fit."""
        n_positions = self.config.n_positions
        if past + length > n_positions:
            raise ValueError(f"input_ids: {past + length} positions, but n_positions={n_positions}: too long")
        tokens = batch * length
        multiple = 16 if torch.is_grad_enabled() else 8  # tokens are the K dimension of wgrad
        if self.config.use_fp8 and tokens % multiple:
            raise ValueError(f"input_ids {batch} x {length} = {tokens} tokens: FP8 needs a multiple of "
                             f"{multiple}; {round_up(tokens, multiple)} tokens work, or use_fp8=False")

    def make_picklable(self):
        """Remove TE's local functions, which do not pickle: initializers, masks, load_state_dict's hooks."""
        for module in self.modules():
            vars(module).pop("param_init_meta", None)
            module._load_state_dict_post_hooks.clear()
            if hasattr(module, "mask_func"):
                module.mask_func = te.utils.attention_mask_func  # a global function for TE's local one

    def _apply(self, function, recurse=True):  # .to() and .cuda() make new tensors of TE's frozen weights
        frozen = [name for name, p in self.named_parameters() if is_frozen_in_fp8(p) and is_te_tensor(p)]
        super()._apply(function, recurse)
        for name in frozen:
            mark_frozen(self.get_parameter(name))
        return self

    def __setstate__(self, state):  # of a copy or a pickle
        super().__setstate__(state)
        register_fp8_state(self)


@torch.compiler.disable(reason="TE's DelayedScaling does not trace")
def run_uncompiled(forward, *args, **options):
    warnings.warn("TE's DelayedScaling runs uncompiled; NANOTE_ENGINE=fast (Hopper) traces", stacklevel=2)
    return forward(*args, **options)


def fp8_forward(forward):
    """Decorate the `forward` of a model in FP8, so that it runs in torch.compile and torch.inference_mode."""
    @wraps(forward)
    def run(model, *args, **options):
        if torch.compiler.is_compiling():
            if ENGINE == "te" and model.config.use_fp8 and model.fp8_recipe.delayed():
                return run_uncompiled(forward, model, *args, **options)
            return forward(model, *args, **options)
        if torch.is_inference_mode_enabled():
            # The pass may create FP8 state, which must be normal tensors: training changes it later
            with torch.inference_mode(False), torch.no_grad():
                return forward(model, *args, **options)
        return forward(model, *args, **options)
    return run


# ------------------------------------------------------------------------------
# The architecture

normal_init = partial(nn.init.normal_, mean=0.0, std=0.02)  # as in GPT-2


def residual_init(config):  # as in GPT-2: smaller for the projections onto the residual
    return partial(nn.init.normal_, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))


@dataclass
class OptimizedConfig:
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
    use_pytorch_sdpa: bool = True  # the older name of attention="sdpa" (True) and "te" (False)
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
    attention: str | None = None  # sdpa (PyTorch) | te | flash | auto (the fastest); None: use_pytorch_sdpa
    gradient_checkpointing: bool = False  # recompute blocks in backward: less memory, a third more compute
    fp8_lm_head: bool = True  # False: lm_head runs in high precision
    fp8_skip_first: int = 0  # run this many blocks at the start in high precision
    fp8_skip_last: int = 0  # run this many blocks at the end in high precision

    def __post_init__(self):
        if self.attention is None:
            self.attention = "sdpa" if self.use_pytorch_sdpa else "te"
        check_choices(self, activation=["gelu", "swiglu"], attention=["sdpa", "te", "flash", "auto"])
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


def apply_rope(x, cos, sin):
    """Rotate the pairs (x[i], x[i + D/2]) of every head. x: (B, S, heads, D)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Norm, QKV, (QK-norm, RoPE,) causal attention, output projection: (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.layer = layer
        self.kernel = attention_kernel(config)
        q_size = config.n_head * config.head_dim
        kv_size = config.n_kv_head * config.head_dim
        has_qkv_bias = config.bias or config.qkv_bias
        self.qkv = te.LayerNormLinear(
            config.n_embd, q_size + 2 * kv_size, bias=has_qkv_bias, init_method=normal_init,
            **norm_options(config))
        if config.use_qk_norm:
            self.q_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
            self.k_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
        if self.kernel == "te":
            self.attention = te.DotProductAttention(
                config.n_head, config.head_dim, num_gqa_groups=config.n_kv_head,
                attention_dropout=config.attn_dropout, qkv_format="bshd", attn_mask_type="causal")
        self.proj = te.Linear(q_size, config.n_embd, bias=config.bias, init_method=residual_init(config))

    def forward(self, x, rope=None, cu_seqlens=None, mask=None, is_first_microbatch=None, kv_cache=None):
        config = self.config
        batch, length, _ = x.shape
        qkv = self.qkv(x, is_first_microbatch=is_first_microbatch)
        qkv = qkv.view(batch, length, -1, config.head_dim)
        heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        q, k, v = split_heads(qkv, heads, self.kernel)  # (B, S, heads, D)
        if config.use_qk_norm:
            q = self.q_norm(q.contiguous())
            k = self.k_norm(k.contiguous())
        if rope is not None:
            q = apply_rope(q, *rope)
            k = apply_rope(k, *rope)
        if kv_cache is not None:
            past = kv_cache.length
            end = past + length
            cache = kv_cache.kv[self.layer]  # (2, B, max_len, n_kv_head, D)
            cache[:, :, past:end] = torch.stack((k, v))
            k, v = cache[:, :, :end]
            y = self.attend_to_cache(q, k, v)
        else:
            y = self.attend(q, k, v, cu_seqlens, mask)
        return self.proj(y.reshape(batch, length, -1), is_first_microbatch=is_first_microbatch)

    def attend(self, q, k, v, cu_seqlens=None, mask=None):
        """Compute softmax(q·kᵀ / √D)·v with a causal mask.

        q: (B, S, n_head, D); k and v: (B, S, n_kv_head, D). Packed documents: SDPA takes a mask, (B, 1, S, S)
        bool, the other kernels cu_seqlens. Returns (B, S, n_head, D) or (B, S, n_head · D).
        """
        if self.runs_sdpa(q.dtype):
            return self.sdpa(q, k, v, mask, is_causal=(mask is None))
        if self.kernel == "te":
            return te_attention(self.attention, q, k, v, cu_seqlens)
        return flash_attention(q, k, v, cu_seqlens)

    def attend_to_cache(self, q, k, v):
        """Compute attention for generation: q has the last positions of k and v, which may be longer."""
        queries = q.shape[1]
        keys = k.shape[1]
        mask = None
        if 1 < queries < keys:  # one query sees all keys
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        return self.sdpa(q, k, v, mask, is_causal=(queries == keys))

    def runs_sdpa(self, dtype):
        """Return whether attention of tensors of this dtype runs on SDPA: FlashAttention has no float32."""
        return self.kernel == "sdpa" or (self.kernel == "flash" and dtype == torch.float32)

    def sdpa(self, q, k, v, mask, is_causal):
        """Run PyTorch's kernel: q (B, S, n_head, D) -> (B, S, n_head, D)."""
        config = self.config
        q = q.transpose(1, 2)  # (B, heads, S, D)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        dropout = config.attn_dropout if self.training else 0.0
        grouped = config.n_kv_head != config.n_head
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=grouped)
        return y.transpose(1, 2)


class Block(nn.Module):
    """Residual block: x + attention(x), then x + MLP(x). (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = te.LayerNormMLP(
            config.n_embd, config.n_inner, bias=config.bias, activation=config.activation,
            init_method=normal_init, output_layer_init_method=residual_init(config), **norm_options(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, cu_seqlens=None, mask=None, is_first_microbatch=None, kv_cache=None):
        x = x + self.dropout(self.attn(x, rope, cu_seqlens, mask, is_first_microbatch, kv_cache))
        return x + self.dropout(self.mlp(x, is_first_microbatch=is_first_microbatch))


def checkpoint(block, x, *args):
    """Run block(x, *args) without saving activations; the backward pass recomputes them."""
    if ENGINE == "te" and not x.requires_grad:  # x comes from frozen embeddings or blocks
        # TE's checkpoint is reentrant: parameters get gradients only if its input does
        x.requires_grad_(any(parameter.requires_grad for parameter in block.parameters()))
    return te.checkpoint(block, x, *args)


# TE 2.20 can write the gradient over the logits, not over a copy: 3 GiB for 32 x 1,024 tokens of GPT-2
CAN_OVERWRITE_LOGITS = "overwrite_input" in signature(te.parallel_cross_entropy).parameters


def cross_entropy(logits, labels):
    """Return the mean over the labels that are not -100, float32: (B, S, vocab_size), (B, S) -> ().

    With TE 2.20, uncompiled, the backward pass writes the gradient over the logits. Clone logits that are
    read after it; drop `overwrite_input` for a second loss of the same logits."""
    options = {}
    is_compiling = torch.compiler.is_compiling()  # TE would break the graph
    if CAN_OVERWRITE_LOGITS and logits.is_contiguous() and not is_compiling:
        options["overwrite_input"] = True
    loss = te.parallel_cross_entropy(logits, labels, reduce_loss=True, **options)  # (1,)
    return loss.reshape(())


class OptimizedGPT2Model(FP8Model):
    """GPT: `model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy.

    input_ids and labels are (B, S) int64; labels are already shifted, and -100 is ignored. `fp8_recipe` and
    `output` may be replaced before the first forward pass."""

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
                self.blocks.append(Block(config, layer))
        # A tied weight has no FP8 values, which nn.Embedding cannot read
        with self.fp8_weights_if(config.fp8_lm_head and not config.tie_embeddings):
            self.lm_head = te.LayerNormLinear(
                config.n_embd, config.vocab_size, bias=False, init_method=normal_init, **norm_options(config))
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.make_picklable()

    @fp8_forward
    def forward(self, input_ids, labels=None, cu_seqlens=None, is_first_microbatch=None, kv_cache=None):
        """Return logits, or the loss if labels are given.

        Args:
            cu_seqlens: int32, for a packed batch: the start of each document in its B·S tokens, then B·S,
                once or more: CUDA graphs need a fixed length.
            is_first_microbatch: with gradient accumulation, True for the first micro-batch of a step and
                False for the others, which reuse its FP8 weights. None: no accumulation.
            kv_cache: of `make_kv_cache`; input_ids are then the tokens that follow it.
        """
        config = self.config
        batch, length = input_ids.shape
        past = 0 if kv_cache is None else kv_cache.length  # cached tokens
        self.check_input(batch, length, past)
        positions = torch.arange(past, past + length, device=input_ids.device)
        mask = None
        if cu_seqlens is not None:
            if kv_cache is not None:
                raise ValueError("kv_cache supports one document per row: drop cu_seqlens")
            document, positions = locate_documents(cu_seqlens, batch, length)
            if self.blocks[0].attn.runs_sdpa(self.wte.weight.dtype):  # the other kernels take cu_seqlens
                mask = document_mask(document)

        x = self.wte(input_ids)  # (B, S, n_embd)
        rope = None
        if config.use_rotary:
            rope = rope_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        else:
            x = x + self.wpe(positions)
        x = self.dropout(x)
        recomputes = config.gradient_checkpointing and self.training and torch.is_grad_enabled()
        with self.autocast():
            for layer, block in enumerate(self.blocks):
                with self.fp8_if(self.in_fp8(layer)):
                    if recomputes:
                        x = checkpoint(block, x, rope, cu_seqlens, mask, is_first_microbatch, kv_cache)
                    else:
                        x = block(x, rope, cu_seqlens, mask, is_first_microbatch, kv_cache)
            if kv_cache is not None:
                kv_cache.length += length
            return self.output(x, labels, is_first_microbatch)

    def output(self, x, labels=None, is_first_microbatch=None):
        """Apply the final norm and lm_head: x (B, S, n_embd) -> logits, or the loss if labels are given."""
        with self.fp8_if(self.config.fp8_lm_head):
            logits = self.lm_head(x, is_first_microbatch=is_first_microbatch)
        if labels is None:
            return logits
        return cross_entropy(logits, labels)

    def make_kv_cache(self, batch_size, max_len):
        """Return an empty cache for generation. Turn FP8 off first: one token is one row, and FP8 needs 8."""
        config = self.config
        weight = self.wte.weight
        shape = (config.n_layer, 2, batch_size, max_len, config.n_kv_head, config.head_dim)
        with torch.inference_mode(False):  # as `forward` runs, which writes to it
            kv = torch.empty(shape, device=weight.device, dtype=weight.dtype)
        return SimpleNamespace(kv=kv, length=0)


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


def check_choices(config, **choices):
    """Raise ValueError unless each field of the config has one of its values."""
    for field, values in choices.items():
        value = getattr(config, field)
        if value not in values:
            raise ValueError(f"{type(config).__name__}.{field}={value!r}: must be one of {values}")


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
# Attention kernels and packed documents


def import_flash_attention():
    """Return FlashAttention's version, 4 (Hopper, Blackwell) or else 2, and its two functions, or None."""
    for version, package in ((4, "flash_attn.cute"), (2, "flash_attn")):
        with suppress(ImportError, AttributeError):
            flash = import_module(package)
            return version, flash.flash_attn_func, flash.flash_attn_varlen_func
    return None, None, None


flash_version, flash_attn_func, flash_attn_varlen_func = import_flash_attention()


def attention_kernel(config):
    """Return what `config.attention` means on this machine: sdpa, te or flash."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    if flash_version == 2:
        oldest = 8  # major version of the GPU
        narrowest = 8  # head_dim
        widest = 256
    else:  # 4, or none installed
        oldest = 9
        narrowest = 24  # gradients for heads of 16 are wrong (4.0.0b36)
        widest = 256 if major == 9 else 128
    is_on_gpu = flash_version is not None and major >= oldest
    takes_head_dim = config.head_dim % 8 == 0 and narrowest <= config.head_dim <= widest
    runs_flash = is_on_gpu and takes_head_dim and config.attn_dropout == 0
    if config.attention == "flash" and not runs_flash:
        raise ValueError("attention='flash': needs a GPU with flash-attn-4 or flash-attn, attn_dropout=0 and "
                         f"a head_dim in multiples of 8 from {narrowest} to {widest}; 'sdpa' works")
    if config.attention != "auto":
        return config.attention
    if runs_flash and ENGINE != "fast":  # fast_kernels runs FlashAttention 4 itself, in a way that traces
        return "flash"
    return "sdpa" if ENGINE == "reference" else "te"


class SplitHeads(torch.autograd.Function):
    """Split qkv (B, S, H, D). If the backward pass receives gradients of q, k and v that are parts of one
    buffer, as FlashAttention4's are, return that buffer; else concatenate them.

    Autograd always concatenates the gradients of torch.split, which takes 2 % of a step of GPT-2 124M."""

    @staticmethod
    def forward(ctx, qkv, heads):
        ctx.shape = qkv.shape
        ctx.heads = heads
        return qkv.split(heads, dim=2)

    @staticmethod
    def backward(ctx, *gradients):
        buffer = gradients[0]._base  # the tensor that this gradient is a view of, or None
        if buffer is not None and buffer.shape == ctx.shape:
            parts = buffer.split(ctx.heads, dim=2)
            if all(map(is_same_memory, gradients, parts)):
                return buffer, None
        return torch.cat(gradients, dim=2), None


def is_same_memory(x, y):
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


def split_heads(qkv, heads, kernel):
    """Split qkv (B, S, sum of heads, D). heads: (n_head, n_kv_head, n_kv_head). Returns q, k, v:
    (B, S, heads[i], D), views."""
    # Only for FlashAttention: torch.func refuses SplitHeads, but not SDPA
    runs_flash = kernel == "flash" and qkv.dtype != torch.float32  # in float32 SDPA runs, see runs_sdpa
    if runs_flash and not torch.compiler.is_compiling():
        return SplitHeads.apply(qkv, heads)
    return qkv.split(heads, dim=2)


class FlashAttention4(torch.autograd.Function):
    """Causal attention by FlashAttention 4. q: (B, S, n_head, D); k and v: (B, S, n_kv_head, D). Returns
    (B, S, n_head, D).

    Calls private functions of flash-attn-4 (4.0.0b36 tested): the public one, flash_attn_func, has no choice
    of tiles, and allocates the gradients of q, k and v one by one.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        _, length, _, head_dim = q.shape
        options = {}
        if length <= 1024 and head_dim <= 64 and torch.cuda.get_device_capability()[0] == 9:
            # On a causal mask of 1,024 tokens 192 x 128 (the default) computes 50 % too much, 128 x 128
            # 12.5 %. Wider heads have other defaults: above 96 it is 128 x 128 or smaller.
            options["tile_mn"] = (128, 128)
        flash = import_module("flash_attn.cute.interface")
        out, lse, *_ = flash._flash_attn_fwd(q, k, v, causal=True, return_lse=True, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        heads = [x.shape[2] for x in (q, k, v)]
        dqkv = q.new_empty(*q.shape[:2], sum(heads), q.shape[3])
        dq, dk, dv = dqkv.split(heads, dim=2)
        flash = import_module("flash_attn.cute.interface")
        flash._flash_attn_bwd(q, k, v, out, dout.contiguous(), lse, causal=True, dq=dq, dk=dk, dv=dv,
                              deterministic=torch.are_deterministic_algorithms_enabled())
        return dq, dk, dv


@torch.compiler.disable  # FlashAttention compiles its own kernels, which torch.compile must not trace
def flash_attention(q, k, v, cu_seqlens=None):
    if cu_seqlens is None and flash_version == 4:
        y = FlashAttention4.apply(q, k, v)
    elif cu_seqlens is None:
        y = flash_attn_func(q, k, v, causal=True)
    else:
        length = q.shape[1]
        q = q.flatten(0, 1)  # (B·S, heads, D)
        k = k.flatten(0, 1)
        v = v.flatten(0, 1)
        y = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
                                   max_seqlen_q=length, max_seqlen_k=length, causal=True)
    return y[0] if isinstance(y, tuple) else y  # version 4 also returns the log-sum-exp


def te_attention(attention, q, k, v, cu_seqlens=None):
    """Run te.DotProductAttention."""
    if cu_seqlens is None:
        return attention(q, k, v)
    length = q.shape[1]
    q = q.flatten(0, 1)  # (B·S, heads, D)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    return attention(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=cu_seqlens,
                     cu_seqlens_kv=cu_seqlens, max_seqlen_q=length, max_seqlen_kv=length)


def locate_documents(cu_seqlens, batch, length):
    """Return each token's document, numbered from 1, and its position there: (B, S) each. No shape depends on
    data, as CUDA graphs require."""
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=torch.int32).view(batch, length)
    document = torch.searchsorted(cu_seqlens, tokens, right=True)
    positions = tokens - cu_seqlens[document - 1]
    return document, positions


def document_mask(document):
    """Return SDPA's mask, causal within each document: (B, S) -> (B, 1, S, S) bool."""
    is_same_document = document[:, :, None] == document[:, None, :]
    return is_same_document.tril()[:, None]


# ------------------------------------------------------------------------------
# Weights that are not trained and stay in FP8 alone


# te_reference.py and fast_kernels/modules.py have copies of this function, for their modules
def freeze_in_fp8(module, except_for=(), keeps_transpose=True):
    """Freeze the parameters in `module`. Of the weights of te.Linear, te.LayerNormLinear and te.LayerNormMLP
    only the FP8 values stay. A weight that is frozen already does not change.

    A weight that two modules share, such as a tied embedding, stays as it is, and so does one whose sizes are
    not multiples of 16, as FP8 needs. Name a layer that runs without FP8 in `except_for`, because its weight
    would be rounded, too; then freeze it by requires_grad_(False).

    Args:
        except_for: substrings, or one; a parameter whose name contains one, such as "lora_", stays trainable.
        keeps_transpose: keep also the transpose, which the backward pass reads, two bytes a value in all.
            False: one byte a value, and each backward pass makes the transpose anew.
    """
    if ENGINE != "te":
        te.freeze_in_fp8(module, except_for, keeps_transpose)
        return
    te_modules = te.Linear, te.LayerNormLinear, te.LayerNormMLP
    excluded = (except_for,) if isinstance(except_for, str) else tuple(except_for)
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for owner_name, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if any(text in f"{owner_name}.{name}" for text in excluded):
                continue
            parameter.requires_grad_(False)
            is_weight = isinstance(owner, te_modules) and parameter.dim() == 2
            fits_fp8 = all(size % 16 == 0 for size in parameter.shape)
            is_shared = uses[id(parameter)] > 1
            if is_weight and fits_fp8 and not is_shared and not is_frozen_in_fp8(parameter):
                setattr(owner, name, make_frozen_weight(parameter, keeps_transpose))
                drops_transposes = drop_transposes in owner._backward_hooks.values()  # of its other weight
                if not keeps_transpose and not drops_transposes:
                    owner.register_full_backward_hook(drop_transposes)


def is_frozen_in_fp8(weight):
    return getattr(weight, "is_frozen_in_fp8", False)


def make_frozen_weight(weight, keeps_transpose):
    """Return a weight (out, in) as a frozen parameter: on TE, a Float8Tensor quantized by its own amax, as
    parameters of te.quantized_model_init() are."""
    tensors = import_module("transformer_engine.pytorch.tensor")
    e4m3 = import_module("transformer_engine_torch").DType.kFloat8E4M3
    quantizer = tensors.Float8CurrentScalingQuantizer(e4m3, weight.device, columnwise=keeps_transpose)
    frozen = nn.Parameter(quantizer(weight.detach()), requires_grad=False)
    mark_frozen(frozen)
    return frozen


def mark_frozen(weight):
    """Let a Float8Tensor of TE refuse to be trained, and keep its scale.

    By attributes, not by a subclass: TE's C++ code asks for the type Float8Tensor itself. copy.deepcopy keeps
    them. `.to()` and pickle make a tensor without them. FP8Model sets them again after `.to()`; save
    state_dict() instead of a pickle.
    """
    weight.is_frozen_in_fp8 = True
    weight.requires_grad_ = partial(refuse_to_train, tuple(weight.shape))
    weight.update_quantizer = keep_quantizer


def refuse_to_train(shape, requires_grad=True):
    if requires_grad:  # the same message: FrozenWeight in te_reference.py and in fast_kernels/frozen.py
        raise ValueError(f"requires_grad_: a weight {shape} is frozen in FP8, without the "
                         "bits that an update changes; name it in freeze_in_fp8(…, except_for=[…])")


def keep_quantizer(quantizer):
    """Keep the scale of the weight's own amax, where TE would set that of the module's amax history."""


def drop_transposes(module, *gradients):
    """Free the transposes of frozen weights after the backward pass of their module: a backward hook."""
    for parameter in module.parameters(recurse=False):
        if is_frozen_in_fp8(parameter):
            parameter.update_usage(columnwise_usage=False)


def frozen_weights(module):
    """Return {name: weight} of a module's own weights that are frozen in FP8."""
    return {name: p for name, p in module.named_parameters(recurse=False) if is_frozen_in_fp8(p)}


def is_te_tensor(weight):
    """Return whether a frozen weight is a Float8Tensor of TE. ENGINE does not say so: where it is "te", a
    FastGPT2Model has the frozen weights of fast_kernels."""
    return hasattr(weight, "_scale_inv")


def save_frozen_weights(module, state_dict, prefix):
    """Replace TE's frozen weights in a state dict by their values; the other engines do so themselves."""
    for name, weight in frozen_weights(module).items():
        saved = state_dict.get(prefix + name)
        if is_te_tensor(weight) and saved is not None and saved is not weight:  # with keep_vars=True it is
            state_dict[prefix + name] = weight.dequantize()


def write_frozen_scales(module):
    """Write the scales of weights that are frozen in FP8 to the module's state, where no pass sets them."""
    scaling = getattr(module, "fp8_meta", {}).get("scaling_fwd")
    if getattr(scaling, "scale", None) is None:  # another recipe
        return
    for name, weight in frozen_weights(module).items():
        scale = weight._scale_inv.reciprocal() if is_te_tensor(weight) else weight.scale
        slot = weight_slot(name)
        scaling.scale[slot:slot + 1] = scale


def weight_slot(name):
    """Return the index of a weight in `scaling_fwd`: [input, weight, output] of each GEMM."""
    return 4 if name == "fc2_weight" else 1


# ------------------------------------------------------------------------------
# FP8 state, the scales and amax histories of delayed scaling, in state dicts, copies and pickles
# (fast_kernels/state_dict.py has all but the last function again, for model_te_fast.py, which stands alone)

DIRECTIONS = "scaling_fwd", "scaling_bwd"


def save_fp8_state(model, state_dict, prefix="", metadata=None):
    """Write scales (n,) and amax histories (length, n) as tensors, in place of pickles of TE."""
    for name, module in model.named_modules():
        state_dict.pop(f"{prefix}{name}._extra_state", None)
        has_weights = next(module.parameters(), None) is not None
        if not has_weights:  # TE's attention, which runs without FP8
            continue
        save_frozen_weights(module, state_dict, f"{prefix}{name}.")
        write_frozen_scales(module)
        for direction in DIRECTIONS:
            scaling = getattr(module, "fp8_meta", {}).get(direction)
            if getattr(scaling, "scale", None) is None:  # another recipe
                continue
            vars(module)[direction] = scaling  # PyTorch's get_model_state_dict follows a key by getattr
            state_dict[f"{prefix}{name}.{direction}.scale"] = scaling.scale
            state_dict[f"{prefix}{name}.{direction}.amax_history"] = scaling.amax_history


def load_fp8_state(model, state_dict, prefix="", *unused):
    """Take scales and histories out of a state dict, and set them if the model has delayed scaling."""
    has_delayed_scaling = model.config.use_fp8 and model.fp8_recipe.delayed()
    has_scales = False
    for name, module in model.named_modules():
        state_dict.pop(f"{prefix}{name}._extra_state", None)
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            # load_state_dict(strict=True) requires this key, which may be empty
            state_dict[f"{prefix}{name}._extra_state"] = torch.empty(0, dtype=torch.uint8)
        for direction in DIRECTIONS:
            scale = state_dict.pop(f"{prefix}{name}.{direction}.scale", None)
            history = state_dict.pop(f"{prefix}{name}.{direction}.amax_history", None)
            if scale is None:
                continue
            has_scales = True
            if has_delayed_scaling:
                set_fp8_state(module, model.fp8_recipe, direction, scale, history)
    if has_delayed_scaling and not has_scales:
        warnings.warn("load_state_dict: no FP8 scales in the state dict, so the model keeps its own, which "
                      "are 1 before its first pass", stacklevel=2)


def set_fp8_state(module, recipe, direction, scale, history):
    """Set a module's scales (n,) and amax history, from one of any length."""
    gemms = 2 if hasattr(module, "fc2_weight") else 1
    module.fp8_meta.update(recipe=recipe, num_gemms=gemms)
    module.init_fp8_meta_tensors(recipe)
    scaling = module.fp8_meta[direction]
    scaling.scale.copy_(scale)
    scaling.amax_history.copy_(resize_history(history, len(scaling.amax_history)))


def resize_history(history, length):
    """Return an amax history with `length` rows. Row 0 is of the current step, the last row is the newest;
    zeros are added, or the oldest rows dropped, between row 0 and the others."""
    current_step = history[:1]
    past_steps = history[1:]
    added = length - len(history)
    past_steps = F.pad(past_steps, (0, 0, added, 0))  # in front; a negative number drops rows there
    return torch.cat([current_step, past_steps])


def register_fp8_state(model):
    """Register the scales of a copied or unpickled model with TE, which must update them, not the original's.
    The attributes are TE's."""
    for module in model.modules():
        if getattr(module, "fp8_meta_tensors_initialized", False):
            # The original's places in TE's lists, of all amaxes and of those of recomputed passes
            module.fp8_meta.pop("buffer_index_and_autocast_key", None)
            module.fp8_meta.pop("global_fp8_buffer_pos_fwd_recompute", None)
            module.fp8_meta_tensors_initialized = False
            module.init_fp8_meta_tensors(module.fp8_meta["recipe"])
