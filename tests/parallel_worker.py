"""Run by tests/test_parallel.py: several train.py runs in groups of gloo processes.

Unlike torchrun, this imports PyTorch once and forks. Arguments: a number of processes, then a run each, as on
train.py's command line; again for the next group. "copy A B N" copies the run A without checkpoints after
step N; a run that begins with "nan" has a loss that is not finite in step 2, on every rank but the first; one
that begins with "waits" reads each batch late on rank 1; in one that begins with "full" the first checkpoint
does not fit on the disk of the last rank; one that begins with "copies" shares memory as GPUs do; "weights"
checks that ranks with other weights get those of rank 0, "parts" that small sharded tensors are saved and
loaded, and that ranks share errors; "raised" that a step which raises leaves no gradients; "gathers" that
shared memory serves several ways to use FSDP2; "divides" that a divided update is that after an all-reduce
(with TRITON_INTERPRET=1).
"""
import dataclasses
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import train
from nanote import checkpoint, cli, fp8, fsdp_copies, gradients, parallel, peers, safetensors_files
from nanote.config import TrainConfig

gradients.BUCKET_BYTES = 4096  # several buckets in a small model
plain, plain_batches, passes = train.TrainStep.forward_backward, train.get_batches, []
plain_write = checkpoint._write_parts
MARKS = "nan", "waits", "full", "copies"  # first words of runs


def with_a_nan(self, batch, micro):
    passes.append(micro)
    if self.rank_of_test == 0 or passes.count(0) != 2:
        return plain(self, batch, micro)
    net, self.net = self.net, lambda *inputs, **options: net(*inputs, **options) * float("nan")
    try:
        return plain(self, batch, micro)
    finally:
        self.net = net


def waiting(loader, step, grad_accum):
    loader.seconds_waited += 10 * loader.rank  # without waiting
    return plain_batches(loader, step, grad_accum)


def write_or_fail(parts, folder):
    in_background = threading.current_thread() is not threading.main_thread()
    if folder.name.endswith("step-1") and in_background and dist.get_rank() == dist.get_world_size() - 1:
        raise OSError(28, "No space left on device")
    plain_write(parts, folder)


class SharedFile:
    """In place of memory that GPUs share: a file of each rank, mapped into memory."""

    count, names = 0, {}  # address: name

    @classmethod
    def allocate(cls, size, dtype, device):
        cls.count += 1
        tensor = cls.open(f"shared-{cls.count}", dist.get_rank(), size, dtype)
        cls.names[tensor.data_ptr()] = f"shared-{cls.count}"
        return tensor

    @staticmethod
    def open(name, rank, size, dtype):
        return torch.from_file(f"{name}-{rank}", shared=True, size=size, dtype=dtype)

    def __init__(self, tensor, group=None):
        group = group or dist.group.WORLD
        ranks = map(dist.get_global_rank, group.size() * [group], range(group.size()))
        self.group, name = group, self.names[tensor.data_ptr()]
        dist.barrier(group)  # all files are there
        self.memories = [self.open(name, rank, tensor.numel(), tensor.dtype) for rank in ranks]
        self.memories[group.rank()] = tensor
        self.buffer_ptrs = [memory.data_ptr() for memory in self.memories]

    def get_buffer(self, rank, shape, dtype, offset=0):
        copied.append(rank)
        return self.memories[rank].view(dtype)[offset:offset + shape[0]]

    def barrier(self):
        dist.barrier(self.group)


copied, plain_access = [], (peers.no_access_reason, peers.allocate, peers.connect)
shared_files = lambda device: "", SharedFile.allocate, SharedFile


def copy(source, target, last):
    shutil.copytree(source, target)
    for folder in checkpoint.list_checkpoints(target):
        if int(folder.name[5:]) > int(last):
            shutil.rmtree(folder)


def check_weights(ranks):
    torch.manual_seed(ranks.rank)
    model = torch.nn.Linear(3, 3)
    parallel.shard(model, TrainConfig(), torch.device("cpu"))
    weights = [None] * ranks.world_size
    dist.all_gather_object(weights, model.weight.tolist())
    assert all(weight == weights[0] for weight in weights), "the ranks have other weights"


