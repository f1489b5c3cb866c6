"""Text sources for token files: the Python standard library, local files, Hugging Face datasets.

Each function returns (documents, total, unit). `documents` is an iterator; a document is a str, or an
iterator of str pieces where a file is long. `total` is the size for a progress bar (None if unknown), counted
in `unit`: "B" for bytes, "doc" for documents. `nanote.dataset.write_tokens` turns the documents into token
files.
"""
import glob
import os
import sysconfig
from itertools import chain
from pathlib import Path

from nanote import json_files

PIECE = 1 << 20  # a text file is read in pieces of this many characters


def stdlib_documents():
    """Return the modules of the running Python's standard library, sorted by path, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort(key=Path.as_posix)

    def documents():
        undecodable = 0
        for path in paths:
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                undecodable += 1
        if undecodable:
            print(f"data.py: files skipped because they are not UTF-8: {undecodable}")

    return documents(), sum(path.stat().st_size for path in paths), "B"


def text_documents(files, column="text"):
    """Return one document per UTF-8 file, and one per line of a .jsonl file (its field `column`)."""
    if not files:
        raise ValueError("no FILE; name text or .jsonl files, for example: python data.py text notes.txt")
    for path in files:
        if os.path.isdir(path):
            example = min(glob.glob(os.path.join(path, "*.*")), default=os.path.join(path, "*.txt"))
            raise ValueError(f"{path}: is a directory; name the files in it, for example {example}")
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file; name text or .jsonl files that exist")

    documents = (_lines(path, column) if path.endswith(".jsonl") else [_pieces(path)] for path in files)
    return chain.from_iterable(documents), sum(os.path.getsize(path) for path in files), "B"


def _pieces(path):
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while text := file.read(PIECE):
                # extend the piece to the end of the line, unless the line is longer than a piece
                yield text + file.readline(PIECE)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text ({error.reason}); convert it, for example with iconv -t utf-8"
        ) from error


def _lines(path, column):
    example = f'a line looks like {{"{column}": "…"}}'
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = json_files.parse(line, dict, f"{path}:{number}", example)
                yield _field(row, column, f"{path}:{number}")


def hf_documents(name, subset=None, split="train", column="text", streaming=False, data_files=None):
    """Return the rows of a Hugging Face dataset, or of local files: name "json", "parquet" or "text" and
    `data_files`."""
    if data_files == []:
        raise ValueError("--data-files: names no file; give one or more, or leave it out")
    import datasets  # optional package; slow to import

    try:
        rows = datasets.load_dataset(name, subset, split=split, streaming=streaming, data_files=data_files)
    except Exception as error:  # whatever the hub, pyarrow or the builder raises
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"hf {name}: {first_line}") from error

    documents = (_field(row, column, f"hf {name}, row {number}") for number, row in enumerate(rows))
    return documents, None if streaming else len(rows), "doc"


def _field(row, column, where):
    if isinstance(row.get(column), str):
        return row[column]
    texts = [key for key, value in row.items() if isinstance(value, str)]
    choices = ", ".join(texts) or "no column here holds text"
    raise ValueError(f"{where}: no text in column {column!r}; name one with --column: {choices}")
