"""FP8 for a trainer: recipes by name, what this machine supports, valid shapes, and the FP8 state to save.

`make_recipe` and `check_shapes` run before training, `get_state` and `set_state` around a checkpoint,
`preserved_state` around an evaluation. `fp8.te` is Transformer Engine (TE), or te_reference without a GPU.

TE pickles its FP8 state into the state dict (`…_extra_state`) and since 2.20 refuses to load such a pickle,
because that could run code from a file. Here the same values are saved as plain tensors. A missing state (a
run that was in BF16 so far) or another history length is not an error, so a run can change its precision when
it resumes.
"""

import gc
import importlib
import os
import re
from contextlib import contextmanager

import torch

from nanote.fp8_health import health, watch  # noqa: F401  for callers: fp8.watch(model), fp8.health(model)

try:
    if os.environ.get("NANOTE_REFERENCE") == "1" or not torch.cuda.is_available():
        raise ImportError
    import transformer_engine
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    IS_REFERENCE = False
except ImportError:  # no GPU: the same modules in plain PyTorch, with emulated FP8
    import te_reference as recipes
    import te_reference as te

    IS_REFERENCE = True

RESTORE = "restore the checkpoint's files from a copy, or start the scales anew with --fp8-recipe current"
RECIPES = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")  # and custom:module.function
# names of recipes in Megatron, torchao and TE's classes, without "_", "-" and "scaling"
OTHER_NAMES = {
    "tensorwise": "current", "pertensor": "current", "dynamic": "current", "float8current": "current",
    "blockwise": "block", "float8block": "block", "mxfp8block": "mxfp8", "mx": "mxfp8", "nvfp4block": "nvfp4",
    "bf16": "none", "bfloat16": "none", "custom": "custom:module.function"}
_AVAILABLE = {
    "delayed": te.is_fp8_available,
    "current": te.is_fp8_available,
    "block": te.is_fp8_block_scaling_available,
    "mxfp8": te.is_mxfp8_available,
    "nvfp4": getattr(te, "is_nvfp4_available", None),  # None: an older TE
}


def describe():
    """Return the device and the FP8 implementation, in one line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    if IS_REFERENCE:
        return f"{device}, FP8 emulated by te_reference"
    return f"{device}, Transformer Engine {transformer_engine.__version__}"


def unsupported_reason(name):
    """Return TE's reason why this machine does not support the recipe, "" if it does."""
    if name.startswith("custom:") and IS_REFERENCE:
        return ("The quantizers of a custom recipe are part of Transformer Engine; te_reference does not "
                "emulate them.")
    if name == "none" or name.startswith("custom:"):
        return ""
    if _AVAILABLE[name] is None:
        return f"This Transformer Engine has no recipe {name}; a newer one has."
    available, reason = _AVAILABLE[name](return_reason=True)
    return "" if available else reason


def _hint(name):
    """Return what an unknown recipe name probably means, as ": …", or ""."""
    plain = re.sub("[-_ ]|scaling", "", name.lower())
    ours = plain if plain in RECIPES else OTHER_NAMES.get(plain)
    if plain == "rowwise":
        return ": no recipe has one scale per row, block (1x128 and 128x128) comes closest"
    if plain in ("hybrid", "e4m3"):
        return f": it is a format, --fp8-format {plain}"
    return f": it is called {ours} here" if ours else ""


def check_recipe(name):
    """Raise ValueError, in one line, for a recipe that is unknown or that this machine does not support.

    The message names the compute capability of the GPU and the one that TE requires.
    """
    if name not in RECIPES and not name.startswith("custom:"):
        known = f"the recipes are {', '.join(RECIPES)} and custom:module.function"
        raise ValueError(f"fp8-recipe {name!r} is unknown{_hint(name)}; {known}")
    reason = unsupported_reason(name)
    if reason:
        possible = ", ".join(r for r in RECIPES if not unsupported_reason(r))
        where, hint = describe(), "; NANOTE_REFERENCE=1 emulates delayed, current, block and mxfp8 anywhere"
        if torch.cuda.is_available():
            where += ", compute capability {}.{}".format(*torch.cuda.get_device_capability())
        if IS_REFERENCE:
            needed = " of compute capability 10.0 or higher" if name == "nvfp4" else ""
            hint = f"; {name} needs Transformer Engine and a GPU{needed}"
        raise ValueError(f"fp8-recipe {name!r} cannot run on this machine ({where}): {reason} "
                         f"It can run: {possible}{hint}")
    if name.startswith("custom:"):
        _custom_factory(name)


def _custom_factory(name):
    """Return the function that "custom:module.function" names. ValueError if there is none."""
    module_name, _, function_name = name.removeprefix("custom:").rpartition(".")
    works = "custom:my_recipe.quantizer_for works, with a function quantizer_for(role) in my_recipe.py"
    if not module_name or not function_name:
        raise ValueError(f"fp8-recipe {name!r} does not name a module and a function; {works}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"fp8-recipe {name!r}: {module_name} cannot be imported ({type(error).__name__}: {error}); "
            f"{works}"
        ) from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        what = "has no" if factory is None else "has a value, not a function,"
        raise ValueError(f"fp8-recipe {name!r}: module {module_name} {what} {function_name}; {works}")
    return factory


