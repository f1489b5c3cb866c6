"""Train a GPT in FP8.

    python train.py --preset gpt2-124m --data data/packages    # a new run, in out/gpt2-124m
    python train.py --resume --out-dir out/gpt2-124m           # continue it after Ctrl-C or a crash
    torchrun --nproc-per-node 8 train.py --preset gpt2-350m    # data-parallel on 8 GPUs

`build` makes the parts of a run, and `training_loop` is the loop. Decisions worth knowing:
- Losses stay on the device between log lines, so that the host does not wait for the GPU.
- A step whose loss or gradient norm is not finite changes no weight and is counted when losses are read; more
  than --max-skipped-steps of them end the run. No checkpoint is written right after such a step, so the last
  good checkpoint of a run that diverged stays.
- A checkpoint is written before the evaluation of the same step, and evaluation restores the amax histories
  of delayed scaling, which every forward pass updates. So a resumed run repeats the uninterrupted one exactly
  (bit for bit on the CPU). If the run was stopped after it saved a step and before it evaluated it, the
  resumed run evaluates and logs that step first.
- Under torchrun training is data-parallel: each rank reads its own samples. Rank 0 alone writes, except that
  a sharded model (--parallel fsdp) is saved by all ranks.
"""
import contextlib
import dataclasses
import math
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanote import checkpoint, cli, config_file, elastic, fp8, json_files, memory, models, parallel, profiling
from nanote.config import (
    ARCHITECTURE,
    PRESETS,  # noqa: F401  for `from train import PRESETS, TrainConfig`
    TrainConfig,
    make_run_folder,
    pick_vocab_size,
    read_options,
)
from nanote.dataset import Loader, Tokenizer, get_tokenizer, same_tokenizer
from nanote.generate import generate, pick_device
from nanote.metrics import (
    Diverged,
    Log,
    Meter,
    cut_logs,
    describe_corpus,
    describe_val_loss,
    draw,
    logged_val_loss,
    plot_health,
    plot_losses,
    read_logs,
    val_record,
)
from nanote.optimizers import make_optimizer
from nanote.parallel import Ranks
from nanote.slow_ranks import SlowestRank
from nanote.train_step import (
    TrainStep,
    apply_fast_kernels,
    compile_model,
    first_compiled_pass,
    graph_unsupported_reason,
    recipe_of,
    wants_graph,
    warm_up_scales,
    weight_dtype,
)


@dataclass
class Run:
    """The parts of a run, made by `build`, and how far it has come."""

    config: TrainConfig  # vocab_size and n_positions are filled in
    folder: str
    precision: str  # for log lines, such as "FP8 delayed (hybrid)"
    device: torch.device
    loaders: dict[str, Loader]  # train, val
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    train_step: TrainStep
    profiler: profiling.Profiler
    log: Log
    meter: Meter
    saver: checkpoint.BackgroundSaver
    checkpoint_meta: dict  # the run's part of meta.json
    tokenizer: Tokenizer | None  # for the closing sample
    step: int  # the current step, or the last one done
    resumed_record: dict | None  # the line of metrics.jsonl of the step that the run continues
    batches: list = field(default_factory=list)  # of the current step
    val_loss: float = math.nan
    health_plot: str = ""
    schedule: "Schedule | None" = None  # while it trains


# ---------------------------------------------------------------- the loop

def training_loop(run: Run) -> None:
    config, model, log, meter, schedule = run.config, run.model, run.log, run.meter, run.schedule
    while run.step < config.max_steps:
        run.step += 1
        step, lr = run.step, learning_rate(run.step, config)
        run.batches = get_batches(run.loaders["train"], step, config.grad_accum)

        measure_fp8 = is_due(step, config.fp8_health_interval)  # on all ranks: such a step is no CUDA graph
        run.profiler.begin(step)
        loss, grad_norm = run.train_step(run.batches, lr, watch=measure_fp8)
        run.profiler.end(step)
        meter.add(step, loss, grad_norm)
        log.advance()
        report_failed_save(run)
        if measure_fp8:
            log.write_health(step, fp8.health(model))  # of rank 0

        if log.is_unread:
            schedule.stop.name = "a closed stdout"
        schedule.decide(step)
        if not (schedule.should_log or schedule.should_save):
            continue
        was_skipped = meter.read(log.say)  # this step; waits for the device
        if schedule.is_last_step and meter.finite is None:
            raise Diverged(f"step {step}: no step of this run had a finite loss and gradient norm")
        if was_skipped:
            schedule.postpone_save()

        record = meter.record(step, lr) if schedule.should_log and meter.finite is not None else None
        if schedule.should_save:
            # the last step is saved even if it was skipped: keep one more, the last good one
            save(run, record, keep=config.keep_checkpoints + (1 if was_skipped else 0))
        if record is not None:
            evaluate_and_log(run, record)
        meter.restart()
        if schedule.should_stop:
            break


