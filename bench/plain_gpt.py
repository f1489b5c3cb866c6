"""Baselines of benchmark_te.py: the GPT of model_te_optimized.py in plain PyTorch, and transformers'
Llama.

PlainGPT is the same network from the same OptimizedConfig, with nn.Linear, F.scaled_dot_product_attention,
F.layer_norm or F.rms_norm, F.gelu or SwiGLU, and F.cross_entropy. Parameters are float32; PlainStep trains it
under BF16 autocast and torch.compile with PyTorch's fused AdamW. nanoGPT itself is measured by
bench/nanogpt.py. tests/test_benchmark.py compares its logits with the optimized model's.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Norm(nn.Module):
    """LayerNorm (with a bias) or RMSNorm over the last dimension."""

    def __init__(self, width, config, rms):
        super().__init__()
        self.eps, self.rms = config.layernorm_epsilon, rms
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = None if rms else nn.Parameter(torch.zeros(width))

    def forward(self, x):
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def rope(x, cos, sin):
    """Rotate the pairs (x[i], x[i + D/2]) of every head. x (B, H, T, D)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention_by_hand(q, k, v):
    """Compute softmax(q kᵀ / √D) v under a causal mask, one kernel per operation, as without SDPA.

    q: (B, H, T, D); k, v: (B, H', T, D).
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1).to(v.dtype) @ v


class Block(nn.Module):
    """x + attention(x), then x + MLP(x): (B, T, n_embd) -> (B, T, n_embd)."""

    def __init__(self, config, by_hand):
        super().__init__()
        self.config, self.by_hand = config, by_hand
        q_size, kv_size = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.norm1 = Norm(config.n_embd, config, config.use_rmsnorm)
        self.qkv = nn.Linear(config.n_embd, q_size + 2 * kv_size, bias=config.bias)
        if config.use_qk_norm:
            self.q_norm = Norm(config.head_dim, config, True)
            self.k_norm = Norm(config.head_dim, config, True)
        self.proj = nn.Linear(q_size, config.n_embd, bias=config.bias)
        self.norm2 = Norm(config.n_embd, config, config.use_rmsnorm)
        fc1_size = config.n_inner * (2 if config.activation == "swiglu" else 1)
        self.fc1 = nn.Linear(config.n_embd, fc1_size, bias=config.bias)
        self.fc2 = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)

    def forward(self, x, cos_sin):
        config = self.config
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, -1, config.head_dim).transpose(1, 2)
        # each (B, heads, T, D)
        q, k, v = qkv.split((config.n_head, config.n_kv_head, config.n_kv_head), dim=1)
        if config.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = rope(q, *cos_sin), rope(k, *cos_sin)
        if self.by_hand:
            y = attention_by_hand(q, k, v)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=config.n_kv_head != config.n_head
            )
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.fc1(self.norm2(x))
        if config.activation == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            return x + self.fc2(F.silu(gate) * up)
        return x + self.fc2(F.gelu(h, approximate="tanh"))


class PlainGPT(nn.Module):
    """`model(input_ids)` -> logits (B, T, vocab_size); `model(input_ids, labels)` -> mean cross-entropy.

    input_ids and labels are (B, T) int64. by_hand: attention without SDPA. There is no dropout, gradient
    checkpointing or FP8.
    """

    def __init__(self, config, by_hand=False):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if not config.use_rotary:
            self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, by_hand) for _ in range(config.n_layer))
        self.norm = Norm(config.n_embd, config, config.use_rmsnorm)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                writes_residual = name.endswith(("proj.weight", "fc2.weight"))
                std = 0.02 / math.sqrt(2 * config.n_layer) if writes_residual else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids, labels=None):
        config = self.config
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x, cos_sin = self.wte(input_ids), None
        if config.use_rotary:
            steps = torch.arange(0, config.head_dim, 2, device=input_ids.device).float()
            angles = positions.float()[:, None] * config.rope_theta ** (-steps / config.head_dim)
            cos_sin = angles.cos(), angles.sin()
        else:
            x = x + self.wpe(positions)
        for block in self.blocks:
            x = block(x, cos_sin)
        logits = self.lm_head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


# described in the docstring of benchmark_te.py
ARMS = ("plain", "plain-eager", "plain-by-hand", "plain-graph", "hf-llama")


class PlainStep:
    """A training step of plain PyTorch: BF16 autocast, clipping, fused AdamW. Has TrainStep's interface."""

    def __init__(self, model, net, config, device):
        self.model, self.net, self.config, self.device = model, net, config, device
        parameters = list(model.parameters())
        groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
                  {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True
        )

    def forward(self, input_ids, labels):
        autocast = self.device.type == "cuda" and next(self.model.parameters()).dtype == torch.float32
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            return self.net(input_ids, labels)

    def __call__(self, batches, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for input_ids, labels in batches:
            loss = self.forward(input_ids, labels)
            loss.backward()
        norm = self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone(), norm

    def update(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        return norm


class HFLlama(torch.nn.Module):
    """transformers' Llama at the shape of an OptimizedConfig, with the interface of the models here."""

    def __init__(self, c):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # slow to import

        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.n_inner,
                num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
                head_dim=c.head_dim, max_position_embeddings=c.n_positions, rms_norm_eps=c.layernorm_epsilon,
                tie_word_embeddings=c.tie_embeddings, use_cache=False, attn_implementation="sdpa",
            )
        )

    def forward(self, input_ids, labels):
        return self.llama(input_ids=input_ids, labels=labels, shift_labels=labels).loss


def build_plain(arm, model_config, config, device) -> PlainStep:
    """Build the step of one of ARMS. model_config: an OptimizedConfig; config: train.py's options."""
    torch.manual_seed(config.seed)
    if arm == "hf-llama" and (model_config.activation, model_config.use_rotary) != ("swiglu", True):
        raise ValueError("--arms hf-llama: Llama has the block modern only; use --blocks modern")
    with torch.device(device):
        if arm == "hf-llama":
            model = HFLlama(model_config)
        else:
            model = PlainGPT(model_config, by_hand=arm == "plain-by-hand")
    if arm == "hf-llama" and device.type == "cuda":
        model.bfloat16()
    eager = arm in ("plain-eager", "plain-by-hand")
    mode = "reduce-overhead" if arm == "plain-graph" else "default"
    net = model if eager else torch.compile(model, dynamic=False, mode=mode)
    return PlainStep(model, net, config, device)
