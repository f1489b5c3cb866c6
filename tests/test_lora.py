"""The edit `lora`: adapters beside every linear layer, whose gradients are compared with float32."""

import dataclasses
import functools
import importlib.util
import os
import sys
import tempfile
import unittest.mock
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from fast_kernels import casts, fused, modules
from fast_kernels.fp8 import Quantization
from fast_kernels.fused import Stream
from fast_kernels.narrow_gemm import narrow_gemm, narrow_gemm_reference
from kernel_tools import (  # noqa: F401
    DEVICE,
    HAS_GPU,
    _as_on_a_gpu,
    _free_memory,
    _plain_casts,
    _poisoned_memory,
    capture,
    on_gpu,
)
from nanote.engine import is_frozen_in_fp8
from trainer_tools import CLASSES, MODERN, make_batch, train_model, write_edit

pytestmark = [pytest.mark.gpu] if HAS_GPU else []
SMALL = dict(vocab_size=64, n_positions=16, n_embd=32, n_inner=48, n_layer=2, n_head=2, use_fp8=True)
VARIANTS = {
    "GPT-2": dict(lora_rank=16),
    "modern, grouped queries": MODERN | dict(n_kv_head=1, lora_rank=48, lora_alpha=24),
    "untied, swiglu with biases": dict(tie_embeddings=False, activation="swiglu", lora_rank=256),
    "Qwen2, some parts in BF16": MODERN | dict(
        use_qk_norm=False, qkv_bias=True, fp8_skip_first=1, fp8_lm_head=False, lora_rank=80),
}


@functools.cache
def edited(kind, engine):
    """Return the model file with the edit, as a new module that uses this engine."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_edit(Path(folder), kind, "lora")
        spec = importlib.util.spec_from_file_location(f"lora_{kind}_{engine}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        with unittest.mock.patch.dict(os.environ, NANOTE_ENGINE=engine):
            spec.loader.exec_module(module)
    return module


def build(kind, engine, dtype=None, **options):
    """Return an edited model whose norms, biases and adapters are not those of a new one."""
    model_class, config_class = (getattr(edited(kind, engine), name) for name in CLASSES[kind])
    torch.manual_seed(1)
    model = model_class(config_class(**SMALL | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            elif name.endswith(".b"):
                parameter.normal_(0.0, 0.05)
    is_bfloat16 = engine == "fast" or HAS_GPU
    return model.to(DEVICE, dtype or (torch.bfloat16 if is_bfloat16 else torch.float32))


def float32_twin(model, **options):
    """Return a model in float32 without FP8, on te_reference, with the weights of a model."""
    fields = dataclasses.asdict(model.config) | {"use_fp8": False, "lora_base": "bf16"}
    twin_config = edited("optimized", "reference").OptimizedConfig
    names = {field.name for field in dataclasses.fields(twin_config)}
    fields = {name: value for name, value in fields.items() if name in names} | options
    twin = edited("optimized", "reference").OptimizedGPT2Model(twin_config(**fields)).to(DEVICE)
    weights = {name: value.float() for name, value in model.state_dict().items() if ".scaling_" not in name}
    twin.load_state_dict(weights)
    return twin


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def run(model, batches, **options):
    """Run micro-batches of a step, whose gradients add up; return the losses."""
    losses = []
    for number, batch in enumerate(batches):
        is_first = {} if len(batches) == 1 else {"is_first_microbatch": number == 0}
        loss = model(*batch, **is_first, **options)
        loss.backward()
        losses.append(loss.item())
    return losses


ENGINES = [("optimized", "reference"), ("fast", "fast"), ("optimized", "fast")]
CASES = [(*ENGINES[0], variant) for variant in VARIANTS]
CASES += [(*ENGINES[1], "modern, grouped queries")]
CASES += [on_gpu(*engine, variant) for engine in ENGINES[1:] for variant in VARIANTS]  # each takes seconds


@pytest.mark.parametrize("kind, engine, variant", CASES)
def test_gradients_of_adapters_are_near_those_of_float32(kind, engine, variant):
    """Packed, and summed over two micro-batches. Of weights that are not an adapter's there are none."""
    layers = {} if HAS_GPU or "BF16" in variant else {"n_layer": 1}  # a CPU takes its time
    model = build(kind, engine, **VARIANTS[variant] | layers)
    batches = [make_batch(0), make_batch(1)]
    packing = {"cu_seqlens": torch.tensor([0, 5, 16, 16], dtype=torch.int32, device=DEVICE)}
    run(model, batches[:1], **packing)  # finds scales
    model.zero_grad()
    losses = run(model, batches, **packing)
    twin = float32_twin(model)
    assert losses == pytest.approx(run(twin, batches, **packing), rel=0.02)
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    assert len(names) == 2 * 4 * model.config.n_layer and all(".lora_" in name for name in names)
    expected = gradients(twin)
    for name, gradient in gradients(model).items():
        assert relative(gradient, expected[name]) < 0.2, name


