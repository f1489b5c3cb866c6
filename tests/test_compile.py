"""torch.compile: the first pass of every model under every recipe, and train.py's options and errors."""
import contextlib
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import te_reference
from bench.step import Step, forget_models, make_batches
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
    model = models.build_model(name, models.make_model_config(name, options), device=DEVICE)
    if recipe != "none":
        model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe=recipe))
    return model


def make_batch():
    tokens = torch.randint(96, (2, 17), device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(net, model, batch):
    loss = net(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@ON_REFERENCE
@pytest.mark.parametrize("name, recipe", [
    *(("optimized", recipe) for recipe in RECIPES), ("te", "current"),
    # the other recipes are te_reference's part, the same for every model, and take ten seconds each
    *itertools.product(list(models.MODELS)[1:], ("none", "delayed"))])
def test_the_first_pass_of_a_compiled_model(name, recipe):
    """The compiled pass is the first: one graph, or under delayed scaling a warning and an uncompiled
    pass. How te_reference casts backward is compiled for one model, in which it is what it is in all."""
    torch._dynamo.reset()
    compiled, plain, batch = make_model(name, recipe), make_model(name, recipe), make_batch()
    delayed = recipe == "delayed"
    backend = "eager" if recipe == "current" and name != "optimized" else "aot_eager"
    net = torch.compile(compiled, backend=backend, fullgraph=not delayed)
    warned = pytest.warns(UserWarning, match="DelayedScaling.*runs uncompiled.*Float8CurrentScaling")
    with warned if delayed else contextlib.nullcontext():
        found = loss_and_gradients(net, compiled, batch)
    for one, other in zip(found, loss_and_gradients(plain, plain, batch)):
        torch.testing.assert_close(one, other, rtol=0 if delayed else 1e-3, atol=0 if delayed else 1e-5)
    found, expected = recipes.get_state(compiled), recipes.get_state(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@ON_REFERENCE
@pytest.mark.parametrize("name, recipe, options", [
    ("optimized", "current", {}), ("optimized", "current", LLAMA), ("optimized", "none", LLAMA),
    *((name, "none", {}) for name in models.MODELS)])
def test_new_shapes_compile_to_one_graph(name, recipe, options):
    """From the second shape on PyTorch compiles with symbolic sizes."""
    torch._dynamo.reset()
    model = make_model(name, recipe, **options)
    net = torch.compile(model, backend="eager", fullgraph=True)
    for batch, length in ((2, 16), (4, 24), (6, 32)):
        x = torch.randint(96, (batch, length), device=DEVICE)
        torch.testing.assert_close(net(x, x), model(x, x))


@ON_REFERENCE
@pytest.mark.parametrize("name", models.MODELS)
def test_the_forward_of_a_subclass_runs_once_if_compiled(name):
    """Under delayed scaling the base class's forward runs uncompiled and the subclass's forward runs only
    once, whatever its arguments are."""
    base = type(make_model(name, "delayed"))

    class Scaled(base):
        def forward(self, input_ids, labels=None, *rest):
            return 10 * super().forward(input_ids, labels, *rest)

    class OfOneTensor(base):
        def forward(self, tokens):
            return super().forward(tokens[:, :-1], tokens[:, 1:])

    tokens = torch.randint(96, (2, 17), device=DEVICE)
    for subclass, batch in ((Scaled, (tokens[:, :-1], tokens[:, 1:])), (OfOneTensor, (tokens,))):
        torch._dynamo.reset()
        compiled, plain = make_model(name, "delayed"), make_model(name, "delayed")
        compiled.__class__ = plain.__class__ = subclass
        with pytest.warns(UserWarning, match="runs uncompiled"):
            found = torch.compile(compiled, backend="eager")(*batch)
        assert torch.equal(found, plain(*batch)), subclass


@pytest.mark.parametrize("name", models.MODELS)
def test_fullgraph_says_why_delayed_scaling_cannot_be_compiled(name):
    torch._dynamo.reset()
    net = torch.compile(make_model(name, "delayed"), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot trace DelayedScaling"):
        net(*make_batch())


@ON_REFERENCE
@pytest.mark.parametrize("name, sizes", [("Linear", (64, 64)), ("LayerNormLinear", (64, 64)),
                                         ("LayerNormMLP", (64, 128)), ("TransformerLayer", (64, 128, 4))])
def test_a_module_of_te_reference_under_delayed_scaling(name, sizes):
    """A module in the user's own model runs uncompiled, as Transformer Engine's does, and updates its FP8
    state."""
    results, x = [], torch.randn(8, 4, 64)
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = getattr(te_reference, name)(*sizes, device="cpu").eval()
        net = torch.compile(module, backend="aot_eager") if compiles else module
        with te_reference.autocast(recipe=te_reference.DelayedScaling(amax_history_len=4)):
            y = net(x)
        y.square().mean().backward()
        results.append([y, *(p.grad for p in module.parameters()), *recipes.get_state(module).values()])
    plain, compiled = results
    assert len(plain) == len(compiled) and all(torch.equal(a, b) for a, b in zip(plain, compiled))


@ON_REFERENCE
def test_a_default_recipe_is_not_compiled():
    layer = te_reference.Linear(16, 16, device="cpu")

    def run(x):
        with te_reference.autocast():
            return layer(x)

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="DelayedScaling is not supported under torch.compile"):
        torch.compile(run, backend="eager", fullgraph=True)(torch.randn(16, 16))


# ---- train.py


@ON_REFERENCE
@pytest.mark.parametrize("options, mode, full", [
    ("--fp8-recipe current", "default", False),
    ("--fp8-recipe none --compile-mode max-autotune --compile-fullgraph", "max-autotune", True)])
def test_a_compiled_run_learns_what_an_uncompiled_one_does(tokens, tmp_path, compiles, options, mode, full):
    assert run_train(f"{TRAIN} {options} --compile --out-dir {tmp_path}/compiled", tokens) == 0
    assert compiles == [{"mode": mode, "fullgraph": full}]
    assert run_train(f"{TRAIN} {options.partition('--compile')[0]} --out-dir {tmp_path}/plain", tokens) == 0
    found, expected = metrics(tmp_path / "compiled"), metrics(tmp_path / "plain")
    assert [r["step"] for r in found] == [r["step"] for r in expected] == [1, 2, 3]
    for one, other in zip(found, expected):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)


@ON_REFERENCE
@HAS_COMPILER
def test_a_run_with_the_compiler_itself(tokens, tmp_path):
    options = f"{TRAIN} --grad-accum 1 --model custom --fp8-recipe none --compile"
    assert run_train(f"{options} --out-dir {tmp_path}/run", tokens) == 0
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3]


@ON_REFERENCE
@pytest.mark.parametrize("option, words", [
    ("--compile-fullgraph", ["graph_break", "leave it out"]), ("--compile", ["first line", "leave it out"])])
def test_what_cannot_be_compiled_is_one_line(tokens, tmp_path, capsys, monkeypatch, option, words):
    """A graph break with --compile-fullgraph, and a compiler error without it. No file is written."""
    forward, compile_ = te_reference.LayerNormMLP.forward, torch.compile
    torch._dynamo.reset()

    def untraceable(self, *args, **kwargs):
        torch._dynamo.graph_break()
        return forward(self, *args, **kwargs)

    def broken(graph, inputs):
        raise NotImplementedError("first line\nsecond line")

    if option == "--compile-fullgraph":
        monkeypatch.setattr(te_reference.LayerNormMLP, "forward", untraceable)
    else:
        monkeypatch.setattr(torch, "compile", lambda net, **_: compile_(net, backend=broken))
    assert run_train(f"{TRAIN} --fp8-recipe none --compile {option} --out-dir {tmp_path}/run", tokens) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: --compile: OptimizedGPT2Model does not compile"), error
    assert error.count("\n") == 1 and all(word in error for word in words), error
    assert not Path(tmp_path, "run").exists()


@ON_REFERENCE
def test_cuda_graphs_know_the_steps_and_a_resumed_run_may_stop(tokens, tmp_path, compiles, monkeypatch):
    """Without the marks PyTorch guesses, and overwrites tensors that the backward pass needs."""
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    options = f"{TRAIN} --fp8-recipe none --compile --compile-mode reduce-overhead --checkpoint-interval 3"
    assert run_train(f"{options} --out-dir {tmp_path}/run", tokens) == 0
    assert len(marks) == 3  # steps
    resumed = f"--resume --out-dir {tmp_path}/run --max-steps 4 --no-compile --compile-mode default"
    assert run_train(f"{resumed} --fp8-recipe delayed", tokens) == 0
    assert len(compiles) == 1 and [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4]


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
    # without the fast kernels, since DelayedScaling runs uncompiled by the modules
    config = TrainConfig(**SMALL, model=name, fp8_recipe=recipe, cuda_graph="off", **options)
    batches = make_batches(config, torch.device(DEVICE))
    step = Step(config, torch.device(DEVICE), batches)
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
    assert ("runs uncompiled" in done.stderr) == (recipe == "delayed")


@pytest.mark.gpu
def test_fullgraph_is_refused_in_one_line_on_a_gpu(tokens, tmp_path, capsys):
    options = TRAIN.replace("--device cpu", "--device cuda")
    arguments = f"{options} --fp8-recipe current --compile --compile-fullgraph --out-dir {tmp_path}/run"
    assert run_train(arguments, tokens) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--compile: OptimizedGPT2Model does not compile" in error
    assert not Path(tmp_path, "run").exists()
