"""Token files: `open_tokens` reads them, and `write_tokens` makes them from documents.

A token file holds nothing but token ids, uint16 or uint32, with an end-of-text token after each document, and
the tokenizer's beginning-of-text token (BOS) before it if there is one: `data/<name>/{train,val}.bin`,
described by `meta.json` with their SHA-256. Of prompts with answers there is also `{train,val}.mask`: a byte
per token, LABEL where the token is a label, so in an answer or at its end.

Conversations (nanote/chat.py) have the tokens of their chat template and no others. Any of these may stand in
each turn, so the mask says where a conversation begins: FIRST_TOKEN. Then meta.json counts `conversations`.
"""
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from nanote.chat import ChatTemplate, Conversation
from nanote.new_folder import new_folder

LABEL = 1
FIRST_TOKEN = 2  # of a conversation; it is no label
TOKEN_FILES = {"train.bin", "val.bin", "train.mask", "val.mask", "meta.json"}
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
    if LABEL not in mask[1:]:
        raise ValueError(f"{path}: no token is a label; name more examples for data.py sft")
    return mask


def check_tokenizer(data, tokenizer, expected):
    """Raise ValueError unless the tokens of the folder `data` are those of a run's tokenizer, `expected`."""
    from nanote.tokenizers import same_tokenizer  # a new run needs none
    if not same_tokenizer(tokenizer, expected):
        raise ValueError(f"--data {data}: tokenized with {tokenizer}, but the run uses {expected}; name a "
                         "folder tokenized with that")


# ---------------------------------------------------------------- write

def write_tokens(documents, out_dir, *, tokenizer="byte", val_fraction=0.01, force=False, num_workers=None,
                 source="", left_out=None, answers_only=False):
    """Tokenize `documents` into `out_dir`/{train,val}.bin and meta.json, and return the meta dict.

    A document goes to `val` if the hash of its text (of its first piece, or of a conversation's question) as
    a number in [0, 1) is below `val_fraction`: the same document has the same split in every corpus. If that
    leaves a split empty, the last `val_fraction` of the tokens are `val`. After ValueError or OSError
    `out_dir` is as it was.
    source, left_out: what the documents are and what was skipped, for meta.json.
    answers_only: write masks, for documents that are prompts and answers, or conversations.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction {val_fraction}: must be above 0 and below 1, for example 0.01")
    from nanote.tokenizers import get_tokenizer  # training needs none
    encoder = get_tokenizer(tokenizer)
    dtypes = {"bin": np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")}
    if answers_only:
        dtypes["mask"] = np.dtype(np.uint8)
    pool = ThreadPoolExecutor(os.cpu_count() if num_workers is None else num_workers)
    with pool, new_token_folder(out_dir, force) as folder:
        pieces = encoded(documents, encoder, val_fraction, pool)
        counts = write_splits(folder, dtypes, pieces)
        if counts.get("conversations", counts["documents"]) != counts["documents"]:
            raise ValueError(f"{counts['conversations']:,} of {counts['documents']:,} documents are "
                             "conversations, the others prompts and answers; make a folder of each")
        if not counts["documents"]:
            raise ValueError("the corpus is empty: no document holds any text; left out: "
                             f"{dict(left_out or {})}; name files that do")
        if not (counts["train_tokens"] and counts["val_tokens"]):
            full_split = "train" if counts["train_tokens"] else "val"
            cut_end(folder, dtypes, full_split, val_fraction, encoder, counts)
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


class Piece(NamedTuple):
    """A part of a document, such as a prompt or an answer, or its end. Or a whole conversation, tokenized."""

    split: str  # train or val
    is_first: bool  # of its document
    raw: bytes  # UTF-8; empty: the end of the document
    tokens: np.ndarray | None = None  # of a conversation, (n,)
    mask: np.ndarray | None = None  # of these, uint8 (n,)


def pieces_of(documents, val_fraction, encoder):
    """Yield each Piece of each document. A document is a text, an iterable of texts, or one of these with the
    number that decides its split: (text, number in [0, 1)). Or it is a Conversation."""
    template = None
    for document in documents:
        if isinstance(document, Conversation):
            if template is None:
                template = ChatTemplate(encoder, document.where, "name a tokenizer that has one: --tokenizer "
                                        "hf:DIR")
            yield conversation_piece(document, val_fraction, template)
            continue
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
                split = "val" if fraction < val_fraction else "train"
            yield Piece(split, is_first, raw)
        if split is not None:
            yield Piece(split, is_first=False, raw=b"")


def conversation_piece(conversation, val_fraction, template):
    """Return the Piece that is a conversation."""
    text, tokens, is_label = template.tokenize(conversation)
    fraction = hash_fraction(encode_text(conversation.question()))
    split = "val" if fraction < val_fraction else "train"
    mask = np.where(is_label, LABEL, 0).astype(np.uint8)
    mask[0] = FIRST_TOKEN
    return Piece(split, True, encode_text(text), tokens, mask)


def encode_text(text):
    return text.encode("utf-8", errors="replace")


def hash_fraction(raw):
    """Return the hash of bytes as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "big") / 2**48


def encoded(documents, encoder, val_fraction, pool):
    """Yield (piece, its tokens) for each Piece of each document."""
    def encode(piece):
        if piece.tokens is not None:
            return piece, piece.tokens
        tokens = encoder.encode_bytes(piece.raw, piece.is_first) if piece.raw else np.array([encoder.eot])
        if encoder.bos is not None and piece.is_first:
            tokens = np.append(encoder.bos, tokens)
        return piece, tokens

    pieces = pieces_of(documents, val_fraction, encoder)
    while next_pieces := list(islice(pieces, 4 * os.cpu_count())):
        yield from pool.map(encode, next_pieces)


def write_splits(folder, dtypes, pieces):
    """Write the token files, and perhaps masks, of both splits. Return the counts of meta.json.

    dtypes: {suffix of a file, bin or mask: its dtype}. pieces: (piece, its tokens) of all documents.
    """
    counts = dict(documents=0, train_tokens=0, val_tokens=0, train_bytes=0, val_bytes=0)
    with ExitStack() as stack, tqdm(unit="B", unit_scale=True, disable=None, leave=False) as bar:
        files = {}
        for split in ("train", "val"):
            for suffix in dtypes:
                files[split, suffix] = stack.enter_context(open(folder / f"{split}.{suffix}", "wb"))
        for piece, tokens in pieces:
            files[piece.split, "bin"].write(tokens.astype(dtypes["bin"]))
            if piece.mask is not None:
                files[piece.split, "mask"].write(piece.mask)
                counts["conversations"] = counts.get("conversations", 0) + 1
            elif "mask" in dtypes:
                value = 0 if piece.is_first else LABEL  # after the prompt come the answer and the end of text
                files[piece.split, "mask"].write(np.full(len(tokens), value, np.uint8))
            if piece.is_first:
                counts["documents"] += 1
            counts[f"{piece.split}_tokens"] += len(tokens)
            counts[f"{piece.split}_bytes"] += len(piece.raw)
            bar.update(len(piece.raw))
    return counts


def cut_end(folder, dtypes, split, val_fraction, encoder, counts):
    """Move the last tokens of a split, which holds all of them, to val.bin, and adjust `counts`."""
    length = counts[f"{split}_tokens"]
    val_length = max(round(length * val_fraction), 1)
    start = length - min(val_length, length - 1)  # a token is left for train
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
