"""Import a Hugging Face GPT-2, Llama or Qwen3 folder as a run: python tools/import_hf.py DIR out/<run>

    python train.py --resume --out-dir out/<run> --data … --fp8-recipe delayed  # continue training, in FP8
    python sample.py out/<run> --prompt "Once upon a time"

- Reads a local folder, and only its JSON files and the weights that transformers reads (model.safetensors, or
  the files that model.safetensors.index.json names): no download, no pickle (pytorch_model.bin), no code.
- The run is a checkpoint of step 0 with a new optimizer. Its float32 master weights are the values of the
  folder, so nothing is lost if training rounds the weights to BF16 or FP8.
- FP8 needs a vocabulary that is a multiple of 32 (50,257 → 50,304). Rows of zeros would have logit 0, the
  highest of all where the others are negative. Each new row is the mean of the old rows: its logit is the
  mean of theirs, which is at most the logarithm of their mean exponential (Jensen), so the new tokens start
  with a probability of at most padding / vocabulary of the others'. tools/export_hf.py removes these rows
  again.
- Token files must use the ids of the model. Its tokenizer is byte or a tiktoken encoding, recognized by its
  tokens, or hf:DIR: the folder's own tokenizer.json, which must stay where it is (any with a chat template).
  `--tokenizer NAME` imports the weights and assigns new meanings to the ids.
"""
import dataclasses
import functools
import os
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanote import checkpoint, cli, json_files, models
from nanote.config import TrainConfig, padded_vocab_size
from nanote.dataset import get_tokenizer, without_checksum
from tools import hf_weights
from tools.export_hf import token_strings

# {number of tokens: the tokenizer of nanote.dataset to compare a folder's tokenizer with}
BY_SIZE = {257: "byte", 50257: "gpt2", 50281: "p50k_base", 100277: "cl100k_base", 200019: "o200k_base"}
# a text for which equal tokenizers give equal ids
PROBE = "def f(x):\n\treturn  x**2  # naïve 東京 🤖\r\n\n   I'll DON'T 1234567 \u00a0\u200b ...\n"

COPY = "copy the file again from where the model came from"
ROPE = (type(None), {"rope_type?": str, "rope_theta?": float, "partial_rotary_factor?": float})
HF_CONFIG = {  # fields of config.json that are passed to transformers; it expands some others without limit
    "model_type": str, "nanote?": {"tokenizer?": str, "bias?": bool}, "rope_parameters?": ROPE,
    "rope_scaling?": ROPE, "quantization_config?": (type(None), dict), "tokenizer_class?": str | None}
for names, kind in {
        "n_layer num_hidden_layers": range(1, 2**16),  # transformers builds a list of this length
        "vocab_size n_positions n_embd n_head max_position_embeddings hidden_size": json_files.SIZE,
        "num_attention_heads intermediate_size": json_files.SIZE,
        "n_inner num_key_value_heads head_dim": (type(None), json_files.SIZE),
        "layer_norm_epsilon rms_norm_eps": json_files.between(0, 1),
        "rope_theta partial_rotary_factor": float,
        "activation_function hidden_act": str,
        "tie_word_embeddings attention_bias mlp_bias use_sliding_window": bool,
        "scale_attn_weights scale_attn_by_inverse_layer_idx add_cross_attention": bool}.items():
    HF_CONFIG |= {f"{name}?": kind for name in names.split()}


