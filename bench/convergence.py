"""Does FP8 learn as well as BF16, and how much sooner is it there? Arms of a GPT, several seeds each.

    python data.py packages --tokenizer r50k_base
    python bench/convergence.py --arms bf16 fp8 --seeds 1 2 3    # one run per GPU at a time
    python bench/convergence.py --arms nanogpt --nanogpt nanoGPT    # the folder of a checkout

The prefix of an arm is the size: none for GPT-2 124M; modern- for its modern block; 350m-. `nanogpt` is
nanoGPT's model, compiled. Every arm trains on the same batches for the same seed, and is evaluated on the
same tokens. A run that was cut continues from its last checkpoint in --out-dir. The exit code is 1 if a run
failed.

The JSON has in `command` all commands that added to it, in `corpora` their token files, and in `runs` a
record per evaluation of each completed run; its seconds are those of training steps alone. Runs on other
token files, or with another --more, are refused. From the last records follows `summary`:

- mean, standard_error: of the final validation loss over the seeds
- gap_percent, gap_standard_error, gap_interval: of the arm's loss over that of bf16, paired by seed; the last
  is its 95 % interval [low, high], of the t distribution; None with one seed
- gap_without_fp8_percent, gap_without_fp8_interval: the same, with the final weights evaluated in BF16
- seconds: training time, median over the runs on the machine that trained most runs of bf16
- seconds_to_bf16_loss, loss_matched_speedup, loss_matched_interval: training time after which a run of this
  arm ends at the loss of bf16, interpolated in the logarithm of the tokens between runs of two lengths, each
  with its own learning-rate schedule; bf16's time over it, and its 95 % interval from that of the gap
- loss_matched_speedup_over_nanogpt, loss_matched_interval_over_nanogpt: the same for the arm nanogpt
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_interrupt  # Ctrl-C while importing prints no traceback

import json
import math
import os
import queue
import shutil
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bench.report import check_output, command_line, cpu_name, markdown, write_report
from nanote.command import parse, run_command
from nanote.logs import read_metrics
from nanote.tokens import open_tokens

COMMON = "--warmup-steps 100 --log-interval 10 --keep-checkpoints 1 --eval-tokens 2000000"
GPT2 = "--preset gpt2-124m --micro-batch-size 64 --grad-accum 2"
MODERN = "--activation swiglu --use-rmsnorm --use-rotary --use-qk-norm --no-bias --n-kv-head 4"
SIZES = {  # prefix of an arm: options of its architecture
    "": GPT2,
    "modern-": f"{GPT2} {MODERN}",
    "350m-": "--preset gpt2-350m --micro-batch-size 32 --grad-accum 4",
}
TOKENS_PER_STEP = 131_072
RECIPES = {  # name of an arm: options of its precision
    "bf16": "--fp8-recipe none",
    "fp8": "",
    "fp8-current": "--fp8-recipe current",
    "fp8-block": "--fp8-recipe block",
}
ARMS = {}  # {name: options of train.py}
for prefix, size in SIZES.items():
    for name, recipe in RECIPES.items():
        ARMS[f"{prefix}{name}"] = f"{size} {recipe}"
ARMS["nanogpt"] = f"{GPT2} --fp8-recipe none --model bench/nanogpt.py:NanoGPT --dtype float32 --compile"

# Prefixes of arms, longest first. Stored runs have some of a size that is gone: small-.
PREFIXES = ("small-modern-", "small-", "modern-", "350m-", "")
# 97.5 % quantile of Student's t, for 1, 2, … degrees of freedom
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)


@dataclass
class Options:
    arms: list[str] = field(default_factory=lambda: ["bf16", "fp8"])  # Of ARMS. bf16@1e-3: with another --lr.
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    tokens: float = 1e8  # Tokens a run trains on.
    lr: str = "1.2e-3"  # Peak learning rate, which becomes part of an arm's name. BF16's best of four.
    data: str = "data/packages-r50k_base"  # Folder of token files.
    out_dir: Path = Path("out/convergence")  # The runs' folders.
    json: Path = Path("results/convergence.json")  # Read and written.
    evaluations: int = 10  # Of each run.
    nanogpt: Path = Path("nanoGPT")  # Folder of a nanoGPT checkout, for the arm nanogpt.
    more: str = ""  # More options of train.py, for all arms: --more="--eval-tokens 1000000".


# ---------------------------------------------------------------- summary

def baseline_of(arm: str) -> str:
    """Return the BF16 arm of the same architecture and learning rate."""
    name, at, lr = arm.partition("@")
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    return f"{prefix}bf16{at}{lr}"


def mean_of(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


def standard_error(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def interval_of(values: list[float]) -> list[float] | None:
    """Return the 95 % interval of the mean, of the t distribution."""
    if len(values) < 2:
        return None
    degrees_of_freedom = min(len(values) - 1, len(T_975))
    half = T_975[degrees_of_freedom - 1] * standard_error(values)
    mean = statistics.mean(values)
    return [mean - half, mean + half]


def final_records(runs: list[dict]) -> dict:
    """Return the last record of each run: {(arm, tokens): {seed: record}}."""
    final = {}
    for record in runs:
        if record["tokens"] == record["run_tokens"]:
            final.setdefault((record["arm"], record["tokens"]), {})[record["seed"]] = record
    return final


def percent_above(own: dict, others: dict, field="val_loss") -> list[float]:
    """Return by how many percent a field of a run is above the loss of another, for each seed of both."""
    changes = []
    for seed in sorted(own.keys() & others.keys()):
        if own[seed].get(field) is not None:
            changes.append(100 * (own[seed][field] / others[seed]["val_loss"] - 1))
    return changes


def summarize(runs: list[dict]) -> list[dict]:
    """Return a row per arm and number of tokens, with the fields of `summary` that --help describes."""
    final = final_records(runs)
    rows = []
    for (arm, tokens), by_seed in final.items():
        losses = [record["val_loss"] for record in by_seed.values()]
        baseline = final.get((baseline_of(arm), tokens), {})
        gaps = percent_above(by_seed, baseline)
        gaps_without_fp8 = percent_above(by_seed, baseline, "val_loss_without_fp8")
        if len(gaps_without_fp8) != len(gaps):  # of other seeds: no comparison
            gaps_without_fp8 = []
        rows.append({
            "arm": arm,
            "tokens": tokens,
            "seeds": len(losses),
            "mean": statistics.mean(losses),
            "standard_error": standard_error(losses),
            "gap_percent": mean_of(gaps),
            "gap_standard_error": standard_error(gaps),
            "gap_interval": interval_of(gaps),
            "gap_without_fp8_percent": mean_of(gaps_without_fp8),
            "gap_without_fp8_interval": interval_of(gaps_without_fp8),
            "seconds": median_seconds(by_seed, final, baseline_of(arm)),
        })
    seconds = {(row["arm"], row["tokens"]): row["seconds"] for row in rows}
    for row in rows:
        key = (row["arm"], row["tokens"])
        bf16 = baseline_of(row["arm"])
        over_bf16 = speed_to_loss(key, bf16, seconds, final)
        over_nanogpt = speed_to_loss(key, bf16.replace("bf16", "nanogpt"), seconds, final)
        row["seconds_to_bf16_loss"] = over_bf16.seconds
        row["loss_matched_speedup"] = over_bf16.speedup
        row["loss_matched_interval"] = over_bf16.interval
        row["loss_matched_speedup_over_nanogpt"] = over_nanogpt.speedup
        row["loss_matched_interval_over_nanogpt"] = over_nanogpt.interval
    return sorted(rows, key=lambda row: row["mean"])


def median_seconds(by_seed: dict, final: dict, baseline: str) -> float | None:
    """Return the median training time of the runs on the machine that trained most runs of `baseline`."""
    machines = []
    for (arm, _), records in final.items():
        if arm == baseline:
            machines += [record.get("machine") for record in records.values()]
    seconds = []
    for record in by_seed.values():
        if not machines or record.get("machine") == statistics.mode(machines):
            seconds.append(record["seconds"])
    return statistics.median(seconds) if seconds else None


class SpeedToLoss(NamedTuple):
    """How fast an arm reaches the loss of another."""

    seconds: float | None  # training time after which it ends at that loss
    speedup: float | None  # the other arm's time over this
    interval: list[float] | None  # of the speed-up, 95 %


UNKNOWN = SpeedToLoss(None, None, None)


def speed_to_loss(key: tuple, baseline: str, seconds: dict, final: dict) -> SpeedToLoss:
    """Return how fast the runs of a key (arm, tokens) reach the loss of the arm `baseline` at as many tokens.

    They end there after their seconds · (nearest / tokens)^(gap / fall). `nearest` is another length of the
    arm's runs, in tokens; `gap` is how much its loss is above the other arm's, `fall` how much above its own
    at `nearest`, both means over the seeds. Unknown if the loss is not between the two lengths.

    seconds: {(arm, tokens): training time}.
    """
    arm, tokens = key
    own_seconds = seconds[key]
    other_seconds = seconds.get((baseline, tokens))
    is_timed_in_part = any("switch_step" in record for record in final[key].values())
    if is_timed_in_part or not own_seconds or not other_seconds:
        return UNKNOWN
    if arm == baseline:
        return SpeedToLoss(own_seconds, 1.0, None)

    nearest = nearest_length(arm, tokens, final)
    gaps = losses_above(final[key], final[baseline, tokens])
    falls = losses_above(final[key], final.get((arm, nearest), {}))
    gap = mean_of(gaps)
    fall = mean_of(falls)
    if gap is None or fall is None or not 0 <= gap / fall <= 1:
        return UNKNOWN

    def seconds_to_close(gap):
        return own_seconds * (nearest / tokens) ** (gap / fall)

    interval = interval_of(gaps)
    if interval is not None:
        interval = sorted(other_seconds / seconds_to_close(bound) for bound in interval)
    return SpeedToLoss(seconds_to_close(gap), other_seconds / seconds_to_close(gap), interval)


def nearest_length(arm: str, tokens: int, final: dict) -> int | None:
    """Return the other length of an arm's runs that is nearest to `tokens`, in the logarithm."""
    lengths = [length for name, length in final if name == arm and length != tokens]
    return min(lengths, key=lambda length: abs(math.log(length / tokens)), default=None)


