"""Install Transformer Engine and FlashAttention 4, and explain build and import failures.

    python doctor.py --install            # run the commands (--dry-run: only print them)
    python doctor.py --explain build.log  # name the failure in a log or message, and its fix (-: stdin)

PyPI has wheels of Transformer Engine's core for CUDA 12 and 13, but only the source of its PyTorch part. pip
compiles 33 C++ files against the installed torch, and a plain `pip install transformer-engine[pytorch]` fails
in four ways. Each has a setting: the build does not see the installed torch (--no-build-isolation), the
compiler does not find the headers of the CUDA libraries that PyTorch installs (CPATH), one compiler per CPU
core runs out of memory (MAX_JOBS), and pip reuses a cached wheel that was built against another torch
(--no-cache-dir).

FlashAttention 4 is optional and comes last, on the GPUs that it has kernels for. A failure there is one line.

Only the standard library is needed, so that a message can be explained on any machine.
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
# With --no-build-isolation pip does not install these itself
BUILD_TOOLS = ("setuptools", "wheel", "packaging", "ninja", "pybind11")
FLASH, FLASH_CAPABILITY = "flash-attn-4", (9, 0)  # Hopper and later
GIB_PER_JOB = 4  # memory for one compiler process with PyTorch's headers


class Failure(NamedTuple):
    """A known failure, recognized by its message."""

    name: str
    pattern: str  # regular expression that matches a line of the log
    meaning: str
    fix: str  # `fill` replaces <cudnn>, <libraries> and <jobs> with this machine's values


INSTALL = "python doctor.py --install"
LIBRARIES = (
    "put PyTorch's own libraries first: "
    "export CUDNN_HOME=<cudnn> LD_LIBRARY_PATH=<libraries>${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    "  # Transformer Engine looks in CUDNN_HOME, and all others in LD_LIBRARY_PATH"
)
TOOLKIT = (
    "install NVIDIA's CUDA toolkit of PyTorch's version "
    "(python -c 'import torch; print(torch.version.cuda)') and point CUDA_HOME to it"
)
CONTAINER = "NVIDIA's PyTorch container, tag 26.02-py3 or later,"  # 25.11 has TE 2.9, but PyTorch 2.10
CUDA_TORCH = "install a PyTorch with CUDA (pytorch.org, Get Started), then " + INSTALL

# The order matters: causes before their consequences, and specific patterns before general ones.
FAILURES = (
    Failure(
        "disk full", r"No space left on device", "The disk is full.",
        "free some, or point TMPDIR at another disk; then " + INSTALL,
    ),
    Failure(
        "memory",
        r"Killed signal terminated program|internal compiler error: Killed|died due to signal 9"
        r"|^\s*(/bin/sh: .*)?Killed\s*$|virtual memory exhausted|Cannot allocate memory"
        r"|LLVM ERROR: out of memory|nvcc.*out of memory|cc1plus.*out of memory|std::bad_alloc",
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
        r"CMAKE_CXX_COMPILER not set|No CMAKE_CXX_COMPILER"
        r"|No such file or directory: '[\w.-]*(c\+\+|g\+\+|gcc)[\w.-]*'"
        r"|command '[\w./-]*(c\+\+|g\+\+|gcc)[\w.-]*' failed: No such file"
        r"|(c\+\+|g\+\+|gcc): (command )?not found",
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
        r"Failed to find nvcc|Could (not|neither) find NVCC|CUDA_HOME environment variable is not set"
        r"|nvcc: (command )?not found|No such file or directory: '[^']*nvcc'",
        "The build found no CUDA compiler.",
        TOOLKIT,
    ),
    Failure(
        "two CUDA versions", r"detected CUDA version .*mismatches|CUDA version \([\d.]+\) mismatches",
        "The CUDA toolkit is of another version than PyTorch's CUDA.", TOOLKIT,
    ),
    Failure(
        "no CUDA in PyTorch",
        r"Invalid version: '?None|got 'NoneType'|Torch not compiled with CUDA enabled"
        r"|Unsupported cuda version",
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
        r"No matching distribution found for transformer[-_]engine"
        r"|Could not find a version .*transformer[-_]engine",
        "PyPI has no Transformer Engine for this system (it asks for Linux, glibc 2.28 and Python 3.10 or "
        "later), or there is no network.",
        "elsewhere nothing is needed: te_reference runs without it (NANOTE_REFERENCE=1)",
    ),
    Failure(
        "flash-attn broken",
        r"flash_attn\S*\.so.*undefined symbol",
        "flash-attn 2 was built against another PyTorch; Transformer Engine loads it.",
        "pip uninstall -y flash-attn (nothing here needs it), or build it anew: "
        "pip install --no-build-isolation --no-cache-dir flash-attn",
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
        "The CUDA libraries that Transformer Engine was built for are not here; "
        "perhaps it is for another CUDA (12, 13) than PyTorch.",
        f"{INSTALL} (takes the core for PyTorch's CUDA); "
        "on a machine without a GPU this is fine: NANOTE_REFERENCE=1",
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
    """Return [(Failure, the line of `text` that shows it)], the likeliest cause first.

    Each failure is listed once. A line that matches a specific failure is not matched again with a general
    one.
    """
    lines, explained, found = text.splitlines(), set(), []
    for failure in FAILURES:
        for number, line in enumerate(lines):
            if number not in explained and re.search(failure.pattern, line):
                if not any(known.name == failure.name for known, _ in found):
                    found.append((failure, " ".join(line.split())))
                explained.add(number)
    return found


def fill(fix):
    """Insert this machine's paths and numbers into a fix."""
    nvidia = nvidia_folder()
    fix = fix.replace("<cudnn>", str(nvidia / "cudnn"))
    fix = fix.replace("<libraries>", library_path(nvidia))
    return fix.replace("<jobs>", str(max(1, max_jobs() // 2)))


def nvidia_folder():
    """Return site-packages/nvidia, the folder of the CUDA libraries that PyTorch's wheels install, without
    importing torch. It may not exist."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent.parent / "nvidia" if spec and spec.origin else Path(sys.prefix, "nvidia")


def library_path(nvidia):
    """Return the start of LD_LIBRARY_PATH that puts PyTorch's cuDNN and NCCL before the system's."""
    folders = [Path(nvidia, name, "lib") for name in ("cudnn", "cu13", "nccl")]
    return ":".join(str(folder) for folder in folders if folder.is_dir()) or f"{nvidia}/cudnn/lib"


def torch_cuda():
    """Return the CUDA version of the installed torch, "" for a CPU build or None without torch, without
    importing it."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else ""


def installed_packages():
    """Return {name: version} of the installed Transformer Engine packages."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def free_memory_gib():
    """Return the available memory in GiB, within the container's limit, or None if the system does not report
    it."""
    try:
        free = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) / 2**20
    except (OSError, TypeError):
        return None
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit_bytes = int(Path("/sys/fs/cgroup", limit).read_text())
            used_bytes = int(Path("/sys/fs/cgroup", used).read_text())
            free = min(free, (limit_bytes - used_bytes) / 2**30)
        except (OSError, ValueError):  # no such limit, or "max"
            pass
    return free


def max_jobs(free_gib=None, cpus=None):
    """Return the number of parallel compilers: one per GIB_PER_JOB of free memory, at most one per core."""
    if free_gib is None:
        free_gib = free_memory_gib()
    if not cpus:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fitting = int((free_gib or GIB_PER_JOB) // GIB_PER_JOB)
    return max(1, min(cpus, fitting))


def gpu_requirement(name):
    """Return the line of requirements-gpu.txt that names this package."""
    lines = (ROOT / "requirements-gpu.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(name))


def te_requirement():
    return gpu_requirement("transformer-engine[")


def least_te():
    """Return the oldest version of Transformer Engine that requirements-gpu.txt allows, such as "2.9"."""
    return re.search(r">=([\d.]+)", te_requirement())[1]


def flash_command(cuda):
    """Return the command [argument, …] that installs FlashAttention 4 for this CUDA version of PyTorch.

    Its wheel is pure Python and depends on any torch, so that pip keeps the installed one."""
    requirement = gpu_requirement(FLASH)
    if cuda.partition(".")[0] == "13":  # its compiler for CUDA 13 is an extra
        requirement = requirement.replace(FLASH, f"{FLASH}[cu13]")
    return [sys.executable, "-m", "pip", "install", requirement]


def gpu_capability():
    """Return the compute capability of the first GPU by nvidia-smi, or (0, 0)."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        shown = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    found = re.match(r"(\d+)\.(\d+)", shown)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def plan(nvidia, installed, jobs, environment):
    """Return the environment variables {name: value} and commands [[argument, …]] that install Transformer
    Engine. Reads no global state: `environment` is os.environ or a test's."""
    headers = [str(folder) for folder in sorted(Path(nvidia).glob("*/include"))]
    if environment.get("CPATH"):
        headers.append(environment["CPATH"])
    settings = {"CPATH": ":".join(headers)} if headers else {}
    settings |= {
        "MAX_JOBS": environment.get("MAX_JOBS") or str(jobs),
        # build from source: a prebuilt wheel from GitHub may be for another CUDA
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        # no expert parallelism: it needs a newer NCCL than PyTorch's and is not used here
        "NVTE_WITH_NCCL_EP": "0",
    }
    pip = [sys.executable, "-m", "pip"]
    commands = [[*pip, "uninstall", "-y", *installed]] if installed else []
    commands += [
        [*pip, "install", *BUILD_TOOLS],
        [*pip, "install", "--no-build-isolation", "--no-cache-dir", te_requirement()],
    ]
    return settings, commands


def cannot_build():
    """Return the reasons why a build fails on this machine, as [(problem, fix)]."""
    cuda, reasons = torch_cuda(), []
    if cuda is None:
        problem = "PyTorch is not installed, and Transformer Engine is built against it"
        reasons.append((problem, "pip install -r requirements.txt"))
    elif not cuda:
        problem = "the installed PyTorch has no CUDA, so Transformer Engine cannot be built against it"
        reasons.append((problem, CUDA_TORCH))
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++")):
        reasons.append(("there is no C++ compiler", "apt install build-essential"))
    return reasons


def install(dry_run=False, run=subprocess.Popen):
    """Print the commands, run them unless `dry_run`, and explain a failure.

    Return the exit code: 0 also without FlashAttention, which is optional."""
    settings, commands = plan(nvidia_folder(), installed_packages(), max_jobs(), os.environ)
    flash = [flash_command(torch_cuda() or "")] if gpu_capability() >= FLASH_CAPABILITY else []
    for command in commands + flash:
        assignments = []
        if "--no-build-isolation" in command:  # the command that compiles
            assignments = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
        print(" ".join([*assignments, shlex.join(command)]), flush=True)
    obstacles = cannot_build()
    for problem, fix in obstacles:
        print(f"{'warn' if dry_run else 'fail'}  {problem}\n      fix: {fix}")
    if dry_run or obstacles:
        return 0 if dry_run else 1
    for command in commands:
        code, log = run_and_show(command, settings, run)
        if code:
            print(f"fail  exit code {code}: {shlex.join(command)}")
            print(describe(log))
            return 1
    for command in flash:
        code, log = run_and_show(command, {}, run)
        if code:
            errors = [line for line in log.splitlines() if line.startswith("ERROR")]
            reason = errors[-1] if errors else f"exit code {code}"
            otherwise = "--attention auto uses another kernel"
            print(f"warn  FlashAttention 4 was not installed ({reason}): {otherwise}")
    print("ok    installed; run python doctor.py to check it")
    return 0


def run_and_show(command, settings, run):
    """Run a command and print its output as it comes. Return the exit code and the output."""
    process = run(
        command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )
    log = []
    for line in process.stdout:
        print(line, end="", flush=True)
        log.append(line)
    return process.wait(), "".join(log)


def describe(text):
    """Return the known failures in `text` and their fixes as lines to print."""
    found = explain(text)
    if found:
        return "\n".join(
            f"fail  {failure.name}: {failure.meaning}\n      line: {line}\n      fix: {fill(failure.fix)}"
            for failure, line in found
        )
    for line in text.splitlines():
        if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE):
            return f"fail  no known failure in this text; its first error: {' '.join(line.split())}"
    return "fail  no known failure in this text"
