"""Where the options of train.py come from: the command line, a --config file, a checkpoint, a preset.

`read_config` merges their dictionaries, of which the last one that has an option wins, into a TrainConfig.
tyro parses the command line, once, and nothing else. Values in JSON and YAML are read by `read_value`.
"""
import contextlib
import difflib
import json
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import yaml

from nanote.command import error_line, parse
from nanote.config import PRESETS, WITHOUT_EFFECT, TrainConfig, as_typed, flag

TYPES = get_type_hints(TrainConfig)
OPTION_TYPES = {field.name: TYPES[field.name] for field in fields(TrainConfig)}
BOOLEANS = dict(true=True, yes=True, on=True, false=False, no=False, off=False)
OFF_VALUES = (None, False, "auto", "default", "off")  # values that ask for nothing; 0 equals False
OF_ONE_RUN = {"out_dir", "resume", "config", "eval_only", "profile"}  # another run or start has its own
GONE = dict(  # options of earlier versions, with their defaults
    checkpoint_every=1, fast_kernels=True, fused_block=True, fused_loss=True, fp8_dgrad_fast_accum_k=3072,
    hsdp_replicas=None, fp8_logits_rounding="nearest", max_skipped_steps=10, grad_accum_dtype="auto",
    grad_reduce_dtype="auto", eval_steps=None, background_saves=True, nsys=None, memory_snapshot=None,
    gc_interval=0, torch_deterministic=False, expandable_segments=False, beta1=0.9, beta2=0.95,
    betas=[0.9, 0.95], min_lr_ratio=0.1, decay_fraction=0.2, reshard_after_forward=True,
    fp8_param=False, offload_activations=0)
# Options that decide which tensors are in a checkpoint: on --resume they must be the checkpoint's own.
MUST_MATCH = """preset model n_layer n_head n_kv_head head_dim n_embd n_inner vocab_size n_positions
    activation use_rmsnorm use_rotary rope_theta use_qk_norm bias tie_embeddings layernorm_epsilon
    optimizer""".split()


