"""Measure the optimizer step alone: PyTorch's and Transformer Engine's fused Adam, and fast_kernels/adam.py.

    python bench/optimizer.py [--json FILE]

A row has milliseconds (median of 20 steps over the tensors of a model, replayed as a CUDA graph where the
optimizer allows it) and the memory bandwidth that follows from the bytes that the step must move. The same
for the gradient norm that clipping needs, PyTorch's and fast_kernels/adam.py's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.report import check_folder, markdown, write_report
from nanote import cli, fp8, models
from nanote.profiling import timed

SIZES = {
    "GPT-2 124M": dict(n_layer=12, n_embd=768, n_head=12),
    "C 4096, 4 layers": dict(n_layer=4, n_embd=4096, n_head=32),
}


@dataclass
class Options:
    json: Path | None = None  # Write the figures here.


def optimizers(model):
    """Yield (name, optimizer, bytes per parameter that a step must move)."""
    from fast_kernels.adam import FastAdam  # needs Triton

    parameters = list(model.parameters())
    fused_adam = fp8.te.optimizers.FusedAdam
    yield "torch AdamW, BF16 without masters", torch.optim.AdamW(parameters, fused=True, capturable=True), 14
    yield "TE FusedAdam, float32 masters", fused_adam(parameters, master_weights=True), 28
    capturable = fused_adam(parameters, master_weights=True, capturable=True)
    yield "TE FusedAdam, float32 masters, capturable", capturable, 28
    remainders = fused_adam(parameters, master_weights=True, store_param_remainders=True)
    yield "TE FusedAdam, remainders", remainders, 26
    yield "fast_adam, float32 masters", FastAdam(parameters, store_param_remainders=False), 28
    yield "fast_adam, remainders", FastAdam(parameters), 26
    in_bf16 = FastAdam(parameters, betas=(0.9, 0.95), moment_dtype=torch.bfloat16)
    yield "fast_adam, remainders, BF16 moments", in_bf16, 18


def measure(step, graphed):
    """Return the median ms of `step()`, as a CUDA graph if `graphed`."""
    device = torch.device("cuda")
    for _ in range(3):
        step()
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    times = []
    for _ in range(20):
        torch.cuda._sleep(2_000_000)  # cycles, in which Python launches the step
        times += timed([step], device)
    return sorted(times)[10]


def table(result) -> str:
    """Return the Markdown table of ms (in brackets TB/s) of each optimizer and of the gradient norm."""
    rows = result["rows"]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        found = {row["size"]: row for row in rows if row["optimizer"] == name}
        cells = {size: f"{row['ms']:.2f} ({row['terabytes_per_s']:.1f})" for size, row in found.items()}
        moved = str(next(iter(found.values()))["bytes_per_parameter"])
        lines.append([name, moved, *(cells.get(size, "") for size in sizes)])
    return markdown(["", "bytes a parameter", *(f"{size}, ms" for size in sizes)], lines)


def model_of(shape):
    """Build a model in BF16 with random gradients."""
    _, config_class = models.model_classes("optimized")
    model = models.build_model("optimized", config_class(**shape), device="cuda", dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def measure_model(size, model):
    """Yield a row per optimizer, and per function that computes the gradient norm."""
    count = sum(p.numel() for p in model.parameters())
    gradients = [parameter.grad for parameter in model.parameters()]
    for name, optimizer, bytes_per_parameter in optimizers(model):
        # FastAdam is always capturable, the others by an option
        graphed = getattr(optimizer, "capturable", False) or optimizer.defaults.get("capturable")
        steps = [(name, optimizer.step, bytes_per_parameter)]
        if name == "fast_adam, remainders":
            steps += [("norm: torch get_total_norm", lambda: torch.nn.utils.get_total_norm(gradients), 2),
                      ("norm: fast_adam", optimizer.gradient_norm, 2)]
        for label, step, moved in steps:
            ms = measure(step, graphed)
            yield {"size": size, "parameters": count, "optimizer": label, "ms": ms,
                   "bytes_per_parameter": moved, "terabytes_per_s": count * moved / ms / 1e9}
        # free the state before the next optimizer allocates its own
        optimizer.state.clear()
        del optimizer, steps, step


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/optimizer.py", description=__doc__)
    check_folder(options.json)
    if fp8.IS_REFERENCE:
        raise ValueError("times are measured on a GPU with Transformer Engine, and there is none here")
    rows = []
    for size, shape in SIZES.items():
        model = model_of(shape)
        for row in measure_model(size, model):
            rows.append(row)
            print(f"{size:18} {row['optimizer']:44} {row['ms']:8.3f} ms  {row['terabytes_per_s']:.2f} TB/s",
                  flush=True)
        del model
        torch.cuda.empty_cache()
    write_report("bench/optimizer.py", argv, {"rows": rows}, options.json)


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/optimizer.py"))
