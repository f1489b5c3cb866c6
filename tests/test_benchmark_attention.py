"""benchmark_attention.py: its report, that it detects a wrong kernel, and its arithmetic. Times mean
something on a GPU only."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import benchmark_attention
import model_te_optimized
from bench import attention
from bench.attention import Shape
from bench.attention_report import verdict
from nanote import cli

SMALL = ["--shapes", "2x64x4x2x32", "--block-shapes"]


@pytest.fixture(autouse=True)
def one_thread():
    """At these sizes a second thread gains nothing, and on a busy machine it costs seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(tmp_path, *arguments):
    benchmark_attention.main([*arguments, "--json", str(tmp_path / "a.json")])
    result = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    return result, {row["name"]: row for row in result["rows"]}


def not_causal(shape):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=shape.heads != shape.kv_heads
        ).transpose(1, 2)
    return attend


def heads_mixed_up(shape):
    """Query head i uses KV head i % KV heads; correct is i // (heads / KV heads)."""
    return lambda q, k, v: attention.sdpa(
        Shape(shape.batch, shape.length, shape.heads, shape.heads, shape.head_dim)
    )(q, *(t.repeat(1, 1, shape.heads // shape.kv_heads, 1) for t in (k, v)))


def forgets_a_gradient(shape):
    return lambda q, k, v: attention.sdpa(shape)(q, k.detach() + 0 * k, v)


def wrong_in_the_last_sequence(shape):
    return lambda q, k, v: (
        attention.sdpa(shape)(q, k, v)
        * torch.tensor([1.0] * (shape.batch - 1) + [1.1], device=q.device).to(q).view(-1, 1, 1, 1)
    )


def gives_nan(shape):
    return lambda q, k, v: attention.sdpa(shape)(q, k, v) * math.nan


def test_it_writes_its_figures_and_draws_them(tmp_path, capsys):
    result, rows = rows_of(
        tmp_path, "--shapes", "2x64x4x2x32", "--block-shapes", "1x32x2x2x16", "--png", str(tmp_path / "a.png")
    )
    assert {"machine", "torch", "date", "command", "versions", "seconds"} <= set(result)
    kernels = [row for row in result["rows"] if row["part"] == "attention" and "why_not" not in row]
    blocks = [row for row in result["rows"] if row["part"] == "block" and "why_not" not in row]
    assert len(kernels) >= 3 and {row["precision"] for row in blocks} == {"bf16", "fp8"}
    for row in kernels + blocks:
        assert row["agrees"] and row["forward_ms"] > 0 and row["backward_ms"] > 0
        assert row["both_ms"] >= row["forward_ms"]
    for row in kernels:
        assert set(row["errors"]) == {"out", "dq", "dk", "dv"}
        assert all(1e-5 < error < 1e-2 for error in row["errors"].values())
        assert row["both_tflops"] == pytest.approx(1e-9 * 3.5 * 4 * 2 * 4 * 64 ** 2 * 32 / 2 / row["both_ms"])
    assert (tmp_path / "a.png").stat().st_size > 5000
    shown = capsys.readouterr().out
    assert "by hand" in shown and "WRONG" not in shown
    assert ("mean nothing" in shown) == (not attention.HAS_GPU)


@pytest.mark.parametrize(
    "wrong, tensors",
    [
        (not_causal, {"out", "dq", "dk", "dv"}), (heads_mixed_up, {"out", "dq", "dk", "dv"}),
        (forgets_a_gradient, {"dk"}), (wrong_in_the_last_sequence, {"out", "dq", "dk", "dv"}),
        (gives_nan, {"out", "dq", "dk", "dv"}),
    ],
)
def test_a_wrong_kernel_is_marked(wrong, tensors, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(attention.KERNELS, "by hand", wrong)
    result, rows = rows_of(tmp_path, *SMALL)
    row, limit = rows["by hand"], result["limits"]["kernel"]
    assert not row["agrees"]
    assert {name for name, error in row["errors"].items() if error is None or error > limit} == tensors
    marked = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert [line.startswith("by hand") for line in marked] == [True]
    assert all(
        other["agrees"] for name, other in rows.items() if name != "by hand" and "why_not" not in other
    )


@pytest.mark.parametrize(
    "name, error, told",
    [
        (attention.FP8_KERNEL, 0.11, "errs by 11%"), (attention.FP8_KERNEL, 0.5, "WRONG"),
        (attention.FP8_KERNEL, None, "WRONG"), ("by hand", 0.11, "WRONG"),
    ],
)
def test_rounding_is_excused_in_fp8_alone(name, error, told):
    row = {"name": name, "errors": {"out": 0.01, "dq": error}, "agrees": False}
    assert verdict(row) == told and verdict(row | {"agrees": True}) == ""


def test_a_wrong_block_is_marked(tmp_path, monkeypatch):
    right = model_te_optimized.Attention.attend
    monkeypatch.setattr(
        model_te_optimized.Attention,
        "attend",
        lambda self, q, k, v, **options: right(
            self, q, k, v.flip(1) if self.config.attention == "te" else v, **options
        ),
    )
    rows = rows_of(tmp_path, "--shapes", "--block-shapes", "1x64x2x2x16")[1]
    assert [rows[name]["agrees"] for name in ("sdpa, bf16", "te, bf16", "sdpa, fp8", "te, fp8")] == [
        True, False, True, False,
    ]


def test_a_kernel_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def fails(shape):
        raise RuntimeError("no kernel\nfor this")
    monkeypatch.setitem(attention.KERNELS, "by hand", fails)
    monkeypatch.setitem(attention.KERNELS, "none such", lambda shape: __import__("no_such_package"))
    rows = rows_of(tmp_path, *SMALL)[1]
    assert rows["by hand"]["why_not"] == "no kernel for this"
    assert rows["none such"]["why_not"] == "not installed: No module named 'no_such_package'"
    assert rows["SDPA, PyTorch's choice"]["agrees"] and "no kernel for this\n" in capsys.readouterr().out


def test_what_is_done_is_kept_when_the_run_is_cut_short(tmp_path, monkeypatch):
    def interrupted(shape):
        raise KeyboardInterrupt
    monkeypatch.setitem(attention.KERNELS, "SDPA, PyTorch's choice", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows_of(tmp_path, *SMALL)
    assert [row["name"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]] == ["by hand"]


def test_the_reference_is_attention():
    """Three positions, values 1, 2, 4, keys zero: all scores are equal, and each position gives the mean of
    the values so far."""
    q, k = torch.ones(1, 3, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 3, 1, 2, dtype=torch.bfloat16)
    v = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1).expand(1, 3, 1, 2).bfloat16()
    out, dq, dk, dv = attention.reference(q, k, v, torch.ones_like(q))
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1, 3 / 2, 7 / 3], dtype=torch.float64))
    torch.testing.assert_close(
        dv[:, 0, 0], torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3], dtype=torch.float64)
    )
    assert dq.abs().max() == 0  # with every key zero no query matters
    torch.testing.assert_close(
        dk[:, 0, 0] * 2**0.5, torch.tensor([-1 / 2 - 8 / 9, 1 / 2 - 2 / 9, 10 / 9], dtype=torch.float64)
    )


def test_flops():
    """2 sequences x 3 heads x 4 x 4 scores x width 5 = 480 multiply-adds per GEMM, 1920 FLOPs in two, half of
    them causal: 960."""
    assert Shape(2, 4, 3, 1, 5).flops() == (960, 2400, 3360)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--shapes", "32x1024"], "8x2048x12x12x64 works"), (["--shapes", "1x64x4x3x16"], "must divide 4"),
        (["--dtype", "fp16"], "--dtype"), (["--block-shapes", "0x64x4x4x16"], "--block-shapes"),
        (["--json", "none/a.json"], "no folder none"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, capsys):
    assert cli.run(lambda: benchmark_attention.main(arguments), "benchmark_attention.py") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("benchmark_attention.py: ") and words in said


@pytest.mark.gpu
def test_every_installed_kernel_agrees_on_a_gpu(tmp_path):
    rows = rows_of(tmp_path, "--shapes", "2x512x8x2x64", "--block-shapes", "2x512x8x8x64")[1]
    assert all(row["agrees"] for row in rows.values() if "why_not" not in row)
    assert {"SDPA, cuDNN", "te.DotProductAttention", "sdpa, fp8", "te, fp8"} <= {
        name for name, row in rows.items() if "why_not" not in row
    }
