"""A model of one's own in the trainer: --model path/to/file.py:Class."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanote import models
from nanote.metrics import read_metrics
from trainer_tools import OPTIONS, ROOT, make_tokens, metrics, run_script, run_train

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
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1),
        labels.flatten())
'''


def with_buffers(**values) -> str:
    lines = [f"        self.register_buffer({name!r}, {value})\n" for name, value in values.items()]
    return "import torch\n" + PLAIN.replace("        self.config = config\n", "".join(
        ["        self.config = config\n", *lines]))


RUN = "--seq-len 64 --micro-batch-size 4 --eval-steps 2 --log-interval 1 --checkpoint-interval 4 --device cpu"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PLAIN)
    monkeypatch.setattr(models, "_own_models", {})


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("corpus") / "tokens")


def test_a_plain_pytorch_model_trains_resumes_and_samples(tokens, capsys):
    model = "--model mine.py:Pair --fp8-recipe none"
    assert run_train(f"{RUN} {model} --n-embd 48 --max-steps 12 --lr 1e-2 --out-dir whole", tokens) == 0
    losses = [record["loss"] for record in read_metrics("whole/metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.1
    meta = json.loads(Path("whole/step-12/meta.json").read_text())
    assert meta["model_config"] == {"vocab_size": 288, "n_positions": 64, "n_embd": 48, "window": 8}

    Path("elsewhere").mkdir()
    shutil.copytree("whole", "cut")
    shutil.rmtree("cut/step-12")
    Path("mine.py").rename("elsewhere/moved.py")
    models._own_models.clear()
    capsys.readouterr()
    assert run_train("--resume --out-dir cut", tokens) == 2
    assert capsys.readouterr().err == (
        "train.py: the model is mine.py:Pair, and code is never taken from a checkpoint: pass --model "
        "mine.py:Pair again, to train.py or sample.py\n")
    assert run_train("--resume --out-dir cut --model elsewhere/moved.py:Pair", tokens) == 0
    assert metrics("cut")[-4:] == metrics("whole")[-4:]

    models._own_models.clear()
    assert run_script("sample.py", ["cut", "--device", "cpu", "--max-new-tokens", "4"]) == 2
    assert "pass --model elsewhere/moved.py:Pair again" in capsys.readouterr().err
    sampling = ["cut", "--device", "cpu", "--max-new-tokens", "4", "--model", "elsewhere/moved.py:Pair"]
    assert run_script("sample.py", sampling) == 0


def test_a_subclass_of_a_model_file_trains_in_fp8_with_muon_and_accumulation(tokens):
    Path("wider.py").write_text(
        "from model_te_optimized import OptimizedConfig, OptimizedGPT2Model\n"
        "import torch\n"
        "class Wider(OptimizedGPT2Model):\n"
        "    def __init__(self, config: OptimizedConfig):\n"
        "        super().__init__(config)\n"
        "        self.extra = torch.nn.Parameter(torch.zeros(config.n_embd))\n"
    )
    options = f"{OPTIONS} --max-steps 12 --model wider.py:Wider --optimizer muon"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    records = read_metrics("run/metrics.jsonl")
    assert records[-1]["loss"] < records[0]["loss"] - 0.5


@pytest.mark.parametrize("without_fp8, said", [
    ("raise RuntimeError('not here')", True), ("return logits * float('nan')", False)])
def test_a_model_that_runs_in_fp8_only_ends_and_resumes(tokens, capsys, without_fp8, said):
    Path("only.py").write_text(
        "from model_te_optimized import OptimizedConfig, OptimizedGPT2Model\n"
        "class Only(OptimizedGPT2Model):\n"
        "    def __init__(self, config: OptimizedConfig):\n"
        "        super().__init__(config)\n"
        "    def cross_entropy(self, logits, labels):\n"
        "        if not self.config.use_fp8:\n"
        f"            {without_fp8.replace('logits', 'super().cross_entropy(logits, labels)')}\n"
        "        return super().cross_entropy(logits, labels)\n"
    )
    assert run_train(f"{OPTIONS} --max-steps 2 --model only.py:Only --out-dir run", tokens) == 0
    printed = capsys.readouterr().out
    assert ("only.py:Only does not run without FP8: RuntimeError: not here" in printed) == said
    last = read_metrics("run/metrics.jsonl")[-1]
    assert "val_loss" in last and "val_loss_without_fp8" not in last
    assert run_train("--resume --out-dir run --model only.py:Only --max-steps 3", tokens) == 0


def test_an_unedited_copy_trains_as_the_original(tokens):
    shutil.copy(ROOT / "model_te_optimized.py", "copy.py")
    for model, out in (("optimized", "one"), ("copy.py:OptimizedGPT2Model", "two")):
        assert run_train(f"{OPTIONS} --max-steps 4 --model {model} --out-dir {out}", tokens) == 0
    assert metrics("one") == metrics("two")


@pytest.mark.parametrize("arguments, message", [
    ("--model absent.py:Pair", "there is no file absent.py"),
    ("--model mine.py:Nothing", "mine.py has no torch.nn.Module Nothing; it has Pair"),
    ("--model mine.py:Pair", "no field use_fp8 in its config, so it does not train in FP8; pass --fp8-recipe "
                             "none"),
    ("--model mine.py:Pair --fp8-recipe none --n-layer 3", "no field n_layer in its config"),
    ("--model mine.py:Pair --fp8-recipe none --pack-documents", "no argument cu_seqlens of forward"),
    ("--model mine.py:Pair --fp8-recipe none --optimizer muon", "trains the matrices of model.blocks"),
    ("--model broken.py:Pair", "broken.py cannot be imported (SyntaxError"),
    ("--model two.py:Pair", "the file has PairConfig and OtherConfig; annotate the constructor"),
    ("--model none.py:Pair", "no dataclass has the fields vocab_size and n_positions"),
    ("--model unstorable.py:Pair --fp8-recipe none", "PairConfig cannot be stored as JSON in a checkpoint"),
    ("--model tuple.py:Pair --fp8-recipe none", "PairConfig cannot be stored as JSON in a checkpoint"),
    ("--model exits.py:Pair", "exits.py cannot be imported (SystemExit: bye)"),
    ("--model pair.py:Pair --fp8-recipe none", "forward(input_ids, labels) returned a tuple"),
    ("--model bare.py:Pair --fp8-recipe none", "has no attribute config; add self.config = config"),
    ("--model needs.py:Pair --fp8-recipe none", "PairConfig: "),
    ("--model complex.py:Pair --fp8-recipe none", "freqs is torch.complex64, which a checkpoint cannot hold"),
    ("--model extra.py:Pair --fp8-recipe none", "does not hold what Pair.get_extra_state() returns"),
])
def test_what_is_wrong_is_said_in_a_line_before_anything_is_written(tokens, arguments, message, capsys):
    Path("broken.py").write_text("class Pair(\n")
    Path("two.py").write_text(PLAIN + "\n@dataclasses.dataclass\nclass OtherConfig(PairConfig):\n    depth: "
                                      "int = 1\n")
    Path("none.py").write_text(PLAIN.replace("n_positions", "block_size"))
    window = "window: int = 8"
    Path("unstorable.py").write_text(PLAIN.replace(window, "window: object = nn.Linear"))
    Path("tuple.py").write_text(PLAIN.replace(window, "window: tuple = (1, 2)"))
    Path("needs.py").write_text(PLAIN.replace(window, "window: int = dataclasses.field(kw_only=True)"))
    Path("exits.py").write_text("raise SystemExit('bye')")
    Path("pair.py").write_text(PLAIN.replace("return logits if", "return logits, None if"))
    Path("bare.py").write_text(PLAIN.replace("        self.config = config\n", ""))
    Path("complex.py").write_text(with_buffers(freqs="torch.ones(3, dtype=torch.complex64)"))
    Path("extra.py").write_text(f"{PLAIN}\n    def get_extra_state(self):\n        return 5\n")
    assert run_train(f"{RUN} {arguments} --out-dir run", tokens) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("train.py: ")
    assert not Path("run").exists()


def test_a_resumed_run_keeps_the_config_that_it_began_with(tokens):
    """The default of a field of one's own may change in the file; --resume uses the stored value."""
    options = f"{RUN} --model mine.py:Pair --fp8-recipe none --max-steps 4"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    Path("mine.py").write_text(PLAIN.replace("window: int = 8", "window: int = 99"))
    assert run_train("--resume --model mine.py:Pair --out-dir run --max-steps 8", tokens) == 0
    assert json.loads(Path("run/step-8/meta.json").read_text())["model_config"]["window"] == 8


