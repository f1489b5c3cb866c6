"""freeze_in_fp8: weights that are not trained and stay in FP8 alone. On Transformer Engine: on GPUs only."""

import copy
import functools
import importlib.util
import json
import math
import pickle
import shutil
import traceback

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import te_reference

pytest.importorskip("triton")
from bench.step import forget_models
from fast_kernels import modules
from kernel_tools import HAS_GPU, _as_on_a_gpu, _free_memory, _plain_casts, on_gpu  # noqa: F401
from nanote import checkpoint, parallel
from nanote.config import TrainConfig
from nanote.ddp import distribute, make_gradients
from nanote.engine import ENGINE, is_frozen_in_fp8
from nanote.frozen_shards import connect
from nanote.optimizers import make_optimizer
from nanote.recipes import round_up
from trainer_tools import (
    MODERN,
    ROOT,
    RUN_ALL,
    losses,
    make_batch,
    metrics,
    model_file,
    randomize,
    run_ranks,
    run_train,
    train_model,
    write_edit,
)

DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
SMALL = dict(vocab_size=64, n_positions=16, n_embd=32, n_inner=32, n_layer=2, n_head=2, use_fp8=True)
FILES = {  # model file, engine, model class, config class
    "reference": ("model_te_optimized", "reference", "OptimizedGPT2Model", "OptimizedConfig"),
    "fast": ("model_te_fast", "fast", "FastGPT2Model", "FastConfig"),
    "fast modules": ("model_te_optimized", "fast", "OptimizedGPT2Model", "OptimizedConfig"),
    "te": ("model_te_optimized", "te", "OptimizedGPT2Model", "OptimizedConfig"),
}
UNTIED = MODERN | {"tie_embeddings": False}
CHECKPOINTED = {"gradient_checkpointing": True}
NO_TRANSPOSE = {"keeps_transpose": False}
TRAINED = ["norm", "bias", "blocks.1.mlp.fc2"]  # the rest is frozen
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
load = functools.cache(model_file)
NEEDS_TE = pytest.mark.skipif(not HAS_TE, reason="needs Transformer Engine")
TWO_GPUS = [pytest.mark.gpu, pytest.mark.multigpu]
TWO_RANKS = TWO_GPUS if HAS_GPU else []  # each has a GPU of its own


def on_te(*values):
    return pytest.param(*values, marks=[pytest.mark.gpu, NEEDS_TE])


def freeze(name, model, except_for, **options):
    file, engine, *_ = FILES[name]
    module = load(file, engine)
    if file == "model_te_fast":
        module.te.freeze_in_fp8(model, except_for, **options)
    else:
        module.freeze_in_fp8(model, except_for, **options)


def build(name, device=DEVICE, **options):
    file, engine, model_class, config_class = FILES[name]
    module = load(file, engine)
    torch.manual_seed(1)
    model = getattr(module, model_class)(getattr(module, config_class)(**SMALL | options))
    dtype = torch.float32 if name == "reference" and not HAS_GPU else torch.bfloat16
    return randomize(model.to(device, dtype))


def frozen_weights(model):
    """Return {name: weight} of frozen weights; of a sharded one this rank's rows."""
    return {name: parallel.local_part(p) for name, p in model.named_parameters() if is_frozen_in_fp8(p)}


def frozen_bytes(model):
    """Return {name: FP8 values of a frozen weight as bytes}."""
    values = {}
    for name, weight in frozen_weights(model).items():
        fp8 = weight._data if hasattr(weight, "_data") else weight.rowwise  # the first on TE
        values[name] = fp8.view(torch.uint8).clone()
    return values


def has_transposes(model):
    """Return whether frozen weights have transposes: `_transpose` on TE, `columnwise` on fast_kernels."""
    names = ("_transpose", "columnwise")
    weights = frozen_weights(model).values()
    return any(getattr(weight, name, None) is not None for weight in weights for name in names)


def weight_slot(name):
    """Return the index of a weight in the forward scales of its module."""
    return 4 if name == "fc2_weight" else 1


