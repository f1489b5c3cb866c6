"""Train a GPT in FP8.

    python train.py --preset gpt2-124m --data data/TinyStories-gpt2    # a new run, in out/gpt2-124m
    python train.py --resume --out-dir out/gpt2-124m                   # continue it after Ctrl-C or a crash
    torchrun --nproc-per-node 8 train.py --preset gpt2-350m --data data/TinyStories-gpt2    # on 8 GPUs

`main` builds the parts of a run, `make_step` the functions of a training step, and `train` is the loop.
Decisions worth knowing:
- Losses stay on the device between log lines, so that the host does not wait for the GPU.
- There is no GradScaler: BF16 has the range of float32, and each FP8 tensor a scale of its own.
- A step whose loss or gradient norm is not finite is skipped: it changes neither weights nor the FP8 state.
  After ten of them the next one ends the run.
- A checkpoint is the last thing that a step does, evaluation leaves the FP8 state as it was, and a resumed
  run cuts its log to the checkpoint. So it repeats the uninterrupted run exactly (bit for bit on the CPU).
"""
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import os
import random
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from nanote import checkpoint, models, parallel, profiling, recipes, run_folder, transfer
from nanote.command import error_line, run_command
from nanote.config import TrainConfig, is_model_file
from nanote.ddp import distribute, make_gradients, shard_optimizer
from nanote.evaluation import evaluate_checkpoint, validate
from nanote.fp8_state import FP8State
from nanote.graphs import CudaGraph
from nanote.loader import Loader, Loaders
from nanote.logs import Log
from nanote.meter import Diverged, StepMeter
from nanote.optimizers import clip_coefficient, make_optimizer
from nanote.options import read_config
from nanote.own_model import check_first_pass
from nanote.schedule import learning_rate
from nanote.tokens import check_tokenizer
from tools import import_hf


def main(config: TrainConfig) -> None:
    """Build the parts of a run, and train. Mistakes are found before anything is written."""
    ranks = parallel.start()  # the processes that torchrun started, or this one alone
    device = prepare_device(config, ranks)
    recipes.check_machine(config, device)  # config.check knew the options alone
    source = checkpoint.find(config.out_dir) if config.resume or config.eval_only else None
    resumed_meta = checkpoint.read_meta(source) if source else {}  # meta.json of the checkpoint, if any

    # data
    loaders = Loaders(train=Loader(config, "train", ranks, device), val=Loader(config, "val", ranks, device))
    fit_to_data(config, loaders.train.meta, resumed_meta)

    # model and optimizer
    torch.manual_seed(config.seed)  # the same weights on every rank
    random.seed(config.seed + ranks.rank)
    model = build_model(config, device, resumed_meta.get("model_config"))
    prepare_model(config, model, loaders.train)
    optimizer = make_optimizer(model, config)  # adamw | muon, with float32 masters of BF16 weights
    if config.eval_only:
        evaluate_checkpoint(config, model, optimizer, loaders.val, source, import_hf.open_model)
        return

    # training state
    profiling.check_steps(config.profile)
    gradients = make_gradients(model, config.grad_accum)  # in flat buffers, which ranks reduce
    shard_optimizer(optimizer, gradients)  # ZeRO-1, for --parallel ddp on one machine
    torch.manual_seed(config.seed + ranks.rank)  # another dropout mask on each rank, also after a first pass
    load_state(config, model, optimizer, loaders.train, source, resumed_meta)
    functions = make_step(config, model, optimizer, gradients)

    # the run's folder, and training
    config.out_dir = parallel.on_rank0(lambda: run_folder.open_folder(config))
    parallel.remember_folder(config.out_dir)  # for torchrun --max-restarts
    with (checkpoint.locked(config.out_dir),
          checkpoint.Checkpoints(config.out_dir, config.keep_checkpoints, resumed_meta) as checkpoints):
        parallel.on_rank0(lambda: run_folder.prepare_files(config, source, loaders.train.first_step))
        last_step = train(config, model, optimizer, functions, loaders, checkpoints)
    if ranks.rank == 0:
        run_folder.print_summary(config, last_step)


@dataclass
class StepFunctions:
    """A training step: forward_backward for each of its micro-batches, and then update."""

    forward_backward: Callable
    update: Callable
    fp8_state: FP8State  # saved by the first micro-batch, restored by update if the step is skipped


