"""Generate tokens from a trained model.

- FP8 is off. With a key-value cache each step has one row per GEMM, and FP8 GEMMs need multiples of 8 rows;
  padding costs more than FP8 saves. Checkpoints store weights in high precision, so nothing is lost.
- When the context is full (n_positions tokens), the window restarts from its last n_positions / 2 tokens, and
  their keys and values are recomputed, because every position changes.
"""
import contextlib
import math

import torch

from nanote import recipes


@torch.no_grad()
def generate(model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None,
             vocab_size=None, stop=(), use_cache=True, on_token=None):
    """Return up to `max_new_tokens` token ids that continue `ids`, a list of at least one.

    Args:
        temperature: 0 takes the most likely token. top_k, top_p: see sample.py. generator: torch.Generator.
        vocab_size: the tokenizer's, if the model's is padded above it.
        stop: token ids that end the text; the last one returned is one of them.
        on_token: called with each new token id, such as to show the text as it comes.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature {temperature}: must be 0 or more; 0.8 works")
    if top_k is not None and top_k < 1:
        raise ValueError(f"--top-k {top_k}: must be 1 or more; 50 works")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p}: must be above 0 and at most 1; 0.95 works")
    device = next(model.parameters()).device
    limit = model.config.n_positions
    has_cache = use_cache and hasattr(model, "make_kv_cache")
    cache_size = min(limit, len(ids) + max_new_tokens)
    ids = list(ids)
    prompt_length = len(ids)
    start = max(0, prompt_length - limit)  # the window is ids[start:]
    cache = None
    with inference_mode(model):
        while len(ids) < prompt_length + max_new_tokens:
            if len(ids) - start > limit:
                start = len(ids) - max(1, limit // 2)
                cache = None
            if not has_cache:
                output = model(torch.tensor([ids[start:]], device=device))
            elif cache is None:
                cache = model.make_kv_cache(1, cache_size)
                output = model(torch.tensor([ids[start:]], device=device), kv_cache=cache)
            else:
                output = model(torch.tensor([ids[-1:]], device=device), kv_cache=cache)
            logits = output[0] if isinstance(output, tuple) else output  # a second head may follow
            last_logits = logits[0, -1, :vocab_size].float()
            token = pick(last_logits, temperature, top_k, top_p, generator)
            ids.append(token)
            if on_token:
                on_token(token)
            if token in stop:
                break
    return ids[prompt_length:]


@contextlib.contextmanager
def inference_mode(model):
    """Switch to evaluation mode without FP8, and back at the end."""
    was_training = model.training
    with recipes.turned_off(model):
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def pick(logits, temperature, top_k, top_p, generator):
    """Sample one token id from logits (V,). ValueError for logits that are NaN or infinite."""
    highest = logits.max()
    if not highest.isfinite():
        raise ValueError("the logits are not finite: the model's weights diverged; use an earlier checkpoint")
    if temperature == 0:
        return int(logits.argmax())
    # Subtracting first keeps the highest logit at 0 for any temperature; 1e-30 is not yet 0 in float32.
    relative = (logits - highest) / max(temperature, 1e-30)
    probabilities, order = torch.softmax(relative, dim=-1).sort(descending=True)
    if top_k is not None:
        probabilities[top_k:] = 0
    if top_p is not None:  # keep a token if those before it have not reached p
        before = probabilities.cumsum(0) - probabilities
        is_kept = before < top_p * probabilities.sum()
        is_kept[0] = True
        probabilities[~is_kept] = 0
    picked = torch.multinomial(probabilities, 1, generator=generator)
    return int(order[picked])
