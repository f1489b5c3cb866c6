"""The benchmark refuses an arm with a broken backward pass or optimizer before it times it."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib

import pytest
import torch

import benchmark_te as benchmark
import train
from bench import agreement, arms, measure
from bench.agreement import Agreement
from bench.plain_gpt import ARMS as PLAIN_ARMS
from bench.plain_gpt import build_plain
from nanote import cli, models

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
RESULTS = pathlib.Path(agreement.__file__).parent.parent / "results"
SMALL = dict(n_layer=4, n_embd=256, n_head=4, vocab_size=1024, micro_batch_size=8, seq_len=256)
on_cpu = pytest.mark.skipif(HAS_GPU, reason="through te_reference only")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small for more
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """On a CPU the compiler takes longer than all steps of this file."""
    if not HAS_GPU:
        request.getfixturevalue("compiles")


def build(arm, block="gpt2"):
    """Return (step, its first micro-batch) as `measure` makes them."""
    config = arms.make_config(SMALL, DEVICE, block)
    config = arms.arm_config("bf16" if arm in PLAIN_ARMS else arm, config)
    batch = arms.make_batches(config, DEVICE)[0]
    if arm not in PLAIN_ARMS:
        return arms.build_te(config, DEVICE, arms.make_batches(config, DEVICE)[0]), batch
    model_config = models.make_model_config("optimized", dataclasses.asdict(config) | {"use_fp8": False})
    return build_plain(arm, model_config, config, DEVICE), batch


def verified(others, arm, block="gpt2", sabotage=None):
    step, batch = build(arm, block)
    if sabotage:
        sabotage(step)
    return others.verify(arm, step, batch, DEVICE)


@functools.cache
def with_plain(block="gpt2"):
    """Return the Agreement with plain PyTorch's step."""
    others = Agreement()
    verified(others, "plain-eager", block)
    return others


ARMS = ("plain-by-hand", "bf16", "bf16-bf16_moments", "fp8", "fp8-e4m3", "fp8-current", "fp8-block",
        "fp8-block-hybrid", "fp8-accum4", "fp8-checkpointing")


@pytest.mark.parametrize("block", ["gpt2", "modern"])
@pytest.mark.parametrize("arm", ARMS if HAS_GPU else ("plain", *ARMS))  # compiling takes long on a GPU
def test_arms_that_are_right_agree(block, arm):
    figures = verified(with_plain(block), arm, block)
    # A quarter of what rounding explains is left: on an H200 the largest share of these small models is 0.61
    assert figures["agrees_with"] == "plain-eager" and figures["agreement"] < 0.75
    assert figures["loss_fall"] > 0.05 and figures["grad_norm"] > 1


@pytest.mark.parametrize("model", ["te", "custom", "fused", "advanced"])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_the_other_models_agree(kind, model):
    assert verified(with_plain(), f"{kind}-{model}")["agreement"] < 0.6


def test_llama_agrees_with_a_plain_gpt_of_its_own_kind():
    pytest.importorskip("transformers")
    step, batch = build("hf-llama", "modern")
    options = dataclasses.asdict(step.config) | {"use_fp8": False}
    model_config = models.make_model_config("optimized", options)
    others = measure.agreement_of_llama(model_config, step.config, batch, DEVICE)
    assert others.verify("hf-llama", step, batch, DEVICE)["agreement"] < 0.6
    step, batch = build("hf-llama", "modern")
    step.model.llama.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient / 2)
    with pytest.raises(RuntimeError, match="gradient norm of block 1 fc1 .*in plain-eager without QK-norm"):
        others.verify("hf-llama", step, batch, DEVICE)


def weight_of(step, name):
    return agreement.parts(step.model)[name][0]


@pytest.mark.parametrize("arm, factor", [
    ("fp8", 0.0), ("fp8", math.nan), *itertools.product(
        ["plain-eager", "bf16", "fp8", "fp8-accum4", "fp8-te"][:3 if HAS_GPU else 5], [0.9, 1.1])])
