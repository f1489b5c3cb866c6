"""Gradients in flat buffers: accumulated over micro-batches, and summed over ranks during the backward pass.

`Gradients` is used where gradients of several micro-batches or ranks are summed. Each parameter's gradient is
a view of one buffer per dtype:

- A wgrad GEMM writes or adds to the view itself. Parameters carry the attributes that Transformer Engine and
  Megatron-LM use for that: `main_grad`, `overwrite_main_grad` and `grad_added_to_main_grad`.
- Other gradients (of norms, biases, embeddings and modules without such GEMMs) come from autograd and are
  copied or added, a bucket in one kernel.
- Ranks sum a bucket, a part of the buffer, with one all-reduce on a stream of its own as soon as its last
  gradient is there, while the backward pass goes on. If they divide the update (nanote/peers.py), each sends
  the bucket's parts to the others instead, and the optimizer sums what it has received.
- The optimizer reads the views as `parameter.grad`.

Nothing here waits for the GPU, so that a step can be captured as CUDA graphs. Buckets follow Li et al. 2020,
arXiv:2006.15704, section 3.2.
"""
import contextlib
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nanote import fp8, parallel, peers

# NCCL's kernels take SMs that a GEMM of the backward pass waits for, so few large all-reduces cost less than
# many small ones; one for everything would begin too late. A divided update sends a bucket at a time, too.
BUCKET_BYTES = 128 * 2**20


@dataclass(eq=False)
class Bucket:
    """Consecutive parameters of the backward pass, whose gradients are reduced together."""

    offsets: dict = field(default_factory=dict)  # parameter: its first element
    size: int = 0
    accumulated: torch.Tensor | None = None  # (size,), a view of the buffer
    reduced: torch.Tensor | None = None  # the same tensor if both have one dtype
    missing: set = field(default_factory=set)  # parameters without a gradient in this backward pass
    collected: list = field(default_factory=list)  # (view, gradient from autograd)


