"""bench/multi_gpu.py with two processes on a CPU, and a small stand-in for nanoGPT's model.py."""
import json
import re

import pytest
import torch
from test_nanogpt import STAND_IN

from bench import multi_gpu
from fork_server import run_python
from trainer_tools import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU")
LAUNCH = f"""
import datetime, os, sys, torch
sys.path.insert(0, {str(ROOT)!r})
from bench import measure, multi_gpu, nanogpt
from nanote import cli
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

build = nanogpt.build

def shown(*arguments, **options):
    step = build(*arguments, **options)
    print("built", type(step.net).__name__, flush=True)
    return step

plain, failing = multi_gpu.measure_row, os.environ.get("FAILING", "")

def fail_on_one_rank(layout, *arguments):
    if os.environ["RANK"] == "1" and layout == failing:
        raise RuntimeError("CUDA error: of this GPU")
    return plain(layout, *arguments)

def work():
    torch.set_num_threads(1)
    multi_gpu.measure_row, multi_gpu.PATIENCE = fail_on_one_rank, datetime.timedelta(seconds=3)
    measure.WARMUP, nanogpt.build = 1, shown
    if code := cli.run(lambda: multi_gpu.main(sys.argv[1:]), "bench/multi_gpu.py"):
        sys.exit(code)

elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
                            max_restarts=0, run_id="test", monitor_interval=0.1,
                            logs_specs=DefaultLogsSpecs("logs")), work)()
"""


def test_nanogpt_under_ddp_is_timed_beside_ddp(tmp_path):
    (tmp_path / "model.py").write_text(STAND_IN)
    arguments = ("--layouts ddp nanogpt --shapes 124m-b16 --recipes none --steps 4 --nanogpt . "
                 "--json rows.json")
    done = run_python("-c", LAUNCH, *arguments.split(), cwd=tmp_path,
                      env={"NANOTE_REFERENCE": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr
    built = re.findall(r"built (\w+)", done.stdout)  # by each process: for both, and for itself
    assert len(built) == 4 and built.count("DistributedDataParallel") == 2
    other, ours = json.loads((tmp_path / "rows.json").read_text())
    assert (other["parallel"], ours["parallel"]) == ("nanogpt", "ddp") and "error" not in other | ours
    assert len(other["model_py_sha256"]) == 64 and "model_py_sha256" not in ours
    for row in (other, ours):
        assert row["gpus"] == 2 and row["recipe"] == "none" and row["efficiency"] > 0
    ratio = ours["tokens_per_s_per_gpu"] / other["tokens_per_s_per_gpu"]
    assert ours["over_nanogpt"] == pytest.approx(ratio, rel=1e-4) and "over_nanogpt" not in other
    rows = [row | {"peak_gib": 1.0} for row in (other, ours | {"grad_accum": 8}, ours)]
    ours, accumulated, other = multi_gpu.table(rows).splitlines()[2:]  # by layout, then shape
    assert "| nanoGPT under DDP | 124M, 16 x 1,024 | BF16 |" in other
    assert ours.endswith(f"| 1.0 |  | {ratio:.2f} |")
    assert "| ddp | 124M, 16 x 1,024, 8 a step | BF16 |" in accumulated


def test_a_rank_that_fails_ends_the_others(tmp_path):
    """They wait for it in a collective; the row before is kept."""
    arguments = "--layouts ddp-eager ddp --shapes 124m-b16 --recipes none --steps 4 --json rows.json"
    done = run_python("-c", LAUNCH, *arguments.split(), cwd=tmp_path,
                      env={"NANOTE_REFERENCE": "1", "TORCHDYNAMO_DISABLE": "1", "FAILING": "ddp"})
    assert done.returncode and "rank 1 failed, and others wait for it" in done.stderr
    row, = json.loads((tmp_path / "rows.json").read_text())
    assert row["parallel"] == "ddp-eager" and "error" not in row


@pytest.mark.parametrize("arguments, complaint", [
    ("--layouts nanogpt", "--layouts nanogpt: no nanoGPT checkout was given; name its folder with --nanogpt"),
    ("--layouts nanogpt --nanogpt .", "there is no model.py; name the folder of a nanoGPT checkout"),
    ("--layouts nanogpt --nanogpt . --accum 2", "--accum 2: layout nanogpt does not accumulate; pass 1"),
    ("--layouts nanogpt --nanogpt . --shapes llama3-8b", "--shapes llama3-8b: nanoGPT has no Llama"),
    ("--layouts ddp2", "--layouts 'ddp2' is unknown; use ddp, ddp-all_reduce")])
def test_options_are_checked_before_anything_runs(arguments, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(multi_gpu.parallel, "init", lambda: pytest.fail("started"))
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        multi_gpu.main(arguments.split())
