"""Measure the speed tables of benchmark_te.py: shapes against plain PyTorch, FP8 formats, and the stack.

Each function takes the options of benchmark_te.py, the device and the command's arguments (for the report).
"""

import dataclasses

import torch

from bench import arms, speed_report
from bench.agreement import Agreement
from bench.measure import attempt
from bench.report import Rows
from bench.timing import measure_ceilings
from nanote import fp8, roofline
from nanote.config import PRESETS
from nanote.models import make_model_config

ROW_KEYS = ("shape", "block", "arm")
GUIDE_SHAPE = (4, 768, 12, 8, 512)  # layers, width, heads, batch, sequence: arms.SHAPES["guide"]
TABLE_MODELS, TABLE_FORMATS = ("optimized", "fused", "custom"), ("bf16", "fp8-e4m3", "fp8")
MODERN_TOO = ("124m-b32", "350m-b16", "c4096")  # shapes that are measured with both blocks
LLAMA = "llama3-8b"
STACK = {  # what is added to the bar before -> arm
    "plain PyTorch, eager": "plain-by-hand", "+ SDPA": "plain-eager", "+ torch.compile": "plain",
    "TE's fused modules,\nBF16, eager": "bf16-libraries-eager", "+ FP8": "fp8-libraries-eager",
    "+ CUDA graph": "fp8-libraries", "+ fast kernels": "fp8",
}


def print_row(row, label=""):
    """Print a measured row in one line."""
    start = f"{label:18} {row['arm']:18}"
    if "error" in row:
        return print(f"{start} {row['error']}", flush=True)
    line = f"{start} {row['ms']:8.2f} ms  {row['tokens_per_s']:>9,.0f} tokens/s"
    if row["ratio_to_plain"]:
        line += f"  {row['ratio_to_plain']:.3f} x plain"
    if row["mfu"]:
        line += f"  MFU {100 * row['mfu']:.1f} %"
    if row.get("roofline"):
        line += f"  roofline {100 * row['roofline']:.1f} %"
    if row["peak_gib"]:
        line += f"  {row['peak_gib']:.1f} GiB"
    for name in ("forward", "backward", "optimizer"):
        if f"{name}_ms" in row:
            line += f"  {name} {row[f'{name}_ms']:.2f}"
    print(line, flush=True)


def floor_of(arm, config, model_config, ceilings) -> float | None:
    """Return floor_ms of an arm; None without ceilings, and for NVFP4, whose GEMM rate is not among them."""
    if ceilings is None or "nvfp4" in arm:
        return None
    config = arms.options_of(arm, config)
    sequences, moved = config.micro_batch_size * config.grad_accum, arms.optimizer_bytes(arm, config)
    in_fp8 = arm.startswith("fp8")
    return roofline.floor_ms(model_config, sequences, config.seq_len, in_fp8, ceilings, moved)


def roofline_figures(arm, config, figures, ceilings, device) -> dict:
    """Return a row's least ms by the measured `ceilings`, and its share of the data sheet's roofline."""
    model_config = make_model_config("optimized", figures["model_config"])
    least_ms = floor_of(arm, config, model_config, roofline.peaks(device))
    return {
        "floor_ms": floor_of(arm, config, model_config, ceilings), "ceilings": ceilings,
        "roofline": least_ms / figures["ms"] if least_ms else None,
    }


def measure_shape(name, shape, block, arm_names, options, device, ceilings, rows, phases=5):
    """Measure all arms of a shape, plain first, and add a row for each."""
    torch._dynamo.reset()  # or torch.compile reaches its recompile limit, which counts models of one class
    config, agreement = arms.make_config(shape, device, block), Agreement()
    plain_step = None
    queue = sorted(arm_names, key=lambda arm: arm != "plain")
    while queue:
        arm = queue.pop(0)
        profiled = options.profile == "all" or options.profile == "main" and arm in ("fp8", "plain")
        figures, step = attempt(
            arm, config, device, options.steps, plain_step, agreement, profiled, phases=phases)
        row = {"shape": name, "block": block} | figures
        if "error" not in row:
            row |= roofline_figures(arm, config, figures, ceilings, device)
        elif "OutOfMemory" in row["error"] and config.preset == LLAMA and not arm.endswith("checkpointing"):
            queue.insert(0, f"{arm}-checkpointing")
        if arm == "plain":
            plain_step = step
        del step  # or its memory would be taken while the next arm is measured
        print_row(row, f"{name} {block}")
        rows.add(row)


