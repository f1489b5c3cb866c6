"""--model: a model of your own, path/to/file.py:Class, and which of the kit's models "auto" means."""
import dataclasses
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import train
from nanote import checkpoint, models
from nanote.config import TrainConfig
from trainer_tools import ROOT, losses, metrics, run_script, run_train

PLAIN = '''
import dataclasses
from torch import nn

@dataclasses.dataclass
class NotTheConfig:
    depth: int = 3

@dataclasses.dataclass
class PairConfig:
    vocab_size: int = 257
    n_positions: int = 64
    n_embd: int = 64
    window: int = 8

class Pair(nn.Module):
    """Predict the next token from this one."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.wte(input_ids))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
'''
RUN = ("--seq-len 64 --micro-batch-size 4 --eval-tokens 512 --log-interval 1 --checkpoint-interval 4 "
       "--device cpu")
PAIR = "--model mine.py:Pair --fp8-recipe none"


@pytest.fixture(autouse=True)
def write_the_model(in_tmp_path):
    Path("mine.py").write_text(PLAIN)


def changed(**changes) -> str:
    """Write PLAIN with some text replaced into a file of that name."""
    for name, (old, new) in changes.items():
        assert old in PLAIN
        Path(f"{name}.py").write_text(PLAIN.replace(old, new))


def test_a_plain_pytorch_model_trains_resumes_and_samples(tokens):
    assert run_train(f"{RUN} {PAIR} --n-embd 48 --max-steps 12 --lr 1e-2 --out-dir whole", tokens) == 0
    assert losses("whole")[-1] < losses("whole")[0] - 0.1
    meta = checkpoint.read_meta("whole/step-12")
    assert meta["model_config"] == {"vocab_size": 288, "n_positions": 64, "n_embd": 48, "window": 8}

    Path("elsewhere").mkdir()
    shutil.copytree("whole", "cut")
    shutil.rmtree("cut/step-12")
    Path("mine.py").rename("elsewhere/moved.py")
    assert run_train("--resume --out-dir cut --model elsewhere/moved.py:Pair", tokens) == 0
    assert metrics("cut")[-4:] == metrics("whole")[-4:]
    sampling = ["cut", "--device", "cpu", "--max-new-tokens", "4", "--model", "elsewhere/moved.py:Pair"]
    assert run_script("sample.py", sampling) == 0


@pytest.mark.parametrize("arguments, message", [
    ("--model absent.py:Pair --fp8-recipe none", "absent.py:Pair: cannot be imported (FileNotFoundError"),
    ("--model mine.py:Nothing --fp8-recipe none", "mine.py:Nothing: cannot be imported (AttributeError"),
    ("--model broken.py:Pair --fp8-recipe none", "broken.py:Pair: cannot be imported (SyntaxError"),
    ("--model mine.py:Pair", "has no field use_fp8, so it does not train in FP8; pass --fp8-recipe none"),
    (f"{PAIR} --n-layer 3", "--n-layer 3: the config of --model mine.py:Pair has no field n_layer"),
    (f"{PAIR} --pack-documents", "forward of --model mine.py:Pair has no argument cu_seqlens"),
    (f"{PAIR} --optimizer muon", "trains the matrices of model.blocks"),
    ("--model two.py:Pair --fp8-recipe none", "NotTheConfig and PairConfig have the fields vocab_size"),
    ("--model none.py:Pair --fp8-recipe none", "PairConfig has no n_positions; without a field use_fp8 also"),
    ("--model module.py:Pair --fp8-recipe none", "Pair: its config cannot be stored in a checkpoint as JSON"),
    ("--model needs.py:Pair --fp8-recipe none", "PairConfig: "),
    ("--model pair.py:Pair --fp8-recipe none", "forward(input_ids, labels) returned a tuple; it must"),
    ("--model logits.py:Pair --fp8-recipe none", "must return the mean loss, a tensor without dimensions"),
    ("--model detached.py:Pair --fp8-recipe none", "the loss of forward(input_ids, labels) has no gradient"),
    ("--model bare.py:Pair --fp8-recipe none", "has no attribute config; add self.config = config")])
def test_a_mistake_is_one_line_before_anything_is_written(tokens, refused, arguments, message):
    Path("broken.py").write_text("class Pair(\n")
    window = "window: int = 8"
    changed(two=("depth: int = 3", "vocab_size: int = 3\n    n_positions: int = 3"),
            none=("n_positions", "block_size"), module=(window, "window: object = nn.Linear"),
            needs=(window, "window: int = dataclasses.field(kw_only=True)"),
            pair=("return nn.functional", "return logits, nn.functional"),
            logits=("if labels is None:", "if True:"),
            detached=("(logits.flatten", "(logits.detach().flatten"),
            bare=("        self.config = config\n", ""))
    assert message in refused(train.run, f"{RUN} {arguments} --out-dir run --data {tokens}", "train.py")


def test_a_resumed_run_keeps_the_config_and_buffers_that_it_had(tokens):
    """The defaults in the file may change; --resume uses the stored values, of integers and booleans, too."""
    begin = "        self.config = config\n"
    buffers = ("        import torch\n        self.register_buffer('mask', torch.{}(8, dtype=torch.bool))\n"
               "        self.register_buffer('ids', torch.{}(8, dtype=torch.long))\n")
    changed(mine=(begin, begin + buffers.format("ones", "ones")))
    assert run_train(f"{RUN} {PAIR} --max-steps 4 --out-dir run", tokens) == 0
    changed(mine=(begin, begin + buffers.format("zeros", "zeros")))
    source = Path("mine.py").read_text()
    Path("mine.py").write_text(source.replace("window: int = 8", "window: int = 99"))
    assert run_train("--resume --model mine.py:Pair --out-dir run --max-steps 8", tokens) == 0
    assert checkpoint.read_meta("run/step-8")["model_config"]["window"] == 8
    stored = checkpoint.read_tensors("run/step-8")
    assert stored["model.mask"].tolist() == [True] * 8
    assert stored["model.ids"].tolist() == [1] * 8


