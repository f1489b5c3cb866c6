"""Measure nanoGPT itself beside this kit, on a GPU.

    git clone https://github.com/karpathy/nanoGPT
    python bench/nanogpt.py nanoGPT --json results/nanogpt.json    # the folder of a checkout

Of the checkout, model.py alone is read. Its GPT is trained as its train.py does: float32 parameters under
BF16 autocast, torch.compile, TF32 allowed, the fused AdamW of `configure_optimizers`, gradients clipped at
1.0. It is built with bias=False, the default of that train.py, and with bias=True, as GPT-2 has it. This
kit's arms plain, bf16 and fp8 (benchmark_te.py --help) are timed in turns with it: `ratio_to_nanogpt` is the
median of nanoGPT's steps over the median of theirs.

`NanoGPT` is nanoGPT's model for train.py, as bench/paired.py trains it:

    NANOGPT=nanoGPT python train.py --preset gpt2-124m --model bench/nanogpt.py:NanoGPT --fp8-recipe none \
        --dtype float32 --compile
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import hashlib
import itertools
import os
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from torch.nn.parallel import DistributedDataParallel

from bench import measure, step
from bench.plain_gpt import PlainTraining
from bench.report import Rows
from nanote.command import parse, require_at_least, run_command
from nanote.models import pick_device
from nanote.own_model import import_path

SHAPES = ("124m-b32", "124m-b4", "350m-b16", "c4096")
ARMS = ("plain", "bf16", "fp8")
BLOCKS = {"bias=False": {"bias": False}, "bias=True": {"bias": True}}  # options of train.py


@dataclass
class Options:
    path: tyro.conf.Positional[Path]  # Folder of a nanoGPT checkout, which has model.py.
    shapes: tuple[Literal[SHAPES], ...] = SHAPES  # Shapes of benchmark_te.py.
    blocks: tuple[Literal[tuple(BLOCKS)], ...] = tuple(BLOCKS)  # With biases or without.
    steps: int = 60  # Steps to time, of each arm.
    json: Path | None = None  # Write the rows here; those of other shapes and blocks in the file stay.


class NanoGPTTraining(PlainTraining):
    """The training of nanoGPT's train.py."""

    def forward(self, input_ids, labels):
        float32 = next(self.model.parameters()).dtype == torch.float32
        with torch.autocast(self.device.type, torch.bfloat16, enabled=float32 and self.device.type == "cuda"):
            return self.net(input_ids, labels)[1]


def load(folder):
    """Return the module of a checkout's model.py. FileNotFoundError or ValueError if it is not nanoGPT's."""
    file = folder / "model.py"
    if not file.is_file():
        raise FileNotFoundError(f"{folder}: there is no model.py; name the folder of a nanoGPT checkout")
    module = import_path(file, "nanogpt_model")
    for name in ("GPT", "GPTConfig"):
        if not hasattr(module, name):
            raise ValueError(f"{file}: has no {name}; name the folder of a nanoGPT checkout")
    return module


def checksum(folder) -> str:
    return hashlib.sha256((folder / "model.py").read_bytes()).hexdigest()


@dataclass
class NanoGPTConfig:
    vocab_size: int = 50304
    n_positions: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # In linear layers and norms, as GPT-2 has it.

    def make(self, module):
        """Return the GPT of a module that `load` returned."""
        sizes = vars(self) | {"block_size": self.n_positions}
        del sizes["n_positions"]
        return module.GPT(module.GPTConfig(**sizes))


class NanoGPT(torch.nn.Module):
    """The GPT of the checkout in the folder that NANOGPT names, under BF16 autocast on a GPU."""

    def __init__(self, config: NanoGPTConfig):
        super().__init__()
        folder = os.environ.get("NANOGPT")
        if not folder:
            raise ValueError("NANOGPT is not set; name the folder of a nanoGPT checkout, which has model.py")
        self.config = config
        self.gpt = config.make(load(Path(folder)))

    def forward(self, input_ids, labels=None):
        if labels is not None:
            labels = labels.masked_fill(labels == -100, -1)  # what nanoGPT ignores
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=input_ids.is_cuda):
            logits, loss = self.gpt(input_ids, labels)
        return logits if labels is None else loss


