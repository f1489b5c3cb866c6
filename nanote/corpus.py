"""Text corpora: the documents that `data.py` hands to `write_tokens` (nanote/tokens.py).

A document is a str, str pieces (a long file, or prompt and answer), a tuple (str, number in [0, 1) that
replaces its hash), or a Conversation (nanote/chat.py). `left_out` counts what is skipped. The `datasets`
library reads rows, but not conversations in a .jsonl file, so that a message can name the line.
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
MESSAGES = "messages"  # the field of a row that holds a conversation


def text_documents(paths, columns, left_out):
    """Yield a document per text file, and per row (its `columns`) of files of BUILDERS and of datasets saved
    by save_to_disk; also in folders, where files that cannot be read are counted in `left_out`. With two
    columns, for a prompt and an answer, a file that lacks one of them may have conversations."""
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"{path}: no such file; name files or folders that exist")
        if not os.path.isdir(path):
            yield from documents_of(path, columns, left_out)
            continue
        for source in sources_below(path):
            try:
                yield from documents_of(source, columns, left_out)
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
    if suffix == ".jsonl" and has_conversations(first_row(path), columns):
        yield from conversation_lines(path)
    elif suffix in BUILDERS and os.path.getsize(path) > 0:  # `datasets` refuses an empty file
        yield from dataset_documents(BUILDERS[suffix], columns, left_out, [path], streaming=True)
    elif len(columns) > 1:
        raise ValueError(f"{path}: holds no rows; name .jsonl, .json, .csv or .parquet files")
    else:
        pieces = text_pieces(path)
        first = next(pieces, "")  # raises for most binary files, before a document begins
        yield chain([first], pieces)


def has_conversations(names, columns):
    """Return whether rows with fields of these names hold conversations. A prompt and an answer go first."""
    return len(columns) == 2 and MESSAGES in names and not set(columns) <= set(names)


def first_row(path):
    """Return the first object of a .jsonl file, {} if it has none."""
    try:
        return next(json_lines(path), ("", {}))[1]
    except ValueError:  # `datasets` may read it, or say what is wrong
        return {}


def conversation_lines(path):
    """Yield the Conversation in each line of a .jsonl file."""
    for where, row in json_lines(path):
        if MESSAGES not in row:
            raise ValueError(f"{where}: no field {MESSAGES!r}; make a folder of each kind of file")
        yield Conversation(row[MESSAGES], where)


def json_lines(path):
    """Yield (the file and line for messages, the object in it) of each line that is not empty."""
    try:
        with io.BufferedReader(pyarrow.input_stream(path)) as file:  # which decompresses .gz and .zst
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, json_object(line, where)
    except OSError as error:
        raise ValueError(f"{path}: {error_line(error)}") from error


def json_object(line, where):
    try:
        row = json.loads(line)
    except ValueError as error:  # also bytes that are not UTF-8
        raise ValueError(f"{where}: not JSON ({error_line(error)})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object; write {{\"{MESSAGES}\": [...]}}")
    return row


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
        yield from row_documents(rows, columns, left_out, where)
    except Exception as error:  # whatever the hub, pyarrow, pandas or the builder raises
        raise ValueError(f"{where}: {error_line(error.__cause__ or error)}") from error


def row_documents(rows, columns, left_out, where):
    """Yield the texts in `columns` of each row of a dataset, or its Conversation. where: for messages."""
    num_rows = 0
    for batch in rows.iter(1000):
        if has_conversations(batch, columns):
            for messages in batch[MESSAGES]:
                num_rows += 1
                yield Conversation(messages, f"{where}, row {num_rows}")
            continue
        for name in columns:
            if name not in batch:
                raise ValueError(f"no column {name!r} in {', '.join(batch)}; name one with --column")
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
