"""--init-from: start a new run from the weights of another model, whose tensors are found by name.

What the source lacks, such as an adapter, stays as it was initialized. The optimizer starts anew, from the
source's float32 masters, and FP8 scales are taken over if every tensor was found.
"""
import re

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from nanote import checkpoint, parallel, recipes


@torch.no_grad()
def start_from(source: str, model, optimizer, tensors: dict | None = None) -> bool:
    """Copy a run's tensors, or `tensors`, to a model. Print and return whether all were found. Collective."""
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
    if not missing:  # before the weights: weights kept in FP8 are quantized with its scales
        recipes.set_state(model, checkpoint.with_prefix(tensors, "fp8."))
    parts = {key: parallel.local_part(tensor) for key, tensor in tensors.items()}
    for name, value in needed.items():
        tensor = stored.get(name, value)
        if isinstance(value, DTensor) and not isinstance(tensor, DTensor):  # each rank has all of it
            on_host = parallel.empty_on_host(value, value.shape, tensor.dtype)
            tensor = distribute_tensor(tensor, on_host.device_mesh, on_host.placements, src_data_rank=None)
        parts[f"model.{name}"] = parallel.local_part(tensor)
        if name in found:
            master = parts.get(f"optimizer.{name}.master_param", parts[f"model.{name}"])
            parallel.local_part(value).copy_(master)
    checkpoint.load_optimizer(optimizer, [], parts, weights)
    return not missing


def shortened(names) -> str:
    """Return names in a line: * for the number of a block, and no more than eight."""
    short = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return ", ".join(short[:8] + ["…"] * (len(short) > 8)) or "none"