class Schedule:
    """Decide after each step what to do: log, evaluate, save, stop."""

    def __init__(self, config: TrainConfig, stop: parallel.StopRequest):
        self.config, self.stop = config, stop
        self.is_last_step = self.should_log = self.should_eval = self.should_save = self.should_stop = False
        self.save_is_postponed = False

    def decide(self, step: int) -> None:
        """Every rank must call this after every step: the ranks agree on stopping."""
        config = self.config
        self.is_last_step = step == config.max_steps
        self.should_stop = not self.is_last_step and self.stop.agreed()
        self.should_save = (self.is_last_step or self.should_stop or self.save_is_postponed
                            or is_due(step, config.checkpoint_interval))
        eval_is_due = config.eval_interval > 0 and (step == 1 or is_due(step, config.eval_interval))
        self.should_eval = self.is_last_step or (eval_is_due and not self.should_stop)
        log_is_due = step == 1 or is_due(step, config.log_interval)
        self.should_log = self.should_eval or self.should_stop or log_is_due
        self.save_is_postponed = False

    def postpone_save(self) -> None:
        """After a skipped step: postpone saving and stopping to the next finite step.

        The weights may be what makes the loss not finite. The last step is saved in any case.
        """
        self.save_is_postponed = self.should_save and not self.is_last_step
        self.should_save = self.is_last_step
        self.should_stop = False


def is_due(step: int, interval: int) -> bool:
    """Return whether `step` is a multiple of `interval`; never if that is 0."""
    return interval > 0 and step % interval == 0


def get_batches(loader: Loader, step: int, grad_accum: int) -> list:
    """Return the micro-batches of a step, counted from 1."""
    first = (step - 1) * grad_accum
    return [loader.batch(index) for index in range(first, first + grad_accum)]


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step, counted from 1: linear warm-up, then the schedule."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
        height = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    elif config.lr_schedule == "wsd":
        height = min(1.0, max(0.0, (config.max_steps - step) / (config.decay_fraction * config.max_steps)))
    else:
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


def evaluate_and_log(run: Run, record: dict) -> None:
    """Evaluate if it is due, and log a step. `record`: its line of metrics.jsonl so far."""
    val = run.loaders["val"]
    if run.schedule.should_eval:
        run.val_loss = evaluate(run.model, val, run.config)
        if not math.isfinite(run.val_loss):
            raise Diverged(f"step {run.step}: validation loss {run.val_loss}")
        record = record | val_record(run.val_loss, val.meta)
        without_fp8 = val_loss_without_fp8(run) if run.schedule.is_last_step else None
        if without_fp8 is not None:
            record["val_loss_without_fp8"] = without_fp8
    run.log.write(record | {"seconds": run.meter.total_seconds()},
                  run.meter.seconds_left(run.config.max_steps))


def val_loss_without_fp8(run: Run) -> float | None:
    """Return the validation loss of a model in FP8 without FP8; None if it is not finite, or the model cannot
    run so."""
    if run.config.fp8_param or not fp8.is_used(run.model):
        return None
    try:
        with fp8.turned_off(run.model):
            val_loss = evaluate(run.model, run.loaders["val"], run.config)
    except Exception as error:
        if not models.is_file(run.config.model):
            raise
        run.log.say(f"{run.config.model} does not run without FP8: {cli.in_a_line(error)}")
        return None
    return val_loss if math.isfinite(val_loss) else None


