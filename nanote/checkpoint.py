"""Checkpoints that survive a kill, a full disk and a changed number of GPUs, and that run no code when they
are loaded.

    out/<run>/step-<n>/   shard-*.safetensors   weights, optimizer, FP8 state, random number generators
                          meta.json step, the trainer's options, the model's config, the optimizer's groups
                          SHA256SUMS of every file above; `sha256sum -c SHA256SUMS` checks them by hand

Notable, and why:
- A checkpoint is written to a hidden folder, synced and renamed, so a folder named step-<n> is always whole;
  the latest is the one with the highest number, and no pointer to it can be stale.
- Tensors go through torch.distributed.checkpoint in its safetensors format under plain names
  ("model.<parameter>", "optimizer.<parameter>.exp_avg", "fp8.<module>…"), so any number of processes can read
  what any other number wrote, and no pickle is involved: DCP's own format keeps its index in one, and TE's
  `_extra_state` entries are pickles, which is why the FP8 state is stored as plain tensors instead
  (fp8.get_state).
- FP8 is no property of a checkpoint: weights are stored in high precision, so a run may resume with another
  recipe or none.
- Training need not wait for the disk: BackgroundSaver copies the tensors to host memory and writes them while
  training goes on. One process writes the files of DCP's format itself, since DCP's writer would hold up the
  thread that trains.
"""
import contextlib
import dataclasses
import fcntl
import importlib
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from data import sha256
from nanote import fp8, json_files
from nanote.json_files import COUNT, SIZE

MODELS = {  # --model: (file, model class, config class)
    "optimized": ("model_te_optimized", "OptimizedGPT2Model", "OptimizedConfig"),
    "advanced": ("model_te_advanced", "AdvancedGPT2Model", "AdvancedConfig"),
    "fused": ("model_te_fused", "FusedGPT2Model", "FusedConfig"),
    "custom": ("model_te_custom", "CustomGPT2Model", "CustomConfig"),
    "te": ("model_te", "TEGPT2Model", "TEConfig"),
}
FORMAT = 1  # of checkpoints; those of before it was counted name none
META = {  # what meta.json must hold
    "step": COUNT, "config": dict, "model": str, "model_config": dict, "tokenizer": str,
    "optimizer_groups": [{"step?": COUNT}], "fp8_weights?": [str], "torch?": str, "device?": str,
    "hf?": {"folder": str, "vocab_size": SIZE}}
RESTORE = "restore the checkpoint's files from a copy"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
SHARD_BYTES = 4 * 2**30  # DCP assembles a file in memory before writing it
SAFETENSORS_TYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.bool: "BOOL",
}


