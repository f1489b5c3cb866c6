"""Text to token files, and the loader that reads them.

    python data.py stdlib                              # the Python standard library's sources, no download
    python data.py text *.md notes.jsonl --tokenizer gpt2
    python data.py hf roneneldan/TinyStories --streaming

A token file is nothing but token ids, uint16 or uint32, one document after the other with the end-of-text
token behind each: `data/<name>/{train,val}.bin`, described by `meta.json`. Notable:

- Memory stays bounded however large the corpus: documents are streamed, long files in pieces, and only a few
  tasks are in flight.
- A document's side is decided by a hash of its text, so the same document lands on the same side in every
  corpus and adding documents moves none of the others.
- The files appear complete or not at all (a temporary folder, then a rename), and their checksums are checked
  when they are opened.
- A batch is a pure function of (seed, index, rank): a loader has no state to save, and a resumed run sees
  what it would have seen.
"""
import glob
import hashlib
import json
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from tqdm import tqdm

from nanote import json_files
from nanote.json_files import COUNT

# torch, tiktoken, datasets and tyro are imported where they are used: worker processes import this file, and
# need none or one of them.

# characters that a worker gets at a time, and the longest piece of a document that is held in memory
PIECE = 1 << 20
FILES = {"train.bin", "val.bin", "meta.json"}
META = {  # what meta.json must hold
    "dtype": Literal["uint16", "uint32"], "tokenizer": str, "vocab_size": range(1, 2**32 + 1), "eot": COUNT,
    "train_tokens": COUNT, "val_tokens": COUNT, "train_sha256": str, "val_sha256": str,
    "format?": COUNT, "sha256?": str}
REMAKE = "make the token files again with data.py --force"


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

class Tokenizer:
    """Text to token ids and back: `byte` (ids 0-255 are bytes, 256 ends a text) or a tiktoken encoding. Use
    `get_tokenizer`.

    `vocab_size` counts every id, the end-of-text token `eot` included. A model's vocabulary is often padded
    beyond it: ids that the tokenizer does not have decode to U+FFFD.
    """

    def __init__(self, name, encoding=None):
        self.name, self.encoding = name, encoding
        self.vocab_size = encoding.n_vocab if encoding else 257
        self.eot = encoding.eot_token if encoding else 256

    def encode_bytes(self, raw):
        """UTF-8 bytes -> ids as a numpy array. Special tokens in the text are plain text."""
        if self.encoding is None:
            return np.frombuffer(raw, dtype=np.uint8)
        return self.encoding.encode_to_numpy(raw.decode("utf-8"), disallowed_special=())

    def encode(self, text):
        """str -> list of ids, without an end-of-text token."""
        return self.encode_bytes(text.encode("utf-8", errors="replace")).tolist()

    def decode(self, ids):
        """Ids -> str; bytes that are not UTF-8 become U+FFFD, the end-of-text token becomes nothing."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        one = self.encoding.decode_single_token_bytes if self.encoding else lambda token: bytes((token,))
        parts = []
        for token in map(int, ids):
            try:
                parts.append(one(token) if token != self.eot else b"")
            except (KeyError, OverflowError, ValueError):
                # a padded vocabulary, or a hole in the encoding's own
                parts.append("\ufffd".encode())
        return b"".join(parts)


def get_tokenizer(name, rows=None):
    """Return the tokenizer called `name`: "byte", or any encoding that tiktoken knows. ValueError if there is
    none, if it cannot be fetched, or if an embedding of `rows` rows is too small for it."""
    tokenizer = _get_tokenizer(name)
    if rows is not None and rows < tokenizer.vocab_size:
        raise ValueError(f"tokenizer {name!r} has {tokenizer.vocab_size:,} tokens, but the embedding "
                         f"{rows:,} rows; it is not the one that the model was trained with")
    return tokenizer


def _get_tokenizer(name):
    if name == "byte":
        return Tokenizer(name)
    import tiktoken

    known = ["byte", *sorted(tiktoken.list_encoding_names())]
    if name not in known:
        raise ValueError(f"unknown tokenizer {name!r}; use one of: {', '.join(known)}")
    try:
        return Tokenizer(name, tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:  # tiktoken downloads an encoding's table at its first use
        raise ValueError(
            f"tokenizer {name!r} could not be fetched ({type(error).__name__}: is there a network?); "
            f"byte needs none; tiktoken knows: {', '.join(known[1:])}"
        ) from error


# ----------------------------------------------------------------------------------------------------------------------
# Sources. Each gives (documents, total, unit): an iterator of documents, how many units there are if that is
# known, and whether the progress bar counts bytes ("B") or documents ("doc"). A document is a str, or an
# iterator of the str pieces of a long one.

def stdlib_documents():
    """Every module of the running Python's standard library, sorted by path; its tests, two thirds of it, are
    left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort(key=Path.as_posix)

    def documents():
        undecodable = 0
        for path in paths:
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                undecodable += 1
        if undecodable:
            print(f"data.py: files skipped because they are not UTF-8: {undecodable}")

    return documents(), sum(path.stat().st_size for path in paths), "B"