@dataclass
class ImportConfig:
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The Hugging Face folder: config.json, model.safetensors or its shards and index, tokenizer.json."""
    run: tyro.conf.Positional[Path]
    """The run folder to create, such as out/mine."""
    tokenizer: str | None = None
    """Name of the folder's tokenizer for data.py; recognized by default, and hf:DIR where data.py has no name
    for it. Another one gives the token ids new meanings."""


def read_config(folder: Path):
    """Return the transformers config of the folder. Raises ValueError if there is no usable one."""
    import transformers  # slow to import

    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder}: no config.json; pass the local folder of a Hugging Face model (nothing is downloaded)"
        )
    for path in folder.iterdir():
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"{path}: not a regular file, or a link to nothing; remove it or copy the model "
                             "again")
    path = folder / "config.json"
    fields = json_files.read(path, HF_CONFIG, COPY)
    if fields["model_type"] not in hf_weights.CLASSES:
        raise ValueError(f"{path}: model_type {fields['model_type']!r}: nanoTE reads "
                         f"{', '.join(hf_weights.CLASSES)}")
    known = {name.removesuffix("?") for name in HF_CONFIG}
    try:
        return transformers.AutoConfig.for_model(**{name: fields[name] for name in known & set(fields)})
    except Exception as error:  # whatever transformers raises for unusual values
        raise ValueError(f"{path}: {json_files.reason(error)}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads: model.safetensors, else those that its index names."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if path.is_file():
        return [path]
    if index.is_file():
        fields = json_files.read(index, {"weight_map": dict[str, str]}, COPY)
        names = sorted(set(fields["weight_map"].values()))
        for name in names:
            if (folder / name).parent != folder or not (folder / name).is_file():
                raise ValueError(f"{index}: names {name}, which is no file in this folder; copy it from "
                                 "where the model came from")
        return [folder / name for name in names]
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        raise ValueError(
            f"{folder}: {pickles[0].name} is a pickle, which can run code when it is read; convert it where "
            "you trust it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) writes "
            "safetensors"
        )
    raise ValueError(f"{folder}: no model.safetensors, and no {index.name} that names its parts; copy them "
                     "from where the model came from")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the folder's weight files; float16 as float32, which is exact.

    Raises ValueError if a file cannot be read.
    """
    from safetensors.torch import load_file

    tensors, origin = {}, {}
    for path in weight_files(folder):
        try:
            found = load_file(path)
        except OSError:
            raise
        except Exception as error:  # whatever safetensors raises for a damaged header
            raise ValueError(f"{path}: cannot be read ({json_files.reason(error)}); copy it again") from error
        for name, tensor in found.items():
            if name in tensors:
                raise ValueError(f"{folder}: tensor {name} is in {origin[name].name} and in {path.name}; "
                                 "keep one copy of the weights")
            tensors[name], origin[name] = tensor.float() if tensor.dtype == torch.float16 else tensor, path
    return tensors


def recognize_tokenizer(folder: Path, hint: str | None, hf=None) -> str:
    """Return data.py's name for the folder's tokenizer.

    This is `hint`, or the tokenizer of BY_SIZE, if it has the same tokens and encodes PROBE to the same ids;
    else hf:DIR, the folder's own tokenizer.json. With a chat template it is always hf:DIR, if there is that
    file: the tokenizers of data.py have no template.

    Args:
        hint: the name that tools/export_hf.py left in config.json, or None.
        hf: result of read_config(folder).

    Raises:
        ValueError: the tokenizer cannot be read, or data.py has no name for it.
    """
    import transformers  # slow to import

    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, config=hf, local_files_only=True,
                                                            trust_remote_code=False)
        vocabulary, ids = theirs.get_vocab(), theirs(PROBE, add_special_tokens=False, verbose=False).input_ids
    except Exception as error:  # whatever transformers raises for damaged files
        raise ValueError(f"{folder}: its tokenizer cannot be read ({json_files.reason(error)}); "
                         "name the one it was trained with: --tokenizer byte, gpt2 …") from error
    has_file = (folder / "tokenizer.json").is_file()
    name = BY_SIZE.get(len(vocabulary))
    if hint and not hint.startswith("hf:"):  # hf: would be a path on another machine
        name = hint
    if name and not (has_file and theirs.chat_template):
        ours = get_tokenizer(name)
        if vocabulary == token_strings(ours) and ids == ours.encode(PROBE):
            return name
    if has_file:
        return get_tokenizer(f"hf:{folder}").name
    raise ValueError(
        f"{folder}: its tokenizer ({len(vocabulary):,} tokens) is none that data.py has (byte, gpt2, "
        "cl100k_base …), and there is no tokenizer.json; --tokenizer byte imports the weights anyway and "
        "trains them on bytes"
    )


def has_chat_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    in_config = config.is_file() and b'"chat_template"' in config.read_bytes()
    return in_config or (folder / "chat_template.jinja").is_file()


