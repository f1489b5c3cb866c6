"""Measure full fine-tuning beside transformers' own model, on a GPU: tokens/s of published shapes. And
adapters beside weights that are frozen in FP8, beside PEFT's: memory and tokens/s.

    python bench/finetune.py --json results/finetune.json
    python bench/finetune.py --settings qwen2.5-0.5b-llmq --arms fp8 --steps 10
    python bench/finetune.py --settings llama-3.1-8b llama-3-70b --json results/finetune.json

Weights are random, and the same in both. Peer: `AutoModelForCausalLM.from_config` in BF16, torch.compile,
PyTorch's fused AdamW, gradients clipped at 1.0. So its moments are BF16, and it has no float32 masters. This
kit has masters, and float32 moments unless `moment_dtype` of a row says bfloat16.

- transformers-sdpa, transformers-flash_attention_4    the peer, the second if it and flash-attn-4 are there
- peft-sdpa, peft-flash_attention_4                    that model with PEFT's LoRA of the same rank and layers
- bf16, fp8, fp8-loss4 …                               this kit: the arms of benchmark_te.py --help
- …-adapters                                           the edit lora: trains adapters, the rest is in BF16
- …-frozen, …-frozen_transposes                        the rest is in FP8 alone, without and with transposes

The kit's arms are timed in turns with the faster of the peers: `ratio_to_transformers` is the peer's median
step over theirs. Llama-3 8B fills a GPU, so there each arm is timed alone. `attention_kernels` are the names
of the kernels in a profile of one step. Numerics are checked before anything is timed: equal weights have
equal losses and gradient norms.

Arms that train adapters do less work, so their peer is PEFT: LoRA of rank 16 beside all linear layers of the
blocks, in BF16 (`autocast_adapter_dtype=False`; PEFT's default is float32), compiled and trained as above,
from the same base and adapters. q, k and v share one matrix a here, and gate and up; in PEFT each has its
own, so `trained_parameters` differ. `ratio_to_peft` is the faster peer's median step over an arm's, and
`ratio_to_full` the speed over that of the fastest arm that trains all weights. llama-3-70b has no peer.

The settings …-llmq are llmq's, and have no peer here: sequence length 1,024, 524,288 tokens a step, BF16
moments, micro-batches of 32 (0.5B) and 16 (1.5B). `ratio_to_llmq` is the speed over its rates on one H100,
from "Speed" in README.md and benchmarks/H100x1.md of https://github.com/IST-DASLab/llmq, commit b77d969.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import copy
import dataclasses
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

import train
from bench import edits, hf_models, measure
from bench.plain_gpt import ARMS as PLAIN_ARMS
from bench.plain_gpt import PlainTraining, make_adamw
from bench.report import Rows
from bench.step import Training, arm_config, free, make_batches
from nanote import models
from nanote.command import parse, require_at_least, run_command
from nanote.config import TrainConfig
from tools import adapter_weights, hf_weights

RATIO = "ratio_to_transformers"
RATIO_TO_PEFT = "ratio_to_peft"


@dataclass
class Setting:
    model: str  # of hf_models.MODELS
    micro_batch_size: int
    seq_len: int = 4096
    grad_accum: int = 1
    moment_dtype: str = "float32"  # of this kit
    peer: Literal["in turns", "alone", "none"] = "in turns"  # how transformers' model is timed
    times_peft: bool = True  # whether arms that train adapters take turns with PEFT
    arms: tuple[str, ...] = ("bf16", "fp8")
    llmq_rates: dict = dataclasses.field(default_factory=dict)  # {precision: llmq's tokens/s on one H100}


LLMQ = dict(seq_len=1024, moment_dtype="bfloat16", peer="none", times_peft=False)
SETTINGS = {
    "qwen2.5-0.5b": Setting("qwen2.5-0.5b", 4),
    "qwen2.5-1.5b": Setting("qwen2.5-1.5b", 2),
    "llama-3.2-1b": Setting("llama-3.2-1b", 2),
    "llama-3-8b": Setting("llama-3-8b", 1, moment_dtype="bfloat16", peer="alone"),
    "llama-3.1-8b": Setting(
        "llama-3.1-8b", 1, moment_dtype="bfloat16", peer="none",
        arms=("fp8", "fp8-frozen", "fp8-frozen_transposes", "fp8-checkpointing-frozen",
              "fp8-checkpointing-loss8-frozen")),
    "llama-3-70b": Setting(
        "llama-3-70b", 1, peer="none", times_peft=False,
        arms=("fp8-checkpointing-frozen", "fp8-checkpointing-loss8-frozen")),
    "qwen2.5-0.5b-llmq": Setting(
        "qwen2.5-0.5b", 32, grad_accum=16, llmq_rates={"fp8": 164e3, "bf16": 149e3}, **LLMQ),
    "qwen2.5-1.5b-llmq": Setting(
        "qwen2.5-1.5b", 16, grad_accum=32, llmq_rates={"fp8": 73e3, "bf16": 59e3}, **LLMQ),
}
ON_CPU = dict(micro_batch_size=2, seq_len=32)
# {word that ends the name of an arm: field lora_base of the edit lora}
LORA_BASES = {"adapters": "bf16", "frozen": "fp8", "frozen_transposes": "fp8_and_transpose"}
RANK = 16  # of the adapters
ALPHA = 32
# learning rate of the adapters' first steps, which must lower the loss; measure.LR is too small for that
LORA_LR = 2.0**-9


@dataclass
class Options:
    settings: tuple[Literal[tuple(SETTINGS)], ...] = tuple(SETTINGS)  # Models and sequence lengths.
    # Of this kit; python benchmark_te.py --help lists them. None: those of each setting.
    arms: tuple[str, ...] | None = None
    steps: int = 60  # Steps to time, of each arm.
    compile: bool = True  # torch.compile transformers' model.
    json: Path | None = None  # Write the rows here; those of other settings in the file stay.


# ---------------------------------------------------------------- transformers' model

class TransformersTraining(PlainTraining):
    """The training of a model of transformers: its own loss, clipping, AdamW."""

    def forward(self, input_ids, labels):
        # labels are shifted already
        return self.net(input_ids=input_ids, labels=labels, shift_labels=labels, use_cache=False).loss


def attention_names() -> list[str]:
    """Return the attention implementations of transformers to measure."""
    import transformers

    names = ["sdpa"]
    is_available = getattr(transformers.utils, "is_flash_attn_4_available", None)  # older ones have no such
    if is_available is not None and is_available():
        names.append("flash_attention_4")
    return names


def make_peer(hf_config, attention: str, compiles: bool, config, device, batches=None):
    """Make the TransformersTraining that begins with the weights of this kit's arms.

    Args:
        hf_config: transformers' config of the model.
        attention: its implementation, of `attention_names`.
        config: train.py's options of the same network.
        batches: not used; `measure.measure` passes them to every training that it makes.
    """
    model = make_transformers_model(hf_config, attention, device)
    copy_weights(first_weights(config, device), model, config)
    return train_transformers_model(model, attention, compiles, config, device)


def make_transformers_model(hf_config, attention: str, device):
    """Return a new model of transformers, in BF16 on a GPU."""
    import transformers

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hf_config = copy.deepcopy(hf_config)  # the model keeps it, and its attention is a field of it
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=attention)


def train_transformers_model(model, attention: str, compiles: bool, config, device) -> TransformersTraining:
    """Return the training of a model of transformers."""
    import transformers

    optimizer = make_adamw(model, config)
    net = torch.compile(model, dynamic=False) if compiles else model
    training = TransformersTraining(model.train(), net, optimizer, config, device)
    training.kernels = f"transformers {transformers.__version__}, {attention}"
    return training


def first_weights(config, device) -> dict[str, torch.Tensor]:
    """Return {name: weight} of this kit's model before its first step."""
    torch.manual_seed(config.seed)
    return train.build_model(config, device).state_dict()


