"""What does FP8 cost? Pairs of runs that begin with the same weights and train on the same batches.

    python data.py packages --tokenizer r50k_base
    python bench/paired.py --tokens 45e6 100e6              # FP8, four seeds, whole runs from random weights
    python bench/paired.py --arms fp8 --start 0.75          # the last quarter, from BF16's checkpoint
    python bench/paired.py --arms fp8 --stop 0.25 --end 1   # FP8 in the first quarter, then BF16
    NANOGPT=nanoGPT python bench/paired.py --arms nanogpt   # the folder of a checkout

Single runs scatter by 1 % of the loss, mostly by their first weights and the order of their batches. A pair
has both in common, so the difference of two losses scatters less; that of the training losses, which are
means over many steps on the same batches, least.

A run consists of parts. Each loads the state that the part before it saved, weights and moments:

    initial weights | BF16 up to `start` | the arm up to `stop` | BF16 up to `end`

The baseline is BF16 in all parts. An arm loads the baseline's checkpoint at `start`. The baseline is also
saved at every quarter before `start`, so runs with other --start reuse it. The learning rate is that of the
whole run of --tokens, of which `start`, `stop` and `end` are fractions.

The kit's arms train with train.py's own step. So does nanoGPT, in float32 weights under BF16 autocast: its
weights and moments are the kit's under other names.

An arm is a set of options of train.py, below in ARMS. Some also replace functions (bench/fp8_arms.py):

    fp8-activations, fp8-weights, fp8-gradients    one operand of each GEMM in FP8, the other one in BF16
    fp8-dgrad-float32                              no fast accumulation in dgrad, as in Transformer Engine
    fp8-scales-1                                   scales start at 1; else the first batch finds them
    fp8-stochastic-logits                          the logits' gradient is rounded stochastically to E5M2

Each GPU trains some of the seeds. After --minutes a run saves its state, and the same command continues it.
The state of a part, about 1.5 GB for 124m, stays in --out-dir; that of an arm is not needed after its run.
The JSON has a record per run, with the loss of each step, and from all of them `pairs`: differences, their
95 % intervals over seeds (t distribution), and how much faster an arm is at the loss of BF16.
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
import statistics
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from time import monotonic as clock  # in seconds
from typing import Literal

import torch

import train
from bench.nanogpt import names_of_kit
from bench.report import check_output, command_line, commit, markdown, write_json
from bench.step import free, make_parts
from nanote import checkpoint, models, recipes, training_state
from nanote.command import parse, run_command
from nanote.config import TrainConfig
from nanote.evaluation import validation_loss
from nanote.loader import Loader
from nanote.parallel import Ranks
from nanote.schedule import learning_rate

BASELINE = "bf16"
ARMS = {  # {name: options of train.py}
    "bf16": dict(fp8_recipe="none"),
    "fp8": {},
    "fp8-current": dict(fp8_recipe="current"),
    "fp8-block": dict(fp8_recipe="block"),
    "fp8-e4m3": dict(fp8_format="e4m3"),
    "fp8-history-1": dict(fp8_amax_history_len=1),
    "fp8-history-16": dict(fp8_amax_history_len=16),
    "fp8-head-bf16": dict(fp8_lm_head=False),
    "fp8-first-bf16": dict(fp8_skip_first=1),
    "fp8-last-bf16": dict(fp8_skip_last=1),
    "fp8-activations": dict(model="fast"),
    "fp8-weights": dict(model="fast"),
    "fp8-gradients": dict(model="fast"),
    "fp8-dgrad-float32": dict(model="fast"),
    "fp8-scales-1": {},
    "fp8-stochastic-logits": dict(model="fast"),
    "nanogpt": dict(fp8_recipe="none", model="bench/nanogpt.py:NanoGPT", dtype="float32", compile=True),
}
# keys of fp8_arms.CHANGES, whose import needs Triton
CHANGED_FP8 = ("fp8-activations", "fp8-weights", "fp8-gradients", "fp8-dgrad-float32", "fp8-scales-1",
               "fp8-stochastic-logits")
MODERN = dict(
    activation="swiglu", use_rmsnorm=True, use_rotary=True, use_qk_norm=True, bias=False, n_kv_head=4)
SCHEDULE = dict(warmup_steps=100, eval_tokens=2_000_000)
SIZES = {  # {name: options of train.py}; a step has 131,072 tokens, one of `tiny` 512
    "124m": dict(preset="gpt2-124m", micro_batch_size=64, grad_accum=2) | SCHEDULE,
    "modern": dict(preset="gpt2-124m", micro_batch_size=64, grad_accum=2) | SCHEDULE | MODERN,
    "350m": dict(preset="gpt2-350m", micro_batch_size=32, grad_accum=4) | SCHEDULE,
    "tiny": dict(preset="tiny", n_layer=2, n_embd=64, n_head=2, seq_len=64, micro_batch_size=4, grad_accum=2,
                 warmup_steps=4, eval_tokens=512),
}
CHUNK = 10  # steps between two looks at the clock, each of which waits for the GPU
# 97.5 % quantile of Student's t, for 1, 2, … degrees of freedom
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)

# Fields, besides the seed, that both runs of a pair share
PAIR = ("size", "train_sha256", "lr", "tokens", "start", "stop", "end")


@dataclass
class Options:
    arms: list[Literal[tuple(ARMS)]] = field(default_factory=lambda: ["fp8"])  # Compared with bf16.
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    size: Literal[tuple(SIZES)] = "124m"
    tokens: list[float] = field(default_factory=lambda: [45e6])  # Of a whole run; several: one after another.
    start: float = 0.0  # Where an arm begins, as a fraction of the run.
    stop: float = 1.0  # Where it stops.
    end: float | None = None  # Where the run ends. None: at --stop.
    lr: float = 1.2e-3  # Peak learning rate.
    minutes: float = math.inf  # Save and stop after so long; the same command continues.
    data: str = "data/packages-r50k_base"  # Folder of token files.
    out_dir: Path = Path("out/paired")  # Folder of the runs' states.
    json: Path = Path("results/paired.json")  # Read and written.
    only_train: bool = False  # Write no JSON.

    @property
    def tokens_per_step(self) -> int:
        config = TrainConfig(**SIZES[self.size])
        return config.grad_accum * config.micro_batch_size * config.seq_len

    def one_length_each(self) -> list["Options"]:
        """Return a copy of the options for each length of --tokens. `steps` is defined for such a copy."""
        return [replace(self, tokens=[tokens]) for tokens in self.tokens]

    @property
    def steps(self) -> int:
        tokens = self.tokens[0]  # of one_length_each
        return math.ceil(tokens / self.tokens_per_step)

    @property
    def end_or_stop(self) -> float:
        return self.stop if self.end is None else self.end

    def step_at(self, fraction: float) -> int:
        return round(fraction * self.steps)


# ---------------------------------------------------------------- the parts of a run

@dataclass(frozen=True)
class Part:
    """Steps of a run, trained as one arm. Steps 1 to 0: the initial weights."""

    arm: str
    first_step: int
    last_step: int
    folder: Path  # of its checkpoints, inside that of the part before it


def parts_of_run(options: Options, arm: str, seed: int) -> list[Part]:
    """Return the parts of a run, without those that have no step."""
    start = options.step_at(options.start)
    stop = options.step_at(options.stop)
    end = options.step_at(options.end_or_stop)
    data = Path(options.data).name
    folder = options.out_dir / f"{data}-{options.size}-{options.steps}steps-lr{options.lr:g}-seed{seed}"
    parts = [Part(BASELINE, 1, 0, folder)]
    quarters = [options.step_at(fraction) for fraction in (0.25, 0.5, 0.75) if fraction < options.start]
    windows = [(BASELINE, first + 1, last) for first, last in pairwise([0, *quarters, start])]
    windows += [(arm, start + 1, stop), (BASELINE, stop + 1, end)]
    for name, first_step, last_step in windows:
        if first_step <= last_step:
            folder = folder / f"{name}-{first_step}-{last_step}"
            parts.append(Part(name, first_step, last_step, folder))
    return parts


def is_complete(part: Part) -> bool:
    newest = checkpoint.latest(part.folder)
    return newest is not None and checkpoint.step_of(newest) == part.last_step


def config_of(options: Options, arm: str, seed: int) -> TrainConfig:
    fields = dict(seed=seed, data=options.data, max_steps=options.steps, lr=options.lr)
    return TrainConfig(**SIZES[options.size] | ARMS[arm] | fields)


def changes_of(arm: str):
    """Return a context in which the functions of FP8 are those of the arm."""
    if arm not in CHANGED_FP8:
        return nullcontext()
    from bench import fp8_arms  # needs Triton
    return fp8_arms.changed(arm)


def train_part(options: Options, seed: int, part: Part, source: Path | None, deadline: float) -> None:
    """Train the steps of a part that are missing, until the deadline, and save its state.

    source: folder of the part before it, None for initial weights. deadline: of clock().
    """
    config = config_of(options, part.arm, seed)
    device = models.pick_device(config.device)
    loader = Loader(config, "train", Ranks(), device)
    train.fit_to_data(config, loader.meta, resumed_meta={})
    model, optimizer, gradients = make_parts(config, device)
    so_far = load_part(config, model, optimizer, loader, part, source)
    functions = train.make_step(config, model, optimizer, gradients)
    if config.uses_cuda_graph(recipes.has_fp8_gpu(device)):
        functions = train.with_cuda_graphs(model, optimizer, functions)
    step, losses, ms_per_step = train_steps(
        config, optimizer, functions, loader, so_far["step"] + 1, part.last_step, deadline)
    meta = {
        "losses": so_far["losses"] + losses,
        "ms_per_step": so_far["ms_per_step"] + ms_per_step,
        "train_sha256": loader.meta["train_sha256"],
        "machine": recipes.describe(),
        "commit": commit(),
    }
    if step == part.last_step:
        meta |= validation_losses(config, model, device)
    with checkpoint.Checkpoints(part.folder, keep=1) as checkpoints:
        checkpoints.save(step, model, optimizer, meta | {"model_config": asdict(model.config)})


def load_part(config: TrainConfig, model, optimizer, loader, part: Part, source: Path | None) -> dict:
    """Load the state that a part continues with. Return its "step", "losses" and "ms_per_step" so far, as in
    its meta.json."""
    unfinished = checkpoint.latest(part.folder)
    if unfinished is not None:
        checkpoint.load(unfinished, model, optimizer)
        return checkpoint.read_meta(unfinished)
    if source is not None:
        load_state(checkpoint.latest(source), model, optimizer)
        if recipes.uses_delayed_scaling(model):
            batch = loader.batches(part.first_step)[0]  # which `train_steps` reads again
            recipes.find_first_scales(model, batch.inputs, config.grad_accum)
    return {"step": part.first_step - 1, "losses": [], "ms_per_step": []}


def train_steps(config: TrainConfig, optimizer, functions, loader, first_step: int, last_step: int,
                deadline: float) -> tuple[int, list[float], list[float]]:
    """Train until the deadline. Return the step reached, the loss of each step, and ms per step."""
    losses = []  # on the device
    times = [clock()]
    step = first_step - 1
    while step < last_step and times[-1] < deadline:
        step += 1
        optimizer.set_lr(learning_rate(step, config))
        loss = train.run_micro_batches(functions.forward_backward, loader.batches(step))
        functions.update()
        losses.append(loss)
        if step % CHUNK == 0 or step == last_step:
            loss.item()  # waits for the GPU
            times.append(clock())
    return step, [loss.item() for loss in losses], ms_of_chunks(times)


def validation_losses(config: TrainConfig, model, device) -> dict:
    """Return the validation loss and, of a model in FP8, that of the same weights without FP8."""
    loader = Loader(config, "val", Ranks(), device)
    losses = {"val_loss": validation_loss(config, model, loader)}
    if recipes.uses_fp8(model):
        with recipes.turned_off(model):
            losses["val_loss_without_fp8"] = validation_loss(config, model, loader)
    return losses


def ms_of_chunks(times: list[float]) -> list[float]:
    """Return ms per step of the chunks between `times`, without the first two, which capture graphs or
    compile, and the last, which may be shorter."""
    timed = times[2:-1]
    return [1e3 * (end - start) / CHUNK for start, end in zip(timed, timed[1:])]


def load_state(folder: Path, model, optimizer) -> None:
    """Load weights and moments of a checkpoint, of the kit's model or of nanoGPT, into one or the other."""
    stored = checkpoint.read_tensors(folder, ("model.", "optimizer."))
    needed = training_state.weights_of(model)
    kit_names = names_of_kit(model.config.n_layer)
    nanogpt_names = {kit: name for name, kit in kit_names.items()}
    other_names = kit_names | nanogpt_names  # {either model's name: the other's}
    renamed = {}
    for stored_name, tensor in stored.items():
        name = training_state.parameter_name(stored_name)
        if name not in needed:  # the other model's
            stored_name = stored_name.replace(name, other_names[name])
        renamed[stored_name] = tensor
    with torch.no_grad():
        training_state.load_weights(training_state.weights_of(model), renamed)
        groups = checkpoint.read_meta(folder)["optimizer_groups"]
        training_state.load_optimizer(optimizer, model, renamed, groups)


