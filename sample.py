"""Generate text from a checkpoint, chat with it, or measure its loss on a file.

    python sample.py out/<run> --prompt "def main(" --temperature 0.8
    python sample.py out/<run> --chat                  # an imported instruct model; Ctrl-D ends
    python sample.py out/<run> --score file.txt        # nats a token, bits a byte

The model runs with FP8 off, in BF16 on a GPU and in float32 on the CPU; nanote/generate.py says why.
"""
import codecs
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import tyro

from nanote import checkpoint, cli, json_files, models
from nanote.dataset import HfTokenizer, document_starts, get_tokenizer
from nanote.documents import text_documents
from nanote.generate import check_sampling, generate, pick_device


@dataclass
class SampleConfig:
    run: tyro.conf.Positional[str]
    """Folder of a run (its latest checkpoint) or one step-<n> folder in it."""
    prompt: str = ""
    """Text to continue; empty: the start of a document."""
    chat: bool = False
    """Chat: each line of stdin is a turn, put into the chat template of the run's tokenizer."""
    score: str | None = None
    """Measure the loss on this text file, or on the documents of a .jsonl file, as training does."""
    model: str | None = None
    """path/to/file.py:Class, if the run's model is one of your own: code is never taken from a checkpoint."""
    tokenizer: str | None = None
    """hf:DIR, the folder of the run's tokenizer, if it has moved."""
    max_new_tokens: int = 256
    """Tokens to generate, in a chat for each answer (fewer if the text ends)."""
    temperature: float = 0.8
    """0 always takes the most likely token; 1 samples from the model's own distribution. The model runs with
    FP8 off: one token at a time is fewer rows than an FP8 GEMM needs, and the weights are stored in high
    precision anyway."""
    top_k: int | None = None
    """Sample only from the k most likely tokens."""
    top_p: float | None = None
    """Sample only from the fewest tokens whose probabilities sum to p."""
    seed: int = 1337
    """The same seed gives the same text."""
    num_samples: int = 1
    """Number of texts."""
    kv_cache: bool = True
    """Cache the keys and values of past tokens; --no-kv-cache recomputes them for every token."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


# Options that do not apply to a task. Giving one is an error.
UNUSED = {"--chat": ["num_samples"],
          "--score": ["num_samples", "max_new_tokens", "temperature", "top_k", "top_p"]}


def check_options(config: SampleConfig) -> None:
    """Raise ValueError for options out of range, or that exclude each other."""
    check_sampling(config.max_new_tokens, config.temperature, config.top_k, config.top_p)
    if config.num_samples < 1:
        raise ValueError(f"--num-samples {config.num_samples}: must be at least 1")
    if config.seed < 0:
        raise ValueError(f"--seed {config.seed}: must be 0 or more, such as 1337")
    tasks = {"--prompt": config.prompt, "--chat": config.chat, "--score": config.score is not None}
    given = [name for name, value in tasks.items() if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: these exclude each other; pass one of them")
    for task, names in UNUSED.items():
        changed = [cli.flag(name) for name in names if getattr(config, name) != getattr(SampleConfig, name)]
        if task in given and changed:
            raise ValueError(f"{' and '.join(changed)}: not used with {task}; leave out one or the other")


def load_model(path, device: torch.device, moved: str | None = None, model: str | None = None):
    """Load the latest checkpoint of a run, or one step-<n> folder.

    `moved`: see get_tokenizer; `model`: see checkpoint.read_meta.

    Returns:
        The model in eval mode with FP8 off, the tokenizer, and whether the run packs documents.
    """
    folder = checkpoint.find(path)
    if model is not None:
        models.load_file(model)
    meta = checkpoint.read_meta(folder, model)
    config = models.make_model_config(meta["model"], meta["model_config"] | {"use_fp8": False})
    tokenizer = get_tokenizer(meta["tokenizer"], config.vocab_size, moved)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = models.build_model(meta["model"], config, device=device, dtype=dtype)
    checkpoint.load(folder, meta, model)
    return model.eval(), tokenizer, bool(meta["config"].get("pack_documents"))


# ---------------------------------------------------------------- chat

def chat_template(tokenizer) -> Callable[[list[dict]], list[int]]:
    """Return a function from the turns of a conversation to token ids, up to the start of the next answer.

    Raises ValueError if the tokenizer has no chat template. transformers runs the template in a sandbox, and
    no code of the folder.
    """
    if not isinstance(tokenizer, HfTokenizer):
        raise ValueError(f"--chat: the tokenizer {tokenizer.name} has no chat template; chat with a model "
                         "imported from a Hugging Face folder that has one, or pass --prompt")
    import transformers  # slow to import

    folder = tokenizer.folder
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True,
                                                            trust_remote_code=False)
    except Exception as error:  # whatever transformers raises for damaged files
        raise ValueError(f"{folder}: its chat template cannot be read ({json_files.reason(error)}); copy the "
                         "folder again") from error
    if not theirs.chat_template:
        raise ValueError(f"--chat: no chat template in {folder} (tokenizer_config.json, chat_template.jinja);"
                         " a model without one continues a text: pass --prompt")

    def encode(turns: list[dict]) -> list[int]:
        try:
            text = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever Jinja raises
            raise ValueError(f"{folder}: its chat template failed ({json_files.reason(error)})") from error
        return tokenizer.encode_bytes(text.encode("utf-8", errors="replace"), special_tokens=True).tolist()

    return encode


def read_turns() -> Iterator[str]:
    """Yield the lines of stdin that are not empty, after a prompt if it is a terminal."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        if line.strip():
            yield line


