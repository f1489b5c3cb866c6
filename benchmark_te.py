"""Measure training speed on random tokens: FP8 against BF16, and this kit against others.

    python benchmark_te.py                                # BF16, E4M3 and HYBRID at the seed guide's shape
    python benchmark_te.py --shape 12 768 12 32 1024      # at your layers, width, heads, batch, sequence
    python benchmark_te.py --shapes all --json results/speed.json     # the README's table
    python benchmark_te.py --sweep | --stack | --compile  # where FP8 pays; each measure's part; torch.compile

The first two print one table of three models: forward, backward, their total and FP8's speed-up. Those
passes are launched from Python, as in a training loop of your own. The training step beside them (forward,
loss, backward, clipping, optimizer) is the one that train.py runs, a CUDA graph where that is possible.
MXFP8 and NVFP4 are in the table on a GPU that has them (Blackwell).

Arms:
- plain     nanoGPT: bench/plain_gpt.py in float32 under BF16 autocast, torch.compile, PyTorch's fused
            AdamW. plain-eager: not compiled; plain-by-hand: nor with SDPA; plain-graph: compiled with
            mode="reduce-overhead".
- bf16, fp8 model_te_optimized.py exactly as train.py trains it, without FP8 and with delayed scaling
            (HYBRID), each step a CUDA graph where train.py makes it one. More words can follow:
            -e4m3, -current, -block, -mxfp8, -nvfp4 (another format, or another recipe in its own format;
            the last two need Blackwell), -block-hybrid (E5M2 gradients),
            -fused, -te, -custom, -advanced (another model file), -eager (no CUDA graph), -libraries
            (PyTorch's attention, Transformer Engine's loss and blocks), -te_block (its blocks alone),
            -accum4 (micro-batches a step), -checkpointing (gradient checkpointing), -bf16_moments (AdamW's
            moments), -precise_dgrad (no FP8 fast accumulation in dgrad).
- hf-llama  transformers.LlamaForCausalLM with BF16 weights and moments (no float32 masters: less work than
            the others), SDPA, torch.compile, PyTorch's fused AdamW. Llama has no QK-norm; the others' block
            "modern" has.

What makes figures comparable: an arm's steps are timed in turns with plain's, which stays in memory, and
`ratio_to_plain` is of those; times are medians between CUDA events; before anything is timed, an arm's loss,
gradients and progress must agree with the first arm's (bench/agreement.py). Forward, backward and optimizer
are timed in passes of their own, launched from Python; `ms` is the step as it is trained.
"""

import dataclasses
import gc
import itertools
import re
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bench import speed_report as report
from bench.agreement import Agreement, check_loss
from bench.plain_gpt import ARMS as PLAIN_ARMS
from bench.plain_gpt import PlainStep, build_plain
from bench.stability_report import check_folder
from bench.timing import (
    floor_ms,
    measure_ceilings,
    median_ms,
    power_and_clock,
    profile_ms,
    spans_ms,
    stamp,
    timed,
)
from nanote import cli, fp8, models
from nanote.train_step import TrainStep, accelerate, compile_model, make_optimizer, recipe_of, warm_up_scales
from sample import pick_device
from train import PRESETS, TrainConfig, flops_per_token, peak_flops

