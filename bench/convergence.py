"""Does FP8 learn as well as BF16, and how much sooner is it there? Arms of a GPT, several seeds each.

    python data.py packages --tokenizer r50k_base
    python bench/convergence.py --arms bf16 fp8 --seeds 1 2 3    # one run per GPU at a time
    python bench/convergence.py --arms nanogpt --nanogpt nanoGPT    # the folder of a checkout

Arms are named in `ARMS`. Their prefix is the size: none for GPT-2 124M; modern- for its modern block; 350m-;
small- trains in two minutes on a CPU. `nanogpt` is nanoGPT's model, compiled, with the data, schedule and
optimizer of all. Every arm trains on the same batches for the same seed, and is evaluated on the same tokens.
A run that was cut, by Ctrl-C or a machine that went away, continues from its last checkpoint in --out-dir.
The exit code is 1 if a run failed.

The JSON has in `command` all commands that added to it, in `corpora` their token files, and a list `runs`, a
record per evaluation of each completed run; its seconds are those of training steps alone. Runs on other
token files, or with another --more, are refused. From the last records follows the list `summary`:

- mean, standard_error: of the final validation loss over the seeds
- gap_percent, gap_standard_error, gap_interval: of the arm's loss over that of bf16, paired by seed; the last
  is its 95 % interval [low, high], of the t distribution; None with one seed
- gap_without_fp8_percent, gap_without_fp8_interval: the same, with the final weights evaluated in BF16
- seconds: training time, median over the runs on the machine that trained most runs of bf16
- seconds_to_bf16_loss, loss_matched_speedup, loss_matched_interval: training time after which a run of this
  arm ends at the loss of bf16, interpolated in the logarithm of the tokens between runs of two lengths;
  bf16's time over it, and its 95 % interval from that of the gap. A run of another length has its own
  learning-rate schedule
- loss_matched_speedup_over_nanogpt, loss_matched_interval_over_nanogpt: the same for the arm nanogpt
"""

import json
import math
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import convergence_report as report
from bench.report import check_output, command_line, cpu_name, write_report
from nanote.config import parse, run_command
from nanote.logs import read_metrics
from nanote.tokens import open_tokens

COMMON = "--warmup-steps 100 --log-interval 10 --keep-checkpoints 1 --eval-tokens 2000000"
GPT2 = "--preset gpt2-124m --micro-batch-size 64 --grad-accum 2"
MODERN = "--activation swiglu --use-rmsnorm --use-rotary --use-qk-norm --no-bias --n-kv-head 4"
SIZES = {  # prefix of an arm: options of its architecture
    "": GPT2,
    "modern-": f"{GPT2} {MODERN}",
    "350m-": "--preset gpt2-350m --micro-batch-size 32 --grad-accum 4",
    "small-": "--preset gpt2-124m --n-layer 3 --n-head 2 --n-embd 64 --seq-len 64 --micro-batch-size 128 "
              "--grad-accum 1 --warmup-steps 60 --eval-tokens 131072",
}
TOKENS_PER_STEP = dict.fromkeys(SIZES, 131_072) | {"small-": 8_192}
RECIPES = {  # name of an arm: options of its precision
    "bf16": "--fp8-recipe none", "fp8": "", "fp8-e4m3": "--fp8-format e4m3",
    "fp8-current": "--fp8-recipe current", "fp8-block": "--fp8-recipe block",
    "fp8-most_recent": "--fp8-amax-compute-algo most_recent --fp8-amax-history-len 16",
    "fp8-bf16_head": "--no-fp8-lm-head", "fp8-skip_first": "--fp8-skip-first 1",
    "fp8-te_modules": "--model optimized",
}
ARMS = {f"{prefix}{name}": f"{size} {options}" for prefix, size in SIZES.items()
        for name, options in RECIPES.items()}
ARMS["nanogpt"] = f"{GPT2} --fp8-recipe none --model bench/nanogpt.py:NanoGPT --dtype float32 --compile"


