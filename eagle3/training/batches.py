"""Which samples train together: split, packing, order.

Everything is a function of the sample list, the seed and the epoch, so a resumed run continues with exactly
the batches that an undisturbed one would have seen, and the same sums come out on one process or many.
"""

import functools
import hashlib
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.states.encoding import Stored
from eagle3.states.store import DamagedStates, Rows, StateStore, damaged

_SHUFFLE_WINDOW = 256
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainingSample:
    """One sequence, or a chunk of one (long_samples.py): number in the store, checksum of its file, loss mask [T] bool.

    Attributes:
        token_hash: of the token ids of the whole text; None where nothing says so.
        start: the token of the text at which the chunk begins: position p of it stands for token start + p.
        own: how many of its positions carry loss of their own; those after them belong to the next chunk, and here
            say what is drafted further on. None: all.
        source: where its prompt came from, as far as that is known.
    """

    i: int
    sha256: str
    loss_mask: np.ndarray
    token_hash: str | None = None
    start: int = 0
    own: int | None = None
    source: str = ""

    @property
    def length(self) -> int:
        """Positions that it takes in a batch: one less than its tokens, because inputs are shifted by one."""
        return len(self.loss_mask) - 1

    def supervised(self, longest: int | None = None) -> np.ndarray:
        """Return the mask [T - 1] bool of the shifted positions that carry loss, the sample cut to `longest`.

        Position p reads token p + 1 and predicts token p + 2. It counts when both were generated: a drafter
        is asked only from the first generated token on, and nothing follows the last one.
        """
        generated = self.loss_mask[1:][:longest]
        return generated & np.append(generated[1:], False)

    def learned(self, longest: int | None = None) -> np.ndarray:
        """Return the mask [T - 1] bool of the positions at which drafting begins: supervised, and of its own."""
        mask = self.supervised(longest)
        if self.own is not None:
            mask[self.own :] = False
        return mask


@dataclass
class Batch:
    """Packed sequences, T positions in all. Position p of a document stands for its token p (from 0).

    Attributes:
        ids: [T] int64, the token that is read at a position: token p + 1.
        positions: [T] int64, RoPE position p + 1 in the text, also of a chunk.
        aux: [T, A x H], the auxiliary states of token p.
        teacher: [S, H], the teacher states of token p + 1 at the S supervised positions, in order.
        mask: [T] bool, the supervised positions.
        lengths: positions of each document.
        rows: [R] int64, the positions that the drafter computes: of each document the stretch from the first to
            the last supervised one. Earlier ones serve as keys and values only.
        spans: (start, first, stop) of each document with such rows: they are first..stop - 1.
        judged: for each TTT step s the pair ([N] indexes into rows, [N] indexes into teacher) of the rows that carry
            loss there: positions p with p..p + s all supervised, p one of the sample's own; the teacher is that of
            position p + s.
        members: the samples, one a document.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    aux: torch.Tensor
    teacher: torch.Tensor
    mask: torch.Tensor
    lengths: list[int]
    rows: torch.Tensor
    spans: list[tuple[int, int, int]]
    judged: list[tuple[torch.Tensor, torch.Tensor]]
    members: list[TrainingSample] = field(default_factory=list)

    @property
    def supervised(self) -> int:
        """How many positions carry loss at the first step."""
        return len(self.judged[0][0])

    def to(self, device: torch.device, dtype: torch.dtype | None) -> "Batch":
        """Return the batch on a device, the states in `dtype` (None: as they are)."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=device.type == "cuda")

        return replace(
            self, ids=move(self.ids), positions=move(self.positions), aux=move(self.aux), teacher=move(self.teacher),
            mask=move(self.mask), rows=move(self.rows),
            judged=[(move(rows), move(teacher)) for rows, teacher in self.judged])

    def without_states(self) -> "Batch":
        """Return what is asked of a batch besides its states, on the CPU."""
        none = torch.zeros(0)
        return replace(self, aux=none, teacher=none).to(_CPU, None)

    def used_here(self) -> "Batch":
        """Return the batch, of another CUDA stream, for use in the current one: its memory is not given out before."""
        if self.aux.is_cuda:
            for tensor in (self.ids, self.positions, self.aux, self.teacher, self.mask, self.rows,
                           *(index for pair in self.judged for index in pair)):
                tensor.record_stream(torch.cuda.current_stream())
        return self


def token_hash(ids: np.ndarray) -> str:
    """Return a hash of token ids [T]."""
    return hashlib.blake2b(np.ascontiguousarray(ids, dtype=np.int64).tobytes(), digest_size=8).hexdigest()


def read_samples(store: StateStore, rows: Rows, limit: int | None = None, *, missing: int = 0) -> list[TrainingSample]:
    """Return the store's samples that have something to learn, the first `limit`.

    Args:
        missing: so many files may be gone or of another size. Their samples are returned all the same, for the trainer
            to leave out: without them all later samples would train in other batches, and others would be held out, in
            the middle of a run too.
    Raises PreconditionError if none has, if index and dataset are not of the same traces, or if more files are missing.
    """
    index = store.index()
    complete = sorted(i for i, entry in index.items() if "bytes" in entry and not entry.get("retired"))[:limit]
    if lost := sorted({*complete} - store.complete(index)):
        others = f", as are {len(lost) - 1} more of {len(complete)}" * (len(lost) > 1)
        error = damaged(store.path(lost[0]), f"no such file, or of another size than in the index{others}")
        if len(lost) > missing:
            raise error
        logger.warning("%s", error)
    for i in complete:
        _require_one_trace(store, i, index[i], rows)
    samples = [TrainingSample(i, index[i]["sha256"], np.asarray(rows.masks[i], dtype=bool),
                              token_hash(rows.input_ids[i]), source=index[i].get("source", "")) for i in complete]
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


