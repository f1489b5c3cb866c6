"""Command lines of all scripts: options from a dataclass, and mistakes reported in one line with exit code 2.

Use `parse` to fill a dataclass from the command line, and `run` around a script's main function. A script's
checks just raise ValueError or OSError, and `run` prints either as one line on stderr.
"""
import ast
import contextlib
import dataclasses
import inspect
import io
import os
import re
import select
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, get_type_hints

import tyro


def parse(config_class, argv=None, *, prog: str, description: str | None, default=None, groups=False,
          other_names: dict[str, str] | None = None):
    """Return `config_class` filled from `argv` (None: sys.argv[1:]), over the values of `default`.

    Args:
        groups: show the options in groups, see `_in_groups`; then `default` is needed.
        other_names: options of other programs, with "-" for "_", and what to use instead.

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
    if groups:
        options = {"config": (tyro.conf.OmitArgPrefixes,)}
    parsed_class = _in_groups(config_class, default) if groups else config_class
    # tyro's only public way to report a mistake is to print a box on stderr and exit.
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            config = tyro.cli(parsed_class, args=argv, prog=prog, description=description, **options)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        _check_other_names(argv, other_names or {}, prog)
        raise ValueError(_in_one_line(printed.getvalue(), prog)) from None
    if groups:
        config = config_class(**{name: value for group in vars(config).values()
                                 for name, value in vars(group).items()})
    for name, value in vars(config).items():
        if type(value) is int and not -2**63 <= value < 2**63:
            raise ValueError(f"{flag(name)} {value}: does not fit in 64 bits; use a smaller number")
    return config


def _check_other_names(argv: list[str], other_names: dict[str, str], prog: str) -> None:
    """Raise ValueError for an option, or an option with its value, that has another name here."""
    for argument, following in zip_longest(argv, argv[1:], fillvalue=""):
        name, _, value = argument.partition("=")
        for given in (name, f"{name} {value or following}"):
            use = other_names.get(given.replace("_", "-"))
            if use:
                raise ValueError(f"{given}: not an option of {prog}; use {use} (all options: {prog} --help)")


def _in_groups(config_class, default):
    """Return a dataclass whose fields are groups of the options of `config_class`, each a dataclass.

    tyro shows each of them in a box of its own in --help. In the source of `config_class` a comment on a line
    of its own begins a group and names it. tyro finds no help in a class without source: it is passed on.
    """
    source = textwrap.dedent(inspect.getsource(config_class))
    lines, body = source.splitlines(), ast.parse(source).body[0].body
    hints, groups = get_type_hints(config_class, include_extras=True), {}
    title, end = "", 0  # of the present group; the last line of the node before
    for node, following in zip_longest(body, body[1:]):
        titles = [line.strip(" #") for line in lines[end:node.lineno - 1] if line.lstrip().startswith("#")]
        title, end = titles[-1] if titles else title, node.end_lineno
        if isinstance(node, ast.AnnAssign):
            text = lines[end - 1].encode()[node.end_col_offset:].decode()  # a comment behind the field
            if isinstance(following, ast.Expr):  # a docstring below it
                text = following.value.value
            text = " ".join(text.strip(" #").split())
            name = node.target.id
            option = Annotated[hints[name], tyro.conf.arg(help=text)]
            field = dataclasses.field(default=getattr(default, name))
            groups.setdefault(title, []).append((name, option, field))
    boxes = []
    for title, fields in groups.items():
        group = dataclasses.make_dataclass("Group", fields)
        titled = Annotated[group, tyro.conf.arg(name=title)]
        boxes.append((re.sub(r"\W+", "_", title), titled, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass(config_class.__name__, boxes)


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
    """Call `main()`; return its result or 0, 2 after a user's mistake, 130 after Ctrl-C.

    141, without a message, if nobody reads stdout to its end, as in `… | head`.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for a terminal that cannot show a character
    try:
        try:
            return main() or 0
        finally:
            _flush_stdout()
    except BrokenPipeError as error:
        if not _nobody_reads_stdout():
            print(f"{script}: {error}", file=sys.stderr)
            return 2
        _discard_stdout()
        return 141  # as a shell says it: 128 + SIGPIPE
    except (ValueError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror}"
        print(f"{script}: {' '.join(message.split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"{script}: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130


def _flush_stdout() -> None:
    """Write what is buffered: a closed pipe or a full disk shows here, and not at exit."""
    try:
        if sys.stdout is not None:  # None if the shell has closed it (>&-)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        raise OSError(error.errno, f"{error.strerror}; not all of the output is there", "stdout") from None


def _discard_stdout() -> None:
    """Send what is still buffered nowhere, so that writing it at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nobody_reads_stdout() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))  # POLLERR: the other end of the pipe is closed


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
