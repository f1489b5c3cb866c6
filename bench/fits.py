"""Count the GPU memory of fine-tuning, and print the table of guide/fine_tuning.md. Nothing is measured.

    python bench/fits.py

One sequence of 4,096 tokens a step, with gradient checkpointing. Bytes per parameter:

- full      14: BF16 weight 2, BF16 gradient 2, the remainder of the float32 master 2, two float32 moments 8
            (two BF16 moments: 4). And 2 in GEMMs, whose weights have an E4M3 copy and its transpose
- frozen    1 in GEMMs of the blocks and in an untied head, which stay in E4M3 alone (2 with transposes kept).
            2 in embeddings, norms and biases, which stay in BF16; a tied head is quantized, too: 2 more
- adapters  14, of rank 16 beside all GEMMs of the blocks, as in the edit lora

Activations: the two BF16 inputs of each block, the residual and the branch to be added. Then the larger of
the logits and one block: logits in BF16, and their gradient twice in FP8; in a block the input of each GEMM
twice in FP8, its output in BF16, and as much for their gradients. 1 GiB is for CUDA and workspaces.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import hf_models
from bench.report import markdown
from nanote.models import make_model_config
from tools import hf_weights

GPUS = (24, 48, 80, 141)  # GiB
TOKENS = 4096
RANK = 16  # of the adapters
WEIGHT = 2  # bytes, in BF16
GRADIENT = 2  # bytes, in BF16
REMAINDER = 2  # bytes
FP8_COPIES = 2  # bytes, E4M3 and its transpose
OTHER = 2**30  # bytes


@dataclass
class Sizes:
    """Numbers of parameters, and what activations depend on."""

    blocks: int  # in GEMMs of the blocks
    embeddings: int
    head: int  # also if it is the embedding
    vectors: int  # norms and biases
    config: object  # of the optimized model

    @property
    def total(self) -> int:
        head = 0 if self.config.tie_embeddings else self.head
        return self.blocks + self.embeddings + head + self.vectors


def sizes_of(config) -> Sizes:
    """Return the sizes of a config of the optimized model."""
    sizes = Sizes(blocks=0, embeddings=0, head=config.vocab_size * config.n_embd, vectors=0, config=config)
    for spec in hf_weights.weight_specs(config, config.vocab_size):
        number = math.prod(spec.shape)
        if spec.columns is None:
            sizes.vectors += number
        elif spec.name.startswith("blocks."):
            sizes.blocks += number
        elif spec.name in ("wte.weight", "wpe.weight"):
            sizes.embeddings += number
    return sizes


def published(name: str) -> Sizes:
    """Return the sizes of one of hf_models.MODELS."""
    options = hf_models.options_of(hf_models.hf_config(name))
    return sizes_of(make_model_config("optimized", options))


def full(sizes: Sizes, moment: int = 4) -> int:
    """Return the bytes of weights, gradients and optimizer. moment: bytes of one of AdamW's two moments."""
    per_parameter = WEIGHT + GRADIENT + REMAINDER + 2 * moment
    return per_parameter * sizes.total + FP8_COPIES * (sizes.blocks + sizes.head)


def frozen(sizes: Sizes, keeps_transpose: bool = False) -> int:
    """Return the bytes of a model that is frozen in FP8 but for its adapters."""
    frozen_weight = 2 if keeps_transpose else 1
    head = FP8_COPIES if sizes.config.tie_embeddings else frozen_weight
    total = frozen_weight * sizes.blocks + head * sizes.head + WEIGHT * (sizes.embeddings + sizes.vectors)
    return total + adapters(sizes)


def adapters(sizes: Sizes) -> int:
    """Return the bytes of the edit lora's adapters, which are trained."""
    values_per_rank = sum(map(sum, gemms_of_block(sizes.config)))
    number = sizes.config.n_layer * RANK * values_per_rank
    return (WEIGHT + GRADIENT + REMAINDER + 2 * 4) * number


def gemms_of_block(config) -> list[tuple[int, int]]:
    """Return the sizes of input and output of qkv, proj, fc1 (gated) and fc2."""
    width = config.n_head * config.head_dim
    qkv = width + 2 * config.n_kv_head * config.head_dim
    return [(config.n_embd, qkv), (width, config.n_embd), (config.n_embd, 2 * config.n_inner),
            (config.n_inner, config.n_embd)]


def activations(sizes: Sizes, tokens: int = TOKENS) -> int:
    """Return the bytes of activations with gradient checkpointing."""
    config = sizes.config
    inputs_of_blocks = 2 * 2 * config.n_embd * config.n_layer
    block = 0
    for input_size, output_size in gemms_of_block(config):
        block += 2 * (2 * input_size + 2 * output_size)
    logits = (2 + 2) * config.vocab_size
    return tokens * (inputs_of_blocks + max(block, logits))


def cell(state: int, sizes: Sizes) -> str:
    """Return the GiB of a way to train, and the smallest GPU that has as many. state: the rest's bytes."""
    gib = (state + activations(sizes) + OTHER) / 2**30
    smallest = next((gpu for gpu in GPUS if gib <= gpu), "–")
    return f"{gib:.1f} / {smallest}"


def table() -> str:
    rows = []
    for name in hf_models.MODELS:
        sizes = published(name)
        states = [full(sizes), full(sizes, moment=2), frozen(sizes), frozen(sizes, keeps_transpose=True)]
        rows.append([name, *(cell(state, sizes) for state in states)])
    titles = ["model", "full", "full, BF16 moments", "frozen, adapters", "frozen, transposes kept, adapters"]
    return markdown(titles, rows)


if __name__ == "__main__":
    print(table())
