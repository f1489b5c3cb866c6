"""Text, Markdown tables and the picture of benchmark_attention.py's rows."""

import math

from bench.attention import FP8_KERNEL
from bench.report import markdown


def worst_error(row):
    return max((math.inf if e is None else e) for e in row["errors"].values())


def verdict(row):
    """Return "" if the row agrees with float64 within rounding.

    The FP8 kernel may round more than its limit allows, which is said; any other such error is a mistake.
    """
    if row["agrees"]:
        return ""
    if row["name"] == FP8_KERNEL and worst_error(row) < 0.2:
        return f"errs by {worst_error(row):.0%}"
    return "WRONG"


def text_of(row):
    """Return a row of the printed table."""
    if "why_not" in row:
        return f"{row['name']:32}{row['why_not']}"
    tflops = f"{row['both_tflops']:9.1f}" if "both_tflops" in row else " " * 9
    gib = f"{row['peak_gib']:8.2f}" if row["peak_gib"] is not None else " " * 8
    times = f"{row['forward_ms']:9.3f}{row['backward_ms']:10.3f}{row['both_ms']:9.3f}"
    return f"{row['name']:32}{times}{tflops}{gib}{worst_error(row):10.1e}  {verdict(row)}".rstrip()


def kernels_table(result) -> str:
    """Return the Markdown table of kernels alone: ms of forward and backward, TFLOP/s in brackets.

    An empty cell did not run.
    """
    names = {"by hand": "by hand", "SDPA, FlashAttention 2": "SDPA, FlashAttention 2",
             "SDPA, cuDNN": "SDPA, cuDNN", "te.DotProductAttention": "`te.DotProductAttention`",
             "flash-attn 4": "FlashAttention 4", FP8_KERNEL: "TE, FP8"}
    rows = [row for row in result["rows"] if row["part"] == "attention" and "why_not" not in row]
    cells = {(row["shape"], row["name"]): f"{row['both_ms']:.2f} ({row['both_tflops']:.0f})" for row in rows}
    lines = [[shape, *(cells.get((shape, name), "") for name in names)]
             for shape in dict.fromkeys(row["shape"] for row in rows)]
    return markdown(["forward and backward, ms", *names.values()], lines)


def blocks_table(result) -> str:
    """Return the Markdown table of norm, QKV GEMM, attention and projection together: ms of both passes."""
    rows = [row for row in result["rows"] if row["part"] == "block" and "why_not" not in row]
    arms = list(dict.fromkeys(row["name"].rpartition(", ")[0] for row in rows))
    ms = {(row["shape"], row["precision"], row["name"].rpartition(", ")[0]): row["both_ms"] for row in rows}
    lines = [[f"{shape}, {precision.upper()}", *(f"{ms[shape, precision, arm]:.2f}" for arm in arms)]
             for shape, precision in dict.fromkeys((shape, precision) for shape, precision, _ in ms)]
    return markdown(["in a block, ms", *arms], lines)


def color_of(row):
    if not row.get("agrees"):
        return "red"
    return "tab:green" if row.get("precision") == "fp8" else "tab:blue"


def label_of(row):
    """Return the text beside a bar."""
    if "why_not" in row:
        return row["why_not"][:90]
    label = f"{row['both_ms']:.3g} ms"
    if "both_tflops" in row:
        label += f", {row['both_tflops']:.0f} TFLOP/s"
    return label + (f", {verdict(row)}" if verdict(row) else "")


def draw_panel(axis, title, rows):
    """Draw a bar per row. Bars longer than five times the shortest are cut off."""
    limit = 5 * min((row["both_ms"] for row in rows if "both_ms" in row), default=1)
    for y, row in enumerate(rows):
        forward, both = (min(row.get(key, 0), limit) for key in ("forward_ms", "both_ms"))
        axis.barh(y, both, color=color_of(row), alpha=0.5)
        axis.barh(y, forward, color=color_of(row))
        axis.text(both, y, " " + label_of(row), va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axis.set_xlim(right=1.25 * axis.get_xlim()[1])
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9)


def plot(result, path):
    """Draw what benchmark_attention.py --json writes: a panel per shape, a bar per kernel.

    A bar is ms of forward (darker) and backward.
    """
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {}
    for row in result["rows"]:
        panels.setdefault(f"{row['part']} {row['shape']}", []).append(row)
    count = max(1, len(panels))
    figure, axes = plt.subplots(count, figsize=(11, 1 + 2.6 * count), layout="constrained", squeeze=False)
    for axis, (title, rows) in zip(axes.flat, panels.items()):
        draw_panel(axis, title, rows)
    unless = "" if result["times_mean_something"] else "; on a CPU they mean nothing"
    figure.suptitle(f"{result['machine']}: causal attention, forward (darker) + backward, ms{unless}\n"
                    "batch x length x heads x KV heads x head width", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
