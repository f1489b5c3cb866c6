"""Tables and the picture of results/convergence.json, for bench/pages.py. Nothing is measured.

All but `rates_table` are at the learning rate that is best for BF16 of the size, which every arm has.
"""

import math
import statistics

from bench.convergence import (
    EMULATED,
    RECIPES,
    SIZES,
    T_975,
    TOKENS_PER_STEP,
    baseline_of,
    changes_of,
    final_records,
    interval_of,
    size_of,
)
from bench.report import markdown

ALL = "all, emulated"  # name of the arm emulated-all
# Arms that could become the default
CANDIDATES = [name for name in RECIPES if name.startswith("fp8-") and name != "fp8-te_modules"]


def best_rate(summary: list[dict], size: str = "") -> str:
    """Return the end of the arms of a size with the learning rate that is best for BF16, such as @1.2e-3; ""
    if BF16 has no runs.

    Of its shortest runs: a longer one has a lower loss at any learning rate."""
    rows = [row for row in summary if row["arm"].startswith(f"{size}bf16@")]
    best = min(rows, key=lambda row: (row["tokens"], row["mean"]), default={"arm": ""})
    return "".join(best["arm"].partition("@")[1:])


def rows_of(result: dict) -> dict[str, list[dict]]:
    """Return the rows of the summary at the best learning rate of their size, by arm without its learning
    rate; those of an arm by tokens."""
    rates, rows = {size: best_rate(result["summary"], size) for size in SIZES}, {}
    for row in sorted(result["summary"], key=lambda row: row["tokens"]):
        rate = rates[size_of(row["arm"])]
        if rate and row["arm"].endswith(rate):
            rows.setdefault(row["arm"].removesuffix(rate), []).append(row)
    return rows


def losses(result, arm: str, field="val_loss") -> list[float]:
    """Return a field of the last records of an arm, such as "fp8@1.2e-3", by seed; of its shortest runs."""
    found = [(tokens, runs) for (name, tokens), runs in final_records(result["runs"]).items() if name == arm]
    return [record[field] for _, record in sorted(min(found)[1].items())]


def gaps(result, arm: str, other: str | None = None, field="val_loss") -> list[float]:
    """Return `changes_of` an arm from another, of the shortest runs that both have.

    other: None: the val_loss of BF16 of the same size and learning rate, whatever the field.
    """
    of_other = field if other else "val_loss"
    final, other = final_records(result["runs"]), other or baseline_of(arm)
    tokens = min(tokens for name, tokens in final if name == arm and (other, tokens) in final)
    return changes_of(final, arm, other, tokens, field, of_other)


def pooled_interval(result, arm: str, control: str) -> list[float]:
    """Return the 95 % interval of the mean of `gaps` of an arm, if those of a control scatter as much."""
    ours, others = gaps(result, arm), gaps(result, control)
    freedom = len(ours) + len(others) - 2
    variance = sum((len(some) - 1) * statistics.variance(some) for some in (ours, others)) / freedom
    half, mean = T_975[freedom - 1] * math.sqrt(variance / len(ours)), statistics.mean(ours)
    return [mean - half, mean + half]


def with_interval(mean, interval) -> str:
    if mean is None:
        return ""
    numbers = [f"{round(value, 2) + 0.0:+.2f}" for value in (mean, *(interval or []))]  # no -0.00
    return numbers[0] + (f" ({numbers[1]} to {numbers[2]})" if interval else "")


def cells(row: dict) -> list[str]:
    """Return tokens, seeds, loss, gap, and the gap of the final weights evaluated without FP8."""
    error = f" ± {row['standard_error']:.4f}" if row["standard_error"] is not None else ""
    is_baseline = row["arm"] == baseline_of(row["arm"])
    gap = "" if is_baseline else with_interval(row["gap_percent"], row["gap_interval"])
    return [f"{row['tokens'] / 1e6:.0f} M", str(row["seeds"]), f"{row['mean']:.4f}{error}", gap,
            with_interval(row["gap_without_fp8_percent"], row["gap_without_fp8_interval"])]


def main_table(result) -> str:
    """Return the Markdown table of the arms that train as train.py does, and of nanoGPT."""
    lines, rows = [], rows_of(result)
    for name in (*(prefix + name for prefix in SIZES for name in RECIPES), "nanogpt"):
        for row in rows.get(name, []):
            speedups = [f"{row[field]:.2f}" if row[field] else "" for field in (
                "loss_matched_speedup", "loss_matched_speedup_over_nanogpt")]
            if row["loss_matched_interval"]:
                speedups[0] += " ({:.2f} to {:.2f})".format(*row["loss_matched_interval"])
            seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
            lines.append([f"`{name}`", *cells(row), seconds, *speedups])
    return markdown(["arm", "tokens", "seeds", "loss ± standard error", "behind BF16, %",
                     "evaluated in BF16, %", "seconds", "× BF16 at its loss", "× nanoGPT at its loss"],
                    lines)