@pytest.mark.parametrize("name", ["block 1 qkv", "block 0 fc2", "wpe"])
def test_a_broken_weight_gradient_is_refused(arm, name, factor):
    def sabotage(step):
        weight_of(step, name).register_hook(lambda gradient: gradient * factor)

    broken = "all gradients" if math.isnan(factor) else name
    with pytest.raises(RuntimeError, match=f"numerics: gradient norm of {broken}"):
        verified(with_plain(), arm, sabotage=sabotage)


TWELVE_LAYERS = dict(n_layer=12, n_embd=64, micro_batch_size=2, seq_len=128)


@functools.cache
def with_plain_at_12_layers():
    others = Agreement()
    verified(others, "plain-eager")
    return others


@on_cpu
@pytest.mark.parametrize("arm, factor", [("fp8", 1), ("fp8-current", 1), ("fp8-block", 1), ("fp8", 0.9),
                                         ("fp8", 1.1), ("fp8-e4m3", 0.9), ("fp8-block-hybrid", 1.1)])
def test_at_12_layers_a_tenth_more_or_less_is_refused(arm, factor, monkeypatch):
    """Of one block's weight gradient, in FP8 against high precision, where rounding explains the most."""
    monkeypatch.setattr(arms, "ON_CPU", arms.ON_CPU | TWELVE_LAYERS)

    def sabotage(step):
        weight_of(step, "block 5 fc1").register_hook(lambda gradient: gradient * factor)

    if factor == 1:
        assert verified(with_plain_at_12_layers(), arm)["agreement"] < 0.6
        return
    with pytest.raises(RuntimeError, match="numerics: gradient norm of block 5 fc1"):
        verified(with_plain_at_12_layers(), arm, sabotage=sabotage)


@pytest.mark.parametrize("depth, width, tokens", [(4, 768, 4096), (12, 768, 4096), (32, 4096, 8192)])
def test_what_rounding_explains_on_a_gpu(depth, width, tokens):
    """FP8 against BF16: a weight gradient that is a tenth too long or too short is refused at 12 layers even
    if rounding moved it the other way, by up to 3 %. BF16 against BF16: one of 2 %."""
    device, size = torch.device("cuda"), width * width
    bf16, *fp8s = (agreement.Errors.of(
        arms.arm_config(arm, train.TrainConfig(n_layer=depth)), device).of_norm(size, tokens, width)
        for arm in ("bf16-bf16_moments", "fp8", "fp8-e4m3", "fp8-current", "fp8-block-hybrid"))
    assert 2 * bf16 < 0.02
    for fp8 in fp8s:
        assert 0.02 < fp8 + bf16 < (0.07 if depth <= 12 else 0.1)


def test_what_was_measured_on_an_h200_agrees():
    """Of every arm of results/formats.json, which names the arm that it was compared with."""
    measured = json.loads((RESULTS / "formats.json").read_text())
    rows = {row["arm"]: row for row in measured if "loss_fall" in row}
    for arm, row in rows.items():
        first = rows[row.get("agrees_with", arm)]
        found, expected = (agreement.Computed(
            r["arm"], r["loss"], {"all gradients": r["grad_norm"]}, {"all gradients": r["parameters"]},
            r["loss_fall"], errors_of(r)) for r in (row, first))
        config = row["model_config"]
        share, what = max(agreement.compared(found, expected, config["n_embd"], config["n_positions"]))
        assert share < 0.6, (arm, what)


def errors_of(row):
    config = train.TrainConfig(n_layer=row["model_config"]["n_layer"])
    return agreement.Errors.of(arms.arm_config(row["arm"], config), torch.device("cuda"))


def freeze_in_the_optimizer(step):
    weight = weight_of(step, "block 1 proj")
    if HAS_GPU:
        row = step.optimizer._pointer_row
        step.optimizer._pointer_row = lambda parameter: [0] * 7 if parameter is weight else row(parameter)
    for group in [] if HAS_GPU else step.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not weight]


