"""Text to token files.

    python data.py stdlib                              # the Python standard library's sources, no download
    python data.py text *.md notes.jsonl --tokenizer gpt2
    python data.py hf roneneldan/TinyStories --streaming

This file holds the command line. `nanote/documents.py` reads the text, `nanote/dataset.py` tokenizes it and
describes the format of token files.
"""
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from nanote.dataset import check_target, get_tokenizer, write_tokens
from nanote.documents import hf_documents, stdlib_documents, text_documents

# tyro is imported in main(): worker processes import this file, and need no command line.


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
class Text(Options):
    """Files: UTF-8 text, one document each, or .jsonl, one document per line."""

    files: "tyro.conf.Positional[Annotated[list[str], tyro.conf.arg(metavar='FILE [FILE ...]', help_behavior_hint='(required)')]]"  # noqa: E501
    """UTF-8 text or .jsonl files."""
    column: str = "text"
    """The field of a .jsonl line that holds the text."""


@dataclass(kw_only=True)
class Hf(Options):
    """A dataset of the Hugging Face hub."""
    name: "tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar='NAME')]]"
    """Such as roneneldan/TinyStories; or json, parquet, text with --data-files."""
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


def source_of(config):
    """Return (corpus name, description for meta.json, function that returns the documents)."""
    if isinstance(config, Stdlib):
        return "stdlib", f"the standard library of Python {sys.version.split()[0]}", stdlib_documents
    if isinstance(config, Text):
        name = Path(config.files[0]).stem if len(config.files) == 1 else "text"
        more = f" and {len(config.files) - 10} more" if len(config.files) > 10 else ""
        return name, " ".join(config.files[:10]) + more, partial(text_documents, config.files, config.column)
    name = config.name.rstrip("/").split("/")[-1]
    description = " ".join(filter(None, ["hf", config.name, config.subset, config.split]))
    return name, description, partial(hf_documents, config.name, config.subset, config.split, config.column,
                                      config.streaming, config.data_files)


def main(argv=None):
    """Run the command line `argv` (None: sys.argv[1:]). Raises ValueError or OSError for a user's mistake."""
    global tyro  # the annotations of Text and Hf name it
    import tyro

    from nanote import cli

    description = __doc__.partition("\n\nThis file")[0]
    config = cli.parse(Stdlib | Text | Hf, argv, prog="data.py", description=description)
    start = time.time()
    name, source, read_documents = source_of(config)
    tokenizer = os.path.basename(os.path.abspath(config.tokenizer.removeprefix("hf:")))
    folder = name if config.tokenizer == "byte" else f"{name}-{tokenizer}"
    out_dir = config.out_dir or Path("data", folder)
    try:
        check_target(out_dir, config.force)  # before anything is downloaded
        get_tokenizer(config.tokenizer)
        documents, total, unit = read_documents()
        meta = write_tokens(
            documents, out_dir, tokenizer=config.tokenizer, val_fraction=config.val_fraction,
            force=config.force, num_workers=config.num_workers, source=source, total=total, unit=unit,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; nothing was written") from None
    print(f"{out_dir}: {meta['documents']:,} documents, {meta['train_tokens']:,} train and "
          f"{meta['val_tokens']:,} validation tokens ({config.tokenizer}, {meta['dtype']}) in "
          f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    from nanote import cli

    sys.exit(cli.run(main, "data.py"))
