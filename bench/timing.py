"""What benchmark_te.py measures with: the GPU's clock, what the machine can reach, the least time of a step,
kernels summed by class."""

import re
import statistics
import subprocess
import time

import torch
from torch.profiler import ProfilerActivity, profile

KERNELS = {  # class: pattern of kernel names; the first that matches counts
    "optimizer": "multi_tensor|adam|lpnorm|l2norm|^_squares",
    "attention": "flash|fmha|attention|sdpa|rope|rotary",
    "loss": "^_(forward|backward)(_fp8)?_kernel|cross_entropy|softmax|nll|element_mul",
    "GEMM FP8": r"nvjet_(sm\d+_)?[qr]|gemm.*(e4m3|e5m2|f8)|(e4m3|e5m2).*gemm",
    "GEMM BF16": "nvjet|gemm|cutlass|splitk|xmma|triton_tem|aten::(add)?b?mm",
    "activation": "gelu|silu|swiglu|gated|tanh|sigmoid|^_activation",
    "norm": "norm|rsqrt|ln_(fwd|bwd)",
    "cast/transpose": "transpose|quantiz|cast|amax|delayed_scaling|fp8|^_reduce_rows",
    "copy/concat": r"direct_copy|memcpy|memset|catarray|fused_cat|fillfunctor|aten::(copy_|cat|fill_|zero_)",
    "embedding": "embedding|index|compute_grad_weight|sum_and_scatter|radix_?sort|^_embed",
    "elementwise/residual": "elementwise|triton_poi|triton_red|triton_per|reduce_kernel|aten::(add|mul|sum)",
}


def stamp(device):
    """A point in time: on a GPU, of its own clock, when it comes to it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def spans_ms(stamps) -> list[float]:
    """Between each stamp and the next."""
    if isinstance(stamps[0], float):
        return [1e3 * (b - a) for a, b in zip(stamps, stamps[1:])]
    stamps[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(stamps, stamps[1:])]


def timed(functions, device) -> list[float]:
    """ms of each of `functions`, called one after the other without waiting in between."""
    stamps = [stamp(device)]
    for function in functions:
        function()
        stamps.append(stamp(device))
    return spans_ms(stamps)


def median_ms(functions, device) -> float:
    timed(functions[:3], device)
    return statistics.median(timed(functions, device))


def power_and_clock(function, device, seconds=2.0) -> dict:
    """While calls of `function` follow each other: medians of the GPU's power draw and its multiprocessors'
    clock, beside what they are limited to. {} where nvidia-smi does not tell."""
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
            watcher.terminate()  # else leaving the block would wait for it for ever
        lines = watcher.stdout.read().splitlines()
    samples = [line.split(",") for line in lines if re.fullmatch(r"[\d., ]+", line) and line.count(",") == 3]
    return (
        {name: statistics.median(float(sample[i]) for sample in samples) for i, name in enumerate(fields)}
        if samples
        else {}
    )


def measure_ceilings(device) -> dict:
    """What this machine reaches at best, now: TFLOP/s of an 8192³ product in BF16 and FP8, TB/s (read and
    written) of a copy of 1 GiB."""
    size, length = (8192, 2**30) if device.type == "cuda" else (256, 2**20)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median_ms([lambda: a @ b.t()] * 20, device) / 1e3
    found = {"bf16_tflops": 2 * size**3 / seconds / 1e12}
    found["fp8_tflops"] = found["bf16_tflops"]
    if device.type == "cuda":
        one, x, y = torch.ones((), device=device), a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        product = lambda: torch._scaled_mm(
            x, y.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )  # noqa: E731
        found["fp8_tflops"] = 2 * size**3 / (median_ms([product] * 20, device) / 1e3) / 1e12
    source = torch.zeros(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy_tbs"] = 2 * length / (median_ms([lambda: target.copy_(source)] * 20, device) / 1e3) / 1e12
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def floor_ms(config, B, T, fp8, ceilings, optimizer_bytes=28) -> float:
    """Least time of a step on B sequences of T tokens, were every part at its ceiling and nothing else there.
    The sum of:

    products 6·B·T·(L·P + V·C) FLOPs at the FP8 or BF16 rate; P = C·(Hq + 2·Hkv)·D + Hq·D·C + 2·C·I (SwiGLU:
    3·C·I), the block's weights attention 3.5 times the forward pass's 2·B·T²·Hq·D a layer (a causal half of
    two products) at the BF16 rate: 7·B·T²·Hq·D·L optimizer 28 bytes a parameter: the BF16 gradient read twice
    (norm, update); weight and 16-bit remainder, and two float32 moments, read
                 and written
    loss         4·B·T·V bytes: BF16 logits read, their gradient written

    config: an OptimizedConfig; ceilings: bf16_tflops, fp8_tflops, copy_tbs (read and written). Biases and
    norms are left out.
    """
    q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    block = config.n_embd * (2 * q + 2 * kv + config.n_inner * (3 if config.activation == "swiglu" else 2))
    head = config.vocab_size * config.n_embd
    parameters = config.n_layer * block + head * (1 if config.tie_embeddings else 2)
    seconds = (
        6
        * B
        * T
        * (config.n_layer * block + head)
        / (1e12 * ceilings["fp8_tflops" if fp8 else "bf16_tflops"])
    )
    seconds += 7 * B * T**2 * q * config.n_layer / (1e12 * ceilings["bf16_tflops"])
    seconds += (optimizer_bytes * parameters + 4 * B * T * config.vocab_size) / (1e12 * ceilings["copy_tbs"])
    return 1e3 * seconds


def kernel_class(name: str) -> str:
    return next(
        (kind for kind, pattern in KERNELS.items() if re.search(pattern, name, re.IGNORECASE)), "other"
    )


def profile_ms(step, device) -> dict:
    """ms a step by class of kernel (on a CPU: of operator), over three steps. Prints them, and the largest
    that belong to no class."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    found, unknown = {}, {}
    for event in profiler.events():
        if (event.device_type == torch.autograd.DeviceType.CUDA) != on_gpu or event.is_user_annotation:
            continue
        ms = (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 3e3
        kind = kernel_class(event.name)
        found[kind] = found.get(kind, 0) + ms
        if kind == "other":
            unknown[event.name] = unknown.get(event.name, 0) + ms
    found = dict(sorted(found.items(), key=lambda item: -item[1]))
    print(
        "    "
        + ", ".join(f"{kind} {ms:.2f}" for kind, ms in found.items())
        + f"; all kernels {sum(found.values()):.2f} ms a step"
    )
    for name, ms in sorted(unknown.items(), key=lambda item: -item[1])[:3]:
        print(f"    other: {ms:.2f} ms {name[:110]}")
    return {kind: round(ms, 4) for kind, ms in found.items()}