def text_documents(files, column="text"):
    """UTF-8 files, one document each; of a .jsonl file, each line's field `column` is a document."""
    if not files:
        raise ValueError("no FILE; name text or .jsonl files, for example: python data.py text notes.txt")
    for path in files:
        if os.path.isdir(path):
            example = min(glob.glob(os.path.join(path, "*.*")), default=os.path.join(path, "*.txt"))
            raise ValueError(f"{path}: is a directory; name the files in it, for example {example}")
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file; name text or .jsonl files that exist")

    def pieces(path):
        try:
            with open(path, encoding="utf-8", newline="") as file:
                while text := file.read(PIECE):
                    # cut at a line's end, unless a line is longer than a piece
                    yield text + file.readline(PIECE)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: not UTF-8 text ({error.reason}); convert it, for example with iconv -t utf-8"
            ) from error

    def lines(path):
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                example = f'a line looks like {{"{column}": "…"}}'
                row = json_files.parse(line, dict, f"{path}:{number}", example)
                yield _field(row, column, f"{path}:{number}")

    documents = chain.from_iterable(
        lines(path) if path.endswith(".jsonl") else [pieces(path)] for path in files
    )
    return documents, sum(os.path.getsize(path) for path in files), "B"


def hf_documents(name, subset=None, split="train", column="text", streaming=False, data_files=None):
    """A data set of the Hugging Face hub, or local files through a builder: name "json", "parquet" or "text"
    with `data_files`."""
    if data_files == []:
        raise ValueError("--data-files: names no file; give one or more, or leave it out")
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=streaming, data_files=data_files)
    except Exception as error:  # datasets raises whatever the hub, pyarrow or the builder raised
        raise ValueError(
            f"hf {name}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error

    documents = (_field(row, column, f"hf {name}, row {number}") for number, row in enumerate(rows))
    return documents, None if streaming else len(rows), "doc"


def _field(row, column, where):
    if isinstance(row.get(column), str):
        return row[column]
    texts = [key for key, value in row.items() if isinstance(value, str)]
    raise ValueError(
        f"{where}: no text in column {column!r}; name one with --column: {', '.join(texts) or 'none here holds text'}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Writing token files

def write_tokens(documents, out_dir, *, tokenizer="byte", val_fraction=0.01, force=False, num_workers=None,
                 source="", total=None, unit="doc"):
    """Tokenises `documents` (str, or iterators of str pieces) into `out_dir`/{train,val}.bin and meta.json;
    returns meta.

    A document goes to `val` if a hash of its text (of a long one's first piece), read as a number in [0, 1),
    is below `val_fraction`. Where that leaves one side empty, the document nearest to the border changes
    sides; a corpus of one document is cut, the last `val_fraction` of its tokens being `val`. `num_workers`
    processes tokenise: None is one for each core, and for bytes only this one, as sending them would take
    longer than the work. Raises ValueError for bad input and an empty corpus, OSError if writing fails;
    either way nothing is left behind.
    """
    out_dir = Path(out_dir)
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction {val_fraction}: must be above 0 and below 1, for example 0.01")
    if num_workers is not None and not 1 <= num_workers <= 1024:
        raise ValueError(f"--num-workers {num_workers}: must be at least 1 and at most 1024, for example "
                         f"{os.cpu_count()}")
    _check_target(out_dir, force)
    encoder = get_tokenizer(tokenizer)
    dtype = np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    num_workers = num_workers or (1 if tokenizer == "byte" else os.cpu_count())

    temporary = out_dir.with_name(f"{out_dir.name}.tmp-{os.getpid()}")
    made = [folder for folder in (temporary, *temporary.parents) if not folder.exists()]
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OSError(
            f"{out_dir}: cannot be made ({error.strerror}); name another folder with --out-dir"
        ) from error
    try:
        encoded = _encode_all(_pieces(documents), tokenizer, dtype, num_workers)
        with tqdm(
            desc="tokenising", total=total, unit=unit, unit_scale=True, disable=None, leave=False
        ) as bar:
            _write_all(
                encoded, temporary, encoder.eot, dtype,
                lambda size, last: bar.update(size if unit == "B" else last),
            )
        meta = {
            "format": 1, "source": source, "tokenizer": tokenizer, "vocab_size": encoder.vocab_size,
            "eot": encoder.eot, "dtype": dtype.name, "val_fraction": val_fraction,
            **_split(temporary, encoder, dtype, val_fraction),
        }
        meta["sha256"] = _meta_checksum(meta)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        _check_target(out_dir, force)  # again: another process may have made it meanwhile
        shutil.rmtree(out_dir, ignore_errors=True)
        os.rename(temporary, out_dir)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            # the parents that were made for it, if nothing else has come to be in them
            for folder in made[1:]:
                folder.rmdir()
        # a failed write, which does not say of which file
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(f"{out_dir}: could not be written ({error.strerror or error}), nothing is kept; "
                          f"free some space or name another --out-dir") from error
        raise
    return meta


DOCUMENT = np.dtype([("place", "f8"), ("tokens", "i8"), ("bytes", "i8")])


def _write_all(encoded, folder, eot, dtype, progress):
    """All tokens in order to all.bin, and a `DOCUMENT` record for each document to documents.bin."""
    document = None
    with open(folder / "all.bin", "wb") as all_tokens, open(folder / "documents.bin", "wb") as documents:
        for tokens, place, size, last in encoded:
            all_tokens.write(tokens)
            if document is None:
                # placed by its first piece; 1 for the end of text
                document = np.array([(place, 1, 0)], DOCUMENT)
            document["tokens"] += len(tokens)
            document["bytes"] += size
            if last:
                all_tokens.write(np.array([eot], dtype))
                documents.write(document)
                document = None
            progress(size, last)


def _split(folder, tokenizer, dtype, val_fraction):
    """all.bin -> train.bin and val.bin, both with something in them; returns what meta.json says of them.

    Only now, with every document's place known, is it certain that the border between the two leaves neither
    side empty.
    """
    if not os.path.getsize(folder / "documents.bin"):
        raise ValueError("the corpus is empty: no document holds any text; name files that do")
    documents, tokens = (
        np.memmap(folder / "documents.bin", DOCUMENT, "r"),
        np.memmap(folder / "all.bin", dtype, "r"),
    )
    place, ends = documents["place"], np.cumsum(documents["tokens"])
    lowest, highest = place.min(), place.max()
    if lowest < highest:
        in_val = place < min(max(val_fraction, np.nextafter(lowest, 1)), highest)
        ranges = list(zip((ends - documents["tokens"])[in_val], ends[in_val]))
        val_bytes = int(documents["bytes"][in_val].sum())
    else:  # one document (or copies of it): its end is for validation
        border = len(tokens) - min(max(round(len(tokens) * val_fraction), 1), len(tokens) - 1)
        ranges = [(border, len(tokens))]
        val_bytes = len(tokenizer.decode_bytes(tokens[border:]))
    val_tokens = int(sum(end - start for start, end in ranges))

    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        position = 0
        for start, end in [*ranges, (len(tokens), len(tokens))]:
            tokens[position:start].tofile(train)
            tokens[start:end].tofile(val)
            position = end
    meta = {"documents": len(documents), "train_tokens": len(tokens) - val_tokens, "val_tokens": val_tokens,
            # of UTF-8: for a loss in nats per byte
            "train_bytes": int(documents["bytes"].sum()) - val_bytes, "val_bytes": val_bytes,
            "train_sha256": sha256(folder / "train.bin"), "val_sha256": sha256(folder / "val.bin")}
    for name in ("all.bin", "documents.bin"):
        os.remove(folder / name)
    return meta


def _pieces(documents):
    """Documents -> (text, is it the document's last piece?); empty documents are left out."""
    for document in documents:
        parts = filter(None, [document] if isinstance(document, str) else document)
        text = next(parts, None)
        while text is not None:
            following = next(parts, None)
            yield text, following is None
            text = following


def _encode_all(pieces, name, dtype, num_workers):
    """(text, last) -> (tokens, place in [0, 1), bytes of text, last), in order, a few tasks of about `PIECE`
    characters in flight."""
    def tasks():
        task, length = [], 0
        for piece in pieces:
            task.append(piece)
            length += len(piece[0])
            if length >= PIECE:
                yield task
                task, length = [], 0
        yield task

    if num_workers == 1:
        for task in tasks():
            yield from _encode(task, name, dtype)
        return
    # spawn: a fork would copy the threads' locks of whatever library (pyarrow, tokenizers) already runs
    # threads here. SIGINT: Ctrl-C goes to the whole group, and the parent alone deals with it.
    pool = ProcessPoolExecutor(
        num_workers, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    )
    try:
        in_flight = deque()
        for task in tasks():
            in_flight.append(pool.submit(_encode, task, name, dtype))
            if len(in_flight) >= 2 * num_workers:
                yield from in_flight.popleft().result()
        while in_flight:
            yield from in_flight.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(task, name, dtype):
    # tiktoken keeps its encodings: only the first task of a process loads one
    tokenizer, done = get_tokenizer(name), []
    for text, last in task:
        # JSON may hold half of a surrogate pair, which UTF-8 cannot
        raw = text.encode("utf-8", errors="replace")
        place = int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "big") / 2**48
        done.append((tokenizer.encode_bytes(raw).astype(dtype), place, len(raw), last))
    return done


def _check_target(out_dir, force):
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"{out_dir}: is a file; name a folder with --out-dir")
    held = set(os.listdir(out_dir)) if out_dir.exists() else set()
    if held - FILES:  # --force must not delete what this script did not write
        raise ValueError(f"{out_dir}: holds other files than token files; name another folder with --out-dir")
    if held and not force:
        raise ValueError(
            f"{out_dir}: exists; overwrite it with --force, or name another folder with --out-dir"
        )


