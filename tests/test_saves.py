"""bench/saves.py: the cost of checkpoints, from records made by hand."""
import pytest

from bench import saves
from bench.saves import LOG, SAVE, TIMES, cost_of
from nanote import cli


@pytest.mark.parametrize("drift", [0.0, 0.05])  # from the first step to the last
@pytest.mark.parametrize("copying, writing, slower, cost", [
    (0.3, 50, 1.0, 2.5),  # seconds, steps, times: training waits for the copy alone
    (0.0, SAVE, 1.1, 10.0),  # the writing slows 200 steps
])
def test_cost(copying, writing, slower, cost, drift):
    seconds, records = 0.06, [{"step": 1, "seconds": 0.06, "tokens_per_s": 1000 / 0.06}]
    last = 2 * (1 + TIMES) * SAVE
    for step in range(LOG, last + 1, LOG):
        is_written = step >= 2 * SAVE and step % (2 * SAVE) < writing
        in_steps = 0.06 * LOG * (1 + drift * step / last) * (slower if is_written else 1)
        seconds += in_steps + (copying if step % (2 * SAVE) == 0 else 0)
        records.append({"step": step, "seconds": seconds, "tokens_per_s": 1000 * LOG / in_steps})
    found = cost_of(records, tokens=1000)
    assert found["cost_percent"] == pytest.approx(cost, rel=0.05)
    assert found["step_ms"] == pytest.approx(60 * (1 + drift / 2), rel=0.01)
    assert found["seconds_waited"] == pytest.approx([copying] * TIMES)
    assert found["interval_ms"][0] == pytest.approx(60 * (1 + drift / 40), rel=0.01)
    of_save = found["interval_ms"][2 * SAVE // LOG - 2]
    assert of_save == pytest.approx((60 * slower + copying * 100) * (1 + drift / 4), rel=0.02)


@pytest.mark.parametrize("arguments, message", [
    (["--more=--max-steps 20"], "--more: this script sets --max-steps itself; leave it out"),
    (["--more=--preset tiny --log_interval=5"], "this script sets --log_interval=5 itself"),
    (["--more=--max-step 20"], "--max-step"), (["--layouts", "dp"], "--parallel"),
    (["--gpus", "0"], "--gpus 0: must be at least 1, such as 2")])
def test_bad_options_are_refused_before_training(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(saves, "train", lambda *_: pytest.fail("it trains"))
    argv = ["--json", str(tmp_path / "saves.json"), *arguments]
    assert cli.run(lambda: saves.main(argv), "bench/saves.py") == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("bench/saves.py: ") and message in line and not list(tmp_path.iterdir())
