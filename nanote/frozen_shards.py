"""Weights that are frozen in FP8, for --parallel fsdp and hsdp: each rank keeps its rows of the FP8 values,
and an all-gather moves these, one byte a value. Training never changes the bytes.

A FrozenWeight (fast_kernels/frozen.py, te_reference.py) is a tensor subclass, whose values are in high
precision for all operations but the GEMMs. So FSDP2's fully_shard cannot divide its bytes, and
`nanote.parallel` calls

    replace_by_fp8     before fully_shard: a frozen weight becomes a parameter of its FP8 values
    connect            after it: what FSDP2 gathers becomes a FrozenWeight again, with the scale it had

- The scale is one number a weight, and every rank has it.
- A gathered weight has no transpose. Each backward pass makes it in memory that is free again after its GEMM,
  also with `keeps_transpose=True` of `freeze_in_fp8`: FSDP2 frees a block's weights after each of its passes.
- `parallel.local_part` of a sharded frozen weight is a FrozenWeight of this rank's rows.
- A model's state_dict() has the values of the weights, and load_state_dict() quantizes values. Not so with
  PyTorch's broadcast_from_rank0=True, which copies values into the bytes.

Reference: `fsdp_pre_all_gather` and `fsdp_post_all_gather`, see nanote/fp8_gather.py.
"""
import math

import torch
from torch.distributed.tensor import DTensor

from nanote import parallel
from nanote.engine import is_frozen_in_fp8, is_te_tensor
from nanote.training_state import write_weight

FP8 = torch.float8_e4m3fn


def replace_by_fp8(module, kind: str) -> None:
    """Replace weights that are frozen in FP8 by parameters of their FP8 values, which fully_shard can divide.
    kind: "fsdp" or "hsdp", for a message."""
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False)):
            if not is_frozen_in_fp8(weight) or isinstance(weight, DTensor):
                continue
            if is_te_tensor(weight):
                raise ValueError(f"--parallel {kind}: does not shard Transformer Engine's weights that are "
                                 "frozen in FP8; pass --parallel ddp, or set NANOTE_ENGINE=fast on Hopper")
            if not hasattr(owner, "frozen_shards"):
                owner.frozen_shards = {}  # {name of a parameter: FrozenShard}
                owner.register_state_dict_post_hook(save_values)
                owner.register_load_state_dict_pre_hook(load_values)
            owner.frozen_shards[name] = FrozenShard(weight)
            # not uint8: FSDP2 of PyTorch 2.11 makes a parameter before it sets requires_grad to False, and an
            # integer tensor cannot require gradients
            owner.register_parameter(name, torch.nn.Parameter(weight.rowwise, requires_grad=False))


def connect(module) -> None:
    """Let FSDP2 gather FrozenWeights. Call it again after `.to(device)`, which replaces the tensors of
    parameters, and so drops the attributes that are set here. ValueError if a shard has been converted."""
    has_shards = False
    for owner in module.modules():
        for name, shard in getattr(owner, "frozen_shards", {}).items():
            shard.connect(owner.get_parameter(name))
            has_shards = True
    if has_shards and check_shards not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(check_shards, prepend=True)  # before FSDP2's, which gathers


def check_shards(module, inputs) -> None:
    """Raise ValueError if a shard is to be trained, or is another tensor than `connect` has seen: .float()
    and .to(dtype) convert FP8 values without their scale."""
    for owner in module.modules():
        for name, shard in getattr(owner, "frozen_shards", {}).items():
            parameter = owner.get_parameter(name)
            if isinstance(parameter, DTensor):  # not gathered
                shard.check(parameter, is_connected=parameter._local_tensor is shard.data)


class FrozenShard:
    """This rank's rows of a weight that is frozen in FP8."""

    def __init__(self, weight):
        """weight: a FrozenWeight, whole."""
        names, self.dtype = weight.__tensor_flatten__()
        self.engine_class = type(weight)
        self.scales = {name: getattr(weight, name) for name in names if name not in ("rowwise", "columnwise")}
        self.rows = len(weight)  # on all ranks
        self.parameter = None
        self.data = None

    def connect(self, parameter: DTensor) -> None:
        """parameter: the sharded values, (out, in) E4M3."""
        self.check(parameter)
        self.parameter = parameter
        self.data = parameter._local_tensor  # (rows of this rank, in) E4M3
        # FSDP2 calls the methods of this name that the local tensor of a parameter has
        self.data.fsdp_pre_all_gather = self.pre_all_gather
        self.data.fsdp_post_all_gather = self.post_all_gather
        part = torch.nn.Parameter(self.frozen_weight(self.data), requires_grad=False)
        parameter.frozen_part = part  # for `parallel.local_part`
        parameter.is_frozen_in_fp8 = True
        parameter.scale = part.scale  # for the FP8 state in state dicts

    def check(self, parameter: DTensor, is_connected=True) -> None:
        if parameter.dtype != FP8 or parameter.requires_grad or not is_connected:
            raise ValueError(f"a weight {tuple(parameter.shape)} is frozen in FP8 and sharded, so it cannot "
                             "be converted, replaced or trained; leave out .to(dtype) and "
                             "requires_grad_(True), and call nanote.frozen_shards.connect(model) after "
                             ".to(device)")

    def frozen_weight(self, data: torch.Tensor):
        """Return the FrozenWeight of some rows, (rows, in) E4M3, in the same memory."""
        tensors = self.scales | {"rowwise": data}
        return self.engine_class.__tensor_unflatten__(tensors, self.dtype, None, None)

    def pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Return what is gathered, and what `post_all_gather` gets beside it: nothing."""
        # An all-gather needs shards of one size. FSDP2 pads the memory of a smaller shard to it, so that this
        # view beyond the end of the local tensor is valid
        rows = math.ceil(self.rows / mesh.size())
        columns = self.data.shape[1]
        padded = self.data.as_strided((rows, columns), (columns, 1))
        return (padded.view(torch.uint8),), None

    def post_all_gather(self, outputs, metadata, dtype, *, out=None):
        """Return the gathered weight, and its tensors that are not in `outputs`: none.

        outputs: ((rows, in) uint8,), what was gathered, in the same memory in each call.
        out: None in the first call; then the weight that this returned.
        """
        gathered = out
        if out is None:
            gathered = self.frozen_weight(outputs[0][:self.rows].view(FP8))
        return gathered, []


# ---------------------------------------------------------------- state dicts

def save_values(owner, state_dict: dict, prefix: str, metadata) -> None:
    """Replace FP8 values in a state dict by the values of the weights, sharded likewise: a hook."""
    for name, shard in owner.frozen_shards.items():
        saved = state_dict.get(prefix + name)
        if saved is None or isinstance(saved, torch.nn.Parameter):  # the latter with keep_vars=True
            continue
        parameter = shard.parameter
        state_dict[prefix + name] = DTensor.from_local(
            parameter.frozen_part.dequantize(), parameter.device_mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride())


def load_values(owner, state_dict: dict, prefix: str, *unused) -> None:
    """Quantize the values in a state dict, and put in their place what is then loaded: a hook. Collective."""
    for name, shard in owner.frozen_shards.items():
        values = state_dict.get(prefix + name)
        if values is None:
            continue
        if values.dtype == FP8:
            raise ValueError(f"{prefix}{name}: has FP8 values without their scale, and a weight that is "
                             "frozen in FP8 loads values in high precision; leave out "
                             "broadcast_from_rank0=True, and keep_vars=True of state_dict")
        values = parallel.sharded_like(shard.parameter, values)
        write_weight(shard.parameter, parallel.local_part(values))
        state_dict[prefix + name] = shard.parameter