def test_buffers_of_integers_and_booleans_are_restored(tokens, capsys):
    Path("mine.py").write_text(with_buffers(mask="torch.ones(8, dtype=torch.bool)", ids="torch.arange(8)"))
    run = f"{RUN} --model mine.py:Pair --out-dir run"
    assert run_train(f"{run} --fp8-recipe none --max-steps 4", tokens) == 0
    zeros = with_buffers(mask="torch.zeros(8, dtype=torch.bool)", ids="torch.zeros(8, dtype=torch.long)")
    Path("mine.py").write_text(zeros)
    assert run_train("--resume --model mine.py:Pair --out-dir run --max-steps 8") == 0
    stored = {}
    for file in Path("run/step-8").glob("*.safetensors"):
        stored |= load_file(file)
    assert stored["model.mask"].tolist() == [True] * 8 and stored["model.ids"].tolist() == list(range(8))
    Path("mine.py").write_text(with_buffers(mask="torch.ones(8)", ids="torch.arange(8)"))
    assert run_train("--resume --model mine.py:Pair --out-dir run --max-steps 12") == 2
    assert "model.mask is torch.bool, but torch.float32 in the model" in capsys.readouterr().err


def test_a_model_that_cannot_generate_trains_all_the_same(tokens, capsys):
    Path("mine.py").write_text(PLAIN.replace("return logits if labels is None else", "return"))
    assert run_train(f"{RUN} --model mine.py:Pair --fp8-recipe none --max-steps 4 --out-dir run", tokens) == 0
    printed = capsys.readouterr().out
    assert "\nno sample: mine.py:Pair: AttributeError: 'NoneType' object" in printed
    assert "checkpoint   run/step-4" in printed


