"""data.py sft with conversations: labels are the answers, packed conversations do not see each other, and
sample.py --chat talks to the result."""
import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import sample
from hf_folders import TEMPLATE, edit_json, make_model, make_sentencepiece, make_tokenizer
from nanote.loader import Loader
from nanote.parallel import Ranks
from nanote.tokenizers import get_tokenizer
from nanote.tokens import open_tokens
from test_sample import say
from tools import import_hf
from trainer_tools import run_script, run_train

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("in_tmp_path")

# As in Qwen3's, only the last answer has thoughts.
THINKING = TEMPLATE.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }}")
# As in DeepSeek-R1's, the generation prompt is no part of the whole text.
MARKED = TEMPLATE.replace("assistant\n", "assistant\n<think>").replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}")
LLAMA_2 = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}"
    "{% endfor %}")


def conversation(*contents, system=None):
    """Return the messages of a user and the assistant in turns."""
    messages = [{"role": "system", "content": system}] if system else []
    for number, content in enumerate(contents):
        messages.append({"role": "assistant" if number % 2 else "user", "content": content})
    return messages


CHATS = []
for i in range(9):
    CHATS.append(conversation(f"the cat {i}?", f"sat {i} 🙂", "the dog?", f"{i}. too", system="the mat"))
    CHATS.append(conversation("the mat?", f"the cat sat on\nit {i}"))


def write_lines(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_chats(path, chats=CHATS):
    write_lines(path, [{"messages": messages, "id": 1} for messages in chats])


def make_token_files(name, tokenizer, out_dir="set"):
    data.main(["sft", name, "--tokenizer", f"hf:{tokenizer}", "--val-fraction", "0.3", "--out-dir", out_dir])


def token_file(folder, split):
    """Return the tokens of a split, its mask and meta.json."""
    tokens, meta = open_tokens(folder, split)
    return np.array(tokens), np.fromfile(f"{folder}/{split}.mask", np.uint8), meta


def conversations_of(folder):
    """Return (tokens, is_label) of each conversation in a folder of token files."""
    found = []
    for split in ("train", "val"):
        tokens, mask, _ = token_file(folder, split)
        starts = np.flatnonzero(mask == 2)
        assert starts[0] == 0
        found += zip(np.split(tokens, starts[1:]), np.split(mask == 1, starts[1:]))
    return found


def runs_of_labels(tokens, is_label):
    """Return the consecutive tokens that are labels, a list for each run."""
    edges = np.flatnonzero(np.diff(is_label, prepend=False, append=False))
    return [tokens[start:end].tolist() for start, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name, template, end", [
    ("chatml", TEMPLATE, "<|im_end|>"), ("thinking", THINKING, "<|im_end|>"),
    ("marked", MARKED, "<|im_end|>"), ("llama-2", LLAMA_2, "</s>")])
def test_labels_are_answers_and_their_ends(name, template, end):
    """And all tokens are those of transformers."""
    import transformers
    if name == "llama-2":
        Path(name).mkdir()
        make_sentencepiece(name)
        edit_json(f"{name}/tokenizer_config.json", chat_template=template)
    else:
        make_tokenizer(name, template=template)
    write_chats("chats.jsonl")
    make_token_files("chats.jsonl", name)
    theirs = transformers.AutoTokenizer.from_pretrained(name)
    found = {tuple(tokens.tolist()): runs_of_labels(tokens, is_label)
             for tokens, is_label in conversations_of("set")}
    expected = [theirs.apply_chat_template(messages)["input_ids"] for messages in CHATS]
    assert sorted(found) == sorted(map(tuple, expected))
    for ids, messages in zip(expected, CHATS):
        texts = [theirs.decode(run) for run in found[tuple(ids)]]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        if name == "thinking":
            answers[-1] = "<think>" + answers[-1]
        assert [text.removesuffix(end).strip() for text in texts] == answers
        assert all(text.endswith(end) for text in texts)


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "parquet", "folder"])
def test_other_files_hold_the_same_conversations(kind):
    make_tokenizer("bpe")
    write_chats("chats.jsonl")
    name = f"chats.{kind}"
    rows = [{"messages": messages} for messages in CHATS]
    if kind == "jsonl.gz":
        Path(name).write_bytes(gzip.compress(Path("chats.jsonl").read_bytes()))
    elif kind == "json":
        Path(name).write_text(json.dumps(rows))
    elif kind == "parquet":
        from pyarrow import Table, parquet
        parquet.write_table(Table.from_pylist(rows), name)
    else:
        Path(name).mkdir()
        write_chats(f"{name}/chats.jsonl")
    for out_dir, file in (("expected", "chats.jsonl"), ("found", name)):
        make_token_files(file, "bpe", out_dir)
    for file in ("train.bin", "val.bin", "train.mask", "val.mask"):
        assert Path("found", file).read_bytes() == Path("expected", file).read_bytes()


