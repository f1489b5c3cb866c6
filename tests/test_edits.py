"""examples/edits: each diff applies to a copy of its model file, trains in FP8 and does what it says."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from kernel_tools import HAS_GPU, _as_on_a_gpu, _plain_casts  # noqa: F401
from nanote import checkpoint, recipes
from trainer_tools import CLASSES as CLASSES_OF_FILES
from trainer_tools import make_tokens as make_corpus
from trainer_tools import run_script, run_train

DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
ROOT = Path(__file__).resolve().parent.parent
MODELS = ("fast", "optimized")
DIFFS = sorted(path for model in MODELS for path in (ROOT / "examples" / "edits" / model).glob("*.diff"))
COMPILED = sorted(path.stem for path in (ROOT / "examples" / "edits" / "compiled").glob("*.diff"))
EDITS = sorted({path.stem for path in DIFFS})
CLASSES = CLASSES_OF_FILES | {"compiled": CLASSES_OF_FILES["optimized"]}
SMALL = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_fp8=True)
PLAIN = dict(use_fp8=False, n_layer=1)


def edited(model, edits, folder):
    """Apply diffs to a copy of the model file, as the page says; return the module."""
    path = folder / "my_model.py"
    path.write_text((ROOT / f"model_te_{model.replace('compiled', 'optimized')}.py").read_text())
    for edit in edits.split():
        diff = ROOT / "examples" / "edits" / model / f"{edit}.diff"
        done = subprocess.run(["git", "apply", str(diff)], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("my_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_model"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "my_model", None)  # put back what was there

    def build(model, edit, **options):
        if model == "compiled" and HAS_GPU:  # TE, where it is installed, does not trace
            monkeypatch.setenv("NANOTE_ENGINE", "fast")
        module = edited(model, edit, tmp_path)
        model_class, config_class = (getattr(module, name) for name in CLASSES[model])
        torch.manual_seed(1)
        options = SMALL | options
        dtype = torch.bfloat16 if model == "fast" or HAS_GPU else torch.float32
        return model_class(config_class(**options)).to(DEVICE, dtype)

    return build


def make_batch(length=16 if HAS_GPU else 8):
    # in Triton's interpreter each token takes time
    tokens = torch.randint(64, (2, length + 1), device=DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def skip_without_te(edit):
    if edit == "offload" and HAS_GPU and recipes.ENGINE == "fast":
        pytest.skip("fast_kernels has no get_cpu_offload_context")


@pytest.mark.parametrize("edit, model", sorted((path.stem, path.parent.name) for path in DIFFS))
def test_the_edited_model_trains_in_fp8(edit, model, build):
    """`model(input_ids, labels)` returns the loss, which is what train.py calls."""
    skip_without_te(edit)
    net, batch = build(model, edit), make_batch()
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5 if edit == "lora" else 3):
        optimizer.zero_grad()
        loss = net(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    assert net.blocks[-1].attn.qkv.fp8_meta["recipe"].delayed()  # it ran in FP8
    for name, parameter in net.named_parameters():
        learns = parameter.requires_grad and not name.startswith("value_head")
        assert (parameter.grad is not None) == learns, name
        if parameter.dim() > 1:  # a step of 0.01 may be too small for a norm's weight in BF16
            assert torch.equal(parameter, before[name]) != learns, name


@pytest.mark.parametrize("edit", ["freeze", "lora"])
def test_recomputed_blocks_train_behind_frozen_embeddings(edit, build):
    net = build("optimized", edit, gradient_checkpointing=True)
    net(*make_batch()).backward()
    for name, parameter in net.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.parametrize("model", MODELS)
def test_what_each_edit_does(model, build):
    ids, _ = make_batch()
    trained = {name for name, p in build(model, "freeze").named_parameters() if p.requires_grad}
    assert trained and all(name.startswith("blocks.1.") for name in trained)
    learns = {name for name, p in build(model, "lora").named_parameters() if p.requires_grad}
    layers = "attn.lora_qkv", "attn.lora_proj", "mlp.lora_fc1", "mlp.lora_fc2"
    assert learns == {f"blocks.{i}.{layer}.{ab}" for i in (0, 1) for layer in layers for ab in "ab"}
    with torch.no_grad():
        logits, values = build(model, "second_head", **PLAIN)(ids)
    assert values.shape == ids.shape and logits.shape == (*ids.shape, 64)
    for edit, activation in (("relu_squared", "srelu"), ("geglu", "geglu")):
        assert build(model, edit).blocks[0].mlp.activation == activation
    assert build(model, "new_field", embedding_scale=2.0).config.embedding_scale == 2.0


@pytest.mark.parametrize("model", [*MODELS, "compiled"])
@torch.no_grad()
def test_edits_of_loss_and_attention(model, build):
    ids, labels = make_batch(length=16)
    labels[0, :3] = -100
    capped = build(model, "soft_cap", **PLAIN, softcap=0.125)
    assert 0.02 < capped(ids).abs().max() <= 0.125
    smoothed = build(model, "label_smoothing", **PLAIN)
    smoothed.lm_head.layer_norm_weight.mul_(16)  # logits of about 2, whose loss depends on the smoothing
    for net, is_training, smoothing in ((capped, True, 0), (smoothed, True, 0.1), (smoothed, False, 0)):
        flat = net.train(is_training)(ids).float().flatten(0, 1)
        expected = F.cross_entropy(flat, labels.flatten(), label_smoothing=smoothing)
        torch.testing.assert_close(net(ids, labels), expected, rtol=2e-3, atol=0)
    window = build(model, "window", **PLAIN, window=4)
    other = ids[:1].clone()
    other[0, 2] = (other[0, 2] + 1) % 64  # token 2 is in the window of tokens 2 to 5
    for training in (True, False):
        window.train(training)
        difference = (window(ids[:1]) - window(other)).abs().amax(-1)[0]
        assert (difference > 1e-4).nonzero().flatten().tolist() == [2, 3, 4, 5]
    if model == "compiled":  # in generation it is a mask
        cache = window.make_kv_cache(1, 16)
        parts = [window(ids[:1, start:end], kv_cache=cache) for start, end in ((0, 9), (9, 12), (12, 13))]
        torch.testing.assert_close(torch.cat(parts, 1), window(ids[:1])[:, :13], rtol=2e-2, atol=2e-2)
    if model == "optimized":
        for options in ({"attention": "te"}, {"attention": None, "use_pytorch_sdpa": False}):
            with pytest.raises(ValueError, match="gives te's attention no window"):
                build(model, "window", **PLAIN | options)


def losses_and_peak(net, batch):
    """Return the losses of three steps, the last gradients, and the last step's peak of memory in bytes."""
    losses, peak = [], 0
    for _ in range(3):
        net.zero_grad(set_to_none=True)
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        loss = net(*batch)
        loss.backward()
        losses.append(loss.item())
        if HAS_GPU:
            peak = torch.cuda.max_memory_allocated() - before
    return losses, [parameter.grad for parameter in net.parameters()], peak


