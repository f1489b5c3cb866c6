"""bench/convergence.py: the summary of runs, on figures made by hand; bench/ablation.py: emulated FP8."""
import hashlib
import json
import math
import re
import shlex
import shutil
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from test_nanogpt import STAND_IN

import te_reference as te
from bench import accumulation_bias, convergence, convergence_report, rounding
from bench.ablation import Ablated, AblatedConfig, Ablation, Gemm, Linear, round_to_fp8
from bench.accumulation_bias import bias_and_error
from bench.convergence import summarize
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote import cli, fp8, models
from nanote.config import read_options
from trainer_tools import metrics, run_train


def run(arm, seed, tokens, loss, seconds):
    return [{"arm": arm, "seed": seed, "run_tokens": tokens, "tokens": share * tokens // 2, "step": share,
             "val_loss": loss + 2 - share, "seconds": share * seconds / 2} for share in (1, 2)]


def test_summary():
    runs = [*run("bf16@1e-3", 1, 100, 2.0, 160.0), *run("bf16@1e-3", 2, 100, 2.2, 160.0),
            *run("fp8@1e-3", 1, 100, 2.2, 100.0), *run("fp8@1e-3", 2, 100, 2.2, 100.0),
            *run("fp8@1e-3", 1, 144, 2.0, 144.0), *run("fp8-e4m3@1e-3", 1, 100, 2.5, 100.0),
            *run("nanogpt@1e-3", 1, 100, 2.1, 240.0), *run("350m-fp8@1e-3", 1, 100, 1.9, 300.0)]
    # that of 144 tokens ran on a slower GPU
    runs = [r | {"seconds": 1.5 * r["seconds"]} if r["run_tokens"] == 144 else r for r in runs]
    for seed, loss in ((1, 2.1), (2, 2.2)):
        rows = {(row["arm"], row["tokens"]): row for row in summarize(runs)}
        assert rows["fp8@1e-3", 100]["gap_without_fp8_percent"] is None, "a seed lacks it"
        ended = next(r for r in runs if (r["arm"], r["seed"], r["tokens"]) == ("fp8@1e-3", seed, 100))
        ended["val_loss_without_fp8"] = loss
    rows = {(row["arm"], row["tokens"]): row for row in summarize(runs)}
    fp8 = rows["fp8@1e-3", 100]
    assert fp8["gap_without_fp8_percent"] == pytest.approx(2.5)  # 2.1 over 2.0, and 2.2 over 2.2
    assert fp8["gap_without_fp8_interval"] == pytest.approx([2.5 - 12.706 * 2.5, 2.5 + 12.706 * 2.5])
    assert fp8["seeds"] == 2 and fp8["mean"] == pytest.approx(2.2) and fp8["standard_error"] == 0
    assert fp8["gap_percent"] == pytest.approx(5) and fp8["gap_standard_error"] == pytest.approx(5)
    # two seeds: Student's t has one degree of freedom
    assert fp8["gap_interval"] == pytest.approx([5 - 12.706 * 5, 5 + 12.706 * 5])
    # BF16's mean of 2.1 lies half way between the runs of 100 and 144 tokens: geometric mean of tokens
    assert fp8["seconds_to_bf16_loss"] == pytest.approx(120)
    assert fp8["loss_matched_speedup"] == pytest.approx(160 / 120)
    assert fp8["loss_matched_speedup_over_nanogpt"] == pytest.approx(240 / 120)
    # the loss falls by 0.2 while the tokens grow by 1.44; the gaps are 0.2 and 0
    factor = 1.44 ** (12.706 * 0.1 / 0.2)
    assert fp8["loss_matched_interval"] == pytest.approx([160 / 120 / factor, 160 / 120 * factor])
    assert rows["bf16@1e-3", 100]["loss_matched_interval"] is None, "it has one length"
    more = summarize([*runs, *run("bf16@1e-3", 3, 100, 1.0, 160.0)])
    assert next(row for row in more if row["arm"] == "fp8@1e-3" and row["tokens"] == 100)[
        "loss_matched_speedup"] == pytest.approx(160 / 120), "a seed without a pair does not count"
    assert rows["bf16@1e-3", 100]["loss_matched_speedup"] == 1
    larger = rows["350m-fp8@1e-3", 100]
    assert larger["gap_percent"] is None, "another size is no baseline"
    assert rows["fp8-e4m3@1e-3", 100]["loss_matched_speedup"] is None, "no run of it ends at that loss"


