"""Gradients in flat buffers: accumulated over micro-batches, and summed over ranks during the backward pass.

`Gradients` is used where gradients of several micro-batches or ranks are added. Each parameter's gradient is
a view of one buffer per dtype:

- A wgrad GEMM writes or adds to the view itself. Parameters carry the attributes that Transformer Engine and
  Megatron-LM use for that: `main_grad`, `overwrite_main_grad` and `grad_added_to_main_grad`.
- Other gradients (of norms, biases, embeddings and modules without such GEMMs) come from autograd and are
  copied or added, a bucket in one kernel.
- Ranks sum a bucket, a part of the buffer, with one all-reduce on a stream of its own as soon as its last
  gradient is there, while the backward pass goes on.
- The optimizer reads the views as `parameter.grad`.

Nothing here waits for the GPU, so that a step can be captured as CUDA graphs. Buckets follow Li et al. 2020,
arXiv:2006.15704, section 3.2.
"""
import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nanote import parallel

# NCCL's kernels take SMs that a GEMM of the backward pass waits for, so few large all-reduces cost less than
# many small ones; one for everything would begin too late (results/multi_gpu.json has 128 MiB).
BUCKET_BYTES = 128 * 2**20
ALIGNMENT = 128  # elements: every view starts at a multiple of 256 bytes


@dataclass
class Bucket:
    """Consecutive parameters of the backward pass, whose gradients are reduced together."""

    dtype: torch.dtype
    start: int  # in the buffer of its dtype
    parameters: list = field(default_factory=list)
    size: int = 0
    accumulated: torch.Tensor | None = None  # (size,), a view of the buffer
    reduced: torch.Tensor | None = None  # the same if both have one dtype
    missing: set = field(default_factory=set)  # parameters without a gradient in this backward pass
    collected: list = field(default_factory=list)  # (view, gradient from autograd)


def make_gradients(model, config) -> "Gradients | None":
    """Return the Gradients of a run; None if a step has one micro-batch on one rank, or FSDP2 adds them."""
    if parallel.is_sharded(config):
        return None
    in_halves = any(p.dtype != torch.float32 for p in model.parameters())  # else autograd adds in float32
    if dist.is_initialized() or config.grad_accum > 1 and in_halves:
        return Gradients(model, accumulation_dtype(config), reduction_dtype(config))
    return None


def accumulation_dtype(config) -> torch.dtype:
    """Return the dtype in which gradients of BF16 parameters are added up."""
    return torch.float32 if config.grad_accum_dtype == "auto" else getattr(torch, config.grad_accum_dtype)


def reduction_dtype(config) -> torch.dtype:
    """Return the dtype in which gradients of BF16 parameters are summed over ranks."""
    if config.grad_reduce_dtype == "auto":
        return accumulation_dtype(config)
    return getattr(torch, config.grad_reduce_dtype)


def bytes_per_parameter(config, dtype: torch.dtype, ranks: int = 1) -> int:
    """Return the bytes per parameter of the buffers; 0 if gradients of one micro-batch on one rank need none.

    Args:
        dtype: of the parameters.
        ranks: that train with --parallel ddp.
    """
    if dtype == torch.float32:
        return 4 if ranks > 1 else 0
    if ranks == 1:
        return accumulation_dtype(config).itemsize if config.grad_accum > 1 else 0
    types = {accumulation_dtype(config), reduction_dtype(config)}
    return sum(kind.itemsize for kind in types)


