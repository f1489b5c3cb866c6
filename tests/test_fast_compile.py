"""torch.compile on the modules of fast_kernels: one graph, and the bits of uncompiled passes."""

import functools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanote import models, recipes
from test_compile import CHECKPOINTING, assert_equal, assert_first_pass, assert_trained_in_turns, make_batch
from trainer_tools import MODERN, model_file

pytest.importorskip("triton")
from fast_kernels import modules
from fast_kernels.attention import attention, packed_attention_reference
from kernel_tools import HAS_GPU, _as_on_a_gpu, _free_memory, on_gpu  # noqa: F401
from model_te_fast import FastConfig, FastGPT2Model

DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
SMALL = dict(vocab_size=96, n_positions=32, n_embd=32, n_inner=32, n_layer=1, n_head=2, use_fp8=True)
load = functools.cache(model_file)


def make_model(name="optimized", **options):
    torch.manual_seed(0)
    file, *classes = models.MODELS[name]
    build, configure = (getattr(load(file, "fast"), each) for each in classes)
    model = build(configure(**SMALL | options)).to(DEVICE, torch.bfloat16)
    model.fp8_recipe = modules.DelayedScaling(amax_history_len=3)
    return model


# compiled, dropout rounds otherwise in BF16, and a GPU draws other random numbers in attention
CHECKPOINTED = CHECKPOINTING | {"dropout": 0.0, "attn_dropout": 0.0 if HAS_GPU else 0.1}


@pytest.mark.parametrize("name, options, backend", [
    ("optimized", CHECKPOINTED, "aot_eager"), ("optimized", {"use_fp8": False}, "aot_eager"),
    ("te", {}, "eager"),
    # the same modules in other files; in Triton's interpreter each takes some seconds
    on_gpu("advanced", {}, "eager"), on_gpu("fused", {}, "eager"), on_gpu("custom", {}, "eager")])
def test_the_first_pass_of_a_compiled_model(name, options, backend):
    state_names = assert_first_pass(lambda: make_model(name, **options), backend)
    has_fp8_state = len(state_names) > 4
    assert has_fp8_state == options.get("use_fp8", True)


