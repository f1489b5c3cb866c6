"""How fast is a training loop of your own? Time loops of GPT-2 124M, 32 x 1,024 tokens, in turns.

    python bench/minimal.py --nanogpt nanoGPT --json results/minimal.json    # nanoGPT: a checkout
    python bench/minimal.py --nanogpt nanoGPT --busy --json results/minimal_busy.json

- readme         README's loop with the copied files: delayed scaling, float32 masters in FusedAdam
- fast           README's second loop: model_te_fast.py and FastAdam
- example        the step of examples/minimal.py: adds data, parameter groups, clipping and the schedule
- readme_eager, fast_eager, example_eager    the three without CUDA graphs, launched from Python
- nanogpt_bf16   nanoGPT's model.py with BF16 weights, torch.compile and its fused AdamW: the baseline
- nanogpt        nanoGPT as its train.py trains it: float32 weights under BF16 autocast, clipping

readme and example take the engine of model_te_optimized.py, which NANOTE_ENGINE chooses. --busy keeps all
other cores of the machine busy meanwhile.

Each step trains on a new batch of random tokens. The loops take turns, and a figure is the median of their
steps, with its 95 % interval; a speed over nanogpt_bf16 is the median ratio of steps of the same turns.
Without --nanogpt the last two are left out. Without a GPU there are no CUDA graphs, and only readme and
example run.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import gc
import os
import runpy
import statistics
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np
import torch

from bench import measure, nanogpt
from bench.report import Rows
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote.command import parse, require_at_least, run_command
from nanote.config import TrainConfig
from nanote.engine import ENGINE, te
from nanote.graphs import CudaGraph
from nanote.models import pick_device

VOCAB_SIZE = 50304
LR = 1e-4
WARMUP = 5 if torch.cuda.is_available() else 1  # first scales, compilation, capture


@dataclass
class Options:
    layers: int = 12
    width: int = 768
    batch: int = 32  # Sequences per step.
    seq_len: int = 1024  # Tokens per sequence.
    steps: int = 40  # Steps to time, of each loop.
    nanogpt: Path | None = None  # Folder of a nanoGPT checkout, which has model.py.
    busy: bool = False  # Keep all other cores of the machine busy while the loops are timed.
    json: Path | None = None  # Write the rows here.

    def sizes(self) -> dict:
        return dict(n_layer=self.layers, n_head=self.width // 64, n_embd=self.width, vocab_size=VOCAB_SIZE)


def random_tokens(options, device):
    return torch.randint(VOCAB_SIZE, (options.batch, options.seq_len + 1), device=device)


def readme_loop(options, device):
    """Return the function that trains a step in README's loop, as a CudaGraph, and one that returns its
    arguments."""
    config = OptimizedConfig(**options.sizes(), n_positions=options.seq_len, use_fp8=True, attention="auto")
    model = OptimizedGPT2Model(config).to(device, torch.bfloat16)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=LR, master_weights=True, capturable=True)

    def train(tokens):
        loss = model(tokens[:, :-1], labels=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return CudaGraph(train), lambda: [random_tokens(options, device)]


def fast_loop(options, device):
    """Return what `readme_loop` returns, for README's second loop."""
    from fast_kernels.adam import FastAdam  # these need Triton
    from model_te_fast import FastConfig, FastGPT2Model
    config = FastConfig(**options.sizes(), n_positions=options.seq_len, use_fp8=True)
    model = FastGPT2Model(config).to(device, torch.bfloat16)
    optimizer = FastAdam(model.parameters(), lr=LR)

    def train(tokens):
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return CudaGraph(train), lambda: [random_tokens(options, device)]


