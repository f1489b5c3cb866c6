"""Optimizers: AdamW, and Muon for the matrices of the blocks with AdamW for the rest.

A training step and a checkpoint use each of them as an `Optimizer`, in this order:

    optimizer.set_lr(lr)                    before a step, also if the step is a replayed CUDA graph
    norm = optimizer.gradient_norm()        when every parameter has its `grad` (nanote/ddp.py)
    optimizer.step(clip_coef, skip)
    optimizer.gather_state()                before a checkpoint reads `optimizer.state`

To train with an optimizer of your own, call a function of yours in train.py, in place of `make_optimizer`.
Parameters are BF16 on a GPU, and an update rounded to BF16 is mostly lost, so keep a float32 copy as
state["master_param"], as nanote/muon.py does: checkpoints store every tensor and number of `state`, and
sample.py reads the masters by this name.

Reference: AdamW is algorithm 2 of arXiv:1711.05101.
"""
import math

import torch

from nanote import adapters, parallel, recipes
from nanote.engine import is_frozen_in_fp8


class Optimizer:
    """One torch.optim.Optimizer, or several for different parameters of a model."""

    capturable = False  # whether a CUDA graph can capture gradient_norm and step

    def __init__(self, model, *optimizers):
        self.optimizers = list(optimizers)
        self.parameters = parallel.local_parameters(model)
        self.mesh = parallel.mesh_of(model)  # of ranks that have a shard each
        self.not_sharded_reason = ""  # why each rank of --parallel ddp updates all parameters

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict:
        state = {}
        for optimizer in self.optimizers:
            state |= optimizer.state
        return state

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group, times its "lr_factor" if it has one."""
        for group in self.param_groups:
            group_lr = lr * group.get("lr_factor", 1.0)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(group_lr)  # a captured update reads this memory
            else:
                group["lr"] = group_lr

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of all gradients, (), over all ranks."""
        norm = torch.nn.utils.get_total_norm(self._gradients()).float()
        return parallel.norm_over_shards(norm, self.mesh)

    def step(self, clip_coef: torch.Tensor, skip: torch.Tensor) -> None:
        """Multiply the gradients by clip_coef, (), and update the parameters. If `skip`, () bool, is
        true, no parameter and no state changes, not even a step count."""
        if skip:  # waits for the GPU, which costs little where Python launches every kernel
            return
        torch._foreach_mul_(self._gradients(), clip_coef)
        for optimizer in self.optimizers:
            optimizer.step()

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def gather_state(self) -> None:
        """Give every rank the whole state, where each rank updates a part. Collective."""


class FastOptimizer(Optimizer):
    """A FastAdam. The GPU decides whether to skip a step, so a CUDA graph can capture it.

    sharded_adam: a ShardedAdam (nanote/peers.py) around it, if `nanote.ddp.shard_optimizer` has set one.
    """

    capturable = True

    def __init__(self, model, fast_adam):
        super().__init__(model, fast_adam)
        self.fast_adam = fast_adam
        self.sharded_adam = None

    @property
    def adam(self):
        """FastAdam, or the ShardedAdam around it."""
        return self.sharded_adam or self.fast_adam

    def set_lr(self, lr: float) -> None:
        super().set_lr(lr)
        self.fast_adam.write_hyperparameters()  # to the GPU, where a replay reads them

    def gradient_norm(self) -> torch.Tensor:
        return parallel.norm_over_shards(self.adam.gradient_norm(), self.mesh)

    def step(self, clip_coef: torch.Tensor, skip: torch.Tensor) -> None:
        # FastAdam multiplies gradients as it reads them, and skips a step whose grad_scale is NaN
        self.adam.step(grad_scale=torch.where(skip, math.nan, clip_coef))

    def gather_state(self) -> None:
        if self.sharded_adam is not None:
            self.sharded_adam.gather_state()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor, (), that limits gradients of this norm, (), to max_norm. 0 sets no limit."""
    if max_norm == 0:  # the factor becomes 1, but NaN for a norm that is not finite
        max_norm = math.inf
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def make_optimizer(model, config) -> Optimizer:
    """Return the optimizer of a run: AdamW, or Muon for the matrices of model.blocks and AdamW for the rest.
    Both use one learning rate, decay matrices only and update float32 masters of BF16 weights. AdamW is
    fast_kernels' FastAdam on a GPU, and else the engine's FusedAdam."""
    with_state = list(model.parameters())
    leaves_out_frozen = any(map(is_frozen_in_fp8, with_state)) or adapters.trains_only_adapters(model)
    # Otherwise frozen parameters keep state, as in version 0.2, whose runs resume with the same groups
    if leaves_out_frozen:
        with_state = [p for p in with_state if p.requires_grad]
    for_muon = []
    if config.optimizer == "muon":
        for_muon = matrices_of_blocks(model, with_state)
    parts_for_muon = {parallel.local_part(matrix) for matrix in for_muon}
    for_adam = [parallel.local_part(p) for p in with_state]
    for_adam = [p for p in for_adam if p not in parts_for_muon]
    if not for_adam:  # Muon trains all that is not frozen, such as adapters in blocks
        return Optimizer(model, make_muon(for_muon, config))
    groups = [{"params": [p for p in for_adam if p.dim() >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in for_adam if p.dim() < 2], "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]  # FastAdam reads its dtype from the first one
    moments = getattr(torch, config.moment_dtype)
    options = dict(lr=config.lr, betas=(0.9, 0.95), eps=1e-8, store_param_remainders=config.param_remainders)
    is_fast = for_adam[0].is_cuda and not recipes.IS_REFERENCE
    if is_fast:
        from fast_kernels.adam import FastAdam  # needs Triton
        adamw = FastAdam(groups, moment_dtype=moments, **options)
    else:
        adamw = recipes.te.optimizers.FusedAdam(
            groups, adam_w_mode=True, exp_avg_dtype=moments, exp_avg_sq_dtype=moments,
            master_weights=any(p.dtype != torch.float32 for p in for_adam),
            master_weight_dtype=torch.float32, **options)
    if for_muon:
        return Optimizer(model, make_muon(for_muon, config), adamw)
    if is_fast:
        return FastOptimizer(model, adamw)
    return Optimizer(model, adamw)


def make_muon(matrices, config):
    from nanote.muon import Muon
    return Muon(matrices, lr=config.lr, weight_decay=config.weight_decay)


def matrices_of_blocks(model, parameters) -> list:
    """Return those of the parameters that Muon trains, with the fused QKV weight as one matrix."""
    blocks = getattr(model, "blocks", torch.nn.ModuleList())  # a user's own model may have none
    in_optimizer = set(parameters)
    matrices = [p for p in blocks.parameters() if p.dim() == 2 and p in in_optimizer]
    if not matrices:
        raise ValueError(f"--optimizer muon: trains the matrices of model.blocks, and {type(model).__name__} "
                         "has no trainable matrices there; pass --optimizer adamw")
    return matrices
