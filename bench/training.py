"""Check that a real run of train.py keeps the benchmark's speed, and that no switch changes the final loss.

    python data.py stdlib
    python bench/training.py            # a few minutes; writes results/training.json and results/training.png
    python bench/training.py --plot     # draws the picture again from the JSON

Speed: GPT-2 124M, 32 x 1,024 tokens per step, 1,500 steps with data loading, a log line every 10 steps and a
checkpoint every 500. The time from step 490 to 1,490, which includes two checkpoints, is compared with the
steps of `benchmark_te.py` at the same shape, minutes apart on the same GPU.

Switches: 300 steps of 8 x 1,024 tokens with one switch at a time, all with the same seed, and two more seeds
of GPT-2's block and of the modern one. A switch agrees if the final loss (mean of the last 50 steps) differs
from its block's by no more than the seeds of that block differ among themselves.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.report import write_report
from nanote import cli

COMMON = ("--preset gpt2-124m --vocab-size 50304 --grad-accum 1 --warmup-steps 50 --eval-interval 0 "
          "--eval-steps 2 --keep-checkpoints 1")
REAL = "--micro-batch-size 32 --max-steps 1500 --log-interval 10 --checkpoint-interval 500"
SHORT = "--micro-batch-size 8 --max-steps 300 --log-interval 1 --checkpoint-interval 0"
MODERN = "--activation swiglu --use-rmsnorm --use-rotary --use-qk-norm --no-bias --n-kv-head 4"
SWITCHES = {  # name -> options
    "default": "",
    "seed 2": "--seed 2",
    "seed 3": "--seed 3",
    "no CUDA graph": "--cuda-graph off",
    "attention sdpa": "--attention sdpa",
    "attention te": "--attention te",
    "Transformer Engine's loss": "--no-fused-loss",
    "Transformer Engine's modules": "--no-fused-block",
    "float32 masters": "--no-param-remainders",
    "BF16 moments": "--moment-dtype bfloat16",
    "2 micro-batches of 4": "--micro-batch-size 4 --grad-accum 2",
    "FP8 current": "--fp8-recipe current",
    "BF16": "--fp8-recipe none",
    "modern block": MODERN,
    "modern block, seed 2": f"{MODERN} --seed 2",
    "modern block, seed 3": f"{MODERN} --seed 3",
    "modern block, Transformer Engine's modules": f"{MODERN} --no-fused-block",
}
SEEDS = {
    "default": ("default", "seed 2", "seed 3"),
    "modern block": ("modern block", "modern block, seed 2", "modern block, seed 3"),
}


@dataclass
class Options:
    data: str = "data/stdlib"  # A folder of token files.
    jobs: int = 4  # Runs of the switches at the same time.
    skip_speed: bool = False  # Measure the switches only.
    plot: bool = False  # Draw the JSON again, and measure nothing.


def call(*arguments):
    """Run a script of the kit; OSError with the last line of its stderr if it fails."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise OSError(f"{' '.join(arguments)}: exit code {done.returncode}: {last}")


def run(folder, options, data):
    """Train into `folder` -> its metrics."""
    call("train.py", *COMMON.split(), *options.split(), "--data", data, "--out-dir", str(folder))
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def measure_speed(scratch, data):
    """Return tokens per second of a real run and of the benchmark."""
    records = {record["step"]: record for record in run(scratch / "real", REAL, data)}
    first, last = records[490], records[1490]
    real = 32 * 1024 * 1000 / (last["seconds"] - first["seconds"])
    path = scratch / "bench.json"
    call("benchmark_te.py", "--shapes", "124m-b32", "--blocks", "gpt2", "--arms", "fp8", "--json", str(path))
    row, = [row for row in json.loads(path.read_text()) if row["arm"] == "fp8"]
    return {
        "command": f"python train.py {COMMON} {REAL}", "tokens_per_s": real,
        "tokens_per_s_between_checkpoints": last["tokens_per_s"],
        "benchmark_tokens_per_s": row["tokens_per_s"], "ratio": real / row["tokens_per_s"],
    }


def final_loss(losses):
    """Return the mean of the last 50 losses."""
    return sum(losses[-50:]) / 50


def measure_switches(scratch, data, jobs, write):
    """Train with each switch. `write` is called with the figures after each run, so that they are kept if the
    study is interrupted."""
    def train_with(item):
        name, options = item
        records = run(scratch / name.replace(" ", "-"), f"{SHORT} {options}", data)
        return name, [record["loss"] for record in records]

    losses = {}
    with ThreadPoolExecutor(jobs) as pool:
        for name, values in pool.map(train_with, SWITCHES.items()):
            losses[name] = values
            write(compare(losses))


