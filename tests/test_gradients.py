"""nanote/gradients.py: sums of micro-batches in float32, and the `main_grad` of Megatron-LM and TE."""
import gc
import json
import weakref
from unittest import mock

import pytest
import torch

from bench import gradient_sums
from nanote.gradients import Gradients
from trainer_tools import run_train


class FusedLinear(torch.autograd.Function):
    """x @ weightᵀ, whose backward pass writes the weight's gradient to main_grad, as a fused GEMM does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dweight, main_grad = (dy.T @ x).float(), ctx.weight.main_grad
        main_grad.copy_(dweight) if ctx.weight.overwrite_main_grad else main_grad.add_(dweight)
        ctx.weight.overwrite_main_grad, ctx.weight.grad_added_to_main_grad = False, True
        return dy @ weight, main_grad.detach()


class Model(torch.nn.Module):
    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2))
        self.unused = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
        self.fused = fused

    def forward(self, x):
        for layer in (self.first, self.second, self.first):  # the first weight is used twice
            y = FusedLinear.apply(x, layer.weight) if self.fused else x @ layer.weight.T
            x = torch.tanh(y + layer.bias)
        return x.float().square().sum()


def batches(count):
    random = torch.Generator().manual_seed(1)
    return [torch.randn(32, 16, generator=random).bfloat16() for _ in range(count)]


def accumulate(model, count, **dtypes):
    gradients = Gradients(model, **dtypes)
    for _ in range(2):  # the second step must not see the first one's gradients
        for number, batch in enumerate(batches(count)):
            with gradients.micro_batch(first=number == 0, last=number == count - 1):
                model(batch).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def exact(count):
    """Sum in float64 what each micro-batch gives in BF16."""
    total = {}
    for batch in batches(count):
        model = Model(fused=False)
        model(batch).backward()
        for name, p in model.named_parameters():
            total[name] = total.get(name, 0) + (0 if p.grad is None else p.grad.double())
    return total


@pytest.mark.parametrize("fused", [False, True])
def test_sums_of_micro_batches_are_float32(fused):
    found = accumulate(Model(fused), 64)
    for name, expected in exact(64).items():
        if name.startswith("unused"):
            assert found[name] is None, "the optimizer leaves it alone"
            continue
        assert found[name].dtype == torch.float32
        error = (found[name] - expected).norm() / expected.norm()
        # a weight used twice: autograd rounds the sum of both to BF16, a fused GEMM does not
        assert error < (1e-6 if "second" in name or not fused else 4e-3), name


def test_float32_weights_keep_float32_gradients():
    """Beside BF16 weights whose gradients are summed in float32 and reduced in BF16."""
    model = Model(fused=False)
    model.second.float()
    with mock.patch("nanote.parallel.world_size", return_value=2):  # one rank reduces nothing
        gradients = Gradients(model, torch.float32, torch.bfloat16)
    reduced = {name: gradients.views[p][1].dtype for name, p in model.named_parameters()}
    assert reduced.pop("second.bias") == reduced.pop("second.weight") == torch.float32
    assert set(reduced.values()) == {torch.bfloat16}


def test_sums_in_bfloat16_are_worse():
    model = Model(fused=False)
    model.unused.requires_grad_(False)
    few, many = gradient_sums.measure(model, [(batch,) for batch in batches(64)], (4, 64))
    assert max(few["float32"], many["float32"]) < 1e-6
    assert few["rounded_once"] < few["bfloat16"] < many["bfloat16"] < 0.05
    assert many["rounded_once"] < 2**-8, "half of BF16's spacing, relative to the value"
    found = accumulate(model, 2, accumulated=torch.bfloat16, reduced=torch.bfloat16)
    assert found["second.weight"].dtype == torch.bfloat16


def test_the_sums_of_a_run(tokens, tmp_path):
    folder, json_file = tmp_path / "run", tmp_path / "sums.json"
    sizes = "--n-layer 1 --n-head 2 --n-embd 32 --seq-len 32 --micro-batch-size 2 --eval-tokens 64"
    train = f"--preset tiny {sizes} --max-steps 2 --data {tokens}"
    assert run_train(f"{train} --dtype bfloat16 --out-dir {folder}") == 0
    gradient_sums.main([str(folder), "--micro-batches", "1", "4", "--json", str(json_file)])
    one, four = json.loads(json_file.read_text())["rows"]
    assert one["float32"] == 0 and one["bfloat16"] == one["rounded_once"]
    assert four["float32"] < 1e-6 < four["rounded_once"] < four["bfloat16"] < 0.02

    assert run_train(f"{train} --out-dir {tmp_path / 'float32'}") == 0
    with pytest.raises(ValueError, match="a run with float32 weights, .* with --dtype bfloat16"):
        gradient_sums.main([str(tmp_path / "float32"), "--json", str(json_file)])


@pytest.mark.parametrize("count", [1, 3])
def test_two_steps_of_one_model(count):
    """Neither takes the other's gradients, and a parameter that is used no more has none."""
    model = Model(fused=False)
    one, other = Gradients(model), Gradients(model)
    for gradients in (other, one):
        for number, batch in enumerate(batches(count)):
            with gradients.micro_batch(first=number == 0, last=number == count - 1):
                model(batch).backward()
        error = model.second.weight.grad - exact(count)["second.weight"]
        assert error.norm() < 1e-5 * model.second.weight.grad.norm()
    with one.micro_batch(first=True, last=True):
        model.first.weight.float().square().sum().backward()
    assert model.second.weight.grad is None and not one.views[model.second.weight][1].any()


def test_a_gradient_may_come_twice():
    class Checkpointed(Model):
        def forward(self, x):
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
            return x.float().square().sum()

        def layer(self, x):
            return torch.tanh(self.first(x))

    model, (x,) = Checkpointed(fused=False), batches(1)
    x.requires_grad_()
    model(x).backward()
    expected, model.first.weight.grad = model.first.weight.grad, None
    gradients = Gradients(model)
    with gradients.micro_batch(first=True, last=True):
        model(x).backward()
    assert (model.first.weight.grad - expected).norm() < 2.0**-7 * expected.norm()


def test_buffers_are_freed_with_the_step():
    model = Model(fused=False)
    gradients = Gradients(model)
    reference = weakref.ref(gradients)
    del gradients
    gc.collect()
    assert reference() is None


def test_passes_outside_a_step_are_plain_autograd():
    model = Model(fused=False)
    accumulate(model, 2)
    model.zero_grad(set_to_none=True)
    model(batches(1)[0]).backward()
    torch.testing.assert_close(model.second.weight.grad.double(), exact(1)["second.weight"], rtol=0, atol=0)
    assert not hasattr(model.second.weight, "main_grad")
