"""What is installed here, what works, and what to do about the rest: one line a check, a fix under each
failure.

    python doctor.py # --json prints one JSON document python doctor.py --install # build and install
    Transformer Engine (--dry-run: only print the commands) python doctor.py --explain build.log # name the
    failure in a build log or in any message, and its fix (-: standard input)

    ok     works
    info   not here and not needed: nothing to mend
    warn   works, but not as it could
    fail   something that is here, or that the kit cannot do without, is broken

The exit code is 0 if the kit can train here, 1 if any check fails. A laptop without a GPU gives 0: training
runs there on the CPU, FP8 emulated by te_reference. A GPU with FP8 on which Transformer Engine is missing or
does not import gives 1, although the emulation would run. A mistake on the command line gives 2; --explain
gives 0 if it knows the failure and 1 if not.

A broken CUDA library does not raise, it kills the process; so whatever imports torch, Transformer Engine or
FlashAttention runs in a process of its own (the `probe_` functions), and this one needs only the standard
library and tyro. What they find is a `Facts`; each check is a function of that alone.
"""

import dataclasses
import json
import os
import platform
import re
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
MARK = "doctor's facts: "  # begins the line of a probe's output that carries what it found


class Result(NamedTuple):
    status: str  # ok, info, warn or fail
    line: str
    fix: str = ""


@dataclass
class Facts:
    """What was found. A probe's dict is empty where the thing is not here; "error" is the message where it is
    broken."""
    python: tuple = tuple(sys.version_info[:3])
    missing: list = field(default_factory=list)  # packages of requirements.txt that are not here or too old
    smi: dict = field(default_factory=dict)
    """nvidia-smi: gpus [name], driver, cuda (the newest that the driver runs)"""
    hidden: bool = False  # CUDA_VISIBLE_DEVICES hides every GPU
    torch: dict = field(default_factory=dict)
    """version, cuda, gpus [name, capability, total_gib, free_gib], reason, archs, cudnn"""
    te_packages: dict = field(default_factory=dict)  # {name: version}
    te: dict = field(default_factory=dict)  # version, cuda (major), tested [version], fast_kernels (why off)
    fp8: dict = field(default_factory=dict)
    """where, emulated, reasons {recipe: why not}, errors {recipe: [output, dx, dw]}, raised {recipe: message}
    """
    cudnn: dict = field(default_factory=dict)  # version, files
    nccl: dict = field(default_factory=dict)  # version
    flash2: dict = field(default_factory=dict)  # version
    flash4: dict = field(default_factory=dict)  # version
    memory_gib: float | None = None
    disk_gib: float = 0.0

    @property
    def gpu(self):
        """The first GPU that PyTorch can use, or None."""
        return (self.torch.get("gpus") or [None])[0]

    @property
    def capability(self):
        return tuple(self.gpu["capability"]) if self.gpu else (0, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Looking: each probe runs in a process of its own


def probe_torch(emit):
    import warnings

    import torch
    found = {"version": torch.__version__, "cuda": torch.version.cuda or "", "gpus": [], "reason": ""}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if found["cuda"] and not torch.cuda.is_available():
            try:
                torch.cuda.init()
            except Exception as error:
                found["reason"] = "\n".join([*(str(warning.message) for warning in told), str(error)])
    emit(found)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            found["gpus"].append(
                {
                    "name": torch.cuda.get_device_name(i), "capability": torch.cuda.get_device_capability(i),
                    "total_gib": total / 2**30, "free_gib": free / 2**30,
                }
            )
        emit(found | {"archs": torch.cuda.get_arch_list()})


def probe_te(emit):
    import transformer_engine
    import transformer_engine.pytorch  # noqa: F401
    number = transformer_engine.__version__
    cuda = getattr(transformer_engine.common, "_cuda_major_version", None)
    emit({"version": number, "cuda": cuda} | fast_kernels(number))


def fast_kernels(te_version):
    """What the fast kernels ask of Transformer Engine's version; {} without their files."""
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
    for name in ("delayed", "current", "block", "mxfp8"):  # (NVFP4 has no bound as simple)
        if not found["reasons"][name]:
            try:
                found["errors"][name] = product_errors(
                    fp8, name, "cuda" if torch.cuda.is_available() else "cpu"
                )
            except Exception as error:
                found["raised"][name] = f"{type(error).__name__}: {error}"
            emit(found)


def product_errors(fp8, recipe_name, device, tokens=256, width=512):
    """||result - float64's|| / ||float64's|| of te.Linear's output and of its two gradients under the recipe,
    on normal random numbers."""
    import torch
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    recipe = fp8.make_recipe(recipe_name)
    linear = fp8.te.Linear(width, width, bias=False, params_dtype=dtype, device=device)
    x, grad, weight = (torch.randn(n, width, device=device).to(dtype) for n in (tokens, tokens, width))
    with torch.no_grad():
        linear.weight.copy_(weight)
    for _ in range(3):  # delayed scaling has its scales from the second on
        x, linear.weight.grad = x.detach().requires_grad_(), None
        with fp8.te.autocast(enabled=True, recipe=recipe):
            y = linear(x)
        y.backward(grad)
    x64, grad64, weight64 = x.detach().double(), grad.double(), weight.double()
    pairs = (
        (y.detach(), x64 @ weight64.T), (x.grad, grad64 @ weight64), (linear.weight.grad, grad64.T @ x64),
    )
    return [((result.double() - exact).norm() / exact.norm()).item() for result, exact in pairs]


def probe_cudnn(emit):
    """A convolution and two attentions, which between them load all of cuDNN. PyTorch comes first, as in the
    model files, and loads its own; Transformer Engine then looks for one by itself."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    os.environ["NVTE_FLASH_ATTN"] = "0"
    number = torch.backends.cudnn.version() or 0  # 91900: 9.19.0
    found = {"version": f"{number // 10000}.{number // 100 % 100}.{number % 100}"}
    image, kernel = (
        torch.randn(2, 16, n, n, device="cuda", dtype=torch.float16, requires_grad=True) for n in (32, 3)
    )
    q, k, v = (
        torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)
    )
    try:
        F.conv2d(image, kernel).sum().backward()
        if torch.cuda.get_device_capability() >= (8, 0):
            try:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    F.scaled_dot_product_attention(
                        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
                    ).sum().backward()
            except RuntimeError as error:
                if "No available kernel" not in str(error):  # else this PyTorch does not have it
                    raise
            try:
                import transformer_engine.pytorch as te
            except Exception:  # that is for check_te to tell
                te = None
            if te:
                te.DotProductAttention(4, 64, attn_mask_type="causal", qkv_format="bshd")(
                    q, k, v
                ).sum().backward()
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
    """What `probe_<name>` found, in a process of its own: the last dict that it emitted, and "error" if it
    did not come to its end."""
    code = (f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import doctor\n"
            f"doctor.probe_{name}(lambda found: print('\\n' + {MARK!r} + json.dumps(found), flush=True))")
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=timeout
        )
        output, told, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, told, code = (
            (late.stdout or b"").decode(errors="replace"), f"no answer in {timeout} seconds", 1,
        )
    reports = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    found = json.loads(reports[-1]) if reports else {}
    if code:
        crash = f"\nkilled by {signal.Signals(-code).name}" if code < 0 else ""
        found["error"] = told.strip()[-4000:] + crash
    return found


def command_output(*command):
    """(exit code, output) or None where there is no such command."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=60
        )
        return done.returncode, done.stdout
    except (OSError, subprocess.TimeoutExpired):
        return None