def check_picture(result, monkeypatch):
    """The picture of the switched runs has the means and intervals of the summary, from top to bottom."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure.axes[0]))
    convergence_report.plot_switched(result, "unused.png")
    axis, = drawn
    assert axis.yaxis_inverted()
    rows = [row for _, _, row, _ in convergence_report.switched_rows(result)]
    found = {container.get_label(): container for container in axis.containers}
    for label, name in (("evaluated as trained", "gap"), ("evaluated without FP8", "gap_without_fp8")):
        shown = [row for row in rows if row[f"{name}_percent"] is not None]
        points, _, (bars,) = found[label].lines
        assert list(points.get_xdata()) == [row[f"{name}_percent"] for row in shown]
        ends = [sorted(x for x, _ in segment) for segment in bars.get_segments()]
        bounds = [row[f"{name}_interval"] or [row[f"{name}_percent"]] * 2 for row in shown]
        assert ends == [pytest.approx(pair) for pair in bounds]
    texts = [text.get_text() for text in axis.texts]
    assert any(text.startswith("-6.5") for text in texts), "quantize=weights against all"


def test_tables_show_what_is_measured_and_what_did_not_help(monkeypatch):
    runs = []
    for seed, noise in ((1, 0.0), (2, 0.1), (3, 0.2)):
        for arm, loss in (("bf16", 2.0), ("fp8", 2.2), ("fp8-current", 2.1 + noise / 100), ("fp8-e4m3", 2.3),
                          ("fp8-block", 2.2 + 0.1 * (seed - 2)), ("emulated-all", 2.2),
                          ("emulated-only_weights", 2.05)):
            runs += run(f"{arm}@1e-3", seed, 10**8, loss + noise, 100.0)
            runs[-1]["val_loss_without_fp8"] = 2.02 + noise
    runs += run("bf16@1e-2", 1, 10**8, 3.0, 100.0)
    result = {"runs": runs, "summary": summarize(runs)}
    main = convergence_report.main_table(result)
    assert main.count("\n") == 6 and "| `fp8` | 100 M | 3 | 2.3000 ± 0.0577 | +9.5" in main
    assert "| +0.95 (+0.84 to +1.07) |" in main, "evaluated in BF16"
    assert "emulated" not in main and convergence_report.rates_table(result).count("1e-2") == 1
    switched = convergence_report.switched_table(result).splitlines()[2:]
    assert [line.split(" | ")[1] for line in switched] == [
        "`fp8`", "`fp8-e4m3`", "`fp8-current`", "`fp8-block`", "all, emulated", "`quantize=weights`"]
    assert switched[-1].startswith("| GPT-2 | `quantize=weights` | 3 | +2.38 (")
    paired = [line.split(" | ")[5].strip(" |") for line in switched]
    assert "| +0.95 (+0.84 to +1.07) |" in switched[0]
    assert paired[0] == paired[4] == "" and paired[1].startswith("+4.35 (") and paired[5].startswith("-6.5")
    runs = [record for name, loss in (("bf16", 2.0), ("emulated-all", 2.2), ("emulated-row", 2.1))
            for record in run(f"small-modern-{name}@1e-3", 1, 10**7, loss, 60.0)] + runs
    runs += [record for name, loss in (("bf16", 2.0), ("fp8", 2.1))
             for record in run(f"350m-{name}@1e-3", 1, 10**7, loss, 60.0)]
    small = convergence_report.switched_table({"runs": runs, "summary": summarize(runs)}).splitlines()
    assert small[-3].startswith("| GPT-2 350M | `fp8` | 1 | +5.00 |")
    assert small[-1].startswith("| modern | `scaling=row` | 1 | +5.00 |") and small[-1].endswith("| -4.55 |")
    check_picture({"runs": runs, "summary": summarize(runs)}, monkeypatch)
    found = [line.split(" | ")[0] for line in convergence_report.negatives_table(result).splitlines()[2:]]
    assert found == ["| `fp8-e4m3`", "| `fp8-block`"], "fp8-current is better"


def test_the_small_gpt_has_a_baseline_at_each_rate_and_steps_of_its_own():
    runs = [record for rate, losses in (("4e-3", (2.0, 2.02)), ("2e-3", (2.2, 2.2))) for seed in (1, 2)
            for name, loss in zip(("bf16", "emulated-all"), losses)
            for record in run(f"small-{name}@{rate}", seed, 10**7, loss, 60.0)]
    runs += run("small-emulated-block@4e-3", 2, 10**7, 2.0402, 60.0)
    runs += run("small-modern-emulated-all@4e-3", 1, 10**7, 1.5, 60.0)
    runs += run("small-bf16@2e-3", 1, 10**8, 1.2, 60.0)
    table = convergence_report.small_table({"runs": runs, "summary": summarize(runs)}).splitlines()[2:]
    assert [line.strip("| ").split(" | ")[1:4] + line.split(" | ")[6:] for line in table[:-1]] == [
        ["1,220", "2e-3", "none", " |"],
        ["1,220", "2e-3", "emulated", "+0.00 (+0.00 to +0.00) |"],
        ["1,220", "4e-3", "none", " |"],
        ["1,220", "4e-3", "emulated", "+1.00 (+1.00 to +1.00) |"],
        ["12,207", "2e-3", "none", " |"]]
    assert table[-1] == "| modern | 1,220 | 4e-3 | emulated | 1 | 1.5000 |  |", "another baseline"
    options = convergence.Options(tokens=819_200)
    assert [convergence.steps_of(options, arm) for arm in ("small-bf16@1", "modern-bf16@1")] == [100, 7]


def test_tables_are_at_the_rate_of_the_shortest_runs_and_show_the_gap_of_every_fp8_arm():
    runs = [*run("bf16@1e-3", 1, 10**8, 2.0, 100.0), *run("bf16@1e-2", 1, 10**8, 2.1, 100.0),
            *run("bf16@1e-2", 1, 2 * 10**8, 1.9, 200.0), *run("fp8-bf16_head@1e-3", 1, 10**8, 2.2, 100.0),
            *run("350m-bf16@1e-3", 1, 10**8, 1.8, 100.0)]
    main = convergence_report.main_table({"runs": runs, "summary": summarize(runs)})
    rows = {line.split(" | ")[0]: line.split(" | ")[4] for line in main.splitlines()[2:]}
    assert rows == {"| `bf16`": "", "| `fp8-bf16_head`": "+10.00", "| `350m-bf16`": ""}


def test_the_picture_has_the_arms_and_bands_that_were_measured(tmp_path, monkeypatch):
    """An arm without a run of BF16's shortest length is left out, and a step that fewer than 3 seeds have."""
    from matplotlib import pyplot

    runs = [*run("bf16@1e-3", 1, 10**8, 2.0, 100.0), *run("bf16@1e-3", 2, 10**8, 2.1, 100.0),
            *run("bf16@1e-3", 3, 10**8, 2.1, 100.0), *run("bf16@1e-3", 4, 10**8, 2.1, 100.0),
            *run("fp8@1e-3", 1, 2 * 10**8, 2.0, 150.0),
            *run("nanogpt@1e-3", 1, 10**8, 2.0, 150.0)]
    extra = {"arm": "bf16@1e-3", "run_tokens": 10**8, "val_loss": 2.5}
    runs += [extra | {"seed": seed, "tokens": step * 10**7, "step": step, "seconds": 10.0 * step}
             for seed, step in ((1, 5), (2, 5), (3, 5), (1, 4), (2, 4))]
    runs += run("fp8-stochastic@1e-3", 1, 10**8, 1.9, 100.0) + run("fp8-stochastic@1e-3", 2, 10**8, 2.0, 90.0)
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    convergence_report.plot({"runs": runs, "summary": summarize(runs)}, tmp_path / "picture.png")
    axis = pyplot.gcf().axes[0]
    monkeypatch.undo()
    pyplot.close("all")
    lines = {line.get_label().replace("\n", " "): list(line.get_xdata()) for line in axis.get_lines()
             if line.get_linewidth() > 0.5}
    stochastic = "FP8, logits' gradient rounded stochastically"
    assert lines == {"BF16": [100, 50], stochastic: [100], "nanoGPT, compiled": [100]}, "sorted by step"
    thin = sorted(line.get_ydata()[0] for line in axis.get_lines() if line.get_linewidth() == 0.5)
    assert thin == [1.9, 2.0, 2.0], "a line per seed, where there are one or two"
    (band,) = axis.collections
    assert {x for path in band.get_paths() for x in path.vertices[:, 0]} == {50, 100}
    assert axis.get_legend().get_title().get_text() == "GPT-2 124M, 1 to 4 seeds"


