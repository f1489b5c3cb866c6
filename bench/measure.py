"""Measure one arm: check what it computes, then time its training step in turns with the baseline's.

`measure_arm` raises what the arm raises; `attempt` makes it a row with an error, so that a study goes on with
the next arm. A training is called with micro-batches and a learning rate, trains one step and returns loss
and gradient norm. Times are those between CUDA events; on a CPU, of the host's clock.
"""

import dataclasses
import math
import random
import statistics
import time
import traceback
from dataclasses import dataclass
from functools import partial

import torch

from bench.plain_gpt import ARMS as PLAIN_ARMS
from bench.plain_gpt import make_plain
from bench.step import Training, arm_config, free, make_batches
from nanote import recipes
from nanote.command import error_line
from nanote.meter import flops_per_token, peak_flops
from nanote.models import make_model_config

TURNS = 5  # in which the timed steps of an arm and of its baseline alternate
RESAMPLES = 2000  # of the bootstrap
WARMUP = 10  # steps before anything is timed
LR = 1e-5  # so small that the weights hardly change while steps are timed
CHECKED_LR = 2.0**-13  # BF16 weights below 2^-5 take such a step exactly
CLOSE = 0.2  # relative difference of the gradient norms of two arms; tiny models scatter by 0.1


def stamp(device):
    """Return a point in time: on a GPU, an event in the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def spans_ms(stamps) -> list[float]:
    """Return ms between each stamp and the next."""
    if isinstance(stamps[0], float):
        return [1e3 * (end - start) for start, end in zip(stamps, stamps[1:])]
    stamps[-1].synchronize()
    return [start.elapsed_time(end) for start, end in zip(stamps, stamps[1:])]


def timed(functions, device) -> list[float]:
    """Return ms of each of `functions`, called one after the other without waiting for the GPU."""
    stamps = [stamp(device)]
    for function in functions:
        function()
        stamps.append(stamp(device))
    return spans_ms(stamps)


def in_turns(functions: dict, steps: int, device) -> dict:
    """Return {name: ms of `steps` calls}: TURNS turns of each function, so that all see the same clock and
    temperature of the GPU. The first call of a turn follows another function's, and is not counted."""
    times = {name: [] for name in functions}
    for turn in range(min(steps, TURNS)):
        count = math.ceil((steps - turn) / TURNS)  # the turns differ by one step at most
        for name, function in functions.items():
            times[name] += timed([function] * (count + 1), device)[1:]
    return times


def interval_of_median(values, seed=0) -> list[float]:
    """Return the 95 % interval [low, high] of the median: percentile bootstrap."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = RESAMPLES * 25 // 1000  # 2.5 % of the resamples are lower, 2.5 % higher
    return [medians[outside], medians[-outside - 1]]


@dataclass
class Timing:
    """How the arms of a study are timed."""

    device: torch.device
    steps: int  # Steps to time, of each arm.
    warmup: int | None = None  # Steps before them; None: WARMUP, and 1 on a CPU.
    phases: int = 5  # Passes of phases_ms; 0 skips it.
    ratio: str = "ratio_to_plain"  # Field of a row that gets the speed over that of the baseline.


class Agreement:
    """Checks what an arm computes before it is timed, and compares it with the first arm of its shape.

    At initialization the loss on random tokens is about ln V + 0.02²·C/2, all arms have about the same
    gradient norm, and the first steps lower the loss. So a gradient that is zero, scaled or not seen by the
    optimizer is refused.
    """

    def __init__(self, lr=CHECKED_LR):
        self.lr = lr  # of the first steps
        self.references = {}  # {micro-batches per step: (first arm, its gradient norm)}

    def verify(self, arm, training, batches) -> dict:
        """Return loss, grad_norm and loss_fall for the row of an arm; RuntimeError if one is wrong."""
        config = training.config
        loss, norm = training(batches, 0.0)
        loss = loss.item()
        norm = norm.item()
        expected_loss = math.log(config.vocab_size) + 0.02**2 * config.n_embd / 2
        if not abs(loss - expected_loss) < 0.3:  # NaN is refused, too
            raise RuntimeError(
                f"numerics: a loss of {loss:.3f} at initialization, not about {expected_loss:.3f}")
        if config.grad_accum not in self.references:
            self.references[config.grad_accum] = (arm, norm)
        reference_arm, expected_norm = self.references[config.grad_accum]
        if not (norm > 0 and abs(norm / expected_norm - 1) < CLOSE):
            raise RuntimeError(
                f"numerics: a gradient norm of {norm:.5g}, and {expected_norm:.5g} in {reference_arm}")
        for _ in range(4):  # the fourth step returns the loss after three updates
            later_loss, _ = training(batches, self.lr)
        later_loss = later_loss.item()
        if not later_loss < loss:
            raise RuntimeError(f"numerics: the loss is {later_loss:.5g} after three steps, from {loss:.5g}")
        return {"loss": loss, "grad_norm": norm, "loss_fall": loss - later_loss}


def phases_ms(training, batch, device, passes) -> dict:
    """Time forward, backward and update on one micro-batch, launched from Python: medians of `passes`."""
    spans = []
    for _ in range(2 + passes):
        training.model.zero_grad(set_to_none=True)
        start = stamp(device)
        loss = training.forward(*batch)
        after_forward = stamp(device)
        loss.backward()
        after_backward = stamp(device)
        training.update()
        spans.append(spans_ms([start, after_forward, after_backward, stamp(device)]))
    training.model.zero_grad(set_to_none=True)
    forward, backward, optimizer = zip(*spans[2:])
    return {
        "forward_ms": statistics.median(forward), "backward_ms": statistics.median(backward),
        "optimizer_ms": statistics.median(optimizer)}


def warm_up(training, batches, timing) -> None:
    """Run the steps that are not timed."""
    warmup = timing.warmup
    if warmup is None:
        warmup = WARMUP if timing.device.type == "cuda" else 1
    for _ in range(warmup):
        training(batches, LR)


def time_steps(training, batches, timing, baseline) -> dict:
    """Time steps, in turns with those of a baseline if there is one -> figures of speed.

    The speed over the baseline is the ratio of the median steps. Its interval is that of the median ratio of
    steps that took turns.
    """
    functions = {"arm": partial(training, batches, LR)}
    if baseline is not None:
        functions = {"baseline": partial(baseline, batches, LR)} | functions
    times = in_turns(functions, timing.steps, timing.device)
    ms = statistics.median(times["arm"])
    config = training.config
    tokens = config.micro_batch_size * config.seq_len * config.grad_accum
    figures = {
        "ms": ms, "slowest_ms": max(times["arm"]), "tokens_per_s": 1e3 * tokens / ms, timing.ratio: None}
    if baseline is not None:
        ratios = [before / after for before, after in zip(times["baseline"], times["arm"])]
        figures[timing.ratio] = statistics.median(times["baseline"]) / ms
        figures[f"{timing.ratio}_interval"] = interval_of_median(ratios)
    return figures


def model_config_of(config):
    """Return the config of model_te_optimized.py for train.py's options."""
    options = dataclasses.asdict(config) | {"use_fp8": config.fp8_recipe != "none"}
    return make_model_config("optimized", options)


