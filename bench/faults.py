"""Kill training runs, damage their files and fill their disk, on the CPU.

    python bench/faults.py --json results/faults.json     # about ten minutes on two cores

Every trial is train.py itself, on a model that trains in a second or two. It must end like an undisturbed
run of the same options: in metrics.jsonl, except for times, and in every tensor of the last checkpoint.

- killed: chains of runs. Each is killed by kill -9 at a random moment and resumed by the next; the last
  one of a chain ends by itself.
- terminated: SIGTERM at a random moment, then a resume.
- damaged: a file of a checkpoint or of the tokens is cut, or a bit of it is flipped: one line, exit code 2.
- full_disk: a file-size limit stops the writing of a checkpoint: training goes on, earlier ones stay.

Linux only: trials are forked, so that Python's imports run once.
"""
import json
import multiprocessing
import os
import random
import resource
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # trials run in parallel
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from tqdm import tqdm

import train
from bench.report import check_output, write_report
from nanote import checkpoint
from nanote.config import parse, run_command
from nanote.corpus import write_tokens
from nanote.logs import VARYING_FIELDS, read_metrics

STEPS = 24
OPTIONS = (
    "--n-layer 1 --n-head 2 --n-embd 64 --dropout 0.1 --seq-len 64 --micro-batch-size 2 --grad-accum 2 "
    f"--max-steps {STEPS} --warmup-steps 4 --fp8-amax-history-len 8 --log-interval 1 --eval-interval 4 "
    "--eval-tokens 256 --checkpoint-interval 3 --device cpu --data tokens --out-dir run"
)
SETTINGS = {  # name: (options, ranks)
    "delayed": ("", 1),
    "current, Muon, packed documents": ("--fp8-recipe current --optimizer muon --pack-documents", 1),
    "BF16 with masters": ("--fp8-recipe none --dtype bfloat16 --moment-dtype bfloat16", 1),
    "weights in FP8": ("--fp8-param --model advanced", 1),
    "FSDP2 on two ranks": ("--parallel fsdp", 2),
}


@dataclass
class Options:
    chains: int = 15  # Chains of killed runs, divided among the settings.
    kills: int = 5  # Kills in each chain.
    others: int = 20  # Runs that get SIGTERM, and that meet a full disk.
    damages: int = 180  # Damaged files.
    jobs: int = 2  # Trials at the same time.
    seed: int = 0  # Seed of the moments.
    json: Path | None = None  # Write the figures here.


# ---------------------------------------------------------------- train.py in forked processes

def start(arguments: str, ranks: int = 1, file_size: int | None = None) -> list[int]:
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
            if file_size:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
            code = run_command(lambda: train.run(arguments.split()), "train.py")
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return children


def wait(children) -> int:
    """Return the first exit code that is not 0, or 0; -9 after kill -9."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((code for code in codes if code), 0)


def strike(children, seconds: float, number: int) -> bool:
    """Send a signal after some seconds; return whether the run was still going on."""
    time.sleep(seconds)
    for child in children:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
    for child in children:
        os.kill(child, number)
    return True


def resume_or_start(setting: str) -> str:
    return "--resume --out-dir run" if checkpoint.latest("run") else f"{OPTIONS} {SETTINGS[setting][0]}"


def result(run) -> tuple[list, dict]:
    """Return what two equal runs have in common. Python's random state is no part of it."""
    lines = [{key: value for key, value in record.items() if key not in VARYING_FIELDS}
             for record in read_metrics(Path(run, "metrics.jsonl"))]
    stored = checkpoint.read_tensors(checkpoint.latest(run), ("",))
    return lines, {name: value for name, value in stored.items() if not name.endswith(".host")}


def equals(run, whole) -> bool:
    (lines, stored), (expected_lines, expected) = result(run), result(whole)
    return lines == expected_lines and stored.keys() == expected.keys() and all(
        torch.equal(stored[name], value) for name, value in expected.items())


def are_whole(run) -> bool:
    """Return whether all checkpoints of a run are as they were written."""
    try:
        for folder in checkpoint.list_checkpoints(run):
            checkpoint.verify(folder)
        return True
    except (ValueError, OSError):
        return False


# ---------------------------------------------------------------- trials

def killed(draw, whole, setting, seconds, kills) -> dict:
    """Kill a chain of runs; let the last one end."""
    ranks, outcome = SETTINGS[setting][1], Counter()
    while outcome["kills"] < kills:
        children = start(resume_or_start(setting), ranks)
        if strike(children, draw.uniform(0, 0.7 * seconds), signal.SIGKILL):
            outcome["died_of_it"] += wait(children) == -9
            outcome["kills"] += 1
            outcome["in_a_save"] += any(Path("run").glob(".saving-*"))
            outcome["unreadable_checkpoints"] += not are_whole("run")
        elif wait(children) or not equals("run", whole):
            outcome["failed"] += 1
        else:  # it has ended before: kill a new run
            shutil.rmtree("run")
    is_equal = wait(start(resume_or_start(setting), ranks)) == 0 and equals("run", whole)
    return {"chains": 1, "equal_chains": int(is_equal), **outcome,
            "equal_to_the_uninterrupted_run": outcome["kills"] if is_equal else 0}


