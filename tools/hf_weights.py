"""Names of weights and config fields in nanoTE and in Hugging Face models, for tools/export_hf.py and
import_hf.py.

- The architecture selects the class: learned positions are GPT2LMHeadModel, RoPE is LlamaForCausalLM, RoPE
  with QK-norm is Qwen3ForCausalLM. A model that none of them can express is refused, naming the field that
  differs.
- Nothing is computed, so nothing is rounded. Weights are renamed; GPT-2 weights are transposed (Conv1D stores
  (in, out)); fused weights are split into q, k, v and gate, up, which Llama stores separately.
- GPT2LMHeadModel always has biases. A model without biases gets zeros, and the entry "nanote" in config.json
  records that for the import.
"""
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from nanote import checkpoint, models, safetensors_files

EMBEDDINGS = ("wte.weight", "lm_head.weight")  # padded in nanoTE: the last rows may not be exported
# model_type: class
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Parameter names of two model files that differ from the optimized model: (its name, theirs).
NAMES = {
    "te": [
        ("attn.qkv.", "self_attention.layernorm_qkv."), ("attn.proj.", "self_attention.proj."),
        ("mlp.", "layernorm_mlp."),
    ],
    "custom": [
        ("attn.qkv.layer_norm_", "attn.norm."), ("mlp.layer_norm_", "mlp.norm."), ("mlp.fc1_", "mlp.fc1."),
        ("mlp.fc2_", "mlp.fc2."), ("lm_head.layer_norm_", "norm."),
    ],
}


