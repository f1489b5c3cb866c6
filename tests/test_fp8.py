"""fp8 and fp8_health: recipes and refusals, the state to save, blocks kept in high precision, and the figures
of each tensor."""
import json
import math
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

import te_reference
import train
from nanote import fp8, fp8_health, models
from nanote.fp8_health import LIMITS
from nanote.metrics import read_metrics
from trainer_tools import OPTIONS, make_tokens, metrics, run_train, short_endings

pytestmark = pytest.mark.skipif(not fp8.IS_REFERENCE, reason="written for the reference's numbers")
TINY = dict(vocab_size=96, n_positions=64, n_embd=64, n_layer=3, n_head=4, use_fp8=True)
TOKENS = torch.arange(64).view(2, 32) * 7 % 96


def make(name="optimized", recipe="delayed", history=8, **options):
    torch.manual_seed(0)
    model_class, config_class = models.model_classes(name)
    model = model_class(config_class(**{**TINY, **options}))
    model.fp8_recipe = fp8.make_recipe(recipe, amax_history_len=history)
    return model


def step(model, times=1, **options):
    for _ in range(times):
        loss = model(TOKENS, TOKENS, **options)
        loss.backward()
    return loss.item()


def look(model, **options):
    with fp8.watch(model):
        step(model, **options)
    return fp8.health(model)


# ---- recipes

def test_recipes_by_name():
    for name, kind in (
        ("delayed", "DelayedScaling"), ("current", "Float8CurrentScaling"), ("block", "Float8BlockScaling"),
        ("mxfp8", "MXFP8BlockScaling"),
    ):
        assert type(fp8.make_recipe(name)).__name__ == kind
    assert fp8.make_recipe("none") is None
    assert fp8.make_recipe("current", "e4m3").fp8_format.name == "E4M3"


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_the_default_format_is_transformer_engines_own(name):
    recipe = fp8.make_recipe(name)
    own = type(recipe)().fp8_format
    assert recipe.fp8_format == own and fp8.make_recipe(name, "auto").fp8_format == own
    assert fp8.resolve_format(name, "auto") == own.name.lower()
    for chosen in ("hybrid", "e4m3"):
        assert fp8.make_recipe(name, chosen).fp8_format.name.lower() == chosen
        assert fp8.resolve_format(name, chosen) == chosen


def test_recipes_without_that_choice_have_no_format():
    for name in ("none", "nvfp4", "custom:module.function"):
        assert fp8.resolve_format(name, "hybrid") == ""


def test_an_unknown_format_is_told_in_one_line():
    with pytest.raises(ValueError, match="^fp8-format 'e5m2' is unknown; use auto.*, hybrid .* or e4m3$"):
        fp8.make_recipe("block", "e5m2")


def test_describe_names_the_device_and_whose_fp8():
    assert "te_reference" in fp8.describe()


@pytest.mark.parametrize("name, words", [("fp4", "unknown; .*nvfp4 and custom:module.function"),
                                         ("nvfp4", "emulates FP8 only, not NVFP4.*compute capability 10.0"),
                                         ("custom:json.dumps", "does not emulate")])
def test_what_the_reference_refuses(name, words):
    with pytest.raises(ValueError, match=words):
        fp8.make_recipe(name)


@pytest.mark.parametrize("theirs, ours", [
    ("tensorwise", "current"), ("per-tensor", "current"), ("current_scaling", "current"),
    ("dynamic", "current"), ("Float8CurrentScaling", "current"), ("blockwise", "block"),
    ("Float8BlockScaling", "block"), ("DelayedScaling", "delayed"), ("delayed_scaling", "delayed"),
    ("MXFP8BlockScaling", "mxfp8"), ("mx", "mxfp8"), ("NVFP4BlockScaling", "nvfp4"), ("bf16", "none"),
    ("custom", "custom:module.function")])
def test_names_of_other_libraries_are_answered_with_ours(theirs, ours):
    with pytest.raises(ValueError) as error:
        fp8.check_recipe(theirs)
    assert str(error.value) == (
        f"fp8-recipe {theirs!r} is unknown: it is called {ours} here; the recipes are none, delayed, "
        "current, block, mxfp8, nvfp4 and custom:module.function")
    assert ours == "custom:module.function" or ours in fp8.RECIPES


@pytest.mark.parametrize("name, words", [
    ("rowwise", ": no recipe has one scale per row, block (1x128 and 128x128) comes closest; the recipes"),
    ("hybrid", "is unknown: it is a format, --fp8-format hybrid; the recipes"),
    ("fp4", "'fp4' is unknown; the recipes")])
