"""Measure the bias of FP8 fast accumulation in the dgrad GEMMs of a trained model. Needs a Hopper GPU.

    python bench/accumulation_bias.py out/gpt2-124m    # a run in FP8, delayed scaling, with its checkpoints

An error that averages out and one that shrinks every gradient may have the same norm, which is all that
bench/accumulation.py measures. The bias of a result is ⟨result, exact⟩ / ⟨exact, exact⟩ - 1, and its
error ‖result - exact‖ / ‖exact‖, where exact is computed in float64 from the same FP8 values.
Both are measured

- for each dgrad GEMM of one micro-batch of the run's training data, with the checkpoint's weights, with fast
  and with precise (float32) accumulation. Results are in BF16, as in training.
- for gradients at the end of the backward pass, which is run with fast accumulation in dgrad GEMMs of K up to
  --fp8-dgrad-fast-accum-k of the run, and in all of them. Exact is the pass with precise accumulation. The
  bias of one micro-batch is partly chance, so it is the mean over several, with its standard error. A third
  pass shows what any change of rounding does: precise, each result times a random 1 ± 2^-8.

results/accumulation_bias.json has a row of each, and `table` the summary for the page.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.convergence import standard_error
from bench.gradient_sums import load_run
from bench.report import check_folder, markdown, write_report
from fast_kernels import gemm as fast_gemm
from fast_kernels.gemm import gemm  # the function itself: `watched` replaces the module's attribute
from fast_kernels.support import unsupported_reason
from nanote import cli, fp8

ROWS = 4096  # of a result, which are compared
EVERY_K = 10**9
NOISE = -1  # in place of a K: no fast accumulation, but noise, somewhat larger than a BF16 rounding
FIRST = ("wpe.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1_weight")  # gradients after all dgrads


@dataclass
class Options:
    folder: tyro.conf.Positional[Path]
    """A run's folder, or one of its checkpoints."""
    data: str | None = None  # Folder of token files; None: the run's.
    micro_batches: int = 8  # Over which the biases of gradients are averaged.
    json: Path = ROOT / "results/accumulation_bias.json"  # Write the figures here.


def bias_and_error(result, exact) -> tuple[float, float]:
    """Return the bias and the error of a result, computed in float64."""
    difference, exact = result.double() - exact.double(), exact.double()
    square = exact.square().sum()
    return ((difference * exact).sum() / square).item(), (difference.square().sum() / square).sqrt().item()


def add_noise(result):
    """Multiply a BF16 tensor by random values of 1 ± 2^-8, in place: some elements change by one rounding."""
    return result.mul_(1 + (2 * torch.rand(result.shape, device=result.device) - 1) / 2**8)


def backward(model, config, batch, fast_k: int, watch=None) -> dict:
    """Return the gradients FIRST of a pass with fast accumulation in dgrad GEMMs of K up to fast_k.

    watch: called with the operands and scales of each dgrad GEMM.
    """
    model.dgrad_fast_accum_k = EVERY_K  # so that dgrad GEMMs, and no others, ask for "either"

    def watched(a, a_inv, b, b_inv, bias, accumulation, *others):
        if accumulation == "either":
            if watch:
                watch(a, a_inv, b, b_inv)
            kind = "fast" if a.shape[1] <= fast_k else "precise"  # not whichever is faster
            result = gemm(a, a_inv, b, b_inv, bias, kind, *others)
            is_noisy = fast_k == NOISE and result is not None  # None: Transformer Engine's GEMM runs
            return add_noise(result) if is_noisy else result
        return gemm(a, a_inv, b, b_inv, bias, accumulation, *others)

    fast_gemm.gemm = watched
    try:
        with fp8.preserved_state(model):
            (model(*batch) / config.grad_accum).backward()  # as in a step, for which FP8 has the scales
    finally:
        fast_gemm.gemm = gemm
    found = {name: p.grad.clone() for name, p in model.named_parameters() if name in FIRST}
    model.zero_grad(set_to_none=True)
    return found


def dgrad_names(model) -> list[str]:
    """Return the names of the dgrad GEMMs in the order of a backward pass."""
    blocks = [f"{layer} {name}" for layer in reversed(range(len(model.blocks)))
              for name in ("fc2", "fc1", "proj", "qkv")]
    return (["head"] if model.config.fp8_lm_head else []) + blocks