NAMES = {  # parameter of the kit: of nanoGPT
    "wte.weight": "transformer.wte.weight",
    "wpe.weight": "transformer.wpe.weight",
    "lm_head.layer_norm_weight": "transformer.ln_f.weight",
    "lm_head.layer_norm_bias": "transformer.ln_f.bias",
}
NAMES_IN_BLOCK = {
    "attn.qkv.layer_norm_weight": "ln_1.weight",
    "attn.qkv.layer_norm_bias": "ln_1.bias",
    "attn.qkv.weight": "attn.c_attn.weight",
    "attn.qkv.bias": "attn.c_attn.bias",
    "attn.proj.weight": "attn.c_proj.weight",
    "attn.proj.bias": "attn.c_proj.bias",
    "mlp.layer_norm_weight": "ln_2.weight",
    "mlp.layer_norm_bias": "ln_2.bias",
    "mlp.fc1_weight": "mlp.c_fc.weight",
    "mlp.fc1_bias": "mlp.c_fc.bias",
    "mlp.fc2_weight": "mlp.c_proj.weight",
    "mlp.fc2_bias": "mlp.c_proj.bias",
}


def names_of_kit(n_layer: int) -> dict[str, str]:
    """Return {parameter of NanoGPT: parameter of the kit's GPT-2}. Both have the same shapes."""
    names = {f"gpt.{name}": kit for kit, name in NAMES.items()}
    for layer in range(n_layer):
        for kit, name in NAMES_IN_BLOCK.items():
            names[f"gpt.transformer.h.{layer}.{name}"] = f"blocks.{layer}.{kit}"
    return names


def make_nanogpt(module, config, device, ddp=False, dtype=torch.float32) -> NanoGPTTraining:
    """Make nanoGPT's training. config: train.py's options, whose optimizer settings are those of nanoGPT.

    ddp: train on all ranks, as nanoGPT's train.py does. dtype: of the weights.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(config.seed)
    sizes = {name: getattr(config, name) for name in ("vocab_size", "n_layer", "n_head", "n_embd", "bias")}
    model = NanoGPTConfig(**sizes, n_positions=config.seq_len).make(module).to(device, dtype)
    optimizer = model.configure_optimizers(config.weight_decay, config.lr, (0.9, 0.95), device.type)
    net = torch.compile(model)
    if ddp:
        net = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    return NanoGPTTraining(model, net, optimizer, config, device)


def measure_shape(module, config, timing):
    """Measure nanoGPT, then this kit's arms in turns with it. Yields the figures of each arm."""
    def make(config, device, batches):
        return make_nanogpt(module, config, device)

    torch._dynamo.reset()  # or torch.compile reaches its recompile limit
    figures, nanogpt = measure.attempt(measure.measure, "nanogpt", config, make, timing)
    yield figures
    if nanogpt is None:  # it does not fit into memory
        return
    for arm in ARMS:
        figures, _ = measure.attempt(measure.measure_arm, arm, config, timing, nanogpt)
        yield figures


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/nanogpt.py", __doc__)
    require_at_least(4, options, "steps")
    module = load(options.path)
    device = pick_device("auto")
    if device.type != "cuda":
        print("no GPU: tiny shapes, and the times mean nothing")
    rows = Rows(options.json, ("shape", "block", "arm"), "bench/nanogpt.py", argv)
    timing = measure.Timing(device, options.steps, phases=0, ratio="ratio_to_nanogpt")
    for shape, block in itertools.product(options.shapes, options.blocks):
        config = step.make_config(step.SHAPES[shape] | BLOCKS[block] | {"fp8_recipe": "none"}, device)
        for figures in measure_shape(module, config, timing):
            rows.add({"shape": shape, "block": block, "model_py_sha256": checksum(options.path)} | figures)


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/nanogpt.py"))