SHAPES = {  # options of train.py
    "124m-b32": dict(n_layer=12, n_embd=768, n_head=12, micro_batch_size=32, seq_len=1024),
    "350m-b16": dict(n_layer=24, n_embd=1024, n_head=16, micro_batch_size=16, seq_len=1024),
    "c2048": dict(n_layer=8, n_embd=2048, n_head=16, micro_batch_size=8, seq_len=2048),
    "c4096": dict(n_layer=4, n_embd=4096, n_head=32, micro_batch_size=4, seq_len=4096),
    "124m-b4": dict(n_layer=12, n_embd=768, n_head=12, micro_batch_size=4, seq_len=1024),
    "guide": dict(n_layer=4, n_embd=768, n_head=12, micro_batch_size=8, seq_len=512),
    "llama3-8b": PRESETS["llama3-8b"] | dict(grad_accum=1),
}
GUIDE_SHAPE = (4, 768, 12, 8, 512)  # layers, width, heads, batch, sequence of the seed guide: "guide" above
TABLE_MODELS, TABLE_FORMATS = ("optimized", "fused", "custom"), ("bf16", "fp8-e4m3", "fp8")
BLACKWELL = ("mxfp8", "nvfp4")  # recipes that join the table where they run
# tied, MLP of 8/3, KV heads: a quarter
MODERN = dict(use_rmsnorm=True, use_rotary=True, use_qk_norm=True, activation="swiglu", bias=False)
MODERN_TOO = ("124m-b32", "350m-b16", "c4096")
ARMS = ("plain", "bf16", "fp8", "bf16-eager", "fp8-eager", "fp8-e4m3", "fp8-current", "fp8-block")
STACK = {
    "plain PyTorch, eager": "plain-by-hand", "+ SDPA": "plain-eager", "+ torch.compile\n(nanoGPT)": "plain",
    "TE's fused modules,\nBF16, eager": "bf16-libraries-eager", "+ FP8": "fp8-libraries-eager",
    "+ CUDA graph": "fp8-libraries", "+ fast kernels": "fp8",
}
COMPILE_MODES = {  # row of --compile's table -> options of train.py
    "cuda-graph": dict(cuda_graph="auto"),
    "eager": {},
    "default": dict(compile=True),
    "fullgraph": dict(compile=True, compile_fullgraph=True),
    "reduce-overhead": dict(compile=True, compile_mode="reduce-overhead"),
    "max-autotune": dict(compile=True, compile_mode="max-autotune"),
    "max-autotune-no-cudagraphs": dict(compile=True, compile_mode="max-autotune-no-cudagraphs"),
}
COMPILE_RECIPES = ("none", "current", "delayed", "block")
WIDTHS, TOKENS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096), (1024, 2048, 4096, 8192, 16384, 32768)
WARMUP, LR = 10, 1e-5  # so small that the model stays what it was
ON_CPU = dict(
    n_layer=2, n_embd=64, n_head=4, n_kv_head=None, head_dim=None, n_inner=None, vocab_size=512,
    micro_batch_size=2, seq_len=32,
)


# ---------------------------------------------------------------- arms

def arm_config(arm: str, config: TrainConfig) -> TrainConfig:
    """The options of train.py for an arm of ours; ValueError for a name that is none."""
    kind, *words = arm.split("-")
    changes = {"fp8_recipe": "delayed" if kind == "fp8" else "none"}
    for word in words:
        if kind == "fp8" and word in ("current", "block", *BLACKWELL):
            changes["fp8_recipe"] = word
        elif kind == "fp8" and word in ("e4m3", "hybrid"):
            changes["fp8_format"] = word
        elif word == "eager":
            changes["cuda_graph"] = "off"
        elif word in models.MODELS:
            changes["model"] = word
        elif re.fullmatch("accum[1-9][0-9]*", word):
            changes["grad_accum"] = int(word.removeprefix("accum"))
        elif word == "libraries":  # no kernel of this kit's own but the optimizer's
            changes |= {"attention": "sdpa", "fused_loss": False, "fused_block": False}
        elif word == "te_block":
            changes["fused_block"] = False
        elif word == "precise_dgrad":
            changes["fp8_dgrad_fast_accum_k"] = 0
        elif word == "bf16_moments":
            changes["moment_dtype"] = "bfloat16"
        elif word == "checkpointing":
            changes["gradient_checkpointing"] = True
        else:
            kind = None
    if kind not in ("bf16", "fp8"):
        raise ValueError(
            f"--arms {arm!r} is unknown; use {', '.join(dict.fromkeys(ARMS + PLAIN_ARMS))}, or see benchmark_te.py --help"
        )
    return dataclasses.replace(config, **changes)


def optimizer_bytes(arm, config):
    """A parameter, in a step, for floor_ms: the gradient read twice (norm, update), the rest read and
    written."""
    if arm in PLAIN_ARMS:
        return 2 * 2 + 2 * (2 + 2 + 2) if arm == "hf-llama" else 2 * 4 + 2 * (4 + 4 + 4)
    master = 2 * (2 + 2) if config.param_remainders else 2 * 4 + 2
    return 2 * 2 + master + 2 * (2 * (2 if config.moment_dtype == "bfloat16" else 4))


