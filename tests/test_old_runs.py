"""Runs of version 0.2 with the options --fp8-param and --offload-activations, which are gone.

Version 0.2 (commit 34a3220) has trained both for 6 steps; the folders hold the checkpoint of step 3.
"""
import shutil
from pathlib import Path

import pytest
import torch

from nanote import checkpoint, models
from nanote.config import TrainConfig
from nanote.optimizers import make_optimizer
from tools.export_hf import export
from tools.tensor_files import RunWeights
from trainer_tools import metrics, run_script, run_train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
DATA = Path(__file__).parent / "data"
FP8_PARAM = DATA / "run-0.2-fp8-param"  # in BF16, with float32 masters of all weights
OFFLOADED = DATA / "run-0.2-offload"
TOKENS = str(DATA / "run-0.1/tokens")


@pytest.mark.parametrize("old_run, gone, tolerance", [
    (FP8_PARAM, "fp8_param True", 2e-3), (OFFLOADED, "offload_activations 1", 1e-5)])
def test_a_run_resumes_without_the_option(old_run, gone, tolerance, capsys):
    shutil.copytree(old_run, "run")
    expected = metrics("run")
    assert run_train("--resume --out-dir run", TOKENS) == 0
    lines = capsys.readouterr().out.splitlines()
    about_the_option = [line for line in lines if "no such option" in line]
    assert about_the_option == [f"run/step-3: left out, since this version has no such options: {gone}"]
    found = metrics("run")
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(found, expected):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert ours["lr"] == theirs["lr"]
    assert found[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_in_fp8_come_back_as_their_masters(dtype):
    folder = FP8_PARAM / "step-3"
    options = checkpoint.read_meta(folder)["model_config"]
    model = models.instantiate("optimized", models.make_model_config("optimized", options), dtype=dtype)
    optimizer = make_optimizer(model, TrainConfig(moment_dtype="bfloat16"))
    checkpoint.load(folder, model, optimizer)
    stored = checkpoint.read_tensors(folder, ("model.", "optimizer."))
    for name, parameter in model.named_parameters():
        master = stored[f"optimizer.{name}.master_param"]
        assert torch.equal(parameter, master.to(dtype)), name
        if dtype == torch.bfloat16:
            assert torch.equal(optimizer.state[parameter]["master_param"], master), name
        else:
            assert "master_param" not in optimizer.state[parameter], name
    rounded, master = (stored[name.format("blocks.0.mlp.fc1_weight")]
                       for name in ("model.{}", "optimizer.{}.master_param"))
    assert not torch.equal(rounded, master.to(rounded.dtype)), "0.2 has stored the values in FP8"


def test_weights_in_fp8_can_be_evaluated_sampled_and_copied(capsys):
    shutil.copytree(FP8_PARAM, "run")
    assert run_train("--eval-only --out-dir run", TOKENS) == 0
    shown = capsys.readouterr().out
    assert shown.count("fp8_param True") == 1
    loss_of_step_3 = metrics("run")[2]["val_loss"]
    assert f"{loss_of_step_3:.2f}" in shown
    assert run_script("sample.py", ["run", "--max-new-tokens", "4"]) == 0
    options = "--config run/config.json --init-from run --max-steps 1"
    assert run_train(f"{options} --out-dir copy", TOKENS) == 0
    assert metrics("copy")[0]["loss"] == pytest.approx(metrics("run")[3]["loss"], rel=0.02)


def test_weights_in_fp8_are_exported_as_their_masters():
    pytest.importorskip("transformers")
    export(FP8_PARAM, Path("folder"), "float32")
    from safetensors.torch import load_file
    exported = load_file("folder/model.safetensors")
    master = RunWeights(FP8_PARAM / "step-3", masters=True)["blocks.0.attn.proj.weight"]
    assert torch.equal(exported["model.layers.0.self_attn.o_proj.weight"], master)
