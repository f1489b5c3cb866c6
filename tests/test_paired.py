"""bench/paired.py: pairs of runs, their windows, and nanoGPT's weights under the kit's names."""

import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import time

import pytest
import torch

import train
from bench import arms, gaps, measured, paired
from paired_tools import run_of, set_results, tables_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="trains on a CPU")
STEPS = 20


@pytest.fixture
def study(tmp_path, tokens):
    """Return a function that runs a study of `STEPS` steps and returns its exit code and its JSON."""
    def run(*arguments, name="runs"):
        path = tmp_path / f"{name}.json"
        code = paired.main([
            "--size", "tiny", "--tokens", str(512 * STEPS), "--seeds", "1", "--data", str(tokens),
            "--out-dir", str(tmp_path / name), "--json", str(path), *arguments])
        return code, json.loads(path.read_text()) if path.exists() else None
    return run


def runs_of(document, **fields) -> list[dict]:
    return [run for run in document["runs"] if all(run[name] == value for name, value in fields.items())]


def test_a_window_begins_with_the_weights_of_bf16(study, monkeypatch):
    numbers = itertools.count()  # of trained parts, in place of their times
    monkeypatch.setattr(paired, "ms_of_chunks", lambda times: [float(next(numbers))])
    study("--arms", "fp8")
    code, document = study("--arms", "fp8", "--start", "0.5")
    assert code == 0
    whole, = runs_of(document, arm="bf16", start=0.0)
    base, = runs_of(document, arm="bf16", start=0.5)
    window, = runs_of(document, arm="fp8", start=0.5)
    fp8, = runs_of(document, arm="fp8", start=0.0)
    assert base["losses"] == whole["losses"], "a run in two parts trains like one"
    assert window["losses"][:STEPS // 2] == whole["losses"][:STEPS // 2] != fp8["losses"][:STEPS // 2]
    assert window["losses"][STEPS // 2:] != whole["losses"][STEPS // 2:]
    assert fp8["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-3), "the same first weights and batch"
    assert fp8["shared_weights"] == whole["shared_weights"] != base["shared_weights"]
    assert window["shared_weights"] == base["shared_weights"]
    assert (base["ms"], window["ms"]) == (5, 6), "of the last two parts: those of the window"


def test_a_run_that_is_cut_continues(study, monkeypatch):
    _, expected = study("--arms", "fp8")
    seconds = itertools.count()
    monkeypatch.setattr(paired, "clock", lambda: next(seconds))  # a second passes at each look
    codes = []
    stored = set()  # runs in the JSON
    for _ in range(9):
        code, document = study("--arms", "fp8", "--minutes", "0.05", name="cut")
        codes.append(code)
        stored.add(len(document["runs"]) if document else 0)
        if code == 0:
            break
    assert len(codes) > 2 and codes[-1] == 0, "it was cut several times, then complete"
    assert stored == {0, 1, 2}, "a run is in the JSON as soon as it is complete"
    for run, other in zip(document["runs"], expected["runs"]):
        assert run["losses"] == other["losses"]
        assert run["val_loss"] == other["val_loss"]


def test_a_run_that_is_cut_is_continued_by_the_same_commit_only(study, monkeypatch):
    """A complete part of another commit may stay."""
    seconds = itertools.count()
    monkeypatch.setattr(paired, "clock", lambda: next(seconds))
    monkeypatch.setenv("NANOTE_COMMIT", "a" * 40)
    for _ in range(2):  # the second one begins BF16's steps
        code, _ = study("--arms", "fp8", "--minutes", "0.05")
        assert code == 1
    monkeypatch.setenv("NANOTE_COMMIT", "b" * 40)
    with pytest.raises(ValueError, match="was begun by commit aaa.*, and this is bbb.*; name another"):
        study("--arms", "fp8")
    monkeypatch.setenv("NANOTE_COMMIT", "a" * 40 + "-dirty")
    code, _ = study("--arms", "fp8", "--minutes", "99")
    assert code == 0
    monkeypatch.setenv("NANOTE_COMMIT", "b" * 40)
    code, _ = study("--arms", "fp8", "--minutes", "99")
    assert code == 0


def test_sigterm_saves_the_state(study, monkeypatch):
    _, expected = study("--arms", "fp8")
    trained = []
    run_micro_batches = train.run_micro_batches

    def interrupted(*arguments):
        trained.append(1)
        if len(trained) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_micro_batches(*arguments)

    monkeypatch.setattr(train, "run_micro_batches", interrupted)
    code, _ = study("--arms", "fp8", name="cut")
    assert code == 1 and len(trained) == 3
    code, document = study("--arms", "fp8", name="cut")
    assert code == 0 and len(trained) == 2 * STEPS
    for run, other in zip(document["runs"], expected["runs"]):
        assert run["losses"] == other["losses"]


def test_a_run_is_in_the_json_while_others_train(study, tmp_path, monkeypatch):
    """On two GPUs, here two processes: what is complete stays if the command is killed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(paired, "SECONDS_TO_WRITE", 0)
    path = tmp_path / "runs.json"
    stored = set()  # numbers of runs, each time that the command waits

    def wait(seconds):
        stored.add(len(json.loads(path.read_text())["runs"]) if path.exists() else 0)
        time.sleep(seconds)

    monkeypatch.setattr(paired, "sleep", wait)
    code, document = study("--arms", "fp8", "--seeds", "1", "2")
    assert code == 0 and len(document["runs"]) == 4
    assert stored & {1, 2, 3}


def test_no_process_trains_on_after_an_error(study, monkeypatch):
    """As of a disk that is full, while two GPUs, here processes, train."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(paired, "SECONDS_TO_WRITE", 0)
    started = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(paired, "add_runs", fail)
    with pytest.raises(OSError, match="disk full"):
        study("--arms", "fp8", "--seeds", "1", "2", "--tokens", "1e9")
    assert len(started) == 2
    for process in started:
        process.wait(timeout=60)


def test_a_folder_of_other_options_is_refused(study, monkeypatch):
    study("--arms", "fp8")
    monkeypatch.setitem(arms.SIZES, "tiny", arms.SIZES["tiny"] | {"weight_decay": 0.5})
    with pytest.raises(ValueError, match=r"trained with weight_decay 0\.1, now 0\.5; name another --out-dir"):
        study("--arms", "fp8")


def test_windows_and_arms_share_the_training_of_bf16(study, monkeypatch):
    trained = []
    train_part = paired.train_part

    def recorded(options, seed, part, *arguments):
        trained.append((part.arm, part.first_step, part.last_step))
        train_part(options, seed, part, *arguments)

    monkeypatch.setattr(paired, "train_part", recorded)
    study("--arms", "fp8", "--stop", "0.25")
    study("--arms", "fp8", "--start", "0.25", "--stop", "0.5")
    study("--arms", "fp8", "fp8-e4m3", "--start", "0.5", "--stop", "0.75")
    code, document = study("--arms", "fp8", "--start", "0.75")
    bf16 = [part for part in trained if part[0] == "bf16"]
    assert code == 0 and len(document["runs"]) == 9
    assert bf16 == [("bf16", 1, 0), ("bf16", 1, 5), ("bf16", 6, 10), ("bf16", 11, 15), ("bf16", 16, 20)]
    assert len(trained) == len(bf16) + 5


def test_one_command_trains_runs_of_several_lengths(study):
    code, document = study("--arms", "fp8", "--tokens", "2048", "5120")  # of two options the last one counts
    assert code == 0
    assert [(run["arm"], len(run["losses"])) for run in document["runs"]] == [
        ("bf16", 4), ("fp8", 4), ("bf16", 10), ("fp8", 10)]
    assert [row["tokens"] for row in document["rows"]] == [2048, 5120]


def test_differences_are_paired_by_seed_and_have_an_interval():
    row, = gaps.summarize([
        run_of("bf16", 1, 2.0), run_of("bf16", 2, 3.0), run_of("bf16", 3, 7.0),
        run_of("fp8", 1, 2.01, ms=50.0), run_of("fp8", 2, 3.03, ms=50.0)])
    assert row["seeds"] == 2
    assert row["training"] == pytest.approx(0.02)
    half = 12.706 * 0.01  # t of one degree of freedom, times the standard error
    assert row["training_interval"] == pytest.approx([0.02 - half, 0.02 + half])
    assert row["validation"] == pytest.approx(0.02)
    assert row["training_percent"] == pytest.approx(100 * 0.02 / 2.5)
    assert row["speed"] == 2.0


def reasons_of(runs) -> list[str]:
    return [line.partition("left out, ")[2] for line in gaps.lines_about_left_out(runs)]


def test_runs_from_other_weights_are_no_pair():
    """An earlier pair stays beside runs from other weights that are none."""
    runs = [
        run_of("bf16", 1, 2.0) | {"shared_weights": "a"}, run_of("fp8", 1, 2.1) | {"shared_weights": "a"},
        run_of("bf16", 2, 3.0) | {"shared_weights": "b"}, run_of("fp8", 1, 2.5) | {"shared_weights": "b"}]
    row, = gaps.summarize(runs)
    assert row["seeds"] == 1 and row["training"] == pytest.approx(0.1)
    assert reasons_of(runs) == ["there is no BF16 run from the same weights"]
    window = {"start": 0.5}  # an older record has no checksum: the losses before its start tell
    assert gaps.summarize([run_of("bf16", 1, 2.0) | window, run_of("fp8", 1, 2.1) | window]) == []


def test_pairs_of_several_corpora_are_of_one_row_each_with_its_own_bf16():
    a = dict(train_sha256="a")
    b = dict(train_sha256="b")
    runs = [run_of("bf16", 1, 2.0, **a), run_of("fp8", 1, 2.1, **a),
            run_of("bf16", 1, 3.0, **b), run_of("fp8", 1, 3.1, **b),
            run_of("bf16", 2, 2.0, **a), run_of("fp8", 2, 2.2, **a),
            run_of("bf16", 2, 5.0, **b)]  # without a pair
    assert len(gaps.summarize(runs)) == 2
    row, = gaps.rows_of(gaps.groups_over_corpora(runs))
    assert row["seeds"] == 3
    assert row["training"] == pytest.approx((0.1 + 0.1 + 0.2) / 3)


def test_an_arm_that_diverges_on_every_seed_has_a_row():
    """By its losses at the end, or by its validation loss. A loss that is not finite before counts not."""
    nan = float("nan")
    runs = [run_of("bf16", seed, 2.0, steps=100) for seed in (1, 2, 3)]
    runs += [
        run_of("fp8", 1, 2.1, steps=100) | {"losses": 99 * [2.1] + [nan]},
        run_of("fp8", 2, 2.1, steps=100) | {"val_loss": nan}]
    row, = gaps.summarize(runs)
    assert row["seeds"] == 0 and row["diverged_seeds"] == [1, 2]
    for field in ("training", "training_interval", "validation", "speed"):
        assert row[field] is None
    assert "0 of 2, 2 diverged" in gaps.main_table([row])
    assert reasons_of(runs) == 2 * ["the loss of fp8 is not finite at its end"]
    recovered = run_of("fp8", 3, 2.1, steps=100) | {"losses": 80 * [2.1] + [nan] + 19 * [2.1]}
    row, = gaps.summarize([*runs, recovered])
    assert row["seeds"] == 1 and row["diverged_seeds"] == [1, 2]
    assert "1 of 3, 2 diverged" in gaps.main_table([row])


def test_skipped_steps_of_an_arm_are_added_up():
    """Those of a diverged run, too; not BF16's."""
    row, = gaps.summarize([
        run_of("bf16", 1, 2.0) | {"skipped_steps": 100}, run_of("fp8", 1, 2.1) | {"skipped_steps": 2},
        run_of("bf16", 2, 2.0), run_of("fp8", 2, float("nan")) | {"skipped_steps": 5}])
    assert row["skipped_steps"] == 7
    assert cell_of(row, "skipped steps") == "7"


def test_a_pair_whose_bf16_diverged_is_left_out():
    nan = float("nan")
    runs = [
        run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.1), run_of("bf16", 2, nan), run_of("fp8", 2, nan),
        run_of("bf16", 3, nan), run_of("fp8", 3, 2.1)]
    row, = gaps.summarize(runs)
    assert row["seeds"] == 1 and row["diverged_seeds"] == []
    assert reasons_of(runs) == 2 * ["the loss of BF16 is not finite at its end"]


def test_a_seed_counts_once_by_its_last_run():
    """Of seed 1 there are runs from the weights "a" and "b": a pair, and one that diverged."""
    a = [run_of("bf16", 1, 2.0) | {"shared_weights": "a"}, run_of("fp8", 1, 2.1) | {"shared_weights": "a"}]
    b = [run_of("bf16", 1, 3.0) | {"shared_weights": "b"},
         run_of("fp8", 1, float("nan")) | {"shared_weights": "b"}]
    row, = gaps.summarize(a + b)
    assert (row["seeds"], row["diverged_seeds"]) == (0, [1])
    row, = gaps.summarize(b + a)
    assert (row["seeds"], row["diverged_seeds"]) == (1, [])


@pytest.mark.parametrize("start", [0.0, 0.5])
@pytest.mark.parametrize("name", ["machine", "commit", "torch", "model"])
def test_runs_of_two_origins_are_no_pair(name, start):
    """In whole runs and windows; until BF16 has a run of the second origin."""
    of_first = {name: "first", "start": start}
    of_second = {name: "second", "start": start}
    losses = {"losses": [2.0] * 10}  # the same before a start
    runs = [
        run_of("bf16", 1, 2.0) | of_first, run_of("fp8", 1, 2.1) | of_first | losses,
        run_of("fp8-e4m3", 1, 2.1) | of_second | losses]
    row, = gaps.summarize(runs)
    assert row["arm"] == "fp8"
    assert reasons_of(runs) == [f"its {name} is second, that of BF16 is first"]
    runs.append(run_of("bf16", 1, 1.9) | of_second | {"losses": [2.0] * 5 + [1.9] * 5})
    rows = gaps.summarize(runs)
    assert [row["arm"] for row in rows] == ["fp8", "fp8-e4m3"] and reasons_of(runs) == []
    assert [row["training"] for row in rows] == pytest.approx([0.0, 0.1])


def test_a_written_json_does_not_change_the_commit():
    """The JSON is a tracked file: git calls the checkout changed when the same command continues."""
    row, = gaps.summarize([
        run_of("bf16", 1, 2.0) | {"commit": "first"}, run_of("fp8", 1, 2.1) | {"commit": "first-dirty"}])
    assert row["seeds"] == 1


def test_an_arm_of_another_model_is_a_pair():
    for arm in ("fp8-current", "fp8-block", "nanogpt"):
        bf16 = run_of("bf16", 1, 2.0) | {"model": "FastGPT2Model"}
        row, = gaps.summarize([bf16, run_of(arm, 1, 2.1) | {"model": "another"}])
        assert row["arm"] == arm


def test_a_run_of_a_new_commit_replaces_no_run_of_another(monkeypatch, tmp_path):
    monkeypatch.setattr(paired, "run_record", lambda options, arm, seed: (
        run_of(arm, seed, 2.0) | {"commit": options.data}))  # in place of the folder of the data
    path = tmp_path / "runs.json"
    for commit, names in (("first", ["fp8", "fp8-e4m3"]), ("second", ["fp8"]), ("second", ["fp8"])):
        paired.add_runs(paired.Options(arms=names, seeds=[1], data=commit, json=path), argv=[])
    document = json.loads(path.read_text())
    assert [(run["arm"], run["commit"]) for run in document["runs"]] == [
        ("bf16", "first"), ("fp8", "first"), ("fp8-e4m3", "first"), ("bf16", "second"), ("fp8", "second")]
    assert [(row["arm"], row["seeds"]) for row in document["rows"]] == [("fp8", 1), ("fp8-e4m3", 1)]


def test_speed_is_of_real_kernels():
    rows = gaps.summarize([
        run_of("bf16", 1, 2.0), run_of("fp8-weights", 1, 2.1), run_of("fp8-e4m3", 1, 2.1, ms=50.0)])
    assert [row["speed"] for row in rows] == [None, 2.0]


def test_the_difference_over_a_run_is_a_mean_over_seeds():
    """Of 40 steps, a part has 2. The difference is 0.1 in the first part; then those of two seeds differ."""
    rest = [0.2] * 38
    runs = []
    for seed, factor in ((1, 1.0), (2, 3.0)):
        differences = [0.0, 0.2] + [factor * difference for difference in rest]
        runs += [run_of("bf16", seed, 2.0, steps=40), run_of("fp8", seed, 2.0, steps=40) | {
            "losses": [2.0 + difference for difference in differences]}]
    [group] = gaps.groups_of(runs)
    first, *others = gaps.differences_over_run(group.pairs)
    assert first[0] == pytest.approx(0.1) and first[1] == pytest.approx([0.1, 0.1])
    half = 12.706 * 0.2  # t of one degree of freedom, times the standard error
    assert len(others) == gaps.SEGMENTS - 1
    for mean, interval in others:
        assert mean == pytest.approx(0.4) and interval == pytest.approx([0.4 - half, 0.4 + half])


def test_a_skipped_step_has_no_difference():
    """Nor the part of a run that it is in. The others have theirs."""
    runs = [run_of("bf16", seed, 2.0, steps=40) for seed in (1, 2)]
    runs += [run_of("fp8", seed, 2.1, steps=40) for seed in (1, 2)]
    runs[-1]["losses"][4] = math.inf
    [group] = gaps.groups_of(runs)
    intervals = [interval for _, interval in gaps.differences_over_run(group.pairs)]
    assert intervals[2] is None and None not in intervals[:2] + intervals[3:]


def test_a_short_window_is_compared_over_its_own_steps():
    """Of 100 steps, the arm trains the last 2."""
    window = {"start": 0.98, "losses": 98 * [9.0] + 2 * [2.0]}
    arm = {"losses": 98 * [9.0] + 2 * [2.5]}
    row, = gaps.summarize([
        run_of("bf16", 1, 2.0, steps=100) | window, run_of("fp8", 1, 2.5, steps=100) | window | arm])
    assert row["training"] == pytest.approx(0.5)


def cell_of(row, title) -> str:
    """Return the last cell with this title in the table of a row."""
    titles, _, cells = gaps.main_table([row]).splitlines()
    return dict(zip(titles.split(" | "), cells.split(" | ")))[title]


def test_speed_at_equal_loss_counts_the_tokens_that_are_missing():
    """BF16 falls by 0.4 over twice the tokens, and FP8 is 0.1 behind: it needs 2^(1/4) times as many."""
    rows = gaps.summarize([
        run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.1, ms=50.0),
        run_of("bf16", 1, 1.6, steps=20), run_of("fp8", 1, 1.7, ms=50.0, steps=20)])
    assert rows[0]["speed_to_equal_loss"] == pytest.approx(2.0 / 2**0.25)
    assert rows[1]["speed_to_equal_loss"] == pytest.approx(2.0 / 2**0.25), "the shorter runs show the fall"
    for row, other_tokens in zip(rows, (20_000, 10_000)):
        assert row["slope"] == pytest.approx(0.4 / math.log(2))
        assert row["slope_tokens"] == other_tokens and row["slope_seeds"] == [1]
    for other in ({"train_sha256": "of another corpus"}, {"lr": 2e-3}):
        for row in gaps.summarize([
                run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.1), run_of("bf16", 1, 1.6, steps=20) | other,
                run_of("fp8", 1, 1.7, steps=20) | other]):
            assert row["slope"] is None
    row, = gaps.summarize([run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.1)])
    for field in ("speed_to_equal_loss", "slope", "slope_tokens", "slope_seeds"):
        assert row[field] is None
    rises = gaps.summarize([
        run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.1), run_of("bf16", 1, 2.2, steps=20),
        run_of("fp8", 1, 2.3, steps=20)])
    assert [row["speed_to_equal_loss"] for row in rises] == [None, None]


