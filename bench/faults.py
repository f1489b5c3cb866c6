"""Kill training runs at random moments on the CPU, and resume them.

    python bench/faults.py --json results/faults.json     # some minutes

A trial is a chain of runs of train.py, on a model that trains in a second or two. Each is killed by kill -9
at a random moment and resumed by the next. Every checkpoint must be intact after a kill, and the last run
must end like one that was not disturbed: in metrics.jsonl, except for times, and in every tensor of the last
checkpoint. Damaged files, full disks and SIGTERM are in tests/.

Linux only: runs are forked, so that Python's imports run once.
"""
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
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


@dataclass
class Options:
    chains: int = 4  # Chains of killed runs, in each setting.
    json: Path | None = None  # Write the figures here.


def start(arguments: str, ranks: int) -> list[int]:
    """Run train.py in a fork for each rank; return their process ids. The file `log` gets what they print."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1]:
            continue
        code = 99  # an unexpected error
        try:
            output = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1), os.dup2(output, 2)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
            torch.set_num_threads(1)
            tqdm.set_lock(threading.RLock())  # processes share tqdm's: one that is killed may hold it
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                           "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            code = run_command(lambda: train.run(arguments.split()), "train.py")
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return children


def wait(children) -> int:
    """Return the first exit code that is not 0, or 0; -9 after kill -9."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((code for code in codes if code), 0)


def kill(children, seconds: float) -> bool:
    """Kill the ranks after some seconds; return whether the run was still going on."""
    time.sleep(seconds)
    for child in children:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
    for child in children:
        os.kill(child, signal.SIGKILL)
    return True


def result(run) -> tuple[list, dict]:
    """Return what two equal runs have in common: all but times and Python's random state."""
    lines = [{key: value for key, value in record.items() if key not in VARYING_FIELDS}
             for record in read_metrics(Path(run, "metrics.jsonl"))]
    stored = checkpoint.read_tensors(checkpoint.latest(run), ("",))
    return lines, {name: value for name, value in stored.items() if not name.endswith(".host")}


def is_undisturbed(run) -> bool:
    """Return whether a run ended like the one in the folder `whole`."""
    (lines, stored), (expected_lines, expected) = result(run), result("whole")
    return lines == expected_lines and stored.keys() == expected.keys() and all(
        torch.equal(stored[name], value) for name, value in expected.items())


def resume_or_start(options: str, ranks: int) -> list[int]:
    return start("--resume --out-dir run" if checkpoint.latest("run") else f"{options} --out-dir run", ranks)


def kill_chain(options: str, ranks: int, seconds: float, draw) -> Counter:
    """Kill a chain of runs, and let the last one end."""
    outcome = Counter(chains=1)
    while outcome["kills"] < KILLS:
        children = resume_or_start(options, ranks)
        if kill(children, draw.uniform(0, 0.7 * seconds)):
            outcome["died_of_it"] += wait(children) == -9
            outcome["kills"] += 1
            outcome["in_a_save"] += any(Path("run").glob(".saving-*"))
            for folder in checkpoint.list_checkpoints("run"):
                checkpoint.verify(folder)
        elif wait(children) or not is_undisturbed("run"):
            outcome["failed"] += 1
        else:  # it has ended before: kill a new run
            shutil.rmtree("run")
    is_equal = wait(resume_or_start(options, ranks)) == 0 and is_undisturbed("run")
    outcome["equal_chains"] = int(is_equal)
    outcome["equal_to_the_uninterrupted_run"] = KILLS if is_equal else 0
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
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/faults.py"))
