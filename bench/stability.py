"""Train a small model under an FP8 setting, disturb one step, and see how the loss recovers.

`run_row` trains one Setting undisturbed up to 40 % of the steps, saves the state, and continues from there
once per disturbance, which test_stability.py describes. `cell_figures` compares the losses of one.
"""

import copy
import math
import re
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch

from bench.step import forget_models
from model_te import TEConfig, TEGPT2Model
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote import recipes
from nanote.command import require_at_least
from nanote.config import TrainConfig

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DISTURBANCES = ("none", "outlier", "outlier 1e6", "zeros", "weight", "lr", "loss up", "loss down")
FP8_RECIPES = ("delayed", "current", "block", "mxfp8")
MODELS = {"optimized": (OptimizedConfig, OptimizedGPT2Model), "te": (TEConfig, TEGPT2Model)}
LOSS_SCALES = {"loss up": 2.0**15, "loss down": 2.0**-15}


@dataclass(frozen=True)
class Setting:
    """A row of the table. `format` applies to FP8 recipes, `margin`, `history` and `algo` to "delayed"."""

    recipe: str = "none"
    format: str = "hybrid"
    margin: int = 0
    history: int = 1024
    algo: str = "max"
    model: str = "optimized"
    size: str = "2x64"  # layers x width

    def __str__(self):
        name = "high precision" if self.recipe == "none" else f"{self.recipe} {self.format}"
        if self.recipe == "delayed":
            history = f"{self.algo} of {self.history}" if self.history > 1 else "most recent"
            name += f", margin {self.margin}, {history}"
        return f"{self.size} {name}"


def disturbed_from(steps) -> int:
    """Return the step at which a disturbance begins."""
    return steps * 2 // 5


def make_recipe(setting):
    """Return the recipe object of a setting; ValueError if this machine does not support it."""
    config = TrainConfig(
        fp8_recipe=setting.recipe, fp8_format=setting.format, fp8_margin=setting.margin,
        fp8_amax_history_len=setting.history, fp8_amax_compute_algo=setting.algo)
    recipes.check_machine(config, torch.device(DEVICE))
    return recipes.make(config)


def settings_of(options):
    """Return the rows, for each size high precision first; ValueError for options that cannot run."""
    if options.steps < 20:
        raise ValueError(f"--steps {options.steps}: must be 20 or more")
    require_at_least(1, options, "histories", "jobs")
    require_at_least(0, options, "margins")
    formats = options.formats
    margins = options.margins
    if options.quick:
        formats = options.formats[:1]
        margins = (0,)
    rows = []
    for size in options.sizes:
        if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", size) or int(size.split("x")[1]) % 64:
            raise ValueError(f"--sizes {size!r}: must be layers x width, a multiple of 64; 2x64 works")
        common = dict(model=options.model, size=size)
        rows.append(Setting(**common))
        for recipe, format in product(options.recipes, formats):
            if recipe == "delayed":
                for margin, history in product(margins, options.histories):
                    rows.append(Setting(recipe, format, margin, history, **common))
            else:
                rows.append(Setting(recipe, format, **common))
    for row in rows:
        make_recipe(row)  # ValueError now, not in a process
    return rows


@lru_cache
def corpus():
    """Return sources of Python's standard library, uint8 (n,)."""
    data = b"".join(path.read_bytes() for path in sorted(Path(copy.__file__).parent.glob("*.py")))
    return torch.frombuffer(bytearray(data[:2**21]), dtype=torch.uint8)


class Run:
    """A model in training whose steps can be disturbed, and whose state can be saved and restored."""

    def __init__(self, setting, steps, seed=0, lr=2e-3):
        self.steps = steps
        self.lr = lr
        self.batch_size, self.seq_len = (8, 256) if HAS_GPU else (4, 64)
        layers, width = map(int, setting.size.split("x"))
        head_dim = 32 if width < 256 else 64
        config_class, model_class = MODELS[setting.model]
        forget_models()
        torch.manual_seed(seed)
        config = config_class(
            vocab_size=288, n_positions=self.seq_len, n_embd=width, n_layer=layers, n_head=width // head_dim,
            use_fp8=setting.recipe != "none")
        self.model = model_class(config).to(DEVICE)
        if setting.recipe != "none":
            self.model.fp8_recipe = make_recipe(setting)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.loss(0).backward()  # the first scales are 1, which flushes gradients to zero
        self.optimizer.zero_grad()

    def loss(self, step):
        """Return the loss on the batch of a step."""
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(corpus()) - self.seq_len - 1, (self.batch_size, 1), generator=random)
        windows = corpus()[starts + torch.arange(self.seq_len + 1)].long().to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_GPU):
            return self.model(windows[:, :-1], windows[:, 1:].contiguous())

    def train(self, start, stop, disturbance="none", at=0):
        """Train steps start … stop - 1, disturbed from step `at` on -> losses, float32 (stop - start,)."""
        losses = []
        for step in range(start, stop):
            age = step - at  # steps since the disturbance began
            lr = self.lr * min(1, (step + 1) / (0.1 * self.steps))
            if disturbance == "lr" and 0 <= age < 20:
                lr *= 10
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            scale = 1.0
            if age >= 0:
                scale = LOSS_SCALES.get(disturbance, 1.0)
            with disturbed(self.model, disturbance) if age == 0 else nullcontext():
                loss = self.loss(step)
                if disturbance == "zeros" and age == 0:
                    (loss * 0.0).backward()
                else:
                    (loss * scale).backward()
                if scale != 1:
                    torch._foreach_mul_([p.grad for p in self.parameters], 1 / scale)
                torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).float().cpu()

    def save(self):
        """Return the arguments of `restore`."""
        weights = [p.detach().clone() for p in self.parameters]
        return weights, copy.deepcopy(self.optimizer.state_dict()), recipes.get_state(self.model)

    def restore(self, weights, optimizer, scales):
        torch._foreach_copy_([p.detach() for p in self.parameters], weights)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        recipes.set_state(self.model, scales)


