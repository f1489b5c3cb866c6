"""Data parallelism: the ranks of a run, and the few things that they do together.

Use it from a training script: `init()` first, `shard` before the optimizer is made, `mean_over_ranks` on
losses, and a `StopRequest` to leave the loop on a signal. Without torchrun there is one rank, and nothing is
distributed.

- --parallel ddp: each rank has the whole model, and gradients are summed (nanote/gradients.py).
- --parallel fsdp: each rank keeps 1/N of every parameter, its gradient and its optimizer state; a block's
  weights are gathered when it runs (PyTorch's fully_shard, known as FSDP2).
- --parallel hsdp: fsdp within each of R replicas, whose gradients are summed.

A sharded parameter is a DTensor. AdamW treats each element by itself, so the optimizer gets this rank's part
as a plain tensor in the same memory (`local`). Every optimizer kernel and all its state then work unchanged;
only checkpoints and the gradient norm have to know that it is a part.

Reference: FSDP2, docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""
import contextlib
import os
import signal
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nanote import elastic


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that torchrun started."""

    rank: int = 0
    local_rank: int = 0  # on this machine: the number of its GPU
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone prints and writes files, but for checkpoints."""
        return self.rank == 0


def init() -> Ranks:
    """Read torchrun's environment variables and, with several processes, start torch.distributed."""
    environment = os.environ
    ranks = Ranks(rank=int(environment.get("RANK", 0)), local_rank=int(environment.get("LOCAL_RANK", 0)),
                  world_size=int(environment.get("WORLD_SIZE", 1)))
    if ranks.world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                                **elastic.group_options(ranks.rank, ranks.world_size))
    return ranks


def world_size() -> int:
    """Return the number of ranks that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number among the ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def accumulation_dtype(config) -> torch.dtype:
    """Return the dtype in which gradients of BF16 parameters are summed over micro-batches."""
    return torch.float32 if config.grad_accum_dtype == "auto" else getattr(torch, config.grad_accum_dtype)


def reduction_dtype(config) -> torch.dtype:
    """Return the dtype in which gradients of BF16 parameters are summed over ranks."""
    if config.grad_reduce_dtype == "auto":
        return accumulation_dtype(config)
    return getattr(torch, config.grad_reduce_dtype)


def shut_down(ranks: Ranks) -> None:
    if ranks.world_size > 1:
        dist.destroy_process_group()


# ---------------------------------------------------------------- sharding

def is_sharded(config) -> bool:
    """Return whether each rank keeps a part of every parameter only."""
    return dist.is_initialized() and config.parallel != "ddp"


def shard_count(config) -> int:
    """Return the number of parts of every parameter. ValueError if --hsdp-replicas does not fit."""
    if not is_sharded(config):
        return 1
    return dist.get_world_size() // _replica_count(config)


def _replica_count(config) -> int:
    if config.parallel != "hsdp":
        return 1
    world_size = dist.get_world_size()
    machines = world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    replicas = config.hsdp_replicas or machines
    if world_size % replicas:
        possible = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
        raise ValueError(f"--hsdp-replicas {replicas}: must divide the number of processes, {world_size}; "
                         f"pass one of {', '.join(possible)}")
    return replicas


def shard(model, config, device: torch.device) -> None:
    """Give all ranks the weights of rank 0; unless --parallel is ddp, shard them block by block, in place.

    Call it before the optimizer is made.
    """
    if dist.is_initialized():
        for tensor in (*model.parameters(), *model.buffers()):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                dist.broadcast(tensor.data, src=0)
    if not is_sharded(config):
        return
    if not len(getattr(model, "blocks", ())):
        raise ValueError(f"--parallel {config.parallel}: shards block by block, and {type(model).__name__} "
                         "has no model.blocks; name its list of blocks so, or pass --parallel ddp")
    shards = shard_count(config)
    sizes, names = (shards,), ("shard",)
    if config.parallel == "hsdp":
        sizes, names = (dist.get_world_size() // shards, shards), ("replicate", "shard")
    options = dict(mesh=init_device_mesh(device.type, sizes, mesh_dim_names=names),
                   mp_policy=MixedPrecisionPolicy(reduce_dtype=reduction_dtype(config)))
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(model, **options)  # embeddings, final norm and lm_head, which backward needs first
    for module in (model, *model.blocks):  # sum gradients; the loss is divided by the ranks instead
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # the loss may be a view; nothing changes it in place
    returned = rf"FSDP2-wrapped module \({type(model).__name__}\) returned a view"
    warnings.filterwarnings("ignore", message=returned)


def local(parameter) -> torch.Tensor:
    """Return this rank's part of a parameter as a plain parameter in the same memory: always the same object,
    which the optimizer updates. A parameter that is not sharded is returned as it is."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not hasattr(parameter, "local_part"):
        part = parameter.detach().to_local()
        parameter.local_part = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
    return parameter.local_part