def finish_resumed_step(run: Run) -> None:
    """Evaluate and log the step of the checkpoint that the run continues, unless that is done.

    A run may be stopped after it saved a step and before it evaluated and logged it.
    """
    schedule, record = run.schedule, run.resumed_record
    schedule.decide(run.step)
    val_loss = parallel.on_rank0(lambda: logged_val_loss(run.folder, run.step))
    run.val_loss = math.nan if val_loss is None else val_loss
    schedule.should_eval &= math.isnan(run.val_loss)
    if record and (val_loss is None or schedule.should_eval):
        parallel.on_rank0(lambda: cut_logs(run.folder, run.step, ["metrics.jsonl"]))
        evaluate_and_log(run, record)
    elif schedule.should_eval and schedule.is_last_step:  # a checkpoint of an earlier version
        run.val_loss = evaluate(run.model, run.loaders["val"], run.config)
    if schedule.is_last_step:
        run.log.say(f"{run.folder} has done all {cli.counted(run.step, 'step')}; to continue, pass more, "
                    f"such as --max-steps {2 * run.step}")


@torch.no_grad()
def evaluate(model, loader: Loader, config: TrainConfig) -> float:
    """Return the mean validation loss in nats per token over the windows of Loader.evaluation.

    The FP8 state of the model is left as it was.
    """
    tokens = config.eval_tokens
    if config.eval_steps is not None:
        tokens = config.eval_steps * config.micro_batch_size * config.seq_len * loader.world_size
    total = torch.zeros(2, dtype=torch.float64, device=loader.device)  # of nats, of tokens
    model.eval()
    with fp8.preserved_state(model):
        for batch, counted in loader.evaluation(tokens):
            loss = model(*batch)
            if counted:  # the mean over no label may be NaN
                total[0] += loss.double() * counted
                total[1] += counted
    model.train()
    nats, tokens = parallel.mean_over_ranks(total).tolist()
    return nats / tokens


def save(run: Run, record: dict | None, keep: int) -> None:
    """Write a checkpoint of the current step, in the background unless it is the run's last one.

    `record`: the step's line of metrics.jsonl, for a run that is stopped before it is logged.
    """
    saver = run.saver
    saver.wait()
    report_failed_save(run)  # of the checkpoint before
    samples = run.loaders["train"].first_sample(run.step * run.config.grad_accum)
    meta = run.checkpoint_meta | {"samples": samples, "tokens_per_step": run.meter.tokens_per_step}
    meta |= {"record": record} if record else {}
    saver.save(run.folder, run.step, model=run.model, optimizer=run.optimizer, meta=meta, keep=keep)
    if run.schedule.is_last_step or run.schedule.should_stop:
        saver.wait()
        error = saver.error()
        if error:
            raise error


def report_failed_save(run: Run) -> None:
    """Log why a checkpoint could not be written, if one failed meanwhile."""
    error = run.saver.error()
    if error:
        run.log.say(f"step {run.step}: {error}; training continues")


# ---------------------------------------------------------------- building a run

