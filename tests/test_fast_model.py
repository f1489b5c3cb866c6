"""model_te_fast computes what model_te_optimized computes: on te_reference on the CPU, on Transformer Engine
on a GPU. And what users do with the modules of fast_kernels: freeze, edit, copy, save, checkpoint."""

import copy
import math
import pickle
import re

import pytest
import torch
import torch.utils.checkpoint

from bench.step import forget_models
from nanote import memory, recipes
from nanote.ddp import Gradients

pytest.importorskip("triton")
import te_reference  # noqa: E402
from fast_kernels import fused, modules  # noqa: E402
from fast_kernels.fused import Branch, Stream  # noqa: E402
from kernel_tools import HAS_GPU, _as_on_a_gpu, _free_memory, _plain_casts, on_gpu  # noqa: E402, F401
from model_te_fast import FastConfig, FastGPT2Model  # noqa: E402
from model_te_optimized import DelayedScaling, Format, OptimizedConfig, OptimizedGPT2Model  # noqa: E402
from trainer_tools import model_file  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
SMALL = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_fp8=True)
MODERN = dict(use_rmsnorm=True, use_rotary=True, use_qk_norm=True, activation="swiglu", bias=False,
              n_kv_head=1, n_inner=48)
VARIANTS = {
    "GPT-2": dict(n_layer=2),
    "modern": MODERN,
    "swiglu with biases": dict(activation="swiglu", n_inner=48),
    "E4M3": dict(fp8_format="E4M3"),
    "untied": dict(tie_embeddings=False, use_rmsnorm=True),
    "parts in BF16": dict(n_layer=2, fp8_skip_first=1, fp8_lm_head=False),
}
WIDE = dict(n_positions=1024)
LARGE = {  # options, rows and length of a batch: 8,208 tokens are no multiple of 32
    "6 layers": (dict(n_embd=512, n_layer=6, n_head=8, n_positions=1024), (8, 1024)),
    "768 wide": (WIDE | dict(n_embd=768, n_head=12), (9, 912)),
    "4096 wide": (WIDE | dict(n_embd=4096, n_head=32), (9, 912)),
    "4096 wide and modern": (
        MODERN | WIDE | dict(n_embd=4096, n_head=32, n_kv_head=8, n_inner=10928), (9, 912)),
    "9216 wide": (WIDE | dict(n_embd=9216, n_head=16, head_dim=128, n_inner=4096), (1, 1008)),
    "16384 wide": (WIDE | dict(n_embd=16384, n_head=16, head_dim=128, n_inner=4096), (1, 1008)),
    "16 wide": (dict(n_embd=16, n_head=1), (8, 16)),
    "heads of 16": (dict(n_embd=64, n_head=4, n_positions=64), (4, 64)),
    "heads of 256": (dict(n_embd=512, n_head=2, n_positions=64), (4, 64)),
    "12 heads, 1 key head": (dict(n_embd=768, n_head=12, n_kv_head=1, n_positions=128), (4, 128)),
    "one token a row": (dict(n_positions=1), (8192, 1)),
    "16384 tokens a row": (MODERN | dict(n_positions=16384), (1, 16384)),
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


def make_tokens(step, rows=2, length=16, vocab_size=64):
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=random).to(DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def find_scales(model, batch, passes=4 if HAS_GPU else 2):
    for _ in range(passes):
        model(*batch).backward()
    model.zero_grad()


def train_steps(model, steps=2, microbatches=(None,), find=True):
    """Loss, gradients and FP8 state of each step."""
    if find:
        find_scales(model, make_tokens(1000))
    results = []
    for step in range(steps):
        model.zero_grad()
        for micro, first in enumerate(microbatches):
            loss = model(*make_tokens(10 * step + micro), is_first_microbatch=first)
            loss.backward()
        gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
        results.append((loss.item(), gradients, recipes.get_state(model)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
    return results


# How far may two ways through the same blocks, both in FP8, be apart? They round to BF16 at different places,
# and a value that is off by that much may round to the next number in FP8. After one cast the two differ by
# enough that the next one rounds them independently. So each cast on the way to a gradient counts as two
# independent roundings: it adds twice the variance of one to the variance of the difference.
# - Weights are the same numbers either way and round alike.
# - The residual is mostly the embedding and biases, which are not cast; branches are small beside it.
# - The gradient of the logits is mostly the -1/N at the label, the same either way: its cast does not count.
# The number of casts of gradients and of activations on the way to each gradient:
CASTS = {
    # its output gradient and that of proj or fc2; the activation as an operand, and in the derivative
    "qkv|q_norm|k_norm|fc1|mlp.layer_norm": (2, 2),
    "proj|fc2|wpe": (1, 2),  # its output gradient; its input, and what that was computed from
    "wte|lm_head": (0, 1),  # the input of the head
}


def rounding(dtype):
    """Variance of the relative error of a cast to FP8, for normal values."""
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).double()
    scaled = values * torch.finfo(dtype).max / values.abs().max()
    return ((scaled.to(dtype).double() - scaled).square().sum() / scaled.square().sum()).item()


def largest_difference(name, elements, fp8_format="HYBRID", activation="gelu"):
    """Bound of the relative difference of two gradients of a parameter.

    The square of a difference of N elements scatters by √(κ / N). κ is 2 for sums over tokens (the vectors),
    which are normal. In matrices single errors count, which are as uneven as the values: 16 for products of
    two normal values and an evenly distributed rounding error. Four standard deviations are allowed.
    """
    gradients, activations = next(casts for pattern, casts in CASTS.items() if re.search(pattern, name))
    if activation == "swiglu" and gradients:
        activations += 1  # both factors of the product come from x
    gradient_type = torch.float8_e5m2 if fp8_format == "HYBRID" else torch.float8_e4m3fn
    variance = 2 * (gradients * rounding(gradient_type) + activations * rounding(torch.float8_e4m3fn))
    kurtosis = 2 if re.search("bias|norm", name) else 16
    return math.sqrt(variance * (1 + 4 * math.sqrt(kurtosis / elements)))


def assert_same_training(ours, theirs, fp8_format="HYBRID", activation="gelu", **_):
    """The same loss, gradients and FP8 state, as far as two ways in FP8 can be the same: see above."""
    form = fp8_format, activation
    for (loss, grads, state), (their_loss, their_grads, their_state) in zip(ours, theirs, strict=True):
        # Logits have a standard deviation of 0.02 √width and differ by one cast of the head's input. The loss
        # of a token is the difference of two of them, and the mean over 32 tokens may be off by 4 standard
        # deviations.
        spread = 0.02 * math.sqrt(SMALL["n_embd"]) * math.sqrt(2 * rounding(torch.float8_e4m3fn))
        assert loss == pytest.approx(their_loss, abs=4 * spread * math.sqrt(2 / 32))
        assert grads.keys() == their_grads.keys() and state.keys() == their_state.keys()
        for name, grad in grads.items():
            difference = ((grad - their_grads[name]).norm() / their_grads[name].norm()).item()
            bound = largest_difference(name, grad.numel(), *form)
            assert difference <= bound, f"{name} differs by {difference:.3f}, bound {bound:.3f}"
        # An amax is at least three times its tensor's root mean square, and its error at most three standard
        # deviations: relative to it the error is not larger than the tensor's.
        tolerance = largest_difference("qkv", math.inf, *form)
        for name, tensor in state.items():
            assert torch.equal(tensor == 0, their_state[name] == 0), name  # the same tensors were quantized
            message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            torch.testing.assert_close(tensor, their_state[name], rtol=tolerance, atol=0, msg=message)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_trains_as_the_optimized_model(variant):
    options = VARIANTS[variant]
    ours, theirs = make_model(**options), make_model(fast=False, **options)
    for (name, parameter), (their_name, their_parameter) in zip(
            ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == their_name and torch.equal(parameter, their_parameter)  # the same initialization
    assert_same_training(train_steps(ours, 1), train_steps(theirs, 1), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [*VARIANTS, *LARGE])
def test_gradients_are_as_near_to_the_exact_ones(variant):
    """The same weights in float32 without FP8: the fast model is no farther from that than TE's modules."""
    options, size = LARGE[variant] if variant in LARGE else (VARIANTS[variant], (2, 16))
    batch = make_tokens(0, *size, options.get("vocab_size", 64))

    def gradients(fast, exact=False):
        forget_models()
        model = make_model(fast, **options | ({"use_fp8": False} if exact else {}))
        if exact:
            model.float()
        else:
            find_scales(model, batch)
        loss = model(*batch)
        loss.backward()
        return loss.item(), [parameter.grad.cpu() for parameter in model.parameters()]

    loss, exact = gradients(False, exact=True)
    errors = {}
    for fast in (True, False):
        found, grads = gradients(fast)
        errors[fast] = torch.tensor([(a - b).norm() / b.norm() for a, b in zip(grads, exact)])
        assert found == pytest.approx(loss, rel=3e-3)
    ours, theirs = errors[True], errors[False]
    assert (ours <= 1.3 * theirs + 0.01).all() and ours.mean() <= 1.1 * theirs.mean() + 1e-3


# ---------------------------------------------------------------- what users do

def assert_equal(ours, theirs):
    """Assert that two results of train_steps are the same bits."""
    for (loss, *tensors), (their_loss, *their_tensors) in zip(ours, theirs, strict=True):
        assert loss == their_loss
        for some, others in zip(tensors, their_tensors):
            assert some.keys() == others.keys()
            assert all(torch.equal(some[name], others[name]) for name in some)


def test_recomputed_blocks_give_the_same_bits():
    plain, recomputed = (make_model(gradient_checkpointing=on) for on in (False, True))
    assert_equal(train_steps(recomputed, 1), train_steps(plain, 1))
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
    microbatches = (True, False, False)
    ours, theirs = (train_steps(make_model(fast), 1, microbatches) for fast in (True, False))
    assert_same_training(ours, theirs)


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
            memory.chunk_loss(net, chunks)
    gradients, expected = Gradients(model), {}
    for number in range(microbatches):
        options = {} if microbatches == 1 else {"is_first_microbatch": number == 0}
        (plain(*make_tokens(number), **options) / 4).backward()
        for parameter_name, parameter in plain.named_parameters():
            expected[parameter_name] = expected.get(parameter_name, 0) + parameter.grad.float()
        plain.zero_grad(set_to_none=True)
        with gradients.accumulate(first=number == 0, last=number == microbatches - 1):
            (model(*make_tokens(number), **options) / 4).backward()
    gradients.set_grad()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - expected[parameter_name]).norm() / expected[parameter_name].norm()
        # BF16's rounding, of `expected`
        assert error < 2.0**(-8 if microbatches > 1 else -7), f"{parameter_name}: {error}"


def test_gradient_scales_are_found_if_one_part_is_trained():
    model, trained = make_model(), "blocks.0.mlp.fc2_weight"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == trained)
    find_scales(model, make_tokens(0))
    assert (recipes.get_state(model)["lm_head.scaling_bwd.scale"][0] != 1).all()


def test_frozen_parts_get_no_gradient_the_others_keep_theirs():
    everything, model = make_model(), make_model()
    frozen = [model.wte, model.blocks[0].attn, model.blocks[0].mlp.fc1_weight]
    for part in frozen:
        part.requires_grad_(False)
    (_, expected, _), (_, found, _) = (train_steps(m, 1)[0] for m in (everything, model))
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_copy_trains_on_as_the_original():
    """Scales stay in float32, whatever the model is cast to."""
    model = make_model()
    train_steps(model, 1)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    before = recipes.get_state(model)
    after = recipes.get_state(model.to(torch.float32).to(torch.bfloat16))
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    expected = train_steps(model, 1, find=False)
    for other in copies:
        assert_equal(train_steps(other, 1, find=False), expected)


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
    kept = gradient(lambda branch: Branch(branch.x * 2, 2 * branch.bias, branch.gradient))
    assert twice.norm() > 0 and (twice - kept).norm() / kept.norm() < 0.1
    x.requires_grad_()
    head.zero_grad()
    with modules.autocast(recipe=DelayedScaling()):
        stream, _ = fused.norm_linear(Stream(x).add(Branch(x * 2)), head)
        stream.value().sum().backward()  # of the stream alone
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert head.weight.grad is None  # as in PyTorch, so that no optimizer decays it


def test_two_models_do_not_change_each_others_scales():
    alone, beside, other = make_model(), make_model(), make_model(use_rmsnorm=True)
    find_scales(alone, make_tokens(0), passes=2)
    for _ in range(2):
        beside(*make_tokens(0)).backward()
        other(*make_tokens(3)).backward()
    state, expected = recipes.get_state(beside), recipes.get_state(alone)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_packed_documents_see_their_own_tokens_only():
    starts = torch.tensor([0, 10, 16, 20, 32], dtype=torch.int32, device=DEVICE)
    tokens, labels = make_tokens(0)
    model = make_model(use_rotary=True)
    only = torch.full_like(labels, -100)
    only[0, 10:] = labels[0, 10:]  # the second document's
    others = tokens.clone()
    others[0, :10] = (others[0, :10] + 7) % 64
    others[1] = others[1].flip(0)
    with torch.no_grad():
        one, two = (model(ids, only, cu_seqlens=starts).item() for ids in (tokens, others))
        assert one == two != model(others, only).item()


def test_without_fp8_it_is_the_optimized_model():
    batch = make_tokens(0)
    losses = [make_model(fast, use_fp8=False, **MODERN)(*batch).item() for fast in (True, False)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


@pytest.mark.parametrize("call, error, message", [
    (lambda: modules.Linear(64, 64, biass=False), TypeError, "Linear: unknown argument 'biass'"),
    (lambda: modules.Linear(64, 64, tp_size=2), ValueError, "tp_size=2: fast_kernels supports 1"),
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
