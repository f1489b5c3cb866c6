"""Draw the pictures of the pages from the JSON in results/, six in all. Nothing is measured.

    python bench/pictures.py

Titles say what a picture shows: read them again after a new measurement.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import itertools
import json
import statistics

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench import gaps, kernel_times, measured
from nanote import health
from nanote.command import run_command

FOR_A_TALK = {  # matplotlib's settings
    "font.size": 16, "figure.titlesize": "large", "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "savefig.dpi": 130,
}
# colors that color-blind people tell apart, too (Okabe and Ito)
GRAY = "#707070"
BLUE = "#0072b2"
LIGHT_BLUE = "#56b4e9"
ORANGE = "#d55e00"
GREEN = "#009e73"

STACK_COLORS = {"plain PyTorch": GRAY, "TE's modules": BLUE, "fast kernels": ORANGE}
ATTENTION_KERNELS = {  # name of a row -> label, color
    "by hand": ("by hand", "silver"), "SDPA, FlashAttention 2": ("FlashAttention 2, of PyTorch", GRAY),
    "SDPA, cuDNN": ("cuDNN, of PyTorch and TE", LIGHT_BLUE), "flash-attn 4": ("FlashAttention 4", BLUE),
    "te.DotProductAttention, FP8": ("cuDNN in FP8, of TE", ORANGE),
}
KERNEL_COLORS = {  # class of bench/kernel_times.py -> color
    "GEMM": BLUE, "attention": LIGHT_BLUE, "other": GRAY, "copies": "black",
    "optimizer": GREEN, "communication": ORANGE,
}
GAP_SIZES = {"124m": "124M", "350m": "350M", "modern": "124M, modern block"}  # size -> label
WAITS_FOR_PYTHON = 1.1  # a step that takes this many times as long as its CUDA graph


def make_figure(width, height, title, rows=1, columns=1, **options):
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, **options)


def write_below(figure, text):
    """Write conditions and origin of the figures, in small letters."""
    figure.supxlabel(text, fontsize=13, color="dimgray")


def origin_of_rows(rows) -> str:
    """Return where rows were measured."""
    origins = [f"{row['gpu']}, torch {row['torch']}, TE {row['te']}, {row['date']}" for row in rows]
    return "; ".join(dict.fromkeys(origins))  # each once


def kernels_of(arm) -> str:
    """Return whose kernels an arm of benchmark_te.py --stack runs: a key of STACK_COLORS."""
    if arm.startswith("plain"):
        return "plain PyTorch"
    return "TE's modules" if "libraries" in arm else "fast kernels"


@rc_context(FOR_A_TALK)
def draw_stack(rows, path):
    """Draw a bar per change of benchmark_te.py --stack: tokens per second."""
    speeds = {row["arm"]: row["tokens_per_s"] / 1e3 for row in rows}
    ratio = speeds["fp8"] / speeds["plain"]
    title = f"GPT-2 124M: FP8 with fast kernels is {ratio:.1f} × as fast as compiled PyTorch"
    figure, axes = make_figure(12, 6.6, title)
    changes = [row["label"] for row in rows]
    colors = [STACK_COLORS[kernels_of(arm)] for arm in speeds]
    bars = axes.barh(changes, speeds.values(), color=colors)
    slowest = min(speeds.values())
    axes.bar_label(bars, [f"{speed:.0f} k   {speed / slowest:.1f} ×" for speed in speeds.values()], padding=6)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.2)
    axes.set_xlabel("thousand tokens/s, and × plain PyTorch, eager")
    handles = [Patch(color=color, label=label) for label, color in STACK_COLORS.items()]
    axes.legend(handles=handles, loc="upper right", title="+: added to the bar above", alignment="left")
    write_below(figure, f"""\
