"""bench/paired.py --init-from and --lora-rank: pairs of runs that fine-tune one base."""

import functools
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

import paired_tools
from bench import gaps, measured, paired
from nanote import checkpoint
from nanote.tokens import meta_checksum
from paired_tools import set_results, tables_of
from trainer_tools import run_train

pytestmark = [
    pytest.mark.usefixtures("in_tmp_path"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="trains on a CPU")]
STEPS = 4
# another network than that of --size tiny
BASE = ("--n-layer 1 --n-head 4 --n-embd 32 --no-use-rotary --micro-batch-size 4 --lr 1e-2 --max-steps 3 "
        "--warmup-steps 0 --eval-interval 0 --device cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokens):
    """The folder of a run, in FP8, with a context of 64 tokens."""
    run = tmp_path_factory.mktemp("base") / "run"
    assert run_train(f"{BASE} --seq-len 64 --out-dir {run}", tokens) == 0
    return run


@pytest.fixture
def study(base, tokens):
    """Return a function that fine-tunes the base for `STEPS` steps and returns exit code and runs."""
    def run(*arguments, name="study"):
        path = Path(f"{name}.json")
        code = paired.main([
            "--size", "tiny", "--tokens", str(512 * STEPS), "--seeds", "1", "--lr", "1e-2", "--data", tokens,
            "--init-from", str(base), "--out-dir", name, "--json", str(path), *arguments])
        return code, json.loads(path.read_text())["runs"] if path.exists() else []
    return run


def weights_in(folder, step) -> dict:
    """Return {name: weight} of a checkpoint below a folder."""
    [found] = Path(folder).glob(f"**/step-{step}")
    return checkpoint.read_tensors(found)


def test_every_run_begins_with_the_weights_of_the_base(study, base):
    code, runs = study("--seeds", "1", "2")
    assert code == 0
    assert [(run["arm"], run["seed"]) for run in runs] == [("bf16", 1), ("fp8", 1), ("bf16", 2), ("fp8", 2)]
    assert len({run["shared_weights"] for run in runs}) == 1
    assert len({run["base_sha256"] for run in runs}) == 1
    assert len({run["losses"][0] for run in runs}) == 4, "a seed has its own batches, an arm its precision"
    expected = weights_in(base, 3)
    for first in Path("study").iterdir():
        found = weights_in(first, 0)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_both_runs_train_the_same_adapters_alone(study, base):
    code, runs = study("--seeds", "1", "2", "--lora-rank", "16", "--arms", "fp8", "fp8-frozen")
    assert code == 0
    assert len({run["base_sha256"] for run in runs}) == 1 and {run["lora_rank"] for run in runs} == {16}
    for seed in (1, 2):
        assert len({run["shared_weights"] for run in runs if run["seed"] == seed}) == 1
    assert len({run["shared_weights"] for run in runs}) == 2, "a seed draws its own adapters"
    assert len({run["losses"][-1] for run in runs}) == 6
    expected = weights_in(base, 3)
    [folder] = Path("study").glob("*-seed1-*")
    first = weights_in(folder, 0)
    for arm in ("bf16", "fp8"):
        last = weights_in(folder / f"{arm}-1-{STEPS}", STEPS)
        trained = {name for name in first if not torch.equal(last[name], first[name])}
        assert trained == first.keys() - expected.keys(), "the weights of the base stay"
        assert all(".lora_" in name for name in trained)
    frozen = weights_in(folder / f"fp8-frozen-1-{STEPS}", STEPS)
    name = "model.blocks.0.mlp.fc1_weight"
    assert not torch.equal(frozen[name], first[name])
    assert torch.allclose(frozen[name], first[name], rtol=2**-4), "rounded to FP8"


def test_a_run_of_adapters_that_is_cut_continues(study, monkeypatch):
    arguments = ("--lora-rank", "16", "--arms", "fp8", "fp8-frozen", "--tokens", str(512 * 14))
    _, expected = study(*arguments)
    seconds = itertools.count()
    monkeypatch.setattr(paired, "clock", lambda: next(seconds))  # a second passes at each look
    codes = []
    for _ in range(12):
        code, runs = study(*arguments, "--minutes", "0.05", name="cut")
        paired.model_with_adapters.cache_clear()  # as in another process
        codes.append(code)
        if code == 0:
            break
    assert len(codes) > 3 and codes[-1] == 0
    for run, other in zip(runs, expected, strict=True):
        assert run["losses"] == other["losses"] and run["val_loss"] == other["val_loss"]


run_of = functools.partial(paired_tools.run_of, steps=20)  # and 20,000 tokens
FULL = {"base_sha256": "a" * 64}
LORA = FULL | {"lora_rank": 16}
OTHERS = [{}, {"base_sha256": "b" * 64}, LORA, FULL | {"lora_rank": 32}]


@pytest.mark.parametrize("other", OTHERS)
def test_other_bases_and_ranks_are_no_pair(other):
    assert gaps.summarize([run_of("bf16", 1, 2.0, **FULL), run_of("fp8", 1, 2.1, **other)]) == []


def test_each_base_and_rank_has_its_own_row():
    runs = []
    for number, fields in enumerate([FULL, *OTHERS]):
        runs += [run_of("bf16", 1, 2.0, **fields), run_of("fp8", 1, 2.1 + number, **fields)]
    rows = gaps.summarize(runs)
    assert [row["training"] for row in rows] == pytest.approx([0.1, 1.1, 2.1, 3.1, 4.1])
    assert [row["seeds"] for row in rows] == [1] * 5
    assert "base_sha256" not in rows[1] and "lora_rank" not in rows[0]
    table = gaps.main_table(rows).splitlines()[2:]
    assert [line.split(" | ")[1] for line in table] == [
        "124m, aaaaaaaa, full", "124m", "124m, bbbbbbbb, full", "124m, aaaaaaaa, LoRA 16",
        "124m, aaaaaaaa, LoRA 32"]


def test_a_slope_is_that_of_the_same_base():
    """The training loss falls by 0.2 from 20,000 to 40,000 tokens."""
    runs = []
    for tokens, fall in ((20_000, 0.0), (40_000, 0.2)):
        runs += [run_of("bf16", 1, 2.0 - fall, tokens=tokens, **FULL),
                 run_of("fp8", 1, 2.01 - fall, tokens=tokens, **FULL)]
    alone = gaps.summarize(runs)
    other = [run_of("bf16", 1, 1.0, tokens=30_000, **LORA), run_of("fp8", 1, 1.1, tokens=30_000, **LORA)]
    assert gaps.summarize(runs + other)[:2] == alone
    assert [row["slope_tokens"] for row in alone] == [40_000, 20_000]


def test_rows_from_random_weights_stay_as_they_are():
    """Byte for byte, those of results/paired.json."""
    rows, runs = measured.read_pairs()
    assert json.dumps(gaps.summarize(runs)) == json.dumps(rows)


def test_measured_md_has_fine_tuning(monkeypatch):
    """In a table of its own alone."""
    runs = [run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.1)]
    for seed in (1, 2):
        for fields in (FULL, LORA):
            runs += [run_of("bf16", seed, 2.0, **fields), run_of("fp8", seed, 2.0 + 0.002 * seed, **fields)]
    runs.append(run_of("fp8-frozen", 1, float("nan"), **LORA))
    set_results(monkeypatch, runs)
    titles, _, *rows = tables_of(measured.fine_tuning())
    rows = [dict(zip(titles, row)) for row in rows]
    assert [(row["arm"], row["base"], row["trained"], row["seeds"]) for row in rows] == [
        ("`fp8`", "`aaaaaaaa`", "LoRA 16", "2"),
        ("`fp8-frozen`", "`aaaaaaaa`", "LoRA 16", "0 of 1, 1 diverged"),
        ("`fp8`", "`aaaaaaaa`", "full", "2")]
    assert rows[0]["tokens"] == "20,000"
    assert rows[0]["training loss above BF16's"] == "+0.0030 (-0.0097 to +0.0157)"
    assert rows[0]["in %"] == "+0.15 (-0.49 to +0.79)"  # of 2.0
    assert rows[0]["validation loss in %"] == "+0.12 (-0.39 to +0.63)"  # of 2.5
    assert rows[1]["in %"] == "-"
    titles, *_ = tables_of(measured.difference_over_run())
    assert titles == ["steps", "`fp8`, 124m, 20,000 tokens, 1 seeds"], "from random weights"
    set_results(monkeypatch, runs[:2])
    assert measured.fine_tuning() == "", "no section without such runs"