def frozen_histories(model):
    """Return the amax histories of the weights that are frozen."""
    histories = []
    for name in frozen_weights(model):
        module, _, weight = name.rpartition(".")
        slot = weight_slot(weight)
        histories.append(model.get_submodule(module).fp8_meta["scaling_fwd"].amax_history[:, slot].clone())
    return histories


def pair(name, options, recipe="delayed", **freezing):
    """Return a model with frozen weights in FP8, and its twin that quantizes them in each step. Both begin
    after a pass in which the twin has found the scales of its weights."""
    if name == "te":
        forget_models()  # a graph would go on updating those of other tests
    twin = build(name, **options)
    frozen = build(name, **options)
    if recipe == "current":
        file, engine, *_ = FILES[name]
        twin.fp8_recipe = frozen.fp8_recipe = load(file, engine).te_recipe.Float8CurrentScaling()
    freeze(name, frozen, TRAINED, **freezing)
    for parameter, other in zip(twin.parameters(), frozen.parameters()):
        parameter.requires_grad_(other.requires_grad)
    twin(*make_batch(9)).backward()
    twin.zero_grad()
    frozen.load_state_dict(twin.state_dict())
    return frozen, twin


@torch.no_grad()
def loss_of(model):
    return model(*make_batch())


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def assert_same_bytes(found, expected):
    assert found.keys() == expected.keys()
    for name, data in expected.items():
        assert torch.equal(found[name], data), name


def assert_trains_as_its_twin(frozen, twin, way="from Python", keeps_fp8_weights=True):
    """keeps_fp8_weights: of the twin, see `train_model`."""
    before = frozen_bytes(frozen)
    assert_equal(train_model(frozen, way), train_model(twin, way, keeps_fp8_weights))
    after = frozen_bytes(frozen)
    assert len(after) == 8 - 1 + (not twin.config.tie_embeddings)  # all GEMMs but fc2 of the last block
    assert_same_bytes(after, before)
    for key, value in frozen.state_dict().items():
        if key.endswith(".scale"):
            assert torch.equal(value, twin.state_dict()[key]), key


@pytest.mark.parametrize("name, options, freezing, way", [
    ("reference", {}, {}, "from Python"), ("reference", UNTIED | CHECKPOINTED, {}, "from Python"),
    ("reference", {}, {"recipe": "current"}, "from Python"),
    ("fast", UNTIED | CHECKPOINTED, NO_TRANSPOSE, "from Python"), ("fast modules", {}, {}, "from Python"),
    # the same in other combinations; in Triton's interpreter each takes some seconds
    on_gpu("fast", {}, {}, "in graphs"), on_gpu("fast", CHECKPOINTED, {}, "from Python"),
    on_gpu("fast", UNTIED, NO_TRANSPOSE, "in graphs"),
    on_gpu("fast modules", UNTIED | CHECKPOINTED, NO_TRANSPOSE, "from Python"),
    on_gpu("fast modules", UNTIED, NO_TRANSPOSE, "in graphs"), on_gpu("fast modules", {}, {}, "compiled"),
    on_te("te", {}, {}, "from Python"), on_te("te", UNTIED | CHECKPOINTED, NO_TRANSPOSE, "from Python"),
    on_te("te", {}, {}, "in graphs"), on_te("te", UNTIED, NO_TRANSPOSE, "in graphs"),
    # TE refuses delayed scaling under torch.compile
    on_te("te", {}, {"recipe": "current"}, "compiled"),
])
def test_training_beside_frozen_weights_changes_no_bit(name, options, freezing, way, deterministic):
    frozen, twin = pair(name, options, **freezing)
    fails = name == "te" and way == "compiled"  # torch.compile does not trace FP8 weights that TE keeps
    assert_trains_as_its_twin(frozen, twin, way, keeps_fp8_weights=not fails)
    if freezing == NO_TRANSPOSE:
        assert not has_transposes(frozen.blocks[1])


