"""Names of weights and config fields in nanoTE and in Hugging Face models, for export_hf.py and import_hf.py.

- The architecture selects the class: learned positions are GPT2LMHeadModel, RoPE is LlamaForCausalLM, with
  biases of q, k and v Qwen2ForCausalLM, with QK-norm Qwen3ForCausalLM. A model that none of them can express
  is refused, naming the field.
- Nothing is computed, so nothing is rounded. Weights are renamed; GPT-2 weights are transposed (Conv1D stores
  (in, out)); fused weights are split into q, k, v and gate, up, which Llama stores separately.
- GPT2LMHeadModel always has biases: a model without them gets zeros, which "nanote" in config.json records.
"""
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from model_te_optimized import read_scaling

# {model_type of a config.json that is read: its class}. A Mistral is written as a Llama, the same network.
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
           "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# fields of transformers' rope_parameters, in the order of our rope_scaling
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# ---------------------------------------------------------------- configurations


def model_type(config) -> str:
    """Return gpt2, llama, qwen2 or qwen3 for an OptimizedConfig. ValueError for a value that no class has."""
    if not config.use_rotary:
        kind = "gpt2"
        wanted = {"use_rmsnorm": False, "use_qk_norm": False, "activation": "gelu",
                  "n_kv_head": config.n_head, "head_dim": config.n_embd / config.n_head}
        if not config.bias:  # with bias, qkv_bias has no effect
            wanted["qkv_bias"] = False
    else:
        kind = "llama"
        wanted = {"use_rmsnorm": True, "activation": "swiglu"}
        if config.use_qk_norm:
            kind = "qwen3"
            wanted |= {"bias": False, "qkv_bias": False}
        elif config.qkv_bias and not config.bias:
            kind = "qwen2"
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
    config_class = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config,
                    "qwen3": transformers.Qwen3Config}[kind]
    if kind != "qwen2":  # Qwen2Config has no attention_bias: q, k and v always have biases
        others["attention_bias"] = config.bias
    if kind == "llama":
        others["mlp_bias"] = config.bias
    return config_class(
        max_position_embeddings=config.n_positions, hidden_size=config.n_embd, hidden_act="silu",
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, head_dim=config.head_dim,
        num_key_value_heads=config.n_kv_head, intermediate_size=config.n_inner,
        rms_norm_eps=config.layernorm_epsilon, attention_dropout=config.attn_dropout,
        rope_parameters=rope_parameters(config), **others)


def rope_parameters(config) -> dict:
    """Return transformers' field rope_parameters of an OptimizedConfig."""
    if config.rope_scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    numbers = dict(zip(LLAMA3_ROPE, read_scaling(config.rope_scaling)))
    numbers["original_max_position_embeddings"] = int(numbers["original_max_position_embeddings"])
    return {"rope_type": "llama3", "rope_theta": config.rope_theta} | numbers


def from_hf_config(hf, path: Path) -> dict:
    """Return the architecture, as fields of TrainConfig, of a transformers config read from `path`."""
    options = dict(
        n_positions=hf.max_position_embeddings, n_embd=hf.hidden_size, n_layer=hf.num_hidden_layers,
        n_head=hf.num_attention_heads, tie_embeddings=bool(hf.tie_word_embeddings))
    if hf.model_type == "gpt2":
        require(hf, path, "activation_function", "gelu_new", "gelu_pytorch_tanh")
        require(hf, path, "scale_attn_weights", True)
        require(hf, path, "scale_attn_by_inverse_layer_idx", False)
        require(hf, path, "add_cross_attention", False)
        return options | dict(
            n_inner=hf.n_inner or 4 * hf.n_embd, layernorm_epsilon=hf.layer_norm_epsilon, activation="gelu",
            bias=getattr(hf, "nanote", {}).get("bias", True))
    require(hf, path, "hidden_act", "silu", "swish")
    check_biases(hf, path)
    check_window(hf, path)
    return options | rope_options(hf, path) | dict(
        n_kv_head=hf.num_key_value_heads or hf.num_attention_heads, n_inner=hf.intermediate_size,
        use_rotary=True, head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        use_rmsnorm=True, layernorm_epsilon=hf.rms_norm_eps, activation="swiglu",
        use_qk_norm=hf.model_type == "qwen3", bias=bool(getattr(hf, "attention_bias", False)),
        qkv_bias=hf.model_type == "qwen2")


