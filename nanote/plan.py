"""Plan a run on many GPUs: estimate memory, traffic and time of each layout, and recommend one. Needs no GPU.

    python -m nanote.plan --preset llama3-8b --gpus 64
    python -m nanote.plan --preset gpt2-1.5b --gpus 16 --gpu H100 --micro-batch-size 4 --grad-accum 8

Takes every option of train.py, and those below. The layouts, each also with gradient checkpointing (gc):

    ddp     every GPU has the whole model; gradients are all-reduced once a step
    hsdp    weights, gradients and optimizer state are sharded within a node, and replicated across nodes
    fsdp    they are sharded over all GPUs

With --parallel only that one is planned, and none that train.py refuses with the other options.

Formulas and sources are in nanote/layouts.py. Latency is left out. train.py's --micro-batch-size and
--grad-accum are per GPU, so tokens per step grow with the GPUs.
"""
import dataclasses
import math
import shlex
import sys

from nanote import cli, config, fp8, models
from nanote.layouts import GPUS, Cluster, Estimate, estimates, recommended
from nanote.memory import GIB, sequence_multiple

KNOWN = {  # values of options for which tests/test_plan.py compares the memory with measurements
    "model": ["optimized"], "fp8_recipe": ["delayed", "current", "none"], "optimizer": ["adamw"],
    "fp8_param": [False], "offload_activations": [0],
}


def read_options(argv: list[str]) -> tuple[Cluster, config.TrainConfig, list[str]]:
    """Return the cluster, the options of train.py, and those of them that were given."""
    names = [cli.flag(field.name) for field in dataclasses.fields(Cluster)] + ["--help", "-h"]
    ours, given = [], []
    chosen = given
    for argument in argv:  # a value follows its option
        if argument.startswith("--") or argument == "-h":
            chosen = ours if argument.partition("=")[0].replace("_", "-") in names else given
        chosen.append(argument)
    cluster = cli.parse(Cluster, ours, prog="python -m nanote.plan", description=__doc__)
    run, *_ = config.read_options(given)
    return check(cluster, run), run, given


