"""kill -9 of one of two processes under torchrun: what the other one says, and what a restart continues."""
import re
from pathlib import Path

import pytest

from fork_server import run_python
from nanote import elastic
from trainer_tools import OPTIONS, ROOT, metrics

# torchrun's own agent, with forked processes, which need not import PyTorch again
LAUNCH = f"""
import dataclasses, logging, os, signal, sys, time, torch
sys.path.insert(0, {str(ROOT)!r})
import train
from nanote import cli
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

plain = train.get_batches
logging.disable()  # the agent's own traceback

parsed = train.read_options(sys.argv[1:])[0]  # here: it takes half of a process's time

def work(deaths, out_dir):
    started = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def get_batches(loader, step, grad_accum):
        if (started, int(os.environ["RANK"]), step) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(loader, step, grad_accum)

    train.get_batches, train.sample_text, train.draw = get_batches, lambda run: "", lambda *given: ""
    torch.set_num_threads(1)
    print("process", os.getpid(), flush=True)
    if started and os.environ["RANK"] == "0":
        time.sleep(0.5)  # meanwhile rank 1 must not find what the ranks before the restart have left
    cli.parse = lambda *given, **options: dataclasses.replace(parsed, out_dir=out_dir)
    sys.exit(cli.run(lambda: train.main([]), "train.py"))

def launch(deaths, max_restarts, out_dir):
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
                          run_id="test", max_restarts=max_restarts, monitor_interval=0.1,
                          logs_specs=DefaultLogsSpecs("logs"))
    try:
        elastic_launch(config, work)(deaths, out_dir)
    except ChildFailedError as error:
        print("torchrun: rank", error.get_first_failure()[0], "has failed", file=sys.stderr)
"""
RUN = (f"{OPTIONS} --fp8-recipe none --grad-accum 1 --max-steps 8 --eval-interval 3 --checkpoint-interval 2 "
       "--no-background-saves")


@pytest.fixture(scope="module")
def launched(tokens, tmp_path_factory):
    """Run all launches in one process, which imports PyTorch once; return its folder and output."""
    folder = tmp_path_factory.mktemp("launched")
    done = run_python("-c", f"""{LAUNCH}
launch([], 0, "whole")
launch([(0, 1, 1), (1, 0, 6)], 2, None)  # before the first checkpoint, then after step 5 was logged
launch([(0, 1, 6)], 0, "alone")
launch([], 0, "whole")  # which exists
""", *RUN.split(), "--data", tokens, cwd=folder, env={"NANOTE_REFERENCE": "1"}, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.parametrize("processes, on_this_node, start", [
    ("1", "1", "python"), ("8", "8", "torchrun --nproc-per-node 8"),
    ("16", "8", "torchrun --nnodes 2 … --nproc-per-node 8")])
def test_the_command_that_resumes(monkeypatch, processes, on_this_node, start):
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_this_node)
    assert elastic.launcher() == start


def test_a_restarted_run_ends_as_an_uninterrupted_one(launched):
    folder, done = launched
    assert metrics(folder / "out/tiny") == metrics(folder / "whole") and len(metrics(folder / "whole")) == 8
    assert "torchrun starts all again (restart 1 of 2), from the start\n" in done.stderr
    assert "torchrun starts all again (restart 2 of 2), from out/tiny/step-4\n" in done.stderr


def test_a_run_without_restarts_ends_with_one_line(launched):
    folder, done = launched
    assert ("train.py: rank 0: another process has ended, see torchrun's report; torchrun --max-restarts 3 "
            "would continue the run from alone/step-4\n") in done.stderr
    assert "torchrun: rank 1 has failed\n" in done.stderr and "Traceback" not in done.stderr
    told = re.findall("^train.py: (.*)", done.stderr, re.MULTILINE)
    assert len(told) == 4  # of the three deaths above, and of a mistake of both
    assert told[-1] == "--out-dir whole exists: resume it with --resume, or name another"
    processes = re.findall(r"^process (\d+)$", done.stdout, re.MULTILINE)
    assert len(processes) == 12 and not [number for number in processes if Path("/proc", number).exists()]
