"""The embedding and its gradients against float64.

Without a GPU they run in Triton's interpreter, on small shapes only.
"""

import pytest
import torch

pytest.importorskip("triton")
from fast_kernels import embedding as fast_embedding
from kernel_tools import DEVICE, _as_on_a_gpu, _free_memory, _poisoned_memory, capture, needs_memory, on_gpu  # noqa: F401

KINDS = ["any", "one token", "two in halves", "as in text", "each once"]


def make_tokens(kind, count, vocab_size):
    torch.manual_seed(1)
    tokens = torch.randint(0, vocab_size, (count,))
    if kind == "one token":
        tokens[:] = vocab_size - 1
    if kind == "two in halves":
        tokens = torch.arange(count) * 2 // count
    if kind == "as in text":  # one token is very frequent, most are rare
        tokens = (vocab_size ** torch.rand(count, dtype=torch.float64)).long() - 1
    if kind == "each once":
        tokens = torch.randperm(count)
    return tokens.to(DEVICE)


def exact(tokens, dy, vocab_size):
    return torch.zeros(vocab_size, dy.shape[1], dtype=torch.float64, device=DEVICE).index_add_(
        0, tokens, dy.double())


@pytest.mark.parametrize("count, vocab_size, columns, kind, dtype", [
    *((130, 200, 272, kind, torch.bfloat16) for kind in KINDS), (64, 64, 256, "any", torch.float32),
    (31, 40, 16, "two in halves", torch.float32), (1, 3, 8, "one token", torch.float32),
    *(on_gpu(*shape, kind, dtype) for kind in KINDS for dtype in (torch.bfloat16, torch.float32)
      for shape in ((32768, 50304, 768), (4096, 50304, 4096), (8208, 50304, 3088)))])
def test_sum_by_index(count, vocab_size, columns, kind, dtype):
    tokens, dy = make_tokens(kind, count, vocab_size), torch.randn(count, columns, device=DEVICE).to(dtype)
    dweight = fast_embedding.sum_by_index(tokens, dy, vocab_size)
    assert dweight.dtype == dtype and dweight.shape == (vocab_size, columns)
    rtol = 1.01 * 2**-8 if dtype == torch.bfloat16 else 1e-5
    for ours, own_dy in zip(dweight.split(512, dim=1), dy.split(512, dim=1)):  # float64 takes much memory
        expected = exact(tokens, own_dy, vocab_size)
        torch.testing.assert_close(ours.double(), expected, atol=2e-5 * count**0.5, rtol=rtol)
    occurs = torch.bincount(tokens, minlength=vocab_size) > 0
    assert torch.equal(dweight.abs().sum(1) > 0, occurs)
    if DEVICE == "cuda":  # bit for bit; the interpreter runs one program after the other
        assert torch.equal(dweight, fast_embedding.sum_by_index(tokens, dy, vocab_size))


@pytest.mark.parametrize("tied", [False, True])
def test_without_positions(tied):
    """Autograd adds the gradient to the output head's; with a TiedGradient it is added in place, once."""
    torch.manual_seed(1)
    weight = torch.randn(50, 32, device=DEVICE, requires_grad=True)
    tokens = torch.randint(0, 50, (3, 20), device=DEVICE)
    dy, head_dweight = torch.randn(3, 20, 32, device=DEVICE), torch.randn(50, 32, device=DEVICE)
    expected = exact(tokens.flatten(), dy.flatten(0, 1), 50) + head_dweight.double()
    tied_gradient = fast_embedding.TiedGradient() if tied else None
    x = fast_embedding.embed(tokens, weight, tied_gradient=tied_gradient)
    assert torch.equal(x, weight[tokens])
    if tied:
        tied_gradient.add(head_dweight)
        x.backward(dy)
        assert tied_gradient.take() is None and torch.equal(weight.grad, head_dweight)
    else:
        ((x * dy).sum() + (weight * head_dweight).sum()).backward()
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch, length, columns, more, documents, dtype", [
    (3, 20, 32, 5, True, torch.float32), (3, 20, 32, 5, False, torch.bfloat16),
    (2, 9, 1040, 0, True, torch.bfloat16), (2, 9, 1040, 0, False, torch.float32),
    *(on_gpu(8, 1024, 768, more, documents, dtype) for more in (0, 5) for documents in (False, True)
      for dtype in (torch.bfloat16, torch.float32))])
def test_with_positions(batch, length, columns, more, documents, dtype):
    """Equals the sum of PyTorch's two embeddings.

    documents: positions (B, S), with duplicates, as in a packed batch. more: number of unused positions."""
    torch.manual_seed(1)
    weight = torch.randn(50, columns, dtype=dtype, device=DEVICE).requires_grad_()
    position_weight = torch.randn(length + more, columns, dtype=dtype, device=DEVICE).requires_grad_()
    tokens = torch.randint(0, 50, (batch, length), device=DEVICE)
    if documents:
        positions = torch.randint(0, length, (batch, length), device=DEVICE)
    else:
        positions = torch.arange(length, device=DEVICE)
    dy = torch.randn(batch, length, columns, device=DEVICE).to(dtype)
    x = fast_embedding.embed(tokens, weight, positions, position_weight)
    assert torch.equal(x, fast_embedding.embed_reference(tokens, weight, positions, position_weight))
    x.backward(dy)
    for leaf, indices in ((weight, tokens), (position_weight, positions.expand(batch, length))):
        expected = exact(indices.flatten(), dy.flatten(0, 1), len(leaf))
        torch.testing.assert_close(leaf.grad.double(), expected, rtol=1.01 * 2**-8, atol=1e-4)


