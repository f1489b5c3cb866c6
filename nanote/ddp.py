"""The gradients of a model, summed over the micro-batches of a step and over ranks.

A training step uses them so, whether FSDP2 has sharded the model (`ShardedGradients`) or not (`Gradients`):

    with gradients.accumulate(is_first_microbatch, is_last_microbatch):    for each micro-batch
        loss.backward()
    gradients.set_grad()                                                   before the optimizer reads them

`Gradients` keeps them in a few flat buffers, the buckets. Each gradient is a view of its bucket that is made
once: CUDA graphs, steps without graphs and the optimizer use the same memory. In `accumulate`

    _prepare        gives each parameter its view as `main_grad`
    _collect        is called by autograd with each parameter that has its gradient
    _complete       copies or adds what is not in the bucket yet, when all parameters of a bucket have theirs
    reduce_bucket   sums the bucket over ranks after the last micro-batch, on a CUDA stream of its own, while
                    the backward pass goes on (arXiv:2006.15704, section 3.2); or sends it (nanote/peers.py)

A wgrad GEMM can write to the view itself. It knows three attributes of a parameter, which are Transformer
Engine's and Megatron-LM's: it adds its result to `main_grad`, or overwrites that if `overwrite_main_grad` is
true, and then sets `grad_added_to_main_grad`.
"""
import contextlib
import math
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from nanote import parallel
from nanote.optimizers import FastOptimizer
from nanote.recipes import round_up

ALIGNMENT = 128  # elements: in BF16, each gradient and each rank's shard starts at a multiple of 256 bytes
# NCCL's kernels take SMs, so few large all-reduces cost less than many small ones; a single one for all
# gradients could begin only after the backward pass.
BUCKET_BYTES = 128 * 2**20


def distribute(model, kind: str, grad_accum: int):
    """Broadcast the weights of rank 0, and shard them if `kind` is "fsdp" or "hsdp". Return the model.

    grad_accum: the number of micro-batches a step. `parallel.shard` sums the gradients of several in float32.
    """
    if dist.is_initialized():
        parallel.broadcast_weights(model)  # not blocks, if they were sharded as they were built
        if kind != "ddp":
            parallel.shard(model, kind, grad_accum)
    return model


def make_gradients(model, grad_accum: int):
    """Return the gradients of a run. They are float32 if a step adds those of several micro-batches or
    ranks."""
    if parallel.mesh_of(model) is not None:
        return ShardedGradients(model)
    adds_several = grad_accum * parallel.world_size() > 1
    return Gradients(model, dtype=torch.float32 if adds_several else None)


def shard_optimizer(optimizer, gradients) -> None:
    """Let each rank update a part of the parameters (ZeRO-1), if the GPUs can access each other's memory.
    Else `optimizer.not_sharded_reason` says why all ranks update all. Collective."""
    if parallel.world_size() == 1 or optimizer.mesh is not None:  # FSDP2 has sharded it
        return
    if not isinstance(optimizer, FastOptimizer):
        optimizer.not_sharded_reason = "only FastAdam can divide the update"
        return
    from nanote.peers import ShardedAdam  # one process does not need it
    sharded_adam = ShardedAdam(optimizer.fast_adam, gradients.buckets)
    optimizer.not_sharded_reason = sharded_adam.connect()
    if not optimizer.not_sharded_reason:
        optimizer.sharded_adam = sharded_adam
        gradients.reduce_bucket = sharded_adam.send


