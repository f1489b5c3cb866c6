"""Turn text into token files for train.py.

    python data.py stdlib                              # the Python standard library's sources, no download
    python data.py packages                            # sources and docs of what is installed, no download
    python data.py text *.md notes.jsonl --tokenizer gpt2
    python data.py hf roneneldan/TinyStories --streaming
"""
import platform
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from nanote.config import parse, run_command


@dataclass(kw_only=True)
class Options:
    out_dir: str | None = None  # Folder to write; None: data/<name>, or data/<name>-<tokenizer>.
    tokenizer: str = "byte"  # byte, a tiktoken encoding such as gpt2, or hf:DIR with a tokenizer.json.
    val_fraction: float = 0.01  # Fraction of the documents kept for validation.
    num_workers: int | None = None  # Threads that tokenize; None: one per core.
    force: bool = False  # Overwrite the folder if it exists.


@dataclass(kw_only=True)
class Stdlib(Options):
    """The Python standard library's own sources; no download."""
    val_fraction: float = 0.05  # Fraction of the documents kept for validation.


@dataclass(kw_only=True)
class Packages(Stdlib):
    """Sources and documentation of the installed packages, without duplicates; no download."""


@dataclass(kw_only=True)
class Text(Options):
    """Files: text, a document each; .json, .jsonl, .csv or Parquet, a document per row; folders of these."""
    files: Positional[list[str]]  # Also .gz or .zst; folders.
    column: str = "text"  # Field of a row that holds the text.


@dataclass(kw_only=True)
class Hf(Options):
    """A dataset of the Hugging Face hub."""
    name: Positional[str]  # Such as roneneldan/TinyStories; or json, csv, parquet, text with --data-files.
    subset: str | None = None  # Configuration of the dataset.
    split: str = "train"  # Split to read.
    column: str = "text"  # Field that holds the text.
    streaming: bool = False  # Read while downloading, without a copy on disk.
    data_files: list[str] | None = None  # Files of the dataset, or your own.


def main(argv=None):
    """Run the command line `argv` (None: sys.argv[1:])."""
    options = parse(Stdlib | Packages | Text | Hf, argv, "data.py", __doc__)
    from nanote import corpus, tokens  # not above: --help is quick

    left_out = Counter()
    match options:
        case Packages():
            name, documents = "packages", corpus.package_documents(left_out)
        case Stdlib():
            name, documents = "stdlib", corpus.stdlib_documents()
        case Text(files=files):
            name = Path(files[0]).resolve().name.split(".")[0] if len(files) == 1 else "text"
            documents = corpus.text_documents(files, options.column, left_out)
        case Hf():
            name = Path(options.name).resolve().name
            documents = corpus.dataset_documents(
                options.name, options.column, left_out, name=options.subset, split=options.split,
                data_files=options.data_files, streaming=options.streaming)
    tokenizer = Path(options.tokenizer.removeprefix("hf:")).resolve().name
    out_dir = options.out_dir or f"data/{name}" + f"-{tokenizer}" * (options.tokenizer != "byte")
    source = f"{' '.join(sys.argv[1:] if argv is None else argv)} (Python {platform.python_version()})"
    meta = tokens.write_tokens(
        documents, out_dir, tokenizer=options.tokenizer, val_fraction=options.val_fraction,
        force=options.force, num_workers=options.num_workers, source=source, left_out=left_out)
    for reason, count in sorted(left_out.items()):
        print(f"left out: {count:,} {reason}")
    print(f"{out_dir}: {meta['documents']:,} documents, {meta['train_tokens']:,} train and "
          f"{meta['val_tokens']:,} validation tokens ({options.tokenizer}, {meta['dtype']})")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    sys.exit(run_command(main, "data.py"))
