"""Models by name or file: which one a run trains, its config from options, and the model on a device.

`--model` takes a name from MODELS, `fast`, `auto` (fast where it can run, else optimized), or
path/to/file.py:Class for a model of your own (own_model.py).
"""
import dataclasses
import importlib
import inspect
import os

import torch

from nanote import engine, health, own_model, parallel, recipes
from nanote.command import error_line
from nanote.config import PRESETS, REFUSED_WITH_FAST_MODEL, TrainConfig, as_typed, find_refusal, is_model_file
from nanote.own_model import field_names, load_file, read_fields

MODELS = {  # --model: (module, model class, config class)
    "optimized": ("model_te_optimized", "OptimizedGPT2Model", "OptimizedConfig"),
    "advanced": ("model_te_advanced", "AdvancedGPT2Model", "AdvancedConfig"),
    "fused": ("model_te_fused", "FusedGPT2Model", "FusedConfig"),
    "custom": ("model_te_custom", "CustomGPT2Model", "CustomConfig"),
    "te": ("model_te", "TEGPT2Model", "TEConfig"),
}
FAST = ("model_te_fast", "FastGPT2Model", "FastConfig")  # the network of optimized, for a Hopper GPU
# Options that are fields of a model's config. The config of a model file may lack some.
MODEL_OPTIONS = """
    n_layer n_head n_kv_head head_dim n_embd n_inner activation use_rmsnorm use_rotary rope_theta rope_scaling
    use_qk_norm bias qkv_bias tie_embeddings layernorm_epsilon dropout attn_dropout attention
    gradient_checkpointing fp8_lm_head fp8_skip_first fp8_skip_last""".split()
INSTEAD = {  # what the kit's files that lack an option of a preset have
    "n_kv_head": "as many key and value heads as heads", "head_dim": "head_dim = n_embd / n_head",
    "activation": "GELU", "use_rmsnorm": "LayerNorm", "use_rotary": "learned positions"}


def make_model(config, device, dtype, recipe, saved=None, shards_blocks=False):
    """Build the model of a TrainConfig.

    Args:
        recipe: TE's recipe object; None: without FP8.
        saved: model_config of the checkpoint that the run continues. Fields of your own model that are no
            options keep its values.
        shards_blocks: with --parallel fsdp and hsdp, shard each block when it is built, if the model can be
            built so.
    """
    name, reason_against_fast = pick_model(dataclasses.asdict(config), device, dtype)
    model_config = resolve_config(name, config, recipe is not None, saved)
    kind = config.parallel if shards_blocks and can_shard_as_built(name) else "ddp"
    with parallel.sharding_blocks(kind, torch.device(device).type, config.grad_accum):
        model = instantiate(name, model_config, device=device, dtype=dtype)
    if recipe is not None:
        recipes.check_shapes(model_config, config.micro_batch_size, config.seq_len, config.fp8_recipe)
        model.fp8_recipe = recipe
        check_gemms(model, config)
    if config.loss_chunks > 1:
        from nanote.chunked_loss import chunk_loss
        chunk_loss(model, config.loss_chunks)
    model.engine_description = f"on {engine_of(model)}"  # now: fsdp replaces the classes of its modules
    if reason_against_fast:
        model.engine_description += f" (not model_te_fast: {reason_against_fast})"
    return model


def can_shard_as_built(name: str) -> bool:
    """Return whether each block of model `name` may be sharded when it joins its ModuleList. Of a model of
    your own its class says so (own_model.py), but not a base class: a derived one may go on building."""
    model_class, _ = model_classes(name)
    return not is_model_file(name) or vars(model_class).get("shards_blocks_as_built", False)


def resolve_config(name: str, config, use_fp8: bool, saved: dict | None):
    """Return the config of model `name` for a TrainConfig. Refuse or print options that the model lacks."""
    options = dataclasses.asdict(config) | {"use_fp8": use_fp8}
    if is_model_file(name):
        load_file(name)
        options = (saved or {}) | options
    if config.set:
        _, config_class = model_classes(name)
        options |= read_fields(config.set, config_class, saved)
    check_lacked(config, lacked_options(name))
    return make_model_config(name, options)


