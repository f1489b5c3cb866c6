"""train.py on two GPUs, with NCCL inside CUDA graphs and the fast kernels, trains as one GPU does."""
import json
import os
import re
import statistics
import sys

import pytest
import torch

from nanote.logs import read_metrics
from trainer_tools import ROOT, RUN_ALL, finish, metrics, start_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]
STEPS = 200
OPTIONS = (f"--n-layer 4 --n-head 4 --n-embd 256 --seq-len 256 --max-steps {STEPS} --warmup-steps 20 "
           "--lr 1e-3 --fp8-amax-history-len 16 --log-interval 1 --eval-interval 0 "
           "--checkpoint-interval 100 --keep-checkpoints 9")
ONE, HALF, QUARTER, EIGHTH = (f"--micro-batch-size {size}" for size in (16, 8, 4, 2))
BF16 = "--fp8-recipe none"
BIASES = f"{BF16} --bias --no-use-rmsnorm --no-use-rotary"  # biases that FSDP2 frees
UNTIED = f"{BIASES} --no-tie-embeddings"
MUON = "--optimizer muon"
ALONE = [{"one": ONE, "halves": f"{HALF} --grad-accum 2",
          "one-biases": f"{ONE} {BIASES}", "halves-biases": f"{HALF} --grad-accum 2 {BIASES}",
          "one-muon": f"{ONE} {MUON}", "halves-muon": f"{HALF} --grad-accum 2 {MUON}"},
         {"one-bf16": f"{ONE} {BF16}", "halves-bf16": f"{HALF} --grad-accum 2 {BF16}",
          "one-untied": f"{ONE} {UNTIED}", "halves-untied": f"{HALF} --grad-accum 2 {UNTIED}"}]