def test_a_bias_is_told_from_an_error_that_averages_out():
    exact = torch.randn(200_000)
    bias, error = bias_and_error(exact * (1 + 0.01 * torch.randn(200_000)), exact)
    assert abs(bias) < 1e-4 and error == pytest.approx(0.01, rel=0.02)
    assert bias_and_error(0.99 * exact, exact) == pytest.approx((-0.01, 0.01))


def test_the_error_of_the_expected_gradient_is_told_from_noise():
    mean, size = torch.randn(20_000), 20_000**0.5
    exact = [mean + 2 * torch.randn(20_000) for _ in range(16)]
    noisy = rounding.compare([(e + 0.5 * torch.randn(20_000), e) for e in exact], 20_000)
    assert noisy["mean_error"] < 0.03 and noisy["gradient_error"] == pytest.approx(0.5 / 5**0.5, rel=0.05)
    shift = 0.1 * size * torch.nn.functional.normalize(torch.randn(20_000), dim=0)
    shift[10_000:] = 0
    shifted = rounding.compare([(e + shift + 0.5 * torch.randn(20_000), e) for e in exact], 10_000)
    assert shifted["mean_error"] == pytest.approx(0.1 / 2**0.5, abs=0.03)
    assert shifted["mean_error_of_blocks"] == pytest.approx(0.1, abs=0.03)
    assert rounding.compare([exact[:2]], 10_000)["mean_error"] is None, "one micro-batch does not tell"


def test_what_rounding_changes_at_once(tokens, tmp_path):
    sizes = "--n-layer 1 --n-head 2 --n-embd 32 --seq-len 32 --micro-batch-size 2 --eval-tokens 64"
    folder, json_file = tmp_path / "run", tmp_path / "rounding.json"
    assert run_train(f"--preset tiny {sizes} --max-steps 2 --data {tokens} --out-dir {folder}") == 0
    parts = ["none", "only_gradients", "only_activations", "current_gradients"]
    rounding.main([str(folder), "--tokens", "64", "--parts", *parts, "--json", str(json_file)])
    other, trained, none, gradients, activations, current = json.loads(json_file.read_text())["rows"]
    assert none.pop("part") == "none" and not any(none.values()) and None not in none.values()
    assert gradients["loss_percent"] == 0 != activations["loss_percent"]
    rounded = (gradients, activations, trained, current)
    assert all(0 < row["gradient_error"] < 0.5 * other["gradient_error"] for row in rounded)
    assert abs(trained["loss_percent"]) < 1
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | {"processes": 2}))
    with pytest.raises(ValueError, match="a run of 2 processes"):
        rounding.main([str(folder), "--tokens", "64", "--json", str(json_file)])
    with pytest.raises(ValueError, match="--micro-batches 1: must be at least 2, such as 8"):
        rounding.main([str(folder), "--micro-batches", "1"])


# ---------------------------------------------------------------- emulated FP8

SIZES = dict(vocab_size=256, n_positions=32, n_embd=128, n_layer=3, n_head=4)


