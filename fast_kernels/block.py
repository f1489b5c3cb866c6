"""The training pass of a GPT's blocks and output head in FP8, written out: matrix products, and between them
the kernels of `fast_kernels/casts.py`.

Transformer Engine's modules each read their input from memory and write their output to it in BF16. Here the
same parameters, scales and amax histories, which stay in those modules, are used across their borders. With
`FP8` for "times its scale, cast, by rows and transposed":

    stream += branch + bias the residual stream, and what the block before adds to it hidden =
    FP8(norm(stream)) @ FP8(weight) NormLinear: QKV, the MLP's first product branch = FP8(activation(hidden +
    bias)) @ FP8(weight) Linear: attention's projection (without activation), the MLP's second product

- A product's bias belongs to whoever reads its output next: the residual stream, the activation. Attention
  stands between a QKV product and its reader: that product adds its bias itself. So does the last one, where
  the head is not in FP8.
- So does the cast of a gradient: the gradient of the stream is added up and cast for the branch's product,
  that of an activation's input for the product before. They are handed over as a `Float8Tensor`, which
  autograd passes on like any tensor.
- This is delayed scaling, which knows the scales beforehand. Any other pass goes through the modules
  (`fast_kernels/support.py` says which and why), which compute the same but for dgrad's accumulation; one
  step may go this way and the next one that way.
- All weights are cast in one launch.
- GEMMs are cuBLASLt's, with the algorithm chosen by `fast_kernels/gemm.py`, or else Transformer Engine's own
  call. As under its default recipe, forward GEMMs use fast accumulation, dgrad and wgrad accumulate in
  float32. dgrad with a small K may use fast accumulation as well (`accelerate`), where that is faster.

The modules' own way of doing this is in Transformer Engine's `pytorch/module/layernorm_linear.py`,
`linear.py` and `layernorm_mlp.py`.
"""

import weakref
from collections import Counter

import torch

from fast_kernels import casts as fast_casts
from fast_kernels import embedding as fast_embedding
from fast_kernels import gemm as fast_gemm
from fast_kernels import support as fast_support
from fast_kernels.support import takes_pass  # noqa: F401  asked by the model before it calls the functions below

# The largest K of a dgrad GEMM that may use fast accumulation: up to it, the tensor cores' accumulator adds
# less of an error than BF16's rounding after it in the median GEMM of models in training, and about as much
# in the worst (bench/accumulation.py). A wgrad's K is the number of tokens, where it would add about 3 %.
DGRAD_FAST_ACCUM_K = 3072


def accelerate(model, dgrad_fast_accum_k=DGRAD_FAST_ACCUM_K):
    """Set the kernels' options for a model; without a call the defaults hold.

    Args:
        dgrad_fast_accum_k: the largest K of a dgrad GEMM that may use FP8 fast accumulation, which is then
        taken where
            it is faster. 0: never, as in Transformer Engine's recipe.

    Returns:
        Why training passes go through the modules, or "" where the kernels take them.
    """
    if dgrad_fast_accum_k < 0:
        raise ValueError(
            f"dgrad_fast_accum_k={dgrad_fast_accum_k}: must be 0 or more; {DGRAD_FAST_ACCUM_K} works"
        )
    model.dgrad_fast_accum_k = dgrad_fast_accum_k
    for block in model.blocks:
        fast_support.settle_attention(block.attn)
    return fast_support.unsupported_reason(model, said=True)


@fast_casts.on_input_device
def embed(model, tokens, positions):
    """The sum of `model.wte` and, if there is one, `model.wpe` -> (B, S, n_embd). Call it before `logits`, in
    each pass."""
    elsewhere = [] if _takes_head(model) and model.lm_head.weight is model.wte.weight else None
    _passes[model] = {"elsewhere": elsewhere}
    if model.config.use_rotary:
        return fast_embedding.embed(tokens, model.wte.weight, tied_dweight=elsewhere)
    return fast_embedding.embed(tokens, model.wte.weight, positions, model.wpe.weight, elsewhere)


