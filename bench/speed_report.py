"""From the rows of benchmark_te.py to its pictures and to the pages' tables (`python bench/pages.py` makes
all of them anew); and the file of rows itself."""

import itertools
import re

from bench.report import markdown
from nanote import checkpoint

NAMES = {
    "plain": "nanoGPT, compiled", "plain-graph": "nanoGPT, CUDA graphs", "bf16": "ours, BF16",
    "fp8": "ours, FP8", "fp8-current": "ours, FP8 current", "fp8-block": "ours, FP8 block",
    "fp8-block-hybrid": "ours, FP8 block, E5M2 gradients", "fp8-mxfp8": "ours, MXFP8",
    "fp8-nvfp4": "ours, NVFP4", "hf-llama": "transformers' Llama, compiled",
}
FORMATS = {"bf16": "BF16", "fp8-e4m3": "FP8 E4M3", "fp8": "FP8 HYBRID", "fp8-current": "FP8 current",
           "fp8-block": "FP8 block", "fp8-mxfp8": "MXFP8", "fp8-nvfp4": "NVFP4"}
UNCOMPILED = {"cuda-graph": "not compiled, CUDA graph", "eager": "not compiled"}  # of run_compile
IN_PICTURES = NAMES | {
    "fp8-te_block": "FP8, TE's modules", "fp8-e4m3": "ours, FP8 E4M3",
    "fp8-bf16_moments": "ours, FP8, BF16 moments",
}


def groups_of(rows):
    """{(shape, block): {arm: row}} of the rows without an error. An arm that accumulates or checkpoints is a
    group of its own: "fp8-accum4" is "fp8" of (shape, "block, 4 micro-batches"). A row of "fp8-block" without
    a format was measured with E5M2 gradients and is "fp8-block-hybrid"."""
    groups = {}
    for row in rows:
        if "error" in row:
            continue
        arm, accumulated, checkpointed = re.fullmatch(
            r"(.*?)(?:-accum(\d+))?(-checkpointing)?", row["arm"]
        ).groups()
        arm = "fp8-block-hybrid" if arm == "fp8-block" and "fp8_format" not in row else arm
        block = (
            row["block"]
            + (f", {accumulated} micro-batches" if accumulated else "")
            + (", checkpointing" if checkpointed else "")
        )
        groups.setdefault((row["shape"], block), {})[arm] = row
    return groups


def table(rows) -> str:
    """The README's Markdown table: thousands of tokens a second, in brackets against nanoGPT's and the MFU.
    """
    groups = groups_of(rows)
    arms = [arm for arm in NAMES if any(arm in group for group in groups.values())]
    titles = ["shape, block", *(NAMES[arm] for arm in arms), "GiB, nanoGPT → FP8", "FP8's floor"]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for (shape, block), group in groups.items():
        cells = []
        for row in (group.get(arm) for arm in arms):
            notes = (
                []
                if row is None
                else (
                    [f"{row['ratio_to_plain']:.2f} ×"]
                    if row["ratio_to_plain"] and row["arm"] != "plain"
                    else []
                )
                + ([f"{100 * row['mfu']:.1f} %"] if row["mfu"] else [])
            )
            cells.append(
                ""
                if row is None
                else f"{row['tokens_per_s'] / 1e3:.1f} k" + (f" ({', '.join(notes)})" if notes else "")
            )
        peaks = [
            f"{group[arm]['peak_gib']:.1f}"
            for arm in ("plain", "fp8")
            if arm in group and group[arm]["peak_gib"]
        ]
        floor = f"{group['fp8']['floor_ms']:.1f} of {group['fp8']['ms']:.1f} ms" if "fp8" in group else ""
        lines.append(f"| {shape}, {block} | " + " | ".join([*cells, " → ".join(peaks), floor]) + " |")
    return "\n".join(lines)


