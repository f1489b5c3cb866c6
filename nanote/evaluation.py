"""The validation loss of a model. An evaluation leaves the FP8 state, and so the next step, as they were."""
from contextlib import nullcontext

import torch

from nanote import logs, parallel, recipes


@torch.no_grad()
def evaluate(model, val_loader, tokens: int, is_compiled: bool = False) -> float:
    """Return the mean validation loss in nats per token, over `tokens` tokens of all ranks. Collective."""
    nats_and_labels = torch.zeros(2, dtype=torch.float64, device=val_loader.device)
    # Without gradients and in evaluation mode, torch.compile would compile the model a second time.
    uncompiled = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    model.eval()
    with recipes.preserved_state(model), uncompiled:
        for inputs, label_count in val_loader.evaluation(tokens):
            loss = model(*inputs)
            if label_count > 0:  # the mean over no label may be NaN
                nats_and_labels[0] += loss.double() * label_count
                nats_and_labels[1] += label_count
    model.train()
    nats, labels = parallel.sum_over_ranks(nats_and_labels).tolist()
    if labels == 0:
        raise ValueError(f"--eval-tokens {tokens}: no answer is among these tokens; pass more")
    return nats / labels


def validate(model, val_loader, tokens: int, is_compiled: bool, without_fp8: bool) -> dict:
    """Return the fields of metrics.jsonl that an evaluation gives. without_fp8: evaluate without FP8, too."""
    val_loss = evaluate(model, val_loader, tokens, is_compiled)
    others = {}
    if without_fp8 and recipes.uses_fp8(model):
        with recipes.turned_off(model):
            others["val_loss_without_fp8"] = evaluate(model, val_loader, tokens, is_compiled)
    return logs.val_record(val_loss, val_loader.meta) | others


def print_val_loss(config, model, val_loader, source) -> None:
    """Evaluate and print the loss of the checkpoint `source`, whose weights the model has."""
    val_loss = evaluate(model, val_loader, config.eval_tokens, config.compile)
    if parallel.rank() == 0:
        print(f"{source} on {config.data}: {logs.describe_val_loss(val_loss, val_loader.meta)}")
