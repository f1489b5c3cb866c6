"""Save and resume a run: weights, optimizer, FP8 state and random number generators.

- A checkpoint is a folder step-<n> of shard-*.safetensors, meta.json (step, options, model) and SHA256SUMS,
  written to a hidden folder, synced and renamed: it is always complete. No pickle is read or written.
- Tensors are named "model.<parameter>", "optimizer.<parameter>.exp_avg", "fp8.<module>…", "rng<rank>.torch".
- A run may resume with another FP8 recipe, since weights are stored in high precision, and on another number
  of ranks: each writes its part, and torch.distributed.checkpoint (DCP) reads any parts.
"""
import contextlib
import fcntl
import itertools
import json
import os
import random
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from nanote import parallel, recipes
from nanote.tokens import sha256

FORMAT = 1  # version of the format
NUMBER = ":number"  # ends the name of a number in an optimizer's state, which is stored as a 0-d tensor


def step_of(folder) -> int | None:
    """Return the step of a checkpoint's folder, None for a folder of another name."""
    found = re.fullmatch("step-([0-9]+)", Path(folder).name)
    return int(found[1]) if found else None


def list_checkpoints(run_dir) -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    check_readable(run_dir)
    folders = [path for path in Path(run_dir).glob("step-*") if path.is_dir() and step_of(path) is not None]
    return sorted(folders, key=step_of)


def latest(run_dir) -> Path | None:
    return (list_checkpoints(run_dir) or [None])[-1]


def last_good(run_dir, last_step: int, skipped=()) -> Path | None:
    """Return the newest checkpoint whose following step is done, up to `last_step`, and was not `skipped`."""
    good = [folder for folder in list_checkpoints(run_dir)
            if step_of(folder) < last_step and step_of(folder) + 1 not in skipped]
    return (good or [None])[-1]


def find(path) -> Path:
    """Return the checkpoint at `path`: a step-<n> folder itself, or the latest of a run folder."""
    check_readable(path)
    folder = Path(path) if step_of(path) is not None else latest(path)
    if folder is None or not folder.is_dir():
        raise ValueError(f"{path}: holds no checkpoint; name another run, or train without --resume")
    return folder


