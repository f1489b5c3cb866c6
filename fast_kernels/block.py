"""The training pass of a GPT in FP8 under delayed scaling, as one function: `training_pass`.

`fast_kernels.accelerate` puts the first three functions in the place of methods of `model_te_optimized.py`.
Each of Transformer Engine's (TE) modules reads its input from memory and writes its output to memory in BF16.
This file reads the modules' parameters, scales and amax histories itself, so that one kernel can finish one
module and start the next. With FP8(x) for x quantized, rowwise and transposed:

    residual += branch + bias                            what the block before adds to the residual
    hidden    = FP8(norm(residual)) @ FP8(weight)        norm_linear: QKV, and the first layer of the MLP
    branch    = FP8(activation(hidden + bias)) @ FP8(weight)
                                                         linear: attention's projection (without activation),
                                                         and the second layer of the MLP

- The bias of a GEMM is added by the kernel that reads its output. QKV adds its own, since attention follows
  it, and so does the last GEMM where lm_head is not in FP8.
- A gradient is quantized by the kernel that writes it, with the quantizer of the GEMM that reads it. It is
  passed through autograd as a `Float8Tensor`.
- Delayed scaling knows the scales before the values. Other recipes do not, so they fall back to the modules,
  which compute the same but for the accumulation in dgrad. Steps of both kinds can follow each other.
- One launch quantizes all weights.
- FSDP2 gathers a block's weights before the block and frees them after it. So a sharded block runs as a
  forward method of its own that FSDP2 knows, which quantizes its weights and passes on a copy of the bias.
- GEMMs run in cuBLASLt, with the algorithm that `gemm.py` has chosen, or else through TE. As in TE's recipe,
  forward GEMMs use fast accumulation; dgrad and wgrad accumulate in float32. dgrad GEMMs with a small K may
  use fast accumulation too, where it is faster (`accelerate`, `dgrad_fast_accum_k`).

TE's own version of this is in `pytorch/module/layernorm_linear.py`, `linear.py` and `layernorm_mlp.py`.
"""

import types
import warnings
from collections import Counter

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from fast_kernels import casts as fast_casts
from fast_kernels import embedding as fast_embedding
from fast_kernels import gemm as fast_gemm
from fast_kernels import loss as fast_loss
from fast_kernels import support
from fast_kernels.attention import packed_attention

# ---------------------------------------------------------------- what replaces the model's methods


def forward(
    model, input_ids, labels=None, cu_seqlens=None, is_first_microbatch=None, kv_cache=None, **others
):
    """Replace `OptimizedGPT2Model.forward`.

    others: arguments that only an edited forward has; such a pass goes through it.
    """
    options = {"cu_seqlens": cu_seqlens, "is_first_microbatch": is_first_microbatch, "kv_cache": kv_cache}
    if torch.compiler.is_compiling() and model.config.use_fp8 and model.fp8_recipe.delayed():
        return _run_uncompiled(model, input_ids, labels, **options, **others)
    if kv_cache is None and not others and support.supports_pass(model):
        return training_pass(model, input_ids, labels, cu_seqlens, is_first_microbatch)
    # an edited forward may have fewer arguments: pass only those that were given
    given = {name: value for name, value in options.items() if value is not None}
    return type(model).forward(model, input_ids, labels, **given, **others)


@torch.compiler.disable(reason="Transformer Engine cannot trace DelayedScaling")
def _run_uncompiled(model, *args, **options):
    """Run `forward` eagerly, with the warning of `model_te_optimized.run_uncompiled`."""
    warnings.warn(
        "torch.compile: Transformer Engine cannot trace DelayedScaling, so the model runs uncompiled; "
        "set model.fp8_recipe = Float8CurrentScaling() to compile it",
        stacklevel=2,
    )
    return forward(model, *args, **options)


def mix(attention, qkv, rope=None, kv_cache=None, documents=None):
    """Replace `Attention.mix`."""
    fits = kv_cache is None and attention.kernel == "flash" and qkv.dtype == torch.bfloat16
    if not fits or not support.takes_attention(attention):
        return type(attention).mix(attention, qkv, rope, kv_cache, documents)
    config = attention.config
    norms = (attention.q_norm.weight, attention.k_norm.weight) if config.use_qk_norm else (None, None)
    return packed_attention(
        qkv, config.n_head, config.n_kv_head, rope, *norms, config.layernorm_epsilon,
        cu_seqlens=documents[0] if documents else None)


