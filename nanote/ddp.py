"""A model on several ranks, and its gradients in flat buffers, summed over micro-batches and ranks.

Each parameter's gradient is a view of a buffer that is allocated once: CUDA graphs, steps without graphs and
the optimizer use the same memory. A wgrad GEMM writes or adds to the view itself, if it knows the attributes
of Transformer Engine and Megatron-LM (`main_grad`, `overwrite_main_grad`, `grad_added_to_main_grad`);
autograd's other gradients are copied or added. Ranks reduce a bucket of gradients on a CUDA stream of its own
as soon as its last one is there (arXiv:2006.15704, section 3.2), or send it to peers (nanote/peers.py).
"""
import contextlib
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nanote import parallel
from nanote.recipes import round_up

ALIGNMENT = 128  # elements: each gradient starts at a multiple of 256 bytes
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
    gradients = Gradients(model, dtype=torch.float32 if grad_accum * parallel.world_size() > 1 else None)
    if parallel.world_size() > 1:
        from nanote import peers
        gradients.undivided_reason = peers.divide_update(optimizer, gradients)
    return gradients


@dataclass(eq=False)
class Bucket:
    """Consecutive parameters of the backward pass, whose gradients are reduced together."""

    dtype: torch.dtype | None
    buffer: torch.Tensor | None = None  # (size,)
    size: int = 0
    offsets: dict = field(default_factory=dict)  # parameter: its first element
    missing: set = field(default_factory=set)  # parameters without a gradient in this backward pass
    collected: list = field(default_factory=list)  # (view, gradient from autograd)


class Gradients:
    """The gradients of a model's parameters in flat buffers. Parameters that no loss depends on have no
    gradient; on several ranks these must be the same parameters on each rank and in every step."""

    def __init__(self, model, dtype: torch.dtype | None = torch.float32):
        """`dtype`: of the gradients; None: that of each parameter."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.active = self.first = self.reduces = False
        self.buckets, self.bucket_of, self.views = [], {}, {}  # parameter: its Bucket; its part of the buffer
        self.used, self.is_agreed, self.ranks = set(), False, parallel.world_size()
        self.peers, self.undivided_reason = None, ""  # why each rank updates all parameters
        self._allocate(dtype)
        device = self.parameters[0].device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and self.ranks > 1 else None
        collect = weakref.WeakMethod(self._collect)  # Python cannot free a cycle through such a hook

        def hook(parameter):
            if (collect_of_owner := collect()) is not None:
                collect_of_owner(parameter)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(hook)
            parameter.grad_dtype = None  # any: a float32 gradient of a BF16 parameter is not cast

    def _allocate(self, dtype):
        """Divide the parameters into buckets of one dtype, in about the order of the backward pass."""
        for parameter in reversed(self.parameters):
            kind, size = dtype or parameter.dtype, round_up(parameter.numel(), ALIGNMENT)
            bucket = self.buckets[-1] if self.buckets else Bucket(None)
            if bucket.dtype != kind or (bucket.size + size) * kind.itemsize > BUCKET_BYTES:
                bucket = Bucket(kind)
                self.buckets.append(bucket)
            self.bucket_of[parameter], bucket.offsets[parameter] = bucket, bucket.size
            bucket.size += size
        for bucket in self.buckets:
            bucket.buffer = torch.zeros(bucket.size, dtype=bucket.dtype, device=self.parameters[0].device)
            for parameter, start in bucket.offsets.items():
                self.views[parameter] = bucket.buffer[start:start + parameter.numel()].view_as(parameter)

    @contextlib.contextmanager
    def accumulate(self, first: bool, last: bool):
        """Collect the gradients of a micro-batch. The first overwrites; after the last, ranks reduce them."""
        self.first, self.reduces, self.reduced_buckets = first, last and self.ranks > 1, 0
        if first:
            self.used.clear()
        for bucket in self.buckets:
            bucket.missing, bucket.collected = set(bucket.offsets), []
        for parameter in self.parameters:  # what another backward pass has left in `grad` is dropped
            parameter.grad, parameter.main_grad = None, self.views[parameter]
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
                vars(parameter).pop("main_grad", None)  # absent after an error in a chunk of the loss
        if self.reduces:
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            if not self.is_agreed:  # in the first step
                found = torch.tensor([p in self.used for p in self.parameters], dtype=torch.float)
                if any(0 < count < self.ranks for count in parallel.sum_over_ranks(found).tolist()):
                    raise ValueError("data-parallel training: some parameters have a gradient on some ranks "
                                     "only; let every parameter take part in every loss, or freeze it")
            self.is_agreed = True

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
        if in_main_grad and gradient is not None and gradient.data_ptr() != parameter.main_grad.data_ptr():
            parameter.main_grad.copy_(gradient)  # autograd has added the gradient of another use
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
            views, gradients = map(list, zip(*bucket.collected))
            # in one dtype, because PyTorch adds tensors of two dtypes one by one
            copies = views if self.first else [torch.empty_like(view) for view in views]
            torch._foreach_copy_(copies, gradients)
            if not self.first:
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
                if self.peers is None:
                    dist.all_reduce(bucket.buffer)
                else:
                    self.peers.send(bucket)