@pytest.mark.parametrize("has_bos", [False, True])
def test_packed_conversations_do_not_see_each_other(has_bos):
    """A conversation is one sequence, although each turn has the token that begins other documents: end of
    text, or BOS. It predicts no token of another one."""
    make_tokenizer("bpe")
    edit_json("bpe/tokenizer.json", post_processor=None)
    edit_json("bpe/tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=has_bos)
    write_chats("chats.jsonl")
    make_token_files("chats.jsonl", "bpe")
    whole = {(tuple(tokens.tolist()), tuple(is_label.tolist()))
             for tokens, is_label in conversations_of("set")}
    longest = max(len(tokens) for tokens, _ in whole)
    config = SimpleNamespace(data="set", seq_len=2 * longest, micro_batch_size=2, grad_accum=1, seed=0,
                             pack_documents=True)
    loader = Loader(config, "train", Ranks(rank=0, count=1))
    found = 0
    for step in range(1, 9):
        [(inputs, labels, cu_seqlens), divisor] = loader.batches(step)[0]
        inputs, labels = inputs.flatten(), labels.flatten()
        for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
            sequence = inputs[start:end].tolist()
            is_cut = start % config.seq_len == 0 or end % config.seq_len == 0
            if len(sequence) == 0 or is_cut:  # by a window
                continue
            assert labels[end - 1] == -100, "the next token is another conversation's"
            is_label = [False, *(labels[start:end - 1] != -100).tolist()]
            assert (tuple(sequence), tuple(is_label)) in whole
            counted = labels[start:end - 1] != -100
            assert torch.equal(labels[start:end - 1][counted], inputs[start + 1:end][counted])
            found += 1
    assert found > 8


def test_a_chat_with_what_was_trained(monkeypatch, capsys):
    """The commands of guide/fine_tuning.md, with a tiny model: the answers are those of the file."""
    make_tokenizer("models/Qwen3-0.6B")
    make_model("models/Qwen3-0.6B")
    questions = ["the cat?", "the dog?", "a mat?"]
    answers = ["sat on the mat.", "too 🙂", "no.\nnone"]
    write_chats("chats.jsonl", 40 * [conversation(*pair) for pair in zip(questions, answers)])
    import_hf.main("models/Qwen3-0.6B out/qwen".split())
    command = "sft chats.jsonl --tokenizer hf:models/Qwen3-0.6B --val-fraction 0.05"
    assert run_script("data.py", command.split()) == 0
    command = "--resume --out-dir out/qwen --data data/chats-Qwen3-0.6B --lr 1e-5 --pack-documents"
    tiny = "--lr 1e-2 --max-steps 60 --warmup-steps 5 --micro-batch-size 2 --grad-accum 1 --device cpu"
    assert run_train(f"{command} {tiny}") == 0
    options = ["out/qwen", "--chat", "--temperature", "0", "--max-new-tokens", "30"]
    for question, answer in zip(questions, answers):
        capsys.readouterr()
        code, out, _ = say(monkeypatch, capsys, question.encode(), *options)
        assert (code, out) == (0, answer + "\n")


# Mistakes: one line, exit code 2, nothing written

SFT = "sft --out-dir set chats.jsonl"
GOOD = json.dumps({"messages": CHATS[0]})


def line_of(*messages):
    return json.dumps({"messages": messages})


USER = {"role": "user", "content": "the cat?"}
ANSWER = {"role": "assistant", "content": "sat"}


@pytest.mark.parametrize("line, message", [
    ("the cat", "line 3: not JSON (Expecting value"),
    (b"caf\xe9", "line 3: not JSON ("),
    ("[1]", "line 3: not a JSON object"),
    ('{"prompt": "a", "answer": "b"}', "line 3: no field 'messages'"),
    ('{"messages": "the cat"}', "line 3: messages 'the cat': must be a list of"),
    ('{"messages": []}', "line 3: no message of the assistant follows"),
    (line_of(USER), "line 3: no message of the assistant follows"),
    (line_of(ANSWER, USER), "line 3: no message of the assistant follows"),
    (line_of(USER, "sat"), "line 3, message 2: 'sat': must be {"),
    (line_of(USER, {"role": "bot", "content": "sat"}), "line 3, message 2: role 'bot': must be one of sys"),
    (line_of({"content": "the cat?"}, ANSWER), "line 3, message 1: role None: must be one of system"),
    (line_of(USER, {"role": "assistant", "content": " "}), "line 3, message 2: content ' ': must be a text"),
    (line_of({"role": "user"}, ANSWER), "line 3, message 1: content None: must be a text"),
    (line_of({"role": "user", "content": ["a"]}, ANSWER), "line 3, message 1: content ['a']: must be a text"),
    (line_of(USER, {"role": "assistant", "content": "a <|im_end|> b"}), "line 3, message 2: holds <|im_end|>")
])
def test_a_line_that_is_no_conversation_is_named(line, message, refused):
    make_tokenizer("bpe")
    raw = line if isinstance(line, bytes) else line.encode()
    Path("chats.jsonl").write_bytes(GOOD.encode() + b"\n\n" + raw + b"\n")
    assert f"chats.jsonl, {message}" in refused(data.main, f"{SFT} --tokenizer hf:bpe", "data.py")


FAILING = "{{ raise_exception('no system message') }}"


@pytest.mark.parametrize("template, message", [
    (None, "line 1: bpe has no chat template; name a tokenizer that has one: --tokenizer hf:DIR"),
    (FAILING, "line 1: the chat template of bpe fails: no system message"),
    ("{% for m in", "line 1: the chat template of bpe fails: "),
    (TEMPLATE.replace("assistant", "assistant\n<think>"),
     "line 1, message 3: the chat template writes the messages before this answer in another way"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
     "{% if add_generation_prompt %}assistant: {% endif %}", "line 1, message 3: begins inside a token"),
    (TEMPLATE.replace("<|im_end|>", "<|endoftext|>"),
     "line 1, message 3: the chat template writes no <|im_end|> right after the answer"),
    (MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}"),
     "line 1: the chat template writes no <|im_end|> right after the answer")])
