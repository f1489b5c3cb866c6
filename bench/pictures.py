"""Draw the pictures of the pages from the JSON in results/, five in all. Nothing is measured.

    python bench/pictures.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_interrupt  # Ctrl-C while importing prints no traceback

import json
import statistics

from bench.convergence import interval_of
from nanote import health
from nanote.command import run_command

LOSS_TOKENS = 100_007_936  # of the runs in the picture of the loss
LOSS_ARMS = {  # arm -> label, color
    "bf16@1.2e-3": ("BF16", "tab:blue"), "fp8@1.2e-3": ("FP8, delayed scaling", "tab:orange"),
    "nanogpt@1.2e-3": ("nanoGPT, compiled", "tab:red"),
}
ATTENTION_KERNELS = {  # name of a row -> label, color
    "by hand": ("by hand", "silver"), "SDPA, FlashAttention 2": ("FlashAttention 2, of PyTorch", "tab:gray"),
    "SDPA, cuDNN": ("cuDNN, of PyTorch and TE", "tab:cyan"), "flash-attn 4": ("FlashAttention 4", "tab:blue"),
    "te.DotProductAttention, FP8": ("cuDNN in FP8, of TE", "tab:green"),
}


def make_figure(width, height, rows=1, columns=1, **options):
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def origin_of_rows(rows) -> str:
    """Return where rows were measured."""
    origins = [f"{row['gpu']}, torch {row['torch']}, TE {row['te']}, {row['date']}" for row in rows]
    return "; ".join(dict.fromkeys(origins))  # each once


def draw_stack(rows, path):
    """Draw a bar per change of benchmark_te.py --stack: tokens per second."""
    from matplotlib.patches import Patch

    figure, axes = make_figure(10, 4.6)
    changes = [row["label"] for row in rows]
    speeds = [row["tokens_per_s"] / 1e3 for row in rows]
    colors = ["tab:gray" if row["arm"].startswith("plain") else "tab:green" for row in rows]
    bars = axes.bar(changes, speeds, color=colors)
    labels = [f"{speed:.0f} k\n{speed / speeds[0]:.2f} ×" for speed in speeds]
    axes.bar_label(bars, labels, fontsize=9, padding=2)
    axes.tick_params(axis="x", labelsize=8, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    axes.set(ylabel="thousand tokens/s")
    keys = {"plain PyTorch": "tab:gray", "with Transformer Engine": "tab:green"}
    handles = [Patch(color=color, label=label) for label, color in keys.items()]
    axes.legend(handles=handles, frameon=False, loc="upper left", title="+: added to the bar before")
    title = f"GPT-2 124M, 32 × 1,024 tokens a step; {origin_of_rows(rows)}"
    axes.set_title(title, fontsize=9, color="dimgray")
    figure.savefig(path, dpi=130)


def evaluations_of(runs, arm) -> list[list[dict]]:
    """Return the records of each evaluation that at least three seeds of an arm have, in order."""
    by_step = {}
    for record in runs:
        is_shown = record["arm"] == arm and record["run_tokens"] == LOSS_TOKENS
        if is_shown and record["step"] > 1:
            by_step.setdefault(record["step"], []).append(record)
    return [by_step[step] for step in sorted(by_step) if len(by_step[step]) > 2]


def draw_losses(axes, evaluations, unit, scale, label, color):
    """Draw an arm's mean loss over seeds against tokens or seconds, and its 95 % interval."""
    x = []
    means = []
    lows = []
    highs = []
    for records in evaluations:
        losses = [record["val_loss"] for record in records]
        low, high = interval_of(losses)
        x.append(scale * statistics.mean(record[unit] for record in records))
        means.append(statistics.mean(losses))
        lows.append(low)
        highs.append(high)
    # markers: between evaluations the loss falls less evenly than the line
    axes.plot(x, means, marker="o", ms=4, color=color, label=label)
    axes.fill_between(x, lows, highs, color=color, alpha=0.25, lw=0)


def draw_loss(result, path):
    """Draw the validation loss against tokens and against seconds."""
    from matplotlib.patches import Patch

    figure, (by_tokens, by_seconds) = make_figure(11, 4.6, 1, 2, sharey=True)
    machines = set()
    seeds = set()
    for arm, (label, color) in LOSS_ARMS.items():
        evaluations = evaluations_of(result["runs"], arm)
        for records in evaluations:
            machines |= {record["machine"] for record in records}
        seeds.add(len(evaluations[-1]))
        draw_losses(by_tokens, evaluations, "tokens", 1e-6, label, color)
        draw_losses(by_seconds, evaluations, "seconds", 1, label, color)
    by_tokens.set_xlabel("million tokens", fontsize=12)
    by_seconds.set_xlabel(f"seconds of training on one {', '.join(machines)}", fontsize=12)
    by_tokens.grid(alpha=0.3)
    by_seconds.grid(alpha=0.3)
    by_tokens.set_ylabel("validation loss, nats a token", fontsize=12)
    handles, _ = by_tokens.get_legend_handles_labels()
    handles.append(Patch(color="gray", alpha=0.3, label="95 % interval of the mean"))
    by_tokens.legend(handles=handles, fontsize=11, frameon=False, loc="upper right")
    figure.suptitle(f"GPT-2 124M, mean of {min(seeds)} to {max(seeds)} seeds", fontsize=12)
    figure.savefig(path, dpi=130)


