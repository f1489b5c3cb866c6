"""Models by name or file: their classes, a config from options, and a model on a device.

`--model` takes a name from MODELS, or path/to/file.py:Class for a model of your own. The last section of
guide/changing_the_model.md lists what the trainer needs of your model. Details:

- The config is the dataclass of the constructor's annotation, or the only one in the file with the fields
  `vocab_size` and `n_positions`. `model.config` is that config.
- Labels are already shifted; -100 is ignored. The loss is a scalar; logits are (B, S, vocab_size).
- `model.blocks` holds the transformer blocks, for --optimizer muon and --parallel fsdp only.
- A forward with an argument `is_first_microbatch` gets it with gradient accumulation, to cast weights to FP8
  once per step; one with `cu_seqlens` can train with --pack-documents.
"""
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
import types
import typing
from pathlib import Path

import torch

from nanote import checkpoint, health, parallel, recipes
from nanote.config import PRESETS, TrainConfig, find_refusal, in_a_line

MODELS = {  # --model: (module, model class, config class)
    "optimized": ("model_te_optimized", "OptimizedGPT2Model", "OptimizedConfig"),
    "advanced": ("model_te_advanced", "AdvancedGPT2Model", "AdvancedConfig"),
    "fused": ("model_te_fused", "FusedGPT2Model", "FusedConfig"),
    "custom": ("model_te_custom", "CustomGPT2Model", "CustomConfig"),
    "te": ("model_te", "TEGPT2Model", "TEConfig"),
}
FAST = ("model_te_fast", "FastGPT2Model", "FastConfig")  # the network of optimized, for a Hopper GPU
# fields of a model's config, which it may lack
OPTIONS = """n_layer n_head n_kv_head head_dim n_embd n_inner activation use_rmsnorm use_rotary rope_theta
    use_qk_norm bias tie_embeddings layernorm_epsilon dropout attn_dropout attention gradient_checkpointing
    fp8_lm_head fp8_skip_first fp8_skip_last""".split()
CHECKED_FOR_FAST = {"attn_dropout", "attention"}  # FastConfig has no such fields: see _reason_against_fast
ENGINES = {  # {package of a model's modules: its name}
    "transformer_engine": f"Transformer Engine {recipes.TE_VERSION or ''}".rstrip(),
    "fast_kernels": "fast_kernels", "te_reference": "te_reference, which emulates FP8"}
INSTEAD = {  # what the kit's files that lack an option have
    "n_kv_head": "as many key and value heads as heads", "head_dim": "head_dim = n_embd / n_head",
    "activation": "GELU", "use_rmsnorm": "LayerNorm", "use_rotary": "learned positions"}


def make_model(config, device, dtype, recipe, saved=None):
    """Build the model of a TrainConfig. `saved`: model_config of the checkpoint that the run continues, whose
    values the fields of your own model that are no options keep."""
    options = dataclasses.asdict(config) | {"use_fp8": recipe is not None}
    name, reason = pick_model(options, device, dtype)
    if is_file(name):
        load_file(name)
        options = (saved or {}) | options
    model_class, config_class = model_classes(name)
    fields = {field.name for field in dataclasses.fields(config_class)}
    if config.set:
        options |= read_fields(config.set, config_class, saved)
    if recipe is not None and "use_fp8" not in fields:
        raise ValueError(f"--fp8-recipe {config.fp8_recipe}: the config of --model {config.model} has no "
                         "field use_fp8, so it does not train in FP8; pass --fp8-recipe none")
    if config.pack_documents and not takes_argument(model_class, "cu_seqlens"):
        raise ValueError(f"--pack-documents: forward of --model {config.model} has no argument cu_seqlens; "
                         "leave the option out, or use --model optimized")
    if lost := ignored_options(config, fields if name != "fast" else fields | CHECKED_FOR_FAST):
        print_lost(config, lost)
    model_config = make_model_config(name, options)
    model = build_model(name, model_config, device=device, dtype=dtype)
    if recipe is not None:
        recipes.check_shapes(model_config, config.micro_batch_size, config.seq_len, config.fp8_recipe)
        model.fp8_recipe = recipe
        check_gemms(model, config)
    if config.loss_chunks > 1:
        from nanote.chunked_loss import chunk_loss
        chunk_loss(model, config.loss_chunks)
    model.choice = f"on {engine_of(model)}" + (f" (not model_te_fast: {reason})" if reason else "")
    return model