@torch.no_grad()
def copy_weights(weights: dict, peer, config) -> None:
    """Copy the weights of this kit's model to transformers' model, by the names of tools/export_hf.py."""
    parameters = dict(peer.named_parameters())
    for spec in hf_weights.weight_specs(measure.model_config_of(config), config.vocab_size):
        for name, part in hf_weights.parts_of_weight(weights, spec):
            parameters.pop(name).copy_(part)
    if parameters:
        raise RuntimeError(f"transformers' model has other parameters: {', '.join(parameters)}")


def attention_kernels(training, batches) -> list[str]:
    """Return the names of the attention kernels that a step launches, from a profile of it; on a CPU, of
    PyTorch's operations."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        training(batches, measure.LR)
        if on_gpu:
            torch.cuda.synchronize()
    device_type = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    names = {event.key for event in profile.key_averages() if event.device_type == device_type}
    # names of torch.compile's own kernels, triton_…, list the operations beside them
    return sorted(name for name in names if re.match("(?!triton_).*(flash|fmha|sdpa|attention)", name, re.I))


# ---------------------------------------------------------------- adapters

def split_arm(arm: str) -> tuple[str, str | None]:
    """Return an arm without its word of LORA_BASES, and that word or None."""
    rest, _, word = arm.rpartition("-")
    return (rest, word) if word in LORA_BASES else (arm, None)


def trains_adapters(arm: str) -> bool:
    return split_arm(arm)[1] is not None


def write_edit(config, lora_base: str, device, folder: Path) -> TrainConfig:
    """Write the model file of the edit lora to a folder. Return the options that train it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, _ = models.pick_model(dataclasses.asdict(config), device, dtype)
    (folder / model).mkdir(exist_ok=True)
    path = edits.edited_file(model, "lora", folder / model)
    settings = ((f"lora_base={lora_base}",), (f"lora_rank={RANK}",), (f"lora_alpha={ALPHA}",))
    return dataclasses.replace(config, model=f"{path}:{edits.CLASSES[model]}", set=settings)