def build(config: TrainConfig, resume_from: Path | None, meta: dict | None, ranks: Ranks, at_end,
          command: str) -> Run:
    """Build the parts of a run. Everything that can be wrong is checked before anything is written.

    Args:
        resume_from: checkpoint folder, with its meta.json in `meta`; None for a new run.
        at_end: contextlib.ExitStack that frees CUDA graphs and unlocks the run's folder.
        command: the command line, for config.json.
    """
    options = dataclasses.asdict(config)
    device, dtype = prepare_device(config, ranks)
    recipe = recipe_of(config)
    loaders = open_data(config, ranks, device)
    tokens = loaders["train"].meta
    config = fit_to_data(config, tokens, resume_from, meta)
    model_config = check_model(config, recipe, device, dtype, meta)
    first_step = meta["step"] + 1 if meta else 1
    profiler = profiling.Profiler(config, device, enabled=ranks.is_first, first_step=first_step)

    torch.manual_seed(config.seed)  # the same weights on every rank
    model, kernels = build_model(config, model_config, recipe, device, dtype)
    if models.is_file(config.model):
        models.check_first_pass(config.model, model, loaders["train"].batch(0))
        checkpoint.check_storable(config.model, model)
    optimizer = make_optimizer(model, config)
    net = compile_model(model, config)
    if config.compile:
        first_compiled_pass(model, net, config, loaders["train"].batch(0))
    torch.manual_seed(config.seed + ranks.rank)  # another dropout mask on each rank

    folder = open_folder(config, resume_from, ranks, at_end)
    if resume_from is not None:
        resume(resume_from, meta, folder, model, optimizer)
    parallel.on_rank0(lambda: start_logs(folder, options, command, ranks, meta))
    parameters = sum(p.numel() for p in model.parameters())
    slowest_rank = SlowestRank(loaders["train"], device) if ranks.world_size > 1 else None
    meter = Meter(config, parameters, device, ranks.world_size, slowest_rank)
    if needs_first_scales(config, model, meta, meter.tokens_per_step):
        find_first_scales(config, model, optimizer, loaders["train"].batch(0))
    skip_samples(loaders["train"], config, meta)
    train_step = TrainStep(model, net, optimizer, config, device)
    at_end.callback(train_step.close)
    log = Log(folder, first_step, config.max_steps, enabled=ranks.is_first)
    parallel.on_rank0(lambda: log.start_wandb(config))
    profiler.run, profiler.say = folder, log.say
    report_run(config, folder, tokens, parameters, meter.tokens_per_step, meta, log)
    if meta and meta.get("corpus", corpus_checksums(tokens)) != corpus_checksums(tokens):
        log.say(f"{config.data} holds another corpus than when {resume_from} was saved; training goes on "
                "with this one")
    report_step(config, kernels, train_step, ranks, log)
    report_unused_options(config, model_config, log)
    return Run(
        config=config, folder=folder, precision=describe_precision(config), device=device, loaders=loaders,
        model=model, optimizer=optimizer, train_step=train_step, profiler=profiler, log=log, meter=meter,
        tokenizer=find_tokenizer(config, tokens["tokenizer"], log),
        saver=make_saver(config, first_step, model, optimizer, log), step=first_step - 1,
        checkpoint_meta=describe_run(config, folder, model_config, tokens, meta),
        resumed_record=meta.get("record") if meta else None,
    )


def prepare_device(config: TrainConfig, ranks: Ranks) -> tuple[torch.device, torch.dtype]:
    """Select this rank's device, apply the options of the process, and choose the high-precision dtype."""
    device = pick_device(config.device)
    if device.type == "cuda":
        if ranks.world_size > 1:
            device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    elif not fp8.IS_REFERENCE:
        raise ValueError("--device cpu: Transformer Engine needs a GPU; set NANOTE_REFERENCE=1 to use "
                         "te_reference instead")
    profiling.prepare_process(config, device)
    return device, weight_dtype(config, device)


def open_data(config: TrainConfig, ranks: Ranks, device: torch.device, splits=("train", "val")):
    """Return the loaders of the train and val split, {split: Loader}."""
    options = dict(
        seq_len=config.seq_len, micro_batch_size=config.micro_batch_size, seed=config.seed, rank=ranks.rank,
        world_size=ranks.world_size, device=device, pack_documents=config.pack_documents,
    )
    return {split: Loader(config.data, split, **options) for split in splits}


def fit_to_data(config: TrainConfig, tokens: dict, resume_from: Path | None, meta: dict | None):
    """Return the config with vocab_size and n_positions filled in. `tokens`: meta.json of the token files."""
    if meta and not same_tokenizer(meta["tokenizer"], tokens["tokenizer"]):
        raise ValueError(f"--data {config.data} holds {tokens['tokenizer']} tokens, but {resume_from} was "
                         f"trained on {meta['tokenizer']} tokens")
    vocab_size = pick_vocab_size(config, tokens)
    n_positions = config.n_positions or config.seq_len
    return dataclasses.replace(config, vocab_size=vocab_size, n_positions=n_positions)


def check_model(config: TrainConfig, recipe, device: torch.device, dtype: torch.dtype, meta: dict | None):
    """Return the model's config. ValueError if it is invalid, cannot run in FP8, or cannot fit in memory.

    `meta`: meta.json of the checkpoint that the run continues. Fields of the user's own model that are no
    options keep the checkpoint's values, whatever the file's defaults are now.
    """
    options = meta["model_config"] if meta and models.is_file(config.model) else {}
    options = options | dataclasses.asdict(config) | {"use_fp8": recipe is not None}
    model_config = models.make_model_config(config.model, options)
    if recipe is not None:
        fp8.check_shapes(model_config, config.micro_batch_size, config.seq_len, config.fp8_recipe)
    wants_graph(config, device)  # ValueError for a --cuda-graph on that is impossible
    memory.check_memory(config, model_config, device, dtype)
    return model_config