@dataclass
class Options:
    arms: list[str] = field(default_factory=lambda: ["bf16", "fp8"])
    """Arms to train, of ARMS; one may end in @LR for another peak learning rate, such as bf16@1e-3."""
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])
    tokens: float = 1e8  # Tokens a run trains on.
    lr: str = "1.2e-3"  # Peak learning rate, which becomes part of an arm's name. BF16's best of four.
    data: str = "data/packages-r50k_base"  # Folder of token files.
    out_dir: Path = Path("out/convergence")  # The runs' folders.
    json: Path = Path("results/convergence.json")  # Read and written.
    evaluations: int = 10  # Of each run.
    nanogpt: Path = Path("nanoGPT")  # Folder of a nanoGPT checkout, for the arm nanogpt.
    more: str = ""  # More options of train.py, for all arms: --more="--eval-tokens 1000000".

# ---------------------------------------------------------------- one run

def steps_of(options: Options, arm: str) -> int:
    return math.ceil(options.tokens / TOKENS_PER_STEP[report.size_of(arm)])


def folder_of(options: Options, arm: str, seed: int) -> Path:
    return options.out_dir / f"{arm}-{steps_of(options, arm)}steps-seed{seed}"


def first_options(options: Options, arm: str, seed: int) -> list[str]:
    """Return the options of train.py for a run that begins with random weights."""
    name, _, lr = arm.partition("@")
    interval = str(max(1, steps_of(options, arm) // options.evaluations))
    return [*COMMON.split(), *ARMS[name].split(), "--lr", lr, "--seed", str(seed),
            "--max-steps", str(steps_of(options, arm)), "--eval-interval", interval,
            "--checkpoint-interval", interval, "--data", options.data,
            "--out-dir", str(folder_of(options, arm, seed)), *options.more.split()]


def command_of(options: Options, arm: str, seed: int) -> list[str]:
    """Return train.py's command for a run, or for the rest of one that was cut."""
    folder, words = folder_of(options, arm, seed), first_options(options, arm, seed)
    if any(folder.glob("step-*")):
        model = words[words.index("--model"):][:2] if "--model" in words else []  # a checkpoint has no code
        return [sys.executable, "train.py", "--resume", "--out-dir", str(folder), *model]
    if folder.exists():  # cut before its first checkpoint
        shutil.rmtree(folder)
    return [sys.executable, "train.py", *words]


def is_complete(options: Options, arm: str, seed: int) -> bool:
    records = read_metrics(folder_of(options, arm, seed) / "metrics.jsonl")
    return bool(records) and records[-1]["step"] >= steps_of(options, arm)


def evaluations_of(arm: str, seed: int, folder: Path) -> list[dict]:
    """Return the records of a run for `runs`.

    `seconds` sums the steps after the first. An interval at less than half the median speed holds a resume,
    which captures the CUDA graphs again: it counts at the median.
    """
    records, tokens_per_step = read_metrics(folder / "metrics.jsonl"), TOKENS_PER_STEP[report.size_of(arm)]
    found, seconds, last_step = [], 0.0, records[0]["step"]
    median = statistics.median(record["tokens_per_s"] for record in records)
    for record in records:
        step, speed = record["step"], record["tokens_per_s"]
        seconds += (step - last_step) * tokens_per_step / (speed if speed > median / 2 else median)
        last_step = step
        if "val_loss" in record:
            losses = {name: record[name] for name in ("val_loss", "val_loss_without_fp8")
                      if record.get(name) is not None}
            found.append({"arm": arm, "seed": seed, "run_tokens": records[-1]["step"] * tokens_per_step,
                          "tokens": step * tokens_per_step, "step": step, **losses,
                          "seconds": round(seconds, 3)})
    return found


# ---------------------------------------------------------------- all runs

def visible_gpus() -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each GPU; one for the CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return named if named[0] else [str(gpu) for gpu in range(max(1, torch.cuda.device_count()))]


def train_run(options: Options, arm: str, seed: int, gpu: str) -> str:
    """Train one run, or the rest of it; return an error in a line, or ""."""
    folder = folder_of(options, arm, seed)
    if is_complete(options, arm, seed):
        return ""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "NANOGPT": str(options.nanogpt.resolve())}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "a") as log:
        code = subprocess.run(command_of(options, arm, seed), cwd=ROOT, env=environment, stdout=log,
                              stderr=subprocess.STDOUT).returncode
    return "" if is_complete(options, arm, seed) else f"{folder.name}: exit code {code}, see {folder}.log"


