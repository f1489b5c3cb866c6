"""Measure the machine's ceilings, and sum the time of kernels by class.

`floor_ms` of nanote/roofline.py computes the least time of a training step from the ceilings.
"""

import re
import statistics
import subprocess
import time

import torch
from torch.profiler import ProfilerActivity, profile

from nanote.profiling import kernels_of, summarize, timed


def median_ms(functions, device) -> float:
    """Return the median ms of `functions`, after three calls to warm up."""
    timed(functions[:3], device)
    return statistics.median(timed(functions, device))


def power_and_clock(function, device, seconds=2.0) -> dict:
    """Return medians of the GPU's power draw and SM clock, and their limits, while `function` is repeated.

    Returns {} if nvidia-smi does not report them.
    """
    if device.type != "cuda":
        return {}
    fields = {
        "watts": "power.draw.instant", "watts_limit": "power.limit", "sm_mhz": "clocks.sm",
        "sm_mhz_limit": "clocks.max.sm",
    }
    command = [
        "nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}",
        f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits", "--loop-ms=50",
    ]
    try:
        watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return {}
    with watcher:
        until = time.perf_counter() + seconds
        try:
            while time.perf_counter() < until:
                function()
                torch.cuda.synchronize(device)
        finally:
            watcher.terminate()  # or leaving the block would wait for it
        lines = watcher.stdout.read().splitlines()
    samples = [line.split(",") for line in lines if re.fullmatch(r"[\d., ]+", line) and line.count(",") == 3]
    if not samples:
        return {}
    return {name: statistics.median(float(sample[i]) for sample in samples) for i, name in enumerate(fields)}


def measure_ceilings(device) -> dict:
    """Measure what this machine reaches: TFLOP/s of an 8192³ GEMM in BF16 and FP8, TB/s of a copy of 1 GiB
    (bytes read and written)."""
    size, length = (8192, 2**30) if device.type == "cuda" else (256, 2**20)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median_ms([lambda: a @ b.t()] * 20, device) / 1e3
    found = {"bf16_tflops": 2 * size**3 / seconds / 1e12}
    found["fp8_tflops"] = found["bf16_tflops"]
    if device.type == "cuda":
        one, x, y = torch.ones((), device=device), a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        options = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        seconds = median_ms([lambda: torch._scaled_mm(x, y.t(), **options)] * 20, device) / 1e3
        found["fp8_tflops"] = 2 * size**3 / seconds / 1e12
    source = torch.zeros(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_ms([lambda: target.copy_(source)] * 20, device) / 1e3
    found["copy_tbs"] = 2 * length / seconds / 1e12
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def profile_ms(step, device) -> dict:
    """Return {class of kernels: ms a step}, over three steps; on a CPU, of operators.

    Prints them, and the largest kernels that belong to no class.
    """
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    classes, names = summarize(kernels_of(profiler, device), steps=3)
    found = {kind: ms for kind, (ms, _) in sorted(classes.items(), key=lambda item: -item[1][0])}
    unknown = {name: ms for (kind, name), (ms, _) in names.items() if kind == "other"}
    by_class = ", ".join(f"{kind} {ms:.2f}" for kind, ms in found.items())
    print(f"    {by_class}; all kernels {sum(found.values()):.2f} ms a step")
    for name, ms in sorted(unknown.items(), key=lambda item: -item[1])[:3]:
        print(f"    other: {ms:.2f} ms {name[:110]}")
    return {kind: round(ms, 4) for kind, ms in found.items()}