def engine_of(model) -> str:
    """Return the engine whose modules a model has, or PyTorch."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return " and ".join(name for package, name in ENGINES.items() if package in packages) or "PyTorch"


def check_gemms(model, config) -> None:
    """Raise ValueError if one of the kit's models would run no GEMM in FP8."""
    if is_file(config.model) or health.count_gemms(model, has_run=False)[0]:
        return
    raise ValueError(f"--fp8-skip-first {config.fp8_skip_first}, --fp8-skip-last {config.fp8_skip_last}, "
                     f"--no-fp8-lm-head: leave no GEMM of {config.n_layer} blocks in FP8; skip fewer blocks, "
                     "leave --no-fp8-lm-head out, or pass --fp8-recipe none")


def ignored_options(config, fields) -> list[str]:
    """Return the options of the preset that a model ignores, since its config does not have these `fields`.
    ValueError for an option that the user typed, or a value that is neither the preset's nor the default."""
    defaults, preset, ignored = vars(TrainConfig()), PRESETS[config.preset], []
    for option in OPTIONS:
        if option in fields:
            continue
        value = getattr(config, option)
        if option in config.typed or value not in (defaults[option], preset.get(option)):
            raise ValueError(f"--{option.replace('_', '-')}: the config of --model {config.model} has no "
                             f"field {option}; leave the option out, or use --model optimized")
        if value != defaults[option]:
            ignored.append(option)
    return ignored


def print_lost(config, lost: list[str]) -> None:
    """Print what a model lacks of --preset, and what the kit's files have instead."""
    values = [name if getattr(config, name) is True else f"{name}={getattr(config, name)}" for name in lost]
    line = f"--model {config.model}: has no {', '.join(values)} of --preset {config.preset}"
    if not is_file(config.model):
        line += f": trains with {', '.join(INSTEAD[name] for name in lost if name in INSTEAD)}"
    if parallel.rank() == 0:
        print(line, flush=True)


def read_fields(texts, config_class, saved: dict | None) -> dict:
    """Return {field: value} of --set FIELD=VALUE: JSON or else text. `saved`: fields that may not change."""
    kinds, of_train, values = typing.get_type_hints(config_class), {*vars(TrainConfig()), "use_fp8"}, {}
    names = ", ".join(name for name in kinds if name not in of_train)
    last = {text.partition("=")[0]: text for some in texts for text in some}  # --set may be repeated
    for name, text in last.items():
        _, sign, value = text.partition("=")
        if name in of_train:
            option = name.replace("_", "-").replace("use-fp8", "fp8-recipe")
            raise ValueError(f"--set {text}: is an option of train.py; pass --{option}")
        if name not in kinds or not sign:
            raise ValueError(f"--set {text}: must be FIELD=VALUE; {config_class.__name__} has {names}")
        with contextlib.suppress(ValueError):  # not JSON
            parsed = json.loads(value)
            value = parsed if is_of_kind(parsed, kinds[name]) else value
        if not is_of_kind(value, kinds[name]):
            raise ValueError(f"--set {text}: must be of type {getattr(kinds[name], '__name__', kinds[name])}")
        if saved and saved.get(name) != value:
            raise ValueError(f"--set {text}: the checkpoint has {saved.get(name)}; leave it out or start a "
                             "new run")
        values[name] = value
    return values


