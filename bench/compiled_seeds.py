"""Does a compiled model learn as the fast model and as TE's modules do? 300 steps at 124M, several seeds.

    python bench/compiled_seeds.py --data data/stdlib --json results/compiled_seeds.json

- compiled   model_te_optimized.py on fast_kernels, torch.compile in one graph
- fast       model_te_fast.py in CUDA graphs
- te         model_te_optimized.py on Transformer Engine in CUDA graphs

All arms train on the same batches for the same seed and are evaluated on the same tokens. `gap_percent` is
the validation loss over that of te, paired by seed, with its standard error and 95 % interval.
"""
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.convergence import interval_of, standard_error
from bench.report import write_report
from nanote.config import parse, run_command
from nanote.logs import read_metrics

ARMS = {  # (NANOTE_ENGINE, options of train.py)
    "compiled": ("fast", "--model optimized --compile --compile-fullgraph"),
    "fast": ("fast", "--model fast"),
    "te": ("te", "--model optimized"),
}
COMMON = ("--preset gpt2-124m --vocab-size 50304 --micro-batch-size 32 --grad-accum 1 --max-steps 300 "
          "--warmup-steps 30 --eval-interval 300 --eval-tokens 655360 --checkpoint-interval 0")


@dataclass
class Options:
    seeds: tuple[int, ...] = (1, 2, 3)
    data: str = "data/stdlib"  # Folder of token files.
    at_once: int = 3  # Runs that share the GPU.
    out_dir: Path = Path("out/compiled_seeds")
    json: Path | None = None  # Write the figures here.


def train(arm, seed, options):
    """Return the record of a run's last evaluation."""
    folder, (engine, words) = options.out_dir / f"{arm}-{seed}", ARMS[arm]
    command = [sys.executable, "train.py", *COMMON.split(), *words.split(), "--seed", str(seed), "--data",
               options.data, "--out-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NANOTE_ENGINE": engine}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    records = read_metrics(folder / "metrics.jsonl")
    if done.returncode or not records:
        print(done.stdout[-2000:])
        return None
    return {"arm": arm, "seed": seed, **{name: records[-1][name] for name in ("step", "loss", "val_loss")}}


def mean(values):
    return statistics.mean(values) if values else None


def summarize(runs):
    rows = []
    for arm in ARMS:
        found = {run["seed"]: run["val_loss"] for run in runs if run["arm"] == arm}
        baseline = {run["seed"]: run["val_loss"] for run in runs if run["arm"] == "te"}
        gaps = [100 * (found[seed] / baseline[seed] - 1) for seed in found.keys() & baseline.keys()]
        rows.append({"arm": arm, "seeds": len(found), "mean": mean(found.values()),
                     "standard_error": standard_error(list(found.values())),
                     "gap_percent": mean(gaps), "gap_standard_error": standard_error(gaps),
                     "gap_interval": interval_of(gaps)})
    return rows


def main(argv=None):
    options = parse(Options, argv, "bench/compiled_seeds.py", __doc__)
    jobs = [(arm, seed) for seed in options.seeds for arm in ARMS]
    runs = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for run in pool.map(lambda job: train(*job, options), jobs):
            runs += [run] if run else []
            figures = {"data": options.data, "runs": runs, "summary": summarize(runs)}
            write_report("bench/compiled_seeds.py", argv, figures, options.json)
    print(json.dumps(figures["summary"], indent=1))
    return 0 if len(runs) == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/compiled_seeds.py"))