def formats_table(rows) -> str:
    """Markdown table of models and formats: ms forward, backward and of both, and of the training step, the
    last two with their speed-up over the same model's BF16. An empty cell was not measured."""
    found = {}
    for row in rows:
        words = row["arm"].split("-")
        model = next((word for word in words if word in checkpoint.MODELS), "optimized")
        if "error" not in row and words[0] in ("bf16", "fp8"):
            total = row["forward_ms"] + row["backward_ms"] if "forward_ms" in row else None
            arm = "-".join(word for word in words if word != model)
            found.setdefault(model, {})[arm] = row | {"total_ms": total}
    lines = []
    for model, formats in found.items():
        base, known = formats.get("bf16", {}), [arm for arm in FORMATS if arm in formats]
        for arm in known + [arm for arm in formats if arm not in FORMATS]:
            row, values = formats[arm], []
            for part in ("forward_ms", "backward_ms", "total_ms", "ms"):
                values.append(row.get(part))
                if part in ("total_ms", "ms"):
                    values.append(base[part] / row[part] if base.get(part) and row[part] else None)
            cells = ["" if value is None else f"{value:.2f}" for value in values]
            lines.append([model, FORMATS.get(arm, arm), *cells])
    titles = ["model", "precision", "forward", "backward", "total", "speed-up", "training step", "speed-up"]
    return markdown(titles, lines, left=2)


