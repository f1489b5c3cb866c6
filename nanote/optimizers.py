"""Optimizers by name: AdamW, and Muon for the matrices of the blocks with AdamW for the rest.

`make_optimizer` takes a name of OPTIMIZERS, which --optimizer names. To train with one of your own, write a
function (model, config) -> torch.optim.Optimizer and add it there. What it can rely on, and must do:

- Each step sets group["lr"] to the scheduled learning rate times group["lr_factor"] (1 if there is none).
- A checkpoint stores every tensor and number in optimizer.state[parameter], and a resumed run restores them
  in the same dtype. An optimizer made of several lists them in `parts`.
- Parameters are BF16 on a GPU. An update rounded to BF16 is mostly lost, so keep a float32 copy as
  state["master_param"], as `Muon` does; sample.py and a resumed float32 run read it under this name.
- `step` runs from Python after the gradients are clipped, while forward and backward pass replay as CUDA
  graphs. FastAdam alone is captured as well.
"""
import itertools

import torch

from nanote import fp8, parallel

try:
    import fast_kernels
except ImportError as error:  # the folder may be left out: everything works, slower
    if error.name != "fast_kernels":
        raise
    fast_kernels = None


def make_optimizer(model, config):
    """Return the optimizer that config.optimizer names, over all parameters of the model."""
    return OPTIMIZERS[config.optimizer](model, config)


def adamw(model, config):
    """Return AdamW with weight decay of matrices only, and float32 masters of BF16 and FP8 weights.

    On a GPU it is fast_kernels.adam.FastAdam; with --fp8-param and on the CPU, TE's FusedAdam.
    """
    return _adamw(model, parallel.local_parameters(model), config)


def _adamw(model, parameters: list, config):
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    moments = getattr(torch, config.moment_dtype)
    options = dict(lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8,
                   # FP8 weights have no BF16 bits that a remainder could complete
                   store_param_remainders=config.param_remainders and not config.fp8_param)
    on_gpu = parameters[0].is_cuda and not fp8.IS_REFERENCE
    if on_gpu and fast_kernels is not None and not config.fp8_param:
        from fast_kernels.adam import FastAdam  # needs Triton

        return FastAdam(groups, moment_dtype=moments, **options)
    masters = any(p.dtype != torch.float32 for p in parameters) or config.fp8_param
    optimizer = fp8.te.optimizers.FusedAdam(
        groups, adam_w_mode=True, master_weights=masters, master_weight_dtype=torch.float32,
        exp_avg_dtype=moments, exp_avg_sq_dtype=moments, **options,
    )
    fp8.init_master_weights(model, optimizer)
    return optimizer


# ---------------------------------------------------------------- Muon

def muon(model, config):
    """Return Muon for the matrices of model.blocks, and AdamW for embeddings, lm_head, norms and biases.

    Muon's update is scaled to the size of AdamW's, so both use the same learning rate and weight decay (Liu
    et al. 2025, arXiv:2502.16982, section 2.2). The fused QKV weight counts as one matrix, as fc1 of SwiGLU
    does.
    """
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2] if hasattr(model, "blocks") else []
    if not matrices:
        raise ValueError(f"--optimizer muon: trains the matrices of model.blocks, and {type(model).__name__} "
                         "has none there; pass --optimizer adamw")
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in chosen]
    for_matrices = Muon(matrices, lr=config.lr, weight_decay=config.weight_decay)
    return CombinedOptimizer(for_matrices, _adamw(model, rest, config))


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon on float32 master weights: momentum, orthogonalized by Newton-Schulz iterations.

    torch.optim.Muon alone would round each update of a BF16 parameter to BF16. Momentum is kept in float32,
    too.
    """

    def __init__(self, params, *, lr: float, weight_decay: float):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.of_master = {}  # parameter: the tensor that Muon updates
        for parameter in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            master = parameter if parameter.dtype == torch.float32 else parameter.detach().float()
            self.of_master[parameter] = master
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(master)
            if master is not parameter:
                self.state[parameter]["master_param"] = master
        groups = [{"params": [self.of_master[p] for p in group["params"]]} for group in self.param_groups]
        self.inner = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")
        for parameter, master in self.of_master.items():
            self.inner.state[master]["momentum_buffer"] = self.state[parameter]["momentum_buffer"]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Copy a saved state into the existing tensors: PyTorch's method would round it to BF16."""
        state = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = state
        numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, parameter in zip(numbers, self.of_master):
            for key, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][key].copy_(value)

    @torch.no_grad()
    def step(self):
        for group, inner in zip(self.param_groups, self.inner.param_groups):
            inner["lr"], inner["weight_decay"] = group["lr"], group["weight_decay"]
        for parameter, master in self.of_master.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, master in self.of_master.items():
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None


class CombinedOptimizer(torch.optim.Optimizer):
    """Use several optimizers as one."""

    def __init__(self, *parts):
        self.parts = parts

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict:
        return {parameter: values for part in self.parts for parameter, values in part.state.items()}

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict) -> None:
        for part, state in zip(self.parts, state_dict["parts"]):
            part.load_state_dict(state)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


OPTIMIZERS = {"adamw": adamw, "muon": muon}