def lacked_options(name: str) -> dict[str, str]:
    """Return {option that model `name` has no place for: what it lacks, and what to do}."""
    model_class, config_class = model_classes(name)
    fields = field_names(config_class)
    advice = "leave the option out, or use --model optimized"
    lacked = {}
    if "use_fp8" not in fields:
        lacked["fp8_recipe"] = (f"the config of --model {name} has no field use_fp8, so it does not train in "
                                "FP8; pass --fp8-recipe none")
    if not takes_argument(model_class, "cu_seqlens"):
        lacked["pack_documents"] = f"forward of --model {name} has no argument cu_seqlens; {advice}"
    for option in MODEL_OPTIONS:
        if option not in fields:
            lacked[option] = f"the config of --model {name} has no field {option}; {advice}"
    if name == "fast":
        for refusal in REFUSED_WITH_FAST_MODEL:  # config.check has refused these, with a better reason
            for option in refusal.settings:
                lacked.pop(option, None)
    return lacked


def check_lacked(config, lacked: dict[str, str]) -> None:
    """Raise ValueError if a user asked for an option that the model lacks. Print those that only --preset
    asks for. lacked: of `lacked_options`, which know the config and the forward method of the model."""
    defaults = vars(TrainConfig())
    preset = defaults | PRESETS[config.preset]
    ignored = []
    for option, reason in lacked.items():
        value = getattr(config, option)
        if option == "fp8_recipe":
            is_refused = value != "none"
        elif option == "pack_documents":
            is_refused = value
        else:
            is_from_run = value not in (defaults[option], preset[option])  # a checkpoint or its config.json
            is_refused = option in config.typed or is_from_run
        if is_refused:
            raise ValueError(f"{as_typed(option, value)}: {reason}")
        if option in MODEL_OPTIONS and value != defaults[option]:
            ignored.append(option)
    if ignored and parallel.rank() == 0:
        print_ignored(config, ignored)


def print_ignored(config, ignored: list[str]) -> None:
    """Print what a model lacks of --preset, and what the kit's files have instead."""
    lacks = []
    for name in ignored:
        value = getattr(config, name)
        lacks.append(name if value is True else f"{name}={value}")
    line = f"--model {config.model}: has no {', '.join(lacks)} of --preset {config.preset}"
    if not is_model_file(config.model):
        instead = [INSTEAD[name] for name in ignored if name in INSTEAD]
        line += f": trains with {', '.join(instead)}"
    print(line, flush=True)


def engine_of(model) -> str:
    """Return the engine whose modules a model has, or PyTorch."""
    found = {engine.of_module(type(module).__module__) for module in model.modules()}
    names = [row.name for key, row in engine.ENGINES.items() if key in found]
    return " and ".join(names) or "PyTorch"


def check_gemms(model, config) -> None:
    """Raise ValueError if one of the kit's models would run no GEMM in FP8."""
    if is_model_file(config.model):
        return  # it has not run yet, so that its GEMMs in FP8 are not known
    in_fp8, _ = health.count_gemms_by_config(model)
    if not in_fp8:
        raise ValueError(f"--fp8-skip-first {config.fp8_skip_first}, --fp8-skip-last {config.fp8_skip_last}, "
                         f"--no-fp8-lm-head: leave no GEMM of {config.n_layer} blocks in FP8; skip fewer "
                         "blocks, leave --no-fp8-lm-head out, or pass --fp8-recipe none")


def pick_model(options: dict, device, dtype) -> tuple[str, str]:
    """Return the name of the model that --model means, and why "auto" is not the fast one."""
    if options["model"] not in ("auto", "fast"):
        return options["model"], ""
    if options["model"] == "auto" and torch.device(device).type != "cuda":
        return "optimized", "there is no GPU"
    reason = fast_unsupported_reason(options, dtype)
    if reason and options["model"] == "fast":
        raise ValueError(f"--model fast: {reason}; pass --model optimized")
    if reason:
        return "optimized", reason
    return "fast", ""


