"""A GPT with any choice of its GEMM operands in emulated FP8, to find which of them cost loss.

    NANOTE_ABLATION="quantize=weights" python train.py --model bench/ablation.py:Ablated --fp8-recipe none

bench/convergence.py trains such models as its arms `emulated-…`. NANOTE_ABLATION has words of the form
option=value, the fields of `Ablation`; a checkpoint stores them, and --resume keeps those.

- The weights, their names and their initial values are those of model_te_optimized.py, so that a seed gives
  the same run but for the quantization. Norms, GEMMs and activations are plain PyTorch.
- An operand is quantized to FP8, dequantized to the dtype of the model, and multiplied as usual. In BF16 the
  dequantized value is rounded once more, by 2^-9 of itself where E4M3 rounds by 2^-4: this adds 0.1 % to the
  variance of the error.
- GEMMs accumulate in float32. Real FP8 uses fast accumulation in the forward GEMMs, and with the fast kernels
  in some dgrad GEMMs: the difference of the arms `fp8` and `emulated-all` is due to that and to the kernels.
- Delayed scaling is that of the default recipe: the maximum of 1,024 amax values before this pass, or of
  `history`; where it is infinite, the scale before. A first pass, which has none, uses its own.
- Amax histories are not in checkpoints, so that a run may begin with one of another model's (--switch-at of
  bench/convergence.py). With delayed scaling a resumed run does not equal an uninterrupted one exactly. The
  warm-up passes of a CUDA-graph capture are recorded, too.
"""

import dataclasses
import functools
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from te_reference import ACTIVATIONS, FP8_MAX, current_scale, delayed_scale

BLOCK = 128  # values that share a scale, in block scaling
GEMMS = {"x": ("forward", "wgrad"), "w": ("forward", "dgrad"), "dy": ("dgrad", "wgrad")}  # that read a tensor
OPERANDS = tuple(f"{gemm}.{tensor}" for tensor, gemms in GEMMS.items() for gemm in gemms)
GROUPS = {"all": OPERANDS, "none": ()}
for group, part in {"activations": ".x", "weights": ".w", "gradients": ".dy",
                    "forward": "forward.", "dgrad": "dgrad.", "wgrad": "wgrad."}.items():
    GROUPS[group] = tuple(name for name in OPERANDS if part in name)
LAYERS = ("qkv", "proj", "fc1", "fc2", "head")
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALING = ("delayed", "current", "row", "block")
CHOICES = {  # of an option, the values
    "quantize": (*GROUPS, *OPERANDS), "keep": (*GROUPS, *OPERANDS), "skip": (*LAYERS, "first", "last"),
    "scaling": SCALING, "gradient_scaling": SCALING, "history": ("1", "16", "1024"),
    "gradients": tuple(FORMATS), "rounding": ("nearest", "stochastic", "stochastic_head"),
    "residual": ("model", "float32"),
}


@dataclass
class Ablation:
    """What is quantized, and how. The first three are lists, separated by commas."""

    quantize: str = "all"  # Operands to quantize: names of OPERANDS or GROUPS.
    keep: str = "none"  # Operands of these that stay in high precision.
    skip: str = ""  # Layers that stay in high precision: names of LAYERS; first, last: that block.
    scaling: str = "delayed"  # One scale a tensor (delayed, current), a row along K, or a block of 128.
    gradient_scaling: str = ""  # Of dy; default: as `scaling`.
    history: str = "1024"  # Number of amax values of delayed scaling; 1 is the algorithm most_recent.
    gradients: str = "e5m2"  # Format of dy; x and w are in E4M3.
    rounding: str = "nearest"  # Of dy; stochastic_head: stochastic in the head, to nearest elsewhere.
    residual: str = "model"  # Dtype of the residual.

    @classmethod
    def parse(cls, text: str) -> "Ablation":
        """Read words option=value. ValueError for an option or a value that is unknown."""
        given = dict(word.partition("=")[::2] for word in text.split())
        for option, value in given.items():
            if option not in CHOICES:
                raise ValueError(f"NANOTE_ABLATION {option}: unknown; the options are {', '.join(CHOICES)}")
            many = option in ("quantize", "keep", "skip")
            for name in value.split(",") if many else [value]:
                if name not in CHOICES[option]:
                    known = ", ".join(CHOICES[option])
                    raise ValueError(f"NANOTE_ABLATION {option}={name}: unknown; the values are {known}")
        return cls(**given)

    def quantized(self) -> set[str]:
        """Return the names of OPERANDS that are quantized."""
        def operands(names):
            return {operand for name in names.split(",") for operand in GROUPS.get(name, (name,))}

        return operands(self.quantize) - operands(self.keep)

    def scaling_of(self, tensor: str) -> str:
        """Return the scaling of x, w or dy."""
        return self.gradient_scaling or self.scaling if tensor == "dy" else self.scaling


