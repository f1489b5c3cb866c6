"""bench/paired.py: pairs of runs, their windows, and nanoGPT's weights under the kit's names."""

import itertools
import json

import pytest
import torch

from bench import paired

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="trains on a CPU")
STEPS = 20


@pytest.fixture
def study(tmp_path, tokens):
    """Return a function that runs a study of `STEPS` steps and returns its exit code and its JSON."""
    def run(*arguments, name="runs"):
        path = tmp_path / f"{name}.json"
        code = paired.main([
            "--size", "tiny", "--tokens", str(512 * STEPS), "--seeds", "1", "--data", str(tokens),
            "--out-dir", str(tmp_path / name), "--json", str(path), *arguments])
        return code, json.loads(path.read_text()) if path.exists() else None
    return run


def runs_of(document, **fields) -> list[dict]:
    return [run for run in document["runs"] if all(run[name] == value for name, value in fields.items())]


def test_a_window_begins_with_the_weights_of_bf16(study):
    study("--arms", "fp8")
    code, document = study("--arms", "fp8", "--start", "0.5")
    assert code == 0
    whole, = runs_of(document, arm="bf16", start=0.0)
    base, = runs_of(document, arm="bf16", start=0.5)
    window, = runs_of(document, arm="fp8", start=0.5)
    fp8, = runs_of(document, arm="fp8", start=0.0)
    assert base["losses"] == whole["losses"], "a run in two parts trains like one"
    assert window["losses"][:STEPS // 2] == whole["losses"][:STEPS // 2] != fp8["losses"][:STEPS // 2]
    assert window["losses"][STEPS // 2:] != whole["losses"][STEPS // 2:]
    assert fp8["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-3), "the same first weights and batch"


def test_a_run_that_is_cut_continues(study, monkeypatch):
    _, expected = study("--arms", "fp8")
    seconds = itertools.count()
    monkeypatch.setattr(paired, "clock", lambda: next(seconds))  # a second passes at each look
    codes = []
    for _ in range(9):
        code, document = study("--arms", "fp8", "--minutes", "0.05", name="cut")
        codes.append(code)
        if code == 0:
            break
    assert len(codes) > 2 and codes[-1] == 0, "it was cut several times, then complete"
    for run, other in zip(document["runs"], expected["runs"]):
        assert run["losses"] == other["losses"]
        assert run["val_loss"] == other["val_loss"]


def test_windows_and_arms_share_the_training_of_bf16(study, monkeypatch):
    trained = []
    train_part = paired.train_part

    def recorded(options, seed, part, *arguments):
        trained.append((part.arm, part.first_step, part.last_step))
        train_part(options, seed, part, *arguments)

    monkeypatch.setattr(paired, "train_part", recorded)
    study("--arms", "fp8", "--stop", "0.25")
    study("--arms", "fp8", "--start", "0.25", "--stop", "0.5")
    study("--arms", "fp8", "fp8-e4m3", "--start", "0.5", "--stop", "0.75")
    code, document = study("--arms", "fp8", "--start", "0.75")
    bf16 = [part for part in trained if part[0] == "bf16"]
    assert code == 0 and len(document["runs"]) == 9
    assert bf16 == [("bf16", 1, 0), ("bf16", 1, 5), ("bf16", 6, 10), ("bf16", 11, 15), ("bf16", 16, 20)]
    assert len(trained) == len(bf16) + 5


def run_of(arm, seed, loss, ms=100.0, steps=10):
    pair = {"size": "124m", "train_sha256": "", "lr": 1e-3, "tokens": 1000 * steps,
            "start": 0.0, "stop": 1.0, "end": 1.0}
    return pair | {"arm": arm, "seed": seed, "steps": steps, "ms": ms, "losses": [loss] * steps,
                     "val_loss": loss + 0.5}


def test_one_command_trains_runs_of_several_lengths(study):
    code, document = study("--arms", "fp8", "--tokens", "2048", "5120")  # of two options the last one counts
    assert code == 0
    assert [(run["arm"], len(run["losses"])) for run in document["runs"]] == [
        ("bf16", 4), ("fp8", 4), ("bf16", 10), ("fp8", 10)]
    assert [row["tokens"] for row in document["pairs"]] == [2048, 5120]


def test_differences_are_paired_by_seed_and_have_an_interval():
    row, = paired.summarize([
        run_of("bf16", 1, 2.0), run_of("bf16", 2, 3.0), run_of("bf16", 3, 7.0),
        run_of("fp8", 1, 2.01, ms=50.0), run_of("fp8", 2, 3.03, ms=50.0)])
    assert row["seeds"] == 2
    assert row["training"] == pytest.approx(0.02)
    half = 12.706 * 0.01  # t of one degree of freedom, times the standard error
    assert row["training_interval"] == pytest.approx([0.02 - half, 0.02 + half])
    assert row["validation"] == pytest.approx(0.02)
    assert row["training_percent"] == pytest.approx(100 * 0.02 / 2.5)
    assert row["speed"] == 2.0


def test_speed_at_equal_loss_counts_the_tokens_that_are_missing():
    """BF16 falls by 0.2 over twice the tokens, and FP8 is 0.1 behind: it needs √2 times as many."""
    rows = paired.summarize([
        run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.1, ms=50.0),
        run_of("bf16", 1, 1.8, steps=20), run_of("fp8", 1, 1.9, ms=50.0, steps=20)])
    assert rows[0]["speed_to_equal_loss"] == pytest.approx(2.0 / 2**0.5)
    assert rows[1]["speed_to_equal_loss"] == pytest.approx(2.0 / 2**0.5), "the shorter runs show the fall"
    row, = paired.summarize([run_of("bf16", 1, 2.0), run_of("fp8", 1, 2.1)])
    assert row["speed_to_equal_loss"] is None


MODEL = '''
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd, bias=c.bias), nn.LayerNorm(c.n_embd, bias=c.bias)
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd), wpe=nn.Embedding(c.block_size, c.n_embd),
            h=nn.ModuleList(Block(c) for _ in range(c.n_layer)), ln_f=nn.LayerNorm(c.n_embd, bias=c.bias)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
'''


def test_nanogpt_trains_from_the_same_weights(study, tmp_path, monkeypatch):
    """A model with nanoGPT's names, but the kit's tanh GELU, has the kit's losses, also in a window, whose
    moments are BF16's, and hands its weights and moments back."""
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    monkeypatch.setitem(paired.ARMS, "nanogpt", paired.ARMS["nanogpt"] | {"compile": False})
    _, document = study("--arms", "nanogpt", "--start", "0.25", "--stop", "0.75", "--end", "1")
    own, other = document["runs"]
    assert own["arm"] == "bf16" and other["arm"] == "nanogpt"
    assert other["losses"] == pytest.approx(own["losses"], rel=1e-4)
    assert other["losses"] != own["losses"]
