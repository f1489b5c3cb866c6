"""An update divided among the GPUs of one machine: --parallel ddp, where they can access each other's memory.

Each rank updates a part of every bucket of parameters (nanote/ddp.py):

    backward pass     copy each bucket's gradients to the ranks whose parts they are, by the copy engines
    barrier           the gradients of all ranks are there
    gradient norm     sum this rank's part over ranks; all-reduce the sum of squares
    update            of this rank's part; the kernel writes the new weights to all GPUs
    barrier           the weights of all ranks are there

NCCL's kernels need SMs, and slow down the GEMMs beside them; copy engines need none. This is stage 1 of ZeRO
(arXiv:1910.02054), except that each rank has memory for all of the optimizer state.
"""
import math
import os

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from nanote import parallel
from nanote.ddp import ALIGNMENT
from nanote.recipes import round_up


def divide_update(optimizer, gradients) -> str:
    """Divide the update of a model among the ranks, if they can. Collective. Return "", or the reason why
    each rank updates all parameters, after an all-reduce of `gradients` (nanote.ddp.Gradients)."""
    reason, peers = parallel.first_of_ranks(_undivided_reason(optimizer, gradients)), Peers(gradients)
    torch.cuda.empty_cache()  # shared memory cannot reuse what PyTorch's allocator keeps
    for share in (peers.allocate, peers.connect):  # no rank waits for memory that another lacks
        if not reason:
            try:
                share()
            except RuntimeError as error:  # a container may not let processes share the memory of GPUs
                reason = f"memory could not be shared: {str(error).splitlines()[0]}"
            reason = parallel.first_of_ranks(reason)
    if not reason:
        gradients.peers = peers
        optimizer.fast_adam.divide(peers)
    return reason


def _undivided_reason(optimizer, gradients) -> str:
    """Return why the update cannot be divided, as this rank sees it; "" if it can."""
    ranks, device = dist.get_world_size(), gradients.parameters[0].device
    if optimizer.fast_adam is None:
        return "only FastAdam can divide the update"
    if len({parameter.dtype for parameter in gradients.parameters}) > 1:
        return "the parameters have several dtypes"
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != ranks:
        return "torchrun has not started all processes on one machine"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    others = [number for number in range(ranks) if number != device.index]
    has_access = torch.cuda.device_count() >= ranks and all(
        torch.cuda.can_device_access_peer(device, other) for other in others)
    return "" if has_access else "the GPUs cannot access each other's memory"


def allocate_shared(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor (size,) in memory that all ranks can access after a rendezvous."""
    # no multicast; and no pool, where ranks could pair different blocks after one was freed
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
    return _symmetric_memory.empty(size, dtype=dtype, device=device)


class Peers:
    """The other ranks, as FastAdam.divide takes them, with the attributes of its NO_PEERS. Each bucket has a
    part of equal width for each rank."""

    def __init__(self, gradients):
        self.buckets, self.bucket_of = gradients.buckets, gradients.bucket_of
        self.rank, self.ranks, self.all_reduce = dist.get_rank(), dist.get_world_size(), dist.all_reduce
        self.count = self.ranks - 1
        self.widths, self.received_starts, self.width = {}, {}, 0  # in elements; the last is of all buckets
        for bucket in self.buckets:
            self.widths[bucket] = round_up(math.ceil(bucket.size / self.ranks), ALIGNMENT)
            self.received_starts[bucket] = self.width
            self.width += self.widths[bucket]

    def allocate(self) -> None:
        """Allocate memory that all ranks can access: for the others' gradients, and for the parameters."""
        gradient, parameter = self.buckets[0].buffer, next(iter(self.bucket_of))
        self.received = allocate_shared(self.count * self.width, gradient.dtype, gradient.device)
        size = sum(bucket.size for bucket in self.buckets)
        self.weights = allocate_shared(size, parameter.dtype, parameter.device)

    def connect(self) -> None:
        """Give the other ranks access to this memory, and move the parameters there. Collective."""
        group = dist.group.WORLD.group_name
        handle = _symmetric_memory.rendezvous(self.received, group)
        self.weights_handle = _symmetric_memory.rendezvous(self.weights, group)
        self.stride, self.barrier = self.width * self.received.element_size(), handle.barrier
        # the next rank first, so that not all copy to the same GPU at a time
        others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.of_others = [(other, handle.get_buffer(other, self.received.shape, self.received.dtype))
                          for other in others]
        for bucket, weights in zip(self.buckets, self.weights.split([b.size for b in self.buckets])):
            for parameter, start in bucket.offsets.items():
                place = weights[start:start + parameter.numel()].view_as(parameter)
                parameter.data = place.copy_(parameter.detach())
        addresses = self.weights_handle.buffer_ptrs
        self.distances = torch.tensor([addresses[other] - addresses[self.rank] for other in others],
                                      device=self.received.device)

    def _bounds(self, bucket, rank: int) -> tuple[int, int]:
        """Return where a rank's part of a bucket starts and ends, in elements of the bucket."""
        width = self.widths[bucket]
        return min(bucket.size, rank * width), min(bucket.size, (rank + 1) * width)

    def send(self, bucket) -> None:
        """Copy the gradients of a bucket to the ranks whose parts they are."""
        for other, received in self.of_others:
            start, end = self._bounds(bucket, other)
            number = (self.rank - other - 1) % self.ranks  # this rank's among the senders to `other`
            place = number * self.width + self.received_starts[bucket]
            received[place:place + end - start].copy_(bucket.buffer[start:end])

    def part(self, parameter, rank: int | None = None) -> tuple[int, int]:
        """Return the first and the number of elements of a parameter that a rank (None: this one) updates."""
        if parameter not in self.bucket_of:
            return 0, 0
        bucket, size = self.bucket_of[parameter], parameter.numel()
        start, end = self._bounds(bucket, self.rank if rank is None else rank)
        offset = bucket.offsets[parameter]
        first = min(max(start - offset, 0), size)
        return first, min(max(end - offset, 0), size) - first

    def received_at(self, parameter) -> int:
        """Return the address at which the first other rank's gradients of this rank's part are received."""
        bucket = self.bucket_of[parameter]
        first = bucket.offsets[parameter] + self.part(parameter)[0] - self._bounds(bucket, self.rank)[0]
        return self.received[self.received_starts[bucket] + first:].data_ptr()

    def gather(self, tensors: list) -> None:
        """Copy each rank's parts of tensors to all ranks. `tensors`: pairs (tensor, parameter)."""
        for rank in range(self.ranks):
            for tensor, parameter in tensors:
                first, size = self.part(parameter, rank)
                if size:  # as bytes, since NCCL has no 16-bit integers
                    dist.broadcast(tensor.view(-1)[first:first + size].view(torch.uint8), src=rank)
