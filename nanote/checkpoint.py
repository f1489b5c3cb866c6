"""Save and resume a run: write its state to folders, find, verify and read them.

- A checkpoint is a folder step-<n> of shard-*.safetensors, meta.json (step, options, model) and SHA256SUMS.
  No pickle is read or written.
- Saving copies the tensors to host memory; a thread writes them to a hidden folder, syncs it to disk and
  renames it. So the run trains on meanwhile, and a checkpoint is always complete.
- A run may resume with another FP8 recipe, since weights are stored in high precision, and on another number
  of ranks: each writes its part, and torch.distributed.checkpoint (DCP) reads any parts.

nanote/training_state.py says which tensors there are.
"""
import contextlib
import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from nanote import adapters, parallel, recipes, training_state
from nanote.tokens import sha256
from nanote.training_state import under_prefix

FORMAT = 1  # version of the format


# ---------------------------------------------------------------- the checkpoints of a run

def step_of(folder) -> int | None:
    """Return the step of a checkpoint's folder, None for a folder of another name."""
    prefix, _, step = Path(folder).name.partition("-")
    return int(step) if prefix == "step" and step.isdecimal() else None


def is_checkpoint(folder) -> bool:
    """Return whether a folder's name is that of a checkpoint, step-<n>. This tests only the name: it tells a
    checkpoint from a run's folder, or from a folder of Hugging Face."""
    return step_of(folder) is not None


def list_checkpoints(run_dir) -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    check_readable(run_dir)
    folders = [path for path in Path(run_dir).glob("step-*") if path.is_dir() and is_checkpoint(path)]
    return sorted(folders, key=step_of)


def latest(run_dir) -> Path | None:
    """Return the run's newest checkpoint, None if there is none."""
    checkpoints = list_checkpoints(run_dir)
    return checkpoints[-1] if checkpoints else None


def last_good(run_dir, last_step: int, skipped=()) -> Path | None:
    """Return the newest checkpoint whose next step is done and was finite.

    last_step: the last step that is done. skipped: the steps that were not finite.
    """
    for folder in reversed(list_checkpoints(run_dir)):
        next_step = step_of(folder) + 1
        if next_step <= last_step and next_step not in skipped:
            return folder
    return None


def find(path) -> Path:
    """Return the checkpoint at `path`: a step-<n> folder itself, or the latest of a run folder."""
    check_readable(path)
    folder = Path(path) if is_checkpoint(path) else latest(path)
    if folder is None or not folder.is_dir():
        run = find_run_near(path)
        example = f" ({run}, for example)" if run else ""
        raise ValueError(f"{path}: holds no checkpoint; name a run that has one{example}, or train one: "
                         "train.py without --resume")
    return folder


def find_run_near(path) -> Path | None:
    """Return a folder with a checkpoint among the parent of `path`, the folders in it and those beside it."""
    parent = Path(path).parent
    for folder in (parent, *sorted(Path(path).glob("*")), *sorted(parent.glob("*"))):
        if any(is_checkpoint(step) for step in folder.glob("step-*")):
            return folder
    return None


def check_readable(folder) -> None:
    """Raise PermissionError if the user has no right to read a folder, where pathlib finds it empty."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        try:
            os.listdir(folder)
            os.stat(os.path.join(folder, "."))  # needs the right to search the folder
        except PermissionError as error:
            raise PermissionError(f"{folder}: cannot be read ({error.strerror}); change its rights, or name "
                                  "another run") from None


@contextlib.contextmanager
def locked(run_dir):
    """Lock a run's folder for this process inside the context. Collective."""
    with open(Path(run_dir, ".lock"), "w") as file:
        parallel.on_rank0(lambda: take_lock(file, run_dir))
        yield


def take_lock(file, run_dir) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{run_dir}: another process trains there; stop it, or pass --out-dir") from None
    except OSError:  # a file system without locks
        pass


# ---------------------------------------------------------------- writing

