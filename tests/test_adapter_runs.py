"""Runs of the edit `lora`: checkpoints with adapters alone, which name their base, and what is made of them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import sample
import train
from nanote import checkpoint
from trainer_tools import ROOT, losses, metrics, run_script, run_train, sign

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SHAPE = "--n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 --micro-batch-size 2 --grad-accum 2 --device cpu"
STEPS = "--lr 1e-2 --warmup-steps 0 --max-steps 4 --eval-tokens 64 --log-interval 1 --checkpoint-interval 2"
LLAMA = "--use-rmsnorm --use-rotary --activation swiglu --no-bias --n-kv-head 1"
LORA = "--model my_model.py:OptimizedGPT2Model"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokens):
    """A folder with my_model.py, the runs `base` and `lora` of it."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(ROOT / "model_te_optimized.py", folder / "my_model.py")
    diff = ROOT / "examples/edits/optimized/lora.diff"
    subprocess.run(["git", "apply", diff], cwd=folder, check=True)
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
    assert {name.split(".", 1)[1].rpartition(".")[0] for name in names if name.startswith("opt")} == parameters
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
        assert run_script("sample.py", ["lora", *LORA.split(), "--max-new-tokens", "4", "--device", "cpu"]) == 0
    finally:
        shutil.move(runs / "elsewhere", runs / "base")


@pytest.mark.usefixtures("here")
def test_a_run_goes_on_from_the_adapters_of_another(tokens):
    options = f"{SHAPE} {STEPS} {LORA} --dtype bfloat16 --set lora_alpha=8"
    assert run_train(f"{options} --init-from lora --lr 1e-30 --max-steps 1 --out-dir next", tokens) == 0
    for name, tensor in stored("lora/step-4", "model.").items():
        assert torch.equal(stored("next/step-1")[name], tensor), name
    found, expected = (checkpoint.read_meta(folder)["base"] for folder in ("next/step-1", "lora/step-4"))
    assert found["sha256"] == expected["sha256"] and Path(found["folder"]).name == "step-4"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("change, message", [
    ("missing", "has adapters of {base}, which is missing; put that folder there"),
    ("other", "has adapters of other weights than those in {base}; restore the ones")])
def test_a_wrong_base_is_one_line(change, message, tokens, refused):
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
def test_another_rank_is_one_line(options, message, tokens, refused):
    shape = "" if "resume" in options else f"{SHAPE} {STEPS} --dtype bfloat16"
    assert message in refused(train.run, f"{shape} {LORA} {options} --data {tokens}", "train.py")
