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
import sys
import time
import uuid
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that torchrun started. Rank 0 alone prints and logs."""
    rank: int = 0
    local_rank: int = 0  # on this machine: the number of its GPU
    count: int = 1


def start() -> Ranks:
    """Read torchrun's environment variables and, with several processes, start torch.distributed."""
    ranks = Ranks(rank=int(os.environ.get("RANK", 0)), local_rank=int(os.environ.get("LOCAL_RANK", 0)),
                  count=int(os.environ.get("WORLD_SIZE", 1)))
    if ranks.count > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = store_of_these_processes(ranks)
        dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.count, store=store)
    return ranks


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def end_process(code: int) -> None:
    """End this process. A rank skips Python's clean-up, which DTensor's gloo threads sometimes abort."""
    if not dist.is_initialized():
        raise SystemExit(code)
    if code == 0:
        dist.destroy_process_group()
    os._exit(code)


def torchrun_store() -> dist.Store | None:
    """Return torchrun's key-value store, or None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def store_of_these_processes(ranks: Ranks) -> dist.Store | None:
    """Return a part of torchrun's store that only these processes use, or None without torchrun.

    When torchrun starts all processes again, its store has the addresses of those that died, and PyTorch 2.13
    may connect to them: three of eight restarts after a killed process hung. The count of restarts cannot be
    a prefix, since it differs between machines. So rank 0 proposes one, and admits the processes that answer.
    """
    common = torchrun_store()
    if common is None:
        return None
    own_name = uuid.uuid4().hex
    if ranks.rank == 0:
        common.set("nanote-prefix", own_name)
        for other in range(1, ranks.count):
            answer = common.get(f"{own_name}/{other}").decode()  # waits for it
            common.set(f"{own_name}/admitted/{answer}", "")
        return dist.PrefixStore(own_name, common)
    while True:
        prefix = common.get("nanote-prefix").decode()
        common.set(f"{prefix}/{ranks.rank}", own_name)
        time.sleep(0.2)
        if common.check([f"{prefix}/admitted/{own_name}"]):  # else the prefix is of a rank 0 that died
            return dist.PrefixStore(prefix, common)


def remember_folder(folder: str) -> None:
    """Keep the run's folder for the processes that `torchrun --max-restarts` may start again."""
    common = torchrun_store()
    if common is not None:
        common.set("nanote-folder", folder)


def folder_before_restart() -> str | None:
    """Return the folder of the run that torchrun has started again, or None in a first start."""
    common = torchrun_store()
    if common is None or not common.check(["nanote-folder"]):
        return None
    return common.get("nanote-folder").decode()


