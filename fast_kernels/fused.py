"""The training pass of a GPT in FP8, fused across modules: what `model_te_fast.py` is built from.

    stream = Stream(x)                                  # x (N, C): the embeddings of N tokens
    stream, qkv = norm_linear(stream, qkv_module)       # te.LayerNormLinear
    stream = stream.add(linear(y, proj_module))         # te.Linear
    stream, hidden = norm_fc1(stream, mlp)              # te.LayerNormMLP
    stream = stream.add(activation_linear(hidden, mlp))

- The kernel that reads a GEMM's output also adds the residual, and its backward kernel also sums the gradient
  of the GEMM's bias; `Stream` and `Branch` carry residual and bias to them.
- The GEMM adds its bias, in float32. Added after the output is rounded to BF16, a bias of less than the last
  bit would decide the ties of the next rounding, and so count several times.
- A gradient is quantized by the kernel that writes it, for the GEMMs that read it, and passed through
  autograd as a `Float8Tensor`: delayed scaling knows the scale before the values.
  `Branch.gradient_quantization` says how. Make a new `Branch(x)` of a changed value: its gradient is then
  not quantized.
- Forward GEMMs use fast accumulation, as in Transformer Engine's recipe; wgrad accumulates in float32, and
  dgrad too unless K is small and fast accumulation is faster: see "GEMMs and their gradients".
- Without FP8 norm and activation are the kernels of unquantized.py. The GEMMs are autotuned too where wgrad
  is written to `main_grad`, else PyTorch's.
- `adapter=` of a linear layer adds LoRA to its output: narrow_gemm.py says how.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fast_kernels import casts, unquantized
from fast_kernels.fp8 import Float8Tensor, FP8Data, Quantization
from fast_kernels.gemm import gemm, gemm_bf16
from fast_kernels.library import input_names, is_transforming
from fast_kernels.narrow_gemm import check_rank, narrow_gemm


@dataclass(slots=True)
class LinearPass:
    """What one pass through a linear layer uses; `module.begin_pass(…)` makes it. The fields with a default
    are set in FP8 only."""

    weight: torch.nn.Parameter  # (out, in), BF16
    bias: torch.Tensor | None  # (out,)
    fp8_weight: FP8Data | None = None
    input_quantization: Quantization | None = None
    gradient_quantization: Quantization | None = None  # of the output's gradient
    update_gradient_scales: Callable | None = None  # called after the layer's backward pass


# Branch, Stream and Output are tuples: models unpack them, and FSDP2 traverses tuples to find tensors.

def _no_arithmetic(self, other):
    """Raise TypeError where a tuple would be repeated or concatenated."""
    raise TypeError(f"{type(self).__name__}: has no + and *, for instance in a hook of attention or MLP; "
                    "compute with branch.value() or stream.value(), and make fused.Branch(x) or Stream(x)")


class Branch(NamedTuple):
    """The output of a linear layer, (N, C), its bias included.

    bias: (C,), which the GEMM has added. It is here because the operation that reads the branch returns its
    gradient: its backward kernel writes the branch's gradient, and sums it over the rows. None: the layer
    returns it, or there is no bias."""

    output: torch.Tensor
    bias: torch.Tensor | None = None
    gradient_quantization: Quantization | None = None  # of the output's gradient; None: it is not quantized

    def value(self) -> torch.Tensor:
        """Return the output, (N, C), for an operation that is not one of these."""
        return unquantized.with_gradient_of(self.bias, self.output)

    __add__ = __radd__ = __mul__ = __rmul__ = _no_arithmetic


NO_BRANCH = Branch(None)  # of a stream without one: no tensors


class Stream(NamedTuple):
    """The residual (N, C), and the branch that is still to be added to it."""

    residual: torch.Tensor
    branch: Branch | None = None

    def add(self, branch: Branch) -> "Stream":
        """Add a branch; one that is still to be added is added to the residual first."""
        if self.branch is None:
            return Stream(self.residual, branch)
        return Stream(self.value(), branch)

    def value(self) -> torch.Tensor:
        """Return the sum, (N, C)."""
        return self.residual if self.branch is None else self.residual + self.branch.value()

    __add__ = __radd__ = __mul__ = __rmul__ = _no_arithmetic


class Output(NamedTuple):
    """What attention and MLP return: the stream, and the branch that is to be added to it."""

    stream: Stream
    branch: Branch

    __add__ = __radd__ = __mul__ = __rmul__ = _no_arithmetic


def norm_linear(stream: Stream, module, tied_gradient=None, is_first_microbatch=None, adapter=None):
    """Add the stream's branch to its residual; return (the sum as a Stream, norm(sum) @ weightᵀ + bias).

    Args:
        module: a LayerNormLinear.
        tied_gradient: `embedding.TiedGradient` of a weight that `embed` shares. The weight's gradient is
            added to it, not passed through autograd. It may be passed at each of several uses of the weight.
        is_first_microbatch: see `modules.Module.begin_pass`.
        adapter: LoRA of the linear layer: None, or an object with a (rank, in) and b (out, rank), BF16, and
            `scale`, a number. In FP8 the rank is a multiple of 16 up to 256.

    Raises:
        TypeError: `stream` is not a Stream.
        ValueError: in FP8, an adapter of another shape or dtype.
    """
    _check_stream("norm_linear", stream)
    stream, y = _norm_gemm(
        stream, module, is_first_microbatch, is_branch=False, adapter=adapter, tied_gradient=tied_gradient)
    return stream, y.output


def norm_fc1(stream: Stream, module, is_first_microbatch=None, adapter=None):
    """Add the stream's branch to its residual; return the sum as a Stream, and as a Branch
    norm(sum) @ fc1_weightᵀ + bias of a LayerNormMLP. adapter: see `norm_linear`."""
    _check_stream("norm_fc1", stream)
    return _norm_gemm(stream, module, is_first_microbatch, is_branch=True, adapter=adapter)


def _check_stream(name, stream):
    if not isinstance(stream, Stream):
        raise TypeError(f"{name}: a {type(stream).__name__}, not a Stream, as torch.utils.checkpoint with "
                        "use_reentrant=True returns; use te.checkpoint, and Stream(x) for a tensor x")


def _norm_gemm(stream, module, is_first_microbatch, is_branch, adapter, tied_gradient=None):
    """Return the sum as a Stream, and the output of the module's first GEMM as a Branch. is_branch: see
    `linear`."""
    adapter_arguments = _adapter_arguments(adapter)
    branch = NO_BRANCH if stream.branch is None else stream.branch
    # the layer's backward pass gives these gradients, beside weight and bias
    norm_weight = module.parameter("layer_norm_weight")
    norm_bias = module.parameter("layer_norm_bias")
    inputs = (stream.residual, branch.output, branch.bias, norm_weight, norm_bias)
    a, b, _ = adapter_arguments
    layer = module.begin_pass(0, (*inputs, a, b), is_first_microbatch)
    bias, bias_of_branch = _biases(layer, is_branch)
    if layer.fp8_weight is None:
        residual, normed = unquantized.add_norm(*inputs, module.eps)
        y = _unquantized_linear(normed, layer.weight, bias, adapter_arguments)
    else:
        residual, y = _NormLinear.apply(
            *inputs, layer.weight, bias, a, b,
            NormLinearOptions(
                layer, module.eps, branch.gradient_quantization, tied_gradient, adapter_arguments))
    return Stream(residual), Branch(y, bias_of_branch, layer.gradient_quantization)


def _biases(layer, is_branch):
    """Return the bias that a layer's GEMM adds, and that of its Branch. is_branch: see `linear`."""
    if not is_branch or layer.bias is None:
        return layer.bias, None
    bias_of_branch = layer.bias
    if dist.is_initialized():
        bias_of_branch = bias_of_branch.clone()  # FSDP2 frees parameters before the next block reads them
    return layer.bias.detach(), bias_of_branch  # so that the layer returns no gradient for it


