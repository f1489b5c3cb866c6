"""model_te_fast computes what model_te_optimized computes: on te_reference on the CPU, on Transformer Engine
on a GPU. And what users do with the modules of fast_kernels: freeze, edit, copy, save, checkpoint, shard."""

import copy
import functools
import itertools
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization

from bench.step import forget_models
from nanote import chunked_loss, ddp, health, recipes
from nanote.fp8_state import FP8State

pytest.importorskip("triton")
import te_reference
from fast_kernels import fused, modules
from fast_kernels.fused import Branch, Stream
from kernel_tools import HAS_GPU, _as_on_a_gpu, _free_memory, _plain_casts, on_gpu  # noqa: F401
from model_te_fast import FastConfig, FastGPT2Model
from model_te_optimized import DelayedScaling, Format, OptimizedConfig, OptimizedGPT2Model, mark_frozen
from trainer_tools import MODERN, RESTORE, model_file

DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
SMALL = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_fp8=True)
QWEN3 = MODERN | dict(n_kv_head=1, n_inner=48)
VARIANTS = {
    "GPT-2": dict(n_layer=2),
    "modern": QWEN3,
    "swiglu with biases": dict(activation="swiglu", n_inner=48),
    "Qwen2 with scaled RoPE": QWEN3 | dict(use_qk_norm=False, qkv_bias=True, rope_scaling="8:1:4:8"),
    "E4M3": dict(fp8_format="E4M3"),
    "untied": dict(tie_embeddings=False, use_rmsnorm=True),
    "parts in BF16": dict(n_layer=2, fp8_skip_first=1, fp8_lm_head=False),
}
ON_A_CPU = ("modern", "parts in BF16")  # each takes seconds there
WIDE = dict(n_positions=1024)
LARGE = {  # options, rows and length of a batch: 8,208 tokens are no multiple of 32
    "6 layers": (dict(n_embd=512, n_layer=6, n_head=8, n_positions=1024), (8, 1024)),
    "768 wide": (WIDE | dict(n_embd=768, n_head=12), (9, 912)),
    "4096 wide": (WIDE | dict(n_embd=4096, n_head=32), (9, 912)),
    "4096 wide and modern": (
        QWEN3 | WIDE | dict(n_embd=4096, n_head=32, n_kv_head=8, n_inner=10928), (9, 912)),
    "9216 wide": (WIDE | dict(n_embd=9216, n_head=16, head_dim=128, n_inner=4096), (1, 1008)),
    "16384 wide": (WIDE | dict(n_embd=16384, n_head=16, head_dim=128, n_inner=4096), (1, 1008)),
    "16 wide": (dict(n_embd=16, n_head=1), (8, 16)),
    "heads of 16": (dict(n_embd=64, n_head=4, n_positions=64), (4, 64)),
    "heads of 256": (dict(n_embd=512, n_head=2, n_positions=64), (4, 64)),
    "12 heads, 1 key head": (dict(n_embd=768, n_head=12, n_kv_head=1, n_positions=128), (4, 128)),
    "one token a row": (dict(n_positions=1), (8192, 1)),
    "16384 tokens a row": (QWEN3 | dict(n_positions=16384), (1, 16384)),
    "262144 tokens in the vocabulary": (dict(vocab_size=262144), (4, 16)),
}


def make_model(fast=True, fp8_format="HYBRID", **options):
    torch.manual_seed(1)
    options = SMALL | options
    model = FastGPT2Model(FastConfig(**options)) if fast else OptimizedGPT2Model(
        OptimizedConfig(**options, attention="auto" if HAS_GPU else "sdpa"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))  # norms and biases that do something
    model.to(DEVICE, torch.bfloat16)
    model.fp8_recipe = DelayedScaling(fp8_format=Format[fp8_format], amax_history_len=4)
    return model


