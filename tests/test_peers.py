"""A training step whose update is divided: three processes, or two ranks of which one is a stand-in.

The kernels, with all ranks in one process: tests/test_fast_adam.py. Two GPUs: tests/test_multi_gpu.py."""
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
pytest.importorskip("triton")

from fast_kernels.adam import FastAdam  # noqa: E402
from nanote import peers  # noqa: E402
from nanote.config import TrainConfig  # noqa: E402
from nanote.train_step import TrainStep  # noqa: E402
from trainer_tools import run_groups  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for the CPU")


class Handle:
    """Memory of two ranks; the other one's receives what this rank sends."""

    def __init__(self, tensor):
        self.others = torch.zeros_like(tensor)
        self.buffer_ptrs = [tensor.data_ptr(), self.others.data_ptr()]

    def get_buffer(self, rank, shape, dtype):
        return self.others.view(shape)

    def barrier(self):
        pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.config = None

    def forward(self, x, y):
        return (self.second(torch.tanh(self.first(x))) - y).square().mean()


@pytest.fixture
def reasons(monkeypatch):
    """Pretend that there are two ranks with equal gradients; return what the other one cannot do."""
    found = []

    def all_gather_object(gathered, own, group=None):
        gathered[:] = [own, found.pop(0) if found else ""]

    fakes = dict(
        is_initialized=lambda: True, get_world_size=lambda: 2, get_rank=lambda: 0, broadcast=mock.Mock(),
        all_gather_object=all_gather_object, all_reduce=lambda tensor: tensor.mul_(2))
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *devices: True)
    monkeypatch.setattr(peers, "allocate", lambda size, dtype, device: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(peers, "connect", Handle)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return found


def make_step(model=None, optimizer=None, **options):
    model = model or Model()
    optimizer = optimizer or FastAdam(list(model.parameters()), lr=1e-2)
    return TrainStep(model, model, optimizer, TrainConfig(fp8_recipe="none", **options), torch.device("cpu"))


def batch():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(8, 64, generator=generator) for _ in range(2))


def test_gradients_of_the_other_rank_s_part_are_sent_and_it_gets_the_weights(reasons):
    step = make_step()
    step([batch()], 1e-2)
    own = step.gradients.peers
    of_other = own.handle.others
    sent = torch.cat([bucket.reduced[own.widths[bucket]:] for bucket in own.buckets])
    assert sent.abs().sum() > 0 and torch.equal(of_other[:len(sent)], sent)
    weights = own.weights
    for parameter, start in weights.starts.items():
        first, size = own.part(parameter)
        there = weights.handle.others[start + first:start + first + size]
        assert torch.equal(there, parameter.detach().view(-1)[first:first + size])


def test_three_ranks_train_as_after_an_all_reduce(tmp_path, monkeypatch):
    """With a frozen block, accumulation, and a step that is skipped; all end with the same weights."""
    monkeypatch.chdir(tmp_path)
    run_groups("3", "divides", TRITON_INTERPRET="1")


def test_steps_of_one_optimizer_take_turns(reasons):
    """Each sums what was sent for itself: the loss falls in every step."""
    step = make_step()
    other = make_step(step.model, step.optimizer)
    assert other.gradients.peers.weights is step.gradients.peers.weights
    losses = [each([batch()], 1e-2)[0].item() for each in (step, other, other, step, step)]
    assert losses == sorted(losses, reverse=True)
    assert step.optimizer.peers is step.gradients.peers


def test_a_changed_grad_accum_keeps_the_memory_of_the_weights(reasons):
    step = make_step()
    step([batch()], 1e-2)
    before, step.config.grad_accum = step.gradients.peers, 2
    step([batch(), batch()], 1e-2)
    assert step.gradients.peers is not before and step.gradients.peers.weights is before.weights


def test_a_parameter_that_is_frozen_leaves_the_shared_memory(reasons):
    step = make_step()
    buffer, weight = step.gradients.peers.weights.buffer, step.model.first.weight
    weight.requires_grad_(False)
    make_step(step.model)
    start, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
    assert not start <= weight.data_ptr() < start + size


@pytest.mark.parametrize("at", [0, 1, 2])
def test_ranks_agree_not_to_divide(reasons, at):
    """Before memory is allocated, before it is shared, and after that."""
    reasons[:] = at * [""] + ["no"]
    step = make_step()
    assert step.undivided_reason == "no"
    assert step.gradients.peers is None and step.optimizer.peers.count == 0


def test_memory_that_cannot_be_shared_is_a_reason(reasons, monkeypatch):
    monkeypatch.setattr(peers, "connect", mock.Mock(side_effect=RuntimeError("pidfd_getfd failed\nmore")))
    assert make_step().undivided_reason == "memory could not be shared: pidfd_getfd failed"


@pytest.mark.parametrize("variable, value, part", [
    ("LOCAL_WORLD_SIZE", "1", "torchrun has not started"),
    ("NCCL_P2P_DISABLE", "1", "NCCL_P2P_DISABLE is set")])
def test_what_the_environment_rules_out(reasons, monkeypatch, variable, value, part):
    monkeypatch.setenv(variable, value)
    assert part in make_step().undivided_reason


def test_a_parameter_that_only_the_optimizer_has(reasons):
    model, probe = Model(), torch.nn.Linear(8, 8)
    optimizer = FastAdam([*model.parameters(), *probe.parameters()], lr=1e-2)
    assert "are not those of the model" in make_step(model, optimizer).undivided_reason
    step = make_step()
    with pytest.raises(ValueError, match="make the step again"):
        step.optimizer.add_param_group({"params": list(probe.parameters())})
