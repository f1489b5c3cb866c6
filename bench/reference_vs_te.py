"""Compare te_reference with Transformer Engine, number for number, on an NVIDIA Hopper GPU.

    python bench/reference_vs_te.py     # 400 random cases; writes results/reference_vs_te.json

The exit code is 1 if anything is out of bounds. There are four kinds of random case:

- tensor: heavy-tailed data, quantized by both. Bytes and scales must be equal, for all recipes of Hopper.
- history: amaxes of many tensors over several steps. Scales and amax histories must be equal.
- norm: its sums have another order, so at most one byte in 10,000 may differ, by one FP8 step.
- module: outputs and gradients must be within the rounding that `bounds` derives.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import json
import math
import random
from collections import Counter
from dataclasses import dataclass

import torch

import te_reference as ref
from bench.report import write_report
from nanote.command import parse, run_command


@dataclass
class Options:
    cases: int = 400  # Cases to draw, a quarter of each kind.
    seed: int = 0


if __name__ == "__main__":
    options = parse(Options, None, "bench/reference_vs_te.py", __doc__)  # --help needs no TE

try:
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.common import recipe as te_recipe
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
except ImportError as error:
    print(f"bench/reference_vs_te.py: compares with Transformer Engine on a GPU, but: {error}; "
          "python doctor.py says why", file=sys.stderr)
    sys.exit(2)

NORMS = ["LayerNorm", "RMSNorm"]
MODULES = {  # name: the values of its own arguments
    "Linear": {},
    "LayerNormLinear": {"normalization": NORMS, "zero_centered_gamma": [True, False, False]},
    "LayerNormMLP": {"normalization": NORMS, "activation": ["gelu", "geglu", "relu", "srelu", "swiglu"]},
}
FP8 = {torch.float8_e4m3fn: tex.DType.kFloat8E4M3, torch.float8_e5m2: tex.DType.kFloat8E5M2}
TE_DTYPE = {torch.bfloat16: tex.DType.kBFloat16, torch.float32: tex.DType.kFloat32}
TENSOR_RECIPES = ("delayed", "current", "current, powers of two")
BLOCK_RECIPES = {  # name: (size of a block in te_reference, whether the tensor is quantized columnwise)
    "block 1x128": ((1, 128), False),
    "block 128x128": ((128, 128), False),
    "block 1x128, columns": ((128, 1), True),
}

counts = Counter()
worst = {}  # {kind: the case that is closest to its bound}


def record(kind, value, bound, case):
    """Record a case if it is the closest to its bound so far."""
    def closeness(entry):
        return entry["value"] / max(entry["bound"], 1e-30)

    entry = {"value": value, "bound": bound, "case": case}
    if kind not in worst or closeness(entry) > closeness(worst[kind]):
        worst[kind] = entry


def compare(what, ours, theirs, case, bound=0.0):
    """Count the elements that differ, and record their share."""
    different = int((ours != theirs).sum())
    counts[f"compared_{what}"] += ours.numel()
    counts[f"mismatched_{what}"] += different
    record(what, different / ours.numel(), bound, case)


def make_quantizer(fp8, scale=None, power_of_2=False):
    """Return TE's quantizer of delayed scaling with a scale, of current scaling without one."""
    if scale is None:
        quantizer = Float8CurrentScalingQuantizer(FP8[fp8], device="cuda", force_pow_2_scales=power_of_2)
    else:
        quantizer = Float8Quantizer(scale, torch.zeros(1, device="cuda"), FP8[fp8])
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer


def heavy_tailed(rng, *shape, dtype):
    """Draw normal numbers over several orders of magnitude, zeros, and a few outliers."""
    normal = torch.randn(shape, device="cuda")
    spread = torch.exp(rng.uniform(0, 3) * torch.randn(shape, device="cuda"))
    x = normal * spread * 10.0 ** rng.uniform(-6, 3)
    x[torch.rand(shape, device="cuda") < 0.02] = 0
    x.view(-1)[torch.randint(0, x.numel(), (3,), device="cuda")] *= 1e4
    return x.to(dtype)