def losses_above(own: dict, others: dict) -> list[float]:
    """Return by how much the loss of a run is above that of another, for each seed of both."""
    return [own[seed]["val_loss"] - others[seed]["val_loss"] for seed in own if seed in others]


def main_table(result) -> str:
    """Return the Markdown table of the summary."""
    columns = [  # title, field, format
        ("arm", "arm", "`{}`"),
        ("tokens", "tokens", "{:,}"),
        ("seeds", "seeds", "{}"),
        ("loss", "mean", "{:.4f}"),
        ("± standard error", "standard_error", "{:.4f}"),
        ("behind BF16, %", "gap_percent", "{:+.2f}"),
        ("95 % interval", "gap_interval", "{0[0]:+.2f} to {0[1]:+.2f}"),
        ("seconds", "seconds", "{:.0f}"),
        ("× BF16 at its loss", "loss_matched_speedup", "{:.2f}"),
    ]
    lines = []
    for row in result["summary"]:
        cells = ["" if row[field] is None else text.format(row[field]) for _, field, text in columns]
        lines.append(cells)
    return markdown([title for title, _, _ in columns], lines)


# ---------------------------------------------------------------- runs

def steps_of(options: Options) -> int:
    return math.ceil(options.tokens / TOKENS_PER_STEP)