def build_model(config: TrainConfig, model_config, recipe, device: torch.device, dtype: torch.dtype):
    """Return the model, and a line about its fast kernels."""
    model = models.build_model(config.model, model_config, device=device, dtype=dtype,
                               fp8_weights_recipe=recipe if config.fp8_param else None)
    if recipe is not None:
        model.fp8_recipe = recipe
    kernels = apply_fast_kernels(model, config)
    parallel.shard(model, config, device)
    return model, kernels


def open_folder(config: TrainConfig, resume_from: Path | None, ranks: Ranks, at_end) -> str:
    """Make the folder of a new run, and lock it until `at_end` closes; return its path."""
    folder = config.out_dir
    if resume_from is None:
        folder = parallel.on_rank0(lambda: make_run_folder(config))
    lock = parallel.on_rank0(lambda: checkpoint.lock(folder))
    if ranks.is_first:
        at_end.callback(checkpoint.unlock, folder, lock)
        elastic.remember_folder(folder)
    return folder


def skip_samples(loader: Loader, config: TrainConfig, meta: dict | None) -> None:
    """Let a resumed run go on with the sample after its last, though a step may now have more or fewer."""
    if meta and "samples" in meta:
        loader.start_at(meta["step"] * config.grad_accum, meta["samples"])


def resume(resume_from: Path, meta: dict, folder: str, model, optimizer) -> None:
    """Load a checkpoint."""
    if parallel.on_rank0(lambda: checkpoint.latest(folder)) != resume_from:
        raise ValueError(f"{folder}: another process has trained past {resume_from} meanwhile; start again")
    checkpoint.load(resume_from, meta, model, optimizer)


def start_logs(folder: str, options: dict, command: str, ranks: Ranks, meta: dict | None) -> None:
    """Write config.json, and remove from the logs what was logged after the checkpoint of a resumed run.

    The folder of a new run may have the logs of one that was killed before its first checkpoint.
    """
    step = meta["step"] if meta else None
    read_logs(folder)  # a damaged log refuses the run, before anything is written
    config_file.record(folder, options | {"out_dir": folder}, command, ranks.world_size, step)
    log = Path(folder, "metrics.jsonl")
    if not meta and log.exists():
        log.rename(f"{log}.old")
    cut_logs(folder, step + 1 if meta else 1)


def needs_first_scales(config: TrainConfig, model, meta: dict | None, tokens_per_step) -> bool:
    """Return whether delayed scaling has no scales yet, or a checkpoint's do not fit this run.

    That is so if FP8 has another format or other layers, or if gradients are larger: the loss is the mean
    over the tokens of a step. Smaller ones keep the scales until their amax values fill the history.
    """
    if not fp8.uses_delayed_scaling(model):
        return False
    if meta is None or fp8.is_fresh(model):
        return True
    now = dataclasses.asdict(config)
    before = now | meta["config"]
    names = ("fp8_margin", "fp8_lm_head", "fp8_skip_first", "fp8_skip_last")
    formats = {fp8.resolve_format(config.fp8_recipe, options["fp8_format"]) for options in (before, now)}
    return (len(formats) > 1 or any(before[name] != now[name] for name in names)
            or tokens_per_step is not None and tokens_per_step < meta.get("tokens_per_step", 0))


def find_first_scales(config: TrainConfig, model, optimizer, batch) -> None:
    """Run the passes that find the first scales of delayed scaling.

    They are a new run's first passes, so a batch too large for the GPU's memory fails here.
    """
    try:
        warm_up_scales(model, batch, config)
    except RuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
        raise memory.explain(
            error, "the first pass", config, model, optimizer, None, batch, "nothing is trained yet"
        ) from None


def make_saver(config: TrainConfig, first_step: int, model, optimizer, log: Log):
    """Return a BackgroundSaver. Reserve its host memory if it will write one before the last step."""
    saver = checkpoint.BackgroundSaver(config.background_saves)
    if 0 < config.checkpoint_interval < config.max_steps - (first_step - 1):
        reason = saver.reserve(model, optimizer)
        if reason:
            log.say(f"not enough host memory to copy a checkpoint ({reason}): training will wait while one "
                    "is written")
    return saver


