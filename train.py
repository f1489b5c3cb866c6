"""The trainer: python train.py --preset gpt2-124m. One dataclass of options, one loop; a preset's values are
the defaults.

Notable, and why:
- Losses stay on the device between log steps, so that the host never waits for the GPU within them. A step
  whose loss or gradient is not finite changes no weight (the device sees to that), is counted when losses are
  read, and more than --max-skipped-steps of them end the run. Losses are read before a checkpoint is written,
  and none is written right after such a step: a run that diverged leaves its last good one.
- A checkpoint is written before the evaluation of the same step. FP8 with delayed scaling keeps a history
  that every forward pass moves, evaluation included; saved first, and with evaluation leaving it as it was, a
  resumed run repeats the uninterrupted one exactly (bit for bit on the CPU).
- Started by torchrun it trains data-parallel: every rank reads its own samples, rank 0 alone writes.
"""
import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from data import Loader, get_tokenizer
from fast_kernels.support import LARGEST_BF16_BETA
from nanote import checkpoint, cli, fp8, fp8_health, json_files, profiling
from nanote.train_step import (
    TrainStep,
    accelerate,
    compile_model,
    first_compiled_pass,
    make_optimizer,
    recipe_of,
    wants_graph,
    warm_up_scales,
)
from sample import generate, pick_device

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass
class TrainConfig:
    preset: str = "tiny"
    """Where the defaults come from: tiny, gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1.5b, llama-160m, llama3-1b,
    llama3-8b."""
    model: str = "optimized"  # Model file: optimized, advanced, fused, custom or te.
    data: str = "data/stdlib"  # Folder of token files, as data.py makes them.
    out_dir: str | None = None
    """The run's folder; by default out/<preset>, or the first of out/<preset>-2, -3… that is free."""
    resume: bool = False
    """Go on from the last checkpoint in --out-dir (default: the newest run of the preset), with its options
    except those given."""

    # the model's architecture
    n_layer: int = 12  # Transformer blocks.
    n_head: int = 12  # Attention heads.
    n_kv_head: int | None = None  # Key and value heads (grouped-query attention); None: as many as heads.
    head_dim: int | None = None  # Width of a head; None: n_embd / n_head.
    n_embd: int = 768  # Width of the model.
    n_inner: int | None = None  # Width inside the MLP; None: the model file's choice (4 n_embd for GELU).
    vocab_size: int | None = None
    """Rows of the embedding; None: the data's vocabulary, rounded up to a multiple of 32 (of 128 above 1024).
    """
    n_positions: int | None = None  # Longest context the model can take; None: seq_len.
    activation: Literal["gelu", "swiglu"] = "gelu"  # In the MLP.
    use_rmsnorm: bool = False  # RMSNorm in place of LayerNorm.
    use_rotary: bool = False  # Rotary position embedding in place of learned positions.
    rope_theta: float = 10000.0  # Base of the rotary frequencies.
    use_qk_norm: bool = False  # Normalise queries and keys of each head.
    bias: bool = True  # Biases in linear layers.
    tie_embeddings: bool = True  # One matrix for the token embedding and the output head.
    layernorm_epsilon: float = 1e-5  # In every norm.
    dropout: float = 0.0  # Of embeddings and residual branches.
    attn_dropout: float = 0.0  # Of attention probabilities.
    attention: Literal["auto", "sdpa", "te", "flash"] | None = "auto"
    """Attention kernel; auto: FlashAttention if it is installed, else Transformer Engine's, on a CPU
    PyTorch's."""
    fast_kernels: bool = True
    """Replace parts of the model by the kernels of fast_kernels/ where they apply; no: plain Transformer
    Engine modules."""
    fused_block: bool = True
    """On a Hopper GPU, delayed scaling's blocks with kernels of this kit's own (fast_kernels/block.py); no:
    by their modules."""
    fused_loss: bool = True
    """On a GPU, the loss with kernels of this kit's own (fast_kernels/loss.py); no: Transformer Engine's."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more work."""
    checkpoint_every: int = 1  # With --gradient-checkpointing: recompute only every so many-th block.
    offload_activations: int = 0
    """Keep what so many blocks, from the first, save for the backward pass in the host's memory."""
    loss_chunks: int = 1
    """Output head and loss for so many parts of the tokens after each other: logits of one part exist at a
    time."""

    # precision
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights and activations outside FP8 products; auto: bfloat16 on CUDA, float32 on the CPU."""
    fp8_recipe: str = "delayed"
    """How FP8 scales are chosen: delayed, current, block, mxfp8, nvfp4, custom:module.function (TE's
    CustomRecipe with that quantizer factory); none: no FP8. A GPU that cannot run a recipe says which it can.
    """
    fp8_format: Literal["auto", "hybrid", "e4m3"] = "auto"
    """hybrid: E4M3 forward, E5M2 gradients; e4m3: both E4M3; auto: the recipe's own, hybrid for delayed and
    current, e4m3 for block and mxfp8."""
    fp8_amax_history_len: int = 1024  # Delayed scaling: steps of maxima that a scale is taken from.
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Delayed scaling: the largest maximum of the history, or the last one."""
    fp8_margin: int = 0  # Delayed scaling: scales are 2^margin times smaller than they could be.
    fp8_dgrad_fast_accum_k: int = 3072
    """Delayed scaling with the fast kernels: dgrad GEMMs with K up to this may use FP8 fast accumulation,
    where it is faster; 0: never, as in Transformer Engine's recipe."""
    fp8_param: bool = False  # Keep linear layers' weights in FP8 (the optimizer keeps float32 masters).
    fp8_lm_head: bool = True  # The output head's products in FP8, too.
    fp8_skip_first: int = 0  # So many blocks at the start stay in high precision.
    fp8_skip_last: int = 0  # And so many at the end.

    # training
    max_steps: int = 1000  # Optimizer steps.
    micro_batch_size: int = 8  # Sequences of one forward pass on one device.
    seq_len: int = 1024  # Tokens of a sequence.
    pack_documents: bool = False
    """No token sees another document: attention and positions begin anew at each end-of-text token."""
    grad_accum: int = 1  # Forward and backward passes a step.
    lr: float = 6e-4  # Highest learning rate.
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine decay; constant, then linear decay over --decay-fraction (wsd); constant."""
    warmup_steps: int = 100  # Steps of linear warm-up.
    min_lr_ratio: float = 0.1  # Last learning rate over the highest (cosine, wsd).
    decay_fraction: float = 0.2  # wsd: the part of all steps in which the learning rate falls.
    weight_decay: float = 0.1  # Of matrices alone.
    beta1: float = 0.9  # Adam's decay of the gradient's mean.
    beta2: float = 0.95  # Adam's decay of its square.
    grad_clip: float = 1.0  # Largest norm of the gradient; 0: no clipping.
    max_skipped_steps: int = 10
    """Steps whose loss or gradient is not finite change nothing; the run stops after more of them than this.
    """
    seed: int = 1337  # Of weights, data order and dropout.
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of Adam's two moments; bfloat16: 4 bytes a parameter less, betas to 0.996."""
    param_remainders: bool = True
    """Of float32 master weights keep just the 16 bits that the BF16 weights lack: exact, 2 bytes less each.
    """
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Replay each step as CUDA graphs, so that the GPU never waits for Python; auto: wherever that can be."""
    compile: bool = False  # torch.compile the model; not with --fp8-recipe delayed, which cannot be traced.
    compile_mode: CompileMode = "default"
    """torch.compile's mode; reduce-overhead and max-autotune use CUDA graphs, max-autotune* time kernels."""
    compile_fullgraph: bool = False  # With --compile: one graph, or an error that names what breaks it.
    device: str = "auto"  # auto, cpu, cuda or cuda:N.

    # looking at it
    eval_interval: int = 250
    """Steps between evaluations (also after the first and the last step); 0: after the last alone."""
    eval_steps: int = 20  # Validation batches of an evaluation.
    checkpoint_interval: int = 250
    """Steps between checkpoints (also after the last step); 0: after the last alone."""
    keep_checkpoints: int = 2  # Older ones are removed.
    background_saves: bool = True
    """Write checkpoints while training goes on (one process only); takes host memory for a copy of weights
    and optimizer."""
    log_interval: int = 10  # Steps between log lines.
    fp8_health_interval: int = 0
    """Steps between looks at each tensor in FP8: amax, scale, what is cut off, what becomes zero
    (fp8_health.jsonl, fp8_health.png, TensorBoard). The log line after a look shows a lower speed. 0: never,
    at no cost."""
    profile: str | None = None
    """START:STOP: trace these steps with PyTorch's profiler (profile/trace.json.gz, for ui.perfetto.dev) and
    sum kernels by class."""
    nsys: str | None = None
    """START:STOP: the steps that Nsight Systems shall see: nsys profile --capture-range=cudaProfilerApi …
    python train.py …"""
    memory_snapshot: str | None = None
    """START:STOP: record who allocates GPU memory in these steps (memory.pickle, for pytorch.org/memory_viz);
    a replayed CUDA graph allocates nothing, so take step 1, which records it, or --cuda-graph off."""
    gc_interval: int = 0
    """Steps between Python's garbage collections, so that all ranks pause together; 0: when Python likes."""
    torch_deterministic: bool = False
    """The same bits in every run on the same GPU model and number of GPUs; slower."""
    expandable_segments: bool = False
    """Let PyTorch's allocator grow its blocks of GPU memory: less lost between tensors."""