# TE's default format for each recipe; the other recipes have a fixed format.
FORMATS = {"delayed": "hybrid", "current": "hybrid", "block": "e4m3", "mxfp8": "e4m3"}


def resolve_format(name, fp8_format="auto"):
    """Return the format of a recipe: "hybrid" (E4M3 forward, E5M2 backward), "e4m3", or "" if it is fixed."""
    if fp8_format not in ("auto", "hybrid", "e4m3"):
        raise ValueError(f"fp8-format {fp8_format!r} is unknown; use auto (the recipe's default), "
                         "hybrid (E4M3 forward, E5M2 backward) or e4m3")
    if name not in FORMATS:
        return ""
    return FORMATS[name] if fp8_format == "auto" else fp8_format


def make_recipe(name, fp8_format="auto", amax_history_len=1024, amax_compute_algo="max", margin=0):
    """Return TE's recipe object, or None for "none".

    - delayed: scale = FP8_MAX / amax / 2**margin, with the amax over a history of steps.
    - current: the amax of the tensor itself.
    - block: one scale per 1x128 activations or 128x128 weights.
    - mxfp8: one power-of-two scale per 32 values (Blackwell).
    - nvfp4: 4-bit values in blocks of 16 (Blackwell; arXiv:2509.25149).
    - custom:module.function: TE's CustomRecipe; the function returns the quantizer of each tensor.

    `fp8_format`: see `resolve_format`; nvfp4 and custom recipes ignore it. The last three arguments are for
    "delayed". Raises ValueError for a value out of range or a recipe that this machine does not support.
    """
    check_recipe(name)
    fp8_format = resolve_format(name, fp8_format)
    if name == "none":
        return None
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(f"fp8-amax-compute-algo {amax_compute_algo!r} is unknown; use max or most_recent")
    if amax_history_len < 1:
        raise ValueError(f"fp8-amax-history-len {amax_history_len}: must be 1 or more; 1024 works")
    if not 0 <= margin <= 18:  # 448 / 2^18 is below E4M3's smallest number
        raise ValueError(f"fp8-margin {margin}: must be from 0 to 18, beyond which E4M3 flushes every value "
                         "to zero; 0 works")
    format = recipes.Format[fp8_format.upper()] if fp8_format else None
    if name == "delayed":
        return recipes.DelayedScaling(margin=margin, fp8_format=format, amax_history_len=amax_history_len,
                                      amax_compute_algo=amax_compute_algo)
    if name == "current":
        return recipes.Float8CurrentScaling(fp8_format=format)
    if name == "block":
        return recipes.Float8BlockScaling(fp8_format=format)
    if name == "mxfp8":
        return recipes.MXFP8BlockScaling(fp8_format=format)
    if name == "nvfp4":
        return recipes.NVFP4BlockScaling()
    return recipes.CustomRecipe(qfactory=_custom_factory(name))


def check_shapes(config, micro_batch_size, seq_len, name):
    """Raise ValueError for a model or a micro-batch that the FP8 GEMMs of the recipe do not support.

    TE requires a multiple of 8 rows in the forward GEMM and of 16 in wgrad, where tokens are the K dimension.
    The blocks of MXFP8 require 32 everywhere. (The model config checks its own dimensions for multiples of
    16.)
    """
    multiple = {"none": 1, "mxfp8": 32}.get(name, 16)
    if name == "mxfp8" and hasattr(config, "n_kv_head"):  # a model of the user's own may have no such field
        dimensions = {"n_embd": config.n_embd, "n_inner": config.n_inner,
                      "head_dim x n_kv_head": config.head_dim * config.n_kv_head}
        for field, size in dimensions.items():
            if size % 32:
                raise ValueError(f"{field} = {size}: FP8 recipe 'mxfp8' needs dimensions divisible by 32; "
                                 f"{round_up(size, 32)} works")
    tokens = micro_batch_size * seq_len
    if tokens % multiple:
        larger = range(micro_batch_size, micro_batch_size + multiple + 1)
        better = next(size for size in larger if size * seq_len % multiple == 0)
        raise ValueError(
            f"micro-batch-size {micro_batch_size} x seq-len {seq_len} = {tokens} tokens: FP8 recipe {name!r} "
            f"needs a multiple of {multiple}; --micro-batch-size {better} works, or --fp8-recipe none"
        )


def round_up(size, multiple):
    return (size + multiple - 1) // multiple * multiple


def forget_models():
    """Reset TE's global FP8 state, between models in one process.

    TE keeps the amax histories of deleted models and would continue to update them. te_reference keeps them
    until Python's garbage collection, which comes at another time on each rank; their amax values would be
    reduced together with other tensors'.
    """
    gc.collect()
    if not IS_REFERENCE:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
        FP8GlobalStateManager.reset()


def _scaling_states(model):
    """Yield (name, state) per module with weights and direction under delayed scaling.

    The state has .scale (n,) and .amax_history (length, n). (TE has such a state for attention as well, but
    attention runs in high precision here.)
    """
    for module_name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(module, "fp8_meta", {}).get(key)
            # a custom recipe has the field too, but it is None
            if getattr(state, "amax_history", None) is not None:
                yield f"{module_name}.{key}", state


