"""Summarize the runs of results/convergence*.json: losses, gaps and times, and a table. Nothing is measured.

A run of bench/convergence.py is a list of records, one per evaluation; its last one has `tokens` equal to
`run_tokens`. An arm is a prefix of its size, a precision and a learning rate: "modern-fp8-current@1.2e-3".
"""

import math
import re
import statistics

from bench.report import markdown

PREFIXES = r"(?:small-modern-|modern-|350m-|small-|bpe-|)"  # longest first
# of Student's t, 1, 2… degrees of freedom
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)


def size_of(arm: str) -> str:
    """Return the prefix of an arm, such as "modern-"; "" for GPT-2 124M."""
    return re.match(PREFIXES, arm)[0]


def baseline_of(arm: str) -> str:
    """Return the BF16 arm of the same architecture and learning rate."""
    name, at, lr = arm.partition("@")
    return f"{size_of(name)}bf16{at}{lr}"


def standard_error(values: list[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def interval_of(values: list[float]) -> list[float] | None:
    """Return the 95 % interval of the mean, of the t distribution."""
    if len(values) < 2:
        return None
    mean = statistics.mean(values)
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * standard_error(values)
    return [mean - half, mean + half]


def final_records(runs: list[dict]) -> dict:
    """Return the last record of each run: {(arm, tokens): {seed: record}}."""
    final = {}
    for record in runs:
        if record["tokens"] == record["run_tokens"]:
            final.setdefault((record["arm"], record["tokens"]), {})[record["seed"]] = record
    return final


def changes_of(own: dict, others: dict, field="val_loss") -> list[float]:
    """Return by how many percent a field of a run is above the loss of another, for each seed of both."""
    return [100 * (own[seed][field] / others[seed]["val_loss"] - 1)
            for seed in sorted(own.keys() & others.keys()) if own[seed].get(field) is not None]


# ---------------------------------------------------------------- summary

def summarize(runs: list[dict]) -> list[dict]:
    """Return a row per arm and number of tokens: the fields of `summary` in bench/convergence.py --help."""
    final, rows = final_records(runs), []
    for (arm, tokens), by_seed in final.items():
        found = [record["val_loss"] for record in by_seed.values()]
        baseline = final.get((baseline_of(arm), tokens), {})
        changes = changes_of(by_seed, baseline)
        in_bf16 = changes_of(by_seed, baseline, "val_loss_without_fp8")
        in_bf16 = in_bf16 if len(in_bf16) == len(changes) else []  # of the same seeds, for comparison
        rows.append({
            "arm": arm, "tokens": tokens, "seeds": len(found), "mean": statistics.mean(found),
            "standard_error": standard_error(found),
            "gap_percent": statistics.mean(changes) if changes else None,
            "gap_standard_error": standard_error(changes), "gap_interval": interval_of(changes),
            "gap_without_fp8_percent": statistics.mean(in_bf16) if in_bf16 else None,
            "gap_without_fp8_interval": interval_of(in_bf16),
            "seconds": median_seconds(by_seed, final, baseline_of(arm)),
        })
    for row in rows:
        for arm, suffix in ((baseline_of(row["arm"]), ""),
                            (baseline_of(row["arm"]).replace("bf16", "nanogpt"), "_over_nanogpt")):
            seconds, speedup, interval = match(row, arm, rows, final)
            row |= {} if suffix else {"seconds_to_bf16_loss": seconds}
            row |= {f"loss_matched_speedup{suffix}": speedup, f"loss_matched_interval{suffix}": interval}
    return sorted(rows, key=lambda row: row["mean"])


def median_seconds(by_seed: dict, final: dict, baseline: str) -> float | None:
    """Return the median training time of the runs on the machine that trained most runs of `baseline`."""
    machines = [record.get("machine") for (name, _), records in final.items() if name == baseline
                for record in records.values()]
    seconds = [record["seconds"] for record in by_seed.values()
               if not machines or record.get("machine") == statistics.mode(machines)]
    return statistics.median(seconds) if seconds else None


def match(row: dict, baseline: str, rows: list[dict], final: dict) -> tuple:
    """Return the training time after which row's arm ends at the loss of the arm `baseline`, the time of
    `baseline` over it, and the 95 % interval of that; None for what is not known.

    The gap, over the seeds of both arms, is turned into tokens by how much the loss falls from one length of
    row's arm to its next, over the seeds of both lengths. None if the loss is not between these lengths.
    """
    other = next((r for r in rows if (r["arm"], r["tokens"]) == (baseline, row["tokens"])), None)
    own = final[row["arm"], row["tokens"]]
    is_switched = any("switch_step" in record for record in own.values())  # seconds are of a part
    if is_switched or not other or not row["seconds"] or not other["seconds"]:
        return None, None, None
    if other is row:
        return row["seconds"], 1.0, None
    lengths = [r["tokens"] for r in rows if r["arm"] == row["arm"] and r is not row]
    if not lengths:
        return None, None, None
    nearest = min(lengths, key=lambda tokens: abs(math.log(tokens / row["tokens"])))

    def above(arm, tokens):
        others = final[arm, tokens]
        return [own[seed]["val_loss"] - others[seed]["val_loss"] for seed in own if seed in others]

    differences, falls = above(baseline, row["tokens"]), above(row["arm"], nearest)
    if not differences or not falls or not 0 <= statistics.mean(differences) / statistics.mean(falls) <= 1:
        return None, None, None

    def seconds(gap):
        return row["seconds"] * (nearest / row["tokens"]) ** (gap / statistics.mean(falls))

    found, bounds = seconds(statistics.mean(differences)), interval_of(differences)
    interval = bounds and sorted(other["seconds"] / seconds(gap) for gap in bounds)
    return found, other["seconds"] / found, interval


def with_interval(mean, interval) -> str:
    if mean is None:
        return ""
    return f"{mean:+.2f}" + (f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else "")


def main_table(result) -> str:
    """Return the Markdown table of the summary."""
    lines = []
    for row in result["summary"]:
        error = f" ± {row['standard_error']:.4f}" if row["standard_error"] is not None else ""
        is_baseline = row["arm"] == baseline_of(row["arm"])
        speedup = f"{row['loss_matched_speedup']:.2f}" if row["loss_matched_speedup"] else ""
        lines.append([
            f"`{row['arm']}`", f"{row['tokens'] / 1e6:.0f} M", str(row["seeds"]), f"{row['mean']:.4f}{error}",
            "" if is_baseline else with_interval(row["gap_percent"], row["gap_interval"]),
            "" if row["seconds"] is None else f"{row['seconds']:.0f}", speedup])
    titles = ["arm", "tokens", "seeds", "loss ± standard error", "behind BF16, %", "seconds",
              "× BF16 at its loss"]
    return markdown(titles, lines)
