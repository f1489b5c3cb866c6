"""CUDA graphs of a training step: the numbers of steps without graphs, and no memory of others touched."""
import copy
import gc
import os
import re
import shutil
import subprocess
import sys
import weakref

import pytest
import torch

import train
from bench.step import Training, forget_models
from nanote import chunked_loss, recipes
from nanote.config import TrainConfig
from nanote.ddp import Gradients
from nanote.graphs import CudaGraph
from trainer_tools import ROOT, model_file

gpu = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = dict(n_layer=2, n_head=4, n_embd=256, vocab_size=512, n_positions=128, seq_len=128,
             micro_batch_size=4)


def batch(seed=0, seq_len=128):
    tokens = torch.randint(0, 512, (4, seq_len + 1), generator=torch.Generator().manual_seed(seed)).to("cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_training(graphs=True, **options):
    """Make a small model and the functions of train.py's step, with CUDA graphs or without."""
    config = TrainConfig(seed=0, cuda_graph="on" if graphs else "off", **SMALL | options)
    return Training(config, torch.device("cuda"), [batch()])


def train_step(training, number, seq_len=128, eager=False):
    """Train one step on random tokens; return [loss, norm]."""
    batches = [batch(100 * number + i, seq_len) for i in range(training.config.grad_accum)]
    return [value.item() for value in training(batches, 1e-3, eager)]


def train_steps(training, numbers=range(8)):
    """Train steps; return the loss and norm of each, in one list."""
    figures = []
    for number in numbers:
        figures += train_step(training, number)
    return figures


def losses_of_six_calls(training):
    """Return the different losses of six calls on one batch, without an update."""
    training.optimizer.set_lr(0.0)
    flags = dict(is_first_microbatch=True, is_last_microbatch=True)
    losses = [training.forward_backward(batch(), **flags) for _ in range(6)]
    return {loss.item() for loss in losses}


RUNS = {
    "delayed": {}, "bf16": {"fp8_recipe": "none"}, "current": {"fp8_recipe": "current"},
    "accumulation": {"grad_accum": 5}, "muon": {"optimizer": "muon"}, "te_modules": {"model": "optimized"},
    "te_accumulation": {"model": "optimized", "grad_accum": 3},
    "float32_masters": {"param_remainders": False}}


@gpu
@pytest.mark.parametrize("run", RUNS)
def test_graphs_give_the_numbers_of_eager_steps(run):
    expected = train_steps(make_training(graphs=False, **RUNS[run]))
    assert train_steps(make_training(**RUNS[run])) == pytest.approx(expected, rel=2e-4)
    assert expected[0] != expected[-1]


@gpu
def test_dropout_differs_between_replays():
    assert len(losses_of_six_calls(make_training(dropout=0.5))) == 6


@gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("between", ["zero_grad", "a step without graphs", "another backward pass"])
def test_what_happens_between_steps_changes_nothing(optimizer, between):
    expected = train_steps(make_training(optimizer=optimizer))
    training, found = make_training(optimizer=optimizer), []
    for number in range(8):
        if between == "zero_grad":
            training.model.zero_grad()
        elif between == "another backward pass":
            with recipes.preserved_state(training.model):
                (100 * training.model(*batch(7))).backward()
        without_graphs = between == "a step without graphs" and number % 3 == 0
        found += train_step(training, number, eager=without_graphs)
    assert found == pytest.approx(expected, rel=2e-4)


@gpu
def test_a_call_gets_what_the_call_before_made():
    """Calls of a step add to a sum that the first one makes, as FSDP2's micro-batches do. Each step has
    another memory for it until the calls are captured."""
    sums = []

    def add(x, *, is_first, is_last):
        if is_first:
            sums.append(torch.zeros_like(x))
            del sums[:-2]  # the sum of the step before lives on, in other memory
        return sums[-1].add_(x)

    graph = CudaGraph(add)
    for step in range(1, 7):
        x = torch.full((8,), float(step), device="cuda")
        for call in range(5):
            total = graph(x, is_first=(call == 0), is_last=(call == 4))
        assert (total == 5 * step).all(), step


@gpu
def test_steps_of_two_lengths_share_one_model():
    """Each length has graphs of its own."""
    eager, graphed = make_training(graphs=False, optimizer="muon"), make_training(optimizer="muon")
    parts = graphed.model, graphed.optimizer, graphed.eager
    functions = {length: train.with_cuda_graphs(*parts) for length in (64, 128)}
    for number in range(8):
        length = 64 if number % 2 else 128
        graphed.functions = functions[length]
        expected = train_step(eager, number, length)
        assert train_step(graphed, number, length) == pytest.approx(expected, rel=2e-4)


@gpu
@pytest.mark.parametrize("name", ["auto", "optimized"])
def test_replays_write_no_memory_of_others(name):
    training = make_training(grad_accum=3, model=name)
    train_steps(training, range(4))
    model = training.model
    other = {"fp8_recipe": "current"} if name == "optimized" else {"fp8_amax_history_len": 16}
    delayed, model.fp8_recipe = model.fp8_recipe, recipes.make(TrainConfig(**other))
    model.eval()
    with torch.no_grad():
        model(*batch())  # an engine frees or replaces what it keeps for the other recipe
    model.train()
    model.fp8_recipe = delayed
    foreign = [torch.full((1 + 3001 * i % 200_000,), float(i), device="cuda") for i in range(1000)]
    train_steps(training, range(4, 8))
    assert all((tensor == i).all() for i, tensor in enumerate(foreign))


@gpu
def test_a_setting_changed_after_capture_is_harmless():
    training = make_training(model="optimized")
    expected = train_steps(make_training(model="optimized"))
    found = train_steps(training, range(4))
    chunked_loss.chunk_loss(training.model, 2)
    with torch.no_grad(), recipes.preserved_state(training.model):
        training.model(*batch())
    found += train_steps(training, range(4, 8))
    assert found == pytest.approx(expected, rel=2e-4)


@gpu
def test_recapture_follows_a_change():
    training = make_training(model="optimized", fp8_recipe="none", dropout=0.0)
    train_steps(training, range(4))
    for block in training.model.blocks:
        block.dropout.p = 0.9
    training.functions.forward_backward.recapture()
    assert len(losses_of_six_calls(training)) == 6


@gpu
def test_another_shape_is_refused():
    training = make_training()
    train_steps(training, range(3))
    with pytest.raises(ValueError, match=r"\(4, 64\) torch.int64.*the graph is for.*\(4, 128\)"):
        train_step(training, 3, seq_len=64)


@gpu
def test_a_step_that_is_not_finite_changes_nothing():
    training = make_training(fp8_recipe="none")
    train_steps(training, range(4))
    before = copy.deepcopy(training.model.state_dict())
    for view in training.gradients.views.values():
        view.fill_(float("nan"))
    assert not torch.isfinite(training.functions.update())
    after = training.model.state_dict()
    parameters = [name for name, _ in training.model.named_parameters()]
    assert all(torch.equal(after[name], before[name]) for name in parameters)


@gpu
def test_a_capture_that_fails_names_the_option():
    def waits(x):
        return x * x.sum().item()

    graph = CudaGraph(waits)
    x = torch.ones(3, device="cuda")
    graph(x), graph(x)
    with pytest.raises(ValueError, match="call the function without CudaGraph, or pass --cuda-graph off to"):
        graph(x)


@gpu
@pytest.mark.parametrize("name", ["auto", "optimized"])
def test_models_that_are_deleted_leave_no_memory(name):
    """Each with its float32 gradients, optimizer and graphs: 13 MiB of gradients alone."""
    left = []
    for _ in range(4):
        train_steps(make_training(n_layer=4, grad_accum=2, model=name), range(4))
        forget_models()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated())
    assert left[-1] - left[0] < 2**20, [f"{size / 2**20:.1f} MiB" for size in left]