def terminated(draw, whole, setting, seconds, _) -> dict:
    """Send SIGTERM to a run, and resume it."""
    ranks = SETTINGS[setting][1]
    children = start(resume_or_start(setting), ranks)
    while not checkpoint.latest("run"):
        time.sleep(0.001)
    was_running = strike(children, draw.uniform(0, 0.5 * seconds), signal.SIGTERM)
    code = wait(children)
    stopped = was_running and checkpoint.latest("run").name != f"step-{STEPS}"
    resumed = code == 0 and (not stopped or wait(start("--resume --out-dir run", ranks)) == 0)
    return {"signals": int(was_running), "stopped_early": int(stopped), "exit_code_0": int(code == 0),
            "equal_to_the_uninterrupted_run": int(resumed and equals("run", whole))}


def damaged(draw, whole, *_) -> dict:
    """Damage a file of the last checkpoint or of the tokens, and resume."""
    shutil.copytree(whole, "run")
    path = draw.choice(sorted([*Path("run", f"step-{STEPS}").iterdir(), *Path("tokens").iterdir()]))
    content, place = bytearray(path.read_bytes()), draw.randrange(path.stat().st_size)
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content if draw.random() < 0.7 else content[:place])
    code, printed = wait(start(f"--resume --out-dir run --max-steps {STEPS + 1}")), Path("log").read_text()
    return {"damages": 1, "exit_code_2": int(code == 2), "one_line": int(printed.count("\n") == 1),
            "names_the_folder": int(str(path.parent) in printed), path.name.split("-")[0]: 1}


def full_disk(draw, whole, *_) -> dict:
    """Continue a run whose checkpoints no longer fit on the disk."""
    shutil.copytree(whole, "run")
    size = max(path.stat().st_size for path in Path("run").rglob("*.safetensors"))
    code = wait(start(f"--resume --out-dir run --max-steps {STEPS + 3} --checkpoint-interval 1",
                      file_size=draw.randrange(size // 3, size)))
    printed, kept = Path("log").read_text(), checkpoint.latest("run").name == f"step-{STEPS}"
    return {"runs": 1, "saves_that_failed": printed.count("not written: "), "exit_code_2": int(code == 2),
            "all_steps_done": int(f"step {STEPS + 3}/{STEPS + 3}" in printed),
            "earlier_checkpoints_stay": int(kept and are_whole("run")),
            "no_leftovers": int(not list(Path("run").glob(".saving-*")))}


TRIALS = {"killed": killed, "terminated": terminated, "damaged": damaged, "full_disk": full_disk}


def trial(task) -> tuple[str, str, dict]:
    """Run one trial in a folder of its own; the folder stays if it raises."""
    kind, number, setting, seed, seconds, kills, scratch = task
    folder = Path(scratch, f"{kind}-{number}")
    folder.mkdir()
    os.chdir(folder)
    shutil.copytree(Path(scratch, "tokens"), "tokens")
    draw = random.Random(f"{seed}, {kind}, {number}")
    outcome = TRIALS[kind](draw, Path(scratch, setting, "run"), setting, seconds, kills)
    shutil.rmtree(folder)
    return kind, setting, outcome


# ---------------------------------------------------------------- the study

def make_tokens():
    """Write a corpus of PyTorch's own modules."""
    sources = sorted(Path(torch.nn.__file__).parent.glob("modules/*.py"))[:12]
    write_tokens((path.read_text() for path in sources), "tokens", val_fraction=0.2)


def undisturbed(scratch) -> dict[str, float]:
    """Train a run of every setting; return the seconds that each took."""
    seconds = {}
    for setting, (_, ranks) in SETTINGS.items():
        Path(scratch, setting).mkdir()
        os.chdir(Path(scratch, setting))
        os.symlink(Path(scratch, "tokens"), "tokens")
        began = time.perf_counter()
        if wait(start(resume_or_start(setting), ranks)):
            raise OSError(f"the undisturbed run of {setting} failed: {Path('log').read_text()[-2000:]}")
        seconds[setting] = time.perf_counter() - began
    return seconds


def main(argv=None):
    options = parse(Options, argv, prog="bench/faults.py", description=__doc__)
    check_output(options.json)
    began, before, target = time.perf_counter(), Path.cwd(), options.json and options.json.absolute()
    counts = {"killed": options.chains, "terminated": options.others, "damaged": options.damages,
              "full_disk": options.others}
    totals = {kind: Counter() for kind in TRIALS}
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        make_tokens()
        seconds, names = undisturbed(scratch), list(SETTINGS)
        tasks = []
        for kind, count in counts.items():
            for number in range(count):
                setting = names[number % len(names)] if kind in ("killed", "terminated") else "delayed"
                tasks.append((kind, number, setting, options.seed, seconds[setting], options.kills, scratch))
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            for done, (kind, setting, outcome) in enumerate(pool.imap_unordered(trial, tasks), 1):
                totals[kind].update(outcome)
                print(f"{done}/{len(tasks)} {kind}, {setting}: {json.dumps(outcome)}", flush=True)
        os.chdir(before)
    figures = {"options": OPTIONS, "settings": SETTINGS, "seconds": round(time.perf_counter() - began),
               **{kind: {"counts": dict(total)} for kind, total in totals.items()}}
    write_report("bench/faults.py", argv, figures, target)
    for kind, total in totals.items():
        print(kind, json.dumps(total))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/faults.py"))
