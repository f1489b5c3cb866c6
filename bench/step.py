"""Shapes and arms of the benchmark, as options of train.py, and the training of a configuration.

An arm is one way to train the same network at the same shape: "plain", "bf16", "fp8", "fp8-current-eager" …
(python benchmark_te.py --help lists them). The plain arms are in bench/plain_gpt.py; the others are
`Training`, which runs train.py's own step, with the options that the words of the arm stand for.
"""

import dataclasses
import gc
import re
from functools import partial

import torch

import train
from bench.plain_gpt import ARMS as PLAIN_ARMS
from nanote import models, parallel, recipes
from nanote.config import PRESETS, TrainConfig
from nanote.ddp import make_gradients, shard_optimizer
from nanote.loader import MicroBatch
from nanote.optimizers import make_optimizer

SHAPES = {  # options of train.py
    "124m-b32": dict(n_layer=12, n_embd=768, n_head=12, micro_batch_size=32, seq_len=1024),
    "350m-b16": dict(n_layer=24, n_embd=1024, n_head=16, micro_batch_size=16, seq_len=1024),
    "c2048": dict(n_layer=8, n_embd=2048, n_head=16, micro_batch_size=8, seq_len=2048),
    "c4096": dict(n_layer=4, n_embd=4096, n_head=32, micro_batch_size=4, seq_len=4096),
    "124m-b4": dict(n_layer=12, n_embd=768, n_head=12, micro_batch_size=4, seq_len=1024),
    "guide": dict(n_layer=4, n_embd=768, n_head=12, micro_batch_size=8, seq_len=512),
    "llama3-8b": PRESETS["llama3-8b"] | dict(preset="llama3-8b", grad_accum=1),
}
# the block "modern"; its embeddings are tied, its MLP 8/3 as wide, its KV heads by `make_config`
MODERN = dict(use_rmsnorm=True, use_rotary=True, use_qk_norm=True, activation="swiglu", bias=False)
ON_CPU = dict(n_layer=2, n_embd=64, n_head=4, n_kv_head=None, head_dim=None, n_inner=None, vocab_size=512,
              micro_batch_size=2, seq_len=32)
BLACKWELL = ("mxfp8", "nvfp4")  # recipes that need a Blackwell GPU
ARM_WORDS = {  # word in the name of a bf16 or fp8 arm -> options of train.py
    "eager": {"cuda_graph": "off"},
    "libraries": {"attention": "sdpa", "model": "optimized"},  # TE's modules, PyTorch's attention, FastAdam
    "te_modules": {"model": "optimized"},
    "sdpa": {"attention": "sdpa"},
    "te_attention": {"attention": "te"},
    "bf16_moments": {"moment_dtype": "bfloat16"},
    "float32_masters": {"param_remainders": False},
    "checkpointing": {"gradient_checkpointing": True},
    "muon": {"optimizer": "muon"},
}
ARM_NUMBERS = {"accum": "grad_accum", "loss": "loss_chunks"}  # with a number behind them: accum4
FP8_ARM_NUMBERS = {"skip_first": "fp8_skip_first", "skip_last": "fp8_skip_last"}
FP8_ARM_WORDS = {
    "bf16_head": {"fp8_lm_head": False},
    "e4m3": {"fp8_format": "e4m3"},
    "hybrid": {"fp8_format": "hybrid"},
    "current": {"fp8_recipe": "current"},
    "block": {"fp8_recipe": "block"},
    "mxfp8": {"fp8_recipe": "mxfp8"},
    "nvfp4": {"fp8_recipe": "nvfp4"},
}


@dataclasses.dataclass
class Arm:
    """The name of a bf16 or fp8 arm, taken apart: fp8-e4m3-custom has the word e4m3 and the model custom."""

    precision: str
    words: list[str]  # of ARM_WORDS, ARM_NUMBERS and those of FP8
    model: str | None  # None: the one of its words, or the default


def parse_arm(name: str) -> Arm:
    precision, *words = name.split("-")
    model = None
    for word in words:
        if word in models.MODELS:
            model = word
    return Arm(precision, [word for word in words if word != model], model)


def arm_config(name: str, config: TrainConfig) -> TrainConfig:
    """Return train.py's options for an arm, those of bf16 for plain arms; ValueError if it is unknown."""
    arm = parse_arm("bf16" if name in PLAIN_ARMS else name)
    if arm.precision not in ("bf16", "fp8"):
        raise unknown_arm(name)
    changes = {"fp8_recipe": "delayed" if arm.precision == "fp8" else "none"}
    for word in arm.words:
        options = options_of_word(word, arm.precision)
        if options is None:
            raise unknown_arm(name)
        changes |= options
    if arm.model is not None:
        changes["model"] = arm.model
    return dataclasses.replace(config, **changes)


