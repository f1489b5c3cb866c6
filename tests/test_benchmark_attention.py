"""benchmark_attention.py: its errors are those against float64, and a wrong kernel is marked."""

import json

import pytest
import torch
import torch.nn.functional as F

import benchmark_attention
from bench import attention
from bench.attention import Shape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU")
SHAPE = Shape(2, 64, 4, 2, 16)


def measure(make):
    query, key = (SHAPE.batch, SHAPE.length, 4, 16), (SHAPE.batch, SHAPE.length, 2, 16)
    sets = attention.random_sets([query, key, key])
    return attention.measure_kernel(make, SHAPE, sets, attention.reference(*sets[0][0], sets[0][1]))


def not_causal(shape):
    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    return attend


def test_the_reference_is_causal_attention_of_the_last_head():
    q, k, v = (torch.randn(1, 8, heads, 4, requires_grad=True, dtype=torch.float64) for heads in (2, 1, 1))
    grad = torch.randn(1, 8, 2, 4, dtype=torch.float64)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    grads = torch.autograd.grad(expected, (q, k, v), grad)
    for found, wanted in zip(attention.reference(q, k, v, grad), (expected, *grads)):
        torch.testing.assert_close(found, wanted[0].detach())


@pytest.mark.parametrize("name", attention.KERNELS)
def test_every_kernel_agrees_with_float64(name):
    row = measure(attention.KERNELS[name])
    assert row["agrees"] and max(row["errors"].values()) < 0.01
    both = SHAPE.flops()[2] / row["both_ms"] / 1e9
    assert row["both_tflops"] == pytest.approx(both) and row["forward_ms"] > 0


def test_a_kernel_that_is_wrong_or_fails_says_so():
    row = {"name": "all tokens", "part": "attention"} | measure(not_causal)
    assert not row["agrees"] and attention.text_of(row).endswith("WRONG")

    def fails():
        raise ImportError("No module named 'flash_attn'")

    row = attention.row_of(fails, name="flash")
    assert row == {"name": "flash", "why_not": "not installed: No module named 'flash_attn'"}
    assert "not installed" in attention.text_of(row)


def test_the_script_writes_a_row_for_each_kernel(tmp_path, capsys):
    path = tmp_path / "attention.json"
    benchmark_attention.main(f"--shapes 1x16x2x1x16 --json {path}".split())
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == list(attention.KERNELS) and rows[0]["part"] == "attention"
    assert "these times mean nothing" in capsys.readouterr().out
