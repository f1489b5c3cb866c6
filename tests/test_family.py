"""The five models: the same weights give the same logits, each trains, each works beside the files that it
names, and PyTorch's ways to save and copy a model keep its FP8 state."""

import copy
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from model_te_optimized import DelayedScaling
from nanote import models, recipes
from nanote.checkpoint import read_meta
from nanote.config import TrainConfig
from tools.tensor_files import optimized_name
from trainer_tools import (
    OPTIONS,
    RESTORE,
    ROOT,
    fork_ranks,
    make_tokens,
    metrics,
    randomize,
    run_script,
    run_train,
)

FAMILY = list(models.MODELS)  # optimized, advanced, fused, custom, te
TINY = dict(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4)
QWEN3 = dict(
    use_rmsnorm=True, use_rotary=True, rope_theta=5e4, use_qk_norm=True, activation="swiglu",
    tie_embeddings=False, n_kv_head=2, head_dim=32)
OTHER = dict(bias=False, tie_embeddings=False, n_inner=96, layernorm_epsilon=0.05)


def make(name, **options):
    model_class, config_class = models.model_classes(name)
    return model_class(config_class(**{**TINY, **options}))


def make_alike(names, **options):
    """Build models with the same random weights."""
    weights = randomize(make("optimized", **options)).state_dict()
    models = {name: make(name, **options) for name in names}
    for model in models.values():
        model.load_state_dict({name: weights[optimized_name(name)] for name in model.state_dict()})
        model.eval()
    return models


def also_on_a_gpu(*values):
    """Return the parameters twice: for `-m "not gpu"` and for `-m gpu`."""
    on_gpu = [pytest.param(value, marks=pytest.mark.gpu, id=f"{value} on a GPU") for value in values]
    return [*values, *on_gpu]


def tokens(batch=2, length=64):
    return torch.randint(0, 96, (batch, length), device="cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "names, options", [(FAMILY, {}), (FAMILY, OTHER), (["optimized", "advanced"], QWEN3)],
    ids=["gpt2", "other", "all switches"])
def test_the_same_weights_give_the_same_logits(names, options):
    x, logits = tokens(), {}
    for name, model in make_alike(names, **options).items():
        with torch.no_grad():
            logits[name] = model(x)
    expected = logits.pop("optimized")
    assert expected.shape == (2, 64, 96)
    # TE runs float32 GEMMs in TF32: nine GEMMs in sequence
    tolerance = 1e-5 if recipes.IS_REFERENCE else 9 * 2.0**-11
    for name, y in logits.items():
        error = ((y - expected).abs().max() / expected.abs().max()).item()
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("recipe", also_on_a_gpu("none", "delayed", "current"))
def test_the_same_weights_give_the_same_logits_in_low_precision(recipe):
    # Two variants round in different places, so count the roundings in sequence. Rounding with unit roundoff
    # u has an RMS error of u / sqrt(3), R random ones give sqrt(R / 3) u, and the difference of two results
    # has twice the variance. BF16 (u = 2^-8) rounds once in the embeddings; 14 times in a block: norm, QKV,
    # scores, probabilities, context, projection, bias, residual, norm, fc1, GELU, fc2, bias, residual; and
    # twice in the head: norm and logits. FP8 (E4M3, u = 2^-4) rounds the inputs of four GEMMs per block and
    # of the head; the weights are equal in all variants and round alike.
    blocks = TINY["n_layer"]
    variance = 2 / 3 * (1 + 14 * blocks + 2) * 2.0**-16
    if recipe != "none":
        variance += 2 / 3 * (4 * blocks + 1) * 2.0**-8
    x, logits = tokens(), {}
    for name, model in make_alike(FAMILY).items():
        model.bfloat16()
        model.config.use_fp8 = recipe != "none"
        model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe=recipe)) or model.fp8_recipe
        model(x, x).backward()  # a first step, because delayed scaling starts with scales of 1
        with torch.no_grad():
            logits[name] = model(x).float()
    expected = logits.pop("optimized")
    for name, y in logits.items():
        error = ((y - expected).norm() / expected.norm()).item()
        assert error <= math.sqrt(variance), f"{name}: {error:.1e}, bound {math.sqrt(variance):.1e}"