# about half a million tokens a step
GPT2 = dict(micro_batch_size=16, grad_accum=32, max_steps=20_000, warmup_steps=200)
LLAMA = dict(activation="swiglu", use_rmsnorm=True, use_rotary=True, bias=False)
PRESETS = {
    # Bytes of Python in two minutes on two cores.
    "tiny": dict(
        n_layer=4, n_head=4, n_embd=128, seq_len=128, micro_batch_size=16, max_steps=500, lr=3e-3,
        warmup_steps=50, eval_interval=100, checkpoint_interval=100, log_interval=10, **LLAMA,
    ),
    # Radford et al. 2019, table 2; learning rates of Brown et al. 2020, table 2.1.
    "gpt2-124m": GPT2 | dict(n_layer=12, n_head=12, n_embd=768, lr=6e-4),
    "gpt2-350m": GPT2 | dict(n_layer=24, n_head=16, n_embd=1024, lr=3e-4),
    "gpt2-774m": GPT2
    | dict(n_layer=36, n_head=20, n_embd=1280, lr=2.5e-4, micro_batch_size=8, grad_accum=64),
    "gpt2-1.5b": GPT2 | dict(n_layer=48, n_head=25, n_embd=1600, lr=2e-4, micro_batch_size=8, grad_accum=64),
    # huggingface.co/JackFram/llama-160m; Llama 3.1 and 3.2 model cards.
    "llama-160m": GPT2
    | LLAMA
    | dict(
        n_layer=12, n_head=12, n_embd=768, n_inner=3072, tie_embeddings=False, layernorm_epsilon=1e-6,
        seq_len=2048, grad_accum=16, lr=6e-4,
    ),
    "llama3-1b": GPT2
    | LLAMA
    | dict(
        n_layer=16, n_head=32, n_kv_head=8, head_dim=64, n_embd=2048, n_inner=8192, vocab_size=128256,
        rope_theta=500_000.0, seq_len=2048, micro_batch_size=4, grad_accum=64, lr=3e-4,
    ),
    "llama3-8b": GPT2
    | LLAMA
    | dict(
        n_layer=32, n_head=32, n_kv_head=8, head_dim=128, n_embd=4096, n_inner=14336, vocab_size=128256,
        rope_theta=500_000.0, tie_embeddings=False, seq_len=8192, micro_batch_size=1, grad_accum=64, lr=3e-4,
        moment_dtype="bfloat16",
    ),
}
# A checkpoint's tensors fit only a model in which these are the same.
ARCHITECTURE = (
    "preset model n_layer n_head n_kv_head head_dim n_embd n_inner vocab_size n_positions activation use_rmsnorm "
    "use_rotary rope_theta use_qk_norm bias tie_embeddings layernorm_epsilon"
).split()
# Dense BF16 peak in TFLOP/s by a part of the GPU's name, the more special name first (NVIDIA's data sheets).
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
    "H800": 989, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70,
    "RTX 6000 Ada": 364, "RTX 4090": 165, "RTX 5090": 210, "RTX 3090": 71,
}


