"""bench/fp8_arms.py: which operands of which GEMMs are in FP8, and how they are rounded."""

import functools
import json
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from bench import arms, fp8_arms, paired
from bench.step import Training, make_batches
from fast_kernels import casts, fused, loss, modules
from kernel_tools import DEVICE, HAS_GPU, _as_on_a_gpu, _free_memory, _plain_casts, capture  # noqa: F401
from model_te_fast import FastConfig, FastGPT2Model
from nanote import recipes
from nanote.config import TrainConfig

pytestmark = [pytest.mark.gpu] if HAS_GPU else []
ONE_OPERAND = ["activations", "weights", "gradients"]
# the operands of a linear layer's three GEMMs
GEMMS = [("activations", "weights"), ("gradients", "weights"), ("gradients", "activations")]
SMALL = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)


def quantized(x, scale, fp8_dtype):
    """Return Transformer Engine's FP8 values of x under delayed scaling, in BF16."""
    data, _, scale_inv = casts.quantize_reference(
        x, fused.Quantization(scale, torch.zeros(1, device=DEVICE), fp8_dtype))
    return (data.float() * scale_inv).bfloat16()


@pytest.mark.parametrize("operand", ONE_OPERAND)
def test_one_operand_of_a_linear_layer_is_quantized(operand):
    layer = modules.Linear(64, 32, params_dtype=torch.bfloat16)
    x = torch.randn(16, 64, device=DEVICE).bfloat16().requires_grad_()
    dy = torch.randn(16, 32, device=DEVICE).bfloat16()
    with fp8_arms.changed(f"fp8-{operand}"):
        for _ in range(2):  # the first pass finds the scales
            x.grad = layer.weight.grad = None
            with modules.autocast():
                y = layer(x)
            scales = [layer.fp8_meta[f"scaling_{pass_}"].scale.clone() for pass_ in ("fwd", "bwd")]
            y.backward(dy)
    forward_scale, backward_scale = scales
    values = {"activations": x.detach(), "weights": layer.weight.detach(), "gradients": dy}
    formats = {"activations": (forward_scale[:1], torch.float8_e4m3fn),
               "weights": (forward_scale[1:2], torch.float8_e4m3fn),
               "gradients": (backward_scale[:1], torch.float8_e5m2)}
    assert formats[operand][0] != 1, "the scale was found"
    values[operand] = quantized(values[operand], *formats[operand])
    x_used, weight_used, dy_used = values.values()
    for found, expected in (
            (y, F.linear(x_used, weight_used, layer.bias)), (x.grad, dy_used @ weight_used),
            (layer.weight.grad, dy_used.T @ x_used)):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)  # the order of sums


@functools.cache
def run_model(arm, use_fp8=True):
    """Return (operand a, operand b) of each FP8 GEMM of a training pass, and {name: gradient}. arm None: FP8
    as it is."""
    torch.manual_seed(1)
    model = FastGPT2Model(FastConfig(**SMALL, use_fp8=use_fp8)).to(DEVICE, torch.bfloat16)
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    operands = []
    changes = fp8_arms.changed(arm) if arm else nullcontext()
    with changes, pytest.MonkeyPatch.context() as patch:
        gemm = fused.gemm

        def recorded(a, a_scale_inv, b, b_scale_inv, *arguments, **options):
            operands.append((a, b))
            return gemm(a, a_scale_inv, b, b_scale_inv, *arguments, **options)

        patch.setattr(fused, "gemm", recorded)
        recipes.find_first_scales(model, (tokens[:, :-1], tokens[:, 1:].contiguous()), 1)
        operands.clear()
        model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
    return operands, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("operand", ONE_OPERAND)
def test_one_operand_of_each_gemm_of_a_model_is_quantized(operand):
    """5 layers: 4 of the block, and lm_head."""
    operands, gradients = run_model(f"fp8-{operand}")
    fp8_dtype = torch.float8_e5m2 if operand == "gradients" else torch.float8_e4m3fn
    expected = []
    for kinds in GEMMS:
        expected.append(tuple(fp8_dtype if kind == operand else torch.bfloat16 for kind in kinds))
    forward, dgrad, wgrad = expected
    found = [(a.dtype, b.dtype) for a, b in operands]
    assert found == 5 * [forward] + 5 * [dgrad, wgrad]
    # the first GEMM has the operands of the arm fp8
    fp8_operands, _ = run_model(None)
    for kind, own, fp8 in zip(GEMMS[0], operands[0], fp8_operands[0]):
        if kind == operand:
            assert torch.equal(own.view(torch.uint8), fp8.view(torch.uint8))
    # and gradients are BF16's, but for the rounding
    _, bf16_gradients = run_model(None, use_fp8=False)
    for name, gradient in gradients.items():
        error = (gradient - bf16_gradients[name]).norm() / bf16_gradients[name].norm()
        assert error < 0.15, name


