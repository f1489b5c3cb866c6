"""Statistics of pairs: from records of runs, which bench/paired.py trains, to its rows and tables.

A record is a dict: what was trained, on what, from where, and the loss of each step. A pair is the record of
an arm and that of the BF16 run with the same weights and batches. A row has the pairs of an arm that differ
in their seed alone. Of a seed with several pairs the last one counts.

Intervals are 95 % intervals of the mean over pairs, of the t distribution. All arms of a seed share one BF16
run, so that their differences are not independent: compare two arms by their losses, seed by seed.
"""
import math
import statistics
from typing import NamedTuple

import numpy as np

from bench.arms import ARMS, BASELINE, Arm
from bench.report import markdown

# Fields, besides the seed, that both runs of a pair share. Only records of fine-tuning have the last two.
PAIR_FIELDS = ("size", "train_sha256", "lr", "tokens", "start", "stop", "end", "base_sha256", "lora_rank")
SAME_ORIGIN = ("machine", "commit", "torch", "model")  # of both runs of a pair
SEGMENTS = 20  # of a run in `differences_over_run`
# 97.5 % quantile of Student's t, for 1, 2, … degrees of freedom; for more the last one, which is larger
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201,
         2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)


def summarize(runs: list[dict]) -> list[dict]:
    """Return a row per arm and PAIR_FIELDS: those with a pair or a diverged run."""
    return rows_of(groups_of(runs))


def is_finite(run: dict) -> bool:
    """Return whether the losses at the end of a run are finite."""
    return math.isfinite(training_loss(run)) and math.isfinite(run["val_loss"])


class Pair(NamedTuple):
    """The records of two runs from the same weights."""

    run: dict  # of an arm
    baseline: dict  # of BF16


class Group(NamedTuple):
    """The runs of a row: those of an arm that differ in their seed alone. There is one pair per seed; of
    `groups_over_corpora` one per seed and token files."""

    fields: dict  # "arm" and those of PAIR_FIELDS that the runs have
    pairs: list[Pair]
    diverged: list[dict]  # runs of the arm that are not finite at their end, while BF16's are


def groups_of(runs: list[dict]) -> list[Group]:
    """Return the runs of each row."""
    baselines = baselines_of(runs)
    found = {}  # {"arm" and PAIR_FIELDS with their values: {seed: pair}}
    for run in runs:
        baseline = baseline_of(run, baselines)
        if run["arm"] != BASELINE and not reason_against(run, baseline):
            fields = tuple((name, run[name]) for name in ("arm", *PAIR_FIELDS) if name in run)
            found.setdefault(fields, {})[run["seed"]] = Pair(run, baseline)
    groups = []
    for fields, pairs_of_seeds in found.items():
        pairs = [pair for pair in pairs_of_seeds.values() if is_finite(pair.run)]
        diverged = [pair.run for pair in pairs_of_seeds.values() if not is_finite(pair.run)]
        groups.append(Group(dict(fields), pairs, diverged))
    return groups


def groups_over_corpora(runs: list[dict]) -> list[Group]:
    """Return `groups_of(runs)`, in which those of several token files are one: for several draws of a corpus,
    such as the packages of several machines. Both runs of a pair read the same files."""
    merged = {}  # {fields of a group without its corpus: group}
    for group in groups_of(runs):
        fields = {name: value for name, value in group.fields.items() if name != "train_sha256"}
        of_all = merged.setdefault(tuple(fields.items()), Group(fields, [], []))
        of_all.pairs.extend(group.pairs)
        of_all.diverged.extend(group.diverged)
    return list(merged.values())


def baselines_of(runs: list[dict]) -> dict:
    """Return {pair_key(run): BF16's runs}."""
    baselines = {}
    for run in runs:
        if run["arm"] == BASELINE:
            baselines.setdefault(pair_key(run), []).append(run)
    return baselines


def baseline_of(run: dict, baselines: dict) -> dict | None:
    """Return BF16's run from the same weights, of the same origin if there is one; None without any."""
    candidates = baselines.get(pair_key(run), [])
    of_same_origin = [baseline for baseline in candidates if not other_origin(run, baseline)]
    if of_same_origin:
        return of_same_origin[-1]
    return candidates[-1] if candidates else None


def arm_of(run: dict) -> Arm:
    """Return the arm of a record or a row; of an arm that is gone one without options."""
    return ARMS.get(run["arm"], Arm())


