"""--optimizer muon: Muon for the matrices of the blocks, on float32 masters.

Muon's update of a matrix is its momentum, orthogonalized in BF16. The numbers are those of torch.optim.Muon
with `adjust_lr_fn="match_rms_adamw"`, which needs whole matrices. --parallel fsdp and hsdp shard a matrix by
rows, and momentum and master like it: each rank has a part of it. Then each matrix has one rank that
orthogonalizes it, its owner:

    momentum        each rank updates its parts, and rounds them to BF16
    gather          the owner receives the parts of all ranks: 2 bytes a parameter
    orthogonalize   the owner computes the update, as one process does with the whole matrix
    scatter         each rank receives its part of the update, in BF16: 2 bytes a parameter

Matrices are dealt out in rounds, the largest first, so that the ranks of a round have equal work. While a
rank orthogonalizes its matrix of one round, the next round is gathered.

References: kellerjordan.github.io/posts/muon; the learning rate of AdamW, arXiv:2502.16982, section 2.2;
owners in rounds, the Muon of github.com/microsoft/dion.
"""
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nanote import parallel

MOMENTUM = 0.95
# Coefficients of a Newton-Schulz iteration: x <- LINEAR x + CUBIC (x x^T) x + QUINTIC (x x^T)^2 x
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    """Muon for matrices, which may be sharded. The state of a parameter has its momentum and, unless the
    parameter is float32, its float32 master: of this rank's part only."""

    def __init__(self, params, *, lr: float, weight_decay: float):
        params = list(params)
        parts = [parallel.local_part(parameter) for parameter in params]
        super().__init__(parts, dict(lr=lr, weight_decay=weight_decay))
        self.shapes = {part: parameter.shape for part, parameter in zip(parts, params)}  # of whole matrices
        self.group = None  # the ranks that have a part each
        if isinstance(params[0], DTensor):
            self.group = params[0].device_mesh.get_group("shard")
        for part in parts:
            self.state[part]["momentum_buffer"] = torch.zeros_like(part, dtype=torch.float32)
            if part.dtype != torch.float32:
                self.state[part]["master_param"] = part.detach().float()

    @torch.no_grad()
    def step(self):
        parts = [part for part in self.param_groups[0]["params"] if part.grad is not None]
        if self.group is not None:
            self._update_parts(parts)
            return
        for part in parts:
            self._update(part, orthogonalize(self._advance_momentum(part)))

    def _update_parts(self, parts) -> None:
        """Update this rank's parts of sharded matrices. While this rank orthogonalizes its matrix of a round,
        the next round is gathered and the last one scattered. Collective."""
        rounds = make_rounds(parts, self.shapes, self.group)
        gather_started = self._advance_and_gather(rounds[0]) if rounds else None
        scatter_started = None
        for number, current in enumerate(rounds):
            momentum = current.matrix_of(gather_started)
            if number + 1 < len(rounds):
                gather_started = self._advance_and_gather(rounds[number + 1])
            update = orthogonalize(momentum)
            if scatter_started is not None:
                self._update_round(rounds[number - 1], scatter_started)
            scatter_started = current.scatter(update)
        if scatter_started is not None:
            self._update_round(rounds[-1], scatter_started)

    def _advance_and_gather(self, current: "Round") -> "Exchange":
        """Advance the momentum of a round's parts, and start to send it to the owners of the matrices."""
        return current.gather([self._advance_momentum(part) for part in current.parts])

    def _update_round(self, current: "Round", scatter_started: "Exchange") -> None:
        for part, update in zip(current.parts, current.parts_of(scatter_started)):
            self._update(part, update)

    def _advance_momentum(self, part) -> torch.Tensor:
        """Add the gradient to the momentum. Return Nesterov's momentum in BF16."""
        gradient = part.grad.float()
        momentum = self.state[part]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM).bfloat16()

    def _update(self, part, update) -> None:
        """Decay a parameter, and subtract the update times the learning rate."""
        group = self.param_groups[0]
        scale = 0.2 * math.sqrt(max(self.shapes[part]))  # to the RMS of AdamW's update
        master = self.state[part].get("master_param", part)
        master.mul_(1 - group["lr"] * group["weight_decay"])
        master.add_(update, alpha=-group["lr"] * scale)
        if master is not part:
            part.copy_(master)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return U S' V^T of a BF16 matrix U S V^T, with S' between about 0.5 and 1.5: five Newton-Schulz
    iterations, as torch.optim.Muon makes them. Return a (0, 0) matrix, of a rank that owns none, as it is."""
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=CUBIC, alpha=QUINTIC)
        x = torch.addmm(x, polynomial, x, beta=LINEAR)
    return x.T if rows > columns else x


# ---------------------------------------------------------------- sharded matrices

def make_rounds(parts, shapes: dict, group) -> list["Round"]:
    """Deal matrices out to the ranks of a group, in order of their size: one to each rank a round.

    parts: this rank's parts of the matrices. shapes: {part: shape of the whole matrix}.
    """
    world_size = dist.get_world_size(group)
    largest_first = sorted(parts, key=lambda part: shapes[part].numel(), reverse=True)
    rounds = []
    for start in range(0, len(parts), world_size):
        of_round = largest_first[start:start + world_size]
        rounds.append(Round(of_round, [shapes[part] for part in of_round], group))
    return rounds


@dataclass
class Exchange:
    """An all-to-all of BF16 elements that has started."""

    received: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """Return what this rank has received."""
        self.work.wait()
        return self.received


class Round:
    """Matrices of which each rank orthogonalizes one, if there are enough: rank i owns the i-th."""

    def __init__(self, parts: list, shapes: list[torch.Size], group):
        """parts: this rank's parts of the matrices. shapes: those of the whole matrices."""
        rank = dist.get_rank(group)
        world_size = dist.get_world_size(group)
        self.parts = parts
        self.group = group
        self.own_shape = shapes[rank] if rank < len(shapes) else torch.Size([0, 0])
        rows, columns = self.own_shape
        # elements of this rank's matrix that each rank has
        self.own_sizes = [part_rows(rows, other, world_size) * columns for other in range(world_size)]
        # elements of each rank's matrix that this rank has
        without_matrix = world_size - len(parts)
        self.part_sizes = [part.numel() for part in parts] + [0] * without_matrix

    def gather(self, parts: list[torch.Tensor]) -> Exchange:
        """Start to send tensors, each shaped like the part of a matrix, to the owners of the matrices."""
        sent = torch.cat([part.flatten() for part in parts])
        return self._exchange(sent, self.part_sizes, self.own_sizes)

    def matrix_of(self, gather_started: Exchange) -> torch.Tensor:
        """Return the matrix that this rank owns, (0, 0) if it owns none."""
        return gather_started.wait().view(self.own_shape)  # parts are consecutive rows

    def scatter(self, matrix: torch.Tensor) -> Exchange:
        """Start to send each rank its part of the matrix that this rank owns."""
        return self._exchange(matrix.flatten(), self.own_sizes, self.part_sizes)

    def parts_of(self, scatter_started: Exchange) -> list[torch.Tensor]:
        """Return this rank's parts of the scattered matrices."""
        received = scatter_started.wait().split(self.part_sizes)
        return [values.view_as(part) for values, part in zip(received, self.parts)]

    def _exchange(self, sent: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Exchange:
        received = sent.new_empty(sum(received_sizes))
        work = dist.all_to_all_single(
            received, sent, received_sizes, sent_sizes, group=self.group, async_op=True)
        return Exchange(received, work)


def part_rows(rows: int, rank: int, world_size: int) -> int:
    """Return how many rows of a matrix a rank has. FSDP2 rounds up: three ranks have 4, 4 and 2 of 10."""
    most = math.ceil(rows / world_size)
    return min(max(rows - rank * most, 0), most)