def local_parameters(model) -> list:
    """Return what this rank keeps of the parameters of a model; all of them if it is not sharded."""
    return [local(parameter) for parameter in model.parameters()]


def units(model) -> list[FSDPModule]:
    """Return the modules that FSDP2 gathers one at a time: blocks and, for the rest, the model."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)] if isinstance(model, FSDPModule) else []


def reshard(model) -> None:
    """Free the weights that an evaluation has gathered: it has no backward pass, which does so."""
    for unit in units(model):
        unit.reshard()


def move_gradients(model) -> None:
    """Move gradients from the parameters of a sharded model to their local parts, for the optimizer."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            gradient, parameter.grad = parameter.grad.to_local(), None
            # a view into the buffer of a block's gradients; kernels need addresses of whole 16 bytes
            local(parameter).grad = gradient if gradient.data_ptr() % 16 == 0 else gradient.clone()


def forget_step(model) -> None:
    """Free the gradients that a step which raised an error has left in a sharded model."""
    model.zero_grad(set_to_none=True)
    for state in [unit._get_fsdp_state() for unit in units(model)]:  # FSDP2 has no public names for these
        state._state_ctx.post_backward_final_callback_queued = False
        for parameter in state._fsdp_param_group.fsdp_params if state._fsdp_param_group else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # once it was gathered
                parameter._unsharded_param.grad = None


def norm_over_shards(norm: torch.Tensor, model) -> torch.Tensor:
    """Return the norm of all gradients from the norm of this rank's parts, (); the same on every rank."""
    mesh = getattr(next(model.parameters()), "device_mesh", None)
    if mesh is None:
        return norm
    norms = [torch.empty_like(norm) for _ in range(mesh["shard"].size())]
    dist.all_gather(norms, norm, group=mesh.get_group("shard"))
    return torch.linalg.vector_norm(torch.stack(norms))


def empty_like(parameter, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory to load a tensor into, such as a parameter's optimizer state: of this rank's part if
    the parameter is sharded and has that size."""
    if not isinstance(parameter, DTensor) or size != parameter.shape:
        return torch.empty(size, dtype=dtype)
    mesh = parameter.device_mesh
    on_host = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    part = torch.empty(local(parameter).shape, dtype=dtype)
    return DTensor.from_local(part, on_host, parameter.placements, run_check=False,
                              shape=parameter.shape, stride=parameter.stride())


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Average a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


def on_rank0(function, group=None):
    """Call `function` on rank 0 only. Every rank returns its result, or raises its ValueError or OSError."""
    if not dist.is_initialized():
        return function()
    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_each_rank(function, group=None) -> None:
    """Call `function` on every rank. If it raises on some, all raise: its error, or the first rank's."""
    if not dist.is_initialized():
        return function()
    error, errors = None, [None] * dist.get_world_size()
    try:
        function()
    except Exception as raised:
        error = raised
    told = error if isinstance(error, OSError | None) else RuntimeError(f"rank {rank()}: {error!r}")
    dist.all_gather_object(errors, told, group=group)
    if error := error or next(filter(None, errors), None):
        raise error


def reason_of_any_rank(reason: str, group=None) -> str:
    """Return the reason of the first rank that has one, or "": the same on all ranks. Collective."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), "")


class StopRequest:
    """Turn SIGINT and SIGTERM into a stop at the end of the current step; a second Ctrl-C interrupts at once.

    A line says at once that the signal has come, since a step may take long (torchrun: Ctrl-C only, rank 0).

    A signal that was ignored when the process started stays ignored: nohup and shells ignore some for
    background jobs. Call `restore` to put the previous signal handlers back.
    """

    def __init__(self):
        self.name = None  # of the signal that this process received
        self.previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self._note)

    def _note(self, number, frame):
        self.name = signal.Signals(number).name
        answer = "\nstopping after this step"
        if signal.SIGINT in self.previous:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            answer += "; Ctrl-C again stops now" if number == signal.SIGINT else "; Ctrl-C stops now"
        # torchrun sends SIGTERM when a process has ended, and then there may be no end of this step
        if not dist.is_initialized() or dist.get_rank() == 0 and number == signal.SIGINT:
            with contextlib.suppress(OSError):
                os.write(2, f"{answer}\n".encode())  # not print: the signal may have interrupted one

    def agreed(self) -> bool:
        """Return whether any rank received a signal. Collective: all ranks stop after the same step."""
        if not dist.is_initialized():
            return self.name is not None
        flag = torch.tensor(float(self.name is not None))  # on the CPU, through gloo: no wait for the GPU
        dist.all_reduce(flag)
        return flag.item() > 0

    def restore(self):
        for number, handler in self.previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that Python did not install
