"""The hidden-state store: an Arrow dataset of token ids and masks beside one safetensors file per sample.

`speculators train --data-path` reads the same folder: row i of the dataset belongs to
`hidden_states/hs_{i}.safetensors`. The index says which samples are complete; a file without an index entry
does not count, and neither does an entry whose file is gone or has another size.

How states lie in a file: `eagle3.states.encoding`.
"""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3.common import files
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.states.encoding import SCALES, Stored, decode_fp8

if TYPE_CHECKING:
    import numpy as np
    import torch

INDEX = "index.jsonl"
HIDDEN_STATES = "hidden_states"
_ROWS_A_BATCH = 1000  # as `datasets` writes
_DATASET_FILES = ("data-00000-of-00001.arrow", "dataset_info.json", "state.json")


@dataclass(frozen=True)
class Sample:
    """One sequence to capture: its number, trace id, digest of the trace row, token ids, loss mask, source."""

    i: int
    id: str
    digest: str
    input_ids: list[int]
    loss_mask: list[int]
    source: str = ""

    def identity(self) -> dict[str, str]:
        """Return what ties an index entry to its trace, and where that came from."""
        return {"id": self.id, "digest": self.digest} | ({"source": self.source} if self.source else {})


class StateStore:
    """Reads and extends one 02_states directory."""

    def __init__(self, directory: Path, slots: int | None = None) -> None:
        """Take a folder; with `slots` a file with states of another number of layers is refused when it is read."""
        self.directory, self._slots = directory, slots
        self.index_path = directory / INDEX
        self.files = directory / HIDDEN_STATES

    def path(self, number: int) -> Path:
        """Return the file of sample `number`."""
        return self.files / f"hs_{number}.safetensors"

    def index(self) -> dict[int, dict[str, Any]]:
        """Return {sample number: index entry}; a later entry replaces an earlier one.

        A sample that failed keeps its number: its entry has `error` instead of bytes and checksum. An entry with
        `retired` is of a trace that is gone: it counts for nothing but its number.
        """
        return {int(row["i"]): row for _, row in files.read_jsonl(self.index_path)}

    def intact(self, index: dict[int, dict[str, Any]], numbers: Iterable[int]) -> set[int]:
        """Return those whose file has the recorded checksum: all bytes are read, by as many threads as there are cores.

        Others are named; they are as if they had not been captured.
        """

        def look(number: int) -> bool:
            try:
                with open(self.path(number), "rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest() == index[number]["sha256"]
            except OSError as error:
                logger.warning("%s: %s", self.path(number), error)
                return False

        ordered = sorted(numbers)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            good = {number for number, right in zip(ordered, pool.map(look, ordered), strict=True) if right}
        for number in ordered:
            if number not in good:
                logger.warning("%s is damaged (its checksum differs from the index); it is captured again",
                               self.path(number))
        return good

    def complete(self, index: dict[int, dict[str, Any]]) -> set[int]:
        """Return the numbers whose file is there with the recorded size (terabytes are not read again)."""
        sizes = {}
        with contextlib.suppress(FileNotFoundError):
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.files)}
        return {i for i, row in index.items() if "bytes" in row and not row.get("retired")
                and sizes.get(f"hs_{i}.safetensors") == row["bytes"]}

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add entries durably: from then on their samples are done."""
        with files.Appender(self.index_path) as appender:
            appender.append(entries)

    def finish(self, samples: list[Sample]) -> list[Path]:
        """Write the Arrow dataset and the sorted index; return the files that make the store's identity."""
        index = self.index()
        files.write_bytes(self.index_path, b"".join(files.encode_line(index[i]) for i in sorted(index)))
        _write_dataset(self.directory, self._rows(samples, index))
        return [self.index_path, *(self.directory / name for name in _DATASET_FILES)]

    def _rows(self, samples: list[Sample], index: dict[int, dict[str, Any]]) -> list[Sample]:
        """Return a row for every number from 0: row i belongs to file i, whatever became of the traces between.

        A retired number keeps its token ids, as far as its file has them, and carries no loss.
        """
        by_number = {sample.i: sample for sample in samples}
        rows = []
        for number in range(1 + max([*by_number, *index], default=-1)):
            if number in by_number:
                rows.append(by_number[number])
                continue
            ids = [0]
            with contextlib.suppress(PreconditionError):
                ids = self.read(number).ids.tolist()
            rows.append(Sample(number, "", "", ids, [0] * len(ids)))
        return rows

    def sweep(self) -> int:
        """Remove temporary files of an interrupted run; return how many there were."""
        leftovers = [*self.directory.glob(files.TEMPORARY_PREFIX + "*"), *self.files.glob(files.TEMPORARY_PREFIX + "*")]
        for path in leftovers:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return len(leftovers)

    def load(self, number: int, sha256: str | None = None) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return (hidden_states [T, slots, H], token_ids [T] int64) of a sample; fp8 states are decoded to bfloat16."""
        stored = self.read(number, sha256)
        return stored.states(), stored.ids

    def read(self, number: int, sha256: str | None = None, *, pin: bool = False) -> "Stored":
        """Return a sample as it lies in its file, read once into memory and not copied.

        With `sha256` the bytes are verified: a safetensors header says nothing of zero-filled tails and flipped bits.
        With `pin` GPUs read that memory directly, without the processor.
        """
        import torch

        path = self.path(number)
        try:
            with open(path, "rb", buffering=0) as file:
                data = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8, pin_memory=pin)
                buffer, done = memoryview(data.numpy()), 0  # type: ignore[arg-type]
                while done < len(buffer) and (count := file.readinto(buffer[done:])):
                    done += count
        except FileNotFoundError:
            raise damaged(path, "no such file") from None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise damaged(path, "the disk cannot read it") from error
        if done < len(buffer):
            raise damaged(path, "it became shorter while it was read")
        if sha256 is not None and hashlib.sha256(buffer).hexdigest() != sha256:
            raise damaged(path, "the checksum differs from the index")
        try:
            stored = Stored.within(data)
        except Exception as error:
            raise damaged(path, error) from error
        if self._slots is not None and stored.hidden.shape[1:-1] != (self._slots,):
            raise damaged(path, f"states of shape {list(stored.hidden.shape)}, not [tokens, {self._slots}, hidden]: "
                          "they are of other layers than the manifest says")
        return stored

    def read_tokens(self, number: int, first: int, stop: int) -> "Stored":
        """Return some tokens of a sample, as they lie in its file; nothing else of it is read."""
        from safetensors import safe_open

        try:
            with safe_open(self.path(number), framework="pt") as file:
                hidden, ids = (file.get_slice(name)[first:stop] for name in ("hidden_states", "token_ids"))
                return Stored(hidden, file.get_slice(SCALES)[first:stop] if SCALES in [*file.keys()] else None, ids)
        except Exception as error:
            raise damaged(self.path(number), error) from error

    def last_teacher(self, number: int) -> "torch.Tensor":
        """Return the teacher state [H] of a sample's last token, decoded as `load` does; only that row is read."""
        import torch
        from safetensors import safe_open

        with safe_open(self.path(number), framework="pt") as file:
            row = file.get_slice("hidden_states")[-1:, -1]
            return (decode_fp8(row, file.get_slice(SCALES)[-1:, -1]) if row.dtype == torch.float8_e4m3fn else row)[0]


