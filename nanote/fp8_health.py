"""Statistics of FP8 quantization: how much of the format's range each tensor uses, and what saturates or
underflows.

    with fp8.watch(model):  # records the first forward and backward pass inside
        model(input_ids, labels).backward()
    fp8.health(model)["blocks.0.attn.qkv"]["input"]
    # {"amax": 4.51, "scale": 74.7, "saturated": 0.0, "flushed": 0.0004}

Four values for each tensor that is quantized to FP8; None if unknown:

- `amax`: the largest absolute value.
- `scale`: the factor before the cast. If `amax * scale` is far below the maximum of the format, range is
  unused; above it, the largest values saturate.
- `saturated`: the fraction of values that saturate.
- `flushed`: the fraction of the non-zero values that become zero.

Hooks read the tensors before they are quantized, and the scales in TE's `fp8_meta`. They change nothing, and
outside `watch` there are none. This file works with TE and te_reference alike and imports neither. No hook
reaches the tensors between the two GEMMs of a `LayerNormMLP` (`fc2_input`, `fc1_output_gradient`): amax and
scale are known for them under delayed scaling only.
"""

import math
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

# {maximum of the format: (values above this round beyond the maximum, values up to this round to zero)}. Both
# limits are half a step away: E4M3 has steps of 32 below 448 and of 2^-9 above 0, E5M2 of 8192 and 2^-16.
LIMITS = {448: (448 + 16, 2.0**-10), 57344: (57344 + 4096, 2.0**-17)}
CHUNK = 2**24  # values processed at a time, since float32 copies of the logits' gradient would take gigabytes


