"""Options: TrainConfig, presets, and the rules that they keep.

options.py fills a TrainConfig from the command line, a file, a checkpoint and a preset.
"""
import os
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import tyro

# Sources: Radford et al. 2019, table 2; Brown et al. 2020, table 2.1 (lr); JackFram/llama-160m; Llama 3.
GPT2 = dict(micro_batch_size=16, grad_accum=32, max_steps=20_000, warmup_steps=200)  # 0.5 M tokens per step
LLAMA = dict(activation="swiglu", use_rmsnorm=True, use_rotary=True, bias=False)
LLAMA3 = GPT2 | LLAMA | dict(n_head=32, n_kv_head=8, vocab_size=128256, rope_theta=5e5, grad_accum=64)
PRESETS = {  # options that differ from the defaults of TrainConfig
    # Byte-level language model of Python sources: about three minutes on two cores.
    "tiny": LLAMA | dict(
        n_layer=4, n_head=4, n_embd=128, seq_len=128, micro_batch_size=16, max_steps=500, lr=3e-3,
        warmup_steps=50, eval_interval=100, eval_tokens=320 * 128, checkpoint_interval=100),
    "gpt2-124m": GPT2 | dict(n_layer=12, n_head=12, n_embd=768, lr=6e-4),
    "gpt2-350m": GPT2 | dict(n_layer=24, n_head=16, n_embd=1024, lr=3e-4),
    "gpt2-774m": GPT2 | dict(
        n_layer=36, n_head=20, n_embd=1280, lr=2.5e-4, micro_batch_size=8, grad_accum=64),
    "gpt2-1.5b": GPT2 | dict(n_layer=48, n_head=25, n_embd=1600, lr=2e-4, micro_batch_size=8, grad_accum=64),
    "llama-160m": GPT2 | LLAMA | dict(
        n_layer=12, n_head=12, n_embd=768, n_inner=3072, tie_embeddings=False, layernorm_epsilon=1e-6,
        seq_len=2048, grad_accum=16, lr=6e-4),
    "llama3-1b": LLAMA3 | dict(
        n_layer=16, head_dim=64, n_embd=2048, n_inner=8192, seq_len=2048, micro_batch_size=4, lr=3e-4),
    "llama3-8b": LLAMA3 | dict(
        n_layer=32, head_dim=128, n_embd=4096, n_inner=14336, tie_embeddings=False, seq_len=8192,
        micro_batch_size=1, lr=3e-4, moment_dtype="bfloat16"),
    "hf": {},  # a model that tools/import_hf.py imported: its checkpoint has all options
}
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass
class TrainConfig:
    """Train a GPT in FP8; with torchrun on several GPUs, and slowly on a CPU."""

    # Options on the command line or in a --config file that a user wrote; not stored with a run.
    typed: ClassVar[frozenset[str]] = frozenset()

    # run
    preset: Literal[tuple(PRESETS)] = "tiny"  # Preset that gives the defaults of the other options.
    model: str = "auto"  # auto, fast, optimized, advanced, fused, custom, te, or path/to/file.py:Class.
    data: str = "data/stdlib"  # Folder of token files, as written by data.py.
    out_dir: str | None = None  # Folder of the run; None: out/<preset>, or the next out/<preset>-<n>.
    resume: bool = False  # Continue the run in --out-dir (None: the preset's newest) with its options.
    init_from: str | None = None  # Start from the weights of this run, step-<n> or Hugging Face folder.
    config: str | None = None  # JSON or YAML file with options by name, or another run's config.json.
    eval_only: bool = False  # Print the validation loss of the last checkpoint in --out-dir and stop.

    # model
    n_layer: int = 12  # Transformer blocks.
    n_head: int = 12  # Attention heads.
    n_kv_head: int | None = None  # Heads of keys and values (grouped-query attention); None: n_head.
    head_dim: int | None = None  # Dimension of an attention head; None: n_embd / n_head.
    n_embd: int = 768  # Hidden size.
    n_inner: int | None = None  # Hidden size of the MLP; None: the model file's default (4 n_embd for GELU).
    vocab_size: int | None = None  # Rows of the embedding; None: the data's vocabulary, padded for FP8.
    n_positions: int | None = None  # Maximum context length of the model; None: seq_len.
    activation: Literal["gelu", "swiglu"] = "gelu"  # Activation of the MLP.
    use_rmsnorm: bool = False  # RMSNorm instead of LayerNorm.
    use_rotary: bool = False  # Rotary position embedding instead of learned positions.
    rope_theta: float = 10000.0  # Base of the rotary frequencies.
    rope_scaling: str | None = None  # 8:1:4:8192 of Llama 3.1: FACTOR:LOW:HIGH:CONTEXT; None: unscaled.
    use_qk_norm: bool = False  # Normalize the queries and keys of each head.
    bias: bool = True  # Biases in linear layers.
    qkv_bias: bool = False  # Biases of queries, keys and values also with --no-bias, as in Qwen2.
    tie_embeddings: bool = True  # Share one weight between the token embedding and lm_head.
    layernorm_epsilon: float = 1e-5  # Epsilon of every norm.
    dropout: float = 0.0  # Dropout of embeddings and residual branches.
    attn_dropout: float = 0.0  # Dropout of attention probabilities.
    attention: Literal["auto", "sdpa", "te", "flash"] | None = "auto"  # Attention kernel; auto: the fastest.
    gradient_checkpointing: bool = False  # Recompute each block in the backward pass: less memory, slower.
    loss_chunks: int = 1  # Compute lm_head and loss in this many chunks of tokens: less memory.

    # FIELD=VALUE …: fields of the config of --model that are no options of train.py, such as window=32.
    set: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()

    # precision
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # Outside FP8 GEMMs; auto: BF16 on a GPU.
    fp8_recipe: str = "delayed"  # delayed, current, block, mxfp8, nvfp4, custom:module.function or none.
    fp8_format: Literal["auto", "hybrid", "e4m3"] = "auto"  # auto: the recipe's; hybrid: E5M2 gradients.
    fp8_amax_history_len: int = 1024  # Delayed scaling: length of the amax history.
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"  # Delayed scaling: amax of the history.
    fp8_margin: int = 0  # Delayed scaling: divide scales by 2^margin.
    fp8_lm_head: bool = True  # Run the GEMMs of lm_head in FP8, too.
    fp8_skip_first: int = 0  # Keep the first k blocks in high precision.
    fp8_skip_last: int = 0  # Keep the last k blocks in high precision.

    # training
    max_steps: int = 1000  # Optimizer steps.
    micro_batch_size: int = 8  # Sequences per forward pass on each device.
    seq_len: int = 1024  # Tokens per sequence.
    pack_documents: bool = False  # Restart attention and positions at each document.
    grad_accum: int = 1  # Micro-batches per step.
    lr: float = 6e-4  # Peak learning rate.
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # To a tenth of lr; wsd: in the last fifth.
    warmup_steps: int = 100  # Steps of linear warm-up.
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the blocks, AdamW for the rest.
    weight_decay: float = 0.1  # Weight decay, of matrices only.
    grad_clip: float = 1.0  # Maximum gradient norm; 0: no clipping.
    seed: int = 1337  # Seed of weights, data order and dropout.
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # Type of AdamW's two moments.
    param_remainders: bool = True  # Of float32 masters, store only the 16 bits that the BF16 weights lack.
    cuda_graph: Literal["auto", "on", "off"] = "auto"  # Replay steps as CUDA graphs; auto: where possible.
    compile: bool = False  # torch.compile the model; see guide/compile.md.
    compile_mode: CompileMode = "default"  # torch.compile's mode.
    compile_fullgraph: bool = False  # With --compile: one graph, or an error that names the graph break.
    device: str = "auto"  # auto, cpu, cuda or cuda:N.
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"  # fsdp: sharded over all GPUs; hsdp: in each machine.

    # evaluation, checkpoints, logs and diagnostics
    eval_interval: int = 250  # Steps between evaluations (also after the first and last step); 0: never.
    eval_tokens: int = 160 * 1024  # Validation tokens per evaluation, spread evenly over val.bin.
    checkpoint_interval: int = 250  # Steps between checkpoints (also after the last step); 0: never.
    keep_checkpoints: int = 2  # Checkpoints to keep; older ones are removed.
    log_interval: int = 10  # Steps between log lines.
    wandb: str | None = None  # Log to this project of Weights & Biases, too.
    fp8_health_interval: int = 0  # Steps between measurements of amax, saturation and underflow; 0: never.
    profile: str | None = None  # START:STOP: trace these steps with PyTorch's profiler.

    def check(self) -> None:
        """Raise ValueError for a number out of range, and for options that exclude each other. This knows the
        options alone, and NANOTE_ENGINE if it is set."""
        for rule, (keeps_rule, names) in RANGES.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not keeps_rule(value):
                    raise ValueError(f"{flag(name)} {value}: must be {rule}")
        options = vars(self) | {"NANOTE_ENGINE": os.environ.get("NANOTE_ENGINE")}
        if refusal := find_refusal(options):
            raise ValueError(refusal.message(options))
        if not self.compile and (self.compile_mode != "default" or self.compile_fullgraph):
            raise ValueError("--compile-mode, --compile-fullgraph: without effect; pass --compile too")

    def uses_cuda_graph(self, has_fp8_gpu: bool) -> bool:
        """Return whether steps are replayed as CUDA graphs."""
        if not has_fp8_gpu or self.cuda_graph == "off":
            return False
        with_graph = vars(self) | {"cuda_graph": "on"}  # what "on" would be refused with turns "auto" off
        return find_refusal(with_graph, REFUSED_WITH_GRAPH) is None


