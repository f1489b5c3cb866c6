"""Export a run as a Hugging Face folder: python tools/export_hf.py out/<run> DIR

    AutoModelForCausalLM.from_pretrained(DIR), AutoTokenizer.from_pretrained(DIR)

- The class is GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM. An edited model, or
  your own (--model), is refused where its logits differ from those of the class.
- The embedding keeps its padding rows (50,257 → 50,304), unless the run began as an import.
- Adapters of the edit lora are added to the weights of their base. --peft writes them alone, for PEFT.
- --fp8 writes the blocks in FP8 for servers, with the scales of delayed scaling: see tools/fp8_folders.py.
- The tokenizer becomes a byte-level BPE of the `tokenizers` library with the same ids. Of a tokenizer hf:DIR,
  the files are copied, with the chat template, and the generation config but for the ids that end a text.
"""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

    # The logits are compared in float32. TE would run float32 GEMMs in TF32.
    os.environ.setdefault("NANOTE_ENGINE", "reference")
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

import itertools
import json
import math
import shlex
import shutil
import signal
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import tyro

from nanote import adapters, checkpoint, models, recipes, trained_model
from nanote.command import parse, run_command
from nanote.logs import read_metrics
from nanote.new_folder import check_new, new_folder
from nanote.tokenizers import HfTokenizer, byte_characters
from nanote.training_state import weights_of
from tools import adapter_weights, fp8_folders, hf_weights
from tools.tensor_files import LazyTensors, RunWeights, optimized_name, read_json, write_shards


@dataclass
class ExportConfig:
    # The folder of a run, such as out/tiny (its latest checkpoint), or a step-<n> folder in it.
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]  # The folder to create.
    # Type of the weights: auto keeps the checkpoint's; float32 uses the optimizer's masters if there are any.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    tokenizer: str | None = None  # hf:DIR, the folder of the run's tokenizer, if it has moved.
    model: str | None = None  # None: the run's; path/to/file.py:Class if it is your own (no code is stored).
    # Write the blocks in FP8 (compressed-tensors), with the scales of a run with --fp8-recipe delayed.
    fp8: bool = False
    fp8_lm_head: bool = False  # With --fp8: write the output head in FP8, too.
    peft: bool = False  # Write the adapters of a run alone, as a folder of PEFT.


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                   "chat_template.jinja", "chat_template.json")
# Largest difference of logits over the largest logit. Rounding gives at most 0.014 % in float32, with weights
# ten times GPT-2's, and 2 % in BF16.
TOLERANCE_IN_FLOAT32 = 1e-3
TOLERANCE_IN_BF16 = 0.1
NOT_KEPT = ("eos_token_id", "transformers_version", "_from_model_config")  # of generation_config.json


# ---------------------------------------------------------------- tokenizer

def token_strings(tokenizer) -> dict[str, int]:
    """Return the vocabulary {string: id} of a byte-level BPE that is equal to a Tokenizer of the kit."""
    characters = byte_characters()
    encoding = tokenizer.encoding
    if encoding is None:
        byte_tokens = {character: byte for byte, character in enumerate(characters)}
        return byte_tokens | {"<|endoftext|>": tokenizer.eot}
    special = {encoding.encode_single_token(name): name for name in encoding.special_tokens_set}
    tokens = {}
    for number in range(tokenizer.vocab_size):
        if number in special:
            tokens[special[number]] = number
            continue
        try:
            raw = encoding.decode_single_token_bytes(number)
            string = "".join(characters[byte] for byte in raw)
        except KeyError:
            string = f"<|unused_{number}|>"  # an id that the encoding skips
        tokens[string] = number
    return tokens


