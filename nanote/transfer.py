"""--init-from: start a new run from the weights of another model, whose tensors are found by name.

What the source lacks, such as an adapter, stays as it was initialized. The optimizer starts anew, from the
source's float32 masters, and FP8 scales are taken over if both have the same tensors and modules.
"""
import itertools
from pathlib import Path

import torch

from nanote import adapters, checkpoint, parallel, recipes
from nanote.checkpoint import StoredWeights
from nanote.tokens import check_tokenizer
from nanote.training_state import (
    load_optimizer,
    names_of_parameters,
    under_prefix,
    weights_of,
    write_weight,
)


def is_run(source: str) -> bool:
    """Return whether a folder is a checkpoint, or that of a run that has one."""
    return checkpoint.is_checkpoint(source) or checkpoint.latest(source) is not None


def start_from_run(config, model, optimizer, tokenizer: str, open_hf_folder=None) -> dict:
    """Copy the weights of the run that --init-from names to a new run's model. Return its meta.json if its
    FP8 scales were copied too, else {}. Collective.

    tokenizer: the name of the tokenizer of --data. open_hf_folder: see `checkpoint.load`.
    """
    folder = checkpoint.find(config.init_from)
    meta = checkpoint.read_meta(folder)
    check_tokenizer(config.data, tokenizer, meta["tokenizer"])
    weights = weights_of(model)
    parallel.on_rank0(lambda: checkpoint.verify(folder))
    stored = checkpoint.open_weights(folder, like=weights)
    base = parallel.on_rank0(lambda: adapters.find_base(folder, meta))
    names_in_base = stored.shapes.keys()
    base_sha256 = None
    if base is not None:  # the run has adapters of it
        stored_base = checkpoint.open_base(base, weights, open_hf_folder)
        names_in_base = stored_base.shapes.keys() - stored.shapes.keys()
        base_sha256 = meta["base"]["sha256"]  # `find_base` has compared it
        stored = with_base(stored_base, stored)
    has_same_tensors = start_from_weights(
        config, model, optimizer, stored, meta["model_config"], base or folder, names_in_base,
        base_sha256)
    if not has_same_tensors:
        return {}
    fp8_state = under_prefix(checkpoint.read_tensors(folder, ("fp8.",)), "fp8.")
    if recipes.find_missing_module(model, fp8_state):
        return {}  # another model file splits the same tensors between other modules
    recipes.set_state(model, fp8_state)
    return meta


def with_base(base: StoredWeights, adapters_alone: StoredWeights) -> StoredWeights:
    """Return the weights of a base and of its adapters."""
    def read():
        return itertools.chain(base.read(), adapters_alone.read())

    return StoredWeights(base.shapes | adapters_alone.shapes, read)


@torch.no_grad()
def start_from_weights(config, model, optimizer, stored: StoredWeights, source_config: dict,
                       base: Path, names_in_base=None, base_sha256=None) -> bool:
    """Copy the weights of --init-from to a new run's model, one at a time. Print which were found, and return
    whether the source and the model have the same tensor names. Collective.

    source_config: the fields of the config of the source's model.
    base: the folder of the weights, which a run of adapters does not store again.
    names_in_base: names of the weights stored in `base`; None: all.
    base_sha256: its `checksum_of_weights`, which reads all its files; None: not known.
    """
    source = config.init_from
    weights = weights_of(model)
    print_differences(source, model.config, source_config)
    check_tensor_shapes(source, stored.shapes, weights)
    if parallel.rank() == 0:
        print_found(source, stored.shapes, weights)
    trained = copy_weights(stored, weights, optimizer)
    load_optimizer(optimizer, model, trained)
    if adapters.trains_only_adapters(model):
        if names_in_base is None:
            names_in_base = stored.shapes.keys()
        remember_base(model, weights, base, names_in_base, base_sha256)
    return stored.shapes.keys() == weights.keys()


def copy_weights(stored: StoredWeights, weights: dict, optimizer) -> dict[str, torch.Tensor]:
    """Copy stored weights to those of a model. Return the values and float32 masters of the weights that the
    optimizer trains, under the names that `load_optimizer` takes.

    weights: {name: tensor} of the model.
    """
    parameter_names = names_of_parameters(weights)  # {id of a parameter: its name}
    trained_names = set()
    for group in optimizer.param_groups:
        trained_names |= {parameter_names[id(p)] for p in group["params"]}
    trained = {}
    for name in trained_names:
        trained[f"model.{name}"] = parallel.local_part(weights[name])  # as initialized, if it is not found
    for name, value, master in stored.read():
        if name not in weights:
            continue
        weight = weights[name]
        value = parallel.local_part(parallel.sharded_like(weight, value))
        if master is not None:
            master = parallel.local_part(master)
        if name in trained_names:
            trained[f"model.{name}"] = value
            if master is None and weight.dtype != torch.float32:
                master = value.float()  # the source's bits, not rounded
            if master is not None:
                trained[f"optimizer.{name}.master_param"] = master
        write_weight(weight, value if master is None else master)
    return trained


