"""Changes to FP8 that bench/paired.py compares and train.py has no option for.

    with fp8_arms.changed("fp8-activations"):
        ...  # training steps of model_te_fast.py

An arm replaces functions of this process, most of them of `fast_kernels`. The modules and their delayed
scaling stay as they are.

- fp8-activations, -weights, -gradients: one operand of each GEMM is quantized by the same kernels and scales
  as in the arm fp8. The other one is the BF16 tensor that would have been quantized. The GEMM is PyTorch's,
  of BF16 tensors: the FP8 operand is dequantized for it, and there is no fast accumulation. wgrad is rounded
  to BF16, as in BF16 training.
- fp8-no-operand: the same with both operands in BF16. What differs from BF16 training are the kernels
  around the GEMMs.
- fp8-dgrad-float32: no dgrad GEMM uses fast accumulation. That is Transformer Engine's default, whose recipe
  has `fp8_gemm_dgrad.use_split_accumulator=True`. The kit uses fast accumulation where K <= 3,072 if timing
  finds it faster.
- fp8-forward-float32: no forward GEMM uses fast accumulation. In `fp8` all do, as in Transformer Engine.
- fp8-scales-1: scales start at 1, as in Transformer Engine, and the first batch does not find them.
- fp8-stochastic-logits: the logits' gradient is rounded stochastically. A value between two FP8 values
  becomes one of them, with probabilities that make its mean exact; before that it is rounded to float16,
  which divides their distance into 256 steps. The random numbers are PyTorch's, whose generator a checkpoint
  restores: a run that is cut continues with the same ones.
"""

import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from fast_kernels import casts, fused, loss, modules
from fast_kernels.fp8 import FP8Data, Quantization
from nanote import recipes


@contextmanager
def changed(arm: str):
    """Train inside as an arm of `CHANGES`."""
    originals = []
    for owner, name, replacement in CHANGES[arm]():
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


# ---------------------------------------------------------------- one operand in FP8
# A Quantization with the dtype BF16 stands for an operand that is not quantized. An `FP8Data` with BF16
# tensors is that operand.

def one_in_fp8(operand: str | None) -> list:
    """Return the replacements that leave one operand in FP8: "input", "weight" or "output_gradient"; none of
    them with operand=None."""
    in_bf16 = [  # (owner, name, function in BF16)
        (casts, "norm", norm),
        (casts, "norm_backward", norm_backward),
        (casts, "activate", activate),
        (casts, "activate_backward", activate_backward),
        (casts, "cast", cast),
        (loss, "cast_gradient", cast_gradient),
        (modules.Module, "quantized_weight", quantized_weight),
    ]
    replacements = [
        (fused, "gemm", bf16_gemm),
        (modules.Module, "_gemm_quantizations", quantizations_of_one(operand))]
    for owner, name, function in in_bf16:
        original = getattr(owner, name)
        replacements.append((owner, name, by_dtype(original, function)))
    return replacements


def quantizations_of_one(operand):
    """Return a method of Module: how the tensors of a GEMM are quantized, all but one of them to BF16."""
    original = modules.Module._gemm_quantizations

    def method(module, gemm, recipe):
        quantizations = original(module, gemm, recipe)
        others = {name: getattr(quantizations, name)._replace(fp8_dtype=torch.bfloat16)
                  for name in quantizations._fields if name != operand}
        return quantizations._replace(**others)
    return method


def by_dtype(original, in_bf16):
    """Return a function that calls `in_bf16` if the dtype to quantize to is BF16, else `original`."""
    def function(*arguments, **options):
        dtypes = []
        for argument in arguments:  # cast_gradient takes a dtype, the others a Quantization
            if isinstance(argument, Quantization):
                dtypes.append(argument.fp8_dtype)
            elif isinstance(argument, torch.dtype):
                dtypes.append(argument)
        chosen = in_bf16 if torch.bfloat16 in dtypes else original
        return chosen(*arguments, **options)
    return function


def unquantized(x) -> FP8Data:
    """Return x (N, D) BF16 in place of an FP8 tensor."""
    return FP8Data(x, x.T, torch.ones(1, device=x.device))


def norm(x, branch, weight, bias, eps, quantization):
    residual, y, mean, rstd = casts.norm_bf16(x, branch, weight, bias, eps)
    return residual, unquantized(y), mean, rstd


