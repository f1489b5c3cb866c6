"""Generate text from a checkpoint, chat with it, or measure its loss on a file.

    python sample.py out/<run> --prompt "def main(" --temperature 0.8
    python sample.py out/<run> --chat                  # an instruct or fine-tuned model; Ctrl-D ends
    python sample.py out/<run> --score file.txt        # nats a token, bits a byte

The model runs with FP8 off, in BF16 on a GPU and in float32 on the CPU; nanote/generate.py says why.
"""
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import codecs
import math
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from nanote import checkpoint, chunked_loss, models, recipes, trained_model
from nanote.chat import ChatTemplate
from nanote.command import parse, require_at_least, run_command
from nanote.corpus import text_documents
from nanote.generate import generate
from nanote.loader import document_starts
from tools import import_hf


@dataclass
class SampleConfig:
    # Folder of a run, such as out/tiny (its latest checkpoint), or one step-<n> folder in it.
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    prompt: str = ""  # Text to continue; empty: the start of a document.
    chat: bool = False  # Each line of stdin is a turn, put into the chat template of the run's tokenizer.
    score: str | None = None  # Measure the loss on this text file, or on the documents of a .jsonl file.
    model: str | None = None  # None: the run's; path/to/file.py:Class if it is your own (no code is stored).
    tokenizer: str | None = None  # hf:DIR, the folder of the run's tokenizer, if it has moved.
    max_new_tokens: int = 256  # Tokens to generate, in a chat for each answer (fewer if the text ends).
    temperature: float = 0.8  # 0 takes the most likely token; 1 samples from the model's own distribution.
    top_k: int | None = None  # Sample only from the k most likely tokens.
    top_p: float | None = None  # Sample only from the fewest tokens whose probabilities sum to p.
    seed: int = 1337  # The same seed gives the same text.
    num_samples: int = 1  # Number of texts.
    kv_cache: bool = True  # Cache the keys and values of past tokens; no: recompute them for every token.
    device: str = "auto"  # auto, cpu, cuda or cuda:N.


def load_model(options, device):
    """Return the model of a checkpoint, with FP8 off, its tokenizer, and whether it trains packed."""
    folder = checkpoint.find(options.run)
    meta = checkpoint.read_meta(folder)
    tokenizer = trained_model.load_tokenizer(meta, options.tokenizer)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = trained_model.load_run(folder, meta, options.model, device, dtype, import_hf.open_model)
    return model, tokenizer, bool(meta["config"].get("pack_documents"))


def chat(model, tokenizer, max_new_tokens, **sampling):
    """Answer each line of stdin, a turn of the conversation. Text appears as it is generated."""
    template = ChatTemplate(tokenizer, "--chat", "pass --prompt, or import a Hugging Face model that has one")
    input_prompt = "> " if sys.stdin.isatty() else ""
    characters = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character
    turns = []

    def show(token):
        print(characters.decode(tokenizer.decode_bytes([token])), end="", flush=True)

    print(input_prompt, end="", flush=True)
    for line in sys.stdin:
        if not line.strip():
            continue
        turns.append({"role": "user", "content": line.strip()})
        ids = template.prompt(turns, "--chat").tolist()
        answer = generate(model, ids, max_new_tokens, stop=tokenizer.stop_tokens, on_token=show, **sampling)
        turns.append({"role": "assistant", "content": tokenizer.decode(answer, is_first=True)})
        rest = characters.decode(b"", final=True)  # of a character that has no end
        print(f"{rest}\n{input_prompt}", end="", flush=True)


@torch.no_grad()
def score(model, tokenizer, path, pack_documents=False):
    """Return the loss on a file as a line of text.

    The tokens are those of token files: each document begins with the token that the tokenizer puts before a
    text, if there is one, and end-of-text lies between two; without one, end-of-text is the first token, too.
    Each token after the first is scored once, in windows of n_positions tokens that do not overlap.
    """
    tokens, size = read_tokens(path, tokenizer)
    if size == 0:
        raise ValueError(f"{path}: holds no text; name a file that does")
    limit = model.config.n_positions
    device = next(model.parameters()).device
    total = 0.0
    if hasattr(type(model), "output"):  # about 1 GiB of float32 logits at a time; `model` keeps the chunks
        chunked_loss.chunk_loss(model, math.ceil(limit * model.config.vocab_size / 2**28))
    for start in range(0, len(tokens) - 1, limit):
        ids = torch.tensor([tokens[start:start + limit + 1]], device=device)
        inputs = ids[:, :-1]
        labels = ids[:, 1:]
        packing = {}
        if pack_documents:
            end = torch.tensor([inputs.numel()], device=device)
            packing["cu_seqlens"] = torch.cat([document_starts(inputs, tokenizer.start), end]).to(torch.int32)
        total += model(inputs, labels, **packing).item() * inputs.numel()
    if not math.isfinite(total):
        raise ValueError("the model's loss is not finite: its weights diverged; take an earlier checkpoint")
    count = len(tokens) - 1
    return (f"{path}: {total / count:.4f} nats a token, {total / math.log(2) / size:.4f} bits a byte "
            f"({count:,} tokens, {size:,} bytes)")


def read_tokens(path, tokenizer):
    """Return the tokens of a file, a list, and how many bytes of text it holds. See `score`."""
    before = [tokenizer.eot] if tokenizer.bos is None else [tokenizer.eot, tokenizer.bos]
    tokens = []
    size = 0
    for pieces in text_documents([path], ["text"], Counter()):
        document = "".join(pieces)
        if document:
            tokens += [*before, *tokenizer.encode(document)]
            size += len(document.encode())
    if tokenizer.bos is not None:
        tokens = tokens[1:]  # without the first end-of-text: no document ends there
    return tokens, size


def main(argv=None):
    options = parse(SampleConfig, argv, "sample.py", __doc__)
    require_at_least(1, options, "max_new_tokens", "num_samples")
    device = models.pick_device(options.device)
    if device.type == "cpu" and (recipes.HAS_TE or options.score is not None):
        recipes.check_cpu()  # fast_kernels run without a GPU, but for the loss
    model, tokenizer, pack_documents = load_model(options, device)
    if options.score is not None:
        print(score(model, tokenizer, options.score, pack_documents))
        return
    sampling = dict(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, use_cache=options.kv_cache,
        generator=torch.Generator(device).manual_seed(options.seed), vocab_size=tokenizer.vocab_size)
    if options.chat:
        chat(model, tokenizer, options.max_new_tokens, **sampling)
        return
    ids = [tokenizer.start, *tokenizer.encode(options.prompt)]
    for number in range(options.num_samples):
        if number > 0:
            print("\n---")
        new = generate(model, ids, options.max_new_tokens, stop=tokenizer.stop_tokens, **sampling)
        print(options.prompt + tokenizer.decode(new))


if __name__ == "__main__":
    sys.exit(run_command(main, "sample.py"))
