"""Adapters (LoRA): parameters with "lora_" in their names, trained beside the weights of another model, the
base, which --init-from names and which stay as they are.

A checkpoint of such a run has the adapters, their optimizer state and the FP8 scales, but not the weights of
the base. meta.json has its folder and a checksum of its files, and whatever loads the checkpoint loads both.
"""
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from nanote.tokens import sha256

MARK = "lora_"  # in the name of each parameter of an adapter


class Base(NamedTuple):
    """The model whose weights a run of adapters leaves alone."""

    folder: Path  # a step-<n>, or a folder of Hugging Face
    sha256: str  # of `checksum_of_weights`
    names: frozenset[str]  # of the weights that are read from it
    dtype: torch.dtype  # of the run's weights when it began, to which those of the base were rounded


def trains_only_adapters(model) -> bool:
    """Return whether a model has adapters, and nothing else is trained."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return len(trained) > 0 and all(MARK in name for name in trained)


def base_of(model) -> Base | None:
    """Return the Base of a model whose checkpoints have only adapters. None: they have all weights."""
    return getattr(model, "base_of_adapters", None)


def names_of_base(model) -> frozenset[str]:
    """Return the names of the weights that are not stored, because the base has them."""
    base = base_of(model)
    return frozenset() if base is None else base.names


def base_meta(model, run_dir) -> dict:
    """Return the part of meta.json that names the base of a run; {} without one."""
    base = base_of(model)
    if base is None:
        return {}
    folder = base.folder.resolve()
    # for a run that was moved together with its base
    from_run = os.path.relpath(folder, Path(run_dir).resolve())
    return {"base": {"folder": str(folder), "folder_from_run": from_run, "sha256": base.sha256,
                     "dtype": str(base.dtype).removeprefix("torch.")}}


def dtype_of_base(meta: dict) -> torch.dtype:
    """Return the dtype to which a run rounded the weights of its base. meta: of its checkpoint."""
    return getattr(torch, meta["base"]["dtype"])


def find_base(checkpoint_folder, meta: dict) -> Path | None:
    """Return the folder of the base that meta.json of a checkpoint names, None if it names none. Raise
    ValueError if it is missing, or has other weights."""
    if "base" not in meta:
        return None
    base = meta["base"]
    run_dir = Path(checkpoint_folder).resolve().parent
    candidates = Path(base["folder"]), run_dir / base["folder_from_run"]
    folder = next((path for path in candidates if path.is_dir()), None)
    if folder is None:
        raise ValueError(f"{checkpoint_folder}: has adapters of {base['folder']}, which is missing; put "
                         "that folder there")
    if checksum_of_weights(folder) != base["sha256"]:
        raise ValueError(f"{checkpoint_folder}: has adapters of other weights than those in {folder}; "
                         "restore the ones that it was trained on")
    return folder


def checksum_of_weights(folder: Path) -> str:
    """Return one SHA-256 of the safetensors files in a folder, each with its name."""
    paths = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        lines = [f"{checksum}  {path.name}\n" for checksum, path in zip(pool.map(sha256, paths), paths)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