def block_of(switch) -> str:
    """Return the switch with the defaults of a switch's block, which it is compared with: a key of SEEDS."""
    return "modern block" if switch.startswith("modern") else "default"


def compare(losses):
    """Compare each run with its block's defaults -> figures. losses: {name of a switch: losses}."""
    rows = []
    for switch, values in losses.items():
        block = block_of(switch)
        seeds = [final_loss(losses[seed]) for seed in SEEDS[block] if seed in losses]
        difference = final_loss(values) - final_loss(losses[block])
        spread = max(seeds) - min(seeds)
        rows.append({
            "switch": switch, "options": SWITCHES[switch], "final_loss": final_loss(values),
            "difference": difference, "spread_of_seeds": spread, "agrees": abs(difference) <= spread,
            "losses": [round(value, 5) for value in values],
        })
    return {"command": f"python train.py {COMMON} {SHORT}", "rows": rows}


def kind_of(switch) -> str:
    """Return the key of a run in the legend."""
    name = {"modern block": "modern block", "default": "block of GPT-2"}[block_of(switch)]
    if "seed" in switch:
        return f"{name}, other seeds"
    return f"{name}, defaults" if switch in SEEDS else f"{name}, one switch changed"


STYLES = {  # kind_of -> color, style and width of its lines
    "block of GPT-2, one switch changed": ("tab:blue", "-", 0.8),
    "block of GPT-2, other seeds": ("tab:cyan", ":", 1.4),
    "block of GPT-2, defaults": ("navy", "-", 1.6),
    "modern block, one switch changed": ("tab:orange", "-", 0.8),
    "modern block, other seeds": ("goldenrod", ":", 1.4),
    "modern block, defaults": ("saddlebrown", "-", 1.6),
}


def plot(figures, path):
    """Draw the losses, and how far each run ends from its block's defaults."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = figures["switches"]["rows"]
    for row in sorted(rows, key=lambda row: list(STYLES).index(kind_of(row["switch"]))):
        losses, (color, style, width) = row["losses"], STYLES[kind_of(row["switch"])]
        smooth = [sum(losses[max(0, i - 9):i + 1]) / min(10, i + 1) for i in range(len(losses))]
        left.plot(range(1, len(losses) + 1), smooth, lw=width, ls=style, color=color)
    differences = {row["switch"]: row["difference"] for row in rows}
    for row in rows:
        seeds = [differences[name] for name in SEEDS[block_of(row["switch"])] if name in differences]
        right.barh(row["switch"], row["difference"], color=STYLES[kind_of(row["switch"])][0])
        right.barh(row["switch"], max(seeds) - min(seeds), left=min(seeds), height=1, color="tab:green",
                   alpha=0.15, zorder=0)
    left.set(xlabel="step", ylabel="training loss (nats a byte, mean of 10 steps)", ylim=(None, 5),
             title="loss of GPT-2 124M, two blocks")
    left.legend(handles=[Line2D([], [], color=color, ls=style, lw=width, label=kind)
                         for kind, (color, style, width) in STYLES.items()], frameon=False)
    right.invert_yaxis()
    right.axvline(0, color="black", lw=0.8)
    right.locator_params(axis="x", nbins=5)
    right.set(xlabel="final loss minus that of the block's defaults (nats a byte)",
              title="final loss, one switch at a time")
    right.legend(handles=[Patch(color="tab:green", alpha=0.15, label="spread of the block's three seeds")],
                 frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.suptitle(figures["machine"], fontsize=9, color="dimgray")
    figure.savefig(path, dpi=150)


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/training.py", description=__doc__)
    path = ROOT / "results/training.json"
    if not options.plot:
        with tempfile.TemporaryDirectory() as scratch:
            figures = {} if options.skip_speed else {"speed": measure_speed(Path(scratch), options.data)}

            def write(switches):
                write_report("bench/training.py", argv, figures | {"switches": switches}, path)

            measure_switches(Path(scratch), options.data, options.jobs, write)
    figures = json.loads(path.read_text())
    plot(figures, path.with_suffix(".png"))
    if "speed" in figures:
        speed = figures["speed"]
        print(f"real run {speed['tokens_per_s']:,.0f} tokens/s, benchmark "
              f"{speed['benchmark_tokens_per_s']:,.0f}: {100 * speed['ratio']:.1f} %")
    for row in figures["switches"]["rows"]:
        verdict = "agrees" if row["agrees"] else "DIFFERS"
        print(f"{row['switch']:42} {row['final_loss']:.4f}  {row['difference']:+.4f}  {verdict}")


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/training.py"))