# ---------------------------------------------------------------- all runs, on all GPUs

def train_seeds(options: Options) -> bool:
    """Train the runs of all lengths and seeds on one device. Return whether they are complete in time."""
    deadline = clock() + 60 * options.minutes
    return all(train_length(single, deadline) for single in options.one_length_each())


def train_length(options: Options, deadline: float) -> bool:
    """Train the runs of one length until the deadline. Return whether they are complete."""
    for seed in options.seeds:
        for arm in (BASELINE, *options.arms):
            source = None
            for part in parts_of_run(options, arm, seed):
                if not is_complete(part):
                    if clock() >= deadline:
                        return False
                    with changes_of(part.arm):
                        train_part(options, seed, part, source, deadline)
                    free()
                    torch._dynamo.reset()  # or torch.compile reaches its recompile limit
                if not is_complete(part):
                    return False
                source = part.folder
            print(f"{options.size} seed {seed} {arm}: done", flush=True)
    return True


def visible_gpus() -> list[str]:
    """Return a value of CUDA_VISIBLE_DEVICES for each GPU; ["0"] without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return visible.split(",")
    return [str(gpu) for gpu in range(max(1, torch.cuda.device_count()))]


def train_on_all_gpus(options: Options, argv: list[str]) -> bool:
    """Train each GPU's share of the seeds in a process of its own. Return whether all are complete."""
    gpus = visible_gpus()
    if len(gpus) == 1 or len(options.seeds) == 1:
        return train_seeds(options)
    processes = []
    for i, gpu in enumerate(gpus):
        seeds = [str(seed) for seed in options.seeds[i::len(gpus)]]
        if seeds:
            # of two options --seeds the last one counts
            command = [sys.executable, __file__, *argv, "--seeds", *seeds, "--only-train"]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    return all(code == 0 for code in codes)