def linear(x, module, is_first_microbatch=None, is_branch=True, adapter=None) -> Branch:
    """Return x @ weightᵀ + bias of a Linear, x (N, inputs).

    Args:
        is_branch: the operation that reads the result returns the gradient of the bias. False: this layer
            returns it.
        adapter: see `norm_linear`.
    """
    adapter_arguments = _adapter_arguments(adapter)
    layer = module.begin_pass(0, (x, adapter_arguments.a, adapter_arguments.b), is_first_microbatch)
    return _linear(Branch(x), layer, None, is_branch, adapter_arguments)


def activation_linear(hidden: Branch, module, is_first_microbatch=None, is_branch=True,
                      adapter=None) -> Branch:
    """Return activation(hidden) @ fc2_weightᵀ + fc2_bias of a LayerNormMLP.

    is_branch: see `linear`; adapter: see `norm_linear`."""
    adapter_arguments = _adapter_arguments(adapter)
    inputs = (hidden.output, hidden.bias, adapter_arguments.a, adapter_arguments.b)
    layer = module.begin_pass(1, inputs, is_first_microbatch)
    # the kernel writes an FP8 gradient: not without FP8, and not if hidden was changed since its GEMM
    if layer.fp8_weight is None or hidden.gradient_quantization is None:
        activated = unquantized.activate(module.activation, hidden.output, hidden.bias)
        return _linear(Branch(activated), layer, None, is_branch, adapter_arguments)
    return _linear(hidden, layer, module.activation, is_branch, adapter_arguments)


