"""Check that an arm of the benchmark computes what the first arm of its shape computes, before it is timed.

Every arm starts from the same weights and takes the same micro-batch. Three things must agree with the first
arm: the loss; the gradient norms in the first step (of all gradients, of each weight matrix, and of the
norm weights and biases of each block together); and the fall of the loss in STEPS further steps, at a
learning rate that moves the weights a little (`pick_lr`). So a gradient that is zero, scaled or not seen by
the optimizer is refused, and so is a step that does not train. Then weights, optimizer and FP8 state are
reset: what is timed is the model at its start.

- Gradients are read from AdamW's first moment, which after one step from zero is (1 - beta1) times the
  clipped gradient. Every arm has it: eager, compiled, or replayed as CUDA graphs.
- How far two arms may differ follows from what they round: see `Errors`.
"""

import math
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass

import torch

from nanote import fp8
from nanote.train_step import warm_up_scales

STEPS = 3
BF16_LR = 2.0**-13  # for weights in BF16 alone: those below 2^-5 take such a step exactly
FALL = 0.1  # largest fall of the loss in a step, to first order: see `pick_lr`
MANTISSA_BITS = {"E4M3": 3, "E5M2": 2, "E2M1": 1, "BF16": 7, "float32": 23}
FORMATS = {"hybrid": ("E4M3", "E5M2"), "e4m3": ("E4M3", "E4M3")}  # forward, backward; of other recipes E2M1
ROLES = {  # of the weight matrices of a block, by their names in all models; the first match counts
    "qkv": r"qkv|[qkv]_proj", "fc1": r"fc1|gate_proj|up_proj", "fc2": r"fc2|down_proj", "proj": r"proj",
}


# ---------------------------------------------------------------- how far two arms may differ

@dataclass
class Errors:
    """Variances of the relative errors that rounding causes in one arm, from its layers and formats.

    `of` uses the same letters.

    One rounding. In a binade, with values in [m, 2m), the error is at most half a step, u m with
    u = 2^-(bits + 1), and its mean square is u² m² / 3. The mean square of the values is 3/2 / ln 2 m², since
    their logarithms are uniform. Roundings are independent, so their variances v = (2/9) ln 2 u² add.

    One branch, attention or MLP. Forward it has two GEMMs with two FP8 operands each: F = 4 v. Backward it
    has two, of a gradient and a weight each: B = 2 (v + v'), v' for the gradients' format. In BF16 it rounds
    at most eight tensors, either way: F = B = 8 v.

    The residual. After n branches of equal size its variance is the mean of theirs, and each branch has F
    more than the residual that it reads: a(n) = Σ (a(k - 1) + F) / n = F H with H = 1 + 1/2 + … + 1/n. There
    are two branches per layer. The logits have the operands of one more GEMM, together at most (H + 1) F.

    The gradient of a weight. The gradient of the residual sums over branches in the same way. Each branch
    adds B, and is evaluated at activations with the variance H F: together H (B + H F). lm_head, the backward
    pass into the branch and the operands of the wgrad GEMM add at most 2 B + (2 H + 1) F: together
    (H + 2) B + (H + 1)² F.

    What follows for the figures that are compared, from the variances g of a gradient and l of the logits:

    - Rounding errors are not correlated with the values. They increase a gradient's norm by √(1 + g), and the
      norm of N elements scatters by √(g / N), four of which are allowed. The errors come from T tokens of
      width C, so at most T C of them are independent: N is at most that.
    - The small errors of BF16 may be correlated within a branch, where one rounded tensor is computed from
      another: they add √B, and 2 more roundings with moments in BF16, from which the gradients are read.
      Norm weights and biases may have twice that: transformers' Llama, whose norms and RoPE also round their
      intermediate values, has 1.4 times as much in the gradients of its norms (4 layers of width 4,096 on an
      H200).
    - The loss changes by half the variance of the logits, and scatters over the tokens; BF16 counts in full.
    - AdamW moves a weight by about the learning rate along the sign of its gradient. An uncorrelated error
      shortens this path by √(1 + g), and the loss falls by as much less.
    """

    gradient: float  # g, from all roundings
    correlated: float  # from BF16 roundings that may be correlated
    logits_fp8: float
    logits: float

    @classmethod
    def of(cls, config, device):
        """Return the errors of an arm with train.py's options `config`."""
        H = sum(1 / n for n in range(1, 2 * config.n_layer + 1))
        variance = {name: 2 / 9 * math.log(2) * 2.0 ** (-2 * (bits + 1))
                    for name, bits in MANTISSA_BITS.items()}
        F, B = 0.0, 0.0  # of FP8
        if config.fp8_recipe != "none":
            chosen = fp8.resolve_format(config.fp8_recipe, config.fp8_format)
            forward, backward = (variance[name] for name in FORMATS.get(chosen, ("E2M1", "E2M1")))
            F, B = 4 * forward, 2 * (forward + backward)
        # F and B of the rest of a branch, in BF16; in float32 the sums of up to 4,096 terms round, too
        bf16 = 8 * (variance["BF16"] if device.type == "cuda" else 4096 * variance["float32"])
        moments = 2 * variance["BF16"] if config.moment_dtype == "bfloat16" else 0.0
        return cls(gradient=(H + 2) * (B + bf16) + (H + 1) ** 2 * (F + bf16), correlated=bf16 + moments,
                   logits_fp8=(H + 1) * F, logits=(H + 1) * bf16)

    def of_norm(self, elements, tokens, width, of_vectors=False) -> float:
        """Return the relative error allowed in a gradient norm; `of_vectors`: of norm weights and biases."""
        scatter = 4 * math.sqrt(self.gradient / min(elements, tokens * width))
        correlated = (2 if of_vectors else 1) * math.sqrt(self.correlated)
        return math.sqrt(1 + self.gradient) - 1 + scatter + correlated

    def of_loss(self, spread, tokens) -> float:
        """Return the absolute error allowed in the loss. spread: standard deviation of the logits."""
        scatter = 4 * spread * math.sqrt(self.logits_fp8 / tokens)
        return self.logits_fp8 * spread**2 / 2 + scatter + spread * math.sqrt(self.logits)


