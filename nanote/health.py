"""Statistics of FP8 quantization: how much of the format's range a tensor uses, what saturates or underflows.

    with watch(model) as health:  # records the first forward and backward pass inside
        model(input_ids, labels).backward()
    health["blocks.0.attn.qkv"]["input"]
    # {"amax": 4.51, "scale": 74.7, "saturated": 0.0, "flushed": 0.0004}

`scale` is the factor before the cast. If amax * scale is above the format's maximum, the largest values
saturate. `flushed` is the fraction of the non-zero values that become zero. What is unknown is None.

Hooks read the tensors before they are quantized, and the scales in TE's `fp8_meta`: in eager steps, since
neither CUDA graphs nor compiled code run hooks. Between the GEMMs of a `LayerNormMLP` (fc2_input,
fc1_output_gradient) only delayed scaling tells amax and scale.
"""
import math
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from nanote.engine import Format

KINDS = ("input", "weight", "output_gradient")
# {fp8_max of a format: (a larger value saturates, a value up to this becomes zero)}. Both limits are half a
# step away: E4M3 has steps of 32 below 448 and of 2^-9 above 0, E5M2 of 8192 below 57,344 and of 2^-16.
LIMITS = {448: (448 + 16, 2.0**-10), 57344: (57344 + 4096, 2.0**-17)}
CHUNK = 2**24  # values processed at a time: float32 copies of the logits' gradient would take gigabytes


@contextmanager
def watch(model):
    """Record statistics of every module that runs in FP8.

    Yields {module: {tensor: {"amax", "scale", "saturated", "flushed"}}}, which is filled at the end.
    """
    health = {}
    handles = []  # of hooks
    seen = {}  # {(name, module): {tensor: statistics}}
    for name, module in model.named_modules():
        if hasattr(module, "fp8_meta") and _weights_of_gemms(module):
            handles.append(module.register_forward_hook(partial(_record, seen, handles, name)))
    try:
        yield health
    finally:
        for handle in handles:
            handle.remove()
    for (name, module), tensors in seen.items():
        if "fc1_output_gradient" in tensors:  # its amax is known only after the backward pass
            tensors["fc1_output_gradient"]["amax"] = _delayed(module, "fc1_output_gradient")["amax"]
        health[name] = {tensor: as_numbers(statistics) for tensor, statistics in tensors.items()}


def as_numbers(statistics: dict) -> dict:
    """Return statistics as Python numbers. Waits for the device."""
    return {name: None if value is None else float(value) for name, value in statistics.items()}


def runs_in_fp8(module) -> bool:
    """Return whether the last forward pass of a module was in FP8."""
    meta = getattr(module, "fp8_meta", {})
    return bool(meta.get("fp8_checkpoint"))  # TE's name for it; no checkpoint is meant


def _weights_of_gemms(module) -> dict:
    """Return {prefix: weights} of each GEMM: prefixes fc1_ and fc2_ for an MLP, "" otherwise."""
    weights = {}
    for name, parameter in module.named_parameters(recurse=False):
        if name.endswith("weight") and parameter.dim() == 2:  # not of a norm
            weights[name] = parameter
    if "fc1_weight" in weights:
        return {"fc1_": [weights["fc1_weight"]], "fc2_": [weights["fc2_weight"]]}
    if not weights:
        return {}
    return {"": list(weights.values())}  # several: Q, K and V of one GEMM


def gemms_with_weights(model):
    """Yield (module's name, module, GEMM's name, weights) of each GEMM that has a weight."""
    for name, module in model.named_modules():
        weights_of_gemms = {}
        if hasattr(module, "fp8_meta"):
            weights_of_gemms = _weights_of_gemms(module)
        elif isinstance(module, torch.nn.Linear):
            weights_of_gemms = {"": [module.weight]}
        for prefix, weights in weights_of_gemms.items():
            yield name, module, f"{name}.{prefix}".rstrip("._"), weights


def count_gemms_that_ran(model) -> tuple[int, int]:
    """Return how many GEMMs of a model ran in FP8 in its last forward pass, and how many it has."""
    in_fp8 = [runs_in_fp8(module) for _, module, _, _ in gemms_with_weights(model)]
    return in_fp8.count(True), len(in_fp8)


def count_gemms_by_config(model) -> tuple[int, int]:
    """Return how many GEMMs of a model of the kit will run in FP8, by its config, and how many it has."""
    in_fp8 = [_is_fp8_chosen(model, name) for name, _, _, _ in gemms_with_weights(model)]
    return in_fp8.count(True), len(in_fp8)


def _is_fp8_chosen(model, name: str) -> bool:
    """Return whether the config runs the GEMMs of blocks.N.… or lm_head in FP8."""
    config = model.config
    if not config.use_fp8:
        return False
    first, *others = name.split(".")
    return model.in_fp8(int(others[0])) if first == "blocks" else config.fp8_lm_head


