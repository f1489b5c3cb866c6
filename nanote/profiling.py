"""Profile steps of a run (--profile) by PyTorch: a trace for ui.perfetto.dev and a table of kernels."""
import contextlib
import re
from pathlib import Path

import torch

from nanote import parallel


def check_steps(steps: str | None) -> None:
    """Raise ValueError for a --profile that is neither START:STOP nor a step."""
    if steps:
        parse_steps(steps)


def parse_steps(steps: str) -> tuple[int, int]:
    """Return the first and the last step of START:STOP. A single step is both."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", steps)
    if found:
        first_step = int(found[1])
        last_step = int(found[2] or found[1])
        if 1 <= first_step <= last_step:
            return first_step, last_step
    raise ValueError(f"--profile {steps}: must be START:STOP, such as 10:12; the first step is 1")


class Profiler(contextlib.ExitStack):
    """`with Profiler(...) as profiler:` and `with profiler.step(step):` trace the steps START:STOP, on rank
    0. The device is synchronized before and after them, so the trace holds them completely, and no others."""

    def __init__(self, steps: str | None, folder, device: torch.device):
        """steps: START:STOP, or None to trace no step."""
        super().__init__()
        self.steps = steps
        self.traced_steps = range(0)
        if steps and parallel.rank() == 0:
            first_step, last_step = parse_steps(steps)
            self.traced_steps = range(first_step, last_step + 1)
        self.path = Path(folder, "profile")
        self.device = device
        self.is_running = False

    def step(self, step: int):
        """Return a context manager for a step, which traces it if it is one of START:STOP."""
        return self._trace(step) if step in self.traced_steps else contextlib.nullcontext()

    @contextlib.contextmanager
    def _trace(self, step: int):
        if not self.is_running:
            torch.get_device_module(self.device).synchronize()
            self.enter_context(torch.profiler.profile(on_trace_ready=self._write))
            self.is_running = True
        with torch.profiler.record_function(f"step {step}"):
            yield
        if step == self.traced_steps[-1]:
            self.close()  # ends the trace, and synchronizes; __exit__ does if the run ends before

    def _write(self, profile) -> None:
        order = f"self_{self.device.type}_time_total"
        try:
            self.path.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(self.path / "trace.json.gz"))
            table = profile.key_averages().table(sort_by=order, row_limit=50, max_name_column_width=80)
            (self.path / "table.txt").write_text(table)
            print(f"--profile {self.steps}: {self.path} has a table, and a trace for ui.perfetto.dev")
        except (OSError, RuntimeError) as problem:  # must not hide why a run failed
            print(f"--profile {self.steps}: {problem}; training continues")
