"""GPT in FP8 on NVIDIA Transformer Engine (TE): the one to use.

Copy this file and you have the model. It needs torch and TE; where TE or a GPU is missing, `te_reference.py`
beside it does the same in plain PyTorch. What is worth noticing:

- A block is three TE modules: norm + QKV in one (`te.LayerNormLinear`), the output projection (`te.Linear`),
  and norm + both MLP products (`te.LayerNormMLP`). Fusing the norm lets TE write its output in FP8 at once.
  The final norm and the output head are one module too.
- Between those three nothing is copied: attention reads queries, keys and values where the QKV product wrote
  them, and writes their gradients into one tensor (`fast_kernels/attention.py`, with FlashAttention); the
  loss hands its gradient to the output head in FP8 already (`fast_kernels/loss.py`). `fast_kernels/block.py`
  trains across the modules' borders. All three are optional: without them plain PyTorch and TE do it, slower.
- FP8 is a region, not a type: parameters stay in bfloat16 (or float32), and inside `te.autocast` TE casts
  both sides of every matrix product to FP8 and keeps the scales. Attention, norms, residuals and the loss
  stay in high precision.
- GPT-2 is the default. Llama is `use_rmsnorm, use_rotary, activation="swiglu", bias=False,
  tie_embeddings=False, n_kv_head=…`; Qwen3 adds `use_qk_norm` and `head_dim`.

References: GPT-2 (Radford et al. 2019), RoPE (Su et al. 2021), SwiGLU (Shazeer 2020), GQA (Ainslie et al.
2023), FP8 (Micikevicius et al. 2022).
"""

import math
import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

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

try:
    from flash_attn.cute import (  # FlashAttention 4 (Hopper, Blackwell): pip install flash-attn-4
        flash_attn_func,
        flash_attn_varlen_func,
    )
except ImportError:
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func  # FlashAttention 2
    except ImportError:
        flash_attn_func = flash_attn_varlen_func = None
if flash_attn_func is not None:  # it compiles kernels of its own: torch.compile must not trace into it
    flash_attn_func, flash_attn_varlen_func = map(
        torch.compiler.disable, (flash_attn_func, flash_attn_varlen_func)
    )

fast_attention = fast_loss = fast_block = None  # faster, not different: see these files
if find_spec("triton") and find_spec("fast_kernels"):
    from fast_kernels import attention as fast_attention
    from fast_kernels import block as fast_block
    from fast_kernels import loss as fast_loss
SplitAlongDim = None
# TE's split: its backward pass copies nothing where the gradients lie side by side
if te.__name__ != "te_reference":
    from transformer_engine.pytorch.utils import SplitAlongDim


