"""tools/import_hf.py and export_hf.py, family by family: random models with the logits of transformers, in
and out, at several lengths; and what is refused of other families.

`check_family(name, seed, folder)` takes any seed, which also decides the sizes; the tests take two.
"""
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_folders import edit_json, make_sentencepiece
from nanote import checkpoint, generate, trained_model
from nanote.tokenizers import get_tokenizer
from tools import export_hf, import_hf
from trainer_tools import randomize, run_train

transformers = pytest.importorskip("transformers")
CONTEXT = 16  # of the first training, before RoPE was scaled
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=CONTEXT)
# {family: (class of its config, fields)}, as in the config.json that was published
FAMILIES = {
    "GPT-2": (transformers.GPT2Config, {}),
    "Llama 2": (transformers.LlamaConfig, dict(rms_norm_eps=1e-5)),
    "TinyLlama": (transformers.LlamaConfig, dict(num_key_value_heads=1, rms_norm_eps=1e-5)),
    "Llama 3": (transformers.LlamaConfig, dict(num_key_value_heads=2, rope_theta=5e5)),
    "Llama 3.1": (transformers.LlamaConfig, dict(num_key_value_heads=2, rope_parameters=LLAMA3 | {
        "factor": 8.0})),
    "Llama 3.2": (transformers.LlamaConfig, dict(num_key_value_heads=2, tie_word_embeddings=True, head_dim=32,
                                                 rope_parameters=LLAMA3 | {"factor": 32.0})),
    "SmolLM2": (transformers.LlamaConfig, dict(num_key_value_heads=1, tie_word_embeddings=True,
                                               rope_theta=1e5)),
    "Mistral": (transformers.MistralConfig, dict(num_key_value_heads=2, sliding_window=None, rope_theta=1e6)),
    "Qwen2": (transformers.Qwen2Config, dict(num_key_value_heads=2, tie_word_embeddings=True,
                                             rope_theta=1e6)),
    "Qwen2.5": (transformers.Qwen2Config, dict(num_key_value_heads=1, rope_theta=1e6, rms_norm_eps=1e-6)),
    "Qwen3": (transformers.Qwen3Config, dict(num_key_value_heads=2, tie_word_embeddings=True, head_dim=32,
                                             rope_theta=1e6)),
}


def make_folder(folder, family, seed=0, **fields):
    """Write the folder of a random model, whose sizes the seed decides, and return the model."""
    config_class, of_family = FAMILIES[family]
    sizes = random.Random(seed)
    n_head = sizes.choice([2, 4])
    n_embd = n_head * sizes.choice([8, 16])
    fields = dict(
        vocab_size=sizes.choice([288, 301]), num_hidden_layers=sizes.choice([1, 2]), hidden_size=n_embd,
        num_attention_heads=n_head, max_position_embeddings=sizes.choice([64, 96]),
        bos_token_id=256, eos_token_id=256) | of_family | fields
    if family != "GPT-2":
        fields["intermediate_size"] = sizes.choice([48, 80])
    torch.manual_seed(seed)
    model = randomize(transformers.AutoModelForCausalLM.from_config(config_class(**fields))).eval()
    model.save_pretrained(folder)
    export_hf.fast_tokenizer(get_tokenizer("byte"), 64).save_pretrained(folder)
    return model


def import_model(folder, run):
    """Import a folder, and return the model that train.py would build."""
    checkpoint_folder = import_hf.import_folder(folder, run)
    return trained_model.load_run(checkpoint_folder, checkpoint.read_meta(checkpoint_folder))


@torch.no_grad()
def assert_same_logits(ours, theirs):
    """Compare in float32, with and without a cache of keys and values, up to the longest sequence."""
    longest = ours.config.n_positions
    ids = torch.randint(257, (2, longest))
    for length in (1, CONTEXT, CONTEXT + 1, longest):
        expected = theirs(ids[:, :length]).logits
        logits = ours(ids[:, :length])[..., :expected.shape[-1]]
        assert (logits - expected).abs().max() < 1e-4, length
    cache = ours.make_kv_cache(2, longest)
    with_cache = [ours(part, kv_cache=cache) for part in ids.split((longest - 2, 1, 1), dim=1)]
    logits = torch.cat(with_cache, dim=1)[..., :expected.shape[-1]]
    assert (logits - expected).abs().max() < 1e-4


