"""GPU memory: refuse a run that cannot fit, and say what would fit after one ran out.

`check_memory` runs before anything is allocated and knows sizes only. `explain` runs after an out-of-memory
error and measures: it runs one and two sequences through the model in the memory that is free again. Peak
memory is linear in the number of sequences (a fixed part for weights, gradients and optimizer state, and an
equal part per sequence), so two points determine the largest micro-batch.
"""
import contextlib
import dataclasses
import gc
import math
import os
import re
import traceback

import torch

from nanote import cli, gradients, models, parallel
from nanote.train_step import wants_graph

GIB = 2**30


# ---------------------------------------------------------------- before a run

def check_memory(config, model_config, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError for a run that needs more memory than the device has.

    Counts only what every run keeps at the same time, so a run that passes may still run out of memory. The
    size of a model of the user's own is not known before it is built.
    """
    if models.is_file(config.model):
        return
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
    given = " ".join(f"{cli.flag(option)} {getattr(config, option)}" for option in options)
    lower = "one of them" if len(options) > 1 else "it"
    raise ValueError(f"{given}: {what} take {size / GIB:,.4g} GiB of at least {total / GIB:,.4g} GiB that "
                     f"this run needs, but {name} has {capacity / GIB:,.4g} GiB; lower {lower}")


def least_memory(config, model_config, dtype: torch.dtype) -> list[tuple[int, str, str]]:
    """Return a lower bound of the peak of a run, as [(bytes, what takes them, the options that decide it)].

    All parts exist at the same time: during the update, at the end of a forward pass, or in an evaluation,
    whichever takes most. Without gradient accumulation, backward frees activations while it allocates
    gradients, so these two are never complete at the same time.
    """
    tokens, width = config.micro_batch_size * config.seq_len, dtype.itemsize
    count = models.weight_count(model_config)
    shards = parallel.shard_count(config)
    weights = count * (1 if config.fp8_param else width) // shards
    buffers = 0 if shards > 1 else count * gradients.bytes_per_parameter(config, dtype, parallel.world_size())
    grads = buffers or count * width  # whole until they are reduced, which is after the last micro-batch
    master = 0 if dtype == torch.float32 else 2
    state = count * (2 * getattr(torch, config.moment_dtype).itemsize + master)
    if config.optimizer == "muon":  # momentum and master weight, if it is less
        state = min(state, count * (4 if dtype == torch.float32 else 8))
    state //= shards
    # during a forward pass: in a run of one step, the update may allocate the optimizer state only afterwards
    state_before = state if config.max_steps > 1 else 0
    blocks = config.n_layer - config.offload_activations  # each keeps its input, also with checkpointing
    activations = tokens * width * (config.n_embd * blocks + config.vocab_size // config.loss_chunks)
    histories = 0
    if config.fp8_recipe == "delayed":
        gemms = 4 * (config.n_layer - config.fp8_skip_first - config.fp8_skip_last) + config.fp8_lm_head
        histories = gemms * 5 * 4 * config.fp8_amax_history_len  # 5 tensors per GEMM, in float32
    sizes = "n_embd n_layer n_head head_dim n_inner vocab_size n_positions"
    update = [(weights + grads // shards + state, "weights, gradients and optimizer state", sizes)]
    forward = [(weights + state_before, "weights and optimizer state", sizes),
               (activations, "activations and logits of a micro-batch", "micro_batch_size seq_len")]
    if buffers or config.grad_accum > 1:  # with the gradients of the previous micro-batch
        forward[0] = (weights + grads + state_before, "weights, gradients and optimizer state", sizes)
    most = max(update, forward, key=lambda parts: sum(size for size, *_ in parts))
    return most + [(histories, "amax histories", "fp8_amax_history_len"),
                   (16 * tokens * config.grad_accum, "token ids and labels of a step",
                    "grad_accum micro_batch_size seq_len")]


# ---------------------------------------------------------------- out of memory

OUT_OF_MEMORY = (r"CUDA.*out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|"
                 "DefaultCPUAllocator: can't allocate memory")


class OutOfMemory(RuntimeError):
    """Out of memory, in one line that says what would fit."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one in its chain of causes, is a lack of memory.

    A CUDA graph capture that ran out of memory ends with an error about the capture, and libraries other than
    PyTorch raise errors of other types.
    """
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
    """Return the bytes of weights, gradients and optimizer state, which no batch changes."""
    weights = sum(p.numel() * p.element_size() for p in parallel.local_parameters(model))
    state = 0
    for values in optimizer.state.values():
        tensors = (value for value in values.values() if isinstance(value, torch.Tensor))
        state += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return 2 * weights + state


def explain(
    error: RuntimeError, what: str, config, model, optimizer, train_step, batch, kept: str
) -> OutOfMemory:
    """Return the error to raise instead of an out-of-memory `error`; the run ends with it.

    If one process trains on a GPU, this frees memory and measures what would fit.

    Args:
        what: where it happened.
        train_step: None before there is one.
        batch: (input_ids, labels), (B, S) each; None if memory ran out before there was one.
        kept: which checkpoint was saved, in words.
    """
    fixed, points, capacity = step_bytes(model, optimizer), None, None
    device = next(model.parameters()).device
    count = sum(p.numel() for p in model.parameters())
    # the advice has several micro-batches, whose buffers the measured passes may not have
    dtype = next(model.parameters()).dtype
    buffers = gradients.bytes_per_parameter(dataclasses.replace(config, grad_accum=2), dtype)
    missing = count * max(0, buffers - dtype.itemsize)
    if train_step is not None and train_step.gradients is not None:
        missing = 0
    graphed = wants_graph(config, device)
    if device.type == "cuda":
        _free_failed_pass(error, optimizer, train_step)
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
            capacity = _capacity(device)
            if batch is not None and not torch.distributed.is_initialized():
                points = measure_peaks(model, batch, sequence_multiple(config), graphed)
                points = [(sequences, peak + missing) for sequences, peak in points]
    advice = what_would_fit(
        config, fixed=fixed + missing, parameters=count, capacity=capacity, points=points, graphed=graphed,
    )
    return OutOfMemory(f"{what}: out of memory; {advice}; {kept}")


def _free_failed_pass(error, optimizer, train_step) -> None:
    while error is not None:  # the frames of the failed pass hold its activations
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    if train_step is not None:
        train_step.graphs.clear()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()


def _capacity(device: torch.device) -> int:
    """Return the bytes that this process can allocate."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), limit)


def sequence_multiple(config) -> int:
    """Return the number of sequences that fill whole 32 tokens, as FP8 GEMMs need (strictest recipe)."""
    return 32 // math.gcd(32, config.seq_len) if config.fp8_recipe != "none" else 1


def measure_peaks(model, batch, multiple: int, graphed: bool) -> list[tuple[int, int]]:
    """Measure (sequences, peak bytes) of a pass over `multiple` sequences, and over twice as many.

    Returns fewer points if they do not fit. With `graphed` the pass will be a CUDA graph, which keeps its
    memory, so the memory of an evaluation is added.
    """
    points, device = [], batch[0].device
    # the first pass allocates the gradients, which exist from the start in a step of several micro-batches
    for sequences in (multiple, multiple, 2 * multiple):
        if sequences > len(batch[0]):
            break
        fewer = batch[0][:sequences], batch[1][:sequences]
        try:
            torch.cuda.reset_peak_memory_stats(device)
            model(*fewer).backward()
            peak = torch.cuda.max_memory_allocated(device)
            if graphed:
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                with torch.no_grad():
                    model(*fewer)
                peak += torch.cuda.max_memory_allocated(device) - before
            torch.cuda.synchronize(device)
            points.append((sequences, peak))
        except RuntimeError:
            break
    return points[1:]


def what_would_fit(config, *, fixed: int = 0, parameters: int = 0, capacity: int | None = None, points=None,
                   graphed: bool = False) -> str:
    """Return advice on what to change so that a step fits, the least harmful change first.

    Args:
        fixed: bytes of weights, gradients and optimizer state.
        parameters: number of parameters; 0 if unknown.
        capacity: bytes that this process can allocate; None if unknown.
        points: measured (sequences, peak bytes): two or one, empty if no pass fitted, None if not measured.
        graphed: whether steps are CUDA graphs.
    """
    measured, limit = _largest_micro_batch(config, fixed, capacity, points)
    sequences = config.micro_batch_size
    total = sequences * config.grad_accum
    multiple = sequence_multiple(config)
    smaller = [size for size in range(1, limit + 1) if total % size == 0 and size % multiple == 0]
    advice = []
    if smaller:
        advice.append(f"--micro-batch-size {smaller[-1]} --grad-accum {total // smaller[-1]} "
                      f"(the same {total} sequences a step)")
    if not config.gradient_checkpointing and not config.offload_activations and config.model == "optimized":
        advice.append("--gradient-checkpointing (one block's activations at a time, a third more compute)")
    if config.moment_dtype == "float32":
        saving = f"{4 * parameters / GIB:.1f} GiB" if parameters else "4 bytes per parameter"
        advice.append(f"--moment-dtype bfloat16 (saves {saving})")
    if config.model == "optimized" and not (config.fused_loss and config.fast_kernels):
        option = "--fast-kernels" if config.fused_loss else "--fused-loss"
        advice.append(f"{option} (no second tensor of the logits' size)")
    if graphed:
        advice.append("--cuda-graph off (evaluation then shares the steps' memory)")
    if not advice:
        advice.append(f"a smaller model or --seq-len {max(config.seq_len // 2, 1)}")
    return "; ".join([*measured, "try, in this order: " + ", ".join(advice)])


def _largest_micro_batch(config, fixed: int, capacity: int | None, points) -> tuple[list[str], int]:
    """Return (what was measured, in words; the largest number of sequences to suggest).

    Bytes are linear in the number of sequences: a line through both points, or through one point and `fixed`
    at zero sequences. 5% of the capacity is reserved for fragmentation.
    """
    measured, sequences = [], config.micro_batch_size
    limit = sequences - 1
    if capacity is not None:
        measured.append(f"weights, gradients and optimizer take {fixed / GIB:.1f} of "
                        f"{capacity / GIB:.1f} GiB")
    if capacity is not None and points:
        (first, low), (last, high) = (points[0], points[-1]) if len(points) > 1 else ((0, fixed), points[0])
        per_sequence = max((high - low) / (last - first), 1)
        fits = max(0, math.floor(first + (0.95 * capacity - low) / per_sequence))
        measured.append(f"each of {cli.counted(sequences, 'sequence')} of {config.seq_len} tokens "
                        f"{per_sequence / GIB:.2f} GiB, so that by linear extrapolation {fits} fit")
        return measured, min(limit, fits)
    if points is not None:
        measured.append(f"a pass over {sequence_multiple(config)} of {cli.counted(sequences, 'sequence')} of "
                        f"{config.seq_len} tokens does not fit")
        return measured, 0
    return measured, min(limit, sequences // 2)  # nothing is known: half


def outside_steps(config) -> OutOfMemory:
    """Return the error for memory that ran out in building the model or generating text."""
    moments = 2 * (4 if config.moment_dtype == "float32" else 2)
    per_parameter = 4 + moments + (2 if config.param_remainders else 4)
    return OutOfMemory(
        "out of memory outside the steps of training; the weights in BF16, their gradients and the optimizer "
        f"alone take {per_parameter} bytes a parameter; {what_would_fit(config)}"
    )