def make_gradients(model, config) -> "Gradients | None":
    """Return the Gradients of a run; None if autograd or FSDP2 sums gradients as precisely.

    That is so for one micro-batch on one rank, for float32 weights on one rank, and for sharded weights.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if parallel.is_sharded(config) or not trained:
        return None
    loses_bits = any(parameter.dtype != torch.float32 for parameter in trained)
    if dist.is_initialized() or (config.grad_accum > 1 and loses_bits):
        return Gradients(model, parallel.accumulation_dtype(config), parallel.reduction_dtype(config))
    return None


def bytes_per_parameter(config, dtype: torch.dtype, ranks: int = 1) -> int:
    """Return the bytes per parameter of the buffers; 0 if gradients of one micro-batch on one rank need none.

    Args:
        dtype: of the parameters.
        ranks: that train with --parallel ddp.
    """
    if dtype == torch.float32:
        return 4 if ranks > 1 else 0
    if ranks == 1:
        return parallel.accumulation_dtype(config).itemsize if config.grad_accum > 1 else 0
    types = {parallel.accumulation_dtype(config), parallel.reduction_dtype(config)}
    return sum(kind.itemsize for kind in types)


class Gradients:
    """The gradients of a model's parameters in flat buffers.

        for number, batch in enumerate(batches):
            with gradients.micro_batch(first=number == 0, last=number == len(batches) - 1):
                (model(*batch) / (len(batches) * world_size)).backward()
        optimizer.step()    # reads parameter.grad

    After the last micro-batch, `parameter.grad` is the sum over micro-batches and ranks; None for parameters
    that no loss depends on, which on several ranks must be the same in every step.

    `peers`: set to the nanote.peers.Peers of a divided update; then `parameter.grad` is the sum over
    micro-batches.
    """

    def __init__(self, model, accumulated=torch.float32, reduced=torch.float32):
        """Allocate the buffers. float32 parameters have float32 gradients, whatever the dtypes are.

        Args:
            accumulated: dtype in which gradients are summed over micro-batches.
            reduced: dtype in which they are summed over ranks, and which the optimizer gets.
        """
        self.world_size = parallel.world_size()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.active = self.first = self.last = False
        device = self.parameters[0].device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and self.world_size > 1 else None
        self.buckets, self.bucket_of, self.used = [], {}, set()
        self.views = {}  # parameter: its part of (bucket.accumulated, bucket.reduced)
        self._allocate(accumulated, reduced if self.world_size > 1 else accumulated, device)
        self.model, self.agreed, self.peers = model, None, None
        reference = weakref.ref(self)  # a parameter must not keep the buffers alive

        def collect(parameter):
            gradients = reference()
            if gradients is not None and gradients.active:
                gradients._collect(parameter)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(collect)
            parameter.grad_dtype = None  # any: a float32 gradient of a BF16 parameter is not cast

    def _allocate(self, accumulated, reduced, device):
        """Divide one buffer per dtype into buckets, in the order of the backward pass, which is about the
        reverse of the parameters'."""
        by_dtypes = {}  # (dtype accumulated, dtype reduced): buckets
        for parameter in reversed(self.parameters):
            is_float32 = parameter.dtype == torch.float32
            dtypes = (torch.float32, torch.float32) if is_float32 else (accumulated, reduced)
            buckets = by_dtypes.setdefault(dtypes, [])
            size = fp8.round_up(parameter.numel(), peers.ALIGNMENT)
            if not buckets or (buckets[-1].size + size) * dtypes[0].itemsize > BUCKET_BYTES:
                buckets.append(Bucket())
                self.buckets.append(buckets[-1])
            bucket = self.bucket_of[parameter] = buckets[-1]
            bucket.offsets[parameter] = bucket.size
            bucket.size += size
        for (accumulated, reduced), buckets in by_dtypes.items():
            sizes = [bucket.size for bucket in buckets]
            parts = reduced_parts = torch.zeros(sum(sizes), dtype=accumulated, device=device).split(sizes)
            if reduced != accumulated:
                reduced_parts = torch.zeros(sum(sizes), dtype=reduced, device=device).split(sizes)
            for bucket, part, reduced_part in zip(buckets, parts, reduced_parts):
                bucket.accumulated, bucket.reduced = part, reduced_part
                for parameter, start in bucket.offsets.items():
                    end = start + parameter.numel()
                    self.views[parameter] = (part[start:end].view_as(parameter),
                                             reduced_part[start:end].view_as(parameter))

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
            bucket.missing, bucket.collected = set(bucket.offsets), []
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
            if self.world_size > 1:
                self._agree_on_used()
            for parameter in self.used:  # any other is left alone by the optimizer, as without buffers
                parameter.grad = self.views[parameter][1]

    def _agree_on_used(self):
        """Check that all ranks have gradients of the same parameters, in the first step and in every later
        one. The ranks ask each other once only, since a captured step cannot."""
        if self.agreed is None:
            found = torch.tensor([parameter in self.used for parameter in self.parameters], dtype=torch.float,
                                 device=self.parameters[0].device)
            dist.all_reduce(found)
            if any(0 < count < self.world_size for count in found.tolist()):
                raise ValueError("data-parallel training: some parameters have a gradient on some ranks "
                                 "only; let every parameter take part in every loss, or freeze it")
            self.agreed = set(self.used)
        trained = {parameter for parameter in self.model.parameters() if parameter.requires_grad}
        if self.used != self.agreed or trained != set(self.parameters):
            raise ValueError("data-parallel training: which parameters have gradients has changed since the "
                             "first step; make the step again, with make_train_step or TrainStep")

    def _collect(self, parameter):
        """Take a parameter's gradient when autograd has it."""
        bucket, gradient = self.bucket_of[parameter], parameter.grad
        in_main_grad = parameter.grad_added_to_main_grad
        parameter.grad, parameter.grad_added_to_main_grad = None, False
        if parameter not in bucket.missing:
            self._add_second(bucket, parameter, gradient, in_main_grad)
            return
        if not in_main_grad:
            bucket.collected.append((parameter.main_grad, gradient))
        bucket.missing.discard(parameter)
        self.used.add(parameter)
        if not bucket.missing:
            self._complete(bucket)

    @torch.no_grad()
    def _add_second(self, bucket, parameter, gradient, in_main_grad: bool):
        """Add a further gradient of the same backward pass: of a layer in two reentrant checkpoints."""
        if self.last and self.world_size > 1 and not bucket.missing:
            raise ValueError("data-parallel training: a parameter has a gradient after its sum over ranks; "
                             "pass use_reentrant=False to torch.utils.checkpoint.checkpoint")
        for number, (view, first) in enumerate(bucket.collected):
            if view is parameter.main_grad:
                bucket.collected[number] = view, first + gradient
                return
        if not in_main_grad:
            parameter.main_grad.add_(gradient)

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
                    if self.peers is None:
                        dist.all_reduce(bucket.reduced)
                    else:
                        self.peers.send(bucket)