@dataclass
class OptimizedConfig:
    """The architecture. Checked when it is built: a ValueError names the field, its value, the rule and a
    value that works."""

    vocab_size: int = 50304  # GPT-2's 50,257, padded
    n_positions: int = 1024  # the longest sequence
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
    n_inner: int | None = None
    """width of the MLP; None: 4 n_embd, or 8/3 n_embd rounded up to a multiple of 64 for swiglu"""
    activation: str = "gelu"  # gelu (tanh approximation) | swiglu
    bias: bool = True
    tie_embeddings: bool = True  # the output head shares the embedding's weight
    attention: str | None = None
    """sdpa | te | flash | auto, the fastest that is there; None: as use_pytorch_sdpa says"""
    fused_block: bool = True
    """on a Hopper GPU, training under delayed scaling by fast_kernels/block.py in place of TE's modules"""
    fused_loss: bool = True  # on a GPU, the loss of fast_kernels/loss.py in place of TE's
    gradient_checkpointing: bool = False
    """recompute each block in backward: less memory, about a third more time"""
    checkpoint_every: int = 1  # with it: recompute only every so many-th block
    offload_activations: int = 0
    """keep what so many blocks, from the first, save for backward in the host's memory"""
    loss_chunks: int = 1
    """output head and loss for so many parts of the tokens after each other: that fraction of the logits
    exists at a time"""
    fp8_lm_head: bool = True  # False: the output head stays in high precision
    fp8_skip_first: int = 0  # so many blocks at the start stay in high precision,
    fp8_skip_last: int = 0  # and so many at the end

    def __post_init__(self):
        def check(ok, field, rule, works):
            if not ok:
                raise ValueError(
                    f"{type(self).__name__}.{field}={getattr(self, field)!r}: {rule}; {works} works"
                )

        for field in (
            "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "checkpoint_every", "loss_chunks",
        ):
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
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.head_dim is None:
            check(
                self.n_embd % self.n_head == 0, "n_embd",
                f"must be a multiple of n_head={self.n_head}, or head_dim be given",
                -(-self.n_embd // self.n_head) * self.n_head,
            )
            self.head_dim = self.n_embd // self.n_head
        check(
            self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0, "n_kv_head",
            f"must divide n_head={self.n_head}", math.gcd(self.n_head, self.n_kv_head),
        )
        check(
            self.head_dim >= 1 and self.head_dim % (2 if self.use_rotary else 1) == 0, "head_dim",
            "must be even, for use_rotary", 64,
        )
        check(self.activation in ("gelu", "swiglu"), "activation", "must be 'gelu' or 'swiglu'", "'gelu'")
        if self.n_inner is None:
            self.n_inner = (
                4 * self.n_embd if self.activation == "gelu" else -(-8 * self.n_embd // 3 // 64) * 64
            )
        check(self.n_inner >= 1, "n_inner", "must be 1 or more", 4 * self.n_embd)
        self.attention = self.attention or ("sdpa" if self.use_pytorch_sdpa else "te")
        check(
            self.attention in ("sdpa", "te", "flash", "auto"), "attention",
            "must be 'sdpa', 'te', 'flash' or 'auto'", "'sdpa'",
        )
        check(
            0 <= self.offload_activations < (1 if self.gradient_checkpointing else self.n_layer),
            "offload_activations",
            f"must be less than n_layer={self.n_layer}, and 0 with gradient_checkpointing", 0,
        )
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
            for field, size in (
                ("n_embd", self.n_embd), ("n_inner", self.n_inner), ("head_dim", self.n_head * self.head_dim),
                ("head_dim", self.n_kv_head * self.head_dim),
            ):
                check(
                    size % 16 == 0, field, f"FP8 needs dimensions divisible by 16, not {size}",
                    -(-getattr(self, field) // 16) * 16,
                )

    def in_fp8(self, layer):
        return self.fp8_skip_first <= layer < self.n_layer - self.fp8_skip_last


class KVCache:
    """Keys and values of the tokens so far, for generation. Each layer: (B, max_len, n_kv_head, head_dim);
    `length` tokens are filled."""

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
    """-> each token's position in its document (B, S), and what attention takes: cu_seqlens, and for
    PyTorch's who sees whom, (B, 1, S, S) bool. No shape depends on data, so that a CUDA graph can hold it."""
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=torch.int32)
    document = torch.searchsorted(cu_seqlens, tokens, right=True)  # its number, from 1
    positions = (tokens - cu_seqlens[document - 1]).view(batch, length)
    document = document.view(batch, length)
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None] if with_mask else None
    return positions, (cu_seqlens, mask)


def rope_tables(positions, head_dim, theta):
    """cos and sin of position · theta^(-2i/head_dim): (S,) or (B, S) -> two of (…, 1, head_dim / 2), float32.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float()[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    """Rotate the pairs (x[i], x[i + D/2]) of every head. x (B, S, H, D)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def flash_reason(config):
    """Why FlashAttention cannot run these heads on this machine, as its packages state it; "" where it can.
    """
    if flash_attn_func is None:
        return "neither flash-attn-4 nor flash-attn is installed"
    if config.attn_dropout > 0 or config.head_dim % 8:
        return "FlashAttention needs attn_dropout=0 and head_dim a multiple of 8"
    major, dim = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0, config.head_dim
    if "cute" in flash_attn_func.__module__:  # FlashAttention 4
        takes = (
            major == 9
            and dim <= 256
            or major in (10, 11, 12)
            and dim <= 128
            or major in (10, 11)
            and dim == 256
        )
    else:
        takes = major >= 8 and dim <= 256
    return "" if takes else f"{flash_attn_func.__module__} has no kernel for head_dim={dim} on this GPU"


def attention_kernel(config):
    """What `config.attention` means on this machine: sdpa, te or flash."""
    if config.attention == "flash" and flash_reason(config):
        raise ValueError(f"attention='flash': {flash_reason(config)}; 'sdpa' works")
    if config.attention != "auto":
        return config.attention
    if not flash_reason(config):
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
        qkv = self.qkv(x, is_first_microbatch=is_first_microbatch).view(
            *x.shape[:2], -1, self.config.head_dim
        )
        return self.proj(self.mix(qkv, rope, kv_cache, documents), is_first_microbatch=is_first_microbatch)

    def mix(self, qkv, rope=None, kv_cache=None, documents=None):
        """QK-norm, RoPE and attention: the heads of queries, keys and values (B, S, heads, D) -> (B, S,
        n_head · D)."""
        config = self.config
        packs = self.kernel == "flash" and fast_attention is not None and kv_cache is None
        if packs and qkv.dtype == torch.bfloat16 and fast_attention.takes_attention(self):
            norms = (self.q_norm.weight, self.k_norm.weight) if config.use_qk_norm else (None, None)
            return fast_attention.packed_attention(
                qkv, config.n_head, config.n_kv_head, rope, *norms, config.layernorm_epsilon,
                cu_seqlens=documents[0] if documents else None,
            )
        sizes = [config.n_head, config.n_kv_head, config.n_kv_head]
        # (B, S, heads, D)
        q, k, v = (
            SplitAlongDim.apply(qkv, 2, sizes)
            if self.kernel == "te" and SplitAlongDim
            else qkv.split(sizes, dim=2)
        )
        if config.use_qk_norm:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if kv_cache is not None:
            k, v = kv_cache.append(self.layer, k, v)
        return self.attend(q, k, v, generating=kv_cache is not None, documents=documents).reshape(
            *qkv.shape[:2], -1
        )

    def attend(self, q, k, v, generating, documents=None):
        """q (B, S, n_head, D), k and v (B, S', n_kv_head, D), the last S of S' positions are q's
        -> B·S times n_head·D elements, in that order."""
        config = self.config
        dropout = config.attn_dropout if self.training else 0.0
        flash, length = self.kernel == "flash" and not generating and q.dtype != torch.float32, q.shape[1]
        starts, mask = documents or (None, None)  # see locate_documents
        if documents and (flash or self.kernel == "te"):
            # for these all documents lie in one row
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        if self.kernel == "te" and not generating:
            return (
                self.attention(q, k, v)
                if documents is None
                else self.attention(
                    q, k, v, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=starts,
                    cu_seqlens_kv=starts, max_seqlen_q=length, max_seqlen_kv=length,
                )
            )
        if flash:
            y = (
                flash_attn_func(q, k, v, causal=True)
                if documents is None
                else flash_attn_varlen_func(
                    q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=length,
                    max_seqlen_k=length, causal=True,
                )
            )
            return y[0] if isinstance(y, tuple) else y  # version 4 also returns the log-sum-exp
        # several new tokens after cached ones: a causal mask aligned to the end
        if 1 < q.shape[1] < k.shape[1]:
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(
                k.shape[1] - q.shape[1]
            )
        # Compare lengths in generation only: under torch.compile they may be symbols, no value for is_causal
        causal = mask is None and (not generating or q.shape[1] == k.shape[1])
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, S, D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal,
                                           enable_gqa=config.n_kv_head != config.n_head)
        return y.transpose(1, 2)