def test_a_checkpoint_does_not_name_code(tokens, capsys):
    """A run folder from elsewhere must not make the trainer import a file."""
    assert run_train(f"{RUN} --model mine.py:Pair --fp8-recipe none --max-steps 4 --out-dir run", tokens) == 0
    models._own_models.clear()
    Path("mine.py").write_text("open('ran', 'w')")
    assert run_train("--resume --out-dir run --max-steps 8", tokens) == 2
    assert run_script("sample.py", ["run"]) == 2
    assert not Path("ran").exists()


def test_make_train_step_equals_a_loop_by_hand():
    from model_te_optimized import OptimizedConfig, OptimizedGPT2Model, te
    from nanote.train_step import make_train_step

    config = OptimizedConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=288, n_positions=32, use_fp8=True)
    batches = [(ids[:, :-1], ids[:, 1:]) for ids in torch.randint(0, 288, (2, 2, 33))] * 6
    results = []
    for by_hand in (False, True):
        torch.manual_seed(1)
        model = OptimizedGPT2Model(config)
        losses = []
        if by_hand:
            for _ in range(4):  # the first scales of delayed scaling
                (model(*batches[0]) / 2).backward()
                model.zero_grad()
            groups = [{"params": [p for p in model.parameters() if (p.dim() >= 2) == decays],
                       "weight_decay": 0.1 * decays} for decays in (True, False)]
            optimizer = te.optimizers.FusedAdam(groups, lr=1e-2, betas=(0.9, 0.95))
            for first, second in zip(batches[::2], batches[1::2]):
                total = 0
                for number, batch in enumerate((first, second)):
                    loss = model(*batch, is_first_microbatch=number == 0) / 2
                    loss.backward()
                    total += loss.detach()
                losses.append((total, torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        else:
            step = make_train_step(model, batches[0], grad_accum=2, grad_clip=0.5)
            losses = [step([first, second], lr=1e-2) for first, second in zip(batches[::2], batches[1::2])]
        results.append(torch.tensor(losses))
    assert torch.equal(*results)
    assert results[0][-1, 0] < results[0][0, 0]


def test_a_step_that_raised_an_error_leaves_no_gradients():
    from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
    from nanote.train_step import make_train_step

    def first_norm(batches_before):
        torch.manual_seed(0)
        config = OptimizedConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=32, n_positions=16)
        model = OptimizedGPT2Model(config)
        step = make_train_step(model, (ids, ids), grad_accum=2)
        for batches in batches_before:
            with pytest.raises(IndexError):
                step(batches, lr=1e-3)
        return step([(ids, ids), (ids, ids)], lr=1e-3)[1]

    ids = torch.arange(16).reshape(1, 16)
    assert first_norm([[(ids, ids), (ids + 99, ids)]]) == first_norm([])


def test_make_train_step_knows_from_the_model_what_cannot_be_captured(monkeypatch):
    from model_te_optimized import OptimizedConfig, OptimizedGPT2Model
    from nanote import train_step

    monkeypatch.setattr(train_step.fp8, "IS_REFERENCE", False)
    for options, reason in (({"attn_dropout": 0.1}, "attn-dropout"),
                            ({"gradient_checkpointing": True}, "gradient-checkpointing")):
        config = OptimizedConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=32, n_positions=16, **options)
        model, ids = OptimizedGPT2Model(config), torch.zeros(1, 16, dtype=torch.long)
        monkeypatch.setattr(train_step, "apply_fast_kernels", lambda *_: "report")
        monkeypatch.setattr(train_step, "make_optimizer", lambda *_: None)
        step = train_step.make_train_step(model, (ids, ids))
        assert reason in train_step.graph_unsupported_reason(step.config, torch.device("cuda"))
        assert step.report == "report"


@pytest.mark.gpu
def test_a_model_that_cannot_be_captured_trains_without_graphs(tokens, recwarn):
    Path("host.py").write_text(PLAIN.replace("logits = ", "logits = float(self.head.weight.norm() > 0) * "))
    options = f"{RUN.replace('--device cpu', '')} --model host.py:Pair --fp8-recipe none --max-steps 4"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    assert any("CUDA graphs are off" in str(warning.message) for warning in recwarn)
    assert torch.rand(1, device="cuda") < 1, "random numbers, as for dropout, after a capture that failed"
    options = options.replace("host.py", "mine.py")
    assert run_train(f"{options} --cuda-graph on --out-dir graphed", tokens) == 0
