"""Token and position embedding in one kernel, and the gradients of both tables.

Use `embed` in place of two `F.embedding` calls and an addition.

For a table's gradient, a program takes CHUNK tokens in sorted order, loads 16 bytes per thread, where PyTorch
loads two, and accumulates in float32. A token id that spans chunks writes one partial sum per chunk, and a
second kernel sums these. No atomics: equal inputs give equal bits. With tied embeddings, the sums are added
to the output head's gradient in place; adding two gradients of that size would take longer than all else.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fast_kernels.launch import Launch, per_shape
from fast_kernels.library import ceil_div, check_shape, is_fake, operation

CHUNK = 32  # tokens per program
COLUMNS = 256  # columns per program: 8 per thread, 16 bytes


def embed_reference(tokens, weight, positions=None, position_weight=None):
    """`embed` in plain PyTorch, for tokens and positions inside the tables."""
    x = F.embedding(tokens, weight)
    return x if positions is None else x + F.embedding(positions, position_weight)


class TiedGradient:
    """The gradient of a weight that the output head and `embed` share, between their backward passes.

    Autograd would add two gradients of that size. Instead the head's backward pass, which runs first, leaves
    its gradient here, and that of `embed` adds its own in place and passes the sum to autograd. Make one for
    each forward pass, and give the same one to `embed` and to each use of the head."""

    def __init__(self):
        self.dweight = None

    def add(self, dweight):
        """Take the gradient of a use of the head; it is overwritten."""
        if self.dweight is None:
            self.dweight = dweight
        else:
            self.dweight += dweight  # in place: the first may be `main_grad`, which must hold the sum

    def take(self):
        """Return the sum of what was added, or None, and forget it."""
        dweight = self.dweight
        self.dweight = None
        return dweight


def embed(tokens, weight, positions=None, position_weight=None, tied_gradient=None):
    """Compute weight[tokens] + position_weight[positions], (B, S, C), differentiable in both weights.

    Args:
        tokens: (B, S) int64. With positions, an id outside the vocabulary gives NaN, so that the loss shows
            it, and adds nothing to a gradient. Without, PyTorch raises its own error.
        weight: (vocab_size, C), contiguous.
        positions: int64, (B, S) or (S,); outside the table as tokens. None: none added.
        position_weight: (number of positions, C), of weight's dtype, contiguous.
        tied_gradient: the TiedGradient of a weight that the output head shares. Not under torch.compile.
    """
    _check(tokens, weight, positions, position_weight)
    tokens = tokens.contiguous()
    positions = None if positions is None else positions.contiguous()
    if tied_gradient is None:
        return _embed(tokens, weight, positions, position_weight)
    return _TiedEmbed.apply(tokens, weight, positions, position_weight, tied_gradient)


def _check(tokens, weight, positions, position_weight):
    name = "fast_kernels.embedding.embed"
    if (positions is None) != (position_weight is None):
        raise ValueError(f"{name}: positions and position_weight: give both or neither")
    if positions is None:
        positions, position_weight = tokens, weight
    for x in (weight, position_weight):
        fits = x.dim() == 2 and x.dtype == weight.dtype and x.shape[1] == weight.shape[1]
        if not fits or not x.is_contiguous():
            raise ValueError(f"{name}: weight and position_weight: must be contiguous matrices of one dtype, "
                             f"with {weight.shape[-1]} columns")
    for argument, x in dict(tokens=tokens, positions=positions).items():
        if x.dtype != torch.int64:
            raise ValueError(f"{name}: {argument} are {x.dtype}: must be torch.int64; call .long()")
    if tokens.dim() != 2 or positions.shape not in (tokens.shape, tokens.shape[1:]):
        raise ValueError(f"{name}: tokens {tuple(tokens.shape)}, positions {tuple(positions.shape)}: must be "
                         "(B, S), and (S,) or (B, S)")


def _setup_context(ctx, inputs, output):
    tokens, weight, positions, position_weight = inputs
    ctx.save_for_backward(tokens, positions)
    ctx.vocab_size = len(weight)
    ctx.num_positions = 0 if position_weight is None else len(position_weight)


def _embed_backward(ctx, dy, head_dweight=None):
    """Return the arguments' gradients; weight's is added to head_dweight, if given."""
    tokens, positions = ctx.saved_tensors
    dy = dy.contiguous()
    dweight = sum_by_index(tokens.flatten(), dy.flatten(0, 1), ctx.vocab_size, head_dweight)
    dposition_weight = None
    if positions is not None:
        of_positions = dy.sum(0) if positions.dim() == 1 else dy.flatten(0, 1)
        dposition_weight = sum_by_index(positions.flatten(), of_positions, ctx.num_positions)
    return None, dweight, None, dposition_weight


@operation(
    "(Tensor tokens, Tensor weight, Tensor? positions, Tensor? position_weight) -> Tensor", _setup_context,
    _embed_backward)
def _embed(tokens, weight, positions, position_weight):
    if positions is None:
        return F.embedding(tokens, weight)
    columns = weight.shape[1]
    out = torch.empty((*tokens.shape, columns), dtype=weight.dtype, device=weight.device)
    if is_fake(out):
        return out
    launch = _embed_launch(tokens.numel(), len(weight), len(position_weight), positions.numel(), columns)
    launch.run(tokens, weight, positions, position_weight, out)
    return out


@per_shape
def _embed_launch(tokens, vocab_size, num_positions, positions, columns):
    program_columns = 4 * COLUMNS
    return Launch(
        _embed_kernel, (tokens, ceil_div(columns, program_columns)), VOCAB_SIZE=vocab_size,
        NUM_POSITIONS=num_positions, POSITIONS=positions, C=columns, COLUMNS=program_columns, num_warps=4)


class _TiedEmbed(torch.autograd.Function):
    """`embed` with a TiedGradient."""

    @staticmethod
    def forward(ctx, tokens, weight, positions, position_weight, tied_gradient):
        ctx.tied_gradient = tied_gradient
        inputs = tokens, weight, positions, position_weight
        _setup_context(ctx, inputs, None)
        return _embed(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        gradients = _embed_backward(ctx, dy, ctx.tied_gradient.take())
        return *gradients, None


def sum_by_index(indices, dy, num_embeddings, out=None):
    """Add each row of dy (N, C) to the row of `out` (num_embeddings, C), by default zeros, that is its index.
    indices (N,) out of range are left out."""
    shape = num_embeddings, dy.shape[1]
    if out is None:
        out = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    check_shape("fast_kernels.embedding.sum_by_index", shape, out=out)
    _add_by_index(indices, dy, out)
    return out


@operation("(Tensor indices, Tensor dy, Tensor(a!) out) -> ()")
def _add_by_index(indices, dy, out):
    if is_fake(out):
        return
    count, columns = dy.shape
    indices, order = indices.to(torch.int32).sort(stable=True)  # int32 needs half as many passes as int64
    chunks = ceil_div(count, CHUNK)
    partial_sums = torch.empty((chunks, 2, columns), dtype=torch.float32, device=dy.device)
    sum_by_index_launch, join_launch = _add_by_index_launches(len(out), count, columns)
    sum_by_index_launch.run(dy, indices, order, out, partial_sums)
    join_launch.run(indices, out, partial_sums)


@per_shape
def _add_by_index_launches(num_embeddings, count, columns):
    grid = ceil_div(count, CHUNK), ceil_div(columns, COLUMNS)
    sizes = dict(
        NUM_EMBEDDINGS=num_embeddings, N=count, C=columns, CHUNK=CHUNK, COLUMNS=COLUMNS, num_warps=1)
    return Launch(_sum_by_index_kernel, grid, **sizes), Launch(_join_index_sums_kernel, grid, **sizes)


@triton.jit
def _load_row(table_ptr, index, ROWS, j, C):
    """Load columns j of row `index` in float32; NaN if there is no such row."""
    mask = j < tl.where((index >= 0) & (index < ROWS), C, 0)
    return tl.load(table_ptr + index * C + j, mask=mask, other=float("nan")).to(tl.float32)


@triton.jit
def _embed_kernel(tokens_ptr, weight_ptr, positions_ptr, position_weight_ptr, out_ptr, VOCAB_SIZE,
                  NUM_POSITIONS, POSITIONS, C, COLUMNS: tl.constexpr):
    """Compute COLUMNS columns of one token."""
    row = tl.program_id(0)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token, position = tl.load(tokens_ptr + row), tl.load(positions_ptr + row % POSITIONS)
    x = _load_row(weight_ptr, token, VOCAB_SIZE, j, C) + _load_row(
        position_weight_ptr, position, NUM_POSITIONS, j, C)
    tl.store(out_ptr + row.to(tl.int64) * C + j, x.to(out_ptr.dtype.element_ty), mask=j < C)


@triton.jit
def _add_to_row(out_ptr, index, sums, NUM_EMBEDDINGS, j, C):
    """Add sums to row `index` of out, if there is such a row."""
    pointers = out_ptr + index.to(tl.int64) * C + j
    mask = j < tl.where((index >= 0) & (index < NUM_EMBEDDINGS), C, 0)
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + sums
    tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_by_index_kernel(dy_ptr, indices_ptr, order_ptr, out_ptr, partial_sums_ptr, NUM_EMBEDDINGS, N, C,
                         CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum COLUMNS columns of the rows in one chunk of the sorted indices.

    partial_sums (chunks, 2, C): the sum of the index that continues from the previous chunk, and of the one
    that continues in the next."""
    begin = tl.program_id(0) * CHUNK
    end = tl.minimum(begin + CHUNK, N)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = j < C
    partial_sums_ptr += tl.program_id(0).to(tl.int64) * 2 * C + j
    index = tl.load(indices_ptr + begin)
    began_before = (begin > 0) & (tl.load(indices_ptr + begin - 1, mask=begin > 0, other=0) == index)
    sums = tl.zeros((COLUMNS,), tl.float32)
    # while row i is added, the values of row i + 1 and the index of row i + 2 are loaded
    next_row = tl.load(order_ptr + tl.minimum(begin + 1, end - 1))
    prefetched = tl.load(dy_ptr + tl.load(order_ptr + begin) * C + j, mask=mask, other=0.0)
    for i in range(begin, end):
        sums += prefetched.to(tl.float32)
        prefetched = tl.load(dy_ptr + next_row * C + j, mask=mask, other=0.0)
        next_row = tl.load(order_ptr + tl.minimum(i + 2, end - 1))
        next_index = tl.load(indices_ptr + i + 1, mask=i + 1 < N, other=0)
        continues = (next_index == index) & (i + 1 < N)
        if (i == end - 1) | (next_index != index):
            if began_before:
                tl.store(partial_sums_ptr, sums, mask=mask)
            elif continues:
                tl.store(partial_sums_ptr + C, sums, mask=mask)
            else:
                _add_to_row(out_ptr, index, sums, NUM_EMBEDDINGS, j, C)
            sums = tl.zeros((COLUMNS,), tl.float32)
            began_before = False
            index = next_index


@triton.jit
def _join_index_sums_kernel(indices_ptr, out_ptr, partial_sums_ptr, NUM_EMBEDDINGS, N, C,
                            CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the partial sums of the index that begins in a chunk and continues in the next, if there is one."""
    chunk = tl.program_id(0)
    begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
    index = tl.load(indices_ptr + end - 1, mask=end < N, other=0)
    begins_here = (begin == 0) | (tl.load(indices_ptr + begin - 1, mask=begin > 0, other=0) != index)
    continues = (end < N) & (tl.load(indices_ptr + end, mask=end < N, other=0) == index)
    if begins_here & continues:
        j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = j < C
        pointers = partial_sums_ptr + chunk.to(tl.int64) * 2 * C + j
        sums = tl.load(pointers + C, mask=mask, other=0.0)
        # while the next chunk begins with the same index
        while (end < N) & (tl.load(indices_ptr + end, mask=end < N, other=0) == index):
            pointers += 2 * C
            sums += tl.load(pointers, mask=mask, other=0.0)
            end += CHUNK
        _add_to_row(out_ptr, index, sums, NUM_EMBEDDINGS, j, C)
