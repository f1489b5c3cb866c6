"""TrainStep refuses batches that do not fit, and changes that its CUDA graphs would ignore.

On the CPU a "graph" is the captured function itself, which reads and writes the same tensors at each replay.
"""

import contextlib
import dataclasses
import os
import types
import warnings
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
pytest.importorskip("triton")

from fast_kernels.adam import FastAdam  # noqa: E402
from nanote import (  # noqa: E402
    fp8,
    models,
    train_step,
)
from nanote.config import TrainConfig  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_step_gpu.py has real graphs")
SMALL = dict(n_layer=1, n_head=1, n_embd=16, vocab_size=32, n_positions=16, seq_len=16, fp8_recipe="current")


@pytest.fixture(autouse=True)
def graphs_on_the_cpu(monkeypatch):
    monkeypatch.setattr(train_step, "_side_stream", contextlib.nullcontext)
    monkeypatch.setattr(train_step, "_capture", lambda function, pool: types.SimpleNamespace(replay=function))
    for name in ("get_rng_state", "set_rng_state", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    forward_backward = train_step.TrainStep.forward_backward

    def overwriting(self, batch, micro):  # gradients, like the graph of the first micro-batch
        if micro == 0:
            self.optimizer.zero_grad(set_to_none=True)
        return forward_backward(self, batch, micro)

    monkeypatch.setattr(train_step.TrainStep, "forward_backward", overwriting)


class Adam(fp8.te.optimizers.FusedAdam):
    """Replaces FastAdam in tests of the checks, because Triton's interpreter is slow."""

    def prepare(self):
        pass

    write_options = prepare


def make(graphed=True, adam=Adam, **options):
    config = TrainConfig(**SMALL | options)
    recipe = train_step.recipe_of(config)
    options = dataclasses.asdict(config) | {"use_fp8": recipe is not None}
    model_config = models.make_model_config("optimized", options)
    torch.manual_seed(0)
    model = models.build_model("optimized", model_config)
    model.fp8_recipe = recipe or model.fp8_recipe
    optimizer = adam(model.parameters(), lr=1e-2)
    step = train_step.TrainStep(model, model, optimizer, config, torch.device("cpu"))
    step.graphed = graphed
    return step


def batch(seed, rows=2, length=16):
    tokens = torch.randint(32, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def weights(step):
    return torch.cat([p.detach().flatten().clone() for p in step.model.parameters()])


@pytest.mark.parametrize("accum", [1, 2])
def test_replays_are_the_step(accum):
    outcomes = []
    for graphed in (True, False):
        step = make(graphed, FastAdam, grad_accum=accum)
        losses = [step([batch(2 * i + j) for j in range(accum)], 1e-2)[0].item() for i in range(3)]
        outcomes.append((losses, weights(step)))
    assert outcomes[0][0] == outcomes[1][0] and torch.equal(outcomes[0][1], outcomes[1][1])


STARTS = torch.tensor([0, 16, 32], dtype=torch.int32)
FOR_GRAPHS = {  # name: (micro-batches after good ones of 2 x 16, pattern of the message)
    "one row": ([batch(2, rows=1)] * 2, r"input_ids \(1, 16\) int64.*for input_ids \(2, 16\) int64"),
    "shorter": ([batch(2, length=8)] * 2, r"input_ids \(2, 8\)"),
    "only the second": ([batch(2), batch(3, rows=1)], r"micro-batch 2 of 2: input_ids \(1, 16\)"),
    "another type": ([tuple(t.int() for t in batch(2))] * 2, "int32.*int64"),
    "cu_seqlens come": ([(*batch(2), STARTS)] * 2, r"cu_seqlens \(3,\) int32"),
}
ALWAYS = {
    "too few": ([batch(2)], r"^1 micro-batch: grad_accum is 2.*set grad_accum=1"),
    "too many": ([batch(2)] * 3, "^3 micro-batches: grad_accum is 2"),
    "none": ([], "^0 micro-batches: .* pass 2$"),
    "labels of another shape": ([(batch(2)[0], batch(2)[1].T.contiguous())] * 2, "a label for each token"),
    "no labels": ([batch(2)[:1]] * 2, "pass .input_ids, labels."),
}


@pytest.mark.parametrize("graphed, what", [(True, what) for what in FOR_GRAPHS | ALWAYS]
                         + [(False, what) for what in ALWAYS])
def test_batches_that_do_not_fit_are_refused(graphed, what):
    given, complaint = (FOR_GRAPHS | ALWAYS)[what]
    step = make(graphed, grad_accum=2)
    step([batch(0), batch(1)], 1e-2)
    before, inputs = weights(step), [t.clone() for t in step.inputs or []]
    with pytest.raises(ValueError, match=complaint) as error:
        step(given, 1e-2)
    assert "\n" not in str(error.value) and torch.equal(weights(step), before)
    assert all(torch.equal(a, b) for a, b in zip(inputs, step.inputs or []))
    step([batch(2), batch(3)], 1e-2)
    assert not torch.equal(weights(step), before)


def test_a_recording_refuses_micro_batches_of_two_shapes():
    step = make(grad_accum=2)
    with pytest.raises(ValueError, match=r"micro-batch 2 of 2: input_ids \(1, 16\)"):
        step([batch(0), batch(1, rows=1)], 1e-2)
    assert not step.graphs


def test_cu_seqlens_that_go_are_refused():
    step = make(fp8_recipe="none")
    step([(*batch(0), STARTS)], 1e-2)
    with pytest.raises(ValueError, match=r"micro-batch 1 of 1: .*, labels .2, 16. int64; .*cu_seqlens"):
        step([batch(1)], 1e-2)


def replace_weight(step):
    mlp = step.model.blocks[0].mlp
    mlp.fc1_weight = torch.nn.Parameter(mlp.fc1_weight.detach().clone())


def move_weight(step):
    step.model.wte.weight.data = step.model.wte.weight.data.clone()


CHANGES = {  # name: (change after the capture, pattern of the message)
    "a frozen parameter": (lambda s: s.model.wte.weight.requires_grad_(False),
                           "which parameters require gradients"),
    "a weight moved": (move_weight, "where a parameter is in memory"),
    "a weight replaced": (replace_weight, "the set of modules"),
    "a module replaced": (lambda s: setattr(s.model, "dropout", torch.nn.Dropout(0.0)), "the set of modules"),
    "eval": (lambda s: s.model.eval(), "model.training"),
    "a part in eval": (lambda s: s.model.blocks[0].mlp.eval(), "model.training"),
    "the recipe": (lambda s: setattr(s.model, "fp8_recipe", fp8.make_recipe("current", "e4m3")),
                   "model.fp8_recipe"),
    "amax_compute_algo": (lambda s: setattr(s.model.fp8_recipe, "amax_compute_algo", "most_recent"),
                          "model.fp8_recipe"),
    "scaling_factor_compute_algo": (
        lambda s: setattr(s.model.fp8_recipe, "scaling_factor_compute_algo", lambda *args: args[1]),
        "model.fp8_recipe"),
    "use_fp8": (lambda s: setattr(s.model.config, "use_fp8", False), "model.config"),
    "logits_rounding": (
        lambda s: setattr(s.model, "logits_rounding", "stochastic"), "model.logits_rounding"),
    "dgrad_fast_accum_k": (lambda s: setattr(s.model, "dgrad_fast_accum_k", 64), "model.dgrad_fast_accum_k"),
    "dropout": (lambda s: setattr(s.model.blocks[0].dropout, "p", 0.1), "the p of a dropout"),
    "attention": (lambda s: setattr(s.model.blocks[0].attn, "kernel", "te"), "the kernel of an attention"),
    "forward": (lambda s: setattr(s.model.dropout, "forward", lambda x: 2 * x),
                "the forward method of a module"),
    "grad_clip": (lambda s: setattr(s.config, "grad_clip", 0.5), "config.grad_clip"),
    "forward hook": (lambda s: s.model.wte.register_forward_hook(lambda *_: None), "the set of hooks"),
    "forward pre-hook": (lambda s: s.model.blocks[0].register_forward_pre_hook(lambda *_: None),
                         "the set of hooks"),
    "backward hook": (lambda s: s.model.blocks[0].register_full_backward_hook(lambda *_: None),
                      "the set of hooks"),
    "backward pre-hook": (lambda s: s.model.blocks[0].register_full_backward_pre_hook(lambda *_: None),
                          "the set of hooks"),
    "gradient hook": (lambda s: s.model.wte.weight.register_hook(torch.neg), "the set of hooks"),
    "accumulation hook": (
        lambda s: s.model.wte.weight.register_post_accumulate_grad_hook(lambda p: None), "the set of hooks"),
    "hook of every module": (
        lambda s: torch.nn.modules.module.register_module_forward_hook(lambda *_: None), "the set of hooks"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_recording_fixed_must_not_change(what):
    change, complaint = CHANGES[what]
    step = make(fp8_recipe="delayed" if "algo" in what else "current")
    step([batch(0)], 1e-2)
    step([batch(0)], 1e-2, watch=True)  # registers hooks during this pass only
    handle = change(step)
    try:
        before = weights(step)
        with pytest.raises(ValueError, match=complaint + r".*changed.*call record\(batches\)"):
            step([batch(1)], 1e-2)
        assert torch.equal(weights(step), before)
        if what in ("attention", "scaling_factor_compute_algo", "a weight replaced", "forward"):
            return  # a step with these values does not train
        step.record([batch(1)])
        assert torch.equal(weights(step), before)
        step([batch(1)], 1e-2)
        assert not torch.equal(weights(step), before)
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


@pytest.mark.parametrize("before, after", [(1, 2), (2, 4), (2, 1)])
def test_following_the_message_about_grad_accum_is_right(before, after):
    """A changed grad_accum is refused until the step is recorded again; the loss is then a new step's."""
    step, fresh = make(grad_accum=before), make(graphed=False, grad_accum=after)
    step([batch(i) for i in range(before)], 0.0)
    given = [batch(10 + i) for i in range(after)]
    complaint = rf"pass {before}, or set grad_accum={after} and call record\(batches\)"
    with pytest.raises(ValueError, match=complaint):
        step(given, 0.0)
    step.config.grad_accum = after
    with pytest.raises(ValueError, match=r"config.grad_accum changed .* call record\(batches\)"):
        step(given, 0.0)
    step.record(given)
    for found, expected in zip(step(given, 0.0), fresh(given, 0.0)):
        torch.testing.assert_close(found, expected)


def test_record_checks_its_batches_and_keeps_the_old_recording():
    step = make(grad_accum=2)
    step([batch(0), batch(1)], 1e-2)
    bad = (([batch(0)], "1 micro-batch:"), ([batch(0), batch(1, rows=1)], "micro-batch 2 of 2"))
    for given, complaint in bad:
        with pytest.raises(ValueError, match=complaint):
            step.record(given)
    before = weights(step)
    step([batch(2), batch(3)], 1e-2)
    assert not torch.equal(weights(step), before)


@pytest.mark.parametrize("here, elsewhere", [("", ""), ("", "old NCCL"), ("old NCCL", "")])
def test_ranks_agree_on_graphs(here, elsewhere, monkeypatch):
    """What one rank cannot capture is launched from Python on all of them."""
    step = make()
    capture = step._capture_graphs

    def failing():
        if here:
            raise RuntimeError(here)
        capture()

    monkeypatch.setattr(step, "_capture_graphs", failing)
    monkeypatch.setattr(train_step.parallel, "world_size", lambda: 2)
    monkeypatch.setattr(train_step.parallel, "reason_of_any_rank", lambda reason: reason or elsewhere)
    agreed = here or elsewhere
    expectation = pytest.warns(UserWarning, match="from Python: .*old NCCL") if agreed else no_warning()
    with expectation:
        step([batch(0)], 1e-2)
    assert step.graphed == bool(step.graphs) == (not agreed)
    if here:
        monkeypatch.setattr(train_step.parallel, "world_size", lambda: 1)
        step = make()
        monkeypatch.setattr(step, "_capture_graphs", failing)
        with pytest.raises(RuntimeError, match="old NCCL"):  # a model of the kit on one GPU can be captured
            step([batch(0)], 1e-2)


@pytest.mark.parametrize("here, elsewhere", [("old NCCL", ""), ("", "old NCCL")])
def test_ranks_refuse_a_sharded_model_that_one_cannot_capture(here, elsewhere, monkeypatch):
    """FSDP2 does not take back what it has noted in the capture."""
    step = make()
    monkeypatch.setattr(train_step, "FSDPModule", type(step.model))
    step.model.set_requires_gradient_sync = lambda wanted: None
    monkeypatch.setattr(step, "_capture_graphs", mock.Mock(side_effect=RuntimeError(here) if here else None))
    monkeypatch.setattr(train_step.parallel, "world_size", lambda: 2)
    monkeypatch.setattr(train_step.parallel, "reason_of_any_rank", lambda reason: reason or elsewhere)
    with pytest.raises(ValueError, match="sharded model cannot .*: old NCCL; pass --cuda-graph off"):
        step([batch(0)], 1e-2)


def test_an_error_before_the_capture_is_not_agreed_on(monkeypatch):
    """The other ranks may wait in a collective of the same pass, and not where ranks agree."""
    step = make()

    def fail(batch, micro=0):
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(step, "forward_backward", fail)
    monkeypatch.setattr(train_step.parallel, "world_size", lambda: 2)
    monkeypatch.setattr(train_step.parallel, "reason_of_any_rank", lambda reason: pytest.fail("waits"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        step([batch(0)], 1e-2)


def test_without_graphs_grad_accum_may_change():
    step = make(graphed=False, grad_accum=2)
    with pytest.raises(ValueError, match=r"set grad_accum=1$"):
        step([batch(0)], 1e-2)
    step.config.grad_accum = 1
    step([batch(0)], 1e-2)


def test_a_frozen_parameter_stays_after_the_step_is_recorded_again():
    step = make()
    step([batch(0)], 1e-2)
    frozen = step.model.wte.weight.requires_grad_(False)
    before, whole = frozen.detach().clone(), weights(step)
    step.record([batch(1)])
    step([batch(1)], 1e-2)
    assert torch.equal(frozen, before) and not torch.equal(weights(step), whole)


def test_options_of_the_optimizer_may_change():
    """Replays use the new values, also a learning rate that is a float."""
    outcomes = []
    for graphed in (True, False):
        step = make(graphed, FastAdam)
        for number in range(3):
            step([batch(number)], 1e-2 * number)
            step.optimizer.param_groups[0].update(lr=1.0, weight_decay=0.1 * number, betas=(0.8, 0.9))
        outcomes.append(weights(step))
    assert torch.equal(*outcomes)


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_after_the_warm_up_no_gradient_is_flushed(fp8_format):
    """Delayed scaling starts with scales of 1, and a large batch gives each token a small gradient.

    If a GEMM's gradient is flushed to zero, the next GEMM's scale stays unknown.
    """
    torch.manual_seed(0)
    options = dict(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, use_fp8=True)
    model = models.build_model("optimized", models.make_model_config("optimized", options))
    model.fp8_recipe = fp8.make_recipe("delayed", fp8_format)
    model.register_forward_hook(lambda module, inputs, loss: loss * 2.0**-9)  # 512 times the tokens
    tokens = torch.randint(64, (2, 33))
    pass_on = tokens[:, :-1], tokens[:, 1:]

    def gradients():
        model.zero_grad()
        model(*pass_on).backward()
        return [p.grad.norm().item() for p in model.parameters()]

    train_step.warm_up_scales(model, pass_on)
    first = gradients()
    for _ in range(4):
        settled = gradients()
    assert first == pytest.approx(settled, rel=0.1)  # rounding differs in every pass
