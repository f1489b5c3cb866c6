"""Token files: `open_tokens` reads them, and `write_tokens` makes them from documents.

A token file holds nothing but token ids, uint16 or uint32, with an end-of-text token after each document, and
the tokenizer's beginning-of-text token (BOS) before it if there is one: `data/<name>/{train,val}.bin`,
described by `meta.json` with their SHA-256. Of prompts with answers there is also `{train,val}.mask`: a byte
per token, LABEL where the token is a label, so in an answer or at its end.

Conversations (nanote/chat.py) have the tokens of their chat template and no others. A template may repeat BOS
in every turn, so no token id marks the start of a conversation; the mask does (FIRST_TOKEN). Then meta.json
counts `conversations`.
"""
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from nanote.chat import ChatTemplate, Conversation, shorten
from nanote.new_folder import new_folder
from nanote.tokenizers import get_tokenizer, same_tokenizer

LABEL = 1
FIRST_TOKEN = 2  # of a conversation; it is no label
TOKEN_FILES = {"train.bin", "val.bin", "train.mask", "val.mask", "meta.json"}
OF_EACH_KIND = "make a folder of token files of each kind"
REMAKE = "make the token files again with data.py --force"


def sha256(path):
    """Return the SHA-256 of a file that is not empty, in hexadecimal."""
    return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()