def never_update(step):
    step.optimizer.step = lambda *args, **kwargs: None


def ignore_the_learning_rate(step):
    call = type(step).__call__
    without = {"__call__": lambda self, batches, lr: call(self, batches, 0.0)}
    step.__class__ = type("Step", (type(step),), without)


def flip_a_sign(step):
    """The norms are right, the direction is not."""
    for parameter in step.model.parameters():
        parameter.register_hook(torch.neg)


def forget_the_first_micro_batch(step):
    forward_backward = step.forward_backward

    def forgetful(batch, micro):
        loss = forward_backward(batch, micro)
        if micro == 0:
            step.optimizer.zero_grad()
        return loss

    step.forward_backward = forgetful


@pytest.mark.parametrize("arm, sabotage, complaint", [
    ("fp8", freeze_in_the_optimizer, "gradient norm of block 1 proj 0$"),
    ("plain-eager", never_update, "gradient norm of .* 0$"), ("fp8", never_update, "gradient norm of .* 0$"),
    ("plain-eager", ignore_the_learning_rate, "the loss falls by 0 in 3 steps"),
    ("fp8-current", ignore_the_learning_rate, "the loss falls by"),
    ("bf16", flip_a_sign, "the loss falls by -"),
    pytest.param("fp8-accum4", forget_the_first_micro_batch, "gradient norm of .* in plain",
                 marks=on_cpu)])
def test_a_broken_step_is_refused(arm, sabotage, complaint):
    with pytest.raises(RuntimeError, match=f"numerics: {complaint}"):
        verified(with_plain(), arm, sabotage=sabotage)


def test_a_broken_first_arm_is_no_reference():
    others = Agreement()
    with pytest.raises(RuntimeError, match="numerics"):
        verified(others, "bf16", sabotage=never_update)
    verified(others, "plain-eager")
    assert others.first.arm == "plain-eager"


def test_what_is_timed_is_the_model_at_its_start():
    for arm in ("plain-eager", "fp8-accum4"):
        step, batch = build(arm)
        Agreement().verify(arm, step, batch, DEVICE)
        first = [p.detach().clone() for p in step.model.parameters()]
        state = [value for values in step.optimizer.state.values() for value in values.values()]
        assert state and not any(value.any() for value in state)
        assert not step.optimizer.param_groups[0].get("step")
        batches = [batch] * step.config.grad_accum
        assert step(batches, 0.0)[0].item() == pytest.approx(step(batches, 0.0)[0].item(), abs=1e-3)
        agreement.start_alike(step)
        assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), first))


@pytest.mark.parametrize("loss", [math.nan, math.inf, math.log(50304) + 0.55, math.log(50304) - 0.25])
def test_a_loss_that_no_new_model_has_is_refused(loss):
    config = train.TrainConfig(vocab_size=50304, n_embd=768)
    agreement.check_loss(math.log(50304) + 0.15, config)
    with pytest.raises(RuntimeError, match="numerics: a loss of"):
        agreement.check_loss(loss, config)


@on_cpu
def test_a_broken_arm_is_a_row_with_the_reason_and_the_others_are_measured(tmp_path, monkeypatch):
    real = arms.build_te

    def build_broken(config, *args):
        step = real(config, *args)
        if config.fp8_recipe == "current":
            weight_of(step, "block 1 fc1").register_hook(torch.zeros_like)
        return step

    monkeypatch.setattr(arms, "build_te", build_broken)
    path = tmp_path / "rows.json"
    command = "--shapes 124m-b32 --blocks gpt2 --arms plain-eager fp8-current fp8 --steps 4 --profile none"
    command += f" --json {path}"
    assert cli.run(lambda: benchmark.main(command.split()), "benchmark_te.py") == 1
    plain, broken, fp8 = json.loads(path.read_text())
    assert broken["error"].startswith("RuntimeError: numerics: gradient norm of block 1 fc1 0")
    assert "ms" not in broken and plain["ms"] > 0 and fp8["ms"] > 0 and fp8["agrees_with"] == "plain-eager"
