"""Generate tokens from a trained model, and choose the device.

Use `generate` with any of the model files; sample.py is its command line. Two decisions:
- FP8 is off. With a key-value cache each step has one row per GEMM, and FP8 GEMMs need multiples of 8 rows;
  padding costs more than FP8 saves. Checkpoints store weights in high precision, so nothing is lost.
- When the context is full (n_positions tokens), the window restarts from its last n_positions / 2 tokens, and
  their keys and values are recomputed, because every position changes. That is one such pass per
  n_positions / 2 tokens instead of one per token. The windows are the same with and without the cache.
"""
import contextlib
from collections.abc import Callable, Collection

import torch

from nanote import cli, fp8


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
    stop: int | Collection[int] | None = None,
    use_cache: bool = True,
    on_token: Callable[[int], None] | None = None,
) -> list[int]:
    """Return up to `max_new_tokens` token ids that continue `ids`.

    Args:
        model: left in the mode and with the FP8 setting that it had. ids: at least one token id.
        vocab_size: the tokenizer's, if the model's is padded above it.
        stop: token id or ids that end the text; the last one returned is one of them.
        use_cache: use the model's key-value cache, if it has one.
        on_token: called with each new token id, such as to show the text as it comes.

    Raises:
        ValueError: sampling options out of range, no ids, or logits that are not finite.
    """
    check_sampling(max_new_tokens, temperature, top_k, top_p)
    if not ids:
        raise ValueError("generate: ids is empty; start from the end-of-text token, as training does")
    stop = {stop} if isinstance(stop, int) else set(stop or ())
    use_cache = use_cache and hasattr(model, "make_kv_cache")
    device, limit = next(model.parameters()).device, model.config.n_positions
    with contextlib.ExitStack() as restored:
        restored.callback(model.train, model.training)
        restored.enter_context(fp8.turned_off(model))
        model.eval()
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
            logits = logits[0] if isinstance(logits, tuple) else logits  # the others may be a second head's
            ids.append(pick(logits[0, -1, :vocab_size].float(), temperature, top_k, top_p, generator))
            if on_token:
                on_token(ids[-1])
            if ids[-1] in stop:
                break
        return ids[prompt_length:]


def pick(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None, generator) -> int:
    """Sample one token id from logits (V,). ValueError for logits that are NaN or infinite."""
    highest = logits.max()
    if not highest.isfinite():
        raise ValueError("the model's logits are not finite: its weights are damaged or diverged; take an "
                         "earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    # Subtracting first keeps the highest logit at 0 for any temperature; 1e-30 since float32 ends at 1e-45.
    relative = (logits - highest) / max(temperature, 1e-30)
    probabilities, order = torch.softmax(relative, dim=-1).sort(descending=True)
    if top_k is not None:
        probabilities[top_k:] = 0
    if top_p is not None:  # keep a token if those before it have not reached p, and always the first
        beyond = probabilities.cumsum(0) - probabilities >= top_p * probabilities.sum()
        probabilities[1:][beyond[1:]] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError for sampling options out of range."""
    rules = [("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1", 256),
             ("temperature", temperature, 0 <= temperature < float("inf"), "0 or more", 0.8),
             ("top_k", top_k, top_k is None or top_k >= 1, "at least 1", 50),
             ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1", 0.95)]
    for name, value, holds, rule, example in rules:
        if not holds:
            raise ValueError(f"{cli.flag(name)} {value}: must be {rule}, such as {example}")


def pick_device(name: str) -> torch.device:
    """Return the device that --device names: auto, cpu, cuda or cuda:N. ValueError if it does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type != "cuda" and name != "cpu":
        raise ValueError(f"--device {name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use "
                         "--device auto")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
