"""doctor.py as a user runs it: on this machine, and on simulated ones.

Of --model, tests in this process use te_reference; one runs in Triton's interpreter, in a process of its own.
A simulated machine is a folder on PATH and PYTHONPATH with its own nvidia-smi, torch and pip.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import doctor
from nanote import model_check, recipes
from nanote.command import run_command

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

def test_hopper_without_transformer_engine_has_fast_kernels(hopper):
    """This machine's PyTorch is not complete, so that the check of FP8 itself fails."""
    code, shown = run(machine=hopper)
    assert code == 1 and "ok    NVIDIA driver 580.95; 1 x NVIDIA H200" in shown
    assert "ok    NVIDIA H200, compute capability 9.0, 128 of 128 GiB free" in shown
    assert "warn  FlashAttention 4: not installed" in shown and "'flash-attn-4[cu13]==" in shown
    assert "info  Transformer Engine is not installed: FP8 runs on fast_kernels" in shown
    assert "begin with the first fix" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
@pytest.mark.parametrize("engine, line", [
    ("tee", "fail  NANOTE_ENGINE=tee: must be te, fast or reference; "),
    ("fast", "fail  NANOTE_ENGINE=fast: fast_kernels needs a GPU; ")])
def test_an_engine_that_does_not_run_here_is_a_failure(engine, line, monkeypatch):
    if engine == "fast":
        pytest.importorskip("triton")
    monkeypatch.setenv("NANOTE_ENGINE", engine)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, shown = run()
    assert code == 1 and line in shown and "\n      fix: unset NANOTE_ENGINE" in shown
    assert shown.endswith("begin with the first fix\n")


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

def messages_of_the_guide():
    """Yield (message, cause, fix) of the pages' tables of error messages."""
    for page in sorted((doctor.HERE / "guide").glob("*.md")):
        tables = re.findall(r"^\| message \| cause \| fix \|\n.*\n((?:\|.*\n)+)", page.read_text(), re.M)
        for row in "".join(tables).splitlines():
            messages, cause, fix = row.strip("| ").split(" | ")
            for message in re.findall(r"`([^`]+)`", messages):
                yield message, cause, fix


def test_the_messages_of_the_guide_have_their_answers():
    """The cause is the page's, and its commands are in the fix; in both "…" stands for any text."""
    rows = list(messages_of_the_guide())
    assert len(rows) > 40
    for message, cause, fix in rows:
        found = doctor.explain(message.replace("…", "x"))
        assert [found_cause for found_cause, _, _ in found] == [f"{cause}."], message
        [(_, found_fix, _)] = found
        for command in re.findall(r"`([^`]+)`", fix) or [fix]:
            for part in command.split("…"):
                assert part in found_fix, message


