"""What torchrun tells its processes, and what a run leaves for those that it starts again.

torchrun has a key-value store that outlives the processes. With --max-restarts it starts all of them again
after one has died, with the same command line; the store says which run they continue.

Reference: docs.pytorch.org/docs/stable/elastic/run.html.
"""
import os
import time
import uuid

import torch.distributed as dist


def store() -> dist.Store | None:
    """Return torchrun's key-value store; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def store_of_these_processes(rank: int, count: int) -> dist.Store | None:
    """Return a part of torchrun's store that only the processes running now use.

    After a restart the store has the keys of processes that died; PyTorch 2.13 numbers them with a count of
    restarts that differs between machines. Rank 0 proposes a prefix and lists the processes that answer.
    """
    common, name = store(), uuid.uuid4().hex
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
    common = store()
    if common is not None:
        common.set("nanote-folder", folder)


def folder_before_restart() -> str | None:
    """Return the folder of the run that torchrun has started again; None in a first start."""
    common = store()
    if common is None or not common.check(["nanote-folder"]):
        return None
    return common.get("nanote-folder").decode()


def launcher() -> str:
    """Return how the processes of this run were started, as in a shell."""
    count, on_this_machine = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if count == 1:
        return "python"
    machines = count // on_this_machine
    meet = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
    return f"torchrun {meet}--nproc-per-node {on_this_machine}"
