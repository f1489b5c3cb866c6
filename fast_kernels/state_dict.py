"""FP8 state in a model's state dict, as plain tensors: hooks that write and read it.

    self.register_state_dict_post_hook(save_fp8_state)
    self.register_load_state_dict_pre_hook(load_fp8_state)

The keys are those of `model_te_optimized.py` on every engine: `<module>.scaling_fwd.scale`, `.amax_history`,
and `scaling_bwd` for gradients. That file has these functions again, because it runs without this folder.
"""

import warnings

import torch
import torch.nn.functional as F

DIRECTIONS = "scaling_fwd", "scaling_bwd"


def save_fp8_state(model, state_dict, prefix="", metadata=None):
    """Write scales (n,) and amax histories (length, n) as tensors."""
    for name, module in model.named_modules():
        write_frozen_scales(module)
        for direction in DIRECTIONS:
            scaling = getattr(module, "fp8_meta", {}).get(direction)
            if scaling is None:
                continue
            vars(module)[direction] = scaling  # PyTorch's get_model_state_dict follows a key by getattr
            state_dict[f"{prefix}{name}.{direction}.scale"] = scaling.scale
            state_dict[f"{prefix}{name}.{direction}.amax_history"] = scaling.amax_history


@torch.no_grad()
def write_frozen_scales(module):
    """Write the scales of weights that are frozen in FP8 to the module's state, where no pass sets them."""
    scaling = getattr(module, "fp8_meta", {}).get("scaling_fwd")
    if scaling is None:
        return
    for name, weight in module.named_parameters(recurse=False):
        if getattr(weight, "is_frozen_in_fp8", False):  # a FrozenWeight, or the shard of one
            scaling.scale[weight_slot(name)] = weight.scale[0]


def weight_slot(name):
    """Return the index of a weight in `scaling_fwd`: [input, weight, output] of each GEMM."""
    return 4 if name == "fc2_weight" else 1


def load_fp8_state(model, state_dict, prefix="", *unused):
    """Take scales and histories out of a state dict, and set them if the model runs in FP8: if
    `model.config.use_fp8`, with the history length of `model.fp8_recipe`."""
    has_scales = False
    for name, module in model.named_modules():
        for direction in DIRECTIONS:
            scale = state_dict.pop(f"{prefix}{name}.{direction}.scale", None)
            history = state_dict.pop(f"{prefix}{name}.{direction}.amax_history", None)
            if scale is None:
                continue
            has_scales = True
            if model.config.use_fp8:
                set_fp8_state(module, model.fp8_recipe, direction, scale, history)
    if model.config.use_fp8 and not has_scales:
        warnings.warn("load_state_dict: no FP8 scales in the state dict, so the model keeps its own, which "
                      "are 1 before its first pass", stacklevel=2)


def set_fp8_state(module, recipe, direction, scale, history):
    """Set a module's scales (n,) and amax history, from one of any length."""
    module.init_fp8_meta_tensors(recipe)
    scaling = module.fp8_meta[direction]
    scaling.scale.copy_(scale)
    scaling.amax_history.copy_(resize_history(history, len(scaling.amax_history)))


def resize_history(history, length):
    """Return an amax history with `length` rows. Row 0 is of the current step, the last row is the newest;
    zeros are added, or the oldest rows dropped, between row 0 and the others."""
    current_step = history[:1]
    past_steps = history[1:]
    added = length - len(history)
    past_steps = F.pad(past_steps, (0, 0, added, 0))  # in front; a negative number drops rows there
    return torch.cat([current_step, past_steps])