def unknown_arm(name: str) -> ValueError:
    return ValueError(f"--arms {name!r}: unknown; use {', '.join(PLAIN_ARMS)}, or bf16 or fp8 with the "
                      "words of benchmark_te.py --help, such as fp8-current")


def options_of_word(word: str, precision: str) -> dict | None:
    """Return the options of train.py for a word in the name of an arm; None if it is unknown."""
    numbers = ARM_NUMBERS | FP8_ARM_NUMBERS if precision == "fp8" else ARM_NUMBERS
    match = re.fullmatch("([a-z_]+)([1-9][0-9]*)", word)
    if match and match[1] in numbers:
        return {numbers[match[1]]: int(match[2])}
    if precision == "fp8" and word in FP8_ARM_WORDS:
        return FP8_ARM_WORDS[word]
    return ARM_WORDS.get(word)


def make_config(options: dict, device, block="gpt2") -> TrainConfig:
    """Return train.py's options for a shape, or without a GPU those of a tiny model with the same block."""
    fields = dict(preset="gpt2-124m", vocab_size=50304) | options
    if block == "modern":
        # a quarter of the heads, but four of 12, as in the rows of results/
        kv_heads = 4 if fields["n_head"] == 12 else max(1, fields["n_head"] // 4)
        fields |= MODERN | dict(n_kv_head=kv_heads)
    if device.type != "cuda":
        fields |= ON_CPU | dict(n_kv_head=2 if block == "modern" else None)
    return TrainConfig(**fields | dict(n_positions=fields["seq_len"]))


def make_batches(config, device) -> list:
    """Return grad_accum micro-batches (inputs, labels) of random tokens, the same for every arm."""
    size = (config.grad_accum, config.micro_batch_size, config.seq_len + 1)
    windows = torch.randint(config.vocab_size, size, generator=torch.Generator().manual_seed(0)).to(device)
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def forget_models() -> None:
    """Drop TE's global FP8 state of deleted models, between models in one process.

    TE keeps their amax histories and would go on updating them. te_reference does so until Python's garbage
    collection, which comes at another time on each rank.
    """
    gc.collect()
    if recipes.HAS_TE:
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
        FP8GlobalStateManager.reset()
        for module in gc.get_objects():
            if issubclass(type(module), TransformerEngineBaseModule):  # still in use: registers itself again
                module.fp8_meta.pop(FP8GlobalStateManager.get_buffer_info(), None)


def free() -> None:
    """Release the memory of the last arm and reset the peak that PyTorch records."""
    forget_models()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def make_parts(config: TrainConfig, device: torch.device):
    """Return the model, the optimizer and the gradients of a run, as train.py makes them."""
    torch.manual_seed(config.seed)
    recipes.check_machine(config, device)
    model = train.build_model(config, device)
    optimizer = make_optimizer(model, config)
    gradients = make_gradients(model, config.grad_accum)
    shard_optimizer(optimizer, gradients)
    if config.compile:
        model.compile(mode=config.compile_mode, fullgraph=config.compile_fullgraph)
    return model, optimizer, gradients


class Training:
    """A model, its optimizer and the functions of train.make_step: `loss, norm = training(batches, lr)`.

    forward(*batch) and update() are parts of a step, launched from Python. is_graph: steps are replayed as
    CUDA graphs.
    """

    def __init__(self, config: TrainConfig, device: torch.device, batches: list):
        """batches: the micro-batches that find the first scales of delayed scaling."""
        self.config = config
        self.world_size = parallel.world_size()
        self.model, self.optimizer, self.gradients = make_parts(config, device)
        self.forward = self.model
        self.kernels = models.describe(self.model)
        divisor = config.grad_accum * self.world_size
        if recipes.uses_delayed_scaling(self.model):
            recipes.find_first_scales(self.model, batches[0], divisor)
        self.divisor = torch.tensor(float(divisor), device=device)
        self.eager = train.make_step(config, self.model, self.optimizer, self.gradients)
        self.is_graph = config.uses_cuda_graph(recipes.has_fp8_gpu(device))
        self.functions = self.eager
        if self.is_graph:
            self.functions = train.with_cuda_graphs(self.model, self.optimizer, self.eager)
        self.update = self.eager.update
        self.fp8_state = self.eager.fp8_state

    def forward_backward(self, batch, *, eager=False, **flags):
        """Accumulate the gradients of a micro-batch. Return this rank's share of the loss.

        flags: is_first_microbatch and is_last_microbatch of train.py's forward_backward.
        """
        functions = self.eager if eager else self.functions
        return functions.forward_backward(MicroBatch(batch, self.divisor), **flags)

    def __call__(self, batches, lr: float, eager=False):
        """Train one step. Return the mean loss of this rank and the gradient norm, each () on the device.

        eager: launch forward and backward pass from Python.
        """
        self.optimizer.set_lr(lr)
        loss = train.run_micro_batches(partial(self.forward_backward, eager=eager), batches)
        return loss * self.world_size, self.functions.update()
