"""benchmark_te.py: its baseline computes the same network, its figures are correct, and every mode runs
(through te_reference)."""

import dataclasses
import json
import shlex
import time
from types import SimpleNamespace

import pytest
import torch

import benchmark_te as benchmark
import train
from bench import arms, compile_modes, crossover, measure, memory, plain_gpt, speed, timing, training
from bench import speed_report as report
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote import cli, models, profiling, roofline
from trainer_tools import ROOT

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU"),
              pytest.mark.usefixtures("compiles")]
TINY = dict(vocab_size=96, n_positions=32, n_embd=64, n_layer=2, n_head=4)
BLOCKS = {
    "gpt2": {}, "modern": arms.MODERN | dict(n_kv_head=2),
    "untied": dict(tie_embeddings=False, head_dim=32, n_inner=96),
}
NAMES = [
    ("attn.qkv.layer_norm_", "norm1."), ("mlp.layer_norm_", "norm2."), ("lm_head.layer_norm_", "norm."),
    ("attn.", ""), ("mlp.fc1_", "fc1."), ("mlp.fc2_", "fc2."),
]  # ours, and PlainGPT's


def run(arguments) -> int:
    return cli.run(lambda: benchmark.main(arguments.split()), "benchmark_te.py")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_plain_gpt_is_the_same_network(block, by_hand):
    config = OptimizedConfig(**TINY | BLOCKS[block])
    ours, plain = OptimizedGPT2Model(config), plain_gpt.PlainGPT(config, by_hand)
    with torch.no_grad():
        for p in ours.parameters():  # biases and norms, too, so that a missing one shows
            p.normal_(0.0, 0.2) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))
    weights = {name: value for name, value in ours.state_dict().items() if "_extra_state" not in name}
    for theirs, mine in NAMES:
        weights = {name.replace(theirs, mine): value for name, value in weights.items()}
    plain.load_state_dict(weights)
    tokens = torch.randint(96, (2, 33))
    x, y = tokens[:, :-1], tokens[:, 1:]
    expected = ours(x)
    torch.testing.assert_close(plain(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    torch.testing.assert_close(plain(x, y), ours(x, y), rtol=1e-5, atol=1e-5)


def test_plain_gpt_starts_as_ours():
    config = OptimizedConfig(**TINY | BLOCKS["modern"])
    spread = lambda model, name: model.get_parameter(name).std().item()  # noqa: E731
    ours, plain = OptimizedGPT2Model(config), plain_gpt.PlainGPT(config)
    for name, theirs in (("wte.weight", "wte.weight"), ("blocks.0.proj.weight", "blocks.0.attn.proj.weight"),
                         ("blocks.1.fc2.weight", "blocks.1.mlp.fc2_weight")):
        assert spread(plain, name) == pytest.approx(spread(ours, theirs), rel=0.1)


def test_hf_llama_is_of_our_size():
    config = OptimizedConfig(**TINY | BLOCKS["modern"])
    ours, llama = OptimizedGPT2Model(config), plain_gpt.HFLlama(config)
    qk_norms = 2 * config.n_layer * config.head_dim  # Llama has none
    assert sum(p.numel() for p in llama.parameters()) == sum(p.numel() for p in ours.parameters()) - qk_norms
    tokens = torch.randint(96, (2, 33))
    x, y = tokens[:, :-1], tokens[:, 1:].contiguous()
    torch.testing.assert_close(
        llama(x, y), torch.nn.functional.cross_entropy(llama.llama(x).logits.flatten(0, 1), y.flatten())
    )


def test_block_scaling_measured_with_e5m2_gradients_says_so():
    """Rows from before E4M3 was its default do not name a format."""
    row = dict(shape="guide", block="gpt2", ms=1.0, tokens_per_s=1e3)
    row |= dict(ratio_to_plain=None, mfu=None, peak_gib=None)
    old, new = row | dict(arm="fp8-block"), row | dict(arm="fp8-block", fp8_format="e4m3")
    hybrid = row | dict(arm="fp8-block-hybrid", fp8_format="hybrid")
    titles = [report.table([rows]).splitlines()[0].split(" | ")[1] for rows in (old, new, hybrid)]
    assert titles == ["ours, FP8 block, E5M2 gradients", "ours, FP8 block", "ours, FP8 block, E5M2 gradients"]


def test_floor_by_hand():
    config = OptimizedConfig(
        vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, n_kv_head=2, n_inner=64,
        activation="swiglu",
    )
    ceilings = {"bf16_tflops": 1e-3, "fp8_tflops": 2e-3, "copy_tbs": 1e-3}  # a billion a second
    # a block: QKV 32·(32 + 2·16) = 2,048, projection 32·32 = 1,024, MLP 3·32·64 = 6,144: 9,216; the head
    # 128·32 = 4,096
    products = 6 * (4 * 64) * (2 * 9216 + 4096)  # 34,603,008
    attention = 7 * 4 * 64**2 * 32 * 2  # 7,340,032
    moved = 28 * (2 * 9216 + 4096) + 4 * 4 * 64 * 128  # 761,856 bytes
    assert roofline.floor_ms(config, 4, 64, False, ceilings) == pytest.approx(
        (34_603_008 + 7_340_032 + 761_856) / 1e6
    )
    assert roofline.floor_ms(config, 4, 64, True, ceilings) == pytest.approx(
        (products / 2 + attention + moved) / 1e6
    )
    untied = dataclasses.replace(config, tie_embeddings=False)
    assert roofline.floor_ms(untied, 4, 64, False, ceilings, 10) == pytest.approx(
        (products + attention + 10 * (2 * 9216 + 2 * 4096) + 131_072) / 1e6
    )


@pytest.mark.parametrize(
    "arm, changes",
    [
        ("bf16", dict(fp8_recipe="none", cuda_graph="auto")),
        ("fp8", dict(fp8_recipe="delayed", fp8_format="auto")),
        ("fp8-block", dict(fp8_recipe="block", fp8_format="auto")),
        ("fp8-block-hybrid", dict(fp8_recipe="block", fp8_format="hybrid")),
        ("fp8-e4m3", dict(fp8_recipe="delayed", fp8_format="e4m3")),
        ("fp8-current-eager", dict(fp8_recipe="current", cuda_graph="off")),
        ("fp8-bf16_moments", dict(fp8_recipe="delayed", moment_dtype="bfloat16")),
        ("fp8-mxfp8-fused", dict(fp8_recipe="mxfp8", model="fused")),
        ("fp8-nvfp4", dict(fp8_recipe="nvfp4", model="optimized")),
        ("fp8-fused-accum4-checkpointing", dict(model="fused", grad_accum=4, gradient_checkpointing=True)),
    ],
)
def test_arms_are_options_of_the_trainer(arm, changes):
    config = arms.arm_config(arm, train.TrainConfig())
    assert {name: getattr(config, name) for name in changes} == changes


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_sm90_qqtst_128x256_128x6_2x1_v_bz_coopA_TNT", "GEMM FP8"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM BF16"),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at",
            "attention",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("_norm_rope_backward_kernel", "attention"),
        ("void transformer_engine::normalization::ln_fwd_tuned_kernel<...>", "norm"),
        ("_backward_fp8_kernel", "loss"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., LpNormFunctor<...>>",
            "optimizer",
        ),
        ("_adam", "optimizer"),
        ("_squares", "optimizer"),
        ("_activation_backward_kernel", "activation"),
        ("_norm_kernel", "norm"),
        ("_cast_all_kernel", "cast/transpose"),
        ("_reduce_rows_kernel", "cast/transpose"),
        ("_norm_backward_kernel", "norm"),
        ("_sum_by_index_kernel", "embedding"),
        ("_embed_kernel", "embedding"),
        ("_transpose_kernel", "cast/transpose"),
        (
            "void at::native::(anonymous namespace)::sum_and_scatter<c10::BFloat16, long>(long const*, ...)",
            "embedding",
        ),
        ("void transformer_engine::cast_transpose_optimized_kernel<...>", "cast/transpose"),
        ("triton_poi_fused_gelu_3", "activation"),
        ("void at::native::elementwise_kernel<128, 4, ...direct_copy_kernel_cuda...>", "copy/concat"),
        ("Memcpy DtoD (Device -> Device)", "copy/concat"),
        ("void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(...)", "copy/concat"),
        ("void at::native::detail::chunk_cat_cuda_kernel<char, char>(char**, ...)", "copy/concat"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "between GPUs"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, ...)", "between GPUs"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<...>>",
            "elementwise/residual",
        ),
        ("mystery", "other"),
    ],
)
def test_kernel_classes(name, kind):
    assert profiling.kernel_class(name) == kind


