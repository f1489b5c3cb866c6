"""What lies between the matrix products of a GPT in FP8, in few passes over memory, and leaving FP8 behind:
norm, activation, cast.

These operations move far more bytes than they compute, so all that counts is how often their tensors are read
and written. What is notable:

- Hopper's FP8 products sum along rows only, so what goes into one is needed by rows and, for the weight's
  gradient, transposed. Every function here leaves both, where Transformer Engine (TE) would read a tensor
  once more to cast it and again to transpose it.
- The residual stream is added up where it is normalised, and its gradient where it goes back through the
  norm, which is where it is cast for the product before, too.
- A bias is added, and its gradient summed up, by whoever reads the product's output next.
- Instructions and registers count here as much as bytes. A thread has the same columns of four neighbouring
  rows: by rows it writes them as they are, and for the transposed copy the four bytes of a column travel
  between threads as one number of 32 bits. (Triton 3.6 gets single bytes wrong on Hopper.) And a reciprocal,
  a rounding, a widening and a cast of four are one or two instructions each, where Triton's own take several.
- A norm needs whole rows, and what goes by rows cannot be written by columns fast: what it wrote is read
  again, from the L2 cache for the most part, and transposed.

FP8 is `delayed scaling` throughout: values times `scale` (float32, one element), saturated; their largest is
taken up into `amax`. A tensor in FP8 is three here: bytes (N, D), their transpose (D, N), both of a torch FP8
type, and 1/scale (1,) float32.

Formulas: LayerNorm (Ba et al. 2016), its variance from the differences from the mean; RMSNorm (Zhang and
Sennrich 2019); GELU's tanh approximation (Hendrycks and Gimpel 2016); SwiGLU (Shazeer 2020), of an input
whose rows hold what goes through SiLU, then what is multiplied by it.
"""

import functools

import torch
import triton
import triton.language as tl

from fast_kernels.support import MAX_WIDTH

# A program's tile: 16-byte accesses in both layouts, 32 or 64 values a thread. These and `_norm_sizes` are
# the best of those tried on an H200.
TILE = dict(ROWS=64, COLUMNS=64, num_warps=4)
TRANSPOSE_TILE = dict(ROWS=128, COLUMNS=128, num_warps=4)
SUMS_TILE = dict(TILE, ROWS=128)  # where columns' sums are written, too, a row for each strip of tiles
BACKWARD_TILES = {"gelu": SUMS_TILE, "swiglu": TILE}
SMS = 132  # of a Hopper GPU, for a norm's gradient, whose programs each write a row of sums
POINTERS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def on_input_device(function):
    """Run `function` with the device of its first tensor as the current one: Triton launches on the current
    device."""

    @functools.wraps(function)
    def run(*args, **options):
        with torch.cuda.device_of(next(x for x in args if isinstance(x, torch.Tensor))):
            return function(*args, **options)

    return run


def check_input(name, x, width=None):
    """Raise ValueError unless x is a contiguous BF16 matrix whose rows and columns are multiples of 16, at
    most `width` columns."""
    problem = ("" if x.dim() == 2 else "must be a matrix") or (
        "" if x.dtype == torch.bfloat16 else "must be bfloat16"
    )
    problem = problem or ("" if x.is_contiguous() else "must be contiguous; call .contiguous()")
    if not problem and (x.shape[0] % 16 or x.shape[1] % 16):
        works = tuple(triton.cdiv(size, 16) * 16 for size in x.shape)
        problem = f"rows and columns must be multiples of 16; {works} works"
    if not problem and width and x.shape[1] > width:
        problem = f"a norm takes at most {width} columns; use Transformer Engine's modules for wider models"
    if problem:
        raise ValueError(f"{name}: {tuple(x.shape)} {x.dtype}: {problem}")


