"""Options of a training run: TrainConfig, the presets, and how the command line fills them.

Use `TrainConfig` and `PRESETS` to configure a run from Python, and `read_options` to parse train.py's command
line. The command line overrides the checkpoint (with --resume) or the preset, which override TrainConfig's
defaults. Nothing here depends on the device or the data: what does is checked when train.py builds the run.
"""
import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nanote import checkpoint, cli, config_file, fp8, json_files, models, optimizers, profiling

OptimizerName = Literal[tuple(optimizers.OPTIMIZERS)]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass
class TrainConfig:
    """Train a GPT. Every field is an option of train.py; its comment or docstring is the option's help.

    A comment on a line of its own begins a group of options in --help.
    """

    # run
    preset: str = "tiny"
    """Preset that gives the defaults: tiny, gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1.5b, llama-160m,
    llama3-1b, llama3-8b."""
    model: str = "optimized"
    """Model file: optimized, advanced, fused, custom or te; or path/to/file.py:Class, a model of your own
    (nanote/models.py says what the trainer needs of it)."""
    data: str = "data/stdlib"  # Folder of token files, as written by data.py.
    out_dir: str | None = None
    """Folder of the run; default: out/<preset>, or the first of out/<preset>-2, -3… that does not exist."""
    resume: bool = False
    """Continue from the last checkpoint in --out-dir (default: the newest run of the preset). Options that
    are not given keep the checkpoint's values."""
    config: str | None = None
    """File of options: config.json in the folder of another run, or JSON or YAML with options by name. Those
    on the command line win."""
    eval_only: bool = False
    """Print the validation loss of the last checkpoint in --out-dir and stop; nothing is written."""

    # model
    n_layer: int = 12  # Number of transformer blocks.
    n_head: int = 12  # Number of attention heads.
    n_kv_head: int | None = None  # Number of key and value heads (grouped-query attention); None: n_head.
    head_dim: int | None = None  # Dimension of an attention head; None: n_embd / n_head.
    n_embd: int = 768  # Hidden size.
    n_inner: int | None = None  # Hidden size of the MLP; None: the model file's default (4 n_embd for GELU).
    vocab_size: int | None = None
    """Rows of the embedding; None: the data's vocabulary, padded to a multiple of 32 (of 128 above 1024)."""
    n_positions: int | None = None  # Maximum context length of the model; None: seq_len.
    activation: Literal["gelu", "swiglu"] = "gelu"  # Activation of the MLP.
    use_rmsnorm: bool = False  # RMSNorm instead of LayerNorm.
    use_rotary: bool = False  # Rotary position embedding instead of learned positions.
    rope_theta: float = 10000.0  # Base of the rotary frequencies.
    use_qk_norm: bool = False  # Normalize the queries and keys of each head.
    bias: bool = True  # Biases in linear layers.
    tie_embeddings: bool = True  # Share one weight between the token embedding and lm_head.
    layernorm_epsilon: float = 1e-5  # Epsilon of every norm.
    dropout: float = 0.0  # Dropout of embeddings and residual branches.
    attn_dropout: float = 0.0  # Dropout of attention probabilities.
    attention: Literal["auto", "sdpa", "te", "flash"] | None = "auto"
    """Attention kernel; auto: FlashAttention if it is installed, else Transformer Engine's; on a CPU
    PyTorch's."""
    fast_kernels: bool = True
    """Replace parts of the model by the kernels of fast_kernels/ where they apply; no: plain Transformer
    Engine modules."""
    fused_block: bool = True
    """On a Hopper GPU with delayed scaling, run each block with the fused kernels of fast_kernels/block.py;
    no: run its modules."""
    fused_loss: bool = True
    """On a GPU, compute the loss with the kernels of fast_kernels/loss.py; no: with Transformer Engine's."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more compute."""
    checkpoint_every: int = 1  # With --gradient-checkpointing: recompute every k-th block only.
    offload_activations: int = 0
    """Keep the activations that the first k blocks save for the backward pass in host memory."""
    loss_chunks: int = 1
    """Compute lm_head and loss in this many chunks of tokens, so that only one chunk of logits exists at a
    time."""

    # precision
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of weights and activations outside FP8 GEMMs; auto: bfloat16 on CUDA, float32 on the CPU."""
    fp8_recipe: str = "delayed"
    """FP8 scaling recipe: delayed, current, block, mxfp8, nvfp4, custom:module.function (TE's CustomRecipe
    with that quantizer factory); none: no FP8. If the GPU does not support a recipe, the error names those it
    supports."""
    fp8_format: Literal["auto", "hybrid", "e4m3"] = "auto"
    """hybrid: E4M3 forward, E5M2 gradients; e4m3: both E4M3; auto: the recipe's default, hybrid for delayed
    and current, e4m3 for block and mxfp8."""
    fp8_amax_history_len: int = 1024  # Delayed scaling: length of the amax history.
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Delayed scaling: take the scale from the maximum of the amax history, or from its last entry."""
    fp8_margin: int = 0  # Delayed scaling: divide scales by 2^margin.
    fp8_dgrad_fast_accum_k: int = 3072
    """Delayed scaling with the fast kernels: dgrad GEMMs with K up to this may use FP8 fast accumulation,
    where it is faster; 0: never, as in Transformer Engine's recipe."""
    fp8_logits_rounding: Literal["nearest", "stochastic"] = "nearest"
    """Delayed scaling with the fast kernels: round the gradient of the logits to the nearest FP8 value, or to
    one of its two neighbors, with the probabilities that make the mean exact."""
    fp8_param: bool = False  # Store weights of linear layers in FP8 (the optimizer keeps float32 masters).
    fp8_lm_head: bool = True  # Run the GEMMs of lm_head in FP8, too.
    fp8_skip_first: int = 0  # Keep the first k blocks in high precision.
    fp8_skip_last: int = 0  # Keep the last k blocks in high precision.

    # training
    max_steps: int = 1000  # Optimizer steps.
    micro_batch_size: int = 8  # Sequences per forward pass on each device.
    seq_len: int = 1024  # Tokens per sequence.
    pack_documents: bool = False
    """Mask attention across documents: attention and positions restart at each end-of-text token."""
    grad_accum: int = 1  # Micro-batches per step.
    lr: float = 6e-4  # Peak learning rate.
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine decay; constant, then linear decay over --decay-fraction (wsd); constant."""
    warmup_steps: int = 100  # Steps of linear warm-up.
    min_lr_ratio: float = 0.1  # Final learning rate divided by the peak (cosine, wsd).
    decay_fraction: float = 0.2  # wsd: the fraction of all steps over which the learning rate decays.
    optimizer: OptimizerName = "adamw"
    """muon: torch.optim.Muon for the matrices of the blocks, AdamW for the rest; its update is not part of
    the CUDA graphs."""
    weight_decay: float = 0.1  # Weight decay, of matrices only.
    beta1: float = 0.9  # AdamW's beta1.
    beta2: float = 0.95  # AdamW's beta2.
    grad_clip: float = 1.0  # Maximum gradient norm; 0: no clipping.
    max_skipped_steps: int = 10
    """A step whose loss or gradient norm is not finite is skipped (no weight changes); stop the run after
    more skipped steps than this."""
    seed: int = 1337  # Seed of weights, data order and dropout.
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of AdamW's two moments; bfloat16: 4 bytes less per parameter, betas up to 0.996."""
    param_remainders: bool = True
    """Store only those 16 bits of the float32 master weights that the BF16 weights lack: exact, and 2 bytes
    less per parameter."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Replay each step as CUDA graphs, so that the GPU never waits for Python; auto: wherever possible."""
    compile: bool = False  # torch.compile the model; not with --fp8-recipe delayed, which cannot be traced.
    compile_mode: CompileMode = "default"
    """torch.compile's mode; reduce-overhead and max-autotune use CUDA graphs, max-autotune* time kernels."""
    compile_fullgraph: bool = False  # With --compile: one graph, or an error that names the graph break.
    device: str = "auto"  # auto, cpu, cuda or cuda:N.

    # parallelism
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """With torchrun: ddp: each process keeps the whole model; fsdp: weights, gradients and optimizer state
    are sharded over the processes; hsdp: over those of a replica."""
    hsdp_replicas: int | None = None  # hsdp: number of replicas of the model; None: one on each machine.
    reshard_after_forward: bool = True
    """fsdp, hsdp: free a block's gathered weights after its forward pass; no: keep them until backward, which
    takes memory and saves one gather."""
    grad_accum_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """ddp and one process: type in which gradients of BF16 weights are summed over micro-batches; auto:
    float32."""
    grad_reduce_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type in which gradients are summed over processes (fsdp, hsdp: over micro-batches, too); auto: that of
    --grad-accum-dtype."""

    # evaluation, logging and checkpoints
    eval_interval: int = 250
    """Steps between evaluations (also after the first and the last step); 0: only after the last."""
    eval_tokens: int = 160 * 1024
    """Validation tokens per evaluation, spread evenly over val.bin: the same for every seed, micro-batch size
    and number of GPUs; all of val.bin if it has fewer."""
    eval_steps: int | None = None
    """In place of --eval-tokens: evaluate as many tokens as this number of micro-batches on each device."""
    checkpoint_interval: int = 250
    """Steps between checkpoints (also after the last step); 0: only after the last."""
    keep_checkpoints: int = 2  # Checkpoints to keep; older ones are removed.
    background_saves: bool = True
    """Write checkpoints in the background; takes host memory in each process for a copy of its part of
    weights and optimizer state."""
    log_interval: int = 10  # Steps between log lines.
    wandb: str | None = None
    """Log to this project of Weights & Biases, too (pip install wandb); WANDB_MODE=offline: without a
    network."""

    # diagnostics
    fp8_health_interval: int = 0
    """Steps between measurements of every FP8 tensor: amax, scale, the shares that saturate and that flush to
    zero (fp8_health.jsonl, fp8_health.png, TensorBoard). The next log line shows a lower speed. 0: never, at
    no cost."""
    profile: str | None = None
    """START:STOP: trace these steps with PyTorch's profiler (profile/trace.json.gz, for ui.perfetto.dev) and
    sum kernel times by class."""
    nsys: str | None = None
    """START:STOP: steps to mark for Nsight Systems: nsys profile --capture-range=cudaProfilerApi … python
    train.py …"""
    memory_snapshot: str | None = None
    """START:STOP: record GPU memory allocations in these steps (memory.pickle, for pytorch.org/memory_viz); a
    replayed CUDA graph allocates nothing, so use step 1, which captures it, or --cuda-graph off."""
    gc_interval: int = 0
    """Steps between Python's garbage collections, so that all ranks pause together; 0: leave it to Python."""
    torch_deterministic: bool = False
    """Bitwise reproducible runs on the same GPU model and number of GPUs; slower."""
    expandable_segments: bool = False
    """Let PyTorch's allocator grow its segments of GPU memory: less fragmentation."""


