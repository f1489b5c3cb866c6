"""Check that `python doctor.py --install` builds Transformer Engine from PyPI's source package,
and that FP8 then runs.

    python bench/install.py --json results/install.json

Works in a fresh virtual environment that sees this interpreter's PyTorch but no Transformer Engine: installs,
then runs doctor.py. Without a network, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder of downloaded
packages.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.report import check_folder, write_report
from nanote import cli


@dataclass
class Options:
    json: Path | None = None  # Write the result here.


def make_environment(folder) -> str:
    """Make a virtual environment that sees this one's packages; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", folder], check=True)
    # the site-packages of this interpreter may themselves be a virtual environment's
    for packages in Path(folder, "lib").glob("python*/site-packages"):
        paths = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "below.pth").write_text("\n".join(paths))
    return str(Path(folder, "bin", "python"))


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/install.py", description=__doc__)
    check_folder(options.json)
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(folder)
        start = time.time()
        built = subprocess.run([python, "doctor.py", "--install"], cwd=ROOT, capture_output=True, text=True)
        seconds = time.time() - start
        print(built.stdout[-2000:])
        checked = subprocess.run([python, "doctor.py", "--json"], cwd=ROOT, capture_output=True, text=True)
        checks = json.loads(checked.stdout or '{"checks": []}')["checks"]
        found = {
            "install_exit_code": built.returncode,
            "install_seconds": round(seconds, 1),
            "cpus": os.cpu_count(),
            "commands": [line for line in built.stdout.splitlines() if " -m pip " in line],
            "last_lines": built.stdout.splitlines()[-3:],
            "doctor_exit_code": checked.returncode,
            "doctor": [f"{check['status']:5} {check['line']}" for check in checks],
        }
        # in place: without the paths of this machine
        for lines in (found["commands"], found["last_lines"], found["doctor"]):
            lines[:] = [line.replace(folder, "VENV").replace(sys.prefix, "PREFIX") for line in lines]
        write_report("bench/install.py", argv, found, options.json)
        print("\n".join([checked.stderr, *found["doctor"]]))
    return int(bool(built.returncode))


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/install.py"))
