"""Weights that FSDP2 gathers in FP8, on two processes that communicate by gloo; on GPUs: test_multi_gpu.py.

Each run is compared with one whose weights are gathered in BF16 and quantized by every rank, as by one GPU.
"""
import json

import pytest
import torch

from trainer_tools import ROOT, run_ranks

pytest.importorskip("triton")
RUNS = {  # kind of model, and options of its config
    "tied": ("fast", {}),
    "untied": ("optimized", dict(tie_embeddings=False, gradient_checkpointing=True)),
    "mixed": ("optimized", dict(
        n_layer=2, fp8_skip_first=1, tie_embeddings=False, fp8_lm_head=False)),
    "no FP8": ("optimized", dict(use_fp8=False)),
}
MATRICES = [f"blocks.0.{name}" for name in (
    "attn.qkv.weight", "attn.proj.weight", "mlp.fc1_weight", "mlp.fc2_weight")]
PROGRAM = (ROOT / "tests/fp8_gather_ranks.py").read_text()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return what the first rank found out about each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        output, _ = run_ranks(PROGRAM, [str(ROOT), json.dumps(RUNS)], TRITON_INTERPRET="1",
                              CUDA_VISIBLE_DEVICES="")
    return {report["name"]: report for report in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("run", ["tied", "untied", "mixed"])
def test_training_is_that_of_weights_gathered_in_bf16(reports, run):
    """Bit for bit: losses, gradient norms, weights, scales, amax histories; after it the losses with FP8 and
    without."""
    report = reports[run]
    for found in ("losses", "values", "after"):
        assert report[found] == report[f"bf16_{found}"], found
    with_fp8, without_fp8 = report["after"]
    assert with_fp8 != without_fp8


@pytest.mark.parametrize("run", ["tied", "untied", "mixed"])
def test_embeddings_stay_gathered_until_the_last_micro_batch(reports, run):
    """And lm_head, so that a step gathers them once. Blocks are gathered for each micro-batch."""
    after_first, after_last, after_only = reports[run]["gathered"]
    assert "wte.weight" in after_first and after_last == after_only == []
    assert not any(name.startswith("blocks.") for name in after_first)


@pytest.mark.parametrize("run", ["tied", "untied", "mixed"])
def test_two_passes_may_precede_a_backward_pass(reports, run):
    """The second one quantizes the weights anew. The first one's dgrad reads those, within FP8's rounding."""
    found = reports[run]["two_passes"]
    for name, expected in reports[run]["bf16_two_passes"].items():
        expected = torch.tensor(expected)
        assert (torch.tensor(found[name]) - expected).norm() < 0.2 * expected.norm(), name


def test_weights_that_fp8_gemms_read_are_gathered_in_fp8(reports):
    """Not those of a tied embedding, a block without FP8, lm_head in BF16 or a run without FP8."""
    fp8 = {run: reports[run]["gathered_in_fp8"] for run in RUNS}
    assert fp8["tied"] == MATRICES
    assert fp8["untied"] == [*MATRICES, "lm_head.weight"]
    assert fp8["mixed"] == [name.replace("blocks.0", "blocks.1") for name in MATRICES]
    assert fp8["no FP8"] == []


def test_weights_that_ranks_cannot_divide_are_gathered_in_bf16():
    """Three ranks: the QKV weight has 96 rows, the others 32 and 64."""
    runs = {"uneven": ["optimized", {}]}
    environment = dict(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    for output in run_ranks(PROGRAM, [str(ROOT), json.dumps(runs)], count=3, **environment):
        assert json.loads(output)["gathered_in_fp8"] == ["blocks.0.attn.qkv.weight"]


def test_gathered_bytes_are_those_of_one_process(reports):
    """Also the scales, of weights from the same checkpoint, which goes both ways."""
    whole, bf16, fp8 = reports["untied"]["loaded"]
    assert whole[0] == bf16[0] == fp8[0] == reports["untied"]["after"][0]
    assert whole[1] == bf16[1] == fp8[1] and len(fp8[1]) == 5
