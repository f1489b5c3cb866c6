"""Weights that FSDP2 gathers in FP8, on two processes that communicate by gloo; on GPUs: test_multi_gpu.py.

Each run is compared with one whose weights are gathered in BF16 and quantized by every rank, as by one GPU.
"""
import json

import pytest

from trainer_tools import ROOT, run_ranks

pytest.importorskip("triton")
RUNS = {  # model file, and options of its config
    "tied": ("model_te_fast", {}),
    "untied": ("model_te_optimized", dict(tie_embeddings=False, gradient_checkpointing=True)),
    "mixed": ("model_te_optimized", dict(
        n_layer=2, fp8_skip_first=1, tie_embeddings=False, fp8_lm_head=False)),
    "no FP8": ("model_te_optimized", dict(use_fp8=False)),
}
MATRICES = [f"blocks.0.{name}" for name in (
    "attn.qkv.weight", "attn.proj.weight", "mlp.fc1_weight", "mlp.fc2_weight")]
PROGRAM = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
import torch
from fast_kernels import interpreter
from nanote import checkpoint, ddp, fp8_gather, optimizers, parallel, recipes
from nanote.config import TrainConfig
from trainer_tools import model_file

interpreter.install()
ranks = parallel.start()
gather_in_fp8 = fp8_gather.gather_in_fp8
tokens = torch.randint(0, 32, (3, 17), generator=torch.Generator().manual_seed(ranks.rank))
inputs, labels = tokens[:, None, :-1].contiguous(), tokens[:, None, 1:].contiguous()


def make_model(file, options):
    module = model_file(file, "fast")
    Config, Model = [getattr(module, name) for name in dir(module)
                     if name in ("FastConfig", "FastGPT2Model", "OptimizedConfig", "OptimizedGPT2Model")]
    sizes = dict(n_layer=1, n_head=2, n_embd=32, n_inner=64, vocab_size=32, n_positions=16, use_fp8=True)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Model(Config(**sizes | options))
    torch.set_default_dtype(torch.float32)
    model.fp8_recipe = module.DelayedScaling(amax_history_len=4) if model.config.use_fp8 else None
    return model


def evaluate(model):
    # the losses with FP8 and without
    losses = []
    with torch.no_grad(), recipes.preserved_state(model):
        losses.append(model(inputs[0], labels[0]).item())
        with recipes.turned_off(model):
            losses.append(model(inputs[0], labels[0]).item())
    return losses


def train(file, options, gathers_in_fp8=True):
    # a step of two micro-batches and one of one; return the model, its optimizer, losses, gradient norms
    fp8_gather.gather_in_fp8 = gather_in_fp8 if gathers_in_fp8 else lambda model: None
    model = ddp.distribute(make_model(file, options), "fsdp", grad_accum=2)
    optimizer = optimizers.make_optimizer(model, TrainConfig(lr=0.01))
    gradients = ddp.make_gradients(model, grad_accum=2)
    found = []
    for microbatches in ([0, 1], [2]):
        for i in microbatches:
            first = i == microbatches[0]
            with gradients.accumulate(first, is_last_microbatch=(i == microbatches[-1])):
                loss = model(inputs[i], labels[i], is_first_microbatch=first)
                loss.backward()
            found.append(loss.item())
        gradients.set_grad()
        found.append(optimizer.gradient_norm().item())
        optimizer.step(torch.ones(()), skip=torch.tensor(False))
    return model, optimizer, found


def values(model):
    # scales, amax histories and this rank's shards of weights
    state = {name: parallel.local_part(tensor) for name, tensor in model.state_dict().items()}
    return {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in state.items()}


def gathered_in_fp8(model):
    for unit in (model, *model.blocks):
        unit.unshard()
    return {name: weight for name, weight in model.named_parameters() if hasattr(weight, "rowwise")}


def quantized_whole(model):
    return {f"{name}.{weight}": data for name, module in model.named_modules()
            for weight, data in getattr(module, "_fp8_workspaces", {}).items()}


