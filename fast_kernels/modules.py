"""Transformer Engine's modules on PyTorch and Triton: FP8 with delayed scaling on a Hopper GPU, or no FP8.

    from fast_kernels import modules as te

A model written for `transformer_engine.pytorch` (TE) runs on these without TE: same constructor arguments,
parameter names, initialization and FP8 state, and the same bytes and scales.

A module has the scales and amax histories of its tensors in `fp8_meta`. Kernels raise row 0 of a history.
When the outermost `autocast` ends (forward tensors), or the backward pass of the first module ends
(gradients), one launch updates the scales of all modules that ran inside; under torch.compile see traced.py.

Reference: TE 2.20, `quantization.py` and `module/*.py`.
"""

import functools
import types
from collections import Counter, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

from fast_kernels import casts, fused, scales, traced
from fast_kernels.adam import FastAdam
from fast_kernels.attention import attention, sdpa
from fast_kernels.fp8 import Float8Tensor, Quantization, gradient_dtype
from fast_kernels.frozen import FrozenWeight, make_frozen_weight
from fast_kernels.fused import LinearPass, Stream
from fast_kernels.library import PLAIN, unsupported_reason
from fast_kernels.loss import cross_entropy

__all__ = [  # the names of TE that are here
    "Format", "DelayedScaling", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
    "is_nvfp4_available", "autocast", "fp8_autocast", "quantized_model_init", "fp8_model_init", "LayerNorm",
    "RMSNorm", "Linear", "LayerNormLinear", "LayerNormMLP", "DotProductAttention", "TransformerLayer",
    "checkpoint", "get_cpu_offload_context", "parallel_cross_entropy", "optimizers"]


def __getattr__(name):
    """Say which names of TE are here, where one is missing."""
    if name.startswith("__"):  # of Python's own tools
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(f"fast_kernels.modules.{name}: not here; use Transformer Engine, or one of "
                         f"{', '.join(__all__)}")


# ---------------------------------------------------------------- recipes

_Maxima = namedtuple("_Maxima", "max_fwd max_bwd")  # FP8_MAX, the largest value, forward and backward


class Format(Enum):
    """FP8 formats. HYBRID: E4M3 (largest value 448) forward, E5M2 (57,344) backward."""

    E4M3 = _Maxima(448.0, 448.0)
    HYBRID = _Maxima(448.0, 57344.0)


