"""FSDP2's all-gather and reduce-scatter by the GPUs' copy engines, within one machine.

TrainStep calls `use_copy_engines`. NCCL's kernels need SMs, which the GEMMs beside them then lack; copies by
the copy engines share only the memory with them (`results/multi_gpu.json` has both):

    all-gather        each rank has put its shard into its output
                      barrier, read the other shards from the other ranks' outputs, barrier
    reduce-scatter    barrier, write each other rank's part of the gradients to its buffer, barrier
                      sum this rank's part and what it has received

The first barrier makes the GPU wait until all ranks have the data, or the free memory, that the copies need;
the second one until the copies of all ranks are complete. Outputs and buffers are memory that all ranks can
access (nanote/peers.py): allocated once, since CUDA graphs keep their addresses, for the largest units of
FSDP2. Whatever does not fit goes through NCCL.

References: `Comm` in torch/distributed/fsdp/_fully_shard/_fsdp_api.py, the interface that FSDP2 calls;
`_low_contention_all_gather` in torch/distributed/_symmetric_memory, the same for a single tensor.
"""
import math
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nanote import parallel, peers

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
except ImportError:  # PyTorch has no public name for them
    DefaultAllGather = DefaultReduceScatter = object

_using = weakref.WeakSet()  # models that use copy engines


def use_copy_engines(model, config) -> str:
    """Let a model that parallel.shard has sharded use copy engines, if all ranks can. Collective.

    Returns:
        "", or the reason why NCCL gathers weights and reduces gradients.
    """
    units = parallel.units(model)
    if not units:
        return "nothing is sharded"
    if model in _using:  # of an earlier step
        return ""
    if DefaultAllGather is object:
        return "this PyTorch's FSDP2 has other collectives"
    parallel.reshard(model)
    parameter = next(parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    group, device = parameter.device_mesh["shard"].get_group(), parameter.to_local().device
    if group.size() == 1:
        return "there is one shard"
    reason = parallel.reason_of_any_rank(peers.no_access_reason(device))
    if reason:
        return reason
    *gathered, elements = largest_units(units, group.size())
    received = (group.size() - 1) * elements * parallel.reduction_dtype(config).itemsize
    buffers = [Buffer(group, size, device) for size in (*gathered, received)]
    reason = peers.share_memory(lambda: [buffer.allocate() for buffer in buffers],
                                lambda: [buffer.connect() for buffer in buffers])
    if reason:
        return reason
    all_gather, reduce_scatter = AllGather(buffers[:2]), ReduceScatter(buffers[2])
    for unit in units:
        unit.set_custom_all_gather(all_gather)
        unit.set_custom_reduce_scatter(reduce_scatter)
    _using.add(model)
    return ""


def largest_units(units: list, shards: int) -> tuple[int, int, int]:
    """Return the bytes of the two largest units when they are gathered, and the most elements of a shard.

    FSDP2 pads each parameter's first dimension to a multiple of the shards.
    """
    seen, gathered, elements = set(), [0, 0], []
    for unit in reversed(units):  # modules() lists a unit before those inside it
        own = [p for p in unit.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        sizes = [math.ceil(p.shape[0] / shards) * math.prod(p.shape[1:]) for p in own]
        gathered.append(sum(shards * size * p.dtype.itemsize for size, p in zip(sizes, own)))
        elements.append(sum(sizes))
    return *sorted(gathered, reverse=True)[:2], max(elements)


class Buffer:
    """Memory that all ranks of a group can access."""

    def __init__(self, group, size: int, device: torch.device):
        self.group, self.ranks, self.device = group, dist.get_process_group_ranks(group), device
        self.size = size  # in bytes
        self.user = lambda: None  # a weak reference to the tensor that uses the memory

    def allocate(self) -> None:
        self.memory = peers.allocate(max(1, self.size), torch.uint8, self.device)

    def connect(self) -> None:
        """Get the addresses of the other ranks' memory. Collective: all have allocated as much."""
        self.handle = peers.connect(self.memory, self.group)

    def is_of(self, group) -> bool:
        """Return whether these ranks share it; device meshes have several groups of the same ranks."""
        return group is self.group or dist.get_process_group_ranks(group) == self.ranks

    def view(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `size` elements, (size,)."""
        return self.memory[:size * dtype.itemsize].view(dtype)


class AllGather(DefaultAllGather):
    """Gather the shards of a unit of FSDP2."""

    def __init__(self, buffers: list[Buffer]):
        self.buffers = buffers  # the one used last is at the end

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a unit's gathered weights, `size`: (elements,).

        FSDP2 holds the tensor until it has made the gathers that follow wait for its use. It usually gathers
        two units at a time; with gradient checkpoints of several blocks, or `unshard`, more.
        """
        for number, buffer in enumerate(self.buffers):
            if buffer.user() is None and size[0] * dtype.itemsize <= buffer.size:
                self.buffers.append(self.buffers.pop(number))
                tensor = buffer.view(size[0], dtype)
                buffer.user = weakref.ref(tensor)
                return tensor
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        """Gather in `output_tensor`, (ranks * size,). `input_tensor`, (size,), is this rank's part of it."""
        of_address = {buffer.memory.data_ptr(): buffer for buffer in self.buffers}
        buffer, size = of_address.get(output_tensor.data_ptr()), input_tensor.numel()
        if buffer is None or not buffer.is_of(group):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        buffer.handle.barrier()
        for other in peers.other_ranks(group.rank(), group.size()):
            source = buffer.handle.get_buffer(other, (size,), output_tensor.dtype, other * size)
            output_tensor[other * size:(other + 1) * size].copy_(source)
        buffer.handle.barrier()


class ReduceScatter(DefaultReduceScatter):
    """Sum the gradients of a unit of FSDP2 over ranks; each gets its part of the sum."""

    def __init__(self, received: Buffer):
        self.received = received

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        """Sum over ranks. `input_tensor`, (ranks * size,), has the part of each rank; `output_tensor`,
        (size,), gets this rank's."""
        size, rank, ranks, dtype = output_tensor.numel(), group.rank(), group.size(), input_tensor.dtype
        count, handle = (ranks - 1) * size, self.received.handle
        fits = count * dtype.itemsize <= self.received.size
        if not fits or not self.received.is_of(group) or op != dist.ReduceOp.SUM:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        handle.barrier()
        for other in peers.other_ranks(rank, ranks):
            target = handle.get_buffer(other, (size,), dtype, peers.slot(rank, other, ranks) * size)
            target.copy_(input_tensor[other * size:(other + 1) * size])
        handle.barrier()
        received = self.received.view(count, dtype).view(ranks - 1, size)
        torch.add(input_tensor[rank * size:(rank + 1) * size], received[0], out=output_tensor)
        for part in received[1:]:  # rounded after each addition, as in a ring of NCCL
            output_tensor += part
