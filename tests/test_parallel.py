"""train.py on two processes that communicate by gloo, as torchrun starts them."""
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanote import checkpoint, ddp, parallel
from trainer_tools import ROOT, RUN_ALL, losses, metrics, run_ranks, run_train, write_edit

STEPS = 4
OPTIONS = (f"--n-layer 2 --n-head 2 --n-embd 64 --seq-len 64 --max-steps {STEPS} --warmup-steps 2 --lr 1e-3 "
           "--fp8-amax-history-len 4 --log-interval 1 --eval-interval 2 --eval-tokens 512 "
           "--checkpoint-interval 2 --keep-checkpoints 9 --device cpu")
HF = ("--activation gelu --no-use-rmsnorm --no-use-rotary --bias --fp8-recipe none --init-from hf "
      "--max-steps 2 --checkpoint-interval 0 --eval-interval 0")
MUON = ("--optimizer muon --tie-embeddings --fp8-recipe none "
        "--activation gelu --n-inner 101")  # rows that do not divide by two
ON_CPU = {"NANOTE_ENGINE": "reference", "CUDA_VISIBLE_DEVICES": ""}
TOGETHER = {  # runs of two processes; the same samples a step as "one"
    "ddp": "--micro-batch-size 4", "hsdp": "--micro-batch-size 4 --parallel hsdp",
    "fsdp": "--micro-batch-size 2 --grad-accum 2 --parallel fsdp",
    "one-to-ddp": "--resume --micro-batch-size 2 --grad-accum 2", "ddp-to-fsdp": "--resume --parallel fsdp",
    "muon": f"--micro-batch-size 2 --grad-accum 2 --parallel fsdp {MUON}", "muon-to-fsdp": "--resume",
    "nan": "--micro-batch-size 4 --fp8-recipe none --model own.py:NanOnRank1",
    "hf": f"--micro-batch-size 4 --parallel fsdp {HF}"}
OWN_MODEL = """
import os
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
class NanOnRank1(OptimizedGPT2Model):
    def __init__(self, config: OptimizedConfig):
        super().__init__(config)
        self.passes = 0
    def forward(self, input_ids, labels=None):
        loss = super().forward(input_ids, labels)
        self.passes += self.training
        is_nan = os.environ["RANK"] == "1" and self.passes == 3 and self.training
        return loss * float("nan") if is_nan else loss
"""


