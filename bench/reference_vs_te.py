"""Compare te_reference with Transformer Engine, number for number, on an NVIDIA Hopper GPU.

    python bench/reference_vs_te.py     # 400 random cases; writes results/reference_vs_te.json

The exit code is 1 if anything is out of bounds. There are four kinds of random case:

- tensor: heavy-tailed data, quantized by both. Bytes and scales must be equal, for all recipes of Hopper.
- history: amaxes of many tensors over several steps. Scales and amax histories must be equal.
- norm: its sums have another order, so at most one byte in 10,000 may differ, by one FP8 step.
- module: outputs and gradients must be within the rounding that `bounds` derives.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing: no traceback

import json
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import te_reference as ref
from bench.report import write_report
from nanote.config import parse, run_command

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

counts, worst = Counter(), {}  # {kind: the case that is closest to its bound}


def record(kind, value, bound, case):
    """Record a case if it is the closest to its bound so far."""
    entry = {"value": value, "bound": bound, "case": case}
    worst[kind] = max(worst.get(kind, entry), entry, key=lambda e: e["value"] / max(e["bound"], 1e-30))


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
    fp8, dtype = rng.choice(list(FP8)), rng.choice(list(TE_DTYPE))
    recipe = rng.choice(["delayed", "current", "current, powers of two", "block 1x128", "block 128x128",
                         "block 1x128, columns"])
    rows, columns = 16 * rng.randint(1, 40), 16 * rng.randint(1, 40)
    case = f"{recipe}, {fp8}, {dtype}, {rows}x{columns}"
    x = heavy_tailed(rng, rows, columns, dtype=dtype)
    if recipe.startswith("block"):
        return compare_block_scaling(rng, x, fp8, "128x128" in recipe, "columns" in recipe, case)
    scale, power_of_2 = None, "two" in recipe
    if recipe == "delayed":
        scale = torch.tensor([math.exp(rng.uniform(-15, 15))], device="cuda")
    theirs = make_quantizer(fp8, scale, power_of_2)(x)
    if scale is None:
        scale = ref.current_scale(ref.amax_of(x), ref.FP8_MAX[fp8], power_of_2).view(1)
    compare("bytes", ref.quantize(x, scale, fp8).view(torch.uint8), theirs._data, case)
    compare("scales", scale.reciprocal(), theirs._scale_inv, case)


def compare_block_scaling(rng, x, fp8, square, columnwise, case):
    """Compare block scaling of x, rowwise or columnwise, in blocks of 128x128 or 128 elements."""
    power_of_2 = rng.random() < 0.7
    theirs = Float8BlockQuantizer(
        fp8_dtype=FP8[fp8], rowwise=not columnwise, columnwise=columnwise, force_pow_2_scales=power_of_2,
        block_scaling_dim=2 if square else 1)(x)
    block = (128, 128) if square else (128, 1) if columnwise else (1, 128)
    ours, scale, _ = ref.in_blocks(
        x, block, lambda amax, fp8_max: ref.current_scale(amax, fp8_max, power_of_2), fp8)
    # TE transposes columnwise data and 1x128 scales, and pads the last dimension of the scales for its GEMM
    if columnwise:
        data, scale_inv, ours = theirs._columnwise_data, theirs._columnwise_scale_inv, ours.T
    else:
        data, scale_inv, scale = theirs._rowwise_data, theirs._rowwise_scale_inv, scale if square else scale.T
    compare("bytes", ours.contiguous().view(torch.uint8), data.view(torch.uint8), case)
    compare("scales", scale.reciprocal(), scale_inv[: scale.shape[0], : scale.shape[1]], case)


def history_case(rng):
    """Update the scales of delayed scaling over several steps of random amaxes, in both."""
    fp8, algo = rng.choice(list(FP8)), rng.choice(["max", "most_recent"])
    recipe = ref.DelayedScaling(
        margin=rng.randint(0, 2), amax_history_len=rng.choice([1, 2, 16, 1024]), amax_compute_algo=algo)
    case = f"{recipe}, {algo}, {fp8}"
    n = rng.randint(1, 2000)
    state = ref._ScalingState(recipe, n, "cuda")
    state.scale.uniform_(0.1, 100)
    history, scale = state.amax_history.clone(), state.scale.clone()
    for _ in range(rng.randint(2, 20)):
        amax = torch.exp(rng.uniform(0, 10) * torch.randn(n, device="cuda"))
        for value in (0.0, math.inf, math.nan, 1e-38, 1e-44):
            amax[torch.rand(n, device="cuda") < 0.05] = value
        history[0] = state.amax_history[0] = amax
        tex.fused_amax_and_scale_update_after_reduction(
            amax.clone(), [history], [scale], algo, FP8[fp8], recipe.margin)
        state.roll(recipe, ref.FP8_MAX[fp8])
        compare("scales", state.scale, scale, case)
        compare("histories", state.amax_history.nan_to_num(nan=-1), history.nan_to_num(nan=-1), case)


def norm_case(rng):
    """Compare the FP8 output of a fused norm."""
    dtype, norm = rng.choice(list(TE_DTYPE)), rng.choice(NORMS)
    zero_centered, delayed = rng.random() < 0.5, rng.random() < 0.5
    rows, columns = 16 * rng.randint(8, 64), 16 * rng.randint(4, 128)
    recipe = "delayed" if delayed else "current"
    case = f"{norm}, zero_centered_gamma={zero_centered}, {recipe}, {dtype}, {rows}x{columns}"
    x = heavy_tailed(rng, rows, columns, dtype=dtype)
    gamma = (torch.randn(columns, device="cuda") * 0.2 + (not zero_centered)).to(dtype)
    beta = (torch.randn(columns, device="cuda") * 0.1).to(dtype)
    ours = ref._normalize(x.float(), gamma, beta, 1e-5, norm, zero_centered)
    fp8 = torch.float8_e4m3fn
    scale = torch.tensor([rng.uniform(5, 60)], device="cuda") if delayed else None
    quantizer = make_quantizer(fp8, scale)
    if not delayed:
        ours = ours.to(dtype)
        scale = ref.current_scale(ref.amax_of(ours), ref.FP8_MAX[fp8])
    rest = 1e-5, None, quantizer, TE_DTYPE[dtype], 0, zero_centered
    if norm == "LayerNorm":
        theirs, *_ = tex.layernorm_fwd(x, gamma, beta, *rest)
    else:
        theirs, *_ = tex.rmsnorm_fwd(x, gamma, *rest)
    ours, theirs = ref.quantize(ours, scale, fp8).view(torch.uint8).int(), theirs._data.int()
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
    d = (2.0**-8 if dtype == torch.bfloat16 else 0.0) + 2.0**-13 * math.sqrt(inner)
    if not behind_activation:
        return d
    step = 2.0**-2 if recipe.fp8_format.name == "HYBRID" else 2.0**-3
    return math.sqrt(2 * d * step)


def train_step(sides, x):
    """Run a forward and a backward pass of each (library, module, recipe); return output and gradients."""
    grad, results = None, []
    for library, module, recipe in sides:
        inp = x.clone().requires_grad_()
        module.zero_grad()
        with library.autocast(enabled=True, recipe=recipe):
            out = module(inp)
        grad = torch.randn_like(out) * 1e-3 if grad is None else grad
        out.backward(grad)
        gradients = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
        results.append({"y": out, "dx": inp.grad} | gradients)
    return results


def module_case(rng):
    """Run a random module for four steps in both, and compare outputs, gradients and FP8 state."""
    dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float32])
    hidden, ffn, tokens = 128 * rng.randint(1, 6), 128 * rng.randint(1, 6), 128 * rng.randint(1, 4)
    name = rng.choice(list(MODULES))
    options = {"bias": rng.random() < 0.7, "params_dtype": dtype}
    options |= {argument: rng.choice(values) for argument, values in MODULES[name].items()}
    kind = rng.choice(["DelayedScaling", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
    format, is_delayed = rng.choice(["HYBRID", "E4M3"]), kind == "DelayedScaling"
    delayed = dict(margin=rng.randint(0, 2), amax_history_len=rng.choice([1, 3, 1024]),
                   amax_compute_algo=rng.choice(["max", "most_recent"])) if is_delayed else {}

    def make_recipe(library):
        return getattr(library, kind)(fp8_format=getattr(library.Format, format), **delayed)

    case = f"{name} {hidden}->{ffn}, {tokens} tokens, {options}, {make_recipe(ref)}"
    sides = [  # (library, module, recipe): TE's, then te_reference's
        (te, getattr(te, name)(hidden, ffn, **options), make_recipe(te_recipe)),
        (ref, getattr(ref, name)(hidden, ffn, **options), make_recipe(ref)),
    ]
    weights = {k: v + 0.1 * torch.randn_like(v) if v.dim() == 1 else v
               for k, v in sides[0][1].state_dict().items() if "extra" not in k}
    for _, module, _ in sides:
        module.load_state_dict(weights, strict=False)
    for step in range(4):
        x = torch.randn(tokens, hidden, device="cuda") * torch.exp(torch.randn(hidden, device="cuda"))
        results = train_step(sides, x.to(dtype))
        bound = bounds(sides[1][2], dtype, name == "LayerNormMLP", max(hidden, 2 * ffn, tokens))
        # not delayed scaling's first step: its first scales are 1, and most gradients subnormal
        for key, theirs in results[0].items() if step or not is_delayed else ():
            error = ((theirs.float() - results[1][key].float()).norm() / theirs.float().norm()).item()
            record(f"{name}: {'output' if key == 'y' else 'gradients'}", error, bound, f"{key} of {case}")
        if is_delayed and name == "Linear":  # the quantized tensors themselves are the same
            for key in ("scaling_fwd", "scaling_bwd"):
                theirs, ours = (module.fp8_meta[key] for _, module, _ in sides)
                compare("histories", ours.amax_history, theirs.amax_history, case)
                compare("scales", ours.scale, theirs.scale, case)


@dataclass
class Options:
    cases: int = 400  # Cases to draw, a quarter of each kind.
    seed: int = 0


def main(argv=None):
    options = parse(Options, argv, "bench/reference_vs_te.py", __doc__)
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    for number in range(options.cases):
        (tensor_case, history_case, norm_case, module_case)[number % 4](rng)
        counts["cases"] += 1
    passed = counts["mismatched_bytes_behind_norm"] <= counts["compared_bytes_behind_norm"] / 10_000
    passed = passed and all(entry["value"] <= entry["bound"] for entry in worst.values())
    result = write_report("bench/reference_vs_te.py", argv, {"passed": passed, **counts, "worst": worst},
                          ROOT / "results/reference_vs_te.json")
    print(json.dumps(result, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/reference_vs_te.py"))