@pytest.mark.parametrize("message, answer", [
    ("cudnn-wrapper.h:3:10: fatal error: cudnn.h: No such file or directory", "sets CPATH"),
    ("util/cudnn.h:17:10: fatal error: cudnn_frontend.h: No such file or directory", "cudnn-frontend"),
    ("cuda_runtime.h:82:10: fatal error: crt/host_config.h: No such file or directory", "CUDA_HOME"),
    ("#error -- unsupported GNU version! gcc versions later than 13 are not supported!", "CC=gcc-13"),
    ("Out of memory: Killed process 7 (cc1plus) total-vm:9kB", "MAX_JOBS=1"),
    ("TypeError: expected string or bytes-like object, got 'NoneType'", "PyTorch with CUDA"),
    ("libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x.so)", "libstdcxx-ng"),
    ("/x/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "pip uninstall -y flash-attn"),
    (OTHER_TORCH, "built for another PyTorch"),
    ("ModuleNotFoundError: No module named 'transformer_engine_torch'", "parts of several"),
    ("Supported flash-attn versions are >= 2.1.1, <= 2.8.3. Found flash-attn 2.9.", "does not use"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "--grad-accum"),
    ("cublaslt_gemm.cu:397 in function cublas_gemm: Unable to find any suitable algorithms", "50304"),
    ("CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(…, CUDA_R_16BF, …)`", "before Ampere"),
    ("FP8: cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED", "A dimension of this FP8 GEMM"),
    ("CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(…, CUDA_R_8F_E4M3)`", "of this FP8 GEMM"),
    ("step 40: loss nan", "--fp8-recipe none"),
    ("RuntimeError: Refusing to load pickled Transformer Engine extra state for 'x'", "get_state"),
    ("FusedAdam does not support FP8 model weights with capturable=True.", "CUDA graph"),
    ("x.cu:1200 in function row_col_rht_gemm_ntt_w_sfc: CUDA Error: invalid argument", DISABLE_RHT),
    ("torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was "
     "saved during the original forward and recomputation.", "te.checkpoint(block, x)"),
    # as one remembers them
    ("missing headers, cudnn.h", "sets CPATH"),
    ("'Python.h' file not found", "python3-dev"),
    ("GLIBCXX not found", "libstdcxx-ng"),
    ("undefined symbol in flash_attn_2_cuda", "pip uninstall -y flash-attn"),
    ("cannot import name 'flash_attn_func' from 'flash_attn' (unknown location)", "is not installed"),
    ("cannot import name 'flash_attn_func' from 'flash_attn' (/x/flash_attn/__init__.py)", "is broken"),
    ("flash_attn is not installed", "--no-build-isolation flash-attn"),
    ("ImportError: flash_attn", "--no-build-isolation flash-attn"),
    ("TE version mismatch warnings", "parts of several"),
    ("cuBLAS GEMM Error", "50304"),
    ("cuBLAS error: no suitable GEMM algorithm", "50304"),
    ("CUBLAS_STATUS_NOT_SUPPORTED", "50304"),
    ("FP8: the last dimension is not divisible by 16", "50304"),
    ("vocab_size must be divisible by 32", "50304"),
    ("FP8 not supported on this GPU", "--fp8-recipe none"),
    ("out of memory", "--grad-accum"),
    ("delayed scaling does not work with torch.compile", "NANOTE_ENGINE=fast"),
    ("Float8Tensor has no attribute _data", "is_first_microbatch"),
    ("NaN loss", "--fp8-recipe none")])
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


# ---------------------------------------------------------------- --model

RESIDUAL = "        return x + self.dropout(self.mlp(x, is_first_microbatch=is_first_microbatch))\n"
BRANCH = "        y = self.mlp(x, is_first_microbatch=is_first_microbatch)\n"
IS_FIRST_IN_FP8 = "self.attn.config.use_fp8 and self.attn.layer == 0"
CALL = "                        x = block(x, rope, cu_seqlens, mask, is_first_microbatch, kv_cache)\n"
TORCH_CHECKPOINT = """                        x = torch.utils.checkpoint.checkpoint(
                            block, x, rope, cu_seqlens, mask, is_first_microbatch, kv_cache,
                            use_reentrant=True)
"""
PACKED = """        self.qkv = te.LayerNormLinear(
            config.n_embd, q_size + 2 * kv_size, bias=has_qkv_bias, init_method=normal_init,
            **norm_options(config))
"""
SEPARATE = """        for name, size in dict(q=q_size, k=kv_size, v=kv_size).items():
            setattr(self, name, te.LayerNormLinear(config.n_embd, size, init_method=normal_init))
"""
PACKED_CALL = "self.qkv(x, is_first_microbatch=is_first_microbatch)\n"
SEPARATE_CALL = "torch.cat((self.q(x), self.k(x), self.v(x)), dim=-1)\n"
# of guide/changing_the_model.md: an edit of model_te_fast.py, and what doctor.py prints about it
TWO_USES, SAMPLE = re.search(
    r"```diff\n(.*?)```\n\n```text\n(.*?)```", (doctor.HERE / "guide/changing_the_model.md").read_text(),
    re.S).groups()


def edit(folder, old="", new="", model="optimized"):
    """Write my_model.py, a copy of a model file with some text replaced."""
    text = (doctor.HERE / f"model_te_{model}.py").read_text()
    assert old in text
    (folder / "my_model.py").write_text(text.replace(old, new) if old else text)


@pytest.fixture
def check(monkeypatch, capsys):
    """A function that runs doctor.py --model in this process; it returns the exit code and all output."""
    def check(name):
        code = run_command(lambda: doctor.main(["--model", name]), "doctor.py")
        output = capsys.readouterr()
        return code, output.out + output.err

    return check


@pytest.fixture
def no_graph(monkeypatch):
    """Leave out the check that takes as long as all others."""
    monkeypatch.setattr(model_check, "check_graph", lambda *arguments: ("ok", "one graph", ""))


def apply(diff, folder):
    """Apply a diff of examples/edits to a copy of its model file; return what --model is."""
    model = "fast" if diff.parent.name == "fast" else "optimized"
    edit(folder, model=model)
    subprocess.run(["git", "apply", str(diff)], cwd=folder, check=True)
    return "my_model.py:FastGPT2Model" if model == "fast" else "my_model.py:OptimizedGPT2Model"


EDITS = sorted((doctor.HERE / "examples" / "edits").glob("*/*.diff"))
ON_CPU = ("optimized/lora", "optimized/second_head")


@pytest.mark.parametrize("diff", [
    pytest.param(diff, id=name, marks=[] if name in ON_CPU else pytest.mark.gpu)
    for diff in EDITS for name in [f"{diff.parent.name}/{diff.stem}"]])
def test_an_edit_of_the_examples_passes(diff, check, in_tmp_path, tmp_path, request, monkeypatch):
    if diff.stem == "offload" and recipes.ENGINE == "fast":
        pytest.skip("fast_kernels has no get_cpu_offload_context")
    if not torch.cuda.is_available() and diff.stem != "relu_squared":
        request.getfixturevalue("no_graph")
    if torch.cuda.is_available() and diff.parent.name == "compiled":  # TE does not trace
        monkeypatch.setenv("NANOTE_ENGINE", "fast")
    code, shown = check(apply(diff, tmp_path))
    assert code == 0 and shown.count("GEMMs in FP8: ") == 1, shown
    assert "fail  " not in shown and "warn  " not in shown, shown
    if diff.stem == "second_head" and diff.parent.name == "optimized":
        assert "not in FP8: value_head: not part of the loss" in shown
    if diff.parent.name == "compiled" or not torch.cuda.is_available():
        assert "ok    one graph" in shown


@pytest.mark.parametrize("old, new, line", [
    (RESIDUAL, f"{BRANCH}        return x + (1.5 * y if {IS_FIRST_IN_FP8} else y)\n",
     "fail  blocks.0: its output changes by "),
    (RESIDUAL, f"{BRANCH}        if {IS_FIRST_IN_FP8} and y.requires_grad:\n"
     "            y.register_hook(lambda gradient: 1.5 * gradient)\n        return x + y\n",
     "fail  blocks.0.mlp.fc2_bias: its gradient changes by "),
    (CALL, TORCH_CHECKPOINT,
     "fail  blocks.0.attn.qkv: in FP8 in the forward pass, but recomputed without FP8"),
    (RESIDUAL, f"{BRANCH}        if x.requires_grad and {IS_FIRST_IN_FP8}:\n"
     "            raise RuntimeError('a shape')\n        return x + y\n",
     "fail  blocks.0: only in FP8: RuntimeError: a shape"),
    ("enabled=self.config.use_fp8 and enabled", "enabled=False",
     "fail  OptimizedGPT2Model: none of 9 GEMMs runs in FP8")],
    ids=["output", "gradient", "recomputed", "raises", "no FP8"])
def test_the_module_that_is_off_is_named(old, new, line, check, no_graph, in_tmp_path, tmp_path):
    edit(tmp_path, old, new)
    code, shown = check("my_model.py:OptimizedGPT2Model")
    assert code == 1 and line in shown and shown.count("fail  ") == 1, shown


def test_a_gradient_that_is_zero_is_not_compared_with_itself(check, no_graph, in_tmp_path, tmp_path):
    """Queries, keys and values of modules of their own: a key's bias has no gradient."""
    edit(tmp_path, PACKED, SEPARATE)
    text = (tmp_path / "my_model.py").read_text()
    assert PACKED_CALL in text
    (tmp_path / "my_model.py").write_text(text.replace(PACKED_CALL, SEPARATE_CALL))
    code, shown = check("my_model.py:OptimizedGPT2Model")
    assert code == 0 and "13 of 13 GEMMs in FP8: blocks.*.attn.q, blocks.*.attn.k, " in shown, shown


def test_a_graph_break_is_named_with_its_line(check, in_tmp_path, tmp_path, monkeypatch):
    monkeypatch.setitem(model_check.SIZES, "n_layer", 1)  # tracing takes the time
    edit(tmp_path, RESIDUAL, f"        print(end='')\n{RESIDUAL}")
    number = (tmp_path / "my_model.py").read_text().partition("print(end")[0].count("\n") + 1
    code, shown = check("my_model.py:OptimizedGPT2Model")
    assert code == 0 and "warn  not one graph under torch.compile: " in shown
    assert f"my_model.py:{number}: " in shown


@pytest.mark.parametrize("name, message", [
    ("optimized", "--model optimized: must be path/to/file.py:Class"),
    ("none.py:Model", "--model none.py:Model: cannot be imported (FileNotFoundError"),
    ("my_model.py:None", "--model my_model.py:None: cannot be imported (AttributeError"),
    ("plain.py:Plain", "PlainConfig has no field use_fp8, so it does not train in FP8"),
    ("my_model.py:Attention", "--model my_model.py:Attention: cannot be built: TypeError")])
def test_a_model_that_cannot_be_compared_is_one_line(name, message, check, in_tmp_path, tmp_path):
    edit(tmp_path)
    Path("plain.py").write_text("import dataclasses\n@dataclasses.dataclass\nclass PlainConfig:\n"
                                "    vocab_size: int = 64\n    n_positions: int = 64\n\nclass Plain:\n"
                                "    def __init__(self, config):\n        pass\n")
    code, shown = check(name)
    assert code == 2 and message in shown and shown.count("\n") == 1, shown


def test_checking_a_model_needs_the_packages():
    code, shown = run("--model", "my_model.py:MyModel", flags=["-S"])
    assert code == 2 and shown.count("\n") == 1 and "No module named 'torch'; pip install -r" in shown


def check_two_uses(given, folder):
    """Apply the page's edit, whose second use of the head gets `given`. Return doctor.py's exit code and
    output."""
    pytest.importorskip("triton")
    old, new = ("".join(re.findall(f"(?m)^[{sign}](.*\n)", TWO_USES)) for sign in "-+")
    edit(folder, old, new.replace("TiedGradient()", given), model="fast")
    code, shown = run("--model", f"{folder}/my_model.py:FastGPT2Model")
    return code, shown.replace(f"{folder}/", "")


# These take half a minute in Triton's interpreter; test_a_tied_head_can_be_used_twice is shorter

@pytest.mark.gpu
def test_both_uses_of_a_tied_head_have_a_gradient(tmp_path):
    code, shown = check_two_uses("tied_gradient", tmp_path)
    assert code == 0 and "computes in FP8 what it computes without" in shown, shown
    assert "9 of 9 GEMMs in FP8" in shown and "leaves it alone: forward is @torch.compiler.disable" in shown


@pytest.mark.gpu
def test_a_lost_gradient_is_found_as_the_page_shows(tmp_path):
    """But for the figures and the engine, which are those of Triton's interpreter."""
    def comparable_lines(text):
        return re.sub(r"[\d.]+%", "%", text.replace(" in Triton's interpreter", "")).splitlines()

    code, shown = check_two_uses("TiedGradient()", tmp_path)
    assert code == 1
    for line, of_page in zip(comparable_lines(shown), comparable_lines(SAMPLE), strict=True):
        assert line.startswith(of_page.removesuffix("…")), shown
