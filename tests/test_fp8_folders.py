"""FP8 in Hugging Face folders: an import has the values of compressed-tensors, an export the bytes and scales
of training, and other folders and runs are refused."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import te_reference
from fp8_evaluator import load, mean_loss
from hf_folders import edit_json
from nanote import checkpoint, models, recipes
from nanote import tokens as token_files
from nanote.tokenizers import get_tokenizer
from nanote.training_state import under_prefix
from tools import export_hf, import_hf
from tools.tensor_files import RunWeights
from trainer_tools import randomize, run_train, sign

transformers = pytest.importorskip("transformers")
E4M3 = torch.float8_e4m3fn
GPU = "cuda"


# ---------------------------------------------------------------- import

# {name: (what has a scale of its own, type of the scales, whether inputs have static scales)}
LAYOUTS = {"tensor": ("tensor", torch.float32, True), "channel": ("channel", torch.bfloat16, False),
           "channel float16": ("channel", torch.float16, False), "block": ("block", torch.bfloat16, False),
           "block float32": ("block", torch.float32, False)}


def quantization(strategy, is_static):
    """Return quantization_config, as llm-compressor and DeepSeek write it."""
    if strategy == "block":
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]}
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = common | {"strategy": "tensor" if is_static else "token", "dynamic": not is_static}
    group = {"targets": ["Linear"], "weights": common | {"strategy": strategy, "dynamic": False},
             "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": group}, "kv_cache_scheme": None}


def make_fp8_folder(folder, layout="tensor"):
    """Write a Llama with random FP8 weights and scales, whose sizes are no multiples of 128. Return its
    tensors, and the exact values {name: float64} of FP8 weights."""
    strategy, dtype, is_static = LAYOUTS[layout]
    model = randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=288, hidden_size=160, intermediate_size=272, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=256, eos_token_id=256)))
    model.to(torch.bfloat16).save_pretrained(folder)
    export_hf.fast_tokenizer(get_tokenizer("byte"), 64).save_pretrained(folder)
    edit_json(Path(folder, "config.json"), quantization_config=quantization(strategy, is_static))
    tensors = load_file(Path(folder, "model.safetensors"))
    exact = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        weight = tensors[name] = (100 * torch.randn(rows, columns)).to(E4M3)
        shapes = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}
        scale = (0.001 + 0.01 * torch.rand(shapes[strategy])).to(dtype)
        tensors[f"{name}_scale{'_inv' if strategy == 'block' else ''}"] = scale
        if is_static:
            tensors[name.replace("weight", "input_scale")] = torch.rand(1)
        scale_of_each = scale.double()
        if strategy == "block":
            row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
            scale_of_each = scale_of_each[row][:, column]
        exact[name] = weight.double() * scale_of_each
    save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
    return tensors, exact


def imported_parts(run):
    """Return the linear weights of an imported Llama of one block, under the names of Hugging Face."""
    weights = RunWeights(checkpoint.find(run))
    q, k, v = weights["blocks.0.attn.qkv.weight"].split((160, 80, 80))
    gate, up = weights["blocks.0.mlp.fc1_weight"].split(272)
    o = weights["blocks.0.attn.proj.weight"]
    down = weights["blocks.0.mlp.fc2_weight"]
    parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "self_attn.o": o,
             "mlp.gate": gate, "mlp.up": up, "mlp.down": down}
    return {f"model.layers.0.{name}_proj.weight": part for name, part in parts.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_imported_fp8_weights_have_the_type_of_their_scales(layout, tmp_path):
    """Their values are rounded to it once, as compressed-tensors does."""
    _, exact = make_fp8_folder(tmp_path / "hf", layout)
    import_hf.import_folder(tmp_path / "hf", tmp_path / "run")
    dtype = LAYOUTS[layout][1]
    for name, part in imported_parts(tmp_path / "run").items():
        assert part.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        assert torch.equal(part, exact[name].to(dtype).to(part.dtype)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_import_equals_compressed_tensors(layout, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    tensors, _ = make_fp8_folder(tmp_path / "hf", layout)
    import_hf.import_folder(tmp_path / "hf", tmp_path / "run")
    strategy = LAYOUTS[layout][0]
    options = dict(num_bits=8, type="float", symmetric=True, strategy=strategy)
    if strategy == "block":
        options["block_structure"] = [128, 128]
    for name, part in imported_parts(tmp_path / "run").items():
        scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        values = dequantize(x_q=tensors[name], scale=scale, args=QuantizationArgs(**options))
        assert torch.equal(part, values.to(part.dtype)), name


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("layout, change, words", [
    ("tensor", {f"{QUERY}_scale": None}, f"{QUERY}_scale is missing"),
    ("tensor", {f"{QUERY}_scale": torch.tensor([torch.nan])}, "weight_scale times its weight is not finite"),
    ("tensor", {f"{QUERY}_scale": torch.ones(2)}, "per tensor of a weight (160, 160) has shape (1,)"),
    ("tensor", {f"{QUERY}_scale": torch.ones(1, dtype=torch.int32)}, f"{QUERY}_scale is I32"),
    ("channel", {f"{QUERY}_scale": torch.ones(80, 1)}, "of a weight (160, 160) has shape (160, 1)"),
    ("channel", {f"{QUERY}_scale": torch.ones(1)}, "has shape (1,); a scale per channel"),
    ("block", {f"{QUERY}_scale_inv": torch.ones(1, 2)}, "of a weight (160, 160) has shape (2, 2)"),
    ("block", {f"{QUERY}_scale_inv": None}, f"{QUERY}_scale_inv is missing"),
    ("tensor", {QUERY: torch.zeros(160, 160)}, "q_proj.input_scale: nanoTE's model has no place"),
    ("tensor", {QUERY: torch.zeros(80, 160).to(E4M3)}, f"{QUERY} has shape (80, 160)"),
    ("tensor", {QUERY: torch.zeros(160, 160).to(torch.float8_e5m2)}, f"{QUERY} is F8_E5M2")],
    ids=lambda value: value if isinstance(value, str) else "")
def test_damaged_tensors_are_refused(layout, change, words, in_tmp_path, refused):
    tensors, _ = make_fp8_folder("hf", layout)
    tensors = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    save_file(tensors, "hf/model.safetensors", {"format": "pt"})
    assert words in refused(import_hf.main, "hf run")


@pytest.mark.parametrize("layout, path, value, words", [
    ("tensor", "quant_method", "gptq", "quant_method 'gptq': nanoTE reads 'compressed-tensors' or 'fp8'"),
    ("tensor", "format", "pack-quantized", "format 'pack-quantized'"),
    ("tensor", "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
    ("tensor", "transform_config", {"config_groups": {"R1": {}}}, "transform_config"),
    ("tensor", "config_groups", {}, "no config_groups"),
    ("tensor", "config_groups", [1], "config_groups must be an object"),
    ("tensor", "config_groups.group_0", None, "group_0 must be an object"),
    ("tensor", "config_groups.group_0.weights", "float", "weights must be an object"),
    ("tensor", "config_groups.group_0.weights", None, "type None"),
    ("tensor", "config_groups.group_0.weights.type", "int", "type 'int'"),
    ("tensor", "config_groups.group_0.weights.num_bits", 4, "num_bits 4: nanoTE reads 8"),
    ("tensor", "config_groups.group_0.weights.strategy", "group", "strategy 'group': nanoTE reads"),
    ("tensor", "config_groups.group_0.weights.symmetric", False, "symmetric False"),
    ("block", "weight_block_size", [64, 128], "weight_block_size [64, 128]: nanoTE reads [128, 128]"),
    ("block", "fmt", "e5m2", "fmt 'e5m2'")], ids=str)
def test_other_quantizations_are_refused(layout, path, value, words, in_tmp_path, refused):
    make_fp8_folder("hf", layout)
    config = json.loads(Path("hf/config.json").read_text())
    *parents, field = ["quantization_config", *path.split(".")]
    fields = config
    for parent in parents:
        fields = fields[parent]
    fields[field] = value
    edit_json("hf/config.json", **config)
    assert words in refused(import_hf.main, "hf run")


@pytest.mark.parametrize("entry", [[1], "fp8", 8])
def test_a_quantization_that_is_no_object_is_refused(entry, in_tmp_path, refused):
    make_fp8_folder("hf")
    edit_json("hf/config.json", quantization_config=entry)
    assert "json: quantization_config: the entry must be an object" in refused(import_hf.main, "hf run")


# ---------------------------------------------------------------- export

COMMON = ("--n-layer 2 --n-head 4 --n-kv-head 2 --n-embd 64 --n-inner 96 --use-rmsnorm --use-rotary "
          "--activation swiglu --no-bias --seq-len 64 --micro-batch-size 4 --max-steps 12 --warmup-steps 2 "
          "--lr 5e-3 --eval-interval 0 --log-interval 12 --device cpu ")
LLAMA = COMMON + "--no-tie-embeddings"
QWEN3 = COMMON + "--use-qk-norm --head-dim 32 --fp8-skip-first 1"  # tied


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory):
    """{name: a run that was trained in FP8 with delayed scaling}."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {"llama": folder / "llama", "qwen3": folder / "qwen3"}
    for name, options in (("llama", LLAMA), ("qwen3", QWEN3)):
        assert run_train(f"{options} --out-dir {runs[name]}", tokens) == 0
    return runs


