"""Text corpora, and the writer of token files: what `data.py` runs.

A source (`stdlib_documents`, `package_documents`, `text_documents`, `dataset_documents`) yields documents and
counts what it skips in `left_out`. A document is a str, an iterator of str pieces where a file is long, or a
tuple (str, number in [0, 1) that replaces its hash). `write_tokens` turns documents into train.bin, val.bin
and meta.json. Memory stays bounded: documents are streamed, and few are encoded ahead.
"""
import hashlib
import importlib.metadata
import io
import json
import os
import re
import sysconfig
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow
from tqdm import tqdm

from nanote.config import in_a_line
from nanote.tokenizers import get_tokenizer
from nanote.tokens import meta_checksum, new_folder, sha256

PIECE = 1 << 20  # characters; long files are read and tokenized in pieces of about this size
LONGEST_LINE = 1 << 28  # bytes, in a compressed file of rows: `datasets` holds a line in memory
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
SOURCES = set(".py .pyi .pyx .pxd .c .cc .cpp .cxx .cu .h .hh .hpp .hxx .cuh .inl .md .rst .txt".split())


# ---------------------------------------------------------------- files and datasets

def text_documents(paths, column, left_out):
    """Yield a document per text file, and per row of a .json, .jsonl, .csv or Parquet file (its `column`).

    A folder stands for the files below it. Any file may be compressed: .gz or .zst.
    """
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"{path}: no such file; name files or folders that exist")
        for file in files_below(path) if os.path.isdir(path) else [path]:
            try:
                yield from file_documents(file, column, left_out)
            except ValueError:
                if file == path:
                    raise
                left_out[f"files that are damaged, or no UTF-8 text, or have no column {column!r}"] += 1


def files_below(folder, skipped=()):
    """Return the paths of the files below a folder, sorted, without hidden ones and the folders `skipped`."""
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def file_documents(path, column, left_out):
    """Yield the rows of a file, or the text of a file as one document."""
    builder = BUILDERS.get(Path(path.removesuffix(".gz").removesuffix(".zst")).suffix)
    if builder and os.path.getsize(path):  # `datasets` refuses an empty file
        yield from dataset_documents(builder, column, left_out, data_files=[path], streaming=True)
    else:
        pieces = text_pieces(path)
        yield chain([next(pieces, "")], pieces)  # the first is read at once: it shows most binary files


def text_pieces(path):
    """Yield the text of a UTF-8 file in pieces that end with a line, unless it is longer than a piece."""
    try:
        raw = io.BufferedReader(pyarrow.input_stream(path))  # decompresses .gz and .zst
        # utf-8-sig: without the mark with which editors on Windows begin a file
        with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            while piece := file.read(PIECE):
                if "\0" in piece:
                    raise ValueError("holds a NUL character, as binary and UTF-16 files do")
                yield piece + file.readline(PIECE)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not UTF-8 text ({in_a_line(error)}); leave it out, or convert it with "
                         "iconv -t utf-8") from error


def dataset_documents(name, column, left_out, subset=None, split="train", data_files=None, streaming=False):
    """Yield the texts in a column of a dataset. The options are those of datasets.load_dataset."""
    if name in (*BUILDERS.values(), "text") and not data_files:  # `datasets` would read the working folder
        raise ValueError(f"{name}: is the name of a format; name files with --data-files")
    if os.path.isfile(name):
        raise ValueError(f"{name}: is a file; read it with python data.py text")
    import datasets  # slow to import

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    try:
        for path in data_files or ():
            if os.path.isfile(path) and path.endswith((".gz", ".zst")):
                check_lines(path)
        rows = datasets.load_dataset(name, subset, split=split, data_files=data_files, streaming=streaming)
        for batch in rows.iter(1000):
            if column not in batch:
                raise ValueError(f"no column {column!r}; name one with --column: {', '.join(batch)}")
            texts = list(filter(None, batch[column]))
            if missing := len(batch[column]) - len(texts):
                left_out["rows without text"] += missing
            if others := [text for text in texts if not isinstance(text, str)]:
                raise ValueError(f"column {column!r} holds {str(others[0])[:40]}, not text; name another one")
            yield from texts
    except Exception as error:  # whatever the hub, pyarrow, pandas or the builder raises
        if isinstance(error, datasets.exceptions.DatasetGenerationError):  # says only that there is a cause
            error = error.__cause__ or error
        where = data_files[0] if data_files and len(data_files) == 1 else name
        raise ValueError(f"{where}: {in_a_line(error)}") from error


