"""Measure what each memory switch of train.py costs and saves, at GPT-2 124M and width 4,096, on a GPU.

    python bench/memory.py --json results/memory.json

Each switch is measured alone against the defaults, in a separate process: memory of the one before is gone,
and allocator settings apply from the start. A row has milliseconds per step (median and slowest of 20, as in
benchmark_te.py), the peak of allocated memory, and the peak of memory that the allocator reserved on the GPU,
which is what decides about an out-of-memory error.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench.report import Rows, check_folder, markdown
from nanote import cli, fp8

SWITCHES = {  # name -> options of train.py
    "defaults": {},
    "no CUDA graph": {"cuda_graph": "off"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "gradient checkpointing, every 2nd block": {"gradient_checkpointing": True, "checkpoint_every": 2},
    "activations of half the blocks to the host": {"offload_activations": "half"},
    "BF16 moments": {"moment_dtype": "bfloat16"},
    "float32 masters": {"param_remainders": False},
    "weights in FP8": {"fp8_param": True},
    "loss in 4 chunks": {"loss_chunks": 4},
    "Transformer Engine's loss": {"fused_loss": False},
    "no CUDA graph, garbage collected by hand": {"cuda_graph": "off", "gc_interval": 1000},
    "expandable segments": {"expandable_segments": True},
    "expandable segments, no CUDA graph": {"expandable_segments": True, "cuda_graph": "off"},
}
FIGURES = "figures: "  # starts the line with which the measuring process prints its row


@dataclass
class Options:
    shapes: tuple[str, ...] = ("124m-b32", "c4096")  # Shapes of benchmark_te.py.
    switches: tuple[str, ...] = tuple(SWITCHES)
    json: Path | None = None
    """Write the rows here, after each of them; those of other shapes and switches in the file stay."""


def measure_switch(shape, switch) -> dict:
    """Measure one switch in this process -> its row."""
    # only the measuring process needs these, and importing them takes seconds
    import torch

    from bench import arms, measure
    from nanote import profiling

    device = torch.device("cuda")
    config = arms.make_config(arms.SHAPES[shape] | SWITCHES[switch], device)
    if config.offload_activations == "half":
        config.offload_activations = config.n_layer // 2
    profiling.prepare_process(config, device)
    profiling.Profiler(config, device).begin(1)  # for --gc-interval
    figures, _ = measure.measure("fp8", config, device, 20, phases=0)
    return {
        "shape": shape, "switch": switch, "ms": figures["ms"], "slowest_ms": figures["slowest_ms"],
        "tokens_per_s": figures["tokens_per_s"], "cuda_graph": figures["cuda_graph"],
        "peak_gib": figures["peak_gib"], "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def measure_in_process(shape, switch) -> dict:
    """Measure one switch in a new process; return its row, with stderr's last line as the error."""
    command = [sys.executable, __file__, "--one", shape, switch]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    for line in done.stdout.splitlines():
        if line.startswith(FIGURES):
            return json.loads(line.removeprefix(FIGURES))
    reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
    return {"shape": shape, "switch": switch, "error": reason}


def cells_of(row, base, switch) -> list[str]:
    """Return a shape's three cells of the table: ms per step, GiB allocated, GiB reserved."""
    if row is None:
        return [""] * 3
    ms = ""
    if base and row.get("defaults_ms") == base:
        change = f" ({100 * (row['ms'] / base - 1):+.1f} %)" if switch != "defaults" else ""
        ms = f"{row['ms']:.1f}{change}"
    return [ms, f"{row['peak_gib']:.1f}", f"{row['peak_reserved_gib']:.1f}"]


def table(rows) -> str:
    """Return a Markdown table with one row per switch: ms per step (against the defaults) and two peaks.

    An empty cell was not measured. A time is left out if its defaults were measured in another run, which may
    have had other code.
    """
    found = {(row["shape"], row["switch"]): row for row in rows if "error" not in row}
    titles = ["switch"]
    for shape in Options.shapes:
        titles += [f"{shape}: ms a step", "GiB allocated", "GiB taken from the GPU"]
    lines = []
    for switch in SWITCHES:
        cells = [switch]
        for shape in Options.shapes:
            base = found.get((shape, "defaults"), {}).get("ms")
            cells += cells_of(found.get((shape, switch)), base, switch)
        lines.append(cells)
    return markdown(titles, lines, left=len(titles))


def print_row(row, base):
    """Print a row in one line, against the row of the defaults (None: not measured)."""
    start = f"{row['shape']:9} {row['switch']:44} "
    if "error" in row:
        return print(start + row["error"], flush=True)
    line = f"{row['ms']:8.2f} ms  {row['peak_gib']:6.1f} GiB, {row['peak_reserved_gib']:6.1f} taken"
    if base:
        line += f"  {row['ms'] / base['ms'] - 1:+.1%} time, {row['peak_gib'] - base['peak_gib']:+.1f} GiB"
    print(start + line, flush=True)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--one"]:
        print(FIGURES + json.dumps(measure_switch(*argv[1:])))
        return
    options = cli.parse(Options, argv, prog="bench/memory.py", description=__doc__)
    check_folder(options.json)
    for unknown in set(options.switches) - set(SWITCHES):
        raise ValueError(f"--switches {unknown!r} is unknown; use {', '.join(map(repr, SWITCHES))}")
    if fp8.IS_REFERENCE:
        raise ValueError("memory is measured on a GPU with Transformer Engine, and there is none here")
    rows = Rows(options.json, ("shape", "switch"), "bench/memory.py", argv)
    for shape in options.shapes:
        for switch in dict.fromkeys(["defaults", *options.switches]):  # times are compared within a run
            row = measure_in_process(shape, switch)
            if switch == "defaults":
                base = None if "error" in row else row
            rows.add(row | {"defaults_ms": base and base["ms"]})
            print_row(row, base)


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/memory.py"))
