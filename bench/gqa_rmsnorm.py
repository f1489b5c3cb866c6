"""Measure three claims: RMSNorm is faster than LayerNorm, GQA saves memory, GQA allows larger batches.

    python bench/gqa_rmsnorm.py --json results/gqa_rmsnorm.json     # about two minutes on an H200

Each switch is compared alone with the default block (LayerNorm, as many KV heads as heads), in one process:
the default's step stays in memory and is timed in turns with the other's. A row has the step's milliseconds,
its kernels by class, the peak of allocated memory, and the size of the KV cache of generation. The largest
micro-batch is found by training: the largest number of sequences that train for two steps under a limit on
PyTorch's allocator, where one more sequence runs out of memory.
"""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import arms, measure, timing
from bench.report import Rows, check_folder, markdown
from nanote import cli, fp8
from nanote.config import TrainConfig
from nanote.generate import pick_device
from nanote.memory import is_out_of_memory

SHAPES = {"124m-b32": (3, 16), "c4096": (4, 24)}  # -> heads per KV head with GQA, memory limit in GiB
SWITCHES = {"default": (), "RMSNorm": ("use_rmsnorm",), "GQA": ("n_kv_head",)}  # -> fields of TrainConfig
FIT_LENGTH = 1024  # tokens per sequence under the memory limit; short, so that one more adds little


@dataclass
class Options:
    shapes: tuple[str, ...] = tuple(SHAPES)
    arm: str = "fp8"  # Of arms.py: fp8, bf16, fp8-te_block (Transformer Engine's blocks) …
    steps: int = 20  # Steps to time, of each switch.
    json: Path | None = None  # Write the rows here; those of other shapes and arms in the file stay.


def switched(config, switch, shape):
    """Return `config` with one switch of SWITCHES applied."""
    values = {"use_rmsnorm": True, "n_kv_head": config.n_head // SHAPES[shape][0]}
    return dataclasses.replace(config, **{field: values[field] for field in SWITCHES[switch]})


def trains(config, device) -> bool:
    """Train two steps, the second with optimizer state in memory; return False if memory runs out."""
    arms.free()
    try:
        batches = arms.make_batches(config, device)
        step = arms.build_te(config, device, batches[0])
        for _ in range(2):
            step(batches, measure.LR)
        torch.cuda.synchronize()
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False


def largest_micro_batch(fits, guess) -> int:
    """Find the largest n with fits(n) and not fits(n + 1), one by one from `guess`; 0 if none fits."""
    n = max(1, guess)
    if fits(n):
        while fits(n + 1):
            n += 1
        return n
    while n > 1:
        n -= 1
        if fits(n):
            return n
    return 0


def largest_under_limit(config, limit_gib, peak_gib, device) -> dict:
    """Find how many sequences of FIT_LENGTH tokens train under the limit.

    CUDA graphs are off: a capture that runs out of memory is hard to recover from, and graphs take hardly
    more memory (results/memory.json). peak_gib: the peak of the full-size step, for the first guess.
    """
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    tokens = config.micro_batch_size * config.seq_len * limit_gib / peak_gib
    arm = dataclasses.replace(config, seq_len=FIT_LENGTH, n_positions=FIT_LENGTH, cuda_graph="off")
    arms.free()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib / total), device)
    try:
        def fits(n):
            return trains(dataclasses.replace(arm, micro_batch_size=n), device)

        sequences = largest_micro_batch(fits, round(tokens / FIT_LENGTH))
        return {"sequences": sequences, "memory_limit_gib": min(limit_gib, total)}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        arms.free()


def measure_switch(switch, shape, options, base, baseline_step, device):
    """Measure one switch -> (row, step). baseline_step: the default's step, or None."""
    config = switched(base, switch, shape)
    figures, step = measure.measure(
        options.arm, config, device, options.steps, baseline_step=baseline_step, phases=0)
    batches = arms.make_batches(config, device)
    cache = step.model.make_kv_cache(1, config.seq_len).kv
    kept = ("ms", "slowest_ms", "tokens_per_s", "peak_gib", "cuda_graph", "loss", "parameters")
    row = {"shape": shape, "arm": options.arm, "switch": switch,
           "n_kv_head": config.n_kv_head or config.n_head,
           "speed_vs_default": figures["ratio_to_plain"] if baseline_step else 1.0}
    row |= {name: figures[name] for name in kept}
    row["profile_ms"] = timing.profile_ms(lambda: step(batches, measure.LR), device)
    row["kv_cache_bytes_per_token"] = cache.numel() * cache.element_size() // config.seq_len
    return row, step


def table(rows) -> str:
    """Return a Markdown table, a row per switch; in brackets memory against the default's."""
    titles = ["shape", "block", "step, ms", "speed", "norm kernels, ms", "peak, GiB", "parameters",
              "KV cache, KiB a token", "micro-batch that fits"]
    lines, found = [], {(row["shape"], row["arm"], row["switch"]): row for row in rows if "error" not in row}
    for (shape, arm, switch), row in found.items():
        base = found.get((shape, arm, "default"))

        def against(field, unit, digits):
            if row[field] is None:
                return ""
            change = 100 * (row[field] / base[field] - 1) if base and switch != "default" else None
            return f"{row[field] / unit:.{digits}f}" + ("" if change is None else f" ({change:+.1f} %)")

        fits = f"{row['sequences']} in {row['memory_limit_gib']:.0f} GiB" if "sequences" in row else ""
        lines.append([shape if arm == "fp8" else f"{shape}, {arm}", switch, f"{row['ms']:.2f}",
                      f"{row['speed_vs_default']:.3f}", f"{row['profile_ms']['norm']:.2f}",
                      against("peak_gib", 1, 2), f"{row['parameters'] / 1e6:.1f} M",
                      against("kv_cache_bytes_per_token", 1024, 1), fits])
    return markdown(titles, lines, left=2)


def main(argv=None):
    options = cli.parse(Options, argv, prog="bench/gqa_rmsnorm.py", description=__doc__)
    check_folder(options.json)
    for unknown in set(options.shapes) - set(SHAPES):
        raise ValueError(f"--shapes {unknown!r} is unknown; use {', '.join(SHAPES)}")
    if arms.arm_config(options.arm, TrainConfig()).model != "optimized":
        raise ValueError(f"--arm {options.arm}: only the optimized model has these switches; fp8 works")
    if options.steps < 4:
        raise ValueError(f"--steps {options.steps}: must be 4 or more; 20 works")
    device = pick_device("auto")
    real = device.type == "cuda" and not fp8.IS_REFERENCE
    print(fp8.describe() + ("" if real else ": tiny shapes, and the times mean nothing"))
    rows = Rows(options.json, ("shape", "arm", "switch"), "bench/gqa_rmsnorm.py", argv)
    for shape in options.shapes:
        base = arms.make_config(arms.SHAPES[shape], device)
        default_step, measured = None, []
        for switch in SWITCHES:
            row, step = measure_switch(switch, shape, options, base, default_step, device)
            default_step = default_step or step
            measured.append(row)
            del step
        del default_step
        for row in measured:
            if real and row["switch"] != "RMSNorm":
                config = arms.arm_config(options.arm, switched(base, row["switch"], shape))
                row |= largest_under_limit(config, SHAPES[shape][1], row["peak_gib"], device)
            rows.add(row)
    print(table([row for row in rows if row["shape"] in options.shapes and row["arm"] == options.arm]))


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/gqa_rmsnorm.py"))
