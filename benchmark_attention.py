"""Which attention kernel is fastest: alone, and inside a block, where the layout of its inputs changes the
order.

    python benchmark_attention.py --json FILE --png FILE # both parts; the kernels' times add up to less than
    a minute python benchmark_attention.py --shapes 4x4096x32x8x128 --block-shapes # one shape (batch x length
    x heads x KV heads x head width), no blocks

All attention is causal, in BF16 except where a name says FP8. Before a kernel is timed, its output and
gradients are compared with float64; one that is wrong is marked WRONG, however fast it is, and one that fails
has its reason in place of its figures. What the times mean:

- Medians of the GPU's own time (CUDA events). The GPU is kept waiting while Python queues a pass, so the time
  that Python needs is not in them: a small model that is slow because of Python needs a CUDA graph or
  torch.compile, not another kernel.
- A pass is forward and at once backward, as in training, on several sets of inputs in turn: none is in the L2
  cache from last time.
- Inputs lie as (B, S, heads, D), the way a QKV product leaves them. Alone, queries, keys and values are three
  tensors. In a block they are slices of one, so most kernels need their gradients concatenated; "packed" is
  the model's way around that.
"""

import math
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import model_te_optimized
from bench import speed_report
from bench import stability_report as report
from model_te_optimized import DelayedScaling, OptimizedConfig, OptimizedGPT2Model, te
from nanote import cli, fp8

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
PACKAGES = (
    "transformer_engine", "transformer-engine", "flash_attn", "flash-attn", "flash_attn_4", "flash-attn-4",
    "triton",
)
# relative errors above these are mistakes, not rounding (in FP8, a bucket is 6 % wide)
LIMITS = {"kernel": 0.02, "bf16": 0.02, "fp8": 0.1}


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
        """Shape from "8x2048x12x12x64"; ValueError names the option."""
        numbers = text.split("x")
        if len(numbers) != 5 or not all(n.isascii() and n.isdigit() and int(n) for n in numbers):
            raise ValueError(
                f"{option} {text!r}: must be batch x length x heads x KV heads x head width; 8x2048x12x12x64 works"
            )
        shape = Shape(*map(int, numbers))
        if shape.heads % shape.kv_heads:
            raise ValueError(
                f"{option} {text!r}: KV heads must divide {shape.heads} heads; {shape.heads} works"
            )
        return shape

    def flops(self):
        """Of causal attention's matrix products -> (forward, backward, both). Two forward, each half of
        B·H·S²·D multiply-adds, and five backward, one of them the forward's done again; the convention of
        FlashAttention-2 (Dao 2023)."""
        forward = 4 * self.batch * self.heads * self.length ** 2 * self.head_dim // 2
        return forward, forward * 5 // 2, forward * 7 // 2


# ----------------------------------------------------------------------------------------------------------------------
# The kernels: each a function of a shape that returns attend(q, k, v), q (B, S, heads, D), k and v (B, S, KV
# heads, D) -> (B, S, heads, D)


def by_hand(shape):
    """As in a textbook; the S x S matrices of all heads lie in memory."""
    # bytes: four of them at once, in the backward pass
    needed = 4 * 2 * shape.batch * shape.heads * shape.length ** 2
    if HAS_GPU and needed > (free := torch.cuda.mem_get_info()[0]):
        raise MemoryError(f"its S x S matrices need {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")

    def attend(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for t in (k, v))
        future = torch.ones(shape.length, shape.length, dtype=torch.bool, device=q.device).triu(1)
        weights = (
            (q @ k.transpose(2, 3) / math.sqrt(shape.head_dim))
            .masked_fill(future, -torch.inf)
            .softmax(dim=-1)
        )
        return (weights @ v).transpose(1, 2)
    return attend


def sdpa(shape, backend=None):
    def attend(q, k, v):
        with sdpa_kernel(backend) if backend else nullcontext():
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                enable_gqa=shape.heads != shape.kv_heads,
            ).transpose(1, 2)
    return attend


def te_attention(shape):
    module = te.DotProductAttention(
        shape.heads, shape.head_dim, num_gqa_groups=shape.kv_heads, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type="causal",
    )
    return lambda q, k, v: module(q, k, v).view(q.shape)  # TE returns (B, S, heads·D)


