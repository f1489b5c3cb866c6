"""Conversations in a chat template: tokens and labels for `data.py sft`, prompts for `sample.py --chat`.

The chat template of a Hugging Face tokenizer writes the messages of a conversation as one text. transformers
runs the template, and the run's tokenizer encodes the text. Special tokens in the text, also inside a
message, are encoded as special tokens, as in transformers.

An answer is an assistant message that is not the first message. Its labels are the tokens that generation
has to produce: from the end of the generation prompt to the first stop token.
"""
import re
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np

from nanote.command import error_line
from nanote.tokenizers import HfTokenizer

ROLES = ("system", "user", "assistant")
MESSAGE = '{"role": "user", "content": "a text"}'


@dataclass
class Conversation:
    """A conversation as a file has it, not checked."""

    messages: list[dict]  # {"role": one of ROLES, "content": a text that is not empty}
    where: str  # its file and line, with which an error begins

    def check(self):
        """Raise ValueError unless all messages are as above and one of them is an answer."""
        if not isinstance(self.messages, list):
            raise ValueError(f"{self.where}: messages {shorten(self.messages)}: must be a list of {MESSAGE}")
        for index, message in enumerate(self.messages):
            place = self.place(index)
            if not isinstance(message, dict):
                raise ValueError(f"{place}: {shorten(message)}: must be {MESSAGE}")
            role = message.get("role")
            if role not in ROLES:
                raise ValueError(f"{place}: role {shorten(role)}: must be one of {', '.join(ROLES)}")
            content = message.get("content")
            if not isinstance(content, str) or not content.strip():
                raise ValueError(f"{place}: content {shorten(content)}: must be a text that is not empty")
        if not self.answers():
            raise ValueError(f"{self.where}: no message of the assistant follows another one, so there is "
                             "no answer to learn; add one, or take the line out")

    def place(self, index):
        """Return the file, its line and the number of a message, with which an error begins."""
        return f"{self.where}, message {index + 1}"

    def assistants(self):
        """Return the index of each assistant message in `messages`."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def answers(self):
        """Return the index of each answer in `messages`."""
        return [index for index in self.assistants() if index > 0]

    def first_prompt(self):
        """Return the text of the messages before the first answer."""
        first_answer = self.answers()[0]
        return "\n".join(message["content"] for message in self.messages[:first_answer])


def shorten(value):
    return repr(value)[:40]


class TokenizedConversation(NamedTuple):
    """A conversation in a chat template."""

    text: str
    ids: np.ndarray  # uint32 (n,)
    is_label: np.ndarray  # bool (n,)


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer (nanote/tokenizers.py). Threads may share it.

    where: prefix of the error if there is no template. advice: what the error tells the user to do.
    """

    def __init__(self, tokenizer, where, advice):
        if not isinstance(tokenizer, HfTokenizer):
            raise ValueError(f"{where}: the tokenizer {tokenizer.name} has no chat template; {advice}")
        self.tokenizer = tokenizer
        self.folder = str(tokenizer.folder)
        self.hf_tokenizer = load_hf_tokenizer(self.folder, where)
        self.lock = Lock()  # transformers does not promise that threads may share a tokenizer
        if not self.hf_tokenizer.chat_template:
            raise ValueError(f"{where}: {self.folder} has no chat template; {advice}")
        self.has_generation_blocks = self._has_generation_blocks(where)
        stop_tokens = [tokenizer.encoding.id_to_token(token) for token in sorted(tokenizer.stop_tokens)]
        stop_tokens = [token for token in stop_tokens if token]
        self.stop_names = " or ".join(stop_tokens)
        self.stop_pattern = "|".join(map(re.escape, stop_tokens))
        self._encode("")  # sets the tokenizer to find special tokens, before threads share it

    def prompt(self, messages, where):
        """Tokenize messages and the generation prompt: uint32 (n,). where: prefix of the error."""
        return self._encode(self._render(messages, where, add_generation_prompt=True))

    def tokenize(self, conversation):
        """Return the TokenizedConversation. Raise ValueError with the line of the file if the template fails
        or answers are not found in its text."""
        conversation.check()
        self._check_contents(conversation)
        text = self._render(conversation.messages, conversation.where)
        ids = self._encode(text)
        if self.has_generation_blocks:
            encoded = self._apply_template(conversation.messages, conversation.where,
                                           return_assistant_tokens_mask=True)
        else:
            with self.lock:
                encoded = self.hf_tokenizer(text, add_special_tokens=False)
        if encoded["input_ids"] != ids.tolist():
            raise ValueError(f"{conversation.where}: transformers has other tokens than "
                             f"{self.folder}/tokenizer.json; save its tokenizer with save_pretrained, and "
                             "name that folder")
        if self.has_generation_blocks:
            is_marked = np.array(encoded["assistant_masks"], bool)  # for the ids of transformers
            is_label = self._marked_labels(conversation, ids, is_marked)
        else:
            is_label = np.zeros(len(ids), bool)
            for index in conversation.answers():
                start, end = self._answer_span(conversation, index, text, ids)
                is_label[start:end] = True
        return TokenizedConversation(text, ids, is_label)

    def _check_contents(self, conversation):
        for index in conversation.answers():
            if re.search(self.stop_pattern, conversation.messages[index]["content"]):
                raise ValueError(f"{conversation.place(index)}: holds {self.stop_names}, which ends an "
                                 "answer; take it out")

    # ------------------------------------------------------------ labels without {% generation %}

    def _answer_span(self, conversation, index, text, ids):
        """Return where the labels of messages[index] begin and end in `ids`. The prompt that generation would
        continue there has to be a prefix of the whole conversation, in characters and in tokens."""
        place = conversation.place(index)
        prompt_text = self._render(conversation.messages[:index], place, add_generation_prompt=True)
        if not text.startswith(prompt_text):
            raise ValueError(f"{place}: the generation prompt is not a prefix of the rendered conversation; "
                             "mark answers in the template with {% generation %}")
        prompt = self._encode(prompt_text)
        start = len(prompt)
        if not np.array_equal(prompt, ids[:start]):
            raise ValueError(f"{place}: its first token merges with the last characters of the prompt; take "
                             "out the white space where it begins, or where the template's prompt ends")
        self._check_end(place, conversation.messages[index]["content"], text[len(prompt_text):])
        return start, self._first_stop(place, ids, start, len(ids)) + 1

    def _check_end(self, place, content, completion):
        """Raise ValueError unless the completion of a prompt begins with an answer and a stop token."""
        stop = re.search(self.stop_pattern, completion)
        answer = completion[:stop.start()] if stop else completion
        last_word = content.split()[-1]  # templates may strip the content
        if last_word not in answer:
            raise ValueError(f"{place}: the chat template does not write {shorten(last_word)}, where its "
                             "content ends; change the content or the template")
        if not answer.rstrip().endswith(last_word):
            self._raise_no_stop(place)

    # ------------------------------------------------------------ labels with {% generation %}

    def _marked_labels(self, conversation, ids, is_marked):
        """Return whether each token is a label, bool (n,): those of each answer's {% generation %} block up
        to a stop token, which may follow the block. is_marked: whether a token is in a block."""
        where = conversation.where
        if not is_marked.any():
            raise ValueError(f"{where}: no {{% generation %}} block was rendered; put one around the content "
                             "of assistant messages in the chat template")
        follows_block = np.append(False, is_marked[:-1])
        runs = runs_of(is_marked | (follows_block & self._is_stop(ids)))
        answers = conversation.answers()
        marked = conversation.assistants()  # also a first message, which is no answer
        if len(runs) != len(marked):
            marked = answers
        if len(runs) != len(marked):
            raise ValueError(f"{where}: the chat template renders {len(runs)} {{% generation %}} blocks for "
                             f"{len(answers)} answers; let it mark each answer once")
        is_label = np.zeros(len(ids), bool)
        for index, (start, end) in zip(marked, runs):
            if index in answers:
                stop = self._first_stop(conversation.place(index), ids, start, end)
                is_label[start:stop + 1] = True
        return is_label

    def _has_generation_blocks(self, where):
        try:
            template = self.hf_tokenizer.get_chat_template()  # the default of several
        except ValueError as error:
            self._raise_failure(where, error)
        return re.search(r"\{%[-+]?\s*generation\b", str(template)) is not None

    # ------------------------------------------------------------ text and tokens

    def _first_stop(self, place, ids, start, end):
        """Return the index of the first stop token in ids[start:end]. place: prefix of the error."""
        stops = np.flatnonzero(self._is_stop(ids[start:end]))
        if len(stops) == 0:
            self._raise_no_stop(place)
        return start + stops[0]

    def _raise_no_stop(self, place):
        raise ValueError(f"{place}: the chat template writes no {self.stop_names} right after the answer, "
                         "so generation would not stop; name what it writes as eos_token in "
                         "tokenizer_config.json")

    def _is_stop(self, ids):
        return np.isin(ids, list(self.tokenizer.stop_tokens))

    def _encode(self, text):
        return self.tokenizer.encode_bytes(text.encode(), special_tokens=True)

    def _render(self, messages, where, **options):
        """Return the text of messages. where: prefix of the error if the template fails."""
        text = self._apply_template(messages, where, tokenize=False, **options)
        return text.encode("utf-8", errors="replace").decode()  # as in plain text

    def _apply_template(self, messages, where, **options):
        """Return what transformers' apply_chat_template does. where: prefix of the error if it fails."""
        try:
            with self.lock:
                return self.hf_tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # whatever a template or transformers raises
            self._raise_failure(where, error)

    def _raise_failure(self, where, error):
        reason = error_line(error)
        raise ValueError(f"{where}: the chat template of {self.folder} fails: {reason}") from error


def load_hf_tokenizer(folder, where):
    """Return transformers' tokenizer of a folder. where: prefix of the error if there is none."""
    try:
        import transformers  # slow to import
    except ImportError as error:
        raise ValueError(f"{where}: a chat template needs transformers; pip install \"transformers>=5.0\""
                         ) from error
    transformers.logging.set_verbosity_error()  # it warns of long conversations, for example
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers raises
        reason = error_line(error)
        raise ValueError(f"{where}: the tokenizer of {folder} cannot be read: {reason}") from error


def runs_of(is_label):
    """Return (start, end) of each run of True, (number of runs, 2)."""
    edges = np.diff(is_label, prepend=False, append=False)
    return np.flatnonzero(edges).reshape(-1, 2)
