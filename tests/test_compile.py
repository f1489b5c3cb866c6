"""torch.compile: the first pass of every model under every recipe, and train.py's options and errors."""
import functools
import gc
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import te_reference
from bench.step import Training, forget_models, make_batches
from nanote import models, recipes
from nanote.config import TrainConfig
from trainer_tools import OPTIONS, ROOT, metrics, run_train

ON_REFERENCE = pytest.mark.skipif(not recipes.IS_REFERENCE, reason="TE's modules are not traceable")
HAS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++"))), reason="needs a C++ compiler")
DEVICE = "cpu" if recipes.IS_REFERENCE else "cuda"
RECIPES = ("none", "delayed", "current", "block", "mxfp8")
TINY = dict(vocab_size=96, n_positions=32, n_embd=64, n_layer=1, n_head=4)
LLAMA = dict(use_rmsnorm=True, use_rotary=True, activation="swiglu", bias=False, n_kv_head=2)
TRAIN = f"{OPTIONS} --n-layer 1 --dropout 0 --eval-interval 0 --checkpoint-interval 0 --max-steps 3"


def make_model(name, recipe, **options):
    torch.manual_seed(0)
    options = TINY | {"use_fp8": recipe != "none"} | options
    model = models.instantiate(name, models.make_model_config(name, options), device=DEVICE)
    if recipe != "none":
        model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe=recipe))
    return model


