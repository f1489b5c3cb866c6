"""A model of your own, `--model path/to/file.py:Class`: its classes, the fields of --set, and a first pass.

The last section of guide/changing_the_model.md lists what the trainer needs of your model. Details:

- The config is the dataclass of the constructor's annotation, or the only one in the file with the fields
  `vocab_size` and `n_positions`. `model.config` is that config.
- Labels are already shifted; -100 is ignored. The loss is a scalar; logits are (B, S, vocab_size).
- `model.blocks` holds the transformer blocks, for --optimizer muon and --parallel fsdp only.
- With `shards_blocks_as_built = True` in the class, not in a base class, --parallel fsdp shards each block
  when it joins its ModuleList. Blocks must be complete then, and frozen if their weights shall be so in FP8;
  nothing else may be in a ModuleList.
- A forward with an argument `is_first_microbatch` gets it with gradient accumulation, to cast weights to FP8
  once per step; one with `cu_seqlens` can train with --pack-documents.
"""
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import re
import sys
import traceback
import types
import typing
from pathlib import Path

import torch

from nanote import recipes
from nanote.command import error_line
from nanote.config import TrainConfig, flag
from nanote.options import parse_texts

REQUIRED_FIELDS = ("vocab_size", "n_positions")  # the trainer sets these in any config
_loaded = {}  # name: (model class, config class) of files that the command line named


def load_file(name: str) -> None:
    """Import the model path/to/file.py:Class. This runs code: only what the user has typed may be loaded."""
    path, _, class_name = name.rpartition(":")
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for what the file imports from beside it
    try:
        module = import_path(path, f"own_model_{Path(path).stem}")  # a name of its own: it may be a copy
        model_class = getattr(module, class_name)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise ValueError(f"--model {name}: cannot be imported ({type(error).__name__}: {error}); "
                         "my_model.py:MyModel works, with a class MyModel in my_model.py") from error
    _loaded[name] = model_class, _config_class(name, model_class, module)


def import_path(path, name: str):
    """Import a Python file as a new module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a dataclass looks its module up there
    spec.loader.exec_module(module)
    return module


def classes(name: str) -> tuple[type, type]:
    """Return (model class, config class) of a file that `load_file` has imported; else ValueError."""
    if name not in _loaded:
        raise ValueError(f"the model is {name}, and code is never taken from a checkpoint; pass "
                         f"--model {name} again")
    return _loaded[name]


def _config_class(name: str, model_class: type, module) -> type:
    """Return the dataclass that `model_class` takes; see the top of this file."""
    candidates = _dataclasses_for(model_class, module)
    complete = [candidate for candidate in candidates if not _missing_fields(candidate)]
    if len(complete) == 1:
        return complete[0]
    if complete:
        names = " and ".join(candidate.__name__ for candidate in complete)
        raise ValueError(f"--model {name}: {names} have the fields vocab_size and n_positions; say which is "
                         "the config in the constructor: def __init__(self, config: MyConfig)")
    lacks = [f"{candidate.__name__} has no {' and no '.join(_missing_fields(candidate))}"
             for candidate in candidates]
    raise ValueError(f"--model {name}: its config must be a dataclass with the fields vocab_size and "
                     f"n_positions, but {', '.join(lacks) or 'it has none'}; without a field use_fp8 also "
                     "pass --fp8-recipe none; guide/changing_the_model.md shows it for nanoGPT")


def _missing_fields(config_class: type) -> list[str]:
    return [field for field in REQUIRED_FIELDS if field not in field_names(config_class)]


def _dataclasses_for(model_class: type, module) -> list[type]:
    """Return the dataclass of the constructor's annotation, else all dataclasses of the module."""
    parameters = list(inspect.signature(model_class).parameters.values())
    if parameters and dataclasses.is_dataclass(parameters[0].annotation):
        return [parameters[0].annotation]
    values = vars(module).values()
    return [value for value in values if isinstance(value, type) and dataclasses.is_dataclass(value)]


def field_names(config_class: type) -> set[str]:
    """Return the names of the fields of a dataclass."""
    return {field.name for field in dataclasses.fields(config_class)}


# ---------------------------------------------------------------- --set FIELD=VALUE

def read_fields(settings, config_class: type, saved: dict | None) -> dict:
    """Return {field: value} of --set FIELD=VALUE, whose value is JSON or else text.

    Args:
        settings: a tuple of texts for each --set of the command line; the last text of a field wins.
        saved: model_config of the checkpoint that the run continues, whose fields may not change.
    """
    texts = {}
    for setting in settings:
        for text in setting:
            name = text.partition("=")[0]
            texts[name] = text
    types_of_fields = typing.get_type_hints(config_class)
    values = {}
    for name, text in texts.items():
        _check_field(name, text, config_class)
        values[name] = _read_field(text, types_of_fields[name])
        if saved and saved.get(name) != values[name]:
            raise ValueError(f"--set {text}: the checkpoint has {saved.get(name)}; leave it out or start a "
                             "new run")
    return values


