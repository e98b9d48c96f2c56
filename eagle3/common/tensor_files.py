"""Safetensors files as they lie on disk: their headers, and new files whose data is streamed from old ones.

A safetensors file is eight bytes of header length, a JSON header padded with spaces to a multiple of eight, and
the tensors' bytes without gaps. So renaming tensors, or leaving some out, is a new header and a copy of bytes.
Only the standard library is needed for it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from eagle3.common import files
from eagle3.common.errors import PreconditionError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = _ALIGNMENT = 8
_LARGEST_HEADER = 100_000_000  # the format's own limit
_BLOCK = 8 << 20
# Bits of an element of every type that the format has (safetensors 0.8).
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# As fast as the kernel's own copy of a file. Its copy_file_range took 1.3 times as long on ext4, because the new
# header shifts the data by less than a large page.
_COPY_BLOCK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: as the format names it (BF16, F8_E4M3, I64, BOOL, …).
        start: first byte, counted from the file's beginning. size: bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def item_size(self) -> float:
        """Bytes of one element (below 1 for packed types), 0 for an empty tensor."""
        return self.size / math.prod(self.shape) if self.size else 0


def read(folder: Path) -> dict[str, Entry]:
    """Return every tensor of a model folder by name, from headers alone.

    Raises PreconditionError when there are no safetensors, when a file is damaged, or when the index and its
    shards do not hold the same names.
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.exists() and single.exists():
        raise PreconditionError("the folder holds one file and shards as well; engines differ in which they take",
                                where=folder, expected=f"{SINGLE} or {INDEX}", fix="move the older of them away")
    if not index.exists():
        if not single.is_file():
            raise PreconditionError("the weights are missing", where=folder, expected=f"{SINGLE} or {INDEX}",
                                    fix="name a folder with safetensors weights; other formats are not loaded")
        return read_header(single)
    names = weight_map(folder)
    tensors: dict[str, Entry] = {}
    for shard in sorted(set(names.values())):
        found = read_header(folder / shard)
        expected = {name for name, file in names.items() if file == shard}
        if found.keys() != expected:
            raise PreconditionError("a shard does not hold what the index says", where=folder / shard,
                                    expected=", ".join(sorted(expected - found.keys())) or "nothing more",
                                    found=", ".join(sorted(found.keys() - expected)) or "nothing else",
                                    fix="copy shards and index again from one place")
        tensors |= found
    return tensors


def weight_map(folder: Path) -> dict[str, str]:
    """Return {tensor name: shard} of a folder's index; a shard outside the folder is refused."""
    content = files.read_json(folder / INDEX)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or any(Path(str(shard)).name != shard for shard in names.values()):
        raise PreconditionError("not an index of shards", where=folder / INDEX,
                                expected="weight_map: tensor name → name of a file in this folder")
    return names


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of one file in the order of their data; PreconditionError when the file is damaged."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = file.read(_LENGTH_BYTES)
            header, data = parse_header(length + file.read(_header_bytes(length, size)), size)
        return _entries(path, header, data, size)
    except FileNotFoundError:
        raise PreconditionError("a file of weights is missing", where=path) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PreconditionError("not a whole safetensors file", where=path, found=error,
                                fix="copy it again; it may have been cut off") from None


def parse_header(buffer: Any, size: int | None = None) -> tuple[dict[str, Any], int]:
    """Return (the JSON header, where the data begins) of a safetensors file in memory, whole or its beginning.

    Args:
        buffer: bytes-like. size: of the file, if the buffer is only its beginning.
    Raises ValueError when it does not begin with such a header.
    """
    length = _header_bytes(bytes(buffer[:_LENGTH_BYTES]), len(buffer) if size is None else size)
    text = bytes(buffer[_LENGTH_BYTES : _LENGTH_BYTES + length])
    if text[:1] != b"{":
        raise ValueError("the header does not begin with {")
    header = json.loads(text.decode(), object_pairs_hook=_unlike, parse_constant=_no_number)
    if b"\\u" in text:
        json.dumps(header, ensure_ascii=False).encode()  # half a surrogate pair is no text, nor for the library
    return header, _LENGTH_BYTES + length


