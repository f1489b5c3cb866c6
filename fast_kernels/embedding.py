"""Embeddings in one kernel, and their gradient, summed up in one reading of what it is made of.

The rows of the gradient that belong to one word are to be added up, and no row of a word that does not occur
is to be read. PyTorch sorts the tokens for that too, but then moves single values of two bytes. Here a
program takes CHUNK tokens in the order of their words, rows of them in 16 bytes a thread, and adds up in
float32:

- A word that lies in one chunk is written at once.
- Of a word that goes on in the next chunk each chunk writes what it has, and a second kernel adds that up. So
  a word that makes up a good part of the text is shared among many programs, and none waits for another.
- A weight that is the output head's as well gets the gradient from there first, and these sums are added to
  it in place: to add two gradients of its size takes longer than all the rest here.
- No atomics: the order of the sums is that of the tokens, and equal inputs give equal bits.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

CHUNK = 32  # tokens of a program
COLUMNS = 256  # and its columns: 8 a thread, 16 bytes


def embed(tokens, weight, positions=None, position_weight=None, elsewhere=None):
    """weight[tokens] + position_weight[positions] -> (B, S, C), differentiable in both weights; without
    positions the first alone.

    tokens (B, S), positions (S,), none twice, or (B, S): int64, rows of weight (words, C) and of
    position_weight. With positions, a token that is no row of weight gives NaN, which no loss hides, and adds
    nothing to a gradient; without, PyTorch stops there. elsewhere: a list to which, before the backward pass
    comes here, the gradient of `weight` from elsewhere is appended; it is written over.
    """
    return _Embed.apply(tokens, weight, positions, position_weight, elsewhere)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight, positions, position_weight, elsewhere):
        ctx.save_for_backward(tokens, positions)
        ctx.rows, ctx.position_rows, ctx.elsewhere = (
            len(weight), 0 if positions is None else len(position_weight), elsewhere,
        )
        if positions is None:
            return F.embedding(tokens, weight)
        columns = weight.shape[1]
        out = torch.empty((*tokens.shape, columns), dtype=weight.dtype, device=weight.device)
        _embed_kernel[tokens.numel(), triton.cdiv(columns, 4 * COLUMNS)](
            tokens.contiguous(), weight, positions.contiguous(), position_weight, out, len(weight),
            positions.numel(), columns, COLUMNS=4 * COLUMNS, num_warps=4,
        )
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (tokens, positions), dpositions = ctx.saved_tensors, None
        gradient = gradient.contiguous()
        rows = gradient.flatten(0, -2)
        dweight = add_up_words(
            tokens.flatten(), rows, ctx.rows, ctx.elsewhere.pop() if ctx.elsewhere else None
        )
        if positions is not None and positions.dim() == 1:
            dpositions = add_up_rows(gradient, positions, ctx.position_rows)
        elif positions is not None:
            dpositions = add_up_words(positions.flatten(), rows, ctx.position_rows)
        return None, dweight, None, dpositions, None


def add_up_words(tokens, gradient, words, total=None):
    """Of the rows of gradient (N, C), the sum of those of each word -> (words, C), of gradient's type. tokens
    (N,): the rows' words. total (words, C): what the sums are added to, in place; None: zeros."""
    count, columns = gradient.shape
    tokens, order = tokens.to(torch.int32).sort(stable=True)  # as int32: half of the passes that int64 takes
    if total is None:
        total = torch.zeros((words, columns), dtype=gradient.dtype, device=gradient.device)
    chunks = triton.cdiv(count, CHUNK)
    pieces = torch.empty((chunks, 2, columns), dtype=torch.float32, device=gradient.device)
    grid = chunks, triton.cdiv(columns, COLUMNS)
    _sum_words_kernel[grid](
        gradient, tokens, order, total, pieces, words, count, columns, CHUNK=CHUNK, COLUMNS=COLUMNS,
        num_warps=1,
    )
    _join_words_kernel[grid](
        tokens, total, pieces, words, count, columns, CHUNK=CHUNK, COLUMNS=COLUMNS, num_warps=1
    )
    return total


def add_up_rows(gradient, positions, rows):
    """The sum of gradient (B, S, C) over B -> (rows, C), row i of it at positions[i], zeros elsewhere.
    positions (S,): none twice."""
    batch, length, columns = gradient.shape
    total = (torch.empty if rows == length else torch.zeros)(
        (rows, columns), dtype=gradient.dtype, device=gradient.device
    )
    _sum_rows_kernel[length, triton.cdiv(columns, COLUMNS)](
        gradient, positions.contiguous(), total, batch, columns, COLUMNS=COLUMNS, num_warps=1
    )
    return total