def make_step(config, model, optimizer, gradients) -> StepFunctions:
    """Return the functions of a training step, launched from Python."""
    # Under delayed scaling a forward pass ends with new scales of inputs and weights, and a backward pass
    # with those of gradients. forward_backward saves scales and amax histories from before the step, and
    # update restores them if the step is skipped. Under other recipes there is nothing to save.
    fp8_state = FP8State(model)
    # Weights change once a step, so with accumulation only its first micro-batch quantizes them to FP8. Not
    # under torch.compile, which would compile the model again for each value of the flag.
    caches_fp8_weights = (config.grad_accum > 1 and not config.compile
                          and models.takes_argument(model, "is_first_microbatch"))

    def forward_backward(batch, *, is_first_microbatch: bool, is_last_microbatch: bool):
        """Add the gradients of a micro-batch to those of the step. Return its share of the loss, ()."""
        if is_first_microbatch:
            fp8_state.save()
        if is_first_microbatch and config.compile:
            # torch.compile's CUDA graphs may overwrite the last step's outputs from here on
            torch.compiler.cudagraph_mark_step_begin()
        # Without the flag a model quantizes its weights in every micro-batch.
        options = {"is_first_microbatch": is_first_microbatch} if caches_fp8_weights else {}
        # The first micro-batch overwrites the gradients of the last step, so there is no zero_grad. The
        # others add to them, and after the last one they are summed over ranks.
        with gradients.accumulate(is_first_microbatch, is_last_microbatch):
            # The model returns the mean loss of the micro-batch.
            # batch.divisor = labels of the step / labels of the micro-batch. Summed over micro-batches and
            # ranks, loss / divisor is the step's mean loss. Without masked labels the divisor is
            # grad_accum * ranks.
            loss = model(*batch.inputs, **options) / batch.divisor
            # A loss that is not finite can have finite gradients. Here they become NaN, since 0 * inf is NaN,
            # and through the reduction every rank sees a norm that is NaN and skips the step.
            grad_output = 1 + 0 * loss.detach()
            loss.backward(grad_output)
        return loss.detach()

    def update():
        """Clip the gradients and update the weights. Return the gradient norm before clipping, ()."""
        gradients.set_grad()  # sets parameter.grad, which the optimizer reads
        norm = optimizer.gradient_norm()
        clip_coef = clip_coefficient(norm, config.grad_clip)
        # Skip a step whose norm is not finite: weights, moments, step count and FP8 state stay as they were.
        # The condition stays on the GPU, so that the host does not wait for it.
        is_skipped = ~norm.isfinite()
        fp8_state.restore(when=is_skipped)
        optimizer.step(clip_coef, skip=is_skipped)  # multiplies the gradients by clip_coef
        return norm

    return StepFunctions(forward_backward, update, fp8_state)


def with_cuda_graphs(model, optimizer, functions: StepFunctions) -> StepFunctions:
    """Return the functions of a step as CUDA graphs: a replay launches all kernels of a function at once."""

    def tensors_to_keep():  # a graph knows them by address only, so they must live as long as it does
        return [*recipes.engine_tensors(model), *functions.fp8_state.graph_tensors()]

    # One graph for each pair of is_first_microbatch and is_last_microbatch. The first two steps run from
    # Python, then the pairs are captured. Gradients, moments and learning rate are tensors, whose new values
    # a replay reads.
    forward_backward = CudaGraph(functions.forward_backward, tensors_to_keep)
    update = functions.update
    if optimizer.capturable:  # Muon is not: its update runs from Python
        update = CudaGraph(update, tensors_to_keep)
    return StepFunctions(forward_backward, update, functions.fp8_state)


def run_micro_batches(forward_backward: Callable, batches: list) -> torch.Tensor:
    """Run the forward and backward passes of a step. Return this rank's share of its loss, ()."""
    loss = 0  # becomes a tensor, which stays on the device
    for i, batch in enumerate(batches):
        is_last_microbatch = i == len(batches) - 1
        loss += forward_backward(batch, is_first_microbatch=(i == 0), is_last_microbatch=is_last_microbatch)
    return loss


