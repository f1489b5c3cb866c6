"""FP8 weights in Hugging Face folders: import_hf.py dequantizes them, export_hf.py --fp8 writes them.

    read        compressed-tensors: E4M3 with per-tensor or per-channel scales; inputs static or dynamic
    read        quant_method fp8, as of DeepSeek-V3 and Qwen3: E4M3 with a scale for each block of 128 x 128
    written     compressed-tensors: E4M3 with per-tensor scales, and a static scale of the input of each layer

- In a folder, value = FP8 · scale. In an engine, FP8 = value · scale. So the scale written to a folder
  is the engine's scale_inv, 1 / scale.
- The static scales are those of delayed scaling, which training has found: nothing is calibrated.
- q, k and v are one GEMM here, and so are gate and up: each part has the scales of the whole.
"""
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import te_reference
from nanote import checkpoint
from nanote.training_state import under_prefix
from tools import hf_weights
from tools.tensor_files import FolderTensors, LazyTensors, RunWeights, optimized_name, read_json

BLOCK = 128  # rows and columns that share a scale
FORMATS = ("float-quantized", "naive-quantized")  # compressed-tensors' names of formats that store FP8
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # of scales


# ---------------------------------------------------------------- reading

class Layout(NamedTuple):
    """How a folder stores FP8 weights."""

    scale_name: str  # the last part of the name of a scale
    strategies: tuple[str, ...]  # what has a scale of its own: tensor, channel or block


def open_folder(folder: Path) -> LazyTensors:
    """Return the tensors of a Hugging Face folder, those in FP8 dequantized."""
    path = folder / "config.json"
    layout = read_layout(read_json(path).get("quantization_config"), path)
    tensors = FolderTensors(folder)
    return tensors if layout is None else DequantizedTensors(tensors, layout, folder)


def read_layout(quantization: dict | None, path: Path) -> Layout | None:
    """Return the layout in the entry quantization_config of a config.json, None without an entry. ValueError
    for a quantization that is not read."""
    if not quantization:
        return None
    check_object(path, "the entry", quantization)
    method = quantization.get("quant_method")
    check_value(path, "quant_method", method, "compressed-tensors", "fp8")
    if method == "fp8":
        check_value(path, "weight_block_size", quantization.get("weight_block_size"), [BLOCK, BLOCK])
        check_value(path, "fmt", quantization.get("fmt", "e4m3"), "e4m3")
        return Layout("weight_scale_inv", ("block",))
    check_value(path, "format", quantization.get("format"), *FORMATS)
    check_value(path, "kv_cache_scheme", quantization.get("kv_cache_scheme"), None)
    check_value(path, "transform_config", quantization.get("transform_config"), None, {})
    groups = quantization.get("config_groups")
    if not groups:
        raise ValueError(f"{path}: quantization_config has no config_groups; copy the file again")
    check_object(path, "config_groups", groups)
    strategies = []
    for name, group in groups.items():
        check_object(path, name, group)
        weights = group.get("weights") or {}
        check_object(path, "weights", weights)
        check_value(path, "format", group.get("format"), None, *FORMATS)
        check_value(path, "type", weights.get("type"), "float")
        check_value(path, "num_bits", weights.get("num_bits"), 8)
        check_value(path, "symmetric", weights.get("symmetric", True), True)
        check_value(path, "strategy", weights.get("strategy"), "tensor", "channel")
        strategies.append(weights["strategy"])
    return Layout("weight_scale", tuple(strategies))


def check_value(path: Path, name: str, value, *allowed) -> None:
    """Raise ValueError unless a field of quantization_config has one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{path}: quantization_config: {name} {value!r}: nanoTE reads "
                         f"{' or '.join(map(repr, allowed))}; import the model in bfloat16")


def check_object(path: Path, name: str, value) -> None:
    """Raise ValueError unless a part of quantization_config is a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{path}: quantization_config: {name} must be an object, {{…}}; copy the file again")


class DequantizedTensors(LazyTensors):
    """The tensors of a folder in FP8: {name: tensor}. An FP8 weight is dequantized, and its scales are left
    out. Names, shapes and types of all scales are checked in `__init__`.

    headers: {name: Header}, as of FolderTensors. A dequantized weight has the type of its scale, float16 as
    float32.
    """

    def __init__(self, tensors: FolderTensors, layout: Layout, folder: Path):
        self.tensors = tensors
        self.folder = folder
        self.headers = self.names = dict(tensors.headers)
        self.scale_names = {}  # {name of an FP8 weight: that of its scale}
        for name, header in tensors.headers.items():
            if header.dtype != "F8_E4M3" or len(header.shape) != 2:
                continue  # a vector in FP8 is refused with the other types
            prefix = name.removesuffix("weight")
            scale_name = prefix + layout.scale_name
            scale_header = tensors.headers.get(scale_name)
            check_scale(scale_header, header.shape, layout, f"{folder}: tensor {scale_name}")
            self.scale_names[name] = scale_name
            self.headers[name] = header._replace(dtype=scale_header.dtype)
            del self.headers[scale_name]
            self.headers.pop(f"{prefix}input_scale", None)  # of an input with a static scale

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


