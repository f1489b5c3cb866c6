"""doctor.py on simulated machines: every GPU generation and every known failure, with the line and the fix
that a user reads."""
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

import doctor
from doctor import Facts, diagnose
from nanote import cli, fp8
from tools import install_te

H200 = {"name": "NVIDIA H200", "capability": [9, 0], "total_gib": 140.0, "free_gib": 139.0}
ARCHS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]  # PyTorch 2.11 for CUDA 13.0
GOOD = [0.037, 0.058, 0.058]


def machine(capability=(9, 0), cuda="13.0", **changes):
    """Return the facts of a GPU machine without problems; `changes` replace facts."""
    reasons = doctor.expected_reasons(capability, cuda)
    runs = [name for name in ("delayed", "current", "block", "mxfp8") if not reasons[name]]
    facts = dict(
        missing=[],
        smi={"gpus": ["GPU"], "driver": "580.95", "cuda": "13.0"},
        memory_gib=100.0,
        disk_gib=100.0,
        torch={
            "version": f"2.11.0+cu{cuda.replace('.', '')}", "cuda": cuda, "archs": ARCHS,
            "gpus": [H200 | {"capability": capability}],
        },
        te_packages={
            "transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2",
            f"transformer-engine-cu{cuda[:2]}": "2.20.2",
        },
        te={"version": "2.20.2", "cuda": int(cuda[:2])},
        nccl={"version": "2.28.9"},
        flash4={"version": "4.0.0b36"},
        fp8={
            "where": "GPU, Transformer Engine 2.20.2", "emulated": False, "reasons": reasons, "raised": {},
            "errors": dict.fromkeys(runs, GOOD),
        },
        cudnn={
            "version": "9.19.0",
            "files": ["/site/nvidia/cudnn/lib/libcudnn.so.9", "/site/nvidia/cudnn/lib/libcudnn_graph.so.9"],
        },
    )
    return Facts(**facts | changes)


def laptop(**changes):
    everything = dict.fromkeys(("delayed", "current", "block", "mxfp8"), "")
    facts = dict(
        missing=[],
        torch={"version": "2.13.0+cpu", "cuda": "", "gpus": []},
        memory_gib=8.0,
        disk_gib=50.0,
        fp8={
            "where": "CPU, FP8 emulated by te_reference", "emulated": True,
            "reasons": everything | {"nvfp4": "te_reference …"}, "errors": dict.fromkeys(everything, GOOD),
            "raised": {},
        },
    )
    return Facts(**facts | changes)


def bare(capability=(9, 0), **changes):
    """Return the facts of a GPU machine without Transformer Engine, where FP8 is emulated."""
    return machine(capability, te={}, te_packages={}, fp8=laptop().fp8, **changes)


def failed(facts):
    return [result for result in diagnose(facts) if result.status == "fail"]


def result_with(facts, words, status=None):
    """Return the only result whose line contains these words."""
    found = [result for result in diagnose(facts) if words in result.line]
    assert len(found) == 1 and status in (None, found[0].status), diagnose(facts)
    return found[0]


# -- machines without a failure


def test_a_laptop_is_fine_and_is_told_what_works():
    facts = laptop()
    assert not [result for result in diagnose(facts) if result.status in ("warn", "fail")]
    assert "that is fine" in result_with(facts, "no NVIDIA GPU", "info").line
    assert "delayed, current, block, mxfp8" in result_with(facts, "emulated by te_reference:", "ok").line
    verdict = doctor.verdict(facts, diagnose(facts))
    assert "can train here" in verdict and "--preset tiny" in verdict


def test_a_laptop_with_a_transformer_engine_that_cannot_be_used_is_fine():
    assert not failed(laptop(te_packages={"transformer-engine": "2.20.2"}))


def test_an_h200_is_fine():
    results = diagnose(machine())
    assert {result.status for result in results} == {"ok", "info"}
    lines = "\n".join(result.line for result in results)
    for words in (
        "Transformer Engine 2.20.2, CUDA 13", "Hopper", "PyTorch 2.11.0+cu130, CUDA 13.0", "cuDNN 9.19.0",
        "NCCL 2.28.9", "driver 580.95", "100.0 GiB",
    ):
        assert words in lines


@pytest.mark.parametrize("capability, version, status, words", [
    ((9, 0), "2.20.2", "ok", "fast kernels: tested with Transformer Engine 2.20"),
    ((9, 0), "2.20.0+abc", "ok", "fast kernels: tested with Transformer Engine 2.20"),
    ((9, 0), "2.21.0", "warn", "off: they use internals of Transformer Engine 2.20, and this is 2.21.0"),
    ((9, 0), "2.9.0", "warn", "off: they use internals of Transformer Engine 2.20, and this is 2.9.0"),
    ((9, 0), "2.2.0", None, ""), ((8, 9), "2.21.0", None, ""), ((9, 0), None, None, "")])
