"""Runs of train.py one after the other in worker processes, for bench/pairs.py.

    python bench/pair_runs.py JOB.json RESULTS.jsonl

A `Run` is a run of train.py and, where it resumes, a second one from before its last step. A `Worker` starts
a process, or one for each of two ranks, that makes some runs (`work`), and reads their results: for each run
a line with its name and metrics.jsonl, the same after the resume, or its error. JOB.json is {"folder": …,
"kind": "cpu", "interpreter" or "gpu", "runs": […]}, with the fields of Run.

A worker's processes end after a failed run, and new ones make the rest: an error on a GPU is often an error
in every later run of the process.
"""
import dataclasses
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LONGEST_RUN = 240  # seconds without a result
LONGEST_WAIT = 5  # seconds, of a rank for one that has failed


@dataclass
class Run:
    name: str  # its folder
    arguments: list[str]  # of train.py
    steps: int
    resumes: bool  # before its last step
    resume_arguments: list[str]  # with --resume
    cost: int  # relative to other runs


# ---------------------------------------------------------------- in a worker process

def prepare(kind: str) -> None:
    """Replace in this process what a run need not test, and on a CPU what takes too long."""
    import torch

    from nanote import logs
    logs.plot_losses = lambda folder: None
    logs.open_tensorboard = lambda folder, first_step: (lambda scalars, step: None, lambda: None)
    if kind == "gpu":
        return
    compile_ = torch.compile

    def trace_only(forward, **arguments):  # forward: a model's bound method
        model = forward.__self__
        backend = "eager"
        recomputes = getattr(model.config, "gradient_checkpointing", False)
        if recomputes and model.config.use_fp8 and model.fp8_recipe.delayed():
            backend = "aot_eager"  # "eager" fails to recompute with this recipe
        return compile_(forward, backend=backend, fullgraph=arguments.get("fullgraph", False))

    torch.compile = trace_only  # the traced graph runs uncompiled: a minute less for each model


def train_to_the_end(folder: str, arguments: list[str]) -> list[dict]:
    """Run train.py in this process; return the records of metrics.jsonl."""
    import torch

    import train
    from bench.step import forget_models
    from nanote import parallel
    from nanote.logs import read_metrics
    forget_models()
    torch._dynamo.reset()
    code = train.run([*arguments, "--out-dir", folder])
    if code != 0:
        raise RuntimeError(f"train.py ended with code {code}")
    return parallel.on_rank0(lambda: read_metrics(Path(folder, "metrics.jsonl")))


def make_run(run: Run) -> dict:
    """Make a run and its resume; return the records of both."""
    from nanote import parallel

    def remove(folder):
        parallel.on_rank0(lambda: shutil.rmtree(folder, ignore_errors=True))

    remove(run.name)
    result = {"metrics": train_to_the_end(run.name, run.arguments)}
    if run.resumes:
        remove(Path(run.name, f"step-{run.steps}"))
        result["resumed"] = train_to_the_end(run.name, ["--resume", *run.resume_arguments])
    remove(run.name)
    return result