# ---------------------------------------------------------------- what they show

def run_record(options: Options, arm: str, seed: int) -> dict:
    """Return the record of a complete run for the JSON."""
    parts = parts_of_run(options, arm, seed)
    metas = [checkpoint.read_meta(checkpoint.latest(part.folder)) for part in parts]
    losses = []
    ms_per_step = []
    for part, meta in zip(parts, metas):
        losses += meta["losses"]
        if part.arm == arm:
            ms_per_step += meta["ms_per_step"]
    last = metas[-1]
    return {
        "size": options.size, "arm": arm, "seed": seed, "steps": options.steps, "lr": options.lr,
        "train_sha256": last["train_sha256"],
        "tokens": options.steps * options.tokens_per_step,
        "start": options.start, "stop": options.stop, "end": options.end_or_stop,
        "ms": statistics.median(ms_per_step) if ms_per_step else None,
        "losses": [round(loss, 6) for loss in losses], "val_loss": last["val_loss"],
        "val_loss_without_fp8": last.get("val_loss_without_fp8"),
        "machine": last["machine"], "commit": last["commit"]}


def summarize(runs: list[dict]) -> list[dict]:
    """Return a row per arm, size, number of tokens and window."""
    rows = [row_of(pairs) for pairs in pairs_by_row(runs)]
    for row in rows:
        row["speed_to_equal_loss"] = speed_to_equal_loss(row, rows)
    return rows