class Gradients:
    """The gradients of a model's parameters in flat buffers.

        for number, batch in enumerate(batches):
            with gradients.micro_batch(first=number == 0, last=number == len(batches) - 1):
                (model(*batch) / (len(batches) * world_size)).backward()
        optimizer.step()    # reads parameter.grad

    After the last micro-batch, `parameter.grad` is the sum over micro-batches and ranks. All ranks start with
    the weights of rank 0.
    """

    def __init__(self, model, accumulated=torch.float32, reduced=torch.float32):
        """Allocate the buffers. float32 parameters have float32 gradients, whatever the dtypes are.

        Args:
            accumulated: dtype in which micro-batches are added up.
            reduced: dtype in which ranks are summed up, and that the optimizer gets.
        """
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.active = self.first = self.last = False
        device = self.parameters[0].device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and self.world_size > 1 else None
        self.buckets, self.bucket_of, self.views, self.used = [], {}, {}, set()
        self._fill_buckets(accumulated)
        self._allocate(reduced if self.world_size > 1 else accumulated, device)
        for parameter in self.parameters:
            if hasattr(parameter, "gradients_hook"):  # of an earlier step object for this model
                parameter.gradients_hook.remove()
            parameter.gradients_hook = parameter.register_post_accumulate_grad_hook(self._collect)
            parameter.grad_dtype = None  # any: a float32 gradient of a BF16 parameter is not cast
        if self.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    dist.broadcast(tensor.data, src=0)

    def _fill_buckets(self, accumulated):
        """Put the parameters into buckets in the order of the backward pass, about the reverse of theirs."""
        ends, open_buckets = {}, {}  # by dtype
        for parameter in reversed(self.parameters):
            dtype = torch.float32 if parameter.dtype == torch.float32 else accumulated
            size = -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            bucket = open_buckets.get(dtype)
            if bucket is None or (bucket.size + size) * dtype.itemsize > BUCKET_BYTES:
                bucket = open_buckets[dtype] = Bucket(dtype, ends.get(dtype, 0))
                self.buckets.append(bucket)
            bucket.parameters.append(parameter)
            bucket.size += size
            ends[dtype] = bucket.start + bucket.size
            self.bucket_of[parameter] = bucket
        self.sizes = ends

    def _allocate(self, reduced, device):
        buffers = {dtype: self._new_buffer(size, dtype, device) for dtype, size in self.sizes.items()}
        others = {}  # buffers of the dtype that is reduced, where it is another
        for bucket in self.buckets:
            end, exact = bucket.start + bucket.size, bucket.parameters[0].dtype == torch.float32
            bucket.accumulated = bucket.reduced = buffers[bucket.dtype][bucket.start:end]
            if not exact and reduced != bucket.dtype:
                if bucket.dtype not in others:
                    others[bucket.dtype] = self._new_buffer(self.sizes[bucket.dtype], reduced, device)
                bucket.reduced = others[bucket.dtype][bucket.start:end]
            offset = 0
            for parameter in bucket.parameters:
                part, shape = slice(offset, offset + parameter.numel()), parameter.shape
                self.views[parameter] = bucket.accumulated[part].view(shape), bucket.reduced[part].view(shape)
                offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

    def _new_buffer(self, size, dtype, device):
        return torch.zeros(size, dtype=dtype, device=device)

    @contextlib.contextmanager
    def micro_batch(self, first: bool, last: bool):
        """Collect the gradients of the forward and backward pass of one micro-batch.

        Args:
            first: overwrite the gradients of the step before, instead of adding to them.
            last: sum over ranks, and set `parameter.grad`.
        """
        self.first, self.last, self.reduced_buckets = first, last, 0
        if first:
            self.used.clear()
        for bucket in self.buckets:
            bucket.missing, bucket.collected = set(bucket.parameters), []
        for parameter in self.parameters:
            parameter.grad, parameter.main_grad = None, self.views[parameter][0]
            parameter.overwrite_main_grad, parameter.grad_added_to_main_grad = first, False
        self.active = True
        try:
            yield
            for bucket in self.buckets:
                if bucket.missing:  # no gradient reached these parameters
                    self._complete(bucket)
        finally:
            self.active = False
            for parameter in self.parameters:
                del parameter.main_grad
        if last:
            self._reduce_in_order()
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            for parameter in self.parameters:
                # one that no loss depends on is left alone by the optimizer, as without buffers; on several
                # ranks it may have a gradient from another one
                if parameter in self.used or self.world_size > 1:
                    parameter.grad = self.views[parameter][1]

    def _collect(self, parameter):
        """Take a parameter's gradient when autograd has it."""
        if not self.active:
            return
        bucket, gradient, parameter.grad = self.bucket_of[parameter], parameter.grad, None
        if not parameter.grad_added_to_main_grad:
            bucket.collected.append((parameter.main_grad, gradient))
        bucket.missing.discard(parameter)
        self.used.add(parameter)
        if not bucket.missing:
            self._complete(bucket)

    @torch.no_grad()
    def _complete(self, bucket):
        """Copy or add what autograd has given to the bucket, and reduce the buckets that are ready."""
        if self.first:
            for parameter in bucket.missing:
                parameter.main_grad.zero_()
        if bucket.collected:
            views, gradients = map(list, zip(*bucket.collected))
            if self.first:
                torch._foreach_copy_(views, gradients)
            else:  # in one dtype, because PyTorch adds tensors of two dtypes one by one
                same_dtype = [torch.empty_like(view) for view in views]
                torch._foreach_copy_(same_dtype, gradients)
                torch._foreach_add_(views, same_dtype)
        bucket.missing, bucket.collected = set(), []
        if self.last:
            self._reduce_in_order()

    @torch.no_grad()
    def _reduce_in_order(self):
        """Reduce the buckets that are complete, in the order that all ranks keep."""
        while self.reduced_buckets < len(self.buckets) and not self.buckets[self.reduced_buckets].missing:
            bucket = self.buckets[self.reduced_buckets]
            self.reduced_buckets += 1
            if bucket.reduced is not bucket.accumulated:
                bucket.reduced.copy_(bucket.accumulated)
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream())
            if self.world_size > 1:
                with torch.cuda.stream(self.stream):
                    self._all_reduce(bucket)

    def _all_reduce(self, bucket):
        dist.all_reduce(bucket.reduced)