def measure_adapters(arm: str, config, timing, folder: Path, peer=None, agreement=None):
    """Measure an arm that trains adapters -> (figures, training). peer: the training that takes turns with
    it."""
    rest, word = split_arm(arm)
    config = write_edit(arm_config(rest, config), LORA_BASES[word], timing.device, folder)
    return measure.measure(arm, config, Training, timing, peer, agreement)


def make_peft(hf_config, attention: str, compiles: bool, config, device, batches=None):
    """Make the TransformersTraining of PEFT's adapters that begins with the weights and adapters of this
    kit's arms. config: of `write_edit`. The others, `batches` too, are those of `make_peer`."""
    import peft

    model = make_transformers_model(hf_config, attention, device)
    weights = first_weights(config, device)
    copy_weights(weights, model, config)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear")
    wrapper = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)  # changes the model's layers
    adapters = adapter_weights.Adapters(weights, RANK, ALPHA)
    tensors = dict(adapter_weights.peft_tensors(adapters, measure.model_config_of(config), config.vocab_size))
    peft.set_peft_model_state_dict(wrapper, tensors)
    training = train_transformers_model(model, attention, compiles, config, device)
    training.kernels = f"peft {peft.__version__}, {training.kernels}"
    return training


def describe_adapters(training) -> dict:
    """Return what a row of adapters says beside others. Its mfu would count wgrad GEMMs of all weights."""
    trained = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    return {"trained_parameters": trained, "lora_rank": RANK, "mfu": None}


# ---------------------------------------------------------------- rows

def train_config(setting: Setting, hf_config) -> TrainConfig:
    """Return train.py's options for a setting, in BF16."""
    return TrainConfig(
        **hf_models.options_of(hf_config), micro_batch_size=setting.micro_batch_size, seq_len=setting.seq_len,
        grad_accum=setting.grad_accum, moment_dtype=setting.moment_dtype, fp8_recipe="none")


def check_arm(arm: str) -> None:
    """Raise ValueError for an arm that is unknown, or another network."""
    arm, _ = split_arm(arm)
    if arm in PLAIN_ARMS:
        raise ValueError(f"--arms {arm}: PlainGPT has no biases of q, k and v alone; use bf16 or fp8")
    arm_config(arm, TrainConfig())


def compare_with_llmq(setting: Setting, arm: str, figures: dict) -> dict:
    """Return llmq's rate in the precision of an arm, and the speed over it; {} if there is none."""
    precision = arm.partition("-")[0]
    if precision not in setting.llmq_rates or "tokens_per_s" not in figures:
        return {}
    rate = setting.llmq_rates[precision]
    return {"llmq_tokens_per_s": rate, "ratio_to_llmq": figures["tokens_per_s"] / rate}


@dataclass
class Peer:
    """What the kit's arms are compared with."""

    name: str  # of its rows, without the attention
    make: Callable  # returns its training, from (attention, compiles, config, device, batches)
    config: TrainConfig  # train.py's options of the same network
    compiles: bool  # by torch.compile
    takes_turns: bool  # with each arm of the kit; else each is timed alone
    describe: Callable = lambda training: {}  # returns what its rows say besides, from its training


def measure_peer(peer: Peer, timing, agreement):
    """Measure a peer with each attention -> (figures of each, the training that takes turns or None)."""
    fastest = None
    fastest_ms = None
    all_figures = []
    for attention in attention_names():
        arm = f"{peer.name}-{attention}"
        make = partial(peer.make, attention, peer.compiles)
        figures, training = measure.attempt(
            measure.measure, arm, peer.config, make, timing, None, agreement)
        figures |= {"attention": attention, "compiled": peer.compiles}
        if training is not None:
            dtype = next(training.model.parameters()).dtype  # AdamW's moments have it, too
            figures["moment_dtype"] = str(dtype).removeprefix("torch.")
            figures["attention_kernels"] = attention_kernels(
                training, make_batches(peer.config, timing.device))
            figures |= peer.describe(training)
            if fastest_ms is None or figures["ms"] < fastest_ms:
                fastest_ms = figures["ms"]
                fastest = training if peer.takes_turns else None
        del training  # or its memory would be taken while the next one is measured
        all_figures.append(figures)
    for figures in all_figures:
        if "ms" in figures:
            figures[timing.ratio] = fastest_ms / figures["ms"]
    return all_figures, fastest