def cross_entropy(model, logits, labels):
    """Replace `OptimizedGPT2Model.cross_entropy`."""
    if not logits.is_cuda or not support.takes_loss(model):
        return type(model).cross_entropy(model, logits, labels)
    return fast_loss.cross_entropy(logits, labels, model.lm_head, model.logits_rounding)


# ---------------------------------------------------------------- the training pass


@fast_casts.on_input_device
def training_pass(model, input_ids, labels, cu_seqlens, is_first_microbatch):
    """Compute what the model's own forward computes, for a pass that `support.supports_pass`.

    Returns:
        Logits (B, S, vocab_size) BF16, or with labels their mean cross-entropy, scalar float32.
    """
    fast_accum_k = model.dgrad_fast_accum_k
    head_is_fused, is_sharded = _fuses_head(model), isinstance(model, FSDPModule)
    positions, rope, documents = model.locate(input_ids, cu_seqlens)
    # Tied embeddings: the backward pass of lm_head puts its gradient of the weight into this list, and that
    # of the embedding takes it out and adds to it in place. Autograd would add two tensors of that size.
    tied_dweight = [] if head_is_fused and model.lm_head.weight is model.wte.weight else None
    x = _embed(model, input_ids, positions, tied_dweight)
    with model.autocast():
        _prepare_modules(model, x)
        quantizes = is_first_microbatch is not False
        if quantizes and is_sharded:
            quantize_gathered_weights(_head_weights(model))
        elif quantizes:
            quantize_weights(model)

        residual, branch, branch_bias = x.flatten(0, 1), None, None  # (B·S, n_embd)
        for block in model.blocks:
            adds_bias = block is model.blocks[-1] and not head_is_fused
            arguments = (
                residual, branch, branch_bias, _gradient_quantizer(branch), input_ids.shape, rope, documents,
                fast_accum_k, adds_bias)
            if is_sharded:
                residual, branch, branch_bias = _sharded_pass(block)(quantizes, *arguments)
            else:
                residual, branch, branch_bias = block_pass(block, *arguments)

        if not head_is_fused:
            return model.output((residual + branch).view(x.shape), labels, is_first_microbatch)
        _, logits = norm_linear(
            residual, branch, branch_bias, _gradient_quantizer(branch), model.lm_head, "", fast_accum_k,
            adds_bias=True, tied_dweight=tied_dweight)
    if labels is None:
        return logits.view(*input_ids.shape, -1)
    return model.cross_entropy(logits, labels.flatten())


def block_pass(
    block, residual, branch, branch_bias, branch_quantizer, size, rope, documents, fast_accum_k, adds_bias
):
    """Compute a block of the training pass.

    Args:
        residual, branch, branch_bias, branch_quantizer: see `norm_linear`.
        size: (B, S).
        adds_bias: whether the last GEMM adds its bias.

    Returns:
        The residual, the block's branch, and its bias if it is still to be added, else None.
    """
    attn, mlp = block.attn, block.mlp
    residual, qkv = norm_linear(
        residual, branch, branch_bias, branch_quantizer, attn.qkv, "", fast_accum_k, adds_bias=True)
    y = attn.mix(qkv.view(*size, -1, attn.config.head_dim), rope, documents=documents)
    branch, branch_bias = linear(y.flatten(0, 1), None, None, attn.proj, "", fast_accum_k)
    residual, hidden = norm_linear(
        residual, branch, branch_bias, _gradient_quantizer(branch), mlp, "fc1_", fast_accum_k)
    branch, branch_bias = linear(
        hidden, mlp.activation, _bias_or_none(mlp, "fc1_bias"), mlp, "fc2_", fast_accum_k,
        adds_bias=adds_bias)
    return residual, branch, branch_bias


