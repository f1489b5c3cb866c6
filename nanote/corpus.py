"""Text corpora: the documents that `data.py` hands to `write_tokens` (nanote/tokens.py).

A document is a str, str pieces (a long file, or prompt and answer), or a tuple (str, number in [0, 1) that
replaces its hash). `left_out` counts what is skipped. The `datasets` library reads rows.
"""
import importlib.metadata
import io
import os
import re
import sysconfig
from itertools import chain
from pathlib import Path
from zlib import crc32

import pyarrow

from nanote.config import in_a_line
from nanote.tokens import hash_fraction

PIECE = 1 << 20  # characters; long files are read and tokenized in pieces of about this size
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
SOURCES = set(".py .pyi .pyx .pxd .c .cc .cpp .cxx .cu .h .hh .hpp .hxx .cuh .inl .md .rst .txt".split())
NO_LETTERS = bytes(byte for byte in range(128) if not chr(byte).isalpha())


def text_documents(paths, columns, left_out):
    """Yield a document per text file, and per row (its `columns`) of files of BUILDERS; also in folders."""
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"{path}: no such file; name files or folders that exist")
        for file in files_below(path) if os.path.isdir(path) else [path]:
            builder = BUILDERS.get(Path(file.removesuffix(".gz").removesuffix(".zst")).suffix)
            try:
                if builder and os.path.getsize(file):  # `datasets` refuses an empty file
                    yield from dataset_documents(builder, columns, left_out, [file], streaming=True)
                elif len(columns) > 1:
                    raise ValueError(f"{file}: holds no rows; name .jsonl, .json, .csv or .parquet files")
                else:
                    pieces = text_pieces(file)
                    yield chain([next(pieces, "")], pieces)  # the first one shows most binary files
            except ValueError:
                if file == path:
                    raise
                left_out[f"files that are damaged, or no UTF-8 text, or have no column {columns[0]!r}"] += 1


def files_below(folder, skipped=()):
    """Return the paths of the files below a folder, sorted, without hidden ones and the folders `skipped`."""
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def text_pieces(path):
    """Yield the text of a UTF-8 file in pieces that end with a line, unless it is longer than a piece."""
    try:
        raw = io.BufferedReader(pyarrow.input_stream(path))  # decompresses .gz and .zst
        with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:  # without Windows' mark
            while piece := file.read(PIECE):
                if "\0" in piece:
                    raise ValueError("holds a NUL character, as binary and UTF-16 files do")
                yield piece + file.readline(PIECE)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not UTF-8 text ({in_a_line(error)}); use iconv -t utf-8") from error


def dataset_documents(path, columns, left_out, data_files=None, split="train", **options):
    """Yield the texts in `columns` of each row. The other arguments are those of datasets.load_dataset."""
    if path in (*BUILDERS.values(), "text") and not data_files:  # `datasets` would read the working folder
        raise ValueError(f"{path}: is the name of a format; name files with --data-files")
    if os.path.isfile(path):
        raise ValueError(f"{path}: is a file; read it with python data.py text")
    import datasets  # slow to import
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    try:
        rows = datasets.load_dataset(path, data_files=data_files, split=split, **options)
        for batch in rows.iter(1000):
            for name in columns:
                if name not in batch:
                    raise ValueError(f"no column {name!r} in {', '.join(batch)}; name one with data.py's "
                                     "--column")
            for texts in zip(*(batch[name] for name in columns)):
                if not all(texts):
                    left_out["rows without text"] += 1
                    continue
                for name, text in zip(columns, texts):
                    if not isinstance(text, str):
                        raise ValueError(f"column {name!r} holds {str(text)[:40]}, not text; name another")
                yield list(texts)
    except Exception as error:  # whatever the hub, pyarrow, pandas or the builder raises
        where = data_files[0] if data_files and len(data_files) == 1 else path
        raise ValueError(f"{where}: {in_a_line(error.__cause__ or error)}") from error


def stdlib_files(*skipped):
    """Return the files of the running Python's standard library, without the folders `skipped`."""
    folder = sysconfig.get_paths()["stdlib"]
    return map(Path, files_below(folder, ("site-packages", "dist-packages", "__pycache__", *skipped)))


def stdlib_documents():
    """Yield the modules of the running Python's standard library, without its tests."""
    for path in stdlib_files("test", "tests", "idle_test"):
        if path.suffix == ".py":
            yield path.read_bytes().decode("utf-8", errors="replace")


def package_documents(left_out):
    """Yield the sources and documentation of the installed packages and of the standard library.

    A hash of its name assigns a package to train or val. Documents come in descending order of that hash, and
    one that repeats an earlier one is dropped: that in train stays. Near-duplicates have a Jaccard similarity
    of at least 0.7 over sequences of 5 words; MinHash finds 99 % of them (25 bands of 5 hashes).
    """
    from datasketch import MinHash, MinHashLSH
    index, minhashes = MinHashLSH(params=(25, 5), num_perm=125), []
    for fraction, _, path in sorted(package_files(), key=lambda file: (-file[0], file[1])):
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        words = text.encode().split()
        visible = b"".join(words)
        is_table = len(visible.translate(None, NO_LETTERS)) < 0.4 * len(visible)
        if not words or len(text) > 2 << 20 or max(map(len, words)) > 1000 or is_table:
            left_out["files that are no text, empty, over 2 MiB or mostly numbers"] += 1
            continue
        minhash = MinHash(num_perm=125, hashfunc=crc32)
        minhash.update_batch({b" ".join(words[start:start + 5]) for start in range(max(len(words) - 4, 1))})
        if any(minhash.jaccard(minhashes[other]) >= 0.7 for other in index.query(minhash)):
            left_out["duplicates or near-duplicates"] += 1
            continue
        index.insert(len(minhashes), minhash)
        minhashes.append(minhash)
        yield text, fraction


def package_files():
    """Yield (hash of the package's name, relative path, path) of each file to read."""
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
        for file in package.files or ():
            if file.suffix in SOURCES and ".dist-info" not in file.parts[0]:
                yield hash_fraction(name.encode()), str(file), Path(package.locate_file(file))
    yield from ((1.0, str(path), path) for path in stdlib_files() if path.suffix in SOURCES)
