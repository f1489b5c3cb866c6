"""Train a small model under an FP8 setting, and disturb one step (test_stability.py).

`run_row` is what the command and its tests use: it trains one Setting undisturbed up to 40 % of the steps,
saves the state, and continues from there once per disturbance. What the disturbances are is in the docstring
of test_stability.py; the figures and the heat map are made in bench/stability_report.py.
"""

import copy
import time
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import islice

import torch

from bench.stability_report import disturbed_from
from model_te import TEConfig, TEGPT2Model
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote import fp8
from nanote.documents import stdlib_documents

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DISTURBANCES = ("none", "outlier", "outlier 1e6", "zeros", "weight", "lr", "loss up", "loss down")
FP8_RECIPES = ("delayed", "current", "block", "mxfp8")
MODELS = {"optimized": (OptimizedConfig, OptimizedGPT2Model), "te": (TEConfig, TEGPT2Model)}
LOSS_SCALES = {"loss up": 2.0**15, "loss down": 2.0**-15}


@lru_cache
def corpus():
    """Return the first 200 files of the standard library, uint8 (n,)."""
    text = "".join(islice(stdlib_documents()[0], 200))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


class Run:
    """A model in training whose steps can be disturbed, and whose state can be saved and restored."""

    def __init__(self, setting, steps, seed=0, lr=2e-3):
        self.steps, self.lr = steps, lr
        layers, width = map(int, setting.size.split("x"))
        self.batch_size, self.seq_len = (8, 256) if HAS_GPU else (4, 64)
        config_class, model_class = MODELS[setting.model]
        fp8.forget_models()
        torch.manual_seed(seed)
        config = config_class(vocab_size=288, n_positions=self.seq_len, n_embd=width, n_layer=layers,
                              n_head=width // (32 if width < 256 else 64), use_fp8=setting.recipe != "none")
        self.model = model_class(config).to(DEVICE)
        if setting.recipe != "none":
            self.model.fp8_recipe = fp8.make_recipe(
                setting.recipe, setting.format, setting.history, setting.algo, setting.margin
            )
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        # As in train.py: delayed scaling starts with every scale at 1, which would flush the first gradients
        # to zero.
        self.loss(0).backward()
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
            lr_factor = 10 if disturbance == "lr" and 0 <= age < 20 else 1
            scale = LOSS_SCALES.get(disturbance, 1.0) if age >= 0 else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * lr_factor * min(1, (step + 1) / (0.1 * self.steps))
            with disturbed(self.model, disturbance) if age == 0 else nullcontext():
                loss = self.loss(step)
                (loss * (0.0 if disturbance == "zeros" and age == 0 else scale)).backward()
                if scale != 1:
                    torch._foreach_mul_([p.grad for p in self.parameters], 1 / scale)
                torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).float().cpu()

    def save(self):
        weights = [p.detach().clone() for p in self.parameters]
        return weights, copy.deepcopy(self.optimizer.state_dict()), fp8.get_state(self.model)

    def restore(self, saved):
        weights, optimizer, scales = saved
        torch._foreach_copy_([p.detach() for p in self.parameters], weights)
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        fp8.set_state(self.model, scales)


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

    undo = []
    if disturbance.startswith("outlier"):
        undo = [module.register_forward_pre_hook(outlier).remove for module in projections]
    elif disturbance == "zeros":
        undo = [module.register_forward_hook(zeros).remove for module in (model.wte, model.wpe)]
    elif disturbance == "weight":
        weights = [module.weight.detach().view(-1) for module in projections]
        largest = [weight.narrow(0, int(weight.abs().argmax()), 1) for weight in weights]
        spikes = [999 * value for value in largest]
        torch._foreach_add_(largest, spikes)
        undo = [lambda: torch._foreach_sub_(largest, spikes)]
    yield
    for call in undo:
        call()


def run_row(work):
    """Train one setting under every disturbance.

    work: (setting, steps, disturbances, seed, lr). Returns (setting, {disturbance: list of all losses},
    seconds).
    """
    setting, steps, disturbances, seed, lr = work
    start, at = time.time(), disturbed_from(steps)
    if not HAS_GPU:
        torch.set_num_threads(1)  # at this size, a second process gains more than a second thread
    run = Run(setting, steps, seed, lr)
    before, saved, losses = run.train(0, at), run.save(), {}
    for disturbance in disturbances:
        run.restore(saved)
        losses[disturbance] = torch.cat((before, run.train(at, steps, disturbance, at))).tolist()
    return setting, losses, time.time() - start