def is_of_kind(value, kind) -> bool:
    """Return whether a JSON value fits an annotation: a class, list[…], a Literal, or a union of these."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(is_of_kind(value, part) for part in typing.get_args(kind))
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    return type(value) is (origin or kind) or kind is float and type(value) is int


def pick_model(options: dict, device, dtype) -> tuple[str, str]:
    """Return the name of the model that --model means, and why "auto" is not the fast one."""
    if options["model"] not in ("auto", "fast"):
        return options["model"], ""
    if options["model"] == "auto" and torch.device(device).type != "cuda":
        return "optimized", "there is no GPU"
    reason = _reason_against_fast(options, dtype)
    if reason and options["model"] == "fast":
        raise ValueError(f"--model fast: {reason}; pass --model optimized")
    return ("optimized", reason) if reason else ("fast", "")


def _reason_against_fast(options: dict, dtype) -> str:
    """Return why model_te_fast.py cannot train with these options on this GPU; "" if it can."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not is_interpreted:
        return "there is no GPU"
    if options["n_embd"] > 16384:  # the norms' limit
        return f"--n-embd {options['n_embd']} is over 16384"
    engine = {"model": "fast", "NANOTE_ENGINE": os.environ.get("NANOTE_ENGINE")}
    precision = {"dtype": str(dtype).removeprefix("torch.")}
    if refusal := find_refusal(options | engine | precision, "model"):
        return f"{refusal[1]}: {refusal[2]}"
    from fast_kernels import modules  # needs Triton
    return modules.unsupported_reason()


def describe(model):
    """Return a line about a model of `make_model`: its class and size, which engine runs it, and why."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {parameters:,} parameters, {getattr(model, 'choice', '')}"


def describe_fp8(model, config) -> str:
    """Return a line about the precision of a model of `make_model`: recipe, format, and how many GEMMs run in
    FP8. Of your own model, those that did in an uncompiled pass, such as `check_first_pass`."""
    if config.fp8_recipe == "none":
        return "--fp8-recipe none"
    fp8_format = recipes.resolve_format(config.fp8_recipe, config.fp8_format)
    in_fp8, total = health.count_gemms(model, has_run=is_file(config.model))
    line = " ".join(filter(None, ["--fp8-recipe", config.fp8_recipe, fp8_format]))
    advice = "" if in_fp8 else " (use te.Linear in te.autocast, or pass --fp8-recipe none)"
    return f"{line}, {in_fp8} of {total} GEMMs in FP8{advice}"


def check_first_pass(model, batch):
    """Raise ValueError, with all that is wrong, unless your own or a compiled model can train. One label is
    -100, as in batches of answers. The FP8 state is left as it was."""
    name, problems = type(model).__name__, []
    if not hasattr(model, "config"):
        problems.append("has no attribute config; add self.config = config to its constructor")
    stored = dataclasses.asdict(model.config) if not problems else {}
    if json.loads(json.dumps(stored, default=str)) != stored:
        problems.append("its config cannot be stored in a checkpoint as JSON; use fields of int, float, "
                        "bool, str or list")
    input_ids, labels, *others = batch
    ignoring = labels.clone()
    ignoring[0, 0] = -100
    with recipes.preserved_state(model) if hasattr(model, "config") else contextlib.nullcontext():
        try:
            loss = model(input_ids, ignoring, *others)
            if problem := _loss_problem(loss):
                problems.append(problem)
            else:
                loss.backward()
                loss.item()  # a GPU reports a label out of range only now
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = reason_of_graph_break(error)
            raise ValueError(f"--compile: {name} does not compile: {reason}; leave it out") from error
        except (ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's file raises
            problems.append(_failure(error))
            with contextlib.suppress(Exception):  # the result may be wrong, too
                problems += filter(None, [_loss_problem(model(*batch))])
        finally:
            model.zero_grad(set_to_none=True)
    if problems:
        raise ValueError(f"{name}: {'; and '.join(problems)}")


def _loss_problem(loss) -> str:
    """Return what is wrong with the loss that a model has returned; "" if nothing is."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        return (f"forward(input_ids, labels) returned a {type(loss).__name__}; it must return the mean loss, "
                "a tensor without dimensions")
    if not loss.requires_grad:
        return ("the loss of forward(input_ids, labels) has no gradient; compute it from parameters that "
                "require one, without detach() or torch.no_grad()")
    return ""


