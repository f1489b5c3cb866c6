"""What FP8 does to a model's tensors: how much of the format's range each uses, what it cuts off, what it
rounds to zero.

    with fp8.watch(model):  # looks at the first forward and backward pass in here
        model(input_ids, labels).backward()
    fp8.health(model)["blocks.0.attn.qkv"]["input"] # {"amax": 4.51, "scale": 74.7, "saturated": 0.0,
    "flushed": 0.0004}

Four figures for a tensor that FP8 holds. `amax`: its largest absolute value. `scale`: what it is multiplied
by before the cast: with `amax * scale` far below the format's maximum, bits of range lie idle; above it, the
largest values are cut off. `saturated`: the share of values that this happens to. `flushed`: the share of the
non-zero values that become zero. None stands for what is not known.

Hooks look at the tensors before they are cast and at the scales in TE's `fp8_meta`. They change nothing, and
outside `watch` there are none. TE and te_reference look the same from here, so this file imports neither.
Between the two products of a `LayerNormMLP` no hook can look: of what is there (`fc2_input`,
`fc1_output_gradient`) delayed scaling knows amax and scale, the other recipes nothing.
"""

import math
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

# By the format's maximum: above the first value, rounding alone would exceed it; up to the second, values
# become zero. Both lie half a step away: E4M3 steps by 32 below 448 and by 2^-9 above 0, E5M2 by 8192 and
# 2^-16.
LIMITS = {448: (448 + 16, 2.0**-10), 57344: (57344 + 4096, 2.0**-17)}
CHUNK = 2**24  # values looked at together: the gradient of the logits would need gigabytes more


@contextmanager
def watch(model):
    """Take the figures of every module that runs in FP8, in the first forward and backward pass inside; then
    `health(model)` returns them. Costs a few reads of each tensor. Code that torch.compile made does not run
    hooks: watch the model itself, not its compiled form."""
    handles, seen = [], {}
    for module in _modules(model).values():
        module.__dict__.pop("fp8_health", None)
        handles.append(module.register_forward_hook(partial(_look, seen, handles)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for module, figures in seen.items():
        if "fc1_output_gradient" in figures:  # its amax is known by now
            figures["fc1_output_gradient"]["amax"] = _in_state(module, "fc1_output_gradient")["amax"]
        module.__dict__["fp8_health"] = {
            tensor: _as_floats(figures[tensor]) for tensor in _slots(module) if tensor in figures
        }


def health(model):
    """{module: {tensor: {"amax", "scale", "saturated", "flushed"}}}, floats or None: what the last `watch`
    saw. Tensors are "input", "weight", "output_gradient", of a LayerNormMLP "fc1_input" and so on. Of a
    module never watched: the newest amax and the next scale under delayed scaling."""
    figures = {}
    for name, module in _modules(model).items():
        stored = {tensor: _in_state(module, tensor) for tensor in _slots(module)}
        figures[name] = getattr(module, "fp8_health", None) or {
            tensor: _as_floats(values) for tensor, values in stored.items() if values
        }
    return {name: tensors for name, tensors in figures.items() if tensors}


def _as_floats(figures):
    return {name: None if value is None else float(value) for name, value in figures.items()}


def _modules(model):
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "fp8_meta") and _weights(module)
    }


def _weights(module):
    """By the prefix of a product's tensors: fc1_ and fc2_, or none. Weights that are split over parameters
    (Q, K, V) are one product's."""
    own = {
        name: p
        for name, p in module.named_parameters(recurse=False)
        if name.endswith("weight") and name != "layer_norm_weight"
    }
    if "fc1_weight" in own:
        return {"fc1_": [own["fc1_weight"]], "fc2_": [own["fc2_weight"]]}
    return {"": list(own.values())} if own else {}


def _slots(module):
    """Where fp8_meta keeps a tensor: forward input, weight, output of each product; backward output gradient,
    input gradient."""
    slots = {}
    for i, prefix in enumerate(_weights(module)):
        slots |= {f"{prefix}input": ("scaling_fwd", 3 * i), f"{prefix}weight": ("scaling_fwd", 3 * i + 1),
                  f"{prefix}output_gradient": ("scaling_bwd", 2 * i)}
    return slots


def _in_state(module, tensor):
    """Under delayed scaling: the newest amax (row 0 is the current pass's; after a roll it is the last), the
    scale, None for the shares. {} under other recipes."""
    key, index = _slots(module)[tensor]
    state = module.fp8_meta.get(key)
    if getattr(state, "amax_history", None) is None:  # a custom recipe has the field, too, and nothing in it
        return {}
    history = state.amax_history[:, index]
    amax = torch.where(history[0] != 0, history[0], history[-1])
    return {"amax": amax, "scale": state.scale[index].clone(), "saturated": None, "flushed": None}