def meta_checksum(meta):
    """Return the SHA-256 of a meta dict without its own "sha256" entry."""
    text = json.dumps({key: meta[key] for key in meta if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- read

def open_tokens(folder, split, verify=True):
    """Return the tokens of `split` as a memory map, and meta.json. verify: check the SHA-256, which takes a
    second a gigabyte."""
    path = Path(folder, f"{split}.bin")
    meta_path = Path(folder, "meta.json")
    if not meta_path.is_file():
        raise ValueError(f"{folder}: no token files here; make some, for example with: python data.py stdlib")
    try:
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        count = meta[f"{split}_tokens"]
        checksum = meta[f"{split}_sha256"]
        is_altered = "sha256" in meta and meta["sha256"] != meta_checksum(meta)  # the first version has none
        if is_altered or not 0 <= meta["eot"] < meta["vocab_size"]:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{meta_path}: damaged; {REMAKE}") from None
    tokens = open_array(path, dtype, count, checksum, verify)
    if verify and "sha256" not in meta and tokens.max() >= meta["vocab_size"]:
        raise ValueError(f"{path}: holds the token {tokens.max()}, but vocab_size in meta.json is "
                         f"{meta['vocab_size']}; {REMAKE}")
    return tokens, meta


def open_array(path, dtype, count, checksum, verify):
    """Return a file of `count` numbers as a memory map. verify: compare its SHA-256 with `checksum`."""
    size = count * dtype.itemsize
    is_intact = size > 0 and path.stat().st_size == size
    if is_intact and verify:
        is_intact = sha256(path) == checksum
    if not is_intact:
        raise ValueError(f"{path}: empty, truncated or altered: {path.stat().st_size} bytes, but meta.json "
                         f"says {size} bytes with SHA-256 {checksum}; {REMAKE}")
    return np.memmap(path, dtype, "r")


def open_mask(folder, split, meta, verify):
    """Return the mask of `split` as a memory map: LABEL, FIRST_TOKEN or 0 for each token. Return None if all
    tokens are labels."""
    checksum = meta.get(f"{split}_mask_sha256")
    if checksum is None:
        return None
    path = Path(folder, f"{split}.mask")
    mask = open_array(path, np.dtype(np.uint8), meta[f"{split}_tokens"], checksum, verify)
    if not has_labels(mask):
        raise ValueError(f"{path}: no token is a label; name more examples for data.py sft")
    return mask


def has_labels(mask):
    return LABEL in mask[1:]  # the first token of a split is predicted from nothing


def check_tokenizer(data, tokenizer, expected):
    """Raise ValueError unless the tokens of the folder `data` are those of a run's tokenizer, `expected`."""
    if not same_tokenizer(tokenizer, expected):
        raise ValueError(f"--data {data}: tokenized with {tokenizer}, but the run uses {expected}; name a "
                         "folder tokenized with that")


# ---------------------------------------------------------------- write

def write_tokens(documents, out_dir, *, tokenizer="byte", val_fraction=0.01, force=False, num_workers=None,
                 source="", left_out=None, answers_only=False):
    """Tokenize `documents` into `out_dir`/{train,val}.bin and meta.json, and return the meta dict.

    A document goes to `val` if the hash of its text (of its first piece, or of a conversation's first prompt)
    as a number in [0, 1) is below `val_fraction`: the same document has the same split in every corpus. If
    that leaves a split empty, the last `val_fraction` of the tokens are `val`, in whole conversations.
    After ValueError or OSError `out_dir` is as it was.
    source, left_out: what the documents are and what was skipped, for meta.json.
    answers_only: write masks, for documents that are prompts and answers, or conversations.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction {val_fraction}: must be above 0 and below 1, for example 0.01")
    encoder = get_tokenizer(tokenizer)
    dtypes = {"bin": np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")}
    if answers_only:
        dtypes["mask"] = np.dtype(np.uint8)
    pool = ThreadPoolExecutor(os.cpu_count() if num_workers is None else num_workers)
    with pool, new_token_folder(out_dir, force) as folder:
        documents = iter(documents)
        first = list(islice(documents, 1))  # it decides which kind all are
        documents = chain(first, documents)
        is_chat = isinstance(first[0], Conversation) if first else False
        if is_chat:
            template = ChatTemplate(encoder, first[0].where, "name a tokenizer that has one: --tokenizer "
                                    "hf:DIR")
            parts = tokenize_conversations(documents, template, val_fraction, pool)
        else:
            parts = tokenize_texts(documents, encoder, val_fraction, pool)
        counts = write_splits(folder, dtypes, parts)
        if not counts["documents"]:
            raise ValueError("the corpus is empty: no document holds any text; left out: "
                             f"{dict(left_out or {})}; name files that do")
        if is_chat:
            counts["conversations"] = counts["documents"]
        if not (counts["train_tokens"] and counts["val_tokens"]):
            full_split = "train" if counts["train_tokens"] else "val"
            cut_end(folder, dtypes, full_split, val_fraction, encoder, counts)
            if answers_only:
                check_labels(folder, val_fraction)
        return write_meta(folder, encoder, dtypes["bin"], source=source, val_fraction=val_fraction, **counts,
                          left_out=dict(left_out or {}))


def new_token_folder(out_dir, force):
    """Return the context `new_folder` for token files. force: it may replace a folder of token files."""
    def check_replaceable(names):
        if names - TOKEN_FILES:  # --force must not delete what data.py did not write
            raise ValueError(f"{out_dir}: holds other files than token files; name another --out-dir")
        if not force:
            raise ValueError(f"{out_dir}: exists; overwrite it with --force, or name another --out-dir")

    return new_folder(out_dir, "name another --out-dir", check_replaceable)


class TokenizedPart(NamedTuple):
    """The tokens of a part of a document, such as a prompt or an answer, or of a whole conversation."""

    split: str  # train or val
    is_first: bool  # of its document
    num_bytes: int  # of its text, in UTF-8
    tokens: np.ndarray  # (n,)
    mask: np.ndarray  # uint8 (n,): LABEL, FIRST_TOKEN or 0


class Piece(NamedTuple):
    """A part of a document that is text, or its end."""

    split: str  # train or val
    is_first: bool  # of its document
    raw: bytes  # UTF-8; empty: the end of the document


def tokenize_texts(documents, encoder, val_fraction, pool):
    """Yield the TokenizedPart of each Piece of each document."""
    def tokenize(piece):
        tokens = encoder.encode_bytes(piece.raw, piece.is_first) if piece.raw else np.array([encoder.eot])
        if encoder.bos is not None and piece.is_first:
            tokens = np.append(encoder.bos, tokens)
        value = 0 if piece.is_first else LABEL  # after the prompt come the answer and the end of text
        mask = np.full(len(tokens), value, np.uint8)
        return TokenizedPart(piece.split, piece.is_first, len(piece.raw), tokens, mask)

    yield from map_in_pool(pool, tokenize, pieces_of(documents, val_fraction))


def pieces_of(documents, val_fraction):
    """Yield each Piece of each document. A document is a text, an iterable of texts, or one of these with the
    number that decides its split: (text, number in [0, 1))."""
    for document in documents:
        if isinstance(document, Conversation):
            raise ValueError(f"{document.where}: the files before hold no conversations; {OF_EACH_KIND}")
        fraction = None  # the hash of the first piece
        if isinstance(document, tuple):
            document, fraction = document
        texts = [document] if isinstance(document, str) else document
        split = None
        for text in texts:
            if not text:
                continue
            raw = encode_text(text)
            is_first = split is None
            if is_first:
                if fraction is None:
                    fraction = hash_fraction(raw)
                split = split_of(fraction, val_fraction)
            yield Piece(split, is_first, raw)
        if split is not None:
            yield Piece(split, is_first=False, raw=b"")


def tokenize_conversations(documents, template, val_fraction, pool):
    """Yield the TokenizedPart that is each Conversation."""
    def tokenize(conversation):
        if not isinstance(conversation, Conversation):
            raise ValueError(f"{shorten(conversation)}: the files before hold conversations; {OF_EACH_KIND}")
        text, tokens, is_label = template.tokenize(conversation)
        fraction = hash_fraction(encode_text(conversation.first_prompt()))
        mask = np.where(is_label, LABEL, 0).astype(np.uint8)
        mask[0] = FIRST_TOKEN
        return TokenizedPart(split=split_of(fraction, val_fraction), is_first=True,
                             num_bytes=len(encode_text(text)), tokens=tokens, mask=mask)

    yield from map_in_pool(pool, tokenize, documents)


def map_in_pool(pool, function, values):
    """Yield function(value) of each value, in order. Few values are read ahead."""
    values = iter(values)
    while next_values := list(islice(values, 4 * os.cpu_count())):
        yield from pool.map(function, next_values)


def encode_text(text):
    return text.encode("utf-8", errors="replace")


def hash_fraction(raw):
    """Return the hash of bytes as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "big") / 2**48


def split_of(fraction, val_fraction):
    return "val" if fraction < val_fraction else "train"


def write_splits(folder, dtypes, parts):
    """Write the token files, and perhaps masks, of both splits. Return the counts of meta.json.

    dtypes: {suffix of a file, bin or mask: its dtype}. parts: each TokenizedPart of all documents.
    """
    counts = dict(documents=0, train_tokens=0, val_tokens=0, train_bytes=0, val_bytes=0)
    with ExitStack() as stack, tqdm(unit="B", unit_scale=True, disable=None, leave=False) as bar:
        files = {}
        for split in ("train", "val"):
            for suffix in dtypes:
                files[split, suffix] = stack.enter_context(open(folder / f"{split}.{suffix}", "wb"))
        for part in parts:
            files[part.split, "bin"].write(part.tokens.astype(dtypes["bin"]))
            if "mask" in dtypes:
                files[part.split, "mask"].write(part.mask)
            if part.is_first:
                counts["documents"] += 1
            counts[f"{part.split}_tokens"] += len(part.tokens)
            counts[f"{part.split}_bytes"] += part.num_bytes
            bar.update(part.num_bytes)
    return counts


def cut_end(folder, dtypes, split, val_fraction, encoder, counts):
    """Move the last tokens of a split, which holds all of them, to val.bin, and adjust `counts`."""
    length = counts[f"{split}_tokens"]
    val_length = max(round(length * val_fraction), 1)
    start = length - min(val_length, length - 1)  # a token is left for train
    if "conversations" in counts:
        start = conversation_start(np.fromfile(folder / f"{split}.mask", dtypes["mask"]), start)
    for suffix, dtype in dtypes.items():
        os.replace(folder / f"{split}.{suffix}", folder / f"train.{suffix}")
        values = np.memmap(folder / f"train.{suffix}", dtype, "r")
        values[start:].tofile(folder / f"val.{suffix}")
        os.truncate(folder / f"train.{suffix}", start * dtype.itemsize)
    val_tokens = np.fromfile(folder / "val.bin", dtypes["bin"])
    num_bytes = counts["train_bytes"] + counts["val_bytes"]
    val_bytes = len(encoder.decode_bytes(val_tokens))
    counts |= {"train_tokens": start, "val_tokens": length - start,
               "train_bytes": num_bytes - val_bytes, "val_bytes": val_bytes}


def check_labels(folder, val_fraction):
    """Raise ValueError unless each split has a label, which the cut of prompts and answers may not leave."""
    for split in ("train", "val"):
        if not has_labels(np.fromfile(folder / f"{split}.mask", np.uint8)):
            raise ValueError(f"the {split} split has no token that is a label; name more examples, or use "
                             f"another --val-fraction than {val_fraction}, for example 0.3")


def conversation_start(mask, position):
    """Return where the conversation at `position` begins, or the second one if that is the first."""
    starts = np.flatnonzero(mask == FIRST_TOKEN)
    if len(starts) == 1:
        raise ValueError("one conversation cannot be split; name two or more, for training and validation")
    number = np.searchsorted(starts, position, side="right") - 1
    return int(starts[max(number, 1)])


def write_meta(folder, encoder, dtype, **others):
    """Write meta.json of the files in `folder`, and return the meta dict."""
    meta = {"format": 1, "tokenizer": encoder.name, "vocab_size": encoder.vocab_size, "eot": encoder.eot,
            "dtype": dtype.name}
    if encoder.bos is not None:
        meta["bos"] = encoder.bos
    meta |= others
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(".bin").replace(".", "_")  # train, train_mask
        meta[f"{name}_sha256"] = sha256(path)
    meta["sha256"] = meta_checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta
