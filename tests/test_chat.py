"""data.py sft with conversations: labels are the answers, packed conversations do not see each other, and
sample.py --chat talks to the result."""
import gzip
import io
import json
import logging
import re
import sys
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
from nanote.tokens import FIRST_TOKEN, LABEL, open_tokens
from test_page_commands import TEXTS, lines_of
from test_sample import say
from tools import import_hf
from trainer_tools import run_script

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("in_tmp_path")

# As in Qwen3's, only the last answer has thoughts.
THINKING = (
    "{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}"
    "{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# As in DeepSeek-R1's, the generation prompt is no part of the whole text.
MARKED = (
    "{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}")
STOP_AFTER_BLOCK = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
NEWLINE_IN_BLOCK = MARKED.replace("<|im_end|>{% endgeneration %}", "<|im_end|>\n{% endgeneration %}")
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


TOKEN_FILES = ("train.bin", "val.bin", "train.mask", "val.mask")
CHATS = []
for i in range(9):
    CHATS.append(conversation(f"the cat {i}?", f"sat {i} 🙂", "the dog?", f"{i}. too", system="the mat"))
    CHATS.append(conversation("the mat?", f"the cat sat on\nit {i}"))


def write_lines(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_chats(path, chats=CHATS):
    write_lines(path, [{"messages": messages, "id": 1} for messages in chats])


def make_token_files(name, tokenizer, out_dir="set", val_fraction=0.3):
    data.main(["sft", name, "--tokenizer", f"hf:{tokenizer}", "--val-fraction", str(val_fraction),
               "--out-dir", out_dir])


def token_file(folder, split):
    """Return the tokens of a split, its mask and meta.json."""
    tokens, meta = open_tokens(folder, split)
    return np.array(tokens), np.fromfile(f"{folder}/{split}.mask", np.uint8), meta


def conversations_of(folder):
    """Return (tokens, is_label) of each conversation in a folder of token files."""
    found = []
    for split in ("train", "val"):
        tokens, mask, _ = token_file(folder, split)
        starts = np.flatnonzero(mask == FIRST_TOKEN)
        assert starts[0] == 0
        found += zip(np.split(tokens, starts[1:]), np.split(mask == LABEL, starts[1:]))
    return found


def runs_of_labels(tokens, is_label):
    """Return the consecutive tokens that are labels, a list for each run."""
    edges = np.flatnonzero(np.diff(is_label, prepend=False, append=False))
    return [tokens[start:end].tolist() for start, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name, template, end", [
    ("chatml", TEMPLATE, "<|im_end|>"),
    ("thinking", THINKING, "<|im_end|>"),
    ("marked", MARKED, "<|im_end|>"),
    ("stop after block", STOP_AFTER_BLOCK, "<|im_end|>"),
    ("newline in block", NEWLINE_IN_BLOCK, "<|im_end|>"),
    ("llama-2", LLAMA_2, "</s>")
], ids=["chatml", "thinking", "marked", "stop-after-block", "newline-in-block", "llama-2"])
def test_labels_are_answers_and_their_ends(name, template, end):
    """Of conversations whose tokens are those of transformers."""
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
        if name == "llama-2":
            answers = [f"{answer} " for answer in answers]  # decoding takes out the space before
        assert texts == [answer + end for answer in answers]


def assert_same_token_files(name, tokenizer, other_name, other_tokenizer):
    """tokenizer: the folder of one, or None."""
    for out_dir, file, folder in (("expected", name, tokenizer), ("found", other_name, other_tokenizer)):
        option = f"hf:{folder}" if folder else "byte"
        data.main(["sft", file, "--tokenizer", option, "--val-fraction", "0.3", "--out-dir", out_dir])
    for file in TOKEN_FILES:
        assert Path("found", file).read_bytes() == Path("expected", file).read_bytes()


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["unmarked", "marked"])
def test_threads_make_the_same_token_files(template):
    make_tokenizer("bpe", template=template)
    write_chats("chats.jsonl", 5 * CHATS)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for count in (1, 8):
        data.main(f"sft chats.jsonl --tokenizer hf:bpe --val-fraction 0.3 --num-workers {count} "
                  f"--out-dir {count}".split())
    sys.setswitchinterval(interval)
    for file in TOKEN_FILES:
        assert Path("8", file).read_bytes() == Path("1", file).read_bytes()