@pytest.mark.gpu  # takes fifteen seconds in Triton's interpreter
def test_compiled_steps_equal_uncompiled_ones():
    make = functools.partial(make_model, attention="te", n_kv_head=1, **MODERN)
    assert_trained_in_turns(make, ("aot_eager", "aot_eager"))


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.gpu  # takes ten seconds in Triton's interpreter
def test_frozen_parts_and_new_batch_sizes():
    """Frozen parts get no gradient; from the second shape on PyTorch compiles with symbolic sizes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, plain = make_model(attention="te"), make_model(attention="te")
    for model in (compiled, plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("fc1" in name or "proj.bias" in name)
    net = torch.compile(compiled, backend="eager", fullgraph=True)
    for batch, length in ((1, 16), (2, 24), (3, 16)):
        x = torch.randint(96, (batch, length), device=DEVICE)
        for model, forward in ((compiled, net), (plain, plain)):
            model.zero_grad()
            forward(x, x).backward()
        found = gradients_of(compiled)
        assert set(found) == {name for name, p in compiled.named_parameters() if p.requires_grad}
        assert_equal(list(found.values()), list(gradients_of(plain).values()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_scales_of_parts_that_run_without_gradients():
    """Frozen blocks are FP8 too, as uncompiled."""
    torch._dynamo.reset()
    states = []
    for compiles in (False, True):
        torch.manual_seed(0)
        frozen, trained = (
            modules.Linear(32, 32, device=DEVICE, params_dtype=torch.bfloat16) for _ in range(2))
        recipe = modules.DelayedScaling(amax_history_len=3)

        def run(x, frozen=frozen, trained=trained, recipe=recipe):
            with modules.autocast(recipe=recipe):
                with torch.no_grad():
                    x = frozen(x)
                return trained(x)

        net = torch.compile(run, backend="eager", fullgraph=True) if compiles else run
        for _ in range(2):
            net(torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
        tensors = []
        for module in (frozen, trained):
            for direction in ("scaling_fwd", "scaling_bwd"):
                state = module.fp8_meta[direction]
                tensors += [state.scale, state.amax_history]
        states.append(tensors)
    assert_equal(*states)
    assert frozen.fp8_meta["scaling_fwd"].scale[0] != 1


def test_a_compiled_module_inside_a_checkpoint_runs_uncompiled():
    torch._dynamo.reset()
    states = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = modules.Linear(32, 32, device=DEVICE, params_dtype=torch.bfloat16)
        net = torch.compile(module, backend="eager") if compiles else module
        with modules.autocast(recipe=modules.DelayedScaling(amax_history_len=3)):
            y = modules.checkpoint(net, torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16))
        y.sum().backward()
        states.append([module.weight.grad, module.fp8_meta["scaling_fwd"].amax_history])
    assert_equal(*states)


class InRegion(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = modules.LayerNormMLP(32, 32, device=DEVICE, params_dtype=torch.bfloat16)

    def forward(self, x):
        with modules.autocast(recipe=self.fp8_recipe):
            return self.mlp(x)


def test_another_history_compiles_anew():
    """The recipe may be replaced between passes; a resized history keeps its first rows, as uncompiled."""
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = InRegion()
        net = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
        for recipe in (modules.DelayedScaling(amax_history_len=3),
                       modules.DelayedScaling(1, modules.Format.E4M3, 5, "most_recent")):
            model.fp8_recipe = recipe
            x = torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16)
            net(x).square().mean().backward()
        results.append([*(p.grad for p in model.parameters()), *recipes.get_state(model).values()])
    assert_equal(*results)
    assert len(results[0]) > 4


def test_operations_are_registered():
    scale, history = (torch.ones(size, device=DEVICE) for size in (3, (4, 3)))
    torch.library.opcheck(torch.ops.fast_kernels.read_scales.default, (scale,))
    torch.library.opcheck(torch.ops.fast_kernels.update_one.default, (scale, history, 448.0, 0, "max"))
    q, k = (torch.randn(2, 16, heads, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2))
    torch.library.opcheck(torch.ops.fast_kernels.separate_attention.default, (q, k, k.detach(), None))


@pytest.mark.skipif(not HAS_GPU, reason="the kernels run on a GPU")
def test_inductor_losses_lie_within_the_scatter_of_sums():
    """30 steps of training, against the same model whose attention sums in another order."""
    torch._dynamo.reset()
    random = torch.Generator().manual_seed(0)
    start, stride = (torch.randint(*ends, (30, 16, 1), generator=random) for ends in ((0, 96), (1, 4)))
    tokens = ((start + stride * torch.arange(129)) % 96).to(DEVICE)

    def train(compiles, attention):
        sizes = dict(n_layer=2, n_embd=256, n_inner=1024, n_head=4, n_positions=128)
        model = make_model(attention=attention, **sizes)
        net = torch.compile(model, fullgraph=True) if compiles else model
        optimizer, losses = modules.FusedAdam(model.parameters(), lr=1e-3), []
        for rows in tokens:
            loss = net(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return torch.tensor(losses)

    expected, compiled = train(False, "te"), train(True, "te")
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        other = train(False, "sdpa")
    assert expected[-1] < expected[0] - 0.5
    assert (compiled - expected).abs().max() <= 2 * (other - expected).abs().max()


@pytest.mark.parametrize("documents", [None, [0, 5, 16, 20, 32, 32]])
def test_attention_of_separate_tensors(documents):
    """Equals that of packed ones, with its gradients."""
    torch.manual_seed(0)
    heads = (4, 2, 2)
    qkv = torch.randn(2, 16, sum(heads), 16, device=DEVICE, dtype=torch.bfloat16)
    cu_seqlens = documents and torch.tensor(documents, dtype=torch.int32, device=DEVICE)
    results = []
    for packed in (True, False):
        x = qkv.clone().requires_grad_()
        if packed:
            y = packed_attention_reference(x, 4, 2, cu_seqlens=cu_seqlens)
        else:
            y = attention(*x.split(heads, dim=2), cu_seqlens).flatten(2)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_fast_model_runs_uncompiled_or_is_refused():
    torch._dynamo.reset()
    model = FastGPT2Model(FastConfig(**SMALL)).to(DEVICE, torch.bfloat16)
    ids, labels = make_batch()
    with torch.no_grad():
        assert torch.equal(torch.compile(model)(ids, labels), model(ids, labels))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fastest in CUDA graphs"):
        torch.compile(model, fullgraph=True)(ids, labels)


def test_a_gpu_that_it_never_ran_on_is_refused_in_one_line(monkeypatch):
    for name, value in (("is_available", True), ("get_device_capability", (8, 9)),
                        ("get_device_name", "NVIDIA L4")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(modules, "unsupported_reason", modules.unsupported_reason.__wrapped__)
    with pytest.raises(ValueError, match="only run on Hopper, not on NVIDIA L4; install"):
        with modules.autocast():
            modules.Linear(32, 32, device="cpu")(torch.ones(32, 32))
