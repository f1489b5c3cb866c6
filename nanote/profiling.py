"""Where the time of a step goes: traces for --profile START:STOP.

A trace has the kernels of CUDA graphs, too; launches from Python are missing, since a replay has none. The
device is synchronized before and after its steps, so it holds them completely, and no others.
"""
import contextlib
import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanote import parallel


class Profiler:
    """Write a trace and a table of some steps, on rank 0. As a context manager it gives the method `step`."""

    def __init__(self, steps: str, folder, device: torch.device):
        """`steps`: START:STOP, or one number; both are included, and the first step is 1."""
        self.steps, self.folder, self.device, self.profiler = steps, folder, device, None
        found = re.fullmatch(r"(\d+)(?::(\d+))?", steps)
        self.first, self.last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= self.first <= self.last:
            raise ValueError(f"--profile {steps}: must be START:STOP, such as 10:12; the first step is 1")

    def __enter__(self):
        return self.step

    @contextlib.contextmanager
    def step(self, step: int):
        """Profile the step inside, if it is one of those."""
        if parallel.rank() != 0 or not self.first <= step <= self.last:
            yield
            return
        if self.profiler is None:
            self._synchronize()
            on_gpu = [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self.profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self.profiler.start()
        with record_function(f"step {step}"):
            yield
        if step == self.last:
            self._write()

    def __exit__(self, *error):
        if self.profiler is not None:  # the run ended before the last of the steps
            self._write()

    def _write(self):
        self._synchronize()
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=50, max_name_column_width=80)
        folder = Path(self.folder, "profile")
        try:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / "trace.json.gz"))
            (folder / "table.txt").write_text(table)
        except (OSError, RuntimeError) as error:  # must not hide why a run failed
            print(f"--profile {self.steps}: {error}; training continues")
        else:
            print(f"--profile {self.steps}: {folder} has a table, and a trace for ui.perfetto.dev")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
