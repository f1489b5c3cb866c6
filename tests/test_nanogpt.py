"""bench/nanogpt.py with a small stand-in for nanoGPT's model.py."""

import json

import pytest
import torch

from bench import nanogpt
from nanote import cli

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU")
STAND_IN = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

BUILT = []

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        BUILT.append((config, self))
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.fc = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, idx, targets=None):
        logits = self.head(self.norm(self.fc(self.wte(idx))))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        self.asked = weight_decay, learning_rate, betas, device_type
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""


def run(arguments) -> int:
    return cli.run(lambda: nanogpt.main(arguments.split()), "bench/nanogpt.py")


def test_nanogpt_is_measured_in_turns_with_our_arms(tmp_path, capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled.append(model) or model)
    monkeypatch.setattr(nanogpt.measure, "WARMUP", 1)
    monkeypatch.setattr(nanogpt, "ARMS", ("plain", "fp8"))  # bf16 is as slow as these
    (tmp_path / "model.py").write_text(STAND_IN)
    path = tmp_path / "nanogpt.json"
    assert run(f"{tmp_path} --shapes 124m-b32 --steps 4 --json {path}") == 0
    rows = json.loads(path.read_text())
    assert [(row["block"], row["arm"]) for row in rows] == [
        (block, arm) for block in ("bias=False", "bias=True") for arm in ("nanogpt", "plain", "fp8")]
    for row in rows:
        assert "error" not in row and row["ms"] > 0 and row["ratio_to_nanogpt"] > 0
        assert {"gpu", "driver", "torch", "te", "date", "command", "model_py_sha256"} <= set(row)
        assert "ratio_to_plain" not in row
        if row["arm"] == "nanogpt":
            assert row["ratio_to_nanogpt"] == 1
        else:
            assert row["model_config"]["bias"] == (row["block"] == "bias=True") and "kernels" in row
    (first, model), (second, _) = nanogpt.sys.modules["nanogpt_model"].BUILT
    assert (first.bias, second.bias, first.block_size, first.vocab_size) == (False, True, 32, 512)
    assert model.asked == (0.1, 6e-4, (0.9, 0.95), "cpu")  # those of nanoGPT's train.py
    assert len(compiled) == 4 and compiled[0] is model  # nanoGPT and plain, twice
    assert "1.000 x nanoGPT" in capsys.readouterr().out
    table = nanogpt.table(rows).splitlines()
    assert table[0].startswith("| shape, nanoGPT's option | nanoGPT | plain PyTorch, compiled | ours, BF16 |")
    assert table[2].startswith("| 124m-b32, bias=False |") and table[2].count("×") == 2


def test_a_step_of_nanogpt_clips_and_updates(tmp_path):
    (tmp_path / "model.py").write_text(STAND_IN)
    module = nanogpt.load(tmp_path)
    config = nanogpt.arms.make_config(nanogpt.arms.SHAPES["guide"], torch.device("cpu"))
    model = module.GPT(module.GPTConfig(n_embd=8, vocab_size=512))
    step = nanogpt.NanoGPTStep(model, model, torch.optim.SGD(model.parameters(), 1.0), config,
                               torch.device("cpu"))
    with torch.no_grad():
        model.head.weight.mul_(1000)  # so that the norm is above 1
    before = [p.detach().clone() for p in model.parameters()]
    loss, norm = step(nanogpt.arms.make_batches(config, torch.device("cpu")), 0.5)
    moved = torch.stack([(p - b).norm() for p, b in zip(model.parameters(), before)]).norm()
    assert norm > 2 and loss > 6 and moved.item() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("content, complaint", [
    (None, "there is no model.py; name the folder of a nanoGPT checkout"), ("x = 1", "it has no GPT; name")])
def test_a_folder_that_is_no_checkout_is_one_line(content, complaint, tmp_path, capsys):
    if content:
        (tmp_path / "model.py").write_text(content)
    assert run(str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert run(f"{tmp_path} --shapes 124m") == 2
    assert "--shapes '124m' is unknown; use 124m-b32" in capsys.readouterr().err
