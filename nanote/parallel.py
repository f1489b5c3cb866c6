"""The ranks of a run, what they do together, and a model sharded over them: --parallel fsdp and hsdp.

Call `start()` first. Without torchrun there is one rank. With --max-restarts, torchrun starts all processes
again after one has died, with the same command line; its key-value store, which outlives them, says which run
they continue. PyTorch's fully_shard, known as FSDP2, keeps 1/N of every parameter, its gradient and its
optimizer state on each rank. A sharded parameter is a DTensor: the optimizer gets this rank's part as a plain
tensor in the same memory (`local_part`).

References: docs.pytorch.org/docs/stable/elastic/run.html and distributed.fsdp.fully_shard.html.
"""
import contextlib
import os
import signal
import time
import uuid
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that torchrun started. Rank 0 alone prints and logs."""
    rank: int = 0
    local_rank: int = 0  # on this machine: the number of its GPU
    count: int = 1


def start() -> Ranks:
    """Read torchrun's environment variables and, with several processes, start torch.distributed."""
    rank, local_rank, count = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if count > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", rank=rank,
                                world_size=count, store=store_of_these_processes(rank, count))
    return Ranks(rank, local_rank, max(1, count))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def exit(code: int) -> None:
    """End this process. A rank skips Python's clean-up, which DTensor's gloo threads sometimes abort."""
    if not dist.is_initialized():
        raise SystemExit(code)
    if code == 0:
        dist.destroy_process_group()
    os._exit(code)


def torchrun_store() -> dist.Store | None:
    """Return torchrun's key-value store; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def store_of_these_processes(rank: int, count: int) -> dist.Store | None:
    """Return a part of torchrun's store without the keys of processes that died; None without torchrun. Rank
    0 proposes a prefix, and lists the processes that answer. PyTorch 2.13 has a count of restarts instead,
    which differs between machines."""
    common, name = torchrun_store(), uuid.uuid4().hex
    if common is None:
        return None
    if rank == 0:
        common.set("nanote-prefix", name)
        answers = [common.get(f"{name}/{other}").decode() for other in range(1, count)]
        common.set(f"{name}/members", " ".join(answers))
        return dist.PrefixStore(name, common)
    while True:
        prefix = common.get("nanote-prefix").decode()
        common.set(f"{prefix}/{rank}", name)
        time.sleep(0.2)
        if common.check([f"{prefix}/members"]) and name in common.get(f"{prefix}/members").decode():
            return dist.PrefixStore(prefix, common)


def remember_folder(folder: str) -> None:
    """Keep the run's folder for the processes that `torchrun --max-restarts` may start again."""
    if common := torchrun_store():
        common.set("nanote-folder", folder)


def folder_before_restart() -> str | None:
    """Return the folder of the run that torchrun has started again; None in a first start."""
    common = torchrun_store()
    return common.get("nanote-folder").decode() if common and common.check(["nanote-folder"]) else None


def launcher() -> str:
    """Return how the processes of this run were started, as in a shell."""
    count, on_this_machine = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if count == 1:
        return "python"
    machines = count // on_this_machine
    meet = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
    return f"torchrun {meet}--nproc-per-node {on_this_machine}"


# ---------------------------------------------------------------- a sharded model

