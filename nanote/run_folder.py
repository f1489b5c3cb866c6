"""The folder of a run: its name, what is in it at the start, and the lines that name it at the end."""
import itertools
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from nanote import adapters, checkpoint, logs, models, parallel, recipes
from nanote.config import is_model_file


def open_folder(config) -> str:
    """Make the folder of a run: --out-dir, or the next free of out/<preset>, out/<preset>-2, … Return it."""
    folder = config.out_dir
    if folder is None:
        folder = next_free_folder(f"out/{config.preset}")
    elif not config.resume and is_taken(folder):
        raise ValueError(f"--out-dir {folder}: exists; resume it with --resume, or name another")
    os.makedirs(folder, exist_ok=True)
    return folder


def next_free_folder(first: str) -> str:
    """Return the first of out/tiny, out/tiny-2, out/tiny-3, … that does not exist."""
    folder = first
    for number in itertools.count(2):
        if not os.path.lexists(folder):
            return folder
        folder = f"{first}-{number}"


def is_taken(folder: str) -> bool:
    """Return whether a folder has a checkpoint, or files that are not a run's.

    A run that ended before its first checkpoint has config.json; a new run may overwrite it.
    """
    if not os.path.lexists(folder):
        return False
    if checkpoint.latest(folder) is not None:
        return True
    return bool(os.listdir(folder)) and not os.path.exists(f"{folder}/config.json")


def prepare_files(config, source: Path | None, first_step: int) -> None:
    """Cut the logs of a run to the checkpoint that it continues, and write config.json. Raise ValueError if
    another process has written a newer checkpoint."""
    folder = config.out_dir
    if source is not None and checkpoint.latest(folder) != source:
        raise ValueError(f"{folder}: another process has trained past {source} meanwhile; start again")
    logs.cut(folder, first_step)  # also of a run that was killed before its first checkpoint
    options = asdict(config) | {"command": shlex.join(sys.argv)}
    logs.replace_file(Path(folder, "config.json"), json.dumps(options, indent=2) + "\n")


def run_meta(config, model, loader, step: int, skipped: list[int]) -> dict:
    """Return the run's part of meta.json of the checkpoint of a step. skipped: the steps that were not
    finite."""
    return {
        "config": asdict(config),
        "model": models.portable_name(config.model),
        "model_config": asdict(model.config),
        "tokenizer": loader.meta["tokenizer"],
        "corpus": {name: loader.meta[name] for name in ("train_sha256", "val_sha256")},
        "device": recipes.describe(),
        "samples": loader.samples_before(step + 1),
        "tokens_per_step": loader.tokens_per_step,
        "skipped": skipped,
    } | adapters.base_meta(model, config.out_dir)


def print_summary(config, step: int) -> None:
    """Print where everything is, and how to continue after the last step."""
    folder = config.out_dir
    quoted = shlex.quote(folder)
    newest = checkpoint.latest(folder)
    if newest is None:
        print(f"{folder}: {step} steps are done, and nothing is saved: --checkpoint-interval 0")
        return
    # code is never taken from a checkpoint: the user has to name it again
    own_model = ""
    own_recipe = ""
    if is_model_file(config.model):
        own_model = f" --model {shlex.quote(config.model)}"
    if config.fp8_recipe.startswith("custom:"):
        own_recipe = f" --fp8-recipe {config.fp8_recipe}"
    command = f"{parallel.launcher()} train.py --resume --out-dir {quoted}{own_model}{own_recipe}"
    if step < config.max_steps:
        print(f"stopped after step {step}; saved {newest}; resume with: {command}")
        return
    print(f"{step} steps are done; continue with: {command} --max-steps {2 * step}")
    files = {"loss.png": f"loss curve   {folder}/loss.png",
             "metrics.jsonl": f"metrics      {folder}/metrics.jsonl",
             "tensorboard": f"curves       tensorboard --logdir {quoted}/tensorboard"}
    for name, line in files.items():
        if Path(folder, name).exists():
            print(line)
    print(f"checkpoint   {newest}\n"
          f"text         python sample.py {quoted}{own_model}")
