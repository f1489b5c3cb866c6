"""Text to token files, and the loader that reads them.

    python data.py stdlib                              # the Python standard library's sources, no download
    python data.py text *.md notes.jsonl --tokenizer gpt2
    python data.py hf roneneldan/TinyStories --streaming

A token file is nothing but token ids, uint16 or uint32, one document after the other with the end-of-text token behind
each: `data/<name>/{train,val}.bin`, described by `meta.json`. Notable:

- Memory stays bounded however large the corpus: documents are streamed, long files in pieces, and only a few tasks are in flight.
- A document's side is decided by a hash of its text, so the same document lands on the same side in every corpus and
  adding documents moves none of the others.
- The files appear complete or not at all (a temporary folder, then a rename), and their checksums are checked when they are opened.
- A batch is a pure function of (seed, index, rank): a loader has no state to save, and a resumed run sees what it would have seen.
"""
import argparse
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
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

# torch, tiktoken and datasets are imported where they are used: worker processes import this file, and need none or one of them.

PIECE = 1 << 20  # characters that a worker gets at a time, and the longest piece of a document that is held in memory
FILES = {"train.bin", "val.bin", "meta.json"}


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

class Tokenizer:
    """Text to token ids and back: `byte` (ids 0-255 are bytes, 256 ends a text) or a tiktoken encoding. Use `get_tokenizer`.

    `vocab_size` counts every id, the end-of-text token `eot` included. A model's vocabulary is often padded beyond it:
    ids that the tokenizer does not have decode to U+FFFD.
    """

    def __init__(self, name, encoding=None):
        self.name = name
        self.encoding = encoding
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

    def decode_bytes(self, ids):
        return b"".join(map(self._token_bytes, ids))

    def decode(self, ids):
        """Ids -> str; bytes that are not UTF-8 become U+FFFD, the end-of-text token becomes nothing."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def _token_bytes(self, token):
        token = int(token)
        if token == self.eot:
            return b""
        if self.encoding is None:
            return bytes((token,)) if 0 <= token < 256 else "\ufffd".encode()
        try:
            return self.encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError):  # a padded vocabulary, or a hole in the encoding's own
            return "\ufffd".encode()


def get_tokenizer(name):
    """The tokenizer called `name`: "byte", or any encoding that tiktoken knows. ValueError if there is none or it cannot be fetched."""
    if name == "byte":
        return Tokenizer(name)
    import tiktoken

    known = ", ".join(["byte", *sorted(tiktoken.list_encoding_names())])
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"unknown tokenizer {name!r}; use one of: {known}")
    try:
        return Tokenizer(name, tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:  # tiktoken downloads an encoding's table at its first use
        raise ValueError(f"tokenizer {name!r} could not be fetched ({type(error).__name__}: is there a network?); "
                         f"byte needs none; tiktoken knows: {known}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Sources. Each gives (documents, total, unit): an iterator of documents, how many units there are if that is known, and whether
# the progress bar counts bytes ("B") or documents ("doc"). A document is a str, or an iterator of the str pieces of a long one.

def stdlib_documents():
    """Every module of the running Python's standard library, sorted by path; its tests, two thirds of it, are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort(key=lambda path: path.relative_to(root).as_posix())

    def documents():
        undecodable = 0
        for path in paths:
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                undecodable += 1
        if undecodable:
            print(f"data.py: skipped {undecodable} files that are not UTF-8")

    return documents(), sum(path.stat().st_size for path in paths), "B"


def text_documents(files, column="text"):
    """UTF-8 files, one document each; of a .jsonl file, each line's field `column` is a document."""
    for path in files:
        if os.path.isdir(path):
            example = next(iter(sorted(glob.glob(os.path.join(path, "*.*")))), os.path.join(path, "*.txt"))
            raise ValueError(f"{path}: is a directory; name the files in it, for example {example}")
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file; name text or .jsonl files that exist")

    def pieces(path):
        try:
            with open(path, encoding="utf-8", newline="") as file:
                while text := file.read(PIECE):
                    yield text + file.readline(PIECE)  # cut at a line's end, unless a line is longer than a piece
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error.reason}); convert it, for example with iconv -t utf-8") from error

    def lines(path):
        number = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: not JSON ({error}); a .jsonl file has one object a line") from error
                if not isinstance(row, dict):
                    raise ValueError(f'{path}:{number}: not an object; a line looks like {{"{column}": "…"}}')
                yield _field(row, column, f"{path}:{number}")

    def documents():
        for path in files:
            if path.endswith(".jsonl"):
                yield from lines(path)
            else:
                yield pieces(path)

    return documents(), sum(os.path.getsize(path) for path in files), "B"