def model_classes(name: str):
    """(model class, config class) of a model's short name; ValueError when there is none, or its file is not
    here."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: one of {', '.join(MODELS)}")
    module_name, *class_names = MODELS[name]
    if importlib.util.find_spec(module_name) is None:
        here = [key for key, (module, *_) in MODELS.items() if importlib.util.find_spec(module)]
        raise ValueError(
            f"model {name!r}: there is no {module_name}.py here; models that are: {', '.join(here)}"
        )
    module = importlib.import_module(module_name)
    return tuple(getattr(module, class_name) for class_name in class_names)


def make_model_config(name: str, options: dict):
    """The model's config from those of `options` that it has a field for; None leaves a field at its default.
    """
    config_class = model_classes(name)[1]
    known = {field.name for field in dataclasses.fields(config_class)}
    return config_class(
        **{key: value for key, value in options.items() if key in known and value is not None}
    )


def build_model(name: str, config, *, device="cpu", dtype=torch.float32, fp8_weights_recipe=None):
    """A model with its parameters made on `device` in `dtype`, or in FP8 where a recipe for the weights is
    given."""
    quantized = contextlib.nullcontext() if fp8_weights_recipe is None else fp8.te.quantized_model_init(
        enabled=True, recipe=fp8_weights_recipe, preserve_high_precision_init_val=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), quantized:
            return model_classes(name)[0](config).to(device)  # a model may choose a device itself
    finally:
        torch.set_default_dtype(before)


def weight_count(config) -> int:
    """Count the elements of a model's weight matrices before it is built. Biases and norms are few and not
    counted."""
    width, kv_width = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    attention = config.n_embd * (2 * width + 2 * kv_width)  # queries, keys, values, projection
    mlp = config.n_embd * config.n_inner * (3 if getattr(config, "activation", "gelu") == "swiglu" else 2)
    rows = config.vocab_size * (1 if config.tie_embeddings else 2)
    rows += 0 if getattr(config, "use_rotary", False) else config.n_positions
    return config.n_layer * (attention + mlp) + rows * config.n_embd


# ---------------------------------------------------------------- saving

def save(run_dir, step: int, *, model, optimizer, meta: dict, keep: int) -> Path:
    """Write run_dir/step-<step>, then remove all but the last `keep` checkpoints. Every rank must call it.

    `meta` is what JSON can hold and `load` returns. On OSError (a full disk) nothing is left of this
    checkpoint, the ones before it stand, and the error names the last of them.
    """
    document = _document(step, model, optimizer, meta)
    return _write(Path(run_dir), step, _tensors(model, optimizer), document, keep)


class BackgroundSaver:
    """Checkpoints that a thread writes while training goes on: `save` returns as soon as the tensors are
    copied to host memory.

    One checkpoint is written at a time, and a folder step-<n> is whole or absent as with the function `save`.
    The copies stay allocated for the checkpoint after: pinned memory, where they come from a GPU, of the size
    of weights, optimizer state and float32 masters.

    With several processes, or `background` off, `save` returns when all is written: there DCP calls
    collectives, which in a second thread could come before training's own on one rank and after them on
    another, and all would wait for ever.
    """

    def __init__(self, background: bool = True):
        self.background = background and not dist.is_initialized()
        self.thread, self.writing, self.failures, self.copies = (
            ThreadPoolExecutor(1, "checkpoint"), None, [], {},
        )

    def reserve(self, model, optimizer) -> str:
        """Get the memory that `save` copies to before training starts: gigabytes of pinned memory take the
        driver long, and a step would wait. "", or why there is none: then `save` writes in the foreground,
        without copies."""
        if self.background:
            try:
                self.copy_to_host(_tensors(model, optimizer))
            except torch.OutOfMemoryError:  # the GPU's
                raise
            except RuntimeError as error:
                self.background, self.copies = False, {}
                return str(error).splitlines()[0]
        return ""

    def save(self, run_dir, step: int, *, model, optimizer, meta: dict, keep: int) -> None:
        """As the function `save`, after waiting for the checkpoint before; but an OSError is kept for
        `error`."""
        self.wait()
        document = _document(step, model, optimizer, meta)
        tensors = _tensors(model, optimizer)
        if self.background:
            tensors = self.copy_to_host(tensors).items()
            self.writing = self.thread.submit(_write, Path(run_dir), step, tensors, document, keep)
        else:
            try:
                _write(Path(run_dir), step, tensors, document, keep)
            except OSError as error:
                self.failures.append(error)

    def copy_to_host(self, tensors) -> dict[str, torch.Tensor]:
        """Of (name, tensor) pairs, in the memory of an earlier call where it fits. The copies are queued on
        the stream that training uses, so the memory of a tensor that was made for this alone is not used
        again before it is read."""
        before, self.copies = self.copies, {}
        for name, tensor in tensors:
            copy = before.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.copies[name] = copy.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return self.copies

    def wait(self) -> None:
        """Return when nothing is being written. What is no OSError, a defect, is raised."""
        if self.writing is not None:
            error = self.writing.exception()
            self.writing = None
            if isinstance(error, OSError):
                self.failures.append(error)
            elif error is not None:
                raise error

    def error(self) -> OSError | None:
        """Why a checkpoint was not written, as far as known by now; each error is returned once. Waits for
        nothing."""
        if self.writing is not None and self.writing.done():
            self.wait()
        return self.failures.pop(0) if self.failures else None


def _document(step: int, model, optimizer, meta: dict) -> str:
    """Return the text of meta.json. What the model and the optimizer say takes precedence over `meta`, which
    may be that of the checkpoint that this run resumed."""
    groups = [{k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
              for group in optimizer.param_groups]
    own = {"format": FORMAT, "step": step, "optimizer_groups": groups, "torch": torch.__version__,
           "fp8_weights": [name for name, parameter in model.named_parameters() if _in_fp8(parameter)]}
    return json.dumps(own | meta | own, indent=2) + "\n"


def _write(run_dir: Path, step: int, tensors, document: str, keep: int) -> Path:
    """The part of saving that reads nothing of the model: (name, tensor) pairs and meta.json's text ->
    run_dir/step-<step>."""
    folder, unfinished = run_dir / f"step-{step}", run_dir / f".saving-step-{step}"

    def prepare():
        for stale in [*run_dir.glob(".saving-*"), *run_dir.glob(".removing-*")]:  # of a run that was killed
            shutil.rmtree(stale, ignore_errors=True)
        unfinished.mkdir()

    def finish():
        (unfinished / "meta.json").write_text(document)
        sums = "".join(f"{checksum}  {name}\n" for name, checksum in _checksums(unfinished).items())
        (unfinished / "SHA256SUMS").write_text(sums)
        for path in [unfinished / "meta.json", unfinished / "SHA256SUMS", unfinished]:
            _sync(path)
        os.rename(unfinished, folder)
        _sync(run_dir)
        for old in list_checkpoints(run_dir)[:-keep]:
            doomed = run_dir / f".removing-{old.name}"  # a folder half removed must not pass for a checkpoint
            old.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    try:
        on_rank0(prepare)
        if dist.is_initialized():
            _dcp(dcp.save, dict(tensors), unfinished)
        else:
            _write_tensors(dict(tensors), unfinished)
        on_rank0(finish)
    except OSError as error:
        if _rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        last = latest(run_dir)
        kept = f"the last good checkpoint is {last}" if last else "there is no earlier one"
        state = "is whole, but what follows its writing failed" if folder.exists() else "not written"
        raise OSError(f"{folder} {state}: {error.strerror or error}; {kept}; free some space or pass "
                      "--out-dir on another disk") from error
    return folder


def _write_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """safetensors files (github.com/huggingface/safetensors, "Format") as DCP's reader takes them. Unlike
    safetensors.torch.save, through which DCP writes, this copies nothing and never holds the interpreter's
    lock for long: a thread that trains meanwhile can launch its next step."""
    numbers = _file_numbers(tensors)
    files = max(numbers.values())
    for number in sorted(set(numbers.values())):
        # Those of wider types first, so that each is aligned.
        part = sorted(
            (item for item in tensors.items() if numbers[item[0]] == number),
            key=lambda item: -item[1].element_size(),
        )
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, tensor in part:
            start, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": SAFETENSORS_TYPES[tensor.dtype], "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        # DCP's names for the files of one process
        path = folder / f"shard-00001-model-{number:05}-of-{files:05}.safetensors"
        with open(path, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for _, tensor in part:
                file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        _sync(path)


def _file_numbers(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """The number of the file, from 1, that each tensor goes to: of about SHARD_BYTES each."""
    numbers, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        numbers[name] = 1 + size // SHARD_BYTES
    return numbers


def _tensors(model, optimizer):
    """(name, tensor) of everything that is stored as a tensor, as it is now; tied parameters once. A
    generator, so that float32 masters joined from remainders need not all exist at once."""
    names = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state") and id(value) not in names:
            names[id(value)] = name
            yield f"model.{name}", _plain(value)
    for parameter, state in _optimizer_states(optimizer):
        for key, value in state.items():
            if key == "master_param" and not _has_master(parameter):
                continue
            if key == "master_param" and value.dtype == torch.int16:
                value = join_remainder(parameter.detach(), value)
            yield f"optimizer.{names[id(parameter)]}.{key}", _plain(value)
    yield from ((f"fp8.{name}", value) for name, value in fp8.get_state(model).items())
    yield from ((f"rng{_rank()}.{name}", value) for name, value in _rng_state().items())


def _plain(tensor) -> torch.Tensor:
    """A tensor that safetensors can hold: weights that TE keeps in FP8 are stored in high precision."""
    tensor = tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor
    return tensor.detach().contiguous()


def _in_fp8(parameter) -> bool:
    return hasattr(parameter, "_quantizer") or hasattr(parameter, "fp8_owner")  # TE's, te_reference's


def _has_master(parameter) -> bool:
    """Return whether the optimizer trains a float32 master of the parameter. TE's FusedAdam makes one of a
    float32 parameter, too, but then updates the parameter alone: that master keeps its first value."""
    return parameter.dtype != torch.float32 or _in_fp8(parameter)


def _optimizer_states(optimizer):
    """(parameter, its state) pairs; torch numbers the parameters of all groups in one sequence."""
    states = optimizer.state_dict()["state"]
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [(parameter, states[number]) for number, parameter in enumerate(parameters) if number in states]


def _rng_state() -> dict[str, torch.Tensor]:
    numpy_state = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    host = json.dumps([random.getstate(), numpy_state]).encode()
    state = {"torch": torch.get_rng_state(), "host": torch.frombuffer(bytearray(host), dtype=torch.uint8)}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_rng_state(folder, state: dict[str, torch.Tensor]) -> None:
    try:
        python_state, numpy_state = _host_states(state["host"].numpy().tobytes())
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        told = json_files.reason(error).removesuffix(";")
        raise ValueError(f"{folder}: the state of the random generators is damaged ({told}); "
                         f"{RESTORE}") from error


def _host_states(text: bytes) -> tuple[tuple, tuple]:
    """Return what random.setstate and np.random.set_state take. NumPy does not check its part: a position
    outside of the key ends the process when the next number is drawn."""
    (version, numbers, gauss), numpy_state = json_files.parse(text, list, "rng.host", "")
    _, key, position, has_gauss, cached = numpy_state
    json_files.check(
        {"gauss": gauss, "key": key, "position": position, "has_gauss": has_gauss, "cached": cached},
        {"gauss": float | None, "key": [range(2**32)], "position": range(625), "has_gauss": range(2),
         "cached": float}, "rng.host", "")
    if len(key) != 624:
        raise ValueError(f"rng.host: key has {len(key)} integers, not 624")
    return (version, tuple(numbers), gauss), tuple(numpy_state)


# ---------------------------------------------------------------- finding and checking

def list_checkpoints(run_dir) -> list[Path]:
    """The run's checkpoints, oldest first."""
    steps = [path for path in Path(run_dir).glob("step-*") if path.name[5:].isdigit() and path.is_dir()]
    return sorted(steps, key=lambda path: int(path.name[5:]))