def tensor_case(rng):
    """Quantize one random tensor with a random recipe, in both."""
    fp8 = rng.choice(list(FP8))
    dtype = rng.choice(list(TE_DTYPE))
    recipe = rng.choice([*TENSOR_RECIPES, *BLOCK_RECIPES])
    rows = 16 * rng.randint(1, 40)
    columns = 16 * rng.randint(1, 40)
    case = f"{recipe}, {fp8}, {dtype}, {rows}x{columns}"
    x = heavy_tailed(rng, rows, columns, dtype=dtype)
    if recipe in BLOCK_RECIPES:
        compare_block_scaling(rng, x, fp8, recipe, case)
        return
    if recipe == "delayed":
        scale = torch.tensor([math.exp(rng.uniform(-15, 15))], device="cuda")
        theirs = make_quantizer(fp8, scale)(x)
    else:
        power_of_2 = recipe == "current, powers of two"
        scale = ref.current_scale(ref.amax_of(x), ref.FP8_MAX[fp8], power_of_2).view(1)
        theirs = make_quantizer(fp8, power_of_2=power_of_2)(x)
    compare("bytes", ref.quantize(x, scale, fp8).view(torch.uint8), theirs._data, case)
    compare("scales", scale.reciprocal(), theirs._scale_inv, case)


def compare_block_scaling(rng, x, fp8, recipe, case):
    """Compare block scaling of x by one of BLOCK_RECIPES."""
    block, is_columnwise = BLOCK_RECIPES[recipe]
    is_square = block == (128, 128)
    power_of_2 = rng.random() < 0.7
    quantizer = Float8BlockQuantizer(
        fp8_dtype=FP8[fp8], rowwise=not is_columnwise, columnwise=is_columnwise,
        force_pow_2_scales=power_of_2, block_scaling_dim=2 if is_square else 1)
    theirs = quantizer(x)

    def scale_of(amax, fp8_max):
        return ref.current_scale(amax, fp8_max, power_of_2)

    ours, scale, _ = ref.quantize_in_blocks(x, block, scale_of, fp8)
    # TE transposes columnwise data and 1x128 scales, and pads the last dimension of the scales for its GEMM
    if is_columnwise:
        ours = ours.T
        data = theirs._columnwise_data
        scale_inv = theirs._columnwise_scale_inv
    else:
        if not is_square:
            scale = scale.T
        data = theirs._rowwise_data
        scale_inv = theirs._rowwise_scale_inv
    compare("bytes", ours.contiguous().view(torch.uint8), data.view(torch.uint8), case)
    compare("scales", scale.reciprocal(), scale_inv[: scale.shape[0], : scale.shape[1]], case)


def history_case(rng):
    """Update the scales of delayed scaling over several steps of random amaxes, in both."""
    fp8 = rng.choice(list(FP8))
    algo = rng.choice(["max", "most_recent"])
    recipe = ref.DelayedScaling(
        margin=rng.randint(0, 2), amax_history_len=rng.choice([1, 2, 16, 1024]), amax_compute_algo=algo)
    case = f"{recipe}, {algo}, {fp8}"
    n = rng.randint(1, 2000)
    state = ref._ScalingState(recipe, n, "cuda")
    state.scale.uniform_(0.1, 100)
    history = state.amax_history.clone()
    scale = state.scale.clone()
    for _ in range(rng.randint(2, 20)):
        amax = torch.exp(rng.uniform(0, 10) * torch.randn(n, device="cuda"))
        for value in (0.0, math.inf, math.nan, 1e-38, 1e-44):
            amax[torch.rand(n, device="cuda") < 0.05] = value
        history[0] = amax
        state.amax_history[0] = amax
        tex.fused_amax_and_scale_update_after_reduction(
            amax.clone(), [history], [scale], algo, FP8[fp8], recipe.margin)
        state.roll(recipe, ref.FP8_MAX[fp8])
        compare("scales", state.scale, scale, case)
        compare("histories", state.amax_history.nan_to_num(nan=-1), history.nan_to_num(nan=-1), case)