def check_parts(ranks):
    whole = {"model.a": torch.rand(2, 3), "model.b": torch.rand(7), "model.c": torch.rand(())}
    for tensor in whole.values():
        dist.broadcast(tensor, src=0)
    for sizes, placements in (((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)])):
        mesh, run = init_device_mesh("cpu", sizes), Path(f"parts{len(sizes)}")
        stored = {name: distribute_tensor(tensor, mesh, placements) if tensor.dim() else tensor
                  for name, tensor in whole.items()}
        parts = [(name, getattr(tensor, "_local_tensor", tensor), tensor) for name, tensor in stored.items()]
        plain, checkpoint._tensors = checkpoint._tensors, lambda model, optimizer: parts
        checkpoint._write(run, 1, dict(checkpoint._own_parts(None, None)) | {f"rng{ranks.rank}.x": (
            torch.ones(1), [0])}, "{}", keep=1)
        checkpoint._tensors = plain
        loaded = {name: torch.empty(entry.size) for name, entry in
                  safetensors_files.stored_tensors(run / "step-1").items()}
        safetensors_files.load(loaded, run / "step-1")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.items()), loaded
    try:
        parallel.on_each_rank(lambda: 1 // (3 - ranks.rank))
    except (ZeroDivisionError, RuntimeError) as error:
        assert "division" in str(error)
    else:
        raise AssertionError("the error of a rank is not told to others")


class Blocks(torch.nn.Module):
    """8 blocks, of which checkpoints hold `segment` each; 0: none. `ahead`: gather all blocks first."""

    def __init__(self, segment=0, ahead=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(15, 15) for _ in range(8))
        self.head, self.segment, self.ahead = torch.nn.Linear(15, 5), segment, ahead

    def forward(self, x):
        for block in self.blocks if self.ahead else ():
            block.unshard(async_op=True)
        if not self.segment:
            return self.head(self.several(0, 8, x))
        for first in range(0, 8, self.segment):
            x = torch.utils.checkpoint.checkpoint(
                self.several, first, first + self.segment, x, use_reentrant=False)
        return self.head(x)

    def several(self, first, end, x):
        for block in self.blocks[first:end]:
            x = torch.tanh(block(x))
        return x


def gradients_of(ranks, shares, reshard=True, received="float32", **how):
    """Return the gradients of two steps of Blocks, with an evaluation in between, and its number of copies.
    `received`: the dtype of gradients for which there is memory."""
    peers.no_access_reason, peers.allocate, peers.connect = shared_files if shares else plain_access
    model, config = Blocks(**how), TrainConfig(parallel="fsdp", reshard_after_forward=reshard)
    parallel.shard(model, config, torch.device("cpu"))
    found = []
    with torch.no_grad():
        model(torch.zeros(1, 15))  # FSDP2 keeps the weights outside blocks gathered
    for _ in range(2):
        before, reason = SharedFile.count, fsdp_copies.use_copy_engines(
            model, dataclasses.replace(config, grad_reduce_dtype=received))
        assert bool(reason) != shares, reason
        copied.clear()
        for seed in range(2):
            x = torch.randn(5, 15, generator=torch.Generator().manual_seed(10 * seed + ranks.rank))
            model(x).square().sum().backward()
            found += [parameter.grad.full_tensor() for parameter in model.parameters()]
            model.zero_grad()
            with torch.no_grad():
                model(x)
            parallel.reshard(model)
    assert SharedFile.count == before, "a second step has memory of its own"
    return found, len(copied)


def check_gathers(ranks):
    for how in ({}, {"reshard": False}, {"segment": 1}, {"segment": 4}, {"segment": 8}, {"ahead": True},
                {"received": "bfloat16"}):
        (expected, _), (found, copies) = (gradients_of(ranks, shares, **how) for shares in (False, True))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text: f"{how}: {text}")
        if not how:  # 9 units, two steps: forward, blocks again in backward, gradients, an evaluation
            assert copies == 2 * (9 + 8 + 9 + 9) * (ranks.world_size - 1), copies
    peers.no_access_reason, peers.allocate, peers.connect = plain_access