def fast_unsupported_reason(options: dict, dtype) -> str:
    """Return why model_te_fast.py cannot train with these options on this GPU; "" if it can. This knows the
    dtype of the weights, and whether Triton's kernels run; recipes.check_machine does not."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not is_interpreted:
        return "there is no GPU"
    if options["n_embd"] > 16384:  # the norms' limit
        return f"--n-embd {options['n_embd']} is over 16384"
    options = options | {"model": "fast", "NANOTE_ENGINE": os.environ.get("NANOTE_ENGINE"),
                         "dtype": str(dtype).removeprefix("torch.")}
    if refusal := find_refusal(options, REFUSED_WITH_FAST_MODEL):
        [other] = refusal.settings.keys() - {"model"}
        return f"{as_typed(other, options[other])}: {refusal.reason}"
    from fast_kernels import modules  # needs Triton
    return modules.unsupported_reason()


def describe(model) -> str:
    """Return a line about a model of `make_model`: its class and size, which engine runs it, and why."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {parameters:,} parameters, {getattr(model, 'engine_description', '')}"


def describe_fp8(model, config) -> str:
    """Return a line about the precision of a model of `make_model`: recipe, format, and how many GEMMs run in
    FP8. Of your own model, those that did in an uncompiled pass, such as `own_model.check_first_pass`."""
    if config.fp8_recipe == "none":
        return "--fp8-recipe none"
    line = f"--fp8-recipe {config.fp8_recipe}"
    if fp8_format := recipes.resolve_format(config.fp8_recipe, config.fp8_format):
        line += f" {fp8_format}"
    if is_model_file(config.model):
        in_fp8, total = health.count_gemms_that_ran(model)
    else:
        in_fp8, total = health.count_gemms_by_config(model)
    line += f", {in_fp8} of {total} GEMMs in FP8"
    if not in_fp8:
        line += " (use te.Linear in te.autocast, or pass --fp8-recipe none)"
    return line


def padded_vocab_size(needed: int) -> int:
    """Round a vocabulary up to a multiple of 32, which FP8 GEMMs need; above 1024 of 128, which is faster."""
    return recipes.round_up(needed, 32 if needed <= 1024 else 128)


# ---------------------------------------------------------------- by name

def takes_argument(model, argument):
    """Return whether the forward method of a model, or of a class of models, takes this argument."""
    return argument in inspect.signature(model.forward).parameters


def portable_name(name: str) -> str:
    """Return the name of the model file that runs on any machine with the weights of model `name`."""
    return "optimized" if name in ("auto", "fast") else name


def model_classes(name):
    """Return (model class, config class). Raises ValueError for an unknown name."""
    if is_model_file(name):
        return own_model.classes(name)
    known = MODELS | {"auto": MODELS["optimized"], "fast": FAST}
    if name not in known:
        raise ValueError(f"--model {name}: unknown; use {', '.join(known)}, or path/to/file.py:Class")
    module_name, model_class, config_class = known[name]
    module = importlib.import_module(module_name)
    return getattr(module, model_class), getattr(module, config_class)


def make_model_config(name, options):
    """Build the config of model `name` from the `options` it has fields for. None: the field's default."""
    config_class = model_classes(name)[1]
    fields = field_names(config_class)
    values = {key: value for key, value in options.items() if key in fields and value is not None}
    try:
        return config_class(**values)
    except (TypeError, AssertionError) as error:  # of the user's own class; the kit's own raise ValueError
        raise ValueError(f"--model {name}: {config_class.__name__}: {error_line(error)}") from error


def instantiate(name, model_config, *, device="cpu", dtype=torch.float32):
    """Build a model with parameters on `device` in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_classes(name)[0](model_config).to(device)  # .to: a model may choose a device itself
    finally:
        torch.set_default_dtype(before)


def pick_device(name):
    """Return the device that --device names: auto, cpu, cuda or cuda:N. ValueError if it does not exist."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    device = "cuda:0" if name == "cuda" else name
    if name == "auto":
        device = gpus[0] if gpus else "cpu"
    if device not in ("cpu", *gpus):
        raise ValueError(f"--device {name}: this machine has {', '.join(('cpu', *gpus))}; use --device auto")
    return torch.device(device)