@pytest.mark.parametrize("name, use_fp8, options", [
    *((name, True, {}) for name in FAMILY), ("custom", False, {}), ("te", False, {}),
    ("advanced", True, QWEN3), ("te", True, {"bias": False, "dropout": 0.1}), ("optimized", True, QWEN3),
    ("custom", True, {"attn_dropout": 0.1, "fp8_lm_head": False}),
    ("optimized", True, {"use_pytorch_sdpa": False, "dropout": 0.1, "attn_dropout": 0.1}),
    ("optimized", False, {"use_rmsnorm": True, "activation": "swiglu", "gradient_checkpointing": True})],
    ids=str)
def test_each_model_learns_a_batch(name, use_fp8, options):
    model = make(name, **options, use_fp8=use_fp8)
    optimizer = recipes.te.optimizers.FusedAdam(model.parameters(), lr=5e-3)
    x, y = tokens(), tokens()
    losses = []
    for _ in range(12):
        loss = model(x, y)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - 4.56) < 0.3  # ln 96: nothing learned yet
    assert losses[-1] < losses[0] - 0.5
    scaled = {key.rsplit(".scaling", 1)[0] for key in recipes.get_state(model)}
    modules = 2 * (4 if name == "custom" else 3) + model.config.fp8_lm_head
    assert len(scaled) == (modules if use_fp8 else 0)


@pytest.mark.parametrize("name", FAMILY)
def test_initial_weights_are_gpt2s(name):
    for key, p in make(name, tie_embeddings=False).named_parameters():
        if p.dim() > 1:
            # 0.02 / sqrt(4) for projections onto the residual: two layers have four
            expected = 0.01 if "proj" in key or "fc2" in key else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.06), key


@pytest.mark.parametrize("name", FAMILY)
def test_dropout_applies_in_training_only(name):
    x = tokens(1, 32)
    for options in ({}, {"dropout": 0.5}, {"attn_dropout": 0.5}):
        model = make(name, n_layer=1, **options)
        with torch.no_grad():
            a, b = model.eval()(x), model.train()(x)
        assert torch.allclose(a, b, rtol=0, atol=1e-6) == (not options)


@pytest.mark.parametrize("name", FAMILY)
def test_the_loss_is_the_mean_over_labels_that_are_not_ignored(name):
    model = make_alike([name])[name]
    x = tokens()
    labels = x.roll(-1, 1)
    labels[:, 50:] = -100
    with torch.no_grad():
        loss, logits = model(x, labels), model(x)
    assert loss.shape == () and loss.dtype == torch.float32
    expected = F.cross_entropy(logits[:, :50].flatten(0, 1), labels[:, :50].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FAMILY)
def test_later_micro_batches_use_the_weights_cast_in_the_first(name):
    model = make(name, use_fp8=True, tie_embeddings=False)
    model.fp8_recipe = recipes.make(TrainConfig(fp8_recipe="current"))
    x = tokens()
    with torch.no_grad():
        first = model(x, is_first_microbatch=True)
        for key, p in model.named_parameters():
            if p.dim() > 1 and key.split(".")[0] not in ("wte", "wpe"):
                p.zero_()
        torch.testing.assert_close(model(x, is_first_microbatch=False), first, rtol=0, atol=0)
        assert model(x).abs().max() == 0


