"""What does FP8 cost? Pairs of runs that begin with the same weights and train on the same batches.

    python data.py packages --tokenizer r50k_base
    python bench/paired.py --tokens 45e6 100e6              # FP8, four seeds, whole runs from random weights
    python bench/paired.py --arms fp8 --start 0.75          # the last quarter, from BF16's checkpoint
    python bench/paired.py --arms fp8 --stop 0.25 --end 1   # FP8 in the first quarter, then BF16
    NANOGPT=nanoGPT python bench/paired.py --arms nanogpt   # the folder of a checkout
    python bench/paired.py --init-from out/base --data data/mine --lr 1e-4    # fine-tune a run of train.py
    python bench/paired.py --init-from out/base --data data/mine --lr 1e-3 --lora-rank 16 --arms fp8-frozen

Single runs scatter by 1 % of the loss, mostly by their first weights and the order of their batches. A pair
has both in common, so the difference of two losses scatters less; that of the training losses, which are
means over many steps on the same batches, least.

A run consists of parts:

    initial weights | BF16 up to `start` | the arm up to `stop` | BF16 up to `end`

The window is `start` to `stop`: the steps that the arm trains. `start`, `stop` and `end` are fractions of a
whole run of --tokens, whose schedule the learning rate follows. The baseline is BF16 in all parts. All arms
with the same seed, length and window share one BF16 run, and begin the window with its checkpoint at `start`.
A run with --start is also saved at each quarter before `start`, where runs with a later --start continue.

A part starts with the weights and moments that the part before it saved, and finds FP8's scales on its first
batch. A part that was cut continues with all that it saved, the scales too.

The kit's arms train with train.py's own step. So does nanoGPT, in float32 weights under BF16 autocast: its
weights and moments are the kit's under other names.

With --init-from all runs, BF16's too, begin with the weights of the base: a step-<n> of a run of train.py, or
its newest one. It has to stay until the study is complete. The model is that of the base, and --size says
only how it is trained: micro-batches, sequence length, warm-up and validation tokens. The seed orders the
batches.

With --lora-rank both runs of a pair train adapters alone, by the edit `lora`; the seed initializes them. In
the arm `fp8` the weights of the base stay in BF16, which each step quantizes (the edit's default); in
`fp8-frozen` they are in FP8 alone (--set lora_base=fp8).

An arm is a set of options of train.py, below in ARMS. The kit's arms train model_te_fast.py where it runs,
but `fp8-optimized`, `fp8-current` and `fp8-block` train Transformer Engine's modules. Some arms also replace
functions (bench/fp8_arms.py):

    fp8-activations, fp8-weights, fp8-gradients    one operand of each GEMM in FP8, the other one in BF16
    fp8-no-operand                                 both operands in BF16: FP8's kernels around the GEMMs
    fp8-dgrad-float32                              no fast accumulation in dgrad, as in Transformer Engine
    fp8-forward-float32                            no fast accumulation in the forward pass; TE has it there
    fp8-scales-1                                   scales start at 1; else the first batch finds them
    fp8-stochastic-logits                          the logits' gradient is rounded stochastically to E5M2

Each GPU trains some of the seeds. Before --minutes are over, or at SIGTERM or Ctrl-C, a run saves its state,
and the same command continues it. The state of a part, about 1.5 GB for 124m, stays in --out-dir; that of an
arm is not needed after its run.

The JSON is written after each run. It has in `runs` a record per complete run, with the loss of each step.
From all of them it has `rows`, one per arm, size, length, window, token files and learning rate: differences,
their 95 % intervals over seeds (t distribution), and how much faster an arm is at the loss of BF16.

Both runs of a pair are of one origin: machine, commit, PyTorch and model. They are no pair otherwise, or if
they did not share everything before `start`: that is printed. The pairs of a row may be of several origins;
of a seed with several pairs on the same token files the last one counts. After a new commit name another
--out-dir, so that BF16 is trained with it too.

Because of the shared BF16 run the differences of two arms are not independent: compare the arms by their
losses, seed by seed. The runs of a pair train one after the other, not in turns: the GPU's clock may differ
between them.
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

import numpy as np
import torch

import train
from bench import edits
from bench.nanogpt import names_of_kit
from bench.report import check_output, command_line, commit, markdown, write_json
from bench.step import free, make_parts
from nanote import adapters, checkpoint, models, recipes, training_state
from nanote.command import parse, run_command
from nanote.config import TrainConfig
from nanote.evaluation import validation_loss
from nanote.loader import Loader
from nanote.options import MUST_MATCH
from nanote.parallel import Ranks, StopRequest
from nanote.schedule import learning_rate

BASELINE = "bf16"
ARMS = {  # {name: options of train.py}
    "bf16": dict(fp8_recipe="none"),
    "fp8": {},
    "fp8-optimized": dict(model="optimized"),
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
    "fp8-no-operand": dict(model="fast"),
    "fp8-dgrad-float32": dict(model="fast"),
    "fp8-forward-float32": dict(model="fast"),
    "fp8-scales-1": {},
    "fp8-stochastic-logits": dict(model="fast"),
    "fp8-frozen": dict(set=(("lora_base=fp8",),)),
    "nanogpt": dict(fp8_recipe="none", model="bench/nanogpt.py:NanoGPT", dtype="float32", compile=True),
}
# keys of fp8_arms.CHANGES, whose import needs Triton
CHANGED_FP8 = ("fp8-activations", "fp8-weights", "fp8-gradients", "fp8-no-operand", "fp8-dgrad-float32",
               "fp8-forward-float32", "fp8-scales-1", "fp8-stochastic-logits")
# their GEMMs or roundings are emulated, so that their speed means nothing
EMULATED = ("fp8-activations", "fp8-weights", "fp8-gradients", "fp8-no-operand", "fp8-stochastic-logits")
# trained with another model than the baseline's where that is model_te_fast.py
OTHER_MODEL = ("fp8-optimized", "fp8-current", "fp8-block", "nanogpt")
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
PARTS = 20  # of a run in `differences_over_run`
CHUNK = 10  # steps between two looks at the clock, each of which waits for the GPU
TIME_TO_TRAIN = 0.95  # of --minutes; the rest is for writing the state
SECONDS_TO_WRITE = 10  # between two looks at the runs of other processes
NOT_COMPLETE = 3  # exit code of a process that trains some of the seeds
# 97.5 % quantile of Student's t, for 1, 2, … degrees of freedom
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)

# Fields, besides the seed, that both runs of a pair share. Only records of fine-tuning have the last two.
PAIR_FIELDS = ("size", "train_sha256", "lr", "tokens", "start", "stop", "end", "base_sha256", "lora_rank")


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


def parts_of_run(options: Options, arm: str, seed: int) -> list[Part]:
    """Return the parts of a run, without those that have no step."""
    start = options.step_at(options.start)
    stop = options.step_at(options.stop)
    end = options.step_at(options.end_or_stop)
    data = Path(options.data).name
    name = f"{data}-{options.size}-{options.steps}steps-lr{options.lr:g}-seed{seed}"
    if options.init_from is not None:
        name += f"-base{read_base(options.init_from).sha256[:12]}"
    if options.lora_rank is not None:
        name += f"-lora{options.lora_rank}"
    folder = options.out_dir / name
    parts = [Part(BASELINE, 1, 0, folder)]
    quarters = [options.step_at(fraction) for fraction in (0.25, 0.5, 0.75) if fraction < options.start]
    steps = [(BASELINE, first + 1, last) for first, last in pairwise([0, *quarters, start])]
    steps += [(arm, start + 1, stop), (BASELINE, stop + 1, end)]
    for name, first_step, last_step in steps:
        if first_step <= last_step:
            folder = folder / f"{name}-{first_step}-{last_step}"
            parts.append(Part(name, first_step, last_step, folder))
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
    config = TrainConfig(**SIZES[options.size] | ARMS[arm] | fields)
    baseline = TrainConfig(**SIZES[options.size] | ARMS[BASELINE] | fields)
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
    if arm not in CHANGED_FP8:
        return nullcontext()
    from bench import fp8_arms  # needs Triton
    return fp8_arms.changed(arm)


class TimeLimit:
    """When training has to stop: before --minutes are over, or at a signal."""

    def __init__(self, minutes: float, stop: StopRequest):
        self.deadline = clock() + TIME_TO_TRAIN * 60 * minutes
        self.stop = stop
        self.longest_start = 0.0  # seconds to build, compile and capture a part, with its first steps

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
    so_far = load_part(options, config, model, optimizer, loader, part, source)
    functions = train.make_step(config, model, optimizer, gradients)
    if config.uses_cuda_graph(recipes.has_fp8_gpu(device)):
        functions = train.with_cuda_graphs(model, optimizer, functions)
    trained = train_steps(config, optimizer, functions, loader, so_far["step"] + 1, part.last_step, limit)
    if len(trained.times) > 1:
        limit.longest_start = max(limit.longest_start, trained.times[1] - began)
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
    """Save the checkpoint of a part in place of its last one. meta: what its meta.json has besides what is
    known of the model, the commit and the date."""
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


def load_part(options: Options, config: TrainConfig, model, optimizer, loader, part: Part,
              source: Path | None) -> dict:
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
    times: list[float]  # of clock(), at the begin and after each chunk


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
                    if not limit.allows(limit.longest_start):
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
    finally:  # after an error, too, no process trains on
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


# ---------------------------------------------------------------- what they show

SAME_ORIGIN = ("machine", "commit", "torch", "model")  # of both runs of a pair
ORIGIN = (*SAME_ORIGIN, "date")  # recorded of the window's part of a run


def run_record(options: Options, arm: str, seed: int) -> dict | None:
    """Return the record of a run for the JSON, None if the run is not complete."""
    parts = parts_of_run(options, arm, seed)
    if not all(is_complete(part) for part in parts):
        return None
    metas = [meta_of(part) for part in parts]
    losses = [loss for meta in metas for loss in meta["losses"]]
    skipped_steps = sum(meta.get("skipped_steps", 0) for meta in metas)
    last_steps = [part.last_step for part in parts]
    last_shared_part = last_steps.index(options.step_at(options.start))
    shared = metas[last_shared_part]
    window = metas[last_shared_part + 1]  # the arm's part, or that of the baseline beside it
    ms_per_step = window["ms_per_step"]
    last = metas[-1]
    record = {
        "size": options.size, "arm": arm, "seed": seed, "steps": options.steps, "lr": options.lr,
        "train_sha256": last["train_sha256"],
        "tokens": options.steps * options.tokens_per_step,
        "start": options.start, "stop": options.stop, "end": options.end_or_stop,
        "shared_weights": shared.get("weights_sha256"),
        "ms": statistics.median(ms_per_step) if ms_per_step else None,
        "losses": [round(loss, 6) for loss in losses], "skipped_steps": skipped_steps,
        "val_loss": last["val_loss"], "val_loss_without_fp8": last.get("val_loss_without_fp8"),
        **{name: window.get(name) for name in ORIGIN}}
    if options.init_from is not None:
        record["base_sha256"] = read_base(options.init_from).sha256
    if options.lora_rank is not None:
        record["lora_rank"] = options.lora_rank
    return record


def summarize(runs: list[dict]) -> list[dict]:
    """Return a row per arm and PAIR_FIELDS: those with a pair or a diverged run."""
    return rows_of(groups_of(runs))


def is_finite(run: dict) -> bool:
    """Return whether the losses at the end of a run are finite."""
    return math.isfinite(training_loss(run)) and math.isfinite(run["val_loss"])


class Pair(NamedTuple):
    """The records of two runs from the same weights."""

    run: dict  # of an arm
    baseline: dict  # of BF16


class Group(NamedTuple):
    """The runs of a row: those of an arm that differ in their seed alone, one per seed, or of
    `groups_over_corpora` one per seed and token files."""

    fields: dict  # "arm" and those of PAIR_FIELDS that the runs have
    pairs: list[Pair]
    diverged: list[dict]  # runs of the arm that are not finite at their end, while BF16's are


def groups_of(runs: list[dict]) -> list[Group]:
    """Return the runs of each row."""
    baselines = baselines_of(runs)
    found = {}  # {"arm" and PAIR_FIELDS with their values: {seed: pair}}
    for run in runs:
        baseline = baseline_of(run, baselines)
        if run["arm"] != BASELINE and not reason_against(run, baseline):
            fields = tuple((name, run[name]) for name in ("arm", *PAIR_FIELDS) if name in run)
            found.setdefault(fields, {})[run["seed"]] = Pair(run, baseline)
    groups = []
    for fields, pairs_of_seeds in found.items():
        pairs = [pair for pair in pairs_of_seeds.values() if is_finite(pair.run)]
        diverged = [pair.run for pair in pairs_of_seeds.values() if not is_finite(pair.run)]
        groups.append(Group(dict(fields), pairs, diverged))
    return groups


def groups_over_corpora(runs: list[dict]) -> list[Group]:
    """Return `groups_of(runs)`, in which those of several token files are one: for several draws of a corpus,
    such as the packages of several machines. Both runs of a pair read the same files."""
    merged = {}  # {fields of a group without its corpus: group}
    for group in groups_of(runs):
        fields = {name: value for name, value in group.fields.items() if name != "train_sha256"}
        of_all = merged.setdefault(tuple(fields.items()), Group(fields, [], []))
        of_all.pairs.extend(group.pairs)
        of_all.diverged.extend(group.diverged)
    return list(merged.values())


def baselines_of(runs: list[dict]) -> dict:
    """Return {pair_key(run): BF16's runs}."""
    baselines = {}
    for run in runs:
        if run["arm"] == BASELINE:
            baselines.setdefault(pair_key(run), []).append(run)
    return baselines


def baseline_of(run: dict, baselines: dict) -> dict | None:
    """Return BF16's run from the same weights, of the same origin if there is one; None without any."""
    candidates = baselines.get(pair_key(run), [])
    of_same_origin = [baseline for baseline in candidates if not other_origin(run, baseline)]
    if of_same_origin:
        return of_same_origin[-1]
    return candidates[-1] if candidates else None


def origin_of(run: dict) -> dict:
    """Return {name of SAME_ORIGIN: value}. Uncommitted changes do not count, since the JSON may be one."""
    origin = {name: run.get(name) for name in SAME_ORIGIN}
    if origin["commit"]:
        origin["commit"] = origin["commit"].removesuffix("-dirty")
    return origin


def other_origin(run: dict, baseline: dict) -> str:
    """Return which of SAME_ORIGIN differs from BF16's, "" if none does."""
    other = origin_of(baseline)
    for name, value in origin_of(run).items():
        is_by_design = name == "model" and run["arm"] in OTHER_MODEL
        if value != other[name] and not is_by_design:
            return name
    return ""


def reason_against(run: dict, baseline: dict | None) -> str:
    """Return why a run of an arm cannot be compared with BF16's, "" if it can."""
    if baseline is None:
        return "there is no BF16 run from the same weights"
    name = other_origin(run, baseline)
    if name:
        return f"its {name} is {run.get(name)}, that of BF16 is {baseline.get(name)}"
    start = round(run["start"] * run["steps"])
    if not same_losses(run["losses"][:start], baseline["losses"][:start]):
        return "BF16 has other losses before its start"
    if not is_finite(baseline):
        return "the loss of BF16 is not finite at its end"
    return ""


def same_losses(ours: list[float], theirs: list[float]) -> bool:
    """Return whether two runs have the same losses. NaN is equal to NaN."""
    return np.array_equal(ours, theirs, equal_nan=True)


def lines_about_left_out(runs: list[dict]) -> list[str]:
    """Return a line for each run of an arm that has no pair, with the reason."""
    baselines = baselines_of(runs)
    lines = []
    for run in runs:
        if run["arm"] == BASELINE:
            continue
        reason = reason_against(run, baseline_of(run, baselines))
        if not reason and not is_finite(run):
            reason = f"the loss of {run['arm']} is not finite at its end"
        if reason:
            lines.append(f"{describe_size(run)} seed {run['seed']} {run['arm']}, {run['tokens']:,} tokens "
                         f"from {run['start']:g} to {run['stop']:g}: left out, {reason}")
    return lines


def row_of(group: Group) -> dict:
    """Return the mean differences of an arm from BF16 over the seeds, in nats, with their 95 % intervals."""
    pairs = group.pairs
    runs = [pair.run for pair in pairs] + group.diverged
    training = [training_loss(run) - training_loss(baseline) for run, baseline in pairs]
    validation = [run["val_loss"] - baseline["val_loss"] for run, baseline in pairs]
    # of the same weights, evaluated in BF16
    without_fp8 = [run["val_loss_without_fp8"] - baseline["val_loss"] for run, baseline in pairs
                   if run.get("val_loss_without_fp8") is not None]
    baseline_loss = mean_of([training_loss(baseline) for _, baseline in pairs])
    return group.fields | {
        "seeds": len(pairs), "diverged_seeds": [run["seed"] for run in group.diverged],
        # whose gradient norm was not finite, of all these runs of the arm
        "skipped_steps": sum(run["skipped_steps"] for run in runs),
        "baseline_training_loss": baseline_loss,
        "baseline_validation_loss": mean_of([baseline["val_loss"] for _, baseline in pairs]),
        "training": mean_of(training), "training_interval": interval_of(training),
        "training_percent": 100 * mean_of(training) / baseline_loss if pairs else None,
        "validation": mean_of(validation), "validation_interval": interval_of(validation),
        "validation_without_fp8": mean_of(without_fp8),
        "validation_without_fp8_interval": interval_of(without_fp8),
        "speed": None if group.fields["arm"] in EMULATED else median_speed(pairs)}


def rows_of(groups: list[Group]) -> list[dict]:
    """Return the row of each group, with the speed to equal loss, which needs the other lengths."""
    rows = [row_of(group) for group in groups]
    for row, group in zip(rows, groups):
        others = [other.pairs for other in groups if is_other_length(other, group)]
        row |= speed_to_equal_loss(row, group.pairs, others)
    return rows


def mean_of(values: list[float]) -> float | None:
    """Return the mean, None without values."""
    return statistics.mean(values) if values else None


def differences_over_run(pairs: list[Pair]) -> list[tuple[float, list[float] | None]]:
    """Return (mean, 95 % interval) over the seeds of the arm's training loss minus BF16's, for each of PARTS
    equal parts of the steps."""
    of_seeds = [differences_of_seed(pair) for pair in pairs]
    return [(statistics.mean(differences), interval_of(differences)) for differences in zip(*of_seeds)]


def differences_of_seed(pair: Pair) -> list[float]:
    """Return the mean of the arm's training loss minus BF16's in each of PARTS equal parts of the steps."""
    differences = np.subtract(pair.run["losses"], pair.baseline["losses"])
    return [float(part.mean()) for part in np.array_split(differences, PARTS)]


def is_whole_run(row: dict) -> bool:
    """Return whether the arm trains all steps."""
    return (row["start"], row["stop"]) == (0.0, 1.0)


def is_fine_tuning(row: dict) -> bool:
    """Return whether a row or a run began with the weights of a base."""
    return "base_sha256" in row


def describe_trained(row: dict) -> str:
    """Return what fine-tuning trains: "LoRA 16", or "full" for all weights."""
    return f"LoRA {row['lora_rank']}" if "lora_rank" in row else "full"


def interval_of(values: list[float]) -> list[float] | None:
    """Return the 95 % interval of the mean, of the t distribution; None for one value, or if one is not
    finite."""
    if len(values) < 2 or not all(math.isfinite(value) for value in values):
        return None
    degrees_of_freedom = min(len(values) - 1, len(T_975))
    standard_error = statistics.stdev(values) / math.sqrt(len(values))
    half = T_975[degrees_of_freedom - 1] * standard_error
    mean = statistics.mean(values)
    return [mean - half, mean + half]


def median_speed(pairs: list[Pair]) -> float | None:
    """Return BF16's time per step over the arm's, the median of the pairs; None if none was timed, because
    the parts were too short."""
    ratios = [baseline["ms"] / run["ms"] for run, baseline in pairs if baseline["ms"] and run["ms"]]
    return statistics.median(ratios) if ratios else None


def pair_key(run: dict) -> tuple:
    """Return the values that a run shares with its baseline."""
    values = [run.get(name) for name in ("seed", *PAIR_FIELDS)]
    return *values, run.get("shared_weights")  # which older records do not have


def stored_key(run: dict) -> tuple:
    """Return the values by which a later run replaces an earlier one. Origin is one of them, so that BF16's
    run stays for the arms of an earlier commit."""
    return run["arm"], *pair_key(run), *origin_of(run).values()


def training_loss(run: dict) -> float:
    """Return the mean training loss of a run's last steps.

    Their number is a tenth of the whole run's, and at most the arm's. With 344 steps --stop 0.25 trains 86,
    of which the last 34 count; --start 0.5 --stop 0.55 trains 189, of which the arm's 17 count.
    """
    arm_steps = round(run["stop"] * run["steps"]) - round(run["start"] * run["steps"])
    count = max(1, min(run["steps"] // 10, arm_steps))
    return statistics.mean(run["losses"][-count:])


def speed_to_equal_loss(row: dict, pairs: list[Pair], others: list[list[Pair]]) -> dict:
    """Return BF16's training time over that of a whole run of this arm which ends at BF16's loss.

    The slope is the fall of BF16's training loss between two lengths of whole runs, over the log of their
    ratio. An arm whose loss is higher by `gap` needs exp(gap / slope) times as many tokens.

    The lengths are this row's and the nearest other one. The seeds of the slope are those that both have. A
    gap of more than half of the fall is too far to extrapolate. The interval is that of the gap alone.

    Args:
        pairs: of the row.
        others: pairs of the rows that differ in the number of tokens alone.

    Returns:
        speed_to_equal_loss: None if BF16's loss does not fall, or if the gap is too large.
        speed_to_equal_loss_interval: an end of it is None if it is not bounded.
        slope: nats per e-fold of tokens.
        slope_tokens: the other length.
        slope_seeds: the seeds.

        All are None without such runs, the interval also of one seed.
    """
    found = dict.fromkeys((
        "speed_to_equal_loss", "speed_to_equal_loss_interval", "slope", "slope_tokens", "slope_seeds"))
    others = [other for other in others if baseline_falls(pairs, other)]
    if row["speed"] is None or not is_whole_run(row) or not others:
        return found
    nearest = min(others, key=lambda other: abs(log_of_tokens(other, pairs)))
    falls = baseline_falls(pairs, nearest)
    fall = statistics.mean(falls.values())
    slope = fall / log_of_tokens(nearest, pairs)
    found["slope"] = slope
    found["slope_tokens"] = nearest[0].run["tokens"]
    found["slope_seeds"] = sorted(seed for seed, _ in falls)

    def speed_at(gap: float) -> float | None:
        if slope <= 0 or abs(gap) > abs(fall) / 2:
            return None
        return row["speed"] / math.exp(gap / slope)

    found["speed_to_equal_loss"] = speed_at(row["training"])
    if row["training_interval"] is not None:
        low, high = row["training_interval"]
        found["speed_to_equal_loss_interval"] = [speed_at(high), speed_at(low)]  # a smaller gap is faster
    return found


def is_other_length(other: Group, group: Group) -> bool:
    """Return whether two rows differ in the number of tokens alone."""
    return (other.fields["tokens"] != group.fields["tokens"]
            and other.fields | {"tokens": None} == group.fields | {"tokens": None})


def baseline_falls(pairs: list[Pair], other: list[Pair]) -> dict[tuple[int, str], float]:
    """Return {(seed, checksum of the token files): how much lower BF16's loss is in another row}, of those
    that both have."""
    def key(run):
        return run["seed"], run["train_sha256"]

    losses = {key(baseline): training_loss(baseline) for _, baseline in other}
    return {key(baseline): training_loss(baseline) - losses[key(baseline)] for _, baseline in pairs
            if key(baseline) in losses}


def log_of_tokens(other: list[Pair], pairs: list[Pair]) -> float:
    """Return the log of how many times as many tokens another row has."""
    return math.log(other[0].run["tokens"] / pairs[0].run["tokens"])


def main_table(rows: list[dict]) -> str:
    """Return the Markdown table of the rows."""
    titles = ["arm", "size", "tokens", "the arm's part", "seeds", "skipped steps", "training loss, nats",
              "95 % interval", "%", "validation loss", "95 % interval", "x BF16", "at equal loss",
              "95 % interval", "slope, nats per e-fold of tokens"]
    lines = []
    for row in rows:
        lines.append([
            f"`{row['arm']}`", describe_size(row), f"{row['tokens']:,}",
            f"{row['start']:g} to {row['stop']:g} of {row['end']:g}",
            describe_seeds(row), f"{row['skipped_steps']}",
            describe(row["training"]), describe_interval(row["training_interval"]),
            describe(row["training_percent"], "{:+.2f}"), describe(row["validation"]),
            describe_interval(row["validation_interval"]), describe(row["speed"], "{:.3f}"),
            describe(row["speed_to_equal_loss"], "{:.3f}"),
            describe_interval(row["speed_to_equal_loss_interval"], "{:.3f}"), describe_slope(row)])
    return markdown(titles, lines)


def describe_size(row: dict) -> str:
    """Return the size of a row, and of fine-tuning its base and what is trained: "124m, 6a1c0f2e, full"."""
    if not is_fine_tuning(row):
        return row["size"]
    return f"{row['size']}, {row['base_sha256'][:8]}, {describe_trained(row)}"


def describe_seeds(row: dict) -> str:
    """Return the number of pairs: "4", or "3 of 4, 1 diverged"."""
    pairs = row["seeds"]
    diverged = len(row["diverged_seeds"])
    return f"{pairs} of {pairs + diverged}, {diverged} diverged" if diverged else f"{pairs}"


def describe(value: float | None, number: str = "{:+.4f}") -> str:
    return "" if value is None else number.format(value)


def describe_interval(interval: list[float | None] | None, number: str = "{:+.4f}") -> str:
    """Return "0.9 to 1.1", in which an end that is None is "(not bounded)"; "" without an interval."""
    if interval is None:
        return ""
    if interval == [None, None]:
        return "not bounded"
    return " to ".join("(not bounded)" if end is None else number.format(end) for end in interval)


def describe_slope(row: dict) -> str:
    """Return the slope of a row, with the other length and the seeds that it is from; "" without one."""
    if row["slope"] is None:
        return ""
    seeds = ", ".join(str(seed) for seed in row["slope_seeds"])
    return f"{row['slope']:.3f}, with {row['slope_tokens']:,} tokens, seeds {seeds}"


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
        if "model" in ARMS[arm] and options.lora_rank is not None:
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
    """Raise ValueError if the folder of a part has a checkpoint of other data or other options."""
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
