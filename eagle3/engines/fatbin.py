"""Which GPUs a compiled library has code for, read from the file: no CUDA tools, no GPU, nothing loaded.

Device code lies in ELF sections named .nv_fatbin: containers, each with a header (magic, size) and entries, each
with its kind (1: PTX, 2: a binary), size and architecture (90 for sm_90). Only headers are read.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SECTION = ".nv_fatbin"
_MAGIC = 0xBA55ED50
_KINDS = {1: "compute", 2: "sm"}
_PADDING = 8  # containers are aligned to this


def architectures(library: Path) -> set[str]:
    """Return what a library has code for, such as {"sm_90", "compute_80"}; empty when it is no 64-bit ELF file."""
    found = set()
    with open(library, "rb") as file:
        for start, size in _sections(file):
            for kind, number in _entries(file, start, start + size):
                if kind in _KINDS:
                    found.add(f"{_KINDS[kind]}_{number}")
    return found


def _sections(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield (first byte, bytes) of the sections that hold device code."""
    header = file.read(64)
    if header[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", header, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", header, 0x3A)
    rows = [struct.unpack_from("<II16xQQ", _read(file, table + i * size, size)) for i in range(count)]
    names = _read(file, rows[names_at][2], rows[names_at][3]) if rows else b""
    for name, _, start, length in rows:
        if names[name : names.find(b"\0", name)].decode(errors="replace") == _SECTION:
            yield start, length


def _entries(file: BinaryIO, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (kind, architecture) of every entry of the containers between two bytes."""
    while at + 16 <= end:
        magic, _, header, size = struct.unpack("<IHHQ", _read(file, at, 16))
        if magic != _MAGIC:
            at += _PADDING
            continue
        entry = at + header
        at = min(end, entry + size)
        while entry + 32 <= at:
            kind, _, header, size, number = struct.unpack("<HHIQ12xI", _read(file, entry, 32))
            yield kind, number
            entry += max(1, header + size)


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)