def norm_case(rng):
    """Compare the FP8 output of a fused norm."""
    dtype = rng.choice(list(TE_DTYPE))
    norm = rng.choice(NORMS)
    zero_centered = rng.random() < 0.5
    delayed = rng.random() < 0.5
    rows = 16 * rng.randint(8, 64)
    columns = 16 * rng.randint(4, 128)
    recipe = "delayed" if delayed else "current"
    case = f"{norm}, zero_centered_gamma={zero_centered}, {recipe}, {dtype}, {rows}x{columns}"
    x = heavy_tailed(rng, rows, columns, dtype=dtype)
    mean_gamma = 0.0 if zero_centered else 1.0
    gamma = (torch.randn(columns, device="cuda") * 0.2 + mean_gamma).to(dtype)
    beta = (torch.randn(columns, device="cuda") * 0.1).to(dtype)
    ours = ref._normalize(x.float(), gamma, beta, 1e-5, norm, zero_centered)
    fp8 = torch.float8_e4m3fn
    if delayed:
        scale = torch.tensor([rng.uniform(5, 60)], device="cuda")
        quantizer = make_quantizer(fp8, scale)
    else:
        ours = ours.to(dtype)
        scale = ref.current_scale(ref.amax_of(ours), ref.FP8_MAX[fp8])
        quantizer = make_quantizer(fp8)
    rest = 1e-5, None, quantizer, TE_DTYPE[dtype], 0, zero_centered
    if norm == "LayerNorm":
        theirs, *_ = tex.layernorm_fwd(x, gamma, beta, *rest)
    else:
        theirs, *_ = tex.rmsnorm_fwd(x, gamma, *rest)
    ours = ref.quantize(ours, scale, fp8).view(torch.uint8).int()
    theirs = theirs._data.int()
    compare("bytes_behind_norm", ours, theirs, case, bound=1.0)  # `main` bounds their sum
    record("FP8 steps behind a norm", int((ours - theirs).abs().max()), 1.0, case)


def bounds(recipe, dtype, behind_activation, inner):
    """Return the largest relative error of a GEMM's result that rounding explains.

    Rounding the result to bfloat16: 2^-8. Tensor cores keep 13 bits after the point of the largest of the
    terms that they add at once, so each of the `inner` (K) terms is off by up to 2^-13; with random signs the
    sum grows with sqrt(inner), and so does its error, at most. After an activation or another GEMM, the
    operands themselves differ by this error d. This moves a share d / s of the FP8 values by a step s, a
    relative error of sqrt(d s); an input gradient depends on two such operands.
    """
    d = 2.0**-13 * math.sqrt(inner)
    if dtype == torch.bfloat16:
        d += 2.0**-8
    if not behind_activation:
        return d
    step = 2.0**-2 if recipe.fp8_format.name == "HYBRID" else 2.0**-3
    return math.sqrt(2 * d * step)


@dataclass
class Side:
    """A library, TE or te_reference, with its module and recipe of a case."""

    library: object
    module: torch.nn.Module
    recipe: object


def forward(side, x):
    with side.library.autocast(enabled=True, recipe=side.recipe):
        return side.module(x)


def backward(side, x, out, grad):
    """Run the backward pass; return output and gradients by name."""
    out.backward(grad)
    results = {"y": out, "dx": x.grad}
    for name, parameter in side.module.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad
    return results


def train_step(te_side, ref_side, x):
    """Run a forward and a backward pass of both; return the results of each."""
    their_x = x.clone().requires_grad_()
    our_x = x.clone().requires_grad_()
    te_side.module.zero_grad()
    ref_side.module.zero_grad()
    theirs = forward(te_side, their_x)
    ours = forward(ref_side, our_x)
    grad = torch.randn_like(theirs) * 1e-3
    return backward(te_side, their_x, theirs, grad), backward(ref_side, our_x, ours, grad)