@dataclass(eq=False)
class Bucket:
    """Consecutive parameters of the backward pass, whose gradients are reduced together."""

    dtype: torch.dtype
    buffer: torch.Tensor | None = None  # (size,)
    size: int = 0
    offsets: dict = field(default_factory=dict)  # {parameter: its first element}
    awaited: set = field(default_factory=set)  # parameters whose gradient is yet to come
    collected: list = field(default_factory=list)  # (view, gradient from autograd)

    def shard_size(self, world_size: int) -> int:
        """Return how many elements each rank of a sharded optimizer updates. The last ranks may update fewer:
        three ranks update 384, 384 and 232 of 1000."""
        return round_up(math.ceil(self.size / world_size), ALIGNMENT)

    def shard_of(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return where a rank's shard starts and ends, in elements."""
        size = self.shard_size(world_size)
        return min(self.size, rank * size), min(self.size, (rank + 1) * size)


def all_reduce(bucket: Bucket) -> None:
    """Sum the gradients of a bucket over ranks."""
    dist.all_reduce(bucket.buffer)


@dataclass
class BackwardPass:
    """The backward pass of a micro-batch."""

    is_first_microbatch: bool  # the first of a step overwrites the gradients
    reduces: bool  # it is the last of a step, and there are other ranks
    reduced_buckets: int = 0


class Gradients:
    """The gradients of a model's parameters in flat buffers. Parameters that no loss depends on have none. On
    several ranks they must be the same parameters on each rank and in every step.

    reduce_bucket: what ranks do with a complete Bucket, on a CUDA stream of its own. `shard_optimizer`
    replaces it by ShardedAdam.send.
    """

    def __init__(self, model, dtype: torch.dtype | None = torch.float32):
        """dtype: that of the gradients; None gives each gradient the dtype of its parameter."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.world_size = parallel.world_size()
        self.reduce_bucket = all_reduce
        self.buckets = []
        self.bucket_of = {}  # {parameter: its Bucket}
        self.views = {}  # {parameter: its view of the buffer}
        self.used = set()  # parameters that have a gradient in this step
        self.is_agreed = False  # whether `used` is known to be the same on all ranks
        self.current = None  # the BackwardPass, while `accumulate` is running
        self._make_buckets(dtype)
        device = self.parameters[0].device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and self.world_size > 1 else None
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
        reference = weakref.ref(self)  # Python cannot free a cycle through such a hook

        def hook(parameter):
            gradients = reference()  # None if these gradients are gone
            if gradients is not None:
                gradients._collect(parameter)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(hook)
            parameter.grad_dtype = None  # any: a float32 gradient of a BF16 parameter is not cast

    @contextlib.contextmanager
    def accumulate(self, is_first_microbatch: bool, is_last_microbatch: bool):
        """Collect the gradients of a micro-batch. The first one overwrites them. Ranks reduce
        them after the last one."""
        reduces = is_last_microbatch and self.world_size > 1
        self.current = BackwardPass(is_first_microbatch, reduces)
        self._prepare()
        try:
            yield
            for bucket in self.buckets:
                if bucket.awaited:  # no gradient reached these parameters
                    self._complete(bucket)
        finally:
            self.current = None
            for parameter in self.parameters:
                del parameter.main_grad
        if reduces:
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            if not self.is_agreed:  # in the first step
                self._check_agreement()
            self.is_agreed = True

    def _prepare(self):
        """Prepare parameters and buckets for a backward pass."""
        if self.current.is_first_microbatch:
            self.used.clear()
        for bucket in self.buckets:
            bucket.awaited = set(bucket.offsets)
            bucket.collected = []
        for parameter, view in self.views.items():  # which takes less time than to look each one up
            parameter.grad = None  # drops what another backward pass has left
            parameter.main_grad = view
            parameter.overwrite_main_grad = self.current.is_first_microbatch
            parameter.grad_added_to_main_grad = False

    def _collect(self, parameter):
        """Take the gradient of a parameter, which arrives in one of three ways:

        1. Autograd has written it to `grad`. It waits in `bucket.collected` for the others of the bucket.
        2. A wgrad GEMM has written it to `main_grad`, and `grad` is None or `main_grad` itself.
        3. A GEMM has done so, and autograd has added the gradient of another use: `grad` is their sum.
        """
        if self.current is None:  # a backward pass outside `accumulate`
            return
        bucket = self.bucket_of[parameter]
        try:
            bucket.awaited.remove(parameter)
        except KeyError:
            raise ValueError("a parameter has two gradients in one backward pass; pass use_reentrant=False "
                             "to torch.utils.checkpoint.checkpoint") from None
        gradient = parameter.grad
        main_grad = parameter.main_grad
        if not parameter.grad_added_to_main_grad:  # way 1
            bucket.collected.append((main_grad, gradient))
        elif gradient is not None and gradient.data_ptr() != main_grad.data_ptr():  # way 3
            with torch.no_grad():  # as a decorator it takes longer than the rest of this method
                main_grad.copy_(gradient)
        parameter.grad = None
        parameter.grad_added_to_main_grad = False
        if not bucket.awaited:
            self._complete(bucket)

    @torch.no_grad()
    def _complete(self, bucket):
        """Copy or add what autograd has given to the bucket, and reduce the buckets that are ready."""
        self.used |= set(bucket.offsets) - bucket.awaited
        if self.current.is_first_microbatch:
            for parameter in bucket.awaited:
                parameter.main_grad.zero_()
        if bucket.collected:
            views = [view for view, _ in bucket.collected]
            gradients = [gradient for _, gradient in bucket.collected]
            if self.current.is_first_microbatch:
                torch._foreach_copy_(views, gradients)
            else:  # in one dtype, because PyTorch adds tensors of two dtypes one by one
                copies = [torch.empty_like(view) for view in views]
                torch._foreach_copy_(copies, gradients)
                torch._foreach_add_(views, copies)
        bucket.awaited = set()
        bucket.collected = []
        if self.current.reduces:
            self._reduce_in_order()

    @torch.no_grad()
    def _reduce_in_order(self):
        """Reduce the buckets that are complete, in the order that all ranks keep."""
        for bucket in self.buckets[self.current.reduced_buckets:]:
            if bucket.awaited:
                return
            self.current.reduced_buckets += 1
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.reduce_bucket(bucket)

    def _check_agreement(self):
        """Raise ValueError unless the same parameters have a gradient on all ranks. Collective."""
        has_gradient = torch.tensor([parameter in self.used for parameter in self.parameters])
        for count in parallel.sum_over_ranks(has_gradient.float()).tolist():
            if 0 < count < self.world_size:
                raise ValueError("data-parallel training: some parameters have a gradient on some ranks "
                                 "only; let every parameter take part in every loss, or freeze it")

    def set_grad(self) -> None:
        """Set `grad` of each parameter. Without a gradient it is None: the optimizer skips the parameter."""
        for parameter, view in self.views.items():
            parameter.grad = view if parameter in self.used else None


class ShardedGradients:
    """The gradients of this rank's parts of a model that FSDP2 has sharded, in the same memory every step."""

    def __init__(self, model):
        self.model = model
        self.views = {}  # {this rank's part of a parameter: its gradient}
        self.used = set()  # parts that have a gradient in this step

    @contextlib.contextmanager
    def accumulate(self, is_first_microbatch: bool, is_last_microbatch: bool):
        """Accumulate over micro-batches, in FSDP2's own memory. The last one reduces over ranks."""
        if is_first_microbatch:
            parallel.reshard(self.model)
        self.model.set_requires_gradient_sync(is_last_microbatch)
        # embeddings and lm_head stay gathered until then; blocks are gathered for each micro-batch
        self.model.set_reshard_after_backward(is_last_microbatch, recurse=False)
        yield
        if is_last_microbatch:
            self._take_gradients()

    def _take_gradients(self) -> None:
        """Copy this rank's parts of the gradients to `views`, and free FSDP2's."""
        gradients = {}
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                gradients[parallel.local_part(parameter)] = parameter.grad.to_local()
        for part, gradient in gradients.items():
            if part not in self.views:
                self.views[part] = torch.empty_like(gradient)
        torch._foreach_copy_([self.views[part] for part in gradients], list(gradients.values()))
        self.model.zero_grad(set_to_none=True)
        self.used = set(gradients)

    def set_grad(self) -> None:
        """Set `grad` of this rank's parts, which the optimizer has. Without a gradient it is None."""
        for part in parallel.local_parameters(self.model):
            part.grad = self.views[part] if part in self.used else None