32 × 1,024 tokens a step; attention is by hand in the first bar, --attention auto in the last, else SDPA's
{origin_of_rows(rows)}""")
    figure.savefig(path)


def draw_gap(axes, pairs, color):
    """Draw the mean gap over the seeds of a row of bench/paired.py, and its 95 % interval.

    The interval of two seeds would hide all else: a thin line for each in place of it and of the mean.
    """
    first_run, _ = pairs[0]
    size = GAP_SIZES.get(first_run["size"], first_run["size"])
    label = f"{size}, {first_run['tokens'] / 1e6:.0f} M tokens"
    x = 100 * (np.arange(gaps.SEGMENTS) + 0.5) / gaps.SEGMENTS
    if len(pairs) < 3:
        for number, pair in enumerate(pairs):
            axes.plot(x, gaps.differences_of_seed(pair), color=color, lw=1.5, ls="--",
                      label=f"{label}, single pairs" if number == 0 else None)
        return
    means, intervals = zip(*gaps.differences_over_run(pairs))
    low, high = zip(*intervals)
    axes.plot(x, means, color=color, lw=3, label=f"{label}, mean of {len(pairs)} pairs")
    axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0)


@rc_context(FOR_A_TALK)
def draw_loss_gap(result, path, arm="fp8"):
    """Draw the training loss of an arm minus that of BF16 over the run, a line per size and length of whole
    runs in bench/paired.py's JSON: of those since the last change of rounding."""
    title = "From the same first weights: what FP8 adds to the training loss"
    figure, axes = make_figure(12.5, 6.6, title)
    axes.axhline(0, color="black", lw=1)
    colors = itertools.cycle([ORANGE, BLUE, GRAY, LIGHT_BLUE])
    machines = set()
    whole_runs = [
        run for run in result["runs"] if gaps.is_whole_run(run) and not gaps.is_fine_tuning(run)
        and not measured.is_before_change(run)]
    for fields, pairs, _ in gaps.groups_over_corpora(whole_runs):
        if fields["arm"] == arm and pairs:
            draw_gap(axes, pairs, next(colors))
            machines |= {run["machine"] for run, _ in pairs}
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the run")
    axes.set_ylabel("FP8 minus BF16, nats a token")
    axes.grid(alpha=0.4)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.3 * (top - bottom))  # for the legend
    axes.legend(loc="upper left")
    gpus = sorted({machine.partition(",")[0] for machine in machines})
    write_below(figure, f"""\
both runs of a pair on the same batches; means over a {gaps.SEGMENTS}th of the steps; shaded: 95 % interval
GPT-2; the learning rate falls by a cosine over each run, to a tenth; {', '.join(gpus)}
trained since commit {measured.BIASES_IN_GEMMS}, which changed a rounding""")
    figure.savefig(path)


@rc_context(FOR_A_TALK)
def draw_crossover(rows, path):
    """Draw two heat maps of FP8 ÷ BF16 over width and tokens per step: FP8 is faster where it is blue.
    A step that waits for Python is gray: its ratio says nothing about FP8."""
    widths = sorted({row["width"] for row in rows})
    tokens = sorted({row["tokens"] for row in rows})
    graphs = np.empty((len(widths), len(tokens)))
    eager = np.empty_like(graphs)
    waits = np.empty_like(graphs, dtype=bool)
    for row in rows:
        cell = widths.index(row["width"]), tokens.index(row["tokens"])
        graphs[cell] = row["graph"]
        eager[cell] = row["eager"]
        waits[cell] = row["fp8-eager_ms"] > WAITS_FOR_PYTHON * row["fp8_ms"]
    norm = TwoSlopeNorm(1.0, 0.5, 2.0)
    figure, (left, right) = make_figure(
        13, 7.2, "FP8 gains with width and tokens a step; small models need CUDA graphs", 1, 2, sharey=True)
    maps = [
        (left, eager, np.ma.array(eager, mask=waits), "launched from Python: most steps wait for it"),
        (right, graphs, graphs, "each step is one CUDA graph"),
    ]
    for axes, ratios, colored, title in maps:
        image = axes.imshow(colored, origin="lower", cmap="RdBu", norm=norm, aspect="auto")
        axes.set_facecolor("lightgray")
        for (y, x), ratio in np.ndenumerate(ratios):
            is_dark = not np.ma.is_masked(colored[y, x]) and not 0.15 < norm(ratio) < 0.85
            color = "white" if is_dark else "black"
            axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(tokens)), [f"{count:,}" for count in tokens], fontsize=13)
        axes.set_yticks(range(len(widths)), [f"{width:,}" for width in widths])
        axes.set_xlabel("tokens a step")
        axes.set_title(title, fontsize=16)
        axes.tick_params(length=0)
    left.set_ylabel("width of the model")
    figure.colorbar(image, ax=right, ticks=[0.5, 0.75, 1, 1.25, 1.5, 1.75, 2], format="%.2f",
                    label="speed of FP8 ÷ speed of BF16")
    write_below(figure, f"""\
gray: the FP8 step waits for Python (over {WAITS_FOR_PYTHON} × its time as a CUDA graph); such ratios scatter
two layers, vocabulary 1,024; {origin_of_rows(rows)}""")
    figure.savefig(path)


def describe_shape(text) -> str:
    """Return "32 × 1,024 tokens\n12 heads of 64" for "32x1024x12x12x64"."""
    batch, length, heads, kv_heads, width = map(int, text.split("x"))
    groups = f"\n{kv_heads} KV heads" if kv_heads != heads else ""
    return f"{batch} × {length:,} tokens\n{heads} heads of {width}{groups}"