GPT2 = dict(micro_batch_size=16, grad_accum=32, max_steps=20_000, warmup_steps=200)  # 0.5 M tokens per step
LLAMA = dict(activation="swiglu", use_rmsnorm=True, use_rotary=True, bias=False)
PRESETS = {
    # Byte-level language model of Python sources: about three minutes on two cores.
    "tiny": LLAMA | dict(
        n_layer=4, n_head=4, n_embd=128, seq_len=128, micro_batch_size=16, max_steps=500, lr=3e-3,
        warmup_steps=50, eval_interval=100, eval_tokens=320 * 128, checkpoint_interval=100, log_interval=10),
    # Radford et al. 2019, table 2; learning rates of Brown et al. 2020, table 2.1.
    "gpt2-124m": GPT2 | dict(n_layer=12, n_head=12, n_embd=768, lr=6e-4),
    "gpt2-350m": GPT2 | dict(n_layer=24, n_head=16, n_embd=1024, lr=3e-4),
    "gpt2-774m": GPT2 | dict(
        n_layer=36, n_head=20, n_embd=1280, lr=2.5e-4, micro_batch_size=8, grad_accum=64),
    "gpt2-1.5b": GPT2 | dict(n_layer=48, n_head=25, n_embd=1600, lr=2e-4, micro_batch_size=8, grad_accum=64),
    # huggingface.co/JackFram/llama-160m; Llama 3.1 and 3.2 model cards.
    "llama-160m": GPT2 | LLAMA | dict(
        n_layer=12, n_head=12, n_embd=768, n_inner=3072, tie_embeddings=False, layernorm_epsilon=1e-6,
        seq_len=2048, grad_accum=16, lr=6e-4),
    "llama3-1b": GPT2 | LLAMA | dict(
        n_layer=16, n_head=32, n_kv_head=8, head_dim=64, n_embd=2048, n_inner=8192, vocab_size=128256,
        rope_theta=500_000.0, seq_len=2048, micro_batch_size=4, grad_accum=64, lr=3e-4),
    "llama3-8b": GPT2 | LLAMA | dict(
        n_layer=32, n_head=32, n_kv_head=8, head_dim=128, n_embd=4096, n_inner=14336, vocab_size=128256,
        rope_theta=500_000.0, tie_embeddings=False, seq_len=8192, micro_batch_size=1, grad_accum=64, lr=3e-4,
        moment_dtype="bfloat16"),
}
# A BF16 moment does not fall if a step takes less than half of its last bit off. FastAdam has the same limit.
LARGEST_BF16_BETA = 1 - torch.finfo(torch.bfloat16).eps / 2
# Must equal the checkpoint's on --resume: they decide which tensors the model has, and their shapes.
ARCHITECTURE = (
    "preset model n_layer n_head n_kv_head head_dim n_embd n_inner vocab_size n_positions activation "
    "use_rmsnorm use_rotary rope_theta use_qk_norm bias tie_embeddings layernorm_epsilon"
).split()
# Switches of a model's config, which not every model file has; then those of the trainer for one model file.
MODEL_SWITCHES = [
    "attention", "gradient_checkpointing", "checkpoint_every", "offload_activations", "loss_chunks",
]
OPTIMIZED_ONLY = ["pack_documents", "fast_kernels", "fused_loss", "fused_block"]