def append(path: str, record: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


def work(job: dict, results: str) -> int:
    """Make the runs of a job. Rank 0 appends a line for each to the file `results`."""
    from nanote import parallel
    from nanote.command import error_line
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(job["folder"])
    prepare(job["kind"])
    gc.freeze()  # what is imported: collections between runs do not look at it
    is_rank0 = parallel.start().rank == 0
    for fields in job["runs"]:
        run = Run(**fields)
        start = time.monotonic()
        if is_rank0:
            print(f"\n=== {run.name} ===", flush=True)
        try:
            result = make_run(run)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            append(results, {"name": run.name, "error": error_line(error)})
            return 1
        if is_rank0:
            seconds = round(time.monotonic() - start, 1)
            append(results, result | {"name": run.name, "seconds": seconds})
    return 0


# ---------------------------------------------------------------- processes

class Worker:
    """Processes that make runs one after the other: one process, or one for each of two ranks."""

    def __init__(self, engine: str, kind: str, ranks: int, runs: list[Run], folder: Path):
        self.engine = engine
        self.kind = kind
        self.ranks = ranks
        self.runs = runs
        self.job = folder / "job.json"
        self.results = folder / "results.jsonl"
        self.log = folder / "log.txt"
        self.found = {}  # {name of a run: its result}
        self.processes = []
        folder.mkdir(parents=True)
        self.results.touch()

    def runs_left(self) -> list[Run]:
        return [run for run in self.runs if run.name not in self.found]

    def start(self) -> None:
        """Start the processes for the runs that have no result yet."""
        self.last_result = time.monotonic()
        self.found_before = len(self.found)
        runs = [dataclasses.asdict(run) for run in self.runs_left()]
        job = {"folder": str(self.job.parent), "kind": self.kind, "runs": runs}
        self.job.write_text(json.dumps(job))
        port = free_port()
        self.processes = [self._start_rank(rank, port) for rank in range(self.ranks)]

    def _start_rank(self, rank: int, port: int):
        environment = {"OMP_NUM_THREADS": "1", "NANOTE_ENGINE": self.engine}
        if self.ranks > 1:
            environment |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        if self.kind == "interpreter":
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        if self.kind == "cpu":  # a fork has imported everything
            process = multiprocessing.get_context("fork").Process(target=self._in_fork, args=(environment,))
            process.start()
            return process
        command = [sys.executable, str(ROOT / "bench/pair_runs.py"), str(self.job), str(self.results)]
        with open(self.log, "a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)

    def _in_fork(self, environment: dict) -> None:
        import torch
        log = open(self.log, "a", buffering=1)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        os.environ.update(environment)
        torch.set_num_threads(1)  # a fork has no threads of OpenMP
        code = 1
        try:
            code = work(json.loads(self.job.read_text()), str(self.results))
        finally:
            log.flush()
            os._exit(code)

    def poll(self) -> bool:
        """Return whether every run has a result. Start processes for those that are left after a failure."""
        self._read()
        codes = [exit_code(process) for process in self.processes]
        if None in codes:  # one is still at work
            has_failed = any(codes)
            patience = LONGEST_WAIT if has_failed else LONGEST_RUN
            if time.monotonic() - self.last_result < patience:
                return False
            self.end()
        self._read()
        if self.runs_left() and len(self.found) == self.found_before:  # the first one ended its process
            error = f"the process ended with {codes}, or ran {LONGEST_RUN} s"
            self.found[self.runs_left()[0].name] = {"error": error}
        if not self.runs_left():
            return True
        self.start()
        return False

    def _read(self) -> None:
        """Read the results that have come."""
        for line in self.results.read_text().splitlines():
            result = json.loads(line)
            if result["name"] not in self.found:
                self.found[result["name"]] = result
                self.last_result = time.monotonic()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            if isinstance(process, subprocess.Popen):
                process.wait()
            else:
                process.join()


def exit_code(process) -> int | None:
    """Return the exit code of a process, None if it runs."""
    if isinstance(process, subprocess.Popen):
        return process.poll()
    return process.exitcode


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def cost_of(runs: list[Run]) -> int:
    return sum(run.cost for run in runs)


def divided(runs: list[Run], parts: int) -> list[list[Run]]:
    """Return the runs in up to `parts` lists of about equal cost."""
    lists = [[] for _ in range(parts)]
    for run in sorted(runs, key=lambda run: run.cost, reverse=True):
        min(lists, key=cost_of).append(run)
    return [some for some in lists if some]


def results_of(workers: list[Worker], jobs: int):
    """Let up to `jobs` workers at a time make their runs; yield (name of a run, its result) as they end."""
    waiting = sorted(workers, key=lambda worker: (worker.ranks, cost_of(worker.runs)), reverse=True)
    active = []
    seen = set()
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                worker = waiting.pop(0)
                worker.start()
                active.append(worker)
            for worker in list(active):
                if worker.poll():
                    active.remove(worker)
                for name in worker.found.keys() - seen:
                    seen.add(name)
                    yield name, worker.found[name] | {"log": str(worker.log)}
            time.sleep(0.05)
    finally:
        for worker in active:
            worker.end()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    code = work(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
    sys.stdout.flush()
    os._exit(code)  # without clean-up, which gloo's threads and a failed rank can block