def test_dgrad_accumulates_in_float32(monkeypatch):
    accumulations = []

    def gemm(*arguments, accumulation="precise", **others):
        accumulations.append(accumulation)

    monkeypatch.setattr(fused, "gemm", gemm)
    x = fp8_tensor(16, 32)
    fused.input_gradient(x, x)
    with fp8_arms.changed("fp8-dgrad-float32"):
        fused.input_gradient(x, x)
    fused.input_gradient(x, x)
    assert accumulations == ["either", "precise", "either"]


def test_the_forward_pass_accumulates_in_float32(monkeypatch):
    accumulations = []
    gemm = fused.gemm

    def recorded(a, a_scale_inv, b, b_scale_inv, bias=None, accumulation="precise", **others):
        accumulations.append(accumulation)
        return gemm(a, a_scale_inv, b, b_scale_inv, bias, accumulation, **others)

    monkeypatch.setattr(fused, "gemm", recorded)
    layer = modules.Linear(64, 32, params_dtype=torch.bfloat16)
    x = torch.randn(16, 64, device=DEVICE).bfloat16()
    for arm in ("fp8-scales-1", "fp8-forward-float32"):  # the first leaves accumulation as it is
        with fp8_arms.changed(arm), modules.autocast(), torch.no_grad():
            layer(x)
    assert accumulations == ["fast", "precise"]


def test_no_operand_in_fp8_is_bf16():
    operands, gradients = run_model("fp8-no-operand")
    assert {operand.dtype for pair in operands for operand in pair} == {torch.bfloat16}
    _, bf16_gradients = run_model(None, use_fp8=False)
    for name, gradient in gradients.items():
        error = (gradient - bf16_gradients[name]).norm() / bf16_gradients[name].norm()
        assert error < 0.005, name  # with gradients in FP8 it is 0.009 to 0.11


def fp8_tensor(rows, columns):
    return casts.allocate_fp8(torch.empty(0, device=DEVICE), rows, columns, torch.float8_e4m3fn)


def test_scales_of_1_are_not_found_on_the_first_batch(monkeypatch):
    monkeypatch.delenv("NANOTE_ENGINE", raising=False)
    config = TrainConfig(
        **SMALL, model="fast", dtype="bfloat16", seq_len=16, micro_batch_size=1, cuda_graph="off")
    device = torch.device(DEVICE)
    batches = make_batches(config, device)
    with fp8_arms.changed("fp8-scales-1"):
        assert recipes.is_fresh(Training(config, device, batches).model)
    assert not recipes.is_fresh(Training(config, device, batches).model)


def test_stochastic_rounding_is_right_in_the_mean():
    """Each value becomes one of its two neighbors, in proportion to the distances; subnormals do, too."""
    tiny = 2.0**-16  # the smallest number of E5M2
    rows = [  # value, its neighbors
        (1.0, 1.0, 1.0), (1.1, 1.0, 1.25), (-1.1, -1.25, -1.0), (1.24, 1.0, 1.25), (0.0, 0.0, 0.0),
        (57000.0, 49152.0, 57344.0), (60000.0, 57344.0, 57344.0), (-1e9, -57344.0, -57344.0),
        (tiny, tiny, tiny), (1.3 * tiny, tiny, 2 * tiny), (-tiny / 4, -tiny, 0.0)]
    values, lower, upper = torch.tensor(rows).T
    scale = torch.tensor([8.0], device=DEVICE)
    x = (values.to(DEVICE) / scale).expand(20000, -1)
    rounded = fp8_arms.round_stochastically(x, scale).float().cpu()
    for column in range(len(values)):
        found = set(rounded[:, column].tolist())
        assert found == {lower[column].item(), upper[column].item()}
    error = rounded.mean(0) - values.clamp(-57344, 57344)
    assert (error.abs() <= 0.02 * (upper - lower)).all()