def make_arm(arm, config, device, batches):
    """Make the training of an arm. config: its own."""
    if arm in PLAIN_ARMS:
        return make_plain(arm, model_config_of(config), config, device)
    return Training(config, device, batches)


def measure_arm(arm, config, timing, baseline=None, agreement=None):
    """Measure an arm of benchmark_te.py, as `measure` does. config: that of its shape."""
    return measure(arm, arm_config(arm, config), partial(make_arm, arm), timing, baseline, agreement)


def measure(arm, config, make, timing, baseline=None, agreement=None):
    """Measure one training -> (the figures of its row, the training).

    Args:
        make: returns it, from (config, device, batches).
        baseline: the training that takes turns with it.
        agreement: compares it with the shape's first one; None: with none.
    """
    device = timing.device
    batches = make_batches(config, device)
    free()
    occupied = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    training = make(config, device, batches)
    if agreement is None:
        agreement = Agreement()
    checked = agreement.verify(arm, training, batches)
    warm_up(training, batches, timing)
    peak_gib = None
    if device.type == "cuda":
        peak_gib = (torch.cuda.max_memory_allocated() - occupied) / 2**30
    figures = time_steps(training, batches, timing, baseline)
    if baseline is None and arm in ("plain", "nanogpt"):  # themselves the baselines
        figures[timing.ratio] = 1.0
    figures |= describe(training, config, figures["tokens_per_s"], device)
    figures |= {"arm": arm, "peak_gib": peak_gib, **checked}
    if timing.phases:
        try:
            figures |= phases_ms(training, batches[0], device, timing.phases)
        except torch.OutOfMemoryError:  # next to the memory of a CUDA graph
            training.model.zero_grad(set_to_none=True)
    return figures, training


def describe(training, config, tokens_per_s, device) -> dict:
    """Return what a row says of its training beside times: its model, its precision, its MFU."""
    model_config = model_config_of(config)
    parameters = sum(p.numel() for p in training.model.parameters())
    mfu = None
    if peak_flops(device):
        mfu = tokens_per_s * flops_per_token(model_config, parameters, config.seq_len) / peak_flops(device)
    return {
        "parameters": parameters, "mfu": mfu, "cuda_graph": training.is_graph,
        "kernels": getattr(training, "kernels", ""),
        "fp8_format": recipes.resolve_format(config.fp8_recipe, config.fp8_format) or None,
        "grad_accum": config.grad_accum, "model_config": dataclasses.asdict(model_config)}


def attempt(function, arm, *args, **kwargs):
    """Call measure_arm or measure; return a row with the error in one line, and no training, if it cannot
    run."""
    try:
        return function(arm, *args, **kwargs)
    except Exception as error:  # the other arms are still to be measured
        if not isinstance(error, (torch.OutOfMemoryError, ValueError)):
            traceback.print_exc()
        return {"arm": arm, "error": error_text(error)}, None


def error_text(error) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {error_line(error)}"