def norm_backward(dy, residual, mean, rstd, weight, dresidual, quantization, with_dbranch_bias):
    gradients = casts.norm_backward(
        dy, residual, mean, rstd, weight, dresidual, None, with_dbranch_bias=with_dbranch_bias)
    return gradients._replace(fp8_dx=unquantized(gradients.dx))


def activate(activation, x, quantization):
    return unquantized(casts.activate_bf16(activation, x))


def activate_backward(activation, dy, x, quantization, with_dbias):
    dx, dbias = casts.activate_backward_bf16(activation, dy, x, with_dbias)
    return unquantized(dx), dbias


def cast(x, quantization, with_dbias=False):
    dbias = x.sum(0) if with_dbias else None
    return unquantized(x), dbias


def cast_gradient(logits, labels, lse, factor, label_smoothing, softcap, scale, amax, fp8_dtype):
    return unquantized(logits_gradient(logits, labels, lse, factor, label_smoothing, softcap))


def logits_gradient(logits, *arguments):
    """Return the logits' gradient in BF16."""
    gradient = torch.empty_like(logits)
    loss.logits_gradient(logits, *arguments, gradient)
    return gradient


def quantized_weight(module, gemm, quantization, is_first_microbatch):
    return unquantized(module.weight_of(gemm).detach())


def bf16_gemm(a, a_scale_inv, b, b_scale_inv, bias=None, accumulation="precise", out=None, accumulate=False):
    """Compute `fast_kernels.gemm.gemm` of operands in FP8 or BF16, in BF16."""
    result = F.linear(dequantized(a, a_scale_inv), dequantized(b, b_scale_inv), bias)
    if out is None:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def dequantized(x, scale_inv):
    """Return an operand of `bf16_gemm` in BF16."""
    if x.dtype == torch.bfloat16:
        return x
    return x.to(torch.bfloat16).mul_(scale_inv)  # scale_inv is float32: the product is rounded once


# ---------------------------------------------------------------- stochastic rounding

def cast_gradient_stochastically(
        logits, labels, lse, factor, label_smoothing, softcap, scale, amax, fp8_dtype):
    """Compute `fast_kernels.loss.cast_gradient` with stochastic rounding to E5M2."""
    assert fp8_dtype == torch.float8_e5m2, f"the logits' gradient is rounded to E5M2, not to {fp8_dtype}"
    gradient = logits_gradient(logits, labels, lse, factor, label_smoothing, softcap)
    largest = torch.linalg.vector_norm(gradient, ord=math.inf)
    amax.copy_(torch.maximum(amax, largest))
    rowwise = round_stochastically(gradient, scale)
    return rowwise, rowwise.T.contiguous(), scale.reciprocal()


def round_stochastically(x, scale):
    """Return x · scale in E5M2, saturated, each value rounded to one of its two neighbors. NaN stays NaN.

    E5M2 is the upper byte of float16. The lower byte is how far a value lies above its lower neighbor, in
    256ths of the distance of the two: a random byte is added to it, and the carry decides.
    """
    largest = torch.finfo(torch.float8_e5m2).max
    scaled = (x * scale).clamp_(-largest, largest).half()
    bits = scaled.view(torch.int16)
    random_bytes = torch.randint_like(bits, 256)
    random_bytes.masked_fill_(scaled.isnan(), 0)  # a carry would turn NaN into 0
    bits += random_bytes
    upper_bytes = (bits >> 8).to(torch.int8)
    return upper_bytes.view(torch.float8_e5m2)


# ---------------------------------------------------------------- the arms

CHANGES = {  # {arm of bench/paired.py: function that returns [(owner, name, replacement), …]}
    "fp8-activations": lambda: one_in_fp8("input"),
    "fp8-weights": lambda: one_in_fp8("weight"),
    "fp8-gradients": lambda: one_in_fp8("output_gradient"),
    "fp8-no-operand": lambda: one_in_fp8(None),
    "fp8-dgrad-float32": lambda: [(fused, "DGRAD_FAST_ACCUM_K", 0)],
    "fp8-forward-float32": lambda: [(fused, "FORWARD_ACCUMULATION", "precise")],
    "fp8-scales-1": lambda: [(recipes, "find_first_scales", lambda *arguments: None)],
    "fp8-stochastic-logits": lambda: [(loss, "cast_gradient", cast_gradient_stochastically)],
}
