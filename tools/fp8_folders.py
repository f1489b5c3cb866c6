"""FP8 weights in Hugging Face folders: import_hf.py dequantizes them.

    read        compressed-tensors: E4M3 with a scale a tensor or a channel; inputs static or dynamic
    read        quant_method fp8, as of DeepSeek-V3 and Qwen3: E4M3 with a scale for each block of 128 x 128
"""
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from tools.tensor_files import FolderTensors, read_json

BLOCK = 128  # rows and columns that share a scale
FORMATS = ("float-quantized", "naive-quantized")  # compressed-tensors' names of formats that store FP8
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # of scales


# ---------------------------------------------------------------- reading

class Layout(NamedTuple):
    """How a folder stores FP8 weights."""

    scale_name: str  # the last part of the name of a scale
    strategies: tuple[str, ...]  # what has a scale of its own: tensor, channel or block


def open_folder(folder: Path) -> Mapping:
    """Return the tensors of a Hugging Face folder, those in FP8 dequantized."""
    path = folder / "config.json"
    layout = read_layout(read_json(path).get("quantization_config"), path)
    tensors = FolderTensors(folder)
    return tensors if layout is None else DequantizedTensors(tensors, layout, folder)


def read_layout(quantization: dict | None, path: Path) -> Layout | None:
    """Return the layout in the entry quantization_config of a config.json, None without an entry. ValueError
    for a quantization that is not read."""
    def require(name, value, *values):
        if value not in values:
            raise ValueError(f"{path}: quantization_config: {name} {value!r}: nanoTE reads "
                             f"{' or '.join(map(repr, values))}; import the model in bfloat16")

    if not quantization:
        return None
    method = quantization.get("quant_method")
    require("quant_method", method, "compressed-tensors", "fp8")
    if method == "fp8":
        require("weight_block_size", quantization.get("weight_block_size"), [BLOCK, BLOCK])
        require("fmt", quantization.get("fmt", "e4m3"), "e4m3")
        return Layout("weight_scale_inv", ("block",))
    require("format", quantization.get("format"), *FORMATS)
    require("kv_cache_scheme", quantization.get("kv_cache_scheme"), None)
    require("transform_config", quantization.get("transform_config"), None, {})
    groups = quantization.get("config_groups")
    if not groups:
        raise ValueError(f"{path}: quantization_config has no config_groups; copy the file again")
    strategies = []
    for group in groups.values():
        weights = group.get("weights") or {}
        require("format", group.get("format"), None, *FORMATS)
        require("type", weights.get("type"), "float")
        require("num_bits", weights.get("num_bits"), 8)
        require("symmetric", weights.get("symmetric", True), True)
        require("strategy", weights.get("strategy"), "tensor", "channel")
        strategies.append(weights["strategy"])
    return Layout("weight_scale", tuple(strategies))


class DequantizedTensors(Mapping):
    """The tensors of a folder in FP8: {name: tensor}. An FP8 weight is read as its values, and its scales are
    left out. Names, shapes and types of all scales are checked at once.

    headers: {name: Header}, as of FolderTensors. The values have the type of the scale.
    """

    def __init__(self, tensors: FolderTensors, layout: Layout, folder: Path):
        self.tensors = tensors
        self.folder = folder
        self.headers = dict(tensors.headers)
        self.scale_names = {}  # {name of an FP8 weight: that of its scale}
        for name, header in tensors.headers.items():
            if header.dtype != "F8_E4M3" or len(header.shape) != 2:
                continue  # a vector in FP8 is refused with the other types
            module = name.removesuffix("weight")
            scale_name = module + layout.scale_name
            scale = tensors.headers.get(scale_name)
            check_scale(scale, header.shape, layout, f"{folder}: tensor {scale_name}")
            self.scale_names[name] = scale_name
            self.headers[name] = header._replace(dtype=scale.dtype)
            del self.headers[scale_name]
            self.headers.pop(f"{module}input_scale", None)  # of an input with a static scale

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        if name not in self.scale_names:
            return tensor
        scale_name = self.scale_names[name]
        dtype = DTYPES[self.headers[name].dtype]
        values = dequantize(tensor, self.tensors[scale_name].to(dtype))
        if not values.isfinite().all():
            raise ValueError(f"{self.folder}: tensor {scale_name} times its weight is not finite; copy the "
                             "folder again")
        return values.float() if dtype == torch.float16 else values  # as FolderTensors

    def __contains__(self, name) -> bool:
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


def check_scale(header, weight_shape: tuple[int, ...], layout: Layout, where: str) -> None:
    """Raise ValueError unless the scale of an FP8 weight is there, in a shape of the layout and in a type of
    DTYPES. where: begins the message."""
    if header is None:
        raise ValueError(f"{where} is missing, and the weight is FP8; copy the folder again")
    rows, columns = weight_shape
    blocks = ((rows + BLOCK - 1) // BLOCK, (columns + BLOCK - 1) // BLOCK)
    shapes = {"tensor": (1,), "channel": (rows, 1), "block": blocks}
    allowed = [shapes[strategy] for strategy in layout.strategies]
    if (header.shape or (1,)) not in allowed:
        raise ValueError(f"{where} has shape {header.shape}; of a weight {weight_shape}, a scale for each "
                         f"{' or '.join(layout.strategies)} has {' or '.join(map(str, allowed))}")
    if header.dtype not in DTYPES:
        raise ValueError(f"{where} is {header.dtype}; nanoTE reads {', '.join(DTYPES)}")


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return FP8 · scale, calculated in the type of the scale as compressed-tensors does. weight: (out, in);
    scale: (1,), (out, 1) or, for blocks, (out / 128, in / 128), rounded up."""
    rows, columns = weight.shape
    values = weight.to(scale.dtype)
    if scale.dim() < 2 or scale.shape == (rows, 1):
        return values * scale
    for i, scales_of_blocks in enumerate(scale):
        values[BLOCK * i:BLOCK * (i + 1)] *= scales_of_blocks.repeat_interleave(BLOCK)[:columns]
    return values