PARTS = {  # row of profile_table -> classes of kernels (timing.KERNELS), what bounds them
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
    """Markdown table: ms of a step by class of kernel, for the smallest and the largest shape and Llama-3."""
    wanted = [("124m-b32", "gpt2", "plain"), ("124m-b32", "gpt2", "fp8"), ("c4096", "gpt2", "plain"),
              ("c4096", "gpt2", "fp8"), ("llama3-8b", "own", "fp8")]
    profiled = {(row["shape"], row["block"], row["arm"]): row for row in rows if "profile_ms" in row}
    found = [profiled[key] for key in wanted if key in profiled]
    names = {"plain": "nanoGPT", "fp8": "FP8"}
    titles = ["ms a step", *(f"{row['shape']}, {names[row['arm']]}" for row in found), "bound by"]
    parts = {name: [sum(row["profile_ms"].get(kind, 0) for kind in kinds) for row in found]
             for name, (kinds, _) in PARTS.items()}
    lines = [[name, *(f"{value:.1f}" for value in values), PARTS[name][1]] for name, values in parts.items()]
    totals = [sum(column) for column in zip(*parts.values())]
    tensor = [sum(pair) for pair in zip(parts["GEMMs"], parts["attention"])]
    share = lambda value, whole: f"{value:.1f} ({100 * value / whole:.0f} %)"  # noqa: E731
    lines.append(["**GEMMs and attention**", *map(share, tensor, totals), ""])
    lines.append(["**everything else**", *(share(t - part, t) for part, t in zip(tensor, totals)), ""])
    lines.append(["training step", *(f"{row['ms']:.1f}" for row in found), ""])
    lines.append(["its floor (`floor_ms`)", *(share(row["floor_ms"], row["ms"]) for row in found), ""])
    of = lambda row, name: f"{row[name]:,.0f} of {row[f'{name}_limit']:,.0f}"  # noqa: E731
    lines.append(["clock, MHz", *(of(row, "sm_mhz") for row in found), "power"])
    lines.append(["power, W", *(of(row, "watts") for row in found), ""])
    return markdown(titles, lines)


def variants_table(rows) -> str:
    """Markdown table: the FP8 step with one thing changed, ms and in brackets times the FP8 step's speed."""
    groups = {key: group for key, group in groups_of(rows).items()
              if "fp8" in group and len(group.keys() & VARIANTS.keys()) > 1}
    arms = [arm for arm in VARIANTS if any(arm in group for group in groups.values())]
    lines = []
    for (shape, block), group in groups.items():
        ms = [group[arm]["ms"] if arm in group else None for arm in arms]
        cells = ["" if value is None else f"{value:.2f} ({ms[0] / value:.2f})" for value in ms]
        lines.append([f"{shape}, {block}", cells[0].partition(" ")[0], *cells[1:]])
    return markdown(["ms a step", *(VARIANTS[arm] for arm in arms)], lines)


def stack_table(rows) -> str:
    """Markdown table of benchmark_te.py --stack: a row a measure, in the order of adding them."""
    rows, lines = [row for row in rows if "error" not in row], []
    for before, row in zip([None, *rows], rows):
        speed, label = row["tokens_per_s"], " ".join(row["label"].split())
        step = f"{speed / before['tokens_per_s']:.2f}" if before else ""
        lines.append([label, f"{speed / 1e3:.0f}", step, f"{speed / rows[0]['tokens_per_s']:.2f}"])
    return markdown(["", "k tokens/s", "times the one before", "times the first"], lines)


def crossover_table(rows) -> str:
    """Markdown table of benchmark_te.py --sweep: from which width on FP8 is at least 1.02 times as fast."""
    lines, rows = [], [row for row in rows if row["graph"]]
    for tokens in sorted({row["tokens"] for row in rows}):
        speed = {row["width"]: row["graph"] for row in rows if row["tokens"] == tokens}
        speed = dict(sorted(speed.items()))
        slow = [width for width, ratio in speed.items() if ratio < 1.02]
        pays = [width for width in speed if not slow or width > slow[-1]]
        lines.append([f"{tokens:,}", *([f"{pays[0]:,}", f"{speed[pays[0]]:.2f}"] if pays else ["none", ""]),
                      f"{speed[max(speed)]:.2f}"])
    widest = max(row["width"] for row in rows)
    titles = ["tokens a step", "FP8 pays from width", "times BF16 there", f"times BF16 at width {widest:,}"]
    return markdown(titles, lines, left=0)


def compile_table(rows) -> str:
    """Make the table of `benchmark_te.py --compile`, Markdown: thousands of tokens a second, the fastest of a
    recipe and model in bold, in brackets graph breaks and seconds of compiling; below, why a row fails."""
    rows = [row for row in rows if not row.get("error", "").startswith("not run")]
    recipes, modes, models = (dict.fromkeys(row[key] for row in rows) for key in ("recipe", "mode", "model"))
    found, fastest, reasons = {(row["recipe"], row["mode"], row["model"]): row for row in rows}, {}, []
    for row in rows:
        pair = row["recipe"], row["model"]
        fastest[pair] = max(fastest.get(pair, 0), row.get("tokens_per_s", 0))

    def cell(recipe, mode, model):
        row = found.get((recipe, mode, model))
        if row is None:
            return ""
        if "error" in row and mode == "fullgraph":
            return "breaks"
        if "error" in row:
            reasons.extend([row["error"]] * (row["error"] not in reasons))
            return f"fails, {reasons.index(row['error']) + 1}"
        speed = f"{row['tokens_per_s'] / 1e3:.0f} k"
        speed = f"**{speed}**" if row["tokens_per_s"] == fastest[recipe, model] else speed
        return speed + ("" if mode in UNCOMPILED else f" ({row['graph_breaks']}, {row['compile_s']:.0f} s)")

    titles = ["recipe, mode", *(f"`{model}`" for model in models)]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for recipe, mode in itertools.product(recipes, modes):
        cells = [cell(recipe, mode, model) for model in models]
        if any(cells):
            lines.append(f"| {recipe}, {UNCOMPILED.get(mode, mode)} | " + " | ".join(cells) + " |")
    notes = [f"{number}. `{reason}`" for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines + [""] * bool(reasons) + notes + compile_summary(rows))


def compile_summary(rows) -> list:
    """Count compiled steps that are faster than the same model and recipe not compiled -> lines.

    Models do not compile under delayed scaling, so its rows show how much such a comparison scatters."""
    good = [row for row in rows if "error" not in row]
    speed = {(row["mode"], row["recipe"], row["model"]): row["tokens_per_s"] for row in good}
    ratios, scatter = [], []
    for (mode, recipe, model), value in speed.items():
        eager = speed.get(("eager", recipe, model))
        if mode not in UNCOMPILED and eager:
            (scatter if recipe == "delayed" else ratios).append(value / eager)
    if not ratios:
        return []
    told = []
    for what, some in (("slower", [r for r in ratios if r < 1]), ("faster", [r for r in ratios if r >= 1])):
        span = f" ({min(some):.2f} to {max(some):.2f} times its speed)" if some else ""
        told.append(f"{len(some)} {what}{span}")
    line = f"Of {len(ratios)} compiled steps, against the same model not compiled: {', '.join(told)}."
    if scatter:
        line += (
            f" Under delayed scaling nothing is compiled, and the same comparison of {len(scatter)} steps gives "
            f"{min(scatter):.2f} to {max(scatter):.2f} times: so far do steps launched from Python differ from "
            "run to run."
        )
    return ["", line]


def _axes(width, height, columns=1, **options):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, **options)


