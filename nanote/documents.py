"""Text sources for token files: the Python standard library, local files and folders, Hugging Face datasets.

Each function returns (documents, total, unit). `documents` is an iterator; a document is a str, or an
iterator of str pieces where a file is long. `total` is the size for a progress bar (None if unknown), counted
in `unit`: "B" for bytes, "doc" for documents. `nanote.dataset.write_tokens` turns the documents into token
files.
"""
import gzip
import io
import os
import signal
import sysconfig
import zlib
from collections import Counter
from contextlib import contextmanager
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from threading import RLock

from tqdm import tqdm

from nanote import json_files
from nanote.dataset import start_worker

PIECE = 1 << 20  # a text file is read in pieces of this many characters
COMPRESSED, ROWS = (".gz", ".zst"), (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


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
    """Return one document per UTF-8 file, and one per row of a .jsonl or Parquet file (its field `column`).

    A folder stands for the text files in it, or for the rows of a dataset that save_to_disk wrote.
    """
    if not files:
        raise ValueError("no FILE; name text or .jsonl files, for example: python data.py text notes.txt")
    documents, sizes = [], []
    for path in files:
        if os.path.isdir(path):
            found = [] if _is_saved_dataset(path) else _files_in(path)
            sizes += found or [None]
            documents.append(_folder_documents(path, found, column) if found else _saved_rows(path, column))
        elif os.path.isfile(path):
            sizes.append(path)
            documents.append(_file_documents(path, column))
        else:
            raise ValueError(f"{path}: no such file; name text or .jsonl files that exist")
    is_plain = not any(path is None or path.endswith((*COMPRESSED, ".parquet")) for path in sizes)
    return chain.from_iterable(documents), sum(map(os.path.getsize, sizes)) if is_plain else None, "B"


def _file_documents(path, column):
    if path.endswith(".parquet"):
        return _parquet_rows(path, column)
    return _lines(path, column) if path.endswith(ROWS) else [_text_pieces(path)]


# ---------------------------------------------------------------- folders

def _files_in(root):
    """Return the files below `root`, sorted, without hidden ones and folders of token files."""
    paths = []
    for folder, folders, names in os.walk(root):  # does not follow links to folders
        if {"train.bin", "meta.json"} <= set(names):
            if folder == root:
                raise ValueError(f"{root}: is a directory of token files, not of text; train on it with "
                                 f"python train.py --data {root}")
            folders[:], names = [], []
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    paths = sorted(path for path in paths if os.path.isfile(path))
    if not paths:
        raise ValueError(f"{root}: no file in this directory; name one that holds text, or text files")
    return paths


def _folder_documents(folder, paths, column):
    """Yield the documents of `paths`; skip what is not text, and print how many files that were."""
    skipped = Counter()
    for path in paths:
        reason = None if path.endswith(ROWS) else _not_text(path)
        if reason:
            skipped[reason] += 1
        else:
            yield from _file_documents(path, column)
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        print(f"data.py: {folder}: {len(paths) - skipped.total()} files read; skipped: {reasons}")


def _not_text(path):
    """Return why a file is not text, or None. Reads all of it: a document is used whole or not at all."""
    is_empty = True
    try:
        for piece in _pieces(path):
            if "\0" in piece:
                return "binary"
            is_empty = False
    except (ValueError, OSError) as error:
        if isinstance(error.__cause__, ImportError):
            return "unreadable without pyarrow (pip install pyarrow)"
        return "not UTF-8" if isinstance(error.__cause__, UnicodeDecodeError) else "unreadable"
    return "empty" if is_empty else None


# ---------------------------------------------------------------- files

@contextmanager
def _open(path):
    """Open a file for reading bytes; decompress .gz and .zst."""
    try:
        if path.endswith(".gz"):
            file = gzip.open(path)
        elif path.endswith(".zst"):
            file = io.BufferedReader(_zstd_stream(path))
        else:
            file = open(path, "rb")
        with file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        if not path.endswith(COMPRESSED) or getattr(error, "errno", None):  # the system's own error
            raise
        suffix = os.path.splitext(path)[1]
        raise ValueError(f"{path}: not a complete {suffix} file ({error}); copy it again") from error


def _zstd_stream(path):
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"{path}: .zst needs the package pyarrow; pip install pyarrow") from error
    return pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")


def _text_pieces(path):
    for piece in _pieces(path):
        if "\0" in piece:
            raise ValueError(f"{path}: holds a NUL character, as binary and UTF-16 files do; leave it out, "
                             "or convert it with iconv -f utf-16 -t utf-8")
        yield piece


def _pieces(path):
    try:  # utf-8-sig: without the mark with which editors on Windows begin a file
        with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            while text := file.read(PIECE):
                # extend the piece to the end of the line, unless the line is longer than a piece
                yield text + file.readline(PIECE)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text ({error.reason}); convert it, for example with iconv -t utf-8"
        ) from error


def _lines(path, column):
    example = f'a line looks like {{"{column}": "…"}}'
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = json_files.parse(line, dict, f"{path}:{number}", example)
                yield _field(row, column, f"{path}:{number}")


