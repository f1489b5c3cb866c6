"""The learning rate of each step: linear warm-up, then cosine, wsd (warm-up, stable, decay) or constant."""
import math


def learning_rate(step: int, config) -> float:
    """Return the learning rate of a step, counted from 1: the lower of linear warm-up and schedule.

    Both decays end at a tenth of the peak; wsd begins its own in the last fifth of the steps.
    """
    decay = 1.0  # falls to 0 in the end
    if config.lr_schedule == "cosine" and step > config.warmup_steps:
        progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        decay = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.lr_schedule == "wsd":
        decay = min(1.0, (config.max_steps - step) / (0.2 * config.max_steps))
    rate = config.lr * (0.1 + 0.9 * decay)
    warmup_rate = config.lr * step / max(1, config.warmup_steps)
    return min(rate, warmup_rate)


def describe_long_warmup(config) -> str:
    """Return a line about a warm-up that lasts the whole run."""
    highest = max(learning_rate(step, config) for step in range(1, config.max_steps + 1))
    return (f"--warmup-steps {config.warmup_steps}: all of --max-steps {config.max_steps} is warm-up; the "
            f"learning rate reaches {highest:.1e} of --lr {config.lr:.1e}; pass a shorter one, such as "
            f"--warmup-steps {config.max_steps // 10}")
