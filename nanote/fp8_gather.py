"""Weights gathered in FP8, for --parallel fsdp and hsdp: an all-gather moves one byte a weight, not two.

`nanote.parallel.shard` calls `gather_in_fp8(model)` after FSDP2's fully_shard. Delayed scaling knows the
scale of a weight before the step. So in each step

    quantize_shards   before a forward pass: each rank quantizes its shards, all in one launch. A shard raises
                      the amax of its weight, which `autocast` then reduces over ranks, as it does all amaxes
    pre_all_gather    gives FSDP2 the bytes of a shard, for the forward pass and again for the backward pass
    post_all_gather   makes the transposed copy of what was gathered, where a dgrad GEMM will read it

GEMMs read the bytes and scales that they read on one GPU. Parameters stay BF16 shards: the optimizer, state
dicts and checkpoints are those of any sharded model. Gathered in BF16 are

- all weights of a run without FP8, and of modules that are not fast_kernels': Transformer Engine's, for one
- that of lm_head if it runs without FP8, or shares its weight with the embedding, which reads BF16
- those of blocks without FP8, and of a model of your own that has no `in_fp8(layer)`
- one whose shards have unequal numbers of rows, or no multiple of 256 values

Reference: `fsdp_pre_all_gather` and `fsdp_post_all_gather`, by which FSDP2 lets a shard say what is gathered;
torchao does so for float8 with dynamic scaling (github.com/pytorch/ao, torchao/float8/fsdp_utils.py).
"""
from functools import partial

import torch

from fast_kernels import casts
from fast_kernels.fp8 import Float8Tensor
from fast_kernels.modules import Module
from nanote import recipes

FP8 = torch.float8_e4m3fn
aten = torch.ops.aten


def gather_in_fp8(model) -> None:
    """Let a model that fully_shard has sharded gather in FP8 the weights that it reads in FP8 only."""
    in_fp8 = getattr(model, "in_fp8", None)
    # without reduce_amax each rank would quantize its shards with another scale
    if in_fp8 is None or not recipes.uses_delayed_scaling(model) or not model.fp8_recipe.reduce_amax:
        return
    shards = []
    for layer, block in enumerate(model.blocks):
        if in_fp8(layer):
            shards += shards_of(block, is_freed_after_forward=True)
    config = model.config  # of a model of your own, which may lack these fields
    if getattr(config, "fp8_lm_head", False) and not getattr(config, "tie_embeddings", True):
        shards += shards_of(model.lm_head, is_freed_after_forward=False)
    for shard in shards:
        # FSDP2 calls the methods of this name that the local tensor of a parameter has
        shard.bf16.fsdp_pre_all_gather = shard.pre_all_gather
        shard.bf16.fsdp_post_all_gather = shard.post_all_gather
    if shards:
        # prepended: FSDP2's own hook gathers the weight of lm_head
        hook = partial(quantize_shards, shards)
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def shards_of(part, is_freed_after_forward: bool) -> list:
    """Return an FP8Shard for each weight of a block, or of lm_head, that fast_kernels reads."""
    shards = []
    for module in part.modules():
        if isinstance(module, Module):
            for gemm in range(len(module.weight_names)):
                parameter = module.weight_of(gemm)
                # for another dtype the module raises an error of its own
                if parameter.dtype == torch.bfloat16 and can_gather_in_fp8(parameter):
                    shards.append(FP8Shard(module, gemm, is_freed_after_forward))
    return shards


def can_gather_in_fp8(parameter) -> bool:
    """Return whether the shards of a parameter, a DTensor, can be quantized and gathered in FP8."""
    shard = parameter._local_tensor
    ranks = parameter.device_mesh["shard"].size()
    have_equal_rows = len(shard) * ranks == len(parameter)  # else FSDP2 pads shards
    can_be_quantized = shard.numel() % 256 == 0  # as a matrix with multiples of 16 rows and columns
    return have_equal_rows and can_be_quantized


