"""nanote/tokens.py: damaged token files, and the batches of the Loader."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanote.tokens import Loader, open_tokens, write_tokens

ONE = SimpleNamespace(rank=0, count=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """About 9,000 tokens: 300 documents of 1 to 60 letters, each with one letter, and an end of text."""
    path = tmp_path_factory.mktemp("tokens") / "set"
    write_tokens(("abcdefghij"[i % 10] * (1 + i * 7 % 60) for i in range(300)), path, val_fraction=0.2)
    return path


def loader(folder, split="train", ranks=ONE, **options):
    defaults = dict(data=folder, seq_len=16, micro_batch_size=4, grad_accum=1, seed=0, pack_documents=False)
    return Loader(SimpleNamespace(**defaults | options), split, ranks)


def inputs(loader, steps):
    """Return the input ids of all micro-batches of `steps`: (micro-batches x rows, seq_len)."""
    return torch.cat([batch[0] for step in steps for batch in loader.batches(step)])


@pytest.mark.parametrize("old, new", [('"eot": 256', '"eot": 255'), ("{", "["), ('"vocab_size"', '"size"')])
def test_a_damaged_meta_file_is_refused(folder, tmp_path, old, new):
    (tmp_path / "meta.json").write_text((folder / "meta.json").read_text().replace(old, new))
    with pytest.raises(ValueError, match="meta.json: damaged; .*--force"):
        open_tokens(tmp_path, "train")


def test_token_files_of_the_first_version_are_read(folder, tmp_path):
    """Which had no checksum of meta.json, as files of other tools."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta["format"], meta["sha256"]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "val.bin").write_bytes((folder / "val.bin").read_bytes())
    assert len(open_tokens(tmp_path, "val")[0]) == meta["val_tokens"]
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"vocab_size": 200, "eot": 1}))
    with pytest.raises(ValueError, match="holds the token 256, but vocab_size in meta.json is 200"):
        open_tokens(tmp_path, "val")


def test_a_corpus_that_is_too_small_names_a_length(folder):
    length = open_tokens(folder, "val")[1]["val_tokens"]
    fits = (length - 1) // 16 * 16
    with pytest.raises(ValueError, match=f"needs {length + 1}; use a larger corpus or --seq-len {fits}$"):
        loader(folder, "val", seq_len=length)
    whole = loader(folder, "val", seq_len=length - 1, micro_batch_size=1)
    assert torch.equal(inputs(whole, [1])[0], torch.tensor(open_tokens(folder, "val")[0][:-1].tolist()))


def test_the_order_of_batches_never_changes(tmp_path):
    """Golden values: another release or another numpy must not change the data of a resumed run."""
    text = "".join(map(chr, range(2, 121)))
    write_tokens([(text, 0.9), ("G" * 50, 0.0)], tmp_path / "set")
    train = loader(tmp_path / "set", seq_len=10, micro_batch_size=3, seed=5, grad_accum=2)
    assert [inputs(train, [step])[:, 0].tolist() for step in (1, 2, 3, 4)] == [
        [91, 101, 21, 41, 31, 11], [51, 61, 111, 71, 81, 101], [71, 41, 51, 11, 91, 111],
        [61, 81, 21, 31, 110, 30]]


def test_labels_are_the_next_tokens(folder):
    tokens = open_tokens(folder, "train")[0].tolist()
    windows = {tuple(tokens[i:i + 17]) for i in range(len(tokens) - 16)}
    train = loader(folder, grad_accum=3)
    for input_ids, labels in [batch for step in range(1, 6) for batch in train.batches(step)]:
        assert input_ids.dtype == labels.dtype == torch.int64
        assert input_ids.shape == labels.shape == (4, 16)
        assert input_ids.is_contiguous() and labels.is_contiguous()
        rows = zip(input_ids.tolist(), labels.tolist())
        assert all(a[1:] == b[:-1] and (*a, b[-1]) in windows for a, b in rows)


def test_a_batch_depends_on_seed_and_step_only(folder):
    straight, jumping = loader(folder, grad_accum=2), loader(folder, grad_accum=2)
    expected = {step: inputs(straight, [step]) for step in range(1, 20)}
    for step in (7, 3, 19, 18, 1, 7, 8, 9, 11):
        assert torch.equal(inputs(jumping, [step]), expected[step])
    assert not torch.equal(inputs(loader(folder, seed=1), range(1, 9)), inputs(loader(folder), range(1, 9)))


@pytest.mark.parametrize("count, rows, accum", [(2, 2, 1), (1, 2, 2), (2, 1, 2), (4, 1, 1)])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(folder, count, rows, accum):
    expected = inputs(loader(folder), range(1, 9))
    ranks = [loader(folder, ranks=SimpleNamespace(rank=rank, count=count), micro_batch_size=rows,
                    grad_accum=accum) for rank in range(count)]
    found = [batch[0] for step in range(1, 9) for batches in zip(*(rank.batches(step) for rank in ranks))
             for batch in batches]
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_epoch_visits_each_window_once(tmp_path, split):
    letters = np.random.default_rng(0).choice(list("abcdefgh"), 6000)
    write_tokens([("".join(letters[:3000]), 0.0), ("".join(letters[3000:]), 0.9)], tmp_path / "set")
    tokens = open_tokens(tmp_path / "set", split)[0].tolist()
    place = {tuple(tokens[i:i + 16]): i for i in range(len(tokens) - 15)}
    count = len(tokens) // 16 - 1 if split == "train" else (len(tokens) - 1) // 16
    rows = inputs(loader(tmp_path / "set", split, micro_batch_size=1), range(1, 2 * count + 1)).tolist()
    starts = [place[tuple(row)] for row in rows]
    for epoch in (starts[:count], starts[count:]):
        assert sorted(epoch) == list(range(min(epoch), min(epoch) + 16 * count, 16)) != epoch
    assert starts[:count] != starts[count:]


