"""What every command shares: how its options are parsed, and how it ends after a mistake or Ctrl-C."""
import contextlib
import os
import shutil
import signal
import sys
import time

import tyro

from nanote.config import flag


def parse(config_class, argv, prog, description=None, default=tyro.MISSING_NONPROP):
    """Return `config_class` filled from `argv` (None: sys.argv). tyro prints help and mistakes, and exits."""
    if shutil.get_terminal_size().columns < 40:
        os.environ["COLUMNS"] = "40"  # for tyro, whose --help does not end in a terminal of 5 columns
    return tyro.cli(config_class, args=argv, prog=prog, description=description, default=default)


def require_at_least(least: int, options, *names: str) -> None:
    """Raise ValueError for an option, or one of its values, that is below `least`; None is no value."""
    for name in names:
        value = getattr(options, name)
        numbers = value if isinstance(value, tuple | list) else [value]
        for number in numbers:
            if number is not None and number < least:
                raise ValueError(f"{flag(name)} {number}: must be at least {least}")


def run_command(main, prog: str) -> int:
    """Call `main()`; return its result or 0; 2 and one line for ValueError, OSError and a missing package,
    130 after Ctrl-C."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None: closed by the shell, as in >&-
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not have every character
    sys.excepthook = sys.__excepthook__  # nanote/quiet_imports.py has changed it, and SIGINT's handler
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code, message = _call(main)
    try:
        sys.stdout.flush()
    except OSError as error:  # nobody reads it, or the disk is full
        if code == 0 and not isinstance(error, BrokenPipeError):
            message = f"stdout: {error_line(error)}"
        code = code or 1
        _discard(sys.stdout)
    try:
        if message:
            sys.stderr.write(f"{prog}: {message}\n")
        sys.stderr.flush()
    except OSError:
        code = code or 1
        _discard(sys.stderr)
    return code


def _call(main) -> tuple[int, str]:
    """Call `main()`; return the exit code, and the line about its failure, or ""."""
    try:
        with contextlib.redirect_stdout(_NamedStream(sys.stdout, "stdout")):
            return main() or 0, ""
    except BrokenPipeError:  # nobody reads stdout, as in `| head`
        return 141, ""
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # if rank 0 fails too, torchrun ends this process meanwhile: one line is enough
        return 2, error_line(error)
    except ModuleNotFoundError as error:  # a package that this command alone needs, such as transformers
        if "." in error.name:  # a part of a package that is installed
            raise
        return 2, f"needs the package {error.name}, which is not installed: pip install {error.name}"
    except KeyboardInterrupt as stop:
        return 130, str(stop) or "interrupted"


def _discard(stream) -> None:
    """Send what a stream still holds to nowhere, so that it does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _NamedStream:
    """A text stream whose OSErrors have its name as their file name."""

    def __init__(self, stream, name: str):
        self.stream = stream
        self.name = name

    def __getattr__(self, attribute):
        return getattr(self.stream, attribute)

    def write(self, text: str) -> int:
        with self._naming():
            return self.stream.write(text)

    def flush(self) -> None:
        with self._naming():
            self.stream.flush()

    @contextlib.contextmanager
    def _naming(self):
        try:
            yield
        except OSError as error:
            error.filename = self.name
            raise


def error_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
