"""Shared by the trainer's tests: a small corpus, options of a short run, and ways to run commands."""
import contextlib
import copy
import functools
import hashlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import re
import resource
import socket
import subprocess
import sys
import tempfile
import traceback
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.optim.swa_utils import AveragedModel

import train
from nanote import parallel, recipes
from nanote.command import run_command
from nanote.ddp import make_gradients
from nanote.graphs import CudaGraph
from nanote.logs import read_metrics
from nanote.tokens import write_tokens

ROOT = Path(train.__file__).parent
# {model_te_<name>.py: its model and its config}
CLASSES = {"fast": ("FastGPT2Model", "FastConfig"), "optimized": ("OptimizedGPT2Model", "OptimizedConfig")}
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.S)  # of a page
VARYING_FIELDS = ("tokens_per_s", "mfu", "peak_gib", "seconds")  # of metrics.jsonl, in equal runs
# 24 steps of 2 micro-batches of 4 x 64 tokens; with dropout, so that the random state matters
OPTIONS = (
    "--n-layer 2 --n-head 2 --n-embd 64 --dropout 0.1 --seq-len 64 --micro-batch-size 4 --grad-accum 2 "
    "--max-steps 24 --warmup-steps 4 --fp8-amax-history-len 8 --log-interval 1 "
    "--eval-interval 8 --eval-tokens 512 --checkpoint-interval 12 --device cpu")
MODERN = dict(use_rmsnorm=True, use_rotary=True, use_qk_norm=True, activation="swiglu", bias=False)


def python_block(page: str, word: str) -> str:
    """Return the Python block of a page of the guide that has a word in it."""
    [block] = [block for block in PYTHON_BLOCK.findall((ROOT / "guide" / page).read_text()) if word in block]
    return block


def model_file(name: str, engine: str):
    """Return a model file of the kit as a new module that uses this engine. A variant of model_te_optimized
    imports one that uses this engine, too."""
    base = "model_te_optimized"
    spec = importlib.util.spec_from_file_location(f"{name}_on_{engine}", ROOT / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    before = sys.modules.pop(base, None)
    try:
        if name not in (base, "model_te_fast"):
            sys.modules[base] = model_file(base, engine)
        with unittest.mock.patch.dict(os.environ, NANOTE_ENGINE=engine):
            spec.loader.exec_module(module)
    finally:
        sys.modules.pop(base, None)
        if before is not None:
            sys.modules[base] = before
    return module


def by_state_dict_functions(model, other, **options):
    options = StateDictOptions(**options)
    set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
    return other


def by_distributed_checkpoint(model, other):
    with tempfile.TemporaryDirectory() as folder:
        distributed_checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
        state = get_model_state_dict(other)  # the tensors that are read
        distributed_checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    return other


def by_saving_the_model(model, other):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def by_average(model, other):
    average = AveragedModel(other)
    average.load_state_dict(AveragedModel(model).state_dict())
    return average.module


def by_assignment(model, other):
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return other


# PyTorch's ways to give a model the state of another: functions of both, which return one that has it
RESTORE = {
    "copy": lambda model, other: copy.deepcopy(model),
    "pickle": lambda model, other: pickle.loads(pickle.dumps(model)),
    "torch.save": by_saving_the_model,
    "assign": by_assignment,
    "AveragedModel": by_average,
    "get_model_state_dict": by_state_dict_functions,
    "full": functools.partial(by_state_dict_functions, full_state_dict=True),
    "on the CPU": functools.partial(by_state_dict_functions, full_state_dict=True, cpu_offload=True),
    "distributed checkpoint": by_distributed_checkpoint,
}


@torch.no_grad()
def randomize(model):
    """Give a model random weights, norms and biases too, so that a forgotten one shows; return it."""
    for p in model.parameters():
        p.normal_(0.0, 0.2) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))
    return model


def write_edit(folder: Path, kind: str, edit: str) -> Path:
    """Write a copy of model_te_<kind>.py with an edit of examples/edits as my_model.py; return its path."""
    path = folder / "my_model.py"
    path.write_text((ROOT / f"model_te_{kind}.py").read_text())
    diff = ROOT / "examples" / "edits" / kind / f"{edit}.diff"
    subprocess.run(["git", "apply", str(diff)], cwd=folder, check=True)
    return path


