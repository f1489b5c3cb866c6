"""benchmark_te.py and benchmark_attention.py: the baseline is the same network, errors are those against
float64. Mistakes of all benchmarks are here."""
import dataclasses
import importlib
import json
import math
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import benchmark_attention
import benchmark_te
from bench import (
    attention,
    first_commits,
    gaps,
    minimal,
    multi_gpu,
    pictures,
    plain_gpt,
    report,
    step,
    turns,
)
from bench.attention import Shape
from bench.step import arm_config
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote.config import TrainConfig
from trainer_tools import ROOT, randomize, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU")
CPU = torch.device("cpu")
TINY = dict(vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=4)
BLOCKS = {"gpt2": {}, "modern": step.MODERN | dict(n_kv_head=2),
          "untied": dict(tie_embeddings=False, head_dim=32, n_inner=96)}
NAMES = [  # ours, and PlainGPT's
    ("attn.qkv.layer_norm_", "norm1."), ("mlp.layer_norm_", "norm2."), ("lm_head.layer_norm_", "norm."),
    ("attn.", ""), ("mlp.fc1_", "fc1."), ("mlp.fc2_", "fc2.")]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_plain_gpt_is_the_same_network(block, by_hand):
    config = OptimizedConfig(**TINY | BLOCKS[block])
    model = randomize(OptimizedGPT2Model(config))
    plain = plain_gpt.PlainGPT(config, by_hand)
    weights = {}
    for name, value in model.state_dict().items():
        for own, of_plain in NAMES:
            name = name.replace(own, of_plain)
        weights[name] = value
    plain.load_state_dict(weights)
    tokens = torch.randint(96, (2, 33))
    x, y = tokens[:, :-1], tokens[:, 1:]
    logits = model(x)
    torch.testing.assert_close(plain(x), logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    torch.testing.assert_close(plain(x, y), model(x, y), rtol=1e-5, atol=1e-5)


def test_compile_measures_what_its_time_allows(tmp_path):
    path = tmp_path / "compile.json"
    benchmark_te.main(f"--compile --time-budget 1 --json {path}".split())
    first, *_, last = json.loads(path.read_text())
    assert first["engine"] == "te_reference"
    assert first["recipe"] == "none"
    assert first["model"] == "optimized"
    assert first["ms"] > 0
    assert first["graph_breaks"] == 0
    assert last["mode"] == "max-autotune-no-cudagraphs"
    assert last["error"] == "not run: time budget"


FIELDS = {
    "shape", "block", "arm", "ms", "tokens_per_s", "ratio_to_plain", "mfu", "peak_gib", "gpu", "torch", "te",
    "date", "command", "commit", "model_config"}


def test_shapes_write_rows_and_keep_those_of_other_arms(tmp_path, capsys):
    path = tmp_path / "speed.json"
    command = f"--shapes 124m-b32 --blocks gpt2 --steps 4 --json {path} --arms"
    benchmark_te.main(f"{command} plain-eager bf16 fp8".split())
    assert "the times mean nothing" in capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert [row["arm"] for row in rows] == ["plain-eager", "bf16", "fp8"]
    for row in rows:
        assert FIELDS <= row.keys()
        assert row["tokens_per_s"] == pytest.approx(1e3 * 2 * 32 / row["ms"], rel=1e-4)
        for field in ("ms", "forward_ms", "backward_ms", "optimizer_ms"):
            assert row[field] > 0
    benchmark_te.main(f"{command} bf16 fp8-nvfp4".split())
    again = {row["arm"]: row for row in json.loads(path.read_text())}
    assert list(again) == ["plain-eager", "fp8", "bf16", "fp8-nvfp4"]
    assert again["fp8"] == rows[2]
    assert "fp8-recipe nvfp4" in again["fp8-nvfp4"]["error"]


@pytest.mark.parametrize("arm, options", [
    ("fp8-bf16_head", {"fp8_lm_head": False}),
    ("fp8-skip_first1-skip_last2", {"fp8_skip_first": 1, "fp8_skip_last": 2}),
    ("fp8-loss4-bf16_head-te", {"loss_chunks": 4, "fp8_lm_head": False, "model": "te"})])
def test_an_arm_stands_for_options_of_train_py(arm, options):
    changed = dataclasses.replace(TrainConfig(), fp8_recipe="delayed", **options)
    assert arm_config(arm, TrainConfig()) == changed


IDENTITY = ["-c", "user.name=test", "-c", "user.email=test@localhost"]


def commit(folder, *paths):
    for arguments in (["add", *paths], ["commit", "-m", "a change"]):
        subprocess.run(["git", *IDENTITY, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_row_has_the_commit_that_measured_it(tmp_path, monkeypatch):
    def run_git(*arguments):
        command = ["git", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit_of_a_row():
        rows = report.Rows(None, ["arm"], "benchmark_te.py", [])
        rows.add({"arm": "bf16"})
        document = report.write_report("test_shapes.py", [], {})
        assert document["commit"] == rows[0]["commit"]
        return rows[0]["commit"]

    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    monkeypatch.delenv("NANOTE_COMMIT", raising=False)
    assert commit_of_a_row() is None, "a copy without its history"
    (tmp_path / "train.py").write_text("x = 1")
    run_git("init")
    commit(tmp_path, "train.py")
    (tmp_path / "untracked.py").write_text("x = 1")
    assert commit_of_a_row() == run_git("rev-parse", "HEAD")
    (tmp_path / "train.py").write_text("x = 2")
    assert commit_of_a_row() == run_git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("NANOTE_COMMIT", "34a3220")
    assert commit_of_a_row() == "34a3220"


def test_the_first_commit_with_all_figures_is_found(tmp_path, monkeypatch):
    """Under whatever name the file had then; none for rows that say with which commit they were measured."""
    rows = [{"ms": 1.5, "date": "2026-11-21", "commit": "c0"}, {"ms": 2.5, "date": "2026-11-21"},
            {"ms": 9.5, "date": "2026-11-28", "commit": "c9"}]
    monkeypatch.setattr(first_commits, "ROOT", tmp_path)
    first_commits.git("init")
    path, older = tmp_path / "speed.json", tmp_path / "old.json"
    for content in (rows[:1], rows[:2], rows):
        older.write_text(json.dumps(content, indent=1))
        commit(tmp_path, older)
    wanted = first_commits.git("log", "-1", "--skip=1", "--format=%h").strip()
    first_commits.git("mv", "old.json", "speed.json")
    commit(tmp_path, path)
    assert first_commits.first_commit(path) == wanted
    path.write_text(json.dumps(rows[2:]))
    assert first_commits.first_commit(path) is None


def test_a_recorded_command_has_no_path_of_the_machine():
    arguments = ["/root/old", "--json", str(report.ROOT / "results/turns.json"), "--data", "data/corpus"]
    assert report.command_line("bench/turns.py", arguments) == (
        "python bench/turns.py old --json results/turns.json --data data/corpus")


def test_without_a_mode_it_prints_the_table_of_formats(tmp_path, capsys):
    path = tmp_path / "formats.json"
    arguments = f"--shape 4 768 12 8 256 --steps 4 --arms bf16-custom fp8-custom --json {path}"
    benchmark_te.main(arguments.split())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    last_line = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    bf16, fp8 = json.loads(path.read_text())
    assert bf16["shape"] == "2x64x4x2x32", "a tiny model, without a GPU"
    bf16_ms = bf16["forward_ms"] + bf16["backward_ms"]
    fp8_ms = fp8["forward_ms"] + fp8["backward_ms"]
    expected = [
        fp8["forward_ms"], fp8["backward_ms"], fp8_ms, bf16_ms / fp8_ms, fp8["ms"], bf16["ms"] / fp8["ms"]]
    assert last_line == ["custom", "FP8 HYBRID", *(f"{value:.2f}" for value in expected)]


MISTAKES = {  # {command: (arguments, what its line says)}
    "benchmark_te.py": [
        ("--shapes nothing", "--shapes 'nothing': unknown; use 124m-b32"),
        ("--steps 1", "--steps 1: must be 4 or more"), ("--arms plain fp16", "--arms 'fp16': unknown"),
        ("--sweep --stack", "one at a time"), ("--shape 4 768 13 8 512", "4 768 12 8 512 works"),
        ("--blocks modern", "--blocks: the table of formats has none; add --shapes guide, for example"),
        ("--json none/x.json", "there is no folder none"), ("--json results", "results: is a folder")],
    "benchmark_attention.py": [
        ("--shapes 2x128x4", "8x2048x12x12x64 works"),
        ("--shapes 2x128x4x3x32", "KV heads must divide 4 heads"),
        ("--json results", "results: is a folder; name a file in it")],
    "bench/multi_gpu.py": [
        ("", "one process; start it with torchrun --nproc-per-node 2"),
        ("--layouts nanogpt", "--layouts nanogpt: needs a nanoGPT checkout; name its folder with --nanogpt"),
        ("--layouts ddp2", "--layouts 'ddp2': unknown; use ddp, fsdp"),
        ("--accum 0", "--accum 0: must be at least 1"), ("--steps 3", "--steps 3: must be at least 4")],
    "bench/rank_trace.py": [
        ("", "one process; start it with torchrun --nproc-per-node 2"),
        ("--layouts nanogpt", "--layouts 'nanogpt': unknown; use ddp, fsdp"),
        ("--steps 0", "--steps 0: must be at least 1"), ("--events none", "none: there is no such folder")],
    "bench/turns.py": [("OLD NEW --cases loops --json rows.json", "there is no GPU here")],
    "bench/edits.py": [("--steps 0", "--steps 0: must be at least 4")],
    "bench/compiled.py": [("--steps 0", "--steps 0: must be at least 4")],
    "bench/minimal.py": [("--width 0", "--width 0: must be at least 1")],
    "test_stability.py": [
        ("--histories 16 0", "--histories 0: must be at least 1"),
        ("--margins -1", "--margins -1: must be at least 0"), ("--jobs 0", "--jobs 0: must be at least 1")],
    "bench/paired.py": [
        ("--start 0.5 --stop 0.2", "must be fractions of the run in this order"),
        ("--arms nanogpt", "NANOGPT is not set; name the folder of a nanoGPT checkout"),
        ("--json none/x.json", "there is no folder none"),
        ("--arms bf16", "is the baseline, which is trained anyway"),
        ("--seeds 1 2 1", "--seeds: 1 occurs twice"),
        ("--tokens 45e6 45.01e6", "--tokens: 344 steps occurs twice"),
        ("--start 0.5 --stop 0.501", "no step of 344 lies between"),
        ("--arms fp8-weights", "--arms fp8-weights: --model fast: ")],
    "bench/nanogpt.py": [
        (".", "there is no model.py; name the folder of a nanoGPT checkout"),
        ("other", "has no GPT; name"), ("other --steps 0", "--steps 0: must be at least 4")],
    "bench/finetune.py": [
        ("--arms plain", "--arms plain: PlainGPT has no biases of q, k and v alone; use bf16 or fp8"),
        ("--arms fp16", "--arms 'fp16': unknown"), ("--steps 0", "--steps 0: must be at least 4")],
}


@pytest.mark.parametrize("command, arguments, complaint", [
    (command, *mistake) for command, mistakes in MISTAKES.items() for mistake in mistakes])
def test_a_mistake_is_one_line(command, arguments, complaint, in_tmp_path, refused):
    Path("results").mkdir()
    Path("other").mkdir()
    Path("other/model.py").write_text("x = 1")
    module = importlib.import_module(command.removesuffix(".py").replace("/", "."))
    line = refused(module.main, arguments, command)
    assert complaint in line and line.count(f"{command}: ") == 1


def test_efficiency_of_gpus_is_that_of_the_slowest_one():
    """Beside the mean speed of each GPU alone, 1 / 10 and 1 / 30 steps a ms."""
    times_of_ranks = [{"one": [10, 10], "all": [12, 25]}, {"one": [30, 30], "all": [20, 25]}]
    assert multi_gpu.efficiencies_of_steps(times_of_ranks) == pytest.approx([15 / 20, 15 / 25])


def test_a_model_that_fits_once_has_a_row_without_efficiency(tmp_path):
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from bench import multi_gpu
multi_gpu.main(["--shapes", "124m-b32", "--layouts", "fsdp", "--recipes", "none", "--steps", "4",
                "--no-compare", "--json", sys.argv[2]])
"""
    run_ranks(program, [str(ROOT), str(tmp_path / "rows.json")])
    row, = json.loads((tmp_path / "rows.json").read_text())
    assert row["tokens_per_s_per_gpu"] > 0 and math.isfinite(row["loss"])
    assert "efficiency" not in row and "ms_one" not in row


def test_turns_with_an_error_end_with_1(in_tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "torch", Mock())  # has a GPU
    assert turns.main("OLD NEW --cases loops --json rows.json".split()) == 1
    [row] = json.loads(Path("rows.json").read_text())["rows"]
    assert "No such file or directory: " in row["error"], "there is no folder OLD"


def test_help_of_the_comparison_needs_no_te():
    command = [sys.executable, ROOT / "bench/reference_vs_te.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "--cases" in done.stdout, done.stderr


def test_own_loops_are_timed(tmp_path):
    """README's, and examples/minimal.py."""
    path = tmp_path / "minimal.json"
    minimal.main(f"--layers 1 --width 64 --batch 1 --seq-len 32 --steps 1 --json {path}".split())
    rows = json.loads(path.read_text())
    assert [row["loop"] for row in rows] == ["readme", "example"]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms"], rel=1e-4)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the time of a process in /proc")
def test_a_busy_core_computes_until_the_end():
    with minimal.busy_cores(1) as [process]:
        deadline = time.monotonic() + 60  # other processes may have the cores
        while clock_ticks(process) < 10:  # 0.1 s
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    assert process.poll() is not None


def clock_ticks(process) -> int:
    """Return the processor time of a process in user code."""
    return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_drawn_from_the_results(name, tmp_path):
    pictures.draw_picture(name, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000


def paired_run(arm, seed, losses, tokens, size="124m", start=0.0):
    return {
        "arm": arm, "seed": seed, "size": size, "train_sha256": "", "lr": 1e-3, "tokens": tokens,
        "start": start, "stop": 1.0, "end": 1.0, "steps": len(losses), "losses": losses,
        "val_loss": losses[-1], "machine": "a GPU"}


def test_the_loss_gap_is_drawn_from_any_runs(tmp_path, monkeypatch):
    """Windows, other arms, fine-tuning and an earlier rounding are not drawn. One or two seeds have a line
    each, three a mean and a band."""
    bf16 = [10 / step for step in range(1, 346)]
    runs = []
    for seed in (1, 2, 3):
        runs.append(paired_run("bf16", seed, bf16, 45e6))
        runs.append(paired_run("fp8", seed, [loss + 0.01 * seed for loss in bf16], 45e6))
        runs.append(paired_run("fp8-e4m3", seed, [loss + 1 for loss in bf16], 45e6))
    for arm, start, gap in (("bf16", 0.0, 0.0), ("fp8", 0.0, 0.1), ("bf16", 0.75, 0.0), ("fp8", 0.75, 5.0)):
        runs.append(paired_run(arm, 1, [2.0 + gap] * 100, 1e8, "350m", start))
    for arm, gap in (("bf16", 0.0), ("fp8", 7.0)):
        runs.append(paired_run(arm, 1, [2.0 + gap] * 100, 1e8) | {"base_sha256": "a" * 64})
    figures = []
    make_figure = pictures.make_figure

    def recorded(*arguments, **options):
        figures.append(make_figure(*arguments, **options))
        return figures[-1]

    for arm, gap in (("bf16", 0.0), ("fp8", 9.0)):
        runs.append(paired_run(arm, 1, [2.0 + gap] * 100, 2e8) | {"commit": "9291634"})
    for seed in (1, 2):
        runs.append(paired_run("bf16", seed, bf16, 1e8, "modern"))
        runs.append(paired_run("fp8", seed, [loss + 0.2 * seed for loss in bf16], 1e8, "modern"))
    monkeypatch.setattr(pictures, "make_figure", recorded)
    pictures.draw_loss_gap({"runs": runs}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 20_000
    [(_, axes)] = figures
    lines = {line.get_label(): line.get_ydata() for line in axes.lines if "tokens" in line.get_label()}
    assert lines == {
        "124M, 45 M tokens, mean of 3 pairs": pytest.approx([0.02] * gaps.SEGMENTS),
        "350M, 100 M tokens, single pairs": pytest.approx([0.1] * gaps.SEGMENTS),
        "124M, modern block, 100 M tokens, single pairs": pytest.approx([0.2] * gaps.SEGMENTS)}
    thin = [line.get_ydata() for line in axes.lines if line.get_linestyle() == "--"]
    assert thin == [pytest.approx([gap] * gaps.SEGMENTS) for gap in (0.1, 0.2, 0.4)]
    [band] = axes.collections  # the interval of the three seeds
    half = 4.303 * 0.01 / 3**0.5
    low, high = band.get_datalim(axes.transData).intervaly
    assert (low, high) == pytest.approx((0.02 - half, 0.02 + half))


# ---------------------------------------------------------------- benchmark_attention.py

def test_every_kernel_agrees_with_float64(tmp_path, capsys):
    path, shape = tmp_path / "attention.json", "2x64x4x2x16"
    benchmark_attention.main(f"--shapes {shape} --json {path}".split())
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == list(attention.KERNELS)
    assert rows[0]["part"] == "attention"
    _, _, flops = Shape.of(shape, "--shapes").flops()
    for row in rows:
        assert row["agrees"]
        assert max(row["errors"].values()) < 0.01
        assert row["forward_ms"] > 0
        assert row["both_tflops"] == pytest.approx(flops / row["both_ms"] / 1e9)
    assert "these times mean nothing" in capsys.readouterr().out


@pytest.mark.parametrize("make", [attention.flash_2, attention.flash_4])
def test_a_kernel_that_is_not_installed_is_one_line(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # its import fails
    row = attention.row_of(partial(make, Shape(2, 64, 4, 2, 16)), name="flash-attn")
    line = attention.text_of(row)
    assert line.split(maxsplit=1)[1].startswith("not installed: ") and "\n" not in line
