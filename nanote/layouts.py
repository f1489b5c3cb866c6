"""The arithmetic of nanote/plan.py: memory, traffic and time of a run in a layout, from formulas alone.

A `Layout` is ddp, fsdp or hsdp on a number of GPUs; `estimate` makes an `Estimate` of it. Everything is per
GPU, and in bytes, elements or ms. `run` is a TrainConfig, `model` the config of model_te_optimized.py.
tests/test_plan.py compares the memory of one GPU with what was measured. References: ZeRO (Rajbhandari et al.
2020, arXiv:1910.02054); ring collectives (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""
import bisect
import dataclasses
from dataclasses import dataclass

import torch

from nanote import gradients, models, parallel, roofline
from nanote.memory import sequence_multiple

# Data sheets of NVIDIA's GPUs and DGX systems: name in roofline.PEAKS, GB of memory, GB/s per GPU and
# direction of NVLink (L40S: PCIe), GB/s per GPU of the network.
GPUS = {
    "GB200": ("GB200", 186, 900, 50), "B200": ("B200", 180, 900, 50), "GH200": ("GH200", 96, 450, 50),
    "H200": ("H200", 141, 450, 50), "H100": ("H100", 80, 450, 50), "H800": ("H800", 80, 200, 50),
    "A100": ("A100-SXM4-80GB", 80, 300, 25), "L40S": ("L40S", 48, 32, 25),
}
# Layouts whose estimates differ by less count as equally fast, and the simplest is taken: latency is left
# out, and what collectives take from GEMMs that run at the same time (results/multi_gpu.json).
NEARLY = 1.15


@dataclass
class Cluster:
    gpus: int = 8  # Number of GPUs.
    gpu: str = "H200"  # GB200, B200, GH200, H200, H100, H800, A100 or L40S.
    gpus_per_node: int = 8  # GPUs of a node, which NVLink connects.
    link_gbs: float | None = None  # GB/s of NVLink per GPU and direction; None: the data sheet's.
    network_gbs: float | None = None  # GB/s between nodes per GPU and direction; None: a DGX system's.
    efficiency: float = 0.5
    """Speed of one GPU as a fraction of the data sheet's peak, which train.py logs as roofline."""


@dataclass(frozen=True)
class Layout:
    name: str  # ddp, fsdp or hsdp
    shards: int = 1  # GPUs that share one copy of weights, gradients and optimizer state
    replicas: int = 1  # copies
    checkpointing: bool = False
    one_node: bool = False  # GPUs access each other's memory: nanote/peers.py, nanote/fsdp_copies.py

    @property
    def divides_update(self) -> bool:
        return self.one_node and self.name == "ddp"


@dataclass(frozen=True)
class Estimate:
    layout: Layout
    memory: dict[str, float]  # bytes per GPU at the peak, by part
    largest: int  # micro-batch that fits; 0: none
    fits: bool
    link_bytes: float  # that a GPU sends in a step within the node, and between nodes
    network_bytes: float
    links_ms: float
    compute_ms: float
    step_ms: float
    bottleneck: str


# ---------------------------------------------------------------- memory

def block_weights(model) -> int:
    """Return the elements in the weight matrices of one block."""
    deeper = dataclasses.replace(model, n_layer=model.n_layer + 1)
    return models.weight_count(deeper) - models.weight_count(model)


def activation_bytes(model, in_fp8: bool, width: int = 2) -> int:
    """Return the bytes per token that a block keeps for backward: what fast_kernels/block.py saves.

    With w bytes per element (BF16: 2), C = n_embd, Q and K the widths of all query and all key heads:

    residuals    2·w·C, the input of both norms; GELU or SwiGLU input: w·n_inner or 2·w·n_inner
    attention    QKV w·(Q + 2·K), output w·Q, float32 log-sum-exp; with RoPE or QK-norm w·(Q + K) besides
    GEMM inputs  2·C + n_inner elements, in BF16, or 1 byte each in FP8 (transposed), and there Q for proj
    """
    q, k, inner = model.n_head * model.head_dim, model.n_kv_head * model.head_dim, model.n_inner
    new_qk = q + k if model.use_rotary or model.use_qk_norm else 0
    hidden = 2 * inner if model.activation == "swiglu" else inner
    high_precision = width * (2 * model.n_embd + hidden + 2 * q + 2 * k + new_qk) + 4 * model.n_head
    inputs = 2 * model.n_embd + inner
    return high_precision + (inputs + q if in_fp8 else width * inputs)


