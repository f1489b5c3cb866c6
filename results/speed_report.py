"""From the rows of benchmark_te.py to its pictures and to the pages' tables (`python results/pages.py` makes all of them anew); and the file of
rows itself."""

import datetime
import json
import os
import re
import shlex
import sys

import torch

import fp8

NAMES = {"plain": "nanoGPT, compiled", "plain-graph": "nanoGPT, CUDA graphs", "bf16": "ours, BF16", "fp8": "ours, FP8",
         "fp8-current": "ours, FP8 current", "fp8-block": "ours, FP8 block",
         "fp8-block-hybrid": "ours, FP8 block, E5M2 gradients", "hf-llama": "transformers' Llama, compiled"}
IN_PICTURES = NAMES | {"fp8-te_block": "FP8, TE's modules", "fp8-e4m3": "ours, FP8 E4M3", "fp8-bf16_moments": "ours, FP8, BF16 moments"}


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
            if self.origin["gpu"] == "CPU" and any(row.get("gpu", "CPU") != "CPU" for row in self):
                raise ValueError(f"--json {path} holds what a GPU was measured at, and there is none here; name another file")

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
    """{(shape, block): {arm: row}} of the rows without an error. An arm that accumulates or checkpoints is a group of its own: "fp8-accum4" is
    "fp8" of (shape, "block, 4 micro-batches"). A row of "fp8-block" without a format was measured with E5M2
    gradients and is "fp8-block-hybrid"."""
    groups = {}
    for row in rows:
        if "error" in row:
            continue
        arm, accumulated, checkpointed = re.fullmatch(r"(.*?)(?:-accum(\d+))?(-checkpointing)?", row["arm"]).groups()
        arm = "fp8-block-hybrid" if arm == "fp8-block" and "fp8_format" not in row else arm
        block = row["block"] + (f", {accumulated} micro-batches" if accumulated else "") + (", checkpointing" if checkpointed else "")
        groups.setdefault((row["shape"], block), {})[arm] = row
    return groups


def table(rows) -> str:
    """The README's Markdown table: thousands of tokens a second, in brackets against nanoGPT's and the MFU."""
    groups = groups_of(rows)
    arms = [arm for arm in NAMES if any(arm in group for group in groups.values())]
    titles = ["shape, block", *(NAMES[arm] for arm in arms), "GiB, nanoGPT → FP8", "FP8's floor"]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for (shape, block), group in groups.items():
        cells = []
        for row in (group.get(arm) for arm in arms):
            notes = [] if row is None else ([f"{row['ratio_to_plain']:.2f} ×"] if row["ratio_to_plain"] and row["arm"] != "plain" else []) + (
                [f"{100 * row['mfu']:.1f} %"] if row["mfu"] else [])
            cells.append("" if row is None else f"{row['tokens_per_s'] / 1e3:.1f} k" + (f" ({', '.join(notes)})" if notes else ""))
        peaks = [f"{group[arm]['peak_gib']:.1f}" for arm in ("plain", "fp8") if arm in group and group[arm]["peak_gib"]]
        floor = f"{group['fp8']['floor_ms']:.1f} of {group['fp8']['ms']:.1f} ms" if "fp8" in group else ""
        lines.append(f"| {shape}, {block} | " + " | ".join([*cells, " → ".join(peaks), floor]) + " |")
    return "\n".join(lines)


def compile_table(rows) -> str:
    """Of benchmark_te.py --compile, as Markdown: thousands of tokens a second, in brackets graph breaks and seconds of compiling; below the table
    why a pair failed."""
    models, reasons = list(dict.fromkeys(row["model"] for row in rows)), []
    lines = ["| `torch.compile` mode, recipe | " + " | ".join(f"`{model}`" for model in models) + " |", "| --- " * (len(models) + 1) + "|"]
    for mode, recipe in dict.fromkeys((row["mode"], row["recipe"]) for row in rows):
        cells = []
        for model in models:
            row = next((row for row in rows if (row["mode"], row["recipe"], row["model"]) == (mode, recipe, model)), None)
            if row is None or row.get("error", "").startswith("not run"):
                cells.append("")
            elif "error" in row:
                reasons += [row["error"]] * (row["error"] not in reasons)
                cells.append(f"fails, {reasons.index(row['error']) + 1}")
            else:
                cells.append(f"{row['tokens_per_s'] / 1e3:.0f} k" + ("" if mode == "eager" else f" ({row['graph_breaks']}, {row['compile_s']:.0f} s)"))
        lines.append(f"| {'not compiled' if mode == 'eager' else mode}, {recipe} | " + " | ".join(cells) + " |")
    return "\n".join(lines + [""] * bool(reasons) + [f"{number}. `{reason}`" for number, reason in enumerate(reasons, 1)])