def test_names_that_are_no_recipe_here(name, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        fp8.check_recipe(name)


def test_a_refusal_names_the_gpu_and_what_is_needed(monkeypatch):
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    monkeypatch.setitem(fp8._AVAILABLE, "mxfp8", lambda return_reason: (False, reason))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ValueError) as error:
        fp8.check_recipe("mxfp8")
    assert all(
        word in str(error.value) for word in ("NVIDIA H200", "compute capability 9.0", reason)
    ) and "\n" not in str(error.value)


@pytest.fixture
def with_te(monkeypatch, tmp_path):
    """As where TE is: custom recipes are not refused, and a module with quantizer factories can be imported.
    """
    monkeypatch.setattr(fp8, "IS_REFERENCE", False)
    monkeypatch.setattr(
        fp8, "recipes", types.SimpleNamespace(**vars(te_reference), CustomRecipe=types.SimpleNamespace)
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quantizers_for_a_test.py").write_text("def factory(role): return None\nnumber = 3\n")
    (tmp_path / "broken_for_a_test.py").write_text("1 / 0\n")
    yield
    sys.modules.pop("quantizers_for_a_test", None)


def test_a_custom_recipe_takes_its_function(with_te):
    assert fp8.make_recipe("custom:quantizers_for_a_test.factory").qfactory.__name__ == "factory"


@pytest.mark.parametrize("name, words", [("custom:", "does not name"), ("custom:factory", "does not name"),
                                         ("custom:no_module.f", "no_module"),
                                         ("custom:broken_for_a_test.f", "ZeroDivisionError"),
                                         ("custom:quantizers_for_a_test.other", "has no other"),
                                         ("custom:quantizers_for_a_test.number", "not a function")])
def test_a_bad_custom_recipe_is_told_in_one_line(with_te, monkeypatch, name, words):
    monkeypatch.setattr(fp8, "describe", lambda: "a GPU")
    with pytest.raises(ValueError, match=words) as error:
        fp8.check_recipe(name)
    assert "\n" not in str(error.value) and "works" in str(error.value)


@pytest.mark.parametrize(
    "recipe, batch, length, better",
    [("delayed", 1, 24, 2), ("current", 3, 8, 4), ("block", 1, 8, 2), ("mxfp8", 1, 16, 2)],
)
def test_token_counts_that_fit(recipe, batch, length, better):
    config = make().config
    fp8.check_shapes(config, better, length, recipe)
    fp8.check_shapes(config, batch, length, "none")
    with pytest.raises(ValueError, match=f"= {batch * length} tokens.*--micro-batch-size {better} works"):
        fp8.check_shapes(config, batch, length, recipe)


def test_mxfp8_asks_for_dimensions_by_32():
    config = make(n_embd=48).config
    fp8.check_shapes(config, 2, 32, "delayed")
    with pytest.raises(ValueError, match="n_embd = 48: .*64 works"):
        fp8.check_shapes(config, 2, 32, "mxfp8")


# ---- the state

def test_state_goes_to_another_model_and_is_a_copy():
    model = make()
    assert fp8.is_fresh(model) and fp8.get_state(model) == {}
    step(model, 3)
    state = fp8.get_state(model)
    other = make()
    fp8.set_state(other, state)
    assert not fp8.is_fresh(model) and not fp8.is_fresh(other)
    assert all(torch.equal(value, fp8.get_state(other)[name]) for name, value in state.items())
    kept = {name: value.clone() for name, value in state.items()}
    model.zero_grad()
    assert step(model) == step(other)
    assert all(torch.equal(value, kept[name]) for name, value in state.items())


@pytest.mark.parametrize("length", [1, 3, 8, 12])
def test_another_history_length_keeps_the_newest_rows(length):
    model = make(history=8)
    step(model, 5)
    state = fp8.get_state(model)
    other = make(history=length)
    fp8.set_state(other, state)
    for name, value in fp8.get_state(other).items():
        if name.endswith("scale"):
            assert torch.equal(value, state[name])
        else:
            kept = min(length, 8) - 1
            assert value.shape[0] == length and torch.equal(value[0], state[name][0])
            assert (
                torch.equal(value[length - kept :], state[name][8 - kept :])
                and not value[1 : length - kept].any()
            )
    step(other)


def test_state_is_left_aside_by_other_recipes_and_refused_by_other_models():
    model = make()
    step(model)
    state = fp8.get_state(model)
    other = make(recipe="current")
    fp8.set_state(other, state)
    assert fp8.get_state(other) == {}
    with pytest.raises(ValueError, match="does not have"):
        fp8.set_state(make(n_layer=2), state)


@pytest.mark.parametrize("steps", [0, 2])
def test_preserved_state(steps):
    model = make()
    step(model, steps) if steps else None
    before = fp8.get_state(model)
    with fp8.preserved_state(model):
        step(model, 2)
        assert not fp8.is_fresh(model)
    after = fp8.get_state(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert fp8.is_fresh(model) == (steps == 0)
    if not steps:
        assert not any(value.any() for name, value in after.items() if name.endswith("amax_history"))


def test_masters_start_from_the_values_before_fp8():
    config = make().config
    torch.manual_seed(0)
    exact = models.build_model("optimized", config)
    torch.manual_seed(0)
    model = models.build_model("optimized", config, fp8_weights_recipe=fp8.make_recipe("delayed"))
    optimizer = fp8.te.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    fp8.init_master_weights(model, optimizer)
    weight = model.blocks[0].attn.qkv.weight
    master = optimizer.state[weight]["master_param"]
    assert master.dtype == torch.float32 and not torch.equal(master, weight)
    assert torch.equal(master, exact.blocks[0].attn.qkv.weight)


# ---- blocks in high precision

@pytest.mark.parametrize(
    "name, options",
    [*((name, {}) for name in models.MODELS), ("optimized", {"gradient_checkpointing": True})],
)
def test_skipped_blocks_have_no_fp8_state(name, options):
    model = make(name, fp8_skip_first=1, fp8_skip_last=1, **options)
    assert step(model, 2, is_first_microbatch=True) == pytest.approx(
        step(model, is_first_microbatch=False), abs=0.05
    )
    scaled = {key.split(".scaling")[0] for key in fp8.get_state(model)}
    assert {key.split(".")[1] for key in scaled if key.startswith("blocks")} == {"1"} and any(
        key.startswith("lm_head") for key in scaled
    )
    # the backward pass rolls
    assert all(scale.ne(1).any() for key, scale in fp8.get_state(model).items() if key.endswith("bwd.scale"))


def test_all_blocks_skipped_is_the_model_in_high_precision():
    model, exact = make(fp8_skip_first=3, fp8_lm_head=False), make(use_fp8=False)
    assert torch.equal(model(TOKENS), exact(TOKENS))


def test_checkpointing_changes_nothing_with_skipped_blocks():
    plain, recomputed = make(fp8_skip_first=1), make(fp8_skip_first=1, gradient_checkpointing=True)
    for _ in range(3):
        assert step(plain) == step(recomputed)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), recomputed.parameters()))


