"""How much does another GPU help? A step on all GPUs beside the same step on one, in turns.

    torchrun --nproc-per-node 2 bench/multi_gpu.py --json results/multi_gpu.json

`efficiency` is tokens/s per GPU in a layout, divided by the mean over the GPUs of what each reaches alone at
the same micro-batch; both steps take turns, and a figure is the median of their steps. Layouts:

- ddp               gradients in float32, the update divided among the GPUs (nanote/peers.py): the default
- ddp-all_reduce    gradients reduced by NCCL during the backward pass: with several machines
- ddp-bf16_reduce   accumulated in float32, reduced in BF16
- ddp-bf16          in BF16 throughout
- ddp-eager         launched from Python, not as CUDA graphs
- fsdp, fsdp-keep   FSDP2; with --no-reshard-after-forward; both also with -eager and -bf16_reduce
- …-nccl            a layout of fsdp whose weights and gradients go through NCCL, not the copy engines
                    (nanote/fsdp_copies.py): with several machines
- nanogpt           nanoGPT's model as its train.py trains it, in BF16: DistributedDataParallel around the
                    compiled model. Pass --nanogpt with a checkout, of which model.py alone is read

Layout nanogpt has the biases of this kit's model in its linear layers. It is timed first; `over_nanogpt` of a
row of ddp is its tokens/s per GPU over nanoGPT's with as many GPUs.

Before anything is timed, the step on all GPUs, with one GPU's tokens on each of them, must have the loss and
gradient norm that this GPU has alone. NVLink multicast is off if NCCL_NVLS_ENABLE=0 is set; rows say so.
"""
import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import arms, measure, nanogpt, report, timing
from nanote import cli, elastic, parallel, peers

SHAPES = {name: arms.SHAPES[name] for name in ("124m-b32", "350m-b16", "c4096")} | {
    "124m-b16": arms.SHAPES["124m-b32"] | {"micro_batch_size": 16}, "llama3-8b": arms.SHAPES["llama3-8b"]}
LAYOUTS = {
    "ddp": {}, "ddp-all_reduce": {}, "ddp-bf16_reduce": {"grad_reduce_dtype": "bfloat16"},
    "ddp-bf16": {"grad_accum_dtype": "bfloat16", "grad_reduce_dtype": "bfloat16"},
    "ddp-eager": {"cuda_graph": "off"},
    "fsdp": {"parallel": "fsdp"}, "fsdp-keep": {"parallel": "fsdp", "reshard_after_forward": False},
    "fsdp-eager": {"parallel": "fsdp", "cuda_graph": "off"},
    "fsdp-keep-eager": {"parallel": "fsdp", "cuda_graph": "off", "reshard_after_forward": False},
    "fsdp-bf16_reduce": {"parallel": "fsdp", "grad_reduce_dtype": "bfloat16"},
    "fsdp-keep-bf16_reduce": {
        "parallel": "fsdp", "grad_reduce_dtype": "bfloat16", "reshard_after_forward": False},
    "nanogpt": {},
}
LAYOUTS |= {f"{name}-nccl": options for name, options in LAYOUTS.items()
            if name.startswith("fsdp") and not name.endswith("eager")}
NAMES = {
    "ddp": "ddp", "ddp-all_reduce": "ddp, all-reduce by NCCL",
    "ddp-bf16_reduce": "ddp, `--grad-reduce-dtype bfloat16`",
    "ddp-bf16": "ddp, `--grad-accum-dtype bfloat16`", "ddp-eager": "ddp, `--cuda-graph off`", "fsdp": "fsdp",
    "fsdp-keep": "fsdp, `--no-reshard-after-forward`", "fsdp-eager": "fsdp, `--cuda-graph off`",
    "fsdp-keep-eager": "fsdp, `--no-reshard-after-forward --cuda-graph off`",
    "fsdp-bf16_reduce": "fsdp, `--grad-reduce-dtype bfloat16`",
    "fsdp-keep-bf16_reduce": "fsdp, `--no-reshard-after-forward --grad-reduce-dtype bfloat16`",
    "nanogpt": "nanoGPT under DDP",
}
NAMES = {name: NAMES.get(name) or f"{NAMES[name.removesuffix('-nccl')]}, by NCCL" for name in LAYOUTS}
SHAPE_NAMES = {
    "124m-b32": "124M, 32 x 1,024", "124m-b16": "124M, 16 x 1,024", "350m-b16": "350M, 16 x 1,024",
    "c4096": "width 4,096, 4 x 4,096", "llama3-8b": "Llama-3 8B, 1 x 8,192",
}
RECIPES = {"delayed": "FP8", "none": "BF16", "current": "FP8 current", "block": "FP8 block"}
PATIENCE = datetime.timedelta(seconds=60)  # for a rank that has not finished a row
CLOSE = {"delayed": 0.02, "none": 0.01, "current": 0.02, "block": 0.02}  # relative, loss and gradient norm