# Options of nanoGPT, transformers and others, and what they are called here.
OTHER_NAMES = {
    "--learning-rate": "--lr", "--min-lr": "--min-lr-ratio, a fraction of --lr",
    "--batch-size": "--micro-batch-size (sequences of a forward pass on each GPU) and --grad-accum",
    "--gradient-accumulation-steps": "--grad-accum", "--block-size": "--seq-len",
    "--max-iters": "--max-steps", "--num-steps": "--max-steps", "--steps": "--max-steps",
    "--epochs": "--max-steps; the first log line says how many epochs these are",
    "--lr-decay-iters": "--lr-schedule and --max-steps", "--warmup-iters": "--warmup-steps",
    "--eval-iters": "--eval-tokens", "--n-layers": "--n-layer", "--num-layers": "--n-layer",
    "--n-heads": "--n-head", "--num-heads": "--n-head", "--d-model": "--n-embd", "--hidden-size": "--n-embd",
    "--dtype fp8": "--fp8-recipe delayed, the default; --dtype is the type outside FP8 GEMMs",
    "--fp8": "--fp8-recipe delayed, the default", "--bf16": "--fp8-recipe none",
    "--dataset": "--data with the folder that data.py wrote", "--output-dir": "--out-dir",
    "--init-from": "--resume", "--wandb-project": "--wandb PROJECT", "--wandb-log": "--wandb PROJECT",
    "--gpus": "torchrun --nproc-per-node N train.py …",
}

