"""Where the time of a step goes: traces for --profile START:STOP, and the FLOPs of a model and of a GPU.

A trace has the kernels of CUDA graphs, too; launches from Python are missing, since a replay has none. The
device is synchronized before and after its steps, so it holds them completely, and no others.
"""
import contextlib
import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanote import parallel

# Dense BF16 peak in TFLOP/s by a part of the GPU's name, longer names first (NVIDIA's data sheets)
PEAK_TFLOPS = {"GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
               "A100": 312, "L40S": 362, "L4": 121, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165}


def flops_per_token(model_config, parameters: int, seq_len: int) -> float:
    """Return 6N + 12·L·C·T, the FLOPs per token of forward and backward (PaLM, arXiv:2204.02311, appendix B).

    N: parameters used in GEMMs, so without the position table and, if untied, without the token embedding. L
    layers, C = heads times head dimension, T = seq_len. Recomputed activations are not counted.
    """
    if not getattr(model_config, "use_rotary", False):
        parameters -= model_config.n_positions * model_config.n_embd
    if not model_config.tie_embeddings:
        parameters -= model_config.vocab_size * model_config.n_embd
    head_dim = getattr(model_config, "head_dim", None) or model_config.n_embd // model_config.n_head
    return 6 * parameters + 12 * model_config.n_layer * model_config.n_head * head_dim * seq_len


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense BF16 peak in FLOP/s; None if unknown. FP8 can exceed 100 % of it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((1e12 * tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)


class Profiler:
    """Write a trace and a table of the steps of --profile. Without the option it does nothing."""

    def __init__(self, steps: str | None, folder, device: torch.device):
        """`steps`: START:STOP, or one number; both are included, and the first step is 1."""
        self.steps, self.folder, self.device, self.profiler = steps or "", folder, device, None
        found = re.fullmatch(r"(\d+)(?::(\d+))?", self.steps)
        self.first, self.last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if steps and not 1 <= self.first <= self.last:
            raise ValueError(f"--profile {steps}: must be START:STOP, such as 10:12; the first step is 1")
        self.is_enabled = bool(steps) and parallel.rank() == 0

    @contextlib.contextmanager
    def step(self, step: int):
        """Profile the step inside, if it is one of those."""
        if not (self.is_enabled and self.first <= step <= self.last):
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
            self.close()

    def close(self) -> None:
        """Write the steps so far."""
        if self.profiler is None:
            return
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
