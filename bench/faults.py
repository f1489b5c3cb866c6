"""Inject faults into training runs on the CPU: kill -9, full disks, flipped bytes, NaN gradients, SIGTERM.

    python bench/faults.py [--kills 100] [--json results/faults.json]     # under ten minutes on two cores

Every trial is train.py itself, on a model that trains in a second or two. The result is compared with an
undisturbed run of the same options: metrics.jsonl must be equal except for times, and every tensor of the
last checkpoint must have the same bytes. The moments of a fault are drawn from --seed, among the steps, saves
and evaluations after the first save (before it there is nothing to resume).

Linux only: trials are forked, so that Python's imports run once, and report their phase in shared memory.
This is the one module of bench/ that imports a command: train.py is what it tests.
"""

import builtins
import contextlib
import json
import mmap
import multiprocessing
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if "torch" not in sys.modules:  # as a script: trials run in parallel
    os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from matplotlib.figure import Figure  # noqa: F401  (imported once, for all trials)
from torch.utils.tensorboard import SummaryWriter  # noqa: F401
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from bench.report import check_folder, write_report
from nanote import checkpoint, cli, dataset, safetensors_files
from nanote.documents import stdlib_documents
from nanote.metrics import VARYING_FIELDS, read_metrics

STEPS = 24
OPTIONS = (
    "--n-layer 1 --n-head 2 --n-embd 64 --dropout 0.1 --seq-len 64 --micro-batch-size 2 --grad-accum 2 "
    f"--max-steps {STEPS} --warmup-steps 4 --fp8-amax-history-len 8 --log-interval 1 --eval-interval 4 "
    "--eval-steps 2 --checkpoint-interval 3 --device cpu --data tokens"
)


@dataclass
class Options:
    kills: int = 100  # Runs that are killed.
    others: int = 20  # Runs each with a NaN gradient, and with SIGTERM while saving.
    jobs: int = 2  # Runs at the same time.
    seed: int = 0  # Seed of the moments.
    json: Path | None = None  # Write the figures here.


# ---------------------------------------------------------------- a run in a forked process

class Board:
    """Memory that a trial shares with its parent: how often each of PHASES began and ended, and the seconds
    that it took last."""

    PHASES = "step", "save", "evaluation"

    def __init__(self):
        self.memory = mmap.mmap(-1, 4096)

    def watch(self, phase, function):
        """Wrap `function` to record on the board when it begins and ends."""
        at = 24 * self.PHASES.index(phase)

        def watched(*arguments, **options):
            began = time.perf_counter()
            struct.pack_into("q", self.memory, at, self.begun(phase) + 1)
            try:
                return function(*arguments, **options)
            finally:
                struct.pack_into("qd", self.memory, at + 8, self.begun(phase), time.perf_counter() - began)
        return watched

    def read(self, phase):
        """Return (times begun, times ended, seconds of the last)."""
        return struct.unpack_from("qqd", self.memory, 24 * self.PHASES.index(phase))

    def begun(self, phase):
        return self.read(phase)[0]

    def now(self):
        """Return the current phase, such as "step" or, since saving is a thread, "save and step"."""
        running = [phase for phase in self.PHASES if self.read(phase)[0] > self.read(phase)[1]]
        return " and ".join(sorted(running)) or "between"