@dataclass
class AblatedConfig(OptimizedConfig):
    ablation: str = field(default_factory=lambda: os.environ.get("NANOTE_ABLATION", ""))

    def __post_init__(self):
        super().__post_init__()
        self.check(not self.use_fp8, "use_fp8", "FP8 is emulated; pass --fp8-recipe none", False)
        ablation = Ablation.parse(self.ablation)
        if "block" in (ablation.scaling, ablation.gradient_scaling):
            for name in ("n_embd", "n_inner", "vocab_size"):
                size = getattr(self, name)
                self.check(size % BLOCK == 0, name, f"block scaling needs a multiple of {BLOCK}",
                           (size // BLOCK + 1) * BLOCK)


# ---------------------------------------------------------------- quantization

def round_to_fp8(x, scale, dtype, stochastic):
    """Return x in x's dtype, rounded to what FP8 has at this scale. x · scale saturates."""
    scaled = x.float() * scale
    if stochastic:  # rounded down or up to a neighbor, with the probabilities that make the mean x
        info = torch.finfo(dtype)
        exponent = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^floor(log2 |x|)
        step = exponent.clamp(min=info.smallest_normal) * info.eps
        scaled = torch.floor(scaled / step + torch.rand_like(scaled)) * step
    q = scaled.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)
    return (q.float() * scale.reciprocal()).to(x.dtype)


@functools.cache
def compiled_round_to_fp8():
    """Return round_to_fp8 as one kernel. In single operations it would take most of the time of a step."""
    torch._dynamo.config.recompile_limit = 64  # formats, and 32- or 64-bit indices
    return torch.compile(round_to_fp8, dynamic=True)


class Gemm(nn.Module):
    """Quantizes the operands of a linear layer's three GEMMs. Its buffers are amax histories and scales."""

    def __init__(self, ablation: Ablation):
        super().__init__()
        self.ablation, self.quantized, self.enabled = ablation, ablation.quantized(), True
        self.records = False  # whether this pass changes amax histories
        for tensor in GEMMS:
            if self.is_quantized(tensor) and ablation.scaling_of(tensor) == "delayed":
                history = torch.zeros(int(ablation.history), dtype=torch.float32)
                self.register_buffer(f"{tensor}_amax", history, persistent=False)
                self.register_buffer(f"{tensor}_scale", torch.zeros(()), persistent=False)

    def is_quantized(self, tensor):
        return any(f"{gemm}.{tensor}" in self.quantized for gemm in GEMMS[tensor])

    def operands(self, tensor: str, x) -> list:
        """Return x, (rows, columns), as the two GEMMs of `GEMMS` read it: the columns are K of the first, the
        rows of the second."""
        if not self.enabled or not self.is_quantized(tensor):
            return [x, x]
        x = x.contiguous()
        found, by_shape = [], {}
        for gemm, shape in zip(GEMMS[tensor], self.scale_shapes(tensor, *x.shape)):
            if f"{gemm}.{tensor}" not in self.quantized:
                found.append(x)
                continue
            if shape not in by_shape:  # once for both GEMMs if they share it
                by_shape[shape] = self.quantize(tensor, x, shape)
            found.append(by_shape[shape])
        return found

    def scale_shapes(self, tensor, rows, columns):
        """Return the shape of the values that share a scale, for each of both GEMMs."""
        scaling = self.ablation.scaling_of(tensor)
        if scaling == "row":
            return (1, columns), (rows, 1)
        if scaling == "block":
            return ((BLOCK, BLOCK), (BLOCK, BLOCK)) if tensor == "w" else ((1, BLOCK), (BLOCK, 1))
        return (rows, columns), (rows, columns)

    def quantize(self, tensor, x, shape):
        """Return x, dequantized. `shape`: of the values that share a scale."""
        dtype = FORMATS[self.ablation.gradients if tensor == "dy" else "e4m3"]
        tiles = x.view(x.shape[0] // shape[0], shape[0], x.shape[1] // shape[1], shape[1])
        amax = torch.linalg.vector_norm(tiles, math.inf, (1, 3), keepdim=True, dtype=torch.float32)
        scaling = self.ablation.scaling_of(tensor)
        scale = current_scale(amax, FP8_MAX[dtype], power_of_2=scaling == "block")
        if scaling == "delayed":
            scale = self.delayed(tensor, amax, scale, FP8_MAX[dtype])
        round_ = compiled_round_to_fp8() if x.is_cuda else round_to_fp8
        stochastic = tensor == "dy" and self.ablation.rounding == "stochastic"
        return round_(tiles, scale, dtype, stochastic).view(x.shape)

    def delayed(self, tensor, amax, current, fp8_max):
        """Return the scale that the history gives, `current` if it has given none yet; in training, record
        the amax and the scale. In place, for CUDA graphs."""
        history, last = getattr(self, f"{tensor}_amax"), getattr(self, f"{tensor}_scale")
        scale = delayed_scale(history.max(), last, fp8_max)
        if self.records:
            last.copy_(scale)
            amax = amax.flatten().nan_to_num(nan=0.0, posinf=math.inf)  # TE's amax leaves NaN out
            history.copy_(torch.cat((history[1:], amax)))
        return torch.where(scale > 0, scale, current)


class _Linear(torch.autograd.Function):
    """x · wᵀ + bias: (rows, in) -> (rows, out)."""

    @staticmethod
    def forward(ctx, x, weight, bias, gemm):
        x_forward, x_wgrad = gemm.operands("x", x)
        w_forward, w_dgrad = gemm.operands("w", weight)
        ctx.save_for_backward(x_wgrad, w_dgrad)
        ctx.gemm, ctx.has_bias = gemm, bias is not None
        return F.linear(x_forward, w_forward, bias)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy_dgrad, dy_wgrad = ctx.gemm.operands("dy", dy)
        return dy_dgrad @ w, dy_wgrad.T @ x, dy.sum(0) if ctx.has_bias else None, None


# ---------------------------------------------------------------- the model

class Layer(nn.Module):
    """A module of Transformer Engine, with its parameters, in plain PyTorch. `gemms`: prefix: Gemm."""

    def __init__(self, module, config, gemms):
        super().__init__()
        self.config, self.gemms = config, nn.ModuleDict(gemms)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def linear(self, x, prefix=""):
        weight, bias = (self._parameters.get(f"{prefix}{name}") for name in ("weight", "bias"))
        gemm = self.gemms[f"{prefix}gemm"]
        # not in the trainer's first pass, which checks a model with random weights
        gemm.records = self.training and torch.is_grad_enabled()
        y = _Linear.apply(x.flatten(0, -2), weight, bias, gemm)
        return y.view(*x.shape[:-1], -1)

    def norm(self, x):
        weight, bias = (self._parameters.get(f"layer_norm_{name}") for name in ("weight", "bias"))
        dtype, shape, eps = weight.dtype, weight.shape, self.config.layernorm_epsilon
        if self.config.use_rmsnorm:
            return F.rms_norm(x, shape, weight.to(x.dtype), eps).to(dtype)
        return F.layer_norm(x, shape, weight.to(x.dtype), bias.to(x.dtype), eps).to(dtype)


class Linear(Layer):
    def forward(self, x, is_first_microbatch=None):
        return self.linear(x)


class NormLinear(Layer):
    def forward(self, x, is_first_microbatch=None):
        return self.linear(self.norm(x))


class NormMLP(Layer):
    def forward(self, x, is_first_microbatch=None):
        hidden = self.linear(self.norm(x), "fc1_")
        return self.linear(ACTIVATIONS[self.config.activation](hidden), "fc2_")


class Float32(nn.Module):
    def forward(self, x):
        return x.float()


class Ablated(OptimizedGPT2Model):
    """The GPT of model_te_optimized.py with the GEMMs of config.ablation in emulated FP8."""

    def __init__(self, config: AblatedConfig):
        super().__init__(config)
        ablation = Ablation.parse(config.ablation)
        nothing = dataclasses.replace(ablation, quantize="none")

        def gemm(*names):
            if set(names) & set(ablation.skip.split(",")):
                return Gemm(nothing)
            if ablation.rounding == "stochastic_head":
                rounding = "stochastic" if "head" in names else "nearest"
                return Gemm(dataclasses.replace(ablation, rounding=rounding))
            return Gemm(ablation)

        for layer, block in enumerate(self.blocks):
            place = {0: "first", config.n_layer - 1: "last"}.get(layer, "between")
            attn, mlp = block.attn, block.mlp
            attn.qkv = NormLinear(attn.qkv, config, {"gemm": gemm("qkv", place)})
            attn.proj = Linear(attn.proj, config, {"gemm": gemm("proj", place)})
            block.mlp = NormMLP(
                mlp, config, {"fc1_gemm": gemm("fc1", place), "fc2_gemm": gemm("fc2", place)})
        self.lm_head = NormLinear(self.lm_head, config, {"gemm": gemm("head")})
        self.gemms = [module for module in self.modules() if isinstance(module, Gemm)]
        if ablation.residual == "float32":
            self.dropout = nn.Sequential(self.dropout, Float32())  # of the embeddings, where it begins

    @property
    def emulates_fp8(self) -> bool:
        """Whether any operand is quantized now. Set it to False to run without: nanote.fp8.turned_off."""
        return any(gemm.enabled and gemm.quantized for gemm in self.gemms)

    @emulates_fp8.setter
    def emulates_fp8(self, enabled: bool) -> None:
        for gemm in self.gemms:
            gemm.enabled = enabled