@triton.jit
def _sum_rows_kernel(gradient_ptr, positions_ptr, total_ptr, B, C, COLUMNS: tl.constexpr):
    """One position, some columns."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gradient_ptr += row * C + j
    sums = tl.zeros((COLUMNS,), tl.float32)
    for _ in tl.range(B, num_stages=4):
        sums += tl.load(gradient_ptr, mask=j < C, other=0.0).to(tl.float32)
        gradient_ptr += tl.num_programs(0).to(tl.int64) * C
    place = total_ptr + tl.load(positions_ptr + row) * C + j
    tl.store(place, sums.to(total_ptr.dtype.element_ty), mask=j < C)


@triton.jit
def _embed_kernel(
    tokens_ptr,
    weight_ptr,
    positions_ptr,
    position_weight_ptr,
    out_ptr,
    WORDS,
    POSITIONS,
    C,
    COLUMNS: tl.constexpr,
):
    """One token, some columns."""
    row = tl.program_id(0)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word, position = tl.load(tokens_ptr + row), tl.load(positions_ptr + row % POSITIONS)
    x = tl.load(
        weight_ptr + word * C + j, mask=j < tl.where((word >= 0) & (word < WORDS), C, 0), other=float("nan")
    ).to(tl.float32)
    x += tl.load(position_weight_ptr + position * C + j, mask=j < C, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * C + j, x.to(out_ptr.dtype.element_ty), mask=j < C)


@triton.jit
def _add_to(total_ptr, word, sums, WORDS, j, C):
    place, mask = total_ptr + word.to(tl.int64) * C + j, j < tl.where((word >= 0) & (word < WORDS), C, 0)
    tl.store(
        place, (tl.load(place, mask=mask, other=0.0).to(tl.float32) + sums).to(total_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _sum_words_kernel(
    gradient_ptr,
    tokens_ptr,
    order_ptr,
    total_ptr,
    pieces_ptr,
    WORDS,
    N,
    C,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One chunk, some columns. pieces (chunks, 2, C): of a word that began in an earlier chunk, of one that
    goes on in the next."""
    begin = tl.program_id(0) * CHUNK
    end = tl.minimum(begin + CHUNK, N)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = j < C
    pieces_ptr += tl.program_id(0).to(tl.int64) * 2 * C + j
    word = tl.load(tokens_ptr + begin)
    began_before = (begin > 0) & (tl.load(tokens_ptr + begin - 1, mask=begin > 0, other=0) == word)
    sums = tl.zeros((COLUMNS,), tl.float32)
    row_ahead = tl.load(order_ptr + tl.minimum(begin + 1, end - 1))
    ahead = tl.load(gradient_ptr + tl.load(order_ptr + begin) * C + j, mask=mask, other=0.0)
    for i in range(begin, end):
        sums += ahead.to(tl.float32)
        # the next row, while this one is on its way
        ahead = tl.load(gradient_ptr + row_ahead * C + j, mask=mask, other=0.0)
        row_ahead = tl.load(order_ptr + tl.minimum(i + 2, end - 1))
        following = tl.load(tokens_ptr + i + 1, mask=i + 1 < N, other=0)
        goes_on = (following == word) & (i + 1 < N)
        if (i == end - 1) | (following != word):
            if began_before:
                tl.store(pieces_ptr, sums, mask=mask)
            elif goes_on:
                tl.store(pieces_ptr + C, sums, mask=mask)
            else:
                _add_to(total_ptr, word, sums, WORDS, j, C)
            sums = tl.zeros((COLUMNS,), tl.float32)
            began_before = False
            word = following


@triton.jit
def _join_words_kernel(
    tokens_ptr, total_ptr, pieces_ptr, WORDS, N, C, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):
    """The word that begins in a chunk and goes on in the next, if there is one."""
    chunk = tl.program_id(0)
    begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
    word = tl.load(tokens_ptr + end - 1, mask=end < N, other=0)
    begins_here = (begin == 0) | (tl.load(tokens_ptr + begin - 1, mask=begin > 0, other=0) != word)
    if (end < N) & begins_here & (tl.load(tokens_ptr + end, mask=end < N, other=0) == word):
        j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = j < C
        place = pieces_ptr + chunk.to(tl.int64) * 2 * C + j
        sums = tl.load(place + C, mask=mask, other=0.0)
        # the next chunk begins with it
        while (end < N) & (tl.load(tokens_ptr + end, mask=end < N, other=0) == word):
            place += 2 * C
            sums += tl.load(place, mask=mask, other=0.0)
            end += CHUNK
        _add_to(total_ptr, word, sums, WORDS, j, C)