@dataclass
class Options:
    shapes: tuple[str, ...] = ("124m-b32", "124m-b16", "350m-b16", "c4096")
    layouts: tuple[str, ...] = ("ddp",)
    recipes: tuple[str, ...] = ("none", "delayed")
    accum: int = 1  # Micro-batches per step.
    steps: int = 40  # Steps to time, of each.
    nanogpt: Path | None = None  # Folder of a nanoGPT checkout, for layout nanogpt.
    profile: bool = False  # Sum the kernels of a step by class.
    json: Path | None = None  # Write the rows here; those of other layouts, shapes and recipes stay.


def alone():
    """Let this process train as if it were the only one."""
    return mock.patch("torch.distributed.is_initialized", return_value=False)


@contextlib.contextmanager
def as_nanogpt():
    """Allow TF32, as nanoGPT's train.py does."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch._dynamo.reset()  # or torch.compile reaches its recompile limit


def layout_applied(layout: str):
    """Make a layout that no option selects."""
    if layout == "ddp-all_reduce" or layout.endswith("-nccl"):
        return mock.patch.object(peers, "no_access_reason", return_value="not asked for")
    return as_nanogpt() if layout == "nanogpt" else contextlib.nullcontext()


def check(options) -> str | None:
    """Return the SHA-256 of nanoGPT's model.py, None without layout nanogpt.

    Raises ValueError or FileNotFoundError if the options do not fit.
    """
    for name, known in {"shapes": SHAPES, "layouts": LAYOUTS, "recipes": RECIPES}.items():
        for value in set(getattr(options, name)) - set(known):
            raise ValueError(f"--{name} {value!r} is unknown; use {', '.join(known)}")
    if "nanogpt" not in options.layouts:
        return None
    if options.nanogpt is None:
        raise ValueError("--layouts nanogpt: no nanoGPT checkout was given; name its folder with --nanogpt")
    if options.accum > 1:
        raise ValueError(f"--accum {options.accum}: layout nanogpt does not accumulate; pass 1")
    if "llama3-8b" in options.shapes:
        raise ValueError("--shapes llama3-8b: nanoGPT has no Llama; drop the shape or layout nanogpt")
    nanogpt.load(options.nanogpt)
    return hashlib.sha256((options.nanogpt / "model.py").read_bytes()).hexdigest()


def build_step(layout, config, options, device, batch):
    """Build the step of a layout for all ranks, or within `alone()` for this one."""
    if layout != "nanogpt":
        return arms.build_te(config, device, batch)
    # Load it for each step: torch.compile splits the graph for DDP, has no guard on DDP, and would run the
    # graphs of one step in the other, too
    return nanogpt.build(nanogpt.load(options.nanogpt), config, device, ddp=dist.is_initialized())


def over_ranks(value: float) -> list[float]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure_row(layout, config, options, device) -> dict:
    """Check and time one layout; return the figures of its row."""
    batches = arms.make_batches(config, device)
    arms.free()
    together = build_step(layout, config, options, device, batches[0])
    loss, norm = (value.item() for value in together(batches, 0.0))
    for _ in range(measure.WARMUP):
        together(batches, 0.0)
    peak = None
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated() + peers.shared_bytes()) / 2**30
    with alone():
        config_of_one = dataclasses.replace(config, parallel="ddp", grad_accum_dtype="auto")
        single = build_step(layout, config_of_one, options, device, batches[0])
        expected = [value.item() for value in single(batches, 0.0)]
    check_agreement((loss, norm), expected, config)
    row = time_in_turns(single, together, batches, options.steps, device)
    row |= speed_figures(row, config) | {
        "peak_gib": peak, "loss": loss, "grad_norm": norm,
        "graphed": getattr(together, "graphed", False), "kernels": getattr(together, "kernels", None)}
    if options.profile:
        row["profile"] = {"all": timing.profile_ms(lambda: together(batches, measure.LR), device)}
        with alone():
            row["profile"]["one"] = timing.profile_ms(lambda: single(batches, measure.LR), device)
    return row


def check_agreement(found, expected, config) -> None:
    """Raise ValueError, on all ranks, if one rank's loss or gradient norm is not what one GPU computes."""
    error = max(abs(value / wanted - 1) for value, wanted in zip(found, expected))
    # max() alone would not return a NaN that is not first
    error = max(over_ranks(error), key=lambda value: math.inf if math.isnan(value) else value)
    if not error <= CLOSE[config.fp8_recipe]:
        raise ValueError(f"loss or gradient norm on {dist.get_world_size()} GPUs differ from one GPU's by "
                         f"{error:.3g}")


