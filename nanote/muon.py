"""--optimizer muon: torch.optim.Muon for the matrices of the blocks, on float32 masters."""
import torch


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon on float32 masters, scaled for AdamW's learning rate (arXiv:2502.16982, 2.2)."""

    def __init__(self, params, *, lr: float, weight_decay: float):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.masters = {}  # {parameter: its float32 master, or itself if it is float32}
        for parameter in self.param_groups[0]["params"]:
            is_float32 = parameter.dtype == torch.float32
            self.masters[parameter] = parameter if is_float32 else parameter.detach().float()
        self.inner = torch.optim.Muon(self.masters.values(), adjust_lr_fn="match_rms_adamw")
        for parameter, master in self.masters.items():
            momentum = torch.zeros_like(master)
            self.inner.state[master] = {"momentum_buffer": momentum}
            self.state[parameter] = {"momentum_buffer": momentum}
            if master is not parameter:
                self.state[parameter]["master_param"] = master

    @torch.no_grad()
    def step(self):
        inner_group = self.inner.param_groups[0]
        inner_group["lr"] = self.param_groups[0]["lr"]
        inner_group["weight_decay"] = self.param_groups[0]["weight_decay"]
        for parameter, master in self.masters.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, master in self.masters.items():
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None
