"""Make runs of train.py one after the other in this process, or on several ranks: the worker of bench/pairs.py.

    python bench/pair_runs.py JOB.json RESULTS.jsonl

A job is {"runs": [{"name": …, "arguments": […], "resume": […]}, …], "place": "cpu" | "interpreter" | "gpu"}.
`resume` are further arguments of a resume before the last step, None for none. A line of the results is a
run's name, its metrics.jsonl, the same after the resume, or its error.
The worker ends after a failed run: an error on a GPU is often an error in every later run of the process.
"""
import gc
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STEPS = 4
RESUMED = f"step-{STEPS}"  # this checkpoint is removed, then the run resumes from the one before


def prepare(place: str) -> None:
    """Replace in this process what a row need not test, and on a CPU what takes too long."""
    import torch

    import train
    from nanote import logs, models
    logs.plot_losses = lambda folder: None
    logs.open_board = lambda *arguments: (lambda scalars, step: None, lambda: None)
    if place == "gpu":
        return
    compile_ = torch.compile

    def trace_only(net, **arguments):
        return compile_(net, backend="eager", fullgraph=arguments.get("fullgraph", False))
    torch.compile = trace_only  # the traced graph runs uncompiled: a minute less for each model
    if place == "interpreter":
        from fast_kernels import interpreter
        interpreter.install()
        train.prepare_cpu = lambda activation: None
        models._reason_against_fast = lambda options, dtype: ""


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
        parallel.on_rank0(lambda: shutil.rmtree(Path(folder, RESUMED)))
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


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    code = work(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
    sys.stdout.flush()
    os._exit(code)  # without clean-up, which gloo's threads and a failed rank can block
