"""FP8 recipes by name, the shapes that they need, and the FP8 state that a checkpoint keeps.

`make` returns the recipe with which a model enters `te.autocast`. The FP8 state consists of plain tensors,
read and written as in the model's state dict. A missing state or another history length is no error, so a
run can change its precision when it resumes.
"""
import importlib
import itertools
import sys
from contextlib import contextmanager

import torch

from nanote.config import as_typed, find_refusal
from nanote.engine import ENGINE, ENGINES, load_fp8_state, save_fp8_state, te, te_recipe

IS_REFERENCE = ENGINE == "reference"
HAS_TE = ENGINE == "te"
CLASSES = {  # TE's recipe, and its function that says whether this machine supports it
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "current": ("Float8CurrentScaling", "is_fp8_available"),
    "block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
    "nvfp4": ("NVFP4BlockScaling", "is_nvfp4_available"),
}
RECIPES = ("none", *CLASSES)  # and custom:module.function
MEGATRON_NAMES = {"tensorwise": "current", "blockwise": "block"}
FORMATS = {"delayed": "hybrid", "current": "hybrid", "block": "e4m3", "mxfp8": "e4m3"}  # TE's defaults


def has_fp8_gpu(device) -> bool:
    """Return whether a run on this device has a GPU with an FP8 engine."""
    return device.type == "cuda" and not IS_REFERENCE


def is_interpreted() -> bool:
    """Return whether fast_kernels run without a GPU, in Triton's interpreter."""
    # without a GPU unsupported_reason() is "" only if TRITON_INTERPRET=1
    return ENGINE == "fast" and not torch.cuda.is_available() and not te.unsupported_reason()


def check_cpu() -> None:
    """Raise ValueError unless the engine runs without a GPU."""
    if IS_REFERENCE or is_interpreted():
        return
    given = "--device cpu" if torch.cuda.is_available() else f"NANOTE_ENGINE={ENGINE}"
    raise ValueError(f"{given}: {ENGINES[ENGINE].package} needs a GPU; NANOTE_ENGINE=reference works")


def describe():
    """Return the device and the FP8 implementation, in one line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{device}, {ENGINES[ENGINE].label_in_results}"


def unsupported_reason(name):
    """Return the engine's reason why the recipe does not run on this machine, "" if it does."""
    if name == "none":
        return ""
    if name.startswith("custom:"):
        return "" if HAS_TE else "only Transformer Engine runs a custom recipe's quantizers."
    _, function_name = CLASSES[name]
    _, reason = getattr(te, function_name)(return_reason=True)
    return reason


def resolve_format(name, fp8_format="auto"):
    """Return the format of a recipe: "hybrid" (E4M3 forward, E5M2 backward), "e4m3", or "" if it is fixed."""
    if name not in FORMATS:
        return ""
    return FORMATS[name] if fp8_format == "auto" else fp8_format


def check_machine(config, device) -> None:
    """Raise ValueError for options that do not go with this machine. This knows the device and the engine,
    which config.check knows only if NANOTE_ENGINE is set."""
    if config.cuda_graph == "on" and not has_fp8_gpu(device):
        raise ValueError("--cuda-graph on: there is no GPU with an FP8 engine here; leave the option out")
    name = config.fp8_recipe
    if name in MEGATRON_NAMES:
        raise ValueError(f"--fp8-recipe {name}: called {MEGATRON_NAMES[name]} here")
    if name not in RECIPES and not name.startswith("custom:"):
        raise ValueError(f"--fp8-recipe {name}: unknown; use {', '.join(RECIPES)} or custom:module.function")
    if reason := unsupported_reason(name):
        supported = ", ".join(recipe for recipe in RECIPES if not unsupported_reason(recipe))
        raise ValueError(f"--fp8-recipe {name}: not supported on this machine ({describe()}): {reason} "
                         f"Use one of {supported}")
    options = vars(config) | {"NANOTE_ENGINE": ENGINE}
    refusal = find_refusal(options)
    if refusal and config.model != "fast":  # model_te_fast has fast_kernels, whatever other models have
        names = [name for name in refusal.settings if name != "NANOTE_ENGINE"]
        typed = [as_typed(name, options[name]) for name in names]
        raise ValueError(f"{' with '.join(typed)}: not on {ENGINES[ENGINE].package}, the engine here: "
                         f"{refusal.reason}; leave an option out")


