"""recipes: the switch between FP8 recipes, the shapes that they need, and the FP8 state that is saved."""
import sys

import pytest
import torch

from bench.step import forget_models
from nanote import models, recipes
from nanote.config import TrainConfig

on_reference = pytest.mark.skipif(not recipes.IS_REFERENCE, reason="needs the reference's numbers")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = dict(vocab_size=96, n_positions=64, n_embd=64, n_layer=3, n_head=4, use_fp8=True)
TOKENS = torch.arange(64, device=DEVICE).view(2, 32) * 7 % 96
TE_FACTORIES = "custom:transformer_engine.pytorch.custom_recipes.quantizer_factories."


def make_recipe(name="delayed", history=8, **options):
    config = TrainConfig(fp8_recipe=name, fp8_amax_history_len=history, **options)
    recipes.check_machine(config, torch.device(DEVICE))
    return recipes.make(config)


def make(name="optimized", recipe="delayed", history=8, **options):
    torch.manual_seed(0)
    recipe, config = make_recipe(recipe, history), models.make_model_config(name, TINY | options)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = models.instantiate(name, config, device=DEVICE, dtype=dtype)
    model.fp8_recipe = recipe
    return model


def step(model, times=1, **options):
    for _ in range(times):
        loss = model(TOKENS, TOKENS, **options)
        loss.backward()
    return loss.item()


@pytest.mark.parametrize("name, kind, fp8_format", [
    ("delayed", "DelayedScaling", "HYBRID"), ("current", "Float8CurrentScaling", "HYBRID"),
    ("block", "Float8BlockScaling", "E4M3"), ("mxfp8", "MXFP8BlockScaling", "E4M3")])
def test_a_recipe_by_name(name, kind, fp8_format):
    if recipes.unsupported_reason(name):
        pytest.skip("this GPU does not run it")
    recipe = make_recipe(name)
    assert (type(recipe).__name__, recipe.fp8_format.name) == (kind, fp8_format)
    assert type(recipe)().fp8_format == recipe.fp8_format  # TE's own default
    assert recipes.resolve_format(name) == fp8_format.lower()
    for chosen in ("hybrid", "e4m3"):
        assert make_recipe(name, fp8_format=chosen).fp8_format.name.lower() == chosen


def test_options_of_delayed_scaling_and_no_recipe():
    recipe = make_recipe(history=3, fp8_margin=2, fp8_amax_compute_algo="most_recent")
    assert (recipe.amax_history_len, recipe.margin, recipe.amax_compute_algo) == (3, 2, "most_recent")
    assert make_recipe("none") is None
    assert recipes.resolve_format("none", "hybrid") == recipes.resolve_format("nvfp4", "hybrid") == ""
    engine = "te_reference" if recipes.IS_REFERENCE else "Transformer Engine 2"
    assert engine in recipes.describe() and "\n" not in recipes.describe()
    with pytest.raises(ValueError, match="--fp8-recipe fp4: unknown; use none, delayed, .* or custom:"):
        make_recipe("fp4")
    with pytest.raises(ValueError, match="--fp8-recipe tensorwise: called current here"):
        make_recipe("tensorwise")
    with pytest.raises(ValueError, match="--fp8-recipe blockwise: called block here"):
        make_recipe("blockwise")


def test_options_that_the_engine_found_here_refuses(monkeypatch):
    """Without NANOTE_ENGINE they are not known before."""
    monkeypatch.setattr(recipes, "ENGINE", "fast")
    with pytest.raises(ValueError, match="--dtype float32 with --fp8-recipe delayed: not on fast_kernels, "):
        make_recipe(dtype="float32")
    monkeypatch.setattr(recipes, "ENGINE", "te")
    with pytest.raises(ValueError, match="not on transformer_engine.*, the engine here: "):
        make_recipe(compile=True)
    assert make_recipe(model="fast") is not None  # runs on fast_kernels, also beside TE