def time_in_turns(single, together, batches, steps, device) -> dict:
    """Return the median ms of a step on this GPU alone and on all GPUs."""
    ms_one, ms_all, count = [], [], max(1, steps // measure.TURNS)
    for turn in range(1 + measure.TURNS):
        with alone():
            one = timing.timed([lambda: single(batches, measure.LR)] * count, device)
        dist.barrier()
        every = timing.timed([lambda: together(batches, measure.LR)] * count, device)
        if turn:  # the first turn warms up
            ms_one += one
            ms_all += every
    return {"ms_one": statistics.median(ms_one), "ms_all": statistics.median(ms_all)}


def speed_figures(row, config) -> dict:
    """Return tokens per second and efficiency, over all ranks, from ms_one and ms_all of `row`."""
    tokens = config.micro_batch_size * config.seq_len * config.grad_accum
    on_one = [1e3 * tokens / ms for ms in over_ranks(row["ms_one"])]
    on_all = 1e3 * tokens / max(over_ranks(row["ms_all"]))
    mean = statistics.mean(on_one)
    return {"tokens_per_s_per_gpu": on_all, "tokens_per_s_one_gpu": mean, "slowest_gpu": min(on_one) / mean,
            "efficiency": on_all / mean}


def main(argv=None) -> int:
    options = cli.parse(Options, argv, prog="bench/multi_gpu.py", description=__doc__)
    source = check(options)
    ranks = parallel.init()
    if ranks.world_size < 2:
        raise ValueError("bench/multi_gpu.py: one process; start it with torchrun --nproc-per-node 2")
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)  # it works while a GPU waits for another
    keys = ("gpus", "gpu", "parallel", "shape", "recipe", "grad_accum", "nccl_max_ctas")
    rows = report.Rows(options.json if ranks.is_first else None, keys, "bench/multi_gpu.py", argv)
    layouts = sorted(options.layouts, key=lambda layout: layout != "nanogpt")  # first, for over_nanogpt
    for shape, layout, recipe in itertools.product(options.shapes, layouts, options.recipes):
        if layout == "nanogpt":
            if recipe != options.recipes[0]:
                continue
            recipe = "none"
        config = dataclasses.replace(arms.make_config(SHAPES[shape], device), fp8_recipe=recipe,
                                     grad_accum=options.accum, **LAYOUTS[layout])
        row = {"gpus": ranks.world_size, "gpu": rows.origin["gpu"], "parallel": layout, "shape": shape,
               "recipe": recipe, "grad_accum": options.accum,
               "nccl_max_ctas": os.environ.get("NCCL_MAX_CTAS")}
        error = ""
        try:
            with layout_applied(layout):
                row |= measure_row(layout, config, options, device)
        except (RuntimeError, ValueError) as raised:
            error = cli.in_a_line(raised)
        if error := error_of_any_rank(error, group):
            row |= {"error": error}
        row |= ratios(row, rows)
        if layout == "nanogpt":
            row["model_py_sha256"] = source
        row["nvlink_multicast"] = os.environ.get("NCCL_NVLS_ENABLE") != "0"
        row["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
        rows.add(row)
        if ranks.is_first:
            print(describe(row), flush=True)
    arms.free()  # NCCL waits for CUDA graphs that hold its kernels
    parallel.shut_down(ranks)
    return 0


def error_of_any_rank(error: str, group) -> str:
    """Return the error of a row of the first rank that has one, or "".

    A rank may wait forever, in a collective, for one that failed. That one then raises ValueError after
    PATIENCE, and torchrun ends the other.
    """
    try:
        return parallel.reason_of_any_rank(error, group)
    except RuntimeError:
        if not error:
            raise
        raise ValueError(f"rank {dist.get_rank()} failed, and others wait for it: {error}") from None


def ratios(row: dict, rows: list[dict]) -> dict:
    """Return the ratios of a row to the BF16 row of its layout and, for ddp, to nanoGPT's, if measured."""
    def find(**fields):
        wanted = {key: row[key] for key in ("gpus", "gpu", "parallel", "shape", "grad_accum")} | fields
        matching = (other for other in rows if "error" not in other and wanted.items() <= other.items())
        return next(matching, None)

    found = {}
    if "error" in row:
        return found
    if row["recipe"] != "none" and (plain := find(recipe="none")):
        for name, field in {"": "tokens_per_s_per_gpu", "_one_gpu": "tokens_per_s_one_gpu"}.items():
            found[f"fp8_over_bf16{name}"] = row[field] / plain[field]
    if row["parallel"].startswith("ddp") and (other := find(parallel="nanogpt")):
        found["over_nanogpt"] = row["tokens_per_s_per_gpu"] / other["tokens_per_s_per_gpu"]
    return found


def table(rows: list[dict]) -> str:
    """Return a Markdown table of the rows, for bench/pages.py."""
    def place(row):
        return (row["gpu"], list(NAMES).index(row["parallel"]), list(SHAPE_NAMES).index(row["shape"]),
                row["grad_accum"], list(RECIPES).index(row["recipe"]))

    lines = []
    for row in sorted((row for row in rows if "error" not in row), key=place):
        accumulated = f", {row['grad_accum']} a step" if row["grad_accum"] > 1 else ""
        ratios = [row.get(name) for name in ("fp8_over_bf16", "over_nanogpt")]
        lines.append([
            f"{row['gpus']} x {row['gpu'].removeprefix('NVIDIA ').split()[0]}", NAMES[row["parallel"]],
            SHAPE_NAMES[row["shape"]] + accumulated, RECIPES[row["recipe"]],
            f"{row['tokens_per_s_per_gpu'] / 1e3:,.1f}", f"{row['efficiency']:.2f}",
            f"{row['peak_gib']:.1f}", *[f"{ratio:.2f}" if ratio else "" for ratio in ratios]])
    titles = ["GPUs", "layout", "tokens per micro-batch", "precision", "k tokens/s per GPU",
              "of one GPU alone", "peak GiB", "FP8 over BF16", "over nanoGPT"]
    if not any(line[-1] for line in lines):
        titles, lines = titles[:-1], [line[:-1] for line in lines]
    return report.markdown(titles, lines, left=4)


def describe(row: dict) -> str:
    name = f"{row['gpus']} GPUs  {row['parallel']:21} {row['shape']:9} {row['recipe']:8}"
    if "error" in row:
        return f"{name} {row['error']}"
    return (f"{name} {row['tokens_per_s_per_gpu'] / 1e3:8.1f} k tokens/s per GPU, one "
            f"{row['tokens_per_s_one_gpu'] / 1e3:8.1f} k, efficiency {row['efficiency']:.3f}, peak "
            f"{row['peak_gib'] or 0:.1f} GiB, FP8 / BF16 {row.get('fp8_over_bf16', float('nan')):.3f}")


if __name__ == "__main__":
    elastic.exit_process(cli.run(main, "bench/multi_gpu.py"))
