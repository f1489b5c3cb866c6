"""Tokenizers, token files, and the loader that reads batches from them.

`data.py` writes token files with `write_tokens`; the trainer reads them with `Loader`; `get_tokenizer` turns
text into token ids and back.

A token file holds nothing but token ids, uint16 or uint32, with an end-of-text token after each document:
`data/<name>/{train,val}.bin`, described by `meta.json`. Design:

- Memory stays bounded for any corpus size: documents are streamed, long files in pieces, and few tasks are in
  flight.
- A hash of the text assigns a document to train or val. The same document has the same split in every corpus,
  and adding documents moves none of the others.
- The files appear complete or not at all (temporary folder, then rename). Checksums are verified on opening.
- A batch is a pure function of (seed, index, rank). The loader has no state to save, and a resumed run sees
  the same batches as an uninterrupted one; if it has more or fewer samples a step, the samples that follow.
"""
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Literal, NamedTuple

import numpy as np
from tqdm import tqdm

from nanote import json_files
from nanote.json_files import COUNT

# torch, tiktoken and tokenizers are imported where they are used: worker processes import this module and
# need at most one of the last two.

CHUNK = 1 << 20  # characters per tokenization task; tokens scanned at a time for document boundaries
FILES = {"train.bin", "val.bin", "meta.json"}
META = {  # fields of meta.json; "?": optional
    "dtype": Literal["uint16", "uint32"], "tokenizer": str, "vocab_size": range(1, 2**32 + 1), "eot": COUNT,
    "train_tokens": COUNT, "val_tokens": COUNT, "train_sha256": str, "val_sha256": str,
    "val_bytes?": COUNT, "format?": Literal[1], "sha256?": str}
HOST = platform.node()  # in the name of a temporary folder: several hosts may write to one file system
REMAKE = "make the token files again with data.py --force"


# ---------------------------------------------------------------- tokenizers