@pytest.mark.parametrize("name", ["reference", "fast modules"])
def test_a_pass_leaves_the_amax_histories_of_frozen_weights(name):
    frozen, _ = pair(name, {"n_layer": 1})
    before = frozen_histories(frozen)
    frozen(*make_batch()).backward()
    assert_equal(frozen_histories(frozen), before)


ON_RANKS = """
import sys
sys.path[:0] = sys.argv[1:3]
from test_frozen import compare_on_ranks

compare_on_ranks(*sys.argv[3:])
"""


def compare_on_ranks(name, kind):
    """Train a pair of models on this rank. Rank 0 gives its weights to the others. kind: of --parallel."""
    parallel.start()
    try:
        if HAS_GPU:
            torch.cuda.set_device(parallel.rank())
            torch.use_deterministic_algorithms(True)
        frozen, twin = pair(name, {
            "n_inner": 16, "tie_embeddings": kind == "ddp", "gradient_checkpointing": kind == "hsdp"})
        whole = copy.deepcopy(frozen)
        if parallel.rank() > 0:
            for weight in frozen_weights(frozen).values():
                weight.copy_(torch.zeros(weight.shape, dtype=weight.dtype, device=DEVICE))
        for model in (frozen, twin):
            distribute(model, kind, grad_accum=2)
        assert_trains_as_its_twin(frozen, twin)
        if kind != "ddp":
            assert_is_sharded(frozen, whole)
            assert_loads_as_whole(frozen, whole)
            assert_stays_frozen(distribute(whole, kind, grad_accum=2))
    except BaseException:  # at an ordinary exit a rank would wait for the other
        traceback.print_exc()
        parallel.end_process(1)
    parallel.end_process(0)


def gathered_bytes(model):
    """Gather the weights of a sharded model, and return {name: FP8 values of a frozen weight as bytes}."""
    units = (model, *model.blocks)
    for unit in units:
        unit.unshard()
    found = frozen_bytes(model)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    gathered = [weight.rowwise for weight in frozen_weights(model).values()]
    for unit in units:
        unit.reshard()
    assert [data.untyped_storage().nbytes() for data in gathered] == [0] * len(found), "freed"
    return found


def assert_is_sharded(model, whole):
    """A rank keeps one byte a value of its rows, and gathers the bytes of the whole weight."""
    for name, weight in frozen_weights(whole).items():
        parameter = model.get_parameter(name)
        rows = math.ceil(len(weight) / mesh_size(parameter))  # FSDP2 allocates as many on each rank
        part = parallel.local_part(parameter).rowwise
        assert part.untyped_storage().nbytes() == rows * weight.shape[1], name
    assert_same_bytes(gathered_bytes(model), frozen_bytes(whole))


def mesh_size(parameter):
    return parameter.device_mesh["shard"].size()


def assert_loads_as_whole(model, whole):
    """A sharded model has the values of the whole one in its state dict, and quantizes others likewise."""
    options = StateDictOptions(full_state_dict=True)
    values = get_model_state_dict(model, options=options)
    for name, weight in frozen_weights(whole).items():
        assert torch.equal(values[name], weight.dequantize()), name
        values[name] = -3 * values[name].flip(0)
    set_model_state_dict(model, dict(values), options=options)
    whole.load_state_dict(values)
    assert_same_bytes(gathered_bytes(model), frozen_bytes(whole))
    for name, weight in frozen_weights(whole).items():
        assert torch.equal(model.get_parameter(name).scale, weight.scale), name
    with pytest.raises(ValueError, match="has FP8 values without their scale"):
        model.load_state_dict(model.state_dict(keep_vars=True))


def assert_stays_frozen(model):
    """Shards that are to be trained, or whose values were converted without their scale, are an error."""
    name = next(iter(frozen_weights(model)))
    model.get_parameter(name).requires_grad_(True)
    with pytest.raises(ValueError, match="frozen in FP8 and sharded, so it cannot be"):
        model(*make_batch())
    model.get_parameter(name).requires_grad_(False)
    model(*make_batch())
    model.float()
    for use in (lambda: model(*make_batch()), lambda: connect(model)):
        with pytest.raises(ValueError, match="frozen in FP8 and sharded, so it cannot be"):
            use()


