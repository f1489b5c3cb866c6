"""Kill training runs at random moments on the CPU, and resume them.

    python bench/faults.py --json results/faults.json     # some minutes

A trial is a chain of runs of train.py, on a model that trains in a second or two. Each is killed by kill -9
at a random moment and resumed by the next. Every checkpoint must be intact after a kill, and the last run
must end like one that was not disturbed: in metrics.jsonl, except for times, and in every tensor of the last
checkpoint. Damaged files, full disks and SIGTERM are in tests/.

Linux only: runs are forked, so that Python's imports run once.
"""
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from tqdm import tqdm

import train
from bench.report import check_output, write_report
from nanote import checkpoint
from nanote.config import parse, run_command
from nanote.logs import VARYING_FIELDS, read_metrics
from nanote.tokens import write_tokens

OPTIONS = (
    "--n-layer 1 --n-head 2 --n-embd 64 --dropout 0.1 --seq-len 64 --micro-batch-size 2 --grad-accum 2 "
    "--max-steps 24 --warmup-steps 4 --fp8-amax-history-len 8 --log-interval 1 --eval-interval 4 "
    "--eval-tokens 256 --checkpoint-interval 3 --device cpu --data tokens"
)
SETTINGS = {  # name: (options, ranks)
    "delayed": ("", 1),
    "current, Muon, packed documents": ("--fp8-recipe current --optimizer muon --pack-documents", 1),
    "BF16 with masters": ("--fp8-recipe none --dtype bfloat16 --moment-dtype bfloat16", 1),
    "weights in FP8": ("--fp8-param --model advanced", 1),
    "FSDP2 on two ranks": ("--parallel fsdp", 2),
}
KILLS = 5  # in each chain
FORK = multiprocessing.get_context("fork")


@dataclass
class Options:
    chains: int = 4  # Chains of killed runs, in each setting.
    json: Path | None = None  # Write the figures here.


def train_rank(arguments: str, variables: dict) -> None:
    """Run train.py in this process. The file `log` gets what it prints."""
    log = sys.stdout = sys.stderr = open("log", "a", buffering=1)
    os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # processes share tqdm's: one that is killed may hold it
    os.environ |= variables
    sys.exit(run_command(lambda: train.run(arguments.split()), "train.py"))


def start(arguments: str, ranks: int) -> list:
    """Start train.py in a fork for each rank; return the processes."""
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    variables = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    processes = [FORK.Process(target=train_rank, args=(arguments, own)) for own in variables]
    for process in processes:
        process.start()
    return processes


def wait(processes) -> int:
    """Return the first exit code that is not 0, or 0; -9 after kill -9."""
    for process in processes:
        process.join()
    return next((process.exitcode for process in processes if process.exitcode), 0)


def kill(processes, seconds: float) -> bool:
    """Kill the ranks after some seconds; return whether the run was still going on."""
    time.sleep(seconds)
    if not all(process.is_alive() for process in processes):
        return False
    for process in processes:
        process.kill()
    return True


def result(run) -> tuple[list, dict]:
    """Return what two equal runs have in common: all but times and Python's random state."""
    lines = [{key: value for key, value in record.items() if key not in VARYING_FIELDS}
             for record in read_metrics(Path(run, "metrics.jsonl"))]
    stored = checkpoint.read_tensors(checkpoint.latest(run), ("",))
    return lines, {name: value for name, value in stored.items() if not name.endswith(".host")}


def is_undisturbed() -> bool:
    """Return whether the run in the folder `run` ended like the one in the folder `whole`."""
    (lines, stored), (expected_lines, expected) = result("run"), result("whole")
    return lines == expected_lines and stored.keys() == expected.keys() and all(
        torch.equal(stored[name], value) for name, value in expected.items())


def kill_chain(options: str, ranks: int, seconds: float, draw) -> Counter:
    """Kill a chain of runs, and let the last one end."""
    def resume_or_start():
        return start(f"{'--resume' if checkpoint.latest('run') else options} --out-dir run", ranks)

    outcome = Counter(chains=1)
    while outcome["kills"] < KILLS:
        processes = resume_or_start()
        if kill(processes, draw.uniform(0, 0.7 * seconds)):
            outcome["died_of_it"] += wait(processes) == -9
            outcome["kills"] += 1
            outcome["in_a_save"] += any(Path("run").glob(".saving-*"))
            for folder in checkpoint.list_checkpoints("run"):
                checkpoint.verify(folder)
        elif wait(processes) or not is_undisturbed():
            outcome["failed"] += 1
        else:  # it has ended before: kill a new run
            shutil.rmtree("run")
    is_equal = wait(resume_or_start()) == 0 and is_undisturbed()
    outcome.update(equal_chains=is_equal, equal_to_the_uninterrupted_run=KILLS * is_equal)
    shutil.rmtree("run")
    return outcome


def kill_chains(setting: str, count: int) -> Counter:
    """Train an undisturbed run of a setting, and kill `count` chains of others."""
    options, ranks = f"{OPTIONS} {SETTINGS[setting][0]}", SETTINGS[setting][1]
    began, total, draw = time.perf_counter(), Counter(), random.Random(setting)
    if wait(start(f"{options} --out-dir whole", ranks)):
        raise OSError(f"the undisturbed run of {setting} failed: {Path('log').read_text()[-2000:]}")
    seconds = time.perf_counter() - began
    for number in range(count):
        total.update(kill_chain(options, ranks, seconds, draw))
        print(f"{setting}: {number + 1}/{count} {json.dumps(total)}", flush=True)
    shutil.rmtree("whole")
    return total


def main(argv=None):
    options = parse(Options, argv, prog="bench/faults.py", description=__doc__)
    check_output(options.json)
    began, before, total = time.perf_counter(), Path.cwd(), Counter()
    sources = sorted(Path(torch.nn.__file__).parent.glob("modules/*.py"))[:12]
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_tokens((path.read_text() for path in sources), Path("tokens"), val_fraction=0.2)
        for setting in SETTINGS:
            total.update(kill_chains(setting, options.chains))
        os.chdir(before)
    figures = {"options": OPTIONS, "settings": SETTINGS, "seconds": round(time.perf_counter() - began),
               "killed": {"counts": total}}
    write_report("bench/faults.py", argv, figures, options.json)


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/faults.py"))
