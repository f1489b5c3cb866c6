"""Import a Hugging Face GPT-2, Llama or Qwen3 folder as a run: python tools/import_hf.py DIR out/<run>

    python train.py --resume --out-dir out/<run> --data … --fp8-recipe delayed  # continue training, in FP8
    python sample.py out/<run> --prompt "Once upon a time"

- Reads a local folder, and only its JSON files and the weights that transformers reads (model.safetensors, or
  the files that model.safetensors.index.json names): no download, no pickle (pytorch_model.bin), no code.
- The run is a checkpoint of step 0. Its float32 master weights are the values of the folder.
- FP8 needs a vocabulary that is a multiple of 32 (50,257 → 50,304). Each new row is the mean of the old rows:
  its logit is the mean logit, which is low. tools/export_hf.py removes these rows again.
- Token files must use the ids of the model. Its tokenizer.json is that of byte or a tiktoken encoding,
  recognized by its tokens, or hf:DIR, which must stay where it is (any with a chat template).
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    import nanote.quiet_interrupt  # Ctrl-C while importing prints no traceback

import dataclasses
import functools
import shlex
import signal
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from nanote import checkpoint, models, optimizers
from nanote.command import error_line, parse, run_command
from nanote.config import TrainConfig
from nanote.new_folder import check_new, new_folder
from nanote.tokenizers import get_tokenizer
from tools import hf_weights
from tools.export_hf import token_strings
from tools.hf_weights import read_json

# {number of tokens: the tokenizer of the kit to compare a folder's tokenizer with}
BY_SIZE = {257: "byte", 50257: "gpt2", 50281: "p50k_base", 100277: "cl100k_base", 200019: "o200k_base"}
# a text for which equal tokenizers give equal ids
PROBE = "def f(x):\n\treturn  x**2  # naïve 東京 🤖\r\n\n   I'll DON'T 1234567 \u00a0\u200b ...\n"


@dataclass
class ImportConfig:
    # The Hugging Face folder: config.json, model.safetensors or its shards and index, tokenizer.json.
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    run: tyro.conf.Positional[Path]  # The run folder to create, such as out/mine.
    tokenizer: str | None = None  # Its name for data.py; None: recognized. Another gives ids new meanings.


def import_folder(folder, run, tokenizer: str | None = None) -> Path:
    """Create the run folder `run` with a checkpoint of step 0, and return the path of the checkpoint."""
    folder = Path(folder)
    run = Path(run)
    check_new(run)
    if checkpoint.step_of(run) is not None:
        raise ValueError(f"{run}: step-<n> is the name of a checkpoint; use another, such as out/mine")
    hf = read_config(folder)
    options = hf_weights.from_hf_config(hf, folder / "config.json")
    known = get_tokenizer(tokenizer or recognize_tokenizer(folder, hf), hf.vocab_size)
    rows = hf.vocab_size if hf.vocab_size % 32 == 0 else models.padded_vocab_size(hf.vocab_size)
    config = TrainConfig(**options, vocab_size=rows, preset="hf", out_dir=str(run),
                         seq_len=min(1024, hf.max_position_embeddings))
    model_config = models.make_model_config("optimized", dataclasses.asdict(config) | {"use_fp8": False})
    for name in ("n_kv_head", "head_dim", "n_inner"):  # the model derives those that are None
        setattr(config, name, getattr(model_config, name))
    model = build_imported(folder, config, model_config, hf.vocab_size)
    meta = {"config": dataclasses.asdict(config), "model": models.portable_name(config.model),
            "model_config": dataclasses.asdict(model_config), "tokenizer": known.name,
            "hf": {"folder": str(folder), "vocab_size": hf.vocab_size}}
    adamw = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        zeros = torch.zeros(parameter.shape)
        adamw.state[parameter] = {
            "exp_avg": zeros, "exp_avg_sq": zeros, "master_param": parameter.detach().float()}
    with new_folder(run, "name another folder", lambda names: check_new(run)) as unfinished:
        with checkpoint.Checkpoints(unfinished, keep=1) as checkpoints:
            checkpoints.save(0, model, optimizers.Optimizer(model, adamw), meta)
    return run / "step-0"


def read_config(folder: Path):
    """Return the transformers config of the folder."""
    import transformers  # slow to import

    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no config.json; pass the local folder of a Hugging Face model")
    kind = read_json(path).get("model_type")
    if kind not in hf_weights.CLASSES:
        raise ValueError(f"{path}: model_type {kind!r}: nanoTE reads {', '.join(hf_weights.CLASSES)}")
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers raises for unusual values
        raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def recognize_tokenizer(folder: Path, hf) -> str:
    """Return data.py's name for the folder's tokenizer.json: the one in config.json (of export_hf.py) or
    BY_SIZE, if it has the same tokens and ids of PROBE; else, and with a chat template, hf:DIR."""
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


def read_model(folder: Path, rows: int):
    """Return the weights of the folder under the optimized model's names, its embeddings padded to `rows`,
    and the fields of its architecture."""
    hf = read_config(folder)
    options = hf_weights.from_hf_config(hf, folder / "config.json") | {"vocab_size": rows}
    model_config = models.make_model_config("optimized", options | {"use_fp8": False})
    return padded_weights(folder, model_config, hf.vocab_size, rows), vars(model_config)


def padded_weights(folder: Path, model_config, vocab_size: int, rows: int) -> dict[str, torch.Tensor]:
    """Return the weights of the folder, with embeddings of `rows` rows: new ones are the mean."""
    weights = hf_weights.from_hf(read_safetensors(folder), model_config, vocab_size, folder)
    padding = max(0, rows - vocab_size)
    for name in ("wte.weight", "lm_head.weight"):
        if name in weights:
            weight = weights[name]
            mean = weight.float().mean(0, keepdim=True).to(weight.dtype)
            weights[name] = torch.cat((weight, mean.expand(padding, -1)))
    return weights


def build_imported(folder: Path, config, model_config, vocab_size: int):
    """Build the optimized model with the weights of the folder, in their widest dtype."""
    weights = padded_weights(folder, model_config, vocab_size, config.vocab_size)
    dtype = functools.reduce(torch.promote_types, {weight.dtype for weight in weights.values()})
    # the checkpoint stores the state of the random generator: the same for every import
    torch.manual_seed(config.seed)
    model = models.instantiate(config.model, model_config, dtype=dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(weights[key])
    return model


def read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the files that transformers reads; float16 as float32, which is exact."""
    from safetensors.torch import load_file

    if (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        index = read_json(folder / "model.safetensors.index.json")
        names = sorted(set(index.get("weight_map", {}).values()))
    if not names:
        raise ValueError(f"{folder}: no model.safetensors; a pickle (*.bin) is not read, since it can run "
                         "code: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) converts it")
    tensors = {}
    for name in names:
        try:
            tensors |= load_file(folder / Path(name).name)
        except Exception as error:  # whatever safetensors raises for a damaged header
            raise ValueError(f"{folder / name}: not readable ({error_line(error)}); copy it again") from error
    return {name: tensor.float() if tensor.dtype == torch.float16 else tensor
            for name, tensor in tensors.items()}


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