def latest(run_dir) -> Path | None:
    return (list_checkpoints(run_dir) or [None])[-1]


def find(path) -> Path:
    """The checkpoint that `path` means: itself, or a run folder's latest. ValueError or FileNotFoundError if
    it has none."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such run folder; runs here: "
            f"{', '.join(sorted(str(run) for run in Path('out').glob('*'))) or 'none (python train.py makes one)'}"
        )
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a run's folder is wanted, such as out/tiny")
    folder = path if path.name.startswith("step-") else latest(path)
    if folder is None:
        raise ValueError(
            f"{path} holds no checkpoint (no step-<n> folder): was the run stopped before its first one?"
        )
    return folder


def read_meta(folder) -> dict:
    """Read meta.json of a checkpoint and check it: every file's SHA-256, the fields, the size of the model
    described.

    ValueError, naming the file, for what is wrong; also for a format newer than this file's.
    """
    folder = Path(folder)

    def check():
        problem = _damage(folder)
        if problem:
            older = [path for path in list_checkpoints(folder.parent) if path != folder and not _damage(path)]
            advice = (
                f"the one before it, {older[-1]}, is whole: remove {folder} to go on from there"
                if older
                else "no other checkpoint of this run is whole"
            )
            raise ValueError(f"damaged checkpoint: {problem}; {advice}")
        path = folder / "meta.json"
        advice = f"restore it from a copy, or remove {folder} to use the checkpoint before it"
        version = json_files.read(path, {"format?": COUNT}, advice).get("format", 0)
        if version > FORMAT:
            raise ValueError(f"{folder} is of format {version}, which a newer version of this kit wrote; "
                             f"this one reads formats up to {FORMAT}: update it, or go on from a run that it "
                             "can read")
        meta = json_files.read(path, META, advice)
        json_files.check(meta, {"model_config": model_classes(meta["model"])[1]}, path, advice)
        _check_size(folder, meta)
        return meta

    return on_rank0(check)


def _check_size(folder: Path, meta: dict) -> None:
    """Refuse a meta.json that describes a larger model than is stored: building it could take all memory."""
    try:
        needed = weight_count(make_model_config(meta["model"], meta["model_config"] | {"use_fp8": False}))
    except ValueError as error:
        raise ValueError(f"{folder / 'meta.json'}: model_config: {error}") from error
    tensors = stored_tensors(folder).items()
    stored = sum(entry.size.numel() for name, entry in tensors if name.startswith("model."))
    if needed > stored:
        raise ValueError(f"{folder / 'meta.json'}: model_config describes a model of {needed:,} weights or "
                         f"more, but {stored:,} are stored; restore the file that was written with them")


def stored_tensors(folder) -> dict:
    """Read what a checkpoint's files say of its tensors: {name: entry with .size and .properties.dtype}.

    ValueError for tensors that are stored in part or twice, and for weights or optimizer state of another
    type.
    """
    try:
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        for name, entry in found.items():
            parts = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if parts != entry.size.numel():
                raise ValueError(f"{name} has {entry.size.numel():,} elements, but {parts:,} are stored")
            if not name.startswith("rng") and not entry.properties.dtype.is_floating_point:
                raise ValueError(f"{name} is {entry.properties.dtype}, not a floating-point tensor")
    except OSError:
        raise
    except Exception as error:  # safetensors' own, or whatever DCP meets in a header that it did not write
        told = json_files.reason(error)
        raise ValueError(f"{folder}: its .safetensors files are not those of a checkpoint ({told}); "
                         f"{RESTORE}") from error
    return found


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None when they are what was written."""
    for path in folder.iterdir():
        if not path.is_file() and not path.is_dir():
            return f"{path} is not a regular file"
    listing = folder / "SHA256SUMS"
    try:
        lines = json_files.read_bytes(listing, "every checkpoint has one").decode().removesuffix("\n")
        found = _checksums(folder)
    except (OSError, ValueError) as error:
        return f"{listing} cannot be read ({json_files.reason(error)})"
    lines = lines.split("\n")  # splitlines would take other bytes for a line's end, too
    for number, line in enumerate(lines, 1):
        if not re.fullmatch("[0-9a-f]{64}  .+", line):
            return f"{listing}:{number}: not a SHA-256, two spaces and a file's name"
    expected = {line[66:]: line[:64] for line in lines}
    for name, checksum in expected.items():
        if name not in found:
            return f"{folder / name} is missing"
        if found[name] != checksum:
            return f"{folder / name} has SHA-256 {found[name]}, written was {checksum}"
    for path in folder.glob("*.safetensors"):
        if path.name not in expected:  # it would be read with the others
            return f"{path} is not listed in {listing}"
    return None if "meta.json" in expected else f"{listing} does not list meta.json"