@fast_casts.on_input_device
def blocks(model, x, rope=None, is_first_microbatch=None, documents=None):
    """`model.blocks`, one after the other, inside `te.autocast`: (B, S, n_embd) -> (B, S, n_embd). The
    arguments are those of `Block.forward`. With the head in FP8, what the last block adds to the stream is
    still missing: `logits` adds it."""
    for module, products in Counter(module for module, _ in _weights(model)).items():
        module.prepare_forward(x, num_gemms=products)  # FP8 state, as in a forward pass of the module
        module.end_forward()
    if is_first_microbatch is not False:
        cast_weights(model)
    shape, head_follows = x.shape, _takes_head(model)
    x, branch, bias = x.flatten(0, 1), None, None
    fast_k = _dgrad_fast_accum_k(model)
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        x, qkv = norm_linear(x, branch, bias, attn.qkv, "", fast_k, adds_bias=True)
        y = attn.mix(qkv.view(*shape[:2], -1, attn.config.head_dim), rope, documents=documents)
        branch, bias = linear(y.flatten(0, 1), None, None, attn.proj, "", fast_k)
        x, hidden = norm_linear(x, branch, bias, mlp, "fc1_", fast_k)
        adds_bias = block is model.blocks[-1] and not head_follows
        fc1_bias = _parameter(mlp, "fc1_bias")
        branch, bias = linear(hidden, mlp.activation, fc1_bias, mlp, "fc2_", fast_k, adds_bias=adds_bias)
    if not head_follows:
        return (x + branch).view(shape)
    _passes[model] |= {"branch": branch, "bias": bias}  # the head's norm adds them to the stream
    return x.view(shape)


@fast_casts.on_input_device
def logits(model, x, is_first_microbatch=None):
    """`model.lm_head`, after `blocks`: (N, n_embd) -> (N, vocab_size) BF16."""
    if _takes_head(model):
        return norm_linear(
            x, module=model.lm_head, name="", fast_k=_dgrad_fast_accum_k(model), adds_bias=True,
            **_passes.pop(model),
        )[1]
    return model.lm_head(x, is_first_microbatch=is_first_microbatch)


def _dgrad_fast_accum_k(model):
    return getattr(model, "dgrad_fast_accum_k", DGRAD_FAST_ACCUM_K)


def _takes_head(model):
    return model.config.fp8_lm_head and model.config.loss_chunks == 1


def _weights(model):
    """Where those lie that are cast to FP8: (module, "", "fc1_" or "fc2_"), in the order of the forward pass.
    """
    blocks = [
        weight
        for b in model.blocks
        for weight in ((b.attn.qkv, ""), (b.attn.proj, ""), (b.mlp, "fc1_"), (b.mlp, "fc2_"))
    ]
    return blocks + [(model.lm_head, "")] if _takes_head(model) else blocks


# of each model, in a pass: what the head's `norm_linear` gets from the embedding and the blocks
_passes = weakref.WeakKeyDictionary()
_casts = weakref.WeakKeyDictionary()  # of each model: its weights' addresses


@torch.no_grad()
def cast_weights(model):
    """All weights to FP8 in one launch, for there are many, and most are small. They are kept where TE keeps
    those of a gradient accumulation, so that a pass through the modules may use them, or renew them; in the
    same memory each time, so go backward before the next forward pass with other weights."""
    casts = []
    for module, name in _weights(model):
        product, weight = _Product(module, name), getattr(module, f"{name}weight")
        scale, amax, fp8 = _place(product.quantizer)
        if getattr(product.weight(), "_transpose", None) is None:
            product.quantizer.set_usage(rowwise=True, columnwise=True)
            module._fp8_workspaces[f"{name}weight"] = _hand_over(
                fast_casts.allocate_fp8(weight, *weight.shape, fp8), product.quantizer
            )
        kept = product.weight()
        casts.append((weight, (kept._data.view(fp8), kept._transpose, kept._scale_inv), scale, amax))
    _casts[model] = fast_casts.make_cast_table(casts, _casts.get(model))
    fast_casts.cast_all(_casts[model])


def norm_linear(x, branch, bias, module, name, fast_k, adds_bias=False, elsewhere=None):
    """Residual stream, norm and a product -> the stream x + branch + bias, and norm(stream) @ weightᵀ, with
    the product's bias if `adds_bias`.

    x, branch: (N, C) BF16; branch None: the stream is x. bias: (C,), the branch's, or None. `module`: a
    `te.LayerNormLinear` or `te.LayerNormMLP`, whose norm and product `name` ("" or "fc1_") it is. fast_k: see
    `accelerate`. elsewhere: a list that gets the weight's gradient, instead of autograd.
    """
    weight, own_bias = (
        getattr(module, f"{name}weight"),
        _parameter(module, f"{name}bias") if adds_bias else None,
    )
    return _NormLinear.apply(
        x, branch, bias, module.layer_norm_weight, module.layer_norm_bias, weight, own_bias, module.eps,
        _Product(module, name, fast_k), _quantizer_of(branch), elsewhere,
    )