@torch.no_grad()
def _look(seen, handles, module, args, output):
    """A forward hook. Scales move when the whole forward pass is over, so what fp8_meta holds here is what
    this pass used."""
    if not module.fp8_meta.get("fp8_checkpoint"):  # this module does not run in FP8
        return
    weights = _weights(module)
    first, last = list(weights)[0], list(weights)[-1]
    # gradient checkpointing comes here twice, the second time with scales that have moved
    if module not in seen:
        figures = seen[module] = {
            f"{first}input": _figures(module, f"{first}input", _normed(module, args[0]))
        }
        if last != first and module.fp8_meta["recipe"].delayed():
            figures[f"{last}input"] = _in_state(module, f"{last}input")
        for prefix, parts in weights.items():
            figures[f"{prefix}weight"] = _figures(
                module, f"{prefix}weight", torch.cat([p.detach() for p in parts])
            )
            # kept in FP8: what it lost is no longer there to see
            if hasattr(parts[0], "_quantizer") or hasattr(parts[0], "fp8_owner"):
                figures[f"{prefix}weight"] |= {"saturated": None, "flushed": None}

    def look_at_gradient(gradient):
        figures = seen[module]
        if f"{last}output_gradient" not in figures:
            figures[f"{last}output_gradient"] = _figures(module, f"{last}output_gradient", gradient)
            if last != first and module.fp8_meta["recipe"].delayed():
                figures[f"{first}output_gradient"] = _in_state(module, f"{first}output_gradient")

    output = output[0] if isinstance(output, tuple) else output
    if output.requires_grad:
        handles.append(output.register_hook(look_at_gradient))


def _normed(module, x):
    """What a fused norm gives to the product, in float32."""
    if getattr(module, "layer_norm_weight", None) is None:
        return x
    gamma = module.layer_norm_weight.float() + (1 if module.zero_centered_gamma else 0)
    if module.normalization == "RMSNorm":
        return F.rms_norm(x.float(), x.shape[-1:], gamma, module.eps)
    return F.layer_norm(x.float(), x.shape[-1:], gamma, module.layer_norm_bias.float(), module.eps)


@torch.no_grad()
def _figures(module, tensor, x):
    """x, of any shape, is `tensor` of the module before the cast."""
    recipe, chunks = module.fp8_meta["recipe"], x.reshape(-1).split(CHUNK)
    # NaN does not count, as in TE
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
        # a scale for each block, taken from its own amax: nothing can saturate. Of a custom recipe nothing is
        # known.
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


def plot(records, path, title="", fp8_format="hybrid"):
    """Draw records {"step", "health"} as products x steps: a column for inputs, weights and output gradients,
    a row for each of two figures (headroom: bits of range above amax, negative where values are cut off;
    flushed), or for amax alone where a recipe scales in blocks."""
    from matplotlib.colors import LogNorm, TwoSlopeNorm
    from matplotlib.figure import Figure

    def headroom(values, tensor):
        fp8_max = 57344 if tensor.endswith("gradient") and fp8_format == "hybrid" else 448
        if values["scale"] is None or not 0 < values["amax"] * values["scale"] < math.inf:
            return math.nan
        return math.log2(fp8_max / (values["amax"] * values["scale"]))

    def flushed(values, tensor):
        return math.nan if values["flushed"] is None else 100 * values["flushed"]

    def amax(values, tensor):
        return math.log2(values["amax"]) if 0 < values["amax"] < math.inf else math.nan

    kinds = ("input", "weight", "output_gradient")
    products = {}  # (module, prefix), in the model's order
    for record in records:
        for module, tensors in record["health"].items():
            products |= {
                (module, tensor.removesuffix(kind)): None
                for kind in kinds
                for tensor in tensors
                if tensor.endswith(kind)
            }
    steps = [record["step"] for record in records]

    def grid(figure, kind):
        def value(record, module, prefix):
            values = record["health"].get(module, {}).get(prefix + kind)
            return math.nan if values is None else figure(values, kind)
        return torch.tensor([[value(record, *product) for record in records] for product in products])

    rows = [(headroom, "headroom (bits; red: cut off)", "RdBu", TwoSlopeNorm(0, -2, 6)),
            (flushed, "flushed to zero (%)", "viridis", LogNorm(1e-3, 100))]
    rows = [row for row in rows if any(grid(row[0], kind).isfinite().any() for kind in kinds)] or [
        (amax, "log2 amax", "viridis", None)
    ]
    height = max(2.2, 0.14 * len(products))
    picture = Figure(figsize=(13, 1 + height * len(rows)), layout="constrained")
    for axes_row, (figure, label, colours, norm) in zip(
        picture.subplots(len(rows), 3, squeeze=False, sharey=True), rows
    ):
        for axes, kind in zip(axes_row, kinds):
            mesh = axes.pcolormesh(
                grid(figure, kind).clamp(min=1e-3 if figure is flushed else -math.inf), cmap=colours,
                norm=norm,
            )
            axes.set_facecolor("lightgrey")  # not known
            axes.set_title(kind.replace("_", " "), fontsize=9)
            every = -(-len(steps) // 8)
            axes.set_xticks([i + 0.5 for i in range(0, len(steps), every)], steps[::every], fontsize=7)
            names = [f"{module} {prefix.rstrip('_')}" for module, prefix in products]
            axes.set_yticks([i + 0.5 for i in range(len(names))], names, fontsize=6)
        picture.colorbar(mesh, ax=list(axes_row), label=label, extend="both")
    axes.invert_yaxis()  # the axes share it: the first block comes first in each
    picture.suptitle(title, fontsize=10)
    picture.supxlabel("step", fontsize=9)
    picture.savefig(path, dpi=130)
