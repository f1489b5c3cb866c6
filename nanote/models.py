"""Models by name or file: their classes, a config from options, a model on a device, its number of weights.

`--model` takes a name from MODELS, or path/to/file.py:Class for a model of your own. One of the five model
files is imported only when it is used, so a checkout may keep any of them. What the trainer needs of your own
model:

- `Class(config)`, where config is a dataclass. It is found by the annotation of that argument, or as the only
  dataclass in the file with the fields `vocab_size` and `n_positions`, which are required. Its fields that
  have the name of a train.py option get that option's value, the others keep their defaults. `use_fp8` is
  required to train in FP8.
- `model.config` is that config, and `model.blocks` holds the transformer blocks (for --optimizer muon and
  --parallel fsdp only).
- `model(input_ids, labels)` returns the mean loss, a scalar, and `model(input_ids)` logits (B, S,
  vocab_size), or a tuple that begins with them. Labels are shifted already; -100 means no label.
- In FP8 the forward pass runs inside `te.autocast(enabled=self.config.use_fp8, recipe=self.fp8_recipe)`; the
  trainer sets `fp8_recipe`.
- On a GPU a step is captured as CUDA graphs, which repeat what `forward` did on the GPU when it was captured.
  Python in it does not run again: for a random choice, a counter or a schedule in Python, pass
  --cuda-graph off.
- A forward with an argument `is_first_microbatch` gets it with gradient accumulation, to cast weights to FP8
  once per step; one with `cu_seqlens` can train with --pack-documents.
"""
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import os
import sys
import typing
from pathlib import Path

import torch

from nanote import fp8, json_files

MODELS = {  # --model: (module, model class, config class)
    "optimized": ("model_te_optimized", "OptimizedGPT2Model", "OptimizedConfig"),
    "advanced": ("model_te_advanced", "AdvancedGPT2Model", "AdvancedConfig"),
    "fused": ("model_te_fused", "FusedGPT2Model", "FusedConfig"),
    "custom": ("model_te_custom", "CustomGPT2Model", "CustomConfig"),
    "te": ("model_te", "TEGPT2Model", "TEConfig"),
}


_own_models = {}  # name: (model class, config class) of files that the command line named


def is_file(name: str) -> bool:
    """Whether a model's name is path/to/file.py:Class."""
    return ".py:" in name


def load_file(name: str) -> None:
    """Import the model path/to/file.py:Class, for `model_classes`.

    This runs the file: call it with what the user typed or wrote into a --config file, never with what a
    checkpoint says.

    Raises:
        ValueError: there is no such file or class, it cannot be imported, or its config is not found.
    """
    path, _, class_name = name.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"--model {name}: there is no file {path}; a name such as my_model.py:MyModel works")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for what the file imports from beside it
    # another name than the file's, which may be a copy of one of the five
    spec = importlib.util.spec_from_file_location(f"own_model_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        del sys.modules[spec.name]
        raise ValueError(f"--model {name}: {path} cannot be imported ({type(error).__name__}: "
                         f"{error})") from error
    model_class = getattr(module, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, torch.nn.Module)):
        found = [key for key, value in vars(module).items()
                 if isinstance(value, type) and issubclass(value, torch.nn.Module)]
        raise ValueError(f"--model {name}: {path} has no torch.nn.Module {class_name}; it has "
                         f"{', '.join(found) or 'none'}")
    _own_models[name] = model_class, _config_class(name, model_class, module)


def _config_class(name: str, model_class, module):
    """Return the dataclass that `model_class` takes; see the top of this file."""
    argument = next(iter(inspect.signature(model_class).parameters), None)
    hints = {}
    with contextlib.suppress(Exception):  # an annotation that cannot be resolved
        hints = typing.get_type_hints(model_class.__init__)
    candidates = [hints[argument]] if argument in hints else list(vars(module).values())
    found = [value for value in candidates if isinstance(value, type) and dataclasses.is_dataclass(value)
             and {"vocab_size", "n_positions"} <= {field.name for field in dataclasses.fields(value)}]
    if len(found) == 1:
        return found[0]
    names = " and ".join(value.__name__ for value in found)
    problem = f"the file has {names}" if found else "no dataclass has the fields vocab_size and n_positions"
    raise ValueError(f"--model {name}: its config is not found: {problem}; annotate the constructor with a "
                     "dataclass that has them, such as def __init__(self, config: MyConfig)")