def check_scale(header, weight_shape: tuple[int, ...], layout: Layout, where: str) -> None:
    """Raise ValueError unless the scale of an FP8 weight is there, in a shape of the layout and in a type of
    DTYPES. where: begins the message."""
    if header is None:
        raise ValueError(f"{where} is missing, and the weight is FP8; copy the folder again")
    rows, columns = weight_shape
    blocks = ((rows + BLOCK - 1) // BLOCK, (columns + BLOCK - 1) // BLOCK)
    shapes = {"tensor": (1,), "channel": (rows, 1), "block": blocks}
    allowed = [shapes[strategy] for strategy in layout.strategies]
    shape = header.shape or (1,)  # () is a scale of one element, too
    if shape not in allowed:
        raise ValueError(f"{where} has shape {header.shape}; a scale per {' or '.join(layout.strategies)} "
                         f"of a weight {weight_shape} has shape {' or '.join(map(str, allowed))}")
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


# ---------------------------------------------------------------- writing

class Scales(NamedTuple):
    """The scales of a GEMM, each float32 (): FP8 = value · scale."""

    input: torch.Tensor
    weight: torch.Tensor


def training_scales(source: Path, recipe: str, config, with_lm_head: bool) -> dict[str, Scales]:
    """Return {name of a weight of the optimized model: Scales} from a checkpoint, for all weights to write in
    FP8. ValueError for a run that has no such scales, or a model that cannot be written in FP8.

    recipe: the run's --fp8-recipe. config: its OptimizedConfig.
    """
    more_training = "resume it with --fp8-recipe delayed for some steps, and export that"
    if hf_weights.model_type(config) == "gpt2":
        raise ValueError(f"--fp8: {source} is a GPT-2, and compressed-tensors does not quantize its Conv1D; "
                         "leave --fp8 out")
    if recipe != "delayed":
        raise ValueError(f"--fp8: {source} has --fp8-recipe {recipe}, without static scales; {more_training}")
    if with_lm_head and config.tie_embeddings:
        raise ValueError("--fp8-lm-head: the head is the embedding (--tie-embeddings), which is not in FP8; "
                         "leave --fp8-lm-head out")
    if with_lm_head and not config.fp8_lm_head:
        raise ValueError(f"--fp8-lm-head: {source} has --no-fp8-lm-head; leave --fp8-lm-head out")
    state = {}
    for name, tensor in under_prefix(checkpoint.read_tensors(source, ("fp8.",)), "fp8.").items():
        state[optimized_name(name)] = tensor
    scales = {}
    for name, module, gemm in fp8_gemms(config, with_lm_head):
        scale = state.get(f"{module}.scaling_fwd.scale")  # input, weight, output of each GEMM
        if scale is None:
            raise ValueError(f"--fp8: {source} has no FP8 scales of {module}; {more_training}")
        scales[name] = Scales(input=scale[3 * gemm], weight=scale[3 * gemm + 1])
    return scales


def fp8_gemms(config, with_lm_head: bool) -> list[tuple[str, str, int]]:
    """Return (name of the weight, its module, index of the GEMM in its module) of the GEMMs that a run
    trains in FP8."""
    gemms = []
    for layer in range(config.fp8_skip_first, config.n_layer - config.fp8_skip_last):
        block = f"blocks.{layer}"
        gemms.append((f"{block}.attn.qkv.weight", f"{block}.attn.qkv", 0))
        gemms.append((f"{block}.attn.proj.weight", f"{block}.attn.proj", 0))
        gemms.append((f"{block}.mlp.fc1_weight", f"{block}.mlp", 0))
        gemms.append((f"{block}.mlp.fc2_weight", f"{block}.mlp", 1))
    if with_lm_head:
        gemms.append(("lm_head.weight", "lm_head", 0))
    return gemms


class QuantizedWeights(RunWeights):
    """The weights of a run: {name: tensor}, those that have Scales in FP8, with the bytes of training. The
    others have `dtype`; None: as stored. The bias of an FP8 GEMM has values of BF16, as training adds it."""

    def __init__(self, folder: Path, scales: dict[str, Scales], dtype: torch.dtype | None):
        super().__init__(folder, dtype=dtype)
        self.scales = scales
        self.biases = {bias_of(name) for name in scales}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.scales:
            weight = self.read_stored(name)
            return te_reference.quantize(weight, self.scales[name].weight, torch.float8_e4m3fn)
        tensor = super().__getitem__(name)
        if name in self.biases:
            return tensor.to(torch.bfloat16).to(tensor.dtype)
        return tensor


def bias_of(weight_name: str) -> str:
    """Return the name of the bias beside a weight: blocks.0.mlp.fc1_weight -> blocks.0.mlp.fc1_bias."""
    return weight_name.removesuffix("weight") + "bias"


def value_of(weight: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Return the float32 value of an FP8 weight of QuantizedWeights."""
    return te_reference.dequantize(weight, scales.weight)


def scale_tensors(scales: dict[str, Scales], config) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, scale), the tensors that a Hugging Face model has beside its FP8 weights."""
    for spec in hf_weights.weight_specs(config, config.vocab_size):
        if spec.name not in scales:
            continue
        for name, _ in spec.parts:
            prefix = name.removesuffix("weight")
            yield f"{prefix}input_scale", scales[spec.name].input.reciprocal().view(1)
            yield f"{prefix}weight_scale", scales[spec.name].weight.reciprocal().view(1)


def quantization_config(scales: dict[str, Scales], config) -> dict:
    """Return the entry quantization_config of config.json. It ignores linear layers that are not in FP8."""
    ignored = ["lm_head"] if config.tie_embeddings else []  # a tied head is still a Linear in transformers
    for spec in hf_weights.weight_specs(config, config.vocab_size):
        is_linear = spec.columns is not None and spec.name != "wte.weight"
        if is_linear and spec.name not in scales:
            ignored += [name.removesuffix(".weight") for name, _ in spec.parts]
    per_tensor = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": per_tensor, "input_activations": per_tensor}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed",
            "format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ignored}
