"""nanote/optimizers.py: Muon with float32 masters, resuming any optimizer, learning rates per group."""
import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nanote import checkpoint, optimizers
from nanote.config import TrainConfig
from nanote.optimizers import OPTIMIZERS, Muon
from trainer_tools import OPTIONS, make_tokens, metrics, run_train

SHORT = f"{OPTIONS} --n-layer 1 --max-steps 8 --checkpoint-interval 4 --eval-interval 0"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("corpus") / "tokens")


def matrices(dtype):
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((48, 16), (16, 64))]


def train(optimizer, parameters, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def test_muon_of_float32_parameters_is_torchs():
    ours, theirs = matrices(torch.float32), matrices(torch.float32)
    got = train(Muon(ours, lr=0.01, weight_decay=0.1), ours, 5)
    expected = train(
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), theirs, 5)
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_muon_of_bf16_parameters_keeps_updates_that_bf16_cannot_hold():
    """A hundred steps of 1e-5: torch.optim.Muon alone would round every one of them away."""
    exact, rounded = matrices(torch.float32), matrices(torch.bfloat16)
    for a, b in zip(exact, rounded):
        a.data.copy_(b)
    start = [parameter.detach().float() for parameter in rounded]
    optimizer = Muon(rounded, lr=1e-5, weight_decay=0.0)
    gradients = [torch.ones_like(p) * torch.randn(p.shape[1]).bfloat16() for p in rounded]
    reference = torch.optim.Muon(exact, lr=1e-5, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
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
    from model_te_optimized import OptimizedConfig, OptimizedGPT2Model

    config = OptimizedConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=288, n_positions=32)
    model = OptimizedGPT2Model(config)
    muon, adamw = OPTIMIZERS["muon"](model, TrainConfig(optimizer="muon")).parts
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    of_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert of_muon | of_adamw == set(names.values()) and not of_muon & of_adamw
    assert len(of_muon) == 2 * 4 and all(name.startswith("blocks.") for name in of_muon)
    assert "wte.weight" in of_adamw


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_resumes_bit_for_bit(tokens, dtype):
    options = f"{SHORT} --optimizer muon --dtype {dtype}"
    assert run_train(f"{options} --out-dir whole", tokens) == 0
    shutil.copytree("whole", "cut")
    shutil.rmtree("cut/step-8")
    assert run_train("--resume --out-dir cut", tokens) == 0
    assert metrics("cut") == metrics("whole")


class Counting(torch.optim.Optimizer):
    """SGD whose rate depends on every kind of state: a tensor of another shape and type, a count, numbers."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, dict(lr=lr, calls=0, kind=torch.float64))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(rows=torch.zeros(p.shape[:1], dtype=torch.float64), step=torch.tensor(0.0),
                                 decay=1.0, seen=0)
                state["rows"] += p.grad.double().view(len(p), -1).square().sum(1)
                state["step"] += 1
                state["decay"] = np.float64(0.9 * state["decay"])
                state["seen"] += 1
                assert type(state["seen"]) is int
                group["calls"] += 1
                rate = group["lr"] * state["decay"] / state["step"] / group["calls"] ** 0.1
                p -= rate * p.grad / (1 + state["rows"].sum().sqrt().to(p.dtype))


def test_an_optimizer_of_ones_own_resumes_bit_for_bit(tokens, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "adamw", lambda model, config: Counting(model.parameters(), config.lr))
    assert run_train(f"{SHORT} --dtype bfloat16 --lr 0.5 --out-dir whole", tokens) == 0
    shutil.copytree("whole", "cut")
    shutil.rmtree("cut/step-8")
    assert run_train("--resume --out-dir cut", tokens) == 0
    assert metrics("cut") == metrics("whole")


def test_learning_rates_are_factors_per_group(tokens, monkeypatch):
    """A factor of 0 freezes the embedding; the schedule still applies to the others."""
    def with_factors(model, config):
        optimizer = optimizers.adamw(model, config)
        embedding = model.wte.weight
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not embedding]
        optimizer.add_param_group({"params": [embedding], "lr_factor": 0.0, "weight_decay": 0.1})
        return optimizer

    monkeypatch.setitem(OPTIMIZERS, "adamw", with_factors)
    assert run_train(f"{SHORT} --out-dir run", tokens) == 0
    early, late = (checkpoint.safetensors_files.stored_tensors(f"run/step-{n}") for n in (4, 8))
    assert early.keys() == late.keys()
    from safetensors.torch import load_file

    first, last = ({k: v for path in Path(f"run/step-{n}").glob("*.safetensors")
                    for k, v in load_file(path).items()} for n in (4, 8))
    assert torch.equal(first["model.wte.weight"], last["model.wte.weight"])
    assert not torch.equal(first["model.blocks.0.attn.proj.weight"], last["model.blocks.0.attn.proj.weight"])


def test_muon_saves_and_loads_its_state_in_a_loop_of_ones_own():
    from model_te_optimized import OptimizedConfig, OptimizedGPT2Model

    config = OptimizedConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=32, n_positions=16)
    results = []
    for saves in (False, True):
        torch.manual_seed(2)
        model = OptimizedGPT2Model(config).bfloat16()
        parameters = list(model.parameters())
        optimizer = OPTIMIZERS["muon"](model, TrainConfig(optimizer="muon"))
        train(optimizer, parameters, 3)
        if saves:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = OPTIMIZERS["muon"](model, TrainConfig(optimizer="muon"))
            optimizer.load_state_dict(state)
        results.append(train(optimizer, parameters, 3, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_another_optimizer_cannot_take_over_a_run(tokens, capsys):
    assert run_train(f"{SHORT} --max-steps 4 --out-dir run", tokens) == 0
    capsys.readouterr()
    assert run_train("--resume --out-dir run --optimizer muon --max-steps 8", tokens) == 2
    assert "--optimizer muon: run/step-4 has the state of adamw; leave" in capsys.readouterr().err
    assert run_train(f"{SHORT} --optimizer muon --fp8-param --out-dir other", tokens) == 2
    assert "does not update weights stored in FP8" in capsys.readouterr().err
    assert json.loads(Path("run/step-4/meta.json").read_text())["config"]["optimizer"] == "adamw"


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
def test_on_a_gpu_muon_with_graphs_equals_muon_without(tokens, accumulation):
    options = OPTIONS.replace("--device cpu", "").replace("--grad-accum 2", f"--grad-accum {accumulation}")
    options = options.replace("--dropout 0.1", "") + " --optimizer muon"
    for graph, run in (("on", "graphed"), ("off", "eager")):
        assert run_train(f"{options} --cuda-graph {graph} --torch-deterministic --out-dir {run}", tokens) == 0
    assert metrics("graphed") == metrics("eager")
    shutil.rmtree("graphed/step-24")
    before = metrics("graphed")
    assert run_train("--resume --out-dir graphed", tokens) == 0
    assert metrics("graphed") == before