def test_two_processes_train_as_one(in_tmp_path, tokens):
    """Sharded or not, with Muon, resumed on other ranks or in one process, and from a Hugging Face folder. A
    step that is not finite on one rank is skipped on both."""
    transformers = pytest.importorskip("transformers")
    Path("own.py").write_text(OWN_MODEL)
    config = transformers.GPT2Config(vocab_size=257, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained("hf")
    options = f"{OPTIONS} --data {tokens}"
    assert run_train(f"{options} --micro-batch-size 8 --out-dir one") == 0
    assert run_train(f"{options} --micro-batch-size 8 {HF} --out-dir hf-in-one") == 0
    assert run_train(f"{options} --micro-batch-size 8 {MUON} --out-dir muon-in-one") == 0
    runs = {name: extra if "--resume" in extra else f"{options} {extra}" for name, extra in TOGETHER.items()}
    run_ranks(f"{RUN_ALL}\nparallel.end_process(0)", [str(ROOT), json.dumps(runs), f"step-{STEPS}"])
    shutil.copytree("fsdp", "fsdp-to-one", ignore=shutil.ignore_patterns(f"step-{STEPS}"))
    assert run_train("--resume --parallel ddp --micro-batch-size 8 --grad-accum 1 --out-dir fsdp-to-one") == 0
    for run in ("ddp", "hsdp", "fsdp", "one-to-ddp", "ddp-to-fsdp", "fsdp-to-one"):
        assert losses(run) == pytest.approx(losses("one"), rel=2e-3), run
        assert losses(run, "grad_norm") == pytest.approx(losses("one", "grad_norm"), rel=0.02), run
        assert losses(run, "val_loss") == pytest.approx(losses("one", "val_loss"), rel=2e-3), run
    for key in ("loss", "grad_norm", "val_loss"):
        assert losses("muon", key) == pytest.approx(losses("muon-in-one", key), rel=1e-4)
    in_one = checkpoint.read_tensors(f"muon-in-one/step-{STEPS}")
    for name, weight in checkpoint.read_tensors(f"muon/step-{STEPS}").items():
        assert (weight - in_one[name]).abs().mean() < 1e-5, name  # two steps change it by more than 4e-5
    assert metrics("muon-to-fsdp") == metrics("muon"), "a resume repeats the steps exactly"
    assert losses("hf") == pytest.approx(losses("hf-in-one"), rel=1e-4) and len(losses("hf")) == 2
    assert losses("nan", "skipped")[-1] == 1 and len(losses("nan")) == STEPS


@contextlib.contextmanager
def torchrun(options):
    """Run train.py on two ranks, which print to `log`."""
    command = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2",
               "--max-restarts", "1", ROOT / "train.py", *options.split()]
    with open("log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | ON_CPU)
    try:
        yield process
    finally:
        process.terminate()  # stops the ranks
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def kill_one_rank(process, number):
    """Send a signal to the last process that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), number)


def test_torchrun_restarts_a_killed_rank_and_a_signal_stops_all(in_tmp_path, tokens):
    """The restart continues from the last checkpoint; SIGTERM to one rank finishes the step on both."""
    options = (f"{OPTIONS} --max-steps 9000 --checkpoint-interval 30 --eval-interval 0 "
               f"--micro-batch-size 2 --n-layer 1 --parallel fsdp --optimizer muon --data {tokens}")
    with torchrun(options) as process:
        wait_for(lambda: "step 40/" in Path("log").read_text())  # not in a save, which the other rank awaits
        kill_one_rank(process, signal.SIGKILL)
        wait_for(lambda: Path("log").read_text().count("tiny from step") == 2)
        begun = checkpoint.latest("out/tiny")
        wait_for(lambda: checkpoint.latest("out/tiny") != begun)
        kill_one_rank(process, signal.SIGTERM)
        exit_code = process.wait(240)
    printed = Path("log").read_text()
    assert exit_code == 0, printed
    assert "stopped after step" in printed and "resume with" in printed and os.listdir("out") == ["tiny"]
    last = checkpoint.step_of(checkpoint.latest("out/tiny"))
    assert [record["step"] for record in metrics("out/tiny")] == list(range(1, last + 1))


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, Path("log").read_text()
        time.sleep(0.05)


def test_a_model_without_blocks_is_not_sharded(monkeypatch):
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "broadcast", lambda tensor, src: None)
    with pytest.raises(ValueError, match="--parallel fsdp: shards block by block.*or pass --parallel ddp"):
        ddp.distribute(torch.nn.Linear(3, 3), "fsdp", 1)


SUMS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from nanote import ddp, parallel

ranks, model = parallel.start(), torch.nn.Module()
model.blocks = torch.nn.ModuleList([torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)])
model.forward = lambda x: model.blocks[0](x)
ddp.distribute(model, "fsdp", 3)
gradients = ddp.make_gradients(model, 3)
for i, x in enumerate([2**-9, 0, 0] if ranks.rank else [1, 2**-9, 2**-9]):
    with gradients.accumulate(is_first_microbatch=(i == 0), is_last_microbatch=(i == 2)):
        model(torch.tensor([[x]], dtype=torch.bfloat16)).sum().backward()
gradients.set_grad()
print("found", parallel.local_parameters(model)[0].grad.item(), flush=True)
parallel.end_process(0)
"""


def test_shards_sum_micro_batches_in_float32(in_tmp_path):
    """In BF16, 1 + 2**-9 is 1; the sum of all terms is rounded to 1 + 2**-7."""
    assert [output.split()[-1] for output in run_ranks(SUMS, [str(ROOT)])] == ["1.0078125", "1.0078125"]


BUILT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch.distributed.tensor import DTensor
import train
from nanote import models, parallel, recipes
from nanote.config import TrainConfig

ranks, device = parallel.start(), torch.device("cpu")
config = TrainConfig(n_layer=3, n_head=2, n_embd=64, vocab_size=64, n_positions=64, seq_len=64,
                     parallel=sys.argv[2], device="cpu", **json.loads(sys.argv[3]))
torch.manual_seed(0)
whole = models.make_model(config, device, torch.float32, recipes.make(config)).state_dict()
were_sharded = []


def look(parent, name, module):
    if isinstance(parent, torch.nn.ModuleList):
        were_sharded.extend(isinstance(weight, DTensor) for block in parent for weight in block.parameters())


torch.nn.modules.module.register_module_module_registration_hook(look)
torch.manual_seed(ranks.rank)  # all ranks get the weights of rank 0
model = train.build_model(config, device)
is_same = [torch.equal(value.full_tensor(), whole[name]) for name, value in model.state_dict().items()
           if isinstance(value, DTensor)]
print("found", len(were_sharded) > 0 and all(were_sharded), len(is_same) > 20 and all(is_same), flush=True)
parallel.end_process(0)
"""
FROZEN = """
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model, freeze_in_fp8
class Frozen(OptimizedGPT2Model):
    def __init__(self, config: OptimizedConfig):
        super().__init__(config)
        freeze_in_fp8(self, except_for=["norm"])
"""


@pytest.mark.parametrize("kind, options, is_sharded_as_built", [
    ("fsdp", {}, True), ("hsdp", {}, True),
    ("fsdp", {"model": "my_model.py:OptimizedGPT2Model", "set": [["lora_base=fp8"]]}, True),
    ("fsdp", {"model": "frozen.py:Frozen"}, False)])
def test_a_block_is_sharded_before_the_next_one_is_built(in_tmp_path, kind, options, is_sharded_as_built):
    """If the model file is the kit's, or says so. The weights are those of a model that is built whole."""
    write_edit(Path(), "optimized", "lora")
    Path("frozen.py").write_text(FROZEN)
    for output in run_ranks(BUILT, [str(ROOT), kind, json.dumps(options)]):
        assert output.split()[-3:] == ["found", str(is_sharded_as_built), "True"]


# ---------------------------------------------------------------- a sharded optimizer

# Two processes shard the optimizer by memory that both have, as GPUs do by peer access; or cannot, for two
# reasons. Its numbers: test_fast_adam.py; on two GPUs: test_multi_gpu.py.
SHARDED = """
import json, os, sys, types
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from fast_kernels.adam import FastAdam
from nanote import ddp, parallel, peers
from nanote.optimizers import FastOptimizer, clip_coefficient

ranks = parallel.start()
torch.cuda.device_count = lambda: ranks.count
torch.cuda.can_device_access_peer = lambda *devices: True
files = []


def not_on_rank_1(size, dtype, device):
    if ranks.rank == 1:
        raise RuntimeError("pidfd_getfd failed\\nmore")
    return torch.zeros(size, dtype=dtype)


def map_file(name, rank, size, dtype):
    return torch.from_file(f"{name}-{rank}", shared=True, size=size, dtype=dtype)


def in_a_file(size, dtype, device):
    files.append(f"memory-{len(files)}")
    tensor = map_file(files[-1], ranks.rank, size, dtype)
    tensor.file = files[-1]
    return tensor


def rendezvous(tensor, group):
    dist.barrier()  # the files of all ranks are there
    of_ranks = [map_file(tensor.file, rank, len(tensor), tensor.dtype) for rank in range(ranks.count)]
    of_ranks[ranks.rank] = tensor
    return types.SimpleNamespace(
        get_buffer=lambda rank, shape, dtype: of_ranks[rank],
        buffer_ptrs=[memory.data_ptr() for memory in of_ranks], barrier=dist.barrier)


def train(allocate, p2p_disable):
    # three steps, of which one is not finite on rank 1; prints how, the norms, weights and state
    peers.allocate_shared, os.environ["NCCL_P2P_DISABLE"] = allocate, p2p_disable
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(15, 15) for _ in range(2)])
    adam = FastAdam(list(model.parameters()), lr=1e-2)
    optimizer = FastOptimizer(model, adam)
    gradients = ddp.make_gradients(model, grad_accum=1)
    ddp.shard_optimizer(optimizer, gradients)
    norms = []
    for factor in (1.0, float("inf") if ranks.rank else 1.0, 2.0):
        with gradients.accumulate(is_first_microbatch=True, is_last_microbatch=True):
            (factor * model(torch.full((6, 15), ranks.rank + 1.0)).square().mean()).backward()
        gradients.set_grad()
        norm = optimizer.gradient_norm()
        optimizer.step(clip_coefficient(norm, 0.5), skip=~norm.isfinite())
        norms.append(norm.item())
    optimizer.gather_state()
    states = [value for state in adam.state.values() for value in state.values()]
    tensors = [*model.parameters(), *states]
    numbers = torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()
    print(json.dumps([optimizer.not_sharded_reason, norms, numbers]), flush=True)


peers._symmetric_memory.rendezvous = rendezvous
train(in_a_file, "0")
train(None, "1")
train(not_on_rank_1, "0")
parallel.end_process(0)
"""


def test_ranks_shard_the_optimizer_where_they_can_share_memory(in_tmp_path):
    """Else all ranks update all weights: where peer access is off, or one rank cannot share its memory. All
    get the same weights and optimizer state. A step that is not finite on one rank is skipped on all."""
    pytest.importorskip("triton")
    environment = dict(LOCAL_WORLD_SIZE="2", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    outputs = run_ranks(SHARDED, [str(ROOT)], **environment)
    of_rank_0, of_rank_1 = [[json.loads(line) for line in output.splitlines() if line.startswith("[")]
                            for output in outputs]
    assert of_rank_0 == of_rank_1
    sharded, without_p2p, without_memory = of_rank_0
    assert sharded[0] == "" and without_p2p[0] == "NCCL_P2P_DISABLE is set"
    assert without_memory[0] == "memory could not be shared: pidfd_getfd failed"
    first, not_finite, last = sharded[1]
    assert math.isfinite(first) and not math.isfinite(not_finite) and math.isfinite(last)
    for _, norms, numbers in (without_p2p, without_memory):
        assert norms == pytest.approx(sharded[1], rel=1e-6, nan_ok=True)
        assert numbers == pytest.approx(sharded[2], rel=1e-5, abs=1e-8)