def measure(model, config, batches):
    """Yield the rows; those of GEMMs are of the first micro-batch."""
    rows, found = [], {}

    def watch(a, a_inv, b, b_inv):
        chosen = b[::max(1, len(b) // ROWS)][:ROWS].contiguous()
        exact = (chosen.double() @ a.double().T) * (a_inv.double() * b_inv.double())
        row = {"part": "gemm", "k": a.shape[1], "outputs": a.shape[0]}
        for kind in ("fast", "precise"):
            result = gemm(a, a_inv, chosen, b_inv, accumulation=kind)
            row[f"{kind}_bias"], row[f"{kind}_error"] = bias_and_error(result, exact)
        rows.append(row)

    backward(model, config, batches[0], 0, watch)
    for name, row in zip(dgrad_names(model), rows, strict=True):
        yield row | {"gemm": name, "uses_fast": row["k"] <= config.fp8_dgrad_fast_accum_k}
    for batch in batches:
        exact = backward(model, config, batch, 0)
        # 0: the same pass again
        for fast_k in dict.fromkeys((0, NOISE, config.fp8_dgrad_fast_accum_k, EVERY_K)):
            for name, gradient in backward(model, config, batch, fast_k).items():
                found.setdefault((name, fast_k), []).append(bias_and_error(gradient, exact[name]))
    for (name, fast_k), pairs in found.items():
        biases, errors = zip(*pairs)
        yield {"part": "gradient", "parameter": name, "fast_up_to_k": fast_k, "micro_batches": len(pairs),
               "bias": statistics.mean(biases), "bias_standard_error": standard_error(biases),
               "error": statistics.mean(errors)}


def table(figures) -> str:
    """Return the Markdown table: biases and errors in %, the median and the largest of GEMMs of a kind."""
    groups, lines = {}, []
    for row in figures["rows"]:
        if row["part"] == "gemm":
            groups.setdefault((row["gemm"].split()[-1], row["k"]), []).append(row)
    for (name, k), rows in groups.items():
        cells = []
        for field in ("fast_bias", "precise_bias", "fast_error", "precise_error"):
            values = [100 * row[field] for row in rows]
            sign = "+" if "bias" in field else ""
            cells.append(f"{statistics.median(values):{sign}.4f} ({max(values, key=abs):{sign}.4f})")
        lines.append([f"dgrad of {name}, {len(rows)}", f"{k:,}", *cells])
    for row in figures["rows"]:
        if row["part"] == "gradient" and row["fast_up_to_k"]:
            kinds = {EVERY_K: "all K", NOISE: "none, with noise"}.get(
                row["fast_up_to_k"], f"K up to {row['fast_up_to_k']:,}")
            error = row.get("bias_standard_error")  # None: of one micro-batch
            bias = f"{100 * row['bias']:+.4f}" + (f" ± {100 * error:.4f}" if error else "")
            name = f"gradient of `{row['parameter']}`"
            lines.append([name, kinds, bias, "", f"{100 * row['error']:.4f}", ""])
    return markdown(["%", "K", "bias, fast", "bias, float32", "error, fast", "error, float32"], lines)


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/accumulation_bias.py", description=__doc__)
    check_folder(options.json)
    if fp8.IS_REFERENCE:
        raise ValueError("this study needs a GPU with Transformer Engine, and there is none here")
    if options.micro_batches < 1:
        raise ValueError(f"--micro-batches {options.micro_batches}: must be 1 or more; 8 works")
    model, config, folder, batches = load_run(
        options.folder, options.data, options.micro_batches, torch.device("cuda"))
    if reason := unsupported_reason(model):
        raise ValueError(f"{options.folder}: the fast kernels do not run this model: {reason}; name a run of "
                         "--model optimized with delayed scaling, on a Hopper GPU")
    figures = {"checkpoint": folder.name, "n_layer": config.n_layer, "n_embd": config.n_embd,
               "rows": list(measure(model, config, batches))}
    write_report("bench/accumulation_bias.py", argv, figures, options.json)
    print(table(figures))


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/accumulation_bias.py"))