@contextmanager
def disturbed(model, disturbance):
    """Apply to the model what a disturbance changes in it, and undo it at the end."""
    projections = [module for name, module in model.named_modules() if name.endswith(".proj")]

    def outlier(module, args):
        factor = torch.ones_like(args[0])
        factor[:, 0] = 1e6 if disturbance == "outlier 1e6" else 1e3
        return (args[0] * factor, *args[1:])

    def zeros(module, args, output):
        return output * 0

    hooks = []
    largest = []
    spikes = []
    if disturbance.startswith("outlier"):
        hooks = [module.register_forward_pre_hook(outlier) for module in projections]
    elif disturbance == "zeros":
        hooks = [module.register_forward_hook(zeros) for module in (model.wte, model.wpe)]
    elif disturbance == "weight":
        for module in projections:
            weight = module.weight.detach().view(-1)
            value = weight.narrow(0, int(weight.abs().argmax()), 1)  # a view of the largest weight
            largest.append(value)
            spikes.append(999 * value)
    for value, spike in zip(largest, spikes):
        value += spike
    yield
    for hook in hooks:
        hook.remove()
    for value, spike in zip(largest, spikes):
        value -= spike


def run_row(work):
    """Train one setting under every disturbance; work: (setting, steps, disturbances, seed, lr). Returns
    (setting, {disturbance: list of all losses}, seconds)."""
    setting, steps, disturbances, seed, lr = work
    start = time.time()
    if not HAS_GPU:
        torch.set_num_threads(1)  # at this size, a second process gains more than a second thread
    run = Run(setting, steps, seed, lr)
    at = disturbed_from(steps)
    before = run.train(0, at)
    saved = run.save()
    losses = {}
    for disturbance in disturbances:
        run.restore(*saved)
        after = run.train(at, steps, disturbance, at)
        losses[disturbance] = torch.cat((before, after)).tolist()
    return setting, losses, time.time() - start


def recovered_after(losses, undisturbed, at):
    """Return the steps from the disturbance at step `at` until the loss stays within 5 % of the undisturbed
    run's; None if it is outside at the end."""
    outside = [step for step in range(at, len(losses)) if not losses[step] <= 1.05 * undisturbed[step]]
    if not outside:
        return 0
    last = outside[-1]
    if last == len(losses) - 1:
        return None
    return last + 1 - at


def final(losses):
    """Return the mean of the last tenth."""
    last = losses[-max(1, len(losses) // 10):]
    return float(sum(last) / len(last))


def cell_figures(setting, disturbance, losses, baseline):
    """Return the figures of a cell.

    losses: {disturbance: losses} of its row. baseline: the same of high precision at the same size.
    """
    own = losses[disturbance]
    at = disturbed_from(len(own))
    cell = {
        "row": str(setting), **vars(setting), "disturbance": disturbance,
        "finite": all(map(math.isfinite, own)),
        "recovered_after": recovered_after(own, losses["none"], at),
        "worst_loss": None, "final_loss": None, "final_vs_high_precision": None}
    if cell["finite"]:
        cell["worst_loss"] = max(own[at:])
        cell["final_loss"] = final(own)
        cell["final_vs_high_precision"] = final(own) / final(baseline[disturbance]) - 1
    return cell


def cell_text(cell):
    """Return a cell of the printed table: steps to recover, and the final loss against high precision's (in
    its own row, the loss)."""
    if not cell["finite"]:
        return "not finite"
    loss = f"{cell['final_vs_high_precision']:+.1%}"
    if cell["recipe"] == "none":
        loss = f"{cell['final_loss']:.3f}"
    if cell["disturbance"] == "none":
        return loss
    steps = cell["recovered_after"]
    return f"never {loss}" if steps is None else f"{steps} {loss}"