def build_te(config: TrainConfig, device, batch) -> TrainStep:
    """As train.train does it."""
    recipe = recipe_of(config)
    model_config = models.make_model_config(
        config.model, dataclasses.asdict(config) | {"use_fp8": recipe is not None}
    )
    if recipe is not None:
        fp8.check_shapes(model_config, config.micro_batch_size, config.seq_len, config.fp8_recipe)
    torch.manual_seed(config.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = models.build_model(config.model, model_config, device=device, dtype=dtype)
    if recipe is not None:
        model.fp8_recipe = recipe
    accelerate(model, config)
    optimizer = make_optimizer(model, config)
    if recipe is not None and recipe.delayed():
        warm_up_scales(model, batch)
    return TrainStep(model, compile_model(model, config), optimizer, config, device)


def make_batches(config, device):
    """grad_accum micro-batches of random tokens, the same in every arm."""
    random = torch.Generator().manual_seed(0)
    tokens = [
        torch.randint(config.vocab_size, (config.micro_batch_size, config.seq_len + 1), generator=random).to(
            device
        )
        for _ in range(config.grad_accum)
    ]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in tokens]


# ---------------------------------------------------------------- measuring

def free():
    """Between arms: nothing of one is left for the next."""
    fp8.forget_models()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def agreement_of_llama(model_config, config, batch, device):
    """Llama has no QK-norm, so it is compared with a plain GPT that has none either."""
    agreement = Agreement()
    model_config = dataclasses.replace(model_config, use_qk_norm=False)
    reference = build_plain("plain-eager", model_config, config, device)
    agreement.verify("plain-eager without QK-norm", reference, batch, device)
    return agreement


def phases_ms(step, batches, device, passes=5) -> dict:
    """Time forward, backward and optimizer, launched from Python, on one micro-batch: medians of `passes`."""
    forward = step.forward if isinstance(step, PlainStep) else step.net
    first = {"is_first_microbatch": True} if step.config.grad_accum > 1 else {}
    found = []
    for _ in range(2 + passes):
        step.optimizer.zero_grad(set_to_none=True)
        stamps = [stamp(device)]
        loss = forward(*batches[0], **first)
        stamps.append(stamp(device))
        loss.backward()
        stamps.append(stamp(device))
        step.update()
        found.append(spans_ms([*stamps, stamp(device)]))
    step.optimizer.zero_grad(set_to_none=True)
    return {
        f"{name}_ms": statistics.median(column[2:])
        for name, column in zip(("forward", "backward", "optimizer"), zip(*found))
    }


def measure(arm, config: TrainConfig, device, steps, plain=None, others=None, profiled=False, warmup=WARMUP,
            phases=5):
    """One arm -> (its figures, its step). `plain`: the step of plain, timed in turns with it. `others`: the
    Agreement with the other arms, or None. `phases`: passes for phases_ms, or 0."""
    config = arm_config("bf16" if arm in PLAIN_ARMS else arm, config)
    model_config = models.make_model_config(
        "optimized", dataclasses.asdict(config) | {"use_fp8": config.fp8_recipe != "none"}
    )
    batches = make_batches(config, device)
    if arm == "hf-llama" and others is not None:
        others = agreement_of_llama(model_config, config, batches[0], device)
    free()
    gpu = device.type == "cuda"
    occupied = torch.cuda.memory_allocated() if gpu else 0
    step = (
        build_plain(arm, model_config, config, device)
        if arm in PLAIN_ARMS
        else build_te(config, device, batches[0])
    )
    if others is None:
        checked = {"loss": step(batches, 0.0)[0].item()}
        check_loss(checked["loss"], config)
    else:
        checked = others.verify(arm, step, batches[0], device)
    for _ in range(warmup):
        step(batches, LR)
    peak = (torch.cuda.max_memory_allocated() - occupied) / 2**30 if gpu else None

    mine, theirs = [], []
    for turn in range(4):
        some = range(turn, steps, 4)
        if plain is not None:
            theirs += timed([lambda: plain(batches, LR) for _ in some], device)
        mine += timed([lambda: step(batches, LR) for _ in some], device)
    ms = statistics.median(mine)

    tokens = config.micro_batch_size * config.seq_len * config.grad_accum
    parameters, limit = sum(p.numel() for p in step.model.parameters()), peak_flops(device)
    figures = {
        "arm": arm,
        "ms": ms,
        "slowest_ms": max(mine),
        "tokens_per_s": 1e3 * tokens / ms,
        "ratio_to_plain": statistics.median(theirs) / ms if theirs else 1.0 if arm == "plain" else None,
        "mfu": 1e3 * tokens / ms * flops_per_token(parameters, config) / limit if limit else None,
        "peak_gib": peak,
        "cuda_graph": getattr(step, "graphed", arm == "plain-graph"),
        "parameters": parameters,
        "fp8_format": fp8.resolve_format(config.fp8_recipe, config.fp8_format) or None,
        "grad_accum": config.grad_accum,
        **checked,
        "model_config": dataclasses.asdict(model_config),
    }
    if profiled:
        figures["profile_ms"] = profile_ms(lambda: step(batches, LR), device)
        figures |= power_and_clock(lambda: step(batches, LR), device)
    if phases:
        try:
            figures |= phases_ms(step, batches, device, phases)
        except torch.OutOfMemoryError:
            # beside a graph's memory there is not always room for a pass without one
            step.optimizer.zero_grad(set_to_none=True)
    return figures, step


