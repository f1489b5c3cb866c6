"""The Loader, which reads a run's batches from token files (nanote/tokens.py).

A window is seq_len + 1 tokens: its last label is the first input of the next window. An epoch visits each
window once, in an order that depends on the seed and the number of the epoch. A sample is a window in this
order, numbered from the run's first. So a batch is a pure function of seed, step, rank and number of ranks,
and a resumed run only needs to know how many samples have been read.
"""
import math
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nanote.config import as_typed
from nanote.tokens import FIRST_TOKEN, LABEL, open_mask, open_tokens


class MicroBatch(NamedTuple):
    """What one forward and backward pass trains on."""

    # input_ids and labels, int64 (micro_batch_size, seq_len). With pack_documents also cu_seqlens, int32
    # (max_documents + 1,): the start of each document or part of one in input_ids.flatten(), then
    # micro_batch_size * seq_len once or more.
    inputs: tuple[torch.Tensor, ...]
    divisor: torch.Tensor  # (), float32: the loss is divided by it, see Loader._divisors


class Loader:
    """Batches of micro_batch_size x seq_len tokens on each rank.

    The first micro-batch of a step takes micro_batch_size samples for rank 0, then as many for rank 1, and so
    on. Then comes the second micro-batch. A thread prefetches the next step.

    With `pack_documents` a batch also says where its documents begin (cu_seqlens). As in generation, a
    document begins with BOS, or without one with the end-of-text token before it. With conversations the
    mask marks each first token.
    """

    def __init__(self, config, split, ranks, device="cpu"):
        self.split = split
        self.ranks = ranks
        self.device = torch.device(device)
        self.seed = config.seed
        self.seq_len = config.seq_len
        self.micro_batch_size = config.micro_batch_size
        self.grad_accum = config.grad_accum
        verify = ranks.rank == 0  # a disk is read once
        self.tokens, self.meta = open_tokens(config.data, split, verify)
        self.mask = open_mask(config.data, split, self.meta, verify)  # None: every token is a label
        length = len(self.tokens)
        seq_len = self.seq_len
        if length < seq_len + 1:
            fitting = max(1, (length - 1) // 16 * 16)  # FP8 needs a multiple of 16 tokens
            advice = "a larger corpus"
            if split == "val":
                advice += ", a larger --val-fraction of data.py"
            raise ValueError(f"{Path(config.data, split)}.bin: {length} tokens, but a context of {seq_len} "
                             f"needs {seq_len + 1}; use {advice} or --seq-len {fitting}")
        if split == "train":  # one window less: any starting offset gives the same number of windows
            self.num_windows = max(length // seq_len - 1, 1)
        else:
            self.num_windows = (length - 1) // seq_len
        self.samples_per_step = self.grad_accum * self.micro_batch_size * ranks.count
        self.tokens_per_step = self.samples_per_step * seq_len
        # a document begins where `markers`, one per token, are `start_marker`
        if "conversations" in self.meta:
            self.markers = self.mask
            self.start_marker = FIRST_TOKEN
        else:
            self.markers = self.tokens
            self.start_marker = self.meta.get("bos", self.meta["eot"])
        self.max_documents = 0  # in a micro-batch
        if config.pack_documents:
            in_a_window = most_documents(self.markers, self.start_marker, seq_len)
            self.max_documents = self.micro_batch_size * in_a_window
        self.equal_divisor = torch.tensor(float(self.grad_accum * ranks.count), device=self.device)
        self.first_step = 1  # that this process trains
        self._start_sample = 0  # the first of that step
        self._thread = ThreadPoolExecutor(1, "loader")
        self._prefetched = {}  # {step: future}, at most one
        # caches of this loader, which a decorator would share between loaders
        self._cached_epoch = lru_cache(maxsize=2)(self._epoch)  # a step may span two epochs
        self._cached_label_counts = lru_cache(maxsize=1)(self._label_counts)

    # ------------------------------------------------------------ a training step

    def batches(self, step):
        """Return the grad_accum micro-batches of a step, counted from 1, on the device."""
        future = self._prefetched.get(step)
        if future is None:  # the first step
            future = self._thread.submit(self._read, step)
        self._prefetched = {step + 1: self._thread.submit(self._read, step + 1)}
        micro_batches = []
        for tensors, divisor in zip(future.result(), self._divisors(step)):
            micro_batches.append(MicroBatch(self._on_device(tensors), divisor))
        return micro_batches

    def _read(self, step):
        """Return the tensors of each micro-batch of a step in host memory."""
        micro_batches = []
        for micro_batch in range(self.grad_accum):
            number = micro_batch * self.ranks.count + self.ranks.rank  # among the step's, of all ranks
            first_sample = self.samples_before(step) + number * self.micro_batch_size
            starts = self._window_starts(range(first_sample, first_sample + self.micro_batch_size))
            tensors = self._windows_at(starts)
            labels = tensors[1]
            if self.mask is not None and (labels == -100).all():
                labels[0, 0] = 0  # the mean over no label is NaN, also after division by infinity
            micro_batches.append(tensors)
        return micro_batches

    def _divisors(self, step):
        """Return what the loss of each micro-batch of a step is divided by, float32 () each.

        The loss of a micro-batch is the mean over its own labels, and that of a step the mean over the labels
        of all micro-batches on all ranks. The latter is the sum of loss / divisor, with

            divisor = labels of the step / labels of the micro-batch

        It is grad_accum * ranks.count if every token is a label, and infinity for a micro-batch without one.
        """
        if self.mask is None:
            return [self.equal_divisor] * self.grad_accum
        label_counts = self._cached_label_counts(self.samples_before(step))
        of_step = label_counts.sum()
        of_micro_batches = label_counts[:, self.ranks.rank]
        divisors = [of_step / count if count > 0 else math.inf for count in of_micro_batches]
        return torch.tensor(divisors, dtype=torch.float32).to(self.device, non_blocking=True).unbind()

    def has_labels(self, step):
        """Return whether any token of a step, of all its micro-batches and ranks, is a label."""
        if self.mask is None:
            return True
        return bool(self._cached_label_counts(self.samples_before(step)).any())

    def _label_counts(self, first_sample):
        """Return the number of labels of each micro-batch of each rank, (grad_accum, ranks), of the step that
        begins with `first_sample`."""
        starts = self._window_starts(range(first_sample, first_sample + self.samples_per_step))
        positions = starts[:, None] + np.arange(1, self.seq_len + 1)
        counts = (self.mask[positions] == LABEL).sum(1)
        return counts.reshape(self.grad_accum, self.ranks.count, self.micro_batch_size).sum(-1)

    # ------------------------------------------------------------ which samples a step reads

    def samples_before(self, step):
        """Return the number of samples of all ranks before `step`, counted from the run's first."""
        return self._start_sample + (step - self.first_step) * self.samples_per_step

    def continue_from(self, source, resumed_meta):
        """Let the step after the checkpoint `source` read what the run has not read. A step may have another
        number of samples now, but the tokens, seq_len and seed decide what a sample is.

        resumed_meta: meta.json of the checkpoint.
        """
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
        self.first_step = step + 1
        self._start_sample = samples
        self._prefetched = {}

    # ------------------------------------------------------------ samples and their windows

    def _window_starts(self, samples):
        """Return where the windows of these samples begin, in tokens."""
        starts = []
        for sample in samples:
            offset, order = self._cached_epoch(sample // self.num_windows)
            window = order[sample % self.num_windows]
            starts.append(offset + window * self.seq_len)
        return np.array(starts)

    def _epoch(self, epoch):
        """Return where the first window of an epoch starts, in tokens, and the order of its windows. Philox's
        raw bits are what numpy guarantees never to change."""
        bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.num_windows + 1)
        num_offsets = min(len(self.tokens) - self.num_windows * self.seq_len, self.seq_len)
        offset = int(bits[0] % np.uint64(num_offsets)) if self.split == "train" else 0
        return offset, np.argsort(bits[1:], kind="stable")

    def _windows_at(self, starts):
        """Return input_ids, labels and perhaps cu_seqlens of the windows that begin at `starts`."""
        positions = starts[:, None] + np.arange(self.seq_len + 1)
        windows = self.tokens[positions]
        input_ids = torch.from_numpy(windows[:, :-1].astype(np.int64))
        labels = torch.from_numpy(windows[:, 1:].astype(np.int64))
        markers = input_ids
        if self.mask is not None:
            mask = torch.from_numpy(self.mask[positions])
            labels[mask[:, 1:] != LABEL] = -100
            if self.markers is self.mask:
                markers = mask[:, :-1]
        tensors = [input_ids, labels]
        if self.max_documents:
            first_tokens = document_starts(markers, self.start_marker)
            cu_seqlens = torch.full((self.max_documents + 1,), input_ids.numel(), dtype=torch.int32)
            cu_seqlens[:len(first_tokens)] = first_tokens
            tensors.append(cu_seqlens)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # a new thread starts on GPU 0, another rank's
                tensors = [tensor.pin_memory() for tensor in tensors]
        return tensors

    def _on_device(self, tensors):
        """Return pinned tensors as the model's arguments."""
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    # ------------------------------------------------------------ evaluation

    def evaluation(self, tokens):
        """Yield (the model's inputs, number of labels that count). Together they cover `tokens` tokens of
        the split, in whole windows that depend on seq_len only. Labels that do not count are -100. Every rank
        gets its part of the windows and the same number of batches."""
        all_starts = self._evaluation_starts(tokens)
        rows = self.micro_batch_size
        num_batches = math.ceil(len(all_starts) / (rows * self.ranks.count))
        last_start = len(self.tokens) - 1 - self.seq_len  # of a complete window
        for batch in range(num_batches):
            first_window = (batch * self.ranks.count + self.ranks.rank) * rows
            windows = np.arange(first_window, first_window + rows)  # one for each row
            starts = all_starts[np.minimum(windows, len(all_starts) - 1)]
            # An incomplete window is moved back to end with the split: its first labels are another window's.
            moved_starts = np.minimum(starts, last_start)
            overlaps = starts - moved_starts
            tensors = self._windows_at(moved_starts)
            labels = tensors[1]
            for row in range(rows):
                labels[row, :overlaps[row]] = -100
                if windows[row] >= len(all_starts):  # no window is left for this row
                    labels[row] = -100
            yield self._on_device(tensors), int((labels != -100).sum())

    def _evaluation_starts(self, tokens):
        """Return where the windows of an evaluation begin: spread evenly over the split, or all of it."""
        num_windows = math.ceil((len(self.tokens) - 1) / self.seq_len)  # the last may be incomplete
        num_chosen = min(math.ceil(tokens / self.seq_len), num_windows)
        windows = np.arange(num_chosen) * num_windows // num_chosen
        return windows * self.seq_len


class Loaders(NamedTuple):
    """The two splits of a run's data."""

    train: Loader
    val: Loader


# ---------------------------------------------------------------- packed documents

def document_starts(markers, start_marker):
    """Return where documents or parts of one begin in markers.flatten(). markers, (B, S): a token id or
    a byte of a mask for each token, `start_marker` where a document begins."""
    is_start = markers == start_marker
    is_start[:, 0] = True  # a row starts a sequence, even inside a document
    return is_start.flatten().nonzero().flatten()


def most_documents(markers, start_marker, seq_len):
    """Return the largest number of documents, whole or partial, in any seq_len consecutive tokens."""
    chunk_size = 1 << 20
    starts = []
    for chunk_start in range(0, len(markers), chunk_size):
        chunk = markers[chunk_start:chunk_start + chunk_size]
        starts.append(chunk_start + np.flatnonzero(chunk == start_marker))
    starts = np.concatenate(starts)
    # The first token of a window starts a document or a part of one, each start marker after it another.
    counts = np.searchsorted(starts, starts + seq_len - 1) - np.arange(len(starts))
    return 1 + int(counts.max(initial=0))