def make(config):
    """Return TE's recipe object for config.fp8_recipe, or None for "none".

    - delayed: scale = fp8_max / amax / 2**margin, with the amax over a history of steps.
    - current: scale = fp8_max / amax, with the amax of the tensor that is quantized.
    - block: a scale per 1x128 activations or 128x128 weights; mxfp8: a power of two per 32 values.
    - nvfp4: 4-bit values in blocks of 16 (Blackwell; 12.x: see guide/install.md; arXiv:2509.25149).
    - custom:module.function: TE's CustomRecipe; the function returns the quantizer of each tensor.
    """
    name = config.fp8_recipe
    if name == "none":
        return None
    if name.startswith("custom:"):
        return make_custom(name)
    options = {}
    if name in FORMATS:
        options["fp8_format"] = te_recipe.Format[resolve_format(name, config.fp8_format).upper()]
    if name == "delayed":
        options["margin"] = config.fp8_margin
        options["amax_history_len"] = config.fp8_amax_history_len
        options["amax_compute_algo"] = config.fp8_amax_compute_algo
    class_name, _ = CLASSES[name]
    return getattr(te_recipe, class_name)(**options)


def make_custom(name):
    """Return TE's CustomRecipe for custom:module.function. This imports the module."""
    module_name, _, function_name = name.removeprefix("custom:").rpartition(".")
    try:
        module = importlib.import_module(module_name)
        return te_recipe.CustomRecipe(qfactory=getattr(module, function_name))
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"--fp8-recipe {name}: cannot be imported ({type(error).__name__}: {error}); "
                         "custom:my_recipe.quantizer_for works, if my_recipe.py has it") from error


def round_up(size, multiple):
    """Return the smallest multiple of `multiple` that is not below `size`."""
    return (size + multiple - 1) // multiple * multiple


def check_shapes(model_config, micro_batch_size, seq_len, name):
    """Raise ValueError for a model or a micro-batch that the FP8 GEMMs of the recipe do not support. TE
    requires multiples of 16 tokens, the K dimension of wgrad; the blocks of MXFP8 require 32 everywhere."""
    multiple = 32 if name == "mxfp8" else 16
    tokens = micro_batch_size * seq_len
    width = getattr(model_config, "n_embd", 0)
    if width % multiple:
        raise ValueError(f"--n-embd {width}: FP8 recipe {name} needs a multiple of {multiple}; "
                         f"{round_up(width, multiple)} works")
    if tokens % multiple:
        better = next(n for n in itertools.count(micro_batch_size) if n * seq_len % multiple == 0)
        raise ValueError(f"--micro-batch-size {micro_batch_size} x --seq-len {seq_len} = {tokens} tokens: "
                         f"FP8 recipe {name} needs a multiple of {multiple}; --micro-batch-size {better} "
                         "works, or --fp8-recipe none")


# ---------------------------------------------------------------- the state of delayed scaling

def uses_fp8(model):
    """Return whether the model trains in FP8."""
    return getattr(model.config, "use_fp8", False)


def uses_delayed_scaling(model):
    """Return whether the model trains in FP8 with delayed scaling."""
    recipe = getattr(model, "fp8_recipe", None)
    return recipe is not None and uses_fp8(model) and recipe.delayed()


def is_fresh(model):
    """Return whether delayed scaling has set no scale of a gradient yet: there is no state, or each is 1.
    Scales of weights may be of weights that are frozen in FP8, which have theirs from the start."""
    scales = [tensor for name, tensor in _state(model).items() if name.endswith("scaling_bwd.scale")]
    return all(bool((scale == 1).all()) for scale in scales)


# With another value of these, scales are for another format or for other layers. A checkpoint of another
# recipe has no scales, so those of the model are fresh.
SCALE_OPTIONS = ("fp8_format", "fp8_margin", "fp8_lm_head", "fp8_skip_first", "fp8_skip_last")


