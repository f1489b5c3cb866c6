"""Time functions on a GPU between CUDA events, and in turns; on a CPU by the clock of the host."""

import random
import statistics
import time

import torch

TURNS = 4  # in which the timed steps of an arm and of its baseline alternate


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
        return [1e3 * (b - a) for a, b in zip(stamps, stamps[1:])]
    stamps[-1].synchronize()
    return [a.elapsed_time(b) for a, b in zip(stamps, stamps[1:])]


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
    for turn in range(TURNS):
        count = len(range(turn, steps, TURNS))  # the turns differ by one step at most
        for name, function in functions.items() if count else ():
            times[name] += timed([function] * (count + 1), device)[1:]
    return times


def interval_of_median(values, seed=0) -> list[float]:
    """Return the 95 % interval [low, high] of the median: percentile bootstrap with 2,000 resamples."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return [medians[50], medians[1949]]