@on_input_device
def norm(x, branch, bias, weight, shift, eps, scale, amax, fp8):
    """The residual stream x + branch + bias, and its norm · weight + shift in FP8 -> stream (N, C), FP8's
    three, mean and 1/deviation (N,).

    x, branch (N, C), bias, weight, shift (C,): BF16, N a multiple of 16. branch None: the stream is x. shift
    None: RMSNorm, without mean.
    """
    check_input("fast_casts.norm: x", x, MAX_WIDTH)
    (rows, columns), sizes = x.shape, _norm_sizes(*x.shape)
    stream = x if branch is None else torch.empty_like(x)
    mean = None if shift is None else torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd, scale_inv = (
        torch.empty(rows, dtype=torch.float32, device=x.device),
        torch.empty(1, dtype=torch.float32, device=x.device),
    )
    by_rows = torch.empty((rows, columns), dtype=fp8, device=x.device)
    _norm_kernel[(rows // sizes["ROWS"],)](
        x, branch, bias, weight, shift, stream, mean, rstd, scale, amax, by_rows, scale_inv, columns, eps,
        **sizes,
    )
    return stream, (by_rows, transpose(by_rows), scale_inv), mean, rstd


@on_input_device
def norm_backward(gradient, stream, mean, rstd, weight, stream_gradient, quantized=None, with_sums=False):
    """Back through `norm`: the gradient of the stream, x's and branch's -> it (N, C), FP8's three, and the
    sums of its columns, as the branch's bias's gradient is (C,); of weight (C,), of shift (C,). None: where
    not asked for, and shift's for RMSNorm.

    gradient (N, C), BF16, of the norm's result. stream, mean, rstd: what `norm` returned. stream_gradient (N,
    C): of the stream from elsewhere, or None. quantized: (scale, amax, FP8 type) with which the product that
    the branch came out of takes its gradient.
    """
    check_input("fast_casts.norm_backward: gradient", gradient, MAX_WIDTH)
    rows, columns = stream.shape
    scale, amax, fp8 = quantized or (None, None, None)
    total, by_rows, scale_inv = torch.empty_like(stream), None, None
    if quantized:
        by_rows, scale_inv = (
            torch.empty((rows, columns), dtype=fp8, device=stream.device),
            torch.empty(1, dtype=torch.float32, device=stream.device),
        )
    programs, sizes = _norm_backward_sizes(rows, columns)
    sums = torch.empty(
        (programs, 1 + (mean is not None) + with_sums, columns), dtype=torch.float32, device=stream.device
    )
    _norm_backward_kernel[(programs,)](
        gradient, stream, mean, rstd, weight, stream_gradient, total, scale, amax, by_rows, scale_inv, sums,
        rows, columns, WITH_SUMS=with_sums, **sizes,
    )
    dweight, *others = add_up(sums, weight.dtype)
    dshift = others.pop(0) if mean is not None else None
    return (
        total, (by_rows, transpose(by_rows), scale_inv) if quantized else None,
        others[0] if with_sums else None, dweight, dshift,
    )


@on_input_device
def activate(activation, x, bias, scale, amax, fp8):
    """gelu or swiglu of x + bias -> FP8's three. x (N, D), for swiglu (N, 2D), and bias (D or 2D,) or None:
    BF16."""
    check_input("fast_casts.activate: x", x)
    gated = activation == "swiglu"
    rows, columns = x.shape[0], x.shape[1] // (1 + gated)
    out, (_, programs) = outputs(x, rows, columns, fp8), _tiles(TILE, rows, columns)
    _activation_kernel[(programs,)](
        x, bias, scale, amax, *out, rows, columns, GATED=gated, FITS=_fits(TILE, rows, columns), **TILE
    )
    return out


@on_input_device
def activate_backward(activation, gradient, x, bias, scale, amax, fp8):
    """Back through `activate`, from the gradient (N, D) of its result -> the gradient of x as FP8's three,
    and of bias, or None."""
    check_input("fast_casts.activate_backward: gradient", gradient)
    (rows, columns), out, sizes = gradient.shape, outputs(x, *x.shape, fp8), BACKWARD_TILES[activation]
    strips, programs = _tiles(sizes, rows, columns)
    sums = None if bias is None else torch.empty((strips, x.shape[1]), dtype=torch.float32, device=x.device)
    _activation_backward_kernel[(programs,)](
        gradient, x, bias, scale, amax, *out, sums, rows, columns, GATED=activation == "swiglu",
        FITS=_fits(sizes, rows, columns), **sizes,
    )
    return out, None if bias is None else add_up(sums, bias.dtype)


@on_input_device
def cast(x, scale, amax, fp8, with_sums=False):
    """x (N, D), BF16 -> FP8's three, and the sums of its columns (D,), as a bias's gradient is, or None."""
    check_input("fast_casts.cast: x", x)
    sizes, out = SUMS_TILE if with_sums else TILE, outputs(x, *x.shape, fp8)
    strips, programs = _tiles(sizes, *x.shape)
    sums = torch.empty((strips, x.shape[1]), dtype=torch.float32, device=x.device) if with_sums else None
    _cast_kernel[(programs,)](x, scale, amax, *out, sums, *x.shape, FITS=_fits(sizes, *x.shape), **sizes)
    return out, add_up(sums, x.dtype) if with_sums else None


def cast_all(tensors):
    """Many casts of (N, D) BF16 tensors, N and D multiples of 16, in one launch. `tensors`: what `list_casts`
    returned."""
    _, table, tiles, fp8 = tensors
    with torch.cuda.device_of(table):
        _cast_all_kernel[(len(tiles),)](table, tiles, POINTERS[fp8], **TILE)


def list_casts(casts, before=None):
    """For `cast_all`, from (x, FP8's three, scale, amax) of each tensor: a list of addresses on the device.
    `before`: what was returned for the last casts; if it still holds it is returned, and nothing is copied to
    the device, which a CUDA graph could not record."""
    rows = [
        [x.data_ptr(), *(t.data_ptr() for t in three), scale.data_ptr(), amax.data_ptr(), *x.shape]
        for x, three, scale, amax in casts
    ]
    if before is not None and before[0] == rows:
        return before
    for x, *_ in casts:
        check_input("fast_casts.list_casts: x", x)
    x, (by_rows, _, _), _, _ = casts[0]
    tiles = [
        [number, tile] for number, (*_, n, d) in enumerate(rows) for tile in range(_tiles(TILE, n, d)[1])
    ]
    return (
        rows, torch.tensor(rows, device=x.device), torch.tensor(tiles, dtype=torch.int32, device=x.device),
        by_rows.dtype,
    )


@on_input_device
def add_up(sums, dtype):
    """(P, …) float32 -> their sum (…), in `dtype`."""
    total = torch.empty(sums.shape[1:], dtype=dtype, device=sums.device)
    _add_up_kernel[(triton.cdiv(total.numel(), 16),)](
        sums, total, sums.shape[0], total.numel(), ROWS=256, COLUMNS=16, num_warps=8
    )
    return total


def outputs(x, rows, columns, fp8):
    """FP8's three, to be written."""
    return (
        torch.empty((rows, columns), dtype=fp8, device=x.device),
        torch.empty((columns, rows), dtype=fp8, device=x.device),
        torch.empty(1, dtype=torch.float32, device=x.device),
    )


def _tiles(sizes, rows, columns):
    """How many tiles cover a tensor: one below the other, and in all."""
    high = triton.cdiv(rows, sizes["ROWS"])
    return high, high * triton.cdiv(columns, sizes["COLUMNS"])


def _fits(sizes, rows, columns):
    """Whether nothing sticks out of the tensor: known when the kernel is compiled, since masks cost
    instructions."""
    return rows % sizes["ROWS"] == 0 and columns % sizes["COLUMNS"] == 0


def _norm_sizes(rows, columns):
    """Launch parameters of the norm: each program takes ROWS rows in turn, STAGES - 1 of them prefetched into
    shared memory.

    ROWS divides `rows`, a multiple of 16: the kernel has no partial last program."""
    width = triton.next_power_of_2(columns)
    rows_per_program = 4 if rows < 8192 else 32 if width == 4096 and rows % 32 == 0 else 16
    stages = 2 if width > 8192 else 3  # one stage is 64 KiB of shared memory at width 16,384
    return dict(ROWS=rows_per_program, WIDTH=width, STAGES=stages, num_warps=min(16, max(1, width // 512)))


def _norm_backward_sizes(rows, columns):
    """(programs, launch parameters) of the norm's backward pass: as many programs as run at a time stride
    over the rows."""
    width = triton.next_power_of_2(columns)
    warps = min(16, max(1, width // 256))
    # one stage is 96 KiB of shared memory at width 16,384
    stages = 5 if width == 4096 else 4 if width <= 8192 else 2
    return min(rows, SMS * 16 // warps), dict(WIDTH=width, STAGES=stages, num_warps=warps)


@on_input_device
def transpose(by_rows):
    """An FP8 tensor's bytes (N, D) -> (D, N). N and D: multiples of 16."""
    (rows, columns), out = (
        by_rows.shape,
        torch.empty(by_rows.shape[::-1], dtype=by_rows.dtype, device=by_rows.device),
    )
    _transpose_kernel[(_tiles(TRANSPOSE_TILE, rows, columns)[1],)](
        by_rows.view(torch.uint8), out.view(torch.int32), rows, columns,
        FITS=_fits(TRANSPOSE_TILE, rows, columns), **TRANSPOSE_TILE,
    )
    return out


# ---------------------------------------------------------------- in a kernel

@triton.jit
def _reciprocal(x):
    """1/x to the last bit but one, in one instruction."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def round_bf16(x):
    """To BF16, two values an instruction."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _gate(x, GATED: tl.constexpr):
    """What x is multiplied by. SwiGLU's SiLU is x / (1 + exp(-x)). GELU is x · (1 + tanh u) / 2 with u =
    0.798 x (1 + 0.0447 x²), and that is x / (1 + exp(-2u)): one exponential, no tanh. The constants are
    divided by log(2), for a power of 2 is what the GPU has an instruction for."""
    exponent = -1.4426950409 * x if GATED else x * (-2.3022081958 - 0.1029432394 * x * x)
    return _reciprocal(1.0 + tl.exp2(exponent))


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def widen(x):
    """Two values of BF16 to float32. With `x.to(tl.float32)` Triton changes layouts before that, and computes
    what follows once for each."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True,
        pack=2,
    )


@triton.jit
def _four(a, b, c, d, FP8: tl.constexpr):
    """Four values in FP8 as one of 32 bits, a in the lowest; the cast saturates, ties to even."""
    if FP8 == tl.float8e5:
        return tl.inline_asm_elementwise(
            "{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;"
            "mov.b32 $0, {low, high};}",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
        "mov.b32 $0, {low, high};}",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_rows(pointer, stride, mask, other: tl.constexpr = 0.0):
    """Of four neighbouring rows each, BF16. All are asked for before anything is written, after which the
    compiler would not move them."""
    return (
        tl.load(pointer, mask=mask, other=other), tl.load(pointer + stride, mask=mask, other=other),
        tl.load(pointer + 2 * stride, mask=mask, other=other),
        tl.load(pointer + 3 * stride, mask=mask, other=other),
    )


@triton.jit
def largest_of(a, b, c, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of four rows, the largest magnitude in every eight columns, which lie in one thread. NaN does not
    count, neither here nor in TE."""
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return tl.max(tl.reshape(largest, (ROWS // 4, COLUMNS // 8, 8)), 2)


@triton.jit
def store_fp8(
    a,
    b,
    c,
    d,
    scale,
    by_rows_ptr,
    by_columns_ptr,
    first_row,
    first_column,
    N,
    D,
    mask,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of the (N, D) output in FP8, as it is and transposed: of every four rows the first, the second,
    …, (ROWS / 4, COLUMNS) float32."""
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    fp8: tl.constexpr = by_rows_ptr.dtype.element_ty
    a, b, c, d = a * scale, b * scale, c * scale, d * scale
    place = by_rows_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :]
    tl.store(place, a.to(fp8), mask=mask)
    tl.store(place + D, b.to(fp8), mask=mask)
    tl.store(place + 2 * D, c.to(fp8), mask=mask)
    tl.store(place + 3 * D, d.to(fp8), mask=mask)
    corner = (by_columns_ptr + (first_column * N.to(tl.int64) + first_row)).to(tl.pointer_type(tl.int32))
    tl.store(
        corner + j[:, None] * (N // 4) + i[None, :], tl.trans(_four(a, b, c, d, fp8)), mask=tl.trans(mask)
    )


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, N, D, FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile (ROWS, COLUMNS) of bytes, four rows' at a time as a number of 32 bits."""
    tiles = tl.cdiv(D, COLUMNS)
    first_row, first_column = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles * COLUMNS
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    mask = ((first_row // 4 + i < N // 4) | FITS)[:, None] & ((first_column + j < D) | FITS)[None, :]
    a, b, c, d = load_rows(
        x_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :], D, mask, 0
    )
    four = a.to(tl.int32) | (b.to(tl.int32) << 8) | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
    out_ptr += first_column * (N.to(tl.int64) // 4) + first_row // 4
    tl.store(out_ptr + j[:, None] * (N // 4) + i[None, :], tl.trans(four), mask=tl.trans(mask))


@triton.jit
def _begin(scale_ptr, scale_inv_ptr):
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    return scale


@triton.jit
def _norm_kernel(
    x_ptr,
    branch_ptr,
    bias_ptr,
    weight_ptr,
    shift_ptr,
    stream_ptr,
    mean_ptr,
    rstd_ptr,
    scale_ptr,
    amax_ptr,
    by_rows_ptr,
    scale_inv_ptr,
    C,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS rows, one after the other."""
    j = tl.arange(0, WIDTH)
    mask = j < C
    weight = _load(weight_ptr + j, mask)
    if mean_ptr is not None:
        shift = _load(shift_ptr + j, mask)
    if bias_ptr is not None:
        bias = _load(bias_ptr + j, mask)
    scale = _begin(scale_ptr, scale_inv_ptr)
    largest = tl.zeros((WIDTH,), tl.float32)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    for i in tl.range(ROWS, num_stages=STAGES):  # the next rows are under way while one is added up
        row = first_row + i
        place = row * C + j
        values = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if branch_ptr is not None:
            values += tl.load(branch_ptr + place, mask=mask, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                values += bias
            rounded = round_bf16(values)
            tl.store(stream_ptr + place, rounded, mask=mask)
            values = rounded.to(tl.float32)
        if mean_ptr is not None:
            mean = tl.sum(values) / C
            tl.store(mean_ptr + row, mean)
            values = tl.where(mask, values - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(values * values) / C + eps)
        tl.store(rstd_ptr + row, rstd)
        y = values * rstd * weight
        if mean_ptr is not None:
            y += shift
        largest = tl.maximum(largest, tl.abs(y))  # NaN does not count, neither here nor in TE
        tl.store(by_rows_ptr + place, (y * scale).to(by_rows_ptr.dtype.element_ty), mask=mask)
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def two_sums(a, b):
    """In one reduction, which threads wait for once."""
    return tl.reduce((a, b), 0, _add_pairs)


@triton.jit
def _norm_backward_kernel(
    gradient_ptr,
    stream_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    other_ptr,
    total_ptr,
    scale_ptr,
    amax_ptr,
    by_rows_ptr,
    scale_inv_ptr,
    sums_ptr,
    N,
    C,
    WITH_SUMS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every so many-th row. With y = w·x̂ + shift, x̂ = rstd·(x - mean) and g = w·dy: dx = rstd·(g - mean(g)
    - x̂·mean(g·x̂)), dw = Σ dy·x̂; for RMSNorm without mean and mean(g)."""
    j = tl.arange(0, WIDTH)
    mask = j < C
    weight = _load(weight_ptr + j, mask)
    if by_rows_ptr is not None:
        scale = _begin(scale_ptr, scale_inv_ptr)
        largest = tl.zeros((WIDTH // 8,), tl.float32)
    dweight = tl.zeros((WIDTH,), tl.float32)
    dshift = tl.zeros((WIDTH,), tl.float32)
    sums = tl.zeros((WIDTH,), tl.float32)
    programs = tl.num_programs(0)
    first_row = tl.program_id(0).to(tl.int64)
    # the next rows are under way while one is added up
    for i in tl.range(tl.cdiv(N - tl.program_id(0), programs), num_stages=STAGES):
        row = first_row + i * programs
        place = row * C + j
        x = tl.load(stream_ptr + place, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(gradient_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if other_ptr is not None:
            other = tl.load(other_ptr + place, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if mean_ptr is not None:
            x = tl.where(mask, x - tl.load(mean_ptr + row), 0.0)
        x *= rstd
        dweight += dy * x
        g = dy * weight
        if mean_ptr is not None:
            dshift += dy
            along_x, mean = two_sums(g * x, g)
            dx = rstd * (g - mean / C - x * (along_x / C))
        else:
            dx = rstd * (g - x * (tl.sum(g * x) / C))
        if other_ptr is not None:
            dx += other
        rounded = round_bf16(dx)
        tl.store(total_ptr + place, rounded, mask=mask)
        dx = tl.where(mask, rounded.to(tl.float32), 0.0)
        if WITH_SUMS:
            sums += dx
        if by_rows_ptr is not None:
            # NaN does not count, neither here nor in TE
            largest = tl.maximum(largest, tl.max(tl.reshape(tl.abs(dx), (WIDTH // 8, 8)), 1))
            tl.store(by_rows_ptr + place, (dx * scale).to(by_rows_ptr.dtype.element_ty), mask=mask)
    if by_rows_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")
    width = C * (1 + (mean_ptr is not None) + WITH_SUMS)
    sums_ptr += tl.program_id(0) * width + j
    tl.store(sums_ptr, dweight, mask=mask)
    if mean_ptr is not None:
        tl.store(sums_ptr + C, dshift, mask=mask)
    if WITH_SUMS:
        tl.store(sums_ptr + width - C, sums, mask=mask)


@triton.jit
def _activate(x, bias, factor, factor_bias, GATED: tl.constexpr):
    x = widen(x)
    if bias is not None:
        x += bias
    y = x * _gate(x, GATED)
    if GATED:
        factor = widen(factor)
        if bias is not None:
            factor += factor_bias
        y *= factor
    return y


@triton.jit
def _activation_kernel(
    x_ptr,
    bias_ptr,
    scale_ptr,
    amax_ptr,
    by_rows_ptr,
    by_columns_ptr,
    scale_inv_ptr,
    N,
    D,
    GATED: tl.constexpr,
    FITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile (ROWS, COLUMNS) of the (N, D) output."""
    tiles = tl.cdiv(D, COLUMNS)
    first_row, first_column = tl.program_id(0) // tiles * ROWS, tl.program_id(0) % tiles * COLUMNS
    # inside the tile, so that only the tile's own place needs 64 bits
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_columns = (first_column + j < D) | FITS
    mask = ((first_row // 4 + i < N // 4) | FITS)[:, None] & in_columns[None, :]
    width = 2 * D if GATED else D
    x_ptr += first_row.to(tl.int64) * width + first_column + 4 * i[:, None] * width + j[None, :]
    x = load_rows(x_ptr, width, mask)
    factor = load_rows(x_ptr + D, width, mask) if GATED else x
    bias = _load(bias_ptr + first_column + j, in_columns)[None, :] if bias_ptr is not None else None
    factor_bias = (
        _load(bias_ptr + D + first_column + j, in_columns)[None, :]
        if GATED and bias_ptr is not None
        else None
    )
    a, b = (
        _activate(x[0], bias, factor[0], factor_bias, GATED),
        _activate(x[1], bias, factor[1], factor_bias, GATED),
    )
    c, d = (
        _activate(x[2], bias, factor[2], factor_bias, GATED),
        _activate(x[3], bias, factor[3], factor_bias, GATED),
    )
    if bias_ptr is not None and not FITS:  # outside, x is not 0 but the bias
        a, b, c, d = (
            tl.where(mask, a, 0.0), tl.where(mask, b, 0.0), tl.where(mask, c, 0.0), tl.where(mask, d, 0.0),
        )
    tl.atomic_max(amax_ptr, tl.max(largest_of(a, b, c, d, ROWS, COLUMNS)), sem="relaxed")
    store_fp8(
        a, b, c, d, _begin(scale_ptr, scale_inv_ptr), by_rows_ptr, by_columns_ptr, first_row, first_column, N,
        D, mask, ROWS, COLUMNS,
    )


@triton.jit
def _back_through_gelu(gradient, x, bias):
    x = widen(x)
    if bias is not None:
        x += bias
    gate = _gate(x, False)
    return (x * (gate - gate * gate) * (1.5957691216 + 0.2140644486 * (x * x)) + gate) * widen(gradient)


@triton.jit
def _back_through_swiglu(gradient, x, bias, factor, factor_bias):
    """-> the gradients of x, and of what its SiLU is multiplied by."""
    x, factor, gradient = widen(x), widen(factor), widen(gradient)
    if bias is not None:
        x, factor = x + bias, factor + factor_bias
    gate = _gate(x, True)
    silu = x * gate
    return (silu * (1.0 - gate) + gate) * gradient * factor, silu * gradient


@triton.jit
def _activation_backward_kernel(
    gradient_ptr,
    x_ptr,
    bias_ptr,
    scale_ptr,
    amax_ptr,
    by_rows_ptr,
    by_columns_ptr,
    scale_inv_ptr,
    sums_ptr,
    N,
    D,
    GATED: tl.constexpr,
    FITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile (ROWS, COLUMNS) of the gradient (N, D): the same of x's, and for SwiGLU another, D columns
    further."""
    tiles = tl.cdiv(D, COLUMNS)
    strip, first_column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * COLUMNS
    first_row = strip * ROWS
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_columns = (first_column + j < D) | FITS
    mask = ((first_row // 4 + i < N // 4) | FITS)[:, None] & in_columns[None, :]
    width = 2 * D if GATED else D
    x_ptr += first_row.to(tl.int64) * width + first_column + 4 * i[:, None] * width + j[None, :]
    x = load_rows(x_ptr, width, mask)
    g = load_rows(
        gradient_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :], D, mask
    )
    bias = _load(bias_ptr + first_column + j, in_columns)[None, :] if bias_ptr is not None else None
    scale = _begin(scale_ptr, scale_inv_ptr)
    if GATED:
        factor = load_rows(x_ptr + D, width, mask)
        factor_bias = (
            _load(bias_ptr + D + first_column + j, in_columns)[None, :] if bias_ptr is not None else None
        )
        a, e = _back_through_swiglu(g[0], x[0], bias, factor[0], factor_bias)
        b, f = _back_through_swiglu(g[1], x[1], bias, factor[1], factor_bias)
        c, g2 = _back_through_swiglu(g[2], x[2], bias, factor[2], factor_bias)
        d, h = _back_through_swiglu(g[3], x[3], bias, factor[3], factor_bias)
    else:
        a, b = _back_through_gelu(g[0], x[0], bias), _back_through_gelu(g[1], x[1], bias)
        c, d = _back_through_gelu(g[2], x[2], bias), _back_through_gelu(g[3], x[3], bias)
    # Written before the largest is looked for: that is faster here, and takes more registers in the other
    # kernels
    largest = largest_of(a, b, c, d, ROWS, COLUMNS)
    if GATED:
        largest = tl.maximum(largest, largest_of(e, f, g2, h, ROWS, COLUMNS))
        store_fp8(
            e, f, g2, h, scale, by_rows_ptr, by_columns_ptr, first_row, D + first_column, N, width, mask,
            ROWS, COLUMNS,
        )
    store_fp8(
        a, b, c, d, scale, by_rows_ptr, by_columns_ptr, first_row, first_column, N, width, mask, ROWS, COLUMNS
    )
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")
    if sums_ptr is not None:
        sums_ptr += strip * width + first_column + j
        tl.store(sums_ptr, tl.sum((a + b) + (c + d), 0), mask=in_columns)
        if GATED:
            tl.store(sums_ptr + D, tl.sum((e + f) + (g2 + h), 0), mask=in_columns)


@triton.jit
def _cast_kernel(
    x_ptr,
    scale_ptr,
    amax_ptr,
    by_rows_ptr,
    by_columns_ptr,
    scale_inv_ptr,
    sums_ptr,
    N,
    D,
    FITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile (ROWS, COLUMNS)."""
    tiles = tl.cdiv(D, COLUMNS)
    strip, first_column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * COLUMNS
    first_row = strip * ROWS
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_columns = (first_column + j < D) | FITS
    mask = ((first_row // 4 + i < N // 4) | FITS)[:, None] & in_columns[None, :]
    x = load_rows(
        x_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :], D, mask
    )
    a, b, c, d = widen(x[0]), widen(x[1]), widen(x[2]), widen(x[3])
    tl.atomic_max(amax_ptr, tl.max(largest_of(a, b, c, d, ROWS, COLUMNS)), sem="relaxed")
    store_fp8(
        a, b, c, d, _begin(scale_ptr, scale_inv_ptr), by_rows_ptr, by_columns_ptr, first_row, first_column, N,
        D, mask, ROWS, COLUMNS,
    )
    if sums_ptr is not None:
        tl.store(sums_ptr + strip * D + first_column + j, tl.sum((a + b) + (c + d), 0), mask=in_columns)


@triton.jit
def _cast_all_kernel(table_ptr, tiles_ptr, FP8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile (ROWS, COLUMNS) of one tensor. tiles (programs, 2): its row in the table, and which tile. A
    row of the table: the addresses of x, by_rows, by_columns, scale_inv, scale, amax, then N and D."""
    row_ptr, tile = (
        table_ptr + 8 * tl.load(tiles_ptr + 2 * tl.program_id(0)),
        tl.load(tiles_ptr + 2 * tl.program_id(0) + 1),
    )
    x_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.bfloat16)), 16)
    by_rows_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(FP8)), 16)
    by_columns_ptr = tl.multiple_of(tl.load(row_ptr + 2).to(tl.pointer_type(FP8)), 16)
    N, D = (
        tl.multiple_of(tl.load(row_ptr + 6).to(tl.int32), 16),
        tl.multiple_of(tl.load(row_ptr + 7).to(tl.int32), 16),
    )
    across = tl.cdiv(D, COLUMNS)
    first_row, first_column = tile // across * ROWS, tile % across * COLUMNS
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    mask = (first_row // 4 + i < N // 4)[:, None] & (first_column + j < D)[None, :]
    x = load_rows(
        x_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :], D, mask
    )
    a, b, c, d = widen(x[0]), widen(x[1]), widen(x[2]), widen(x[3])
    scale = tl.load(tl.load(row_ptr + 4).to(tl.pointer_type(tl.float32)))
    if tile == 0:
        tl.store(tl.load(row_ptr + 3).to(tl.pointer_type(tl.float32)), tl.div_rn(1.0, scale))
    tl.atomic_max(
        tl.load(row_ptr + 5).to(tl.pointer_type(tl.float32)), tl.max(largest_of(a, b, c, d, ROWS, COLUMNS)),
        sem="relaxed",
    )
    store_fp8(
        a, b, c, d, scale, by_rows_ptr, by_columns_ptr, first_row, first_column, N, D, mask, ROWS, COLUMNS
    )


@triton.jit
def _add_up_kernel(sums_ptr, total_ptr, P, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of (P, W)."""
    i, j = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(0, P, ROWS):
        total += tl.load(
            sums_ptr + (row + i)[:, None] * W + j[None, :], mask=(row + i < P)[:, None] & (j < W)[None, :],
            other=0.0,
        )
    tl.store(total_ptr + j, tl.sum(total, 0).to(total_ptr.dtype.element_ty), mask=j < W)
