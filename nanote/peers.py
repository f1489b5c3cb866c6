"""A sharded optimizer for --parallel ddp on one machine, whose GPUs can access each other's memory.

Each rank updates its shard of every bucket of parameters (nanote/ddp.py). Before training, `connect` gives
the ranks access to each other's memory. Then in each step

    send            copies the gradients of a bucket to the ranks whose shards they are, by the copy engines,
                    as soon as the backward pass has completed the bucket
    gradient_norm   waits for the gradients of all ranks; sums this rank's shard over ranks; all-reduces the
                    sum of squares
    step            updates this rank's shard; writes the new weights to all GPUs; waits for all ranks

and before a checkpoint `gather_state` copies the optimizer state of each shard to all ranks.

NCCL's kernels need SMs, and slow down the GEMMs beside them; copy engines need none. This is stage 1 of ZeRO
(arXiv:1910.02054), except that each rank has memory for all of the optimizer state.
"""
import os

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from nanote import parallel


class ShardedAdam:
    """FastAdam for the parameters in `buckets`, of which each rank updates its shards.

    It stands between the gradients and FastAdam, which know nothing of it: `send` takes the place of a
    bucket's all-reduce, `gradient_norm` and `step` that of FastAdam's.
    """

    def __init__(self, fast_adam, buckets):
        self.fast_adam = fast_adam
        self.buckets = buckets
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # the next rank first, so that not all copy to the same GPU at a time
        self.others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self.is_summed = False  # whether this rank's shard of the gradients is summed over ranks
        # Each rank receives a row of gradients from each other rank: its shards of all buckets, side by side.
        self.columns = {}  # {bucket: where its shard starts in a row}
        self.width = 0  # elements of a row
        for bucket in buckets:
            self.columns[bucket] = self.width
            self.width += bucket.shard_size(self.world_size)
        # `connect` makes these, in memory that all ranks can access
        self.received = None  # ((world_size - 1) * width,): the rows of this rank
        self.received_by = {}  # {other rank: its rows, (world_size - 1, width)}
        self.weights = None  # (elements of all buckets,): the parameters
        self.weights_handle = None  # has the address of each rank's `weights`
        self.barrier = None  # a function: let the GPU wait for all ranks

    def connect(self) -> str:
        """Give the ranks access to each other's memory, and move the parameters there. Collective. Return "",
        or the reason why the optimizer cannot be sharded."""
        reason = parallel.gather_first(self._unsupported_reason())
        if reason:
            return reason
        torch.cuda.empty_cache()  # shared memory cannot reuse what PyTorch's allocator keeps
        for share in (self._allocate, self._exchange):  # no rank waits for memory that another lacks
            reason = failure_on_any_rank(share)
            if reason:
                return reason
        self._move_parameters()
        self._set_slices()
        return ""

    def _unsupported_reason(self) -> str:
        """Return why the optimizer cannot be sharded, as this rank sees it, or "" if it can."""
        dtypes = {parameter.dtype for bucket in self.buckets for parameter in bucket.offsets}
        if len(dtypes) > 1:
            return "the parameters have several dtypes"
        if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != self.world_size:
            return "torchrun has not started all processes on one machine"
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
            return "NCCL_P2P_DISABLE is set"
        no_access = "the GPUs cannot access each other's memory"
        if torch.cuda.device_count() < self.world_size:
            return no_access
        device = self.buckets[0].buffer.device
        for other in range(self.world_size):
            if other != device.index and not torch.cuda.can_device_access_peer(device, other):
                return no_access
        return ""

    def _allocate(self) -> None:
        """Allocate memory that all ranks can access: for the others' gradients, and for the parameters."""
        gradient = self.buckets[0].buffer
        self.received = allocate_shared((self.world_size - 1) * self.width, gradient.dtype, gradient.device)
        parameter = next(iter(self.buckets[0].offsets))
        size = sum(bucket.size for bucket in self.buckets)
        self.weights = allocate_shared(size, parameter.dtype, parameter.device)

    def _exchange(self) -> None:
        """Exchange the addresses of this memory. Collective."""
        group = dist.group.WORLD.group_name
        received_handle = _symmetric_memory.rendezvous(self.received, group)
        self.weights_handle = _symmetric_memory.rendezvous(self.weights, group)
        self.barrier = received_handle.barrier
        for other in self.others:
            memory = received_handle.get_buffer(other, self.received.shape, self.received.dtype)
            self.received_by[other] = memory.view(self.world_size - 1, self.width)

    def _move_parameters(self) -> None:
        """Move the parameters to the memory that other ranks write to."""
        sizes = [bucket.size for bucket in self.buckets]
        for bucket, weights in zip(self.buckets, self.weights.split(sizes)):
            for parameter, start in bucket.offsets.items():
                place = weights[start:start + parameter.numel()].view_as(parameter)
                parameter.data = place.copy_(parameter.detach())

    def _set_slices(self) -> None:
        """Let FastAdam update this rank's shards, by the sum over ranks, and write them to all GPUs."""
        from fast_kernels.adam import Slice  # needs Triton
        slices = {}
        for bucket in self.buckets:
            shard_start, _ = bucket.shard_of(self.rank, self.world_size)
            for parameter, offset in bucket.offsets.items():
                start, size = self.slice_of(parameter, bucket, self.rank)
                addend_start = self.columns[bucket] + offset + start - shard_start
                slices[parameter] = Slice(start, size, addend_start)
        addresses = self.weights_handle.buffer_ptrs
        distances = [addresses[other] - addresses[self.rank] for other in self.others]
        self.fast_adam.set_slices(slices, addends=self.received.view(self.world_size - 1, self.width),
                                  copy_distances=torch.tensor(distances, device=self.received.device))

    def slice_of(self, parameter, bucket, rank: int) -> tuple[int, int]:
        """Return the index of the first element of a parameter that a rank updates, and their number."""
        shard_start, shard_end = bucket.shard_of(rank, self.world_size)
        offset = bucket.offsets[parameter]
        size = parameter.numel()
        start = min(max(shard_start - offset, 0), size)
        end = min(max(shard_end - offset, 0), size)
        return start, end - start

    def send(self, bucket) -> None:
        """Copy the gradients of a bucket to the ranks whose shards they are."""
        column = self.columns[bucket]
        for other in self.others:
            start, end = bucket.shard_of(other, self.world_size)
            row = row_of(self.rank, other, self.world_size)
            place = self.received_by[other][row, column:column + end - start]
            place.copy_(bucket.buffer[start:end])

    def gradient_norm(self) -> torch.Tensor:
        """Sum this rank's shard of the gradients over all ranks. Return the norm of all, (). Collective."""
        if self.is_summed:
            raise ValueError("FastAdam: these gradients are summed over GPUs already; call step() first")
        self.barrier()  # the gradients of all ranks are there
        total = self.fast_adam.reduce_and_sum_squares()
        dist.all_reduce(total)
        self.is_summed = True
        return total.sqrt()

    def step(self, grad_scale: torch.Tensor) -> None:
        """Update this rank's shard of the parameters, here and on all other GPUs. Collective."""
        if not self.is_summed:
            raise ValueError("FastAdam: the update is divided: call gradient_norm() on all ranks first")
        self.fast_adam.step(grad_scale=grad_scale)
        self.is_summed = False
        self.barrier()  # the weights of all ranks are there

    def gather_state(self) -> None:
        """Copy each rank's shard of the optimizer state to all ranks. Collective."""
        for bucket in self.buckets:
            for parameter in bucket.offsets:
                for tensor in self.fast_adam.state.get(parameter, {}).values():
                    self._gather(tensor.view(-1), parameter, bucket)

    def _gather(self, tensor, parameter, bucket) -> None:
        for rank in range(self.world_size):
            start, size = self.slice_of(parameter, bucket, rank)
            if size > 0:
                updated = tensor[start:start + size]
                dist.broadcast(updated.view(torch.uint8), src=rank)  # as bytes: NCCL has no 16-bit integers


def row_of(sender: int, receiver: int, world_size: int) -> int:
    """Return the row of `received` for a sender: the next rank after the receiver has row 0."""
    return (sender - receiver - 1) % world_size


def failure_on_any_rank(share) -> str:
    """Call `share` on every rank. Return "", or why memory could not be shared on one. Collective."""
    reason = ""
    try:
        share()
    except RuntimeError as error:  # a container may not let processes share the memory of GPUs
        reason = f"memory could not be shared: {str(error).splitlines()[0]}"
    return parallel.gather_first(reason)


def allocate_shared(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor (size,) in memory that all ranks can access after a rendezvous."""
    # no multicast; and no pool, where ranks could pair different blocks after one was freed
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_SYMMMEM_IMPLICIT_POOL", "0")
    return _symmetric_memory.empty(size, dtype=dtype, device=device)
