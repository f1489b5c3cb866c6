"""Names of weights and config fields in nanoTE and in Hugging Face models, for export_hf.py and import_hf.py.

- The architecture selects the class: learned positions are GPT2LMHeadModel, RoPE is LlamaForCausalLM, RoPE
  with QK-norm is Qwen3ForCausalLM. A model that none of them can express is refused, naming the field.
- Nothing is computed, so nothing is rounded. Weights are renamed; GPT-2 weights are transposed (Conv1D stores
  (in, out)); fused weights are split into q, k, v and gate, up, which Llama stores separately.
- GPT2LMHeadModel always has biases: a model without them gets zeros, which "nanote" in config.json records.
"""
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from nanote import checkpoint
from nanote.command import error_line
from nanote.training_state import parameter_name

CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Parts of names in model_te.py and model_te_custom.py, and in the optimized model; replaced in this order.
NAMES = {"self_attention.layernorm_qkv.": "attn.qkv.", "self_attention.proj.": "attn.proj.",
         "layernorm_mlp.": "mlp.", "attn.norm.": "attn.qkv.layer_norm_", "mlp.norm.": "mlp.layer_norm_",
         "mlp.fc1.": "mlp.fc1_", "mlp.fc2.": "mlp.fc2_"}


def read_weights(folder, masters: bool = False) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights, or their float32 `masters`, under the names of the optimized model."""
    weights = {}
    for name, weight in checkpoint.read_tensors(folder, ("model.",)).items():
        weights[parameter_name(name)] = weight
    if masters:
        stored_names = tuple(f"optimizer.{name}.master_param" for name in weights)
        for name, master in checkpoint.read_tensors(folder, stored_names).items():
            weights[parameter_name(name)] = master
    return {optimized_name(name): weight for name, weight in weights.items()}


def optimized_name(name: str) -> str:
    """Return the optimized model's name for a weight of any model file."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    if name.startswith("norm."):
        return "lm_head.layer_norm_" + name.removeprefix("norm.")
    return name