def make_recipes(rng):
    """Return the same random recipe of TE and of te_reference."""
    kind = rng.choice(["DelayedScaling", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
    fp8_format = rng.choice(["HYBRID", "E4M3"])
    options = {}
    if kind == "DelayedScaling":
        options = dict(
            margin=rng.randint(0, 2), amax_history_len=rng.choice([1, 3, 1024]),
            amax_compute_algo=rng.choice(["max", "most_recent"]))
    theirs = getattr(te_recipe, kind)(fp8_format=getattr(te_recipe.Format, fp8_format), **options)
    ours = getattr(ref, kind)(fp8_format=getattr(ref.Format, fp8_format), **options)
    return theirs, ours


def give_same_weights(module, other):
    """Give both modules the weights of the first one, with random biases and norms."""
    weights = {}
    for name, value in module.state_dict().items():
        if "extra" not in name:
            weights[name] = value + 0.1 * torch.randn_like(value) if value.dim() == 1 else value
    module.load_state_dict(weights, strict=False)
    other.load_state_dict(weights, strict=False)


def module_case(rng):
    """Run a random module for four steps in both, and compare outputs, gradients and FP8 state."""
    dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float32])
    hidden = 128 * rng.randint(1, 6)
    ffn = 128 * rng.randint(1, 6)
    tokens = 128 * rng.randint(1, 4)
    name = rng.choice(list(MODULES))
    options = {"bias": rng.random() < 0.7, "params_dtype": dtype}
    for argument, values in MODULES[name].items():
        options[argument] = rng.choice(values)
    their_recipe, our_recipe = make_recipes(rng)
    is_delayed = isinstance(our_recipe, ref.DelayedScaling)
    case = f"{name} {hidden}->{ffn}, {tokens} tokens, {options}, {our_recipe}"
    te_side = Side(te, getattr(te, name)(hidden, ffn, **options), their_recipe)
    ref_side = Side(ref, getattr(ref, name)(hidden, ffn, **options), our_recipe)
    give_same_weights(te_side.module, ref_side.module)
    bound = bounds(our_recipe, dtype, name == "LayerNormMLP", max(hidden, 2 * ffn, tokens))
    for step in range(4):
        x = torch.randn(tokens, hidden, device="cuda") * torch.exp(torch.randn(hidden, device="cuda"))
        theirs, ours = train_step(te_side, ref_side, x.to(dtype))
        has_first_scales = is_delayed and step == 0  # they are 1, and most gradients subnormal
        if not has_first_scales:
            for key in theirs:
                expected = theirs[key].float()
                found = ours[key].float()
                error = ((expected - found).norm() / expected.norm()).item()
                kind = "output" if key == "y" else "gradients"
                record(f"{name}: {kind}", error, bound, f"{key} of {case}")
        if is_delayed and name == "Linear":  # the quantized tensors themselves are the same
            compare_fp8_state(te_side.module, ref_side.module, case)


def compare_fp8_state(theirs, ours, case):
    for key in ("scaling_fwd", "scaling_bwd"):
        expected = theirs.fp8_meta[key]
        found = ours.fp8_meta[key]
        compare("histories", found.amax_history, expected.amax_history, case)
        compare("scales", found.scale, expected.scale, case)


def main():
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    kinds = (tensor_case, history_case, norm_case, module_case)
    for number in range(options.cases):
        run_case = kinds[number % len(kinds)]
        run_case(rng)
        counts["cases"] += 1
    are_norms_close = counts["mismatched_bytes_behind_norm"] <= counts["compared_bytes_behind_norm"] / 10_000
    are_others_close = all(entry["value"] <= entry["bound"] for entry in worst.values())
    passed = are_norms_close and are_others_close
    result = write_report(
        "bench/reference_vs_te.py", None, {"passed": passed, **counts, "worst": worst},
        ROOT / "results/reference_vs_te.json")
    print(json.dumps(result, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/reference_vs_te.py"))
