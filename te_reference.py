"""The modules of `transformer_engine.pytorch` that a GPT or an encoder needs, in plain PyTorch, FP8 emulated.

Transformer Engine (TE) cannot even be imported without an NVIDIA GPU. This file replaces it: the same
modules, constructor arguments, parameter names and FP8 state as TE 2.20. Use it to run a model file on a
laptop, or to compare it with TE on one GPU. It is written to be read next to TE's sources, not to be fast.

How FP8 is emulated: a linear layer has three GEMMs, and TE quantizes both operands of each.

    y  = x  · wᵀ      forward    x and w in E4M3
    dx = dy · w       dgrad      dy in E5M2 (format HYBRID) or E4M3
    dw = dyᵀ · x      wgrad

Here x, w and dy are cast to `torch.float8_*` with the recipe's scale, cast back, and multiplied in float32.
The quantized bytes equal TE's; the output of a GEMM differs only in summation order. Two autograd functions
do this: `_StraightThrough` replaces x or w by its dequantized value, and `_QuantizeGrad`, applied to y,
quantizes dy in the backward pass for both dgrad and wgrad. Rounding has no second derivative, so both refuse
`create_graph=True`. Without FP8 the modules can be differentiated any number of times.

How `DelayedScaling` keeps state: each tensor has a `scale` and an `amax_history`, as in TE. Row 0 of the
history collects the amax of the current step. When the outermost `autocast` ends (forward tensors), or the
backward pass of the first module ends (backward tensors), the history rolls by one row and gives the scale of
the *next* step.

The parts stand in the order in which one reads them. After the loss come those that the models here rarely
use: block scaling, gradient checkpointing, `TransformerLayer`, weights stored in FP8, the optimizer, tensor
parallelism, the arguments that are not emulated, and torch.compile.

TF32 must stay off (PyTorch's default): its 10-bit mantissa cannot hold the dequantized values.

References: TE 2.20 `quantization.py`, `module/base.py`, `recipe/delayed_scaling.cu`.
"""

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

__version__ = "2.20"  # the TE release whose behavior this file follows

__all__ = [  # the names of `transformer_engine.pytorch` and `transformer_engine.common.recipe` that are here
    "Format", "Recipe", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
    "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available",
    "autocast", "fp8_autocast", "quantized_model_init", "fp8_model_init", "LayerNorm", "RMSNorm", "Linear",
    "LayerNormLinear", "LayerNormMLP", "DotProductAttention", "TransformerLayer", "checkpoint",
    "get_cpu_offload_context", "parallel_cross_entropy", "optimizers",
]


def __getattr__(name):
    """Say which names of TE are here, where one is missing."""
    if name.startswith("__"):  # of Python's own tools
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(f"te_reference.{name}: not emulated; use Transformer Engine, or one of "
                         f"{', '.join(__all__)}")


# ---------------------------------------------------------------- recipes (transformer_engine.common.recipe)

class _FormatMax(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 formats. HYBRID: E4M3 (4 exponent bits, 3 mantissa bits, up to 448) forward, E5M2 (5 and 2, up to
    57,344) backward."""

    E4M3 = _FormatMax(448, 448)
    E5M2 = _FormatMax(57344, 57344)
    HYBRID = _FormatMax(448, 57344)


class Recipe:
    """Base class of the recipes, with the predicates that TE's code calls."""

    def delayed(self):
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self):
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self):
        return self.delayed() or self.float8_current_scaling()

    def float8_block_scaling(self):
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self):
        return isinstance(self, MXFP8BlockScaling)

    def nvfp4(self):
        return False

    def custom(self):
        return False

    def _check(self):
        """Raise ValueError for an argument that is not emulated. The subclasses' `__post_init__`."""
        name = type(self).__name__
        if not isinstance(self.fp8_format, Format):
            raise ValueError(f"{name}(fp8_format={self.fp8_format!r}): use Format.HYBRID or E4M3")
        if self.fp8_format == Format.E5M2:
            raise ValueError("fp8_format=E5M2: pure E5M2 training is not supported; use Format.HYBRID")
        for option in ("fp8_dpa", "fp8_mha"):
            if getattr(self, option, False):
                raise ValueError(f"{name}({option}=True): te_reference computes attention without FP8; use "
                                 "Transformer Engine")

    def _dtype(self, forward):
        if self.fp8_format == Format.HYBRID and not forward:
            return torch.float8_e5m2
        return torch.float8_e4m3fn

    @torch.compiler.assume_constant_result  # while torch.compile traces: see the last part
    def _prepare_modules(self, module_id, group):
        _prepare_modules_while_tracing(self, module_id, group)


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """Scale each tensor by its amax over the last `amax_history_len` steps: FP8_MAX / amax / 2**margin."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"  # "max" | "most_recent" | a function of the history
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self):
        self._check()
        algorithm = self.amax_compute_algo
        if algorithm not in ("max", "most_recent") and not callable(algorithm):
            raise ValueError(f"DelayedScaling(amax_compute_algo={algorithm!r}): use 'max', 'most_recent' or "
                             "a function of the history")

    def __repr__(self):  # TE identifies a recipe by this string, which omits the amax algorithm
        return (f"recipe_type=DelayedScaling, margin={self.margin}, format={self.fp8_format.name}, "
                f"amax_history_len={self.amax_history_len}, reduce_amax={self.reduce_amax}, "
                f"fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}")


@dataclass
class Float8CurrentScaling(Recipe):
    """Scale each tensor by its own amax, computed just before the cast. No state."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False

    __post_init__ = Recipe._check


@dataclass
class Float8BlockScaling(Recipe):
    """One scale per 128 values along the K dimension (activations and gradients), or per 128x128 block
    (weights). Scales are powers of two unless `use_f32_scales`. No state."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3

    __post_init__ = Recipe._check


@dataclass
class MXFP8BlockScaling(Recipe):
    """MXFP8, the OCP microscaling format for Blackwell: one power-of-two scale (E8M0, 8 exponent bits) per 32
    values along the K dimension. TE rounds the exponent up, so that nothing saturates. No state."""

    margin: int = 0
    fp8_format: Format = Format.E4M3

    def __post_init__(self):
        self._check()
        if self.margin:
            raise ValueError(f"MXFP8BlockScaling(margin={self.margin!r}): has no effect, in Transformer "
                             "Engine neither; leave it at 0")


def is_fp8_available(return_reason=False):
    """Always true: delayed, current and block scaling and MXFP8 are emulated."""
    return (True, "") if return_reason else True


is_fp8_block_scaling_available = is_fp8_available
is_mxfp8_available = is_fp8_available


def is_nvfp4_available(return_reason=False):
    return (False, "te_reference emulates FP8 only, not NVFP4.") if return_reason else False


# ---------------------------------------------------------------- quantization

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FP32_MAX = torch.finfo(torch.float32).max


def amax_of(x, dim=()):
    """Return the largest absolute value, () float32, or the largest along `dim`. NaN is ignored, as by CUDA's
    fmax."""
    magnitude = x.detach().abs().nan_to_num(nan=0.0, posinf=math.inf)
    return magnitude.amax(dim).float()


def quantize(x, scale, dtype):
    """Return x · scale, saturated to the format's range (infinity too; NaN stays NaN) and cast to FP8 with
    round to nearest even."""
    fp8_max = FP8_MAX[dtype]
    scaled = x.detach().float() * scale
    return scaled.clamp(-fp8_max, fp8_max).to(dtype)


def dequantize(q, scale):
    """Return q / scale in float32, computed as q times the float32 reciprocal."""
    return q.float() * scale.reciprocal()


def delayed_scale(amax, old_scale, fp8_max, margin=0):
    """Return FP8_MAX / amax / 2**margin, all (n,) float32. An amax of zero, infinity or NaN keeps the old
    scale."""
    scale = _divide(fp8_max * 2.0**-margin, amax)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, old_scale)


def current_scale(amax, fp8_max, power_of_2=False):
    """Return FP8_MAX / amax, rounded down to a power of two if `power_of_2`. An amax of zero or infinity
    gives 1. `amax` is never NaN: `amax_of` ignores it."""
    scale = _divide(fp8_max, amax)
    scale = torch.where((amax == 0) | torch.isinf(amax), 1.0, scale)
    if power_of_2:  # clear the mantissa
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale


def _divide(number, amax):
    """Return number / amax; a quotient that overflows gives the largest float32."""
    # a tensor as the numerator: PyTorch computes number / tensor with the reciprocal, which rounds twice
    quotient = torch.full_like(amax, number) / amax
    return torch.where(torch.isinf(quotient), FP32_MAX, quotient)


# ---------------------------------------------------------------- the FP8 region: one global state, as in TE

class _Region(NamedTuple):
    """The arguments of an `autocast`."""

    enabled: bool
    recipe: Recipe
    group: object  # the ranks over which amaxes are reduced


class _Fp8State:
    """TE's FP8GlobalStateManager: whether FP8 is on, the recipe, and the amax histories to roll."""

    def __init__(self):
        # Open regions, the innermost last. A list: torch.compile loses an attribute set after flex_attention
        self.open = []
        self.default_recipe = DelayedScaling()
        # key of a recipe and a group -> the _Region of both entered last
        self.regions = {}
        # is_forward -> weak references to the _ScalingState of every module that ran
        self.states = {True: [], False: []}
        # In a region: no module has been chosen yet whose backward pass rolls the backward histories
        self.needs_backward_roll = False
        # quantized_model_init: the recipe of the FP8 weights inside it, None outside
        self.init_recipe = None
        self.keep_init_value = False
        # checkpoint: "forward" in its function, "recompute" in the recomputation; "compiled" in both
        self.checkpoint_phase = None
        self.checkpoint_scales = None  # (_ScalingState, index) -> scales of the forward pass

    @property
    def enabled(self):
        return len(self.open) > 0 and self.open[-1].enabled

    @property
    def region(self):
        return self.open[-1]


_fp8 = _Fp8State()