# ---------------------------------------------------------------- from the command line

def read_options(argv, description: str | None = None, restarted: str | None = None
                 ) -> tuple[TrainConfig, Path | None, dict | None]:
    """Parse the command line; return the options, the checkpoint to resume from, and its meta.json.

    Without --resume the last two are None.

    Args:
        description: the text above the options in --help.
        restarted: folder of the run that torchrun has started again: it continues from its last checkpoint.
    """
    chosen = _default_options(argv)
    chosen.out_dir = restarted or chosen.out_dir
    if chosen.model and models.is_file(chosen.model):
        models.load_file(chosen.model)
    folder = meta = None
    if chosen.resume or chosen.eval_only:
        folder, meta = _checkpoint_to_resume(chosen)
        default = without_file = _resumed_options(chosen, folder, meta)
    else:
        without_file, default = _new_options(chosen)
    config = cli.parse(TrainConfig, argv, prog="train.py", description=description, default=default,
                       groups=True, other_names=OTHER_NAMES)
    # A custom recipe imports a module: the command line and a --config may do that, a checkpoint may not.
    if folder and config.fp8_recipe.startswith("custom:") and config.fp8_recipe != chosen.fp8_recipe:
        raise ValueError(f"--resume: {folder} was trained with --fp8-recipe {config.fp8_recipe}; code is "
                         f"never taken from a checkpoint: pass --fp8-recipe {config.fp8_recipe} again, or a "
                         "built-in recipe such as --fp8-recipe delayed")
    _check_model_has(config, without_file)
    if folder:
        preset = chosen.preset if chosen.preset_is_given else default.preset
        config = dataclasses.replace(config, out_dir=str(folder.parent), preset=preset)
        _check_resume(config, default, folder, meta)
    check_options(config)
    if restarted and not folder:  # a new run before the restart; its options are on the command line
        config = dataclasses.replace(config, out_dir=restarted)
        folder = checkpoint.latest(restarted)
        meta = folder and checkpoint.read_meta(folder, config.model)
    return config, folder, meta