def corpus_checksums(tokens: dict) -> dict:
    """Return the checksums of both splits. `tokens`: meta.json of the token files."""
    return {name: tokens[name] for name in ("train_sha256", "val_sha256")}


def describe_run(config: TrainConfig, folder: str, model_config, tokens: dict, resumed: dict | None) -> dict:
    """Return the run's part of meta.json. `resumed`: meta.json of the checkpoint that it started from."""
    document = {
        "config": dataclasses.asdict(config) | {"out_dir": folder},
        "model": config.model,
        "model_config": dataclasses.asdict(model_config),
        "tokenizer": tokens["tokenizer"],
        "corpus": corpus_checksums(tokens),
        "device": fp8.describe(),
    }
    if resumed and "hf" in resumed:
        document["hf"] = resumed["hf"]  # the source of an imported model
    return document


def describe_precision(config: TrainConfig) -> str:
    if config.fp8_recipe == "none":
        return "no FP8"
    fp8_format = fp8.resolve_format(config.fp8_recipe, config.fp8_format)
    return f"FP8 {config.fp8_recipe}" + (f" ({fp8_format})" if fp8_format else "")


def find_tokenizer(config: TrainConfig, name: str, log: Log) -> Tokenizer | None:
    """Return the tokenizer of the data; None, with a log line, if it is not to be had here, or for a
    sharded model on some rank: all ranks of it generate the sample together."""
    tokenizer, problem = None, ""
    try:
        tokenizer = get_tokenizer(name, config.vocab_size)
    except ValueError as error:
        problem = str(error).partition(";")[0]  # what follows is advice for sample.py
    if parallel.is_sharded(config):
        problem = parallel.reason_of_any_rank(problem)
    if problem:
        log.say(f"{problem}: training does not need it, but will print no sample at the end")
    return None if problem else tokenizer


def report_run(config: TrainConfig, folder: str, tokens: dict, parameters: int, tokens_per_step: int,
               meta: dict | None, log: Log) -> None:
    """Log what the run trains on which corpus, and a corpus that is read too often."""
    corpus, too_many_epochs = describe_corpus(config, tokens, tokens_per_step)
    log.say(f"on {fp8.describe()}; {config.preset}, {describe_precision(config)}, "
            f"{parameters / 1e6:,.2f} M parameters, {tokens_per_step:,} tokens a step; {corpus}; {folder}"
            + (f" from step {meta['step']}" if meta else ""))
    if too_many_epochs:
        log.say(too_many_epochs)


def report_step(config: TrainConfig, kernels: str, train_step: TrainStep, ranks: Ranks, log: Log) -> None:
    """Log how a step runs. `kernels`: the line about the fast kernels."""
    if kernels:
        log.say(kernels)
    if ranks.world_size > 1 and train_step.device.type == "cuda":
        if not train_step.graphed:
            reason = graph_unsupported_reason(config, train_step.device) or "--cuda-graph off"
            log.say(f"CUDA graphs are off: {reason}")
        if config.parallel == "ddp":
            reason = train_step.undivided_reason
            log.say(f"every rank updates all weights, after an all-reduce of their gradients: {reason}"
                    if reason else "each rank updates a part of the weights, on all GPUs")
        else:
            reason = train_step.nccl_reason
            log.say(f"NCCL gathers weights and reduces gradients: {reason}"
                    if reason else "copy engines gather weights and send gradients among the shards")
    if train_step.graphed and not train_step.updates_in_graph:
        log.say(f"--optimizer {config.optimizer}: forward and backward pass are CUDA graphs, the update is "
                "launched from Python")


