"""Norm and activation without FP8: each against float64, and a model against the same in plain PyTorch.

Without a GPU the kernels run in Triton's interpreter, on small shapes only.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from fast_kernels import casts, unquantized
from kernel_tools import (  # noqa: F401
    DEVICE,
    HAS_GPU,
    _as_on_a_gpu,
    _free_memory,
    _poisoned_memory,
    needs_memory,
    on_gpu,
)
from model_te_fast import FastConfig, FastGPT2Model

BF16 = 2**-8  # largest relative error of rounding to BF16
EPS = 1e-5
SIZES = [(48, 96), *(on_gpu(*size) for size in [(8208, 768), (8208, 4096), (16400, 2064), (8208, 16384)])]


def needs_memory_for(rows, columns):
    """Skip a test on a GPU with too little free memory for its tensors in float64."""
    if HAS_GPU:
        needs_memory(min(20, 1 + 120 * rows * columns / 2**30))


def normal(*shape, size=1.0):
    return (size * torch.randn(*shape, device=DEVICE)).bfloat16().requires_grad_()


def exact(tensors):
    return [None if x is None else x.detach().double().requires_grad_() for x in tensors]


def assert_close(ours, theirs, summed=1):
    """Assert equality up to one rounding to BF16, and the float32 rounding of a sum of `summed` values."""
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), theirs, rtol=1.01 * BF16, atol=3e-5 * summed**0.5)


@pytest.mark.parametrize("rows, columns", SIZES)
@pytest.mark.parametrize("added", ["nothing", "branch", "branch and bias"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_add_norm(rows, columns, kind, added):
    needs_memory_for(rows, columns)
    x = normal(rows, columns, size=2.0)
    branch = normal(rows, columns) if "branch" in added else None
    branch_bias = normal(columns) if "bias" in added else None
    weight = normal(columns)
    bias = normal(columns) if kind == "LayerNorm" else None
    inputs = [x, branch, branch_bias, weight, bias]
    residual, y = unquantized.add_norm(*inputs, EPS)
    rounded = residual.detach()  # the norm is of the sum that is rounded to BF16
    exact_inputs = exact(inputs)
    exact_residual, _ = unquantized.add_norm_reference(*exact_inputs, EPS)
    exact_sum = exact_residual.detach().clone()
    exact_residual.data.copy_(rounded)
    _, exact_y = unquantized.add_norm_reference(exact_residual, None, None, *exact_inputs[3:], EPS)
    torch.testing.assert_close(rounded.double(), exact_sum, rtol=1.01 * BF16, atol=1e-6)
    assert_close(y, exact_y)

    outputs, exact_outputs = [residual, y], [exact_residual, exact_y]
    if branch is None:  # the sum is x itself, whose two gradients autograd adds
        outputs, exact_outputs = [y], [exact_y]
    dy = [normal(rows, columns).detach() for _ in outputs]
    used = [tensor for tensor in inputs if tensor is not None]
    exact_used = [tensor for tensor in exact_inputs if tensor is not None]
    gradients = torch.autograd.grad(outputs, used, dy)
    exact_gradients = torch.autograd.grad(exact_outputs, exact_used, [tensor.double() for tensor in dy])
    for tensor, ours, theirs in zip(used, gradients, exact_gradients):
        if tensor is branch_bias:  # sums what was rounded to BF16, as PyTorch does
            theirs = gradients[0].double().sum(0)
        assert_close(ours, theirs, summed=rows if tensor.dim() == 1 else 1)


@pytest.mark.parametrize("rows, columns", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", [
    "gelu", "swiglu", *(on_gpu(name) for name in casts.ACTIVATIONS if name not in ("gelu", "swiglu"))])
def test_activate(rows, columns, with_bias, activation):
    width = 2 * columns if activation in casts.GATED else columns
    needs_memory_for(rows, width)
    x = normal(rows, width, size=2.0)
    bias = normal(width) if with_bias else None
    y = unquantized.activate(activation, x, bias)
    exact_x, exact_bias = exact([x, bias])
    exact_y = unquantized.activate_reference(activation, exact_x, exact_bias)
    assert_close(y, exact_y)

    dy = normal(*y.shape).detach()
    inputs = [x, bias] if with_bias else [x]
    exact_inputs = [exact_x, exact_bias] if with_bias else [exact_x]
    gradients = torch.autograd.grad(y, inputs, dy)
    exact_gradients = torch.autograd.grad(exact_y, exact_inputs, dy.double())
    assert_close(gradients[0], exact_gradients[0])
    if with_bias:
        assert_close(gradients[1], exact_gradients[1], summed=rows)


def test_only_the_sum_is_used():
    """As where a hook drops the norm's output: the gradients are those of the sum."""
    x, branch, branch_bias, weight = normal(16, 32), normal(16, 32), normal(32), normal(32)
    residual, _ = unquantized.add_norm(x, branch, branch_bias, weight, None, EPS)
    residual.float().square().sum().backward()
    assert torch.equal(x.grad, branch.grad) and torch.equal(x.grad, (2 * residual).detach())
    assert weight.grad is None
    assert_close(branch_bias.grad, x.grad.double().sum(0), summed=16)


