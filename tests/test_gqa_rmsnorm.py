"""bench/gqa_rmsnorm.py: RMSNorm and GQA against the default block; the largest micro-batch that fits."""

import json
from types import SimpleNamespace

import pytest
import torch

from bench import gqa_rmsnorm as script
from nanote import cli


def run(arguments) -> int:
    return cli.run(lambda: script.main(arguments.split()), "bench/gqa_rmsnorm.py")


@pytest.mark.parametrize("largest, guess", [(33, 33), (33, 20), (33, 36), (1, 4), (0, 3)])
def test_the_largest_micro_batch_is_found_from_any_guess(largest, guess):
    tried = []
    assert script.largest_micro_batch(lambda n: tried.append(n) or n <= largest, guess) == largest
    assert len(tried) == len(set(tried)) and largest + 1 in tried  # the next one was tried, and did not fit


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU")
def test_each_switch_is_timed_in_turns_with_the_default(tmp_path, monkeypatch, capsys):
    timed, real = [], script.measure.measure

    def measure(*args, **kwargs):
        timed.append(kwargs["baseline_step"])
        return real(*args, **kwargs)

    monkeypatch.setattr(script.measure, "measure", measure)
    monkeypatch.setattr(script.measure, "WARMUP", 1)
    assert run(f"--shapes 124m-b32 --steps 4 --json {tmp_path}/rows.json") == 0
    assert "the times mean nothing" in capsys.readouterr().out
    rows = {row["switch"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == list(script.SWITCHES) and timed[0] is None and timed[1] is timed[2] is not None
    default, rms, gqa = rows.values()
    assert default["speed_vs_default"] == 1 and rms["speed_vs_default"] > 0 and gqa["profile_ms"]["norm"] > 0
    width, layers, heads, groups = 64, 2, 4, 1  # the CPU's small shape, with a third of 4 heads
    assert default["parameters"] - rms["parameters"] == (2 * layers + 1) * width  # RMSNorm has no bias
    fewer = 2 * (heads - groups) * (width // heads)  # rows of the QKV weight
    assert default["parameters"] - gqa["parameters"] == layers * (width + 1) * fewer
    assert default["kv_cache_bytes_per_token"] == 2 * layers * width * 4
    assert gqa["kv_cache_bytes_per_token"] * heads == default["kv_cache_bytes_per_token"] * groups
    lines = script.table(list(rows.values())).splitlines()
    assert len(lines) == 2 + 3 and f"| {rms['speed_vs_default']:.3f} |" in lines[3]


def test_the_table_compares_memory_with_the_default():
    row = {"shape": "124m-b32", "arm": "fp8", "ms": 40.0, "speed_vs_default": 1.0, "peak_gib": 16.0,
           "profile_ms": {"norm": 3.1}, "parameters": 124_475_904, "kv_cache_bytes_per_token": 36_864,
           "memory_limit_gib": 16.0}
    rows = [row | {"switch": "default", "sequences": 32},
            row | {"switch": "RMSNorm", "speed_vs_default": 1.0123},
            row | {"switch": "GQA", "peak_gib": 15.0, "kv_cache_bytes_per_token": 12_288, "sequences": 3},
            {"shape": "c4096", "arm": "fp8", "switch": "default", "error": "out of memory"}]
    assert script.table(rows).splitlines()[2:] == [
        "| 124m-b32 | default | 40.00 | 1.000 | 3.10 | 16.00 | 124.5 M | 36.0 | 32 in 16 GiB |",
        "| 124m-b32 | RMSNorm | 40.00 | 1.012 | 3.10 | 16.00 (+0.0 %) | 124.5 M | 36.0 (+0.0 %) |  |",
        "| 124m-b32 | GQA | 40.00 | 1.000 | 3.10 | 15.00 (-6.2 %) | 124.5 M | 12.0 (-66.7 %) | 3 in 16 GiB |",
    ]


@pytest.mark.parametrize("arguments, complaint", [
    ("--shapes nothing", "--shapes 'nothing' is unknown; use 124m-b32"),
    ("--arm fp9", "--arms 'fp9' is unknown"),
    ("--arm fp8-fused", "--arm fp8-fused: only the optimized model has these switches; fp8 works"),
    ("--steps 3", "--steps 3: must be 4 or more"), ("--json nowhere/x.json", "there is no folder nowhere")])
def test_bad_options_are_one_line(arguments, complaint, capsys):
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench/gqa_rmsnorm.py: ") and complaint in line


def test_memory_is_limited_only_while_micro_batches_are_tried(monkeypatch):
    limits, gpu = [], SimpleNamespace(total_memory=64 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: limits.append(part))

    def trains(config, device):
        assert limits == [0.25] and config.seq_len == 1024 and config.cuda_graph == "off"
        if config.micro_batch_size > 40:
            raise ZeroDivisionError
        return config.micro_batch_size <= 33

    monkeypatch.setattr(script, "trains", trains)
    config = script.TrainConfig(micro_batch_size=8, seq_len=4096)
    assert script.largest_under_limit(config, 16, 15.5, "cuda") == {"sequences": 33, "memory_limit_gib": 16}
    assert limits == [0.25, 1.0]
    limits.clear()
    with pytest.raises(ZeroDivisionError):
        script.largest_under_limit(config, 16, 8, "cuda")
    assert limits == [0.25, 1.0]


@pytest.mark.gpu
def test_a_graph_stays_valid_while_another_fp8_model_is_measured():
    """The default's CUDA graphs are replayed after TE's global state was reset for the next model."""
    device = torch.device("cuda")
    config = script.TrainConfig(n_layer=2, n_embd=256, n_head=4, vocab_size=512, seq_len=128,
                                             micro_batch_size=4, n_positions=128, fp8_recipe="delayed")
    batches = script.arms.make_batches(config, device)

    def losses(interrupted):
        script.arms.free()
        step = script.arms.build_te(config, device, batches[0])
        found = [step(batches, 1e-3)[0].item() for _ in range(5)]
        if interrupted:
            script.arms.free()
            other = script.arms.build_te(config, device, batches[0])
            for _ in range(3):
                other(batches, 1e-3)
        return found + [step(batches, 1e-3)[0].item() for _ in range(5)]

    assert losses(True) == pytest.approx(losses(False), abs=0.02)
