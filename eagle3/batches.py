"""Which samples train together: split, packing, order, and loading ahead.

Everything is a function of the sample list, the seed and the epoch, so a resumed run continues with exactly
the batches that an undisturbed one would have seen, and the same sums come out on one process or many.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Full, Queue
from typing import Any

import numpy as np
import torch

from eagle3.errors import PreconditionError
from eagle3.states import StateStore

_SHUFFLE_WINDOW = 256


@dataclass(frozen=True)
class TrainingSample:
    """One sequence: number in the store, checksum of its file, loss mask [T] bool over its tokens."""

    i: int
    sha256: str
    loss_mask: np.ndarray

    @property
    def length(self) -> int:
        """Positions that it takes in a batch: one less than its tokens, because inputs are shifted by one."""
        return len(self.loss_mask) - 1

    def supervised(self) -> np.ndarray:
        """Return the mask [T - 1] bool of the shifted positions that carry loss.

        Position p reads token p + 1 and predicts token p + 2. It counts when both were generated: a drafter
        is asked only from the first generated token on, and nothing follows the last one.
        """
        generated = self.loss_mask[1:]
        return generated & np.append(generated[1:], False)


@dataclass
class Batch:
    """Packed sequences as Eagle3DraftModel takes them; T is the sum of the document lengths (plus padding)."""

    inputs: dict[str, Any]
    supervised: int
    tokens: int


def read_samples(store: StateStore, masks: list[np.ndarray], limit: int | None = None) -> list[TrainingSample]:
    """Return the store's complete samples that have something to learn; PreconditionError if none has."""
    index = store.index()
    complete = sorted(store.complete(index))[:limit]
    samples = [TrainingSample(i, index[i]["sha256"], np.asarray(masks[i], dtype=bool)) for i in complete]
    samples = [sample for sample in samples if sample.length > 0 and sample.supervised().any()]
    if not samples:
        tokens = sum(index[i]["tokens"] for i in complete)
        raise PreconditionError(
            f"0 supervised of {tokens:,} tokens",
            where=store.directory,
            expected="generated tokens in the loss mask",
            fix="check the traces: their completion_token_ids are empty or were cut off",
        )
    return samples


def split(samples: list[TrainingSample], fraction: float, seed: int) -> tuple[list, list]:
    """Return (training, validation): int(n x fraction) samples drawn by `seed` are held out.

    Raises PreconditionError when a split would be empty.
    """
    held_out = int(len(samples) * fraction)
    if fraction > 0 and (held_out == 0 or held_out == len(samples)):
        raise PreconditionError(
            "too few samples to hold some out",
            where="--validation-fraction",
            expected="at least one sample on each side",
            found=f"{len(samples)} samples x {fraction}",
            fix="take more samples, or another fraction",
        )
    order = np.random.default_rng(seed).permutation(len(samples))
    chosen = set(order[:held_out].tolist())
    return ([s for k, s in enumerate(samples) if k not in chosen], [s for k, s in enumerate(samples) if k in chosen])


def pack(samples: list[TrainingSample], batch_tokens: int, seed: int | None, epoch: int = 0) -> list[list]:
    """Return the batches of an epoch: shuffled (unless seed is None), then packed by first fit.

    Within windows of shuffled samples the longest goes first, which fills batches to about 98%. A sample
    longer than `batch_tokens` is cut to it when loaded.
    """
    order = list(samples)
    if seed is not None:
        order = [samples[k] for k in np.random.default_rng([seed, epoch]).permutation(len(samples))]
    packed: list[list[TrainingSample]] = []
    open_batches: list[tuple[int, list[TrainingSample]]] = []
    for start in range(0, len(order), _SHUFFLE_WINDOW):
        window = sorted(order[start : start + _SHUFFLE_WINDOW], key=lambda s: (-s.length, s.i))
        for sample in window:
            need = min(sample.length, batch_tokens)
            for k, (room, members) in enumerate(open_batches):
                if need <= room:
                    members.append(sample)
                    open_batches[k] = (room - need, members)
                    break
            else:
                members = [sample]
                packed.append(members)
                open_batches.append((batch_tokens - need, members))
        open_batches = sorted(open_batches, key=lambda item: -item[0])[:16]
    if seed is not None:
        packed = [packed[k] for k in np.random.default_rng([seed, epoch, 1]).permutation(len(packed))]
    return packed


def efficiency(packed: list[list[TrainingSample]], batch_tokens: int) -> float:
    """Return the share of batch positions that hold tokens (1.0 is a full pack)."""
    used = sum(min(sample.length, batch_tokens) for batch in packed for sample in batch)
    return used / (len(packed) * batch_tokens) if packed else 0.0


def collate(store: StateStore, members: list[TrainingSample], batch_tokens: int, pad: bool, verify: bool) -> Batch:
    """Load and pack samples.

    Inputs are shifted as in EAGLE: position p holds token p + 1, the auxiliary states of token p and the
    teacher state of token p + 1. Positions count from 1 in each document; documents attend to themselves only.

    Args:
        pad: fill up to `batch_tokens` (static shapes for compiled kernels).
        verify: check each file's checksum.
    """
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in ("ids", "aux", "teacher", "mask", "positions")}
    lengths = []
    for sample in members:
        states, ids = store.load(sample.i, sample.sha256 if verify else None)
        if not torch.isfinite(states).all():
            raise PreconditionError("NaN or Inf in hidden states", where=store.path(sample.i),
                                    fix="remove the file and run 02_extract_hidden_states.py again")
        length = min(sample.length, batch_tokens)
        lengths.append(length)
        columns["ids"].append(ids[1 : length + 1])
        columns["aux"].append(states[:length, :-1].flatten(1))
        columns["teacher"].append(states[1 : length + 1, -1])
        columns["mask"].append(torch.from_numpy(sample.supervised()[:length].copy()))
        columns["positions"].append(torch.arange(1, length + 1))
    if pad and sum(lengths) < batch_tokens:
        missing = batch_tokens - sum(lengths)
        for tensors in columns.values():
            tensors.append(tensors[0].new_zeros(missing, *tensors[0].shape[1:]))
    joined = {name: torch.cat(tensors)[None] for name, tensors in columns.items()}
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    padding = documents.new_full((joined["ids"].shape[1] - len(documents),), -1)
    inputs = {
        "input_ids": joined["ids"],
        "hidden_states": joined["aux"],
        "verifier_last_hidden_states": joined["teacher"],
        "loss_mask": joined["mask"],
        "position_ids": joined["positions"],
        "document_ids": torch.cat([documents, padding])[None],
        "document_lengths": lengths,
    }
    return Batch(inputs, int(joined["mask"].sum()), sum(lengths))


class Prefetcher:
    """Runs `load(item)` for each item in a thread, a few ahead of the consumer, in order."""

    def __init__(self, items: list, load: Callable[[Any], Any], depth: int = 2) -> None:
        self._items, self._load = items, load
        self._queue: Queue[Any] = Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for item in self._items:
            try:
                value = self._load(item)
            except BaseException as error:  # noqa: BLE001 - handed to the consumer
                value = error
            while not self._closed.is_set():
                try:
                    self._queue.put(value, timeout=0.1)
                    break
                except Full:
                    continue
            if self._closed.is_set() or isinstance(value, BaseException):
                return

    def __iter__(self) -> Iterator[Any]:
        for _ in self._items:
            value = self._queue.get()
            if isinstance(value, BaseException):
                raise value
            yield value

    def close(self) -> None:
        """Stop loading ahead."""
        self._closed.set()
        self._thread.join(timeout=10)