# ---------------------------------------------------------------- numbers out of range

RANGES = {  # rule, as in "--lr 0: must be above 0": (whether a number keeps it, options)
    "a number that float32 can hold": (
        lambda number: abs(number) < 2.0**128, ["rope_theta", "lr", "weight_decay", "grad_clip"]),
    "at least 1": (lambda number: number >= 1, """
        max_steps micro_batch_size seq_len grad_accum eval_tokens log_interval keep_checkpoints n_positions
        vocab_size n_layer n_head n_kv_head head_dim n_embd n_inner loss_chunks
        fp8_amax_history_len""".split()),
    "0 or more": (lambda number: number >= 0, """
        warmup_steps eval_interval checkpoint_interval fp8_health_interval seed weight_decay grad_clip
        fp8_skip_first fp8_skip_last fp8_margin""".split()),
    "above 0": (lambda number: number > 0, ["lr", "rope_theta"]),
    "from 0 to 1": (lambda number: 0 <= number <= 1, ["layernorm_epsilon"]),
    "at least 0 and below 1": (lambda number: 0 <= number < 1, ["dropout", "attn_dropout"]),
}


# ---------------------------------------------------------------- options that exclude each other

class Refusal(NamedTuple):
    """Options that do not go together, {option: its values that do not}, and why. The environment variable
    NANOTE_ENGINE counts as an option."""

    settings: dict[str, tuple[str, ...]]
    reason: str

    def message(self, options: dict) -> str:
        first, *others = [as_typed(name, options[name]) for name in self.settings]
        return f"{first}: does not go with {' and '.join(others)}: {self.reason}; leave one of them out"