def _unlike(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; ValueError when a name stands in it twice, which readers take differently."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands in the header twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _header_bytes(length: bytes, size: int) -> int:
    count = int.from_bytes(length, "little")
    if not 2 <= count <= min(_LARGEST_HEADER, size - _LENGTH_BYTES):
        raise ValueError(f"a header of {count:,} bytes in a file of {size:,}")
    return count


def make_header(tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: dict[str, str] | None = None) -> bytes:
    """Return the beginning of a file that holds {name: (type as the format names it, shape, bytes)} in this order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _entries(path: Path, header: dict[str, Any], data: int, size: int) -> dict[str, Entry]:
    metadata = header.get("__metadata__")
    if metadata is not None and not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ holds more than texts")
    found = [(name, _entry(path, name, each, data)) for name, each in header.items() if name != "__metadata__"]
    found.sort(key=lambda item: (item[1].start, item[1].size))
    end = data
    for name, entry in found:
        if entry.start != end or entry.size < 0:
            raise ValueError(f"{name} starts at byte {entry.start:,}, the data before it ends at {end:,}")
        end += entry.size
    if end != size:
        raise ValueError(f"{size:,} bytes, the header speaks of {end:,}")
    return dict(found)


def _entry(path: Path, name: str, each: dict[str, Any], data: int) -> Entry:
    """Return one tensor; ValueError when the library would not load it: its type, its shape or its bytes."""
    dtype, shape, (start, end) = each["dtype"], each["shape"], each["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{name} is of an unknown type: {dtype!r:.40}")
    if not isinstance(shape, list) or not all(_is_count(value) for value in (*shape, start, end)):
        raise ValueError(f"{name} has no shape or place: {shape!r:.80}, {start!r:.40} to {end!r:.40}")
    if math.prod(shape) * BITS[dtype] != (end - start) * 8:
        raise ValueError(f"{name}: {end - start:,} bytes for {dtype} {shape!r:.80}")
    return Entry(path, dtype, tuple(shape), data + start, end - start)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def blocks(entry: Entry, block: int = _BLOCK) -> Iterator[bytes]:
    """Yield a tensor's bytes, `block` bytes at a time (8 MiB: a whole number of elements of every type)."""
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        left = entry.size
        while left:
            data = file.read(min(block, left))
            if len(data) < min(block, left):
                raise PreconditionError("a file became shorter while it was read", where=entry.file)
            left -= len(data)
            yield data


def write(path: Path, tensors: dict[str, Entry]) -> None:
    """Write a file of these tensors, {name: where its bytes are now}, straight to `path`.

    Wider types come first, so that every tensor is aligned to its elements whatever was left out; otherwise the
    order stays, and what lies together is copied at once. Callers make it atomic (`files.replacing`).
    """
    order = sorted(tensors, key=lambda name: -tensors[name].item_size)
    header = {name: (tensors[name].dtype, tensors[name].shape, tensors[name].size) for name in order}
    with open(path, "wb", buffering=0) as target:
        target.write(make_header(header, {"format": "pt"}))
        for file, start, size in _runs([tensors[name] for name in order]):
            with open(file, "rb", buffering=0) as source:
                _copy(source, start, size, target)


def write_index(path: Path, shards: dict[str, dict[str, Entry]]) -> None:
    """Write the index of {shard: its tensors} straight to `path`."""
    total = sum(entry.size for tensors in shards.values() for entry in tensors.values())
    names = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _runs(entries: list[Entry]) -> list[tuple[Path, int, int]]:
    """Return (file, first byte, bytes) of what can be copied in one go."""
    runs: list[tuple[Path, int, int]] = []
    for entry in entries:
        if runs and runs[-1][0] == entry.file and runs[-1][1] + runs[-1][2] == entry.start:
            runs[-1] = (entry.file, runs[-1][1], runs[-1][2] + entry.size)
        elif entry.size:
            runs.append((entry.file, entry.start, entry.size))
    return runs


def _copy(source: BinaryIO, start: int, size: int, target: BinaryIO) -> None:
    """Append bytes of one file to another, both unbuffered."""
    buffer = memoryview(bytearray(_COPY_BLOCK))
    source.seek(start)
    while size:
        count = source.readinto(buffer[: min(size, _COPY_BLOCK)])  # type: ignore[attr-defined]
        if not count:
            raise PreconditionError("a file became shorter while it was copied", where=source.name)
        written = 0
        while written < count:
            written += target.write(buffer[written:count])
        size -= count