def _failure(error) -> str:
    """Return what an exception of forward(input_ids, labels) means, and the line of the model's file."""
    library = str(Path(torch.__file__).parent)
    own = [frame for frame in traceback.extract_tb(error.__traceback__)
           if not frame.filename.startswith((library, "<"))]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
    problem = f"forward(input_ids, labels) raised {type(error).__name__} at {where}: {in_a_line(error)}"
    if "-100" in str(error) or "device-side assert" in str(error):
        return problem.rstrip(".") + "; ignore labels of -100: cross_entropy(…, ignore_index=-100)"
    return problem


def reason_of_graph_break(error) -> str:
    """Return what torch.compile cannot trace, in one line: file:line of the model's code, and the reason."""
    text = str(error)
    places = re.findall(r'File "(.+)", line (\d+)', text.partition("from user code:")[2])
    place = ":".join(places[-1]) + ": " if places else ""  # the innermost call
    explanation = re.search(r"Explanation: (.+)", text)
    reason = in_a_line(getattr(error, "inner_exception", error))
    return place + reason + (f": {explanation[1].removesuffix('.')}" if explanation else "")


def flops_per_token(model_config, parameters: int, seq_len: int) -> float:
    """Return 6N + 12·L·C·T, the FLOPs per token of forward and backward (PaLM, arXiv:2204.02311, appendix B).
    N: parameters used in GEMMs, so without the position table and, if untied, without the token embedding. L
    layers, C = heads times head dimension, T = seq_len."""
    if not getattr(model_config, "use_rotary", False):
        parameters -= model_config.n_positions * model_config.n_embd
    if not model_config.tie_embeddings:
        parameters -= model_config.vocab_size * model_config.n_embd
    head_dim = getattr(model_config, "head_dim", None) or model_config.n_embd // model_config.n_head
    return 6 * parameters + 12 * model_config.n_layer * model_config.n_head * head_dim * seq_len


def padded_vocab_size(needed: int) -> int:
    """Round a vocabulary up to a multiple of 32, which FP8 GEMMs need; above 1024 of 128, which is faster."""
    return recipes.round_up(needed, 32 if needed <= 1024 else 128)


