"""Map where FP8 pays: FP8 against BF16 over width and tokens per step (benchmark_te.py --sweep)."""

import time

from bench.measure import Agreement, attempt
from bench.report import Rows
from bench.step import make_config

WIDTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)  # per step
STEPS = 8  # timed, of each arm


def measure_point(width, tokens, device, is_late) -> dict:
    """Measure FP8 and BF16 at one width and number of tokens -> a row.

    Two layers and a small vocabulary, so that the blocks dominate.
    """
    shape = dict(n_layer=2, n_embd=width, n_head=width // 64, micro_batch_size=tokens // 1024, seq_len=1024,
                 vocab_size=1024)
    config, agreement = make_config(shape, device), Agreement()
    row = {"width": width, "tokens": tokens}
    for arm in ("bf16-eager", "fp8-eager", "bf16", "fp8"):
        figures = {"error": "not run: time budget"}
        if not is_late():
            figures, _ = attempt(arm, config, device, STEPS, None, agreement, warmup=3, phases=0)
        row[f"{arm}_ms"] = figures.get("ms")
        if "error" in figures:
            row["error"] = figures["error"]
    for name, suffix in (("eager", "-eager"), ("graph", "")):
        fp8_ms, bf16_ms = row[f"fp8{suffix}_ms"], row[f"bf16{suffix}_ms"]
        row[name] = bf16_ms / fp8_ms if fp8_ms and bf16_ms else None
    return row


def run_sweep(options, device, argv):
    """Measure every point that options.json does not hold yet, as far as options.time_budget goes."""
    start, rows = time.time(), Rows(options.json, ("width", "tokens"), "benchmark_te.py", argv)

    def is_late():
        return time.time() - start > options.time_budget

    widths, token_counts = (WIDTHS, TOKENS) if device.type == "cuda" else (WIDTHS[:2], TOKENS[:2])
    for width in widths:
        for tokens in token_counts:
            if rows.has({"width": width, "tokens": tokens}):
                continue
            row = measure_point(width, tokens, device, is_late)
            rows.add(row)
            shown = {name: f"{row[name]:.2f}" if row[name] else "-" for name in ("eager", "graph")}
            print(f"width {width:5} tokens {tokens:6}  eager {shown['eager']}  graph {shown['graph']}"
                  f"  {row.get('error', '')}", flush=True)