def make_tokens(step, rows=2, length=16 if HAS_GPU else 8, vocab_size=64):
    # in Triton's interpreter each token takes time
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=random).to(DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def find_scales(model, batch, passes=4 if HAS_GPU else 2):
    for _ in range(passes):
        model(*batch).backward()
    model.zero_grad()


def train_step(model, find=True):
    """Return loss, gradients and FP8 state of a step."""
    if find:
        find_scales(model, make_tokens(1000))
    model.zero_grad()
    loss = model(*make_tokens(0))
    loss.backward()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
    return loss.item(), gradients, recipes.get_state(model)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_a_skipped_step_leaves_the_fp8_state_as_it_was(options):
    model = make_model(**options)
    find_scales(model, make_tokens(1000))
    fp8_state, before = FP8State(model), recipes.get_state(model)
    for factor in (float("inf"), 1.0):
        fp8_state.save()
        loss = factor * model(*make_tokens(0))
        loss.backward()
        fp8_state.restore(when=~loss.isfinite())
        after = recipes.get_state(model)
        assert all(torch.equal(after[name], value) for name, value in before.items()) == (factor > 1)


@pytest.mark.parametrize("variant, microbatches", [
    *((variant, [None]) for variant in ON_A_CPU), ("GPT-2", [True, False, False]),
    *(on_gpu(variant, [None]) for variant in (*VARIANTS, *LARGE) if variant not in ON_A_CPU)])
def test_it_trains_as_exactly_as_the_optimized_model(variant, microbatches):
    """The same weights in float32 without FP8: the fast model is no farther from that than the other one."""
    options, size = LARGE[variant] if variant in LARGE else (VARIANTS[variant], (2, 16))

    def train(fast, exact=False):
        forget_models()
        model = make_model(fast, **options | ({"use_fp8": False} if exact else {}))
        batches = [make_tokens(step, *size, model.config.vocab_size) for step in range(len(microbatches))]
        if exact:
            model.float()
        else:
            find_scales(model, batches[0])
        for batch, first in zip(batches, microbatches):
            loss = model(*batch, is_first_microbatch=first)
            loss.backward()
        return loss.item(), {n: p.grad.cpu() for n, p in model.named_parameters()}, recipes.get_state(model)

    loss, exact, _ = train(False, exact=True)
    (our_loss, ours, our_state), (their_loss, theirs, their_state) = train(True), train(False)
    assert our_loss == pytest.approx(loss, rel=3e-3) and their_loss == pytest.approx(loss, rel=3e-3)
    assert list(ours) == list(theirs) and our_state.keys() == their_state.keys()
    our_errors, their_errors = (
        torch.tensor([(grads[name] - exact[name]).norm() / exact[name].norm() for name in exact])
        for grads in (ours, theirs))
    assert (our_errors <= 1.3 * their_errors + 0.01).all()
    assert our_errors.mean() <= 1.1 * their_errors.mean() + 1e-3
    if variant in VARIANTS:
        assert our_loss == pytest.approx(their_loss, abs=4e-3)
        rtol = 0.075 if variant == "E4M3" else 0.1  # BF16 is rounded at other places
        for name, tensor in our_state.items():
            torch.testing.assert_close(tensor, their_state[name], rtol=rtol, atol=0)


# ---------------------------------------------------------------- what users do

def assert_equal(ours, theirs):
    """Assert that two results of train_step are the same bits."""
    assert ours[0] == theirs[0]
    for some, others in zip(ours[1:], theirs[1:]):
        assert some.keys() == others.keys()
        assert all(torch.equal(some[name], others[name]) for name in some)


def test_recomputed_blocks_give_the_same_bits():
    plain, recomputed = (make_model(gradient_checkpointing=on) for on in (False, True))
    assert_equal(train_step(recomputed), train_step(plain))
    gradients = []
    for model in (plain, recomputed):  # two backward passes
        model.zero_grad()
        loss = model(make_tokens(0)[0]).float().square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append(model.blocks[0].attn.qkv.weight.grad.double())
    assert (gradients[0] - gradients[1]).norm() <= 0.02 * gradients[0].norm() > 0


def test_torchs_own_checkpoint_recomputes_without_fp8():
    def run(forward):
        torch.manual_seed(0)
        layer = modules.LayerNormMLP(32, 64).to(DEVICE, torch.bfloat16)
        x = torch.randn(32, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        with modules.autocast(recipe=DelayedScaling()):
            y = forward(layer, x)
        y.float().square().sum().backward()
        return y, x.grad
    own = torch.utils.checkpoint.checkpoint
    plain, recomputed = run(lambda layer, x: layer(x)), run(modules.checkpoint)
    reentrant = run(lambda layer, x: own(layer, x, use_reentrant=True))
    assert torch.equal(recomputed[0], plain[0]) and torch.equal(recomputed[1], plain[1])
    assert torch.equal(reentrant[0], plain[0]) and not torch.equal(reentrant[1], plain[1])
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        run(lambda layer, x: own(layer, x, use_reentrant=False))


def test_weights_are_quantized_once_for_all_micro_batches():
    model = make_model()
    find_scales(model, make_tokens(0))
    with torch.no_grad():  # scales stay
        before = model(*make_tokens(0), is_first_microbatch=True).item()
        model.blocks[0].mlp.fc1_weight.zero_()
        assert model(*make_tokens(0), is_first_microbatch=False).item() == before
        assert model(*make_tokens(0), is_first_microbatch=True).item() != before


@pytest.mark.parametrize("name, tied, chunks, microbatches", [
    ("fast", False, 3, 1), ("fast", True, 1, 3), ("optimized", True, 3, 1),
    *(on_gpu(name, *options) for name in ("fast", "optimized") for options in (
        (True, 1, 1), (False, 1, 1), (True, 3, 1), (False, 3, 1), (True, 1, 3)))])
def test_the_trainers_buffers_get_what_autograd_gives(name, tied, chunks, microbatches):
    """GEMMs write to main_grad and add to it in float32; also of a tied weight, of chunks of the loss, and of
    a loss that is divided."""
    if name == "optimized":  # TE's modules in plain PyTorch style, on this engine
        module = model_file("model_te_optimized", "fast")

    def make():
        if name == "fast":
            return make_model(tie_embeddings=tied)
        torch.manual_seed(1)
        config = module.OptimizedConfig(**SMALL, tie_embeddings=tied)
        return module.OptimizedGPT2Model(config).to(DEVICE, torch.bfloat16)

    plain, model = make(), make()
    for net in (plain, model):
        find_scales(net, make_tokens(0))
        if chunks > 1:
            chunked_loss.chunk_loss(net, chunks)
    gradients, expected = ddp.Gradients(model), {}
    for number in range(microbatches):
        options = {} if microbatches == 1 else {"is_first_microbatch": number == 0}
        (plain(*make_tokens(number), **options) / 4).backward()
        for parameter_name, parameter in plain.named_parameters():
            expected[parameter_name] = expected.get(parameter_name, 0) + parameter.grad.float()
        plain.zero_grad(set_to_none=True)
        is_last = number == microbatches - 1
        with gradients.accumulate(is_first_microbatch=(number == 0), is_last_microbatch=is_last):
            (model(*make_tokens(number), **options) / 4).backward()
    gradients.set_grad()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - expected[parameter_name]).norm() / expected[parameter_name].norm()
        # BF16's rounding, of `expected`
        assert error < 2.0**(-8 if microbatches > 1 else -7), f"{parameter_name}: {error}"


class TwoPredictions(FastGPT2Model):
    """Multi-token prediction: lm_head is used twice. `lists`: which use passes its gradient to `embed`."""

    lists = True, True

    def output(self, stream, labels, is_first_microbatch, shape, tied_gradient=None):
        some = [tied_gradient if is_passed else None for is_passed in self.lists]
        loss = super().output(stream, labels, is_first_microbatch, shape, some[0])
        return loss + 0.5 * super().output(stream, labels.roll(-1, 1), is_first_microbatch, shape, some[1])


@functools.cache
def gradient_of_two_predictions(lists=(False, False), has_buffers=False):
    """Return the gradient of the tied weight, summed over two micro-batches."""
    model = make_model()
    model.__class__, model.lists = TwoPredictions, lists
    find_scales(model, make_tokens(0, 1, 16))
    gradients = ddp.Gradients(model) if has_buffers else None
    for number in range(2):
        with gradients.accumulate(number == 0, number == 1) if has_buffers else nullcontext():
            model(*make_tokens(number, 1, 16)).backward()
    if has_buffers:
        gradients.set_grad()
    return model.wte.weight.grad.double()


@pytest.mark.parametrize("lists, has_buffers", [
    ((True, True), False), *((lists, True) for lists in itertools.product((True, False), repeat=2))])
def test_a_tied_head_can_be_used_twice(lists, has_buffers):
    """Its gradient is the sum: of autograd, which adds, and in main_grad, where GEMMs write."""
    expected, found = gradient_of_two_predictions(), gradient_of_two_predictions(lists, has_buffers)
    assert (found - expected).norm() <= 2.0**-7 * expected.norm()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["one use", "two uses", "checkpointed", "chunked"])