class autocast:
    """Run the TE modules inside in FP8. Regions nest: `enabled=False` in an inner one turns FP8 off there.
    `_graph` has no effect."""

    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
        if calibrating:
            raise ValueError("autocast(calibrating=True): te_reference emulates no calibration; use "
                             "Transformer Engine")
        self.enabled = enabled
        self.recipe = recipe
        self.group = amax_reduction_group

    def __enter__(self):
        recipe = _fp8.default_recipe if self.recipe is None else self.recipe
        self.outer_needs_backward_roll = _fp8.needs_backward_roll
        if not _fp8.open:
            _fp8.needs_backward_roll = True
        _fp8.open.append(_Region(self.enabled, recipe, self.group))
        return self

    def __exit__(self, *exc):
        _fp8.open.pop()
        _fp8.needs_backward_roll = self.outer_needs_backward_roll
        # Only for the outermost region and with gradients enabled: evaluation changes no scale, but its amax
        # stays in row 0 and counts in the next training step.
        if self.enabled and not _fp8.open and torch.is_grad_enabled():
            _roll_all_histories(forward=True)


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    """Deprecated name of `autocast`, with its deprecated argument names."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


# ---------------------------------------------------------------- scales and amax histories of DelayedScaling

class _ScalingState:
    """Scales and amax histories of one module's tensors, in one direction.

    For each GEMM of the module, the tensors are [input, weight, output] forward or [output gradient, input
    gradient] backward. `scale`: (n,) float32; `amax_history`: (amax_history_len, n) float32.

    It belongs to the first region in which its module runs: that region's recipe and group roll it.
    """

    @torch.inference_mode(False)  # an evaluation may be the first pass, and training goes on with this state
    def __init__(self, recipe, n, device):
        self.key = None  # `_region_key` of the region that rolls it; None: not registered
        self.has_run = False
        self.scale = torch.ones(n, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(recipe.amax_history_len, n, dtype=torch.float32, device=device)

    def __getstate__(self):  # to copy or to pickle: the other one is not registered
        return self.__dict__ | {"key": None, "has_run": False}

    def register(self, forward, key, runs=True):
        """Let the region of this key roll the state. `runs=False`: its module has not run yet. The region in
        which it runs first then takes the state over."""
        if self.key is None:
            _fp8.states[forward].append(weakref.ref(self))
        if not self.has_run:
            self.key = key
        if runs:
            self.has_run = True

    @torch.no_grad()
    def roll(self, recipe, fp8_max):
        """Compute the next scale from the history, then roll the history: row i takes row i+1, the last row
        takes this step's amax, and row 0 is zeroed. A tensor not quantized since the last roll (its amax is
        zero) keeps its scale and history."""
        history = self.amax_history
        unused = history[0] == 0
        if callable(recipe.amax_compute_algo):
            amax = recipe.amax_compute_algo(history)
        elif recipe.amax_compute_algo == "max":
            amax = history.nan_to_num(nan=0.0, posinf=math.inf).amax(0)  # CUDA's fmax ignores NaN
        else:
            amax = history[0].clone()
        if recipe.scaling_factor_compute_algo is not None:
            scale = recipe.scaling_factor_compute_algo(amax, self.scale, fp8_max, recipe)
        else:
            scale = delayed_scale(amax, self.scale, fp8_max, recipe.margin)
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        history.copy_(torch.where(unused, history, rolled))
        self.scale.copy_(torch.where(unused, self.scale, scale))

    def resize(self, length):
        """Change `amax_history_len`: truncate at the end or pad with zeros, as TE does, although the newest
        rows are at the end."""
        if length == len(self.amax_history):
            return
        kept = self.amax_history[:length]
        added = length - len(kept)
        self.amax_history = F.pad(kept, (0, 0, 0, added)).clone()


def _roll_all_histories(forward):
    """At the end of a forward (or backward) pass, roll the histories of all modules that have run."""
    states = [reference() for reference in _fp8.states[forward]]
    states = [state for state in states if state is not None]  # of modules that still exist
    for key in _fp8.regions:
        _roll_histories([state for state in states if state.key == key], key, forward)


def _roll_histories(states, key, forward):
    """Reduce the amaxes of states of one region over its ranks, roll histories and update scales."""
    _, recipe, group = _fp8.regions[key]
    is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    if recipe.reduce_amax and is_distributed and states:
        _reduce_amaxes(states, group)
    for state in states:
        state.roll(recipe, FP8_MAX[recipe._dtype(forward)])


def _reduce_amaxes(states, group):
    """Replace the amaxes of this step by their maxima over the ranks, in one collective."""
    amaxes = torch.cat([state.amax_history[0] for state in states])
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    sizes = [state.scale.numel() for state in states]
    for state, amax in zip(states, amaxes.split(sizes)):
        state.amax_history[0] = amax


def _prepare_module(module, recipe, group):
    """Create, resize and register the FP8 state of a module that runs in a region."""
    module.init_fp8_meta_tensors(recipe)
    if recipe.delayed():
        key = _region_key(recipe, group)
        _fp8.regions[key] = _Region(True, recipe, group)
        for direction, state in module._scaling_states().items():
            state.register(direction == "scaling_fwd", key)


def _region_key(recipe, group):
    return f"recipe={recipe},group={id(group) if group is not None else None}"


# ---------------------------------------------------------------- quantization in autograd

def _scale_for(x, recipe, state, index, dtype):
    """Return the scale for x, the tensor before any rounding.

    Current scaling computes it from x's amax. Delayed scaling returns the stored scale and records x's amax
    in row 0 of the history, as a maximum, since several passes can share a step.
    """
    if isinstance(recipe, Float8CurrentScaling):
        return current_scale(amax_of(x), FP8_MAX[dtype], recipe.use_power_2_scales)
    if _fp8.checkpoint_phase == "recompute":
        return _fp8.checkpoint_scales[state, index].pop(0)
    with torch.no_grad():
        slot = state.amax_history[0, index]
        slot.copy_(torch.maximum(slot, amax_of(x)))
    scale = state.scale[index].clone()  # clone: the state changes before the backward pass reads it
    if _fp8.checkpoint_phase == "forward":
        _fp8.checkpoint_scales.setdefault((state, index), []).append(scale)
    return scale


def _fake_quantize(x, recipe, state, index, forward, unrounded=None):
    """Quantize x with a per-tensor recipe and return it dequantized, float32. Delayed scaling has its scale
    in `state` at `index`. `unrounded`: x before it was rounded, whose amax TE takes; None: x."""
    dtype = recipe._dtype(forward)
    if unrounded is None:
        unrounded = x
    scale = _scale_for(unrounded, recipe, state, index, dtype)
    return dequantize(quantize(x, scale, dtype), scale)


class _StraightThrough(torch.autograd.Function):
    """Forward: replace x by `value`. Backward: pass the gradient through, rounded to `grad_dtype`, the output
    precision of TE's GEMM."""

    @staticmethod
    def forward(ctx, x, value, grad_dtype):
        ctx.dtypes = (grad_dtype, x.dtype)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        grad_dtype, dtype = ctx.dtypes
        return grad.to(grad_dtype).to(dtype), None, None


class _QuantizeGrad(torch.autograd.Function):
    """Forward: identity. Backward: quantize and dequantize the gradient."""

    @staticmethod
    def forward(ctx, y, recipe, state, index):
        ctx.args = (recipe, state, index)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        recipe, state, index = ctx.args
        return _fake_quantize(grad, recipe, state, index, forward=False), None, None, None


class _RollInBackward(torch.autograd.Function):
    """Forward: identity. Backward: roll the backward histories, all of them, or those of one `state`."""

    @staticmethod
    def forward(ctx, y, state):
        ctx.state = state
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        if ctx.state is None:
            _roll_all_histories(forward=False)
        else:
            _roll_histories([ctx.state], ctx.state.key, forward=False)
        return grad, None


def _round(x, dtype, grad_dtype=torch.float32):
    """Round x to `dtype` but keep it in float32; round its gradient to `grad_dtype`."""
    return _StraightThrough.apply(x, x.detach().to(dtype).float(), grad_dtype)


def _refuse_second_derivative():
    """Raise RuntimeError in a backward pass with create_graph=True, which alone enables gradients in it.

    `once_differentiable` is not enough: torch.autograd.grad skips its error if another path leads to the
    inputs, and returns the part of the derivative that goes there."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("create_graph=True: te_reference has no second derivatives in FP8 or with tensor "
                           "parallelism; use autocast(enabled=False)")


# ---------------------------------------------------------------- what the modules share

def _check_options(name, options):
    """Raise TypeError for an argument that TE does not have, ValueError for one that has no effect here."""
    defaults = _NOT_EMULATED[name]
    for option, value in options.items():
        if option not in defaults:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
        default = defaults[option]
        if default is _ANY:
            continue
        if isinstance(value, torch.Tensor) or value != default:
            raise ValueError(f"{name}({option}={_shown(value)}): te_reference supports {default!r} only; use "
                             "Transformer Engine")


def _shown(value):
    """Return an argument's repr for an error message; of a tensor the shape and dtype, not the values."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)


def _factory(dtype, device):
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    if torch.get_default_device().type == "meta":  # `with torch.device("meta"):` parameters without memory
        default_device = "meta"
    return dict(dtype=dtype or torch.get_default_dtype(), device=device or default_device)


_normal_init = partial(nn.init.normal_, mean=0.0, std=0.023)  # TE's default