def _require_one_trace(store: StateStore, i: int, entry: dict[str, Any], rows: Rows) -> None:
    """Raise PreconditionError unless row i of the dataset and the index entry of file i are of one trace."""
    there = (rows.ids[i], len(rows.input_ids[i]), len(rows.masks[i])) if i < len(rows.ids) else ("no row", 0, 0)
    expected = (entry["id"], entry["tokens"], entry["tokens"])
    if there != expected:
        raise PreconditionError(
            "the dataset and the index are not of the same traces", where=f"{store.directory}: sample {i}",
            expected=f"trace {expected[0]}, {expected[1]} tokens (index.jsonl)",
            found=f"trace {there[0]}, {there[1]} tokens and a mask of {there[2]} (dataset)",
            fix="run 02_extract_hidden_states.py again: it writes the dataset anew")


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


def collate(
    store: StateStore, members: list[TrainingSample], batch_tokens: int, steps: int, verify: bool,
    device: torch.device = _CPU, dtype: torch.dtype | None = None, readers: Executor | None = None,
) -> Batch:
    """Load and pack samples for `steps` TTT steps.

    Args:
        verify: check each file's checksum.
        device: where the batch is to be; states go there as they lie on disk and are put together there.
        dtype: of the states, as stored if None.
        readers: threads that read files side by side.
    """
    masks = [sample.supervised(batch_tokens) for sample in members]
    lengths = [len(mask) for mask in masks]
    read = functools.partial(_read, store, verify=verify, pin=device.type == "cuda")
    files = list((readers.map if readers else map)(read, members, lengths))
    slots, hidden = files[0].hidden.shape[1:]
    aux, teacher, finite, start = None, [], [], 0
    for own, length, supervised in zip(files, lengths, masks, strict=True):
        states = own.states(device)
        if aux is None:
            aux = torch.empty(sum(lengths), slots - 1, hidden, dtype=dtype or states.dtype, device=device)
        finite.append(torch.isfinite(torch.stack(states.aminmax())).all())  # NaN is the smallest and the largest
        aux[start : start + length] = states[:length, :-1]
        teacher.append(states[torch.from_numpy(1 + np.flatnonzero(supervised)).to(device), -1])
        start += length
    if not all(whole := torch.stack(finite).tolist()):
        raise DamagedStates(store.path(members[whole.index(False)].i), "", "NaN or Inf in hidden states")
    mask = np.concatenate(masks)
    spans = _spans(masks)
    rows = np.concatenate([np.arange(first, stop) for _, first, stop in spans]) if spans else np.zeros(0, np.int64)
    return Batch(
        ids=torch.cat([own.ids[1 : length + 1] for own, length in zip(files, lengths, strict=True)]),
        positions=torch.cat([torch.arange(1, length + 1) + sample.start
                             for sample, length in zip(members, lengths, strict=True)]),
        aux=aux.flatten(1),  # type: ignore[union-attr]
        teacher=torch.cat(teacher),
        mask=torch.from_numpy(mask),
        lengths=lengths,
        rows=torch.from_numpy(rows),
        spans=spans,
        judged=_judged(mask, np.concatenate([sample.learned(batch_tokens) for sample in members]), rows, steps),
        members=members,
    ).to(device, dtype)


def _read(store: StateStore, sample: TrainingSample, length: int, *, verify: bool, pin: bool) -> Stored:
    """Return the tokens that `length` positions of a sample read; of a chunk only those, once its file is proved."""
    if not verify and (sample.start or sample.own is not None):
        return store.read_tokens(sample.i, sample.start, sample.start + length + 1)
    stored = store.read(sample.i, sample.sha256 if verify else None, pin=pin)
    if verify and sample.token_hash not in (None, token_hash(stored.ids.numpy())):
        raise damaged(store.path(sample.i), "its token ids are not those of its row in the dataset")
    return stored.tokens(sample.start, sample.start + length + 1)


def _spans(masks: list[np.ndarray]) -> list[tuple[int, int, int]]:
    spans, start = [], 0
    for mask in masks:
        if len(found := np.flatnonzero(mask)):
            spans.append((start, start + int(found[0]), start + int(found[-1]) + 1))
        start += len(mask)
    return spans


def _judged(mask: np.ndarray, learned: np.ndarray, rows: np.ndarray, steps: int
            ) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows that carry loss at each step with their teachers (no stretch crosses documents: the last
    position of a document is never supervised)."""
    place = np.cumsum(mask) - 1  # of each supervised position among all of them
    alive, result = learned.copy(), []
    for step in range(steps):
        if step:
            alive[:-step] &= mask[step:]
            alive[-step:] = False
        judged = np.flatnonzero(alive[rows])
        result.append((torch.from_numpy(judged), torch.from_numpy(place[rows[judged] + step])))
    return result