def check_lines(path):
    """Raise ValueError for a line that does not fit in memory: 3 GB may compress to 3 MB."""
    with io.BufferedReader(pyarrow.input_stream(path)) as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise ValueError(f"holds a line of {LONGEST_LINE >> 20} MiB or more; split it")


# ---------------------------------------------------------------- the standard library, installed packages

def stdlib_documents(left_out):
    """Yield the modules of the running Python's standard library, without its tests."""
    skipped = {*NOT_STDLIB, "test", "tests", "idle_test"}
    for path in files_below(sysconfig.get_paths()["stdlib"], skipped):
        if path.endswith(".py"):
            try:
                yield Path(path).read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                left_out["files that are not UTF-8 text"] += 1


def package_documents(left_out):
    """Yield the sources and documentation of the installed packages and of the standard library.

    A hash of its name assigns a package, with every document in it, to train or val. Documents come in
    descending order of that hash, and one that repeats an earlier one is dropped: of two copies in different
    splits the one in train stays. Near-duplicates are those with an estimated Jaccard similarity of at least
    0.7 over sequences of 5 words; MinHash finds 99 % of them (25 bands of 5 hashes).
    """
    from datasketch import MinHash, MinHashLSH

    index, minhashes = MinHashLSH(params=(25, 5), num_perm=125), []
    for fraction, _, path in sorted(package_files(), key=lambda file: (-file[0], file[1])):
        text = read_source(path)
        if text is None:
            left_out["files that are no text, empty, over 2 MiB or mostly numbers"] += 1
            continue
        words = [crc32(word) for word in text.encode().split()]
        minhash = MinHash(num_perm=125, hashfunc=int)
        minhash.update_batch({hash(tuple(words[start : start + 5])) % 2**32
                              for start in range(max(len(words) - 4, 1))})
        if any(minhash.jaccard(minhashes[other]) >= 0.7 for other in index.query(minhash)):
            left_out["duplicates or near-duplicates"] += 1
            continue
        index.insert(len(minhashes), minhash)
        minhashes.append(minhash)
        yield text, fraction


def package_files():
    """Yield (hash of the package's name, relative path, path) of each file to read."""
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
        for file in package.files or ():
            if file.suffix in SOURCES and ".dist-info" not in file.parts[0]:
                yield hash_fraction(name.encode()), str(file), Path(package.locate_file(file))
    for path in map(Path, files_below(sysconfig.get_paths()["stdlib"], NOT_STDLIB)):
        if path.suffix in SOURCES:
            yield 1.0, str(path), path