def trained_model(run, use_fp8=True, **options):
    """Return the kit's model of a run, with its FP8 scales. options: device and dtype, CPU and float32."""
    folder = checkpoint.find(run)
    fields = checkpoint.read_meta(folder)["model_config"] | {"use_fp8": use_fp8}
    config = models.make_model_config("optimized", fields)
    model = models.instantiate("optimized", config, **options).eval()
    checkpoint.load(folder, model)
    recipes.set_state(model, under_prefix(checkpoint.read_tensors(folder, ("fp8.",)), "fp8."))
    return model


def loss_of(model, ids):
    with torch.no_grad():
        return model(ids[:, :-1], ids[:, 1:]).item()


def validation_ids(tokens, count):
    """Return `count` tokens to predict, in rows of 64, and their inputs: (rows, 65)."""
    ids, _ = token_files.open_tokens(tokens, "train")
    rows = count // 64
    return torch.tensor(ids[:65 * rows].astype("int64")).view(rows, 65)


def recorded_gemms(model, ids, monkeypatch):
    """Return (FP8 weight, input, FP8 input, output) of each GEMM of an evaluation on te_reference."""
    quantized = []
    outputs = []
    quantize, linear = te_reference.quantize, torch.nn.functional.linear

    def record_quantize(x, scale, dtype):
        quantized.append((x, quantize(x, scale, dtype)))
        return quantized[-1][1]

    def record_linear(*arguments):
        outputs.append(linear(*arguments))
        return outputs[-1]

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(te_reference, "quantize", record_quantize)
        patch.setattr(torch.nn.functional, "linear", record_linear)
        model(ids)
    weights, inputs = quantized[0::2], quantized[1::2]  # the weight of a GEMM comes first
    return [(weight, x, fp8, y) for (_, weight), (x, fp8), y in zip(weights, inputs, outputs, strict=True)]