def te_attention_fp8(shape):
    """Both products in FP8 (cuDNN), the casts of q, k, v and of the gradient included. Scales come from
    passes on values of the same size."""
    module = te.DotProductAttention(
        shape.heads, shape.head_dim, num_gqa_groups=shape.kv_heads, attention_dropout=0.0, qkv_format="bshd",
        attn_mask_type="causal",
    )
    recipe = DelayedScaling(amax_history_len=16, fp8_dpa=True)

    def attend(q, k, v):
        with te.autocast(enabled=True, recipe=recipe):
            return module(q, k, v).view(q.shape)

    draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        inputs = [draw(shape.batch, shape.length, heads, shape.head_dim, requires_grad=True)
                  for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        one_pass(attend, (), inputs, draw(inputs[0].shape))
    return attend


def flash_2(shape):
    from flash_attn import flash_attn_func
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True)


def flash_4(shape):
    from flash_attn.cute import flash_attn_func
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0]  # the other is the log-sum-exp


FP8_KERNEL = "te.DotProductAttention, FP8"
KERNELS = {
    "by hand": by_hand, "SDPA, PyTorch's choice": sdpa,
    f"{'te_reference' if fp8.IS_REFERENCE else 'te'}.DotProductAttention": te_attention,
}
if HAS_GPU:
    KERNELS |= {
        "SDPA, FlashAttention 2": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
        "SDPA, memory-efficient": partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
        "SDPA, cuDNN": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
        "flash-attn 2": flash_2,
        "flash-attn 4": flash_4,
        FP8_KERNEL: te_attention_fp8,
    }


# ----------------------------------------------------------------------------------------------------------------------
# Right, and how fast


def reference(q, k, v, grad):
    """Causal attention in float64 of the last sequence and the last KV head -> its slices of (out, dq, dk,
    dv), (S, query heads, D) twice and (S, 1, D) twice. Those are the ones that a kernel which mixes up heads
    or sequences gets wrong; more would only cost time and memory."""
    group = q.shape[2] // k.shape[2]
    q, grad = q[-1, :, -group:].detach().double().requires_grad_(), grad[-1, :, -group:].double()
    k, v = (t[-1, :, -1].detach().double().requires_grad_() for t in (k, v))
    future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    outs = []
    for head in range(group):  # one at a time: in float64 an S x S matrix is large
        weights = (q[:, head] @ k.T / math.sqrt(q.shape[-1])).masked_fill(future, -torch.inf).softmax(dim=-1)
        outs.append(weights @ v)
        outs[-1].backward(grad[:, head])
    return torch.stack([out.detach() for out in outs], dim=1), q.grad, k.grad[:, None], v.grad[:, None]


def relative_errors(found, expected):
    """||found - expected|| / ||expected|| of each pair, a list of floats; NaN stays NaN."""
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected)]


def judged(names, errors, what):
    """The row's fields for its errors. NaN agrees with nothing, and is null in JSON, which has none."""
    errors = {name: error if math.isfinite(error) else None for name, error in zip(names, errors)}
    return {
        "errors": errors,
        "agrees": all(error is not None and error <= LIMITS[what] for error in errors.values()),
    }


def one_pass(function, parameters, inputs, grad):
    """Forward, then backward -> (out, gradients of inputs and parameters), the times before, between and
    after."""
    def now():
        if not HAS_GPU:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    start = now()
    out = function(*inputs)
    middle = now()
    grads = torch.autograd.grad(out, (*inputs, *parameters), grad)
    return (out.detach(), *grads), (start, middle, now())


