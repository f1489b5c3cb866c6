"""Byte-level tokenizers: raw bytes, any tiktoken encoding, and the tokenizer.json of a Hugging Face model."""
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np


class Tokenizer:
    """Byte-level tokenizer (ids 0-255 are bytes, 256 is end-of-text) or a tiktoken encoding."""

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
                parts.append(b"" if token in self.stop_tokens else self.token_bytes(token))
            except (KeyError, OverflowError, ValueError):  # padded vocabulary, or an unused id
                parts.append("\ufffd".encode())
        return b"".join(parts)


class HfTokenizer(Tokenizer):
    """The byte-level BPE in the tokenizer.json of a Hugging Face folder, such as Llama 3's or Qwen3's. Its
    name is hf:DIR@CHECKSUM, of that file and the end-of-text id. Special tokens in a text are plain text."""

    def __init__(self, folder):
        import tokenizers
        self.folder, path = Path(os.path.abspath(folder)), Path(os.path.abspath(folder), "tokenizer.json")
        try:
            self.encoding = tokenizers.Tokenizer.from_file(str(path))
            self._find_end_of_text()
            if not isinstance(self.encoding.decoder, tokenizers.decoders.ByteLevel):
                raise ValueError("not a byte-level tokenizer, as those of Llama 3 and Qwen3 are")
        except Exception as error:  # tokenizers raises no other type
            raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); name the "
                             "folder that has it with --tokenizer hf:DIR") from error
        self.encoding.no_truncation()
        self.encoding.no_padding()
        self.encoding.add_special_tokens([self.encoding.id_to_token(self.eot)])  # never found in a text
        self.vocab_size = max(self.encoding.get_vocab(with_added_tokens=True).values()) + 1
        self.added = self.encoding.get_added_tokens_decoder()
        self.byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        self.name = f"hf:{self.folder}@{hashlib.sha256(f'{content} {self.eot}'.encode()).hexdigest()[:12]}"

    def _find_end_of_text(self):
        """Set `eot` from tokenizer_config.json, generation_config.json or config.json, and `stop_tokens`."""
        def read(name, field):
            path = self.folder / name
            value = json.loads(path.read_text(encoding="utf-8")).get(field) if path.is_file() else None
            return value if isinstance(value, list) else [value]

        [token] = read("tokenizer_config.json", "eos_token")
        token = token["content"] if isinstance(token, dict) else token
        generation = read("generation_config.json", "eos_token_id")
        ids = [self.encoding.token_to_id(token or ""), *generation, *read("config.json", "eos_token_id")]
        self.eot = next((number for number in ids if number is not None), None)
        if self.eot is None or self.encoding.id_to_token(self.eot) is None:
            raise ValueError("no end-of-text token; name it as eos_token in tokenizer_config.json")
        self.stop_tokens = {self.eot, *generation} - {None}

    def encode_bytes(self, raw, special_tokens=False):
        """Encode UTF-8 bytes. With `special_tokens`, special tokens in the text become tokens."""
        if self.encoding.encode_special_tokens == special_tokens:  # threads share it: set it only once
            self.encoding.encode_special_tokens = not special_tokens
        encoded = self.encoding.encode_batch_fast([raw.decode("utf-8")], add_special_tokens=False)
        return np.array(encoded[0].ids, dtype=np.uint32)

    def token_bytes(self, token):
        text = self.encoding.id_to_token(token)
        if text is None:
            raise KeyError(token)
        return text.encode() if token in self.added else bytes(self.byte_of[character] for character in text)


def byte_characters():
    """Return the printable character of each byte in a byte-level BPE (GPT-2's bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def same_tokenizer(name, other):
    """Return whether two names mean the same tokenizer. The folders of hf:DIR@CHECKSUM may differ."""
    return name.rpartition("@")[2] == other.rpartition("@")[2]


def without_checksum(name):
    """Return a tokenizer's name as data.py takes it: hf:DIR for hf:DIR@CHECKSUM."""
    return re.sub("@[0-9a-f]{12}$", "", name)


def get_tokenizer(name, vocab_size=None):
    """Return the tokenizer `name`: "byte", a tiktoken encoding, or "hf:DIR". vocab_size: of an embedding."""
    if name == "byte":
        tokenizer = Tokenizer(name)
    elif name.startswith("hf:"):
        folder = without_checksum(name)
        tokenizer = HfTokenizer(folder[3:])
        if name != folder and not same_tokenizer(name, tokenizer.name):
            raise ValueError(f"tokenizer {folder}: has changed; put the old files back, or name their folder "
                             "with --tokenizer hf:DIR")
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