def measure_setting(setting: Setting, hf_config, options: Options, timing):
    """Measure transformers' model and this kit's arms. Yields the figures of each."""
    torch._dynamo.config.recompile_limit = 64  # for a peer whose layers have graph breaks
    arms = setting.arms if options.arms is None else options.arms
    lora_arms = [arm for arm in arms if trains_adapters(arm)]
    full_arms = [arm for arm in arms if not trains_adapters(arm)]
    tokens_per_s = []  # of the arms that train all weights
    # `--arms` without a value measures transformers' model alone
    if full_arms or not arms:
        for figures in measure_full(setting, hf_config, full_arms, options, timing):
            if figures["arm"] in full_arms and "tokens_per_s" in figures:
                tokens_per_s.append(figures["tokens_per_s"])
            yield figures
    if lora_arms:
        for figures in measure_lora(setting, hf_config, lora_arms, options, timing):
            if figures["arm"] in lora_arms and "tokens_per_s" in figures and tokens_per_s:
                figures["ratio_to_full"] = figures["tokens_per_s"] / max(tokens_per_s)
            yield figures


def measure_full(setting: Setting, hf_config, arms: list[str], options: Options, timing):
    """Measure transformers' model and the arms that train all weights. Yields the figures of each."""
    config = train_config(setting, hf_config)
    peer = None
    if setting.peer != "none":
        takes_turns = setting.peer == "in turns"
        peer = Peer("transformers", partial(make_peer, hf_config), config, options.compile, takes_turns)

    def measure_arm(arm, baseline, agreement):
        figures, training = measure.attempt(measure.measure_arm, arm, config, timing, baseline, agreement)
        return figures | compare_with_llmq(setting, arm, figures), training

    yield from measure_beside(peer, arms, measure_arm, config, timing, measure.Agreement())


def measure_lora(setting: Setting, hf_config, arms: list[str], options: Options, timing):
    """Measure PEFT and the arms that train adapters. Yields the figures of each."""
    timing = dataclasses.replace(timing, ratio=RATIO_TO_PEFT)
    config = train_config(setting, hf_config)
    peer = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if setting.times_peft:
            in_bf16 = write_edit(config, "bf16", timing.device, folder)
            peer = Peer("peft", partial(make_peft, hf_config), in_bf16, options.compile, takes_turns=True,
                        describe=describe_adapters)

        def measure_arm(arm, baseline, agreement):
            figures, training = measure.attempt(
                measure_adapters, arm, config, timing, folder, baseline, agreement)
            if training is not None:
                figures |= describe_adapters(training)
            return figures, training

        yield from measure_beside(peer, arms, measure_arm, config, timing, measure.Agreement(lr=LORA_LR))


def measure_beside(peer: Peer | None, arms: list[str], measure_arm: Callable, config, timing, agreement):
    """Measure a peer, if there is one, and arms of the kit. Yields the figures of each.

    measure_arm: (arm, the training that takes turns with it or None, agreement) -> (figures, training).
    config: train.py's options of the arms.
    """
    torch._dynamo.reset()  # or torch.compile reaches its recompile limit
    batches = make_batches(config, timing.device)
    baseline = None
    peer_ms = None
    if peer is not None:
        peer_figures, baseline = measure_peer(peer, timing, agreement)
        peer_ms = min((figures["ms"] for figures in peer_figures if "ms" in figures), default=None)
        yield from peer_figures
    for arm in arms:
        figures, training = measure_arm(arm, baseline, agreement)
        if training is not None:
            figures["attention_kernels"] = attention_kernels(training, batches)
            if baseline is None and peer_ms is not None:
                figures[timing.ratio] = peer_ms / figures["ms"]
        del training
        yield figures | {"moment_dtype": config.moment_dtype, "in_turns": baseline is not None}


def main(argv=None) -> None:
    options = parse(Options, argv, "bench/finetune.py", __doc__)
    require_at_least(4, options, "steps")
    device = models.pick_device("auto")
    is_tiny = device.type != "cuda"
    if is_tiny:
        print("no GPU: tiny shapes, and the times mean nothing")
    rows = Rows(options.json, ("setting", "arm"), "bench/finetune.py", argv)
    timing = measure.Timing(device, options.steps, phases=0, ratio=RATIO)
    for arm in options.arms or ():
        check_arm(arm)
    for name in options.settings:
        setting = SETTINGS[name]
        if is_tiny:
            setting = dataclasses.replace(setting, **ON_CPU, grad_accum=min(2, setting.grad_accum))
        hf_config = hf_models.hf_config(setting.model, is_tiny)
        labels = {"setting": name, "model": setting.model, "micro_batch_size": setting.micro_batch_size,
                  "seq_len": setting.seq_len}
        for figures in measure_setting(setting, hf_config, options, timing):
            rows.add(labels | figures)
        free()


if __name__ == "__main__":
    sys.exit(run_command(main, "bench/finetune.py"))
