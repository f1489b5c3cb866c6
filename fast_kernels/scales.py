"""Update of all FP8 scales of a model under delayed scaling, in one launch.

Use `update` at the end of a pass: of the forward pass for the scales of inputs and weights, of the backward
pass for those of gradients. Between two updates the kernels of casts.py raise row 0 of the histories.

The formula, and with it every bit, is that of Transformer Engine 2.20 (recipe/delayed_scaling.cu).
"""

import torch
import triton
import triton.language as tl

from fast_kernels.launch import Launch, per_shape
from fast_kernels.library import addresses_of, ceil_div, device_tables, is_fake, operation

# A program's tile of a history, 32 values per thread: a history of 1,024 rows takes two.
TILE = dict(ROWS=512, COLUMNS=8, num_warps=4)


def update_reference(states, fp8_max, margin=0, algorithm="max"):
    """`update` in plain PyTorch."""
    for scale, history in states:
        is_used = history[0] != 0
        amax = history[0]
        if algorithm == "max":
            amax = history.nan_to_num(nan=0.0, posinf=float("inf")).amax(0)
        # a tensor as the numerator: PyTorch computes number / tensor with the reciprocal, which rounds twice
        quotient = torch.full_like(amax, fp8_max * 2.0**-margin) / amax
        quotient = quotient.clamp(max=torch.finfo(torch.float32).max)
        is_valid = is_used & (amax > 0) & amax.isfinite()
        scale.copy_(torch.where(is_valid, quotient, scale))
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        history.copy_(torch.where(is_used, rolled, history))


def update(states, fp8_max, margin=0, algorithm="max"):
    """Compute new scales from the amax histories, and roll these by one row, all in place.

    scale = fp8_max / amax / 2^margin. An amax of 0, infinity or NaN keeps the old scale; a quotient that
    overflows gives the largest float32. Row i of a history takes row i + 1, the last row takes row 0, and row
    0 is zeroed. A slot whose row 0 is zero was not used since the last update, and stays as it is.

    Args:
        states: (scale, history) pairs: (n,) float32, and (length, n) float32, contiguous. Row 0 is
            the step in progress.
        fp8_max: the format's largest number, 448 for E4M3 and 57,344 for E5M2.
        algorithm: "max": amax is the largest of the history, where NaN does not count; "most_recent": row 0.
    """
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f"fast_kernels.scales.update: algorithm={algorithm!r}: must be max or most_recent")
    if states:
        scales, histories = zip(*states)
        _update_scales(list(scales), list(histories), float(fp8_max), margin, algorithm)


@operation("(Tensor(a!)[] scales, Tensor(b!)[] histories, float fp8_max, int margin, str algorithm) -> ()")
def _update_scales(scales, histories, fp8_max, margin, algorithm):
    if is_fake(scales[0]):
        return
    layouts = [(scale.shape, scale.dtype, history.shape, history.dtype, history.is_contiguous())
               for scale, history in zip(scales, histories)]
    key = addresses_of(scales + histories), *layouts

    def make():
        rows = []  # as `_update_kernel` reads them
        for scale, history in zip(scales, histories):
            _check(scale, history, scales[0].device)
            length, slots = history.shape
            for first_slot in range(0, slots, TILE["COLUMNS"]):
                rows.append((scale.data_ptr(), history.data_ptr(), length, slots, first_slot))
        return [torch.tensor(rows)]

    table, = device_tables(scales[0].device, key, make)
    _update_launch(len(table), fp8_max, margin, algorithm).run(table)


@per_shape
def _update_launch(programs, fp8_max, margin, algorithm):
    numerator = fp8_max * 2.0**-margin
    return Launch(_update_kernel, (programs,), numerator=numerator, IS_MAX=algorithm == "max", **TILE)


def _check(scale, history, device):
    fits = history.dim() == 2 and scale.shape == history.shape[1:] and len(history) > 0
    for x in (scale, history):
        fits = fits and x.dtype == torch.float32 and x.is_contiguous() and x.device == device
    if not fits:
        raise ValueError(f"fast_kernels.scales.update: {tuple(scale.shape)} and {tuple(history.shape)}: must "
                         f"be (n,) and (length, n) float32, contiguous, and must be on {device}")


@operation("(Tensor(a!) scale, Tensor(b!) history, float fp8_max, int margin, str algorithm) -> ()")
def update_one(scale, history, fp8_max, margin, algorithm):
    """Update one state, whose addresses are arguments of the kernel: under CUDA graphs of torch.compile an
    operation must not keep a tensor, as `update` keeps its table."""
    if is_fake(scale):
        return
    _check(scale, history, scale.device)
    _update_one_launch(*history.shape, fp8_max, margin, algorithm).run(scale, history)


@per_shape
def _update_one_launch(length, slots, fp8_max, margin, algorithm):
    programs = ceil_div(slots, TILE["COLUMNS"])
    return Launch(
        _update_slots, (programs,), length=length, slots=slots, first_slot=None,
        numerator=fp8_max * 2.0**-margin, IS_MAX=algorithm == "max", **TILE)


@triton.jit
def _update_kernel(table_ptr, numerator, IS_MAX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """table (programs, 5) int64: addresses of scale and history, rows and columns of it, first slot."""
    row_ptr = table_ptr + 5 * tl.program_id(0)
    scale_ptr = tl.load(row_ptr).to(tl.pointer_type(tl.float32))
    history_ptr = tl.load(row_ptr + 1).to(tl.pointer_type(tl.float32))
    length, slots, first_slot = tl.load(row_ptr + 2), tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    _update_slots(scale_ptr, history_ptr, length, slots, first_slot, numerator, IS_MAX, ROWS, COLUMNS)


@triton.jit
def _update_slots(scale_ptr, history_ptr, length, slots, first_slot, numerator, IS_MAX: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Update COLUMNS slots of one state. first_slot None: COLUMNS per program, in order."""
    if first_slot is None:
        first_slot = COLUMNS * tl.program_id(0)
    i, j = tl.arange(0, ROWS), first_slot + tl.arange(0, COLUMNS)
    scale = tl.load(scale_ptr + j, mask=j < slots, other=1.0)
    newest = tl.load(history_ptr + j, mask=j < slots, other=0.0)
    is_used = newest != 0.0  # also NaN
    largest = tl.zeros((COLUMNS,), tl.float32)
    for first_row in range(0, length, ROWS):
        row = first_row + i
        pointers = history_ptr + row[:, None] * slots + j[None, :]
        values = tl.load(pointers, mask=(row < length)[:, None] & is_used[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(values, 0))  # ignores NaN
        tl.debug_barrier()  # all rows are loaded before one is overwritten
        is_moved = (row > 1) & (row < length)
        tl.store(pointers - slots, values, mask=is_moved[:, None] & is_used[None, :])
    amax = largest if IS_MAX else newest
    quotient = tl.div_rn(numerator, amax)
    quotient = tl.where(quotient == float("inf"), 3.4028234663852886e38, quotient)
    is_valid = is_used & (amax > 0.0) & (amax < float("inf"))
    tl.store(scale_ptr + j, tl.where(is_valid, quotient, scale), mask=is_used)
    tl.store(history_ptr + (length - 1) * slots + j, newest, mask=is_used)
    tl.debug_barrier()  # a history of one row: the newest was stored where the zero goes
    tl.store(history_ptr + j, 0.0, mask=is_used)