@dataclass
class DelayedScaling:
    """Scale each tensor by its amax over the last `amax_history_len` steps: FP8_MAX / amax / 2**margin."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"  # max | most_recent
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True  # over the ranks of torch.distributed
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self):
        supported = dict(fp8_format=tuple(Format), amax_compute_algo=("max", "most_recent"),
                         scaling_factor_compute_algo=(None,), fp8_dpa=(False,), fp8_mha=(False,))
        for name, values in supported.items():
            if getattr(self, name) not in values:
                raise ValueError(f"DelayedScaling.{name}={getattr(self, name)!r}: fast_kernels supports "
                                 f"{', '.join(map(str, values))} only")

    def delayed(self):
        return True

    def custom(self):
        return False


def is_fp8_available(return_reason=False):
    reason = unsupported_reason()
    return (not reason, reason) if return_reason else not reason


def _only_delayed_scaling(return_reason=False):
    reason = "fast_kernels has delayed scaling only; install Transformer Engine for other recipes."
    return (False, reason) if return_reason else False


is_fp8_block_scaling_available = _only_delayed_scaling
is_mxfp8_available = _only_delayed_scaling
is_nvfp4_available = _only_delayed_scaling


# ---------------------------------------------------------------- FP8 state of a module

@dataclass
class ScalingState:
    """State of one module's tensors in one direction: for each GEMM [input, weight, output] forward, or
    [output gradient, input gradient] backward; the last of each is unused."""

    scale: torch.Tensor  # (n,) float32
    amax_history: torch.Tensor  # (length, n) float32; row 0: the current step; then the oldest to the newest

    def quantization(self, slot: int, fp8_dtype: torch.dtype) -> Quantization:
        """Return how one of the tensors is quantized."""
        return Quantization(self.scale[slot:slot + 1], self.amax_history[0, slot:slot + 1], fp8_dtype)


class GemmQuantizations(NamedTuple):
    """How the tensors of one GEMM are quantized."""

    input: Quantization
    weight: Quantization
    output_gradient: Quantization


# ---------------------------------------------------------------- the FP8 region

class _OpenContexts:
    """The contexts that the pass in progress is inside."""

    def __init__(self):
        self.regions = []  # the open autocast regions, the outermost first
        self.recompute = None  # the innermost _Recompute that is open; None outside `checkpoint`


_open = _OpenContexts()


class autocast:
    """Run the modules inside in FP8. Regions nest: `enabled=False` in an inner one turns FP8 off there."""

    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None):
        if calibrating or (enabled and recipe is not None and not recipe.delayed()):
            raise ValueError(f"autocast(recipe={type(recipe).__name__}, calibrating={calibrating}): "
                             "fast_kernels has DelayedScaling; use Transformer Engine")
        self.enabled = enabled
        self.group = amax_reduction_group
        self.recipe = DelayedScaling() if recipe is None else recipe
        # these are read of the outermost region only
        self.module_recipes = {}  # {module that ran in FP8: its recipe}
        self.has_backward_updater = False  # a layer was chosen whose backward pass updates gradients' scales

    def __enter__(self):
        _open.regions.append(self)
        self.is_training = torch.is_grad_enabled()  # read of the outermost one: inside, parts may be frozen
        return self

    def __exit__(self, *error):
        _open.regions.pop()
        if not _open.regions and torch.is_grad_enabled():
            self.update("fwd")

    def update(self, direction: str) -> None:
        """Update the scales of the modules that ran in this region, after a pass in one direction."""
        name = f"scaling_{direction}"
        groups = {}  # {id of a recipe: (the recipe, states)}; an inner region may have another one
        for module, recipe in self.module_recipes.items():
            _, states = groups.setdefault(id(recipe), (recipe, []))
            states.append(module.fp8_meta[name])
        for recipe, states in groups.values():
            pairs = [(state.scale, state.amax_history) for state in states]
            if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(self.group) > 1:
                self.reduce_amax([state.amax_history for state in states])
            fp8_max = getattr(recipe.fp8_format.value, f"max_{direction}")
            scales.update(pairs, fp8_max, recipe.margin, recipe.amax_compute_algo)

    def reduce_amax(self, histories) -> None:
        """Set row 0 of each history to the largest amax over the ranks."""
        newest = [history[0] for history in histories]
        amax = torch.cat(newest)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        torch._foreach_copy_(newest, amax.split([len(own) for own in newest]))


def fp8_autocast(enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False):
    """Deprecated name of `autocast`, with its deprecated argument names. TE's `_graph` has no effect here."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


# ---------------------------------------------------------------- recomputation in the backward pass

def checkpoint(function, *args, use_reentrant=False, **kwargs):
    """Run `function` without saving activations, and recompute it in the backward pass with the scales of its
    first forward pass. The recomputation leaves the FP8 state alone. use_reentrant has no effect."""
    if torch.compiler.is_compiling():
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=traced.checkpoint_contexts, **kwargs)
    recorded = []
    regions = list(_open.regions)

    def contexts():
        return _Recompute(recorded, regions, replays=False), _Recompute(recorded, regions, replays=True)

    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Recompute:
    """Context of a forward pass that records scales, or of each recomputation, which replays them in turn.

    recorded: the scales of input and weight, (2, 1), of each GEMM. regions: those of the forward pass."""

    def __init__(self, recorded, regions, replays):
        self.recorded = recorded
        self.regions = regions
        self.replays = replays

    def __enter__(self):
        self.outer_recompute = _open.recompute
        self.outer_regions = _open.regions
        self.next_scales = iter(self.recorded)
        _open.recompute = self
        _open.regions = list(self.regions)

    def __exit__(self, *error):
        _open.recompute = self.outer_recompute
        _open.regions = self.outer_regions

    def record(self, quantizations):
        """Keep the scales of a GEMM's input and weight."""
        self.recorded.append(torch.stack((quantizations.input.scale, quantizations.weight.scale)))

    def replay(self, quantizations):
        """Return how a GEMM quantizes with the scales that were recorded; nobody reads its amaxes."""
        scale = next(self.next_scales)
        amax = torch.zeros_like(scale)
        return quantizations._replace(
            input=Quantization(scale[0], amax[0], quantizations.input.fp8_dtype),
            weight=Quantization(scale[1], amax[1], quantizations.weight.fp8_dtype))


