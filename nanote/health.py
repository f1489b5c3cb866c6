"""Statistics of FP8 quantization: how much of the format's range a tensor uses, what saturates or underflows.

    with watch(model):  # records the first forward and backward pass inside
        model(input_ids, labels).backward()
    health(model)["blocks.0.attn.qkv"]["input"]
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

KINDS = ("input", "weight", "output_gradient")
# {maximum of the format: (values above this round beyond the maximum, values up to this round to zero)}. Both
# limits are half a step away: E4M3 has steps of 32 below 448 and of 2^-9 above 0, E5M2 of 8192 and 2^-16.
LIMITS = {448: (448 + 16, 2.0**-10), 57344: (57344 + 4096, 2.0**-17)}
CHUNK = 2**24  # values processed at a time: float32 copies of the logits' gradient would take gigabytes


@contextmanager
def watch(model):
    """Record statistics of every module that runs in FP8; `health(model)` returns them afterwards."""
    handles, seen = [], {}  # {(name, module): {tensor: statistics}}
    for name, module in model.named_modules():
        if hasattr(module, "fp8_meta") and _gemms(module):
            handles.append(module.register_forward_hook(partial(_record, seen, handles, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    model.fp8_health = {}
    for (name, module), tensors in seen.items():
        if "fc1_output_gradient" in tensors:  # its amax is known only after the backward pass
            tensors["fc1_output_gradient"]["amax"] = _delayed(module, "fc1_output_gradient")["amax"]
        model.fp8_health[name] = {
            tensor: {key: None if value is None else float(value) for key, value in statistics.items()}
            for tensor, statistics in tensors.items()}


def health(model) -> dict:
    """Return {module: {tensor: {"amax", "scale", "saturated", "flushed"}}} of the last `watch`."""
    return getattr(model, "fp8_health", {})


def _gemms(module) -> dict:
    """Return {prefix: weights} of each GEMM: prefixes fc1_ and fc2_ for an MLP, "" otherwise."""
    weights = {name: p for name, p in module.named_parameters(recurse=False)
               if name.endswith("weight") and name != "layer_norm_weight"}
    if "fc1_weight" in weights:
        return {"fc1_": [weights["fc1_weight"]], "fc2_": [weights["fc2_weight"]]}
    return {"": list(weights.values())} if weights else {}  # several: Q, K and V of one GEMM


def count_gemms(model, has_run: bool) -> tuple[int, int]:
    """Return how many of a model's GEMMs with a weight run in FP8, and how many it has. has_run: in the last
    forward pass; else by the config, which must be that of one of the kit's files."""
    in_fp8 = total = 0
    for name, module in model.named_modules():
        has_state = hasattr(module, "fp8_meta")
        count = len(_gemms(module)) if has_state else int(isinstance(module, torch.nn.Linear))
        if not any(parameter.dim() == 2 for parameter in module.parameters(recurse=False)):
            continue  # a norm
        total += count
        if has_state and (module.fp8_meta["fp8_checkpoint"] if has_run else _is_fp8_chosen(model, name)):
            in_fp8 += count
    return in_fp8, total


def _is_fp8_chosen(model, name: str) -> bool:
    """Return whether the config runs the GEMMs of blocks.N.… or lm_head in FP8."""
    config, (first, *others) = model.config, name.split(".")
    return config.use_fp8 and (config.in_fp8(int(others[0])) if first == "blocks" else config.fp8_lm_head)


def _delayed(module, tensor: str) -> dict:
    """Return the newest amax and the scale of a tensor under delayed scaling. TE's order in fp8_meta is
    input, weight, output of each GEMM in the forward pass; output gradient, input gradient in backward. The
    newest amax is in row 0 of the history; after an update of scales, in the last."""
    gemm, is_gradient = int(tensor.startswith("fc2_")), tensor.endswith("gradient")
    state = module.fp8_meta["scaling_bwd" if is_gradient else "scaling_fwd"]
    index = 2 * gemm if is_gradient else 3 * gemm + tensor.endswith("weight")
    history = state.amax_history[:, index]
    amax = torch.where(history[0] != 0, history[0], history[-1])
    return {"amax": amax, "scale": state.scale[index].clone(), "saturated": None, "flushed": None}


@torch.no_grad()
def _record(seen, handles, name, module, args, output):
    """Forward hook. fp8_meta has the scales of this pass: they are updated after the whole forward pass."""
    if not module.fp8_meta.get("fp8_checkpoint"):  # this module does not run in FP8
        return
    gemms = _gemms(module)
    first, last = list(gemms)[0], list(gemms)[-1]
    has_unseen = last != first and module.fp8_meta["recipe"].delayed()
    if (name, module) not in seen:  # gradient checkpointing runs this again, after the scales were updated
        tensors = seen[name, module] = {}
        tensors[f"{first}input"] = _statistics(module, f"{first}input", _normed(module, args[0]))
        if has_unseen:
            tensors[f"{last}input"] = _delayed(module, f"{last}input")
        for prefix, parts in gemms.items():
            weight = torch.cat([part.detach() for part in parts])
            tensors[f"{prefix}weight"] = _statistics(module, f"{prefix}weight", weight)

    def record_gradient(gradient):
        tensors = seen[name, module]
        if f"{last}output_gradient" not in tensors:
            tensors[f"{last}output_gradient"] = _statistics(module, f"{last}output_gradient", gradient)
            if has_unseen:
                tensors[f"{first}output_gradient"] = _delayed(module, f"{first}output_gradient")

    output = output[0] if isinstance(output, tuple) else output
    if output.requires_grad:
        handles.append(output.register_hook(record_gradient))