def test_speed_at_equal_loss_has_the_interval_of_the_gap():
    """The fall, 0.5, is that of the common seeds, 1 and 2: the third one has no longer run."""
    runs = [run_of("bf16", 3, 9.0), run_of("fp8", 3, 9.1, ms=50.0)]
    for seed, gap in ((1, 0.09), (2, 0.11)):
        runs += [run_of("bf16", seed, 2.0), run_of("fp8", seed, 2.0 + gap, ms=50.0),
                 run_of("bf16", seed, 1.5, steps=20), run_of("fp8", seed, 1.6, ms=50.0, steps=20)]
    row = gaps.summarize(runs)[0]
    half = 4.303 * 0.01 / 3**0.5
    assert row["speed_to_equal_loss"] == pytest.approx(2.0 / 2**0.2)
    assert row["speed_to_equal_loss_interval"] == pytest.approx(
        [2.0 / 2**((0.1 + half) / 0.5), 2.0 / 2**((0.1 - half) / 0.5)])
    slope = cell_of(row, "slope, nats per e-fold of tokens |")
    assert slope == "0.721, with 20,000 tokens, seeds 1, 2 |"


@pytest.mark.parametrize("gaps_of_seeds, interval, cell", [
    ((0.02, 0.03), [True, True], "1.630 to 2.186"),  # -0.0385 to 0.0885
    ((0.04, 0.06), [False, True], "(not bounded) to 2.390"),  # -0.077 to 0.177
    ((0.0, 0.04), [False, False], "not bounded"),  # -0.234 to 0.274
])
def test_an_end_beyond_half_of_the_fall_is_not_bounded(gaps_of_seeds, interval, cell):
    """BF16 falls by 0.3 over twice the tokens, so that a gap may be 0.15."""
    runs = []
    for seed, gap in enumerate(gaps_of_seeds):
        runs += [run_of("bf16", seed, 2.0), run_of("fp8", seed, 2.0 + gap, ms=50.0),
                 run_of("bf16", seed, 1.7, steps=20), run_of("fp8", seed, 1.7 + gap, ms=50.0, steps=20)]
    row = gaps.summarize(runs)[0]
    assert row["speed_to_equal_loss"] is not None
    assert [end is not None for end in row["speed_to_equal_loss_interval"]] == interval
    assert cell_of(row, "95 % interval") == cell


