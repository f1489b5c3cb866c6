"""The tables of benchmark_te.py: shapes against plain PyTorch, FP8 formats, the stack, and two maps.

Each `run_…` takes the options of benchmark_te.py, the device and the command's arguments (for the report).
The two maps have many rows, which are measured as far as --time-budget goes:

- --sweep: where FP8 pays, against BF16 over width and tokens per step.
- --compile: torch.compile's modes on the models, by recipe, on the engine that NANOTE_ENGINE names. Each row
  is one training step, beside the same step uncompiled and as a CUDA graph: its speed, the graph breaks and
  their reasons, the number of graphs and the seconds of compiling. An error of the compiler is a result, too.
"""

import dataclasses
import itertools
import statistics
import time
from functools import partial

import torch

from bench.measure import LR, Agreement, Timing, attempt, error_text, measure_arm, timed
from bench.plain_gpt import ARMS as PLAIN_ARMS
from bench.report import Rows, markdown
from bench.step import BLACKWELL, SHAPES, Training, free, make_batches, make_config, parse_arm
from nanote import models, recipes
from nanote.config import PRESETS

ROW_KEYS = ("shape", "block", "arm")


def measure_shape(labels, config, arms, timing, rows):
    """Measure all arms of a shape, plain first, and add a row for each, with the fields `labels`."""
    torch._dynamo.reset()  # or torch.compile reaches its recompile limit, which counts models of one class
    agreement = Agreement()
    plain = None
    arms = list(arms)
    if "plain" in arms:  # the baseline of the others
        arms.remove("plain")
        arms.insert(0, "plain")
    for arm in arms:
        figures, training = attempt(measure_arm, arm, config, timing, plain, agreement)
        if arm == "plain":
            plain = training
        del training  # or its memory would be taken while the next arm is measured
        rows.add(labels | figures)


def numerics_failed(rows) -> int:
    """Return the exit code: 1 if an arm did not compute what the others did."""
    return int(any("numerics" in row.get("error", "") for row in rows))


# ---------------------------------------------------------------- shapes

ARMS = ("plain", "bf16", "fp8", "bf16-eager", "fp8-eager", "fp8-e4m3", "fp8-current", "fp8-block")
MODERN_TOO = ("124m-b32", "350m-b16", "c4096")  # shapes that are measured with both blocks


def default_arms(name, shape) -> tuple:
    if name == "llama3-8b":
        return "fp8", "fp8-accum4"
    tokens = shape["micro_batch_size"] * shape["seq_len"]
    if tokens <= 8192:  # plain is bound by Python
        return *ARMS, "plain-graph"
    return ARMS


def default_blocks(name) -> tuple:
    if name in PRESETS:
        return ("own",)  # a preset sets its block itself
    return ("gpt2", "modern") if name in MODERN_TOO else ("gpt2",)


def run_shapes(options, device, argv) -> int:
    """Measure each shape against plain PyTorch, compiled."""
    names = SHAPES if "all" in options.shapes else options.shapes
    shapes = {name: SHAPES[name] for name in names}
    if options.preset:
        shapes = {options.preset: PRESETS[options.preset] | dict(preset=options.preset, grad_accum=1)}
    rows = Rows(options.json, ROW_KEYS, "benchmark_te.py", argv)
    timing = Timing(device, options.steps)
    for name, shape in shapes.items():
        blocks = default_blocks(name)
        if options.blocks and name not in PRESETS:
            blocks = options.blocks
        for block in blocks:
            arms = options.arms or default_arms(name, shape)
            config = make_config(shape, device, block)
            measure_shape({"shape": name, "block": block}, config, arms, timing, rows)
            free()
    return numerics_failed(rows)


# ---------------------------------------------------------------- models and formats

GUIDE_SHAPE = (4, 768, 12, 8, 512)  # layers, width, heads, batch, sequence
TABLE_MODELS = ("optimized", "fused", "custom")
TABLE_FORMATS = ("bf16", "fp8-e4m3", "fp8")
FORMATS = {"bf16": "BF16", "fp8-e4m3": "FP8 E4M3", "fp8": "FP8 HYBRID", "fp8-current": "FP8 current",
           "fp8-block": "FP8 block", "fp8-mxfp8": "MXFP8", "fp8-nvfp4": "NVFP4"}


def default_table_arms() -> list[str]:
    """Return the arms of the table: each model in each format that this GPU has."""
    formats = list(TABLE_FORMATS)
    for recipe in BLACKWELL:
        if not recipes.unsupported_reason(recipe):
            formats.append(f"fp8-{recipe}")
    arms = []
    for model in TABLE_MODELS:
        suffix = "" if model == "optimized" else f"-{model}"
        arms += [f"{arm}{suffix}" for arm in formats]
    return arms