@rc_context(FOR_A_TALK)
def draw_attention(result, path):
    """Draw the speed of the kernels of benchmark_attention.py alone: a group per shape, a bar per kernel."""
    found = {}  # {(shape, kernel): TFLOP/s}
    fp8_errors = []
    for row in result["rows"]:
        if row["part"] == "attention" and "both_tflops" in row:
            found[row["shape"], row["name"]] = row["both_tflops"]
            if row["name"].endswith("FP8"):
                fp8_errors += row["errors"].values()
    shapes = list(dict.fromkeys(shape for shape, _ in found))
    title = "Attention: FlashAttention 4 is the fastest BF16 kernel at all five shapes"
    figure, axes = make_figure(13, 7.2, title)
    width = 0.9 / len(ATTENTION_KERNELS)
    middle = (len(ATTENTION_KERNELS) - 1) / 2
    for number, (name, (label, color)) in enumerate(ATTENTION_KERNELS.items()):
        x = [group + (number - middle) * width for group in range(len(shapes))]
        speeds = [found.get((shape, name), 0) for shape in shapes]
        bars = axes.bar(x, speeds, 0.94 * width, color=color, label=label)
        labels = [f"{speed:.0f}" if speed else "–" for speed in speeds]
        axes.bar_label(bars, labels, fontsize=14, padding=1)
    axes.set_xticks(range(len(shapes)), map(describe_shape, shapes), fontsize=14)
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.01)
    axes.set_ylabel("TFLOP/s, forward and backward")
    axes.legend(loc="upper left")
    write_below(figure, f"""\
causal; –: does not run; errors of the FP8 kernel: up to {100 * max(fp8_errors):.1f} %; \
{result['machine']}, {result['date']}""")
    figure.savefig(path)


def describe_difference(row) -> str:
    """Return the durations of a step together and alone, and the terms of the difference."""
    alone, together = (statistics.mean(rank["step_ms"][name] for rank in row["ranks"])
                       for name in ("alone", "together"))
    terms = sorted(kernel_times.mean_terms(row).items(), key=lambda item: -item[1])
    listed = [f"{term} {ms:+.1f}" for term, ms in terms if abs(ms) >= 0.05]
    return f"{row['parallel']}, {together:.1f} ms, alone {alone:.1f}: {', '.join(listed)}"


def draw_ranks(axes, row):
    """Draw two lanes for each rank: kernels that compute, and below them those that communicate."""
    for rank, timeline in enumerate(row["timeline"]):
        intervals = kernel_times.read_timeline(timeline)
        for kind, color in KERNEL_COLORS.items():
            bars = [(start / 1e3, duration / 1e3) for name, start, duration in intervals if name == kind]
            lane = (rank + 0.55, 0.25) if kind == "communication" else (rank, 0.5)
            axes.broken_barh(bars, lane, facecolors=color, lw=0)
    axes.set_yticks([rank + 0.4 for rank in range(row["gpus"])],
                    [f"GPU {rank}" for rank in range(row["gpus"])])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_title(describe_difference(row), fontsize=14, loc="left")


@rc_context(FOR_A_TALK)
def draw_rank_trace(rows, path):
    """Draw a step on all GPUs, kernel by kernel, for each layout at the first row's shape."""
    rows = [row for row in rows if "error" not in row]
    rows = [row for row in rows if (row["shape"], row["gpus"]) == (rows[0]["shape"], rows[0]["gpus"])]
    costs = []
    for row in rows:
        terms = kernel_times.mean_terms(row)
        timed = row["ms_all"] - row["ms_one"]
        costs.append(f"{row['parallel']} {sum(terms.values()):+.1f} ms (timed {timed:+.1f}), "
                     f"mostly {max(terms, key=terms.get)}")
    title = f"What a step on {rows[0]['gpus']} GPUs takes longer than alone, in a trace:\n" + "\n".join(costs)
    lanes = [row["gpus"] for row in rows]
    figure, axes = make_figure(
        13, 3.4 + 0.5 * len(rows) + 0.55 * sum(lanes), title, 1 + len(rows), 1, height_ratios=[0.5, *lanes])
    for row, axes_of_row in zip(rows, axes[1:]):
        draw_ranks(axes_of_row, row)
        axes_of_row.sharex(axes[1])
    axes[-1].set_xlim(left=0)
    axes[-1].set_xlabel("ms")
    axes[0].axis("off")
    handles = [Patch(color=color, label=kind) for kind, color in KERNEL_COLORS.items()]
    axes[0].legend(handles=handles, loc="center", ncols=len(handles), fontsize=14)
    write_below(figure, f"""\
{rows[0]['shape']}, {rows[0]['recipe']} scaling; white: no kernel runs
differences in ms, means over the GPUs, of steps under the profiler
{origin_of_rows(rows[:1])}""")
    figure.savefig(path)


def draw_health(result, path):
    health.plot(result["records"], path, result["title"])


PICTURES = {  # {name of the PNG in results/: (name of the JSON, function)}
    "stack": ("stack", draw_stack), "crossover": ("crossover", draw_crossover),
    "attention": ("attention", draw_attention), "fp8_health": ("fp8_health", draw_health),
    "loss_gap": ("paired", draw_loss_gap), "rank_trace": ("rank_trace", draw_rank_trace),
}


def draw_picture(name, path) -> None:
    """Draw one of PICTURES from the committed JSON."""
    json_name, draw = PICTURES[name]
    draw(json.loads((ROOT / f"results/{json_name}.json").read_text()), path)


def main() -> None:
    for name in PICTURES:
        draw_picture(name, ROOT / f"results/{name}.png")


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/pictures.py"))
