"""Command lines of all scripts: options from a dataclass, and mistakes reported in one line with exit code 2.

Use `parse` to fill a dataclass from the command line, and `run` around a script's main function. A script's
checks just raise ValueError or OSError, and `run` prints either as one line on stderr.
"""
import contextlib
import io
import re
import sys
from pathlib import Path

import tyro


def parse(config_class, argv=None, *, prog: str, description: str | None, default=None):
    """Return `config_class` filled from `argv` (None: sys.argv[1:]), over the values of `default`.

    Raises:
        ValueError: a mistake that tyro reports, text that is not UTF-8, or an integer beyond 64 bits. Neither
            of the last two could be stored in a run's JSON files.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="backslashreplace").decode()
            raise ValueError(f"{shown}: not UTF-8 text here; rename the file, or set a UTF-8 locale such as "
                             "LC_ALL=C.UTF-8") from None
    options = {} if default is None else {"default": default}
    # tyro's only public way to report a mistake is to print a box on stderr and exit.
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            config = tyro.cli(config_class, args=argv, prog=prog, description=description, **options)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        raise ValueError(_in_one_line(printed.getvalue(), prog)) from None
    for name, value in vars(config).items():
        if type(value) is int and not -2**63 <= value < 2**63:
            raise ValueError(f"{flag(name)} {value}: does not fit in 64 bits; use a smaller number")
    return config


def _in_one_line(box: str, prog: str) -> str:
    """Return the problem and the hint from the box of several lines that tyro prints.

    tyro's public API offers only `console_outputs=False`, which drops the text. Its hooks for parse errors
    are private, and documented as subject to change in any release.
    """
    lines = box.splitlines()[1:]  # without the title
    # where stderr is not UTF-8, the box is drawn with "-"
    text = " ".join(line.strip("│╰╯ ") for line in lines).strip("─- ")
    problem = re.split(r"\s*(?:[─-]{9,}|Got errors:)", text)[0]
    similar = re.search(r"Perhaps you meant:\s+(--[\w-]+)", text)
    commands = re.search(r"Available subcommands: ([\w-]+(?:, [\w-]+)*)", text)
    hint = ""
    if similar:
        hint = f"perhaps {similar[1]}; "
    elif commands:
        hint = f"use {commands[1]}; "
    return f"{problem.rstrip('.')} ({hint}all options: {prog} --help)"


def run(main, script: str) -> int:
    """Call `main()`; return its result or 0, 2 after a user's mistake, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for a terminal that cannot show a character
    try:
        return main() or 0
    except (ValueError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}"
        print(f"{script}: {' '.join(message.split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"{script}: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130


def flag(name: str) -> str:
    """Return the command-line option of a field: max_steps -> --max-steps."""
    return f"--{name.replace('_', '-')}"


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return "1 step" or "2 steps"; `plural` for words that need more than an s."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def in_a_line(error) -> str:
    """Return an exception's type and first line, and for a torch.compile error the line of user code."""
    root = f"{Path(__file__).parent.parent}/"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    message = lines[0]
    if "from user code:" in lines:
        places = [number for number, line in enumerate(lines[:-1]) if line.startswith('File "')]
        ours = [number for number in places if root in lines[number]] or places
        if ours:
            place, code = lines[ours[-1]], lines[ours[-1] + 1]
            file, _, function = place.partition(", line ")
            name = Path(file[5:].strip(chr(34))).name
            message += f" at {code} ({name}, line {function})"
    elif message.endswith(":"):
        message = " ".join(lines[:2])
    return f"{type(error).__name__}: {message.replace(root, '')[:300]}"  # a file's name is enough
