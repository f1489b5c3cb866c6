"""How exact is the gradient of a step, summed over micro-batches in float32 and in BF16?

    python train.py --preset tiny --dtype bfloat16
    python bench/gradient_sums.py out/tiny    # a run with BF16 weights; writes results/gradient_sums.json

The weights are those of the run's last checkpoint, and each row is of a number of micro-batches of its data:

- float32, bfloat16: error of what nanote/gradients.py sums with --grad-accum-dtype, ‖g - e‖ / ‖e‖ over all
  weights; e is the sum, in float64, of what each of these micro-batches gives alone.
- rounded_once: error of e rounded to BF16, as --grad-reduce-dtype bfloat16 rounds the sum of each rank.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train
from bench import arms
from bench.report import check_folder, markdown, write_report
from nanote import cli, fp8
from nanote.config import read_options
from nanote.generate import pick_device
from nanote.gradients import Gradients
from nanote.parallel import Ranks


@dataclass
class Options:
    folder: tyro.conf.Positional[Path]
    """A run's folder, or one of its checkpoints."""
    data: str | None = None  # Folder of token files; None: the run's.
    micro_batches: tuple[int, ...] = (8, 32, 64)  # Numbers of micro-batches to sum.
    json: Path = ROOT / "results/gradient_sums.json"  # Write the figures here.


def load_run(folder: Path, data: str | None, count: int, device):
    """Return the model of a run's last checkpoint, its config and folder, and the next `count` micro-batches
    of its training data, or of the token files in `data`."""
    more = ["--data", data] if data else []
    config, folder, meta = read_options(["--eval-only", "--out-dir", str(folder), *more])
    loader = train.open_data(config, Ranks(), device, ["train"])["train"]
    config = train.fit_to_data(config, loader.meta, folder, meta)
    train.skip_samples(loader, config, meta)
    first = meta["step"] * config.grad_accum
    batches = [loader.batch(first + index) for index in range(count)]
    loader.close()
    return arms.load_te(folder, meta, config, device, batches[0]).model.train(), config, folder, batches


def gradient(model, batches, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum over micro-batches of the gradient of all weights, as one vector."""
    gradients = Gradients(model, dtype, dtype)
    for number, batch in enumerate(batches):
        with fp8.preserved_state(model), gradients.micro_batch(number == 0, number == len(batches) - 1):
            model(*batch).backward()
    return torch.cat([parameter.grad.flatten() for parameter in gradients.parameters])


def measure(model, batches, counts):
    """Yield a row for each number of micro-batches."""
    exact, done = 0, 0
    for count in sorted(counts):
        more = (gradient(model, [batch], torch.float32).double() for batch in batches[done:count])
        exact, done = sum(more, exact), count
        found = {str(dtype).removeprefix("torch."): gradient(model, batches[:count], dtype)
                 for dtype in (torch.float32, torch.bfloat16)} | {"rounded_once": exact.bfloat16()}
        yield {"micro_batches": count} | {
            name: ((value - exact).norm() / exact.norm()).item() for name, value in found.items()}


def table(figures) -> str:
    """Return the Markdown table."""
    lines = [[str(row["micro_batches"]), f"{100 * row['float32']:.0e}", f"{100 * row['bfloat16']:.2f}",
              f"{100 * row['rounded_once']:.2f}"] for row in figures["rows"]]
    return markdown(["micro-batches", "in float32, %", "in BF16, %", "rounded once, %"], lines, left=0)


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/gradient_sums.py", description=__doc__)
    check_folder(options.json)
    if min(options.micro_batches) < 1:
        raise ValueError(f"--micro-batches {min(options.micro_batches)}: must be 1 or more; 8 works")
    model, config, folder, batches = load_run(
        options.folder, options.data, max(options.micro_batches), pick_device("auto"))
    if next(model.parameters()).dtype != torch.bfloat16:
        raise ValueError(f"{options.folder}: a run with float32 weights, whose gradients are float32; name "
                         "one with --dtype bfloat16")
    figures = {"checkpoint": folder.name, "n_layer": config.n_layer, "n_embd": config.n_embd,
               "tokens": config.micro_batch_size * config.seq_len,
               "rows": list(measure(model, batches, options.micro_batches))}
    write_report("bench/gradient_sums.py", argv, figures, options.json)
    print(table(figures))


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/gradient_sums.py"))
