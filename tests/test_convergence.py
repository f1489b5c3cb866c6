"""bench/convergence.py: the summary of runs, on figures made by hand."""
import pytest

from bench.convergence import summarize


def run(arm, seed, tokens, loss, seconds):
    return [{"arm": arm, "seed": seed, "run_tokens": tokens, "tokens": share * tokens // 2, "step": share,
             "val_loss": loss + 2 - share, "seconds": share * seconds / 2} for share in (1, 2)]


def test_summary():
    runs = [*run("bf16@1e-3", 1, 100, 2.0, 160.0), *run("bf16@1e-3", 2, 100, 2.2, 160.0),
            *run("fp8@1e-3", 1, 100, 2.2, 100.0), *run("fp8@1e-3", 2, 100, 2.2, 100.0),
            *run("fp8@1e-3", 1, 144, 2.0, 144.0), *run("fp8-e4m3@1e-3", 1, 100, 2.5, 100.0)]
    rows = {(row["arm"], row["tokens"]): row for row in summarize(runs)}
    fp8 = rows["fp8@1e-3", 100]
    assert fp8["seeds"] == 2 and fp8["mean"] == pytest.approx(2.2) and fp8["standard_error"] == 0
    assert fp8["gap_percent"] == pytest.approx(5) and fp8["gap_standard_error"] == pytest.approx(5)
    # BF16's mean of 2.1 lies half way between the runs of 100 and 144 tokens: geometric mean of seconds
    assert fp8["seconds_to_bf16_loss"] == pytest.approx(120)
    assert fp8["loss_matched_speedup"] == pytest.approx(160 / 120)
    assert rows["bf16@1e-3", 100]["loss_matched_speedup"] == 1
    assert rows["fp8-e4m3@1e-3", 100]["loss_matched_speedup"] is None, "no run of it ends at that loss"
