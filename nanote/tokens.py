"""Token files: `write_tokens` makes them from documents, and a Loader reads batches from them.

A token file holds nothing but token ids, uint16 or uint32, with an end-of-text token after each document, and
the tokenizer's beginning-of-text token (BOS) before it if there is one: `data/<name>/{train,val}.bin`,
described by `meta.json` with their SHA-256. Of prompts with answers there is also `{train,val}.mask`: a byte
per token, 1 where the token is a label, so in an answer or at its end.
"""
import fcntl
import hashlib
import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from nanote.config import as_typed

FILES = {"train.bin", "val.bin", "train.mask", "val.mask", "meta.json"}
REMAKE = "make the token files again with data.py --force"


def sha256(path):
    """Return the SHA-256 of a file that is not empty, in hexadecimal."""
    return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()


def meta_checksum(meta):
    """Return the SHA-256 of a meta dict without its own "sha256" entry."""
    text = json.dumps({key: meta[key] for key in meta if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def open_tokens(folder, split, verify=True):
    """Return the tokens of `split` as a memory map, and meta.json. verify: SHA-256, a second a gigabyte."""
    path = Path(folder, f"{split}.bin")
    meta_path = Path(folder, "meta.json")
    if not meta_path.is_file():
        raise ValueError(f"{folder}: no token files here; make some, for example with: python data.py stdlib")
    try:
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        count = meta[f"{split}_tokens"]
        checksum = meta[f"{split}_sha256"]
        is_altered = "sha256" in meta and meta["sha256"] != meta_checksum(meta)  # the first version has none
        if is_altered or not 0 <= meta["eot"] < meta["vocab_size"]:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{meta_path}: damaged; {REMAKE}") from None
    tokens = open_array(path, dtype, count, checksum, verify)
    if verify and "sha256" not in meta and tokens.max() >= meta["vocab_size"]:
        raise ValueError(f"{path}: holds the token {tokens.max()}, but vocab_size in meta.json is "
                         f"{meta['vocab_size']}; {REMAKE}")
    return tokens, meta


def open_array(path, dtype, count, checksum, verify):
    """Return a file of `count` numbers as a memory map. verify: compare its SHA-256 with `checksum`."""
    size = count * dtype.itemsize
    is_intact = size > 0 and path.stat().st_size == size
    if is_intact and verify:
        is_intact = sha256(path) == checksum
    if not is_intact:
        raise ValueError(f"{path}: empty, truncated or altered: {path.stat().st_size} bytes, but meta.json "
                         f"says {size} bytes with SHA-256 {checksum}; {REMAKE}")
    return np.memmap(path, dtype, "r")


@contextmanager
def new_folder(out_dir, force=False, advice="name another --out-dir"):
    """Yield an empty folder that replaces `out_dir` when the block ends without an exception. It is in
    .<name>.tmp, which is locked: a second process that writes the same `out_dir` is refused. After kill -9
    between two renames the old folder is there, too, and the next call puts it back."""
    target = Path(os.path.realpath(out_dir))  # a link stays, and the folder behind it is replaced
    if target == Path.cwd() or target.is_mount():
        raise ValueError(f"{out_dir}: cannot be replaced; name a folder in it, such as {out_dir}/tokens")
    work = target.with_name(f".{target.name}.tmp")
    new = work / "new"
    old = work / "old"
    try:
        lock = lock_folder(work)
        if lock is None:
            raise ValueError(f"{out_dir}: another process is writing it; wait for its end, or {advice}")
        try:
            put_back(old, target)
            has_content = check_replaceable(target, out_dir, force)
            remove_folders(new, old)  # left by kill -9
            new.mkdir()
            yield new
            if has_content:
                os.rename(target, old)
            os.rename(new, target)
        finally:
            put_back(old, target)
            remove_folders(new, old)
            Path(lock.name).unlink(missing_ok=True)  # the last: who makes it anew has the folder
            with suppress(OSError):
                work.rmdir()
            lock.close()
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{out_dir}: cannot be written ({reason}); {advice}") from error


def check_replaceable(target, out_dir, force):
    """Return whether a folder holds token files that may be replaced. ValueError if it may not be."""
    content = set(os.listdir(target)) if target.exists() else set()
    if content - FILES:  # --force must not delete what data.py did not write
        raise ValueError(f"{out_dir}: holds other files than token files; name another --out-dir")
    if content and not force:
        raise ValueError(f"{out_dir}: exists; overwrite it with --force, or name another --out-dir")
    return bool(content)


def put_back(old, target):
    """Restore the folder that was being replaced, if its place is empty."""
    if old.exists() and not target.exists():
        os.rename(old, target)


def remove_folders(*folders):
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def lock_folder(folder):
    """Make a folder, and lock the file `lock` in it until the returned file is closed or the process ends.
    Return None if another process holds the lock."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = open(folder / "lock", "a")
        except FileNotFoundError:  # another process has just removed the folder
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks
            return file
        if os.path.exists(file.name) and os.path.samestat(os.stat(file.name), os.fstat(file.fileno())):
            return file
        file.close()  # another process has removed the file between open and flock


def write_tokens(documents, out_dir, *, tokenizer="byte", val_fraction=0.01, force=False, num_workers=None,
                 source="", left_out=None, answers_only=False):
    """Tokenize `documents` into `out_dir`/{train,val}.bin and meta.json, and return the meta dict.

    A document goes to `val` if the hash of its text (of its first piece) as a number in [0, 1) is below
    `val_fraction`: the same document has the same split in every corpus. If that leaves a split empty, the
    last `val_fraction` of the tokens are `val`. After ValueError or OSError `out_dir` is as it was.
    `source`, `left_out`: for meta.json, what the documents are and what was skipped.
    `answers_only`: documents are prompts and answers; write masks.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"--val-fraction {val_fraction}: must be above 0 and below 1, for example 0.01")
    from nanote.tokenizers import get_tokenizer  # training needs none
    encoder = get_tokenizer(tokenizer)
    dtype = np.dtype("<u2" if encoder.vocab_size <= 1 << 16 else "<u4")
    counts = dict(documents=0, train_tokens=0, val_tokens=0, train_bytes=0, val_bytes=0)
    pool = ThreadPoolExecutor(os.cpu_count() if num_workers is None else num_workers)
    with pool, new_folder(out_dir, force) as folder:
        with ExitStack() as stack, tqdm(unit="B", unit_scale=True, disable=None, leave=False) as bar:
            names = FILES - {"meta.json"} if answers_only else {"train.bin", "val.bin"}
            files = {name: stack.enter_context(open(folder / name, "wb")) for name in names}
            for piece, tokens in encoded(documents, encoder, val_fraction, pool):
                files[f"{piece.split}.bin"].write(tokens.astype(dtype))
                if answers_only:
                    is_label = not piece.is_first  # after the prompt come the answer and the end of text
                    files[f"{piece.split}.mask"].write(np.full(len(tokens), is_label, np.uint8))
                if not piece.raw:  # the end of text
                    counts["documents"] += 1
                counts[f"{piece.split}_tokens"] += len(tokens)
                counts[f"{piece.split}_bytes"] += len(piece.raw)
                bar.update(len(piece.raw))
        if not counts["documents"]:
            raise ValueError("the corpus is empty: no document holds any text; left out: "
                             f"{dict(left_out or {})}; name files that do")
        if not (counts["train_tokens"] and counts["val_tokens"]):
            full_split = "train" if counts["train_tokens"] else "val"
            cut_end(folder, full_split, dtype, val_fraction, encoder, counts, answers_only)
        return write_meta(folder, encoder, dtype, source=source, val_fraction=val_fraction, **counts,
                          left_out=dict(left_out or {}))


def write_meta(folder, encoder, dtype, **others):
    """Write meta.json of the files in `folder`, and return the meta dict."""
    meta = {"format": 1, "tokenizer": encoder.name, "vocab_size": encoder.vocab_size, "eot": encoder.eot,
            "dtype": dtype.name}
    if encoder.bos is not None:
        meta["bos"] = encoder.bos
    meta |= others
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(".bin").replace(".", "_")  # train, train_mask
        meta[f"{name}_sha256"] = sha256(path)
    meta["sha256"] = meta_checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return meta


def hash_fraction(raw):
    """Return the hash of bytes as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=6).digest(), "big") / 2**48


class Piece(NamedTuple):
    """A part of a document, such as a prompt or an answer, or its end."""

    split: str  # train or val
    is_first: bool  # of its document
    raw: bytes  # UTF-8; empty: the end of the document


def encoded(documents, encoder, val_fraction, pool):
    """Yield (piece, its tokens) for each Piece of each document."""
    def encode(piece):
        tokens = encoder.encode_bytes(piece.raw) if piece.raw else np.array([encoder.eot])
        if encoder.bos is not None and piece.is_first:
            tokens = np.append(encoder.bos, tokens)
        return piece, tokens

    pieces = pieces_of(documents, val_fraction)
    while next_pieces := list(islice(pieces, 4 * os.cpu_count())):
        yield from pool.map(encode, next_pieces)


def pieces_of(documents, val_fraction):
    """Yield each Piece of each document. A document is a text, an iterable of texts, or one of these with the
    number that decides its split: (text, number in [0, 1))."""
    for document in documents:
        fraction = None  # the hash of the first piece
        if isinstance(document, tuple):
            document, fraction = document
        texts = [document] if isinstance(document, str) else document
        split = None
        for text in texts:
            if not text:
                continue
            raw = text.encode("utf-8", errors="replace")
            is_first = split is None
            if is_first:
                if fraction is None:
                    fraction = hash_fraction(raw)
                split = "val" if fraction < val_fraction else "train"
            yield Piece(split, is_first, raw)
        if split is not None:
            yield Piece(split, is_first=False, raw=b"")


def cut_end(folder, split, dtype, val_fraction, encoder, counts, has_mask):
    """Move the last tokens of a split, which holds all of them, to val.bin, and adjust `counts`."""
    length = counts[f"{split}_tokens"]
    val_length = max(round(length * val_fraction), 1)
    start = length - min(val_length, length - 1)  # a token is left for train
    dtypes = {"bin": dtype}
    if has_mask:
        dtypes["mask"] = np.dtype(np.uint8)
    for suffix, file_dtype in dtypes.items():
        os.replace(folder / f"{split}.{suffix}", folder / f"train.{suffix}")
        values = np.memmap(folder / f"train.{suffix}", file_dtype, "r")
        values[start:].tofile(folder / f"val.{suffix}")
        os.truncate(folder / f"train.{suffix}", start * file_dtype.itemsize)
    val_tokens = np.fromfile(folder / "val.bin", dtype)
    total = counts["train_bytes"] + counts["val_bytes"]
    val_bytes = len(encoder.decode_bytes(val_tokens))
    counts |= {"train_tokens": start, "val_tokens": length - start,
               "train_bytes": total - val_bytes, "val_bytes": val_bytes}


class MicroBatch(NamedTuple):
    """What one forward and backward pass trains on: the model's inputs, and what its loss is divided by."""

    # input_ids and labels, int64 (micro_batch_size, seq_len). With pack_documents also cu_seqlens, int32
    # (max_documents + 1,): the start of each document or part of one in input_ids.flatten(), padded with its
    # length.
    inputs: tuple[torch.Tensor, ...]
    # (), float32: the loss of the micro-batch is divided by it. Summed over a step's micro-batches and all
    # ranks, loss / divisor is the mean loss over the step's labels. The fewer labels, the larger; inf: none.
    divisor: torch.Tensor


class Loader:
    """Batches of micro_batch_size x seq_len tokens, as a pure function of (seed, step, rank, ranks.count).

    An epoch visits each window of seq_len + 1 tokens once. The last label of a window is the first input of
    the next. Philox with the key (seed, epoch) determines their order and, for `train`, the starting offset.
    Samples are numbered from the run's first, over all ranks; a micro-batch takes micro_batch_size of them
    for rank 0, then as many for rank 1, and so on. A thread prefetches the next step's batches.

    With `pack_documents` a batch also says where its documents begin (cu_seqlens): each with BOS, else with
    the end-of-text token before it, as in generation. Rank 0 verifies the checksum: a disk is read once.
    """

    def __init__(self, config, split, ranks, device="cpu"):
        self.split = split
        self.ranks = ranks
        self.device = torch.device(device)
        self.seed = config.seed
        self.seq_len = config.seq_len
        self.micro_batch_size = config.micro_batch_size
        self.grad_accum = config.grad_accum
        self.tokens, self.meta = open_tokens(config.data, split, verify=ranks.rank == 0)
        self.mask = self._open_mask(config.data)
        length = len(self.tokens)
        seq_len = self.seq_len
        if length < seq_len + 1:
            fitting = max(1, (length - 1) // 16 * 16)  # FP8 needs a multiple of 16 tokens
            raise ValueError(f"{Path(config.data, split)}.bin: {length} tokens, but a context of {seq_len} "
                             f"needs {seq_len + 1}; use a larger corpus or --seq-len {fitting}")
        if split == "train":  # one window less: any starting offset gives the same number of windows
            self.num_windows = max(length // seq_len - 1, 1)
        else:
            self.num_windows = (length - 1) // seq_len
        self.samples_per_step = self.grad_accum * self.micro_batch_size * ranks.count
        self.tokens_per_step = self.samples_per_step * seq_len
        self.start_token = self.meta.get("bos", self.meta["eot"])  # of a document
        self.max_documents = 0  # in a micro-batch
        if config.pack_documents:
            in_a_window = most_documents(self.tokens, self.start_token, seq_len)
            self.max_documents = self.micro_batch_size * in_a_window
        # without a mask every micro-batch has as many labels
        self.equal_divisor = torch.tensor(float(self.grad_accum * ranks.count), device=self.device)
        # caches of this loader, which a decorator would share between loaders
        self._cached_epoch = lru_cache(maxsize=2)(self._epoch)  # a step may span two epochs
        self._cached_label_counts = lru_cache(maxsize=1)(self._label_counts)
        self.start_at(step=1, sample=0)
        self._thread = ThreadPoolExecutor(1, "loader")

    def _open_mask(self, data):
        """Return 1 for each token that is a label, 0 for others, as a memory map; None: all tokens are."""
        checksum = self.meta.get(f"{self.split}_mask_sha256")
        if checksum is None:
            return None
        path = Path(data, f"{self.split}.mask")
        verify = self.ranks.rank == 0
        mask = open_array(path, np.dtype(np.uint8), len(self.tokens), checksum, verify)
        if not mask[1:].any():
            raise ValueError(f"{path}: no token is a label; name more examples for data.py sft")
        return mask

    def samples_before(self, step):
        """Return the number of samples of all ranks before `step`, counted from the run's first."""
        return self._start_sample + (step - self.first_step) * self.samples_per_step

    def start_at(self, step, sample):
        """Let `step` begin with this sample: a resumed run may have another number of samples a step."""
        self.first_step = step
        self._start_sample = sample
        self._prefetched = {}  # {step: future}, at most one

    def continue_from(self, source, resumed_meta):
        """Let the step after the checkpoint `source` read what the run has not read.

        The windows of an epoch and their order depend on the tokens, on seq_len and on the seed.
        resumed_meta: meta.json of the checkpoint."""
        step = resumed_meta["step"]
        options = resumed_meta["config"]
        # version 0.1 counts no samples, and stores no checksums of the tokens
        samples = resumed_meta.get("samples", step * self.samples_per_step)
        corpus = resumed_meta.get("corpus", self.meta)
        if samples and corpus.get("train_sha256") != self.meta.get("train_sha256"):
            samples = 0
            if self.ranks.rank == 0:
                print(f"--data: other tokens than those that {source} has read: read from their start")
        for name in ("seq_len", "seed"):
            value = getattr(self, name)
            if samples and value != options[name]:
                option = as_typed(name, value)
                raise ValueError(f"{option}: {source} has {options[name]}, and with another one data would "
                                 "be read twice before the rest is read; leave it out, or start a new run "
                                 f"with --init-from {source} {option}")
        self.start_at(step + 1, samples)

    def batches(self, step):
        """Return the grad_accum micro-batches of a step, counted from 1, on the device."""
        future = self._prefetched.get(step)
        if future is None:  # the first step
            future = self._thread.submit(self._read, step)
        self._prefetched = {step + 1: self._thread.submit(self._read, step + 1)}
        micro_batches = []
        for tensors, divisor in zip(future.result(), self._divisors(step)):
            inputs = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)
            micro_batches.append(MicroBatch(inputs, divisor))
        return micro_batches

    def _divisors(self, step):
        """Return the divisor of the mean loss of each micro-batch of a step; see MicroBatch."""
        if self.mask is None:
            return [self.equal_divisor] * self.grad_accum
        label_counts = self._cached_label_counts(self.samples_before(step))
        total = max(1, label_counts.sum())
        divisors = [total / count if count > 0 else np.inf for count in label_counts[:, self.ranks.rank]]
        return torch.tensor(divisors, dtype=torch.float32).to(self.device, non_blocking=True).unbind()

    def has_labels(self, step):
        """Return whether any token of a step, of all its micro-batches and ranks, is a label."""
        if self.mask is None:
            return True
        return bool(self._cached_label_counts(self.samples_before(step)).any())

    def evaluation(self, tokens):
        """Yield (the model's inputs, number of labels that count) for `tokens` tokens of the split. They are
        whole windows, spread evenly over the split, or all of it, and depend on seq_len only. Labels that do
        not count are -100. Every rank gets its part of the windows and the same number of batches."""
        num_labels = len(self.tokens) - 1
        num_windows = math.ceil(num_labels / self.seq_len)  # of the split; the last may be incomplete
        num_chosen = min(math.ceil(tokens / self.seq_len), num_windows)
        num_batches = math.ceil(num_chosen / (self.micro_batch_size * self.ranks.count))
        last_start = num_labels - self.seq_len  # of a complete window
        for index in range(num_batches):
            first = (index * self.ranks.count + self.ranks.rank) * self.micro_batch_size
            chosen = np.arange(first, first + self.micro_batch_size)  # number of each row's chosen window
            has_window = chosen < num_chosen  # no windows may be left for the last rows of the last batch
            windows = np.minimum(chosen, num_chosen - 1) * num_windows // num_chosen
            starts = windows * self.seq_len
            # An incomplete window is moved back to end with the split: its first labels are another window's.
            moved_starts = np.minimum(starts, last_start)
            first_labels = np.where(has_window, starts - moved_starts, self.seq_len)  # the first that counts
            input_ids, labels, *packing = self._tensors_of(moved_starts)
            for row, first_label in enumerate(first_labels):
                labels[row, :first_label] = -100
            inputs = tuple(tensor.to(self.device, non_blocking=True)
                           for tensor in (input_ids, labels, *packing))
            yield inputs, int((labels != -100).sum())

    def _read(self, step):
        """Return the tensors of each micro-batch of a step in host memory."""
        first = self.samples_before(step)
        micro_batches = []
        for number in range(self.ranks.rank, self.grad_accum * self.ranks.count, self.ranks.count):
            sample = first + number * self.micro_batch_size
            tensors = self._tensors_of(self._starts(range(sample, sample + self.micro_batch_size)))
            labels = tensors[1]
            if self.mask is not None and (labels == -100).all():
                labels[0, 0] = 0  # the mean over no label is NaN; an infinite divisor gives it no weight
            micro_batches.append(tensors)
        return micro_batches

    def _label_counts(self, first):
        """Return the number of labels of each micro-batch of each rank, (grad_accum, ranks), of the step that
        begins with the sample `first`."""
        starts = self._starts(range(first, first + self.samples_per_step))
        positions = starts[:, None] + np.arange(1, self.seq_len + 1)
        counts = self.mask[positions].sum(1, dtype=np.int64)
        return counts.reshape(self.grad_accum, self.ranks.count, self.micro_batch_size).sum(-1)

    def _starts(self, samples):
        """Return where the windows of these samples begin."""
        starts = []
        for sample in samples:
            offset, order = self._cached_epoch(sample // self.num_windows)
            window = order[sample % self.num_windows]
            starts.append(offset + window * self.seq_len)
        return np.array(starts)

    def _epoch(self, epoch):
        """Return (starting offset in tokens, order of the windows), from raw bits that numpy guarantees."""
        bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.num_windows + 1)
        num_offsets = min(len(self.tokens) - self.num_windows * self.seq_len, self.seq_len)
        offset = int(bits[0] % np.uint64(num_offsets)) if self.split == "train" else 0
        return offset, np.argsort(bits[1:], kind="stable")

    def _tensors_of(self, starts):
        """Return input_ids, labels and perhaps cu_seqlens of the windows that begin at `starts`."""
        positions = starts[:, None] + np.arange(self.seq_len + 1)
        windows = self.tokens[positions]
        input_ids = torch.from_numpy(windows[:, :-1].astype(np.int64))
        labels = torch.from_numpy(windows[:, 1:].astype(np.int64))
        if self.mask is not None:
            is_label = torch.from_numpy(self.mask[positions[:, 1:]])
            labels[is_label == 0] = -100
        tensors = [input_ids, labels]
        if self.max_documents:
            documents = document_starts(input_ids, self.start_token)
            cu_seqlens = torch.full((self.max_documents + 1,), input_ids.numel(), dtype=torch.int32)
            cu_seqlens[:len(documents)] = documents
            tensors.append(cu_seqlens)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # a new thread starts on GPU 0, another rank's
                tensors = [tensor.pin_memory() for tensor in tensors]
        return tensors


def check_tokenizer(data, tokenizer, expected):
    """Raise ValueError unless the tokens of the folder `data` are those of a run's tokenizer, `expected`."""
    from nanote.tokenizers import same_tokenizer  # a new run needs none
    if not same_tokenizer(tokenizer, expected):
        raise ValueError(f"--data {data}: tokenized with {tokenizer}, but the run uses {expected}; name a "
                         "folder tokenized with that")


def document_starts(input_ids, start_token):
    """Return where documents or parts of one begin in input_ids.flatten(), for input_ids (B, S)."""
    is_start = input_ids == start_token
    is_start[:, 0] = True  # a row starts a sequence, even inside a document
    return is_start.flatten().nonzero().flatten()


def most_documents(tokens, start_token, seq_len):
    """Return the largest number of documents, whole or partial, in any seq_len consecutive tokens."""
    chunk_size = 1 << 20
    starts = []
    for first in range(0, len(tokens), chunk_size):
        chunk = tokens[first:first + chunk_size]
        starts.append(first + np.flatnonzero(chunk == start_token))
    starts = np.concatenate(starts)
    # The first token of a window starts a document or a part of one, each start token after it another.
    counts = np.searchsorted(starts, starts + seq_len - 1) - np.arange(len(starts))
    return 1 + int(counts.max(initial=0))
