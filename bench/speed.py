"""The speed tables of benchmark_te.py: shapes against plain PyTorch, FP8 formats, and the stack.

Each function takes the options of benchmark_te.py, the device and the command's arguments (for the report).
"""

import torch

from bench.measure import Agreement, attempt
from bench.report import Rows, markdown
from bench.step import BLACKWELL, SHAPES, free, make_config
from nanote import models, recipes
from nanote.config import PRESETS

ROW_KEYS = ("shape", "block", "arm")
ARMS = ("plain", "bf16", "fp8", "bf16-eager", "fp8-eager", "fp8-e4m3", "fp8-current", "fp8-block")
GUIDE_SHAPE = (4, 768, 12, 8, 512)  # layers, width, heads, batch, sequence
TABLE_MODELS, TABLE_FORMATS = ("optimized", "fused", "custom"), ("bf16", "fp8-e4m3", "fp8")
FORMATS = {"bf16": "BF16", "fp8-e4m3": "FP8 E4M3", "fp8": "FP8 HYBRID", "fp8-current": "FP8 current",
           "fp8-block": "FP8 block", "fp8-mxfp8": "MXFP8", "fp8-nvfp4": "NVFP4"}
MODERN_TOO = ("124m-b32", "350m-b16", "c4096")  # shapes that are measured with both blocks
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
    if row["peak_gib"]:
        line += f"  {row['peak_gib']:.1f} GiB"
    for name in ("forward", "backward", "optimizer"):
        if f"{name}_ms" in row:
            line += f"  {name} {row[f'{name}_ms']:.2f}"
    print(line, flush=True)


def measure_shape(name, shape, block, arms, options, device, rows, phases=5):
    """Measure all arms of a shape, plain first, and add a row for each."""
    torch._dynamo.reset()  # or torch.compile reaches its recompile limit, which counts models of one class
    config, agreement, plain = make_config(shape, device, block), Agreement(), None
    for arm in sorted(arms, key=lambda arm: arm != "plain"):
        figures, step = attempt(arm, config, device, options.steps, plain, agreement, phases=phases)
        if arm == "plain":
            plain = step
        del step  # or its memory would be taken while the next arm is measured
        rows.add({"shape": name, "block": block} | figures)
        print_row(figures, f"{name} {block}")


def default_arms(name, shape) -> tuple:
    if name == "llama3-8b":
        return "fp8", "fp8-accum4"
    # with few tokens, plain is bound by launching kernels from Python
    small = shape["micro_batch_size"] * shape["seq_len"] <= 8192
    return (*ARMS, "plain-graph") if small else ARMS


def blocks_of(name, options) -> tuple:
    if name in PRESETS:
        return ("own",)  # a preset sets its block itself
    return options.blocks or (("gpt2", "modern") if name in MODERN_TOO else ("gpt2",))


def numerics_failed(rows) -> int:
    """Return the exit code: 1 if an arm did not compute what the others did."""
    return int(any("numerics" in row.get("error", "") for row in rows))


def run_shapes(options, device, argv) -> int:
    """Measure each shape against plain PyTorch, compiled."""
    names = SHAPES if "all" in options.shapes else options.shapes
    shapes = {name: SHAPES[name] for name in names}
    if options.preset:
        shapes = {options.preset: PRESETS[options.preset] | dict(preset=options.preset, grad_accum=1)}
    rows = Rows(options.json, ROW_KEYS, "benchmark_te.py", argv)
    for name, shape in shapes.items():
        for block in blocks_of(name, options):
            arms = options.arms or default_arms(name, shape)
            measure_shape(name, shape, block, arms, options, device, rows)
            free()
    return numerics_failed(rows)


def run_formats(options, device, argv) -> int:
    """Print the seed guide's table at one shape: forward, backward, total and FP8's speed-up, by format."""
    layers, width, heads, batch, length = options.shape or GUIDE_SHAPE
    shape = dict(n_layer=layers, n_embd=width, n_head=heads, micro_batch_size=batch, seq_len=length)
    run = make_config(shape, device)  # without a GPU, a smaller model than that of --shape
    name = "x".join(str(getattr(run, field)) for field in shape) if options.shape else "guide"
    rows = Rows(options.json, ROW_KEYS, "benchmark_te.py", argv)
    formats = [*TABLE_FORMATS, *(f"fp8-{name}" for name in BLACKWELL if not recipes.unsupported_reason(name))]
    arms = options.arms or [arm if model == "optimized" else f"{arm}-{model}"
                            for model in TABLE_MODELS for arm in formats]
    measure_shape(name, shape, "gpt2", arms, options, device, rows, phases=options.steps)
    rows = [row for row in rows if row["shape"] == name]
    print(f"\n{run.n_layer} layers of width {run.n_embd}, {run.micro_batch_size} x {run.seq_len} tokens;"
          f" ms, and speed-up over BF16\n{formats_table(rows)}")
    ms = {row["arm"]: row["ms"] for row in rows if "error" not in row}
    if device.type != "cuda" or recipes.IS_REFERENCE:
        print("FP8 is emulated here by te_reference: the times mean nothing")
    elif {"bf16", "fp8"} <= set(ms):
        print(f"optimized, as train.py runs it: FP8 has {ms['bf16'] / ms['fp8']:.2f} times BF16's tokens/s")
    return numerics_failed(rows)


def formats_table(rows) -> str:
    """Return the table of models and formats: ms of forward, backward, both, and the training step."""
    found = {}
    for row in rows:
        words = row["arm"].split("-")
        model = next((word for word in words if word in models.MODELS), "optimized")
        if "error" not in row and words[0] in ("bf16", "fp8"):
            total = row["forward_ms"] + row["backward_ms"] if "forward_ms" in row else None
            arm = "-".join(word for word in words if word != model)
            found.setdefault(model, {})[arm] = row | {"total_ms": total}
    lines = []
    for model, formats in found.items():
        bf16 = formats.get("bf16", {})
        for arm in sorted(formats, key=[*FORMATS, *formats].index):
            row = formats[arm]
            speed_up = {part: bf16[part] / row[part] if bf16.get(part) and row[part] else None
                        for part in ("total_ms", "ms")}
            values = (row.get("forward_ms"), row.get("backward_ms"), row["total_ms"], speed_up["total_ms"],
                      row["ms"], speed_up["ms"])
            cells = ["" if value is None else f"{value:.2f}" for value in values]
            lines.append([model, FORMATS.get(arm, arm), *cells])
    titles = ["model", "precision", "forward", "backward", "total", "speed-up", "training step", "speed-up"]
    return markdown(titles, lines, left=2)


def run_stack(options, device, argv):
    """Measure the way from plain PyTorch to the fast kernels, one change at a time."""
    name = next(iter(options.shapes), "124m-b32")
    config, agreement = make_config(SHAPES[name], device), Agreement()
    rows = Rows(options.json, ("shape", "label"), "benchmark_te.py", argv)
    for label, arm in STACK.items():
        figures = attempt(arm, config, device, options.steps, None, agreement)[0]
        rows.add({"shape": name, "label": label} | figures)
        print_row(figures, label.replace("\n", " ")[:26])