def test_a_pass_sets_the_scales_of_all_gradients():
    """Of the first layer too, whose adapter reads a gradient in FP8 though its input has none."""
    model = build("fast", "fast", n_layer=1)
    run(model, [make_batch()])
    scales = {name: value for name, value in model.state_dict().items()
              if name.endswith("scaling_bwd.scale") and name.startswith("blocks.")}
    assert "blocks.0.attn.qkv.scaling_bwd.scale" in scales
    for name, scale in scales.items():
        assert (scale[::2] != 1).all(), name  # of output gradients


@pytest.mark.parametrize("kind, engine", [ENGINES[0], ENGINES[1], on_gpu(*ENGINES[2])])
def test_a_base_in_fp8_and_recomputed_blocks_change_no_bit(kind, engine, deterministic):
    twin = build(kind, engine, n_layer=1)
    run(twin, [make_batch()])  # from now on with the scales of its weights
    twin.zero_grad()
    expected_loss = None
    checkpointed = {"lora_base": "fp8_and_transpose", "gradient_checkpointing": True}
    for options in ({}, {"lora_base": "fp8"}, checkpointed):
        model = build(kind, engine, n_layer=1, **options)
        model.load_state_dict(twin.state_dict())
        is_frozen = [is_frozen_in_fp8(p) for name, p in model.blocks.named_parameters()
                     if p.dim() == 2 and ".lora_" not in name]
        assert len(is_frozen) == 4 and set(is_frozen) == {bool("lora_base" in options)}
        losses = run(model, [make_batch(1)])
        if expected_loss is None:
            expected_loss = losses
            expected = gradients(model)
        assert losses == expected_loss
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("kind, engine, way", [
    on_gpu("optimized", "fast", "compiled"), on_gpu("optimized", "fast", "in graphs"),
    on_gpu("fast", "fast", "in graphs")])
def test_adapters_train_alike_compiled_and_in_cuda_graphs(kind, engine, way, deterministic):
    torch._dynamo.reset()
    results = []
    for number in range(2):
        model = build(kind, engine, n_layer=1, lora_base="fp8")
        model.fp8_recipe.amax_history_len = 4
        run(model, [make_batch(9)])
        model.zero_grad()
        results.append(train_model(model, way if number else "from Python"))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


# ---------------------------------------------------------------- operations of fast_kernels


class Adapter:
    def __init__(self, rank, in_features, out_features, size):
        self.a = (size * torch.randn(rank, in_features, device=DEVICE)).bfloat16().requires_grad_()
        self.b = (0.3 * torch.randn(out_features, rank, device=DEVICE)).bfloat16().requires_grad_()
        self.scale = 1.5


def in_fp8(scale, dtype=torch.float8_e4m3fn):
    scale = torch.tensor([scale], device=DEVICE)
    return Quantization(scale, torch.zeros_like(scale), dtype)


def dequantized(fp8):
    return fp8.rowwise.double() * fp8.scale_inv.double()


@pytest.mark.parametrize("size", [1e-3, 0.1, 50.0])  # of a; the weight's amax is about 1
def test_an_adapter_has_no_scale_that_its_values_must_fit(size):
    """In a GEMM of both, with the weight's scale, a would be flushed to zero or saturate. Here the output and
    the gradients are those of the FP8 input and output gradient, but for rounding to BF16."""
    torch.manual_seed(0)
    layer = modules.Linear(80, 48, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
    layer.weight.requires_grad_(False)
    adapter = Adapter(32, 80, 48, size)
    x = torch.randn(16, 80, device=DEVICE).bfloat16().requires_grad_()
    dy = torch.randn(16, 48, device=DEVICE).bfloat16()
    with modules.autocast():
        y = fused.linear(x, layer, adapter=adapter).output
    y.backward(dy)
    assert layer.weight.grad is None
    exact_x = dequantized(casts.cast(x.detach(), in_fp8(1.0))[0])
    exact_dy = dequantized(casts.cast(dy, in_fp8(1.0, torch.float8_e5m2))[0])
    weight = dequantized(casts.cast(layer.weight, in_fp8(1.0))[0])
    a, b = adapter.a.detach().double(), adapter.b.detach().double()
    expected = {
        "y": (y, exact_x @ weight.T + 1.5 * exact_x @ a.T @ b.T),
        "dx": (x.grad, exact_dy @ weight + 1.5 * exact_dy @ b @ a),
        "da": (adapter.a.grad, 1.5 * (exact_dy @ b).T @ exact_x),
        "db": (adapter.b.grad, 1.5 * exact_dy.T @ (exact_x @ a.T))}
    for name, (found, value) in expected.items():
        assert relative(found, value) < 6e-3, name


@pytest.mark.parametrize("needs_dx", [False, True])
def test_each_fused_layer_gives_its_adapter_gradients(needs_dx):
    """Of a norm, of fc1 and of fc2, against the same without FP8. The first layer of a model has no dx."""
    torch.manual_seed(0)
    options = dict(device=DEVICE, params_dtype=torch.bfloat16, activation="swiglu", normalization="RMSNorm")
    mlp = modules.LayerNormMLP(64, 48, **options).requires_grad_(False)
    found = []
    for enabled in (True, False):
        torch.manual_seed(1)
        fc1, fc2 = Adapter(16, 64, 96, 0.1), Adapter(48, 48, 64, 0.1)
        x = torch.randn(32, 64, device=DEVICE).bfloat16().requires_grad_(needs_dx)
        dy = torch.randn(32, 64, device=DEVICE).bfloat16()
        for _ in range(3 if enabled else 1):  # finds scales
            tensors = [fc1.a, fc1.b, fc2.a, fc2.b, *([x] if needs_dx else [])]
            for tensor in tensors:
                tensor.grad = None
            with modules.autocast(enabled=enabled):
                stream, hidden = fused.norm_fc1(Stream(x), mlp, adapter=fc1)
                y = fused.activation_linear(hidden, mlp, adapter=fc2).value()
            y.backward(dy)
        found.append([y, *(tensor.grad for tensor in tensors)])
    in_fp8, in_bf16 = found
    for value, expected in zip(in_fp8, in_bf16):
        assert relative(value, expected) < 0.12


@pytest.mark.parametrize("rows, columns, rank, dtype", [
    (48, 80, 16, torch.float8_e4m3fn), (16, 272, 48, torch.float8_e5m2),
    (80, 160, 256, torch.float8_e4m3fn),
    *(on_gpu(rows, columns, rank, dtype) for rows, columns in ((4096, 4096), (28672, 4096), (4096, 8208))
      for rank in (16, 64, 80, 256) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2))])