@contextmanager
def watch(model):
    """Record statistics of every module that runs in FP8, in the first forward and backward pass inside.

    `health(model)` returns them afterwards. Costs a few reads of each tensor. Compiled code does not run
    hooks: watch the model itself, not the result of torch.compile.
    """
    handles, seen = [], {}
    for module in _modules(model).values():
        module.__dict__.pop("fp8_health", None)
        handles.append(module.register_forward_hook(partial(_record, seen, handles)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for module, statistics in seen.items():
        if "fc1_output_gradient" in statistics:  # its amax is known only after the backward pass
            statistics["fc1_output_gradient"]["amax"] = _in_state(module, "fc1_output_gradient")["amax"]
        module.__dict__["fp8_health"] = {
            tensor: _as_floats(statistics[tensor]) for tensor in _slots(module) if tensor in statistics
        }


def health(model):
    """Return the statistics of the last `watch`: {module: {tensor: {"amax", "scale", "saturated",
    "flushed"}}}.

    Values are floats or None. Tensors are "input", "weight", "output_gradient", for a LayerNormMLP
    "fc1_input" and so on. For a module never watched: the newest amax and the next scale, under delayed
    scaling.
    """
    statistics = {}
    for name, module in _modules(model).items():
        stored = {tensor: _in_state(module, tensor) for tensor in _slots(module)}
        statistics[name] = getattr(module, "fp8_health", None) or {
            tensor: _as_floats(values) for tensor, values in stored.items() if values
        }
    return {name: tensors for name, tensors in statistics.items() if tensors}


def _as_floats(statistics):
    return {name: None if value is None else float(value) for name, value in statistics.items()}


def _modules(model):
    return {name: module for name, module in model.named_modules()
            if hasattr(module, "fp8_meta") and _weights(module)}


def _weights(module):
    """Return {prefix: weights} for each GEMM of a module: prefixes fc1_ and fc2_ for an MLP, "" otherwise.

    Weights split over several parameters (Q, K, V) belong to one GEMM.
    """
    own = {name: p for name, p in module.named_parameters(recurse=False)
           if name.endswith("weight") and name != "layer_norm_weight"}
    if "fc1_weight" in own:
        return {"fc1_": [own["fc1_weight"]], "fc2_": [own["fc2_weight"]]}
    return {"": list(own.values())} if own else {}


def _slots(module):
    """Return {tensor: (key, index)} in fp8_meta.

    TE's order is input, weight, output of each GEMM in the forward pass; output gradient, input gradient in
    backward.
    """
    slots = {}
    for i, prefix in enumerate(_weights(module)):
        slots |= {f"{prefix}input": ("scaling_fwd", 3 * i), f"{prefix}weight": ("scaling_fwd", 3 * i + 1),
                  f"{prefix}output_gradient": ("scaling_bwd", 2 * i)}
    return slots


def _in_state(module, tensor):
    """Return the newest amax and the scale under delayed scaling, {} under other recipes.

    Row 0 of the history belongs to the current pass; after the update of the scales the newest amax is in the
    last row.
    """
    key, index = _slots(module)[tensor]
    state = module.fp8_meta.get(key)
    if getattr(state, "amax_history", None) is None:  # a custom recipe has the field too: None
        return {}
    history = state.amax_history[:, index]
    amax = torch.where(history[0] != 0, history[0], history[-1])
    return {"amax": amax, "scale": state.scale[index].clone(), "saturated": None, "flushed": None}


@torch.no_grad()
def _record(seen, handles, module, args, output):
    """Forward hook. fp8_meta has the scales of this pass: they are updated after the whole forward pass."""
    if not module.fp8_meta.get("fp8_checkpoint"):  # this module does not run in FP8
        return
    weights = _weights(module)
    first, last = list(weights)[0], list(weights)[-1]
    # with gradient checkpointing this runs twice, the second time after the scales were updated
    if module not in seen:
        gemm_input = _normed(module, args[0])
        statistics = seen[module] = {f"{first}input": _statistics(module, f"{first}input", gemm_input)}
        if last != first and module.fp8_meta["recipe"].delayed():
            statistics[f"{last}input"] = _in_state(module, f"{last}input")
        for prefix, parts in weights.items():
            weight = torch.cat([p.detach() for p in parts])
            statistics[f"{prefix}weight"] = _statistics(module, f"{prefix}weight", weight)
            # a weight kept in FP8: the values before quantization are gone
            if hasattr(parts[0], "_quantizer") or hasattr(parts[0], "fp8_owner"):
                statistics[f"{prefix}weight"] |= {"saturated": None, "flushed": None}

    def record_gradient(gradient):
        statistics = seen[module]
        if f"{last}output_gradient" not in statistics:
            statistics[f"{last}output_gradient"] = _statistics(module, f"{last}output_gradient", gradient)
            if last != first and module.fp8_meta["recipe"].delayed():
                statistics[f"{first}output_gradient"] = _in_state(module, f"{first}output_gradient")

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
def _statistics(module, tensor, x):
    """Return the statistics of x (any shape), the values of `tensor` before quantization."""
    recipe, chunks = module.fp8_meta["recipe"], x.reshape(-1).split(CHUNK)
    # ignore NaN, as TE does
    amax = torch.stack([c.abs().nan_to_num(nan=0.0, posinf=math.inf).amax().float() for c in chunks]).amax()
    formats = recipe.fp8_format.value
    fp8_max = formats.max_bwd if tensor.endswith("gradient") else formats.max_fwd
    if recipe.delayed():
        scale = _in_state(module, tensor)["scale"]
    elif recipe.float8_current_scaling():
        scale = torch.where((amax > 0) & amax.isfinite(), fp8_max / amax, 1.0)
        if recipe.use_power_2_scales:
            scale = torch.exp2(scale.log2().floor())
    else:
        # block scaling: one scale per block from its own amax, so nothing saturates; custom recipe: unknown
        return {"amax": amax, "scale": None, "saturated": None if recipe.custom() else 0.0, "flushed": None}
    largest, smallest = LIMITS[fp8_max]
    saturated = flushed = nonzero = 0
    for chunk in chunks:
        size = (chunk.float() * scale).abs()
        saturated += (size > largest).sum()
        flushed += ((size <= smallest) & (chunk != 0)).sum()
        nonzero += (chunk != 0).sum()
    return {
        "amax": amax, "scale": scale, "saturated": saturated / x.numel(),
        "flushed": flushed / nonzero.clamp(min=1),
    }


KINDS = ("input", "weight", "output_gradient")  # the columns of the plot


def plot(records, path, title="", fp8_format="hybrid"):
    """Plot records {"step", "health"} as heat maps, GEMMs x steps, one column for each of KINDS.

    Rows: headroom (bits of range above amax, negative if values saturate) and flushed. If both are unknown
    (block scaling): amax.
    """
    from matplotlib.colors import LogNorm, TwoSlopeNorm
    from matplotlib.figure import Figure

    gemms = _gemms(records)
    steps = [record["step"] for record in records]

    def grid(quantity, kind):
        def value(record, module, prefix):
            values = record["health"].get(module, {}).get(prefix + kind)
            return math.nan if values is None else quantity(values, kind)
        return torch.tensor([[value(record, *gemm) for record in records] for gemm in gemms])

    headroom = partial(_headroom, fp8_format)
    rows = [(headroom, "headroom (bits; red: saturated)", "RdBu", TwoSlopeNorm(0, -2, 6)),
            (_flushed, "flushed to zero (%)", "viridis", LogNorm(1e-3, 100))]
    rows = [row for row in rows if any(grid(row[0], kind).isfinite().any() for kind in KINDS)]
    rows = rows or [(_amax, "log2 amax", "viridis", None)]
    height = max(2.2, 0.14 * len(gemms))
    figure = Figure(figsize=(13, 1 + height * len(rows)), layout="constrained")
    axes_grid = figure.subplots(len(rows), 3, squeeze=False, sharey=True)
    for axes_row, (quantity, label, colors, norm) in zip(axes_grid, rows):
        for axes, kind in zip(axes_row, KINDS):
            lowest = 1e-3 if quantity is _flushed else -math.inf  # 0% on a logarithmic scale
            mesh = axes.pcolormesh(grid(quantity, kind).clamp(min=lowest), cmap=colors, norm=norm)
            axes.set_facecolor("lightgrey")  # unknown values
            axes.set_title(kind.replace("_", " "), fontsize=9)
            every = (len(steps) + 7) // 8  # at most eight ticks
            axes.set_xticks([i + 0.5 for i in range(0, len(steps), every)], steps[::every], fontsize=7)
            names = [f"{module} {prefix.rstrip('_')}" for module, prefix in gemms]
            axes.set_yticks([i + 0.5 for i in range(len(names))], names, fontsize=6)
        figure.colorbar(mesh, ax=list(axes_row), label=label, extend="both")
    axes.invert_yaxis()  # shared by all axes: the first block is on top
    figure.suptitle(title, fontsize=10)
    figure.supxlabel("step", fontsize=9)
    figure.savefig(path, dpi=130)


def _gemms(records):
    """Return the (module, prefix) pairs in the records, in the order of the model."""
    gemms = {}
    for record in records:
        for module, tensors in record["health"].items():
            for kind in KINDS:
                matching = [tensor for tensor in tensors if tensor.endswith(kind)]
                gemms |= {(module, tensor.removesuffix(kind)): None for tensor in matching}
    return gemms


def _headroom(fp8_format, values, tensor):
    fp8_max = 57344 if tensor.endswith("gradient") and fp8_format == "hybrid" else 448
    if values["scale"] is None or not 0 < values["amax"] * values["scale"] < math.inf:
        return math.nan
    return math.log2(fp8_max / (values["amax"] * values["scale"]))


def _flushed(values, tensor):
    return math.nan if values["flushed"] is None else 100 * values["flushed"]


def _amax(values, tensor):
    return math.log2(values["amax"]) if 0 < values["amax"] < math.inf else math.nan
