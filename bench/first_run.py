r"""Train GPT-2 124M in FP8 on real text through train.py, and compare four precisions.

    python data.py text $(python -c "import torch, pathlib; \
        print(*pathlib.Path(torch.__file__).parent.rglob('*.py'))") \
        --tokenizer gpt2 --out-dir data/first_run    # PyTorch's own sources; any tiktoken encoding
    python bench/first_run.py                        # writes results/first_run.json and .png
    python bench/first_run.py --plot                 # draws the picture again from the JSON

Needs an NVIDIA Hopper GPU and Transformer Engine. First 300 steps in FP8; the checkpoint is loaded again and
a sample printed. Then the same 100 steps in BF16, in FP8 with delayed and with current scaling, and with
delayed scaling emulated by te_reference on the same GPU: four loss curves that should coincide.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.report import write_json
from nanote import cli, fp8

DATA = "data/first_run"
COMMON = [
    "--preset", "gpt2-124m", "--data", DATA, "--warmup-steps", "30", "--log-interval", "1",
    "--eval-steps", "10", "--checkpoint-interval", "0", "--keep-checkpoints", "1",
]
LONG = ["--max-steps", "300", "--micro-batch-size", "32", "--grad-accum", "4", "--lr", "1e-3",
        "--eval-interval", "100"]
SHORT = ["--grad-accum", "1", "--max-steps", "100", "--micro-batch-size", "8", "--eval-interval", "0"]
RUNS = {  # name -> (options, environment)
    "FP8 delayed, 300 steps": (LONG, {}),
    "BF16": (SHORT + ["--fp8-recipe", "none"], {}),
    "FP8 delayed": (SHORT + ["--fp8-recipe", "delayed"], {}),
    "FP8 current": (SHORT + ["--fp8-recipe", "current"], {}),
    "FP8 delayed, te_reference": (SHORT + ["--fp8-recipe", "delayed"], {"NANOTE_REFERENCE": "1"}),
}


@dataclass
class Options:
    plot: bool = False  # Draw the JSON again, and measure nothing.


def call(*arguments, **environment):
    """Run a script of the kit and return what it printed; exit with its error if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"first_run.py: {' '.join(arguments)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def read_run(folder):
    """Return the figures of a run from its metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steady = [line["tokens_per_s"] for line in lines if line["step"] > 20 and "val_loss" not in line]
    return {
        "tokens_per_s": round(statistics.median(steady)),
        "mfu": statistics.median(line["mfu"] for line in lines if line["step"] > 20),
        "peak_gib": lines[-1]["peak_gib"], "final_loss": lines[-1]["loss"], "val_loss": lines[-1]["val_loss"],
        "losses": [line["loss"] for line in lines],
    }


def check_reload(folder):
    """Load the checkpoint in sample.py, and in train.py for two more steps -> (sample, their losses)."""
    sample = call("sample.py", str(folder), "--prompt", "def main(", "--max-new-tokens", "100", "--seed", "0")
    call("train.py", "--resume", "--out-dir", str(folder), "--max-steps", "302")
    return sample, read_run(folder)["losses"][300:]


def describe_data():
    meta = json.loads((ROOT / DATA / "meta.json").read_text())
    fields = ("documents", "tokenizer", "vocab_size", "train_tokens", "val_tokens")
    return {"source": "PyTorch's Python sources"} | {k: v for k, v in meta.items() if k in fields}


def measure():
    """Run all of RUNS and write the JSON."""
    import torch  # not needed with --plot
    import transformer_engine

    runs, sample = {}, None
    with tempfile.TemporaryDirectory() as scratch:
        for name, (options, environment) in RUNS.items():
            folder = Path(scratch, name.replace(" ", "-"))
            arguments = ["train.py", *COMMON, *options, "--out-dir", str(folder)]
            print(f"{name} …", flush=True)
            call(*arguments, **environment)
            variables = " ".join(f"{k}={v} " for k, v in environment.items())
            command = variables + " ".join(["python", *arguments[:-1], "out/<run>"])
            runs[name] = {"command": command, **read_run(folder)}
            if sample is None:
                sample, runs[name]["losses_after_reload"] = check_reload(folder)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformer_engine": transformer_engine.__version__,
        "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
        "command": "python bench/first_run.py",
        "data": describe_data(),
        "note": "tokens_per_s is train.py's, logged at every step (log-interval 1): the median after step 20",
        "sample": sample,
        "runs": runs,
    }
    write_json(ROOT / "results/first_run.json", result)
    return result


def plot(result):
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    curves = {name: run["losses"] for name, run in result["runs"].items() if len(run["losses"]) == 100}
    styles = [dict(color="black", lw=3, alpha=0.35), dict(color="tab:green"), dict(color="tab:orange"),
              dict(color="tab:blue", ls="--")]
    styles = dict(zip(curves, styles))
    for name, losses in curves.items():
        label = name.replace("te_reference", "emulated")
        left.plot(range(1, 101), losses, label=label, **{"lw": 1.2, **styles[name]})
    left.set(xlabel="step", ylabel="training loss (nats per token)", title=f"GPT-2 124M, {result['gpu']}")
    left.legend(frameon=False)
    base = curves["BF16"]
    for name, losses in curves.items():
        right.plot(range(1, 101), [a - b for a, b in zip(losses, base)], **{"lw": 1.2, **styles[name]})
    right.set(xlabel="step", ylabel="loss minus BF16's (nats per token)", title="difference from BF16")
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(ROOT / "results/first_run.png", dpi=150)


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/first_run.py", description=__doc__)
    if not options.plot:
        if fp8.IS_REFERENCE:
            raise ValueError("this study needs a GPU with Transformer Engine, and there is none here; --plot "
                             "draws the JSON")
        if not (ROOT / DATA / "meta.json").is_file():
            raise ValueError(f"{DATA} is missing; --help begins with the command that makes it")
    result = json.loads((ROOT / "results/first_run.json").read_text()) if options.plot else measure()
    plot(result)
    for name, run in result["runs"].items():
        print(f"{name:28s} {run['tokens_per_s']:>9,} tokens/s  MFU {100 * run['mfu']:5.1f} %  "
              f"peak {run['peak_gib']:6.2f} GiB  loss {run['final_loss']:.4f}  val {run['val_loss']:.4f}")


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/first_run.py"))
