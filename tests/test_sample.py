"""nanote/generate.py and sample.py: the cache changes no token, the sampling options work as documented."""
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_folders
import sample
from nanote import models, recipes
from nanote.generate import generate, pick
from nanote.tokenizers import get_tokenizer
from tools import import_hf
from trainer_tools import MODERN, OPTIONS, run_script, run_train


def make_model(**options):
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_head=4, n_embd=64, vocab_size=288, n_positions=32, use_fp8=True)
    config = models.make_model_config("optimized", shape | options)
    model = models.instantiate("optimized", config)
    for parameter in model.parameters():  # logits far from uniform, as after training: greedy text varies
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


UNTIED = dict(tie_embeddings=False)


@pytest.mark.parametrize("options", [UNTIED, UNTIED | MODERN | dict(n_kv_head=2)], ids=["gpt2", "modern"])
@pytest.mark.parametrize("prompt_length", [10, 50])
def test_greedy_text_is_the_same_without_the_cache(options, prompt_length):
    model = make_model(**options)
    prompt = torch.randint(0, 257, (prompt_length,)).tolist()
    # 40 tokens: the window of 32 slides
    with_cache = generate(model, prompt, 40, temperature=0, use_cache=True)
    without = generate(model, prompt, 40, temperature=0, use_cache=False)
    assert with_cache == without
    assert len(without) == 40
    assert len(set(without)) > 5, "the text varies"


def test_generation_runs_without_fp8_and_restores_the_model():
    model = make_model().train()
    generate(model, [1, 2, 3], 3)
    assert model.training and model.config.use_fp8
    assert recipes.get_state(model) == {}, "no FP8 GEMM has run"


def draws(logits, count=1500, temperature=1.0, top_k=None, top_p=None):
    """Return the frequency of each token."""
    logits = torch.tensor(logits)
    generator = torch.Generator().manual_seed(0)
    picked = [pick(logits, temperature, top_k, top_p, generator) for _ in range(count)]
    return [picked.count(token) / count for token in range(len(logits))]


LOGITS = torch.tensor([0.2, 0.5, 0.3]).log().tolist()


@pytest.mark.parametrize("options, expected", [
    (dict(), [0.2, 0.5, 0.3]),
    (dict(temperature=0), [0, 1, 0]),
    (dict(temperature=0.5), [4 / 38, 25 / 38, 9 / 38]),
    (dict(temperature=1e308), [1 / 3, 1 / 3, 1 / 3]),
    (dict(top_k=2), [0, 5 / 8, 3 / 8]),
    (dict(top_p=0.6), [0, 5 / 8, 3 / 8]),
    (dict(top_k=2, top_p=0.62), [0, 1, 0]),  # after top_k the first token has 5/8 > 0.62
])
def test_sampling_options(options, expected):
    assert draws(LOGITS, **options) == pytest.approx(expected, abs=0.05)


