"""Export a run as a Hugging Face folder: python tools/export_hf.py out/<run> DIR

    AutoModelForCausalLM.from_pretrained(DIR), AutoTokenizer.from_pretrained(DIR)

- The architecture determines the class (GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM) for any of the
  five model files; the folder contains no custom code. Weights equal the checkpoint's bit for bit, in
  safetensors.
- The embedding keeps its padding rows (50,257 → 50,304), which were trained like the others, so that
  tools/import_hf.py restores the same model; generation_config.json excludes them from `generate`. A run that
  began as an import gets the number of rows it was imported with.
- The tokenizer becomes a byte-level BPE of the `tokenizers` library with the same ids. As in training,
  special tokens in a text are plain text, and no end-of-text token is prepended. Training starts every
  document after one, so a prompt may begin with it. The files of a tokenizer hf:DIR, with its chat template,
  are copied, and its generation config except for the ids that end a text.
- The folder appears complete or not at all.
"""
import dataclasses
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

from nanote import checkpoint, cli, fp8, json_files, models, safetensors_files
from nanote.config import saved_options
from nanote.dataset import HfTokenizer, byte_characters, get_tokenizer
from nanote.metrics import read_metrics
from tools import hf_weights


@dataclass
class ExportConfig:
    run: tyro.conf.Positional[str]
    """The folder of a run (its latest checkpoint is used), or one step-<n> folder in it."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The folder to create."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights: auto keeps that of the checkpoint; float32 uses the optimizer's master weights if
    there are any."""
    tokenizer: str | None = None
    """hf:DIR, the folder of the run's tokenizer, if it has moved."""


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "chat_template.jinja", "chat_template.json")
GENERATION = {  # fields of config.json and generation_config.json
    "bos_token_id?": int | None, "pad_token_id?": int | None, "suppress_tokens?": (type(None), [int])}
NOT_KEPT = ("eos_token_id", "transformers_version", "_from_model_config")  # of generation_config.json


# ---------------------------------------------------------------- tokenizer

def token_strings(tokenizer) -> dict[str, int]:
    """Return {string in a byte-level BPE vocabulary: id} for a nanote.dataset tokenizer; special tokens by
    name."""
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
    """Convert a nanote.dataset tokenizer to a transformers tokenizer with the same ids."""
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
        split_special_tokens=True, clean_up_tokenization_spaces=False,
    )


def _merges(tokens: dict[str, int], special: list[str]) -> list[tuple[str, str]]:
    """Return BPE merges equivalent to tiktoken, which merges the neighbors whose joined token has the lowest
    id.

    These are all ways to split each token into two tokens, in the order of its id.
    """
    return [
        (token[:cut], token[cut:])
        for token in sorted(tokens, key=tokens.get) if token not in special
        for cut in range(1, len(token)) if token[:cut] in tokens and token[cut:] in tokens
    ]


# ---------------------------------------------------------------- the folder

