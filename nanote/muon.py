"""Muon for BF16 weights: torch.optim.Muon on float32 masters, for the matrices of the blocks.

Its update is scaled as in arXiv:2502.16982, section 2.2, so that AdamW's learning rate and weight decay fit.
"""
import torch

from nanote import parallel


def matrices_of_blocks(model, fp8_param: bool) -> list:
    """Return the parameters that Muon trains. ValueError if it cannot train them."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2] if hasattr(model, "blocks") else []
    if not matrices:
        raise ValueError(f"--optimizer muon: trains the matrices of model.blocks, and {type(model).__name__} "
                         "has none there; pass --optimizer adamw")
    if fp8_param:
        raise ValueError("--optimizer muon: does not update weights stored in FP8; leave --fp8-param out")
    if parallel.mesh(model) is not None:
        raise ValueError("--parallel fsdp, hsdp: does not go with --optimizer muon; leave it out, or pass "
                         "--parallel ddp")
    return matrices


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon on float32 masters: alone it would round each update of a BF16 weight to BF16."""

    def __init__(self, params, *, lr: float, weight_decay: float):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        [group] = self.param_groups
        self.of_master = {p: p if p.dtype == torch.float32 else p.detach().float() for p in group["params"]}
        self.inner = torch.optim.Muon(self.of_master.values(), adjust_lr_fn="match_rms_adamw")
        for parameter, master in self.of_master.items():
            momentum = torch.zeros_like(master)
            self.inner.state[master]["momentum_buffer"] = momentum
            self.state[parameter]["momentum_buffer"] = momentum
            if master is not parameter:
                self.state[parameter]["master_param"] = master

    @torch.no_grad()
    def step(self):
        [group], [inner] = self.param_groups, self.inner.param_groups
        inner["lr"], inner["weight_decay"] = group["lr"], group["weight_decay"]
        for parameter, master in self.of_master.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, master in self.of_master.items():
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None
