"""Does FP8 learn as well as BF16, and how much sooner is it there? Arms of a GPT, several seeds each.

    python data.py packages --tokenizer r50k_base
    python bench/convergence.py --arms bf16 fp8 --seeds 1 2 3    # one run per GPU at a time
    python bench/convergence.py --arms emulated-only_weights emulated-no_weights
    python bench/convergence.py --arms bf16 fp8 --switch-at 0.75 --evaluations 4 --out-dir out/switched \
        --json results/convergence_switched.json
    python bench/convergence.py --arms nanogpt --nanogpt nanoGPT    # the folder of a checkout
    python bench/convergence.py --draw                           # the summary from the runs in the JSON

Arms are named in `ARMS`. Their prefix is the size, none for GPT-2 124M; `small-` trains in two minutes on a
CPU, `bpe-` in ten, for a GPT-2 vocabulary. Those with `emulated-` quantize a part of the GEMMs' operands, in
bench/ablation.py. `nanogpt` is nanoGPT's model, compiled, with the data, schedule and optimizer of all.

Every arm trains on the same batches for the same seed, and is evaluated on the same tokens. A run that was
cut, by --time-budget, a signal or a machine that went away, continues from its last checkpoint in --out-dir.
A run that is there with other options (--data, --more, --evaluations) is refused. The exit code is 1 if a run
failed.

From random weights, runs of a seed soon differ by more than their precision explains: a change of rounding
has the effect of another seed. With --switch-at, all arms of a seed share the first part of the run, in BF16,
and differ in the rest. They scatter far less, so that fewer seeds are needed. What FP8 costs before the
switch is left out.

The JSON has in `command` all commands that added to it, in `corpora` their token files, and a list `runs`, a
record per evaluation of each completed run: arm, seed, tokens, step, val_loss (nats a token), machine, corpus
(of `corpora`), more, and seconds, the time in training steps alone (without evaluations, checkpoints and the
first step, which captures the CUDA graphs). Runs on other token files, or with another --more, are refused:
they would be averaged with those that are there. Records of older versions lack corpus; nothing of their size
can be added. From the last records follows the list `summary`:

- mean, standard_error: of the final validation loss over the seeds
- gap_percent, gap_standard_error, gap_interval: of the arm's loss over that of bf16, paired by seed; the last
  is its 95 % interval [low, high], of the t distribution; None with one seed
- gap_without_fp8_percent, gap_without_fp8_interval: the same, with the arm's final weights evaluated in BF16;
  None for arms without FP8, or if a seed lacks it
- seconds: training time, median over the runs on the model of GPU (or CPU) that trained most runs of bf16;
  None if it has none. With --switch-at only that after the switch, whose step each record names; the fields
  below are then None.
- seconds_to_bf16_loss, loss_matched_speedup: training time after which a run of this arm ends at the loss of
  bf16 with the same seeds, interpolated in the logarithm of the tokens between runs of two lengths (--tokens
  1e8, then --tokens 1.1e8), and bf16's time over it. A run of another length has its own learning-rate
  schedule, so one run's curve cannot tell.
- loss_matched_interval: the 95 % interval of loss_matched_speedup from that of the gap alone
- loss_matched_speedup_over_nanogpt, loss_matched_interval_over_nanogpt: the same for the loss and the time of
  the arm nanogpt
"""

import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.report import check_folder, check_more, command_line, cpu_name, write_json, write_report
from bench.training import MODERN
from nanote import cli, config_file, json_files
from nanote.config import read_options
from nanote.dataset import open_tokens, sha256
from nanote.metrics import read_metrics

COMMON = "--warmup-steps 100 --log-interval 10 --keep-checkpoints 1 --eval-tokens 2000000"
GPT2 = "--preset gpt2-124m --micro-batch-size 64 --grad-accum 2"
SMALL = ("--preset gpt2-124m --n-layer 3 --n-head 2 --n-embd 64 --seq-len 64 --micro-batch-size 128 "
         "--grad-accum 1 --warmup-steps 60 --eval-tokens 131072")  # two minutes on one CPU core