def start(arguments: str, log: Path, sabotage=lambda: None) -> tuple[int, Board]:
    """Run train.py in a fork of this process, after `sabotage()` -> (process id, board).

    What it prints goes to the file `log`.
    """
    board = Board()
    child = os.fork()
    if child:
        return child, board
    code = 99  # an unexpected error, whose traceback is in `log`
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
        torch.set_num_threads(1)
        # forks share tqdm's lock: a trial that is killed while it holds the lock would stop all others
        tqdm.set_lock(threading.RLock())
        # samples and the picture come after the last checkpoint and are not tested here
        train.generate, train.plot_losses = lambda *_, **__: [], lambda run_dir: "no picture"
        train.TrainStep.__call__ = board.watch("step", train.TrainStep.__call__)
        checkpoint._write = board.watch("save", checkpoint._write)
        train.evaluate = board.watch("evaluation", train.evaluate)
        sabotage()
        code = cli.run(lambda: train.main(arguments.split()), "train.py")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child) -> int:
    """Return the exit code; -9 after kill -9."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(arguments, log="log", sabotage=lambda: None) -> int:
    return wait(start(arguments, Path(log), sabotage)[0])


def metrics(run_dir) -> list[dict]:
    """Return the lines of metrics.jsonl without the times."""
    return [{key: value for key, value in record.items() if key not in VARYING_FIELDS}
            for record in read_metrics(Path(run_dir, "metrics.jsonl"))]


def tensors(folder) -> dict[str, bytes]:
    """Return the tensors of a checkpoint of one file, read without torch.

    The state of Python's random generator is left out: it is not part of a run's result.
    """
    path, = Path(folder).glob("*.safetensors")
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    return {name: content[end + entry["data_offsets"][0]:end + entry["data_offsets"][1]]
            for name, entry in header.items() if name not in ("__metadata__", "rng0.host")}


def equals(run_dir, whole="whole") -> bool:
    """Return whether a run has the result of the undisturbed one."""
    last = f"step-{STEPS}"
    return metrics(run_dir) == metrics(whole) and tensors(Path(run_dir, last)) == tensors(Path(whole, last))


@contextlib.contextmanager
def in_scratch(name):
    """Make and enter a folder for a trial, with links to the tokens and the undisturbed run; remove it if the
    trial raises nothing."""
    folder, before = Path(name).absolute(), Path.cwd()
    folder.mkdir()
    for shared in ("tokens", "whole"):
        if Path(shared).exists():
            (folder / shared).symlink_to(Path(shared).absolute())
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
    shutil.rmtree(folder)


# ---------------------------------------------------------------- kill -9 and SIGTERM

def moment(number, seed, target=None):
    """Return (phase, number of the phase, fraction of its duration) at which to strike in trial `number`."""
    draw = random.Random(f"{seed}, {number}")
    target = target or ("step", "save", "evaluation", "anywhere")[number % 4]
    saves, evaluations = STEPS // 3, STEPS // 4 + 1  # one after the first step, too
    occurrence = {
        "step": draw.randint(4, STEPS), "save": draw.randint(2, saves),
        "evaluation": draw.randint(2, evaluations), "anywhere": draw.randint(4, STEPS),
    }[target]
    return target, occurrence, draw.random()


def strike(child, board, target, occurrence, part, signal_number) -> str | None:
    """Send a signal to `child` at a `moment` -> its phase then; None if it had ended before."""
    phase = "step" if target == "anywhere" else target
    while board.begun(phase) < occurrence or not checkpoint.latest("run"):
        if os.waitpid(child, os.WNOHANG)[0]:
            return None
        time.sleep(0.0002)
    seconds = board.read(phase)[2] * part
    if target == "anywhere":  # between one step and the next, evaluation and save included
        seconds = part * (board.read("step")[2] + board.read("evaluation")[2] + board.read("save")[2])
    time.sleep(seconds)
    if os.waitpid(child, os.WNOHANG)[0]:
        return None
    doing = board.now()
    os.kill(child, signal_number)
    return doing


def killed(number, seed) -> dict:
    """Kill a run with kill -9, and resume it."""
    with in_scratch(f"kill-{number}"):
        target, occurrence, part = moment(number, seed)
        doing, attempts = None, 0
        while doing is None:  # if the run had ended before that moment, try an earlier one
            shutil.rmtree("run", ignore_errors=True)
            child, board = start(f"{OPTIONS} --out-dir run", Path("log"))
            doing = strike(child, board, target, max(2, occurrence - attempts), part, signal.SIGKILL)
            code = wait(child) if doing else None
            attempts += 1
        folders = checkpoint.list_checkpoints("run")
        if not folders:
            raise RuntimeError(f"trial {number}: there is no checkpoint to resume from")
        damaged = [path.name for path in folders if checkpoint._damage(path)]
        steps = board.begun("step")
        resumed = run("--resume --out-dir run")
        resumed_from = re.search(r"from step (\d+)", Path("log").read_text())
        return {
            "trial": number, "aimed_at": target, "doing": doing, "in_step": steps, "exit_code": code,
            "unreadable": damaged, "earlier_attempts": attempts - 1,
            "resumed_from": int(resumed_from[1]) if resumed_from else None, "resume_exit_code": resumed,
            "final_loss": metrics("run")[-1]["loss"], "equal": equals("run"),
        }


def terminated(number, seed) -> dict:
    """Send SIGTERM to a run while it saves, and resume it."""
    with in_scratch(f"term-{number}"):
        target, occurrence, part = moment(number, seed, "save")
        stopped = None
        while not stopped:  # it may end before it checks for signals: try an earlier moment
            shutil.rmtree("run", ignore_errors=True)
            child, board = start(f"{OPTIONS} --out-dir run", Path("log"))
            doing = strike(child, board, target, occurrence, part, signal.SIGTERM)
            code = wait(child) if doing else None
            stopped = re.search(r"stopped by SIGTERM after step (\d+)", Path("log").read_text())
            occurrence = max(2, occurrence - 1)
        whole = not any(map(checkpoint._damage, checkpoint.list_checkpoints("run")))
        resumed = run("--resume --out-dir run")
        return {
            "trial": number, "doing": doing, "exit_code": code, "stopped_after_step": int(stopped[1]),
            "checkpoints_whole": whole, "resume_exit_code": resumed,
            "equal": equals("run"),
        }


# ---------------------------------------------------------------- NaN gradients

def spoil_gradient(step, value, place):
    """Let the update of a step find an element of a gradient set to `value`.

    Writes to the file "unchanged" whether weights and optimizer state are the same after the update.

    Args:
        place: which gradient and which of its elements, from 0 to 1.
    """
    calls, update = [], train.TrainStep.update

    def state(train_step):
        parameters, optimizer = list(train_step.model.parameters()), train_step.optimizer
        moments = [value for p in parameters for value in optimizer.state[p].values()]
        counts = [torch.tensor(group.get("step", 0)) for group in optimizer.param_groups]
        return [value.detach().clone() for value in (*parameters, *moments, *counts)]

    def spoiled_update(self):
        calls.append(self)
        if len(calls) != step:
            return update(self)
        gradients = [p.grad for p in self.model.parameters()]
        gradient = gradients[int(place * len(gradients))].view(-1)
        gradient[int(place * gradient.numel())] = value
        before = state(self)
        norm = update(self)
        same = [torch.equal(a, b) for a, b in zip(before, state(self))]
        Path("unchanged").write_text(str(all(same) and len(same) == len(before)))
        return norm

    train.TrainStep.update = spoiled_update


def not_a_number(number, seed) -> dict:
    """Make a random element of a random gradient NaN or infinite at a random step of a run."""
    draw = random.Random(f"{seed}, nan {number}")
    step = draw.randint(2, STEPS - 1)
    value = draw.choice([float("nan"), float("inf"), float("-inf")])
    place = draw.random()
    with in_scratch(f"nan-{number}"):
        code = run(f"{OPTIONS} --out-dir run", sabotage=lambda: spoil_gradient(step, value, place))
        records, undisturbed = metrics("run"), metrics("whole")
        message = rf"step {step}: loss \S+, gradient norm (?:nan|inf): skipped \(1 of 10\)"
        messages = re.findall(message, Path("log").read_text())
        at = next(index for index, record in enumerate(records) if record["step"] == step)
        return {
            "trial": number, "step": step, "value": str(value), "exit_code": code,
            "told": len(messages) == 1,
            "unchanged": Path("unchanged").read_text() == "True",
            "counted": [r["skipped"] for r in records] == [0] * at + [1] * (len(records) - at),
            "before_equal": [r["loss"] for r in records[:at]] == [r["loss"] for r in undisturbed[:at]],
            "final_loss_finite": abs(records[-1]["loss"]) < float("inf"),
        }


# ---------------------------------------------------------------- a full disk

def fill_disk_while_saving(disk, outcomes):
    """Leave 0, 1, 2 … blocks free while steps 2, 3, 4 … are saved; append each outcome to the file
    `outcomes`."""
    plain, filler = checkpoint._write, disk / "filler"

    def write(run_dir, step, *rest):
        if step > 1:
            room = os.statvfs(disk).f_bavail - (step - 2)
            with open(filler, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(room, 1) * 4096)
        last = checkpoint.latest(run_dir)
        try:
            plain(run_dir, step, *rest)
            outcome = "written"
        except OSError as error:
            outcome = str(error)
            raise
        finally:
            filler.unlink(missing_ok=True)
            kept = checkpoint.latest(run_dir)
            record = {
                "step": step, "outcome": outcome, "whole": checkpoint._damage(kept) is None,
                "stands": kept == last, "left": [path.name for path in run_dir.glob(".saving*")],
            }
            with open(outcomes, "a") as file:
                file.write(json.dumps(record) + "\n")

    checkpoint._write = write


def saves_on_full_disk(disk) -> dict:
    """Train on a disk with too little room for most checkpoints -> figures."""
    small = (f"{OPTIONS} --n-embd 32 --eval-interval 0 --checkpoint-interval 1 --keep-checkpoints 1 "
             "--no-background-saves")
    outcomes = Path("outcomes").absolute()
    run(f"{small} --max-steps 1 --out-dir {disk}/run")
    sizes = [path.stat().st_size for path in (disk / "run").glob("step-*/*")]
    blocks = sum((size + 4095) // 4096 for size in sizes)
    shutil.rmtree(disk / "run")
    code = run(f"{small} --max-steps {blocks + 6} --out-dir {disk}/run",
               sabotage=lambda: fill_disk_while_saving(disk, outcomes))
    saves = [json.loads(line) for line in outcomes.read_text().splitlines()]
    failed = [save for save in saves if save["outcome"] != "written"]
    log_text = Path("log").read_text()
    told = [f"{disk}/run/step-{save['step']} not written: No space left on device" in log_text
            for save in failed]
    return {
        "blocks_of_a_checkpoint": blocks,
        "saves": len(saves),
        "failed": len(failed),
        "exit_code": code,
        "told": sum(told),
        "last_good_stands": sum(save["whole"] and save["stands"] and not save["left"] for save in failed),
        "written_with_room": [save["outcome"] for save in saves[-3:]] == ["written"] * 3,
    }


def disk_fills(_number, _seed) -> dict:
    """Train on a separate small disk, which has room for the first checkpoint, and for later ones 0, 1, 2 …
    blocks of 4 KiB until all of it fits."""
    with in_scratch("disk") as folder:
        disk = folder / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
        mounted = subprocess.run(mount, capture_output=True, text=True)
        if mounted.returncode:
            return {"skipped": f"no tmpfs can be mounted here: {mounted.stderr.strip()}"}
        try:
            return saves_on_full_disk(disk)
        finally:
            subprocess.run(["umount", str(disk)], check=True)


class DiskFull:
    """Makes the n-th call fail with which nanote/checkpoint.py changes the disk: mkdir, write, sync, rename.

    A write that fails has written half of its content.
    """

    def __init__(self, fail_at):
        self.fail_at, self.calls = fail_at, []

    def call(self, name, function, half=lambda: None):
        self.calls.append(name)
        if len(self.calls) - 1 == self.fail_at:
            half()
            raise OSError(28, "No space left on device")
        return function()

    def __enter__(self):
        disk, self.before = self, (Path.mkdir, Path.write_text, checkpoint._sync, os.rename)
        mkdir, write_text, sync, rename = self.before

        class File:
            def __init__(self, *arguments):
                self.file = builtins.open(*arguments)

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()

            def write(self, content):
                content = memoryview(content)
                return disk.call(
                    "write", lambda: self.file.write(content),
                    lambda: self.file.write(content[: len(content) // 2]),
                )

        safetensors_files.open = File
        Path.mkdir = lambda path, *a, **o: disk.call("mkdir", lambda: mkdir(path, *a, **o))
        Path.write_text = lambda path, text: disk.call(
            "write", lambda: write_text(path, text), lambda: write_text(path, text[: len(text) // 2])
        )
        checkpoint._sync = lambda path: disk.call("sync", lambda: sync(path))
        os.rename = lambda *paths: disk.call("rename", lambda: rename(*paths))
        return self

    def __exit__(self, *_):
        Path.mkdir, Path.write_text, checkpoint._sync, os.rename = self.before
        del safetensors_files.open


def save_that_fails(run_dir, parts, document, fail_at) -> tuple[list[str], bool]:
    """Save step 2 of a run that has step 1, while call number `fail_at` fails -> (calls, good).

    Good means: an error that says so, step 1 whole, step 2 whole or absent, and no leftover files. `fail_at`
    None: no call fails.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir()
    checkpoint._write(run_dir, 1, parts, document, 9)
    message = None
    with DiskFull(fail_at) as disk:
        try:
            checkpoint._write(run_dir, 2, parts, document, 9)
        except OSError as error:
            message = str(error)
    folders = checkpoint.list_checkpoints(run_dir)
    good = folders[0].name == "step-1" and not any(map(checkpoint._damage, folders))
    if fail_at is None:
        good = good and message is None and len(folders) == 2 and not list(run_dir.glob(".*"))
    else:
        state = "not written" if len(folders) == 1 else "is complete, but the clean-up after it failed"
        told = f"step-2 {state}: No space left on device; the last good checkpoint is {folders[-1]};"
        good = good and message is not None and told in message and not list(run_dir.glob(".*"))
    return disk.calls, good


