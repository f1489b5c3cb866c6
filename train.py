"""Train a GPT in FP8.

    python train.py --preset gpt2-124m --data data/packages    # a new run, in out/gpt2-124m
    python train.py --resume --out-dir out/gpt2-124m           # continue it after Ctrl-C or a crash
    torchrun --nproc-per-node 8 train.py --preset gpt2-350m    # data-parallel on 8 GPUs

`main` builds the parts and loads a checkpoint; `train` is the loop. Decisions worth knowing:
- Losses stay on the device between log lines, so that the host does not wait for the GPU.
- A step whose loss or gradient norm is not finite changes no weight; after more than ten of them the run
  ends. A checkpoint that is due after such a step waits for a finite one, unless the step is the last.
- A checkpoint is the last thing that a step does, evaluation leaves the FP8 state as it was, and a resumed
  run cuts its log to the checkpoint. So it repeats the uninterrupted run exactly (bit for bit on the CPU).
"""
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing: no traceback

import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import shlex
import sys
from pathlib import Path

import torch

from nanote import checkpoint, logs, models, parallel, recipes, torchrun
from nanote.config import TrainConfig, in_a_line, padded_vocab_size, read_options, run_command
from nanote.ddp import distribute, make_gradients
from nanote.graphs import CudaGraph, is_graphable
from nanote.health import health, watch
from nanote.optimizers import make_optimizer
from nanote.tokens import Loader


def main(config: TrainConfig) -> None:
    """Build the parts of a run, load the checkpoint that it continues, and train.

    Everything that can be wrong is found before anything is written.
    """
    ranks = parallel.start()  # torchrun, or one process
    source = checkpoint.find(config.out_dir) if config.resume or config.eval_only else None
    saved = checkpoint.read_meta(source) if source else {}
    device, dtype = pick_device_and_dtype(config, ranks)
    loader, val = (Loader(config, split, ranks, device) for split in ("train", "val"))
    config = fit_to_data(config, loader.meta, saved)

    torch.manual_seed(config.seed)  # the same weights on every rank
    random.seed(config.seed + ranks.rank)
    is_graphable(config, device)  # ValueError if --cuda-graph on is impossible
    recipe = recipes.make(config)  # the switch: delayed | current | block | mxfp8 | nvfp4 | none
    model = models.make_model(config, device, dtype, recipe, saved.get("model_config"))
    model = distribute(model, config)  # ddp | fsdp | hsdp
    if config.compile:
        model.compile(mode=config.compile_mode, fullgraph=config.compile_fullgraph)
    if config.compile or models.is_file(config.model):
        models.check_first_pass(model, loader.batches(1)[0])
    optimizer = make_optimizer(model, config)  # adamw | muon
    if config.eval_only:
        checkpoint.load(source, model, optimizer)
        loss = evaluate(config, model, val)
        if ranks.rank == 0:
            print(f"{source} on {config.data}: {logs.describe_val_loss(loss, val.meta)}")
        return
    gradients = make_gradients(model, optimizer, config)  # in flat buffers
    profiler(config, "", device)  # ValueError for a bad --profile
    torch.manual_seed(config.seed + ranks.rank)  # another dropout mask on each rank
    if source:
        checkpoint.load(source, model, optimizer)
        if "samples" in saved:  # a step may have another number of samples now
            loader.start_at(saved["step"] + 1, saved["samples"])
    if needs_first_scales(config, model, saved):
        batches = loader.batches(saved.get("step", 0) + 1)
        recipes.find_first_scales(model, batches, config.grad_accum * ranks.count)
    folder = parallel.on_rank0(lambda: open_folder(config))
    torchrun.remember_folder(folder)
    with checkpoint.lock(folder):
        parallel.on_rank0(lambda: write_start(config, folder, source, saved))
        train(config, ranks, model, optimizer, gradients, loader, val, folder, saved)