@on_reference
@pytest.mark.parametrize("name, reason", [("nvfp4", "emulates FP8 only"), ("custom:math.exp", "quantizers")])
def test_an_unsupported_recipe_gives_the_reason(name, reason):
    with pytest.raises(ValueError, match=f"not supported on this machine .CPU.*{reason}.*Use one of none, "):
        make_recipe(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_an_unsupported_recipe_gives_tes_reason(name):
    if not recipes.unsupported_reason(name):
        pytest.skip("TE allows it; on compute capability 12.x NVFP4's default recipe is reported to fail")
    reason = "(10.0 or higher|not supported on 12.0)"
    with pytest.raises(ValueError, match=f"{torch.cuda.get_device_name()}.*{reason}.*Use one of none"):
        make_recipe(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["custom:", "custom:factory", "custom:no_module.f", "custom:broken_module.f",
                                  "custom:math.no_such_function"])
def test_a_bad_custom_recipe_is_one_line(name, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported.*quantizer_for works") as error:
        make_recipe(name)
    assert "\n" not in str(error.value)
    sys.modules.pop("broken_module", None)


@pytest.mark.gpu
@pytest.mark.parametrize("factory, built_in", [("current_scaling_factory", "current"),
                                               ("float8_block_scaling_factory", "block")])
def test_a_custom_recipe_trains_as_the_built_in_one(factory, built_in):
    losses = []
    for recipe in (TE_FACTORIES + factory, built_in):
        model = make(recipe=recipe)
        losses.append([step(model) for _ in range(3)])
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        assert recipes.get_state(model) == {}
    custom, expected = losses
    assert custom == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("recipe, batch, length, better", [
    ("delayed", 1, 24, 2), ("current", 3, 8, 4), ("block", 1, 8, 2), ("mxfp8", 1, 16, 2)])
def test_shapes_that_fp8_cannot_use(recipe, batch, length, better):
    config = make().config
    recipes.check_shapes(config, better, length, recipe)
    with pytest.raises(ValueError, match=f"= {batch * length} tokens.*--micro-batch-size {better} works"):
        recipes.check_shapes(config, batch, length, recipe)
    narrow = make(n_embd=48).config
    recipes.check_shapes(narrow, 2, 32, "delayed")
    with pytest.raises(ValueError, match="--n-embd 48: .*64 works"):
        recipes.check_shapes(narrow, 2, 32, "mxfp8")


@pytest.mark.parametrize("length", [1, 3, 8, 12])
def test_another_history_length_keeps_the_newest_rows(length):
    model = make(history=8)
    step(model, 5)
    with torch.no_grad():
        model(TOKENS)  # stays in row 0
    state = recipes.get_state(model)
    assert state["blocks.0.mlp.scaling_fwd.amax_history"][0].any()
    other = make(history=length)
    recipes.set_state(other, state)
    for name, value in recipes.get_state(other).items():
        if name.endswith("scale"):
            assert torch.equal(value, state[name])
        else:
            kept = min(length, 8) - 1
            assert value.shape[0] == length and torch.equal(value[0], state[name][0])
            assert torch.equal(value[length - kept:], state[name][8 - kept:])
            assert not value[1:length - kept].any()
    step(other)


@pytest.mark.parametrize("damage", [
    {"blocks.7.attn.qkv.scaling_fwd.scale": (3,)}, {"lm_head.scaling_fwd.scale": (4,)},
    {"lm_head.scaling_fwd.amax_history": (8, 2)}])
def test_a_state_of_another_model_is_one_line(damage):
    model = make()
    step(model)
    damage = {name: torch.ones(shape) for name, shape in damage.items()}
    with pytest.raises(ValueError, match="FP8 state of .*; resume with the model that saved it"):
        recipes.set_state(make(), recipes.get_state(model) | damage)


@pytest.mark.gpu
def test_forgetting_models_keeps_those_that_train():
    states = []
    for forget in (False, True):
        model = make()
        step(model, 2)
        if forget:
            forget_models()
        step(model)
        states.append(recipes.get_state(model))
        del model
        forget_models()
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items() if "_fwd." in name)


@pytest.mark.parametrize("name, options", [*((name, {}) for name in models.MODELS),
                                           ("optimized", {"gradient_checkpointing": True})])
def test_skipped_blocks_have_no_fp8_state(name, options):
    model = make(name, fp8_skip_first=1, fp8_skip_last=1, **options)
    step(model, 2, is_first_microbatch=True)
    state = recipes.get_state(model)
    in_blocks = [name for name in state if name.startswith("blocks")]
    assert in_blocks and all(name.startswith("blocks.1.") for name in in_blocks)
    assert any(name.startswith("lm_head") for name in state)
    scales_of_gradients = [tensor for name, tensor in state.items() if name.endswith("bwd.scale")]
    assert all(scale.ne(1).any() for scale in scales_of_gradients)


@pytest.mark.parametrize("skips", [(3, 0), (4, 0), (0, 4), (2, 2)])
def test_all_blocks_skipped_is_the_model_without_fp8(skips):
    first, last = skips
    model = make(fp8_skip_first=first, fp8_skip_last=last, fp8_lm_head=False)
    without_fp8 = make(use_fp8=False)
    assert torch.equal(model(TOKENS), without_fp8(TOKENS))
    assert recipes.get_state(model) == {}
