"""Options: TrainConfig, presets, the command line of every script, and errors in one line.

The options of a --config file, and those of the checkpoint to resume, become arguments in front of the typed
ones. So tyro checks all of them alike, and the last value of an option wins.
"""
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

import tyro
import yaml

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
    use_qk_norm: bool = False  # Normalize the queries and keys of each head.
    bias: bool = True  # Biases in linear layers.
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
        """Raise ValueError for a number out of range, and for options that exclude each other."""
        for rule, (is_kept, names) in RANGES.items():
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not is_kept(value):
                    raise ValueError(f"{_flag(name)} {value}: must be {rule}")
        self.check_together(os.environ.get("NANOTE_ENGINE"))  # None: recipes.make knows the engine
        if not self.compile and (self.compile_mode != "default" or self.compile_fullgraph):
            raise ValueError("--compile-mode, --compile-fullgraph: without effect; pass --compile too")

    def check_together(self, engine: str | None) -> None:
        """Raise ValueError for options that do not go together, or not with this engine."""
        if refusal := find_refusal(vars(self) | {"NANOTE_ENGINE": engine}):
            one, others, reason = refusal
            raise ValueError(f"{one}: does not go with {others}: {reason}; leave one of them out")

    def check_graphable(self, has_fp8_gpu: bool) -> None:
        """Raise ValueError if --cuda-graph on is impossible here."""
        if self.cuda_graph == "on" and not has_fp8_gpu:
            raise ValueError("--cuda-graph on: there is no GPU with an FP8 engine here; leave the option out")

    def uses_cuda_graph(self, has_fp8_gpu: bool) -> bool:
        """Return whether steps are replayed as CUDA graphs."""
        is_refused = find_refusal(vars(self) | {"cuda_graph": "on"}, "cuda_graph") is not None
        return has_fp8_gpu and self.cuda_graph != "off" and not is_refused


# These decide which tensors the model and the optimizer have: on --resume they must equal the checkpoint's.
ARCHITECTURE = """preset model n_layer n_head n_kv_head head_dim n_embd n_inner vocab_size n_positions
    activation use_rmsnorm use_rotary rope_theta use_qk_norm bias tie_embeddings layernorm_epsilon
    optimizer""".split()