@pytest.mark.parametrize("wanted, windows", [(160, 10), (150, 10), (10**15, None)])
@pytest.mark.parametrize("count, rows", [(1, 1), (1, 8), (2, 3)])
def test_evaluation_uses_the_same_labels_on_any_setting(folder, wanted, windows, count, rows):
    tokens = open_tokens(folder, "val")[0].tolist()
    labels, batches = [], set()
    for rank in range(count):
        val = loader(folder, "val", SimpleNamespace(rank=rank, count=count), micro_batch_size=rows, seed=rows)
        evaluation = list(val.evaluation(wanted))
        batches.add(len(evaluation))
        for (input_ids, targets), number in evaluation:
            assert input_ids.shape == targets.shape == (rows, 16) and input_ids.min() >= 0
            assert number == int((targets != -100).sum())
            labels += targets[targets != -100].tolist()
    assert len(batches) == 1
    total = (len(tokens) + 14) // 16
    starts = [number * total // (windows or total) * 16 for number in range(windows or total)]
    assert sorted(labels) == sorted(token for start in starts for token in tokens[start + 1:start + 17])


def test_packed_batches_say_where_documents_begin(folder):
    options = dict(seq_len=48, micro_batch_size=3, grad_accum=2)
    packed, plain = loader(folder, pack_documents=True, **options), loader(folder, **options)
    shapes = set()
    for step in range(1, 20):
        for (input_ids, labels, starts), expected in zip(packed.batches(step), plain.batches(step)):
            assert torch.equal(input_ids, expected[0]) and torch.equal(labels, expected[1])
            shapes.add(tuple(starts.shape))
            assert starts.dtype == torch.int32 and bool((starts.diff() >= 0).all())
            flat = input_ids.flatten().tolist()
            begins = [i for i, token in enumerate(flat) if token == 256 or i % 48 == 0]
            assert sorted(set(starts.tolist())) == [*begins, 3 * 48]
    assert len(shapes) == 1  # what a CUDA graph needs
    for (_, _, starts), _ in loader(folder, "val", pack_documents=True, **options).evaluation(1000):
        assert starts[0] == 0 and starts[-1] == 3 * 48


@pytest.mark.parametrize("packed", [False, True])
def test_only_answers_are_labels_and_all_of_them_count_alike(tmp_path, packed):
    """In a step, over micro-batches and ranks; a micro-batch without a label has no weight."""
    pairs = [["q" * (5 + i % 60), "abc"[:1 + i % 3]] for i in range(99)]
    write_tokens(pairs, tmp_path / "set", val_fraction=0.2, answers_only=True)
    steps = {}
    for count, rows, accum in ((1, 8, 1), (1, 1, 8), (2, 1, 4), (4, 2, 1)):
        options = dict(micro_batch_size=rows, grad_accum=accum, pack_documents=packed)
        ranks = [loader(tmp_path / "set", ranks=SimpleNamespace(rank=rank, count=count), **options)
                 for rank in range(count)]
        for step in range(1, 9):
            labels = []
            for rank in ranks:
                for (_, targets, *_), [divisor] in zip(rank.batches(step), rank.divisors(step)):
                    kept = targets[targets != -100].tolist()
                    assert kept, "the mean over no label would be NaN"
                    assert rank.has_labels(step)
                    weight = 1 / (float(divisor) * len(kept))
                    labels += [(token, pytest.approx(weight, rel=1e-5)) for token in kept if weight]
            assert all(token in (*b"abc", 256) for token, _ in labels)
            steps.setdefault(step, len(labels))
            assert len(labels) == steps[step] and all(weight == 1 / len(labels) for _, weight in labels)


def test_every_rank_knows_whether_a_step_has_labels(tmp_path):
    pairs = [["q" * 200, "abc"] for _ in range(40)]
    write_tokens(pairs, tmp_path / "set", val_fraction=0.2, answers_only=True)
    found = {}
    for count, accum in ((1, 4), (2, 2), (4, 1)):
        ranks = [loader(tmp_path / "set", ranks=SimpleNamespace(rank=rank, count=count), micro_batch_size=1,
                        grad_accum=accum) for rank in range(count)]
        for step in range(1, 30):
            labels = any(bool(divisor.isfinite()) for rank in ranks for [divisor] in rank.divisors(step))
            found.setdefault(step, labels)
            assert [rank.has_labels(step) for rank in ranks] == [labels] * count and labels == found[step]
    assert {*found.values()} == {True, False}