def hf_documents(name, subset=None, split="train", column="text", streaming=False, data_files=None):
    """A data set of the Hugging Face hub, or local files through a builder: name "json", "parquet" or "text" with `data_files`."""
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=streaming, data_files=data_files)
    except Exception as error:  # datasets raises whatever the hub, pyarrow or the builder raised
        raise ValueError(f"hf {name}: {_one_line(error)}") from error

    def documents():
        for number, row in enumerate(rows):
            yield _field(row, column, f"hf {name}, row {number}")

    return documents(), None if streaming else len(rows), "doc"


def _field(row, column, where):
    if isinstance(row.get(column), str):
        return row[column]
    texts = [key for key, value in row.items() if isinstance(value, str)]
    raise ValueError(f"{where}: no text in column {column!r}; name one with --column: {', '.join(texts) or 'none here holds text'}")


def _one_line(error):
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# ----------------------------------------------------------------------------------------------------------------------
# Writing token files

def write_tokens(documents, out_dir, *, tokenizer="byte", val_fraction=0.01, force=False, num_workers=None,
                 source="", total=None, unit="doc"):
    """Tokenises `documents` (str, or iterators of str pieces) into `out_dir`/{train,val}.bin and meta.json; returns meta.

    A document goes to `val` if a hash of its text (of a long one's first piece), read as a number in [0, 1), is below
    `val_fraction`. Where that leaves one side empty, the document nearest to the border changes sides; a corpus of one
    document is cut, the last `val_fraction` of its tokens being `val`. `num_workers` processes tokenise: None is one for each
    core, and for bytes only this one, as sending them would take longer than the work.
    Raises ValueError for bad input and an empty corpus, OSError if writing fails; either way nothing is left behind.
    """
    out_dir = Path(out_dir)
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction {val_fraction}: must be above 0 and below 1, for example 0.01")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"--num-workers {num_workers}: must be at least 1, for example {os.cpu_count()}")
    _check_target(out_dir, force)
    encoder = get_tokenizer(tokenizer)
    dtype = np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    if num_workers is None:
        num_workers = 1 if tokenizer == "byte" else os.cpu_count()

    temporary = out_dir.with_name(f"{out_dir.name}.tmp-{os.getpid()}")
    made = [folder for folder in (temporary, *temporary.parents) if not folder.exists()]
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"{out_dir}: cannot be made ({error.strerror}); name another folder with --out-dir") from error
    try:
        encoded = _encode_all(_pieces(documents), encoder, dtype, num_workers)
        with tqdm(desc="tokenising", total=total, unit=unit, unit_scale=True, disable=None, leave=False) as bar:
            _write_all(encoded, temporary, encoder, dtype, lambda size, last: bar.update(size if unit == "B" else last))
        meta = {"source": source, "tokenizer": tokenizer, "vocab_size": encoder.vocab_size, "eot": encoder.eot, "dtype": dtype.name,
                "val_fraction": val_fraction, **_split(temporary, encoder, dtype, val_fraction)}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        _check_target(out_dir, force)  # again: another process may have made it meanwhile
        shutil.rmtree(out_dir, ignore_errors=True)
        os.rename(temporary, out_dir)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made[1:]:  # the parents that were made for it, if nothing else has come to be in them
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, OSError) and error.filename is None:  # a failed write, which does not say of which file
            raise OSError(f"{out_dir}: could not be written ({error.strerror or error}), nothing is kept; "
                          f"free some space or name another --out-dir") from error
        raise
    return meta


DOCUMENT = np.dtype([("place", "f8"), ("tokens", "i8"), ("bytes", "i8")])


def _write_all(encoded, folder, tokenizer, dtype, progress):
    """All tokens in order to all.bin, and a `DOCUMENT` record for each document to documents.bin."""
    eot, document = np.array([tokenizer.eot], dtype), None
    with open(folder / "all.bin", "wb") as all_tokens, open(folder / "documents.bin", "wb") as documents:
        for tokens, place, size, last in encoded:
            all_tokens.write(tokens)
            if document is None:
                document = np.array([(place, 1, 0)], DOCUMENT)  # placed by its first piece; 1 for the end of text
            document["tokens"] += len(tokens)
            document["bytes"] += size
            if last:
                all_tokens.write(eot)
                documents.write(document)
                document = None
            progress(size, last)


