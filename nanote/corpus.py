"""Text corpora: the documents that `data.py` hands to `write_tokens` (nanote/tokens.py).

A document is a str, str pieces (a long file, or prompt and answer), a tuple (str, number in [0, 1) that
replaces its hash), or a Conversation (nanote/chat.py). `left_out` counts what is skipped. The `datasets`
library reads rows. The .jsonl files of `data.py sft` are read here, so that errors name the line.
"""
import io
import json
import os
import sysconfig
from itertools import chain
from pathlib import Path

import pyarrow

from nanote.chat import Conversation
from nanote.command import error_line

PIECE = 1 << 20  # characters; long files are read and tokenized in pieces of about this size
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
PAIR = ["prompt", "answer"]  # the default columns of data.py sft
MESSAGES = "messages"  # the field of a row that holds a conversation
WRITE_MESSAGES = 'write {"messages": [...]}'


class RowError(ValueError):
    """A mistake in a row of a file for data.py sft. Unlike a damaged file it is not skipped in a folder."""


def text_documents(paths, columns, left_out):
    """Yield a document per text file, and per row (its `columns`) of files of BUILDERS and of datasets saved
    by save_to_disk; also in folders, where files that cannot be read, or lack the columns, are counted in
    `left_out`. With two columns, for data.py sft, see `sft_documents`: a RowError is not skipped."""
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"{path}: no such file; name files or folders that exist")
        if not os.path.isdir(path):
            yield from documents_of(path, columns, left_out)
            continue
        for source in sources_below(path):
            try:
                yield from documents_of(source, columns, left_out)
            except RowError:
                raise
            except ValueError:
                if source == path:  # a saved dataset that the user has named
                    raise
                left_out[f"files that are damaged, or no UTF-8 text, or have no column {columns[0]!r}"] += 1


def documents_of(path, columns, left_out):
    """Yield the documents of a file, or of the folder of a dataset saved by save_to_disk."""
    if os.path.isdir(path):
        yield from dataset_documents(path, columns, left_out)
        return
    suffix = Path(path.removesuffix(".gz").removesuffix(".zst")).suffix
    is_empty = os.path.getsize(path) == 0  # `datasets` refuses an empty file
    if suffix == ".jsonl" and is_sft(columns) and not is_empty:
        yield from sft_documents(json_lines(path), columns, left_out)
    elif suffix in BUILDERS and not is_empty:
        yield from dataset_documents(BUILDERS[suffix], columns, left_out, [path], streaming=True)
    elif is_sft(columns):
        raise ValueError(f"{path}: holds no rows; name .jsonl, .json, .csv or .parquet files")
    else:
        pieces = text_pieces(path)
        first = next(pieces, "")  # raises for most binary files, before a document begins
        yield chain([first], pieces)


# ---------------------------------------------------------------- rows of data.py sft

def is_sft(columns):
    """Return whether the columns are those of a prompt and an answer."""
    return len(columns) == 2


def sft_documents(rows, columns, left_out):
    """Yield the texts in two `columns` of each row, or its Conversation, but not both kinds from one file.

    rows: (its file and line, the dict). A row with both kinds is a prompt and an answer. Conversations are
    read only with the default columns. ValueError if no row has the fields of either kind.
    """
    kind = None  # of the rows before
    first_error = None  # about the first row that lacks a field, until the kind is known
    skipped = 0  # rows without texts
    for where, row in rows:
        row_kind = kind_of(row, columns)
        if row_kind is None:
            if kind == "conversations":
                raise RowError(f"{where}: no field {MESSAGES!r}; {WRITE_MESSAGES}")
            first_error = first_error or missing_field(where, row, columns)
            skipped += 1
            continue
        if kind is None and row_kind == "conversations" and first_error is not None:
            raise RowError(first_error)
        if kind not in (None, row_kind):
            raise RowError(f"{where}: the rows before hold {kind}, this one {row_kind}; make a folder of "
                           "token files of each kind")
        kind = row_kind
        if kind == "conversations":
            yield Conversation(row[MESSAGES], where)
            continue
        texts = [row[name] for name in columns]
        if all(texts):
            check_texts(texts, columns, where)
            yield texts
        else:
            skipped += 1
    if kind is None and first_error is not None:
        raise ValueError(first_error)
    if skipped:
        left_out["rows without text"] += skipped


def missing_field(where, row, columns):
    """Return the error about a row without one of the columns; None if it has them, with null."""
    missing = [name for name in columns if name not in row]
    return f"{where}: {no_column(missing[0], row)}, or {messages_advice(columns)}" if missing else None


def kind_of(row, columns):
    """Return what a row holds: pairs, conversations, or None if a field is missing."""
    if all(row.get(name) is not None for name in columns):
        return "pairs"
    if columns == PAIR and row.get(MESSAGES) is not None:
        return "conversations"
    return None


def no_column(name, names):
    return f"no column {name!r} in {', '.join(names) or 'an empty row'}; name one with --column"


def messages_advice(columns):
    return WRITE_MESSAGES if columns == PAIR else "leave it out to read messages"


def check_texts(texts, columns, where):
    for name, text in zip(columns, texts):
        if not isinstance(text, str):
            advice = f", or {WRITE_MESSAGES}" if isinstance(text, list) and columns == PAIR else ""
            raise RowError(f"{where}: column {name!r} holds {str(text)[:40]}, not text; name another{advice}")


