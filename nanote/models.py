"""The five models by name: their classes, a config from options, a model on a device, its number of weights.

`--model` takes a name from MODELS. A model file is imported only when it is used, so a checkout may keep any
of the five.
"""
import contextlib
import dataclasses
import importlib.util

import torch

from nanote import fp8

MODELS = {  # --model: (module, model class, config class)
    "optimized": ("model_te_optimized", "OptimizedGPT2Model", "OptimizedConfig"),
    "advanced": ("model_te_advanced", "AdvancedGPT2Model", "AdvancedConfig"),
    "fused": ("model_te_fused", "FusedGPT2Model", "FusedConfig"),
    "custom": ("model_te_custom", "CustomGPT2Model", "CustomConfig"),
    "te": ("model_te", "TEGPT2Model", "TEConfig"),
}


def model_classes(name: str):
    """Return (model class, config class). Raises ValueError for an unknown name or a missing model file."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: one of {', '.join(MODELS)}")
    module_name = MODELS[name][0]
    if importlib.util.find_spec(module_name) is None:
        present = [key for key, (module, *_) in MODELS.items() if importlib.util.find_spec(module)]
        raise ValueError(
            f"model {name!r}: there is no {module_name}.py here; models that are: {', '.join(present)}"
        )
    if name == "optimized":
        from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
        return OptimizedGPT2Model, OptimizedConfig
    if name == "advanced":
        from model_te_advanced import AdvancedConfig, AdvancedGPT2Model
        return AdvancedGPT2Model, AdvancedConfig
    if name == "fused":
        from model_te_fused import FusedConfig, FusedGPT2Model
        return FusedGPT2Model, FusedConfig
    if name == "custom":
        from model_te_custom import CustomConfig, CustomGPT2Model
        return CustomGPT2Model, CustomConfig
    from model_te import TEConfig, TEGPT2Model
    return TEGPT2Model, TEConfig


def make_model_config(name: str, options: dict):
    """Build the config of model `name` from the `options` it has fields for. None means the field's
    default."""
    config_class = model_classes(name)[1]
    known = {field.name for field in dataclasses.fields(config_class)}
    values = {key: value for key, value in options.items() if key in known and value is not None}
    return config_class(**values)


def build_model(name: str, config, *, device="cpu", dtype=torch.float32, fp8_weights_recipe=None):
    """Build a model with parameters on `device` in `dtype`, or in FP8 if a recipe for the weights is
    given."""
    quantized = contextlib.nullcontext()
    if fp8_weights_recipe is not None:
        quantized = fp8.te.quantized_model_init(enabled=True, recipe=fp8_weights_recipe,
                                                preserve_high_precision_init_val=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), quantized:
            return model_classes(name)[0](config).to(device)  # .to: a model may choose a device itself
    finally:
        torch.set_default_dtype(before)


def weight_count(config) -> int:
    """Return the number of elements in the weight matrices of a model, without building it.

    Biases and norm parameters are few and not counted.
    """
    width, kv_width = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    attention = config.n_embd * (2 * width + 2 * kv_width)  # queries, keys, values, projection
    mlp = config.n_embd * config.n_inner * (3 if getattr(config, "activation", "gelu") == "swiglu" else 2)
    rows = config.vocab_size * (1 if config.tie_embeddings else 2)
    rows += 0 if getattr(config, "use_rotary", False) else config.n_positions
    return config.n_layer * (attention + mlp) + rows * config.n_embd
