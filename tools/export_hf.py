"""Export a run as a Hugging Face folder: python tools/export_hf.py out/<run> DIR

    AutoModelForCausalLM.from_pretrained(DIR), AutoTokenizer.from_pretrained(DIR)

- The architecture determines the class (GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM) for any of the
  five model files; there is no custom code. Weights equal the checkpoint's bit for bit.
- The embedding keeps its padding rows (50,257 → 50,304), so that tools/import_hf.py restores the same model;
  generation_config.json excludes them. A run that began as an import gets the rows it was imported with.
- The tokenizer becomes a byte-level BPE of the `tokenizers` library with the same ids. As in training,
  special tokens in a text are plain text, and no end-of-text token is prepended. Of a tokenizer hf:DIR, the
  files are copied, with the chat template, and the generation config except for the ids that end a text.
"""
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanote import checkpoint, models, recipes
from nanote.config import parse, run_command
from nanote.logs import read_metrics
from nanote.tokenizers import HfTokenizer, byte_characters, get_tokenizer, same_tokenizer
from tools import hf_weights
from tools.hf_weights import appearing, read_json


@dataclass
class ExportConfig:
    run: tyro.conf.Positional[str]  # The folder of a run (its latest checkpoint), or a step-<n> folder in it.
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]  # The folder to create.
    # Type of the weights: auto keeps the checkpoint's; float32 uses the optimizer's masters if there are any.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    tokenizer: str | None = None  # hf:DIR, the folder of the run's tokenizer, if it has moved.


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "chat_template.jinja", "chat_template.json")
NOT_KEPT = ("eos_token_id", "transformers_version", "_from_model_config")  # of generation_config.json


# ---------------------------------------------------------------- tokenizer

def token_strings(tokenizer) -> dict[str, int]:
    """Return the vocabulary {string: id} of a byte-level BPE that is equal to a Tokenizer of the kit."""
    characters, encoding = byte_characters(), tokenizer.encoding
    if encoding is None:
        byte_tokens = {character: byte for byte, character in enumerate(characters)}
        return byte_tokens | {"<|endoftext|>": tokenizer.eot}
    special = {encoding.encode_single_token(name): name for name in encoding.special_tokens_set}
    tokens = {}
    for number in range(tokenizer.vocab_size):
        try:
            raw = encoding.decode_single_token_bytes(number)
            tokens[special.get(number) or "".join(characters[byte] for byte in raw)] = number
        except KeyError:
            tokens[f"<|unused_{number}|>"] = number  # an id that the encoding skips
    return tokens


def fast_tokenizer(tokenizer, n_positions: int):
    """Convert a Tokenizer of the kit to a transformers tokenizer with the same ids."""
    import tokenizers
    import transformers  # slow to import
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokens, encoding = token_strings(tokenizer), tokenizer.encoding
    special = ["<|endoftext|>"] if encoding is None else sorted(encoding.special_tokens_set, key=tokens.get)
    merges = [] if encoding is None else _merges(tokens, special)
    fast = Tokenizer(tokenizers.models.BPE(tokens, merges, ignore_merges=encoding is not None))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if encoding is None:
        fast.pre_tokenizer = byte_level
    else:
        # {1,3}+ is possessive in tiktoken (at most three digits), but a repetition in this library
        pattern = Regex(encoding._pat_str.replace("{1,3}+", "{1,3}"))
        fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(special)
    eot = next(token for token, number in tokens.items() if number == tokenizer.eot)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token=eot, eos_token=eot, model_max_length=n_positions,
        split_special_tokens=True, clean_up_tokenization_spaces=False)


def _merges(tokens: dict[str, int], special: list[str]) -> list[tuple[str, str]]:
    """Return BPE merges equivalent to tiktoken, which merges the neighbors whose joined token has the lowest
    id: all ways to split each token into two tokens, in the order of its id."""
    return [(token[:cut], token[cut:])
            for token in sorted(tokens, key=tokens.get) if token not in special
            for cut in range(1, len(token)) if token[:cut] in tokens and token[cut:] in tokens]


# ---------------------------------------------------------------- the folder

def export(run, folder, dtype: str = "auto", moved: str | None = None) -> Path:
    """Export a run or a checkpoint to `folder`, and return the checkpoint that was exported.

    dtype, moved: see ExportConfig's dtype and tokenizer.
    """
    source, folder = checkpoint.find(run), Path(folder)
    if os.path.lexists(folder):
        raise ValueError(f"{folder}: exists; name another folder")
    meta = checkpoint.read_meta(source)
    if models.is_file(meta["model"]):
        raise ValueError(f"{source}: a run of {meta['model']}; only runs of the kit's own model files, "
                         "such as --model optimized, have a class in transformers")
    checkpoint.verify(source)
    config = models.make_model_config("optimized", meta["model_config"] | {"use_fp8": False})
    vocab_size = meta.get("hf", {}).get("vocab_size", config.vocab_size)
    tokenizer = get_tokenizer(moved or meta["tokenizer"], vocab_size)
    if not same_tokenizer(tokenizer.name, meta["tokenizer"]):
        raise ValueError(f"--tokenizer {moved}: is not {meta['tokenizer']}, which the model was trained "
                         "with; name a folder with the same tokenizer.json")
    kind = hf_weights.model_type(config)
    weights = hf_weights.read_weights(source, meta["model"], masters=dtype == "float32")
    weights = hf_weights.to_hf(weights, config, vocab_size)
    if dtype != "auto":
        weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    with appearing(folder, "exporting") as unfinished:
        write_folder(unfinished, weights, config, vocab_size, tokenizer)
        card = model_card(source, meta, kind, weights)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
    return source