# ---------------------------------------------------------------- options of TE that are refused

_ANY = object()  # any value, without an effect

# Further arguments of TE's constructors, and the one value supported
OPTIONS = dict(
    # linear modules and norms
    sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, ub_name=None,
    get_rng_state_tracker=None, parallel_mode=None, return_bias=False, return_layernorm_output=False,
    zero_centered_gamma=False, delay_wgrad_compute=False, parameters_split=None,
    # attention and TransformerLayer
    attention_type="self", attn_mask_type="causal", self_attn_mask_type="causal", window_size=None,
    softmax_scale=None, layer_type="encoder",
    # FusedAdam
    amsgrad=False, bias_correction=True, adam_w_mode=True, master_weight_dtype=torch.float32,
    name=_ANY, layer_number=_ANY, capturable=_ANY, master_weights=_ANY, set_grad_none=_ANY)


def check_options(kind: str, options: dict, **others) -> None:
    """Raise TypeError for an unknown argument, ValueError for a value that only TE supports."""
    supported = OPTIONS | others
    for name, value in options.items():
        if name not in supported:
            raise TypeError(f"{kind}: unknown argument {name!r}; Transformer Engine may have it")
        is_tensor = isinstance(value, torch.Tensor)
        if supported[name] is not _ANY and (is_tensor or value != supported[name]):
            shown = f"a tensor {tuple(value.shape)}" if is_tensor else repr(value)
            raise ValueError(f"{kind}: {name}={shown}: fast_kernels supports {supported[name]!r} only")


class CheckedOptions:
    """Base of modules: an option of TE that is set after construction is checked like an argument."""

    def __setattr__(self, name, value):
        if name in OPTIONS:
            check_options(type(self).__name__, {name: value})
        super().__setattr__(name, value)


def quantized_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=False):
    """Return a context without effect; ValueError if enabled, since weights stay in BF16."""
    if enabled:
        raise ValueError("quantized_model_init: fast_kernels keeps weights in BF16; use Transformer Engine")
    return nullcontext()


fp8_model_init = quantized_model_init  # the deprecated name


def get_cpu_offload_context(*args, **options):
    raise ValueError("get_cpu_offload_context: fast_kernels has none; use Transformer Engine")


# ---------------------------------------------------------------- linear modules

def _do_nothing():
    pass