def _sharded_pass(block):
    """Return `_gathered_block_pass` between the hooks with which FSDP2 gathers and frees parameters."""
    if "fast_kernels_pass" not in vars(block):
        block.fast_kernels_pass = types.MethodType(_gathered_block_pass, block)
        register_fsdp_forward_method(block, "fast_kernels_pass")
    return block.fast_kernels_pass


def _gathered_block_pass(block, quantizes, *arguments):
    """Quantize the weights if asked to, and run `block_pass`.

    The quantized weights stay when FSDP2 frees the parameters, 2 bytes per weight on each rank: backward and
    later micro-batches read them. The bias is copied, since the next block adds it.
    """
    if quantizes:
        quantize_gathered_weights(_block_weights(block))
    residual, branch, branch_bias = block_pass(block, *arguments)
    return residual, branch, None if branch_bias is None else branch_bias.clone()


def _fuses_head(model):
    """Return whether the pass includes lm_head; otherwise the model's own `output` computes it."""
    return model.config.fp8_lm_head and model.config.loss_chunks == 1


def _embed(model, input_ids, positions, tied_dweight):
    """Return the sum of the token and position embeddings, (B, S, n_embd)."""
    if model.config.use_rotary:
        return fast_embedding.embed(input_ids, model.wte.weight, tied_dweight=tied_dweight)
    return fast_embedding.embed(input_ids, model.wte.weight, positions, model.wpe.weight, tied_dweight)


def _prepare_modules(model, x):
    """Update the FP8 state of every module, as its own forward pass does."""
    # a module is listed once for each of its GEMMs
    for module, gemms in Counter(module for module, _ in _quantized_weights(model)).items():
        module.prepare_forward(x, num_gemms=gemms)
        module.end_forward()


def _block_weights(block):
    return [(block.attn.qkv, ""), (block.attn.proj, ""), (block.mlp, "fc1_"), (block.mlp, "fc2_")]


def _head_weights(model):
    return [(model.lm_head, "")] if _fuses_head(model) else []


def _quantized_weights(model):
    """Return (module, prefix) of each weight that is quantized, in the order of the forward pass."""
    return [weight for block in model.blocks for weight in _block_weights(block)] + _head_weights(model)


@torch.no_grad()
def quantize_weights(model):
    """Quantize all weights to FP8 in one launch.

    They are kept where TE keeps those of a gradient accumulation, so that a pass through the modules can use
    or renew them. Their memory stays the same: go backward before the next forward pass with other weights.
    """
    casts = [_weight_cast(module, prefix) for module, prefix in _quantized_weights(model)]
    model.fp8_cast_table = fast_casts.make_cast_table(casts, getattr(model, "fp8_cast_table", None))
    fast_casts.cast_all(model.fp8_cast_table)


@torch.no_grad()
def quantize_gathered_weights(weights):
    """Quantize weights that FSDP2 has gathered, with a launch for each.

    Args:
        weights: (module, prefix) of each. Their addresses may be others in each pass, and a table of them
            could not be written during the capture of a CUDA graph.
    """
    for module, prefix in weights:
        weight, out, scale, amax = _weight_cast(module, prefix)
        fast_casts.cast(weight, scale, amax, out[0].dtype, out=out)


def _weight_cast(module, prefix):
    """Return (weight, FP8 tensor to write, scale, amax), and allocate the FP8 tensor if there is none."""
    layer = _LinearLayer(module, prefix)
    scale, amax, dtype = _scale_amax_dtype(layer.weight_quantizer)
    if getattr(layer.quantized_weight(), "_transpose", None) is None:
        layer.weight_quantizer.set_usage(rowwise=True, columnwise=True)
        out = fast_casts.allocate_fp8(layer.weight, *layer.weight.shape, dtype)
        module._fp8_workspaces[f"{prefix}weight"] = _as_float8_tensor(out, layer.weight_quantizer)
    weight_fp8 = layer.quantized_weight()
    out = weight_fp8._data.view(dtype), weight_fp8._transpose.view(dtype), weight_fp8._scale_inv
    return layer.weight, out, scale, amax


