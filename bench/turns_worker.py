"""A process of bench/turns.py: times the steps of a checkout, which may be older than this file.

    python bench/turns_worker.py CASE STEPS

It makes the steps of a case, warms up and prints their losses, {function: loss}. Then, for each line of
stdin, it prints the times of a turn, {function: ms of each step}.
"""
import sys

del sys.path[0]  # this file's folder; all imports are from PYTHONPATH, the checkout
import dataclasses
import inspect
import json

import torch

from bench.measure import timed
from nanote import parallel

WARMUP = 10  # steps


def make_loops(device, **sizes) -> dict:
    """Return the loops of README and of examples/minimal.py, as the checkout has them."""
    from bench import minimal
    torch.manual_seed(0)
    options = minimal.Options(**sizes)
    if "in_graphs" not in inspect.signature(minimal.make_loops).parameters:  # an older checkout makes both
        return minimal.make_loops(options, device)
    return minimal.make_loops(options, device, True) | minimal.make_loops(options, device, False)


def make_step(case: str, device):
    """Return the training step of ARM:SHAPE or LAYOUT:SHAPE."""
    from bench import step
    arm, shape = case.split(":")
    layout = "ddp"
    if arm in ("ddp", "fsdp"):
        layout = arm
        arm = "fp8"
    config = step.arm_config(arm, step.make_config(step.SHAPES[shape], device))
    config = dataclasses.replace(config, parallel=layout)
    batches = step.make_batches(config, device)
    make = getattr(step, "Training", None) or step.Step  # its name in older checkouts
    training = make(config, device, batches)
    return lambda: training(batches, 1e-5)[0]


def main(case: str, steps: int) -> None:
    # stdout carries JSON only; the checkout's own output goes to stderr
    answers = sys.stdout
    sys.stdout = sys.stderr
    parallel.start()
    device = torch.device("cuda", parallel.rank())
    torch.cuda.set_device(device)
    if case == "loops":
        functions = make_loops(device)
    elif case == "host":  # so few tokens that the GPU waits for Python
        functions = make_loops(device, batch=1, seq_len=128)
    else:
        functions = {case: make_step(case, device)}
    losses = {}
    for name, function in functions.items():
        for _ in range(WARMUP):
            loss = function()
        losses[name] = loss.flatten()[0].item()  # examples/minimal.py returns (loss, norm)
    print(json.dumps(losses), file=answers, flush=True)
    for _ in sys.stdin:
        times = {}
        for name, function in functions.items():
            times[name] = timed([function] * steps, device)[1:]  # the first follows another function's
        print(json.dumps(times), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