def assert_same_bytes(fp8, expected):
    assert torch.equal(fp8.view(torch.uint8), expected.view(torch.uint8))


@torch.no_grad()
def test_each_exported_layer_multiplies_as_the_kit(runs, tokens, tmp_path, monkeypatch):
    """The FP8 bytes of weights and inputs are equal, and the outputs but for the order of summation."""
    export_hf.main([str(runs["llama"]), str(tmp_path / "hf"), "--fp8", "--fp8-lm-head"])
    served = load(tmp_path / "hf")
    gemms = []
    for block in ("model.layers.0.", "model.layers.1."):
        gemms.append([f"{block}self_attn.{part}_proj" for part in "qkv"])
        gemms.append([f"{block}self_attn.o_proj"])
        gemms.append([f"{block}mlp.{part}_proj" for part in ("gate", "up")])
        gemms.append([f"{block}mlp.down_proj"])
    gemms.append(["lm_head"])
    recorded = recorded_gemms(trained_model(runs["llama"]), validation_ids(tokens, 128)[:, :-1], monkeypatch)
    for names, (fp8_weight, x, fp8_x, y) in zip(gemms, recorded, strict=True):
        layers = [served.get_submodule(name) for name in names]
        assert_same_bytes(torch.cat([layer.weight.view(torch.uint8) for layer in layers]), fp8_weight)
        for layer in layers:
            assert_same_bytes(layer.quantize(x), fp8_x)
            assert torch.equal(layer.weight_scale, layers[0].weight_scale)
            assert torch.equal(layer.input_scale, layers[0].input_scale)
        outputs = torch.cat([layer(x) for layer in layers], dim=-1)
        terms = fp8_x.float().abs() @ fp8_weight.float().abs().T * layer.input_scale * layer.weight_scale
        assert ((outputs - y).abs() <= 2**-23 * x.shape[-1] * terms).all()