class FP8Shard:
    """This rank's rows of a parameter, and their FP8 values."""

    def __init__(self, module, gemm: int, is_freed_after_forward: bool):
        """is_freed_after_forward: whether FSDP2 frees the gathered weight after the forward pass and gathers
        it again in the backward pass."""
        self.module = module
        self.gemm = gemm
        self.is_freed_after_forward = is_freed_after_forward
        self.parameter = module.weight_of(gemm)  # DTensor (out, in)
        self.bf16 = self.parameter._local_tensor  # (out / ranks, in)
        self.fp8 = torch.zeros_like(self.bf16, dtype=FP8)
        self.scale_inv = torch.ones(1, device=self.bf16.device)

    def pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Return what is gathered, and what `post_all_gather` gets beside it: nothing."""
        return (self.fp8.view(torch.uint8),), None

    def post_all_gather(self, outputs, metadata, dtype, *, out=None):
        """Return the gathered weight, and its tensors that are not in `outputs`.

        outputs: ((out, in) uint8,), what was gathered. When the weight has been used, FSDP2 frees the memory
            of these tensors and of `outputs`. It allocates both again before the next call.
        out: None in the first call; then the weight that this returned, whose rowwise data is in `outputs`.
        """
        gathered = out
        if out is None:
            rowwise = outputs[0].view(FP8)
            columnwise = torch.empty(rowwise.shape[::-1], dtype=FP8, device=rowwise.device)
            gathered = GatheredWeight(rowwise, columnwise, self.scale_inv, self.parameter)
        is_backward_pass = torch._C._current_graph_task_id() != -1
        if is_backward_pass or not self.is_freed_after_forward:  # dgrad reads it, the forward GEMM does not
            gathered.write_transposed()
        return gathered, [gathered.columnwise]


@torch.no_grad()
def quantize_shards(shards: list[FP8Shard], model, arguments: tuple, options: dict) -> None:
    """Quantize all shards before a forward pass of the model, in one launch. Micro-batches after the first
    one of a step take what that has quantized."""
    if not recipes.uses_fp8(model) or options.get("is_first_microbatch") is False:
        return
    model.reshard()  # lm_head's weight may be gathered still, as it was quantized for an earlier pass
    quantizations = [shard.module.weight_quantization(shard.gemm, model.fp8_recipe) for shard in shards]
    scale_invs = tuple(shard.scale_inv for shard in shards)
    # If an earlier pass is still to go backward, autograd has saved its scale_invs, and checks their version.
    # But that backward pass gathers the bytes that are quantized here, so it must read the new scale_invs.
    with torch.autograd._unsafe_preserve_version_counter(scale_invs):
        casts.cast_all(
            [as_matrix(shard.bf16) for shard in shards],
            [as_matrix(shard.fp8) for shard in shards],
            [],  # no transposed copies
            list(scale_invs),
            [quantization.scale for quantization in quantizations],
            [quantization.amax for quantization in quantizations])


def as_matrix(shard: torch.Tensor) -> torch.Tensor:
    """Return a shard's values as a matrix with a multiple of 16 rows, which the kernel needs."""
    return shard if len(shard) % 16 == 0 else shard.view(16, -1)


class GatheredWeight(Float8Tensor):
    """A weight (out, in) that FSDP2 has gathered in FP8, for the GEMMs of fast_kernels.

    To every other operation it is the BF16 weight, gathered for that operation. So a pass without FP8 reads
    weights that are not quantized. All ranks must do the same operations, as they do in a model."""

    def __new__(cls, rowwise, columnwise, scale_inv, parameter):
        return super().__new__(cls, rowwise, columnwise, scale_inv)

    def __init__(self, rowwise, columnwise, scale_inv, parameter):
        """parameter: the sharded weight, a DTensor."""
        super().__init__(rowwise, columnwise, scale_inv)
        self.parameter = parameter

    def alias(self):
        return GatheredWeight(self.rowwise, self.columnwise, self.scale_inv, self.parameter)

    def dequantize(self):
        """Gather the BF16 weight, (out, in). Collective."""
        with torch.no_grad():
            return self.parameter.detach().full_tensor()

    def write_transposed(self) -> None:
        """Write the transposed copy of the FP8 data."""
        # autograd saved this tensor; the values written are the same, so its version must not change
        with torch.autograd._unsafe_preserve_version_counter(self.columnwise):
            casts.transpose(self.rowwise, self.columnwise)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is aten.as_strided.default and tuple(args[1]) == args[0].shape:
            return args[0].alias()  # by as_strided FSDP2 makes the parameter
        return super().__torch_dispatch__(function, types, args, kwargs)
