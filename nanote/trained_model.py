"""Load what a run has saved: its model, for use without training, and its tokenizer."""
import torch

from nanote import checkpoint, models, own_model
from nanote.config import is_model_file
from nanote.tokenizers import get_tokenizer, same_tokenizer


def load_run(folder, meta, model_name=None, device="cpu", dtype=torch.float32,
             open_hf_folder=None):
    """Return the model of a checkpoint, with FP8 off.

    Args:
        meta: the checkpoint's meta.json.
        model_name: the --model option, path/to/file.py:Class of your own model or the checkpoint's name.
        open_hf_folder: see `checkpoint.load`.
    """
    if model_name is not None and is_model_file(model_name):
        own_model.load_file(model_name)
    elif model_name is not None and models.portable_name(model_name) != models.portable_name(meta["model"]):
        models.model_classes(model_name)  # ValueError for an unknown name
        raise ValueError(f"--model {model_name}: {folder} has {meta['model']}; leave it out, or pass that")
    name = models.portable_name(model_name or meta["model"])
    config = models.make_model_config(name, meta["model_config"] | {"use_fp8": False})
    model = models.instantiate(name, config, device=device, dtype=dtype).eval()
    checkpoint.load(folder, model, open_hf_folder=open_hf_folder)
    return model


def load_tokenizer(meta, moved_to=None):
    """Return the tokenizer of a checkpoint's meta.json. moved_to: "hf:" and the folder where it is now."""
    vocab_size = meta["model_config"]["vocab_size"]
    vocab_size = meta.get("hf", {}).get("vocab_size", vocab_size)
    tokenizer = get_tokenizer(moved_to or meta["tokenizer"], vocab_size)
    if not same_tokenizer(tokenizer.name, meta["tokenizer"]):
        raise ValueError(f"--tokenizer {moved_to}: the model was trained with {meta['tokenizer']}; name a "
                         "folder with the same tokenizer.json")
    return tokenizer
