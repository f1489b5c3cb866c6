"""What does FP8 cost? Pairs of runs that begin with the same weights and train on the same batches.

    python data.py packages --tokenizer r50k_base
    python bench/paired.py --tokens 45e6 100e6              # FP8, four seeds, whole runs from random weights
    python bench/paired.py --arms fp8 --start 0.75          # the last quarter, from BF16's checkpoint
    python bench/paired.py --arms fp8 --stop 0.25 --end 1   # FP8 in the first quarter, then BF16
    NANOGPT=nanoGPT python bench/paired.py --arms nanogpt   # the folder of a checkout
    python bench/paired.py --init-from out/base --data data/mine --lr 1e-4    # fine-tune a run of train.py
    python bench/paired.py --init-from out/base --data data/mine --lr 1e-3 --lora-rank 16 --arms fp8-frozen

From one checkpoint the two runs of a pair differ far less than two seeds do: they have the same weights and
batches. Over a whole run they drift apart, and their differences scatter by about 1 % of the loss, hardly
less than single runs. So whole runs need many pairs.

A run consists of parts. The arm trains the window, from `start` to `stop`; the rest is BF16:

    initial weights | BF16 up to `start` | the arm up to `stop` | BF16 up to `end`

These are fractions of a whole run of --tokens, whose schedule the learning rate follows. The baseline trains
the same parts, all of them in BF16. Each part has a folder inside that of the part before it, so that arms
share what comes before the window. That is cut at each quarter, so that a later --start continues there. Of
--tokens 45e6 --start 0.75 --stop 1:

    out/paired/packages-r50k_base-124m-344steps-lr0.0012-seed1     initial weights
        bf16-1-86/bf16-87-172/bf16-173-258                          BF16, saved at each quarter
            bf16-259-344                                            the window of the baseline
            fp8-259-344                                             that of the arm

A part begins with the weights and moments of the part before it, and finds FP8's scales anew, on its first
batch. The arm nanogpt loads the kit's weights and moments by their names in nanoGPT. All arms train with
train.py's own step; they are in bench/arms.py.

With --init-from all runs begin with the weights of the base, a run of train.py or its step-<n>. With
--lora-rank both runs of a pair train only adapters, by the edit `lora`.

Each GPU trains whole runs: of four seeds on two GPUs each trains two. Before --minutes are over, or at
SIGTERM or Ctrl-C, a run saves its state, and the same command continues it, with its scales. The state of a
part, about 1.5 GB for 124m, stays in --out-dir; without it the same command trains the part again.

The JSON is written after each run. It has in `runs` a record per complete run, with the loss of each step.
From all of them bench/gaps.py makes `rows`: differences with their intervals and, of whole runs of two
lengths, the speed to equal loss: how much faster an arm is if it trains until it has BF16's loss. Two runs
are a pair only if they are of one machine, commit, PyTorch and, but for some arms, model, if they shared
everything before the window, and if BF16's loss is finite; the script prints every run that it leaves out.
After a new commit use another --out-dir, so that BF16 is trained with it, too.

The runs of a pair train one after the other, not in turns: the GPU's clock may differ between them.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import atexit
import datetime
import functools
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from time import monotonic as clock  # in seconds
from time import sleep
from typing import Literal, NamedTuple

import torch

import train
from bench import edits
from bench.arms import ARMS, BASELINE, SIZES
from bench.gaps import (
    SAME_ORIGIN,
    lines_about_left_out,
    main_table,
    stored_key,
    summarize,
    without_dirty,
)
from bench.nanogpt import names_of_kit
from bench.report import check_output, command_line, commit, write_json
from bench.step import free, make_parts
from nanote import adapters, checkpoint, models, recipes, training_state
from nanote.command import parse, run_command
from nanote.config import TrainConfig
from nanote.evaluation import validation_loss
from nanote.loader import Loader
from nanote.options import MUST_MATCH
from nanote.parallel import Ranks, StopRequest
from nanote.schedule import learning_rate

CHUNK = 10  # steps after which the clock is read, which waits for the GPU
TIME_TO_TRAIN = 0.95  # of --minutes; the rest is for writing the state
SECONDS_TO_WRITE = 10  # until the JSON is written again while other processes train
NOT_COMPLETE = 3  # exit code of a process that trains some of the seeds


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
    minutes: float = math.inf  # Save and stop within this time; the same command continues.
    data: str = "data/packages-r50k_base"  # Folder of token files.
    init_from: str | None = None  # Begin with the weights of this run of train.py. None: with random weights.
    lora_rank: int | None = None  # Train adapters of this rank alone. None: all weights.
    out_dir: Path = Path("out/paired")  # Folder of the runs' states.
    json: Path = Path("results/paired.json")  # Read and written.
    only_train: bool = False  # Write no JSON.

    @property
    def tokens_per_step(self) -> int:
        config = TrainConfig(**SIZES[self.size])
        return config.grad_accum * config.micro_batch_size * config.seq_len

    def one_length_each(self) -> list["Options"]:
        """Return a copy of the options for each length of --tokens."""
        return [replace(self, tokens=[tokens]) for tokens in self.tokens]

    @property
    def steps(self) -> int:
        """Steps of a whole run, for a copy of `one_length_each`."""
        assert len(self.tokens) == 1, "--tokens has several lengths: take the copies of one_length_each"
        return math.ceil(self.tokens[0] / self.tokens_per_step)

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
    is_window: bool = False  # the steps that the arm trains, or the baseline beside it


def parts_of_run(options: Options, arm: str, seed: int) -> list[Part]:
    """Return the parts of a run, without those that have no step."""
    start = options.step_at(options.start)
    stop = options.step_at(options.stop)
    end = options.step_at(options.end_or_stop)
    data = Path(options.data).name
    run_name = f"{data}-{options.size}-{options.steps}steps-lr{options.lr:g}-seed{seed}"
    if options.init_from is not None:
        run_name += f"-base{read_base(options.init_from).sha256[:12]}"
    if options.lora_rank is not None:
        run_name += f"-lora{options.lora_rank}"
    parts = [Part(BASELINE, 1, 0, options.out_dir / run_name)]

    def append(arm_of_part, first_step, last_step, is_window=False):
        if first_step <= last_step:
            folder = parts[-1].folder / f"{arm_of_part}-{first_step}-{last_step}"
            parts.append(Part(arm_of_part, first_step, last_step, folder, is_window))

    quarters = [options.step_at(fraction) for fraction in (0.25, 0.5, 0.75) if fraction < options.start]
    for before, last_step in pairwise([0, *quarters, start]):
        append(BASELINE, before + 1, last_step)
    append(arm, start + 1, stop, is_window=True)
    append(BASELINE, stop + 1, end)
    return parts


def is_complete(part: Part) -> bool:
    if not validation_file(part).exists():  # written last: until then another process may replace the rest
        return False
    meta = meta_of(part)
    return meta is not None and meta["step"] == part.last_step


def meta_of(part: Part) -> dict | None:
    """Return meta.json of a part's newest checkpoint, None without one. Its validation losses are in it if
    they are known."""
    newest = checkpoint.latest(part.folder)
    if newest is None:
        return None
    meta = checkpoint.read_meta(newest)
    if validation_file(part).exists():
        meta |= json.loads(validation_file(part).read_text())
    return meta


def validation_file(part: Part) -> Path:
    return part.folder / "validation.json"


def config_of(options: Options, arm: str, seed: int) -> TrainConfig:
    fields = dict(seed=seed, data=options.data, max_steps=options.steps, lr=options.lr)
    if options.init_from is not None:
        fields |= read_base(options.init_from).architecture
    config = TrainConfig(**SIZES[options.size] | ARMS[arm].options | fields)
    baseline = TrainConfig(**SIZES[options.size] | ARMS[BASELINE].options | fields)
    needs_te = config.fp8_recipe in ("current", "block")
    if config.model == "auto" and not needs_te and picked_model(baseline) == "fast":
        config = replace(config, model="fast")  # not another model than the baseline's
    if options.lora_rank is not None:
        rank = (f"lora_rank={options.lora_rank}",)
        config = replace(config, model=model_with_adapters(picked_model(config)), set=(rank, *config.set))
    return config


class Base(NamedTuple):
    """The run whose weights fine-tuning begins with."""

    folder: Path  # its checkpoint
    meta: dict  # meta.json of that
    sha256: str  # of the files with its weights

    @property
    def architecture(self) -> dict:
        """The options of train.py for a model with the tensors of the base."""
        model_config = self.meta["model_config"]
        return {name: model_config[name] for name in MUST_MATCH if name in model_config}


@functools.cache  # else each part would read all files of the base
def read_base(source: str) -> Base:
    """Return the base that --init-from names."""
    try:
        folder = checkpoint.find(source)
    except ValueError:
        raise ValueError(f"--init-from {source}: holds no checkpoint; name a run of train.py, or a step-<n> "
                         "of one") from None
    meta = checkpoint.read_meta(folder)
    if "base" in meta:
        raise ValueError(f"--init-from {source}: holds adapters; name the run that is their base")
    return Base(folder, meta, adapters.checksum_of_weights(folder))


@functools.cache
def model_with_adapters(name: str) -> str:
    """Write model file `name` with the edit lora to a temporary folder of this process. Return it as a value
    of --model."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = edits.edited_file(name, "lora", Path(folder))
    return f"{path}:{edits.CLASSES[name]}"


