"""The accelerated training pass computes what the modules compute: te_reference's on the CPU, Transformer
Engine's on a GPU."""

import math
import re
import sys
import types

import pytest
import torch

import te_reference
from bench.step import forget_models
from nanote import recipes
from nanote.ddp import Gradients

pytest.importorskip("triton")
import model_te_optimized  # noqa: E402
from fast_kernels import accelerate  # noqa: E402
from fast_kernels import block as fast_block  # noqa: E402
from fast_kernels import casts as fast_casts  # noqa: E402
from fast_kernels import support as fast_support  # noqa: E402
from kernel_tools import HAS_GPU, _casts_that_round, _instructions, _poisoned_memory  # noqa: E402, F401
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
SMALL = dict(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_fp8=True,
    attention="auto" if HAS_GPU else "sdpa")
MODERN = dict(
    use_rmsnorm=True, use_rotary=True, use_qk_norm=True, activation="swiglu", bias=False, n_kv_head=1,
    n_inner=48)
ONE = dict(n_layer=1)  # the interpreter takes seconds for each layer
VARIANTS = {
    "GPT-2": {},
    "modern": MODERN,
    "swiglu with biases": ONE | dict(activation="swiglu", n_inner=48),
    "RMSNorm": ONE | dict(use_rmsnorm=True),
    "no biases": ONE | dict(bias=False),
    "E4M3": ONE | dict(fp8_format="E4M3"),
    "head in BF16": ONE | dict(fp8_lm_head=False),
    "loss in parts": ONE | dict(loss_chunks=2)}
WIDE = dict(n_layer=1, n_positions=1024)
LARGE = (
    {  # options, rows and length of a batch: 8,208 tokens are no multiple of 32
        "large": (dict(n_embd=512, n_layer=6, n_head=8, n_positions=1024), (8, 1024)),
        "large and modern": (
            MODERN | dict(n_embd=512, n_layer=6, n_head=8, n_kv_head=2, n_inner=1024, n_positions=1024),
            (8, 1024)),
        "768 wide": (WIDE | dict(n_embd=768, n_head=12), (9, 912)),
        "4096 wide": (WIDE | dict(n_embd=4096, n_head=32), (9, 912)),
        "4096 wide and modern": (
            MODERN | WIDE | dict(n_embd=4096, n_head=32, n_kv_head=8, n_inner=10928),
            (9, 912)),
        "9216 wide": (WIDE | dict(n_embd=9216, n_head=72), (1, 1008))}
    if HAS_GPU
    else {})


class Float8Tensor(torch.Tensor):
    """As much of TE's as is used."""

    @staticmethod
    def __new__(cls, *, shape, dtype, data, data_transpose, fp8_scale_inv, fp8_dtype, quantizer, device):
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor._data, tensor._transpose, tensor._scale_inv, tensor._fp8_dtype = (
            data, data_transpose, fp8_scale_inv, fp8_dtype)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} wants the values of a gradient that is handed over")


def make_storage(*, data, data_transpose, fp8_scale_inv, fp8_dtype, fake_dtype):
    return types.SimpleNamespace(
        _data=data, _transpose=data_transpose, _scale_inv=fp8_scale_inv, _fp8_dtype=fp8_dtype)


class Quantizer(types.SimpleNamespace):
    def set_usage(self, rowwise, columnwise):
        assert rowwise and columnwise


gemms = []  # layout, K, whether it accumulates in float32


def general_gemm(a, b, *, layout, bias, out_dtype, out, accumulate, use_split_accumulator, grad):
    """Stand in for cuBLAS: FP8 operands have K as their last dimension."""
    assert grad == (layout != "TN")
    gemms.append((layout, (b._transpose if layout == "NT" else b._data).shape[1], use_split_accumulator))
    def side(tensor, transposed):
        name = "_transpose" if transposed else "_data"
        return getattr(tensor, name).view(tensor._fp8_dtype).float() * tensor._scale_inv
    product = side(b, layout == "NT") @ side(a, layout != "TN").T
    product = product + bias if bias is not None else product
    if out is None:
        return product.to(out_dtype), None, None, None
    assert out.dtype == out_dtype
    return out.add_(product) if accumulate else out.copy_(product), None, None, None