# ---------------------------------------------------------------- the same start

def parts(model) -> dict:
    """Return {name: parameters}, the same names for every model: "block 3 qkv", "block 3 vectors", "wte"."""
    found = defaultdict(list)
    for name, parameter in model.named_parameters():
        block = re.search(r"(?:blocks|layers)\.(\d+)\.", name)
        if parameter.dim() < 2:
            found[f"block {block[1]} vectors" if block else "last norm"].append(parameter)
        elif block:
            role = next(role for role, pattern in ROLES.items() if re.search(pattern, name))
            found[f"block {block[1]} {role}"].append(parameter)
        else:
            found["wte" if "embed_tokens" in name else name.split(".")[-2]].append(parameter)
    return found


@torch.no_grad()
def start_alike(step) -> None:
    """Reset a step's model and optimizer to the start that all arms share: GPT-2's initialization, seeded by
    the names of `parts`, and an optimizer that has made no step."""
    for name, parameters in parts(step.model).items():
        if parameters[0].dim() < 2:
            continue
        std = 0.02 / math.sqrt(2 * step.config.n_layer) if name.endswith((" proj", " fc2")) else 0.02
        generator = torch.Generator(parameters[0].device).manual_seed(zlib.crc32(name.encode()))
        sizes = [len(parameter) for parameter in parameters]
        shape, device = (sum(sizes), parameters[0].shape[1]), parameters[0].device
        drawn = torch.randn(shape, generator=generator, device=device)
        for parameter, values in zip(parameters, drawn.mul_(std).split(sizes)):
            parameter.copy_(values.bfloat16())  # also into float32 weights
    for name, parameter in step.model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        for key, value in step.optimizer.state.get(parameter, {}).items():
            if key == "master_param" and value.is_floating_point():
                value.copy_(parameter)
            else:
                value.zero_()
    for group in step.optimizer.param_groups:
        if isinstance(group.get("step"), torch.Tensor):
            group["step"].zero_()
        elif "step" in group:
            group["step"] = 0


# ---------------------------------------------------------------- what an arm computes

@dataclass
class Computed:
    """What an arm computed in its first steps, and the errors that rounding explains."""

    arm: str
    loss: float
    norms: dict  # gradient norms, of "all gradients" and of each of `parts`
    sizes: dict  # elements of each
    fall: float  # of the loss over STEPS steps
    errors: Errors
    lr: float | None = None  # of these steps; None if the weights are too coarse for small ones


def pick_lr(norm, elements) -> float:
    """Return the learning rate of the further steps, from the gradient norm.

    AdamW moves each weight by about the learning rate, and so the loss, to first order, by at most lr · Σ|g|
    <= lr · norm · √elements = FALL. At a rate that trains fast, the second-order term is as large, and the
    loss after three steps depends on every rounding.
    """
    return FALL / (norm * math.sqrt(elements))


def has_float32_weights(step) -> bool:
    """Return whether every weight is float32 or has a float32 master, so that small steps are kept."""
    return all(p.dtype == torch.float32 or "master_param" in step.optimizer.state.get(p, {})
               for p in step.model.parameters())


