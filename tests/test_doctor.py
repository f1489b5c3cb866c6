"""doctor.py as a user runs it: on this machine, and on simulated ones.

A simulated machine is a folder on PATH and PYTHONPATH with its own nvidia-smi, torch and pip.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import doctor

SMI = """#!/bin/sh
case "$*" in
  *compute_cap*) echo "{capability}" ;;
  *driver_version*) echo "580.95, NVIDIA H200" ;;
  *) echo "NVIDIA H200" ;;
esac
"""
TORCH = """
from types import SimpleNamespace
__version__, version = "2.11.0+cu130", SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(
    is_available=lambda: True, get_device_capability=lambda: (9, 0), get_device_name=lambda: "NVIDIA H200",
    mem_get_info=lambda: (2**37, 2**37))
backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900))
class ones:
    __init__ = __add__ = lambda self, *_, **__: self if _ == (1,) and not __ else None
    item = lambda self: 2
"""
DISABLE_RHT = "export NVTE_NVFP4_DISABLE_RHT=1 NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1"
OTHER_TORCH = "ImportError: /x/transformer_engine_torch.so: undefined symbol: _ZN3c106detail14torchCheckFail"


def run(*arguments, machine=None, text=None, flags=()):
    """Run doctor.py; return the exit code and all that it printed."""
    environment = dict(os.environ)
    if machine:
        environment |= {"PATH": f"{machine}:{environment['PATH']}", "PYTHONPATH": str(machine)}
    done = subprocess.run([sys.executable, *flags, "doctor.py", *arguments], cwd=doctor.HERE, env=environment,
                          input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert "Traceback" not in done.stdout
    return done.returncode, done.stdout


@pytest.fixture
def hopper(tmp_path):
    """A machine with an H200, a PyTorch for CUDA 13 and no Transformer Engine."""
    write(tmp_path, "nvidia-smi", SMI.format(capability="9.0"))
    write(tmp_path, "torch/__init__.py", TORCH)
    write(tmp_path, "torch/version.py", "cuda: str = '13.0'\n")
    write(tmp_path, "nvidia/cudnn/include/cudnn.h", "")
    return tmp_path


def write(folder, name, text):
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


# ---------------------------------------------------------------- what works

@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_laptop_can_train():
    code, shown = run()
    assert code == 0 and "fail" not in shown and "warn" not in shown
    assert f"ok    PyTorch {torch.__version__}" in shown and "info  no NVIDIA GPU" in shown
    for recipe in ("delayed", "current", "block", "mxfp8"):
        assert f"ok    FP8 GEMM under {recipe}: relative error 0.0" in shown
    assert shown.endswith("nanoTE can train here: python train.py\n")


@pytest.mark.gpu
def test_this_gpu_runs_fp8():
    _, shown = run()
    assert "ok    Transformer Engine 2." in shown and "ok    FP8 GEMM under delayed" in shown


def test_the_standard_library_is_enough(hopper):
    code, shown = run(flags=["-S"], machine=hopper)
    assert code == 1 and "packages missing or too old: torch 2.11" in shown and "-r requirements.txt" in shown
    assert run("--explain", "-", text="x.so: undefined symbol: _ZN3c10", flags=["-S"])[0] == 0


# ---------------------------------------------------------------- what does not work

def test_hopper_without_transformer_engine_fails(hopper):
    code, shown = run(machine=hopper)
    assert code == 1 and "ok    NVIDIA driver 580.95; 1 x NVIDIA H200" in shown
    assert "ok    NVIDIA H200, compute capability 9.0, 128 of 128 GiB free" in shown
    assert "warn  FlashAttention 4: not installed" in shown and "'flash-attn-4[cu13]==" in shown
    assert "fail  Transformer Engine is not installed" in shown and "begin with the first fix" in shown


@pytest.mark.parametrize("body, words", [
    (f'raise ImportError("{OTHER_TORCH}")', "Transformer Engine was built for another PyTorch."),
    ("import os; os.kill(os.getpid(), 11)", "FP8: killed by signal 11"),
    ("__version__ = '2.5.0+f05f12c'", "Transformer Engine 2.5.0+f05f12c is too old")])
def test_a_broken_transformer_engine_is_named(body, words, hopper):
    write(hopper, "transformer_engine/__init__.py", body)
    write(hopper, "transformer_engine/pytorch.py", "")
    code, shown = run(machine=hopper)
    assert code == 1 and words in shown and "fix: python doctor.py --install\n" in shown


def test_a_cpu_pytorch_beside_a_gpu_fails(tmp_path):
    write(tmp_path, "nvidia-smi", SMI.format(capability="9.0"))
    if not torch.version.cuda:
        code, shown = run(machine=tmp_path)
        assert code == 1 and "without CUDA, but there is a GPU" in shown and "PyTorch with CUDA" in shown


# ---------------------------------------------------------------- --explain

@pytest.mark.parametrize("message, answer", [
    ("c++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS=1"),
    ("cudnn-wrapper.h:3:10: fatal error: cudnn.h: No such file or directory", "sets CPATH"),
    ("cuda_runtime.h:82:10: fatal error: crt/host_config.h: No such file or directory", "CUDA_HOME"),
    ("TypeError: expected string or bytes-like object, got 'NoneType'", "PyTorch with CUDA"),
    ("ModuleNotFoundError: No module named 'pybind11'", "build tool is missing"),
    ("/x/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "pip uninstall -y flash-attn"),
    (OTHER_TORCH, "built for another PyTorch"),
    ("ModuleNotFoundError: No module named 'transformer_engine'", "is not installed"),
    ("ModuleNotFoundError: No module named 'transformer_engine_torch'", "parts of several"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "CUDNN_HOME="),
    ("OSError: libcuda.so.1: cannot open shared object file", "no NVIDIA driver"),
    ("The NVIDIA driver on your system is too old (found version 11040).", "driver's CUDA"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no kernels"),
    ("cublaslt_gemm.cu:397 in function cublas_gemm: Unable to find any suitable algorithms", "50304"),
    ("Device compute capability 8.9 or higher required for FP8 execution.", "--fp8-recipe none"),
    ("step 40: loss nan", "--fp8-recipe none"),
    ("x.cu:1200 in function row_col_rht_gemm_ntt_w_sfc: CUDA Error: invalid argument", DISABLE_RHT),
    ("torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was "
     "saved during the original forward and recomputation.", "te.checkpoint(block, x)")])
def test_an_error_message_has_its_answer(message, answer):
    found = doctor.explain(f"  building an extension\n   {message}\n  ERROR: Failed building wheel\n")
    assert len(found) == 1 and answer in " ".join(found[0])


def test_explain_reads_a_file_or_stdin(tmp_path):
    log = tmp_path / "build.log"
    log.write_text(OTHER_TORCH)
    code, shown = run("--explain", str(log))
    assert code == 0 and "line: ImportError: /x/" in shown and "fix: python doctor.py --install" in shown
    assert run("--explain", "-", text="nothing\n")[0] == 1
    code, shown = run("--explain", str(tmp_path / "none"))
    assert code == 2 and shown.count("\n") == 1 and "No such file" in shown
    assert run("--explan")[0] == 2


# ---------------------------------------------------------------- --install

def test_a_dry_run_prints_the_commands(hopper):
    metadata = "Name: transformer_engine\nVersion: 2.18.0\n"
    write(hopper, "transformer_engine-2.18.0.dist-info/METADATA", metadata)
    code, shown = run("--install", "--dry-run", machine=hopper)
    lines = shown.splitlines()
    assert code == 0 and f"export CPATH={hopper}/nvidia/cudnn/include" in lines
    assert "export NVTE_PYTORCH_FORCE_BUILD=TRUE" in lines
    remove, tools, build, flash = (line.partition(" -m pip ")[2] for line in lines[-4:])
    assert remove == "uninstall -y transformer-engine" and "pybind11" in tools
    assert build.startswith("install --no-build-isolation --no-cache-dir 'transformer-engine[pytorch]")
    assert flash.startswith("install 'flash-attn-4[cu13]==")


@pytest.mark.parametrize("fails_on, code, words", [
    ("nothing", 0, "ok    installed"), ("transformer", 1, "fail  The compiler does not find the headers"),
    ("flash", 0, "warn  FlashAttention 4 was not installed")])
def test_a_failed_build_is_explained(fails_on, code, words, hopper):
    write(hopper, "pip/__init__.py", "")
    write(hopper, "pip/__main__.py", f"import os, sys\nif '{fails_on}' in sys.argv[-1]:\n"
          "    sys.exit('fatal error: cudnn.h: No such file or directory')\nprint(os.environ.get('CPATH'))")
    status, shown = run("--install", machine=hopper)
    assert status == code and words in shown and f"\n{hopper}/nvidia/cudnn/include" in shown


def test_a_build_without_cuda_is_not_started(hopper):
    write(hopper, "torch/version.py", "cuda = None\n")
    code, shown = run("--install", machine=hopper)
    assert code == 1 and shown.count("\n") == 1 and "install a PyTorch with CUDA" in shown