def test_without_fp8_the_trainers_buffers_get_what_autograd_gives(tied, kind):
    """GEMMs write BF16 gradients to main_grad."""
    outcomes = []
    for has_buffers in (False, True):
        model = make_model(use_fp8=False, tie_embeddings=tied, gradient_checkpointing=kind == "checkpointed")
        if kind == "two uses":
            model.__class__ = TwoPredictions
        if kind == "chunked":
            chunked_loss.chunk_loss(model, 3)
        gradients = ddp.Gradients(model, dtype=None)
        for number in range(2):  # two steps: the second overwrites
            model.zero_grad(set_to_none=True)
            with gradients.accumulate(True, True) if has_buffers else nullcontext():
                model(*make_tokens(number)).backward()
        if has_buffers:
            gradients.set_grad()
        outcomes.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, found = outcomes
    for name in plain:
        error = (found[name].double() - plain[name].double()).norm()
        assert error <= 2.0**-8 * plain[name].double().norm(), name


def test_gradient_scales_are_found_if_one_part_is_trained():
    model, trained = make_model(), "blocks.0.mlp.fc2_weight"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == trained)
    find_scales(model, make_tokens(0))
    assert (recipes.get_state(model)["lm_head.scaling_bwd.scale"][0] != 1).all()


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_bias_alone_is_trained(in_fp8):
    """All else is frozen, the input of the first bias, too."""
    linear = modules.Linear(32, 32).to(DEVICE, torch.bfloat16)
    head = modules.LayerNormLinear(32, 64).to(DEVICE, torch.bfloat16)
    for parameter in (linear.weight, *head.parameters()):
        parameter.requires_grad_(False)
    x = torch.randn(32, 32, device=DEVICE, dtype=torch.bfloat16)
    with modules.autocast(enabled=in_fp8, recipe=DelayedScaling()):
        _, y = fused.norm_linear(Stream(x).add(fused.linear(x, linear)), head)
        y.square().mean().backward()
    assert linear.bias.grad.norm() > 0


