"""Tensors in files, one at a time: those of a Hugging Face folder, those of a checkpoint, and the writer of a
folder. For import_hf.py, which never holds a whole model, and export_hf.py, which does only to check logits.

`FolderTensors` and `RunWeights` are `LazyTensors`: mappings {name: tensor}. A tensor is read when it is asked
for, and its shape is known before.
"""
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from nanote import checkpoint
from nanote.command import error_line
from nanote.training_state import parameter_name

# {part of a name in other model files: in model_te_optimized.py}, replaced in this order
NAMES = {"self_attention.layernorm_qkv.": "attn.qkv.", "self_attention.proj.": "attn.proj.",
         "layernorm_mlp.": "mlp.", "attn.norm.": "attn.qkv.layer_norm_", "mlp.norm.": "mlp.layer_norm_",
         "mlp.fc1.": "mlp.fc1_", "mlp.fc2.": "mlp.fc2_"}
MAX_SHARD_SIZE = 4 * 2**30  # bytes of a file that is written


class LazyTensors(Mapping):
    """A mapping {name: tensor}. A subclass reads a tensor in `__getitem__`.

    names: a dictionary with the same keys.
    """

    names: dict

    def __contains__(self, name) -> bool:  # Mapping's own would read the tensor
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


# ---------------------------------------------------------------- a Hugging Face folder

class Header(NamedTuple):
    """What is known of a tensor before it is read."""

    path: Path  # of its file
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: F32, BF16, F16, F8_E4M3, …


class FolderTensors(LazyTensors):
    """The tensors of a Hugging Face folder: {name: tensor}, float16 as float32, which is exact.

    headers: {name: Header} of the files that transformers reads.
    """

    def __init__(self, folder: Path):
        self.headers = {}
        self.open_path = None  # of the file that was read last
        self.open_file = None
        for path in weight_files(folder):
            self.headers |= read_headers(path)
        self.names = self.headers

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self.headers[name].path
        if path != self.open_path:
            self.open_file = open_safetensors(path)
            self.open_path = path
        tensor = self.open_file.get_tensor(name)
        return tensor.float() if tensor.dtype == torch.float16 else tensor


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads: model.safetensors, or those that its index names."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    path = folder / "model.safetensors.index.json"
    weight_map = read_json(path).get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: weight_map must be an object, tensor: file; copy the file again")
    names = sorted({Path(str(name)).name for name in weight_map.values()})  # never outside the folder
    if not names:
        raise ValueError(f"{folder}: no model.safetensors, nor shards that a model.safetensors.index.json "
                         "names; a pickle (*.bin) is not read, since it can run code: "
                         "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) converts it")
    return [folder / name for name in names]


def read_headers(path: Path) -> dict[str, Header]:
    """Return the headers of the tensors in a safetensors file."""
    file = open_safetensors(path)
    headers = {}
    for name in file.keys():
        entry = file.get_slice(name)
        headers[name] = Header(path, tuple(entry.get_shape()), entry.get_dtype())
    return headers


def open_safetensors(path: Path):
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # whatever safetensors raises for a damaged header
        raise ValueError(f"{path}: not readable ({error_line(error)}); copy it again") from error


def read_json(path: Path) -> dict:
    """Return the object in a JSON file, {} without one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error_line(error)}); copy the file again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object, {{…}}; copy the file again")
    return content


# ---------------------------------------------------------------- a checkpoint

class RunWeights(LazyTensors):
    """The weights of a checkpoint under the names of the optimized model: {name: tensor}.

    Args:
        masters: return the float32 master of a weight that has one.
        dtype: of the tensors returned; None: as stored.
    """

    def __init__(self, folder, masters: bool = False, dtype: torch.dtype | None = None):
        self.folder = folder
        self.reader = checkpoint.TensorReader(folder)
        self.dtype = dtype
        self.stored_names = {}  # {name: name in the checkpoint}
        self.shapes = {}
        for stored_name, entry in self.reader.entries.items():
            if not stored_name.startswith("model."):
                continue
            # for example model.blocks.0.mlp.fc1.weight, of model_te_custom.py:
            weight_name = parameter_name(stored_name)  # blocks.0.mlp.fc1.weight
            name = optimized_name(weight_name)  # blocks.0.mlp.fc1_weight
            master_name = f"optimizer.{weight_name}.master_param"
            has_master = masters and master_name in self.reader.entries
            self.stored_names[name] = master_name if has_master else stored_name
            self.shapes[name] = tuple(entry.size)
        self.names = self.stored_names

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.read_stored(name)
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def read_stored(self, name: str) -> torch.Tensor:
        """Return a tensor in the dtype of the checkpoint."""
        stored_name = self.stored_names[name]
        return self.reader.read([stored_name])[stored_name]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor without reading it."""
        return self.dtype or self.reader.entries[self.stored_names[name]].properties.dtype


def optimized_name(name: str) -> str:
    """Return the optimized model's name for a weight of any model file."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    if name.startswith("norm."):
        return "lm_head.layer_norm_" + name.removeprefix("norm.")
    return name


# ---------------------------------------------------------------- writing

def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write (name, tensor) pairs as transformers does: to model.safetensors or, if they take more than
    MAX_SHARD_SIZE, to shards and model.safetensors.index.json. Holds one shard in memory."""
    tensor_names_by_file = []
    total_size = 0
    for shard in checkpoint.in_shards(tensors, MAX_SHARD_SIZE):
        path = folder / f"{len(tensor_names_by_file)}.unnamed"
        checkpoint.save_file(shard, path, {"format": "pt"})
        tensor_names_by_file.append(list(shard))
        total_size += sum(tensor.nbytes for tensor in shard.values())
    count = len(tensor_names_by_file)
    if count == 1:
        (folder / "0.unnamed").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for i, names in enumerate(tensor_names_by_file):
        # file names contain the number of shards, known only now
        file_name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        (folder / f"{i}.unnamed").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