def train(config, ranks, model, optimizer, gradients, loader, val, folder, saved) -> None:
    """Train until the last step or a stop request. `saved`: meta.json of the checkpoint, {} for a new run."""
    def forward_backward(batch, *, first: bool, last: bool):
        if config.compile and first:
            torch.compiler.cudagraph_mark_step_begin()  # may overwrite the last step's tensors
        with gradients.accumulate(first, last):  # the last micro-batch reduces over ranks
            loss = model(*batch, **models.cast_options(config, model, first))
            loss = loss / (config.grad_accum * ranks.count)
            loss.backward(1 + 0 * loss.detach())  # NaN if the loss is not finite: the norm is, on every rank
        return loss.detach()

    def update():
        gradients.set_grad()
        norm = optimizer.clip_gradients(config.grad_clip)
        optimizer.step(skip=~norm.isfinite())  # a step that is not finite changes nothing
        return norm

    eager = forward_backward
    if is_graphable(config, loader.device):  # without these lines everything still trains
        forward_backward = CudaGraph(forward_backward, keep=lambda: recipes.kept_state(model))
        update = CudaGraph(update) if optimizer.capturable else update

    step, postponed = saved.get("step", 0), False
    saver, stop = checkpoint.Saver(folder, config.keep_checkpoints), parallel.StopRequest()
    log = start_log(config, ranks, model, gradients, loader, folder, step + 1)
    with contextlib.ExitStack() as at_end:
        for part in (stop, loader, val, log, saver):  # closed in the reverse order
            at_end.callback(part.close)
        profiled = at_end.enter_context(profiler(config, folder, loader.device))
        for step in range(step + 1, config.max_steps + 1):
            lr = learning_rate(step, config)
            optimizer.set_lr(lr)
            batches, measure = loader.batches(step), is_due(step, config.fp8_health_interval)
            micro_step = eager if measure else forward_backward
            with profiled(step), watch(model) if measure else contextlib.nullcontext():
                loss = sum(micro_step(batch, first=i == 0, last=i == config.grad_accum - 1)
                           for i, batch in enumerate(batches))
                norm = update()
            log.add(step, loss, norm)
            if measure:
                log.write_health(step, health(model))
            should_log, should_eval, should_save = what_is_due(config, step, is_stopped := stop.agreed())
            if not (should_log or should_eval or should_save or postponed):
                continue
            log.read()  # waits for the GPU
            if failure := saver.error():  # of the checkpoint before
                log.say(f"step {step}: {failure}; training continues")
            record = log.record(step, lr)
            log.write(record | validation(config, model, val, step) if should_eval else record)
            should_save |= postponed
            postponed = should_save and step in log.skipped and step < config.max_steps  # to a finite step
            if should_save and not postponed:
                saver.save(step, model, optimizer, run_meta(config, model, loader, step, saved), log.skipped)
            log.restart_clock()
            if is_stopped and not postponed:
                break
    if failure := saver.error():  # of the last checkpoint
        raise failure
    if ranks.rank == 0:
        summarize(config, folder, step)


def profiler(config, folder: str, device):
    """Return a context manager that gives a function (step): what is inside its context is profiled."""
    if not config.profile:
        return contextlib.nullcontext(lambda step: contextlib.nullcontext())
    from nanote.profiling import Profiler

    return Profiler(config.profile, folder, device)


def is_due(step: int, interval: int) -> bool:
    """Return whether `step` is a multiple of `interval`; never if that is 0."""
    return interval > 0 and step % interval == 0


def what_is_due(config, step: int, is_stopped: bool) -> tuple[bool, bool, bool]:
    """Return whether to log, to evaluate and to save after a step."""
    is_last = step == config.max_steps
    should_log = step == 1 or is_last or is_stopped or is_due(step, config.log_interval)
    should_eval = config.eval_interval > 0 and (step == 1 or is_last or is_due(step, config.eval_interval))
    should_save = config.checkpoint_interval > 0 and (
        is_last or is_stopped or is_due(step, config.checkpoint_interval))
    return should_log, should_eval, should_save


def learning_rate(step: int, config) -> float:
    """Return the learning rate of a step, counted from 1: the lower of linear warm-up and schedule."""
    height = 1.0
    if config.lr_schedule == "cosine" and step > config.warmup_steps:
        progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.lr_schedule == "wsd":
        height = min(1.0, (config.max_steps - step) / (config.decay_fraction * config.max_steps))
    rate = config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)
    return min(rate, config.lr * step / max(1, config.warmup_steps))