class Diverged(RuntimeError):
    """Too many losses or gradient norms that are not finite; nothing after them is worth keeping."""


# ---------------------------------------------------------------- options

def read_options(argv) -> tuple[TrainConfig, Path | None, dict | None]:
    """(options, checkpoint to resume from, its meta.json). Defaults come from the preset, or on --resume from
    the checkpoint."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?")
    first.add_argument("--out-dir", "--out_dir", nargs="?")
    first.add_argument("--resume", action=argparse.BooleanOptionalAction)
    first.add_argument("--fp8-recipe", "--fp8_recipe", nargs="?")
    chosen, _ = first.parse_known_args(argv)
    preset = "tiny" if chosen.preset is None else chosen.preset
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: one of {', '.join(PRESETS)}")
    default, folder, meta = TrainConfig(preset=preset, **PRESETS[preset]), None, None
    if chosen.resume:
        run = Path(chosen.out_dir) if chosen.out_dir else newest_run(preset)
        folder = checkpoint.find(run)
        if folder != checkpoint.latest(folder.parent):
            raise ValueError(
                f"--resume: {folder.parent} has later checkpoints than {folder.name}; to go on from there, remove "
                f"{', '.join(path.name for path in checkpoint.list_checkpoints(folder.parent) if path != folder)}"
            )
        meta = checkpoint.read_meta(folder)
        default = dataclasses.replace(saved_options(folder, meta), out_dir=str(folder.parent), resume=True,
                                      profile=None, nsys=None, memory_snapshot=None)
    config = cli.parse(TrainConfig, argv, prog="train.py", description=__doc__, default=default)
    # A custom recipe names a module, which is imported: the command line may do that, a checkpoint may not.
    if config.fp8_recipe.startswith("custom:") and config.fp8_recipe != chosen.fp8_recipe:
        raise ValueError(f"--resume: {folder} was trained with --fp8-recipe {config.fp8_recipe}; code is "
                         f"never taken from a checkpoint: pass --fp8-recipe {config.fp8_recipe} again, or a "
                         "built-in recipe such as --fp8-recipe delayed")
    switches = {field.name for field in dataclasses.fields(checkpoint.model_classes(config.model)[1])}
    for name in ARCHITECTURE + [
        "attention", "fused_loss", "fused_block", "gradient_checkpointing", "checkpoint_every",
        "offload_activations", "loss_chunks",
    ]:
        if name not in ("preset", "model", *switches) and getattr(config, name) != getattr(default, name):
            raise ValueError(
                f"--{name.replace('_', '-')}: the model {config.model!r} has no such switch; --model optimized has"
            )
    if config.pack_documents and config.model != "optimized":
        raise ValueError(
            f"--pack-documents: the model {config.model!r} has no such switch; --model optimized has"
        )
    if chosen.resume:
        config = dataclasses.replace(
            config, out_dir=str(folder.parent), preset=chosen.preset or default.preset
        )
        for name in ARCHITECTURE:
            saved, given = getattr(default, name), getattr(config, name)
            if saved != given:
                raise ValueError(
                    f"--{name.replace('_', '-')} {given}: {folder} is of another architecture, with "
                    f"{name.replace('_', '-')} {saved}; leave the option out, or start a new run"
                )
        if config.max_steps <= meta["step"]:
            raise ValueError(f"--max-steps {config.max_steps}: {folder} has done {meta['step']} steps; "
                             f"to go on, pass more, such as --max-steps {meta['step'] * 2}")
    check_options(config)
    return config, folder, meta


def saved_options(folder: Path, meta: dict) -> TrainConfig:
    """Return the options of a checkpoint's run, without those that only other versions have."""
    json_files.check(meta, {"config": TrainConfig}, folder / "meta.json", checkpoint.RESTORE)
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    return TrainConfig(**{key: value for key, value in meta["config"].items() if key in known})


def newest_run(preset: str) -> Path:
    runs = [
        run
        for run in Path("out").glob(f"{preset}*")
        if run.name.removeprefix(preset).lstrip("-").isdigit() or run.name == preset
    ]
    if not runs:
        raise ValueError(
            f"--resume: there is no run out/{preset}; start one without --resume, or name its folder with --out-dir"
        )
    return max(runs, key=lambda run: run.stat().st_mtime)


