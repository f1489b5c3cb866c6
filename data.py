"""Turn text into token files for train.py.

    python data.py stdlib                              # the Python standard library's sources, no download
    python data.py packages                            # sources and docs of what is installed, no download
    python data.py text *.md notes.jsonl --tokenizer gpt2
    python data.py hf roneneldan/TinyStories --streaming
    python data.py sft pairs.jsonl --tokenizer gpt2    # prompts and answers; loss on answers only
    python data.py sft chats.jsonl --tokenizer hf:DIR  # conversations, in the tokenizer's chat template
    python data.py tokens train.bin val.bin --tokenizer gpt2    # token files of nanoGPT or modded-nanogpt
"""
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from nanote.command import parse, require_at_least, run_command


@dataclass(kw_only=True)
class Options:
    out_dir: str | None = None  # Folder to write; None: data/<name>, or data/<name>-<tokenizer>.
    tokenizer: str = "byte"  # byte, a tiktoken encoding such as gpt2, or hf:DIR with a tokenizer.json.
    val_fraction: float = 0.01  # Fraction of the documents kept for validation.
    num_workers: int | None = None  # Threads that tokenize; None: one per core.
    force: bool = False  # Overwrite the folder if it exists.

    def corpus_name(self):
        return type(self).__name__.lower()

    def documents(self, left_out):
        """Yield the documents, as nanote/corpus.py describes them."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Stdlib(Options):
    """The Python standard library's own sources; no download."""
    val_fraction: float = 0.05  # Fraction of the documents kept for validation.

    def documents(self, left_out):
        from nanote.corpus import stdlib_files  # not above: --help is quick
        for path in stdlib_files("test", "tests", "idle_test"):
            if path.suffix == ".py":
                yield path.read_bytes().decode("utf-8", errors="replace")


@dataclass(kw_only=True)
class Packages(Options):
    """Sources and documentation of the installed packages, without duplicates; no download."""
    val_fraction: float = 0.05  # Fraction of the documents kept for validation.

    def documents(self, left_out):
        from tools.packages import package_documents
        return package_documents(left_out)


@dataclass(kw_only=True)
class Text(Options):
    """Files: text, a document each; .json, .jsonl, .csv or Parquet, a document per row; folders of these."""
    files: Positional[list[str]]  # Also .gz or .zst; folders.
    column: str = "text"  # Field of a row that holds the text.

    def corpus_name(self):
        if len(self.files) == 1:
            return Path(self.files[0]).resolve().name.split(".")[0]
        return super().corpus_name()

    def documents(self, left_out):
        from nanote.corpus import text_documents
        return text_documents(self.files, self.columns(), left_out)

    def columns(self):
        return [self.column]


@dataclass(kw_only=True)
class Hf(Options):
    """A dataset of the Hugging Face hub, or the folder of one saved by save_to_disk."""
    name: Positional[str]  # roneneldan/TinyStories, a folder; or json, csv, parquet, text with --data-files.
    subset: str | None = None  # Configuration of the dataset.
    split: str = "train"  # Split to read.
    column: str = "text"  # Field that holds the text.
    streaming: bool = False  # Read while downloading, without a copy on disk.
    data_files: list[str] | None = None  # Files of the dataset, or your own.

    def corpus_name(self):
        return Path(self.name).resolve().name

    def documents(self, left_out):
        from nanote.corpus import dataset_documents
        return dataset_documents(self.name, [self.column], left_out, self.data_files, self.split,
                                 name=self.subset, streaming=self.streaming)


@dataclass(kw_only=True)
class Sft(Text):
    """A prompt and an answer per row, or {"messages": [{"role", "content"}, ...]} in the chat template of
    --tokenizer hf:DIR, for fine-tuning: loss on answers only, including the stop token."""
    column: tuple[str, str] = ("prompt", "answer")  # Fields of the prompt and the answer; not for messages.

    def columns(self):
        return list(self.column)