# ---------------------------------------------------------------- from nanoGPT

NANOGPT = '''
"""A model with the interface of nanoGPT's model.py."""
from dataclasses import dataclass
from torch import nn

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
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.positions.weight[:idx.shape[1]]
        if targets is None:
            return self.head(x[:, -1:]), None  # of the last position only
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss
'''
OF_NANOGPT = "--model from_nanogpt.py:Model --fp8-recipe none --n-layer 2 --n-head 2 --n-embd 32"


@pytest.fixture
def nanogpt(monkeypatch):
    """model.py and the file that the guide writes beside it; returns that file's text."""
    monkeypatch.setitem(sys.modules, "model", None)  # put back what was there
    del sys.modules["model"]
    Path("model.py").write_text(NANOGPT)
    page = (ROOT / "guide" / "changing_the_model.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    [recipe] = [code for code in blocks if "GPTConfig" in code]
    Path("from_nanogpt.py").write_text(recipe)
    return recipe


def test_a_nanogpt_model_trains_with_the_recipe_of_the_guide(tokens, nanogpt):
    assert run_train(f"{RUN} {OF_NANOGPT} --max-steps 8 --lr 1e-2 --out-dir run", tokens) == 0
    assert losses("run")[-1] < losses("run")[0] - 0.1
    sampling = ["run", "--device", "cpu", "--max-new-tokens", "4", "--model", "from_nanogpt.py:Model"]
    assert run_script("sample.py", sampling) == 0


def test_what_a_nanogpt_model_lacks_is_said_in_two_lines(tokens, refused, nanogpt):
    """What its config lacks and, once that is there, all that is wrong with its forward."""
    options = f"{RUN} --out-dir run --data {tokens}"
    line = refused(train.run, f"{options} --model model.py:GPT", "train.py")
    assert "GPTConfig has no n_positions; without a field use_fp8 also pass --fp8-recipe none" in line
    Path("from_nanogpt.py").write_text(nanogpt.partition("    def forward")[0])
    line = refused(train.run, f"{options} {OF_NANOGPT}", "train.py")
    assert "raised IndexError at model.py:29: Target -100 is out of bounds; ignore labels of -100: " in line
    assert "and forward(input_ids, labels) returned a tuple; it must return the mean loss" in line


@pytest.mark.gpu
def test_a_model_that_reads_the_gpu_trains_without_graphs(tokens):
    changed(host=("logits = ", "logits = float(self.head.weight.norm() > 0) * "))
    options = f"{RUN.replace('--device cpu', '')} --model host.py:Pair --fp8-recipe none --max-steps 4"
    assert run_train(f"{options} --cuda-graph off --out-dir run", tokens) == 0


# ---------------------------------------------------------------- --set

def model_config(step):
    return checkpoint.read_meta(step)["model_config"]


def test_fields_that_are_no_options_are_set_and_stored(tokens, refused):
    more = 'window: int = 8\n    name: str = "a"\n    scale: float | None = None\n    sizes: list[int] = None'
    changed(mine=("window: int = 8", more))
    Path("a.yaml").write_text('set: {window: 9, name: "7", sizes: [1, 2]}\n')
    options = f"{RUN} {PAIR} --max-steps 4 --config a.yaml --set scale=2 window=16 --set scale=0.5"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    expected = dict(window=16, name="7", scale=0.5, sizes=[1, 2])
    assert model_config("run/step-4").items() >= expected.items()

    again = f"{PAIR} --config run/config.json --set window=4"
    assert run_train(f"{again} --out-dir other", tokens) == 0
    assert model_config("other/step-4").items() >= (expected | {"window": 4}).items()

    resume = "--resume --out-dir run --max-steps 8 --model mine.py:Pair"
    message = "--set window=4: the checkpoint has 16; leave it out or start a new run"
    assert message in refused(train.run, f"{resume} --set window=4", "train.py")
    assert run_train(f"{resume} --set window=16") == 0
    assert model_config("run/step-8").items() >= expected.items()
    sampling = ["run", "--device", "cpu", "--max-new-tokens", "4", "--model", "mine.py:Pair"]
    assert run_script("sample.py", sampling) == 0


@pytest.mark.parametrize("given, message", [
    ("size=3", "--set size=3: PairConfig has no field size; it has window\n"),
    ("window", "--set window: must be FIELD=VALUE; pass window=VALUE, of type int\n"),
    ("window=3 --model te", "has no field window; its fields are options of train.py; leave it out\n"),
    ("window=wide", "--set window=wide: must be of type int"),
    ("window=2.5", "must be of type int"), ("window=true", "must be of type int"),
    ("n_embd=32", "--set n_embd=32: is an option of train.py; pass --n-embd"),
    ("use_fp8=true", "is an option of train.py; pass --fp8-recipe")])
def test_a_wrong_field_is_one_line(tokens, refused, given, message):
    arguments = f"{RUN} {PAIR} --set {given} --out-dir run --data {tokens}"
    assert message in refused(train.run, arguments, "train.py")


def test_the_fast_model_leaves_a_chosen_attention_to_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("NANOTE_ENGINE", raising=False)
    for kernel in ("sdpa", "te", "flash"):
        options = dataclasses.asdict(TrainConfig(attention=kernel))
        reason = f"--attention {kernel}: model_te_fast has one attention kernel"
        assert models.pick_model(options, "cuda", torch.bfloat16) == ("optimized", reason)
