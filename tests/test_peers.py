"""nanote/peers.py: three processes that divide an update train as after an all-reduce of gradients.

Files stand for the memory that GPUs share. The kernels alone: tests/test_fast_adam.py; two GPUs:
tests/test_multi_gpu.py.
"""
import json
import sys

import pytest

from trainer_tools import ROOT, finish, start_ranks

pytest.importorskip("triton")

WORKER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from fast_kernels.adam import FastAdam
from nanote import ddp, parallel, peers
from nanote.optimizers import Optimizer

ranks, names = parallel.start(), {}
ddp.BUCKET_BYTES = 4096  # several buckets in a small model
torch.cuda.device_count = lambda: ranks.count
torch.cuda.can_device_access_peer = lambda *devices: True


def open_file(name, rank, size, dtype):
    return torch.from_file(f"{name}-{rank}", shared=True, size=size, dtype=dtype)


def allocate_shared(size, dtype, device):
    name = f"shared-{len(names)}"
    tensor = open_file(name, ranks.rank, size, dtype)
    names[tensor.data_ptr()] = name
    return tensor


class SharedFiles:
    def __init__(self, tensor):
        dist.barrier()  # all files are there
        name = names[tensor.data_ptr()]
        self.memories = [tensor if rank == ranks.rank else open_file(name, rank, tensor.numel(), tensor.dtype)
                         for rank in range(ranks.count)]
        self.buffer_ptrs = [memory.data_ptr() for memory in self.memories]

    def get_buffer(self, rank, shape, dtype):
        return self.memories[rank]

    def barrier(self):
        dist.barrier()


def train(steps):
    '''Return the reason why the update is not divided, losses and norms, the weights and first moments.'''
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(15, 15) for _ in range(8)])
    model[2].requires_grad_(False)
    adam = FastAdam(list(model.parameters()), lr=1e-2)
    optimizer = Optimizer(model, adam, fast_adam=adam)
    gradients = ddp.make_gradients(model, optimizer, grad_accum=2)
    random, reached = torch.Generator().manual_seed(ranks.rank), []
    for number in range(steps):
        for first in (True, False):
            x, y = (torch.randn(6, 15, generator=random) for _ in range(2))
            factor = float("inf") if number == 1 and ranks.rank == 2 else 0.5 / ranks.count
            with gradients.accumulate(first=first, last=not first):
                loss = factor * (torch.tanh(model(x)) - y).square().mean()
                loss.backward()
        gradients.set_grad()
        norm = optimizer.clip_gradients(0.5)
        optimizer.step(skip=~norm.isfinite())
        reached += [parallel.sum_over_ranks(loss.detach().float()), norm]
    optimizer.gather_state()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    flat = [torch.cat([t.detach().flatten() for t in some]) for some in (model.parameters(), moments)]
    return gradients.undivided_reason, torch.stack(reached), *flat


def equal_on_all_ranks(tensor):
    of_ranks = [None] * ranks.count
    dist.all_gather_object(of_ranks, tensor)
    return all(torch.equal(tensor, other) for other in of_ranks)


def not_on_rank_1(size, dtype, device):
    if ranks.rank == 1:
        raise RuntimeError("pidfd_getfd failed\\nmore")
    return allocate_shared(size, dtype, device)


found, peers.rendezvous = {}, SharedFiles
os.environ["NCCL_P2P_DISABLE"], peers.allocate_shared = "1", allocate_shared
found["disabled"], *expected = train(steps=3)
assert not expected[0][2:4].isfinite().any() and expected[0][4:].isfinite().all()
os.environ["NCCL_P2P_DISABLE"] = "0"
found["divided"], *divided = train(steps=3)
for one, other in zip(divided, expected, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
assert all(map(equal_on_all_ranks, divided[1:])), "the ranks have other weights"
peers.allocate_shared = not_on_rank_1
found["failed"], *_ = train(steps=1)
print("found", json.dumps(found), flush=True)
parallel.exit(0)
"""


def test_a_divided_update_trains_as_an_all_reduce(tmp_path, monkeypatch):
    """With a frozen layer, accumulation and a skipped step; or memory that one rank cannot share."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", WORKER, str(ROOT)]
    outputs = finish(start_ranks(command, 3, TRITON_INTERPRET="1", LOCAL_WORLD_SIZE="3",
                                 CUDA_VISIBLE_DEVICES=""))
    reasons = {"disabled": "NCCL_P2P_DISABLE is set", "divided": "",
               "failed": "memory could not be shared: pidfd_getfd failed"}
    for output in outputs:
        assert json.loads(output.partition("found ")[2]) == reasons
