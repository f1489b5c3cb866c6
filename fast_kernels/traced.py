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
from fast_kernels.fused import input_gradient
from fast_kernels.gemm import gemm
from fast_kernels.library import operation

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


def run(module, x, region, is_training, is_first_microbatch):
    """Return the output of a module, (N, out), for x (N, in), BF16, and in training update its scales."""
    recipe = region.recipe
    module.allocate_state_while_tracing(
        recipe.margin, recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo,
        recipe.reduce_amax, bool(is_first_microbatch))
    for name in module.weight_names:
        module.check_dtype(getattr(module, name), x)
    x = x.contiguous()
    norm_weight = getattr(module, "layer_norm_weight", None)  # None: a Linear
    norm_bias = getattr(module, "layer_norm_bias", None)
    state, gradient_state = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    scale = read_scales(state.scale)

    def quantization(slot):
        return scale[slot:slot + 1], state.amax_history[0, slot:slot + 1], FORWARD_FP8

    with torch.no_grad():
        if norm_weight is None:
            statistics = None, None
            fp8_x, _ = casts.cast(x.detach(), *quantization(INPUT))
        else:
            _, fp8_x, *statistics = casts.norm(
                x.detach(), None, None, norm_weight.detach(), _detach(norm_bias), module.eps,
                *quantization(INPUT))
        fp8_weight = module.quantized_weight(0, quantization(WEIGHT), is_first_microbatch)
    fp8_max = recipe.fp8_format.value
    group = "" if region.group is None else region.group.group_name
    update_options = recipe.margin, recipe.amax_compute_algo, recipe.reduce_amax, group
    gradient_dtype = torch.float8_e5m2 if fp8_max.max_bwd > fp8_max.max_fwd else FORWARD_FP8
    gradients = GradientScaling(gradient_state, gradient_dtype, (fp8_max.max_bwd, *update_options))
    if len(module.weight_names) == 1:
        y = _Linear.apply(
            x, norm_weight, norm_bias, module.weight, module.bias, statistics, fp8_x, fp8_weight, gradients)
    else:
        with torch.no_grad():
            hidden = _forward_gemm(fp8_x, fp8_weight)
            fp8_act = casts.activate(
                module.activation, hidden, _detach(module.fc1_bias), *quantization(FC2_INPUT))
            fp8_fc2 = module.quantized_weight(1, quantization(FC2_WEIGHT), is_first_microbatch)
        y = _MLP.apply(
            x, norm_weight, norm_bias, module.fc1_weight, module.fc1_bias, module.fc2_weight, module.fc2_bias,
            statistics, fp8_x, fp8_weight, module.activation, hidden, fp8_act, fp8_fc2, gradients)
    if is_training:
        update_scales(state, fp8_max.max_fwd, *update_options)
    return y


class GradientScaling(NamedTuple):
    """How the output gradients of a module's GEMMs are quantized."""

    state: object  # the module's ScalingState
    fp8_dtype: torch.dtype
    update_arguments: tuple  # of `update_scales`


def _detach(parameter):
    return None if parameter is None else parameter.detach()


def _forward_gemm(x, weight, bias=None):
    """Return x @ weightᵀ + bias of two FP8 tensors."""
    x_rowwise, _, x_inv = x
    weight_rowwise, _, weight_inv = weight
    return gemm(x_rowwise, x_inv, weight_rowwise, weight_inv, bias, "fast")


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
# gradients. The others get none: statistics, mean and rstd of the norm; fp8_…, an FP8 tensor (rowwise,
# columnwise, scale_inv); gradients, a GradientScaling. This is not saved with save_for_backward, because the
# backward pass changes it in place.