def test_skipped_blocks_keep_their_weights_in_high_precision():
    config = make(fp8_skip_last=1).config
    model = models.build_model("optimized", config, fp8_weights_recipe=fp8.make_recipe("delayed"))
    assert [hasattr(block.attn.qkv.weight, "fp8_owner") for block in model.blocks] == [True, True, False]


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize(
    "skips, words",
    [
        ((-1, 0), "fp8_skip_first=-1: must be from 0 to n_layer=3"), ((0, 4), "fp8_skip_last=4"),
        ((2, 2), "fp8_skip_first=2: with fp8_skip_last=2 .*; 1 works"),
    ],
)
def test_skips_out_of_range(name, skips, words):
    with pytest.raises(ValueError, match=words):
        make(name, fp8_skip_first=skips[0], fp8_skip_last=skips[1])


# ---- health

@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("options", [{}, {"fp8_skip_first": 1}])
def test_every_product_in_fp8_is_seen(name, options):
    model = make(name, **options)
    step(model, 2)
    health = look(model)
    assert set(health) == {key.split(".scaling")[0] for key in fp8.get_state(model)}
    for module, tensors in health.items():
        products = ("fc1_", "fc2_") if "fc1_input" in tensors else ("",)
        assert list(tensors) == [
            prefix + kind for prefix in products for kind in ("input", "weight", "output_gradient")
        ]
        for tensor, figures in tensors.items():
            assert figures["amax"] > 0 and figures["scale"] > 0
            assert (figures["saturated"] is None) == (tensor in ("fc2_input", "fc1_output_gradient"))


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"use_rmsnorm": True, "activation": "swiglu", "bias": False}],
)
def test_figures_are_those_of_the_state(options):
    """The amax that the hooks see is what the histories take up; the scale is the one before the step."""
    model = make(**options)
    step(model, 2)
    before = fp8.get_state(model)
    health = look(model)
    after = fp8.get_state(model)
    for module, tensors in health.items():
        for i, (tensor, figures) in enumerate(tensors.items()):
            direction = "bwd" if tensor.endswith("gradient") else "fwd"
            index = 2 * (i // 3) if direction == "bwd" else 3 * (i // 3) + i % 3
            assert figures["scale"] == before[f"{module}.scaling_{direction}.scale"][index].item()
            assert figures["amax"] == pytest.approx(
                after[f"{module}.scaling_{direction}.amax_history"][-1, index].item(), rel=1e-6
            )


def test_shares_by_counting_bytes():
    linear = fp8.te.Linear(64, 32, bias=False)
    x = torch.randn(16, 64)
    # scales start at 1: eight above 448, sixteen below 2^-10, four zeros
    x[0, :8], x[1, :16], x[2, :4] = 1000.0, 1e-4, 0.0
    model = torch.nn.Sequential(linear)
    with fp8.watch(model), fp8.te.autocast(recipe=fp8.make_recipe("delayed")):
        model(x)
    q = te_reference.quantize(x, torch.tensor(1.0), torch.float8_e4m3fn).float()
    figures = fp8.health(model)["0"]["input"]
    assert figures["amax"] == 1000 and figures["scale"] == 1 and figures["saturated"] == 8 / 1024
    zeroed = ((q == 0) & (x != 0)).sum().item()
    assert zeroed >= 16 and figures["flushed"] == pytest.approx(zeroed / (x != 0).sum().item())
    assert "output_gradient" not in fp8.health(model)["0"]  # there was no backward pass


@pytest.mark.parametrize(
    "dtype, limits", [(torch.float8_e4m3fn, (448, 464)), (torch.float8_e5m2, (57344, 61440))]
)
def test_limits_are_the_formats(dtype, limits):
    above, zero = LIMITS[limits[0]]
    assert torch.finfo(dtype).max == limits[0] and above == limits[1]
    numbers = torch.tensor([zero, zero * 1.001])
    assert numbers.to(dtype).float().ne(0).tolist() == [False, True]


def test_an_outlier_in_a_weight_is_seen():
    """A weight of 1000 times the largest: cut off under delayed scaling, and the others flushed under current
    scaling."""
    shares = {}
    for recipe in ("delayed", "current"):
        model = make(recipe=recipe)
        step(model, 2)
        quiet = look(model)["blocks.1.attn.proj"]["weight"]
        with torch.no_grad():
            weight = model.blocks[1].attn.proj.weight
            weight[3, 5] = 1000 * weight.abs().max()
        loud, elsewhere = (
            look(model)["blocks.1.attn.proj"]["weight"],
            fp8.health(model)["blocks.0.attn.proj"]["weight"],
        )
        assert (
            loud["amax"] == pytest.approx(1000 * quiet["amax"])
            and elsewhere["amax"] < 1
            and elsewhere["saturated"] == 0
        )
        shares[recipe] = [(figures["saturated"], figures["flushed"]) for figures in (quiet, loud)]
    assert shares["delayed"][0][0] == 0 and shares["delayed"][1][0] == 1 / 64**2
    assert shares["current"][1][0] == 0 and shares["current"][0][1] < 0.001 < 0.005 < shares["current"][1][1]


def test_an_outlier_in_the_input_is_seen():
    model = make()
    step(model, 2)
    with torch.no_grad():
        model.blocks[0].attn.qkv.layer_norm_weight[7] *= 1000
    assert look(model)["blocks.0.attn.qkv"]["input"]["saturated"] > 0.005


@pytest.mark.parametrize("recipe, saturated", [("block", 0.0), ("mxfp8", 0.0)])
def test_scales_in_blocks_have_an_amax_alone(recipe, saturated):
    figures = look(make(recipe=recipe))["lm_head"]["weight"]
    assert figures["amax"] > 0 and (figures["scale"], figures["saturated"], figures["flushed"]) == (
        None, saturated, None,
    )


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38, 1e-44, 0.0])
def test_figures_of_a_model_that_diverged_are_read_again_and_drawn(recipe, value, tmp_path):
    model = make(recipe=recipe)
    with torch.no_grad():
        model.blocks[0].attn.proj.weight.fill_(value)
    step(model, 2)
    record = {"step": 2, "health": look(model)}
    (tmp_path / "fp8_health.jsonl").write_text(json.dumps(record) + "\n")
    assert read_metrics(tmp_path / "fp8_health.jsonl") == [record]
    with short_endings():
        fp8_health.plot([record], tmp_path / "health.png")


