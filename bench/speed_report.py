"""Make Markdown tables and pictures from the rows of benchmark_te.py (`python bench/pages.py` makes all of
them).

A table function takes the rows of one JSON file and returns Markdown. A cell that was not measured is empty.
"""

import itertools
import re
from types import SimpleNamespace

from bench.report import markdown
from nanote import models
from nanote.metrics import flops_per_token

NAMES = {
    "plain": "plain PyTorch, compiled", "plain-graph": "plain PyTorch, CUDA graphs", "bf16": "ours, BF16",
    "fp8": "ours, FP8", "fp8-current": "ours, FP8 current", "fp8-block": "ours, FP8 block",
    "fp8-block-hybrid": "ours, FP8 block, E5M2 gradients", "fp8-mxfp8": "ours, MXFP8",
    "fp8-nvfp4": "ours, NVFP4", "hf-llama": "transformers' Llama, compiled",
}
FORMATS = {"bf16": "BF16", "fp8-e4m3": "FP8 E4M3", "fp8": "FP8 HYBRID", "fp8-current": "FP8 current",
           "fp8-block": "FP8 block", "fp8-mxfp8": "MXFP8", "fp8-nvfp4": "NVFP4"}
UNCOMPILED = {"cuda-graph": "not compiled, CUDA graph", "eager": "not compiled"}  # modes of run_compile
PICTURED = ("plain", "plain-graph", "bf16", "fp8")  # arms of draw_speed, which has four at most
PLAIN_NAMES = {  # shape -> model and tokens a step
    "124m-b32": "GPT-2 124M\n32 × 1,024", "124m-b4": "GPT-2 124M\n4 × 1,024",
    "350m-b16": "GPT-2 350M\n16 × 1,024", "c2048": "width 2,048\n8 × 2,048",
    "c4096": "width 4,096\n4 × 4,096", "guide": "4 layers of 768\n8 × 512",
    "llama3-8b": "Llama-3 8B\n1 × 8,192",
}


def groups_of(rows):
    """Return {(shape, block): {arm: row}} of the rows without an error.

    An arm with gradient accumulation or checkpointing is in a separate group: "fp8-accum4" is "fp8" of
    (shape, "block, 4 micro-batches"). A row of "fp8-block" without a format was measured with E5M2 gradients
    and is "fp8-block-hybrid".
    """
    groups = {}
    for row in rows:
        if "error" in row:
            continue
        words = re.fullmatch(r"(.*?)(?:-accum(\d+))?(-checkpointing)?", row["arm"])
        arm, accumulated, checkpointed = words.groups()
        if arm == "fp8-block" and "fp8_format" not in row:
            arm = "fp8-block-hybrid"
        block = row["block"]
        if accumulated:
            block += f", {accumulated} micro-batches"
        if checkpointed:
            block += ", checkpointing"
        groups.setdefault((row["shape"], block), {})[arm] = row
    return groups


def speed_cell(row) -> str:
    """Return thousands of tokens per second; in brackets the ratio to the arm plain and the MFU."""
    if row is None:
        return ""
    notes = []
    if row["ratio_to_plain"] and row["arm"] != "plain":
        notes.append(f"{row['ratio_to_plain']:.2f} ×")
    if row["mfu"]:
        notes.append(f"{100 * row['mfu']:.1f} %")
    return f"{row['tokens_per_s'] / 1e3:.1f} k" + (f" ({', '.join(notes)})" if notes else "")


def table(rows) -> str:
    """Return the Markdown table of guide/speed.md: a row per shape and block, a column per arm."""
    groups = groups_of(rows)
    arms = [arm for arm in NAMES if any(arm in group for group in groups.values())]
    titles = ["shape, block", *(NAMES[arm] for arm in arms), "GiB, plain PyTorch → FP8",
              "FP8's speed of light"]
    lines = []
    for (shape, block), group in groups.items():
        measured = [group[arm] for arm in ("plain", "fp8") if arm in group]
        peaks = [f"{row['peak_gib']:.1f}" for row in measured if row["peak_gib"]]
        floor = f"{group['fp8']['floor_ms']:.1f} of {group['fp8']['ms']:.1f} ms" if "fp8" in group else ""
        cells = [speed_cell(group.get(arm)) for arm in arms]
        lines.append([f"{shape}, {block}", *cells, " → ".join(peaks), floor])
    return markdown(titles, lines, left=len(titles))