def _split(folder, tokenizer, dtype, val_fraction):
    """all.bin -> train.bin and val.bin, both with something in them; returns what meta.json says of them.

    Only now, with every document's place known, is it certain that the border between the two leaves neither side empty.
    """
    if not os.path.getsize(folder / "documents.bin"):
        raise ValueError("the corpus is empty: no document holds any text; name files that do")
    documents, tokens = np.memmap(folder / "documents.bin", DOCUMENT, "r"), np.memmap(folder / "all.bin", dtype, "r")
    place, ends, size = documents["place"], np.cumsum(documents["tokens"]), int(documents["bytes"].sum())
    lowest, highest = place.min(), place.max()
    if lowest < highest:
        in_val = place < min(max(val_fraction, np.nextafter(lowest, 1)), highest)
        ranges = [(ends[i] - documents["tokens"][i], ends[i]) for i in np.flatnonzero(in_val)]
        val_size = int(documents["bytes"][in_val].sum())
    else:  # one document (or copies of it): its end is for validation
        border = len(tokens) - min(max(round(len(tokens) * val_fraction), 1), len(tokens) - 1)
        ranges = [(border, len(tokens))]
        val_size = len(tokenizer.decode_bytes(tokens[border:]))

    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        position = 0
        for start, end in ranges:
            tokens[position:start].tofile(train)
            tokens[start:end].tofile(val)
            position = end
        tokens[position:].tofile(train)
    val_tokens = int(sum(end - start for start, end in ranges))
    meta = {"documents": len(documents), "train_tokens": len(tokens) - val_tokens, "val_tokens": val_tokens,
            "train_bytes": size - val_size, "val_bytes": val_size,  # of UTF-8 text: for a loss in nats per byte
            "train_sha256": _sha256(folder / "train.bin"), "val_sha256": _sha256(folder / "val.bin")}
    del documents, tokens
    os.remove(folder / "all.bin")
    os.remove(folder / "documents.bin")
    return meta


def _pieces(documents):
    """Documents -> (text, is it the document's last piece?); empty documents are left out."""
    for document in documents:
        text = None
        for following in [document] if isinstance(document, str) else document:
            if following:
                if text is not None:
                    yield text, False
                text = following
        if text is not None:
            yield text, True


def _encode_all(pieces, tokenizer, dtype, num_workers):
    """(text, last) -> (tokens, place in [0, 1), bytes of text, last), in order, a few tasks of about `PIECE` characters in flight."""
    def tasks():
        task, length = [], 0
        for piece in pieces:
            task.append(piece)
            length += len(piece[0])
            if length >= PIECE:
                yield task
                task, length = [], 0
        if task:
            yield task

    if num_workers == 1:
        for task in tasks():
            yield from _encode_task(task, tokenizer, dtype)
        return
    # spawn: a fork would copy the threads' locks of whatever library (pyarrow, tokenizers) already runs threads here
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (tokenizer.name, dtype)) as pool:
        in_flight = deque()
        try:
            for task in tasks():
                in_flight.append(pool.submit(_encode_in_worker, task))
                if len(in_flight) >= 2 * num_workers:
                    yield from in_flight.popleft().result()
            while in_flight:
                yield from in_flight.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _encode_task(task, tokenizer, dtype):
    done = []
    for text, last in task:
        raw = text.encode("utf-8", errors="replace")  # JSON may hold half of a surrogate pair, which UTF-8 cannot
        place = int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "big") / 2**48
        done.append((tokenizer.encode_bytes(raw).astype(dtype), place, len(raw), last))
    return done


def _start_worker(name, dtype):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the parent alone deals with it
    global _worker
    _worker = get_tokenizer(name), dtype


def _encode_in_worker(task):
    return _encode_task(task, *_worker)


def _check_target(out_dir, force):
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise ValueError(f"{out_dir}: is a file; name a folder with --out-dir")
    if not set(os.listdir(out_dir)) <= FILES:  # --force must not delete what this script did not write
        raise ValueError(f"{out_dir}: holds other files than token files; name another folder with --out-dir")
    if any(out_dir.iterdir()) and not force:
        raise ValueError(f"{out_dir}: exists; overwrite it with --force, or name another folder with --out-dir")


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Reading token files

