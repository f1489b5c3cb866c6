"""bench/convergence.py: the summary of runs, on figures made by hand, and a study of two steps."""

import json
import math
from pathlib import Path

import pytest
import torch

from bench import convergence

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="trains on a CPU")
RESULTS = Path(convergence.ROOT, "results")


def run_of(arm, seed, loss, seconds=100.0, tokens=1000) -> list[dict]:
    """Return the records of a run with one evaluation before its last."""
    common = {"arm": arm, "seed": seed, "run_tokens": tokens, "machine": "GPU"}
    half = {"tokens": tokens // 2, "step": 1, "val_loss": 9.0, "seconds": seconds / 2}
    end = {"tokens": tokens, "step": 2, "val_loss": loss, "seconds": seconds}
    return [common | half, common | end]


def summary_of(*runs) -> dict:
    """Return {arm: its row of the summary at 1,000 tokens}."""
    records = [record for run in runs for record in run]
    rows = convergence.summarize(records)
    return {row["arm"]: row for row in rows if row["tokens"] == 1000}


def test_gaps_are_paired_by_seed_and_have_an_interval():
    rows = summary_of(
        run_of("bf16@1", 1, 2.0), run_of("bf16@1", 2, 4.0), run_of("bf16@1", 3, 1.0),
        run_of("fp8@1", 1, 2.02), run_of("fp8@1", 2, 4.12))  # 1 % and 3 % above BF16
    row = rows["fp8@1"]
    assert row["seeds"] == 2
    assert row["mean"] == pytest.approx(3.07)
    assert row["gap_percent"] == pytest.approx(2.0)
    deviation = math.sqrt(2)
    half = 12.706 * deviation / math.sqrt(2)  # t of one degree of freedom, times the standard error
    assert row["gap_interval"] == pytest.approx([2 - half, 2 + half])
    assert rows["bf16@1"]["gap_percent"] == 0


def test_an_arm_without_a_baseline_has_no_gap():
    assert summary_of(run_of("fp8@1", 1, 2.0))["fp8@1"]["gap_percent"] is None


def test_speed_at_equal_loss_is_interpolated_between_lengths():
    """FP8 is 0.1 behind, and 0.2 better with twice the tokens: it needs √2 times as long."""
    rows = summary_of(
        run_of("bf16@1", 1, 2.0, seconds=300.0), run_of("fp8@1", 1, 2.1, seconds=100.0),
        run_of("fp8@1", 1, 1.9, seconds=200.0, tokens=2000))
    assert rows["fp8@1"]["seconds_to_bf16_loss"] == pytest.approx(100 * math.sqrt(2))
    assert rows["fp8@1"]["loss_matched_speedup"] == pytest.approx(3 / math.sqrt(2))


def test_a_loss_beyond_both_lengths_is_not_matched():
    rows = summary_of(
        run_of("bf16@1", 1, 1.0), run_of("fp8@1", 1, 2.1), run_of("fp8@1", 1, 1.9, tokens=2000))
    assert rows["fp8@1"]["loss_matched_speedup"] is None


@pytest.mark.parametrize("path", sorted(RESULTS.glob("convergence*.json")), ids=lambda path: path.stem)
def test_stored_summaries_follow_from_the_stored_runs(path):
    result = json.loads(path.read_text())
    assert convergence.summarize(result["runs"]) == result["summary"]
    assert convergence.main_table(result).count("\n") == 1 + len(result["summary"])


SMALL = (
    "--n-layer 1 --n-head 2 --n-embd 64 --seq-len 64 --micro-batch-size 2 --grad-accum 1 --eval-tokens 256 "
    "--warmup-steps 1")


def test_a_study_trains_and_continues(tmp_path, tokens, capsys):
    path = tmp_path / "study.json"
    arguments = [
        "--arms", "bf16@1e-3", "--seeds", "1", "--tokens", "2e5", "--evaluations", "1",
        "--data", str(tokens), "--out-dir", str(tmp_path / "runs"), "--json", str(path)]
    for _ in range(2):  # the second time the run is complete
        convergence.main([*arguments, f"--more={SMALL}"])
    document = json.loads(path.read_text())
    assert document["runs"][-1]["step"] == 2
    assert len(document["summary"]) == 1
    assert "| `bf16@1e-3` |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="name another file"):
        convergence.main([*arguments, f"--more={SMALL} --seed 3"])
