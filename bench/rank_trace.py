"""Why is a step on several GPUs slower than a step alone? The kernels of both, in traces of all ranks.

    torchrun --nproc-per-node 4 bench/rank_trace.py --json results/rank_trace.json

Each GPU trains alone and then with the others, as in bench/multi_gpu.py, and PyTorch's profiler records the
kernels of a few steps of each. bench/kernel_times.py divides the time of a step among them, so that these
terms sum to what a step together takes longer than a step alone:

- slower kernels         those that both steps have: beside communication they get fewer SMs, and share the
                         memory bandwidth
- different kernels      those that one of the steps has, or has more often: copies and casts of a layout, and
                         GEMMs that write gradients in float32, which one GPU alone has in BF16
- optimizer              each rank updates a part of the parameters; with ddp it also writes them to all GPUs
- exposed communication  no kernel computes meanwhile; it includes waiting for the slowest rank
- idle                   no kernel runs

A step lasts from the end of an update to the end of the next one. Steps under the profiler differ from others
by up to 2 ms, in both directions, so ms_one, ms_all and efficiency are measured without it. Of a row of
communication, `waits` is the time between the start of a collective's kernel and that of the last rank, which
`GB/s` leaves out, and `SMs` the largest number of its thread blocks. The bytes that a rank sends are those of
rings, for the collectives that a step calls, and of the copies of nanote/peers.py. A row that fails has an
error, and the next one follows. --events keeps what was recorded: `make_row` makes the row of it again.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import contextlib
import dataclasses
import datetime
import gzip
import itertools
import json
import os
import statistics
import tempfile
import traceback
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from unittest import mock

import torch
import torch.distributed as dist

from bench import kernel_times, measure, multi_gpu, report, step
from bench.kernel_times import CLASSES, TERMS, Kernel
from model_te_optimized import flash_version
from nanote import parallel
from nanote.command import parse, require_at_least, run_command

LAYOUTS = ("ddp", "fsdp")
PATIENCE = datetime.timedelta(seconds=120)  # of a rank that is done, or has failed, with the others
COLLECTIVES = {  # method of torch.distributed's ProcessGroup -> part of the names of its kernels
    "_allgather_base": "AllGather", "_reduce_scatter_base": "ReduceScatter",  # of PyTorch 2.11
    "all_gather_single": "AllGather", "reduce_scatter_single": "ReduceScatter",  # of PyTorch 2.13
    "allgather": "AllGather", "allreduce": "AllReduce",
}


@dataclass
class Options:
    shapes: tuple[str, ...] = ("124m-b32", "350m-b16", "c4096")
    layouts: tuple[str, ...] = LAYOUTS
    recipe: str = "delayed"
    steps: int = 5  # Steps to trace, of each.
    timed_steps: int = 20  # Steps to time without the profiler, of each.
    events: Path | None = None  # Folder for the kernels of each row.
    json: Path | None = None  # Write the rows here; those of other layouts, shapes and GPUs stay.


def check(options) -> None:
    """Raise ValueError or OSError for a mistake, before the processes meet."""
    for shape in options.shapes:
        if shape not in multi_gpu.SHAPES:
            raise ValueError(f"--shapes {shape!r}: unknown; use {', '.join(multi_gpu.SHAPES)}")
    for layout in options.layouts:
        if layout not in LAYOUTS:
            raise ValueError(f"--layouts {layout!r}: unknown; use {', '.join(LAYOUTS)}")
    if options.recipe not in multi_gpu.RECIPES:
        raise ValueError(f"--recipe {options.recipe!r}: unknown; use {', '.join(multi_gpu.RECIPES)}")
    require_at_least(1, options, "steps")
    require_at_least(4, options, "timed_steps")
    report.check_output(options.json)
    if options.events is not None and not options.events.is_dir():
        raise FileNotFoundError(f"{options.events}: there is no such folder; make it first")


# ---------------------------------------------------------------- what each rank records

@contextlib.contextmanager
def count_sent(sent: dict):
    """Add the bytes that this rank sends in collectives to {collective: bytes}, as many as a ring sends.

    Only of those that Python calls: not of replayed CUDA graphs.
    """
    others = dist.get_world_size() - 1

    def counting(method, collective):
        def call(group, outputs, inputs, *options):  # of allreduce: group, tensors, options
            if collective == "AllReduce":
                sent[collective] += 2 * others * size_of(outputs) // (others + 1)
            elif collective == "AllGather":
                sent[collective] += others * size_of(inputs)
            else:
                sent[collective] += others * size_of(outputs)
            return method(group, outputs, inputs, *options)
        return call

    with contextlib.ExitStack() as patches:
        for name, collective in COLLECTIVES.items():
            sent.setdefault(collective, 0)
            if hasattr(dist.ProcessGroup, name):
                method = counting(getattr(dist.ProcessGroup, name), collective)
                patches.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        yield


def size_of(tensors) -> int:
    """Return the bytes of a tensor or of a list of tensors."""
    return sum(tensor.nbytes for tensor in tensors) if isinstance(tensors, list) else tensors.nbytes


def sent_by_copies(sharded_adam) -> tuple[dict, set]:
    """Return {"copies" of gradients, "update", which writes weights: bytes that a rank sends a step} of a
    ShardedAdam, and the sizes of the copies."""
    sizes = []
    written = 0
    for bucket in sharded_adam.buckets:
        for other in sharded_adam.others:
            start, end = bucket.shard_of(other, sharded_adam.world_size)
            sizes.append((end - start) * bucket.buffer.itemsize)
        for parameter in bucket.offsets:
            _, size = sharded_adam.slice_of(parameter, bucket, sharded_adam.rank)
            written += size * parameter.itemsize * len(sharded_adam.others)
    return {"copies": sum(sizes), "update": written}, set(sizes)


def trace_steps(function, steps: int) -> list[Kernel]:
    """Run steps, which all ranks start at the same time. Return their kernels."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        parallel.sum_over_ranks(torch.zeros(()))  # waits for all ranks, on the host
        for _ in range(steps):
            function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return kernel_times.kernels_of(json.loads(path.read_text()))