def gradients(ablation=None, recipe=None) -> dict:
    """Return loss and gradients of a pass of the emulation, or of te_reference with a recipe or None."""
    torch.manual_seed(1)
    if ablation is None:
        model = OptimizedGPT2Model(OptimizedConfig(**SIZES, use_fp8=recipe is not None))
        model.fp8_recipe = recipe
    else:
        model = Ablated(AblatedConfig(**SIZES, ablation=ablation))
    inputs, labels = torch.randint(256, (2, 4, 32), generator=torch.Generator().manual_seed(2))
    loss = model(inputs, labels)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


def distance(found, expected) -> float:
    """Return the largest error of a tensor, in parts of its norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())


@pytest.mark.parametrize("ablation, recipe", [
    ("quantize=none", None), ("skip=head,qkv,proj,fc1,fc2", None), ("keep=all", None),
    ("scaling=current", te.Float8CurrentScaling()),
    ("scaling=current gradients=e4m3", te.Float8CurrentScaling(fp8_format=te.Format.E4M3)),
    ("scaling=block gradients=e4m3", te.Float8BlockScaling()),
])
def test_the_whole_emulation_is_the_reference(ablation, recipe):
    assert distance(gradients(ablation), gradients(recipe=recipe)) < 1e-5


@pytest.mark.parametrize("value", [0.5, float("inf"), float("nan")])
@pytest.mark.parametrize("history, options", [
    (1024, {}), (1, {"amax_history_len": 16, "amax_compute_algo": "most_recent"})])
def test_delayed_scaling_is_the_reference(value, history, options):
    """An infinite amax keeps the scale before; NaN is left out."""
    ours = Linear(te.Linear(64, 48), None, {"gemm": Gemm(Ablation(history=str(history)))})
    theirs = te.Linear(64, 48)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    # the first pass has no history, and the two begin differently
    for size, special in ((1.0, 0.0), (3.0, 0.0), (0.5, value), (2.0, 0.0), (9.0, 0.0)):
        x, dy = torch.randn(32, 64) * size, torch.randn(32, 48) * size
        x[3, 5] = dy[3, 5] = special
        ours.zero_grad()
        theirs.zero_grad()
        y = ours(x)
        y.backward(dy)
        with te.autocast(recipe=te.DelayedScaling(**options)):
            expected = theirs(x)
        expected.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_gradients_can_have_another_scaling_than_the_rest():
    mixed, block = gradients("gradient_scaling=current"), gradients("gradient_scaling=block gradients=e4m3")
    delayed, current = gradients(""), gradients("scaling=current")  # a first pass has no history
    assert distance(mixed, current) == 0 and distance(delayed, current) == 0
    assert block["loss"] == delayed["loss"] and distance(block, delayed) > 0.01
    model = Ablated(AblatedConfig(**SIZES, ablation="gradient_scaling=current history=16"))
    shapes = {name.split(".")[-1]: buffer.shape for name, buffer in model.named_buffers()}
    assert shapes["x_amax"] == (16,) and "w_scale" in shapes and "dy_amax" not in shapes


@pytest.mark.parametrize("scaling", ["row", "block"])
def test_scales_run_along_k(scaling):
    """A row of small values survives where it has its own scale: in the forward GEMM, whose K are columns."""
    x = torch.ones(128, 128)
    x[64:] = 2.0**-20  # E4M3 has 18 powers of two
    forward, wgrad = Gemm(Ablation.parse(f"scaling={scaling}")).operands("x", x)
    torch.testing.assert_close(forward, x)
    assert (wgrad[64:] == 0).all() and (wgrad[:64] == 1).all()


def test_each_role_changes_its_gemms_alone():
    plain, both = gradients("quantize=none"), gradients("quantize=gradients")
    assert both["loss"] == plain["loss"], "the forward pass has no gradient"
    only_wgrad = gradients("quantize=wgrad.dy")
    head = "lm_head.layer_norm_weight"  # behind the dgrad of lm_head
    assert torch.equal(only_wgrad[head], plain[head]) and not torch.equal(both[head], plain[head])
    weight = "blocks.2.mlp.fc2_weight"
    assert not torch.equal(only_wgrad[weight], plain[weight])
    only_dgrad = gradients("quantize=dgrad.dy")
    assert torch.equal(only_dgrad[head], both[head])
    errors = {role: distance(gradients(f"quantize={role} scaling=current"), plain)
              for role in ("weights", "activations", "gradients")}
    assert all(0.01 < error < 0.2 for error in errors.values()), errors


def test_emulated_fp8_can_be_turned_off():
    torch.manual_seed(1)
    model = Ablated(AblatedConfig(**SIZES, ablation="keep=gradients scaling=current"))
    ids = torch.randint(256, (4, 32))
    before = model(ids, ids)
    with fp8.turned_off(model):
        assert not fp8.is_used(model)
        without = model(ids, ids)
    assert fp8.is_used(model) and not fp8.is_used(Ablated(AblatedConfig(**SIZES, ablation="keep=all")))
    plain = Ablated(AblatedConfig(**SIZES, ablation="quantize=none"))
    plain.load_state_dict(model.state_dict(), strict=False)
    assert model(ids, ids) == before != without == plain(ids, ids)


def test_every_kind_of_fp8_is_turned_off():
    """A model of the user's own may have both."""
    model = SimpleNamespace(config=SimpleNamespace(use_fp8=True), emulates_fp8=True)
    with fp8.turned_off(model):
        assert not fp8.is_used(model)
    assert model.config.use_fp8 and model.emulates_fp8


