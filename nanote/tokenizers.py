"""Tokenizers that can encode any bytes: raw bytes, any tiktoken encoding, and the tokenizer.json of a Hugging
Face model."""
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np


class Tokenizer:
    """Byte-level tokenizer (0-255 are bytes, 256 is end-of-text) or a tiktoken encoding. A document begins
    with `start`: the token that the tokenizer puts before a text (`bos`), else end-of-text."""

    def __init__(self, name, encoding=None):
        self.name = name
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab if encoding else 257
        self.eot = encoding.eot_token if encoding else 256
        self.stop_tokens = {self.eot}
        self.bos = None
        self.start = self.eot
        self.prepends_space = False

    def encode_bytes(self, raw, is_first=True):
        """Encode UTF-8 bytes as a numpy array of ids. Special tokens in the text are plain text.
        is_first: the bytes begin a document."""
        if self.encoding is None:
            return np.frombuffer(raw, dtype=np.uint8)
        return self.encoding.encode_to_numpy(raw.decode("utf-8"), disallowed_special=())

    def encode(self, text):
        """Encode a str as a list of ids, without tokens before or after it."""
        return self.encode_bytes(text.encode("utf-8", errors="replace")).tolist()

    def token_bytes(self, token):
        """Return the bytes of one token, which may be a part of a character. KeyError if there is none."""
        if self.encoding is None:
            return bytes((token,))
        return self.encoding.decode_single_token_bytes(token)

    def decode(self, ids, is_first=False):
        """Decode ids to str. Invalid UTF-8 becomes U+FFFD, BOS or a stop token the empty string.
        is_first: the ids begin a text; the space that the tokenizer prepends to it is left out."""
        text = self.decode_bytes(ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if is_first and self.prepends_space else text

    def decode_bytes(self, ids):
        """Decode ids to bytes, without BOS and stop tokens."""
        hidden = {self.bos, *self.stop_tokens}
        parts = []
        for token in map(int, ids):
            if token in hidden:
                continue
            try:
                parts.append(self.token_bytes(token))
            except (KeyError, OverflowError, ValueError):  # padded vocabulary, or an unused id
                parts.append("\ufffd".encode())
        return b"".join(parts)


class HfTokenizer(Tokenizer):
    """The BPE in the tokenizer.json of a Hugging Face folder: a byte-level one, such as Llama 3's or Qwen3's,
    or SentencePiece with a token for each byte, such as Llama 2's, which puts a space before a text.

    Its name is hf:DIR@CHECKSUM, of that file and the end-of-text id. Special tokens in a text are plain text.
    """

    def __init__(self, folder):
        import tokenizers
        self.folder = Path(os.path.abspath(folder))
        path = self.folder / "tokenizer.json"
        try:
            raw = path.read_bytes()
            self.encoding = tokenizers.Tokenizer.from_buffer(raw)
            self.encoding.no_truncation()
            self.encoding.no_padding()
            names = self._read("tokenizer_config.json")
            self._set_end_of_text(names)
            self._set_start(names)
            self.is_byte_level = isinstance(self.encoding.decoder, tokenizers.decoders.ByteLevel)
            if not self.is_byte_level and not json.loads(raw)["model"].get("byte_fallback"):
                raise ValueError("neither byte-level, as those of Llama 3 and Qwen3, nor SentencePiece with "
                                 "byte_fallback, as that of Llama 2")
        except Exception as error:  # tokenizers raises no other type
            raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); name the "
                             "folder that has it with --tokenizer hf:DIR") from error
        for token in {self.start, self.eot}:
            self.encoding.add_special_tokens([self.encoding.id_to_token(token)])  # never found in a text
        self.inner = self.encoding if self.is_byte_level else without_prefix(self.encoding)
        self.prepends_space = self.inner.encode("a").ids != self.encoding.encode("a").ids
        self.vocab_size = max(self.encoding.get_vocab(with_added_tokens=True).values()) + 1
        self.added = self.encoding.get_added_tokens_decoder()
        self.byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        content = hashlib.sha256(raw).hexdigest()
        checksum = hashlib.sha256(f"{content} {self.eot}".encode()).hexdigest()
        self.name = f"hf:{self.folder}@{checksum[:12]}"

    def _set_end_of_text(self, names):
        """Set `eot`, which the first of three files names: tokenizer_config.json, whose content is `names`,
        generation_config.json or config.json."""
        generation_ids = end_of_text_ids(self._read("generation_config.json"))
        model_ids = end_of_text_ids(self._read("config.json"))
        ids = [self._token_id(names.get("eos_token")), *generation_ids, *model_ids]
        ids = [number for number in ids if number is not None]
        if not ids or self.encoding.id_to_token(ids[0]) is None:
            raise ValueError("no end-of-text token; name it as eos_token in tokenizer_config.json")
        self.eot = ids[0]
        self.stop_tokens = {self.eot, *generation_ids}

    def _set_start(self, names):
        """Set `bos`: the token that the post-processor puts before a text, or bos_token of
        tokenizer_config.json if add_bos_token is true there."""
        text = self.encoding.encode("a")
        before = text.ids[:text.special_tokens_mask.index(0)]
        if len(before) > 1:
            raise ValueError(f"puts {len(before)} tokens before a text; the kit's token files have one")
        bos = None
        if before:
            bos = before[0]
        elif names.get("add_bos_token"):
            bos = self._token_id(names.get("bos_token"))
        self.bos = None if bos == self.eot else bos
        self.start = self.eot if self.bos is None else self.bos

    def _read(self, name):
        """Return the content of a JSON file of the folder, {} without one."""
        path = self.folder / name
        return json.loads(path.read_bytes()) if path.is_file() else {}

    def _token_id(self, token):
        """Return the id of a token that tokenizer_config.json names, a str or a dict; None if it has none."""
        if isinstance(token, dict):
            token = token["content"]
        return self.encoding.token_to_id(token or "")

    def encode_bytes(self, raw, is_first=True, special_tokens=False):
        """Encode UTF-8 bytes. With `special_tokens`, special tokens in the text become tokens."""
        encoding = self.encoding if is_first else self.inner
        if encoding.encode_special_tokens == special_tokens:  # threads share it: set it only once
            encoding.encode_special_tokens = not special_tokens
        encoded = encoding.encode_batch_fast([raw.decode("utf-8")], add_special_tokens=False)
        return np.array(encoded[0].ids, dtype=np.uint32)

    def token_bytes(self, token):
        text = self.encoding.id_to_token(token)
        if text is None:
            raise KeyError(token)
        if token in self.added:
            return text.encode()
        if not self.is_byte_level:
            match = re.fullmatch("<0x([0-9A-F]{2})>", text)
            return bytes.fromhex(match[1]) if match else text.replace("▁", " ").encode()
        return bytes(self.byte_of[character] for character in text)


