"""On a GPU: a step replayed as CUDA graphs equals the eager step, and the fast kernels change no result."""

import dataclasses

import pytest
import torch

from fast_kernels import gemm as fast_gemm
from nanote import checkpoint, fp8, models, train_step
from nanote.config import TrainConfig
from nanote.train_step import TrainStep, make_optimizer

pytestmark = pytest.mark.gpu
SMALL = dict(
    n_layer=2, n_head=2, n_embd=128, vocab_size=512, n_positions=128, seq_len=128, micro_batch_size=4,
    fp8_amax_history_len=16,
)
MODERN = dict(
    use_rmsnorm=True, use_rotary=True, use_qk_norm=True, activation="swiglu", bias=False, n_head=4,
    n_kv_head=2,
)


def batches(step, accum):
    random = torch.Generator("cuda").manual_seed(step)
    tokens = [torch.randint(512, (4, 129), device="cuda", generator=random) for _ in range(accum)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def make(**options):
    config = TrainConfig(**{**SMALL, **options})
    recipe = fp8.make_recipe(config.fp8_recipe, config.fp8_format, config.fp8_amax_history_len)
    model_config = models.make_model_config(
        "optimized", dataclasses.asdict(config) | {"use_fp8": recipe is not None}
    )
    torch.manual_seed(0)
    model = models.build_model("optimized", model_config, device="cuda", dtype=torch.bfloat16)
    if recipe is not None:
        model.fp8_recipe = recipe
    train_step.apply_fast_kernels(model, config)
    optimizer = make_optimizer(model, config)
    if recipe is not None and recipe.delayed():
        train_step.warm_up_scales(model, batches(0, 1)[0])
    return model, TrainStep(model, model, optimizer, config, torch.device("cuda"))


def meta_of(model):
    """The part of meta.json that train.py would write."""
    return {
        "config": {}, "model": "optimized", "model_config": dataclasses.asdict(model.config),
        "tokenizer": "byte",
    }


def losses(steps=12, lr=1e-3, watch=(), **options):
    model, step = make(**options)
    outcomes = [step(batches(i, step.config.grad_accum), lr, watch=i in watch) for i in range(steps)]
    return torch.tensor([[loss.item(), norm.item()] for loss, norm in outcomes])


@pytest.mark.parametrize(
    "options",
    [
        {}, {"grad_accum": 3}, MODERN, {"fp8_recipe": "none"}, {"fp8_recipe": "current"},
        {"fp8_recipe": "block"}, {"moment_dtype": "bfloat16"}, {"param_remainders": False},
        {"dtype": "float32", "attention": "sdpa"},
    ],
)
def test_a_graph_is_the_step(options):
    graphed, eager = losses(**options), losses(cuda_graph="off", **options)
    # attention's backward pass sums in any order, and FP8 may round values that differ by a bit to neighbors
    torch.testing.assert_close(graphed[:, 0], eager[:, 0], rtol=2e-3, atol=0)
    torch.testing.assert_close(graphed[:, 1], eager[:, 1], rtol=3e-2, atol=0)
    assert graphed[-1, 0] < graphed[0, 0]


@pytest.mark.parametrize("options", [MODERN, {}])
@pytest.mark.parametrize(
    "switch",
    [
        {"attention": "sdpa"}, {"attention": "te"}, {"fused_loss": False}, {"fused_block": False},
        {"param_remainders": False},
    ],
)
def test_a_switch_changes_no_result(options, switch):
    torch.testing.assert_close(losses(**options)[:, 0], losses(**options, **switch)[:, 0], rtol=3e-3, atol=0)


def test_the_learning_rate_of_a_step_is_the_one_given():
    model, step = make()
    step(batches(0, 1), 1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    step(batches(1, 1), 0.0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    step(batches(1, 1), 1e-3)
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_recording_trains_nothing():
    model, step = make()
    before, state = [p.detach().clone() for p in model.parameters()], fp8.get_state(model)
    step.record(batches(0, 1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    assert all(torch.equal(value, state[name]) for name, value in fp8.get_state(model).items())


def test_a_batch_of_another_shape_is_refused():
    """It would be broadcast into the captured batch."""
    model, step = make()
    step(batches(0, 1), 1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    row = [tuple(tensor[:1] for tensor in batches(1, 1)[0])]
    with pytest.raises(ValueError, match=r"micro-batch 1 of 1: input_ids \(1, 128\)"):
        step(row, 1e-3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    step(batches(1, 1), 1e-3)


@pytest.mark.parametrize("accum", [1, 2])
def test_a_parameter_that_is_frozen_after_the_recording(accum):
    model, step = make(grad_accum=accum)
    step(batches(0, accum), 1e-3)
    frozen, other = model.wpe.weight.requires_grad_(False), model.blocks[0].attn.proj.weight
    before, trained = frozen.detach().clone(), other.detach().clone()
    with pytest.raises(ValueError, match=r"which parameters require gradients.*record\(batches\)"):
        step(batches(1, accum), 1e-3)
    step.record(batches(1, accum))
    loss, norm = step(batches(1, accum), 1e-3)
    assert torch.equal(frozen, before) and not torch.equal(other, trained) and norm.isfinite()


def test_replays_use_a_checkpoint_that_is_loaded_after_the_capture(tmp_path):
    model, step = make(fp8_recipe="none")
    step(batches(0, 1), 1e-3)
    saved = [value.clone() for state in step.optimizer.state.values() for value in state.values()]
    folder = checkpoint.save(tmp_path, 1, model=model, optimizer=step.optimizer, meta=meta_of(model), keep=1)
    first = [step(batches(i, 1), 1e-3)[0].item() for i in range(1, 5)]
    checkpoint.load(folder, checkpoint.read_meta(folder), model, step.optimizer)
    loaded = [value for state in step.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(loaded, saved))
    again = [step(batches(i, 1), 1e-3)[0].item() for i in range(1, 5)]
    assert again == pytest.approx(first, rel=2e-3) and step.optimizer.param_groups[0]["step"].item() == 5
    assert not any(torch.equal(a, b) for a, b in zip(loaded, saved) if a.numel() > 1000)


def test_recording_comes_after_every_gemm_of_a_deep_model_has_been_timed(monkeypatch):
    """A new model's first FP8 gradients are zeros, on which no GEMM is timed."""
    monkeypatch.setattr(fast_gemm, "_shapes", type(fast_gemm._shapes)())
    monkeypatch.setattr(fast_gemm._Shape, "tuned_count", 0)
    model, step = make(n_layer=16)
    step(batches(0, 1), 1e-3)
    assert step.graphed and len(fast_gemm._shapes) > 8
    assert fast_gemm._Shape.tuned_count == len(fast_gemm._shapes)


def test_clipping():
    clipped, free = make(grad_clip=1e-3), make(grad_clip=0.0)
    norms = [step(batches(0, 1), 1e-3)[1].item() for _, step in (clipped, free)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)  # the norm before clipping is returned
    states = [step.optimizer.state[model.wte.weight] for model, step in (clipped, free)]
    moments = [state["exp_avg"].norm().item() for state in states]
    assert moments[0] == pytest.approx(moments[1] * 1e-3 / norms[0], rel=2e-2)


def test_a_step_that_measures_fp8_equals_the_others():
    torch.testing.assert_close(losses(watch=(3, 4, 7))[:, 0], losses()[:, 0], rtol=2e-3, atol=0)
    model, step = make()
    for i in range(3):
        step(batches(i, 1), 1e-3, watch=i == 2)
    figures = fp8.health(model)
    assert figures["lm_head"]["output_gradient"]["saturated"] is not None
    assert figures["blocks.0.attn.qkv"]["input"]["amax"] > 0


def test_a_checkpoint_resumes_with_another_optimizer_and_without_graphs(tmp_path):
    """Saved from a graph with remainders and BF16 moments; loaded with float32 masters, without a graph."""
    model, step = make(moment_dtype="bfloat16")
    for i in range(6):
        step(batches(i, 1), 1e-3)
    folder = checkpoint.save(tmp_path, 6, model=model, optimizer=step.optimizer, meta=meta_of(model), keep=1)
    other, other_step = make(cuda_graph="off", param_remainders=False)
    checkpoint.load(folder, checkpoint.read_meta(folder), other, other_step.optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
    ours, theirs = ([s(batches(i, 1), 1e-3)[0].item() for i in range(6, 10)] for s in (step, other_step))
    assert ours == pytest.approx(theirs, rel=3e-3)


def test_what_cannot_be_a_graph_says_why():
    config = TrainConfig(**SMALL, cuda_graph="on", gradient_checkpointing=True)
    with pytest.raises(ValueError, match="--cuda-graph on: --gradient-checkpointing"):
        train_step.wants_graph(config, torch.device("cuda"))