def timed(function, sets, parameters=()):
    """`sets`: of (inputs, gradient of the output). -> a row's fields: medians in ms, and the GiB that a pass
    needs beyond its inputs."""
    synchronize = torch.cuda.synchronize if HAS_GPU else lambda: None
    start, warm = time.perf_counter(), 0
    # the first passes compile, choose and allocate; and the clocks rise
    while warm < 3 or HAS_GPU and time.perf_counter() - start < 0.1:
        one_pass(function, parameters, *sets[warm % len(sets)])
        synchronize()
        warm += 1
    passes = min(50, max(5, int(0.2 * warm / (time.perf_counter() - start)))) if HAS_GPU else 3
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    marks = []
    for i in range(passes):
        if HAS_GPU:
            torch.cuda._sleep(4_000_000)  # cycles, about 2 ms: time for Python to queue what follows
        marks.append(one_pass(function, parameters, *sets[i % len(sets)])[1])
    synchronize()
    between = (lambda a, b: a.elapsed_time(b)) if HAS_GPU else (lambda a, b: 1000 * (b - a))
    forward, backward, both = (
        median(between(mark[i], mark[j]) for mark in marks) for i, j in ((0, 1), (1, 2), (0, 2))
    )
    gib = (torch.cuda.max_memory_allocated() - before) / 2**30 if HAS_GPU else None
    return {"forward_ms": forward, "backward_ms": backward, "both_ms": both, "peak_gib": gib}