def test_frozen_parts_get_no_gradient_the_others_keep_theirs():
    everything, model = make_model(), make_model()
    frozen = [model.wte, model.blocks[0].attn, model.blocks[0].mlp.fc1_weight]
    for part in frozen:
        part.requires_grad_(False)
    (_, expected, _), (_, found, _) = train_step(everything), train_step(model)
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_copy_trains_on_as_the_original():
    """Scales stay in float32, whatever the model is cast to."""
    model = make_model()
    train_step(model)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    before = recipes.get_state(model)
    after = recipes.get_state(model.to(torch.float32).to(torch.bfloat16))
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    expected = train_step(model, find=False)
    for other in copies:
        assert_equal(train_step(other, find=False), expected)


def test_an_edited_branch_gets_its_gradient():
    """`x * 2` between the GEMMs of a block: what flows back is dequantized, not an error."""
    linear = modules.Linear(32, 32).to(DEVICE, torch.bfloat16)
    head = modules.LayerNormLinear(32, 64).to(DEVICE, torch.bfloat16)
    x = torch.randn(32, 32, device=DEVICE, dtype=torch.bfloat16)

    def gradient(edit):
        linear.zero_grad()
        for _ in range(3):
            with modules.autocast(recipe=DelayedScaling()):
                stream = Stream(x).add(edit(fused.linear(x, linear)))
                fused.norm_linear(stream, head)[1].square().mean().backward()
            result, linear.weight.grad = linear.weight.grad, None
        return result.double()

    twice = gradient(lambda branch: Branch(branch.value() * 2))
    kept = gradient(lambda branch: Branch(branch.output * 2, 2 * branch.bias, branch.gradient_quantization))
    assert twice.norm() > 0 and (twice - kept).norm() / kept.norm() < 0.1
    x.requires_grad_()
    head.zero_grad()
    with modules.autocast(recipe=DelayedScaling()):
        stream, _ = fused.norm_linear(Stream(x).add(Branch(x * 2)), head)
        stream.value().sum().backward()  # of the stream alone
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert head.weight.grad is None  # as in PyTorch, so that no optimizer decays it


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_bias_below_the_last_bit_counts_once(in_fp8):
    """As after the first update of a GPT. Added to a branch that is already rounded, such a bias would decide
    the ties of the sum's rounding, and all values would move by several times the bias."""
    linear = modules.Linear(64, 64).to(DEVICE, torch.bfloat16)
    head = modules.LayerNormLinear(64, 64).to(DEVICE, torch.bfloat16)
    x = (0.02 * torch.randn(1024, 64, device=DEVICE)).bfloat16()
    y = (0.2 * torch.randn(1024, 64, device=DEVICE)).bfloat16()
    sums = []
    for bias in (0.0, 0.0, 1e-5):  # the first pass finds FP8's scales
        torch.nn.init.constant_(linear.bias, bias)
        with modules.autocast(enabled=in_fp8, recipe=DelayedScaling()):
            stream, _ = fused.norm_linear(Stream(x).add(fused.linear(y, linear)), head)
        sums.append(stream.value().double().mean().item())
    assert sums[2] - sums[1] == pytest.approx(1e-5, rel=0.2)