def origin_of(run: dict) -> dict:
    """Return {name of SAME_ORIGIN: value}. Uncommitted changes do not count, since the JSON may be one."""
    return {name: run.get(name) for name in SAME_ORIGIN} | {"commit": without_dirty(run.get("commit"))}


def without_dirty(commit: str | None) -> str | None:
    return commit and commit.removesuffix("-dirty")


def other_origin(run: dict, baseline: dict) -> str:
    """Return which of SAME_ORIGIN differs from BF16's, "" if none does."""
    other = origin_of(baseline)
    for name, value in origin_of(run).items():
        is_by_design = name == "model" and arm_of(run).has_other_model
        if value != other[name] and not is_by_design:
            return name
    return ""


def reason_against(run: dict, baseline: dict | None) -> str:
    """Return why a run of an arm cannot be compared with BF16's, "" if it can."""
    if baseline is None:
        return "there is no BF16 run from the same weights"
    name = other_origin(run, baseline)
    if name:
        return f"its {name} is {run.get(name)}, that of BF16 is {baseline.get(name)}"
    start = round(run["start"] * run["steps"])
    if not same_losses(run["losses"][:start], baseline["losses"][:start]):
        return "BF16 has other losses before its start"
    if not is_finite(baseline):
        return "the loss of BF16 is not finite at its end"
    return ""


def same_losses(ours: list[float], theirs: list[float]) -> bool:
    """Return whether two runs have the same losses. NaN is equal to NaN."""
    return np.array_equal(ours, theirs, equal_nan=True)


def lines_about_left_out(runs: list[dict]) -> list[str]:
    """Return a line for each run of an arm that has no pair, with the reason."""
    baselines = baselines_of(runs)
    lines = []
    for run in runs:
        if run["arm"] == BASELINE:
            continue
        reason = reason_against(run, baseline_of(run, baselines))
        if not reason and not is_finite(run):
            reason = f"the loss of {run['arm']} is not finite at its end"
        if reason:
            lines.append(f"{describe_size(run)} seed {run['seed']} {run['arm']}, {run['tokens']:,} tokens "
                         f"from {run['start']:g} to {run['stop']:g}: left out, {reason}")
    return lines


def row_of(group: Group) -> dict:
    """Return the mean differences of an arm from BF16 over the seeds, in nats, with their 95 % intervals."""
    pairs = group.pairs
    runs = [pair.run for pair in pairs] + group.diverged
    training = [training_loss(run) - training_loss(baseline) for run, baseline in pairs]
    validation = [run["val_loss"] - baseline["val_loss"] for run, baseline in pairs]
    # of the same weights, evaluated in BF16
    without_fp8 = [run["val_loss_without_fp8"] - baseline["val_loss"] for run, baseline in pairs
                   if run.get("val_loss_without_fp8") is not None]
    baseline_loss = mean_of([training_loss(baseline) for _, baseline in pairs])
    return group.fields | {
        "seeds": len(pairs), "diverged_seeds": [run["seed"] for run in group.diverged],
        # whose gradient norm was not finite, of all these runs of the arm
        "skipped_steps": sum(run["skipped_steps"] for run in runs),
        "baseline_training_loss": baseline_loss,
        "baseline_validation_loss": mean_of([baseline["val_loss"] for _, baseline in pairs]),
        "training": mean_of(training), "training_interval": interval_of(training),
        "training_percent": 100 * mean_of(training) / baseline_loss if pairs else None,
        "validation": mean_of(validation), "validation_interval": interval_of(validation),
        "validation_without_fp8": mean_of(without_fp8),
        "validation_without_fp8_interval": interval_of(without_fp8),
        "speed": None if arm_of(group.fields).is_emulated else median_speed(pairs)}


def rows_of(groups: list[Group]) -> list[dict]:
    """Return the row of each group, with the speed to equal loss, which needs the other lengths."""
    rows = [row_of(group) for group in groups]
    for row, group in zip(rows, groups):
        others = [other.pairs for other in groups if is_other_length(other, group)]
        row |= speed_to_equal_loss(row, group.pairs, others)
    return rows


def mean_of(values: list[float]) -> float | None:
    """Return the mean, None without values."""
    return statistics.mean(values) if values else None


