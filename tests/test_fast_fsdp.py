"""The accelerated training pass of a model that FSDP2 shards computes what it computes without."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")
from test_fast_block import DEVICE, make_model, make_tokens, modules_like_te, state_of  # noqa: E402, F401
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from fast_kernels import accelerate  # noqa: E402
from fast_kernels import block as fast_block  # noqa: E402
from fast_kernels import casts as fast_casts  # noqa: E402
from fast_kernels import support as fast_support  # noqa: E402
from kernel_tools import HAS_GPU, _casts_that_round, _instructions, _poisoned_memory  # noqa: E402, F401
from nanote import parallel  # noqa: E402
from nanote.config import TrainConfig  # noqa: E402

pytestmark = [pytest.mark.gpu] if HAS_GPU else []
MODERN = dict(
    use_rmsnorm=True, use_rotary=True, activation="swiglu", bias=False, n_inner=48, tie_embeddings=False,
    fp8_lm_head=False)


@pytest.fixture(autouse=True)
def one_process_group():
    dist.init_process_group("cpu:gloo,cuda:nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0,
                            world_size=1)
    yield
    dist.destroy_process_group()


def shard(model, reshard=True):
    config = TrainConfig(parallel="fsdp", reshard_after_forward=reshard)
    parallel.shard(model, config, torch.device(DEVICE))
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, microbatches, steps=2):
    """Return losses, gradients and FP8 state of the last step. All but the last micro-batch of a step pass no
    gradients on."""
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        losses = []
        for micro in range(microbatches):
            if model is not None and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == microbatches - 1)
            first = {"is_first_microbatch": micro == 0} if microbatches > 1 else {}
            loss = model(*make_tokens(10 * step + micro), **first)
            loss.backward()
            losses.append(loss.item())
        gradients = {name: whole(p.grad).float() for name, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    return losses, gradients, state_of(model)


@pytest.mark.parametrize("options, reshard, microbatches", [
    ({}, True, 1), ({}, False, 2), ({}, True, 2), (MODERN, True, 1)])
def test_a_sharded_model_trains_as_one_that_is_not(monkeypatch, options, reshard, microbatches):
    passes, block_pass = [], fast_block.block_pass
    monkeypatch.setattr(fast_block, "block_pass", lambda *args: passes.append(args[0]) or block_pass(*args))
    expected = train(make_model(**options), microbatches)
    model, count = shard(make_model(**options), reshard), len(passes)
    losses, gradients, state = train(model, microbatches)
    assert len(passes) == 2 * count > 0 and passes[-1] is model.blocks[1]
    assert losses == pytest.approx(expected[0], rel=1e-3 if microbatches > 1 else 1e-6)
    for name, gradient in gradients.items():
        # autograd sums micro-batches in BF16, FSDP2 in float32
        bound = 2.0**-8 if microbatches > 1 else 0
        error = (gradient - expected[1][name]).norm() / expected[1][name].norm()
        assert error <= bound, f"{name} differs by {error}"
    for name, tensors in state.items():
        for tensor, other in zip(tensors, expected[2][name]):
            torch.testing.assert_close(tensor, other, rtol=0.02, atol=0)