def picked_model(config: TrainConfig) -> str:
    """Return the model that a config trains on this machine."""
    device = models.pick_device(config.device)
    name, _ = models.pick_model(asdict(config), device, dtype_of_weights(config, device))
    return name


def check_model(config: TrainConfig, device) -> None:
    """Raise ValueError if --model fast cannot train a config on this device."""
    if config.model != "fast":
        return
    reason = models.fast_unsupported_reason(asdict(config), dtype_of_weights(config, device))
    if reason:
        raise ValueError(f"--model fast: {reason}; pass --model optimized")


def dtype_of_weights(config: TrainConfig, device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def stored_config(config: TrainConfig) -> dict:
    """Return a config as meta.json has it, without the path of the data."""
    fields = json.loads(json.dumps(asdict(config), default=str))
    del fields["data"]
    if config.set:  # the model is that of `model_with_adapters`, in another folder in each process
        fields["model"] = Path(config.model).name
    return fields


def changes_of(arm: str):
    """Return a context in which the functions of FP8 are those of the arm."""
    if not ARMS[arm].replaces_functions:
        return nullcontext()
    from bench import fp8_arms  # needs Triton
    return fp8_arms.changed(arm)


class TimeLimit:
    """When training has to stop: before --minutes are over, or at a signal."""

    def __init__(self, minutes: float, stop: StopRequest):
        self.deadline = clock() + TIME_TO_TRAIN * 60 * minutes
        self.stop = stop
        self.longest_setup = 0.0  # seconds to build, compile and capture a part, with its first steps

    def allows(self, seconds: float) -> bool:
        return not self.stop.is_received and clock() + seconds < self.deadline


def train_part(options: Options, seed: int, part: Part, source: Path | None, limit: TimeLimit) -> None:
    """Train the steps of a part that are missing, within the time limit, and save its state. Then validate
    it if it is complete.

    source: folder of the part before it, None for initial weights.
    """
    began = clock()
    config = config_of(options, part.arm, seed)
    config_in_meta = stored_config(config)
    device = models.pick_device(config.device)
    loader = Loader(config, "train", Ranks(), device)
    train.fit_to_data(config, loader.meta, resumed_meta={})
    model, optimizer, gradients = make_parts(config, device)
    so_far = load_progress(options, config, model, optimizer, loader, part, source)
    functions = train.make_step(config, model, optimizer, gradients)
    if config.uses_cuda_graph(recipes.has_fp8_gpu(device)):
        functions = train.with_cuda_graphs(model, optimizer, functions)
    trained = train_steps(config, optimizer, functions, loader, so_far["step"] + 1, part.last_step, limit)
    if len(trained.times) > 1:
        limit.longest_setup = max(limit.longest_setup, trained.times[1] - began)
    machine = recipes.describe()
    # times of another GPU are not mixed with those of this one
    ms_so_far = so_far["ms_per_step"] if so_far.get("machine") == machine else []
    newest = checkpoint.latest(part.folder)
    is_saved = newest is not None and checkpoint.step_of(newest) == trained.step
    if not is_saved:  # else it was stopped before its validation
        save_part(part, trained.step, model, optimizer, {
            "losses": so_far["losses"] + trained.losses,
            "skipped_steps": so_far.get("skipped_steps", 0) + trained.skipped_steps,
            "ms_per_step": ms_so_far + ms_of_chunks(trained.times),
            "train_sha256": loader.meta["train_sha256"],
            "config": config_in_meta,
            "machine": machine,
        })
    if trained.step == part.last_step:
        write_json(validation_file(part), validation_losses(config, model, device))


def save_part(part: Part, step: int, model, optimizer, meta: dict) -> None:
    """Save the checkpoint of a part in place of its last one. meta: what its meta.json has beside fields of
    the model, the commit and the date."""
    meta = meta | {
        "weights_sha256": weights_sha256(model),
        "model_config": asdict(model.config),
        "model": type(model).__name__,
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    validation_file(part).unlink(missing_ok=True)  # of a checkpoint that was removed
    with checkpoint.Checkpoints(part.folder, keep=1) as checkpoints:
        checkpoints.save(step, model, optimizer, meta)


def weights_sha256(model) -> str:
    """Return a checksum by which two runs see that they began with the same weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(training_state.weights_of(model).items()):
        digest.update(name.encode())
        values = weight.detach().cpu().reshape(-1)
        digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()


def load_progress(options: Options, config: TrainConfig, model, optimizer, loader, part: Part,
              source: Path | None) -> dict:
    """Load the state that a part continues with. Return its "step", "losses" and "ms_per_step" so far, as in
    its meta.json."""
    unfinished = checkpoint.latest(part.folder)
    if unfinished is not None:
        checkpoint.load(unfinished, model, optimizer)
        return checkpoint.read_meta(unfinished)
    if source is not None:
        load_weights_and_moments(checkpoint.latest(source), model, optimizer)
        if recipes.uses_delayed_scaling(model):
            batch = loader.batches(part.first_step)[0]  # the part's first step trains on it, too
            recipes.find_first_scales(model, batch.inputs, config.grad_accum)
    elif options.init_from is not None:
        from_base = replace(config, init_from=str(read_base(options.init_from).folder))
        train.load_state(from_base, model, optimizer, loader, source=None, resumed_meta={})
        model.base_of_adapters = None  # the parts of a run store all weights: the next one reads no base
    return {"step": part.first_step - 1, "losses": [], "ms_per_step": []}


@dataclass
class Trained:
    """What `train_steps` has done."""

    step: int  # the last one
    losses: list[float]  # of each step
    skipped_steps: int  # whose gradient norm was not finite
    times: list[float]  # of clock(), at the beginning and after each chunk


def train_steps(config: TrainConfig, optimizer, functions, loader, first_step: int, last_step: int,
                limit: TimeLimit) -> Trained:
    """Train until the time limit, at least one chunk or, at a signal, one step."""
    losses = []  # on the device
    skipped_steps = torch.zeros((), device=loader.device)
    times = [clock()]
    step = first_step - 1
    for step in range(first_step, last_step + 1):
        optimizer.set_lr(learning_rate(step, config))
        loss = train.run_micro_batches(functions.forward_backward, loader.batches(step))
        norm = functions.update()
        losses.append(loss)
        skipped_steps += ~norm.isfinite()
        is_stopped = limit.stop.is_received
        if step % CHUNK == 0 or step == last_step or is_stopped:
            loss.item()  # waits for the GPU
            times.append(clock())
            chunk = times[-1] - times[-2]
            if is_stopped or not limit.allows(chunk):
                break
    return Trained(step, [loss.item() for loss in losses], int(skipped_steps), times)


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


def load_weights_and_moments(folder: Path, model, optimizer) -> None:
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

def train_seeds(options: Options, write: Callable) -> bool:
    """Train the runs of all lengths and seeds on one device. Return whether they are complete in time.
    write(): called after each run."""
    with closing(StopRequest()) as stop:  # Ctrl-C and SIGTERM finish the step and save
        limit = TimeLimit(options.minutes, stop)
        return all(train_length(single, limit, write) for single in options.one_length_each())


def train_length(options: Options, limit: TimeLimit, write: Callable) -> bool:
    """Train the runs of one length within the time limit. Return whether they are complete."""
    for seed in options.seeds:
        for arm in (BASELINE, *options.arms):
            source = None
            for part in parts_of_run(options, arm, seed):
                if not is_complete(part):
                    if not limit.allows(limit.longest_setup):
                        return False
                    train_or_report(options, seed, part, source, limit)
                    free()
                    torch._dynamo.reset()  # or torch.compile reaches its recompile limit
                if not is_complete(part):
                    return False
                source = part.folder
            print(f"{options.size} seed {seed} {arm}: done", flush=True)
            write()
    return True


def train_or_report(options: Options, seed: int, part: Part, source: Path | None, limit: TimeLimit) -> None:
    """Train a part. If it fails, print which part it is, and raise its error."""
    try:
        with changes_of(part.arm):
            train_part(options, seed, part, source, limit)
    except Exception:
        print(f"{options.size} seed {seed} {part.arm}, steps {part.first_step} to {part.last_step}: failed",
              flush=True)
        raise


def visible_gpus() -> list[str]:
    """Return a value of CUDA_VISIBLE_DEVICES for each GPU; ["0"] without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        return visible.split(",")
    return [str(gpu) for gpu in range(max(1, torch.cuda.device_count()))]


def train_on_all_gpus(options: Options, argv: list[str], write: Callable) -> bool:
    """Train each GPU's share of the seeds in a process of its own. Return whether all are complete. write():
    called after each run, or every few seconds."""
    gpus = visible_gpus()
    if len(gpus) == 1 or len(options.seeds) == 1:
        return train_seeds(options, write)
    processes = {}  # {their seeds: process}
    for i, gpu in enumerate(gpus):
        seeds = [str(seed) for seed in options.seeds[i::len(gpus)]]
        if seeds:
            # of two options --seeds the last one counts
            command = [sys.executable, __file__, *argv, "--seeds", *seeds, "--only-train"]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            processes[" ".join(seeds)] = subprocess.Popen(command, env=environment)
    try:
        wait_for(list(processes.values()), write)
    finally:  # else processes would train on after an error
        for process in processes.values():
            process.terminate()  # does nothing after its end
    for seeds, process in processes.items():
        if process.returncode not in (0, NOT_COMPLETE):
            print(f"--seeds {seeds}: its process failed with exit code {process.returncode}", flush=True)
    return all(process.returncode == 0 for process in processes.values())


def wait_for(processes: list[subprocess.Popen], write: Callable) -> None:
    """Wait for the end of all processes. Pass a signal on, at which they save their states. write(): called
    every SECONDS_TO_WRITE."""
    is_passed_on = False
    written = clock()
    with closing(StopRequest()) as stop:
        while any(process.poll() is None for process in processes):
            if clock() > written + SECONDS_TO_WRITE:
                write()
                written = clock()
            if stop.is_received and not is_passed_on:
                is_passed_on = True
                for process in processes:
                    process.send_signal(signal.SIGTERM)
            sleep(0.2)


# ---------------------------------------------------------------- the record of a run

RECORDED = (*SAME_ORIGIN, "date")  # of the window


def run_record(options: Options, arm: str, seed: int) -> dict | None:
    """Return the record of a run for the JSON, None if the run is not complete."""
    parts = parts_of_run(options, arm, seed)
    if not all(is_complete(part) for part in parts):
        return None
    metas = [meta_of(part) for part in parts]
    losses = [loss for meta in metas for loss in meta["losses"]]
    skipped_steps = sum(meta.get("skipped_steps", 0) for meta in metas)
    number = next(number for number, part in enumerate(parts) if part.is_window)
    before, window = metas[number - 1:number + 1]
    ms_per_step = window["ms_per_step"]
    last = metas[-1]
    record = {
        "size": options.size, "arm": arm, "seed": seed, "steps": options.steps, "lr": options.lr,
        "train_sha256": last["train_sha256"],
        "tokens": options.steps * options.tokens_per_step,
        "start": options.start, "stop": options.stop, "end": options.end_or_stop,
        "shared_weights": before.get("weights_sha256"),
        "ms": statistics.median(ms_per_step) if ms_per_step else None,
        "losses": [round(loss, 6) for loss in losses], "skipped_steps": skipped_steps,
        "val_loss": last["val_loss"], "val_loss_without_fp8": last.get("val_loss_without_fp8"),
        **{name: window.get(name) for name in RECORDED}}
    if options.init_from is not None:
        record["base_sha256"] = read_base(options.init_from).sha256
    if options.lora_rank is not None:
        record["lora_rank"] = options.lora_rank
    return record


# ---------------------------------------------------------------- the command

def check_options(options: Options) -> None:
    check_output(options.json)
    if not 0 <= options.start < options.stop <= options.end_or_stop <= 1:
        raise ValueError(f"--start {options.start} --stop {options.stop} --end {options.end}: must be "
                         "fractions of the run in this order, such as --start 0.75 --stop 1")
    if "nanogpt" in options.arms and not os.environ.get("NANOGPT"):
        raise ValueError("--arms nanogpt: NANOGPT is not set; name the folder of a nanoGPT checkout")
    if BASELINE in options.arms:
        raise ValueError(f"--arms {BASELINE}: is the baseline, which is trained anyway; name others, or fp8")
    if options.init_from is not None:
        read_base(options.init_from)  # raises ValueError if it is no run
    check_fine_tuning(options)
    check_once("--arms", options.arms)
    check_once("--seeds", options.seeds)
    check_once("--tokens", [single.steps for single in options.one_length_each()], unit=" steps")
    for single in options.one_length_each():
        if single.step_at(options.start) == single.step_at(options.stop):
            raise ValueError(f"--start {options.start} --stop {options.stop}: no step of {single.steps} lies "
                             "between; choose a longer part or more --tokens")
    for arm in options.arms:
        check_machine(options, arm)


def check_fine_tuning(options: Options) -> None:
    """Raise ValueError for adapters without a base, and for arms that --init-from or --lora-rank exclude."""
    if options.lora_rank is not None and options.init_from is None:
        raise ValueError(f"--lora-rank {options.lora_rank}: adapters need a base; pass --init-from, too")
    for arm in options.arms:
        if arm == "nanogpt" and options.init_from is not None:
            raise ValueError(f"--arms {arm}: begins with random weights; leave it out, or --init-from")
        if arm == "fp8-frozen" and options.lora_rank is None:
            raise ValueError(f"--arms {arm}: keeps the base of adapters in FP8; pass --lora-rank 16, too")
        if "model" in ARMS[arm].options and options.lora_rank is not None:
            raise ValueError(f"--arms {arm}: names a model, and --lora-rank another; leave out one")


def check_once(flag: str, values: list, unit: str = "") -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{flag}: {value}{unit} occurs twice; name it once")


def check_machine(options: Options, arm: str) -> None:
    """Raise ValueError if this machine cannot train an arm."""
    try:
        config = config_of(options.one_length_each()[0], arm, seed=1)
        device = models.pick_device(config.device)
        recipes.check_machine(config, device)
        check_model(config, device)
        if options.lora_rank is not None:
            models.resolve_config(config.model, config, use_fp8=True, saved=None)  # refuses a wrong rank
    except ValueError as error:
        raise ValueError(f"--arms {arm}: {error}") from None


def check_folders(options: Options) -> None:
    """Raise ValueError if a part was trained on other data, or with other options."""
    config = config_of(options, BASELINE, options.seeds[0])
    data_meta = Loader(config, "train", Ranks()).meta
    if options.init_from is not None:
        check_base(options, config, data_meta)
    train_sha256 = data_meta["train_sha256"]
    for seed in options.seeds:
        for arm in (BASELINE, *options.arms):
            for part in parts_of_run(options, arm, seed):
                check_folder(config_of(options, part.arm, seed), part, train_sha256)


def check_base(options: Options, config: TrainConfig, data_meta: dict) -> None:
    """Raise ValueError if the base is of another tokenizer than the data, or has a shorter context."""
    train.fit_to_data(config, data_meta, resumed_meta=read_base(options.init_from).meta)
    if config.seq_len > config.n_positions:
        raise ValueError(f"--init-from {options.init_from}: has {config.n_positions} positions, and --size "
                         f"{options.size} trains sequences of {config.seq_len}; name a base with as many")


def check_folder(config: TrainConfig, part: Part, train_sha256: str) -> None:
    """Raise ValueError if the folder of a part has a checkpoint of other data or other options, or one that
    another commit has begun."""
    meta = meta_of(part)
    if meta is None:
        return
    if meta["train_sha256"] != train_sha256:
        raise ValueError(f"{part.folder}: was trained on other data than {config.data}; "
                         "name another --out-dir")
    fields = stored_config(config)
    for name, value in meta.get("config", fields).items():
        if fields.get(name) != value:
            raise ValueError(f"{part.folder}: was trained with {name} {value}, now {fields.get(name)}; "
                             "name another --out-dir")
    if is_complete(part):
        return
    begun_by = without_dirty(meta["commit"])
    own = without_dirty(commit())
    if begun_by != own:
        raise ValueError(f"{part.folder}: was begun by commit {begun_by}, and this is {own}; "
                         "name another --out-dir")


def complete_runs(options: Options) -> list[dict]:
    """Return the records of the complete runs of the options."""
    records = []
    for single in options.one_length_each():
        for seed in options.seeds:
            for arm in (BASELINE, *options.arms):
                records.append(run_record(single, arm, seed))
    return [record for record in records if record is not None]


def add_runs(options: Options, argv) -> dict:
    """Add the complete runs of the options to the JSON. Return what is in it then: commands, rows, runs."""
    document = {"commands": [], "runs": []}
    if options.json.exists():
        document = json.loads(options.json.read_text())
    new = complete_runs(options)
    new_keys = [stored_key(run) for run in new]
    runs = [run for run in document["runs"] if stored_key(run) not in new_keys] + new
    commands = document["commands"]
    command = command_line("bench/paired.py", argv)
    is_new_command = command not in commands
    if is_new_command:
        commands.append(command)
    is_changed = is_new_command or runs != document["runs"]
    document = {"commands": commands, "rows": summarize(runs), "runs": runs}
    if new and is_changed:  # this is called every few seconds
        write_json(options.json, document)
    return document


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, "bench/paired.py", __doc__)
    check_options(options)
    for single in options.one_length_each():
        check_folders(single)
    if options.only_train:
        return 0 if train_seeds(options, write=lambda: None) else NOT_COMPLETE
    write = functools.partial(add_runs, options, argv)  # also while training: the process may be killed
    is_done = False
    try:
        is_done = train_on_all_gpus(options, argv, write)
    finally:  # also after an error
        document = write()
    for line in lines_about_left_out(document["runs"]):
        print(line)
    if document["rows"]:
        print(main_table(document["rows"]))
    if not is_done:
        print("not complete: the time is over, or a process has failed; the same command continues")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/paired.py"))