def fast_tokenizer(tokenizer, n_positions: int):
    """Convert a Tokenizer of the kit to a transformers tokenizer with the same ids."""
    import tokenizers
    import transformers  # slow to import
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokens = token_strings(tokenizer)
    encoding = tokenizer.encoding
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if encoding is None:
        special = ["<|endoftext|>"]
        fast = Tokenizer(tokenizers.models.BPE(tokens, []))
        fast.pre_tokenizer = byte_level
    else:
        special = sorted(encoding.special_tokens_set, key=tokens.get)
        fast = Tokenizer(tokenizers.models.BPE(tokens, _merges(tokens, special), ignore_merges=True))
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
    merges = []
    for token in sorted(tokens, key=tokens.get):
        if token in special:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in tokens and right in tokens:
                merges.append((left, right))
    return merges


# ---------------------------------------------------------------- the folder

def export(run, folder, dtype="auto", moved_tokenizer=None, model_name=None, fp8=False,
           fp8_lm_head=False, peft=False) -> Path:
    """Export a run or a checkpoint to `folder`; return the checkpoint. Arguments: see ExportConfig."""
    if fp8 and dtype == "float32":
        raise ValueError("--fp8 with --dtype float32: FP8 weights are those of training, not of the float32 "
                         "masters; leave --dtype out")
    if fp8_lm_head and not fp8:
        raise ValueError("--fp8-lm-head without --fp8: nothing is written in FP8; add --fp8")
    source = checkpoint.find(run)
    folder = Path(folder)
    check_new(folder)
    meta = checkpoint.read_meta(source)
    checkpoint.verify(source)
    config = models.make_model_config("optimized", meta["model_config"] | {"use_fp8": False})
    tokenizer = trained_model.load_tokenizer(meta, moved_tokenizer)
    added = adapter_weights.read_adapters(source, meta["model_config"], masters=dtype == "float32")
    check_adapters(source, added, fp8, peft)
    # a run that has trained more than adapters, or began without --init-from, has stored all weights itself
    base = adapters.find_base(source, meta) or source
    vocab_size = adapter_weights.vocab_size_of(base, meta, padded=config.vocab_size)
    scales = {}  # of the weights that are written in FP8
    if fp8:
        scales = fp8_folders.training_scales(source, meta["config"]["fp8_recipe"], config, fp8_lm_head)
    trained_beside = adapters.dtype_of_base(meta) if "base" in meta else None
    weights = weights_to_write(source, base, added, scales, dtype, config.vocab_size, trained_beside)
    with new_folder(folder, "name another folder", lambda names: check_new(folder)) as unfinished:
        if peft:
            adapter_weights.write_peft(unfinished, added, base, config, vocab_size)
            load = partial(make_merged, weights, config, vocab_size)
        else:
            write_folder(unfinished, weights, scales, config, vocab_size, tokenizer)
            load = partial(load_exported, unfinished)
        card = model_card(source, meta, tokenizer, library="peft" if peft else "transformers")
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        check_logits(load, source, model_name, weights, scales, vocab_size)
    return source


def weights_to_write(source: Path, base: Path, added, scales: dict, dtype: str, rows: int,
                     trained_beside: torch.dtype | None) -> LazyTensors:
    """Return {name in the optimized model: weight}, with the adapters added to the weights of their base.

    Args:
        source: the checkpoint to export.
        base: the folder of the base of its adapters; `source` if it has none.
        added: the adapters of the run; None if it has none.
        scales: {name: Scales} of the weights that are written in FP8.
        dtype: of ExportConfig.
        rows: of the embedding.
        trained_beside: see adapter_weights.MergedWeights.
    """
    masters = dtype == "float32"
    torch_dtype = None if dtype == "auto" else getattr(torch, dtype)
    if added is not None:
        of_base, shapes = adapter_weights.read_base(base, masters, rows)
        of_run = RunWeights(source, masters=masters)  # what the base lacks, such as biases
        return adapter_weights.MergedWeights(
            ChainMap(of_run, of_base), shapes | of_run.shapes, added, torch_dtype, trained_beside)
    if scales:
        return fp8_folders.QuantizedWeights(source, scales, torch_dtype)
    return RunWeights(source, masters=masters, dtype=torch_dtype)


