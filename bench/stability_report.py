"""Compute the figures of test_stability.py from its losses; make their tables and heat map.

    python bench/stability_report.py results/stability_cpu.json    # draws results/stability_cpu.png again

Rows are settings, columns disturbances. A cell has the steps until the loss is back for good within 5 % of
the undisturbed run's, and below it the final loss against high precision's after the same disturbance, which
is also the color. Black: the loss was not finite at some step.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.report import markdown


def disturbed_from(steps) -> int:
    """Return the step at which a disturbance begins."""
    return steps * 2 // 5


def history_name(algo, history) -> str:
    """Return which amaxes delayed scaling uses: "max of 1024", or "most recent"."""
    return f"{algo} of {history}" if history > 1 else "most recent"


@dataclass(frozen=True)
class Setting:
    """A row of the table. `format` applies to FP8 recipes, `margin`, `history` and `algo` to "delayed"."""

    recipe: str = "none"
    format: str = "hybrid"
    margin: int = 0
    history: int = 1024
    algo: str = "max"
    model: str = "optimized"
    size: str = "2x64"  # layers x width

    def __str__(self):
        name = "high precision" if self.recipe == "none" else f"{self.recipe} {self.format}"
        if self.recipe == "delayed":
            name += f", margin {self.margin}, {history_name(self.algo, self.history)}"
        return f"{self.size} {name}"


def recovered_after(losses, undisturbed, at):
    """Return the steps from the disturbance at step `at` until the loss stays within 5 % of the undisturbed
    run's; None if it is outside at the end."""
    outside = [step for step in range(at, len(losses)) if not losses[step] <= 1.05 * undisturbed[step]]
    if outside and outside[-1] == len(losses) - 1:
        return None
    return outside[-1] + 1 - at if outside else 0