@pytest.mark.parametrize("name", also_on_a_gpu(*(name for name in FAMILY if name != "optimized")))
def test_train_py_trains_it_and_its_checkpoint_generates(name, tmp_path, capsys):
    corpus, run = make_tokens(tmp_path / "tokens"), str(tmp_path / "run")
    options = f"{OPTIONS} --device auto --model {name} --max-steps 4 --eval-interval 0 --out-dir {run}"
    assert run_train(options, corpus) == 0
    assert "--fp8-recipe delayed" in capsys.readouterr().out
    losses = [record["loss"] for record in metrics(run)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    # more tokens than the 64 positions
    assert run_script("sample.py", [run, "--prompt", "line", "--max-new-tokens", "70"]) == 0
    assert capsys.readouterr().out.startswith("line")
    assert run_train(f"--model {name} --resume --max-steps 6 --fp8-recipe none --out-dir {run}", corpus) == 0
    assert abs(metrics(run)[-1]["loss"] - losses[-1]) < 0.5
    assert read_meta(tmp_path / "run" / "step-6")["model"] == name


BAD = [({"vocab_size": 50257}, "vocab_size=50257: must be a multiple of 32 .*; 50304 works"),
       ({"n_embd": 100, "n_head": 3}, "n_embd=100: .*102 works"),
       ({"n_embd": 72, "use_fp8": True}, "n_embd=72: must be a multiple of 16 .*use_fp8=True.; 80 works"),
       ({"n_inner": 100, "use_fp8": True}, "n_inner=100: .*112 works")]


@pytest.mark.parametrize("name", FAMILY)
def test_a_bad_configuration_is_refused_in_one_line(name):
    config_class = models.model_classes(name)[1]
    for options, message in BAD:
        with pytest.raises(ValueError, match=f"^{config_class.__name__}.{message}[^\n]*$"):
            config_class(**{**TINY, **options})
    recipes.check_shapes(config_class(**TINY), 2, 64, "mxfp8")
    model = make(name, use_fp8=True)
    with pytest.raises(ValueError, match="3 x 9 = 27 tokens: FP8 needs a multiple of 16; 32 tokens work"):
        model(tokens(3, 9))
    with pytest.raises(ValueError, match="65 positions, but n_positions=64"):
        model(tokens(1, 65))


def test_an_engine_with_wrong_losses_is_refused(tmp_path):
    package = tmp_path / "transformer_engine"
    for file, text in {"__init__.py": "", "pytorch.py": "", "common/__init__.py": "",
                       "common/recipe.py": "DelayedScaling = Format = None",
                       "../transformer_engine-2.11.0.dist-info/METADATA": "Version: 2.11.0\n"}.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text)
    imports = [("te", module) for module, *_ in models.MODELS.values()]
    for line in import_errors(ROOT, imports, tmp_path):
        assert "Transformer Engine 2.18" in line, line


def step(model, times=1):
    """Train on one batch; return the losses."""
    x, losses = torch.arange(128, device=next(model.parameters()).device).view(2, 64) * 7 % 96, []
    for _ in range(times):
        loss = model(x, x.roll(-1, 1))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", also_on_a_gpu("optimized"))
def test_an_evaluation_in_inference_mode_may_come_first(name):
    losses = []
    for mode in (torch.inference_mode, torch.no_grad):
        torch.manual_seed(0)
        model, x = make(name, use_fp8=True), tokens(1, 32)
        with mode():
            model(x, x)
        losses.append(step(model, 2))
    assert losses[0] == pytest.approx(losses[1], abs=0 if recipes.IS_REFERENCE else 1e-3)


def save_and_load(model, path):
    torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", FAMILY)
def test_a_loaded_state_dict_continues_training(name, tmp_path):
    model, other = make(name, use_fp8=True), make(name, use_fp8=True)
    assert not any("scaling" in key or "_extra_state" in key for key in model.state_dict())
    step(model, 3)
    state = save_and_load(model, tmp_path / "model.pt")
    key = "lm_head.scaling_fwd.scale"
    assert state[key].dtype == torch.float32 and state[key][0] != 1
    other.load_state_dict(state)
    if recipes.IS_REFERENCE:
        assert step(model, 3) == step(other, 3)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", FAMILY)
def test_fp8_and_high_precision_load_each_others_state(name, tmp_path):
    fp8, exact = make(name, use_fp8=True), make(name)
    step(fp8)
    exact.load_state_dict(save_and_load(fp8, tmp_path / "fp8.pt"))
    assert torch.equal(exact.lm_head.weight, fp8.lm_head.weight) and recipes.get_state(exact) == {}
    other = make(name, use_fp8=True)
    other.load_state_dict(save_and_load(exact, tmp_path / "exact.pt"))
    assert step(other)[0] == pytest.approx(step(fp8)[0], abs=0.1)


def test_a_model_loads_its_own_state_dict_and_stays_float32():
    model = make("optimized", use_fp8=True)
    step(model, 2)
    before = recipes.get_state(model)
    model.load_state_dict(model.state_dict())  # the same tensors
    model.to(torch.bfloat16)
    step(copy.deepcopy(model))
    after = {key: value for key, value in model.state_dict().items() if ".scaling_" in key}
    assert after.keys() == before.keys() and model.wte.weight.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in after.values())
    assert all(torch.equal(value, before[key]) for key, value in after.items())


