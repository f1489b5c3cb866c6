"""Triton kernels of casts.py, and device functions that loss.py uses as well.

A thread holds the same columns of four adjacent rows. It stores rowwise data directly, and packs a column's
four FP8 values into one 32-bit number for the transpose. (Triton 3.6 transposes single bytes incorrectly on
Hopper.) Inline PTX takes one or two instructions where Triton takes several.
"""

import triton
import triton.language as tl

# ---------------------------------------------------------------- device functions


@triton.jit
def _reciprocal(x):
    """Return 1/x in one instruction, with an error of at most one unit in the last place."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def round_bf16(x):
    """Round float32 to BF16, two values per instruction."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _gate(x, IS_SILU: tl.constexpr):
    """Return activation(x) / x, a sigmoid for SiLU and GELU.

    SiLU is x / (1 + exp(-x)). GELU is x · (1 + tanh u) / 2 with u = 0.798 x (1 + 0.0447 x²), which is
    x / (1 + exp(-2u)). The constants are divided by log(2), since the GPU's instruction is 2^x."""
    exponent = -1.4426950409 * x if IS_SILU else x * (-2.3022081958 - 0.1029432394 * x * x)
    return _reciprocal(1.0 + tl.exp2(exponent))


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def widen(x):
    """Convert BF16 to float32, two values per instruction. With `x.to(tl.float32)`, Triton converts the
    layout first, and computes what follows once per layout."""
    shifts: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return tl.inline_asm_elementwise(shifts, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


PACK_E5M2 = tl.constexpr("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
                         "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;mov.b32 $0, {low, high};}")
PACK_E4M3 = tl.constexpr(PACK_E5M2.value.replace("e5m2", "e4m3"))


@triton.jit
def _pack_fp8(a, b, c, d, FP8_DTYPE: tl.constexpr):
    """Cast four values to FP8 and pack them into 32 bits, a lowest. Saturates; rounds ties to even."""
    pack: tl.constexpr = PACK_E5M2 if FP8_DTYPE == tl.float8e5 else PACK_E4M3
    return tl.inline_asm_elementwise(pack, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def load_rows(pointer, stride, mask, other: tl.constexpr = 0.0):
    """Load four adjacent rows at each pointer, before any store: the compiler moves no load across one."""
    a = tl.load(pointer, mask=mask, other=other)
    b = tl.load(pointer + stride, mask=mask, other=other)
    c = tl.load(pointer + 2 * stride, mask=mask, other=other)
    d = tl.load(pointer + 3 * stride, mask=mask, other=other)
    return a, b, c, d


@triton.jit
def tile_corner(tile, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first row and column of a tile (ROWS, COLUMNS) of a matrix with D columns."""
    tile_columns = tl.cdiv(D, COLUMNS)
    return tile // tile_columns * ROWS, tile % tile_columns * COLUMNS


@triton.jit
def tile_offsets(first_row, first_column, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of every fourth row of a tile. Only the tile's own offset needs 64 bits."""
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    return first_row.to(tl.int64) * D + first_column + 4 * i[:, None] * D + j[None, :]


@triton.jit
def tile_mask(first_row, first_column, N, D, FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return which of these elements, and which columns, are in the matrix (N, D): all if FITS, which the
    compiler knows."""
    in_rows = (first_row // 4 + tl.arange(0, ROWS // 4) < N // 4) | FITS
    in_columns = (first_column + tl.arange(0, COLUMNS) < D) | FITS
    return in_rows[:, None] & in_columns[None, :], in_columns


@triton.jit
def abs_max(a, b, c, d):
    """Return the largest magnitude over four rows and every eight columns, in one thread. Ignores NaN."""
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return tl.max(tl.reshape(largest, (a.shape[0], a.shape[1] // 8, 8)), 2)


@triton.jit
def store_fp8(a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, D, mask):
    """Quantize a tile of the (N, D) output and store it, rowwise and transposed.

    a, b, c, d: (ROWS / 4, COLUMNS) float32: rows 0, 4, 8, … of the tile, rows 1, 5, 9, …, and so on.
    columnwise_ptr None: store no transposed data."""
    i, j = tl.arange(0, a.shape[0]), tl.arange(0, a.shape[1])
    fp8_dtype: tl.constexpr = rowwise_ptr.dtype.element_ty
    a, b, c, d = a * scale, b * scale, c * scale, d * scale
    # rowwise
    out = rowwise_ptr + tile_offsets(first_row, first_column, D, 4 * a.shape[0], a.shape[1])
    tl.store(out, a.to(fp8_dtype), mask=mask)
    tl.store(out + D, b.to(fp8_dtype), mask=mask)
    tl.store(out + 2 * D, c.to(fp8_dtype), mask=mask)
    tl.store(out + 3 * D, d.to(fp8_dtype), mask=mask)
    # transposed: four rows of a column are 32 adjacent bits
    if columnwise_ptr is not None:
        corner = (columnwise_ptr + (first_column * N.to(tl.int64) + first_row)).to(tl.pointer_type(tl.int32))
        packed = _pack_fp8(a, b, c, d, fp8_dtype)
        tl.store(corner + j[:, None] * (N // 4) + i[None, :], tl.trans(packed), mask=tl.trans(mask))


@triton.jit
def store_bf16(a, b, c, d, out_ptr, first_row, first_column, D, mask):
    """Store a tile of the (N, D) output in BF16. a, b, c, d: as in `store_fp8`."""
    out = out_ptr + tile_offsets(first_row, first_column, D, 4 * a.shape[0], a.shape[1])
    tl.store(out, round_bf16(a), mask=mask)
    tl.store(out + D, round_bf16(b), mask=mask)
    tl.store(out + 2 * D, round_bf16(c), mask=mask)
    tl.store(out + 3 * D, round_bf16(d), mask=mask)


@triton.jit
def load_scale(scale_ptr, scale_inv_ptr):
    """Load the scale; the first program also stores its reciprocal."""
    scale = tl.load(scale_ptr)
    if tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    return scale


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def two_sums(a, b):
    """Sum a and b in one reduction, with one synchronization of the threads."""
    return tl.reduce((a, b), 0, _add_pairs)


# ---------------------------------------------------------------- kernels

@triton.jit
def _transpose_kernel(x_ptr, out_ptr, N, D, FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Transpose one tile (ROWS, COLUMNS) of bytes, four rows packed into 32 bits. x and out are in FP8."""
    x_ptr = x_ptr.to(tl.pointer_type(tl.uint8))
    out_ptr = out_ptr.to(tl.pointer_type(tl.int32))
    first_row, first_column = tile_corner(tl.program_id(0), D, ROWS, COLUMNS)
    i, j = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    mask, _ = tile_mask(first_row, first_column, N, D, FITS, ROWS, COLUMNS)
    x_ptr += tile_offsets(first_row, first_column, D, ROWS, COLUMNS)
    a, b, c, d = load_rows(x_ptr, D, mask, 0)
    # one 32-bit number per column: the bytes of four adjacent rows, the first one lowest
    packed = a.to(tl.int32) | (b.to(tl.int32) << 8) | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
    out_ptr += first_column * (N.to(tl.int64) // 4) + first_row // 4
    tl.store(out_ptr + j[:, None] * (N // 4) + i[None, :], tl.trans(packed), mask=tl.trans(mask))


@triton.jit
def _norm_kernel(x_ptr, branch_ptr, weight_ptr, bias_ptr, residual_ptr, mean_ptr, rstd_ptr, scale_ptr,
                 amax_ptr, y_ptr, scale_inv_ptr, C, eps,
                 ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Add and normalize ROWS rows, one at a time. y: (N, C) FP8, or BF16 if scale is None."""
    j = tl.arange(0, WIDTH)
    mask = j < C
    weight = _load(weight_ptr + j, mask)
    if mean_ptr is not None:
        bias = _load(bias_ptr + j, mask)
    if scale_ptr is not None:
        scale = load_scale(scale_ptr, scale_inv_ptr)
        largest = tl.zeros((WIDTH,), tl.float32)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    for i in tl.range(ROWS, num_stages=STAGES):  # prefetches the next STAGES - 1 rows
        row = first_row + i
        offsets = row * C + j
        values = _load(x_ptr + offsets, mask)
        if branch_ptr is not None:  # residual = x + branch, rounded to BF16
            values += _load(branch_ptr + offsets, mask)
            rounded = round_bf16(values)
            tl.store(residual_ptr + offsets, rounded, mask=mask)
            values = rounded.to(tl.float32)
        if mean_ptr is not None:  # LayerNorm
            mean = tl.sum(values) / C
            tl.store(mean_ptr + row, mean)
            values = tl.where(mask, values - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(values * values) / C + eps)
        tl.store(rstd_ptr + row, rstd)
        y = values * rstd * weight
        if mean_ptr is not None:
            y += bias
        if scale_ptr is not None:  # quantize
            largest = tl.maximum(largest, tl.abs(y))  # ignores NaN, as TE does
            tl.store(y_ptr + offsets, (y * scale).to(y_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(y_ptr + offsets, round_bf16(y), mask=mask)
    if scale_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")


@triton.jit
def _norm_backward_kernel(dy_ptr, residual_ptr, mean_ptr, rstd_ptr, weight_ptr, dresidual_ptr, dx_ptr,
                          scale_ptr, amax_ptr, rowwise_ptr, scale_inv_ptr, partial_sums_ptr, N, C,
                          WITH_DBRANCH_BIAS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Stride over the rows; see `casts.norm_backward`. partial_sums (programs, 1 to 3, C): each program's
    dweight = Σ dy · x̂, dbias = Σ dy and dbranch_bias = Σ dx."""
    j = tl.arange(0, WIDTH)
    mask = j < C
    weight = _load(weight_ptr + j, mask)
    if scale_ptr is not None:
        scale = load_scale(scale_ptr, scale_inv_ptr)
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
        x = _load(residual_ptr + offsets, mask)
        dy = _load(dy_ptr + offsets, mask)
        if dresidual_ptr is not None:
            dresidual = _load(dresidual_ptr + offsets, mask)
        rstd = tl.load(rstd_ptr + row)
        if mean_ptr is not None:
            x = tl.where(mask, x - tl.load(mean_ptr + row), 0.0)
        x *= rstd  # x̂, normalized
        dweight += dy * x
        # dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)) + dresidual
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
        if scale_ptr is not None:  # quantize dx as the branch's gradient
            # ignores NaN, as TE does
            largest = tl.maximum(largest, tl.max(tl.reshape(tl.abs(dx), (WIDTH // 8, 8)), 1))
            tl.store(rowwise_ptr + offsets, (dx * scale).to(rowwise_ptr.dtype.element_ty), mask=mask)
    if scale_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")
    # this program's rows of partial_sums
    width = C
    if mean_ptr is not None:
        width += C
    if WITH_DBRANCH_BIAS:
        width += C
    partial_sums_ptr += tl.program_id(0) * width + j
    tl.store(partial_sums_ptr, dweight, mask=mask)
    if mean_ptr is not None:
        tl.store(partial_sums_ptr + C, dbias, mask=mask)
    if WITH_DBRANCH_BIAS:
        tl.store(partial_sums_ptr + width - C, dbranch_bias, mask=mask)  # the last one


@triton.jit
def _value_and_slope(x, KIND: tl.constexpr):
    """Return activation(x), and its derivative.

    GELU is x · gate with gate = sigmoid(2u) of `_gate`; the derivative is
    gate + x · gate · (1 - gate) · 2u', and 2u' = 1.596 + 0.214 x²."""
    if KIND == "gelu":
        gate = _gate(x, False)
        value = x * gate
        slope = x * (gate - gate * gate) * (1.5957691216 + 0.2140644486 * (x * x)) + gate
    elif KIND == "silu":
        gate = _gate(x, True)
        value = x * gate
        slope = value * (1.0 - gate) + gate
    elif KIND == "identity":
        value = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    else:
        value = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        slope = tl.where(x <= 0.0, 0.0, 1.0)  # of NaN as in PyTorch
        if KIND == "srelu":
            slope = tl.where(x <= 0.0, 0.0, 2.0 * x)
            value *= value
    return value, slope


@triton.jit
def _load_input(x_ptr, stride, mask):
    """Load four adjacent rows in float32."""
    a, b, c, d = load_rows(x_ptr, stride, mask)
    return widen(a), widen(b), widen(c), widen(d)


@triton.jit
def _activate(x, up, KIND: tl.constexpr, GATED: tl.constexpr):
    y, _ = _value_and_slope(x, KIND)  # the compiler drops the slope
    return y * up if GATED else y


@triton.jit
def _activation_kernel(x_ptr, scale_ptr, amax_ptr, y_ptr, columnwise_ptr, scale_inv_ptr, partial_sums_ptr,
                       N, D, KIND: tl.constexpr, GATED: tl.constexpr, FITS: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute one tile (ROWS, COLUMNS) of the (N, D) output; KIND "identity" is a cast.

    y: the output in FP8, columnwise: its transpose. scale None: y is in BF16, and has no transpose.
    partial_sums (rows of tiles, D) or None: the output summed over each row of tiles."""
    first_row, first_column = tile_corner(tl.program_id(0), D, ROWS, COLUMNS)
    mask, in_columns = tile_mask(first_row, first_column, N, D, FITS, ROWS, COLUMNS)
    width = 2 * D if GATED else D
    x_ptr += tile_offsets(first_row, first_column, width, ROWS, COLUMNS)
    x = _load_input(x_ptr, width, mask)
    up = _load_input(x_ptr + D, width, mask) if GATED else x
    # a to d: four adjacent rows of the output
    a = _activate(x[0], up[0], KIND, GATED)
    b = _activate(x[1], up[1], KIND, GATED)
    c = _activate(x[2], up[2], KIND, GATED)
    d = _activate(x[3], up[3], KIND, GATED)
    if scale_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(abs_max(a, b, c, d)), sem="relaxed")
        scale = load_scale(scale_ptr, scale_inv_ptr)
        store_fp8(a, b, c, d, scale, y_ptr, columnwise_ptr, first_row, first_column, N, D, mask)
    else:
        store_bf16(a, b, c, d, y_ptr, first_row, first_column, D, mask)
    if partial_sums_ptr is not None:
        out = partial_sums_ptr + first_row // ROWS * D + first_column + tl.arange(0, COLUMNS)
        tl.store(out, tl.sum((a + b) + (c + d), 0), mask=in_columns)


@triton.jit
def _activation_backward(dy, x, up, KIND: tl.constexpr, GATED: tl.constexpr):
    """Return the gradients of x, the activation's input, and of up, the factor of activation(x) if GATED."""
    value, slope = _value_and_slope(x, KIND)
    dx = slope * widen(dy)
    dup = value * widen(dy)
    if GATED:
        dx *= up
    return dx, dup


@triton.jit
def _activation_backward_kernel(dy_ptr, x_ptr, scale_ptr, amax_ptr, dx_ptr, columnwise_ptr, scale_inv_ptr,
                                partial_sums_ptr, N, D, KIND: tl.constexpr, GATED: tl.constexpr,
                                FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Read one tile (ROWS, COLUMNS) of dy (N, D); write that tile of dx, gated also the one D columns to
    the right. dx and columnwise: in FP8 and transposed; scale None: dx is in BF16, and has no transpose.
    partial_sums (rows of tiles, D or 2D): dbias of each row of tiles."""
    first_row, first_column = tile_corner(tl.program_id(0), D, ROWS, COLUMNS)
    mask, in_columns = tile_mask(first_row, first_column, N, D, FITS, ROWS, COLUMNS)
    width = 2 * D if GATED else D
    x_ptr += tile_offsets(first_row, first_column, width, ROWS, COLUMNS)
    x = _load_input(x_ptr, width, mask)
    dy_ptr += tile_offsets(first_row, first_column, D, ROWS, COLUMNS)
    dy = load_rows(dy_ptr, D, mask)
    up = _load_input(x_ptr + D, width, mask) if GATED else x
    if scale_ptr is not None:
        scale = load_scale(scale_ptr, scale_inv_ptr)
    dx0, dup0 = _activation_backward(dy[0], x[0], up[0], KIND, GATED)
    dx1, dup1 = _activation_backward(dy[1], x[1], up[1], KIND, GATED)
    dx2, dup2 = _activation_backward(dy[2], x[2], up[2], KIND, GATED)
    dx3, dup3 = _activation_backward(dy[3], x[3], up[3], KIND, GATED)
    if scale_ptr is not None:
        # The stores come before the reduction for the amax: faster here, more registers in the other kernels
        largest = abs_max(dx0, dx1, dx2, dx3)
        if GATED:
            largest = tl.maximum(largest, abs_max(dup0, dup1, dup2, dup3))
            store_fp8(dup0, dup1, dup2, dup3, scale, dx_ptr, columnwise_ptr, first_row, D + first_column, N,
                      width, mask)
        store_fp8(dx0, dx1, dx2, dx3, scale, dx_ptr, columnwise_ptr, first_row, first_column, N, width, mask)
        tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")
    else:
        store_bf16(dx0, dx1, dx2, dx3, dx_ptr, first_row, first_column, width, mask)
        if GATED:
            store_bf16(dup0, dup1, dup2, dup3, dx_ptr, first_row, D + first_column, width, mask)
    if partial_sums_ptr is not None:
        partial_sums_ptr += first_row // ROWS * width + first_column + tl.arange(0, COLUMNS)
        tl.store(partial_sums_ptr, tl.sum((dx0 + dx1) + (dx2 + dx3), 0), mask=in_columns)
        if GATED:
            tl.store(partial_sums_ptr + D, tl.sum((dup0 + dup1) + (dup2 + dup3), 0), mask=in_columns)


@triton.jit
def _cast_all_kernel(table_ptr, tiles_ptr, FP8_DTYPE: tl.constexpr, TRANSPOSES: tl.constexpr,
                     ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantize one tile (ROWS, COLUMNS) of one tensor.

    tiles (programs, 2) int32: row of the table, tile of that tensor. table (tensors, 8) int64: the addresses
    of x, rowwise data, columnwise data, scale_inv, scale and amax, then N and D."""
    row_ptr = table_ptr + 8 * tl.load(tiles_ptr + 2 * tl.program_id(0))
    tile = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    # a row of the table. multiple_of: addresses and sizes are, so the compiler may load 16 bytes at once
    x_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.bfloat16)), 16)
    rowwise_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(FP8_DTYPE)), 16)
    if TRANSPOSES:
        columnwise_ptr = tl.multiple_of(tl.load(row_ptr + 2).to(tl.pointer_type(FP8_DTYPE)), 16)
    else:
        columnwise_ptr = None
    N = tl.multiple_of(tl.load(row_ptr + 6).to(tl.int32), 16)
    D = tl.multiple_of(tl.load(row_ptr + 7).to(tl.int32), 16)
    first_row, first_column = tile_corner(tile, D, ROWS, COLUMNS)
    mask, _ = tile_mask(first_row, first_column, N, D, False, ROWS, COLUMNS)
    x = load_rows(x_ptr + tile_offsets(first_row, first_column, D, ROWS, COLUMNS), D, mask)
    a, b, c, d = widen(x[0]), widen(x[1]), widen(x[2]), widen(x[3])
    scale_inv_ptr = tl.load(row_ptr + 3).to(tl.pointer_type(tl.float32))
    scale_ptr = tl.load(row_ptr + 4).to(tl.pointer_type(tl.float32))
    amax_ptr = tl.load(row_ptr + 5).to(tl.pointer_type(tl.float32))
    scale = tl.load(scale_ptr)
    if tile == 0:
        tl.store(scale_inv_ptr, tl.div_rn(1.0, scale))
    tl.atomic_max(amax_ptr, tl.max(abs_max(a, b, c, d)), sem="relaxed")
    store_fp8(a, b, c, d, scale, rowwise_ptr, columnwise_ptr, first_row, first_column, N, D, mask)


@triton.jit
def _reduce_rows_kernel(x_ptr, total_ptr, P, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum COLUMNS columns of x (P, W) over its rows, ROWS rows at a time."""
    i = tl.arange(0, ROWS)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(0, P, ROWS):
        mask = (row + i < P)[:, None] & (j < W)[None, :]
        pointers = x_ptr + (row + i)[:, None] * W + j[None, :]
        total += tl.load(pointers, mask=mask, other=0.0)
    tl.store(total_ptr + j, tl.sum(total, 0).to(total_ptr.dtype.element_ty), mask=j < W)
