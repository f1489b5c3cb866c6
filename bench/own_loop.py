"""How fast is a training loop of your own? README's loops at GPT-2 124M, beside each other.

    python bench/own_loop.py --json results/own_loop.json

- modules      Transformer Engine's modules with float32 weights and FusedAdam, launched from Python
- accelerate   the same loop after model.to(torch.bfloat16) and accelerate(model); FusedAdam keeps float32
  masters
- train_step   make_train_step: the kernels, clipping and AdamW as CUDA graphs, which is train.py's step

Each step trains on a new batch of random tokens. The loops take turns, and a figure is the median of their
steps.
"""
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report, timing
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model, te
from nanote import cli
from nanote.train_step import make_train_step

try:
    from fast_kernels import accelerate
except ImportError:
    accelerate = None


@dataclass
class Options:
    layers: int = 12
    width: int = 768
    batch: int = 32  # Sequences per step.
    seq_len: int = 1024  # Tokens per sequence.
    steps: int = 20  # Steps to time, of each loop.
    json: Path | None = None  # Write the rows here.


def loop_by_hand(options, device, *, fast):
    """Return a function that trains one step as README's first loop does."""
    model = make_model(options, device)
    if fast:
        model.to(torch.bfloat16)
        accelerate(model)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-4, master_weights=fast)

    def step():
        tokens = random_tokens(options, device)
        loss = model(tokens[:, :-1], labels=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def loop_with_train_step(options, device):
    """Return a function that trains one step as README's loop with make_train_step does."""
    model = make_model(options, device).to(torch.bfloat16)
    tokens = random_tokens(options, device)
    train_step = make_train_step(model, (tokens[:, :-1], tokens[:, 1:]))

    def step():
        tokens = random_tokens(options, device)
        return train_step([(tokens[:, :-1], tokens[:, 1:])], lr=1e-4)[0]

    return step


def make_model(options, device):
    torch.manual_seed(0)
    config = OptimizedConfig(n_layer=options.layers, n_embd=options.width, n_head=options.width // 64,
                             n_positions=options.seq_len, vocab_size=50304, use_fp8=True)
    return OptimizedGPT2Model(config).to(device)


def random_tokens(options, device):
    return torch.randint(50304, (options.batch, options.seq_len + 1), device=device)


def main(argv=None):
    options = cli.parse(Options, argv, prog="own_loop.py", description=__doc__)
    report.check_folder(options.json)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = report.Rows(options.json, ["loop"], "bench/own_loop.py", argv)
    loops = {"modules": loop_by_hand(options, device, fast=False)}
    if accelerate is not None:
        loops["accelerate"] = loop_by_hand(options, device, fast=True)
    loops["train_step"] = loop_with_train_step(options, device)
    losses, spans = {}, {name: [] for name in loops}
    for _ in range(5):  # first scales, autotuning, capture
        losses = {name: step().item() for name, step in loops.items()}
    if max(losses.values()) - min(losses.values()) > 0.2:
        raise ValueError(f"the loops do not train alike, so nothing is timed: losses {losses}")
    for _ in range(max(1, options.steps // 5)):
        for name, step in loops.items():
            spans[name] += timing.timed([step] * 5, device)[1:]  # the first follows another loop's
    for name, times in spans.items():
        ms = statistics.median(times)
        tokens_per_s = options.batch * options.seq_len / ms * 1e3
        rows.add({"loop": name, "ms": ms, "tokens_per_s": tokens_per_s, "batch": options.batch,
                  "seq_len": options.seq_len, "layers": options.layers, "width": options.width})
        print(f"{name:12} {ms:8.2f} ms {tokens_per_s:12,.0f} tokens/s")


if __name__ == "__main__":
    sys.exit(cli.run(main, "own_loop.py"))