def train(config, model, optimizer, eager: StepFunctions, loaders: Loaders, checkpoints) -> int:
    """Train to the last step or a stop request, and return the step reached.

    eager: the functions of `make_step`, which Python launches kernel by kernel.
    """
    loader = loaders.train
    functions = eager
    # Faster: a replay launches the kernels of a step at once. Without these two lines it trains as well.
    if config.uses_cuda_graph(recipes.has_fp8_gpu(loader.device)):
        functions = with_cuda_graphs(model, optimizer, eager)
    stop = parallel.StopRequest()  # Ctrl-C and SIGTERM finish the step, save and end the run
    log = Log(config, loader)
    log.say_start(model, optimizer.not_sharded_reason)
    meter = StepMeter(config, model, loader, checkpoints.skipped_before, log.say)
    profiler = profiling.Profiler(config.profile, config.out_dir, loader.device)
    step = loader.first_step - 1  # returned if the run has no step left
    with closing(stop), closing(log), profiler:
        for step in range(loader.first_step, config.max_steps + 1):
            lr = learning_rate(step, config)
            optimizer.set_lr(lr)
            measures_health = is_due(step, config.fp8_health_interval)  # in hooks, which no replay runs
            forward_backward = eager.forward_backward if measures_health else functions.forward_backward
            health = log.fp8_health(step, model) if measures_health else nullcontext()
            with profiler.step(step):
                if not loader.has_labels(step):  # every token of the step, on all ranks, belongs to a prompt
                    meter.add_without_labels(step)
                else:
                    with health:
                        loss = run_micro_batches(forward_backward, loader.batches(step))
                    norm = functions.update()
                    meter.add(step, loss, norm)
            log.move_bar(step)

            is_last = step == config.max_steps
            is_stopped = stop.agreed()  # by all ranks
            should_log = is_due(step, config.log_interval, also_if=(step == 1 or is_last or is_stopped))
            should_eval = is_due(step, config.eval_interval, also_if=(step == 1 or is_last))
            should_save = is_due(step, config.checkpoint_interval, also_if=(is_last or is_stopped))
            if not (should_log or should_eval or should_save):
                continue
            record = meter.collect(step, lr)  # waits for the GPU; None: no step was finite yet
            log.say_outliers(step, functions.fp8_state)
            val_record = validate(config, model, loaders.val, step) if should_eval else {}
            if record is not None:
                log.write(record | val_record)
            if failure := checkpoints.pop_error(wait=should_save):  # before another one is written
                log.say(f"step {step}: {failure}; training continues")
            if should_save:
                meta = run_folder.run_meta(config, model, loader, step, meter.all_skipped)
                checkpoints.save(step, model, optimizer, meta)
            meter.restart_clock()  # training time excludes logging, evaluation and saving
            if is_stopped:
                break
    return step


def is_due(step: int, interval: int, also_if: bool = False) -> bool:
    """Return whether a step is a multiple of `interval`, or `also_if` is true. Interval 0 means never."""
    return interval > 0 and (step % interval == 0 or also_if)


# ---------------------------------------------------------------- the parts of a run

def prepare_device(config, ranks) -> torch.device:
    """Return the device of this rank, and make it the current one."""
    device = models.pick_device(config.device)
    if device.type == "cpu":
        prepare_cpu(config.micro_batch_size * config.seq_len * config.n_embd)
        return device
    if ranks.count > 1:
        device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


MIN_VALUES_PER_THREAD = 2**19  # of an activation on a CPU: with fewer, another thread costs time


