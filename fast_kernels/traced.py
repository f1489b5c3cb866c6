"""The modules of modules.py under torch.compile. FP8 kernels are opaque operations in one graph; Inductor
fuses the PyTorch code between them. `Module.forward` calls `run` while it is traced inside an FP8 region.

A graph cannot create state, and autograd cannot pass FP8 gradients between modules. So here
- `Module.allocate_state_while_tracing` allocates the FP8 state at trace time;
- `_Linear` and `_MLP` are one autograd function for a whole module, whose FP8 operands are inputs without a
  gradient;
- each module updates its own scales after its forward and its backward pass. Uncompiled, one launch updates
  all scales, so a module that runs twice in a region has other scales compiled than uncompiled;
- weights' gradients are outputs of the graph: `main_grad` is not used.

The kernels are those of fused.py, so outputs, gradients and scales equal an uncompiled pass bit for bit, as
long as PyTorch's own operations do: Inductor reduces in another order, and rounds dropout differently.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fast_kernels import casts, scales
from fast_kernels.fp8 import FP8Data, Quantization, gradient_dtype
from fast_kernels.frozen import FrozenWeight
from fast_kernels.fused import forward_gemm, input_gradient, weight_gradient
from fast_kernels.library import input_names, operation

FORWARD_FP8 = torch.float8_e4m3fn
# Slots of a module's scales; see ScalingState
INPUT, WEIGHT, FC2_INPUT, FC2_WEIGHT = 0, 1, 3, 4  # forward
GRADIENT, FC2_GRADIENT = 0, 2  # backward


@operation("(Tensor scale) -> Tensor")
def read_scales(scale):
    """Copy the scales. An operation, so that selective checkpointing can name it: a recomputation quantizes
    with the scales of the first pass, and these have changed by then."""
    return scale.clone()


def _must_save(context, op, *args, **kwargs):
    return op is torch.ops.fast_kernels.read_scales.default


# A recomputation changes no FP8 state: autograd's graph recomputes only what gradients depend on.
checkpoint_contexts = partial(create_selective_checkpoint_contexts, _must_save)


class GradientScaling(NamedTuple):
    """How the output gradients of a module's GEMMs are quantized."""

    state: object  # the module's ScalingState
    fp8_dtype: torch.dtype
    update_arguments: tuple  # of `update_scales`

    def quantization(self, slot):
        return self.state.quantization(slot, self.fp8_dtype)

    def update(self):
        """Update the scales, after the module's backward pass."""
        update_scales(self.state, *self.update_arguments)


def run(module, x, region, is_training, is_first_microbatch):
    """Return the output of a module, (N, out), for x (N, in), BF16, and in training update its scales."""
    recipe = region.recipe
    module.allocate_state_while_tracing(
        recipe.margin, recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo,
        recipe.reduce_amax, bool(is_first_microbatch))
    for name in module.weight_names:
        module.check_dtype(getattr(module, name), x)
    state = module.fp8_meta["scaling_fwd"]
    scale = read_scales(state.scale)

    def quantization(slot):
        return Quantization(scale[slot:slot + 1], state.amax_history[0, slot:slot + 1], FORWARD_FP8)

    maxima = recipe.fp8_format.value
    group = "" if region.group is None else region.group.group_name
    update_options = recipe.margin, recipe.amax_compute_algo, recipe.reduce_amax, group
    gradient_scaling = GradientScaling(
        module.fp8_meta["scaling_bwd"], gradient_dtype(recipe.fp8_format), (maxima.max_bwd, *update_options))
    run_gemms = _run_linear if len(module.weight_names) == 1 else _run_mlp
    y = run_gemms(module, x.contiguous(), quantization, gradient_scaling, is_first_microbatch)
    if is_training:
        update_scales(state, maxima.max_fwd, *update_options)
    return y


