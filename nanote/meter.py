"""What a run measures of its training steps: losses, gradient norms, skipped steps, speed and model FLOP
utilization (MFU).

    meter.add(step, loss, norm)         after every step
    record = meter.collect(step, lr)    every few steps: what metrics.jsonl has of them
    meter.restart_clock()               after it, when logging, evaluation and saving are done
"""
import math
import time

import torch

from nanote import checkpoint, parallel
from nanote.config import is_model_file

MAX_SKIPPED = 10  # steps of a process; one that skips more raises Diverged

# Dense BF16 peak in TFLOP/s by a part of the GPU's name, longer names first (NVIDIA's data sheets)
PEAK_TFLOPS = {"GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989,
               "A100": 312, "L40S": 362, "L4": 121, "RTX 6000 Ada": 364, "RTX 5090": 210, "RTX 4090": 165}


class Diverged(RuntimeError):
    """Raised to end a run: too many losses or gradient norms, or a validation loss, are not finite."""


class StepMeter:
    """The losses and gradient norms of steps, and the time that the steps take. Every rank has one."""

    def __init__(self, config, model, loader, skipped_before: list[int], say):
        """skipped_before: steps that the run skipped before it was resumed. say: a function that prints a
        line."""
        self.folder = config.out_dir
        self.max_steps = config.max_steps
        self.loader = loader
        self.say = say
        self.flops_per_token = None  # not known
        if loader.device.type == "cuda" and not is_model_file(config.model):
            parameters = sum(parameter.numel() for parameter in model.parameters())
            self.flops_per_token = flops_per_token(model.config, parameters, config.seq_len)
        self.pending = []  # (step, loss, gradient norm) of the steps since the last `collect`, on the device
        self.last_finite = None  # (loss, gradient norm) of the last step that was not skipped
        self.skipped = []  # steps
        self.skipped_before = list(skipped_before)
        self.without_labels = set()  # steps that changed nothing
        self.restart_clock()

    @property
    def all_skipped(self) -> list[int]:
        """The steps that the run has skipped, in this process and before."""
        return self.skipped_before + self.skipped

    def add(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Note a step. loss: this rank's share, (). norm: that of all gradients, (), equal on all ranks."""
        self.pending.append((step, loss, norm))

    def add_without_labels(self, step: int) -> None:
        """Note a step in which no token of any rank is a label, so that it changed nothing."""
        self.without_labels.add(step)
        self.say(f"step {step}: no token is a label: skipped")

    def collect(self, step: int, lr: float) -> dict | None:
        """Stop the clock, and return the line of metrics.jsonl about the steps since the last call. Say which
        of them were skipped, and raise Diverged after too many. Waits for the device. Collective.

        step: the last of these steps. The line has the loss and gradient norm of the last finite step; None
        for both if `step` had no label. Return None if `step` had labels and no step was finite yet.
        """
        values = self._pending_values()
        seconds = time.perf_counter() - self.clock_started
        self._note_skipped(step, values)
        tokens_per_s = self.loader.tokens_per_step * len(values) / seconds
        self.pending.clear()
        loss = None
        norm = None
        if step not in self.without_labels:
            if self.last_finite is None:
                return None
            loss, norm = self.last_finite
        return {"step": step, "loss": loss, "lr": lr, "grad_norm": norm, "skipped": len(self.skipped),
                "tokens_per_s": tokens_per_s, "mfu": self._mfu(tokens_per_s), "peak_gib": self._peak_gib()}

    def _note_skipped(self, step: int, values: list[tuple[int, float, float]]) -> None:
        """Note and say which steps were skipped: those whose loss or gradient norm is not finite.

        values: (step, loss, gradient norm) of the steps up to `step`.
        """
        reason = ""  # of the last skipped step
        for pending_step, loss, norm in values:
            if math.isfinite(loss) and math.isfinite(norm):
                self.last_finite = loss, norm
                continue
            self.skipped.append(pending_step)
            reason = f"step {pending_step}: loss {loss}, gradient norm {norm}"
            if len(self.skipped) > MAX_SKIPPED:
                raise self._diverged(reason)
            self.say(f"{reason}: skipped ({len(self.skipped)} of {MAX_SKIPPED})")
        is_last = step == self.max_steps
        if is_last and reason and self.last_finite is None:  # no step was ever finite
            raise self._diverged(reason)

    def _pending_values(self) -> list[tuple[int, float, float]]:
        """Return (step, loss, gradient norm) of the pending steps, over all ranks. Waits for the device."""
        if not self.pending:
            return []
        # Both are summed over ranks. A loss is this rank's share already; a norm is the same on every rank.
        count = self.loader.ranks.count
        shares = torch.stack([torch.stack((loss, norm / count)) for _, loss, norm in self.pending])
        values = parallel.sum_over_ranks(shares).tolist()
        return [(step, loss, norm) for (step, _, _), (loss, norm) in zip(self.pending, values)]

    def _diverged(self, reason: str) -> Diverged:
        """Return the error that ends the run, with the checkpoint to go back to."""
        good = checkpoint.last_good(self.folder, self.skipped[-1], self.all_skipped)
        before = len(self.skipped) - 1
        return Diverged(f"{reason}, after {before} skipped steps; last good checkpoint: {good}")

    def _mfu(self, tokens_per_s: float) -> float | None:
        """Return the model FLOP utilization. None: the FLOPs of the model or the GPU are not known, or no
        step since the last record had a label."""
        peak = peak_flops(self.loader.device)
        if not peak or not self.flops_per_token or tokens_per_s == 0:
            return None
        return tokens_per_s * self.flops_per_token / (peak * self.loader.ranks.count)

    def _peak_gib(self) -> float | None:
        """Return the largest amount of GPU memory so far, None on a CPU."""
        device = self.loader.device
        return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None

    def restart_clock(self) -> None:
        """Start the clock of training time, at first and after logging, evaluation and checkpoint."""
        self.clock_started = time.perf_counter()


def flops_per_token(model_config, parameters: int, seq_len: int) -> float:
    """Return 6N + 12·L·C·T, the FLOPs per token of forward and backward (PaLM, arXiv:2204.02311, appendix B).
    N: parameters used in GEMMs, so without the position table and, if untied, without the token embedding. L
    layers, C = heads times head dimension, T = seq_len."""
    if not getattr(model_config, "use_rotary", False):
        parameters -= model_config.n_positions * model_config.n_embd
    if not model_config.tie_embeddings:
        parameters -= model_config.vocab_size * model_config.n_embd
    head_dim = getattr(model_config, "head_dim", None) or model_config.n_embd // model_config.n_head
    return 6 * parameters + 12 * model_config.n_layer * model_config.n_head * head_dim * seq_len


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense BF16 peak in FLOP/s, or None if it is unknown. FP8 can exceed 100 % of it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, tflops in PEAK_TFLOPS.items():
        if part in name:
            return 1e12 * tflops
    return None
