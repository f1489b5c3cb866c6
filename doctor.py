"""Check what is installed here and what works, and print a fix for each failure.

    python doctor.py                      # one line per check
    python doctor.py --install            # Transformer Engine and FlashAttention 4; --dry-run: print how
    python doctor.py --explain build.log  # the cause and the fix of a failed build or import; -: stdin
    python doctor.py --model my_model.py:MyModel  # does the edited model compute in FP8 what it does without?

Lines begin with ok (works), info (not needed), warn (works, but not at its best) or fail (training needs it).
The exit code is 0 if the kit can train here, with or without a GPU, 1 after a fail and 2 for a mistake on the
command line. --explain gives 1 for a text without a known failure. --model gives 1 if a module of the model
is off, and names it.

Only --model needs more than the standard library. A broken CUDA library kills the process instead of raising
an exception, so the checks that import torch run in processes of their own.
"""
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PIP = [sys.executable, "-m", "pip"]
TORCH = importlib.util.find_spec("torch")  # finds it without an import
NVIDIA = Path(TORCH.origin).parent.parent / "nvidia" if TORCH else Path("nvidia")  # PyTorch's CUDA libraries
TE_PACKAGES = [f"transformer-engine{part}" for part in ("", "-torch", "-cu12", "-cu13")]
FLASH = "flash-attn-4"
FLASH_CAPABILITY = (9, 0)  # Hopper and later

INSTALL = "python doctor.py --install"
REQUIREMENTS = "pip install -r requirements.txt"
CUDA_TORCH = f"install a PyTorch with CUDA (pytorch.org, Get Started), then {INSTALL}"
LIBRARIES_FIRST = f"export CUDNN_HOME={NVIDIA}/cudnn LD_LIBRARY_PATH={NVIDIA}/cudnn/lib:{NVIDIA}/nccl/lib"
DISABLE_RHT = "export NVTE_NVFP4_DISABLE_RHT=1 NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1"
FIXES = {"CUDA_TORCH": CUDA_TORCH, "LIBRARIES_FIRST": LIBRARIES_FIRST, "DISABLE_RHT": DISABLE_RHT}


def read_answers():
    """Return [(pattern, cause, fix)] of guide/errors.txt."""
    answers = []
    _, *entries = (HERE / "guide" / "errors.txt").read_text().split("\n\n")  # the first explains the file
    for entry in entries:
        cause, fix, *patterns = (line.strip() for line in entry.strip().splitlines())
        fix = fix.removeprefix("fix: ").format(**FIXES)
        answers.append(("|".join(patterns), cause, fix))
    return answers


def explain(text):
    """Return [(cause, fix, the line of `text` that shows it)], the likeliest cause first."""
    lines = text.splitlines()
    found = []
    for pattern, cause, fix in read_answers():
        matches = [line for line in lines if re.search(pattern, line)]
        if matches:
            first_line = " ".join(matches[0].split())
            found.append((cause, fix, first_line))
            lines = [line for line in lines if line not in matches]  # not for a more general pattern
    return found


def print_known_failures(text):
    """Print the known failures in a log. Return the exit code: 0 if there are any."""
    found = explain(text)
    for cause, fix, line in found:
        print(f"fail  {cause}\n      line: {line}\n      fix: {fix}")
    if not found:
        print("fail  no known failure in this text: search it for error or fatal")
        return 1
    return 0


# ---------------------------------------------------------------- checks: each yields (status, line, fix)

def installed(*packages):
    """Return {name: version} of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def parse_version(text):
    """Parse a version: "2.11.0+cu130" -> (2, 11, 0)."""
    release = re.match(r"[\d.]*", text)[0]
    return tuple(int(number) for number in re.findall(r"\d+", release))


def query_gpus(fields):
    """Return what nvidia-smi says of these fields, one line per GPU, and its error message."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return [], ""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "No devices were found" in done.stdout:
        return [], ""
    if done.returncode:
        return [], done.stdout
    return done.stdout.splitlines(), ""


def check_python():
    name = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    is_old = sys.version_info < (3, 10)
    if is_old:
        yield "fail", f"{name}: too old", "install Python 3.10 or later"
    else:
        yield "ok", name, ""
    requirements = re.findall(r"^([\w-]+)(?:>=([\d.]+))?", (HERE / "requirements.txt").read_text(), re.M)
    missing = []
    for package, least in requirements:
        found = installed(package)
        if package not in found or parse_version(found[package]) < parse_version(least):
            missing.append(f"{package} {least}".strip())
    if missing:
        yield "fail", f"packages missing or too old: {', '.join(missing)}", REQUIREMENTS


