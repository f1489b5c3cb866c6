"""What a nanoTE model and a Hugging Face model call the same weights and switches; tools/export_hf.py and
tools/import_hf.py read the one table.

Notable, and why:
- The architecture picks the class: learned positions are GPT2LMHeadModel, RoPE is LlamaForCausalLM, RoPE with
  QK-norm is Qwen3ForCausalLM. What none of them has is refused with the switch that makes the difference.
- Nothing is computed, so nothing is rounded: weights are renamed, GPT-2's are transposed (its Conv1D keeps
  (in, out)), and ours is cut into q, k, v, and gate, up, which Llama keeps apart.
- GPT2LMHeadModel always has biases: a model without gets zeros, and the entry "nanote" in config.json says so
  for the way back.
"""
import warnings
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from nanote import checkpoint, models, safetensors_files

EMBEDDINGS = ("wte.weight", "lm_head.weight")  # padded here, so that the last rows may not be theirs
# model_type: class
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What two model files name otherwise than the optimized model: (its name, theirs).
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
    """Read a checkpoint's weights under the optimized model's names; with `masters`, the float32 master
    weights where it has them. `meta` is what checkpoint.read_meta(folder) returned."""
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
    """gpt2, llama or qwen3, for an OptimizedConfig; ValueError naming the switch that no class has."""
    if config.use_rotary:
        kind, wants = (
            ("qwen3" if config.use_qk_norm else "llama"),
            {"use_rmsnorm": True, "activation": "swiglu"},
        )
        if config.use_qk_norm:
            wants |= {"bias": False}  # Qwen3's MLP has none
    else:
        kind = "gpt2"
        wants = {"use_rmsnorm": False, "use_qk_norm": False, "activation": "gelu", "n_kv_head": config.n_head,
                 "head_dim": config.n_embd // config.n_head if config.n_embd % config.n_head == 0 else None}
    for switch, value in wants.items():
        if getattr(config, switch) != value:
            rotary, qk_norm = (
                ("with" if config.use_rotary else "without"),
                (" and use_qk_norm" if kind == "qwen3" else ""),
            )
            raise ValueError(
                f"{switch}={getattr(config, switch)} {rotary} use_rotary{qk_norm}: no Hugging Face class has that; "
                f"{CLASSES[kind]} has {switch}={value}"
                + ("" if config.use_rotary else ", and Llama's and Qwen3's use_rotary")
            )
    return kind


def hf_config(config, vocab_size: int, **others):
    """The transformers configuration of an OptimizedConfig with `vocab_size` rows; `others` are fields that
    are no part of the architecture."""
    import transformers

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
    """The architecture's options (those of OptimizedConfig and TrainConfig) of a transformers configuration
    of one of CLASSES.

    ValueError for what nanoTE's model cannot compute. Dropout is left to the run: it is no part of the
    weights.
    """

    def must_be(name, *values, without=None):
        if getattr(hf, name, without) not in values:
            raise ValueError(
                f"{name} {getattr(hf, name, without)!r}: nanoTE's model has {' or '.join(map(repr, values))} only"
            )

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
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"rope_type {rope.get('rope_type')!r} (Llama 3.1 has 'llama3'): nanoTE's model has plain RoPE, rope_type 'default'"
        )
    if hf.model_type == "llama":
        must_be("mlp_bias", hf.attention_bias)  # one switch here
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

