"""What does it cost that a skipped step leaves the FP8 state as it was (nanote/fp8_state.py)? On a GPU.

    python bench/skipped_step.py --json results/skipped_step.json

- share      GPU time of save and restore over that of the whole step, both summed from traces of the step's
             CUDA graphs. Save and restore are the kernels that a step without them launches less often: their
             time is the difference of the two traces, over the kernels whose number differs.
- alone_us   the same kernels in a graph of their own: a second opinion
- host_ms    median time that Python needs for both, when it launches every kernel

Bounds: a share of 0.001, and 0.5 ms.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal
from unittest import mock

import torch

from bench import step as steps
from bench.report import Rows
from nanote import recipes
from nanote.command import parse, run_command
from nanote.fp8_state import FP8State
from nanote.graphs import CudaGraph
from nanote.models import pick_device

REPEATS = 200  # of what is timed on the host


@dataclass
class Options:
    models: tuple[str, ...] = ("fast", "optimized")  # Values of train.py's --model.
    shape: Literal[tuple(steps.SHAPES)] = "124m-b32"  # A shape of benchmark_te.py.
    steps: int = 10  # Steps to trace.
    json: Path | None = None  # Write the rows here.


def traced(function, count: int) -> tuple[Counter, Counter]:
    """Return ({kernel: launches}, {kernel: µs}) of a call, the means of `count` calls."""
    for _ in range(4):  # two, and a capture
        function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            function()
        torch.cuda.synchronize()
    launches = Counter()
    time_us = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name != "ProfilerStep*":
            launches[event.name] += 1 / count
            time_us[event.name] += event.self_device_time_total / count
    return launches, time_us


def difference(with_state, without) -> tuple[float, float]:
    """Return (launches, µs) by which a trace exceeds another, over the kernels whose number differs."""
    launches, time_us = with_state
    other_launches, other_us = without
    own_launches = 0.0
    own_us = 0.0
    for name in launches | other_launches:
        more = launches[name] - other_launches[name]
        if round(more, 3) != 0:
            own_launches += more
            own_us += time_us[name] - other_us[name]
    return own_launches, own_us


def host_ms(fp8_state, skipped) -> float:
    """Return the median ms that the host needs for save and restore."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        fp8_state.save()
        fp8_state.restore(when=skipped)
        times.append(1e3 * (time.perf_counter() - start))
        if skipped.is_cuda:
            torch.cuda.synchronize()  # else the host would wait for a full queue
    return statistics.median(times)


def make(config, device, batches):
    """Return a training step, after it has run once."""
    steps.free()
    step = steps.Training(config, device, batches)
    step(batches, 1e-5)
    return step


def measure_host(config, device) -> dict:
    """Return what needs no trace. Call it before any: a profiler slows later launches of its process."""
    step = make(config, device, steps.make_batches(config, device))
    skipped = torch.tensor(False, device=device)
    return {"host_ms": host_ms(step.fp8_state, skipped), "kernels": step.kernels,
            "state_bytes": sum(tensor.nbytes for tensor in step.fp8_state.tensors)}


def measure_gpu(config, device, count: int) -> dict:
    """Return GPU times of save, restore and the whole step, in microseconds."""
    batches = steps.make_batches(config, device)
    skipped = torch.tensor(False, device=device)
    step = make(config, device, batches)
    with_state = traced(lambda: step(batches, 1e-5), count)

    def save_and_restore():
        step.fp8_state.save()
        step.fp8_state.restore(when=skipped)

    alone_launches, alone_us = traced(CudaGraph(save_and_restore), count)
    step = None
    with mock.patch.object(FP8State, "save"), mock.patch.object(FP8State, "restore"):
        step = make(config, device, batches)
        without = traced(lambda: step(batches, 1e-5), count)
    launches, own_us = difference(with_state, without)
    _, time_us = with_state
    step_us = sum(time_us.values())
    return {
        "launches": launches, "own_us": own_us, "step_us": step_us, "share": own_us / step_us,
        "alone_launches": sum(alone_launches.values()), "alone_us": sum(alone_us.values())}


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/skipped_step.py", __doc__)
    device = pick_device("auto")
    rows = Rows(options.json, ["model", "shape"], "bench/skipped_step.py", argv)
    configs = {}
    for model in options.models:
        shape = steps.SHAPES[options.shape]
        configs[model] = steps.make_config(shape | {"model": model}, device)
    on_host = {model: measure_host(config, device) for model, config in configs.items()}
    for model, config in configs.items():
        figures = on_host[model]
        if device.type == "cuda":
            figures |= measure_gpu(config, device, options.steps)
        engine = "fast" if model == "fast" else recipes.ENGINE
        row = {"model": model, "shape": options.shape, "triton": triton_version(), "engine": engine}
        numbers = [f"{name} {value:.4g}" for name, value in figures.items() if not isinstance(value, str)]
        rows.add(figures | row, f"{model} {options.shape}: {', '.join(numbers)}")


def triton_version() -> str | None:
    try:
        import triton
        return triton.__version__
    except ImportError:
        return None


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/skipped_step.py"))
