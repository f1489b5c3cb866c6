"""The modules' passes under torch.compile, as one graph: FP8 operations that the compiler does not look into,
and between them what Inductor fuses.

A graph can neither create state nor hand an FP8 gradient from module to module. So here
- `Module.prepare` creates the FP8 state of a module while the compiler traces it;
- the FP8 operands of a module's GEMMs are computed outside autograd, and `_Module` has the gradient of the
  module as a whole;
- each module updates its own scales, forward and backward, in place of one launch for all. The scales are
  the same unless a module runs twice in one `autocast` region.

Kernels, and with them all bits, are those of the passes that are not compiled (fast_kernels/fused.py).
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fast_kernels import casts, scales
from fast_kernels.fused import input_gradient
from fast_kernels.gemm import gemm
from fast_kernels.library import operation

FP8 = torch.float8_e4m3fn  # of the forward pass


@operation("(Tensor scale) -> Tensor")
def read_scales(scale):
    """Return a copy: scales change before the backward pass, and a recomputation needs those of the first
    pass (`checkpoint_contexts`)."""
    return scale.clone()


def _saves(context, op, *args, **kwargs):
    return op is torch.ops.fast_kernels.read_scales.default


checkpoint_contexts = partial(create_selective_checkpoint_contexts, _saves)


def run(module, x, region, is_first_microbatch):
    """Return the output of a module, (N, out), for x (N, in), BF16, and update the module's scales."""
    recipe, names = region.recipe, module.weight_names
    module.check_dtype(x)
    module.prepare(recipe.margin, recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo,
                   recipe.reduce_amax, bool(is_first_microbatch))
    norm = [getattr(module, f"layer_norm_{name}", None) for name in ("weight", "bias")]
    weights = [getattr(module, name) for name in names]
    biases = [getattr(module, name.replace("weight", "bias")) if module.use_bias else None for name in names]
    state, of_gradients = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    scale = read_scales(state.scale)

    def quantization(slot):
        return scale[slot:slot + 1], state.amax_history[0, slot:slot + 1], FP8

    def quantize_weight(number):
        kept = module._fp8_workspaces.get(names[number])
        if is_first_microbatch is False and kept is not None:
            return kept
        out = kept if is_first_microbatch else None
        return casts.cast(weights[number].detach(), *quantization(3 * number + 1), out=out)[0]

    mean = rstd = hidden = None
    with torch.no_grad():
        if norm[0] is None:
            quantized, _ = casts.cast(x.detach().contiguous(), *quantization(0))
        else:
            _, quantized, mean, rstd = casts.norm(
                x.detach(), None, None, *(w if w is None else w.detach() for w in norm), module.eps,
                *quantization(0))
        operands = [*quantized, *quantize_weight(0)]
        if len(names) == 2:
            hidden = _forward_gemm(None, *operands)
            bias = None if biases[0] is None else biases[0].detach()
            quantized = casts.activate(module.activation, hidden, bias, *quantization(3))
            operands += [*quantized, *quantize_weight(1)]
    maximum, group = recipe.fp8_format.value, region.group.group_name if region.group is not None else ""
    update = recipe.margin, recipe.amax_compute_algo, recipe.reduce_amax, group
    of_output = torch.float8_e5m2 if maximum.max_bwd > maximum.max_fwd else FP8  # its gradient
    absent = [None] * (2 - len(names))
    y = _Module.apply(
        x, *norm, *weights, *absent, *biases, *absent, mean, rstd, hidden, of_gradients, of_output,
        getattr(module, "activation", None), (maximum.max_bwd, *update), *operands)
    if torch.is_grad_enabled():
        update_scales(state, maximum.max_fwd, *update)
    return y


