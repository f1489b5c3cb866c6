"""--init-from: start a new run from the weights of another model, whose tensors are found by name.

What the source lacks, such as an adapter, stays as it was initialized. The optimizer starts anew, from the
source's float32 masters, and FP8 scales are taken over if both have the same tensors.
"""
import re

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from nanote import checkpoint, parallel, recipes


@torch.no_grad()
def start_from(source: str, model, optimizer, tensors: dict | None = None) -> bool:
    """Copy a run's tensors, or `tensors`, to a model. Print what was found, and return whether both
    have the same tensors. Collective."""
    weights = checkpoint.weights_of(model)
    needed = dict(weights.values())
    if tensors is None:
        folder, masters = checkpoint.find(source), (f"optimizer.{name}.master_param" for name in needed)
        parallel.on_rank0(lambda: checkpoint.verify(folder))
        tensors = checkpoint.read_tensors(folder, ("model.", "fp8.", *masters), needed)
    stored = checkpoint.with_prefix(tensors, "model.")
    found, missing = needed.keys() & stored.keys(), needed.keys() - stored.keys()
    if not found:
        raise ValueError(f"--init-from {source}: none of its tensors ({shortened(stored)}) is in the model "
                         f"({shortened(needed)}); name a model of the same file")
    for name in sorted(found):
        there, here = tuple(stored[name].shape), tuple(needed[name].shape)
        if there != here:
            raise ValueError(f"--init-from {source}: {name} is {there} there and {here} in the model; pass "
                             "the source's sizes, as in its config.json")
    unused = stored.keys() - needed.keys()
    if parallel.rank() == 0:
        print(f"--init-from {source}: {len(found)} tensors found: {shortened(found)}\n"
              f"  {len(missing)} of the model not found, so as initialized: {shortened(missing)}\n"
              f"  {len(unused)} of the source not used: {shortened(unused)}")
    if not missing and not unused:
        recipes.set_state(model, checkpoint.with_prefix(tensors, "fp8."))
    parts = {key: parallel.local_part(tensor) for key, tensor in tensors.items()}
    for name, value in needed.items():
        tensor = stored.get(name, value)
        if isinstance(value, DTensor) and not isinstance(tensor, DTensor):  # each rank has all of it
            on_host = parallel.empty_on_host(value, value.shape, tensor.dtype)
            tensor = distribute_tensor(tensor, on_host.device_mesh, on_host.placements, src_data_rank=None)
        parts[f"model.{name}"] = parallel.local_part(tensor)
        if name in found:
            key = f"optimizer.{name}.master_param"
            if value.dtype != torch.float32:  # the source's own bits, before they are rounded
                parts.setdefault(key, parts[f"model.{name}"].float())
            parallel.local_part(value).copy_(parts.get(key, parts[f"model.{name}"]))
    checkpoint.load_optimizer(optimizer, [], parts, weights)
    return not missing and not unused


def check_tokenizer(source: str, data: str) -> None:
    """Raise ValueError if the tokenizer.json of the Hugging Face folder `source` encodes the first text of
    token files to other ids than the tokenizer that made them. Both must be readable, or nothing is said."""
    from nanote import tokenizers, tokens  # another run needs no tokenizer
    ids, meta = tokens.open_tokens(data, "val", verify=False)
    try:
        theirs, ours = map(tokenizers.get_tokenizer, (f"hf:{source}", meta["tokenizer"]))
    except (ValueError, ImportError):  # moved, not byte-level, not installed, or cannot be downloaded
        return
    text = ours.decode(ids[:1000])
    if theirs.encode(text) != ours.encode(text):
        raise ValueError(f"--init-from {source}: its tokenizer.json has other ids than --data {data}, made "
                         f"with {ours.name}; make the data with data.py --tokenizer hf:{source}")


def print_differences(source: str, ours: dict, theirs: dict) -> None:
    """Print the fields of two model configs in which tensors of equal shapes compute something else."""
    for name in ("n_head", "n_kv_head", "head_dim", "activation", "use_rmsnorm", "use_qk_norm", "use_rotary",
                 "rope_theta", "layernorm_epsilon"):
        if parallel.rank() == 0 and name in ours and ours[name] != theirs.get(name, ours[name]):
            print(f"--init-from {source}: {name} is {theirs[name]} there and {ours[name]} in the model")


def shortened(names) -> str:
    """Return names in a line: * for the number of a block, and no more than eight."""
    short = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return ", ".join(short[:8] + ["…"] * (len(short) > 8)) or "none"