def _checksums(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    with ThreadPoolExecutor(8) as pool:  # hashing releases the interpreter's lock
        return dict(zip((path.name for path in paths), pool.map(sha256, paths)))


# ---------------------------------------------------------------- loading

def load(folder, meta: dict, model, optimizer=None) -> None:
    """Put a checkpoint's tensors into `model` and, for training on, into `optimizer`, FP8 state and random
    generators.

    `meta` is what read_meta(folder) returned, so that nothing is loaded unchecked. The model may have another
    precision or FP8 recipe than the one that was saved; a tensor that is missing, unknown or of another shape
    is a ValueError. Every rank must call it.
    """
    folder = Path(folder)
    wanted = ("model.",) if optimizer is None else ("model.", "optimizer.", "fp8.", f"rng{_rank()}.")
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
               for name, entry in stored_tensors(folder).items() if name.startswith(wanted)}
    own = {f"model.{name}": value for name, value in model.state_dict(keep_vars=True).items()
           if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")}
    # the name under which a tied tensor is stored
    first = {id(value): name for name, value in reversed(own.items())}
    for name in sorted(set(first.values()) | {name for name in tensors if name.startswith("model.")}):
        sizes = [
            tuple(tensor.shape) if tensor is not None else "absent"
            for tensor in (tensors.get(name), own.get(name))
        ]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{folder} is of another architecture: {name.removeprefix('model.')} is {sizes[0]} in the "
                f"checkpoint and {sizes[1]} in the model; build the model from the checkpoint's meta.json"
            )
    _check_state(folder, tensors, own)
    _dcp(dcp.load, tensors, folder)
    drop_stale_masters(tensors, meta)

    def part(prefix):
        return {
            name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
        }

    if optimizer is not None:
        fp8.set_state(model, part("fp8."))  # before the weights: those kept in FP8 are cast with its scales
    with torch.no_grad():
        for name in first.values():
            # A run kept in float32 has no separate master weights: it takes those of a BF16 or FP8 run that
            # has them.
            master = tensors.get(f"optimizer.{name.removeprefix('model.')}.master_param")
            takes_master = master is not None and own[name].dtype == torch.float32 and not _in_fp8(own[name])
            own[name].copy_(master if takes_master else tensors[name])
    if optimizer is not None:
        _load_optimizer(optimizer, meta["optimizer_groups"], part("optimizer."), part("model."),
                        {id_: name.removeprefix("model.") for id_, name in first.items()})
        rng = part(f"rng{_rank()}.")
        if rng:
            _set_rng_state(folder, rng)
        else:  # more processes than when it was saved: this one had no generator yet
            torch.manual_seed(torch.initial_seed() + meta["step"] * 100_003 + _rank())