def report_unused_options(config: TrainConfig, model_config, log: Log) -> None:
    """Log which options have no effect, such as those of the preset that the model file does not have."""
    default, known = TrainConfig(), ("preset", "model", *dataclasses.asdict(model_config))
    changed = [name for name in ARCHITECTURE if getattr(config, name) != getattr(default, name)]
    unused = [name for name in changed if name not in known]
    if unused:
        log.say(f"the model {config.model!r} has no {', '.join(unused)}: these options of the preset "
                f"{config.preset!r} are left out")
    of_fp8 = [field.name for field in dataclasses.fields(config) if field.name.startswith("fp8_")]
    unused = [cli.flag(name) for name in of_fp8 if getattr(config, name) != getattr(default, name)]
    if config.fp8_recipe == "none" and len(unused) > 1:  # --fp8-recipe itself
        log.say(f"without FP8 these options have no effect: {', '.join(unused[1:])}")
    if config.hsdp_replicas and config.parallel != "hsdp":
        log.say(f"--parallel {config.parallel}: --hsdp-replicas has no effect")
    if config.warmup_steps >= config.max_steps:
        log.say(f"--warmup-steps {config.warmup_steps}: the learning rate rises in all {config.max_steps} "
                f"steps; pass fewer, such as {config.max_steps // 10}")


# ---------------------------------------------------------------- running it

