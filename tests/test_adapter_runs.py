"""Runs of the edit `lora`: checkpoints with adapters alone, which name their base, and exports of them."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
import train
from hf_folders import make_model, make_tokenizer
from nanote import checkpoint, recipes, trained_model
from nanote.tokenizers import get_tokenizer
from nanote.tokens import write_tokens
from tools import adapter_weights, export_hf, import_hf
from trainer_tools import (
    ROOT,
    RUN_ALL,
    losses,
    metrics,
    python_block,
    randomize,
    run_ranks,
    run_script,
    run_train,
    sign,
    write_edit,
)

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SHAPE = "--n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 --micro-batch-size 2 --grad-accum 2 --device cpu"
STEPS = "--lr 1e-2 --warmup-steps 0 --max-steps 4 --eval-tokens 64 --log-interval 1 --checkpoint-interval 2"
LLAMA = "--use-rmsnorm --use-rotary --activation swiglu --no-bias --n-kv-head 1"
NAME = "my_model.py:OptimizedGPT2Model"
LORA = f"--model {NAME}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokens):
    """A folder with my_model.py, the runs `base` and `lora` of it."""
    folder = tmp_path_factory.mktemp("runs")
    write_edit(folder, "optimized", "lora")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_train(f"{SHAPE} {STEPS} --dtype bfloat16 --out-dir base", tokens) == 0
        assert run_train(f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --init-from base --set lora_alpha=8 "
                         "--set lora_base=fp8 --dropout 0.1 --out-dir lora", tokens) == 0
    return folder


@pytest.fixture
def here(runs, tmp_path):
    """Copies of the runs in the current folder."""
    for path in runs.iterdir():
        if path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
        else:
            shutil.copy(path, tmp_path)


def stored(folder, prefix=""):
    return checkpoint.read_tensors(folder, (prefix,))


def test_a_checkpoint_has_adapters_and_names_the_base(runs):
    names = stored(runs / "lora/step-4")
    parameters = {name.split(".", 1)[1] for name in names if name.startswith("model.")}
    assert len(parameters) == 2 * 4 * 2 and all(".lora_" in name for name in parameters)
    with_state = {name.rpartition(".")[0] for name in names if name.startswith("optimizer.")}
    assert with_state == {f"optimizer.{name}" for name in parameters}
    assert not any(name.startswith("frozen.") for name in names)
    base = checkpoint.read_meta(runs / "lora/step-4")["base"]
    assert base["folder"] == str(runs / "base/step-4") and len(base["sha256"]) == 64


@pytest.mark.usefixtures("here")
def test_a_run_resumes_exactly_and_is_evaluated(runs, tokens, capsys):
    """Its base is found beside it, where both were moved."""
    shutil.move(runs / "base", runs / "elsewhere")
    try:
        shutil.rmtree("lora/step-4")
        expected = metrics(runs / "lora")
        assert run_train(f"--resume --out-dir lora {LORA}", tokens) == 0
        assert metrics("lora") == expected
        for name, tensor in stored("lora/step-4").items():
            assert torch.equal(tensor.view(-1).view(torch.uint8),
                               stored(runs / "lora/step-4")[name].view(-1).view(torch.uint8)), name
        capsys.readouterr()
        assert run_train(f"--eval-only --out-dir lora {LORA}", tokens) == 0
        assert f"{losses('lora', 'val_loss')[-1]:.4f}" in capsys.readouterr().out
        assert run_script("sample.py", ["lora", *LORA.split(), "--max-new-tokens", "4"]) == 0
    finally:
        shutil.move(runs / "elsewhere", runs / "base")


@pytest.mark.usefixtures("here")
def test_two_ranks_shard_a_base_in_fp8(tokens, capsys):
    """They train, resume exactly and are evaluated as one process."""
    options = (f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --init-from base --set lora_base=fp8 "
               f"--set lora_alpha=8 --eval-interval 2 --data {tokens}")
    assert run_train(f"{options} --micro-batch-size 4 --out-dir one") == 0
    runs = {"sharded": f"{options} --parallel fsdp", "sharded-to-resumed": f"--resume {LORA}"}
    run_ranks(RUN_ALL, [str(ROOT), json.dumps(runs), "step-4"])
    for key in ("loss", "val_loss"):
        assert losses("sharded", key) == pytest.approx(losses("one", key), rel=1e-3)
    assert metrics("sharded-to-resumed") == metrics("sharded")
    assert stored("sharded/step-4").keys() == stored("one/step-4").keys() | {"rng1.torch", "rng1.host"}
    bases = [checkpoint.read_meta(f"{run}/step-4")["base"] for run in ("one", "sharded")]
    assert bases[0] == bases[1]
    capsys.readouterr()
    assert run_train(f"--eval-only --out-dir sharded {LORA}", tokens) == 0
    assert f"{losses('sharded', 'val_loss')[-1]:.4f}"[:-1] in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_muon_trains_and_resumes_adapters_of_a_base_in_bf16(tokens):
    run = f"{SHAPE} {STEPS} {LORA} --optimizer muon --dtype bfloat16 --init-from base --out-dir muon"
    assert run_train(run, tokens) == 0
    expected = metrics("muon")
    names = {name.split(".", 1)[1] for name in stored("muon/step-4", "optimizer.")}
    assert names and all(".lora_" in name for name in names)
    shutil.rmtree("muon/step-4")
    assert run_train(f"--resume --out-dir muon {LORA}", tokens) == 0
    assert metrics("muon") == expected


@pytest.mark.usefixtures("here")
def test_scales_of_gradients_are_found_where_the_base_has_its_own(tokens, monkeypatch):
    """Of a run without FP8 that goes on in FP8: a frozen weight has a scale from the start, a gradient has
    none."""
    run = f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --init-from base --set lora_base=fp8 --out-dir plain"
    assert run_train(f"{run} --fp8-recipe none --max-steps 2", tokens) == 0
    find = recipes.find_first_scales
    searches = []
    monkeypatch.setattr(recipes, "find_first_scales", lambda *args: searches.append(find(*args)))
    assert run_train(f"--resume --out-dir plain {LORA} --fp8-recipe delayed --max-steps 3", tokens) == 0
    assert run_train(f"--resume --out-dir plain {LORA} --max-steps 4", tokens) == 0  # it has scales now
    assert len(searches) == 1


@pytest.mark.usefixtures("here")
def test_a_run_goes_on_from_the_adapters_of_another(tokens):
    options = f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --set lora_alpha=8"
    assert run_train(f"{options} --init-from lora --lr 1e-30 --max-steps 1 --out-dir next", tokens) == 0
    for name, tensor in stored("lora/step-4", "model.").items():
        assert torch.equal(stored("next/step-1")[name], tensor), name
    found, expected = (checkpoint.read_meta(folder)["base"] for folder in ("next/step-1", "lora/step-4"))
    assert found["sha256"] == expected["sha256"] and Path(found["folder"]).name == "step-4"


@pytest.mark.usefixtures("here")
def test_scales_of_another_model_file_are_not_taken(tokens, refused):
    """In model_te_fast.py fc1 and fc2 are one module. A new run finds scales of its own."""
    [shard] = Path("lora/step-4").glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(shard).items():
        if ".mlp.fc2.scaling_" not in name:
            tensors[name.replace(".mlp.fc1.scaling_", ".mlp.scaling_")] = tensor
    save_file(tensors, shard, {"format": "pt"})
    sign("lora/step-4")
    for action in ("--resume --max-steps 8", "--eval-only"):
        line = refused(train.run, f"{action} --out-dir lora {LORA} --data {tokens}", "train.py")
        assert f"has FP8 scales of blocks.0.mlp, a module that this model lacks; pass --model {NAME}" in line
    options = f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --set lora_alpha=8 --max-steps 1"
    assert run_train(f"{options} --init-from lora --out-dir next", tokens) == 0
    assert (stored("next/step-1", "fp8.")["fp8.blocks.0.mlp.fc1.scaling_bwd.scale"][0] != 1).all()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("change, message", [
    ("missing", "has adapters of {base}, which is missing; put that folder there"),
    ("other", "has adapters of other weights than those in {base}; restore the ones")])
def test_a_missing_or_changed_base_is_refused_in_one_line(change, message, tokens, refused):
    """For train.py, with --resume and --eval-only, and sample.py."""
    meta = json.loads(Path("lora/step-4/meta.json").read_text())
    base = str(Path("base/step-4").resolve())
    meta["base"]["folder"] = base
    Path("lora/step-4/meta.json").write_text(json.dumps(meta))
    sign("lora/step-4")
    if change == "missing":
        shutil.rmtree("base")
    else:
        assert run_train(f"{SHAPE} {STEPS} --dtype bfloat16 --seed 2 --out-dir new", tokens) == 0
        shutil.rmtree("base/step-4")
        shutil.copytree("new/step-4", "base/step-4")
    for action in ("--resume --max-steps 8", "--eval-only"):
        line = refused(train.run, f"{action} --out-dir lora {LORA} --data {tokens}", "train.py")
        assert message.format(base=base) in line
    assert message.format(base=base) in refused(sample.main, f"lora {LORA}", "sample.py")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("options, message", [
    ("--resume --set lora_rank=32 --max-steps 8 --out-dir lora", "the checkpoint has 16"),
    ("--init-from lora --set lora_rank=32 --out-dir new", "(16, 32) there and (32, 32) in the model")])
def test_another_lora_rank_is_refused_in_one_line(options, message, tokens, refused):
    shape = "" if "resume" in options else f"{SHAPE} {STEPS} --dtype bfloat16"
    assert message in refused(train.run, f"{shape} {LORA} {options} --data {tokens}", "train.py")


# ---------------------------------------------------------------- exports

@pytest.fixture(scope="module")
def llama(runs, tokens):
    """The folder of runs, with `llama` and `lora-llama` in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runs)
        assert run_train(f"{SHAPE} {STEPS} {LLAMA} --out-dir llama", tokens) == 0
        assert run_train(f"{SHAPE} {STEPS} {LLAMA} {LORA} --init-from llama --set lora_rank=32 "
                         "--out-dir lora-llama", tokens) == 0
    return runs