def launcher() -> str:
    """Return how the processes of this run were started, as in a shell."""
    count = int(os.environ.get("WORLD_SIZE", 1))
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    machines = count // on_this_machine
    if count == 1:
        return "python"
    if machines == 1:
        return f"torchrun --nproc-per-node {on_this_machine}"
    return (f"torchrun --nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            f"--nproc-per-node {on_this_machine}")


# ---------------------------------------------------------------- a sharded model

def shard(model, kind: str, grad_accum: int) -> None:
    """Shard a model block by block, in place. A block's weights are gathered when it runs, and its gradients
    are summed and divided among the ranks in the backward pass.

    kind: "fsdp", or "hsdp" to shard on each machine. Machines then sum their gradients.
    grad_accum: the number of micro-batches a step.
    """
    from torch.distributed.fsdp import FSDPModule  # slow to import
    if not getattr(model, "blocks", None):  # a user's own model may have none
        raise ValueError(f"--parallel {kind}: shards block by block, and {type(model).__name__} has no "
                         "model.blocks; name its list of blocks so, or pass --parallel ddp")
    model.quantizes_weights_first = False  # for model_te_fast: a block's weights are there when it runs
    mesh = mesh_of(model.blocks)  # of blocks that `sharding_blocks` has sharded
    if mesh is None:
        mesh = make_mesh(kind, next(model.parameters()).device.type)
    for module in (*model.blocks, model):  # the last: embeddings, final norm and lm_head
        if not isinstance(module, FSDPModule):  # as blocks are that were built in `sharding_blocks`
            shard_module(module, mesh, kind, grad_accum)
    if "fast_kernels.modules" in sys.modules:  # perhaps this model has its modules
        from nanote.fp8_gather import gather_in_fp8
        gather_in_fp8(model)
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view")


@contextlib.contextmanager
def sharding_blocks(kind: str, device_type: str, grad_accum: int):
    """While a model is built in this context, shard each block when it joins its ModuleList, with the weights
    of rank 0. So a GPU has one block whole at a time, and the rest of the model. kind "ddp": shard nothing.

    The model must keep its blocks, and nothing else, in a ModuleList, as the kit's models do.
    """
    if kind == "ddp" or not dist.is_initialized():
        yield
        return
    mesh = make_mesh(kind, device_type)

    def shard_block(parent, name, module):
        if isinstance(parent, torch.nn.ModuleList):
            broadcast_weights(module)
            shard_module(module, mesh, kind, grad_accum)

    # PyTorch calls it with each module that becomes part of another
    handle = torch.nn.modules.module.register_module_module_registration_hook(shard_block)
    try:
        yield
    finally:
        handle.remove()


def make_mesh(kind: str, device_type: str) -> DeviceMesh:
    """Return the mesh of a sharded model: ranks by number, for hsdp those of a machine in one row."""
    if kind == "hsdp":
        shards = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
        sizes = (world_size() // shards, shards)
        return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (world_size(),), mesh_dim_names=("shard",))


def shard_module(module, mesh: DeviceMesh, kind: str, grad_accum: int) -> None:
    """Shard the parameters of a module that are not sharded yet."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow to import

    from nanote import frozen_shards  # imports the engine
    frozen_shards.replace_by_fp8(module, kind)
    # The sum of two BF16 gradients is rounded to BF16 once, in either dtype; more terms need float32
    has_two_terms = world_size() == 2 and grad_accum == 1
    policy = MixedPrecisionPolicy(reduce_dtype=None if has_two_terms else torch.float32)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    frozen_shards.connect(module)  # of a model also its blocks, which .to() has moved since
    module.set_gradient_divide_factor(1.0)  # sum gradients; the loss is divided by the ranks instead
    module.set_force_sum_reduction_for_comms(True)


def broadcast_weights(module) -> None:
    """Give all ranks the weights of rank 0, but for those that are sharded."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            broadcast(tensor)


def broadcast(tensor) -> None:
    """Copy a parameter or a buffer of rank 0 to the other ranks, bit for bit if it is frozen in FP8, too."""
    from nanote.engine import is_frozen_in_fp8, is_te_tensor  # slow to import
    if not is_frozen_in_fp8(tensor):
        dist.broadcast(tensor.data, src=0)
    elif is_te_tensor(tensor):
        values = tensor.dequantize()
        dist.broadcast(values, src=0)
        tensor.copy_(values)
    else:
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            dist.broadcast(getattr(tensor, name).view(torch.uint8), src=0)


def reshard(model) -> None:
    """Free the weights of a sharded model that FSDP2 keeps gathered after a pass without gradients. The next
    pass gathers them again, since a step may have changed them: a replayed CUDA graph does not tell FSDP2."""
    if hasattr(model, "reshard"):  # FSDP2 has added it
        for unit in (model, *model.blocks):
            unit.reshard()


_local_parts = WeakIdKeyDictionary()  # {DTensor: this rank's part}


def local_part(parameter) -> torch.Tensor:
    """Return this rank's part of a sharded parameter, in the same memory, as a plain parameter, or as a
    FrozenWeight if it is frozen in FP8. Each call returns the same object, so that the optimizer's state can
    be found with it. Return any other parameter itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    if hasattr(parameter, "frozen_part"):
        return parameter.frozen_part
    if parameter not in _local_parts:
        part = parameter.detach().to_local()
        _local_parts[parameter] = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
    return _local_parts[parameter]


def local_parameters(model) -> list:
    """Return this rank's parts of a model's parameters, which are the parameters if it is not sharded."""
    return [local_part(parameter) for parameter in model.parameters()]


def mesh_of(model) -> DeviceMesh | None:
    """Return the device mesh of a sharded model, or None if it is not sharded."""
    parameter = next(model.parameters())
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def norm_over_shards(norm: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    """Return the norm of all gradients, (), from that of this rank's parts."""
    if mesh is None:
        return norm
    norms = [torch.empty_like(norm) for _ in range(mesh["shard"].size())]
    dist.all_gather(norms, norm, group=mesh.get_group("shard"))
    return torch.linalg.vector_norm(torch.stack(norms))


def amax_over_shards(values: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the largest magnitude, (), of a tensor of which this rank has a part, `values`. Collective."""
    amax = values.abs().max() if values.numel() > 0 else values.new_zeros(())
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group("shard"))
    return amax


def empty_on_host(parameter, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return host memory to load a tensor of that size into. If `parameter` is sharded and has that size, it
    is a DTensor with memory for this rank's part."""
    if not isinstance(parameter, DTensor) or size != parameter.shape:
        return torch.empty(size, dtype=dtype)
    mesh = parameter.device_mesh
    part = torch.empty(local_part(parameter).shape, dtype=dtype)
    on_host = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    return DTensor.from_local(part, on_host, parameter.placements, run_check=False,
                              shape=size, stride=parameter.stride())


def sharded_like(weight, tensor):
    """Shard a tensor as `weight` is sharded, and return it as a DTensor on the host. Every rank must have the
    whole tensor: each takes its part, and nothing is sent.

    If `weight` is not sharded, or `tensor` is a DTensor already, return `tensor` itself."""
    if not isinstance(weight, DTensor) or isinstance(tensor, DTensor):
        return tensor
    on_host = empty_on_host(weight, weight.shape, tensor.dtype)
    return distribute_tensor(tensor, on_host.device_mesh, on_host.placements, src_data_rank=None)


# ---------------------------------------------------------------- what ranks do together

def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather_first(value, group=None):
    """Return the value of the first rank whose value is neither None nor empty, or `value` if there is none.
    Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    for found in values:
        if found:
            return found
    return value


def on_rank0(function, group=None):
    """Call `function` on rank 0 only. Every rank returns its result, or raises its error."""
    if not dist.is_initialized():
        return function()

    def call_on_rank0():
        return function() if rank() == 0 else None

    results = [on_each_rank(call_on_rank0, group)]
    dist.broadcast_object_list(results, src=0, group=group)
    return results[0]


def on_each_rank(function, group=None):
    """Call `function` on every rank and return its result. If it raises on one, all ranks raise: a rank with
    an error its own, the others that of the first such rank. A RuntimeError that names the rank replaces any
    error but ValueError and OSError."""
    if not dist.is_initialized():
        return function()
    result = None
    own_error = None
    try:
        result = function()
    except (ValueError, OSError) as error:
        own_error = error
    except Exception as error:
        own_error = RuntimeError(f"rank {rank()}: {error!r}").with_traceback(error.__traceback__)
    first_error = gather_first(own_error, group)
    if own_error is not None:
        raise own_error
    if first_error is not None:
        raise first_error
    return result


class StopRequest:
    """Turn SIGINT, SIGTERM and SIGUSR1 into a stop after the current step. A second Ctrl-C stops at once."""

    def __init__(self):
        self.is_received = False
        self.previous = {}  # {signal: its handler before}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:  # else it stays ignored, as under nohup
                self.previous[number] = signal.signal(number, self._note)

    def _note(self, number, frame):
        self.is_received = True
        if signal.SIGINT in self.previous:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if rank() == 0:
            with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
                os.write(2, b"\nstopping after this step; Ctrl-C stops now\n")

    def agreed(self) -> bool:
        """Return whether any rank received a signal. Collective: all ranks stop after the same step."""
        is_received = torch.tensor(float(self.is_received))  # on the host, so gloo sums it, not NCCL
        return sum_over_ranks(is_received).item() > 0

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self.previous.items():
            if handler is None:  # a handler that Python did not install
                handler = signal.SIG_DFL
            signal.signal(number, handler)