@pytest.mark.parametrize("kind", ["jsonl.gz", "json", "parquet", "folder"])
def test_other_files_hold_the_same_conversations(kind):
    """Also if a message has a field that others lack, and the template writes it."""
    make_tokenizer("bpe", template=TEMPLATE.replace("{{ m.role }}", "{{ m.role }}{{ m.name or '' }}"))
    rows = [{"messages": messages} for messages in CHATS[:-1]]
    rows.append({"messages": [{**CHATS[-1][0], "name": "dog"}, *CHATS[-1][1:]]})
    write_lines("chats.jsonl", rows)
    name = f"chats.{kind}"
    if kind == "jsonl.gz":
        Path(name).write_bytes(gzip.compress(Path("chats.jsonl").read_bytes()))
    elif kind == "json":
        Path(name).write_text(json.dumps(rows))
    elif kind == "parquet":
        from pyarrow import Table, parquet
        parquet.write_table(Table.from_pylist(rows), name)
    else:
        Path(name).mkdir()
        write_lines(f"{name}/chats.jsonl", rows)
        Path(name, "README.md").write_text("is no file of rows")
    assert_same_token_files("chats.jsonl", "bpe", name, "bpe")


@pytest.mark.parametrize("has_bos", [False, True])
def test_packed_conversations_do_not_see_each_other(has_bos):
    """A conversation is one sequence, although each turn has the token that begins other documents: end of
    text, or BOS. It predicts no token of another one."""
    make_tokenizer("bpe")
    edit_json("bpe/tokenizer.json", post_processor=None)
    edit_json("bpe/tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=has_bos)
    write_chats("chats.jsonl")
    make_token_files("chats.jsonl", "bpe")
    conversations = {(tuple(tokens.tolist()), tuple(is_label.tolist()))
             for tokens, is_label in conversations_of("set")}
    longest = max(len(tokens) for tokens, _ in conversations)
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
            assert (tuple(sequence), tuple(is_label)) in conversations
            counted = labels[start:end - 1] != -100
            assert torch.equal(labels[start:end - 1][counted], inputs[start + 1:end][counted])
            found += 1
    assert found > 8


def test_the_commands_of_the_page_train_the_answers(monkeypatch, capsys):
    """Those of guide/fine_tuning.md, with a tiny model."""
    [download, import_hf, make_tokens, train, chat, _] = PAGE_COMMANDS
    make_tokenizer("models/Qwen3-0.6B")
    make_model("models/Qwen3-0.6B")
    questions = ["the cat?", "the dog?", "a mat?"]
    answers = ["sat on the mat.", "too 🙂", "no.\nnone"]
    write_chats("chats.jsonl", 40 * [conversation(*pair) for pair in zip(questions, answers)])
    assert "--local-dir models/Qwen3-0.6B" in download
    run(import_hf)
    run(f"{make_tokens} --val-fraction 0.05")
    run(f"{train} --lr 1e-2 --max-steps 60 --warmup-steps 5 --micro-batch-size 2 --grad-accum 1 --device cpu")
    options = [*words_of(chat), "--temperature", "0", "--max-new-tokens", "30"]
    for question, answer in zip(questions, answers):
        capsys.readouterr()
        code, out, _ = say(monkeypatch, capsys, question.encode(), *options)
        assert (code, out) == (0, answer + "\n")


# The first commands of the page, which other tests of this name only parse
PAGE_COMMANDS = lines_of(re.search(r"```sh\n(.*?)```", TEXTS["fine_tuning.md"], re.S)[1])


def words_of(command):
    """Return the options of a command of the page."""
    return command.split()[2:]


def run(command):
    """Run a command of the page in this process."""
    script = command.split()[1]
    if script == "tools/import_hf.py":
        import_hf.main(words_of(command))
    else:
        assert run_script(script, words_of(command)) == 0


# Mistakes: one line, exit code 2, nothing written

SFT = "sft --out-dir set chats.jsonl"
GOOD = json.dumps({"messages": CHATS[0]})


def line_of(*messages):
    return json.dumps({"messages": messages})


USER = {"role": "user", "content": "the cat?"}
ANSWER = {"role": "assistant", "content": "sat"}


@pytest.mark.parametrize("number, name", [(1, "chats.jsonl"), (3, "chats.jsonl"), (3, "folder")])
@pytest.mark.parametrize("line, message", [
    ("the cat", ": not JSON (Expecting value"),
    (b"caf\xe9", ": not JSON ("),
    (100_000 * "[", ": not JSON ("),
    ("[1]", ": not a JSON object"),
    ('{"messages": "the cat"}', ": messages 'the cat': must be a list of"),
    ('{"messages": []}', ": no message of the assistant follows"),
    (line_of(USER), ": no message of the assistant follows"),
    (line_of(ANSWER, USER), ": no message of the assistant follows"),
    (line_of(USER, "sat"), ", message 2: 'sat': must be {"),
    (line_of(USER, {"role": "bot", "content": "sat"}), ", message 2: role 'bot': must be one of sys"),
    (line_of({"content": "the cat?"}, ANSWER), ", message 1: role None: must be one of system"),
    (line_of(USER, {"role": "assistant", "content": " "}), ", message 2: content ' ': must be a text"),
    (line_of({"role": "user"}, ANSWER), ", message 1: content None: must be a text"),
    (line_of({"role": "user", "content": ["a"]}, ANSWER), ", message 1: content ['a']: must be a text"),
    (line_of(USER, {"role": "assistant", "content": "a <|im_end|> b"}), ", message 2: holds <|im_end|>")
])
def test_a_line_that_is_no_conversation_is_named(line, message, number, name, refused):
    make_tokenizer("bpe")
    raw = line if isinstance(line, bytes) else line.encode()
    lines = [GOOD.encode(), b"", GOOD.encode()]
    lines[number - 1] = raw
    path = Path(name, "chats.jsonl") if name == "folder" else Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\n".join(lines))
    line = refused(data.main, f"sft --out-dir set {name} --tokenizer hf:bpe", "data.py")
    assert f"{path}, line {number}{message}" in line


@pytest.mark.parametrize("line", ['{"id": 1}', '{"conversations": []}', '{"messages": null}'])
def test_a_line_without_a_conversation_is_named(line, refused):
    make_tokenizer("bpe")
    Path("first.jsonl").write_text(f"{line}\n{GOOD}")
    Path("later.jsonl").write_text(f"{GOOD}\n{line}")
    line = refused(data.main, "sft --out-dir set first.jsonl --tokenizer hf:bpe", "data.py")
    assert "first.jsonl, line 1: no column 'prompt' in " in line
    assert "; name one with --column, or write {\"messages\": [...]}" in line
    line = refused(data.main, "sft --out-dir set later.jsonl --tokenizer hf:bpe", "data.py")
    assert "later.jsonl, line 2: no field 'messages'; write {\"messages\": [...]}" in line


def test_pairs_may_lack_a_field_and_a_folder_may_hold_other_files(capsys):
    Path("pairs").mkdir()
    pair = '{"prompt": "the cat?", "answer": "sat"}'
    Path("pairs/a.jsonl").write_text("\n".join(['{"prompt": "first"}', *[pair] * 50]))
    Path("pairs/notes.jsonl").write_text('{"text": "no pair"}\n')
    data.main("sft --out-dir set pairs --tokenizer byte".split())
    shown = capsys.readouterr()
    assert "left out: 1 rows without text" in shown.out + shown.err
    assert "left out: 1 files that are damaged, or no UTF-8 text, or have no column 'prompt'" in (
        shown.out + shown.err)
    assert json.loads(Path("set/meta.json").read_text())["documents"] == 50


FAILING = "{{ raise_exception('no system message') }}"
NO_STOP = "line 1, message 3: the chat template writes no <|im_end|> right after the answer"


@pytest.mark.parametrize("template, message", [
    (None, "line 1: bpe has no chat template; name a tokenizer that has one: --tokenizer hf:DIR"),
    (FAILING, "line 1: the chat template of bpe fails: no system message"),
    ("{% for m in", "line 1: the chat template of bpe fails: "),
    ([{"name": "rag", "template": TEMPLATE}], "line 1: the chat template of bpe fails: This model has"),
    (TEMPLATE.replace("assistant", "assistant\n<think>"),
     "line 1, message 3: the generation prompt is not a prefix of the rendered conversation"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
     "{% if add_generation_prompt %}assistant: {% endif %}", "line 1, message 3: its first token merges"),
    (TEMPLATE.replace("<|im_end|>", "<|endoftext|>"), NO_STOP),
    (TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('cat')[0] }}"),
     "line 1, message 3: the chat template does not write 'cat', where its content ends"),
    (MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}"), NO_STOP),
    (MARKED.replace("m.role == 'assistant'", "m.role == 'bot'"), "line 1: no {% generation %} block was")])
