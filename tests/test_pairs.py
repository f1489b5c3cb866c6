"""bench/pairs.py: every two options of train.py that do not exclude each other train together."""
import copy
import os
import subprocess
import sys

import pytest
import torch

from bench import pair_rows, pairs
from trainer_tools import ROOT

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="te_reference's part runs without a GPU")


@on_a_cpu
def test_every_pair_trains_on_te_reference(tmp_path, capfd):
    """And three rows of model_te_fast in Triton's interpreter. Each refused pair is one line. These rows and
    those of GPUs in results/pairs.json have every pair."""
    code = pairs.main(["--folder", str(tmp_path / "pairs")])
    out = capfd.readouterr().out
    assert code == 0 and out.endswith("missing: 0\nfailed: 0\n"), out


def run_part(part, jobs, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "NANOTE_ENGINE"}
    command = [sys.executable, str(ROOT / "bench/pairs.py"), "--part", part, "--jobs", str(jobs),
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
    rules = pair_rows.Rules()
    rows = pair_rows.covering_array(stack, rules)
    assert all(map(rules.allows, rows))
    assert not pairs.count(stack, rules, rows).missing
    slow = [row for row in rows if row["compile"] and row["layout"] != "one process"]
    assert len(slow) <= 1 and len(rows) < 45
    assert pairs.count(stack, rules, rows[1:]).missing  # no row is without use
    for options in pair_rows.MORE_THAN_PAIRS:
        assert any(options.items() <= row.items() for row in rows)


def test_a_pair_that_needs_another_card_is_counted_apart():
    found = pairs.count("te", pair_rows.Rules(), [])
    assert not found.trained and found.refused > 0
    assert all(pairs.needs_other_card(pair) for pair in found.other_card)
    assert not any(pairs.needs_other_card(pair) for pair in found.missing)


def test_the_page_is_that_of_the_code():
    assert pairs.PAGE.read_text() == pairs.page(), "python bench/pairs.py --page writes it"


# ---------------------------------------------------------------- what is noticed

ROW = pair_rows.rows_of("cpu")[-1][1] | dict(dropout=0.0, fp8_recipe="delayed")
METRICS = [dict(step=step, loss=5.0, grad_norm=2.0, val_loss=5.0) for step in (1, 2)]


@pytest.mark.parametrize("kind, step, name, value, words", [
    ("metrics", 2, "loss", 5.04, "step 2: loss 5.04, the plain row's 5.0"),
    ("metrics", 1, "grad_norm", 2.6, "step 1: grad_norm 2.6, the plain row's 2.0"),
    ("metrics", 1, "loss", float("nan"), "step 1: loss nan"),
    ("resumed", 2, "val_loss", 5.1, "step 2: val_loss 5.0, and 5.1 after a resume")])
def test_a_wrong_number_of_a_row_is_noticed(kind, step, name, value, words):
    found = {"metrics": copy.deepcopy(METRICS), "resumed": copy.deepcopy(METRICS)}
    assert pairs.problems(ROW, 2, found, {"metrics": METRICS}) == []
    found[kind][step - 1][name] = value
    assert any(line.startswith(words) for line in pairs.problems(ROW, 2, found, {"metrics": METRICS}))


def test_a_row_that_fails_or_ends_early_is_noticed():
    plain, whole = {"metrics": METRICS}, {"metrics": METRICS, "resumed": METRICS}
    assert pairs.problems(ROW, 2, {"error": "CUDA error", "log": "log.txt"}, plain) == [
        "CUDA error; its log: log.txt"]
    assert pairs.problems(ROW, 2, whole | {"resumed": METRICS[:1]}, plain) == ["metrics.jsonl lacks step 2"]


def test_a_pair_that_trains_is_not_refused(tmp_path):
    folder = str(tmp_path)
    pair_rows.make_corpora(folder)
    trains = pair_rows.Refused((("bias", True), ("dropout", 0.1)), "")
    assert pairs.try_refused(trains, folder).startswith("code 0, and must be 2")
    both = pair_rows.Refused((("cuda_graph", "on"), ("compile", True)), "")
    assert pairs.try_refused(both, folder) == ""


def test_the_rows_of_a_part_are_read_by_the_others(tmp_path):
    path, rules = tmp_path / "pairs.json", pair_rows.Rules()
    rows = pair_rows.covering_array("model_te_fast", rules)
    for part in ("gpu", "gpus"):
        some = [row for row in rows if pair_rows.part_of(row) == part]
        pairs.write_part(path, part, {"model_te_fast": some, "te": []}, 0, [])
    parts = pairs.read_parts(path)
    assert {"gpu", "driver", "torch", "te", "date", "command"} <= parts["gpu"].keys()
    read = [row for report in parts.values() for row in pairs.rows_in(report, "model_te_fast")]
    found = pairs.count("model_te_fast", rules, read)
    assert not found.missing
    assert f"| model_te_fast | {len(found.trained)} " in pairs.summary("gpu", {}, parts)[0]
