"""Text from a checkpoint: python sample.py out/<run> --prompt "def main(" --temperature 0.8

Notable, and why:
- Sampling runs with FP8 off. With a key-value cache each step multiplies one row, and FP8 products need row
  counts that are multiples of 8; padding one row to eight would cost more than it saves. A checkpoint keeps
  its weights in high precision, so nothing is lost: what FP8 training learned is read out in BF16 on a GPU
  and in float32 on the CPU.
- When the context is full (n_positions tokens), the window slides: it restarts from its last n_positions / 2
  tokens, whose keys and values are computed anew, since a position changes every one of them. Sliding by half
  costs one such pass per n_positions / 2 tokens; sliding by one would cost one per token. With and without
  the cache windows are the same.
"""
import sys
from dataclasses import dataclass

import torch
import tyro

from nanote import checkpoint, cli, models
from nanote.dataset import get_tokenizer


@dataclass
class SampleConfig:
    run: tyro.conf.Positional[str]
    """A run's folder (its latest checkpoint) or one step-<n> folder in it."""
    prompt: str = ""
    """Text to go on from; empty: the start of a document."""
    max_new_tokens: int = 256
    """Tokens to generate (fewer if the text ends)."""
    temperature: float = 0.8
    """0 always takes the likeliest token; 1 samples from the model's own distribution. The model runs with
    FP8 off: one token at a time is fewer rows than an FP8 product takes, and the weights are stored in high
    precision anyway."""
    top_k: int | None = None
    """Sample among the k likeliest tokens only."""
    top_p: float | None = None
    """Sample among the fewest tokens whose probabilities reach p."""
    seed: int = 1337
    """The same seed gives the same text."""
    num_samples: int = 1
    """How many texts."""
    kv_cache: bool = True
    """Keep keys and values of past tokens; --no-kv-cache computes them anew for every token."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


@torch.no_grad()
def generate(
    model,
    ids: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
    stop: int | None = None,
    use_cache: bool = True,
) -> list[int]:
    """Up to `max_new_tokens` token ids that go on from `ids` (at least one id), with FP8 off.

    `vocab_size` is the tokenizer's, where the model's is padded above it; `stop` is an id that ends the text.
    ValueError for sampling options that make no sense.
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    if not ids:
        raise ValueError("generate: ids is empty; start from the end-of-text token, as training does")
    use_cache = use_cache and hasattr(model, "make_kv_cache")
    device, limit = next(model.parameters()).device, model.config.n_positions
    before = model.training, model.config.use_fp8
    model.eval()
    model.config.use_fp8 = False
    try:
        ids, prompt_length = list(ids), len(ids)
        start, cache = max(0, len(ids) - limit), None  # the window is ids[start:]
        while len(ids) < prompt_length + max_new_tokens:
            if len(ids) - start > limit:
                start, cache = len(ids) - max(1, limit // 2), None
            if not use_cache:
                logits = model(torch.tensor([ids[start:]], device=device))
            elif cache is None:
                cache = model.make_kv_cache(1, min(limit, prompt_length + max_new_tokens))
                logits = model(torch.tensor([ids[start:]], device=device), kv_cache=cache)
            else:
                logits = model(torch.tensor([ids[-1:]], device=device), kv_cache=cache)
            ids.append(pick(logits[0, -1, :vocab_size].float(), temperature, top_k, top_p, generator))
            if ids[-1] == stop:
                break
        return ids[prompt_length:]
    finally:
        model.train(before[0])
        model.config.use_fp8 = before[1]


def pick(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None, generator) -> int:
    """One token id from logits (V,). ValueError for logits that are NaN or infinite."""
    highest = logits.max()
    if not highest.isfinite():
        raise ValueError("the model's logits are not finite: its weights are damaged or diverged; take an "
                         "earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    # The highest logit stays 0 however small the temperature is; float32 holds no temperature below 1e-45.
    relative = (logits - highest) / max(temperature, 1e-30)
    probabilities, order = torch.softmax(relative, dim=-1).sort(descending=True)
    if top_k is not None:
        probabilities[top_k:] = 0
    if top_p is not None:  # keep the first, and a token while the ones before it have not reached p
        beyond = probabilities.cumsum(0) - probabilities >= top_p * probabilities.sum()
        probabilities[1:][beyond[1:]] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    rules = [("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1", 256),
             ("temperature", temperature, 0 <= temperature < float("inf"), "0 or more", 0.8),
             ("top_k", top_k, top_k is None or top_k >= 1, "at least 1", 50),
             ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1", 0.95)]
    for name, value, holds, rule, works in rules:
        if not holds:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be {rule}, such as {works}")


def pick_device(name: str) -> torch.device:
    """The device of --device; ValueError in one line for one that is not there."""
    try:
        device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; --device auto takes what there is"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def load_model(path, device: torch.device):
    """(model in eval mode with FP8 off, tokenizer) of a run's latest checkpoint, or of one step-<n> folder.
    """
    folder = checkpoint.find(path)
    meta = checkpoint.read_meta(folder)
    config = models.make_model_config(meta["model"], meta["model_config"] | {"use_fp8": False})
    tokenizer = get_tokenizer(meta["tokenizer"], config.vocab_size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = models.build_model(meta["model"], config, device=device, dtype=dtype)
    checkpoint.load(folder, meta, model)
    return model.eval(), tokenizer


def main(argv=None) -> None:
    config = cli.parse(SampleConfig, argv, prog="sample.py", description=__doc__)
    check_sampling(config.max_new_tokens, config.temperature, config.top_k, config.top_p)
    if config.num_samples < 1:
        raise ValueError(f"--num-samples {config.num_samples}: must be at least 1")
    if config.seed < 0:
        raise ValueError(f"--seed {config.seed}: must be 0 or more, such as 1337")
    device = pick_device(config.device)
    model, tokenizer = load_model(config.run, device)
    generator = torch.Generator(device).manual_seed(config.seed)
    ids = [tokenizer.eot, *tokenizer.encode(config.prompt)]
    for number in range(config.num_samples):
        new = generate(
            model, ids, config.max_new_tokens, temperature=config.temperature, top_k=config.top_k,
            top_p=config.top_p, generator=generator, vocab_size=tokenizer.vocab_size, stop=tokenizer.eot,
            use_cache=config.kv_cache,
        )
        print(("" if number == 0 else "\n---\n") + config.prompt + tokenizer.decode(new))


if __name__ == "__main__":
    sys.exit(cli.run(main, "sample.py"))
