"""Measure the error of FP8 GEMMs with the tensor cores' fast accumulation and with float32 accumulation.

    python data.py stdlib
    python bench/accumulation.py          # writes results/accumulation.json and .png

An error is ‖result - exact‖ / ‖exact‖, where exact is computed in float64 from the same FP8 values. The error
of the exact result rounded to BF16 is the least that a BF16 result can have; it is reported beside the
others. The operands are random values with several K, and those of all dgrad and wgrad GEMMs of models that
were trained for 200 steps. Also measured: the time of both kinds of accumulation, at shapes of dgrad.

In the JSON, "summands" is K, "products" are GEMMs, and "fast_sums" is fast accumulation.
"""

import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import arms
from bench.report import check_folder, markdown, write_report
from fast_kernels import DGRAD_FAST_ACCUM_K
from fast_kernels import gemm as fast_gemm
from fast_kernels.gemm import gemm  # the function itself: `on_gradients` replaces the module's attribute
from nanote import cli, fp8
from nanote.dataset import Loader
from nanote.profiling import timed

ROOT = Path(__file__).resolve().parent.parent
VALUES = {  # distributions of a matrix; one sign is the worst case, since truncation errors then add up
    "normal": torch.randn,
    "heavy tails": lambda *size, **on: torch.randn(*size, **on) * torch.exp(1.5 * torch.randn(*size, **on)),
    "one sign": torch.rand,
}
K_SIZES = (256, 512, 768, 1024, 2048, 4096, 16384)
TIMES = (  # outputs, K, tokens of 124M and 350M
    (3072, 768, 32768), (768, 768, 32768), (4096, 1024, 16384), (1024, 1024, 16384))
ROWS = 2048  # of a result, which are compared
MICRO_BATCH = 8  # sequences of 1,024 tokens, of the models in training


@dataclass
class Options:
    data: str = "data/stdlib"  # A folder of token files.
    json: Path | None = ROOT / "results/accumulation.json"  # Write the figures here.


def errors(a, b):
    """Return the errors of b @ aᵀ: rounded to BF16 alone, with float32 and with fast accumulation."""
    one = torch.ones(1, device=a.device)
    exact = b.double() @ a.double().T

    def error_of(result):
        return ((result.double() - exact).norm() / exact.norm()).item()

    return {"bf16_rounding": error_of(exact.bfloat16()), "float32_sums": error_of(gemm(a, one, b, one)),
            "fast_sums": error_of(gemm(a, one, b, one, accumulation="fast"))}


def quantized(values, dtype):
    """Cast to FP8, scaled so that the largest value is the largest of the format."""
    return (values * (torch.finfo(dtype).max / values.abs().max())).to(dtype)


def on_random_values(device):
    """Yield the errors of GEMMs of random values, by distribution and K."""
    for kind, draw in VALUES.items():
        for k in K_SIZES:
            a = quantized(draw(1024, k, device=device), torch.float8_e4m3fn)
            b = quantized(draw(ROWS, k, device=device), torch.float8_e5m2)
            yield {"part": "random", "values": kind, "summands": k} | errors(a, b)


def on_gradients(shape, data, device):
    """Yield the errors of the dgrad and wgrad GEMMs of a model in training, by K."""
    options = arms.SHAPES[shape] | {"micro_batch_size": MICRO_BATCH}
    config = arms.arm_config("fp8", arms.make_config(options, device))
    sizes = dict(seq_len=config.seq_len, micro_batch_size=config.micro_batch_size)
    loader = Loader(data, "train", device=device, **sizes)
    step = arms.build_te(config, device, loader.batch(0))
    for number in range(200):
        loss, _ = step([loader.batch(number)], 6e-4 * min(1, (number + 1) / 50))
    found = {}

    def watched(a, a_inv, b, b_inv, *others):
        if b.dtype == torch.float8_e5m2:
            found.setdefault(a.shape[1], []).append(errors(a[:ROWS], b[:ROWS]))
        return gemm(a, a_inv, b, b_inv, *others)

    fast_gemm.gemm = watched
    try:
        step.forward_backward(loader.batch(200), 0)
    finally:
        fast_gemm.gemm = gemm
        loader.close()
    for k, gemms in sorted(found.items()):
        kinds = {kind: [gemm_errors[kind] for gemm_errors in gemms] for kind in gemms[0]}
        yield {
            "part": "gradients",
            "shape": shape,
            "loss": loss.item(),
            "summands": k,
            "products": len(gemms),
            **{kind: statistics.median(values) for kind, values in kinds.items()},
            **{f"largest_{kind}": max(values) for kind, values in kinds.items()},
        }


