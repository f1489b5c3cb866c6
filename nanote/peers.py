"""Data-parallel training on the GPUs of one machine: the update is divided among them.

`divide_update` is used by TrainStep. Instead of an all-reduce of gradients, after which every rank updates
all parameters, each rank has a part of the parameters, and the kernels of FastAdam access the other GPUs'
memory over NVLink:

    wait until the gradients of all ranks are there
    sum the gradients of this rank's part over all GPUs, and their squares         reads other GPUs' gradients
    all-reduce the sum of squares: the gradient norm
    update this rank's part                                                         writes all GPUs' weights
    wait until the weights of all ranks are there

It moves what an all-reduce moves, but each GPU updates 1/N of the parameters, and nothing takes SMs from the
GEMMs of the backward pass. NCCL's all-reduce during the backward pass slowed those by as much as it took
(`results/multi_gpu.json`, layout ddp-all_reduce).

This is stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), except that the memory of the optimizer
state is not divided, so that a checkpoint is written and read as with one process.
"""
import os
import weakref

import torch
import torch.distributed as dist

from nanote.fp8 import round_up

ALIGNMENT = 128  # elements: parts start at multiples of 256 bytes
_weights = weakref.WeakKeyDictionary()  # model: the buffer that its parameters are in


def why_not_divided(model, optimizer, config) -> str:
    """Return why all ranks reduce all gradients and update all parameters; "" if the update is divided."""
    if not dist.is_initialized() or config.parallel != "ddp":
        return "--parallel ddp has several processes"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device, ranks = parameters[0].device, dist.get_world_size()
    if not hasattr(optimizer, "divide"):
        return "only fast_kernels/adam.py can divide the update"
    if int(os.environ.get("LOCAL_WORLD_SIZE", 0)) != ranks:
        return "the processes are on several machines"
    if len({parameter.dtype for parameter in parameters}) > 1:
        return "the parameters have several dtypes"
    visible = torch.cuda.device_count()
    others = [number for number in range(visible) if number != device.index]
    if visible < ranks or not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return "the GPUs cannot access each other's memory"
    return ""


def allocate(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, (size,), in memory that the other ranks can access after `Peers` is made."""
    from torch.distributed import _symmetric_memory

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not used here
    return _symmetric_memory.empty(size, dtype=dtype, device=device).zero_()


def divide(size: int, ranks: int) -> list[int]:
    """Return where the parts of a buffer of `size` elements begin, and at last `size`."""
    return [min(size, round_up(size * rank // ranks, ALIGNMENT)) for rank in range(ranks + 1)]


class Peers:
    """The other ranks, as FastAdam.divide takes them.

    Attributes:
        count: number of other ranks.
        distances: (2, count) int64: bytes from an address in this rank's gradient buffer, and in its weight
            buffer, to the same place in that of each other rank.
    """

    def __init__(self, model, gradients):
        """Move the parameters of a model to a buffer that all ranks can access. All ranks must call this.

        Args:
            gradients: nanote.gradients.Gradients whose buffer is from `allocate`.
        """
        from torch.distributed import _symmetric_memory

        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.count, self.starts = ranks - 1, gradients.starts
        size = len(gradients.buffer)
        self.bounds = divide(size, ranks)
        buffers = gradients.buffer, self._move(model, size)
        handles = [_symmetric_memory.rendezvous(buffer, dist.group.WORLD.group_name) for buffer in buffers]
        others = [(self.rank + step) % ranks for step in range(1, ranks)]  # each starts at another one
        distances = [[handle.buffer_ptrs[other] - handle.buffer_ptrs[self.rank] for other in others]
                     for handle in handles]
        self.distances = torch.tensor(distances, dtype=torch.int64, device=gradients.buffer.device)
        self.handles, self.barrier = handles, handles[0].barrier  # on the GPU, without waiting for it here
        self.all_reduce = dist.all_reduce

    def _move(self, model, size: int) -> torch.Tensor:
        """Return the buffer of the parameters, (size,), where they are at the places of their gradients."""
        dtype, device = next((p.dtype, p.device) for p in self.starts)
        buffer = _weights.get(model)
        if buffer is None or (len(buffer), buffer.dtype) != (size, dtype):
            buffer = _weights[model] = allocate(size, dtype, device)
        for parameter, start in self.starts.items():
            place = buffer[start:start + parameter.numel()].view_as(parameter)
            if parameter.data_ptr() != place.data_ptr():
                parameter.data = place.copy_(parameter.detach())
        return buffer

    def part(self, parameter, rank: int | None = None) -> tuple[int, int]:
        """Return the first element and the number of elements of a parameter that a rank updates; this rank
        by default."""
        rank, start, size = self.rank if rank is None else rank, self.starts[parameter], parameter.numel()
        first, end = (min(max(bound - start, 0), size) for bound in self.bounds[rank:rank + 2])
        return first, end - first

    def gather(self, tensor: torch.Tensor, parameter) -> None:
        """Copy each rank's part of a tensor of the parameter's size to all ranks."""
        for rank in range(self.count + 1):
            first, size = self.part(parameter, rank)
            if size:  # as bytes, since NCCL has no 16-bit integers
                dist.broadcast(tensor.view(-1)[first:first + size].view(torch.uint8), src=rank)