@pytest.mark.parametrize("name", also_on_a_gpu(*FAMILY))
def test_a_copy_continues_as_the_original_does(name):
    model = make(name, use_fp8=True)
    model.fp8_recipe = DelayedScaling(amax_history_len=2)
    step(model, 3)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    before, expected = recipes.get_state(model), step(model, 3)
    for other in copies:
        assert step(other, 3) == pytest.approx(expected, abs=0 if recipes.IS_REFERENCE else 1e-2)
        state = recipes.get_state(other)
        assert not any(torch.equal(before[key], state[key]) for key in state if "bwd.amax_history" in key)
        if recipes.IS_REFERENCE:
            assert all(torch.equal(value, state[key]) for key, value in recipes.get_state(model).items())


@pytest.mark.parametrize("name", also_on_a_gpu(*FAMILY))
def test_pytorchs_ways_to_restore_keep_the_fp8_state(name):
    model = make(name, use_fp8=True)
    step(model, 2)
    expected = model.state_dict()
    assert "lm_head.scaling_bwd.amax_history" in expected
    for way, restore in RESTORE.items():
        other = make(name, use_fp8=True)
        if way == "distributed checkpoint":  # reads into tensors that are there, so after a pass
            step(other)
        restored = restore(model, other)
        state = restored.state_dict()
        assert state.keys() == expected.keys(), way
        assert all(torch.equal(value, state[key]) for key, value in expected.items()), way
    assert step(restored) == pytest.approx(step(model), abs=0 if recipes.IS_REFERENCE else 1e-2)