def random_sets(shapes):
    """Inputs of these shapes and the gradient of an output of the first one's, random in BF16; as many sets
    as fill the L2 cache twice."""
    cache = torch.cuda.get_device_properties().L2_cache_size if HAS_GPU else 0
    count = min(32, 2 + 2 * cache // (2 * sum(map(math.prod, shapes))))
    torch.manual_seed(0)
    draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    return [([draw(shape, requires_grad=True) for shape in shapes], draw(shapes[0])) for _ in range(count)]


def row_of(measure, **fields):
    """`fields` and what `measure()` returns, or the reason why it could not, in a line: {"why_not"}."""
    torch.cuda.empty_cache()  # without a GPU it does nothing
    with warnings.catch_warnings(record=True) as notes:  # in them PyTorch explains "No available kernel"
        warnings.simplefilter("always")
        try:
            return fields | measure()
        except Exception as error:  # whatever a kernel raises concerns its own row only
            said = "not installed: " if isinstance(error, ImportError) else ""
            said += " ".join(
                [
                    str(error) or type(error).__name__,
                    *(str(note.message).partition("(Triggered")[0] for note in notes),
                ]
            )
    return fields | {"why_not": " ".join(said.split())[:300]}


def measure_kernel(make, shape, sets, expected):
    attend = make(shape)
    found = one_pass(attend, (), *sets[0])[0]
    group = shape.heads // shape.kv_heads
    errors = relative_errors([t[-1, :, -heads:] for t, heads in zip(found, (group, group, 1, 1))], expected)
    del found  # or it would count as memory that the kernel needs
    figures = timed(attend, sets)
    flops = dict(zip(("forward", "backward", "both"), shape.flops()))
    kind = "fp8" if make is te_attention_fp8 else "kernel"
    return (
        judged(("out", "dq", "dk", "dv"), errors, kind)
        | figures
        | {f"{n}_tflops": flops[n] / figures[f"{n}_ms"] / 1e9 for n in flops}
    )


def block_arms():
    """{name: (config.attention, what the model file is to do without)}; sdpa first, as the others are
    compared with it."""
    arms = {"sdpa": ("sdpa", None), "te": ("te", None), "flash, not packed": ("flash", "fast_attention")}
    return arms | ({"packed": ("flash", None)} if getattr(model_te_optimized, "fast_attention", None) else {})


def measure_block(arm, precision, shape, sets, expected):
    """`expected`: a list that the first arm fills and that the others are compared with: out, dx, gradient of
    the QKV weight."""
    attention, without = block_arms()[arm]
    with mock.patch.object(model_te_optimized, without, None, create=True) if without else nullcontext():
        fp8.forget_models()
        torch.manual_seed(0)
        config = OptimizedConfig(
            vocab_size=128, n_positions=shape.length, n_embd=shape.heads * shape.head_dim, n_layer=1,
            n_head=shape.heads, n_kv_head=shape.kv_heads, head_dim=shape.head_dim, n_inner=64,
            attention=attention, use_fp8=precision == "fp8",
        )
        # by way of the model, for its checks
        module = OptimizedGPT2Model(config).blocks[0].attn.to(DEVICE, torch.bfloat16)
        recipe = fp8.make_recipe("delayed" if config.use_fp8 else "none")

        def block(x):
            with te.autocast(enabled=config.use_fp8, recipe=recipe):
                return module(x)

        parameters = list(module.parameters())
        weight = next(i for i, p in enumerate(parameters) if p is module.qkv.weight)
        for _ in range(3):  # delayed scaling: the scales come from earlier passes
            out, dx, *grads = one_pass(block, parameters, *sets[0])[0]
        found = [out, dx, grads[weight]]
        if not expected:
            expected += found
        errors = relative_errors(found, expected)
        del out, dx, grads, found
        return judged(("out", "dx", "dqkv_weight"), errors, precision) | timed(block, sets, parameters)


# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Options:
    shapes: tuple[str, ...] = ("32x1024x12x12x64", "8x2048x12x12x64", "4x4096x32x32x128", "1x16384x32x8x128",
                               "8x2048x16x4x128") if HAS_GPU else ("2x128x4x2x32",)
    """Batch x length x heads x KV heads x head width."""
    block_shapes: tuple[str, ...] = ("32x1024x12x12x64", "4x4096x32x32x128") if HAS_GPU else ("2x64x4x4x16",)
    """None: no blocks."""
    json: Path | None = None  # Write the figures here.
    png: Path | None = None  # Draw them here.


def worst_error(row):
    return max((math.inf if e is None else e) for e in row["errors"].values())


def verdict(row):
    """"" if the row agrees with float64 as far as rounding goes. FP8's rounding is what it is; anything else
    that far off is a mistake."""
    return (
        ""
        if row["agrees"]
        else f"errs by {worst_error(row):.0%}"
        if row["name"] == FP8_KERNEL and worst_error(row) < 0.2
        else "WRONG"
    )


def text_of(row):
    """A row of the table."""
    if "why_not" in row:
        return f"{row['name']:32}{row['why_not']}"
    tflops = f"{row['both_tflops']:9.1f}" if "both_tflops" in row else " " * 9
    gib = f"{row['peak_gib']:8.2f}" if row["peak_gib"] is not None else " " * 8
    return (
        f"{row['name']:32}{row['forward_ms']:9.3f}{row['backward_ms']:10.3f}{row['both_ms']:9.3f}{tflops}{gib}{worst_error(row):10.1e}"
        f"  {verdict(row)}".rstrip()
    )


def main(argv=None):
    options = cli.parse(
        Options, argv, prog="benchmark_attention.py", description=__doc__.partition("\n\nAll attention")[0]
    )
    shapes = [Shape.of(text, "--shapes") for text in options.shapes]
    block_shapes = [Shape.of(text, "--block-shapes") for text in options.block_shapes]
    report.check_folder(options.json, options.png)
    start, rows = time.time(), []
    versions = {d.name: d.version for d in metadata.distributions() if d.name in PACKAGES} | {
        "cudnn": torch.backends.cudnn.version()
    }
    figures = {"versions": versions, "limits": LIMITS, "times_mean_something": HAS_GPU, "rows": rows}

    def add(row):
        rows.append(row)
        print(text_of(row), flush=True)
        figures["seconds"] = round(time.time() - start)
        # after every row: what is done is kept if the run is cut short
        report.write("benchmark_attention.py", argv, figures, options.json)

    print(
        fp8.describe()
        + ("" if HAS_GPU else ": no GPU, so these times mean nothing; that the results agree does")
    )
    head = f"{'':32}{'forward':>9}{'backward':>10}{'both ms':>9}{'TFLOP/s':>9}{'GiB':>8}{'error':>10}"
    for shape in shapes:
        print(f"\nattention {shape}: batch x length x heads x KV heads x head width\n{head}")
        query, key = (
            (shape.batch, shape.length, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads)
        )
        sets = random_sets([query, key, key])
        expected = reference(*sets[0][0], sets[0][1])
        for name, make in KERNELS.items():
            add(
                row_of(
                    partial(measure_kernel, make, shape, sets, expected), part="attention", shape=str(shape),
                    name=name,
                )
            )
    for shape in block_shapes:
        print(
            f"\nnorm + QKV, attention, projection {shape}; error: against sdpa\n{head.replace('TFLOP/s', ' ' * 7)}"
        )
        sets = random_sets([(shape.batch, shape.length, shape.heads * shape.head_dim)])
        for precision in ("bf16",) if fp8.unsupported_reason("delayed") else ("bf16", "fp8"):
            expected = []
            for arm in block_arms():
                measure = partial(measure_block, arm, precision, shape, sets, expected)
                add(
                    row_of(
                        measure, part="block", shape=str(shape), precision=precision,
                        name=f"{arm}, {precision}",
                    )
                )
    if options.png:
        plot({"machine": fp8.describe(), **figures}, options.png)


def kernels_table(result) -> str:
    """Markdown table of kernels alone: ms forward and backward, in brackets TFLOP/s. Empty: did not run."""
    names = {"by hand": "by hand", "SDPA, FlashAttention 2": "SDPA, FlashAttention 2",
             "SDPA, cuDNN": "SDPA, cuDNN", "te.DotProductAttention": "`te.DotProductAttention`",
             "flash-attn 4": "FlashAttention 4", FP8_KERNEL: "TE, FP8"}
    rows = [row for row in result["rows"] if row["part"] == "attention" and "why_not" not in row]
    cells = {(row["shape"], row["name"]): f"{row['both_ms']:.2f} ({row['both_tflops']:.0f})" for row in rows}
    lines = [[shape, *(cells.get((shape, name), "") for name in names)]
             for shape in dict.fromkeys(row["shape"] for row in rows)]
    return speed_report.markdown(["forward and backward, ms", *names.values()], lines)


def blocks_table(result) -> str:
    """Markdown table of norm, QKV GEMM, attention and projection together: ms forward and backward."""
    rows = [row for row in result["rows"] if row["part"] == "block" and "why_not" not in row]
    arms = list(dict.fromkeys(row["name"].rpartition(", ")[0] for row in rows))
    ms = {(row["shape"], row["precision"], row["name"].rpartition(", ")[0]): row["both_ms"] for row in rows}
    lines = [[f"{shape}, {precision.upper()}", *(f"{ms[shape, precision, arm]:.2f}" for arm in arms)]
             for shape, precision in dict.fromkeys((shape, precision) for shape, precision, _ in ms)]
    return speed_report.markdown(["in a block, ms", *arms], lines)


def plot(result, path):
    """`result`: what --json writes. A panel a shape, a bar a kernel: ms of forward (darker) and backward.
    Bars longer than five times the shortest are cut off."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {}
    for row in result["rows"]:
        panels.setdefault(f"{row['part']} {row['shape']}", []).append(row)
    figure, axes = plt.subplots(
        max(1, len(panels)), figsize=(11, 1 + 2.6 * max(1, len(panels))), layout="constrained", squeeze=False
    )
    for axis, (title, here) in zip(axes.flat, panels.items()):
        limit = 5 * min((row["both_ms"] for row in here if "both_ms" in row), default=1)
        for y, row in enumerate(here):
            colour = (
                "red"
                if not row.get("agrees")
                else "tab:green"
                if row.get("precision") == "fp8"
                else "tab:blue"
            )
            forward, both = (min(row.get(key, 0), limit) for key in ("forward_ms", "both_ms"))
            axis.barh(y, both, color=colour, alpha=0.5)
            axis.barh(y, forward, color=colour)
            rate = f", {row['both_tflops']:.0f} TFLOP/s" if "both_tflops" in row else ""
            told = (
                row["why_not"][:90]
                if "why_not" in row
                else f"{row['both_ms']:.3g} ms{rate}{f', {verdict(row)}' if verdict(row) else ''}"
            )
            axis.text(both, y, " " + told, va="center", fontsize=8)
        axis.set_yticks(range(len(here)), [row["name"] for row in here], fontsize=8)
        axis.set_xlim(right=1.25 * axis.get_xlim()[1])
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9)
    unless = "" if result["times_mean_something"] else "; on a CPU they mean nothing"
    figure.suptitle(f"{result['machine']}: causal attention, forward (darker) + backward, ms{unless}\n"
                    "batch x length x heads x KV heads x head width", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(cli.run(main, "benchmark_attention.py"))