def norm_linear(
    residual, branch, branch_bias, branch_quantizer, module, prefix, fast_accum_k, adds_bias=False,
    tied_dweight=None,
):
    """Add a branch to the residual, and apply a module's norm and GEMM to the sum.

    Args:
        residual, branch: (N, C) BF16; branch may be None.
        branch_bias: (C,) BF16 or None.
        branch_quantizer: `_gradient_quantizer(branch)`. The caller finds it, because FSDP2 puts a node of its
            own between a block and its inputs.
        module, prefix: a `te.LayerNormLinear` and "", or a `te.LayerNormMLP` and "fc1_".
        fast_accum_k: see `accelerate`, dgrad_fast_accum_k.
        adds_bias: whether the GEMM adds the module's bias.
        tied_dweight: a list that receives the weight's gradient in place of autograd, or None.

    Returns:
        residual + branch + branch_bias, (N, C), and norm(of that) @ weightᵀ (+ bias), (N, outputs), BF16.
    """
    bias = _bias_or_none(module, f"{prefix}bias") if adds_bias else None
    layer = _LinearLayer(module, prefix, fast_accum_k)
    return _NormLinear.apply(
        residual, branch, branch_bias, module.layer_norm_weight, module.layer_norm_bias, layer.weight, bias,
        module.eps, layer, branch_quantizer, tied_dweight)


def linear(x, activation, x_bias, module, prefix, fast_accum_k, adds_bias=False):
    """Compute activation(x + x_bias) @ weightᵀ.

    Args:
        x: (N, inputs) BF16, twice as wide for swiglu.
        activation: "gelu", "swiglu" or None; then x_bias is None.
        module, prefix: a `te.Linear` and "", or a `te.LayerNormMLP` and "fc2_".
        adds_bias: whether the GEMM adds the module's bias.

    Returns:
        (N, outputs) BF16, and the module's bias if it is still to be added, else None.
    """
    bias, layer = _bias_or_none(module, f"{prefix}bias"), _LinearLayer(module, prefix, fast_accum_k)
    out = _Linear.apply(
        x, x_bias, layer.weight, bias if adds_bias else None, activation, layer,
        _gradient_quantizer(x) if activation else None)
    return out, None if adds_bias else bias


# ---------------------------------------------------------------- Transformer Engine's FP8 tensors and GEMMs


def _bias_or_none(module, name):
    return getattr(module, name) if module.use_bias else None  # a TE module without biases has empty ones


def _gradient_quantizer(x):
    """Return the quantizer of x's gradient: that of the GEMM which computed x, for its backward GEMMs."""
    if x is None:
        return None
    if not hasattr(x.grad_fn, "grad_output_quantizer"):
        raise ValueError(
            "fast_kernels.block: a branch and the input of an activation must come unchanged from "
            "norm_linear or linear, since their gradients are passed on in FP8"
        )
    return x.grad_fn.grad_output_quantizer


def _scale_amax_dtype(quantizer):
    """Return what the kernels take of a quantizer of delayed scaling."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return quantizer.scale, quantizer.amax, TE_DType_To_Torch[quantizer.dtype]


class _LinearLayer:
    """One linear layer of a TE module: the quantizers of its input, weight and output gradient, and its FP8
    weight."""

    def __init__(self, module, prefix, fast_accum_k=0):
        # TE has a list of quantizers for each direction. Per GEMM, that of the forward pass has three: input,
        # weight, output; that of the backward pass two: gradient of the output, gradient of the input.
        gemm = 1 if prefix == "fc2_" else 0
        forward, backward = module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"]
        self.input_quantizer, self.weight_quantizer = forward[3 * gemm], forward[3 * gemm + 1]
        self.gradient_quantizer = backward[2 * gemm]
        self.module, self.name, self.fast_accum_k = module, f"{prefix}weight", fast_accum_k
        self.weight = getattr(module, self.name)

    def quantized_weight(self):
        """Return the FP8 weight that `quantize_weights`, or the first micro-batch's pass through the module,
        has written; None before the first."""
        return self.module._fp8_workspaces.get(self.name)


def _as_gemm_operand(rowwise, columnwise, scale_inv, quantizer):
    """Return FP8 data as TE's GEMMs take it. A copy that the GEMM does not read may be None."""
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    return Float8TensorStorage(
        data=None if rowwise is None else rowwise.view(torch.uint8),
        data_transpose=None if columnwise is None else columnwise.view(torch.uint8),
        fp8_scale_inv=scale_inv, fp8_dtype=quantizer.dtype, fake_dtype=torch.bfloat16)