class Checkpoints:
    """Save checkpoints in a thread, on every rank. Keep the last `keep`, and `last_good` if it is older. The
    end of `with Checkpoints(...)` waits for the last one, and raises its OSError if it was not written."""

    def __init__(self, run_dir, keep: int, resumed_meta: dict | None = None):
        """resumed_meta: meta.json of the checkpoint that the run continues."""
        self.run_dir = Path(run_dir)
        self.keep = keep
        self.resumed_meta = resumed_meta or {}
        self.skipped_before = self.resumed_meta.get("skipped", [])  # steps, before the run was resumed
        self.failure = None  # the OSError of the last save, until `pop_error` returns it; the thread sets it
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing = None  # the future of the last save
        # in the training's group, a thread's collectives could come in another order on each rank
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, step: int, model, optimizer, meta: dict) -> None:
        """Copy the state of a run to host memory, and start to write it. Waits for the previous save.

        meta: the run's part of meta.json. Its "skipped" lists the steps that were not finite.
        """
        self.wait()
        if "hf" in self.resumed_meta:  # the source of an imported model
            meta = meta | {"hf": self.resumed_meta["hf"]}
        meta = meta | {"format": FORMAT, "step": step, "torch": torch.__version__,
                       "optimizer_groups": options_of_groups(optimizer)}
        optimizer.gather_state()
        tensors = {}
        offsets = {}
        for part in training_state.parts_to_write(model, optimizer):
            # on the training stream: a temporary tensor's memory is not used again before it is copied
            on_host = torch.empty(part.tensor.shape, dtype=part.tensor.dtype, pin_memory=part.tensor.is_cuda)
            tensors[part.name] = on_host.copy_(part.tensor, non_blocking=True)
            offsets[part.name] = part.offsets
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.writing = self.thread.submit(self._write, tensors, offsets, meta)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises errors other than OSError, which are bugs."""
        if self.writing is not None:
            self.writing.result()

    def __enter__(self):
        return self

    def __exit__(self, error_type, *_) -> None:
        self.wait()
        if self.failure and error_type is None:  # else the error inside is the one to show
            raise self.failure

    def pop_error(self, wait: bool = False) -> OSError | None:
        """Return the error of the last checkpoint if it was not written, and forget it. wait: first wait
        until it is written."""
        if wait:
            self.wait()
        elif self.writing is not None and not self.writing.done():
            return None  # the thread may set it at this moment
        failure = self.failure
        self.failure = None
        return failure

    def _write(self, tensors: dict, offsets: dict, meta: dict) -> None:
        """Write a checkpoint to a hidden folder and rename it. Runs in the thread of every rank."""
        folder = self.run_dir / f"step-{meta['step']}"
        unfinished = self.run_dir / f".saving-{folder.name}"
        try:
            parallel.on_rank0(lambda: self._make_folder(unfinished), self.group)
            number = parallel.rank() + 1
            parallel.on_each_rank(lambda: write_shard(unfinished, number, tensors, offsets), self.group)
            parallel.on_rank0(lambda: complete(unfinished, folder, meta), self.group)
            parallel.on_rank0(lambda: self._remove_old(meta), self.group)
            self.failure = None
        except OSError as error:
            if parallel.rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            self.failure = OSError(f"{folder}: not written: {error.strerror or error}; free some space or "
                                   "pass --out-dir on another disk")

    def _make_folder(self, unfinished: Path) -> None:
        """Make a hidden folder, and remove those of a run that was killed."""
        for name in (".saving-step-*", ".removing-step-*"):
            for stale in self.run_dir.glob(name):
                shutil.rmtree(stale, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def _remove_old(self, meta: dict) -> None:
        good = last_good(self.run_dir, meta["step"], meta.get("skipped", ()))
        for old in list_checkpoints(self.run_dir)[:-self.keep]:
            if old != good:
                hidden = old.rename(old.with_name(f".removing-{old.name}"))  # never half a checkpoint
                shutil.rmtree(hidden, ignore_errors=True)


def options_of_groups(optimizer) -> list[dict]:
    """Return what meta.json has of an optimizer's parameter groups: their options and step counts."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for key, value in options.items():
            if isinstance(value, torch.Tensor):
                options[key] = value.item()
        groups.append(options)
    return groups


def write_shard(folder: Path, number: int, tensors: dict, offsets: dict) -> None:
    """Write a file with the name and metadata of PyTorch's distributed checkpoints (DCP): the one of this
    number, from 1. DCP's own writer would copy all tensors twice and hold the GIL."""
    path = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
    sharding = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    save_file(tensors, path, metadata)
    sync(path)