class Tokenizer:
    """Byte-level tokenizer (ids 0-255 are bytes, 256 is end-of-text) or a tiktoken encoding.

    `vocab_size` counts every id, including the end-of-text token `eot`. A model's vocabulary is often padded
    beyond it: ids unknown to the tokenizer decode to U+FFFD. Generation ends at any of `stop_tokens`.
    """

    def __init__(self, name, encoding=None):
        self.name, self.encoding = name, encoding
        self.vocab_size = encoding.n_vocab if encoding else 257
        self.eot = encoding.eot_token if encoding else 256
        self.stop_tokens = {self.eot}

    def encode_bytes(self, raw):
        """Encode UTF-8 bytes as a numpy array of ids. Special tokens in the text are plain text."""
        if self.encoding is None:
            return np.frombuffer(raw, dtype=np.uint8)
        return self.encoding.encode_to_numpy(raw.decode("utf-8"), disallowed_special=())

    def encode(self, text):
        """Encode a str as a list of ids, without an end-of-text token."""
        return self.encode_bytes(text.encode("utf-8", errors="replace")).tolist()

    def token_bytes(self, token):
        """Return the bytes of one token, which may be a part of a character. KeyError if there is none."""
        return self.encoding.decode_single_token_bytes(token) if self.encoding else bytes((token,))

    def decode(self, ids):
        """Decode ids to str. Invalid UTF-8 becomes U+FFFD, a stop token the empty string."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        parts = []
        for token in map(int, ids):
            try:
                parts.append(self.token_bytes(token) if token not in self.stop_tokens else b"")
            except (KeyError, OverflowError, ValueError):  # padded vocabulary, or an unused id
                parts.append("\ufffd".encode())
        return b"".join(parts)


class HfTokenizer(Tokenizer):
    """The byte-level BPE in the tokenizer.json of a Hugging Face folder, such as Llama 3's or Qwen3's.

    - The end-of-text token is `eos_token` of tokenizer_config.json, else the first `eos_token_id` of
      generation_config.json, else of config.json. Generation also stops at the other ids of
      generation_config.json.
    - As with tiktoken, a special token in a text is plain text, and nothing is put before a document. Added
      tokens that are not special, such as Qwen3's <think>, are tokens in any text.
    - The name is hf:DIR@CHECKSUM, with an absolute path and the first digits of a SHA-256 of tokenizer.json
      and the end-of-text id: another tokenizer under the same path is refused.
    """

    def __init__(self, folder):
        self.folder = Path(os.path.abspath(folder))
        path = self.folder / "tokenizer.json"
        if not self.folder.is_dir():
            raise ValueError(f"tokenizer hf:{folder}: no such folder; if it has moved, name its new "
                             "place with --tokenizer hf:DIR")
        if not path.is_file():
            raise ValueError(f"tokenizer hf:{folder}: no tokenizer.json in it; name the folder of a Hugging "
                             "Face model with --tokenizer hf:DIR")
        checksum = sha256(path)
        self.encoding, self.vocab_size = _read_tokenizer_json(path, checksum)
        self.added = self.encoding.get_added_tokens_decoder()
        self.eot, self.stop_tokens = self._find_end_of_text()
        checksum = hashlib.sha256(f"{checksum} {self.eot}".encode()).hexdigest()
        self.name = f"hf:{self.folder}@{checksum[:12]}"

    def _find_end_of_text(self):
        """Return the end-of-text id and the set of all ids that end a text."""

        def read(name):
            path = self.folder / name
            return json_files.read(path, EOS, "copy the file again") if path.is_file() else {}

        def ids_in(name):
            ids = read(name).get("eos_token_id")
            return ids if isinstance(ids, list) else [ids]

        token = read("tokenizer_config.json").get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        first, generation = self.encoding.token_to_id(token or ""), ids_in("generation_config.json")
        ids = [number for number in [first, *generation, *ids_in("config.json")] if number is not None]
        if not ids or ids[0] >= self.vocab_size or self.encoding.id_to_token(ids[0]) is None:
            raise ValueError(f"tokenizer hf:{self.folder}: no end-of-text token; name one of its tokens as "
                             "eos_token in tokenizer_config.json")
        self.encoding.add_special_tokens([self.encoding.id_to_token(ids[0])])  # never found in a text
        return ids[0], {ids[0], *generation} - {None}

    def encode_bytes(self, raw, special_tokens=False):
        """Encode UTF-8 bytes. With `special_tokens`, special tokens in the text become tokens."""
        self.encoding.encode_special_tokens = not special_tokens
        encoded = self.encoding.encode_batch_fast([raw.decode("utf-8")], add_special_tokens=False)
        return np.array(encoded[0].ids, dtype=np.uint32)

    def token_bytes(self, token):
        text = self.encoding.id_to_token(token)
        if text is None:
            raise KeyError(token)
        if token in self.added:
            return text.encode()
        byte_of = _byte_of_character()
        return bytes(byte_of[character] for character in text)


HF_NAME = re.compile(r"hf:(.+?)(?:@([0-9a-f]{12}))?", re.DOTALL)
EOS = {  # fields of tokenizer_config.json, generation_config.json and config.json
    "eos_token?": (type(None), str, {"content": str}), "eos_token_id?": (type(None), COUNT, [COUNT])}


def byte_characters():
    """Return the printable character of each byte in a byte-level BPE (GPT-2's bytes_to_unicode)."""
    printable = [
        *range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


@lru_cache
def _byte_of_character():
    return {character: byte for byte, character in enumerate(byte_characters())}


@lru_cache(maxsize=2)  # one load per process; `checksum` notices that the file has changed
def _read_tokenizer_json(path, checksum):
    """Return the tokenizers.Tokenizer in a file and the number of its ids."""
    import tokenizers

    try:
        encoding = tokenizers.Tokenizer.from_file(str(path))
        ids = encoding.get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises no other type
        raise ValueError(f"{path}: cannot be read ({json_files.reason(error)}); copy it again") from error
    is_byte_level = isinstance(encoding.decoder, tokenizers.decoders.ByteLevel)
    if not is_byte_level or not ids:
        raise ValueError(f"{path}: not a byte-level tokenizer; use a model that has one, such as Llama 3 or "
                         "Qwen3")
    encoding.no_truncation()
    encoding.no_padding()
    return encoding, max(ids.values()) + 1


def same_tokenizer(name, other):
    """Return whether two names mean the same tokenizer. The folders of hf:DIR@CHECKSUM may differ."""
    checksums = [match and match[2] for match in map(HF_NAME.fullmatch, (name, other))]
    return name == other or checksums[0] is not None and checksums[0] == checksums[1]


def without_checksum(name: str) -> str:
    """Return a tokenizer's name as data.py takes it: hf:DIR for hf:DIR@CHECKSUM, any other unchanged."""
    match = HF_NAME.fullmatch(name)
    return f"hf:{match[1]}" if match else name


def get_tokenizer(name, rows=None, moved=None):
    """Return the tokenizer `name`: "byte", any tiktoken encoding, or "hf:DIR" (see `HfTokenizer`).

    Args:
        rows: of the embedding that it is used with.
        moved: hf:DIR, the folder that holds the tokenizer `name` now.

    Raises ValueError if the name is unknown, if the encoding cannot be downloaded or read, or if `rows` is
    too small for it.
    """
    tokenizer = _get_tokenizer(moved or name)
    if moved and not same_tokenizer(name, tokenizer.name):
        raise ValueError(f"--tokenizer {moved}: is not {name}, which the model was trained with; name a "
                         "folder with the same tokenizer.json and eos_token")
    if rows is not None and rows < tokenizer.vocab_size:
        raise ValueError(f"tokenizer {name!r} has {tokenizer.vocab_size:,} tokens, but the embedding has "
                         f"{rows:,} rows; it is not the tokenizer that the model was trained with")
    return tokenizer


def _get_tokenizer(name):
    if name == "byte":
        return Tokenizer(name)
    if match := HF_NAME.fullmatch(name):
        tokenizer = HfTokenizer(match[1])
        if match[2] and not same_tokenizer(name, tokenizer.name):
            raise ValueError(f"tokenizer hf:{match[1]}: has changed (its checksum is "
                             f"{tokenizer.name[-12:]}, not {match[2]}); put the old tokenizer.json and "
                             "eos_token back, or name their folder with --tokenizer hf:DIR")
        return tokenizer
    import tiktoken

    known = ["byte", "hf:DIR", *sorted(tiktoken.list_encoding_names())]
    if name not in known:
        raise ValueError(f"unknown tokenizer {name!r}; use one of: {', '.join(known)}")
    try:
        return Tokenizer(name, tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:  # tiktoken downloads the table of an encoding on first use
        raise ValueError(
            f"tokenizer {name!r} could not be fetched ({type(error).__name__}: is there a network?); "
            f"byte needs none; tiktoken knows: {', '.join(known[2:])}"
        ) from error


# ---------------------------------------------------------------- writing token files

class Document(NamedTuple):
    """A text with a number in [0, 1] that takes the place of its hash: related texts share a split."""
    text: str
    split: float


def write_tokens(documents, out_dir, *, tokenizer="byte", val_fraction=0.01, force=False, num_workers=None,
                 source="", total=None, unit="doc", counts=None):
    """Tokenize `documents` into `out_dir`/{train,val}.bin and meta.json, and return the meta dict.

    A document goes to `val` if the hash of its text (of its first piece, if it comes in pieces), as a number
    in [0, 1), is below `val_fraction`; a `Document` brings its own number. If that leaves one split empty,
    the document closest to the threshold changes sides. A corpus of one document is cut: its last
    `val_fraction` of tokens is `val`.

    Args:
        documents: str, iterators of str pieces, or `Document`.
        num_workers: tokenizing processes. None: one per core; for "byte" this process alone, since sending
            the text to a worker takes longer than encoding it.
        source, total, unit: description for meta.json; size and unit of the progress bar.
        counts: what else to note in meta.json.

    Raises ValueError for bad input or an empty corpus, OSError if writing fails. Nothing is left behind then.
    """
    out_dir = Path(out_dir)
    check_options(out_dir, force, val_fraction, num_workers)
    encoder = get_tokenizer(tokenizer)
    tokenizer = encoder.name  # of hf:DIR with an absolute path and a checksum
    dtype = np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    num_workers = num_workers or (1 if tokenizer == "byte" else os.cpu_count())

    target = Path(os.path.realpath(out_dir))  # a link stays, and the folder behind it is replaced
    _remove_stale(target)
    temporary = target.with_name(f"{target.name}.tmp-{HOST}-{os.getpid()}")
    made = [folder for folder in (temporary, *temporary.parents) if not folder.exists()]
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        message = f"{out_dir}: cannot be made ({error.strerror}); name another folder with --out-dir"
        raise OSError(message) from error
    try:
        encoded = _encode_all(_mark_last_pieces(documents), tokenizer, dtype, num_workers)
        bar = tqdm(desc="tokenizing", total=total, unit=unit, unit_scale=True, disable=None, leave=False)
        with bar:
            _write_all(encoded, temporary, encoder.eot, dtype,
                       lambda size, is_last: bar.update(size if unit == "B" else is_last))
        meta = {
            "format": 1, "source": source, "tokenizer": tokenizer, "vocab_size": encoder.vocab_size,
            "eot": encoder.eot, "dtype": dtype.name, "val_fraction": val_fraction,
            **_split(temporary, encoder, dtype, val_fraction), **(counts or {}),
        }
        meta["sha256"] = _meta_checksum(meta)
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        check_target(out_dir, force)  # again: another process may have made it in the meantime
        _replace(target, temporary)
    except BaseException as error:
        _clean_up(temporary, made[1:])
        if isinstance(error, OSError) and error.filename is None:  # a failed write names no file
            raise OSError(f"{out_dir}: could not be written ({error.strerror or error}), nothing is kept; "
                          f"free some space or name another --out-dir") from error
        raise
    return meta


def check_options(out_dir, force, val_fraction, num_workers):
    """Raise ValueError for options that `write_tokens` refuses."""
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction {val_fraction}: must be above 0 and below 1, for example 0.01")
    if num_workers is not None and not 1 <= num_workers <= 1024:
        raise ValueError(f"--num-workers {num_workers}: must be at least 1 and at most 1024, for example "
                         f"{os.cpu_count()}")
    check_target(out_dir, force)


def check_target(out_dir, force):
    """Raise ValueError if `out_dir` must not be written: a file, a folder that cannot be renamed, other
    content, or token files without `force`."""
    target = Path(os.path.realpath(out_dir))
    if os.path.lexists(target) and not target.is_dir():
        raise ValueError(f"{out_dir}: is a file; name a folder with --out-dir")
    if target == Path.cwd() or target.is_mount():
        kind = "a mount point" if target.is_mount() else "the current folder"
        raise ValueError(f"{out_dir}: is {kind}, which cannot be replaced; name a folder in it, "
                         f"such as --out-dir {out_dir / 'tokens'}")
    if target.exists() and not os.access(target.parent, os.W_OK):
        raise ValueError(f"{out_dir}: cannot be replaced, {target.parent} is not writable; name another "
                         "folder with --out-dir")
    content = set(os.listdir(out_dir)) if out_dir.exists() else set()
    if content - FILES:  # --force must not delete what data.py did not write
        raise ValueError(f"{out_dir}: holds other files than token files; name another folder with --out-dir")
    if content and not force:
        raise ValueError(
            f"{out_dir}: exists; overwrite it with --force, or name another folder with --out-dir"
        )


def _replace(folder, temporary):
    """Rename `temporary` to `folder`. What `folder` held is deleted last, and restored on an error."""
    old = temporary.with_name(temporary.name + "-old")
    had_content = folder.exists()
    if had_content:
        os.rename(folder, old)
    try:
        os.rename(temporary, folder)
    except BaseException:
        if had_content:
            os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_stale(target):
    """Delete the temporary folders of processes on this host that were killed."""
    for folder in target.parent.glob(f"{glob.escape(target.name)}.tmp-{glob.escape(HOST)}-*"):
        pid = folder.name.rpartition("-")[2]
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid):
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return pid != os.getpid()  # this process has made none yet


def _clean_up(temporary, parents):
    shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):  # a parent folder stays if another process has put files into it
        for folder in parents:
            folder.rmdir()


# One record per document. hash: the split hash in [0, 1); tokens: with the end-of-text token; bytes: of UTF-8
# text.
DOCUMENT = np.dtype([("hash", "f8"), ("tokens", "i8"), ("bytes", "i8")])


def _write_all(encoded, folder, eot, dtype, progress):
    """Write all tokens, in order, to all.bin, and a `DOCUMENT` record per document to documents.bin."""
    document = None
    with open(folder / "all.bin", "wb") as all_tokens, open(folder / "documents.bin", "wb") as documents:
        for tokens, split, size, is_last in encoded:
            all_tokens.write(tokens)
            if document is None:  # the first piece determines the hash; 1 token is the end of text
                document = np.array([(split, 1, 0)], DOCUMENT)
            document["tokens"] += len(tokens)
            document["bytes"] += size
            if is_last:
                all_tokens.write(np.array([eot], dtype))
                documents.write(document)
                document = None
            progress(size, is_last)


def _split(folder, tokenizer, dtype, val_fraction):
    """Split all.bin into train.bin and val.bin, neither of them empty, and return their part of meta.json.

    This is a second pass because the threshold can be adjusted only when the hash of every document is known.
    """
    if not os.path.getsize(folder / "documents.bin"):
        raise ValueError("the corpus is empty: no document holds any text; name files that do")
    documents = np.memmap(folder / "documents.bin", DOCUMENT, "r")
    tokens = np.memmap(folder / "all.bin", dtype, "r")
    hashes, ends = documents["hash"], np.cumsum(documents["tokens"])
    lowest, highest = hashes.min(), hashes.max()
    if lowest < highest:
        threshold = min(max(val_fraction, np.nextafter(lowest, 1)), highest)
        in_val = hashes < threshold
        ranges = list(zip((ends - documents["tokens"])[in_val], ends[in_val]))
        val_bytes = int(documents["bytes"][in_val].sum())
    else:  # one document, or copies of it: its end is for validation
        val_length = min(max(round(len(tokens) * val_fraction), 1), len(tokens) - 1)
        start = len(tokens) - val_length
        ranges = [(start, len(tokens))]
        val_bytes = len(tokenizer.decode_bytes(tokens[start:]))
    val_tokens = int(sum(end - start for start, end in ranges))

    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        position = 0
        for start, end in [*ranges, (len(tokens), len(tokens))]:
            tokens[position:start].tofile(train)
            tokens[start:end].tofile(val)
            position = end
    meta = {
        "documents": len(documents), "train_tokens": len(tokens) - val_tokens, "val_tokens": val_tokens,
        # bytes of UTF-8 text: to convert a loss to nats per byte
        "train_bytes": int(documents["bytes"].sum()) - val_bytes, "val_bytes": val_bytes,
        "train_sha256": sha256(folder / "train.bin"), "val_sha256": sha256(folder / "val.bin"),
    }
    for name in ("all.bin", "documents.bin"):
        os.remove(folder / name)
    return meta


def _mark_last_pieces(documents):
    """Yield (text, split or None, is_last) for each non-empty piece of each document."""
    for document in documents:
        split = None
        if isinstance(document, Document):
            document, split = document
        parts = filter(None, [document] if isinstance(document, str) else document)
        text = next(parts, None)
        while text is not None:
            following = next(parts, None)
            yield text, split, following is None
            text = following


def _encode_all(pieces, name, dtype, num_workers):
    """Yield (tokens, hash in [0, 1), bytes of text, is_last) for each piece, in order.

    Workers get tasks of about `CHUNK` characters.
    """
    encode = partial(_encode, name=name, dtype=dtype)
    return chain.from_iterable(in_processes(encode, _tasks(pieces), num_workers))


def in_processes(function, tasks, num_workers):
    """Yield function(task) for each task, in order. At most 2 * num_workers tasks are in flight."""
    if num_workers == 1:
        yield from map(function, tasks)
        return
    # spawn: fork would copy the locks of libraries that already run threads here (pyarrow, tokenizers).
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), start_worker)
    try:
        in_flight = deque()
        for task in tasks:
            in_flight.append(pool.submit(function, task))
            if len(in_flight) >= 2 * num_workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool:
        raise ValueError(f"--num-workers {num_workers}: a worker process died, perhaps out of memory; "
                         f"use a smaller --num-workers, such as {num_workers // 2}") from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker():
    """Prepare a worker process: it outlives neither Ctrl-C nor its parent."""
    # Ctrl-C reaches the whole process group; the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent():
    parent_process().join()  # a parent that is killed tells its workers nothing
    os._exit(1)