def _linear(x: Branch, layer, activation, is_branch, adapter):
    """Return activation(x) @ weightᵀ + bias; activation None: of x itself. adapter: AdapterArguments."""
    bias, bias_of_branch = _biases(layer, is_branch)
    if layer.fp8_weight is None:
        return Branch(_unquantized_linear(x.output, layer.weight, bias, adapter), bias_of_branch)
    y = _Linear.apply(
        x.output, x.bias, layer.weight, bias, adapter.a, adapter.b,
        LinearOptions(layer, activation, x.gradient_quantization, adapter))
    return Branch(y, bias_of_branch, layer.gradient_quantization)


class AdapterArguments(NamedTuple):
    """An adapter, as an autograd function takes it; all None without one."""

    a: torch.Tensor | None = None  # (rank, in)
    b: torch.Tensor | None = None  # (out, rank)
    scale: float | None = None


NO_ADAPTER = AdapterArguments()


def _adapter_arguments(adapter) -> AdapterArguments:
    return NO_ADAPTER if adapter is None else AdapterArguments(adapter.a, adapter.b, adapter.scale)


def _unquantized_linear(x, weight, bias, adapter):
    """Return x @ weightᵀ + bias and an adapter's part, without FP8. adapter: AdapterArguments."""
    y = _linear_in_bf16(x, weight, bias)
    if adapter.a is None:
        return y
    return y + F.linear(adapter.scale * F.linear(x, adapter.a), adapter.b)


def dropout(branch: Branch, p: float, training: bool) -> Branch:
    """Apply dropout to a branch; without dropout return it as it is."""
    if p == 0 or not training:
        return branch
    return Branch(F.dropout(branch.value(), p))


# ---------------------------------------------------------------- GEMMs and their gradients

# The largest K of a dgrad GEMM that may use fast accumulation. Up to it, in the median GEMM of models in
# training, the FP8 tensor-core accumulator adds less error than the rounding to BF16 after it
# (results/accumulation.json). The K of a wgrad GEMM is the number of tokens, where it would add about 3 %.
DGRAD_FAST_ACCUM_K = 3072


# Transformer Engine's default, too
FORWARD_ACCUMULATION = "fast"


def forward_gemm(x, weight, bias=None, added_to=None):
    """Return x @ weightᵀ + bias, (N, out) BF16, of two FP8 tensors, x (N, in) and weight (out, in).

    added_to: (N, out) BF16, to which the result is added in place, and which is returned."""
    return gemm(x.rowwise, x.scale_inv, weight.rowwise, weight.scale_inv, bias, FORWARD_ACCUMULATION,
                out=added_to, accumulate=added_to is not None)


def input_gradient(dy, weight, added_to=None):
    """Return dgrad, dy @ weight, (N, in) BF16, of two FP8 tensors, dy (N, out) and weight (out, in).

    added_to: (N, in) BF16, to which the result is added in place, and which is returned."""
    accumulation = "either" if dy.rowwise.shape[1] <= DGRAD_FAST_ACCUM_K else "precise"
    columnwise = casts.make_transpose(weight.rowwise) if weight.columnwise is None else weight.columnwise
    return gemm(dy.rowwise, dy.scale_inv, columnwise, weight.scale_inv, accumulation=accumulation,
                out=added_to, accumulate=added_to is not None)