def run_on_ranks(program, argv, count=2, machines=1):
    """Run a program on several ranks, of one machine or as if they were on several."""
    gpus = ",".join(map(str, range(count)))
    run_ranks(program, argv, count, CUDA_VISIBLE_DEVICES=gpus, LOCAL_WORLD_SIZE=str(count // machines),
              CUBLAS_WORKSPACE_CONFIG=":4096:8")


@pytest.mark.parametrize("name, kind", [
    pytest.param("reference", "ddp", marks=TWO_RANKS), pytest.param("fast", "ddp", marks=TWO_GPUS),
    pytest.param("te", "ddp", marks=[*TWO_GPUS, NEEDS_TE]),
    pytest.param("reference", "fsdp", marks=TWO_RANKS), pytest.param("fast modules", "fsdp", marks=TWO_RANKS),
    pytest.param("fast", "fsdp", marks=TWO_GPUS)])
def test_frozen_weights_change_no_bit_on_two_ranks(name, kind):
    run_on_ranks(ON_RANKS, [str(ROOT), str(ROOT / "tests"), name, kind])


@pytest.mark.parametrize("engine", [te_reference, modules])
def test_other_strides_give_other_values(engine):
    """Not the weight itself, as for FSDP2, which asks for its own strides."""
    linear = engine.Linear(32, 32, params_dtype=torch.bfloat16, device=DEVICE)
    engine.freeze_in_fp8(linear)
    values = linear.weight.dequantize()
    assert torch.equal(linear.weight.as_strided((32, 32), (32, 1)).dequantize(), values)
    assert torch.equal(linear.weight.as_strided((32, 32), (1, 32)), values.T)


@pytest.mark.skipif(HAS_GPU, reason="needs as many GPUs as ranks")
@pytest.mark.parametrize("name, kind, count, machines", [
    ("reference", "fsdp", 5, 1), ("fast modules", "fsdp", 5, 1), ("reference", "hsdp", 4, 2)])
def test_frozen_weights_change_no_bit_on_more_ranks(name, kind, count, machines):
    """Five ranks cannot divide the rows, and the last one has none of fc1's 16."""
    run_on_ranks(ON_RANKS, [str(ROOT), str(ROOT / "tests"), name, kind], count, machines)


@pytest.mark.parametrize("engine, module, sizes", [
    (te_reference, "LayerNormLinear", (32, 48)), (modules, "Linear", (32, 48)),
    on_gpu(modules, "LayerNormMLP", (32, 32)),  # in Triton's interpreter it takes eight seconds
])
def test_a_frozen_module_has_the_same_bits_compiled(engine, module, sizes):
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        layer = getattr(engine, module)(*sizes, device=DEVICE, params_dtype=torch.bfloat16)
        engine.freeze_in_fp8(layer, except_for=["norm", "bias"], keeps_transpose=False)
        recipe = engine.DelayedScaling(amax_history_len=3)

        def run(x, engine=engine, layer=layer, recipe=recipe):
            with engine.autocast(recipe=recipe):
                return layer(x, is_first_microbatch=True)

        net = torch.compile(run, backend="aot_eager", fullgraph=True) if compiles else run
        x = torch.randn(16, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        y = net(x)
        y.sum().backward()
        gradients = [p.grad for p in layer.parameters() if p.requires_grad]
        results.append([y, x.grad, *gradients, layer.fp8_meta["scaling_fwd"].scale])
    assert_equal(*results)


def bytes_in_training(model):
    """Return the bytes of weights, gradients, and masters and moments, after a step."""
    config = TrainConfig()
    optimizer = make_optimizer(model, config)
    assert all(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    gradients = make_gradients(model, config.grad_accum)
    with gradients.accumulate(is_first_microbatch=True, is_last_microbatch=True):
        model(*make_batch()).backward()
    gradients.set_grad()
    optimizer.step(torch.ones((), device=DEVICE), skip=torch.zeros((), dtype=torch.bool, device=DEVICE))
    weights = sum(tensor.nbytes for p in model.parameters() for tensor in tensors_of(p))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    state = sum(tensor.nbytes for tensors in optimizer.state.values() for tensor in tensors.values())
    return weights + buffers, sum(bucket.buffer.nbytes for bucket in gradients.buckets), state


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def tensors_of(parameter):
    if not is_frozen_in_fp8(parameter):
        return [parameter]
    names, _ = parameter.__tensor_flatten__()
    return [getattr(parameter, name) for name in names]


@pytest.mark.parametrize("name, freezing, bytes_of_a_value, scales", [
    ("reference", {}, 1, 1), ("fast modules", {}, 2, 2), ("fast modules", NO_TRANSPOSE, 1, 2)])
def test_a_frozen_weight_has_one_byte_a_value_and_no_state(name, freezing, bytes_of_a_value, scales):
    model = build(name, n_layer=1, tie_embeddings=False).to(torch.bfloat16)
    freeze(name, model, ["norm", "bias"], **freezing)
    weights, gradients, state = bytes_in_training(model)
    frozen = frozen_weights(model)
    assert len(frozen) == 5
    trained = [p for p in model.parameters() if p.requires_grad]
    embeddings = model.wte.weight.nbytes + model.wpe.weight.nbytes
    frozen_bytes = sum(bytes_of_a_value * p.numel() + 4 * scales for p in frozen.values())
    assert weights == frozen_bytes + embeddings + sum(p.nbytes for p in trained)
    assert gradients == sum(2 * round_up(p.numel(), 128) for p in trained)
    bytes_of_master = 2 if HAS_GPU else 4  # FastAdam stores the 16 bits that the BF16 weights lack
    bytes_of_moments = 2 * 4
    assert state == sum((bytes_of_master + bytes_of_moments) * p.numel() for p in trained)


@pytest.mark.parametrize("name", ["reference", "fast modules", on_te("te")])
def test_a_frozen_model_is_copied_moved_saved_and_loaded(name):
    """It is also pickled. Copies have the same loss and frozen weights, which cannot be trained again."""
    model, twin = pair(name, {"n_layer": 1}, **NO_TRANSPOSE)
    loss = loss_of(model)
    with pytest.raises(ValueError, match="^requires_grad_: a weight .* is frozen in FP8"):
        model.requires_grad_(True)
    if name != "te":
        with pytest.raises(ValueError, match="^requires_grad_: a weight .* is frozen in FP8"):
            model.blocks[0].attn.qkv.weight.requires_grad = True
    copies = [copy.deepcopy(model), model.to(DEVICE)]
    if name != "te":  # pickled, its weights lose what makes them frozen; and it is on a GPU only
        copies += [pickle.loads(pickle.dumps(model)), model.to("cpu").to(DEVICE)]
    for copied in copies:
        assert torch.equal(loss_of(copied), loss)
        assert frozen_weights(copied).keys() == frozen_weights(model).keys()
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    other = build(name, n_layer=1)
    freeze(name, other, TRAINED, **NO_TRANSPOSE)
    for options in ({}, {"assign": True}) if name != "te" else ({},):
        other.load_state_dict({key: value.clone() for key, value in state.items()}, **options)
        assert torch.equal(loss_of(other), loss)
        assert frozen_weights(other).keys() == frozen_weights(model).keys()
    # without FP8 it computes with the dequantized weights
    twin.load_state_dict(state)
    for each in (model, twin):
        each.config.use_fp8 = False
    assert torch.equal(loss_of(model), loss_of(twin))


@pytest.mark.parametrize("name", ["reference", "fast modules"])
def test_a_model_without_memory_loads_weights_one_by_one(name):
    """It never has all weights in BF16: its modules are on the meta device before they are frozen."""
    source = build(name, n_layer=1)
    with torch.device("meta"):
        model = build(name, device=None, n_layer=1)
    blocks = list(model.blocks.parameters())
    assert all(p.is_meta for p in blocks)
    freeze(name, model, TRAINED)
    model.to_empty(device=DEVICE)
    model.lm_head.weight = model.wte.weight
    assert sum(p.rowwise.nbytes for p in frozen_weights(model.blocks).values()) == 4 * 32 * 32 + 32 * 64
    state = source.state_dict()
    for key in list(state):
        model.load_state_dict({key: state.pop(key)}, strict=False)
    freeze(name, source, TRAINED)
    assert torch.equal(loss_of(model), loss_of(source))


@pytest.mark.parametrize("name", ["reference", "fast modules"])
@pytest.mark.parametrize("write", [
    lambda weight, values: weight.mul_(2), lambda weight, values: torch._foreach_copy_([weight], [values]),
    lambda weight, values: torch.add(values, 1, out=weight)], ids=["mul", "foreach_copy", "out"])
def test_an_operation_that_would_write_to_a_frozen_weight_raises(name, write):
    model, _ = pair(name, {"n_layer": 1}, **NO_TRANSPOSE)
    weight = model.blocks[0].attn.qkv.weight
    before = weight.dequantize().clone()
    with torch.no_grad(), pytest.raises(ValueError, match="frozen in FP8; only copy_ changes it"):
        write(weight, torch.zeros_like(before))
    assert torch.equal(weight.dequantize(), before)


@pytest.mark.parametrize("recipe", [te_reference.Float8BlockScaling(), te_reference.MXFP8BlockScaling()])
def test_a_recipe_with_block_scales_refuses_frozen_weights(recipe):
    layer = te_reference.Linear(32, 32, device=DEVICE)
    te_reference.freeze_in_fp8(layer)
    with pytest.raises(ValueError, match="has one scale; use DelayedScaling or Float8CurrentScaling$"):
        with te_reference.autocast(recipe=recipe):
            layer(torch.randn(32, 32, device=DEVICE))


def make_adapters(folder, model):
    """Write the edit `lora` of a model file as bf16.py, and with the rest frozen in FP8 as my_model.py."""
    edited = write_edit(folder, model, "lora").read_text()
    (folder / "bf16.py").write_text(edited)
    plain = 'lora_base: str = "bf16"'
    assert plain in edited
    (folder / "my_model.py").write_text(edited.replace(plain, 'lora_base: str = "fp8_and_transpose"'))


ADAPTERS = ("--n-layer 1 --n-head 2 --n-embd 32 --seq-len 32 --micro-batch-size 2 --grad-accum 2 "
            "--pack-documents --lr 1e-2 --warmup-steps 0 --max-steps 4 "
            f"--eval-tokens 64 --log-interval 1 --checkpoint-interval 2 --device {DEVICE}")
ADAPTER_NAMES = [f"blocks.0.{layer}.{ab}" for ab in "ab" for layer in (
    "attn.lora_qkv", "attn.lora_proj", "mlp.lora_fc1", "mlp.lora_fc2")]
CLASSES = {"optimized": "OptimizedGPT2Model", "fast": "FastGPT2Model"}


@pytest.mark.parametrize("model, options", [
    ("optimized", "--attention sdpa --gradient-checkpointing"), on_gpu("fast", "--gradient-checkpointing"),
    on_gpu("optimized", "--attention sdpa"), on_gpu("fast", "")])  # in CUDA graphs
def test_adapters_resume_exactly(model, options, in_tmp_path, tmp_path, tokens, deterministic):
    make_adapters(tmp_path, model)
    options = f"{ADAPTERS} {options} --model my_model.py:{CLASSES[model]} --dropout 0.1"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    shutil.copytree("run", "resumed", ignore=shutil.ignore_patterns("step-4"))
    assert run_train(f"{options} --out-dir resumed --resume", tokens) == 0
    assert losses("resumed") == losses("run")
    folders = "run/step-2", "run/step-4", "resumed/step-4"
    start, end, resumed = (checkpoint.read_tensors(folder, ("",)) for folder in folders)
    for name, tensor in end.items():
        is_trained = name.startswith("model.") and "lora_" in name
        if name.startswith("model."):
            assert torch.equal(start[name], tensor) != is_trained, name
        assert torch.equal(as_bytes(resumed[name]), as_bytes(tensor)), name
    stateful = {name.removesuffix(".exp_avg") for name in end if name.endswith(".exp_avg")}
    assert stateful == {f"optimizer.{name}" for name in ADAPTER_NAMES}
    for name in end:
        if name.startswith("frozen."):  # the scales of training are those of serving
            module, weight, _ = name.removeprefix("frozen.").rsplit(".", 2)
            slot = weight_slot(weight)
            if model == "optimized" and module.endswith("mlp"):  # fc1 and fc2 are modules of their own
                module += f".{weight.removesuffix('_weight')}"
                slot = 1
            assert torch.equal(end[f"fp8.{module}.scaling_fwd.scale"][slot], end[name][0])


def test_muon_trains_adapters_alone(in_tmp_path, tmp_path, tokens):
    make_adapters(tmp_path, "optimized")
    options = f"{ADAPTERS} --attention sdpa --optimizer muon --model my_model.py:OptimizedGPT2Model"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    start, end = (checkpoint.read_tensors(f"run/step-{step}") for step in (2, 4))
    changed = {name for name, tensor in end.items() if not torch.equal(start[name], tensor)}
    assert changed == {f"model.{name}" for name in ADAPTER_NAMES}


@pytest.mark.parametrize("model", ["optimized", on_gpu("fast")])
def test_adapters_learn_alike_beside_fp8_and_bf16_weights(model, in_tmp_path, tmp_path, tokens):
    """Not bit for bit: these weights have a scale of 1 in the first of the passes that find the scales."""
    make_adapters(tmp_path, model)
    assert run_train(f"{ADAPTERS} --model {model} --out-dir base", tokens) == 0
    for file in ("bf16", "my_model"):
        options = f"{ADAPTERS} --model {file}.py:{CLASSES[model]} --init-from base --out-dir {file}"
        assert run_train(options, tokens) == 0
    assert losses("my_model") == pytest.approx(losses("bf16"), rel=1e-3)


@pytest.mark.parametrize("model", [
    pytest.param("optimized", marks=TWO_RANKS), pytest.param("fast", marks=TWO_GPUS)])
def test_two_ranks_train_adapters_as_one(model, in_tmp_path, tmp_path, tokens):
    make_adapters(tmp_path, model)
    code = f"--model my_model.py:{CLASSES[model]}"
    one = f"{ADAPTERS} --gradient-checkpointing {code} --data {tokens}"
    assert run_train(f"{one} --out-dir one") == 0
    two = one.replace("--grad-accum 2", "--grad-accum 1")
    shards = model == "fast" or ENGINE != "te"  # weights that TE itself has frozen are not sharded
    runs = {"two": two}
    if shards:
        runs |= {"sharded": f"{two} --parallel fsdp", "sharded-to-resumed": f"--resume {code}"}
    run_on_ranks(RUN_ALL, [str(ROOT), json.dumps(runs), "step-4"])
    if shards:
        assert metrics("sharded-to-resumed") == metrics("sharded")
        shutil.copytree("sharded", "sharded-in-one", ignore=shutil.ignore_patterns("step-4"))
        assert run_train(f"--resume {code} --parallel ddp --grad-accum 2 --out-dir sharded-in-one") == 0
    expected = checkpoint.read_tensors("one/step-4", ("model.", "frozen."))
    for run in ("two", "sharded", "sharded-in-one") if shards else ("two",):
        assert losses(run) == pytest.approx(losses("one"), rel=1e-3 if HAS_GPU else 5e-4), run
        found = checkpoint.read_tensors(f"{run}/step-4", ("model.", "frozen."))
        for name, tensor in expected.items():
            if "lora_" not in name:
                assert torch.equal(found[name], tensor), (run, name)