RANGES = {  # {rule: (whether a value keeps it, options)}
    "a number that float32 can hold": (lambda v: abs(v) < 2.0**128, "rope_theta lr weight_decay grad_clip"),
    "at least 1": (lambda v: v >= 1, "max_steps micro_batch_size seq_len grad_accum eval_tokens log_interval "
        "keep_checkpoints n_positions vocab_size n_layer n_head n_kv_head head_dim n_embd n_inner "
        "loss_chunks fp8_amax_history_len"),
    "0 or more": (lambda v: v >= 0, "warmup_steps eval_interval checkpoint_interval fp8_health_interval seed "
                  "weight_decay grad_clip fp8_skip_first fp8_skip_last fp8_margin"),
    "above 0": (lambda v: v > 0, "lr rope_theta"),
    "from 0 to 1": (lambda v: 0 <= v <= 1, "layernorm_epsilon"),
    "at least 0 and below 1": (lambda v: 0 <= v < 1, "dropout attn_dropout"),
}
ON = True  # in REFUSED: any value that turns the option on
SHARDED, WITHOUT_GRAPH, FAST = ("parallel", ("fsdp", "hsdp")), ("cuda_graph", ("on",)), ("model", ("fast",))
WITHOUT_FP8, MUON = ("fp8_recipe", ("none",)), ("optimizer", ("muon",))
NOT_DELAYED = ("fp8_recipe", ("current", "block", "mxfp8", "nvfp4", "custom"))
# Options that do not go together, as (option, values), and why. The environment variable NANOTE_ENGINE counts
# as an option. What a model file lacks has no entry here: its config has no such field.
REFUSED = (
    (SHARDED, ("compile", ON), "not tested with sharded weights"),
    (SHARDED, MUON, "Muon needs whole matrices"),
    (WITHOUT_FP8, ("fp8_health_interval", ON), "there is no FP8"),
    (("compile", ON), ("fp8_health_interval", ON), "compiled code runs no hooks"),
    (WITHOUT_GRAPH, ("compile", ON), "--compile-mode reduce-overhead captures its own graphs"),
    (WITHOUT_GRAPH, ("gradient_checkpointing", ON), "recomputation reads random states on the host"),
    (WITHOUT_GRAPH, ("attn_dropout", ON), "each replay would repeat the dropout mask"),
    (FAST, ("NANOTE_ENGINE", ("te", "reference")), "model_te_fast runs on fast_kernels only"),
    (FAST, NOT_DELAYED, "model_te_fast has delayed scaling only"),
    (FAST, ("dtype", ("float32",)), "weights of model_te_fast are BF16"),
    (FAST, ("compile", ON), "model_te_fast runs uncompiled, fastest in CUDA graphs"),
    (FAST, ("attn_dropout", ON), "the attention of model_te_fast has no dropout"),
    (FAST, ("fp8_health_interval", ON), "fused modules of model_te_fast cannot be measured"),
    (FAST, ("attention", ("sdpa", "te", "flash")), "model_te_fast has one attention kernel"),
    (("NANOTE_ENGINE", ("fast",)), NOT_DELAYED, "fast_kernels has delayed scaling only"),
    (("NANOTE_ENGINE", ("fast",)), ("dtype", ("float32",)), ("fp8_recipe", ("delayed",)),
     "FP8 GEMMs of fast_kernels take BF16 weights"),
    (("NANOTE_ENGINE", ("reference",)), ("fp8_recipe", ("nvfp4", "custom")), "only TE has this recipe"),
    (("NANOTE_ENGINE", ("te",)), ("compile", ON), ("fp8_recipe", ("delayed",)),
     "TE does not support delayed scaling under torch.compile; NANOTE_ENGINE=fast (Hopper) does"),
)
OF_ONE_RUN = {"out_dir", "resume", "config", "eval_only", "profile"}  # another run or start has its own
GONE = dict(  # options of earlier versions, with their defaults
    checkpoint_every=1, fast_kernels=True, fused_block=True, fused_loss=True, fp8_dgrad_fast_accum_k=3072,
    hsdp_replicas=None, fp8_logits_rounding="nearest", max_skipped_steps=10, grad_accum_dtype="auto",
    grad_reduce_dtype="auto", eval_steps=None, background_saves=True, nsys=None, memory_snapshot=None,
    gc_interval=0, torch_deterministic=False, expandable_segments=False, beta1=0.9, beta2=0.95,
    betas=[0.9, 0.95], min_lr_ratio=0.1, decay_fraction=0.2, reshard_after_forward=True,
    fp8_param=False, offload_activations=0)

# (options, another one, whether they have no effect with it). What a model lacks is refused in models.py.
WITHOUT_EFFECT = (
    ("fp8_amax_history_len fp8_amax_compute_algo fp8_margin", "fp8_recipe",
     lambda config: config.fp8_recipe != "delayed"),
    ("fp8_format", "fp8_recipe",
     lambda config: config.fp8_recipe.partition(":")[0] in ("none", "nvfp4", "custom")),
    ("fp8_lm_head fp8_skip_first fp8_skip_last", "fp8_recipe", lambda config: config.fp8_recipe == "none"),
    ("rope_theta", "use_rotary", lambda config: not config.use_rotary and ".py:" not in config.model),
    ("param_remainders", "dtype", lambda config: config.dtype == "float32"),
    ("eval_tokens", "eval_interval", lambda config: config.eval_interval == 0 and not config.eval_only),
    ("keep_checkpoints", "checkpoint_interval", lambda config: config.checkpoint_interval == 0),
    ("fp8_health_interval", "max_steps", lambda config: config.fp8_health_interval > config.max_steps),
    ("""dropout attn_dropout gradient_checkpointing max_steps grad_accum lr lr_schedule warmup_steps optimizer
     weight_decay grad_clip seed moment_dtype param_remainders cuda_graph eval_interval checkpoint_interval
     keep_checkpoints log_interval wandb fp8_health_interval profile""", "eval_only",
     lambda config: config.eval_only),
)
ASKS_NOTHING = (None, False, "auto", "default", "off")  # values that need no other option; 0 is False