def weight_gradient(dy, x, **options):
    """Return wgrad, dyᵀ @ x, of two FP8 tensors, dy (N, out) and x (N, in). options: those of `gemm`."""
    return gemm(dy.columnwise, dy.scale_inv, x.columnwise, x.scale_inv, **options)


class SavedAdapter(NamedTuple):
    """What the backward pass needs of an adapter."""

    low: torch.Tensor  # scale · x @ aᵀ, (N, rank) BF16
    a: torch.Tensor  # (rank, in)
    b: torch.Tensor  # (out, rank)
    scale: float


class SavedOperands(NamedTuple):
    """What the backward pass needs of a linear layer's forward pass."""

    x: FP8Data  # (N, in), without rowwise data
    weight: FP8Data  # (out, in)
    adapter: SavedAdapter | None


def _forward_gemm_with_adapter(x, weight, bias, adapter):
    """Return x @ weightᵀ + bias, with an adapter's part if there is one, and the tensors to save for the
    backward pass. adapter: AdapterArguments."""
    added_to = low = None
    if adapter.a is not None:
        _check_adapter(adapter, in_features=x.rowwise.shape[1], out_features=weight.rowwise.shape[0])
        low = narrow_gemm(x.rowwise, x.scale_inv, adapter.a, adapter.scale)
        added_to = low @ adapter.b.T
    y = forward_gemm(x, weight, bias, added_to)
    return y, _tensors_to_save(x, weight, adapter, low)


def _tensors_to_save(x, weight, adapter, low):
    """Return the tensors of SavedOperands. adapter: AdapterArguments. low: None without an adapter."""
    return low, adapter.a, adapter.b, x.columnwise, x.scale_inv, *weight.for_backward()


def _saved_operands(tensors, adapter_scale) -> SavedOperands:
    """Return SavedOperands of the result of `_tensors_to_save`."""
    low, a, b, x_columnwise, x_scale_inv, *weight = tensors
    adapter = None if a is None else SavedAdapter(low, a, b, adapter_scale)
    return SavedOperands(FP8Data(None, x_columnwise, x_scale_inv), FP8Data(*weight), adapter)


def _check_adapter(adapter, in_features, out_features):
    """Raise ValueError unless an adapter fits a layer in FP8."""
    check_rank("adapter: a", len(adapter.a))
    shapes = {"a": (len(adapter.a), in_features), "b": (out_features, len(adapter.a))}
    for name, shape in shapes.items():
        tensor = getattr(adapter, name)
        if tensor.shape != shape or tensor.dtype != torch.bfloat16:
            raise ValueError(f"adapter: {name} {tuple(tensor.shape)} {tensor.dtype}: must be {shape} "
                             "torch.bfloat16")


def _backward_gemms(layer, dy, saved: SavedOperands, needs, needs_dx):
    """Return the gradients of a linear layer: of x, weight, bias, a and b, None for each that is not needed.

    Args:
        dy: (N, out), BF16 or a Float8Tensor.
        needs: NormLinearInputs or LinearInputs, which of the inputs need a gradient.
        needs_dx: whether the input of the GEMM does.
    """
    dx = dweight = dbias = da = db = None
    if type(dy) is Float8Tensor:
        fp8_dy = dy
        if needs.bias:
            dbias = dy.dequantize().sum(0)
    else:
        fp8_dy, dbias = casts.cast(dy.contiguous(), layer.gradient_quantization, with_dbias=needs.bias)
    if saved.adapter is not None:
        low, a, b, scale = saved.adapter
        # dlow = scale · dy @ b, (N, rank): the gradient of x @ aᵀ
        dlow = narrow_gemm(fp8_dy.rowwise, fp8_dy.scale_inv, b.T, scale)
        if needs.a:
            # da = (xᵀ @ dlow)ᵀ
            da = narrow_gemm(saved.x.columnwise, saved.x.scale_inv, dlow.T, transposes=True)
        if needs.b:
            # db = dyᵀ @ low
            db = narrow_gemm(fp8_dy.columnwise, fp8_dy.scale_inv, low.T)
        if needs_dx:
            dx = dlow @ a
    if needs_dx:
        # dx = dy @ weight, and dlow @ a of an adapter
        dx = input_gradient(fp8_dy, saved.weight, added_to=dx)
    if needs.weight:
        # dweight = dyᵀ @ x
        dweight = _parameter_gradient(layer.weight, functools.partial(weight_gradient, fp8_dy, saved.x))
    return dx, dweight, dbias, da, db


