"""A model on several ranks, and its gradients in flat buffers, summed over micro-batches and ranks.

Each parameter's gradient is a view of a buffer that is allocated once: CUDA graphs, steps without graphs and
the optimizer use the same memory. A wgrad GEMM writes or adds to the view itself, if it knows the attributes
of Transformer Engine and Megatron-LM (`main_grad`, `overwrite_main_grad`, `grad_added_to_main_grad`);
autograd's other gradients are copied or added. Ranks reduce a bucket of gradients on a CUDA stream of its own
as soon as its last one is there (arXiv:2006.15704, section 3.2), or send it to peers (nanote/peers.py).
"""
import contextlib
import math
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nanote import parallel
from nanote.recipes import round_up

ALIGNMENT = 128  # elements: each gradient, and each rank's part, starts at a multiple of 256 bytes
# NCCL's kernels take SMs, so few large all-reduces cost less than many small ones; one would begin too late.
BUCKET_BYTES = 128 * 2**20


def distribute(model, kind: str, grad_accum: int):
    """Give all ranks the weights of rank 0, and shard them unless `kind` is "ddp"; return the model.
    grad_accum, micro-batches a step, decides in which dtype shards' gradients are summed."""
    if dist.is_initialized():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)
        if kind != "ddp":
            parallel.shard(model, kind, grad_accum)
    return model


def make_gradients(model, optimizer, grad_accum: int):
    """Return the gradients of a run, and divide its update among ranks where that is possible. Collective."""
    if parallel.mesh(model) is not None:
        return parallel.ShardedGradients(model)
    ranks = parallel.world_size()
    gradients = Gradients(model, dtype=torch.float32 if grad_accum * ranks > 1 else None)
    if ranks > 1:
        from nanote.peers import DividedUpdate  # one process does not need it
        update = DividedUpdate(optimizer.fast_adam, gradients.buckets)
        gradients.undivided_reason = update.connect()
        if not gradients.undivided_reason:
            gradients.reduce_bucket = update.send
            optimizer.divided_update = update
    return gradients