def test_which_transformer_engine_the_fast_kernels_support(capability, version, status, words):
    te = {"version": version, "cuda": 13} | doctor.fast_kernels(version) if version else {}
    facts = machine(capability, te=te, te_packages={"transformer-engine": version} if version else {})
    if status is None:
        assert not [result for result in diagnose(facts) if "fast kernels" in result.line]
    else:
        result = result_with(facts, words, status)
        assert ("doctor.py --install installs Transformer Engine 2.20" in result.fix) == (status == "warn")


@pytest.mark.parametrize("page", ["README.md", "requirements-gpu.txt"])
def test_the_pages_name_the_versions_that_the_fast_kernels_support(page):
    text = (doctor.HERE / page).read_text().replace("transformer-engine[pytorch]==", "Engine ")
    text = " ".join(text.split())
    found = [part for part in text.split(". ") if "fast kernels" in part.lower() or "to have them" in part]
    tested = doctor.fast_kernels("")["tested"]
    assert all(any(f"Engine {number}" in part for part in found) for number in tested), found


@pytest.mark.parametrize(
    "capability, cuda, generation, runs, reason",
    [
        (
            (12, 0), "13.0", "Blackwell", "delayed, current, nvfp4, block",
            "MXFP8 (for all gemm layouts) is not supported on 12.0+",
        ),
        ((10, 0), "13.0", "Blackwell", "delayed, current, mxfp8, nvfp4, block", ""),
        ((9, 0), "13.0", "Hopper", "delayed, current, block", "10.0 or higher required for MXFP8"),
        ((9, 0), "12.8", "Hopper", "delayed, current", "CUDA >= 12.9"),
        ((8, 9), "13.0", "Ada", "delayed, current", "compute capability 9.0 or higher"),
    ],
)
def test_gpus_with_fp8(capability, cuda, generation, runs, reason):
    facts = machine(capability, cuda)
    assert not failed(facts)
    assert result_with(facts, f"({generation})", "ok")
    assert result_with(facts, "FP8 recipes that run on this GPU:", "ok").line.endswith(f": {runs}")
    assert not reason or result_with(facts, reason, "info").fix == ""
    without = bare(capability, smi={}, torch=facts.torch)
    assert result_with(without, "with Transformer Engine this GPU runs", "info").line.endswith(runs)


@pytest.mark.parametrize(
    "capability, generation", [((8, 0), "Ampere"), ((8, 6), "Ampere"), ((7, 5), "Turing"), ((7, 0), "Volta")]
)
def test_gpus_without_fp8_can_still_train(capability, generation):
    torch_found = machine(capability).torch | {"archs": [*ARCHS, "sm_70"]}
    facts = machine(capability, torch=torch_found)
    assert not failed(facts)
    assert result_with(facts, f"({generation})").status == ("ok" if capability >= (8, 0) else "warn")
    fix = result_with(facts, "no FP8 on this GPU", "warn").fix
    assert fix.startswith("python train.py --fp8-recipe none")
    assert "8.9" in result_with(facts, "no FP8").line
    without = doctor.check_te(bare(capability, torch=torch_found))
    assert [result.status for result in without] == ["warn" if capability >= (8, 0) else "info"]


def test_volta_needs_another_pytorch():
    result = result_with(machine((7, 0)), "no code for it", "fail")
    assert "sm_75" in result.line and "whl/cu126" in result.fix


def test_a_gpu_newer_than_pytorch_needs_a_newer_one():
    facts = machine((12, 0), torch=machine((12, 0)).torch | {"archs": ["sm_80", "sm_90"]})
    assert "newest" in result_with(facts, "no code for it", "fail").fix


@pytest.mark.parametrize(
    "capability, archs, runs",
    [
        ((8, 9), ["sm_80", "sm_90"], True), ((8, 0), ["sm_86"], False), ((10, 3), ["sm_100"], True),
        ((10, 3), ["sm_100a"], False), ((12, 0), ["sm_90", "compute_90"], True), ((12, 0), ["sm_90"], False),
        ((9, 0), ["sm_90a"], True), ((7, 0), ["compute_75"], False),
    ],
)
def test_which_code_a_gpu_runs(capability, archs, runs):
    assert doctor.has_kernels(capability, archs) == runs


# -- machines with a failure


UNDEFINED = (
    "ImportError: /x/transformer_engine_torch.cpython-312-x86_64-linux-gnu.so: "
    "undefined symbol: _ZN3c106detail14torchCheckFailEPKcS2_jS2_"
)
NCCL = "torch.distributed.DistBackendError: NCCL error: unhandled cuda error"
CUDNN_TOO_OLD = (
    "RuntimeError: Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.1.0."
)
CUDNN_INCOMPATIBLE = (
    "cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) "
    "but found runtime version (9, 14, 0)."
)


@pytest.mark.parametrize(
    "facts, line, fix",
    [
        (bare(), "Transformer Engine is not installed", "doctor.py --install"),
        (
            machine(te={"error": f"Traceback\n{UNDEFINED}"}), "built against another PyTorch",
            "doctor.py --install",
        ),
        (
            machine(te={"error": "ModuleNotFoundError: No module named 'transformer_engine_torch'"}),
            "without its PyTorch part", "--install",
        ),
        (machine(te={}), "without its PyTorch part", "--install"),
        (
            machine(te={"error": "no line\nkilled by SIGSEGV"}), "does not import: killed by SIGSEGV",
            "--install",
        ),
        (
            machine(te={"error": "OSError: libcublas.so.12: cannot open shared object file: No such file"}),
            "CUDA (12, 13)", "--install",
        ),
        (
            machine(te={"error": CUDNN_TOO_OLD}),
            "Two versions of cuDNN",
            "export CUDNN_HOME=",
        ),
        (
            machine(te_packages={"transformer-engine": "2.20.2", "transformer-engine-torch": "2.9.0"}),
            "parts of several", "removes them first",
        ),
        (
            machine(te_packages={"transformer-engine-cu12": "2.20.2", "transformer-engine-cu13": "2.20.2"}),
            "parts of several", "removes",
        ),
        (
            machine(te_packages={"transformer-engine": "2.20.2", "transformer-engine-cu12": "2.20.2"}),
            "for CUDA 12, PyTorch for CUDA 13.0", "--install",
        ),
        (
            machine(te_packages={}, te={"version": "2.5.0+f05f12c", "cuda": 13}),
            "Transformer Engine 2.5.0+f05f12c: too old, 2.9 or later is needed", "tag 26.02-py3 or later",
        ),
        (
            machine(te_packages={"transformer-engine": "1.13.0"}, te={"version": "1.13.0", "cuda": 13}),
            "1.13.0: too old", "doctor.py --install",
        ),
        (
            machine(te_packages={}, te={"version": "2.9", "cuda": 12}), "for CUDA 12, PyTorch for CUDA 13.0",
            "--install",
        ),
        (
            laptop(smi={"gpus": ["T4"], "driver": "550"}), "without CUDA, but there is a GPU",
            "PyTorch with CUDA",
        ),
        (
            machine(
                torch={
                    "version": "2.11.0+cu130", "cuda": "13.0", "gpus": [],
                    "reason": "The NVIDIA driver on your system is too old (found version 12020).",
                }
            ),
            "too old for PyTorch's CUDA",
            "update",
        ),
        (
            machine(
                torch={"version": "2.11.0+cu130", "cuda": "13.0", "gpus": [], "reason": "CUDA unknown error"}
            ),
            "driver runs CUDA 13.0",
            "reboot",
        ),
        (
            laptop(smi={"error": "Failed to initialize NVML: Driver/library version mismatch"}),
            "driver was updated", "reboot",
        ),
        (
            laptop(
                smi={"error": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."}
            ),
            "does not run",
            "--gpus all",
        ),
        (
            laptop(torch={"error": "ModuleNotFoundError: No module named 'torch'"}, fp8={}),
            "PyTorch does not import", "requirements.txt",
        ),
        (
            machine(
                torch={"error": "ImportError: libtorch_cuda.so: undefined symbol: ncclCommShrink"}, fp8={}
            ),
            "NCCL older",
            "LD_LIBRARY_PATH=",
        ),
        (laptop(missing=["tyro (not installed)"]), "tyro (not installed)", "pip install -r requirements.txt"),
        (laptop(python=(3, 9, 1)), "too old", "3.10"),
        (
            machine(
                cudnn={
                    "version": "9.19.0",
                    "error": "RuntimeError: cuDNN error: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH",
                    "files": [
                        "/site/nvidia/cudnn/lib/libcudnn.so.9",
                        "/usr/lib/x86_64-linux-gnu/libcudnn_graph.so.9.14.0",
                    ],
                }
            ),
            "from /site/nvidia/cudnn/lib and /usr/lib/x86_64-linux-gnu",
            "nvidia/cudnn/lib",
        ),
        (
            machine(cudnn={"error": CUDNN_INCOMPATIBLE}),
            "Two versions of cuDNN",
            "LD_LIBRARY_PATH=",
        ),
        (
            machine(nccl={"error": NCCL}, torch=machine().torch | {"gpus": [H200, H200]}),
            "unhandled cuda error", "LD_LIBRARY_PATH=",
        ),
        (
            machine(fp8=machine().fp8 | {"errors": {"delayed": [0.3, 0.05, 0.05]}}), "beyond FP8's rounding",
            "--fp8-recipe none",
        ),
        (
            machine(fp8=machine().fp8 | {"errors": {"delayed": [0.04, 0.05, float("nan")]}}),
            "beyond FP8's rounding", "--install",
        ),
        (
            machine(fp8=machine().fp8 | {"errors": {"current": [0.003, 0.003, 0.003]}}), "did not run in FP8",
            "--install",
        ),
        (
            machine(
                fp8=machine().fp8
                | {"raised": {"block": "RuntimeError: CUDA error: no kernel image is available"}}
            ),
            "without this GPU's",
            "PyTorch",
        ),
        (
            machine(fp8=machine().fp8 | {"errors": {}, "error": "killed by SIGABRT"}), "killed by SIGABRT",
            "--install",
        ),
    ],
)
def test_a_failure_has_its_line_and_its_fix(facts, line, fix):
    result = result_with(facts, line, "fail")
    assert fix in result.fix and "<" not in result.fix and "\n" not in result.line + result.fix
    assert "failed; begin with" in doctor.verdict(facts, diagnose(facts))


@pytest.mark.parametrize(
    "facts, line, fix",
    [
        (
            machine(cudnn={"version": "9.19.0", "files": ["/a/libcudnn.so.9", "/b/libcudnn.so.9"]}),
            "two are loaded, from /a and /b", "CUDNN_HOME=",
        ),
        (
            machine(
                flash2={
                    "version": "2.8",
                    "error": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
                }
            ),
            "FlashAttention 2 does not import",
            "pip uninstall -y flash-attn ",
        ),
        (machine(nccl={"error": NCCL}), "unhandled cuda error", "LD_LIBRARY_PATH="),
        (
            machine(torch={"version": "2.11", "cuda": "13.0", "gpus": []}, hidden=True),
            "CUDA_VISIBLE_DEVICES hides", "unset",
        ),
        (
            machine(torch=machine().torch | {"gpus": [H200 | {"free_gib": 1.0}]}), "1 of 140 GiB free",
            "nvidia-smi",
        ),
        (laptop(memory_gib=0.5), "0.5 GiB", "smaller presets"),
        (laptop(disk_gib=1.0), "1.0 GiB", "--out-dir"),
    ],
)
def test_what_works_badly_is_a_warning(facts, line, fix):
    assert fix in result_with(facts, line, "warn").fix and not failed(facts)


@pytest.mark.parametrize("capability, cuda, package", [
    ((9, 0), "13.0", "'flash-attn-4[cu13]==4.0.0b36'"), ((12, 0), "12.8", "flash-attn-4==4.0.0b36")])
def test_a_gpu_that_lacks_flash_attention_gets_the_command(capability, cuda, package):
    assert result_with(machine(capability, cuda), "FlashAttention 4: 4.0.0b36", "ok")
    result = result_with(machine(capability, cuda, flash4={}), "FlashAttention 4: not installed", "warn")
    assert result.fix == f"{sys.executable} -m pip install {package}"


def test_flash_attention_is_optional():
    assert not failed(machine(flash4={}))
    assert not any("FlashAttention 4" in result.line for result in diagnose(machine((8, 9), flash4={})))


def test_one_cause_is_reported_once():
    assert len(failed(machine(te={"error": UNDEFINED}, fp8={"error": UNDEFINED}))) == 1


@pytest.mark.parametrize("version, status", [("2.9.0", "ok"), ("2.9.0+70f5366", "ok"), ("2.10.0.dev0", "ok"),
                                             ("3.0", "ok"), ("2.8.1", "fail"), ("2.5", "fail")])
def test_which_transformer_engine_is_new_enough(version, status):
    facts = machine(te_packages={}, te={"version": version, "cuda": 13})
    assert [result.status for result in doctor.check_te(facts)] == [status]


def test_an_old_transformer_engine_is_reported_once():
    """nanote/fp8.py may fail to import with it, which is the same failure."""
    facts = machine(te_packages={}, te={"version": "2.2.0", "cuda": 13},
                    fp8={"error": "AttributeError: module has no attribute 'is_fp8_block_scaling_available'"})
    (result,) = failed(facts)
    assert result.line == "Transformer Engine 2.2.0: too old, 2.9 or later is needed"


def test_the_least_version_is_that_of_the_requirements():
    assert install_te.least_te() == "2.9"


def test_a_check_that_breaks_does_not_stop_doctor():
    results = diagnose(machine(fp8={"reasons": {"delayed": ""}}))
    assert any("check_recipes failed: KeyError" in result.line for result in results)
    assert "free disk" in results[-1].line


# -- messages, verbatim from tracebacks and logs of pip, ninja, gcc and nvcc


MESSAGES = {
    "disk full": ["OSError: [Errno 28] No space left on device"],
    "memory": [
        "c++: fatal error: Killed signal terminated program cc1plus",
        "g++: internal compiler error: Killed (program cc1plus)",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "Killed",
        "cc1plus: out of memory allocating 65536 bytes", "virtual memory exhausted: Cannot allocate memory",
        "nvcc fatal   : out of memory",
    ],
    "no cuDNN frontend headers": [
        "util/cudnn.h:17:10: fatal error: cudnn_frontend.h: No such file or directory"
    ],
    "no cudnn.h": [
        "torch/include/ATen/cudnn/cudnn-wrapper.h:3:10: fatal error: cudnn.h: No such file or directory",
        "Could not find cudnn_LIBRARY using the following names: cudnn, libcudnn.so.",
    ],
    "no compiler headers of CUDA": [
        "cuda_runtime.h:82:10: fatal error: crt/host_config.h: No such file or directory"
    ],
    "no CUDA headers": [
        "csrc/extensions.h:10:10: fatal error: nccl.h: No such file or directory",
        "fatal error: cusparse.h: No such file or directory",
        "fatal error: cuda_runtime_api.h: No such file or directory",
        "RuntimeError: CUDA not found.",
    ],
    "no Python headers": [
        "pybind11/detail/common.h:213:10: fatal error: Python.h: No such file or directory"
    ],
    "no C++ compiler": [
        "error: command 'g++' failed: No such file or directory",
        "FileNotFoundError: [Errno 2] No such file or directory: 'c++'",
        "CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage",
    ],
    "compiler too new": ["#error -- unsupported GNU version! gcc versions later than 13 are not supported!"],
    "no nvcc": [
        "Failed to find nvcc.",
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
        "RuntimeError: Could neither find NVCC executable nor CUDA runtime Python package for "
        "['nvidia-cuda-runtime']",
    ],
    "two CUDA versions": ["The detected CUDA version (12.2) mismatches the version that was used to compile"],
    "no CUDA in PyTorch": [
        "packaging.version.InvalidVersion: Invalid version: None",
        "AssertionError: Torch not compiled with CUDA enabled",
        "TypeError: expected string or bytes-like object, got 'NoneType'",
    ],
    "the build does not see torch": [
        "RuntimeError: This package needs Torch to build.",
        "ModuleNotFoundError: No module named 'torch'",
    ],
    "no build tools": [
        "ModuleNotFoundError: No module named 'pybind11'",
        "RuntimeError: Ninja is required to load C++ extensions",
    ],
    "no wheel for this system": ["ERROR: No matching distribution found for transformer_engine_cu13==2.20.2"],
    "flash-attn broken": [
        "ImportError: /x/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: "
        "undefined symbol: _ZN3c104cuda9SetDeviceEi"
    ],
    "NCCL too old": ["ImportError: /x/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister"],
    "cuBLAS too old": [
        "OSError: libtransformer_engine.so: "
        "undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13"
    ],
    "built against another PyTorch": [
        UNDEFINED,
        "OSError: libtransformer_engine.so: undefined symbol: _ZN18transformer_engine9to_stringERK15",
    ],
    "no Transformer Engine": [
        "ModuleNotFoundError: No module named 'transformer_engine'",
        "ImportError: No module named transformer_engine",
    ],
    "no PyTorch part": [
        "ModuleNotFoundError: No module named 'transformer_engine_torch'",
        "No module named 'transformer_engine.pytorch'",
        "No module named transformer_engine_torch",
        "AttributeError: module 'transformer_engine' has no attribute 'pytorch'",
        "StopIteration",
        "FileNotFoundError: Could not find shared object file for Transformer Engine torch lib.",
        "RuntimeError: Found empty `transformer-engine` meta package installed. "
        "Install `transformer-engine` with",
    ],
    "Transformer Engine too old": [
        "AttributeError: module 'transformer_engine.pytorch' has no attribute 'autocast'",
        "AttributeError: module 'transformer_engine.pytorch' has no attribute 'is_mxfp8_available'",
    ],
    "mixed Transformer Engines": [
        "AssertionError: Transformer Engine package version mismatch. Found transformer_engine_torch v2.9.0",
        "AssertionError: Could not find `transformer-engine` PyPI package.",
    ],
    "cuDNN mixed": [
        "RuntimeError: cuDNN error: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH",
        f"RuntimeError: {CUDNN_INCOMPATIBLE}",
    ],
    "no driver": [
        "OSError: libcuda.so.1: cannot open shared object file: No such file or directory",
        "RuntimeError: Found no NVIDIA driver on your system.",
    ],
    "no CUDA libraries": [
        "OSError: libcublas.so.13: cannot open shared object file: No such file or directory",
        "RuntimeError: cudnn shared object not found.",
    ],
    "C++ library too old": [
        "ImportError: libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x.so)"
    ],
    "driver replaced": ["Failed to initialize NVML: Driver/library version mismatch"],
    "driver too old": [
        "The NVIDIA driver on your system is too old (found version 11040).",
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    ],
    "driver not running": ["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."],
    "no kernels for this GPU": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    ],
    "no FP8 on this GPU": [
        "AssertionError: Device compute capability 8.9 or higher required for FP8 execution."
    ],
    "shape not for FP8": [
        "RuntimeError: cublaslt_gemm.cu:397 in function cublas_gemm: Unable to find any suitable algorithms",
        "RuntimeError: Unable to find suitable cuBLAS GEMM algorithm",
        "Assertion failed: ret.lda % 16 == 0. Leading dimension requirement on A for FP8 GEMM.",
        "Outer dimension requirement on B for NVTE_BLOCK_SCALING GEMM. Caller must pad.",
        "AssertionError: FP8 execution requires the product of all dimensions except the last to be",
    ],
    "delayed scaling compiled": ["RuntimeError: DelayedScaling is not supported under torch.compile."],
    "GPU memory full": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."],
}