def takes_argument(model_class, argument: str) -> bool:
    """Whether the forward method of a model takes this argument."""
    return argument in inspect.signature(model_class.forward).parameters


def model_classes(name: str):
    """Return (model class, config class). Raises ValueError for an unknown name or a missing model file."""
    if is_file(name):
        if name not in _own_models:
            raise ValueError(f"the model is {name}, and code is never taken from a checkpoint: pass --model "
                             f"{name} again, to train.py or sample.py")
        return _own_models[name]
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: one of {', '.join(MODELS)}, or path/to/file.py:Class")
    module_name = MODELS[name][0]
    if importlib.util.find_spec(module_name) is None:
        present = [key for key, (module, *_) in MODELS.items() if importlib.util.find_spec(module)]
        raise ValueError(
            f"model {name!r}: there is no {module_name}.py here; models that are: {', '.join(present)}"
        )
    if name == "optimized":
        from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
        return OptimizedGPT2Model, OptimizedConfig
    if name == "advanced":
        from model_te_advanced import AdvancedConfig, AdvancedGPT2Model
        return AdvancedGPT2Model, AdvancedConfig
    if name == "fused":
        from model_te_fused import FusedConfig, FusedGPT2Model
        return FusedGPT2Model, FusedConfig
    if name == "custom":
        from model_te_custom import CustomConfig, CustomGPT2Model
        return CustomGPT2Model, CustomConfig
    from model_te import TEConfig, TEGPT2Model
    return TEGPT2Model, TEConfig


def make_model_config(name: str, options: dict):
    """Build the config of model `name` from the `options` it has fields for. None: the field's default."""
    config_class = model_classes(name)[1]
    known = {field.name for field in dataclasses.fields(config_class)}
    values = {key: value for key, value in options.items() if key in known and value is not None}
    if not is_file(name):
        return config_class(**values)
    try:
        config = config_class(**values)
    except Exception as error:  # whatever the user's class raises
        raise ValueError(f"--model {name}: {config_class.__name__}: {json_files.reason(error)}") from error
    try:  # as a checkpoint stores and reads it
        stored = json.loads(json.dumps(dataclasses.asdict(config)))
        json_files.check(stored, config_class, config_class.__name__, "")
    except (TypeError, ValueError, NameError) as error:
        raise ValueError(f"--model {name}: {config_class.__name__} cannot be stored as JSON in a checkpoint "
                         f"({json_files.reason(error)}); use fields of int, float, bool, str or "
                         "list") from error
    return config


def check_first_pass(name: str, model, batch) -> None:
    """Run a forward pass of the user's own model. ValueError if it is not what the trainer needs.

    The FP8 state is left as it was.
    """
    if not hasattr(model, "config"):
        raise ValueError(f"--model {name}: the model has no attribute config; add self.config = config to "
                         "its constructor")
    with torch.no_grad(), fp8.preserved_state(model):
        loss = model(*batch)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        shape = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise ValueError(f"--model {name}: forward(input_ids, labels) returned a {type(loss).__name__} "
                         f"{shape}; it must return the mean loss, a tensor without dimensions")


def has_fp8(name: str) -> bool:
    """Whether the model's config has a switch for FP8."""
    return "use_fp8" in {field.name for field in dataclasses.fields(model_classes(name)[1])}


def build_model(name: str, config, *, device="cpu", dtype=torch.float32, fp8_weights_recipe=None):
    """Build a model with parameters on `device` in `dtype`, or in FP8 given a recipe for weights."""
    quantized = contextlib.nullcontext()
    if fp8_weights_recipe is not None:
        quantized = fp8.te.quantized_model_init(enabled=True, recipe=fp8_weights_recipe,
                                                preserve_high_precision_init_val=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), quantized:
            return model_classes(name)[0](config).to(device)  # .to: a model may choose a device itself
    finally:
        torch.set_default_dtype(before)


def weight_count(config) -> int:
    """Return the number of elements in the weight matrices of a model, without building it.

    Biases and norm parameters are few and not counted. Only for the five models.
    """
    width, kv_width = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    attention = config.n_embd * (2 * width + 2 * kv_width)  # queries, keys, values, projection
    mlp = config.n_embd * config.n_inner * (3 if getattr(config, "activation", "gelu") == "swiglu" else 2)
    rows = config.vocab_size * (1 if config.tie_embeddings else 2)
    rows += 0 if getattr(config, "use_rotary", False) else config.n_positions
    return config.n_layer * (attention + mlp) + rows * config.n_embd