def _axes(width, height, columns=1, **options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


def _origin(rows):
    return "; ".join(dict.fromkeys(f"{row['gpu']}, torch {row['torch']}, TE {row['te']}, {row['date']}" for row in rows))


def draw_speed(rows, path):
    """Bars up or down from nanoGPT's speed, by shape; on the right, tokens a second of shapes that nanoGPT was not measured at. The black line:
    what the GPU's ceilings would allow (floor_ms)."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    groups = groups_of(rows)
    parts = [{name: group for name, group in groups.items() if ("plain" in group) == against} for against in (True, False)]
    arms = [arm for arm in dict.fromkeys([*NAMES, *(arm for group in groups.values() for arm in group)])
            if arm != "plain" and any(arm in group for group in groups.values())]
    looks = {arm: dict(facecolor=f"C{number % 10}", hatch="//" if arm.endswith("-eager") else "xx" if number >= 10 else None, edgecolor="white")
             for number, arm in enumerate(arms)}
    if not arms:
        return
    sizes = [sum(map(len, part.values())) + 4 for part in parts if part]
    figure, panels = _axes(max(7, 0.25 * sum(sizes)), 5.5, len(sizes), squeeze=False, width_ratios=sizes)
    for axes, part in zip(panels[0], filter(None, parts)):
        against, x, ticks = part is parts[0], 0, []
        for (shape, block), group in part.items():
            here = [arm for arm in arms if arm in group]
            own = [f"{group['plain']['tokens_per_s'] / 1e3:.0f} k"] if against else []
            ticks.append((x + (len(here) - 1) / 2, "\n".join([shape, *block.split(", "), *own])))
            for arm in here:
                row, start = group[arm], 1 if against else 0
                height = (row["ratio_to_plain"] or row["tokens_per_s"] / group["plain"]["tokens_per_s"]) if against else row["tokens_per_s"] / 1e3
                label = f"{height:.2f}" if against else f"{height:.1f} k" + (f"\nMFU\n{100 * row['mfu']:.1f} %" if row["mfu"] else "")
                bar = axes.bar(x, height - start, 0.9, bottom=start, **looks[arm])
                axes.bar_label(bar, [label], fontsize=8, padding=2)
                axes.hlines(height * row["ms"] / row["floor_ms"], x - 0.45, x + 0.45, color="black", lw=1.5)
                x += 1
            x += 1 if against else 2
        axes.set_xticks(*zip(*ticks), fontsize=8)
        if against:
            axes.axhline(1, color="black", lw=0.8)
            axes.margins(x=0.01)
            axes.set(yscale="log", ylabel="tokens/s against nanoGPT's, compiled")
            axes.set_xlabel("the last line: nanoGPT's tokens/s", fontsize=8)
            low, high = axes.get_ylim()
            axes.set_yticks([at for at in (0.125, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if low < at < high])
            axes.yaxis.set_major_formatter("{x:g} ×")
            axes.minorticks_off()
        else:
            axes.margins(x=0.25)
            axes.set_ylabel("thousand tokens/s")
    keys = [Line2D([], [], color="black", lw=1.5, label="were all of it at the GPU's ceilings (floor_ms)")]
    keys += [Patch(label=IN_PICTURES.get(arm, arm), **looks[arm]) for arm in arms]
    figure.legend(handles=keys, fontsize=8, ncols=5, loc="outside lower center")
    figure.suptitle(_origin(rows), fontsize=9)
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
