"""Import a folder of GPT-2, Llama, Mistral, Qwen2 or Qwen3 as a run: python tools/import_hf.py DIR out/<run>

    python train.py --resume --out-dir out/<run> --data … --fp8-recipe delayed  # continue training, in FP8
    python sample.py out/<run> --prompt "Once upon a time"

- Reads a local folder, and only its JSON files and the weights that transformers reads (model.safetensors, or
  the files that model.safetensors.index.json names): no download, no pickle (pytorch_model.bin), no code.
- The run is a checkpoint of step 0 that has only weights. Training makes float32 masters of them.
- Tensors are read and written one by one: host memory holds 1 GiB of them, or about twice the largest one
  (in BF16; three times the embedding if a tied head is stored too).
- An FP8 folder is dequantized in the dtype of its scales; tools/fp8_folders.py lists the layouts.
- The models need a vocabulary that is a multiple of 32 (50,257 → 50,304). Each new row is the mean of the
  old rows: its logit is the mean logit, which is low. tools/export_hf.py removes these rows again.
- Token files must use the model's ids. Its tokenizer is recognized as byte or a tiktoken encoding; else, or
  with a chat template, it is hf:DIR, and DIR must stay where it is.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    import nanote.quiet_imports  # a missing package or Ctrl-C prints no traceback

import dataclasses
import json
import shlex
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from nanote import checkpoint, models
from nanote.command import parse, run_command
from nanote.config import TrainConfig
from nanote.new_folder import check_new, new_folder
from nanote.tokenizers import get_tokenizer
from tools import fp8_folders, hf_weights
from tools.export_hf import token_strings
from tools.tensor_files import read_json

# {number of tokens: the tokenizer of the kit to compare a folder's tokenizer with}
BY_SIZE = {257: "byte", 50257: "gpt2", 50281: "p50k_base", 100277: "cl100k_base", 200019: "o200k_base"}
# a text for which equal tokenizers give equal ids
PROBE = "def f(x):\n\treturn  x**2  # naïve 東京 🤖\r\n\n   I'll DON'T 1234567 \u00a0\u200b ...\n"


@dataclass
class ImportConfig:
    # The Hugging Face folder: config.json, model.safetensors or its shards and index, tokenizer.json.
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    run: tyro.conf.Positional[Path]  # The run folder to create, such as out/mine.
    tokenizer: str | None = None  # Tokenizer name; None: recognized. Another one maps ids to other tokens.


def import_folder(folder, run, tokenizer: str | None = None) -> Path:
    """Create the run folder `run` with a checkpoint of step 0, and return the path of the checkpoint."""
    folder = Path(folder)
    run = Path(run)
    check_new(run)
    if checkpoint.is_checkpoint(run):
        raise ValueError(f"{run}: step-<n> is the name of a checkpoint; use another, such as out/mine")
    hf = read_config(folder)
    options = hf_weights.from_hf_config(hf, folder / "config.json")
    kit_tokenizer = get_tokenizer(tokenizer or recognize_tokenizer(folder, hf), hf.vocab_size)
    # a multiple of 32 stays; else pad as train.py does
    rows = hf.vocab_size if hf.vocab_size % 32 == 0 else models.padded_vocab_size(hf.vocab_size)
    config = TrainConfig(**options, vocab_size=rows, preset="hf", out_dir=str(run),
                         seq_len=min(1024, hf.max_position_embeddings))
    model_config = make_model_config(dataclasses.asdict(config), folder / "config.json")
    for name in ("n_kv_head", "head_dim", "n_inner"):  # the model derives those that are None
        setattr(config, name, getattr(model_config, name))
    meta = {"config": dataclasses.asdict(config), "model": models.portable_name(config.model),
            "model_config": dataclasses.asdict(model_config), "tokenizer": kit_tokenizer.name,
            "hf": {"folder": str(folder), "vocab_size": hf.vocab_size}}
    weights = padded_weights(folder, model_config, hf.vocab_size, rows)
    with new_folder(run, "name another folder", lambda names: check_new(run)) as unfinished:
        checkpoint.save_weights(unfinished, weights, meta)
        options = json.dumps(meta["config"] | {"command": shlex.join(sys.argv)}, indent=2)
        (unfinished / "config.json").write_text(options + "\n")  # for --config, as train.py writes it
    return run / "step-0"


def read_config(folder: Path):
    """Return the transformers config of the folder."""
    import transformers  # slow to import

    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; pass the local folder of a Hugging Face model")
    content = read_json(path)
    kind = content.get("model_type")
    if kind not in hf_weights.CLASSES:
        raise ValueError(f"{path}: model_type {kind!r}: nanoTE reads {', '.join(hf_weights.CLASSES)}")
    fp8_folders.read_layout(content.get("quantization_config"), path)  # before transformers fails on it
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers raises for unusual values
        raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def make_model_config(options: dict, path: Path):
    """Return the OptimizedConfig of options that were read from `path`, which a message begins with."""
    try:
        return models.make_model_config("optimized", options | {"use_fp8": False})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def recognize_tokenizer(folder: Path, hf) -> str:
    """Return the name of the folder's tokenizer for data.py.

    It is byte or a tiktoken encoding, as config.json (of export_hf.py) or BY_SIZE says, if tokens and the ids
    of PROBE are equal. Else, or with a chat template, it is hf:DIR.
    """
    theirs = get_tokenizer(f"hf:{folder}")
    vocabulary = theirs.encoding.get_vocab(with_added_tokens=True)
    name = getattr(hf, "nanote", {}).get("tokenizer") or BY_SIZE.get(len(vocabulary))
    if name and not has_chat_template(folder):
        ours = get_tokenizer(name)
        if vocabulary == token_strings(ours) and theirs.encode(PROBE) == ours.encode(PROBE):
            return name
    return theirs.name


def has_chat_template(folder: Path) -> bool:
    """Return whether the folder's tokenizer has a chat template, for sample.py --chat."""
    has_file = (folder / "chat_template.jinja").is_file()
    return has_file or "chat_template" in read_json(folder / "tokenizer_config.json")