def test_two_gradients_of_a_parameter_in_a_pass_are_refused():
    """Reentrant checkpointing runs a backward pass for each use of a layer, and each gives a gradient."""
    model = torch.nn.Linear(8, 8)
    gradients = Gradients(model)
    x = torch.ones(2, 8, requires_grad=True)
    with gradients.accumulate(is_first_microbatch=True, is_last_microbatch=True):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
        with pytest.raises(ValueError, match="two gradients in one backward pass; pass use_reentrant=False"):
            x.sum().backward()


def test_gradients_are_freed_with_their_model():
    """A hook of a parameter that held them would keep both: Python's garbage collector cannot look inside."""
    model = torch.nn.Linear(8, 8)
    gradients = Gradients(model)
    with gradients.accumulate(is_first_microbatch=True, is_last_microbatch=True):
        model(torch.ones(2, 8)).sum().backward()
    assert gradients.used == set(model.parameters())
    freed = weakref.ref(model.weight), weakref.ref(gradients.buckets[0].buffer)
    del model, gradients
    gc.collect()
    assert [reference() for reference in freed] == [None, None]


@gpu
def test_any_function_can_be_replayed():
    def power(x, *, exponent):
        return x**exponent

    graph = CudaGraph(power)
    for _ in range(4):
        assert graph(torch.tensor([3.0], device="cuda"), exponent=2).item() == 9
        assert graph(torch.tensor([2.0], device="cuda"), exponent=3).item() == 8