def test_a_template_that_does_not_fit_is_one_line(template, message, refused):
    make_tokenizer("bpe", text="the cat sat, the dog too", template=template)
    messages = conversation("the dog?", "the cat", system="the mat")
    write_chats("chats.jsonl", [messages])
    line = refused(data.main, f"{SFT} --tokenizer hf:bpe", "data.py")
    assert f"chats.jsonl, {message}" in line.replace(f"{Path.cwd()}/", "")


@pytest.mark.parametrize("template, messages, message", [
    (MARKED, [USER, {"role": "assistant", "content": "sat<|im_end|>\n<|im_start|>user\nno"}],
     "line 1, message 2: holds <|im_end|>, which ends an answer"),
    (MARKED.replace("<|im_end|>{% endgen", "{% if loop.last %}<|im_end|>{% endif %}{% endgen"),
     [USER, ANSWER, USER, ANSWER], "line 1, message 2: the chat template writes no <|im_end|>"),
    (MARKED.replace("m.role == 'assistant'", "loop.last"), [USER, ANSWER, USER, ANSWER],
     "line 1: the chat template renders 1 {% generation %} blocks for 2 answers"),
    (TEMPLATE.replace("<|im_end|>", "{% if m.role == 'user' %}<|im_end|>{% endif %}"),
     [USER, ANSWER, USER, ANSWER], "line 1, message 2: the chat template writes no <|im_end|>")])