def check_adapters(source: Path, added, fp8: bool, peft: bool) -> None:
    """Raise ValueError for options that do not fit the adapters of a run. added: None if it has none."""
    if peft and fp8:
        raise ValueError("--peft with --fp8: adapters are not in FP8; leave --fp8 out")
    if peft and added is None:
        raise ValueError(f"--peft: {source} has no adapters; leave --peft out")
    if fp8 and added is not None:
        raise ValueError(f"--fp8: {source} has adapters: its scales are those of the base, not of the merged "
                         "weights; leave --fp8 out")


@torch.no_grad()
def check_logits(load: Callable, source: Path, model_name: str | None, weights: LazyTensors, scales: dict,
                 vocab_size: int) -> None:
    """Raise ValueError unless the exported model and the run's model compute the same logits of 1,024 random
    tokens.

    A run with adapters is first compared with its merged weights, before they are rounded. Then the run's
    model, holding the weights that are written, is compared with the exported one.

    load: dtype -> the model of transformers.
    """
    import transformers  # slow to import

    from tools.import_hf import open_model  # which imports this file

    transformers.logging.disable_progress_bar()
    dtype, tolerance = precision_of_logits(weights)
    device = models.pick_device("cpu" if recipes.IS_REFERENCE else "auto")  # a run may train on the GPU
    meta = with_base_in_bf16(checkpoint.read_meta(source))
    model = trained_model.load_run(source, meta, model_name, device, dtype, open_model)
    random = torch.Generator().manual_seed(0)
    length = min(model.config.n_positions, 1024)
    ids = torch.randint(vocab_size, (1, length), generator=random).to(device)
    if isinstance(weights, adapter_weights.MergedWeights):
        logits_of_run = logits_of(model, ids, vocab_size)
        set_weights(model, weights.as_in_run(), scales)
        logits_of_sum = logits_of(model, ids, vocab_size)
        check_close(logits_of_run, logits_of_sum, tolerance, source, "the base with its adapters added",
                    "its model computes with adapters otherwise; share the run with its model file")
    set_weights(model, weights, scales)
    logits_of_written_weights = logits_of(model, ids, vocab_size)
    del model  # one at a time
    exported = load(dtype).to(device).eval()
    class_name = type(exported).__name__
    exported_logits = exported(ids).logits
    check_close(logits_of_written_weights, exported_logits, tolerance, source, class_name,
                "transformers has no class for an edited model; share the run with its model file")


def precision_of_logits(weights: LazyTensors) -> tuple[torch.dtype, float]:
    """Return the dtype in which logits are compared, and the tolerance: float32 on te_reference for up to 4
    billion parameters (16 GB), else BF16."""
    is_small = sum(math.prod(shape) for shape in weights.shapes.values()) <= 4e9
    if is_small and recipes.IS_REFERENCE:
        return torch.float32, TOLERANCE_IN_FLOAT32
    return torch.bfloat16, TOLERANCE_IN_BF16


def with_base_in_bf16(meta: dict) -> dict:
    """Return meta.json with the base of adapters in BF16: the export has added them to weights that were not
    rounded to FP8."""
    model_config = meta["model_config"]
    if "lora_base" in model_config:
        model_config = model_config | {"lora_base": "bf16"}
    return meta | {"model_config": model_config}


def check_close(logits, other_logits, tolerance: float, source: Path, other_name: str, reason: str) -> None:
    """Raise ValueError unless the logits of a run and of another model differ by at most `tolerance` times
    the largest logit. reason: why they may differ, and what to do."""
    difference = (logits - other_logits).abs().max().item()
    largest = logits.abs().max().item()
    if not difference <= tolerance * largest:  # NaN, too
        raise ValueError(f"{source}: its logits and those of {other_name} differ by up to {difference:.3g}, "
                         f"and the largest is {largest:.3g}: {reason}")


