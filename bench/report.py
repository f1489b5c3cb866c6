"""Write the JSON of the studies, print their rows and Markdown tables.

- `Rows`: a list of measurements, printed and written to its file after each one. Running a study again
  replaces only the rows that it measures again.
- `write_report`: one document with the machine, versions, date, command and commit beside the figures.
- `markdown`: a table.
"""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import collect_env

from nanote import recipes
from nanote.engine import TE_VERSION

ROOT = Path(__file__).resolve().parent.parent
PRINTED = {  # field of a row -> its text on the screen
    "ms": "{:8.2f} ms",
    "tokens_per_s": "{:>9,.0f} tokens/s",
    "ratio_to_plain": "{:.3f} x plain",
    "ratio_to_nanogpt": "{:.3f} x nanoGPT",
    "ratio_to_nanogpt_bf16": "{:.3f} x nanoGPT in BF16",
    "ratio_to_transformers": "{:.3f} x transformers",
    "ratio_to_llmq": "{:.3f} x llmq",
    "ratio_to_peft": "{:.3f} x peft",
    "ratio_to_full": "{:.3f} x full",
    "ratio": "{:.3f} x unedited",
    "over_bf16": "{:.3f} x BF16",
    "mfu": "MFU {:.1%}",
    "peak_gib": "{:.1f} GiB",
    "forward_ms": "forward {:.2f}",
    "backward_ms": "backward {:.2f}",
    "optimizer_ms": "optimizer {:.2f}",
    "eager": "eager {:.2f} x BF16",
    "graph": "graph {:.2f} x BF16",
    "graph_breaks": "{} graph breaks",
    "graphs": "{} graphs",
    "compile_s": "compiled in {:.0f} s",
    "tokens_per_s_per_gpu": "{:,.0f} tokens/s per GPU",
    "efficiency": "efficiency {:.3f}",
}


def check_output(*paths) -> None:
    """Raise OSError before anything is measured if a file cannot be written."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it first")
        if path.is_dir():
            raise IsADirectoryError(f"{path}: is a folder; name a file in it, such as {path / 'rows.json'}")


def write_json(path, content) -> None:
    """Write JSON through a temporary file, so that an interrupted run leaves the previous file intact."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def command_line(program, argv) -> str:
    """Return the command that a report records. `argv` None: the arguments of this process."""
    arguments = sys.argv[1:] if argv is None else argv
    return shlex.join(["python", program, *map(shorten_path, arguments)])


def shorten_path(argument: str) -> str:
    """Return an absolute path relative to the repository, or outside it its last part; else the argument."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.machine()


def commit() -> str | None:
    """Return the commit of this checkout, ending in "-dirty" if a tracked file was changed; None without git.

    The environment variable NANOTE_COMMIT names it where the checkout is a copy without its history.
    """
    if name := os.environ.get("NANOTE_COMMIT"):
        return name
    head = git("rev-parse", "HEAD")
    if head is None:
        return None
    is_changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if is_changed else head


def git(*arguments: str) -> str | None:
    """Return what git prints in this checkout, None if it fails or is not installed."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def origin(program, argv) -> dict:
    """Return what all results record: the version of PyTorch, date, command and commit."""
    return {
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": command_line(program, argv),
        "commit": commit(),
    }


def row_origin(program, argv) -> dict:
    """Return what each row of measurements records."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),  # None without nvidia-smi
        "te": "te_reference" if recipes.IS_REFERENCE else TE_VERSION,
        **origin(program, argv),
    }


def write_report(program, argv, figures, path=None) -> dict:
    """Return `figures` with machine, versions, date, command and commit before them; write it to `path` if
    given."""
    machine = {"machine": recipes.describe(), "cpu": cpu_name(), "python": platform.python_version()}
    result = machine | origin(program, argv) | figures
    if path:
        write_json(path, result)
    return result


class Rows(list):
    """Measured rows, printed and kept in a JSON file (path, or None) that is rewritten after each one.

    A new row replaces an earlier one with the same values of `keys`. Every row records the GPU, driver,
    versions, date, command and commit that it was measured with. ValueError if the file holds something else,
    or GPU measurements while there is no GPU.
    """

    def __init__(self, path, keys, program, argv):
        self.path = path
        self.keys = keys
        self.origin = row_origin(program, argv)
        check_output(path)
        try:
            if path and path.exists():
                self.extend(json.loads(path.read_text()))
            for row in self:
                self._key(row)  # KeyError: a row of another study
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"--json {path}: holds something else than rows with "
                             f"{', '.join(keys)}; name another file") from error
        if self.origin["gpu"] == "CPU" and any(row.get("gpu", "CPU") != "CPU" for row in self):
            raise ValueError(f"--json {path}: holds GPU measurements, and there is no GPU here; "
                             "name another file")

    def _key(self, row) -> list:
        return [row[key] for key in self.keys]

    def has(self, row) -> bool:
        """Return whether a row with these keys was measured without an error."""
        same = [other for other in self if self._key(other) == self._key(row)]
        return any("error" not in other for other in same)

    def add(self, row, label=None) -> None:
        """Print a row behind a label (None: the values of its keys), keep it, and write the file.

        Floats are rounded to six digits.
        """
        figures = []
        for name, text in PRINTED.items():
            if row.get(name) is not None:
                figures.append(text.format(row[name]))
        if label is None:
            label = " ".join(f"{value:<14}" for value in self._key(row))
        print(f"{label:44}", row.get("error") or "  ".join(figures), flush=True)

        row = row | self.origin
        for name, value in row.items():
            if isinstance(value, float):
                row[name] = float(f"{value:.6g}")
        self[:] = [other for other in self if self._key(other) != self._key(row)]
        self.append(row)
        if self.path:
            write_json(self.path, self)


def markdown(titles, rows, left=1) -> str:
    """Return a Markdown table. The first `left` columns are left-aligned, the others right-aligned."""
    rule = ["---"] * left + ["---:"] * (len(titles) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, rule, *rows))