def check_options(config: TrainConfig) -> None:
    def require(names, holds, rule, works):
        for name in names.split():
            if not holds(getattr(config, name)):
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(config, name)}: must be {rule}, such as {works}"
                )

    require(
        "max_steps micro_batch_size seq_len grad_accum eval_steps keep_checkpoints log_interval",
        lambda v: v >= 1, "at least 1", 8,
    )
    require(
        "warmup_steps eval_interval checkpoint_interval fp8_health_interval max_skipped_steps seed",
        lambda v: v >= 0, "0 or more", 100,
    )
    require("fp8_amax_history_len", lambda v: v >= 1, "at least 1", 1024)
    require("fp8_dgrad_fast_accum_k", lambda v: v >= 0, "0 or more", 3072)
    require("weight_decay grad_clip", lambda v: 0 <= v < math.inf, "0 or more", 0.1)
    require("lr", lambda v: 0 < v < math.inf, "above 0", 6e-4)
    require("rope_theta", lambda v: 0 < v < math.inf, "above 0", 10000.0)
    require("layernorm_epsilon", lambda v: 0 <= v < math.inf, "0 or more", 1e-5)
    require("n_head n_kv_head", lambda v: v is None or v <= 65536, "at most 65536", 16)
    require("beta1 beta2", lambda v: 0 <= v < 1, "at least 0 and below 1", 0.95)
    if config.moment_dtype == "bfloat16":
        require("beta1 beta2", lambda v: v <= LARGEST_BF16_BETA, f"at most {LARGEST_BF16_BETA:.3f} with "
                "--moment-dtype bfloat16, where moments would no longer fall", 0.95)
    require("min_lr_ratio", lambda v: 0 <= v <= 1, "from 0 to 1", 0.1)
    require("decay_fraction", lambda v: 0 < v <= 1, "above 0 and at most 1", 0.2)
    require("gc_interval", lambda v: v >= 0, "0 or more", 100)
    profiling.check_options(config)
    fp8.check_recipe(config.fp8_recipe)
    require("checkpoint_every loss_chunks", lambda v: v >= 1, "at least 1", 2)
    require(
        "offload_activations", lambda v: 0 <= v < max(1, config.n_layer),
        f"from 0 to {config.n_layer - 1}, which leaves the last block out", max(0, config.n_layer // 2),
    )
    if config.checkpoint_every > 1 and not config.gradient_checkpointing:
        raise ValueError(
            f"--checkpoint-every {config.checkpoint_every} says which blocks to recompute; pass --gradient-checkpointing with it"
        )
    if config.offload_activations and config.gradient_checkpointing:
        raise ValueError(
            "--offload-activations and --gradient-checkpointing: keep activations or compute them again; leave one of them out"
        )
    if config.offload_activations and config.compile:
        raise ValueError(
            "--offload-activations: compiled code does not run the hooks that move tensors; leave --compile out"
        )
    if config.fp8_health_interval and config.fp8_recipe == "none":
        raise ValueError(
            f"--fp8-health-interval {config.fp8_health_interval}: there is no FP8 to look at with --fp8-recipe none; "
            "pass --fp8-recipe delayed or leave --fp8-health-interval out"
        )
    if config.fp8_health_interval and config.compile:
        raise ValueError(
            "--fp8-health-interval: compiled code does not run the hooks that look at its tensors; leave --compile out"
        )
    if config.compile and config.fp8_recipe == "delayed":
        raise ValueError("--compile: Transformer Engine cannot trace DelayedScaling: nothing is compiled; "
                         "pass --fp8-recipe current or --fp8-recipe none with it, or leave --compile out")
    if config.compile_mode != "default" and not config.compile:
        raise ValueError(f"--compile-mode {config.compile_mode}: nothing is compiled; "
                         "pass --compile too, or --compile-mode default")
    if config.compile_fullgraph and not config.compile:
        raise ValueError("--compile-fullgraph: nothing is compiled; "
                         "pass --compile too, or --no-compile-fullgraph")
    if config.fp8_param and config.fp8_recipe == "none":
        raise ValueError(
            "--fp8-param keeps weights in FP8, but --fp8-recipe is none; pass --fp8-recipe delayed or leave --fp8-param out"
        )
    if config.n_positions is not None and config.n_positions < config.seq_len:
        raise ValueError(f"--seq-len {config.seq_len}: the model takes {config.n_positions} positions; "
                         f"pass --seq-len {config.n_positions} or less")


def padded_vocab_size(needed: int) -> int:
    """FP8 products need a multiple of 32, and large ones are faster by 128."""
    step = 32 if needed <= 1024 else 128
    return -(-needed // step) * step


def pick_vocab_size(config: TrainConfig, tokens: dict) -> int:
    """The embedding's rows for a corpus."""
    needed = tokens["vocab_size"]
    padded = padded_vocab_size(needed)
    if config.vocab_size is not None and config.vocab_size < needed:
        raise ValueError(
            f"--vocab-size {config.vocab_size}: the tokens of {config.data} ({tokens['tokenizer']}) go up to {needed}; "
            f"pass {padded} or leave it out"
        )
    return config.vocab_size or padded


def make_run_folder(config: TrainConfig) -> str:
    """Create the run's folder; a name that the user gave must be free, or an empty folder: a run that failed
    before its first step leaves one."""
    if config.out_dir is not None:
        if os.path.lexists(config.out_dir) and not (
            os.path.isdir(config.out_dir) and not os.listdir(config.out_dir)
        ):
            raise ValueError(f"--out-dir {config.out_dir} exists: resume it with --resume, or name another")
        os.makedirs(config.out_dir, exist_ok=True)
        return config.out_dir
    for number in range(1, 1_000_000):
        run = f"out/{config.preset}" + (f"-{number}" if number > 1 else "")
        with contextlib.suppress(FileExistsError):
            os.makedirs(run)
            return run


# ---------------------------------------------------------------- the parts of a step

def learning_rate(step: int, config: TrainConfig) -> float:
    """Of a step, counted from 1: linear warm-up, then the schedule, ending at min_lr_ratio * lr."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        height = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    elif config.lr_schedule == "wsd":
        height = min(1.0, max(0.0, (config.max_steps - step) / (config.decay_fraction * config.max_steps)))
    else:
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


def flops_per_token(parameters: int, config: TrainConfig) -> float:
    """6N + 12·L·C·T FLOPs for a token, forward and backward (PaLM, arXiv:2204.02311, appendix B; nanoGPT).

    N: parameters that take part in a product: without the position table and, if untied, without the input
    embedding. L layers, C = heads times head width, T = seq_len. Recomputation of gradient checkpointing is
    not counted.
    """
    if not config.use_rotary:
        parameters -= config.n_positions * config.n_embd
    if not config.tie_embeddings:
        parameters -= config.vocab_size * config.n_embd
    width = config.n_head * config.head_dim if config.head_dim else config.n_embd
    return 6 * parameters + 12 * config.n_layer * width * config.seq_len


def peak_flops(device: torch.device) -> float | None:
    """The device's dense BF16 peak in FLOP/s by its name; None where it is unknown. FP8 can pass 100 % of it.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


@torch.no_grad()
def evaluate(model, loader, steps: int) -> float:
    """Mean validation loss in nats a token over the loader's first `steps` batches; the model is left as it
    was."""
    model.eval()
    with fp8.preserved_state(model):
        losses = torch.stack([model(*loader.batch(index)) for index in range(steps)])
    model.train()
    return mean_over_ranks(losses.mean()).item()


def read_losses(pending: list, skipped: int, limit: int, say) -> tuple[tuple[float, float] | None, list[int]]:
    """[(step, loss, norm)] -> ((loss, gradient norm) of the last step that was not skipped, None without one;
    the steps that were). `skipped` of the run's steps were so before; Diverged if they become more than
    `limit`."""
    values = mean_over_ranks(torch.stack([torch.stack((loss, norm)) for _, loss, norm in pending])).tolist()
    finite, steps = None, []
    for (step, *_), (loss, norm) in zip(pending, values):
        if math.isfinite(loss + norm):
            finite = loss, norm
            continue
        steps.append(step)
        count, what = skipped + len(steps), f"step {step}: loss {loss}, gradient norm {norm}"
        if count > limit:
            raise Diverged(f"{what}" + (f", after {cli.counted(count - 1, 'skipped step')}" if limit else ""))
        say(f"{what}: skipped ({count} of {limit})")
    return finite, steps


def advice(run: str, step: int, config: TrainConfig) -> str:
    """What to do after a run that diverged at `step`."""
    good = [
        folder for folder in checkpoint.list_checkpoints(run) if int(folder.name.removeprefix("step-")) < step
    ]
    kept = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
    gentler = [f"--lr {config.lr / 3:.1e}", f"--grad-clip {config.grad_clip / 2 or 1.0}"]
    if config.fp8_recipe == "delayed":
        gentler += ["--fp8-recipe current", "--fp8-amax-compute-algo most_recent"]
    elif config.fp8_recipe != "none":
        gentler += ["--fp8-recipe none"]
    return f"stopped; {kept}; try {', '.join(gentler)}"


class StopRequest:
    """Remembers SIGINT and SIGTERM for the end of a step; a second Ctrl-C stops at once. A signal that was
    ignored when the process started, as nohup and shells do for jobs in the background, stays ignored."""

    def __init__(self):
        self.name = None
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)
                       if signal.getsignal(number) is not signal.SIG_IGN}

    def note(self, number, frame):
        self.name = signal.Signals(number).name
        if signal.SIGINT in self.before:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: all leave the loop after the same step."""
        if not dist.is_initialized():
            return self.name is not None
        # on the CPU, through gloo: the GPU is not waited for
        flag = torch.tensor(float(self.name is not None))
        dist.all_reduce(flag)
        return flag.item() > 0

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: set by other than Python code


class Log:
    """metrics.jsonl, TensorBoard, the progress bar and plain lines; on ranks above 0 nothing."""

    def __init__(self, run: str, first_step: int, max_steps: int, enabled: bool):
        self.enabled = enabled
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.run, self.waiting = run, {}  # by the log's name: records that could not be written
        self.board = SummaryWriter(str(Path(run, "tensorboard")), purge_step=first_step)
        # none without a terminal
        self.bar = tqdm(
            total=max_steps, initial=first_step - 1, unit="step", dynamic_ncols=True, disable=None
        )

    def say(self, line: str) -> None:
        if self.enabled:
            tqdm.write(line)

    def write(self, record: dict, max_steps: int) -> None:
        if not self.enabled:
            return
        self.append("metrics.jsonl", record)
        with self.goes_on(record["step"], "tensorboard"):
            for key, value in record.items():
                if key != "step" and value is not None:
                    self.board.add_scalar(key, value, record["step"])
        speed = f"{record['tokens_per_s']:,.0f} tokens/s"
        self.bar.set_postfix_str(f"loss {record['loss']:.3f}, {speed}")
        mfu = f"  MFU {100 * record['mfu']:.1f} %" if record["mfu"] is not None else ""
        val = f"  val loss {record['val_loss']:.4f}" if "val_loss" in record else ""
        self.say(
            f"step {record['step']}/{max_steps}  loss {record['loss']:.4f}  grad norm {record['grad_norm']:.3f}  "
            f"lr {record['lr']:.2e}  {speed}{mfu}{val}"
        )

    def append(self, name: str, record: dict) -> None:
        """Append a record to a log, after those that could not be written before."""
        self.waiting.setdefault(name, []).append(record)
        self.write_waiting(name, record["step"])

    def write_waiting(self, name: str, step: int) -> None:
        if self.waiting[name]:
            with self.goes_on(step, name):
                json_files.append_lines(Path(self.run, name), self.waiting[name])
                self.waiting[name] = []

    @contextlib.contextmanager
    def goes_on(self, step: int, name: str):
        """A log that cannot be written is no reason to stop."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            self.say(f"step {step}: {self.run}/{name} is not written: {reason}; training goes on")

    def write_health(self, step: int, health: dict) -> None:
        self.append("fp8_health.jsonl", {"step": step, "health": health})
        with self.goes_on(step, "tensorboard"):
            for module, tensors in health.items():
                for tensor, figures in tensors.items():
                    for name, value in figures.items():
                        if value is not None:
                            self.board.add_scalar(f"fp8_{name}/{module}.{tensor}", value, step)

    def advance(self) -> None:
        if self.enabled:
            self.bar.update()

    def close(self) -> None:
        if self.enabled:
            self.bar.close()
            for name in self.waiting:
                self.write_waiting(name, self.bar.n)
            with self.goes_on(self.bar.n, "tensorboard"):
                self.board.close()


