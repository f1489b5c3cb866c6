"""Traces of training steps, a summary of their kernels, durations on the GPU, and process settings: garbage
collection, determinism, threads.

`train.py` calls `check_options` and `prepare_process` before it allocates anything, and a `Profiler` around
each step. Notes:

- An option that is off costs nothing: a step then tests one empty dictionary.
- Steps replayed as CUDA graphs are traced with their kernels: PyTorch's profiler and Nsight Systems use
  CUPTI, which sees inside graphs. There are no launches from Python in such a trace. A memory snapshot is
  different: a replayed graph allocates nothing, so a snapshot shows the allocations of a step only when the
  graph is captured (the first step of a run) or with --cuda-graph off.
- The device is synchronized before and after a range, so that the range holds its steps completely and no
  others. The speed logged after it is lower for that reason.
"""
import contextlib
import gc
import importlib.util
import os
import re
import time
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanote import cli

RANGES = ("profile", "nsys", "memory_snapshot")  # options of the form START:STOP
# PyTorch's own grain size. More threads gain little, and on a busy machine each operation waits for the last.
ELEMENTS_PER_THREAD = 2**15


# ---------------------------------------------------------------- options

def parse_range(option: str, text: str, max_steps: int) -> tuple[int, int]:
    """Parse START:STOP, or one number, as (first step, last step), both included."""
    flag = f"{cli.flag(option)} {text}"
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{flag}: must be START:STOP, the first and the last step of a range, counted from "
                         "1, such as 10:12")
    if last > max_steps:
        raise ValueError(f"{flag}: the run ends with step {max_steps} (--max-steps)")
    return first, last


def check_options(config) -> None:
    """Raise ValueError for invalid options, as far as this does not depend on the device."""
    for option in RANGES:
        if getattr(config, option) is not None:
            parse_range(option, getattr(config, option), config.max_steps)
    if config.profile and config.nsys:
        raise ValueError("--profile and --nsys: the GPU serves one profiler at a time; leave one of them out")