def read_weights(folder, meta: dict, masters: bool = False) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint, under the names of the optimized model.

    With `masters`, returns float32 master weights where there are any. `meta`: result of
    checkpoint.read_meta(folder).
    """
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
               for name, entry in safetensors_files.stored_tensors(folder).items()
               if name.startswith("model.") or masters and name.endswith(".master_param")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    checkpoint.drop_stale_masters(tensors, meta)
    weights = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            name = name.removeprefix("model.")
            tensor = tensors.get(f"optimizer.{name}.master_param", tensor)
            for ours, theirs in NAMES.get(meta["model"], []):
                name = name.replace(theirs, ours)
            weights[name] = tensor
    return weights


# ---------------------------------------------------------------- configurations

def model_type(config) -> str:
    """Return gpt2, llama or qwen3 for an OptimizedConfig. Raises ValueError naming the field that no class
    supports."""
    if config.use_rotary:
        kind = "qwen3" if config.use_qk_norm else "llama"
        wants = {"use_rmsnorm": True, "activation": "swiglu"}
        if config.use_qk_norm:
            wants |= {"bias": False}  # the MLP of Qwen3 has none
    else:
        kind = "gpt2"
        wants = {"use_rmsnorm": False, "use_qk_norm": False, "activation": "gelu", "n_kv_head": config.n_head,
                 "head_dim": config.n_embd // config.n_head if config.n_embd % config.n_head == 0 else None}
    for field, value in wants.items():
        if getattr(config, field) != value:
            rotary = "with" if config.use_rotary else "without"
            given = f"{field}={getattr(config, field)} {rotary} use_rotary"
            if kind == "qwen3":
                given += " and use_qk_norm"
            message = f"{given}: no Hugging Face class has that; {CLASSES[kind]} has {field}={value}"
            if not config.use_rotary:
                message += ", and Llama's and Qwen3's use_rotary"
            raise ValueError(message)
    return kind


def hf_config(config, vocab_size: int, **others):
    """Return the transformers config of an OptimizedConfig with `vocab_size` rows.

    `others`: fields that are not part of the architecture.
    """
    import transformers  # slow to import

    kind = model_type(config)
    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocab_size, n_positions=config.n_positions, n_embd=config.n_embd,
            n_layer=config.n_layer, n_head=config.n_head, n_inner=config.n_inner,
            activation_function="gelu_new", layer_norm_epsilon=config.layernorm_epsilon,
            resid_pdrop=config.dropout, embd_pdrop=config.dropout, attn_pdrop=config.attn_dropout,
            tie_word_embeddings=config.tie_embeddings, architectures=[CLASSES[kind]], **others,
        )
    biases = {"attention_bias": config.bias} | ({"mlp_bias": config.bias} if kind == "llama" else {})
    return {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](
        vocab_size=vocab_size, max_position_embeddings=config.n_positions, hidden_size=config.n_embd,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head, head_dim=config.head_dim, intermediate_size=config.n_inner,
        hidden_act="silu", rms_norm_eps=config.layernorm_epsilon, rope_theta=config.rope_theta,
        attention_dropout=config.attn_dropout, tie_word_embeddings=config.tie_embeddings,
        architectures=[CLASSES[kind]], **biases, **others,
    )


def from_hf_config(hf) -> dict:
    """Return the architecture (fields of OptimizedConfig and TrainConfig) of a transformers config of one of
    CLASSES.

    Dropout is not included, since it is not a property of the weights. Raises ValueError for what nanoTE does
    not support.
    """

    def must_be(name, *values, without=None):
        value = getattr(hf, name, without)
        if value not in values:
            raise ValueError(f"{name} {value!r}: nanoTE's model has {' or '.join(map(repr, values))} only")

    must_be("quantization_config", None)
    options = dict(
        vocab_size=hf.vocab_size, n_positions=hf.max_position_embeddings, n_embd=hf.hidden_size,
        n_layer=hf.num_hidden_layers, n_head=hf.num_attention_heads,
        tie_embeddings=bool(hf.tie_word_embeddings),
    )
    if hf.model_type == "gpt2":
        must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
        must_be("scale_attn_weights", True, without=True)
        must_be("scale_attn_by_inverse_layer_idx", False, without=False)
        must_be("add_cross_attention", False, without=False)
        return options | dict(
            n_inner=hf.n_inner or 4 * hf.n_embd, layernorm_epsilon=hf.layer_norm_epsilon, activation="gelu",
            bias=getattr(hf, "nanote", {}).get("bias", True),
        )
    must_be("hidden_act", "silu", "swish")
    must_be("use_sliding_window", False, without=False)
    rope = hf.rope_parameters or {}
    if not rope.get("rope_theta", 1.0) > 0:
        raise ValueError(f"rope_theta {rope['rope_theta']}: must be above 0, such as 10000.0")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"partial_rotary_factor {rope['partial_rotary_factor']}: nanoTE's model rotates all "
                         "dimensions of a head, partial_rotary_factor 1.0")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"rope_type {rope.get('rope_type')!r} (Llama 3.1 has 'llama3'): nanoTE's model has plain RoPE, "
            "rope_type 'default'"
        )
    if hf.model_type == "llama":
        must_be("mlp_bias", hf.attention_bias)  # nanoTE has one field for both
    else:
        must_be("attention_bias", False)
    return options | dict(
        n_kv_head=hf.num_key_value_heads or hf.num_attention_heads, n_inner=hf.intermediate_size,
        use_rotary=True, head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        use_rmsnorm=True, layernorm_epsilon=hf.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10000.0)), activation="swiglu",
        use_qk_norm=hf.model_type == "qwen3", bias=bool(hf.attention_bias),
    )


# ---------------------------------------------------------------- weights

class Weight(NamedTuple):
    """A weight of the optimized model, and where a Hugging Face model stores it."""

    name: str
    parts: list[tuple[str, int]]  # (their name, rows); several: ours is their concatenation along the rows
    columns: int | None = None  # None: a vector
    is_transposed: bool = False  # theirs is stored as (in, out)


def table(config, vocab_size: int) -> Iterator[Weight]:
    """Yield every weight of a model, in its order."""
    is_gpt2 = model_type(config) == "gpt2"
    embedding = "transformer.wte.weight" if is_gpt2 else "model.embed_tokens.weight"
    yield Weight("wte.weight", [(embedding, vocab_size)], config.n_embd)
    yield from _gpt2_table(config) if is_gpt2 else _llama_table(config)
    if not config.tie_embeddings:
        yield Weight("lm_head.weight", [("lm_head.weight", vocab_size)], config.n_embd)


def _gpt2_table(config):
    C, inner = config.n_embd, config.n_inner
    yield Weight("wpe.weight", [("transformer.wpe.weight", config.n_positions)], C)
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}.", f"transformer.h.{i}."
        yield from _gpt2_norm(f"{ours}attn.qkv.layer_norm_", f"{theirs}ln_1.", C)
        yield from _gpt2_linear(f"{ours}attn.qkv.", f"{theirs}attn.c_attn.", 3 * C, C)
        yield from _gpt2_linear(f"{ours}attn.proj.", f"{theirs}attn.c_proj.", C, C)
        yield from _gpt2_norm(f"{ours}mlp.layer_norm_", f"{theirs}ln_2.", C)
        yield from _gpt2_linear(f"{ours}mlp.fc1_", f"{theirs}mlp.c_fc.", inner, C)
        yield from _gpt2_linear(f"{ours}mlp.fc2_", f"{theirs}mlp.c_proj.", C, inner)
    yield from _gpt2_norm("lm_head.layer_norm_", "transformer.ln_f.", C)


def _gpt2_norm(ours, theirs, size):
    for part in ("weight", "bias"):
        yield Weight(ours + part, [(theirs + part, size)])


def _gpt2_linear(ours, theirs, rows, columns):
    yield Weight(f"{ours}weight", [(f"{theirs}weight", rows)], columns, is_transposed=True)
    yield Weight(f"{ours}bias", [(f"{theirs}bias", rows)])


def _llama_table(config):
    C, inner = config.n_embd, config.n_inner
    width, kv_width = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    linears = {  # ours -> their names and rows, columns
        "attn.qkv.": ([("self_attn.q_proj.", width), ("self_attn.k_proj.", kv_width),
                       ("self_attn.v_proj.", kv_width)], C),
        "attn.proj.": ([("self_attn.o_proj.", C)], width),
        "mlp.fc1_": ([("mlp.gate_proj.", inner), ("mlp.up_proj.", inner)], C),
        "mlp.fc2_": ([("mlp.down_proj.", C)], inner),
    }
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        yield Weight(f"{ours}attn.qkv.layer_norm_weight", [(f"{theirs}input_layernorm.weight", C)])
        yield Weight(f"{ours}mlp.layer_norm_weight", [(f"{theirs}post_attention_layernorm.weight", C)])
        for name, (parts, columns) in linears.items():
            weights = [(f"{theirs}{part}weight", rows) for part, rows in parts]
            yield Weight(f"{ours}{name}weight", weights, columns)
            if config.bias:
                yield Weight(f"{ours}{name}bias", [(f"{theirs}{part}bias", rows) for part, rows in parts])
        for x in "qk" if config.use_qk_norm else "":
            norm = f"{theirs}self_attn.{x}_norm.weight", config.head_dim
            yield Weight(f"{ours}attn.{x}_norm.weight", [norm])
    yield Weight("lm_head.layer_norm_weight", [("model.norm.weight", C)])


def to_hf(weights: dict[str, torch.Tensor], config, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return the optimized model's weights under Hugging Face's names, with `vocab_size` rows of the
    embedding.

    Raises ValueError for a weight that is missing or does not have the shape that config implies.
    """
    theirs = {}
    for ours, parts, columns, is_transposed in table(config, vocab_size):
        sizes = [rows for _, rows in parts]
        weight = weights.get(ours)
        # GPT2LMHeadModel has biases, this model has none
        if weight is None and not config.bias and ours.endswith("bias"):
            weight = torch.zeros(sizes, dtype=weights["wte.weight"].dtype)
        if weight is not None and ours in EMBEDDINGS:
            weight = weight[:vocab_size]
        expected = _shape(sum(sizes), columns)
        if weight is None or weight.shape != expected:
            found = "missing" if weight is None else f"of shape {tuple(weight.shape)}"
            raise ValueError(f"{ours} is {found}; the checkpoint's model_config asks for {tuple(expected)}")
        for (name, _), part in zip(parts, weight.split(sizes)):
            # safetensors does not accept views
            theirs[name] = (part.T if is_transposed else part).clone(memory_format=torch.contiguous_format)
    return theirs


