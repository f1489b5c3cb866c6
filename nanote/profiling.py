"""Looking into a run, and what a process sets before one: traces, memory, garbage collection, determinism,
and what to do when memory is short.

Notable, and why:
- Every option costs nothing when it is off: a step then asks one empty dictionary.
- A step is traced with its kernels also where it is a replayed CUDA graph: PyTorch's profiler and Nsight
  Systems ask CUPTI, which sees inside graphs. The launches from Python are missing there, since there are
  none. Memory is another matter: a replayed graph allocates nothing, so a memory snapshot shows allocations
  of a step only where the graph is recorded (the first step of a run) or with --cuda-graph off.
- A range is read between two synchronisations, so that it holds its own steps whole and no other; the speed
  logged after it is lower for that.
- Out of memory: what would fit is measured, not guessed. One and two sequences go through the model in the
  memory that is free again, and memory is a straight line in the number of sequences: weights, gradients and
  optimizer, and so much for each.
"""
import contextlib
import gc
import importlib.util
import math
import os
import re
import traceback
import warnings
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanote import checkpoint, cli
from nanote.train_step import wants_graph

RANGES = ("profile", "nsys", "memory_snapshot")  # options of the form START:STOP
GIB = 2**30


# ---------------------------------------------------------------- options

def parse_range(option: str, text: str, max_steps: int) -> tuple[int, int]:
    """(first step, last step) of START:STOP, both included, or of one number. ValueError names the option."""
    flag = f"--{option.replace('_', '-')} {text}"
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"{flag}: must be START:STOP, the first and the last step of a range, counted from 1, such as 10:12"
        )
    if last > max_steps:
        raise ValueError(f"{flag}: the run ends with step {max_steps} (--max-steps)")
    return first, last


def check_options(config) -> None:
    """ValueError for what can be told without knowing the device."""
    for option in RANGES:
        if getattr(config, option) is not None:
            parse_range(option, getattr(config, option), config.max_steps)
    if config.profile and config.nsys:
        raise ValueError("--profile and --nsys: the GPU serves one profiler at a time; leave one of them out")


def prepare_process(config, device: torch.device) -> None:
    """--torch-deterministic and --expandable-segments: call it before anything is allocated. ValueError where
    they cannot be had."""
    if config.expandable_segments:
        if device.type != "cuda":
            raise ValueError(
                "--expandable-segments: is about a GPU's memory, and this run is on the CPU; leave it out"
            )
        # Given now, PYTORCH_ALLOC_CONF might come too late: importing PyTorch may have read it. The call
        # works until the first allocation, and takes the place of all that the variable said. (PyTorch reads
        # the older variable first.)
        before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its new name is not in every version
            torch.cuda.memory._set_allocator_settings(
                ",".join(filter(None, [before, "expandable_segments:True"]))
            )
    if config.torch_deterministic:
        reason = why_not_deterministic(config, device)
        if reason:
            raise ValueError(f"--torch-deterministic: {reason}")
        # the two that NVIDIA names as deterministic
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when its first product runs
        # Transformer Engine's attention reads it when a model is built
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        os.environ.setdefault("NCCL_ALGO", "^NVLS")  # sums made in the switch come in any order
        torch.use_deterministic_algorithms(True)  # fast_attention asks for it, too


def why_not_deterministic(config, device: torch.device) -> str:
    """The reason why a run cannot be repeated bit for bit; "" where it can. PyTorch itself names any
    operation of its own that cannot."""
    if (
        device.type == "cuda"
        and config.model == "optimized"
        and config.attention in ("auto", "flash")
        and config.attn_dropout == 0
        and torch.cuda.get_device_capability(device)[0] == 12
        and _installed("flash_attn.cute")
    ):
        return "FlashAttention 4 has no deterministic backward pass on this GPU (compute capability 12); pass --attention sdpa or te with it"
    return ""


def _installed(module: str) -> bool:
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec(module) is not None
    return False


# ---------------------------------------------------------------- ranges of steps