def _has_backward(*tensors):
    """Return whether a backward pass will give one of the tensors (None is skipped) a gradient."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _device():
    """Return where parameters are created. `with torch.device("meta"):` gives parameters without memory."""
    if torch.get_default_device().type == "meta":
        return "meta"
    return "cuda" if torch.cuda.is_available() else "cpu"


class Module(CheckedOptions, nn.Module):
    """Parameters as in TE, and the FP8 state of one or two linear layers."""

    def __init__(self, num_gemms, kind, params_dtype=None, device=None, **options):
        super().__init__()
        check_options(kind, options)
        dtype = params_dtype or torch.get_default_dtype()
        self.factory = dict(dtype=dtype, device=device or _device())  # of parameters
        self.fp8_meta = {"num_gemms": num_gemms}
        self.fp8_meta["fp8_checkpoint"] = False  # TE's name for whether the last forward pass was in FP8
        self._fp8_workspaces = {}  # {weight's name: FP8Data}, kept over the micro-batches of a step
        self._quantizations = {}  # {GEMM: (recipe and its fields, GemmQuantizations)}
        self.weight_names = []  # of each GEMM: one, or that of fc1 and of fc2
        self.bias_names = []

    def add_norm(self, size, eps, normalization):
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={normalization!r}: must be 'LayerNorm' or 'RMSNorm'")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = False
        self.layer_norm_weight = nn.Parameter(torch.ones(size, **self.factory))
        self.add_bias("layer_norm_bias", size, normalization == "LayerNorm")

    def add_linear(self, prefix, out_features, in_features, bias, init_method):
        weight = nn.Parameter(torch.empty(out_features, in_features, **self.factory))
        with torch.no_grad():
            if init_method is None:
                nn.init.normal_(weight, std=0.023)  # TE's default
            else:
                init_method(weight)
        self.register_parameter(f"{prefix}weight", weight)
        self.add_bias(f"{prefix}bias", out_features, bias)
        self.weight_names.append(f"{prefix}weight")
        self.bias_names.append(f"{prefix}bias")

    def add_bias(self, name, size, has_bias):
        bias = nn.Parameter(torch.zeros(size, **self.factory)) if has_bias else None
        self.register_parameter(name, bias)

    def forward(self, inp, is_first_microbatch=None):
        x = inp.flatten(0, -2)
        regions = _open.regions
        if torch.compiler.is_compiling() and len(regions) > 0 and regions[-1].enabled:
            if _open.recompute is not None:
                raise ValueError("te.checkpoint around a compiled module: compile the model that calls it")
            y = traced.run(self, x, regions[-1], regions[0].is_training, is_first_microbatch)
        else:
            y = self.run(x, is_first_microbatch)
        return y.view(*inp.shape[:-1], y.shape[-1])

    def begin_pass(self, gemm, inputs, is_first_microbatch=None) -> LinearPass:
        """Prepare a linear layer, GEMM 0 or 1 of the module, for a pass, and return what its GEMMs use.

        In FP8 this quantizes the weight and lets the region update the scales.

        inputs: the layer's input, then other tensors that its backward pass gives gradients to, or None.
        is_first_microbatch: None quantizes the weight, True also keeps it, False takes what was kept.
        """
        weight = self.weight_of(gemm)
        bias = self.parameter(self.bias_names[gemm])
        regions = _open.regions
        enabled = len(regions) > 0 and regions[-1].enabled
        self.fp8_meta["fp8_checkpoint"] = enabled
        if not enabled:
            return LinearPass(weight, bias)
        quantizations = self._gemm_quantizations(gemm, regions[-1].recipe)
        self.check_dtype(weight, inputs[0])
        recompute = _open.recompute
        if recompute is not None and recompute.replays:
            quantizations = recompute.replay(quantizations)
            update_gradient_scales = _do_nothing  # the first pass has registered its own
        else:
            update_gradient_scales = self._register_for_update(weight, *inputs)
            if recompute is not None:
                recompute.record(quantizations)
        fp8_weight = self.quantized_weight(gemm, quantizations.weight, is_first_microbatch)
        return LinearPass(
            weight, bias, fp8_weight, quantizations.input, quantizations.output_gradient,
            update_gradient_scales)

    def _register_for_update(self, *tensors):
        """Let the outermost region update this module's scales. Return what a layer calls after its backward
        pass: the first layer of the region that has one, which is then the last, updates the scales of all
        gradients; the others get a function that does nothing.

        tensors: those that the layer's backward pass gives gradients to, or None.
        """
        region, outermost = _open.regions[-1], _open.regions[0]
        outermost.module_recipes[self] = region.recipe
        if outermost.has_backward_updater or not _has_backward(*tensors):
            return _do_nothing
        outermost.has_backward_updater = True
        return functools.partial(outermost.update, "bwd")

    def check_device(self):
        if reason := unsupported_reason():
            raise ValueError(f"FP8: {reason}")

    def check_dtype(self, weight, x):
        if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
            raise ValueError(f"FP8: weights are {weight.dtype}, and the input is {x.dtype}; both must be "
                             "torch.bfloat16: model.to(torch.bfloat16)")

    def init_fp8_meta_tensors(self, recipe):
        """Create or resize scales and histories for `recipe`; keep the first rows of a history, as TE."""
        meta = self.fp8_meta
        # `is` first: == takes microseconds, in each layer of each pass
        is_same = "scaling_fwd" in meta and (meta["recipe"] is recipe or meta["recipe"] == recipe)
        if is_same and meta["scaling_fwd"].amax_history.shape[0] == recipe.amax_history_len:
            return
        device = next(self.parameters()).device
        with torch.inference_mode(False):  # training goes on with this state
            for direction, tensors_per_gemm in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                slots = tensors_per_gemm * meta["num_gemms"]
                history = torch.zeros(recipe.amax_history_len, slots, device=device)
                scale = torch.ones(slots, device=device)
                old = meta.get(direction)
                if old is not None:
                    scale = old.scale
                    rows = min(len(history), len(old.amax_history))
                    history[:rows] = old.amax_history[:rows]  # as TE, although the last are the newest
                meta[direction] = ScalingState(scale, history)
        meta["recipe"] = recipe
        self._quantizations.clear()

    @torch.compiler.assume_constant_result  # Dynamo calls it while tracing; its arguments must be constants
    def allocate_state_while_tracing(
            self, margin, format_name, history_length, algorithm, reduces_amax, keeps_weights):
        """Allocate or resize scales, histories and kept FP8 weights, which a graph can only update. The
        arguments are the fields of a DelayedScaling, which is no constant."""
        recipe = DelayedScaling(margin, Format[format_name], history_length, algorithm,
                                reduce_amax=reduces_amax)
        self.check_device()
        self.init_fp8_meta_tensors(recipe)
        self.fp8_meta["fp8_checkpoint"] = True
        static = []
        for direction in ("scaling_fwd", "scaling_bwd"):
            state = self.fp8_meta[direction]
            static += [state.scale, state.amax_history]
        for gemm in range(len(self.weight_names)):
            weight = self.weight_of(gemm)
            if isinstance(weight, FrozenWeight):
                static += [tensor for tensor in weight.fp8_data() if tensor is not None]
            elif keeps_weights:
                static += self.workspace(gemm)
        for tensor in static:
            # Without this, each replay of torch.compile's CUDA graph copies the tensor and updates the copy
            torch._dynamo.mark_static_address(tensor)

    def _gemm_quantizations(self, gemm, recipe) -> GemmQuantizations:
        """Return how the tensors of a GEMM are quantized: views of this module's scales and histories. They
        are made, and what they need is checked, once for a recipe."""
        made_for = recipe, recipe.fp8_format, recipe.amax_history_len  # a recipe may change in place
        last_made_for, quantizations = self._quantizations.get(gemm, (None, None))
        if last_made_for != made_for:
            self.check_device()
            self.init_fp8_meta_tensors(recipe)
            forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
            quantizations = GemmQuantizations(
                input=forward.quantization(3 * gemm, torch.float8_e4m3fn),
                weight=forward.quantization(3 * gemm + 1, torch.float8_e4m3fn),
                output_gradient=backward.quantization(2 * gemm, gradient_dtype(recipe.fp8_format)))
            self._quantizations[gemm] = made_for, quantizations
        return quantizations

    def gradient_quantization(self) -> Quantization | None:
        """Return how the output's gradient is quantized; None if the last pass was not in FP8."""
        if not self.fp8_meta["fp8_checkpoint"]:
            return None
        return self._gemm_quantizations(0, self.fp8_meta["recipe"]).output_gradient

    def workspace(self, gemm):
        """Return the memory of a GEMM's quantized weight, allocated on first use."""
        name = self.weight_names[gemm]
        workspaces = self._fp8_workspaces
        if name not in workspaces:
            weight = self.weight_of(gemm)
            with torch.inference_mode(False):  # training could not write an inference tensor
                plain = torch.empty(0, device=weight.device)  # the weight may be a DTensor, a shard
                workspaces[name] = casts.allocate_fp8(plain, *weight.shape, torch.float8_e4m3fn)
        return workspaces[name]

    def quantized_weight(self, gemm, quantization, is_first_microbatch):
        """Return a GEMM's weight in FP8. is_first_microbatch: see `begin_pass`."""
        name = self.weight_names[gemm]
        weight = self.parameter(name)
        is_plain = type(weight) is nn.Parameter  # first: isinstance takes 0.3 us for a class of tensors
        if not is_plain and isinstance(weight, Float8Tensor):  # frozen, or gathered in FP8
            return weight.fp8_data()
        if is_first_microbatch is False and name in self._fp8_workspaces:
            return self._fp8_workspaces[name]
        out = self.workspace(gemm) if is_first_microbatch else None
        quantized, _ = casts.cast(weight.detach(), quantization, out=out)
        return quantized

    def weight_of(self, gemm):
        """Return the weight of a GEMM."""
        return self.parameter(self.weight_names[gemm])

    def parameter(self, name):
        """Return a parameter; None if it is switched off, such as a bias. `getattr` takes longer."""
        parameters = self._parameters
        return parameters[name] if name in parameters else getattr(self, name)  # such as a parametrization's

    def weight_quantization(self, gemm, recipe) -> Quantization:
        """Return how a GEMM's weight is quantized in a pass with `recipe`."""
        return self._gemm_quantizations(gemm, recipe).weight

    def weights_to_quantize(self, recipe) -> list:
        """Return (weight, rowwise, columnwise, scale_inv, scale, amax) of each weight that is not frozen."""
        weights = []
        for gemm, name in enumerate(self.weight_names):
            weight = self.parameter(name)
            self.check_dtype(weight, weight)
            if type(weight) not in PLAIN:
                if isinstance(weight, FrozenWeight):
                    continue
                raise ValueError(  # such as a DTensor, a shard
                    f"FP8: {name} is a {type(weight).__name__}, which is not all in memory yet; "
                    "with fully_shard set model.quantizes_weights_first = False")
            scale, amax, _ = self._gemm_quantizations(gemm, recipe).weight
            weights.append((weight, *self.workspace(gemm), scale, amax))
        return weights

    def _frozen_weights(self):
        """Return {name: FrozenWeight}."""
        return {name: p for name, p in self.named_parameters(recurse=False) if isinstance(p, FrozenWeight)}

    def freeze_weight(self, gemm, keeps_transpose):
        """Keep a GEMM's weight in FP8 alone."""
        name = self.weight_names[gemm]
        setattr(self, name, make_frozen_weight(self.weight_of(gemm), keeps_transpose))
        self._fp8_workspaces.pop(name, None)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name, weight in self._frozen_weights().items():
                destination[prefix + name] = weight.dequantize()

    def _load_from_state_dict(self, *arguments):
        frozen = self._frozen_weights()
        super()._load_from_state_dict(*arguments)
        for name, weight in frozen.items():
            gemm = self.weight_names.index(name)
            if not isinstance(self.weight_of(gemm), FrozenWeight):  # load_state_dict(assign=True) replaced it
                self.freeze_weight(gemm, keeps_transpose=weight.columnwise is not None)

    def _apply(self, function, recurse=True):
        """Move to another device or dtype; the FP8 state stays in float32, and frozen weights in FP8."""
        frozen = self._frozen_weights()
        for name in frozen:  # nn.Module._apply would convert a FrozenWeight by dequantizing it
            self._parameters[name] = None
        super()._apply(function, recurse)
        for name, weight in frozen.items():
            self._parameters[name] = weight.map(function)
        device = next(self.parameters()).device
        for state in (self.fp8_meta.get("scaling_fwd"), self.fp8_meta.get("scaling_bwd")):
            if state is not None:
                state.scale = state.scale.to(device)
                state.amax_history = state.amax_history.to(device)
        self._quantizations = {}
        self._fp8_workspaces = {}
        return self

    def __getstate__(self):  # for pickle and copy.deepcopy: views of tensors that are copied on their own
        return self.__dict__ | {"_quantizations": {}, "_fp8_workspaces": {}}