def get_state(model):
    """Return the FP8 state as float32 tensors; empty if delayed scaling has not run.

    Keys: "<module>.scaling_fwd.scale" (n,), "<module>.scaling_fwd.amax_history" (length, n); the same with
        scaling_bwd.
    """
    state = {}
    for name, scaling in _scaling_states(model):
        state[f"{name}.scale"] = scaling.scale.detach().clone()
        state[f"{name}.amax_history"] = scaling.amax_history.detach().clone()
    return state


def uses_delayed_scaling(model):
    """Return whether the model trains in FP8 with delayed scaling. One of the user's own may have no FP8."""
    recipe = getattr(model, "fp8_recipe", None)
    return recipe is not None and getattr(model.config, "use_fp8", False) and recipe.delayed()


def is_fresh(model):
    """Return whether delayed scaling has set no scale yet: there is no state, or every scale is 1."""
    return all(bool((scaling.scale == 1).all()) for _, scaling in _scaling_states(model))


def set_state(model, state):
    """Restore the result of `get_state`. Does nothing unless the model runs with delayed scaling.

    Histories are cut or padded to `amax_history_len`; the newest rows are kept.
    """
    if not uses_delayed_scaling(model):
        return
    recipe = model.fp8_recipe
    modules = dict(model.named_modules())
    for module_name in sorted({key.rsplit(".scaling_", 1)[0] for key in state}):
        module = modules.get(module_name)
        if module is None or not hasattr(module, "init_fp8_meta_tensors"):
            raise ValueError(f"FP8 state for a module {module_name!r}, which this model does not have; "
                             "resume with the model that saved it")
        scale = state.get(f"{module_name}.scaling_fwd.scale")
        if scale is None or scale.numel() not in (3, 6):  # input, weight and output of one or two GEMMs
            raise ValueError(f"FP8 state of the module {module_name!r}: scaling_fwd.scale is "
                             f"{_shape(scale)}, not (3,) or (6,); {RESTORE}")
        module.fp8_meta["num_gemms"] = scale.numel() // 3
        module.fp8_meta["recipe"] = recipe
        module.init_fp8_meta_tensors(recipe)
    for name, scaling in _scaling_states(model):
        scale, history = state.get(f"{name}.scale"), state.get(f"{name}.amax_history")
        if scale is None and history is None:
            continue
        complete = scale is not None and history is not None and len(history) > 0
        if not complete or not history.shape[1:] == scale.shape == scaling.scale.shape:
            raise ValueError(f"FP8 state {name}: scale is {_shape(scale)} and amax_history "
                             f"{_shape(history)}, not {_shape(scaling.scale)} and (steps, "
                             f"{len(scaling.scale)}); {RESTORE}")
        scaling.scale.copy_(scale)
        scaling.amax_history.copy_(_fit_history(history, len(scaling.amax_history)))


def _shape(tensor):
    return "missing" if tensor is None else tuple(tensor.shape)


def _fit_history(history, length):
    """Change an amax history from (old_length, n) to (length, n).

    Row 0 belongs to the current step; of the other rows the last is the newest.
    """
    kept = min(length, len(history)) - 1
    fitted = torch.zeros(length, history.shape[1])
    fitted[0] = history[0]
    if kept:
        fitted[-kept:] = history[-kept:]
    return fitted


@contextmanager
def preserved_state(model):
    """Restore the FP8 state on exit: the amax of an evaluation would affect the next training step."""
    before = get_state(model)
    try:
        yield
    finally:
        for name, scaling in _scaling_states(model):
            if f"{name}.scale" in before:
                scaling.scale.copy_(before[f"{name}.scale"])
                scaling.amax_history.copy_(before[f"{name}.amax_history"])
            else:
                scaling.scale.fill_(1.0)
                scaling.amax_history.zero_()


def is_used(model) -> bool:
    """Return whether a model runs in FP8: by its config, or by its own emulation, if it has an attribute
    `emulates_fp8` that can be set."""
    return getattr(model.config, "use_fp8", False) or getattr(model, "emulates_fp8", False)


@contextmanager
def turned_off(model):
    """Run the model, if it is in FP8, in the dtype of its weights."""
    switches = (model.config, "use_fp8"), (model, "emulates_fp8")
    used = [(owner, name) for owner, name in switches if getattr(owner, name, False)]
    for owner, name in used:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in used:
            setattr(owner, name, True)


def init_master_weights(model, optimizer):
    """Initialize the float32 masters of FP8 weights with the high-precision initial values, and free those.

    For models built under `quantized_model_init(preserve_high_precision_init_val=True)`. The masters would
    otherwise start from the dequantized weights.
    """
    for parameter in model.parameters():
        if hasattr(parameter, "get_high_precision_init_val"):
            optimizer.initialize_state(parameter, False)
            optimizer.set_scaled_state(
                parameter, "master_param",
                parameter.get_high_precision_init_val().to(parameter.device).float(),
            )
            parameter.clear_high_precision_init_val()