def _check_field(name: str, text: str, config_class: type) -> None:
    """Raise ValueError unless `text` sets a field of the config that is no option of train.py."""
    options = {option: flag(option) for option in vars(TrainConfig())} | {"use_fp8": "--fp8-recipe"}
    if name in options:
        raise ValueError(f"--set {text}: is an option of train.py; pass {options[name]}")
    names = [field.name for field in dataclasses.fields(config_class) if field.name not in options]
    if name not in names:
        others = f"it has {', '.join(names)}" if names else "its fields are options of train.py; leave it out"
        raise ValueError(f"--set {text}: {config_class.__name__} has no field {name}; {others}")


def _read_field(text: str, annotation):
    """Return the value of FIELD=VALUE as JSON if that is of the field's type, else as text."""
    name, _, value = text.partition("=")
    type_name = getattr(annotation, "__name__", annotation)
    if "=" not in text:
        raise ValueError(f"--set {text}: must be FIELD=VALUE; pass {name}=VALUE, of type {type_name}")
    for possible in (parse_texts(value), value):
        if fits_annotation(possible, annotation):
            return possible
    raise ValueError(f"--set {text}: must be of type {type_name}")


def fits_annotation(value, annotation) -> bool:
    """Return whether a JSON value fits an annotation: a class, list[…], a Literal, or a union of these."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(fits_annotation(value, part) for part in typing.get_args(annotation))
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if annotation is float and type(value) is int:
        return True
    return type(value) is (origin or annotation)


# ---------------------------------------------------------------- a first pass

def check_first_pass(model, batch) -> None:
    """Raise ValueError, with all that is wrong, unless your own or a compiled model can train.

    The FP8 state is left as it was, the random state is not."""
    _check_config(model)
    with recipes.preserved_state(model):
        problems = _problems_of_pass(model, batch)
    if problems:
        raise ValueError(f"{type(model).__name__}: {'; and '.join(problems)}")


def _check_config(model) -> None:
    """Raise ValueError unless model.config can be stored in a checkpoint."""
    name = type(model).__name__
    if not hasattr(model, "config"):
        raise ValueError(f"{name}: has no attribute config; add self.config = config to its constructor")
    stored = dataclasses.asdict(model.config)
    if json.loads(json.dumps(stored, default=str)) != stored:
        raise ValueError(f"{name}: its config cannot be stored in a checkpoint as JSON; use fields of int, "
                         "float, bool, str or list")


def _problems_of_pass(model, batch) -> list[str]:
    """Return what is wrong with a forward and backward pass. One label is -100, as in batches of answers."""
    input_ids, labels, *others = batch
    ignoring = labels.clone()
    ignoring[0, 0] = -100
    try:
        loss = model(input_ids, ignoring, *others)
        if problem := _problem_of_loss(loss):
            return [problem]
        loss.backward()
        loss.item()  # a GPU reports a label out of range only now
        return []
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = reason_of_graph_break(error)
        raise ValueError(f"--compile: {type(model).__name__} does not compile: {reason}; leave it out"
                         ) from error
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's file raises
        problems = [_problem_of_error(error)]
        with contextlib.suppress(Exception):  # without the label of -100 the result may be wrong, too
            problems.append(_problem_of_loss(model(*batch)))
        return [problem for problem in problems if problem]
    finally:
        model.zero_grad(set_to_none=True)


def _problem_of_loss(loss) -> str:
    """Return what is wrong with the loss that a model has returned; "" if nothing is."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        return (f"forward(input_ids, labels) returned a {type(loss).__name__}; it must return the mean loss, "
                "a tensor without dimensions")
    if not loss.requires_grad:
        return ("the loss of forward(input_ids, labels) has no gradient; compute it from parameters that "
                "require one, without detach() or torch.no_grad()")
    return ""


def _problem_of_error(error: Exception) -> str:
    """Return what an exception of forward(input_ids, labels) means, and the line of the model's file."""
    library = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((library, "<"))]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
    problem = f"forward(input_ids, labels) raised {type(error).__name__} at {where}: {error_line(error)}"
    if "-100" in str(error) or "device-side assert" in str(error):
        return problem.rstrip(".") + "; ignore labels of -100: cross_entropy(…, ignore_index=-100)"
    return problem


def reason_of_graph_break(error: Exception) -> str:
    """Return what torch.compile cannot trace, in one line: file:line of the model's code, and the reason."""
    reason = error_line(getattr(error, "inner_exception", error))
    _, _, users_frames = str(error).partition("from user code:")
    frames = re.findall(r'File "(.+)", line (\d+)', users_frames)
    if frames:
        path, line = frames[-1]  # the innermost call
        reason = f"{path}:{line}: {reason}"
    if explanation := re.search(r"Explanation: (.+)", str(error)):
        reason += f": {explanation[1].removesuffix('.')}"
    return reason