def final(losses):
    """Return the mean of the last tenth."""
    last = losses[-max(1, len(losses) // 10):]
    return float(sum(last) / len(last))


def cell_figures(setting, disturbance, losses, baseline):
    """Return the figures of a cell.

    losses: {disturbance: losses} of its row. baseline: the same of high precision at the same size.
    """
    at, mine = disturbed_from(len(losses["none"])), losses[disturbance]
    figures = {
        "row": str(setting), **vars(setting), "disturbance": disturbance,
        "finite": all(map(math.isfinite, mine)), "recovered_after": recovered_after(mine, losses["none"], at),
    }
    if not figures["finite"]:
        return figures | {"worst_loss": None, "final_loss": None, "final_vs_high_precision": None}
    versus = final(mine) / final(baseline[disturbance]) - 1
    return figures | {
        "worst_loss": max(mine[at:]), "final_loss": final(mine), "final_vs_high_precision": versus,
    }


def cell_text(cell):
    """Return a cell of the printed table: steps to recover, and the final loss against high precision's.

    In high precision's row, the loss itself.
    """
    if not cell["finite"]:
        return "not finite"
    value = f"{cell['final_loss']:.3f}"
    if cell["recipe"] != "none":
        value = f"{cell['final_vs_high_precision']:+.1%}"
    if cell["disturbance"] == "none":
        return value
    after = cell["recovered_after"]
    return ("never " if after is None else f"{after} ") + value


def span(cells):
    """Return the range of the final loss against high precision's over some cells, in percent."""
    values = [100 * cell["final_vs_high_precision"] for cell in cells]
    low, high = f"{min(values):+.1f}", f"{max(values):+.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def by_setting(cells):
    """Return {"delayed hybrid, max of 1024": its cells of all margins, …}, without high precision."""
    groups = {}
    for cell in cells:
        if cell["recipe"] != "none":
            name = f"{cell['recipe']} {cell['format']}"
            if cell["recipe"] == "delayed":
                name += f", {history_name(cell['algo'], cell['history'])}"
            groups.setdefault(name, []).append(cell)
    return groups


def table(result) -> str:
    """Return the Markdown table of the final loss against BF16's after the same disturbance.

    A cell has the range over margins and the largest number of steps to recover. The last column has all
    disturbances that have no column.
    """
    shown = {"none": "undisturbed", "outlier 1e6": "one activation x 1,000,000",
             "loss down": "loss scaled by 2^-15"}
    lines = []
    for name, group in by_setting(result["cells"]).items():
        line = [name]
        for disturbance in shown:
            some = [cell for cell in group if cell["disturbance"] == disturbance]
            after = [cell["recovered_after"] for cell in some]
            steps = "never" if None in after else f"{max(after)} step{'s' * (max(after) != 1)}"
            line.append(span(some) + (f"; {steps}" if disturbance != "none" else ""))
        others = [cell for cell in group if cell["disturbance"] not in shown]
        lines.append([*line, span(others)])
    return markdown(["", *shown.values(), "other disturbances"], lines)


def sizes_table(result) -> str:
    """Return the Markdown table of the undisturbed final loss against BF16's, by size, over margins."""
    sizes = list(dict.fromkeys(cell["size"] for cell in result["cells"]))
    lines = []
    for name, group in by_setting(result["cells"]).items():
        lines.append([name, *(span([cell for cell in group if cell["size"] == size]) for size in sizes)])
    return markdown(["", *sizes], lines)


COLUMNS = {  # disturbance -> what it is, in the picture
    "none": "undisturbed", "outlier": "one token\n× 1,000", "outlier 1e6": "one token\n× 1,000,000",
    "zeros": "a batch\nof zeros", "weight": "one weight\n× 1,000", "lr": "learning rate\n× 10, 20 steps",
    "loss up": "loss × 2¹⁵\nfrom there on", "loss down": "loss × 2⁻¹⁵\nfrom there on",
}


def row_name(cell, sizes) -> str:
    """Return the name of a row of the heat map. The size is in it if there are several."""
    size = f"{cell['size'].replace('x', ' layers of ')}: " if len(sizes) > 1 else ""
    if cell["recipe"] == "none":
        return f"{size}no FP8"
    name = f"{size}{cell['recipe']}, {cell['format'].upper()}"
    if cell["recipe"] == "delayed":
        steps = f"{cell['algo']} of {cell['history']:,} steps" if cell["history"] > 1 else "last step's amax"
        name += f", margin {cell['margin']}, {steps}"
    return name


def heat_map_text(cell):
    """Return the text in a cell of the heat map: steps to recover, and the final loss."""
    if not cell["finite"]:
        return "not finite"
    value = f"{cell['final_loss']:.3f}"
    if cell["recipe"] != "none":
        value = f"{100 * cell['final_vs_high_precision']:+.1f} %"
    if cell["disturbance"] == "none":
        return value
    after = cell["recovered_after"]
    return ("never\n" if after is None else f"{after} step{'s' * (after != 1)}\n") + value


def plot(result, path):
    """Draw what test_stability.py --json writes as a heat map."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = result["cells"]
    columns = list(dict.fromkeys(cell["disturbance"] for cell in cells))
    sizes = list(dict.fromkeys(cell["size"] for cell in cells))
    rows = [cells[i:i + len(columns)] for i in range(0, len(cells), len(columns))]
    percent = [[100 * cell["final_vs_high_precision"] if cell["finite"] else math.nan for cell in row]
               for row in rows]
    height = 2 + 0.42 * len(rows)
    figure, axes = plt.subplots(figsize=(3.6 + 1.15 * len(columns), height), layout="constrained")
    colors = plt.get_cmap("RdBu_r").with_extremes(bad="black")
    image = axes.imshow(percent, cmap=colors, vmin=-10, vmax=10, aspect="auto")
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            dark = not cell["finite"] or abs(percent[y][x]) > 7
            axes.text(x, y, heat_map_text(cell), ha="center", va="center", fontsize=8,
                      color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), [COLUMNS[name] for name in columns], fontsize=9)
    axes.set_yticks(range(len(rows)), [row_name(row[0], sizes) for row in rows], fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    size = f", {sizes[0].replace('x', ' layers of width ')}" if len(sizes) == 1 else ""
    title = (f"Disturbed at step {result['disturbed_from_step']} of {result['steps']}: steps until the loss "
             "is back within 5 %,\nand final loss against the run without FP8 (in its own row: nats)\n"
             f"{result['machine']}{size}")
    axes.set_title(title, fontsize=10, pad=12)
    figure.colorbar(image, label="final loss against the run without FP8, %", shrink=min(1, 6 / height),
                    extend="both")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("stability_report.py: name a file that test_stability.py --json wrote, such as "
              "results/stability_cpu.json", file=sys.stderr)
        sys.exit(2)
    path = Path(sys.argv[1])
    plot(json.loads(path.read_text()), path.with_suffix(".png"))
