"""Generate text from a checkpoint: python sample.py out/<run> --prompt "def main(" --temperature 0.8

The model runs with FP8 off, in BF16 on a GPU and in float32 on the CPU; nanote/generate.py says why.
"""
import sys
from dataclasses import dataclass

import torch
import tyro

from nanote import checkpoint, cli, models
from nanote.dataset import get_tokenizer
from nanote.generate import check_sampling, generate, pick_device


@dataclass
class SampleConfig:
    run: tyro.conf.Positional[str]
    """Folder of a run (its latest checkpoint) or one step-<n> folder in it."""
    prompt: str = ""
    """Text to continue; empty: the start of a document."""
    max_new_tokens: int = 256
    """Tokens to generate (fewer if the text ends)."""
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


def load_model(path, device: torch.device):
    """Load the latest checkpoint of a run, or one step-<n> folder.

    Returns:
        The model in eval mode with FP8 off, and the tokenizer.
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
        separator = "\n---\n" if number else ""
        print(separator + config.prompt + tokenizer.decode(new))


if __name__ == "__main__":
    sys.exit(cli.run(main, "sample.py"))