class Counter(torch.nn.Module):
    """Predicts t + 1 after token t; the padding rows above the vocabulary have even higher logits."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(n_positions=8, use_fp8=False)

    def forward(self, ids):
        logits = torch.nn.functional.one_hot((ids + 1) % 16, 16).float()
        logits[..., 12:] = 5.0
        return logits


def test_padding_rows_are_never_sampled():
    model = Counter()
    assert generate(model, [3], 5, temperature=0, vocab_size=12) == [4, 5, 6, 7, 8]
    assert generate(model, [3], 1, temperature=0) == [12], "without a limit, a padding row"


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("logits", [[1.0, math.nan], [1.0, math.inf]])
def test_logits_that_are_not_finite_are_one_line(logits, temperature):
    with pytest.raises(ValueError, match="not finite"):
        pick(torch.tensor(logits), temperature, None, None, None)


@pytest.mark.parametrize("options", [
    dict(temperature=-1), dict(temperature=math.nan), dict(top_k=0), dict(top_p=1.5)])
def test_an_option_out_of_range_is_one_line(options):
    with pytest.raises(ValueError, match="must be .* works$"):
        generate(Counter(), [1], 3, **options)


def test_the_command_line_reads_a_run(tokens, in_tmp_path, capsys):
    options = f"{OPTIONS} --n-layer 1 --max-steps 4 --checkpoint-interval 2 --eval-interval 0"
    assert run_train(f"{options} --out-dir run", tokens) == 0
    capsys.readouterr()

    def text(arguments):
        assert run_script("sample.py", ["--max-new-tokens", "90", *arguments.split()]) == 0
        return capsys.readouterr().out

    greedy = text("run --prompt line --temperature 0")
    assert greedy.startswith("line") and len(greedy) > 20
    assert greedy == text("run --prompt line --temperature 0 --no-kv-cache")
    assert greedy == text("run/step-4 --prompt line --temperature 0")
    assert text("run --seed 1") != text("run/step-2 --seed 1")
    assert text("run --seed 1") == text("run --seed 1") != text("run --seed 2")
    assert text("run --num-samples 3").count("\n---\n") == 2
    for name in ("auto", "optimized", "fast"):  # one network
        assert greedy == text(f"run --prompt line --temperature 0 --model {name}")


# ---- chat and score: a tiny Qwen3 with its tokenizer and chat template

@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    """A Hugging Face folder, its model, and the folder of the run that it was imported as."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("instruct")
    hf_folders.make_tokenizer(folder / "hf")
    hf = hf_folders.make_model(folder / "hf")
    import_hf.import_folder(folder / "hf", folder / "run")
    return SimpleNamespace(folder=folder / "hf", run=str(folder / "run"), hf=hf)