def _parquet_rows(path, column):
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs the package pyarrow; pip install pyarrow") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            # without the column: all of them, so that the message can name those that hold text
            columns = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=1000, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield _field(row, column, f"{path}:{number}")
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a valid Parquet file ({_first_line(error)}); copy it again") from error


# ---------------------------------------------------------------- Hugging Face datasets

def _is_saved_dataset(path):
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def _saved_rows(path, column, split=None):
    """Yield the rows of a folder that datasets' save_to_disk wrote."""
    import datasets  # optional package; slow to import

    try:
        rows = datasets.load_from_disk(path)
    except Exception as error:  # whatever pyarrow or datasets raises
        raise ValueError(f"{path}: {_first_line(error)}") from error
    if isinstance(rows, dict):
        if split not in rows:
            splits = ", ".join(rows)
            raise ValueError(f"{path}: holds the splits {splits}; name one of them: "
                             f"python data.py hf {path} --split {next(iter(rows), 'train')}")
        rows = rows[split]
    if column in rows.column_names:
        rows = rows.select_columns([column])
    for number, row in enumerate(rows):
        yield _field(row, column, f"{path}, row {number}")


def hf_documents(name, subset=None, split="train", column="text", streaming=False, data_files=None):
    """Return the rows of a Hugging Face dataset, or of local files: name "json", "parquet" or "text" and
    `data_files`. A file or folder that exists is read without the network."""
    if not name.strip():
        raise ValueError(f"hf {name!r}: names no dataset; pass one such as roneneldan/TinyStories, or a file "
                         "or folder")
    if data_files == []:
        raise ValueError("--data-files: names no file; give one or more, or leave it out")
    is_file = data_files is None and os.path.isfile(name)
    is_saved = data_files is None and os.path.isdir(name) and _is_saved_dataset(name)
    if is_file or is_saved:
        unused = {"--subset": subset, "--streaming": streaming, "--split": is_file and split != "train"}
        for option, value in unused.items():
            if value:
                raise ValueError(f"hf {name}: is read from disk as it is; leave {option} out")
    if is_file:
        return text_documents([name], column)
    if is_saved:
        return _saved_rows(name, column, split), None, "doc"
    is_file_name = name.endswith((*ROWS, *COMPRESSED)) or "/" not in name and os.path.splitext(name)[1]
    if name.startswith(("/", ".", "~")) or is_file_name:
        if not os.path.exists(name):
            raise ValueError(f"{name}: no such file or directory; name one that exists, or a dataset such as "
                             "roneneldan/TinyStories")
    rows = _hf_rows(name, subset, split, column, streaming, data_files)
    return rows, next(rows), "doc"


def _hf_rows(name, *options):
    """Yield the number of rows, None if it is unknown, then each text.

    A process of its own reads them, since a damaged file can crash the libraries that do.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    reader = context.Process(target=_send_rows, args=(sender, name, *options), daemon=True)
    reader.start()
    sender.close()
    try:
        while isinstance(message := receiver.recv(), list):
            yield from message
    except EOFError:  # the process ended without a message
        reader.join()
        code = reader.exitcode
        reason = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        message = (f"hf {name}: the process that reads it crashed ({reason}): a file may be damaged or "
                   "nested too deeply; python data.py text FILE names the line of a .jsonl file")
    finally:
        reader.terminate()
        receiver.close()
    if message:
        raise ValueError(message)


def _send_rows(sender, name, subset, split, column, streaming, data_files):
    """Send lists of what `_hf_rows` yields; at the end None, or what went wrong."""
    start_worker()
    tqdm.set_lock(RLock())  # its own lock is a semaphore, of which Python warns if this process is stopped
    message = None
    try:
        import datasets  # optional package; slow to import

        rows = datasets.load_dataset(name, subset, split=split, streaming=streaming, data_files=data_files)
        sender.send([None if streaming else len(rows)])
        texts, size = [], 0
        for number, row in enumerate(rows):
            texts.append(_field(row, column, f"row {number}"))
            size += len(texts[-1])
            if size >= PIECE:
                sender.send(texts)
                texts, size = [], 0
        sender.send(texts)
    except Exception as error:  # whatever the hub, pyarrow or the builder raises
        if type(error).__name__ == "DatasetGenerationError":  # says only that there is a cause
            error = error.__cause__ or error
        message = f"hf {name}: {_first_line(error)}"
    sender.send(message)


def _first_line(error):
    text = str(error).strip().replace(  # a message of datasets, with the option's name
        "Config name is missing.\nPlease pick one among the available configs", "name a --subset")
    return (text or type(error).__name__).splitlines()[0]


def _field(row, column, where):
    if isinstance(row.get(column), str):
        return row[column]
    if column in row:
        raise ValueError(f"{where}: column {column!r} holds {str(row[column])[:40]}, not text; leave the row "
                         "out, or name another column with data.py --column")
    texts = [key for key, value in row.items() if isinstance(value, str)]
    choices = ", ".join(texts) or "no column here holds text"
    raise ValueError(f"{where}: no text in column {column!r}; name one with data.py --column: {choices}")