@pytest.mark.parametrize("arguments, complaint", [
    ("--init-from absent", "--init-from absent: holds no checkpoint; name a run of train.py"),
    ("--init-from absent/step-3", "--init-from absent/step-3: holds no checkpoint"),
    ("--data other", "--data other: tokenized with other, but the run uses byte"),
    ("--size 124m", "has 64 positions, and --size 124m trains sequences of 1024"),
    ("--arms fp8-frozen", "--arms fp8-frozen: keeps the base of adapters in FP8; pass --lora-rank 16, too"),
    ("--arms nanogpt", "--arms nanogpt: begins with random weights; leave it out, or --init-from"),
    ("--lora-rank 10", "lora_rank=10: must be a multiple of 16"),
    ("--lora-rank 16 --arms fp8-weights", "--arms fp8-weights: names a model, and --lora-rank another")])
def test_a_base_that_does_not_fit_is_one_line(
        base, tokens, refused, monkeypatch, arguments, complaint):
    shutil.copytree(tokens, "other")
    meta = json.loads(Path("other/meta.json").read_text())
    meta["tokenizer"] = "other"
    Path("other/meta.json").write_text(json.dumps(meta | {"sha256": meta_checksum(meta)}))
    monkeypatch.setenv("NANOGPT", "nanoGPT")
    command = f"--size tiny --data {tokens} --init-from {base} --json study.json --out-dir study {arguments}"
    assert complaint in refused(paired.main, command, "bench/paired.py")


def test_a_run_of_adapters_is_no_base(base, tokens, refused):
    model = paired.model_with_adapters("optimized")
    options = f"{BASE} --seq-len 64 --init-from {base} --out-dir adapters --model {model} --set lora_rank=16"
    assert run_train(options, tokens) == 0
    command = f"--size tiny --data {tokens} --init-from adapters --json study.json --out-dir study"
    assert "--init-from adapters: holds adapters" in refused(paired.main, command, "bench/paired.py")


def test_adapters_without_a_base_are_refused(tokens, refused):
    command = f"--size tiny --data {tokens} --json study.json --lora-rank 16"
    assert "--lora-rank 16: adapters need a base" in refused(paired.main, command, "bench/paired.py")