@torch.no_grad()
def evaluate(config, model, loader: Loader) -> float:
    """Return the mean validation loss in nats per token over --eval-tokens. The FP8 state is preserved."""
    total = torch.zeros(2, dtype=torch.float64, device=loader.device)  # of nats, of tokens
    model.eval()
    uncompiled = torch.compiler.set_stance("force_eager") if config.compile else contextlib.nullcontext()
    with recipes.preserved_state(model), uncompiled:
        for batch, counted in loader.evaluation(config.eval_tokens):
            loss = model(*batch)
            if counted:  # the mean over no label may be NaN
                total[0] += loss.double() * counted
                total[1] += counted
    model.train()
    nats, counted = parallel.sum_over_ranks(total).tolist()
    return nats / counted


def validation(config, model, loader: Loader, step: int) -> dict:
    """Return the fields of metrics.jsonl that an evaluation gives; after the last step also without FP8."""
    val_loss = evaluate(config, model, loader)
    if not math.isfinite(val_loss):
        raise logs.Diverged(f"step {step}: validation loss {val_loss}")
    record = logs.val_record(val_loss, loader.meta)
    if step == config.max_steps and config.fp8_recipe != "none" and not config.fp8_param:
        with recipes.turned_off(model):
            record["val_loss_without_fp8"] = evaluate(config, model, loader)
    return record


# ---------------------------------------------------------------- the parts of a run

