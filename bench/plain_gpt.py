"""The baseline of benchmark_te.py: the GPT of model_te_optimized.py in plain PyTorch.

PlainGPT is the same network from the same OptimizedConfig, with nn.Linear, F.scaled_dot_product_attention,
F.layer_norm or F.rms_norm, F.gelu or SwiGLU, and F.cross_entropy. Parameters are float32; PlainTraining
trains it under BF16 autocast with torch.compile and PyTorch's fused AdamW.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

ARMS = ("plain", "plain-eager", "plain-by-hand", "plain-graph")  # described in benchmark_te.py --help


def make_norm(width, config, rms):
    """Return LayerNorm (with a bias) or RMSNorm over the last dimension."""
    norm_class = nn.RMSNorm if rms else nn.LayerNorm
    return norm_class(width, eps=config.layernorm_epsilon)


def rope(x, cos, sin):
    """Rotate the pairs (x[i], x[i + D/2]) of every head. x (B, H, S, D)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attention_by_hand(q, k, v):
    """Compute softmax(q kᵀ / √D) v under a causal mask, one kernel per operation.

    q: (B, H, S, D); k, v: (B, H', S, D).
    """
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(dim=-1).to(v.dtype) @ v


class Block(nn.Module):
    """x + attention(x), then x + MLP(x): (B, S, n_embd) -> (B, S, n_embd)."""

    def __init__(self, config, by_hand):
        super().__init__()
        self.config = config
        self.by_hand = by_hand
        q_size = config.n_head * config.head_dim
        kv_size = config.n_kv_head * config.head_dim
        self.norm1 = make_norm(config.n_embd, config, config.use_rmsnorm)
        self.qkv = nn.Linear(config.n_embd, q_size + 2 * kv_size, bias=config.bias)
        if config.use_qk_norm:
            self.q_norm = make_norm(config.head_dim, config, rms=True)
            self.k_norm = make_norm(config.head_dim, config, rms=True)
        self.proj = nn.Linear(q_size, config.n_embd, bias=config.bias)
        self.norm2 = make_norm(config.n_embd, config, config.use_rmsnorm)
        fc1_size = config.n_inner * (2 if config.activation == "swiglu" else 1)
        self.fc1 = nn.Linear(config.n_embd, fc1_size, bias=config.bias)
        self.fc2 = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)

    def forward(self, x, cos_sin):
        config = self.config
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, -1, config.head_dim).transpose(1, 2)
        # each (B, heads, S, D)
        q, k, v = qkv.split((config.n_head, config.n_kv_head, config.n_kv_head), dim=1)
        if config.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = rope(q, *cos_sin), rope(k, *cos_sin)
        if self.by_hand:
            y = attention_by_hand(q, k, v)
        else:
            is_grouped = config.n_kv_head != config.n_head
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.fc1(self.norm2(x))
        if config.activation == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            return x + self.fc2(F.silu(gate) * up)
        return x + self.fc2(F.gelu(h, approximate="tanh"))


class PlainGPT(nn.Module):
    """`model(input_ids)` -> logits (B, S, vocab_size); `model(input_ids, labels)` -> mean cross-entropy.

    input_ids and labels are (B, S) int64. by_hand: attention without SDPA. There is no dropout.
    """

    def __init__(self, config, by_hand=False):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if not config.use_rotary:
            self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, by_hand) for _ in range(config.n_layer))
        self.norm = make_norm(config.n_embd, config, config.use_rmsnorm)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "fc2.weight")):  # writes to the residual
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids, labels=None):
        config = self.config
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids)
        cos_sin = None
        if config.use_rotary:
            exponents = torch.arange(0, config.head_dim, 2, device=input_ids.device).float()
            frequencies = config.rope_theta ** (-exponents / config.head_dim)
            angles = positions.float()[:, None] * frequencies
            cos_sin = angles.cos(), angles.sin()
        else:
            x = x + self.wpe(positions)
        for block in self.blocks:
            x = block(x, cos_sin)
        logits = self.lm_head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class PlainTraining:
    """The training of plain PyTorch: BF16 autocast, clipping, AdamW. Called as bench.step.Training."""

    is_graph = False

    def __init__(self, model, net, optimizer, config, device):
        """`net`: the model, or its compiled form, which is called in its place."""
        self.model = model
        self.net = net
        self.optimizer = optimizer
        self.config = config
        self.device = device

    def forward(self, input_ids, labels):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.net(input_ids, labels)

    def update(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        return norm

    def __call__(self, batches, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = 0.0
        for input_ids, labels in batches:
            loss = self.forward(input_ids, labels) / len(batches)
            loss.backward()
            total = total + loss.detach().clone()  # the next replay of a compiled graph overwrites it
        norm = self.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm


def make_adamw(model, config) -> torch.optim.AdamW:
    """Make PyTorch's fused AdamW; norms and biases have no weight decay. config: train.py's options."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def make_plain(arm, model_config, config, device) -> PlainTraining:
    """Make the training of one of ARMS. model_config: an OptimizedConfig; config: a TrainConfig."""
    torch.manual_seed(config.seed)
    with torch.device(device):
        model = PlainGPT(model_config, by_hand=arm == "plain-by-hand")
    optimizer = make_adamw(model, config)
    net = model
    if arm == "plain":
        net = torch.compile(model, dynamic=False)
    elif arm == "plain-graph":
        net = torch.compile(model, dynamic=False, mode="reduce-overhead")
    training = PlainTraining(model, net, optimizer, config, device)
    training.is_graph = arm == "plain-graph"
    return training