def formats_table(rows) -> str:
    """Return the table of models and formats: ms of forward, backward, both, and the training step.

    The last two have the speed-up over BF16 of the same model.
    """
    found = {}
    for row in rows:
        words = row["arm"].split("-")
        model = next((word for word in words if word in models.MODELS), "optimized")
        if "error" not in row and words[0] in ("bf16", "fp8"):
            total = row["forward_ms"] + row["backward_ms"] if "forward_ms" in row else None
            arm = "-".join(word for word in words if word != model)
            found.setdefault(model, {})[arm] = row | {"total_ms": total}
    lines = []
    for model, formats in found.items():
        bf16, known = formats.get("bf16", {}), [arm for arm in FORMATS if arm in formats]
        for arm in known + [arm for arm in formats if arm not in FORMATS]:
            row = formats[arm]
            speed_up = {part: bf16[part] / row[part] if bf16.get(part) and row[part] else None
                        for part in ("total_ms", "ms")}
            values = (row.get("forward_ms"), row.get("backward_ms"), row["total_ms"], speed_up["total_ms"],
                      row["ms"], speed_up["ms"])
            cells = ["" if value is None else f"{value:.2f}" for value in values]
            lines.append([model, FORMATS.get(arm, arm), *cells])
    titles = ["model", "precision", "forward", "backward", "total", "speed-up", "training step", "speed-up"]
    return markdown(titles, lines, left=2)


PARTS = {  # row of profile_table -> classes of kernels, what bounds them
    "GEMMs": (("GEMM FP8", "GEMM BF16"), "tensor cores, and power"),
    "attention": (("attention",), "tensor cores, in BF16"),
    "casts to FP8, transposes": (("cast/transpose",), "memory"), "loss": (("loss",), "memory: the logits"),
    "norms": (("norm",), "memory"), "activation": (("activation",), "memory"),
    "residual adds": (("elementwise/residual",), "memory"),
    "optimizer, clipping": (("optimizer",), "memory"),
    "copies, embedding, other": (("copy/concat", "embedding", "other"), "memory"),
}
VARIANTS = {"fp8": "FP8", "bf16": "BF16", "fp8-e4m3": "E4M3", "fp8-current": "current scaling",
            "fp8-block": "block scaling", "fp8-block-hybrid": "block scaling, E5M2 gradients",
            "fp8-bf16_moments": "BF16 moments", "fp8-te_block": "TE's blocks",
            "fp8-eager": "no CUDA graph"}


def profile_table(rows) -> str:
    """Return the table of a step's ms by class of kernel, at the smallest and largest shape and Llama-3."""
    wanted = [("124m-b32", "gpt2", "plain"), ("124m-b32", "gpt2", "fp8"), ("c4096", "gpt2", "plain"),
              ("c4096", "gpt2", "fp8"), ("llama3-8b", "own", "fp8")]
    profiled = {(row["shape"], row["block"], row["arm"]): row for row in rows if "profile_ms" in row}
    found = [profiled[key] for key in wanted if key in profiled]
    names = {"plain": "plain PyTorch, compiled", "fp8": "FP8"}
    titles = ["ms a step", *(f"{row['shape']}, {names[row['arm']]}" for row in found), "bound by"]
    columns = [profile_column(row) for row in found]
    bound_by = {name: bound for name, (_, bound) in PARTS.items()} | {"clock, MHz": "power"}
    lines = [[name, *(column[name] for column in columns), bound_by.get(name, "")]
             for name in dict.fromkeys(name for column in columns for name in column)]
    return markdown(titles, lines)


def profile_column(row) -> dict[str, str]:
    """Return {name of a line: its cell} for one row of `profile_table`."""

    def share(ms, whole):
        return f"{ms:.1f} ({100 * ms / whole:.0f} %)"

    def of_limit(field):
        return f"{row[field]:,.0f} of {row[f'{field}_limit']:,.0f}"

    parts = {name: sum(row["profile_ms"].get(kind, 0) for kind in kinds)
             for name, (kinds, _) in PARTS.items()}
    total, on_tensor_cores = sum(parts.values()), parts["GEMMs"] + parts["attention"]
    return {name: f"{ms:.1f}" for name, ms in parts.items()} | {
        "**GEMMs and attention**": share(on_tensor_cores, total),
        "**everything else**": share(total - on_tensor_cores, total),
        "training step": f"{row['ms']:.1f}",
        "speed of light (`floor_ms`)": share(row["floor_ms"], row["ms"]),
        "clock, MHz": of_limit("sm_mhz"),
        "power, W": of_limit("watts"),
    }


