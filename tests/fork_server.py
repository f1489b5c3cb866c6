"""Run Python in a process forked from one that has imported PyTorch: importing it takes seconds of CPU time.

That process has imported no file of this kit, so a forked one starts as `python script.py` does, except for
what the interpreter itself reads from the environment, such as PYTHONPATH; subprocess.run tests that.
"""
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload([
    "torch._dynamo", "torch.distributed.checkpoint", "torch.utils.tensorboard", "matplotlib.figure", "tyro"])


def run_python(*arguments, cwd=None, env=None, timeout=120) -> subprocess.CompletedProcess:
    """Run `python script.py …` or `python -c code …`. `env`: changes of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        process = server.Process(target=_run, args=(
            list(map(str, arguments)), cwd or os.getcwd(), os.environ | (env or {}), files))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(arguments, timeout)
        return subprocess.CompletedProcess(arguments, process.exitcode, *(file.read_text() for file in files))


def _run(arguments, cwd, environment, files):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", closefd=False)
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests"))]
    if arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