class _Module(nn.Module):
    """TransformerEngineBaseModule: the FP8 state in `fp8_meta`, and its updates in a forward pass."""

    def __init__(self, num_gemms=0):
        super().__init__()
        self.fp8_meta = {"num_gemms": num_gemms, "fp8_checkpoint": False}
        self._fp8_workspaces = {}  # FP8 weights, cached over the micro-batches of a step
        self.primary_weights_in_fp8 = _fp8.init_recipe is not None
        self._parallel = _TensorParallel()  # not split
        _early_states[self] = {}

    def set_tensor_parallel_group(self, tp_group):
        self._parallel.group = tp_group

    # -- parameters

    def _add_weight(self, name, out_features, in_features, init_method, factory, gemm=0):
        """Register the weight (out, in) of the module's GEMM of this number."""
        weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.register_parameter(name, weight)
        init_method = init_method or _normal_init
        with torch.no_grad():
            init_method(weight)
        if self.primary_weights_in_fp8:
            _store_in_fp8(self, gemm, weight)

    def _add_bias(self, name, features, factory):
        """Register the bias (features,). Without a bias the attribute is an empty tensor, as in TE."""
        if self.use_bias:
            self.register_parameter(name, nn.Parameter(torch.zeros(features, **factory)))
        else:
            setattr(self, name, torch.empty(0, **factory))

    def _weights(self):
        """Return the weight of each GEMM."""
        if self.fp8_meta["num_gemms"] == 2:
            return [self.fc1_weight, self.fc2_weight]
        return [self.weight]

    def _frozen_weights(self):
        """Return {name: FrozenWeight}."""
        return {name: p for name, p in self.named_parameters(recurse=False) if isinstance(p, FrozenWeight)}

    # -- FP8 state

    def init_fp8_meta_tensors(self, recipe):
        """Create or resize the scales and histories for `recipe`; keep existing values."""
        meta = self.fp8_meta
        if meta.get("recipe") == recipe and ("scaling_fwd" in meta) == recipe.delayed():
            return
        if meta.get("recipe") is not None and type(meta["recipe"]) is not type(recipe):
            warnings.warn(f"Recipe type changed from {type(meta['recipe']).__name__} to "
                          f"{type(recipe).__name__}. This may affect model behavior.")
            self._fp8_workspaces.clear()
        meta["recipe"] = recipe
        if recipe.delayed():
            meta |= _early_states[self]  # made while torch.compile traced another module
            _early_states[self] = {}
            self._add_missing_states(recipe, meta)
        else:
            meta.pop("scaling_fwd", None)
            meta.pop("scaling_bwd", None)

    def _add_missing_states(self, recipe, states):
        """Add the _ScalingState of each direction to a dictionary that lacks it, and resize what is there."""
        for direction, tensors in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            if direction not in states:
                n = tensors * self.fp8_meta["num_gemms"]
                states[direction] = _ScalingState(recipe, n, self._device())
            states[direction].resize(recipe.amax_history_len)

    def _device(self):
        return next(self.parameters()).device

    def _scaling_states(self):
        """Return {direction: _ScalingState}."""
        states = self.fp8_meta | _early_states.get(self, {})
        return {name: states[name] for name in ("scaling_fwd", "scaling_bwd") if name in states}

    def _apply(self, fn, recurse=True):  # .to(), .cuda(): move the FP8 state but keep its dtype
        frozen = self._frozen_weights()
        for name in frozen:  # nn.Module._apply would convert a FrozenWeight by dequantizing it
            self._parameters[name] = None
        super()._apply(fn, recurse)
        for name, weight in frozen.items():
            self._parameters[name] = weight.map(fn)
        for state in self._scaling_states().values():
            state.scale = state.scale.to(self._device())
            state.amax_history = state.amax_history.to(self._device())
        return self

    def _delayed(self):
        return isinstance(self.fp8_meta.get("recipe"), DelayedScaling)

    # -- a forward pass

    def _begin(self, x):
        """Prepare the FP8 state for a forward pass and return the dtype of the activations."""
        self._parallel.check()
        if torch.compiler.is_compiling():
            _begin_while_tracing(self)
        else:
            if _fp8.enabled:
                _prepare_module(self, _fp8.region.recipe, _fp8.region.group)
            self.fp8_meta["fp8_checkpoint"] = _fp8.enabled  # TE's name for: the last pass ran in FP8
        if torch.is_autocast_enabled(x.device.type):
            return torch.get_autocast_dtype(x.device.type)
        for name, parameter in self.named_parameters():
            if parameter.dtype != x.dtype:
                raise TypeError("Data types for parameters must match when outside of autocasted region. "
                                f"Found input dtype: {x.dtype} and {name!r} dtype: {parameter.dtype}")
        return x.dtype

    def _fp8_weight(self, gemm, weight, is_first_microbatch):
        """Quantize a weight and dequantize it: a sequence of one (out, in) float32 for per-tensor scaling, of
        two for block scaling, rowwise and columnwise.

        `is_first_microbatch`: None computes it, True computes and caches it, False reads the cache.
        """
        if is_first_microbatch is False and gemm in self._fp8_workspaces:
            return self._fp8_workspaces[gemm]
        value = self._quantize_weight(gemm, weight)
        if torch.compiler.is_compiling():
            _cache_while_tracing(self, gemm, value, is_first_microbatch)
        elif is_first_microbatch is not None:
            self._fp8_workspaces[gemm] = value
        return value

    @torch.compiler.assume_constant_result  # while torch.compile traces: see the last part
    def _allocate_workspaces(self):
        _allocate_workspaces_while_tracing(self)

    def _quantize_weight(self, gemm, weight):
        """Compute what `_fp8_weight` returns."""
        recipe = self.fp8_meta["recipe"]
        if recipe.float8_per_tensor_scaling():
            state = self.fp8_meta.get("scaling_fwd")
            value = _fake_quantize(weight, recipe, state, 3 * gemm + 1, forward=True)
            return (value,)
        return _quantize_rowwise_and_columnwise(weight, recipe, recipe._dtype(forward=True), weight=True)

    def _fp8_gemms(self, gemm, x, weight, dtype, is_first_microbatch, unrounded=None):
        """Compute x · weightᵀ in FP8, and its gradients: (…, in) -> (…, out), float32, not yet rounded to
        `dtype`. `gemm` counts the module's linear layers. `unrounded`: see `_fake_quantize`."""
        recipe = self.fp8_meta["recipe"]
        _check_fp8_shapes(x, weight, recipe)
        if not recipe.float8_per_tensor_scaling():
            if isinstance(weight, FrozenWeight):
                raise ValueError(f"{type(recipe).__name__}: a weight frozen in FP8 has one scale; use "
                                 "DelayedScaling or Float8CurrentScaling")
            w = self._fp8_weight(gemm, weight, is_first_microbatch)
            y = _BlockLinear.apply(x.flatten(0, -2), weight, w, recipe, dtype)
            return y.view(*x.shape[:-1], -1)
        w = self._weight_value(gemm, weight, dtype, is_first_microbatch)
        # Tensors of a GEMM in the states: [input, weight, output] and [output gradient, input gradient]
        forward_state = self.fp8_meta.get("scaling_fwd")
        backward_state = self.fp8_meta.get("scaling_bwd")
        x_value = _fake_quantize(x, recipe, forward_state, 3 * gemm, forward=True, unrounded=unrounded)
        x = _StraightThrough.apply(x, x_value, dtype)
        y = F.linear(x, w)
        if gemm == 0:
            y = self._roll_in_backward(y)  # stands before _QuantizeGrad, so in the backward pass it is after
        return _QuantizeGrad.apply(y, recipe, backward_state, 2 * gemm)

    def _weight_value(self, gemm, weight, dtype, is_first_microbatch):
        """Return what a GEMM under per-tensor scaling reads of a weight, (out, in) float32."""
        if isinstance(weight, FrozenWeight):
            return weight.value()
        if _is_fp8_parameter(weight):
            value = weight.detach().float()
        else:
            (value,) = self._fp8_weight(gemm, weight, is_first_microbatch)
        return _StraightThrough.apply(weight, value, dtype)

    def _roll_in_backward(self, y):
        """Let the first module of a region that has a backward pass roll all backward histories in it."""
        if not (_fp8.needs_backward_roll and y.requires_grad):
            return y
        if _fp8.checkpoint_phase == "compiled":
            return _roll_in_backward_while_tracing(self, y)
        _fp8.needs_backward_roll = False
        return _RollInBackward.apply(y, None)

    def _last_gemm(self, gemm, x, weight, bias, dtype, is_first_microbatch, unrounded=None):
        """Run the module's last linear layer: (…, in) -> (…, out) in `dtype`."""
        if not self.use_bias or self.return_bias:
            bias = None
        # Row-parallel: the bias is added after the sum over the ranks
        gemm_bias = None if self._parallel.is_row else bias
        if _fp8.enabled:
            y = self._fp8_gemms(gemm, x, weight, dtype, is_first_microbatch, unrounded)
            y = _add_bias_of_fp8_gemm(y, gemm_bias, dtype).to(dtype)
        else:
            y = _plain_linear(x, weight, gemm_bias, dtype)
        return self._parallel.finish_output(y, bias)

    # -- state dict: TE's keys. TE pickles `fp8_meta` here, but loads no such pickle; the model files save it

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name, weight in self._frozen_weights().items():
                destination[prefix + name] = weight.dequantize()

    def _load_from_state_dict(self, *args):
        frozen = self._frozen_weights()
        super()._load_from_state_dict(*args)
        for name in frozen:
            if not isinstance(getattr(self, name), FrozenWeight):  # load_state_dict(assign=True) replaced it
                setattr(self, name, _make_frozen_weight(getattr(self, name)))

    def __setstate__(self, state):  # of a copy, whose parameters have lost their attributes
        super().__setstate__(state)
        _early_states[self] = {}
        if self.primary_weights_in_fp8 and self.fp8_meta["num_gemms"]:
            for gemm, weight in enumerate(self._weights()):
                weight.fp8_owner = (weakref.ref(self), gemm)


def _check_fp8_shapes(x, weight, recipe):
    """Check TE's rules: rows divisible by 8 and columns by 16; for wgrad, rows and output features by 16;
    for MXFP8, all dimensions by 32."""
    x_rows = x.numel() // x.shape[-1]
    if recipe.mxfp8() and (x_rows % 32 or x.shape[-1] % 32 or weight.shape[0] % 32):
        raise ValueError("MXFP8 requires all dimensions to be divisible by 32, but got input with "
                         f"dims={list(x.shape)} and weight with dims={list(weight.shape)}")
    for name, tensor in (("input", x), ("weight", weight)):
        rows = tensor.numel() // tensor.shape[-1]
        if rows % 8 or tensor.shape[-1] % 16:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be divisible by 8 "
                "and the last dimension to be divisible by 16, "
                f"but got {name} with dims={list(tensor.shape)}")
        if rows % 16 and torch.is_grad_enabled() and weight.requires_grad:
            raise ValueError(
                "FP8 training requires the product of all dimensions except the last to be divisible by 16 "
                f"(the weight gradient), but got {name} with dims={list(tensor.shape)}")


def _add_bias_of_fp8_gemm(y, bias, dtype):
    """Add the bias to the float32 output of a GEMM whose output in TE has this dtype."""
    if bias is None:
        return y
    if dtype == torch.float32:  # cuBLAS has no FP8 GEMM with a float32 bias
        bias = _round(bias, torch.bfloat16)
    return y + bias.float()


def _plain_linear(x, weight, bias, dtype):
    bias = None if bias is None else bias.to(dtype)
    return F.linear(x.to(dtype), weight.to(dtype), bias)


def _no_torch_autocast(x):
    is_enabled = torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if is_enabled else nullcontext()


# ---------------------------------------------------------------- linear layers and norms

class Linear(_Module):
    """y = x · weightᵀ + bias: (…, in_features) -> (…, out_features). With `return_bias`, return y without the
    bias, and the bias. `parallel_mode="column"` splits out_features over the ranks of `tp_group`, "row"
    splits in_features."""

    def __init__(self, in_features, out_features, *, tp_group=None, tp_size=1, init_method=None, bias=True,
                 return_bias=False, params_dtype=None, parallel_mode=None, device=None, **options):
        super().__init__(num_gemms=1)
        _check_options("Linear", options)
        if parallel_mode not in ("column", "row", None):
            raise ValueError(f"Linear(parallel_mode={parallel_mode!r}): use 'column', 'row' or None")
        self.use_bias = bias
        self.return_bias = return_bias
        self._parallel = _TensorParallel(
            tp_group, tp_size, is_column=parallel_mode == "column", is_row=parallel_mode == "row")
        self.in_features = self._parallel.per_rank(in_features, self._parallel.is_row)
        self.out_features = self._parallel.per_rank(out_features, self._parallel.is_column)
        factory = _factory(params_dtype, device)
        self._add_weight("weight", self.out_features, self.in_features, init_method, factory)
        self._add_bias("bias", self.out_features, factory)

    def forward(self, inp, is_first_microbatch=None):
        dtype = self._begin(inp)
        with _no_torch_autocast(inp):
            x = self._parallel.start_input(inp, dtype)
            y = self._last_gemm(0, x, self.weight, self.bias, dtype, is_first_microbatch)
        return (y, self.bias.to(dtype)) if self.return_bias else y


