"""--optimizer muon: torch.optim.Muon for the matrices of the blocks, on float32 masters."""
import torch


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon on float32 masters, scaled for AdamW's learning rate (arXiv:2502.16982, 2.2)."""

    def __init__(self, params, *, lr: float, weight_decay: float):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        params = self.param_groups[0]["params"]
        self.of_master = {p: p if p.dtype == torch.float32 else p.detach().float() for p in params}
        self.inner = torch.optim.Muon(self.of_master.values(), adjust_lr_fn="match_rms_adamw")
        for parameter, master in self.of_master.items():
            state = self.inner.state[master] = {"momentum_buffer": torch.zeros_like(master)}
            self.state[parameter] = state | ({} if master is parameter else {"master_param": master})

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