def _delayed(module, tensor: str) -> dict:
    """Return the newest amax and the scale of a tensor under delayed scaling.

    TE's order in fp8_meta is input, weight, output of each GEMM in the forward pass; output gradient, input
    gradient in the backward pass.
    """
    gemm = 1 if tensor.startswith("fc2_") else 0
    if tensor.endswith("gradient"):
        state = module.fp8_meta["scaling_bwd"]
        index = 2 * gemm
    else:
        state = module.fp8_meta["scaling_fwd"]
        index = 3 * gemm + (1 if tensor.endswith("weight") else 0)
    history = state.amax_history[:, index]
    # the newest amax is in row 0, and in the last row after an update of the scales, which clears row 0
    amax = torch.where(history[0] != 0, history[0], history[-1])
    return {"amax": amax, "scale": state.scale[index].clone(), "saturated": None, "flushed": None}


@torch.no_grad()
def _record(seen, handles, name, module, args, output):
    """Forward hook: record input and weights now, and the output's gradient in a hook of the backward pass.

    fp8_meta has the scales of this pass: they are updated after the whole forward pass.
    """
    if not runs_in_fp8(module):
        return
    weights = _weights_of_gemms(module)
    is_mlp = "fc2_" in weights
    module_input = "fc1_input" if is_mlp else "input"
    module_gradient = "fc2_output_gradient" if is_mlp else "output_gradient"
    # no hook sees the tensors between the two GEMMs of an MLP, but delayed scaling has their amax
    knows_between = is_mlp and module.fp8_meta["recipe"].delayed()
    if (name, module) not in seen:  # gradient checkpointing runs this again, after the scales were updated
        tensors = seen[name, module] = {}
        tensors[module_input] = _statistics(module, module_input, _normed(module, args[0]))
        if knows_between:
            tensors["fc2_input"] = _delayed(module, "fc2_input")
        for prefix, parts in weights.items():
            weight = torch.cat([part.detach() for part in parts])
            tensors[f"{prefix}weight"] = _statistics(module, f"{prefix}weight", weight)

    def record_gradient(gradient):
        tensors = seen[name, module]
        if module_gradient not in tensors:
            tensors[module_gradient] = _statistics(module, module_gradient, gradient)
            if knows_between:
                tensors["fc1_output_gradient"] = _delayed(module, "fc1_output_gradient")

    output = output[0] if isinstance(output, tuple) else output
    if output.requires_grad:
        handles.append(output.register_hook(record_gradient))


def _normed(module, x):
    """Return the input of the GEMM: the output of a fused norm, in float32, or x itself."""
    if getattr(module, "layer_norm_weight", None) is None:
        return x
    gamma = module.layer_norm_weight.float()
    if module.zero_centered_gamma:
        gamma = gamma + 1
    if module.normalization == "RMSNorm":
        return F.rms_norm(x.float(), x.shape[-1:], gamma, module.eps)
    return F.layer_norm(x.float(), x.shape[-1:], gamma, module.layer_norm_bias.float(), module.eps)


@torch.no_grad()
def _statistics(module, tensor: str, x) -> dict:
    """Return the statistics of x (any shape), the values of `tensor` before quantization."""
    recipe = module.fp8_meta["recipe"]
    chunks = x.reshape(-1).split(CHUNK)
    amax = torch.stack([_amax(chunk) for chunk in chunks]).amax()
    if recipe.custom():
        return {"amax": amax, "scale": None, "saturated": None, "flushed": None}
    if not (recipe.delayed() or recipe.float8_current_scaling()):  # a scale per block: nothing saturates
        return {"amax": amax, "scale": None, "saturated": 0.0, "flushed": None}
    fp8_max = _fp8_max(recipe.fp8_format, tensor)
    if recipe.delayed():
        scale = _delayed(module, tensor)["scale"]
    else:
        scale = torch.where((amax > 0) & amax.isfinite(), fp8_max / amax, 1.0)
        if recipe.use_power_2_scales:
            scale = torch.exp2(scale.log2().floor())
    largest, smallest = LIMITS[fp8_max]
    saturated = 0
    flushed = 0
    nonzero = 0
    for chunk in chunks:
        size = (chunk.float() * scale).abs()
        saturated += (size > largest).sum()
        flushed += ((size <= smallest) & (chunk != 0)).sum()
        nonzero += (chunk != 0).sum()
    return {"amax": amax, "scale": scale, "saturated": saturated / x.numel(),
            "flushed": flushed / nonzero.clamp(min=1)}


def _fp8_max(fp8_format, tensor: str) -> float:
    """Return the largest number of a tensor's format: of a gradient, or of an input or a weight."""
    maxima = fp8_format.value
    return maxima.max_bwd if tensor.endswith("gradient") else maxima.max_fwd