def test_health_without_a_look_and_hooks_that_go():
    model = make()
    assert fp8.health(model) == {}
    step(model, 2)
    history = fp8.get_state(model)["lm_head.scaling_fwd.amax_history"]
    figures = fp8.health(model)["lm_head"]["input"]
    assert figures["amax"] == history[-1, 0].item() and (figures["saturated"], figures["flushed"]) == (
        None,
        None,
    )
    with pytest.raises(RuntimeError, match="stop"), fp8.watch(model):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks for module in model.modules())


# ---- the trainer

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two runs that differ in the looks alone."""
    folder = tmp_path_factory.mktemp("health")
    tokens, options = (
        make_tokens(folder / "tokens"),
        f"{OPTIONS} --max-steps 12 --checkpoint-interval 6 --fp8-skip-first 1",
    )
    assert run_train(f"{options} --out-dir {folder}/plain", tokens) == 0
    assert run_train(f"{options} --fp8-health-interval 4 --out-dir {folder}/seen", tokens) == 0
    return folder, tokens


def test_looking_changes_nothing(run):
    folder, _ = run
    assert metrics(folder / "seen") == metrics(folder / "plain")
    assert not list((folder / "plain").glob("fp8_health*"))


def test_every_rank_looks_and_rank_0_writes(run, monkeypatch):
    """A step that measures FP8 is no CUDA graph, and collectives must be so on all ranks or on none."""
    folder, tokens = run
    looks, plain_step = [], train.TrainStep.__call__

    def noted_step(self, *args, watch=False):
        looks.append(watch)
        return plain_step(self, *args, watch=watch)

    monkeypatch.setattr(train.Ranks, "is_first", False)
    monkeypatch.setattr(train.TrainStep, "__call__", noted_step)
    assert run_train(f"{OPTIONS} --max-steps 4 --fp8-health-interval 2 --out-dir {folder}/other", tokens) == 0
    assert looks == [False, True, False, True]
    assert not list((folder / "other").glob("fp8_health*"))


def test_what_a_look_leaves(run):
    folder, _ = run
    records = [json.loads(line) for line in (folder / "seen/fp8_health.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 8, 12]
    assert {name.split(".")[1] for name in records[0]["health"] if name.startswith("blocks")} == {"1"}
    assert (folder / "seen/fp8_health.png").read_bytes().startswith(b"\x89PNG")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    board = EventAccumulator(str(folder / "seen/tensorboard")).Reload()
    scalars = board.Scalars("fp8_amax/lm_head.output_gradient")
    assert [s.value for s in scalars] == pytest.approx(
        [r["health"]["lm_head"]["output_gradient"]["amax"] for r in records]
    )


def test_a_resumed_run_has_each_look_once(run, tmp_path):
    folder, _ = run
    shutil.copytree(folder / "seen", tmp_path / "again")
    whole = (tmp_path / "again/fp8_health.jsonl").read_text()
    shutil.rmtree(tmp_path / "again/step-12")
    assert run_train(f"--resume --max-steps 12 --out-dir {tmp_path / 'again'}") == 0
    assert (tmp_path / "again/fp8_health.jsonl").read_text() == whole


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_the_picture_of_recipes_without_a_state(run, tmp_path, recipe):
    _, tokens = run
    assert (
        run_train(
            f"{OPTIONS} --max-steps 1 --fp8-health-interval 1 --fp8-recipe {recipe} "
            f"--out-dir {tmp_path / 'run'}",
            tokens,
        )
        == 0
    )
    assert (tmp_path / "run/fp8_health.png").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ("--fp8-recipe none --fp8-health-interval 5", "--fp8-recipe none"),
        ("--fp8-recipe current --compile --fp8-health-interval 5", "--compile"),
        ("--fp8-health-interval -1", "--fp8-health-interval -1"),
        ("--fp8-recipe nvfp4", "NVFP4"),
        ("--fp8-recipe custom:a.b", "custom"),
        ("--fp8-skip-first 3", "fp8_skip_first=3"),
        ("--fp8-skip-first 2 --fp8-skip-last 1", "n_layer=2"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(run, tmp_path, capsys, options, words):
    _, tokens = run
    capsys.readouterr()
    assert run_train(f"{OPTIONS} {options} --out-dir {tmp_path / 'run'}", tokens) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error and not Path(tmp_path, "run").exists()
