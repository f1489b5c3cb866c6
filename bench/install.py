"""Does `python doctor.py --install` build Transformer Engine from PyPI's source package on this machine, and
does FP8 then run?

    python bench/install.py --json results/install.json

In a fresh virtual environment that sees this interpreter's PyTorch but no Transformer Engine: installs, then
asks doctor.py. Without a network, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder of downloaded packages.
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
    json: Path | None = None  # Write what was found here.


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/install.py", description=__doc__)
    check_folder(options.json)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", folder], check=True)
        # where PyTorch itself lies in a virtual environment
        for packages in Path(folder, "lib").glob("python*/site-packages"):
            (packages / "below.pth").write_text(
                "\n".join(path for path in sys.path if path.endswith("site-packages"))
            )
        python = str(Path(folder, "bin", "python"))
        start = time.time()
        built = subprocess.run([python, "doctor.py", "--install"], cwd=ROOT, capture_output=True, text=True)
        seconds = time.time() - start
        print(built.stdout[-2000:])
        checked = subprocess.run([python, "doctor.py", "--json"], cwd=ROOT, capture_output=True, text=True)
        found = {
            "install_exit_code": built.returncode,
            "install_seconds": round(seconds, 1),
            "cpus": os.cpu_count(),
            "commands": [line for line in built.stdout.splitlines() if " -m pip " in line],
            "last_lines": built.stdout.splitlines()[-3:],
            "doctor_exit_code": checked.returncode,
            "doctor": [
                f"{check['status']:5} {check['line']}"
                for check in json.loads(checked.stdout or '{"checks": []}')["checks"]
            ],
        }
        for text in (found["commands"], found["last_lines"], found["doctor"]):
            text[:] = [line.replace(folder, "VENV").replace(sys.prefix, "PREFIX") for line in text]
        write_report("bench/install.py", argv, found, options.json)
        print("\n".join([checked.stderr, *found["doctor"]]))
    return int(bool(built.returncode))


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/install.py"))
