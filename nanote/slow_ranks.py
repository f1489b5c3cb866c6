"""Name the rank that the others wait for.

The steps of all ranks take equally long: whoever is faster waits in a collective, and in CUDA graphs and
FSDP2 the host does not see for how long. So at every log line each rank times what it does alone: a GEMM of
fixed size on its GPU, and the wait of its host for batches since the last line.
"""
import statistics

import torch
import torch.distributed as dist

from nanote.profiling import timed

SLOW = 1.1  # times the median rank: the log line then names the rank
GEMM_SIZE = 3072  # it takes the GPU longer than Python takes to launch it


class SlowestRank:
    """Find the slowest of the ranks that train together."""

    def __init__(self, loader, device: torch.device):
        """`loader`: of the training batches, a nanote.dataset.Loader."""
        self.loader, self.device, self.seconds_waited = loader, device, loader.seconds_waited
        if device.type == "cuda":
            # not equal values: with them a GPU takes less power, and keeps a clock that training would lower
            values = torch.linspace(-1, 1, GEMM_SIZE**2, device=device)
            self.factor = values.to(torch.bfloat16).view(GEMM_SIZE, GEMM_SIZE)
            self.product = torch.empty_like(self.factor)

    def find(self, steps: int, step_ms: float) -> dict:
        """Return slowest_rank and slowest_ratio for metrics.jsonl, the same on every rank.

        The ratio estimates the time of a step that waits for no other rank, over the median rank's: computing
        takes longer by the ratio of the GEMM times, waiting for batches adds to it. Collective; waits for the
        device.

        Args:
            steps: since the last call.
            step_ms: their mean time.
        """
        waited_ms = 1e3 * (self.loader.seconds_waited - self.seconds_waited) / steps
        self.seconds_waited = self.loader.seconds_waited
        alone = torch.tensor([self.gemm_ms(), waited_ms / step_ms], dtype=torch.float64)
        every = [torch.empty_like(alone) for _ in range(dist.get_world_size())]
        dist.all_gather(every, alone)  # on the CPU, through gloo
        return slowest(torch.stack(every).tolist())

    def gemm_ms(self) -> float:
        """Return the time of the fastest of three GEMMs; on a CPU 1: where processes share cores, the time of
        so short a one tells nothing."""
        if self.device.type != "cuda":
            return 1.0

        def gemm():
            torch.mm(self.factor, self.factor, out=self.product)

        return min(timed([gemm] * 4, self.device)[1:])


def slowest(ranks: list[list[float]]) -> dict:
    """Compare [GEMM time, wait for batches as a part of a step] of each rank."""
    gemms, waits = zip(*ranks)
    # The rank that waits longest for batches waits for no rank: the rest of its step is computing.
    computing = max(1 - max(waits), 0.01) / statistics.median_low(gemms)
    times = [computing * gemm + wait for gemm, wait in ranks]
    rank = max(range(len(times)), key=times.__getitem__)
    return {"slowest_rank": rank, "slowest_ratio": times[rank] / statistics.median_low(times)}
