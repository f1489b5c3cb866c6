"""FSDP2's all-gather and reduce-scatter by the GPUs' copy engines, within one machine.

TrainStep calls `use_copy_engines`; a sharded model then no longer uses NCCL for these two. NCCL's kernels
need SMs and slow down the GEMMs that run beside them (`results/multi_gpu.json`); copy engines need none:

    all-gather        each rank has put its shard into its output buffer
                      barrier, read the other shards from the other ranks' buffers, barrier
    reduce-scatter    barrier, write the other ranks' parts of the gradients to their buffers, barrier
                      sum the parts of this rank

The first barrier makes the GPU wait until all ranks have the data, or the free memory, that the copies need;
the second one until the copies of all ranks are complete. Buffers are memory that all ranks can access
(nanote/peers.py), allocated once, since CUDA graphs keep their addresses.

References: `Comm` in torch/distributed/fsdp/_fully_shard/_fsdp_api.py, the interface that FSDP2 calls;
`_low_contention_all_gather` in torch/distributed/_symmetric_memory, the same for a single tensor.
"""
import math
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from nanote import parallel, peers

_using = weakref.WeakSet()  # models that use copy engines


def use_copy_engines(model) -> str:
    """Let a model that parallel.shard has sharded use copy engines, if all ranks can. Collective.

    Returns:
        "", or the reason why NCCL gathers weights and reduces gradients.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units or dist.get_world_size() == 1:
        return "nothing is sharded"
    if model in _using:  # of an earlier step
        return ""
    parameter = next(model.parameters())
    group, device = parameter.device_mesh["shard"].get_group(), parameter.to_local().device
    reason = parallel.reason_of_any_rank(peers.no_access_reason(device))
    if not reason:
        probe = Buffer(group, 16, device)
        reason = peers.share_memory(probe.allocate, probe.connect)
    if not reason:
        all_gather, reduce_scatter = AllGather(group, device), ReduceScatter(group, device)
        for unit in units:
            unit.set_custom_all_gather(all_gather)
            unit.set_custom_reduce_scatter(reduce_scatter)
        _using.add(model)
    return reason


class AllGather:
    """Gather the shards of a unit of FSDP2. At most two units are being gathered at a time."""

    def __init__(self, group, device: torch.device):
        self.buffers = Buffers(group, 2, device)

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the gathered weights, (*size,). Collective if none was as large before."""
        return self.buffers.take(math.prod(size), dtype).view(size)

    def __call__(self, output_tensor, input_tensor, group, async_op=False) -> None:
        """Gather in `output_tensor`, (ranks·size,), of which `input_tensor`, (size,), is this rank's part."""
        buffer, size = self.buffers.current, input_tensor.numel()
        buffer.handle.barrier()
        for other in others(group):
            source = buffer.handle.get_buffer(other, (size,), output_tensor.dtype, other * size)
            output_tensor[other * size:(other + 1) * size].copy_(source)
        buffer.handle.barrier()


class ReduceScatter:
    """Sum the gradients of a unit of FSDP2 over ranks; each gets its part of the sum."""

    def __init__(self, group, device: torch.device):
        self.received = Buffers(group, 1, device)

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        """Sum the parts of this rank, (size,), of all ranks' `input_tensor`, (ranks·size,)."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"reduce-scatter by copy engines: {op}; only SUM is supported")
        size, rank, ranks = output_tensor.numel(), group.rank(), group.size()
        received = self.received.take((ranks - 1) * size, input_tensor.dtype).view(ranks - 1, size)
        handle = self.received.current.handle
        handle.barrier()
        for other in others(group):
            place = (rank - other - 1) % ranks * size  # behind those of the ranks after `other`
            target = handle.get_buffer(other, (size,), input_tensor.dtype, place)
            target.copy_(input_tensor[other * size:(other + 1) * size])
        handle.barrier()
        torch.add(input_tensor[rank * size:(rank + 1) * size], received[0], out=output_tensor)
        for part in received[1:]:
            output_tensor += part


def others(group) -> list[int]:
    """Return the other ranks of a group, the next one first, so that not all copy from the same GPU."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


class Buffer:
    """Memory that all ranks of a group can access."""

    def __init__(self, group, size: int, device: torch.device):
        self.group, self.size, self.device = group, size, device  # bytes

    def allocate(self) -> None:
        self.memory = peers.allocate(self.size, torch.uint8, self.device)

    def connect(self) -> None:
        """Get the addresses of the other ranks' memory. Collective: all have allocated as much."""
        self.handle = peers.connect(self.memory, self.group)


class Buffers:
    """Buffers of one size, used in turns."""

    def __init__(self, group, count: int, device: torch.device):
        self.group, self.count, self.device = group, count, device
        self.buffers, self.size, self.turn = [], 0, 0

    @property
    def current(self) -> Buffer:
        return self.buffers[self.turn]

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of the next buffer, (size,). Collective if no buffer was as large before."""
        needed = size * dtype.itemsize
        if needed > self.size:
            torch.cuda.empty_cache()  # shared memory cannot reuse what PyTorch's allocator keeps
            self.size = needed
            self.buffers = [Buffer(self.group, needed, self.device) for _ in range(self.count)]
            for buffer in self.buffers:
                buffer.allocate()
                buffer.connect()
        self.turn = (self.turn + 1) % self.count
        return self.current.memory[:needed].view(dtype)