def folder_of(options: Options, arm: str, seed: int) -> Path:
    return options.out_dir / f"{arm}-{steps_of(options)}steps-seed{seed}"


def first_options(options: Options, arm: str, seed: int) -> list[str]:
    """Return the options of train.py for a run that begins with random weights."""
    name, _, lr = arm.partition("@")
    steps = steps_of(options)
    interval = str(max(1, steps // options.evaluations))
    return [
        *COMMON.split(), *ARMS[name].split(), "--lr", lr, "--seed", str(seed), "--max-steps", str(steps),
        "--eval-interval", interval, "--checkpoint-interval", interval, "--data", options.data,
        "--out-dir", str(folder_of(options, arm, seed)), *options.more.split()]


def command_of(options: Options, arm: str, seed: int) -> list[str]:
    """Return train.py's command for a run, or for the rest of one that was cut."""
    folder = folder_of(options, arm, seed)
    words = first_options(options, arm, seed)
    if any(folder.glob("step-*")):
        command = [sys.executable, "train.py", "--resume", "--out-dir", str(folder)]
        if "--model" in words:  # a checkpoint has no code
            command += ["--model", words[words.index("--model") + 1]]
        return command
    if folder.exists():  # cut before its first checkpoint
        shutil.rmtree(folder)
    return [sys.executable, "train.py", *words]


def evaluations_of(arm: str, seed: int, folder: Path) -> list[dict]:
    """Return the records of a run for `runs`.

    `seconds` sums the steps after the first. An interval at less than half the median speed holds a resume,
    which captures the CUDA graphs again: it counts at the median.
    """
    records = read_metrics(folder / "metrics.jsonl")
    run = {"arm": arm, "seed": seed, "run_tokens": records[-1]["step"] * TOKENS_PER_STEP}
    median = statistics.median(record["tokens_per_s"] for record in records)
    found = []
    seconds = 0.0
    last_step = records[0]["step"]
    for record in records:
        step = record["step"]
        speed = record["tokens_per_s"]
        if speed <= median / 2:
            speed = median
        seconds += (step - last_step) * TOKENS_PER_STEP / speed
        last_step = step
        losses = {}
        for name in ("val_loss", "val_loss_without_fp8"):
            if record.get(name) is not None:
                losses[name] = record[name]
        if losses:
            tokens = step * TOKENS_PER_STEP
            found.append({**run, "tokens": tokens, "step": step, **losses, "seconds": round(seconds, 3)})
    return found


def visible_gpus() -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each GPU; one for the CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return visible.split(",")
    return [str(gpu) for gpu in range(max(1, torch.cuda.device_count()))]


def train_run(options: Options, arm: str, seed: int, gpu: str) -> str:
    """Train one run, or the rest of it; return an error in a line, or ""."""
    folder = folder_of(options, arm, seed)

    def is_complete():
        records = read_metrics(folder / "metrics.jsonl")
        return bool(records) and records[-1]["step"] >= steps_of(options)

    if is_complete():
        return ""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "NANOGPT": str(options.nanogpt.resolve())}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "a") as log:
        done = subprocess.run(
            command_of(options, arm, seed), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return "" if is_complete() else f"{folder.name}: exit code {done.returncode}, see {folder}.log"


def train_all(options: Options, jobs: list):
    """Train the jobs, (arm, seed), one per GPU at a time. Yields each job and its error, in order.

    Ctrl-C, which train.py gets too, ends the runs after a checkpoint.
    """
    gpus = queue.SimpleQueue()
    for gpu in visible_gpus():
        gpus.put(gpu)

    def work(job):
        gpu = gpus.get()
        error = train_run(options, *job, gpu)
        gpus.put(gpu)
        return job, error

    with ThreadPoolExecutor(len(visible_gpus())) as pool:
        try:
            yield from pool.map(work, jobs)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


# ---------------------------------------------------------------- the command

def check_options(options: Options) -> None:
    check_output(options.json)
    for name in ("tokens", "evaluations"):
        if not getattr(options, name) >= 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be 1 or more")
    for arm in options.arms:
        if arm.partition("@")[0] not in ARMS:
            raise ValueError(f"--arms {arm}: unknown; the arms are {', '.join(ARMS)}")
        if arm.startswith("nanogpt") and not (options.nanogpt / "model.py").exists():
            raise ValueError(f"--arms {arm}: needs a nanoGPT checkout, with its model.py; name its folder "
                             "with --nanogpt")


def corpus_of(options: Options) -> tuple[str, dict]:
    """Return the identifier of a corpus, from the checksums of its files, and its entry in `corpora`."""
    meta = open_tokens(ROOT / options.data, "train", verify=False)[1]
    entry = {"data": options.data}
    for name in ("source", "documents", "train_tokens", "val_tokens"):
        entry[name] = meta.get(name)
    return f"{meta['train_sha256'][:16]}-{meta['val_sha256'][:16]}", entry


def read_document(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"runs": []}


def add_run(records: list[dict], corpora: dict, path: Path, argv) -> None:
    """Add a run to the JSON, in place of an earlier one of the same arm, seed and length."""
    def run_of(record):
        return record["arm"], record["seed"], record["run_tokens"]

    document = read_document(path)  # another command may have added to it
    runs = [record for record in document["runs"] if run_of(record) != run_of(records[0])]
    runs += records
    commands = []
    if "command" in document:
        commands = document["command"].split("; ")
    command = command_line("bench/convergence.py", argv)
    if command not in commands:
        commands.append(command)
    write_report("bench/convergence.py", argv, {
        "command": "; ".join(commands), "corpora": document.get("corpora", {}) | corpora,
        "runs": runs, "summary": summarize(runs)}, path)


def main(argv=None) -> int:
    options = parse(Options, argv, "bench/convergence.py", __doc__)
    check_options(options)
    corpus, description = corpus_of(options)
    for record in read_document(options.json)["runs"]:
        if (record.get("corpus"), record.get("more", "")) != (corpus, options.more):
            raise ValueError(f"--json {options.json}: has runs on another corpus or with another --more; "
                             "name another file")
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    common = {"machine": machine, "corpus": corpus, "more": options.more}
    jobs = []
    for seed in options.seeds:  # outside, so that a study that was cut has all arms of its first seeds
        for arm in options.arms:
            jobs.append((arm if "@" in arm else f"{arm}@{options.lr}", seed))

    errors = []
    for (arm, seed), error in train_all(options, jobs):
        if error:
            errors.append(error)
            continue
        records = evaluations_of(arm, seed, folder_of(options, arm, seed))
        add_run([record | common for record in records], {corpus: description}, options.json, argv)
    if options.json.exists():
        print(main_table(read_document(options.json)))
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/convergence.py"))
