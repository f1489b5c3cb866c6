"""Sharding by PyTorch's fully_shard, known as FSDP2: --parallel fsdp and hsdp.

Each rank keeps 1/N of every parameter, its gradient and its optimizer state. A block's weights are gathered
when it runs, and its gradients are summed and divided among the ranks in the backward pass. With hsdp that is
so on each machine, and machines sum their gradients.

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
    ranks, names = dist.get_world_size(), ("shard",)
    sizes = (ranks,)
    if kind == "hsdp":
        shards = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        sizes, names = (ranks // shards, shards), ("replicate", "shard")
    options = dict(mesh=init_device_mesh(next(model.parameters()).device.type, sizes, mesh_dim_names=names),
                   mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for module in (*model.blocks, model):  # the last: embeddings, final norm and lm_head
        fully_shard(module, **options)
        module.set_gradient_divide_factor(1.0)  # sum gradients; the loss is divided by the ranks instead
        module.set_force_sum_reduction_for_comms(True)
    # the loss may be a view; nothing changes it in place
    returned = rf"FSDP2-wrapped module \({type(model).__name__}\) returned a view"
    warnings.filterwarnings("ignore", message=returned)


class ShardedGradients:
    """The gradients of a model that FSDP2 has sharded, with the interface of nanote.ddp.Gradients.

    They are copied to tensors that are allocated once, so that a captured CUDA graph, a step without graphs
    and the optimizer all use the same memory.
    """

    def __init__(self, model):
        self.model, self.units = model, [model, *model.blocks]
        self.undivided_reason = ""  # each rank updates its part
        self.views, self.used = {}, set()  # {this rank's part: its gradient}; parts that have one now

    @contextlib.contextmanager
    def accumulate(self, first: bool, last: bool):
        """Accumulate over micro-batches, in FSDP2's own memory; the last one reduces over ranks."""
        if first:
            for unit in self.units:
                unit.reshard()  # an evaluation leaves weights gathered
        self.model.set_requires_gradient_sync(last)
        yield
        if last:
            found = {}  # {this rank's part: FSDP2's gradient}
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    part, gradient = local_part(parameter), parameter.grad.to_local()
                    found[part], parameter.grad = gradient, None
                    if part not in self.views:
                        self.views[part] = torch.empty_like(gradient)
            torch._foreach_copy_([self.views[part] for part in found], list(found.values()))
            self.used = set(found)

    def set_grad(self) -> None:
        """Set `grad` of this rank's parts, which the optimizer has; None where there is no gradient."""
        for part in map(local_part, self.model.parameters()):
            part.grad = self.views[part] if part in self.used else None