def rates_table(result) -> str:
    """Return the Markdown table of BF16's loss by learning rate."""
    rows = [row for row in result["summary"] if row["arm"].startswith("bf16@")]
    rows.sort(key=lambda row: float(row["arm"].partition("@")[2]))
    return markdown(["BF16, learning rate", "tokens", "seeds", "loss ± standard error"],
                    [[row["arm"].partition("@")[2], *cells(row)[:3]] for row in rows])


def switched_rows(result) -> list[tuple[str, str, dict, list[float]]]:
    """Return of each arm that shares the first part of a run (--switch-at): block, name, row of the summary,
    and for each seed by how many percent its loss is above that of the arm with all in FP8."""
    found, rows, final = [], rows_of(result), final_records(result["runs"])
    labels = {name: name for name in RECIPES if name != "bf16"}
    labels |= {f"emulated-{name}": words for name, words in EMULATED.items()}
    labels["emulated-all"] = ALL
    for size in sorted(SIZES, key=lambda size: "modern-" in size):
        for name, label in labels.items():
            everything = "emulated-all" if name.startswith("emulated-") else "fp8"
            for row in rows.get(size + name, []):
                other = size + everything + row["arm"].removeprefix(size + name)
                changes = changes_of(final, row["arm"], other, row["tokens"]) if name != everything else []
                found.append((block_of(size), label, row, changes))
    return found


def paired_change(changes: list[float]) -> str:
    return with_interval(statistics.mean(changes) if changes else None, interval_of(changes))


def switched_table(result) -> str:
    """Return the Markdown table of `switched_rows`. No losses: their means are of different seeds."""
    lines = []
    for block, label, row, changes in switched_rows(result):
        _, seeds, _, gap, without = cells(row)
        lines.append([block, label if label == ALL else f"`{label}`", seeds, gap, without,
                      paired_change(changes)])
    names = ["block", "FP8", "seeds", "behind none, %", "evaluated without FP8, %", "behind all in FP8, %"]
    used = len(names) - (not any(line[-1] for line in lines))
    return markdown(names[:used], [line[:used] for line in lines], left=2)


def plot_switched(result, path) -> None:
    """Draw the gaps of `switched_rows`, mean and 95 % interval, with the final weights evaluated as trained
    and without FP8; at the right the paired change from all in FP8, which a dashed line marks."""
    import matplotlib.pyplot as plt

    rows, places, last = switched_rows(result), [], None
    for block, label, _, _ in rows:
        option = label.split("=")[0]
        group = block, option if option in ("quantize", "keep", "skip", ALL) else "how it is quantized"
        places.append((places[-1] + (1 if group == last else 1.7)) if places else 0)
        last = group
    figure, axis = plt.subplots(figsize=(9, 0.27 * (places[-1] + 1) + 1.2))
    kinds = (("gap_percent", "gap_interval", "evaluated as trained", -0.15, "o"),
             ("gap_without_fp8_percent", "gap_without_fp8_interval", "evaluated without FP8", 0.15, "D"))
    for mean, interval, label, shift, marker in kinds:
        shown = [(place + shift, row) for place, (_, _, row, _) in zip(places, rows) if row[mean] is not None]
        bounds = [row[interval] or [row[mean]] * 2 for _, row in shown]
        errors = [[row[mean] - low for (_, row), (low, _) in zip(shown, bounds)],
                  [high - row[mean] for (_, row), (_, high) in zip(shown, bounds)]]
        axis.errorbar([row[mean] for _, row in shown], [place for place, _ in shown], xerr=errors, fmt=marker,
                      markersize=4, lw=1, label=label)
    for block, label, row, _ in rows:
        if label == ALL:
            within = [place for place, (other, *_) in zip(places, rows) if other == block]
            axis.vlines(row["gap_percent"], within[0], within[-1], ls="--", lw=0.8, color="gray")
    names = [label if block == "GPT-2" else f"{block} block: {label}" for block, label, _, _ in rows]
    axis.set_yticks(places, names, fontsize=8)
    for place, (_, _, _, changes) in zip(places, rows):
        axis.text(1.01, place, paired_change(changes), fontsize=8, va="center",
                  transform=axis.get_yaxis_transform())
    axis.text(1.01, places[0], "behind all, same seeds", fontsize=8, va="center",
              transform=axis.get_yaxis_transform())
    axis.margins(y=0.02)
    axis.invert_yaxis()
    axis.axvline(0, color="black", lw=0.8)
    axis.set_xlabel("validation loss behind the same run without FP8, %")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def block_of(size: str) -> str:
    """Return the architecture of a prefix of an arm, as the tables name it."""
    return "modern" if "modern-" in size else "GPT-2 350M" if size == "350m-" else "GPT-2"