class _NormModule(_Module):
    """Base of the modules that have a norm, or begin with one."""

    def _add_norm(self, prefix, size, eps, normalization, zero_centered_gamma, factory):
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={normalization!r} is not known; use 'LayerNorm' or 'RMSNorm'")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        make_gamma = torch.zeros if zero_centered_gamma else torch.ones
        self.register_parameter(f"{prefix}weight", nn.Parameter(make_gamma(size, **factory)))
        if normalization == "LayerNorm":
            self.register_parameter(f"{prefix}bias", nn.Parameter(torch.zeros(size, **factory)))
        elif prefix:  # TE's fused modules always have the attribute
            setattr(self, f"{prefix}bias", None)

    def _normalize(self, x, gamma, beta):
        return _normalize(x, gamma, beta, self.eps, self.normalization, self.zero_centered_gamma)

    def _norm(self, x, dtype):
        """Return the output of the norm that a module begins with in `dtype`, or unrounded in float32 where
        TE's norm kernel writes FP8 directly (delayed scaling)."""
        x = x.to(dtype)
        if _fp8.enabled or self.zero_centered_gamma:
            x = x.float()
        y = self._normalize(x, self.layer_norm_weight, self.layer_norm_bias)
        writes_fp8 = _fp8.enabled and self._delayed() and not self.return_layernorm_output
        return y if writes_fp8 else y.to(dtype)

    def _outputs(self, y, bias, normed, dtype):
        """Return y, or a tuple with what else was asked for."""
        out = [y]
        if self.return_bias:
            out.append(bias.to(dtype))
        if self.return_layernorm_output:
            out.append(normed.to(dtype))
        return out[0] if len(out) == 1 else tuple(out)


def _normalize(x, gamma, beta, eps, normalization, zero_centered_gamma):
    """Apply LayerNorm or RMSNorm over the last dimension. Returns x's dtype; PyTorch computes in float32."""
    gamma = gamma.to(x.dtype)
    if zero_centered_gamma:
        gamma = 1 + gamma
    if normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], gamma, eps)
    return F.layer_norm(x, x.shape[-1:], gamma, beta.to(x.dtype), eps)


class LayerNorm(_NormModule):
    """LayerNorm: (…, size) -> (…, size). Parameters `weight` and `bias`."""

    normalization = "LayerNorm"

    def __init__(self, normalized_shape, eps=1e-5, sequence_parallel=None, params_dtype=None,
                 zero_centered_gamma=False, hidden_size=None, *, device=None, dtype=None, **options):
        super().__init__()
        options |= dict(sequence_parallel=sequence_parallel or False, hidden_size=hidden_size)
        _check_options(type(self).__name__, options)
        factory = _factory(dtype or params_dtype, device)
        self._add_norm("", normalized_shape, eps, self.normalization, zero_centered_gamma, factory)

    def forward(self, x):
        y = x.float() if self.zero_centered_gamma else x  # keep 1 + gamma in float32
        return self._normalize(y, self.weight, getattr(self, "bias", None)).to(x.dtype)


class RMSNorm(LayerNorm):
    """RMSNorm: (…, size) -> (…, size). Parameter `weight`."""

    normalization = "RMSNorm"


class LayerNormLinear(_NormModule):
    """Norm, then linear: (…, in_features) -> (…, out_features). With `return_bias` or
    `return_layernorm_output`, return the bias or the norm's output as well. No `parallel_mode="row"`."""

    def __init__(self, in_features, out_features, eps=1e-5, *, tp_group=None, tp_size=1, init_method=None,
                 bias=True, normalization="LayerNorm", return_bias=False, params_dtype=None,
                 parallel_mode=None, return_layernorm_output=False, zero_centered_gamma=False, device=None,
                 **options):
        super().__init__(num_gemms=1)
        _check_options("LayerNormLinear", options)
        if parallel_mode not in ("column", None):
            raise ValueError(f"LayerNormLinear(parallel_mode={parallel_mode!r}): use 'column' or None")
        self.use_bias = bias
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self._parallel = _TensorParallel(tp_group, tp_size, is_column=parallel_mode == "column")
        self.in_features = in_features
        self.out_features = self._parallel.per_rank(out_features, self._parallel.is_column)
        factory = _factory(params_dtype, device)
        self._add_norm("layer_norm_", in_features, eps, normalization, zero_centered_gamma, factory)
        self._add_weight("weight", self.out_features, in_features, init_method, factory)
        self._add_bias("bias", self.out_features, factory)

    def forward(self, inp, is_first_microbatch=None):
        dtype = self._begin(inp)
        with _no_torch_autocast(inp):
            normed = self._norm(inp, dtype)
            x = self._parallel.start_input(normed, dtype)
            bias = self.bias  # read once: _SplitQKV concatenates it
            y = self._last_gemm(0, x, self.weight, bias, dtype, is_first_microbatch)
        return self._outputs(y, bias, normed, dtype)


def _gated(activation):
    def gate(x):
        a, b = x.chunk(2, -1)
        return activation(a) * b

    return gate


_gelu = partial(F.gelu, approximate="tanh")


def _squared_relu(x):
    return F.relu(x).square()


ACTIVATIONS = {
    "gelu": _gelu, "relu": F.relu, "srelu": _squared_relu, "silu": F.silu, "geglu": _gated(_gelu),
    "reglu": _gated(F.relu), "sreglu": _gated(_squared_relu), "swiglu": _gated(F.silu),
}


class LayerNormMLP(_NormModule):
    """Norm, linear, activation, linear: (…, hidden_size) -> (…, hidden_size). With a gated activation (geglu,
    swiglu …) `fc1_weight` has 2·ffn_hidden_size rows: first the gate, which is activated, then the values.
    `set_parallel_mode` splits ffn_hidden_size over the ranks of `tp_group`: fc1 by column, fc2 by row."""

    def __init__(self, hidden_size, ffn_hidden_size, eps=1e-5, *, return_bias=False, tp_group=None, tp_size=1,
                 init_method=None, bias=True, normalization="LayerNorm", activation="gelu",
                 output_layer_init_method=None, params_dtype=None, return_layernorm_output=False,
                 set_parallel_mode=False, zero_centered_gamma=False, device=None, **options):
        super().__init__(num_gemms=2)
        _check_options("LayerNormMLP", options)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"LayerNormMLP(activation={activation!r}): te_reference supports {', '.join(ACTIVATIONS)}")
        self.use_bias = bias
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.activation = activation
        self._parallel = _TensorParallel(
            tp_group, tp_size, is_column=set_parallel_mode, is_row=set_parallel_mode)
        width = self._parallel.per_rank(ffn_hidden_size, set_parallel_mode)
        fc1_features = width * (2 if activation.endswith("glu") else 1)
        factory = _factory(params_dtype, device)
        self._add_norm("layer_norm_", hidden_size, eps, normalization, zero_centered_gamma, factory)
        self._add_weight("fc1_weight", fc1_features, hidden_size, init_method, factory, gemm=0)
        self._add_bias("fc1_bias", fc1_features, factory)
        self._add_weight("fc2_weight", hidden_size, width, output_layer_init_method, factory, gemm=1)
        self._add_bias("fc2_bias", hidden_size, factory)

    def forward(self, inp, is_first_microbatch=None):
        dtype = self._begin(inp)
        with _no_torch_autocast(inp):
            normed = self._norm(inp, dtype)
            x = self._parallel.start_input(normed, dtype)
            if _fp8.enabled:
                activated, fc2_input = self._fp8_fc1(x, dtype, is_first_microbatch)
            else:
                h = _plain_linear(x, self.fc1_weight, self.fc1_bias if self.use_bias else None, dtype)
                activated = ACTIVATIONS[self.activation](h)
                fc2_input = activated
            y = self._last_gemm(1, fc2_input, self.fc2_weight, self.fc2_bias, dtype, is_first_microbatch,
                                unrounded=activated)
        return self._outputs(y, self.fc2_bias, normed, dtype)

    def _fp8_fc1(self, x, dtype, is_first_microbatch):
        """Run fc1 and the activation: (…, hidden_size) -> (…, ffn_hidden_size), float32. Return the output of
        the activation and the input of fc2.

        TE's kernels round to `dtype` what they pass on. But with delayed scaling activation kernels write
        FP8, and so do the backward kernels of ungated activations.
        """
        h = self._fp8_gemms(0, x, self.fc1_weight, dtype, is_first_microbatch)
        h = _add_bias_of_fp8_gemm(h, self.fc1_bias if self.use_bias else None, dtype)
        forward_writes_fp8 = self._delayed()
        backward_writes_fp8 = self._delayed() and not self.activation.endswith("glu")
        h = _round(h, dtype, torch.float32 if backward_writes_fp8 else dtype)
        activated = ACTIVATIONS[self.activation](h)
        if forward_writes_fp8:
            return activated, activated
        return activated, _round(activated, dtype)


# ---------------------------------------------------------------- attention

class _Mask(NamedTuple):
    """What a mask type does. The own key of query i is key i; if `from_the_end`, key i + keys - queries."""

    is_causal: bool
    has_padding: bool
    from_the_end: bool


_MASKS = {
    "no_mask": _Mask(is_causal=False, has_padding=False, from_the_end=True),
    "causal": _Mask(is_causal=True, has_padding=False, from_the_end=False),
    "causal_bottom_right": _Mask(is_causal=True, has_padding=False, from_the_end=True),
    "padding": _Mask(is_causal=False, has_padding=True, from_the_end=False),
    "padding_causal": _Mask(is_causal=True, has_padding=True, from_the_end=False),
}


def _mask_type(name):
    """Return TE's canonical name of a mask type: "padding_causal" for "causal,padding"."""
    name = name.replace(",", "_")
    return "padding_causal" if name == "causal_padding" else name


def _window(mask_type, window_size):
    """Return how many keys before and after itself a query may attend to: (left, right), -1 is all.

    None is all. A causal mask sets `right` to 0, with TE's warning if it was another.
    """
    left, right = (-1, -1) if window_size is None else window_size
    is_causal = _MASKS[mask_type].is_causal
    if (left, right) in ((-1, -1), (-1, 0)):
        return (-1, 0) if is_causal else (-1, -1)
    if left < 0 or (right < 0 and not is_causal):
        raise ValueError(f"window_size={window_size!r}, attn_mask_type={mask_type!r}: use (left, right), the "
                         "numbers of keys before and after a query, or (-1, -1) for all")
    if is_causal and right != 0:
        warnings.warn(f"window_size should be (-1, 0) or (>=0, 0) for attn_mask_type={mask_type}")
        right = 0
    return left, right


