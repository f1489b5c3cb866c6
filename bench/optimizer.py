"""The optimizer's step alone: PyTorch's and Transformer Engine's fused Adam, and fast_kernels/adam.py, over
the tensors of a model.

    python bench/optimizer.py [--json FILE]

Milliseconds (median of 20 steps, replayed as a CUDA graph where the optimizer allows it) and the memory
bandwidth that the bytes each one has to move amount to; and the gradients' norm, by which they are clipped,
PyTorch's and fast_kernels/adam.py's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.report import check_folder, markdown, write_report
from nanote import cli, fp8, models

SIZES = {
    "GPT-2 124M": dict(n_layer=12, n_embd=768, n_head=12),
    "C 4096, 4 layers": dict(n_layer=4, n_embd=4096, n_head=32),
}


@dataclass
class Options:
    json: Path | None = None  # Write the figures here.


def optimizers(model):
    """name -> (optimizer, bytes that a step must move for each parameter)."""
    from fast_kernels.adam import FastAdam

    parameters = list(model.parameters())
    fused_adam = fp8.te.optimizers.FusedAdam
    yield "torch AdamW, BF16 without masters", torch.optim.AdamW(parameters, fused=True, capturable=True), 14
    yield "TE FusedAdam, float32 masters", fused_adam(parameters, master_weights=True), 28
    yield (
        "TE FusedAdam, float32 masters, capturable",
        fused_adam(parameters, master_weights=True, capturable=True), 28,
    )
    yield (
        "TE FusedAdam, remainders", fused_adam(parameters, master_weights=True, store_param_remainders=True),
        26,
    )
    yield "fast_adam, float32 masters", FastAdam(parameters, store_param_remainders=False), 28
    yield "fast_adam, remainders", FastAdam(parameters), 26
    in_bf16 = FastAdam(parameters, betas=(0.9, 0.95), moment_dtype=torch.bfloat16)
    yield "fast_adam, remainders, BF16 moments", in_bf16, 18


def measure(step, graphed):
    """Median milliseconds of `step()`."""
    for _ in range(3):
        step()
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # so that the time Python takes to launch is over before the clock starts
        torch.cuda._sleep(2_000_000)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[10]


def table(result) -> str:
    """Markdown table: ms of a step, in brackets TB/s, of each optimizer and of the gradients' norm."""
    rows = result["rows"]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        found = {row["size"]: row for row in rows if row["optimizer"] == name}
        cells = {size: f"{row['ms']:.2f} ({row['terabytes_per_s']:.1f})" for size, row in found.items()}
        moved = str(next(iter(found.values()))["bytes_per_parameter"])
        lines.append([name, moved, *(cells.get(size, "") for size in sizes)])
    return markdown(["", "bytes a parameter", *(f"{size}, ms" for size in sizes)], lines)


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/optimizer.py", description=__doc__)
    check_folder(options.json)
    if fp8.IS_REFERENCE:
        raise ValueError(
            "there is no GPU with Transformer Engine here, and times on anything else mean nothing"
        )
    rows = []
    for size, shape in SIZES.items():
        model_class, config_class = models.model_classes("optimized")
        model = models.build_model(
            "optimized", config_class(**shape), device="cuda", dtype=torch.bfloat16
        )
        count = sum(p.numel() for p in model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for name, optimizer, size_of in optimizers(model):
            graphed = getattr(optimizer, "capturable", False) or optimizer.defaults.get("capturable")
            steps = {name: (optimizer.step, size_of)}
            if name == "fast_adam, remainders":
                gradients = [parameter.grad for parameter in model.parameters()]
                steps |= {"norm: torch get_total_norm": (lambda: torch.nn.utils.get_total_norm(gradients), 2),
                          "norm: fast_adam": (optimizer.gradient_norm, 2)}
            for name, (step, size_of) in steps.items():
                ms = measure(step, graphed)
                rows.append(
                    {
                        "size": size, "parameters": count, "optimizer": name, "ms": ms,
                        "bytes_per_parameter": size_of, "terabytes_per_s": count * size_of / ms / 1e9,
                    }
                )
                print(f"{size:18} {name:44} {ms:8.3f} ms  {rows[-1]['terabytes_per_s']:.2f} TB/s", flush=True)
            optimizer.state.clear()
            del optimizer, steps
        del model
        torch.cuda.empty_cache()
    write_report("bench/optimizer.py", argv, {"rows": rows}, options.json)


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/optimizer.py"))
