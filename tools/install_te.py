"""Installing Transformer Engine: the command with what its build needs, and the failures known from it, each
with its fix.

    python doctor.py --install # run the command (--dry-run: only print it) python doctor.py --explain
    build.log # what went wrong in a build, or in any message (- reads standard input)

PyPI has Transformer Engine's core as a wheel for CUDA 12 and for CUDA 13, but its PyTorch part as source
only: pip compiles 33 C++ files against the torch that is installed, and four things go wrong with a plain
`pip install transformer-engine[pytorch]`: the build does not see that torch (--no-build-isolation), the
compiler does not see the headers of the CUDA libraries that PyTorch brings (CPATH), every CPU core compiles
at once and the memory runs out (MAX_JOBS), or pip takes a wheel from its cache that was built against another
torch (--no-cache-dir).

Only the standard library is needed here, so that a message can be explained on any machine.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13",
)
# what --no-build-isolation no longer brings
BUILD_TOOLS = ("setuptools", "wheel", "packaging", "ninja", "pybind11")
GIB_PER_JOB = 4  # what one compiler process on PyTorch's headers may take


class Failure(NamedTuple):
    """A failure that is known by its message."""
    name: str
    pattern: str  # a regular expression for a line of the log
    meaning: str
    fix: str  # <cudnn>, <libraries> and <jobs> stand for this machine's, see `fill`


INSTALL = "python doctor.py --install"
LIBRARIES = (
    "put PyTorch's own libraries first: export CUDNN_HOME=<cudnn> LD_LIBRARY_PATH=<libraries>${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    "  # Transformer Engine looks in CUDNN_HOME, and all others in LD_LIBRARY_PATH"
)
TOOLKIT = "install NVIDIA's CUDA toolkit of PyTorch's version (python -c 'import torch; print(torch.version.cuda)') and point CUDA_HOME to it"
CONTAINER = "NVIDIA's PyTorch container, tag 26.02-py3 or later,"  # 25.11 has TE 2.9, but PyTorch 2.10
CUDA_TORCH = "install a PyTorch with CUDA (pytorch.org, Get Started), then " + INSTALL

# The order matters: the causes come before what they cause, and the special before the general.
FAILURES = (
    Failure(
        "disk full", r"No space left on device", "The disk is full.",
        "free some, or point TMPDIR at another disk; then " + INSTALL,
    ),
    Failure(
        "memory",
        r"Killed signal terminated program|internal compiler error: Killed|died due to signal 9|^\s*(/bin/sh: .*)?Killed\s*$"
        r"|virtual memory exhausted|Cannot allocate memory|LLVM ERROR: out of memory|nvcc.*out of memory|cc1plus.*out of memory|std::bad_alloc",
        "The machine ran out of memory while compiling.",
        "fewer compilers at once: MAX_JOBS=<jobs> " + INSTALL,
    ),
    Failure(
        "no cuDNN frontend headers",
        r"cudnn_frontend\w*\.h: No such file|Could not find cuDNN frontend",
        "The headers of cuDNN's frontend are missing.",
        "pip install nvidia-cudnn-frontend; in a clone of Transformer Engine: "
        "git submodule update --init --recursive",
    ),
    Failure(
        "no cudnn.h", r"cudnn\w*\.h: No such file|[Cc]ould (not|NOT) find (cudnn_LIBRARY|CUDNN)",
        "The compiler does not find the headers of cuDNN that PyTorch brings.",
        INSTALL + " (puts them on CPATH)",
    ),
    Failure(
        "no compiler headers of CUDA", r"crt/host_(config|defines)\.h: No such file",
        "The CUDA compiler's own headers are missing.", TOOLKIT,
    ),
    Failure(
        "no CUDA headers",
        r"(nccl|cu\w+|nv\w+|library_types|driver_types)\.h(pp)?: No such file|RuntimeError: CUDA not found",
        "The compiler does not find the headers of the CUDA libraries that PyTorch brings.",
        INSTALL + " (puts them on CPATH)",
    ),
    Failure(
        "no Python headers", r"Python\.h: No such file", "Python's own headers are missing.",
        "apt install python3-dev (or your Python's)",
    ),
    Failure(
        "no C++ compiler",
        r"CMAKE_CXX_COMPILER not set|No CMAKE_CXX_COMPILER|No such file or directory: '[\w.-]*(c\+\+|g\+\+|gcc)[\w.-]*'"
        r"|command '[\w./-]*(c\+\+|g\+\+|gcc)[\w.-]*' failed: No such file|(c\+\+|g\+\+|gcc): (command )?not found",
        "There is no C++ compiler.",
        "apt install build-essential, then " + INSTALL,
    ),
    Failure(
        "compiler too new", r"unsupported GNU version! gcc versions later than",
        "This CUDA compiler does not take this gcc.",
        "install the gcc that the message names, and set CC and CXX to it",
    ),
    Failure(
        "no nvcc",
        r"Failed to find nvcc|Could (not|neither) find NVCC|CUDA_HOME environment variable is not set|nvcc: (command )?not found"
        r"|No such file or directory: '[^']*nvcc'",
        "The build found no CUDA compiler.",
        TOOLKIT,
    ),
    Failure(
        "two CUDA versions", r"detected CUDA version .*mismatches|CUDA version \([\d.]+\) mismatches",
        "The CUDA toolkit is of another version than PyTorch's CUDA.", TOOLKIT,
    ),
    Failure(
        "no CUDA in PyTorch",
        r"Invalid version: '?None|got 'NoneType'|Torch not compiled with CUDA enabled|Unsupported cuda version",
        "The installed PyTorch has no CUDA (a CPU build), or one that Transformer Engine does not support.",
        CUDA_TORCH,
    ),
    Failure(
        "the build does not see torch", r"This package needs Torch to build|No module named '?torch'?$",
        "pip built in an environment of its own, without torch.",
        "pip install -r requirements.txt, then " + INSTALL + " (--no-build-isolation)",
    ),
    Failure(
        "no build tools",
        r"No module named '?(setuptools|wheel|packaging|pybind11|ninja)|Ninja is required to load",
        "With --no-build-isolation the build tools must be installed.", INSTALL + " (brings them)",
    ),
    Failure(
        "no wheel for this system",
        r"No matching distribution found for transformer[-_]engine|Could not find a version .*transformer[-_]engine",
        "PyPI has no Transformer Engine for this system (it asks for Linux, glibc 2.28 and Python 3.10 or later), or there is no network.",
        "elsewhere nothing is needed: te_reference runs without it (NANOTE_REFERENCE=1)",
    ),
    Failure(
        "flash-attn broken",
        r"flash_attn\S*\.so.*undefined symbol",
        "flash-attn 2 was built against another PyTorch; Transformer Engine loads it.",
        "pip uninstall -y flash-attn (nothing here needs it), or build it anew: pip install --no-build-isolation --no-cache-dir flash-attn",
    ),
    Failure(
        "NCCL too old", r"undefined symbol: nccl\w+", "An NCCL older than PyTorch's is loaded.", LIBRARIES
    ),
    Failure(
        "cuBLAS too old", r"undefined symbol: cublas\w+",
        "A cuBLAS older than Transformer Engine asks for is loaded.",
        LIBRARIES + "; or pip install --upgrade nvidia-cublas",
    ),
    Failure(
        "built against another PyTorch", r"undefined symbol",
        "Transformer Engine was built against another PyTorch (another ABI).", INSTALL,
    ),
    Failure(
        "no Transformer Engine",
        r"No module named '?transformer_engine'?\s*$",
        "Transformer Engine is not installed in this Python environment.",
        INSTALL + "; without a GPU, import te_reference as te, as the model files do",
    ),
    Failure(
        "no PyTorch part",
        r"No module named '?transformer_engine(_torch|_extensions|\.pytorch)"
        r"|'transformer_engine' has no attribute 'pytorch'"
        r"|Found empty .transformer-engine. meta|shared object file for Transformer Engine (torch|core) lib"
        r"|metadata was found for transformer_engine_torch|^\s*StopIteration\s*$",
        "Transformer Engine is installed without its PyTorch part.",
        INSTALL,
    ),
    Failure(
        "Transformer Engine too old", r"module 'transformer_engine\.pytorch' has no attribute",
        "The model files need Transformer Engine 2.9 or later.", INSTALL + " (replaces it)",
    ),
    Failure(
        "mixed Transformer Engines",
        r"package version mismatch|Could not find (.transformer[-_]engine|TE core)|Multiple files found",
        "Parts of several Transformer Engines are installed.", INSTALL + " (removes them first)",
    ),
    Failure(
        "cuDNN mixed",
        r"CUDNN_STATUS_\w*VERSION_MISMATCH|cuDNN version incompatib|requires cuDNN [\d.]+ or later",
        "Two versions of cuDNN are mixed, or the loaded one is too old: the system's beside PyTorch's.",
        LIBRARIES,
    ),
    Failure(
        "no driver", r"libcuda\.so\.1: cannot open|Found no NVIDIA driver", "There is no NVIDIA driver here.",
        "on a machine without a GPU this is fine: NANOTE_REFERENCE=1; else install NVIDIA's driver",
    ),
    Failure(
        "no CUDA libraries",
        r"lib(cu|nv)\w+\.so[\d.]*: cannot open|(cudnn|nvrtc|curand|cublas|cudart) shared object not found",
        "The CUDA libraries that Transformer Engine was built for are not here; perhaps it is for another CUDA (12, 13) than PyTorch.",
        INSTALL
        + " (takes the core for PyTorch's CUDA); on a machine without a GPU this is fine: NANOTE_REFERENCE=1",
    ),
    Failure(
        "C++ library too old", r"version .GLIBC(XX)?_[\d.]+. not found",
        "The system's C library, or conda's C++ library, is too old.",
        f"conda install -c conda-forge libstdcxx-ng, or a newer system; {CONTAINER} has both",
    ),
    Failure(
        "driver replaced", r"[Dd]river/library version mismatch",
        "The driver was updated and the old one still runs.", "reboot",
    ),
    Failure(
        "driver too old", r"driver on your system is too old|driver version is insufficient",
        "The driver is too old for PyTorch's CUDA.",
        "update NVIDIA's driver, or install a PyTorch for the CUDA version that nvidia-smi shows",
    ),
    Failure(
        "driver not running", r"couldn't communicate with the NVIDIA driver|Failed to initialize NVML",
        "The driver does not run.", "reboot; in a container, start it with GPUs (docker run --gpus all)",
    ),
    Failure(
        "no kernels for this GPU", r"no kernel image is available",
        "PyTorch or Transformer Engine was built without this GPU's architecture.",
        "install a PyTorch that has it (python doctor.py names the architecture), then " + INSTALL,
    ),
    Failure(
        "no FP8 on this GPU", r"[Cc]ompute capability [\d.]+ or higher|not supported on 12\.0\+",
        "This GPU does not have the recipe.",
        "--fp8-recipe none, a recipe that python doctor.py names, or NANOTE_REFERENCE=1 (emulated)",
    ),
    Failure(
        "shape not for FP8",
        r"Unable to find (any )?suitable (cuBLAS )?(GEMM )?algorithm"
        r"|(dimension|stride) requirement on .*GEMM|FP8 execution requires the .*product of all dim",
        "cuBLAS has no FP8 GEMM for this shape: tokens, width or vocabulary is not a multiple of 16.",
        "pad it, such as a vocabulary of 50257 to 50304; python test_shapes.py prints which shapes run",
    ),
    Failure(
        "delayed scaling compiled",
        r"DelayedScaling is not supported under torch\.compile",
        "Transformer Engine does not support DelayedScaling under torch.compile.",
        "--fp8-recipe current with --compile, or leave --compile out: CUDA graphs are on by default",
    ),
    Failure(
        "GPU memory full", r"CUDA out of memory|CUDA error: out of memory", "The GPU's memory is full.",
        "a smaller --micro-batch-size, or end what else runs there (nvidia-smi)",
    ),
)


def explain(text):
    """[(Failure, the line of `text` that shows it)], the likeliest cause first; [] where none is known. One
    entry a failure; a line that a special failure explains is not explained again by a general one."""
    lines, explained, found = text.splitlines(), set(), []
    for failure in FAILURES:
        for number, line in enumerate(lines):
            if number not in explained and re.search(failure.pattern, line):
                if not any(known.name == failure.name for known, _ in found):
                    found.append((failure, " ".join(line.split())))
                explained.add(number)
    return found


def fill(fix):
    """A fix with this machine's paths and numbers."""
    nvidia = nvidia_folder()
    for name, value in (
        ("cudnn", nvidia / "cudnn"), ("libraries", library_path(nvidia)), ("jobs", max(1, max_jobs() // 2)),
    ):
        fix = fix.replace(f"<{name}>", str(value))
    return fix


def nvidia_folder():
    """The folder of the CUDA libraries that PyTorch's wheels bring, site-packages/nvidia, whether it exists
    or not; without importing torch."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent.parent / "nvidia" if spec and spec.origin else Path(sys.prefix, "nvidia")


def library_path(nvidia):
    """What LD_LIBRARY_PATH must begin with, so that the system's older cuDNN and NCCL do not win over
    PyTorch's."""
    found = [
        f"{nvidia}/{name}/lib" for name in ("cudnn", "cu13", "nccl") if Path(nvidia, name, "lib").is_dir()
    ]
    return ":".join(found) or f"{nvidia}/cudnn/lib"


def torch_cuda():
    """The CUDA version that the installed torch was built for, "" for a CPU build, None without torch;
    without importing it."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return None
    found = re.search(
        r"^cuda\b.*=\s*'([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE
    )
    return found[1] if found else ""


def installed_packages():
    """{name: version} of Transformer Engine's packages."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def free_memory_gib():
    """Memory that can still be had, in GiB, a container's limit included; None where the system does not
    tell."""
    try:
        free = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) / 2**20
    except (OSError, TypeError):
        return None
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(
                free,
                (
                    int(Path("/sys/fs/cgroup", limit).read_text())
                    - int(Path("/sys/fs/cgroup", used).read_text())
                )
                / 2**30,
            )
        except (OSError, ValueError):  # no such limit, or "max"
            pass
    return free


def max_jobs(free_gib=None, cpus=None):
    """How many compilers may run at once: one for each GIB_PER_JOB of free memory, at most one a core."""
    free_gib = free_memory_gib() if free_gib is None else free_gib
    cpus = cpus or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    return max(1, min(cpus, int((free_gib or GIB_PER_JOB) // GIB_PER_JOB)))


def te_requirement():
    """The line of requirements-gpu.txt that names Transformer Engine."""
    return next(
        line
        for line in (ROOT / "requirements-gpu.txt").read_text().splitlines()
        if line.startswith("transformer-engine[")
    )


def least_te():
    """The oldest Transformer Engine that requirements-gpu.txt allows: "2.9"."""
    return te_requirement().rpartition(">=")[2]


def plan(nvidia, installed, jobs, environment):
    """(settings {name: value}, commands [[word, …]]) that install Transformer Engine; pure: `environment` is
    os.environ or a test's."""
    headers = [str(folder) for folder in sorted(Path(nvidia).glob("*/include"))]
    if environment.get("CPATH"):
        headers.append(environment["CPATH"])
    settings = {"CPATH": ":".join(headers)} if headers else {}
    settings |= {"MAX_JOBS": environment.get("MAX_JOBS") or str(jobs),
                 # not a ready-made one from GitHub, which may be for another CUDA
                 "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
                 # expert parallelism, which asks for a newer NCCL than PyTorch brings and is not used here
                 "NVTE_WITH_NCCL_EP": "0"}
    pip = [sys.executable, "-m", "pip"]
    commands = [[*pip, "uninstall", "-y", *installed]] if installed else []
    commands += [
        [*pip, "install", *BUILD_TOOLS],
        [*pip, "install", "--no-build-isolation", "--no-cache-dir", te_requirement()],
    ]
    return settings, commands


def cannot_build():
    """Why the build cannot work here, as [(what, fix)]."""
    cuda, reasons = torch_cuda(), []
    if cuda is None:
        reasons.append(
            (
                "PyTorch is not installed, and Transformer Engine is built against it",
                "pip install -r requirements.txt",
            )
        )
    elif not cuda:
        reasons.append(
            (
                "the installed PyTorch has no CUDA, so Transformer Engine cannot be built against it",
                CUDA_TORCH,
            )
        )
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++")):
        reasons.append(("there is no C++ compiler", "apt install build-essential"))
    return reasons


def install(dry_run=False, run=subprocess.Popen):
    """Print the commands, run them unless `dry_run`, and explain a failure. Returns the exit code."""
    settings, commands = plan(nvidia_folder(), installed_packages(), max_jobs(), os.environ)
    for command in commands:
        build = "--no-build-isolation" in command
        print(
            " ".join(
                [
                    *(f"{name}={shlex.quote(value)}" for name, value in settings.items() if build),
                    shlex.join(command),
                ]
            ),
            flush=True,
        )
    obstacles = cannot_build()
    for what, fix in obstacles:
        print(f"{'warn' if dry_run else 'fail'}  {what}\n      fix: {fix}")
    if dry_run or obstacles:
        return 0 if dry_run else 1
    for command in commands:
        process = run(
            command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )
        log = []
        for line in process.stdout:
            print(line, end="", flush=True)
            log.append(line)
        if process.wait():
            print(f"fail  exit code {process.returncode}: {shlex.join(command)}")
            print(describe("".join(log)))
            return 1
    print("ok    installed; python doctor.py checks it")
    return 0


def describe(text):
    """The known failures in `text`, with their fixes, as lines to print."""
    found = explain(text)
    if not found:
        errors = [
            " ".join(line.split())
            for line in text.splitlines()
            if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)
        ]
        return "fail  no known failure in this text" + (f"; its first error: {errors[0]}" if errors else "")
    return "\n".join(
        f"fail  {failure.name}: {failure.meaning}\n      line: {line}\n      fix: {fill(failure.fix)}"
        for failure, line in found
    )