def check(cluster: Cluster, run) -> Cluster:
    """Return the cluster, its node no larger than itself. ValueError for what cannot be planned."""
    gpu = {name.lower(): name for name in GPUS}.get(cluster.gpu.lower())
    if gpu is None:
        raise ValueError(f"--gpu {cluster.gpu}: unknown; use one of {', '.join(GPUS)}")
    for name in ("gpus", "gpus_per_node", "link_gbs", "network_gbs", "efficiency"):
        value = getattr(cluster, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{cli.flag(name)} {value}: must be above 0; leave it out for the default")
    if cluster.efficiency > 1:
        raise ValueError(f"--efficiency {cluster.efficiency}: is a fraction of the peak; pass at most 1, "
                         "such as 0.5")
    node = min(cluster.gpus, cluster.gpus_per_node)
    if cluster.gpus % node:
        raise ValueError(f"--gpus {cluster.gpus}: not a multiple of --gpus-per-node {node}; pass "
                         f"{cluster.gpus // node * node} or {fp8.round_up(cluster.gpus, node)}")
    if run.hsdp_replicas is not None:
        raise ValueError(f"--hsdp-replicas {run.hsdp_replicas}: the plan has one on each node; leave it out")
    for name, known in KNOWN.items():
        if getattr(run, name) not in known:
            raise ValueError(f"{cli.flag(name)} {getattr(run, name)}: the plan knows its memory only for "
                             f"{' or '.join(map(str, known))}; leave the option out")
    if gpu == "A100" and run.fp8_recipe != "none":
        raise ValueError("--gpu A100: has no FP8 tensor cores; pass --fp8-recipe none, or another GPU")
    return dataclasses.replace(cluster, gpu=gpu, gpus_per_node=node)


def model_of(run):
    """Return the model's config. The vocabulary, if not given, is GPT-2's."""
    options = dataclasses.asdict(run) | {"n_positions": run.n_positions or run.seq_len,
                                         "gradient_checkpointing": False, "use_fp8": run.fp8_recipe != "none"}
    model = models.make_model_config(run.model, options)
    fp8.check_shapes(model, run.micro_batch_size, run.seq_len, run.fp8_recipe)
    return model


def table(found: list[Estimate], tokens: int) -> list[list[str]]:
    """Return rows of cells, the first of them names. `tokens`: of a step, on all GPUs."""
    rows = [["", *(one.layout.name + (" gc" if one.layout.checkpointing else "") for one in found)]]
    for part in found[0].memory:
        rows.append([f"{part}, GiB", *(f"{one.memory[part] / GIB:,.1f}" for one in found)])
    return rows + [
        ["memory at the peak, GiB", *(f"{sum(one.memory.values()) / GIB:,.1f}" for one in found)],
        ["fits", *("yes" if one.fits else "no" for one in found)],
        ["largest micro-batch", *(f"{one.largest:,}" for one in found)],
        ["sent per GPU in the node, GB", *(f"{one.link_bytes / 1e9:,.1f}" for one in found)],
        ["sent per GPU between nodes, GB", *(f"{one.network_bytes / 1e9:,.1f}" for one in found)],
        ["time on the links, ms", *(f"{one.links_ms:,.0f}" for one in found)],
        ["compute, ms", *(f"{one.compute_ms:,.0f}" for one in found)],
        ["bottleneck", *(one.bottleneck for one in found)],
        ["tokens/s, all GPUs", *(f"{1e3 * tokens / one.step_ms:,.0f}" for one in found)],
    ]


def possible(found: list[Estimate], run, given: list[str]) -> list[Estimate]:
    """Return the layouts that train.py takes with the options `given`, of those that they do not exclude."""
    names = [argument.partition("=")[0].replace("_", "-") for argument in given]
    chosen = "--parallel" in names or run.parallel != "ddp"  # of a --config
    kept, refused = [], None
    for one in found:
        name, checkpointing = one.layout.name, one.layout.checkpointing
        fixed = run.gradient_checkpointing or "--no-gradient-checkpointing" in names
        if chosen and name != run.parallel or fixed and checkpointing != run.gradient_checkpointing:
            continue
        try:
            options = {"parallel": name, "gradient_checkpointing": checkpointing}
            config.check_options(dataclasses.replace(run, **options))
            kept.append(one)
        except ValueError as error:
            refused = error
    if not kept:
        raise refused or ValueError(f"--parallel {run.parallel}: has a replica on each node, and here is "
                                    "one node; pass --parallel fsdp")
    return kept


def command(best: Estimate, run, cluster: Cluster, given: list[str]) -> str:
    """Return the command that trains in this layout."""
    nodes, options = cluster.gpus // cluster.gpus_per_node, list(given)
    if best.layout.name != run.parallel:
        options += ["--parallel", best.layout.name]
    if best.layout.name == "hsdp":
        options += ["--hsdp-replicas", str(nodes)]
    if best.layout.checkpointing and not run.gradient_checkpointing:
        options.append("--gradient-checkpointing")
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 " if nodes > 1 else ""
    return f"torchrun {several}--nproc-per-node {cluster.gpus_per_node} train.py {shlex.join(options)}"


def recommendation(found: list[Estimate], run, cluster: Cluster, given: list[str]) -> str:
    """Return one line: a layout and its command, or what would fit."""
    best, start = recommended(found), "recommended (estimate): "
    if best:
        return f"{start}{describe(best)}: {command(best, run, cluster, given)}"
    best, size = max(found, key=lambda one: one.largest), run.micro_batch_size
    if best.largest:
        accum = math.ceil(size * run.grad_accum / best.largest)
        return (f"{start}--micro-batch-size {best.largest} --grad-accum {accum}, which fits with "
                f"{describe(best)}; nothing does with --micro-batch-size {size}")
    return (f"{start}more GPUs, GPUs with more memory, a shorter --seq-len or a smaller model; nothing fits, "
            f"not even --micro-batch-size {sequence_multiple(run)}")


def describe(best: Estimate) -> str:
    return best.layout.name + (" with --gradient-checkpointing" if best.layout.checkpointing else "")


def main(argv=None):
    cluster, run, given = read_options(sys.argv[1:] if argv is None else argv)
    model = model_of(run)
    found = possible(estimates(cluster, run, model), run, given)
    _, gigabytes, link, network = GPUS[cluster.gpu]
    tokens = run.micro_batch_size * run.grad_accum * run.seq_len * cluster.gpus
    weights, nodes = models.weight_count(model), cluster.gpus // cluster.gpus_per_node
    print(f"estimate, nothing measured: {run.preset}, {weights / 1e9:,.3g} billion weights, vocabulary "
          f"{model.vocab_size:,}, fp8-recipe {run.fp8_recipe}")
    print(f"{cli.counted(nodes, 'node')} of {cluster.gpus_per_node} x {cluster.gpu} ({gigabytes} GB), NVLink "
          f"{cluster.link_gbs or link:g} GB/s, network {cluster.network_gbs or network:g} GB/s per GPU, "
          f"efficiency {cluster.efficiency:g}")
    print(f"{tokens:,} tokens per step: {run.micro_batch_size} x {run.seq_len} per micro-batch, grad-accum "
          f"{run.grad_accum}, {cli.counted(cluster.gpus, 'GPU')}\n")
    for name, *cells in table(found, tokens):
        print(f"{name:31}" + "".join(f"{cell:>11}" for cell in cells))
    print("\n" + recommendation(found, run, cluster, given))


if __name__ == "__main__":
    sys.exit(cli.run(main, "nanote/plan.py"))
