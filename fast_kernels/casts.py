"""Fused kernels between the GEMMs of an FP8 GPT: norm, activation, bias and cast, each writing FP8 rowwise
and transposed.

Use them under delayed scaling, where the scale is known before the values are: `norm`, `activate` and `cast`
forward, `norm_backward` and `activate_backward` backward, and `cast_all` for all weights in one launch.
`fast_kernels/block.py` shows how they fit together.

An FP8 tensor is a tuple (rowwise, columnwise, scale_inv): data (N, D) and its transpose (D, N) in a torch FP8
type, and 1/scale, (1,) float32. FP8 values are saturate(x · scale) with `scale`, one float32 on the device;
the kernels raise `amax` to the largest |x| that they see. NaN does not count in an amax, as in Transformer
Engine (TE).

All of these operations are bound by memory, so the design counts reads and writes:

- Hopper's FP8 GEMMs need K contiguous in both operands, so wgrad needs transposed copies. Each kernel writes
  both copies at once. TE reads a tensor again to cast it, and again to transpose it.
- The residual addition is fused into the norm that follows; the residual's gradient is summed and cast in the
  norm's backward kernel.
- A GEMM's bias is added by the kernel that reads the GEMM's output, and the backward kernel that writes the
  gradient of that output reduces dbias as well.
- A norm needs whole rows, and a kernel that holds whole rows cannot write a transposed copy fast. So the
  norms write rowwise data, and a second kernel transposes it, mostly from the L2 cache.
- Instructions and registers matter as much as bytes. A thread holds the same columns of four adjacent rows.
  It stores rowwise data directly, and packs a column's four FP8 values into one 32-bit number for the
  transpose. (Triton 3.6 transposes single bytes incorrectly on Hopper.) Reciprocal, rounding, widening and
  the cast are inline PTX of one or two instructions, where Triton's own take several.

Formulas: LayerNorm (Ba et al. 2016), with the variance from differences from the mean; RMSNorm (Zhang and
Sennrich 2019); GELU, tanh approximation (Hendrycks and Gimpel 2016); SwiGLU (Shazeer 2020), SiLU(gate) · up
of an input whose rows hold gate, then up.
"""

import functools

import torch
import triton
import triton.language as tl

from fast_kernels.support import MAX_WIDTH

# A program's tile: 16-byte accesses in both layouts, 32 or 64 values per thread. These sizes and those of
# `_norm_sizes` are the fastest of those tried on an H200.
TILE = dict(ROWS=64, COLUMNS=64, num_warps=4)
TRANSPOSE_TILE = dict(ROWS=128, COLUMNS=128, num_warps=4)
DBIAS_TILE = dict(TILE, ROWS=128)  # for kernels that also write one row of partial sums per row of tiles
BACKWARD_TILES = {"gelu": DBIAS_TILE, "swiglu": TILE}
SMS = 132  # of a Hopper GPU; a norm's backward kernel writes one row of partial sums per program
TRITON_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def on_input_device(function):
    """Decorate `function` to make its first tensor's device the current one, on which Triton launches."""

    @functools.wraps(function)
    def run(*args, **options):
        with torch.cuda.device_of(next(x for x in args if isinstance(x, torch.Tensor))):
            return function(*args, **options)

    return run


def check_input(name, x, max_columns=None):
    """Raise ValueError unless x is a contiguous BF16 matrix, its dimensions multiples of 16."""
    problem = _find_problem(x, max_columns)
    if problem:
        raise ValueError(f"{name}: {tuple(x.shape)} {x.dtype}: {problem}")


def _find_problem(x, max_columns):
    if x.dim() != 2:
        return "must be a matrix"
    if x.dtype != torch.bfloat16:
        return "must be bfloat16"
    if not x.is_contiguous():
        return "must be contiguous; call .contiguous()"
    if x.shape[0] % 16 or x.shape[1] % 16:
        works = tuple(triton.cdiv(size, 16) * 16 for size in x.shape)
        return f"rows and columns must be multiples of 16; {works} works"
    if max_columns and x.shape[1] > max_columns:
        return (f"a norm takes at most {max_columns} columns; use Transformer Engine's modules for wider "
                "models")
    return ""