def _keys_in_reach(queries, keys, window, from_the_end, device):
    """Return which keys each query may attend to by its window, (queries, keys) bool. The window lies around
    the query's own key (see `_Mask`)."""
    left, right = window
    own_key = torch.arange(queries, device=device)
    if from_the_end:
        own_key = own_key + (keys - queries)
    distance = own_key[:, None] - torch.arange(keys, device=device)
    reached = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        reached &= distance <= left
    if right >= 0:
        reached &= distance >= -right
    return reached


def _padding(attention_mask, cu_seqlens, batch, length):
    """Return which positions of a padded batch are padding, (B, S) bool."""
    if attention_mask is None:
        if cu_seqlens is None or len(cu_seqlens) != batch + 1:
            raise ValueError(f"attn_mask_type 'padding': give attention_mask, ({batch}, 1, 1, {length}) bool "
                             f"and true at padding, or cu_seqlens_q, ({batch + 1},) int32")
        lengths = cu_seqlens.diff()
        return torch.arange(length, device=cu_seqlens.device) >= lengths[:, None]
    is_tensor = isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool
    if not is_tensor or attention_mask.shape != (batch, 1, 1, length):
        raise ValueError(f"attention_mask={_shown(attention_mask)}: must be a tensor ({batch}, 1, 1, "
                         f"{length}) torch.bool, true at padding; te_reference has self-attention only")
    padding = attention_mask[:, 0, 0]
    is_before_a_token = padding[:, :-1] & ~padding[:, 1:]
    if not torch.compiler.is_compiling() and is_before_a_token.any():
        raise ValueError("attention_mask: tokens after padding; TE's kernels read the first tokens of each "
                         "sequence, as many as it has; pad at the end")
    return padding


class DotProductAttention(_Module):
    """softmax(q·kᵀ / √D)·v; key and value have `num_gqa_groups` heads.

    Format bshd: query (B, S, H, D) -> (B, S, H·D). Format sbhd: (S, B, H, D) -> (S, B, H·D). Masks: no_mask,
    causal, causal_bottom_right, and padding and padding_causal for sequences that are padded at the end, with
    `attention_mask`, (B, 1, 1, S) and true at padding, or `cu_seqlens_q`, (B + 1,) int32, whose differences
    are the lengths. The output at padding is zero.

    Format thd: packed sequences of any length, query (T, H, D) -> (T, H·D), with the masks padding and
    padding_causal; `cu_seqlens_q` (int32) holds the start of each, then T.

    `window_size` (left, right): how many keys before and after its own (see `_Mask`) a query attends to.
    """

    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0,
                 qkv_format="sbhd", attn_mask_type="causal", window_size=None, *, softmax_scale=None,
                 **options):
        super().__init__()
        _check_options("DotProductAttention", options)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.attention_dropout = attention_dropout
        self.softmax_scale = softmax_scale
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, *,
                cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None,
                attn_mask_type=None, window_size=None, **options):
        _check_options("DotProductAttention.forward", options)
        qkv_format = qkv_format or self.qkv_format
        mask_type = _mask_type(attn_mask_type or self.attn_mask_type)
        self._check_masks(qkv_format, mask_type, attention_mask, cu_seqlens_q, cu_seqlens_kv)
        window = _window(mask_type, self.window_size if window_size is None else window_size)
        if qkv_format == "thd":
            return self._attend_packed(query_layer, key_layer, value_layer, cu_seqlens_q, window)
        order = (0, 2, 1, 3) if qkv_format == "bshd" else (1, 2, 0, 3)
        q, k, v = (t.permute(order) for t in (query_layer, key_layer, value_layer))  # (B, H, S, D)
        queries = q.shape[2]
        keys = k.shape[2]
        from_the_end = _MASKS[mask_type].from_the_end
        # With as many keys as queries the own key is key i from either end
        is_shifted = from_the_end and queries != keys
        # SDPA computes a causal mask itself, if asked to, and needs none for all keys
        sdpa_is_causal = False
        mask = None
        if _MASKS[mask_type].has_padding:
            padding = _padding(attention_mask, cu_seqlens_q, len(q), queries).to(q.device)
            is_token = ~padding[:, None]  # (B, 1, S)
            in_reach = _keys_in_reach(queries, keys, window, from_the_end, q.device)
            mask = in_reach & is_token[:, :, :, None] & is_token[:, :, None, :]
        elif window == (-1, 0) and not is_shifted:  # causal, without a window
            sdpa_is_causal = True
        elif window != (-1, -1):  # with a window, or causal and shifted
            mask = _keys_in_reach(queries, keys, window, from_the_end, q.device)
        out = self._attend(q, k, v, mask, sdpa_is_causal).transpose(1, 2)  # (B, S, H, D)
        if qkv_format == "sbhd":
            out = out.transpose(0, 1)
        return out.reshape(*out.shape[:2], -1)

    @staticmethod
    def _check_masks(qkv_format, mask_type, attention_mask, cu_seqlens_q, cu_seqlens_kv):
        is_known = qkv_format in ("bshd", "sbhd", "thd") and mask_type in _MASKS
        if not is_known or (qkv_format == "thd" and not _MASKS[mask_type].has_padding):
            raise ValueError(
                f"qkv_format={qkv_format!r}, attn_mask_type={mask_type!r}: te_reference has bshd and sbhd "
                f"with {', '.join(_MASKS)}, and thd with the last two")
        has_lengths = attention_mask is not None or cu_seqlens_q is not None
        if has_lengths and not _MASKS[mask_type].has_padding:
            raise ValueError(f"attn_mask_type={mask_type!r} uses no attention_mask and no cu_seqlens_q; use "
                             "'padding' or 'padding_causal'")
        if qkv_format == "thd" and (cu_seqlens_q is None or attention_mask is not None):
            raise ValueError("qkv_format='thd': give cu_seqlens_q and no attention_mask")
        if cu_seqlens_kv is None or cu_seqlens_kv is cu_seqlens_q or torch.compiler.is_compiling():
            return
        if cu_seqlens_q is None or not torch.equal(cu_seqlens_q, cu_seqlens_kv):
            raise ValueError("cu_seqlens_kv: must equal cu_seqlens_q; te_reference has self-attention only")

    def _attend_packed(self, query, key, value, cu_seqlens, window):
        """Attend within each of the packed sequences: query (T, H, D) -> (T, H·D)."""
        tokens = torch.arange(len(query), device=query.device, dtype=torch.int32)
        sequence = torch.searchsorted(cu_seqlens, tokens, right=True)
        mask = sequence[:, None] == sequence
        if window == (-1, 0):  # needs less memory than distances
            mask = mask.tril()
        elif window != (-1, -1):
            mask &= _keys_in_reach(len(query), len(key), window, from_the_end=False, device=query.device)
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))  # (1, H, T, D)
        out = self._attend(q, k, v, mask)[0]
        return out.transpose(0, 1).flatten(1)

    def _attend(self, q, k, v, mask=None, is_causal=False):
        """Return softmax(q·kᵀ · scale)·v over the keys where `mask` is true, zero for a query without any.
        q: (B, H, S, D); mask: (S, S) or (B, 1, S, S) bool."""
        has_no_key = None
        if mask is not None:
            has_no_key = ~mask.any(-1, keepdim=True)
            mask = mask | has_no_key  # the softmax of no key is NaN
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=is_causal, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1])
        return out if mask is None else out.masked_fill(has_no_key, 0)


# ---------------------------------------------------------------- loss

def parallel_cross_entropy(inp, target, label_smoothing=0.0, reduce_loss=False, dist_process_group=None,
                           ignore_idx=-100, is_cg_capturable=False, *, overwrite_input=False):
    """Compute cross-entropy in float32. inp: (B, S, V); target: (B, S) int64.

    Returns: (B, S), zero where the target is ignored; with `reduce_loss`, (1,), the mean over the others.
    """
    if dist_process_group is not None:
        raise ValueError("parallel_cross_entropy(dist_process_group): te_reference does not split the "
                         "vocabulary over ranks; use Transformer Engine")
    losses = F.cross_entropy(
        inp.flatten(0, 1).float(), target.flatten(), ignore_index=ignore_idx, label_smoothing=label_smoothing,
        reduction="none")
    if not reduce_loss:
        return losses.view(target.shape)
    counted = (target != ignore_idx).sum().clamp(min=1)
    return losses.sum() / counted.view(1)


# ---------------------------------------------------------------- block scaling and MXFP8

class _BlockLinear(torch.autograd.Function):
    """x · wᵀ with block scaling. x, w and dy are each an operand of two GEMMs with different K dimensions, so
    each is quantized twice (TE's rowwise and columnwise data).

    x: (rows, in); quantized_weight: the pair (rowwise, columnwise), each (out, in).
    """

    @staticmethod
    def forward(ctx, x, weight, quantized_weight, recipe, grad_dtype):
        rowwise, columnwise = _quantize_rowwise_and_columnwise(x, recipe, recipe._dtype(forward=True))
        weight_rowwise, weight_columnwise = quantized_weight
        ctx.save_for_backward(columnwise, weight_columnwise)
        ctx.args = (recipe, grad_dtype, x.dtype, weight.dtype)
        return F.linear(rowwise, weight_rowwise)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        x, w = ctx.saved_tensors
        recipe, grad_dtype, x_dtype, w_dtype = ctx.args
        rowwise, columnwise = _quantize_rowwise_and_columnwise(grad, recipe, recipe._dtype(forward=False))
        dgrad = (rowwise @ w).to(grad_dtype).to(x_dtype)
        wgrad = (columnwise.T @ x).to(grad_dtype).to(w_dtype)
        return dgrad, wgrad, None, None, None


def _quantize_rowwise_and_columnwise(x, recipe, dtype, weight=False):
    """Quantize x in blocks and dequantize it, rowwise (blocks within a row) and columnwise. For a weight's
    128x128 blocks the two are the same."""
    if recipe.mxfp8():
        size = 32
        scale_of = mx_scale
    else:
        size = 128
        scale_of = partial(current_scale, power_of_2=not recipe.use_f32_scales)
    if weight and not recipe.mxfp8():
        _, _, value = quantize_in_blocks(x, (128, 128), scale_of, dtype)
        return value, value
    _, _, rowwise = quantize_in_blocks(x, (1, size), scale_of, dtype)
    _, _, columnwise = quantize_in_blocks(x, (size, 1), scale_of, dtype)
    return rowwise, columnwise


