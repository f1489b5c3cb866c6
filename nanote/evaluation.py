"""The validation loss of a model. An evaluation leaves the FP8 state, and so the next step, as they were."""
import math
from contextlib import nullcontext

import torch

from nanote import checkpoint, parallel, recipes
from nanote.meter import Diverged


@torch.no_grad()
def validation_loss(config, model, val_loader) -> float:
    """Return the mean validation loss in nats per token, over --eval-tokens tokens. Collective."""
    nats_and_labels = torch.zeros(2, dtype=torch.float64, device=val_loader.device)
    # Without gradients and in evaluation mode, torch.compile would compile the model a second time.
    uncompiled = torch.compiler.set_stance("force_eager") if config.compile else nullcontext()
    model.eval()
    parallel.reshard(model)  # else FSDP2 may read weights that it gathered before the last step
    with recipes.preserved_state(model), uncompiled:
        for inputs, label_count in val_loader.evaluation(config.eval_tokens):
            loss = model(*inputs)
            if label_count > 0:  # the mean over no label may be NaN
                nats_and_labels[0] += loss.double() * label_count
                nats_and_labels[1] += label_count
    model.train()
    nats, labels = parallel.sum_over_ranks(nats_and_labels).tolist()
    if labels == 0:
        raise ValueError(f"--eval-tokens {config.eval_tokens}: no answer is among these tokens; pass more")
    return nats / labels


def validate(config, model, val_loader, step: int) -> dict:
    """Evaluate after `step`, and return the fields of metrics.jsonl. After the last step
    evaluate without FP8, too. Raise Diverged for a loss that is not finite."""
    val_loss = validation_loss(config, model, val_loader)
    if not math.isfinite(val_loss):
        raise Diverged(f"step {step}: validation loss {val_loss}")
    record = val_record(val_loss, val_loader.meta)
    if step == config.max_steps and recipes.uses_fp8(model):
        with recipes.turned_off(model):
            record["val_loss_without_fp8"] = validation_loss(config, model, val_loader)
    return record


def evaluate_checkpoint(config, model, optimizer, val_loader, source, open_hf_folder) -> None:
    """Load the checkpoint `source`, and print its validation loss. open_hf_folder: see `checkpoint.load`."""
    # with the optimizer's float32 masters and the FP8 scales
    checkpoint.load(source, model, optimizer, open_hf_folder)
    val_loss = validation_loss(config, model, val_loader)
    if parallel.rank() == 0:
        print(f"{source} on {config.data}: {describe_val_loss(val_loss, val_loader.meta)}")


def val_record(val_loss: float, meta: dict) -> dict:
    """Return the fields of metrics.jsonl: nats per token and, if meta.json counts them, bits per byte."""
    record = {"val_loss": val_loss}
    if meta.get("val_bytes") and "val_mask_sha256" not in meta:  # the loss is that of all bytes
        record["val_bits_per_byte"] = val_loss * meta["val_tokens"] / meta["val_bytes"] / math.log(2)
    return record


def describe_val_loss(val_loss: float, meta: dict) -> str:
    """Return a validation loss with its unit and, if meta.json counts bytes, bits per byte."""
    unit = "nats a byte" if meta["tokenizer"] == "byte" else f"nats a token ({meta['tokenizer']})"
    line = f"validation loss {val_loss:.4f} {unit}"
    record = val_record(val_loss, meta)
    if "val_bits_per_byte" in record:
        line += f", {record['val_bits_per_byte']:.4f} bits a byte"
    return line
