"""torch.compile: the first pass of every model under every recipe, and train.py's options and errors."""
import contextlib
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
    model = models.build_model(name, models.make_model_config(name, options), device=DEVICE)
    if recipe != "none":
        model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe=recipe))
    return model


def make_batch():
    tokens = torch.randint(96, (2, 9), device=DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def assert_equal(found, expected):
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def assert_first_pass(make, backend):
    """The compiled pass is the first, which creates the FP8 state, and is one graph."""
    torch._dynamo.reset()
    results, states, batch = [], [], make_batch()
    for compiles in (True, False):
        model = make()
        net = torch.compile(model, backend=backend, fullgraph=True) if compiles else model
        torch.manual_seed(1)  # of dropout
        loss = net(*batch)
        loss.backward()
        states.append(recipes.get_state(model))
        results.append([loss.detach(), *(p.grad for p in model.parameters()), *states[-1].values()])
    assert_equal(*results)
    assert states[0].keys() == states[1].keys()
    return states[0]


CHECKPOINTING = dict(gradient_checkpointing=True, dropout=0.1, attn_dropout=0.1)


@ON_REFERENCE
@pytest.mark.parametrize("name, recipe, options", [
    # the other recipes are te_reference's part, the same for every model
    ("optimized", "delayed", CHECKPOINTING), ("optimized", "current", {}), ("optimized", "block", {}),
    *((name, "delayed", {}) for name in models.MODELS if name != "optimized")])
def test_the_first_pass_of_a_compiled_model(name, recipe, options):
    # with aot_eager also the bits of the compiled backward pass; eager is twice as fast
    assert_first_pass(lambda: make_model(name, recipe, **options), "aot_eager" if options else "eager")


def assert_trained_in_turns(make, backends):
    """Two models train in turns on packed documents, bit for bit as uncompiled. The first one is evaluated,
    then accumulates, in two steps; in between the second one has two passes before a backward pass."""
    gc.collect()  # a graph of te_reference depends on which modules are alive
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    results, names = [], []
    for compiles in (True, False):
        # a tied weight sums its four gradients in another order
        pair, found = [make(), make(tie_embeddings=False, fp8_lm_head=False)], []
        nets = [torch.compile(model, backend=backend, fullgraph=True) if compiles else model
                for model, backend in zip(pair, backends)]
        torch.manual_seed(1)
        for step, (net, model) in enumerate([*zip(nets, pair), (nets[0], pair[0])]):
            starts = torch.tensor([0, 3, 8, 10 + step, 16, 16], dtype=torch.int32, device=DEVICE)
            forward = functools.partial(net, cu_seqlens=starts)
            if net is nets[0]:
                with torch.no_grad():
                    found.append(net.eval()(*make_batch(), cu_seqlens=starts))  # also as the very first pass
                net.train()
                losses = (forward(*make_batch(), is_first_microbatch=first) for first in (True, False))
            else:
                losses = [sum(forward(*make_batch()) for _ in range(2))]
            for loss in losses:
                loss.backward()
                found.append(loss.detach())
            with torch.no_grad():
                for parameter in model.parameters():
                    found.append(parameter.grad)
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
            found += recipes.get_state(model).values()
        results.append(found)
        names.append([*map(recipes.get_state, pair)])
    assert_equal(*results)
    assert all(one.keys() == other.keys() for one, other in zip(*names))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5  # one less in a new process


@ON_REFERENCE
def test_compiled_steps_equal_uncompiled_ones():
    assert_trained_in_turns(
        lambda **options: make_model("optimized", "delayed", **options), ("eager", "aot_eager"))


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


@ON_REFERENCE
def test_a_module_of_te_reference_under_delayed_scaling():
    """The user's own model enters the region, inside or outside what is compiled; micro-batches share weights
    that are quantized once."""
    results, x = [], torch.randn(8, 4, 64)
    for kind in ("plain", "inside", "outside"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = te_reference.Linear(64, 64, device="cpu")

        def run(x, is_first_microbatch, module=module):
            with te_reference.autocast():  # the default recipe
                return module(x, is_first_microbatch=is_first_microbatch)

        net = {"plain": run, "inside": torch.compile(run, backend="eager", fullgraph=True),
               "outside": torch.compile(module, backend="aot_eager", fullgraph=True)}[kind]
        outputs = []
        for first in (True, False):
            with te_reference.autocast() if kind == "outside" else contextlib.nullcontext():
                outputs.append(net(x, is_first_microbatch=first))
            outputs[-1].square().mean().backward()
        outputs += [parameter.grad for parameter in module.parameters()]
        results.append([*outputs, *recipes.get_state(module).values()])
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


# ---- train.py


@ON_REFERENCE
def test_a_compiled_run_learns_what_an_uncompiled_one_does(tokens, tmp_path, compiles, monkeypatch):
    """And goes on uncompiled. Without marks of steps CUDA graphs overwrite what the backward pass needs."""
    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    options = f"{TRAIN} --fp8-recipe delayed --lr 3e-4 --checkpoint-interval 3"
    compiled = "--compile --compile-mode reduce-overhead --compile-fullgraph"
    assert run_train(f"{options} {compiled} --out-dir {tmp_path}/compiled", tokens) == 0
    assert compiles == [{"mode": "reduce-overhead", "fullgraph": True}] and len(marks) == 3
    assert run_train(f"{options} --out-dir {tmp_path}/plain", tokens) == 0
    found, expected = metrics(tmp_path / "compiled"), metrics(tmp_path / "plain")
    assert [r["step"] for r in found] == [r["step"] for r in expected] == [1, 2, 3]
    for one, other in zip(found, expected):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
    resumed = "--max-steps 4 --no-compile --compile-mode default --no-compile-fullgraph"
    assert run_train(f"--resume --out-dir {tmp_path}/compiled {resumed}", tokens) == 0
    assert len(compiles) == 1 and [r["step"] for r in metrics(tmp_path / "compiled")] == [1, 2, 3, 4]


@ON_REFERENCE
@HAS_COMPILER
def test_a_run_with_the_compiler_itself(tokens, tmp_path, monkeypatch):
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)  # scalar code compiles twice as fast
    options = f"{TRAIN} --grad-accum 1 --no-use-rotary --fp8-recipe none --compile"
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
        words = [*words, f"{__file__}:{untraceable.__code__.co_firstlineno + 1}: Call to "]
        monkeypatch.setattr(te_reference.LayerNormMLP, "forward", untraceable)
    else:
        monkeypatch.setattr(torch, "compile", lambda net, **_: compile_(net, backend=broken))
    assert run_train(f"{TRAIN} --fp8-recipe none --compile {option} --out-dir {tmp_path}/run", tokens) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: --compile: OptimizedGPT2Model does not compile"), error
    assert error.count("\n") == 1 and all(word in error for word in words), error
    assert not Path(tmp_path, "run").exists()


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