@pytest.mark.parametrize("of, bad, rows", [
    ("token", -1, 1), ("token", 50, 2), ("position", -100, 1), ("position", 50, 1),
    ("positions of documents", 0x7fffffff, 1), ("positions of documents", -1, 2)])
def test_token_or_position_outside_its_table(bad, rows, of):
    """It gives NaN in its row and changes no other row, and the kernels terminate, even if whole chunks
    consist of it."""
    weight, position_weight = (torch.randn(50, 32, device=DEVICE, requires_grad=True) for _ in range(2))
    tokens = torch.randint(0, 50, (2, 50), device=DEVICE)
    positions = torch.arange(50, device=DEVICE)
    if of == "token":
        tokens[:rows, 2 - rows:] = bad
    elif of == "position":
        positions[7] = bad
    else:
        positions = torch.randint(0, 50, (2, 50), device=DEVICE)
        positions[:rows, 2 - rows:] = bad
    x = fast_embedding.embed(tokens, weight, positions, position_weight)
    positions = positions.expand(2, 50)
    is_inside = tokens.ne(bad) & positions.ne(bad)
    assert not is_inside.all()
    assert x[~is_inside].isnan().all()
    expected = weight[tokens[is_inside]] + position_weight[positions[is_inside]]
    assert torch.equal(x[is_inside], expected)
    dy = torch.randn_like(x)
    x.backward(dy)
    for leaf, indices in ((weight, tokens), (position_weight, positions)):
        inside = (indices >= 0) & (indices < 50)
        torch.testing.assert_close(
            leaf.grad.double(), exact(indices[inside], dy[inside], 50), rtol=1e-5, atol=1e-5)


def test_operations_are_registered():
    weight, position_weight = (torch.randn(50, 32, device=DEVICE, requires_grad=True) for _ in range(2))
    tokens, positions = torch.randint(0, 50, (2, 2, 33), device=DEVICE)
    dy, ops = torch.randn(2, 33, 32, device=DEVICE), torch.ops.fast_kernels
    arguments = tokens, weight, positions, position_weight
    torch.library.opcheck(ops.embed.default, arguments)
    torch.library.opcheck(ops.embed.default, (tokens, weight, None, None))
    out = torch.ones(50, 32, device=DEVICE)
    torch.library.opcheck(ops.add_by_index.default, (tokens.flatten(), dy.flatten(0, 1), out))
    graph = torch.compile(fast_embedding.embed, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (fast_embedding.embed, graph):
        gradients.append(torch.autograd.grad(function(*arguments), (weight, position_weight), dy))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("change, message", [
    (lambda t, w, p, pw: (t, w, p, None), "both or neither"),
    (lambda t, w, p, pw: (t.int(), w, p, pw), r"tokens are torch.int32: must be .*; call \.long\(\)"),
    (lambda t, w, p, pw: (t, w, p.int(), pw), r"positions are torch.int32: must be .*; call \.long\(\)"),
    (lambda t, w, p, pw: (t, w.T, p, pw), "contiguous"),
    (lambda t, w, p, pw: (t, w, p, pw.double()), "dtype"),
    (lambda t, w, p, pw: (t, w, p, pw[:, :16].contiguous()), "32 columns"),
    (lambda t, w, p, pw: (t, w, p[:5], pw), r"positions \(5,\): must be \(B, S\)")])
def test_invalid_arguments_raise(change, message):
    weight, tokens = torch.randn(50, 32, device=DEVICE), torch.zeros(2, 9, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        fast_embedding.embed(*change(tokens, weight, torch.arange(9, device=DEVICE), weight))


def test_tables_at_any_address():
    """Triton compiles a kernel for tables that start at a multiple of 16 bytes, and another for the rest."""
    numbers = torch.randn(51 * 32, device=DEVICE)
    tokens, positions = make_tokens("any", 18, 50).view(2, 9), torch.arange(9, device=DEVICE)
    for offset in (0, 1, 0, 1):  # the second run of each takes the cached variant
        weight = numbers[offset:][:50 * 32].view(50, 32)
        x = fast_embedding.embed(tokens, weight, positions, weight)
        assert torch.equal(x, weight[tokens] + weight[:9])


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """A replay reads new tokens from the same memory."""
    tokens = make_tokens("any", 4096, 50304)
    dy = torch.randn(4096, 768, device=DEVICE, dtype=torch.bfloat16)
    graph, dweight = capture(lambda: fast_embedding.sum_by_index(tokens, dy, 50304))
    tokens.copy_(make_tokens("as in text", 4096, 50304))
    graph.replay()
    assert torch.equal(dweight, fast_embedding.sum_by_index(tokens, dy, 50304))


@pytest.mark.multigpu
def test_on_a_device_that_is_not_the_current_one():
    weight, tokens = torch.randn(50, 32, device="cuda:1"), torch.randint(0, 50, (2, 9), device="cuda:1")
    x = fast_embedding.embed(tokens, weight, torch.arange(9, device="cuda:1"), weight)
    assert torch.equal(x, weight[tokens] + weight[:9])
    with pytest.raises(ValueError, match="cuda:0, cuda:1: all must be on one device"):
        fast_embedding.embed(tokens.to("cuda:0"), weight)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """The last rows of a table, of the output and of both gradients."""
    needs_memory(14)
    rows, columns = 2**20 + 16, 2048
    weight = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    weight[-50:].normal_()
    tokens = torch.arange(rows, device="cuda").view(1, -1)
    x = fast_embedding.embed(tokens, weight, tokens, weight)
    assert torch.equal(x[0, -50:], 2 * weight[-50:])
    del weight
    assert torch.equal(fast_embedding.sum_by_index(tokens[0], x[0], rows)[-50:], x[0, -50:])