@dataclass(eq=False)
class Bucket:
    """Consecutive parameters of the backward pass, whose gradients are reduced together."""

    dtype: torch.dtype
    buffer: torch.Tensor | None = None  # (size,)
    size: int = 0
    offsets: dict = field(default_factory=dict)  # {parameter: its first element}
    missing: set = field(default_factory=set)  # parameters without a gradient in this backward pass
    collected: list = field(default_factory=list)  # (view, gradient from autograd)

    def part_size(self, ranks: int) -> int:
        """Return the elements of each rank's part, where an update is divided; the last has fewer."""
        return round_up(math.ceil(self.size / ranks), ALIGNMENT)

    def part(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return where a rank's part starts and ends, in elements."""
        size = self.part_size(ranks)
        return min(self.size, rank * size), min(self.size, (rank + 1) * size)


def all_reduce(bucket: Bucket) -> None:
    """Sum the gradients of a bucket over ranks."""
    dist.all_reduce(bucket.buffer)


class Gradients:
    """The gradients of a model's parameters in flat buffers. Parameters that no loss depends on have no
    gradient; on several ranks these must be the same parameters on each rank and in every step.

    reduce_bucket: what ranks do with a complete Bucket, on a CUDA stream of its own; can be replaced.
    """

    def __init__(self, model, dtype: torch.dtype | None = torch.float32):
        """`dtype`: of the gradients; None: that of each parameter."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.ranks = parallel.world_size()
        self.reduce_bucket = all_reduce
        self.undivided_reason = ""  # why each rank updates all parameters
        self.buckets = []
        self.bucket_of = {}  # {parameter: its Bucket}
        self.views = {}  # {parameter: its part of the buffer}
        self.used = set()  # parameters that have a gradient in this step
        self.active = False  # whether `accumulate` is running
        self.first = False  # whether this micro-batch is the first of a step
        self.reduces = False  # whether it is the last, and there are other ranks
        self.is_agreed = False  # whether `used` is known to be the same on all ranks
        self._make_buckets(dtype)
        device = self.parameters[0].device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and self.ranks > 1 else None
        self._register_hooks()

    def _make_buckets(self, dtype):
        """Divide the parameters into buckets of one dtype, in about the order of the backward pass."""
        for parameter in reversed(self.parameters):
            bucket_dtype = dtype or parameter.dtype
            size = round_up(parameter.numel(), ALIGNMENT)
            if not self.buckets or not self._fits(size, bucket_dtype):
                self.buckets.append(Bucket(bucket_dtype))
            bucket = self.buckets[-1]
            self.bucket_of[parameter] = bucket
            bucket.offsets[parameter] = bucket.size
            bucket.size += size
        for bucket in self.buckets:
            bucket.buffer = torch.zeros(bucket.size, dtype=bucket.dtype, device=self.parameters[0].device)
            for parameter, start in bucket.offsets.items():
                self.views[parameter] = bucket.buffer[start:start + parameter.numel()].view_as(parameter)

    def _fits(self, size: int, dtype) -> bool:
        """Return whether the last bucket has space for as many elements of this dtype."""
        bucket = self.buckets[-1]
        return bucket.dtype == dtype and (bucket.size + size) * dtype.itemsize <= BUCKET_BYTES

    def _register_hooks(self):
        """Let autograd call `_collect` with each parameter that has its gradient."""
        collect = weakref.WeakMethod(self._collect)  # Python cannot free a cycle through such a hook

        def hook(parameter):
            collect_of_owner = collect()
            if collect_of_owner is not None:
                collect_of_owner(parameter)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(hook)
            parameter.grad_dtype = None  # any: a float32 gradient of a BF16 parameter is not cast

    @contextlib.contextmanager
    def accumulate(self, first: bool, last: bool):
        """Collect the gradients of a micro-batch. The first overwrites; after the last, ranks reduce them."""
        self._start(first, last)
        try:
            yield
            for bucket in self.buckets:
                if bucket.missing:  # no gradient reached these parameters
                    self._complete(bucket)
        finally:
            self.active = False
            for parameter in self.parameters:
                del parameter.main_grad
        if self.reduces:
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            if not self.is_agreed:  # in the first step
                self._check_agreement()
            self.is_agreed = True

    def _start(self, first: bool, last: bool):
        """Prepare parameters and buckets for a backward pass."""
        self.active, self.first = True, first
        self.reduces = last and self.ranks > 1
        self.reduced_buckets = 0
        if first:
            self.used.clear()
        for bucket in self.buckets:
            bucket.missing, bucket.collected = set(bucket.offsets), []
        for parameter in self.parameters:
            parameter.grad = None  # drops what another backward pass has left
            parameter.main_grad = self.views[parameter]
            parameter.overwrite_main_grad = first
            parameter.grad_added_to_main_grad = False

    def _check_agreement(self):
        """Raise ValueError unless the same parameters have a gradient on all ranks. Collective."""
        has_gradient = torch.tensor([parameter in self.used for parameter in self.parameters])
        for count in parallel.sum_over_ranks(has_gradient.float()).tolist():
            if 0 < count < self.ranks:
                raise ValueError("data-parallel training: some parameters have a gradient on some ranks "
                                 "only; let every parameter take part in every loss, or freeze it")

    def set_grad(self) -> None:
        """Set `grad` of each parameter that has a gradient; the optimizer leaves any other as it is."""
        for parameter in self.parameters:
            parameter.grad = self.views[parameter] if parameter in self.used else None

    @torch.no_grad()
    def _collect(self, parameter):
        """Take a parameter's gradient when autograd has it."""
        if not self.active:  # a backward pass outside `accumulate`
            return
        bucket, gradient = self.bucket_of[parameter], parameter.grad
        in_main_grad = parameter.grad_added_to_main_grad
        if in_main_grad and gradient is not None:
            is_sum = gradient.data_ptr() != parameter.main_grad.data_ptr()
            if is_sum:  # autograd has added the gradient of another use
                parameter.main_grad.copy_(gradient)
        parameter.grad, parameter.grad_added_to_main_grad = None, False
        if parameter not in bucket.missing:
            raise ValueError("a parameter has two gradients in one backward pass; pass use_reentrant=False "
                             "to torch.utils.checkpoint.checkpoint")
        if not in_main_grad:
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
            views = [view for view, _ in bucket.collected]
            gradients = [gradient for _, gradient in bucket.collected]
            if self.first:
                torch._foreach_copy_(views, gradients)
            else:  # in one dtype, because PyTorch adds tensors of two dtypes one by one
                copies = [torch.empty_like(view) for view in views]
                torch._foreach_copy_(copies, gradients)
                torch._foreach_add_(views, copies)
        bucket.missing, bucket.collected = set(), []
        if self.reduces:
            self._reduce_in_order()

    @torch.no_grad()
    def _reduce_in_order(self):
        """Reduce the buckets that are complete, in the order that all ranks keep."""
        while self.reduced_buckets < len(self.buckets) and not self.buckets[self.reduced_buckets].missing:
            bucket = self.buckets[self.reduced_buckets]
            self.reduced_buckets += 1
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.reduce_bucket(bucket)