def sha256(path):
    """A file's SHA-256 in hexadecimal; the file may be larger than memory. (hashlib.file_digest needs Python
    3.11.)"""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _meta_checksum(meta):
    """Of all that meta.json says but the checksum itself."""
    said = json.dumps({key: value for key, value in meta.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Reading token files

def open_tokens(folder, split, verify=True):
    """`folder`'s tokens of `split` ("train" or "val") as a read-only memory map, and meta.json as a dict.

    The file's length must be meta.json's; with `verify` also its SHA-256 (about a second a gigabyte).
    ValueError if not, naming both.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split {split!r}: must be train or val")
    path, meta_path = Path(folder, f"{split}.bin"), Path(folder, "meta.json")
    if not meta_path.exists():
        raise ValueError(
            f"{folder}: no token files here (no meta.json); make some, for example with: python data.py stdlib"
        )
    meta = json_files.read(meta_path, META, REMAKE)
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    length, checksum, vocab_size = meta[f"{split}_tokens"], meta[f"{split}_sha256"], meta["vocab_size"]
    signed = {"format", "sha256"} & set(meta)  # the first files had neither
    if signed and meta.get("sha256") != _meta_checksum(meta):
        raise ValueError(f"{meta_path}: damaged: its checksum does not match its content; {REMAKE}")
    if meta["eot"] >= vocab_size:
        raise ValueError(f"{meta_path}: eot is {meta['eot']}, but vocab_size is {vocab_size}; {REMAKE}")
    if not path.is_file():
        raise ValueError(f"{path}: missing, or not a regular file; {REMAKE}")
    size, expected = path.stat().st_size, length * dtype.itemsize
    if size != expected or verify and sha256(path) != checksum:
        raise ValueError(
            f"{path}: truncated or altered: {size} bytes with SHA-256 {sha256(path)}, but meta.json says "
            f"{expected} bytes with SHA-256 {checksum}; make it again with data.py --force"
        )
    if not length:
        raise ValueError(f"{path}: holds no tokens; {REMAKE}")
    return np.memmap(path, dtype, "r"), meta


class Loader:
    """Batches of `micro_batch_size` x `seq_len` tokens from `folder`'s `split`, as a pure function of (seed,
    index, rank, world_size).

    An epoch visits the file's windows of seq_len + 1 tokens (they overlap by one: the last label is the next
    one's first input) once each, in an order and, for `train`, from a starting offset drawn from Philox with
    the key (seed, epoch). The sample number (index * world_size + rank) * micro_batch_size + row says which:
    ranks see different data, and no sample is skipped. While the caller works on batch i, a thread reads
    batch i + 1 (into pinned memory if the device is a GPU).

    With `pack_documents` a batch says where its documents begin, so that attention can stay inside them. A
    document begins with the end-of-text token before it, as a generated text does: that token alone predicts
    its first, and its last predicts the next end of text.

    `seq_len` in tokens. `verify` checks the file's checksum: by default on rank 0, so that a shared disk is
    read once. Raises ValueError if the split holds fewer than seq_len + 1 tokens.
    """

    def __init__(
        self,
        folder,
        split,
        *,
        seq_len,
        micro_batch_size,
        seed=0,
        rank=0,
        world_size=1,
        device="cpu",
        verify=None,
        pack_documents=False,
    ):
        for name, value, least in (
            ("seq_len", seq_len, 1), ("micro_batch_size", micro_batch_size, 1), ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name} {value}: must be at least {least}")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} of world_size {world_size}: must be at least 0 and below world_size"
            )
        import torch

        verify = rank == 0 if verify is None else verify
        self.tokens, self.meta = open_tokens(folder, split, verify=verify)
        length, vocab_size = len(self.tokens), self.meta["vocab_size"]
        if verify and self.tokens.max() >= vocab_size:
            raise ValueError(f"{Path(folder, split)}.bin: holds the token {self.tokens.max()}, but "
                             f"vocab_size in meta.json is {vocab_size}; {REMAKE}")
        if length < seq_len + 1:
            raise ValueError(
                f"{Path(folder, split)}.bin: {length} tokens, but a context of {seq_len} needs {seq_len + 1}; "
                f"use a larger corpus" + (f" or --seq-len {length - 1}" if length > 1 else "")
            )
        self.split, self.seq_len, self.micro_batch_size = split, seq_len, micro_batch_size
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.pack_documents, self.most_documents = pack_documents, 0
        if pack_documents:
            self.most_documents = micro_batch_size * most_documents(self.tokens, self.meta["eot"], seq_len)
        self.device = torch.device(device)
        # A window less for train leaves room for the starting offset without an epoch's length depending on
        # it.
        self.num_windows = max(length // seq_len - 1, 1) if split == "train" else (length - 1) // seq_len
        self._epoch = lru_cache(2)(self._epoch)  # a batch may straddle two epochs
        self._ahead = (None, None)  # (index, future) of the batch being prepared
        start = ()
        # a new thread starts on GPU 0, where pinning would open a context beside the rank that owns it
        if self.device.type == "cuda":
            start = (
                torch.cuda.set_device,
                (torch.cuda.current_device() if self.device.index is None else self.device.index,),
            )
        self._thread = ThreadPoolExecutor(1, "loader", *start)

    def batch(self, index):
        """Batch number `index` (step * grad_accum + micro_step): (input_ids, labels), int64
        (micro_batch_size, seq_len) each.

        labels[:, t] is the token after input_ids[:, t]. With pack_documents also cu_seqlens, int32
        (most_documents + 1,): where each document or part of one begins in input_ids.flatten(), then that
        tensor's length, again and again: its shape is the same for every batch.
        """
        if index < 0:
            raise ValueError(f"batch {index}: must be at least 0")
        expected, future = self._ahead
        if expected != index:
            future = self._thread.submit(self._read, index)
        windows = future.result()
        self._ahead = (index + 1, self._thread.submit(self._read, index + 1))
        packing = [self._cu_seqlens(windows)] if self.pack_documents else []
        windows, *packing = (tensor.to(self.device, non_blocking=True) for tensor in (windows, *packing))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), *packing

    def close(self):
        self._thread.shutdown(cancel_futures=True)

    def _read(self, index):
        import torch

        first, starts = (index * self.world_size + self.rank) * self.micro_batch_size, []
        for sample in range(first, first + self.micro_batch_size):
            offset, order = self._epoch(sample // self.num_windows)
            starts.append(offset + order[sample % self.num_windows] * self.seq_len)
        windows = torch.from_numpy(
            self.tokens[np.array(starts)[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        )
        return windows.pin_memory() if self.device.type == "cuda" else windows

    def _cu_seqlens(self, windows):
        import torch

        begins = windows[:, :-1] == self.meta["eot"]
        begins[:, 0] = True  # of a row, even inside a document
        begins = begins.flatten().nonzero().flatten()
        padded = torch.full(
            (self.most_documents + 1,), windows[:, :-1].numel(), dtype=torch.int32,
            pin_memory=self.device.type == "cuda",
        )
        padded[:len(begins)] = begins
        return padded

    def _epoch(self, epoch):
        """(starting offset in tokens, order of the windows). From raw bits: numpy may change its shuffles,
        not its bit generators."""
        bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.num_windows + 1)
        room = min(len(self.tokens) - self.num_windows * self.seq_len, self.seq_len)
        offset = int(bits[0] % np.uint64(room)) if self.split == "train" else 0
        return offset, np.argsort(bits[1:], kind="stable")


def most_documents(tokens, eot, seq_len):
    """The largest number of documents, whole or in part, that any seq_len tokens in a row hold. Reads the
    file once, 8 bytes of memory a document."""
    ends = np.concatenate(
        [
            start + np.flatnonzero(tokens[start : start + PIECE] == eot)
            for start in range(0, len(tokens), PIECE)
        ]
    )
    # the first token begins a part of a document whatever it is; how many ends of text can the seq_len - 1
    # after it hold?
    return 1 + int((np.searchsorted(ends, ends + seq_len - 1) - np.arange(len(ends))).max(initial=0))


# ----------------------------------------------------------------------------------------------------------------------
# Command line

@dataclass(kw_only=True)
class Options:
    out_dir: Path | None = None
    """Folder to write; by default data/<name>, or data/<name>-<tokenizer> if that is not byte."""
    tokenizer: str = "byte"
    """byte, or a tiktoken encoding such as gpt2."""
    val_fraction: float = 0.01
    """Share of the documents kept for validation."""
    num_workers: int | None = None
    """Tokenising processes; by default one for each core, and one for byte."""
    force: bool = False
    """Overwrite the folder if it exists."""


@dataclass(kw_only=True)
class Stdlib(Options):
    """The Python standard library's own sources; no download."""
    val_fraction: float = 0.05  # a hundredth would be half a dozen files


@dataclass(kw_only=True)
class Text(Options):
    """Files: UTF-8 text, one document each, or .jsonl, one document a line."""

    files: "tyro.conf.Positional[Annotated[list[str], tyro.conf.arg(metavar='FILE [FILE ...]', help_behavior_hint='(required)')]]"
    """UTF-8 text or .jsonl files."""
    column: str = "text"
    """The field of a .jsonl file's lines that holds the text."""


@dataclass(kw_only=True)
class Hf(Options):
    """A data set of the Hugging Face hub."""
    name: "tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar='NAME')]]"
    """Such as roneneldan/TinyStories; or json, parquet, text with --data-files."""
    subset: str | None = None
    """The data set's configuration."""
    split: str = "train"
    """The part to take."""
    column: str = "text"
    """The field that holds the text."""
    streaming: bool = False
    """Read while downloading, without a copy on disk."""
    data_files: list[str] | None = None
    """Local files for the builder."""


def main(argv=None):
    """Runs the command line `argv` (None: sys.argv[1:]). ValueError or OSError, in one line, for what the
    user can mend."""
    global tyro  # for the annotations above
    import tyro

    from nanote import cli

    config = cli.parse(
        Stdlib | Text | Hf, argv, prog="data.py", description=__doc__.partition("\n\nA token file")[0]
    )
    start = time.time()
    if isinstance(config, Stdlib):
        name, source, read = (
            "stdlib", f"the standard library of Python {sys.version.split()[0]}", stdlib_documents,
        )
    elif isinstance(config, Text):
        name = Path(config.files[0]).stem if len(config.files) == 1 else "text"
        source = " ".join(config.files[:10]) + (
            f" and {len(config.files) - 10} more" if len(config.files) > 10 else ""
        )
        read = partial(text_documents, config.files, config.column)
    else:
        name = config.name.rstrip("/").split("/")[-1]
        source = " ".join(filter(None, ["hf", config.name, config.subset, config.split]))
        read = partial(
            hf_documents, config.name, config.subset, config.split, config.column, config.streaming,
            config.data_files,
        )
    out_dir = config.out_dir or Path(
        "data", name if config.tokenizer == "byte" else f"{name}-{config.tokenizer}"
    )
    try:
        _check_target(out_dir, config.force)  # before anything is downloaded
        documents, total, unit = read()
        meta = write_tokens(
            documents, out_dir, tokenizer=config.tokenizer, val_fraction=config.val_fraction,
            force=config.force, num_workers=config.num_workers, source=source, total=total, unit=unit,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; nothing was written") from None
    print(
        f"{out_dir}: {meta['documents']:,} documents, {meta['train_tokens']:,} train and {meta['val_tokens']:,} validation tokens "
        f"({config.tokenizer}, {meta['dtype']}) in {time.time() - start:.1f} s"
    )


if __name__ == "__main__":
    from nanote import cli

    sys.exit(cli.run(main, "data.py"))
