"""Attention kernels: their correctness against float64 and their time, for benchmark_attention.py.

A kernel is a function of a Shape that returns attend(q, k, v), with q (B, S, heads, D) and k, v (B, S, KV
heads, D) -> (B, S, heads, D).
"""

import math
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.measure import spans_ms, stamp
from bench.plain_gpt import attention_by_hand
from nanote import recipes
from nanote.config import in_a_line
from nanote.engine import DelayedScaling, te

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# relative errors above these are mistakes, not rounding (FP8 values are up to 12 % apart)
LIMITS = {"kernel": 0.02, "fp8": 0.1}


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self):
        return "x".join(str(n) for n in vars(self).values())

    @staticmethod
    def of(text, option):
        """Parse "8x2048x12x12x64"; ValueError names the option."""
        if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*){4}", text):
            raise ValueError(f"{option} {text!r}: must be batch x length x heads x KV heads x head width; "
                             "8x2048x12x12x64 works")
        shape = Shape(*map(int, text.split("x")))
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{option} {text!r}: KV heads must divide {shape.heads} heads")
        return shape

    def flops(self):
        """Return the FLOPs of causal attention's GEMMs (forward, backward, both).

        Two GEMMs forward, each half of B·H·S²·D multiply-adds, and five backward, one of which repeats one
        of the forward pass: the convention of FlashAttention-2 (Dao 2023).
        """
        forward = 4 * self.batch * self.heads * self.length ** 2 * self.head_dim // 2
        return forward, forward * 5 // 2, forward * 7 // 2


def by_hand(shape):
    """Textbook attention, which stores the S x S matrices of all heads."""
    return lambda q, k, v: attention_by_hand(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def sdpa(shape, backend=None):
    def attend(q, k, v):
        with sdpa_kernel(backend) if backend else nullcontext():
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                enable_gqa=shape.heads != shape.kv_heads,
            ).transpose(1, 2)
    return attend


def te_attention(shape, recipe=None):
    module = te.DotProductAttention(
        shape.heads, shape.head_dim, num_gqa_groups=shape.kv_heads, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type="causal")

    def attend(q, k, v):
        with te.autocast(enabled=True, recipe=recipe) if recipe else nullcontext():
            return module(q, k, v).view(q.shape)  # TE returns (B, S, heads·D)
    return attend


def te_attention_fp8(shape):
    """Both GEMMs in FP8 (cuDNN), the casts of q, k, v and of the gradient included."""
    return te_attention(shape, DelayedScaling(amax_history_len=16, fp8_dpa=True))


def flash_4(shape):
    from flash_attn.cute import flash_attn_func  # optional package
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0]  # [1] is the log-sum-exp


KERNELS = {
    "by hand": by_hand, "SDPA, PyTorch's choice": sdpa,
    f"{'te_reference' if recipes.IS_REFERENCE else 'te'}.DotProductAttention": te_attention,
}
if HAS_GPU:
    KERNELS |= {
        "SDPA, FlashAttention 2": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
        "SDPA, cuDNN": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "flash-attn 4": flash_4,
        "te.DotProductAttention, FP8": te_attention_fp8,
    }


def reference(q, k, v, grad):
    """Compute causal attention in float64, of the last sequence and the last KV head, where a kernel that
    mixes up heads or sequences is wrong.

    Returns that slice of (out, dq, dk, dv): (S, query heads, D) twice and (S, 1, D) twice.
    """
    group = q.shape[2] // k.shape[2]
    q, grad = q[-1, :, -group:].detach().double().requires_grad_(), grad[-1, :, -group:].double()
    k, v = (t[-1, :, -1].detach().double().requires_grad_() for t in (k, v))
    outs = []
    for head in range(group):  # one at a time: in float64 an S x S matrix is large
        outs.append(attention_by_hand(*(t[None, None] for t in (q[:, head], k, v)))[0, 0])
        outs[-1].backward(grad[:, head])
    return torch.stack([out.detach() for out in outs], dim=1), q.grad, k.grad[:, None], v.grad[:, None]