def open_model(folder: Path, rows: int):
    """Return the StoredWeights of the folder under the optimized model's names, its embeddings padded to
    `rows`, and the fields of its architecture."""
    hf = read_config(folder)
    options = hf_weights.from_hf_config(hf, folder / "config.json") | {"vocab_size": rows}
    model_config = make_model_config(options, folder / "config.json")
    shapes = {}
    for spec in hf_weights.weight_specs(model_config, max(rows, hf.vocab_size)):
        if not hf_weights.is_dropped(spec, model_config):
            shapes[spec.name] = spec.shape

    def read() -> Iterator[checkpoint.StoredWeight]:
        for name, weight in padded_weights(folder, model_config, hf.vocab_size, rows):
            yield checkpoint.StoredWeight(name, weight, master=None)

    return checkpoint.StoredWeights(shapes, read), vars(model_config)


def padded_weights(folder: Path, model_config, vocab_size: int, rows: int) -> Iterator[tuple]:
    """Yield (name, weight) of a folder, read one at a time, in the widest type there. Embeddings get `rows`
    rows: new ones are the mean."""
    tensors = fp8_folders.open_folder(folder)
    dtype = widest_dtype(tensors, hf_weights.names_with_prefix(tensors, model_config).values())
    padding = max(0, rows - vocab_size)
    for name, weight in hf_weights.from_hf(tensors, model_config, vocab_size, folder):
        if name in ("wte.weight", "lm_head.weight") and padding > 0:
            # the float32 copies of 256 columns take little memory
            means = [columns.float().mean(0, keepdim=True) for columns in weight.split(256, dim=1)]
            mean = torch.cat(means, dim=1).to(weight.dtype)
            weight = torch.cat((weight, mean.expand(padding, -1)))
        yield name, weight.to(dtype)


def widest_dtype(tensors, names: Iterable[str]) -> torch.dtype:
    """Return float32 unless all tensors of these names are BF16."""
    dtypes = {tensors.headers[name].dtype for name in names}
    return torch.bfloat16 if dtypes == {"BF16"} else torch.float32


def main(argv=None) -> None:
    config = parse(ImportConfig, argv, "tools/import_hf.py", __doc__)
    folder = import_folder(config.folder, config.run, config.tokenizer)
    name = checkpoint.read_meta(folder)["tokenizer"].rsplit("@", 1)[0]  # hf:DIR of hf:DIR@CHECKSUM
    run = shlex.quote(str(config.run))
    tokenizer = shlex.quote(name)
    print(f"{folder}: {config.folder}, tokenizer {name}; continue with:\n"
          f"  python sample.py {run} --temperature 0")
    if name.startswith("hf:") and has_chat_template(config.folder):
        print(f"  python sample.py {run} --chat")
    print(f"  python data.py text FILE --tokenizer {tokenizer} --out-dir data/mine\n"
          f"  python train.py --resume --out-dir {run} --data data/mine --lr 1e-5 --fp8-recipe delayed")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    sys.exit(run_command(main, "tools/import_hf.py"))