class Profiler:
    """--profile, --nsys, --memory-snapshot and --gc-interval: `begin(step)` before each step, `end(step)`
    after it, `close()` at last.

    The traces are rank 0's (`enabled`); all ranks collect garbage in the same steps. Set `run`, the folder,
    and `say` before the first step. ValueError: a GPU's option on a CPU, or a range before `first_step`, the
    first of this process.
    """

    def __init__(self, config, device: torch.device, enabled: bool = True, first_step: int = 1):
        self.config, self.device, self.run, self.say = config, device, None, print
        self.ranges, self.started, self.labels = {}, {}, contextlib.ExitStack()
        self.gc_interval, self.gc_was_on = config.gc_interval, False
        for option in RANGES:
            text = getattr(config, option)
            if text is None:
                continue
            flag, (first, last) = (
                f"--{option.replace('_', '-')} {text}",
                parse_range(option, text, config.max_steps),
            )
            if option != "profile" and device.type != "cuda":
                raise ValueError(f"{flag}: is about a GPU, and this run is on the CPU; leave it out"
                                 + (" or pass --profile" if option == "nsys" else ""))
            if last < first_step:
                raise ValueError(f"{flag}: this run goes on with step {first_step}")
            if enabled:
                self.ranges[option] = max(first, first_step), last
        if self.ranges.get("memory_snapshot", (0, 0))[0] == first_step:
            # weights and optimizer, built before the first step, are in it
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
        """After the last `step`, also one that failed: what is under way is written, what never began is
        said."""
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
                    self.say(
                        f"--{option.replace('_', '-')} {getattr(self.config, option)}: the run ended before, after step {step}"
                    )
            except (RuntimeError, OSError) as error:  # must not hide why the run failed
                self.say(f"--{option.replace('_', '-')}: {str(error).splitlines()[0]}")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _start(self, option: str, step: int) -> None:
        self.started[option] = step
        self._wait()
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
            self.say(
                f"memory of {steps}: {path}; look at it on pytorch.org/memory_viz (the file stays in the browser)"
            )
            return
        self._wait()
        if option == "nsys":
            torch.cuda.profiler.stop()
            self.say(
                f"{steps} marked for Nsight Systems; its report is there if this run was started by: "
                "nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop --cuda-graph-trace=node python train.py …"
            )
            return
        self.profiler.stop()
        folder = Path(self.run, "profile")
        folder.mkdir(exist_ok=True)
        self.profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "a CPU"
        text = f"{steps} on {name}, means of a step\n" + table(
            kernels_of(self.profiler, self.device), step - first + 1, self.device.type == "cuda"
        )
        (folder / "table.txt").write_text(text + "\n")
        self.say(
            f"{text}\ntrace of {steps}: {folder / 'trace.json.gz'}; open it in ui.perfetto.dev or chrome://tracing"
        )
        self.profiler = None


def kernels_of(profiler, device: torch.device) -> list[tuple[str, float, float]]:
    """(name, start, duration) in microseconds of each kernel, copy and fill on the GPU; on a CPU of each
    operator, without those it calls."""
    on_gpu = device.type == "cuda"
    return [
        (
            event.name, event.time_range.start,
            event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total,
        )
        for event in profiler.events()
        if (event.device_type == torch.autograd.DeviceType.CUDA) == on_gpu and not event.is_user_annotation
    ]


def table(kernels, steps: int, on_gpu: bool) -> str:
    """Kernels summed by class (bench/timing.py), and the ten that take longest. kernels: as `kernels_of`
    returns; times are a step's."""
    from bench.timing import kernel_class

    classes, names = {}, {}
    for name, _, duration in kernels:
        kind = kernel_class(name)
        # an operator's name does not tell the precision
        kind = kind if on_gpu else kind.removesuffix(" BF16")
        for sums, key in ((classes, kind), (names, (kind, name))):
            ms, calls = sums.get(key, (0.0, 0))
            sums[key] = ms + duration / 1e3 / steps, calls + 1 / steps
    total = sum(ms for ms, _ in classes.values())
    what = "kernel" if on_gpu else "operator"
    lines = [f"{'class of ' + what:<22}{'ms':>10}{'share':>9}{'calls':>9}"]
    for kind, (ms, calls) in sorted(classes.items(), key=lambda item: -item[1][0]):
        lines.append(f"{kind:<22}{ms:>10.3f}{ms / (total or 1):>9.1%}{calls:>9.0f}")
    lines.append(f"{'all':<22}{total:>10.3f}{'':>9}{sum(calls for _, calls in classes.values()):>9.0f}")
    if on_gpu and kernels:
        span, busy = span_and_busy(kernels)
        lines.append(
            f"the GPU was busy {busy / span:.1%} of {span / 1e3 / steps:.3f} ms, from the first kernel's start to the last one's end"
        )
    lines.append(f"the {what}s that take longest:")
    for (kind, name), (ms, calls) in sorted(names.items(), key=lambda item: -item[1][0])[:10]:
        lines.append(f"{ms:>10.3f} ms {calls:>6.0f} x  {kind}: {name[:100]}")
    return "\n".join(lines)


def span_and_busy(kernels) -> tuple[float, float]:
    """Microseconds from the first kernel's start to the last one's end, and those in which at least one ran.
    """
    first = end = min(start for _, start, _ in kernels)
    busy = 0.0
    for start, stop in sorted((start, start + duration) for _, start, duration in kernels):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return max(end - first, 1e-9), busy


# ---------------------------------------------------------------- before a run: what cannot fit