def _check_state(folder: Path, tensors: dict, own: dict) -> None:
    """ValueError where the optimizer's state is incomplete, or not of its parameters' shapes."""
    for name in (name for name in tensors if name.startswith("optimizer.")):
        parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
        if f"model.{parameter}" not in own:
            continue
        shapes = tuple(tensors[name].shape), tuple(own[f"model.{parameter}"].shape)
        if shapes[0] != shapes[1]:
            raise ValueError(f"{folder}: {name} is {shapes[0]}, its parameter {shapes[1]}; {RESTORE}")
        if key in MOMENTS and not all(f"optimizer.{parameter}.{moment}" in tensors for moment in MOMENTS):
            raise ValueError(f"{folder}: of {' and '.join(MOMENTS)} of {parameter} one is missing; {RESTORE}")


def _load_optimizer(optimizer, stored_groups: list[dict], tensors: dict, weights: dict, names: dict) -> None:
    """Put back the optimizer's state. `tensors`, `weights`: what is stored of the optimizer and of the model,
    by name; `names`: of the parameters, by id."""
    target = optimizer.state_dict()
    for group, stored in zip(target["param_groups"], stored_groups):
        if "step" in stored:  # all else comes from this run's own options
            on_device = getattr(optimizer, "capturable", False)
            device = optimizer.param_groups[0]["params"][0].device
            count = torch.tensor([stored["step"]], dtype=torch.int, device=device)
            group["step"] = count if on_device else stored["step"]
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    target["state"] = {}
    for number, parameter in enumerate(parameters):
        state = {key: tensors[f"{names[id(parameter)]}.{key}"] for key in MOMENTS
                 if f"{names[id(parameter)]}.{key}" in tensors}
        if state and optimizer.master_weights and _has_master(parameter):
            name = names[id(parameter)]
            state["master_param"] = tensors.get(f"{name}.master_param", weights[name]).float()
            if getattr(optimizer, "store_param_remainders", False) and parameter.dtype == torch.bfloat16:
                rounded, state["master_param"] = split_remainder(state["master_param"])
                with torch.no_grad():
                    parameter.copy_(rounded)
        if state:
            target["state"][number] = {key: value.to(parameter.device) for key, value in state.items()}
    optimizer.load_state_dict(target)