def pad_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Extend weight (V, n_embd) to `rows` rows; each new row is the mean of the old ones."""
    mean = weight.float().mean(0, keepdim=True).to(weight.dtype)
    return torch.cat((weight, mean.expand(rows - len(weight), -1)))


def import_(folder, run, tokenizer: str | None = None) -> Path:
    """Create the run folder `run` with a checkpoint of step 0, and return the path of the checkpoint.

    Raises ValueError or OSError, in one line and with nothing written, if either folder is invalid.
    """
    folder, run = Path(folder), Path(run)
    if os.path.lexists(run):
        raise ValueError(f"{run} exists; name another folder for the run")
    if checkpoint.is_step_name(run.name):
        raise ValueError(f"{run}: step-<n> is the name of a checkpoint; use another, such as out/mine")
    hf = read_config(folder)
    try:
        options = hf_weights.from_hf_config(hf)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    hint = getattr(hf, "nanote", {}).get("tokenizer")
    known = get_tokenizer(tokenizer or recognize_tokenizer(folder, hint, hf))
    if hf.vocab_size < known.vocab_size:
        raise ValueError(f"{folder}: {hf.vocab_size:,} rows of the embedding, but the tokenizer {known.name} "
                         f"has {known.vocab_size:,} tokens")
    config, model_config = make_configs(options, hf, run)
    try:
        model = build_imported(folder, config, model_config, hf.vocab_size)
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(folder)) else f"{folder}: {message}") from error
    meta = {
        "config": dataclasses.asdict(config), "model": config.model,
        "model_config": dataclasses.asdict(model_config), "tokenizer": known.name,
        "hf": {"folder": str(folder), "vocab_size": hf.vocab_size},
    }
    return write_run(run, model, meta)


def make_configs(options: dict, hf, run: Path):
    """Return the run's TrainConfig and its OptimizedConfig, with a vocabulary padded for FP8."""
    rows = hf.vocab_size if hf.vocab_size % 32 == 0 else padded_vocab_size(hf.vocab_size)
    config = TrainConfig(
        **options | {"vocab_size": rows}, preset="hf", out_dir=str(run),
        seq_len=min(1024, hf.max_position_embeddings),
    )
    model_config = models.make_model_config("optimized", dataclasses.asdict(config) | {"use_fp8": False})
    # the sizes that the model derives where they are None
    sizes = {name: getattr(model_config, name) for name in ("n_kv_head", "head_dim", "n_inner")}
    return dataclasses.replace(config, **sizes), model_config


def write_run(run: Path, model, meta: dict) -> Path:
    """Write the run folder with a checkpoint of step 0, all or nothing; return the path of the checkpoint."""
    unfinished = run.with_name(f".importing-{run.name}-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        saved = checkpoint.save(unfinished, 0, model=model, optimizer=new_optimizer(model), meta=meta, keep=1)
        os.rename(unfinished, run)
    except OSError as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or error
        raise OSError(f"{run} not written: {reason}; nothing is kept; free some space or name another folder "
                      "for the run") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return run / saved.name


def build_imported(folder: Path, config, model_config, vocab_size: int):
    """Build the optimized model with the weights of the folder."""
    weights = hf_weights.from_hf(read_tensors(folder), model_config, vocab_size)
    for embedding in {"wte.weight", "lm_head.weight"} & set(weights):
        weights[embedding] = pad_rows(weights[embedding], config.vocab_size)
    dtype = functools.reduce(torch.promote_types, {weight.dtype for weight in weights.values()})
    # the checkpoint stores the state of the random generator: the same for every import
    torch.manual_seed(config.seed)
    model = models.build_model(config.model, model_config, dtype=dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(weights[key])
    return model


def new_optimizer(model):
    """Return an AdamW with the state that the trainer's optimizer has before the first step."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {name: torch.zeros(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = moments | {"master_param": parameter.detach().float().clone()}
    return optimizer


def main(argv=None) -> None:
    config = cli.parse(ImportConfig, argv, prog="tools/import_hf.py", description=__doc__)
    folder = import_(config.folder, config.run, config.tokenizer)
    name = without_checksum(checkpoint.read_meta(folder)["tokenizer"])
    run, tokenizer = shlex.quote(str(config.run)), shlex.quote(name)
    lines = [
        f"{folder}: {config.folder}, tokenizer {name}; continue with:",
        f"  python sample.py {run} --temperature 0",
        f"  python data.py text FILE --tokenizer {tokenizer} --out-dir data/mine",
        f"  python train.py --resume --out-dir {run} --data data/mine --lr 1e-5 --fp8-recipe delayed",
    ]
    if name.startswith("hf:") and has_chat_template(config.folder):
        lines.insert(2, f"  python sample.py {run} --chat")
    print("\n".join(lines))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left behind
    sys.exit(cli.run(main, "tools/import_hf.py"))