def logits_of(model, ids, vocab_size: int) -> torch.Tensor:
    """Return a model's logits without padding of the vocabulary."""
    logits = model(ids)
    if isinstance(logits, tuple):  # of a model of the user's own
        logits = logits[0]
    return logits[..., :vocab_size]


def set_weights(model, weights: Mapping, scales: dict) -> None:
    """Copy the weights of an export to a run's model. Its adapters are in these already, and set to zero."""
    for stored_name, parameter in weights_of(model).items():
        if not isinstance(parameter, torch.nn.Parameter):
            continue
        name = optimized_name(stored_name)
        if adapters.MARK in name:
            parameter.zero_()
            continue
        weight = weights[name]  # in the type that was written
        if name in scales:
            weight = fp8_folders.value_of(weight, scales[name])
        parameter.copy_(weight)


def make_merged(weights: Mapping, config, vocab_size: int, dtype: torch.dtype):
    """Return the transformers model of merged weights, which --peft does not write."""
    import transformers  # slow to import

    hf_config = hf_weights.hf_config(config, vocab_size)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    parameters = dict(model.named_parameters())
    for name, tensor in hf_weights.to_hf(weights, config, vocab_size):
        parameters[name].copy_(tensor)
    return model


def load_exported(folder: Path, dtype: torch.dtype):
    """Return the transformers model of a folder. FP8 weights are dequantized here: transformers needs the
    package compressed-tensors for it."""
    import transformers  # slow to import

    config = transformers.AutoConfig.from_pretrained(folder)
    if not hasattr(config, "quantization_config"):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = fp8_folders.open_folder(folder)
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])
    return model


def write_folder(
        folder: Path, weights: LazyTensors, scales: dict, config, vocab_size: int, tokenizer) -> None:
    """Write weights and scales, config, generation config and tokenizer."""
    tensors = hf_weights.to_hf(weights, config, vocab_size)
    write_shards(folder, itertools.chain(tensors, fp8_folders.scale_tensors(scales, config)))
    dtype = str(weights.dtype_of("wte.weight")).removeprefix("torch.")
    write_config(folder, config, vocab_size, tokenizer, dtype)
    if scales:
        quantization = fp8_folders.quantization_config(scales, config)
        add_fields(folder / "config.json", quantization_config=quantization)
    write_generation_config(folder, vocab_size, tokenizer)
    write_tokenizer(folder, tokenizer, config.n_positions)


def write_config(folder: Path, config, vocab_size: int, tokenizer, dtype: str) -> None:
    """Write config.json. Its entry nanote has what import_hf.py cannot see elsewhere."""
    nanote = {"bias": config.bias}
    if not isinstance(tokenizer, HfTokenizer):
        nanote["tokenizer"] = tokenizer.name
    hf_config = hf_weights.hf_config(config, vocab_size, dtype=dtype, nanote=nanote,
                                     eos_token_id=tokenizer.eot, **special_ids(tokenizer))
    hf_config.save_pretrained(folder)
    if config.use_rotary:  # transformers before 5 reads this field, and takes 10000 if it is missing
        add_fields(folder / "config.json", rope_theta=config.rope_theta)
    if config.rope_scaling is not None:  # likewise
        add_fields(folder / "config.json", rope_scaling=hf_weights.rope_parameters(config))


def special_ids(tokenizer) -> dict:
    """Return the special tokens of config.json but for end-of-text, {field: id}."""
    if not isinstance(tokenizer, HfTokenizer):
        return {"bos_token_id": tokenizer.eot}
    theirs = read_json(tokenizer.folder / "config.json")
    return {name: theirs.get(name) for name in ("bos_token_id", "pad_token_id")}


