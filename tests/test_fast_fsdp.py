"""The accelerated training pass of a model that FSDP2 shards computes what it computes without."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")
from test_fast_block import DEVICE, make_model, make_tokens, modules_like_te, state_of  # noqa: E402, F401
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from fast_kernels import accelerate  # noqa: E402
from fast_kernels import block as fast_block  # noqa: E402
from fast_kernels import support as fast_support  # noqa: E402
from kernel_tools import HAS_GPU, _casts_that_round, _instructions, _poisoned_memory  # noqa: E402, F401
from nanote import ddp  # noqa: E402

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


def shard(model):
    return ddp.distribute(model, "fsdp")


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
    return losses, gradients, state_of(model)


@pytest.mark.parametrize("options, microbatches", [({}, 1), ({}, 2), (MODERN, 1)])
def test_a_sharded_model_trains_as_one_that_is_not(monkeypatch, options, microbatches):
    passes, block_pass = [], fast_block.block_pass
    monkeypatch.setattr(fast_block, "block_pass", lambda *args: passes.append(args[0]) or block_pass(*args))
    expected = train(make_model(**options), microbatches)
    model, count = shard(make_model(**options)), len(passes)
    losses, gradients, state = train(model, microbatches)
    assert len(passes) == 2 * count > 0 and passes[-1] is model.blocks[1]
    # autograd sums micro-batches in BF16, FSDP2 in float32; a GPU sums attention's gradients in any order
    tolerance = 0.02 if HAS_GPU or microbatches > 1 else 0
    assert losses == pytest.approx(expected[0], rel=tolerance, abs=0)
    for name, gradient in gradients.items():
        error = (gradient - expected[1][name]).norm() / expected[1][name].norm()
        assert error <= tolerance, f"{name} differs by {error}"
    for name, tensors in state.items():
        for tensor, other in zip(tensors, expected[2][name]):
            torch.testing.assert_close(tensor, other, rtol=5 * tolerance, atol=0)


REFUSED = {
    "blocks.1.mlp has hooks": lambda model: model.blocks[1].mlp.register_forward_hook(print),
    "blocks.1 has hooks": lambda model: model.blocks[1].register_forward_pre_hook(print),
    "the model has hooks": lambda model: model.register_forward_hook(print),
    "wte.weight is frozen": lambda model: model.wte.weight.requires_grad_(False),
    "the forward method of blocks.0.mlp was replaced":
        lambda model: setattr(model.blocks[0].mlp, "forward", lambda x: x)}


@pytest.mark.parametrize("words", REFUSED)
def test_edits_of_a_sharded_model_are_named(words):
    model = shard(make_model(fused=False, n_layer=2))
    assert accelerate(model).blocks == "", "sharded before it was accelerated"
    REFUSED[words](model)
    assert words in fast_support.unsupported_reason(model)


@pytest.mark.parametrize("pick, words", [
    (lambda model: [model], "fully_shard was not called on blocks.0"),
    (lambda model: model.blocks, "fully_shard was called on blocks.0"),
    (lambda model: [model.blocks[0].attn, *model.blocks, model],
     "fully_shard was called on blocks.0.attn")])
def test_where_fsdp2_frees_other_parameters_the_modules_run(pick, words):
    model = make_model()
    mesh = dist.init_device_mesh(DEVICE, (1,))
    for module in pick(model):
        fully_shard(module, mesh=mesh)
    assert words in fast_support.unsupported_reason(model)


@pytest.mark.parametrize("dtype, refused", [(None, False), (torch.bfloat16, False), (torch.float32, True)])
def test_parameters_gathered_in_another_dtype_go_through_the_modules(dtype, refused):
    """The shards are in BF16 either way."""
    model = make_model(n_layer=1)
    mesh = dist.init_device_mesh(DEVICE, (1,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    reason = fast_support.unsupported_reason(model)
    assert ("param_dtype=torch.float32" in reason) == refused == bool(reason)
    model(*make_tokens(1)).backward()
