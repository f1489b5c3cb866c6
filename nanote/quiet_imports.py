"""Let a command whose imports fail, or are interrupted, end without a traceback.

Each command imports this first. Ctrl-C during the imports, which take seconds, ends it silently; a missing
package, or an engine that does not run here, is one line and exit code 2. `run_command` restores Python's
excepthook and SIGINT handler. SIGINT that is ignored, as under nohup, stays ignored. This imports the
standard library alone.
"""
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def how_to_install(package: str) -> str:
    """Return how to install a package of the requirements, by the name that it is imported by; else ""."""
    listed = re.compile(rf"^(py)?{package}[>=]", re.MULTILINE)  # pyyaml is imported as yaml
    if listed.search((ROOT / "requirements.txt").read_text()):
        return "make train, then source .venv/bin/activate; or pip install -r requirements.txt"
    if listed.search((ROOT / "requirements-dev.txt").read_text()):
        return f"pip install {package}"
    return ""


def is_raised_by_the_kit(traceback) -> bool:
    """Return whether code of the kit has raised an error, not that of a package."""
    while traceback.tb_next:
        traceback = traceback.tb_next
    path = Path(traceback.tb_frame.f_code.co_filename)
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts


def print_import_error(error_class, error, traceback) -> None:
    """Print one line for a missing package or engine, and exit with code 2; else print the traceback."""
    line = ""
    if isinstance(error, ImportError) and error.name is None and is_raised_by_the_kit(traceback):
        line = str(error)  # which says what to do
    elif isinstance(error, ModuleNotFoundError) and "." not in error.name:  # else a part of it is missing
        if hint := how_to_install(error.name):
            line = f"needs the package {error.name}, which is not installed: {hint}"
    if not line:  # not a user's mistake
        sys.__excepthook__(error_class, error, traceback)
        return
    sys.stderr.write(f"{sys.argv[0]}: {line}\n")
    sys.exit(2)


sys.excepthook = print_import_error
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