def save_file(tensors: dict, path: Path, metadata: dict) -> None:
    """Write a safetensors file that is new, with the permissions of other files: the library's own are those
    of a file that only its owner can read."""
    path.touch()
    mode = path.stat().st_mode  # as the umask says
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def save_weights(run_dir, weights: Iterable[tuple[str, torch.Tensor]], meta: dict) -> None:
    """Write a checkpoint of step 0 that has only weights, which are (name, tensor) pairs. Holds one gibibyte
    of them in memory, or one larger tensor."""
    folder = Path(run_dir) / "step-0"
    unfinished = folder.with_name(f".saving-{folder.name}")
    unfinished.mkdir(parents=True)
    tensors = ((f"model.{name}", weight) for name, weight in weights)
    for i, shard in enumerate(in_shards(tensors, 2**30)):
        offsets = {name: [0] * tensor.dim() for name, tensor in shard.items()}
        write_shard(unfinished, i + 1, shard, offsets)
    meta = meta | {"format": FORMAT, "step": 0, "torch": torch.__version__, "optimizer_groups": []}
    complete(unfinished, folder, meta)


def in_shards(tensors: Iterable[tuple[str, torch.Tensor]], max_size: int) -> Iterator[dict]:
    """Yield (name, tensor) pairs as a dictionary of at most `max_size` bytes, refilled each time. A larger
    tensor is alone in it."""
    shard = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_size:
            yield shard
            shard.clear()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def complete(unfinished: Path, folder: Path, meta: dict) -> None:
    """Write meta.json and the checksums beside the shards, sync everything to disk, and rename the folder."""
    (unfinished / "meta.json").write_text(json.dumps(meta, indent=2, default=str) + "\n")
    checksums = [f"{sha256(path)}  {path.name}\n" for path in sorted(unfinished.iterdir())]
    (unfinished / "SHA256SUMS").write_text("".join(checksums))
    sync(unfinished / "meta.json")
    sync(unfinished / "SHA256SUMS")
    sync(unfinished)
    unfinished.rename(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---------------------------------------------------------------- reading

def read_meta(folder) -> dict:
    """Return meta.json of a checkpoint. Raise ValueError if it is damaged, or of a newer format."""
    path = Path(folder, "meta.json")
    verify(path.parent, [path.name])
    with errors_naming(path):
        meta = json.loads(path.read_text())
        if meta.get("format", 0) > FORMAT:
            raise ValueError(f"format {meta['format']} is of a newer version of nanoTE; update it")
    return meta


def load(folder, model, optimizer=None, open_hf_folder=None) -> None:
    """Load the weights, and with an optimizer everything. Checks all files. Collective.

    open_hf_folder: tools.import_hf.open_model. It is needed for adapters whose base is a folder of Hugging
        Face.
    """
    folder = Path(folder)
    parallel.on_rank0(lambda: verify(folder))
    meta = read_meta(folder)
    remaining = training_state.weights_of(model)  # the weights that are not loaded yet
    reader = TensorReader(folder)
    base = parallel.on_rank0(lambda: adapters.find_base(folder, meta))
    if base is not None:
        stored_base = open_base(base, remaining, open_hf_folder)
        base_names = names_in_base(stored_base, remaining, reader)
        dtype = adapters.dtype_of_base(meta)
        load_base(stored_base, base_names, remaining, dtype)
        model.base_of_adapters = adapters.Base(base, meta["base"]["sha256"], base_names, dtype)
        remaining = {name: weight for name, weight in remaining.items() if name not in base_names}
    check_weights(folder, reader.entries, remaining)
    if optimizer is None:
        load_weights_only(reader, remaining)
        return
    rng = f"rng{parallel.rank()}."
    tensor_names = reader.names(("model.", "frozen.", "optimizer.", "fp8.", rng))
    stored = local_parts(reader.read(tensor_names, like=remaining))
    fp8_state = under_prefix(stored, "fp8.")
    module = recipes.find_missing_module(model, fp8_state)
    if module is not None and recipes.uses_delayed_scaling(model):
        raise ValueError(f"{folder}: has FP8 scales of {module}, a module that this model lacks; pass "
                         f"--model {meta['model']} as before, or --fp8-recipe none")
    with torch.no_grad(), errors_naming(folder):
        training_state.load_weights(remaining, stored)
        recipes.set_state(model, fp8_state)
        training_state.load_optimizer(optimizer, model, stored, meta["optimizer_groups"])
        if f"{rng}torch" in stored:  # unless there are more ranks now
            training_state.set_rng_state(under_prefix(stored, rng))


class StoredWeight(NamedTuple):
    """A weight in a file, read to host memory."""

    name: str  # in the model
    value: torch.Tensor
    master: torch.Tensor | None  # its float32 master, if one was stored


class StoredWeights(NamedTuple):
    """The weights of a checkpoint, or of a folder of Hugging Face."""

    shapes: dict[str, tuple[int, ...]]  # of each weight, by its name in the model
    read: Callable[[], Iterator[StoredWeight]]  # reads one weight at a time: the host never holds all of them


def open_weights(folder, like: dict) -> StoredWeights:
    """Open a checkpoint. like: {name: tensor} of a model; see `read_tensors`. Weights that the model lacks
    are not read. Reading is collective."""
    reader = TensorReader(folder)
    shapes = {name: tuple(entry.size) for name, entry in under_prefix(reader.entries, "model.").items()}

    def read() -> Iterator[StoredWeight]:
        for name in shapes:
            if name in like:
                yield read_weight(reader, name, like)

    return StoredWeights(shapes, read)


def read_weight(reader: "TensorReader", name: str, like: dict) -> StoredWeight:
    """Read a weight of a checkpoint and its master. like: see `read_tensors`. Collective."""
    weight_name = f"model.{name}"
    master_name = f"optimizer.{name}.master_param"
    stored_names = [weight_name]
    if master_name in reader.entries:
        stored_names.append(master_name)
    tensors = reader.read(stored_names, like)
    return StoredWeight(name, tensors[weight_name], tensors.get(master_name))


def open_base(folder: Path, weights: dict, open_hf_folder) -> StoredWeights:
    """Open the base of adapters, a checkpoint or a folder of Hugging Face. weights: {name: tensor} of the
    model. open_hf_folder: see `load`."""
    if is_checkpoint(folder):
        return open_weights(folder, like=weights)
    if open_hf_folder is None:
        raise ValueError(f"{folder}: the base is a folder of Hugging Face; pass open_hf_folder="
                         "tools.import_hf.open_model")
    stored, _ = open_hf_folder(folder, rows=weights["wte.weight"].shape[0])
    return stored


def names_in_base(base: StoredWeights, weights: dict, reader: "TensorReader") -> frozenset[str]:
    """Return the names of the weights of a model that a checkpoint of adapters lacks and their base has.

    weights: {name: tensor} of the model. reader: of the checkpoint.
    """
    in_checkpoint = under_prefix(reader.entries, "model.").keys()
    return frozenset((base.shapes.keys() & weights.keys()) - in_checkpoint)


@torch.no_grad()
def load_base(base: StoredWeights, names: frozenset[str], weights: dict, dtype: torch.dtype) -> None:
    """Copy the weights of these names from the base of adapters to a model. Collective.

    weights: {name: tensor} of the model.
    dtype: of the run's weights when it began. Each weight is rounded to it first, as it was then.
        Without this rounding a resume in a model of another dtype would not be exact.
    """
    for name, value, master in base.read():
        if name not in names:
            continue
        source = value if master is None else master
        source = parallel.sharded_like(weights[name], source.to(dtype))
        training_state.write_weight(weights[name], parallel.local_part(source))


@torch.no_grad()
def load_weights_only(reader: "TensorReader", weights: dict) -> None:
    """Copy the stored weights to those of a model, one at a time: the host never holds a second copy."""
    for name, weight in weights.items():
        names = [f"model.{name}"]
        if f"frozen.{name}.scale" in reader.entries:
            names.append(f"frozen.{name}.scale")
        stored = local_parts(reader.read(names, like=weights))
        training_state.write_weight(weight, stored[f"model.{name}"], stored.get(f"frozen.{name}.scale"))


def read_tensors(folder, prefixes=("model.",), like=None) -> dict[str, torch.Tensor]:
    """Read the tensors whose names begin with one of `prefixes` to host memory. Collective.

    like: {name: parameter} of a model. Of a sharded parameter and its optimizer state, only this rank's part
    is read, as a DTensor.
    """
    reader = TensorReader(folder)
    return reader.read(reader.names(prefixes), like)


class TensorReader:
    """Read tensors of a checkpoint by name.

    entries: {name: entry}. An entry has `size` and `properties.dtype` of a tensor.
    """

    def __init__(self, folder):
        self.path = f"{folder}/*.safetensors"  # in messages
        with errors_naming(self.path):
            self.storage = StorageReader(str(folder))
            self.entries = self.storage.metadata.state_dict_metadata

    def names(self, prefixes) -> list[str]:
        """Return the names that begin with one of `prefixes`."""
        return [name for name in self.entries if name.startswith(tuple(prefixes))]

    def read(self, names, like=None) -> dict[str, torch.Tensor]:
        """Return {name: tensor}. like: see `read_tensors`. Collective."""
        parameters = like or {}
        tensors = {}
        with errors_naming(self.path), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            for name in names:
                parameter = parameters.get(training_state.parameter_name(name))
                entry = self.entries[name]
                tensors[name] = parallel.empty_on_host(parameter, entry.size, entry.properties.dtype)
            dcp.load(tensors, storage_reader=self.storage)
        return tensors


class StorageReader(dcp.HuggingFaceStorageReader):
    """Read the headers of all files once, not in every `dcp.load`."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self.metadata = super().read_metadata()

    def read_metadata(self):
        return self.metadata


def local_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's part of each tensor."""
    return {name: parallel.local_part(tensor) for name, tensor in tensors.items()}


def check_weights(folder: Path, entries: dict, weights: dict) -> None:
    """Raise ValueError unless a checkpoint's weights have the names and shapes of the model's. entries: of
    a TensorReader."""
    found = {name: tuple(entry.size) for name, entry in under_prefix(entries, "model.").items()}
    needed = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(needed.keys() | found.keys()):
        if needed.get(name) != found.get(name):
            raise ValueError(f"{folder}: {name} is {found.get(name, 'absent')} there and "
                             f"{needed.get(name, 'absent')} in the model; build the model of its meta.json")


def verify(folder: Path, names=None) -> None:
    """Raise ValueError, naming the file, unless every file, or those of `names`, is as it was written."""
    expected = read_checksums(folder)
    if names is None:
        shards = {path.name for path in folder.glob("*.safetensors")}
        names = sorted(expected.keys() | shards)
    paths = [folder / name for name in names]
    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        found = pool.map(checksum_of, paths)
    for path, checksum in zip(paths, found):
        if checksum is None or checksum != expected.get(path.name):
            raise ValueError(f"{path}: damaged, or not in SHA256SUMS; restore it, or remove {folder}")


def read_checksums(folder: Path) -> dict[str, str]:
    """Return {file name: SHA-256} of a folder's SHA256SUMS."""
    checksums = {}
    for line in (folder / "SHA256SUMS").read_text(errors="replace").splitlines():
        checksum, _, name = line.partition("  ")
        if name:
            checksums[name] = checksum
    return checksums


def checksum_of(path: Path) -> str | None:
    """Return the SHA-256 of a file, None if it is missing or empty."""
    return sha256(path) if path.is_file() and path.stat().st_size > 0 else None


@contextlib.contextmanager
def errors_naming(path):
    """Turn what a malformed file leads to, here or in a library, into a ValueError that names the file."""
    try:
        yield
    except (OSError, torch.OutOfMemoryError):
        raise
    except dcp.CheckpointException as failed:  # no Exception: it has the errors of the ranks
        first_error, _ = next(iter(failed.failures.values()))
        raise ValueError(describe_malformed(path, first_error)) from failed
    except Exception as error:
        raise ValueError(describe_malformed(path, error)) from error


def describe_malformed(path, error: BaseException) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"{path}: not valid in a checkpoint: {reason}; restore it from a copy"
