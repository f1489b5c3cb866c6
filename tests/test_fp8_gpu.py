"""On a GPU: what fp8 promises of Transformer Engine itself. Health figures, blocks in high precision, custom
recipes, refusals, the trainer."""

import json
from pathlib import Path

import pytest
import torch

from nanote import fp8, models
from trainer_tools import OPTIONS, make_tokens, metrics, run_train

pytestmark = pytest.mark.gpu
TINY = dict(vocab_size=96, n_positions=64, n_embd=64, n_layer=3, n_head=4, use_fp8=True)
TE_FACTORIES = "custom:transformer_engine.pytorch.custom_recipes.quantizer_factories."


def make(name="optimized", recipe="delayed", **options):
    model_class, config_class = models.model_classes(name)
    model = model_class(config_class(**{**TINY, **options})).to("cuda")
    model.fp8_recipe = fp8.make_recipe(recipe, amax_history_len=8)
    return model


def step(model, times=1):
    tokens = torch.arange(64, device="cuda").view(2, 32) * 7 % 96
    for _ in range(times):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
    return loss.item()


def look(model):
    with fp8.watch(model):
        step(model)
    return fp8.health(model)


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_every_product_in_fp8_is_seen(name, recipe):
    model = make(name, recipe, fp8_skip_first=1)
    step(model, 2)
    health = look(model)
    assert {module.split(".")[1] for module in health if module.startswith("blocks")} == {"1", "2"}
    for tensors in health.values():
        assert {"input", "weight", "output_gradient"} <= set(tensors) or {"fc1_input", "fc2_weight"} <= set(
            tensors
        )
        assert all(figures["amax"] > 0 for figures in tensors.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"use_rmsnorm": True, "activation": "swiglu", "bias": False}],
)
def test_figures_are_those_of_the_state(options):
    """The amax that the hooks see is what TE's histories take up, but for the rounding of a norm's output;
    the scale is the one before."""
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
            # behind a norm, TE takes the BF16 value's amax and the hook float32's: half a unit of BF16's 8
            # bits
            assert figures["amax"] == pytest.approx(
                after[f"{module}.scaling_{direction}.amax_history"][-1, index].item(), rel=2**-8
            )


def test_shares_by_counting_transformer_engines_bytes():
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    x[0, :8], x[1, :16], x[2, :4] = 1000.0, 1e-4, 0.0  # scales start at 1
    model = torch.nn.Sequential(fp8.te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16))
    with fp8.watch(model), fp8.te.autocast(recipe=fp8.make_recipe("delayed")):
        model(x)
    figures = fp8.health(model)["0"]["input"]
    one = torch.ones(1, device="cuda")
    values = Float8Quantizer(one, torch.zeros_like(one), tex.DType.kFloat8E4M3)(x).dequantize(
        dtype=torch.float32
    )
    zeroed = ((values == 0) & (x != 0)).sum().item()
    assert zeroed >= 16 and figures["flushed"] == pytest.approx(zeroed / (x != 0).sum().item())
    assert (values == 448).sum() == 8 and figures["saturated"] == 8 / 1024


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_an_outlier_in_a_weight_is_seen(recipe):
    model = make(recipe=recipe)
    step(model, 2)
    quiet = look(model)["blocks.1.attn.proj"]["weight"]
    with torch.no_grad():
        weight = model.blocks[1].attn.proj.weight
        weight[3, 5] = 1000 * weight.abs().max()
    loud = look(model)["blocks.1.attn.proj"]["weight"]
    assert loud["amax"] == pytest.approx(1000 * quiet["amax"], rel=2**-7)  # compared as BF16
    if recipe == "delayed":
        assert quiet["saturated"] == 0 and loud["saturated"] == 1 / 64**2
    else:
        assert loud["saturated"] == 0 and loud["flushed"] > 0.005 > 0.001 > quiet["flushed"]


def test_all_blocks_skipped_is_the_model_in_high_precision():
    torch.manual_seed(1)
    model = make(fp8_skip_first=3, fp8_lm_head=False)
    exact = make(use_fp8=False)
    exact.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.arange(64, device="cuda").view(2, 32)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(tokens), exact(tokens))


@pytest.mark.parametrize(
    "factory, built_in", [("current_scaling_factory", "current"), ("float8_block_scaling_factory", "block")]
)
def test_a_custom_recipe_trains_as_the_recipe_it_mirrors(factory, built_in):
    losses = []
    for recipe in (TE_FACTORIES + factory, built_in):
        torch.manual_seed(2)
        model = make(recipe=recipe)
        losses.append([step(model) for _ in range(3)])
        assert all(p.grad.isfinite().all() for p in model.parameters())
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert all(
        figures["scale"] is None for figures in look(make(recipe=TE_FACTORIES + factory))["lm_head"].values()
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_refusal_names_the_gpus_compute_capability_and_the_needed_one(recipe):
    if not fp8.why_not(recipe):
        pytest.skip("this GPU runs it")
    with pytest.raises(ValueError) as error:
        fp8.make_recipe(recipe)
    capability = "compute capability {}.{}".format(*torch.cuda.get_device_capability())
    assert capability in str(error.value) and "10.0" in str(error.value) and "\n" not in str(error.value)


def test_the_trainer_logs_health_and_looking_changes_nothing(tmp_path):
    tokens = make_tokens(tmp_path / "tokens")
    options = (
        OPTIONS.replace("--device cpu", "--device cuda")
        + " --max-steps 12 --checkpoint-interval 0 --fp8-skip-first 1"
    )
    assert run_train(f"{options} --out-dir {tmp_path}/plain", tokens) == 0
    assert run_train(f"{options} --fp8-health-interval 4 --out-dir {tmp_path}/seen", tokens) == 0
    records = [json.loads(line) for line in Path(tmp_path, "seen/fp8_health.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [4, 8, 12]
    assert Path(tmp_path, "seen/fp8_health.png").read_bytes().startswith(b"\x89PNG")
    plain, seen = ([record["loss"] for record in metrics(tmp_path / run)] for run in ("plain", "seen"))
    assert seen == pytest.approx(plain, rel=5e-3)  # attention's backward pass sums in any order


@pytest.mark.parametrize("recipe", ["block", TE_FACTORIES + "current_scaling_factory"])
def test_the_trainer_runs_recipes_without_a_state(tmp_path, recipe):
    tokens = make_tokens(tmp_path / "tokens")
    options = (
        OPTIONS.replace("--device cpu", "--device cuda")
        + " --max-steps 4 --fp8-skip-last 1 --fp8-health-interval 2"
    )
    assert run_train(f"{options} --fp8-recipe {recipe} --out-dir {tmp_path}/run", tokens) == 0
    assert (
        Path(tmp_path, "run/fp8_health.png").exists()
        and metrics(tmp_path / "run")[-1]["loss"] < metrics(tmp_path / "run")[0]["loss"]
    )