def write_generation_config(folder: Path, vocab_size: int, tokenizer) -> None:
    """Write generation_config.json: the fields of the tokenizer's folder, its own ids that end a text, and no
    token that is padding of the vocabulary."""
    import transformers  # slow to import

    fields = special_ids(tokenizer)
    if isinstance(tokenizer, HfTokenizer):
        fields |= read_json(tokenizer.folder / "generation_config.json")
        for name in NOT_KEPT:
            fields.pop(name, None)
    else:
        fields["pad_token_id"] = tokenizer.eot
    suppressed = set(fields.pop("suppress_tokens", None) or ())
    suppressed.update(range(tokenizer.vocab_size, vocab_size))
    stops = [tokenizer.eot, *sorted(tokenizer.stop_tokens - {tokenizer.eot})]  # end of a turn, end of a text
    transformers.GenerationConfig(
        eos_token_id=stops if len(stops) > 1 else tokenizer.eot,
        suppress_tokens=sorted(suppressed) or None).save_pretrained(folder)
    add_fields(folder / "generation_config.json", **fields)


def write_tokenizer(folder: Path, tokenizer, n_positions: int) -> None:
    """Copy the files of a tokenizer hf:DIR, or write the equal one of transformers."""
    if isinstance(tokenizer, HfTokenizer):
        for name in TOKENIZER_FILES:
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, folder / name)
        return
    fast_tokenizer(tokenizer, n_positions).save_pretrained(folder)
    # transformers before 5 knows the class by this name only
    add_fields(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def add_fields(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2) + "\n")


def model_card(source: Path, meta: dict, tokenizer, library: str) -> str:
    """Return the text of README.md, from the checkpoint and the run's metrics.jsonl. It names no folder."""
    config = {}
    for name, value in meta["config"].items():
        config[name] = Path(value).name if os.path.isabs(str(value)) else value
    fp8_format = recipes.resolve_format(config["fp8_recipe"], config["fp8_format"])
    rows = {}
    if meta["step"]:  # else it was imported, and not trained
        rows["trained on"] = f"{meta.get('device', 'unknown')}, {meta['step']:,} steps"
        rows["FP8 recipe"] = config["fp8_recipe"] + (f" ({fp8_format})" if fp8_format else "")
    for record in read_metrics(source.parent / "metrics.jsonl"):
        if record["step"] <= meta["step"] and "val_loss" in record:
            rows["validation loss"] = f"{record['val_loss']:.4f} nats a token, after step {record['step']:,}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags: [nanote, fp8]\n---\n"
        f"# {source.parent.name}\n\nTrained with nanoTE.\n\n| | |\n| --- | --- |\n{table}\n\n"
        f"Training documents begin with token {tokenizer.start}: put it before a prompt that starts one.\n\n"
        f"Options of the run:\n\n```json\n{json.dumps(config, indent=2)}\n```\n")


def print_how_to_load_adapters(folder: Path, source: Path) -> None:
    """Print the commands that load a folder of PEFT."""
    base = read_json(folder / "adapter_config.json")["base_model_name_or_path"]
    print(f"{folder}: the adapters of {source}; load them with:")
    if checkpoint.is_checkpoint(base):
        exported_base = f"{folder}-base"
        print(f"  python tools/export_hf.py {shlex.quote(base)} {shlex.quote(exported_base)}")
        base = exported_base
    print(f"  model = AutoModelForCausalLM.from_pretrained({base!r})\n"
          f"  model = PeftModel.from_pretrained(model, {str(folder)!r})")


def main(argv=None) -> None:
    config = parse(ExportConfig, argv, "tools/export_hf.py", __doc__)
    source = export(config.run, config.folder, dtype=config.dtype, moved_tokenizer=config.tokenizer,
                    model_name=config.model, fp8=config.fp8, fp8_lm_head=config.fp8_lm_head,
                    peft=config.peft)
    if config.peft:
        print_how_to_load_adapters(config.folder, source)
        return
    content = "in FP8" if config.fp8 else "with the same logits in transformers"
    package = " (pip install compressed-tensors)" if config.fp8 else ""
    print(f"{config.folder}: {source}, {content}; load it with "
          f"AutoModelForCausalLM.from_pretrained({str(config.folder)!r}){package}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    sys.exit(run_command(main, "tools/export_hf.py"))