def _tasks(pieces):
    task, length = [], 0
    for piece in pieces:
        task.append(piece)
        length += len(piece[0])
        if length >= CHUNK:
            yield task
            task, length = [], 0
    yield task


def _encode(task, name, dtype):
    tokenizer, encoded = get_tokenizer(name), []  # tiktoken caches encodings: one load per process
    for text, split, is_last in task:
        # JSON may hold lone surrogates, which UTF-8 cannot encode
        raw = text.encode("utf-8", errors="replace")
        if split is None:
            split = hash_fraction(raw)
        encoded.append((tokenizer.encode_bytes(raw).astype(dtype), split, len(raw), is_last))
    return encoded


def hash_fraction(raw):
    """Return the hash of bytes as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "big") / 2**48


def sha256(path):
    """Return the SHA-256 of a file in hexadecimal. The file may be larger than memory."""
    digest = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _meta_checksum(meta):
    """Return the SHA-256 of a meta dict without its own "sha256" entry."""
    text = json.dumps({key: value for key, value in meta.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- reading token files

def open_tokens(folder, split, verify=True):
    """Return the tokens of `split` ("train" or "val") as a read-only memory map, and meta.json as a dict.

    Raises ValueError unless the length of the file and, with `verify`, its SHA-256 match meta.json. Verifying
    takes about a second per gigabyte.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split {split!r}: must be train or val")
    path, meta_path = Path(folder, f"{split}.bin"), Path(folder, "meta.json")
    if not meta_path.exists():
        raise ValueError(
            f"{folder}: no token files here (no meta.json); make some, for example with: "
            "python data.py stdlib"
        )
    meta = json_files.read(meta_path, META, REMAKE)
    dtype = np.dtype(meta["dtype"]).newbyteorder("<")
    length, checksum, vocab_size = meta[f"{split}_tokens"], meta[f"{split}_sha256"], meta["vocab_size"]
    has_checksum = {"format", "sha256"} & set(meta)  # files of the first version have neither
    if has_checksum and meta.get("sha256") != _meta_checksum(meta):
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
    """Batches of micro_batch_size x seq_len tokens, as a pure function of (seed, index, rank, world_size).

    An epoch visits each window of seq_len + 1 tokens once. Windows overlap by one token: the last label of a
    window is the first input of the next. Philox with the key (seed, epoch) determines their order and, for
    `train`, the starting offset. Sample first_sample(index) + rank * micro_batch_size + row selects the
    window, so ranks see different data and no sample is skipped; a resumed run says with `start_at` which is
    next. A thread prefetches the next batch, into pinned memory for a GPU.

    With `pack_documents` a batch also says where its documents begin (cu_seqlens), so that attention can be
    confined to them. A document begins with the end-of-text token before it, as in generation: that token
    predicts its first token, and its last token predicts the next end of text.

    Args:
        seq_len: in tokens.
        verify: check the checksum of the file. Default: on rank 0 only, so that a shared disk is read once.

    Raises ValueError if the split holds fewer than seq_len + 1 tokens.
    """

    def __init__(self, folder, split, *, seq_len, micro_batch_size, seed=0, rank=0, world_size=1,
                 device="cpu", verify=None, pack_documents=False):
        import torch  # here: worker processes of write_tokens import this module without torch

        minimums = (("seq_len", seq_len, 1), ("micro_batch_size", micro_batch_size, 1), ("seed", seed, 0))
        for name, value, minimum in minimums:
            if value < minimum:
                raise ValueError(f"{name} {value}: must be at least {minimum}")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} of world_size {world_size}: must be at least 0 and below world_size"
            )
        verify = rank == 0 if verify is None else verify
        self.tokens, self.meta = open_tokens(folder, split, verify=verify)
        length, vocab_size = len(self.tokens), self.meta["vocab_size"]
        if verify and self.tokens.max() >= vocab_size:
            raise ValueError(f"{Path(folder, split)}.bin: holds the token {self.tokens.max()}, but "
                             f"vocab_size in meta.json is {vocab_size}; {REMAKE}")
        if length < seq_len + 1:
            fitting = (length - 1) // 16 * 16  # FP8 needs a multiple of 16 tokens
            shorter = f" or --seq-len {fitting}" if fitting else ""
            raise ValueError(f"{Path(folder, split)}.bin: {length} tokens, but a context of {seq_len} needs "
                             f"{seq_len + 1}; use a larger corpus{shorter}")
        self.split, self.seq_len, self.micro_batch_size = split, seq_len, micro_batch_size
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.pack_documents, self.most_documents = pack_documents, 0
        if pack_documents:
            self.most_documents = micro_batch_size * most_documents(self.tokens, self.meta["eot"], seq_len)
        self.device = torch.device(device)
        # train: one window less, so that any starting offset gives the same number of windows
        self.num_windows = max(length // seq_len - 1, 1) if split == "train" else (length - 1) // seq_len
        self._epoch = lru_cache(2)(self._epoch)  # a batch may span two epochs
        self._ahead = (None, None)  # (index, future) of the prefetched batch
        self.skips = (0, 0)  # (batch, samples to skip from it on), see start_at
        self.seconds_waited = 0.0  # for batches that were not read yet
        initializer = ()
        if self.device.type == "cuda":
            # a new thread starts on GPU 0, where pinning memory would create another CUDA context
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            initializer = (torch.cuda.set_device, (index,))
        self._thread = ThreadPoolExecutor(1, "loader", *initializer)

    def first_sample(self, index) -> int:
        """Return the number of samples of all ranks before batch `index`, counted from the run's first."""
        begin, skipped = self.skips
        return index * self.world_size * self.micro_batch_size + (skipped if index >= begin else 0)

    def start_at(self, index, sample) -> None:
        """Let batch `index` begin with this sample: a resumed run may have another number of them a step."""
        self.skips = (index, sample - index * self.world_size * self.micro_batch_size)
        self._ahead = (None, None)  # read without skipping

    def batch(self, index):
        """Return batch `index`, which is step * grad_accum + micro_step, as (input_ids, labels).

        Both are int64 (micro_batch_size, seq_len); labels[:, t] is the token after input_ids[:, t]. With
        pack_documents also cu_seqlens, int32 (most_documents + 1,): the start of each document or part of one
        in input_ids.flatten(), padded with the length of that tensor, so that its shape is the same for every
        batch.
        """
        if index < 0:
            raise ValueError(f"batch {index}: must be at least 0")
        expected, future = self._ahead
        if expected != index:
            future = self._thread.submit(self._read, index)
        started = time.perf_counter()
        windows = future.result()
        self.seconds_waited += time.perf_counter() - started
        self._ahead = (index + 1, self._thread.submit(self._read, index + 1))
        packing = [self._cu_seqlens(windows)] if self.pack_documents else []
        windows, *packing = (tensor.to(self.device, non_blocking=True) for tensor in (windows, *packing))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), *packing

    def evaluation(self, tokens):
        """Yield (batch, number of labels that count) for `tokens` tokens of the split, in whole windows.

        The windows are spread evenly over the split, and all of it is used if it holds no more than that.
        They depend on seq_len and on nothing else: every seed, micro_batch_size and world_size evaluates the
        same labels. A batch is one of `batch`'s shape; labels that do not count are -100. Every rank gets its
        part of the windows and the same number of batches, perhaps some in which nothing counts.
        """
        total = (len(self.tokens) - 2) // self.seq_len + 1  # the last one may have fewer labels
        count = min((tokens - 1) // self.seq_len + 1, total)
        batches = (count - 1) // (self.micro_batch_size * self.world_size) + 1
        for index in range(batches):
            first = (index * self.world_size + self.rank) * self.micro_batch_size
            numbers = range(first, first + self.micro_batch_size)
            starts = [min(number, count - 1) * total // count * self.seq_len for number in numbers]
            # The last window of the split ends with its last token; its first labels are another window's.
            moved = [min(start, len(self.tokens) - 1 - self.seq_len) for start in starts]
            windows = self._windows(moved)
            inputs, labels = windows[:, :-1].contiguous(), windows[:, 1:].clone()  # changed below
            for row, number in enumerate(numbers):
                labels[row, :starts[row] - moved[row] if number < count else None] = -100
            packing = [self._cu_seqlens(windows)] if self.pack_documents else []
            batch = [tensor.to(self.device, non_blocking=True) for tensor in (inputs, labels, *packing)]
            yield batch, int((labels != -100).sum())

    def close(self):
        self._thread.shutdown(cancel_futures=True)

    def _read(self, index):
        """Return the windows of batch `index`: int64 (micro_batch_size, seq_len + 1)."""
        first, starts = self.first_sample(index) + self.rank * self.micro_batch_size, []
        for sample in range(first, first + self.micro_batch_size):
            offset, order = self._epoch(sample // self.num_windows)
            starts.append(offset + order[sample % self.num_windows] * self.seq_len)
        return self._windows(starts)

    def _windows(self, starts):
        """Return the windows that begin with the tokens `starts`: int64 (len(starts), seq_len + 1)."""
        import torch

        positions = np.array(starts)[:, None] + np.arange(self.seq_len + 1)
        windows = torch.from_numpy(self.tokens[positions].astype(np.int64))
        return windows.pin_memory() if self.device.type == "cuda" else windows

    def _cu_seqlens(self, windows):
        import torch

        starts = document_starts(windows[:, :-1], self.meta["eot"])
        padded = torch.full(
            (self.most_documents + 1,), windows[:, :-1].numel(), dtype=torch.int32,
            pin_memory=self.device.type == "cuda",
        )
        padded[:len(starts)] = starts
        return padded

    def _epoch(self, epoch):
        """Return (starting offset in tokens, order of the windows).

        Both come from raw bits: numpy guarantees the output of its bit generators, not of its shuffles.
        """
        bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.num_windows + 1)
        room = min(len(self.tokens) - self.num_windows * self.seq_len, self.seq_len)
        offset = int(bits[0] % np.uint64(room)) if self.split == "train" else 0
        return offset, np.argsort(bits[1:], kind="stable")


def document_starts(input_ids, eot):
    """Return where documents or parts of one begin in input_ids.flatten(), for input_ids (B, S)."""
    is_start = input_ids == eot
    is_start[:, 0] = True  # a row starts a sequence, even inside a document
    return is_start.flatten().nonzero().flatten()


def most_documents(tokens, eot, seq_len):
    """Return the largest number of documents, whole or partial, in any seq_len consecutive tokens.

    Reads the file once; takes 8 bytes of memory per document.
    """
    starts = range(0, len(tokens), CHUNK)
    ends = np.concatenate([start + np.flatnonzero(tokens[start : start + CHUNK] == eot) for start in starts])
    # The first token of a window always starts a document or a part of one. Each end-of-text token among the
    # seq_len - 1 tokens after it starts another.
    counts = np.searchsorted(ends, ends + seq_len - 1) - np.arange(len(ends))
    return 1 + int(counts.max(initial=0))
