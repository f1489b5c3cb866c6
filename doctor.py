"""Check what is installed here and what works: one line per check, and a fix for each failure.

    python doctor.py                      # --json prints one JSON document
    python doctor.py --install            # Transformer Engine and FlashAttention (--dry-run: print commands)
    python doctor.py --explain build.log  # name the failure in a log or message, and its fix (-: stdin)

    ok     works
    info   not installed and not needed: nothing to fix
    warn   works, but not at its best
    fail   broken, or missing although training needs it

The exit code is 0 if the kit can train here and 1 if any check fails. A machine without a GPU gives 0:
training runs on the CPU, with FP8 emulated by te_reference. A GPU with FP8 but without a working Transformer
Engine gives 1, although the emulation would run. A mistake on the command line gives 2. --explain gives 0 if
it knows the failure and 1 otherwise.

A broken CUDA library kills the process instead of raising an exception. So everything that imports torch,
Transformer Engine or FlashAttention runs in a separate process (the `probe_` functions), and doctor itself
needs only the standard library and tyro. The probes fill a `Facts`; each check is a function of the facts
only.
"""

import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from tools import install_te
from tools.install_te import CUDA_TORCH, INSTALL, LIBRARIES, explain, fill

HERE = Path(__file__).resolve().parent
REQUIREMENTS = f"{sys.executable} -m pip install -r requirements.txt"
EMULATE = "NANOTE_REFERENCE=1 python train.py (FP8 emulated, slow)"
GENERATIONS = (
    ((10, 0), "Blackwell"), ((9, 0), "Hopper"), ((8, 9), "Ada"), ((8, 0), "Ampere"), ((7, 5), "Turing"),
    ((7, 0), "Volta"),
)
MARK = "doctor's facts: "  # prefix of the lines of a probe's output that hold its findings


class Result(NamedTuple):
    status: str  # ok, info, warn or fail
    line: str
    fix: str = ""


def ok(line):
    return Result("ok", line)


def info(line):
    return Result("info", line)


def warn(line, fix):
    return Result("warn", line, fix)


def fail(line, fix):
    return Result("fail", line, fix)


@dataclass
class Facts:
    """What the probes found. A dict is empty if the thing is not installed, and has an "error" if it is
    broken."""

    python: tuple = tuple(sys.version_info[:3])
    missing: list = field(default_factory=list)  # packages of requirements.txt, not installed or too old
    # from nvidia-smi: gpus [name], driver, cuda (the newest version that the driver supports)
    smi: dict = field(default_factory=dict)
    hidden: bool = False  # CUDA_VISIBLE_DEVICES hides every GPU
    # version, cuda, gpus [{name, capability, total_gib, free_gib}], reason (why no GPU is usable), archs
    torch: dict = field(default_factory=dict)
    te_packages: dict = field(default_factory=dict)  # {name: version}
    te: dict = field(default_factory=dict)  # version, cuda (major), tested [version], fast_kernels (why off)
    # where, emulated, reasons {recipe: why unsupported}, errors {recipe: [y, dx, dw]}, raised {recipe:
    # message}
    fp8: dict = field(default_factory=dict)
    cudnn: dict = field(default_factory=dict)  # version, files
    nccl: dict = field(default_factory=dict)  # version
    flash2: dict = field(default_factory=dict)  # version
    flash4: dict = field(default_factory=dict)  # version
    memory_gib: float | None = None
    disk_gib: float = 0.0

    @property
    def gpu(self):
        """Return the first GPU that PyTorch can use, or None."""
        return (self.torch.get("gpus") or [None])[0]

    @property
    def capability(self):
        return tuple(self.gpu["capability"]) if self.gpu else (0, 0)


# ------------------------------------------------------------------------------
# Probes: each runs in a separate process


def probe_torch(emit):
    import warnings

    import torch
    found = {"version": torch.__version__, "cuda": torch.version.cuda or "", "gpus": [], "reason": ""}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if found["cuda"] and not torch.cuda.is_available():
            try:
                torch.cuda.init()
            except Exception as error:
                found["reason"] = "\n".join([*(str(warning.message) for warning in caught), str(error)])
    emit(found)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name, capability = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
            memory = {"total_gib": total / 2**30, "free_gib": free / 2**30}
            found["gpus"].append({"name": name, "capability": capability} | memory)
        emit(found | {"archs": torch.cuda.get_arch_list()})