ANY_VALUE_BUT_OFF = ()  # as values of a Refusal
SHARDED = ("fsdp", "hsdp")
NOT_DELAYED = ("current", "block", "mxfp8", "nvfp4", "custom")
REFUSED_WITH_GRAPH = (
    Refusal({"cuda_graph": ("on",), "compile": ANY_VALUE_BUT_OFF},
            "--compile-mode reduce-overhead captures its own graphs"),
    Refusal({"cuda_graph": ("on",), "gradient_checkpointing": ANY_VALUE_BUT_OFF},
            "recomputation reads random states on the host"),
    Refusal({"cuda_graph": ("on",), "attn_dropout": ANY_VALUE_BUT_OFF},
            "each replay would repeat the dropout mask"),
)
REFUSED_WITH_FAST_MODEL = (
    Refusal({"model": ("fast",), "NANOTE_ENGINE": ("te", "reference")},
            "model_te_fast runs on fast_kernels only"),
    Refusal({"model": ("fast",), "fp8_recipe": NOT_DELAYED}, "model_te_fast has delayed scaling only"),
    Refusal({"model": ("fast",), "dtype": ("float32",)}, "weights of model_te_fast are BF16"),
    Refusal({"model": ("fast",), "compile": ANY_VALUE_BUT_OFF},
            "model_te_fast runs uncompiled, fastest in CUDA graphs"),
    Refusal({"model": ("fast",), "attn_dropout": ANY_VALUE_BUT_OFF},
            "the attention of model_te_fast has no dropout"),
    Refusal({"model": ("fast",), "fp8_health_interval": ANY_VALUE_BUT_OFF},
            "fused modules of model_te_fast cannot be measured"),
    Refusal({"model": ("fast",), "attention": ("sdpa", "te", "flash")},
            "model_te_fast has one attention kernel"),
)
# Asked by TrainConfig.check, with the engine by recipes.check_machine, and of the fast model by
# models.fast_unsupported_reason. What else a model lacks has no row: models.lacked_options finds it.
REFUSED = (
    Refusal({"parallel": SHARDED, "compile": ANY_VALUE_BUT_OFF}, "not tested with sharded weights"),
    Refusal({"fp8_recipe": ("none",), "fp8_health_interval": ANY_VALUE_BUT_OFF}, "there is no FP8"),
    Refusal({"compile": ANY_VALUE_BUT_OFF, "fp8_health_interval": ANY_VALUE_BUT_OFF},
            "compiled code runs no hooks"),
    *REFUSED_WITH_GRAPH,
    *REFUSED_WITH_FAST_MODEL,
    Refusal({"NANOTE_ENGINE": ("fast",), "fp8_recipe": NOT_DELAYED},
            "fast_kernels has delayed scaling only"),
    Refusal({"NANOTE_ENGINE": ("fast",), "dtype": ("float32",), "fp8_recipe": ("delayed",)},
            "FP8 GEMMs of fast_kernels take BF16 weights"),
    Refusal({"NANOTE_ENGINE": ("reference",), "fp8_recipe": ("nvfp4", "custom")},
            "only TE has this recipe"),
    Refusal({"NANOTE_ENGINE": ("te",), "compile": ANY_VALUE_BUT_OFF, "fp8_recipe": ("delayed",)},
            "TE does not support delayed scaling under torch.compile; NANOTE_ENGINE=fast (Hopper) does"),
)