def differences_over_run(pairs: list[Pair]) -> list[tuple[float, list[float] | None]]:
    """Return (mean, 95 % interval) over the seeds of the arm's training loss minus BF16's, for each of
    SEGMENTS equal parts of the steps."""
    of_seeds = [differences_of_seed(pair) for pair in pairs]
    return [(statistics.mean(differences), interval_of(differences)) for differences in zip(*of_seeds)]


def differences_of_seed(pair: Pair) -> list[float]:
    """Return the mean of the arm's training loss minus BF16's in each segment."""
    differences = np.subtract(pair.run["losses"], pair.baseline["losses"])
    return [float(part.mean()) for part in np.array_split(differences, SEGMENTS)]


def is_whole_run(row: dict) -> bool:
    """Return whether the arm trains all steps."""
    return (row["start"], row["stop"]) == (0.0, 1.0)


def is_fine_tuning(row: dict) -> bool:
    """Return whether a row or a run began with the weights of a base."""
    return "base_sha256" in row


def describe_trained(row: dict) -> str:
    """Return what fine-tuning trains: "LoRA 16", or "full" for all weights."""
    return f"LoRA {row['lora_rank']}" if "lora_rank" in row else "full"


def interval_of(values: list[float]) -> list[float] | None:
    """Return the 95 % interval of the mean, of the t distribution; None for one value, or if one is not
    finite."""
    if len(values) < 2 or not all(math.isfinite(value) for value in values):
        return None
    degrees_of_freedom = min(len(values) - 1, len(T_975))
    standard_error = statistics.stdev(values) / math.sqrt(len(values))
    half = T_975[degrees_of_freedom - 1] * standard_error
    mean = statistics.mean(values)
    return [mean - half, mean + half]


def median_speed(pairs: list[Pair]) -> float | None:
    """Return BF16's time per step over the arm's, the median of the pairs; None if none was timed, because
    the parts were too short."""
    ratios = [baseline["ms"] / run["ms"] for run, baseline in pairs if baseline["ms"] and run["ms"]]
    return statistics.median(ratios) if ratios else None


def pair_key(run: dict) -> tuple:
    """Return the values that a run shares with its baseline."""
    values = [run.get(name) for name in ("seed", *PAIR_FIELDS)]
    return *values, run.get("shared_weights")  # which older records do not have


def stored_key(run: dict) -> tuple:
    """Return the values by which a later run replaces an earlier one. Origin is one of them, so that BF16's
    run stays for the arms of an earlier commit."""
    return run["arm"], *pair_key(run), *origin_of(run).values()


