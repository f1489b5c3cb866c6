"""Train, save and load models that FSDP2 shards, on each rank, for test_fp8_gather.py. Prints a line of JSON
for each run: python fp8_gather_ranks.py ROOT RUNS, where RUNS is {name: [kind of model, options]} as JSON."""
import json
import sys

sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]

import torch
from torch.distributed.tensor import DTensor

from fast_kernels import interpreter
from nanote import checkpoint, ddp, fp8_gather, optimizers, parallel, recipes
from nanote.config import TrainConfig
from trainer_tools import CLASSES, model_file

interpreter.install()
ranks = parallel.start()
gather_in_fp8 = fp8_gather.gather_in_fp8
tokens = torch.randint(0, 32, (3, 17), generator=torch.Generator().manual_seed(ranks.rank))
inputs = tokens[:, None, :-1].contiguous()
labels = tokens[:, None, 1:].contiguous()


def make_model(kind, options):
    """Return a model in BF16, the same on all ranks."""
    module = model_file(f"model_te_{kind}", "fast")
    model_class, config_class = (getattr(module, name) for name in CLASSES[kind])
    sizes = dict(n_layer=1, n_head=2, n_embd=32, n_inner=64, vocab_size=32, n_positions=16, use_fp8=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = model_class(config_class(**sizes | options))
    torch.set_default_dtype(torch.float32)
    model.fp8_recipe = module.DelayedScaling(amax_history_len=4) if model.config.use_fp8 else None
    return model


def evaluate(model):
    """Return the losses with FP8 and without."""
    losses = []
    with torch.no_grad(), recipes.preserved_state(model):
        losses.append(model(inputs[0], labels[0]).item())
        with recipes.turned_off(model):
            losses.append(model(inputs[0], labels[0]).item())
    return losses


def choose_gather(in_fp8):
    """Let models that are sharded next gather in FP8, or in BF16."""
    fp8_gather.gather_in_fp8 = gather_in_fp8 if in_fp8 else lambda model: None


def train(kind, options, gathers_in_fp8=True):
    """Take a step of two micro-batches and one of one. Return the model, its optimizer, the losses and
    gradient norms, and which weights are still gathered after each micro-batch."""
    choose_gather(gathers_in_fp8)
    model = ddp.distribute(make_model(kind, options), "fsdp", grad_accum=2)
    optimizer = optimizers.make_optimizer(model, TrainConfig(lr=0.01))
    gradients = ddp.make_gradients(model, grad_accum=2)
    found = []
    gathered = []
    for microbatches in ([0, 1], [2]):
        for i in microbatches:
            first = i == microbatches[0]
            with gradients.accumulate(first, is_last_microbatch=(i == microbatches[-1])):
                loss = model(inputs[i], labels[i], is_first_microbatch=first)
                loss.backward()
            found.append(loss.item())
            gathered.append([name for name, weight in model.named_parameters()
                             if not isinstance(weight, DTensor)])
        gradients.set_grad()
        found.append(optimizer.gradient_norm().item())
        optimizer.step(torch.ones(()), skip=torch.tensor(False))
    return model, optimizer, found, gathered


def train_on_two_passes(kind, options, gathers_in_fp8=True):
    """Return this rank's gradients of a difference of two losses, as preference optimization has."""
    choose_gather(gathers_in_fp8)
    model = ddp.distribute(make_model(kind, options), "fsdp", grad_accum=1)
    for _ in range(2):  # the first pass finds scales
        model.zero_grad()
        (model(inputs[0], labels[0]) - model(inputs[1], labels[1])).backward()
    return {name: parallel.local_part(p.grad).tolist() for name, p in model.named_parameters()}


def values(model):
    """Return scales, amax histories and this rank's shards of weights."""
    state = {name: parallel.local_part(tensor) for name, tensor in model.state_dict().items()}
    return {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in state.items()}


def gathered_in_fp8(model):
    """Gather all weights. Return those that are gathered in FP8."""
    for unit in (model, *model.blocks):
        unit.unshard()
    return {name: weight for name, weight in model.named_parameters() if hasattr(weight, "rowwise")}


def quantized_whole(model):
    """Return the FP8 weights that modules have quantized themselves."""
    return {f"{name}.{weight}": data for name, module in model.named_modules()
            for weight, data in getattr(module, "_fp8_workspaces", {}).items()}


def bytes_and_scales(found):
    return {name: [data.rowwise.view(torch.uint8).tolist(), data.scale_inv.item()]
            for name, data in found.items()}


def cross_load(model_kind, options, model, optimizer):
    """Save, then load into a model that is whole, one gathered in BF16 and one in FP8. Return the loss and
    the FP8 weights of each."""
    with checkpoint.Checkpoints(".", keep=1) as checkpoints:
        checkpoints.save(2, model, optimizer, {})
    found = []
    for parallel_kind, gathers_in_fp8 in (("ddp", False), ("fsdp", False), ("fsdp", True)):
        choose_gather(gathers_in_fp8)
        other = ddp.distribute(make_model(model_kind, options), parallel_kind, grad_accum=2)
        other_optimizer = optimizers.make_optimizer(other, TrainConfig(lr=0.01))
        checkpoint.load("step-2", other, other_optimizer)
        with torch.no_grad():
            loss = other(inputs[0], labels[0], is_first_microbatch=True).item()
        data = gathered_in_fp8(other) if gathers_in_fp8 else quantized_whole(other)
        found.append([loss, bytes_and_scales(data)])
    return found


def report_on(name, run):
    """Return what the tests compare: of models that gather in FP8, and as bf16_… of one that does not."""
    if name in ("no FP8", "uneven"):
        model = ddp.distribute(make_model(*run), "fsdp", grad_accum=2)
        return dict(name=name, gathered_in_fp8=list(gathered_in_fp8(model)))
    fp8_model, optimizer, fp8_losses, gathered = train(*run)
    report = dict(name=name, losses=fp8_losses, gathered=gathered)
    report |= dict(values=values(fp8_model), after=evaluate(fp8_model))
    bf16_model, _, bf16_losses, _ = train(*run, gathers_in_fp8=False)
    report["bf16_losses"] = bf16_losses
    report["bf16_values"] = values(bf16_model)
    report["bf16_after"] = evaluate(bf16_model)
    report["gathered_in_fp8"] = list(gathered_in_fp8(fp8_model))
    report["two_passes"] = train_on_two_passes(*run)
    report["bf16_two_passes"] = train_on_two_passes(*run, gathers_in_fp8=False)
    if name == "untied":
        report["loaded"] = cross_load(*run, fp8_model, optimizer)
    return report


for name, run in json.loads(sys.argv[2]).items():
    print(json.dumps(report_on(name, run)), flush=True)
parallel.end_process(0)