def test_exported_biases_are_those_of_fp8_gemms(tokens, tmp_path):
    """Which add them in BF16, also to an output in float32."""
    assert run_train(f"{LLAMA} --bias --max-steps 2 --out-dir {tmp_path / 'run'}", tokens) == 0
    export_hf.main([str(tmp_path / "run"), str(tmp_path / "hf"), "--fp8"])
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    biases = [tensor for name, tensor in tensors.items() if name.endswith(".bias")]
    assert len(biases) == 2 * 7
    for bias in biases:
        assert bias.any() and torch.equal(bias, bias.bfloat16().float())
    model = trained_model(tmp_path / "run")
    x = torch.randn(16, 64)
    layer = load(tmp_path / "hf").get_submodule("model.layers.1.self_attn.o_proj")
    with model.autocast(), torch.no_grad():
        y = model.blocks[1].attn.proj(x)
    assert (layer(x) - y).abs().max() <= 1e-6 * y.abs().max()


@pytest.mark.parametrize("name, options", [("llama", "--fp8-lm-head"), ("qwen3", "")])
def test_the_exported_model_has_the_loss_of_training(name, options, runs, tokens, tmp_path):
    """On 10,000 tokens, from the folder alone; the head of qwen3, tied, is not in FP8 there."""
    export_hf.main([str(runs[name]), str(tmp_path / "hf"), "--fp8", *options.split()])
    ids = validation_ids(tokens, 10048)
    model = trained_model(runs[name])
    model.config.fp8_lm_head = name == "llama"
    expected = loss_of(model, ids)
    effect_of_fp8 = abs(loss_of(trained_model(runs[name], use_fp8=False), ids) - expected)
    difference = abs(mean_loss(load(tmp_path / "hf"), ids) - expected)
    assert difference <= 1e-4 * expected
    assert difference <= 0.1 * effect_of_fp8


@pytest.mark.gpu
def test_a_run_on_a_gpu_is_exported_with_its_loss(tokens, tmp_path):
    """But for the rounding to BF16, one more than in training: that of a norm's output, before it is FP8."""
    options = LLAMA.replace("--device cpu", f"--device {GPU}")
    assert run_train(f"{options} --dtype bfloat16 --out-dir {tmp_path / 'run'}", tokens) == 0
    export_hf.main([str(tmp_path / "run"), str(tmp_path / "hf"), "--fp8", "--fp8-lm-head"])
    ids = validation_ids(tokens, 10048)
    expected = loss_of(trained_model(tmp_path / "run", device=GPU, dtype=torch.bfloat16), ids.to(GPU))
    assert abs(mean_loss(load(tmp_path / "hf").bfloat16(), ids) - expected) <= 1e-3 * expected


def test_transformers_reads_an_exported_model(runs, tokens, tmp_path):
    pytest.importorskip("compressed_tensors")
    export_hf.main([str(runs["llama"]), str(tmp_path / "hf"), "--fp8", "--fp8-lm-head"])
    ids = validation_ids(tokens, 2048)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = loss_of(trained_model(runs["llama"]), ids)
    assert abs(mean_loss(model, ids) - expected) <= 1e-4 * expected


