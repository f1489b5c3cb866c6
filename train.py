"""Train a GPT in FP8.

    python train.py --preset gpt2-124m --data data/packages    # a new run, in out/gpt2-124m
    python train.py --resume --out-dir out/gpt2-124m           # continue it after Ctrl-C or a crash
    torchrun --nproc-per-node 8 train.py --preset gpt2-350m    # data-parallel on 8 GPUs

`main` builds the parts and loads a checkpoint; `train` is the loop. Decisions worth knowing:
- Losses stay on the device between log lines, so that the host does not wait for the GPU.
- A step whose loss or gradient norm is not finite is skipped: it changes neither weights nor the FP8 state.
  The eleventh of a process ends the run.
- A checkpoint is the last thing that a step does, evaluation leaves the FP8 state as it was, and a resumed
  run cuts its log to the checkpoint. So it repeats the uninterrupted run exactly (bit for bit on the CPU).
"""
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing: no traceback

import itertools
import json
import math
import os
import random
import shlex
import sys
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from nanote import checkpoint, logs, models, parallel, recipes, transfer
from nanote.config import TrainConfig, in_a_line, run_command
from nanote.ddp import distribute, make_gradients
from nanote.fp8_state import FP8State
from nanote.models import takes_argument
from nanote.optimizers import make_optimizer
from nanote.options import read_options
from nanote.own_model import check_first_pass, is_file
from nanote.tokens import Loader


def main(config: TrainConfig) -> None:
    """Build the parts of a run, load the checkpoint that it continues, and train. Everything that can be
    wrong is found before anything is written."""
    ranks = parallel.start()  # torchrun, or one process
    source = checkpoint.find(config.out_dir) if config.resume or config.eval_only else None
    saved = checkpoint.read_meta(source) if source else {}
    first_step = saved.get("step", 0) + 1
    device = models.pick_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local_rank) if ranks.count > 1 else device
        torch.cuda.set_device(device)
    else:
        prepare_cpu(config.micro_batch_size * config.seq_len * config.n_embd)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    loader, val = (Loader(config, split, ranks, device) for split in ("train", "val"))
    if saved:
        check_tokenizer(config.data, loader.meta["tokenizer"], saved["tokenizer"])
    config.vocab_size = fit_vocab_size(config.vocab_size, loader.meta["vocab_size"])
    config.n_positions = config.n_positions or config.seq_len

    torch.manual_seed(config.seed)  # the same weights on every rank
    random.seed(config.seed + ranks.rank)
    config.is_graphable(recipes.has_fp8_gpu(device))  # ValueError if --cuda-graph on is impossible
    recipe = recipes.make(config)  # the switch: delayed | current | block | mxfp8 | nvfp4 | none
    model = models.make_model(config, device, dtype, recipe, saved.get("model_config"))
    model = distribute(model, config.parallel, config.grad_accum)  # ddp | fsdp | hsdp
    if is_file(config.model):
        check_first_pass(model, loader.batches(1)[0])
    if config.compile:
        if ranks.rank == 0:
            print("compiling, usually 30 to 70 s", flush=True)
        model.compile(mode=config.compile_mode, fullgraph=config.compile_fullgraph)
        check_first_pass(model, loader.batches(1)[0])
    optimizer = make_optimizer(model, config)  # adamw | muon
    if config.eval_only:
        checkpoint.load(source, model, optimizer)
        loss = evaluate(model, val, config.eval_tokens, config.compile)
        if ranks.rank == 0:
            print(f"{source} on {config.data}: {logs.describe_val_loss(loss, val.meta)}")
        return
    gradients = make_gradients(model, optimizer, config.grad_accum)  # in flat buffers
    make_profiler(config.profile, "", device)  # ValueError for a bad --profile
    torch.manual_seed(config.seed + ranks.rank)  # another dropout mask on each rank
    if source:
        loader.continue_from(source, saved)  # a step may have another number of samples now
        checkpoint.load(source, model, optimizer)
    starts_new = config.init_from and not source
    of_scales = init_from(config, model, optimizer, loader.meta) if starts_new else saved
    if needs_first_scales(model, asdict(config), loader.tokens_per_step, of_scales):
        recipes.find_first_scales(model, loader.batches(first_step), config.grad_accum * ranks.count)
    config.out_dir = parallel.on_rank0(lambda: open_folder(config.out_dir, config.preset, config.resume))
    parallel.remember_folder(config.out_dir)
    saver = checkpoint.Saver(config.out_dir, config.keep_checkpoints)
    with checkpoint.lock(config.out_dir), closing(saver):
        options = asdict(config) | {"command": shlex.join(sys.argv)}
        parallel.on_rank0(lambda: write_start(config.out_dir, options, source, first_step))
        step = train(config, model, optimizer, gradients, loader, val, saver, saved)
    if failure := saver.error():  # of the last checkpoint
        raise failure
    if ranks.rank == 0:
        summarize(config.out_dir, step, config.max_steps, config.model, config.fp8_recipe)