def test_every_known_failure_has_a_message_here():
    assert [failure.name for failure in install_te.FAILURES] == list(MESSAGES)


def test_the_page_has_every_known_failure_with_its_fix():
    """The page has N in place of the number of jobs, and words in place of the lines with paths."""
    page = (install_te.ROOT / "guide" / "troubleshooting.md").read_text()
    for failure in install_te.FAILURES:
        fix = failure.fix.replace(install_te.LIBRARIES, "PyTorch's own libraries first")
        fix = fix.replace("<jobs>", "N")
        assert f"| {failure.meaning} | {fix} |" in page, failure.name


@pytest.mark.parametrize(
    "name, message", [(name, message) for name, messages in MESSAGES.items() for message in messages]
)
def test_a_message_is_recognized(name, message):
    log = (
        f"  building 'transformer_engine_torch' extension\n      {message}\n"
        "  ERROR: Failed building wheel for transformer_engine_torch\n"
    )
    assert [failure.name for failure, _ in install_te.explain(log)] == [name]
    assert name in install_te.describe(log) and "fix: " in install_te.describe(log)


def test_a_log_without_a_known_failure_shows_its_first_error():
    assert install_te.explain("all is well\n") == []
    described = install_te.describe("fine\n a.cpp:3: error: no such thing\nerror: 2")
    assert described.endswith("; its first error: a.cpp:3: error: no such thing")