def open_tokens(folder, split, verify=True):
    """`folder`'s tokens of `split` ("train" or "val") as a read-only memory map, and meta.json as a dict.

    The file's length must be meta.json's; with `verify` also its SHA-256 (about a second a gigabyte). ValueError if not, naming both.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split {split!r}: must be train or val")
    path, meta_path = Path(folder, f"{split}.bin"), Path(folder, "meta.json")
    if not meta_path.is_file():
        raise ValueError(f"{folder}: no token files here (no meta.json); make some, for example with: python data.py stdlib")
    try:
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
        length, checksum = int(meta[f"{split}_tokens"]), meta[f"{split}_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{meta_path}: damaged ({type(error).__name__}: {_one_line(error)}); "
                         f"make the token files again with data.py --force") from error
    if not path.is_file():
        raise ValueError(f"{path}: missing; make the token files again with data.py --force")
    size = path.stat().st_size
    if verify or size != length * dtype.itemsize:
        found = _sha256(path)
        if found != checksum or size != length * dtype.itemsize:
            raise ValueError(f"{path}: truncated or altered: {size} bytes with SHA-256 {found}, but meta.json says "
                             f"{length * dtype.itemsize} bytes with SHA-256 {checksum}; make it again with data.py --force")
    return np.memmap(path, dtype, "r"), meta


class Loader:
    """Batches of `micro_batch_size` x `seq_len` tokens from `folder`'s `split`, as a pure function of (seed, index, rank, world_size).

    An epoch visits the file's windows of seq_len + 1 tokens (they overlap by one: the last label is the next one's first input)
    once each, in an order and, for `train`, from a starting offset drawn from Philox with the key (seed, epoch). The sample
    number (index * world_size + rank) * micro_batch_size + row says which: ranks see different data, and no sample is skipped.
    While the caller works on batch i, a thread reads batch i + 1 (into pinned memory if the device is a GPU).

    `seq_len` in tokens. `verify` checks the file's checksum: by default on rank 0, so that a shared disk is read once.
    Raises ValueError if the split holds fewer than seq_len + 1 tokens.
    """

    def __init__(self, folder, split, *, seq_len, micro_batch_size, seed=0, rank=0, world_size=1, device="cpu", verify=None):
        for name, value, least in (("seq_len", seq_len, 1), ("micro_batch_size", micro_batch_size, 1), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"{name} {value}: must be at least {least}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of world_size {world_size}: must be at least 0 and below world_size")
        import torch

        self.tokens, self.meta = open_tokens(folder, split, verify=rank == 0 if verify is None else verify)
        length = len(self.tokens)
        if length < seq_len + 1:
            raise ValueError(f"{Path(folder, split)}.bin: {length} tokens, but a context of {seq_len} needs {seq_len + 1}; "
                             f"use a larger corpus" + (f" or --seq-len {length - 1}" if length > 1 else ""))
        self.split, self.seq_len, self.micro_batch_size = split, seq_len, micro_batch_size
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.device = torch.device(device)
        # A window less for train leaves room for the starting offset without an epoch's length depending on it.
        self.num_windows = max(length // seq_len - 1, 1) if split == "train" else (length - 1) // seq_len
        self._epochs = {}
        self._ahead = (None, None)  # (index, future) of the batch being prepared
        pinned = self.device.type == "cuda"
        if pinned:  # a new thread starts on GPU 0, where pinning would open a context beside the rank that owns it
            own = torch.cuda.current_device() if self.device.index is None else self.device.index
            self._thread = ThreadPoolExecutor(1, "loader", torch.cuda.set_device, (own,))
        else:
            self._thread = ThreadPoolExecutor(1, "loader")
        self._tensor = (lambda array: torch.from_numpy(array).pin_memory()) if pinned else torch.from_numpy

    def batch(self, index):
        """Batch number `index` (step * grad_accum + micro_step): (input_ids, labels), int64 (micro_batch_size, seq_len) each.

        labels[:, t] is the token after input_ids[:, t].
        """
        if index < 0:
            raise ValueError(f"batch {index}: must be at least 0")
        expected, future = self._ahead
        if future is None or expected != index:
            future = self._thread.submit(self._read, index)
        windows = future.result()
        self._ahead = (index + 1, self._thread.submit(self._read, index + 1))
        windows = windows.to(self.device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def close(self):
        self._thread.shutdown(cancel_futures=True)

    def _read(self, index):
        rows = np.arange(self.micro_batch_size) + (index * self.world_size + self.rank) * self.micro_batch_size
        starts = np.empty(len(rows), np.int64)
        for row, sample in enumerate(rows.tolist()):
            offset, order = self._epoch(sample // self.num_windows)
            starts[row] = offset + order[sample % self.num_windows] * self.seq_len
        return self._tensor(self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64))

    def _epoch(self, epoch):
        """(starting offset in tokens, order of the windows). From raw bits: numpy may change its shuffles, not its bit generators."""
        if epoch not in self._epochs:
            bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.num_windows + 1)
            room = min(len(self.tokens) - self.num_windows * self.seq_len, self.seq_len)
            offset = int(bits[0] % np.uint64(room)) if self.split == "train" else 0
            self._epochs = dict([*self._epochs.items()][-1:])  # a batch may straddle two epochs
            self._epochs[epoch] = offset, np.argsort(bits[1:], kind="stable")
        return self._epochs[epoch]


# ----------------------------------------------------------------------------------------------------------------------
# Command line

class _Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, where argparse would print the usage too
        raise ValueError(f"{message}; see python data.py --help")


def main(argv=None):
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--out-dir", help="folder to write (default: data/<name>[-<tokenizer>])")
    options.add_argument("--tokenizer", default="byte", help="byte, or a tiktoken encoding such as gpt2 (default: %(default)s)")
    options.add_argument("--val-fraction", type=float, help="share of the documents kept for validation (default: 0.01; stdlib 0.05)")
    options.add_argument("--num-workers", type=int, help="tokenising processes (default: the number of cores; 1 for byte)")
    options.add_argument("--force", action="store_true", help="overwrite the folder if it exists")
    column = argparse.ArgumentParser(add_help=False)
    column.add_argument("--column", default="text", help="the field that holds the text (default: %(default)s)")

    parser = _Parser(prog="data.py", description="Turn text into token files for train.py.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib | text | hf")
    commands.add_parser("stdlib", parents=[options], help="the Python standard library's own sources; no download")
    text = commands.add_parser("text", parents=[options, column], help="files: UTF-8 text, one document each, or .jsonl, one a line")
    text.add_argument("files", nargs="+", metavar="FILE")
    hf = commands.add_parser("hf", parents=[options, column], help="a data set of the Hugging Face hub")
    hf.add_argument("name", help="such as roneneldan/TinyStories; or json, parquet, text with --data-files")
    hf.add_argument("--subset", help="the data set's configuration")
    hf.add_argument("--split", default="train", help="the part to take (default: %(default)s)")
    hf.add_argument("--streaming", action="store_true", help="read while downloading, without a copy on disk")
    hf.add_argument("--data-files", nargs="+", help="local files for the builder")
    args = parser.parse_args(argv)

    name = args.command
    if name == "text" and len(args.files) == 1:
        name = Path(args.files[0]).stem
    if name == "hf":
        name = args.name.rstrip("/").split("/")[-1]
    suffix = "" if args.tokenizer == "byte" else f"-{args.tokenizer}"
    out_dir = Path(args.out_dir or Path("data", name + suffix))
    if args.val_fraction is None:  # the standard library is small: a hundredth of it would be half a dozen files
        args.val_fraction = 0.05 if args.command == "stdlib" else 0.01

    start = time.time()
    if args.command == "stdlib":
        documents, total, unit = stdlib_documents()
        source = f"the standard library of Python {sys.version.split()[0]}"
    elif args.command == "text":
        documents, total, unit = text_documents(args.files, args.column)
        source = " ".join(args.files[:10]) + (f" and {len(args.files) - 10} more" if len(args.files) > 10 else "")
    else:
        _check_target(out_dir, args.force)  # before anything is downloaded
        documents, total, unit = hf_documents(args.name, args.subset, args.split, args.column, args.streaming, args.data_files)
        source = " ".join(filter(None, ["hf", args.name, args.subset, args.split]))
    meta = write_tokens(documents, out_dir, tokenizer=args.tokenizer, val_fraction=args.val_fraction, force=args.force,
                        num_workers=args.num_workers, source=source, total=total, unit=unit)
    print(f"{out_dir}: {meta['documents']:,} documents, {meta['train_tokens']:,} train and {meta['val_tokens']:,} validation tokens "
          f"({args.tokenizer}, {meta['dtype']}) in {time.time() - start:.1f} s")


def cli(argv=None):
    """`main`, with a user's mistakes as one line and exit code 2."""
    try:
        main(argv)
    except (ValueError, OSError) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else _one_line(error)
        print(f"data.py: {told}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("data.py: stopped; nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    cli()