def attempt(arm, *args, **kwargs):
    """`measure`, but an arm that cannot run gives a row with the reason in a line."""
    try:
        return measure(arm, *args, **kwargs)
    except Exception as error:  # the other arms are still to be measured
        if not isinstance(error, (torch.OutOfMemoryError, ValueError)):
            traceback.print_exc()
        return {"arm": arm, "error": cli.in_a_line(error)}, None


# ---------------------------------------------------------------- what can be asked

@dataclass
class Options:
    shapes: tuple[str, ...] = ()  # The long table, against nanoGPT, at these shapes of the README, or all.
    blocks: tuple[Literal["gpt2", "modern"], ...] = ()
    """gpt2: LayerNorm, GELU, learned positions, biases. modern: RMSNorm, RoPE, QK-norm, GQA, SwiGLU, no
    biases. By default gpt2, and for three shapes modern too."""
    arms: tuple[str, ...] = ()  # By default all of the table or block; of llama3-8b fp8 and fp8-accum4.
    steps: int = 20  # Timed, of each arm.
    json: Path | None = None  # Write the rows here; those of other shapes, blocks and arms in the file stay.
    png: Path | None = None  # Draw them here.
    profile: Literal["main", "all", "none"] = "main"
    """Sum kernels by class: of fp8 and plain, of every arm, of none."""
    preset: str | None = None
    """A preset of train.py as the shape: its micro-batch and sequence, without accumulation."""
    shape: tuple[int, int, int, int, int] | None = None
    """Of the table of formats: layers, width, heads, batch, sequence; by default the seed guide's."""
    sweep: bool = False  # FP8 against BF16 over width and tokens a step.
    stack: bool = False
    """From plain PyTorch to here, measure by measure; with --shapes, at the first of them."""
    compile: bool = False  # torch.compile's modes on the five models.
    time_budget: int = 170
    """Seconds for --sweep and --compile. What does not fit into them is marked "not run"; the same command
    again goes on there, since these two do not measure again what --json already holds."""