def train(config, model, optimizer, gradients, loader, val, saver, saved) -> int:
    """Train to the last step or a stop request, and return that step. `saved`: the checkpoint's meta.json."""
    caches_fp8 = config.grad_accum > 1 and not config.compile and takes_argument(model, "is_first_microbatch")
    fp8_state = FP8State(model)

    def forward_backward(batch, divisor, *, first: bool, last: bool):
        if config.compile and first:
            torch.compiler.cudagraph_mark_step_begin()  # may overwrite the last step's tensors
        if first:
            fp8_state.save()
        options = {"is_first_microbatch": first} if caches_fp8 else {}  # quantize weights once a step
        with gradients.accumulate(first, last):  # the last micro-batch reduces over ranks
            loss = model(*batch, **options)
            loss = loss / (divisor[0] if divisor else config.grad_accum * loader.ranks.count)
            loss.backward(1 + 0 * loss.detach())  # NaN if the loss is not finite: all ranks skip
        return loss.detach()

    def update():
        gradients.set_grad()
        norm = optimizer.clip_gradients(config.grad_clip)
        fp8_state.restore(unless=norm.isfinite())
        optimizer.step(skip=~norm.isfinite())  # then weights, moments and step count stay
        return norm

    def keep():  # what graphs use
        return [*recipes.kept_state(model), dict(vars(fp8_state))]

    eager = forward_backward
    if config.is_graphable(recipes.has_fp8_gpu(loader.device)):  # without these lines everything still trains
        from nanote.graphs import CudaGraph
        forward_backward = CudaGraph(forward_backward, keep)
        update = CudaGraph(update, keep) if optimizer.capturable else update

    step, stop = saved.get("step", 0), parallel.StopRequest()
    log = logs.Log(config, loader, first_step=step + 1, skipped_before=saved.get("skipped", ()))
    log.start(model, gradients.undivided_reason)
    if config.warmup_steps >= config.max_steps:
        log.say(describe_warmup(config))
    with closing(stop), closing(log), make_profiler(config.profile, config.out_dir, loader.device) as profile:
        for step in range(step + 1, config.max_steps + 1):
            optimizer.set_lr(learning_rate(step, config))
            batches = loader.batches(step) if loader.has_labels(step) else []  # without a label: no update
            measure = bool(batches) and is_due(step, config.fp8_health_interval)
            micro_step = eager if measure else forward_backward
            with profile(step):
                if batches:
                    with log.fp8_health(step, model) if measure else nullcontext():
                        loss = sum(micro_step(*batch, first=i == 0, last=i == config.grad_accum - 1)
                                   for i, batch in enumerate(zip(batches, loader.divisors(step))))
                    log.add(step, loss, update())
                else:
                    log.add_without_labels(step)
            is_last, is_stopped = step == config.max_steps, stop.agreed()
            should_log = is_due(step, config.log_interval, step == 1 or is_last or is_stopped)
            should_eval = is_due(step, config.eval_interval, step == 1 or is_last)
            should_save = is_due(step, config.checkpoint_interval, is_last or is_stopped)
            if not (should_log or should_eval or should_save):
                continue
            log.read()  # waits for the GPU
            log.say_outliers(step, fp8_state, updates=config.grad_accum)
            if failure := saver.error():  # of the previous checkpoint
                log.say(f"step {step}: {failure}; training continues")
            record = log.record(step, optimizer.lr)
            if should_eval:
                record |= validation(model, val, config.eval_tokens, is_last, config.compile)
            log.write(record)
            if should_save:
                meta = run_meta(asdict(config), model, loader, step, saved) | {"skipped": log.all_skipped}
                saver.save(step, model, optimizer, meta, log.all_skipped)
            log.restart_clock()
            if is_stopped:
                break
    return step


def make_profiler(steps: str | None, folder: str, device):
    """Return a context manager of a function: `with profile(step):` profiles the steps of `steps`."""
    if not steps:
        return nullcontext(lambda step: nullcontext())
    from nanote.profiling import Profiler
    return Profiler(steps, folder, device)


def is_due(step: int, interval: int, at_any_step: bool = False) -> bool:
    """Return whether a step is a multiple of `interval`, or `at_any_step`. An interval of 0 disables it."""
    return interval > 0 and (step % interval == 0 or at_any_step)