def shard_and_restore():
    dist.init_process_group("gloo")
    models, full = [], StateDictOptions(full_state_dict=True)
    for _ in range(3):
        models.append(make("optimized", use_fp8=True))
        for part in (*models[-1].blocks, models[-1]):
            fully_shard(part)
    model, other, broadcast = models
    step(model, 2)
    state, before = get_model_state_dict(model, options=full), recipes.get_state(model)
    set_model_state_dict(other, dict(state), options=full)
    assert all(torch.equal(value, recipes.get_state(other)[key]) for key, value in before.items())
    assert step(other, 2) == step(model, 2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    has_state = dist.get_rank() == 0  # PyTorch sends parameters and buffers only
    with nullcontext() if has_state else pytest.warns(UserWarning, match="no FP8 scales in the state dict"):
        set_model_state_dict(broadcast, state if has_state else {}, options=options)
    assert bool(recipes.get_state(broadcast)) == has_state


@pytest.mark.skipif(torch.cuda.is_available(), reason="a fork cannot use the GPU")
def test_a_model_under_fully_shard_restores_its_fp8_state():
    fork_ranks(shard_and_restore)


class Same(torch.nn.Module):
    def forward(self, weight):
        return weight * 1.0


@pytest.mark.parametrize("name", ["optimized", "custom"])
def test_a_reparametrized_weight_keeps_its_fp8_state(name):
    plain, *models = (make(name, use_fp8=True, bias=False) for _ in range(3))
    for model in models:
        register_parametrization(model.blocks[0].attn.proj, "weight", Same())
        weight_norm(model.blocks[1].attn.proj)
    model, other = models
    assert step(model, 3) == pytest.approx(step(plain, 3), abs=0.05)
    state = model.state_dict()
    assert all(f"blocks.{layer}.attn.proj.scaling_bwd.scale" in state for layer in (0, 1))
    other.load_state_dict(state)
    assert step(other, 2) == step(model, 2)
    parameters = dict(model.named_parameters())
    loss = torch.func.functional_call(model, parameters, (tokens(), tokens()))
    loss.backward()
    assert all(p.grad is not None for p in parameters.values())


def test_weights_without_scales_are_loaded_with_a_warning():
    model, exact = make("optimized", use_fp8=True), make("optimized")
    step(model)
    before = recipes.get_state(model)
    with pytest.warns(UserWarning, match="no FP8 scales in the state dict, so the model keeps its own"):
        model.load_state_dict(exact.state_dict())
    assert torch.equal(model.lm_head.weight, exact.lm_head.weight)
    assert all(torch.equal(value, before[key]) for key, value in recipes.get_state(model).items())


COPIED = f"""
import sys, torch
for folder, name, model, config in zip(*[iter(sys.argv[1:])] * 4):
    sys.path[0] = folder
    for other in ('te_reference', 'model_te_optimized'):
        sys.modules.pop(other, None)
    module = __import__(name)
    net = getattr(module, model)(getattr(module, config)(**{TINY!r}))
    loss = net(*torch.zeros(2, 1, 8, dtype=torch.int64))
    files = [sys.modules[file].__file__ for file in (name, 'te_reference', 'model_te_optimized')]
    print(name, all(file.startswith(folder) for file in files), loss.isfinite().item())
"""


def test_each_file_runs_beside_the_files_that_it_names(tmp_path):
    arguments = []
    for name, (module, model, config) in models.MODELS.items():
        (tmp_path / name).mkdir()
        for file in {f"{module}.py", "model_te_optimized.py", "te_reference.py"}:
            shutil.copy(ROOT / file, tmp_path / name)
        arguments += [str(tmp_path / name), module, model, config]
    environment = os.environ | {"NANOTE_ENGINE": "reference", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", COPIED, *arguments], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{module} True True" for module, *_ in models.MODELS.values()]


WHAT_TO_COPY = ("; NANOTE_ENGINE=reference works on any machine, with te_reference.py beside this file; "
                "fast needs fast_kernels and a Hopper GPU, te needs TE")


IMPORT = """
import json, os, sys
if not os.environ["PYTHONPATH"]:
    sys.modules["transformer_engine"] = None
for engine, module in json.loads(sys.argv[1]):
    os.environ["NANOTE_ENGINE"] = engine
    sys.modules.pop(module, None)
    try:
        __import__(module)
    except ImportError as error:
        print("ImportError:", error)
"""


def import_errors(folder, imports, path=""):
    """Import each (engine, module) in `folder`, without a GPU; return the lines of the errors."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", IMPORT, json.dumps(imports)], cwd=folder, env=environment,
                          capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(imports), done.stdout
    return lines


def test_a_bare_copy_says_what_is_missing_and_what_to_copy(tmp_path):
    of_engines = {"reference": "No module named 'te_reference'", "te": "transformer_engine",
                  "fast": "fast_kernels"}
    modules = [module for module, *_ in models.MODELS.values()]
    for module in modules:
        shutil.copy(ROOT / f"{module}.py", tmp_path)
    imports = [*((engine, "model_te_optimized") for engine in of_engines), *(("", name) for name in modules)]
    *lines, line_of_tee = import_errors(tmp_path, [*imports, ("tee", "model_te_optimized")])
    assert line_of_tee.startswith("ImportError: NANOTE_ENGINE=tee: must be te, fast or reference; reference ")
    for line, (engine, words) in zip(lines, of_engines.items()):
        assert line.startswith(f"ImportError: engine {engine}: ") and words in line and WHAT_TO_COPY in line
    for line in lines[len(of_engines):]:
        assert "No module named 'te_reference'" in line and WHAT_TO_COPY in line and len(line) < 250


ON_HOPPER = """
import json, sys, torch
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda *device: (9, 0)
sys.modules["transformer_engine"] = None  # not installed
for folder, missing in json.loads(sys.argv[1]):
    sys.path[0] = folder
    sys.modules.pop("model_te_optimized", None)
    for name in missing:
        sys.modules[name] = None
    import model_te_optimized
    print(model_te_optimized.ENGINE)
    for name in missing:
        del sys.modules[name]
"""


def test_a_copy_on_hopper_takes_the_engine_that_is_there(tmp_path):
    pytest.importorskip("triton")
    without_kernels, with_kernels = tmp_path / "without", tmp_path / "with"
    for folder in (without_kernels, with_kernels):
        folder.mkdir()
        for file in ("model_te_optimized.py", "te_reference.py"):
            shutil.copy(ROOT / file, folder)
    shutil.copytree(ROOT / "fast_kernels", with_kernels / "fast_kernels")
    cases = [(str(without_kernels), []), (str(with_kernels), ["triton"]), (str(with_kernels), [])]
    environment = {name: value for name, value in os.environ.items() if name != "NANOTE_ENGINE"}
    done = subprocess.run([sys.executable, "-c", ON_HOPPER, json.dumps(cases)], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.stdout.split() == ["reference", "reference", "fast"], done.stderr