class Block(nn.Module):
    """x + attention, then x + MLP; both normalise their input themselves. (B, S, n_embd) -> (B, S, n_embd).
    """

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
        if not config.use_rotary:
            self.wpe = nn.Embedding(config.n_positions, config.n_embd, device=device)
            normal_init(self.wpe.weight)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(config.n_layer):
            with nullcontext() if config.in_fp8(layer) else te.quantized_model_init(enabled=False):
                self.blocks.append(Block(config, layer))
        keep_precision = config.tie_embeddings or not config.fp8_lm_head  # an embedding cannot be kept in FP8
        with te.quantized_model_init(enabled=False) if keep_precision else nullcontext():
            self.lm_head = te.LayerNormLinear(
                config.n_embd, config.vocab_size, eps=config.layernorm_epsilon, bias=False,
                normalization="RMSNorm" if config.use_rmsnorm else "LayerNorm", init_method=normal_init,
            )
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        # TE's, not torch.autograd.graph.save_on_cpu: that would copy weights too, turn FP8 tensors to BF16,
        # and let the GPU wait for each copy
        if config.offload_activations:
            self.offload, self.offloaded = te.get_cpu_offload_context(
                True, config.offload_activations, config.n_layer
            )

    def forward(self, input_ids, labels=None, cu_seqlens=None, is_first_microbatch=None, kv_cache=None):
        """`cu_seqlens`: int32, where each document of a packed batch begins in the B·S tokens, then B·S, as
        often as wanted; no token sees another document, and positions start anew in each. None: a row is one
        document. `is_first_microbatch`: under gradient accumulation, True for the first micro-batch of a step
        and False for the others, so that weights are cast to FP8 once a step. `kv_cache`: from
        `make_kv_cache`; input_ids are then the tokens that follow it."""
        config = self.config
        if torch.compiler.is_compiling() and config.use_fp8 and self.fp8_recipe.delayed():
            return run_uncompiled(self, input_ids, labels, cu_seqlens, is_first_microbatch, kv_cache)
        (batch, length), past = input_ids.shape, kv_cache.length if kv_cache is not None else 0
        if past + length > config.n_positions:
            raise ValueError(
                f"input_ids: {past + length} positions, but n_positions={config.n_positions}; shorten the sequence"
            )
        if config.use_fp8:
            multiple = 16 if torch.is_grad_enabled() else 8
            if batch * length % multiple:
                raise ValueError(
                    f"input_ids {batch} x {length} = {batch * length} tokens: FP8 needs a multiple of {multiple}; "
                    f"{-(-batch * length // multiple) * multiple} tokens work, or use_fp8=False"
                )
        documents, positions = None, torch.arange(past, past + length, device=input_ids.device)
        if cu_seqlens is not None:
            if kv_cache is not None:
                raise ValueError(
                    "cu_seqlens and kv_cache: generation knows one document a row; leave cu_seqlens out"
                )
            with_mask = self.blocks[0].attn.kernel == "sdpa" or self.wte.weight.dtype == torch.float32
            positions, documents = locate_documents(cu_seqlens, batch, length, with_mask)
        rope = rope_tables(positions, config.head_dim, config.rope_theta) if config.use_rotary else None

        fused = (
            config.fused_block and fast_block is not None and kv_cache is None and fast_block.takes_pass(self)
        )
        x = fast_block.embed(self, input_ids, positions) if fused else self.wte(input_ids)
        if not config.use_rotary and not fused:
            x = x + self.wpe(positions)
        x = self.dropout(x)
        with te.autocast(enabled=config.use_fp8, recipe=self.fp8_recipe):
            if fused:
                x = fast_block.blocks(self, x, rope, is_first_microbatch, documents)
            else:
                for layer, block in enumerate(self.blocks):
                    with (
                        nullcontext()
                        if config.in_fp8(layer)
                        else te.autocast(enabled=False, recipe=self.fp8_recipe)
                    ):
                        learns = self.training and torch.is_grad_enabled()
                        if config.gradient_checkpointing and learns and layer % config.checkpoint_every == 0:
                            x = te.checkpoint(
                                block, x, rope=rope, is_first_microbatch=is_first_microbatch,
                                documents=documents,
                            )
                        elif config.offload_activations and learns:
                            with self.offload:
                                x = block(x, rope, is_first_microbatch, kv_cache, documents)
                            x = self.offloaded(x)
                        else:
                            x = block(x, rope, is_first_microbatch, kv_cache, documents)
            if kv_cache is not None:
                kv_cache.length += length
            with te.autocast(enabled=config.use_fp8 and config.fp8_lm_head, recipe=self.fp8_recipe):
                if labels is not None and config.loss_chunks > 1:
                    learned = [p for p in self.lm_head.parameters() if p.requires_grad]
                    return chunked_loss(
                        self, x.flatten(0, 1), labels.flatten(), is_first_microbatch, torch.is_grad_enabled(),
                        *learned,
                    )
                logits = partial(fast_block.logits, self) if fused else self.lm_head
                logits = logits(x.flatten(0, 1), is_first_microbatch=is_first_microbatch)  # (B·S, vocab_size)
        return (
            logits.view(batch, length, -1) if labels is None else self.cross_entropy(logits, labels.flatten())
        )

    def cross_entropy(self, logits, labels):
        """Mean over the labels that are not -100: (N, vocab_size), (N,) -> () float32. Its backward pass may
        write over the logits."""
        if self.config.fused_loss and fast_loss is not None and logits.is_cuda:
            return fast_loss.cross_entropy(logits, labels, head=self.lm_head)
        return te.parallel_cross_entropy(logits[None], labels[None], reduce_loss=True).reshape(())

    def make_kv_cache(self, batch_size, max_len):
        """An empty cache for generation; `model(input_ids, kv_cache=cache)` fills it.
        Turn FP8 off first: one token is one row, and FP8 needs 8."""
        return KVCache(self.config, batch_size, max_len, self.wte.weight.device, self.wte.weight.dtype)


