"""Fused norm, activation and cast between the GEMMs of an FP8 GPT: each writes FP8 in both layouts.

Use them under delayed scaling, where the scale is known before the values are; fused.py shows how.

`quantization`, a `Quantization`, says how to quantize; an FP8 tensor is an `FP8Data`: see fp8.py.

All of these operations are bound by memory, so the design counts reads and writes:

- Hopper's FP8 GEMMs need K contiguous in both operands, so wgrad needs transposed copies. Each kernel writes
  both at once. Transformer Engine (TE) reads a tensor again to cast it, and again to transpose it.
- A norm also adds the residual, and its backward kernel sums and casts the residual's gradient. A GEMM adds
  its bias itself; dbias is summed over rows where the gradient of the GEMM's output is written.
- A kernel that holds whole rows, as a norm needs, cannot write a transposed copy fast. So the norms write
  rowwise data, and a second kernel transposes it, mostly from the L2 cache.

References: LayerNorm (Ba et al. 2016); RMSNorm (Zhang and Sennrich 2019); GELU (Hendrycks and Gimpel 2016);
SwiGLU (Shazeer 2020); ReLU² (So et al. 2021).
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl

from fast_kernels import cast_kernels as kernels
from fast_kernels.fp8 import FP8Data, as_arguments
from fast_kernels.launch import Launch, per_shape
from fast_kernels.library import (
    addresses_of,
    ceil_div,
    check_aligned,
    check_shape,
    device_tables,
    is_fake,
    next_power_of_2,
    operation,
)

# A program's tile. Its width gives 16-byte accesses in both layouts. It and `_norm_sizes` were the fastest
# tried on an H200.
TILE = dict(ROWS=64, COLUMNS=64, num_warps=4)
TRANSPOSE_TILE = dict(ROWS=128, COLUMNS=128, num_warps=4)
DBIAS_TILE = dict(TILE, ROWS=128)  # of kernels that also write partial sums: one row for each row of tiles
SMS = 132  # of a Hopper GPU; a norm's backward kernel writes one row of partial sums per program
MAX_WIDTH = 16384  # of the residual: a norm kernel holds whole rows
TRITON_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
# Transformer Engine's names; a gated activation reads twice as many columns
GATED = {"geglu": "gelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
UNGATED = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu}
ACTIVATIONS = (*UNGATED, *GATED)


# ---------------------------------------------------------------- the operations in plain PyTorch

def quantize_reference(x, quantization):
    """Return x (N, D) as an FP8 tensor, and raise amax."""
    scale, amax, fp8_dtype = quantization
    amax.copy_(torch.maximum(amax, x.nan_to_num(nan=0.0, posinf=float("inf")).abs().max()))
    fp8_max = torch.finfo(fp8_dtype).max
    rowwise = (x.float() * scale).clamp(-fp8_max, fp8_max).to(fp8_dtype)
    return FP8Data(rowwise, rowwise.T.contiguous(), scale.reciprocal().view(1))


def norm_reference(x, branch, weight, bias, eps, quantization):
    """`norm`, in float64."""
    residual, y, mean, rstd = norm_bf16_reference(x, branch, weight, bias, eps)
    return residual, quantize_reference(y, quantization), mean, rstd


def norm_bf16_reference(x, branch, weight, bias, eps):
    """`norm_bf16`, in float64; y is not rounded to BF16."""
    residual = x
    if branch is not None:
        residual = (x.float() + branch).bfloat16()
    mean, centered = None, residual.double()
    if bias is not None:  # LayerNorm
        mean = centered.mean(1)
        centered = centered - mean[:, None]
    rstd = (centered.square().mean(1) + eps).rsqrt()
    y = centered * rstd[:, None] * weight
    if bias is not None:
        y += bias
    return residual, y, mean, rstd


class NormGradients(NamedTuple):
    """What `norm_backward` returns."""

    dx: torch.Tensor  # (N, C) BF16, the gradient of x and of branch
    fp8_dx: FP8Data | None  # quantized, for the GEMMs that computed branch
    dbranch_bias: torch.Tensor | None  # (C,)
    dweight: torch.Tensor  # (C,)
    dbias: torch.Tensor | None  # (C,); None: RMSNorm


def norm_backward_reference(dy, residual, mean, rstd, weight, dresidual, quantization=None,
                            with_dbranch_bias=False):
    """`norm_backward`, in float64; dx is not rounded to BF16, but its FP8 tensor is of the rounded values."""
    dy, centered = dy.double(), residual.double()
    if mean is not None:  # LayerNorm
        centered = centered - mean[:, None]
    normed = centered * rstd[:, None]
    g = dy * weight
    dx, dbias = g, None
    if mean is not None:
        dx = dx - g.mean(1, keepdim=True)
        dbias = dy.sum(0)
    dx = rstd[:, None] * (dx - normed * (g * normed).mean(1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual
    rounded = dx.bfloat16()
    fp8_dx = dbranch_bias = None
    if quantization is not None:
        fp8_dx = quantize_reference(rounded, quantization)
    if with_dbranch_bias:
        dbranch_bias = rounded.double().sum(0)
    dweight = (dy * normed).sum(0)
    return NormGradients(dx, fp8_dx, dbranch_bias, dweight, dbias)


def activation_reference(activation, x):
    """Apply an activation in PyTorch. A gated one takes [gate, up] in the last dimension."""
    if activation in UNGATED:
        return UNGATED[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return UNGATED[GATED[activation]](gate) * up


def activate_reference(activation, x, quantization):
    """`activate`, in float64."""
    return quantize_reference(activate_bf16_reference(activation, x), quantization)


def activate_bf16_reference(activation, x):
    """`activate_bf16`, in float64."""
    return activation_reference(activation, x.double())


def activate_backward_reference(activation, dy, x, quantization, with_dbias=False):
    """`activate_backward`, in float64."""
    dx, dbias = activate_backward_bf16_reference(activation, dy, x, with_dbias)
    return quantize_reference(dx, quantization), dbias


def activate_backward_bf16_reference(activation, dy, x, with_dbias=False):
    """`activate_backward_bf16`, in float64."""
    with torch.enable_grad():
        x = x.double().detach().requires_grad_()
        dx, = torch.autograd.grad(activation_reference(activation, x), x, dy.double())
    return dx, dx.sum(0) if with_dbias else None


# ---------------------------------------------------------------- the operations

def norm(x, branch, weight, bias, eps, quantization):
    """Add a branch to the residual, normalize the sum, and quantize the result.

    y = x̂ · weight + bias of residual = x + branch, with x̂ = (residual - mean) · rstd.

    Args:
        x, branch: (N, C) BF16, N a multiple of 16. branch None: the residual is x itself.
        weight, bias: the norm's, (C,) BF16. bias None: RMSNorm, without a mean.

    Returns:
        residual (N, C); y as an FP8 tensor; mean (None for RMSNorm) and rstd, (N,) float32.
    """
    residual, rowwise, columnwise, scale_inv, mean, rstd = _checked_norm(
        x, branch, weight, bias, eps, quantization)
    return residual, FP8Data(rowwise, columnwise, scale_inv), mean, rstd


def norm_bf16(x, branch, weight, bias, eps):
    """`norm` without FP8: returns residual and y (N, C) BF16, mean (None for RMSNorm) and rstd."""
    residual, y, _, _, mean, rstd = _checked_norm(
        x, branch, weight, bias, eps, quantization=None)
    return residual, y, mean, rstd


def _checked_norm(x, branch, weight, bias, eps, quantization):
    check_input("fast_kernels.casts.norm: x", x, MAX_WIDTH)
    check_shape("fast_kernels.casts.norm", x.shape, x.dtype, branch=branch)
    check_shape("fast_kernels.casts.norm", x.shape[1:], weight=weight, bias=bias)
    residual, rowwise, columnwise, scale_inv, mean, rstd = _norm(
        x, branch, weight, bias, eps, *as_arguments(quantization))
    if branch is None:
        residual = x
    if bias is None:
        mean = None
    return residual, rowwise, columnwise, scale_inv, mean, rstd


@operation(
    "(Tensor x, Tensor? branch, Tensor weight, Tensor? bias, float eps, Tensor? scale, Tensor(a!)? amax, "
    "ScalarType? fp8_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def _norm(x, branch, weight, bias, eps, scale, amax, fp8_dtype):
    rows, columns = x.shape
    residual = x.new_empty(0) if branch is None else torch.empty_like(x)
    rowwise, columnwise, scale_inv = _allocate_output(x, rows, columns, fp8_dtype)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = rstd.new_empty(0) if bias is None else torch.empty_like(rstd)
    if not is_fake(x):
        mean_out = None if bias is None else mean  # None: the kernel computes an RMSNorm
        _norm_launch(rows, columns, eps).run(
            x, branch, weight, bias, residual, mean_out, rstd, scale, amax, rowwise, scale_inv)
        if scale is not None:
            transpose(rowwise, columnwise)
    return residual, rowwise, columnwise, scale_inv, mean, rstd


@per_shape
def _norm_launch(rows, columns, eps):
    sizes = _norm_sizes(rows, columns)
    programs = rows // sizes["ROWS"]
    return Launch(kernels._norm_kernel, (programs,), C=columns, eps=eps, **sizes)


def norm_backward(dy, residual, mean, rstd, weight, dresidual, quantization=None, with_dbranch_bias=False):
    """Compute the gradients of `norm`'s inputs, and quantize that of the branch: NormGradients.

    dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)) + dresidual with g = dy · weight; RMSNorm has no mean(g).

    Args:
        dy: (N, C) BF16, gradient of y.
        dresidual: (N, C) BF16, gradient from the other uses of the residual, or None.
        quantization: how dx is quantized, or None.
    """
    check_input("fast_kernels.casts.norm_backward: dy", dy, MAX_WIDTH)
    check_shape(
        "fast_kernels.casts.norm_backward", dy.shape, dy.dtype, residual=residual, dresidual=dresidual)
    dx, rowwise, columnwise, scale_inv, totals = _norm_backward(
        dy, residual, mean, rstd, weight, dresidual, *as_arguments(quantization), with_dbranch_bias)
    fp8_dx = None if quantization is None else FP8Data(rowwise, columnwise, scale_inv)
    dweight, *others = totals.unbind()
    dbias = None if mean is None else others[0]
    dbranch_bias = others[-1] if with_dbranch_bias else None
    return NormGradients(dx, fp8_dx, dbranch_bias, dweight, dbias)


@operation(
    "(Tensor dy, Tensor residual, Tensor? mean, Tensor rstd, Tensor weight, Tensor? dresidual, "
    "Tensor? scale, Tensor(a!)? amax, ScalarType? fp8_dtype, bool with_dbranch_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def _norm_backward(dy, residual, mean, rstd, weight, dresidual, scale, amax, fp8_dtype, with_dbranch_bias):
    rows, columns = dy.shape
    dx = torch.empty_like(dy)
    if scale is None:
        rowwise, columnwise, scale_inv = dy.new_empty(0), dy.new_empty(0), dy.new_empty(0)
    else:
        rowwise, columnwise, scale_inv = allocate_fp8(dy, rows, columns, fp8_dtype)
    sums = 1 + (mean is not None) + with_dbranch_bias  # dweight, dbias (LayerNorm), dbranch_bias
    totals = weight.new_empty(sums, columns)
    if not is_fake(dy):
        launch = _norm_backward_launch(rows, columns, with_dbranch_bias)
        programs, = launch.grid
        partial_sums = dy.new_empty(programs, sums, columns, dtype=torch.float32)
        launch.run(
            dy, residual, mean, rstd, weight, dresidual, dx, scale, amax, rowwise, scale_inv, partial_sums)
        reduce_rows(partial_sums, totals)
        if scale is not None:
            transpose(rowwise, columnwise)
    return dx, rowwise, columnwise, scale_inv, totals


@per_shape
def _norm_backward_launch(rows, columns, with_dbranch_bias):
    programs, sizes = _norm_backward_sizes(rows, columns)
    return Launch(
        kernels._norm_backward_kernel, (programs,), N=rows, C=columns, WITH_DBRANCH_BIAS=with_dbranch_bias,
        **sizes)


def activate(activation, x, quantization):
    """Compute activation(x) as an FP8 tensor (N, D).

    A gated activation is f(gate) · up, where the rows of x hold gate, then up.

    Args:
        activation: gelu (tanh approximation), relu, srelu (ReLU²), silu; gated geglu, reglu, sreglu, swiglu.
        x: BF16, (N, D), or (N, 2D) for a gated activation.
    """
    check_activation("fast_kernels.casts.activate", activation, x)
    return FP8Data(*_activate(activation, x, *quantization))


def activate_bf16(activation, x):
    """`activate` without FP8: returns activation(x), (N, D) BF16."""
    check_activation("fast_kernels.casts.activate_bf16", activation, x)
    y, _, _ = _activate(activation, x, *as_arguments(quantization=None))
    return y


@operation(
    "(str activation, Tensor x, Tensor? scale, Tensor(a!)? amax, ScalarType? fp8_dtype) "
    "-> (Tensor, Tensor, Tensor)")
def _activate(activation, x, scale, amax, fp8_dtype):
    rows, columns = _output_shape(activation, x)
    rowwise, columnwise, scale_inv = _allocate_output(x, rows, columns, fp8_dtype)
    if not is_fake(x):
        _activation_launch(activation, rows, columns, with_dbias=False).run(
            x, scale, amax, rowwise, columnwise, scale_inv, None)
    return rowwise, columnwise, scale_inv


@per_shape
def _activation_launch(activation, rows, columns, with_dbias):
    """with_dbias: write partial sums of x. activation "identity": cast x."""
    programs, options = _tile(DBIAS_TILE if with_dbias else TILE, rows, columns)
    return Launch(
        kernels._activation_kernel, (programs,), N=rows, D=columns, KIND=GATED.get(activation, activation),
        GATED=activation in GATED, **options)


def activate_backward(activation, dy, x, quantization, with_dbias=False):
    """Compute the gradient of `activate`'s input: dx as an FP8 tensor, and dbias or None.

    dx = dy · f'(x); gated, dx holds dy · up · f'(gate), then dy · f(gate).

    Args:
        dy: (N, D) BF16, the gradient of its output.
        x: that of `activate`.
        quantization: of dx.
        with_dbias: also sum dx over its rows, the gradient of the bias of the GEMM that computed x.
    """
    rowwise, columnwise, scale_inv, dbias = _checked_activate_backward(
        activation, dy, x, quantization, with_dbias)
    return FP8Data(rowwise, columnwise, scale_inv), dbias


def activate_backward_bf16(activation, dy, x, with_dbias=False):
    """`activate_backward` without FP8: returns dx in BF16, and dbias or None."""
    dx, _, _, dbias = _checked_activate_backward(activation, dy, x, None, with_dbias)
    return dx, dbias


def _checked_activate_backward(activation, dy, x, quantization, with_dbias):
    check_activation("fast_kernels.casts.activate_backward", activation, x)
    output_shape = _output_shape(activation, x)
    check_shape("fast_kernels.casts.activate_backward", output_shape, torch.bfloat16, dy=dy)
    rowwise, columnwise, scale_inv, dbias = _activate_backward(
        activation, dy, x, *as_arguments(quantization), with_dbias)
    if not with_dbias:
        dbias = None
    return rowwise, columnwise, scale_inv, dbias


@operation(
    "(str activation, Tensor dy, Tensor x, Tensor? scale, Tensor(a!)? amax, ScalarType? fp8_dtype, "
    "bool with_dbias) -> (Tensor, Tensor, Tensor, Tensor)")
def _activate_backward(activation, dy, x, scale, amax, fp8_dtype, with_dbias):
    rowwise, columnwise, scale_inv = _allocate_output(x, *x.shape, fp8_dtype)
    dbias = x.new_empty(x.shape[1] if with_dbias else 0)
    if not is_fake(x):
        launch = _activation_backward_launch(activation, *dy.shape)
        partial_sums = None
        if with_dbias:
            tile_rows = ceil_div(x.shape[0], launch.options["ROWS"])
            partial_sums = x.new_empty(tile_rows, x.shape[1], dtype=torch.float32)
        launch.run(dy, x, scale, amax, rowwise, columnwise, scale_inv, partial_sums)
        if with_dbias:
            reduce_rows(partial_sums, dbias)
    return rowwise, columnwise, scale_inv, dbias


@per_shape
def _activation_backward_launch(activation, rows, columns):
    is_gated = activation in GATED
    sizes = TILE if is_gated else DBIAS_TILE  # gated, a tile has two outputs
    programs, options = _tile(sizes, rows, columns)
    return Launch(
        kernels._activation_backward_kernel, (programs,), N=rows, D=columns,
        KIND=GATED.get(activation, activation), GATED=is_gated, **options)


def cast(x, quantization, with_dbias=False, out=None):
    """Quantize x (N, D) BF16; return an FP8 tensor, in `out` if given, and dbias or None. with_dbias: also
    sum x over its rows, (D,); the bias's gradient if x is the gradient of a GEMM's output."""
    check_input("fast_kernels.casts.cast: x", x)
    scale, amax, fp8_dtype = quantization
    if out is None:
        out = allocate_fp8(x, *x.shape, fp8_dtype)
    else:
        check_output("fast_kernels.casts.cast", x, out, fp8_dtype)
    dbias = x.new_empty(x.shape[1]) if with_dbias else None
    _cast(x, scale, amax, *out, dbias)
    return out, dbias


@operation(
    "(Tensor x, Tensor scale, Tensor(a!) amax, Tensor(b!) rowwise, Tensor(c!) columnwise, "
    "Tensor(d!) scale_inv, Tensor(e!)? dbias) -> ()")
def _cast(x, scale, amax, rowwise, columnwise, scale_inv, dbias):
    if is_fake(x):
        return
    rows, columns = x.shape
    with_dbias = dbias is not None
    partial_sums = None
    if with_dbias:
        tile_rows = ceil_div(rows, DBIAS_TILE["ROWS"])
        partial_sums = x.new_empty(tile_rows, columns, dtype=torch.float32)
    _activation_launch("identity", rows, columns, with_dbias).run(
        x, scale, amax, rowwise, columnwise, scale_inv, partial_sums)
    if with_dbias:
        reduce_rows(partial_sums, dbias)


@operation(
    "(Tensor[] x, Tensor(a!)[] rowwise, Tensor(b!)[] columnwise, Tensor(c!)[] scale_inv, Tensor[] scale, "
    "Tensor(d!)[] amax) -> ()")
def cast_all(x, rowwise, columnwise, scale_inv, scale, amax):
    """Quantize many tensors in one launch. Arguments are lists; x (N, D) BF16, N and D multiples of 16.
    columnwise []: write no transposed data."""
    if is_fake(x[0]):
        return
    transposes = len(columnwise) > 0
    written = columnwise if transposes else rowwise  # the table has an address, which is not read
    lists = x, rowwise, written, scale_inv, scale, amax
    if any(len(tensors) != len(x) for tensors in lists):
        lengths = [len(tensors) for tensors in lists]
        raise ValueError(f"fast_kernels.casts.cast_all: lists of {lengths} tensors: must be of one length")
    addresses = addresses_of(itertools.chain(*lists))
    key = addresses, *[(own_x.shape, own_x.dtype) for own_x in x]

    def make():
        rows, tiles = [], []  # as `_cast_all_kernel` reads them
        for number, own_x in enumerate(x):
            own_columnwise = columnwise[number] if transposes else None
            out = rowwise[number], own_columnwise, scale_inv[number]
            check_input("fast_kernels.casts.cast_all: x", own_x)
            check_output("fast_kernels.casts.cast_all", own_x, out, rowwise[0].dtype)
            check_aligned("fast_kernels.casts.cast_all", x=own_x)
            own_addresses = addresses[number::len(x)]  # one of each of the six lists
            rows.append((*own_addresses, *own_x.shape))
            tile_count, _ = _tile(TILE, *own_x.shape)
            tiles += [[number, tile] for tile in range(tile_count)]
        return torch.tensor(rows), torch.tensor(tiles, dtype=torch.int32)

    table, tiles = device_tables(x[0].device, key, make)
    _cast_all_launch(len(tiles), rowwise[0].dtype, transposes).run(table, tiles)


@per_shape
def _cast_all_launch(tiles, fp8_dtype, transposes):
    return Launch(
        kernels._cast_all_kernel, (tiles,), FP8_DTYPE=TRITON_TYPES[fp8_dtype], TRANSPOSES=transposes, **TILE)


# ---------------------------------------------------------------- parts of the above

def reduce_rows(x, out):
    """Sum x (P, …) float32 over its first dimension; return `out` (…), which the sum is written to."""
    _reduce_rows_launch(x.shape[0], out.numel()).run(x, out)
    return out


@per_shape
def _reduce_rows_launch(rows, columns):
    programs = ceil_div(columns, 16)
    return Launch(
        kernels._reduce_rows_kernel, (programs,), P=rows, W=columns, ROWS=256, COLUMNS=16, num_warps=8)


def transpose(rowwise, columnwise):
    """Write the transpose of FP8 data (N, D) to columnwise (D, N). N and D are multiples of 16, and
    columnwise starts at a multiple of 4 bytes, since the kernel writes 32 bits at a time."""
    _transpose_launch(*rowwise.shape).run(rowwise, columnwise)


@per_shape
def _transpose_launch(rows, columns):
    programs, options = _tile(TRANSPOSE_TILE, rows, columns)
    return Launch(kernels._transpose_kernel, (programs,), N=rows, D=columns, **options)


@operation("(Tensor rowwise) -> Tensor")
def make_transpose(rowwise):
    """Return the transpose (D, N) of FP8 data (N, D), N and D multiples of 16."""
    rows, columns = rowwise.shape
    if rows % 16 or columns % 16:
        raise ValueError(f"fast_kernels.casts.make_transpose: {rows} x {columns}: must be multiples of 16")
    columnwise = torch.empty((columns, rows), dtype=rowwise.dtype, device=rowwise.device)
    if not is_fake(rowwise):
        transpose(rowwise, columnwise)
    return columnwise


def allocate_fp8(x, rows, columns, fp8_dtype):
    """Allocate an FP8 tensor on the device of x, which is contiguous: its rowwise data, transposed data and
    scale_inv."""
    # the host takes 3.6 us for empty_like, 4.7 for new_empty and 6.1 for torch.empty with dtype and device
    if x.shape == (rows, columns):
        rowwise = torch.empty_like(x, dtype=fp8_dtype)
    else:
        rowwise = x.new_empty(rows, columns, dtype=fp8_dtype)
    columnwise = rowwise.new_empty(columns, rows)
    return FP8Data(rowwise, columnwise, x.new_empty(1, dtype=torch.float32))


def _allocate_output(x, rows, columns, fp8_dtype):
    """Allocate an FP8 tensor. fp8_dtype None: a BF16 tensor in place of rowwise data, the others empty."""
    if fp8_dtype is not None:
        return allocate_fp8(x, rows, columns, fp8_dtype)
    return x.new_empty(rows, columns), x.new_empty(0), x.new_empty(0, dtype=torch.float32)


def check_input(name, x, max_columns=None):
    """Raise ValueError unless x is a contiguous BF16 matrix, its dimensions multiples of 16."""
    shape = x.shape  # each access makes an object
    is_matrix = len(shape) == 2 and x.dtype == torch.bfloat16 and x.is_contiguous()
    if not is_matrix or shape[0] % 16 or shape[1] % 16:
        works = tuple(ceil_div(size, 16) * 16 for size in shape)
        raise ValueError(f"{name}: {tuple(shape)} {x.dtype}: must be a contiguous bfloat16 matrix, both "
                         f"sizes multiples of 16; {works} works")
    if max_columns and shape[1] > max_columns:
        raise ValueError(f"{name}: {tuple(shape)}: a norm takes at most {max_columns} columns")


def check_output(name, x, out, fp8_dtype):
    """Raise ValueError unless `out` can hold x as an FP8 tensor."""
    rowwise, columnwise, scale_inv = out
    check_shape(name, x.shape, fp8_dtype, rowwise=rowwise)
    check_shape(name, x.shape[::-1], fp8_dtype, columnwise=columnwise)
    check_shape(name, (1,), torch.float32, scale_inv=scale_inv)
    check_aligned(name, rowwise=rowwise, columnwise=columnwise)


def check_activation(name, activation, x):
    """Raise ValueError unless `activation` is known and takes x."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation={activation!r}: must be one of {', '.join(ACTIVATIONS)}")
    check_input(f"{name}: x", x)
    if activation in GATED and x.shape[1] % 32:
        raise ValueError(f"{name}: x {tuple(x.shape)}: {activation} needs columns in multiples of 32; "
                         f"{ceil_div(x.shape[1], 32) * 32} works")