def train_all(options: Options, jobs: list, record) -> list[str]:
    """Train the jobs, (arm, seed), one per GPU at a time, and call record(arm, seed) after each that is
    complete; return the errors. Ctrl-C, which train.py gets too, ends the runs after a checkpoint."""
    gpus, lock = queue.SimpleQueue(), threading.Lock()
    for gpu in visible_gpus():
        gpus.put(gpu)

    def work(job):
        gpu = gpus.get()
        error = train_run(options, *job, gpu)
        gpus.put(gpu)
        if not error:
            with lock:
                record(*job)
        return error

    with ThreadPoolExecutor(len(visible_gpus())) as pool:
        try:
            return list(filter(None, pool.map(work, jobs)))
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise


# ---------------------------------------------------------------- the command

def check_options(options: Options) -> None:
    check_output(options.json)
    for name, value in (("tokens", options.tokens), ("evaluations", options.evaluations)):
        if not value >= 1:
            raise ValueError(f"--{name} {value}: must be 1 or more")
    for arm in options.arms:
        if arm.partition("@")[0] not in ARMS:
            raise ValueError(f"--arms {arm}: unknown; the arms are {', '.join(ARMS)}")
        if arm.startswith("nanogpt") and not (options.nanogpt / "model.py").exists():
            raise ValueError(f"--arms {arm}: needs a nanoGPT checkout, with its model.py; name its folder "
                             "with --nanogpt")


def read_document(options: Options) -> dict:
    return json.loads(options.json.read_text()) if options.json.exists() else {"runs": []}


def corpus_of(options: Options) -> tuple[str, dict]:
    """Return the identifier of a corpus, from the checksums of its files, and its entry in `corpora`."""
    _, meta = open_tokens(ROOT / options.data, "train", verify=False)
    identifier = f"{meta['train_sha256'][:16]}-{meta['val_sha256'][:16]}"
    fields = ("source", "documents", "train_tokens", "val_tokens")
    return identifier, {"data": options.data, **{name: meta.get(name) for name in fields}}


def main(argv=None) -> int:
    options = parse(Options, argv, "bench/convergence.py", __doc__)
    check_options(options)
    arms = [arm if "@" in arm else f"{arm}@{options.lr}" for arm in options.arms]
    # seeds outside, so that a study that was cut has all arms of its first seeds
    jobs = [(arm, seed) for seed in options.seeds for arm in arms]
    corpus, description = corpus_of(options)
    others = {(run.get("corpus"), run.get("more", "")) for run in read_document(options)["runs"]}
    if others - {(corpus, options.more)}:
        raise ValueError(f"--json {options.json}: has runs on another corpus or with another --more; "
                         "name another file")
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()

    def record(arm: str, seed: int) -> None:
        document = read_document(options)  # another command may have added to it
        more = {"machine": machine, "corpus": corpus, "more": options.more}
        found = [record | more for record in evaluations_of(arm, seed, folder_of(options, arm, seed))]
        run = arm, seed, found[0]["run_tokens"]
        runs = [r for r in document["runs"] if (r["arm"], r["seed"], r["run_tokens"]) != run] + found
        commands = [*document.get("command", "").split("; "), command_line("bench/convergence.py", argv)]
        write_report("bench/convergence.py", argv, {
            "command": "; ".join(dict.fromkeys(filter(None, commands))),
            "corpora": document.get("corpora", {}) | {corpus: description},
            "runs": runs, "summary": report.summarize(runs)}, options.json)

    errors = train_all(options, jobs, record)
    if options.json.exists():
        print(report.main_table(read_document(options)))
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/convergence.py"))