def test_offloaded_blocks_train_alike_in_less_memory(build):
    skip_without_te("offload")
    big = SMALL | dict(vocab_size=50304, n_positions=1024, n_embd=512, n_layer=6, n_head=8, attention="auto")
    options = big if HAS_GPU else SMALL
    shape = (8, 1025) if HAS_GPU else (2, 17)
    tokens = torch.randint(options["vocab_size"], shape, device=DEVICE)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    expected, expected_gradients, most = losses_and_peak(build("optimized", "", **options), batch)
    net = build("optimized", "offload", **options, offload_blocks=options["n_layer"] // 3)
    losses, gradients, peak = losses_and_peak(net, batch)
    if not HAS_GPU:  # te_reference moves nothing
        assert losses == expected
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected_gradients))
        return
    assert losses == pytest.approx(expected, rel=2e-3)
    for ours, theirs in zip(gradients, expected_gradients):
        assert (ours - theirs).norm() <= 0.1 * theirs.norm()
    assert peak < 0.95 * most
    net.eval()
    with torch.no_grad():
        net(*batch)  # nothing is saved, so nothing is moved


TOGETHER = ("relu_squared soft_cap", "geglu label_smoothing", "residual_scale", "window")


@pytest.mark.parametrize("edit", TOGETHER)
def test_an_edit_in_plain_pytorch_is_one_graph(edit, build):
    """The compiled model trains as the uncompiled one. On a CPU PyTorch's flex_attention has no gradient."""
    assert sorted(" ".join(TOGETHER).split()) == COMPILED
    torch._dynamo.reset()
    batch, trains = make_batch(), edit != "window" or HAS_GPU

    def two_losses(compiles):
        net = build("compiled", edit, n_layer=1)
        run = torch.compile(net, backend="eager", fullgraph=True) if compiles else net
        losses = []
        for _ in range(2):
            with torch.set_grad_enabled(trains):
                loss = run(*batch)
            losses.append(loss.item())
            if trains:
                loss.backward()
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter -= 0.1 * parameter.grad
                net.zero_grad()
        return losses

    expected = two_losses(compiles=False)
    assert two_losses(compiles=True) == pytest.approx(expected, rel=1e-5)
    if edit != "window":
        assert expected[1] < expected[0]


@torch.no_grad()
def test_what_each_edit_in_plain_pytorch_does(build):
    ids, _ = make_batch()
    for edit in ("relu_squared", "geglu"):
        mlp = build("compiled", edit, **PLAIN).blocks[0].mlp
        x = torch.randn(2, 16, 32, device=DEVICE, dtype=mlp.fc1.weight.dtype)
        hidden = F.linear(F.layer_norm(x, (32,)), mlp.fc1.weight)
        if edit == "relu_squared":
            hidden = hidden.relu() ** 2
        else:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.gelu(gate, approximate="tanh") * value
        torch.testing.assert_close(mlp(x), F.linear(hidden, mlp.fc2.weight), rtol=3e-2, atol=3e-3)
    scaled = build("compiled", "residual_scale", **PLAIN)
    scaled.blocks[0].scale.zero_()
    before = scaled(ids)
    scaled.blocks[0].mlp.fc2_weight.add_(1)
    assert torch.equal(scaled(ids), before)


ON_CPU = ("relu_squared", "second_head", "lora", "new_field", "offload")


@pytest.mark.parametrize("edit", EDITS if HAS_GPU else ON_CPU)
def test_train_py_takes_every_edit(edit, tmp_path, monkeypatch):
    skip_without_te(edit)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "my_model", None)
    tokens, name = make_corpus("tokens"), "my_model.py:OptimizedGPT2Model"
    edited("optimized", edit, tmp_path)
    options = (f"--model {name} --n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 --micro-batch-size 2 "
               f"--max-steps 2 --eval-tokens 64 --device {DEVICE} --out-dir run")
    if edit == "offload":
        options += " --cuda-graph off --set offload_blocks=1"
    assert run_train(options, tokens) == 0
    if edit == "relu_squared":  # whatever train.py's --activation is
        assert checkpoint.read_meta(checkpoint.find("run"))["model_config"]["activation"] == "srelu"
    if edit == "second_head":
        argv = ["run", "--model", name, "--max-new-tokens", "4", "--device", DEVICE]
        assert run_script("sample.py", argv) == 0
