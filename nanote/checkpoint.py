"""Checkpoints that survive a kill, a full disk and a change in the number of GPUs. Loading one runs no code.

    out/<run>/step-<n>/   shard-*.safetensors   weights, optimizer, FP8 state, random number generators
                          meta.json             step, options, model config, optimizer groups
                          SHA256SUMS            of every file above (sha256sum -c SHA256SUMS)

`train.py` uses `BackgroundSaver`, `find`, `read_meta` and `load`; anything else that reads a run uses the
last three. Design:

- A checkpoint is written to a hidden folder, synced and renamed, so a folder named step-<n> is always
  complete. The latest one has the highest number; there is no pointer to it that could be stale.
- Tensors are stored under plain names ("model.<parameter>", "optimizer.<parameter>.exp_avg", "fp8.<module>…")
  in safetensors files (nanote/safetensors_files.py). There is no pickle: DCP's default format keeps its index
  in one, and the `_extra_state` entries of TE are pickles, so the FP8 state is stored as plain tensors
  (fp8.get_state).
- Precision is not part of a checkpoint: weights are stored in high precision, so a run may resume with
  another FP8 recipe or none.
- Training does not wait for the disk: BackgroundSaver copies the tensors to host memory, and a thread writes
  them. Each rank copies and writes a part: of a sharded tensor its own, of the others as much as any rank.
"""
import contextlib
import fcntl
import itertools
import json
import os
import platform
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nanote import fp8, json_files, parallel, peers, safetensors_files
from nanote.dataset import sha256
from nanote.json_files import COUNT, SIZE
from nanote.models import is_file, make_model_config, model_classes, weight_count
from nanote.safetensors_files import RESTORE, stored_tensors

FORMAT = 1  # version of the checkpoint format; the first checkpoints have no such field
RECORD = {  # the line of metrics.jsonl of a step that is logged, before its evaluation
    "step": SIZE, "loss": float, "lr": float, "grad_norm": float, "skipped": COUNT, "tokens_per_s": float,
    "mfu": float | None, "peak_gib": float | None, "roofline": float | None}
META = {  # fields of meta.json; "?": optional
    "step": COUNT, "config": dict, "model": str, "model_config": dict, "tokenizer": str,
    "optimizer_groups": [{"step?": COUNT}], "fp8_weights?": [str], "torch?": str, "device?": str,
    "hf?": {"folder": str, "vocab_size": SIZE}, "record?": RECORD,
    "corpus?": {"train_sha256": str, "val_sha256": str}, "samples?": COUNT, "tokens_per_step?": SIZE}
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
# A number in the state of an optimizer is stored as a tensor of no dimensions, under a name with this ending.
NUMBER = ":number"
NUMBER_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


# ---------------------------------------------------------------- saving

def save(run_dir, step: int, *, model, optimizer, meta: dict, keep: int) -> Path:
    """Write run_dir/step-<step>, then remove all but the last `keep` checkpoints. Every rank must call it.

    `meta` must be serializable as JSON; `read_meta` returns it. On OSError (a full disk) nothing of this
    checkpoint is left, earlier ones are untouched, and the message names the last of them.
    """
    document = _document(step, model, optimizer, meta)
    return _write(Path(run_dir), step, dict(_own_parts(model, optimizer)), document, keep)