def test_speed_at_equal_loss_extrapolates_over_half_of_the_fall():
    """BF16 falls by 0.3 over twice the tokens."""
    for gap, is_known in ((0.14, True), (0.16, False)):
        row = gaps.summarize([
            run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.0 + gap), run_of("bf16", 1, 1.7, steps=20),
            run_of("fp8", 1, 1.8, steps=20)])[0]
        assert (row["speed_to_equal_loss"] is not None) == is_known


def whole_runs_of_two_lengths() -> list[dict]:
    """Seeds 1 and 2, of 40 and 80 steps. FP8 is above BF16 by 0.01 and 0.02."""
    runs = []
    for seed in (1, 2):
        for steps, loss in ((40, 2.0), (80, 1.5)):
            runs.append(run_of("bf16", seed, loss, steps=steps) | {"val_loss_without_fp8": None})
            fp8 = run_of("fp8", seed, loss + 0.01 * seed, ms=50.0, steps=steps)
            runs.append(fp8 | {"val_loss_without_fp8": fp8["val_loss"]})
    return runs


def test_measured_md_has_whole_runs_and_diverged_seeds(monkeypatch):
    runs = whole_runs_of_two_lengths()
    window = {"start": 0.75, "losses": 40 * [2.0]}
    runs += [run_of("bf16", 1, 2.0, steps=40) | window, run_of("fp8", 1, 2.0, steps=40) | window]
    runs.append(run_of("fp8-e4m3", 2, math.nan, steps=40) | {"skipped_steps": 3})
    runs.append(run_of("fp8-e4m3", 1, math.nan, steps=40))
    for seed in (1, 2):  # without a BF16 run from the same weights: no pair, and no saving over it
        runs.append(run_of("fp8", seed, 9.0, steps=40) | {"shared_weights": "other"})
    for seed in (1, 2):
        fp8 = run_of("fp8-head-bf16", seed, 2.0 + 0.005 * seed, ms=80.0, steps=40)
        runs.append(fp8 | {"val_loss_without_fp8": fp8["val_loss"]})
    set_results(monkeypatch, runs)
    titles, _, *rows = tables_of(measured.whole_runs())
    rows = [dict(zip(titles, row)) for row in rows]
    assert [(row["arm"], row["tokens"], row["seeds"], row["skipped steps"]) for row in rows] == [
        ("`fp8`", "40,000", "2", "0"), ("`fp8-e4m3`", "40,000", "0 of 2, 2 diverged", "3"),
        ("`fp8-head-bf16`", "40,000", "2", "0"), ("`fp8`", "80,000", "2", "0")]
    assert rows[0]["to equal loss"] == "1.96 (1.79 to 2.14)"
    assert rows[0]["more tokens, %"] == "2.1"  # exp(0.015 / slope), slope = 0.5 / log(2)
    assert rows[0]["break-even slope"] == "0.02"  # 0.015 / log(2)
    assert rows[0]["in %"] == "+0.75 (-2.43 to +3.93)"  # of 2.0
    assert rows[0]["validation loss in %"] == "+0.60 (-1.94 to +3.14)"  # of 2.5
    assert rows[1]["in %"] == rows[1]["break-even slope"] == "-"
    assert [row["saves"] for row in rows] == ["-", "-", "+0.0075 (-0.0243 to +0.0393)", "-"]