def look_smi():
    listed = command_output("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    if listed is None:
        return {"error": "/dev/nvidia0 is here, nvidia-smi is not"} if Path("/dev/nvidia0").exists() else {}
    code, text = listed
    if code:
        return {} if "No devices were found" in text else {"error": text.strip()}
    rows = [line.split(", ", 1) for line in text.strip().splitlines()]
    newest = re.search(r"CUDA Version:\s*([\d.]+)", (command_output("nvidia-smi") or (0, ""))[1])
    return (
        {"gpus": [name for _, name in rows], "driver": rows[0][0], "cuda": newest[1] if newest else ""}
        if rows
        else {}
    )


def missing_requirements(text=None):
    """["torch>=2.11 (not installed)", …] of requirements.txt, the tests' left out."""
    text = (HERE / "requirements.txt").read_text() if text is None else text
    missing = []
    for name, least in re.findall(
        r"^([\w-]+)(?:>=([\d.]+))?\s*$", text.partition("# for the tests")[0], re.MULTILINE
    ):
        try:
            have = version(name)
        except PackageNotFoundError:
            missing.append(f"{name} (not installed)")
            continue
        if least and numbers(have) < numbers(least):
            missing.append(f"{name} {have} (needs {least})")
    return missing


def numbers(text):
    """"2.11.0+cu130" -> (2, 11, 0)"""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", text)[0])))


def look():
    """All of the facts; some seconds without a GPU, half a minute with one."""
    facts = Facts(missing=missing_requirements(), smi=look_smi(), te_packages=install_te.installed_packages(),
                  hidden=os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"), torch=run_probe("torch"),
                  memory_gib=install_te.free_memory_gib(), disk_gib=shutil.disk_usage(".").free / 2**30)
    wanted = ["fp8"] if facts.torch.get("version") else []
    if facts.gpu:
        wanted += ["te", "cudnn", "nccl", "flash2", "flash4"]
    with ThreadPoolExecutor(4) as pool:
        for name, found in zip(wanted, pool.map(run_probe, wanted)):
            absent = re.search(
                r"(No module named '?(transformer_engine|flash_attn)('|\.cute|$)|metadata was found for flash-attn)",
                found.get("error", "").strip().rpartition("\n")[2],
            )
            setattr(facts, name, {} if absent and not found.get("version") else found)
    return facts


# ---------------------------------------------------------------------------------------------------------------------
# Judging: each check is a function of the facts alone and returns a list of results


def broken(what, error, otherwise):
    """A failure with the fix that its message asks for."""
    known = explain(error)
    last = ([line.strip() for line in error.splitlines() if line.strip()] or ["no message"])[-1]
    if known:
        failure, line = known[0]
        return Result("fail", f"{what}: {failure.meaning} ({line[:200]})", fill(failure.fix))
    return Result("fail", f"{what}: {last[:300]}", otherwise)


def check_python(facts):
    name = f"Python {'.'.join(map(str, facts.python))}, {platform.system()} {platform.machine()}"
    found = [
        Result("ok", name)
        if facts.python >= (3, 10)
        else Result("fail", f"{name}: too old", "install Python 3.10 or later")
    ]
    if facts.missing:
        found.append(Result("fail", f"packages: {', '.join(facts.missing)}", REQUIREMENTS))
    return found


def check_driver(facts):
    if facts.smi.get("error"):
        return [broken("NVIDIA driver", facts.smi["error"], "reinstall NVIDIA's driver and reboot")]
    if facts.smi:
        newest = f", for CUDA {facts.smi['cuda']} and older" if facts.smi.get("cuda") else ""
        return [
            Result(
                "ok",
                f"NVIDIA driver {facts.smi['driver']}{newest}; {len(facts.smi['gpus'])} x {facts.smi['gpus'][0]}",
            )
        ]
    return (
        []
        if facts.gpu
        else [
            Result(
                "info", "no NVIDIA GPU: training runs on the CPU, FP8 emulated by te_reference; that is fine"
            )
        ]
    )


def check_torch(facts):
    torch = facts.torch
    if not torch.get("version"):
        return [broken("PyTorch does not import", torch.get("error", ""), REQUIREMENTS)]
    name = f"PyTorch {torch['version']}, " + (f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA")
    if facts.gpu or not facts.smi.get("gpus"):
        return [broken(name, torch["error"], REQUIREMENTS) if torch.get("error") else Result("ok", name)]
    if facts.hidden:
        return [Result("warn", f"{name}; CUDA_VISIBLE_DEVICES hides the GPU", "unset CUDA_VISIBLE_DEVICES")]
    if not torch["cuda"]:
        return [Result("fail", f"{name}, but there is a GPU", CUDA_TORCH)]
    newest = f"; the driver runs CUDA {facts.smi['cuda']} and older" if facts.smi.get("cuda") else ""
    return [
        broken(
            f"{name} cannot use the GPU{newest}", torch.get("reason") or torch.get("error", ""),
            "reboot; if that does not help, install a PyTorch for the driver's CUDA (pytorch.org, Get Started)",
        )
    ]


def has_kernels(capability, archs):
    """Does a build with these architectures (sm_75, compute_120, sm_90a, …) run on this compute capability?
    Binary code runs on the same major version from its minor version on; compute_ code is compiled for any
    later GPU; code with a letter, for that GPU alone."""
    for arch in archs:
        kind, number, letter = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", arch).groups()
        built = int(number[:-1]), int(number[-1])
        if built == capability or (
            not letter and built <= capability and (kind == "compute" or built[0] == capability[0])
        ):
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
        older = facts.capability < min(
            (int(a[:-1]), int(a[-1])) for a in re.findall(r"_(\d+)", " ".join(archs))
        )
        return [
            Result(
                "fail",
                f"{line}: this PyTorch has no code for it (it has {', '.join(archs)})",
                "install a PyTorch build that has it: "
                + (
                    "the one for CUDA 12.6: pip install --force-reinstall torch --index-url "
                    "https://download.pytorch.org/whl/cu126; or --device cpu"
                    if older
                    else "the newest, for the newest CUDA (pytorch.org)"
                ),
            )
        ]
    if facts.capability < (8, 0):
        return [
            Result(
                "warn",
                f"{line}: bfloat16 is slow before Ampere (8.0), and Transformer Engine asks for Ampere or later",
                "for small runs NANOTE_REFERENCE=1 python train.py --dtype float32; FP8 and speed need another GPU",
            )
        ]
    if facts.gpu["free_gib"] < min(4, facts.gpu["total_gib"] / 2):
        return [Result("warn", line, "something else fills the GPU: nvidia-smi shows what")]
    return [Result("ok", line)]


def expected_reasons(capability, cuda):
    """Why a GPU would not run each recipe, "" where it would, by the rules of Transformer Engine 2.20
    (pytorch/quantization.py, `_compute_fp8_support` and the following): what to expect of a GPU on which
    Transformer Engine is not installed yet."""
    fp8 = (
        "" if capability >= (8, 9) else "Device compute capability 8.9 or higher required for FP8 execution."
    )
    block = capability >= (9, 0) and numbers(cuda)[:2] >= (12, 9)
    four = (
        ""
        if capability >= (10, 0)
        else "Device compute capability 10.0 or higher required for NVFP4 execution."
    )
    mxfp8 = (
        "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
        if capability >= (12, 0)
        else ""
        if capability >= (10, 0)
        else "Device compute capability 10.0 or higher required for MXFP8 execution."
    )
    return {
        "delayed": fp8,
        "current": fp8,
        "mxfp8": mxfp8,
        "nvfp4": four,
        "block": ""
        if block
        else "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9.",
    }


def te_too_old(facts):
    return bool(facts.te.get("version")) and numbers(facts.te["version"]) < numbers(install_te.least_te())


def check_te(facts):
    if not facts.gpu:
        return [Result("info", "Transformer Engine: needs a GPU, te_reference takes its place")]
    packages = facts.te_packages
    cores = [name for name in packages if "-cu" in name]
    listed = ", ".join(f"{name} {number}" for name, number in packages.items())
    if len(set(packages.values())) > 1 or len(cores) > 1:
        return [
            Result(
                "fail", f"Transformer Engine: parts of several are installed ({listed})",
                f"{INSTALL} (removes them first)",
            )
        ]
    core = cores[0][-2:] if cores else str(facts.te.get("cuda") or "")
    if core and core != facts.torch["cuda"].partition(".")[0]:
        return [
            Result(
                "fail", f"Transformer Engine is for CUDA {core}, PyTorch for CUDA {facts.torch['cuda']}",
                INSTALL,
            )
        ]
    if not facts.te and not packages:
        if facts.capability < (8, 0):
            return [Result("info", "Transformer Engine: not installed, and it does not support this GPU")]
        return [
            Result(
                "fail" if facts.capability >= (8, 9) else "warn",
                "Transformer Engine is not installed; FP8 is emulated, slowly", INSTALL,
            )
        ]
    if facts.te.get("error") or not facts.te:
        return [
            broken(
                "Transformer Engine does not import",
                facts.te.get("error", "No module named 'transformer_engine_torch'"), INSTALL,
            )
        ]
    if te_too_old(facts):
        needed = f"too old, {install_te.least_te()} or later is needed"
        line = f"Transformer Engine {facts.te['version']}: {needed}"
        return [Result("fail", line, f"{INSTALL} replaces it; {install_te.CONTAINER} has a newer one")]
    return [Result("ok", f"Transformer Engine {facts.te['version']}" + (f", CUDA {core}" if core else ""))]


def check_fast_kernels(facts):
    """They are made for Hopper, and use internals of Transformer Engine."""
    tested = facts.te.get("tested")
    if not tested or facts.capability != (9, 0) or te_too_old(facts):
        return []
    if not facts.te["fast_kernels"]:
        return [Result("ok", f"fast kernels: tested with Transformer Engine {', '.join(tested)}")]
    line = f"fast kernels are off: {facts.te['fast_kernels']}; training works, but slower"
    fix = f"write transformer-engine[pytorch]=={tested[-1]}.* in requirements-gpu.txt, then {INSTALL}"
    return [Result("warn", line, fix)]


def check_recipes(facts):
    if not facts.fp8.get("reasons"):
        if facts.te.get("error") or te_too_old(facts):
            return []  # the same failure once more
        return (
            [broken("FP8 recipes", facts.fp8["error"], INSTALL if facts.gpu else REQUIREMENTS)]
            if facts.fp8.get("error")
            else []
        )
    reasons = facts.fp8["reasons"]
    if facts.fp8["emulated"]:
        found = [
            Result(
                "ok",
                f"FP8 recipes, emulated by te_reference: {', '.join(name for name, why in reasons.items() if not why)}",
            )
        ]
        if not facts.gpu:
            return found
        reasons, where = (
            expected_reasons(facts.capability, facts.torch["cuda"]),
            "with Transformer Engine this GPU runs",
        )
    else:
        found, where = [], "FP8 recipes that run on this GPU:"
    runs = [name for name, why in reasons.items() if not why]
    if runs:
        found.append(Result("info" if facts.fp8["emulated"] else "ok", f"{where} {', '.join(runs)}"))
    else:
        found.append(Result("warn", "no FP8 on this GPU: it begins with Ada (compute capability 8.9)",
                            f"python train.py --fp8-recipe none (bfloat16), or {EMULATE}"))
    if runs:
        whys = {
            why: [name for name, other in reasons.items() if other == why] for why in reasons.values() if why
        }
        found += [Result("info", f"{', '.join(names)} not on this GPU: {why}") for why, names in whys.items()]
    return found


# E4M3 has 3 bits of mantissa and E5M2 2, so each number is off by at most 2^-4, or 2^-3, of itself. The
# errors of random numbers are independent: an output (E4M3 by E4M3) is within sqrt(2) 2^-4 of its norm, a
# gradient (E5M2 by E4M3) within sqrt(2^-6 + 2^-8). A product in bfloat16 (2^-9) would be more exact than FP8
# can be.
OUTPUT_BOUND, GRADIENT_BOUND, TOO_EXACT = (2 * 2**-8) ** 0.5, (2**-6 + 2**-8) ** 0.5, 0.01


def check_product(facts):
    found = [
        broken(f"FP8 product under {name}", message, INSTALL)
        for name, message in facts.fp8.get("raised", {}).items()
    ]
    if facts.fp8.get("error") and facts.fp8.get("reasons"):  # it crashed among the products
        found.append(broken("FP8 product", facts.fp8["error"], INSTALL))
    good = []
    for name, errors in facts.fp8.get("errors", {}).items():
        shown = f"{name} {errors[0]:.3f} (gradients {errors[1]:.3f}, {errors[2]:.3f})"
        # a NaN is not
        if not all(
            error <= bound for error, bound in zip(errors, (OUTPUT_BOUND, GRADIENT_BOUND, GRADIENT_BOUND))
        ):
            found.append(
                Result(
                    "fail",
                    f"FP8 product against float64: {shown}, beyond FP8's rounding ({OUTPUT_BOUND:.3f} and {GRADIENT_BOUND:.3f})",
                    f"{INSTALL} builds it anew; until then --fp8-recipe none",
                )
            )
        elif min(errors) < TOO_EXACT:
            found.append(
                Result(
                    "fail",
                    f"FP8 product against float64: {shown}, more exact than FP8 can be: it did not run in FP8",
                    INSTALL,
                )
            )
        else:
            good.append(f"{name} {max(errors):.3f}")
    if good:
        found.append(
            Result("ok", f"FP8 product within rounding of float64 ({facts.fp8['where']}): {', '.join(good)}")
        )
    return found


def check_cudnn(facts):
    if not facts.cudnn:
        return []
    name = f"cuDNN {facts.cudnn.get('version', '')}".strip()
    folders = sorted({str(Path(file).parent) for file in facts.cudnn.get("files", [])})
    if len(folders) > 1:
        mixed = f"{name}: two are loaded, from {' and '.join(folders)}"
        if facts.cudnn.get("error"):
            return [
                Result(
                    "fail", f"{mixed}; mixed, they fail ({facts.cudnn['error'].splitlines()[0][:200]})",
                    fill(LIBRARIES),
                )
            ]
        return [Result("warn", f"{mixed}; this worked now, but such a mixture fails easily", fill(LIBRARIES))]
    if facts.cudnn.get("error"):
        return [broken(name, facts.cudnn["error"], fill(LIBRARIES))]
    return [Result("ok", name + (f", {folders[0]}" if folders else ""))]


def check_nccl(facts):
    if not facts.nccl:
        return []
    if facts.nccl.get("error") and not facts.nccl.get("version"):
        several = len(facts.torch["gpus"]) > 1
        return [
            broken("NCCL (for several GPUs)", facts.nccl["error"], fill(LIBRARIES))._replace(
                status="fail" if several else "warn"
            )
        ]
    return [Result("ok", f"NCCL {facts.nccl['version']}")]


def check_flash(facts):
    found = []
    for label, package, flash, least in (
        ("2", "flash-attn", facts.flash2, (8, 0)),
        ("4", "flash-attn-4", facts.flash4, (9, 0)),
    ):
        if flash.get("error"):
            fix = f"pip uninstall -y {package} (optional), or build it anew: pip install --no-build-isolation --no-cache-dir {package}"
            result = broken(f"FlashAttention {label} does not import", flash["error"], fix)
            found.append(result._replace(status="warn", fix=fix))
        elif flash and facts.capability >= least:
            found.append(Result("ok", f"FlashAttention {label}: {flash['version']}"))
        elif facts.capability >= least:
            found.append(
                Result(
                    "info",
                    f"FlashAttention {label}: not installed; optional, --attention auto then takes another kernel",
                )
            )
    return found


def check_room(facts):
    found = []
    if facts.memory_gib is not None:
        low = facts.memory_gib < 2
        found.append(Result("warn" if low else "ok", f"free memory: {facts.memory_gib:.1f} GiB",
                            "end other programs, or smaller presets and micro batches" if low else ""))
    low = facts.disk_gib < 5
    found.append(
        Result(
            "warn" if low else "ok",
            f"free disk here: {facts.disk_gib:.1f} GiB",
            "a checkpoint of gpt2-124m takes about 1.5 GB: free some, point --out-dir elsewhere, or --keep-checkpoints 1"
            if low
            else "",
        )
    )
    return found


CHECKS = (check_python, check_driver, check_torch, check_gpu, check_te, check_fast_kernels, check_recipes,
          check_product, check_cudnn, check_nccl, check_flash, check_room)


def diagnose(facts):
    """All results. A check that itself fails is a result too: doctor goes on."""
    results = []
    for check in CHECKS:
        try:
            results += check(facts)
        except Exception as error:
            results.append(
                Result(
                    "warn", f"{check.__name__} failed: {type(error).__name__}: {error}",
                    "python doctor.py --json has the facts",
                )
            )
    return results


def verdict(facts, results):
    failed = sum(result.status == "fail" for result in results)
    if failed:
        return f"{failed} check{'s' * (failed > 1)} failed; begin with the first fix"
    # a GPU without FP8
    options = " --preset tiny" if not facts.gpu else "" if facts.fp8.get("errors") else " --fp8-recipe none"
    return f"nanoTE can train here ({facts.fp8.get('where')}): python train.py{options}"


# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Options:
    json: bool = False  # One JSON document: ok, verdict, checks, facts.
    explain: str | None = None  # A build log, or any text with an error message; - reads standard input.
    install: bool = False  # Build and install Transformer Engine.
    dry_run: bool = False  # With --install: only print the commands.


def main(argv=None):
    from nanote import cli
    options = cli.parse(Options, argv, prog="doctor.py", description=__doc__.partition("\n\nA broken")[0])
    if options.dry_run and not options.install:
        raise ValueError("--dry-run belongs to --install: python doctor.py --install --dry-run")
    if options.install and (options.json or options.explain is not None):
        raise ValueError("--install stands alone or with --dry-run")
    if options.install:
        return install_te.install(options.dry_run)
    if options.explain is not None:
        text = (
            sys.stdin.read() if options.explain == "-" else Path(options.explain).read_text(errors="replace")
        )
        found = [
            {"name": failure.name, "meaning": failure.meaning, "line": line, "fix": fill(failure.fix)}
            for failure, line in explain(text)
        ]
        print(
            json.dumps({"known": bool(found), "failures": found}, indent=2)
            if options.json
            else install_te.describe(text)
        )
        return 0 if found else 1
    facts = look()
    results = diagnose(facts)
    ok = not any(result.status == "fail" for result in results)
    if options.json:
        print(
            json.dumps(
                {
                    "ok": ok, "verdict": verdict(facts, results),
                    "checks": [result._asdict() for result in results], "facts": dataclasses.asdict(facts),
                },
                indent=2,
            )
        )
    else:
        for result in results:
            print(f"{result.status:<6}{result.line}" + (f"\n      fix: {result.fix}" if result.fix else ""))
        print(verdict(facts, results))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        from nanote import cli
    except ImportError as error:  # without tyro
        print(f"fail  {error}\n      fix: {REQUIREMENTS}")
        sys.exit(1)
    sys.exit(cli.run(main, "doctor.py"))