def test_the_cause_comes_before_what_it_caused():
    log = (
        "ModuleNotFoundError: No module named 'transformer_engine_torch'\n"
        "x.cpp: fatal error: cudnn.h: No such file or directory\n"
    )
    assert [failure.name for failure, _ in install_te.explain(log)] == ["no cudnn.h", "no PyTorch part"]


def run(*argv):
    try:
        return cli.run(lambda: doctor.main(list(argv)), "doctor.py")
    except SystemExit as stop:
        return stop.code


def test_explain_reads_a_file_and_standard_input(tmp_path, capsys, monkeypatch):
    log = tmp_path / "build.log"
    log.write_text("c++: fatal error: Killed signal terminated program cc1plus\n")
    assert run("--explain", str(log)) == 0
    shown = capsys.readouterr().out
    assert "ran out of memory" in shown and "MAX_JOBS=" in shown and "<jobs>" not in shown
    monkeypatch.setattr(sys, "stdin", io.StringIO(UNDEFINED))
    assert run("--explain", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["failures"][0]["name"] == "built against another PyTorch"
    log.write_text("nothing\n")
    assert run("--explain", str(log)) == 1 and "no known failure" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--explain", "none.log"], "none.log: No such file"), (["--dry-run"], "--install --dry-run"),
        (["--jsn"], "--json"), (["--install", "--json"], "no other option than --dry-run"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, words, capsys):
    assert run(*argv) == 2
    shown = capsys.readouterr()
    assert words in shown.err and shown.err.count("\n") == 1 and not shown.out


# -- installing


def test_the_plan_sets_the_builds_environment(tmp_path):
    for name in ("cudnn/include", "cu13/include", "nccl/lib"):
        (tmp_path / name).mkdir(parents=True)
    installed = {"transformer-engine": "2.9.0", "transformer-engine-cu12": "2.9.0"}
    settings, commands = install_te.plan(tmp_path, installed, 3, {"CPATH": "/mine"})
    assert settings == {
        "CPATH": f"{tmp_path}/cu13/include:{tmp_path}/cudnn/include:/mine", "MAX_JOBS": "3",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE", "NVTE_WITH_NCCL_EP": "0",
    }
    remove, tools, build = (" ".join(command) for command in commands)
    assert "uninstall -y transformer-engine transformer-engine-cu12" in remove and "pybind11" in tools
    assert "--no-build-isolation --no-cache-dir transformer-engine[pytorch]" in build
    settings, commands = install_te.plan(tmp_path / "none", {}, 3, {"MAX_JOBS": "1"})
    assert "CPATH" not in settings and settings["MAX_JOBS"] == "1" and len(commands) == 2


@pytest.mark.parametrize("free, cpus, jobs", [(128.0, 16, 16), (17.0, 16, 4), (1.5, 16, 1), (64.0, 2, 2)])
def test_jobs_fit_into_memory(free, cpus, jobs):
    assert install_te.max_jobs(free, cpus) == jobs


def test_pytorchs_cudnn_comes_first(tmp_path):
    for name in ("nccl/lib", "cudnn/lib", "cu13/lib", "cudnn/include"):
        (tmp_path / name).mkdir(parents=True)
    expected = f"{tmp_path}/cudnn/lib:{tmp_path}/cu13/lib:{tmp_path}/nccl/lib"
    assert install_te.library_path(tmp_path) == expected


def hopper(monkeypatch, capability=(9, 0), cuda="13.0"):
    """Let install_te see this GPU, and the tools that it needs to build."""
    monkeypatch.setattr(install_te, "gpu_capability", lambda: capability)
    monkeypatch.setattr(install_te, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(install_te, "cannot_build", lambda: [])


@pytest.mark.parametrize("answer, capability", [
    ("9.0\n9.0\n", (9, 0)), ("10.3\n", (10, 3)), ("No devices were found\n", (0, 0)), (None, (0, 0))])
def test_the_gpu_is_known_without_torch(answer, capability, tmp_path, monkeypatch):
    if answer:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_te.gpu_capability() == capability


@pytest.mark.parametrize("capability, cuda, last", [
    ((9, 0), "13.0", "install 'flash-attn-4[cu13]==4.0.0b36'"),
    ((10, 0), "12.8", "install flash-attn-4==4.0.0b36"),
    ((8, 9), "13.0", "'transformer-engine[pytorch]>=2.9,<2.21'")])
def test_flash_attention_comes_last_where_the_gpu_runs_it(capability, cuda, last, monkeypatch, capsys):
    hopper(monkeypatch, capability, cuda)
    assert run("--install", "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(last)


NO_WHEEL = "ERROR: No matching distribution found for nvidia-cutlass-dsl"
NOT_INSTALLED = "warn  FlashAttention 4 was not installed ({}): --attention auto uses another kernel"


@pytest.mark.parametrize("code, said", [
    (f"print('{NO_WHEEL}'); raise SystemExit(1)", NOT_INSTALLED.format(NO_WHEEL)),
    ("raise SystemExit(3)", NOT_INSTALLED.format("exit code 3")),
    ("print('Successfully installed')", "Successfully installed")])
def test_without_flash_attention_the_rest_is_installed(code, said, monkeypatch, capsys):
    hopper(monkeypatch)
    monkeypatch.setattr(install_te, "plan", lambda *_: ({}, [[sys.executable, "-c", "print('built')"]]))
    monkeypatch.setattr(install_te, "flash_command", lambda cuda: [sys.executable, "-c", code])
    assert install_te.install() == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == [said, "ok    installed; run python doctor.py to check it"] and "built" in shown


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("has_gpu", [True, False])
def test_what_make_would_install(has_gpu, tmp_path):
    command = ["make", "-n", "train", f"VENV={tmp_path}/venv", f"HAS_GPU={'yes' if has_gpu else ''}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=doctor.HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    install = [line.partition("venv/bin/python ")[2] for line in done.stdout.splitlines()
               if "pip install" in line or "--install" in line]
    pip = "-m pip install --quiet --disable-pip-version-check -r requirements.txt -c"
    with_gpu = [f"{pip} constraints-gpu.txt", "doctor.py --install"]
    assert install == (with_gpu if has_gpu else [f"{pip} constraints.txt"])


def pins():
    """The lines that choose the versions of a GPU machine."""
    files = [(doctor.HERE / name).read_text() for name in ("constraints-gpu.txt", "requirements-gpu.txt")]
    return re.findall(r"^(?:torch|transformer-engine|flash)\S+$", "\n".join(files), re.M)


def test_make_installs_what_the_figures_were_measured_with():
    pinned = {requirement.name: requirement.specifier for requirement in map(Requirement, pins())}
    measured = json.loads((doctor.HERE / "results" / "attention.json").read_text())
    versions = measured["versions"] | {"torch": measured["torch"].partition("+")[0]}
    assert versions["torch"] in pinned["torch"] and versions["flash-attn-4"] in pinned["flash-attn-4"]
    assert versions["transformer_engine"] in pinned["transformer-engine"]
    newest = doctor.fast_kernels("")["tested"][-1]
    assert f"{newest}.9" in pinned["transformer-engine"]
    assert f"{newest[:2]}{int(newest[2:]) + 1}" not in pinned["transformer-engine"]


def test_the_install_page_says_what_is_installed_and_what_doctor_says():
    page = (doctor.HERE / "guide" / "install.md").read_text()
    assert len(pins()) == 3 and all(f"`{line}`" in page for line in pins())
    assert NOT_INSTALLED.format(NO_WHEEL) in page
    result = result_with(machine(flash4={}), "FlashAttention 4")
    assert f"warn  {result.line}\n      fix: {result.fix.replace(sys.executable, 'python')}\n" in page


def test_in_nvidias_container_pip_keeps_torch(tmp_path):
    """The page's two files: the requirements without torch, and the installed torch as a constraint."""
    page = (doctor.HERE / "guide" / "install.md").read_text()
    commands = re.findall(r"^(?:python -c|grep) .*> /tmp/.*$", page, re.M)
    assert len(commands) == 2
    for command in commands:
        command = command.replace("/tmp/", f"{tmp_path}/").replace("python ", f"{sys.executable} ")
        subprocess.run(command, shell=True, cwd=doctor.HERE, check=True)
    assert (tmp_path / "torch.txt").read_text() == f"torch=={version('torch')}\n"
    left_out = {*(doctor.HERE / "requirements.txt").read_text().splitlines()}
    assert left_out - {*(tmp_path / "others.txt").read_text().splitlines()} == {"torch>=2.11"}


def test_a_dry_run_runs_nothing(monkeypatch, capsys):
    hopper(monkeypatch)
    monkeypatch.setattr(install_te.subprocess, "Popen", lambda *a, **k: pytest.fail("ran"))
    assert run("--install", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "NVTE_WITH_NCCL_EP=0" in shown and "'transformer-engine[pytorch]" in shown


def test_a_build_that_cannot_work_is_not_started(monkeypatch, capsys):
    monkeypatch.setattr(install_te, "torch_cuda", lambda: "")
    assert install_te.install(run=lambda *a, **k: pytest.fail("ran")) == 1
    assert "PyTorch with CUDA" in capsys.readouterr().out


@pytest.mark.parametrize(
    "code, status",
    [("print('cudnn.h: No such file or directory'); raise SystemExit(1)", 1), ("print('built')", 0)],
)
def test_a_build_that_fails_is_explained(code, status, monkeypatch, capsys):
    monkeypatch.setattr(install_te, "plan", lambda *_: ({"CPATH": "x"}, [[sys.executable, "-c", code]]))
    hopper(monkeypatch, (8, 9))
    assert install_te.install() == status
    assert ("puts them on CPATH" if status else "ok    installed") in capsys.readouterr().out


def test_the_cuda_of_the_installed_torch_is_known_without_importing_it():
    assert install_te.torch_cuda() == (torch.version.cuda or "")


# -- probes


@pytest.mark.parametrize(
    "body, error",
    [
        ("emit({'version': '1'}); os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("emit({'version': '1'}); 1 / 0", "ZeroDivisionError"),
        ("emit({'version': '1'}); time.sleep(60)", "no answer in 2 seconds"),
        ("print('noise'); emit({'version': '1'})", None),
    ],
)
def test_a_probe_that_dies_is_reported(body, error, tmp_path, monkeypatch):
    (tmp_path / "doctor.py").write_text(f"import os, signal, time\ndef probe_it(emit):\n    {body}\n")
    monkeypatch.setattr(doctor, "HERE", tmp_path)
    found = doctor.run_probe("it", timeout=2)
    assert found["version"] == "1" and (error in found["error"] if error else "error" not in found)


def test_doctor_imports_neither_torch_nor_transformer_engine():
    code = "import sys, doctor; print({'torch', 'transformer_engine', 'tyro'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=doctor.HERE)
    assert done.stdout == "set()\n"


def test_without_tyro_doctor_says_so():
    code = (
        "import sys, runpy; sys.modules['tyro'] = None; sys.argv = ['doctor.py']; "
        "runpy.run_path('doctor.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=doctor.HERE)
    assert done.returncode == 1 and "tyro" in done.stdout and "requirements.txt" in done.stdout


def test_missing_requirements():
    text = "torch>=1.0\ntyro>=999.9\nno-such-package-here\n# for the tests\nneither-this-one\n"
    missing = doctor.missing_requirements(text)
    assert len(missing) == 2 and missing[0].endswith("(needs 999.9)")
    assert missing[1] == "no-such-package-here (not installed)"


def test_a_gemm_in_high_precision_is_not_mistaken_for_fp8():
    @contextmanager
    def no_autocast(enabled, recipe):
        yield
    device = "cuda" if torch.cuda.is_available() else "cpu"
    real = doctor.gemm_errors(fp8, "current", device)
    te = SimpleNamespace(Linear=fp8.te.Linear, autocast=no_autocast)
    fake_fp8 = SimpleNamespace(make_recipe=fp8.make_recipe, te=te)
    fake = doctor.gemm_errors(fake_fp8, "current", device)
    assert max(fake) < doctor.TOO_EXACT < min(real)
    assert real[0] < doctor.OUTPUT_BOUND and max(real[1:]) < doctor.GRADIENT_BOUND


@pytest.mark.parametrize(
    "facts, code, text",
    [
        (
            bare(), 1,
            "fail  Transformer Engine is not installed; FP8 is emulated, slowly\n"
            "      fix: python doctor.py --install\n",
        ),
        (machine(), 0, "ok    PyTorch 2.11.0+cu130, CUDA 13.0\n"),
        (laptop(), 0, "can train here"),
    ],
)
def test_the_exit_code_and_the_report(facts, code, text, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "gather_facts", lambda: facts)
    assert run() == code and text in capsys.readouterr().out
    assert run("--json") == code and json.loads(capsys.readouterr().out)["ok"] == (code == 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_this_machine(capsys, monkeypatch):
    facts = doctor.gather_facts()
    monkeypatch.setattr(doctor, "gather_facts", lambda: facts)
    assert run("--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert run() == 0 and report["verdict"] in capsys.readouterr().out
    assert report["ok"] and "te_reference" in report["verdict"]
    assert set(report["facts"]["fp8"]["errors"]) == {"delayed", "current", "block", "mxfp8"}


@pytest.mark.gpu
def test_this_gpu(capsys):
    code = run("--json")
    report = json.loads(capsys.readouterr().out)
    failed = [check["line"] for check in report["checks"] if check["status"] == "fail"]
    # a test machine may lack datasets
    assert all(line.startswith("packages:") for line in failed) and code == bool(failed)
    facts = report["facts"]
    assert facts["te"]["version"] and facts["cudnn"]["files"]
    assert facts["nccl"]["version"] and facts["fp8"]["errors"]
    capability = torch.cuda.get_device_capability()
    assert facts["fp8"]["reasons"] == doctor.expected_reasons(capability, torch.version.cuda)