SIZES = {  # prefix of an arm: options of its architecture
    "": GPT2,
    "modern-": f"{GPT2} {MODERN}",
    "350m-": "--preset gpt2-350m --micro-batch-size 32 --grad-accum 4",
    "small-modern-": f"{SMALL} {MODERN} --n-kv-head 1",
    "small-": SMALL,
    "bpe-": "--preset gpt2-124m --n-layer 3 --n-head 2 --n-embd 64 --seq-len 64 --micro-batch-size 64 "
            "--grad-accum 1 --warmup-steps 20 --eval-tokens 32768",  # ten: 100 steps with 50,257 tokens
}
TOKENS_PER_STEP = dict.fromkeys(SIZES, 131_072) | {"small-modern-": 8_192, "small-": 8_192, "bpe-": 4_096}
RECIPES = {  # name of an arm: options of its precision
    "bf16": "--fp8-recipe none",
    "bf16-again": "--fp8-recipe none",  # with --switch-at restarted from its checkpoint, as the others are
    "bfloat16": "--fp8-recipe none --dtype bfloat16",  # on a CPU; there bf16 computes in float32
    "fp8": "",
    "fp8-most_recent": "--fp8-amax-compute-algo most_recent --fp8-amax-history-len 16",
    "fp8-bf16_head": "--no-fp8-lm-head",
    "fp8-skip_first": "--fp8-skip-first 1",
    "fp8-stochastic": "--fp8-logits-rounding stochastic",
    "fp8-precise_dgrad": "--fp8-dgrad-fast-accum-k 0",
    "fp8-e4m3": "--fp8-format e4m3",
    "fp8-current": "--fp8-recipe current",
    "fp8-block": "--fp8-recipe block",
    "fp8-te_modules": "--no-fast-kernels",
}
ROLES = ("weights", "activations", "gradients", "dgrad.dy", "wgrad.dy", "forward", "dgrad", "wgrad")
EMULATED = {  # name of an arm emulated-…: options of bench/ablation.py
    "none": "quantize=none", "all": "",
    **{f"only_{role}": f"quantize={role}" for role in ROLES},
    "only_head_gradients": "quantize=gradients skip=qkv,proj,fc1,fc2",
    "only_block_gradients": "quantize=gradients skip=head",
    "only_e4m3_gradients": "quantize=gradients gradients=e4m3",
    "only_stochastic_gradients": "quantize=gradients rounding=stochastic",
    **{f"no_{role}": f"keep={role}" for role in ROLES},
    **{f"skip_{layer}": f"skip={layer}" for layer in ("head", "first", "last", "qkv", "proj", "fc1", "fc2")},
    "current": "scaling=current", "row": "scaling=row", "block": "scaling=block gradients=e4m3",
    "current_gradients": "gradient_scaling=current",
    "current_e4m3_gradients": "gradient_scaling=current gradients=e4m3",
    "block_gradients": "gradient_scaling=block gradients=e4m3",
    "history16": "history=16", "most_recent": "history=1",
    "e4m3": "gradients=e4m3", "e4m3_current": "scaling=current gradients=e4m3",
    "stochastic": "rounding=stochastic", "stochastic_head": "rounding=stochastic_head",
    "float32_residual": "residual=float32",
}
ARMS = {  # name: environment variables and options of train.py, as in a shell
    f"{prefix}{name}": f"{size} {options}" for prefix, size in SIZES.items()
    for name, options in RECIPES.items()
}
ARMS |= {
    f"{prefix}emulated-{name}":
        f"NANOTE_ABLATION='{words}' {SIZES[prefix]} --fp8-recipe none --model bench/ablation.py:Ablated"
    for prefix in ("", "small-modern-", "small-", "bpe-") for name, words in EMULATED.items()
}
ARMS["nanogpt"] = f"{GPT2} --fp8-recipe none --model bench/nanogpt.py:NanoGPT --dtype float32 --compile"
# of Student's t, 1, 2… degrees of freedom
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
FIXED = ("--seed", "--lr", "--max-steps", "--eval-interval", "--checkpoint-interval", "--data", "--out-dir",
         "--resume")  # options of train.py that are not for --more