def _normed(module, x):
    """Return the input of the GEMM: the output of a fused norm, in float32, or x itself."""
    if getattr(module, "layer_norm_weight", None) is None:
        return x
    gamma = module.layer_norm_weight.float() + (1 if module.zero_centered_gamma else 0)
    if module.normalization == "RMSNorm":
        return F.rms_norm(x.float(), x.shape[-1:], gamma, module.eps)
    return F.layer_norm(x.float(), x.shape[-1:], gamma, module.layer_norm_bias.float(), module.eps)


@torch.no_grad()
def _statistics(module, tensor: str, x) -> dict:
    """Return the statistics of x (any shape), the values of `tensor` before quantization."""
    recipe, chunks = module.fp8_meta["recipe"], x.reshape(-1).split(CHUNK)
    amax = torch.stack([c.abs().nan_to_num(nan=0.0, posinf=math.inf).amax().float() for c in chunks]).amax()
    if not (recipe.delayed() or recipe.float8_current_scaling()):
        # with a scale per block nothing saturates; what a custom recipe does is unknown
        return {"amax": amax, "scale": None, "saturated": None if recipe.custom() else 0.0, "flushed": None}
    formats = recipe.fp8_format.value
    fp8_max = formats.max_bwd if tensor.endswith("gradient") else formats.max_fwd
    if recipe.delayed():
        scale = _delayed(module, tensor)["scale"]
    else:
        scale = torch.where((amax > 0) & amax.isfinite(), fp8_max / amax, 1.0)
        scale = torch.exp2(scale.log2().floor()) if recipe.use_power_2_scales else scale
    largest, smallest = LIMITS[fp8_max]
    saturated = flushed = nonzero = 0
    for chunk in chunks:
        size = (chunk.float() * scale).abs()
        saturated += (size > largest).sum()
        flushed += ((size <= smallest) & (chunk != 0)).sum()
        nonzero += (chunk != 0).sum()
    saturated, flushed = saturated / x.numel(), flushed / nonzero.clamp(min=1)
    return {"amax": amax, "scale": scale, "saturated": saturated, "flushed": flushed}


def plot(records: list[dict], path, title: str = "", fp8_format: str = "hybrid") -> None:
    """Draw records {"step", "health"} as heat maps of GEMMs x steps: headroom (bits above amax), and flushed.
    What is unknown, as with block scaling, is grey."""
    from matplotlib.colors import LogNorm, TwoSlopeNorm
    from matplotlib.figure import Figure
    gemms, cells = {}, []  # {name: row}, [(kind, row, column, quantities)]
    for column, record in enumerate(records):
        for module, tensors in record["health"].items():
            for tensor, values in tensors.items():
                kind = next(kind for kind in KINDS if tensor.endswith(kind))
                row = gemms.setdefault(f"{module} {tensor.removesuffix(kind)}".rstrip("_ "), len(gemms))
                cells.append((KINDS.index(kind), row, column, _quantities(values, kind, fp8_format)))
    maps = torch.full((2, len(KINDS), len(gemms), len(records)), math.nan)
    for kind, row, column, quantities in cells:
        maps[:, kind, row, column] = torch.tensor(quantities)
    styles = [("headroom (bits; red: saturated)", "RdBu", TwoSlopeNorm(0, -2, 6)),
              ("flushed to zero (%)", "viridis", LogNorm(1e-3, 100))]
    figure = Figure(figsize=(12, 1 + 2 * max(2.2, 0.17 * len(gemms))), layout="constrained")
    figure.suptitle(f"{title}: FP8 health by step", fontsize=12)
    grid = figure.subplots(2, len(KINDS), sharex=True, sharey=True)
    for axes_row, (label, colors, norm), row_maps in zip(grid, styles, maps):
        for axes, kind, values in zip(axes_row, KINDS, row_maps):
            image = axes.imshow(values, cmap=colors, norm=norm, aspect="auto", interpolation="nearest")
            axes.set_facecolor("lightgrey")
            axes.set_title(kind.replace("_", " "), fontsize=11)
        figure.colorbar(image, ax=list(axes_row), label=label, extend="both")
    ticks = range(0, len(records), (len(records) + 7) // 8)  # at most eight
    axes.set_xticks(ticks, [records[i]["step"] for i in ticks], fontsize=9)
    axes.set_yticks(range(len(gemms)), list(gemms), fontsize=9)
    figure.savefig(path, dpi=130)


def _quantities(values: dict, kind: str, fp8_format: str) -> list[float]:
    """Return headroom in bits and flushed in percent; NaN if unknown."""
    fp8_max = 57344 if kind == "output_gradient" and fp8_format != "e4m3" else 448
    used = values["amax"] * (values["scale"] or 0)
    return [math.log2(fp8_max / used) if 0 < used < math.inf else math.nan,
            math.nan if values["flushed"] is None else max(100 * values["flushed"], 1e-3)]  # log axis