def read_json(path: Path) -> dict:
    """Return the object in a JSON file, {} without one."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error_line(error)}); copy the file again") from error


# ---------------------------------------------------------------- configurations

def model_type(config) -> str:
    """Return gpt2, llama or qwen3 for an OptimizedConfig. ValueError for a value that no class has."""
    if config.use_rotary:
        kind = "qwen3" if config.use_qk_norm else "llama"
        wanted = {"use_rmsnorm": True, "activation": "swiglu"}
        if kind == "qwen3":
            wanted["bias"] = False  # its MLP has none
    else:
        kind = "gpt2"
        wanted = {"use_rmsnorm": False, "use_qk_norm": False, "activation": "gelu",
                  "n_kv_head": config.n_head, "head_dim": config.n_embd / config.n_head}
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise ValueError(f"{field} {getattr(config, field)}: {CLASSES[kind]}, the class for use_rotary "
                             f"{config.use_rotary}, has {value}; train another model to export it")
    return kind


def hf_config(config, vocab_size: int, **others):
    """Return the transformers config of an OptimizedConfig with `vocab_size` rows, and with other fields."""
    import transformers  # slow to import

    kind = model_type(config)
    others |= dict(vocab_size=vocab_size, tie_word_embeddings=config.tie_embeddings,
                   architectures=[CLASSES[kind]])
    if kind == "gpt2":
        return transformers.GPT2Config(
            n_positions=config.n_positions, n_embd=config.n_embd, n_layer=config.n_layer,
            n_head=config.n_head, n_inner=config.n_inner, activation_function="gelu_new",
            layer_norm_epsilon=config.layernorm_epsilon, resid_pdrop=config.dropout,
            embd_pdrop=config.dropout, attn_pdrop=config.attn_dropout, **others)
    if kind == "llama":
        others["mlp_bias"] = config.bias
    config_class = transformers.LlamaConfig if kind == "llama" else transformers.Qwen3Config
    return config_class(
        max_position_embeddings=config.n_positions, hidden_size=config.n_embd, hidden_act="silu",
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, head_dim=config.head_dim,
        num_key_value_heads=config.n_kv_head, intermediate_size=config.n_inner,
        rms_norm_eps=config.layernorm_epsilon, rope_theta=config.rope_theta,
        attention_dropout=config.attn_dropout, attention_bias=config.bias, **others)


def from_hf_config(hf, path: Path) -> dict:
    """Return the architecture, as fields of TrainConfig, of a transformers config read from `path`."""
    def require(name, *values):
        value = getattr(hf, name, values[0])
        if value not in values:
            raise ValueError(f"{path}: {name} {value!r}: nanoTE's model has {' or '.join(map(repr, values))}")

    require("quantization_config", None)
    options = dict(
        n_positions=hf.max_position_embeddings, n_embd=hf.hidden_size, n_layer=hf.num_hidden_layers,
        n_head=hf.num_attention_heads, tie_embeddings=bool(hf.tie_word_embeddings))
    if hf.model_type == "gpt2":
        require("activation_function", "gelu_new", "gelu_pytorch_tanh")
        require("scale_attn_weights", True)
        require("scale_attn_by_inverse_layer_idx", False)
        require("add_cross_attention", False)
        return options | dict(
            n_inner=hf.n_inner or 4 * hf.n_embd, layernorm_epsilon=hf.layer_norm_epsilon, activation="gelu",
            bias=getattr(hf, "nanote", {}).get("bias", True))
    require("hidden_act", "silu", "swish")
    require("use_sliding_window", False)
    if hf.model_type == "qwen3":
        require("attention_bias", False)
    elif hf.attention_bias != hf.mlp_bias:
        raise ValueError(f"{path}: attention_bias {hf.attention_bias}, mlp_bias {hf.mlp_bias}: nanoTE's "
                         "model has one field for both")
    rope = hf.rope_parameters or {}
    for name, value in {"rope_type": "default", "partial_rotary_factor": 1}.items():
        if rope.get(name, value) != value:
            raise ValueError(f"{path}: {name} {rope[name]!r} (Llama 3.1 has 'llama3'): nanoTE's model has "
                             f"plain RoPE, {name} {value!r}")
    return options | dict(
        n_kv_head=hf.num_key_value_heads or hf.num_attention_heads, n_inner=hf.intermediate_size,
        use_rotary=True, head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        use_rmsnorm=True, layernorm_epsilon=hf.rms_norm_eps, activation="swiglu",
        rope_theta=float(rope.get("rope_theta", 10000.0)), use_qk_norm=hf.model_type == "qwen3",
        bias=bool(hf.attention_bias))


# ---------------------------------------------------------------- weights

class WeightSpec(NamedTuple):
    """A weight of the optimized model, and where a Hugging Face model stores it."""

    name: str
    parts: list[tuple[str, int]]  # (their name, rows); several: ours is their concatenation along the rows
    columns: int | None = None  # None: a vector
    is_transposed: bool = False  # theirs is stored as (in, out)


def weight_specs(config, vocab_size: int) -> Iterator[WeightSpec]:
    """Yield every weight of a model, in its order."""
    is_gpt2 = model_type(config) == "gpt2"
    embedding = "transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"
    blocks = "transformer.h" if is_gpt2 else "model.layers"
    final_norm = "transformer.ln_f." if is_gpt2 else "model.norm."
    yield WeightSpec("wte.weight", [(embedding, vocab_size)], config.n_embd)
    if is_gpt2:
        yield WeightSpec("wpe.weight", [("transformer.wpe.weight", config.n_positions)], config.n_embd)
    for i in range(config.n_layer):
        for ours, gpt2, llama, columns in block_modules(config):
            parts = gpt2 if is_gpt2 else llama
            theirs = {f"{blocks}.{i}.{name}": rows for name, rows in parts.items()}
            yield from module_specs(f"blocks.{i}.{ours}", theirs, columns, config)
    yield from module_specs("lm_head.layer_norm_", {final_norm: config.n_embd}, None, config)
    if not config.tie_embeddings:
        yield WeightSpec("lm_head.weight", [("lm_head.weight", vocab_size)], config.n_embd)


def block_modules(config) -> list[tuple]:
    """Return the modules of a block: our name, GPT-2's with its rows, those of Llama and Qwen3 with their
    rows, and the columns of a matrix."""
    C = config.n_embd
    inner = config.n_inner
    width = config.n_head * config.head_dim
    kv_width = config.n_kv_head * config.head_dim
    qkv = {"self_attn.q_proj.": width, "self_attn.k_proj.": kv_width, "self_attn.v_proj.": kv_width}
    modules = [
        ("attn.qkv.layer_norm_", {"ln_1.": C}, {"input_layernorm.": C}, None),
        ("attn.qkv.", {"attn.c_attn.": width + 2 * kv_width}, qkv, C),
        ("attn.proj.", {"attn.c_proj.": C}, {"self_attn.o_proj.": C}, width),
        ("mlp.layer_norm_", {"ln_2.": C}, {"post_attention_layernorm.": C}, None),
        ("mlp.fc1_", {"mlp.c_fc.": inner}, {"mlp.gate_proj.": inner, "mlp.up_proj.": inner}, C),
        ("mlp.fc2_", {"mlp.c_proj.": C}, {"mlp.down_proj.": C}, inner)]
    if config.use_qk_norm:  # Qwen3 only
        for norm in ("q_norm.", "k_norm."):
            modules.append((f"attn.{norm}", {}, {f"self_attn.{norm}": config.head_dim}, None))
    return modules


def module_specs(ours: str, theirs: dict[str, int], columns: int | None, config) -> Iterator[WeightSpec]:
    """Yield the weight of a module and its bias, if it has one. theirs: {their name: rows}."""
    is_gpt2 = model_type(config) == "gpt2"
    is_matrix = columns is not None
    weights = [(f"{name}weight", rows) for name, rows in theirs.items()]
    yield WeightSpec(f"{ours}weight", weights, columns, is_transposed=is_gpt2 and is_matrix)
    if is_gpt2 or (config.bias and is_matrix):
        yield WeightSpec(f"{ours}bias", [(f"{name}bias", rows) for name, rows in theirs.items()])


def to_hf(weights: dict[str, torch.Tensor], config, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return the optimized model's weights under Hugging Face's names, with `vocab_size` rows."""
    theirs = {}
    for spec in weight_specs(config, vocab_size):
        sizes = [rows for _, rows in spec.parts]
        shape = (sum(sizes),) if spec.columns is None else (sum(sizes), spec.columns)
        weight = weights.get(spec.name)
        if weight is None and spec.name.endswith("bias"):
            weight = torch.zeros(shape, dtype=weights["wte.weight"].dtype)
        if weight is not None:
            weight = weight[:sum(sizes)]  # without padding of the vocabulary
        if weight is None or weight.shape != shape:
            hf_class = CLASSES[model_type(config)]
            raise ValueError(f"the run has no {spec.name} of shape {shape}, as {hf_class} has")
        for (name, _), part in zip(spec.parts, weight.split(sizes)):
            if spec.is_transposed:
                part = part.T
            theirs[name] = part.clone(memory_format=torch.contiguous_format)  # safetensors accepts no views
    return theirs