def test_measured_md_has_the_difference_over_a_run(monkeypatch):
    set_results(monkeypatch, whole_runs_of_two_lengths())
    titles, _, *rows = tables_of(measured.difference_over_run())
    assert titles == ["steps", *(f"`fp8`, 124m, {tokens} tokens, 2 seeds"
                                 for tokens in ("40,000", "80,000"))]
    assert [row[0] for row in rows] == [f"{5 * part} % to {5 * part + 5} %" for part in range(20)]
    for row in rows:
        assert row[1] == row[2] == "+0.0150 (-0.0485 to +0.0785)"


def test_a_record_of_an_arm_that_is_gone_has_its_row():
    rows = gaps.summarize([run_of("bf16", 1, 2.0), run_of("fp8-gone", 1, 2.1)])
    assert [(row["arm"], row["seeds"]) for row in rows] == [("fp8-gone", 1)]


def test_runs_before_a_change_of_rounding_have_rows_of_their_own(monkeypatch):
    before = [run | {"commit": "9291634c"} for run in whole_runs_of_two_lengths()]
    since = [run | {"commit": "08af75d0", "seed": run["seed"] + 2} for run in before]
    set_results(monkeypatch, before + since)
    titles, _, *rows = tables_of(measured.whole_runs())
    rows = [dict(zip(titles, row)) for row in rows]
    assert [(row["tokens"], row["trained"], row["seeds"]) for row in rows] == [
        (tokens, trained, "2") for tokens in ("40,000", "80,000")
        for trained in ("before 44b33a5", "since 44b33a5")]