def quantize_in_blocks(x, block, scale_of, dtype):
    """Quantize x (rows, columns) with one scale per block of shape `block`; edge blocks may be smaller.

    Returns: FP8 data of x's shape, scales (row blocks, column blocks), and x dequantized to float32.
    """
    rows, columns = x.shape
    block_rows, block_columns = block
    added_rows = -rows % block_rows
    added_columns = -columns % block_columns
    padded = F.pad(x.detach().float(), (0, added_columns, 0, added_rows))
    row_blocks = padded.shape[0] // block_rows
    tiles = padded.view(row_blocks, block_rows, -1, block_columns)
    scale = scale_of(amax_of(tiles, dim=(1, 3)), FP8_MAX[dtype])
    scale_of_tiles = scale[:, None, :, None]
    q = quantize(tiles, scale_of_tiles, dtype)
    value = dequantize(q, scale_of_tiles)
    q = q.view(padded.shape)
    value = value.view(padded.shape)
    return q[:rows, :columns], scale, value[:rows, :columns]


def mx_scale(amax, fp8_max):
    """Return MXFP8's scale, 2^-e with the smallest e in [-127, 127] (E8M0's range) such that amax / 2^e fits
    the format."""
    bits = (amax * (1.0 / fp8_max)).view(torch.int32)
    exponent = bits >> 23 & 0xFF  # biased: e + 127
    mantissa = bits & 0x7FFFFF
    # Round up to a power of two. What is at most 2^-127, the smallest of E8M0, is subnormal in float32.
    is_smallest = (exponent == 0) & (mantissa <= 0x400000)
    is_largest = exponent >= 0xFE
    rounds_up = (mantissa > 0) & ~is_smallest & ~is_largest
    exponent = torch.where(rounds_up, exponent + 1, exponent).clamp(max=0xFE)
    return torch.ldexp(torch.ones_like(amax), 127 - exponent)


# ---------------------------------------------------------------- gradient checkpointing

@contextmanager
def _checkpoint_phase(phase, scales, region):
    outer_phase = _fp8.checkpoint_phase
    outer_scales = _fp8.checkpoint_scales
    _fp8.checkpoint_phase = phase
    _fp8.checkpoint_scales = scales
    try:
        with region:
            yield
    finally:
        _fp8.checkpoint_phase = outer_phase
        _fp8.checkpoint_scales = outer_scales


def _checkpoint_contexts():
    """Return the contexts of the forward pass, which keeps its scales, and of the recomputation."""
    # The region of the recomputation rolls nothing at its end: it records no amax, so each row 0 is zero
    region = autocast(enabled=False)
    if _fp8.open:
        region = autocast(_fp8.enabled, recipe=_fp8.region.recipe)
    scales = {}
    forward = _checkpoint_phase("forward", scales, nullcontext())
    recomputation = _checkpoint_phase("recompute", scales, region)
    return forward, recomputation


def checkpoint(function, *args, use_reentrant=True, **kwargs):
    """Run `function` without saving activations and recompute it in the backward pass.

    The recomputation quantizes with the scales of the original forward pass and does not change the FP8
    state. Unlike TE's it is never reentrant, since torch.compile traces no reentrant one.
    """
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):  # without an effect
        kwargs.pop(name, None)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _checkpoint_while_tracing(function, *args, **kwargs)
    return torch_checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_checkpoint_contexts, **kwargs)


def get_cpu_offload_context(enabled=False, num_layers=1, model_layers=1, **unused):
    """Return (context for a block's forward pass, function for its output). TE's offload saved tensors to the
    host; these do nothing."""
    return nullcontext(), lambda x: x


# ---------------------------------------------------------------- TransformerLayer

class TransformerLayer(nn.Module):
    """Pre-norm transformer block: x + attention(x), then x + MLP(x). Input and output: (S, B, hidden_size) in
    format sbhd, TE's default, or (B, S, hidden_size) in bshd.

    With `fuse_qkv_params` QKV has one weight. By default its rows are grouped by KV head: queries, key,
    value. With `qkv_weight_interleaved=False`, and with separate QKV parameters, all queries come first, then
    all keys, then all values. For masks and windows see `DotProductAttention`. Decoder layers, post-norm and
    parallel layouts and QK-norm are not emulated.
    """

    def __init__(self, hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None,
                 layernorm_epsilon=1e-5, hidden_dropout=0.1, attention_dropout=0.1, init_method=None,
                 output_layer_init_method=None, layer_number=None, kv_channels=None,
                 self_attn_mask_type="causal", window_size=None, *, params_dtype=None, fuse_qkv_params=False,
                 zero_centered_gamma=False, qkv_weight_interleaved=True, bias=True, activation="gelu",
                 normalization="LayerNorm", device=None, attn_input_format="sbhd", **options):
        super().__init__()
        _check_options("TransformerLayer", options | dict(layer_number=layer_number))
        self.groups = num_gqa_groups or num_attention_heads
        self.head_size = kv_channels or hidden_size // num_attention_heads
        self.heads_per_group = num_attention_heads // self.groups
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.hidden_dropout = hidden_dropout
        self.self_attn_mask_type = self_attn_mask_type
        q_size = num_attention_heads * self.head_size
        kv_size = self.groups * self.head_size
        common = dict(
            eps=layernorm_epsilon, normalization=normalization, zero_centered_gamma=zero_centered_gamma,
            bias=bias, init_method=init_method, params_dtype=params_dtype, device=device)
        self.self_attention = nn.Module()  # TE's MultiheadAttention
        if fuse_qkv_params:
            qkv = LayerNormLinear(hidden_size, q_size + 2 * kv_size, **common)
        else:
            qkv = _SplitQKV(hidden_size, (q_size, kv_size, kv_size), **common)
        self.self_attention.layernorm_qkv = qkv
        self.self_attention.core_attention = DotProductAttention(
            num_attention_heads, self.head_size, self.groups, attention_dropout, qkv_format=attn_input_format,
            window_size=window_size)
        self.self_attention.proj = Linear(
            q_size, hidden_size, init_method=output_layer_init_method, bias=bias, return_bias=True,
            params_dtype=params_dtype, device=device)
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, activation=activation, return_bias=True,
            output_layer_init_method=output_layer_init_method, **common)

    def forward(self, hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None, *,
                is_first_microbatch=None, rotary_pos_emb=None):
        """Run the block.

        Args:
            rotary_pos_emb: RoPE angles (S or more, 1, 1, rotary size), both halves equal; or a pair of these,
                for queries and keys.
        """
        if torch.is_autocast_enabled(hidden_states.device.type):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
        attention = self.self_attention
        qkv = attention.layernorm_qkv(hidden_states, is_first_microbatch=is_first_microbatch)
        if self.qkv_weight_interleaved:
            qkv = qkv.unflatten(-1, (self.groups, self.heads_per_group + 2, self.head_size))
            parts = qkv.split((self.heads_per_group, 1, 1), dim=-2)
        else:
            qkv = qkv.unflatten(-1, (self.heads_per_group + 2, self.groups, self.head_size))
            parts = qkv.split((self.heads_per_group, 1, 1), dim=-3)
        q, k, v = (part.flatten(2, 3) for part in parts)  # each (B, S, heads, D), or (S, B, heads, D)
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb
            q_angles, k_angles = angles if isinstance(angles, tuple) else (angles, angles)
            q = self._rotate(q, q_angles)
            k = self._rotate(k, k_angles)
        context = attention.core_attention(
            q, k, v, attention_mask, window_size=window_size,
            attn_mask_type=self_attn_mask_type or self.self_attn_mask_type)
        y, bias = attention.proj(context, is_first_microbatch=is_first_microbatch)
        x = self._bias_dropout_add(y, bias, hidden_states)
        y, bias = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
        return self._bias_dropout_add(y, bias, x)

    def _rotate(self, x, angles):
        """Apply RoPE to the first `angles.shape[-1]` elements of each head, pairs (x[i], x[i + half]), in
        float32 as in TE's kernel."""
        if self.self_attention.core_attention.qkv_format == "bshd":
            angles = angles[:x.shape[1]].transpose(0, 1).float()
        else:
            angles = angles[:x.shape[0]].float()
        size = angles.shape[-1]
        rotated, rest = x.float().split((size, x.shape[-1] - size), -1)
        a, b = rotated.chunk(2, -1)
        swapped = torch.cat((-b, a), -1)
        rotated = rotated * angles.cos() + swapped * angles.sin()
        return torch.cat((rotated, rest), -1).to(x.dtype)

    def _bias_dropout_add(self, x, bias, residual):
        """Return residual + dropout(x + bias). With a bias, TE runs this as one kernel that computes in
        float32 and rounds once."""
        if bias.numel() == 0:
            return residual + F.dropout(x, self.hidden_dropout, self.training)
        with _no_torch_autocast(x):
            y = F.dropout(x.float() + bias.float(), self.hidden_dropout, self.training)
            return (residual.float() + y).to(x.dtype)


class _SplitQKV(_NormModule):
    """LayerNormLinear with separate query, key and value parameters, concatenated (and quantized) as one."""

    def __init__(self, in_features, sizes, *, eps, init_method, bias, normalization, zero_centered_gamma,
                 params_dtype, device):
        if _fp8.init_recipe is not None:
            raise RuntimeError("Splitting QuantizedTensor into multiple params is not supported")  # as TE
        super().__init__(num_gemms=1)
        self.use_bias = bias
        self.return_bias = False
        self.return_layernorm_output = False
        factory = _factory(params_dtype, device)
        self._add_norm("layer_norm_", in_features, eps, normalization, zero_centered_gamma, factory)
        # TE's order of parameters, on which the optimizer state depends: weights first
        for name, size in zip(("query", "key", "value"), sizes):
            self._add_weight(f"{name}_weight", size, in_features, init_method, factory)
        for name, size in zip(("query", "key", "value"), sizes):
            self._add_bias(f"{name}_bias", size, factory)

    forward = LayerNormLinear.forward

    @property
    def weight(self):
        return torch.cat((self.query_weight, self.key_weight, self.value_weight))

    @property
    def bias(self):
        return torch.cat((self.query_bias, self.key_bias, self.value_bias))


# ---------------------------------------------------------------- weights stored in FP8

@contextmanager
def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    """Create the modules inside with FP8 weights and no high-precision copy.

    Here such a parameter is a plain tensor of dequantized FP8 values (exact in float32; rounded again in
    bfloat16). `FusedAdam` updates float32 master weights and quantizes them back, as TE's does.
    """
    outer_recipe = _fp8.init_recipe
    outer_keep = _fp8.keep_init_value
    _fp8.init_recipe = None
    if enabled:
        _fp8.init_recipe = recipe or DelayedScaling()
    _fp8.keep_init_value = preserve_high_precision_init_val
    try:
        yield
    finally:
        _fp8.init_recipe = outer_recipe
        _fp8.keep_init_value = outer_keep