def test_a_template_that_does_not_fit_is_one_line(template, message, refused):
    make_tokenizer("bpe", text="the cat sat, the dog too", template=template)
    messages = conversation("the dog?", "the cat", system="the mat")
    write_chats("chats.jsonl", [messages])
    line = refused(data.main, f"{SFT} --tokenizer hf:bpe", "data.py")
    assert f"chats.jsonl, {message}" in line.replace(f"{Path.cwd()}/", "")


def test_a_tokenizer_without_a_folder_has_no_template(refused):
    write_chats("chats.jsonl")
    line = refused(data.main, SFT, "data.py")
    assert "chats.jsonl, line 1: the tokenizer byte has no chat template; name a tokenizer that" in line


def test_conversations_and_pairs_are_not_mixed(refused):
    make_tokenizer("bpe")
    write_chats("chats.jsonl")
    write_lines("pairs.jsonl", [{"prompt": "the cat", "answer": "sat"}])
    line = refused(data.main, f"{SFT} pairs.jsonl --tokenizer hf:bpe", "data.py")
    assert "18 of 19 documents are conversations" in line


def test_a_failing_template_ends_a_chat_with_one_line(monkeypatch):
    make_tokenizer("bpe", template=FAILING)
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
    with pytest.raises(ValueError, match="--chat: the chat template of .*bpe fails: no system message"):
        sample.chat(None, get_tokenizer("hf:bpe"), 6)