def test_windows_of_measured_md_are_no_whole_runs(monkeypatch):
    """A diverged arm is the last row of the last quarter."""
    runs = []
    for seed in (1, 2):
        for arm, loss in (("bf16", 2.0), ("fp8", 2.1 + 0.01 * seed), ("fp8-e4m3", math.nan)):
            window = {"tokens": 45_088_768, "start": 0.75, "losses": 30 * [2.0] + 10 * [loss]}
            run = run_of(arm, seed, loss, steps=40) | window
            runs.append(run | {"val_loss_without_fp8": None if arm == "bf16" else run["val_loss"]})
    set_results(monkeypatch, runs + whole_runs_of_two_lengths())
    titles, _, *rows = tables_of(measured.windows())
    rows = [dict(zip(titles, row)) for row in rows]
    assert [(row["tokens of the run"], row["FP8 in"], row["seeds"]) for row in rows] == [
        ("45,088,768", "75% to 100%", "2")]
    _, _, *rows = tables_of(measured.parts_of_last_quarter())
    assert [row[:2] for row in rows] == [["`fp8`", "2"], ["`fp8-e4m3`", "0 of 2, 2 diverged"]]


MODEL = '''
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd, bias=c.bias), nn.LayerNorm(c.n_embd, bias=c.bias)
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd), wpe=nn.Embedding(c.block_size, c.n_embd),
            h=nn.ModuleList(Block(c) for _ in range(c.n_layer)), ln_f=nn.LayerNorm(c.n_embd, bias=c.bias)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
'''


def test_nanogpt_trains_from_the_same_weights(study, tmp_path, monkeypatch):
    """A model with nanoGPT's names, but the kit's tanh GELU, has the kit's losses, also in a window, whose
    moments are BF16's, and hands its weights and moments back."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    options = arms.ARMS["nanogpt"].options | {"compile": False}
    monkeypatch.setitem(arms.ARMS, "nanogpt", dataclasses.replace(arms.ARMS["nanogpt"], options=options))
    _, document = study("--arms", "nanogpt", "--start", "0.25", "--stop", "0.75", "--end", "1")
    own, other = document["runs"]
    assert own["arm"] == "bf16" and other["arm"] == "nanogpt"
    assert other["losses"] == pytest.approx(own["losses"], rel=1e-4)
    assert other["losses"] != own["losses"]