fp8_model_init = quantized_model_init  # the deprecated name


def _store_in_fp8(module, gemm, weight):
    """Make a weight of a module that is being created an FP8 parameter."""
    module.init_fp8_meta_tensors(_fp8.init_recipe)
    if _fp8.keep_init_value:
        value = weight.detach().cpu().clone()
        weight.get_high_precision_init_val = lambda: value
        weight.clear_high_precision_init_val = lambda: None  # TE frees the value here; this keeps it
    weight.fp8_owner = (weakref.ref(module), gemm)
    with torch.no_grad():
        weight.copy_(_fp8_parameter_value(weight, weight))


def _is_fp8_parameter(parameter):
    return hasattr(parameter, "fp8_owner")


def _fp8_parameter_value(parameter, master):
    """Quantize and dequantize a master weight with the module's scale, and record its amax. This is the value
    of an FP8 parameter after an update."""
    owner, gemm = parameter.fp8_owner
    return owner()._quantize_weight(gemm, master)[0]


# ---------------------------------------------------------------- frozen weights in FP8 (not in TE)

# fast_kernels/frozen.py has a copy of this function
def _tensors_written_by(function, args, kwargs):
    """Return the tensors that an operation changes, as _foreach_copy_ does those of its first list."""
    written = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return tree_leaves(written)


