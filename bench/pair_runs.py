"""Runs of train.py one after the other in processes that have imported it, for bench/pairs.py.

    python bench/pair_runs.py RUNS.json      # or with torchrun, on two ranks

`results_of` divides runs into groups and starts this command for each. The command makes the runs of a group
(`Run`), each with a second one that resumes from before its last step, and prints a line of JSON for each:
metrics.jsonl, and the same after the resume, or its error. All else goes to log.txt. It ends after an error,
which on a GPU is often one of every later run, and a new process makes the rest.
"""
import dataclasses
import faulthandler
import gc
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import threading
import traceback
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LONGEST_RUN = 240  # seconds


@dataclass
class Run:
    name: str  # its command
    arguments: list[str]  # of train.py
    environment: dict[str, str]
    ranks: int
    steps: int
    resumes: bool  # before its last step


# ---------------------------------------------------------------- processes

def results_of(runs: list[Run], folder: Path, jobs: int):
    """Make runs, in up to `jobs` processes or pairs of ranks at a time; yield each result as it comes."""
    groups = queue.SimpleQueue()
    for number, group in enumerate(grouped(runs, size=math.ceil(len(runs) / jobs))):
        groups.put((group, folder / f"group-{number}"))
    results = queue.SimpleQueue()

    def work():
        while True:  # after the last group it waits, until the process ends with its daemon threads
            for result in results_of_group(*groups.get()):
                results.put(result)

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    for _ in runs:
        yield results.get()


def grouped(runs: list[Run], size: int) -> list[list[Run]]:
    """Return the runs in groups of up to `size` that have the same environment and number of ranks."""
    alike = defaultdict(list)
    for run in runs:
        key = (run.ranks, *run.environment.items())
        alike[key].append(run)
    groups = []
    for some in alike.values():
        count = math.ceil(len(some) / size)
        groups += [some[start::count] for start in range(count)]
    return sorted(groups, key=lambda group: group[0].ranks, reverse=True)  # the slow ones first


def results_of_group(runs: list[Run], folder: Path):
    """Make the runs of a group; yield the result of each."""
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    launcher = [sys.executable]
    if runs[0].ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(runs[0].ranks)]
    found = set()
    while len(found) < len(runs):
        missing = [run for run in runs if run.name not in found]
        file = folder / "runs.json"
        file.write_text(json.dumps([dataclasses.asdict(run) for run in missing]))
        with open(log, "a") as stderr:
            process = subprocess.Popen(
                [*launcher, str(ROOT / "bench/pair_runs.py"), str(file)], cwd=folder, text=True,
                stdout=subprocess.PIPE, stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | runs[0].environment)
        for line in process.stdout:
            result = json.loads(line)
            if result["name"] not in found:  # else it is the other rank's error
                found.add(result["name"])
                yield result | {"log": str(log)}
        code = process.wait()
        first_name = missing[0].name
        if first_name not in found:  # this one ended its process
            found.add(first_name)
            error = f"its process ended with code {code}"
            yield {"name": first_name, "error": error, "log": str(log)}


# ---------------------------------------------------------------- in a process

def prepare() -> None:
    """Replace in this process what a run need not test, and on a CPU what takes too long."""
    import torch

    from nanote import logs
    logs.plot_losses = lambda folder: None
    logs.open_tensorboard = lambda folder, first_step: (lambda scalars, step: None, lambda: None)
    if torch.cuda.is_available():
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


def make_run(run: Run) -> dict:
    """Make a run and its resume; return the records of both."""
    from nanote import parallel

    def remove(folder):
        parallel.on_rank0(lambda: shutil.rmtree(folder, ignore_errors=True))

    remove("run")
    result = {"name": run.name, "metrics": records_of(run.arguments)}
    if run.resumes:
        remove(f"run/step-{run.steps}")
        result["resumed"] = records_of(["--resume"])
    return result


def records_of(arguments: list[str]) -> list[dict]:
    """Run train.py in the folder "run"; return the records of its metrics.jsonl."""
    import torch

    import train
    from bench.step import forget_models
    from nanote import parallel
    from nanote.logs import read_metrics
    forget_models()
    torch._dynamo.reset()
    code = train.run([*arguments, "--out-dir", "run"])
    if code != 0:
        raise RuntimeError(f"train.py ended with code {code}")
    return parallel.on_rank0(lambda: read_metrics(Path("run", "metrics.jsonl")))


def main(runs: list[Run]) -> int:
    """Make the runs; rank 0 prints the result of each. After an error, which any rank prints, return 1."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the runs print goes to the log
    from nanote import parallel
    from nanote.command import error_line
    prepare()
    gc.freeze()  # what is imported: collections between runs do not look at it
    is_rank0 = parallel.start().rank == 0
    for run in runs:
        faulthandler.dump_traceback_later(LONGEST_RUN, exit=True)
        print(f"\n=== {run.name}", flush=True)
        try:
            result = make_run(run)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            print(json.dumps({"name": run.name, "error": error_line(error)}), file=results)
            return 1
        if is_rank0:
            print(json.dumps(result), file=results)
    return 0


if __name__ == "__main__":
    code = main([Run(**fields) for fields in json.loads(Path(sys.argv[1]).read_text())])
    sys.stdout.flush()
    os._exit(code)  # without clean-up, which gloo's threads and a failed rank can block
