"""bench/saves.py: the cost of checkpoints, from records made by hand."""
import pytest

from bench.saves import LOG, SAVE, TIMES, cost_of


@pytest.mark.parametrize("copying, writing, slower, cost", [
    (0.3, 50, 1.0, 2.5),  # seconds, steps, times: training waits for the copy alone
    (0.0, SAVE, 1.1, 10.0),  # the writing lasts until the next checkpoint, and slows every step
])
def test_cost(copying, writing, slower, cost):
    seconds, records = 0.0, []
    for step in range(LOG, (1 + TIMES) * SAVE + 1, LOG):
        is_written = step > SAVE and (step - LOG) % SAVE < writing
        in_steps = 0.06 * LOG * (slower if is_written else 1)
        seconds += in_steps + (copying if step % SAVE == 0 else 0)
        records.append({"step": step, "seconds": seconds, "tokens_per_s": 1000 * LOG / in_steps})
    found = cost_of(records, tokens=1000)
    assert found["cost_percent"] == pytest.approx(cost)
    assert found["step_ms"] == pytest.approx(60)
    assert found["seconds_waited"] == pytest.approx([copying] * TIMES)