def run_formats(options, device, argv) -> int:
    """Print forward, backward, total and FP8's speed-up at one shape, by model and format."""
    layers, width, heads, batch, length = options.shape or GUIDE_SHAPE
    shape = dict(n_layer=layers, n_embd=width, n_head=heads, micro_batch_size=batch, seq_len=length)
    config = make_config(shape, device)  # without a GPU, a smaller model than that of --shape
    name = "guide"
    if options.shape:
        name = "x".join(str(getattr(config, field)) for field in shape)
    rows = Rows(options.json, ROW_KEYS, "benchmark_te.py", argv)
    arms = options.arms or default_table_arms()
    timing = Timing(device, options.steps, phases=options.steps)
    measure_shape({"shape": name, "block": "gpt2"}, config, arms, timing, rows)
    rows = [row for row in rows if row["shape"] == name]
    print(f"\n{config.n_layer} layers of width {config.n_embd}, {config.micro_batch_size} x {config.seq_len} "
          f"tokens; ms, and speed-up over BF16\n{formats_table(rows)}")
    ms = {row["arm"]: row["ms"] for row in rows if "error" not in row}
    if device.type != "cuda" or recipes.IS_REFERENCE:
        print("FP8 is emulated here by te_reference: the times mean nothing")
    elif "bf16" in ms and "fp8" in ms:
        print(f"optimized, as train.py runs it: FP8 has {ms['bf16'] / ms['fp8']:.2f} times BF16's tokens/s")
    return numerics_failed(rows)


def formats_table(rows) -> str:
    """Return the table of models and formats: ms of forward, backward, both, and the training step."""
    found = {}  # {model: {arm without its model: row}}
    for row in rows:
        if "error" in row or row["arm"] in PLAIN_ARMS:
            continue
        arm = parse_arm(row["arm"])
        name = "-".join([arm.precision, *arm.words])
        total_ms = None
        if "forward_ms" in row:
            total_ms = row["forward_ms"] + row["backward_ms"]
        found.setdefault(arm.model or "optimized", {})[name] = row | {"total_ms": total_ms}
    lines = []
    for model, by_arm in found.items():
        order = [*FORMATS, *by_arm]  # arms that are no format come last
        for arm in sorted(by_arm, key=order.index):
            row = by_arm[arm]
            bf16 = by_arm.get("bf16", {})
            values = [
                row.get("forward_ms"), row.get("backward_ms"), row["total_ms"],
                ratio(bf16.get("total_ms"), row["total_ms"]), row["ms"], ratio(bf16.get("ms"), row["ms"])]
            cells = ["" if value is None else f"{value:.2f}" for value in values]
            lines.append([model, FORMATS.get(arm, arm), *cells])
    titles = ["model", "precision", "forward", "backward", "total", "speed-up", "training step", "speed-up"]
    return markdown(titles, lines, left=2)


def ratio(a, b) -> float | None:
    """Return a / b, or None if one is unknown."""
    return a / b if a and b else None


# ---------------------------------------------------------------- the stack

STACK = {  # what is added to the bar before -> arm; bench/pictures.py draws the line breaks
    "plain PyTorch, eager": "plain-by-hand", "+ SDPA": "plain-eager", "+ torch.compile": "plain",
    "TE's fused modules,\nBF16, eager": "bf16-libraries-eager", "+ FP8": "fp8-libraries-eager",
    "+ CUDA graph": "fp8-libraries", "+ fast kernels": "fp8",
}


def run_stack(options, device, argv):
    """Measure the way from plain PyTorch to the fast kernels, one change at a time."""
    name = options.shapes[0] if options.shapes else "124m-b32"
    config = make_config(SHAPES[name], device)
    agreement = Agreement()
    timing = Timing(device, options.steps)
    rows = Rows(options.json, ("shape", "label"), "benchmark_te.py", argv)
    for label, arm in STACK.items():
        figures, _ = attempt(measure_arm, arm, config, timing, agreement=agreement)
        rows.add({"shape": name, "label": label} | figures, label.replace("\n", " "))


# ---------------------------------------------------------------- two maps: --sweep, --compile

WIDTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)  # per step
SWEEP_STEPS = 8  # timed, of each arm
COMPILE_RECIPES = ("none", "current", "delayed", "block")
COMPILE_MODES = {  # row of the table -> options of train.py
    "cuda-graph": dict(cuda_graph="auto"),
    "eager": {},
    "default": dict(compile=True),
    "fullgraph": dict(compile=True, compile_fullgraph=True),
    "reduce-overhead": dict(compile=True, compile_mode="reduce-overhead"),
    "max-autotune": dict(compile=True, compile_mode="max-autotune"),
    "max-autotune-no-cudagraphs": dict(compile=True, compile_mode="max-autotune-no-cudagraphs"),
}


def measure_rows(measure_one, keys: dict, options, argv):
    """Call measure_one(*values) -> figures for each combination of the values in `keys`.

    Skips those that options.json holds already, and marks those for which options.time_budget has no time.
    """
    start = time.time()
    rows = Rows(options.json, tuple(keys), "benchmark_te.py", argv)
    for values in itertools.product(*keys.values()):
        row = dict(zip(keys, values))
        if rows.has(row):
            continue
        if time.time() - start > options.time_budget:
            figures = {"error": "not run: time budget"}
        else:
            figures = measure_one(*values)
        rows.add(row | figures)


def measure_width(width, tokens, device) -> dict:
    """Measure FP8 and BF16 at one width and number of tokens, launched from Python and as CUDA graphs."""
    # two layers and a small vocabulary, so that the blocks dominate
    shape = dict(
        n_layer=2, n_embd=width, n_head=width // 64, micro_batch_size=tokens // 1024, seq_len=1024,
        vocab_size=1024)
    config = make_config(shape, device)
    agreement = Agreement()
    timing = Timing(device, SWEEP_STEPS, warmup=3, phases=0)
    row = {}
    for name, suffix in (("eager", "-eager"), ("graph", "")):
        for arm in (f"bf16{suffix}", f"fp8{suffix}"):
            figures, _ = attempt(measure_arm, arm, config, timing, agreement=agreement)
            row[f"{arm}_ms"] = figures.get("ms")
            if "error" in figures:
                row["error"] = figures["error"]
        row[name] = ratio(row[f"bf16{suffix}_ms"], row[f"fp8{suffix}_ms"])
    return row


def run_sweep(options, device, argv):
    """Measure FP8 and BF16 at each width and number of tokens per step."""
    widths = WIDTHS
    tokens = TOKENS
    if device.type != "cuda":
        widths = WIDTHS[:2]
        tokens = TOKENS[:2]
    measure_rows(partial(measure_width, device=device), {"width": widths, "tokens": tokens}, options, argv)


def measure_compiled(name, config, device, agreement) -> dict:
    """Make a step, run and verify it, and time it -> the figures of its row."""
    from torch._dynamo.utils import counters  # imports the compiler, which is slow

    torch._dynamo.reset()
    counters.clear()
    batches = make_batches(config, device)
    start = time.time()
    training = Training(config, device, batches)
    loss = agreement.verify(name, training, batches)["loss"]  # five steps, in which graphs are recorded
    seconds = time.time() - start
    times = timed([lambda: training(batches, LR)] * 11, device)
    ms = statistics.median(times[3:])
    compile_s = 0.0
    if config.compile:
        compile_s = max(0.0, seconds - 5 * ms / 1e3)
    reasons = {}
    for reason, count in counters["graph_break"].items():
        first_line = reason.splitlines()[0]
        reasons[first_line[:150]] = count
    return {
        "ms": ms, "tokens_per_s": 1e3 * config.micro_batch_size * config.seq_len / ms, "loss": loss,
        "graph_breaks": sum(reasons.values()), "reasons": reasons,
        "graphs": counters["stats"].get("unique_graphs", 0), "compile_s": compile_s}


def run_compile(options, device, argv):
    """Measure each mode of torch.compile, recipe and model."""
    base = make_config(SHAPES["guide"], device)
    agreement = Agreement()

    def measure_mode(engine, recipe, mode, model):  # the engine, that of this process, only names the row
        changes = dict(model=model, fp8_recipe=recipe, cuda_graph="off") | COMPILE_MODES[mode]
        free()  # also what a row that failed left behind
        try:
            config = dataclasses.replace(base, **changes)
            return measure_compiled(f"{mode}, {recipe}, {model}", config, device, agreement)
        except Exception as error:  # whatever the compiler raises is the result
            return {"error": error_text(error)}

    supported = [recipe for recipe in COMPILE_RECIPES if not recipes.unsupported_reason(recipe)]
    keys = {"engine": (recipes.te.__name__,), "recipe": supported, "mode": COMPILE_MODES,
            "model": models.MODELS}
    measure_rows(measure_mode, keys, options, argv)