def test_each_answer_follows_the_rules(template, messages, message, refused):
    make_tokenizer("bpe", template=template)
    write_chats("chats.jsonl", [messages])
    assert f"chats.jsonl, {message}" in refused(data.main, f"{SFT} --tokenizer hf:bpe", "data.py")


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["unmarked", "marked"])
def test_a_first_message_of_the_assistant_is_not_learned(template):
    make_tokenizer("bpe", template=template)
    write_chats("chats.jsonl", 2 * [[ANSWER, USER, {"role": "assistant", "content": "too"}]])
    make_token_files("chats.jsonl", "bpe")
    for tokens, is_label in conversations_of("set"):
        [run] = runs_of_labels(tokens, is_label)
        assert run == get_tokenizer("hf:bpe").encode("too") + [2]


def test_only_the_default_of_several_templates_is_used():
    make_tokenizer("one")
    make_tokenizer("several", template=[{"name": "default", "template": TEMPLATE},
                                        {"name": "tool_use", "template": MARKED}])
    write_chats("chats.jsonl")
    assert_same_token_files("chats.jsonl", "one", "chats.jsonl", "several")


def test_a_tokenizer_without_a_folder_has_no_template(refused):
    write_chats("chats.jsonl")
    line = refused(data.main, SFT, "data.py")
    assert "chats.jsonl, line 1: the tokenizer byte has no chat template; name a tokenizer that" in line


def test_tokens_that_transformers_has_besides_are_refused(refused):
    """They are only in tokenizer_config.json."""
    make_tokenizer("bpe")
    edit_json("bpe/tokenizer_config.json", extra_special_tokens=["<|tool|>"])
    write_chats("chats.jsonl", [conversation("the cat?", "sat"), conversation("the cat?", "<|tool|> sat")])
    line = refused(data.main, f"{SFT} --tokenizer hf:bpe", "data.py")
    assert "chats.jsonl, line 2: transformers has other tokens than" in line


def break_tokenizer_class():
    edit_json("bpe/tokenizer_config.json", tokenizer_class=5)


def break_template_file():
    Path("bpe/chat_template.jinja").write_bytes(b"\xff\xfe{{")


@pytest.mark.parametrize("break_it", [break_tokenizer_class, break_template_file])
def test_a_tokenizer_that_cannot_be_read_is_one_line(break_it, refused):
    make_tokenizer("bpe")
    break_it()
    write_chats("chats.jsonl")
    line = refused(data.main, f"{SFT} --tokenizer hf:bpe", "data.py")
    assert "chats.jsonl, line 1: the tokenizer of " in line and "bpe cannot be read: " in line


def test_without_transformers_one_line_says_so(monkeypatch, refused):
    make_tokenizer("bpe")
    write_chats("chats.jsonl")
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refused(data.main, f"{SFT} --tokenizer hf:bpe", "data.py")
    assert 'line 1: a chat template needs transformers; pip install "transformers>=5.0"' in line


def test_transformers_logs_nothing(caplog):
    """Not even that a conversation is longer than the model's context, which data.py does not know."""
    make_tokenizer("bpe")
    edit_json("bpe/tokenizer_config.json", model_max_length=4)
    write_chats("chats.jsonl")
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    make_token_files("chats.jsonl", "bpe")
    logger.removeHandler(caplog.handler)
    assert caplog.records == []


# Files of several kinds

CHAT_ROW = {"messages": [USER, ANSWER]}
PAIR_ROW = {"prompt": "the cat", "answer": "sat"}


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("first, other, message", [
    (CHAT_ROW, PAIR_ROW, "4: the rows before hold conversations, this one pairs; make a folder"),
    (PAIR_ROW, CHAT_ROW, "4: the rows before hold pairs, this one conversations; make a folder")])
