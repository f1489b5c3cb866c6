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
    """Write scales (n,) and amax histories (length, n) of the modules as tensors."""
    for name, module in model.named_modules():
        for direction in DIRECTIONS:
            scaling = getattr(module, "fp8_meta", {}).get(direction)
            if scaling is not None:
                vars(module)[direction] = scaling  # PyTorch's get_model_state_dict follows a key by getattr
                state_dict[f"{prefix}{name}.{direction}.scale"] = scaling.scale
                state_dict[f"{prefix}{name}.{direction}.amax_history"] = scaling.amax_history


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
                module.init_fp8_meta_tensors(model.fp8_recipe)
                scaling = module.fp8_meta[direction]
                scaling.scale.copy_(scale)
                scaling.amax_history.copy_(_resize_history(history, len(scaling.amax_history)))
    if model.config.use_fp8 and not has_scales:
        warnings.warn("load_state_dict: no FP8 scales in the state dict, so the model keeps its own, which "
                      "are 1 before its first pass", stacklevel=2)


def _resize_history(history, length):
    """Return a history of `length` rows. Row 0 is of the current step, and the last row is the newest: rows
    are cut, or zeros added, between them."""
    current, older = history[:1], history[1:]
    added = length - len(history)
    older = F.pad(older, (0, 0, added, 0))  # a negative number cuts
    return torch.cat([current, older])
