"""From the rows of benchmark_te.py to its pictures and to the README's table.

    python results/speed_report.py results/speed.json                            # draws speed.png again, prints the table
    python results/speed_report.py results/stack.json results/crossover.json     # draws these

Here too: the file of rows.
"""

import datetime
import json
import os
import shlex
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fp8  # noqa: E402

NAMES = {"plain": "nanoGPT, compiled", "plain-graph": "nanoGPT, CUDA graphs", "bf16": "ours, BF16", "fp8": "ours, FP8", "fp8-current": "ours, FP8 current", "fp8-block": "ours, FP8 block",
         "hf-llama": "transformers' Llama, compiled"}


class Rows(list):
    """Rows in a JSON file, written after each. One replaces a row of an earlier run with the same `keys`; others stay."""

    def __init__(self, path, keys, argv, program="benchmark_te.py"):
        self.path, self.keys = path, keys
        self.origin = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", "torch": torch.__version__,
                       "te": "te_reference" if fp8.IS_REFERENCE else fp8.transformer_engine.__version__,
                       "date": datetime.date.today().isoformat(),
                       "command": shlex.join(["python", program, *(sys.argv[1:] if argv is None else argv)])}
        if path and path.exists():
            try:
                self += json.loads(path.read_text())
                [[row[key] for key in keys] for row in self]
            except (TypeError, KeyError, ValueError) as error:
                raise ValueError(f"--json {path} holds something else than rows with {', '.join(keys)}; name another file") from error

    def has(self, row) -> bool:
        """Whether a row with these keys was measured already."""
        return any(all(other[key] == row[key] for key in self.keys) and "error" not in other for other in self)

    def add(self, row):
        row = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in (row | self.origin).items()}
        self[:] = [other for other in self if any(other[key] != row[key] for key in self.keys)] + [row]
        if self.path:
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self, indent=1) + "\n")
            os.replace(temporary, self.path)


def groups_of(rows):
    """{(shape, block): {arm: row}} of the rows without an error."""
    groups = {}
    for row in rows:
        if "error" not in row:
            groups.setdefault((row["shape"], row["block"]), {})[row["arm"]] = row
    return groups


def table(rows) -> str:
    """The README's Markdown table: thousands of tokens a second, in brackets against nanoGPT's and the MFU."""
    groups = groups_of(rows)
    arms = [arm for arm in NAMES if any(arm in group for group in groups.values())]
    titles = ["shape, block", *(NAMES[arm] for arm in arms), "GiB, nanoGPT → FP8", "FP8's floor"]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for (shape, block), group in groups.items():
        cells = []
        for row in (group.get(arm, group.get(f"{arm}-checkpointing")) for arm in arms):
            notes = [] if row is None else ([f"{row['ratio_to_plain']:.2f} ×"] if row["ratio_to_plain"] and row["arm"] != "plain" else []) + (
                [f"{100 * row['mfu']:.1f} %"] if row["mfu"] else [])
            cells.append("" if row is None else f"{row['tokens_per_s'] / 1e3:.1f} k" + (f" ({', '.join(notes)})" if notes else ""))
        peaks = [f"{group[arm]['peak_gib']:.1f}" for arm in ("plain", "fp8") if arm in group and group[arm]["peak_gib"]]
        floor = f"{group['fp8']['floor_ms']:.1f} of {group['fp8']['ms']:.1f} ms" if "fp8" in group else ""
        lines.append(f"| {shape}, {block} | " + " | ".join([*cells, " → ".join(peaks), floor]) + " |")
    return "\n".join(lines)


def _axes(width, height, columns=1):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _origin(rows):
    return "; ".join(dict.fromkeys(f"{row['gpu']}, torch {row['torch']}, TE {row['te']}, {row['date']}" for row in rows))