class Linear(Module):
    """y = x @ weightᵀ + bias: (…, in_features) -> (…, out_features)."""

    def __init__(self, in_features, out_features, init_method=None, bias=True, **options):
        super().__init__(1, "Linear", **options)
        self.in_features, self.out_features = in_features, out_features
        self.add_linear("", out_features, in_features, bias, init_method)

    def run(self, x, is_first_microbatch):
        return fused.linear(x, self, is_first_microbatch, is_branch=False).output


class LayerNormLinear(Module):
    """Norm, then linear: (…, in_features) -> (…, out_features)."""

    def __init__(self, in_features, out_features, eps=1e-5, init_method=None, bias=True,
                 normalization="LayerNorm", **options):
        super().__init__(1, "LayerNormLinear", **options)
        self.in_features, self.out_features = in_features, out_features
        self.add_norm(in_features, eps, normalization)
        self.add_linear("", out_features, in_features, bias, init_method)

    def run(self, x, is_first_microbatch):
        _, y = fused.norm_linear(Stream(x), self, is_first_microbatch=is_first_microbatch)
        return y


class LayerNormMLP(Module):
    """Norm, linear, activation, linear: (…, hidden_size) -> (…, hidden_size).

    With a gated activation (swiglu …) `fc1_weight` has 2 · ffn_hidden_size rows: first the gate, which is
    activated, then the values."""

    def __init__(self, hidden_size, ffn_hidden_size, eps=1e-5, init_method=None, bias=True,
                 normalization="LayerNorm", activation="gelu", output_layer_init_method=None, **options):
        super().__init__(2, "LayerNormMLP", **options)
        if activation not in casts.ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: must be one of {', '.join(casts.ACTIVATIONS)}")
        self.activation = activation
        self.add_norm(hidden_size, eps, normalization)
        fc1_size = 2 * ffn_hidden_size if activation in casts.GATED else ffn_hidden_size
        self.add_linear("fc1_", fc1_size, hidden_size, bias, init_method)
        self.add_linear("fc2_", hidden_size, ffn_hidden_size, bias, output_layer_init_method)

    def run(self, x, is_first_microbatch):
        _, hidden = fused.norm_fc1(Stream(x), self, is_first_microbatch)
        return fused.activation_linear(hidden, self, is_first_microbatch, is_branch=False).output