def _shape(rows: int, columns: int | None) -> torch.Size:
    return torch.Size((rows,) if columns is None else (rows, columns))


def from_hf(tensors: dict[str, torch.Tensor], config, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return Hugging Face's tensors under the optimized model's names.

    Raises ValueError for a tensor that is missing, unknown or of another shape.
    """
    # saved without the class of the output head, as the gpt2 repository is
    if "wte.weight" in tensors or "embed_tokens.weight" in tensors:
        prefix = "transformer." if "wte.weight" in tensors else "model."
        tensors = {name if name == "lm_head.weight" else prefix + name: tensor
                   for name, tensor in tensors.items()}
    # constants that old versions of transformers saved
    buffers = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}
    weights, linear_biases = {}, ("qkv.bias", "proj.bias", "fc1_bias", "fc2_bias")
    for ours, parts, columns, is_transposed in table(config, vocab_size):
        found = []
        for name, rows in parts:
            if name not in rest:
                raise ValueError(f"tensor {name} is missing; config.json asks for it")
            part, shape = rest.pop(name), _shape(rows, columns)
            _check_tensor(name, part, shape[::-1] if is_transposed else shape)
            found.append(part.T if is_transposed else part)
        weight = torch.cat(found) if len(found) > 1 else found[0].contiguous()
        if not config.bias and ours.endswith(linear_biases):
            if weight.any():
                raise ValueError(f"tensor {parts[0][0]} is not zero, but the entry nanote in config.json "
                                 "says bias false; remove that entry")
            continue
        weights[ours] = weight
    if config.tie_embeddings and "lm_head.weight" in rest:
        head, embedding = rest.pop("lm_head.weight"), weights["wte.weight"]
        if head.shape != embedding.shape or not torch.equal(head.float(), embedding.float()):
            raise ValueError("tensor lm_head.weight differs from the embedding, but config.json says "
                             "tie_word_embeddings true; set that to false or remove the tensor")
    if rest:
        raise ValueError(f"tensor {min(rest)}: nanoTE's model has no place for it")
    return weights


def _check_tensor(name: str, tensor: torch.Tensor, expected: torch.Size) -> None:
    if tensor.shape != expected:
        raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}; config.json asks for "
                         f"{tuple(expected)}")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"tensor {name} is {tensor.dtype}; float32, bfloat16 and float16 are read")
    if not tensor.isfinite().all():
        raise ValueError(f"tensor {name} holds values that are NaN or infinite; take another copy of the "
                         "model")


def optimized_config(meta: dict):
    """Return the OptimizedConfig equivalent to the model of a checkpoint, for any of the five model files."""
    return models.make_model_config("optimized", meta["model_config"] | {"use_fp8": False})
