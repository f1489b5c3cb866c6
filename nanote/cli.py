"""How every script here reads its command line and reports a user's mistake: one line, exit code 2.

tyro derives the options from a dataclass and explains a mistake in a box of several lines; `parse` folds that
box into one line, and `run` prints any mistake (ValueError, OSError) the same way, so that a script's checks
need only raise.
"""
import contextlib
import io
import re
import sys
from pathlib import Path

import tyro


def parse(config_class, argv=None, *, prog: str, description: str, default=None):
    """Fill the dataclass from `argv` (None: sys.argv[1:]), over the values of `default`. ValueError in one
    line for options that tyro refuses, text that is not UTF-8 and integers that 64 bits do not hold, neither
    of which could be stored in a run."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="backslashreplace").decode()
            raise ValueError(f"{shown}: not UTF-8 text here; rename the file, or set a UTF-8 locale such as "
                             "LC_ALL=C.UTF-8") from None
    config = _parse(config_class, argv, prog, description, {} if default is None else {"default": default})
    for name, value in vars(config).items():
        if type(value) is int and not -2**63 <= value < 2**63:
            raise ValueError(f"--{name.replace('_', '-')} {value}: does not fit in 64 bits; use a smaller "
                             "number")
    return config


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return "1 step" or "2 steps"; `plural` where an s is not enough."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def _parse(config_class, argv, prog, description, options):
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(config_class, args=argv, prog=prog, description=description, **options)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
    # without the box's title; where stdout is not UTF-8, the rules are of "-"
    lines = complaint.getvalue().splitlines()[1:]
    text = " ".join(line.strip("│╰╯ ") for line in lines).strip("─- ")
    problem = re.split(r"\s*(?:[─-]{9,}|Got errors:)", text)[0]
    meant = re.search(r"Perhaps you meant:\s+(--[\w-]+)", text)
    commands = re.search(r"Available subcommands: ([\w-]+(?:, [\w-]+)*)", text)
    hint = f"perhaps {meant[1]}; " if meant else f"use {commands[1]}; " if commands else ""
    raise ValueError(f"{problem.rstrip('.')} ({hint}all options: {prog} --help)")


def run(main, script: str) -> int:
    """Call `main()` and return the exit code: 0, 2 after a user's mistake in one line on stderr, or what main
    returns."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        return main() or 0
    except (ValueError, OSError) as error:
        told = (
            f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError) and error.filename
            else str(error)
        )
        print(f"{script}: {' '.join(told.split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"{script}: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130


def in_a_line(error) -> str:
    """Return an exception's type and first line, and for a compiler's error the line of code here."""
    here = f"{Path(__file__).parent.parent}/"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    told = lines[0]
    if "from user code:" in lines:
        places = [number for number, line in enumerate(lines[:-1]) if line.startswith('File "')]
        ours = [number for number in places if here in lines[number]] or places
        if ours:
            file, _, function = lines[ours[-1]].partition(", line ")
            told += f" at {lines[ours[-1] + 1]} ({Path(file[5:].strip(chr(34))).name}, line {function})"
    elif told.endswith(":"):
        told = " ".join(lines[:2])
    return f"{type(error).__name__}: {told.replace(here, '')[:300]}"  # a file's name here is enough
