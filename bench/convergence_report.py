"""Tables and the picture of results/convergence.json, for bench/pages.py. Nothing is measured.

All but `rates_table` are at the learning rate that is best for BF16 of the size, which every arm has.
"""

import statistics

from bench.convergence import (
    EMULATED,
    RECIPES,
    SIZES,
    TOKENS_PER_STEP,
    baseline_of,
    changes_of,
    final_records,
    interval_of,
    size_of,
)
from bench.report import markdown

# Arms that could become the default, and the arm of today's default that each is compared with
CANDIDATES = {name: "fp8" for name in RECIPES if name not in ("bf16", "fp8", "fp8-te_modules")}
CANDIDATES |= {
    f"emulated-{name}": "emulated-all"
    for name in ("current", "current_gradients", "current_e4m3_gradients", "block_gradients", "history16",
                 "most_recent", "e4m3", "e4m3_current", "row", "block", "stochastic", "float32_residual",
                 "no_wgrad", "skip_head", "skip_first", "skip_last")
}


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


def with_interval(mean, interval) -> str:
    if mean is None:
        return ""
    return f"{mean:+.2f}" + (f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else "")


def cells(row: dict) -> list[str]:
    """Return tokens, seeds, loss, gap, and the gap of the final weights evaluated without FP8."""
    error = f" ± {row['standard_error']:.4f}" if row["standard_error"] is not None else ""
    is_baseline = row["arm"] == baseline_of(row["arm"])
    gap = "" if is_baseline else with_interval(row["gap_percent"], row["gap_interval"])
    return [f"{row['tokens'] / 1e6:.0f} M", str(row["seeds"]), f"{row['mean']:.4f}{error}", gap,
            with_interval(row.get("gap_without_fp8_percent"), None)]


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


def emulated_table(result) -> str:
    """Return the Markdown table of the arms with emulated FP8."""
    lines, rows = [], rows_of(result)
    for name, words in EMULATED.items():
        lines += [[f"`{words}`" if words else "the default: all, delayed", *cells(row)]
                  for row in rows.get(f"emulated-{name}", [])]
    return markdown(["emulated FP8", "tokens", "seeds", "loss ± standard error", "behind BF16, %",
                     "evaluated in BF16, %"], lines or [["none is measured yet", *5 * [""]]])


def small_table(result) -> str:
    """Return the Markdown table of the arms of a small GPT, by block and learning rate."""
    final, lines = final_records(result["runs"]), []
    for row in result["summary"]:
        name, _, rate = row["arm"].partition("@")
        default = f"{size_of(name)}emulated-all"
        emulated = name.removeprefix(f"{size_of(name)}emulated-")
        precision = "none, in BF16" if emulated.endswith("bfloat16") else "none"
        if emulated in EMULATED:
            precision = f"`{EMULATED[emulated]}`" if EMULATED[emulated] else "emulated, the default"
        changes = changes_of(final, row["arm"], f"{default}@{rate}", row["tokens"])
        against = with_interval(statistics.mean(changes), interval_of(changes)) if changes else ""
        _, seeds, loss, gap, _ = cells(row)
        block = "modern" if "modern-" in size_of(name) else "GPT-2"
        steps = row["tokens"] // TOKENS_PER_STEP[size_of(name)]
        lines.append([block, f"{steps:,}", rate, precision, seeds, loss, gap,
                      against if name != default else ""])
    lines.sort(key=lambda line: (line[0], int(line[1].replace(",", "")), float(line[2]),
                                 not line[3].startswith("none")))
    return markdown(["block", "steps", "learning rate", "FP8", "seeds", "loss ± standard error",
                     "behind none, %", "behind the default, %"], lines, left=4)


def negatives_table(result) -> str:
    """Return the Markdown table of CANDIDATES that are not better than today's default: the paired difference
    is not below zero, or its 95 % interval holds zero."""
    rate, final, lines = best_rate(result["summary"]), final_records(result["runs"]), []
    for name, default in CANDIDATES.items():
        for arm, tokens in final:
            if arm != name + rate:
                continue
            changes = changes_of(final, arm, default + rate, tokens)
            interval = interval_of(changes)
            if not changes or (interval[1] if interval else statistics.mean(changes)) < 0:
                continue
            lines.append([f"`{name}`", f"`{default}`", f"{tokens / 1e6:.0f} M", str(len(changes)),
                          with_interval(statistics.mean(changes), interval)])
    return markdown(["tried", "in place of", "tokens", "seeds", "loss, % of the other's"],
                    lines or [["none so far", *4 * [""]]])


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
            line, = axis.plot(x, [statistics.mean(values) for values in losses], label=labels[arm])
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
