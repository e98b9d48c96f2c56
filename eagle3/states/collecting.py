"""The stage's side of a capture's memory: which token of a pass belongs to which sample, and when a sample is whole.

States are matched by position and token ids, never by what was asked of the engine: a sample counts only when every one
of its tokens has been seen in its place. It may come in several pieces (chunked prefill).
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3.common.errors import PreconditionError
from eagle3.states.slabs import Receiver
from eagle3.states.store import Sample
from eagle3.states.writing import Writer

if TYPE_CHECKING:
    import torch

_STORED = ("states", "finite", "scales")


@dataclass
class Rows:
    """What the engine's side compared of one sample, a value a row.

    Attributes:
        places: [k] of the rows in the sample. tokens: the engine's most likely next token at each. agrees: ours is the
            same. differences: of its log-probability, in nats.
    """

    places: np.ndarray
    tokens: np.ndarray
    agrees: np.ndarray
    differences: np.ndarray

    def of(self, chosen: np.ndarray) -> "Rows":
        """Return the rows that a mask or an array of indices chooses."""
        return Rows(*(getattr(self, name)[chosen] for name in ("places", "tokens", "agrees", "differences")))


@dataclass
class Unfinished:
    """A sample of which some tokens may still be missing."""

    sample: Sample
    ids: np.ndarray
    filled: int = 0
    pieces: "list[dict[str, torch.Tensor]]" = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)

    def takes(self, position: int, tokens: np.ndarray) -> bool:
        """Return whether these tokens, from a position on, are the next ones of this sample."""
        return self.filled == position and np.array_equal(self.ids[position : position + len(tokens)], tokens)


@dataclass
class Collected:
    """What became of a batch.

    Attributes:
        entries: of the wanted samples, {i, tokens, bytes, sha256} or {i, error}. rows: by sample number.
        problem: why a sample could not be written, such as a full disk.
    """

    entries: list[dict[str, Any]]
    rows: dict[int, Rows]
    problem: PreconditionError | None = None


class _Batch:
    def __init__(self, samples: list[Sample], wanted: set[int]) -> None:
        self.open = {sample.i: Unfinished(sample, np.asarray(sample.input_ids, dtype=np.int64)) for sample in samples}
        self.wanted, self.whole = wanted, dict[int, Unfinished]()
        self.written: dict[int, Future[dict[str, Any]]] = {}
        self.through = threading.Event()


class Collector:
    """Takes the passes that a receiver gives, in a thread, and lets the writer write the samples in them."""

    def __init__(self, receiver: Receiver, writer: Writer) -> None:
        self._receiver, self._writer = receiver, writer
        self._batches: dict[int, _Batch] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def expect(self, number: int, samples: list[Sample], wanted: set[int]) -> None:
        """Announce a batch before it is sent; the engine runs batches in the order of their numbers."""
        self._batches[number] = _Batch(samples, wanted)

    def result(self, number: int) -> Collected:
        """Wait until a batch is through and written."""
        batch = self._batches[number]
        batch.through.wait()
        if self._error is not None:
            raise self._error
        entries, problem = list[dict[str, Any]](), None
        for future in batch.written.values():
            try:
                entries.append(future.result())
            except PreconditionError as error:
                problem = error
        self._writer.settle()
        entries += [
            {"i": each.sample.i,
             "error": f"states for {each.filled} of {len(each.ids)} tokens (cached prefix?)"}
            for each in batch.open.values() if each.sample.i in batch.wanted]
        del self._batches[number]
        return Collected(entries, {i: _joined(each.rows) for i, each in batch.whole.items() if each.rows}, problem)

    def _work(self) -> None:
        try:
            for message in self._receiver.messages():
                if "batch" in message:
                    self._batches[message["batch"]].through.set()
                else:
                    self._pass(message["slab"], message["tensors"])
        except BaseException as error:
            self._error = error
        for batch in list(self._batches.values()):
            batch.through.set()

    def _current(self) -> _Batch | None:
        return next((batch for _, batch in sorted(self._batches.items()) if not batch.through.is_set()), None)

    def _pass(self, slab: int, tensors: "dict[str, torch.Tensor]") -> None:
        use = _Use(lambda: self._receiver.release(slab))
        batch = self._current()
        if batch is not None:
            for start, stop, position, tokens in _pieces(tensors):
                found = next((each for each in batch.open.values() if each.takes(position, tokens)), None)
                if found is not None:
                    self._give(batch, found, start, stop, tensors, use)
        use.done()

    def _give(self, batch: _Batch, found: Unfinished, start: int, stop: int, tensors: "dict[str, torch.Tensor]",
              use: "_Use") -> None:
        """Add rows start to stop of a pass to a sample, and write it when that makes it whole."""
        number = found.sample.i
        found.rows.append(_rows_between(tensors, start, stop, found))
        found.filled += stop - start
        found.pieces.append({name: tensors[name][start:stop] for name in _STORED if name in tensors})
        if found.filled < len(found.ids):  # the slab may be filled again before the rest comes
            found.pieces[-1] = {name: value.clone() for name, value in found.pieces[-1].items()}
            return
        batch.whole[number] = batch.open.pop(number)
        if number in batch.wanted:
            import torch

            use.add()
            batch.written[number] = self._writer.submit(number, torch.from_numpy(found.ids), found.pieces)
            batch.written[number].add_done_callback(lambda _: use.done())
        found.pieces = []


class _Use:
    """Counts who still reads a slab; calls `free` when nobody does."""

    def __init__(self, free: Any) -> None:
        self._free, self._count, self._lock = free, 1, threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def done(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._free()


def _pieces(tensors: "dict[str, torch.Tensor]") -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Yield (first row, behind the last, position of the first, tokens) of each sequence's part of a pass."""
    tokens, positions = tensors["tokens"].numpy(), tensors["positions"].numpy()
    inner = np.flatnonzero(np.diff(positions) != 1) + 1
    for start, stop in zip([0, *inner], [*inner, len(positions)], strict=True):
        yield int(start), int(stop), int(positions[start]), tokens[start:stop]


def _rows_between(tensors: "dict[str, torch.Tensor]", start: int, stop: int, found: Unfinished) -> Rows:
    rows = tensors["rows"].numpy()
    chosen = (rows >= start) & (rows < stop)
    of = {name: tensors[f"row_{name}"].numpy()[chosen] for name in ("tokens", "agrees", "differences")}
    return Rows(rows[chosen] - start + found.filled, **of)


def _joined(rows: list[Rows]) -> Rows:
    """Return the rows of several pieces, each place once."""
    joined = Rows(*(np.concatenate([getattr(each, name) for each in rows])
                    for name in ("places", "tokens", "agrees", "differences")))
    return joined.of(np.unique(joined.places, return_index=True)[1])