# figures of a record that differ where two runs learn the same
OF_ONE_RUN = ("tokens_per_s", "mfu", "peak_gib", "seconds")


METRICS = {"step": json_files.SIZE, "loss": json_files.FLOAT32, "val_loss?": json_files.FLOAT32,
           "peak_gib?": float | None}
AMAX = json_files.between(0, json_files.FLOAT32_MAX) | Literal[math.inf]
FIGURES = {"amax": AMAX, "scale": AMAX | None, "saturated": json_files.SHARE | None,
           "flushed": json_files.SHARE | None}  # of one tensor
HEALTH = {"step": json_files.SIZE, "health": dict[str, dict[str, FIGURES]]}


def read_metrics(path) -> list[dict]:
    """Read the records of a metrics.jsonl or fp8_health.jsonl; none without the file. ValueError, naming the
    line, for other content."""
    kind = HEALTH if Path(path).name == "fp8_health.jsonl" else METRICS
    return json_files.read_lines(path, kind, "remove it from there: it is only a log")


def cut_logs(run: str, first_step: int) -> None:
    """Remove records of `first_step` and later from a run's logs, and a line that a kill cut off. Nothing is
    written before all are read."""
    logs = {path: read_metrics(path) for path in (Path(run, "metrics.jsonl"), Path(run, "fp8_health.jsonl"))}
    for path, records in logs.items():
        if not path.exists():
            continue
        kept = [json.dumps(record) + "\n" for record in records if record["step"] < first_step]
        unfinished = path.with_suffix(".tmp")
        try:
            unfinished.write_text("".join(kept))
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(f"{path}: not rewritten: {error.strerror or error}; free some space") from error


