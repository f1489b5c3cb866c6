"""What each memory switch of train.py costs and saves: GPT-2 124M and width 4,096, on a GPU.

    python bench/memory.py --json results/memory.json

Each switch alone against the defaults, in a process of its own (nothing of the one before is left in memory,
and allocator settings hold from the start): milliseconds a step (median and slowest of 20, as in
benchmark_te.py), the peak of allocated memory, and the peak that the allocator took from the GPU, which is
what an out-of-memory error is about.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from bench import speed_report  # noqa: E402
from bench import stability_report as report
from nanote import cli  # noqa: E402

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


@dataclass
class Options:
    shapes: tuple[str, ...] = ("124m-b32", "c4096")  # Of benchmark_te.py.
    switches: tuple[str, ...] = tuple(SWITCHES)
    json: Path | None = None
    """Write the rows here, after each of them; those of other shapes and switches in the file stay."""


def measure(shape, switch):
    """The figures of one switch, in this process."""
    import torch

    import benchmark_te
    from nanote import profiling

    changes = dict(SWITCHES[switch])
    config = benchmark_te.make_config(benchmark_te.SHAPES[shape] | changes, torch.device("cuda"))
    if config.offload_activations == "half":
        config.offload_activations = config.n_layer // 2
    device = torch.device("cuda")
    profiling.prepare_process(config, device)
    profiling.Profiler(config, device).begin(1)  # for --gc-interval
    benchmark_te.arm_config = lambda arm, config: config  # the options as they are
    figures, _ = benchmark_te.measure("fp8", config, device, 20, phases=False)
    return {
        "shape": shape, "switch": switch, "ms": figures["ms"], "slowest_ms": figures["slowest_ms"],
        "tokens_per_s": figures["tokens_per_s"], "cuda_graph": figures["cuda_graph"],
        "peak_gib": figures["peak_gib"], "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def table(rows) -> str:
    """Markdown table, a row a switch: for each shape ms a step (against the defaults), two peaks of memory.
    Empty: not measured, or a time of another run than the defaults', perhaps with other code."""
    found = {(row["shape"], row["switch"]): row for row in rows if "error" not in row}
    titles = ["switch"]
    for shape in Options.shapes:
        titles += [f"{shape}: ms a step", "GiB allocated", "GiB taken from the GPU"]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for switch in SWITCHES:
        cells = [switch]
        for shape in Options.shapes:
            row = found.get((shape, switch))
            if row is None:
                cells += [""] * 3
                continue
            base, ms = found.get((shape, "defaults"), {}).get("ms"), ""
            if base and row.get("defaults_ms") == base:
                change = f" ({100 * (row['ms'] / base - 1):+.1f} %)" if switch != "defaults" else ""
                ms = f"{row['ms']:.1f}{change}"
            cells += [ms, f"{row['peak_gib']:.1f}", f"{row['peak_reserved_gib']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--one"]:
        print("figures: " + json.dumps(measure(*argv[1:])))
        return
    options = cli.parse(Options, argv, prog="bench/memory.py", description=__doc__)
    report.check_folder(options.json)
    for unknown in set(options.switches) - set(SWITCHES):
        raise ValueError(f"--switches {unknown!r} is unknown; use {', '.join(map(repr, SWITCHES))}")
    if report.fp8.IS_REFERENCE:
        raise ValueError(
            "there is no GPU with Transformer Engine here, and memory on anything else means nothing"
        )
    rows = speed_report.Rows(options.json, ("shape", "switch"), argv, "bench/memory.py")
    for shape in options.shapes:
        for switch in dict.fromkeys(["defaults", *options.switches]):  # times are compared within a run
            done = subprocess.run(
                [sys.executable, __file__, "--one", shape, switch], capture_output=True, text=True, cwd=ROOT
            )
            found = [
                line.removeprefix("figures: ")
                for line in done.stdout.splitlines()
                if line.startswith("figures: ")
            ]
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
            row = json.loads(found[0]) if found else {"shape": shape, "switch": switch, "error": reason}
            if switch == "defaults":
                base = None if "error" in row else row
            rows.add(row | {"defaults_ms": base and base["ms"]})
            against = (
                f"  {row['ms'] / base['ms'] - 1:+.1%} time, {row['peak_gib'] - base['peak_gib']:+.1f} GiB"
                if base and "error" not in row
                else ""
            )
            print(
                f"{shape:9} {switch:44} "
                + (
                    row["error"]
                    if "error" in row
                    else f"{row['ms']:8.2f} ms  {row['peak_gib']:6.1f} GiB, {row['peak_reserved_gib']:6.1f} taken{against}"
                ),
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(cli.run(main, "bench/memory.py"))