def _as_float8_tensor(out, quantizer):
    """Return FP8 data as a tensor that autograd passes on."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    rowwise, columnwise, scale_inv = out
    return Float8Tensor(
        shape=rowwise.shape, dtype=torch.bfloat16, data=rowwise.view(torch.uint8),
        data_transpose=columnwise.view(torch.uint8), fp8_scale_inv=scale_inv, fp8_dtype=quantizer.dtype,
        quantizer=quantizer, device=rowwise.device)


def _gemm(a, b, layout="TN", bias=None, fast_accum_k=0, out=None, accumulate=False):
    """Run a GEMM with a BF16 result; write it to `out`, or add it to `out` if accumulate.

    Args:
        a, b: FP8 tensors of TE, with the copies that the layout reads. a is the weight or, for wgrad, the
            layer's input; b is the layer's input or, backward, the gradient of its output.
        layout: TE's name for the GEMM.
            "TN", forward: b @ aᵀ + bias.
            "NN", dgrad: b @ a.
            "NT", wgrad: bᵀ @ a.
        fast_accum_k: the largest K of a dgrad GEMM that may use fast accumulation.
    """
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    if layout == "TN":
        accumulation = "fast"
    elif layout == "NN" and b._data.shape[1] <= fast_accum_k:
        accumulation = "either"
    else:
        accumulation = "precise"
    if fast_gemm.is_supported():
        left = a._data if layout == "TN" else a._transpose
        right = b._transpose if layout == "NT" else b._data
        left, right = left.view(TE_DType_To_Torch[a._fp8_dtype]), right.view(TE_DType_To_Torch[b._fp8_dtype])
        result = fast_gemm.gemm(left, a._scale_inv, right, b._scale_inv, bias, accumulation, out, accumulate)
        if result is not None:
            return result
    precise = layout != "TN"  # as in TE's recipe: without timing, dgrad has no reason for fast accumulation
    return general_gemm(
        a, b, layout=layout, bias=bias, out_dtype=torch.bfloat16 if out is None else out.dtype, out=out,
        accumulate=accumulate, use_split_accumulator=precise, grad=precise,
    )[0]


def _weight_gradient(layer, x, gradient):
    """Return gradientᵀ @ x; in `main_grad` of a weight that has one, as Megatron-LM and TE do."""
    weight = layer.weight
    if getattr(weight, "main_grad", None) is None or weight._backward_hooks:  # a hook may change the gradient
        return _gemm(x, gradient, "NT")
    _gemm(x, gradient, "NT", out=weight.main_grad, accumulate=not weight.overwrite_main_grad)
    weight.overwrite_main_grad = False  # a second gradient of this backward pass is added
    weight.grad_added_to_main_grad = True
    return weight.main_grad.detach()  # autograd wants a gradient; this one is not copied


def _linear_backward(ctx, gradient, weight, x):
    """Return the gradients of a linear layer's input, weight, and bias or None.

    gradient: of its output, in BF16, or quantized by the kernel that computed it."""
    dbias = None
    if hasattr(gradient, "_data"):
        if ctx.use_bias:
            dbias = gradient.dequantize().sum(0)
    else:
        quantizer = _scale_amax_dtype(ctx.grad_output_quantizer)
        out, dbias = fast_casts.cast(gradient.contiguous(), *quantizer, with_dbias=ctx.use_bias)
        gradient = _as_gemm_operand(*out, ctx.grad_output_quantizer)
    dx = _gemm(weight, gradient, "NN", fast_accum_k=ctx.layer.fast_accum_k)  # dgrad: gradient @ weight
    dweight = _weight_gradient(ctx.layer, x, gradient)
    return dx, dweight, dbias


class _NormLinear(torch.autograd.Function):
    """`norm_linear`. `weight` is an input only to receive a gradient: the GEMM reads `layer`'s FP8 weight."""

    @staticmethod
    def forward(
        ctx, x, branch, branch_bias, norm_weight, norm_bias, weight, bias, eps, layer, branch_quantizer,
        tied_dweight,
    ):
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        quantizer = layer.input_quantizer
        residual, (rowwise, columnwise, scale_inv), mean, rstd = fast_casts.norm(
            x, branch, branch_bias, norm_weight, norm_bias, eps, *_scale_amax_dtype(quantizer))
        weight_fp8 = layer.quantized_weight()
        ctx.save_for_backward(
            residual, mean, rstd, norm_weight, columnwise, scale_inv, weight_fp8._transpose,
            weight_fp8._scale_inv)
        ctx.layer, ctx.branch_quantizer, ctx.tied_dweight = layer, branch_quantizer, tied_dweight
        ctx.has_branch_bias = branch_bias is not None
        # TE's names for these, which loss.py reads from lm_head's node, be it TE's or this one
        ctx.grad_output_quantizer, ctx.use_bias, ctx.debug = layer.gradient_quantizer, bias is not None, False
        # as in TE: the first module of the forward pass is the last one of the backward pass, after which the
        # scales of gradients are updated
        ctx.updates_scales = FP8GlobalStateManager.is_first_fp8_module()
        ctx.set_materialize_grads(False)
        return residual, _gemm(weight_fp8, _as_gemm_operand(rowwise, None, scale_inv, quantizer), bias=bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dresidual, gradient):
        residual, mean, rstd, norm_weight, normed, normed_inv, weight, weight_inv = ctx.saved_tensors
        dnorm, dweight, dbias = _linear_backward(
            ctx, gradient, _as_gemm_operand(None, weight, weight_inv, ctx.layer.weight_quantizer),
            _as_gemm_operand(None, normed, normed_inv, ctx.layer.input_quantizer))
        if ctx.tied_dweight is not None:
            ctx.tied_dweight.append(dweight)
            dweight = None
        quantizer = ctx.branch_quantizer
        dx, out, dbranch_bias, dnorm_weight, dnorm_bias = fast_casts.norm_backward(
            dnorm, residual, mean, rstd, norm_weight, dresidual,
            quantizer and _scale_amax_dtype(quantizer), with_dbranch_bias=ctx.has_branch_bias)
        dbranch = quantizer and _as_float8_tensor(out, quantizer)
        if ctx.updates_scales:
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager

            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, dbranch, dbranch_bias, dnorm_weight, dnorm_bias, dweight, dbias, None, None, None, None