def test_stochastic_rounding_in_the_head_alone():
    model = Ablated(AblatedConfig(**SIZES, ablation="rounding=stochastic_head"))
    assert model.lm_head.gemms["gemm"].ablation.rounding == "stochastic"
    others = [module for module in model.blocks.modules() if isinstance(module, Gemm)]
    assert len(others) == 12 and all(gemm.ablation.rounding == "nearest" for gemm in others)


def test_the_trainers_first_pass_is_not_recorded():
    """Its weights are random, and a checkpoint's take their place."""
    model = Ablated(AblatedConfig(**SIZES, ablation=""))
    tokens = torch.randint(SIZES["vocab_size"], (2, SIZES["n_positions"] + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    models.check_first_pass("bench/ablation.py:Ablated", model, batch)
    histories = [buffer for name, buffer in model.named_buffers() if name.endswith(("_amax", "_scale"))]
    assert histories and not any(buffer.any() for buffer in histories)
    model(*batch).backward()
    model(*batch).backward()
    assert all(buffer.any() for buffer in histories)


def test_skipping_a_layer_leaves_the_others_quantized():
    for layer in ("first", "last", "qkv", "head"):
        model = Ablated(AblatedConfig(**SIZES, ablation=f"skip={layer}"))
        buffers = {name.rsplit(".gemms", 1)[0] for name, _ in model.named_buffers()}
        skipped = {"first": "blocks.0.attn.proj", "last": "blocks.2.mlp", "qkv": "blocks.1.attn.qkv",
                   "head": "lm_head"}
        assert skipped[layer] not in buffers
        assert buffers >= {place for name, place in skipped.items() if name != layer and layer != "qkv"}


def test_the_bias_of_a_gradient_is_the_mean_over_micro_batches(monkeypatch):
    def backward(model, config, batch, fast_k, watch=None):
        return {"weight": torch.full((3,), 1 + (batch if fast_k > 0 else 0))}

    monkeypatch.setattr(accumulation_bias, "backward", backward)
    monkeypatch.setattr(accumulation_bias, "dgrad_names", lambda model: [])
    rows = list(accumulation_bias.measure(None, SimpleNamespace(fp8_dgrad_fast_accum_k=64), [-0.1, -0.3]))
    found = {row["fast_up_to_k"]: (row["bias"], row["bias_standard_error"], row["error"]) for row in rows}
    assert found[0] == found[accumulation_bias.NOISE] == (0, 0, 0)
    assert found[64] == pytest.approx((-0.2, 0.1, 0.2))


def test_noise_is_of_one_rounding_and_has_no_bias():
    exact = (1 + torch.rand(100_000)).bfloat16()
    ratio = accumulation_bias.add_noise(exact.clone()).double() / exact.double()
    assert 0.1 < (ratio != 1).double().mean() < 0.9 and (ratio - 1).abs().max() <= 2**-7
    assert abs(ratio.mean() - 1) < 1e-4


def test_stochastic_rounding_has_no_bias():
    x, scale = torch.tensor([1.1, -1.9, 2.01, 3e-6, 1e9]), torch.tensor(4.0)
    drawn = torch.stack([round_to_fp8(x, scale, torch.float8_e5m2, True) for _ in range(4000)])
    nearest = round_to_fp8(x, scale, torch.float8_e5m2, False)
    assert set(drawn[:, 0].tolist()) == {1.0, 1.25} and nearest[0] == 1.0
    torch.testing.assert_close(drawn.mean(0)[:4], x[:4], rtol=0.02, atol=2e-7)
    assert (drawn[:, 4] == 57344 / 4).all(), "it saturates"


def test_every_emulated_arm_can_be_built():
    for name, words in convergence.EMULATED.items():
        Ablated(AblatedConfig(**SIZES, ablation=words))
        assert Ablation.parse(words) == Ablation() or name != "all"
    with pytest.raises(ValueError, match="quantize=weight: unknown; the values are all, none"):
        AblatedConfig(**SIZES, ablation="quantize=weight")
    with pytest.raises(ValueError, match="pass --fp8-recipe none"):
        AblatedConfig(**SIZES, use_fp8=True)


TINY = ("--n-layer 1 --n-embd 64 --n-head 2 --seq-len 32 --micro-batch-size 2 --grad-accum 2 --device cpu "
        "--eval-tokens 64 --log-interval 1 --keep-checkpoints 2")


def test_an_arm_trains_and_resumes(tmp_path, tokens, monkeypatch):
    """The operands to quantize are in the checkpoint: the rest of a run needs no environment variable."""
    monkeypatch.setattr(models, "_own_models", {})
    options = convergence.Options(data=tokens, more=TINY, evaluations=2,
                                  tokens=4 * convergence.TOKENS_PER_STEP[""])
    monkeypatch.chdir(convergence.ROOT)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    command, variables = convergence.command_of(options, "emulated-current@1e-3", 1, whole)
    assert variables == {"NANOTE_ABLATION": "scaling=current"}
    monkeypatch.setenv(*variables.popitem())
    assert run_train(" ".join(command[2:])) == 0
    found = convergence.evaluations_of("emulated-current@1e-3", 1, whole)
    assert [record["step"] for record in found] == [1, 2, 4]
    written = (whole / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) | {"tokens_per_s": convergence.TOKENS_PER_STEP[""] / seconds}
             for line, seconds in zip(written, (90, 2, 50, 4), strict=True)]
    (tmp_path / "timed").mkdir()
    (tmp_path / "timed/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = convergence.evaluations_of("emulated-current@1e-3", 1, tmp_path / "timed")
    median = 2 / (1 / 50 + 1 / 4)  # s of a step; the third has a resume in it, of 50 s
    assert [record["seconds"] for record in found] == pytest.approx([0, 2, 2 + median + 4], abs=0.01)

    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "step-4")
    monkeypatch.delenv("NANOTE_ABLATION")
    models._own_models.clear()
    command, _ = convergence.command_of(options, "emulated-current@1e-3", 1, cut)
    assert run_train(" ".join(command[2:])) == 0
    assert metrics(cut) == metrics(whole)


def test_arms_share_the_first_part_of_a_run(tmp_path, tokens, capsys):
    """They begin with bf16's checkpoint; without quantization they then train as bf16 did."""
    command = ["--data", tokens, f"--more={TINY} --keep-checkpoints 1", "--evaluations", "2", "--seeds", "1",
               "--lr", "1e-2", "--tokens", str(4 * convergence.TOKENS_PER_STEP[""]),
               "--out-dir", str(tmp_path / "runs"), "--json", str(tmp_path / "found.json")]
    shared, again, none, fp8 = (tmp_path / f"runs/{name}-seed1" for name in (
        "bf16@1e-2-4steps", "bf16-again@1e-2-4steps-switched2", "emulated-none@1e-2-4steps-switched2",
        "fp8@1e-2-4steps-switched2"))
    (none / "unfinished").mkdir(parents=True)  # of a copy that was cut
    arms = ["--switch-at", "0.5", "--arms", "bf16-again", "emulated-none", "fp8"]
    assert convergence.main([*command, *arms]) == 0
    losses = [record["loss"] for record in metrics(shared)][2:]
    assert [record["loss"] for record in metrics(again)][1:] == losses
    for folder, is_quantized in ((none, False), (fp8, True)):
        assert [record["step"] for record in metrics(folder)] == [2, 3, 4], "2: evaluated after the switch"
        found = [record["loss"] for record in metrics(folder)][1:]
        assert found == pytest.approx(losses, rel=2e-3)
        assert (found == pytest.approx(losses, rel=1e-6)) != is_quantized
    assert json.loads((fp8 / "config.json").read_text())["config"]["fp8_recipe"] == "delayed"
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["arm"]: row["seeds"] for row in found["summary"]} == {
        "bf16@1e-2": 1, "bf16-again@1e-2": 1, "emulated-none@1e-2": 1, "fp8@1e-2": 1}
    first = next(record for record in found["runs"] if record["arm"] == "fp8@1e-2")
    assert (first["step"], first["switch_step"], first["seconds"]) == (2, 2, 0)

    assert convergence.main([*command, *arms]) == 0, "no run is refused, nor trained again"
    other = convergence.Options(
        data=tokens, more=f"{TINY} --weight-decay 0.2", evaluations=2, switch_at=0.5,
        out_dir=tmp_path / "runs", tokens=4 * convergence.TOKENS_PER_STEP[""])
    for arm, folder in ("bf16", shared), ("emulated-none", none), ("fp8", fp8):
        with pytest.raises(ValueError, match=f"{folder}: was trained with --weight-decay 0.1, not 0.2"):
            convergence.check_run(other, f"{arm}@1e-2", 1)

    shutil.rmtree(shared / "step-2")
    capsys.readouterr()
    assert convergence.main([*command, "--switch-at", "0.5", "--arms", "fp8-current"]) == 1
    assert f"there is no {shared}/step-2" in capsys.readouterr().err
    for other, step in ([], 0), (["--switch-at", "0.75", "--evaluations", "4"], 3):
        with pytest.raises(ValueError, match=f"bf16-again@1e-2 that switch at step 2, .* at {step} "):
            convergence.main([*command, *other, "--arms", "fp8"])