def _amax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value, (), float32, without NaN."""
    return x.abs().nan_to_num(nan=0.0, posinf=math.inf).amax().float()


# ---------------------------------------------------------------- the picture

UNKNOWN = "darkgray"
SMALLEST_PERCENTAGE = 1e-3  # of values that become zero: the axis is logarithmic


def plot(records: list[dict], path, title: str = "", fp8_format: str = "hybrid") -> None:
    """Draw records {"step", "health"} as heat maps of GEMMs x steps: headroom (bits above amax), and flushed.
    What is unknown, as with block scaling, is gray."""
    from matplotlib import rc_context
    from matplotlib.colors import LogNorm, TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    gemms, headroom, flushed = _maps(records, fp8_format)
    with rc_context({"font.size": 13}):
        figure = Figure(figsize=(13, 2.2 + 2 * max(2.4, 0.21 * len(gemms))), layout="constrained")
        saturated = _largest(records, "saturated")
        flushed_to_zero = _largest(records, "flushed")
        figure.suptitle(f"FP8 health of {title}\nlargest share of a measured tensor that is "
                        f"saturated: {saturated}, flushed to zero: {flushed_to_zero}")
        above, below = figure.subplots(2, len(KINDS), sharex=True, sharey=True)
        _draw_row(figure, above, headroom, "headroom, bits\n(red: saturates)", cmap="RdBu", extend="both",
                  norm=TwoSlopeNorm(vcenter=0, vmin=-2, vmax=6))
        _draw_row(figure, below, flushed, "flushed to zero, %", cmap="viridis", extend="min",
                  norm=LogNorm(SMALLEST_PERCENTAGE, 100))
        for axes, kind in zip(above, KINDS):
            axes.set_title(kind.replace("_", " "))
        records_per_tick = (len(records) + 3) // 4  # at most four ticks
        ticks = range(0, len(records), records_per_tick)
        for axes in below:
            axes.set_xticks(ticks, [records[i]["step"] for i in ticks])
            axes.set_xlabel("step")
        below[0].set_yticks(range(len(gemms)), gemms)
        label = "not measured, as between the GEMMs of a fused MLP and with block scaling"
        unknown = Patch(color=UNKNOWN, label=label)
        figure.legend(handles=[unknown], loc="outside lower center", frameon=False)
        figure.savefig(path, dpi=130)


def _draw_row(figure, axes_row, maps, label: str, extend: str, **colors) -> None:
    """Draw the map of each kind of tensor, and one color bar."""
    for axes, values in zip(axes_row, maps):
        image = axes.imshow(values, aspect="auto", interpolation="nearest", **colors)
        axes.set_facecolor(UNKNOWN)
    figure.colorbar(image, ax=list(axes_row), label=label, extend=extend, format="%g",
                    aspect=max(12, len(values)))


def _largest(records: list[dict], share: str) -> str:
    """Return the largest share, "saturated" or "flushed", of any tensor in any record, in percent."""
    known = []
    for record in records:
        for tensors in record["health"].values():
            known += [statistics[share] for statistics in tensors.values() if statistics[share] is not None]
    return f"{100 * max(known):.2f} %" if known else "not measured"


def _maps(records: list[dict], fp8_format: str) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Return names of GEMMs, headroom and flushed share, both (kinds, GEMMs, steps), NaN where unknown."""
    rows = {}  # {name of a GEMM: its row}
    for record in records:
        for module, tensors in record["health"].items():
            for tensor in tensors:
                name, _ = _gemm_and_kind(module, tensor)
                rows.setdefault(name, len(rows))
    headroom = torch.full((len(KINDS), len(rows), len(records)), math.nan)
    flushed = headroom.clone()
    for column, record in enumerate(records):
        for module, tensors in record["health"].items():
            for tensor, statistics in tensors.items():
                name, kind = _gemm_and_kind(module, tensor)
                cell = KINDS.index(kind), rows[name], column
                headroom[cell] = _headroom(statistics, kind, fp8_format)
                if statistics["flushed"] is not None:
                    flushed[cell] = max(100 * statistics["flushed"], SMALLEST_PERCENTAGE)
    return list(rows), headroom, flushed


def _gemm_and_kind(module: str, tensor: str) -> tuple[str, str]:
    """Return ("blocks.0.mlp fc1", "input") for the tensor fc1_input of blocks.0.mlp."""
    for kind in KINDS:
        if tensor.endswith(kind):
            prefix = tensor.removesuffix(kind).rstrip("_")
            return f"{module} {prefix}".rstrip(), kind
    raise ValueError(f"{tensor}: not a tensor of fp8_health.jsonl")


def _headroom(statistics: dict, kind: str, fp8_format: str) -> float:
    """Return the bits between amax and the largest value of the format; NaN if unknown."""
    if statistics["scale"] is None:
        return math.nan
    fp8_max = _fp8_max(Format.E4M3 if fp8_format == "e4m3" else Format.HYBRID, kind)
    largest = statistics["amax"] * statistics["scale"]
    return math.log2(fp8_max / largest) if 0 < largest < math.inf else math.nan