def compute(arm, step, batch, device, lr=None) -> Computed:
    """Take the first steps of an arm on one micro-batch, then reset it. lr: that of the first arm."""
    batches = [batch] * step.config.grad_accum
    start_alike(step)
    if step.config.fp8_recipe == "delayed":
        warm_up_scales(step.model, batch)  # of these weights
    with fp8.preserved_state(step.model):
        loss, norm = (value.item() for value in step(batches, 0.0))
        norms = {"all gradients": norm} | gradient_norms(step, norm)
        sizes = {name: sum(p.numel() for p in parameters) for name, parameters in parts(step.model).items()}
        sizes["all gradients"] = sum(sizes.values())
        lr = (lr or pick_lr(norm, sizes["all gradients"])) if has_float32_weights(step) else None
        losses = [step(batches, lr or BF16_LR)[0].item() for _ in range(STEPS + 1)]
    start_alike(step)
    return Computed(arm, loss, norms, sizes, losses[0] - losses[-1], Errors.of(step.config, device), lr)


def gradient_norms(step, norm) -> dict:
    """Return the gradient norm of each of `parts`, after one step from an optimizer state of zero.

    norm: that of all gradients, by which the step has clipped them.
    """
    clip = min(1.0, step.config.grad_clip / (norm + 1e-6)) if step.config.grad_clip else 1.0
    scale = clip * (1 - step.optimizer.param_groups[0]["betas"][0])
    found = {}
    for name, parameters in parts(step.model).items():
        moments = [step.optimizer.state.get(parameter, {}).get("exp_avg") for parameter in parameters]
        norms = [torch.linalg.vector_norm(m, dtype=torch.float32).item() for m in moments if m is not None]
        found[name] = math.hypot(*norms) / scale
    return found


def check_loss(loss, config) -> None:
    """Raise RuntimeError unless the loss is about that of random tokens at initialization: ln V + σ²/2, with
    the variance σ² = 0.02²·C of the logits."""
    expected = math.log(config.vocab_size) + 0.02**2 * config.n_embd / 2
    if not abs(loss - expected) < 0.3:
        raise RuntimeError(f"numerics: a loss of {loss:.3f} at initialization, not about {expected:.3f}")


class Agreement:
    """Compares every arm of a shape with the first one."""

    def __init__(self):
        self.first = None

    def verify(self, arm, step, batch, device) -> dict:
        """Raise RuntimeError unless an arm computes what the first one does; return figures for its row."""
        found = compute(arm, step, batch, device, self.first and self.first.lr)
        figures = {"loss": found.loss, "grad_norm": found.norms["all gradients"], "loss_fall": found.fall}
        check_loss(found.loss, step.config)
        for name, norm in found.norms.items():
            if not 0 < norm < math.inf:
                raise RuntimeError(f"numerics: gradient norm of {name} {norm:.5g}")
        if not found.fall > 0:
            raise RuntimeError(f"numerics: the loss falls by {found.fall:.5g} in {STEPS} steps")
        if self.first is None:
            self.first = found
            return figures
        share, what = max(compared(found, self.first, step.config.n_embd, batch[0].numel()))
        if share > 1:
            raise RuntimeError(f"numerics: {what} in {self.first.arm}; rounding explains {100 / share:.2g} % "
                               "of the difference")
        return figures | {"agrees_with": self.first.arm, "agreement": share}


def compared(found, first, width, tokens):
    """Yield, for each figure, its difference over what rounding explains, and a description."""
    both = (found.errors, first.errors)
    spread = 0.02 * math.sqrt(width)  # of the logits of a new model
    allowed = sum(errors.of_loss(spread, tokens) for errors in both)
    allowed += first.loss * 2.0**-20  # it is in float32
    yield abs(found.loss - first.loss) / allowed, f"loss {found.loss:.5f}, {first.loss:.5f}"
    for name, norm in first.norms.items():
        of_vectors = name.endswith(("vectors", "last norm"))
        explained = norm * sum(
            errors.of_norm(first.sizes[name], tokens, width, of_vectors) for errors in both
        )
        words = f"gradient norm of {name} {found.norms[name]:.5g}, {norm:.5g}"
        yield abs(found.norms[name] - norm) / explained, words
    if found.lr != first.lr:
        return
    of_norm = sum(errors.of_norm(first.sizes["all gradients"], tokens, width) for errors in both)
    allowed += of_norm * first.fall
    yield abs(found.fall - first.fall) / allowed, f"the loss falls by {found.fall:.5f}, {first.fall:.5f}"
