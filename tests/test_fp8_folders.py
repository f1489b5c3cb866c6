"""FP8 in Hugging Face folders: an import is exact, and other folders are refused."""
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_folders import edit_json
from nanote import checkpoint
from nanote.tokenizers import get_tokenizer
from tools import export_hf, import_hf
from tools.tensor_files import RunWeights
from trainer_tools import randomize

transformers = pytest.importorskip("transformers")
E4M3 = torch.float8_e4m3fn


# ---------------------------------------------------------------- import

# {name: (what has a scale of its own, type of the scales, whether inputs have static scales)}
LAYOUTS = {"tensor": ("tensor", torch.float32, True), "channel": ("channel", torch.bfloat16, False),
           "channel float16": ("channel", torch.float16, False), "block": ("block", torch.bfloat16, False),
           "block float32": ("block", torch.float32, False)}


def quantization(strategy, is_static):
    """Return quantization_config, as llm-compressor and DeepSeek write it."""
    if strategy == "block":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]}
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = common | {"strategy": "tensor" if is_static else "token", "dynamic": not is_static}
    group = {"targets": ["Linear"], "weights": common | {"strategy": strategy, "dynamic": False},
             "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": group}, "kv_cache_scheme": None}


def make_fp8_folder(folder, layout="tensor"):
    """Write a Llama with random FP8 weights and scales, whose sizes are no multiples of 128. Return its
    tensors, and the exact values {name: float64} of FP8 weights."""
    strategy, dtype, is_static = LAYOUTS[layout]
    model = randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=288, hidden_size=160, intermediate_size=272, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=256, eos_token_id=256)))
    model.to(torch.bfloat16).save_pretrained(folder)
    export_hf.fast_tokenizer(get_tokenizer("byte"), 64).save_pretrained(folder)
    edit_json(Path(folder, "config.json"), quantization_config=quantization(strategy, is_static))
    tensors = load_file(Path(folder, "model.safetensors"))
    exact = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        weight = tensors[name] = (100 * torch.randn(rows, columns)).to(E4M3)
        shapes = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}
        scale = (0.001 + 0.01 * torch.rand(shapes[strategy])).to(dtype)
        tensors[f"{name}_scale{'_inv' if strategy == 'block' else ''}"] = scale
        if is_static:
            tensors[name.replace("weight", "input_scale")] = torch.rand(1)
        scale_of_each = scale.double()
        if strategy == "block":
            row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
            scale_of_each = scale_of_each[row][:, column]
        exact[name] = weight.double() * scale_of_each
    save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
    return tensors, exact


def imported_parts(run):
    """Return the linear weights of an imported Llama of one block, under the names of Hugging Face."""
    weights = RunWeights(checkpoint.find(run))
    q, k, v = weights["blocks.0.attn.qkv.weight"].split((160, 80, 80))
    gate, up = weights["blocks.0.mlp.fc1_weight"].split(272)
    o = weights["blocks.0.attn.proj.weight"]
    down = weights["blocks.0.mlp.fc2_weight"]
    parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "self_attn.o": o,
             "mlp.gate": gate, "mlp.up": up, "mlp.down": down}
    return {f"model.layers.0.{name}_proj.weight": part for name, part in parts.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_weights_are_imported_exactly(layout, tmp_path):
    """In the type of their scales, as compressed-tensors dequantizes."""
    _, exact = make_fp8_folder(tmp_path / "hf", layout)
    import_hf.import_folder(tmp_path / "hf", tmp_path / "run")
    dtype = LAYOUTS[layout][1]
    for name, part in imported_parts(tmp_path / "run").items():
        assert part.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        assert torch.equal(part, exact[name].to(dtype).to(part.dtype)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_import_equals_compressed_tensors(layout, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    tensors, _ = make_fp8_folder(tmp_path / "hf", layout)
    import_hf.import_folder(tmp_path / "hf", tmp_path / "run")
    strategy = LAYOUTS[layout][0]
    options = dict(num_bits=8, type="float", symmetric=True, strategy=strategy)
    if strategy == "block":
        options["block_structure"] = [128, 128]
    for name, part in imported_parts(tmp_path / "run").items():
        scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        values = dequantize(x_q=tensors[name], scale=scale, args=QuantizationArgs(**options))
        assert torch.equal(part, values.to(part.dtype)), name


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("layout, change, words", [
    ("tensor", {f"{QUERY}_scale": None}, f"{QUERY}_scale is missing"),
    ("tensor", {f"{QUERY}_scale": torch.tensor([torch.nan])}, "weight_scale times its weight is not finite"),
    ("tensor", {f"{QUERY}_scale": torch.ones(2)}, "a scale for each tensor has (1,)"),
    ("tensor", {f"{QUERY}_scale": torch.ones(1, dtype=torch.int32)}, f"{QUERY}_scale is I32"),
    ("channel", {f"{QUERY}_scale": torch.ones(80, 1)}, "a scale for each channel has (160, 1)"),
    ("channel", {f"{QUERY}_scale": torch.ones(1)}, "has shape (1,); of a weight"),
    ("block", {f"{QUERY}_scale_inv": torch.ones(1, 2)}, "a scale for each block has (2, 2)"),
    ("block", {f"{QUERY}_scale_inv": None}, f"{QUERY}_scale_inv is missing"),
    ("tensor", {QUERY: torch.zeros(160, 160)}, "q_proj.input_scale: nanoTE's model has no place"),
    ("tensor", {QUERY: torch.zeros(80, 160).to(E4M3)}, f"{QUERY} has shape (80, 160)"),
    ("tensor", {QUERY: torch.zeros(160, 160).to(torch.float8_e5m2)}, f"{QUERY} is F8_E5M2")],
    ids=lambda value: value if isinstance(value, str) else "")
def test_damaged_tensors_are_refused(layout, change, words, in_tmp_path, refused):
    tensors, _ = make_fp8_folder("hf", layout)
    tensors = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    save_file(tensors, "hf/model.safetensors", {"format": "pt"})
    assert words in refused(import_hf.main, "hf run")


@pytest.mark.parametrize("layout, path, value, words", [
    ("tensor", "quant_method", "gptq", "quant_method 'gptq': nanoTE reads 'compressed-tensors' or 'fp8'"),
    ("tensor", "format", "pack-quantized", "format 'pack-quantized'"),
    ("tensor", "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
    ("tensor", "transform_config", {"config_groups": {"R1": {}}}, "transform_config"),
    ("tensor", "config_groups", {}, "no config_groups"),
    ("tensor", "config_groups.group_0.weights", None, "type None"),
    ("tensor", "config_groups.group_0.weights.type", "int", "type 'int'"),
    ("tensor", "config_groups.group_0.weights.num_bits", 4, "num_bits 4: nanoTE reads 8"),
    ("tensor", "config_groups.group_0.weights.strategy", "group", "strategy 'group': nanoTE reads"),
    ("tensor", "config_groups.group_0.weights.symmetric", False, "symmetric False"),
    ("block", "weight_block_size", [64, 128], "weight_block_size [64, 128]: nanoTE reads [128, 128]"),
    ("block", "fmt", "e5m2", "fmt 'e5m2'")], ids=str)
def test_other_quantizations_are_refused(layout, path, value, words, in_tmp_path, refused):
    make_fp8_folder("hf", layout)
    config = json.loads(Path("hf/config.json").read_text())
    *parents, field = ["quantization_config", *path.split(".")]
    fields = config
    for parent in parents:
        fields = fields[parent]
    fields[field] = value
    edit_json("hf/config.json", **config)
    assert words in refused(import_hf.main, "hf run")