def find_refusal(options: dict, option: str | None = None) -> tuple[str, str, str] | None:
    """Return the first entry of REFUSED whose options all apply, as they are typed: (one, the others, why).
    `option`: only entries that begin with it."""
    for *conditions, reason in REFUSED:
        if option in (None, conditions[0][0]) and all(_applies(options, *some) for some in conditions):
            one, *others = [_typed(name, options[name]) for name, _ in conditions]
            return one, " and ".join(others), reason
    return None


def _applies(options: dict, name: str, values) -> bool:
    value = options.get(name)
    return bool(value) if values is ON else str(value).partition(":")[0] in values  # custom:module.function


def _typed(name: str, value) -> str:
    """Return an option as it is typed: "--compile", "--parallel fsdp", "NANOTE_ENGINE=te"."""
    if name == "NANOTE_ENGINE":
        return f"{name}={value}"
    return _flag(name) if value is True else f"{_flag(name)} {value}"


def parse(config_class, argv, prog, description=None, default=tyro.MISSING_NONPROP, **options):
    """Return `config_class` filled from `argv` (None: sys.argv). tyro prints help and mistakes, and exits."""
    with _terminal_of(40):  # columns; in one of 5 tyro does not finish --help
        return tyro.cli(
            config_class, args=argv, prog=prog, description=description, default=default, **options)


@contextlib.contextmanager
def _terminal_of(columns: int):
    """Let shutil.get_terminal_size, which tyro asks, return at least this many columns."""
    before, width = os.environ.get("COLUMNS"), shutil.get_terminal_size().columns
    os.environ["COLUMNS"] = str(max(columns, width))
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def require_at_least(least: int, options, *names: str) -> None:
    """Raise ValueError for an option, or one of its values, that is below `least`; None is no value."""
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, tuple | list) else [value]:
            if number is not None and number < least:
                raise ValueError(f"{_flag(name)} {number}: must be at least {least}")


def run_command(main, prog: str) -> int:
    """Call `main()`; return its result or 0; 2 and one line for ValueError and OSError, 130 after Ctrl-C."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None: closed by the shell, as in >&-
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not have every character
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # so that Ctrl-C in an import printed no traceback
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with contextlib.redirect_stdout(NamedStream(sys.stdout, "stdout")):
            code, message = main() or 0, ""
    except BrokenPipeError:  # nobody reads stdout, as in `| head`
        code, message = 141, ""
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # if rank 0 fails too, torchrun ends this process meanwhile: one line is enough
        code, message = 2, f"{prog}: {in_a_line(error)}\n"
    except KeyboardInterrupt as stop:
        code, message = 130, f"{prog}: {str(stop) or 'interrupted'}\n"
    try:
        sys.stdout.flush()
    except OSError as error:  # nobody reads it, or the disk is full
        if code == 0 and not isinstance(error, BrokenPipeError):
            message = f"{prog}: stdout: {in_a_line(error)}\n"
        code = code or 1
        silence(sys.stdout)
    try:
        sys.stderr.write(message)
        sys.stderr.flush()
    except OSError:
        code = code or 1
        silence(sys.stderr)
    return code


def silence(stream) -> None:
    """Send what a stream still holds to nowhere, so that it does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class NamedStream:
    """A text stream whose OSErrors have its name as their file name."""

    def __init__(self, stream, name: str):
        self.stream, self.name = stream, name

    def __getattr__(self, attribute):
        return getattr(self.stream, attribute)

    def write(self, text: str) -> int:
        with self._naming():
            return self.stream.write(text)

    def flush(self) -> None:
        with self._naming():
            self.stream.flush()

    @contextlib.contextmanager
    def _naming(self):
        try:
            yield
        except OSError as error:
            error.filename = self.name
            raise