def read_config(argv=None, restarted: str | None = None) -> TrainConfig:
    """Return the options of train.py.

    They come from five places, of which a later one wins: the defaults of TrainConfig, the preset, the
    checkpoint of --resume or --eval-only, the file of --config, the command line.

    Args:
        argv: the arguments; None: those of this process.
        restarted: folder of the run whose processes torchrun has started again.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in argv if argument not in ("-h", "--help")]
    from_command_line = read_command_line(arguments)
    from_file = {}
    is_of_run = False
    if from_command_line.get("config"):
        from_file, is_of_run = read_file(from_command_line["config"])
    overrides = merge(from_file, from_command_line)
    if restarted:
        has_checkpoint = any(Path(restarted).glob("step-*"))
        overrides |= {"out_dir": restarted, "resume": has_checkpoint}
    from_checkpoint = {}
    folder = None
    if overrides.get("resume") or overrides.get("eval_only"):
        if from_command_line.get("init_from") and not restarted:
            raise ValueError("--init-from: is for a new run; --resume and --eval-only have their own weights")
        folder, meta = find_checkpoint(overrides)
        from_checkpoint = options_of_run(meta["config"], folder)
    options = merge(from_checkpoint, overrides)
    from_preset = PRESETS[options.get("preset", TrainConfig.preset)]
    if len(arguments) < len(argv):  # --help: prints and exits
        parse(TrainConfig, ["--help"], "train.py", default=TrainConfig(**from_preset))
    config = TrainConfig(**(from_preset | options))
    config.typed = frozenset(from_command_line if is_of_run else from_file | from_command_line)
    check_code_is_typed(config, from_command_line)
    config.check()
    print_without_effect(config)
    if folder:
        check_resume(config, from_checkpoint, folder, meta["step"])
        config.out_dir = str(folder if config.eval_only else folder.parent)
    elif config.init_from and Path(config.init_from, "tokenizer.json").is_file():
        from nanote.transfer import check_same_ids  # imports PyTorch
        check_same_ids(config.init_from, config.data)
    return config


def read_command_line(arguments: list[str]) -> dict:
    """Return {option: value} of the options in a command line. tyro prints mistakes, and exits.

    tyro returns a whole TrainConfig, in which a typed option looks like a default: names come from the text.
    """
    defaults = TrainConfig(**PRESETS[TrainConfig.preset])  # those of another preset are merged later
    config = parse(TrainConfig, arguments, "train.py", default=defaults)
    options = {}
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0].replace("-", "_")
            if name not in OPTION_TYPES:
                name = name.removeprefix("no_")  # --no-bias
            if name in OPTION_TYPES:  # not "--", which ends the options
                options[name] = getattr(config, name)
    return options


def merge(*sources: dict) -> dict:
    """Return the options of all sources. The last value of an option wins, but values of --set add up."""
    merged = {}
    settings = ()
    for options in sources:
        merged |= options
        settings += options.get("set", ())
    return merged | {"set": settings}


def find_checkpoint(options: dict) -> tuple[Path, dict]:
    """Return the checkpoint of --resume or --eval-only, and its meta.json."""
    from nanote import checkpoint  # imports PyTorch, which --help need not wait for
    run = options.get("out_dir")
    if run is None:
        preset = options.get("preset", TrainConfig.preset)
        runs = [*Path("out").glob(preset), *Path("out").glob(f"{preset}-[0-9]*")]
        run = max(runs, key=lambda run: run.stat().st_mtime, default=f"out/{preset}")  # the newest
    folder = checkpoint.find(run)
    if folder != checkpoint.latest(folder.parent) and not options.get("eval_only"):
        raise ValueError(f"--resume: {folder.parent} has later checkpoints than {folder.name}; remove those")
    return folder, checkpoint.read_meta(folder)


def check_code_is_typed(config: TrainConfig, typed: dict) -> None:
    """Raise ValueError for a model file or a custom recipe that is not on the command line, `typed`."""
    for name in ("model", "fp8_recipe"):
        value = getattr(config, name)
        is_code = ".py:" in value or value.startswith("custom:")
        if is_code and typed.get(name) != value:
            raise ValueError(f"{flag(name)} {value}: code is never taken from a file of options or a "
                             f"checkpoint; pass {flag(name)} {value} on the command line")


def print_without_effect(config: TrainConfig) -> None:
    """Print a line about typed options that have no effect with another one."""
    if os.environ.get("RANK", "0") != "0":
        return
    for row in WITHOUT_EFFECT:
        without_effect = []
        for name in row.options:
            value = getattr(config, name)
            if name in config.typed and value not in OFF_VALUES:
                without_effect.append(as_typed(name, value))
        if without_effect and row.applies(config):
            other = as_typed(row.other, getattr(config, row.other))
            print(f"{', '.join(without_effect)}: no effect with {other}", flush=True)


def check_resume(config: TrainConfig, saved: dict, folder: Path, step: int) -> None:
    """Raise ValueError for options that do not fit the checkpoint of a step, whose own are `saved`."""
    for name in MUST_MATCH:
        value = getattr(config, name)
        before = saved.get(name, value)
        is_moved_file = ".py:" in str(value) and ".py:" in str(before)
        is_same_network = {value, before} <= {"auto", "fast", "optimized"}
        if value != before and not is_moved_file and not is_same_network:
            raise ValueError(f"{flag(name)} {value}: {folder} has {before}; leave it out or start a new run")
    if config.max_steps < step and not config.eval_only:
        raise ValueError(f"--max-steps {config.max_steps}: {folder} has done {step} steps; pass {2 * step}")


# ---------------------------------------------------------------- options in JSON and YAML

class TextLoader(yaml.SafeLoader):
    """A YAML loader that reads scalars as text, for `read_value`. YAML 1.1 makes the number 612 of 10:12, 8
    of 010, booleans of yes and on, and a date of 2026-01-01."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("^<<$"))]}