TOGETHER = {  # "ddp-to-X": resumed from the checkpoint of step 100
    "ddp": HALF, "ddp-bf16": f"{HALF} {BF16}", "ddp-accum": f"{QUARTER} --grad-accum 2",
    "fsdp": f"{HALF} --parallel fsdp",
    "fsdp-accum": f"{QUARTER} --grad-accum 2 --parallel fsdp",
    "fsdp-accum4": f"{EIGHTH} --grad-accum 4 --parallel fsdp",  # three graphs
    "fsdp-biases": f"{HALF} --parallel fsdp {BIASES}", "fsdp-untied": f"{HALF} --parallel fsdp {UNTIED}",
    "fsdp-muon": f"{HALF} --parallel fsdp {MUON}",
    "ddp-to-ddp": "--resume --parallel ddp", "ddp-to-fsdp": "--resume --parallel fsdp",
    "ddp-health": f"{HALF} --fp8-health-interval 50",  # steps without graphs among those with
}
WORKER = RUN_ALL + """
import os
import torch
import torch.distributed as dist
from fast_kernels import casts
from fast_kernels.modules import Module
from nanote import fp8_gather, models, recipes
from nanote.config import TrainConfig
from nanote.ddp import distribute, make_gradients, shard_optimizer
from nanote.graphs import CudaGraph
from nanote.optimizers import clip_coefficient, make_optimizer
from train import build_model


def is_as_on_rank_0(tensor):
    as_bytes = tensor.detach().contiguous().view(-1).view(torch.uint8)  # NCCL has no 16-bit integers
    of_rank_0 = as_bytes.clone()
    dist.broadcast(of_rank_0, src=0)
    return torch.equal(as_bytes, of_rank_0)


def compare_ranks(p2p_disable):
    '''Take a few steps of ddp. Print why the optimizer is not sharded, whether all ranks have the same
    weights and the same optimizer state, and the gradient norms.'''
    os.environ["NCCL_P2P_DISABLE"] = p2p_disable  # NCCL has read it before
    config = TrainConfig(n_layer=2, n_head=4, n_embd=256, vocab_size=512, n_positions=128, lr=1e-2)
    device, recipe = torch.device("cuda", ranks.local_rank), recipes.make(config)
    torch.manual_seed(ranks.rank)  # rank 0 gives its weights to the others
    model = models.make_model(config, device, torch.bfloat16, recipe)
    model = distribute(model, config.parallel, config.grad_accum)
    optimizer = make_optimizer(model, config)
    gradients = make_gradients(model, config.grad_accum)
    shard_optimizer(optimizer, gradients)

    def step(ids):
        with gradients.accumulate(is_first_microbatch=True, is_last_microbatch=True):
            (model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / ranks.count).backward()
        gradients.set_grad()
        norm = optimizer.gradient_norm()
        optimizer.step(clip_coefficient(norm, 1.0), skip=~norm.isfinite())
        return norm

    graph = CudaGraph(step, keep=lambda: recipes.engine_tensors(model))
    norms = [graph(torch.randint(0, 512, (8, 129), device=device)).item() for _ in range(6)]
    optimizer.gather_state()
    same_weights = all([is_as_on_rank_0(parameter) for parameter in model.parameters()])
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    same_states = all([is_as_on_rank_0(tensor) for tensor in states])
    found = [optimizer.not_sharded_reason, same_weights, same_states, norms]
    print(f"rank {ranks.rank}: {json.dumps(found)}", flush=True)


def train_sharded(config, gathers_in_fp8):
    '''Take a few steps of fsdp in CUDA graphs. Return the model, and losses and gradient norms.'''
    forget_models()
    fp8_gather.gather_in_fp8 = gather_in_fp8 if gathers_in_fp8 else lambda model: None
    torch.manual_seed(0)
    device = torch.device("cuda", ranks.local_rank)
    model = build_model(config, device)
    optimizer = make_optimizer(model, config)
    gradients = make_gradients(model, config.grad_accum)
    first = tokens[0, :, :-1].contiguous()
    recipes.find_first_scales(model, (first, first), ranks.count)

    def step(ids):
        with gradients.accumulate(is_first_microbatch=True, is_last_microbatch=True):
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            (loss / ranks.count).backward()
        gradients.set_grad()
        norm = optimizer.gradient_norm()
        optimizer.step(clip_coefficient(norm, 1.0), skip=~norm.isfinite())
        return torch.stack((loss.detach(), norm))

    graph = CudaGraph(step, keep=lambda: recipes.engine_tensors(model))
    numbers = [graph(ids).tolist() for ids in tokens]
    with torch.no_grad():
        model(first)  # quantizes the weights of the last step
    return model, numbers


def has_bytes_of(whole, module, gemm, is_transposed):
    '''Return whether the gathered weight of a GEMM has bytes and scale of the whole weight, quantized.'''
    quantization = module.weight_quantization(gemm, module.fp8_meta["recipe"])
    expected, _ = casts.cast(whole, quantization._replace(amax=torch.zeros_like(quantization.amax)))
    weight = module.weight_of(gemm)
    pairs = [(weight.rowwise, expected.rowwise), (weight.scale_inv, expected.scale_inv)]
    if is_transposed:
        pairs.append((weight.columnwise, expected.columnwise))
    return all([torch.equal(found.view(torch.uint8), other.view(torch.uint8)) for found, other in pairs])


def compare_gathers():
    '''Print whether each gathered weight has the bytes of the whole one, and losses and gradient norms of
    steps whose weights are gathered in FP8, and in BF16.'''
    config = TrainConfig(n_layer=2, n_head=4, n_embd=256, vocab_size=512, n_positions=128, seq_len=128,
                         micro_batch_size=8, lr=1e-2, parallel="fsdp", tie_embeddings=False,
                         fp8_amax_history_len=4)
    model, numbers = train_sharded(config, gathers_in_fp8=True)
    with torch.no_grad():
        whole = {name: weight.full_tensor() for name, weight in model.state_dict().items()
                 if hasattr(weight, "full_tensor")}
        for unit in (model, *model.blocks):
            unit.unshard()
        is_same = []
        for name, module in model.named_modules():
            if isinstance(module, Module):
                is_transposed = name == "lm_head"  # weights of blocks are, in a backward pass
                for gemm, weight in enumerate(module.weight_names):
                    is_same.append(has_bytes_of(whole[f"{name}.{weight}"], module, gemm, is_transposed))
    _, bf16_numbers = train_sharded(config, gathers_in_fp8=False)
    print(f"gathers: {json.dumps([is_same, numbers, bf16_numbers])}", flush=True)


if ranks.count > 1:
    for p2p_disable in ("0", "1"):
        forget_models()
        compare_ranks(p2p_disable)
    os.environ["NCCL_P2P_DISABLE"] = "0"
    gather_in_fp8 = fp8_gather.gather_in_fp8
    tokens = torch.randint(0, 512, (8, 8, 129), generator=torch.Generator().manual_seed(ranks.rank))
    tokens = tokens.to(f"cuda:{ranks.local_rank}")
    compare_gathers()
parallel.end_process(0)
"""