def variants_table(rows) -> str:
    """Return the table of the FP8 step with one change: ms, and the ratio to the FP8 step's speed."""
    groups = {key: group for key, group in groups_of(rows).items()
              if "fp8" in group and len(group.keys() & VARIANTS.keys()) > 1}
    arms = [arm for arm in VARIANTS if any(arm in group for group in groups.values())]
    lines = []
    for (shape, block), group in groups.items():
        ms = [group[arm]["ms"] if arm in group else None for arm in arms]
        cells = ["" if value is None else f"{value:.2f} ({ms[0] / value:.2f})" for value in ms]
        lines.append([f"{shape}, {block}", cells[0].partition(" ")[0], *cells[1:]])
    return markdown(["ms a step", *(VARIANTS[arm] for arm in arms)], lines)


def causal_share(row) -> float:
    """Return the FLOPs of a row's model with attention halved (6N + 6·L·C·T) ÷ those of its MFU."""
    config = SimpleNamespace(**row["model_config"], seq_len=row["model_config"]["n_positions"])
    flops = flops_per_token(row["parameters"], config)
    return 1 - 6 * config.n_layer * config.n_head * config.head_dim * config.seq_len / flops


def mfu_table(rows) -> str:
    """Return the table of the FP8 step's MFU in both conventions, and of its share of the roofline."""
    lines = []
    for row in rows:
        if row["arm"] == "fp8" and row["block"] != "modern" and row.get("mfu"):
            whole, halved = 100 * row["mfu"], 100 * row["mfu"] * causal_share(row)
            shares = (whole, halved, whole / 2, halved / 2, 100 * row["floor_ms"] / row["ms"])
            lines.append([row["shape"], *(f"{share:.1f} %" for share in shares)])
    titles = ["FP8 step", "MFU (6N + 12·L·C·T)", "MFU, attention halved", "of the FP8 peak",
              "of the FP8 peak, attention halved", "speed of light (roofline)"]
    return markdown(titles, lines)


def stack_table(rows) -> str:
    """Return the table of benchmark_te.py --stack: a row per change, in the order of adding them."""
    rows, lines = [row for row in rows if "error" not in row], []
    for before, row in zip([None, *rows], rows):
        speed, label = row["tokens_per_s"], " ".join(row["label"].split())
        step = f"{speed / before['tokens_per_s']:.2f}" if before else ""
        lines.append([label, f"{speed / 1e3:.0f}", step, f"{speed / rows[0]['tokens_per_s']:.2f}"])
    return markdown(["", "k tokens/s", "times the one before", "times the first"], lines)


def crossover_table(rows) -> str:
    """Return the table of benchmark_te.py --sweep: the width from which FP8 is 1.02 times as fast."""
    lines, rows = [], [row for row in rows if row["graph"]]
    for tokens in sorted({row["tokens"] for row in rows}):
        speed = {row["width"]: row["graph"] for row in rows if row["tokens"] == tokens}
        speed = dict(sorted(speed.items()))
        slow = [width for width, ratio in speed.items() if ratio < 1.02]
        pays = [width for width in speed if not slow or width > slow[-1]]
        first = [f"{pays[0]:,}", f"{speed[pays[0]]:.2f}"] if pays else ["none", ""]
        lines.append([f"{tokens:,}", *first, f"{speed[max(speed)]:.2f}"])
    widest = max(row["width"] for row in rows)
    titles = ["tokens a step", "FP8 pays from width", "times BF16 there", f"times BF16 at width {widest:,}"]
    return markdown(titles, lines, left=0)


def compile_table(rows) -> str:
    """Return the table of benchmark_te.py --compile: thousands of tokens per second.

    Bold is the fastest mode of a recipe and model; in brackets are graph breaks and seconds of compiling. The
    reasons of rows that fail, and `compile_summary`, are below the table.
    """
    rows = [row for row in rows if not row.get("error", "").startswith("not run")]
    recipes, modes, names = (dict.fromkeys(row[key] for row in rows) for key in ("recipe", "mode", "model"))
    found = {(row["recipe"], row["mode"], row["model"]): row for row in rows}
    ordered = [found[key] for key in itertools.product(recipes, modes, names) if key in found]
    errors = [row["error"] for row in ordered if "error" in row and row["mode"] != "fullgraph"]
    reasons = list(dict.fromkeys(errors))
    fastest = {}
    for row in rows:
        pair = row["recipe"], row["model"]
        fastest[pair] = max(fastest.get(pair, 0), row.get("tokens_per_s", 0))
    lines = []
    for recipe, mode in itertools.product(recipes, modes):
        cells = [compile_cell(found.get((recipe, mode, name)), fastest.get((recipe, name)), reasons)
                 for name in names]
        if any(cells):
            lines.append([f"{recipe}, {UNCOMPILED.get(mode, mode)}", *cells])
    titles = ["recipe, mode", *(f"`{name}`" for name in names)]
    notes = [f"{number}. `{reason}`" for number, reason in enumerate(reasons, 1)]
    if reasons:
        notes = ["", *notes]
    return "\n".join([markdown(titles, lines, left=len(titles)), *notes, *compile_summary(rows)])


