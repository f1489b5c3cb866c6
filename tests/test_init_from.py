"""--init-from: a new run that starts from the weights of another run or of a Hugging Face folder."""
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import train
from hf_folders import edit_json, make_model, make_tokenizer
from nanote import checkpoint
from nanote.options import read_config
from nanote.tokens import meta_checksum, write_tokens
from trainer_tools import OPTIONS, ROOT, losses, metrics, run_train, sign

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SHORT = f"{OPTIONS} --n-layer 1 --grad-accum 1 --max-steps 4 --checkpoint-interval 4"


@pytest.fixture(scope="module")
def source(tmp_path_factory, tokens):
    """The folder of a run in BF16 and FP8, whose float32 masters are in its checkpoint."""
    run = tmp_path_factory.mktemp("source") / "run"
    assert run_train(f"{SHORT} --max-steps 12 --dtype bfloat16 --lr 1e-2 --out-dir {run}", tokens) == 0
    return run


def stored(run, prefix="model."):
    return checkpoint.read_tensors(checkpoint.find(run), (prefix,))


def frozen(source, tokens, options=""):
    """Return the tensors of a run from `source` whose learning rate changes nothing."""
    again = f"--config {source}/config.json --init-from {source} --max-steps 1 --lr 1e-30 --weight-decay 0"
    assert run_train(f"{again} {options} --out-dir frozen", tokens) == 0
    return stored("frozen")


@pytest.mark.parametrize("options", ["", "--dtype float32", "--optimizer muon"])
def test_a_run_starts_where_another_one_ended(tokens, source, capsys, options):
    weights = frozen(source, tokens, options)
    masters = stored(source, "optimizer.")
    for name, weight in stored(source).items():
        master = masters.get(f"optimizer.{name.removeprefix('model.')}.master_param", weight)
        found = weights[name] if "float32" in options else stored("frozen", "optimizer.").get(
            f"optimizer.{name.removeprefix('model.')}.master_param")
        assert found is None or torch.equal(found, master.float()), name
    assert losses("frozen", "val_loss")[0] == pytest.approx(losses(source, "val_loss")[-1], abs=0.02)
    said = capsys.readouterr().out
    assert f"--init-from {source}: {len(weights)} tensors found: blocks.*.attn.proj.weight, " in said
    assert "0 of the model not found" in said and "0 of the source not used" in said
    assert json.loads(Path("frozen/config.json").read_text())["init_from"] == str(source)


def test_fp8_scales_are_taken_over(tokens, source):
    assert run_train(f"--config {source}/config.json --init-from {source}/step-12 --max-steps 1 --out-dir a "
                     "--checkpoint-interval 1", tokens) == 0
    before, after = stored(source, "fp8."), stored("a", "fp8.")
    for name in before:
        if name.endswith("amax_history"):  # a step has moved it by a row
            assert torch.equal(after[name][1:-1], before[name][2:]), name


def test_adapters_start_from_a_trained_model(tokens, source, capsys):
    shutil.copy(ROOT / "model_te_optimized.py", "my_model.py")
    diff = (ROOT / "examples/edits/optimized/lora.diff").read_text()
    subprocess.run(["patch", "-p1", "-s"], input=diff, text=True, check=True)
    weights = frozen(source, tokens, "--model my_model.py:OptimizedGPT2Model --set lora_rank=32 --lr 1e-2")
    said = capsys.readouterr().out
    assert "  8 of the model not found, so as initialized: blocks.*.attn.lora_proj.a, " in said
    assert weights["model.blocks.0.attn.lora_qkv.a"].shape[0] == 32
    assert all(weights[name].any() for name in weights if name.endswith(".b")), "they learn"
    assert all(".lora_" in name for name in weights), "the others are those of the source"
    assert losses("frozen", "loss")[0] == pytest.approx(losses(source, "loss")[-1], abs=0.5)


