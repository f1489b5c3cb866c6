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
import os

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from nanote import parallel


class DividedUpdate:
    """FastAdam's update of the parameters in `buckets`, divided among the ranks.

    It stands between the gradients and FastAdam, which know nothing of it: `send` takes the place of a
    bucket's all-reduce, `gradient_norm` and `step` that of FastAdam's. Call `connect` first.
    """

    def __init__(self, fast_adam, buckets):
        """`fast_adam`: a FastAdam, or None, with which `connect` returns a reason."""
        self.fast_adam, self.buckets = fast_adam, buckets
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.is_summed = False  # whether this rank's part of the gradients is summed over ranks
        # Each rank receives gradients in a row for each other rank: its parts of all buckets, side by side.
        self.columns = {}  # {bucket: where its part starts in a row}
        self.width = 0  # of a row, in elements
        for bucket in buckets:
            self.columns[bucket] = self.width
            self.width += bucket.part_size(self.ranks)

    def connect(self) -> str:
        """Give the ranks access to each other's memory, and move the parameters there. Collective. Return "",
        or the reason why the update cannot be divided."""
        reason = parallel.first_of_ranks(self._unsupported_reason())
        torch.cuda.empty_cache()  # shared memory cannot reuse what PyTorch's allocator keeps
        if not reason:
            reason = failure_on_any_rank(self._allocate)
        if not reason:  # no rank waits for memory that another lacks
            reason = failure_on_any_rank(self._exchange)
        if not reason:
            self._move_parameters()
            self._divide_adam()
        return reason

    def _unsupported_reason(self) -> str:
        """Return why the update cannot be divided, as this rank sees it; "" if it can."""
        if self.fast_adam is None:
            return "only FastAdam can divide the update"
        dtypes = {parameter.dtype for bucket in self.buckets for parameter in bucket.offsets}
        if len(dtypes) > 1:
            return "the parameters have several dtypes"
        if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != self.ranks:
            return "torchrun has not started all processes on one machine"
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
            return "NCCL_P2P_DISABLE is set"
        no_access = "the GPUs cannot access each other's memory"
        if torch.cuda.device_count() < self.ranks:
            return no_access
        device = self.buckets[0].buffer.device
        for other in range(self.ranks):
            if other != device.index and not torch.cuda.can_device_access_peer(device, other):
                return no_access
        return ""

    def _allocate(self) -> None:
        """Allocate memory that all ranks can access: for the others' gradients, and for the parameters."""
        gradient, parameter = self.buckets[0].buffer, next(iter(self.buckets[0].offsets))
        self.received = allocate_shared((self.ranks - 1) * self.width, gradient.dtype, gradient.device)
        size = sum(bucket.size for bucket in self.buckets)
        self.weights = allocate_shared(size, parameter.dtype, parameter.device)

    def _exchange(self) -> None:
        """Exchange the addresses of this memory. Collective."""
        group = dist.group.WORLD.group_name
        received_handle = _symmetric_memory.rendezvous(self.received, group)
        self.weights_handle = _symmetric_memory.rendezvous(self.weights, group)
        self.barrier = received_handle.barrier
        # the next rank first, so that not all copy to the same GPU at a time
        self.others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self.received_by = {}  # {other rank: its rows}
        for other in self.others:
            memory = received_handle.get_buffer(other, self.received.shape, self.received.dtype)
            self.received_by[other] = memory.view(self.ranks - 1, self.width)

    def _move_parameters(self) -> None:
        """Move the parameters to the memory that other ranks write to."""
        sizes = [bucket.size for bucket in self.buckets]
        for bucket, weights in zip(self.buckets, self.weights.split(sizes)):
            for parameter, start in bucket.offsets.items():
                place = weights[start:start + parameter.numel()].view_as(parameter)
                parameter.data = place.copy_(parameter.detach())

    def _divide_adam(self) -> None:
        """Let FastAdam update this rank's parts, of the sum over ranks, and write them to all GPUs."""
        from fast_kernels.adam import Part  # needs Triton
        parts = {}
        for bucket in self.buckets:
            begin, _ = bucket.part(self.rank, self.ranks)
            for parameter, offset in bucket.offsets.items():
                first, size = self.part_of(parameter, bucket, self.rank)
                addend_start = self.columns[bucket] + offset + first - begin
                parts[parameter] = Part(first, size, addend_start)
        addresses = self.weights_handle.buffer_ptrs
        distances = [addresses[other] - addresses[self.rank] for other in self.others]
        self.fast_adam.update_parts(parts, addends=self.received.view(self.ranks - 1, self.width),
                                    copy_distances=torch.tensor(distances, device=self.received.device))

    def part_of(self, parameter, bucket, rank: int) -> tuple[int, int]:
        """Return the first and the number of the elements of a parameter that a rank updates."""
        start, end = bucket.part(rank, self.ranks)
        offset, size = bucket.offsets[parameter], parameter.numel()
        first = min(max(start - offset, 0), size)
        last = min(max(end - offset, 0), size)
        return first, last - first

    def send(self, bucket) -> None:
        """Copy the gradients of a bucket to the ranks whose parts they are."""
        column = self.columns[bucket]
        for other in self.others:
            start, end = bucket.part(other, self.ranks)
            row = (self.rank - other - 1) % self.ranks  # this rank's among the senders to `other`
            place = self.received_by[other][row, column:column + end - start]
            place.copy_(bucket.buffer[start:end])

    def gradient_norm(self) -> torch.Tensor:
        """Sum this rank's part of the gradients over all ranks; return the norm of all, (). Collective."""
        if self.is_summed:
            raise ValueError("FastAdam: these gradients are summed over GPUs already; call step() first")
        self.barrier()  # the gradients of all ranks are there
        total = self.fast_adam.sum_of_squares()
        dist.all_reduce(total)
        self.is_summed = True
        return total.sqrt()

    def step(self, grad_scale: torch.Tensor) -> None:
        """Update this rank's part of the parameters, here and on all other GPUs. Collective."""
        if not self.is_summed:
            raise ValueError("FastAdam: the update is divided: call gradient_norm() on all ranks first")
        self.fast_adam.step(grad_scale=grad_scale)
        self.is_summed = False
        self.barrier()  # the weights of all ranks are there

    def gather_state(self) -> None:
        """Copy each rank's parts of the optimizer state to all ranks. Collective."""
        for bucket in self.buckets:
            for parameter in bucket.offsets:
                for tensor in self.fast_adam.state.get(parameter, {}).values():
                    self._gather(tensor.view(-1), parameter, bucket)

    def _gather(self, tensor, parameter, bucket) -> None:
        for rank in range(self.ranks):
            first, size = self.part_of(parameter, bucket, rank)
            if size > 0:
                part = tensor[first:first + size]
                dist.broadcast(part.view(torch.uint8), src=rank)  # as bytes: NCCL has no 16-bit integers


def failure_on_any_rank(share) -> str:
    """Call `share` on every rank. Return "", or why memory could not be shared on one. Collective."""
    reason = ""
    try:
        share()
    except RuntimeError as error:  # a container may not let processes share the memory of GPUs
        reason = f"memory could not be shared: {str(error).splitlines()[0]}"
    return parallel.first_of_ranks(reason)


def allocate_shared(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor (size,) in memory that all ranks can access after a rendezvous."""
    # no multicast; and no pool, where ranks could pair different blocks after one was freed
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
    return _symmetric_memory.empty(size, dtype=dtype, device=device)
