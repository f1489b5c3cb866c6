"""The arms and sizes of bench/paired.py.

An arm is a way to train: options of train.py, and for some arms functions that bench/fp8_arms.py replaces.
The kit's arms train model_te_fast.py where it runs, but `fp8-optimized`, `fp8-current` and `fp8-block` train
Transformer Engine's modules.
"""
from dataclasses import dataclass, field

BASELINE = "bf16"  # the arm that all others are compared with


@dataclass(frozen=True)
class Arm:
    options: dict = field(default_factory=dict)  # of train.py, beside those of the size
    replaces_functions: bool = False  # bench/fp8_arms.py says which
    is_emulated: bool = False  # its GEMMs or roundings, so that its speed means nothing
    has_other_model: bool = False  # the runs of a pair may then differ in the model that they train


FAST = dict(model="fast")  # whose functions the arm replaces
ARMS = {
    BASELINE: Arm(dict(fp8_recipe="none")),
    "fp8": Arm(),
    # Transformer Engine's modules
    "fp8-optimized": Arm(dict(model="optimized"), has_other_model=True),
    "fp8-current": Arm(dict(fp8_recipe="current"), has_other_model=True),
    "fp8-block": Arm(dict(fp8_recipe="block"), has_other_model=True),
    # options of train.py
    "fp8-e4m3": Arm(dict(fp8_format="e4m3")),
    "fp8-history-1": Arm(dict(fp8_amax_history_len=1)),
    "fp8-history-16": Arm(dict(fp8_amax_history_len=16)),
    "fp8-head-bf16": Arm(dict(fp8_lm_head=False)),
    "fp8-first-bf16": Arm(dict(fp8_skip_first=1)),
    "fp8-last-bf16": Arm(dict(fp8_skip_last=1)),
    # one operand of each GEMM in FP8, the other one in BF16
    "fp8-activations": Arm(FAST, replaces_functions=True, is_emulated=True),
    "fp8-weights": Arm(FAST, replaces_functions=True, is_emulated=True),
    "fp8-gradients": Arm(FAST, replaces_functions=True, is_emulated=True),
    # both operands in BF16: FP8's kernels around the GEMMs
    "fp8-no-operand": Arm(FAST, replaces_functions=True, is_emulated=True),
    # dgrad without fast accumulation, as in Transformer Engine
    "fp8-dgrad-float32": Arm(FAST, replaces_functions=True),
    # the forward pass without it, where Transformer Engine has it
    "fp8-forward-float32": Arm(FAST, replaces_functions=True),
    # scales start at 1; else the first batch finds them
    "fp8-scales-1": Arm(replaces_functions=True),
    # the logits' gradient is rounded stochastically to E5M2
    "fp8-stochastic-logits": Arm(FAST, replaces_functions=True, is_emulated=True),
    # with --lora-rank: the weights of the base in FP8 alone
    "fp8-frozen": Arm(dict(set=(("lora_base=fp8",),))),
    # nanoGPT's own model.py: float32 weights under BF16 autocast
    "nanogpt": Arm(dict(fp8_recipe="none", model="bench/nanogpt.py:NanoGPT", dtype="float32", compile=True),
                   has_other_model=True),
}
MODERN = dict(
    activation="swiglu", use_rmsnorm=True, use_rotary=True, use_qk_norm=True, bias=False, n_kv_head=4)
SCHEDULE = dict(warmup_steps=100, eval_tokens=2_000_000)
SIZES = {  # {name: options of train.py}; a step has 131,072 tokens, one of `tiny` 512
    "124m": dict(preset="gpt2-124m", micro_batch_size=64, grad_accum=2) | SCHEDULE,
    "modern": dict(preset="gpt2-124m", micro_batch_size=64, grad_accum=2) | SCHEDULE | MODERN,
    "350m": dict(preset="gpt2-350m", micro_batch_size=32, grad_accum=4) | SCHEDULE,
    "tiny": dict(preset="tiny", n_layer=2, n_embd=64, n_head=2, seq_len=64, micro_batch_size=4, grad_accum=2,
                 warmup_steps=4, eval_tokens=512),
}