def probe_te(emit):
    import transformer_engine
    import transformer_engine.pytorch  # noqa: F401
    number = transformer_engine.__version__
    cuda = getattr(transformer_engine.common, "_cuda_major_version", None)
    emit({"version": number, "cuda": cuda} | fast_kernels(number))


def fast_kernels(te_version):
    """Return the tested versions and why the kernels are off under this one; {} without fast_kernels/."""
    try:
        from fast_kernels import support as fast_support
    except ImportError:
        return {}
    return {"tested": list(fast_support.TESTED_TE), "fast_kernels": fast_support.version_reason(te_version)}


def probe_fp8(emit):
    import torch

    from nanote import fp8
    found = {"where": fp8.describe(), "emulated": fp8.IS_REFERENCE, "errors": {}, "raised": {},
             "reasons": {name: fp8.unsupported_reason(name) for name in fp8.RECIPES if name != "none"}}
    emit(found)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("delayed", "current", "block", "mxfp8"):  # NVFP4 has no simple error bound
        if not found["reasons"][name]:
            try:
                found["errors"][name] = gemm_errors(fp8, name, device)
            except Exception as error:
                found["raised"][name] = f"{type(error).__name__}: {error}"
            emit(found)


def gemm_errors(fp8, recipe_name, device, tokens=256, width=512):
    """Return the relative error norms of te.Linear's output, dgrad and wgrad under the recipe.

    The inputs are normally distributed; the error is ||result - exact|| / ||exact||, exact in float64.
    """
    import torch
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    recipe = fp8.make_recipe(recipe_name)
    linear = fp8.te.Linear(width, width, bias=False, params_dtype=dtype, device=device)
    x, grad, weight = (torch.randn(n, width, device=device).to(dtype) for n in (tokens, tokens, width))
    with torch.no_grad():
        linear.weight.copy_(weight)
    for _ in range(3):  # delayed scaling has valid scales from the second pass on
        x, linear.weight.grad = x.detach().requires_grad_(), None
        with fp8.te.autocast(enabled=True, recipe=recipe):
            y = linear(x)
        y.backward(grad)
    x64, grad64, weight64 = x.detach().double(), grad.double(), weight.double()
    pairs = (
        (y.detach(), x64 @ weight64.T),
        (x.grad, grad64 @ weight64),
        (linear.weight.grad, grad64.T @ x64),
    )
    return [((result.double() - exact).norm() / exact.norm()).item() for result, exact in pairs]


def probe_cudnn(emit):
    """Run a convolution and two attention kernels, which together load all of cuDNN. PyTorch loads its cuDNN
    first, as in the model files; Transformer Engine then searches for one itself."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    os.environ["NVTE_FLASH_ATTN"] = "0"
    number = torch.backends.cudnn.version() or 0  # 91900: 9.19.0
    found = {"version": f"{number // 10000}.{number // 100 % 100}.{number % 100}"}
    options = dict(device="cuda", dtype=torch.float16, requires_grad=True)
    image, kernel = torch.randn(2, 16, 32, 32, **options), torch.randn(2, 16, 3, 3, **options)
    q, k, v = (torch.randn(2, 128, 4, 64, **options) for _ in range(3))
    try:
        F.conv2d(image, kernel).sum().backward()
        if torch.cuda.get_device_capability() >= (8, 0):
            try:
                heads_first = [t.transpose(1, 2) for t in (q, k, v)]
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    F.scaled_dot_product_attention(*heads_first, is_causal=True).sum().backward()
            except RuntimeError as error:
                if "No available kernel" not in str(error):  # this PyTorch was built without it
                    raise
            try:
                import transformer_engine.pytorch as te
            except Exception:  # check_te reports this
                te = None
            if te:
                attention = te.DotProductAttention(4, 64, attn_mask_type="causal", qkv_format="bshd")
                attention(q, k, v).sum().backward()
        torch.cuda.synchronize()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    emit(found | {"files": sorted(set(re.findall(r"/\S*libcudnn\S*", Path("/proc/self/maps").read_text())))})


def probe_nccl(emit):
    import torch
    import torch.distributed as dist
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    torch.cuda.synchronize()
    emit({"version": ".".join(map(str, torch.cuda.nccl.version()))})
    dist.destroy_process_group()


def probe_flash2(emit):
    emit({"version": version("flash-attn")})
    from flash_attn import flash_attn_func  # noqa: F401


def probe_flash4(emit):
    try:
        emit({"version": version("flash-attn-4")})
    except PackageNotFoundError:
        pass
    import flash_attn.cute
    emit({"version": getattr(flash_attn.cute, "__version__", "4")})


def run_probe(name, timeout=150):
    """Run `probe_<name>` in a separate process. Return the last dict that it emitted, with an "error" if the
    probe failed, crashed or timed out."""
    code = (f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import doctor\n"
            f"doctor.probe_{name}(lambda found: print('\\n' + {MARK!r} + json.dumps(found), flush=True))")
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=timeout
        )
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        errors, code = f"no answer in {timeout} seconds", 1
    reports = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    found = json.loads(reports[-1]) if reports else {}
    if code:
        crash = f"\nkilled by {signal.Signals(-code).name}" if code < 0 else ""
        found["error"] = errors.strip()[-4000:] + crash
    return found


def command_output(*command):
    """Return (exit code, output), or None if the command does not exist or does not finish."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=60
        )
        return done.returncode, done.stdout
    except (OSError, subprocess.TimeoutExpired):
        return None