def train_divided(ranks, divides, dtype):
    """Return losses and gradient norms of four steps, the weights and the first moments; in the second step
    the last rank's loss is not finite."""
    from fast_kernels.adam import FastAdam

    peers.no_access_reason = lambda device: "" if divides else "not asked for"
    peers.allocate, peers.connect = shared_files[1:]
    model = Blocks().to(dtype)
    model.blocks[2].requires_grad_(False)
    optimizer = FastAdam(list(model.parameters()), lr=1e-2)
    config = TrainConfig(fp8_recipe="none", grad_accum=2, grad_clip=0.5)
    factor = [1.0]
    step = train.TrainStep(model, lambda x, y: factor[0] * (model(x) - y[:, :5]).square().mean(), optimizer,
                           config, torch.device("cpu"))
    assert (step.undivided_reason == "") == divides, step.undivided_reason
    random, reached = torch.Generator().manual_seed(ranks.rank), []
    for number in range(4):
        factor[0] = float("inf") if number == 1 and ranks.rank == ranks.world_size - 1 else 1.0
        batches = [tuple(torch.randn(6, 15, generator=random).to(dtype) for _ in range(2)) for _ in range(2)]
        loss, norm = step(batches, 1e-2)
        reached.append([parallel.mean_over_ranks(loss.float()), norm])
    step.gather_state()
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return (torch.tensor(reached),
            *(torch.cat([tensor.detach().flatten() for tensor in tensors]) for tensors in (
                model.parameters(), moments)))


def check_divided(ranks):
    for dtype in (torch.float32, torch.bfloat16):
        expected, found = (train_divided(ranks, divides, dtype) for divides in (False, True))
        assert not expected[0][1].isfinite().any() and expected[0][2:].isfinite().all()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        for tensor in found[1:]:
            of_ranks = [None] * ranks.world_size
            dist.all_gather_object(of_ranks, tensor)
            assert all(torch.equal(tensor, other) for other in of_ranks), "the ranks have other weights"
    peers.no_access_reason, peers.allocate, peers.connect = plain_access


def check_raised(ranks, dtype):
    """A step that raises leaves nothing to the next, whether in forward or in backward."""
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise TypeError

    norms = []
    for raised in ([], [None], [Failing.apply]):
        model, config = Blocks().to(dtype), TrainConfig(parallel="fsdp", fp8_recipe="none", grad_accum=2)
        parallel.shard(model, config, torch.device("cpu"))
        optimizer, between = torch.optim.SGD(parallel.local_parameters(model), lr=0.0), []
        step = train.TrainStep(model, lambda x, y: (model(x) - y[:, :5]).square().mean(), optimizer, config,
                               torch.device("cpu"))
        model.blocks[3].register_forward_hook(lambda block, inputs, output: between.pop()(output))
        random = torch.Generator().manual_seed(ranks.rank)
        batches = [tuple(torch.randn(6, 15, generator=random).to(dtype) for _ in range(2)) for _ in range(2)]
        for in_second in [*raised, torch.clone, torch.clone]:
            between[:] = in_second, torch.clone
            try:
                norms.append(step(batches, 0.0)[1].item())
            except TypeError:
                norms.append("raised")
    right = norms[0]
    assert norms == [right, right, "raised", right, right, "raised", right, right], norms


CHECKS = {"weights": check_weights, "parts": check_parts, "gathers": check_gathers, "divides": check_divided,
          "raised": lambda ranks: [check_raised(ranks, dtype) for dtype in (torch.float32, torch.bfloat16)]}


def run_all(runs):
    ranks = parallel.init()
    train.TrainStep.rank_of_test = ranks.rank
    parallel.init, parallel.shut_down = lambda: ranks, lambda ranks: None  # one group for all runs
    train.draw = lambda *arguments: ""  # no plots, which take longer than the runs
    for words in map(str.split, runs):
        if words[0] in CHECKS:
            CHECKS[words[0]](ranks)
            continue
        if words[0] == "copy":
            parallel.on_rank0(lambda: copy(*words[1:]))
            continue
        train.TrainStep.forward_backward = with_a_nan if words[0] == "nan" else plain
        train.get_batches = waiting if words[0] == "waits" else plain_batches
        checkpoint._write_parts = write_or_fail if words[0] == "full" else plain_write
        fp8.forget_models()
        shares = words[0] == "copies"
        copied.clear()
        peers.no_access_reason, peers.allocate, peers.connect = shared_files if shares else plain_access
        code = cli.run(lambda: train.main([word for word in words if word not in MARKS]), "train.py")
        if code:
            return code
        assert shares == bool(copied), "which ranks' memory was read or written"
        train.sample_text = lambda run: ""  # a sample after the first run only
    return 0


def run_group(processes, runs):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": processes,
                   "LOCAL_WORLD_SIZE": processes}
    children = []
    for rank in range(int(processes)):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                code = run_all(runs)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
                code = 1
            sys.stdout.flush()
            os._exit(code)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(1)


starts = [number for number, argument in enumerate(sys.argv) if argument.isdigit()]
for start, end in zip(starts, [*starts[1:], len(sys.argv)]):
    run_group(sys.argv[start], sys.argv[start + 1:end])