def make_batch(seed=0):
    """Return random tokens and labels of a model of test_frozen.py or test_lora.py, (1, 16) each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (1, 17), generator=generator).to(device)  # each takes time in the interpreter
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train_model(model, way="from Python", keeps_fp8_weights=True):
    """Train in steps of two micro-batches as train.py does; return losses and gradients. way: how the passes
    are launched. keeps_fp8_weights: quantize weights in the first micro-batch of a step only."""
    gradients = make_gradients(model, grad_accum=2)
    parameters = parallel.local_parameters(model)
    trained = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, foreach=False)  # which takes float32 gradients of BF16
    net = torch.compile(model, backend="aot_eager") if way == "compiled" else model

    def forward_backward(batch, *, is_first_microbatch, is_last_microbatch):
        options = {"is_first_microbatch": is_first_microbatch} if keeps_fp8_weights else {}
        with gradients.accumulate(is_first_microbatch, is_last_microbatch):
            loss = net(*batch, **options)
            loss.backward()
        return loss.detach()

    if way == "in graphs":
        forward_backward = CudaGraph(forward_backward, keep=lambda: recipes.engine_tensors(model))
    results = []
    for step in range(4 if way == "in graphs" else 2):  # the third call is captured
        for number in range(2):
            batch = make_batch(2 * step + number + 100 * parallel.rank())
            is_first = number == 0
            results.append(
                forward_backward(batch, is_first_microbatch=is_first, is_last_microbatch=not is_first))
        gradients.set_grad()
        results += [p.grad.clone() for p in parameters if p.grad is not None]
        optimizer.step()
    return results


def make_tokens(folder) -> str:
    """Write byte-level token files of about 40,000 tokens; return their folder."""
    documents = [
        "".join(f"line {i * j % 97} of document {i}: {'abc' * (j % 5)}\n" for j in range(20 + i))
        for i in range(40)]
    write_tokens(iter(documents), folder, val_fraction=0.2)
    return str(folder)


def run_train(arguments: str, tokens: str | None = None) -> int:
    """Run train.py in this process; return its exit code."""
    argv = [*arguments.split(), *(["--data", tokens] if tokens else [])]
    return exit_code(lambda: train.run(argv), "train.py")


def run_script(script: str, argv: list[str]) -> int:
    """Run data.py, train.py or sample.py in this process; return its exit code."""
    import data
    import sample

    main = {"data.py": data.main, "train.py": train.run, "sample.py": sample.main}[script]
    return exit_code(lambda: main(argv), script)


def exit_code(main, script: str) -> int:
    try:
        return run_command(main, script)
    except SystemExit as stop:  # tyro's, after a mistake that it found
        return stop.code


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def start_ranks(command, count=2, **environment) -> list[subprocess.Popen]:
    """Start the processes of a run, as torchrun does."""
    ranks, port = range(count), free_port()
    return [subprocess.Popen(command, env=os.environ | rank_environment(rank, count, port) | environment,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in ranks]


def run_ranks(program: str, argv: list[str], count=2, **environment) -> list[str]:
    """Run a program on several ranks; return what each has printed."""
    if torch.cuda.is_available():  # a fork cannot use it
        return finish(start_ranks([sys.executable, "-c", program, *argv], count, **environment))

    def run():
        sys.argv = ["-c", *argv]
        exec(program, {"__name__": "__main__"})
    return fork_ranks(run, count, **environment)


def fork_ranks(function, count=2, **environment) -> list[str]:
    """Call a function on several ranks, forks of this process, which have imported everything; return what
    each has printed."""
    def run(rank, log):
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # lines, as _exit drops a rest
        os.environ.update(rank_environment(rank, count, port) | environment)
        torch.set_num_threads(1)  # a fork has no threads of OpenMP
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    context, port, logs = multiprocessing.get_context("fork"), free_port(), []
    processes = []
    for rank in range(count):
        logs.append(tempfile.TemporaryFile("w+"))
        processes.append(context.Process(target=run, args=(rank, logs[rank])))
        processes[rank].start()
    for process in processes:
        process.join(300)
    outputs = [log.seek(0) or log.read() for log in logs]
    assert [process.exitcode for process in processes] == [0] * count, "\n".join(outputs)
    return outputs


# A program that makes runs {name: options} one after the other, since a process takes longer to start than to
# train. "A-to-B" is resumed in a copy of run A without its last checkpoint, which is named, too.
RUN_ALL = """
import json, shutil, sys
sys.path.insert(0, sys.argv[1])
import train
from bench.step import forget_models
from nanote import parallel

ranks = parallel.start()
for name, options in json.loads(sys.argv[2]).items():
    source, _, goal = name.partition("-to-")
    if goal:
        parallel.on_rank0(lambda: shutil.copytree(source, name, ignore=shutil.ignore_patterns(sys.argv[3])))
    if ranks.rank == 0:
        print(f"\\n=== {name} ===", flush=True)
    forget_models()
    assert train.run([*options.split(), "--out-dir", name]) == 0, name
"""


def finish(processes) -> list[str]:
    """Wait for the processes of a run; return what each has printed."""
    # all at once: a rank whose pipe is full stops, and the others wait for it in a collective
    with ThreadPoolExecutor(len(processes)) as pool:
        outputs = list(pool.map(lambda process: process.communicate(timeout=300)[0], processes))
    assert not any(process.returncode for process in processes), outputs
    return outputs


def metrics(run) -> list[dict]:
    """Return metrics.jsonl without the fields that differ between equal runs."""
    return [{k: v for k, v in record.items() if k not in VARYING_FIELDS}
            for record in read_metrics(Path(run, "metrics.jsonl"))]


def losses(run, key="loss") -> list[float]:
    return [record[key] for record in metrics(run) if key in record]


def tree(folder=".") -> dict:
    """Return all files with their modification times, and all folders."""
    return {str(path): path.is_file() and path.stat().st_mtime_ns for path in Path(folder).rglob("*")
            if path.name != ".lock"}


def sign(folder) -> None:
    """Write SHA256SUMS of a checkpoint anew, as one who forges it would."""
    paths = [path for path in sorted(Path(folder).iterdir()) if path.name != "SHA256SUMS"]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
    Path(folder, "SHA256SUMS").write_text("".join(lines))


@contextlib.contextmanager
def largest_file(size: int):
    """Let writes beyond `size` bytes of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
