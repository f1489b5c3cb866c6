"""A run as a Hugging Face folder: python tools/export_hf.py out/<run> DIR

    AutoModelForCausalLM.from_pretrained(DIR), AutoTokenizer.from_pretrained(DIR)

Notable, and why:
- The class is the architecture's: GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM, from any of the five
  model files; no code of ours goes along. Weights are those of the checkpoint, bit for bit, in safetensors.
- The embedding keeps its padding rows (50,257 → 50,304), which were trained like the others, so that
  tools/import_hf.py gives the same model back; generation_config.json tells `generate` to leave them out. A
  run that began as an import gets back the rows it came with.
- The tokenizer becomes a byte-level BPE of the `tokenizers` library with the same ids: text is never searched
  for special tokens, as in data.py, and no end-of-text token is put before it. Training starts every document
  after one, so prompts may.
- The folder appears whole or not at all.
"""
import dataclasses
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanote import checkpoint, cli, fp8, safetensors_files
from nanote.config import saved_options
from nanote.dataset import get_tokenizer
from nanote.metrics import read_metrics
from tools import hf_weights


@dataclass
class ExportConfig:
    run: tyro.conf.Positional[str]
    """A run's folder (its latest checkpoint) or one step-<n> folder in it."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The folder to make."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights: auto as the checkpoint has them; float32 takes the optimizer's master copies where
    there are any."""


# ---------------------------------------------------------------- tokenizer

def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE's vocabulary (GPT-2's
    bytes_to_unicode)."""
    printable = [
        *range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def token_strings(tokenizer) -> dict[str, int]:
    """Every token of a data.py tokenizer by the string that a byte-level BPE calls it, special tokens by
    their names."""
    characters = byte_characters()
    if tokenizer.encoding is None:
        return {character: byte for byte, character in enumerate(characters)} | {
            "<|endoftext|>": tokenizer.eot
        }
    special = {
        tokenizer.encoding.encode_single_token(name): name for name in tokenizer.encoding.special_tokens_set
    }
    tokens = {}
    for number in range(tokenizer.vocab_size):
        try:
            raw = tokenizer.encoding.decode_single_token_bytes(number)
            tokens[special.get(number) or "".join(characters[byte] for byte in raw)] = number
        except KeyError:
            tokens[f"<|unused_{number}|>"] = number  # a hole in the encoding
    return tokens


def fast_tokenizer(tokenizer, n_positions: int):
    """data.py's tokenizer as a transformers one with the same ids."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens, encoding = token_strings(tokenizer), tokenizer.encoding
    special = ["<|endoftext|>"] if encoding is None else sorted(encoding.special_tokens_set, key=tokens.get)
    # tiktoken joins the neighbours that make the token of the lowest id. As BPE merges: every way to halve a
    # token, by its id.
    merges = (
        []
        if encoding is None
        else [
            (token[:cut], token[cut:])
            for token in sorted(tokens, key=tokens.get)
            if token not in special
            for cut in range(1, len(token))
            if token[:cut] in tokens and token[cut:] in tokens
        ]
    )
    fast = Tokenizer(models.BPE(tokens, merges, ignore_merges=encoding is not None))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if encoding is None:
        fast.pre_tokenizer = byte_level
    else:
        # {1,3}+ is at most three digits to tiktoken, and any number of them to the library's regular
        # expressions
        pattern = Regex(encoding._pat_str.replace("{1,3}+", "{1,3}"))
        fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(special)
    eot = next(token for token, number in tokens.items() if number == tokenizer.eot)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token=eot, eos_token=eot, model_max_length=n_positions,
        split_special_tokens=True, clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------- the folder