def test_narrow_gemm_is_near_its_reference(rows, columns, rank, dtype):
    x = torch.randn(rows, columns, device=DEVICE).to(dtype)
    scale_inv = torch.tensor([0.3], device=DEVICE)
    w = torch.randn(rank, columns, device=DEVICE).bfloat16()
    expected = narrow_gemm_reference(x, scale_inv, w, 2.0)
    for strided in (w, w.T.contiguous().T):
        y = narrow_gemm(x, scale_inv, strided, 2.0)
        assert y.is_contiguous() and relative(y, expected) < 3e-3
        assert torch.equal(narrow_gemm(x, scale_inv, strided, 2.0, transposes=True), y.T)
    torch.library.opcheck(
        torch.ops.fast_kernels.narrow_gemm.default, (x, scale_inv, w, 2.0, True),
        test_utils=["test_faketensor"])


@pytest.mark.parametrize("changed, message", [
    ({"x": torch.zeros(16, 32)}, r"x \(16, 32\) torch.float32: must be a contiguous matrix in FP8"),
    ({"scale_inv": torch.ones(2)}, r"scale_inv \(2,\) torch.float32: must be \(1,\)"),
    ({"w": torch.zeros(16, 48)}, r"w \(16, 48\): must be \(rank, 32\)"),
    ({"w": torch.zeros(24, 32)}, "w has rank 24: must be a multiple of 16 up to 256; 16 works"),
    ({"w": torch.zeros(272, 32)}, "w has rank 272: must be a multiple of 16 up to 256"),
    ({"w": torch.zeros(16, 32)}, "w is torch.float32; it must be torch.bfloat16")])
def test_narrow_gemm_names_an_argument_that_does_not_fit(changed, message):
    arguments = {"x": torch.zeros(16, 32).to(torch.float8_e4m3fn), "scale_inv": torch.ones(1),
                 "w": torch.zeros(16, 32).bfloat16()}
    arguments = {name: tensor.to(DEVICE) for name, tensor in (arguments | changed).items()}
    with pytest.raises(ValueError, match=f"^narrow_gemm: {message}"):
        narrow_gemm(**arguments)


@pytest.mark.parametrize("a, b, message", [
    ((8, 80), (48, 8), "a has rank 8: must be a multiple of 16 up to 256; 16 works"),
    ((16, 48), (48, 16), r"a \(16, 48\) torch.bfloat16: must be \(16, 80\) torch.bfloat16"),
    ((16, 80), (48, 32), r"b \(48, 32\) torch.bfloat16: must be \(48, 16\) torch.bfloat16")])
def test_a_layer_names_an_adapters_tensor_that_does_not_fit(a, b, message):
    layer = modules.Linear(80, 48, device=DEVICE, params_dtype=torch.bfloat16)
    adapter = Adapter(16, 80, 48, 0.1)
    adapter.a = torch.zeros(a, device=DEVICE).bfloat16()
    adapter.b = torch.zeros(b, device=DEVICE).bfloat16()
    with modules.autocast(), pytest.raises(ValueError, match=f"^adapter: {message}"):
        fused.linear(torch.zeros(16, 80, device=DEVICE).bfloat16(), layer, adapter=adapter)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("options, message", [
    ({"lora_rank": 8}, r"lora_rank=8: must be a multiple of 16 up to 256; 16 works"),
    ({"lora_base": "int8"}, "lora_base='int8': must be bf16, fp8 or fp8_and_transpose")])
def test_a_wrong_field_is_named_with_its_rule(kind, options, message):
    config_class = getattr(edited(kind, "fast" if kind == "fast" else "reference"), CLASSES[kind][1])
    with pytest.raises(ValueError, match=message):
        config_class(**options)
