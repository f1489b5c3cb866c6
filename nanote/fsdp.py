"""Sharding by PyTorch's fully_shard, known as FSDP2: --parallel fsdp and hsdp.

Each rank keeps 1/N of every parameter, its gradient and its optimizer state. A block's weights are gathered
when it runs, and its gradients are summed and divided among the ranks in the backward pass. With hsdp each
machine does so, and machines sum their gradients.

Reference: docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""
import contextlib
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nanote.parallel import local_part


def shard(model, kind: str) -> None:
    """Shard a model block by block, in place. `kind`: "fsdp", or "hsdp" to shard on each machine."""
    if not len(getattr(model, "blocks", ())):
        raise ValueError(f"--parallel {kind}: shards block by block, and {type(model).__name__} has no "
                         "model.blocks; name its list of blocks so, or pass --parallel ddp")
    ranks = dist.get_world_size()
    shards = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if kind == "hsdp" else ranks
    names = ("replicate", "shard") if kind == "hsdp" else ("shard",)
    sizes = (ranks // shards, shards)[-len(names):]
    mesh = init_device_mesh(next(model.parameters()).device.type, sizes, mesh_dim_names=names)
    for module in (*model.blocks, model):  # the last: embeddings, final norm and lm_head
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        module.set_gradient_divide_factor(1.0)  # sum gradients; the loss is divided by the ranks instead
        module.set_force_sum_reduction_for_comms(True)
    # the loss may be a view; nothing changes it in place
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view")


class ShardedGradients:
    """As nanote.ddp.Gradients, for a model that FSDP2 has sharded: its gradients, in the same memory."""

    def __init__(self, model):
        self.model, self.undivided_reason = model, ""  # each rank updates its part
        self.views, self.used = {}, set()  # {this rank's part: its gradient}; parts that have one now

    @contextlib.contextmanager
    def accumulate(self, first: bool, last: bool):
        """Accumulate over micro-batches, in FSDP2's own memory; the last one reduces over ranks."""
        if first:
            for unit in (self.model, *self.model.blocks):
                unit.reshard()  # an evaluation leaves weights gathered
        self.model.set_requires_gradient_sync(last)
        yield
        if last:
            found = {local_part(p): p.grad.to_local() for p in self.model.parameters() if p.grad is not None}
            for part in found.keys() - self.views.keys():
                self.views[part] = torch.empty_like(found[part])
            torch._foreach_copy_([self.views[part] for part in found], list(found.values()))
            self.model.zero_grad(set_to_none=True)  # frees FSDP2's gradients
            self.used = set(found)

    def set_grad(self) -> None:
        """Set `grad` of this rank's parts, which the optimizer has; None where there is no gradient."""
        for part in map(local_part, self.model.parameters()):
            part.grad = self.views[part] if part in self.used else None