def plot_losses(run: str) -> str:
    """Draw metrics.jsonl as loss.png, and return its path."""
    from matplotlib.figure import Figure

    records = read_metrics(Path(run, "metrics.jsonl"))
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [r["step"] for r in records], [r["loss"] for r in records], lw=1.2, color="tab:blue", alpha=0.8,
        label="training",
    )
    measured = [r for r in records if "val_loss" in r]
    axes.plot(
        [r["step"] for r in measured], [r["val_loss"] for r in measured], "o-", ms=4, color="tab:orange",
        label="validation",
    )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(Path(run, "loss.png"), dpi=150)
    return str(Path(run, "loss.png"))


def plot_health(run: str, title: str, fp8_format: str) -> str:
    """Draw fp8_health.jsonl as fp8_health.png, and return its path; "" without records."""
    records = read_metrics(Path(run, "fp8_health.jsonl"))
    if not records:
        return ""
    fp8_health.plot(records, Path(run, "fp8_health.png"), title, fp8_format)
    return str(Path(run, "fp8_health.png"))


def draw(name: str, say, plot, *arguments) -> str:
    """Return plot(*arguments), a picture's path; "" if the log is damaged or the disk full."""
    try:
        return plot(*arguments)
    except (ValueError, OSError) as error:
        say(f"{name} is not drawn: {getattr(error, 'strerror', None) or error}")
        return ""


# ---------------------------------------------------------------- training