def start(runs, options, gpus, last_step=STEPS, machines=1, program=WORKER):
    """Start train.py's runs on some of the machine's GPUs, as if these were in several machines."""
    runs = {name: extra if "--resume" in extra else f"{options} {extra}" for name, extra in runs.items()}
    command = [sys.executable, "-c", program, str(ROOT), json.dumps(runs), f"step-{last_step}"]
    count = len(gpus.split(","))
    return start_ranks(
        command, count, CUDA_VISIBLE_DEVICES=gpus, LOCAL_WORLD_SIZE=str(count // machines))


@pytest.fixture(scope="module")
def printed(tmp_path_factory, tokens):
    """Make the runs that the tests compare; return what the ones on two GPUs printed, by name."""
    folder, before = tmp_path_factory.mktemp("runs"), os.getcwd()
    os.chdir(folder)
    options = f"{OPTIONS} --data {tokens}"
    finish([process for gpu, some in enumerate(ALONE) for process in start(some, options, str(gpu))])
    output = "".join(finish(start(TOGETHER, options, "0,1")))
    yield dict(re.findall(r"=== (.+?) ===\n(.*?)(?=\n===|\Z)", output, re.S))
    os.chdir(before)


def distance(run, other):
    """Return the mean difference of the losses of two runs, step by step."""
    pairs = zip(metrics(run), metrics(other), strict=True)
    return statistics.mean(abs(a["loss"] - b["loss"]) for a, b in pairs)


@pytest.mark.parametrize("run", TOGETHER)
def test_two_gpus_train_as_one(printed, run):
    """The tolerance is what rounding alone changes: one GPU with each step's samples in two halves."""
    kind = run.rpartition("-")[2]
    kind = f"-{kind}" if kind in ("bf16", "biases", "untied", "muon") else ""
    one, halves = f"one{kind}", f"halves{kind}"
    losses = [record["loss"] for record in metrics(run)]
    assert losses[-1] < 0.7 * losses[0] and losses[0] == pytest.approx(metrics(one)[0]["loss"], rel=1e-4)
    assert distance(run, one) <= 3 * distance(halves, one)
    assert ("FastGPT2Model" in printed[run]) == (run != "ddp-health")
    assert "every rank updates all weights" not in printed[run]


def test_steps_without_graphs_give_statistics(printed):
    assert [record["step"] for record in read_metrics("ddp-health/fp8_health.jsonl")] == [50, 100, 150, 200]


def test_ranks_have_the_same_weights(printed):
    """And optimizer state, to the last bit, whether each updates a part of them or all."""
    text = "\n".join(printed.values())
    of_rank_0, of_rank_1 = ([json.loads(line) for line in re.findall(rf"rank {rank}: (.+)", text)]
                            for rank in (0, 1))
    assert of_rank_0 == of_rank_1
    (reason, *is_same, norms), (unsharded_reason, *unsharded_is_same, unsharded_norms) = of_rank_0
    assert reason == "" and unsharded_reason == "NCCL_P2P_DISABLE is set"
    assert all(is_same) and all(unsharded_is_same) and len(set(norms)) == 6
    assert norms[0] == pytest.approx(unsharded_norms[0], rel=1e-3)
    assert norms == pytest.approx(unsharded_norms, rel=0.2)  # rounding changes the FP8 of later steps


def test_gathered_bytes_are_those_of_the_whole_weight(printed):
    """Steps in CUDA graphs lose as much as with weights gathered in BF16; sums have another order."""
    rows = [json.loads(line) for line in re.findall("gathers: (.+)", "\n".join(printed.values()))]
    assert len(rows) == 2  # ranks
    for is_same, numbers, bf16_numbers in rows:
        assert len(is_same) == 2 * 4 + 1 and all(is_same)
        assert numbers[0] == pytest.approx(bf16_numbers[0], rel=1e-3)
        for step, expected in zip(numbers, bf16_numbers, strict=True):
            assert step == pytest.approx(expected, rel=0.1)


# ---------------------------------------------------------------- four GPUs

needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
FOUR_STEPS = 30
FOUR_OPTIONS = f"{OPTIONS} --max-steps {FOUR_STEPS} --checkpoint-interval 15"
ORDERS = {  # of summation, on one GPU: "one" in one micro-batch
    "one": ONE, "quarters": f"{QUARTER} --grad-accum 4", "eighths": f"{EIGHTH} --grad-accum 8"}
ON_FOUR = {
    "ddp": QUARTER, "ddp-accum": f"{EIGHTH} --grad-accum 2",
    "fsdp": f"{QUARTER} --parallel fsdp",
    "fsdp-accum": "--micro-batch-size 1 --grad-accum 4 --parallel fsdp"}
AS_TWO_MACHINES = {
    "hsdp": f"{QUARTER} --parallel hsdp", "hsdp-accum": f"{EIGHTH} --grad-accum 2 --parallel hsdp",
    "machines-ddp": QUARTER}
# {precision: {kind of its runs: options}}; in FP8 the distance of two runs differs much from seed to seed
KINDS = {"fp8": {"fp8": "", "fp8-seed1": "--seed 1", "fp8-seed2": "--seed 2"}, "bf16": {"bf16": BF16}}


def of_each_kind(runs: dict) -> dict:
    return {f"{kind}-{name}": f"{options} {extra}" for kinds in KINDS.values()
            for kind, extra in kinds.items() for name, options in runs.items()}


def mean_distance(precision, run):
    """Return how far a run is from "one", the mean over its seeds."""
    return statistics.mean(distance(f"{kind}-{run}", f"{kind}-one") for kind in KINDS[precision])


@pytest.fixture(scope="module")
def printed_on_four(tmp_path_factory, tokens):
    """Make the runs that the tests compare; return what the checks of four GPUs printed."""
    folder = tmp_path_factory.mktemp("four")
    options = f"{FOUR_OPTIONS} --data {tokens}"
    without_checks = f"{RUN_ALL}\nparallel.end_process(0)"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finish(start(of_each_kind(ORDERS), options, "0", program=without_checks))
        output = "".join(finish(start(of_each_kind(ON_FOUR), options, "0,1,2,3")))
        finish(start(of_each_kind(AS_TWO_MACHINES), options, "0,1,2,3", machines=2,
                     program=without_checks))
        resumed = {f"fp8-{name}-to-two": "--resume --grad-accum 2" for name in ("fsdp", "hsdp")}
        finish(start(resumed, options, "0,1", FOUR_STEPS, program=without_checks))
        yield output


@needs_four
@pytest.mark.parametrize("precision", KINDS)
@pytest.mark.parametrize("run", [*ON_FOUR, *AS_TWO_MACHINES])
def test_four_gpus_train_as_one(printed_on_four, run, precision):
    """The tolerance is how far two orders of summation on one GPU are from a third, by the mean over seeds.
    In FP8 scales are updated once a micro-batch, too."""
    scatter = max(mean_distance(precision, order) for order in ("quarters", "eighths"))
    factor = 3 if precision == "fp8" else 2
    assert mean_distance(precision, run) <= factor * scatter
    for kind in KINDS[precision]:
        first, first_of_one = metrics(f"{kind}-{run}")[0], metrics(f"{kind}-one")[0]
        assert first["loss"] == pytest.approx(first_of_one["loss"], rel=1e-4)


@needs_four
@pytest.mark.parametrize("run", ["fsdp", "hsdp"])
def test_two_gpus_resume_a_run_of_four(printed_on_four, run):
    scatter = distance("fp8-quarters", "fp8-one")
    assert distance(f"fp8-{run}-to-two", "fp8-one") <= 3 * scatter


@needs_four
def test_four_gpus_have_the_same_weights(printed_on_four):
    """And the same optimizer state, whether each updates a part of them or all; gathered FP8 weights have the
    bytes of the whole weight."""
    of_ranks = [[json.loads(line) for line in re.findall(rf"rank {rank}: (.+)", printed_on_four)]
                for rank in range(4)]
    for found in of_ranks:
        assert found == of_ranks[0]
        for _, same_weights, same_states, _ in found:
            assert same_weights and same_states
    gathers = [json.loads(line) for line in re.findall("gathers: (.+)", printed_on_four)]
    assert len(gathers) == 4
    for is_same, _, _ in gathers:
        assert len(is_same) == 2 * 4 + 1 and all(is_same)
