"""Text to token files.

    python data.py stdlib                              # the Python standard library's sources, no download
    python data.py packages                            # sources and docs of what is installed, no download
    python data.py text *.md notes.jsonl --tokenizer gpt2
    python data.py hf roneneldan/TinyStories --streaming

This file holds the command line. `nanote/documents.py` and `nanote/packages.py` read the text,
`nanote/dataset.py` tokenizes it and describes the format of token files.
"""
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from nanote import cli
from nanote.dataset import check_options, get_tokenizer, write_tokens
from nanote.documents import hf_documents, stdlib_documents, text_documents
from nanote.packages import package_documents


@dataclass(kw_only=True)
class Options:
    out_dir: Path | None = None
    """Folder to write; by default data/<name>, or data/<name>-<tokenizer> if that is not byte."""
    tokenizer: str = "byte"
    """byte, a tiktoken encoding such as gpt2, or hf:DIR: the tokenizer.json in the folder of a Hugging Face
    model (byte-level, such as Llama 3's or Qwen3's)."""
    val_fraction: float = 0.01
    """Fraction of the documents kept for validation."""
    num_workers: int | None = None
    """Tokenizing processes; by default one per core, and one for byte."""
    force: bool = False
    """Overwrite the folder if it exists."""


@dataclass(kw_only=True)
class Stdlib(Options):
    """The Python standard library's own sources; no download."""
    val_fraction: float = 0.05  # 0.01 would be half a dozen files


@dataclass(kw_only=True)
class Packages(Options):
    """Sources, documentation and licenses of every installed package and the standard library, without
    duplicates; whole packages are held out for validation; no download."""
    val_fraction: float = 0.05
    """Fraction of the packages kept for validation."""
    num_workers: int | None = None
    """Processes that read files, then tokenize; by default one per core, and one to tokenize for byte."""


@dataclass(kw_only=True)
class Text(Options):
    """Files: UTF-8 text, one document each; .jsonl or Parquet, one document per row; folders of these."""

    files: Positional[Annotated[list[str], arg(metavar="FILE [FILE ...]", help_behavior_hint="(required)")]]
    """UTF-8 text, .jsonl or Parquet files; text and .jsonl also as .gz or .zst. A folder is read with its
    subfolders, or as the dataset that save_to_disk wrote into it."""
    column: str = "text"
    """The field of a .jsonl or Parquet row that holds the text."""


@dataclass(kw_only=True)
class Hf(Options):
    """A dataset of the Hugging Face hub, or one on disk."""
    name: Positional[Annotated[str, arg(metavar="NAME")]]
    """Such as roneneldan/TinyStories; or a file or folder; or json, parquet, text with --data-files."""
    subset: str | None = None
    """The configuration of the dataset."""
    split: str = "train"
    """The split to read."""
    column: str = "text"
    """The field that holds the text."""
    streaming: bool = False
    """Read while downloading, without a copy on disk."""
    data_files: list[str] | None = None
    """Local files for the builder."""


def corpus_name(path):
    """Return the last part of a path or of a dataset's name; of a file without its suffixes."""
    name = Path(os.path.abspath(path)).name or "text"
    if os.path.isfile(path):
        name = Path(name.removesuffix(".gz").removesuffix(".zst")).stem
    return name


def source_of(config):
    """Return (corpus name, description for meta.json, function that returns the documents)."""
    if isinstance(config, Stdlib):
        return "stdlib", f"the standard library of Python {sys.version.split()[0]}", stdlib_documents
    if isinstance(config, Packages):
        source = f"the packages installed for Python {sys.version.split()[0]}, and its standard library"
        return "packages", source, partial(package_documents, config.num_workers)
    if isinstance(config, Text):
        name = corpus_name(config.files[0]) if len(config.files) == 1 else "text"
        more = f" and {len(config.files) - 10} more" if len(config.files) > 10 else ""
        return name, " ".join(config.files[:10]) + more, partial(text_documents, config.files, config.column)
    name = corpus_name(config.name)
    description = " ".join(filter(None, ["hf", config.name, config.subset, config.split]))
    return name, description, partial(hf_documents, config.name, config.subset, config.split, config.column,
                                      config.streaming, config.data_files)


def print_counts(meta):
    """Print what `packages` read and left out."""
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in meta["left_out"].items())
    print(f"{meta['packages']:,} packages with {meta['files']:,} files; left out: {left_out or 'none'}\n"
          f"dropped {meta['exact_duplicates']:,} exact and {meta['near_duplicates']:,} near-duplicates\n"
          f"{meta['train_bytes']:,} bytes for training, {meta['val_bytes']:,} for validation")


def main(argv=None):
    """Run the command line `argv` (None: sys.argv[1:]). Raises ValueError or OSError for a user's mistake."""
    description = __doc__.partition("\n\nThis file")[0]
    config = cli.parse(Stdlib | Packages | Text | Hf, argv, prog="data.py", description=description)
    start = time.time()
    name, source, read_documents = source_of(config)
    tokenizer = os.path.basename(os.path.abspath(config.tokenizer.removeprefix("hf:")))
    folder = name if config.tokenizer == "byte" else f"{name}-{tokenizer}"
    out_dir = config.out_dir or Path("data", folder)
    try:
        # before anything is downloaded or read
        check_options(out_dir, config.force, config.val_fraction, config.num_workers)
        get_tokenizer(config.tokenizer)
        documents, total, unit, *counts = read_documents()
        meta = write_tokens(
            documents, out_dir, tokenizer=config.tokenizer, val_fraction=config.val_fraction,
            force=config.force, num_workers=config.num_workers, source=source, total=total, unit=unit,
            counts=counts[0] if counts else None,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; nothing was written") from None
    if counts:
        print_counts(meta)
    print(f"{out_dir}: {meta['documents']:,} documents, {meta['train_tokens']:,} train and "
          f"{meta['val_tokens']:,} validation tokens ({config.tokenizer}, {meta['dtype']}) in "
          f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    sys.exit(cli.run(main, "data.py"))
