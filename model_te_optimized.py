"""GPT in FP8 on NVIDIA Transformer Engine (TE): the model to use.

Copy this file and you have the model. It needs torch and TE. Where TE or a GPU is missing, `te_reference.py`
beside it does the same in plain PyTorch. Four ideas:

- A block is three TE modules: norm and QKV in one (`te.LayerNormLinear`), the output projection
  (`te.Linear`), and norm and both MLP layers in one (`te.LayerNormMLP`). A norm inside the module of its GEMM
  writes FP8 at once. The final norm and lm_head are one module too.
- FP8 is a region, not a dtype. Parameters stay in BF16 (or float32). Inside `te.autocast`, TE quantizes both
  operands of every GEMM to FP8 and keeps their scales. Attention, norms, residuals and the loss stay in high
  precision.
- GPT-2 is the default. Llama is `use_rmsnorm, use_rotary, activation="swiglu", bias=False,
  tie_embeddings=False, n_kv_head=…`. Qwen3 adds `use_qk_norm` and `head_dim`.
- Speed is added from outside: `fast_kernels.accelerate(model)` replaces the training pass on a Hopper GPU.
  This file works without it, slower.

References: GPT-2 (Radford et al. 2019), RoPE (Su et al. 2021), SwiGLU (Shazeer 2020), GQA (Ainslie et al.
2023), FP8 (Micikevicius et al. 2022).
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

try:  # FlashAttention 4 (Hopper, Blackwell): pip install flash-attn-4
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
except ImportError:
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func  # FlashAttention 2
    except ImportError:
        flash_attn_func = flash_attn_varlen_func = None
if flash_attn_func is not None:  # it compiles its own kernels: torch.compile must not trace into it
    flash_attn_func = torch.compiler.disable(flash_attn_func)
    flash_attn_varlen_func = torch.compiler.disable(flash_attn_varlen_func)

SplitAlongDim = None
if te.__name__ != "te_reference":  # TE's split, whose backward pass copies no adjacent gradients
    from transformer_engine.pytorch.utils import SplitAlongDim


def round_up(n, multiple):
    return (n + multiple - 1) // multiple * multiple


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
    use_pytorch_sdpa: bool = True  # False: te.DotProductAttention; see `attention`
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
    attention: str | None = None  # sdpa | te | flash | auto (the fastest); None: see use_pytorch_sdpa
    gradient_checkpointing: bool = False  # recompute blocks in backward: less memory, a third more compute
    checkpoint_every: int = 1  # checkpoint every k-th block
    offload_activations: int = 0  # keep the activations of the first k blocks in host memory
    loss_chunks: int = 1  # compute lm_head and loss in k chunks, so that one chunk of logits exists at a time
    fp8_lm_head: bool = True  # False: lm_head runs in high precision
    fp8_skip_first: int = 0  # run this many blocks at the start in high precision
    fp8_skip_last: int = 0  # run this many blocks at the end in high precision

    def __post_init__(self):
        counts = "vocab_size n_positions n_embd n_layer n_head checkpoint_every loss_chunks"
        for field in counts.split():
            default = type(self).__dataclass_fields__[field].default
            self.check(getattr(self, field) >= 1, field, "must be 1 or more", default)
        for field in ("dropout", "attn_dropout"):
            self.check(0 <= getattr(self, field) < 1, field, "must be at least 0 and less than 1", 0.0)
        padded, fast = round_up(self.vocab_size, 32), round_up(self.vocab_size, 128)
        works = f"{self.vocab_size} → {fast} (a multiple of 128, which multiplies fastest)"
        if padded != fast:
            works += f" or {padded}"
        self.check(self.vocab_size % 32 == 0, "vocab_size", "must be a multiple of 32", works)
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.head_dim is None:
            rule, works = f"must be a multiple of n_head={self.n_head}", round_up(self.n_embd, self.n_head)
            self.check(self.n_embd % self.n_head == 0, "n_embd", f"{rule}, unless head_dim is set", works)
            self.head_dim = self.n_embd // self.n_head
        divides = self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0
        at_most = max(1, min(self.n_head, self.n_kv_head, 4096))
        works = next(k for k in range(at_most, 0, -1) if self.n_head % k == 0)
        self.check(divides, "n_kv_head", f"must divide n_head={self.n_head}", works)
        even = self.head_dim % 2 == 0 or not self.use_rotary
        self.check(self.head_dim >= 1 and even, "head_dim", "must be even, for use_rotary", 64)
        known = self.activation in ("gelu", "swiglu")
        self.check(known, "activation", "must be 'gelu' or 'swiglu'", "'gelu'")
        if self.n_inner is None:
            swiglu = self.activation == "swiglu"
            self.n_inner = round_up(8 * self.n_embd // 3, 64) if swiglu else 4 * self.n_embd
        self.check(self.n_inner >= 1, "n_inner", "must be 1 or more", 4 * self.n_embd)
        self.attention = self.attention or ("sdpa" if self.use_pytorch_sdpa else "te")
        known = self.attention in ("sdpa", "te", "flash", "auto")
        self.check(known, "attention", "must be 'sdpa', 'te', 'flash' or 'auto'", "'sdpa'")
        most = 0 if self.gradient_checkpointing else self.n_layer - 1
        rule = f"must be less than n_layer={self.n_layer}, and 0 with gradient_checkpointing"
        self.check(0 <= self.offload_activations <= most, "offload_activations", rule, 0)
        for field in ("fp8_skip_first", "fp8_skip_last"):
            in_range = 0 <= getattr(self, field) <= self.n_layer
            self.check(in_range, field, f"must be from 0 to n_layer={self.n_layer}", 1)
        most = self.n_layer - self.fp8_skip_last
        rule = f"with fp8_skip_last={self.fp8_skip_last} more blocks than n_layer={self.n_layer}"
        self.check(self.fp8_skip_first <= most, "fp8_skip_first", rule, most)
        if self.use_fp8:
            widths = [("n_embd", self.n_embd), ("n_inner", self.n_inner)]
            widths += [("head_dim", heads * self.head_dim) for heads in (self.n_head, self.n_kv_head)]
            for field, size in widths:
                rule = f"FP8 needs dimensions divisible by 16, not {size}"
                self.check(size % 16 == 0, field, rule, round_up(getattr(self, field), 16))

    def check(self, ok, field, rule, works):
        if not ok:
            value = getattr(self, field)
            raise ValueError(f"{type(self).__name__}.{field}={value!r}: {rule}; {works} works")

    def in_fp8(self, layer):
        return self.fp8_skip_first <= layer < self.n_layer - self.fp8_skip_last


class KVCache:
    """Keys and values of the tokens so far, for generation.

    Each layer has (B, max_len, n_kv_head, head_dim), of which the first `length` tokens are filled."""

    def __init__(self, config, batch_size, max_len, device, dtype):
        shape = (config.n_layer, 2, batch_size, max_len, config.n_kv_head, config.head_dim)
        self.kv = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, layer, k, v):
        end = self.length + k.shape[1]
        self.kv[layer, 0, :, self.length:end] = k
        self.kv[layer, 1, :, self.length:end] = v
        return self.kv[layer, 0, :, :end], self.kv[layer, 1, :, :end]


def locate_documents(cu_seqlens, batch, length, with_mask):
    """Return each token's position in its document, (B, S), and (cu_seqlens, mask) for attention.

    The mask, for PyTorch's SDPA, is (B, 1, S, S) bool, or None. No shape depends on data, so that a CUDA
    graph can capture it."""
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=torch.int32)
    document = torch.searchsorted(cu_seqlens, tokens, right=True)  # its number, from 1
    positions = (tokens - cu_seqlens[document - 1]).view(batch, length)
    document = document.view(batch, length)
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None] if with_mask else None
    return positions, (cu_seqlens, mask)


def rope_tables(positions, head_dim, theta):
    """Return cos and sin of position · theta^(-2i/head_dim), for positions (S,) or (B, S).

    Each is float32, (S, 1, head_dim / 2) or (B, S, 1, head_dim / 2)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    """Rotate the pairs (x[i], x[i + D/2]) of every head. x: (B, S, heads, D)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def flash_unsupported_reason(config):
    """Return why FlashAttention cannot run these heads on this GPU, by its packages' own limits; "" if it
    can."""
    if flash_attn_func is None:
        return "neither flash-attn-4 nor flash-attn is installed"
    if config.attn_dropout > 0 or config.head_dim % 8:
        return "FlashAttention needs attn_dropout=0 and head_dim a multiple of 8"
    major, dim = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0, config.head_dim
    if "cute" not in flash_attn_func.__module__:  # FlashAttention 2
        supported = major >= 8 and dim <= 256
    elif major == 9:
        supported = dim <= 256
    else:
        supported = major in (10, 11, 12) and dim <= 128 or major in (10, 11) and dim == 256
    return "" if supported else f"{flash_attn_func.__module__} has no kernel for head_dim={dim} on this GPU"


def attention_kernel(config):
    """Return what `config.attention` means on this machine: sdpa, te or flash."""
    reason = flash_unsupported_reason(config)
    if config.attention == "flash" and reason:
        raise ValueError(f"attention='flash': {reason}; 'sdpa' works")
    if config.attention != "auto":
        return config.attention
    if not reason:
        return "flash"
    return "sdpa" if te.__name__ == "te_reference" else "te"


class Attention(nn.Module):
    """Norm, QKV, (QK-norm, RoPE,) causal attention, output projection: (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        norm = "RMSNorm" if config.use_rmsnorm else "LayerNorm"
        q_size, kv_size = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.qkv = te.LayerNormLinear(
            config.n_embd, q_size + 2 * kv_size, eps=config.layernorm_epsilon, normalization=norm,
            bias=config.bias, init_method=normal_init,
        )
        if config.use_qk_norm:
            self.q_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
            self.k_norm = te.RMSNorm(config.head_dim, eps=config.layernorm_epsilon)
        self.kernel = attention_kernel(config)
        if self.kernel == "te":
            self.attention = te.DotProductAttention(
                config.n_head, config.head_dim, num_gqa_groups=config.n_kv_head,
                attention_dropout=config.attn_dropout, qkv_format="bshd", attn_mask_type="causal",
            )
        self.proj = te.Linear(q_size, config.n_embd, bias=config.bias, init_method=residual_init(config))

    def forward(self, x, rope=None, is_first_microbatch=None, kv_cache=None, documents=None):
        qkv = self.qkv(x, is_first_microbatch=is_first_microbatch)
        qkv = qkv.view(*x.shape[:2], -1, self.config.head_dim)
        return self.proj(self.mix(qkv, rope, kv_cache, documents), is_first_microbatch=is_first_microbatch)

    def mix(self, qkv, rope=None, kv_cache=None, documents=None):
        """Apply QK-norm, RoPE and attention: (B, S, n_head + 2 n_kv_head, D) -> (B, S, n_head · D)."""
        config = self.config
        sizes = [config.n_head, config.n_kv_head, config.n_kv_head]
        if self.kernel == "te" and SplitAlongDim is not None:
            q, k, v = SplitAlongDim.apply(qkv, 2, sizes)
        else:
            q, k, v = qkv.split(sizes, dim=2)  # (B, S, heads, D)
        if config.use_qk_norm:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if kv_cache is not None:
            k, v = kv_cache.append(self.layer, k, v)
        y = self.attend(q, k, v, generating=kv_cache is not None, documents=documents)
        return y.reshape(*qkv.shape[:2], -1)

    def attend(self, q, k, v, generating, documents=None):
        """Causal attention by the kernel of `attention_kernel`.

        Args:
            q: (B, S, n_head, D).
            k, v: (B, S', n_kv_head, D); the last S of S' positions are q's.
            documents: (cu_seqlens, mask) of `locate_documents`, or None.

        Returns:
            B·S times n_head·D elements, in that order.
        """
        cu_seqlens, mask = documents or (None, None)
        flash = self.kernel == "flash" and q.dtype != torch.float32
        if not generating and (flash or self.kernel == "te"):
            attend = self._attend_flash if flash else self._attend_te
            if documents is None:
                return attend(q, k, v)
            return attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, q.shape[1])
        # several new tokens after cached ones: a causal mask aligned to the end
        if 1 < q.shape[1] < k.shape[1]:
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
            mask = mask.tril(k.shape[1] - q.shape[1])
        # Compare lengths in generation only: under torch.compile they may be symbols, which is_causal refuses
        causal = mask is None and (not generating or q.shape[1] == k.shape[1])
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, S, D)
        dropout = self.config.attn_dropout if self.training else 0.0
        grouped = self.config.n_kv_head != self.config.n_head
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped)
        return y.transpose(1, 2)

    def _attend_te(self, q, k, v, cu_seqlens=None, length=None):
        if cu_seqlens is None:
            return self.attention(q, k, v)
        return self.attention(
            q, k, v, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens, max_seqlen_q=length, max_seqlen_kv=length)

    def _attend_flash(self, q, k, v, cu_seqlens=None, length=None):
        if cu_seqlens is None:
            y = flash_attn_func(q, k, v, causal=True)
        else:
            y = flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=length,
                max_seqlen_k=length, causal=True)
        return y[0] if isinstance(y, tuple) else y  # version 4 also returns the log-sum-exp


