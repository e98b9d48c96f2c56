"""The hidden-state store: an Arrow dataset of token ids and masks beside one safetensors file per sample.

`speculators train --data-path` reads the same folder: row i of the dataset belongs to
`hidden_states/hs_{i}.safetensors`. The index says which samples are complete; a file without an index entry
does not count, and neither does an entry whose file is gone or has another size.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import files
from eagle3.errors import PreconditionError

if TYPE_CHECKING:
    import torch

INDEX = "index.jsonl"
HIDDEN_STATES = "hidden_states"
_DATASET_FILES = ("data-00000-of-00001.arrow", "dataset_info.json", "state.json")


@dataclass(frozen=True)
class Sample:
    """One sequence to capture: its number, trace id, digest of the trace row, token ids and loss mask."""

    i: int
    id: str
    digest: str
    input_ids: list[int]
    loss_mask: list[int]

    def identity(self) -> dict[str, str]:
        """Return what ties an index entry to its trace."""
        return {"id": self.id, "digest": self.digest}


def bytes_per_token(hidden_size: int, dtype: str = "bfloat16", slots: int = 4) -> int:
    """Return the bytes that one token takes: `slots` vectors of the verifier's precision and an int64 id."""
    return slots * hidden_size * (4 if dtype == "float32" else 2) + 8


class StateStore:
    """Reads and extends one 02_states directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index_path = directory / INDEX
        self.files = directory / HIDDEN_STATES

    def path(self, number: int) -> Path:
        """Return the file of sample `number`."""
        return self.files / f"hs_{number}.safetensors"

    def index(self) -> dict[int, dict[str, Any]]:
        """Return {sample number: index entry}; a later entry replaces an earlier one.

        A sample that failed keeps its number: its entry has `error` instead of bytes and checksum.
        """
        return {int(row["i"]): row for _, row in files.read_jsonl(self.index_path)}

    def complete(self, index: dict[int, dict[str, Any]]) -> set[int]:
        """Return the numbers whose file is there with the recorded size (terabytes are not read again)."""
        sizes = {}
        with contextlib.suppress(FileNotFoundError):
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.files)}
        return {i for i, row in index.items() if "bytes" in row and sizes.get(f"hs_{i}.safetensors") == row["bytes"]}

    def append(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add entries durably: from then on their samples are done."""
        with files.Appender(self.index_path) as appender:
            appender.append(entries)

    def finish(self, samples: list[Sample]) -> list[Path]:
        """Write the Arrow dataset and the sorted index; return the files that make the store's identity."""
        index = self.index()
        lines = [files.encode_line(index[sample.i]) for sample in samples if sample.i in index]
        files.write_bytes(self.index_path, b"".join(lines))
        _write_dataset(self.directory, samples)
        return [self.index_path, *(self.directory / name for name in _DATASET_FILES)]

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
        """Return (hidden_states [T, slots, H], token_ids [T] int64) of a sample.

        With `sha256` the bytes are verified: safetensors itself accepts zero-filled tails and flipped bits.
        """
        from safetensors.torch import load

        path = self.path(number)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise damaged(path, "no such file") from None
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise damaged(path, "the checksum differs from the index")
        try:
            tensors = load(data)
        except Exception as error:
            raise damaged(path, error) from error
        return tensors["hidden_states"], tensors["token_ids"]


def damaged(path: Path, found: object) -> PreconditionError:
    """Return the error for a hidden-state file that cannot be used."""
    return PreconditionError(
        "a hidden-state file is missing or damaged",
        where=path,
        found=found,
        fix=f"rm -f {path}; then run 02_extract_hidden_states.py again: only that sample is captured again",
    )


def load_dataset(directory: Path) -> tuple[list[str], list[Any], list[Any]]:
    """Return (ids, token id arrays, loss mask arrays) of a store, one entry per sample number."""
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(directory)).with_format("numpy")
    except Exception as error:
        raise PreconditionError(
            "not a hidden-state store", where=directory, found=error, fix="run 02_extract_hidden_states.py first"
        ) from error
    return [str(i) for i in dataset["id"]], list(dataset["input_ids"]), list(dataset["loss_mask"])


def _write_dataset(directory: Path, samples: list[Sample]) -> None:
    """Save the dataset in a temporary folder and move its files in, data before the files that name it.

    The same samples give the same bytes: the fingerprint that `datasets` would draw is set to a hash.
    """
    from datasets import Dataset, Features, Sequence, Value

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
    dataset = Dataset.from_dict(columns, features=features)
    dataset.set_format("torch")
    dataset._fingerprint = files.sha256_json([sample.digest for sample in samples])[:16]
    temporary = directory / f"{files.TEMPORARY_PREFIX}dataset"
    shutil.rmtree(temporary, ignore_errors=True)
    dataset.save_to_disk(str(temporary), num_shards=1)
    for name in _DATASET_FILES:
        with open(temporary / name, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary / name, directory / name)
    files.fsync_directory(directory)
    shutil.rmtree(temporary)
