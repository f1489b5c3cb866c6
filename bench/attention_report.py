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


BLOCK_NAMES = {"sdpa": "SDPA", "te": "te.DotProductAttention", "packed": "flash-attn, packed QKV",
               "flash, not packed": "flash-attn, separate q, k, v"}
COLORS = {"BF16": "tab:blue", "FP8": "tab:green", "beyond the error limit": "tab:red"}
LONGEST = 6  # bars longer than this multiple of the shortest are drawn with a break


def color_of(row):
    if not row.get("agrees"):
        return COLORS["beyond the error limit"]
    return COLORS["FP8" if row.get("precision") == "fp8" else "BF16"]


def name_of(row):
    """Return the name beside a bar."""
    arm, _, precision = row["name"].rpartition(", ")
    return f"{BLOCK_NAMES[arm]}, {precision.upper()}" if row["part"] == "block" else row["name"]


def label_of(row):
    """Return the text after a bar. The exception of a kernel that did not run is in the JSON."""
    if "why_not" in row:
        return "not installed" if row["why_not"].startswith("not installed") else "does not run at this shape"
    label = f"{row['both_ms']:.3g} ms"
    if "both_tflops" in row:
        label += f", {row['both_tflops']:.0f} TFLOP/s"
    return label + (f", {verdict(row)}" if verdict(row) else "")


def title_of(part, shape):
    """Return a panel's title: "in a block: 32 x 1,024 tokens, 12 heads of 64"."""
    batch, length, heads, kv_heads, width = map(int, shape.split("x"))
    groups = f", {kv_heads} KV heads" if kv_heads != heads else ""
    where = "in a block" if part == "block" else "alone"
    return f"{where}: {batch} × {length:,} tokens, {heads} heads of {width}{groups}"


def draw_break(axis, x, y, limit):
    """Draw a white gap between two slanted lines through a bar."""
    slant, gap, top = 0.012 * limit, 0.02 * limit, 0.5
    axis.fill([x - slant, x - slant + gap, x + slant + gap, x + slant], [y + top, y + top, y - top, y - top],
              color="white", zorder=3)
    for at in (x, x + gap):
        axis.plot([at - slant, at + slant], [y + top, y - top], color="black", lw=1, zorder=4)


def draw_panel(axis, title, rows):
    """Draw a bar per row: forward, then backward. The longest bars are broken."""
    limit = LONGEST * min((row["both_ms"] for row in rows if "both_ms" in row), default=1)
    for y, row in enumerate(rows):
        both = row.get("both_ms", 0)
        end = min(both, limit)
        forward = min(row.get("forward_ms", 0), 0.85 * limit)  # as long as it is, or up to the break
        axis.barh(y, end, color=color_of(row), alpha=0.45)
        axis.barh(y, forward, color=color_of(row))
        if both > limit:
            draw_break(axis, 0.9 * limit, y, limit)
        gray = {"color": "gray"} if "why_not" in row else {}
        axis.text(end, y, " " + label_of(row), va="center", fontsize=8, **gray)
    axis.set_yticks(range(len(rows)), [name_of(row) for row in rows], fontsize=8)
    drawn = [min(row["both_ms"], limit) for row in rows if "both_ms" in row]
    axis.set_xlim(right=1.5 * max(drawn, default=1))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("ms", fontsize=8, loc="right", labelpad=-2)
    axis.set_title(title, fontsize=9)


def plot(result, path):
    """Draw what benchmark_attention.py --json writes: a panel per shape, a bar per kernel.

    A bar is ms of forward (darker) and backward. Kernels that ran at no shape are left out.
    """
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    ran = {row["name"] for row in result["rows"] if "both_ms" in row}
    panels = {}
    for row in result["rows"]:
        if row["name"] in ran:
            panels.setdefault(title_of(row["part"], row["shape"]), []).append(row)
    columns, lines = min(2, max(1, len(panels))), max(1, math.ceil(len(panels) / 2))
    figure, axes = plt.subplots(lines, columns, figsize=(6.8 * columns, 1.2 + 2.3 * lines),
                                layout="constrained", squeeze=False)
    for axis, (title, rows) in zip(axes.flat, panels.items()):
        draw_panel(axis, title, rows)
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    keys = [Patch(color=color, label=label) for label, color in COLORS.items()]
    keys += [Patch(color="black", label="forward"), Patch(color="black", alpha=0.45, label="backward")]
    figure.legend(handles=keys, ncols=5, fontsize=9, frameon=False, loc="outside lower center")
    unless = "" if result["times_mean_something"] else "; on a CPU the times mean nothing"
    title = f"causal attention, ms (a bar cut by // is longer than drawn); {result['machine']}{unless}"
    figure.suptitle(title, fontsize=10, color="dimgray")
    figure.savefig(path, dpi=110)
    plt.close(figure)
