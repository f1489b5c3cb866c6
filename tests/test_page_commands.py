"""What the pages tell a user to type: each command runs, is parsed, or is listed as not checked; each loop
trains."""

import argparse
import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.run
import tyro

import doctor
from bench.step import forget_models
from model_te_optimized import te_recipe
from nanote import logs
from nanote.options import read_config
from test_commands import COMMANDS as SCRIPTS
from test_pages import PAGES_OF_TODAY, ROOT
from trainer_tools import exit_code, make_tokens, python_block, run_script

TEXTS = {page.name: page.read_text() for page in PAGES_OF_TODAY}
TEXT = "\n".join(TEXTS.values())

# ---------------------------------------------------------------- the commands of the pages

PROGRAMS = "apt|conda|cp|diff|docker|export|git|grep|make|nsys|patch|pip|pytest|tensorboard"
START = (rf"(?:{PROGRAMS}) |(?:python|torchrun) (?=[^`\n]*\.py)|"
         r"\w+\.py (?=\w[^`\n]* --|--[\w-]+ \w)")
INLINE = re.compile(rf"`((?:[A-Z_]+=\S+ )*(?:{START})[^`\n…]*)`")


def lines_of(block):
    """Return the commands of a block, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    commands = [" ".join(re.sub(" +# .*", "", line).split()) for line in lines]
    return [command for command in commands if command]


BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.S)
PAGE_COMMANDS = {command for block in BLOCKS for command in lines_of(block)}
PAGE_COMMANDS |= set(INLINE.findall(TEXT)) | set(re.findall(r" # or: (.*)", TEXT))

TINY = ("--n-layer 1 --n-head 2 --n-embd 32 --seq-len 16 --micro-batch-size 2 --grad-accum 1 "
        "--max-steps 2 --warmup-steps 1 --eval-tokens 64 --log-interval 1 --device cpu")
SHORT = "--max-steps 12 --eval-tokens 4096 --grad-accum 1"
LONGER = "--max-steps 13"  # than the run that is resumed
TWO_TOKENS = "--max-new-tokens 2"
BYTES = "--tokenizer byte"  # others are downloaded

# What is added to each command without a GPU and with one; None: it is not run. Those of a group run in this
# order.
A_RUN = [
    ("python train.py --help", "", None),
    ("python train.py --preset gpt2-124m --data data/TinyStories-gpt2", TINY, SHORT),
    ("python train.py --resume --out-dir out/gpt2-124m", LONGER, LONGER),
    ('python sample.py out/gpt2-124m --prompt "Once upon a time"', TWO_TOKENS, ""),
    ('python sample.py out/gpt2-124m --prompt "Once upon a time" --temperature 0.8', TWO_TOKENS, ""),
    ("python train.py --eval-only --out-dir out/gpt2-124m", "", ""),
    ("python train.py --config out/gpt2-124m/config.json --lr 1e-3", "", ""),
    ("python data.py sft pairs.jsonl --tokenizer gpt2", f"{BYTES} --out-dir data/pairs-gpt2", None),
    ("python train.py --config out/base/config.json --init-from out/base --data data/pairs-gpt2 --lr 1e-5",
     "", None),
    ("python train.py --config out/base/config.json --init-from out/base --model half.py:HalfFrozen",
     "", None),
    ('python sample.py out/qwen --prompt "Once upon a time"', TWO_TOKENS, ""),
    ("python sample.py out/qwen --score held_out.txt", "", ""),
    ("python data.py text notes/a.txt --tokenizer hf:models/Qwen3-0.6B --out-dir data/mine", BYTES, None),
    ("python train.py --resume --out-dir out/qwen --data data/mine --lr 1e-5", "--max-steps 15", None),
    ("data.py tokens train.bin val.bin --tokenizer gpt2", BYTES, None),
    ("cp model_te_fast.py my_model.py && git apply examples/edits/fast/lora.diff", "", None),
    ("cp model_te_optimized.py my_optimized.py && patch my_optimized.py examples/edits/optimized/lora.diff",
     "", None),
    ("python train.py --config out/qwen-base/config.json --init-from out/qwen-base "
     "--data data/chats-Qwen3-0.6B --out-dir out/lora --model my_model.py:FastGPT2Model "
     "--set lora_rank=16 --set lora_alpha=32 --set lora_base=fp8 --lr 1e-4",
     "--data data/pairs-gpt2 --model my_optimized.py:OptimizedGPT2Model --max-steps 1 --out-dir out/hopper",
     None),
    ("python train.py --config out/qwen-base/config.json --init-from out/qwen-base "
     "--data data/chats-Qwen3-0.6B --out-dir out/lora --model my_optimized.py:OptimizedGPT2Model "
     "--set lora_rank=16 --set lora_alpha=32 --set lora_base=fp8 --lr 1e-4",
     "--data data/pairs-gpt2", None),
    ('python sample.py out/lora --model my_optimized.py:OptimizedGPT2Model --prompt "Once upon a time"',
     TWO_TOKENS, None),
]
OPTIONS = [
    ("python train.py --preset gpt2-124m --data data/TinyStories-gpt2 --micro-batch-size 32", TINY, SHORT),
    ("python train.py --max-steps 20", TINY, SHORT),
    ("python train.py --preset gpt2-124m --data data/TinyStories-gpt2 --fp8-recipe current", TINY, SHORT),
    ("python train.py --preset gpt2-124m --data data/TinyStories-gpt2 --fp8-recipe none", TINY, SHORT),
    ("train.py --fp8-recipe none", TINY, SHORT),
    ("python train.py --fp8-recipe delayed --fp8-health-interval 50", TINY, SHORT),
    ("python train.py --preset gpt2-124m --data data/TinyStories-gpt2 --profile 10:12", None, SHORT),
    ("python train.py --preset gpt2-124m --data data/TinyStories-gpt2 --wandb my-project", TINY, SHORT),
]
OWN_MODELS = [
    ("python train.py --model path/to/my_model.py:MyModel", TINY, SHORT),
    ("python train.py --model my_model.py:MyModel --max-steps 10", TINY, SHORT),
    ("cp model_te_optimized.py my_model.py", "", ""),
    ("cp model_te_fast.py my_model.py", "", ""),
    ("patch -p1 < examples/edits/fast/window.diff", "--dry-run", "--dry-run"),  # git applies it
    ("git apply examples/edits/fast/window.diff", "", ""),
    ("python doctor.py --model my_model.py:FastGPT2Model", None, ""),
    ("python train.py --model my_model.py:FastGPT2Model", None, SHORT),
    ("cp model_te_optimized.py my_model.py && git apply examples/edits/compiled/geglu.diff", "", ""),
    ("NANOTE_ENGINE=fast python train.py --model my_model.py:OptimizedGPT2Model --compile", None, SHORT),
]
BENCHMARKS = [
    ("python benchmark_te.py --shape 12 768 12 32 1024", None, "--steps 4"),
    ("python benchmark_te.py --shape 4 768 12 8 512", None, "--steps 4"),
    ("python benchmark_te.py --shapes 124m-b32 c4096 --blocks gpt2 "
     "--arms fp8 fp8-bf16_moments fp8-loss4 fp8-checkpointing", None, "--steps 4"),
    ("python benchmark_attention.py", None, ""),
]
INSTALLING = [
    ("python doctor.py --explain build.log", "", None),
    ('echo "ImportError: libtorch_cuda.so: undefined symbol: ncclCommShrink" | python doctor.py --explain -',
     "", None),
    ("python -c \"from importlib.metadata import version; print('torch==' + version('torch'))\" "
     "> /tmp/torch.txt", "", None),
    ("grep -v '^torch' requirements.txt > /tmp/others.txt", "", None),
    ("export CC=gcc-13 CXX=g++-13 CUDAHOSTCXX=g++-13", "", None),
    ("export NVTE_NVFP4_DISABLE_RHT=1 NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1", "", None),
]
GROUPS = {"run": A_RUN, "options": OPTIONS, "own models": OWN_MODELS, "installing": INSTALLING}
GROUPS |= {command: [(command, *added)] for command, *added in BENCHMARKS}  # slow, each on its own
RUN = [row for group in GROUPS.values() for row in group]
ON_TWO_GPUS = "torchrun --nproc-per-node 2 train.py --preset gpt2-350m --data data/TinyStories-gpt2"

NOT_CHECKED = {  # the key says why
    "another program's": [
        "source .venv/bin/activate",
        "pip install -r /tmp/others.txt -c /tmp/torch.txt",
        "pip install 'flash-attn-4[cu13]==4.0.0b36' -c /tmp/torch.txt",
        'pip install "transformers>=5.0"',
        "pip install nvidia-cudnn-frontend",
        "pip install triton",
        "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B",
        "pip install --no-build-isolation flash-attn",
        "MAX_JOBS=1 pip install --no-build-isolation flash-attn",
        "pip install --no-build-isolation transformer_engine[pytorch]",
        "pip uninstall -y flash-attn",
        "pip --upgrade",
        "pip -v -v -v",
        "apt install build-essential",
        "apt install python3-dev",
        "conda install -c conda-forge libstdcxx-ng",
        "nsys profile python train.py",
        'docker run --gpus all -it --rm -v "$PWD":/nanote -w /nanote nvcr.io/nvidia/pytorch:26.02-py3',
        "tensorboard --logdir out",
        'NANOTE_ENGINE=reference pytest -m "not gpu"',
        "diff -U 2 --label a/my_model.py --label b/my_model.py model_te_optimized.py my_model.py "
        "> examples/edits/optimized/NAME.diff"],
    "has no options, and runs in test_pages.py": ["python bench/measured.py"],
    "has no options, and runs in test_benchmark.py": ["python bench/pictures.py"],
    "resumes a run, in test_chat.py": [
        "python train.py --resume --out-dir out/qwen --data data/chats-Qwen3-0.6B --lr 1e-5 "
        "--pack-documents"],
    "has no options, and its table is compared in test_finetune.py": ["python bench/fits.py"],
}

PARSED = {  # by their program, or the files that they name exist; the key says why they do not run
    "installs": [
        "make train",
        "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make train",
        "pip install -r requirements.txt",
        "pip install -r requirements.txt -c constraints-gpu.txt",
        "python doctor.py --install",
        "MAX_JOBS=1 python doctor.py --install"],
    "downloads, or reads what was downloaded": [
        "python data.py hf roneneldan/TinyStories --tokenizer gpt2",
        "python data.py hf HuggingFaceFW/fineweb --subset sample-10BT --streaming --tokenizer gpt2",
        "python data.py packages --tokenizer r50k_base",
        "python tools/import_hf.py models/Qwen3-0.6B out/qwen",
        "python tools/import_hf.py models/Qwen3-0.6B out/qwen-base",
        "python bench/minimal.py --nanogpt nanoGPT"],
    "runs the tests": [
        "make lint",
        "make test",
        'make test ARGS="-k readme"',
        "make test-gpu",
        "pytest tests/test_pairs.py",
        "pytest tests/test_family.py tests/test_pairs.py",
        "pytest tests/test_edits.py -k NAME"],
    "runs in test_chat.py": ["python data.py sft chats.jsonl --tokenizer hf:models/Qwen3-0.6B"],
    "runs in test_data.py": ["python data.py stdlib"],
    "runs in test_doctor.py": [
        "make doctor",
        "python doctor.py",
        "python doctor.py --install --dry-run",
        "python doctor.py --model my_model.py:MyModel",
        "python doctor.py --model my_model.py:OptimizedGPT2Model"],
    "runs in test_hf.py": [
        "python tools/export_hf.py out/gpt2-124m hf/mine", "python tools/export_hf.py out/qwen hf/qwen"],
    "runs in test_adapter_runs.py": [
        "python tools/export_hf.py out/lora hf/merged --model my_optimized.py:OptimizedGPT2Model",
        "python tools/export_hf.py out/lora hf/adapters --model my_optimized.py:OptimizedGPT2Model --peft",
        "python tools/export_hf.py out/base hf/base"],
    "runs in test_fp8_folders.py": ["python tools/export_hf.py out/llama hf/llama-fp8 --fp8"],
    "runs in test_sample.py": ["python sample.py out/qwen --chat"],
    "runs in test_own_model.py": [
        "python train.py --model from_nanogpt.py:Model --fp8-recipe none --n-layer 12 --n-head 12 "
        "--n-embd 768"],
    "runs in test_pairs.py": ["python bench/pairs.py --page"],
    "takes minutes or hours": [
        "OMP_NUM_THREADS=1 python train.py",
        "OMP_NUM_THREADS=2 python train.py",
        "python bench/pairs.py",
        "python bench/compiled.py",
        "python bench/finetune.py --json results/finetune.json",
        "python bench/paired.py --json mine.json --tokens 45e6 100e6 --minutes 10",
        "python bench/paired.py --json mine.json --start 0.75 --minutes 10",
        "python bench/paired.py --json mine.json --start 0.75 --arms fp8-first-bf16 fp8-head-bf16 "
        "--minutes 10",
        "NANOTE_ENGINE=te python bench/edits.py --model optimized --edits offload --shape c4096",
        "python bench/turns.py OLD NEW --cases fp8:124m-b32 --json turns.json",
        "python benchmark_te.py --compile",
        "python benchmark_te.py --shapes all",
        "python benchmark_te.py --shapes all --json results/speed.json",
        "python benchmark_te.py --sweep",
        "python test_shapes.py",
        "python test_stability.py"],
    "names a file of yours": [
        "python data.py text FILE --tokenizer gpt2",
        "python bench/edits.py --model fast --edits NAME --json results/fast_edits.json"],
    "needs several GPUs": [
        ON_TWO_GPUS,  # with which it runs
        "torchrun --nproc-per-node 4 bench/multi_gpu.py --layouts ddp fsdp",
        "torchrun --nproc-per-node 2 bench/rank_trace.py --json mine.json",
        "pytest -m multigpu tests/test_multi_gpu.py",
        "torchrun --nproc-per-node 8 train.py --preset gpt2-350m --data data/TinyStories-gpt2",
        "torchrun --nproc-per-node 8 train.py --preset gpt2-1.5b --data data/TinyStories-gpt2 "
        "--parallel fsdp",
        "torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d "
        "--rdzv-endpoint HOST:29500 --rdzv-id run1 train.py --preset llama3-8b "
        "--data data/TinyStories-gpt2 --parallel hsdp"],
}


def test_each_command_of_a_page_is_in_one_list():
    listed = [command for command, _, _ in RUN]
    for commands in [*PARSED.values(), *NOT_CHECKED.values()]:
        listed += commands
    assert PAGE_COMMANDS - set(listed) == set(), "in no list"
    assert set(listed) - PAGE_COMMANDS == set(), "in no page"
    assert len(listed) == len(set(listed)), "in two lists"


# ---------------------------------------------------------------- running

FOLDERS = ("bench", "fast_kernels", "nanote", "tools")


def make_world(monkeypatch, folder):
    """Go to a folder with links to the kit's files, a corpus, and what the commands read besides."""
    monkeypatch.chdir(folder)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.txt"), *map(ROOT.joinpath, FOLDERS)]:
        Path(path.name).symlink_to(path)
    shutil.copytree(ROOT / "examples", "examples")
    make_tokens("data/TinyStories-gpt2")
    Path("data/stdlib").symlink_to("TinyStories-gpt2")
    for name in ("train.bin", "val.bin"):
        shutil.copy(f"data/stdlib/{name}", name)
    Path("out").mkdir()
    Path("out/base").symlink_to("gpt2-124m")
    Path("out/qwen").symlink_to("gpt2-124m")
    Path("out/qwen-base").symlink_to("gpt2-124m")
    own_model = Path("model_te_optimized.py").read_text().replace("OptimizedGPT2Model", "MyModel")
    for path in (Path("my_model.py"), Path("path/to/my_model.py"), Path("notes/a.txt")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(own_model)
    Path("half.py").write_text(python_block("changing_the_model.md", "HalfFrozen"))
    Path("held_out.txt").write_text("a sentence\n" * 5)
    Path("pairs.jsonl").write_text('{"prompt": "a question", "answer": "an answer"}\n' * 200)
    Path("build.log").write_text("fatal error: Python.h: No such file or directory\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "my_model", None)  # put back what was there
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(logs, "plot_losses", lambda *arguments: None)  # slow


def run(command):
    """Run a command, in this process if it is one of the programs below; return its exit code."""
    words = shlex.split(command.removeprefix("python "))
    script = words[0]
    if script in ("train.py", "sample.py", "data.py"):
        return run_script(script, words[1:])
    if script == "doctor.py":
        return exit_code(lambda: doctor.main(words[1:]), script)
    return subprocess.run(["bash", "-c", command.replace("/tmp/", "")]).returncode


@pytest.mark.parametrize("device, group", [
    *(("cpu", group) for group in ("run", "options", "own models", "installing")),
    *(pytest.param("cuda", group, marks=pytest.mark.gpu) for group in GROUPS if group != "installing")])
def test_commands_run(device, group, tmp_path, monkeypatch):
    make_world(monkeypatch, tmp_path)
    for command, without_gpu, with_gpu in GROUPS[group]:
        added = without_gpu if device == "cpu" else with_gpu
        if added is not None:
            assert run(f"{command} {added}") == 0, command
            if device == "cuda":
                forget_models()


@pytest.mark.gpu
@pytest.mark.multigpu
def test_a_command_runs_on_two_gpus(tmp_path, monkeypatch):
    make_world(monkeypatch, tmp_path)
    assert run(f"{ON_TWO_GPUS} {SHORT}") == 0


@pytest.mark.parametrize("text", re.findall(r"```text\n(\$ .*?)```", TEXT, re.S))
def test_a_command_prints_what_the_page_shows(text, capsys):
    command, _, printed = text.removeprefix("$ ").partition("\n")
    assert run(command) == 2  # what a page shows is a mistake
    assert capsys.readouterr().err == printed


# ---------------------------------------------------------------- parsing

class Parsed(Exception):
    """Raised when a program has parsed its options."""


def stop_after(parse):
    def stop(*arguments, **options):
        parse(*arguments, **options)
        raise Parsed
    return stop


def parse_by_program(words, monkeypatch):
    """Start a program of the kit, and end it when it has parsed its options."""
    with monkeypatch.context() as patch:
        patch.setattr(tyro, "cli", stop_after(tyro.cli))
        patch.setattr(argparse.ArgumentParser, "parse_args", stop_after(argparse.ArgumentParser.parse_args))
        patch.setattr(sys, "argv", words)
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def program_of(command):
    """Return what torchrun or Python runs, and its arguments; [] for another command."""
    command = re.sub(r"^([A-Z_]+=\S+ )+", "", command)
    program, *words = shlex.split(command)
    if program == "torchrun":
        options = torch.distributed.run.get_args_parser().parse_args(words)
        return [options.training_script, *options.training_script_args]
    return words if program == "python" else []


NOT_RUN = [command for command, without_gpu, _ in RUN if without_gpu is None]
for commands in PARSED.values():
    NOT_RUN += commands


@pytest.mark.parametrize("command", NOT_RUN)
def test_a_command_is_parsed(command, monkeypatch):
    words = program_of(command)
    if words:
        parse_by_program(words, monkeypatch)
        if words[0] == "train.py":
            read_config(words[1:])
    elif "make " in command:
        environment = os.environ | {"MAKEFLAGS": "n"}  # only print
        subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=True)
    else:  # pip and pytest
        names = re.findall(r" (tests/\w+\.py|[\w-]+\.txt)", command)
        assert names and all((ROOT / name).exists() for name in names)


def test_make_train_refuses_to_sample_another_run():
    for arguments, code in (("--max-steps 50", 0), ("--out-dir other", 2), ("--out-dir=other", 2),
                            ("--max-steps 50 --preset gpt2-124m", 2), ("--config mine.yaml", 2)):
        command = ["make", "--dry-run", "--no-print-directory", "train", f"ARGS={arguments}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code, arguments
        if code:
            assert done.stdout == "", "nothing is installed before"
            assert done.stderr.count("\n") == 1 and f"python train.py {arguments}.  Stop." in done.stderr


USAGE = re.compile(r"^    ((?:[A-Z_]+=\S+ )*(?:python|torchrun) .*)", re.M)


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / "examples/minimal.py"],
                         ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_usage_in_a_docstring_is_parsed(path, monkeypatch):
    docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    for command in lines_of("\n".join(USAGE.findall(docstring))):
        words = program_of(re.sub(r" \||[][]", "", command))  # alternatives, and what may be left out
        if len(words) > 1:
            parse_by_program(words, monkeypatch)


OTHER_OPTIONS = {
    "help": "argparse's", "max-restarts": "torchrun's", "fp8-param": "gone", "offload-activations": "gone",
    "delay-wgrad-compute": "Megatron's", "transformer-impl": "Megatron's"}


def test_an_option_that_a_page_names_exists():
    """But those in older_guides.md, most of which are another program's."""
    text = "\n".join(text for name, text in TEXTS.items() if name != "older_guides.md")
    programs = "\n".join(path.read_text() for path in [*SCRIPTS, ROOT / "nanote/config.py"])
    names = set(re.findall(r"`--(?:no-)?([\w-]+)\b(?!-)", text))
    for name in sorted(names - OTHER_OPTIONS.keys()):
        assert re.search(rf'^    {name.replace("-", "_")}: |"--{name}"', programs, re.M), name


# ---------------------------------------------------------------- loops

# README's two run below, those of recipes.md in test_skipped_step.py, those of changing_the_model.md in
# test_large_models.py and test_own_model.py, that of fine_tuning.md in test_adapter_runs.py.
PYTHON = {"README.md": 2, "recipes.md": 2, "changing_the_model.md": 2, "fine_tuning.md": 1}


def test_each_python_block_of_a_page_has_a_test():
    counts = {name: text.count("```python") for name, text in TEXTS.items()}
    assert {name: count for name, count in counts.items() if count} == PYTHON


# ln 512 = 6.2, ln 50304 = 10.8: random tokens cannot be learned, so the loss may only not diverge
@pytest.mark.parametrize("loop, files, largest_loss", [
    (0, ["model_te_optimized.py", "nanote/graphs.py", "te_reference.py"], 6.5),
    pytest.param(1, ["model_te_fast.py", "nanote/graphs.py", "fast_kernels"], 11.3, marks=pytest.mark.gpu)])
def test_a_loop_runs_beside_the_files_that_are_copied(loop, files, largest_loss, tmp_path):
    for name in files:
        source, target = ROOT / name, tmp_path / Path(name).name
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    code = re.findall(r"```python\n(.*?)```", TEXTS["README.md"], re.S)[loop]
    if loop == 0 and not torch.cuda.is_available():
        code = code.replace("range(10)", "range(3)")  # BF16 on a CPU is slow
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and float(done.stdout.split()[-1]) < largest_loss, done.stderr


SETTINGS = re.findall(r"`((?:model|fast_kernels)\.[\w.]+ = [^`\n…]+)`", TEXT)


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_attribute_that_a_page_sets_exists(setting):
    pytest.importorskip("triton")
    import fast_kernels.fused
    from model_te_fast import FastConfig, FastGPT2Model
    model = FastGPT2Model(FastConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=32))
    names = {"model": model, "fast_kernels": fast_kernels, "te_recipe": te_recipe}
    name, _, value = setting.partition(" = ")
    eval(name, names)
    eval(value, names)