def _resumed_options(chosen, folder: Path, meta: dict) -> TrainConfig:
    """Return the defaults of the command line that continues or evaluates a checkpoint."""
    if chosen.config:
        raise ValueError(f"--config {chosen.config}: {folder} has its own options; leave --config out")
    default = dataclasses.replace(saved_options(folder, meta), out_dir=str(folder.parent), resume=True,
                                  config=None, eval_only=False, profile=None, nsys=None, memory_snapshot=None)
    if chosen.eval_tokens:  # it would lose against the checkpoint's eval_steps
        default = dataclasses.replace(default, eval_steps=None)
    return default


def _new_options(chosen) -> tuple[TrainConfig, TrainConfig]:
    """Return the defaults of the command line of a new run: without and with the options of --config."""
    given = config_file.read(chosen.config, TrainConfig, OTHER_NAMES) if chosen.config else {}
    if not chosen.model and models.is_file(given.get("model", "")):
        models.load_file(given["model"])
    name = given.get("preset", chosen.preset)
    if chosen.preset_is_given and name != chosen.preset:
        raise ValueError(f"--preset {chosen.preset}: {chosen.config} has the options of the preset {name}; "
                         "leave one of them out")
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: one of {', '.join(PRESETS)}")
    if chosen.eval_tokens:  # it would lose against the file's eval_steps
        given.pop("eval_steps", None)
    preset = {"preset": name} | PRESETS[name]
    return TrainConfig(**preset), TrainConfig(**preset | given)


def _default_options(argv) -> argparse.Namespace:
    """Parse the options that decide the defaults of all others, and ignore the rest.

    argparse and not tyro: tyro exits at the first mistake, and here mistakes are left to the second parse.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    parser.add_argument("--model", nargs="?")
    parser.add_argument("--out-dir", "--out_dir", nargs="?")
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction)
    parser.add_argument("--eval-only", "--eval_only", action=argparse.BooleanOptionalAction)
    parser.add_argument("--fp8-recipe", "--fp8_recipe", nargs="?")
    parser.add_argument("--eval-tokens", "--eval_tokens", nargs="?")
    chosen, _ = parser.parse_known_args(argv)
    chosen.preset_is_given = bool(chosen.preset)
    if chosen.preset is None:
        chosen.preset = "tiny"
    return chosen


def _checkpoint_to_resume(chosen) -> tuple[Path, dict]:
    """Return the checkpoint's folder and its meta.json. ValueError if it is not the last one of its run."""
    run = Path(chosen.out_dir) if chosen.out_dir else newest_run(chosen.preset)
    folder = checkpoint.find(run)
    if folder != checkpoint.latest(folder.parent) and not chosen.eval_only:
        others = [path.name for path in checkpoint.list_checkpoints(folder.parent) if path != folder]
        raise ValueError(f"--resume: {folder.parent} has later checkpoints than {folder.name}; to continue "
                         f"from there, remove {', '.join(others)}")
    return folder, checkpoint.read_meta(folder, chosen.model)


def saved_options(folder: Path, meta: dict) -> TrainConfig:
    """Return the options of a checkpoint's run, without those that this version does not have."""
    json_files.check(meta, {"config": TrainConfig}, folder / "meta.json", checkpoint.RESTORE)
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    saved = TrainConfig(**{key: value for key, value in meta["config"].items() if key in known})
    if "eval_tokens" not in meta["config"] and saved.eval_steps is not None:
        # An older version counted micro-batches. The run keeps the number of tokens (of one device), but not
        # the windows, which depended on the seed: val_loss may jump by its sampling error.
        tokens = saved.eval_steps * saved.micro_batch_size * saved.seq_len
        saved = dataclasses.replace(saved, eval_tokens=tokens, eval_steps=None)
    return saved