def _output_shape(activation, x):
    """Return the shape of activation(x)."""
    rows, columns = x.shape
    return rows, columns // 2 if activation in GATED else columns


def _tile(sizes, rows, columns):
    """Return (programs, launch parameters): a program for each tile of a matrix. FITS: no masks."""
    tile_rows = ceil_div(rows, sizes["ROWS"])
    tile_columns = ceil_div(columns, sizes["COLUMNS"])
    fits = tile_rows * sizes["ROWS"] == rows and tile_columns * sizes["COLUMNS"] == columns
    return tile_rows * tile_columns, dict(sizes, FITS=fits)


def _norm_sizes(rows, columns):
    """Return launch parameters of the norm. ROWS divides `rows`, a multiple of 16."""
    width = next_power_of_2(columns)
    rows_per_program = 4
    if rows >= 8192:
        rows_per_program = 32 if width == 4096 and rows % 32 == 0 else 16
    stages = 2 if width > 8192 else 3  # one stage is 64 KiB of shared memory at width 16,384
    warps = min(16, max(1, width // 512))
    return dict(ROWS=rows_per_program, WIDTH=width, STAGES=stages, num_warps=warps)


def _norm_backward_sizes(rows, columns):
    """Return (programs, launch parameters) of the norm's backward kernel, which strides over the rows."""
    width = next_power_of_2(columns)
    warps = min(16, max(1, width // 256))
    stages = 4
    if width == 4096:
        stages = 5
    elif width > 8192:
        stages = 2  # a stage at width 16,384 is 96 KiB
    programs = min(rows, SMS * 16 // warps)
    return programs, dict(WIDTH=width, STAGES=stages, num_warps=warps)
