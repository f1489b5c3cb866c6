"""From the rows of benchmark_te.py to its pictures and to the README's table.

    python results/speed_report.py results/speed.json                            # draws speed.png again, prints the table
    python results/speed_report.py results/stack.json results/crossover.json     # draws these

Here too: the file of rows, the least time of a step (`floor_ms`), and which kernel belongs to which class (`KERNELS`).
"""

import datetime
import json
import os
import re
import shlex
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fp8  # noqa: E402

NAMES = {"plain": "nanoGPT, compiled", "bf16": "ours, BF16", "fp8": "ours, FP8", "fp8-current": "ours, FP8 current", "fp8-block": "ours, FP8 block",
         "hf-llama": "transformers' Llama, compiled"}
KERNELS = {  # class: pattern of kernel names; the first that matches counts
    "optimizer": "multi_tensor|adam|lpnorm|l2norm",
    "attention": "flash|fmha|attention|sdpa|rope|rotary",
    "loss": "^_(forward|backward)(_fp8)?_kernel|cross_entropy|softmax|nll|element_mul",
    "GEMM FP8": r"nvjet_(sm\d+_)?[qr]|gemm.*(e4m3|e5m2|f8)|(e4m3|e5m2).*gemm",
    "GEMM BF16": "nvjet|gemm|cutlass|splitk|xmma|triton_tem|aten::(add)?b?mm",
    "activation": "gelu|silu|swiglu|gated|tanh|sigmoid",
    "norm": "norm|rsqrt|ln_(fwd|bwd)",
    "cast/transpose": "transpose|quantiz|cast|amax|delayed_scaling|fp8",
    "copy/concat": r"direct_copy|memcpy|memset|catarray|fused_cat|fillfunctor|aten::(copy_|cat|fill_|zero_)",
    "embedding": "embedding|index",
    "elementwise/residual": "elementwise|triton_poi|triton_red|triton_per|reduce_kernel|aten::(add|mul|sum)",
}


def kernel_class(name: str) -> str:
    return next((kind for kind, pattern in KERNELS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def floor_ms(config, B, T, fp8, ceilings, optimizer_bytes=28) -> float:
    """Least time of a step on B sequences of T tokens, were every part at its ceiling and nothing else there. The sum of:

    products     6·B·T·(L·P + V·C) FLOPs at the FP8 or BF16 rate; P = C·(Hq + 2·Hkv)·D + Hq·D·C + 2·C·I (SwiGLU: 3·C·I), the block's weights
    attention    3.5 times the forward pass's 2·B·T²·Hq·D a layer (a causal half of two products) at the BF16 rate: 7·B·T²·Hq·D·L
    optimizer    28 bytes a parameter: the BF16 gradient read twice (norm, update); weight and 16-bit remainder, and two float32 moments, read
                 and written
    loss         4·B·T·V bytes: BF16 logits read, their gradient written

    config: an OptimizedConfig; ceilings: bf16_tflops, fp8_tflops, copy_tbs (read and written). Biases and norms are left out.
    """
    q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    block = config.n_embd * (2 * q + 2 * kv + config.n_inner * (3 if config.activation == "swiglu" else 2))
    head = config.vocab_size * config.n_embd
    parameters = config.n_layer * block + head * (1 if config.tie_embeddings else 2)
    seconds = 6 * B * T * (config.n_layer * block + head) / (1e12 * ceilings["fp8_tflops" if fp8 else "bf16_tflops"])
    seconds += 7 * B * T**2 * q * config.n_layer / (1e12 * ceilings["bf16_tflops"])
    seconds += (optimizer_bytes * parameters + 4 * B * T * config.vocab_size) / (1e12 * ceilings["copy_tbs"])
    return 1e3 * seconds


class Rows(list):
    """Rows in a JSON file, written after each. One replaces a row of an earlier run with the same `keys`; others stay."""

    def __init__(self, path, keys, argv):
        self.path, self.keys = path, keys
        self.origin = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", "torch": torch.__version__,
                       "te": "te_reference" if fp8.IS_REFERENCE else fp8.transformer_engine.__version__,
                       "date": datetime.date.today().isoformat(),
                       "command": shlex.join(["python", "benchmark_te.py", *(sys.argv[1:] if argv is None else argv)])}
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
    lines = ["| shape, block | " + " | ".join(NAMES[arm] for arm in arms) + " | GiB, nanoGPT → FP8 | FP8's floor |", "| --- " * (len(arms) + 3) + "|"]
    for (shape, block), group in groups.items():
        cells = []
        for row in map(group.get, arms):
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
        bars = axes.bar(xs, heights, 0.8 / len(arms), label=NAMES.get(arm, arm), color=f"C{number % 10}", hatch="//" if arm.endswith("-eager") else None,
                        edgecolor="white")
        axes.bar_label(bars, [f"{height:.2f}" for height in heights], rotation=90, fontsize=7, padding=2)
        limits = [height * row["ms"] / row["floor_ms"] for height, (_, row) in zip(heights, place)]
        axes.hlines(limits, [x - 0.4 / len(arms) for x in xs], [x + 0.4 / len(arms) for x in xs], color="black", lw=1)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(range(len(groups)), [f"{shape}\n{block}\n{group['plain']['tokens_per_s'] / 1e3:.0f} k tokens/s" for (shape, block), group in groups.items()])
    axes.set(ylabel="tokens/s against nanoGPT's, compiled", ylim=(0, 1.12 * axes.get_ylim()[1]))
    axes.set_title(_origin(rows), fontsize=9)
    figure.legend(fontsize=7, ncols=4, loc="outside lower center")
    figure.savefig(path, dpi=130)


def draw_stack(rows, path):
    """Bars: tokens a second, measure by measure."""
    rows = [row for row in rows if "error" not in row]
    figure, axes = _axes(9.5, 4.4)
    bars = axes.bar([row["label"] for row in rows], [row["tokens_per_s"] / 1e3 for row in rows], color=["C7" if row["arm"].startswith("plain") else "C2" for row in rows])
    axes.bar_label(bars, [f"{row['tokens_per_s'] / 1e3:.0f} k\n{row['tokens_per_s'] / rows[0]['tokens_per_s']:.2f} ×" for row in rows], fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(y=0.15)
    axes.set(ylabel="thousand tokens/s")
    axes.set_title(f"{rows[0]['shape']}, {_origin(rows)}\ngrey: plain PyTorch; green: with Transformer Engine, each bar the one before and more", fontsize=9)
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
            axes.text(x, y, "" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if abs(value - 1) > 0.4 else "black")
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