def test_the_optimized_model_on_this_engine_has_a_health():
    """Amax and saturation of each tensor: those of the optimized model on the default engine."""
    found = []
    for engine in ("fast", "te" if HAS_GPU else "reference"):
        module = model_file("model_te_optimized", engine)
        torch.manual_seed(1)
        model = module.OptimizedGPT2Model(module.OptimizedConfig(**SMALL)).to(DEVICE, torch.bfloat16)
        tokens = torch.arange(64, device=DEVICE).view(4, 16)
        model(tokens, labels=tokens).backward()
        with health.watch(model) as measured:
            model(tokens, labels=tokens).backward()
        found.append(measured)
    assert found[0].keys() == found[1].keys() >= {"blocks.0.mlp", "lm_head"}
    for name, tensors in found[0].items():
        for tensor, values in tensors.items():
            expected = found[1][name][tensor]
            assert values["amax"] == pytest.approx(expected["amax"], rel=0.1)
            assert values["saturated"] == expected["saturated"]


def test_two_models_do_not_change_each_others_scales():
    alone, beside, other = make_model(), make_model(), make_model(use_rmsnorm=True)
    find_scales(alone, make_tokens(0), passes=2)
    for _ in range(2):
        beside(*make_tokens(0)).backward()
        other(*make_tokens(3)).backward()
    state, expected = recipes.get_state(beside), recipes.get_state(alone)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("use_rotary", [True, False])
