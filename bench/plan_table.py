"""The table of guide/several_gpus.md: nanote/plan.py's estimates for Llama-3 8B on many GPUs."""

from bench import arms
from bench.report import markdown
from nanote import layouts, plan
from nanote.config import TrainConfig
from nanote.memory import GIB

CLUSTERS = (  # GPU, number, GB/s per GPU between nodes
    ("H200", 8, 50.0), ("H200", 64, 50.0), ("H100", 8, 50.0), ("H100", 64, 50.0), ("H100", 64, 12.5),
    ("H100", 512, 50.0),
)
TITLES = (
    "GPUs (every column: estimate)", "GB/s between nodes", "layout", "GiB per GPU", "GB sent in the node",
    "GB sent between nodes", "links, ms", "compute, ms", "bottleneck",
)


def efficiency(run, model, rows) -> float:
    """Return the share of the data sheet's peak that one GPU reached, of the rows of speed.json."""
    ms = next(row["ms"] for row in rows if (row["shape"], row["arm"]) == ("llama3-8b", "fp8"))
    return layouts.compute_ms(run, model, layouts.Layout("ddp"), layouts.Cluster(efficiency=1.0)) / ms


def table(rows) -> str:
    """Return a Markdown table of every layout on every cluster; the recommended layout is bold."""
    run = TrainConfig(**arms.SHAPES["llama3-8b"])
    model, lines = plan.model_of(run), []
    reached = efficiency(run, model, rows)
    for gpu, gpus, network in CLUSTERS:
        cluster = layouts.Cluster(gpus=gpus, gpu=gpu, network_gbs=network, efficiency=reached)
        found = layouts.estimates(cluster, run, model)
        best = layouts.recommended(found)
        for one in found:
            if one.layout.checkpointing:
                continue
            name, gib = one.layout.name, f"{sum(one.memory.values()) / GIB:.0f}"
            lines.append([
                f"{gpus} x {gpu}", f"{network:g}", f"**{name}**" if one is best else name,
                gib if one.fits else f"{gib}, does not fit", f"{one.link_bytes / 1e9:.1f}",
                f"{one.network_bytes / 1e9:.1f}", f"{one.links_ms:.0f}", f"{one.compute_ms:.0f}",
                one.bottleneck])
    return markdown(TITLES, lines, left=len(TITLES))