class DamagedStates(PreconditionError):
    """A hidden-state file is not what its index says; `path` is the file."""

    def __init__(self, path: Path, found: object, what: str = "a hidden-state file is missing or damaged") -> None:
        self.path = path
        super().__init__(what, where=path, found=found, fix=capture_again([path]))


def damaged(path: Path, found: object) -> DamagedStates:
    """Return the error for a hidden-state file that cannot be used."""
    return DamagedStates(path, found)


def capture_again(paths: list[Path]) -> str:
    """Return what makes damaged files anew: stage 02 captures what is not there."""
    only = "only that sample is" if len(paths) == 1 else "only those samples are"
    return f"rm -f {' '.join(map(str, paths))}; then run 02_extract_hidden_states.py again: {only} captured again"


class Rows(NamedTuple):
    """The dataset of a store, an entry a sample number: trace ids ("" where retired), token ids [T], loss masks [T]."""

    ids: list[str]
    input_ids: "list[np.ndarray]"
    masks: "list[np.ndarray]"


def load_dataset(directory: Path) -> Rows:
    """Return the dataset of a store; PreconditionError when there is none."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(directory / _DATASET_FILES[0])) as source:
            table = pyarrow.ipc.open_stream(source).read_all()
        ids, tokens, masks = (table.column(name) for name in ("id", "input_ids", "loss_mask"))
    except Exception as error:
        raise PreconditionError(
            "not a hidden-state store", where=directory, found=error, fix="run 02_extract_hidden_states.py first"
        ) from error
    return Rows(ids.to_pylist(), list(tokens.to_numpy()), list(masks.to_numpy()))


def _write_dataset(directory: Path, samples: list[Sample]) -> None:
    """Save the dataset in a temporary folder and move its files in, data before the files that name it.

    The same samples give the same bytes: the fingerprint is a hash of theirs. The files are those of `save_to_disk`,
    which would compute fingerprints as well: `datasets` pickles whatever it meets for that, and fails where packages
    lie outside the interpreter's prefix (PicklingError: MonthDayNano).
    """
    import pyarrow
    from datasets import DatasetInfo, Features, Sequence, Value

    features = Features(
        {
            "input_ids": Sequence(Value("int64")),
            "loss_mask": Sequence(Value("bool")),
            "seq_len": Value("int64"),
            "id": Value("string"),
        }
    )
    columns = {
        "input_ids": [sample.input_ids for sample in samples],
        "loss_mask": [[bool(value) for value in sample.loss_mask] for sample in samples],
        "seq_len": [len(sample.input_ids) for sample in samples],
        "id": [sample.id for sample in samples],
    }
    table = pyarrow.table(columns, schema=features.arrow_schema)
    state: dict[str, Any] = {
        "_data_files": [{"filename": _DATASET_FILES[0]}], "_format_type": "torch", "_format_kwargs": {},
        "_fingerprint": files.sha256_json([sample.digest for sample in samples])[:16], "_format_columns": None,
        "_output_all_columns": False, "_split": None,
    }
    temporary = directory / f"{files.TEMPORARY_PREFIX}dataset"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with pyarrow.OSFile(str(temporary / _DATASET_FILES[0]), "wb") as sink, \
            pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=_ROWS_A_BATCH)
    DatasetInfo(features=features).write_to_directory(str(temporary))
    files.write_json(temporary / _DATASET_FILES[2], state)
    for name in _DATASET_FILES:
        with open(temporary / name, "rb+") as file:
            files.fsync(file.fileno())
        os.replace(temporary / name, directory / name)
    files.fsync_directory(directory)
    shutil.rmtree(temporary)