class ChunkedLoss(torch.autograd.Function):
    """The loss of hidden states x (N, n_embd) and labels (N,), for config.loss_chunks parts of the N tokens
    after each other -> () float32.

    Each part goes forward and at once backward, to its hidden states and the head's parameters, and its
    logits are freed: nothing is computed twice. Cost: a gradient of x's size, and the parameters' in float32
    until the parts are summed up. For delayed scaling the parts are one pass: their maxima meet in the same
    row of the histories, which roll as often as without parts."""

    @staticmethod
    def forward(ctx, model, x, labels, is_first_microbatch, learns, *parameters):
        # FP8 products take multiples of 16, MXFP8's of 32
        rows = -(-len(x) // (32 * model.config.loss_chunks)) * 32
        count, total, dx = (labels != -100).sum().clamp(min=1), 0.0, []
        sums = [torch.zeros(p.shape, dtype=torch.float32, device=x.device) for p in parameters]
        for i, (part, y) in enumerate(zip(x.split(rows), labels.split(rows))):
            # The head's weight is cast to FP8 for the first part alone; evaluation leaves what training kept
            # of it as it is
            first = i == 0 and is_first_microbatch is not False if learns else None
            with torch.set_grad_enabled(learns):
                part = part.detach().requires_grad_(learns)
                loss = model.cross_entropy(model.lm_head(part, is_first_microbatch=first), y) * (
                    (y != -100).sum() / count
                )
            if learns:
                dpart, *gradients = torch.autograd.grad(loss, [part, *parameters])
                dx, sums = [*dx, dpart], [sum_.add_(gradient) for sum_, gradient in zip(sums, gradients)]
            total = total + loss.detach()
        if learns:
            ctx.save_for_backward(torch.cat(dx), *(sum_.to(p.dtype) for sum_, p in zip(sums, parameters)))
        return total

    @staticmethod
    def backward(ctx, grad_loss):
        dx, *gradients = ctx.saved_tensors
        return None, dx * grad_loss, None, None, None, *(gradient * grad_loss for gradient in gradients)


chunked_loss = torch.compiler.disable(ChunkedLoss.apply)  # it goes backward inside a forward pass


@torch.compiler.disable(reason="Transformer Engine cannot trace DelayedScaling")
def run_uncompiled(model, *args):
    """Run the class's forward uncompiled: torch.compile does not see TE update scales and amax histories."""
    warnings.warn("torch.compile: Transformer Engine cannot trace DelayedScaling, the model runs uncompiled; "
                  "model.fp8_recipe = Float8CurrentScaling() can be compiled", stacklevel=2)
    return OptimizedGPT2Model.forward(model, *args)  # not model.forward, which a subclass may have replaced


normal_init = partial(nn.init.normal_, mean=0.0, std=0.02)  # GPT-2's


def residual_init(config):
    """GPT-2's for what is added to the residual stream: smaller with depth, two additions a layer."""
    return partial(nn.init.normal_, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
