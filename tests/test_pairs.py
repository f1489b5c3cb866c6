"""bench/pairs.py: every two options of train.py that do not exclude each other train together."""
import copy
import os
import subprocess
import sys

import pytest
import torch

from bench import pair_refusals, pair_rows, pairs
from trainer_tools import ROOT

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="te_reference's part runs without a GPU")


@on_a_cpu
def test_every_pair_trains_on_te_reference(tmp_path, capfd):
    """And three rows of model_te_fast in Triton's interpreter. Each refused pair is one line. These rows and
    those of GPUs in results/pairs.json have every pair."""
    code = pairs.main(["--folder", str(tmp_path / "pairs")])
    out = capfd.readouterr().out
    assert out.endswith("missing: 0\nfailed: 0\n"), out
    assert code == 0


def run_part(part, jobs, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "NANOTE_ENGINE"}
    command = [
        sys.executable, str(ROOT / "bench/pairs.py"), "--part", part, "--jobs", str(jobs),
        "--folder", str(tmp_path / "pairs"), "--json", str(tmp_path / "pairs.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_every_pair_trains_on_a_gpu(tmp_path):
    run_part("gpu", 8, tmp_path)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_every_pair_trains_on_two_gpus(tmp_path):
    run_part("gpus", 4, tmp_path)


# ---------------------------------------------------------------- counting

@pytest.mark.parametrize("stack", pair_rows.STACKS)
def test_the_rows_have_every_pair_that_is_not_refused(stack):
    choices = pair_rows.covering_choices(stack)
    assert all(pair_rows.is_allowed(choice) for choice in choices)
    assert len(choices) < 45
    assert not pairs.count_pairs(stack, choices).missing
    found = set()
    for choice in choices:
        new = pair_rows.pairs_of(choice) - found
        assert new, "each row has a pair that those before it lack"
        found |= new

    slow = [choice for choice in choices if choice["compile"] and choice["layout"] != "one process"]
    assert len(slow) <= 1
    sharded = dict(layout="fsdp", fp8_recipe="none", bias=True)
    assert any(sharded.items() <= choice.items() for choice in choices)


def test_the_page_is_that_of_the_code():
    page = pair_refusals.page(pair_rows.OPTIONS)
    assert pairs.PAGE.read_text() == page, "python bench/pairs.py --page writes it"


def test_the_rows_of_a_part_are_read_by_the_others(tmp_path):
    path = tmp_path / "pairs.json"
    for part in ("gpu", "gpus"):
        choices = [row.choice for row in pair_rows.rows_of(part) if row.stack == "model_te_fast"]
        pairs.write_part(path, part, {"model_te_fast": choices, "te": []}, 0, [])

    parts = pairs.read_parts(path)
    assert {"gpu", "driver", "torch", "te", "date", "command"} <= parts["gpu"].keys()
    found = []
    for report in parts.values():
        found += pairs.choices_in(report, "model_te_fast")
    count = pairs.count_pairs("model_te_fast", found)
    assert not count.missing
    text, _ = pairs.summarize("gpu", {}, parts)
    assert f"| model_te_fast | {count.trained} " in text


# ---------------------------------------------------------------- what is noticed

@pytest.fixture(scope="module")
def row():
    """A row of two steps, in FP8 without dropout."""
    row = pair_rows.interpreted_rows()[0]
    assert row.choice["fp8_recipe"] == "delayed" and row.choice["dropout"] == 0
    return row


METRICS = [
    dict(step=1, loss=5.0, grad_norm=2.0, val_loss=5.0),
    dict(step=2, loss=5.0, grad_norm=2.0, val_loss=5.0)]
RESULT = {"metrics": METRICS, "resumed": METRICS}
PLAIN = {"metrics": METRICS}


@pytest.mark.parametrize("kind, step, name, value, words", [
    ("metrics", 2, "loss", 5.04, "step 2: loss 5.04, the plain row's 5.0"),
    ("metrics", 1, "grad_norm", 2.6, "step 1: grad_norm 2.6, the plain row's 2.0"),
    ("metrics", 1, "loss", float("nan"), "step 1: loss nan"),
    ("resumed", 2, "val_loss", 5.1, "step 2: val_loss 5.0, and 5.1 after a resume")])
def test_a_wrong_number_of_a_row_is_noticed(row, kind, step, name, value, words):
    assert pairs.problems_of(row, RESULT, PLAIN) == []
    result = copy.deepcopy(RESULT)
    result[kind] = copy.deepcopy(METRICS)
    result[kind][step - 1][name] = value
    problems = pairs.problems_of(row, result, PLAIN)
    assert any(problem.startswith(words) for problem in problems)


def test_a_row_that_fails_or_ends_early_is_noticed(row):
    failed = {"error": "CUDA error", "log": "log.txt"}
    assert pairs.problems_of(row, failed, PLAIN) == ["CUDA error; its log: log.txt"]
    assert pairs.problems_of(row, RESULT, failed) == ["the plain row: CUDA error; its log: log.txt"]
    short = RESULT | {"resumed": METRICS[:1]}
    assert pairs.problems_of(row, short, PLAIN) == ["metrics.jsonl lacks step 2"]


def test_a_pair_that_trains_is_not_refused(tmp_path):
    corpora = str(tmp_path)
    pair_rows.make_corpora(corpora)
    trains = {"bias": True, "dropout": 0.1}
    assert pair_refusals.what_is_wrong(trains, corpora).startswith("code 0, and must be 2")
    refused = {"cuda_graph": "on", "compile": True}
    assert pair_refusals.what_is_wrong(refused, corpora) == ""