def every_call_fails(_number, _seed) -> dict:
    """Let each call of a save fail in turn."""
    with in_scratch("calls"):
        run(f"{OPTIONS} --max-steps 1 --out-dir run")
        document = Path("run/step-1/meta.json").read_text()
        parts = {
            name: (torch.frombuffer(bytearray(content), dtype=torch.uint8), [0])
            for name, content in tensors("run/step-1").items()
        }
        calls, good = save_that_fails(Path("again"), parts, document, None)
        outcomes = [save_that_fails(Path("again"), parts, document, number)[1]
                    for number in range(len(calls))]
        return {
            "calls": dict(Counter(calls)), "tried": len(outcomes), "good": sum(outcomes),
            "undisturbed_good": good,
        }


# ---------------------------------------------------------------- flipped bytes

def flips(path, places, refused) -> dict:
    """Change a byte at each of `places` and count how often `refused()`: one bit, then all bits, in turns."""
    content, detected = bytearray(path.read_bytes()), 0
    for number, place in enumerate(places):
        bit = number // 2 % 8  # each in turn
        damaged = bytearray(content)
        damaged[place] ^= 0xFF if number % 2 else 1 << bit
        path.write_bytes(damaged)
        detected += refused()
    path.write_bytes(content)
    return {"flipped": len(places), "detected": detected}