def update_scales(state, fp8_max, margin, algorithm, reduces_amax, group):
    """Update the scales of one module after a pass in one direction; over the ranks of a group ("": all)."""
    scale, history = state.scale, state.amax_history
    if reduces_amax and dist.is_initialized() and dist.get_world_size() > 1:
        functional = torch.ops._c10d_functional
        amax = functional.all_reduce(history[0].clone(), "max", group or dist.group.WORLD.group_name)
        history[0].copy_(functional.wait_tensor(amax))
    scales.update_one(scale, history, fp8_max, margin, algorithm)


def _forward_gemm(bias, rowwise, columnwise, scale_inv, weight, weight_columnwise, weight_inv):
    return gemm(weight, weight_inv, rowwise, scale_inv, bias, "fast")


class _Module(torch.autograd.Function):
    """LayerNormLinear, Linear or LayerNormMLP, whose FP8 operands are known: input and weight of each GEMM.

    x, before the norm, and the parameters are inputs to receive gradients. The backward pass changes `state`,
    the ScalingState of the gradients, so `save_for_backward` must not have its tensors.
    """

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, fc2_weight, bias, fc2_bias, mean, rstd, hidden, state,
                fp8, activation, update, *operands):
        ctx.has_norm, ctx.is_mlp = norm_weight is not None, hidden is not None
        ctx.state, ctx.fp8, ctx.activation, ctx.update = state, fp8, activation, update
        ctx.optional = [tensor is not None for tensor in (mean, bias)]
        saved = [operands[1], operands[2], *operands[4:6]]
        if ctx.is_mlp:
            saved += [operands[7], operands[8], *operands[10:], hidden, *([bias] if bias is not None else [])]
        if ctx.has_norm:
            saved += [x, norm_weight, rstd, *([mean] if mean is not None else [])]
        ctx.save_for_backward(*saved)
        return _forward_gemm(fc2_bias if ctx.is_mlp else bias, *operands[-6:])

    @staticmethod
    def backward(ctx, dy):
        (needs_x, needs_norm, needs_norm_bias, needs_weight, needs_fc2, needs_bias,
         needs_fc2_bias) = ctx.needs_input_grad[:7]
        (has_mean, has_bias), saved = ctx.optional, list(ctx.saved_tensors)
        scale, history = ctx.state.scale, ctx.state.amax_history
        x, x_inv, weight, weight_inv = saved[:4]
        needs_input = needs_x or needs_norm or needs_norm_bias
        dx = dnorm = dnorm_bias = dweight = dbias = dfc2 = dfc2_bias = None
        quantization = scale[:1], history[0, :1], ctx.fp8
        if ctx.is_mlp:
            act, act_inv, fc2, fc2_inv, hidden = saved[4:9]
            saved = saved[9:]
            bias = saved.pop(0) if has_bias else None
            dy, dfc2_bias = casts.cast(
                dy.contiguous(), scale[2:3], history[0, 2:3], ctx.fp8, with_dbias=needs_fc2_bias)
            if needs_fc2:
                dfc2 = gemm(act, act_inv, *dy[1:])
            if needs_input or needs_weight or needs_bias:
                dact = input_gradient(dy, (fc2, fc2_inv))
                dy, dbias = casts.activate_backward(ctx.activation, dact, hidden, bias, *quantization)
        else:
            saved = saved[4:]
            dy, dbias = casts.cast(dy.contiguous(), *quantization, with_dbias=needs_bias)
        if needs_weight:
            dweight = gemm(x, x_inv, *dy[1:])
        if needs_input:
            dx = input_gradient(dy, (weight, weight_inv))
            if ctx.has_norm:
                residual, norm_weight, rstd = saved[:3]
                dx, _, _, dnorm, dnorm_bias = casts.norm_backward(
                    dx, residual, saved[3] if has_mean else None, rstd, norm_weight, None)
        update_scales(ctx.state, *ctx.update)
        gradients = dx, dnorm, dnorm_bias, dweight, dfc2, dbias, dfc2_bias
        return *gradients, *[None] * (7 + (12 if ctx.is_mlp else 6))