def read_source(path):
    """Return the text of a file, or None if it is not text, empty, very long (generated) or a table."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    words = text.encode().split()
    if not words or len(text) > 2 << 20 or max(map(len, words)) > 1000:
        return None
    visible = np.frombuffer(b"".join(words), np.uint8)
    is_letter = ((visible | 32) - np.uint8(ord("a")) < 26) | (visible >= 128)  # - is modulo 256
    return text if is_letter.mean() >= 0.4 else None


# ---------------------------------------------------------------- writing token files

def write_tokens(documents, out_dir, *, tokenizer="byte", val_fraction=0.01, force=False, num_workers=None,
                 source="", left_out=None):
    """Tokenize `documents` into `out_dir`/{train,val}.bin and meta.json, and return the meta dict.

    A document goes to `val` if the hash of its text (of its first piece) as a number in [0, 1) is below
    `val_fraction`: the same document has the same split in every corpus. If that leaves a split empty, the
    last `val_fraction` of the tokens are `val`.

    Args:
        num_workers: threads that tokenize. None: one per core.
        source, left_out: for meta.json, what the documents are and what was skipped.

    Raises ValueError for bad input or an empty corpus, OSError if writing fails. Nothing is left behind then.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction {val_fraction}: must be above 0 and below 1, for example 0.01")
    encoder = get_tokenizer(tokenizer)
    dtype = np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    counts, split = dict(documents=0, train_tokens=0, val_tokens=0, train_bytes=0, val_bytes=0), "train"
    pool = ThreadPoolExecutor(os.cpu_count() if num_workers is None else num_workers)
    with pool, new_folder(out_dir, force) as folder:
        with (open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val,
              tqdm(unit="B", unit_scale=True, disable=None, leave=False) as bar):
            for fraction, tokens, size in encoded(documents, encoder, pool):
                if fraction is not None:  # the first piece of a document
                    split = "val" if fraction < val_fraction else "train"
                    counts["documents"] += 1
                (val if split == "val" else train).write(tokens.astype(dtype))
                counts[f"{split}_tokens"] += len(tokens)
                counts[f"{split}_bytes"] += size
                bar.update(size)
        if not counts["documents"]:
            raise ValueError("the corpus is empty: no document holds any text; left out: "
                             f"{dict(left_out or {})}; name files that do")
        if not (counts["train_tokens"] and counts["val_tokens"]):
            cut_end(folder / f"{split}.bin", folder, dtype, val_fraction, encoder, counts)
        meta = {"format": 1, "source": source, "tokenizer": encoder.name, "vocab_size": encoder.vocab_size,
                "eot": encoder.eot, "dtype": dtype.name, "val_fraction": val_fraction, **counts,
                "left_out": dict(left_out or {}), "train_sha256": sha256(folder / "train.bin"),
                "val_sha256": sha256(folder / "val.bin")}
        meta["sha256"] = meta_checksum(meta)
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta


def hash_fraction(raw):
    """Return the hash of bytes as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "big") / 2**48


def encoded(documents, encoder, pool):
    """Yield (fraction, tokens, bytes of text) of each piece of each document, in order, and its end of text.

    `fraction`, in [0, 1), assigns a document to a split; None for all but its first piece. The threads of
    `pool` encode a few pieces ahead: tiktoken and tokenizers release Python's lock.
    """
    def encode(text, fraction, is_first):
        raw = text.encode("utf-8", errors="replace")
        if is_first and fraction is None:
            fraction = hash_fraction(raw)
        return fraction if is_first else None, encoder.encode_bytes(raw) if raw else end, len(raw)

    end, futures = np.array([encoder.eot]), deque()
    for document in documents:
        text, fraction = document if isinstance(document, tuple) else (document, None)
        is_first = True
        for piece in filter(None, [text] if isinstance(text, str) else text):
            futures.append(pool.submit(encode, piece, fraction, is_first))
            is_first = False
            if len(futures) > 2 * os.cpu_count():
                yield futures.popleft().result()
        if not is_first:
            futures.append(pool.submit(encode, "", None, False))
    yield from (future.result() for future in futures)


def cut_end(path, folder, dtype, val_fraction, encoder, counts):
    """Move the last tokens of `path`, which holds all of them, to val.bin, and adjust `counts`."""
    os.replace(path, folder / "train.bin")
    tokens = np.memmap(folder / "train.bin", dtype, "r")
    start = len(tokens) - min(max(round(len(tokens) * val_fraction), 1), len(tokens) - 1)
    tokens[start:].tofile(folder / "val.bin")
    total, val_bytes = counts["train_bytes"] + counts["val_bytes"], len(encoder.decode_bytes(tokens[start:]))
    os.truncate(folder / "train.bin", start * dtype.itemsize)
    counts |= {"train_tokens": start, "val_tokens": len(tokens) - start,
               "train_bytes": total - val_bytes, "val_bytes": val_bytes}