def record(config, options, device) -> dict:
    """Train together and alone. Return what this rank has recorded of both."""
    step.free()
    batches = step.make_batches(config, device)
    together = step.Training(config, device, batches)
    numbers = [value.item() for value in together(batches, 0.0)]
    sent = {}
    with count_sent(sent):
        together(batches, 0.0)  # the second step: CUDA graphs are captured in the third
    sent_sizes = set()
    sharded_adam = getattr(together.optimizer, "sharded_adam", None)
    if sharded_adam is not None:
        copied, sent_sizes = sent_by_copies(sharded_adam)
        sent |= copied
    multi_gpu.warm(together, batches, device)
    functions = multi_gpu.with_one_gpu(config.parallel, config, options, device, batches, together, numbers)
    times = measure.in_turns(functions, options.timed_steps, device)
    return {
        "alone": trace_steps(functions["one"], options.steps + 1),
        "together": trace_steps(functions["all"], options.steps + 1),
        "sent": sent, "sent_sizes": sorted(sent_sizes), "times": times,
        "graphed": together.is_graph, "kernels": together.kernels,
        "not_sharded_reason": getattr(together.optimizer, "not_sharded_reason", "")}


# ---------------------------------------------------------------- rows

def make_row(recorded: dict) -> dict:
    """Return the row of {"row": its first fields, "steps": those traced, "ranks": what each has recorded}."""
    row = recorded["row"]
    ranks = []
    for rank in recorded["ranks"]:
        kernels = {}
        for name in ("alone", "together"):
            kernels[name] = [Kernel.from_json(values) for values in rank[name]]
        ranks.append(rank | kernels)
    times = multi_gpu.efficiency_of([rank["times"] for rank in ranks], row["tokens"])
    times["ms_all"] = max(statistics.median(rank["times"]["all"]) for rank in ranks)
    return row | times | rounded(kernel_times.summarize(ranks, recorded["steps"]))