def require(hf, path: Path, name: str, *values) -> None:
    """Raise ValueError unless a field of a transformers config has one of these values. A missing field
    counts as the first."""
    value = getattr(hf, name, values[0])
    if value not in values:
        raise ValueError(f"{path}: {name} {value!r}: nanoTE's model has {' or '.join(map(repr, values))}")


def check_biases(hf, path: Path) -> None:
    """Raise ValueError for biases in some linear layers only; Qwen2's q, k and v are exempt."""
    if hf.model_type == "llama" and hf.attention_bias != hf.mlp_bias:
        raise ValueError(f"{path}: attention_bias {hf.attention_bias}, mlp_bias {hf.mlp_bias}: nanoTE's "
                         "model has one field for both")
    if hf.model_type != "llama":
        require(hf, path, "attention_bias", False)
        require(hf, path, "mlp_bias", False)


def check_window(hf, path: Path) -> None:
    """Raise ValueError if attention has a window that is shorter than the longest sequence."""
    window = getattr(hf, "sliding_window", None)  # None in a Qwen without use_sliding_window
    for kind in getattr(hf, "layer_types", None) or ():
        has_window = kind == "sliding_attention" and window is not None  # checked below
        if kind != "full_attention" and not has_window:
            raise ValueError(f"{path}: layer_types {kind!r}: nanoTE's model has 'full_attention'")
    if window is not None and window < hf.max_position_embeddings:
        raise ValueError(f"{path}: sliding_window {window}: shorter than max_position_embeddings "
                         f"{hf.max_position_embeddings}; set max_position_embeddings to {window} to "
                         "import it, for sequences of that length")


def rope_options(hf, path: Path) -> dict:
    """Return rope_theta and rope_scaling of a transformers config. ValueError for RoPE of another type."""
    rope = hf.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(f"{path}: rope_type {kind!r}: nanoTE's model has 'default' or 'llama3'")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{path}: partial_rotary_factor {rope['partial_rotary_factor']}: nanoTE's model "
                         "rotates whole heads, 1")
    scaling = None
    if kind == "llama3":  # as a user writes it: 8, not 8.0
        scaling = ":".join(str(rope[name]).removesuffix(".0") for name in LLAMA3_ROPE)
    return dict(rope_theta=float(rope.get("rope_theta", 10000.0)), rope_scaling=scaling)


# ---------------------------------------------------------------- weights

class WeightSpec(NamedTuple):
    """A weight of the optimized model, and where a Hugging Face model stores it."""

    name: str
    parts: list[tuple[str, int]]  # (their name, rows); several: ours is their concatenation along the rows
    columns: int | None = None  # None: a vector
    is_transposed: bool = False  # theirs is stored as (in, out)
    is_bias: bool = False  # of a linear layer

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the optimized model's weight."""
        rows = sum(rows for _, rows in self.parts)
        return (rows,) if self.columns is None else (rows, self.columns)

    def part_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of a part in a Hugging Face model."""
        if self.columns is None:
            return (rows,)
        return (self.columns, rows) if self.is_transposed else (rows, self.columns)


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
    """Return (ours, gpt2, llama, columns) of each module of a block.

    ours: name prefix, to which weight or bias is appended.
    gpt2, llama: {prefix of theirs: rows}, for GPT-2 and for Llama and Qwen.
    columns: None for a norm.
    """
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
    has_bias = config.bias or (config.qkv_bias and ours.endswith(".qkv."))
    if is_gpt2 or (has_bias and is_matrix):  # a norm has a bias in GPT-2 only
        biases = [(f"{name}bias", rows) for name, rows in theirs.items()]
        yield WeightSpec(f"{ours}bias", biases, is_bias=is_matrix)


def to_hf(weights, config, vocab_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a Hugging Face model with `vocab_size` rows, from the optimized model's
    weights: RunWeights, which are read one at a time."""
    specs = list(weight_specs(config, vocab_size))
    for spec in specs:
        check_run_weight(weights, spec, config)
    for spec in specs:
        yield from parts_of_weight(weights, spec)


def check_run_weight(weights, spec: WeightSpec, config) -> None:
    """Raise ValueError unless a run has a weight of this shape, or more rows of an embedding."""
    shape = spec.shape
    found = weights.shapes.get(spec.name)
    if found is None and spec.name.endswith("bias"):
        return  # zeros
    has_enough_rows = found is not None and found[0] >= shape[0]  # more are padding of the vocabulary
    if not has_enough_rows or found[1:] != shape[1:]:
        raise ValueError(f"the run has no {spec.name} of shape {shape}, as {CLASSES[model_type(config)]} has")