def pick_device_and_dtype(config, ranks) -> tuple[torch.device, torch.dtype]:
    """Return this rank's device, and the dtype of weights and of all that is not in FP8."""
    device = models.pick_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local_rank) if ranks.count > 1 else device
        torch.cuda.set_device(device)
    elif not recipes.IS_REFERENCE:
        raise ValueError("--device cpu: Transformer Engine needs a GPU; set NANOTE_ENGINE=reference")
    elif "OMP_NUM_THREADS" not in os.environ:  # threads that wait for each other are slower than one
        activation = config.micro_batch_size * config.seq_len * config.n_embd
        torch.set_num_threads(max(1, min(torch.get_num_threads(), activation // 2**19)))
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, auto if config.dtype == "auto" else getattr(torch, config.dtype)


def fit_to_data(config, tokens: dict, saved: dict):
    """Return the config with vocab_size and n_positions filled in. `tokens`: meta.json of the token files."""
    checksums = [meta["tokenizer"].rpartition("@")[2] for meta in (tokens, saved or tokens)]
    if checksums[0] != checksums[1]:  # the folders of hf:DIR@CHECKSUM may differ
        raise ValueError(f"--data {config.data}: its tokens are {tokens['tokenizer']}, and those of the run "
                         f"{saved['tokenizer']}; name a folder with these")
    padded = padded_vocab_size(tokens["vocab_size"])
    vocab_size = config.vocab_size or padded
    if vocab_size < tokens["vocab_size"]:
        raise ValueError(f"--vocab-size {vocab_size}: the data needs more; pass {padded} or leave it out")
    n_positions = config.n_positions or config.seq_len
    return dataclasses.replace(config, vocab_size=vocab_size, n_positions=n_positions)


def needs_first_scales(config, model, saved: dict) -> bool:
    """Return whether delayed scaling has no scales, or those of a checkpoint do not fit: of another format or
    other layers, or of smaller gradients, since the loss is the mean over the tokens of a step."""
    if not recipes.uses_delayed_scaling(model):
        return False
    now, before = dataclasses.asdict(config), dataclasses.asdict(config) | saved.get("config", {})
    names = ("fp8_format", "fp8_margin", "fp8_lm_head", "fp8_skip_first", "fp8_skip_last")
    return (recipes.is_fresh(model) or any(now[name] != before[name] for name in names)
            or tokens_per_step(config) < saved.get("tokens_per_step", 0))


def tokens_per_step(config) -> int:
    return config.micro_batch_size * config.seq_len * config.grad_accum * parallel.world_size()


def open_folder(config) -> str:
    """Make the folder of a new run, unless it is resumed; return its path."""
    folder = config.out_dir
    if folder is None:
        names = (f"out/{config.preset}" + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
        folder = next(name for name in names if not os.path.lexists(name))
    elif not config.resume and os.path.lexists(folder) and (
            checkpoint.latest(folder) or os.listdir(folder) and not os.path.exists(f"{folder}/config.json")):
        raise ValueError(f"--out-dir {folder}: exists; resume it with --resume, or name another")
    os.makedirs(folder, exist_ok=True)
    return folder


def write_start(config, folder: str, source: Path | None, saved: dict) -> None:
    """Cut the logs of the run to the checkpoint that it continues, and write config.json."""
    if source and checkpoint.latest(folder) != source:
        raise ValueError(f"{folder}: another process has trained past {source} meanwhile; start again")
    logs.cut(folder, saved.get("step", 0) + 1)  # also of a run that was killed before its first checkpoint
    options = dataclasses.asdict(config) | {"out_dir": folder, "command": shlex.join(sys.argv)}
    Path(folder, "config.json").write_text(json.dumps(options, indent=2) + "\n")


def start_log(config, ranks, model, gradients, loader, folder: str, first_step: int) -> logs.Log:
    """Start the logs of a run, and say what it trains, on what, and how a step runs."""
    is_own, size = models.is_file(config.model), sum(parameter.numel() for parameter in model.parameters())
    flops = None if is_own else models.flops_per_token(model.config, size, config.seq_len)
    log = logs.Log(config, folder, first_step, flops, loader.device, ranks)
    fp8_format = recipes.resolve_format(config.fp8_recipe, config.fp8_format)
    log.say(f"{folder} from step {first_step}: {config.preset} on {recipes.describe()}, --fp8-recipe "
            f"{config.fp8_recipe} {fp8_format}; {models.describe(model)}")
    tokens = tokens_per_step(config)
    log.say(f"{logs.describe_corpus(config, loader.meta, tokens)}, {tokens:,} tokens a step")
    if reason := getattr(gradients, "undivided_reason", ""):
        log.say(f"every rank updates all weights, after an all-reduce of their gradients: {reason}")
    return log


def run_meta(config, model, loader, step: int, saved: dict) -> dict:
    """Return the run's part of a checkpoint's meta.json. `saved`: that of the checkpoint it continued."""
    kept = {"hf": saved["hf"]} if "hf" in saved else {}  # the source of an imported model
    return kept | {
        "config": dataclasses.asdict(config),
        "model": config.model,
        "model_config": dataclasses.asdict(model.config),
        "tokenizer": loader.meta["tokenizer"],
        "corpus": {name: loader.meta[name] for name in ("train_sha256", "val_sha256")},
        "device": recipes.describe(),
        "samples": loader.samples_before(step + 1),
        "tokens_per_step": tokens_per_step(config),
    }


def summarize(config, folder: str, step: int) -> None:
    """Print how to continue the run, and where everything is."""
    saved, place = checkpoint.latest(folder), shlex.quote(folder)
    own_model = f" --model {shlex.quote(config.model)}" if models.is_file(config.model) else ""
    recipe = f" --fp8-recipe {config.fp8_recipe}" if config.fp8_recipe.startswith("custom:") else ""
    command = f"{torchrun.launcher()} train.py --resume --out-dir {place}{own_model}{recipe}"
    if saved is None:
        print(f"{folder}: {step} steps are done, and nothing is saved: --checkpoint-interval 0")
    elif step < config.max_steps:
        print(f"stopped after step {step}; saved {saved}; resume with: {command}")
    else:
        print(f"{step} steps are done; continue with: {command} --max-steps {2 * step}\n"
              f"loss curve   {folder}/loss.png, after the first evaluation\n"
              f"metrics      {folder}/metrics.jsonl, and: tensorboard --logdir {place}/tensorboard\n"
              f"checkpoint   {saved}\n"
              f"text         python sample.py {place}{own_model}")


def run(argv=None) -> int:
    """Run a command line; return 0, or 1 for a run that diverged or ran out of memory."""
    config = read_options(argv, torchrun.folder_before_restart())
    try:
        main(config)
    except logs.Diverged as error:
        recipe = "current" if config.fp8_recipe == "delayed" else "none"
        print(f"train.py: {error}; try --lr {config.lr / 3:.1e}, --grad-clip "
              f"{config.grad_clip / 2 or 1.0} or --fp8-recipe {recipe}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"train.py: out of GPU memory after a peak of {peak:.1f} GiB: {in_a_line(error)}\n"
              f"halve --micro-batch-size {config.micro_batch_size} and double --grad-accum, or pass "
              "--gradient-checkpointing, --loss-chunks 8 or --moment-dtype bfloat16", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    parallel.exit(run_command(run, "train.py"))