def prepare_process(config, device: torch.device) -> None:
    """Apply --torch-deterministic and --expandable-segments, and choose the number of threads on a CPU; call
    this before anything is allocated.

    Raises ValueError if they are not possible here.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        activation = config.micro_batch_size * config.seq_len * config.n_embd
        torch.set_num_threads(max(1, min(torch.get_num_threads(), activation // ELEMENTS_PER_THREAD)))
    if config.expandable_segments:
        if device.type != "cuda":
            raise ValueError(
                "--expandable-segments: applies to GPU memory, and this run is on the CPU; leave it out"
            )
        # Setting PYTORCH_ALLOC_CONF now may be too late, since PyTorch reads it on import. This call works
        # until the first allocation and replaces all settings of the variable. PyTorch reads the older
        # variable first.
        before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the call's new name is not in every version
            torch.cuda.memory._set_allocator_settings(
                ",".join(filter(None, [before, "expandable_segments:True"]))
            )
    if config.torch_deterministic:
        reason = nondeterministic_reason(config, device)
        if reason:
            raise ValueError(f"--torch-deterministic: {reason}")
        # the two values that NVIDIA documents as deterministic; cuBLAS reads the variable at its first GEMM
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # Transformer Engine's attention reads it when a model is built
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        os.environ.setdefault("NCCL_ALGO", "^NVLS")  # reductions in the NVLink switch have no fixed order
        torch.use_deterministic_algorithms(True)  # fast_kernels.attention reads this setting as well


def nondeterministic_reason(config, device: torch.device) -> str:
    """Return why a run cannot be repeated bit for bit, "" if it can. PyTorch reports its own operations."""
    uses_flash_attention = (
        config.model == "optimized" and config.attention in ("auto", "flash") and config.attn_dropout == 0
    )
    if (device.type == "cuda" and uses_flash_attention and torch.cuda.get_device_capability(device)[0] == 12
            and _installed("flash_attn.cute")):
        return ("FlashAttention 4 has no deterministic backward pass on this GPU (compute capability 12); "
                "pass --attention sdpa or te with it")
    return ""


def _installed(module: str) -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(module) is not None
    return False


# ---------------------------------------------------------------- ranges of steps

class Profiler:
    """--profile, --nsys, --memory-snapshot and --gc-interval.

    Call `begin(step)` before each step, `end(step)` after it, and `close(step)` at the end. Set `run` (the
    run's folder) and `say` (prints a line) before the first step. Rank 0 writes traces (`enabled`); garbage
    is collected in the same steps on all ranks.

    Raises ValueError for a GPU option on a CPU, and for a range before `first_step`, the first step of this
    process.
    """

    def __init__(self, config, device: torch.device, enabled: bool = True, first_step: int = 1):
        self.config, self.device, self.run, self.say = config, device, None, print
        self.ranges, self.started, self.labels = {}, {}, contextlib.ExitStack()
        self.gc_interval, self.gc_was_on = config.gc_interval, False
        for option in RANGES:
            text = getattr(config, option)
            if text is None:
                continue
            flag = f"{cli.flag(option)} {text}"
            first, last = parse_range(option, text, config.max_steps)
            if option != "profile" and device.type != "cuda":
                other = " or pass --profile" if option == "nsys" else ""
                raise ValueError(f"{flag}: needs a GPU, and this run is on the CPU; leave it out{other}")
            if last < first_step:
                raise ValueError(f"{flag}: this run goes on with step {first_step}")
            if enabled:
                self.ranges[option] = max(first, first_step), last
        if self.ranges.get("memory_snapshot", (0, 0))[0] == first_step:
            # start now, so that weights and optimizer, built before the first step, are included
            self._start("memory_snapshot", first_step)

    def begin(self, step: int) -> None:
        if self.gc_interval and gc.isenabled():
            gc.collect()
            gc.disable()
            self.gc_was_on = True
        for option, (first, _) in self.ranges.items():
            if option not in self.started and step == first:
                self._start(option, step)
        if "profile" in self.started:
            self.labels.enter_context(record_function(f"step {step}"))
        if "nsys" in self.started:
            self.labels.enter_context(torch.cuda.nvtx.range(f"step {step}"))

    def end(self, step: int) -> None:
        self.labels.close()
        for option in [option for option in self.started if self.ranges[option][1] == step]:
            self._stop(option, step)
        if self.gc_interval and step % self.gc_interval == 0:
            gc.collect()

    def close(self, step: int) -> None:
        """Write the traces in progress and report ranges that never began. `step`: the last one, even if it
        failed."""
        self.labels.close()
        if self.gc_was_on:
            gc.enable()
            self.gc_was_on = False
        for option in list(self.ranges):
            try:
                if option in self.started:
                    self._stop(option, step)
                else:
                    del self.ranges[option]
                    flag = f"{cli.flag(option)} {getattr(self.config, option)}"
                    self.say(f"{flag}: the run ended before, after step {step}")
            except (RuntimeError, OSError) as error:  # must not hide why the run failed
                self.say(f"{cli.flag(option)}: {str(error).splitlines()[0]}")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _start(self, option: str, step: int) -> None:
        self.started[option] = step
        self._synchronize()
        if option == "memory_snapshot":
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        elif option == "nsys":
            torch.cuda.profiler.start()
        else:
            gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self.profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self.profiler.start()

    def _stop(self, option: str, step: int) -> None:
        first = self.started.pop(option)
        del self.ranges[option]
        steps = f"steps {first} to {step}" if step > first else f"step {step}"
        if option == "memory_snapshot":
            path = Path(self.run, "memory.pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            self.say(f"memory of {steps}: {path}; open it on pytorch.org/memory_viz (the file stays in the "
                     "browser)")
            return
        self._synchronize()
        if option == "nsys":
            torch.cuda.profiler.stop()
            self.say(f"{steps} marked for Nsight Systems; for a report, start this run with: "
                     "nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop "
                     "--cuda-graph-trace=node python train.py …")
            return
        self._write_profile(steps, step - first + 1)

    def _write_profile(self, steps: str, count: int) -> None:
        self.profiler.stop()
        folder = Path(self.run, "profile")
        folder.mkdir(exist_ok=True)
        self.profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        on_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if on_gpu else "a CPU"
        summary = table(kernels_of(self.profiler, self.device), count, on_gpu)
        text = f"{steps} on {name}, means of a step\n{summary}"
        (folder / "table.txt").write_text(text + "\n")
        self.say(f"{text}\ntrace of {steps}: {folder / 'trace.json.gz'}; "
                 "open it in ui.perfetto.dev or chrome://tracing")
        self.profiler = None


# ---------------------------------------------------------------- kernels

KERNELS = {  # class: regular expression for kernel names; the first match counts
    "between GPUs": "nccl|symmetric_memory",
    "optimizer": "multi_tensor|adam|lpnorm|l2norm|^_squares",
    "attention": "flash|fmha|attention|sdpa|rope|rotary",
    "loss": "^_(forward|backward)(_fp8)?_kernel|cross_entropy|softmax|nll|element_mul",
    "GEMM FP8": r"nvjet_(sm\d+_)?[qr]|gemm.*(e4m3|e5m2|f8)|(e4m3|e5m2).*gemm",
    "GEMM BF16": "nvjet|gemm|cutlass|splitk|xmma|triton_tem|aten::(add)?b?mm",
    "activation": "gelu|silu|swiglu|gated|tanh|sigmoid|^_activation",
    "norm": "norm|rsqrt|ln_(fwd|bwd)",
    "cast/transpose": "transpose|quantiz|(?<!no_)cast|amax|delayed_scaling|fp8|^_reduce_rows",
    "copy/concat": r"direct_copy|memcpy|memset|catarray|fused_cat|chunk_cat|split_with_sizes|fillfunctor|"
                   "aten::(copy_|cat|fill_|zero_)",
    "embedding": "embedding|index|compute_grad_weight|sum_and_scatter|radix_?sort|^_embed|^_sum_over_batch",
    "elementwise/residual": "elementwise|triton_poi|triton_red|triton_per|reduce_kernel|aten::(add|mul|sum)",
}


def kernel_class(name: str) -> str:
    """Return the class of a kernel (on a CPU: of an operator) by its name, or "other"."""
    for kind, pattern in KERNELS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"


def kernels_of(profiler, device: torch.device) -> list[tuple[str, float, float]]:
    """Return (name, start, duration) in microseconds of each GPU kernel, copy and fill.

    On a CPU: of each operator, without the operators that it calls.
    """
    on_gpu, kernels = device.type == "cuda", []
    for event in profiler.events():
        event_on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if event_on_gpu == on_gpu and not event.is_user_annotation:
            duration = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            kernels.append((event.name, event.time_range.start, duration))
    return kernels


def summarize(kernels, steps: int) -> tuple[dict, dict]:
    """Sum kernels by class, {class: (ms, calls)}, and by name, {(class, name): (ms, calls)}, per step."""
    classes, names = {}, {}
    for name, _, duration in kernels:
        kind = kernel_class(name)
        for sums, key in ((classes, kind), (names, (kind, name))):
            ms, calls = sums.get(key, (0.0, 0))
            sums[key] = ms + duration / 1e3 / steps, calls + 1 / steps
    return classes, names


def table(kernels, steps: int, on_gpu: bool) -> str:
    """Format the time of kernels per step: by class, and the ten longest. kernels: as `kernels_of` returns
    them."""
    classes, names = summarize(kernels, steps)
    total = sum(ms for ms, _ in classes.values())
    what = "kernel" if on_gpu else "operator"

    def label(kind):  # the name of a CPU operator does not tell its precision
        return kind if on_gpu else kind.removesuffix(" BF16")

    lines = [f"{'class of ' + what:<22}{'ms':>10}{'share':>9}{'calls':>9}"]
    for kind, (ms, calls) in sorted(classes.items(), key=lambda item: -item[1][0]):
        lines.append(f"{label(kind):<22}{ms:>10.3f}{ms / (total or 1):>9.1%}{calls:>9.0f}")
    lines.append(f"{'all':<22}{total:>10.3f}{'':>9}{sum(calls for _, calls in classes.values()):>9.0f}")
    if on_gpu and kernels:
        span, busy = span_and_busy(kernels)
        lines.append(f"the GPU was busy {busy / span:.1%} of {span / 1e3 / steps:.3f} ms, from the first "
                     "kernel's start to the last one's end")
    lines.append(f"the longest {what}s:")
    for (kind, name), (ms, calls) in sorted(names.items(), key=lambda item: -item[1][0])[:10]:
        lines.append(f"{ms:>10.3f} ms {calls:>6.0f} x  {label(kind)}: {name[:100]}")
    return "\n".join(lines)


def span_and_busy(kernels) -> tuple[float, float]:
    """Return the microseconds from the first kernel's start to the last one's end, and those not idle."""
    first = end = min(start for _, start, _ in kernels)
    busy = 0.0
    for start, stop in sorted((start, start + duration) for _, start, duration in kernels):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return max(end - first, 1e-9), busy


# ---------------------------------------------------------------- durations

# between CUDA events, so they are the GPU's and not Python's; without a GPU, the clock of the host stands in

def stamp(device):
    """Return a point in time: on a GPU, an event in the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def spans_ms(stamps) -> list[float]:
    """Return ms between each stamp and the next."""
    if isinstance(stamps[0], float):
        return [1e3 * (b - a) for a, b in zip(stamps, stamps[1:])]
    stamps[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(stamps, stamps[1:])]


def timed(functions, device) -> list[float]:
    """Return ms of each of `functions`, called one after the other without waiting for the GPU."""
    stamps = [stamp(device)]
    for function in functions:
        function()
        stamps.append(stamp(device))
    return spans_ms(stamps)