def drop_stale_masters(tensors: dict, meta: dict) -> None:
    """Remove master weights beside float32 weights that are their own masters. Earlier versions stored such
    masters after a resume, and never updated them. A weight kept in FP8 may be stored in float32, too: it was
    dequantized, and its master is the exact one."""
    in_fp8 = meta.get("fp8_weights")
    if in_fp8 is None and meta.get("config", {}).get("fp8_param"):
        return  # written before the weights in FP8 were named
    for name in [
        name for name in tensors if name.startswith("optimizer.") and name.endswith(".master_param")
    ]:
        parameter = name.removeprefix("optimizer.").removesuffix(".master_param")
        weight = tensors.get(f"model.{parameter}")
        if weight is not None and weight.dtype == torch.float32 and parameter not in (in_fp8 or []):
            del tensors[name]


def join_remainder(weight, remainder) -> torch.Tensor:
    """The float32 master weight of a BF16 one and the 16 bits that it lacks, int16 (TE's
    `store_param_remainders`). TE rounds the BF16 weight up when the first of those bits is set, which makes
    them a negative number."""
    high = weight.view(torch.int16).int() - (remainder < 0).int()
    return (high * 65536 + (remainder.int() & 0xFFFF)).view(torch.float32)


def split_remainder(master) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 -> (BF16, int16), which `join_remainder` puts together again, bit for bit."""
    bits = master.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int32)
    remainder = torch.where(low >= 32768, low - 65536, low).to(torch.int16)
    high = ((bits - low) // 65536 + (remainder < 0).int()).to(torch.int16)
    return high.view(torch.bfloat16), remainder


# ---------------------------------------------------------------- processes and files

def on_rank0(function):
    """Call `function` on rank 0 alone; every rank returns its result, or raises its ValueError or OSError."""
    if not dist.is_initialized():
        return function()
    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def lock(run_dir) -> int:
    """Make this process the only one that trains in `run_dir`, until `unlock` or its end, however that comes
    -> what `unlock` needs. ValueError, with the other's process id, where there is one already."""
    path = Path(run_dir, ".lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode().strip() or "another process"
            os.close(descriptor)
            raise ValueError(
                f"{run_dir}: {holder} is training there; stop it first, or start a run of another name with --out-dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        # else the one before removed it meanwhile
        if path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor)):
            os.truncate(descriptor, 0)
            with contextlib.suppress(OSError):  # on a full disk: the lock is what counts
                os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
            return descriptor
        os.close(descriptor)


def unlock(run_dir, descriptor: int) -> None:
    Path(run_dir, ".lock").unlink(missing_ok=True)
    os.close(descriptor)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _dcp(action, tensors: dict, folder: Path) -> None:
    """dcp.save or dcp.load with safetensors files; a rank's OSError is raised as such on every rank."""
    if action is dcp.save:
        files = _file_numbers(tensors)
        for rank in range(dist.get_world_size()):  # rank 0's table serves all
            files |= {f"rng{rank}.{name}": 1 for name in ("torch", "host", "cuda")}
        storage = {"storage_writer": HuggingFaceStorageWriter(str(folder), files, save_distributed=True)}
    else:
        storage = {"storage_reader": HuggingFaceStorageReader(str(folder))}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            action(tensors, **storage)
    except BaseException as error:  # DCP's CheckpointException, which is no Exception, wraps what happened
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
        if causes and isinstance(causes[0], OSError):
            raise causes[0] from None
        raise


def _sync(path: Path) -> None:
    """Have a file's content, or a folder's entries, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