def query_smi():
    listed = command_output("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    if listed is None:
        device = Path("/dev/nvidia0")
        return {"error": f"{device} exists, but nvidia-smi is not installed"} if device.exists() else {}
    code, text = listed
    if code:
        return {} if "No devices were found" in text else {"error": text.strip()}
    rows = [line.split(", ", 1) for line in text.strip().splitlines()]
    if not rows:
        return {}
    _, report = command_output("nvidia-smi") or (0, "")
    newest = re.search(r"CUDA Version:\s*([\d.]+)", report)
    return {"gpus": [name for _, name in rows], "driver": rows[0][0], "cuda": newest[1] if newest else ""}


def missing_requirements(text=None):
    """Return ["torch (not installed)", "tyro 0.5 (needs 0.9)", …] for requirements.txt without the tests'
    part."""
    text = (HERE / "requirements.txt").read_text() if text is None else text
    needed = text.partition("# for the tests")[0]
    missing = []
    for name, least in re.findall(r"^([\w-]+)(?:>=([\d.]+))?\s*$", needed, re.MULTILINE):
        try:
            have = version(name)
        except PackageNotFoundError:
            missing.append(f"{name} (not installed)")
            continue
        if least and numbers(have) < numbers(least):
            missing.append(f"{name} {have} (needs {least})")
    return missing


def numbers(text):
    """Parse a version: "2.11.0+cu130" -> (2, 11, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", text)[0])))


def gather_facts():
    """Run all probes. Takes a few seconds without a GPU, half a minute with one."""
    facts = Facts(
        missing=missing_requirements(),
        smi=query_smi(),
        te_packages=install_te.installed_packages(),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
        torch=run_probe("torch"),
        memory_gib=install_te.free_memory_gib(),
        disk_gib=shutil.disk_usage(".").free / 2**30,
    )
    wanted = ["fp8"] if facts.torch.get("version") else []
    if facts.gpu:
        wanted += ["te", "cudnn", "nccl", "flash2", "flash4"]
    not_installed = (
        r"No module named '?(transformer_engine|flash_attn)('|\.cute|$)|metadata was found for flash-attn"
    )
    with ThreadPoolExecutor(4) as pool:
        for name, found in zip(wanted, pool.map(run_probe, wanted)):
            last_line = found.get("error", "").strip().rpartition("\n")[2]
            absent = re.search(not_installed, last_line) and not found.get("version")
            setattr(facts, name, {} if absent else found)
    return facts


# ------------------------------------------------------------------------------
# Checks: each is a function of the facts only and returns a list of results


def broken(what, error, otherwise):
    """Return a failure with the fix for its error message, or with `otherwise` if the message is unknown."""
    known = explain(error)
    if known:
        failure, line = known[0]
        return fail(f"{what}: {failure.meaning} ({line[:200]})", fill(failure.fix))
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no message"]
    return fail(f"{what}: {lines[-1][:300]}", otherwise)


def check_python(facts):
    name = f"Python {'.'.join(map(str, facts.python))}, {platform.system()} {platform.machine()}"
    found = [ok(name)]
    if facts.python < (3, 10):
        found = [fail(f"{name}: too old", "install Python 3.10 or later")]
    if facts.missing:
        found.append(fail(f"packages: {', '.join(facts.missing)}", REQUIREMENTS))
    return found


def check_driver(facts):
    smi = facts.smi
    if smi.get("error"):
        return [broken("NVIDIA driver", smi["error"], "reinstall NVIDIA's driver and reboot")]
    if smi:
        newest = f", for CUDA {smi['cuda']} and older" if smi.get("cuda") else ""
        return [ok(f"NVIDIA driver {smi['driver']}{newest}; {len(smi['gpus'])} x {smi['gpus'][0]}")]
    if facts.gpu:
        return []
    return [info("no NVIDIA GPU: training runs on the CPU, FP8 emulated by te_reference; that is fine")]


def check_torch(facts):
    torch = facts.torch
    if not torch.get("version"):
        return [broken("PyTorch does not import", torch.get("error", ""), REQUIREMENTS)]
    name = f"PyTorch {torch['version']}, " + (f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA")
    if facts.gpu or not facts.smi.get("gpus"):
        return [broken(name, torch["error"], REQUIREMENTS) if torch.get("error") else ok(name)]
    if facts.hidden:
        return [warn(f"{name}; CUDA_VISIBLE_DEVICES hides the GPU", "unset CUDA_VISIBLE_DEVICES")]
    if not torch["cuda"]:
        return [fail(f"{name}, but there is a GPU", CUDA_TORCH)]
    newest = f"; the driver runs CUDA {facts.smi['cuda']} and older" if facts.smi.get("cuda") else ""
    error = torch.get("reason") or torch.get("error", "")
    fix = "reboot; if that does not help, install a PyTorch for the driver's CUDA (pytorch.org, Get Started)"
    return [broken(f"{name} cannot use the GPU{newest}", error, fix)]


def has_kernels(capability, archs):
    """Return whether a build for these architectures (sm_75, compute_120, sm_90a, …) runs on this GPU.

    sm_ code runs on GPUs of the same major version and the same or a later minor version. compute_ code (PTX)
    runs on any later GPU. Code with a letter runs on exactly that compute capability.
    """
    for arch in archs:
        kind, number, letter = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", arch).groups()
        built = int(number[:-1]), int(number[-1])
        compatible = kind == "compute" or built[0] == capability[0]
        if built == capability or (not letter and built <= capability and compatible):
            return True
    return False


def check_gpu(facts):
    if not facts.gpu:
        return []
    generation = next((name for least, name in GENERATIONS if facts.capability >= least), "older than Volta")
    capability = "{}.{}".format(*facts.capability)
    memory = f"{facts.gpu['free_gib']:.0f} of {facts.gpu['total_gib']:.0f} GiB free"
    line = f"{facts.gpu['name']} ({generation}), compute capability {capability}, {memory}"
    archs = facts.torch.get("archs", [])
    if archs and not has_kernels(facts.capability, archs):
        build = torch_build_for(facts.capability, archs)
        problem = f"{line}: this PyTorch has no code for it (it has {', '.join(archs)})"
        return [fail(problem, f"install a PyTorch build that has it: {build}")]
    if facts.capability < (8, 0):
        return [
            warn(
                f"{line}: bfloat16 is slow before Ampere (8.0), and Transformer Engine needs Ampere or later",
                "for small runs NANOTE_REFERENCE=1 python train.py --dtype float32; "
                "FP8 and speed need another GPU",
            )
        ]
    if facts.gpu["free_gib"] < min(4, facts.gpu["total_gib"] / 2):
        return [warn(line, "another program uses the GPU's memory: nvidia-smi names it")]
    return [ok(line)]


def torch_build_for(capability, archs):
    """Name the PyTorch build with kernels for a GPU that `archs` do not cover."""
    numbers_found = re.findall(r"_(\d+)", " ".join(archs))
    oldest = min((int(number[:-1]), int(number[-1])) for number in numbers_found)
    if capability < oldest:
        return (
            "the one for CUDA 12.6: pip install --force-reinstall torch --index-url "
            "https://download.pytorch.org/whl/cu126; or --device cpu"
        )
    return "the newest, for the newest CUDA (pytorch.org)"


def expected_reasons(capability, cuda):
    """Return {recipe: why this GPU cannot run it, "" if it can}, for a GPU without Transformer Engine.

    The rules are those of Transformer Engine 2.20 (pytorch/quantization.py, `_compute_fp8_support` and the
    functions after it).
    """
    def needs(least, name):
        if capability >= least:
            return ""
        major, minor = least
        return f"Device compute capability {major}.{minor} or higher required for {name} execution."

    fp8 = needs((8, 9), "FP8")
    mxfp8 = needs((10, 0), "MXFP8")
    if capability >= (12, 0):
        mxfp8 = "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
    block = ""
    if capability < (9, 0) or numbers(cuda)[:2] < (12, 9):
        block = "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."
    nvfp4 = needs((10, 0), "NVFP4")
    return {"delayed": fp8, "current": fp8, "mxfp8": mxfp8, "nvfp4": nvfp4, "block": block}


def te_too_old(facts):
    return bool(facts.te.get("version")) and numbers(facts.te["version"]) < numbers(install_te.least_te())


def check_te(facts):
    if not facts.gpu:
        return [info("Transformer Engine: needs a GPU, te_reference takes its place")]
    packages = facts.te_packages
    cores = [name for name in packages if "-cu" in name]
    if len(set(packages.values())) > 1 or len(cores) > 1:
        listed = ", ".join(f"{name} {number}" for name, number in packages.items())
        problem = f"Transformer Engine: parts of several are installed ({listed})"
        return [fail(problem, f"{INSTALL} (removes them first)")]
    core = cores[0][-2:] if cores else str(facts.te.get("cuda") or "")
    torch_cuda = facts.torch["cuda"]
    if core and core != torch_cuda.partition(".")[0]:
        return [fail(f"Transformer Engine is for CUDA {core}, PyTorch for CUDA {torch_cuda}", INSTALL)]
    if not facts.te and not packages:
        if facts.capability < (8, 0):
            return [info("Transformer Engine: not installed, and it does not support this GPU")]
        problem = "Transformer Engine is not installed; FP8 is emulated, slowly"
        return [fail(problem, INSTALL) if facts.capability >= (8, 9) else warn(problem, INSTALL)]
    if facts.te.get("error") or not facts.te:
        error = facts.te.get("error", "No module named 'transformer_engine_torch'")
        return [broken("Transformer Engine does not import", error, INSTALL)]
    if te_too_old(facts):
        needed = f"too old, {install_te.least_te()} or later is needed"
        line = f"Transformer Engine {facts.te['version']}: {needed}"
        return [fail(line, f"{INSTALL} replaces it; {install_te.CONTAINER} has a newer one")]
    return [ok(f"Transformer Engine {facts.te['version']}" + (f", CUDA {core}" if core else ""))]


def check_fast_kernels(facts):
    """Check the Transformer Engine version on Hopper: the fast kernels use internals of Transformer
    Engine."""
    tested = facts.te.get("tested")
    if not tested or facts.capability != (9, 0) or te_too_old(facts):
        return []
    if not facts.te["fast_kernels"]:
        return [ok(f"fast kernels: tested with Transformer Engine {', '.join(tested)}")]
    line = f"fast kernels are off: {facts.te['fast_kernels']}; training works, but slower"
    fix = f"{INSTALL} installs Transformer Engine {tested[-1]}"
    return [warn(line, fix)]


def check_recipes(facts):
    reasons = facts.fp8.get("reasons")
    if not reasons:
        # If Transformer Engine failed, check_te has reported it
        if not facts.fp8.get("error") or facts.te.get("error") or te_too_old(facts):
            return []
        return [broken("FP8 recipes", facts.fp8["error"], INSTALL if facts.gpu else REQUIREMENTS)]
    found, report, where = [], ok, "FP8 recipes that run on this GPU:"
    if facts.fp8["emulated"]:
        emulated = ", ".join(name for name, reason in reasons.items() if not reason)
        found.append(ok(f"FP8 recipes, emulated by te_reference: {emulated}"))
        if not facts.gpu:
            return found
        reasons = expected_reasons(facts.capability, facts.torch["cuda"])
        report, where = info, "with Transformer Engine this GPU runs"
    supported = [name for name, reason in reasons.items() if not reason]
    if not supported:
        fix = f"python train.py --fp8-recipe none (bfloat16), or {EMULATE}"
        return [*found, warn("no FP8 on this GPU: it needs Ada or later (compute capability 8.9)", fix)]
    found.append(report(f"{where} {', '.join(supported)}"))
    names_by_reason = {}
    for name, reason in reasons.items():
        if reason:
            names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        found.append(info(f"{', '.join(names)} not on this GPU: {reason}"))
    return found


# E4M3 has 3 bits of mantissa and E5M2 has 2, so the relative rounding error of one value is at most 2^-4 or
# 2^-3. Errors of random values are independent, so the relative error norm of an output (E4M3 by E4M3) is at
# most sqrt(2) 2^-4, and that of a gradient (E5M2 by E4M3) sqrt(2^-6 + 2^-8). A bfloat16 GEMM (2^-9) is more
# accurate than FP8 can be.
OUTPUT_BOUND, GRADIENT_BOUND, TOO_EXACT = (2 * 2**-8) ** 0.5, (2**-6 + 2**-8) ** 0.5, 0.01


def check_gemm(facts):
    found = [
        broken(f"FP8 GEMM under {name}", message, INSTALL)
        for name, message in facts.fp8.get("raised", {}).items()
    ]
    if facts.fp8.get("error") and facts.fp8.get("reasons"):  # the probe crashed in a GEMM
        found.append(broken("FP8 GEMM", facts.fp8["error"], INSTALL))
    bounds = (OUTPUT_BOUND, GRADIENT_BOUND, GRADIENT_BOUND)
    good = []
    for name, errors in facts.fp8.get("errors", {}).items():
        y, dx, dw = errors
        line = f"FP8 GEMM against float64: {name} {y:.3f} (gradients {dx:.3f}, {dw:.3f})"
        if not all(error <= bound for error, bound in zip(errors, bounds)):  # NaN fails too
            problem = f"{line}, beyond FP8's rounding ({OUTPUT_BOUND:.3f} and {GRADIENT_BOUND:.3f})"
            found.append(fail(problem, f"{INSTALL} rebuilds it; until then --fp8-recipe none"))
        elif min(errors) < TOO_EXACT:
            problem = f"{line}, more accurate than FP8 can be: it did not run in FP8"
            found.append(fail(problem, INSTALL))
        else:
            good.append(f"{name} {max(errors):.3f}")
    if good:
        where = facts.fp8["where"]
        found.append(ok(f"FP8 GEMM within rounding of float64 ({where}): {', '.join(good)}"))
    return found


def check_cudnn(facts):
    if not facts.cudnn:
        return []
    name = f"cuDNN {facts.cudnn.get('version', '')}".strip()
    error = facts.cudnn.get("error")
    folders = sorted({str(Path(file).parent) for file in facts.cudnn.get("files", [])})
    if len(folders) > 1:
        mixed = f"{name}: two are loaded, from {' and '.join(folders)}"
        if error:
            return [fail(f"{mixed}; mixed, they fail ({error.splitlines()[0][:200]})", fill(LIBRARIES))]
        return [warn(f"{mixed}; this worked now, but such a mixture fails easily", fill(LIBRARIES))]
    if error:
        return [broken(name, error, fill(LIBRARIES))]
    return [ok(name + (f", {folders[0]}" if folders else ""))]


def check_nccl(facts):
    if not facts.nccl:
        return []
    if facts.nccl.get("error") and not facts.nccl.get("version"):
        several = len(facts.torch["gpus"]) > 1
        result = broken("NCCL (for several GPUs)", facts.nccl["error"], fill(LIBRARIES))
        return [result._replace(status="fail" if several else "warn")]
    return [ok(f"NCCL {facts.nccl['version']}")]


def check_flash(facts):
    found = []
    for label, package, flash, least in (
        ("2", "flash-attn", facts.flash2, (8, 0)),
        ("4", install_te.FLASH, facts.flash4, install_te.FLASH_CAPABILITY),
    ):
        name = f"FlashAttention {label}"
        if flash.get("error"):
            fix = (
                f"pip uninstall -y {package} (optional), or rebuild it: "
                f"pip install --no-build-isolation --no-cache-dir {package}"
            )
            result = broken(f"{name} does not import", flash["error"], fix)
            found.append(result._replace(status="warn", fix=fix))
        elif flash and facts.capability >= least:
            found.append(ok(f"{name}: {flash['version']}"))
        elif label == "4" and facts.capability >= least:
            line = f"{name}: not installed; --attention auto then uses another kernel"
            found.append(warn(line, shlex.join(install_te.flash_command(facts.torch["cuda"]))))
        elif facts.capability >= least:
            found.append(info(f"{name}: not installed; optional, --attention auto then uses another kernel"))
    return found


def check_room(facts):
    found = []
    if facts.memory_gib is not None:
        line = f"free memory: {facts.memory_gib:.1f} GiB"
        fix = "close other programs, or use smaller presets and micro-batches"
        found.append(warn(line, fix) if facts.memory_gib < 2 else ok(line))
    line = f"free disk here: {facts.disk_gib:.1f} GiB"
    fix = (
        "a checkpoint of gpt2-124m takes about 1.5 GB: free some space, point --out-dir to another disk, "
        "or use --keep-checkpoints 1"
    )
    found.append(warn(line, fix) if facts.disk_gib < 5 else ok(line))
    return found


CHECKS = (check_python, check_driver, check_torch, check_gpu, check_te, check_fast_kernels, check_recipes,
          check_gemm, check_cudnn, check_nccl, check_flash, check_room)


def diagnose(facts):
    """Return the results of all checks. A check that raises becomes a warning, and the others still run."""
    results = []
    for check in CHECKS:
        try:
            results += check(facts)
        except Exception as error:
            problem = f"{check.__name__} failed: {type(error).__name__}: {error}"
            results.append(warn(problem, "python doctor.py --json prints the facts"))
    return results


def verdict(facts, results):
    failed = sum(result.status == "fail" for result in results)
    if failed:
        return f"{failed} check{'s' * (failed > 1)} failed; begin with the first fix"
    options = ""
    if not facts.gpu:
        options = " --preset tiny"
    elif not facts.fp8.get("errors"):  # a GPU without FP8
        options = " --fp8-recipe none"
    return f"nanoTE can train here ({facts.fp8.get('where')}): python train.py{options}"


# ------------------------------------------------------------------------------


@dataclass
class Options:
    json: bool = False  # One JSON document: ok, verdict, checks, facts.
    explain: str | None = None  # A build log, or any text with an error message; - reads standard input.
    install: bool = False  # Install Transformer Engine and, on Hopper and Blackwell, FlashAttention 4.
    dry_run: bool = False  # With --install: only print the commands.


def main(argv=None):
    from nanote import cli  # not at the top: it needs tyro, and doctor must start without it
    options = cli.parse(Options, argv, prog="doctor.py", description=__doc__.partition("\n\nA broken")[0])
    if options.dry_run and not options.install:
        raise ValueError("--dry-run: needs --install; use python doctor.py --install --dry-run")
    if options.install and (options.json or options.explain is not None):
        raise ValueError("--install: takes no other option than --dry-run; leave the others out")
    if options.install:
        return install_te.install(options.dry_run)
    if options.explain is not None:
        return explain_log(options.explain, options.json)
    return examine(options.json)


def explain_log(path, as_json):
    """Print the known failures in a log (-: standard input). Return 0 if there are any, else 1."""
    text = sys.stdin.read() if path == "-" else Path(path).read_text(errors="replace")
    found = [
        {"name": failure.name, "meaning": failure.meaning, "line": line, "fix": fill(failure.fix)}
        for failure, line in explain(text)
    ]
    if as_json:
        print(json.dumps({"known": bool(found), "failures": found}, indent=2))
    else:
        print(install_te.describe(text))
    return 0 if found else 1


def examine(as_json):
    """Gather the facts, print the results and the verdict. Return 1 if any check failed, else 0."""
    facts = gather_facts()
    results = diagnose(facts)
    passed = not any(result.status == "fail" for result in results)
    if as_json:
        document = {
            "ok": passed, "verdict": verdict(facts, results),
            "checks": [result._asdict() for result in results], "facts": dataclasses.asdict(facts),
        }
        print(json.dumps(document, indent=2))
    else:
        for result in results:
            print(f"{result.status:<6}{result.line}")
            if result.fix:
                print(f"      fix: {result.fix}")
        print(verdict(facts, results))
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        from nanote import cli
    except ImportError as error:  # without tyro
        print(f"fail  {error}\n      fix: {REQUIREMENTS}")
        sys.exit(1)
    sys.exit(cli.run(main, "doctor.py"))