FIELDS = ("shape block arm ms tokens_per_s ratio_to_plain mfu peak_gib floor_ms ceilings gpu torch te date "
          "command cuda_graph model_config").split()


def test_shapes_write_whole_rows_and_keep_those_of_other_arms(tmp_path, capsys, compiles):
    path = tmp_path / "speed.json"
    command = "--shapes 124m-b32 --blocks gpt2 --arms plain bf16 fp8 --steps 4"
    assert run(f"{command} --json {path} --png {tmp_path}/speed.png") == 0
    assert "the times mean nothing" in capsys.readouterr().out
    assert compiles == [{"fullgraph": False, "dynamic": False, "mode": "default"}]  # of plain
    rows = json.loads(path.read_text())
    assert [row["arm"] for row in rows] == ["plain", "bf16", "fp8"]
    assert not any("error" in row for row in rows)
    for row in rows:
        assert set(FIELDS) <= set(row) and row["ms"] > 0 and row["floor_ms"] > 0 and row["ratio_to_plain"] > 0
        assert row["tokens_per_s"] == pytest.approx(1e3 * 2 * 32 / row["ms"], rel=1e-4)
        assert all(row[f"{phase}_ms"] > 0 for phase in ("forward", "backward", "optimizer"))
    assert rows[0]["ratio_to_plain"] == 1 and rows[0]["profile_ms"]["GEMM BF16"] > 0
    assert "profile_ms" not in rows[1]
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    # refused before anything runs
    assert run(f"--shapes 124m-b32 --blocks gpt2 --arms bf16 nothing-else --steps 4 --json {path}") == 2
    assert run(f"--shapes 124m-b32 --blocks gpt2 --arms bf16 --steps 4 --profile none --json {path}") == 0
    again = json.loads(path.read_text())
    assert [row["arm"] for row in again] == ["plain", "fp8", "bf16"] and again[:2] == [rows[0], rows[2]]
    assert "124m-b32, gpt2" in report.table(again)


