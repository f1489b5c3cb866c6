"""Byte-level tokenizers: raw bytes, any tiktoken encoding, and the tokenizer.json of a Hugging Face model."""
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
        self.name, self.encoding = name, encoding
        self.vocab_size = encoding.n_vocab if encoding else 257
        self.eot = encoding.eot_token if encoding else 256
        self.stop_tokens, self.bos, self.start = {self.eot}, None, self.eot

    def encode_bytes(self, raw):
        """Encode UTF-8 bytes as a numpy array of ids. Special tokens in the text are plain text."""
        if self.encoding is None:
            return np.frombuffer(raw, dtype=np.uint8)
        return self.encoding.encode_to_numpy(raw.decode("utf-8"), disallowed_special=())

    def encode(self, text):
        """Encode a str as a list of ids, without tokens before or after it."""
        return self.encode_bytes(text.encode("utf-8", errors="replace")).tolist()

    def token_bytes(self, token):
        """Return the bytes of one token, which may be a part of a character. KeyError if there is none."""
        return self.encoding.decode_single_token_bytes(token) if self.encoding else bytes((token,))

    def decode(self, ids):
        """Decode ids to str. Invalid UTF-8 becomes U+FFFD, BOS or a stop token the empty string."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        parts, hidden = [], {self.bos, *self.stop_tokens}
        for token in map(int, ids):
            try:
                parts.append(b"" if token in hidden else self.token_bytes(token))
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
            raw = path.read_bytes()
            self.encoding = tokenizers.Tokenizer.from_buffer(raw)
            self.encoding.no_truncation()
            self.encoding.no_padding()
            self._find_special_tokens()
            if not isinstance(self.encoding.decoder, tokenizers.decoders.ByteLevel):
                raise ValueError("not a byte-level tokenizer, as those of Llama 3 and Qwen3 are")
        except Exception as error:  # tokenizers raises no other type
            raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); name the "
                             "folder that has it with --tokenizer hf:DIR") from error
        for token in {self.start, self.eot}:
            self.encoding.add_special_tokens([self.encoding.id_to_token(token)])  # never found in a text
        self.vocab_size = max(self.encoding.get_vocab(with_added_tokens=True).values()) + 1
        self.added = self.encoding.get_added_tokens_decoder()
        self.byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        content = hashlib.sha256(raw).hexdigest()
        self.name = f"hf:{self.folder}@{hashlib.sha256(f'{content} {self.eot}'.encode()).hexdigest()[:12]}"

    def _find_special_tokens(self):
        """Set `eot`, which the first of three files names, and `bos`: the token that the post-processor puts
        before a text, or bos_token if add_bos_token is true."""
        paths = [self.folder / f"{name}.json" for name in ("tokenizer_config", "generation_config", "config")]
        names, *configs = [json.loads(path.read_bytes()) if path.is_file() else {} for path in paths]

        def named(field):
            token = names.get(field)
            return self.encoding.token_to_id((token["content"] if isinstance(token, dict) else token) or "")

        ids = [config.get("eos_token_id") for config in configs]
        generation, model = (number if isinstance(number, list) else [number] for number in ids)
        self.eot = next((n for n in (named("eos_token"), *generation, *model) if n is not None), None)
        if self.eot is None or self.encoding.id_to_token(self.eot) is None:
            raise ValueError("no end-of-text token; name it as eos_token in tokenizer_config.json")
        self.stop_tokens = {self.eot, *generation} - {None}
        text = self.encoding.encode("a")
        before = text.ids[:text.special_tokens_mask.index(0)]
        if len(before) > 1:
            raise ValueError(f"puts {len(before)} tokens before a text; the kit's token files have one")
        bos = before[0] if before else named("bos_token") if names.get("add_bos_token") else None
        self.bos = None if bos == self.eot else bos
        self.start = self.eot if self.bos is None else self.bos

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


def get_tokenizer(name, vocab_size=None):
    """Return the tokenizer `name`: "byte", a tiktoken encoding, or "hf:DIR". vocab_size: of an embedding."""
    if name == "byte":
        tokenizer = Tokenizer(name)
    elif name.startswith("hf:"):
        folder = re.sub("@[0-9a-f]{12}$", "", name)
        tokenizer = HfTokenizer(folder[3:])
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
