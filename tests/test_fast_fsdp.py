"""The fast model, sharded by FSDP2, trains as it does whole: it is made of ordinary modules."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")
from test_fast_model import MODERN, make_model, make_tokens  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from kernel_tools import HAS_GPU, _as_on_a_gpu, _plain_casts  # noqa: E402, F401
from nanote import ddp, recipes  # noqa: E402

pytestmark = [pytest.mark.gpu] if HAS_GPU else []


@pytest.fixture(autouse=True)
def one_process_group():
    dist.init_process_group("cpu:gloo,cuda:nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0,
                            world_size=1)
    yield
    dist.destroy_process_group()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, microbatches, steps=2):
    """Return losses, gradients and FP8 state of the last step. The last micro-batch of a step reduces
    gradients."""
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        losses = []
        for micro in range(microbatches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == microbatches - 1)
            first = {"is_first_microbatch": micro == 0} if microbatches > 1 else {}
            loss = model(*make_tokens(10 * step + micro), **first)
            loss.backward()
            losses.append(loss.item())
        gradients = {name: whole(p.grad).float() for name, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    return losses, gradients, recipes.get_state(model)


@pytest.mark.parametrize("options, microbatches", [
    (dict(n_layer=2), 2), (MODERN | dict(tie_embeddings=False, fp8_lm_head=False), 1)])
def test_a_sharded_model_trains_as_one_that_is_not(options, microbatches):
    expected = train(make_model(**options), microbatches)
    model = ddp.distribute(make_model(**options), "fsdp", microbatches)
    losses, gradients, state = train(model, microbatches)
    # autograd sums micro-batches in BF16, FSDP2 in float32; a GPU sums attention's gradients in any order
    tolerance = 0.02 if HAS_GPU or microbatches > 1 else 0
    assert losses == pytest.approx(expected[0], rel=tolerance, abs=0)
    for name, gradient in gradients.items():
        error = (gradient - expected[1][name]).norm() / expected[1][name].norm()
        assert error <= tolerance, f"{name} differs by {error}"
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[2][name], rtol=5 * tolerance, atol=0)