def small_table(result) -> str:
    """Return the Markdown table of a small GPT without FP8 and with all of it emulated, by block and learning
    rate."""
    precisions = {"bf16": "none", "bfloat16": "none, in BF16", "emulated-all": "emulated"}
    lines = []
    for row in result["summary"]:
        name, _, rate = row["arm"].partition("@")
        size = size_of(name)
        precision = precisions.get(name.removeprefix(size))
        if precision:
            _, seeds, loss, gap, _ = cells(row)
            steps = row["tokens"] // TOKENS_PER_STEP[size]
            lines.append([block_of(size), f"{steps:,}", rate, precision, seeds, loss, gap])
    lines.sort(key=lambda line: (line[0], int(line[1].replace(",", "")), float(line[2]),
                                 not line[3].startswith("none")))
    return markdown(["block", "steps", "learning rate", "FP8", "seeds", "loss ± standard error",
                     "behind none, %"], lines, left=4)


def negatives_table(result) -> str:
    """Return the Markdown table of CANDIDATES that are not better than `fp8`, the default: the paired
    difference is not below zero, or its 95 % interval holds zero."""
    rate, final, lines = best_rate(result["summary"]), final_records(result["runs"]), []
    for name in CANDIDATES:
        for arm, tokens in final:
            if arm != name + rate:
                continue
            changes = changes_of(final, arm, f"fp8{rate}", tokens)
            interval = interval_of(changes)
            if not changes or (interval[1] if interval else statistics.mean(changes)) < 0:
                continue
            lines.append([f"`{name}`", f"{tokens / 1e6:.0f} M", str(len(changes)), paired_change(changes)])
    return markdown(["tried in place of `fp8`", "tokens", "seeds", "loss, % of its"],
                    lines or [["none so far", *3 * [""]]])


def plot(result, path) -> None:
    """Draw the validation loss against tokens, and against seconds of training: the mean over the seeds, from
    three on in a band of its 95 % interval, else with a thin line per seed. Of each arm the runs as long as
    BF16's shortest, at the steps that three seeds have, or all of fewer."""
    import matplotlib.pyplot as plt

    rate, rows = best_rate(result["summary"]), rows_of(result)
    labels = {"bf16": "BF16", "fp8": "FP8, delayed scaling",
              "fp8-stochastic": "FP8, logits' gradient\nrounded stochastically",
              "nanogpt": "nanoGPT, compiled"}
    tokens = rows["bf16"][0]["tokens"]
    seeds = {arm: row["seeds"] for arm in labels for row in rows.get(arm, []) if row["tokens"] == tokens}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, unit, scale in zip(axes, ("tokens", "seconds"), (1e-6, 1)):
        for arm in seeds:
            by_step = {}
            for record in result["runs"]:
                if (record["arm"], record["run_tokens"]) == (arm + rate, tokens) and record["step"] > 1:
                    by_step.setdefault(record["step"], {})[record["seed"]] = record
            evaluations = [[by_step[step][seed] for seed in sorted(by_step[step])]
                           for step in sorted(by_step) if len(by_step[step]) >= min(3, seeds[arm])]
            x = [scale * statistics.mean(r[unit] for r in records) for records in evaluations]
            losses = [[r["val_loss"] for r in records] for records in evaluations]
            # markers: between evaluations the loss falls less evenly than the line
            line, = axis.plot(x, [statistics.mean(values) for values in losses], marker="o", markersize=3,
                              label=labels[arm])
            if seeds[arm] > 2:
                axis.fill_between(x, *zip(*map(interval_of, losses)), alpha=0.3)
            else:
                axis.plot(x, losses, lw=0.5, color=line.get_color())
        axis.set_xlabel("million tokens" if unit == "tokens" else "seconds of training on one GPU")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss, nats a token")
    fewest, most = min(seeds.values()), max(seeds.values())
    count = "one seed" if most == 1 else f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"
    axes[0].legend(title=f"GPT-2 124M, {count}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
