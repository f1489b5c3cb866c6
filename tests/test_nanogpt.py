"""bench/nanogpt.py, minimal.py and multi_gpu.py, with a small stand-in for nanoGPT's model.py."""

import json

import pytest
import torch

from bench import minimal, nanogpt

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are of a CPU")
CPU = torch.device("cpu")
STAND_IN = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

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
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.fc = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.002)

    def forward(self, idx, targets=None):
        logits = self.head(self.norm(self.fc(self.wte(idx))))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # which would take a minute
    (tmp_path / "model.py").write_text(STAND_IN)
    return tmp_path


def test_nanogpt_is_measured_in_turns_with_our_arms(checkout, capsys):
    path = checkout / "nanogpt.json"
    nanogpt.main([str(checkout), "--shapes", "124m-b32", "--steps", "1", "--json", str(path)])
    rows = json.loads(path.read_text())
    assert [(row["block"], row["arm"]) for row in rows] == [
        (block, arm) for block in ("bias=False", "bias=True") for arm in ("nanogpt", *nanogpt.ARMS)]
    for row in rows:
        assert "error" not in row and row["ms"] > 0 and row["ratio_to_nanogpt"] > 0
        assert {"gpu", "driver", "torch", "te", "date", "command", "model_py_sha256"} <= set(row)
    assert rows[0]["ratio_to_nanogpt"] == 1 and rows[-1]["model_config"]["bias"]
    assert "1.000 x nanoGPT" in capsys.readouterr().out


def test_own_loops_are_timed_beside_nanogpt(checkout):
    path = checkout / "minimal.json"
    minimal.main(["--layers", "1", "--width", "64", "--batch", "1", "--seq-len", "32", "--steps", "1",
                  "--nanogpt", str(checkout), "--json", str(path)])
    rows = json.loads(path.read_text())
    assert [row["loop"] for row in rows] == ["readme", "example", "nanogpt_bf16", "nanogpt"]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms"], rel=1e-4)
