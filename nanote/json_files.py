"""Read JSON files that may be damaged or hostile, with one check of size, depth, fields and types. Append to
logs.

    kind = {"step": COUNT, "model": str, "hf?": {"folder": str}}
    meta = read("out/tiny/step-100/meta.json", kind, "resume another checkpoint")

`kind` describes the expected value:

- a Python type, `X | None`, `Literal[…]`, `dict[str, X]`, or a tuple of alternatives;
- `[X]`: a list; a `range`: an integer in it; `between(low, high)`: a number;
- a dictionary: an object with these fields, optional if the name ends in "?";
- a dataclass: an object with its fields, all optional.

Fields that are not described are ignored, so that files of newer versions stay readable. Numbers must be
finite, and integers must fit in 64 bits. All readers raise ValueError in one line: the file, the field, its
value, what was expected, and `advice`.
"""
import contextlib
import dataclasses
import json
import math
import os
import types
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

MAX_BYTES = 2**24  # of a file or a .jsonl line; a line of fp8_health.jsonl has about 100 kB
MAX_DEPTH = 200
COUNT = range(2**63)
SIZE = range(1, 2**63)


def between(low: float, high: float):
    """Return the kind of a number from `low` to `high`."""
    return Annotated[float, low, high]


SHARE = between(0, 1)
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32 = between(-FLOAT32_MAX, FLOAT32_MAX)


def read(path, kind, advice: str):
    """Read a JSON file and check its value against `kind`."""
    return parse(read_bytes(path, advice), kind, path, advice)


def read_bytes(path, advice: str) -> bytes:
    """Read a regular file of at most MAX_BYTES. (Reading a named pipe would block forever.)"""
    if not Path(path).is_file():
        raise ValueError(f"{path}: missing, or not a regular file; {advice}")
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path}: larger than {MAX_BYTES:,} bytes; {advice}")
    return content


def replace_text(path: Path, text: str, failure: str, advice: str) -> None:
    """Write a file as a whole. On OSError (path: failure: reason; advice) the old file stays."""
    unfinished = path.with_suffix(".tmp")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(f"{path}: {failure}: {error.strerror or error}; {advice}") from error


def read_lines(path, kind, advice: str) -> list:
    """Read the values of a .jsonl file, without an incomplete last line; [] if there is no file."""
    if not Path(path).exists():
        return []
    if not Path(path).is_file():
        raise ValueError(f"{path}: not a regular file; {advice}")
    values = []
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 1), b""), 1):
            if not line.strip():
                continue
            try:
                values.append(parse(line, kind, f"{path}:{number}", advice))
            except ValueError:
                if line.endswith(b"\n") or len(line) > MAX_BYTES:
                    raise
    return values


def append_lines(path, values: list) -> None:
    """Append values to a .jsonl file, one per line. On OSError (a full disk) the file is unchanged."""
    size = os.path.getsize(path) if os.path.exists(path) else 0
    try:
        with open(path, "ab") as file:
            file.write("".join(json.dumps(value) + "\n" for value in values).encode())
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, size)  # otherwise the next record would be appended to a partial line
        raise


def reason(error: Exception) -> str:
    """Shorten an error message of another library to one line of at most 300 characters."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 300 else line[:297] + "…"


def parse(text: bytes | str, kind, where, advice: str):
    """Parse a JSON document and check its value against `kind`; `where` begins the message of an error."""
    try:
        value = json.loads(text)
        if _deeper(value, MAX_DEPTH):
            raise RecursionError
    except RecursionError:
        raise ValueError(f"{where}: lists or objects more than {MAX_DEPTH} deep; {advice}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8; {advice}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); {advice}") from None
    except ValueError as error:  # an integer with thousands of digits
        raise ValueError(f"{where}: {error}; {advice}") from None
    check(value, kind, where, advice)
    return value


def check(value, kind, where, advice: str) -> None:
    """Check a value that is already parsed against `kind`."""
    problem = _problem(value, kind, "")
    if problem:
        raise ValueError(f"{where}: {problem}; {advice}")


def _problem(value, kind, name: str) -> str:
    """Return what is wrong with `value`, "" if it matches `kind`."""
    if dataclasses.is_dataclass(kind):
        kind = {f"{field}?": hint for field, hint in get_type_hints(kind).items()}
    if _alternatives(kind):
        problems = [_problem(value, option, name) for option in _alternatives(kind)]
        # prefer a problem with a field inside the value to one with the value itself
        inner = [problem for problem in problems if not problem.startswith(f"{name} is ")]
        return "" if "" in problems else (inner or [_not_of(value, kind, name)])[0]
    inside = f"{name}." if name else ""
    if isinstance(kind, list) or get_origin(kind) is list:
        if type(value) is not list:
            return _not_of(value, list, name)
        item_kind = kind[0] if isinstance(kind, list) else get_args(kind)[0]
        parts = [(item, item_kind, f"{name}[{number}]") for number, item in enumerate(value)]
    elif get_origin(kind) is dict:
        if type(value) is not dict:
            return _not_of(value, dict, name)
        parts = [(item, get_args(kind)[1], inside + key) for key, item in value.items()]
    elif isinstance(kind, dict):
        if type(value) is not dict:
            return _not_of(value, dict, name)
        missing = [field for field in kind if not field.endswith("?") and field not in value]
        if missing:
            return f"{inside}{missing[0]} is missing"
        fields = {field.removesuffix("?"): hint for field, hint in kind.items()}
        parts = [(value[field], hint, inside + field) for field, hint in fields.items() if field in value]
    else:
        return "" if _is(value, kind) else _not_of(value, kind, name)
    return next(filter(None, (_problem(*part) for part in parts)), "")


def _alternatives(kind) -> tuple:
    """Return the kinds in a tuple or union, () for another kind."""
    if isinstance(kind, tuple):
        return kind
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()


def _is(value, kind) -> bool:
    """Return whether `value` matches an elementary `kind`, one without parts."""
    if isinstance(kind, range):
        return type(value) is int and value in kind
    if get_origin(kind) is Annotated:
        low, high = kind.__metadata__
        return _is(value, float) and low <= value <= high
    if get_origin(kind) is Literal:
        return any(type(value) is type(option) and value == option for option in get_args(kind))
    if kind is int:
        return type(value) is int and -2**63 <= value < 2**63
    if kind is float:
        return type(value) is float and math.isfinite(value) or _is(value, int)
    if kind is str:  # JSON may hold lone surrogates, which cannot be encoded as UTF-8
        return type(value) is str and not any("\ud800" <= character <= "\udfff" for character in value)
    return type(value) is kind


def _not_of(value, kind, name: str) -> str:
    return f"{name or 'the document'} is {_shown(value)}, not {_described(kind)}"


def _described(kind) -> str:
    if isinstance(kind, range):
        limits = f"of {kind.start} or more" if kind.stop == 2**63 else f"from {kind.start} to {kind.stop - 1}"
        return f"an integer {limits}"
    if get_origin(kind) is Annotated:
        return "a number from {:g} to {:g}".format(*kind.__metadata__)
    if _alternatives(kind):
        return " or ".join(map(_described, _alternatives(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if isinstance(kind, (dict, list)):
        return "a list" if isinstance(kind, list) else "an object"
    names = {int: "an integer", float: "a finite number", str: "text", bool: "true or false", list: "a list",
             type(None): "null"}
    return names.get(get_origin(kind) or kind, "an object")


def _shown(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _deeper(value, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [child for item in containers
                 for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return False
    return True