class BackgroundSaver:
    """Save checkpoints in a thread while training continues.

    `save` returns as soon as the tensors are copied to host memory. One checkpoint is written at a time, and
    a folder step-<n> is complete or absent, as with the function `save`. The copies stay allocated for the
    next checkpoint: pinned memory for tensors on a GPU, of the size of what this rank writes of weights,
    optimizer state and float32 masters.

    Several processes write together, in a process group of their own: a thread's collectives may come before
    the training's on one rank and after them on another, which would be a deadlock in one group. With
    `background` off, `save` returns when everything is written.
    """

    def __init__(self, background: bool = True):
        self.background = background
        self.group = dist.new_group(backend="gloo") if background and dist.is_initialized() else None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing, self.failures, self.copies = None, [], {}

    def reserve(self, model, optimizer) -> str:
        """Allocate the host copies before training, since pinning gigabytes of memory is slow.

        Returns "", or the reason why there is not enough memory. `save` then writes in the foreground,
        without copies.
        """
        reason = ""
        if self.background:
            try:
                self.copy_to_host(_own_parts(model, optimizer))
            except torch.OutOfMemoryError:  # of the GPU
                raise
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
            if self.group is not None:  # all processes save in the same way
                reason = parallel.reason_of_any_rank(reason, self.group)
        if reason:
            self.background, self.copies = False, {}
        return reason

    def save(self, run_dir, step: int, *, model, optimizer, meta: dict, keep: int) -> None:
        """Save like the function `save`, after the previous checkpoint. An OSError is kept for `error`."""
        self.wait()
        document = _document(step, model, optimizer, meta)
        parts = _own_parts(model, optimizer)
        if self.background:
            self.writing = self.thread.submit(
                _write, Path(run_dir), step, self.copy_to_host(parts), document, keep, self.group)
        else:
            try:
                _write(Path(run_dir), step, dict(parts), document, keep)
            except OSError as error:
                self.failures.append(error)

    def copy_to_host(self, parts) -> dict[str, tuple[torch.Tensor, list[int]]]:
        """Copy the tensors of `_own_parts` to host memory, reusing the buffers of an earlier call that fit.

        The copies are queued on the training stream. The caching allocator therefore cannot reuse the memory
        of a temporary tensor (a dequantized weight) before it is copied.
        """
        before, self.copies, copied = self.copies, {}, {}
        for name, (tensor, offsets) in parts:
            copy = before.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.copies[name] = copy.copy_(tensor, non_blocking=True)
            copied[name] = copy, offsets
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def wait(self) -> None:
        """Wait until nothing is being written. Raises errors other than OSError, which are bugs."""
        if self.writing is not None:
            error = self.writing.exception()
            self.writing = None
            if isinstance(error, OSError):
                self.failures.append(error)
            elif error is not None:
                raise error

    def error(self) -> OSError | None:
        """Return why a checkpoint was not written, as far as known; each error once. Does not wait."""
        if self.writing is not None and self.writing.done():
            self.wait()
        return self.failures.pop(0) if self.failures else None