def learning_rate(step: int, config) -> float:
    """Return the learning rate of a step, counted from 1: the lower of linear warm-up and schedule.

    Both decays end at a tenth of the peak; wsd begins its own in the last fifth of the steps.
    """
    height = 1.0
    if config.lr_schedule == "cosine" and step > config.warmup_steps:
        progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.lr_schedule == "wsd":
        height = min(1.0, (config.max_steps - step) / (0.2 * config.max_steps))
    rate = config.lr * (0.1 + 0.9 * height)
    return min(rate, config.lr * step / max(1, config.warmup_steps))


def describe_warmup(config) -> str:
    """Return a line about a warm-up that lasts the whole run."""
    highest = max(learning_rate(step, config) for step in range(1, config.max_steps + 1))
    return (f"--warmup-steps {config.warmup_steps}: all of --max-steps {config.max_steps} is warm-up; the "
            f"learning rate reaches {highest:.1e} of --lr {config.lr:.1e}; pass a shorter one, such as "
            f"--warmup-steps {config.max_steps // 10}")


@torch.no_grad()
def evaluate(model, loader: Loader, tokens: int, is_compiled: bool = False) -> float:
    """Return the mean validation loss in nats per token, over `tokens` tokens. The FP8 state is preserved."""
    total = torch.zeros(2, dtype=torch.float64, device=loader.device)  # of nats, of tokens
    model.eval()
    uncompiled = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    with recipes.preserved_state(model), uncompiled:
        for batch, counted in loader.evaluation(tokens):
            loss = model(*batch)
            if counted:  # the mean over no label may be NaN
                total[0] += loss.double() * counted
                total[1] += counted
    model.train()
    nats, counted = parallel.sum_over_ranks(total).tolist()
    if not counted:
        raise ValueError(f"--eval-tokens {tokens}: no answer is among these tokens; pass more")
    return nats / counted


def validation(model, loader: Loader, tokens: int, is_last: bool, is_compiled: bool) -> dict:
    """Return the fields of metrics.jsonl that an evaluation gives; after the last step also without FP8."""
    record = logs.val_record(evaluate(model, loader, tokens, is_compiled), loader.meta)
    if is_last and recipes.uses_fp8(model):
        with recipes.turned_off(model):
            record["val_loss_without_fp8"] = evaluate(model, loader, tokens, is_compiled)
    return record


# ---------------------------------------------------------------- the parts of a run