def main(argv=None) -> int:
    """Train, and return the exit code: 0, or 1 for a run that diverged or ran out of memory.

    ValueError and OSError are mistakes that the user can correct; cli.run reports them.
    """
    ranks = parallel.init()
    try:
        restarted = elastic.folder_before_restart()
        config, resume_from, meta = read_options(argv, __doc__.partition("\n\n`build`")[0], restarted)
        if config.eval_only:
            evaluate_checkpoint(config, resume_from, meta, ranks)
            return 0
        command = shlex.join(["train.py", *(sys.argv[1:] if argv is None else argv)])
        with contextlib.ExitStack() as at_end:
            run = build(config, resume_from, meta, ranks, at_end, command)
            train(run)
            text = ""
            if run.step == config.max_steps and (ranks.is_first or parallel.is_sharded(config)):
                text = sample_text(run)  # if the model is sharded, all ranks generate the same tokens
            if ranks.is_first:
                summarize(run, text)
    except Diverged as error:
        if ranks.is_first:
            print(f"train.py: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        if elastic.is_to_tell(error, ranks.rank):
            raise
        return 2
    except (RuntimeError, MemoryError) as error:
        elastic.exit_if_lost(error)
        if not memory.is_out_of_memory(error):
            raise
        if not isinstance(error, memory.OutOfMemory):
            error = memory.outside_steps(config)
        rank = f"rank {ranks.rank}: " if ranks.world_size > 1 else ""  # memory may run out on any rank
        print(f"train.py: {rank}{error}", file=sys.stderr)
        return 1
    finally:
        parallel.shut_down(ranks)
    return 0


def evaluate_checkpoint(config: TrainConfig, folder: Path, meta: dict, ranks: Ranks) -> None:
    """Print the validation loss of a checkpoint, as the run measures it; write nothing."""
    device, dtype = prepare_device(config, ranks)
    recipe = recipe_of(config)
    loader = open_data(config, ranks, device, ["val"])["val"]
    config = fit_to_data(config, loader.meta, folder, meta)
    model_config = check_model(config, recipe, device, dtype, meta)
    model, _ = build_model(config, model_config, recipe, device, dtype)
    optimizer = make_optimizer(model, config)  # the FP8 state is loaded with the optimizer's
    checkpoint.load(folder, meta, model, optimizer)
    if needs_first_scales(config, model, meta, meta.get("tokens_per_step")):  # no gradients here
        batch, _ = next(loader.evaluation(1))  # the same for every seed and number of ranks
        find_first_scales(config, model, optimizer, batch)
    val_loss = evaluate(model, loader, config)
    loader.close()
    if ranks.is_first:
        print(f"{folder} on {config.data}, {describe_precision(config)}: "
              f"{describe_val_loss(val_loss, loader.meta)}")


def train(run: Run) -> None:
    """Run the loop until the last step or a stop request; close what it used, whatever happens."""
    run.model.train()
    run.schedule = Schedule(run.config, parallel.StopRequest())
    run.meter.start()
    try:
        if run.step:
            finish_resumed_step(run)
        training_loop(run)
    except Diverged as error:
        run.saver.wait()  # it may be writing the last good checkpoint
        raise Diverged(f"{error}; {advice_after_divergence(run)}") from None
    except RuntimeError as error:
        elastic.exit_if_lost(error, checkpoint.latest(run.folder) or "the start")
        if not memory.is_out_of_memory(error):
            raise
        run.saver.wait()
        last = checkpoint.latest(run.folder)
        kept = f"the last checkpoint is {last}" if last else "there is no checkpoint yet"
        run.profiler.close(run.step)  # writes a memory snapshot before memory is freed
        raise memory.explain(
            error, f"step {run.step}", run.config, run.model, run.optimizer, run.train_step,
            next(iter(run.batches), None), kept,
        ) from None
    finally:
        close(run)


def close(run: Run) -> None:
    """Finish what is under way and close the logs. The plot of FP8 health is made for a failed run, too."""
    run.profiler.close(run.step)
    try:
        run.saver.wait()
    except RuntimeError as error:
        elastic.exit_if_lost(error, checkpoint.latest(run.folder) or "the start")
        raise
    error = run.saver.error()
    if error:
        run.log.say(f"step {run.step}: {error}")
    run.schedule.stop.restore()
    run.log.close()
    for loader in run.loaders.values():
        loader.close()
    if run.log.enabled and run.config.fp8_health_interval:
        fp8_format = fp8.resolve_format(run.config.fp8_recipe, run.config.fp8_format)
        title = f"{run.folder}, {run.precision}"
        run.health_plot = draw("fp8_health.png", run.log.say, plot_health, run.folder, title, fp8_format)


def advice_after_divergence(run: Run) -> str:
    """Say which checkpoint is good and which options may help."""
    config = run.config
    good = [folder for folder in checkpoint.list_checkpoints(run.folder)
            if int(folder.name.removeprefix("step-")) < run.step]
    kept = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
    options = [f"--lr {config.lr / 3:.1e}", f"--grad-clip {config.grad_clip / 2 or 1.0}"]
    if config.fp8_recipe == "delayed":
        options += ["--fp8-recipe current", "--fp8-amax-compute-algo most_recent"]
    elif config.fp8_recipe != "none":
        options += ["--fp8-recipe none"]
    return f"stopped; {kept}; try {', '.join(options)}"


def summarize(run: Run, text: str) -> None:
    """Plot the losses; print the sample `text` and where everything is, or how to resume a stopped run."""
    config, folder, last = run.config, run.folder, checkpoint.latest(run.folder)
    loss_plot = draw("loss.png", run.log.say, plot_losses, folder)
    own_model = f" --model {config.model}" if models.is_file(config.model) else ""
    if run.step < config.max_steps:
        signal_name = run.schedule.stop.name or "another process"
        print(f"stopped by {signal_name} after step {run.step}: saved {last}; "
              f"resume with: {elastic.launcher()} train.py --resume --out-dir {folder}{own_model}",
              file=sys.stderr if run.log.is_unread else sys.stdout)
        return
    print(f"\n--- a sample ---\n{text}\n----------------\n"
          f"{describe_val_loss(run.val_loss, run.loaders['val'].meta)} after "
          f"{cli.counted(run.step, 'step')}, on {fp8.describe()}")
    if run.health_plot:
        print(f"FP8 health   {run.health_plot}")
    if loss_plot:
        print(f"loss curve   {loss_plot}")
    print(f"metrics      {folder}/metrics.jsonl, and: tensorboard --logdir {folder}/tensorboard\n"
          f"checkpoint   {last}\nmore text    python sample.py {folder} --prompt \"def \"{own_model}")


def sample_text(run: Run) -> str:
    """Return 128 generated tokens as text, or why there are none: the run is complete all the same."""
    tokenizer = run.tokenizer
    if tokenizer is None:
        return f"no sample: there is no tokenizer {run.checkpoint_meta['tokenizer']} here"
    try:
        generator = torch.Generator(run.device).manual_seed(run.config.seed)
        ids = generate(run.model, [tokenizer.eot], 128, temperature=0.8, top_k=50, generator=generator,
                       vocab_size=tokenizer.vocab_size)
        return tokenizer.decode(ids)
    except ValueError as error:
        return f"no sample: {error}"
    except Exception as error:
        if not models.is_file(run.config.model):
            raise
        return f"no sample: {run.config.model}: {type(error).__name__}: {json_files.reason(error)}"


if __name__ == "__main__":
    elastic.exit_process(cli.run(main, "train.py"))