def _run_linear(module, x, quantization, gradient_scaling, is_first_microbatch):
    """Run a Linear or a LayerNormLinear. quantization: slot -> how its tensor is quantized."""
    norm_weight = getattr(module, "layer_norm_weight", None)  # None: a Linear
    norm_bias = getattr(module, "layer_norm_bias", None)
    with torch.no_grad():
        if norm_weight is None:
            mean = rstd = None
            fp8_x, _ = casts.cast(x.detach(), quantization(INPUT))
        else:
            fp8_x, mean, rstd = _norm(module, x, quantization(INPUT))
        fp8_weight = module.quantized_weight(0, quantization(WEIGHT), is_first_microbatch)
    return _Linear.apply(
        x, norm_weight, norm_bias, _trained(module.weight), module.bias, mean, rstd, fp8_x, fp8_weight,
        gradient_scaling)


def _run_mlp(module, x, quantization, gradient_scaling, is_first_microbatch):
    """Run a LayerNormMLP. Arguments as of `_run_linear`."""
    with torch.no_grad():
        fp8_x, mean, rstd = _norm(module, x, quantization(INPUT))
        fp8_fc1 = module.quantized_weight(0, quantization(WEIGHT), is_first_microbatch)
        hidden = forward_gemm(fp8_x, fp8_fc1, _detach(module.fc1_bias))
        fp8_act = casts.activate(module.activation, hidden, quantization(FC2_INPUT))
        fp8_fc2 = module.quantized_weight(1, quantization(FC2_WEIGHT), is_first_microbatch)
    return _MLP.apply(
        x, module.layer_norm_weight, module.layer_norm_bias, _trained(module.fc1_weight), module.fc1_bias,
        _trained(module.fc2_weight), module.fc2_bias, mean, rstd, fp8_x, fp8_fc1, module.activation, hidden,
        fp8_act, fp8_fc2, gradient_scaling)


def _norm(module, x, quantization):
    """Return the module's norm of x in FP8, and its mean (None for RMSNorm) and rstd."""
    _, fp8_x, mean, rstd = casts.norm(
        x.detach(), None, module.layer_norm_weight.detach(), _detach(module.layer_norm_bias),
        module.eps, quantization)
    return fp8_x, mean, rstd


def _trained(weight):
    """Return a weight, or None if it is frozen in FP8: a graph has no inputs of that type."""
    return None if isinstance(weight, FrozenWeight) else weight


def _detach(parameter):
    return None if parameter is None else parameter.detach()


def update_scales(state, fp8_max, margin, algorithm, reduces_amax, group):
    """Update one module's scales after its forward or backward pass; with reduces_amax, after taking the
    largest amax over the ranks of the group of that name ("": all ranks)."""
    scale, history = state.scale, state.amax_history
    if reduces_amax and dist.is_initialized() and dist.get_world_size() > 1:
        functional = torch.ops._c10d_functional
        amax = functional.all_reduce(history[0].clone(), "max", group or dist.group.WORLD.group_name)
        history[0].copy_(functional.wait_tensor(amax))
    scales.update_one(scale, history, fp8_max, margin, algorithm)


# The modules as autograd functions. x, which is before the norm, and the parameters are inputs to receive
# gradients. The others get none: mean and rstd of the norm; fp8_…, an FP8Data; gradient_scaling.
# This is not saved with save_for_backward, because the backward pass changes its state in place.

TracedLinearInputs = input_names(
    "TracedLinearInputs", "x norm_weight norm_bias weight bias mean rstd fp8_x fp8_weight gradient_scaling")
TracedMLPInputs = input_names(
    "TracedMLPInputs",
    "x norm_weight norm_bias fc1_weight fc1_bias fc2_weight fc2_bias mean rstd fp8_x fp8_fc1 activation "
    "hidden fp8_act fp8_fc2 gradient_scaling")