def from_hf(tensors: dict[str, torch.Tensor], config, vocab_size: int, folder) -> dict[str, torch.Tensor]:
    """Return the tensors of a Hugging Face folder under the optimized model's names."""
    constants = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # of old versions of transformers
    rest = {name: tensor for name, tensor in with_model_prefix(tensors, config).items()
            if not name.endswith(constants)}
    weights = {}
    for spec in weight_specs(config, vocab_size):
        parts = [take_part(rest, name, rows, spec, folder) for name, rows in spec.parts]
        weight = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        if config.bias or not spec.name.endswith(("qkv.bias", "proj.bias", "fc1_bias", "fc2_bias")):
            weights[spec.name] = weight
        elif weight.any():
            name, _ = spec.parts[-1]
            raise ValueError(f"{folder}: tensor {name} is not zero, but the entry nanote in config.json says "
                             "bias false; remove that entry")
    if config.tie_embeddings:
        head = rest.pop("lm_head.weight", weights["wte.weight"])
        if not torch.equal(head.float(), weights["wte.weight"].float()):
            raise ValueError(f"{folder}: lm_head.weight differs from the embedding, but config.json says "
                             "tie_word_embeddings true; set that to false or remove the tensor")
    if rest:
        raise ValueError(f"{folder}: tensor {min(rest)}: nanoTE's model has no place for it")
    return weights


def with_model_prefix(tensors: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """Return tensors under the names of a model with lm_head. Without one, as in gpt2, they lack a prefix."""
    if not any(name.startswith(("wte.", "embed_tokens.")) for name in tensors):
        return tensors
    prefix = "transformer." if model_type(config) == "gpt2" else "model."
    return {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in tensors.items()}


def take_part(tensors: dict[str, torch.Tensor], name: str, rows: int, spec: WeightSpec, folder):
    """Remove a tensor that is a part of a weight of ours, and return it in our layout."""
    if spec.columns is None:
        shape = (rows,)
    else:
        shape = (spec.columns, rows) if spec.is_transposed else (rows, spec.columns)
    if name not in tensors:
        raise ValueError(f"{folder}: tensor {name} is missing; config.json asks for {shape}")
    part = tensors.pop(name)
    if part.shape != shape:
        raise ValueError(f"{folder}: tensor {name} has shape {tuple(part.shape)}; config.json asks for "
                         f"{shape}")
    if part.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{folder}: tensor {name} is {part.dtype}; save the model in bfloat16")
    return part.T if spec.is_transposed else part