def export(run, folder, dtype: str = "auto", moved: str | None = None) -> Path:
    """Export a run or a checkpoint to `folder`, and return the checkpoint that was exported.

    dtype, moved: see ExportConfig's dtype and tokenizer.

    Raises ValueError or OSError, in one line and with nothing written, if either is invalid or no class fits.
    """
    from safetensors import SafetensorError

    source, folder = checkpoint.find(run), Path(folder)
    if os.path.lexists(folder):
        raise ValueError(f"{folder} exists; name another folder")
    meta = checkpoint.read_meta(source)
    if models.is_file(meta["model"]):
        raise ValueError(f"{source}: a run of {meta['model']}; only runs of the kit's own model files, "
                         "such as --model optimized, have a class in transformers")
    config, imported = hf_weights.optimized_config(meta), meta.get("hf", {})
    vocab_size = imported.get("vocab_size", config.vocab_size)
    if vocab_size > config.vocab_size:
        raise ValueError(f"{source / 'meta.json'}: hf.vocab_size is {vocab_size}, but the embedding has "
                         f"{config.vocab_size} rows; {checkpoint.RESTORE}")
    try:
        kind = hf_weights.model_type(config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    tokenizer = get_tokenizer(meta["tokenizer"], vocab_size, moved)
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
        write_folder(unfinished, weights, config, vocab_size, tokenizer)
        card = model_card(source, meta, kind, weights)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        os.rename(unfinished, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{folder} not written: {reason}; nothing is kept") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return source


def write_folder(folder: Path, weights: dict, config, vocab_size: int, tokenizer) -> None:
    """Write weights, config, generation config and tokenizer."""
    import transformers  # slow to import
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder, max_shard_size=safetensors_files.SHARD_BYTES)
    is_hf = isinstance(tokenizer, HfTokenizer)
    ids, generation = {"bos_token_id": tokenizer.eot}, {"pad_token_id": tokenizer.eot}
    if is_hf:
        ids, generation = generation_fields(tokenizer.folder)
    nanote = {"bias": config.bias} | ({} if is_hf else {"tokenizer": tokenizer.name})
    hf_config = hf_weights.hf_config(config, vocab_size, dtype=main_dtype(weights), nanote=nanote,
                                     eos_token_id=tokenizer.eot, **ids)
    hf_config.save_pretrained(folder)
    suppressed = {*(generation.pop("suppress_tokens", None) or ()), *range(tokenizer.vocab_size, vocab_size)}
    # such as the end of a text, beside that of a turn
    other_stops = sorted(tokenizer.stop_tokens - {tokenizer.eot})
    transformers.GenerationConfig(
        eos_token_id=[tokenizer.eot, *other_stops] if other_stops else tokenizer.eot,
        suppress_tokens=sorted(suppressed) or None,
    ).save_pretrained(folder)
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


def generation_fields(folder: Path) -> tuple[dict, dict]:
    """Return what the folder of a tokenizer hf:DIR says about generation.

    The ids that end a text are left out: the tokenizer has them.

    Returns:
        bos_token_id and pad_token_id of config.json, None where it has none; these and the fields of
        generation_config.json, such as temperature.
    """

    def read(name):
        path = folder / name
        return json_files.read(path, GENERATION, "copy the file again") if path.is_file() else {}

    config = read("config.json")
    ids = {name: config.get(name) for name in ("bos_token_id", "pad_token_id")}
    generation = ids | read("generation_config.json")
    return ids, {name: value for name, value in generation.items() if name not in NOT_KEPT}


def main_dtype(weights: dict) -> str:
    return str(next(iter(weights.values())).dtype).removeprefix("torch.")


def add_fields(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2) + "\n")


def model_card(source: Path, meta: dict, kind: str, weights: dict) -> str:
    """Return the text of README.md, from the checkpoint and the run's metrics.jsonl alone."""
    config = dataclasses.asdict(saved_options(source, meta))
    config = {name: without_folder(value) for name, value in config.items()}
    rows = card_rows(source, meta, kind, weights, config)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [nanote, fp8]\n---\n"
        f"# {source.parent.name}\n\nTrained with nanoTE, FP8 GPT training on NVIDIA Transformer Engine.\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        "Documents began after an end-of-text token in training; put `model.config.eos_token_id` before a "
        "prompt to start one.\n\n"
        f"Options of the run:\n\n```json\n{json.dumps(config, indent=2)}\n```\n"
    )


def card_rows(source: Path, meta: dict, kind: str, weights: dict, config: dict) -> dict[str, str | None]:
    """Return {title: value} of the card's table; None: leave the row out."""
    step = meta["step"]
    tokens = step * config["micro_batch_size"] * config["seq_len"] * config["grad_accum"] * processes(source)
    measured = [record for record in read_metrics(source.parent / "metrics.jsonl") if record["step"] <= step]
    losses = [record for record in measured if "val_loss" in record]
    memory = max((record.get("peak_gib") or 0 for record in measured), default=0)
    tokenizer, unit = meta["tokenizer"], "nats a byte"
    if tokenizer.startswith("hf:"):
        tokenizer = "tokenizer.json in this folder"
    if tokenizer != "byte":
        unit = f"nats a token ({tokenizer})"
    fp8_format = fp8.resolve_format(config["fp8_recipe"], config["fp8_format"])
    recipe = config["fp8_recipe"] + (f" ({fp8_format})" if fp8_format else "")
    if recipe == "none":
        recipe += ", trained without FP8"
    val_loss = None
    if losses:
        val_loss = f"{losses[-1]['val_loss']:.4f} {unit}, after step {losses[-1]['step']:,}"
    return {
        "class": hf_weights.CLASSES[kind],
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


def processes(source: Path) -> int:
    """Return how many processes wrote a checkpoint; each stored its random generators."""
    names = safetensors_files.stored_tensors(source)
    return len({name.partition(".")[0] for name in names if name.startswith("rng")})


def main(argv=None) -> None:
    config = cli.parse(ExportConfig, argv, prog="tools/export_hf.py", description=__doc__)
    source = export(config.run, config.folder, config.dtype, config.tokenizer)
    class_name = json.loads((config.folder / "config.json").read_text())["architectures"][0]
    print(f"{config.folder}: {source} as {class_name}; "
          f"load it with AutoModelForCausalLM.from_pretrained({str(config.folder)!r})")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    sys.exit(cli.run(main, "tools/export_hf.py"))