class _Linear(torch.autograd.Function):
    """Linear and LayerNormLinear."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, mean, rstd, fp8_x, fp8_weight,
                gradient_scaling):
        ctx.gradient_scaling = gradient_scaling
        if norm_weight is None:
            x = None  # only the norm's backward pass reads it
        ctx.save_for_backward(
            x, norm_weight, mean, rstd, fp8_x.columnwise, fp8_x.scale_inv, *fp8_weight.for_backward())
        return forward_gemm(fp8_x, fp8_weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, norm_weight, mean, rstd, x_columnwise, x_inv, *fp8_weight = ctx.saved_tensors
        needs = TracedLinearInputs(*ctx.needs_input_grad)
        dx = dnorm_weight = dnorm_bias = dweight = None
        fp8_dy, dbias = casts.cast(
            dy.contiguous(), ctx.gradient_scaling.quantization(GRADIENT), with_dbias=needs.bias)
        if needs.weight:
            dweight = weight_gradient(fp8_dy, FP8Data(None, x_columnwise, x_inv))
        if needs.x or needs.norm_weight or needs.norm_bias:
            dx = input_gradient(fp8_dy, FP8Data(*fp8_weight))
            if norm_weight is not None:
                norm = casts.norm_backward(dx, x, mean, rstd, norm_weight, None)
                dx, dnorm_weight, dnorm_bias = norm.dx, norm.dweight, norm.dbias
        ctx.gradient_scaling.update()
        return tuple(TracedLinearInputs(
            x=dx, norm_weight=dnorm_weight, norm_bias=dnorm_bias, weight=dweight, bias=dbias))


class _MLP(torch.autograd.Function):
    """LayerNormMLP. hidden: the output of fc1. act: after the activation."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, mean, rstd, fp8_x,
                fp8_fc1, activation, hidden, fp8_act, fp8_fc2, gradient_scaling):
        ctx.gradient_scaling = gradient_scaling
        ctx.activation = activation
        ctx.save_for_backward(
            x, norm_weight, mean, rstd, hidden, fp8_x.columnwise, fp8_x.scale_inv, fp8_act.columnwise,
            fp8_act.scale_inv, *fp8_fc1.for_backward(), *fp8_fc2.for_backward())
        return forward_gemm(fp8_act, fp8_fc2, fc2_bias)

    @staticmethod
    def backward(ctx, dy):
        (x, norm_weight, mean, rstd, hidden, x_columnwise, x_inv, act_columnwise, act_inv,
         *weights) = ctx.saved_tensors
        fp8_fc1, fp8_fc2 = FP8Data(*weights[:3]), FP8Data(*weights[3:])
        needs = TracedMLPInputs(*ctx.needs_input_grad)
        dx = dnorm_weight = dnorm_bias = dfc1_weight = dfc1_bias = dfc2_weight = None
        # fc2
        fp8_dy, dfc2_bias = casts.cast(
            dy.contiguous(), ctx.gradient_scaling.quantization(FC2_GRADIENT), with_dbias=needs.fc2_bias)
        if needs.fc2_weight:
            dfc2_weight = weight_gradient(fp8_dy, FP8Data(None, act_columnwise, act_inv))
        # activation and fc1
        needs_dx = needs.x or needs.norm_weight or needs.norm_bias
        if needs_dx or needs.fc1_weight or needs.fc1_bias:
            dact = input_gradient(fp8_dy, fp8_fc2)
            fp8_dhidden, dfc1_bias = casts.activate_backward(
                ctx.activation, dact, hidden, ctx.gradient_scaling.quantization(GRADIENT),
                with_dbias=needs.fc1_bias)
        if needs.fc1_weight:
            dfc1_weight = weight_gradient(fp8_dhidden, FP8Data(None, x_columnwise, x_inv))
        # norm
        if needs_dx:
            dx = input_gradient(fp8_dhidden, fp8_fc1)
            norm = casts.norm_backward(dx, x, mean, rstd, norm_weight, None)
            dx, dnorm_weight, dnorm_bias = norm.dx, norm.dweight, norm.dbias
        ctx.gradient_scaling.update()
        return tuple(TracedMLPInputs(
            x=dx, norm_weight=dnorm_weight, norm_bias=dnorm_bias, fc1_weight=dfc1_weight, fc1_bias=dfc1_bias,
            fc2_weight=dfc2_weight, fc2_bias=dfc2_bias))