def check_driver():
    gpus, error = query_gpus("driver_version,name")
    if error:
        yield failed_result("NVIDIA driver", error, "reinstall NVIDIA's driver and reboot")
    elif gpus:
        driver, name = gpus[0].split(", ", 1)
        yield "ok", f"NVIDIA driver {driver}; {len(gpus)} x {name}", ""
    else:
        yield "info", "no NVIDIA GPU: training runs on the CPU, with FP8 emulated", ""


def check_torch():
    import torch
    cuda = torch.version.cuda
    name = f"PyTorch {torch.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"
    gpus, _ = query_gpus("name")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not torch.cuda.is_available() and (is_hidden or not gpus):
        yield "ok", f"{name}; CUDA_VISIBLE_DEVICES hides the GPU" if gpus else name, ""
        return
    if not cuda:
        yield "fail", f"{name}, but there is a GPU", CUDA_TORCH
        return
    (torch.ones(1, device="cuda") + 1).item()  # raises the reason: no driver, no kernels for this GPU
    yield "ok", name, ""
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    gpu = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    yield "ok", f"{gpu}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free", ""
    if (major, minor) < FLASH_CAPABILITY:
        return
    if found := installed(FLASH):
        yield "ok", f"FlashAttention 4: {found[FLASH]}", ""
    else:
        line = "FlashAttention 4: not installed; --attention auto uses another kernel"
        yield "warn", line, shlex.join(flash_command(cuda))


def check_fp8():
    """Check Transformer Engine, the recipes that this machine supports, and their GEMMs."""
    import torch
    capability = (0, 0)
    if torch.cuda.is_available():
        torch.backends.cudnn.version()  # loads PyTorch's cuDNN: Transformer Engine looks for one itself
        capability = torch.cuda.get_device_capability()
        yield from check_te(torch.version.cuda, capability)
    if error := named_engine_error(is_on_cpu=capability == (0, 0)):
        yield "fail", error, f"unset NANOTE_ENGINE; on a GPU, te needs {INSTALL}"
        return
    from nanote import recipes
    reasons = {name: recipes.unsupported_reason(name) for name in recipes.RECIPES if name != "none"}
    supported = [name for name, reason in reasons.items() if not reason]
    if supported:
        yield "ok", f"FP8 recipes ({recipes.describe()}): {', '.join(supported)}", ""
    else:
        yield "warn", "no FP8 on this GPU: it needs Ada (8.9) or later", "train.py --fp8-recipe none"
    if "nvfp4" in supported and capability >= (12, 0):  # Transformer Engine supports it by its rules
        line = ("nvfp4 on compute capability 12.x: not measured here; TransformerEngine issue 3062 reports "
                "'invalid argument' from its random Hadamard transform, which is on by default")
        yield "warn", line, DISABLE_RHT
    for name, reason in reasons.items():
        if reason:
            yield "info", f"{name} not here: {reason}", ""
    for name in supported:
        if name != "nvfp4":  # its rounding error has no simple bound
            yield check_gemm(recipes, name)


def named_engine_error(is_on_cpu):
    """Return why the engine that NANOTE_ENGINE names does not run here; "" if it does, or none is named."""
    if not os.environ.get("NANOTE_ENGINE"):
        return ""
    try:
        from nanote import recipes
        if is_on_cpu:
            recipes.check_cpu()
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def check_te(cuda, capability):
    """Check Transformer Engine on a GPU. Raise ImportError if it cannot be used."""
    packages = installed(*TE_PACKAGES)
    needed = gpu_requirement("transformer-engine")
    cores = [name[-2:] for name in packages if "-cu" in name]  # 12 or 13, the CUDA of the core library
    if not packages and not importlib.util.find_spec("transformer_engine"):
        if capability == (9, 0):
            line = "Transformer Engine is not installed: FP8 runs on fast_kernels, with delayed scaling alone"
            yield "info", line, INSTALL
            return
        status = "fail" if capability >= (8, 9) else "info"
        yield status, "Transformer Engine is not installed: FP8 would be emulated, slowly", INSTALL
        return
    major, _, _ = cuda.partition(".")
    has_other_core = cores and cores != [major]
    if has_other_core or len(set(packages.values())) > 1:
        problem = f"Transformer Engine is not of one version for PyTorch's CUDA {cuda}: {packages}"
        raise ImportError(problem)
    import transformer_engine.pytorch
    te_version = transformer_engine.__version__
    if parse_version(te_version) < parse_version(re.search(r">=([\d.]+)", needed)[1]):
        problem = f"Transformer Engine {te_version} is too old, {needed} is needed"
        raise ImportError(problem)
    yield "ok", f"Transformer Engine {te_version}", ""
    folders = sorted(set(re.findall(r"(/\S*)/libcudnn", Path("/proc/self/maps").read_text())))
    if len(folders) > 1:
        yield "warn", f"two versions of cuDNN are loaded, from {' and '.join(folders)}", LIBRARIES_FIRST