def prepare_cpu(activation: int) -> None:
    """Raise ValueError unless the engine runs here, and use fewer threads if an activation has few values."""
    if recipes.ENGINE == "fast" and not recipes.te.unsupported_reason() and not torch.cuda.is_available():
        from fast_kernels import interpreter  # TRITON_INTERPRET=1
        interpreter.install()
    elif not recipes.IS_REFERENCE:
        raise ValueError(f"--device cpu: {recipes.te.__name__} needs a GPU; set NANOTE_ENGINE=reference")
    if "OMP_NUM_THREADS" not in os.environ:  # threads that wait for each other are slower than one
        torch.set_num_threads(max(1, min(torch.get_num_threads(), activation // 2**19)))


def check_tokenizer(data: str, tokenizer: str, expected: str) -> None:
    """Raise ValueError unless the tokens of `data` are those of the run."""
    from nanote.tokenizers import same_tokenizer  # a new run needs none
    if not same_tokenizer(tokenizer, expected):
        raise ValueError(f"--data {data}: tokenized with {tokenizer}, but the run uses {expected}; name a "
                         "folder tokenized with that")


def fit_vocab_size(vocab_size: int | None, needed: int) -> int:
    """Return the rows of the embedding: --vocab-size, or those that the data needs, padded for FP8."""
    padded = models.padded_vocab_size(needed)
    if (vocab_size or padded) < needed:
        raise ValueError(f"--vocab-size {vocab_size}: the data needs more; pass {padded} or leave it out")
    return vocab_size or padded


def init_from(config, model, optimizer, data: dict) -> dict:
    """Copy the weights that --init-from names to a new run's model. Return the source's meta.json if its FP8
    scales were copied too, else {}. `data`: meta.json of the token files."""
    folder = Path(config.init_from)
    if checkpoint.step_of(folder) is not None or checkpoint.latest(folder):
        tensors, meta = None, checkpoint.read_meta(checkpoint.find(folder))
        check_tokenizer(config.data, data["tokenizer"], meta["tokenizer"])
        theirs = meta["model_config"]
    else:
        from tools.import_hf import read_model  # needs transformers
        weights, theirs = read_model(folder, rows=config.vocab_size)
        tensors, meta = {f"model.{name}": tensor for name, tensor in weights.items()}, {}
    transfer.print_differences(config.init_from, vars(model.config), theirs)
    return meta if transfer.start_from(config.init_from, model, optimizer, tensors) else {}


def needs_first_scales(model, options: dict, tokens_per_step: int, saved: dict) -> bool:
    """Return whether first scales must be found: delayed scaling has none, or a checkpoint's are for another
    format, for other layers, or for smaller gradients (more tokens a step)."""
    if not recipes.uses_delayed_scaling(model):
        return False
    if not saved or recipes.is_fresh(model):
        return True
    names = ("fp8_format", "fp8_margin", "fp8_lm_head", "fp8_skip_first", "fp8_skip_last")
    before = options | saved["config"]
    return (any(options[name] != before[name] for name in names)
            or tokens_per_step < saved.get("tokens_per_step", 0))


def open_folder(folder: str | None, preset: str, is_resumed: bool) -> str:
    """Make the folder of a new run, unless it is resumed; return its path."""
    if folder is None:
        names = (f"out/{preset}" + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
        folder = next(name for name in names if not os.path.lexists(name))
    elif not is_resumed and os.path.lexists(folder) and (
            checkpoint.latest(folder) or os.listdir(folder) and not os.path.exists(f"{folder}/config.json")):
        raise ValueError(f"--out-dir {folder}: exists; resume it with --resume, or name another")
    os.makedirs(folder, exist_ok=True)
    return folder


def write_start(folder: str, options: dict, source: Path | None, first_step: int) -> None:
    """Cut the logs of the run to the checkpoint that it continues, and write config.json."""
    if source and checkpoint.latest(folder) != source:
        raise ValueError(f"{folder}: another process has trained past {source} meanwhile; start again")
    logs.cut(folder, first_step)  # also of a run that was killed before its first checkpoint
    logs.replace_file(Path(folder, "config.json"), json.dumps(options, indent=2) + "\n")


def run_meta(options: dict, model, loader, step: int, saved: dict) -> dict:
    """Return the run's part of a checkpoint's meta.json. `saved`: that of the checkpoint it continued."""
    return ({"hf": saved["hf"]} if "hf" in saved else {}) | {  # hf: the source of an imported model
        "config": options,
        "model": models.network(options["model"]),
        "model_config": asdict(model.config),
        "tokenizer": loader.meta["tokenizer"],
        "corpus": {name: loader.meta[name] for name in ("train_sha256", "val_sha256")},
        "device": recipes.describe(),
        "samples": loader.samples_before(step + 1),
        "tokens_per_step": loader.tokens_per_step,
    }


def summarize(folder: str, step: int, max_steps: int, model: str, fp8_recipe: str) -> None:
    """Print how to continue the run, and where everything is. The user's own code has to be named again."""
    saved, place = checkpoint.latest(folder), shlex.quote(folder)
    if saved is None:
        print(f"{folder}: {step} steps are done, and nothing is saved: --checkpoint-interval 0")
        return
    own_model = f" --model {shlex.quote(model)}" if is_file(model) else ""
    own_recipe = f" --fp8-recipe {fp8_recipe}" if fp8_recipe.startswith("custom:") else ""
    command = f"{parallel.launcher()} train.py --resume --out-dir {place}{own_model}{own_recipe}"
    if step < max_steps:
        print(f"stopped after step {step}; saved {saved}; resume with: {command}")
    else:
        print(f"{step} steps are done; continue with: {command} --max-steps {2 * step}")
        files = {"loss.png": f"loss curve   {folder}/loss.png",
                 "metrics.jsonl": f"metrics      {folder}/metrics.jsonl",
                 "tensorboard": f"curves       tensorboard --logdir {place}/tensorboard"}
        for name, line in files.items():
            if Path(folder, name).exists():
                print(line)
        print(f"checkpoint   {saved}\n"
              f"text         python sample.py {place}{own_model}")


def run(argv=None) -> int:
    """Run a command line; return 0, or 1 for a run that diverged or ran out of memory."""
    config = read_options(argv, parallel.folder_before_restart())
    try:
        main(config)
    except logs.Diverged as error:
        advice = [f"--lr {config.lr / 3:.1e}", f"--grad-clip {config.grad_clip / 2 or 1.0}"]
        if config.fp8_recipe != "none":
            advice.append("--fp8-recipe " + ("current" if config.fp8_recipe == "delayed" else "none"))
        print(f"train.py: {error}; try {', '.join(advice[:-1])} or {advice[-1]}", file=sys.stderr)
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