def compile_cell(row, fastest, reasons) -> str:
    """Return a cell of `compile_table`.

    Args:
        row: None if it was not measured.
        fastest: tokens per second of the fastest mode of this recipe and model.
        reasons: why rows fail; a cell names the number of its reason.
    """
    if row is None:
        return ""
    if "error" in row:
        return "breaks" if row["mode"] == "fullgraph" else f"fails, {reasons.index(row['error']) + 1}"
    speed = f"{row['tokens_per_s'] / 1e3:.0f} k"
    if row["tokens_per_s"] == fastest:
        speed = f"**{speed}**"
    if row["mode"] in UNCOMPILED:
        return speed
    return f"{speed} ({row['graph_breaks']}, {row['compile_s']:.0f} s)"


def compile_summary(rows) -> list:
    """Count compiled steps that are faster than the same model and recipe not compiled -> lines.

    Nothing is compiled under delayed scaling, so its rows show the noise of such a comparison.
    """
    speed = {(row["mode"], row["recipe"], row["model"]): row["tokens_per_s"]
             for row in rows if "error" not in row}
    ratios, noise = [], []
    for (mode, recipe, model), tokens_per_s in speed.items():
        eager = speed.get(("eager", recipe, model))
        if mode not in UNCOMPILED and eager:
            (noise if recipe == "delayed" else ratios).append(tokens_per_s / eager)
    if not ratios:
        return []

    def span(values):
        return f"{min(values):.2f} to {max(values):.2f} ×"

    slower, faster = [r for r in ratios if r < 1], [r for r in ratios if r >= 1]
    counts = [f"{len(group)} {word}" + (f" ({span(group)})" if group else "")
              for word, group in (("slower", slower), ("faster", faster))]
    lines = ["", f"{len(ratios)} compiled steps, relative to not compiled: {', '.join(counts)}."]
    if noise:
        lines += ["Nothing is compiled under delayed scaling, so its ratios are noise:",
                  f"{span(noise)} over {len(noise)} steps launched from Python."]
    return lines


# ---------------------------------------------------------------- pictures

def _axes(width, height, columns=1, **options):
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


def _origin(rows):
    """Return where the rows were measured."""
    return "; ".join(
        dict.fromkeys(f"{row['gpu']}, torch {row['torch']}, TE {row['te']}, {row['date']}" for row in rows)
    )


def _name(shape, block):
    """Return a group's name under its bars."""
    words = [word for word in block.split(", ") if word not in ("gpt2", "own")]
    return "\n".join([PLAIN_NAMES.get(shape, shape), *words]).replace("modern", "modern block")


def _draw_groups(axes, groups, arms, against_plain):
    """Draw one panel: the bars of each group side by side."""
    x, ticks = 0, []
    for (shape, block), group in groups.items():
        here = [arm for arm in arms if arm in group]
        ticks.append((x + (len(here) - 1) / 2, _name(shape, block)))
        for arm in here:
            row = group[arm]
            height, label = row["tokens_per_s"] / 1e3, f"{row['tokens_per_s'] / 1e3:.1f} k"
            if against_plain:
                height = row["ratio_to_plain"] or row["tokens_per_s"] / group["plain"]["tokens_per_s"]
                label = f"{height:.2f}" if arm != "plain" else ""
            bar = axes.bar(x, height, 0.9, color=arms[arm])
            axes.bar_label(bar, [label], fontsize=9, padding=2)
            x += 1
        x += 1 if against_plain else 2
    axes.set_xticks(*zip(*ticks), fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02 if against_plain else 0.25)
    axes.set_ylabel("speed, × plain PyTorch, compiled" if against_plain else "thousand tokens/s")
    if against_plain:
        axes.axhline(1, color="black", lw=0.8)