class _Linear(torch.autograd.Function):
    """`linear`. For `weight` see `_NormLinear`."""

    @staticmethod
    def forward(ctx, x, x_bias, weight, bias, activation, layer, x_quantizer):
        quantizer = _scale_amax_dtype(layer.input_quantizer)
        if activation:
            rowwise, columnwise, scale_inv = fast_casts.activate(activation, x, x_bias, *quantizer)
        else:
            (rowwise, columnwise, scale_inv), _ = fast_casts.cast(x, *quantizer)
        weight_fp8 = layer.quantized_weight()
        activation_input = (x, x_bias) if activation else (None, None)
        ctx.save_for_backward(
            *activation_input, columnwise, scale_inv, weight_fp8._transpose, weight_fp8._scale_inv)
        ctx.layer, ctx.activation, ctx.x_quantizer = layer, activation, x_quantizer
        ctx.grad_output_quantizer, ctx.use_bias, ctx.debug = layer.gradient_quantizer, bias is not None, False
        x_fp8 = _as_gemm_operand(rowwise, None, scale_inv, layer.input_quantizer)
        return _gemm(weight_fp8, x_fp8, bias=bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, x_bias, activated, activated_inv, weight, weight_inv = ctx.saved_tensors
        dx, dweight, dbias = _linear_backward(
            ctx, gradient, _as_gemm_operand(None, weight, weight_inv, ctx.layer.weight_quantizer),
            _as_gemm_operand(None, activated, activated_inv, ctx.layer.input_quantizer))
        dx_bias = None
        if ctx.activation:
            dx, dx_bias = fast_casts.activate_backward(
                ctx.activation, dx, x, x_bias, *_scale_amax_dtype(ctx.x_quantizer))
            dx = _as_float8_tensor(dx, ctx.x_quantizer)
        return dx, dx_bias, dweight, dbias, None, None, None