def test_tensors_that_the_model_lacks_are_left_out(tokens, source, capsys):
    assert run_train(f"{SHORT} --n-layer 2 --max-steps 1 --out-dir two", tokens) == 0
    arguments = f"{SHORT} --n-head 4 --max-steps 1 --init-from two --out-dir one"
    assert run_train(arguments, tokens) == 0
    said = capsys.readouterr().out
    assert "of the source not used: blocks" in said and "n_head is 2 there and 4 in the model" in said
    assert run_train("--resume --config one/config.json --max-steps 2 --out-dir one", tokens) == 0


def test_a_resumed_run_does_not_read_the_source_again(tokens, source, refused):
    shutil.copytree(source, "source")
    assert run_train(f"{SHORT} --checkpoint-interval 2 --init-from source --out-dir whole", tokens) == 0
    assert "--init-from: is for a new run" in refused(
        train.run, "--resume --out-dir whole --init-from source", "train.py")
    assert read_config(f"{SHORT} --init-from source".split(), "whole").resume, "as torchrun restarts it"
    shutil.rmtree("source")
    shutil.copytree("whole", "cut")
    shutil.rmtree("cut/step-4")
    assert run_train("--resume --out-dir cut", tokens) == 0
    assert metrics("cut") == metrics("whole")
    assert checkpoint.read_meta("cut/step-4")["config"]["init_from"] == "source"


@pytest.mark.parametrize("given, message", [
    ("--n-embd 128", "proj.weight is (64, 64) there and (128, 128) in the model; pass the source's sizes"),
    ("--model te --init-from pair", "none of its tensors (other) is in the model"),
    ("--init-from absent", "absent: no config.json"),
    ("--data other", "tokenized with other, but the run uses byte")])
def test_a_source_that_does_not_fit_is_one_line(tokens, source, refused, given, message):
    shutil.copytree(source, "pair")
    [shard] = Path("pair/step-12").glob("*.safetensors")
    shard.unlink()
    save_file({"model.other": torch.zeros(3)}, shard, {"format": "pt"})
    sign("pair/step-12")
    shutil.copytree(tokens, "other")
    meta = json.loads(Path("other/meta.json").read_text())
    meta["tokenizer"] = "other"
    Path("other/meta.json").write_text(json.dumps(meta | {"sha256": meta_checksum(meta)}))
    arguments = f"{SHORT} --data {tokens} --init-from {source} --out-dir run {given}"
    assert message in refused(train.run, arguments, "train.py")


def test_data_of_another_tokenizer_than_a_folders(tokens, refused):
    """Refused if its tokenizer.json gives other ids; what cannot be read is not compared."""
    pytest.importorskip("transformers")
    make_model("hf")
    make_tokenizer("hf")
    make_tokenizer("other", text="a cat is no dog and a mat is no hat. ")
    documents = [f"the cat sat on mat {number}, no dog too. " for number in range(99)]
    for name in ("hf", "other"):
        write_tokens(documents, f"data-{name}", tokenizer=f"hf:{name}", val_fraction=0.3)
    edit_json("hf/tokenizer_config.json", eos_token="<|endoftext|>")  # ids of text stay
    qwen3 = "--n-head 4 --n-kv-head 2 --head-dim 16 --n-inner 96 --no-tie-embeddings --vocab-size 288"
    options = (f"{OPTIONS} {qwen3} --no-bias --use-rotary --use-rmsnorm --use-qk-norm --activation swiglu "
               "--max-steps 1")
    for data in ("data-other", tokens):
        line = refused(train.run, f"{options} --init-from hf --data {data} --out-dir run", "train.py")
        assert f"--init-from hf: its tokenizer.json has other ids than --data {data}" in line
        assert "--tokenizer hf:hf" in line
    assert run_train(f"{options} --init-from hf --out-dir same", "data-hf") == 0
    shutil.rmtree("other")
    assert run_train(f"{options} --init-from hf --out-dir unknown", "data-other") == 0
