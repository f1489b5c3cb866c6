"""FSDP2's all-gather and reduce-scatter by the GPUs' copy engines, within one machine.

TrainStep calls `use_copy_engines`. NCCL's kernels need SMs, which the GEMMs beside them then lack; copies by
the copy engines share only the memory with them (`results/multi_gpu.json` has both):

    all-gather        each rank has put its shard into its output
                      barrier, read the other shards from the other ranks' outputs, barrier
    reduce-scatter    barrier, write each other rank's part of the gradients to its buffer, barrier
                      sum this rank's part and what it has received

The first barrier makes the GPU wait until all ranks have the data, or the free memory, that the copies need;
the second one until the copies of all ranks are complete. Outputs and buffers are memory that all ranks can
access (nanote/peers.py): allocated once, since CUDA graphs keep their addresses, of the size that the largest
unit of FSDP2 needs. Whatever does not fit goes through NCCL.

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


def use_copy_engines(model, config) -> str:
    """Let a model that parallel.shard has sharded use copy engines, if all ranks can. Collective.

    Returns:
        "", or the reason why NCCL gathers weights and reduces gradients.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        return "nothing is sharded"
    if model in _using:  # of an earlier step
        return ""
    parameter = next(model.parameters())
    group, device = parameter.device_mesh["shard"].get_group(), parameter.to_local().device
    if group.size() == 1:
        return "there is one shard"
    reason = parallel.reason_of_any_rank(peers.no_access_reason(device))
    if reason:
        return reason
    gathered, shard = largest_unit(units, group.size())
    received = (group.size() - 1) * shard * parallel.reduction_dtype(config).itemsize
    buffers = [Buffer(group, size, device) for size in (gathered, gathered, received)]
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


def largest_unit(units: list, shards: int) -> tuple[int, int]:
    """Return the largest unit's bytes when it is gathered, and elements of a shard. FSDP2 pads each
    parameter's first dimension to a multiple of the shards."""
    seen, gathered, elements = set(), [], []
    for unit in reversed(units):  # modules() lists a unit before those inside it
        own = [p for p in unit.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        sizes = [math.ceil(p.shape[0] / shards) * math.prod(p.shape[1:]) for p in own]
        gathered.append(sum(shards * size * p.dtype.itemsize for size, p in zip(sizes, own)))
        elements.append(sum(sizes))
    return max(gathered), max(elements)


class Buffer:
    """Memory that all ranks of a group can access."""

    def __init__(self, group, size: int, device: torch.device):
        self.group, self.device = group, device
        self.size = size  # in bytes
        self.user = lambda: None  # a weak reference to the tensor that uses the memory

    def allocate(self) -> None:
        self.memory = peers.allocate(self.size, torch.uint8, self.device)

    def connect(self) -> None:
        """Get the addresses of the other ranks' memory. Collective: all have allocated as much."""
        self.handle = peers.connect(self.memory, self.group)

    def view(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `size` elements, (size,)."""
        return self.memory[:size * dtype.itemsize].view(dtype)


class AllGather:
    """Gather the shards of a unit of FSDP2."""

    def __init__(self, buffers: list[Buffer]):
        self.buffers = buffers  # the one used last is at the end

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a unit's gathered weights, (*size,).

        FSDP2 drops its reference after it has made the streams of later gathers wait for the use of this
        memory, since PyTorch's allocator relies on that, too. It usually gathers two units at a time; with
        gradient checkpoints of several blocks, or `unshard`, more.
        """
        size = math.prod(size)
        for number, buffer in enumerate(self.buffers):
            if buffer.user() is None and size * dtype.itemsize <= buffer.size:
                self.buffers.append(self.buffers.pop(number))
                tensor = buffer.view(size, dtype)
                buffer.user = weakref.ref(tensor)
                return tensor
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False) -> None:
        """Gather in `output_tensor`, (ranks·size,), of which `input_tensor`, (size,), is this rank's part."""
        of_address = {buffer.memory.data_ptr(): buffer for buffer in self.buffers}
        buffer, size = of_address.get(output_tensor.data_ptr()), input_tensor.numel()
        if buffer is None:
            dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group)
            return
        buffer.handle.barrier()
        for other in others(group):
            source = buffer.handle.get_buffer(other, (size,), output_tensor.dtype, other * size)
            output_tensor[other * size:(other + 1) * size].copy_(source)
        buffer.handle.barrier()


class ReduceScatter:
    """Sum the gradients of a unit of FSDP2 over ranks; each gets its part of the sum."""

    def __init__(self, received: Buffer):
        self.received = received

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        """Sum over ranks. `input_tensor`, (ranks·size,), has the part of each rank; `output_tensor`, (size,),
        gets this rank's."""
        size, rank, ranks, dtype = output_tensor.numel(), group.rank(), group.size(), input_tensor.dtype
        count, handle = (ranks - 1) * size, self.received.handle
        if op != dist.ReduceOp.SUM or count * dtype.itemsize > self.received.size:
            dist.reduce_scatter(output_tensor, list(input_tensor.chunk(ranks)), op=op, group=group)
            return
        handle.barrier()
        for other in others(group):
            # at the receiver r, the k-th part is that of rank r + 1 + k
            target = handle.get_buffer(other, (size,), dtype, (rank - other - 1) % ranks * size)
            target.copy_(input_tensor[other * size:(other + 1) * size])
        handle.barrier()
        received = self.received.view(count, dtype).view(ranks - 1, size)
        torch.add(input_tensor[rank * size:(rank + 1) * size], received[0], out=output_tensor)
        for part in received[1:]:
            output_tensor += part


def others(group) -> list[int]:
    """Return the other ranks of a group, the next one first, so that not all copy from the same GPU."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]
