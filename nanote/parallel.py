"""Data parallelism: the ranks of a run, and the few things that they do together.

Use it from a training script: `init()` first, `wrap` around the model, `mean_over_ranks` on losses, and a
`StopRequest` to leave the loop on a signal. Without torchrun there is one rank, and nothing is distributed.
"""
import contextlib
import os
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that torchrun started."""

    rank: int = 0
    local_rank: int = 0  # on this machine: the number of its GPU
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes files and prints."""
        return self.rank == 0


def init() -> Ranks:
    """Read torchrun's environment variables and, with several processes, start torch.distributed."""
    environment = os.environ
    ranks = Ranks(rank=int(environment.get("RANK", 0)), local_rank=int(environment.get("LOCAL_RANK", 0)),
                  world_size=int(environment.get("WORLD_SIZE", 1)))
    if ranks.world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return ranks


def shut_down(ranks: Ranks) -> None:
    if ranks.world_size > 1:
        dist.destroy_process_group()


def wrap(net, device: torch.device):
    """Return DistributedDataParallel(net), which averages gradients over ranks; with one process just net."""
    if not dist.is_initialized():
        return net
    return DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Average a tensor over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


class StopRequest:
    """Turn SIGINT and SIGTERM into a stop at the end of the current step; a second Ctrl-C interrupts at once.

    Rank 0 answers a signal at once, since a step may take long.

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
        if not dist.is_initialized() or dist.get_rank() == 0:
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
