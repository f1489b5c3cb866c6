"""A skipped step leaves no trace: the losses after it are those of a run without the step, bit for bit. And a
finite outlier, which is not skipped, is named in the log."""
import contextlib
import math
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.step import Training, forget_models
from model_te_optimized import DelayedScaling, OptimizedConfig, OptimizedGPT2Model
from nanote import logs, parallel, recipes
from nanote.config import TrainConfig
from nanote.fp8_state import FP8State
from trainer_tools import ROOT, finish, fork_ranks, start_ranks

HAS_GPU = torch.cuda.is_available()
SIZE = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=288, n_positions=32, seq_len=32, micro_batch_size=2,
            fp8_amax_history_len=16, seed=0)
LARGE = SIZE | dict(n_head=4, n_embd=256, vocab_size=512, n_positions=128, seq_len=128, micro_batch_size=4)
HUGE = 3e38 if HAS_GPU else 1e30  # kernels' norms are finite up to where a sum overflows
SKIPPED, STEPS = (5, 10) if HAS_GPU else (2, 5)  # a graph is captured in step 3


def make_step(**options):
    """Return a training step as train.py makes it."""
    forget_models()
    size = SIZE
    device = torch.device("cpu")
    if HAS_GPU:
        size = LARGE
        device = torch.device("cuda", parallel.start().local_rank)
        torch.cuda.set_device(device)
    config = TrainConfig(**size | options)
    return Training(config, device, make_batches(config, 0))


def make_batches(config, number):
    """Return the micro-batches of a step, other ones on each rank."""
    random = torch.Generator().manual_seed(100 * number + parallel.rank())
    shape = (config.grad_accum, config.micro_batch_size, config.seq_len + 1)
    tokens = torch.randint(257, shape, generator=random).to("cuda" if HAS_GPU else "cpu")
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in tokens]


# ---------------------------------------------------------------- what spoils a step

@contextlib.contextmanager
def changed(parameter, value):
    """Let all weights of a parameter have another value, on the last rank only."""
    weights = parallel.local_part(parameter.detach())
    before = weights.clone()
    if parallel.rank() == parallel.world_size() - 1:
        weights.fill_(value)
    yield
    weights.copy_(before)


EVENTS = {
    "huge embeddings": lambda model: changed(model.wte.weight, HUGE),
    "a loss of NaN": lambda model: changed(model.lm_head.layer_norm_weight, math.nan),
    "norm weights of 3e38": lambda model: changed(model.blocks[0].attn.qkv.layer_norm_weight, 3e38),
}


def train_one(step, number, event=None, spoiled=0, eager=False):
    """Train a step, in which an event spoils one micro-batch; return (loss, gradient norm)."""
    step.optimizer.set_lr(1e-3)
    batches = make_batches(step.config, number)
    last = len(batches) - 1
    total = 0.0
    for i, batch in enumerate(batches):
        spoil_it = contextlib.nullcontext()
        if event is not None and i == spoiled:
            spoil_it = EVENTS[event](step.model)
        with spoil_it:
            loss = step.forward_backward(batch, is_first_microbatch=(i == 0), is_last_microbatch=(i == last),
                                         eager=eager)
            total += loss.item()
    return total, step.functions.update().item()


def assert_same_state(state, expected):
    assert state.keys() == expected.keys()
    for name in expected:
        assert torch.equal(state[name], expected[name]), name


def losses_after(event, spoiled=0, eager=False, **options):
    """Return loss and norm of the steps after one that an event spoils, which must leave the FP8 state as it
    was; or after the step before it if `event` is None."""
    step = make_step(**options)
    for number in range(1, SKIPPED):
        train_one(step, number)
    if event is not None:
        before = recipes.get_state(step.model)
        _, norm = train_one(step, SKIPPED, event, spoiled, eager)
        assert not math.isfinite(norm), "the step is skipped"
        assert_same_state(recipes.get_state(step.model), before)
    return [train_one(step, number) for number in range(SKIPPED + 1, STEPS)]


OPTIONS = {
    "plain": {},
    "most recent": {"fp8_amax_compute_algo": "most_recent"},
    "checkpointing": {"gradient_checkpointing": True},
    "without FP8": {"fp8_recipe": "none"},
    "current": {"fp8_recipe": "current"},
    "muon": {"optimizer": "muon"}}
on_cpu = pytest.mark.skipif(HAS_GPU, reason="see the tests on GPUs")


