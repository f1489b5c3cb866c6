"""When a process of a run under torchrun dies: one clear line, and a run that continues after a restart.

torchrun then ends the other processes. With --max-restarts it starts all of them again with the same command
line, and `folder_before_restart` tells them which run to continue. That is kept in torchrun's key-value
store, which outlives the processes. A script of several processes ends with `exit_process`.

Reference: docs.pytorch.org/docs/stable/elastic/run.html.
"""
import contextlib
import functools
import hashlib
import os
import re
import signal
import sys
import time

import torch.distributed as dist

# of a collective whose peer is gone: gloo's messages, then NCCL's
LOST = "Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError"


def restart_count() -> int:
    """Return how often torchrun has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@functools.cache
def torchrun_store() -> dist.Store | None:
    """Return torchrun's key-value store; None without torchrun, or if its rendezvous has none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def group_options(rank: int, world_size: int) -> dict:
    """Return the options of init_process_group that separate the processes from those before a restart.

    By default PyTorch 2.13 uses the same keys of torchrun's store again, and waits for the dead ones.
    """
    store = torchrun_store()
    if store is None:
        return {}
    return {"store": dist.PrefixStore(f"nanote-{restart_count()}", store), "rank": rank,
            "world_size": world_size}


def launcher() -> str:
    """Return how the processes of this run were started, as in a shell."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if processes == 1:
        return "python"
    on_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    nodes = f"--nnodes {processes // on_this_node} … " if on_this_node < processes else ""
    return f"torchrun {nodes}--nproc-per-node {on_this_node}"


def remember_folder(folder: str) -> None:
    """Keep the run's folder for the processes after a restart."""
    if torchrun_store() is not None:
        torchrun_store().set("nanote-folder", folder)


def folder_before_restart() -> str | None:
    """Return the folder of the run that torchrun has started again; None in a first start."""
    store = torchrun_store()
    if store is None or not restart_count() or not store.check(["nanote-folder"]):
        return None
    return store.get("nanote-folder").decode()


def _is_first(name: str) -> bool:
    """Return whether no process has asked for this name since the last restart: one speaks for all."""
    store = torchrun_store()
    try:
        return store is None or store.add(f"nanote-{name}-{restart_count()}", 1) == 1
    except RuntimeError:  # torchrun has ended
        return True


def is_to_tell(error: Exception, rank: int) -> bool:
    """Return whether this process is to print a mistake. If all make it, rank 0 is."""
    if rank and torchrun_store() is not None:
        time.sleep(5)  # if rank 0 makes it too, it ends meanwhile, and then torchrun ends this process
    return _is_first(hashlib.sha256(str(error).encode()).hexdigest())


def exit_if_lost(error: RuntimeError, last="its last checkpoint") -> None:
    """Exit with code 1 and one line if `error` is of a collective whose peer has ended.

    `last`: the checkpoint that a restart continues from.
    """
    if not dist.is_initialized() or not re.search(LOST, str(error)):
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it meanwhile
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if _is_first("lost"):
        then = f"torchrun --max-restarts 3 would continue the run from {last}"
        if restart_count() < restarts:
            then = f"torchrun starts all again (restart {restart_count() + 1} of {restarts}), from {last}"
        print(f"train.py: rank {dist.get_rank()}: another process has ended, see torchrun's report; {then}",
              file=sys.stderr, flush=True)
    time.sleep(1)  # the report names the process that ends first, and torchrun looks ten times a second
    raise SystemExit(1)


def exit_process(code: int) -> None:
    """End this process, after everything is closed.

    A rank whose work is complete ends at once, without Python's cleanup. DTensor keeps process groups alive
    whose gloo threads sometimes abort a process that cleans up, and torchrun would report a failure.
    """
    if code == 0 and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
                stream.flush()
        os._exit(code)
    sys.exit(code)
