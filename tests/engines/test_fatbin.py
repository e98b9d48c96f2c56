"""Device code, read out of libraries made for it."""

import struct

from eagle3.engines import fatbin


def fat_library(path, *containers):
    """Write an ELF file whose device code has these (kind, architecture) entries, a list a container."""
    code = b""
    for entries in containers:
        body = b"".join(struct.pack("<HHIQ12xI32x", kind, 0x101, 64, 24, number) + b"x" * 24
                        for kind, number in entries)
        code += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + b"\0" * 8  # padding between them
    names = b"\0.text\0.nv_fatbin\0.shstrtab\0"
    rows = [(0, 0, 0), (1, 64, 4), (7, 68, len(code)), (18, 68 + len(code), len(names))]
    sections = b"".join(struct.pack("<II16xQQ24x", name, 1, start, size) for name, start, size in rows)
    table = 68 + len(code) + len(names)
    header = b"\x7fELF\x02" + b"\0" * 35 + struct.pack("<Q", table) + b"\0" * 10 + struct.pack("<HHH", 64, len(rows), 3)
    path.write_bytes(header.ljust(64, b"\0")[:64] + b"text" + code + names + sections)
    return path


def test_device_code_is_read_from_a_library(tmp_path):
    library = fat_library(tmp_path / "_C.so", [(2, 90), (1, 80)], [(2, 120), (64, 75)])
    assert fatbin.architectures(library) == {"sm_90", "compute_80", "sm_120"}
    assert fatbin.architectures(fat_library(tmp_path / "none.so")) == set()
    (tmp_path / "text.so").write_text("no library")
    assert fatbin.architectures(tmp_path / "text.so") == set()