def test_packed_documents_see_their_own_tokens_only(use_rotary):
    starts = torch.tensor([0, 10, 16, 20, 32], dtype=torch.int32, device=DEVICE)
    tokens, labels = make_tokens(0, 2, 16)
    model = make_model(use_rotary=use_rotary)
    only = torch.full_like(labels, -100)
    only[0, 10:] = labels[0, 10:]  # the second document's
    others = tokens.clone()
    others[0, :10] = (others[0, :10] + 7) % 64
    others[1] = others[1].flip(0)
    with torch.no_grad():
        one, two = (model(ids, only, cu_seqlens=starts).item() for ids in (tokens, others))
        assert one == two != model(others, only).item()
    if not use_rotary:  # positions restart in each document: the second one has 6 tokens
        model(tokens, only, cu_seqlens=starts).backward()
        trained = model.wpe.weight.grad.abs().sum(1) > 0
        assert trained.tolist() == [True] * 6 + [False] * 10


def test_without_fp8_it_is_the_optimized_model():
    batch = make_tokens(0)
    losses = [make_model(fast, use_fp8=False, **QWEN3)(*batch).item() for fast in (True, False)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_fp8_autocast_is_the_older_name_of_autocast():
    layer = modules.Linear(32, 32, params_dtype=torch.bfloat16, device=DEVICE)
    with modules.fp8_autocast(enabled=True, fp8_recipe=modules.DelayedScaling(amax_history_len=2)):
        y = layer(torch.ones(16, 32, dtype=torch.bfloat16, device=DEVICE))
    y.sum().backward()
    assert layer.fp8_meta["scaling_fwd"].scale[0] == 448 and layer.fp8_meta["scaling_bwd"].scale[0] == 57344


@pytest.mark.parametrize("call, error, message", [
    (lambda: modules.Linear(64, 64, biass=False), TypeError, "Linear: unknown argument 'biass'"),
    (lambda: modules.Linear(64, 64, tp_size=2), ValueError, "tp_size=2: fast_kernels supports 1"),
    (lambda: modules.RMSNorm(64, zero_centered_gamma=True), ValueError, "zero_centered_gamma=True: fast"),
    (lambda: modules.LayerNorm(64, dtype=torch.bfloat16, gamma=1), TypeError, "unknown argument 'gamma'"),
    (lambda: modules.DelayedScaling(amax_compute_algo=len), ValueError, "supports max, most_recent"),
    (lambda: modules.LayerNormMLP(64, 64, activation="elu"), ValueError, "'elu': must be one of gelu"),
    (lambda: modules.autocast(recipe=te_reference.Float8CurrentScaling()), ValueError, "has DelayedScaling"),
    (lambda: make_model().float()(*make_tokens(0)), ValueError, r"model\.to\(torch\.bfloat16\)"),
    (lambda: make_model()(*make_tokens(0, 1, 8)), ValueError, "1 x 8 = 8 tokens: FP8 needs a multiple of 16"),
    (lambda: make_model()(*make_tokens(0, 1, 32)), ValueError, "32 positions, but n_positions=16"),
    (lambda: modules.quantized_model_init().__enter__(), ValueError, "keeps weights in BF16"),
])
def test_what_it_cannot_do_is_one_line(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_second_derivative_in_fp8_is_refused():
    """torch.autograd.grad alone would return the part of it that goes around the layer."""
    layer = modules.Linear(64, 64, params_dtype=torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    with modules.autocast():
        y = (layer(x) * x).square().sum()
    with pytest.raises(RuntimeError, match="no second derivatives in FP8; use autocast"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("fast", [True, False])
def test_a_model_under_fully_shard_restores_its_fp8_state(one_process_group, fast):
    models, options = [make_model(fast), make_model(fast)], StateDictOptions(full_state_dict=True)
    for model in models:
        for part in (*model.blocks, model):
            fully_shard(part)
    if fast:
        with pytest.raises(ValueError, match="set model.quantizes_weights_first = False"):
            models[0](*make_tokens(0))
    for model in models:
        model.quantizes_weights_first = False
    model, other = models
    find_scales(model, make_tokens(1))
    set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
    before, state = recipes.get_state(model), recipes.get_state(other)
    assert before and all(torch.equal(value, state[name]) for name, value in before.items())
    losses = [model(*make_tokens(0)).item() for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if HAS_GPU else 0)


def test_ddp_keeps_weights_frozen_in_fp8(one_process_group):
    """PyTorch's DDP copies rank 0's weights to all ranks, as the trainer's does."""
    layer = modules.Linear(32, 32, device=DEVICE, params_dtype=torch.bfloat16)
    modules.freeze_in_fp8(layer, except_for=["bias"])
    before = layer.weight.rowwise.view(torch.uint8).clone()
    replica = torch.nn.parallel.DistributedDataParallel(layer)
    with modules.autocast():
        replica(torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
    assert layer.bias.grad.count_nonzero() == 32
    ddp.distribute(layer, "ddp", grad_accum=1)
    assert torch.equal(layer.weight.rowwise.view(torch.uint8), before)


def test_weights_that_te_froze_in_fp8_are_not_sharded(one_process_group):
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(32, 32, device=DEVICE)])
    weight = model.blocks[0].weight  # in place of a tensor of TE, which needs a GPU
    weight._scale_inv = torch.ones(1, device=DEVICE)
    mark_frozen(weight)
    with pytest.raises(ValueError, match="^--parallel fsdp: does not shard Transformer Engine's .* ddp, or"):
        ddp.distribute(model, "fsdp", grad_accum=1)


def test_pytorchs_ways_to_restore_keep_the_fp8_state():
    model = make_model()
    find_scales(model, make_tokens(1))
    expected = model.state_dict()
    assert "lm_head.scaling_bwd.amax_history" in expected
    for way, restore in RESTORE.items():
        other = make_model()
        if way == "distributed checkpoint":  # reads into tensors that are there, so after a pass
            find_scales(other, make_tokens(2), passes=1)
        restored = restore(model, other)
        state = restored.state_dict()
        assert state.keys() == expected.keys(), way
        assert all(torch.equal(value, state[key]) for key, value in expected.items()), way
    assert_equal(train_step(restored, find=False), train_step(model, find=False))


def times_two(module, inputs, output):
    return output * 2


@pytest.mark.parametrize("part, hook", [
    (lambda block: block.mlp, times_two), (lambda block: block.attn, times_two),
    (lambda block: block, times_two),
    (lambda block: block.mlp, lambda module, inputs, output: (output[0], 2 * output[1])),
    (lambda block: block.mlp, lambda module, inputs, output: output + (1.0,))])
def test_a_hook_that_repeats_a_tuple_is_one_line(part, hook):
    model = make_model(use_fp8=False)
    part(model.blocks[0]).register_forward_hook(hook)
    with pytest.raises(TypeError, match=r"compute with branch.value\(\) or stream.value\(\)") as raised:
        model(*make_tokens(0))
    assert "\n" not in str(raised.value)


def test_a_hook_changes_the_output_of_the_mlp():
    model, batch = make_model(use_fp8=False), make_tokens(0)
    with torch.no_grad():
        before = model(*batch)
        model.blocks[0].mlp.register_forward_hook(
            lambda module, inputs, output: (output.stream, Branch(output.branch.value() * 2)))
        assert model(*batch) != before
        model.blocks[0].mlp.fc2_weight /= 2
        model.blocks[0].mlp.fc2_bias /= 2
        # the hook rounds the branch to BF16, which the kernel of the next norm does not
        assert model(*batch).item() == pytest.approx(before.item(), abs=2e-3)


def test_a_reentrant_checkpoint_of_a_block_is_one_line():
    model = make_model(use_fp8=False)
    forward = model.blocks[0].forward
    model.blocks[0].forward = lambda *inputs: torch.utils.checkpoint.checkpoint(
        forward, *inputs, use_reentrant=True)
    with pytest.raises(TypeError, match="a tuple, not a Stream, .* use te.checkpoint"):
        model(*make_tokens(0))


class Same(torch.nn.Module):
    def forward(self, weight):
        return weight * 1.0


def test_a_reparametrized_weight_trains_as_a_plain_one():
    plain, model = make_model(), make_model()
    register_parametrization(model.blocks[0].attn.qkv, "weight", Same())
    register_parametrization(model.blocks[0].mlp, "fc2_weight", Same())
    expected, found = train_step(plain), train_step(model)
    gradients = {name.replace("parametrizations.", "").removesuffix(".original"): gradient
                 for name, gradient in found[1].items()}
    assert_equal((found[0], gradients, found[2]), expected)


# ---------------------------------------------------------------- sharded by FSDP2

def train_microbatches(model, microbatches, is_sharded):
    """Return losses, gradients and FP8 state of the second step, whose last micro-batch reduces gradients."""
    for step in range(2):
        model.zero_grad(set_to_none=True)
        losses = []
        for micro in range(microbatches):
            if is_sharded:
                model.set_requires_gradient_sync(micro == microbatches - 1)
            first = {"is_first_microbatch": micro == 0} if microbatches > 1 else {}
            loss = model(*make_tokens(10 * step + micro), **first)
            loss.backward()
            losses.append(loss.item())
        gradients = {name: p.grad for name, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    if is_sharded:
        gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    return losses, {name: g.float() for name, g in gradients.items()}, recipes.get_state(model)


@pytest.fixture
def one_process_group():
    backend = "cpu:gloo,cuda:nccl" if HAS_GPU else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def check_bias(block, inputs, stream):
    """Fail if FSDP2, which frees a block's parameters after it, has freed the bias that it passes on."""
    bias = stream.branch.bias
    if bias is not None and bias.untyped_storage().size() == 0:
        pytest.fail("the next block would read freed memory", pytrace=False)  # no repr of the tensor


@pytest.mark.parametrize("options, microbatches", [
    (dict(n_layer=2), 2), (QWEN3 | dict(tie_embeddings=False, fp8_lm_head=False), 1),
    (dict(n_layer=2, use_fp8=False), 1), (dict(n_layer=2, fp8_skip_first=1, gradient_checkpointing=True), 1),
    (dict(n_layer=2, use_fp8=False, tie_embeddings=False, gradient_checkpointing=True), 1)])
def test_a_sharded_model_trains_as_one_that_is_not(one_process_group, options, microbatches):
    expected = train_microbatches(make_model(**options), microbatches, is_sharded=False)
    model = ddp.distribute(make_model(**options), "fsdp", microbatches)
    for block in model.blocks:
        block.register_forward_hook(check_bias)
    losses, gradients, state = train_microbatches(model, microbatches, is_sharded=True)
    # autograd sums micro-batches in BF16, FSDP2 in float32; a GPU sums attention's gradients in any order
    tolerance = 0.02 if HAS_GPU or microbatches > 1 else 0
    assert losses == pytest.approx(expected[0], rel=tolerance, abs=0)
    for name, gradient in gradients.items():
        error = (gradient - expected[1][name]).norm() / expected[1][name].norm()
        assert error <= tolerance, f"{name} differs by {error}"
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[2][name], rtol=5 * tolerance, atol=0)


def test_a_format_that_changes_in_place_is_that_of_the_next_pass():
    model = make_model()
    batch = make_tokens(0)
    projection = model.blocks[0].attn.proj
    for name, dtype in (("HYBRID", torch.float8_e5m2), ("E4M3", torch.float8_e4m3fn),
                        ("HYBRID", torch.float8_e5m2)):
        model.fp8_recipe.fp8_format = Format[name]
        model(*batch).backward()
        assert projection.gradient_quantization().fp8_dtype == dtype


def test_a_history_length_that_changes_in_place_is_that_of_the_next_pass():
    model = make_model()
    for length in (8, 4):
        model.fp8_recipe.amax_history_len = length
        model(*make_tokens(0)).backward()
        assert len(model.blocks[0].attn.proj.fp8_meta["scaling_fwd"].amax_history) == length
