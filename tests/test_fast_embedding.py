"""The embedding and its gradients against float64.

Without a GPU they run in Triton's interpreter, on small shapes only.
"""

import pytest
import torch

pytest.importorskip("triton")
from fast_kernels import embedding as fast_embedding  # noqa: E402
from kernel_tools import HAS_GPU, _casts_that_round, _poisoned_memory  # noqa: E402, F401

DEVICE = "cuda" if HAS_GPU else "cpu"


def on_gpu(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["any", "one token", "two in halves", "as in text", "each once"])
@pytest.mark.parametrize(
    "count, vocab_size, columns",
    [
        (64, 64, 256), (130, 200, 272), (31, 40, 16), (1, 3, 8), on_gpu(32768, 50304, 768),
        on_gpu(4096, 50304, 4096), on_gpu(8208, 50304, 3088)])
def test_sum_by_index(count, vocab_size, columns, kind, dtype):
    tokens, dy = make_tokens(kind, count, vocab_size), torch.randn(count, columns, device=DEVICE).to(dtype)
    dweight = fast_embedding.sum_by_index(tokens, dy, vocab_size)
    expected = exact(tokens, dy, vocab_size)
    assert dweight.dtype == dtype and dweight.shape == (vocab_size, columns)
    torch.testing.assert_close(
        dweight.double(), expected, rtol=1.01 * 2**-8 if dtype == torch.bfloat16 else 1e-5,
        atol=2e-5 * count**0.5)
    assert torch.equal(dweight.abs().sum(1) > 0, torch.bincount(tokens, minlength=vocab_size) > 0)
    if HAS_GPU:  # bit for bit; the interpreter runs one program after the other
        assert torch.equal(dweight, fast_embedding.sum_by_index(tokens, dy, vocab_size))


def test_embed_without_positions():
    """The output equals PyTorch's, and autograd adds the gradient to others of the weight."""
    torch.manual_seed(1)
    weight = torch.randn(50, 32, device=DEVICE, requires_grad=True)
    tokens = torch.randint(0, 50, (3, 20), device=DEVICE)
    dy, other_dweight = torch.randn(3, 20, 32, device=DEVICE), torch.randn(50, 32, device=DEVICE)
    x = fast_embedding.embed(tokens, weight)
    assert torch.equal(x, weight[tokens])
    ((x * dy).sum() + (weight * other_dweight).sum()).backward()
    torch.testing.assert_close(
        weight.grad.double(), exact(tokens.flatten(), dy.flatten(0, 1), 50) + other_dweight.double(),
        rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "batch, length, columns, more",
    [(3, 20, 32, 5), (2, 33, 1040, 0), on_gpu(8, 1024, 768, 0), on_gpu(8, 1024, 768, 5)])
def test_with_positions(batch, length, columns, more, documents, dtype):
    """Equals the sum of PyTorch's two embeddings.

    documents: positions (B, S), with duplicates, as in a packed batch. more: number of unused positions."""
    torch.manual_seed(1)
    weight, position_weight = (
        torch.randn(rows, columns, dtype=dtype, device=DEVICE).requires_grad_()
        for rows in (50, length + more))
    tokens = torch.randint(0, 50, (batch, length), device=DEVICE)
    if documents:
        positions = torch.randint(0, length, (batch, length), device=DEVICE)
    else:
        positions = torch.arange(length, device=DEVICE)
    dy = torch.randn(batch, length, columns, device=DEVICE).to(dtype)
    x = fast_embedding.embed(tokens, weight, positions, position_weight)
    assert torch.equal(x, weight[tokens] + position_weight[positions])
    x.backward(dy)
    for leaf, rows in ((weight, tokens), (position_weight, positions.expand(batch, length))):
        torch.testing.assert_close(
            leaf.grad.double(), exact(rows.flatten(), dy.flatten(0, 1), len(leaf)), rtol=1.01 * 2**-8,
            atol=1e-4)


@pytest.mark.parametrize("bad, rows", [(-1, 1), (-100, 2), (0x7fffffff, 1), (50, 2)])
def test_token_outside_the_vocabulary(bad, rows):
    """It gives NaN in its row and changes no other row, and the kernels terminate, even if whole chunks
    consist of it."""
    weight, position_weight = (torch.randn(rows, 32, device=DEVICE, requires_grad=True) for rows in (50, 70))
    tokens, positions = torch.randint(0, 50, (2, 70), device=DEVICE), torch.arange(70, device=DEVICE)
    tokens[:rows, 2 - rows:] = bad
    x, known = fast_embedding.embed(tokens, weight, positions, position_weight), tokens != bad
    assert x[~known].isnan().all()
    assert torch.equal(x[known], (weight[tokens.where(known, 0)] + position_weight)[known])
    dy = torch.randn_like(x)
    x.backward(dy)
    torch.testing.assert_close(
        weight.grad.double(), exact(tokens[known], dy[known], 50), rtol=1e-5, atol=1e-5)


def test_tied_weight():
    """The gradient is added to the output head's in place, once."""
    torch.manual_seed(1)
    weight = torch.randn(50, 32, device=DEVICE, requires_grad=True)
    tokens = torch.randint(0, 50, (3, 20), device=DEVICE)
    dy, head_dweight = torch.randn(3, 20, 32, device=DEVICE), torch.randn(50, 32, device=DEVICE)
    tied_dweight = []
    expected = exact(tokens.flatten(), dy.flatten(0, 1), 50) + head_dweight.double()
    x = fast_embedding.embed(tokens, weight, tied_dweight=tied_dweight)
    tied_dweight.append(head_dweight)
    x.backward(dy)
    assert not tied_dweight and torch.equal(weight.grad, head_dweight)
    torch.testing.assert_close(weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_in_a_cuda_graph():
    """A replay reads new tokens from the same memory."""
    tokens = make_tokens("any", 4096, 50304)
    dy = torch.randn(4096, 768, device=DEVICE, dtype=torch.bfloat16)
    fast_embedding.sum_by_index(tokens, dy, 50304)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dweight = fast_embedding.sum_by_index(tokens, dy, 50304)
    tokens.copy_(make_tokens("as in text", 4096, 50304))
    graph.replay()
    assert torch.equal(dweight, fast_embedding.sum_by_index(tokens, dy, 50304))