class JsonLoader(yaml.SafeLoader):
    """A YAML loader for `set`, whose fields may have any type: reads scalars without quotes as JSON does, and
    what JSON has not as text. So 1e-3 and .5 are numbers, ~ is null, and "1.10" and 10:12 are text."""

    yaml_implicit_resolvers = {}


for tag, pattern, first in (
        ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", "|~|null|Null|NULL", ["", *"~nN"]),
        ("int", "[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
        ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
        ("merge", "<<", "<")):
    JsonLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^({pattern})$"), first)


def read_file(path: str) -> tuple[dict, bool]:
    """Return the options in a JSON or YAML file, and whether it is the config.json of a run."""
    try:
        content = Path(path).read_text()
        options = yaml.load(content, TextLoader)  # JSON is YAML, too
        is_of_run = isinstance(options, dict) and "command" in options
        if is_of_run:
            options = json.loads(content)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: neither JSON nor YAML: {error_line(error)}") from None
    if not isinstance(options, dict):
        raise ValueError(f"--config {path}: holds no options; write them by name, such as lr: 0.001")
    if is_of_run:
        del options["command"]  # no option
        if isinstance(options.get("config"), dict):  # of version 0.1; now it is the name of a file
            options = options["config"]
        return options_of_run(options, path), True
    values = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        check_is_option(name, path)
        if name == "set":
            value = yaml.load(content, JsonLoader)[key]
        values[name] = read_value(name, value, f"--config {path}")
    return values, False


def check_is_option(name: str, path: str) -> None:
    """Raise ValueError for an unknown option in a file, with the nearest one."""
    if name in OPTION_TYPES:
        return
    nearest = difflib.get_close_matches(name, OPTION_TYPES, n=1)
    advice = f"did you mean {nearest[0]}?" if nearest else "python train.py --help lists all"
    raise ValueError(f"--config {path}: {name}: unknown option; {advice}")


def options_of_run(options: dict, source) -> dict:
    """Return the options that another start takes over. Print those that this version does not have."""
    taken_over = {}
    gone = []
    for name, value in options.items():
        if name not in OPTION_TYPES:
            if GONE.get(name) != value:
                gone.append(f"{name} {value}")
        elif name not in OF_ONE_RUN:
            taken_over[name] = read_value(name, value, source)
    if gone:
        print(f"{source}: left out, since this version has no such options: {', '.join(gone)}")
    return taken_over


def read_value(name: str, value, source):
    """Return the value of an option in JSON or YAML as the option's type; text as on the command line."""
    if name == "set":
        return read_set(value, source)
    option_type = OPTION_TYPES[name]
    if type(None) in get_args(option_type):  # int | None
        if value in (None, "", "~", "null", "Null", "NULL", "None"):
            return None
        option_type = get_args(option_type)[0]
    if get_origin(option_type) is Literal:
        if value in get_args(option_type):
            return value
        rule = f"one of {', '.join(get_args(option_type))}"
    elif option_type is bool:
        if str(value).lower() in BOOLEANS:
            return BOOLEANS[str(value).lower()]
        rule = "true or false"
    else:
        with contextlib.suppress(TypeError, ValueError):
            return option_type(value)
        rule = f"of type {option_type.__name__}"
    raise ValueError(f"{source}: {name} {value}: must be {rule}")


def read_set(value, source) -> tuple[tuple[str, ...], ...]:
    """Return `set` of a file as the command line gives it: (("window=32", "scale=0.5"),).

    In a file it is {"window": 32}, "window=32", a list of such texts, or a list of lists, as a run stores it.
    """
    texts = []
    if isinstance(value, dict):
        for field, field_value in value.items():
            texts.append(f"{field}={json.dumps(field_value)}")
    else:
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, list):
                texts += item
            else:
                texts.append(item)
    if not all(isinstance(text, str) and "=" in text for text in texts):
        raise ValueError(f"{source}: set {json.dumps(value)}: must be fields with values, such as "
                         "set: {window: 32}")
    return (tuple(texts),) if texts else ()
