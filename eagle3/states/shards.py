"""One capture cut into shards that run anywhere, and put together again by their indexes.

All shards number all traces alike, since numbers follow from the list of traces alone, and cut it into the same
batches; shard k of n runs every n-th of them. So the files of a sample are, byte by byte, those of one undivided
capture.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.common import files
from eagle3.common import manifest as manifests
from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import logger
from eagle3.states.store import Sample, StateStore


def parse(text: str | None) -> tuple[int, int]:
    """Return (k from 0, n) of a shard "k/n" with k from 1; (0, 1) without one. UsageError for anything else."""
    if text is None:
        return 0, 1
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise UsageError("not a shard", where="--shard", expected="k/n with k from 1 to n, such as 2/8", found=text)
    return int(k) - 1, int(n)


def share(batches: Iterator[list[Sample]], shard: tuple[int, int]) -> list[list[Sample]]:
    """Return the batches of a shard."""
    return [batch for number, batch in enumerate(batches) if number % shard[1] == shard[0]]


def merge(store: StateStore, folders: list[Path], samples: list[Sample], fingerprint: str) -> None:
    """Take into `store` what shards have captured of `samples`: linked where that is possible, else copied.

    Nothing is removed from the shards. What is damaged there, or not finished, is left out, and captured afterwards.
    Raises PreconditionError for a folder that was captured with other options, of other traces or another model.
    """
    by_number, known = {sample.i: sample for sample in samples}, store.complete(store.index())
    store.files.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        other = StateStore(folder)
        found = manifests.read(folder, "name folders of 02_extract_hidden_states.py --shard")
        if found.get("fingerprint") != fingerprint:
            raise PreconditionError(
                "a shard was captured with other options or inputs", where=folder, expected=fingerprint,
                found=found.get("fingerprint"), fix="capture it again with traces, model and options of this command")
        index = other.index()
        taken = []
        for number in sorted(other.complete(index) - known):
            if number not in by_number or by_number[number].digest != index[number]["digest"]:
                raise PreconditionError(
                    "a shard numbers its samples otherwise", where=other.path(number),
                    expected=f"trace {by_number[number].id}" if number in by_number else "no sample of that number",
                    found=f"trace {index[number]['id']}", fix="capture shards into empty folders, from the same traces")
            _take(other.path(number), store.path(number))
            taken.append(index[number])
        files.fsync_directory(store.files)
        store.append(taken)
        known |= {int(entry["i"]) for entry in taken}
        logger.info("%d samples from %s", len(taken), folder)


def about(shard: tuple[int, int]) -> dict[str, Any]:
    """Return what the manifest says of a shard."""
    return {} if shard[1] == 1 else {"shard": f"{shard[0] + 1}/{shard[1]}"}


def _take(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        with files.replacing(target, directory_too=False) as temporary:
            shutil.copyfile(source, temporary)
