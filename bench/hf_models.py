"""The shapes of published models, as in the config.json of each, for bench/finetune.py and bench/fits.py.

`hf_config(name)` returns transformers' config; `options_of(config)` returns the options of train.py for the
same network, as tools/import_hf.py does. No weights are read.
"""

from pathlib import Path

from tools import hf_weights

QWEN = dict(model_type="qwen2", num_key_value_heads=2, vocab_size=151936, rope_theta=1e6, rms_norm_eps=1e-6,
            max_position_embeddings=32768, tie_word_embeddings=True)
LARGE_QWEN = QWEN | dict(vocab_size=152064, max_position_embeddings=131072, tie_word_embeddings=False)
LLAMA = dict(model_type="llama", num_key_value_heads=8, vocab_size=128256, rope_theta=5e5, rms_norm_eps=1e-5,
             max_position_embeddings=8192, tie_word_embeddings=False)
LLAMA_3_1 = LLAMA | dict(
    max_position_embeddings=131072,
    rope_parameters=dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
                         high_freq_factor=4.0, original_max_position_embeddings=8192))
LLAMA_3_2 = LLAMA_3_1 | dict(
    tie_word_embeddings=True, rope_parameters=LLAMA_3_1["rope_parameters"] | dict(factor=32.0))


def sizes(layers: int, width: int, heads: int, inner: int) -> dict:
    """Return the fields of a config.json for these sizes. width: of the residual, inner: of the MLP."""
    return dict(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
                intermediate_size=inner)


MODELS = {
    "qwen2.5-0.5b": QWEN | sizes(24, 896, 14, 4864),
    "llama-3.2-1b": LLAMA_3_2 | sizes(16, 2048, 32, 8192),
    "qwen2.5-1.5b": QWEN | sizes(28, 1536, 12, 8960) | dict(max_position_embeddings=131072),
    "qwen2.5-3b": QWEN | sizes(36, 2048, 16, 11008),
    "qwen2.5-7b": LARGE_QWEN | sizes(28, 3584, 28, 18944) | dict(num_key_value_heads=4),
    "llama-3-8b": LLAMA | sizes(32, 4096, 32, 14336),
    "llama-3.1-8b": LLAMA_3_1 | sizes(32, 4096, 32, 14336),
    "qwen2.5-14b": LARGE_QWEN | sizes(48, 5120, 40, 13824) | dict(num_key_value_heads=8),
    "qwen2.5-32b": LARGE_QWEN | sizes(64, 5120, 40, 27648) | dict(num_key_value_heads=8),
    "llama-3-70b": LLAMA | sizes(80, 8192, 64, 28672),
}
# Sizes of a test on a CPU; the block is that of the model
TINY = sizes(2, 64, 4, 96) | dict(num_key_value_heads=2, vocab_size=512)


def hf_config(name: str, is_tiny: bool = False):
    """Return transformers' config of one of MODELS, with the sizes of TINY if `is_tiny`."""
    import transformers  # slow to import

    fields = MODELS[name] | (TINY if is_tiny else {})
    return transformers.AutoConfig.for_model(**fields)


def options_of(config) -> dict:
    """Return train.py's options for the network of a transformers config."""
    options = hf_weights.from_hf_config(config, Path("config.json"))
    return options | dict(vocab_size=config.vocab_size, preset="hf")