def chosen_shapes(options) -> dict:
    """Return {name: options of train.py} of --shapes or --preset."""
    names = arms.SHAPES if "all" in options.shapes else options.shapes
    shapes = {name: arms.SHAPES[name] for name in names}
    if options.preset:
        shapes = {options.preset: {"preset": options.preset} | PRESETS[options.preset] | dict(grad_accum=1)}
    return {name: shape | ({"preset": name} if name in PRESETS else {}) for name, shape in shapes.items()}


def blocks_of(name, options) -> tuple:
    if name in PRESETS:
        return ("own",)  # a preset sets its block itself
    return options.blocks or (("gpt2", "modern") if name in MODERN_TOO else ("gpt2",))


def default_arms(name, shape, block) -> tuple:
    if name == LLAMA:
        return "fp8", "fp8-accum4"
    found = arms.ARMS
    if block == "modern":
        found += ("hf-llama",)
    if shape["micro_batch_size"] * shape["seq_len"] <= 8192:
        found += ("plain-graph",)  # with few tokens, plain is bound by launching kernels from Python
    return found


def numerics_failed(rows) -> int:
    """Return the exit code: 1 if an arm did not compute what the others did."""
    return int(any("numerics" in row.get("error", "") for row in rows))


def run_shapes(options, device, argv) -> int:
    """Measure each shape against plain PyTorch, compiled."""
    ceilings = measure_ceilings(device)
    print("ceilings: " + ", ".join(f"{name} {value}" for name, value in ceilings.items()))
    rows = Rows(options.json, ROW_KEYS, "benchmark_te.py", argv)
    for name, shape in chosen_shapes(options).items():
        for block in blocks_of(name, options):
            names = options.arms or default_arms(name, shape, block)
            measure_shape(name, shape, block, names, options, device, ceilings, rows)
            arms.free()
    if options.png:
        speed_report.draw_speed(rows, options.png)
    return numerics_failed(rows)


def table_arms() -> list:
    """Return the arms of the table of formats: three models in BF16 and in the FP8 formats that run here."""
    blackwell = [f"fp8-{recipe}" for recipe in arms.BLACKWELL if not fp8.unsupported_reason(recipe)]
    formats = [*TABLE_FORMATS, *blackwell]
    return [name if model == "optimized" else f"{name}-{model}" for model in TABLE_MODELS for name in formats]


def run_formats(options, device, argv) -> int:
    """Print the seed guide's table at one shape: forward, backward, total and FP8's speed-up, by format."""
    layers, width, heads, batch, length = options.shape or GUIDE_SHAPE
    shape = dict(n_layer=layers, n_embd=width, n_head=heads, micro_batch_size=batch, seq_len=length)
    run = arms.make_config(shape, device)  # without a GPU, a smaller model than that of --shape
    name = "x".join(str(getattr(run, field)) for field in shape) if options.shape else "guide"
    if options.profile == "main":
        options = dataclasses.replace(options, profile="none")
    rows = Rows(options.json, ROW_KEYS, "benchmark_te.py", argv)
    ceilings = measure_ceilings(device)
    names = options.arms or table_arms()
    measure_shape(name, shape, "gpt2", names, options, device, ceilings, rows, phases=options.steps)
    rows = [row for row in rows if row["shape"] == name]
    print(f"\n{run.n_layer} layers of width {run.n_embd}, {run.micro_batch_size} x {run.seq_len} tokens;"
          f" ms, and speed-up over BF16\n{speed_report.formats_table(rows)}")
    if device.type != "cuda" or fp8.IS_REFERENCE:
        print("FP8 is emulated here by te_reference: the times mean nothing")
    else:
        print_verdict({row["arm"]: row["ms"] for row in rows if "error" not in row})
    return numerics_failed(rows)


def print_verdict(ms):
    """Say whether FP8 pays at this shape. ms: {arm: ms of its training step}."""
    if not {"bf16", "fp8"} <= set(ms):
        return
    ratio = ms["bf16"] / ms["fp8"]
    verdict = "makes no difference"
    if ratio > 1.02:
        verdict = "pays"
    elif ratio < 0.98:
        verdict = "does not pay"
    print(f"optimized, as train.py runs it: FP8 {verdict}, {ratio:.2f} times BF16's tokens/s")


def run_stack(options, device, argv):
    """Measure the way from plain PyTorch to the fast kernels, one change at a time."""
    name = next(iter(options.shapes), "124m-b32")
    config, agreement = arms.make_config(arms.SHAPES[name], device), Agreement()
    rows = Rows(options.json, ("shape", "label"), "benchmark_te.py", argv)
    for label, arm in STACK.items():
        figures = attempt(arm, config, device, options.steps, None, agreement)[0]
        rows.add({"shape": name, "label": label} | figures)
        print_row(figures, label.replace("\n", " ")[:26])
    if options.png:
        speed_report.draw_stack([row for row in rows if row["shape"] == name], options.png)