# Dense BF16 peak in TFLOP/s by a part of the GPU's name, longer names first (NVIDIA's data sheets)
PEAK_TFLOPS = {"GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
               "A100": 312, "L40S": 362, "L4": 121, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165}


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense BF16 peak in FLOP/s; None if unknown. FP8 can exceed 100 % of it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((1e12 * tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)


# ---------------------------------------------------------------- by name

_own_models = {}  # name: (model class, config class) of files that the command line named


def is_file(name):
    """Return whether a model's name is path/to/file.py:Class."""
    return ".py:" in name


def takes_argument(model, argument):
    """Return whether the forward method of a model, or of a class of models, takes this argument."""
    return argument in inspect.signature(model.forward).parameters


def network(name: str) -> str:
    """Return the name of the model file that runs on any machine with the weights of model `name`."""
    return "optimized" if name in ("auto", "fast") else name


def model_classes(name):
    """Return (model class, config class). Raises ValueError for an unknown name."""
    if is_file(name):
        if name not in _own_models:
            raise ValueError(f"the model is {name}, and code is never taken from a checkpoint; pass "
                             f"--model {name} again")
        return _own_models[name]
    known = MODELS | {"auto": MODELS["optimized"], "fast": FAST}
    if name not in known:
        raise ValueError(f"--model {name}: unknown; use {', '.join(known)}, or path/to/file.py:Class")
    module_name, model_class, config_class = known[name]
    module = importlib.import_module(module_name)
    return getattr(module, model_class), getattr(module, config_class)


def load_file(name):
    """Import the model path/to/file.py:Class. This runs code: only what the user has typed may be loaded."""
    path, _, class_name = name.rpartition(":")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for what the file imports from beside it
    spec = importlib.util.spec_from_file_location(f"own_model_{Path(path).stem}", path)  # may be a copy
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up there
    try:
        spec.loader.exec_module(module)
        model_class = getattr(module, class_name)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise ValueError(f"--model {name}: cannot be imported ({type(error).__name__}: {error}); "
                         "my_model.py:MyModel works, with a class MyModel in my_model.py") from error
    _own_models[name] = model_class, _config_class(name, model_class, module)


def _config_class(name, model_class, module):
    """Return the dataclass that `model_class` takes; see the top of this file."""
    parameter = next(iter(inspect.signature(model_class).parameters.values()), None)
    annotation = getattr(parameter, "annotation", None)
    candidates = [annotation] if dataclasses.is_dataclass(annotation) else vars(module).values()
    configs = [value for value in candidates if isinstance(value, type) and dataclasses.is_dataclass(value)]
    missing = {config: _missing_fields(config) for config in configs}
    found = [config for config in configs if not missing[config]]
    if len(found) > 1:
        names = " and ".join(config.__name__ for config in found)
        raise ValueError(f"--model {name}: {names} have the fields vocab_size and n_positions; say which is "
                         "the config in the constructor: def __init__(self, config: MyConfig)")
    if not found:
        nearest = min(configs, key=lambda config: len(missing[config]), default=None)
        lack = f"{nearest.__name__} has no {' and no '.join(missing[nearest])}" if configs else "it has none"
        has_fp8 = nearest and "use_fp8" in {field.name for field in dataclasses.fields(nearest)}
        fp8 = "" if has_fp8 else "; without a field use_fp8 also pass --fp8-recipe none"
        raise ValueError(f"--model {name}: its config must be a dataclass with the fields vocab_size and "
                         f"n_positions, but {lack}{fp8}; guide/changing_the_model.md shows it for nanoGPT")
    return found[0]


def _missing_fields(config_class) -> list[str]:
    """Return the fields that the trainer sets in any config and that this one lacks."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    return [name for name in ("vocab_size", "n_positions") if name not in fields]


def make_model_config(name, options):
    """Build the config of model `name` from the `options` it has fields for. None: the field's default."""
    config_class = model_classes(name)[1]
    fields = {field.name for field in dataclasses.fields(config_class)}
    values = {key: value for key, value in options.items() if key in fields and value is not None}
    try:
        return config_class(**values)
    except (TypeError, AssertionError) as error:  # of the user's own class; the five raise ValueError
        raise ValueError(f"--model {name}: {config_class.__name__}: {in_a_line(error)}") from error


def build_model(name, model_config, *, device="cpu", dtype=torch.float32):
    """Build a model with parameters on `device` in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_classes(name)[0](model_config).to(device)  # .to: a model may choose a device itself
    finally:
        torch.set_default_dtype(before)


def load_tokenizer(meta, moved=None):
    """Return the tokenizer of a checkpoint's meta.json. moved: hf:DIR, the folder where it is now."""
    from nanote.tokenizers import get_tokenizer, same_tokenizer  # training needs none
    vocab_size = meta.get("hf", {}).get("vocab_size", meta["model_config"]["vocab_size"])
    tokenizer = get_tokenizer(moved or meta["tokenizer"], vocab_size)
    if not same_tokenizer(tokenizer.name, meta["tokenizer"]):
        raise ValueError(f"--tokenizer {moved}: the model was trained with {meta['tokenizer']}; name a "
                         "folder with the same tokenizer.json")
    return tokenizer


def load_run(folder, meta, own=None, device="cpu", dtype=torch.float32):
    """Return the model of a checkpoint, with FP8 off. own: --model, path/to/file.py:Class of your own model,
    or a name, which must be that of the checkpoint."""
    if own is not None and is_file(own):
        load_file(own)
    elif own is not None and network(own) != network(meta["model"]):
        model_classes(own)  # ValueError for an unknown name
        raise ValueError(f"--model {own}: {folder} has {meta['model']}; leave it out, or pass that")
    name = network(own or meta["model"])
    config = make_model_config(name, meta["model_config"] | {"use_fp8": False})
    model = build_model(name, config, device=device, dtype=dtype).eval()
    checkpoint.load(folder, model)
    return model


def pick_device(name):
    """Return the device that --device names: auto, cpu, cuda or cuda:N. ValueError if it does not exist."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    device = {"auto": (*gpus, "cpu")[0], "cuda": "cuda:0"}.get(name, name)
    if device not in ("cpu", *gpus):
        raise ValueError(f"--device {name}: this machine has {', '.join(('cpu', *gpus))}; use --device auto")
    return torch.device(device)
