"""What does rounding to FP8 change in a single pass, by part? The loss and the gradient of one checkpoint.

    python bench/rounding.py out/gpt2-124m    # a run in FP8 or BF16; writes results/rounding.json

A run per part (bench/convergence.py --arms emulated-only_weights …) takes minutes, and its loss depends on
the seed. Here the weights are those of one checkpoint, and each row quantizes a part of the GEMMs' operands
for the same tokens, in bench/ablation.py with one current scale a tensor. So rows differ by the rounding
alone. They do not show what training makes of it.

- loss_percent: validation loss over that without FP8, - 1
- gradient_bias, gradient_error: of the gradient g of all weights in a micro-batch, against that without FP8,
  e: ⟨g, e⟩ / ⟨e, e⟩ - 1, and ‖g - e‖ / ‖e‖, of the sums over --micro-batches
- mean_error: the part of the error that more tokens do not average out, ‖E(g - e)‖ / ‖E e‖. A squared norm of
  an expectation is estimated without bias from n micro-batches v: (‖Σv‖² - Σ‖v‖²) / (n (n - 1)). A negative
  estimate counts as 0; mean_error is None if that of e is not positive.
- mean_error_of_blocks: the same for the weights of the blocks alone, without embeddings and head, whose
  gradient may be much larger.
- The row `other tokens` is the gradient without FP8 of another micro-batch. Its error is the noise of the
  data: compare errors of rounding with it.
- The row `as trained`, of a run in FP8, is the model of the run with its recipe, kernels and scales. Measure
  on the kind of machine that trained it: a float32 model takes the masters of a BF16 run in this row alone.
"""

import dataclasses
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train
from bench import arms
from bench.ablation import Ablated, AblatedConfig
from bench.convergence import EMULATED
from bench.report import check_folder, markdown, write_report
from nanote import checkpoint, cli
from nanote.config import read_options
from nanote.generate import pick_device
from nanote.parallel import Ranks

PARTS = [name for name, words in EMULATED.items()  # without those that concern delayed scaling alone
         if not re.search("scaling=current|gradient_scaling|history|residual", words)]


@dataclass
class Options:
    folder: tyro.conf.Positional[Path]
    """A run's folder, or one of its checkpoints."""
    data: str | None = None  # Folder of token files; None: the run's.
    parts: tuple[str, ...] = tuple(PARTS)
    """Names of arms of bench/convergence.py, without their prefix emulated-."""
    tokens: int = 500_000  # Tokens to evaluate.
    micro_batches: int = 8  # Number of micro-batches whose gradients are compared, and kept in memory.
    json: Path = ROOT / "results/rounding.json"  # Write the figures here.


def load(options: Options, device):
    """Return the checkpoint's folder and meta.json, the run's config without dropout, and its loaders.

    Raises ValueError for a run that is not of --model optimized, or with --fp8-param.
    """
    data = ["--data", options.data] if options.data else []
    config, folder, meta = read_options(["--eval-only", "--out-dir", str(options.folder), *data])
    if config.model != "optimized":
        raise ValueError(f"{options.folder}: a run of --model {config.model}; name one of --model optimized")
    if config.fp8_param:
        raise ValueError(f"{options.folder}: a run with --fp8-param, whose weights are stored in FP8; name "
                         "one without")
    config = dataclasses.replace(
        config, eval_tokens=options.tokens, eval_steps=None, dropout=0.0, attn_dropout=0.0)
    loaders = train.open_data(config, Ranks(), device)
    return folder, meta, train.fit_to_data(config, loaders["train"].meta, folder, meta), loaders