def write_folder(folder: Path, weights: dict, config, vocab_size: int, tokenizer) -> None:
    """Write weights, config, generation config and tokenizer."""
    import transformers  # slow to import
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder, max_shard_size=4 * 2**30)
    is_hf = isinstance(tokenizer, HfTokenizer)
    ids, generation = {"bos_token_id": tokenizer.eot}, {"pad_token_id": tokenizer.eot}
    if is_hf:
        theirs = read_json(tokenizer.folder / "config.json")
        ids = {name: theirs.get(name) for name in ("bos_token_id", "pad_token_id")}
        generation = ids | read_json(tokenizer.folder / "generation_config.json")
        generation = {name: value for name, value in generation.items() if name not in NOT_KEPT}
    nanote = {"bias": config.bias} | ({} if is_hf else {"tokenizer": tokenizer.name})
    hf_weights.hf_config(config, vocab_size, dtype=main_dtype(weights), nanote=nanote,
                         eos_token_id=tokenizer.eot, **ids).save_pretrained(folder)
    suppressed = {*(generation.pop("suppress_tokens", None) or ()), *range(tokenizer.vocab_size, vocab_size)}
    stops = [tokenizer.eot, *sorted(tokenizer.stop_tokens - {tokenizer.eot})]  # end of a turn, end of a text
    transformers.GenerationConfig(
        eos_token_id=stops if len(stops) > 1 else tokenizer.eot,
        suppress_tokens=sorted(suppressed) or None).save_pretrained(folder)
    add_fields(folder / "generation_config.json", **ids | generation)
    if is_hf:
        for name in TOKENIZER_FILES:
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, folder / name)
    else:
        fast_tokenizer(tokenizer, config.n_positions).save_pretrained(folder)
        # transformers before 5 knows the class by this name only
        add_fields(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if config.use_rotary:  # transformers before 5 reads this field, and takes 10000 if it is missing
        add_fields(folder / "config.json", rope_theta=config.rope_theta)


def main_dtype(weights: dict) -> str:
    return str(next(iter(weights.values())).dtype).removeprefix("torch.")


def add_fields(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2) + "\n")


def model_card(source: Path, meta: dict, kind: str, weights: dict) -> str:
    """Return the text of README.md, from the checkpoint and the run's metrics.jsonl alone."""
    config = {name: without_folder(value) for name, value in meta["config"].items()}
    rows = {"class": hf_weights.CLASSES[kind]} | card_rows(source, meta, config, weights)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [nanote, fp8]\n---\n"
        f"# {source.parent.name}\n\nTrained with nanoTE, FP8 GPT training on NVIDIA Transformer Engine.\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        "Documents began after an end-of-text token in training; put `model.config.eos_token_id` before a "
        "prompt to start one.\n\n"
        f"Options of the run:\n\n```json\n{json.dumps(config, indent=2)}\n```\n"
    )


def card_rows(source: Path, meta: dict, config: dict, weights: dict) -> dict[str, str | None]:
    """Return {title: value} of the card's table; None: leave the row out."""
    step = meta["step"]
    ranks = sum(name.endswith(".torch") for name in checkpoint.read_tensors(source, ("rng",)))
    tokens = step * config["micro_batch_size"] * config["seq_len"] * config["grad_accum"] * ranks
    measured = [record for record in read_metrics(source.parent / "metrics.jsonl") if record["step"] <= step]
    losses = [record for record in measured if "val_loss" in record]
    memory = max((record.get("peak_gib") or 0 for record in measured), default=0)
    is_hf = meta["tokenizer"].startswith("hf:")
    tokenizer = "tokenizer.json in this folder" if is_hf else meta["tokenizer"]
    unit = "nats a byte" if tokenizer == "byte" else f"nats a token ({tokenizer})"
    fp8_format = recipes.resolve_format(config["fp8_recipe"], config["fp8_format"])
    recipe = config["fp8_recipe"] + (f" ({fp8_format})" if fp8_format else "")
    recipe += ", trained without FP8" if recipe == "none" else ""
    val_loss = f"{losses[-1]['val_loss']:.4f} {unit}, after step {losses[-1]['step']:,}" if losses else None
    return {
        "parameters": f"{sum(w.numel() for w in weights.values()):,} ({main_dtype(weights)})",
        "tokenizer": tokenizer,
        "data": config["data"],
        "steps": f"{step:,}",
        "tokens": f"{tokens:,}",
        "FP8 recipe": recipe if step else None,
        "validation loss": val_loss,
        "learning rate": f"{config['lr']:g}, {config['lr_schedule']}, of {config['max_steps']:,} steps",
        "trained on": meta.get("device"),
        "GPU memory": f"{memory:.1f} GiB at most" if memory else None,
        "imported from": without_folder(meta.get("hf", {}).get("folder")),
        "PyTorch": meta.get("torch"),
    }


def without_folder(value):
    """Return the last part of an absolute path, any other value as it is: a card names no local folder."""
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def main(argv=None) -> None:
    config = parse(ExportConfig, argv, "tools/export_hf.py", __doc__)
    source = export(config.run, config.folder, config.dtype, config.tokenizer)
    class_name = json.loads((config.folder / "config.json").read_text())["architectures"][0]
    print(f"{config.folder}: {source} as {class_name}; "
          f"load it with AutoModelForCausalLM.from_pretrained({str(config.folder)!r})")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    sys.exit(run_command(main, "tools/export_hf.py"))