def needs_first_scales(config, model, tokens_per_step, scales_meta):
    """Return whether first scales must be found: delayed scaling has none, or those of a checkpoint are for
    another format, for other layers, or for the smaller gradients of a step of more tokens.

    scales_meta: meta.json of the run whose scales were loaded; {}: none were.
    """
    if not uses_delayed_scaling(model):
        return False
    if not scales_meta or is_fresh(model):
        return True
    if tokens_per_step < scales_meta.get("tokens_per_step", 0):  # the loss is divided by fewer tokens
        return True
    saved_options = scales_meta["config"]
    for name in SCALE_OPTIONS:
        value = getattr(config, name)
        if saved_options.get(name, value) != value:
            return True
    return False


def find_first_scales(model, inputs, divisor):
    """Find the first scales of delayed scaling: four forward and backward passes without an update.

    Scales start at 1, which flushes small gradients to zero, and a GEMM whose gradient is zero passes no amax
    to the next one. So each pass gets further back in the model than the one before. It finds the scales of

    1. lm_head,
    2. proj and fc2, which receive the gradient of the residual,
    3. qkv and fc1 behind them,
    4. all of them again, now that every branch adds its gradient to the residual.

    inputs: the model's arguments for one micro-batch. divisor: of its loss.
    """
    for _ in range(4):
        loss = model(*inputs) / divisor
        loss.backward()
        model.zero_grad(set_to_none=True)


def _state(model):
    """Return the FP8 state itself: "<module>.scaling_fwd.scale" (n,), ".amax_history" (length, n), …"""
    state = {}
    save_fp8_state(model, state)
    return state


def get_state(model):
    """Return copies of the FP8 state."""
    return {name: value.detach().clone() for name, value in _state(model).items()}


def set_state(model, state):
    """Restore the result of `get_state` for delayed scaling. A history of another length takes the newest
    rows."""
    if not state or not uses_delayed_scaling(model):
        return
    module = find_missing_module(model, state)
    if module is not None:
        raise ValueError(f"FP8 state of {module}: no such module here; resume with the model that saved it")
    remaining = dict(state)
    try:
        load_fp8_state(model, remaining)  # removes what it sets, and may add tensors of TE
    except (RuntimeError, IndexError, TypeError) as error:  # other shapes, or a tensor is missing
        raise ValueError(f"FP8 state of other shapes: {error}; resume with the model that saved it") from None
    for name in state:
        if name in remaining:
            raise ValueError(f"FP8 state of {name}: no such tensor here; resume with the model that saved it")


def find_missing_module(model, state):
    """Return the first module with FP8 state in `state`, of `get_state`, that the model does not have in FP8;
    None if it has all."""
    modules = dict(model.named_modules())
    for name in state:
        module_name = name.rsplit(".", 2)[0]  # blocks.0.mlp of blocks.0.mlp.scaling_fwd.scale
        if not hasattr(modules.get(module_name), "fp8_meta"):
            return module_name
    return None


def engine_tensors(model) -> list:
    """Return the tensors that the engine keeps between calls, some in dicts. A CUDA graph that was captured
    must hold them."""
    kept = []
    for module in model.modules():
        for name in ("fp8_meta", "quantizers", "_fp8_workspaces", "_buffers"):
            state = getattr(module, name, None)
            if isinstance(state, dict):
                kept.append(dict(state))
    if library := sys.modules.get("fast_kernels.library"):  # imported only where its kernels run
        kept += library.cached_tables()
    return kept


@contextmanager
def preserved_state(model):
    """Restore the FP8 state on exit: the amax of an evaluation would affect the next training step."""
    before = get_state(model)
    try:
        yield
    finally:
        for name, tensor in _state(model).items():
            if name in before:
                tensor.copy_(before[name])
            else:  # created inside: its initial value
                tensor.fill_(1.0 if name.endswith(".scale") else 0.0)


@contextmanager
def turned_off(model):
    """Run the model in the dtype of its weights, without FP8."""
    before = uses_fp8(model)
    model.config.use_fp8 = False
    try:
        yield
    finally:
        model.config.use_fp8 = before