@on_cpu
@pytest.mark.parametrize("event", EVENTS)
def test_losses_after_a_step_that_an_event_spoils(event):
    assert losses_after(event) == losses_after(None)


@on_cpu
@pytest.mark.parametrize("options", OPTIONS)
def test_losses_after_a_skipped_step(options):
    expected = losses_after(None, **OPTIONS[options])
    assert losses_after("huge embeddings", **OPTIONS[options]) == expected
    assert len(set(expected)) == len(expected)


@on_cpu
@pytest.mark.parametrize("spoiled", [0, 1])
@pytest.mark.parametrize("event", ["huge embeddings", "a loss of NaN"])
def test_one_bad_micro_batch_spoils_the_step(event, spoiled):
    assert losses_after(event, spoiled, grad_accum=2) == losses_after(None, grad_accum=2)


@on_cpu
def test_the_state_after_a_skipped_compiled_step(compiles):
    """`losses_after` compares the FP8 state; tracing a second model would take seconds."""
    losses_after("huge embeddings", compile=True, n_layer=1)
    assert len(compiles) > 0


ON_RANKS = ("huge embeddings", "a loss of NaN")


def compare_on_ranks(**options):
    """Print the losses after the skipped step, and without it."""
    parallel.start()
    try:
        for event in (*ON_RANKS, None):
            print("found", losses_after(event, **options), flush=True)
    except BaseException:  # at an ordinary exit NCCL would wait for graphs of the other rank
        traceback.print_exc()
        parallel.end_process(1)
    forget_models()  # NCCL's process group ends only without graphs that use it
    parallel.end_process(0)


def assert_same_losses(outputs):
    """What compare_on_ranks has printed on each rank: the losses after each event, then those without one."""
    for output in outputs:
        *found, expected = [line for line in output.splitlines() if line.startswith("found ")]
        assert found == [expected] * len(ON_RANKS)


@on_cpu
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_that_one_rank_spoils_is_skipped_on_both(kind):
    assert_same_losses(fork_ranks(lambda: compare_on_ranks(parallel=kind, n_layer=1)))


# ---------------------------------------------------------------- on GPUs, in graphs

ON_GPU = {
    "in graphs": {}, "accumulation": dict(grad_accum=3, spoiled=1), "a health step": dict(eager=True),
    "without graphs": dict(cuda_graph="off"), "checkpointing": dict(gradient_checkpointing=True)}


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["auto", "optimized"])  # fast_kernels, and Transformer Engine
@pytest.mark.parametrize("options", ON_GPU)
def test_losses_after_a_skipped_step_on_a_gpu(model, options, deterministic):
    attention = "sdpa" if model == "optimized" else "auto"
    arguments = dict(model=model, attention=attention) | ON_GPU[options]
    expected = losses_after(None, **arguments)
    assert len(set(expected)) == len(expected)
    events = EVENTS if options == "in graphs" else ["huge embeddings"]
    for event in events:
        assert losses_after(event, **arguments) == expected, event


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["auto", "optimized"])
def test_the_state_is_restored_in_graphs_of_any_algorithms(model):
    """`losses_after` compares the state."""
    for event in EVENTS:
        losses_after(event, model=model)
    assert make_step(model=model).is_graph


ON_TWO_GPUS = """
import sys
sys.path[:0] = sys.argv[1:3]
import torch
from test_skipped_step import compare_on_ranks

torch.use_deterministic_algorithms(True)
compare_on_ranks(parallel=sys.argv[3])
"""


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_that_one_gpu_spoils_is_skipped_on_both(kind):
    command = [sys.executable, "-c", ON_TWO_GPUS, str(ROOT), str(ROOT / "tests"), kind]
    processes = start_ranks(
        command, CUDA_VISIBLE_DEVICES="0,1", LOCAL_WORLD_SIZE="2", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert_same_losses(finish(processes))


# ---------------------------------------------------------------- the object in a loop of one's own

def make_own():
    forget_models()
    torch.manual_seed(0)
    config = OptimizedConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16, use_fp8=True)
    model = OptimizedGPT2Model(config)
    model.fp8_recipe = DelayedScaling(amax_history_len=4)
    return model.to("cuda", torch.bfloat16) if HAS_GPU else model