def test_a_file_has_one_kind_of_row(first, other, message, suffix, refused):
    make_tokenizer("bpe")
    write_lines(f"chats.{suffix}", [first, first, first, other])
    line = refused(data.main, f"sft --out-dir set chats.{suffix} --tokenizer hf:bpe", "data.py")
    assert f"chats.{suffix}, {'line' if suffix == 'jsonl' else 'row'} {message}" in line


@pytest.mark.parametrize("names, message", [
    ("pairs.jsonl chats.jsonl", "chats.jsonl, line 1: the files before hold no conversations; make a folder"),
    ("chats.jsonl pairs.jsonl", "['the cat', 'sat']: the files before hold conversations; make a folder")])
def test_conversations_and_pairs_are_not_mixed(names, message, refused):
    make_tokenizer("bpe")
    write_chats("chats.jsonl")
    write_lines("pairs.jsonl", [PAIR_ROW])
    assert message in refused(data.main, f"sft --out-dir set {names} --tokenizer hf:bpe", "data.py")


def test_a_row_with_both_kinds_is_a_pair():
    rows = [PAIR_ROW, {"prompt": "the dog", "answer": "too"}]
    write_lines("both.jsonl", [row | CHAT_ROW for row in rows])
    write_lines("pairs.jsonl", rows)
    assert_same_token_files("pairs.jsonl", None, "both.jsonl", None)


@pytest.mark.parametrize("row, options, message", [
    (CHAT_ROW, "--column ask answer", "no column 'ask' in messages; name one with --column, or leave it out"),
    ({"prompt": [USER], "answer": [ANSWER]}, "", "line 1: column 'prompt' holds [{'role': 'user', 'content': "
     "'the cat?'}, not text; name another, or write {\"messages\": [...]}")])
def test_an_error_says_how_to_write_messages(row, options, message, refused):
    write_lines("rows.jsonl", [row])
    assert message in refused(data.main, f"sft rows.jsonl --out-dir set {options}", "data.py")


# Splits

def test_a_first_prompt_decides_the_split():
    """So that no answer of validation is to a prompt of training."""
    make_tokenizer("bpe")
    write_chats("chats.jsonl", [conversation(f"the cat {i}?", f"sat {answer}") for i in range(20)
                                for answer in range(5)])
    make_token_files("chats.jsonl", "bpe")
    prompts = []
    for split in ("train", "val"):
        tokens, mask, _ = token_file("set", split)
        starts = np.flatnonzero(mask == FIRST_TOKEN)
        texts = [get_tokenizer("hf:bpe").decode(part) for part in np.split(tokens, starts[1:])]
        prompts.append({text.split("?")[0] for text in texts})
    assert len(prompts[0]) + len(prompts[1]) == 20 and not prompts[0] & prompts[1]


@pytest.mark.parametrize("count, val_fraction", [(2, 0.01), (2, 0.99), (5, 0.3)])
def test_few_conversations_are_split_whole(count, val_fraction):
    make_tokenizer("bpe")
    chats = count * [conversation("the cat?", "sat on the mat")]  # one hash: all are in one split
    write_chats("chats.jsonl", chats)
    make_token_files("chats.jsonl", "bpe", val_fraction=val_fraction)
    length = len(get_tokenizer("hf:bpe").encode("sat on the mat")) + 1
    assert len(conversations_of("set")) == count  # each split begins with one
    for _, is_label in conversations_of("set"):
        assert is_label.sum() == length and is_label[:-1].any()


def test_one_conversation_cannot_be_split(refused):
    make_tokenizer("bpe")
    write_chats("chats.jsonl", CHATS[:1])
    line = refused(data.main, f"{SFT} --tokenizer hf:bpe", "data.py")
    assert "one conversation cannot be split; name two or more, for training and validation" in line


def test_a_split_without_labels_is_refused(refused):
    write_lines("pairs.jsonl", [PAIR_ROW])
    line = refused(data.main, "sft pairs.jsonl --out-dir set", "data.py")
    assert "the val split has no token that is a label; name more examples, or use another --val-f" in line


def test_a_failing_template_ends_a_chat_with_one_line(monkeypatch):
    make_tokenizer("bpe", template=FAILING)
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
    with pytest.raises(ValueError, match="--chat: the chat template of .*bpe fails: no system message"):
        sample.chat(None, get_tokenizer("hf:bpe"), 6)
