"""nanote/tokens.py: damaged token files; nanote/loader.py: the batches of the Loader."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanote.loader import Loader
from nanote.parallel import Ranks
from nanote.tokens import open_tokens, write_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """About 9,000 tokens: 300 documents of 1 to 60 letters, each with one letter, and an end of text."""
    path = tmp_path_factory.mktemp("tokens") / "set"
    write_tokens(("abcdefghij"[i % 10] * (1 + i * 7 % 60) for i in range(300)), path, val_fraction=0.2)
    return path


def make_loader(folder, split="train", rank=0, count=1, **options):
    """Make the loader of one of `count` ranks."""
    defaults = dict(data=folder, seq_len=16, micro_batch_size=4, grad_accum=1, seed=0, pack_documents=False)
    return Loader(SimpleNamespace(**defaults | options), split, Ranks(rank=rank, count=count))


def make_loaders(folder, count, **options):
    """Make the loaders of all ranks."""
    return [make_loader(folder, rank=rank, count=count, **options) for rank in range(count)]


def read(loader, steps):
    """Return the micro-batches of several steps."""
    batches = []
    for step in steps:
        batches += loader.batches(step)
    return batches


def read_inputs(loader, steps):
    """Return the input ids of several steps, (micro-batches x rows, seq_len)."""
    return torch.cat([batch.inputs[0] for batch in read(loader, steps)])


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
    tokens, meta = open_tokens(folder, "val")
    length = meta["val_tokens"]
    fits = (length - 1) // 16 * 16
    with pytest.raises(ValueError, match=f"needs {length + 1}; use a larger corpus, a larger "
                                         f"--val-fraction of data.py or --seq-len {fits}$"):
        make_loader(folder, "val", seq_len=length)
    whole = make_loader(folder, "val", seq_len=length - 1, micro_batch_size=1)
    assert read_inputs(whole, [1]).flatten().tolist() == tokens[:-1].tolist()


def test_the_order_of_batches_never_changes(tmp_path):
    """Golden values: another release or another numpy must not change the data of a resumed run."""
    text = "".join(map(chr, range(2, 121)))
    write_tokens([(text, 0.9), ("G" * 50, 0.0)], tmp_path / "set")
    train = make_loader(tmp_path / "set", seq_len=10, micro_batch_size=3, seed=5, grad_accum=2)
    first_tokens = [read_inputs(train, [step])[:, 0].tolist() for step in (1, 2, 3, 4)]
    assert first_tokens == [
        [91, 101, 21, 41, 31, 11],
        [51, 61, 111, 71, 81, 101],
        [71, 41, 51, 11, 91, 111],
        [61, 81, 21, 31, 110, 30]]


def test_labels_are_the_next_tokens(folder):
    tokens = open_tokens(folder, "train")[0].tolist()
    windows = {tuple(tokens[start:start + 17]) for start in range(len(tokens) - 16)}
    for batch in read(make_loader(folder, grad_accum=3), range(1, 6)):
        input_ids, labels = batch.inputs
        assert input_ids.dtype == labels.dtype == torch.int64
        assert input_ids.shape == labels.shape == (4, 16)
        assert input_ids.is_contiguous() and labels.is_contiguous()
        assert torch.equal(input_ids[:, 1:], labels[:, :-1])
        for row in torch.cat([input_ids, labels[:, -1:]], dim=1).tolist():
            assert tuple(row) in windows


def test_a_batch_depends_on_seed_and_step_only(folder):
    straight, jumping = make_loader(folder, grad_accum=2), make_loader(folder, grad_accum=2)
    expected = {step: read_inputs(straight, [step]) for step in range(1, 20)}
    for step in (7, 3, 19, 18, 1, 7, 8, 9, 11):
        assert torch.equal(read_inputs(jumping, [step]), expected[step])
    other_seed, same_seed = make_loader(folder, seed=1), make_loader(folder)
    assert not torch.equal(read_inputs(other_seed, range(1, 9)), read_inputs(same_seed, range(1, 9)))


@pytest.mark.parametrize("count, rows, accum", [(2, 2, 1), (1, 2, 2), (2, 1, 2), (4, 1, 1)])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(folder, count, rows, accum):
    one = make_loader(folder)
    ranks = make_loaders(folder, count, micro_batch_size=rows, grad_accum=accum)
    for step in range(1, 9):
        found = []
        for batches in zip(*(rank.batches(step) for rank in ranks)):  # the same micro-batch of every rank
            found += [batch.inputs[0] for batch in batches]
        assert torch.equal(torch.cat(found), read_inputs(one, [step]))


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_epoch_visits_each_window_once(tmp_path, split):
    letters = np.random.default_rng(0).choice(list("abcdefgh"), 6000)
    write_tokens([("".join(letters[:3000]), 0.0), ("".join(letters[3000:]), 0.9)], tmp_path / "set")
    tokens = open_tokens(tmp_path / "set", split)[0].tolist()
    place = {tuple(tokens[start:start + 16]): start for start in range(len(tokens) - 15)}
    count = len(tokens) // 16 - 1 if split == "train" else (len(tokens) - 1) // 16
    loader = make_loader(tmp_path / "set", split, micro_batch_size=1)
    starts = [place[tuple(row)] for row in read_inputs(loader, range(1, 2 * count + 1)).tolist()]
    first_epoch, second_epoch = starts[:count], starts[count:]
    for epoch in (first_epoch, second_epoch):
        in_order = list(range(min(epoch), min(epoch) + 16 * count, 16))
        assert sorted(epoch) == in_order and epoch != in_order
    assert first_epoch != second_epoch


@pytest.mark.parametrize("wanted, window_count", [(160, 10), (150, 10), (10**15, None)])
@pytest.mark.parametrize("count, rows", [(1, 1), (1, 8), (2, 3)])
def test_evaluation_uses_the_same_labels_on_any_setting(folder, wanted, window_count, count, rows):
    tokens = open_tokens(folder, "val")[0].tolist()
    found, batch_counts = [], set()
    for rank in range(count):
        val = make_loader(folder, "val", rank, count, micro_batch_size=rows, seed=rows)
        batches = list(val.evaluation(wanted))
        batch_counts.add(len(batches))
        for (input_ids, labels), label_count in batches:
            assert input_ids.shape == labels.shape == (rows, 16) and input_ids.min() >= 0
            counted = labels[labels != -100].tolist()
            assert len(counted) == label_count
            found += counted
    assert len(batch_counts) == 1, "every rank has the same number of batches"
    total = (len(tokens) + 14) // 16  # windows of the split
    window_count = window_count or total
    expected = []
    for number in range(window_count):
        start = number * total // window_count * 16
        expected += tokens[start + 1:start + 17]
    assert sorted(found) == sorted(expected)


def test_packed_batches_say_where_documents_begin(folder):
    options = dict(seq_len=48, micro_batch_size=3, grad_accum=2)
    packed, plain = make_loader(folder, pack_documents=True, **options), make_loader(folder, **options)
    shapes = set()
    for batch, expected in zip(read(packed, range(1, 20)), read(plain, range(1, 20))):
        input_ids, labels, cu_seqlens = batch.inputs
        assert torch.equal(input_ids, expected.inputs[0]) and torch.equal(labels, expected.inputs[1])
        shapes.add(tuple(cu_seqlens.shape))
        assert cu_seqlens.dtype == torch.int32 and bool((cu_seqlens.diff() >= 0).all())
        flat = input_ids.flatten().tolist()
        starts = [i for i, token in enumerate(flat) if token == 256 or i % 48 == 0]
        assert sorted(set(cu_seqlens.tolist())) == [*starts, 3 * 48]
    assert len(shapes) == 1  # what a CUDA graph needs
    val = make_loader(folder, "val", pack_documents=True, **options)
    for (_, _, cu_seqlens), _ in val.evaluation(1000):
        assert cu_seqlens[0] == 0 and cu_seqlens[-1] == 3 * 48


# ---------------------------------------------------------------- prompts and answers

def weights_of_labels(loaders, step):
    """Return (label, its weight in the loss of the step), of all micro-batches of all ranks."""
    found = []
    for loader in loaders:
        for batch in loader.batches(step):
            labels = batch.inputs[1]
            counted = labels[labels != -100].tolist()
            assert counted, "the mean over no label would be NaN"
            weight = 1 / (float(batch.divisor) * len(counted))
            found += [(label, weight) for label in counted if weight > 0]
    return found


def test_without_answers_every_micro_batch_counts_alike(folder):
    for loader in make_loaders(folder, count=2, grad_accum=3):
        assert loader.has_labels(1)
        assert [batch.divisor.item() for batch in loader.batches(1)] == [6.0] * 3
        assert all(batch.divisor.dtype == torch.float32 for batch in loader.batches(1))


@pytest.mark.parametrize("packed", [False, True])
def test_only_answers_are_labels_and_all_of_them_count_alike(tmp_path, packed):
    """In a step, over micro-batches and ranks; a micro-batch without a label has no weight."""
    pairs = [["q" * (5 + i % 60), "abc"[:1 + i % 3]] for i in range(99)]
    write_tokens(pairs, tmp_path / "set", val_fraction=0.2, answers_only=True)
    label_counts = {}
    for count, rows, accum in ((1, 8, 1), (1, 1, 8), (2, 1, 4), (4, 2, 1)):
        loaders = make_loaders(
            tmp_path / "set", count, micro_batch_size=rows, grad_accum=accum, pack_documents=packed)
        for step in range(1, 9):
            assert all(loader.has_labels(step) for loader in loaders)
            found = weights_of_labels(loaders, step)
            for label, weight in found:
                assert label in (*b"abc", 256)
                assert weight == pytest.approx(1 / len(found), rel=1e-5)
            assert len(found) == label_counts.setdefault(step, len(found)), "as on one rank"


def test_every_rank_knows_whether_a_step_has_labels(tmp_path):
    pairs = [["q" * 200, "abc"] for _ in range(40)]
    write_tokens(pairs, tmp_path / "set", val_fraction=0.2, answers_only=True)
    found = {}
    for count, accum in ((1, 4), (2, 2), (4, 1)):
        loaders = make_loaders(tmp_path / "set", count, micro_batch_size=1, grad_accum=accum)
        for step in range(1, 30):
            has_labels = len(weights_of_labels(loaders, step)) > 0
            assert [loader.has_labels(step) for loader in loaders] == [has_labels] * count
            assert has_labels == found.setdefault(step, has_labels), "as on one rank"
    assert {*found.values()} == {True, False}