# model_te_optimized.py and te_reference.py have copies of this function, for their modules
def freeze_in_fp8(module, except_for=(), keeps_transpose=True):
    """Freeze the parameters in `module`. Of the weights of Linear, LayerNormLinear and LayerNormMLP only the
    FP8 values stay, see frozen.py. A weight that is frozen already does not change.

    A weight that two modules share, such as a tied embedding, stays in BF16, and so does one whose sizes are
    not multiples of 16, as FP8 needs. Name a layer that runs without FP8 in `except_for`, because its weight
    would be rounded, too; then freeze it by requires_grad_(False).

    Args:
        except_for: substrings, or one; a parameter whose name contains one, such as "lora_", stays trainable.
        keeps_transpose: keep also the transpose, which the backward pass reads, two bytes a value in all.
            False: one byte a value, and each backward pass makes the transpose anew.
    """
    excluded = (except_for,) if isinstance(except_for, str) else tuple(except_for)
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for owner_name, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if any(text in f"{owner_name}.{name}" for text in excluded):
                continue
            parameter.requires_grad_(False)
            is_weight = isinstance(owner, Module) and name in owner.weight_names
            fits_fp8 = all(size % 16 == 0 for size in parameter.shape)
            is_shared = uses[id(parameter)] > 1
            is_frozen = getattr(parameter, "is_frozen_in_fp8", False)  # or the shard of a FrozenWeight
            if is_weight and fits_fp8 and not is_shared and not is_frozen:
                owner.freeze_weight(owner.weight_names.index(name), keeps_transpose)


