"""Data-parallel training on the GPUs of one machine, with the update divided among them.

TrainStep calls `divide_update`. After an all-reduce of gradients, every rank would update all parameters.
Here each rank has a part of each bucket of parameters (nanote/gradients.py), and the GPUs access each other's
memory over NVLink:

    backward pass     copy each bucket's gradients to the ranks whose parts they are, by the copy engines
    barrier           the gradients of all ranks are there
    gradient norm     sum the gradients of this rank's part over ranks; all-reduce their sum of squares
    update            of this rank's part; the kernel writes the new weights to all GPUs
    barrier           the weights of all ranks are there

It moves what an all-reduce moves, but takes no SM from the GEMMs of the backward pass, which NCCL's kernels
slow down by as much as they take (`results/multi_gpu.json`, layout ddp-all_reduce), and each GPU updates 1/N
of the parameters.

This is stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), except that the memory of the optimizer
state is not divided, so that checkpoints are written and read as with one process.
"""
import os
import weakref

import torch
import torch.distributed as dist

from nanote.fp8 import round_up

ALIGNMENT = 128  # elements: parts start at multiples of 256 bytes
_weights = weakref.WeakKeyDictionary()  # model: (buffer that its parameters are in, its handle)


def why_not_divided(model, optimizer) -> str:
    """Return why this rank has to update all parameters; "" if the update can be divided."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or not hasattr(optimizer, "divide"):
        return "only fast_kernels/adam.py can divide the update"
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != dist.get_world_size():
        return "the processes are on several machines"
    if len({parameter.dtype for parameter in parameters}) > 1:
        return "the parameters have several dtypes"
    device, visible = parameters[0].device, torch.cuda.device_count()
    others = [number for number in range(visible) if number != device.index]
    if visible < dist.get_world_size() or not all(
            torch.cuda.can_device_access_peer(device, other) for other in others):
        return "the GPUs cannot access each other's memory"
    return ""


def divide_update(model, optimizer, gradients, config) -> str:
    """Divide the update of a model among the ranks, if they can. Collective.

    Args:
        gradients: nanote.gradients.Gradients of the model.

    Returns:
        "", or the reason why each rank updates all parameters, after an all-reduce of gradients.
    """
    if not dist.is_initialized() or config.parallel != "ddp":
        return "--parallel ddp has several processes"
    reason = _first(why_not_divided(model, optimizer))
    if reason:
        return reason
    try:
        peers = Peers(model, gradients)
    except RuntimeError as error:  # a container may not let processes share the memory of GPUs
        reason = f"the GPUs cannot access each other's memory: {str(error).splitlines()[0]}"
    reason = _first(reason)
    if not reason:
        gradients.peers = peers
        optimizer.divide(peers)
    return reason


def _first(reason: str) -> str:
    """Return the first reason that a rank has, the same on all ranks, or ""."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def share(size: int, dtype: torch.dtype, device: torch.device):
    """Return a tensor (size,) in memory that all ranks can access, and its handle. Collective."""
    from torch.distributed import _symmetric_memory

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not used here
    tensor = _symmetric_memory.empty(size, dtype=dtype, device=device)
    return tensor, _symmetric_memory.rendezvous(tensor, dist.group.WORLD.group_name)


class Peers:
    """The other ranks, as FastAdam.divide takes them.

    Attributes:
        count: number of other ranks.
        distances: (count,) int64: bytes from an address in this rank's weights to the same one of each other.
        stride: bytes from a received gradient to the same one of the next rank.
        barrier: makes the GPU, not the host, wait until all ranks have come here.
    """

    def __init__(self, model, gradients):
        """Move the parameters of a model to a buffer that all ranks can access. Collective.

        Args:
            gradients: nanote.gradients.Gradients of the model.
        """
        self.rank, self.count = dist.get_rank(), dist.get_world_size() - 1
        self._place(gradients.buckets)
        first = gradients.buckets[0]
        total, dtype, device = sum(self.widths.values()), first.reduced.dtype, first.reduced.device
        self.received, handle = share(self.count * total, dtype, device)
        self.stride, self.barrier, self.all_reduce = total * dtype.itemsize, handle.barrier, dist.all_reduce
        others = [(self.rank + step) % (self.count + 1) for step in range(1, self.count + 1)]
        self.of_others = [(other, handle.get_buffer(other, self.received.shape, dtype)) for other in others]
        _, weights = self._move(model)
        addresses = weights.buffer_ptrs
        self.distances = torch.tensor([addresses[other] - addresses[self.rank] for other in others],
                                      dtype=torch.int64, device=device)
        self.handles = handle, weights  # keep the memory mapped

    def _place(self, buckets) -> None:
        """Divide each bucket into parts of equal width, one for each rank."""
        self.bucket_of, self.widths, self.starts, total = {}, {}, {}, 0
        for bucket in buckets:
            width = round_up(-(-bucket.size // (self.count + 1)), ALIGNMENT)
            self.starts[bucket], self.widths[bucket] = total, width  # of its part among those of a rank
            total += width
            self.bucket_of |= dict.fromkeys(bucket.offsets, bucket)

    def _move(self, model):
        """Return the buffer of the parameters and its handle."""
        size = sum(bucket.size for bucket in self.widths)
        dtype, device = next((p.dtype, p.device) for p in self.bucket_of)
        if model not in _weights or len(_weights[model][0]) != size:
            _weights[model] = share(size, dtype, device)
        start = 0
        for bucket in self.widths:
            for parameter, offset in bucket.offsets.items():
                place = _weights[model][0][start + offset:][:parameter.numel()].view_as(parameter)
                if parameter.data_ptr() != place.data_ptr():
                    parameter.data = place.copy_(parameter.detach())
            start += bucket.size
        return _weights[model]

    def _bounds(self, bucket, rank: int) -> tuple[int, int]:
        """Return where a rank's part of a bucket starts and ends, in elements of the bucket."""
        return tuple(min(bucket.size, number * self.widths[bucket]) for number in (rank, rank + 1))

    def send(self, bucket) -> None:
        """Copy the gradients of a bucket to the ranks whose parts they are."""
        for other, received in self.of_others:
            start, end = self._bounds(bucket, other)
            slot = (self.rank - other - 1) % (self.count + 1)  # which of its other ranks this one is
            place = slot * sum(self.widths.values()) + self.starts[bucket]
            received[place:place + end - start].copy_(bucket.reduced[start:end])

    def part(self, parameter, rank: int | None = None) -> tuple[int, int]:
        """Return the first element and the number of elements of a parameter that a rank updates; this rank
        by default."""
        bucket, size = self.bucket_of[parameter], parameter.numel()
        bounds = self._bounds(bucket, self.rank if rank is None else rank)
        first, end = (min(max(bound - bucket.offsets[parameter], 0), size) for bound in bounds)
        return first, end - first

    def received_at(self, parameter) -> int:
        """Return the address at which the first other rank's gradients of this rank's part are received."""
        bucket = self.bucket_of[parameter]
        first = bucket.offsets[parameter] + self.part(parameter)[0] - self._bounds(bucket, self.rank)[0]
        return self.received.data_ptr() + (self.starts[bucket] + first) * self.received.element_size()

    def gather(self, tensor: torch.Tensor, parameter) -> None:
        """Copy each rank's part of a tensor of the parameter's size to all ranks."""
        for rank in range(self.count + 1):
            first, size = self.part(parameter, rank)
            if size:  # as bytes, since NCCL has no 16-bit integers
                dist.broadcast(tensor.view(-1)[first:first + size].view(torch.uint8), src=rank)