def check_readable(folder) -> None:
    """Raise PermissionError if the user has no right to read a folder, where pathlib finds it empty."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            os.listdir(folder)
            os.stat(os.path.join(folder, "."))  # needs the right to search the folder
        except PermissionError as error:
            raise PermissionError(f"{folder}: cannot be read ({error.strerror}); change its rights, or name "
                                  "another run") from None


class Saver:
    """Save checkpoints in a thread, on every rank. Kept are the last `keep`, and an older `last_good`."""

    def __init__(self, run_dir, keep: int):
        self.run_dir, self.keep, self.failures, self.writing = Path(run_dir), keep, [], None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        # in the training's group, a thread's collectives could come in another order on each rank
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, step: int, model, optimizer, meta: dict, skipped=()) -> None:
        """Save a checkpoint. `meta`: of the run, for meta.json; `skipped`: its steps that were not finite."""
        self.wait()
        groups = [{key: value.item() if isinstance(value, torch.Tensor) else value
                   for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        meta = meta | {"format": FORMAT, "step": step, "torch": torch.__version__, "optimizer_groups": groups}
        optimizer.gather_state()
        tensors, offsets = {}, {}
        for name, tensor, offsets[name] in _own_parts(model, optimizer):
            # on the training stream: a temporary tensor's memory is not used again before it is copied
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            tensors[name] = host.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.writing = self.thread.submit(self._write, tensors, offsets, meta, set(skipped))

    def wait(self) -> None:
        """Wait until nothing is being written. Raises errors other than OSError, which are bugs."""
        if self.writing is not None:
            self.writing.result()
    close = wait

    def error(self) -> OSError | None:
        """Return why a checkpoint was not written, each error once, if no later one was. Does not wait."""
        return self.failures.pop(0) if self.failures else None

    def _write(self, tensors: dict, offsets: dict, meta: dict, skipped) -> None:
        folder = self.run_dir / f"step-{meta['step']}"
        unfinished = self.run_dir / f".saving-{folder.name}"
        try:
            parallel.on_rank0(lambda: self._prepare(unfinished), self.group)
            parallel.on_each_rank(lambda: _write_shard(unfinished, tensors, offsets), self.group)
            parallel.on_rank0(lambda: self._finish(unfinished, folder, meta, skipped), self.group)
            self.failures.clear()
        except OSError as error:
            if parallel.rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            self.failures.append(OSError(f"{folder}: not written: {error.strerror or error}; free some space "
                                         "or pass --out-dir on another disk"))

    def _prepare(self, unfinished: Path) -> None:
        for stale in self.run_dir.glob(".*ing-step-*"):  # of a run that was killed
            shutil.rmtree(stale, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def _finish(self, unfinished: Path, folder: Path, meta: dict, skipped) -> None:
        """Complete a checkpoint, and only then remove older ones."""
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=2, default=str) + "\n")
        sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(unfinished.iterdir())]
        (unfinished / "SHA256SUMS").write_text("".join(sums))
        for path in (unfinished / "meta.json", unfinished / "SHA256SUMS", unfinished):
            _sync(path)
        unfinished.rename(folder)
        _sync(self.run_dir)
        good = last_good(self.run_dir, meta["step"], skipped)
        for old in list_checkpoints(self.run_dir)[:-self.keep]:
            if old != good:
                doomed = old.rename(old.with_name(f".removing-{old.name}"))  # never half a checkpoint
                shutil.rmtree(doomed, ignore_errors=True)


def _write_shard(folder: Path, tensors: dict, offsets: dict) -> None:
    """Write this rank's file in DCP's format, whose own writer copies all tensors twice and holds the GIL."""
    path = folder / f"shard-{parallel.rank() + 1:05}-model-00001-of-00001.safetensors"
    places = json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": places}
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(0o644)  # safetensors makes files that only their owner can read
    _sync(path)


def _sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _own_parts(model, optimizer):
    """Yield (name, tensor, offsets) of what this rank saves; offsets: where a part begins in the whole.
    A tensor that all ranks have is saved by the one with the fewest bytes of such tensors so far."""
    sizes, own_rng = [0] * parallel.world_size(), f"rng{parallel.rank()}."
    for name, tensor, whole in _tensors(model, optimizer):
        offsets = [0] * tensor.dim()
        if isinstance(whole, DTensor):
            place = zip(whole.device_mesh.get_coordinate(), whole.placements)
            is_copy = any(replica and placement.is_replicate() for replica, placement in place)
            if is_copy or not tensor.numel():  # the first replica saves it; a small one has fewer parts
                continue
            offsets = list(whole.__create_chunk_list__()[0].offsets)
        elif not name.startswith(own_rng):
            writer = sizes.index(min(sizes))
            sizes[writer] += tensor.nbytes
            if writer != parallel.rank():
                continue
        yield name, tensor.detach().contiguous(), offsets


def _tensors(model, optimizer):
    """Yield (name, tensor, whole) of all that is stored; whole: the DTensor of which it is a part."""
    weights = weights_of(model)
    for name, value in weights.values():
        yield f"model.{name}", parallel.local_part(value), value
    for parameter, state in optimizer.state.items():
        name, whole = weights[id(parameter)]
        for key, value in state.items():
            if key == "master_param" and not _has_master(parameter):
                continue
            if key == "master_param" and value.dtype == torch.int16:
                value = join_remainder(parameter.detach(), value)
            if isinstance(value, int | float):
                key, value = f"{key}{NUMBER}", torch.from_numpy(np.array(value))
            if isinstance(value, torch.Tensor):
                yield f"optimizer.{name}.{key}", value, whole if value.shape == parameter.shape else None
    yield from ((f"fp8.{name}", value, None) for name, value in recipes.get_state(model).items())
    yield from ((f"rng{parallel.rank()}.{name}", value, None) for name, value in _rng_state().items())


def weights_of(model) -> dict[int, tuple[str, torch.Tensor]]:
    """Return {id of this rank's part: (name, tensor)} of parameters and buffers, tied ones once."""
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        is_fp8_state = re.search(r"\.(_extra_state$|scaling_(fwd|bwd)\.)", name)  # see recipes.get_state
        if isinstance(value, torch.Tensor) and not is_fp8_state:
            weights.setdefault(id(parallel.local_part(value)), (name, value))
    return weights


def _has_master(parameter) -> bool:
    """Return whether a float32 master is trained: not of float32 weights, for which TE allocates one too."""
    return parameter.dtype != torch.float32


def join_remainder(weight, remainder) -> torch.Tensor:
    """Return the float32 master of a BF16 weight and its int16 remainder (TE's `store_param_remainders`)."""
    return ((weight.view(torch.int16).int() << 16) + remainder).view(torch.float32)


def split_remainder(master) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 into (BF16, int16); `join_remainder` restores it bit for bit."""
    bits = master.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    return ((bits - remainder) >> 16).to(torch.int16).view(torch.bfloat16), remainder


def _rng_state() -> dict[str, torch.Tensor]:
    numpy_state = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    host = json.dumps([random.getstate(), numpy_state]).encode()
    state = {"torch": torch.get_rng_state(), "host": torch.frombuffer(bytearray(host), dtype=torch.uint8)}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    (version, numbers, gauss), numpy_state = json.loads(state["host"].numpy().tobytes())
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(numpy_state))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def read_meta(folder) -> dict:
    """Return meta.json of a checkpoint. ValueError if it is damaged, or of a newer format."""
    path = Path(folder, "meta.json")
    verify(path.parent, [path.name])
    with _errors_naming(path):
        meta = json.loads(path.read_text())
        if meta.get("format", 0) > FORMAT:
            raise ValueError(f"format {meta['format']} is of a newer version of nanoTE; update it")
    return meta


def load(folder, model, optimizer=None) -> dict:
    """Load the weights, and with an optimizer everything; return meta.json. Checks all files. Collective."""
    folder = Path(folder)
    parallel.on_rank0(lambda: verify(folder))
    meta, weights, rng = read_meta(folder), weights_of(model), f"rng{parallel.rank()}."
    prefixes = ("model.",) if optimizer is None else ("model.", "optimizer.", "fp8.", rng)
    stored = read_tensors(folder, prefixes, dict(weights.values()))
    needed = {name: tuple(value.shape) for name, value in weights.values()}
    found = {name: tuple(value.shape) for name, value in with_prefix(stored, "model.").items()}
    for name in sorted(needed.keys() | found.keys()):
        if needed.get(name) != found.get(name):
            raise ValueError(f"{folder}: {name} is {found.get(name, 'absent')} there and "
                             f"{needed.get(name, 'absent')} in the model; build the model of its meta.json")
    stored = {name: parallel.local_part(value) for name, value in stored.items()}
    with torch.no_grad(), _errors_naming(folder):
        if optimizer is not None:
            recipes.set_state(model, with_prefix(stored, "fp8."))
        for name, value in weights.values():
            weight = stored[f"model.{name}"]
            # not rounded to BF16, nor to FP8 as the weights of a run of 0.2 with --fp8-param
            master = stored.get(f"optimizer.{name}.master_param", weight)
            parallel.local_part(value).copy_(master)
        if optimizer is not None:
            load_optimizer(optimizer, meta["optimizer_groups"], stored, weights)
            if f"{rng}torch" in stored:  # unless there are more ranks now
                _set_rng_state(with_prefix(stored, rng))
    return meta


def read_tensors(folder, prefixes=("model.",), like={}) -> dict[str, torch.Tensor]:
    """Read the tensors whose names begin with one of `prefixes` to host memory. Collective.
    `like`: {parameter: tensor of a model}; of a sharded one, only this rank's part is read."""
    with _errors_naming(f"{folder}/*.safetensors"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader, tensors = dcp.HuggingFaceStorageReader(str(folder)), {}
        for name, entry in reader.read_metadata().state_dict_metadata.items():
            if name.startswith(prefixes):
                weight = like.get(re.sub(r"^model\.(.*)|optimizer\.(.*)\.[^.]*$", r"\1\2", name))
                tensors[name] = parallel.empty_on_host(weight, entry.size, entry.properties.dtype)
        dcp.load(tensors, storage_reader=reader)
    return tensors


def load_optimizer(optimizer, stored_groups: list, tensors: dict, weights: dict) -> None:
    """Restore step counts and optimizer state, in place. weights: see `weights_of`."""
    for group, stored in zip(optimizer.param_groups, stored_groups):
        if isinstance(group.get("step"), torch.Tensor):
            group["step"].fill_(stored.get("step", 0))
        elif "step" in stored:
            group["step"] = stored["step"]  # the options of this run decide the rest
    for part in optimizer.parts:
        for parameter in itertools.chain.from_iterable(group["params"] for group in part.param_groups):
            name, _ = weights[id(parameter)]
            stored = with_prefix(tensors, f"optimizer.{name}.")
            _load_state(part, parameter, stored, tensors[f"model.{name}"])


def _load_state(part, parameter, stored: dict, weight) -> None:
    """Restore one parameter's state in one of the optimizers. weight: the parameter as it is stored."""
    state = part.state[parameter]
    if stored and not state and isinstance(part, recipes.te.optimizers.FusedAdam):  # allocates when it steps
        part.initialize_state(parameter, False)
    if not _has_master(parameter):
        stored.pop("master_param", None)
    elif "master_param" in state:
        stored.setdefault("master_param", weight.float())  # a float32 run had none
    for key, value in stored.items():
        own = state.get(key)
        if key.endswith(NUMBER):
            state[key.removesuffix(NUMBER)] = value.item()
        elif own is None:  # torch's optimizers count steps on the CPU
            state[key] = value.to("cpu" if key == "step" else parameter.device)
        elif key == "master_param" and own.dtype == torch.int16:
            rounded, remainder = split_remainder(value)
            parameter.copy_(rounded)
            own.copy_(remainder)
        else:
            own.copy_(value)


def with_prefix(tensors: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def verify(folder: Path, names=None) -> None:
    """Raise ValueError, naming the file, unless every file, or those of `names`, is as it was written."""
    listing = (folder / "SHA256SUMS").read_text(errors="replace")
    expected = {name: checksum for checksum, name in re.findall(r"^(\w{64})  (.+)$", listing, re.MULTILINE)}
    names = names or sorted({*expected, *(path.name for path in folder.glob("*.safetensors"))})
    paths = [folder / name for name in names]
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        found = pool.map(lambda path: path.is_file() and path.stat().st_size and sha256(path), paths)
    for path, checksum in zip(paths, found):
        if not checksum or checksum != expected.get(path.name):
            raise ValueError(f"{path}: damaged, or not in SHA256SUMS; restore it, or remove {folder}")


@contextlib.contextmanager
def _errors_naming(path):
    """Turn what a malformed file leads to, here or in a library, into a ValueError that names the file."""
    try:
        yield
    except (OSError, torch.OutOfMemoryError):
        raise
    except (Exception, dcp.CheckpointException) as error:  # the latter has the errors of the ranks
        error = next(iter(getattr(error, "failures", {}).values()), [error])[0]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{path}: not valid in a checkpoint: {reason}; restore it from a copy") from error


def lock(run_dir):
    """Lock a run's folder for this process until the returned file is closed. Collective."""
    file = open(Path(run_dir, ".lock"), "w")

    def take():
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{run_dir}: another process trains there; stop it, or pass --out-dir") from None
        except OSError:  # a file system without locks
            pass

    parallel.on_rank0(take)
    return file