def say(monkeypatch, capsys, lines: bytes, *argv):
    """Pipe `lines` into sample.py; return the exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    code = run_script("sample.py", [*argv, "--device", "cpu"])
    return code, *capsys.readouterr()


def greedy(instruct, ids):
    """The next tokens after ids (1, S), of transformers."""
    new = instruct.hf.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0,
                               suppress_tokens=list(range(278, 288)), attention_mask=torch.ones_like(ids))
    return new[0, ids.shape[1]:].tolist()


def answers(instruct, questions):
    """The greedy answers of transformers to a conversation."""
    import transformers

    theirs, turns = transformers.AutoTokenizer.from_pretrained(instruct.folder), []
    for question in questions:
        turns.append({"role": "user", "content": question})
        ids = theirs.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt",
                                         return_dict=True)["input_ids"]
        new = greedy(instruct, ids)
        while new and new[-1] in (0, 2):
            new.pop()
        turns.append({"role": "assistant", "content": get_tokenizer(f"hf:{instruct.folder}").decode(new)})
    return [turn["content"] for turn in turns[1::2]]


@pytest.mark.skipif(not recipes.IS_REFERENCE, reason="TF32 may choose another of two likely tokens")
def test_a_chat_answers_as_transformers_does(instruct, monkeypatch, capsys):
    options = [instruct.run, "--chat", "--temperature", "0", "--max-new-tokens", "6"]
    code, out, _ = say(monkeypatch, capsys, "the cat\n\nthe 🙂".encode(), *options)
    first, second = answers(instruct, ["the cat", "the 🙂"])
    assert first != second
    assert code == 0
    assert out == f"{first}\n{second}\n"


def test_a_later_turn_has_the_tokens_of_transformers(tmp_path, monkeypatch):
    """With a tokenizer that prepends a space to a text: the history of a chat has none before an answer."""
    import transformers

    hf_folders.make_sentencepiece(tmp_path)
    hf_folders.edit_json(tmp_path / "tokenizer_config.json", chat_template=hf_folders.TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    answer = theirs("sat", add_special_tokens=False).input_ids
    prompts = []

    def fixed_answer(model, ids, *args, **options):
        prompts.append(ids)
        return [*answer, theirs.eos_token_id]

    monkeypatch.setattr(sample, "generate", fixed_answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\nthe dog\n"))
    sample.chat(None, get_tokenizer(f"hf:{tmp_path}"), 6)
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": theirs.decode(answer)},
             {"role": "user", "content": "the dog"}]
    expected = theirs.apply_chat_template(turns, add_generation_prompt=True)
    assert prompts[1] == expected["input_ids"]


@pytest.mark.skipif(not recipes.IS_REFERENCE, reason="TF32 may choose another of two likely tokens")
@pytest.mark.parametrize("prompt", ["the cat", ""])
def test_a_prompt_begins_as_in_transformers(instruct, prompt, monkeypatch, capsys):
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(instruct.folder)
    new = greedy(instruct, theirs(prompt, return_tensors="pt").input_ids)
    expected = prompt + get_tokenizer(f"hf:{instruct.folder}").decode(new)
    code, out, _ = say(monkeypatch, capsys, b"", instruct.run, "--prompt", prompt, "--temperature", "0",
                       "--max-new-tokens", "6")
    assert code == 0
    assert out == expected + "\n"


@torch.no_grad()
def transformers_losses(model, ids):
    """Return the loss of each token after the first, in windows of 96 that do not overlap."""
    losses = []
    for start in range(0, len(ids) - 1, 96):
        window = torch.tensor(ids[start:start + 97])
        logits = model(window[None, :-1]).logits[0]
        losses += torch.nn.functional.cross_entropy(logits, window[1:], reduction="none").tolist()
    return losses


@pytest.mark.parametrize("name", ["file.txt", "rows.jsonl"])
def test_the_score_counts_each_token_once(instruct, name, tmp_path, monkeypatch, capsys):
    texts = ["the cat sat on the mat 🙂 <|im_end|>\r\n" * 9]
    content = texts[0]
    if name == "rows.jsonl":
        texts.append("the dog")
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / name).write_bytes(content.encode())
    tokenizer = get_tokenizer(f"hf:{instruct.folder}")
    ids = []
    for text in texts:
        ids += [0, *tokenizer.encode(text), 2]  # the beginning and the end of a document
    losses = transformers_losses(instruct.hf, ids[:-1])
    size = sum(len(text.encode()) for text in texts)
    assert len(losses) > 192, "several windows"

    code, out, _ = say(monkeypatch, capsys, b"", instruct.run, "--score", str(tmp_path / name))
    assert code == 0
    assert out.endswith(f" ({len(losses):,} tokens, {size:,} bytes)\n")
    _, nats, _, _, _, bits, *_ = out.split()
    tolerance = 2e-4 if recipes.IS_REFERENCE else 2e-2
    assert float(nats) == pytest.approx(sum(losses) / len(losses), abs=tolerance)
    assert float(bits) == pytest.approx(sum(losses) / math.log(2) / size, abs=tolerance)


@pytest.mark.parametrize("arguments, words", [
    ("--num-samples 0", "--num-samples 0: must be at least 1"),
    ("--max-new-tokens -1", "--max-new-tokens -1: must be at least 1"),
    ("--model best", "--model best: unknown; use optimized, advanced"),
    ("--model custom", "step-0 has optimized; leave it out, or pass that"),
    ("--model mine.py:Net", "--model mine.py:Net: cannot be imported"),
    ("--chat --tokenizer hf:base", "has no chat template; pass --prompt"),
    ("--tokenizer byte", "--tokenizer byte: the model was trained with hf:"),
    ("--score empty.txt", "empty.txt: holds no text"), ("--score latin.txt", "latin.txt: not UTF-8"),
    ("--score missing.txt", "missing.txt: no such file"), ("--device cuda:99", "--device cuda:99: "),
    ("--device cuda:x", "--device cuda:x: "), ("--device gpu", "--device gpu: ")])
def test_a_mistake_is_one_line(instruct, in_tmp_path, refused, arguments, words):
    hf_folders.make_tokenizer("base", template=None)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"caf\xe9")
    assert words in refused(sample.main, f"{instruct.run} {arguments}", "sample.py")