class Block(nn.Module):
    """Residual block: x + attention(x), then x + MLP(x). (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config, layer):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = te.LayerNormMLP(
            config.n_embd, config.n_inner, eps=config.layernorm_epsilon, bias=config.bias,
            activation=config.activation, normalization="RMSNorm" if config.use_rmsnorm else "LayerNorm",
            init_method=normal_init, output_layer_init_method=residual_init(config),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rope=None, is_first_microbatch=None, kv_cache=None, documents=None):
        x = x + self.dropout(self.attn(x, rope, is_first_microbatch, kv_cache, documents))
        return x + self.dropout(self.mlp(x, is_first_microbatch=is_first_microbatch))


class OptimizedGPT2Model(nn.Module):
    """GPT. `model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy,
    scalar float32.

    input_ids and labels are (B, S) int64. Labels are already shifted; -100 is ignored. `fp8_recipe` may be
    replaced before the first pass. In FP8, B·S must be divisible by 8, and by 16 when training, as TE's GEMMs
    demand.
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
        if not config.use_rotary:
            self.wpe = nn.Embedding(config.n_positions, config.n_embd, device=device)
            normal_init(self.wpe.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layer):
            with nullcontext() if config.in_fp8(layer) else te.quantized_model_init(enabled=False):
                self.blocks.append(Block(config, layer))
        # nn.Embedding cannot read an FP8 parameter, so a tied weight stays in high precision
        fp8_weight = config.fp8_lm_head and not config.tie_embeddings
        with nullcontext() if fp8_weight else te.quantized_model_init(enabled=False):
            self.lm_head = te.LayerNormLinear(
                config.n_embd, config.vocab_size, eps=config.layernorm_epsilon, bias=False,
                normalization="RMSNorm" if config.use_rmsnorm else "LayerNorm", init_method=normal_init,
            )
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        # TE's, not torch.autograd.graph.save_on_cpu, which also copies weights, converts FP8 tensors to BF16
        # and makes the GPU wait for each copy
        if config.offload_activations:
            self.offload, self.offloaded = te.get_cpu_offload_context(
                True, config.offload_activations, config.n_layer
            )

    def forward(self, input_ids, labels=None, cu_seqlens=None, is_first_microbatch=None, kv_cache=None):
        """Compute logits, or the loss if labels are given.

        Args:
            cu_seqlens: int32, the start of each document of a packed batch in its B·S tokens, then B·S,
                repeated as needed. No token sees another document, and positions restart in each. None: a row
                is one document.
            is_first_microbatch: with gradient accumulation, True for the first micro-batch of a step and
                False for the others, so that weights are quantized once a step.
            kv_cache: from `make_kv_cache`; input_ids are then the tokens that follow it.
        """
        if torch.compiler.is_compiling() and self.config.use_fp8 and self.fp8_recipe.delayed():
            return run_uncompiled(self, input_ids, labels, cu_seqlens, is_first_microbatch, kv_cache)
        positions, rope, documents = self.locate(input_ids, cu_seqlens, kv_cache)
        x = self.wte(input_ids)  # (B, S, n_embd)
        if not self.config.use_rotary:
            x = x + self.wpe(positions)
        x = self.dropout(x)
        with self.autocast():
            for layer, block in enumerate(self.blocks):
                x = self.run_block(layer, block, x, rope, is_first_microbatch, kv_cache, documents)
            if kv_cache is not None:
                kv_cache.length += input_ids.shape[1]
            return self.output(x, labels, is_first_microbatch)

    def autocast(self, enabled=True):
        """Return the context in which TE's GEMMs run in FP8."""
        return te.autocast(enabled=self.config.use_fp8 and enabled, recipe=self.fp8_recipe)

    def locate(self, input_ids, cu_seqlens=None, kv_cache=None):
        """Check the input; return positions, (S,) or (B, S), RoPE tables or None, and `locate_documents`."""
        config, (batch, length) = self.config, input_ids.shape
        past = kv_cache.length if kv_cache is not None else 0
        self.check_input(batch, length, past)
        documents, positions = None, torch.arange(past, past + length, device=input_ids.device)
        if cu_seqlens is not None:
            if kv_cache is not None:
                raise ValueError(
                    "cu_seqlens and kv_cache: kv_cache supports one document per row; drop cu_seqlens"
                )
            with_mask = self.blocks[0].attn.kernel == "sdpa" or self.wte.weight.dtype == torch.float32
            positions, documents = locate_documents(cu_seqlens, batch, length, with_mask)
        rope = rope_tables(positions, config.head_dim, config.rope_theta) if config.use_rotary else None
        return positions, rope, documents

    def check_input(self, batch, length, past=0):
        n_positions, tokens = self.config.n_positions, batch * length
        if past + length > n_positions:
            raise ValueError(
                f"input_ids: {past + length} positions, but n_positions={n_positions}; shorten the sequence"
            )
        multiple = 16 if torch.is_grad_enabled() else 8  # tokens are the K dimension of wgrad
        if self.config.use_fp8 and tokens % multiple:
            raise ValueError(
                f"input_ids {batch} x {length} = {tokens} tokens: FP8 needs a multiple of {multiple}; "
                f"{round_up(tokens, multiple)} tokens work, or use_fp8=False"
            )

    def run_block(self, layer, block, x, rope, is_first_microbatch, kv_cache, documents):
        """Run one block in its precision, with gradient checkpointing or offloading where they are on."""
        config, needs_grad = self.config, self.training and torch.is_grad_enabled()
        with nullcontext() if config.in_fp8(layer) else te.autocast(enabled=False, recipe=self.fp8_recipe):
            if config.gradient_checkpointing and needs_grad and layer % config.checkpoint_every == 0:
                return te.checkpoint(
                    block, x, rope=rope, is_first_microbatch=is_first_microbatch, documents=documents)
            if not (config.offload_activations and needs_grad):
                return block(x, rope, is_first_microbatch, kv_cache, documents)
            with self.offload:
                x = block(x, rope, is_first_microbatch, kv_cache, documents)
            return self.offloaded(x)

    def output(self, x, labels=None, is_first_microbatch=None):
        """Apply the final norm and lm_head: x (B, S, n_embd) -> logits (B, S, vocab_size), or with labels the
        loss."""
        hidden = x.flatten(0, 1)
        with self.autocast(self.config.fp8_lm_head):
            if labels is not None and self.config.loss_chunks > 1:
                trained = [p for p in self.lm_head.parameters() if p.requires_grad]
                return chunked_loss(
                    self, hidden, labels.flatten(), is_first_microbatch, torch.is_grad_enabled(), *trained)
            logits = self.lm_head(hidden, is_first_microbatch=is_first_microbatch)  # (B·S, vocab_size)
        return (
            logits.view(*x.shape[:2], -1) if labels is None else self.cross_entropy(logits, labels.flatten())
        )

    def cross_entropy(self, logits, labels):
        """Mean over the labels that are not -100: (N, vocab_size), (N,) -> () float32. Its backward pass may
        overwrite the logits."""
        return te.parallel_cross_entropy(logits[None], labels[None], reduce_loss=True).reshape(())

    def make_kv_cache(self, batch_size, max_len):
        """Return an empty cache for generation, to be filled by `model(input_ids, kv_cache=cache)`.

        Turn FP8 off first: one token is one row, and FP8 needs 8."""
        return KVCache(self.config, batch_size, max_len, self.wte.weight.device, self.wte.weight.dtype)


class ChunkedLoss(torch.autograd.Function):
    """Compute lm_head and loss in config.loss_chunks chunks of the N tokens.

    Hidden states x (N, n_embd), labels (N,) -> scalar float32. Each chunk goes forward and at once backward,
    so that only one chunk of logits exists at a time and nothing is computed twice. This takes memory for a
    gradient of x's size, and for the parameters' gradients in float32. To delayed scaling the chunks are one
    pass: their amax values meet in the same row of the histories."""

    @staticmethod
    def forward(ctx, model, x, labels, is_first_microbatch, needs_grad, *parameters):
        # FP8 GEMMs need multiples of 16 rows, MXFP8's of 32
        rows = round_up((len(x) + model.config.loss_chunks - 1) // model.config.loss_chunks, 32)
        count, total, dx = (labels != -100).sum().clamp(min=1), 0.0, []
        sums = [torch.zeros(p.shape, dtype=torch.float32, device=x.device) for p in parameters]
        for i, (chunk, y) in enumerate(zip(x.split(rows), labels.split(rows))):
            # Quantize lm_head's weight for the first chunk only. Evaluation leaves training's FP8 weights as
            # they are
            first = i == 0 and is_first_microbatch is not False if needs_grad else None
            with torch.set_grad_enabled(needs_grad):
                chunk = chunk.detach().requires_grad_(needs_grad)
                logits = model.lm_head(chunk, is_first_microbatch=first)
                loss = model.cross_entropy(logits, y) * ((y != -100).sum() / count)
                del logits
            if needs_grad:
                dchunk, *gradients = torch.autograd.grad(loss, [chunk, *parameters])
                dx.append(dchunk)
                for sum_, gradient in zip(sums, gradients):
                    sum_.add_(gradient)
            total = total + loss.detach()
        if needs_grad:
            ctx.save_for_backward(torch.cat(dx), *(sum_.to(p.dtype) for sum_, p in zip(sums, parameters)))
        return total

    @staticmethod
    def backward(ctx, grad_loss):
        dx, *gradients = ctx.saved_tensors
        return None, dx * grad_loss, None, None, None, *(gradient * grad_loss for gradient in gradients)


chunked_loss = torch.compiler.disable(ChunkedLoss.apply)  # it goes backward inside a forward pass


@torch.compiler.disable(reason="Transformer Engine cannot trace DelayedScaling")
def run_uncompiled(model, *args):
    """Run forward eagerly: torch.compile does not see TE update scales and amax histories."""
    warnings.warn(
        "torch.compile: Transformer Engine cannot trace DelayedScaling, so the model runs uncompiled; "
        "set model.fp8_recipe = Float8CurrentScaling() to compile it",
        stacklevel=2,
    )
    return OptimizedGPT2Model.forward(model, *args)  # not model.forward, which a subclass may override


normal_init = partial(nn.init.normal_, mean=0.0, std=0.02)  # as in GPT-2


def residual_init(config):
    """Return GPT-2's initializer for the projections onto the residual: std 0.02 / sqrt(2 n_layer)."""
    return partial(nn.init.normal_, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