def is_finite(model, fp8_state, factor):
    """Do the passes of a step whose loss has this factor; return whether the gradient norm is finite."""
    tokens = torch.arange(32, device=model.wte.weight.device).view(2, 16)
    fp8_state.save()
    (factor * model(tokens, tokens)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    fp8_state.restore(when=~norm.isfinite())
    model.zero_grad()
    return bool(norm.isfinite())


def test_a_first_step_that_is_skipped_leaves_a_fresh_state():
    model = make_own()
    fp8_state = FP8State(model)
    assert not is_finite(model, fp8_state, factor=math.inf)
    assert recipes.is_fresh(model)
    state = recipes.get_state(model)
    histories = [name for name in state if name.endswith("amax_history")]
    assert len(histories) == 8
    for name in histories:
        assert not state[name].any(), name
    assert is_finite(model, fp8_state, factor=1.0)
    assert not recipes.is_fresh(model)


def test_another_history_length_between_steps():
    model = make_own()
    fp8_state = FP8State(model)
    assert is_finite(model, fp8_state, factor=1.0)
    model.fp8_recipe = DelayedScaling(amax_history_len=2)
    assert is_finite(model, fp8_state, factor=1.0)
    before = recipes.get_state(model)
    assert not is_finite(model, fp8_state, factor=math.inf)
    assert_same_state(recipes.get_state(model), before)
    assert before["lm_head.scaling_fwd.amax_history"].shape == (2, 3)


PAGES = {name: re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)
         for name in ("README.md", "guide/recipes.md")}


def run_beside(files, code, folder):
    """Run a loop beside the files that are copied for it; return what it prints."""
    for name in [*files, "nanote/fp8_state.py"]:
        source, target = ROOT / name, folder / Path(name).name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    command = [sys.executable, "-c", f"from fp8_state import FP8State\n{code}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_guides_loop_skips_a_step(tmp_path):
    """The gradient of one step is NaN, and the losses of the next ones are not."""
    parts, _ = PAGES["README.md"][0].replace("n_layer=4", "n_layer=1").split("def train")
    parts = parts.replace("n_embd=256", "n_embd=64")  # BF16 on a CPU is slow
    loop = PAGES["guide/recipes.md"][0].replace("range(10)", "range(3)").replace("(2, 65)", "(2, 9)")
    loop = loop.replace("loss.backward()", "(loss / (step != 1)).backward()\n    print(loss.item())")
    files = ["model_te_optimized.py", "nanote/graphs.py", "te_reference.py"]
    losses = run_beside(files, parts + loop, tmp_path)
    assert len(losses) == 3
    for loss in losses:
        assert math.isfinite(float(loss))


@pytest.mark.gpu
def test_the_guides_lines_run_in_a_graph(tmp_path):
    loop = PAGES["README.md"][1]
    changes = {
        "    optimizer.step()\n": PAGES["guide/recipes.md"][1],
        "def train(": "fp8_state = FP8State(model)\n\ndef train(",
        "    loss = model": "    fp8_state.save()\n    loss = model"}
    for before, after in changes.items():
        assert before in loop
        loop = loop.replace(before, after)
    losses = run_beside(["model_te_fast.py", "nanote/graphs.py", "fast_kernels"], loop, tmp_path)
    assert len(losses) == 10
    for loss in losses:
        assert float(loss) < 11.3


# ---------------------------------------------------------------- outliers that are finite

def say(fp8_state, step, **options):
    """Return the line that the log says about outliers after a step, or ""."""
    said = []
    log = SimpleNamespace(is_writer=True, config=TrainConfig(**options), say=said.append)
    logs.Log.say_outliers(log, step, fp8_state)
    return "".join(said)


@on_cpu
def test_the_log_names_a_scale_that_an_outlier_lowered():
    step = make_step(n_layer=1)
    for number in range(1, 4):
        train_one(step, number)
    assert say(step.fp8_state, 3) == "", "first scales are none"
    with changed(step.model.blocks[0].attn.qkv.weight, 1e9):
        _, norm = train_one(step, 4)
    assert math.isfinite(norm)
    train_one(step, 5)
    line = say(step.fp8_state, 5)
    assert line.startswith("step 4: the scale of blocks.0.attn.qkv weight")
    for words in ("for 16 steps", "--fp8-amax-compute-algo most_recent", "--fp8-amax-history-len"):
        assert words in line
    assert say(step.fp8_state, 5) == "", "once"


@on_cpu
def test_an_outlier_in_a_skipped_step_is_no_outlier():
    step = make_step(n_layer=1)
    train_one(step, 1, "huge embeddings")
    assert say(step.fp8_state, 1) == ""