def dataset_rows(rows, columns, where):
    """Yield (the file and number, the dict) of each row of a dataset, which has None for a missing field."""
    number = 0
    for batch in rows.iter(1000):
        missing = [name for name in columns if name not in batch]
        if missing and MESSAGES not in batch:  # another kind of file, which is skipped in a folder
            raise ValueError(f"{no_column(missing[0], batch)}, or {messages_advice(columns)}")
        for values in zip(*batch.values()):
            number += 1
            row = dict(zip(batch, values))
            if isinstance(row.get(MESSAGES), list):
                row[MESSAGES] = [decoded_message(message) for message in row[MESSAGES]]
            yield f"{where}, row {number}", row


def decoded_message(message):
    """Return a message that `datasets` may hold as JSON, which it does if messages have different fields."""
    try:
        return json.loads(message) if isinstance(message, str) else message
    except ValueError:
        return message


def json_lines(path):
    """Yield (the file and line, the dict in it) of each line that is not empty."""
    try:
        with io.BufferedReader(pyarrow.input_stream(path)) as file:  # which decompresses .gz and .zst
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, json_object(line, where)
    except OSError as error:
        raise RowError(f"{path}: {error_line(error)}") from error


def json_object(line, where):
    try:
        row = json.loads(line.strip())
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise RowError(f"{where}: not JSON ({error_line(error)})") from error
    if not isinstance(row, dict):
        raise RowError(f"{where}: not a JSON object, as each line of a .jsonl must be; name an array .json")
    return row


# ---------------------------------------------------------------- files and folders


def sources_below(folder):
    """Return the paths of the files below a folder; of a dataset saved by save_to_disk, its folder."""
    os.listdir(folder)  # PermissionError if it cannot be read, which os.walk ignores
    files = files_below(folder)
    datasets = {parent for parent in map(os.path.dirname, files) if is_saved_dataset(parent)}
    # a DatasetDict has its splits in folders, and their names in dataset_dict.json beside them
    metadata = {os.path.join(os.path.dirname(dataset), "dataset_dict.json") for dataset in datasets}
    others = [file for file in files if os.path.dirname(file) not in datasets and file not in metadata]
    return sorted([*datasets, *others])


def is_saved_dataset(folder):
    """Return whether save_to_disk of a Dataset wrote the folder."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in ("state.json", "dataset_info.json"))


def files_below(folder, skipped=()):
    """Return the paths of the files below a folder, sorted, without hidden ones and the folders `skipped`."""
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def text_pieces(path):
    """Yield the text of a UTF-8 file in pieces that end with a line, unless it is longer than a piece."""
    try:  # input_stream decompresses .gz and .zst; utf-8-sig leaves out Windows' mark
        with io.TextIOWrapper(pyarrow.input_stream(path), encoding="utf-8-sig", newline="") as file:
            while piece := file.read(PIECE):
                if "\0" in piece:
                    raise ValueError("holds a NUL character, as binary and UTF-16 files do")
                yield piece + file.readline(PIECE)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: not UTF-8 text ({error_line(error)}); use iconv -t utf-8") from error


def dataset_documents(path, columns, left_out, data_files=None, split="train", **options):
    """Yield the texts in `columns` of each row. `path`: the folder of a dataset saved by save_to_disk, or
    what datasets.load_dataset takes, as are the other arguments."""
    is_format = path in (*BUILDERS.values(), "text")  # without files `datasets` would read the working folder
    if (is_format and not data_files) or os.path.isfile(path):
        raise ValueError(f"{path}: not a dataset; name files with --data-files, or use data.py text")
    import datasets  # slow to import
    where = ", ".join(data_files or [path])
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    try:
        if is_saved_dataset(path) or os.path.isfile(os.path.join(path, "dataset_dict.json")):
            rows = saved_rows(datasets.load_from_disk(path), split, data_files, options.get("name"))
        else:
            rows = datasets.load_dataset(path, data_files=data_files, split=split, **options)
        if is_sft(columns):
            yield from sft_documents(dataset_rows(rows, columns, where), columns, left_out)
        else:
            yield from row_documents(rows, columns, left_out)
    except RowError:
        raise
    except Exception as error:  # whatever the hub, pyarrow, pandas or the builder raises
        raise ValueError(f"{where}: {error_line(error.__cause__ or error)}") from error


def row_documents(rows, columns, left_out):
    """Yield the texts in `columns` of each row of a dataset."""
    for batch in rows.iter(1000):
        for name in columns:
            if name not in batch:
                raise ValueError(no_column(name, batch))
        for texts in zip(*[batch[name] for name in columns]):
            if not all(texts):
                left_out["rows without text"] += 1
                continue
            for name, text in zip(columns, texts):
                if not isinstance(text, str):
                    raise ValueError(f"column {name!r} holds {str(text)[:40]}, not text; name another")
            yield list(texts)


def saved_rows(saved, split, data_files, subset):
    """Return the rows of a dataset from save_to_disk: those of `split` if it is a DatasetDict."""
    if data_files or subset:
        raise ValueError("saved by save_to_disk, so it has neither --subset nor --data-files; leave them out")
    if not isinstance(saved, dict):
        if split not in ("train", str(saved.split)):  # "train" is the default of --split
            raise ValueError(f"holds one split, not {split!r}; leave out --split")
        return saved
    if split not in saved:
        raise ValueError(f"no split {split!r} in {', '.join(saved)}; name one with --split")
    return saved[split]


def stdlib_files(*skipped):
    """Return the paths of the running Python's standard library, without the folders `skipped`."""
    folder = sysconfig.get_paths()["stdlib"]
    files = files_below(folder, ("site-packages", "dist-packages", "__pycache__", *skipped))
    return [Path(file) for file in files]