def make_config(options: dict, device, block="gpt2") -> TrainConfig:
    """train.py's options for a shape; on a CPU a tiny one of the same kind."""
    fields = dict(vocab_size=50304) | options
    if block == "modern":
        fields |= MODERN | dict(n_kv_head=4 if fields["n_head"] == 12 else max(1, fields["n_head"] // 4))
    if device.type != "cuda":
        fields |= ON_CPU | dict(n_kv_head=2 if block == "modern" else None)
    return TrainConfig(**fields | dict(n_positions=fields["seq_len"]))


def say(row, of=""):
    if "error" in row:
        return print(f"{of:18} {row['arm']:18} {row['error']}", flush=True)
    percent = f"  MFU {100 * row['mfu']:.1f} %" if row["mfu"] else ""
    ratio = f"  {row['ratio_to_plain']:.3f} x plain" if row["ratio_to_plain"] else ""
    phases = "".join(
        f"  {name} {row[f'{name}_ms']:.2f}"
        for name in ("forward", "backward", "optimizer")
        if f"{name}_ms" in row
    )
    peak = f"  {row['peak_gib']:.1f} GiB" if row["peak_gib"] else ""
    print(
        f"{of:18} {row['arm']:18} {row['ms']:8.2f} ms  {row['tokens_per_s']:>9,.0f} tokens/s{ratio}{percent}{peak}{phases}",
        flush=True,
    )


def measure_shape(name, shape, block, arms, options, device, ceilings, rows, phases=5):
    """All arms of a shape, plain first, a row each."""
    torch._dynamo.reset()  # else it stops compiling after some models of the same class
    config, plain, others = make_config(shape, device, block), None, Agreement()
    queue = sorted(arms, key=lambda arm: arm != "plain")
    while queue:
        arm = queue.pop(0)
        profiled = options.profile == "all" or options.profile == "main" and arm in ("fp8", "plain")
        figures, step = attempt(arm, config, device, options.steps, plain, others, profiled, phases=phases)
        row = {"shape": name, "block": block} | figures
        if "error" not in row:
            arm_options = arm_config("bf16" if arm in PLAIN_ARMS else arm, config)
            model_config = models.make_model_config("optimized", figures["model_config"])
            floor = floor_ms(model_config, config.micro_batch_size * arm_options.grad_accum, config.seq_len,
                             arm.startswith("fp8"), ceilings, optimizer_bytes(arm, arm_options))
            row |= {"floor_ms": None if "nvfp4" in arm else floor,  # FP4's rate is not among the ceilings
                    "ceilings": ceilings}
        elif (
            "OutOfMemory" in row["error"]
            and config.preset == "llama3-8b"
            and not arm.endswith("checkpointing")
        ):
            queue.insert(0, f"{arm}-checkpointing")
        if arm == "plain":
            plain = step
        del step
        say(row, f"{name} {block}")
        rows.add(row)


def run_shapes(options, device, argv):
    shapes = {name: SHAPES[name] for name in (SHAPES if "all" in options.shapes else options.shapes)}
    if options.preset:
        shapes = {options.preset: {"preset": options.preset} | PRESETS[options.preset] | dict(grad_accum=1)}
    shapes = {name: shape | ({"preset": name} if name in PRESETS else {}) for name, shape in shapes.items()}
    ceilings = measure_ceilings(device)
    print("ceilings: " + ", ".join(f"{name} {value}" for name, value in ceilings.items()))
    rows = report.Rows(options.json, ("shape", "block", "arm"), argv)
    for name, shape in shapes.items():
        own = "own" if name in PRESETS else None  # a preset's block is its own
        for block in (
            [own] if own else options.blocks or (("gpt2", "modern") if name in MODERN_TOO else ("gpt2",))
        ):
            # tokens: there, launching kernels from Python is what takes plain's time
            few = shape["micro_batch_size"] * shape["seq_len"] <= 8192
            default = ARMS + (("hf-llama",) if block == "modern" else ()) + (("plain-graph",) if few else ())
            default = ("fp8", "fp8-accum4") if name == "llama3-8b" else default
            measure_shape(name, shape, block, options.arms or default, options, device, ceilings, rows)
            free()
    if options.png:
        report.draw_speed(rows, options.png)
    return int(any("numerics" in row.get("error", "") for row in rows))


def table_arms():
    """Name the arms of the table of formats: three models in BF16 and in the FP8 formats that run here."""
    supported = [recipe for recipe in BLACKWELL if not fp8.unsupported_reason(recipe)]
    formats = [*TABLE_FORMATS, *(f"fp8-{recipe}" for recipe in supported)]
    return [name if model == "optimized" else f"{name}-{model}" for model in TABLE_MODELS for name in formats]


def run_formats(options, device, argv):
    """Print the seed guide's table at one shape: forward, backward, total and FP8's speed-up, by format."""
    layers, width, heads, batch, length = options.shape or GUIDE_SHAPE
    name = "x".join(map(str, options.shape)) if options.shape else "guide"
    shape = dict(n_layer=layers, n_embd=width, n_head=heads, micro_batch_size=batch, seq_len=length)
    if options.profile == "main":
        options = dataclasses.replace(options, profile="none")
    rows = report.Rows(options.json, ("shape", "block", "arm"), argv)
    arms = options.arms or table_arms()
    ceilings = measure_ceilings(device)
    measure_shape(name, shape, "gpt2", arms, options, device, ceilings, rows, phases=options.steps)
    rows = [row for row in rows if row["shape"] == name]
    run = make_config(shape, device)  # on a CPU a smaller model than was asked for
    print(f"\n{run.n_layer} layers of width {run.n_embd}, {run.micro_batch_size} x {run.seq_len} tokens;"
          f" ms, and times BF16's speed\n{report.formats_table(rows)}")
    if device.type != "cuda" or fp8.IS_REFERENCE:
        print("FP8 is emulated here by te_reference: the times mean nothing")
    ms = {row["arm"]: row["ms"] for row in rows if "error" not in row}
    if {"bf16", "fp8"} <= set(ms):
        ratio = ms["bf16"] / ms["fp8"]
        verdict = "pays" if ratio > 1.02 else "does not pay" if ratio < 0.98 else "makes no difference"
        print(f"optimized, as train.py runs it: FP8 {verdict}, {ratio:.2f} times BF16's tokens/s")
    return int(any("numerics" in row.get("error", "") for row in rows))


def run_sweep(options, device, argv):
    """FP8 ÷ BF16 of two layers by width and tokens a step. A small vocabulary: it is about the blocks."""
    start, rows = time.time(), report.Rows(options.json, ("width", "tokens"), argv)
    widths, tokens = (WIDTHS, TOKENS) if device.type == "cuda" else (WIDTHS[:2], TOKENS[:2])
    for width in widths:
        for count in tokens:
            row = {"width": width, "tokens": count}
            if rows.has(row):
                continue
            others = Agreement()
            config = make_config(
                dict(
                    n_layer=2, n_embd=width, n_head=width // 64, micro_batch_size=count // 1024, seq_len=1024,
                    vocab_size=1024,
                ),
                device,
            )
            for arm in ("bf16-eager", "fp8-eager", "bf16", "fp8"):
                late = time.time() - start > options.time_budget
                figures = {"error": "not run: time budget"}
                if not late:
                    figures = attempt(arm, config, device, 8, None, others, warmup=3, phases=0)[0]
                row[f"{arm}_ms"] = figures.get("ms")
                row |= {"error": figures["error"]} if "error" in figures else {}
            for name, suffix in (("eager", "-eager"), ("graph", "")):
                ours, base = row[f"fp8{suffix}_ms"], row[f"bf16{suffix}_ms"]
                row[name] = base / ours if ours and base else None
            rows.add(row)
            print(
                f"width {width:5} tokens {count:6}  "
                + "  ".join(
                    f"{name} {row[name]:.2f}" if row[name] else f"{name} -" for name in ("eager", "graph")
                )
                + f"  {row.get('error', '')}",
                flush=True,
            )
    if options.png:
        report.draw_crossover(rows, options.png)


def run_stack(options, device, argv):
    name = next(iter(options.shapes), "124m-b32")
    config, rows = make_config(SHAPES[name], device), report.Rows(options.json, ("shape", "label"), argv)
    others = Agreement()
    for label, arm in STACK.items():
        figures = attempt(arm, config, device, options.steps, None, others)[0]
        rows.add({"shape": name, "label": label} | figures)
        say(figures, label.replace("\n", " ")[:26])
    if options.png:
        report.draw_stack([row for row in rows if row["shape"] == name], options.png)


def run_compile(options, device, argv):
    """torch.compile around the five models, beside the same step uncompiled and as a CUDA graph."""
    from torch._dynamo.utils import counters

    start, rows = time.time(), report.Rows(options.json, ("mode", "recipe", "model"), argv)
    others = Agreement()
    base = make_config(SHAPES["guide"], device)
    for recipe, mode, model in itertools.product(COMPILE_RECIPES, COMPILE_MODES, models.MODELS):
        row = {"mode": mode, "recipe": recipe, "model": model}
        if rows.has(row):
            continue
        changes = dict(model=model, fp8_recipe=recipe, cuda_graph="off") | COMPILE_MODES[mode]
        config = dataclasses.replace(base, **changes)
        torch._dynamo.reset()
        counters.clear()
        step = None  # of the row before, which may have failed: its memory goes with it
        free()
        try:
            if time.time() - start > options.time_budget:
                raise TimeoutError("time budget")
            batches = make_batches(config, device)
            step, began = build_te(config, device, batches[0]), time.time()
            for _ in range(4):  # reduce-overhead records in the second and third
                loss = step(batches, LR)[0].item()
            seconds = time.time() - began
            others.verify(f"{mode}, {recipe}, {model}", step, batches[0], device)
            ms = median_ms([lambda: step(batches, LR)] * 8, device)
            reasons = {
                reason.splitlines()[0][:150]: count for reason, count in counters["graph_break"].items()
            }
            row |= {
                "ms": ms,
                "tokens_per_s": 1e3 * config.micro_batch_size * config.seq_len / ms,
                "loss": loss,
                "graph_breaks": sum(reasons.values()),
                "reasons": reasons,
                "graphs": counters["stats"].get("unique_graphs", 0),
                "compile_s": max(0.0, seconds - 4 * ms / 1e3) if config.compile else 0.0,
            }
            told = f"{row['tokens_per_s']:>9,.0f} tokens/s  {row['graph_breaks']} breaks, {row['graphs']} graphs, {row['compile_s']:.0f} s"
        except TimeoutError as error:
            row["error"] = told = f"not run: {error}"
        except Exception as error:  # whatever the compiler raises is the finding
            row["error"] = told = cli.in_a_line(error)
        rows.add(row)
        print(f"{mode:28} {recipe:8} {model:10} {told}", flush=True)


def main(argv=None) -> int:
    options = cli.parse(Options, argv, prog="benchmark_te.py", description=__doc__)
    modes = ("shape", "stack", "shapes", "sweep", "compile", "preset")
    modes = [name for name in modes if getattr(options, name)]
    if len(modes) > 1 and modes != ["stack", "shapes"]:
        raise ValueError(f"--{modes[0]} and --{modes[1]}: one at a time")
    for name in options.shapes:
        if name not in SHAPES and (name != "all" or options.stack):
            known = ", ".join(SHAPES if options.stack else [*SHAPES, "all"])
            raise ValueError(f"--shapes {name!r} is unknown; use {known}")
    if not modes or modes == ["shape"]:
        for name in ("png", "blocks"):
            if getattr(options, name):
                raise ValueError(f"--{name}: the table of formats has none; add --shapes guide, for example")
    if options.preset and options.preset not in PRESETS:
        raise ValueError(f"--preset {options.preset!r} is unknown; use {', '.join(PRESETS)}")
    if options.steps < 4:
        raise ValueError(f"--steps {options.steps}: must be 4 or more; 20 works")
    if options.shape and (
        min(options.shape) < 1
        or options.shape[1] % options.shape[2]
        or options.shape[3] * options.shape[4] % 16
    ):
        raise ValueError(
            f"--shape {' '.join(map(str, options.shape))}: layers, width, heads, batch and sequence, the width a multiple of "
            "the heads and batch x sequence of 16; 4 768 12 8 512 works"
        )
    for arm in options.arms:
        if arm not in PLAIN_ARMS:
            arm_config(arm, TrainConfig())
    check_folder(options.json, options.png)
    device = pick_device("auto")
    print(f"{fp8.describe()}, torch {torch.__version__}")
    if device.type != "cuda":
        print("no GPU: tiny shapes through te_reference, and the times mean nothing")
    elif fp8.IS_REFERENCE:
        print("te_reference in place of Transformer Engine: the times mean nothing")
    else:
        torch.cuda.set_device(device)
    modes_run = {"shape": run_formats, "shapes": run_shapes, "preset": run_shapes, "sweep": run_sweep,
                 "stack": run_stack, "compile": run_compile}
    return modes_run[modes[0] if modes else "shape"](options, device, argv) or 0


if __name__ == "__main__":
    sys.exit(cli.run(main, "benchmark_te.py"))