def make_batch():
    tokens = torch.randint(96, (2, 9), device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def assert_equal(found, expected):
    """Compare lists of tensors, bit for bit."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def first_pass(model, net, batch):
    """Run the first pass of a model, by `net` -> ([loss, gradients …], FP8 state)."""
    torch.manual_seed(1)  # of dropout
    loss = net(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], recipes.get_state(model)


def assert_first_pass(make, backend):
    """The first pass, which creates the FP8 state, is one graph and has an uncompiled one's bits. Return the
    names of the FP8 state."""
    torch._dynamo.reset()
    batch = make_batch()
    model = make()
    found, state = first_pass(model, torch.compile(model, backend=backend, fullgraph=True), batch)
    model = make()
    expected, expected_state = first_pass(model, model, batch)
    assert_equal(found, expected)
    assert state.keys() == expected_state.keys()
    assert_equal(list(state.values()), list(expected_state.values()))
    return list(state)


CHECKPOINTING = dict(gradient_checkpointing=True, dropout=0.1, attn_dropout=0.1)


@ON_REFERENCE
@pytest.mark.parametrize("name, recipe, options", [
    # What FP8 adds is te_reference's part, the same for every model: the others are traced without it, or by
    # bench/pairs.py.
    ("optimized", "delayed", CHECKPOINTING), ("optimized", "current", {}), ("optimized", "block", {}),
    ("optimized", "none", dict(use_rotary=True, rope_scaling="8:1:4:8", bias=False, qkv_bias=True)),
    ("te", "delayed", {}), ("fused", "none", {}), ("advanced", "none", {}), ("custom", "none", {})])
def test_the_first_pass_of_a_compiled_model(name, recipe, options):
    # with aot_eager also the bits of the compiled backward pass; eager is twice as fast
    assert_first_pass(lambda: make_model(name, recipe, **options), "aot_eager" if options else "eager")


def packed(number):
    """Return the first tokens of documents for a batch of 16 tokens, other ones in each step."""
    starts = [0, 3, 8, 10 + number, 16, 16]
    return torch.tensor(starts, dtype=torch.int32, device=DEVICE)


def evaluate_and_train(net, number):
    """Evaluate, then accumulate the gradients of two micro-batches; return the three losses."""
    starts = packed(number)
    net.eval()
    with torch.no_grad():
        losses = [net(*make_batch(), cu_seqlens=starts)]  # also as the very first pass
    net.train()
    for is_first in (True, False):
        loss = net(*make_batch(), cu_seqlens=starts, is_first_microbatch=is_first)
        loss.backward()
        losses.append(loss.detach())
    return losses


def train_on_two_passes(net, number):
    """Do two passes before one backward pass; return their loss."""
    starts = packed(number)
    loss = net(*make_batch(), cu_seqlens=starts) + net(*make_batch(), cu_seqlens=starts)
    loss.backward()
    return [loss.detach()]


@torch.no_grad()
def update(model):
    """Take a step of gradient descent; return the gradients and the FP8 state."""
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
    model.zero_grad()
    return [*gradients, *recipes.get_state(model).values()]


def train_two_models_in_turns(make, backends=None):
    """Train two models, compiled if there are backends; return what all steps gave, and the names of the FP8
    state."""
    one = make()
    other = make(tie_embeddings=False, fp8_lm_head=False)  # a tied weight sums its four gradients otherwise
    net, other_net = one, other
    if backends is not None:
        backend, other_backend = backends
        net = torch.compile(one, backend=backend, fullgraph=True)
        other_net = torch.compile(other, backend=other_backend, fullgraph=True)
    torch.manual_seed(1)
    found = [*evaluate_and_train(net, 0), *update(one)]
    found += [*train_on_two_passes(other_net, 1), *update(other)]
    found += [*evaluate_and_train(net, 2), *update(one)]
    return found, [list(recipes.get_state(model)) for model in (one, other)]


def assert_trained_in_turns(make, backends):
    """On packed documents: evaluation, accumulation, two models, two passes before a backward pass."""
    gc.collect()  # a graph of te_reference depends on which modules are alive
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found, names = train_two_models_in_turns(make, backends)
    expected, expected_names = train_two_models_in_turns(make)
    assert_equal(found, expected)
    assert names == expected_names
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5  # one less in a new process


@ON_REFERENCE
def test_compiled_steps_equal_uncompiled_ones():
    assert_trained_in_turns(functools.partial(make_model, "optimized", "delayed"), ("eager", "aot_eager"))


@ON_REFERENCE
@pytest.mark.parametrize("name, recipe, options", [
    ("optimized", "delayed", LLAMA), ("custom", "none", {}), ("te", "none", {})])
def test_new_batch_sizes_compile_once_more(name, recipe, options):
    """From the second shape on PyTorch compiles with symbolic sizes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, plain = (make_model(name, recipe, **options) for _ in range(2))
    net = torch.compile(compiled, backend="eager", fullgraph=True)
    for batch, length in ((2, 16), (4, 24), (6, 32)):
        x = torch.randint(96, (batch, length), device=DEVICE)
        torch.testing.assert_close(net(x, x), plain(x, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def pass_of_one_linear(way, x):
    """Run two micro-batches, which share quantized weights, through a Linear of te_reference under its
    default recipe; return outputs, gradients and FP8 state.

    way: "plain", or compiled with autocast "inside" or "outside" of what is compiled.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = te_reference.Linear(64, 64, device="cpu")

    def run(x, is_first_microbatch):
        with te_reference.autocast():
            return module(x, is_first_microbatch=is_first_microbatch)

    compiled_module = torch.compile(module, backend="aot_eager", fullgraph=True)

    def run_outside(x, is_first_microbatch):
        with te_reference.autocast():
            return compiled_module(x, is_first_microbatch=is_first_microbatch)

    run_inside = torch.compile(run, backend="eager", fullgraph=True)
    nets = {"plain": run, "inside": run_inside, "outside": run_outside}
    outputs = []
    for is_first in (True, False):
        y = nets[way](x, is_first_microbatch=is_first)
        y.square().mean().backward()
        outputs.append(y)
    gradients = [parameter.grad for parameter in module.parameters()]
    return [*outputs, *gradients, *recipes.get_state(module).values()]


@ON_REFERENCE
@pytest.mark.parametrize("way", ["inside", "outside"])
def test_a_module_of_te_reference_under_delayed_scaling(way):
    """The user's own model enters the region, inside or outside what is compiled."""
    x = torch.randn(8, 4, 64)
    assert_equal(pass_of_one_linear(way, x), pass_of_one_linear("plain", x))


# ---- train.py


@ON_REFERENCE
def test_a_compiled_run_learns_what_an_uncompiled_one_does(tokens, tmp_path, compiles, monkeypatch):
    """And goes on uncompiled. Without marks of steps CUDA graphs overwrite what the backward pass needs."""
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    options = f"{TRAIN} --fp8-recipe none --lr 3e-4 --checkpoint-interval 3"  # FP8 takes long to trace
    compiled = "--compile --compile-mode reduce-overhead --compile-fullgraph"
    assert run_train(f"{options} {compiled} --out-dir {tmp_path}/compiled", tokens) == 0
    assert compiles == [{"mode": "reduce-overhead", "fullgraph": True}]
    assert len(marks) == 3
    assert run_train(f"{options} --out-dir {tmp_path}/plain", tokens) == 0
    found, expected = metrics(tmp_path / "compiled"), metrics(tmp_path / "plain")
    assert [r["step"] for r in found] == [r["step"] for r in expected] == [1, 2, 3]
    for one, other in zip(found, expected):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
    resumed = "--max-steps 4 --no-compile --compile-mode default --no-compile-fullgraph"
    assert run_train(f"--resume --out-dir {tmp_path}/compiled {resumed}", tokens) == 0
    assert len(compiles) == 1
    assert [r["step"] for r in metrics(tmp_path / "compiled")] == [1, 2, 3, 4]


@ON_REFERENCE
@HAS_COMPILER
def test_a_run_with_the_compiler_itself(tokens, tmp_path, monkeypatch):
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)  # scalar code compiles twice as fast
    options = f"{TRAIN} --grad-accum 1 --no-use-rotary --fp8-recipe none --compile"
    assert run_train(f"{options} --out-dir {tmp_path}/run", tokens) == 0
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3]


def assert_refused_to_compile(arguments, tokens, tmp_path, capsys, words):
    """train.py ends with one line that has these words, and writes no file."""
    torch._dynamo.reset()
    command = f"{TRAIN} --fp8-recipe none --compile {arguments} --out-dir {tmp_path}/run"
    assert run_train(command, tokens) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: --compile: OptimizedGPT2Model does not compile"), error
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error, error
    assert not Path(tmp_path, "run").exists()


@ON_REFERENCE
def test_a_graph_break_with_fullgraph_is_one_line(tokens, tmp_path, capsys, monkeypatch):
    forward = te_reference.LayerNormMLP.forward

    def untraceable(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(te_reference.LayerNormMLP, "forward", untraceable)
    place = f"{__file__}:{untraceable.__code__.co_firstlineno + 1}: Call to "
    words = ["graph_break", "leave it out", place]
    assert_refused_to_compile("--compile-fullgraph", tokens, tmp_path, capsys, words)


@ON_REFERENCE
def test_an_error_of_the_compiler_is_one_line(tokens, tmp_path, capsys, monkeypatch):
    compile_ = torch.compile

    def broken(graph, inputs):
        raise NotImplementedError("first line\nsecond line")

    monkeypatch.setattr(torch, "compile", lambda net, **_: compile_(net, backend=broken))
    assert_refused_to_compile("", tokens, tmp_path, capsys, ["first line", "leave it out"])


# ---- on a GPU, with Transformer Engine

SMALL = dict(n_layer=2, n_head=2, n_embd=128, vocab_size=512, n_positions=128, seq_len=128,
             micro_batch_size=4, grad_accum=2)
SNIPPET = """
import torch
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote import recipes
from nanote.config import TrainConfig
model = OptimizedGPT2Model(OptimizedConfig(n_layer=2, n_kv_head=4, use_rmsnorm=True, use_fp8=True)).cuda()
model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe={recipe!r}))
model = torch.compile(model, mode="reduce-overhead")
tokens = torch.randint(50304, (2, 128), device="cuda")
for step in range(4):
    loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    model.zero_grad(set_to_none=True)
assert abs(loss.item() - 10.98) < 0.5, loss
"""


def train_on_gpu(name, recipe, **options):
    """Train 4 steps of 2 micro-batches and return their losses and gradient norms, (4, 2)."""
    torch._dynamo.reset()
    forget_models()
    config = TrainConfig(**SMALL, model=name, fp8_recipe=recipe, cuda_graph="off", **options)
    batches = make_batches(config, torch.device(DEVICE))
    step = Training(config, torch.device(DEVICE), batches)
    return torch.tensor([[value.item() for value in step(batches, config.lr)] for _ in range(4)])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("name", models.MODELS)
def test_a_compiled_step_on_a_gpu(name, recipe, mode):
    """First steps with gradient accumulation: no tensor that the backward pass needs is overwritten."""
    found = train_on_gpu(name, recipe, compile=True, compile_mode=mode)
    expected = train_on_gpu(name, recipe)
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=5e-3, atol=0)
    torch.testing.assert_close(found[:, 1], expected[:, 1], rtol=5e-2, atol=0)
    assert found[-1, 0] < found[0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_guides_compiled_model_in_a_new_process(recipe):
    code = SNIPPET.format(recipe=recipe)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_fullgraph_is_refused_in_one_line_on_a_gpu(tokens, tmp_path, capsys):
    options = TRAIN.replace("--device cpu", "--device cuda")
    arguments = f"{options} --fp8-recipe current --compile --compile-fullgraph --out-dir {tmp_path}/run"
    assert run_train(arguments, tokens) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--compile: OptimizedGPT2Model does not compile" in error
    assert not Path(tmp_path, "run").exists()


def test_an_engine_that_does_not_trace_runs_uncompiled(monkeypatch):
    import model_te_optimized

    monkeypatch.setattr(model_te_optimized, "ENGINE", "te")
    model, x = make_model("optimized", "delayed"), torch.arange(64, device=DEVICE).view(2, 32)
    expected = make_model("optimized", "delayed")(x, x)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="DelayedScaling runs uncompiled"):
        assert torch.equal(torch.compile(model, backend="eager")(x, x), expected)