def example_loop(options, device):
    """Return what `readme_loop` returns, for examples/minimal.py.

    Run with --steps 0, the script builds everything and trains nothing; runpy returns its globals.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokens.bin")
        np.random.default_rng(0).integers(0, VOCAB_SIZE, 2**20, dtype=np.uint16).tofile(file)
        arguments = [file, "--layers", options.layers, "--width", options.width, "--batch", options.batch,
                     "--length", options.seq_len, "--steps", 0, "--lr", LR, "--out", f"{folder}/model.pt"]
        with mock.patch.object(sys, "argv", ["minimal.py", *map(str, arguments)]):
            script = runpy.run_path(str(ROOT / "examples/minimal.py"))

    def set_rate_and_get_batch():
        for group in script["optimizer"].param_groups:
            group["lr"].fill_(script["learning_rate"](1))
        return script["get_batch"](script["train_tokens"])

    return script["train"], set_rate_and_get_batch


def nanogpt_loop(options, device, dtype):
    """Return a function that trains one step of nanoGPT, with weights in `dtype`."""
    config = TrainConfig(**options.sizes(), seq_len=options.seq_len, lr=LR)
    train_step = nanogpt.make_nanogpt(nanogpt.load(options.nanogpt), config, device, dtype=dtype)

    def step():
        tokens = random_tokens(options, device)
        return train_step([(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())], LR)[0]

    return step


LOOPS = {"readme": readme_loop, "example": example_loop, "fast": fast_loop}


def make_loops(options, device, in_graphs: bool) -> dict:
    """Return {name: function that trains a step and returns its loss} of this kit's loops."""
    loops = {}
    for name, make in LOOPS.items():
        if name == "fast" and device.type != "cuda":
            continue
        train, make_arguments = make(options, device)
        if in_graphs:
            loops[name] = partial(run_step, train, make_arguments)
        else:
            loops[f"{name}_eager"] = partial(run_step, train.function, make_arguments)
    return loops


def run_step(train, make_arguments):
    return train(*make_arguments())


@contextmanager
def busy_cores(count: int):
    """Run `count` processes that compute until the context, or this process, ends."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}:\n    pass"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def loss_of(output) -> float:
    """Return the loss of a step. examples/minimal.py returns (loss, norm)."""
    return output.flatten()[0].item()


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/minimal.py", __doc__)
    require_at_least(1, options, "layers", "width", "batch", "seq_len", "steps")
    if options.nanogpt:
        nanogpt.load(options.nanogpt)  # before anything is made
    device = pick_device("auto")
    rows = Rows(options.json, ["loop"], "bench/minimal.py", argv)
    torch.manual_seed(0)
    peers = {}
    if options.nanogpt:
        peers["nanogpt_bf16"] = nanogpt_loop(options, device, torch.bfloat16)
        peers["nanogpt"] = nanogpt_loop(options, device, torch.float32)
    # without a GPU a CudaGraph calls its function, so that the loops without graphs would be the same
    with_and_without_graphs = (True, False) if device.type == "cuda" else (True,)
    # one after the other: with their graphs all of them would not fit into 80 GB
    for in_graphs in with_and_without_graphs:
        own_loops = make_loops(options, device, in_graphs)
        times = time_loops(peers | own_loops, options, device)
        for name in own_loops | peers if in_graphs else own_loops:
            rows.add(row_of(name, times, options))
        del own_loops
        gc.collect()  # models and graphs refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()


def time_loops(loops, options, device) -> dict:
    """Return {name: ms of its steps}, in turns. ValueError if the losses differ after the same steps."""
    for _ in range(WARMUP):
        losses = {name: loss_of(step()) for name, step in loops.items()}
    if max(losses.values()) - min(losses.values()) > 0.3:
        raise ValueError(f"the loops do not train alike, so nothing is timed: losses {losses}")
    with busy_cores(busy_count(options)):
        return measure.in_turns(loops, options.steps, device)


def busy_count(options) -> int:
    return os.cpu_count() - 1 if options.busy else 0


def row_of(name, times, options) -> dict:
    """Return the row of a loop. times: {loop: ms of its steps}."""
    ms = statistics.median(times[name])
    row = {"loop": name, "engine": engine_of(name), "busy_cores": busy_count(options),
           "ms": ms, "ms_interval": measure.interval_of_median(times[name]),
           "tokens_per_s": options.batch * options.seq_len / ms * 1e3, "batch": options.batch,
           "seq_len": options.seq_len, "layers": options.layers, "width": options.width}
    if options.nanogpt:
        baseline = times["nanogpt_bf16"]
        ratios = [baseline_ms / loop_ms for baseline_ms, loop_ms in zip(baseline, times[name])]
        row["ratio_to_nanogpt_bf16"] = statistics.median(ratios)
        row["ratio_to_nanogpt_bf16_interval"] = measure.interval_of_median(ratios)
        row["model_py_sha256"] = nanogpt.checksum(options.nanogpt)
    return row


def engine_of(name) -> str | None:
    if name.startswith("nanogpt"):
        return None
    return "fast" if name.startswith("fast") else ENGINE


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/minimal.py"))