def check_memory(config, model_config, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a run that needs more memory than the device has, by what is known before anything is allocated.

    Only what every run keeps at one time is counted, so that a run which passes may still run out of memory.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capacity = torch.cuda.get_device_properties(device).total_memory
    else:
        name, capacity = "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = least_memory(config, model_config, dtype)
    total = sum(size for size, *_ in parts)
    if total <= capacity:
        return
    size, what, names = max(parts)
    options = [name for name in names.split() if getattr(config, name) is not None]
    given = " ".join(f"--{option.replace('_', '-')} {getattr(config, option)}" for option in options)
    lower = "one of them" if len(options) > 1 else "it"
    raise ValueError(f"{given}: {what} take {size / GIB:,.4g} GiB of at least {total / GIB:,.4g} GiB that "
                     f"this run needs, but {name} has {capacity / GIB:,.4g} GiB; lower {lower}")


def least_memory(config, model_config, dtype: torch.dtype) -> list[tuple[int, str, str]]:
    """Return [(bytes, what takes them, the options that decide it)]: a lower bound of a run's peak.

    The parts exist at one time: in the update, at the end of a forward pass, or in an evaluation, whichever
    takes most. Without gradient accumulation, backward frees activations while it makes gradients, so that
    these two never exist at one time in full.
    """
    tokens, width = config.micro_batch_size * config.seq_len, dtype.itemsize
    count = checkpoint.weight_count(model_config)
    weights = count * (1 if config.fp8_param else width)
    gradients = count * width
    master = 0 if dtype == torch.float32 else 2
    state = count * (2 * getattr(torch, config.moment_dtype).itemsize + master)
    state_before = state if config.max_steps > 1 else 0  # in a forward pass; the first update may make it
    blocks = config.n_layer - config.offload_activations  # each keeps its input, also with checkpointing
    activations = tokens * width * (config.n_embd * blocks + config.vocab_size // config.loss_chunks)
    histories = 0
    if config.fp8_recipe == "delayed":
        gemms = 4 * (config.n_layer - config.fp8_skip_first - config.fp8_skip_last) + config.fp8_lm_head
        histories = gemms * 5 * 4 * config.fp8_amax_history_len  # of 5 tensors, in float32
    sizes = "n_embd n_layer n_head head_dim n_inner vocab_size n_positions"
    update = (weights + gradients + state, "weights, gradients and optimizer state", sizes)
    forward = (weights + state_before, "weights and optimizer state", sizes)
    if config.grad_accum > 1:  # those of the micro-batch before
        forward = (weights + gradients + state_before, "weights, gradients and optimizer state", sizes)
    evaluation = (weights + state, "weights and optimizer state", sizes)
    moments = [
        [update],
        [forward, (activations, "activations and logits of a micro-batch", "micro_batch_size seq_len")],
        [evaluation, (64 * config.eval_steps, "losses of an evaluation", "eval_steps")]]
    most = max(moments, key=lambda parts: sum(size for size, *_ in parts))
    return most + [(histories, "amax histories", "fp8_amax_history_len"),
                   (16 * tokens * config.grad_accum, "token ids and labels of a step",
                    "grad_accum micro_batch_size seq_len")]


# ---------------------------------------------------------------- out of memory

OUT_OF_MEMORY = (r"CUDA.*out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|"
                 "DefaultCPUAllocator: can't allocate memory")


class OutOfMemory(RuntimeError):
    """One line: that memory ran out, and what would fit."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it, or what it came from, is a lack of GPU memory. A recording that ran out of memory ends with
    an error about the recording, and libraries beside PyTorch have errors of their own."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, OutOfMemory, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and re.search(OUT_OF_MEMORY, str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def step_bytes(model, optimizer) -> int:
    """Bytes of weights, their gradients and the optimizer's state: what a step needs however few sequences it
    has."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    state = sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    return 2 * weights + state


def explain(
    error: RuntimeError, what: str, config, model, optimizer, train_step, batch, kept: str
) -> OutOfMemory:
    """The error to raise for one that `is_out_of_memory`. Where one process trains on a GPU, memory is freed
    and what would fit is measured: this run is over then. what: where it happened; train_step: None before
    there is one; batch: (input_ids, labels), (B, S) each; kept: what is saved."""
    fixed, points, capacity, device = step_bytes(model, optimizer), None, None, batch[0].device
    graphed = wants_graph(config, device)
    if device.type == "cuda":
        while error is not None:  # the frames of the failed pass hold its activations
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        if train_step is not None:
            train_step.graphs.clear()
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
            capacity = min(
                torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device),
                int(torch.cuda.get_per_process_memory_fraction(device) * torch.cuda.mem_get_info(device)[1]),
            )
            if not torch.distributed.is_initialized():
                points = measure_peaks(model, batch, unit(config), graphed)
    advice = what_would_fit(
        config, fixed=fixed, parameters=sum(p.numel() for p in model.parameters()), capacity=capacity,
        points=points, graphed=graphed,
    )
    return OutOfMemory(f"{what}: out of memory; {advice}; {kept}")


def unit(config) -> int:
    """Sequences come in multiples of this: an FP8 product needs 32 tokens or a multiple of them, by the
    strictest recipe."""
    return 32 // math.gcd(32, config.seq_len) if config.fp8_recipe != "none" else 1


def measure_peaks(model, batch, unit: int, graphed: bool) -> list[tuple[int, int]]:
    """(sequences, bytes allocated at most) of a forward and backward pass, for `unit` sequences and twice as
    many; fewer where they do not fit. `graphed`: the pass is to be a CUDA graph, which keeps its memory, so
    that evaluation needs its own beside it."""
    points, device = [], batch[0].device
    # the first pass makes the gradients, which a step of several micro-batches has from the start
    for sequences in (unit, unit, 2 * unit):
        if sequences > len(batch[0]):
            break
        try:
            torch.cuda.reset_peak_memory_stats(device)
            model(batch[0][:sequences], batch[1][:sequences]).backward()
            peak = torch.cuda.max_memory_allocated(device)
            if graphed:
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                with torch.no_grad():
                    model(batch[0][:sequences], batch[1][:sequences])
                peak += torch.cuda.max_memory_allocated(device) - before
            torch.cuda.synchronize(device)
            points.append((sequences, peak))
        except RuntimeError:
            break
    return points[1:]


def what_would_fit(
    config,
    *,
    fixed: int = 0,
    parameters: int = 0,
    capacity: int | None = None,
    points=None,
    graphed: bool = False,
) -> str:
    """What to change for a step to fit, the least harmful first.

    fixed: bytes of weights, gradients and optimizer; capacity: bytes that this process can have, None:
    unknown; points: measured (sequences, bytes at the peak), two or one, none where no pass fitted; None: not
    measured. Bytes are a straight line in the number of sequences, through both points, or through one and
    `fixed` at no sequence. A twentieth of the capacity is left for what lies between tensors.
    """
    sequences, limit, told = config.micro_batch_size, config.micro_batch_size - 1, []
    if capacity is not None:
        told.append(f"weights, gradients and optimizer take {fixed / GIB:.1f} of {capacity / GIB:.1f} GiB")
    if capacity is not None and points:
        (first, low), (last, high) = (points[0], points[-1]) if len(points) > 1 else ((0, fixed), points[0])
        each = max((high - low) / (last - first), 1)
        fits = max(0, math.floor(first + (0.95 * capacity - low) / each))
        told.append(f"each of {cli.counted(sequences, 'sequence')} of {config.seq_len} tokens "
                    f"{each / GIB:.2f} GiB, so that by a straight line {fits} fit")
        limit = min(limit, fits)
    elif points is not None:
        told.append(f"a pass over {unit(config)} of {cli.counted(sequences, 'sequence')} of {config.seq_len} "
                    "tokens does not fit")
        limit = 0
    else:
        limit = min(limit, sequences // 2)  # nothing is known: half
    total = sequences * config.grad_accum
    smaller = [size for size in range(1, limit + 1) if total % size == 0 and size % unit(config) == 0]
    ways = []
    if smaller:
        ways.append(
            f"--micro-batch-size {smaller[-1]} --grad-accum {total // smaller[-1]} (the same {total} sequences a step)"
        )
    if not config.gradient_checkpointing and not config.offload_activations and config.model == "optimized":
        ways.append("--gradient-checkpointing (one block's activations at a time, about a third more work)")
    if config.moment_dtype == "float32":
        ways.append(
            "--moment-dtype bfloat16 (saves "
            + (f"{4 * parameters / GIB:.1f} GiB)" if parameters else "4 bytes a parameter)")
        )
    if not config.fused_loss and config.model == "optimized":
        ways.append("--fused-loss (no second tensor of the logits' size)")
    if graphed:
        ways.append("--cuda-graph off (evaluation then shares the steps' memory)")
    if not ways:
        ways.append(f"a smaller model or --seq-len {max(config.seq_len // 2, 1)}")
    return "; ".join([*told, "try, in this order: " + ", ".join(ways)])


def outside_steps(config) -> OutOfMemory:
    """The error for memory that ran out while the run was built or its last text generated: nothing could be
    measured."""
    state = 2 * (4 if config.moment_dtype == "float32" else 2)
    return OutOfMemory(
        "out of memory outside the steps of training; the weights in BF16, their gradients and the optimizer alone take "
        f"{4 + state + (2 if config.param_remainders else 4)} bytes a parameter; {what_would_fit(config)}"
    )