def linear(x, activation, bias, module, name, fast_k, adds_bias=False):
    """activation(x + bias) @ weightᵀ -> (N, outputs) BF16, and the product's own bias, still to be added, or
    None.

    x: (N, inputs) BF16, twice as wide for swiglu. activation: "gelu", "swiglu", or None, then bias is None.
    `module`: a `te.Linear`, or the `te.LayerNormMLP` whose product `name` ("fc2_") it is.
    """
    own_bias = _parameter(module, f"{name}bias")
    branch = _Linear.apply(
        x, bias, getattr(module, f"{name}weight"), own_bias if adds_bias else None, activation,
        _Product(module, name, fast_k), _quantizer_of(x) if activation else None,
    )
    return branch, None if adds_bias else own_bias


def _parameter(module, name):
    return getattr(module, name) if module.use_bias else None  # TE has empty ones where there is no bias


def _quantizer_of(x):
    """What the product that x came out of casts x's gradient with."""
    if x is None:
        return None
    if not hasattr(x.grad_fn, "grad_output_quantizer"):
        raise ValueError(
            "fast_block: a branch, and what an activation reads, must be what linear and norm_linear returned, untouched: their "
            "gradients are handed over in FP8"
        )
    return x.grad_fn.grad_output_quantizer


def _place(quantizer):
    """A quantizer of delayed scaling as the kernels take it: scale, amax, type."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return quantizer.scale, quantizer.amax, TE_DType_To_Torch[quantizer.dtype]


class _Product:
    """One linear layer of a TE module: the quantizers of its three tensors, and its weight in FP8."""

    def __init__(self, module, name, fast_k=0):
        # TE's numbering: forward input, weight, output; backward gradient of output, of input
        number = name == "fc2_"
        forward, backward = module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"]
        self.input, self.quantizer, self.gradient = (
            forward[3 * number], forward[3 * number + 1], backward[2 * number],
        )
        self.module, self.name, self.fast_k = module, f"{name}weight", fast_k

    def weight(self):
        """What `cast_weights` made, or the first micro-batch's pass through the module; None before."""
        return self.module._fp8_workspaces.get(self.name)


def _fp8(by_rows, by_columns, scale_inv, quantizer):
    """FP8's three as Transformer Engine's products take them; by_rows or by_columns may be None where a
    product does not need it."""
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    return Float8TensorStorage(
        data=None if by_rows is None else by_rows.view(torch.uint8), fp8_scale_inv=scale_inv,
        fp8_dtype=quantizer.dtype,
        data_transpose=None if by_columns is None else by_columns.view(torch.uint8),
        fake_dtype=torch.bfloat16,
    )


def _hand_over(out, quantizer):
    """FP8's three as a tensor that autograd passes on."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    by_rows, by_columns, scale_inv = out
    return Float8Tensor(
        shape=by_rows.shape, dtype=torch.bfloat16, data=by_rows.view(torch.uint8),
        data_transpose=by_columns.view(torch.uint8), fp8_scale_inv=scale_inv, fp8_dtype=quantizer.dtype,
        quantizer=quantizer, device=by_rows.device,
    )


def _gemm(a, b, layout="TN", bias=None, fast_k=0):
    """A GEMM in BF16. "TN", forward: b @ aᵀ + bias, for a weight a. "NN", dgrad: b @ a, for a gradient b.
    "NT", wgrad: bᵀ @ a.

    fast_k: the largest K of a dgrad GEMM that may use fast accumulation."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    may_be_fast = layout == "NN" and b._data.shape[1] <= fast_k
    accumulation = "fast" if layout == "TN" else "fastest" if may_be_fast else "precise"
    if fast_gemm.is_supported():
        left, right = a._data if layout == "TN" else a._transpose, b._transpose if layout == "NT" else b._data
        left, right = left.view(TE_DType_To_Torch[a._fp8_dtype]), right.view(TE_DType_To_Torch[b._fp8_dtype])
        out = fast_gemm.gemm(left, a._scale_inv, right, b._scale_inv, bias, accumulation)
        if out is not None:
            return out
    precise = layout != "TN"  # nothing was timed: Transformer Engine's rule
    return general_gemm(
        a, b, layout=layout, bias=bias, out_dtype=torch.bfloat16, use_split_accumulator=precise, grad=precise
    )[0]