@pytest.fixture(autouse=True)
def modules_like_te(monkeypatch):
    """te_reference's modules with what fast_block asks TE's for."""
    if HAS_GPU:
        if fast_support.environment_reason():
            pytest.skip(fast_support.environment_reason())
        return

    def quantizers(module):
        def of(key):
            state, recipe = module.fp8_meta[key], module.fp8_meta["recipe"]
            return [
                Quantizer(
                    scale=state.scale[i], amax=state.amax_history[0, i],
                    dtype=recipe._dtype(forward=key == "scaling_fwd"))
                for i in range(len(state.scale))]
        return {key: of(key) for key in ("scaling_fwd", "scaling_bwd")}

    class FP8GlobalStateManager:
        @staticmethod
        def is_first_fp8_module():
            first, te_reference._fp8.first_module = te_reference._fp8.first_module, False
            return first

        @staticmethod
        def reduce_and_update_fp8_tensors(forward):
            te_reference._roll_histories(forward)

    module = te_reference._Module
    monkeypatch.setattr(module, "prepare_forward", lambda self, x, num_gemms=1: self._begin(x), raising=False)
    monkeypatch.setattr(module, "end_forward", module._end, raising=False)
    monkeypatch.setattr(module, "quantizers", property(quantizers), raising=False)
    dtypes = {dtype: dtype for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    for name, names in {
        "": {},
        "pytorch": {},
        "pytorch.module": {},
        "pytorch.tensor": {},
        "pytorch.constants": dict(TE_DType_To_Torch=dtypes),
        "pytorch.quantization": dict(FP8GlobalStateManager=FP8GlobalStateManager),
        "pytorch.cpp_extensions": dict(general_gemm=general_gemm),
        "pytorch.tensor.storage": {},
        "pytorch.tensor.storage.float8_tensor_storage": dict(Float8TensorStorage=make_storage),
        "pytorch.tensor.float8_tensor": dict(Float8Tensor=Float8Tensor),
    }.items():
        stub = types.ModuleType(name)
        stub.__dict__.update(names)
        monkeypatch.setitem(sys.modules, f"transformer_engine.{name}".strip("."), stub)
    monkeypatch.setattr(fast_support, "environment_reason", lambda _=None: "")
    monkeypatch.setattr(fast_support, "_runs_on_te", lambda model: True)
    package, stands_for = fast_support._package, {"te_reference": "transformer_engine"}
    monkeypatch.setattr(
        fast_support, "_package", lambda module: stands_for.get(package(module), package(module)))
    folders = fast_support._library_folders()
    monkeypatch.setattr(fast_support, "_library_folders", lambda: (*folders, te_reference.__file__))


def make_model(fused=True, fp8_format="HYBRID", **options):
    torch.manual_seed(1)
    model = OptimizedGPT2Model(OptimizedConfig(**{**SMALL, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))  # norms and biases that do something
    model.to(DEVICE, torch.bfloat16)
    model.fp8_recipe = model_te_optimized.DelayedScaling(
        fp8_format=model_te_optimized.Format[fp8_format], amax_history_len=4)
    if fused:
        accelerate(model)
    return model


def make_tokens(step, rows=2, length=16):
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(SMALL["vocab_size"], (rows, length + 1), generator=random).to(DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def state_of(model):
    return {
        f"{name}.{key}": (state.scale.clone(), state.amax_history.clone())
        for name, module in model.named_modules()
        for key, state in getattr(module, "fp8_meta", {}).items()
        if key.startswith("scaling") and len(getattr(state, "scale", []))}


def train_steps(model, steps=2, microbatches=(None,)):
    """Loss, gradients and FP8 state of each step; not of a first one, whose scales are 1 and flush gradients
    to zero, nor its maxima."""
    if not state_of(model):
        model(*make_tokens(1000)).backward()
        for module in model.modules():
            for key in ("scaling_fwd", "scaling_bwd"):
                if hasattr(getattr(module, "fp8_meta", {}).get(key), "amax_history"):
                    module.fp8_meta[key].amax_history.zero_()
    results = []
    for step in range(steps):
        model.zero_grad()
        for micro, first in enumerate(microbatches):
            loss = model(*make_tokens(10 * step + micro), is_first_microbatch=first)
            loss.backward()
        results.append(
            (loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}, state_of(model)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    return results


def count_calls(monkeypatch):
    calls, training_pass = [], fast_block.training_pass
    monkeypatch.setattr(
        fast_block, "training_pass", lambda *args: calls.append("pass") or training_pass(*args))
    return calls


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


def assert_same_training(ours, theirs, variant=None):
    """The same loss, gradients and FP8 state, as far as two ways in FP8 can be the same: see above."""
    options = VARIANTS[variant or "GPT-2"]
    form = options.get("fp8_format", "HYBRID"), options.get("activation", "gelu")
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
        for name, (scale, history) in state.items():
            for a, b in ((scale, their_state[name][0]), (history, their_state[name][1])):
                assert torch.equal(a == 0, b == 0), name  # the same tensors were quantized
                message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
                torch.testing.assert_close(a, b, rtol=tolerance, atol=0, msg=message)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_that_of_the_modules(monkeypatch, variant):
    calls, options = count_calls(monkeypatch), VARIANTS[variant]
    steps = 1 if "n_layer" in options else 2
    ours = train_steps(make_model(**options), steps)
    assert len(calls) == 1 + steps  # with the first
    theirs = train_steps(make_model(fused=False, **options), steps)
    assert len(calls) == 1 + steps
    assert_same_training(ours, theirs, variant)


def test_a_gradient_that_is_off_is_not_the_same_training():
    ours = train_steps(make_model(fused=False), steps=1)
    assert_same_training(ours, ours)
    loss, grads, state = ours[0]
    for name, factor in (("blocks.0.mlp.fc1_weight", 1.15), ("blocks.1.attn.qkv.weight", 0.85),
                         ("blocks.1.attn.proj.weight", 1.13), ("blocks.0.mlp.fc2_weight", 0.0),
                         ("wte.weight", 1.06), ("blocks.0.attn.qkv.layer_norm_weight", 1.2)):
        with pytest.raises(AssertionError, match=name):
            assert_same_training([(loss, grads | {name: factor * grads[name]}, state)], ours)


def bias_twice(real):
    return lambda activation, dy, x, bias, *rest: real(activation, dy, x, 2 * bias, *rest)


def without_the_residual(real):
    return lambda dy, residual, mean, rstd, weight, gradient, *rest, **options: real(
        dy, residual, mean, rstd, weight, None if gradient is None else 0 * gradient, *rest, **options)


def larger_norm(real):
    return lambda x, branch, bias, weight, *rest: real(x, branch, bias, 1.15 * weight, *rest)


@pytest.mark.parametrize("function, sabotage", [("activate_backward", bias_twice), ("norm", larger_norm),
                                                ("norm_backward", without_the_residual)])
def test_a_broken_kernel_is_not_the_same_training(monkeypatch, function, sabotage):
    theirs = train_steps(make_model(fused=False, **ONE), steps=1)
    monkeypatch.setattr(fast_casts, function, sabotage(getattr(fast_casts, function)))
    with pytest.raises(AssertionError, match="differs by|approx|±"):
        assert_same_training(train_steps(make_model(**ONE), steps=1), theirs)


@pytest.mark.skipif(HAS_GPU, reason="general_gemm, above, sees it; on a GPU that is Transformer Engine's")
def test_untimed_gemms_accumulate_as_in_transformer_engines_recipe():
    gemms.clear()
    make_model(**ONE)(*make_tokens(0)).backward()
    assert {(layout, k) for layout, k, _ in gemms} >= {
        ("TN", 32), ("NN", 32), ("NN", 64), ("NN", 96), ("NT", 32)}
    assert all(precise == (layout != "TN") for layout, _, precise in gemms)


@pytest.mark.skipif(HAS_GPU, reason="cuBLASLt's GEMMs have their own tests there")
@pytest.mark.parametrize("fast_k, either", [(0, set()), (64, {32, 64}), (None, {32, 64, 96, 128})])
def test_which_gemms_may_use_fast_accumulation(monkeypatch, fast_k, either):
    """Forward always, wgrad never, dgrad up to `dgrad_fast_accum_k`. None: the default."""
    asked = set()

    def gemm(a, a_scale_inv, b, b_scale_inv, bias, accumulation, out, accumulate):
        asked.add((b.dtype, a.shape[1], accumulation))  # b in E5M2: a gradient

    monkeypatch.setattr(fast_block.fast_gemm, "is_supported", lambda: True)
    # has no algorithm: Transformer Engine's GEMM runs
    monkeypatch.setattr(fast_block.fast_gemm, "gemm", gemm)
    model = make_model(**ONE)
    if fast_k is not None:
        assert accelerate(model, dgrad_fast_accum_k=fast_k).blocks == ""
    model(*make_tokens(0)).backward()
    assert {accumulation for dtype, _, accumulation in asked if dtype == torch.float8_e4m3fn} == {"fast"}
    backward = {
        accumulation: {k for dtype, k, kind in asked if dtype == torch.float8_e5m2 and kind == accumulation}
        for accumulation in ("either", "precise", "fast")}
    assert backward["either"] == either and 32 in backward["precise"] and not backward["fast"]


def test_accelerate_refuses_a_negative_k():
    with pytest.raises(ValueError, match="dgrad_fast_accum_k=-1: must be 0 or more; 3072 works"):
        accelerate(make_model(), dgrad_fast_accum_k=-1)
    with pytest.raises(ValueError, match="logits_rounding='up': must be nearest or stochastic"):
        accelerate(make_model(), logits_rounding="up")


# On a CPU Triton's interpreter takes ten seconds for each; test_training_is_that_of_the_modules has all of
# them.
@pytest.mark.parametrize("variant", [
    pytest.param(variant, marks=() if variant in ("GPT-2", "modern", "E4M3") else pytest.mark.gpu)
    for variant in (*VARIANTS, *LARGE)])
def test_gradients_are_as_near_to_the_exact_ones(variant):
    """The same weights without FP8 and in float32: the pass written out is no farther from that than the
    modules are."""
    options, size = LARGE[variant] if variant in LARGE else (VARIANTS[variant], ())
    options = options if HAS_GPU else options | ONE
    batch = make_tokens(0, *size)

    def gradients(fused, exact=False):
        model = make_model(fused, **options)
        if exact:
            model = make_model(**{**options, "use_fp8": False}).float()
        for _ in range(0 if exact else 2):  # scales are known after
            model(*batch).backward()
        model.zero_grad()
        model(*batch).backward()
        return [parameter.grad.double() for parameter in model.parameters()]

    exact = gradients(True, exact=True)
    ours, theirs = (
        torch.stack([(a - b).norm() / b.norm() for a, b in zip(gradients(fused), exact)])
        for fused in (True, False))
    assert (ours <= 1.3 * theirs + 0.01).all() and ours.mean() <= 1.1 * theirs.mean()


def test_microbatches_cast_weights_once(monkeypatch):
    casts, cast_all = [], fast_casts.cast_all
    monkeypatch.setattr(
        fast_casts, "cast_all", lambda tensors: casts.append(len(tensors[0])) or cast_all(tensors))
    ours = train_steps(make_model(**ONE), 1, (True, False, False))
    assert casts == 2 * [5]  # the first pass and a step; the four linear layers of a block, and the head
    assert_same_training(ours, train_steps(make_model(fused=False, **ONE), 1, (True, False, False)))


def test_weight_gradients_are_added_up_where_they_are_reduced(monkeypatch):
    """GEMMs write to main_grad and add to it in float32; only the small gradients come from autograd."""
    collected, copy = set(), torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda views, gradients: (
        collected.update(view.dim() for view in views), copy(views, gradients))[1])
    plain, model = (make_model(**ONE) for _ in range(2))
    gradients, expected = Gradients(model), {}
    for number in range(3):
        plain(*make_tokens(number), is_first_microbatch=number == 0).backward()
        for name, parameter in plain.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.float()
        plain.zero_grad(set_to_none=True)
        with gradients.accumulate(first=number == 0, last=number == 2):
            model(*make_tokens(number), is_first_microbatch=number == 0).backward()
    gradients.set_grad()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert error < 2.0**-8, f"{name}: {error}"  # BF16's rounding, of `expected`
    assert collected == ({1, 2} if not model.config.use_rotary else {1})  # biases, norms; positions


def test_weights_are_those_that_the_modules_cast():
    """Bytes, 1/scale and amax; and the list of addresses is written anew only where one has changed."""
    model = make_model(**ONE)
    model(*make_tokens(0)).backward()
    lists = [model.fp8_cast_table]
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        model(*make_tokens(0)).backward()
        for block in model.blocks:
            for module, name, slot in ((block.attn.qkv, "weight", 1), (block.mlp, "fc2_weight", 4)):
                weight, kept = getattr(module, name).detach(), module._fp8_workspaces[name]
                amax, dtype = torch.zeros(1, device=DEVICE), torch.float8_e4m3fn
                scale = kept._scale_inv.reciprocal()
                (by_rows, by_columns, _), _ = fast_casts.cast(weight, scale, amax, dtype)
                assert torch.equal(kept._data.view(torch.uint8), by_rows.view(torch.uint8))
                assert torch.equal(kept._transpose.view(torch.uint8), by_columns.view(torch.uint8))
                # the newest of the past ones
                assert module.fp8_meta["scaling_fwd"].amax_history[-1, slot] == weight.abs().max()
        lists.append(model.fp8_cast_table)
    assert lists[1] is lists[2]
    model.blocks[0].mlp.fc1_weight = torch.nn.Parameter(model.blocks[0].mlp.fc1_weight.detach().clone())
    model(*make_tokens(0))
    assert model.fp8_cast_table is not lists[2]


def test_the_next_step_may_go_through_the_modules():
    """Scales, histories and weights that one way leaves are the other's."""
    def run(ways):
        model, results = make_model(**ONE), []
        for fused in ways:
            if fused:
                accelerate(model)
            else:
                del model.forward
            results += train_steps(model, steps=1)
        return results

    assert_same_training(run([True, False, True]), run([False, True, False]))


def test_a_head_with_a_bias():
    """The model file makes none; an edited __init__ may."""
    results = []
    for fused in (True, False):
        model = make_model(fused, tie_embeddings=False, **ONE)
        torch.manual_seed(2)
        head = model_te_optimized.te.LayerNormLinear(32, 64, bias=True)
        with torch.no_grad():
            head.bias.normal_()
        model.lm_head = head.to(DEVICE, torch.bfloat16)
        results.append(train_steps(model, steps=1))
    assert_same_training(*results)
    assert all(grads["lm_head.bias"].any() for _, grads, _ in results[0])


@pytest.mark.multigpu
@pytest.mark.gpu
def test_another_device_gives_the_same():
    results = []
    for device in (0, 1):
        forget_models()  # Transformer Engine reduces the amax of all models together, on one device
        with torch.cuda.device(device):
            model = make_model().to(f"cuda:{device}")
            for _ in range(2):
                model.zero_grad()
                loss = model(*(tokens.to(f"cuda:{device}") for tokens in make_tokens(0)))
                loss.backward()
            assert fast_support.unsupported_reason(model) == ""
        results.append([loss.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())])
    forget_models()
    for ours, others in zip(*results):
        assert (ours - others).norm() <= 0.02 * others.norm()


def test_packed_documents(monkeypatch):
    """No token sees another document than its own."""
    calls = count_calls(monkeypatch)
    starts = torch.tensor([0, 10, 16, 20, 32], dtype=torch.int32, device=DEVICE)
    tokens, labels = make_tokens(0)
    model = make_model(use_rotary=True, **ONE)
    model(tokens, labels, cu_seqlens=starts).backward()  # scales are known after

    def loss(tokens, **options):
        only = torch.full_like(labels, -100)
        only[0, 10:] = labels[0, 10:]  # the second document's
        with recipes.preserved_state(model):
            return model(tokens, only, **options).item()

    others = tokens.clone()
    others[0, :10] = (others[0, :10] + 7) % SMALL["vocab_size"]
    others[1] = others[1].flip(0)
    assert loss(tokens, cu_seqlens=starts) == loss(others, cu_seqlens=starts)
    assert loss(tokens) != loss(others) and calls == 5 * ["pass"]


@pytest.mark.parametrize("touched", ["linear", "norm_linear"])
def test_what_is_handed_over_must_not_be_touched(monkeypatch, touched):
    """A branch, an activation's input: else a gradient in FP8 would arrive at an operation that knows nothing
    of it."""
    function = getattr(fast_block, touched)
    monkeypatch.setattr(
        fast_block, touched,
        lambda *args, **options: tuple(t * 1.0 if t is not None else t for t in function(*args, **options)))
    with pytest.raises(ValueError, match="unchanged"):
        make_model(**ONE)(*make_tokens(0))