def training_loss(run: dict) -> float:
    """Return the mean training loss of a run's last steps.

    Their number is a tenth of the whole run's, and at most the arm's. With 344 steps --stop 0.25 trains 86,
    of which the last 34 count; --start 0.5 --stop 0.55 trains 189, of which the arm's 17 count.
    """
    arm_steps = round(run["stop"] * run["steps"]) - round(run["start"] * run["steps"])
    count = max(1, min(run["steps"] // 10, arm_steps))
    return statistics.mean(run["losses"][-count:])


def speed_to_equal_loss(row: dict, pairs: list[Pair], others: list[list[Pair]]) -> dict:
    """Return BF16's training time over that of a whole run of this arm which ends at BF16's loss.

    The slope is the fall of BF16's training loss between two lengths of whole runs, over the log of their
    ratio. An arm whose loss is higher by `gap` needs exp(gap / slope) times as many tokens.

    The lengths are this row's and the nearest other one. The seeds of the slope are those that both have. A
    gap of more than half of the fall is too far to extrapolate. The interval is that of the gap alone.

    Args:
        pairs: of the row.
        others: pairs of the rows that differ in the number of tokens alone.

    Returns:
        speed_to_equal_loss: None if BF16's loss does not fall, or if the gap is too large.
        speed_to_equal_loss_interval: an end of it is None if it is not bounded.
        slope: nats per e-fold of tokens.
        slope_tokens: the other length.
        slope_seeds: the seeds.

        All are None without such runs, the interval also of one seed.
    """
    found = dict.fromkeys((
        "speed_to_equal_loss", "speed_to_equal_loss_interval", "slope", "slope_tokens", "slope_seeds"))
    others = [other for other in others if baseline_falls(pairs, other)]
    if row["speed"] is None or not is_whole_run(row) or not others:
        return found
    nearest = min(others, key=lambda other: abs(log_of_tokens(other, pairs)))
    falls = baseline_falls(pairs, nearest)
    fall = statistics.mean(falls.values())
    slope = fall / log_of_tokens(nearest, pairs)
    found["slope"] = slope
    found["slope_tokens"] = nearest[0].run["tokens"]
    found["slope_seeds"] = sorted(seed for seed, _ in falls)

    def speed_at(gap: float) -> float | None:
        if slope <= 0 or abs(gap) > abs(fall) / 2:
            return None
        return row["speed"] / math.exp(gap / slope)

    found["speed_to_equal_loss"] = speed_at(row["training"])
    if row["training_interval"] is not None:
        low, high = row["training_interval"]
        found["speed_to_equal_loss_interval"] = [speed_at(high), speed_at(low)]  # a smaller gap is faster
    return found


def is_other_length(other: Group, group: Group) -> bool:
    """Return whether two rows differ in the number of tokens alone."""
    return (other.fields["tokens"] != group.fields["tokens"]
            and other.fields | {"tokens": None} == group.fields | {"tokens": None})


def baseline_falls(pairs: list[Pair], other: list[Pair]) -> dict[tuple[int, str], float]:
    """Return {(seed, checksum of the token files): how much lower BF16's loss is in another row}, of those
    that both have."""
    def key(run):
        return run["seed"], run["train_sha256"]

    losses = {key(baseline): training_loss(baseline) for _, baseline in other}
    return {key(baseline): training_loss(baseline) - losses[key(baseline)] for _, baseline in pairs
            if key(baseline) in losses}


def log_of_tokens(other: list[Pair], pairs: list[Pair]) -> float:
    """Return the log of how many times as many tokens another row has."""
    return math.log(other[0].run["tokens"] / pairs[0].run["tokens"])


def main_table(rows: list[dict]) -> str:
    """Return the Markdown table of the rows."""
    titles = ["arm", "size", "tokens", "the arm's part", "seeds", "skipped steps", "training loss, nats",
              "95 % interval", "%", "validation loss", "95 % interval", "x BF16", "at equal loss",
              "95 % interval", "slope, nats per e-fold of tokens"]
    lines = []
    for row in rows:
        lines.append([
            f"`{row['arm']}`", describe_size(row), f"{row['tokens']:,}",
            f"{row['start']:g} to {row['stop']:g} of {row['end']:g}",
            describe_seeds(row), f"{row['skipped_steps']}",
            describe(row["training"]), describe_interval(row["training_interval"]),
            describe(row["training_percent"], "{:+.2f}"), describe(row["validation"]),
            describe_interval(row["validation_interval"]), describe(row["speed"], "{:.3f}"),
            describe(row["speed_to_equal_loss"], "{:.3f}"),
            describe_interval(row["speed_to_equal_loss_interval"], "{:.3f}"), describe_slope(row)])
    return markdown(titles, lines)


def describe_size(row: dict) -> str:
    """Return the size of a row, and of fine-tuning its base and what is trained: "124m, 6a1c0f2e, full"."""
    if not is_fine_tuning(row):
        return row["size"]
    return f"{row['size']}, {row['base_sha256'][:8]}, {describe_trained(row)}"


def describe_seeds(row: dict) -> str:
    """Return the number of pairs: "4", or "3 of 4, 1 diverged"."""
    pairs = row["seeds"]
    diverged = len(row["diverged_seeds"])
    return f"{pairs} of {pairs + diverged}, {diverged} diverged" if diverged else f"{pairs}"


def describe(value: float | None, number: str = "{:+.4f}") -> str:
    return "" if value is None else number.format(value)


def describe_interval(interval: list[float | None] | None, number: str = "{:+.4f}") -> str:
    """Return "0.9 to 1.1", in which an end that is None is "(not bounded)"; "" without an interval."""
    if interval is None:
        return ""
    if interval == [None, None]:
        return "not bounded"
    return " to ".join("(not bounded)" if end is None else number.format(end) for end in interval)


def describe_slope(row: dict) -> str:
    """Return the slope of a row, with the other length and the seeds that it is from; "" without one."""
    if row["slope"] is None:
        return ""
    seeds = ", ".join(str(seed) for seed in row["slope_seeds"])
    return f"{row['slope']:.3f}, with {row['slope_tokens']:,} tokens, seeds {seeds}"