def export(run, folder, dtype: str = "auto") -> Path:
    """Write the Hugging Face folder `folder` of a run or a checkpoint and return the checkpoint it came from.

    ValueError or OSError, in one line and with nothing written, for what is wrong with either, or where no
    class fits.
    """
    import transformers
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    source, folder = checkpoint.find(run), Path(folder)
    if os.path.lexists(folder):
        raise ValueError(f"{folder} exists; name another folder")
    meta = checkpoint.read_meta(source)
    config, imported = hf_weights.optimized_config(meta), meta.get("hf", {})
    vocab_size = imported.get("vocab_size", config.vocab_size)
    if vocab_size > config.vocab_size:
        raise ValueError(f"{source / 'meta.json'}: hf.vocab_size is {vocab_size}, but the embedding has "
                         f"{config.vocab_size} rows; {checkpoint.RESTORE}")
    try:
        kind = hf_weights.model_type(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    tokenizer = get_tokenizer(meta["tokenizer"], vocab_size)
    weights = hf_weights.read_weights(source, meta, masters=dtype == "float32")
    try:
        weights = hf_weights.to_hf(weights, config, vocab_size)
    except ValueError as error:
        raise ValueError(f"{source}: {error}; {checkpoint.RESTORE}") from error
    if dtype != "auto":
        weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}

    unfinished = folder.with_name(f".exporting-{folder.name}-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        save_torch_state_dict(weights, unfinished, max_shard_size=safetensors_files.SHARD_BYTES)
        main_dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        eot = dict(bos_token_id=tokenizer.eot, eos_token_id=tokenizer.eot)
        hf_weights.hf_config(
            config, vocab_size, dtype=main_dtype, nanote={"tokenizer": tokenizer.name, "bias": config.bias},
            **eot,
        ).save_pretrained(unfinished)
        padding = list(range(tokenizer.vocab_size, vocab_size))
        transformers.GenerationConfig(
            **eot, pad_token_id=tokenizer.eot, suppress_tokens=padding or None
        ).save_pretrained(unfinished)
        fast_tokenizer(tokenizer, config.n_positions).save_pretrained(unfinished)
        # the name of before transformers 5
        add_fields(unfinished / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        if config.use_rotary:  # read from here before transformers 5, which would take its absence for 10000
            add_fields(unfinished / "config.json", rope_theta=config.rope_theta)
        (unfinished / "README.md").write_text(
            model_card(source, meta, kind, weights, main_dtype), encoding="utf-8"
        )
        os.rename(unfinished, folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{folder} not written: {getattr(error, 'strerror', None) or error}; nothing is kept"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return source


def add_fields(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2) + "\n")


def model_card(source: Path, meta: dict, kind: str, weights: dict, dtype: str) -> str:
    """README.md: what the checkpoint and the run's metrics.jsonl say, and nothing else."""
    config, step = dataclasses.asdict(saved_options(source, meta)), meta["step"]
    tokens = step * config["micro_batch_size"] * config["seq_len"] * config["grad_accum"] * processes(source)
    measured = [record for record in read_metrics(source.parent / "metrics.jsonl") if record["step"] <= step]
    losses = [record for record in measured if "val_loss" in record]
    memory = max((record.get("peak_gib") or 0 for record in measured), default=0)
    unit = "nats a byte" if meta["tokenizer"] == "byte" else f"nats a token ({meta['tokenizer']})"
    fp8_format = fp8.resolve_format(config["fp8_recipe"], config["fp8_format"])
    recipe = config["fp8_recipe"] + (f" ({fp8_format})" if fp8_format else "")
    if recipe == "none":
        recipe += ", trained without FP8"
    rows = {
        "class": hf_weights.CLASSES[kind],
        "parameters": f"{sum(w.numel() for w in weights.values()):,} ({dtype})",
        "tokenizer": meta["tokenizer"],
        "data": config["data"],
        "steps": f"{step:,}",
        "tokens": f"{tokens:,}",
        "FP8 recipe": recipe if step else None,
        "validation loss": f"{losses[-1]['val_loss']:.4f} {unit}, after step {losses[-1]['step']:,}"
        if losses
        else None,
        "learning rate": f"{config['lr']:g}, {config['lr_schedule']}, of {config['max_steps']:,} steps",
        "trained on": meta.get("device"),
        "GPU memory": f"{memory:.1f} GiB at most" if memory else None,
        "imported from": meta.get("hf", {}).get("folder"),
        "PyTorch": meta.get("torch"),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [nanote, fp8]\n---\n# {source.parent.name}\n\n"
        f"Trained with nanoTE, FP8 GPT training on NVIDIA Transformer Engine.\n\n| | |\n| --- | --- |\n{table}\n\n"
        "Documents began after an end-of-text token in training; put `tokenizer.bos_token_id` before a prompt to start one.\n\n"
        f"Options of the run:\n\n```json\n{json.dumps(config, indent=2)}\n```\n"
    )


def processes(source: Path) -> int:
    """How many processes wrote a checkpoint: each stored its random generators."""
    names = safetensors_files.stored_tensors(source)
    return len({name.partition(".")[0] for name in names if name.startswith("rng")})


def main(argv=None) -> None:
    config = cli.parse(ExportConfig, argv, prog="tools/export_hf.py", description=__doc__)
    source = export(config.run, config.folder, config.dtype)
    print(
        f"{config.folder}: {source} as {json.loads((config.folder / 'config.json').read_text())['architectures'][0]}; "
        f"load it with AutoModelForCausalLM.from_pretrained({str(config.folder)!r})"
    )


if __name__ == "__main__":
    sys.exit(cli.run(main, "tools/export_hf.py"))