def rounded(value):
    """Return JSON with floats of six digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def mean_over(ranks, *path) -> float:
    """Return the mean over ranks of rank[path[0]][path[1]]..."""
    return statistics.mean(reduce(getitem, path, rank) for rank in ranks)


def text_of_terms(ranks) -> list[str]:
    """Return a line for each term of the difference: mean, lowest and highest rank, and the mean of each
    class."""
    lines = [f"  {'together - alone, ms':<24}{'mean':>8}  ranks"]
    terms = {term: [rank["difference_ms"][term] for rank in ranks] for term in TERMS}
    terms["sum"] = [sum(rank["difference_ms"].values()) for rank in ranks]
    for term, values in terms.items():
        mean = statistics.mean(values)
        line = f"    {term:<22}{mean:+8.2f}  {min(values):+.2f} to {max(values):+.2f}"
        parts = []
        for kind in CLASSES:
            of_ranks = [rank["difference_by_class_ms"].get(term, {}).get(kind, 0.0) for rank in ranks]
            if any(of_ranks):
                parts.append(f"{kind} {statistics.mean(of_ranks):+.2f}")
        if term in ("slower kernels", "different kernels") and parts:
            line += f": {', '.join(parts)}"
        lines.append(line)
    return lines


def text_of_kernels(ranks) -> list[str]:
    """Return a line for each class: its summed durations, alone and together."""
    lines = [f"  {'kernels, ms a step':<24}{'alone':>8}{'together':>10}{'ratio':>8}"]
    for kind in CLASSES:
        alone = mean_over(ranks, "summed_ms", "alone", kind)
        together = mean_over(ranks, "summed_ms", "together", kind)
        ratio = f"{together / alone:8.3f}" if alone else ""
        lines.append(f"    {kind:<22}{alone:8.2f}{together:10.2f}{ratio}")
    for place, title in {"beside": "beside communication", "apart": "apart from it"}.items():
        ratios = [rank["slowdown"][place] for rank in ranks if rank["slowdown"][place]]
        if ratios:
            mean = statistics.mean(ratios)
            lines.append(f"    those of both steps, {title}: {mean:.3f} x as long as alone")
    return lines


def text_of_communication(ranks) -> list[str]:
    """Return a line for each collective: means over the ranks."""
    titles = ("kernels", "ms", "exposed", "waits", "MB sent", "GB/s", "SMs")
    lines = [f"  {'communication of a step':<24}" + "".join(f"{title:>9}" for title in titles)]
    found = ranks[0]["communication"]
    for name in found:
        with_it = [rank for rank in ranks if name in rank["communication"]]
        mean = {field: mean_over(with_it, "communication", name, field) for field in found[name]}
        lines.append(
            f"    {name:<22}{mean['kernels']:9.0f}{mean['ms']:9.2f}{mean['exposed_ms']:9.2f}"
            f"{mean['wait_ms']:9.2f}{mean['bytes'] / 1e6:9.1f}{mean['gb_per_s']:9.0f}{mean['channels']:9.0f}")
    for name, size in ranks[0]["sent_bytes"].items():
        if size > 1e5 and name not in found:  # "update": the optimizer's kernel writes them
            lines.append(f"    {name}: {size / 1e6:.1f} MB, not sent by kernels of class communication")
    return lines


def text_of(row) -> str:
    """Return the arithmetic of a row for the screen."""
    ranks = row["ranks"]
    apart = row["ends_apart_us"]
    clocks = [rank["clock_offset_us"] for rank in ranks]
    return "\n".join([
        f"  a step: {row['ms_one']:.2f} ms alone, {row['ms_all']:.2f} together; with the profiler "
        f"{mean_over(ranks, 'step_ms', 'alone'):.2f} and {mean_over(ranks, 'step_ms', 'together'):.2f}",
        *text_of_terms(ranks), *text_of_kernels(ranks), *text_of_communication(ranks),
        f"  all ranks end a step within {apart['mean']:.0f} us, at most {apart['max']:.0f}; their clocks "
        f"differ by {max(clocks) - min(clocks):.0f} us, which is corrected"])


def write_events(folder: Path, recorded: dict) -> None:
    row = recorded["row"]
    name = f"{row['gpus']}-{row['parallel']}-{row['shape']}-{row['recipe']}.json.gz"
    with gzip.open(folder / name, "wt") as file:
        json.dump(recorded, file)


def record_on_all_ranks(config, options, device, group) -> tuple[dict | None, str]:
    """Call `record` on each rank. Return its result, and the error of the first rank that failed, or "".

    The others may wait in a collective for a rank that failed. That one then ends, and torchrun ends all.
    """
    recorded = None
    error = ""
    try:
        recorded = record(config, options, device)
    except Exception as raised:
        traceback.print_exc()
        error = measure.error_text(raised)
    try:
        return recorded, parallel.gather_first(error, group)
    except RuntimeError:  # after PATIENCE
        print(f"rank {parallel.rank()} waited {PATIENCE} for the others, and ends", flush=True)
        os._exit(1)


def measure_row(row, config, options, device, group) -> dict:
    """Return a row, on rank 0 with its figures. Collective."""
    recorded, error = record_on_all_ranks(config, options, device, group)
    if error:
        return row | {"error": error}
    tokens = config.micro_batch_size * config.seq_len * config.grad_accum
    fields = {name: recorded[name] for name in ("graphed", "kernels", "not_sharded_reason")}
    recorded = {"row": row | fields | {"tokens": tokens}, "steps": options.steps,
                "ranks": multi_gpu.over_ranks(recorded)}
    if parallel.rank() != 0:
        return row
    if options.events is not None:
        write_events(options.events, recorded)
    try:
        return make_row(recorded)
    except Exception as raised:  # what was recorded is in --events
        traceback.print_exc()
        return row | {"error": measure.error_text(raised)}


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/rank_trace.py", __doc__)
    check(options)
    ranks = parallel.start()
    if ranks.count < 2:
        raise ValueError("one process; start it with torchrun --nproc-per-node 2")
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here; run it on two GPUs or more")
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    keys = ("gpus", "gpu", "parallel", "shape", "recipe")
    rows = report.Rows(options.json if ranks.rank == 0 else None, keys, "bench/rank_trace.py", argv)
    common = rows.origin | multi_gpu.describe_network() | {
        "gpus": ranks.count, "recipe": options.recipe, "fa4": flash_version == 4}
    for shape, layout in itertools.product(options.shapes, options.layouts):
        config = dataclasses.replace(step.make_config(multi_gpu.SHAPES[shape], device),
                                     fp8_recipe=options.recipe, parallel=layout)
        row = measure_row(common | {"shape": shape, "parallel": layout}, config, options, device, group)
        if ranks.rank == 0:
            rows.add(row, f"{ranks.count} GPUs  {layout} {shape} {options.recipe}")
            if "error" not in row:
                print(text_of(row), flush=True)
    step.free()  # NCCL waits for CUDA graphs that hold its kernels


if __name__ == "__main__":
    parallel.end_process(run_command(main, "bench/rank_trace.py"))