def newest_run(preset: str) -> Path:
    """Return the most recently changed run folder of a preset: out/<preset> or out/<preset>-<number>."""
    runs = []
    for run in Path("out").glob(f"{preset}*"):
        if run.name == preset or run.name.removeprefix(preset).lstrip("-").isdigit():
            runs.append(run)
    if not runs:
        raise ValueError(f"--resume: there is no run out/{preset}; start one without --resume, or name its "
                         "folder with --out-dir")
    return max(runs, key=lambda run: run.stat().st_mtime)


def make_run_folder(config: TrainConfig) -> str:
    """Create the run's folder and return its path.

    ValueError if --out-dir exists, unless it is empty or of a run that has no checkpoint yet.
    """
    if config.out_dir is not None:
        if checkpoint.is_step_name(Path(config.out_dir).name):
            raise ValueError(f"--out-dir {config.out_dir}: step-<n> is the name of a checkpoint; use "
                             "another, such as --out-dir out/mine")
        if os.path.lexists(config.out_dir) and not _has_no_checkpoint(config.out_dir):
            raise ValueError(f"--out-dir {config.out_dir} exists: resume it with --resume, or name another")
        os.makedirs(config.out_dir, exist_ok=True)
        return config.out_dir
    for number in range(1, 1_000_000):
        run = f"out/{config.preset}" + (f"-{number}" if number > 1 else "")
        with contextlib.suppress(FileExistsError):
            os.makedirs(run)
            return run


def _has_no_checkpoint(folder: str) -> bool:
    """Whether a folder is empty, or has only what a run writes before its first checkpoint."""
    started = {"config.json", "config.tmp", "tensorboard", "wandb", ".lock"}
    logs = {"metrics.jsonl", "fp8_health.jsonl", "fp8_health.png", "profile", "memory.pickle",
            "metrics.jsonl.old"}
    if not os.path.isdir(folder):
        return False
    found = {name for name in os.listdir(folder) if not name.startswith(".saving-step-")}
    path = Path(folder, "config.json")
    if not path.exists():
        return found <= started
    try:  # a file of options that a user wrote has no command
        return found <= started | logs and "command" in json_files.read(path, dict, "")
    except ValueError:
        return False


# ---------------------------------------------------------------- checks

def _check_model_has(config: TrainConfig, default: TrainConfig) -> None:
    """Raise ValueError for an option that differs from its default and that the model file does not have."""
    model_class, model_config_class = models.model_classes(config.model)
    known = {"preset", "model", *(field.name for field in dataclasses.fields(model_config_class))}
    missing = [name for name in ARCHITECTURE + MODEL_SWITCHES if name not in known]
    is_own = models.is_file(config.model)
    if is_own:
        missing += [] if models.takes_argument(model_class, "cu_seqlens") else ["pack_documents"]
    elif config.model != "optimized":
        missing += OPTIMIZED_ONLY
    wanted = [name for name in missing if getattr(config, name) != getattr(default, name)]
    if wanted and is_own:
        packs = wanted[0] == "pack_documents"
        needed = "argument cu_seqlens of forward" if packs else f"field {wanted[0]} in its config"
        raise ValueError(f"{cli.flag(wanted[0])}: the model {config.model} has no {needed}; add it, or leave "
                         "the option out")
    if wanted:
        raise ValueError(
            f"{cli.flag(wanted[0])}: the model {config.model!r} has no such switch; --model optimized has"
        )


def _check_resume(config: TrainConfig, default: TrainConfig, folder: Path, meta: dict) -> None:
    """Raise ValueError for options that do not fit the checkpoint, whose own options are `default`."""
    for name in ARCHITECTURE:
        saved, given = getattr(default, name), getattr(config, name)
        if saved != given:
            flag = cli.flag(name)
            raise ValueError(f"{flag} {given}: {folder} has a different architecture, with {flag[2:]} "
                             f"{saved}; leave the option out, or start a new run")
    if config.optimizer != default.optimizer:
        raise ValueError(f"--optimizer {config.optimizer}: {folder} has the state of {default.optimizer}; "
                         "leave the option out, or start a new run")
    if config.max_steps < meta["step"] and not config.eval_only:
        raise ValueError(f"--max-steps {config.max_steps}: {folder} has done {meta['step']} steps; "
                         f"to continue, pass more, such as --max-steps {meta['step'] * 2}")


