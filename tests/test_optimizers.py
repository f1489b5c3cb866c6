"""nanote/optimizers.py: what a step does, Muon with float32 masters, optimizers and rates of one's own."""
import shutil

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

import train
from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
from nanote import ddp, parallel
from nanote.config import TrainConfig
from nanote.muon import Muon
from nanote.optimizers import Optimizer, clip_coefficient, make_optimizer
from trainer_tools import OPTIONS, fork_ranks, losses, metrics, run_train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
SHORT = f"{OPTIONS} --n-layer 1 --max-steps 8 --checkpoint-interval 4 --eval-interval 0"
GO, SKIP = torch.tensor(False), torch.tensor(True)


def make_model(n_layer=2):
    torch.manual_seed(0)
    config = OptimizedConfig(n_layer=n_layer, n_head=2, n_embd=64, vocab_size=288, n_positions=32)
    return OptimizedGPT2Model(config)


def give_gradients(parameters, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = (size * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


# ---------------------------------------------------------------- a step

def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    decayed, plain = make_optimizer(model, TrainConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decayed["params"] == [model[0].weight] and len(plain["params"]) == 3


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing(name):
    model = make_model()
    optimizer = make_optimizer(model, TrainConfig(optimizer=name))
    results = []
    for skip in (GO, SKIP, GO):
        give_gradients(model.parameters(), size=1.0 if skip is GO else float("nan"))
        optimizer.step(clip_coefficient(optimizer.gradient_norm(), 1.0), skip)
        results.append([tensor.clone() for p in model.parameters()
                        for tensor in (p.detach(), *optimizer.state[p].values())])
    first, skipped, last = results
    assert all(map(torch.equal, first, skipped)) and not any(map(torch.equal, first, last))


@pytest.mark.parametrize("max_norm", [0.5, 100.0, 0])
def test_clipping_limits_the_norm_of_all_gradients(max_norm):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = make_optimizer(model, TrainConfig())
    give_gradients(model.parameters())
    before = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = optimizer.gradient_norm()
    assert norm.item() == pytest.approx(before.norm().item())
    optimizer.step(clip_coefficient(norm, max_norm), skip=GO)
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    limit = min(max_norm or torch.inf, before.norm().item())
    torch.testing.assert_close(after, before * (limit / before.norm()))


@pytest.mark.parametrize("engine", [
    "fast_kernels.modules", "te_reference",
    pytest.param("transformer_engine.pytorch", marks=pytest.mark.gpu)])
def test_a_capturable_adam_keeps_the_memory_of_a_graph(engine):
    """And a rate that is written there is used."""
    te = pytest.importorskip(engine)
    parameter = torch.nn.Parameter(torch.ones(16, device="cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = te.optimizers.FusedAdam([{"params": [parameter]}], lr=0.125, capturable=True)
    group = optimizer.param_groups[0]
    changes, addresses = [], set()
    for rate in (None, 0.0, 0.25):
        if rate is not None:
            group["lr"].fill_(rate)
        before = parameter.detach().clone()
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        changes.append((before - parameter)[0].item())
        tensors = parameter.grad, group["lr"], group["step"]
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    # for a gradient that does not change, Adam's update is the rate
    assert changes == pytest.approx([0.125, 0.0, 0.25], rel=1e-4)
    assert len(addresses) == 1 and (parameter.grad == 0).all()


# ---------------------------------------------------------------- Muon

def matrices(dtype):
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((48, 16), (16, 64))]


def test_muon_keeps_updates_that_bf16_cannot_hold():
    """A hundred steps of 1e-5: torch.optim.Muon alone would round every one of them away."""
    exact, rounded = matrices(torch.float32), matrices(torch.bfloat16)
    for a, b in zip(exact, rounded):
        a.data.copy_(b)
    start = [parameter.detach().float() for parameter in rounded]
    optimizer = Muon(rounded, lr=1e-5, weight_decay=0.1)
    gradients = [torch.ones_like(p) * torch.randn(p.shape[1]).bfloat16() for p in rounded]
    reference = torch.optim.Muon(exact, lr=1e-5, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(100):
        for a, b, gradient in zip(exact, rounded, gradients):
            a.grad, b.grad = gradient.float(), gradient.clone()
        optimizer.step()
        reference.step()
    for a, b, begun in zip(exact, rounded, start):
        assert torch.equal(optimizer.state[b]["master_param"], a)
        assert torch.equal(b, a.bfloat16())
        assert (b.float() - begun).abs().max() > 0


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    model = make_model()
    muon, adamw = make_optimizer(model, TrainConfig(optimizer="muon")).optimizers
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    of_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert of_muon | of_adamw == set(names.values()) and not of_muon & of_adamw
    assert len(of_muon) == 2 * 4 and all(name.startswith("blocks.") for name in of_muon)
    assert "wte.weight" in of_adamw


def test_muon_refuses_a_model_without_blocks():
    with pytest.raises(ValueError, match="model.blocks, and Linear has no trainable matrices there"):
        make_optimizer(torch.nn.Linear(4, 4), TrainConfig(optimizer="muon"))


# ---------------------------------------------------------------- Muon for sharded matrices

SHAPES = (48, 16), (7, 20), (16, 64), (1, 8), (9, 5)  # with rows that ranks cannot share equally


class Matrices(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.wte = torch.nn.Embedding(6, 4, dtype=dtype)
        self.blocks = torch.nn.ModuleList()
        for rows, columns in SHAPES:
            self.blocks.append(torch.nn.Linear(columns, rows, bias=False, dtype=dtype))


def compare_with_whole_matrices(layout, dtype):
    """Take the same steps with a sharded model and a whole one; compare weights and optimizer state."""
    config = TrainConfig(optimizer="muon", lr=1e-2)
    whole, sharded = Matrices(dtype), ddp.distribute(Matrices(dtype), layout, 1)
    expected, optimizer = make_optimizer(whole, config), make_optimizer(sharded, config)

    def part_of(tensor, parameter):
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements).to_local()

    parameters = list(zip(whole.parameters(), sharded.parameters(), parallel.local_parameters(sharded)))
    for seed in range(3):
        give_gradients(whole.parameters(), seed)
        if seed == 2:
            whole.blocks[1].weight.grad = None
        for parameter, dtensor, part in parameters:
            part.grad = None if parameter.grad is None else part_of(parameter.grad, dtensor)
        expected.step(torch.tensor(1.0), GO)
        optimizer.step(torch.tensor(1.0), GO)
    for parameter, dtensor, part in parameters:
        assert torch.equal(dtensor.full_tensor(), parameter)
        state = optimizer.state[part]
        assert state.keys() == expected.state[parameter].keys()
        for name, value in expected.state[parameter].items():
            assert torch.equal(state[name], part_of(value, dtensor)), name


@pytest.mark.parametrize("layout, ranks", [("fsdp", 3), ("hsdp", 4)])
def test_muon_updates_shards_as_it_does_whole_matrices(layout, ranks):
    """To the last bit; also with a rank that owns no matrix in a round, or has no row of one."""
    def run():
        parallel.start()
        compare_with_whole_matrices(layout, torch.float32)
        compare_with_whole_matrices(layout, torch.bfloat16)
        parallel.end_process(0)

    fork_ranks(run, ranks, LOCAL_WORLD_SIZE="2")


# ---------------------------------------------------------------- of one's own

class Slowing(torch.optim.SGD):
    """SGD with a number in its state: the calls by which it divides the rate."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["calls"] = state.get("calls", 0) + 1
            parameter.grad /= state["calls"]
        super().step()


def sgd(model, config):
    """SGD of the blocks at twice the rate of the rest, with a frozen embedding."""
    rest = [p for p in model.parameters() if p is not model.wte.weight and p.dim() < 2]
    blocks = [p for p in model.blocks.parameters() if p.dim() == 2]
    groups = [{"params": blocks, "lr_factor": 2.0}, {"params": rest},
              {"params": [model.wte.weight], "lr_factor": 0.0}]
    return Optimizer(model, Slowing(groups, lr=config.lr, momentum=0.9))


def test_learning_rates_are_factors_per_group():
    optimizer = sgd(make_model(), TrainConfig(lr=1.0))
    optimizer.set_lr(0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25, 0.0]


def test_an_optimizer_of_ones_own_trains_and_resumes(tokens, monkeypatch):
    monkeypatch.setattr(train, "make_optimizer", sgd)
    assert run_train(f"{SHORT} --lr 0.5 --out-dir whole", tokens) == 0
    assert losses("whole")[-1] < losses("whole")[0] - 0.1
    shutil.copytree("whole", "cut", ignore=shutil.ignore_patterns("step-8"))
    assert run_train("--resume --out-dir cut", tokens) == 0
    assert metrics("cut") == metrics("whole")