class TurnTooLong(ValueError):
    """A turn is longer than what the model's context leaves for it."""


def fit(turns: list[dict], encode, room: int) -> list[int]:
    """Return the token ids of a conversation, at most `room`. Drop its oldest turns, in place, until it
    fits.

    Raises TurnTooLong, with nothing dropped, if the last turn alone is longer.
    """
    alone = len(encode(turns[-1:]))
    if alone > room:
        raise TurnTooLong(f"a turn of {alone:,} tokens is longer than the {room:,} that the model's context "
                          "leaves for it; shorten it")
    while len(ids := encode(turns)) > room:
        print(f"(the context is full: dropped the oldest turn, {turns[0]['content'][:40]!r}, and its answer)",
              file=sys.stderr)
        del turns[:2]
    return ids


def chat(model, tokenizer, max_new_tokens: int, **sampling) -> None:
    """Answer each line of stdin. Text appears as it is generated.

    The context has n_positions tokens. Old turns are dropped until max_new_tokens of them, or half of them if
    that is less, are free for the answer. A turn that does not fit in the rest is left out.
    """
    encode, limit, turns = chat_template(tokenizer), model.config.n_positions, []
    room = limit - min(max_new_tokens, limit // 2)
    for line in read_turns():
        turns.append({"role": "user", "content": line})
        try:
            ids = fit(turns, encode, room)
        except TurnTooLong as error:
            print(f"({error})", file=sys.stderr)
            turns.pop()
            continue
        free = limit - len(ids)
        characters = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character

        def show(token):
            print(characters.decode(tokenizer.decode_bytes([token])), end="", flush=True)

        answer = generate(model, ids, min(max_new_tokens, free), on_token=show,
                          stop=tokenizer.stop_tokens, **sampling)
        print(characters.decode(b"", final=True))
        if answer[-1] not in tokenizer.stop_tokens:
            reason = "--max-new-tokens"
            if free < max_new_tokens:
                reason = f"the model's context of {limit:,} tokens is full"
            print(f"(cut off after {cli.counted(len(answer), 'token')}: {reason})", file=sys.stderr)
        turns.append({"role": "assistant", "content": tokenizer.decode(answer)})


# ---------------------------------------------------------------- score

@torch.no_grad()
def score(model, tokenizer, path: str, pack_documents: bool = False) -> str:
    """Return the loss on a file as a line of text.

    The tokens are those of training: an end-of-text token, then the document (of a .jsonl file: and so on).
    Each token after the first is scored once. Windows of n_positions tokens do not overlap, as in training:
    the first prediction of a window sees one token, the last one all of them. With pack_documents it sees
    those of its own document.
    """
    size, device = 0, next(model.parameters()).device

    def tokens():
        nonlocal size
        for document in filter(None, text_documents([path])[0]):
            yield tokenizer.eot
            for text in [document] if isinstance(document, str) else document:
                raw = text.encode("utf-8", errors="replace")
                size += len(raw)
                yield from tokenizer.encode_bytes(raw).tolist()

    limit = model.config.n_positions
    if hasattr(model.config, "loss_chunks"):  # at most 1 GiB of float32 logits at a time
        model.config.loss_chunks = max(1, limit * model.config.vocab_size // 2**28)
    stream, count, total = tokens(), 0, 0.0
    window = list(islice(stream, limit + 1))
    while len(window) > 1:
        ids, length = torch.tensor([window], device=device), len(window) - 1
        packing = {}
        if pack_documents:
            ends = torch.tensor([length], device=device)
            starts = document_starts(ids[:, :-1], tokenizer.eot)
            packing["cu_seqlens"] = torch.cat([starts, ends]).to(torch.int32)
        count += length
        total += model(ids[:, :-1], ids[:, 1:], **packing).item() * length
        window = [window[-1], *islice(stream, limit)]
    if not size:
        raise ValueError(f"{path}: holds no text; name a file that does")
    if not math.isfinite(total):
        raise ValueError("the model's loss is not finite: its weights are damaged or diverged; take an "
                         "earlier checkpoint")
    return (f"{path}: {total / count:.4f} nats a token, {total / math.log(2) / size:.4f} bits a byte "
            f"({count:,} tokens, {size:,} bytes)")


def main(argv=None) -> None:
    config = cli.parse(SampleConfig, argv, prog="sample.py", description=__doc__)
    check_options(config)
    device = pick_device(config.device)
    model, tokenizer, pack_documents = load_model(config.run, device, config.tokenizer, config.model)
    if config.score is not None:
        print(score(model, tokenizer, config.score, pack_documents))
        return
    sampling = dict(
        temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, use_cache=config.kv_cache,
        generator=torch.Generator(device).manual_seed(config.seed), vocab_size=tokenizer.vocab_size,
    )
    if config.chat:
        chat(model, tokenizer, config.max_new_tokens, **sampling)
        return
    ids = [tokenizer.eot, *tokenizer.encode(config.prompt)]
    for number in range(config.num_samples):
        new = generate(model, ids, config.max_new_tokens, stop=tokenizer.stop_tokens, **sampling)
        separator = "\n---\n" if number else ""
        print(separator + config.prompt + tokenizer.decode(new))


if __name__ == "__main__":
    sys.exit(cli.run(main, "sample.py"))
