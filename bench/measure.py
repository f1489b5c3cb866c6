"""Measure one arm: check what it computes, then time its training step in turns with the baseline's.

`measure` raises what the arm raises; `attempt` returns it as a row with an error, so that a study continues
with the next arm.
"""

import dataclasses
import statistics
import traceback

import torch

from bench import arms
from bench.agreement import Agreement, check_loss
from bench.plain_gpt import ARMS as PLAIN_ARMS
from bench.plain_gpt import PlainStep, build_plain
from bench.timing import power_and_clock, profile_ms
from nanote import cli, fp8
from nanote.metrics import flops_per_token, peak_flops
from nanote.profiling import spans_ms, stamp, timed

WARMUP = 10  # steps before anything is timed
LR = 1e-5  # so small that the weights hardly change while steps are timed
TURNS = 4  # in which the timed steps of an arm and of the baseline alternate


def agreement_of_llama(model_config, config, batch, device) -> Agreement:
    """Return an Agreement with a plain GPT without QK-norm, which Llama does not have."""
    agreement = Agreement()
    model_config = dataclasses.replace(model_config, use_qk_norm=False)
    reference = build_plain("plain-eager", model_config, config, device)
    agreement.verify("plain-eager without QK-norm", reference, batch, device)
    return agreement


def phases_ms(step, batches, device, passes=5) -> dict:
    """Time forward, backward and optimizer on one micro-batch, launched from Python: medians of `passes`."""
    forward = step.forward if isinstance(step, PlainStep) else step.net
    first = {"is_first_microbatch": True} if step.config.grad_accum > 1 else {}
    spans = []
    for _ in range(2 + passes):
        step.optimizer.zero_grad(set_to_none=True)
        stamps = [stamp(device)]
        loss = forward(*batches[0], **first)
        stamps.append(stamp(device))
        loss.backward()
        stamps.append(stamp(device))
        step.update()
        spans.append(spans_ms([*stamps, stamp(device)]))
    step.optimizer.zero_grad(set_to_none=True)
    columns = zip(("forward", "backward", "optimizer"), zip(*spans[2:]))
    return {f"{name}_ms": statistics.median(column) for name, column in columns}


def timed_in_turns(step, baseline_step, batches, steps, device) -> tuple[list, list]:
    """Return ms of `steps` steps of an arm and of the baseline, in TURNS turns.

    Both then see the same clock and temperature of the GPU. `baseline_step` None: the second list is empty.
    """
    times, baseline_times = [], []
    for turn in range(TURNS):
        count = len(range(turn, steps, TURNS))  # the turns differ by one step at most
        if baseline_step is not None:
            baseline_times += timed([lambda: baseline_step(batches, LR)] * count, device)
        times += timed([lambda: step(batches, LR)] * count, device)
    return times, baseline_times


def speed_figures(arm, parameters, config, times, baseline_times, device) -> dict:
    """Return a row's figures of speed from the times in ms of an arm's steps and of the baseline's."""
    ms = statistics.median(times)
    tokens_per_s = 1e3 * config.micro_batch_size * config.seq_len * config.grad_accum / ms
    limit = peak_flops(device)
    ratio = 1.0 if arm == "plain" else None
    if baseline_times:
        ratio = statistics.median(baseline_times) / ms
    return {
        "arm": arm,
        "ms": ms,
        "slowest_ms": max(times),
        "tokens_per_s": tokens_per_s,
        "ratio_to_plain": ratio,
        "mfu": tokens_per_s * flops_per_token(parameters, config) / limit if limit else None,
    }


def measure(
    arm, config, device, steps, baseline_step=None, agreement=None, profiled=False, warmup=None, phases=5
):
    """Measure one arm -> (the figures of its row, its step).

    Args:
        config: the TrainConfig of the shape; the arm's words change it.
        baseline_step: the step of the arm plain, or another baseline, timed in turns with this one.
        agreement: compares this arm with the shape's first one; None checks the loss alone.
        profiled: also sum the time of kernels by class, and read power and clock.
        warmup: steps that are not timed; None means WARMUP.
        phases: passes of phases_ms; 0 skips it.
    """
    config = arms.options_of(arm, config)
    model_config = arms.make_model_config(config)
    batches = arms.make_batches(config, device)
    if arm == "hf-llama" and agreement is not None:
        agreement = agreement_of_llama(model_config, config, batches[0], device)
    arms.free()
    gpu = device.type == "cuda"
    occupied = torch.cuda.memory_allocated() if gpu else 0
    if arm in PLAIN_ARMS:
        step = build_plain(arm, model_config, config, device)
    else:
        step = arms.build_te(config, device, batches[0])
    if agreement is None:
        checked = {"loss": step(batches, 0.0)[0].item()}
        check_loss(checked["loss"], config)
    else:
        checked = agreement.verify(arm, step, batches[0], device)
    for _ in range(WARMUP if warmup is None else warmup):
        step(batches, LR)
    peak = (torch.cuda.max_memory_allocated() - occupied) / 2**30 if gpu else None
    times, baseline_times = timed_in_turns(step, baseline_step, batches, steps, device)
    parameters = sum(p.numel() for p in step.model.parameters())
    figures = speed_figures(arm, parameters, config, times, baseline_times, device) | {
        "peak_gib": peak,
        "cuda_graph": getattr(step, "graphed", arm == "plain-graph"),
        "kernels": getattr(step, "kernels", ""),
        "parameters": parameters,
        "fp8_format": fp8.resolve_format(config.fp8_recipe, config.fp8_format) or None,
        "grad_accum": config.grad_accum,
        **checked,
        "model_config": dataclasses.asdict(model_config),
    }
    if profiled:
        figures["profile_ms"] = profile_ms(lambda: step(batches, LR), device)
        figures |= power_and_clock(lambda: step(batches, LR), device)
    if phases:
        try:
            figures |= phases_ms(step, batches, device, phases)
        except torch.OutOfMemoryError:
            # next to the memory of a CUDA graph there may be no room for a pass without one
            step.optimizer.zero_grad(set_to_none=True)
    return figures, step


def attempt(arm, *args, **kwargs):
    """Measure one arm; return a row with the error in one line, and no step, if it cannot run."""
    try:
        return measure(arm, *args, **kwargs)
    except Exception as error:  # the other arms are still to be measured
        if not isinstance(error, (torch.OutOfMemoryError, ValueError)):
            traceback.print_exc()
        return {"arm": arm, "error": cli.in_a_line(error)}, None
