"""Files of options: config.json, which every run writes, and what --config reads.

`record` writes config.json when a run starts or resumes: its options, and for each start the command line,
the git commit, versions, device and date. `read` returns the options of such a file, or of one that a user
wrote in JSON or YAML, for `python train.py --config out/run/config.json --lr 1e-3`: another run like it.
"""
import contextlib
import difflib
import json
import platform
import subprocess
from datetime import datetime
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from nanote import fp8, json_files

NAME = "config.json"
DOCUMENT = {"config": dict, "resumed?": [dict]}
# Options of the one run or command that they were given to.
OF_THE_COMMAND_LINE = ("resume", "config", "eval_only")
OF_ONE_RUN = (*OF_THE_COMMAND_LINE, "out_dir", "profile", "nsys", "memory_snapshot")


# ---------------------------------------------------------------- config.json of a run

def record(run: str, options: dict, command: str, processes: int, resumed_step: int | None) -> None:
    """Write config.json into a run's folder, or add the command that resumes the run from `resumed_step`.

    ValueError if the file is there and damaged; then, or if the disk is full, it stays as it was.
    """
    path = Path(run, NAME)
    start = {"command": command, "date": datetime.now().astimezone().isoformat(timespec="seconds"),
             "processes": processes, **describe_machine()}
    document = {"config": options, **start, "resumed": []}
    if resumed_step is not None:
        before = {}  # in the folder of an older version
        if path.exists():
            before = json_files.read(path, DOCUMENT, "remove it: it is only a record")
        # The checkpoint holds the sizes that were chosen for the data; a new run chooses them again.
        chosen = {name: before["config"][name] for name in ("vocab_size", "n_positions")
                  if name in before.get("config", {})}
        resumed = [*before.get("resumed", []), {"from_step": resumed_step, **start}]
        document = before | {"config": options | chosen, "resumed": resumed}
    json_files.replace_text(path, json.dumps(document, indent=2) + "\n", "not written",
                            "free some space or pass --out-dir on another disk")


def describe_machine() -> dict:
    """Return the commit of this code, whether its files were changed since, versions and the device."""
    commit = _git("rev-parse", "HEAD")
    changed = None if commit is None else bool(_git("status", "--porcelain", "--untracked-files=no"))
    engine = None if fp8.IS_REFERENCE else fp8.transformer_engine.__version__
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"git_commit": commit, "git_changed": changed, "python": platform.python_version(),
            "torch": torch.__version__, "transformer_engine": engine, "device": device}


def _git(*arguments: str) -> str | None:
    """Return what git prints about the repository of this file; None without git or a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True,
                              text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None


# ---------------------------------------------------------------- --config

def read(path: str, config_class, other_names: dict[str, str]) -> dict:
    """Return the options in a file: config.json of a run, or JSON or YAML with options by name.

    Raises ValueError, in one line, for an option that `config_class` does not have or of another type.
    """
    advice = "python train.py --help has all options"
    document = _parse(path)
    if isinstance(document.get("config"), dict):
        document = {key: value for key, value in document["config"].items() if key not in OF_ONE_RUN}
    kinds, options = get_type_hints(config_class), {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name in OF_THE_COMMAND_LINE:
            raise ValueError(f"{path}: {key}: belongs on the command line; remove it from the file")
        if name not in kinds:
            use = other_names.get(f"--{name.replace('_', '-')}", "").removeprefix("--")
            close = difflib.get_close_matches(name, kinds, 1)
            use = use or (f"perhaps {close[0]}" if close else "")
            raise ValueError(f"{path}: {key}: no such option; {f'use {use}; ' if use else ''}{advice}")
        if not isinstance(value, (str, int, float, type(None))):
            raise ValueError(f"{path}: {key}: a {type(value).__name__}, not text, a number, true, false or "
                             f"null; {advice}")
        options[name] = _as_meant(value, kinds[name])
    json_files.check(options, config_class, path, advice)
    return options


def _parse(path: str) -> dict:
    """Return the object that a JSON or, with another suffix, a YAML file holds."""
    advice = "write options by name, such as lr: 0.001"
    if Path(path).suffix == ".json":
        return json_files.read(path, dict, advice)
    text = json_files.read_bytes(path, advice)
    try:
        import yaml
    except ImportError:
        raise ValueError(f"--config {path}: YAML needs the package pyyaml: pip install pyyaml, or write the "
                         "options as JSON in a file that ends in .json") from None
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML ({json_files.reason(error)}); {advice}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: holds no options; {advice}")
    return document


def _as_meant(value, kind):
    """Return a value as its writer meant it: YAML reads 6e-4 as text, 1 as an integer and off as false."""
    kinds = (kind, *get_args(kind))
    if type(value) in (str, int) and float in kinds:
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    if isinstance(value, bool) and "on" in kinds:
        return "on" if value else "off"
    return value