def check_gemm(recipes, name):
    """Compare a Linear under an FP8 recipe with float64.

    E4M3 rounds by at most 2^-4, so the relative error is at most sqrt(2) 2^-4 = 0.088; BF16 is below 0.01.
    """
    import torch

    from nanote.config import TrainConfig
    device, dtype = "cpu", torch.float32
    if torch.cuda.is_available():
        device, dtype = "cuda", torch.bfloat16
    linear = recipes.te.Linear(512, 512, bias=False, params_dtype=dtype, device=device)
    x = torch.randn(256, 512, device=device, dtype=dtype, requires_grad=True)
    for _ in range(2):  # delayed scaling has its scales from the second pass on
        with recipes.te.autocast(enabled=True, recipe=recipes.make(TrainConfig(fp8_recipe=name))):
            y = linear(x)
        y.backward(torch.randn_like(y))
    exact = x.double() @ linear.weight.double().T
    error = ((y.double() - exact).norm() / exact.norm()).item()
    line = f"FP8 GEMM under {name}: relative error {error:.3f} (from 0.01 to 0.088 is right)"
    if 0.01 < error <= 0.088:
        return "ok", line, ""
    return "fail", line, f"{INSTALL}; until then --fp8-recipe none"


def failed_result(what, error, fix):
    """Return a result with the fix for the error message, or with `fix` if the message is unknown."""
    known = explain(error)
    if known:
        cause, known_fix, line = known[0]
        return "fail", f"{what}: {cause} ({line[:200]})", known_fix
    lines = error.strip().splitlines() or ["no message"]
    return "fail", f"{what}: {lines[-1][:300]}", fix


def in_own_process(what, check, fix):
    """Run a check in a process of its own and yield its results, the last of which tells of a crash."""
    code = (f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import doctor\n"
            f"for result in doctor.{check.__name__}(): print('result:' + json.dumps(result), flush=True)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace")
    for line in done.stdout.splitlines():
        if line.startswith("result:"):
            yield json.loads(line.removeprefix("result:"))
    if done.returncode < 0:
        yield failed_result(what, f"{done.stderr}\nkilled by signal {-done.returncode}", fix)
    elif done.returncode:
        yield failed_result(what, done.stderr, fix)


def print_results(results):
    """Print each result as it comes. Return whether one failed."""
    has_failed = False
    for status, line, fix in results:
        print(f"{status:<6}{line}", flush=True)
        if fix:
            print(f"      fix: {fix}", flush=True)
        if status == "fail":
            has_failed = True
    return has_failed


def examine():
    """Run all checks, print their results and the verdict. Return 1 if one failed, else 0."""
    results = [*check_python(), *check_driver(), *in_own_process("PyTorch", check_torch, REQUIREMENTS)]
    if results[-1][0] != "fail":
        results += in_own_process("FP8", check_fp8, INSTALL)
    has_failed = print_results(results)
    print("begin with the first fix" if has_failed else "nanoTE can train here: python train.py")
    return int(has_failed)


def check_edited_model(name):
    """Compare an edited model in FP8 with itself without FP8. Return the exit code: 1 if a module is off."""
    try:
        import torch
        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")  # fast_kernels; before anything imports Triton
        from nanote.model_check import check_model
    except ImportError as error:
        fix = f"; {REQUIREMENTS}" if isinstance(error, ModuleNotFoundError) else ""  # an engine's has its own
        print(f"doctor.py: --model: {error}{fix}", file=sys.stderr)
        return 2
    has_failed = print_results(check_model(name))
    print("begin with the first fail" if has_failed else f"{name} computes in FP8 what it computes without")
    return int(has_failed)