def draw_speed(rows, path):
    """Draw bars of the speed relative to plain PyTorch, by shape, and on the right tokens per second of the
    shapes at which that was not measured. Of more than four arms, those in PICTURED are drawn."""
    from matplotlib.patches import Patch  # slow to import

    groups = groups_of(rows)
    measured = [arm for arm in NAMES if any(arm in group for group in groups.values())]
    measured += dict.fromkeys(arm for group in groups.values() for arm in group if arm not in NAMES)
    four = sorted(measured, key=lambda arm: arm not in PICTURED)[:4]
    if not four:
        return
    arms = dict(zip(four, ("tab:gray", "silver", "tab:blue", "tab:green")))
    panels = []
    for against_plain in (True, False):
        part = {name: group for name, group in groups.items()
                if ("plain" in group) == against_plain and group.keys() & arms.keys()}
        if part:
            panels.append((part, against_plain))
    sizes = [sum(len(group.keys() & arms.keys()) + (1 if against_plain else 3) for group in part.values())
             for part, against_plain in panels]
    figure, axes = _axes(max(7, 0.36 * sum(sizes)), 4.8, len(sizes), squeeze=False, width_ratios=sizes)
    for panel, (part, against_plain) in zip(axes[0], panels):
        _draw_groups(panel, part, arms, against_plain)
    keys = [Patch(color=color, label=NAMES.get(arm, arm)) for arm, color in arms.items()]
    figure.legend(handles=keys, ncols=4, loc="outside upper center", frameon=False)
    meaning = "×: median of plain PyTorch's steps over the median of the arm's, both timed in turns"
    figure.supxlabel(f"tokens a step under each model; {meaning}; {_origin(rows)}", fontsize=8,
                     color="dimgray")
    figure.savefig(path, dpi=130)


def draw_stack(rows, path):
    """Draw a bar per change of --stack: tokens per second."""
    from matplotlib.patches import Patch  # slow to import

    rows = [row for row in rows if "error" not in row]
    figure, axes = _axes(10, 4.6)
    bars = axes.bar([row["label"] for row in rows], [row["tokens_per_s"] / 1e3 for row in rows],
                    color=["tab:gray" if row["arm"].startswith("plain") else "tab:green" for row in rows])
    first = rows[0]["tokens_per_s"]
    labels = [f"{row['tokens_per_s'] / 1e3:.0f} k\n{row['tokens_per_s'] / first:.2f} ×" for row in rows]
    axes.bar_label(bars, labels, fontsize=9, padding=2)
    axes.tick_params(axis="x", labelsize=8, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.15)
    axes.set(ylabel="thousand tokens/s")
    keys = {"tab:gray": "plain PyTorch", "tab:green": "with Transformer Engine"}
    axes.legend(handles=[Patch(color=color, label=label) for color, label in keys.items()], frameon=False,
                loc="upper left", title="+: added to the bar before")
    shape = PLAIN_NAMES.get(rows[0]["shape"], rows[0]["shape"]).replace("\n", ", ")
    axes.set_title(f"{shape} tokens a step; {_origin(rows)}", fontsize=9, color="dimgray")
    figure.savefig(path, dpi=130)


def draw_crossover(rows, path):
    """Draw two heat maps of FP8 ÷ BF16 over width and tokens per step: FP8 is faster where it is blue."""
    import numpy as np  # with matplotlib only

    widths, tokens = (sorted({row[key] for row in rows}) for key in ("width", "tokens"))
    figure, both = _axes(11, 4.8, 2)
    titles = {"eager": "Python launches every kernel", "graph": "each step is one CUDA graph"}
    for axes, (name, title) in zip(both, titles.items()):
        ratio = np.full((len(widths), len(tokens)), np.nan)
        for row in rows:
            ratio[widths.index(row["width"]), tokens.index(row["tokens"])] = row[name] or np.nan
        image = axes.imshow(ratio, origin="lower", cmap="RdBu", vmin=0.5, vmax=1.5, aspect="auto")
        for y, x in np.ndindex(ratio.shape):
            value = ratio[y, x]
            axes.text(x, y, "" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", fontsize=8,
                      color="white" if abs(value - 1) > 0.3 else "black")
        axes.set_xticks(range(len(tokens)), [f"{count:,}" for count in tokens])
        axes.set_yticks(range(len(widths)), [f"{width:,}" for width in widths])
        axes.set(xlabel="tokens a step", ylabel="width of the model", title=title)
        axes.tick_params(length=0)
    figure.colorbar(image, ax=both, label="speed of FP8 ÷ speed of BF16", extend="both")
    figure.suptitle(f"two layers, vocabulary 1,024; {_origin(rows)}", fontsize=9, color="dimgray")
    figure.savefig(path, dpi=130)