def draw_speed(rows, path):
    """Bars: tokens a second against plain's, by shape; the black line across a bar: what the ceilings would allow (floor_ms)."""
    groups = {name: group for name, group in groups_of(rows).items() if "plain" in group}
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if any(arm in group for group in groups.values())]
    if not groups:
        return
    figure, axes = _axes(max(7, 1 + 1.6 * len(groups)), 5)
    for number, arm in enumerate(arms):
        place = [(x, group[arm]) for x, group in enumerate(groups.values()) if arm in group]
        xs = [x + (number - (len(arms) - 1) / 2) * 0.85 / len(arms) for x, _ in place]
        heights = [1.0 if arm == "plain" else row["ratio_to_plain"] for _, row in place]
        bars = axes.bar(xs, heights, 0.8 / len(arms), label=NAMES.get(arm, arm), color=f"C{number % 10}", edgecolor="white",
                        hatch="//" if arm.endswith("-eager") else None)
        axes.bar_label(bars, [f"{height:.2f}" for height in heights], rotation=90, fontsize=7, padding=2)
        limits = [height * row["ms"] / row["floor_ms"] for height, (_, row) in zip(heights, place)]
        axes.hlines(limits, [x - 0.4 / len(arms) for x in xs], [x + 0.4 / len(arms) for x in xs], color="black", lw=1,
                    label=None if number else "were all of it at the GPU's ceilings (floor_ms)")
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(range(len(groups)), [f"{shape}\n{block}\n{group['plain']['tokens_per_s'] / 1e3:.0f} k tokens/s"
                                         for (shape, block), group in groups.items()])
    axes.set(ylabel="tokens/s against nanoGPT's, compiled", ylim=(0, 1.12 * axes.get_ylim()[1]))
    axes.set_title(_origin(rows), fontsize=9)
    figure.legend(fontsize=7, ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=130)


def draw_stack(rows, path):
    """Bars: tokens a second, measure by measure."""
    rows = [row for row in rows if "error" not in row]
    figure, axes = _axes(9.5, 4.4)
    bars = axes.bar([row["label"] for row in rows], [row["tokens_per_s"] / 1e3 for row in rows],
                    color=["C7" if row["arm"].startswith("plain") else "C2" for row in rows])
    axes.bar_label(bars, [f"{row['tokens_per_s'] / 1e3:.0f} k\n{row['tokens_per_s'] / rows[0]['tokens_per_s']:.2f} ×" for row in rows], fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(y=0.15)
    axes.set(ylabel="thousand tokens/s")
    axes.set_title(f"{rows[0]['shape']}, {_origin(rows)}\ngrey: plain PyTorch; green: with Transformer Engine, each bar the one before and more",
                   fontsize=9)
    figure.savefig(path, dpi=130)


def draw_crossover(rows, path):
    """Two heat maps of FP8 ÷ BF16 over width and tokens a step; the black line is where they are equally fast."""
    import numpy as np

    widths, tokens = (sorted({row[key] for row in rows}) for key in ("width", "tokens"))
    figure, both = _axes(11, 4.8, 2)
    for axes, name, title in zip(both, ("eager", "graph"), ("launched from Python", "a step as one CUDA graph")):
        ratio = np.full((len(widths), len(tokens)), np.nan)
        for row in rows:
            ratio[widths.index(row["width"]), tokens.index(row["tokens"])] = row[name] or np.nan
        image = axes.imshow(ratio, origin="lower", cmap="RdBu", vmin=0.5, vmax=1.5, aspect="auto")
        for y, x in np.ndindex(ratio.shape):
            value = ratio[y, x]
            axes.text(x, y, "" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", fontsize=8,
                      color="white" if abs(value - 1) > 0.4 else "black")
        if min(ratio.shape) > 1 and np.nanmin(ratio) < 1 < np.nanmax(ratio):
            axes.contour(ratio, levels=[1.0], colors="black", linewidths=2)
        axes.set_xticks(range(len(tokens)), tokens)
        axes.set_yticks(range(len(widths)), widths)
        axes.set(xlabel="tokens a step", ylabel="width", title=title)
    figure.colorbar(image, ax=both, label="tokens/s, FP8 ÷ BF16", extend="both")
    figure.suptitle(f"two layers, vocabulary 1,024; {_origin(rows)}", fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths or not all(path.is_file() for path in paths):
        print("speed_report.py: name files that benchmark_te.py --json wrote: results/speed.json", file=sys.stderr)
        sys.exit(2)
    for path in paths:
        found = json.loads(path.read_text())
        if "label" in found[0]:
            draw_stack(found, path.with_suffix(".png"))
        elif "width" in found[0]:
            draw_crossover(found, path.with_suffix(".png"))
        elif "shape" in found[0]:
            draw_speed(found, path.with_suffix(".png"))
            print(table(found))