def check_options(config: TrainConfig) -> None:
    """Raise ValueError for the first option whose value is out of range or contradicts another's."""
    _check_ranges(config)
    profiling.check_options(config)
    fp8.check_recipe(config.fp8_recipe)
    _check_memory_options(config)
    _check_combinations(config)


def _require(config: TrainConfig, names: str, holds, rule: str, example) -> None:
    """Raise ValueError for the first of `names` (separated by spaces) whose value breaks the rule."""
    for name in names.split():
        value = getattr(config, name)
        if not holds(value):
            raise ValueError(f"{cli.flag(name)} {value}: must be {rule}, such as {example}")


def _check_ranges(config: TrainConfig) -> None:
    at_least_1 = "max_steps micro_batch_size seq_len grad_accum eval_tokens keep_checkpoints log_interval"
    not_negative = "warmup_steps eval_interval checkpoint_interval fp8_health_interval max_skipped_steps seed"
    _require(config, at_least_1, lambda v: v >= 1, "at least 1", 8)
    _require(config, "eval_steps n_positions", lambda v: v is None or v >= 1, "at least 1", 64)
    _require(config, "data", lambda v: v != "", "a folder of token files", "data/stdlib")
    _require(config, "out_dir", lambda v: v != "", "a folder", "out/mine")
    _require(config, not_negative, lambda v: v >= 0, "0 or more", 100)
    _require(config, "fp8_amax_history_len", lambda v: v >= 1, "at least 1", 1024)
    _require(config, "fp8_dgrad_fast_accum_k", lambda v: v >= 0, "0 or more", 3072)
    _require(config, "weight_decay grad_clip", lambda v: 0 <= v < math.inf, "0 or more", 0.1)
    _require(config, "lr", lambda v: 0 < v < math.inf, "above 0", 6e-4)
    _require(config, "rope_theta", lambda v: 0 < v < math.inf, "above 0", 10000.0)
    _require(config, "layernorm_epsilon", lambda v: 0 <= v < math.inf, "0 or more", 1e-5)
    _require(config, "n_head n_kv_head", lambda v: v is None or v <= 65536, "at most 65536", 16)
    _require(config, "beta1 beta2", lambda v: 0 <= v < 1, "at least 0 and below 1", 0.95)
    if config.moment_dtype == "bfloat16":
        rule = (f"at most {LARGEST_BF16_BETA:.3f} with --moment-dtype bfloat16, since moments would not "
                "decay otherwise")
        _require(config, "beta1 beta2", lambda v: v <= LARGEST_BF16_BETA, rule, 0.95)
    _require(config, "min_lr_ratio", lambda v: 0 <= v <= 1, "from 0 to 1", 0.1)
    _require(config, "decay_fraction", lambda v: 0 < v <= 1, "above 0 and at most 1", 0.2)
    _require(config, "gc_interval", lambda v: v >= 0, "0 or more", 100)