def main(argv=None) -> int:
    """Train, and return the exit code: 0, or 1 for a run that diverged or ran out of memory. ValueError and
    OSError are the user's to mend."""
    world_size, rank, local_rank = (int(os.environ.get(name, default)) for name, default in
                                    (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        config, folder, meta = read_options(argv)
        with contextlib.ExitStack() as at_end:
            train(config, folder, meta, rank, local_rank, world_size, at_end)
    except Diverged as error:
        if rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as error:
        if not profiling.is_out_of_memory(error):
            raise
        if not isinstance(error, profiling.OutOfMemory):
            error = profiling.outside_steps(config)
        # any rank may be the one
        print(f"train.py: {f'rank {rank}: ' if world_size > 1 else ''}{error}", file=sys.stderr)
        return 1
    finally:
        if world_size > 1:
            dist.destroy_process_group()
    return 0


def train(
    config: TrainConfig,
    folder: Path | None,
    meta: dict | None,
    rank: int,
    local_rank: int,
    world_size: int,
    at_end,
) -> None:
    """`at_end`: a contextlib.ExitStack, which is given what must be undone in the end: the lock on the run's
    folder."""
    device = pick_device(config.device)
    if device.type == "cuda":
        if world_size > 1:
            device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif not fp8.IS_REFERENCE:
        raise ValueError(
            "--device cpu: Transformer Engine needs a GPU; set NANOTE_REFERENCE=1 to use te_reference in its place"
        )
    profiling.prepare_process(config, device)
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32,
             "bfloat16": torch.bfloat16, "float32": torch.float32}[config.dtype]

    # Everything that can be wrong is looked at before anything is written.
    recipe = recipe_of(config)
    checkpoint.model_classes(config.model)
    loaders = {
        split: Loader(
            config.data, split, seq_len=config.seq_len, micro_batch_size=config.micro_batch_size,
            seed=config.seed, rank=rank, world_size=world_size, device=device,
            pack_documents=config.pack_documents,
        )
        for split in ("train", "val")
    }
    tokens = loaders["train"].meta
    if meta and meta["tokenizer"] != tokens["tokenizer"]:
        raise ValueError(
            f"--data {config.data} holds {tokens['tokenizer']} tokens, but {folder} was trained on {meta['tokenizer']} tokens"
        )
    config = dataclasses.replace(
        config, vocab_size=pick_vocab_size(config, tokens), n_positions=config.n_positions or config.seq_len
    )
    model_config = checkpoint.make_model_config(
        config.model, dataclasses.asdict(config) | {"use_fp8": recipe is not None}
    )
    if recipe is not None:
        fp8.check_shapes(model_config, config.micro_batch_size, config.seq_len, config.fp8_recipe)
    wants_graph(config, device)  # refuses a --cuda-graph on that cannot be
    profiling.check_memory(config, model_config, device, dtype)

    profiler = profiling.Profiler(
        config, device, enabled=rank == 0, first_step=meta["step"] + 1 if meta else 1
    )

    torch.manual_seed(config.seed)  # the same on every rank: so are the weights
    model = checkpoint.build_model(config.model, model_config, device=device, dtype=dtype,
                                   fp8_weights_recipe=recipe if config.fp8_param else None)
    if recipe is not None:
        model.fp8_recipe = recipe
    kernels = accelerate(model, config)
    optimizer = make_optimizer(model, config)
    net = compile_model(model, config)
    if config.compile:
        first_compiled_pass(model, net, config, loaders["train"].batch(0))
    torch.manual_seed(config.seed + rank)  # dropout differs by rank
    step = 0
    run = config.out_dir if folder is not None else checkpoint.on_rank0(lambda: make_run_folder(config))
    lock = checkpoint.on_rank0(lambda: checkpoint.lock(run))
    if rank == 0:
        at_end.callback(checkpoint.unlock, run, lock)
    if folder is not None:
        if checkpoint.on_rank0(lambda: checkpoint.latest(run)) != folder:
            raise ValueError(
                f"{run} has come further than {folder} meanwhile: another process trained there; start again"
            )
        checkpoint.load(folder, meta, model, optimizer)
        checkpoint.on_rank0(lambda: cut_logs(run, meta["step"] + 1))
        step = meta["step"]
    if recipe is not None and recipe.delayed() and fp8.is_fresh(model):
        batch = loaders["train"].batch(0)
        try:
            warm_up_scales(model, batch)
        except RuntimeError as error:  # the first pass of all is where a batch that is too large shows
            if not profiling.is_out_of_memory(error):
                raise
            raise profiling.explain(
                error, "the first pass", config, model, optimizer, None, batch, "nothing is trained yet"
            ) from None
    if world_size > 1:
        net = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)

    train_step = TrainStep(model, net, optimizer, config, device)

    parameters = sum(p.numel() for p in model.parameters())
    tokens_per_step = config.micro_batch_size * config.seq_len * config.grad_accum * world_size
    token_flops, peak = flops_per_token(parameters, config), peak_flops(device)
    log = Log(run, step + 1, config.max_steps, enabled=rank == 0)
    fp8_format = fp8.resolve_format(config.fp8_recipe, config.fp8_format)
    precision = "no FP8"
    if recipe is not None:
        precision = f"FP8 {config.fp8_recipe}" + (f" ({fp8_format})" if fp8_format else "")
    log.say(f"on {fp8.describe()}; {config.preset}, {precision}, {parameters / 1e6:,.2f} M parameters, "
            f"{tokens_per_step:,} tokens a step; {run}" + (f" from step {step}" if step else ""))

    if kernels:
        log.say(kernels)
    lacks = [
        name
        for name in ARCHITECTURE
        if getattr(config, name) != TrainConfig.__dataclass_fields__[name].default
        and name not in ("preset", "model", *dataclasses.asdict(model_config))
    ]
    if lacks:
        log.say(
            f"the model {config.model!r} has no {', '.join(lacks)}: what the preset {config.preset!r} says of them is left out"
        )
    profiler.run, profiler.say = run, log.say
    saver = checkpoint.BackgroundSaver(config.background_saves)
    if 0 < config.checkpoint_interval < config.max_steps - step:
        lack = saver.reserve(model, optimizer)
        if lack:
            log.say(
                f"no host memory for a copy of what a checkpoint holds ({lack}): training will wait while one is written"
            )

    def tell_failed_save():
        error = saver.error()
        if error:
            log.say(f"step {step}: {error}; training goes on")

    def save(keep: int):
        saver.wait()
        tell_failed_save()  # of the one before
        document = {
            "config": dataclasses.asdict(config) | {"out_dir": run},
            "model": config.model,
            "model_config": dataclasses.asdict(model_config),
            "tokenizer": tokens["tokenizer"],
            "device": fp8.describe(),
            # where an imported model came from
            **({"hf": meta["hf"]} if meta and "hf" in meta else {}),
        }
        saver.save(run, step, model=model, optimizer=optimizer, meta=document, keep=keep)

    model.train()
    stop = StopRequest()
    pending, elapsed, mark, timed_steps = [], 0.0, time.perf_counter(), 0
    finite, skipped, save_is_due = None, 0, False
    began = mark
    try:
        while step < config.max_steps:
            step += 1
            lr = learning_rate(step, config)
            looks_at_fp8 = (
                log.enabled and config.fp8_health_interval and step % config.fp8_health_interval == 0
            )
            batches = [
                loaders["train"].batch((step - 1) * config.grad_accum + micro)
                for micro in range(config.grad_accum)
            ]
            profiler.begin(step)
            loss, norm = train_step(batches, lr, watch=looks_at_fp8)
            profiler.end(step)
            pending.append((step, loss, norm))
            timed_steps += 1
            log.advance()
            tell_failed_save()
            if looks_at_fp8:
                log.write_health(step, fp8.health(model))

            ends = step == config.max_steps
            stopping = not ends and stop.agreed()
            saves = (
                ends
                or stopping
                or save_is_due
                or (config.checkpoint_interval > 0 and step % config.checkpoint_interval == 0)
            )
            evaluates = ends or (
                not stopping and config.eval_interval > 0 and (step == 1 or step % config.eval_interval == 0)
            )
            logs = evaluates or stopping or step == 1 or step % config.log_interval == 0
            if not (logs or saves):
                continue
            # waits for the device
            last_finite, skips = read_losses(pending, skipped, config.max_skipped_steps, log.say)
            pending.clear()
            elapsed += time.perf_counter() - mark
            finite, skipped = last_finite or finite, skipped + len(skips)
            skipped_now = step in skips
            if ends and finite is None:
                raise Diverged(f"step {step}: not a step of this run had a finite loss and gradient")
            # the weights may be the reason: wait for a step that they do well in
            save_is_due = saves and skipped_now and not ends
            saves, stopping, logs = (
                saves and not save_is_due, stopping and not skipped_now, logs and finite is not None,
            )
            record = (
                {"step": step, "loss": finite[0], "lr": lr, "grad_norm": finite[1], "skipped": skipped}
                if logs
                else {}
            )
            if saves:
                save(keep=config.keep_checkpoints + skipped_now)
                if ends or stopping:
                    saver.wait()
                    failure = saver.error()
                    if failure:
                        raise failure
            if logs:
                speed = tokens_per_step * timed_steps / elapsed
                record |= {
                    "tokens_per_s": speed,
                    "mfu": speed * token_flops / (peak * world_size) if peak else None,
                    "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30
                    if device.type == "cuda"
                    else None,
                }
                elapsed, timed_steps = 0.0, 0
                if evaluates:
                    record["val_loss"] = evaluate(model, loaders["val"], config.eval_steps)
                    if not math.isfinite(record["val_loss"]):
                        raise Diverged(f"step {step}: validation loss {record['val_loss']}")
                record["seconds"] = time.perf_counter() - began  # evaluations and checkpoints included
                log.write(record, config.max_steps)
            mark = time.perf_counter()
            if stopping:
                break
    except Diverged as error:
        saver.wait()  # what it is writing may be the last good checkpoint
        raise Diverged(f"{error}; {advice(run, step, config)}") from None
    except RuntimeError as error:
        if not profiling.is_out_of_memory(error):
            raise
        saver.wait()
        last = checkpoint.latest(run)
        kept = f"the last checkpoint is {last}" if last else "there is no checkpoint yet"
        profiler.close(step)  # a memory snapshot of what did not fit, before it is freed
        raise profiling.explain(
            error, f"step {step}", config, model, optimizer, train_step, batches[0], kept
        ) from None
    finally:
        profiler.close(step)
        saver.wait()  # after an error, too
        failure = saver.error()
        if failure:
            log.say(f"step {step}: {failure}")
        stop.restore()
        log.close()
        for loader in loaders.values():
            loader.close()
        health_picture = ""
        if log.enabled and config.fp8_health_interval:  # of a run that diverged, too
            title = f"{run}, {precision}"
            health_picture = draw("fp8_health.png", log.say, plot_health, run, title, fp8_format)
    if rank != 0:
        return
    picture = draw("loss.png", log.say, plot_losses, run)
    if step < config.max_steps:
        print(
            f"stopped by {stop.name or 'another process'} after step {step}: saved {checkpoint.latest(run)}; "
            f"resume with: python train.py --resume --out-dir {run}"
        )
        return
    unit = "nats a byte" if tokens["tokenizer"] == "byte" else f"nats a token ({tokens['tokenizer']})"
    try:
        tokenizer = get_tokenizer(tokens["tokenizer"], config.vocab_size)
        generator = torch.Generator(device).manual_seed(config.seed)
        ids = generate(model, [tokenizer.eot], 128, temperature=0.8, top_k=50, generator=generator,
                       vocab_size=tokenizer.vocab_size)
        text = tokenizer.decode(ids)
    except ValueError as error:  # a tokenizer that is not on this machine: the run is complete all the same
        text = f"no sample: {error}"
    print(f"\n--- a sample ---\n{text}\n----------------\n"
          f"validation loss {record['val_loss']:.4f} {unit} after {cli.counted(step, 'step')}, "
          f"on {fp8.describe()}\n"
          + (f"FP8 health   {health_picture}\n" if health_picture else "")
          + (f"loss curve   {picture}\n" if picture else "") +
          f"metrics      {run}/metrics.jsonl, and: tensorboard --logdir {run}/tensorboard\n"
          f"checkpoint   {checkpoint.latest(run)}\nmore text    python sample.py {run} --prompt \"def \"")


if __name__ == "__main__":
    sys.exit(cli.run(main, "train.py"))