def draw_crossover(rows, path):
    """Draw two heat maps of FP8 ÷ BF16 over width and tokens per step: FP8 is faster where it is blue."""
    import numpy as np  # with matplotlib only
    from matplotlib.colors import TwoSlopeNorm

    widths = sorted({row["width"] for row in rows})
    tokens = sorted({row["tokens"] for row in rows})
    values = [row["eager"] for row in rows] + [row["graph"] for row in rows]
    norm = TwoSlopeNorm(1.0, min(values), max(values))
    figure, both = make_figure(12.5, 5.4, 1, 2, sharey=True)
    titles = {"eager": "Python launches every kernel", "graph": "each step is one CUDA graph"}
    for axes, (name, title) in zip(both, titles.items()):
        ratio = np.empty((len(widths), len(tokens)))
        for row in rows:
            ratio[widths.index(row["width"]), tokens.index(row["tokens"])] = row[name]
        image = axes.imshow(ratio, origin="lower", cmap="RdBu", norm=norm, aspect="auto")
        for (y, x), value in np.ndenumerate(ratio):
            color = "black" if 0.15 < norm(value) < 0.85 else "white"
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=11, color=color)
        axes.set_xticks(range(len(tokens)), [f"{count:,}" for count in tokens])
        axes.set_yticks(range(len(widths)), [f"{width:,}" for width in widths])
        axes.set_xlabel("tokens a step", fontsize=12)
        axes.set_title(title, fontsize=13)
        axes.tick_params(length=0)
    both[0].set_ylabel("width of the model", fontsize=12)
    ticks = [norm.vmin, 0.75, 1, 1.25, 1.5, 1.75, norm.vmax]
    bar = figure.colorbar(image, ax=both, ticks=ticks, format="%.2f")
    bar.set_label("speed of FP8 ÷ speed of BF16", fontsize=12)
    figure.suptitle(f"two layers, vocabulary 1,024; {origin_of_rows(rows)}", fontsize=9, color="dimgray")
    figure.savefig(path, dpi=130)


def describe_shape(text) -> str:
    """Return "32 × 1,024 tokens\n12 heads of 64" for "32x1024x12x12x64"."""
    batch, length, heads, kv_heads, width = map(int, text.split("x"))
    groups = f"\n{kv_heads} KV heads" if kv_heads != heads else ""
    return f"{batch} × {length:,} tokens\n{heads} heads of {width}{groups}"


def draw_attention(result, path):
    """Draw the speed of the kernels of benchmark_attention.py alone: a group per shape, a bar per kernel."""
    found = {}  # {(shape, kernel): TFLOP/s}
    for row in result["rows"]:
        if row["part"] == "attention" and "both_tflops" in row:
            found[row["shape"], row["name"]] = row["both_tflops"]
    shapes = list(dict.fromkeys(shape for shape, _ in found))
    figure, axes = make_figure(12, 5.2)
    width = 0.85 / len(ATTENTION_KERNELS)
    middle = (len(ATTENTION_KERNELS) - 1) / 2
    for number, (name, (label, color)) in enumerate(ATTENTION_KERNELS.items()):
        x = [group + (number - middle) * width for group in range(len(shapes))]
        speeds = [found.get((shape, name), 0) for shape in shapes]
        bars = axes.bar(x, speeds, 0.94 * width, color=color, label=label)
        axes.bar_label(bars, [f"{speed:.0f}" if speed else "–" for speed in speeds], fontsize=9, padding=1)
    axes.set_xticks(range(len(shapes)), map(describe_shape, shapes), fontsize=11)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("TFLOP/s, forward and backward", fontsize=12)
    figure.legend(ncols=len(ATTENTION_KERNELS), loc="outside upper center", frameon=False, fontsize=11)
    figure.supxlabel(f"causal attention, in BF16 except the last kernel; –: does not run; "
                     f"{result['machine']}", fontsize=9, color="dimgray")
    figure.savefig(path, dpi=130)


def draw_health(result, path):
    health.plot(result["records"], path, result["title"])


PICTURES = {
    "stack": draw_stack, "convergence": draw_loss, "crossover": draw_crossover, "attention": draw_attention,
    "fp8_health": draw_health,
}


def main() -> None:
    for name, draw in PICTURES.items():
        content = json.loads((ROOT / f"results/{name}.json").read_text())
        draw(content, ROOT / f"results/{name}.png")


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/pictures.py"))