def in_a_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_options(argv=None, restarted: str | None = None) -> TrainConfig:
    """Parse train.py's command line over the options of --config, of the checkpoint, and of the preset.
    `restarted`: folder of the run whose processes torchrun has started again."""
    def glance(arguments) -> TrainConfig:  # at what decides which defaults the others have
        return parse(TrainConfig, arguments, "train.py", add_help=False, return_unknown_args=True)[0]

    typed = list(sys.argv[1:] if argv is None else argv)
    if restarted:
        has_checkpoint = any(Path(restarted).glob("step-*"))
        typed += [f"--out-dir={restarted}", "--resume" if has_checkpoint else "--no-resume"]
    file, arguments, names = glance(typed).config, typed, _option_names(typed)
    if file:
        in_file, is_of_run = _read_file(file)
        arguments = [*_as_arguments(in_file), *typed]
        names |= set() if is_of_run else _option_names(_as_arguments(in_file))
    early, folder = glance(arguments), None
    if early.resume or early.eval_only:
        if glance(typed).init_from and not restarted:
            raise ValueError("--init-from: is for a new run; --resume and --eval-only have their own weights")
        folder, meta = _checkpoint_to_continue(early.out_dir, early.preset, early.eval_only)
        saved = _options_of_run(meta["config"], folder)
        arguments = [*_as_arguments(saved), *arguments]
    default = TrainConfig(**PRESETS[glance(arguments).preset])
    config = parse(TrainConfig, arguments, "train.py", default=default)
    config.typed = frozenset(names)
    for name in ("model", "fp8_recipe"):
        value = getattr(config, name)
        if (".py:" in value or value.startswith("custom:")) and value != getattr(glance(typed), name):
            raise ValueError(f"{_flag(name)} {value}: code is never taken from a file of options or a "
                             f"checkpoint; pass {_flag(name)} {value} on the command line")
    config.check()
    _print_without_effect(config)
    if folder:
        _check_resume(vars(config), saved, folder, meta["step"])
        config.out_dir = str(folder if config.eval_only else folder.parent)
    elif config.init_from and Path(config.init_from, "tokenizer.json").is_file():
        from nanote.transfer import check_tokenizer  # imports PyTorch
        check_tokenizer(config.init_from, config.data)
    return config


def _print_without_effect(config: TrainConfig) -> None:
    """Print a line about typed options that have no effect with another one."""
    for names, other, has_no_effect in WITHOUT_EFFECT:
        asked = [_as_typed(config, name) for name in names.split()
                 if name in config.typed and getattr(config, name) not in ASKS_NOTHING]
        if asked and has_no_effect(config) and os.environ.get("RANK", "0") == "0":
            print(f"{', '.join(asked)}: no effect with {_as_typed(config, other)}", flush=True)


def _as_typed(config: TrainConfig, name: str) -> str:
    """Return an option as on the command line: "--lr 0.1", "--no-compile"."""
    return " ".join(_as_arguments({name: getattr(config, name)})).replace("=", " ", 1)


BOOLEANS = dict(true=True, yes=True, on=True, false=False, no=False, off=False)  # for a boolean in YAML


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _as_arguments(options: dict):
    """Yield "--lr=0.1" and "--use-rotary" for {"lr": 0.1, "use_rotary": True}."""
    for name, value in options.items():
        if name == "set":  # a list, or a list of lists as a run stores it
            lists = ([some] if isinstance(some, str) else some for some in value)
            yield from (_flag(name), *(text for some in lists for text in some))
        elif isinstance(value, bool):
            yield _flag(name if value else f"no_{name}")
        else:
            yield f"{_flag(name)}={value}"