def test_an_arm_that_fails_is_a_row_with_the_reason(tmp_path, monkeypatch):
    real = arms.build_te

    def fails(config, *args):
        if not config.gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        return real(config, *args)

    monkeypatch.setattr(arms, "build_te", fails)
    assert run(f"--shapes llama3-8b --arms fp8 --steps 4 --profile none --json {tmp_path}/rows.json") == 0
    first, second = json.loads((tmp_path / "rows.json").read_text())
    assert first["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert second["arm"] == "fp8-checkpointing"
    assert second["tokens_per_s"] > 0 and second["ratio_to_plain"] is None


def test_without_options_it_prints_the_guides_table(tmp_path, monkeypatch, capsys):
    """Forward, backward, their total and FP8's speed-up, for each model and format, at the guide's shape."""
    monkeypatch.setattr(measure, "WARMUP", 1)
    assert run(f"--steps 4 --json {tmp_path}/formats.json") == 0
    out = capsys.readouterr().out
    rows = json.loads((tmp_path / "formats.json").read_text())
    assert {row["shape"] for row in rows} == {"guide"} and not any("error" in row for row in rows)
    assert speed.GUIDE_SHAPE == (4, 768, 12, 8, 512)
    table = [line for line in out.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    cells = {tuple(line[:2]): line[2:] for line in lines[2:]}
    models, formats = ("optimized", "fused", "custom"), ("BF16", "FP8 E4M3", "FP8 HYBRID")
    assert {(model, name) for model in models for name in formats} <= set(cells)
    assert ("fused", "MXFP8") in cells and ("fused", "NVFP4") not in cells  # te_reference emulates no NVFP4
    found = {row["arm"]: row for row in rows}
    for model in models:
        words = "" if model == "optimized" else f"-{model}"
        base, ours = found[f"bf16{words}"], found[f"fp8-e4m3{words}"]
        before, total = (row["forward_ms"] + row["backward_ms"] for row in (base, ours))
        expected = [ours["forward_ms"], ours["backward_ms"], total, before / total, ours["ms"]]
        expected.append(base["ms"] / ours["ms"])
        assert cells[model, "FP8 E4M3"] == [f"{value:.2f}" for value in expected]
        assert cells[model, "BF16"][3] == cells[model, "BF16"][5] == "1.00"
    assert out.count("the times mean nothing") == 2  # before and under the table
    assert "as train.py runs it" not in out
    speed.print_verdict({"bf16": 3.0, "fp8": 2.0})  # which times of a GPU allow
    assert capsys.readouterr().out.endswith("FP8 pays, 1.50 times BF16's tokens/s\n")


def test_the_table_of_another_shape_and_of_fewer_arms(tmp_path, capsys):
    arms = "bf16-custom fp8-custom fp8-nvfp4-fused"
    assert run(f"--shape 4 768 12 8 256 --steps 4 --arms {arms} --json {tmp_path}/formats.json") == 0
    out = capsys.readouterr().out
    assert [line.split("|")[1:3] for line in out.splitlines() if line.startswith("| custom")] == [
        [" custom ", " BF16 "], [" custom ", " FP8 HYBRID "]]
    rows = {row["arm"]: row for row in json.loads((tmp_path / "formats.json").read_text())}
    assert rows["bf16-custom"]["shape"] == "2x64x4x2x32", "a tiny model, without a GPU"
    assert "4x768x12x8x256" not in out and "2x64x4x2x32 gpt2" in out
    assert "cannot run on this machine" in rows["fp8-nvfp4-fused"]["error"]


def test_a_missing_figure_is_an_empty_cell():
    rows = [{"arm": "fp8-fused", "ms": 10.0}, {"arm": "fp8-e4m3-fused", "error": "out of memory"},
            {"arm": "bf16-fused", "forward_ms": 4.4, "backward_ms": 9.51, "ms": 14.0}]
    assert report.formats_table(rows).splitlines()[2:] == [
        "| fused | BF16 | 4.40 | 9.51 | 13.91 | 1.00 | 14.00 | 1.00 |",
        "| fused | FP8 HYBRID |  |  |  |  | 10.00 | 1.40 |"]


def test_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(crossover, "WIDTHS", (256, 512))
    monkeypatch.setattr(crossover, "TOKENS", (1024, 2048))
    assert run(f"--sweep --time-budget 0 --json {tmp_path}/rows.json") == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(row["error"] == "not run: time budget" for row in rows)
    monkeypatch.setattr(crossover, "WIDTHS", (256,))
    assert run(f"--sweep --json {tmp_path}/rows.json --png {tmp_path}/map.png") == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    measured = [(row["width"], row["tokens"]) for row in rows if "error" not in row]
    assert measured == [(256, 1024), (256, 2048)] and len(rows) == 4
    for row in rows[2:]:
        assert row["graph"] == pytest.approx(row["bf16_ms"] / row["fp8_ms"], rel=1e-4)
    before = (tmp_path / "rows.json").read_text()
    assert run(f"--sweep --json {tmp_path}/rows.json") == 0  # everything is measured already
    assert (tmp_path / "rows.json").read_text() == before
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_stack(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "STACK", {"by hand": "plain-by-hand", "fused": "fp8-fused-eager"})
    assert run(f"--stack --steps 4 --json {tmp_path}/rows.json --png {tmp_path}/stack.png") == 0
    assert [row["label"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["by hand", "fused"]
    assert (tmp_path / "stack.png").stat().st_size > 10_000


def test_compile_reports_graphs_breaks_and_refusals(tmp_path, monkeypatch, compiles):
    monkeypatch.setattr(compile_modes, "COMPILE_RECIPES", ("none", "mxfp9"))
    monkeypatch.setattr(models, "MODELS", {"custom": models.MODELS["custom"]})
    assert run(f"--compile --json {tmp_path}/rows.json") == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    works, fails = {row["mode"]: row for row in rows[:7]}, rows[7:]
    assert list(works) == [row["mode"] for row in fails] == list(compile_modes.COMPILE_MODES)
    for mode, row in works.items():
        compiled = mode not in ("cuda-graph", "eager")
        assert row["graphs"] == compiled and row["graph_breaks"] == 0 and row["tokens_per_s"] > 0, mode
        assert (row["compile_s"] > 0) == compiled
    assert [call["mode"] for call in compiles] == ["default", "default", *list(works)[4:]]
    assert [call["fullgraph"] for call in compiles] == [False, True, False, False, False]
    assert all(row["error"].startswith("ValueError: fp8-recipe 'mxfp9' is unknown") for row in fails)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("--shapes nothing", "--shapes 'nothing' is unknown; use 124m-b32"),
        ("--steps 1", "--steps 1: must be 4 or more"),
        ("--arms plain fp16", "--arms 'fp16' is unknown"),
        ("--arms bf16-current", "--arms 'bf16-current' is unknown"),
        ("--sweep --stack", "one at a time"),
        ("--shape 4 768 12 8", "--shape"),
        ("--shape 4 768 13 8 512", "4 768 12 8 512 works"),
        ("--preset gpt5", "--preset 'gpt5' is unknown; use tiny"),
        ("--png x.png", "--png: the table of formats has none; add --shapes guide, for example"),
        ("--blocks modern", "--blocks: the table of formats has none; add --shapes guide, for example"),
        ("--shapes all nothing", "--shapes 'nothing'"),
        ("--stack --shapes all", "--shapes 'all' is unknown; use 124m"),
        ("--shape 4 768 12 8 512 --shapes guide", "--shape and --shapes: one at a time"),
        ("--json nowhere/x.json", "there is no folder nowhere"),
        ("--blocks gpt3", "--blocks"),
    ],
)
def test_bad_options_are_one_line(arguments, complaint, capsys):
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmark_te.py: ") and complaint in line


def test_a_file_of_something_else_is_left_alone(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text('{"cells": []}')
    assert run(f"--sweep --json {path}") == 2 and path.read_text() == '{"cells": []}'
    assert "holds something else" in capsys.readouterr().err


def test_the_switches_of_the_real_run_are_options_of_the_trainer():
    for options in training.SWITCHES.values():
        train.read_options(shlex.split(f"{training.COMMON} {training.SHORT} {options}"))


def test_a_switch_is_compared_with_the_seeds_of_its_own_block():
    ends = {
        "default": 2.0, "seed 2": 2.01, "seed 3": 1.98, "BF16": 2.02, "FP8 current": 2.04,
        "modern block": 1.3, "modern block, seed 2": 1.36, "modern block, Transformer Engine's modules": 1.35,
    }
    figures = training.compare({name: 250 * [9.0] + 50 * [end] for name, end in ends.items()})
    rows = {row["switch"]: row for row in figures["rows"]}
    assert rows["BF16"]["spread_of_seeds"] == pytest.approx(0.03)
    assert rows["modern block, seed 2"]["spread_of_seeds"] == pytest.approx(0.06)
    assert rows["modern block, Transformer Engine's modules"]["difference"] == pytest.approx(0.05)
    assert {name for name, row in rows.items() if not row["agrees"]} == {"FP8 current"}


def test_the_table_of_memory_leaves_what_is_missing_empty():
    figures = {"peak_gib": 15.79, "peak_reserved_gib": 31.77}
    rows = [{"shape": "124m-b32", "switch": "BF16 moments", "ms": 45.1, "defaults_ms": 41.0} | figures,
            {"shape": "124m-b32", "switch": "no CUDA graph", "ms": 44.0, "defaults_ms": 43.5} | figures,
            {"shape": "124m-b32", "switch": "defaults", "ms": 41.0, "defaults_ms": 41.0} | figures,
            {"shape": "c4096", "switch": "BF16 moments", "ms": 111.6} | figures,
            {"shape": "c4096", "switch": "defaults", "error": "out of memory"}]
    lines = memory.table(rows).splitlines()
    assert len(lines) == 2 + len(memory.SWITCHES) and {line.count("|") for line in lines} == {8}
    assert lines[2] == "| defaults | 41.0 | 15.8 | 31.8 |  |  |  |"
    assert "| BF16 moments | 45.1 (+10.0 %) | 15.8 | 31.8 |  | 15.8 | 31.8 |" in lines  # no defaults
    assert "| no CUDA graph |  | 15.8 | 31.8 |  |  |  |" in lines  # timed in another run than the defaults


def test_memory_switches_are_compared_with_the_defaults_of_the_same_run(tmp_path, monkeypatch):
    """With one switch, the defaults are measured as well, and replace those of an earlier run."""
    ran = []

    def one(command, **options):
        ran.append(tuple(command[-2:]))
        row = {"shape": command[-2], "switch": command[-1], "ms": 50.0 + len(ran), "peak_gib": 15.0}
        return SimpleNamespace(stdout="figures: " + json.dumps(row | {"peak_reserved_gib": 16.0}), stderr="")

    monkeypatch.setattr(memory, "fp8", SimpleNamespace(IS_REFERENCE=False))
    monkeypatch.setattr("bench.report.driver", lambda: None)
    monkeypatch.setattr(memory.subprocess, "run", one)
    path = tmp_path / "memory.json"
    path.write_text(json.dumps([{"shape": "c4096", "switch": "defaults", "ms": 7.0, "defaults_ms": 7.0}]))
    memory.main(["--shapes", "c4096", "--switches", "BF16 moments", "--json", str(path)])
    assert ran == [("c4096", "defaults"), ("c4096", "BF16 moments")]
    assert [(row["switch"], row["ms"], row["defaults_ms"]) for row in json.loads(path.read_text())] == [
        ("defaults", 51.0, 51.0), ("BF16 moments", 52.0, 51.0)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it may")
def test_a_machine_without_a_gpu_does_not_write_over_a_gpus_figures(tmp_path, capsys):
    before = (ROOT / "results" / "speed.json").read_text()
    arguments = ["--shapes", "guide", "--arms", "bf16", "--json", str(tmp_path / "speed.json")]
    (tmp_path / "speed.json").write_text(before)
    assert cli.run(lambda: benchmark.main(arguments), "benchmark_te.py") == 2
    assert "name another file" in capsys.readouterr().err and (tmp_path / "speed.json").read_text() == before


def test_the_table_of_torch_compile():
    row = {"mode": "default", "recipe": "current", "model": "optimized", "graph_breaks": 2, "compile_s": 31.4}
    failed = {"mode": "default", "model": "te", "error": "RuntimeError: not supported"}
    rows = [row | {"tokens_per_s": 456_700.0}, row | {"mode": "cuda-graph", "tokens_per_s": 1_000_000.0},
            row | {"mode": "fullgraph", "error": "Unsupported: a break"}, failed | {"recipe": "delayed"},
            failed | {"recipe": "none"}, row | {"recipe": "none", "error": "not run: time budget"}]
    assert report.compile_table(rows).splitlines() == [
        "| recipe, mode | `optimized` | `te` |", "| --- | --- | --- |",
        "| current, default | 457 k (2, 31 s) |  |", "| current, not compiled, CUDA graph | **1000 k** |  |",
        "| current, fullgraph | breaks |  |", "| delayed, default |  | fails, 1 |",
        "| none, default |  | fails, 1 |", "", "1. `RuntimeError: not supported`"]
    eager = {"mode": "eager", "model": "te", "graph_breaks": 0, "compile_s": 0.0}
    compiled = row | {"model": "te"}
    rows = [eager | {"recipe": "none", "tokens_per_s": 100.0}, compiled | {"tokens_per_s": 150.0},
            eager | {"recipe": "current", "tokens_per_s": 300.0},
            compiled | {"recipe": "none", "tokens_per_s": 105.0}]
    summary = ("2 compiled steps, relative to not compiled: 1 slower (0.50 to 0.50 ×), "
               "1 faster (1.05 to 1.05 ×).")
    assert report.compile_table(rows).splitlines()[-1] == summary
    rows += [eager | {"recipe": "delayed", "tokens_per_s": 100.0},
             compiled | {"recipe": "delayed", "tokens_per_s": 80.0},
             compiled | {"recipe": "delayed", "mode": "max-autotune", "tokens_per_s": 120.0}]
    assert report.compile_table(rows).splitlines()[-3:] == [
        summary, "Nothing is compiled under delayed scaling, so its ratios are noise:",
        "0.80 to 1.20 × over 2 steps launched from Python."]
    assert report.compile_summary(rows[-3:]) == []


def test_an_error_in_a_line():
    assert cli.in_a_line(ValueError("one\ntwo")) == "ValueError: one"
    compiler = ('NotImplementedError: \n\nfrom user code:\n   File "/a/b/model.py", line 7, in forward\n'
                "    y = f(x)\n\nSet TORCHDYNAMO_VERBOSE=1")
    told = "RuntimeError: NotImplementedError: at y = f(x) (model.py, line 7, in forward)"
    assert cli.in_a_line(RuntimeError(compiler)) == told
    places = f'File "{ROOT}/a.py", line 3, in f\n    g(x)\n  File "/lib/b.py", line 4, in g\n    h()\n'
    told = cli.in_a_line(ValueError(f"two\n\nfrom user code:\n  {places}"))
    assert told == "ValueError: two at g(x) (a.py, line 3, in f)"
    told = cli.in_a_line(ValueError("backend raised:\nKeyError: 1\n\nmore"))
    assert told == "ValueError: backend raised: KeyError: 1"
    assert cli.in_a_line(OSError(f"no {ROOT}/train.py")) == "OSError: no train.py"


def test_power_and_clock(monkeypatch, tmp_path):
    """Medians of the complete lines that nvidia-smi prints while the function is called; {} without it."""
    calls, smi = [], tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho '650.5, 700.00, 1500, 1980'\necho '690.5, 700.00, 1600, 1980'\n"
        "echo '[N/A], 700.00, 1600, 1980'\necho '660.5, 700.00, 1550, 1980'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu = torch.device("cuda")
    found = timing.power_and_clock(lambda: calls.append(time.sleep(0.01)), gpu, 1.5)
    assert found == {"watts": 660.5, "watts_limit": 700, "sm_mhz": 1550, "sm_mhz_limit": 1980}
    assert calls and timing.power_and_clock(calls.clear, torch.device("cpu")) == {}
    smi.write_text("#!/bin/sh\nexec /bin/sleep 1000\n")
    with pytest.raises(ZeroDivisionError):  # and it is not waited for
        timing.power_and_clock(lambda: 1 / 0, gpu, 0.2)
    smi.unlink()
    assert timing.power_and_clock(calls.clear, gpu) == {} and calls