def memory(run, model, layout: Layout) -> dict[str, float]:
    """Return {part: bytes} of a GPU at its peak: after a forward pass, or in backward.

    With N weights of w = 2 bytes (float32: 4) and S shards (ZeRO, section 5; S = 1: all on each GPU):

    weights          w·N/S
    gradients        w·N/S in backward; of several micro-batches or ddp's replicas the buffers of
                     nanote/gradients.py at all times, by default 4·N; fsdp and hsdp keep 4·N with
                     grad_accum > 1, since gradients are reduced once a step. R replicas of ddp on one
                     machine receive 4·N·(R - 1)/R besides
    optimizer state  N/S times two moments (4 or 2 bytes each) and the master (remainder: 2 bytes; 4)
    FP8 copies       2 bytes (rowwise, transposed) per weight of a GEMM, not sharded, kept until backward; of
                     a checkpointed block while it runs, unless micro-batches share them
    gathered         fsdp, hsdp: all weights; with resharding those outside blocks and of two blocks (one is
                     prefetched); besides the gradients of two blocks
    shared buffers   see shared_buffer_bytes
    activations      activation_bytes per token and block; of a checkpointed block its input
    logits           w bytes per element, and in FP8 2 for their gradient (rowwise, transposed)
    """
    tokens, width = run.micro_batch_size * run.seq_len, 4 if run.dtype == "float32" else 2
    in_fp8, accumulates, sharded = run.fp8_recipe != "none", run.grad_accum > 1, layout.shards > 1
    count, block, head = models.weight_count(model), block_weights(model), model.vocab_size * model.n_embd
    keeps_all = [not layout.checkpointing or i % run.checkpoint_every > 0 for i in range(model.n_layer)]
    state = 2 * (4 if run.moment_dtype == "float32" else 2)
    state += (2 if run.param_remainders else 4) if width == 2 else 0
    renewed = layout.checkpointing and not accumulates  # FP8 copies, when a block is recomputed
    casts = max(1, sum(keeps_all)) if renewed else model.n_layer
    one_block, one_input = tokens * activation_bytes(model, in_fp8, width), tokens * width * model.n_embd
    if sharded:
        held = parallel.reduction_dtype(run).itemsize * count if accumulates else 0
    else:
        dtype = torch.float32 if width == 4 else torch.bfloat16
        held = count * gradients.bytes_per_parameter(run, dtype, layout.replicas)
        held = held or (width * count if accumulates else 0)
        if layout.divides_update:
            received = count * (layout.replicas - 1) // layout.replicas
            held += parallel.reduction_dtype(run).itemsize * received
    gathered = count - max(0, model.n_layer - 2) * block if run.reshard_after_forward else count
    forward = {
        "weights": width * count / layout.shards,
        "gradients": held,
        "optimizer state": state * count / layout.shards,
        "FP8 copies of weights": 2 * (casts * block + head) if in_fp8 else 0,
        "gathered": width * (gathered + 2 * block) if sharded else 0,
        "shared buffers": shared_buffer_bytes(run, model, layout),
        "activations": sum(one_block if whole else one_input for whole in keeps_all),
        "logits": tokens / run.loss_chunks * model.vocab_size * (width + (2 if in_fp8 else 0)),
    }
    if run.loss_chunks > 1:  # gradients of ChunkedLoss: hidden states, and lm_head also in float32
        forward["logits"] += one_input + (width + 4) * head
    # one block's activations, and the gradient of its hidden layer, in BF16 and in FP8
    hidden = tokens * model.n_inner * (2 if model.activation == "swiglu" else 1)
    backward = forward | {
        "gradients": max(forward["gradients"], width * count / layout.shards), "logits": 0,
        "activations": one_block + (width + 2) * hidden,
    }
    if in_fp8 and renewed:
        backward["FP8 copies of weights"] -= 2 * head  # which went backward first
    return max(forward, backward, key=lambda moment: sum(moment.values()))


def shared_buffer_bytes(run, model, layout: Layout) -> float:
    """Return the bytes of the buffers of nanote/fsdp_copies.py.

    With fsdp on one machine: two for weights, of a block and of what is outside blocks (or of two blocks if
    these are larger), and one for what the other ranks send of gradients.
    """
    if layout.shards == 1 or not layout.one_node:
        return 0
    width, block = 4 if run.dtype == "float32" else 2, block_weights(model)
    largest = max(block, models.weight_count(model) - model.n_layer * block)
    gradients_width = parallel.reduction_dtype(run).itemsize
    return width * (largest + block) + ring_bytes(gradients_width * largest, layout.shards)


def largest_micro_batch(run, model, layout: Layout, capacity: float) -> int:
    """Return the largest micro-batch whose memory is at most `capacity`; 0 if there is none."""
    multiple = sequence_multiple(run)

    def too_large(size):
        sized = dataclasses.replace(run, micro_batch_size=size)
        return sum(memory(sized, model, layout).values()) > capacity

    sizes = range(multiple, multiple * 2**20, multiple)
    return multiple * bisect.bisect_left(sizes, True, key=too_large)


# ---------------------------------------------------------------- traffic and time