@torch.no_grad()
def quantize_weights(modules):
    """Quantize all weights in `modules` in one launch, for passes with is_first_microbatch=False. Call it
    inside `autocast`, and go backward before the next call: the quantized weights are overwritten."""
    weights = []  # for each its arguments of casts.cast_all
    for block in modules:
        for module in block.modules():
            if isinstance(module, Module):
                weights += module.weights_to_quantize(_open.regions[-1].recipe)
    if weights:
        casts.cast_all(*map(list, zip(*weights)))  # a list for each argument


# ---------------------------------------------------------------- norms, attention and a block

class RMSNorm(CheckedOptions, nn.RMSNorm):
    """x · rsqrt(mean(x²) + eps) · weight over the last dimension."""

    def __init__(self, normalized_shape, eps=1e-5, params_dtype=None, device=None, dtype=None, **options):
        check_options("RMSNorm", options)
        super().__init__(normalized_shape, eps, device=device or _device(), dtype=dtype or params_dtype)


class LayerNorm(CheckedOptions, nn.LayerNorm):
    """(x - mean) · rsqrt(variance + eps) · weight + bias over the last dimension."""

    def __init__(self, normalized_shape, eps=1e-5, params_dtype=None, device=None, dtype=None, **options):
        check_options("LayerNorm", options)
        super().__init__(normalized_shape, eps, device=device or _device(), dtype=dtype or params_dtype)


