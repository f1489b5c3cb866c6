"""A whole training script for FP8: one model file, graphs.py, PyTorch and NumPy, nothing else.

    python examples/minimal.py data/stdlib/train.bin                  # a token file (uint16)
    python examples/minimal.py book.txt --recipe current --compile    # a text file: its bytes are the tokens
    python examples/minimal.py book.txt --layers 4 --width 128 --batch 8 --length 128    # a size for a CPU

To start a project of your own, copy this file, model_te_optimized.py and nanote/graphs.py into a folder, and
te_reference.py for machines without a GPU. Weights are BF16 on a GPU; the optimizer keeps float32 masters.

On a GPU a training step is a CUDA graph, so that Python does not launch each kernel. The Python code of
`train` runs in the first three steps only: what changes later has to be a tensor, as the learning rate is.
"""
import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # where the model file is; not needed in a copy
try:
    from graphs import CudaGraph
except ImportError:  # not copied: this is the repository
    from nanote.graphs import CudaGraph
from model_te_optimized import (
    DelayedScaling,
    Format,
    OptimizedConfig,
    OptimizedGPT2Model,
    te,
    te_recipe,
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", help="token file (.bin, uint16) or text file")
parser.add_argument("--recipe", choices=["delayed", "current", "block", "none"], default="delayed")
parser.add_argument("--format", choices=["HYBRID", "E4M3"], default="HYBRID", help="HYBRID: E5M2 gradients")
parser.add_argument("--margin", type=int, default=0, help="delayed: divide scales by 2^margin")
parser.add_argument("--history", type=int, default=1024, help="delayed: length of the amax history")
parser.add_argument("--algorithm", choices=["max", "most_recent"], default="max",
                    help="delayed: which amax of the history sets the scale")
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--batch", type=int, default=32, help="sequences a step")
parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--lr", type=float, default=6e-4)
parser.add_argument("--compile", action="store_true", help="TE: with --recipe current or none")
parser.add_argument("--out", default="minimal.pt", help="checkpoint, written at the end")
options = parser.parse_args()

# ---------------------------------------------------------------- data

if options.data.endswith(".bin"):
    dtype = "uint16"  # nanoGPT's
    meta = Path(options.data).with_name("meta.json")  # written by data.py
    if meta.exists():
        dtype = json.loads(meta.read_text())["dtype"]
    tokens = np.memmap(options.data, dtype=dtype, mode="r")
else:
    tokens = np.frombuffer(Path(options.data).read_bytes(), dtype=np.uint8)
split = len(tokens) * 9 // 10
train_tokens = tokens[:split]
validation_tokens = tokens[split:]
if len(validation_tokens) <= options.length:
    parser.exit(2, f"minimal.py: {options.data}: {len(tokens):,} tokens, but --length {options.length} needs "
                f"{10 * options.length + 1:,}, a tenth of them for validation; take a longer text or a "
                "smaller --length\n")
device = "cuda" if torch.cuda.is_available() else "cpu"
random = np.random.default_rng(1337)


def get_batch(part):
    """Return (input_ids, labels), int64 (batch, length), from random places of a part of the tokens."""
    starts = random.integers(0, len(part) - options.length, options.batch)
    places = starts[:, None] + np.arange(options.length + 1)  # (batch, length + 1)
    windows = torch.from_numpy(part[places].astype(np.int64))
    if device == "cuda":  # the copy does not wait for the GPU
        windows = windows.pin_memory().to(device, non_blocking=True)
    input_ids = windows[:, :-1]
    labels = windows[:, 1:]
    return input_ids.contiguous(), labels.contiguous()


# ---------------------------------------------------------------- model, recipe, optimizer

torch.manual_seed(1337)
config = OptimizedConfig(
    vocab_size=256 if tokens.dtype == np.uint8 else 50304,
    n_positions=options.length,
    n_layer=options.layers,
    n_head=max(1, options.width // 64),
    n_embd=options.width,
    attention="auto",  # the fastest one installed
    use_fp8=options.recipe != "none")
dtype = torch.bfloat16 if device == "cuda" else torch.float32
model = OptimizedGPT2Model(config).to(device, dtype)

# To switch, assign another recipe
if options.recipe == "delayed":
    model.fp8_recipe = DelayedScaling(
        margin=options.margin,
        fp8_format=Format[options.format],
        amax_history_len=options.history,
        amax_compute_algo=options.algorithm)
elif options.recipe == "current":
    model.fp8_recipe = te_recipe.Float8CurrentScaling(fp8_format=Format[options.format])
elif options.recipe == "block":
    model.fp8_recipe = te_recipe.Float8BlockScaling()  # E4M3

matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and norms: no weight decay
optimizer = te.optimizers.FusedAdam(
    [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
    lr=options.lr, betas=(0.9, 0.95),
    master_weights=dtype == torch.bfloat16,  # float32 copies that the optimizer updates
    capturable=True)  # learning rate and step count are tensors, which a CUDA graph reads
net = torch.compile(model) if options.compile else model


# ---------------------------------------------------------------- training

def learning_rate(step):
    """Return the rate of a step: linear warm-up over a tenth of the steps, then cosine to a tenth of the
    peak."""
    warmup = max(1, options.steps // 10)
    if step < warmup:
        return options.lr * (step / warmup)
    progress = (step - warmup) / max(1, options.steps - warmup)  # from 0 to 1
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    return options.lr * (0.1 + 0.9 * cosine)


def train(input_ids, labels):
    """Train one step. Return the loss and the gradient norm before clipping, (2,) float32."""
    loss = net(input_ids, labels)  # the model enters te.autocast
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack((loss.detach(), norm.float()))


if not options.compile:  # torch.compile may compile again in a later step, which a capture does not allow
    train = CudaGraph(train)  # without a GPU it calls train


@torch.no_grad()
def validation_loss(batches=8):
    model.eval()
    losses = []
    for _ in range(batches):
        input_ids, labels = get_batch(validation_tokens)
        losses.append(model(input_ids, labels).item())
    model.train()
    return sum(losses) / batches


parameters = sum(p.numel() for p in model.parameters())
print(f"{device}: {parameters:,} parameters, {options.batch * options.length:,} tokens a step", flush=True)
started = time.perf_counter()
for step in range(1, options.steps + 1):
    for group in optimizer.param_groups:
        group["lr"].fill_(learning_rate(step))
    loss_and_norm = train(*get_batch(train_tokens))
    is_last = step == options.steps
    if step == 1 or step % 10 == 0 or is_last:
        loss, norm = loss_and_norm.tolist()  # waits for the GPU
        seconds = time.perf_counter() - started
        speed = step * options.batch * options.length / seconds
        print(f"step {step}  loss {loss:.4f}  norm {norm:.3f}  {speed:,.0f} tokens/s", flush=True)
    if step % 100 == 0 or is_last:
        paused = time.perf_counter()
        print(f"step {step}  validation loss {validation_loss():.4f}", flush=True)
        started += time.perf_counter() - paused  # tokens/s are those of training

# Plain tensors, the FP8 scales included. To read them:
#     state = torch.load("minimal.pt", weights_only=True)
#     model = OptimizedGPT2Model(OptimizedConfig(**state["config"]))
#     model.load_state_dict(state["model"])
torch.save({"model": model.state_dict(), "config": vars(config)}, options.out)