def build_ablated(folder: Path, meta: dict, device, ablation: str):
    """Return the model of a checkpoint, with the emulated FP8 of `ablation` and without dropout."""
    fields = {field.name for field in dataclasses.fields(AblatedConfig) if field.init}
    known = {name: value for name, value in meta["model_config"].items() if name in fields}
    config = AblatedConfig(
        **known | {"use_fp8": False, "dropout": 0.0, "attn_dropout": 0.0, "ablation": ablation})
    with torch.device(device):
        model = Ablated(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    checkpoint.load(folder, meta, model)
    return model


def gradient(model, batch, grad_accum: int) -> torch.Tensor:
    """Return the gradient of all weights as one vector, those of the blocks first. The loss is divided as in
    a step of the run, for which FP8 has the scales."""
    model.zero_grad(set_to_none=True)
    (model(*batch) / grad_accum).backward()
    names = sorted(dict(model.named_parameters()), key=lambda name: (not name.startswith("blocks."), name))
    return torch.cat([model.get_parameter(name).grad.flatten() for name in names])


class MeanSquares:
    """Squared norms of vectors that are added one by one."""

    def __init__(self):
        self.sum, self.squares, self.count = 0.0, 0.0, 0

    def add(self, vector) -> None:
        self.sum, self.squares = self.sum + vector, self.squares + vector.square().sum().item()
        self.count += 1

    def of_expectation(self) -> float:
        """Return the estimate of the squared norm of their expectation; NaN of one vector."""
        pairs = self.count * (self.count - 1)
        return (self.sum.square().sum().item() - self.squares) / pairs if pairs else math.nan


def compare(found_and_exact, of_blocks: int) -> dict:
    """Return bias and errors of gradients.

    Args:
        found_and_exact: (g, e) of each micro-batch.
        of_blocks: number of their elements that are of the blocks; they come first.
    """
    errors, exacts, products = MeanSquares(), MeanSquares(), 0.0
    block_errors, block_exacts = MeanSquares(), MeanSquares()
    for found, exact in found_and_exact:
        exact = exact.double()
        error = found.double() - exact
        errors.add(error)
        exacts.add(exact)
        block_errors.add(error[:of_blocks])
        block_exacts.add(exact[:of_blocks])
        products += (error @ exact).item()
    return {"gradient_bias": products / exacts.squares,
            "gradient_error": math.sqrt(errors.squares / exacts.squares),
            "mean_error": mean_error(errors, exacts),
            "mean_error_of_blocks": mean_error(block_errors, block_exacts)}


def mean_error(errors: MeanSquares, exacts: MeanSquares) -> float | None:
    of_exact = exacts.of_expectation()
    return math.sqrt(max(0.0, errors.of_expectation()) / of_exact) if of_exact > 0 else None


def measure(folder, meta, config, loaders, device, parts, count: int):
    """Yield the rows. `count`: of micro-batches."""
    batches = [loaders["train"].batch(number) for number in range(count + 1)]
    exact_model = build_ablated(folder, meta, device, "quantize=none scaling=current")
    loss = train.evaluate(exact_model, loaders["val"], config)

    exact = [gradient(exact_model, batch, config.grad_accum) for batch in batches]
    of_blocks = sum(parameter.numel() for parameter in exact_model.blocks.parameters())

    def row_of(part, model):
        change = train.evaluate(model, loaders["val"], config) / loss - 1
        gradients = (gradient(model, batch, config.grad_accum) for batch in batches[:count])
        return {"part": part, "loss_percent": 100 * change} | compare(zip(gradients, exact), of_blocks)

    yield {"part": "other tokens", "loss_percent": None} | compare([exact[:2]], of_blocks)
    if config.fp8_recipe != "none":
        yield row_of("as trained", arms.load_te(folder, meta, config, device, batches[0]).model)
    for part in parts:
        has_scaling = any(word.startswith("scaling=") for word in EMULATED[part].split())
        words = EMULATED[part] if has_scaling else f"{EMULATED[part]} scaling=current"
        try:
            model = build_ablated(folder, meta, device, words)
        except ValueError as error:  # blocks that do not divide the model's sizes
            print(f"{part}: left out: {error}", file=sys.stderr)
            continue
        yield row_of(part, model)
    for each in loaders.values():
        each.close()


def table(figures) -> str:
    """Return the Markdown table."""
    lines = []
    for row in figures["rows"]:
        loss = "" if row["loss_percent"] is None else f"{row['loss_percent']:+.3f}"
        words = EMULATED.get(row["part"], row["part"])
        lines.append([f"`{words}`" if "=" in words else words or "all", loss,
                      f"{100 * row['gradient_bias']:+.2f}", f"{100 * row['gradient_error']:.2f}",
                      *("" if row[name] is None else f"{100 * row[name]:.2f}"
                        for name in ("mean_error", "mean_error_of_blocks"))])
    return markdown(["quantized", "loss, %", "gradient, bias, %", "gradient, error, %",
                     "that does not average out, %", "in the blocks alone, %"], lines)


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/rounding.py", description=__doc__)
    check_folder(options.json)
    if options.micro_batches < 2:
        raise ValueError(f"--micro-batches {options.micro_batches}: must be at least 2, such as 8, to tell "
                         "errors that average out")
    for part in set(options.parts) - set(EMULATED):
        raise ValueError(f"--parts {part}: unknown; the parts are {', '.join(PARTS)}")
    device = pick_device("auto")
    folder, meta, config, loaders = load(options, device)
    figures = {"checkpoint": folder.name, "n_layer": config.n_layer, "n_embd": config.n_embd,
               "rows": list(measure(folder, meta, config, loaders, device, options.parts,
                                    options.micro_batches))}
    write_report("bench/rounding.py", argv, figures, options.json)
    print(table(figures))


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/rounding.py"))
