"""Where the options of train.py come from: the command line, a --config file, a checkpoint, a preset.

`read_config` merges their dictionaries, of which the last one that has an option wins, into a TrainConfig.
tyro parses the command line, once, and nothing else. Values in JSON and YAML are read by `read_value`.
"""
import contextlib
import difflib
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import yaml

from nanote.command import error_line, parse
from nanote.config import PRESETS, WITHOUT_EFFECT, TrainConfig, as_typed, flag, is_model_file

TYPES = get_type_hints(TrainConfig)
OPTION_TYPES = {field.name: TYPES[field.name] for field in fields(TrainConfig)}
BOOLEANS = dict(true=True, yes=True, on=True, false=False, no=False, off=False)
OFF_VALUES = (None, False, "auto", "default", "off")  # values that ask for nothing; 0 equals False
OF_ONE_RUN = {"out_dir", "resume", "config", "eval_only", "profile", "command"}  # a new start has its own
GONE = dict(  # options of earlier versions, with their defaults; another value prints a line
    checkpoint_every=1, fast_kernels=True, fused_block=True, fused_loss=True, fp8_dgrad_fast_accum_k=3072,
    hsdp_replicas=None, fp8_logits_rounding="nearest", max_skipped_steps=10, grad_accum_dtype="auto",
    grad_reduce_dtype="auto", eval_steps=None, background_saves=True, nsys=None, memory_snapshot=None,
    gc_interval=0, torch_deterministic=False, expandable_segments=False, beta1=0.9, beta2=0.95,
    betas=[0.9, 0.95], min_lr_ratio=0.1, decay_fraction=0.2, reshard_after_forward=True,
    fp8_param=False, offload_activations=0)
