"""Data-parallel training on the GPUs of one machine, with the update divided among them.

TrainStep calls `divide_update`. After an all-reduce of gradients, every rank would update all parameters.
Here each rank has a part of each bucket of parameters (nanote/gradients.py), and the GPUs access each other's
memory:

    backward pass     copy each bucket's gradients to the ranks whose parts they are, by the copy engines
    barrier           the gradients of all ranks are there
    gradient norm     sum the gradients of this rank's part over ranks; all-reduce their sum of squares
    update            of this rank's part; the kernel writes the new weights to all GPUs
    barrier           the weights of all ranks are there

NCCL's kernels, which need SMs, slow down the GEMMs that run beside them (`results/multi_gpu.json`, the
profile of layout ddp-all_reduce); copy engines need none. And each of N GPUs updates 1/N of the parameters.

This is stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), except that the memory of the optimizer
state is not divided, so that any rank can write any part of a checkpoint.
"""
import itertools
import math
import os
import weakref

import torch
import torch.distributed as dist

from nanote.fp8 import round_up
from nanote.parallel import reason_of_any_rank

ALIGNMENT = 128  # elements: parts start at multiples of 256 bytes
GATHERED = 2**28  # about as many bytes of optimizer state are copied in one broadcast
# The memory of a model's parameters: shared once, since captured graphs of all its steps have its addresses.
_shared_weights = weakref.WeakKeyDictionary()  # model: SharedWeights
_shared = weakref.WeakSet()  # tensors from `allocate`


def divide_update(model, optimizer, gradients, config) -> str:
    """Divide the update of a model among the ranks, if they can. Collective.

    Args:
        gradients: nanote.gradients.Gradients of the model.

    Returns:
        "", or the reason why each rank updates all parameters, after an all-reduce of gradients.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return "there is one process"
    if config.parallel != "ddp":
        return "parameters are sharded"
    if hasattr(optimizer, "divide"):
        optimizer.divide(None)  # the optimizer may have been divided for another step
    reason = reason_of_any_rank(unsupported_reason(model, optimizer))
    if reason:
        return reason
    peers = Peers(model, gradients)
    reason = share_memory(peers.allocate, peers.connect)
    if not reason:
        gradients.peers = peers
        optimizer.divide(peers)
    return reason


def gather_state(optimizer) -> None:
    """Give every rank the whole state of an optimizer, where its update is divided. Collective."""
    if hasattr(optimizer, "gather_state"):
        optimizer.gather_state()


def unsupported_reason(model, optimizer) -> str:
    """Return why the update cannot be divided, as this rank sees it; "" if it can."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or not hasattr(optimizer, "divide"):
        return "only FastAdam can divide the update"
    in_optimizer = {parameter for group in optimizer.param_groups for parameter in group["params"]
                    if parameter.requires_grad}
    if in_optimizer != set(parameters):
        return "the trained parameters of the optimizer are not those of the model"
    if len({parameter.dtype for parameter in parameters}) > 1:
        return "the parameters have several dtypes"
    return no_access_reason(parameters[0].device)


def no_access_reason(device: torch.device) -> str:
    """Return why this rank cannot access the memory of the other ranks' GPUs; "" if it can."""
    ranks = dist.get_world_size()
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != ranks:
        return "torchrun has not started all processes on one machine"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    others = [number for number in range(ranks) if number != device.index]
    if torch.cuda.device_count() < ranks or not all(
            torch.cuda.can_device_access_peer(device, other) for other in others):
        return "the GPUs cannot access each other's memory"
    return ""


def share_memory(allocate, connect) -> str:
    """Call `allocate()` on all ranks, then `connect()`. Collective.

    Returns:
        "", or the reason why the ranks cannot share memory.
    """
    torch.cuda.empty_cache()  # shared memory cannot reuse what PyTorch's allocator keeps
    for function in (allocate, connect):  # a rank must not wait for memory that another could not allocate
        reason = ""
        try:
            function()
        except RuntimeError as error:  # a container may not let processes share the memory of GPUs
            reason = f"memory could not be shared: {str(error).splitlines()[0]}"
        reason = reason_of_any_rank(reason)
        if reason:
            return reason
    return ""


def other_ranks(rank: int, ranks: int) -> list[int]:
    """Return all ranks but `rank`, the next one first, so that not all copy to the same GPU at a time."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def slot(rank: int, receiver: int, ranks: int) -> int:
    """Return the place, from 0, of what `rank` sends among what `receiver` gets from its `other_ranks`."""
    return (rank - receiver - 1) % ranks


def allocate(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor (size,) in memory that all ranks can access after `connect`."""
    from torch.distributed import _symmetric_memory

    # Not used here. And no pool, where ranks could pair different blocks after one was freed.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
    tensor = _symmetric_memory.empty(size, dtype=dtype, device=device)
    _shared.add(tensor)
    return tensor


def connect(tensor: torch.Tensor, group=None):
    """Return the handle of a tensor from `allocate`, which has the addresses of the other ranks of a group,
    by default all. Collective."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(tensor, (group or dist.group.WORLD).group_name)


def shared_bytes() -> int:
    """Return the bytes of shared memory, which torch.cuda.max_memory_allocated() does not count."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _shared)