def table(config, vocab_size: int) -> Iterator[tuple[str, list[tuple[str, int]], int | None, bool]]:
    """Yield (our name, [(their name, rows of ours)], columns of a matrix, whether theirs is transposed) of
    every weight, in the model's order."""
    kind = model_type(config)
    width, kv_width, C, inner = (
        config.n_head * config.head_dim, config.n_kv_head * config.head_dim, config.n_embd, config.n_inner,
    )

    def add(ours, *theirs, columns=None, transposed=False):
        is_matrix = not ours.endswith(("bias", "norm_weight", "norm.weight"))
        return ours, list(theirs), columns if is_matrix else None, transposed and is_matrix

    if kind == "gpt2":
        yield add("wte.weight", ("transformer.wte.weight", vocab_size), columns=C)
        yield add("wpe.weight", ("transformer.wpe.weight", config.n_positions), columns=C)
        for i in range(config.n_layer):
            ours, theirs = f"blocks.{i}.", f"transformer.h.{i}."
            for norm, their_norm, layer, name, size, columns in (
                    ("attn.qkv.layer_norm_", "ln_1", "attn.qkv.", "attn.c_attn", 3 * C, C),
                    (None, None, "attn.proj.", "attn.c_proj", C, C),
                    ("mlp.layer_norm_", "ln_2", "mlp.fc1_", "mlp.c_fc", inner, C),
                    (None, None, "mlp.fc2_", "mlp.c_proj", C, inner)):
                for part in ("weight", "bias"):
                    if norm:
                        yield add(ours + norm + part, (f"{theirs}{their_norm}.{part}", C))
                    source = f"{theirs}{name}.{part}", size
                    yield add(f"{ours}{layer}{part}", source, columns=columns, transposed=True)
        yield add("lm_head.layer_norm_weight", ("transformer.ln_f.weight", C))
        yield add("lm_head.layer_norm_bias", ("transformer.ln_f.bias", C))
    else:
        yield add("wte.weight", ("model.embed_tokens.weight", vocab_size), columns=C)
        for i in range(config.n_layer):
            ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
            yield add(ours + "attn.qkv.layer_norm_weight", (theirs + "input_layernorm.weight", C))
            yield add(ours + "mlp.layer_norm_weight", (theirs + "post_attention_layernorm.weight", C))
            for part in ("weight", "bias") if config.bias else ("weight",):
                qkv = [(f"{theirs}self_attn.{x}_proj.{part}", size)
                       for x, size in (("q", width), ("k", kv_width), ("v", kv_width))]
                gate_up = [(f"{theirs}mlp.{x}_proj.{part}", inner) for x in ("gate", "up")]
                yield add(f"{ours}attn.qkv.{part}", *qkv, columns=C)
                yield add(f"{ours}attn.proj.{part}", (f"{theirs}self_attn.o_proj.{part}", C), columns=width)
                yield add(f"{ours}mlp.fc1_{part}", *gate_up, columns=C)
                yield add(f"{ours}mlp.fc2_{part}", (f"{theirs}mlp.down_proj.{part}", C), columns=inner)
            for x in "qk" if config.use_qk_norm else "":
                norm = f"{theirs}self_attn.{x}_norm.weight", config.head_dim
                yield add(f"{ours}attn.{x}_norm.weight", norm)
        yield add("lm_head.layer_norm_weight", ("model.norm.weight", C))
    if not config.tie_embeddings:
        yield add("lm_head.weight", ("lm_head.weight", vocab_size), columns=C)


def to_hf(weights: dict[str, torch.Tensor], config, vocab_size: int) -> dict[str, torch.Tensor]:
    """Rename the optimized model's weights to Hugging Face's, the embedding cut to `vocab_size` rows.
    ValueError for a weight that is missing or of another shape than config's."""
    theirs = {}
    for ours, names, columns, transposed in table(config, vocab_size):
        sizes = [size for _, size in names]
        weight = weights.get(ours)
        # the class has biases, this model none
        if weight is None and not config.bias and ours.endswith("bias"):
            weight = torch.zeros(sizes, dtype=weights["wte.weight"].dtype)
        if weight is not None and ours in EMBEDDINGS:
            weight = weight[:vocab_size]
        expected = _shape(sum(sizes), columns)
        if weight is None or weight.shape != expected:
            found = "missing" if weight is None else f"of shape {tuple(weight.shape)}"
            raise ValueError(f"{ours} is {found}; the checkpoint's model_config asks for {tuple(expected)}")
        for (name, _), part in zip(names, weight.split(sizes)):
            # safetensors takes no views
            theirs[name] = (part.T if transposed else part).clone(memory_format=torch.contiguous_format)
    return theirs


def _shape(rows: int, columns: int | None) -> torch.Size:
    return torch.Size((rows,) if columns is None else (rows, columns))


def from_hf(tensors: dict[str, torch.Tensor], config, vocab_size: int) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors under the optimized model's names; ValueError for one that is missing, unknown
    or of another shape."""
    # saved without the output head's class, as gpt2 itself
    if "wte.weight" in tensors or "embed_tokens.weight" in tensors:
        tensors = {
            name
            if name == "lm_head.weight"
            else ("transformer." if "wte.weight" in tensors else "model.") + name: tensor
            for name, tensor in tensors.items()
        }
    # constants that old versions of transformers saved
    buffers = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}
    weights, linear_biases = {}, ("qkv.bias", "proj.bias", "fc1_bias", "fc2_bias")
    for ours, names, columns, transposed in table(config, vocab_size):
        parts = []
        for name, size in names:
            if name not in rest:
                raise ValueError(f"tensor {name} is missing; config.json asks for it")
            part, shape = rest.pop(name), _shape(size, columns)
            expected = shape[::-1] if transposed else shape
            if part.shape != expected:
                raise ValueError(f"tensor {name} has shape {tuple(part.shape)}; config.json asks for "
                                 f"{tuple(expected)}")
            if part.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"tensor {name} is {part.dtype}; float32, bfloat16 and float16 are read")
            if not part.isfinite().all():
                raise ValueError(f"tensor {name} holds values that are NaN or infinite; take another copy of "
                                 "the model")
            parts.append(part.T if transposed else part)
        weight = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        if not config.bias and ours.endswith(linear_biases):
            if weight.any():
                raise ValueError(
                    f"tensor {names[0][0]} is not zero, but the entry nanote in config.json says bias false; remove that entry"
                )
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


def optimized_config(meta: dict):
    """The OptimizedConfig that means the same as a checkpoint's model, whichever model file it is of."""
    return models.make_model_config("optimized", meta["model_config"] | {"use_fp8": False})
