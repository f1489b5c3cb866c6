"""Adapters of the edit lora, for export_hf.py: added to the weights of their base, or as a folder of PEFT.

Beside a weight (out, in) they are a (rank, in) and b (out, rank), and the model computes with
weight + lora_alpha / lora_rank · b @ a. PEFT has an adapter for each of q, k, v, gate and up. So each gets a
copy of the a that they share here, and its rows of b.
"""
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from nanote import adapters, checkpoint
from tools import hf_weights
from tools.tensor_files import LazyTensors, RunWeights, read_json

# {weight of the optimized model: module of its adapter}, in a block
MODULES = {"attn.qkv.weight": "attn.lora_qkv", "attn.proj.weight": "attn.lora_proj",
           "mlp.fc1_weight": "mlp.lora_fc1", "mlp.fc2_weight": "mlp.lora_fc2"}


class Adapters(NamedTuple):
    """The adapters of a run."""

    tensors: RunWeights
    rank: int
    alpha: float

    def pair(self, weight_name: str):
        """Return a and b beside a weight, or None."""
        module = adapter_of(weight_name)
        if module is None or f"{module}.a" not in self.tensors:
            return None
        return self.tensors[f"{module}.a"], self.tensors[f"{module}.b"]


def adapter_of(weight_name: str) -> str | None:
    """Return the name of the adapter beside a weight: blocks.0.attn.qkv.weight -> blocks.0.attn.lora_qkv."""
    for suffix, module in MODULES.items():
        if weight_name.startswith("blocks.") and weight_name.endswith(f".{suffix}"):
            return weight_name.removesuffix(suffix) + module
    return None


def read_adapters(source: Path, model_config: dict, masters: bool) -> Adapters | None:
    """Return the adapters in a checkpoint, None if there are none. model_config: of its meta.json. masters:
    return their float32 masters."""
    tensors = RunWeights(source, masters=masters)
    found = {name for name in tensors if adapters.MARK in name}
    if not found:
        return None
    known = {f"{adapter_of(name)}.{letter}" for name in names_of_weights(model_config) for letter in "ab"}
    has_fields = "lora_rank" in model_config and "lora_alpha" in model_config
    if unknown := sorted(found - known):
        raise ValueError(f"{source}: {unknown[0]} is no adapter of examples/edits/optimized/lora.diff; share "
                         "the run with its model file")
    if not has_fields:
        raise ValueError(f"{source}: its model has no fields lora_rank and lora_alpha, as the edit lora has; "
                         "share the run with its model file")
    return Adapters(tensors, model_config["lora_rank"], model_config["lora_alpha"])


def names_of_weights(model_config: dict) -> list[str]:
    """Return the names of the weights that can have an adapter."""
    return [f"blocks.{layer}.{weight}" for layer in range(model_config["n_layer"]) for weight in MODULES]


# ---------------------------------------------------------------- merged

class FolderWeights(LazyTensors):
    """The weights of a Hugging Face folder under the names of the optimized model. Holds all in memory."""

    def __init__(self, folder: Path, rows: int):
        from tools.import_hf import open_model  # which imports export_hf
        stored, _ = open_model(folder, rows)
        self.shapes = stored.shapes
        self.names = {name: tensors[f"model.{name}"] for name, tensors in stored.tensors}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.names[name]

    def dtype_of(self, name: str) -> torch.dtype:
        return self.names[name].dtype


class MergedWeights(LazyTensors):
    """The weights of a base, to which adapters are added in float32: {name: tensor}.

    dtype: of the tensors returned; None: as the base has them.
    """

    def __init__(self, base: LazyTensors, added: Adapters, dtype: torch.dtype | None):
        self.base = base
        self.added = added
        self.dtype = dtype
        self.names = dict.fromkeys(base)
        self.shapes = base.shapes

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self.base[name]
        if pair := self.added.pair(name):
            a, b = pair
            scale = self.added.alpha / self.added.rank
            merged = weight.float() + scale * b.float() @ a.float()
            weight = merged.to(weight.dtype)
        return weight if self.dtype is None else weight.to(self.dtype)

    def dtype_of(self, name: str) -> torch.dtype:
        return self.dtype or self.base.dtype_of(name)


# ---------------------------------------------------------------- a folder of PEFT

def write_peft(folder: Path, added: Adapters, config, vocab_size: int, base_name: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors. base_name: where PEFT looks for the base."""
    tensors = dict(peft_tensors(added, config, vocab_size))
    modules = {name.split(".")[-3] for name in tensors}
    checkpoint.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": added.rank,
        "lora_alpha": added.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "fan_in_fan_out": hf_weights.model_type(config) == "gpt2",  # its Conv1D stores (in, out)
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def peft_tensors(added: Adapters, config, vocab_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as PEFT names them."""
    for spec in hf_weights.weight_specs(config, vocab_size):
        pair = added.pair(spec.name)
        if pair is None:
            continue
        a, b = pair
        rows_of_parts = [rows for _, rows in spec.parts]
        for (name, _), part in zip(spec.parts, b.split(rows_of_parts)):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            yield f"{module}.lora_A.weight", a.clone()  # safetensors accepts no shared memory
            yield f"{module}.lora_B.weight", part.clone()


# ---------------------------------------------------------------- the base

def vocab_size_of(base: Path, meta: dict, padded: int) -> int:
    """Return the number of a base's tokens, without padding. meta: of the checkpoint with its adapters."""
    if checkpoint.step_of(base) is None:
        return read_json(base / "config.json")["vocab_size"]
    base_meta = checkpoint.read_meta(base)
    return base_meta.get("hf", meta.get("hf", {})).get("vocab_size", padded)


def peft_base_name(base: Path) -> str:
    """Return the Hugging Face folder of a base, or that of its run, which has to be exported for PEFT."""
    if checkpoint.step_of(base) is None:
        return str(base)
    meta = checkpoint.read_meta(base)
    is_unchanged_import = meta["step"] == 0 and "hf" in meta
    return meta["hf"]["folder"] if is_unchanged_import else str(base)
