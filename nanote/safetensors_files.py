"""The tensors of a checkpoint as safetensors files: write them, check their headers, read them.

The format is that of torch.distributed.checkpoint (DCP) with its Hugging Face storage classes, so any number
of processes can read what any other number wrote, without pickle. DCP reads them, and `write_file` writes
them: DCP's writer would copy every tensor and hold up the training thread.

Format: github.com/huggingface/safetensors, "Format"; of tensors in parts, torch's
distributed/checkpoint/_hf_utils.py.
"""
import json
import math
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from nanote import json_files

RESTORE = "restore the checkpoint's files from a copy"
SHARD_BYTES = 4 * 2**30  # checksums of several files are computed side by side
TYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.bool: "BOOL",
}


def file_numbers(parts: dict[str, tuple[torch.Tensor, list[int]]]) -> dict[str, int]:
    """Assign each tensor to a file of about SHARD_BYTES; numbers start at 1."""
    numbers, size = {}, 0
    for name, (tensor, _) in parts.items():
        size += tensor.numel() * tensor.element_size()
        numbers[name] = 1 + size // SHARD_BYTES
    return numbers


def write_file(path: Path, parts: dict[str, tuple[torch.Tensor, list[int]]]) -> None:
    """Write one safetensors file. parts: {name: (tensor, offsets)}, see checkpoint._own_parts.

    Unlike safetensors.torch.save, this copies nothing and releases the GIL during each write, so that a
    training thread can launch its next step.
    """
    # wider types first, so that each tensor is aligned
    ordered = sorted(((name, tensor) for name, (tensor, _) in parts.items()),
                     key=lambda item: -item[1].element_size())
    header, end = {"__metadata__": {"format": "pt"}}, 0
    if any(any(offsets) for _, offsets in parts.values()):
        begins = {name: {"saved_offsets": offsets} for name, (_, offsets) in parts.items()}
        header["__metadata__"] |= {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0"}
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in ordered:
            file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())


def stored_tensors(folder) -> dict:
    """Read the headers of a checkpoint's files: {name: entry with .size and .properties.dtype}.

    Raises ValueError for tensors that are stored in part or twice, and for FP8 or optimizer state that is not
    floating-point.
    """
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        for name, entry in found.items():
            parts = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if parts != entry.size.numel():
                raise ValueError(f"{name} has {entry.size.numel():,} elements, but {parts:,} are stored")
            if _must_be_float(name) and not entry.properties.dtype.is_floating_point:
                raise ValueError(f"{name} is {entry.properties.dtype}, not a floating-point tensor")
    except OSError:
        raise
    except Exception as error:  # safetensors' own, or whatever an unexpected header leads to in DCP
        raise ValueError(f"{folder}: its .safetensors files are not valid for a checkpoint "
                         f"({json_files.reason(error)}); {RESTORE}") from error
    return found


def _must_be_float(name: str) -> bool:
    """Whether a tensor is FP8 state, or state of AdamW or Muon; others may be integers."""
    floats = ("master_param", "exp_avg", "exp_avg_sq", "momentum_buffer")
    return name.startswith("fp8.") or name.rpartition(".")[2] in floats


def load(tensors: dict, folder: Path) -> None:
    """Fill `tensors`, allocated by the caller, from a checkpoint's files with DCP. Collective."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    except BaseException as error:  # CheckpointException, a BaseException, wraps the errors of the ranks
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
        if causes and isinstance(causes[0], OSError):
            raise causes[0] from None
        raise
