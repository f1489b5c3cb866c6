"""Adapters of the edit lora, for export_hf.py: added to the weights of their base, or as a folder of PEFT.

Beside a weight (out, in) they are a (rank, in) and b (out, rank), and the model computes with
weight + lora_alpha / lora_rank · b @ a. PEFT has an adapter for each of q, k, v, gate and up. So each gets a
copy of the a that they share here, and its rows of b.
"""
import json
from collections import ChainMap
from collections.abc import Iterator, Mapping
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

    tensors: Mapping[str, torch.Tensor]
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
    expected_names = set()
    for name in names_of_weights(model_config):
        expected_names |= {f"{adapter_of(name)}.a", f"{adapter_of(name)}.b"}
    if unexpected := sorted(found - expected_names):
        raise ValueError(f"{source}: {unexpected[0]} is no adapter of examples/edits/optimized/lora.diff; "
                         "share the run with its model file")
    if "lora_rank" not in model_config or "lora_alpha" not in model_config:
        raise ValueError(f"{source}: its model has no fields lora_rank and lora_alpha, as the edit lora has; "
                         "share the run with its model file")
    return Adapters(tensors, model_config["lora_rank"], model_config["lora_alpha"])


def names_of_weights(model_config: dict) -> list[str]:
    """Return the names of the weights that can have an adapter."""
    return [f"blocks.{layer}.{weight}" for layer in range(model_config["n_layer"]) for weight in MODULES]


# ---------------------------------------------------------------- merged

def read_base(folder: Path, masters: bool, rows: int) -> tuple[Mapping[str, torch.Tensor], dict]:
    """Return the weights of a base under the names of the optimized model, and their shapes. Those of a
    folder of Hugging Face are held in memory, and their embeddings padded to `rows`."""
    if checkpoint.is_checkpoint(folder):
        weights = RunWeights(folder, masters=masters)
        return weights, weights.shapes
    from tools.import_hf import open_model  # which imports export_hf
    stored, _ = open_model(folder, rows)
    return {weight.name: weight.value for weight in stored.read()}, stored.shapes


class MergedWeights(LazyTensors):
    """The weights of a base, to which adapters are added in float32: {name: tensor}.

    base: the weights of a run that its base lacks, RunWeights, and those of the base, as `read_base` returns
        them. Adapters among them are left out.
    shapes: {name: shape} of both.
    dtype: of the tensors returned; None: as the base has them.
    trained_beside: the dtype to which the run rounded the weights of its base; None: it has no other base.
    """

    def __init__(self, base: ChainMap[str, torch.Tensor], shapes: dict, added: Adapters,
                 dtype: torch.dtype | None, trained_beside: torch.dtype | None):
        self.base = base
        self.trained_beside = trained_beside
        self.added = added
        self.dtype = dtype
        self.names = dict.fromkeys(name for name in base if adapters.MARK not in name)
        self.shapes = shapes

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self.base[name]
        weight = stored
        if self.trained_beside is not None and name not in self.base.maps[0]:
            weight = stored.to(self.trained_beside)
        if pair := self.added.pair(name):
            a, b = pair
            scale = self.added.alpha / self.added.rank
            weight = weight.float() + scale * b.float() @ a.float()
        return weight.to(self.dtype or stored.dtype)

    def as_in_run(self) -> "MergedWeights":
        """Return the weights with which the run's model computes, in float32: sums that are not rounded, of
        adapters without their masters and of the masters of the base."""
        of_run, of_base = self.base.maps
        of_run = RunWeights(of_run.folder)
        if isinstance(of_base, RunWeights):
            of_base = RunWeights(of_base.folder, masters=True)
        added = self.added._replace(tensors=of_run)
        base = ChainMap(of_run, of_base)
        return MergedWeights(base, self.shapes, added, torch.float32, self.trained_beside)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading it."""
        if self.dtype is not None:
            return self.dtype
        weights = next(weights for weights in self.base.maps if name in weights)
        if isinstance(weights, RunWeights):
            return weights.dtype_of(name)
        return weights[name].dtype  # in memory


# ---------------------------------------------------------------- a folder of PEFT

def write_peft(folder: Path, added: Adapters, base: Path, config, vocab_size: int) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    tensors = dict(peft_tensors(added, config, vocab_size))
    # q_proj of base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    modules = {name.split(".")[-3] for name in tensors}
    checkpoint.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": peft_base_name(base),
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
    """Return the number of tokens of a base, without padding of the vocabulary.

    meta: of the checkpoint that is exported. padded: the rows of the embedding, which are returned if no
    import has stored the number.
    """
    if not checkpoint.is_checkpoint(base):
        return read_json(base / "config.json")["vocab_size"]
    base_meta = checkpoint.read_meta(base)
    of_import = base_meta.get("hf", meta.get("hf", {}))  # what import_hf.py has stored
    return of_import.get("vocab_size", padded)


def peft_base_name(base: Path) -> str:
    """Return the Hugging Face folder of a base, or its checkpoint, to be exported first."""
    if not checkpoint.is_checkpoint(base):
        return str(base)
    meta = checkpoint.read_meta(base)
    is_unchanged_import = meta["step"] == 0 and "hf" in meta
    return meta["hf"]["folder"] if is_unchanged_import else str(base)