def check_family(family, seed, folder):
    """Import a random model, export it, and import that again."""
    theirs = make_folder(folder / "theirs", family, seed)
    ours = import_model(folder / "theirs", folder / "run")
    assert_same_logits(ours, theirs)
    export_hf.export(folder / "run", folder / "back")
    assert_same_logits(ours, transformers.AutoModelForCausalLM.from_pretrained(folder / "back").eval())
    before = load_file(folder / "theirs/model.safetensors")
    after = load_file(folder / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    again = import_model(folder / "back", folder / "again")
    assert again.config == ours.config
    ids = [1, 2, 3]
    same_text = [generate.generate(model, ids, 20, temperature=0) for model in (ours, again)]
    assert same_text[0] == same_text[1]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_transformers(family, seed, tmp_path):
    check_family(family, seed, tmp_path)


def test_logits_at_large_positions(tmp_path):
    """Where the last bit of a frequency of RoPE shows."""
    rope = LLAMA3 | dict(factor=8.0, original_max_position_embeddings=256)
    theirs = make_folder(tmp_path / "theirs", "Llama 3.1", num_hidden_layers=2,
                         rope_parameters=rope, max_position_embeddings=1024)
    assert_same_logits(import_model(tmp_path / "theirs", tmp_path / "run"), theirs)


def test_scaled_rope_is_resumed_with_the_text_of_the_page(tokens, tmp_path):
    """With and without integers: 8.0 in a config.json is 8."""
    for factor, text in ((8.0, "8:1:4:16"), (1.2345678, "1.2345678:1:4:16")):
        run = tmp_path / text
        make_folder(tmp_path / "hf", "Llama 3.1", rope_parameters=LLAMA3 | {"factor": factor})
        import_hf.import_folder(tmp_path / "hf", run)
        options = f"--resume --out-dir {run} --rope-scaling {text} --seq-len 64 --max-steps 1 --device cpu"
        assert run_train(f"{options} --micro-batch-size 1 --eval-interval 0", tokens) == 0


@pytest.mark.parametrize("family, fields", [
    ("Mistral", {}), ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0})], ids=str)
def test_a_window_as_long_as_the_longest_sequence_changes_nothing(family, fields, tmp_path):
    theirs = make_folder(tmp_path / "theirs", family, sliding_window=64, max_position_embeddings=64, **fields)
    assert_same_logits(import_model(tmp_path / "theirs", tmp_path / "run"), theirs)


def test_the_tokenizer_of_llama_2_gives_the_ids_of_transformers(tmp_path):
    """Also after an export, which copies it. A text begins with <s> and a space."""
    make_folder(tmp_path / "theirs", "Llama 2", vocab_size=288)
    make_sentencepiece(tmp_path / "theirs")
    folder = import_hf.import_folder(tmp_path / "theirs", tmp_path / "run")
    ours = get_tokenizer(checkpoint.read_meta(folder)["tokenizer"])
    export_hf.export(tmp_path / "run", tmp_path / "back")
    for text in ("the cat sat", " two  spaces\n\n", "naïve 東京 🤖\t</s>", "<0x41>"):
        for place in ("theirs", "back"):
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / place, split_special_tokens=True)
            assert [ours.start, *ours.encode(text)] == theirs(text).input_ids
        ids = [ours.start, *ours.encode(text), ours.eot]
        assert ours.decode(ids) == " " + text
        assert ours.decode(ids, is_first=True) == theirs.decode(ids[1:-1]) == text
    assert ours.start == 1 and ours.eot == 2


# ---------------------------------------------------------------- refused: one line, nothing written

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1e6)