def remember_base(model, weights: dict, base: Path, names_in_base, base_sha256) -> None:
    """Set `base_of_adapters` of a model that trains only adapters. Print that its run needs the base.
    Collective.

    weights: {name: tensor} of the model. names_in_base, base_sha256: see `start_from_weights`.
    """
    if base_sha256 is None:
        base_sha256 = parallel.on_rank0(lambda: adapters.checksum_of_weights(base))
    frozen = {name for name, tensor in weights.items()
              if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad}
    # of a sharded frozen weight the dtype of its values, not of its bytes
    dtype = parallel.local_part(next(model.parameters())).dtype
    model.base_of_adapters = adapters.Base(
        base, base_sha256, frozenset(frozen & names_in_base), dtype)
    if parallel.rank() == 0 and checkpoint.is_checkpoint(base):
        print(f"  {base}: the adapters need this checkpoint, and a --resume of its run may delete it; "
              "resume a copy of that run")


def check_tensor_shapes(source: str, found: dict, weights: dict) -> None:
    """Raise ValueError if no tensor of the source is in the model, or one of another shape. found: {name:
    shape}."""
    common = sorted(found.keys() & weights.keys())
    if not common:
        raise ValueError(f"--init-from {source}: none of its tensors ({shortened(found)}) is in the model "
                         f"({shortened(weights)}); name a model of the same file")
    for name in common:
        there = found[name]
        here = tuple(weights[name].shape)
        if there != here:
            raise ValueError(f"--init-from {source}: {name} is {there} there and {here} in the model; pass "
                             "the source's sizes, as in its config.json")


def print_found(source: str, found: dict, weights: dict) -> None:
    """Print which tensors of the source the model has, and which only one of them has."""
    common = weights.keys() & found.keys()
    missing = weights.keys() - found.keys()
    unused = found.keys() - weights.keys()
    print(f"--init-from {source}: {len(common)} tensors found: {shortened(common)}\n"
          f"  {len(missing)} of the model not found, so as initialized: {shortened(missing)}\n"
          f"  {len(unused)} of the source not used: {shortened(unused)}")


def check_same_ids(source: str, data: str) -> None:
    """Raise ValueError if the tokenizer.json of the Hugging Face folder `source` encodes the first text of
    token files to other ids than the tokenizer that made them. Both must be readable, or nothing is said."""
    from nanote import tokenizers, tokens  # another run needs no tokenizer
    ids, meta = tokens.open_tokens(data, "val", verify=False)
    try:
        theirs = tokenizers.get_tokenizer(f"hf:{source}")
        ours = tokenizers.get_tokenizer(meta["tokenizer"])
    except (ValueError, ImportError):  # moved, not byte-level, not installed, or cannot be downloaded
        return
    text = ours.decode(ids[:1000])
    if theirs.encode(text) != ours.encode(text):
        raise ValueError(f"--init-from {source}: its tokenizer.json has other ids than --data {data}, made "
                         f"with {ours.name}; make the data with data.py --tokenizer hf:{source}")


def print_differences(source: str, config, theirs: dict) -> None:
    """Print the fields of two model configs in which tensors of equal shapes compute something else."""
    if parallel.rank() != 0:
        return
    for name in ("n_head", "n_kv_head", "head_dim", "activation", "use_rmsnorm", "use_qk_norm", "use_rotary",
                 "rope_theta", "rope_scaling", "layernorm_epsilon"):
        if hasattr(config, name) and name in theirs and getattr(config, name) != theirs[name]:
            print(f"--init-from {source}: {name} is {theirs[name]} there and {getattr(config, name)} in the "
                  "model")


def shortened(names) -> str:
    """Return names in a line: * for the number of a block, and no more than eight."""
    short = set()
    for name in names:
        parts = ["*" if part.isdecimal() else part for part in name.split(".")]
        short.add(".".join(parts))
    if not short:
        return "none"
    shown = sorted(short)[:8]
    if len(short) > 8:
        shown.append("…")
    return ", ".join(shown)