def test_head_and_skipped_blocks_are_not_in_fp8(runs, tmp_path):
    """Nor is anything else that --fp8 does not quantize; --dtype is theirs."""
    export_hf.main([str(runs["qwen3"]), str(tmp_path / "hf"), "--fp8", "--dtype", "bfloat16"])
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    in_fp8 = {name for name, tensor in tensors.items() if tensor.dtype == E4M3}
    layers = [f"self_attn.{part}_proj" for part in "qkvo"]
    layers += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    assert in_fp8 == {f"model.layers.1.{layer}.weight" for layer in layers}
    others = {tensor.dtype for name, tensor in tensors.items() if name not in in_fp8 and "scale" not in name}
    assert others == {torch.bfloat16}
    ignored = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) == {"lm_head", *(f"model.layers.0.{layer}" for layer in layers)}


def test_an_exported_model_is_imported_again(runs, tmp_path):
    """With the weights that training multiplied with."""
    export_hf.main([str(runs["llama"]), str(tmp_path / "hf"), "--fp8"])
    import_hf.import_folder(tmp_path / "hf", tmp_path / "run")
    weights = RunWeights(checkpoint.find(tmp_path / "run"))
    trained = RunWeights(checkpoint.find(runs["llama"]))
    assert weights.shapes == trained.shapes
    state = trained_model(runs["llama"]).state_dict()
    scale = state["blocks.1.mlp.scaling_fwd.scale"][4]  # input, weight and output of fc1, then of fc2
    fp8 = te_reference.quantize(trained["blocks.1.mlp.fc2_weight"], scale, E4M3)
    assert torch.equal(weights["blocks.1.mlp.fc2_weight"], te_reference.dequantize(fp8, scale))
    assert torch.equal(weights["lm_head.weight"], trained["lm_head.weight"])


def edit_meta(run, **fields):
    """Replace fields of the options of a run and of its model."""
    folder = checkpoint.find(run)
    meta = json.loads((folder / "meta.json").read_text())
    for part in ("config", "model_config"):
        meta[part] |= {name: value for name, value in fields.items() if name in meta[part]}
    (folder / "meta.json").write_text(json.dumps(meta))
    sign(folder)


@pytest.mark.parametrize("run, fields, options, words", [
    ("llama", {"fp8_recipe": "current"}, "--fp8", "--fp8-recipe current, without static scales; resume it"),
    ("llama", {"fp8_recipe": "none"}, "--fp8", "--fp8-recipe none, without static scales; resume it"),
    ("llama", {"fp8_lm_head": False}, "--fp8 --fp8-lm-head", "has --no-fp8-lm-head; leave --fp8-lm-head out"),
    ("qwen3", {"fp8_skip_first": 0}, "--fp8", "has no FP8 scales of blocks.0.attn.qkv; resume it with"),
    ("qwen3", {}, "--fp8 --fp8-lm-head", "the head is the embedding"),
    ("llama", {}, "--fp8 --dtype float32", "--fp8 with --dtype float32: FP8 weights are those of training"),
    ("llama", {}, "--fp8-lm-head", "--fp8-lm-head without --fp8")], ids=str)
def test_a_run_without_the_scales_is_refused(run, fields, options, words, runs, in_tmp_path, refused):
    shutil.copytree(runs[run], "run")
    edit_meta("run", **fields)
    assert words in refused(export_hf.main, f"run hf {options}")


def test_gpt2_is_refused(tokens, in_tmp_path, refused):
    transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=288, n_positions=64, n_embd=64, n_layer=1, n_head=2, bos_token_id=256,
        eos_token_id=256)).save_pretrained("gpt2")
    export_hf.fast_tokenizer(get_tokenizer("byte"), 64).save_pretrained("gpt2")
    import_hf.import_folder("gpt2", "run")
    error = refused(export_hf.main, "run hf --fp8")
    assert "is a GPT-2, and compressed-tensors does not quantize its Conv1D; leave --fp8 out" in error