def flipped_bytes(_number, seed, most=300) -> dict:
    """Flip bytes in each file of a checkpoint and of a token folder, at `most` places per file."""
    draw = random.Random(f"{seed}, flips")

    def places(path):
        size = path.stat().st_size
        return sorted(draw.sample(range(size), min(size, most)))

    with in_scratch("flips"):
        run(f"{OPTIONS} --max-steps 6 --out-dir run")
        shutil.copytree("tokens", "altered")
        figures = {}

        def checkpoint_refused():
            try:
                checkpoint.read_meta("run/step-6")
            except ValueError as error:
                found = str(error)
                return ("damaged checkpoint: run/step-6/" in found
                        and "the one before it, run/step-3, is whole" in found)
            return False

        def tokens_refused(split):
            try:
                dataset.open_tokens("altered", split)
            except ValueError as error:
                return "altered/" in str(error)
            return False

        for path in sorted(Path("run/step-6").iterdir()):
            figures[f"checkpoint/{path.name}"] = flips(path, places(path), checkpoint_refused)
        for name in ("train.bin", "val.bin", "meta.json"):
            split = name.removesuffix(".bin") if name.endswith(".bin") else "train"
            figures[f"tokens/{name}"] = flips(
                Path("altered", name), places(Path("altered", name)), lambda: tokens_refused(split)
            )
        checkpoint.read_meta("run/step-6")  # restored, both are accepted
        dataset.open_tokens("altered", "train")
        return figures