@dataclass(kw_only=True)
class Tokens:
    """Token files of nanoGPT (uint16 without a header) or modded-nanogpt (with one)."""
    files: Positional[list[str]]  # The last one becomes val.bin, the others train.bin.
    out_dir: str | None = None  # Folder to write; None: data/<name of the folder of the last file>.
    tokenizer: str  # Tokenizer of the files, such as gpt2.
    force: bool = False  # Overwrite the folder if it exists.


def main(argv=None):
    options = parse(Stdlib | Packages | Text | Hf | Sft | Tokens, argv, "data.py", __doc__)
    arguments = sys.argv[1:] if argv is None else argv
    source = f"{' '.join(arguments)} (Python {sys.version.split()[0]})"
    if isinstance(options, Tokens):
        out_dir, meta = convert(options, source)
    else:
        require_at_least(1, options, "num_workers")
        out_dir, meta = tokenize(options, source)
    for reason, count in sorted(meta.get("left_out", {}).items()):
        print(f"left out: {count:,} {reason}")
    print(f"{out_dir}: {meta['documents']:,} documents, {meta['train_tokens']:,} train and "
          f"{meta['val_tokens']:,} validation tokens ({options.tokenizer}, {meta['dtype']})")


def tokenize(options, source):
    """Write the token files of a corpus. Return their folder and meta.json."""
    from nanote import tokens
    name = options.corpus_name()
    if options.tokenizer != "byte":
        tokenizer = Path(options.tokenizer.removeprefix("hf:")).resolve().name
        name = f"{name}-{tokenizer}"
    out_dir = options.out_dir or f"data/{name}"
    left_out = Counter()
    meta = tokens.write_tokens(
        options.documents(left_out), out_dir, tokenizer=options.tokenizer, val_fraction=options.val_fraction,
        force=options.force, num_workers=options.num_workers, source=source, left_out=left_out,
        answers_only=isinstance(options, Sft))
    return out_dir, meta


def convert(options, source):
    """Copy token files of other programs, the last one as val.bin. Return their folder and meta.json."""
    from nanote import tokenizers, tokens
    if len(options.files) < 2:
        raise ValueError("tokens: name two files or more, of which the last one is for validation")
    out_dir = options.out_dir or f"data/{Path(options.files[-1]).resolve().parent.name}"
    encoder = tokenizers.get_tokenizer(options.tokenizer)
    *train, val = [foreign_tokens(path, encoder) for path in options.files]
    counts = {"documents": 0, "train_tokens": sum(map(len, train)), "val_tokens": len(val)}
    with tokens.new_token_folder(out_dir, options.force) as folder:
        for ids in train:
            append_tokens(folder / "train.bin", ids)
        append_tokens(folder / "val.bin", val)
        for ids in (*train, val):
            for part in np.array_split(ids, 1 + len(ids) // 2**24):  # a mask of all may not fit in memory
                counts["documents"] += int((part == encoder.eot).sum())
        meta = tokens.write_meta(folder, encoder, np.dtype("<u2"), source=source, **counts)
    return out_dir, meta


def append_tokens(path, ids):
    with open(path, "ab") as file:
        ids.tofile(file)


def foreign_tokens(path, encoder):
    """Return the uint16 tokens of a file with modded-nanogpt's header, or nanoGPT's without one."""
    header = np.fromfile(path, "<i4", 256)  # a magic number, the version, the number of tokens, zeros
    size = Path(path).stat().st_size
    start = 0  # of the tokens, in bytes
    if len(header) == 256 and header[0] == 20240520:
        start = header.nbytes
        is_whole = size - start == 2 * int(header[2])
    else:
        is_whole = size % 2 == 0
    if size == start or not is_whole:
        raise ValueError(f"{path}: {size - start} bytes, empty, truncated or not uint16 tokens; copy it "
                         "again")
    tokens = np.memmap(path, "<u2", "r", offset=start)
    if tokens.max() >= encoder.vocab_size:
        raise ValueError(f"{path}: holds the token {tokens.max()}, but {encoder.name} has "
                         f"{encoder.vocab_size:,}; name the tokenizer that made the file")
    return tokens


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    sys.exit(run_command(main, "data.py"))