def times(device):
    """Yield the median ms of 100 GEMMs in a row, after another 100 that warm up the GPU."""
    one = torch.ones(1, device=device)
    for outputs, k, tokens in TIMES:
        a = quantized(torch.randn(outputs, k, device=device), torch.float8_e4m3fn)
        b = quantized(torch.randn(tokens, k, device=device), torch.float8_e5m2)
        ms = {}
        for accumulation in ("precise", "fast"):
            call = partial(gemm, a, one, b, one, accumulation=accumulation)
            ms[accumulation] = statistics.median(timed([call] * 200, device)[100:])
        yield {
            "part": "time", "outputs": outputs, "summands": k, "tokens": tokens,
            "float32_sums_ms": ms["precise"], "fast_sums_ms": ms["fast"],
        }


def errors_table(figures) -> str:
    """Return the Markdown table of errors of backward GEMMs in training: median and largest, in %."""
    lines = []
    for row in figures["rows"]:
        if row["part"] == "gradients":
            kind = "wgrad" if row["summands"] == MICRO_BATCH * 1024 else "dgrad"  # of wgrad, K is the tokens
            cells = []
            for name in ("fast_sums", "float32_sums", "bf16_rounding"):
                cells.append(f"{100 * row[name]:.2f} ({100 * row[f'largest_{name}']:.2f})")
            lines.append([f"{row['shape']}, {row['products']} {kind}", f"{row['summands']:,}", *cells])
    return markdown(["error, %", "K", "fast accumulation", "float32", "rounding to BF16 alone"], lines)


def times_table(figures) -> str:
    """Return the Markdown table of the ms of a dgrad GEMM."""
    lines = []
    for row in figures["rows"]:
        if row["part"] == "time":
            shape = f"{row['tokens']:,} x {row['outputs']:,}, K {row['summands']:,}"
            lines.append([shape, f"{row['fast_sums_ms']:.3f}", f"{row['float32_sums_ms']:.3f}"])
    return markdown(["dgrad, ms", "fast accumulation", "float32"], lines)


def plot(figures, path):
    """Draw the errors over K."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes, rows = figure.subplots(), figures["rows"]
    for values, color in zip(VALUES, ("tab:blue", "tab:cyan", "tab:gray")):
        mine = [row for row in rows if row.get("values") == values]
        axes.plot(
            [row["summands"] for row in mine], [100 * row["fast_sums"] for row in mine], color=color, lw=1,
            label=f"random, {values}: fast accumulation",
        )
    for shape, marker in (("124m-b32", "o"), ("350m-b16", "s")):
        mine = [row for row in rows if row.get("shape") == shape]
        for kind, name, color in (("fast_sums", "fast", "tab:red"), ("float32_sums", "float32", "tab:green")):
            median, largest = ([100 * row[field] for row in mine] for field in (kind, f"largest_{kind}"))
            above = [b - a for a, b in zip(median, largest)]
            axes.errorbar([row["summands"] for row in mine], median, yerr=[[0] * len(mine), above],
                          fmt=marker, ms=5, capsize=3, color=color,
                          label=f"{shape} in training: {name} accumulation, median and largest")
    axes.axhline(
        100 * statistics.median(row["bf16_rounding"] for row in rows if "bf16_rounding" in row),
        color="black", ls="--", lw=1, label="rounding to BF16 alone",
    )
    axes.axvspan(axes.get_xlim()[0], DGRAD_FAST_ACCUM_K, color="tab:green", alpha=0.1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="K (green: dgrad may use fast accumulation)",
             ylabel="error of a GEMM, % of the norm")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(ticks := (256, 1024, 4096, 16384, 65536), labels=[f"{tick:,}" for tick in ticks])
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(f"{figures['machine']}, {figures['date']}", fontsize=10)
    figure.savefig(path, dpi=150)


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/accumulation.py", description=__doc__)
    check_folder(options.json)
    if fp8.IS_REFERENCE:
        raise ValueError("this study needs a GPU with Transformer Engine, and there is none here")
    device, rows = torch.device("cuda"), []
    gradients = [on_gradients(shape, options.data, device) for shape in ("124m-b32", "350m-b16")]
    parts = (on_random_values(device), times(device), *gradients)
    for row in itertools.chain(*parts):
        rows.append(row)
        fields = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
        print(" ".join(f"{key}={value}" for key, value in fields.items()), flush=True)
        if options.json:
            write_report("bench/accumulation.py", argv, {"rows": rows}, options.json)
    if options.json:
        plot(json.loads(options.json.read_text()), options.json.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/accumulation.py"))