def pairs_by_row(runs: list[dict]) -> list[list[tuple]]:
    """Return the pairs of each row of `summarize`: (the arm's run, BF16's) for each seed that has both."""
    baselines = {}  # {pair_of(run): BF16's run}
    for run in runs:
        if run["arm"] == BASELINE:
            baselines[pair_of(run)] = run
    pairs = {}  # {(arm, *fields of PAIR): pairs of a row}
    for run in runs:
        baseline = baselines.get(pair_of(run))
        if run["arm"] != BASELINE and baseline is not None:
            key = tuple(run[name] for name in ("arm", *PAIR))
            pairs.setdefault(key, []).append((run, baseline))
    return list(pairs.values())


def row_of(pairs: list[tuple]) -> dict:
    """Return the mean differences of an arm from BF16 over the seeds, in nats, with their 95 % intervals."""
    training = [training_loss(run) - training_loss(baseline) for run, baseline in pairs]
    validation = [run["val_loss"] - baseline["val_loss"] for run, baseline in pairs]
    baseline_loss = statistics.mean(training_loss(baseline) for _, baseline in pairs)
    first_run, _ = pairs[0]
    return {name: first_run[name] for name in ("arm", *PAIR)} | {
        "seeds": len(pairs), "baseline_training_loss": baseline_loss,
        "training": statistics.mean(training), "training_interval": interval_of(training),
        "training_percent": 100 * statistics.mean(training) / baseline_loss,
        "validation": statistics.mean(validation), "validation_interval": interval_of(validation),
        "speed": median_speed(pairs)}