# ---------------------------------------------------------------- two runs, one folder

def two_runs(_number, _seed) -> dict:
    """Resume a run that still trains, which must be refused; then kill it, and resume again."""
    with in_scratch("two"):
        child, board = start(f"{OPTIONS} --out-dir run", Path("first"))
        while not (checkpoint.latest("run") and board.begun("step") < STEPS):
            time.sleep(0.001)
        os.kill(child, signal.SIGSTOP)  # it holds the folder, and cannot finish
        code = run("--resume --out-dir run", "second")
        os.kill(child, signal.SIGCONT)
        os.kill(child, signal.SIGKILL)
        wait(child)
        log_text = Path("second").read_text()
        again = run("--resume --out-dir run", "third")
        return {
            "second_exit_code": code, "lines": log_text.count("\n"),
            "names_the_first": f"process {child} on" in log_text, "resumed_after_kill": again,
            "equal": equals("run"),
        }


# ---------------------------------------------------------------- the whole study

REPEATED = {"killed": killed, "terminated": terminated, "not_a_number": not_a_number}  # run many times
SINGLE = {"disk_fills": disk_fills, "every_call_fails": every_call_fails, "flipped_bytes": flipped_bytes,
          "two_runs": two_runs}


def trial(task):
    """Run one trial. task: (its kind, its number, the seed)."""
    kind, number, seed = task
    return kind, (REPEATED | SINGLE)[kind](number, seed)


