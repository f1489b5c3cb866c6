"""Runs of train.py one after the other in worker processes, for bench/pairs.py: `Worker` starts a process, or
one for each of two ranks, and reads results; `work` is what they do.

    python bench/pair_runs.py JOB.json RESULTS.jsonl

A job is {"folder": …, "place": "cpu", "interpreter" or "gpu", "runs": [{"name": …, "arguments": [],
"steps": 4, "resume": []}]}. `resume` are further arguments of a resume before the last step; None: there is
none. A line of the results is a run's name, its metrics.jsonl, the same after the resume, or its error.

A worker ends after a failed run: an error on a GPU is often an error in every later run of the process.
"""
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LONGEST_RUN = 240  # seconds without a result


def prepare(place: str) -> None:
    """Replace in this process what a row need not test, and on a CPU what takes too long."""
    import torch

    from nanote import logs
    logs.plot_losses = lambda folder: None
    logs.open_tensorboard = lambda folder, first_step: (lambda scalars, step: None, lambda: None)
    if place == "gpu":
        return
    compile_ = torch.compile

    def trace_only(net, **arguments):
        return compile_(net, backend="eager", fullgraph=arguments.get("fullgraph", False))
    torch.compile = trace_only  # the traced graph runs uncompiled: a minute less for each model


def make_run(run: dict) -> dict:
    """Make a run, resume it before its last step, and return its records in metrics.jsonl."""
    import torch

    import train
    from bench.step import forget_models
    from nanote import parallel
    from nanote.logs import read_metrics

    def train_run(arguments):
        forget_models()
        torch._dynamo.reset()
        code = train.run([*arguments, "--out-dir", folder])
        if code != 0:
            raise RuntimeError(f"train.py ended with code {code}")
        return parallel.on_rank0(lambda: read_metrics(Path(folder, "metrics.jsonl")))

    folder = run["name"]
    parallel.on_rank0(lambda: shutil.rmtree(folder, ignore_errors=True))
    found = {"metrics": train_run(run["arguments"])}
    if run["resume"] is not None:
        parallel.on_rank0(lambda: shutil.rmtree(Path(folder, f"step-{run['steps']}")))
        found["resumed"] = train_run(["--resume", *run["resume"]])
    parallel.on_rank0(lambda: shutil.rmtree(folder))
    return found


def append(path: str, record: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\n")


def work(job: dict, results: str) -> int:
    """Make the runs of a job. Rank 0 appends a line for each to the file `results`."""
    from nanote import parallel
    from nanote.config import in_a_line
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(job["folder"])
    prepare(job["place"])
    gc.freeze()  # what is imported: collections between runs do not look at it
    ranks = parallel.start()
    for run in job["runs"]:
        began = time.monotonic()
        if ranks.rank == 0:
            print(f"\n=== {run['name']} ===", flush=True)
        try:
            found = make_run(run)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            append(results, {"name": run["name"], "error": in_a_line(error)})
            return 1
        if ranks.rank == 0:
            append(results, found | {"name": run["name"], "seconds": round(time.monotonic() - began, 1)})
    return 0


# ---------------------------------------------------------------- processes

class Worker:
    """Processes that make runs one after the other: one process, or one for each of two ranks.

    After a failed run they end, and new ones make the runs that are left.
    """

    def __init__(self, engine: str, place: str, ranks: int, runs: list[dict], folder: Path):
        self.engine, self.place, self.ranks, self.runs, self.folder = engine, place, ranks, runs, folder
        self.results, self.log, self.job = folder / "results.jsonl", folder / "log.txt", folder / "job.json"
        folder.mkdir(parents=True)
        self.results.touch()
        self.found, self.processes = {}, []  # {name of a run: its result}

    def start(self) -> None:
        """Start the processes for the runs that have no result yet."""
        self.news, self.found_before = time.monotonic(), len(self.found)
        left = [run for run in self.runs if run["name"] not in self.found]
        self.job.write_text(json.dumps(dict(folder=str(self.folder), place=self.place, runs=left)))
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.processes = [self._start_rank(rank, port) for rank in range(self.ranks)]

    def _start_rank(self, rank: int, port: int):
        environment = {"OMP_NUM_THREADS": "1", "NANOTE_ENGINE": self.engine}
        if self.ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks),
                            "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "localhost",
                            "MASTER_PORT": str(port)}
        if self.place == "interpreter":
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        if self.place == "cpu":  # a fork has imported everything
            process = multiprocessing.get_context("fork").Process(target=self._in_fork, args=(environment,))
            process.start()
            return process
        command = [sys.executable, str(ROOT / "bench/pair_runs.py"), str(self.job), str(self.results)]
        with open(self.log, "a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)

    def _in_fork(self, environment: dict) -> None:
        import torch
        log = open(self.log, "a", buffering=1)
        for number in (1, 2):
            os.dup2(log.fileno(), number)
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
        """Return whether each run has a result. Start processes for those that are left after a failure."""
        self._read()
        codes = [code_of(process) for process in self.processes]
        if None in codes:
            patience = 5 if any(codes) else LONGEST_RUN  # a rank waits for one that has failed
            if time.monotonic() - self.news < patience:
                return False
            self.end()
        self._read()
        left = [run["name"] for run in self.runs if run["name"] not in self.found]
        if left and len(self.found) == self.found_before:  # the first of them ended its process
            self.found[left[0]] = {"error": f"the process ended with {codes}, or ran {LONGEST_RUN} s"}
            left = left[1:]
        if left:
            self.start()
        return not left

    def _read(self) -> None:
        """Read the results that have come."""
        results = [json.loads(line) for line in self.results.read_text().splitlines()]
        for result in results:
            if result["name"] not in self.found:
                self.found[result["name"]], self.news = result, time.monotonic()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait() if isinstance(process, subprocess.Popen) else process.join()


def code_of(process) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def divided(runs: dict, parts: int) -> list[list]:
    """Return the runs in `parts` lists of about equal cost."""
    lists, costs = [[] for _ in range(parts)], [0] * parts
    for name, run in sorted(runs.items(), key=lambda item: -item[1]["cost"]):
        cheapest = costs.index(min(costs))
        lists[cheapest].append(run | {"name": name})
        costs[cheapest] += run["cost"]
    return [some for some in lists if some]


def results_of(waiting: list[Worker], jobs: int):
    """Let up to `jobs` workers make their runs at a time; yield (name of a run, result) as they end."""
    waiting.sort(key=lambda worker: (-worker.ranks, -sum(run["cost"] for run in worker.runs)))
    active, seen = [], set()
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                active.append(waiting.pop(0))
                active[-1].start()
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