def logits_of_run(run):
    """Return the logits of a run in float32, and the tokens."""
    folder = checkpoint.find(run)
    meta = checkpoint.read_meta(folder)
    meta["model_config"]["lora_base"] = "bf16"
    ids = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(3))
    model = trained_model.load_run(folder, meta, NAME, open_hf_folder=import_hf.open_model)
    with torch.no_grad():
        return model(ids), ids


def without_adapters(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def add_adapters(model, folder):
    """Add the adapters of a PEFT folder to a model of transformers, as PEFT documents its format."""
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    modules = {name.rsplit(".", 2)[0] for name in tensors}
    assert {name.rpartition(".")[2] for name in modules} == set(config["target_modules"])
    for name in modules:
        module = model.get_submodule(name.removeprefix("base_model.model."))
        a, b = (tensors[f"{name}.lora_{letter}.weight"].float() for letter in "AB")
        assert len(a) == config["r"]
        update = config["lora_alpha"] / config["r"] * b @ a
        module.weight.data += update.T if config["fan_in_fan_out"] else update


@pytest.mark.parametrize("run, base", [("lora", "base"), ("lora-llama", "llama")])
def test_exports_have_the_logits_of_the_run(run, base, llama, monkeypatch, tmp_path):
    monkeypatch.chdir(llama)
    logits, ids = logits_of_run(run)
    # the weights of `base` are BF16, and so are the merged ones
    tolerance = 0.02 if base == "base" else 1e-5
    export_hf.export(run, tmp_path / "merged", model_name=NAME)
    merged = without_adapters(tmp_path / "merged")(ids).logits
    assert (merged - logits).norm() < tolerance * logits.norm()
    export_hf.export(base, tmp_path / "base")
    export_hf.export(run, tmp_path / "peft", model_name=NAME, peft=True)
    model = without_adapters(tmp_path / "base")
    assert (model(ids).logits - logits).norm() > 0.05 * logits.norm()
    add_adapters(model, tmp_path / "peft")
    assert (model(ids).logits - logits).norm() < 1e-5 * logits.norm()


@pytest.mark.parametrize("run", ["lora", "lora-llama"])
def test_peft_reads_exported_adapters(run, llama, monkeypatch, tmp_path, capsys):
    """With the command that exports the base, which --peft prints, and the code of the page."""
    pytest.importorskip("peft")
    monkeypatch.chdir(llama)
    logits, ids = logits_of_run(run)
    export_hf.main([run, f"{tmp_path}/peft", "--model", NAME, "--peft"])
    [command] = re.findall("python tools/export_hf.py (.+)", capsys.readouterr().out)
    export_hf.main(shlex.split(command))
    code = python_block("fine_tuning.md", "PeftModel").replace("hf/adapters", f"{tmp_path}/peft")
    names = {}
    exec(code.replace('"models/Qwen3-0.6B"', f'"{tmp_path}/peft-base", dtype="float32"'), names)
    assert (names["model"](ids).logits - logits).norm() < 1e-5 * logits.norm()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("options, message", [
    ("base hf --peft", "base/step-4 has no adapters; leave --peft out"),
    ("lora hf --peft --fp8", "--peft with --fp8: adapters are not in FP8; leave --fp8 out"),
    ("lora hf --fp8", "lora/step-4 has adapters: its scales are those of the base, not of the merged "
                      "weights; leave --fp8 out")])
def test_an_export_that_is_refused_is_one_line(options, message, refused):
    assert message in refused(export_hf.main, options, "tools/export_hf.py")


QWEN3 = ("--n-layer 2 --n-embd 64 --n-head 4 --n-kv-head 2 --head-dim 16 --n-inner 96 --no-tie-embeddings "
         "--vocab-size 288 --no-bias --use-rotary --use-rmsnorm --use-qk-norm --activation swiglu "
         "--layernorm-epsilon 1e-6")


@pytest.mark.usefixtures("here")
def test_a_folder_of_hugging_face_is_a_base(refused):
    """Also one that was imported: PEFT then finds the folder."""
    pytest.importorskip("transformers")
    make_model("hf")
    make_tokenizer("hf")
    documents = [f"the cat sat on mat {number}, no dog too. " for number in range(99)]
    write_tokens(documents, "data", tokenizer="hf:hf", val_fraction=0.3)
    options = f"{SHAPE} {QWEN3} {STEPS} {LORA} --set lora_base=fp8_and_transpose"
    assert run_train(f"{options} --init-from hf --out-dir run", "data") == 0
    shutil.copytree("run", "resumed", ignore=shutil.ignore_patterns("step-4"))
    assert run_train(f"--resume --out-dir resumed {LORA}", "data") == 0
    assert metrics("resumed") == metrics("run")
    assert Path(checkpoint.read_meta("run/step-4")["base"]["folder"]) == Path("hf").resolve()
    logits, ids = logits_of_run("run")
    export_hf.export("run", "peft", model_name=NAME, peft=True)
    model = without_adapters("hf")
    add_adapters(model, "peft")
    assert (model(ids).logits[..., :284] - logits[..., :284]).norm() < 1e-5 * logits.norm()
    assert json.loads(Path("peft/adapter_config.json").read_text())["base_model_name_or_path"].endswith("/hf")
    import_hf.import_folder("hf", "imported")
    options = f"--config imported/config.json {SHAPE} {STEPS} {LORA} --set lora_base=fp8_and_transpose"
    assert run_train(f"{options} --n-embd 64 --n-head 4 --init-from imported --out-dir again", "data") == 0
    assert losses("again") == losses("run")
    make_model("hf")
    line = refused(train.run, f"--resume --max-steps 8 --out-dir run {LORA}", "train.py")
    assert "has adapters of other weights than those in" in line


@pytest.mark.usefixtures("here")
def test_weights_that_only_a_run_of_adapters_has_are_kept(tokens):
    """Biases, which the base of the first run lacks: a run that begins with it stores them, resumes and
    exports."""
    assert run_train(f"{SHAPE} {STEPS} --no-bias --dtype bfloat16 --out-dir plain", tokens) == 0
    options = f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --bias"
    assert run_train(f"{options} --init-from plain --out-dir one", tokens) == 0
    assert run_train(f"{options} --init-from one --out-dir two", tokens) == 0
    expected = metrics("two")
    shutil.rmtree("two/step-4")
    assert run_train(f"--resume --out-dir two {LORA}", tokens) == 0
    assert metrics("two") == expected
    export_hf.export(checkpoint.find("two"), Path("hf"), model_name=NAME)


@pytest.mark.usefixtures("here")
def test_a_base_is_rounded_as_when_the_run_began(tokens, capsys):
    """Also after a resume in another dtype, whose checkpoints have it."""
    run = f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --init-from base --out-dir mixed"
    assert run_train(f"{run} --max-steps 2", tokens) == 0
    assert run_train(f"--resume --out-dir mixed {LORA} --dtype float32 --max-steps 4", tokens) == 0
    capsys.readouterr()
    assert run_train(f"--eval-only --out-dir mixed {LORA}", tokens) == 0
    assert f"{losses('mixed', 'val_loss')[-1]:.4f}" in capsys.readouterr().out
    meta = checkpoint.read_meta("mixed/step-4")
    model = trained_model.load_run(Path("mixed/step-4"), meta, NAME, "cpu", torch.float32)
    weight = model.blocks[0].attn.qkv.weight
    assert torch.equal(weight, weight.bfloat16().float())


@pytest.mark.usefixtures("here")
def test_an_export_may_round_the_sum_to_bf16(tokens):
    """Whatever that does to the logits: large weights amplify it."""
    transformers = pytest.importorskip("transformers")
    model = randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=256, eos_token_id=256)))
    for parameter in model.model.layers.parameters():
        parameter.data *= 3
    model.bfloat16().save_pretrained("hf")
    export_hf.fast_tokenizer(get_tokenizer("byte"), 64).save_pretrained("hf")
    import_hf.import_folder("hf", "imported")
    options = f"--config imported/config.json {STEPS} {LORA} --dtype bfloat16 --seq-len 32 --device cpu"
    assert run_train(f"{options} --micro-batch-size 1 --init-from imported --out-dir run", tokens) == 0
    export_hf.export("run", "merged", model_name=NAME)
    assert load_file("merged/model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    logits, ids = logits_of_run("run")
    merged = without_adapters("merged")(ids).logits
    assert (merged - logits).abs().max() > 0.02 * logits.abs().max()


@pytest.mark.usefixtures("here")
def test_a_float32_run_beside_a_base_in_bf16_is_exported(tokens):
    """The run has read the float32 masters of the base, which are not written."""
    options = f"{SHAPE} {STEPS} {LORA} --dtype float32 --init-from base --out-dir mixed"
    assert run_train(options, tokens) == 0
    export_hf.export("mixed", "hf", model_name=NAME)
    dtypes = {tensor.dtype for tensor in load_file("hf/model.safetensors").values()}
    assert dtypes == {torch.bfloat16}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_an_export_with_wrong_adapters_is_refused(factor, tokens, monkeypatch):
    """Also if they change the logits by a few percent only."""
    options = f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --init-from base --lr 3e-4 --out-dir strong"
    assert run_train(options, tokens) == 0
    pair = adapter_weights.Adapters.pair

    def scaled(added, name):
        found = pair(added, name)
        return found and (found[0], factor * found[1])

    monkeypatch.setattr(adapter_weights.Adapters, "pair", scaled)
    with pytest.raises(ValueError, match="logits .* differ by up to"):
        export_hf.export(checkpoint.find("strong"), Path("hf"), model_name=NAME)
    assert not Path("hf").exists()