def make_tokens():
    """Write a corpus of 200,000 bytes: the first modules of the standard library."""
    documents, *_ = stdlib_documents()
    dataset.write_tokens(
        (text for text, _ in zip(documents, range(12))), "tokens", val_fraction=0.2,
        source="the standard library's first modules",
    )


def run_trials(options) -> dict:
    """Run all trials in parallel -> {kind: outcomes}."""
    counts = {kind: options.others for kind in REPEATED} | {kind: 1 for kind in SINGLE}
    counts["killed"] = options.kills
    tasks = [(kind, number, options.seed) for kind, count in counts.items() for number in range(count)]
    found = {}
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for done, (kind, outcome) in enumerate(pool.imap_unordered(trial, tasks), 1):
            found.setdefault(kind, []).append(outcome)
            print(f"{done}/{len(tasks)} {kind}: {json.dumps(outcome)}", flush=True)
    return found


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/faults.py", description=__doc__)
    check_folder(options.json)
    for name in ("kills", "others", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1, such as --{name} 2")
    began, before = time.perf_counter(), Path.cwd()
    target = options.json.absolute() if options.json else None
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            make_tokens()
            if run(f"{OPTIONS} --out-dir whole"):
                raise OSError(f"the undisturbed run failed: {Path('log').read_text()}")
            final_loss = metrics("whole")[-1]["loss"]
            found = run_trials(options)
        finally:
            os.chdir(before)
    figures = {
        "options": OPTIONS, "seconds": round(time.perf_counter() - began),
        "uninterrupted_final_loss": final_loss, **summary(found),
    }
    write_report("bench/faults.py", argv, figures, target)
    for name in (*REPEATED, *SINGLE):
        print(name, json.dumps(figures[name].get("counts", figures[name])))
    return 0


def summary(found) -> dict:
    """Return the figures: the outcomes, and counts of those that were repeated."""
    figures = {}
    for kind, outcomes in found.items():
        if kind in SINGLE:
            figures[kind], = outcomes
            continue
        outcomes.sort(key=lambda outcome: outcome["trial"])
        figures[kind] = {"trials": outcomes}
    kills = found.get("killed", [])
    figures["killed"]["counts"] = {
        "kills": len(kills),
        "died_of_it": sum(k["exit_code"] == -9 for k in kills),
        "resumed": sum(k["resume_exit_code"] == 0 for k in kills),
        "unreadable_checkpoints": sum(len(k["unreadable"]) for k in kills),
        "equal_to_the_uninterrupted_run": sum(k["equal"] for k in kills),
        "drawn_anew_after_the_last_checkpoint": sum(k["earlier_attempts"] for k in kills),
        "while": dict(Counter(k["doing"] for k in kills).most_common()),
    }
    terms = found.get("terminated", [])
    figures["terminated"]["counts"] = {
        "signals": len(terms), "exit_code_0": sum(t["exit_code"] == 0 for t in terms),
        "whole": sum(t["checkpoints_whole"] for t in terms),
        "resumed": sum(t["resume_exit_code"] == 0 for t in terms),
        "equal_to_the_uninterrupted_run": sum(t["equal"] for t in terms),
        "while": dict(Counter(t["doing"] for t in terms).most_common()),
    }
    nans = found.get("not_a_number", [])
    figures["not_a_number"]["counts"] = {
        "runs": len(nans),
        **{
            key: sum(bool(n[key]) for n in nans)
            for key in ("told", "unchanged", "counted", "before_equal", "final_loss_finite")
        },
        "exit_code_0": sum(n["exit_code"] == 0 for n in nans),
    }
    return figures


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/faults.py"))