@on_input_device
def norm(x, branch, branch_bias, weight, bias, eps, scale, amax, fp8):
    """Add a branch to the residual, normalize the sum, and quantize the result.

    Args:
        x, branch: (N, C) BF16, N a multiple of 16. branch None: the residual is x itself.
        branch_bias: (C,) BF16 or None, the bias of the GEMM that computed `branch`.
        weight, bias: the norm's, (C,) BF16. bias None: RMSNorm.

    Returns:
        residual (N, C) = x + branch + branch_bias; norm(residual) as an FP8 tensor; mean (None for RMSNorm)
        and rstd (reciprocal standard deviation), (N,) float32.
    """
    check_input("fast_kernels.casts.norm: x", x, MAX_WIDTH)
    (rows, columns), sizes = x.shape, _norm_sizes(*x.shape)
    residual = x if branch is None else torch.empty_like(x)
    mean = None if bias is None else torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    scale_inv = torch.empty(1, dtype=torch.float32, device=x.device)
    rowwise = torch.empty((rows, columns), dtype=fp8, device=x.device)
    _norm_kernel[(rows // sizes["ROWS"],)](
        x, branch, branch_bias, weight, bias, residual, mean, rstd, scale, amax, rowwise, scale_inv,
        columns, eps, **sizes,
    )
    return residual, (rowwise, transpose(rowwise), scale_inv), mean, rstd


@on_input_device
def norm_backward(dy, residual, mean, rstd, weight, dresidual, quantization=None, with_dbranch_bias=False):
    """Compute the gradients of `norm`'s inputs, and quantize that of the branch.

    Args:
        dy: (N, C) BF16, gradient of norm(residual).
        residual, mean, rstd: as returned by `norm`.
        dresidual: (N, C) BF16, gradient from the other uses of the residual, or None.
        quantization: (scale, amax, FP8 type) with which dx is quantized, or None.

    Returns:
        dx (N, C) BF16, the gradient of x and of branch; dx as an FP8 tensor, or None; dbranch_bias (C,), the
        columns' sums of dx, or None; dweight (C,); dbias (C,), None for RMSNorm.
    """
    check_input("fast_kernels.casts.norm_backward: dy", dy, MAX_WIDTH)
    rows, columns = residual.shape
    scale, amax, fp8 = quantization or (None, None, None)
    dx, rowwise, scale_inv = torch.empty_like(residual), None, None
    if quantization:
        rowwise = torch.empty((rows, columns), dtype=fp8, device=residual.device)
        scale_inv = torch.empty(1, dtype=torch.float32, device=residual.device)
    programs, sizes = _norm_backward_sizes(rows, columns)
    count = 1 + (mean is not None) + with_dbranch_bias
    partial_sums = torch.empty((programs, count, columns), dtype=torch.float32, device=residual.device)
    _norm_backward_kernel[(programs,)](
        dy, residual, mean, rstd, weight, dresidual, dx, scale, amax, rowwise, scale_inv, partial_sums,
        rows, columns, WITH_DBRANCH_BIAS=with_dbranch_bias, **sizes,
    )
    dweight, *others = reduce_rows(partial_sums, weight.dtype)
    dbias = others.pop(0) if mean is not None else None
    dbranch_bias = others[0] if with_dbranch_bias else None
    quantized = (rowwise, transpose(rowwise), scale_inv) if quantization else None
    return dx, quantized, dbranch_bias, dweight, dbias


@on_input_device
def activate(activation, x, bias, scale, amax, fp8):
    """Compute activation(x + bias) as an FP8 tensor (N, D).

    Args:
        activation: "gelu" or "swiglu".
        x: BF16, (N, D) for GELU and (N, 2D) for SwiGLU.
        bias: BF16, (D,) or (2D,), or None.
    """
    check_input("fast_kernels.casts.activate: x", x)
    gated = activation == "swiglu"
    rows, columns = x.shape[0], x.shape[1] // (1 + gated)
    out = allocate_fp8(x, rows, columns, fp8)
    _, programs = _count_tiles(TILE, rows, columns)
    _activation_kernel[(programs,)](
        x, bias, scale, amax, *out, rows, columns, GATED=gated, FITS=_fits(TILE, rows, columns), **TILE
    )
    return out


@on_input_device
def activate_backward(activation, dy, x, bias, scale, amax, fp8):
    """Compute the gradients of `activate`'s inputs: dx as an FP8 tensor, and dbias or None.

    dy: (N, D) BF16, the gradient of its output.
    """
    check_input("fast_kernels.casts.activate_backward: dy", dy)
    rows, columns = dy.shape
    out, sizes = allocate_fp8(x, *x.shape, fp8), BACKWARD_TILES[activation]
    tile_rows, programs = _count_tiles(sizes, rows, columns)
    partial_sums = None
    if bias is not None:
        partial_sums = torch.empty((tile_rows, x.shape[1]), dtype=torch.float32, device=x.device)
    _activation_backward_kernel[(programs,)](
        dy, x, bias, scale, amax, *out, partial_sums, rows, columns, GATED=activation == "swiglu",
        FITS=_fits(sizes, rows, columns), **sizes,
    )
    return out, None if bias is None else reduce_rows(partial_sums, bias.dtype)


@on_input_device
def cast(x, scale, amax, fp8, with_dbias=False, out=None):
    """Quantize x (N, D) BF16; return an FP8 tensor, and the columns' sums (D,) or None.

    Args:
        with_dbias: also return those sums, which are the bias's gradient if x is the gradient of a GEMM's
            output.
        out: the FP8 tensor to write. None: new memory.
    """
    check_input("fast_kernels.casts.cast: x", x)
    out = out or allocate_fp8(x, *x.shape, fp8)
    sizes = DBIAS_TILE if with_dbias else TILE
    tile_rows, programs = _count_tiles(sizes, *x.shape)
    partial_sums = None
    if with_dbias:
        partial_sums = torch.empty((tile_rows, x.shape[1]), dtype=torch.float32, device=x.device)
    _cast_kernel[(programs,)](
        x, scale, amax, *out, partial_sums, *x.shape, FITS=_fits(sizes, *x.shape), **sizes
    )
    return out, reduce_rows(partial_sums, x.dtype) if with_dbias else None


def cast_all(cast_table):
    """Quantize many BF16 tensors in one launch, as listed by `make_cast_table`."""
    _, table, tiles, fp8 = cast_table
    with torch.cuda.device_of(table):
        _cast_all_kernel[(len(tiles),)](table, tiles, TRITON_TYPES[fp8], **TILE)


def make_cast_table(casts, previous=None):
    """Make the table of `cast_all`: write the addresses that its kernel reads to the device.

    Args:
        casts: (x, FP8 tensor to write, scale, amax) of each tensor; x (N, D) BF16, N and D multiples of 16.
        previous: the last table. If it still holds, it is returned and nothing is copied to the device: a
            CUDA graph could not record that copy.

    Returns:
        (rows, the same on the device, tiles, FP8 type): see `_cast_all_kernel`.
    """
    rows = [
        [x.data_ptr(), *(t.data_ptr() for t in out), scale.data_ptr(), amax.data_ptr(), *x.shape]
        for x, out, scale, amax in casts
    ]
    if previous is not None and previous[0] == rows:
        return previous
    for x, *_ in casts:
        check_input("fast_kernels.casts.make_cast_table: x", x)
    x, (rowwise, _, _), _, _ = casts[0]
    counts = [_count_tiles(TILE, n, d)[1] for *_, n, d in rows]
    tiles = [[number, tile] for number, count in enumerate(counts) for tile in range(count)]
    table = torch.tensor(rows, device=x.device)
    return rows, table, torch.tensor(tiles, dtype=torch.int32, device=x.device), rowwise.dtype


@on_input_device
def reduce_rows(x, dtype):
    """Sum x (P, …) float32 over its first dimension; return (…) in `dtype`."""
    total = torch.empty(x.shape[1:], dtype=dtype, device=x.device)
    _reduce_rows_kernel[(triton.cdiv(total.numel(), 16),)](
        x, total, x.shape[0], total.numel(), ROWS=256, COLUMNS=16, num_warps=8
    )
    return total


@on_input_device
def transpose(rowwise):
    """Transpose FP8 data (N, D) to (D, N), N and D multiples of 16."""
    rows, columns = rowwise.shape
    out = torch.empty((columns, rows), dtype=rowwise.dtype, device=rowwise.device)
    _transpose_kernel[(_count_tiles(TRANSPOSE_TILE, rows, columns)[1],)](
        rowwise.view(torch.uint8), out.view(torch.int32), rows, columns,
        FITS=_fits(TRANSPOSE_TILE, rows, columns), **TRANSPOSE_TILE,
    )
    return out


def allocate_fp8(x, rows, columns, fp8):
    """Allocate an FP8 tensor on x's device: rowwise data, transposed data and scale_inv."""
    return (
        torch.empty((rows, columns), dtype=fp8, device=x.device),
        torch.empty((columns, rows), dtype=fp8, device=x.device),
        torch.empty(1, dtype=torch.float32, device=x.device),
    )


def _count_tiles(sizes, rows, columns):
    """Return how many rows of tiles cover a matrix, and how many tiles."""
    tile_rows = triton.cdiv(rows, sizes["ROWS"])
    return tile_rows, tile_rows * triton.cdiv(columns, sizes["COLUMNS"])


def _fits(sizes, rows, columns):
    """Return whether the tiles cover a matrix exactly, so that the kernel is compiled without masks."""
    return rows % sizes["ROWS"] == 0 and columns % sizes["COLUMNS"] == 0


def _norm_sizes(rows, columns):
    """Return launch parameters of the norm: ROWS rows per program, STAGES - 1 of them prefetched.

    ROWS divides `rows`, a multiple of 16: the kernel has no partial last program."""
    width = triton.next_power_of_2(columns)
    if rows < 8192:
        rows_per_program = 4
    else:
        rows_per_program = 32 if width == 4096 and rows % 32 == 0 else 16
    stages = 2 if width > 8192 else 3  # one stage is 64 KiB of shared memory at width 16,384
    return dict(ROWS=rows_per_program, WIDTH=width, STAGES=stages, num_warps=min(16, max(1, width // 512)))


def _norm_backward_sizes(rows, columns):
    """Return (programs, launch parameters) of the norm's backward kernel, a persistent kernel that strides
    over the rows."""
    width = triton.next_power_of_2(columns)
    warps = min(16, max(1, width // 256))
    stages = 4 if width <= 8192 else 2  # one stage is 96 KiB of shared memory at width 16,384
    if width == 4096:
        stages = 5
    return min(rows, SMS * 16 // warps), dict(WIDTH=width, STAGES=stages, num_warps=warps)


# ---------------------------------------------------------------- device functions

@triton.jit
def _reciprocal(x):
    """Return 1/x in one instruction, with an error of at most one unit in the last place."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def round_bf16(x):
    """Round float32 to BF16, two values per instruction."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _gate(x, GATED: tl.constexpr):
    """Return activation(x) / x, a sigmoid for both activations.

    SiLU is x / (1 + exp(-x)). GELU is x · (1 + tanh u) / 2 with u = 0.798 x (1 + 0.0447 x²), which is
    x / (1 + exp(-2u)): one exponential, no tanh. The constants are divided by log(2), since the GPU's
    instruction is 2^x."""
    exponent = -1.4426950409 * x if GATED else x * (-2.3022081958 - 0.1029432394 * x * x)
    return _reciprocal(1.0 + tl.exp2(exponent))


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def widen(x):
    """Convert BF16 to float32, two values per instruction.

    With `x.to(tl.float32)`, Triton converts the layout first, and computes what follows once per layout.
    """
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True,
        pack=2,
    )


@triton.jit
def _pack_fp8(a, b, c, d, FP8: tl.constexpr):
    """Cast four values to FP8 and pack them into 32 bits, a lowest. Saturates; rounds ties to even."""
    if FP8 == tl.float8e5:
        return tl.inline_asm_elementwise(
            "{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;mov.b32 $0, {low, high};}",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )
    return tl.inline_asm_elementwise(
        "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;mov.b32 $0, {low, high};}",
        "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
    )


@triton.jit
def load_rows(pointer, stride, mask, other: tl.constexpr = 0.0):
    """Load four adjacent rows at each pointer. All loads come before any store, since the compiler would not
    move a load across one."""
    return (
        tl.load(pointer, mask=mask, other=other), tl.load(pointer + stride, mask=mask, other=other),
        tl.load(pointer + 2 * stride, mask=mask, other=other),
        tl.load(pointer + 3 * stride, mask=mask, other=other),
    )


@triton.jit
def abs_max(a, b, c, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the largest magnitude over four rows and every eight columns, which are in one thread. Ignores
    NaN, as TE does."""
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return tl.max(tl.reshape(largest, (ROWS // 4, COLUMNS // 8, 8)), 2)


@triton.jit
def store_fp8(a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, D, mask,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantize a tile of the (N, D) output and store it, rowwise and transposed.

    a, b, c, d: (ROWS / 4, COLUMNS) float32: rows 0, 4, 8, … of the tile, rows 1, 5, 9, …, and so on."""
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    fp8: tl.constexpr = rowwise_ptr.dtype.element_ty
    a, b, c, d = a * scale, b * scale, c * scale, d * scale
    out = rowwise_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :]
    tl.store(out, a.to(fp8), mask=mask)
    tl.store(out + D, b.to(fp8), mask=mask)
    tl.store(out + 2 * D, c.to(fp8), mask=mask)
    tl.store(out + 3 * D, d.to(fp8), mask=mask)
    corner = (columnwise_ptr + (first_column * N.to(tl.int64) + first_row)).to(tl.pointer_type(tl.int32))
    tl.store(
        corner + j[:, None] * (N // 4) + i[None, :], tl.trans(_pack_fp8(a, b, c, d, fp8)), mask=tl.trans(mask)
    )


@triton.jit
def _load_scale(scale_ptr, scale_inv_ptr):
    """Load the scale; the first program also stores its reciprocal."""
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    return scale


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def two_sums(a, b):
    """Sum a and b in one reduction, with one synchronization of the threads."""
    return tl.reduce((a, b), 0, _add_pairs)


# ---------------------------------------------------------------- kernels

@triton.jit
def _transpose_kernel(x_ptr, out_ptr, N, D, FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Transpose one tile (ROWS, COLUMNS) of bytes, four rows packed into 32 bits."""
    tile_columns = tl.cdiv(D, COLUMNS)
    first_row, first_column = (
        tl.program_id(0) // tile_columns * ROWS, tl.program_id(0) % tile_columns * COLUMNS)
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    mask = ((first_row // 4 + i < N // 4) | FITS)[:, None] & ((first_column + j < D) | FITS)[None, :]
    a, b, c, d = load_rows(
        x_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :], D, mask, 0
    )
    packed = a.to(tl.int32) | (b.to(tl.int32) << 8) | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
    out_ptr += first_column * (N.to(tl.int64) // 4) + first_row // 4
    tl.store(out_ptr + j[:, None] * (N // 4) + i[None, :], tl.trans(packed), mask=tl.trans(mask))


@triton.jit
def _norm_kernel(x_ptr, branch_ptr, branch_bias_ptr, weight_ptr, bias_ptr, residual_ptr, mean_ptr, rstd_ptr,
                 scale_ptr, amax_ptr, rowwise_ptr, scale_inv_ptr, C, eps,
                 ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Add and normalize ROWS rows, one at a time. y = x̂ · weight + bias, x̂ = rstd · (x - mean)."""
    j = tl.arange(0, WIDTH)
    mask = j < C
    weight = _load(weight_ptr + j, mask)
    if mean_ptr is not None:
        bias = _load(bias_ptr + j, mask)
    if branch_bias_ptr is not None:
        branch_bias = _load(branch_bias_ptr + j, mask)
    scale = _load_scale(scale_ptr, scale_inv_ptr)
    largest = tl.zeros((WIDTH,), tl.float32)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    for i in tl.range(ROWS, num_stages=STAGES):  # prefetches the next STAGES - 1 rows
        row = first_row + i
        offsets = row * C + j
        values = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if branch_ptr is not None:
            values += tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            if branch_bias_ptr is not None:
                values += branch_bias
            rounded = round_bf16(values)
            tl.store(residual_ptr + offsets, rounded, mask=mask)
            values = rounded.to(tl.float32)
        if mean_ptr is not None:
            mean = tl.sum(values) / C
            tl.store(mean_ptr + row, mean)
            values = tl.where(mask, values - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(values * values) / C + eps)
        tl.store(rstd_ptr + row, rstd)
        y = values * rstd * weight
        if mean_ptr is not None:
            y += bias
        largest = tl.maximum(largest, tl.abs(y))  # ignores NaN, as TE does
        tl.store(rowwise_ptr + offsets, (y * scale).to(rowwise_ptr.dtype.element_ty), mask=mask)
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")


@triton.jit
def _norm_backward_kernel(dy_ptr, residual_ptr, mean_ptr, rstd_ptr, weight_ptr, dresidual_ptr, dx_ptr,
                          scale_ptr, amax_ptr, rowwise_ptr, scale_inv_ptr, partial_sums_ptr, N, C,
                          WITH_DBRANCH_BIAS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Stride over the rows. With x̂ = rstd · (x - mean) and g = weight · dy, LayerNorm's gradients are
    dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)), dweight = Σ dy · x̂ and dbias = Σ dy. RMSNorm's have no mean
    and no mean(g). partial_sums (programs, 1 to 3, C): each program's dweight, dbias, dbranch_bias."""
    j = tl.arange(0, WIDTH)
    mask = j < C
    weight = _load(weight_ptr + j, mask)
    if rowwise_ptr is not None:
        scale = _load_scale(scale_ptr, scale_inv_ptr)
        largest = tl.zeros((WIDTH // 8,), tl.float32)
    dweight = tl.zeros((WIDTH,), tl.float32)
    dbias = tl.zeros((WIDTH,), tl.float32)
    dbranch_bias = tl.zeros((WIDTH,), tl.float32)
    programs = tl.num_programs(0)
    first_row = tl.program_id(0).to(tl.int64)
    # prefetches the next STAGES - 1 rows
    for i in tl.range(tl.cdiv(N - tl.program_id(0), programs), num_stages=STAGES):
        row = first_row + i * programs
        offsets = row * C + j
        x = tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            dresidual = tl.load(dresidual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if mean_ptr is not None:
            x = tl.where(mask, x - tl.load(mean_ptr + row), 0.0)
        x *= rstd
        dweight += dy * x
        g = dy * weight
        if mean_ptr is not None:
            dbias += dy
            along_x, mean = two_sums(g * x, g)
            dx = rstd * (g - mean / C - x * (along_x / C))
        else:
            dx = rstd * (g - x * (tl.sum(g * x) / C))
        if dresidual_ptr is not None:
            dx += dresidual
        rounded = round_bf16(dx)
        tl.store(dx_ptr + offsets, rounded, mask=mask)
        dx = tl.where(mask, rounded.to(tl.float32), 0.0)
        if WITH_DBRANCH_BIAS:
            dbranch_bias += dx
        if rowwise_ptr is not None:
            # ignores NaN, as TE does
            largest = tl.maximum(largest, tl.max(tl.reshape(tl.abs(dx), (WIDTH // 8, 8)), 1))
            tl.store(rowwise_ptr + offsets, (dx * scale).to(rowwise_ptr.dtype.element_ty), mask=mask)
    if rowwise_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")
    width = C * (1 + (mean_ptr is not None) + WITH_DBRANCH_BIAS)
    partial_sums_ptr += tl.program_id(0) * width + j
    tl.store(partial_sums_ptr, dweight, mask=mask)
    if mean_ptr is not None:
        tl.store(partial_sums_ptr + C, dbias, mask=mask)
    if WITH_DBRANCH_BIAS:
        tl.store(partial_sums_ptr + width - C, dbranch_bias, mask=mask)


@triton.jit
def _activate(x, bias, up, up_bias, GATED: tl.constexpr):
    x = widen(x)
    if bias is not None:
        x += bias
    y = x * _gate(x, GATED)
    if GATED:
        up = widen(up)
        if bias is not None:
            up += up_bias
        y *= up
    return y


@triton.jit
def _activation_kernel(x_ptr, bias_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, N, D,
                       GATED: tl.constexpr, FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute one tile (ROWS, COLUMNS) of the (N, D) output."""
    tile_columns = tl.cdiv(D, COLUMNS)
    first_row, first_column = (
        tl.program_id(0) // tile_columns * ROWS, tl.program_id(0) % tile_columns * COLUMNS)
    # offsets inside the tile: only the tile's own offset needs 64 bits
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_columns = (first_column + j < D) | FITS
    mask = ((first_row // 4 + i < N // 4) | FITS)[:, None] & in_columns[None, :]
    width = 2 * D if GATED else D
    x_ptr += first_row.to(tl.int64) * width + first_column + 4 * i[:, None] * width + j[None, :]
    x = load_rows(x_ptr, width, mask)
    up = load_rows(x_ptr + D, width, mask) if GATED else x
    bias = _load(bias_ptr + first_column + j, in_columns)[None, :] if bias_ptr is not None else None
    up_bias = (
        _load(bias_ptr + D + first_column + j, in_columns)[None, :]
        if GATED and bias_ptr is not None
        else None
    )
    a = _activate(x[0], bias, up[0], up_bias, GATED)
    b = _activate(x[1], bias, up[1], up_bias, GATED)
    c = _activate(x[2], bias, up[2], up_bias, GATED)
    d = _activate(x[3], bias, up[3], up_bias, GATED)
    if bias_ptr is not None and not FITS:  # outside the tensor, x + bias is the bias and not 0
        a, b = tl.where(mask, a, 0.0), tl.where(mask, b, 0.0)
        c, d = tl.where(mask, c, 0.0), tl.where(mask, d, 0.0)
    tl.atomic_max(amax_ptr, tl.max(abs_max(a, b, c, d, ROWS, COLUMNS)), sem="relaxed")
    scale = _load_scale(scale_ptr, scale_inv_ptr)
    store_fp8(
        a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, D, mask, ROWS, COLUMNS
    )


@triton.jit
def _gelu_backward(dy, x, bias):
    """Return the gradient of x: with gate = sigmoid(2u) of `_gate`, that of x · gate is
    gate + x · gate · (1 - gate) · 2u', and 2u' = 1.596 + 0.214 x²."""
    x = widen(x)
    if bias is not None:
        x += bias
    gate = _gate(x, False)
    return (x * (gate - gate * gate) * (1.5957691216 + 0.2140644486 * (x * x)) + gate) * widen(dy)


@triton.jit
def _swiglu_backward(dy, x, bias, up, up_bias):
    """Return the gradients of x, SiLU's input, and of up, which SiLU(x) is multiplied by."""
    x, up, dy = widen(x), widen(up), widen(dy)
    if bias is not None:
        x, up = x + bias, up + up_bias
    gate = _gate(x, True)
    silu = x * gate
    return (silu * (1.0 - gate) + gate) * dy * up, silu * dy


@triton.jit
def _activation_backward_kernel(dy_ptr, x_ptr, bias_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr,
                                scale_inv_ptr, partial_sums_ptr, N, D, GATED: tl.constexpr,
                                FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Read one tile (ROWS, COLUMNS) of dy (N, D); write that tile of dx, for SwiGLU also the one D columns to
    the right. partial_sums (rows of tiles, D or 2D): dbias of each row of tiles."""
    tile_columns = tl.cdiv(D, COLUMNS)
    tile_row, first_column = tl.program_id(0) // tile_columns, tl.program_id(0) % tile_columns * COLUMNS
    first_row = tile_row * ROWS
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_columns = (first_column + j < D) | FITS
    mask = ((first_row // 4 + i < N // 4) | FITS)[:, None] & in_columns[None, :]
    width = 2 * D if GATED else D
    x_ptr += first_row.to(tl.int64) * width + first_column + 4 * i[:, None] * width + j[None, :]
    x = load_rows(x_ptr, width, mask)
    dy = load_rows(
        dy_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :], D, mask
    )
    bias = _load(bias_ptr + first_column + j, in_columns)[None, :] if bias_ptr is not None else None
    scale = _load_scale(scale_ptr, scale_inv_ptr)
    if GATED:
        up = load_rows(x_ptr + D, width, mask)
        up_bias = (
            _load(bias_ptr + D + first_column + j, in_columns)[None, :] if bias_ptr is not None else None
        )
        a, e = _swiglu_backward(dy[0], x[0], bias, up[0], up_bias)
        b, f = _swiglu_backward(dy[1], x[1], bias, up[1], up_bias)
        c, g = _swiglu_backward(dy[2], x[2], bias, up[2], up_bias)
        d, h = _swiglu_backward(dy[3], x[3], bias, up[3], up_bias)
    else:
        a, b = _gelu_backward(dy[0], x[0], bias), _gelu_backward(dy[1], x[1], bias)
        c, d = _gelu_backward(dy[2], x[2], bias), _gelu_backward(dy[3], x[3], bias)
    # a to d: gradients of x's four rows; e to h: of up's.
    # The stores come before the reduction for the amax: faster here, but more registers in the other kernels
    largest = abs_max(a, b, c, d, ROWS, COLUMNS)
    if GATED:
        largest = tl.maximum(largest, abs_max(e, f, g, h, ROWS, COLUMNS))
        store_fp8(
            e, f, g, h, scale, rowwise_ptr, columnwise_ptr, first_row, D + first_column, N, width, mask,
            ROWS, COLUMNS,
        )
    store_fp8(
        a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, width, mask, ROWS, COLUMNS
    )
    tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")
    if partial_sums_ptr is not None:
        partial_sums_ptr += tile_row * width + first_column + j
        tl.store(partial_sums_ptr, tl.sum((a + b) + (c + d), 0), mask=in_columns)
        if GATED:
            tl.store(partial_sums_ptr + D, tl.sum((e + f) + (g + h), 0), mask=in_columns)


@triton.jit
def _cast_kernel(x_ptr, scale_ptr, amax_ptr, rowwise_ptr, columnwise_ptr, scale_inv_ptr, partial_sums_ptr,
                 N, D, FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantize one tile (ROWS, COLUMNS)."""
    tile_columns = tl.cdiv(D, COLUMNS)
    tile_row, first_column = tl.program_id(0) // tile_columns, tl.program_id(0) % tile_columns * COLUMNS
    first_row = tile_row * ROWS
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    in_columns = (first_column + j < D) | FITS
    mask = ((first_row // 4 + i < N // 4) | FITS)[:, None] & in_columns[None, :]
    x = load_rows(
        x_ptr + first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :], D, mask
    )
    a, b, c, d = widen(x[0]), widen(x[1]), widen(x[2]), widen(x[3])
    tl.atomic_max(amax_ptr, tl.max(abs_max(a, b, c, d, ROWS, COLUMNS)), sem="relaxed")
    scale = _load_scale(scale_ptr, scale_inv_ptr)
    store_fp8(
        a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, D, mask, ROWS, COLUMNS
    )
    if partial_sums_ptr is not None:
        out = partial_sums_ptr + tile_row * D + first_column + j
        tl.store(out, tl.sum((a + b) + (c + d), 0), mask=in_columns)


@triton.jit
def _cast_all_kernel(table_ptr, tiles_ptr, FP8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantize one tile (ROWS, COLUMNS) of one tensor.

    tiles (programs, 2) int32: row of the table, tile of that tensor. table (tensors, 8) int64: the addresses
    of x, rowwise data, columnwise data, scale_inv, scale and amax, then N and D."""
    row_ptr = table_ptr + 8 * tl.load(tiles_ptr + 2 * tl.program_id(0))
    tile = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    x_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.bfloat16)), 16)
    rowwise_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(FP8)), 16)
    columnwise_ptr = tl.multiple_of(tl.load(row_ptr + 2).to(tl.pointer_type(FP8)), 16)
    N = tl.multiple_of(tl.load(row_ptr + 6).to(tl.int32), 16)
    D = tl.multiple_of(tl.load(row_ptr + 7).to(tl.int32), 16)
    tile_columns = tl.cdiv(D, COLUMNS)
    first_row, first_column = tile // tile_columns * ROWS, tile % tile_columns * COLUMNS
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
        tl.load(row_ptr + 5).to(tl.pointer_type(tl.float32)), tl.max(abs_max(a, b, c, d, ROWS, COLUMNS)),
        sem="relaxed",
    )
    store_fp8(
        a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, D, mask, ROWS, COLUMNS
    )


@triton.jit
def _reduce_rows_kernel(x_ptr, total_ptr, P, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum COLUMNS columns of x (P, W) over its rows, ROWS rows at a time."""
    i, j = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(0, P, ROWS):
        mask = (row + i < P)[:, None] & (j < W)[None, :]
        pointers = x_ptr + (row + i)[:, None] * W + j[None, :]
        total += tl.load(pointers, mask=mask, other=0.0)
    tl.store(total_ptr + j, tl.sum(total, 0).to(total_ptr.dtype.element_ty), mask=j < W)
