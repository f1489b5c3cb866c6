"""The modules of modules.py under torch.compile. FP8 kernels are opaque operations in one graph; Inductor
fuses the PyTorch code between them. `Module.forward` calls `run` while it is traced inside an FP8 region.

A graph cannot create state, and autograd cannot pass FP8 gradients between modules. So here
- `Module.prepare` allocates the FP8 state at trace time;
- `_Module` is one autograd function per module, whose FP8 operands are inputs without a gradient;
- each module updates its own scales after its forward and its backward pass. Uncompiled, one launch updates
  all scales, so a module that runs twice in a region has other scales compiled than uncompiled;
- weights' gradients are outputs of the graph: `main_grad` is not used.

The kernels are those of fused.py, so outputs, gradients and scales equal an uncompiled pass bit for bit, as
long as PyTorch's own operations do: Inductor reduces in another order, and rounds dropout differently.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from fast_kernels import casts, scales
from fast_kernels.fused import forward_gemm, input_gradient
from fast_kernels.gemm import gemm
from fast_kernels.library import operation

FORWARD_FP8 = torch.float8_e4m3fn


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
    recipe, names, x = region.recipe, module.weight_names, x.contiguous()
    module.prepare(recipe.margin, recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo,
                   recipe.reduce_amax, bool(is_first_microbatch))
    norm = [getattr(module, f"layer_norm_{name}", None) for name in ("weight", "bias")]
    weights = [getattr(module, name) for name in names]
    for weight in weights:
        module.check_dtype(weight, x)
    biases = [getattr(module, name.replace("weight", "bias")) for name in names]
    state, gradient_state = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    scale = read_scales(state.scale)

    def quantization(slot):  # 0, 1: input and weight of the first GEMM; 3, 4: of the second; see ScalingState
        return scale[slot:slot + 1], state.amax_history[0, slot:slot + 1], FORWARD_FP8

    mean = rstd = hidden = None
    with torch.no_grad():
        if norm[0] is None:
            quantized, _ = casts.cast(x.detach(), *quantization(0))
        else:
            _, quantized, mean, rstd = casts.norm(
                x.detach(), None, None, *(w if w is None else w.detach() for w in norm), module.eps,
                *quantization(0))
        operands = [*quantized, *module.quantized_weight(0, quantization(1), is_first_microbatch)]
        if len(names) == 2:
            hidden = forward_gemm(None, *operands)
            bias = None if biases[0] is None else biases[0].detach()
            quantized = casts.activate(module.activation, hidden, bias, *quantization(3))
            operands += [*quantized, *module.quantized_weight(1, quantization(4), is_first_microbatch)]
    fp8_max = recipe.fp8_format.value
    group = "" if region.group is None else region.group.group_name
    options = recipe.margin, recipe.amax_compute_algo, recipe.reduce_amax, group
    gradient_dtype = torch.float8_e5m2 if fp8_max.max_bwd > fp8_max.max_fwd else FORWARD_FP8
    absent = [None] * (2 - len(names))  # of a module with one GEMM: the second weight and bias
    y = _Module.apply(
        x, *norm, *weights, *absent, *biases, *absent, mean, rstd, hidden, gradient_state, gradient_dtype,
        getattr(module, "activation", None), (fp8_max.max_bwd, *options), *operands)
    if is_training:
        update_scales(state, fp8_max.max_fwd, *options)
    return y


def update_scales(state, fp8_max, margin, algorithm, reduces_amax, group):
    """Update one module's scales after its forward or backward pass; with reduces_amax, after taking the
    largest amax over the ranks of the group of that name ("": all ranks)."""
    scale, history = state.scale, state.amax_history
    if reduces_amax and dist.is_initialized() and dist.get_world_size() > 1:
        functional = torch.ops._c10d_functional
        amax = functional.all_reduce(history[0].clone(), "max", group or dist.group.WORLD.group_name)
        history[0].copy_(functional.wait_tensor(amax))
    scales.update_one(scale, history, fp8_max, margin, algorithm)


class _Module(torch.autograd.Function):
    """Linear, LayerNormLinear and LayerNormMLP.

    operands: for each GEMM its input and its weight, quantized: rowwise, columnwise, scale_inv. x, before the
    norm, and the parameters are arguments to receive gradients. `state`, the ScalingState of gradients, is
    not saved with save_for_backward, because the backward pass changes it in place.
    """

    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, weight, fc2_weight, bias, fc2_bias, mean, rstd, hidden, state,
                fp8, activation, update_options, *operands):
        ctx.has_norm, ctx.is_mlp = norm_weight is not None, hidden is not None
        ctx.has_mean, ctx.has_bias, ctx.operand_count = mean is not None, bias is not None, len(operands)
        ctx.state, ctx.fp8, ctx.activation, ctx.update_options = state, fp8, activation, update_options
        saved = [*operands[1:3], *operands[4:6]]  # columnwise, for wgrad and dgrad
        if ctx.is_mlp:
            saved += [*operands[7:9], *operands[10:], hidden, *([bias] if ctx.has_bias else [])]
        if ctx.has_norm:
            saved += [x, norm_weight, rstd, *([mean] if ctx.has_mean else [])]
        ctx.save_for_backward(*saved)
        return forward_gemm(fc2_bias if ctx.is_mlp else bias, *operands[-6:])

    @staticmethod
    def backward(ctx, dy):
        (needs_x, needs_norm, needs_norm_bias, needs_weight, needs_fc2, needs_bias,
         needs_fc2_bias) = ctx.needs_input_grad[:7]
        scale, history, saved = ctx.state.scale, ctx.state.amax_history, list(ctx.saved_tensors)
        x, x_inv, weight, weight_inv = saved[:4]
        needs_input = needs_x or needs_norm or needs_norm_bias
        dx = dnorm = dnorm_bias = dweight = dbias = dfc2 = dfc2_bias = None
        quantization = scale[:1], history[0, :1], ctx.fp8  # slot 0: the first GEMM's output gradient
        if ctx.is_mlp:
            act, act_inv, fc2, fc2_inv, hidden = saved[4:9]
            saved = saved[9:]
            bias = saved.pop(0) if ctx.has_bias else None
            dy_fp8, dfc2_bias = casts.cast(  # slot 2: the second one's
                dy.contiguous(), scale[2:3], history[0, 2:3], ctx.fp8, with_dbias=needs_fc2_bias)
            if needs_fc2:  # wgrad
                dfc2 = gemm(act, act_inv, *dy_fp8[1:])
            if needs_input or needs_weight or needs_bias:
                dact = input_gradient(dy_fp8, (fc2, fc2_inv))
                dy_fp8, dbias = casts.activate_backward(ctx.activation, dact, hidden, bias, *quantization)
        else:
            saved = saved[4:]
            dy_fp8, dbias = casts.cast(dy.contiguous(), *quantization, with_dbias=needs_bias)
        if needs_weight:
            dweight = gemm(x, x_inv, *dy_fp8[1:])
        if needs_input:
            dx = input_gradient(dy_fp8, (weight, weight_inv))
            if ctx.has_norm:
                residual, norm_weight, rstd = saved[:3]
                dx, _, _, dnorm, dnorm_bias = casts.norm_backward(
                    dx, residual, saved[3] if ctx.has_mean else None, rstd, norm_weight, None)
        update_scales(ctx.state, *ctx.update_options)
        gradients = dx, dnorm, dnorm_bias, dweight, dfc2, dbias, dfc2_bias
        return *gradients, *[None] * (7 + ctx.operand_count)