class FrozenWeight(torch.Tensor):
    """A weight (out, in) that is not trained, in E4M3: one byte a value. To operations it is a tensor of its
    `dtype`, which they dequantize. `copy_` quantizes new values.

    Its scale is E4M3's largest value over the weight's own amax. The recipe's margin has no effect here: it
    leaves room for values that grow, and these do not."""

    is_frozen_in_fp8 = True

    @staticmethod
    def __new__(cls, rowwise, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, rowwise.shape, dtype=dtype, device=rowwise.device)

    def __init__(self, rowwise, scale, dtype):
        self.rowwise = rowwise  # (out, in) torch.float8_e4m3fn
        self.scale = scale  # (1,) float32

    def value(self):
        """Return the values in float32, as FP8 GEMMs read them."""
        return dequantize(self.rowwise, self.scale)

    def dequantize(self):
        """Return the values in the weight's dtype."""
        return self.value().to(self.dtype)

    def alias(self):
        return FrozenWeight(self.rowwise, self.scale, self.dtype)

    @torch.no_grad()
    def copy_(self, values, non_blocking=False, *, scale=None):
        """Quantize values (out, in).

        scale: (1,), of the frozen weight that these values were dequantized from; its bytes are then
            restored. None: the scale of their amax."""
        values = values.to(self.device, self.dtype)
        dtype = self.rowwise.dtype
        self.scale.copy_(self.scale_of(values) if scale is None else scale)
        self.rowwise.copy_(quantize(values, self.scale, dtype))
        return self

    @staticmethod
    def scale_of(values):
        """Return the scale of some values, (1,) float32."""
        return current_scale(amax_of(values), FP8_MAX[torch.float8_e4m3fn]).view(1)

    @property
    def requires_grad(self):
        return False

    @requires_grad.setter
    def requires_grad(self, value):
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad=True):
        if requires_grad:  # the same message: model_te_optimized.refuse_to_train, fast_kernels.frozen
            raise ValueError(f"requires_grad_: a weight {tuple(self.shape)} is frozen in FP8, without the "
                             "bits that an update changes; name it in freeze_in_fp8(…, except_for=[…])")
        return self

    def map(self, function):
        """Apply a function such as .to(device) to each tensor, and return the weight of the results. They are
        viewed as integers, since .bfloat16() converts floats; only the weight's own dtype follows it."""
        rowwise = function(self.rowwise.view(torch.uint8)).view(self.rowwise.dtype)
        scale = function(self.scale.view(torch.int32)).view(torch.float32)
        dtype = function(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return _as_parameter(rowwise, scale, dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            weight, = args
            return weight.alias()
        if function is torch.ops.aten.as_strided.default and _is_whole(*args):
            return args[0].alias()  # by as_strided FSDP2 makes the parameter
        if function is torch.ops.aten.copy_.default and isinstance(args[0], cls):  # DDP broadcasts with copy_
            return args[0].copy_(args[1])
        if any(isinstance(tensor, cls) for tensor in _tensors_written_by(function, args, kwargs or {})):
            raise ValueError(f"{function}: a weight is frozen in FP8; only copy_ changes it")
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self):
        return f"FrozenWeight({tuple(self.shape)}, {self.rowwise.dtype}, {self.dtype})"

    # for torch.compile, copy.deepcopy and pickle

    def __tensor_flatten__(self):
        return ["rowwise", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(tensors, dtype, size, stride):
        return FrozenWeight(tensors["rowwise"], tensors["scale"], dtype)

    def __deepcopy__(self, memo):
        copied = self.map(torch.clone)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):  # as integers: PyTorch 2.11 does not unpickle FP8
        return _unpickle_frozen, (self.rowwise.view(torch.uint8), self.scale, self.dtype)


def _as_parameter(rowwise, scale, dtype):
    return nn.Parameter(FrozenWeight(rowwise, scale, dtype), requires_grad=False)


def _unpickle_frozen(rowwise, scale, dtype):
    return _as_parameter(rowwise.view(torch.float8_e4m3fn), scale, dtype)


def _is_whole(weight, size, stride, offset=None):
    """Return whether these arguments of `as_strided` give the weight itself."""
    return (tuple(size), tuple(stride), offset or 0) == (weight.shape, weight.stride(), 0)


def _make_frozen_weight(weight):
    """Return a weight (out, in) as a frozen parameter."""
    rowwise = torch.empty_like(weight, dtype=torch.float8_e4m3fn, requires_grad=False)
    scale = torch.empty(1, dtype=torch.float32, device=weight.device)
    frozen = _as_parameter(rowwise, scale, weight.dtype)
    frozen.copy_(weight.detach())
    return frozen


# model_te_optimized.py and fast_kernels/modules.py have copies of this function, for their modules
def freeze_in_fp8(module, except_for=(), keeps_transpose=True):
    """Freeze the parameters in `module`. Of the weights of Linear, LayerNormLinear and LayerNormMLP only the
    FP8 values stay. A weight that is frozen already does not change.

    A weight that two modules share, such as a tied embedding, stays as it is, and so does one whose sizes are
    not multiples of 16, as FP8 needs. Name a layer that runs without FP8 in `except_for`, because its weight
    would be rounded, too; then freeze it by requires_grad_(False).

    Args:
        except_for: substrings, or one; a parameter whose name contains one, such as "lora_", stays trainable.
        keeps_transpose: without an effect here. fast_kernels keep a transposed copy, or make it when needed.
    """
    excluded = (except_for,) if isinstance(except_for, str) else tuple(except_for)
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for owner_name, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if any(text in f"{owner_name}.{name}" for text in excluded):
                continue
            parameter.requires_grad_(False)
            is_weight = isinstance(owner, (Linear, LayerNormLinear, LayerNormMLP)) and parameter.dim() == 2
            fits_fp8 = all(size % 16 == 0 for size in parameter.shape)
            is_shared = uses[id(parameter)] > 1
            is_frozen = getattr(parameter, "is_frozen_in_fp8", False)  # or the shard of a FrozenWeight
            if is_weight and fits_fp8 and not is_shared and not is_frozen:
                setattr(owner, name, _make_frozen_weight(parameter))
                owner._fp8_workspaces.clear()


# ---------------------------------------------------------------- optimizer

class FusedAdam(torch.optim.Optimizer):
    """Adam (AdamW by default), computed in float32, for parameters of any precision.

    `master_weights` keeps a float32 copy of every lower-precision parameter in the state (`master_param`).
    The parameter is that copy rounded, or quantized if it is an FP8 parameter. The step count is
    `param_groups[i]["step"]`, as in TE. With `capturable` it and `lr` are tensors, as a CUDA graph needs.

    `store_param_remainders` halves the memory of masters in TE. Here they are stored in full: the update is
    the same.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, *,
                 bias_correction=True, adam_w_mode=True, capturable=False, master_weights=False,
                 exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32, set_grad_none=None, **options):
        _check_options("FusedAdam", options)
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if not {exp_avg_dtype, exp_avg_sq_dtype} <= {torch.float32, torch.bfloat16}:
            raise ValueError(f"FusedAdam(exp_avg_dtype={exp_avg_dtype}, exp_avg_sq_dtype={exp_avg_sq_dtype}):"
                             " te_reference keeps moments in torch.float32 or torch.bfloat16")
        if set_grad_none is not None and not set_grad_none:
            raise ValueError("FusedAdam(set_grad_none=False): use zero_grad(set_to_none=False)")
        defaults = dict(
            lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.capturable = capturable
        self.moment_dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if capturable:
            self._make_capturable()

    def _make_capturable(self):
        for group in self.param_groups:
            device = next((p.device for p in group["params"]), None)
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            group["step"] = torch.zeros((), dtype=torch.int, device=device)

    def initialize_state(self, param, store_param_remainders=False):
        state = self.state[param]
        for name, dtype in self.moment_dtypes.items():
            state[name] = torch.zeros_like(param, dtype=dtype)
        if self.master_weights and (param.dtype != torch.float32 or _is_fp8_parameter(param)):
            state["master_param"] = param.detach().float().clone()

    def set_scaled_state(self, param, name, value):
        """Replace one state tensor, for example the master weight by its value before quantization."""
        if value.dtype == torch.int16:
            raise ValueError(f"{name} is torch.int16, a float32 master's remainder: te_reference needs the "
                             "state of a FusedAdam with store_param_remainders=False")
        dtype = self.moment_dtypes.get(name, torch.float32)
        self.state[param][name] = value.detach().to(param.device, dtype, copy=True)

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        """Update every parameter that has a gradient; return what `closure` returned, or None."""
        if grad_scaler is not None:
            raise ValueError("FusedAdam.step(grad_scaler): te_reference does not unscale gradients; call "
                             "grad_scaler.unscale_(optimizer) first, or grad_scaler.step(optimizer)")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group.setdefault("step", 0)
            group["step"] += 1  # in place, if it is a tensor
            beta1, beta2 = group["betas"]
            bias1 = bias2 = 1.0
            if group["bias_correction"]:
                bias1 = 1 - beta1 ** group["step"]
                bias2 = 1 - beta2 ** group["step"]
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group, bias1, bias2)
        return loss

    def _update(self, p, group, bias1, bias2):
        """Update one parameter, its moments and its master weight."""
        beta1, beta2 = group["betas"]
        if not self.state[p]:
            self.initialize_state(p)
        state = self.state[p]
        grad = p.grad.float()
        w = self._float32_weight(p)
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * w
        # float() returns the state itself unless it is bfloat16
        m = state["exp_avg"].float()
        v = state["exp_avg_sq"].float()
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)
        update = (m / bias1) / ((v / bias2).sqrt() + group["eps"])
        if self.adam_w_mode:
            update.add_(w, alpha=group["weight_decay"])
        w.sub_(update * group["lr"])
        if _is_fp8_parameter(p):  # w is never p
            p.copy_(_fp8_parameter_value(p, w))
        elif w is not p:
            p.copy_(w)

    def _float32_weight(self, p):
        """Return the weight to update: the master weight, the parameter itself, or a copy of it."""
        if "master_param" in self.state[p]:
            return self.state[p]["master_param"]
        if _is_fp8_parameter(p):
            owner, _ = p.fp8_owner
            if not owner()._delayed():
                raise RuntimeError("FusedAdam without master_weights does not support FP8 parameters "
                                   "under this recipe. Use master_weights=True.")
            return p.float().clone()
        return p if p.dtype == torch.float32 else p.float()

    def state_dict(self):
        state_dict = super().state_dict()
        if self.capturable:
            for group in state_dict["param_groups"]:  # copies, since training changes these tensors in place
                group["lr"] = group["lr"].clone()
                group["step"] = group["step"].clone()
        return state_dict

    def load_state_dict(self, state_dict):
        # PyTorch casts the state to the parameters' dtype, so restore the saved values afterwards
        super().load_state_dict(state_dict)
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups):
            for number, p in zip(saved_group["params"], group["params"]):
                for name, value in state_dict["state"].get(number, {}).items():
                    self.set_scaled_state(p, name, value)


class _Optimizers:
    """`transformer_engine.pytorch.optimizers`."""

    FusedAdam = FusedAdam

    def __getattr__(self, name):
        raise AttributeError(f"te_reference.optimizers.{name}: not emulated; use Transformer Engine, or "
                             "FusedAdam")


optimizers = _Optimizers()


# ---------------------------------------------------------------- tensor parallelism

class _TensorParallel:
    """How a module is split over the `size` ranks of a group: `is_column`, the output features of its first
    GEMM; `is_row`, the input features of its last. By default it is not."""

    def __init__(self, group=None, size=1, is_column=False, is_row=False):
        self.group = group
        self.size = size if group is None else dist.get_world_size(group)
        self.is_column = is_column
        self.is_row = is_row

    def per_rank(self, features, is_split):
        if not is_split:
            return features
        if features % self.size:
            raise ValueError(f"{features} features: not divisible by tp_size={self.size}")
        return features // self.size

    def check(self):
        if self.size > 1 and self.group is None:
            raise RuntimeError("Tensor parallel group not initialized. Call set_tensor_parallel_group() "
                               "before forward pass when tp_size > 1.")

    def start_input(self, x, dtype):
        """Return the input of a column-parallel GEMM: x, whose gradient is summed over the ranks."""
        is_split = self.is_column and self.size > 1
        return _ColumnParallelInput.apply(x, self.group, dtype) if is_split else x

    def finish_output(self, y, bias):
        """Sum the output of a row-parallel GEMM over the ranks, then add the bias."""
        if not self.is_row:
            return y
        if self.size > 1:
            y = _RowParallelOutput.apply(y, self.group)
        return y if bias is None else y + bias.to(y.dtype)


class _ColumnParallelInput(torch.autograd.Function):
    """Forward: identity. Backward: sum dgrad over the ranks in `dtype`, the output precision of its GEMM."""

    @staticmethod
    def forward(ctx, x, group, dtype):
        ctx.args = (group, dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        group, dtype = ctx.args
        return _sum_over_ranks(grad.to(dtype), group).to(grad.dtype), None, None


class _RowParallelOutput(torch.autograd.Function):
    """Forward: sum y over the ranks, each of which has a part of the K dimension. Backward: identity."""

    @staticmethod
    def forward(ctx, y, group):
        return _sum_over_ranks(y, group)

    @staticmethod
    def backward(ctx, grad):
        _refuse_second_derivative()
        return grad, None


def _sum_over_ranks(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


# ---------------------------------------------------------------- arguments that are not emulated
#
# TE has them, and only TE's default is accepted. An entry counts for the modules whose constructor does not
# name it: tp_group for the norms, not for Linear.

_ANY = object()  # instead of a default, where any value is accepted: it changes no result, in TE neither

_PARALLEL = dict(
    sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, parallel_mode=None,
    set_parallel_mode=False, get_rng_state_tracker=None, rng_tracker_name=None, parameters_split=None,
    ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False,
    ub_bulk_wgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None,
)
_NORM = _PARALLEL | dict(hidden_size=None, sm_margin=0)
_NOT_EMULATED = {
    "LayerNorm": _NORM,
    "RMSNorm": _NORM,
    "Linear": _PARALLEL | dict(name=_ANY, save_original_input=False),
    "LayerNormLinear": _PARALLEL | dict(name=_ANY, return_layernorm_output_gathered=False),
    "LayerNormMLP": _PARALLEL | dict(
        name=_ANY, seq_length=_ANY, micro_batch_size=_ANY, activation_params=None,
        return_layernorm_output_gathered=False, checkpoint=False),
    "DotProductAttention": _PARALLEL | dict(
        name=_ANY, layer_number=_ANY, bottom_right_diagonal=None, softcap=0.0, attention_type="self",
        cp_group=None, cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_type="vanilla",
        return_max_logit=False),
    "DotProductAttention.forward": dict(
        bottom_right_diagonal=None, softcap=None, checkpoint_core_attention=False,
        core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True,
        inference_params=None, pad_between_seqs=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        fp8_output=False, bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None,
        score_mod_tensors=None, score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None,
        qkv_interleave_dim=-3, thd_attention_policies=None, thd_attention_policy_dispatch="auto"),
    "TransformerLayer": _PARALLEL | dict(
        name=_ANY, layer_number=_ANY, seq_length=_ANY, micro_batch_size=_ANY,
        apply_residual_connection_post_layernorm=False, output_layernorm=False, parallel_attention_mlp=False,
        layer_type="encoder", drop_path_rate=0.0, rotary_pos_interleaved=False, bottom_right_diagonal=None,
        softcap=0.0, activation_params=None, qk_norm_type=None, qk_norm_eps=1e-6, qk_norm_before_rope=False,
        softmax_type="vanilla", enc_dec_attn_mask_type="no_mask", enc_dec_bottom_right_diagonal=None,
        enc_dec_window_size=None, ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_overlap_rs=True,
        ub_bulk_dgrad=True, ub_bulk_wgrad=True),
    "FusedAdam": dict(
        master_weight_dtype=torch.float32, use_decoupled_grad=False, store_param_remainders=_ANY),
}


# ---------------------------------------------------------------- torch.compile
#
# Skip this part if you do not compile. The parts above use from it the functions whose names end in
# `while_tracing`, `_early_states`, and the phase "compiled" of a checkpoint.
#
# A compiled graph has tensor operations only: it can neither make nor register FP8 state. So this is done
# while torch.compile traces, by functions that it calls and does not trace. `assume_constant_result` marks
# them. They are methods, `Recipe._prepare_modules` and `_Module._allocate_workspaces`: torch.compile wants
# arguments that are constants, but takes any object as `self`.
#
# The backward pass of the first module, which rolls the histories of all, is traced before the other modules
# are. So the states of all are made with the first one's. Until its module runs, such an early state is kept
# apart from `fp8_meta`, whose entries say that a module has run in FP8.

_early_states = weakref.WeakKeyDictionary()  # every module -> {direction: _ScalingState}


def _begin_while_tracing(module):
    if _fp8.enabled:
        _fp8.region.recipe._prepare_modules(id(module), _fp8.region.group)


def _prepare_modules_while_tracing(recipe, module_id, group):
    """Prepare the module with this id, which is being traced, and with it all others. A roll changes nothing
    of those that do not run."""
    modules = {id(module): module for module in _early_states}
    traced = modules[module_id]
    recipe_before = traced.fp8_meta.get("recipe")
    _prepare_module(traced, recipe, group)
    if not recipe.delayed():
        return
    for module in modules.values():
        if module.fp8_meta["num_gemms"] == 0:
            continue
        own_recipe = module.fp8_meta.get("recipe")
        if own_recipe is None and module._device() == traced._device():
            module._add_missing_states(recipe, _early_states[module])
            _register_early(module, _region_key(recipe, group))
        elif own_recipe in (recipe, recipe_before):  # of the same model
            module.init_fp8_meta_tensors(recipe)
            _register_early(module, _region_key(recipe, group))
        # CUDA graphs of torch.compile update static inputs only
        for state in module._scaling_states().values():
            torch._dynamo.mark_static_address(state.scale)
            torch._dynamo.mark_static_address(state.amax_history)


def _register_early(module, key):
    for direction, state in module._scaling_states().items():
        state.register(direction == "scaling_fwd", key, runs=False)


def _cache_while_tracing(module, gemm, value, is_first_microbatch):
    """Write the FP8 weight to the module's cache in the first micro-batch."""
    if is_first_microbatch:
        module._allocate_workspaces()
        for kept, new in zip(module._fp8_workspaces[gemm], value):
            kept.copy_(new)


def _allocate_workspaces_while_tracing(module):
    """Create the cache of FP8 weights, which a compiled graph can only write to. Each is one tensor: (1, out,
    in) for per-tensor scaling, else (2, out, in), rowwise and columnwise."""
    count = 1 if module.fp8_meta["recipe"].float8_per_tensor_scaling() else 2
    for gemm, weight in enumerate(module._weights()):
        if gemm not in module._fp8_workspaces and not isinstance(weight, FrozenWeight):
            module._fp8_workspaces[gemm] = weight.detach().float().repeat(count, 1, 1)
            torch._dynamo.mark_static_address(module._fp8_workspaces[gemm])


def _roll_in_backward_while_tracing(module, y):
    """Let a module in a checkpoint roll its own histories in its backward pass. The first module cannot roll
    those of all, because a traced checkpoint may not assign to `_fp8`."""
    state = module.fp8_meta.get("scaling_bwd")
    return y if state is None else _RollInBackward.apply(y, state)


def _checkpoint_while_tracing(function, *args, **kwargs):
    """`checkpoint`, whose recomputation is part of the graph."""
    outer_phase = _fp8.checkpoint_phase
    _fp8.checkpoint_phase = "compiled"
    contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, _save_scales)
    result = torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    _fp8.checkpoint_phase = outer_phase
    return result


def _save_scales(ctx, op, *args, **kwargs):
    """Return True, to save and not to recompute it, for the copy of a scale, which changes before the
    backward pass."""
    return op is torch.ops.aten.clone.default and args[0].dim() == 0