def _check_memory_options(config: TrainConfig) -> None:
    _require(config, "checkpoint_every loss_chunks", lambda v: v >= 1, "at least 1", 2)
    _require(config, "offload_activations", lambda v: 0 <= v < max(1, config.n_layer),
             f"from 0 to {config.n_layer - 1}, which leaves the last block out", max(0, config.n_layer // 2))
    if config.checkpoint_every > 1 and not config.gradient_checkpointing:
        raise ValueError(f"--checkpoint-every {config.checkpoint_every}: selects the blocks that "
                         "--gradient-checkpointing recomputes; pass --gradient-checkpointing with it")
    if config.offload_activations and config.gradient_checkpointing:
        raise ValueError("--offload-activations and --gradient-checkpointing: activations are either kept or "
                         "recomputed; leave one of them out")
    if config.offload_activations and config.compile:
        raise ValueError("--offload-activations: compiled code does not run the hooks that move tensors; "
                         "leave --compile out")


def _check_combinations(config: TrainConfig) -> None:
    if config.fp8_recipe != "none" and not models.has_fp8(config.model):
        raise ValueError(f"--fp8-recipe {config.fp8_recipe}: the model {config.model} has no field use_fp8 "
                         "in its config, so it does not train in FP8; pass --fp8-recipe none")
    if config.wandb is not None:
        spec = importlib.util.find_spec("wandb")
        if spec is None or spec.origin is None:  # a folder wandb of logs is found, too, without an origin
            raise ValueError(f"--wandb {config.wandb}: the package wandb is not installed; pip install "
                             "wandb, or go on without it: --wandb None")
    if config.fp8_health_interval and config.fp8_recipe == "none":
        raise ValueError(f"--fp8-health-interval {config.fp8_health_interval}: there are no FP8 tensors with "
                         "--fp8-recipe none; pass --fp8-recipe delayed or leave --fp8-health-interval out")
    if config.fp8_health_interval and config.compile:
        raise ValueError("--fp8-health-interval: compiled code does not run the hooks that measure its "
                         "tensors; leave --compile out")
    if config.compile and config.fp8_recipe == "delayed":
        raise ValueError("--compile: Transformer Engine does not support DelayedScaling under torch.compile; "
                         "pass --fp8-recipe current or --fp8-recipe none with it, or leave --compile out")
    if config.compile_mode != "default" and not config.compile:
        raise ValueError(f"--compile-mode {config.compile_mode}: nothing is compiled; "
                         "pass --compile too, or --compile-mode default")
    if config.compile_fullgraph and not config.compile:
        raise ValueError("--compile-fullgraph: nothing is compiled; "
                         "pass --compile too, or --no-compile-fullgraph")
    if config.fp8_param and config.fp8_recipe == "none":
        raise ValueError("--fp8-param: stores weights in FP8, but --fp8-recipe is none; pass --fp8-recipe "
                         "delayed or leave --fp8-param out")
    if config.optimizer == "muon" and config.fp8_param:
        raise ValueError("--optimizer muon: does not update weights stored in FP8; leave --fp8-param out, or "
                         "pass --optimizer adamw")
    _check_parallel(config)
    if config.n_positions is not None and config.n_positions < config.seq_len:
        raise ValueError(f"--seq-len {config.seq_len}: the model takes {config.n_positions} positions; "
                         f"pass --seq-len {config.n_positions} or less")


def _check_parallel(config: TrainConfig) -> None:
    """Raise ValueError for options that do not go with --parallel, whatever the number of processes."""
    _require(config, "hsdp_replicas", lambda v: v is None or v >= 1, "at least 1", 2)
    if config.parallel == "ddp":
        return
    given = f"--parallel {config.parallel}"
    if config.grad_accum_dtype != "auto":
        raise ValueError(f"--grad-accum-dtype {config.grad_accum_dtype}: {given} sums gradients in the type "
                         "in which it reduces them; pass --grad-reduce-dtype "
                         f"{config.grad_accum_dtype} instead")
    if config.fp8_param:
        raise ValueError(f"{given}: does not shard weights stored in FP8 (Transformer Engine's issue 1688); "
                         "leave --fp8-param out, or pass --parallel ddp")
    if config.optimizer != "adamw":
        raise ValueError(f"{given}: each process updates a part of every matrix, which --optimizer "
                         f"{config.optimizer} cannot; pass --optimizer adamw or --parallel ddp")
    if config.compile:
        raise ValueError(f"{given}: does not go with --compile yet; leave --compile out, or pass "
                         "--parallel ddp")
    if config.offload_activations:
        raise ValueError(f"{given}: does not go with --offload-activations; leave it out, or pass "
                         "--gradient-checkpointing or --parallel ddp")


# ---------------------------------------------------------------- vocabulary

def padded_vocab_size(needed: int) -> int:
    """Round a vocabulary up to a multiple of 32, which FP8 GEMMs need; above 1024 of 128, which is faster."""
    return fp8.round_up(needed, 32 if needed <= 1024 else 128)


def pick_vocab_size(config: TrainConfig, tokens: dict) -> int:
    """Return the number of rows of the embedding. `tokens` is the meta.json of the token files."""
    needed = tokens["vocab_size"]
    padded = padded_vocab_size(needed)
    if config.vocab_size is not None and config.vocab_size < needed:
        raise ValueError(f"--vocab-size {config.vocab_size}: the tokens of {config.data} "
                         f"({tokens['tokenizer']}) go up to {needed}; pass {padded} or leave it out")
    return config.vocab_size or padded