def test_transforms_of_torch_func():
    x, weight, bias, tangent = normal(16, 32), normal(32), normal(32), normal(16, 32)

    def through(add_norm, activate):
        def function(x):
            _, y = add_norm(x, None, None, weight, bias, EPS)
            return activate("gelu", y, bias)
        return function

    ours = through(unquantized.add_norm, unquantized.activate)
    expected = through(unquantized.add_norm_reference, unquantized.activate_reference)
    _, ours_along = torch.func.jvp(ours, (x,), (tangent,))
    _, expected_along = torch.func.jvp(expected, (x,), (tangent,))
    assert torch.equal(ours_along, expected_along)
    gradient = torch.func.grad(lambda x: ours(x).float().square().sum())(x)
    assert torch.equal(gradient, torch.func.grad(lambda x: expected(x).float().square().sum())(x))


def test_a_second_derivative_is_that_of_pytorch():
    x, weight, bias, fc_bias = normal(16, 32), normal(32), normal(32), normal(32)
    inputs = x, weight, bias, fc_bias

    def penalty(x, weight, bias, fc_bias, add_norm, activate):
        residual, y = add_norm(x, None, None, weight, bias, EPS)
        loss = (residual + activate("gelu", y, fc_bias)).square().sum()
        gradient, = torch.autograd.grad(loss, x, create_graph=True)
        return gradient.square().sum()

    ours = torch.autograd.grad(penalty(*inputs, unquantized.add_norm, unquantized.activate), inputs)
    exact_inputs = exact(inputs)
    theirs = torch.autograd.grad(
        penalty(*exact_inputs, unquantized.add_norm_reference, unquantized.activate_reference), exact_inputs)
    for own, expected in zip(ours, theirs):
        assert F.cosine_similarity(own.double().flatten(), expected.flatten(), 0) > 0.999


@pytest.mark.parametrize("rows, columns", [(7, 64), (16, 24)])  # no multiples of 16
def test_other_sizes_run_in_pytorch(rows, columns):
    x, branch, weight = normal(rows, columns), normal(rows, columns), normal(columns)
    residual, y = unquantized.add_norm(x, branch, None, weight, None, EPS)
    expected = unquantized.add_norm_reference(x, branch, None, weight, None, EPS)
    assert torch.equal(residual, expected[0]) and torch.equal(y, expected[1])


class PlainGPT(torch.nn.Module):
    """The network of FastGPT2Model in PyTorch's operations, with its parameters."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model = model
        self.weights = {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}

    def norm(self, x, prefix):
        weight = self.weights[f"{prefix}.layer_norm_weight"]
        bias = self.weights.get(f"{prefix}.layer_norm_bias")
        return unquantized.add_norm_reference(x, None, None, weight, bias, EPS)[1]

    def linear(self, x, name):
        separator = "_" if name.endswith(("fc1", "fc2")) else "."
        bias = self.weights.get(f"{name}{separator}bias")
        return F.linear(x, self.weights[f"{name}{separator}weight"], bias)

    def forward(self, tokens, labels):
        config = self.model.config
        x = self.weights["wte.weight"][tokens] + self.weights["wpe.weight"][:tokens.shape[1]]
        for layer in range(config.n_layer):
            attn, mlp = f"blocks.{layer}.attn", f"blocks.{layer}.mlp"
            qkv = self.linear(self.norm(x, f"{attn}.qkv"), f"{attn}.qkv").unflatten(2, (3, config.n_head, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.linear(y, f"{attn}.proj")
            hidden = self.linear(self.norm(x, mlp), f"{mlp}.fc1")
            x = x + self.linear(casts.activation_reference(config.activation, hidden), f"{mlp}.fc2")
        logits = F.linear(self.norm(x, "lm_head"), self.weights["wte.weight"])
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def mean_error(gradients, exact):
    """Return the relative error of gradients, {name: tensor}, in the mean over the parameters."""
    errors = [(gradients[name] - expected).norm() / expected.norm() for name, expected in exact.items()]
    return torch.stack(errors).mean()


@pytest.mark.parametrize("activation, bias", [
    ("gelu", True), ("swiglu", False), on_gpu("gelu", False), on_gpu("swiglu", True)])
@pytest.mark.parametrize("size", [
    dict(n_embd=64, n_head=2, n_layer=2, vocab_size=128, batch=2, length=16),
    pytest.param(dict(n_embd=768, n_head=12, n_layer=4, vocab_size=50304, batch=8, length=1024),
                 marks=pytest.mark.gpu)])
def test_a_model_is_no_farther_from_float32_than_pytorch(size, activation, bias):
    size = dict(size)
    batch, length = size.pop("batch"), size.pop("length")
    torch.manual_seed(0)
    model = FastGPT2Model(FastConfig(**size, n_positions=length, bias=bias, activation=activation))
    model = model.to(DEVICE, torch.bfloat16)
    tokens = torch.randint(size["vocab_size"], (batch, length + 1), device=DEVICE)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    losses, gradients = [], []
    plain, reference = PlainGPT(model, torch.bfloat16), PlainGPT(model, torch.float32)
    for net, parameters in ((model, dict(model.named_parameters())), (plain, plain.weights),
                            (reference, reference.weights)):
        loss = net(*batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: parameters[name].grad.float() for name in reference.weights})
    ours, in_pytorch, exact_gradients = gradients
    assert abs(losses[0] - losses[2]) <= abs(losses[1] - losses[2]) + 1e-3
    assert mean_error(ours, exact_gradients) <= 1.05 * mean_error(in_pytorch, exact_gradients)