def shard(model, kind: str, grad_accum: int) -> None:
    """Shard a model block by block, in place. `kind`: "fsdp", or "hsdp" to shard on each machine. A block's
    weights are gathered when it runs, and its gradients are summed and divided among the ranks in the
    backward pass. With hsdp each machine does so, and machines sum their gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import
    if not len(getattr(model, "blocks", ())):
        raise ValueError(f"--parallel {kind}: shards block by block, and {type(model).__name__} has no "
                         "model.blocks; name its list of blocks so, or pass --parallel ddp")
    ranks = dist.get_world_size()
    shards = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if kind == "hsdp" else ranks
    names = ("replicate", "shard") if kind == "hsdp" else ("shard",)
    sizes = (ranks // shards, shards)[-len(names):]
    mesh = init_device_mesh(next(model.parameters()).device.type, sizes, mesh_dim_names=names)
    # The sum of two BF16 gradients is rounded to BF16 once, in either dtype; more terms need float32
    has_two_terms = ranks == 2 and grad_accum == 1
    policy = MixedPrecisionPolicy(reduce_dtype=None if has_two_terms else torch.float32)
    model.quantizes_weights_first = False  # for model_te_fast: a block's weights are there when it runs
    for module in (*model.blocks, model):  # the last: embeddings, final norm and lm_head
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)  # sum gradients; the loss is divided by the ranks instead
        module.set_force_sum_reduction_for_comms(True)
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view")


def local_part(parameter) -> torch.Tensor:
    """Return this rank's part of a parameter, always the same plain parameter in the same memory."""
    if isinstance(parameter, DTensor) and not hasattr(parameter, "local_part"):
        part = parameter.detach().to_local()
        parameter.local_part = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
    return getattr(parameter, "local_part", parameter)


def local_parameters(model) -> list:
    """Return this rank's parts of a model's parameters; all parameters if it is not sharded."""
    return [local_part(parameter) for parameter in model.parameters()]


def mesh(model) -> DeviceMesh | None:
    """Return the device mesh of a sharded model."""
    return getattr(next(model.parameters()), "device_mesh", None)


def norm_over_shards(norm: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return the norm of all gradients from the norm of this rank's parts, (); the same on every rank."""
    if mesh is None:
        return norm
    norms = [torch.empty_like(norm) for _ in range(mesh["shard"].size())]
    dist.all_gather(norms, norm, group=mesh.get_group("shard"))
    return torch.linalg.vector_norm(torch.stack(norms))


def empty_on_host(parameter, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory to load a tensor into; for this rank's part of a sharded parameter of that size."""
    if not isinstance(parameter, DTensor) or size != parameter.shape:
        return torch.empty(size, dtype=dtype)
    mesh, part = parameter.device_mesh, torch.empty(local_part(parameter).shape, dtype=dtype)
    on_host = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    return DTensor.from_local(part, on_host, parameter.placements, run_check=False,
                              shape=size, stride=parameter.stride())


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
        for part in local_parameters(self.model):
            part.grad = self.views[part] if part in self.used else None


# ---------------------------------------------------------------- what ranks do together

def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def first_of_ranks(value, group=None):
    """Return the first rank's value that is neither None nor empty; else `value`."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return next(filter(None, values), value)


def on_rank0(function, group=None):
    """Call `function` on rank 0 only. Every rank returns its result, or raises its error."""
    if not dist.is_initialized():
        return function()
    result = on_each_rank(lambda: (function(),) if rank() == 0 else (), group)
    return first_of_ranks(result, group)[0]  # of the tuple that is not empty


def on_each_rank(function, group=None):
    """Call `function` on every rank and return its result. If it raises on some, all raise: their own error,
    or the first one; a RuntimeError with the rank where it is neither ValueError nor OSError."""
    if not dist.is_initialized():
        return function()
    own = result = None
    try:
        result = function()
    except (ValueError, OSError) as error:
        own = error
    except Exception as error:
        own = RuntimeError(f"rank {rank()}: {error!r}").with_traceback(error.__traceback__)
    if first := first_of_ranks(own, group):
        raise own or first
    return result


class StopRequest:
    """Turn SIGINT, SIGTERM and SIGUSR1 into a stop after the current step; a second Ctrl-C stops at once."""

    def __init__(self):
        self.is_received = False  # what is ignored from the start, as under nohup, stays ignored
        self.previous = {number: signal.signal(number, self._note)
                         for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
                         if signal.getsignal(number) is not signal.SIG_IGN}

    def _note(self, number, frame):
        self.is_received = True
        if signal.SIGINT in self.previous:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if rank() == 0:
            with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
                os.write(2, b"\nstopping after this step; Ctrl-C stops now\n")

    def agreed(self) -> bool:
        """Return whether any rank received a signal. Collective: all ranks stop after the same step."""
        return sum_over_ranks(torch.tensor(float(self.is_received))).item() > 0  # by gloo: on the host

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self.previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that Python did not install
