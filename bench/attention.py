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
from nanote.command import error_line
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
        return "x".join(str(size) for size in vars(self).values())

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
    def attend(q, k, v):
        y = attention_by_hand(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return y.transpose(1, 2)
    return attend


def sdpa(shape, backend=None):
    def attend(q, k, v):
        with sdpa_kernel(backend) if backend else nullcontext():
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                enable_gqa=shape.heads != shape.kv_heads)
            return y.transpose(1, 2)
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


def flash_2(shape):
    from flash_attn import flash_attn_func  # optional package
    return partial(flash_attn_func, causal=True)


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
        "flash-attn 2": flash_2,
        "flash-attn 4": flash_4,
        "te.DotProductAttention, FP8": te_attention_fp8,
    }


def reference(q, k, v, grad):
    """Compute causal attention in float64, of the last sequence and the last KV head, where a kernel that
    mixes up heads or sequences is wrong.

    Returns that slice of (out, dq, dk, dv): (S, query heads, D) twice and (S, 1, D) twice.
    """
    group = q.shape[2] // k.shape[2]
    q = q[-1, :, -group:].detach().double().requires_grad_()  # (S, group, D)
    k = k[-1, :, -1].detach().double().requires_grad_()  # (S, D)
    v = v[-1, :, -1].detach().double().requires_grad_()
    grad = grad[-1, :, -group:].double()
    outs = []
    for head in range(group):  # one at a time: in float64 an S x S matrix is large
        out = attention_by_hand(q[None, None, :, head], k[None, None], v[None, None])[0, 0]
        out.backward(grad[:, head])
        outs.append(out.detach())
    return torch.stack(outs, dim=1), q.grad, k.grad[:, None], v.grad[:, None]


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
    warm_up(attend, sets)
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    stamps = []
    for i in range(20 if HAS_GPU else 3):
        if HAS_GPU:
            torch.cuda._sleep(4_000_000)  # cycles, about 2 ms, in which Python queues the pass
        _, stamps_of_pass = one_pass(attend, *sets[i % len(sets)])
        stamps.append(stamps_of_pass)
    forward = []
    backward = []
    both = []
    for start, middle, end in stamps:
        forward_ms, backward_ms = spans_ms([start, middle, end])
        forward.append(forward_ms)
        backward.append(backward_ms)
        both += spans_ms([start, end])
    peak_gib = None
    if HAS_GPU:
        peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    return {
        "forward_ms": median(forward), "backward_ms": median(backward), "both_ms": median(both),
        "peak_gib": peak_gib}


def warm_up(attend, sets):
    """Run passes: the first ones compile, autotune and allocate, and the clock rises."""
    start = time.perf_counter()
    passes = 0
    while passes < 3 or (HAS_GPU and time.perf_counter() - start < 0.1):
        _, stamps = one_pass(attend, *sets[passes % len(sets)])
        spans_ms(stamps)  # waits for the GPU
        passes += 1


def random_sets(shapes):
    """Draw inputs of these shapes and the gradient of an output of the first one's shape, in BF16: as many
    sets as fill the L2 cache twice, so that no pass finds its inputs there."""
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size if HAS_GPU else 0
    set_bytes = 2 * sum(map(math.prod, shapes))
    torch.manual_seed(0)
    sets = []
    for _ in range(min(32, 2 + 2 * cache_bytes // set_bytes)):
        inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
                  for shape in shapes]
        grad = torch.randn(shapes[0], device=DEVICE, dtype=torch.bfloat16)
        sets.append((inputs, grad))
    return sets


def row_of(measure, **fields):
    """Return `fields` and what `measure()` returns, or {"why_not": the reason in a line} if it raises."""
    torch.cuda.empty_cache()  # does nothing without a GPU
    try:
        return fields | measure()
    except ImportError as error:
        return fields | {"why_not": f"not installed: {error_line(error)}"}
    except Exception as error:  # whatever a kernel raises concerns its row only
        return fields | {"why_not": error_line(error)}


def errors_of(attend, inputs_and_grad, expected):
    """Return the relative errors of output and gradients: {"out": …, "dq": …, "dk": …, "dv": …}."""
    for _ in range(4):  # passes of the same values set the scales of delayed scaling
        found, _ = one_pass(attend, *inputs_and_grad)
    errors = {}
    for name, value, wanted in zip(("out", "dq", "dk", "dv"), found, expected):
        heads = wanted.shape[1]
        wanted = wanted.double()
        difference = value[-1, :, -heads:].double() - wanted
        errors[name] = (difference.norm() / wanted.norm()).item()
    return errors


def measure_kernel(make, shape, sets, expected):
    """Check and time a kernel alone. expected: what `reference` returns for the first set."""
    attend = make(shape)
    errors = errors_of(attend, sets[0], expected)
    limit = LIMITS["fp8" if make is te_attention_fp8 else "kernel"]
    agrees = all(error <= limit for error in errors.values())  # NaN is beyond every limit, and null in JSON
    for name, error in errors.items():
        if not math.isfinite(error):
            errors[name] = None
    row = {"errors": errors, "agrees": agrees} | time_passes(attend, sets)
    for name, flops in zip(("forward", "backward", "both"), shape.flops()):
        row[f"{name}_tflops"] = flops / row[f"{name}_ms"] / 1e9
    return row


def text_of(row):
    """Return a row of the printed table: what errs by more than LIMITS is WRONG."""
    if "why_not" in row:
        return f"{row['name']:32}{row['why_not']}"
    worst = max(math.inf if error is None else error for error in row["errors"].values())
    gib = "" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    times = f"{row['forward_ms']:9.3f}{row['backward_ms']:10.3f}{row['both_ms']:9.3f}"
    verdict = "" if row["agrees"] else "  WRONG"
    return f"{row['name']:32}{times}{row['both_tflops']:9.1f}{gib:>8}{worst:10.1e}{verdict}"