@pytest.mark.parametrize("family, fields, words", [
    *(("Llama 3", {"model_type": other}, f"model_type {other!r}: nanoTE reads gpt2, llama, mistral, qwen2, ")
      for other in ("gemma", "gemma2", "gemma3_text", "phi", "phi3", "mixtral", "qwen2_moe", "qwen3_moe",
                    "deepseek_v3", "gpt_oss", None)),
    ("Mistral", {"sliding_window": 32}, "sliding_window 32: shorter than max_position_embeddings"),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 32}, "sliding_window 32: shorter than max_posi"),
    ("Qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types 'sliding_attention'"),
    ("Qwen2", {"attention_bias": True}, "attention_bias True"),
    ("Mistral", {"mlp_bias": True}, "mlp_bias True"),
    ("Qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("Qwen3", {"rope_parameters": YARN}, "rope_type 'yarn': nanoTE's model has 'default' or 'llama3'"),
    ("Llama 2", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
     "rope_type 'dynamic'"),
    ("Llama 2", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor 0.5"),
    ("Llama 3.1", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}},
     "low_freq_factor"),
    ("Llama 3.1", {"rope_parameters": LLAMA3 | {"factor": 0.0}},
     "hf/config.json: rope_scaling='0:1:4:16': must be a text FACTOR:LOW:HIGH:CONTEXT, FACTOR above 0"),
    ("Llama 3.1", {"rope_parameters": LLAMA3 | {"factor": "x"}}, "hf/config.json: rope_scaling='x:1:4:16'"),
    ("Llama 3.1", {"rope_parameters": LLAMA3 | {"factor": 8.0, "high_freq_factor": 1.0}},
     "hf/config.json: rope_scaling='8:1:1:16': must be a text"),
    ("Llama 3", {"num_key_value_heads": 3}, "hf/config.json: OptimizedConfig.n_kv_head=3: must divide"),
    ("Llama 3", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method 'gptq'"),
    ("Llama 3", {"quantization_config": {"bits": 4}}, "quant_method None")], ids=str)
def test_another_architecture_is_refused(family, fields, words, in_tmp_path, refused):
    make_folder("hf", family, num_hidden_layers=2)
    edit_json("hf/config.json", **fields)
    assert words in refused(import_hf.main, "hf run")


@pytest.mark.parametrize("change", [lambda head: head[:-1].clone(), lambda head: head + 1, None])
def test_a_stored_tied_head_must_be_the_embedding(change, in_tmp_path, refused):
    make_folder("hf", "Qwen3", vocab_size=1025)  # compared in parts of 1,024 rows
    tensors = load_file("hf/model.safetensors")
    head = tensors[EMBEDDING].clone()
    save_file(tensors | {"lm_head.weight": change(head) if change else head}, "hf/model.safetensors",
              {"format": "pt"})
    if change:
        assert "lm_head.weight differs from the embedding" in refused(import_hf.main, "hf run")
    else:
        import_hf.main(["hf", "run"])


def split(folder):
    """Split model.safetensors into two shards with an index; return the names of their files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, part in zip(files, (names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


def replace_tensor(path, name, change):
    """Write a file of tensors again, with change(tensor) in place of one; None: without it."""
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path,
              {"format": "pt"})


EMBEDDING = "model.embed_tokens.weight"
DAMAGE = {  # what happened to a folder of two shards: (damage, words of the line)
    "a shard is missing": (
        lambda folder, files: (folder / files[1]).unlink(), "model-00002-of-00002.safetensors: not readable"),
    "a shard is cut": (
        lambda folder, files: (folder / files[1]).write_bytes((folder / files[1]).read_bytes()[:-99]),
        "model-00002-of-00002.safetensors: not readable"),
    "a tensor is missing": (
        lambda folder, files: replace_tensor(folder / files[1], EMBEDDING, lambda tensor: None),
        f"tensor {EMBEDDING} is missing; config.json asks for "),
    "a tensor has another shape": (
        lambda folder, files: replace_tensor(folder / files[1], EMBEDDING, lambda tensor: tensor[1:].clone()),
        f"tensor {EMBEDDING} has shape "),
    "a tensor has another type": (
        lambda folder, files: replace_tensor(folder / files[1], EMBEDDING, torch.Tensor.char),
        f"tensor {EMBEDDING} is I8; save the model in bfloat16"),
    "the index is missing": (
        lambda folder, files: (folder / "model.safetensors.index.json").unlink(),
        "no model.safetensors, nor shards that a model.safetensors.index.json names"),
    "the index has no object": (
        lambda folder, files: edit_json(folder / "model.safetensors.index.json", weight_map=files),
        "index.json: weight_map must be an object"),
    "the index is a list": (
        lambda folder, files: (folder / "model.safetensors.index.json").write_text("[]"),
        "index.json: must be a JSON object"),
    "the config is a list": (
        lambda folder, files: (folder / "config.json").write_text("[]"),
        "config.json: must be a JSON object"),
    "a config of two layers more": (
        lambda folder, files: edit_json(folder / "config.json", num_hidden_layers=5, layer_types=None),
        ".input_layernorm.weight is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_one_line(name, in_tmp_path, refused):
    make_folder("hf", "Qwen2.5")
    damage, words = DAMAGE[name]
    damage(Path("hf"), split(Path("hf")))
    assert words in refused(import_hf.main, "hf run")
