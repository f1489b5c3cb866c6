"""The state of a training run as tensors with names, which checkpoints store. It is the state of the model,
the optimizer, the FP8 scales and the random number generators.

- Tensors are named "model.<parameter>", "optimizer.<parameter>.exp_avg", "fp8.<module>…", "rng<rank>.torch".
  A weight that is frozen in FP8 is stored dequantized, so that every model reads it, and has a second tensor,
  "frozen.<parameter>.scale", with which it is quantized to the same bytes.
- `parts_to_write` says what each rank stores: its shard of a sharded parameter, and its share of the tensors
  that all ranks have. `load_weights`, `load_optimizer` and `set_rng_state` put the tensors back.
- A run may resume in another dtype: the float32 master of a BF16 weight is stored with the optimizer's state,
  and weights are loaded from it. A BF16 run makes masters of the weights of a float32 run.
"""
import json
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from nanote import adapters, parallel, recipes
from nanote.engine import is_frozen_in_fp8

NUMBER = ":number"  # ends the name of a number in an optimizer's state, which is stored as a 0-d tensor


# ---------------------------------------------------------------- names

def weights_of(model) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of parameters and buffers, without the FP8 state. Tied ones are there once."""
    weights = {}
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or is_fp8_state(name):
            continue
        identity = id(parallel.local_part(tensor))
        if identity not in seen:
            seen.add(identity)
            weights[name] = tensor
    return weights


def is_fp8_state(name: str) -> bool:
    """Return whether a tensor of a state dict is FP8 state, which `recipes.get_state` returns."""
    return name.endswith("._extra_state") or ".scaling_fwd." in name or ".scaling_bwd." in name


def names_of_parameters(weights: dict[str, torch.Tensor]) -> dict[int, str]:
    """Return {id of this rank's part: name}: an optimizer has the parts."""
    return {id(parallel.local_part(tensor)): name for name, tensor in weights.items()}


def parameter_name(stored_name: str) -> str:
    """Return "wte.weight" for "model.wte.weight" and "optimizer.wte.weight.exp_avg", "" for other state."""
    kind, _, rest = stored_name.partition(".")
    if kind == "model":
        return rest
    if kind == "optimizer":
        parameter, _, _ = rest.rpartition(".")
        return parameter
    return ""


def under_prefix(tensors: dict, prefix: str) -> dict:
    """Return the tensors whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


# ---------------------------------------------------------------- from a run to tensors

class StoredPart(NamedTuple):
    """What one rank writes of a tensor: all of it, or a shard."""
    name: str
    tensor: torch.Tensor
    offsets: list[int]  # index of its first value in the whole tensor


def parts_to_write(model, optimizer) -> Iterator[StoredPart]:
    """Yield what this rank writes, so that every tensor is written once and all ranks write as much.

    Parts are yielded one by one since some are temporary: a float32 master may be computed here.
    """
    own_rank = parallel.rank()
    bytes_of_ranks = [0] * parallel.world_size()  # of the tensors that all ranks have
    for name, tensor, parameter in named_tensors(model, optimizer):
        if isinstance(parameter, DTensor):
            # a small parameter has fewer shards than there are ranks
            if tensor.numel() > 0 and is_first_replica(parameter):
                yield StoredPart(name, tensor.contiguous(), shard_offsets(parameter))
            continue
        writer = bytes_of_ranks.index(min(bytes_of_ranks))
        bytes_of_ranks[writer] += tensor.nbytes
        if writer == own_rank:
            yield StoredPart(name, tensor.contiguous(), [0] * tensor.dim())
    for name, tensor in rng_state().items():  # each rank has its own
        yield StoredPart(f"rng{own_rank}.{name}", tensor, [0] * tensor.dim())


def named_tensors(model, optimizer):
    """Yield (name, tensor, parameter) of weights, optimizer state and FP8 state. The weights that the base of
    adapters has are left out.

    `parameter` is a DTensor if `tensor` is only this rank's shard, of the parameter or of a state that is
    sharded like it. Otherwise all ranks have the whole tensor.
    """
    weights = weights_of(model)
    names_of_base = adapters.names_of_base(model)
    for name, weight in weights.items():
        if name not in names_of_base:
            yield from named_tensors_of_weight(name, weight)
    names = names_of_parameters(weights)
    for local_parameter, state in optimizer.state.items():
        name = names[id(local_parameter)]
        for key, value in state.items():
            if key == "master_param" and not has_master(local_parameter):
                continue
            if key == "master_param" and value.dtype == torch.int16:
                value = join_remainder(local_parameter.detach(), value)
            if isinstance(value, int | float):
                key += NUMBER
                value = torch.from_numpy(np.array(value))
            if isinstance(value, torch.Tensor):
                is_like_parameter = value.shape == local_parameter.shape  # else a step count, never sharded
                parameter = weights[name] if is_like_parameter else None
                yield f"optimizer.{name}.{key}", value.detach(), parameter
    for name, value in recipes.get_state(model).items():
        yield f"fp8.{name}", value, None


def named_tensors_of_weight(name: str, weight):
    """Yield what `named_tensors` does of a weight."""
    part = parallel.local_part(weight)
    if not is_frozen_in_fp8(part):
        yield f"model.{name}", part.detach(), weight
        return
    yield f"model.{name}", part.dequantize(), weight
    scale = frozen_scale(part)
    if scale is not None:
        yield f"frozen.{name}.scale", scale, None


def is_first_replica(parameter: DTensor) -> bool:
    """Return whether this rank is the first of those that have the same shard (hsdp: one on each machine)."""
    coordinates = parameter.device_mesh.get_coordinate()
    for coordinate, placement in zip(coordinates, parameter.placements):
        if placement.is_replicate() and coordinate > 0:
            return False
    return True


def shard_offsets(parameter: DTensor) -> list[int]:
    """Return the index of the first value of this rank's shard in the whole parameter."""
    [chunk] = parameter.__create_chunk_list__()  # as DCP asks for it
    return list(chunk.offsets)


# ---------------------------------------------------------------- from tensors to a run

def load_weights(weights: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """Copy the stored tensors (this rank's parts) to `weights`: {name: parameter or buffer} of a model.

    A weight that has a float32 master becomes the master, rounded to the model's dtype. "model.<parameter>"
    was rounded when it was saved: to BF16, or to FP8 by version 0.2 with --fp8-param.
    """
    for name, weight in weights.items():
        source = stored.get(f"optimizer.{name}.master_param")
        if source is None:
            source = stored[f"model.{name}"]
        write_weight(weight, source, stored.get(f"frozen.{name}.scale"))


def load_optimizer(optimizer, model, stored: dict[str, torch.Tensor], stored_groups=()) -> None:
    """Restore step counts and state of an optimizer, in place.

    stored: this rank's part of each stored tensor, with all of the model's weights.
    stored_groups: the stored options of the parameter groups. Only their step counts are used, since the
    options of this run decide the rest.
    """
    for group, stored_group in zip(optimizer.param_groups, stored_groups):
        if isinstance(group.get("step"), torch.Tensor):
            group["step"].fill_(stored_group.get("step", 0))
        elif "step" in stored_group:
            group["step"] = stored_group["step"]
    names = names_of_parameters(weights_of(model))
    for part in optimizer.optimizers:
        for group in part.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                state = under_prefix(stored, f"optimizer.{name}.")
                load_parameter_state(part, parameter, state, stored[f"model.{name}"])


def load_parameter_state(optimizer: torch.optim.Optimizer, parameter, stored: dict, weight) -> None:
    """Restore the state of one parameter.

    stored: {name in its state: tensor}. weight: the parameter as it is stored.
    """
    state = optimizer.state[parameter]
    # Imported float32 weights have no state, and become the masters of a BF16 run
    becomes_master = weight.dtype == torch.float32 and has_master(parameter) and parameter.requires_grad
    has_values = bool(stored) or becomes_master
    if has_values and not state and isinstance(optimizer, recipes.te.optimizers.FusedAdam):
        optimizer.initialize_state(parameter, False)  # else it allocates in its first step
    values = dict(stored)
    if not has_master(parameter):
        values.pop("master_param", None)
    elif "master_param" in state and "master_param" not in stored:  # a float32 run has stored it
        values["master_param"] = weight.float()
    for key, value in values.items():
        current = state.get(key)
        if key.endswith(NUMBER):
            state[key.removesuffix(NUMBER)] = value.item()
        elif current is None:
            device = "cpu" if key == "step" else parameter.device  # where torch's optimizers count steps
            state[key] = value.to(device)
        elif key == "master_param" and current.dtype == torch.int16:
            rounded, remainder = split_remainder(value)
            parameter.copy_(rounded)
            current.copy_(remainder)
        else:
            current.copy_(value)


# ---------------------------------------------------------------- weights that are frozen in FP8

def frozen_scale(weight) -> torch.Tensor | None:
    """Return the scale of a frozen weight, (1,) float32. None on Transformer Engine, where BF16 values give
    it again."""
    return getattr(weight, "scale", None)


def write_weight(weight, values, scale=None) -> None:
    """Copy values, this rank's part, to a parameter or a buffer.

    scale: with which a weight that is frozen in FP8 is quantized. None: with that of the values' amax, for
        which ranks communicate if it is sharded.
    """
    part = parallel.local_part(weight)
    if not is_frozen_in_fp8(part):
        part.copy_(values)
        return
    values = values.to(part.device, part.dtype)  # a float32 master is rounded first, as for a BF16 weight
    if frozen_scale(part) is None:
        part.copy_(values)
        return
    if scale is None and isinstance(weight, DTensor):
        scale = part.scale_of(parallel.amax_over_shards(values, weight.device_mesh))
    part.copy_(values, scale=scale)


# ---------------------------------------------------------------- float32 masters

def has_master(parameter) -> bool:
    """Return whether a float32 master is trained. A float32 weight has none, though TE allocates one."""
    return parameter.dtype != torch.float32


def join_remainder(weight, remainder) -> torch.Tensor:
    """Return the float32 master of a BF16 weight and its int16 remainder (TE's `store_param_remainders`)."""
    return ((weight.view(torch.int16).int() << 16) + remainder).view(torch.float32)


def split_remainder(master) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 into (BF16, int16), from which `join_remainder` restores it bit for bit."""
    bits = master.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # the lower half, as a signed number
    upper = (bits - remainder) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), remainder


# ---------------------------------------------------------------- random number generators

def rng_state() -> dict[str, torch.Tensor]:
    """Return the state of this rank's generators: those of Python and numpy as JSON in a uint8 tensor."""
    numpy_state = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    host = json.dumps([random.getstate(), numpy_state]).encode()
    state = {"torch": torch.get_rng_state(), "host": torch.frombuffer(bytearray(host), dtype=torch.uint8)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore the result of `rng_state`."""
    python_state, numpy_state = json.loads(state["host"].numpy().tobytes())
    version, numbers, gauss = python_state
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpy_state))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