class DotProductAttention(CheckedOptions, nn.Module):
    """Causal softmax(q · kᵀ / √D) · v; keys and values may have fewer heads.

    Format bshd: q (B, S, H, D) -> (B, S, H · D). Format thd with the mask padding_causal: packed sequences, q
    (T, H, D) -> (T, H · D), with cu_seqlens_q as in `packed_attention`. The arguments that are not read are
    TE's: the tensors say how many heads there are, and their size."""

    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0,
                 qkv_format="sbhd", **options):
        super().__init__()
        check_options("DotProductAttention", {"qkv_format": qkv_format} | options, qkv_format="bshd")
        self.attention_dropout = attention_dropout

    def forward(self, query_layer, key_layer, value_layer, *, qkv_format="bshd", attn_mask_type="causal",
                cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None):
        if (qkv_format, attn_mask_type) not in (("bshd", "causal"), ("thd", "padding_causal")):
            raise ValueError(f"qkv_format={qkv_format!r}, attn_mask_type={attn_mask_type!r}: fast_kernels "
                             "has 'bshd' with 'causal' and 'thd' with 'padding_causal'")
        q, k, v = query_layer, key_layer, value_layer
        if qkv_format == "thd":
            q, k, v = q[None], k[None], v[None]
        dropout_p = self.attention_dropout if self.training else 0.0
        if q.dtype == torch.float32 or dropout_p:
            y = sdpa(q, k, v, cu_seqlens_q, dropout_p=dropout_p)
        else:
            y = attention(q, k, v, cu_seqlens_q)
        return y.view(*query_layer.shape[:-2], -1)


class TransformerLayer(CheckedOptions, nn.Module):
    """Pre-norm block: x + attention(x), then x + MLP(x). (B, S, hidden_size) -> (B, S, hidden_size)."""

    def __init__(self, hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None,
                 layernorm_epsilon=1e-5, hidden_dropout=0.1, attention_dropout=0.1, init_method=None,
                 output_layer_init_method=None, kv_channels=None, params_dtype=None, bias=True,
                 activation="gelu", normalization="LayerNorm", device=None, **options):
        super().__init__()
        # TE's defaults are refused: pass all three
        te_defaults = dict(fuse_qkv_params=False, qkv_weight_interleaved=True, attn_input_format="sbhd")
        required = dict(fuse_qkv_params=True, qkv_weight_interleaved=False, attn_input_format="bshd")
        check_options("TransformerLayer", te_defaults | options, **required)
        self.heads = num_attention_heads
        self.kv_heads = num_gqa_groups or num_attention_heads
        self.head_size = kv_channels or hidden_size // self.heads
        self.hidden_dropout = hidden_dropout
        q_size, kv_size = self.heads * self.head_size, self.kv_heads * self.head_size
        common = dict(bias=bias, params_dtype=params_dtype, device=device)
        normed = common | dict(
            eps=layernorm_epsilon, normalization=normalization, init_method=init_method)
        self.self_attention = nn.Module()  # TE's MultiheadAttention
        self.self_attention.layernorm_qkv = LayerNormLinear(hidden_size, q_size + 2 * kv_size, **normed)
        self.self_attention.core_attention = DotProductAttention(
            self.heads, self.head_size, self.kv_heads, attention_dropout, "bshd")
        self.self_attention.proj = Linear(q_size, hidden_size, output_layer_init_method, **common)
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, activation=activation,
            output_layer_init_method=output_layer_init_method, **normed)

    def forward(self, hidden_states, is_first_microbatch=None):
        layer = self.self_attention
        qkv = layer.layernorm_qkv(hidden_states, is_first_microbatch)
        qkv = qkv.unflatten(-1, (-1, self.head_size))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        y = layer.proj(layer.core_attention(q, k, v), is_first_microbatch)
        x = hidden_states + F.dropout(y, self.hidden_dropout, self.training)
        y = self.layernorm_mlp(x, is_first_microbatch)
        return x + F.dropout(y, self.hidden_dropout, self.training)


# ---------------------------------------------------------------- loss and optimizer

def parallel_cross_entropy(inp, target, label_smoothing=0.0, reduce_loss=False):
    """Compute the cross-entropy of logits (B, S, V) in float32 over the labels (B, S) that are not -100: with
    reduce_loss the mean, (1,), whose backward pass overwrites the logits; else (B, S)."""
    logits, labels = inp.flatten(0, -2), target.flatten()
    if reduce_loss:
        return cross_entropy(logits, labels, label_smoothing=label_smoothing).view(1)
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing, reduction="none")
    return loss.view(target.shape)


class FusedAdam(FastAdam):
    """AdamW with float32 master weights, with the arguments of TE's FusedAdam."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *,
                 exp_avg_dtype=torch.float32, store_param_remainders=False, **options):
        check_options("FusedAdam", options, exp_avg_sq_dtype=exp_avg_dtype)
        super().__init__(params, lr, betas, eps, weight_decay, moment_dtype=exp_avg_dtype,
                         store_param_remainders=store_param_remainders)


optimizers = types.SimpleNamespace(FusedAdam=FusedAdam)