def bytes_and_scales(found):
    return {name: [data.rowwise.view(torch.uint8).tolist(), data.scale_inv.item()]
            for name, data in found.items()}


def cross_load(file, options, model, optimizer):
    # save, then load into a model that is whole, one gathered in BF16 and one in FP8
    with checkpoint.Checkpoints(".", keep=1) as checkpoints:
        checkpoints.save(2, model, optimizer, {})
    found = []
    for kind, gathers_in_fp8 in (("ddp", False), ("fsdp", False), ("fsdp", True)):
        fp8_gather.gather_in_fp8 = gather_in_fp8 if gathers_in_fp8 else lambda model: None
        other = ddp.distribute(make_model(file, options), kind, grad_accum=2)
        other_optimizer = optimizers.make_optimizer(other, TrainConfig(lr=0.01))
        checkpoint.load("step-2", other, other_optimizer)
        with torch.no_grad():
            loss = other(inputs[0], labels[0], is_first_microbatch=True).item()
        data = gathered_in_fp8(other) if gathers_in_fp8 else quantized_whole(other)
        found.append([loss, bytes_and_scales(data)])
    return found


for name, run in json.loads(sys.argv[2]).items():
    if name in ("no FP8", "uneven"):
        model = ddp.distribute(make_model(*run), "fsdp", grad_accum=2)
        print(json.dumps(dict(name=name, gathered_in_fp8=list(gathered_in_fp8(model)))), flush=True)
        continue
    model, optimizer, losses = train(*run)
    report = dict(name=name, losses=losses, values=values(model), after=evaluate(model))
    other, _, report["bf16_losses"] = train(*run, gathers_in_fp8=False)
    report.update(bf16_values=values(other), bf16_after=evaluate(other))
    report["gathered_in_fp8"] = list(gathered_in_fp8(model))
    if name == "untied":
        report["loaded"] = cross_load(*run, model, optimizer)
    print(json.dumps(report), flush=True)
parallel.end_process(0)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return what the first rank found out about each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        output, _ = run_ranks(PROGRAM, [str(ROOT), json.dumps(RUNS)], TRITON_INTERPRET="1",
                              CUDA_VISIBLE_DEVICES="")
    return {report["name"]: report for report in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("run", ["tied", "untied", "mixed"])
def test_training_is_that_of_weights_gathered_in_bf16(reports, run):
    """Bit for bit: losses, gradient norms, weights, scales, amax histories; after it the losses with FP8 and
    without."""
    report = reports[run]
    for found in ("losses", "values", "after"):
        assert report[found] == report[f"bf16_{found}"], found
    with_fp8, without_fp8 = report["after"]
    assert with_fp8 != without_fp8


def test_weights_that_fp8_gemms_read_are_gathered_in_fp8(reports):
    """Not those of a tied embedding, a block without FP8, lm_head in BF16 or a run without FP8."""
    fp8 = {run: reports[run]["gathered_in_fp8"] for run in RUNS}
    assert fp8["tied"] == MATRICES
    assert fp8["untied"] == [*MATRICES, "lm_head.weight"]
    assert fp8["mixed"] == [name.replace("blocks.0", "blocks.1") for name in MATRICES]
    assert fp8["no FP8"] == []


def test_weights_that_ranks_cannot_divide_are_gathered_in_bf16():
    """Three ranks: the QKV weight has 96 rows, the others 32 and 64."""
    runs = {"uneven": ["model_te_optimized", {}]}
    environment = dict(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    for output in run_ranks(PROGRAM, [str(ROOT), json.dumps(runs)], count=3, **environment):
        assert json.loads(output)["gathered_in_fp8"] == ["blocks.0.attn.qkv.weight"]


def test_gathered_bytes_are_those_of_one_process(reports):
    """Also the scales, of weights from the same checkpoint, which goes both ways."""
    whole, bf16, fp8 = reports["untied"]["loaded"]
    assert whole[0] == bf16[0] == fp8[0] == reports["untied"]["after"][0]
    assert whole[1] == bf16[1] == fp8[1] and len(fp8[1]) == 5