# ---------------------------------------------------------------- install

def gpu_requirement(name):
    """Return the line of requirements-gpu.txt that begins with `name`."""
    return re.search(f"^{name}.*", (HERE / "requirements-gpu.txt").read_text(), re.M)[0]


def flash_command(cuda):
    """Return the command that installs FlashAttention 4. Its compiler for CUDA 13 is an extra."""
    extra = "[cu13]" if cuda.startswith("13") else ""
    return [*PIP, "install", gpu_requirement(FLASH).replace(FLASH, FLASH + extra)]


def install(dry_run):
    """Print and run the commands that install Transformer Engine and FlashAttention 4. Return the exit code.

    PyPI has only the source of Transformer Engine's PyTorch part. A plain pip install fails in four ways: the
    build does not see the installed torch (--no-build-isolation), the compiler does not find the headers of
    PyTorch's CUDA libraries (CPATH), one compiler per core runs out of memory (MAX_JOBS), and pip reuses a
    wheel that was built for another torch (--no-cache-dir).
    """
    cuda = torch_cuda()
    if not cuda and not dry_run:
        sys.exit(f"doctor.py: Transformer Engine is built against a PyTorch with CUDA: {CUDA_TORCH}")
    settings = build_settings()
    for name, value in settings.items():
        print(f"export {name}={shlex.quote(value)}")
    te = gpu_requirement("transformer-engine")
    commands = [[*PIP, "install", "setuptools", "wheel", "packaging", "ninja", "pybind11"],
                [*PIP, "install", "--no-build-isolation", "--no-cache-dir", te]]
    if old := installed(*TE_PACKAGES):
        commands.insert(0, [*PIP, "uninstall", "-y", *old])
    for command in commands:
        if run(command, settings, dry_run) != 0:
            return 1
    capabilities, _ = query_gpus("compute_cap")
    if capabilities and parse_version(capabilities[0]) >= FLASH_CAPABILITY:
        if run(flash_command(cuda), {}, dry_run) != 0:
            print("warn  FlashAttention 4 was not installed: --attention auto uses another kernel")
    if not dry_run:
        print("ok    installed; python doctor.py checks it")
    return 0


def torch_cuda():
    """Return the CUDA version of the installed PyTorch, read without importing it; "" without one."""
    if not TORCH:
        return ""
    text = Path(TORCH.origin).with_name("version.py").read_text()
    found = re.search(r"^cuda\b.*'([\d.]+)'", text, re.M)
    return found[1] if found else ""


def build_settings():
    """Return the environment variables of the build; see `install`."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    jobs = max(1, min(os.cpu_count(), memory // 2**32))  # a compiler takes up to 4 GiB
    settings = {
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(jobs)),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # a wheel from GitHub may be for another CUDA
        "NVTE_WITH_NCCL_EP": "0",  # expert parallelism needs a newer NCCL than PyTorch's
    }
    headers = [str(folder) for folder in sorted(NVIDIA.glob("*/include"))]
    if os.environ.get("CPATH"):
        headers.append(os.environ["CPATH"])
    if headers:
        settings["CPATH"] = ":".join(headers)
    return settings


def run(command, settings, dry_run):
    """Print a command and, unless `dry_run`, run it and explain a failure. Return its exit code."""
    print(shlex.join(command), flush=True)
    if dry_run:
        return 0
    process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace")
    log = []
    for line in process.stdout:
        print(line, end="", flush=True)
        log.append(line)
    if process.wait() != 0:
        print_known_failures("".join(log))
    return process.returncode


def main(argv=None):
    parser = argparse.ArgumentParser(prog="doctor.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="Transformer Engine and FlashAttention 4")
    parser.add_argument("--dry-run", action="store_true", help="with --install: only print the commands")
    parser.add_argument("--explain", metavar="LOG", help="a file with error messages; -: standard input")
    parser.add_argument("--model", metavar="FILE:CLASS", help="compare an edited model in FP8 and without")
    options = parser.parse_args(argv)
    if options.install:
        return install(options.dry_run)
    if options.explain:
        log = sys.stdin if options.explain == "-" else open(options.explain, errors="replace")
        return print_known_failures(log.read())
    if options.model:
        return check_edited_model(options.model)
    return examine()


if __name__ == "__main__":
    try:
        from nanote.command import run_command
    except ImportError:  # tyro is not installed
        sys.exit(main())
    sys.exit(run_command(main, "doctor.py"))