# ---------------------------------------------------------------- loops of one's own

ENGINES = [pytest.param("te", marks=gpu), pytest.param("fast", marks=gpu), "reference"]


def make_loop(engine, graphed=True):
    """Return the parts of README's first loop: train, model and optimizer."""
    module = model_file("model_te_optimized", engine)
    torch.manual_seed(0)
    config = module.OptimizedConfig(n_layer=1, n_head=4, n_embd=256, vocab_size=512, use_fp8=True,
                                    attention="auto")
    model = module.OptimizedGPT2Model(config).to(DEVICE, torch.bfloat16)
    optimizer = module.te.optimizers.FusedAdam(
        model.parameters(), lr=1e-3, master_weights=True, capturable=True)

    def train(tokens):
        loss = model(tokens[:, :-1], labels=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return CudaGraph(train) if graphed else train, model, optimizer


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_set_between_replays_is_used(engine):
    train, model, optimizer = make_loop(engine)
    tokens = torch.randint(512, (2, 65), device=DEVICE)
    for _ in range(4):  # the last two are replays
        train(tokens)
    for rate in (0.0, 1e-2, 0.0):
        set_rate(optimizer, rate)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(tokens)
        is_unchanged = all(map(torch.equal, model.parameters(), before))
        assert is_unchanged == (rate == 0.0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loop_in_graphs_learns_as_without(engine):
    """With another rate in each step, and evaluations between the steps."""
    tokens = torch.randint(512, (2, 65), device=DEVICE)
    losses = {}
    for graphed in (False, True):
        train, model, optimizer = make_loop(engine, graphed)
        losses[graphed] = []
        for step in range(8):
            set_rate(optimizer, 1e-3 * (step % 3))
            losses[graphed].append(train(tokens).item())
            model.eval()
            with torch.no_grad():
                losses[graphed].append(model(tokens[:, :-1], labels=tokens[:, 1:]).item())
            model.train()
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)
    assert losses[True][-1] < losses[True][0] - 0.5


GRAPHS = (ROOT / "nanote/graphs.py").read_text()
NO_GRAPHS = "def CudaGraph(function):\n    return function\n"


def run_minimal(engine, recipe, graphs, folder):
    """Run examples/minimal.py beside the files that are copied for it. Return its loss, gradient norm and
    validation loss after 20 steps. graphs: the text of graphs.py."""
    done = start_minimal(engine, recipe, graphs, folder, "te_reference.py")  # a text as good as another
    assert done.returncode == 0, done.stderr
    device, *lines = done.stdout.splitlines()
    assert "parameters, 256 tokens a step" in device
    assert [line.partition("  ")[0] for line in lines] == ["step 1", "step 10", "step 20", "step 20"]
    figures = re.fullmatch(
        r"step 20  loss (.*)  norm (.*)  .* tokens/s\nstep 20  validation loss (.*)", "\n".join(lines[2:]))
    return [float(figure) for figure in figures.groups()]


def start_minimal(engine, recipe, graphs, folder, corpus):
    """Run examples/minimal.py for 20 steps; return the finished process."""
    for name in ("examples/minimal.py", "model_te_optimized.py", "te_reference.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "graphs.py").write_text(graphs)
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # fast_kernels is in the first
    environment = os.environ | {"NANOTE_ENGINE": engine, "PYTHONPATH": os.pathsep.join(folders)}
    sizes = "--layers 1 --width 128 --batch 4 --length 64 --steps 20 --lr 1e-2"
    command = [sys.executable, "minimal.py", corpus, "--recipe", recipe, *sizes.split()]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_minimal_runs_beside_the_files_that_are_copied(tmp_path):
    loss, _, _ = run_minimal("reference", "delayed", GRAPHS, tmp_path)
    assert loss < 4, "ln 256 is 5.5"


def test_minimal_refuses_a_text_that_is_too_short(tmp_path):
    text = tmp_path / "short.txt"
    text.write_bytes(bytes(640))
    done = start_minimal("reference", "delayed", GRAPHS, tmp_path, "short.txt")
    assert done.returncode == 2 and not (tmp_path / "minimal.pt").exists()
    assert done.stderr == (
        "minimal.py: short.txt: 640 tokens, but --length 64 needs 641, a tenth of them for validation; "
        "take a longer text or a smaller --length\n")
    text.write_bytes(bytes(641))
    assert start_minimal("reference", "delayed", GRAPHS, tmp_path, "short.txt").returncode == 0


@gpu
@pytest.mark.parametrize("engine, recipe", [
    *(("te", recipe) for recipe in ("delayed", "current", "block", "none")),
    ("fast", "delayed"), ("fast", "none")])
def test_minimal_in_graphs_learns_as_without(engine, recipe, tmp_path):
    loss, norm, validation = run_minimal(engine, recipe, GRAPHS, tmp_path)
    expected_loss, expected_norm, expected_validation = run_minimal(engine, recipe, NO_GRAPHS, tmp_path)
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    # fast_kernels' FP8 GEMMs sum in another order in each process: norms of two runs without graphs differ
    # by 8 %, those of TE by nothing
    tolerance = 0.15 if (engine, recipe) == ("fast", "delayed") else 1e-2
    assert norm == pytest.approx(expected_norm, rel=tolerance)
    assert validation == pytest.approx(expected_validation, rel=1e-2)
    assert loss < 4, "ln 256 is 5.5"


def test_with_tensors_on_the_cpu_the_function_is_called():
    total = torch.zeros(3)
    graph = CudaGraph(total.add_)
    first = graph(torch.ones(3))
    for _ in range(3):
        last = graph(torch.ones(3))
    assert (first == 1).all() and (last == 4).all() and (total == 4).all()
    graph.recapture()
    assert (graph(torch.ones(())) == 5).all(), "another shape"


@pytest.mark.parametrize("argument", [3, None, "word"])
def test_an_argument_that_is_no_tensor_is_one_line(argument):
    graph = CudaGraph(lambda x, other: x)
    with pytest.raises(TypeError, match="must be a tensor; pass another value by keyword"):
        graph(torch.ones(2), argument)


@gpu
def test_tensors_on_two_devices_are_one_line():
    with pytest.raises(ValueError, match="arguments on the CPU and on the GPU: must be on one"):
        CudaGraph(torch.add)(torch.ones(2, device="cuda"), torch.ones(()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is captured")
def test_without_a_gpu_a_function_of_nothing_is_called():
    calls = []
    graph = CudaGraph(lambda: calls.append("called"))
    assert [graph() for _ in range(4)] == [None] * 4 and len(calls) == 4


def test_on_is_refused_where_graphs_are_impossible():
    with pytest.raises(ValueError, match="--cuda-graph on: does not go with --compile: --compile-mode"):
        TrainConfig(cuda_graph="on", compile=True).check()
    with pytest.raises(ValueError, match="--cuda-graph on: there is no GPU.*leave the option out"):
        recipes.check_machine(TrainConfig(cuda_graph="on"), torch.device("cpu"))
    assert TrainConfig().uses_cuda_graph(has_fp8_gpu=True)
    assert not TrainConfig().uses_cuda_graph(has_fp8_gpu=False)
    assert not TrainConfig(cuda_graph="off").uses_cuda_graph(has_fp8_gpu=True)
    assert not TrainConfig(attn_dropout=0.1).uses_cuda_graph(has_fp8_gpu=True)