def _origin(rows):
    return "; ".join(
        dict.fromkeys(f"{row['gpu']}, torch {row['torch']}, TE {row['te']}, {row['date']}" for row in rows)
    )


def draw_speed(rows, path):
    """Bars up or down from nanoGPT's speed, by shape; on the right, tokens a second of shapes that nanoGPT
    was not measured at. The black line: what the GPU's ceilings would allow (floor_ms)."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    groups = groups_of(rows)
    parts = [
        {name: group for name, group in groups.items() if ("plain" in group) == against}
        for against in (True, False)
    ]
    arms = [arm for arm in dict.fromkeys([*NAMES, *(arm for group in groups.values() for arm in group)])
            if arm != "plain" and any(arm in group for group in groups.values())]
    looks = {
        arm: dict(
            facecolor=f"C{number % 10}",
            hatch="//" if arm.endswith("-eager") else "xx" if number >= 10 else None, edgecolor="white",
        )
        for number, arm in enumerate(arms)
    }
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
                height = (
                    (row["ratio_to_plain"] or row["tokens_per_s"] / group["plain"]["tokens_per_s"])
                    if against
                    else row["tokens_per_s"] / 1e3
                )
                label = (
                    f"{height:.2f}"
                    if against
                    else f"{height:.1f} k" + (f"\nMFU\n{100 * row['mfu']:.1f} %" if row["mfu"] else "")
                )
                bar = axes.bar(x, height - start, 0.9, bottom=start, **looks[arm])
                axes.bar_label(bar, [label], fontsize=8, padding=2)
                if row["floor_ms"]:
                    floor = height * row["ms"] / row["floor_ms"]
                    axes.hlines(floor, x - 0.45, x + 0.45, color="black", lw=1.5)
                x += 1
            x += 1 if against else 2
        axes.set_xticks(*zip(*ticks), fontsize=8)
        if against:
            axes.axhline(1, color="black", lw=0.8)
            axes.margins(x=0.01)
            axes.set(yscale="log", ylabel="tokens/s against nanoGPT's, compiled")
            axes.set_xlabel("the last line: nanoGPT's tokens/s", fontsize=8)
            low, high = axes.get_ylim()
            axes.set_yticks(
                [at for at in (0.125, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16) if low < at < high]
            )
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
    axes.bar_label(
        bars,
        [
            f"{row['tokens_per_s'] / 1e3:.0f} k\n{row['tokens_per_s'] / rows[0]['tokens_per_s']:.2f} ×"
            for row in rows
        ],
        fontsize=8,
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(y=0.15)
    axes.set(ylabel="thousand tokens/s")
    axes.set_title(
        f"{rows[0]['shape']}, {_origin(rows)}\ngrey: plain PyTorch; green: with Transformer Engine, each bar the one before and more",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)


def draw_crossover(rows, path):
    """Two heat maps of FP8 ÷ BF16 over width and tokens a step; the black line is where they are equally
    fast."""
    import numpy as np

    widths, tokens = (sorted({row[key] for row in rows}) for key in ("width", "tokens"))
    figure, both = _axes(11, 4.8, 2)
    for axes, name, title in zip(
        both, ("eager", "graph"), ("launched from Python", "a step as one CUDA graph")
    ):
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