def ring_bytes(size: float, gpus: int) -> float:
    """Return (N−1)/N · size: what a GPU sends in a ring all-gather or reduce-scatter of `size` bytes. An
    all-reduce is one after the other."""
    return (gpus - 1) / gpus * size


def traffic(run, model, layout: Layout) -> tuple[float, float]:
    """Return the bytes that each GPU sends in a step (among the shards, among the replicas).

    Shards: per micro-batch an all-gather of all weights, with resharding a second one of the blocks'; per
    step a reduce-scatter of the gradients (ZeRO, section 7.2). Replicas: per step an all-reduce of a shard's
    gradients; of a divided update, gradients one way and weights the other.
    """
    width, count = 4 if run.dtype == "float32" else 2, models.weight_count(model)
    reduced = count * max(width, parallel.reduction_dtype(run).itemsize)
    gathered = count + (model.n_layer * block_weights(model) if run.reshard_after_forward else 0)
    between_replicas = reduced + width * count if layout.divides_update else 2 * reduced / layout.shards
    return (ring_bytes(width * run.grad_accum * gathered + reduced, layout.shards),
            ring_bytes(between_replicas, layout.replicas))


def compute_ms(run, model, layout: Layout, cluster: Cluster) -> float:
    """Return roofline.floor_ms at the data sheet's peaks, divided by the efficiency. Checkpointing adds a
    third to forward and backward; shards, or GPUs that divide the update, divide the optimizer's part."""
    tflops, bandwidth = roofline.PEAKS[GPUS[cluster.gpu][0]]
    peaks = {"bf16_tflops": tflops, "fp8_tflops": 2 * tflops, "copy_tbs": bandwidth}
    sequences, in_fp8 = run.micro_batch_size * run.grad_accum, run.fp8_recipe != "none"
    passes = roofline.floor_ms(model, sequences, run.seq_len, in_fp8, peaks, optimizer_bytes=0)
    update = roofline.floor_ms(model, 0, 0, in_fp8, peaks, roofline.optimizer_bytes(run))
    passes *= 1 + layout.checkpointing / 3 / run.checkpoint_every
    parts = layout.replicas if layout.divides_update else layout.shards
    return (passes + update / parts) / cluster.efficiency


def estimate(cluster: Cluster, run, model, layout: Layout) -> Estimate:
    """Return the estimate of a layout, for links that work while the GPU computes.

    Rings over several nodes leave each through all its network adapters at once: one in gpus_per_node bytes
    crosses the network, at the same time as the others cross NVLink. The replicas of hsdp are one GPU per
    node: all their bytes cross the network, after those of the shards have crossed NVLink.

    A data sheet's GB is taken as 10⁹ bytes. GPUs report about 7 % more: room for the CUDA context, NCCL's
    buffers, fragmentation and the error of the estimate.
    """
    _, gigabytes, link, network = GPUS[cluster.gpu]
    in_node, between = traffic(run, model, layout)
    if layout.name != "hsdp":
        sent = in_node + between
        between = sent / cluster.gpus_per_node if cluster.gpus > cluster.gpus_per_node else 0
        in_node = sent - between
    nvlink_ms = in_node / (cluster.link_gbs or link) / 1e6
    network_ms = between / (cluster.network_gbs or network) / 1e6
    links_ms = nvlink_ms + network_ms if layout.name == "hsdp" else max(nvlink_ms, network_ms)
    parts, compute = memory(run, model, layout), compute_ms(run, model, layout, cluster)
    bottleneck = "compute"
    if links_ms > compute:
        bottleneck = "network" if network_ms > nvlink_ms else "NVLink"
    return Estimate(
        layout=layout, memory=parts, fits=sum(parts.values()) <= 1e9 * gigabytes,
        largest=largest_micro_batch(run, model, layout, 1e9 * gigabytes), link_bytes=in_node,
        network_bytes=between, links_ms=links_ms, compute_ms=compute, step_ms=max(compute, links_ms),
        bottleneck=bottleneck)


def estimates(cluster: Cluster, run, model) -> list[Estimate]:
    """Return the estimates of all layouts, the simplest first."""
    node = cluster.gpus_per_node
    one_node = cluster.gpus == node
    layouts = []
    for gc in (False, True):
        layouts.append(Layout("ddp", 1, cluster.gpus, gc, one_node))
        if not one_node:
            layouts.append(Layout("hsdp", node, cluster.gpus // node, gc))
        layouts.append(Layout("fsdp", cluster.gpus, 1, gc, one_node))
    return [estimate(cluster, run, model, layout) for layout in layouts]


def recommended(found: list[Estimate]) -> Estimate | None:
    """Return the fastest layout that fits, the simplest of those that are nearly as fast."""
    fitting = [one for one in found if one.fits]
    fastest = min((one.step_ms for one in fitting), default=0)
    return next((one for one in fitting if one.step_ms <= NEARLY * fastest), None)
