"""A model whose weights are frozen in FP8 is never whole in BF16: not when it is built, nor when weights are
read, nor in a step."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import test_frozen
from bench.edits import edited_file
from bench.step import Training, make_batches, make_parts
from fast_kernels import modules
from kernel_tools import _as_on_a_gpu, _free_memory, _plain_casts  # noqa: F401
from nanote import adapters, checkpoint, transfer
from nanote.config import TrainConfig
from nanote.engine import is_frozen_in_fp8
from test_lora import edited
from tools import import_hf
from trainer_tools import CLASSES, python_block, train_model

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="counts tensors on a CPU")
on_gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
LAYERS = 8
SHAPE = dict(vocab_size=288, n_head=4, n_kv_head=2, head_dim=64, n_embd=256, n_inner=512, n_layer=LAYERS,
             use_rmsnorm=True, use_rotary=True, activation="swiglu", bias=False, tie_embeddings=False)
BLOCK = 2 * 256 * (512 + 256 + 2 * 512 + 512)  # bytes in BF16 of qkv, proj, fc1 and fc2
LARGEST = 2 * 256 * 2 * 512  # of fc1, in BF16
COPIES = 4 * LARGEST  # two in float32, which quantize a weight on a CPU
# 8 blocks of 12.6 million weights
LARGE = dict(n_embd=1024, n_inner=4096, n_layer=8, n_head=8, tie_embeddings=False,
             gradient_checkpointing=True)


def is_in_high_precision(tensor):
    return tensor.itemsize > 1


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were there at once. Tensors that no operation has seen are not counted.

    counts: function of a tensor that says whether it is counted."""

    def __init__(self, counts=is_in_high_precision):
        super().__init__()
        self.counts = counts
        self.live = {}  # {address of a storage: its bytes}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            self.add(tensor)
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            self.add(tensor)
        return result

    def add(self, tensor):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not self.counts(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or storage.device.type == "meta":
            return
        self.live[key] = storage.nbytes()
        self.now += self.live[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.remove, key)

    def remove(self, key):
        self.now -= self.live.pop(key)


@on_cpu
@pytest.mark.parametrize("kind, engine", [("fast", "fast"), ("optimized", "reference")])
def test_a_model_is_built_with_one_block_in_bf16(kind, engine):
    model_class, config_class = (getattr(edited(kind, engine), name) for name in CLASSES[kind])
    config = config_class(**SHAPE, lora_base="fp8")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with PeakBytes() as memory:
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    assert len([p for p in model.parameters() if is_frozen_in_fp8(p)]) == 4 * LAYERS + 1
    assert memory.peak - memory.now < BLOCK + COPIES


@on_cpu
def test_the_model_of_the_page_freezes_half_of_its_blocks():
    names = {}
    exec(python_block("changing_the_model.md", "HalfFrozen"), names)
    model = names["HalfFrozen"](names["OptimizedConfig"](**SHAPE))
    are_frozen = [is_frozen_in_fp8(block.mlp.fc1_weight) for block in model.blocks]
    assert are_frozen == [True] * (LAYERS // 2) + [False] * (LAYERS // 2)


@pytest.fixture
def config(in_tmp_path):
    """The options of a run that trains adapters of the folder `hf`, a random Llama in BF16."""
    transformers = pytest.importorskip("transformers")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=288, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, dtype=torch.bfloat16,
    )).to(torch.bfloat16).save_pretrained("hf", max_shard_size="2MB")
    model = edited_file("optimized", "lora", Path())
    return TrainConfig(
        **SHAPE, n_positions=32, seq_len=32, micro_batch_size=1, grad_accum=1, dtype="bfloat16",
        gradient_checkpointing=True, model=f"{model}:OptimizedGPT2Model", set=(("lora_base=fp8",),),
        init_from="hf", preset="hf")


@on_cpu
def test_weights_are_read_one_at_a_time(config):
    """From a folder of Hugging Face, from a run, and from the base of a run of adapters."""
    import_hf.import_folder("hf", "imported", tokenizer="byte")

    def start_from_folder():
        stored, fields = import_hf.open_model(Path("hf"), rows=288)
        transfer.start_from_weights(config, model, optimizer, stored, fields, base=Path("hf"))

    def start_from_run():
        config.init_from = "imported"
        transfer.start_from_run(config, model, optimizer, "byte")

    def resume():
        checkpoint.load("run/step-1", model, optimizer)

    with PeakBytes() as memory:
        model, optimizer, _ = make_parts(config, CPU)
        for read in (start_from_folder, start_from_run, resume):
            memory.peak = before = memory.now
            read()
            assert memory.peak - before < LARGEST + COPIES + 2**16, read.__name__
            if read is start_from_run:
                with checkpoint.Checkpoints("run", 1, {}) as checkpoints:
                    checkpoints.save(1, model, optimizer, adapters.base_meta(model, "run"))


@on_cpu
def test_a_step_has_one_block_in_high_precision(config):
    """te_reference dequantizes it to float32, which is 2 BLOCK. With activations, and gradients of adapters,
    3.37 BLOCK are measured; a second block would be 2 more."""
    batches = make_batches(config, CPU)
    with PeakBytes() as memory:
        training = Training(config, CPU, batches)
        training(batches, 1e-5)  # makes the optimizer's state
        memory.peak = before = memory.now
        training(batches, 1e-5)
    assert memory.peak - before < 3.5 * BLOCK


def is_as_large_as_a_weight(tensor):
    """Of the layers below, in FP8. Their inputs and gradients are smaller."""
    return tensor.dtype == torch.float8_e4m3fn and tensor.numel() >= 64 * 64


@on_cpu
def test_a_backward_pass_has_one_transpose_at_a_time():
    layers = [modules.LayerNormMLP(64, 64, params_dtype=torch.bfloat16) for _ in range(3)]
    for layer in layers:
        modules.freeze_in_fp8(layer, keeps_transpose=False)
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    with PeakBytes(is_as_large_as_a_weight) as memory, modules.autocast():
        y = x
        for layer in layers:
            y = layer(y)
        memory.peak = before = memory.now
        assert before == 3 * 2 * 64 * 64
        y.sum().backward()
    assert x.grad.any()
    assert memory.peak - before == 64 * 64


@pytest.mark.gpu
@on_gpu_only
def test_transposes_take_the_memory_of_one_in_cuda_graphs():
    """With --gradient-checkpointing, eagerly and in CUDA graphs: a second byte a value is saved."""
    peaks = {}
    for keeps_transpose in (True, False):
        gc.collect()
        # Not memory_allocated: a block that the allocator reuses may be 1 MB larger than what was requested.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        model = test_frozen.build("fast", **LARGE)
        test_frozen.freeze("fast", model, ["norm", "bias"], keeps_transpose=keeps_transpose)
        values = [p.numel() for p in model.parameters() if is_frozen_in_fp8(p)]
        torch.cuda.reset_peak_memory_stats()
        train_model(model, "in graphs")
        peaks[keeps_transpose] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        del model
    assert peaks[True] - peaks[False] >= sum(values) - 2 * max(values)