def _document(step: int, model, optimizer, meta: dict) -> str:
    """Return the text of meta.json.

    Entries of this step come first, and override `meta`, which may have those of the checkpoint resumed from.
    """
    groups = [{k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
              for group in optimizer.param_groups]
    own = {"format": FORMAT, "step": step, "optimizer_groups": groups, "torch": torch.__version__,
           "fp8_weights": [name for name, parameter in model.named_parameters() if _in_fp8(parameter)]}
    return json.dumps(own | meta | own, indent=2, default=str) + "\n"


def _write(run_dir: Path, step: int, parts: dict, document: str, keep: int, group=None) -> Path:
    """Write run_dir/step-<step> from this rank's parts, see `_own_parts`, and the text of meta.json, without
    reading the model. `group`: the process group to use; None: the default one."""
    folder, unfinished = run_dir / f"step-{step}", run_dir / f".saving-step-{step}"

    def prepare():
        for stale in [*run_dir.glob(".saving-*"), *run_dir.glob(".removing-*")]:  # from a run that was killed
            shutil.rmtree(stale, ignore_errors=True)
        unfinished.mkdir(parents=True)  # the run's folder may have been renamed or deleted

    def finish():
        (unfinished / "meta.json").write_text(document)
        sums = "".join(f"{checksum}  {name}\n" for name, checksum in _checksums(unfinished).items())
        (unfinished / "SHA256SUMS").write_text(sums)
        for path in [unfinished / "meta.json", unfinished / "SHA256SUMS", unfinished]:
            _sync(path)
        os.rename(unfinished, folder)
        _sync(run_dir)
        for old in list_checkpoints(run_dir)[:-keep]:
            # a partly removed folder must not look like a checkpoint
            doomed = run_dir / f".removing-{old.name}"
            old.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    try:
        parallel.on_rank0(prepare, group)
        parallel.on_each_rank(lambda: _write_parts(parts, unfinished), group)
        parallel.on_rank0(finish, group)
    except OSError as error:
        if parallel.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        last = latest(run_dir)
        kept = f"the last good checkpoint is {last}" if last else "there is no earlier one"
        state = "is complete, but the clean-up after it failed" if folder.exists() else "not written"
        raise OSError(f"{folder} {state}: {error.strerror or error}; {kept}; free some space or pass "
                      "--out-dir on another disk") from error
    return folder


def _write_parts(parts: dict, folder: Path) -> None:
    """Write and sync this rank's safetensors files, under the names that DCP uses."""
    numbers = safetensors_files.file_numbers(parts)
    files = max(numbers.values())
    for number in sorted(set(numbers.values())):
        path = folder / f"shard-{parallel.rank() + 1:05}-model-{number:05}-of-{files:05}.safetensors"
        of_file = {name: part for name, part in parts.items() if numbers[name] == number}
        safetensors_files.write_file(path, of_file)
        _sync(path)


# ---------------------------------------------------------------- what is stored

def _own_parts(model, optimizer):
    """Yield (name, (tensor, offsets)) of what this rank saves.

    Of a sharded tensor that is its part; `offsets` is the index in the whole of the part's first element.
    A tensor that all ranks have is saved by one: the one that has the fewest bytes of such tensors so far.
    """
    sizes, own_rng, places = [0] * parallel.world_size(), f"rng{parallel.rank()}.", {}
    for name, tensor, whole in _tensors(model, optimizer):
        offsets = [0] * tensor.dim()
        if isinstance(whole, DTensor):
            if id(whole) not in places:  # once for a parameter and its optimizer state: it takes time
                places[id(whole)] = _place(whole)
            offsets, is_copy = places[id(whole)]
            if is_copy or not tensor.numel():  # the first replica saves it; a small one has fewer parts
                continue
        elif not name.startswith(own_rng):  # that of other ranks is not here
            writer = sizes.index(min(sizes))
            sizes[writer] += tensor.numel() * tensor.element_size()
            if writer != parallel.rank():
                continue
        yield name, (tensor, offsets)


def _place(whole: DTensor) -> tuple[list[int], bool]:
    """Return the index of the first element of this rank's part, and whether an earlier replica saves it."""
    place = zip(whole.device_mesh.get_coordinate(), whole.placements)
    is_copy = any(replica and placement.is_replicate() for replica, placement in place)
    return list(whole.__create_chunk_list__()[0].offsets), is_copy


def _tensors(model, optimizer):
    """Yield (name, tensor, whole) for everything that is stored as a tensor; tied parameters once. `whole`:
    the DTensor of which the tensor is this rank's part, if it is one.

    A generator, so that float32 masters rebuilt from remainders need not all exist at once.
    """
    names = {}  # {id of the tensor that the optimizer has: (name, tensor)}
    for name, value in _weights(model).items():
        if id(parallel.local(value)) not in names:
            names[id(parallel.local(value))] = name, value
            yield f"model.{name}", _plain(parallel.local(value)), value
    for parameter, state in _optimizer_states(optimizer):
        for key, value in state.items():
            if key == "master_param" and not _has_master(parameter):
                continue
            if key == "master_param" and value.dtype == torch.int16:
                value = join_remainder(parameter.detach(), value)
            if isinstance(value, (int, float)):
                kind = next(kind for kind in NUMBER_TYPES if isinstance(value, kind))
                key, value = f"{key}{NUMBER}", torch.tensor(value, dtype=NUMBER_TYPES[kind])
            if isinstance(value, torch.Tensor):
                name, whole = names[id(parameter)]
                is_part = value.shape == parallel.local(whole).shape
                yield f"optimizer.{name}.{key}", _plain(value), whole if is_part else None
    yield from ((f"fp8.{name}", value, None) for name, value in fp8.get_state(model).items())
    yield from ((f"rng{parallel.rank()}.{name}", value, None) for name, value in _rng_state().items())


def check_storable(name: str, model) -> None:
    """ValueError if a checkpoint cannot hold all state of the user's own model. `name`: of --model."""
    for key, value in _weights(model).items():
        if value.dtype not in safetensors_files.TYPES:
            how = "torch.view_as_real of it" if value.is_complex() else "it as float32"
            raise ValueError(f"--model {name}: {key} is {value.dtype}, which a checkpoint cannot hold; keep "
                             f"{how}, or register it with persistent=False")
    for module in model.modules():
        library = type(module).get_extra_state.__module__.partition(".")[0]
        if library not in ("torch", "transformer_engine", "te_reference"):
            raise ValueError(f"--model {name}: a checkpoint does not hold what {type(module).__name__}."
                             "get_extra_state() returns; keep it in a buffer (register_buffer)")


def _weights(model) -> dict[str, torch.Tensor]:
    """Return the tensors of model.state_dict() without those of get_extra_state().

    It is not called: in each module of TE it waits for the GPU and pickles the FP8 state.
    """
    inherited = torch.nn.Module.get_extra_state
    with contextlib.ExitStack() as patches:
        for kind in {type(module) for module in model.modules()}:
            if kind.get_extra_state is not inherited:  # state_dict() skips the inherited method
                patches.enter_context(mock.patch.object(kind, "get_extra_state", inherited))
        weights = model.state_dict(keep_vars=True)
    return {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}


def _plain(tensor) -> torch.Tensor:
    """Return a contiguous tensor that safetensors can hold; FP8 weights of TE are dequantized."""
    tensor = tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor
    return tensor.detach().contiguous()


def _in_fp8(parameter) -> bool:
    return hasattr(parameter, "_quantizer") or hasattr(parameter, "fp8_owner")  # TE; te_reference


def _has_master(parameter) -> bool:
    """Return whether the optimizer trains a float32 master of the parameter.

    TE's FusedAdam allocates one for a float32 parameter as well, but updates only the parameter: that master
    keeps its initial value.
    """
    return parameter.dtype != torch.float32 or _in_fp8(parameter)


def _optimizer_states(optimizer):
    """Return (parameter, state) pairs; torch numbers the parameters of all groups consecutively."""
    peers.gather_state(optimizer)
    found = []
    for part in parts_of(optimizer):
        states = part.state_dict()["state"]
        parameters = itertools.chain.from_iterable(group["params"] for group in part.param_groups)
        found += [(p, states[number]) for number, p in enumerate(parameters) if number in states]
    return found


def parts_of(optimizer) -> list:
    """Return the optimizers that an optimizer is made of, see nanote/optimizers.py."""
    return list(getattr(optimizer, "parts", [optimizer]))


def join_remainder(weight, remainder) -> torch.Tensor:
    """Rebuild a float32 master weight from a BF16 weight and its low 16 bits (TE's `store_param_remainders`).

    TE rounds the BF16 weight up if the highest bit of the int16 remainder is set, so a negative remainder
    means that the high half is one too large.
    """
    high = weight.view(torch.int16).int() - (remainder < 0).int()
    return (high * 65536 + (remainder.int() & 0xFFFF)).view(torch.float32)


def split_remainder(master) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 into (BF16, int16); `join_remainder` restores it bit for bit."""
    bits = master.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int32)
    remainder = torch.where(low >= 32768, low - 65536, low).to(torch.int16)
    high = ((bits - low) // 65536 + (remainder < 0).int()).to(torch.int16)
    return high.view(torch.bfloat16), remainder


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
        reason = json_files.reason(error).removesuffix(";")
        raise ValueError(f"{folder}: the state of the random generators is damaged ({reason}); "
                         f"{RESTORE}") from error


def _host_states(text: bytes) -> tuple[tuple, tuple]:
    """Return the arguments of random.setstate and np.random.set_state.

    NumPy does not validate its state: a position outside the key crashes the process at the next random
        number.
    """
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
    """Return the run's checkpoints, oldest first."""
    steps = [path for path in Path(run_dir).glob("step-*") if is_step_name(path.name) and path.is_dir()]
    return sorted(steps, key=lambda path: int(path.name[5:]))


def is_step_name(name: str) -> bool:
    """Return whether a folder of this name is a checkpoint."""
    return re.fullmatch("step-[0-9]+", name) is not None


def latest(run_dir) -> Path | None:
    return (list_checkpoints(run_dir) or [None])[-1]


def find(path) -> Path:
    """Return the checkpoint at `path`: a step-<n> folder itself, or the latest of a run folder.

    Raises ValueError or FileNotFoundError if there is none.
    """
    path = Path(path)
    if not path.exists():
        runs = ", ".join(sorted(str(run) for run in Path("out").glob("*")))
        raise FileNotFoundError(
            f"{path}: no such run folder; runs here: {runs or 'none (python train.py makes one)'}"
        )
    if not path.is_dir():
        raise ValueError(f"{path} is a file; pass the folder of a run, such as out/tiny")
    folder = path if is_step_name(path.name) else latest(path)
    if folder is None:
        raise ValueError(f"{path} holds no checkpoint (no step-<n> folder): if a run was stopped before its "
                         "first one, start it again with train.py, without --resume; or name another run "
                         "with --out-dir")
    return folder


def read_meta(folder, model: str | None = None) -> dict:
    """Read and check meta.json of a checkpoint: SHA-256 of every file, fields, size of the model described.

    `model` is path/to/file.py:Class for a model of the user's own, loaded by models.load_file. It replaces
    the name in meta.json, since the file may have moved.

    Raises ValueError, naming the file, if anything is wrong or the format is newer than this version
    supports.
    """
    folder = Path(folder)
    return parallel.on_rank0(lambda: _read_meta(folder, model))


def _read_meta(folder: Path, model: str | None) -> dict:
    problem = _damage(folder)
    if problem:
        older = [path for path in list_checkpoints(folder.parent) if path != folder and _is_valid(path)]
        advice = "no other checkpoint of this run is whole"
        if older:
            advice = f"the one before it, {older[-1]}, is whole: remove {folder} to go on from there"
        raise ValueError(f"damaged checkpoint: {problem}; {advice}")
    listed = _listed_checksums(folder)
    for path in folder.glob("*.safetensors"):
        if path.name not in listed:
            raise ValueError(f"{path}: is not listed in SHA256SUMS, so it is not part of the checkpoint, but "
                             "would be loaded with it; remove this file")
    path = folder / "meta.json"
    advice = f"restore it from a copy, or remove {folder} to use the checkpoint before it"
    version = json_files.read(path, {"format?": COUNT}, advice).get("format", 0)
    if version > FORMAT:
        raise ValueError(f"{folder} is of format {version}, which a newer version of nanoTE wrote; "
                         f"this one reads formats up to {FORMAT}: update it, or use another run")
    meta = json_files.read(path, META, advice)
    if model is not None and is_file(model) and is_file(meta["model"]):
        meta["model"] = meta["config"]["model"] = model
    json_files.check(meta, {"model_config": model_classes(meta["model"])[1]}, path, advice)
    _check_size(folder, meta)
    return meta


def _check_size(folder: Path, meta: dict) -> None:
    """Refuse a meta.json that describes a larger model than is stored: building it could exhaust memory."""
    if is_file(meta["model"]):
        return  # only the user's code knows its size
    try:
        needed = weight_count(make_model_config(meta["model"], meta["model_config"] | {"use_fp8": False}))
    except ValueError as error:
        raise ValueError(f"{folder / 'meta.json'}: model_config: {error}") from error
    tensors = stored_tensors(folder).items()
    stored = sum(entry.size.numel() for name, entry in tensors if name.startswith("model."))
    if needed > stored:
        raise ValueError(f"{folder / 'meta.json'}: model_config describes a model of {needed:,} weights or "
                         f"more, but {stored:,} are stored; restore the file that was written with them")


def _damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None if they are as written.

    Raises OSError if they cannot be read, which does not mean that they are damaged.
    """
    try:
        expected = _listed_checksums(folder)
    except ValueError as error:
        return str(error)
    found = _checksums(folder)
    for name, checksum in expected.items():
        if name not in found:
            return f"{folder / name} is {'not a regular file' if (folder / name).exists() else 'missing'}"
        if found[name] != checksum:
            return f"{folder / name}: checksum mismatch: expected SHA-256 {checksum}, got {found[name]}"
    return None if "meta.json" in expected else f"{folder / 'SHA256SUMS'} does not list meta.json"


def _is_valid(folder: Path) -> bool:
    try:
        return _damage(folder) is None
    except OSError:
        return False


def _listed_checksums(folder: Path) -> dict[str, str]:
    """Return {file name: SHA-256} from SHA256SUMS. ValueError if it is missing or damaged."""
    listing = folder / "SHA256SUMS"
    try:
        text = json_files.read_bytes(listing, "every checkpoint has one").decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{listing}: not UTF-8 ({error})") from None
    lines = text.split("\n")  # splitlines would also split at other characters
    for number, line in enumerate(lines, 1):
        if not re.fullmatch("[0-9a-f]{64}  .+", line):
            raise ValueError(f"{listing}:{number}: not a SHA-256, two spaces and a file name")
    return {line[66:]: line[:64] for line in lines}


def _checksums(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        return dict(zip((path.name for path in paths), pool.map(sha256, paths)))


# ---------------------------------------------------------------- loading

def load(folder, meta: dict, model, optimizer=None) -> None:
    """Load a checkpoint into `model` and, to continue training, `optimizer`, FP8 state and random generators.

    `meta` is the result of read_meta(folder), so nothing is loaded unchecked. The precision and FP8 recipe of
    the model may differ from those that were saved. Every rank must call it.

    Raises ValueError for a tensor that is missing, unknown or of another shape.
    """
    folder = Path(folder)
    if optimizer is not None:
        peers.gather_state(optimizer)  # its state_dict, which is read below, has to be whole
    own_rng = f"rng{parallel.rank()}."
    wanted = ("model.",) if optimizer is None else ("model.", "optimizer.", "fp8.", own_rng)
    targets = {f"model.{name}": value for name, value in _weights(model).items()}
    tensors = {name: parallel.empty_like(targets.get(_parameter_of(name)), entry.size, entry.properties.dtype)
               for name, entry in stored_tensors(folder).items() if name.startswith(wanted)}
    # {id: name under which it is stored}: tied parameters are stored once, under the first name
    stored_names = {id(parallel.local(value)): name for name, value in reversed(targets.items())}
    _check_architecture(folder, tensors, targets, set(stored_names.values()))
    _check_optimizer_state(folder, tensors, targets)
    safetensors_files.load(tensors, folder)
    tensors = {name: parallel.local(value) for name, value in tensors.items()}
    targets = {name: parallel.local(value) for name, value in targets.items()}
    drop_stale_masters(tensors, meta)

    if optimizer is not None:
        # before the weights: weights kept in FP8 are quantized with its scales
        fp8.set_state(model, _with_prefix(tensors, "fp8."))
    with torch.no_grad():
        for name in stored_names.values():
            master = tensors.get(f"optimizer.{name.removeprefix('model.')}.master_param")
            # a float32 run has no masters: its weights are those of a BF16 or FP8 run, if it had any
            takes_master = master is not None and not _has_master(targets[name])
            targets[name].copy_(master if takes_master else tensors[name])
    if optimizer is None:
        return
    parameter_names = {id_: name.removeprefix("model.") for id_, name in stored_names.items()}
    _load_optimizer(optimizer, meta["optimizer_groups"], _with_prefix(tensors, "optimizer."),
                    _with_prefix(tensors, "model."), parameter_names)
    rng = _with_prefix(tensors, own_rng)
    if rng:
        _set_rng_state(folder, rng)
    else:  # more processes than when it was saved: no state for this rank
        torch.manual_seed(torch.initial_seed() + meta["step"] * 100_003 + parallel.rank())


def _parameter_of(name: str) -> str:
    """Return "model.<parameter>" for the name of a stored weight or of a tensor of its optimizer state."""
    if name.startswith("optimizer."):
        return f"model.{name.removeprefix('optimizer.').rpartition('.')[0]}"
    return name


def _with_prefix(tensors: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _check_architecture(folder: Path, tensors: dict, targets: dict, expected: set[str]) -> None:
    """Raise ValueError unless the stored weights have the names and shapes of the model's."""
    for name in sorted(expected | {name for name in tensors if name.startswith("model.")}):
        stored, needed = (tuple(tensor.shape) if tensor is not None else "absent"
                          for tensor in (tensors.get(name), targets.get(name)))
        if stored != needed:
            raise ValueError(
                f"{folder} is of another architecture: {name.removeprefix('model.')} is {stored} in the "
                f"checkpoint and {needed} in the model; build the model from the checkpoint's meta.json"
            )
        dtypes = tensors[name].dtype, targets[name].dtype
        if dtypes[0] != dtypes[1] and not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(f"{folder}: {name} is {dtypes[0]}, but {dtypes[1]} in the model; give it the "
                             f"type that was saved, or {RESTORE}")


def _check_optimizer_state(folder: Path, tensors: dict, targets: dict) -> None:
    """Raise ValueError if optimizer state is incomplete or does not have the shape of its parameter."""
    for name in (name for name in tensors if name.startswith("optimizer.")):
        parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
        if f"model.{parameter}" not in targets:
            continue
        shape, needed = tuple(tensors[name].shape), tuple(targets[f"model.{parameter}"].shape)
        if shape != needed and key in (*MOMENTS, "master_param", "momentum_buffer"):
            raise ValueError(f"{folder}: {name} is {shape}, its parameter {needed}; {RESTORE}")
        if key in MOMENTS and not all(f"optimizer.{parameter}.{moment}" in tensors for moment in MOMENTS):
            raise ValueError(f"{folder}: of {' and '.join(MOMENTS)} of {parameter} one is missing; {RESTORE}")


def _load_optimizer(optimizer, stored_groups: list[dict], tensors: dict, weights: dict, names: dict) -> None:
    """Restore the optimizer state.

    Args:
        tensors, weights: stored optimizer state and model weights, by name.
        names: {id(parameter): name}.
    """
    for part in parts_of(optimizer):
        count = len(part.param_groups)
        load = _load_adam if hasattr(part, "master_weights") else _load_tensors
        load(part, stored_groups[:count], tensors, weights, names)
        stored_groups = stored_groups[count:]


def _load_tensors(optimizer, stored_groups: list[dict], tensors: dict, weights: dict, names: dict) -> None:
    """Restore the state of any optimizer; tensors keep their dtype, unlike in torch's load_state_dict.

    A group keeps the learning rate and weight decay of this run; its other numbers, such as a step count, are
    restored.
    """
    for group, stored_group in zip(optimizer.param_groups, stored_groups):
        for key, value in stored_group.items():
            is_number = isinstance(group.get(key), (int, float)) and isinstance(value, (int, float))
            if is_number and key not in ("lr", "weight_decay", "lr_factor"):
                group[key] = type(group[key])(value)
        for parameter in group["params"]:
            state, name = optimizer.state[parameter], names[id(parameter)]
            stored = _with_prefix(tensors, f"{name}.").items()
            stored = {key: value for key, value in stored if "." not in key}
            if "master_param" in state:  # absent from the checkpoint of a float32 run
                stored.setdefault("master_param", weights[name].float())
            for key, value in stored.items():
                if key.endswith(NUMBER):
                    state[key.removesuffix(NUMBER)] = value.item()
                elif isinstance(state.get(key), torch.Tensor):
                    state[key].copy_(value)
                else:  # torch's optimizers count steps on the CPU
                    state[key] = value.to("cpu" if key == "step" else parameter.device)


def _load_adam(optimizer, stored_groups: list[dict], tensors: dict, weights: dict, names: dict) -> None:
    """Restore the state of FusedAdam or FastAdam; see `_load_optimizer`."""
    target = optimizer.state_dict()
    for group, stored in zip(target["param_groups"], stored_groups):
        if "step" in stored:  # everything else comes from the options of this run
            on_device = getattr(optimizer, "capturable", False)
            device = optimizer.param_groups[0]["params"][0].device
            count = torch.tensor([stored["step"]], dtype=torch.int, device=device)
            group["step"] = count if on_device else stored["step"]
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    copies = hasattr(optimizer, "prepare")  # FastAdam copies to its own tensors, from host memory, too
    target["state"] = {}
    for number, parameter in enumerate(parameters):
        name = names[id(parameter)]
        state = {key: tensors[f"{name}.{key}"] for key in MOMENTS if f"{name}.{key}" in tensors}
        if state and optimizer.master_weights and _has_master(parameter):
            state["master_param"] = tensors.get(f"{name}.master_param", weights[name]).float()
            if getattr(optimizer, "store_param_remainders", False) and parameter.dtype == torch.bfloat16:
                rounded, state["master_param"] = split_remainder(state["master_param"])
                with torch.no_grad():
                    parameter.copy_(rounded)
        if state:
            if not copies:
                state = {key: value.to(parameter.device) for key, value in state.items()}
            target["state"][number] = state
    optimizer.load_state_dict(target)


def drop_stale_masters(tensors: dict, meta: dict) -> None:
    """Remove master weights of float32 parameters from `tensors`, in place.

    A float32 parameter is its own master. Earlier versions stored such masters after a resume and never
    updated them. The exception is a weight kept in FP8: it may be stored as float32 too (dequantized), and
    its master is the exact value.
    """
    in_fp8 = meta.get("fp8_weights")
    if in_fp8 is None and meta.get("config", {}).get("fp8_param"):
        return  # from before meta.json listed the FP8 weights
    masters = [name for name in tensors if name.startswith("optimizer.") and name.endswith(".master_param")]
    for name in masters:
        parameter = name.removeprefix("optimizer.").removesuffix(".master_param")
        weight = tensors.get(f"model.{parameter}")
        if weight is not None and weight.dtype == torch.float32 and parameter not in (in_fp8 or []):
            del tensors[name]


# ---------------------------------------------------------------- locks and files

def lock(run_dir) -> int:
    """Lock `run_dir`, so that no second process trains there; return a descriptor for `unlock`.

    The operating system releases the lock when the process ends for any reason. Raises ValueError, naming the
    other process, if the lock is taken, and for links among the files that training writes.
    """
    _refuse_links(Path(run_dir))
    path = Path(run_dir, ".lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode().strip() or "another process"
            os.close(descriptor)
            raise ValueError(f"{run_dir}: {holder} is training there; stop it first, or start a run of "
                             "another name with --out-dir") from None
        except OSError:  # a file system without locks
            pass
        # otherwise the previous holder has removed the file in the meantime: try again
        if path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor)):
            os.truncate(descriptor, 0)
            with contextlib.suppress(OSError):  # a full disk; the lock itself is held
                os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
            return descriptor
        os.close(descriptor)


def _refuse_links(run_dir: Path) -> None:
    """Raise ValueError for a symbolic or hard link in a run's folder: training would write to its target.

    Checkpoints may be links, to another disk: they are only read, renamed and removed.
    """
    for path in [*run_dir.iterdir(), *run_dir.glob("profile/*")]:
        if path.name.startswith(("step-", ".removing-step-")):
            continue
        is_hard_link = path.is_file() and path.stat().st_nlink > 1
        if path.is_symlink() or is_hard_link or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path}: a link or a special file, and training would write to its target; "
                             f"remove it, or train in a copy of the folder, made with cp -rL {run_dir} COPY")


def unlock(run_dir, descriptor: int) -> None:
    Path(run_dir, ".lock").unlink(missing_ok=True)
    os.close(descriptor)


def _sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