CUT = (0, 130, -signal.SIGINT, -signal.SIGTERM)  # exit codes of a run that was told to stop
DOCUMENT = {"command?": str, "corpora?": dict[str, dict],
            "runs": [{"arm": str, "seed": int, "run_tokens": json_files.SIZE, "tokens": json_files.SIZE,
                      "step": json_files.SIZE, "val_loss": float, "seconds": float, "corpus?": str,
                      "more?": str}]}


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
    time_budget: int = 0
    """Stop all runs after this many seconds; 0: never. Their checkpoints then take up to a minute."""
    evaluations: int = 10  # Of each run.
    nanogpt: Path | None = None  # Folder of a nanoGPT checkout, for the arm nanogpt.
    more: str = ""  # More options of train.py, for all arms: --more="--eval-tokens 1000000".
    switch_at: float = 0.0
    """Share of each run to train in BF16, one run for all arms of a seed and size; 0: none."""
    draw: bool = False  # Train nothing; summarize the runs of the JSON again.


# ---------------------------------------------------------------- training

def command_of(options: Options, arm: str, seed: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return train.py's command and environment variables for a run, or for the rest of one that was cut."""
    name = arm.partition("@")[0]
    words, variables = words_of(name)
    if options.nanogpt:
        variables["NANOGPT"] = str(options.nanogpt.resolve())
    if any(folder.glob("step-*")):
        model = words[words.index("--model"):][:2] if "--model" in words else []  # a checkpoint has no code
        changed = [*precision_of(name), "--keep-checkpoints", "1"] if is_switched(options, arm) else []
        return [sys.executable, "train.py", "--resume", "--out-dir", str(folder), *changed, *model], variables
    if folder.exists():  # cut before its first checkpoint
        shutil.rmtree(folder)
    if is_switched(options, arm):
        copy_checkpoint(options, arm, seed, folder)
        return command_of(options, arm, seed, folder)
    keep = ["--keep-checkpoints", "1000"] if options.switch_at else []  # the arms need one of them
    return [sys.executable, "train.py", *first_options(options, arm, seed, folder), *keep], variables


def words_of(name: str) -> tuple[list[str], dict[str, str]]:
    """Return the options of train.py and the environment variables of an arm."""
    words = shlex.split(ARMS[name])
    variables = dict(word.split("=", 1) for word in words if re.match("[A-Z_]+=", word))
    return words[len(variables):], variables


def first_options(options: Options, arm: str, seed: int, folder: Path) -> list[str]:
    """Return the options of train.py for a run that begins with random weights."""
    name, _, lr = arm.partition("@")
    interval = str(interval_of_evaluations(options, arm))
    return [*COMMON.split(), *words_of(name)[0], "--lr", lr, "--seed", str(seed),
            "--max-steps", str(steps_of(options, arm)), "--eval-interval", interval,
            "--checkpoint-interval", interval, "--data", str(Path(options.data)),
            "--out-dir", str(folder), *options.more.split()]


def steps_of(options: Options, arm: str) -> int:
    return math.ceil(options.tokens / TOKENS_PER_STEP[size_of(arm)])


def interval_of_evaluations(options: Options, arm: str) -> int:
    """Return the number of steps from one evaluation, and checkpoint, to the next."""
    return max(1, steps_of(options, arm) // options.evaluations)


def folder_of(options: Options, arm: str, seed: int) -> Path:
    switched = f"-switched{switch_step(options, arm)}" if is_switched(options, arm) else ""
    return options.out_dir / f"{arm}-{steps_of(options, arm)}steps{switched}-seed{seed}"


def check_run(options: Options, arm: str, seed: int) -> None:
    """ValueError if train.py refuses a run's options, or the run in its folder was trained with others."""
    folder = folder_of(options, arm, seed)
    asked, _, _ = read_options(first_options(options, arm, seed, folder))
    record = folder / config_file.NAME
    is_reused = is_complete(options, arm, folder) or any(folder.glob("step-*"))
    if not is_reused or not record.exists():  # older versions wrote no record: such a run is not checked
        return
    advice = "name another --out-dir and --json, or delete this folder"
    trained = json_files.read(record, config_file.DOCUMENT, advice)["config"]
    for name, value in asdict(asked).items():
        found = trained.get(name, value)
        if value is None and name in ("vocab_size", "n_positions"):
            continue  # a switched run has those of its checkpoint
        if name == "data":  # older versions kept a slash at its end
            found = str(Path(found))
        if found != value and name not in (*config_file.OF_ONE_RUN, "keep_checkpoints"):
            raise ValueError(f"{folder}: was trained with {cli.flag(name)} {found}, not {value}; {advice}")


def corpus_of(options: Options) -> tuple[str, dict]:
    """Return the identifier of a corpus, from the checksums of its files, and its entry in `corpora`."""
    folder = ROOT / options.data  # where train.py reads it
    for split in ("train", "val"):
        meta = open_tokens(folder, split, verify=False)[1]
    identifier = f"{meta['train_sha256'][:16]}-{meta['val_sha256'][:16]}"
    fields = ("source", "documents", "train_tokens", "val_tokens")
    return identifier, {"data": str(Path(options.data)), **{name: meta.get(name) for name in fields}}


def check_same_study(options: Options, arms: list[str], runs: list[dict], corpus: str) -> None:
    """ValueError if the arms' results would be averaged with those of another corpus or other options."""
    for record in runs:
        if size_of(record["arm"]) not in map(size_of, arms):
            continue
        for name, found, value in (("data", record.get("corpus", "unknown"), corpus),
                                   ("more", record.get("more", ""), options.more)):
            if found.split() != value.split():
                raise ValueError(f"--json {options.json}: holds runs of {record['arm']} with another --{name}"
                                 f" ({found!r}, not {value!r}); name another file")


# ---------------------------------------------------------------- --switch-at

def is_switched(options: Options, arm: str) -> bool:
    return options.switch_at > 0 and arm != baseline_of(arm)


def switch_step(options: Options, arm: str) -> int:
    """Return the step of the checkpoint from which the arms differ: that of the nearest evaluation; 0 without
    --switch-at."""
    interval = interval_of_evaluations(options, arm)
    return round(options.switch_at * steps_of(options, arm) / interval) * interval


def check_switch(options: Options, arms: list[str]) -> None:
    """ValueError if an arm cannot begin with bf16's checkpoint, or has no steps before or after it."""
    for arm in arms:
        if arm.startswith("nanogpt"):
            raise ValueError("--switch-at: nanogpt cannot begin with a checkpoint of bf16; leave it out")
        step, steps = switch_step(options, arm), steps_of(options, arm)
        if not 0 < step < steps:
            raise ValueError(f"--switch-at {options.switch_at}: with --evaluations {options.evaluations} the "
                             f"switch is at step {step} of {steps}; it must be in between, as with "
                             "--switch-at 0.75 --evaluations 4")


def precision_of(name: str) -> list[str]:
    """Return the options of train.py that turn a run of bf16 into one of the arm."""
    recipe = name.removeprefix(size_of(name))
    if recipe not in RECIPES:
        return []  # emulated: its model's
    words = RECIPES[recipe].split()
    return words if "--fp8-recipe" in words else ["--fp8-recipe", "delayed", *words]


def check_same_switch(options: Options, arms: list[str], runs: list[dict]) -> None:
    """ValueError if the arms' results would be averaged with, or replace, those with another switch."""
    stored = [record for record in runs if record["arm"] != baseline_of(record["arm"])]
    for arm in arms:
        if arm == baseline_of(arm):
            continue
        step = switch_step(options, arm)
        tokens = steps_of(options, arm) * TOKENS_PER_STEP[size_of(arm)]
        for record in stored:
            other = record.get("switch_step", 0)
            if (size_of(record["arm"]), record["run_tokens"]) == (size_of(arm), tokens) and other != step:
                raise ValueError(f"--json {options.json}: holds runs of {record['arm']} that switch at step "
                                 f"{other}, and {arm} would at {step} (0: never); name another file")


def copy_checkpoint(options: Options, arm: str, seed: int, folder: Path) -> None:
    """Copy bf16's checkpoint of the step --switch-at into the folder of a run of the arm."""
    step = f"step-{switch_step(options, arm)}"
    source = folder_of(options, baseline_of(arm), seed) / step
    if not source.exists():
        raise ValueError(f"--switch-at: there is no {source}; bf16 keeps it if all of it was trained with "
                         "the same --switch-at and --evaluations: name another --out-dir")
    unfinished = folder / "unfinished"
    shutil.copytree(source, unfinished)
    if "emulated-" in arm:  # the same weights, in a model whose operands the environment variable names
        meta = json.loads((unfinished / "meta.json").read_text())
        meta["model"] = meta["config"]["model"] = "bench/ablation.py:Ablated"
        (unfinished / "meta.json").write_text(json.dumps(meta))
        sums = (unfinished / "SHA256SUMS").read_text()
        checksum = sha256(unfinished / "meta.json")
        sums = re.sub("^[0-9a-f]{64}(?=  meta.json$)", checksum, sums, flags=re.MULTILINE)
        (unfinished / "SHA256SUMS").write_text(sums)
    unfinished.rename(folder / step)


# ---------------------------------------------------------------- the runs

def size_of(arm: str) -> str:
    """Return the prefix of an arm, of SIZES."""
    return max((prefix for prefix in SIZES if arm.startswith(prefix)), key=len)


def arms_of(options: Options) -> list[str]:
    """Return the arms with their learning rates."""
    return [arm if "@" in arm else f"{arm}@{options.lr}" for arm in options.arms]


def jobs_of(options: Options) -> tuple[list, list]:
    """Return the runs (arm, seed) whose checkpoints others begin with, and those of the arms."""
    # seeds outside, so that a study that was cut has all arms of its first seeds (and bf16 of all)
    jobs = [(arm, seed) for seed in options.seeds for arm in arms_of(options)]
    shared = dict.fromkeys((baseline_of(arm), seed) for arm, seed in jobs if options.switch_at)
    return list(shared), jobs


def train_all(options: Options, jobs: list, record, deadline: float, stop: threading.Event) -> list:
    """Train the jobs, (arm, seed), one per GPU at a time; call record(arm, seed, folder) after each.

    At the deadline (of time.monotonic), on Ctrl-C and on SIGTERM, `stop` is set and the runs are cut.

    Returns the jobs that failed.
    """
    waiting, running, failed = queue.SimpleQueue(), [], []
    for job in jobs:
        waiting.put(job)

    def train(arm: str, seed: int, gpu: str) -> None:
        folder = folder_of(options, arm, seed)
        if not is_complete(options, arm, folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            command, variables = command_of(options, arm, seed, folder)
            environment = os.environ | variables | {"CUDA_VISIBLE_DEVICES": gpu}
            with open(f"{folder}.log", "a") as log:
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log,
                                           stderr=subprocess.STDOUT)
                running.append(process)
                if stop.is_set():  # it may have been set before `end` could see this process
                    process.send_signal(signal.SIGTERM)
                code = process.wait()
            running.remove(process)
        if is_complete(options, arm, folder):
            record(arm, seed, folder)
        elif not stop.is_set() or code not in CUT:
            raise OSError(f"exit code {code}, see {folder}.log")

    def work(gpu: str) -> None:
        while not stop.is_set() and time.monotonic() < deadline:
            try:
                arm, seed = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                train(arm, seed, gpu)
            except Exception as error:  # the other runs go on
                print(f"{arm}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
                failed.append((arm, seed))

    def end(*_) -> None:
        stop.set()
        for process in running:
            process.send_signal(signal.SIGTERM)  # train.py writes a checkpoint

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in visible_gpus()]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        time.sleep(0.5)
        if time.monotonic() > deadline and not stop.is_set():
            end()
    return failed


def is_complete(options: Options, arm: str, folder: Path) -> bool:
    records = read_metrics(folder / "metrics.jsonl")
    return bool(records) and records[-1]["step"] >= steps_of(options, arm)


def visible_gpus() -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each GPU; one for the CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return named if named[0] else [str(gpu) for gpu in range(max(1, torch.cuda.device_count()))]


def evaluations_of(arm: str, seed: int, folder: Path) -> list[dict]:
    """Return the records of a run for `runs`.

    `seconds` sums the steps after the first. An interval at less than half the median speed holds a resume,
    which captures the CUDA graphs again: it counts at the median.
    """
    records = read_metrics(folder / "metrics.jsonl")
    # a run that was switched has no records before that
    found, seconds, last_step, tokens_per_step = [], 0.0, records[0]["step"], TOKENS_PER_STEP[size_of(arm)]
    median = statistics.median(record["tokens_per_s"] for record in records)
    for record in records:
        step, speed = record["step"], record["tokens_per_s"]
        seconds += (step - last_step) * tokens_per_step / (speed if speed > median / 2 else median)
        last_step = step
        if "val_loss" in record:
            found.append({"arm": arm, "seed": seed, "run_tokens": records[-1]["step"] * tokens_per_step,
                          "tokens": step * tokens_per_step, "step": step, "val_loss": record["val_loss"],
                          "seconds": round(seconds, 3)})
            if "val_loss_without_fp8" in record:
                found[-1]["val_loss_without_fp8"] = record["val_loss_without_fp8"]
    return found


# ---------------------------------------------------------------- summary

def summarize(runs: list[dict]) -> list[dict]:
    """Return a row per arm and number of tokens, over the runs that were completed."""
    final, rows = final_records(runs), []
    for (arm, tokens), by_seed in final.items():
        losses = [record["val_loss"] for record in by_seed.values()]
        gaps = changes_of(final, arm, baseline_of(arm), tokens)
        in_bf16 = changes_of(final, arm, baseline_of(arm), tokens, "val_loss_without_fp8")
        in_bf16 = in_bf16 if len(in_bf16) == len(gaps) else []  # of the same seeds, for comparison
        rows.append({
            "arm": arm, "tokens": tokens, "seeds": len(losses), "mean": statistics.mean(losses),
            "standard_error": standard_error(losses),
            "gap_percent": statistics.mean(gaps) if gaps else None,
            "gap_standard_error": standard_error(gaps), "gap_interval": interval_of(gaps),
            "gap_without_fp8_percent": statistics.mean(in_bf16) if in_bf16 else None,
            "gap_without_fp8_interval": interval_of(in_bf16),
            "seconds": median_seconds(by_seed.values(), machine_of(final, baseline_of(arm))),
        })
    for row in rows:
        baseline = baseline_of(row["arm"])
        found = match(row, baseline, rows, final)
        row["seconds_to_bf16_loss"], row["loss_matched_speedup"], row["loss_matched_interval"] = found
        nanogpt = baseline.replace("bf16", "nanogpt")  # other sizes have none
        (_, row["loss_matched_speedup_over_nanogpt"],
         row["loss_matched_interval_over_nanogpt"]) = match(row, nanogpt, rows, final)
    return sorted(rows, key=lambda row: row["mean"])


def final_records(runs: list[dict]) -> dict:
    """Return the last record of each run: {(arm, tokens): {seed: record}}."""
    final = {}
    for record in runs:
        if record["tokens"] == record["run_tokens"]:
            final.setdefault((record["arm"], record["tokens"]), {})[record["seed"]] = record
    return final


def machine_of(final: dict, arm: str) -> str | None:
    """Return the model of GPU, or CPU, that trained most runs of an arm; None if it has none."""
    machines = [record.get("machine") for (name, _), by_seed in final.items() if name == arm
                for record in by_seed.values()]
    return statistics.mode(machines) if machines else None


def median_seconds(records, machine: str | None) -> float | None:
    """Return the median training time of the runs on a model of GPU, None if there are none. `machine` None:
    of all runs."""
    seconds = [record["seconds"] for record in records if machine in (None, record.get("machine"))]
    return statistics.median(seconds) if seconds else None


def changes_of(final: dict, arm: str, other: str, tokens: int, field="val_loss",
               of_other="val_loss") -> list[float]:
    """Return by how many percent a field of `arm` is above one of `other`, for each seed that both have."""
    own, others = final[arm, tokens], final.get((other, tokens), {})
    return [100 * (own[seed][field] / others[seed][of_other] - 1)
            for seed in sorted(own.keys() & others.keys()) if own[seed].get(field) is not None]


def match(row: dict, baseline: str, rows: list[dict], final: dict) -> tuple:
    """Return the training time after which row's arm ends at the loss that the arm `baseline` has after row's
    tokens, the time of `baseline` over it, and the 95 % interval of that; None for what is not known.

    The gap, over the seeds of both arms, is turned into tokens by how much the loss falls from one length of
    row's arm to its next, over the seeds of both lengths. None if the loss is not between these lengths.
    """
    other = next((r for r in rows if (r["arm"], r["tokens"]) == (baseline, row["tokens"])), None)
    if row["seconds"] is None or other is not None and other["seconds"] is None:
        return None, None, None
    if any("switch_step" in record for record in final[row["arm"], row["tokens"]].values()):
        return None, None, None  # its seconds are of a part of the run
    if other is row:
        return row["seconds"], 1.0, None
    lengths = [r["tokens"] for r in rows if r["arm"] == row["arm"] and r["tokens"] != row["tokens"]]
    if other is None or not lengths:
        return None, None, None
    nearest = min(lengths, key=lambda tokens: abs(math.log(tokens / row["tokens"])))

    def above(arm, tokens):
        own, others = final[row["arm"], row["tokens"]], final[arm, tokens]
        return [own[seed]["val_loss"] - others[seed]["val_loss"] for seed in own if seed in others]

    gaps, falls = above(baseline, row["tokens"]), above(row["arm"], nearest)
    if not gaps or not falls or not 0 <= statistics.mean(gaps) / statistics.mean(falls) <= 1:
        return None, None, None

    def seconds(gap):
        return row["seconds"] * (nearest / row["tokens"]) ** (gap / statistics.mean(falls))

    time = seconds(statistics.mean(gaps))
    bounds = interval_of(gaps)
    return time, other["seconds"] / time, bounds and sorted(other["seconds"] / seconds(gap) for gap in bounds)


def baseline_of(arm: str) -> str:
    """Return the BF16 arm of the same architecture and learning rate."""
    name, at, lr = arm.partition("@")
    return f"{size_of(name)}bf16{at}{lr}"


def standard_error(values: list[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def interval_of(values: list[float]) -> list[float] | None:
    """Return the 95 % interval of the mean."""
    if len(values) < 2:
        return None
    mean = statistics.mean(values)
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * standard_error(values)
    return [mean - half, mean + half]


# ---------------------------------------------------------------- the command

def check_options(options: Options) -> None:
    """ValueError for a number out of range, an unknown arm, or a file that is missing."""
    check_folder(options.json)
    check_more(options.more, FIXED)
    for name, low, high, example in (("tokens", 1, 1e15, "1e8"), ("evaluations", 1, 1e9, "10"),
                                     ("time_budget", 0, 1e9, "3600"), ("switch_at", 0, 1, "0.75")):
        value = getattr(options, name)
        if not low <= value <= high:  # nor is NaN
            raise ValueError(f"{cli.flag(name)} {value}: must be from {low} to {high:g}, such as {example}")
    for arm in options.arms:
        if arm.partition("@")[0] not in ARMS:
            raise ValueError(f"--arms {arm}: unknown; the arms are {', '.join(ARMS)}")
        if arm.startswith("nanogpt") and not options.nanogpt:
            raise ValueError(f"--arms {arm}: needs a nanoGPT checkout; name its folder with --nanogpt")
    if options.nanogpt and not (options.nanogpt / "model.py").exists():
        raise ValueError(f"--nanogpt {options.nanogpt}: has no model.py; name the folder of a nanoGPT "
                         "checkout")
    if options.draw and not options.json.exists():
        raise ValueError(f"--json {options.json}: there is no such file to summarize; leave out --draw to "
                         "train, or name one of results/convergence*.json")


def read_document(options: Options) -> dict:
    if not options.json.exists():
        return {"runs": []}
    return json_files.read(options.json, DOCUMENT, "name another file with --json")


def main(argv=None) -> int:
    options = cli.parse(Options, argv, prog="convergence.py", description=__doc__)
    check_options(options)
    document, failed = read_document(options), []
    arms = arms_of(options)
    if options.switch_at:
        check_switch(options, arms)
    shared, jobs = jobs_of(options)
    if not options.draw:
        check_same_switch(options, arms, document["runs"])
        for job in dict.fromkeys(shared + jobs):
            check_run(options, *job)
        corpus, description = corpus_of(options)
        check_same_study(options, arms, document["runs"], corpus)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    lock = threading.Lock()

    def record(arm: str, seed: int, folder: Path) -> None:
        with lock:
            document = read_document(options)  # another command may have added to it
            more = {"machine": machine, "corpus": corpus, "more": options.more}
            if is_switched(options, arm):
                more["switch_step"] = switch_step(options, arm)
            found = [record | more for record in evaluations_of(arm, seed, folder)]
            run = arm, seed, found[0]["run_tokens"]
            runs = [r for r in document["runs"] if (r["arm"], r["seed"], r["run_tokens"]) != run] + found
            commands = [*document.get("command", "").split("; "), command_line("bench/convergence.py", argv)]
            write_report("bench/convergence.py", argv, {
                "command": "; ".join(dict.fromkeys(filter(None, commands))),
                "corpora": document.get("corpora", {}) | {corpus: description},
                "runs": runs, "summary": summarize(runs)}, options.json)

    if not options.draw:
        deadline, stop = time.monotonic() + (options.time_budget or math.inf), threading.Event()
        if shared:
            failed += train_all(options, shared, record, deadline, stop)
            trained = [job for job in shared if is_complete(options, job[0], folder_of(options, *job))]
            jobs = [job for job in jobs if job not in shared and (baseline_of(job[0]), job[1]) in trained]
        failed += train_all(options, jobs, record, deadline, stop)
        if not options.json.exists():
            raise ValueError(f"{options.json}: no run is complete; see the logs in {options.out_dir}, or "
                             "run the same command again to go on")
        document = read_document(options)
    document["summary"] = summarize(document["runs"])
    if document["runs"]:
        write_json(options.json, document)
    for row in document["summary"]:
        print(describe(row))
    return 1 if failed else 0


def describe(row: dict) -> str:
    """Return a row of the summary as a line."""
    line = (f"{row['arm']:24} {row['tokens'] / 1e6:6.1f} M tokens, {row['seeds']} seeds, "
            f"loss {row['mean']:.4f}")
    if row["standard_error"]:
        line += f" ± {row['standard_error']:.4f}"
    if row["gap_percent"] is not None:
        line += f"  gap {row['gap_percent']:+.2f} %"
    if row["gap_interval"]:
        line += " [{:+.2f}, {:+.2f}]".format(*row["gap_interval"])
    if row["loss_matched_speedup"]:
        line += f"  at equal loss {row['loss_matched_speedup']:.2f} x as fast"
    return line if row["seconds"] is None else f"{line}  {row['seconds']:.0f} s"


if __name__ == "__main__":
    sys.exit(cli.run(main, "convergence.py"))