def one_pass(attend, inputs, grad):
    """Run forward and backward -> ((out, dq, dk, dv), three stamps)."""
    start = stamp(DEVICE)
    out = attend(*inputs)
    middle = stamp(DEVICE)
    grads = torch.autograd.grad(out, inputs, grad)
    return (out.detach(), *grads), (start, middle, stamp(DEVICE))


def time_passes(attend, sets):
    """Time passes over sets of (inputs, gradient of the output) in turn.

    Returns a row's fields: medians in ms, and the GiB that a pass needs beyond its inputs.
    """
    start, warm = time.perf_counter(), 0
    # the first passes compile, autotune and allocate, and the clock rises
    while warm < 3 or HAS_GPU and time.perf_counter() - start < 0.1:
        spans_ms(one_pass(attend, *sets[warm % len(sets)])[1])  # waits for the GPU
        warm += 1
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    stamps = []
    for i in range(20 if HAS_GPU else 3):
        if HAS_GPU:
            torch.cuda._sleep(4_000_000)  # cycles, about 2 ms, in which Python queues the pass
        stamps.append(one_pass(attend, *sets[i % len(sets)])[1])
    forward, backward = (median(column) for column in zip(*map(spans_ms, stamps)))
    both = median(spans_ms([first, last])[0] for first, _, last in stamps)
    gib = (torch.cuda.max_memory_allocated() - before) / 2**30 if HAS_GPU else None
    return {"forward_ms": forward, "backward_ms": backward, "both_ms": both, "peak_gib": gib}


def random_sets(shapes):
    """Draw inputs of these shapes and the gradient of an output of the first one's shape, in BF16: as many
    sets as fill the L2 cache twice, so that no pass finds its inputs there."""
    cache = torch.cuda.get_device_properties().L2_cache_size if HAS_GPU else 0
    count = min(32, 2 + 2 * cache // (2 * sum(map(math.prod, shapes))))
    torch.manual_seed(0)
    draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    return [([draw(shape, requires_grad=True) for shape in shapes], draw(shapes[0])) for _ in range(count)]


def row_of(measure, **fields):
    """Return `fields` and what `measure()` returns, or {"why_not": the reason in a line} if it raises."""
    torch.cuda.empty_cache()  # does nothing without a GPU
    try:
        return fields | measure()
    except Exception as error:  # whatever a kernel raises concerns its row only
        reason = f"{'not installed: ' if isinstance(error, ImportError) else ''}{in_a_line(error)}"
    return fields | {"why_not": reason}


def measure_kernel(make, shape, sets, expected):
    """Check and time a kernel alone. expected: what `reference` returns for the first set."""
    attend, limit = make(shape), LIMITS["fp8" if make is te_attention_fp8 else "kernel"]
    for _ in range(4):  # passes of the same values set the scales of delayed scaling
        found = one_pass(attend, *sets[0])[0]
    group, errors = shape.heads // shape.kv_heads, {}
    for name, ours, heads, wanted in zip(("out", "dq", "dk", "dv"), found, (group, group, 1, 1), expected):
        difference = ours[-1, :, -heads:].double() - wanted.double()
        errors[name] = (difference.norm() / wanted.double().norm()).item()
    agrees = all(error <= limit for error in errors.values())  # NaN is beyond every limit, and null in JSON
    errors = {name: error if math.isfinite(error) else None for name, error in errors.items()}
    del found, ours, difference  # or they would count as memory that the kernel needs
    row = {"errors": errors, "agrees": agrees} | time_passes(attend, sets)
    for name, flops in zip(("forward", "backward", "both"), shape.flops()):
        row[f"{name}_tflops"] = flops / row[f"{name}_ms"] / 1e9
    return row


def text_of(row):
    """Return a row of the printed table: what errs by more than LIMITS is WRONG."""
    if "why_not" in row:
        return f"{row['name']:32}{row['why_not']}"
    worst = max(math.inf if error is None else error for error in row["errors"].values())
    gib = f"{row['peak_gib']:8.2f}" if row["peak_gib"] is not None else " " * 8
    times = f"{row['forward_ms']:9.3f}{row['backward_ms']:10.3f}{row['both_ms']:9.3f}"
    verdict = "" if row["agrees"] else "  WRONG"
    return f"{row['name']:32}{times}{row['both_tflops']:9.1f}{gib}{worst:10.1e}{verdict}"