def prepare_cpu(activation_size: int) -> None:
    """Raise ValueError unless the engine runs here, and use fewer threads if an activation has few values."""
    recipes.check_cpu()
    if recipes.is_interpreted():
        from fast_kernels import interpreter
        interpreter.install()
    if "OMP_NUM_THREADS" not in os.environ:  # threads that wait for each other are slower than one
        useful_threads = min(torch.get_num_threads(), activation_size // MIN_VALUES_PER_THREAD)
        torch.set_num_threads(max(1, useful_threads))


def fit_to_data(config, data_meta: dict, resumed_meta: dict) -> None:
    """Check the tokenizer of a resumed run, and set vocab_size and n_positions of the model for the data.

    data_meta: meta.json of the token files.
    """
    if resumed_meta:  # a resumed run may read other data, made with the same tokenizer
        check_tokenizer(config.data, data_meta["tokenizer"], resumed_meta["tokenizer"])
    needed = data_meta["vocab_size"]
    padded = models.padded_vocab_size(needed)  # FP8 GEMMs need a multiple of 32
    if config.vocab_size is None:
        config.vocab_size = padded
    if config.vocab_size < needed:
        raise ValueError(f"--vocab-size {config.vocab_size}: {config.data} has a vocabulary of {needed}; "
                         f"pass {padded} or leave it out")
    if config.n_positions is None:
        config.n_positions = config.seq_len


def build_model(config, device, saved_config: dict | None = None):
    """Return the model with its FP8 recipe, on this rank's device, the same on all ranks or sharded.

    saved_config: the model's config in the checkpoint that the run continues.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # of the weights
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    # How GEMMs scale their operands to FP8: delayed | current | block | mxfp8 | nvfp4, or None: no FP8. The
    # model enters te.autocast with it in its forward pass, so a training step has no autocast.
    recipe = recipes.make(config)
    # model_te_fast.py where its Triton kernels run, else model_te_optimized.py, whose modules come from
    # Transformer Engine, fast_kernels or te_reference. The first line of the log says which, and why.
    # A sharded model is never whole on a GPU: each block is sharded when it is built.
    model = models.make_model(config, device, dtype, recipe, saved_config, shards_blocks=True)
    return distribute(model, config.parallel, config.grad_accum)  # ddp | fsdp | hsdp


def prepare_model(config, model, loader) -> None:
    """Run a first pass of your own model, and of a compiled one. Raise ValueError if it cannot train or, with
    --compile-fullgraph, has a graph break: better than a traceback in the first step."""
    if is_model_file(config.model):
        check_first_pass(model, loader.batches(1)[0].inputs)  # uncompiled, to count the GEMMs that run in FP8
    if config.compile:
        if parallel.rank() == 0:
            print("compiling, usually 30 to 70 s", flush=True)
        model.compile(mode=config.compile_mode, fullgraph=config.compile_fullgraph)
        # also after an uncompiled pass: compiled code may fail where that did not
        check_first_pass(model, loader.batches(1)[0].inputs)


def load_state(config, model, optimizer, loader, source, resumed_meta) -> None:
    """Load the checkpoint `source` or the weights of --init-from. Find the first FP8 scales if none fit."""
    scales_meta = {}  # meta.json of the run whose FP8 scales are loaded; {}: none are
    if source:
        loader.continue_from(source, resumed_meta)  # a step may have another number of samples now
        checkpoint.load(source, model, optimizer, import_hf.open_model)
        scales_meta = resumed_meta
    elif config.init_from and transfer.is_run(config.init_from):
        scales_meta = transfer.start_from_run(
            config, model, optimizer, loader.meta["tokenizer"], import_hf.open_model)
    elif config.init_from:  # a folder of Hugging Face
        stored, source_config = import_hf.open_model(Path(config.init_from), rows=config.vocab_size)
        transfer.start_from_weights(
            config, model, optimizer, stored, source_config, base=Path(config.init_from))
    if recipes.needs_first_scales(config, model, loader.tokens_per_step, scales_meta):
        batch = loader.batches(loader.first_step)[0]  # which `train` reads again
        divisor = config.grad_accum * loader.ranks.count  # not batch.divisor, infinite for a batch of prompts
        recipes.find_first_scales(model, batch.inputs, divisor)


# ---------------------------------------------------------------- the command

def run(argv=None) -> int:
    """Run a command line. Return 0, or 1 for a run that diverged or ran out of memory."""
    config = read_config(argv, parallel.folder_before_restart())
    try:
        main(config)
    except Diverged as error:
        print(f"train.py: {error}; try {advice_for(config)}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"train.py: out of GPU memory after a peak of {peak:.1f} GiB: {error_line(error)}\n"
              f"halve --micro-batch-size {config.micro_batch_size} and double --grad-accum, or pass "
              "--gradient-checkpointing, --loss-chunks 8 or --moment-dtype bfloat16", file=sys.stderr)
        return 1
    return 0


def advice_for(config) -> str:
    """Return the options that may help a run that diverged."""
    grad_clip = config.grad_clip / 2 if config.grad_clip > 0 else 1.0
    advice = f"--lr {config.lr / 3:.1e}"
    if config.fp8_recipe == "none":
        return f"{advice} or --grad-clip {grad_clip}"
    recipe = "current" if config.fp8_recipe == "delayed" else "none"
    return f"{advice}, --grad-clip {grad_clip} or --fp8-recipe {recipe}"


if __name__ == "__main__":
    parallel.end_process(run_command(run, "train.py"))
