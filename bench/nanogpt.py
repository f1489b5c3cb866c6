"""Measure nanoGPT itself beside this kit, on a GPU.

    git clone https://github.com/karpathy/nanoGPT
    python bench/nanogpt.py nanoGPT    # a checkout; writes results/nanogpt.json

Of the checkout, model.py alone is read. Its GPT is trained as its train.py does: float32 parameters under
BF16 autocast, torch.compile, TF32 allowed, the fused AdamW of `configure_optimizers`, gradients clipped at
1.0. It is built with bias=False, the default of that train.py, and with bias=True, as GPT-2 has it. This
kit's arms plain, bf16 and fp8 (benchmark_te.py --help) are timed in turns with it: `ratio_to_nanogpt` is the
median of nanoGPT's steps over the median of theirs.

`NanoGPT` is nanoGPT's model for train.py, as bench/convergence.py trains it:

    NANOGPT=nanoGPT python train.py --preset gpt2-124m --model bench/nanogpt.py:NanoGPT --fp8-recipe none \
        --dtype float32 --compile
"""

import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import measure
from bench.plain_gpt import PlainStep
from bench.report import Rows
from bench.step import SHAPES as STEP_SHAPES
from bench.step import free, make_batches, make_config
from nanote.config import parse, run_command
from nanote.models import pick_device

SHAPES = ("124m-b32", "124m-b4", "350m-b16", "c4096")
ARMS = ("plain", "bf16", "fp8")
BLOCKS = {"bias=False": False, "bias=True": True}


@dataclass
class Options:
    path: tyro.conf.Positional[Path]
    """Folder of a nanoGPT checkout, which has model.py."""
    shapes: tuple[str, ...] = SHAPES
    """Shapes of benchmark_te.py; one that does not fit into memory is a row with an error."""
    steps: int = 60  # Steps to time, of each arm.
    json: Path | None = None
    """Write the rows here; those of other shapes in the file stay. Default on a GPU: results/nanogpt.json."""


class NanoGPTStep(PlainStep):
    """A step of nanoGPT's train.py."""

    def forward(self, input_ids, labels):
        float32 = next(self.model.parameters()).dtype == torch.float32
        with torch.autocast(self.device.type, torch.bfloat16, enabled=float32 and self.device.type == "cuda"):
            return self.net(input_ids, labels)[1]


def load(folder):
    """Return the module of a checkout's model.py. FileNotFoundError or ValueError if it is not nanoGPT's."""
    file = folder / "model.py"
    if not file.is_file():
        raise FileNotFoundError(f"{folder}: there is no model.py; name the folder of a nanoGPT checkout")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("GPT", "GPTConfig"):
        if not hasattr(module, name):
            raise ValueError(f"{file}: has no {name}; name the folder of a nanoGPT checkout")
    return module


def checksum(folder) -> str:
    return hashlib.sha256((folder / "model.py").read_bytes()).hexdigest()


def allow_tf32() -> None:
    """Set what nanoGPT's train.py sets."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def make_gpt(module, config, block_size: int, dropout: float):
    """Return nanoGPT's model. `config` has the other sizes, and bias."""
    return module.GPT(module.GPTConfig(
        block_size=block_size, vocab_size=config.vocab_size, n_layer=config.n_layer, n_head=config.n_head,
        n_embd=config.n_embd, dropout=dropout, bias=config.bias))


@dataclass
class NanoGPTConfig:
    vocab_size: int = 50304
    n_positions: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # In linear layers and norms, as GPT-2 has it.


class NanoGPT(torch.nn.Module):
    """The GPT of the checkout in the folder that NANOGPT names, under BF16 autocast on a GPU."""

    def __init__(self, config: NanoGPTConfig):
        super().__init__()
        folder = os.environ.get("NANOGPT")
        if not folder:
            raise ValueError("NANOGPT is not set; name the folder of a nanoGPT checkout, which has model.py")
        self.config = config
        self.gpt = make_gpt(load(Path(folder)), config, config.n_positions, config.dropout)

    def forward(self, input_ids, labels=None):
        if labels is not None:
            labels = labels.masked_fill(labels == -100, -1)  # what nanoGPT ignores
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=input_ids.is_cuda):
            logits, loss = self.gpt(input_ids, labels)
        return logits if labels is None else loss


def make_nanogpt(module, config, device, ddp=False, dtype=torch.float32) -> NanoGPTStep:
    """Make nanoGPT's step. config: train.py's options, whose optimizer settings are those of nanoGPT.

    ddp: train on all ranks, as nanoGPT's train.py does. dtype: of the weights.
    """
    torch.manual_seed(config.seed)
    model = make_gpt(module, config, config.seq_len, dropout=0.0).to(device, dtype)
    optimizer = model.configure_optimizers(config.weight_decay, config.lr, (0.9, 0.95), device.type)
    net = torch.compile(model)
    if ddp:
        net = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    return NanoGPTStep(model, net, optimizer, config, device)


def measure_nanogpt(module, config, device, steps):
    """Check and time nanoGPT alone -> (the figures of its row, its step)."""
    free()
    batches, step = make_batches(config, device), make_nanogpt(module, config, device)
    loss = step(batches, 0.0)[0].item()
    measure.check_loss(loss, config)
    figures = measure.time_step("nanogpt", step, batches, device, steps)
    return figures | {"ratio_to_plain": 1.0, "loss": loss}, step


def measure_shape(module, shape, block, steps, device, add):
    """Measure nanoGPT at a shape, then this kit's arms in turns with it. `add` takes each arm's figures."""
    torch._dynamo.reset()  # or torch.compile reaches its recompile limit
    config = make_config(STEP_SHAPES[shape] | {"bias": BLOCKS[block]}, device)
    try:
        figures, nanogpt = measure_nanogpt(module, config, device, steps)
    except torch.OutOfMemoryError as error:
        return add({"arm": "nanogpt", "error": measure.error_text(error)})
    add(figures)
    for arm in ARMS:
        add(measure.attempt(arm, config, device, steps, nanogpt, phases=0)[0])


def print_row(row):
    line = f"{row['shape']} {row['block']:10} {row['arm']:8}"
    if "error" in row:
        return print(f"{line} {row['error']}", flush=True)
    print(f"{line} {row['ms']:8.2f} ms  {row['tokens_per_s']:>9,.0f} tokens/s  "
          f"{row['ratio_to_nanogpt']:.3f} x nanoGPT", flush=True)


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/nanogpt.py", __doc__)
    for shape in set(options.shapes) - set(SHAPES):
        raise ValueError(f"--shapes {shape!r}: unknown; use {', '.join(SHAPES)}")
    module, device = load(options.path), pick_device("auto")
    source, path = checksum(options.path), options.json
    if device.type == "cuda":
        allow_tf32()
        path = path or ROOT / "results/nanogpt.json"
    else:
        print("no GPU: tiny shapes, and the times mean nothing")
    rows = Rows(path, ("shape", "block", "arm"), "bench/nanogpt.py", argv)
    for shape in options.shapes:
        for block in BLOCKS:
            def add(figures, shape=shape, block=block):
                row = {"shape": shape, "block": block, "model_py_sha256": source} | figures
                row["ratio_to_nanogpt"] = row.pop("ratio_to_plain", None)
                print_row(row)
                rows.add(row)

            measure_shape(module, shape, block, options.steps, device, add)


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/nanogpt.py"))