def interval_of(values: list[float]) -> list[float] | None:
    """Return the 95 % interval of the mean, of the t distribution; None for one value."""
    if len(values) < 2:
        return None
    degrees_of_freedom = min(len(values) - 1, len(T_975))
    standard_error = statistics.stdev(values) / math.sqrt(len(values))
    half = T_975[degrees_of_freedom - 1] * standard_error
    mean = statistics.mean(values)
    return [mean - half, mean + half]


def median_speed(pairs: list[tuple]) -> float | None:
    """Return BF16's time per step over the arm's, the median of the pairs that were timed; None if none was,
    because the parts were too short."""
    ratios = [baseline["ms"] / run["ms"] for run, baseline in pairs if baseline["ms"] and run["ms"]]
    return statistics.median(ratios) if ratios else None


def pair_of(run: dict) -> tuple:
    """Return the values that a run shares with its baseline."""
    return tuple(run[name] for name in ("seed", *PAIR))


def training_loss(run: dict) -> float:
    """Return the mean training loss of the last steps, as many as a tenth of the whole run has, also where
    the run ends earlier."""
    count = max(1, run["steps"] // 10)
    return statistics.mean(run["losses"][-count:])


def speed_to_equal_loss(row: dict, rows: list[dict]) -> float | None:
    """Return BF16's training time over that of a whole run of this arm which ends at BF16's loss.

    BF16's loss is taken as linear in log(tokens) between two lengths of whole runs: this row's, and the
    nearest other one, where BF16's loss is lower by `fall`, negative if that run is shorter. The arm's loss
    is higher than BF16's by `gap`. So the arm needs (nearest tokens / tokens)^(gap / fall) times as many
    tokens.

    None without such runs, or if the gap is larger than the fall, since that is too far to extrapolate.
    """
    if row["speed"] is None or (row["start"], row["stop"]) != (0.0, 1.0):
        return None
    nearest = nearest_length(row, rows)
    if nearest is None:
        return None
    fall = row["baseline_training_loss"] - nearest["baseline_training_loss"]
    gap = row["training"]
    if abs(gap) > abs(fall):
        return None
    more_tokens = (nearest["tokens"] / row["tokens"]) ** (gap / fall)
    return row["speed"] / more_tokens


def nearest_length(row: dict, rows: list[dict]) -> dict | None:
    """Return the row of the same arm whose number of tokens is the nearest other one, None without such."""
    others = [other for other in rows if is_other_length(other, row)]
    return min(others, key=lambda other: distance(other, row), default=None)


def is_other_length(other: dict, row: dict) -> bool:
    same = ("arm", "size", "train_sha256", "lr", "start", "stop")
    return other["tokens"] != row["tokens"] and all(other[name] == row[name] for name in same)


def distance(other: dict, row: dict) -> float:
    return abs(math.log(other["tokens"] / row["tokens"]))


def main_table(rows: list[dict]) -> str:
    """Return the Markdown table of the pairs."""
    titles = ["arm", "size", "tokens", "the arm's part", "seeds", "training loss, nats", "95 % interval", "%",
              "validation loss", "95 % interval", "x BF16", "at equal loss"]
    lines = []
    for row in rows:
        lines.append([
            f"`{row['arm']}`", row["size"], f"{row['tokens']:,}",
            f"{row['start']:g} to {row['stop']:g} of {row['end']:g}",
            str(row["seeds"]), f"{row['training']:+.4f}", describe_interval(row["training_interval"]),
            f"{row['training_percent']:+.2f}", f"{row['validation']:+.4f}",
            describe_interval(row["validation_interval"]), describe_ratio(row["speed"]),
            describe_ratio(row["speed_to_equal_loss"])])
    return markdown(titles, lines)


def describe_interval(interval: list[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"


def describe_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


# ---------------------------------------------------------------- the command

def check_options(options: Options) -> None:
    check_output(options.json)
    if not 0 <= options.start < options.stop <= options.end_or_stop <= 1:
        raise ValueError(f"--start {options.start} --stop {options.stop} --end {options.end}: must be "
                         "fractions of the run in this order, such as --start 0.75 --stop 1")
    if "nanogpt" in options.arms and not os.environ.get("NANOGPT"):
        raise ValueError("--arms nanogpt: NANOGPT is not set; name the folder of a nanoGPT checkout")


def add_runs(options: Options, argv) -> list[dict]:
    """Add the runs of the options to the JSON, in place of earlier ones, and return the rows of all pairs."""
    document = {"commands": [], "runs": []}
    if options.json.exists():
        document = json.loads(options.json.read_text())
    new = []
    for single in options.one_length_each():
        for seed in options.seeds:
            for arm in (BASELINE, *options.arms):
                new.append(run_record(single, arm, seed))
    new_keys = [(run["arm"], pair_of(run)) for run in new]
    kept = [run for run in document["runs"] if (run["arm"], pair_of(run)) not in new_keys]
    command = command_line("bench/paired.py", argv)
    commands = document["commands"]
    if command not in commands:
        commands.append(command)
    rows = summarize(kept + new)
    write_json(options.json, {"commands": commands, "pairs": rows, "runs": kept + new})
    return rows


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, "bench/paired.py", __doc__)
    check_options(options)
    if options.only_train:
        return 0 if train_seeds(options) else 1
    if not train_on_all_gpus(options, argv):
        print("not complete: --minutes are over, or a process has failed; the same command continues")
        return 1
    print(main_table(add_runs(options, argv)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/paired.py"))