class SharedWeights:
    """The parameters of a model in one buffer that all ranks can access."""

    def __init__(self, buckets):
        """Allocate it. The parameters stay where they are until `hold`."""
        self.starts, start = {}, 0  # {parameter: its first element}
        for bucket in buckets:
            self.starts |= {parameter: start + offset for parameter, offset in bucket.offsets.items()}
            start += bucket.size
        self.dtype, device = next((parameter.dtype, parameter.device) for parameter in self.starts)
        self.buffer, self.handle = allocate(start, self.dtype, device), None

    def fits(self, buckets) -> bool:
        """Whether these are the buckets it was made for."""
        parameters = [parameter for bucket in buckets for parameter in bucket.offsets]
        same = list(map(id, parameters)) == list(map(id, self.starts))
        return same and all(parameter.dtype == self.dtype for parameter in parameters)

    def hold(self) -> None:
        """Move the parameters to the buffer, those that are not there."""
        address, width = self.buffer.data_ptr(), self.buffer.element_size()
        for parameter, start in self.starts.items():
            if parameter.data_ptr() == address + start * width:
                continue
            if parameter.dtype != self.dtype:
                raise ValueError(f"data-parallel training: parameters are {parameter.dtype} now, and were "
                                 f"{self.dtype} when the step was made; make it again")
            place = self.buffer[start:start + parameter.numel()].view_as(parameter)
            parameter.data = place.copy_(parameter.detach())

    def release(self, keep) -> None:
        """Move the parameters that are not in `keep` out of the buffer."""
        for parameter in self.starts:
            if parameter not in keep:
                parameter.data = parameter.detach().clone()


class Peers:
    """The other ranks, as FastAdam.divide takes them.

    Attributes:
        count: number of other ranks.
        distances: (count,) int64: bytes from an address in this rank's weights to the same one of each other.
        stride: bytes from a received gradient to the same one of the next rank.
        barrier(): makes the GPU, not the host, wait until all ranks have come here.
        all_reduce(tensor): sums a tensor over ranks, in place.
        weights: SharedWeights of the model.
    """

    def __init__(self, model, gradients):
        """Divide each bucket into parts of equal width, one for each rank.

        Args:
            gradients: nanote.gradients.Gradients of the model.
        """
        self.model, self.buckets, self.bucket_of = weakref.ref(model), gradients.buckets, gradients.bucket_of
        self.rank, self.count, self.all_reduce = dist.get_rank(), dist.get_world_size() - 1, dist.all_reduce
        self.widths, self.received_starts, self.width = {}, {}, 0  # in elements; the last is of all buckets
        for bucket in self.buckets:
            self.widths[bucket] = round_up(math.ceil(bucket.size / (self.count + 1)), ALIGNMENT)
            self.received_starts[bucket] = self.width
            self.width += self.widths[bucket]

    def allocate(self) -> None:
        """Allocate memory for the other ranks' gradients and, in the model's first step, its parameters."""
        gradient, self.weights = self.buckets[0].reduced, _shared_weights.get(self.model())
        self.received = allocate(self.count * self.width, gradient.dtype, gradient.device)
        if self.weights is None or not self.weights.fits(self.buckets):
            self.weights = SharedWeights(self.buckets)

    def connect(self) -> None:
        """Give the other ranks access to this memory, and move the parameters. Collective."""
        self.handle, before = connect(self.received), _shared_weights.get(self.model())
        self.stride, self.barrier = self.width * self.received.element_size(), self.handle.barrier
        others = other_ranks(self.rank, self.count + 1)
        self.of_others = [(other, self.handle.get_buffer(other, self.received.shape, self.received.dtype))
                          for other in others]
        if self.weights.handle is None:
            self.weights.handle = connect(self.weights.buffer)
        _shared_weights[self.model()] = self.weights
        self.weights.hold()
        if before not in (None, self.weights):
            before.release(keep=self.weights.starts)
        addresses = self.weights.handle.buffer_ptrs
        self.distances = torch.tensor([addresses[other] - addresses[self.rank] for other in others],
                                      dtype=torch.int64, device=self.received.device)

    def _bounds(self, bucket, rank: int) -> tuple[int, int]:
        """Return where a rank's part of a bucket starts and ends, in elements of the bucket."""
        width = self.widths[bucket]
        return min(bucket.size, rank * width), min(bucket.size, (rank + 1) * width)

    def send(self, bucket) -> None:
        """Copy the gradients of a bucket to the ranks whose parts they are."""
        for other, received in self.of_others:
            start, end = self._bounds(bucket, other)
            place = slot(self.rank, other, self.count + 1) * self.width + self.received_starts[bucket]
            received[place:place + end - start].copy_(bucket.reduced[start:end])

    def part(self, parameter, rank: int | None = None) -> tuple[int, int]:
        """Return the first element and the number of elements of a parameter that a rank updates, by default
        this one; (0, 0) for a parameter that is not trained."""
        if parameter not in self.bucket_of:
            if parameter.requires_grad:
                raise ValueError("data-parallel training: the optimizer has a trained parameter that the "
                                 "model did not have when the step was made; make the step again")
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
        place = self.received_starts[bucket] + first
        return self.received.data_ptr() + place * self.received.element_size()

    def gather(self, tensors: list) -> None:
        """Copy each rank's parts of tensors to all ranks.

        Args:
            tensors: (tensor, parameter) pairs; a tensor has as many elements as its parameter.
        """
        for rank in range(self.count + 1):
            parts = []
            for tensor, parameter in tensors:
                first, size = self.part(parameter, rank)
                if size:  # as bytes, since NCCL has no 16-bit integers
                    parts.append(tensor.view(-1)[first:first + size].view(torch.uint8))
            # many in one broadcast, since launching one takes longer than copying a small part
            ends = itertools.accumulate(map(len, parts))
            for _, group in itertools.groupby(zip(parts, ends), lambda part: part[1] // GATHERED):
                group = [part for part, _ in group]
                together = torch.cat(group) if len(group) > 1 else group[0]
                dist.broadcast(together, src=rank)
                if rank != self.rank and len(group) > 1:
                    torch._foreach_copy_(group, together.split([len(part) for part in group]))
                del together  # before the next is allocated