def complete(folder, options, arm, seed):
    """Write what a run that is complete leaves in its folder."""
    words = convergence.command_of(options, arm, seed, folder)[0][2:]
    (folder / "step-10").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": asdict(read_options(words)[0])}))
    record = {"step": 10, "loss": 2.0, "val_loss": 2.0, "tokens_per_s": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")


def other_corpus(tokens, folder):
    """Return a corpus with as many tokens, of which one differs."""
    shutil.copytree(tokens, folder)
    meta = json.loads((folder / "meta.json").read_text())
    content = bytearray((folder / "train.bin").read_bytes())
    content[0] ^= 1
    (folder / "train.bin").write_bytes(content)
    meta["train_sha256"] = hashlib.sha256(content).hexdigest()
    meta.pop("sha256"), meta.pop("format")  # as the first version, without a checksum of meta.json
    (folder / "meta.json").write_text(json.dumps(meta))
    return str(folder)


def test_the_pages_commands_train_the_runs_of_the_results():
    """Each run, and no other: its arm, learning rate, seed, length and switch."""
    block = re.search(r"```sh\n(rm results/convergence.*?)```",
                      (convergence.ROOT / "guide/evidence.md").read_text(), re.S)[1]
    trained, variables = {}, {}
    for line in (line.partition("#")[0] for line in block.splitlines()):
        if found := re.fullmatch(r'(\w+)="(.*)"', line):
            variables[found[1]] = found[2]
        elif line.startswith("python bench/convergence.py"):
            words = shlex.split(re.sub(r"\$(\w+)", lambda name: variables[name[1]], line))[2:]
            options = cli.parse(convergence.Options, words, prog="convergence.py", description="")
            runs = trained.setdefault(options.json.stem, set())
            for arm, seed in sum(convergence.jobs_of(options), []):
                switch = convergence.switch_step(options, arm) if convergence.is_switched(options, arm) else 0
                runs.add((arm, seed, convergence.steps_of(options, arm), switch))
    assert len(trained) == 4
    for name, runs in trained.items():
        records = json.loads((convergence.ROOT / f"results/{name}.json").read_text())["runs"]
        assert runs == {(record["arm"], record["seed"], record["step"], record.get("switch_step", 0))
                        for record in records if record["tokens"] == record["run_tokens"]}, name


def test_one_json_holds_one_corpus_and_all_commands(tmp_path, tokens, monkeypatch):
    path, other = tmp_path / "found.json", other_corpus(tokens, tmp_path / "other")

    def command(arm, seed, data, *more):
        folder = tmp_path / f"runs-{Path(data).name}"
        options = convergence.Options(tokens=81920, data=data, out_dir=folder, more=" ".join(more))
        if not (run_folder := convergence.folder_of(options, f"{arm}@1e-3", seed)).exists():
            complete(run_folder, options, f"{arm}@1e-3", seed)
        return ["--arms", f"{arm}@1e-3", "--seeds", str(seed), "--tokens", "81920", "--data", data,
                "--out-dir", str(folder), "--json", str(path), *(f"--more={words}" for words in more)]

    monkeypatch.setitem(convergence.TOKENS_PER_STEP, "bpe-", 8192)
    commands = [command("small-bf16", 1, tokens), command("small-fp8", 1, tokens),
                command("bpe-bf16", 1, other)]
    for argv in (*commands, commands[0]):
        assert convergence.main(argv) == 0
    found = json.loads(path.read_text())
    assert found["command"] == "; ".join(
        shlex.join(["python", "bench/convergence.py", *argv]) for argv in commands)
    assert [record["arm"].partition("@")[0] for record in found["runs"]] == [
        "small-fp8", "bpe-bf16", "small-bf16"]
    count = json.loads(Path(tokens, "meta.json").read_text())["train_tokens"]
    assert {name: (entry["data"], entry["train_tokens"]) for name, entry in found["corpora"].items()} == {
        found["runs"][0]["corpus"]: (tokens, count), found["runs"][1]["corpus"]: (other, count)}

    for argv, name in ((command("small-bf16", 2, other), "--data"),
                       (command("small-bf16", 2, tokens, "--weight-decay 0.2"), "--more")):
        with pytest.raises(ValueError, match=f"runs of small-.* with another {name} .*; name another file"):
            convergence.main(argv)
    assert convergence.main(command("bpe-bf16", 2, other)) == 0
    known = json.loads(path.read_text())
    assert convergence.main(["--draw", "--json", str(path)]) == 0
    assert json.loads(path.read_text()) == known
    for record in known["runs"]:
        del record["corpus"]  # an older version
    path.write_text(json.dumps(known))
    with pytest.raises(ValueError, match=r"with another --data \('unknown', not "):
        convergence.main(commands[0])


@pytest.mark.parametrize("arm, switch_at, message", [
    ("fp8", "0.9", "the switch is at step 763 of 763; it must be in between"),
    ("fp8", "1", "in between"), ("nanogpt", "0.5", "leave it out")])
def test_a_switch_that_leaves_nothing_is_refused(tmp_path, tmp_path_factory, arm, switch_at, message):
    checkout = tmp_path_factory.mktemp("nanoGPT")
    (checkout / "model.py").touch()
    with pytest.raises(ValueError, match=message):
        convergence.main(["--arms", arm, f"--switch-at={switch_at}", "--evaluations", "1",
                          "--nanogpt", str(checkout), "--json", str(tmp_path / "found.json"),
                          "--out-dir", str(tmp_path / "runs")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changed, message", [
    (["--data", "{other}"], "--data {tokens}, not {other}"),
    (["--more=--weight-decay 0.2"], "--weight-decay 0.1, not 0.2"),
    (["--evaluations", "2"], "--eval-interval 1, not 5")])
def test_a_run_with_other_options_is_not_reused(tmp_path, tokens, changed, message):
    names = {"tokens": tokens, "other": str(shutil.copytree(tokens, tmp_path / "other"))}
    changed, message = [word.format(**names) for word in changed], message.format(**names)
    command = ["--arms", "small-bf16@1e-3", "--seeds", "1", "--tokens", "81920", "--data", f"{tokens}/",
               "--out-dir", str(tmp_path), "--json", str(tmp_path / "found.json")]
    folder = tmp_path / "small-bf16@1e-3-10steps-seed1"
    complete(folder, convergence.Options(tokens=81920, data=tokens), "small-bf16@1e-3", 1)
    assert not convergence.main(command)  # the same options
    before = (tmp_path / "found.json").read_text()
    for is_complete in (True, False):
        with pytest.raises(ValueError, match=f"{folder}: was trained with {message}; name another --out-dir"):
            convergence.main([*command, *changed])
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # it would be resumed, with the options of before
    assert (tmp_path / "found.json").read_text() == before


def test_a_run_that_fails_is_in_the_exit_code(tmp_path, tokens, monkeypatch, capsys):
    """The rows of earlier runs are summarized all the same."""
    monkeypatch.setattr(convergence, "command_of", lambda *job: ([sys.executable, "-c", "exit(3)"], {}))
    path, corpus = tmp_path / "found.json", convergence.corpus_of(convergence.Options(data=tokens))[0]
    runs = [record | {"corpus": corpus} for record in run("bf16@1e-3", 1, 100, 2.0, 10.0)]
    path.write_text(json.dumps({"runs": runs}))
    command = ["--arms", "bf16", "--seeds", "2", "--out-dir", str(tmp_path / "runs"), "--json", str(path),
               "--data", tokens]
    assert convergence.main(command) == 1
    printed = capsys.readouterr()
    assert "bf16@1.2e-3, seed 2: OSError: exit code 3, see" in printed.err and "loss 2.0000" in printed.out
    # a run whose log is of another version, before one that fails
    monkeypatch.setattr(convergence, "is_complete", lambda *of: of[-1].name.endswith("seed2"))
    monkeypatch.setattr(convergence, "evaluations_of", lambda *_: {}["tokens_per_s"])
    assert convergence.main([*command, "--seeds", "2", "3"]) == 1
    assert re.findall("seed (.): (.*Error)", capsys.readouterr().err) == [("2", "KeyError"), ("3", "OSError")]


@pytest.mark.parametrize("arguments, message", [
    ("--evaluations 0", "--evaluations 0: must be from 1 to 1e+09, such as 10"),
    ("--tokens inf", "--tokens inf: must be from 1 to 1e+15, such as 1e8"),
    ("--tokens nan", "--tokens nan: must be from 1"), ("--tokens 0", "--tokens 0.0: must be from 1"),
    ("--time-budget -1", "--time-budget -1: must be from 0"),
    ("--switch-at inf", "--switch-at inf: must be from 0 to 1, such as 0.75"),
    ("--switch-at 75", "--switch-at 75.0: must be from 0 to 1"),
    ("--switch-at=-0.5", "--switch-at -0.5: must be from 0 to 1"),
    ("--seeds -1", "--seed -1: must be 0 or more"),
    ("--data nowhere", "nowhere: no token files here"),
    ("--nanogpt nowhere", "--nanogpt nowhere: has no model.py"),
    ("--more=--seed=9", "--more: this script sets --seed=9 itself; leave it out"),
    ("--more=--learning-rate=1", "use --lr"), ("--lr high", "--lr"),
    ("--json foreign.json", "foreign.json: runs is missing; name another file with --json"),
    ("--json text.json --draw", "text.json: not JSON"), ("--json list.json", "list.json: the document is []"),
    ("--json rows.json", "rows.json: runs[0].arm is missing")])
def test_bad_input_is_one_line_before_anything_is_trained(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(convergence, "train_all", lambda *_: pytest.fail("it trains"))
    monkeypatch.chdir(tmp_path)
    contents = {"foreign": '{"cells": []}', "text": "no", "list": "[]", "rows": '{"runs": [{"seed": 1}]}'}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(content)
    argv = ["--json", "found.json", *arguments.split()]
    assert cli.run(lambda: convergence.main(argv), "convergence.py") == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("convergence.py: ") and message in line
    assert {path.stem: path.read_text() for path in tmp_path.iterdir()} == contents


def test_nothing_starts_after_the_deadline_or_the_end(tmp_path):
    options = convergence.Options(out_dir=tmp_path)
    for deadline, is_ended in ((0.0, False), (math.inf, True)):
        stop = threading.Event()
        if is_ended:
            stop.set()
        convergence.train_all(options, [("bf16@1e-3", 1)], None, deadline, stop)
    assert not list(tmp_path.iterdir())


def test_the_time_of_a_part_of_a_run_is_not_compared():
    runs = [*run("bf16@1e-3", 1, 100, 2.0, 160.0), *run("fp8@1e-3", 1, 100, 2.1, 30.0),
            *run("fp8@1e-3", 1, 144, 1.9, 40.0)]
    for switched in (False, True):
        more = {"switch_step": 1} if switched else {}
        rows = summarize([r | (more if r["arm"] == "fp8@1e-3" else {}) for r in runs])
        found = next(row for row in rows if (row["arm"], row["tokens"]) == ("fp8@1e-3", 100))
        assert (found["loss_matched_speedup"] is None) == switched


def test_nanogpt_trains_as_an_arm(tmp_path, tokens, monkeypatch, compiles):
    monkeypatch.setattr(models, "_own_models", {})
    (tmp_path / "model.py").write_text(STAND_IN)
    options = convergence.Options(data=tokens, more=TINY, nanogpt=tmp_path,
                                  tokens=2 * convergence.TOKENS_PER_STEP[""])
    monkeypatch.chdir(convergence.ROOT)
    command, variables = convergence.command_of(options, "nanogpt@1e-3", 1, tmp_path / "run")
    monkeypatch.setenv("NANOGPT", variables["NANOGPT"])
    assert run_train(" ".join(command[2:])) == 0
    assert compiles and convergence.evaluations_of("nanogpt@1e-3", 1, tmp_path / "run")[-1]["step"] == 2
    with pytest.raises(ValueError, match="name its folder with --nanogpt"):
        convergence.main(["--arms", "nanogpt", "--json", str(tmp_path / "found.json")])


def test_a_summary_of_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such file to summarize; leave out --draw"):
        convergence.main(["--draw", "--json", str(tmp_path / "absent.json")])