# Options that decide which tensors are in a checkpoint: on --resume they must be the checkpoint's own.
MUST_MATCH = """preset model n_layer n_head n_kv_head head_dim n_embd n_inner vocab_size n_positions
    activation use_rmsnorm use_rotary rope_theta rope_scaling use_qk_norm bias qkv_bias tie_embeddings
    layernorm_epsilon optimizer""".split()


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
    asks_for_help = len(arguments) < len(argv)
    from_command_line = read_command_line(arguments)
    from_run = {}
    from_file = {}
    if path := from_command_line.get("config"):
        content = load_config_file(path)
        if "command" in content:  # config.json of another run
            from_run = options_of_run(content, path)
        else:
            from_file = options_of_file(content, f"--config {path}")
    overrides = merge(from_run, from_file, from_command_line)
    if restarted:
        overrides |= {"out_dir": restarted, "resume": any(Path(restarted).glob("step-*"))}
    from_checkpoint = {}
    folder = None
    if overrides.get("resume") or overrides.get("eval_only"):
        if from_command_line.get("init_from") and not restarted:
            raise ValueError("--init-from: is for a new run; --resume and --eval-only have their own weights")
        folder, meta = find_checkpoint(overrides)
        from_checkpoint = options_of_run(meta["config"], folder)
    options = merge(from_checkpoint, overrides)
    from_preset = PRESETS[options.get("preset", TrainConfig.preset)]
    if asks_for_help:  # prints the defaults of the preset, and exits
        parse(TrainConfig, ["--help"], "train.py", default=TrainConfig(**from_preset))
    config = TrainConfig(**(from_preset | options))
    config.typed = frozenset(from_file | from_command_line)
    check_code_is_on_command_line(config, from_command_line)
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

    tyro does not tell which options were typed, so their names are found in the text.
    """
    defaults = TrainConfig(**PRESETS[TrainConfig.preset])  # those of another preset are merged later
    try:
        config = parse(TrainConfig, arguments, "train.py", default=defaults)
    except SystemExit:  # tyro has printed the mistake; of another program's option it may guess a wrong one
        print("options of Megatron: guide/older_guides.md; of older versions: CHANGELOG.md", file=sys.stderr)
        raise
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


def check_code_is_on_command_line(config: TrainConfig, from_command_line: dict) -> None:
    """Raise ValueError for a model file or a custom recipe that is not on the command line."""
    for name in ("model", "fp8_recipe"):
        value = getattr(config, name)
        is_code = is_model_file(value) or value.startswith("custom:")
        if is_code and from_command_line.get(name) != value:
            raise ValueError(f"{flag(name)} {value}: code is never taken from a file of options or a "
                             f"checkpoint; pass {flag(name)} {value} on the command line")


def print_without_effect(config: TrainConfig) -> None:
    """Print a line about typed options that have no effect with another one."""
    if os.environ.get("RANK", "0") != "0":
        return
    for names, other, applies in WITHOUT_EFFECT:
        without_effect = []
        for name in names:
            value = getattr(config, name)
            if name in config.typed and value not in OFF_VALUES:
                without_effect.append(as_typed(name, value))
        if without_effect and applies(config):
            cause = as_typed(other, getattr(config, other))
            print(f"{', '.join(without_effect)}: no effect with {cause}", flush=True)


def check_resume(config: TrainConfig, saved: dict, folder: Path, step: int) -> None:
    """Raise ValueError for options that do not fit the checkpoint of a step, whose own are `saved`."""
    for name in MUST_MATCH:
        value = getattr(config, name)
        before = saved.get(name, value)
        fits = value == before
        if name == "model":
            is_moved_file = is_model_file(value) and is_model_file(before)
            fits = fits or is_moved_file or {value, before} <= {"auto", "fast", "optimized"}  # one network
        if not fits:
            raise ValueError(f"{flag(name)} {value}: {folder} has {before}; leave it out or start a new run")
    if config.max_steps < step and not config.eval_only:
        raise ValueError(f"--max-steps {config.max_steps}: {folder} has done {step} steps; pass {2 * step}")


# ---------------------------------------------------------------- options in JSON and YAML

def load_config_file(path: str) -> dict:
    """Return the content of a file of options: JSON, or else YAML unless it is named .json."""
    language = "JSON" if path.endswith(".json") else "YAML"
    try:
        content = parse_json_or_yaml(Path(path).read_text(), only_json=(language == "JSON"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: not {language}: {error_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: holds no options; write them by name, such as lr: 0.001")
    return content


def parse_json_or_yaml(text: str, only_json: bool):
    """Return the content of a text. Scalars of YAML are read as text: the option decides what a text is, and
    YAML would make the number 612 of 10:12 and a boolean of on."""
    try:
        return json.loads(text)
    except ValueError:
        if only_json:
            raise
        return yaml.load(text, yaml.BaseLoader)


def options_of_file(content: dict, source: str) -> dict:
    """Return the options in a file that a user has written."""
    options = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in OPTION_TYPES:
            nearest = difflib.get_close_matches(name, OPTION_TYPES, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else "python train.py --help lists all"
            raise ValueError(f"{source}: {name}: unknown option; {advice}")
        options[name] = read_value(name, value, source)
    return options


def options_of_run(content: dict, source) -> dict:
    """Return the options that another start takes over. Print those that this version does not have."""
    if isinstance(content.get("config"), dict):  # of version 0.1; now it is the name of a file
        content = content["config"]
    options = {}
    gone = []
    for name, value in content.items():
        if name in OF_ONE_RUN:
            continue
        if name in OPTION_TYPES:
            options[name] = read_value(name, value, source)
        elif GONE.get(name) != value:  # with its default it changed nothing
            gone.append(f"{name} {value}")
    if gone:
        print(f"{source}: left out, since this version has no such options: {', '.join(gone)}")
    return options


def read_value(name: str, value, source):
    """Return a value in JSON or YAML as the option's type; a text is read as on the command line."""
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
        with contextlib.suppress(ValueError):
            return option_type(str(value))  # as text: 2.5 is no int
        rule = f"of type {option_type.__name__}"
    raise ValueError(f"{source}: {name} {value}: must be {rule}")


def read_set(value, source) -> tuple[tuple[str, ...], ...]:
    """Return `set` as the command line gives it: (("window=32", "scale=0.5"),).

    A user's file has {"window": 32, "scale": 0.5}; a run stores what the command line gave, as lists.
    """
    if isinstance(value, list) and all(isinstance(settings, list) for settings in value):
        return tuple(tuple(settings) for settings in value)
    if not isinstance(value, dict):
        raise ValueError(f"{source}: set {value}: must be fields with values, such as set: {{window: 32}}")
    settings = []
    for field, field_value in value.items():
        text = field_value if isinstance(field_value, str) else json.dumps(parse_texts(field_value))
        settings.append(f"{field}={text}")
    return (tuple(settings),) if settings else ()


def parse_texts(value):
    """Return a text as the value that it is in JSON, if it is any; likewise in a list or dict of YAML."""
    if isinstance(value, list):
        return [parse_texts(item) for item in value]
    if isinstance(value, dict):
        return {key: parse_texts(item) for key, item in value.items()}
    with contextlib.suppress(TypeError, ValueError):  # no text, or not JSON
        return json.loads(value)
    return value
