"""Data parallelism: the ranks of a run, what they do together, and how a model is spread over them.

Call `start()` first. Without torchrun there is one rank. With --max-restarts, torchrun starts all processes
again after one has died, with the same command line; its key-value store, which outlives them, says which run
they continue. `distribute` (nanote/ddp.py) spreads a model:

- --parallel ddp: each rank has the whole model; gradients are summed over ranks (nanote/ddp.py).
- --parallel fsdp: each rank keeps 1/N of every parameter, its gradient and its optimizer state
  (nanote/fsdp.py); hsdp: on each machine, and gradients are summed over machines.

A sharded parameter is a DTensor. The optimizer gets this rank's part as a plain tensor in the same memory
(`local_part`). Only checkpoints and the gradient norm have to know that it is a part.

References: docs.pytorch.org/docs/stable/distributed.html and docs.pytorch.org/docs/stable/elastic/run.html.
"""
import contextlib
import os
import signal
import time
import uuid
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
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
    ranks = Ranks(rank, local_rank, max(1, count))
    if ranks.count == 1 or dist.is_initialized():
        return ranks
    store = store_of_these_processes(ranks.rank, ranks.count)
    options = {"store": store, "rank": ranks.rank, "world_size": ranks.count} if store is not None else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", **options)
    return ranks


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


# ---------------------------------------------------------------- torchrun

def torchrun_store() -> dist.Store | None:
    """Return torchrun's key-value store; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def store_of_these_processes(rank: int, count: int) -> dist.Store | None:
    """Return a part of torchrun's store that only the processes running now use.

    After a restart the store has the keys of processes that died; PyTorch 2.13 numbers them with a count of
    restarts that differs between machines. Rank 0 proposes a prefix and lists the processes that answer.
    """
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
    common = torchrun_store()
    if common is not None:
        common.set("nanote-folder", folder)


def folder_before_restart() -> str | None:
    """Return the folder of the run that torchrun has started again; None in a first start."""
    common = torchrun_store()
    is_restarted = common is not None and common.check(["nanote-folder"])
    return common.get("nanote-folder").decode() if is_restarted else None


def launcher() -> str:
    """Return how the processes of this run were started, as in a shell."""
    count, on_this_machine = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if count == 1:
        return "python"
    machines = count // on_this_machine
    meet = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
    return f"torchrun {meet}--nproc-per-node {on_this_machine}"


# ---------------------------------------------------------------- the model on several ranks

def local_part(parameter) -> torch.Tensor:
    """Return this rank's part of a parameter, always the same plain parameter in the same memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not hasattr(parameter, "local_part"):
        part = parameter.detach().to_local()
        parameter.local_part = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
    return parameter.local_part


def local_parameters(model) -> list:
    """Return what this rank keeps of the parameters of a model; all of them if it is not sharded."""
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
    mesh = parameter.device_mesh
    on_host = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    part = torch.empty(local_part(parameter).shape, dtype=dtype)
    return DTensor.from_local(part, on_host, parameter.placements, run_check=False,
                              shape=parameter.shape, stride=parameter.stride())


# ---------------------------------------------------------------- what ranks do together

def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
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
    """Call `function` on every rank. If it raises on some, all raise: their own error, or the first one."""
    if not dist.is_initialized():
        return function()
    own, errors = None, [None] * dist.get_world_size()
    try:
        function()
    except Exception as error:
        own = error
    shown = own if own is None or isinstance(own, OSError) else RuntimeError(f"rank {rank()}: {own!r}")
    dist.all_gather_object(errors, shown, group=group)
    first = own or next(filter(None, errors), None)
    if first is not None:
        raise first


def reason_of_any_rank(reason: str, group=None) -> str:
    """Return the reason of the first rank that has one, or "": the same on all ranks. Collective."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), "")


class StopRequest:
    """Turn SIGINT, SIGTERM and SIGUSR1 into a stop after the current step; a second Ctrl-C stops at once.

    A signal that was ignored when the process started stays ignored, as under nohup. `close` puts the
    previous signal handlers back.
    """

    def __init__(self):
        self.is_received = False
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
        # on the CPU, through gloo: no wait for the GPU
        return sum_over_ranks(torch.tensor(float(self.is_received))).item() > 0

    def close(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that Python did not install