class _Linear(torch.autograd.Function):
    """Linear and LayerNormLinear."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, bias, statistics, fp8_x, fp8_weight, gradients):
        ctx.gradients = gradients
        if norm_weight is None:
            x = None  # only the norm's backward pass reads it
        _, *x_columnwise = fp8_x
        _, *w_columnwise = fp8_weight
        ctx.save_for_backward(x, norm_weight, *statistics, *x_columnwise, *w_columnwise)
        return _forward_gemm(fp8_x, fp8_weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, norm_weight, mean, rstd, x_columnwise, x_inv, w_columnwise, w_inv = ctx.saved_tensors
        needs_x, needs_norm_weight, needs_norm_bias, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dx = dnorm_weight = dnorm_bias = dweight = None
        quantized, dbias = casts.cast(
            dy.contiguous(), *_gradient_quantization(ctx, GRADIENT), with_dbias=needs_bias)
        dy_rowwise, dy_columnwise, dy_inv = quantized
        if needs_weight:
            dweight = gemm(dy_columnwise, dy_inv, x_columnwise, x_inv)
        if needs_x or needs_norm_weight or needs_norm_bias:
            dx = input_gradient(dy_rowwise, dy_inv, (w_columnwise, w_inv))
            if norm_weight is not None:
                dx, _, _, dnorm_weight, dnorm_bias = casts.norm_backward(
                    dx, x, mean, rstd, norm_weight, None)
        _update_gradient_scales(ctx)
        return dx, dnorm_weight, dnorm_bias, dweight, dbias, None, None, None, None


class _MLP(torch.autograd.Function):
    """LayerNormMLP. hidden: the output of fc1 without its bias. act: after the activation."""

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, statistics,
                fp8_x, fp8_fc1, activation, hidden, fp8_act, fp8_fc2, gradients):
        ctx.gradients = gradients
        ctx.activation = activation
        columnwise = []  # and scale_inv: what dgrad and wgrad read
        for _, *data_and_scale in (fp8_x, fp8_fc1, fp8_act, fp8_fc2):
            columnwise += data_and_scale
        ctx.save_for_backward(x, norm_weight, *statistics, fc1_bias, hidden, *columnwise)
        return _forward_gemm(fp8_act, fp8_fc2, fc2_bias)

    @staticmethod
    def backward(ctx, dy):
        (x, norm_weight, mean, rstd, fc1_bias, hidden, x_columnwise, x_inv, fc1_columnwise, fc1_inv,
         act_columnwise, act_inv, fc2_columnwise, fc2_inv) = ctx.saved_tensors
        (needs_x, needs_norm_weight, needs_norm_bias, needs_fc1_weight, needs_fc1_bias, needs_fc2_weight,
         needs_fc2_bias, *_) = ctx.needs_input_grad
        dx = dnorm_weight = dnorm_bias = dfc1_weight = dfc1_bias = dfc2_weight = None
        # fc2
        quantized, dfc2_bias = casts.cast(
            dy.contiguous(), *_gradient_quantization(ctx, FC2_GRADIENT), with_dbias=needs_fc2_bias)
        dy_rowwise, dy_columnwise, dy_inv = quantized
        if needs_fc2_weight:
            dfc2_weight = gemm(dy_columnwise, dy_inv, act_columnwise, act_inv)
        # activation and fc1
        needs_dx = needs_x or needs_norm_weight or needs_norm_bias
        if needs_dx or needs_fc1_weight or needs_fc1_bias:
            dact = input_gradient(dy_rowwise, dy_inv, (fc2_columnwise, fc2_inv))
            quantized, dfc1_bias = casts.activate_backward(
                ctx.activation, dact, hidden, fc1_bias, *_gradient_quantization(ctx, GRADIENT))
            dhidden_rowwise, dhidden_columnwise, dhidden_inv = quantized
        if needs_fc1_weight:
            dfc1_weight = gemm(dhidden_columnwise, dhidden_inv, x_columnwise, x_inv)
        # norm
        if needs_dx:
            dx = input_gradient(dhidden_rowwise, dhidden_inv, (fc1_columnwise, fc1_inv))
            dx, _, _, dnorm_weight, dnorm_bias = casts.norm_backward(dx, x, mean, rstd, norm_weight, None)
        _update_gradient_scales(ctx)
        return (dx, dnorm_weight, dnorm_bias, dfc1_weight, dfc1_bias, dfc2_weight, dfc2_bias,
                None, None, None, None, None, None, None, None)


def _gradient_quantization(ctx, slot):
    """Return how an output gradient is quantized."""
    state = ctx.gradients.state
    return state.scale[slot:slot + 1], state.amax_history[0, slot:slot + 1], ctx.gradients.fp8_dtype


def _update_gradient_scales(ctx):
    update_scales(ctx.gradients.state, *ctx.gradients.update_arguments)