def _parameter_gradient(parameter, compute):
    """Return wgrad, in `main_grad` of a weight that has one, as Megatron-LM and TE do.

    compute(): return wgrad; compute(out=…, accumulate=…): write or add it to a tensor.

    Attributes of such a weight: overwrite_main_grad tells the first GEMM of a step to overwrite `main_grad`;
    main_grad_pass is the backward pass that wrote to it last; grad_added_to_main_grad tells its owner that a
    GEMM wrote to it."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or parameter._backward_hooks:  # a hook may change the gradient
        return compute()
    backward_pass = torch._C._current_graph_task_id()
    if backward_pass != -1 and getattr(parameter, "main_grad_pass", None) == backward_pass:
        # A weight that is used twice. Autograd has `main_grad` already, and adds what is returned in a new
        # tensor: the owner finds the sum in `grad`.
        return compute(out=torch.empty_like(main_grad), accumulate=False)
    parameter.main_grad_pass = backward_pass
    compute(out=main_grad, accumulate=not getattr(parameter, "overwrite_main_grad", False))
    parameter.overwrite_main_grad = False
    parameter.grad_added_to_main_grad = True
    return main_grad.detach()  # autograd wants a gradient; this one is not copied


def _linear_in_bf16(x, weight, bias):
    """Return x @ weightᵀ + bias without FP8. The wgrad GEMM writes to a `main_grad` of the weight's dtype."""
    if torch.compiler.is_compiling() or is_transforming():  # first: Dynamo would guard on main_grad
        return F.linear(x, weight, bias)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or main_grad.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    return _LinearInBF16.apply(x, weight, bias)


def first_derivative_only(backward):
    """Decorate the backward method of an autograd function: create_graph=True raises RuntimeError.

    `once_differentiable` is not enough: torch.autograd.grad skips its error if another path leads to the
    inputs, and returns the part of the derivative that goes there."""
    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():  # in a backward pass only with create_graph=True
            raise RuntimeError("create_graph=True: fast_kernels has no second derivatives in FP8; use "
                               "autocast(enabled=False)")
        return backward(ctx, *gradients)
    return checked


# ---------------------------------------------------------------- autograd functions
# The GEMMs read `layer.fp8_weight`, and the GEMM before has added `branch_bias` or `x_bias`. These and
# `weight` are inputs only to receive a gradient.

NormLinearInputs = input_names(
    "NormLinearInputs", "x branch branch_bias norm_weight norm_bias weight bias a b options")
LinearInputs = input_names("LinearInputs", "x x_bias weight bias a b options")


class NormLinearOptions(NamedTuple):
    """The inputs of `_NormLinear` that get no gradient, in one, since each input costs the host time."""

    layer: LinearPass
    eps: float
    dbranch_quantization: Quantization | None  # of the gradient of branch
    tied_gradient: object | None
    adapter: AdapterArguments  # whose a and b are also inputs, to receive gradients


class LinearOptions(NamedTuple):
    """The inputs of `_Linear` that get no gradient."""

    layer: LinearPass
    activation: str | None
    dx_quantization: Quantization | None
    adapter: AdapterArguments


class _NormLinear(torch.autograd.Function):
    """`norm_linear`."""

    @staticmethod
    def forward(ctx, x, branch, branch_bias, norm_weight, norm_bias, weight, bias, a, b, options):
        layer = options.layer
        residual, fp8_y, mean, rstd = casts.norm(
            x, branch, norm_weight, norm_bias, options.eps, layer.input_quantization)
        out, saved = _forward_gemm_with_adapter(fp8_y, layer.fp8_weight, bias, options.adapter)
        ctx.save_for_backward(residual, mean, rstd, norm_weight, *saved)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return residual, out

    @staticmethod
    @first_derivative_only
    def backward(ctx, dresidual, dout):
        gradients = _differentiate_norm_linear(ctx, dresidual, dout)
        ctx.options.layer.update_gradient_scales()
        return tuple(gradients)