def parts_of_weight(weights, spec: WeightSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors (name, tensor) that a Hugging Face model has in place of a weight of ours."""
    sizes = [rows for _, rows in spec.parts]
    if spec.name in weights:
        weight = weights[spec.name][:sum(sizes)]  # without padding of the vocabulary
    else:
        weight = torch.zeros(spec.shape, dtype=weights.dtype_of("wte.weight"))
    for (name, _), part in zip(spec.parts, weight.split(sizes)):
        if spec.is_transposed:
            part = part.T
        yield name, part.clone(memory_format=torch.contiguous_format)  # safetensors accepts no views


def from_hf(tensors, config, vocab_size: int, folder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of the optimized model from the tensors of a Hugging Face folder: FolderTensors,
    which are read one at a time. All names, shapes and types are checked first."""
    specs = list(weight_specs(config, vocab_size))
    stored_names = names_with_prefix(tensors, config)
    check_headers(tensors.headers, stored_names, specs, config, folder)
    for spec in specs:
        weight = read_weight(tensors, stored_names, spec)
        if not is_dropped(spec, config):
            yield spec.name, weight
        elif weight.any():
            name, _ = spec.parts[-1]
            raise ValueError(f"{folder}: tensor {name} is not zero, but the entry nanote in config.json says "
                             "bias false; remove that entry")
    if config.tie_embeddings and "lm_head.weight" in stored_names:
        check_tied_head(tensors, stored_names, specs[0], folder)


def is_dropped(spec: WeightSpec, config) -> bool:
    """Return whether a GPT-2 without biases lacks this one of a folder, which must be zeros."""
    return spec.is_bias and not (config.bias or config.qkv_bias)


def names_with_prefix(tensors, config) -> dict[str, str]:
    """Return {name in a model with lm_head: name in the folder}. A folder saved from a bare GPT2Model or
    LlamaModel, as the hub's gpt2, lacks the prefix. Constants that old versions of transformers stored are
    left out."""
    constants = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    has_prefix = not any(name.startswith(("wte.", "embed_tokens.")) for name in tensors)
    prefix = "transformer." if model_type(config) == "gpt2" else "model."
    names = {}
    for name in tensors:
        if name.endswith(constants):
            continue
        is_complete = has_prefix or name == "lm_head.weight"
        full_name = name if is_complete else prefix + name
        names[full_name] = name
    return names


def check_headers(headers: dict, stored_names: dict, specs: list[WeightSpec], config, folder) -> None:
    """Raise ValueError unless a folder has the tensors of a model, in their shapes, and no others."""
    rest = set(stored_names)
    for spec in specs:
        for name, rows in spec.parts:
            rest.discard(name)
            check_header(headers.get(stored_names.get(name)), name, spec.part_shape(rows), folder)
    if config.tie_embeddings:
        rest.discard("lm_head.weight")
    if rest:
        raise ValueError(f"{folder}: tensor {min(rest)}: nanoTE's model has no place for it")


def check_header(header, name: str, shape: tuple[int, ...], folder) -> None:
    """Raise ValueError unless a tensor is there, in this shape and in a type that can be read."""
    if header is None:
        raise ValueError(f"{folder}: tensor {name} is missing; config.json asks for {shape}")
    if header.shape != shape:
        raise ValueError(f"{folder}: tensor {name} has shape {header.shape}; config.json asks for {shape}")
    if header.dtype not in ("F32", "BF16", "F16"):
        raise ValueError(f"{folder}: tensor {name} is {header.dtype}; save the model in bfloat16")


def read_weight(tensors, stored_names: dict, spec: WeightSpec) -> torch.Tensor:
    """Return a weight of the optimized model, from its parts in a folder."""
    parts = []
    for name, _ in spec.parts:
        part = tensors[stored_names[name]]
        parts.append(part.T if spec.is_transposed else part)
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def check_tied_head(tensors, stored_names: dict, embedding: WeightSpec, folder) -> None:
    """Raise ValueError unless lm_head.weight, which a tied model need not store, is the embedding."""
    head = tensors[stored_names["lm_head.weight"]]
    weight = read_weight(tensors, stored_names, embedding)
    parts = zip(head.split(1024), weight.split(1024))  # rows whose float32 copies take little memory
    is_equal = head.shape == weight.shape and all(torch.equal(a.float(), b.float()) for a, b in parts)
    if not is_equal:
        raise ValueError(f"{folder}: lm_head.weight differs from the embedding, but config.json says "
                         "tie_word_embeddings true; set that to false or remove the tensor")