def find_refusal(options: dict, rows=REFUSED) -> Refusal | None:
    """Return the first of these rows that applies, if there is one."""
    for refusal in rows:
        if all(_has_value(options.get(name), values) for name, values in refusal.settings.items()):
            return refusal
    return None


def _has_value(value, values: tuple[str, ...]) -> bool:
    """Return whether a value is among those of a Refusal."""
    if values == ANY_VALUE_BUT_OFF:
        return bool(value)
    name, _, _ = str(value).partition(":")  # "custom" of custom:module.function
    return name in values


# ---------------------------------------------------------------- options without effect

WITHOUT_EFFECT = (  # (options, the option that disables them, the condition under which it does)
    (["fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin"], "fp8_recipe",
     lambda config: config.fp8_recipe != "delayed"),
    (["fp8_format"], "fp8_recipe",
     lambda config: config.fp8_recipe.startswith(("none", "nvfp4", "custom:"))),
    (["fp8_lm_head", "fp8_skip_first", "fp8_skip_last"], "fp8_recipe",
     lambda config: config.fp8_recipe == "none"),
    (["rope_theta", "rope_scaling"], "use_rotary",
     lambda config: not config.use_rotary and not is_model_file(config.model)),
    (["qkv_bias"], "bias", lambda config: config.bias and not is_model_file(config.model)),
    (["param_remainders"], "dtype", lambda config: config.dtype == "float32"),
    (["eval_tokens"], "eval_interval", lambda config: config.eval_interval == 0 and not config.eval_only),
    (["keep_checkpoints"], "checkpoint_interval", lambda config: config.checkpoint_interval == 0),
    (["fp8_health_interval"], "max_steps", lambda config: config.fp8_health_interval > config.max_steps),
    ("""dropout attn_dropout gradient_checkpointing max_steps grad_accum lr lr_schedule warmup_steps optimizer
        weight_decay grad_clip seed moment_dtype param_remainders cuda_graph eval_interval checkpoint_interval
        keep_checkpoints log_interval wandb fp8_health_interval profile""".split(),
     "eval_only", lambda config: config.eval_only),
)


# ---------------------------------------------------------------- options as they are typed

def flag(name: str) -> str:
    """Return the flag of an option: "--grad-accum" of "grad_accum"."""
    return f"--{name.replace('_', '-')}"


def as_typed(name: str, value) -> str:
    """Return an option as it is typed: "--compile", "--no-bias", "--parallel fsdp", "NANOTE_ENGINE=te"."""
    if name == "NANOTE_ENGINE":
        return f"{name}={value}"
    if value is True:
        return flag(name)
    if value is False:
        return flag(f"no_{name}")
    return f"{flag(name)} {value}"


def is_model_file(name: str) -> bool:
    """Return whether a value of --model is path/to/file.py:Class, a model of the user's own."""
    return ".py:" in name