def _differentiate_norm_linear(ctx, dresidual, dout):
    """Return the gradients of `_NormLinear`'s inputs. dresidual, dout: None if that output was not used."""
    needs = NormLinearInputs(*ctx.needs_input_grad)
    if dout is None:
        # twice the same tensor: autograd does not write to what a backward method returns
        dbranch = dresidual if needs.branch else None
        dbranch_bias = dresidual.sum(0) if needs.branch_bias else None
        return NormLinearInputs(x=dresidual, branch=dbranch, branch_bias=dbranch_bias)
    options = ctx.options
    residual, mean, rstd, norm_weight, *saved = ctx.saved_tensors
    # of the norm's output y
    needs_dy = needs.x or needs.branch or needs.branch_bias or needs.norm_weight or needs.norm_bias
    dy, dweight, dbias, da, db = _backward_gemms(
        options.layer, dout, _saved_operands(saved, options.adapter.scale), needs, needs_dy)
    if options.tied_gradient is not None and needs.weight:
        options.tied_gradient.add(dweight)
        dweight = None
    if not needs_dy:
        return NormLinearInputs(weight=dweight, bias=dbias, a=da, b=db)
    quantization = options.dbranch_quantization if needs.branch else None
    if dresidual is not None:
        dresidual = dresidual.contiguous()
    norm = casts.norm_backward(
        dy, residual, mean, rstd, norm_weight, dresidual, quantization,
        with_dbranch_bias=needs.branch_bias)
    dbranch = None
    if quantization is not None:
        dbranch = Float8Tensor(*norm.fp8_dx)
    elif needs.branch:
        dbranch = norm.dx
    return NormLinearInputs(
        x=norm.dx, branch=dbranch, branch_bias=norm.dbranch_bias, norm_weight=norm.dweight,
        norm_bias=norm.dbias, weight=dweight, bias=dbias, a=da, b=db)


class _LinearInBF16(torch.autograd.Function):
    """`_linear_in_bf16`, x (N, in) and weight (out, in)."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # which has the attributes
        return gemm_bf16(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad
        dx = dweight = None
        dbias = dy.sum(0) if needs_dbias else None
        if torch.is_grad_enabled():  # create_graph=True: PyTorch's GEMMs are differentiable
            return dy @ weight, dy.T @ x, dbias
        if needs_dx:
            dx = gemm_bf16(dy, weight.T)
        if needs_dweight:
            dweight = _parameter_gradient(ctx.parameter, functools.partial(gemm_bf16, dy.T, x.T))
        return dx, dweight, dbias


class _Linear(torch.autograd.Function):
    """`linear` and `activation_linear`."""

    @staticmethod
    def forward(ctx, x, x_bias, weight, bias, a, b, options):
        layer = options.layer
        activation = options.activation
        saved_x = None  # before the activation
        if activation is None:
            fp8_x, _ = casts.cast(x.contiguous(), layer.input_quantization)
        else:
            fp8_x = casts.activate(activation, x, layer.input_quantization)
            saved_x = x
        out, saved = _forward_gemm_with_adapter(fp8_x, layer.fp8_weight, bias, options.adapter)
        ctx.save_for_backward(saved_x, *saved)
        ctx.options = options
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        options = ctx.options
        layer = options.layer
        activation = options.activation
        saved_x, *saved = ctx.saved_tensors
        needs = LinearInputs(*ctx.needs_input_grad)
        needs_dx = needs.x or needs.x_bias
        dx, dweight, dbias, da, db = _backward_gemms(
            layer, dy, _saved_operands(saved, options.adapter.scale), needs, needs_dx)
        dx_bias = None
        if activation is not None and needs_dx:
            fp8_dx, dx_bias = casts.activate_backward(
                activation, dx, saved_x, options.dx_quantization, with_dbias=needs.x_bias)
            dx = Float8Tensor(*fp8_dx)
        layer.update_gradient_scales()
        return tuple(LinearInputs(x=dx, x_bias=dx_bias, weight=dweight, bias=dbias, a=da, b=db))
