"""Shapes and arms of the benchmark, as options of train.py, and the training step of an arm.

An arm is one way to train the same network at the same shape: "plain", "bf16", "fp8", "fp8-current-eager" …
(the docstring of benchmark_te.py lists them). The arms without Transformer Engine are in bench/plain_gpt.py;
the others are train.py's own step, built here with the options that the words of the arm's name stand for.
"""

import dataclasses
import gc
import json
import re

import torch

from bench.plain_gpt import ARMS as PLAIN_ARMS
from nanote import checkpoint, fp8, models, parallel, roofline
from nanote.config import PRESETS, TrainConfig
from nanote.optimizers import make_optimizer
from nanote.train_step import (
    TrainStep,
    apply_fast_kernels,
    compile_model,
    recipe_of,
    warm_up_scales,
    weight_dtype,
)

SHAPES = {  # options of train.py
    "124m-b32": dict(n_layer=12, n_embd=768, n_head=12, micro_batch_size=32, seq_len=1024),
    "350m-b16": dict(n_layer=24, n_embd=1024, n_head=16, micro_batch_size=16, seq_len=1024),
    "c2048": dict(n_layer=8, n_embd=2048, n_head=16, micro_batch_size=8, seq_len=2048),
    "c4096": dict(n_layer=4, n_embd=4096, n_head=32, micro_batch_size=4, seq_len=4096),
    "124m-b4": dict(n_layer=12, n_embd=768, n_head=12, micro_batch_size=4, seq_len=1024),
    "guide": dict(n_layer=4, n_embd=768, n_head=12, micro_batch_size=8, seq_len=512),
    "llama3-8b": PRESETS["llama3-8b"] | dict(grad_accum=1),
}
# the block "modern"; its embeddings are tied, its MLP 8/3 as wide, its KV heads a quarter of the heads
MODERN = dict(use_rmsnorm=True, use_rotary=True, use_qk_norm=True, activation="swiglu", bias=False)
ON_CPU = dict(
    n_layer=2, n_embd=64, n_head=4, n_kv_head=None, head_dim=None, n_inner=None, vocab_size=512,
    micro_batch_size=2, seq_len=32,
)
ARMS = ("plain", "bf16", "fp8", "bf16-eager", "fp8-eager", "fp8-e4m3", "fp8-current", "fp8-block")
BLACKWELL = ("mxfp8", "nvfp4")  # recipes that need a Blackwell GPU
WORDS = {  # in the name of any arm with Transformer Engine -> options of train.py
    "eager": {"cuda_graph": "off"},
    "libraries": {"attention": "sdpa", "fused_loss": False, "fused_block": False},  # keeps our optimizer
    "te_block": {"fused_block": False},
    "precise_dgrad": {"fp8_dgrad_fast_accum_k": 0},
    "stochastic": {"fp8_logits_rounding": "stochastic"},
    "bf16_moments": {"moment_dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True},
}
FP8_WORDS = {recipe: {"fp8_recipe": recipe} for recipe in ("current", "block", *BLACKWELL)} | {
    name: {"fp8_format": name} for name in ("e4m3", "hybrid")}


def arm_config(arm: str, config: TrainConfig) -> TrainConfig:
    """Return train.py's options for an arm with Transformer Engine; ValueError if the arm is unknown."""
    kind, *words = arm.split("-")
    changes = {"fp8_recipe": "delayed" if kind == "fp8" else "none"}
    known = kind in ("bf16", "fp8")
    for word in words:
        if kind == "fp8" and word in FP8_WORDS:
            changes |= FP8_WORDS[word]
        elif word in WORDS:
            changes |= WORDS[word]
        elif word in models.MODELS:
            changes["model"] = word
        elif re.fullmatch("accum[1-9][0-9]*", word):
            changes["grad_accum"] = int(word.removeprefix("accum"))
        else:
            known = False
    if not known:
        names = ", ".join(dict.fromkeys(ARMS + PLAIN_ARMS))
        raise ValueError(f"--arms {arm!r} is unknown; use {names}, or see benchmark_te.py --help")
    return dataclasses.replace(config, **changes)


def options_of(arm: str, config: TrainConfig) -> TrainConfig:
    """Return train.py's options for any arm. Those without Transformer Engine use the options of bf16."""
    return arm_config("bf16" if arm in PLAIN_ARMS else arm, config)


def make_config(options: dict, device, block="gpt2") -> TrainConfig:
    """Return train.py's options for a shape; without a GPU, those of a tiny model with the same block."""
    fields = dict(vocab_size=50304) | options
    if block == "modern":
        kv_heads = 4 if fields["n_head"] == 12 else max(1, fields["n_head"] // 4)
        fields |= MODERN | dict(n_kv_head=kv_heads)
    if device.type != "cuda":
        fields |= ON_CPU | dict(n_kv_head=2 if block == "modern" else None)
    return TrainConfig(**fields | dict(n_positions=fields["seq_len"]))


def make_model_config(config: TrainConfig, model="optimized"):
    """Return the model's configuration for options of train.py."""
    options = dataclasses.asdict(config) | {"use_fp8": config.fp8_recipe != "none"}
    return models.make_model_config(model, options)


def optimizer_bytes(arm, config) -> int:
    """Return the bytes per parameter that an optimizer step of any arm moves, for floor_ms."""
    if arm == "hf-llama":
        return 2 * 2 + 2 * (2 + 2 + 2)
    if arm in PLAIN_ARMS:
        return 2 * 4 + 2 * (4 + 4 + 4)
    return roofline.optimizer_bytes(config)


def build_te(config: TrainConfig, device, batch) -> TrainStep:
    """Build the training step as train.py does. `batch`: a micro-batch to initialize delayed scaling with."""
    recipe = recipe_of(config)
    model_config = make_model_config(config, config.model)
    if recipe is not None:
        fp8.check_shapes(model_config, config.micro_batch_size, config.seq_len, config.fp8_recipe)
    torch.manual_seed(config.seed)
    model = models.build_model(
        config.model, model_config, device=device, dtype=weight_dtype(config, device))
    if recipe is not None:
        model.fp8_recipe = recipe
    kernels = apply_fast_kernels(model, config)
    parallel.shard(model, config, device)
    optimizer = make_optimizer(model, config)
    if recipe is not None and recipe.delayed():
        warm_up_scales(model, batch, config)
    step = TrainStep(model, compile_model(model, config), optimizer, config, device)
    step.kernels = kernels
    return step


def load_te(folder, meta: dict, config: TrainConfig, device, batch) -> TrainStep:
    """Build the step of a run, of one micro-batch, and load its checkpoint.

    Args:
        folder, meta, config: what nanote.config.read_options returns with --eval-only; config with the
            vocabulary and positions of the data (train.fit_to_data).
        batch: see `build_te`.

    Raises ValueError for a run of several processes: its gradients, and so its FP8 scales, are divided by
    their number.
    """
    options = folder.parent / "config.json"
    processes = json.loads(options.read_text()).get("processes", 1) if options.exists() else 1
    if processes > 1:
        raise ValueError(f"{folder}: a run of {processes} processes, whose FP8 scales are not those of one; "
                         "name a run of one process")
    # one micro-batch: a step of several would collect gradients in buffers
    step = build_te(dataclasses.replace(config, grad_accum=1), device, batch)
    checkpoint.load(folder, meta, step.model, step.optimizer)  # FP8's scales are loaded with the optimizer
    return step


def make_batches(config, device) -> list:
    """Return grad_accum micro-batches (inputs, labels) of random tokens, the same for every arm."""
    random = torch.Generator().manual_seed(0)
    size = (config.micro_batch_size, config.seq_len + 1)
    windows = [torch.randint(config.vocab_size, size, generator=random) for _ in range(config.grad_accum)]
    windows = [window.to(device) for window in windows]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def free():
    """Release the memory of the last arm and reset the peak that PyTorch records."""
    fp8.forget_models()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