def test_stochastic_rounding_keeps_nan():
    x = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)  # a GPU's NaN
    assert fp8_arms.round_stochastically(x, torch.ones(1, device=DEVICE)).float().isnan().all()


@pytest.mark.gpu
def test_each_replay_of_a_cuda_graph_rounds_differently():
    x = torch.full((16, 64), 1.1, device=DEVICE)
    scale = torch.ones(1, device=DEVICE)
    graph, rounded = capture(lambda: fp8_arms.round_stochastically(x, scale))
    graph.replay()
    first = rounded.float()
    graph.replay()
    assert not torch.equal(rounded.float(), first)


@pytest.mark.gpu
@pytest.mark.parametrize("arm", fp8_arms.CHANGES)
def test_an_arm_trains_in_cuda_graphs(arm):
    config = TrainConfig(
        n_layer=2, n_embd=128, n_head=2, vocab_size=512, n_positions=64, seq_len=64, micro_batch_size=8,
        model="fast", cuda_graph="on")
    batches = make_batches(config, torch.device(DEVICE))
    with fp8_arms.changed(arm):
        training = Training(config, torch.device(DEVICE), batches)
        losses = [training(batches, 1e-3)[0].item() for _ in range(10)]
    assert training.is_graph
    assert losses[-1] < losses[0] - 0.5


def test_the_gradient_of_the_logits_is_rounded_stochastically():
    """Data and transposed data of the same values, within one step of E5M2; the amax as in the arm fp8."""
    def gradient_of_logits():
        logits = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE).bfloat16()
        labels = torch.arange(32, device=DEVICE)
        lse = logits.float().logsumexp(1)
        scale = torch.tensor([2.0**14], device=DEVICE)
        amax = torch.zeros(1, device=DEVICE)
        factor = torch.tensor(1 / 32, device=DEVICE)
        tensors = loss.cast_gradient(
            logits, labels, lse, factor, 0.0, None, scale, amax, torch.float8_e5m2)
        return *tensors, amax

    rowwise, _, scale_inv, amax = gradient_of_logits()
    with fp8_arms.changed("fp8-stochastic-logits"):
        other, other_columnwise, other_inv, other_amax = gradient_of_logits()
    assert torch.equal(other_columnwise.float(), other.float().T)
    assert torch.equal(other_inv, scale_inv) and torch.equal(other_amax, amax)
    steps = other.view(torch.uint8).int() - rowwise.view(torch.uint8).int()
    assert set(steps.unique().tolist()) == {-1, 0, 1}


@pytest.mark.skipif(HAS_GPU, reason="trains on a CPU")
def test_an_arm_of_a_study_trains_with_its_change(tmp_path, tokens, monkeypatch):
    """In Triton's interpreter, the last two of seven steps, from the weights of BF16. The learning rate is so
    high that the weights are large by then, and FP8 moves the loss by 0.4 %."""
    assert [name for name, arm in arms.ARMS.items() if arm.replaces_functions] == list(fp8_arms.CHANGES)
    monkeypatch.delenv("NANOTE_ENGINE")
    tiny = dict(dtype="bfloat16", n_layer=1, seq_len=16, micro_batch_size=1, grad_accum=1, eval_tokens=16)
    monkeypatch.setitem(arms.SIZES, "tiny", arms.SIZES["tiny"] | tiny)
    monkeypatch.setitem(arms.ARMS, "fp8", arms.Arm(arms.FAST))
    path = tmp_path / "paired.json"
    code = paired.main([
        "--size", "tiny", "--tokens", "112", "--start", "0.72", "--lr", "0.05", "--seeds", "1",
        "--arms", "fp8", "fp8-gradients", "fp8-no-operand", "--data", str(tokens),
        "--out-dir", str(tmp_path), "--json", str(path)])
    assert code == 0
    bf16, fp8, gradients, no_operand = [run["losses"] for run in json.loads(path.read_text())["runs"]]
    assert fp8[:-2] == gradients[:-2] == no_operand[:-2] == bf16[:-2]
    assert gradients[-2] == no_operand[-2] == pytest.approx(bf16[-2], rel=1e-3), "forward pass in BF16"
    assert fp8[-2] != pytest.approx(bf16[-2], rel=1e-3)
    assert gradients[-1] != no_operand[-1], "after an update by gradients in FP8"