def _back_through_product(ctx, gradient, weight, x):
    """-> the gradients of the product's input, its weight and its bias or None. The output's: in BF16, or
    handed over in FP8."""
    dbias = None
    if hasattr(gradient, "_data"):
        if ctx.use_bias:
            dbias = gradient.dequantize().sum(0)
    else:
        out, dbias = fast_casts.cast(
            gradient.contiguous(), *_place(ctx.grad_output_quantizer), with_dbias=ctx.use_bias
        )
        gradient = _fp8(*out, ctx.grad_output_quantizer)
    return _gemm(weight, gradient, "NN", fast_k=ctx.product.fast_k), _gemm(x, gradient, "NT"), dbias


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x,
        branch,
        branch_bias,
        norm_weight,
        norm_bias,
        weight,
        bias,
        eps,
        product,
        branch_quantizer,
        elsewhere,
    ):
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        stream, (by_rows, by_columns, scale_inv), mean, rstd = fast_casts.norm(
            x, branch, branch_bias, norm_weight, norm_bias, eps, *_place(product.input)
        )
        weight = product.weight()
        ctx.save_for_backward(
            stream, mean, rstd, norm_weight, by_columns, scale_inv, weight._transpose, weight._scale_inv
        )
        ctx.product, ctx.branch_quantizer, ctx.has_branch_bias, ctx.elsewhere = (
            product, branch_quantizer, branch_bias is not None, elsewhere,
        )
        # the names that TE's modules use
        ctx.grad_output_quantizer, ctx.use_bias, ctx.debug = product.gradient, bias is not None, False
        # the first one forward is the last one backward
        ctx.updates_scales = FP8GlobalStateManager.is_first_fp8_module()
        ctx.set_materialize_grads(False)
        return stream, _gemm(weight, _fp8(by_rows, None, scale_inv, product.input), bias=bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, stream_gradient, gradient):
        stream, mean, rstd, norm_weight, normed, normed_inv, weight, weight_inv = ctx.saved_tensors
        dnorm, dweight, dbias = _back_through_product(
            ctx, gradient, _fp8(None, weight, weight_inv, ctx.product.quantizer),
            _fp8(None, normed, normed_inv, ctx.product.input),
        )
        if ctx.elsewhere is not None:
            ctx.elsewhere.append(dweight)
            dweight = None
        quantizer = ctx.branch_quantizer
        dx, out, dbranch_bias, dnorm_weight, dnorm_bias = fast_casts.norm_backward(
            dnorm, stream, mean, rstd, norm_weight, stream_gradient, quantizer and _place(quantizer),
            with_dbranch_bias=ctx.has_branch_bias,
        )
        dbranch = quantizer and _hand_over(out, quantizer)
        if ctx.updates_scales:
            from transformer_engine.pytorch.quantization import FP8GlobalStateManager

            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return dx, dbranch, dbranch_bias, dnorm_weight, dnorm_bias, dweight, dbias, None, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x_bias, weight, bias, activation, product, x_quantizer):
        place = _place(product.input)
        by_rows, by_columns, scale_inv = (
            fast_casts.activate(activation, x, x_bias, *place)
            if activation
            else fast_casts.cast(x, *place)[0]
        )
        weight = product.weight()
        ctx.save_for_backward(
            *((x, x_bias) if activation else (None, None)), by_columns, scale_inv, weight._transpose,
            weight._scale_inv,
        )
        ctx.product, ctx.activation, ctx.x_quantizer = product, activation, x_quantizer
        ctx.grad_output_quantizer, ctx.use_bias, ctx.debug = product.gradient, bias is not None, False
        return _gemm(weight, _fp8(by_rows, None, scale_inv, product.input), bias=bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, x_bias, activated, activated_inv, weight, weight_inv = ctx.saved_tensors
        dx, dweight, dbias = _back_through_product(
            ctx, gradient, _fp8(None, weight, weight_inv, ctx.product.quantizer),
            _fp8(None, activated, activated_inv, ctx.product.input),
        )
        dx_bias = None
        if ctx.activation:
            dx, dx_bias = fast_casts.activate_backward(
                ctx.activation, dx, x, x_bias, *_place(ctx.x_quantizer)
            )
            dx = _hand_over(dx, ctx.x_quantizer)
        return dx, dx_bias, dweight, dbias, None, None, None