def _option_names(arguments) -> set[str]:
    """Return the options among arguments: {"lr", "bias"} for ["--lr=0.1", "--no-bias"]."""
    known = {field.name for field in fields(TrainConfig)}
    words = [word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")]
    return {word if word in known else word.removeprefix("no_") for word in words} & known


class YamlLoader(yaml.SafeLoader):
    """A YAML loader that reads plain scalars as JSON does, and what JSON has not as text: 1e-3 is a number,
    but 10:12, 010, yes, on, off and 2026-01-01 are text, of which YAML 1.1 makes 612, 8, booleans and a
    date."""
    yaml_implicit_resolvers = {}


for tag, pattern, first in (
        ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"), ("null", "|~|null|Null|NULL", ["", *"~nN"]),
        ("int", "[-+]?(0|[1-9][0-9]*)", "-+0123456789"), ("merge", "<<", "<"),
        ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789")):
    YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^({pattern})$"), first)


def _read_file(path: str) -> tuple[dict, bool]:
    """Return the options in a JSON or YAML file, and whether it is the config.json of a run."""
    try:
        content = Path(path).read_text()
        options, texts = yaml.load(content, YamlLoader), yaml.load(content, yaml.BaseLoader)
    except (ValueError, yaml.YAMLError) as error:  # JSON is YAML, too
        raise ValueError(f"--config {path}: neither JSON nor YAML: {in_a_line(error)}") from None
    if not isinstance(options, dict):
        raise ValueError(f"--config {path}: holds no options; write them by name, such as lr: 0.001")
    if "set" in options:
        options["set"] = _texts_of_set(path, options["set"])
    if options.pop("command", None) is None:
        return {str(name): _as_option(str(name), value, texts.get(str(name)))
                for name, value in options.items()}, False
    of_0_1 = options.get("config")  # version 0.1 has them there; now it is the name of a file
    return _options_of_run(of_0_1 if isinstance(of_0_1, dict) else options, path), True


def _texts_of_set(path: str, value) -> list[str]:
    """Return FIELD=VALUE of each field of --set in a file: {"window": 32}, "window=32", a list of such texts,
    or a list of lists, as a run stores it."""
    if isinstance(value, dict):
        return [f"{field}={json.dumps(value[field])}" for field in value]
    lists = value if isinstance(value, list) else [value]
    texts = [text for some in lists for text in (some if isinstance(some, list) else [some])]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"--config {path}: set {json.dumps(value)}: must be fields with values, such as "
                         "set: {window: 32}")
    return texts


def _as_option(name: str, value, text: str | None):
    """Return the value of an option in a file: a boolean, or the `text` of the file, for tyro to read."""
    is_boolean = {field.name: field.type for field in fields(TrainConfig)}.get(name.replace("-", "_")) is bool
    if is_boolean and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    return text if isinstance(value, int | float) and isinstance(text, str) else value


def _options_of_run(options: dict, source) -> dict:
    """Return the options that another start takes over. Print those that this version does not have."""
    known = {field.name for field in fields(TrainConfig)}
    gone = [f"{name} {value}" for name, value in options.items()
            if name not in known and GONE.get(name) != value]
    if gone:
        print(f"{source}: left out, since this version has no such options: {', '.join(gone)}")
    return {name: value for name, value in options.items() if name in known - OF_ONE_RUN}


def _checkpoint_to_continue(out_dir: str | None, preset: str, eval_only: bool) -> tuple[Path, dict]:
    """Return the checkpoint of --resume or --eval-only, and its meta.json."""
    from nanote import checkpoint  # imports PyTorch, which --help need not wait for
    runs = [*Path("out").glob(preset), *Path("out").glob(f"{preset}-[0-9]*")]
    newest = max(runs, key=lambda run: run.stat().st_mtime, default=f"out/{preset}")
    folder = checkpoint.find(out_dir or newest)
    if folder != checkpoint.latest(folder.parent) and not eval_only:
        raise ValueError(f"--resume: {folder.parent} has later checkpoints than {folder.name}; remove those")
    return folder, checkpoint.read_meta(folder)


def _check_resume(now: dict, saved: dict, folder: Path, step: int) -> None:
    """Raise ValueError for options that do not fit the checkpoint of a step, whose own are `saved`."""
    for name in ARCHITECTURE:
        value, before = now[name], saved.get(name, now[name])
        is_file = ".py:" in str(value) and ".py:" in str(before)  # it may have moved
        if value != before and not is_file and not {value, before} <= {"auto", "fast", "optimized"}:
            raise ValueError(f"{_flag(name)} {value}: {folder} has {before}; leave it out or start a new run")
    if now["max_steps"] < step and not now["eval_only"]:
        raise ValueError(f"--max-steps {now['max_steps']}: {folder} has done {step} steps; pass {2 * step}")
