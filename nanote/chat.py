"""Conversations in a chat template: tokens and labels for `data.py sft`, prompts for `sample.py --chat`.

The chat template of a Hugging Face tokenizer writes the messages of a conversation as one text. transformers
runs the template, and the run's tokenizer encodes the text. Special tokens in it become tokens, those in a
message too, as in transformers.

An answer is a message of the assistant that follows another message. Its labels are the tokens that
generation has to produce: from the end of the generation prompt to the first stop token.
"""
import re
from dataclasses import dataclass

import numpy as np

from nanote.command import error_line

ROLES = ("system", "user", "assistant")
MESSAGE = '{"role": "user", "content": "a text"}'


@dataclass
class Conversation:
    """A conversation as a file has it, not checked."""

    messages: list[dict]  # {"role": one of ROLES, "content": a text that is not empty}
    where: str  # its file and line, which a message about it begins with

    def check(self):
        """Raise ValueError unless all messages are as above and one of them is an answer."""
        if not isinstance(self.messages, list):
            raise ValueError(f"{self.where}: messages {shorten(self.messages)}: must be a list of {MESSAGE}")
        for number, message in enumerate(self.messages, 1):
            place = f"{self.where}, message {number}"
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

    def answers(self):
        """Return the index of each answer in `messages`."""
        indices = range(1, len(self.messages))
        return [index for index in indices if self.messages[index]["role"] == "assistant"]

    def question(self):
        """Return the text of the messages before the first answer."""
        first_answer = self.answers()[0]
        return "\n".join(message["content"] for message in self.messages[:first_answer])


def shorten(value):
    return repr(value)[:40]


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer (nanote/tokenizers.py).

    where, advice: begin and end the message about a tokenizer without a template.
    """

    def __init__(self, tokenizer, where, advice):
        self.tokenizer = tokenizer
        self.name = f"the tokenizer {tokenizer.name}"
        has_folder = hasattr(tokenizer, "folder")
        if has_folder:
            import transformers  # slow to import

            self.name = str(tokenizer.folder)
            self.renderer = transformers.AutoTokenizer.from_pretrained(self.name, local_files_only=True)
        if not has_folder or not self.renderer.chat_template:
            raise ValueError(f"{where}: {self.name} has no chat template; {advice}")
        self.marks_answers = re.search(r"\{%-?\s*generation\b", str(self.renderer.chat_template)) is not None
        names = [tokenizer.encoding.id_to_token(token) for token in sorted(tokenizer.stop_tokens)]
        names = [name for name in names if name]
        self.stop_names = " or ".join(names)
        self.stop_pattern = "|".join(map(re.escape, names))

    def prompt(self, messages, where):
        """Return the tokens that the next message of the assistant follows, uint32 (n,)."""
        return self._encode(self._render(messages, where, add_generation_prompt=True))

    def tokenize(self, conversation):
        """Return the text of a conversation, its tokens, uint32 (n,), and whether each is a label, bool (n,).

        Raise ValueError with the line of the file if the template fails or answers are not found in its text.
        """
        conversation.check()
        text = self._render(conversation.messages, conversation.where)
        ids = self._encode(text)
        if self.marks_answers:
            return text, ids, self._marked_labels(conversation, ids)
        is_label = np.zeros(len(ids), bool)
        for index in conversation.answers():
            start, end = self._answer_span(conversation, index, text, ids)
            is_label[start:end] = True
        return text, ids, is_label

    def _answer_span(self, conversation, index, text, ids):
        """Return where the labels of messages[index] begin and end in `ids`. The prompt that generation would
        continue there has to be a prefix of the whole conversation, in characters and in tokens."""
        place = f"{conversation.where}, message {index + 1}"
        prompt_text = self._render(conversation.messages[:index], place, add_generation_prompt=True)
        if not text.startswith(prompt_text):
            raise ValueError(f"{place}: the chat template writes the messages before this answer in another "
                             "way when it follows; mark answers in the template with {% generation %}")
        prompt = self._encode(prompt_text)
        start = len(prompt)
        if not np.array_equal(prompt, ids[:start]):
            raise ValueError(f"{place}: begins inside a token that begins in the prompt; take out the white "
                             "space where it begins, or where the template's prompt ends")
        content = conversation.messages[index]["content"]
        if re.search(self.stop_pattern, content):
            raise ValueError(f"{place}: holds {self.stop_names}, which ends an answer; take it out")
        answer, *rest = re.split(self.stop_pattern, text[len(prompt_text):], maxsplit=1)
        last_word = content.split()[-1]
        if not rest or not answer.rstrip().endswith(last_word):
            self._refuse_end(place)
        first_stop = start + np.argmax(self._is_stop(ids[start:]))
        return start, first_stop + 1

    def _marked_labels(self, conversation, ids):
        """Return whether each token is in a {% generation %} block, or the stop token after one."""
        where = conversation.where
        encoded = self._apply(conversation.messages, where, return_assistant_tokens_mask=True)
        if encoded["input_ids"] != ids.tolist():
            raise ValueError(f"{where}: transformers has other tokens than {self.name}/tokenizer.json")
        is_marked = np.array(encoded["assistant_masks"], bool)
        is_after = np.append(False, is_marked[:-1])
        is_stop = self._is_stop(ids)
        is_label = is_marked | (is_after & is_stop)
        if not (is_label & is_stop).any():
            self._refuse_end(where)
        return is_label

    def _refuse_end(self, place):
        raise ValueError(f"{place}: the chat template writes no {self.stop_names} right after the answer, "
                         "so it would not end; name what it writes as eos_token in tokenizer_config.json")

    def _is_stop(self, ids):
        return np.isin(ids, list(self.tokenizer.stop_tokens))

    def _encode(self, text):
        return self.tokenizer.encode_bytes(text.encode("utf-8", errors="replace"), special_tokens=True)

    def _render(self, messages, where, **options):
        return self._apply(messages, where, tokenize=False, **options)

    def _apply(self, messages, where, **options):
        try:
            return self.renderer.apply_chat_template(messages, **options)
        except Exception as error:  # whatever a template or transformers raises
            reason = error_line(error)
            raise ValueError(f"{where}: the chat template of {self.name} fails: {reason}") from error