def without_prefix(encoding):
    """Return a copy of a SentencePiece tokenizer that prepends no space: for text inside a document."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    inner = Tokenizer.from_str(encoding.to_str())
    if isinstance(inner.normalizer, normalizers.Sequence):
        others = [part for part in inner.normalizer if not isinstance(part, normalizers.Prepend)]
        inner.normalizer = normalizers.Sequence(others)
    if isinstance(inner.pre_tokenizer, pre_tokenizers.Metaspace):
        inner.pre_tokenizer.prepend_scheme = "never"
    return inner


def end_of_text_ids(config):
    """Return the ids in the field eos_token_id of a model's or a generation config: none, one or several."""
    ids = config.get("eos_token_id")
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def byte_characters():
    """Return the printable character of each byte in a byte-level BPE (GPT-2's bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    characters = []
    others = 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:  # the next character above those of one byte
            characters.append(chr(256 + others))
            others += 1
    return characters


def same_tokenizer(name, other):
    """Return whether two names mean the same tokenizer. The folders of hf:DIR@CHECKSUM may differ."""
    return name.rpartition("@")[2] == other.rpartition("@")[2]


def get_tokenizer(name, vocab_size=None):
    """Return the tokenizer `name`: "byte", a tiktoken encoding, or "hf:DIR". vocab_size: of an embedding."""
    if name == "byte":
        tokenizer = Tokenizer(name)
    elif name.startswith("hf:"):
        folder = re.sub("@[0-9a-f]{12}$", "", name)  # without the checksum, if there is one
        tokenizer = HfTokenizer(folder.removeprefix("hf:"))
        if name != folder and not same_tokenizer(name, tokenizer.name):
            raise ValueError(f"tokenizer {folder}: has changed; put the old files back, or pass their hf:DIR")
    else:
        import tiktoken
        try:
            tokenizer = Tokenizer(name, tiktoken.get_encoding(name))  # downloads its table on first use
        except (OSError, ValueError) as error:
            raise ValueError(f"tokenizer {name!r}: unknown, or cannot be downloaded; use byte, hf:DIR or one "
                             f"of {', '.join(sorted(tiktoken.list_encoding_names()))}") from error
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ValueError(f"tokenizer {name!r}: has {tokenizer.vocab_size:,} tokens, but the embedding has "
                         f"{vocab_size:,} rows; name the tokenizer that the model was trained with")
    return tokenizer
