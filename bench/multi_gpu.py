"""How much does another GPU help? A step on all GPUs beside the same step on one, in turns.

    torchrun --nproc-per-node 2 bench/multi_gpu.py --json results/multi_gpu.json

`efficiency` is tokens/s per GPU of all GPUs together, over the mean tokens/s of a GPU that trains alone at
the same micro-batch. Alone the model is not sharded, for fsdp neither. The two steps take turns: five blocks
of steps of each. A step of a block makes a pair with the same step of the other's block; together the slowest
GPU counts. `efficiency` is the median over the pairs, which may differ by 1 % from the ratio of the median
times, and `efficiency_interval` its 95 % interval. Times and tokens/s are medians of steps. Layouts:

- ddp      gradients in float32, the update divided among the GPUs (nanote/ddp.py): the default
- fsdp     FSDP2
- nanogpt  nanoGPT's model as its train.py trains it, in BF16: DistributedDataParallel around the compiled
           model. Pass --nanogpt with a checkout, of which model.py alone is read

Before anything is timed, the step on all GPUs must have the loss and gradient norm that this GPU has alone.
All GPUs have the same tokens: the check finds a wrong divisor, not a wrong order of what is reduced, which
tests/test_multi_gpu.py does. --no-compare trains on all GPUs only: for a model that does not fit beside
itself on one of them. Its rows have no efficiency. Field `fa4` of a row says whether attention ran in
FlashAttention 4: where it is installed; nanoGPT has PyTorch's kernel.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import dataclasses
import itertools
import math
import os
import statistics
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

from bench import measure, nanogpt, report, step
from model_te_optimized import flash_version
from nanote import parallel
from nanote.command import parse, require_at_least, run_command

SHAPES = {name: step.SHAPES[name] for name in ("124m-b32", "350m-b16", "c4096", "llama3-8b")}
SHAPES["124m-b16"] = SHAPES["124m-b32"] | {"micro_batch_size": 16}
LAYOUTS = ("ddp", "fsdp", "nanogpt")
RECIPES = ("delayed", "none", "current", "block")
CLOSE = 0.01  # relative error of loss and gradient norm
CLOSE_FP8 = 0.02


@dataclass
class Options:
    shapes: tuple[str, ...] = ("124m-b32", "124m-b16", "350m-b16", "c4096")
    layouts: tuple[str, ...] = ("ddp",)
    recipes: tuple[str, ...] = ("none", "delayed")
    accum: int = 1  # Micro-batches per step.
    steps: int = 40  # Steps to time, of each.
    compare: bool = True  # Train on one GPU alone, too.
    nanogpt: Path | None = None  # Folder of a nanoGPT checkout, for layout nanogpt.
    json: Path | None = None  # Write the rows here; those of other layouts, shapes and recipes stay.


def alone():
    """Let this process train as if it were the only one."""
    return mock.patch("torch.distributed.is_initialized", lambda: False)


def check(options) -> None:
    """Raise ValueError or OSError for a mistake, before the processes meet."""
    for name, known in {"shapes": SHAPES, "layouts": LAYOUTS, "recipes": RECIPES}.items():
        for value in getattr(options, name):
            if value not in known:
                raise ValueError(f"--{name} {value!r}: unknown; use {', '.join(known)}")
    require_at_least(1, options, "accum")
    require_at_least(4, options, "steps")
    report.check_output(options.json)
    if "nanogpt" in options.layouts:
        if options.nanogpt is None:
            raise ValueError("--layouts nanogpt: needs a nanoGPT checkout; name its folder with --nanogpt")
        if options.accum > 1 or "llama3-8b" in options.shapes:
            raise ValueError("--layouts nanogpt: has no gradient accumulation and no Llama; leave it out")
        nanogpt.load(options.nanogpt)


def make_training(layout, config, options, device, batches):
    """Make the training of a layout for all ranks, or within `alone()` for this one."""
    if layout != "nanogpt":
        return step.Training(config, device, batches)
    # Load it for each step: torch.compile splits the graph for DDP, has no guard on DDP, and would run the
    # graphs of one step in the other, too
    return nanogpt.make_nanogpt(nanogpt.load(options.nanogpt), config, device, ddp=dist.is_initialized())


def over_ranks(value) -> list:
    """Return the value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def peak_gib(training, device, occupied) -> float | None:
    """Return the peak of this GPU's memory without `occupied` bytes, with what it shares, which PyTorch's
    allocator does not count."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated() - occupied
    sharded_adam = getattr(training.optimizer, "sharded_adam", None)
    if sharded_adam is not None:
        peak += sharded_adam.received.nbytes + sharded_adam.weights.nbytes
    return peak / 2**30


def warm(training, batches, device) -> list[float]:
    """Run steps with a learning rate of 0; return the loss and gradient norm of the first."""
    loss, norm = training(batches, 0.0)
    numbers = [loss.item(), norm.item()]
    for _ in range(measure.WARMUP if device.type == "cuda" else 1):
        training(batches, 0.0)
    return numbers


def with_one_gpu(layout, config, options, device, batches, together, numbers) -> dict:
    """Make the same training for this GPU alone. Return {"one": its step, "all": that of `together`}.

    numbers: loss and gradient norm of `together`; ValueError if one GPU computes others.
    """
    with alone():
        single = make_training(layout, dataclasses.replace(config, parallel="ddp"), options, device, batches)
        expected = warm(single, batches, device)
    check_agreement(numbers, expected, config)
    return {"one": alone()(lambda: single(batches, measure.LR)), "all": lambda: together(batches, measure.LR)}


def describe_network() -> dict:
    """Return the fields of a row about NCCL."""
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "nccl_max_ctas": os.environ.get("NCCL_MAX_CTAS"),
        "nvlink_multicast": os.environ.get("NCCL_NVLS_ENABLE") != "0"}


def measure_row(layout, config, options, device) -> dict:
    """Check and time one layout; return the figures of its row."""
    step.free()
    occupied = torch.cuda.memory_allocated() if device.type == "cuda" else 0  # by the shape before
    batches = step.make_batches(config, device)
    together = make_training(layout, config, options, device, batches)
    loss, norm = warm(together, batches, device)
    peak = peak_gib(together, device, occupied)
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}, so nothing is timed")
    if options.compare:
        functions = with_one_gpu(layout, config, options, device, batches, together, (loss, norm))
    else:
        functions = {"all": lambda: together(batches, measure.LR)}
    times_of_ranks = over_ranks(measure.in_turns(functions, options.steps, device))
    tokens = config.micro_batch_size * config.seq_len * config.grad_accum
    slowest_ms = max(statistics.median(times["all"]) for times in times_of_ranks)
    row = {"ms_all": slowest_ms, "tokens_per_s_per_gpu": 1e3 * tokens / slowest_ms,
           "peak_gib": peak, "loss": loss, "grad_norm": norm,
           "graphed": together.is_graph, "kernels": getattr(together, "kernels", None)}
    if options.compare:
        row |= efficiency_of(times_of_ranks, tokens)
    return row


def efficiency_of(times_of_ranks: list[dict], tokens: int) -> dict:
    """Return the fields of a row that compare with one GPU alone, which trains `tokens` a step.

    times_of_ranks: for each rank {"one": ms of its steps alone, "all": ms of its steps with the others}.
    """
    speeds_alone = [1e3 * tokens / statistics.median(times["one"]) for times in times_of_ranks]
    mean_alone = statistics.mean(speeds_alone)
    efficiencies = efficiencies_of_steps(times_of_ranks)
    return {"ms_one": max(statistics.median(times["one"]) for times in times_of_ranks),
            "tokens_per_s_one_gpu": mean_alone, "slowest_gpu": min(speeds_alone) / mean_alone,
            "efficiency": statistics.median(efficiencies),
            "efficiency_interval": measure.interval_of_median(efficiencies)}


def efficiencies_of_steps(times_of_ranks: list[dict]) -> list[float]:
    """Return the efficiency of each pair of steps that took turns. times_of_ranks: as in `efficiency_of`."""
    alone_by_step = zip(*[times["one"] for times in times_of_ranks])
    together_by_step = zip(*[times["all"] for times in times_of_ranks])
    efficiencies = []
    for alone_ms, together_ms in zip(alone_by_step, together_by_step):
        mean_speed_alone = statistics.mean(1 / ms for ms in alone_ms)
        efficiencies.append(1 / max(together_ms) / mean_speed_alone)
    return efficiencies


def check_agreement(found, expected, config) -> None:
    """Raise ValueError, on all ranks, if one rank's loss or gradient norm is not what one GPU computes."""
    bound = CLOSE if config.fp8_recipe == "none" else CLOSE_FP8
    own_errors = [abs(value / wanted - 1) for value, wanted in zip(found, expected)]
    for errors in over_ranks(own_errors):
        for error in errors:
            if not error <= bound:  # NaN is refused, too
                raise ValueError(f"loss or gradient norm on {dist.get_world_size()} GPUs differ from one "
                                 f"GPU's by {error:.3g}")


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/multi_gpu.py", __doc__)
    check(options)
    ranks = parallel.start()
    if ranks.count < 2:
        raise ValueError("one process; start it with torchrun --nproc-per-node 2")
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    keys = ("gpus", "gpu", "parallel", "shape", "recipe", "grad_accum", "nccl_max_ctas")
    rows = report.Rows(options.json if ranks.rank == 0 else None, keys, "bench/multi_gpu.py", argv)
    common = describe_network() | {
        "gpus": ranks.count, "gpu": rows.origin["gpu"], "grad_accum": options.accum}
    for shape, layout, recipe in itertools.product(options.shapes, options.layouts, options.recipes):
        changes = dict(fp8_recipe=recipe, grad_accum=options.accum, parallel=layout)
        row = common | {"parallel": layout, "shape": shape, "recipe": recipe, "fa4": flash_version == 4}
        if layout == "nanogpt":
            if recipe != options.recipes[0]:
                continue  # it has one precision
            changes |= dict(fp8_recipe="none", parallel="ddp")
            row |= {"recipe": "none", "fa4": False, "model_py_sha256": nanogpt.checksum(options.nanogpt)}
        config = dataclasses.replace(step.make_config(SHAPES[shape], device), **changes)
        row |= measure_row(layout, config, options, device)
        if ranks.rank == 0:
            rows.add(row, f"{ranks.count} GPUs  {layout} {shape} {row['recipe']}")
    step.free()  # NCCL waits for CUDA graphs that hold its kernels


if __name__ == "__main__":
    parallel.end_process(run_command(main, "bench/multi_gpu.py"))
