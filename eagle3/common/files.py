"""Files that survive a crash: atomic replacement, durable append, checksums, model identity.

Measured facts behind the rules: a rename without fsync of the file and of its directory is not durable, a
move between file systems leaves partial files under the final name, and safetensors accepts files whose
tail is zeros. So a file is written under a temporary name in its own directory, synced, renamed, and its
SHA-256 is recorded by whoever counts it as done.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError

TEMPORARY_PREFIX = ".tmp-"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# What file systems say that do not know a call at all (Lustre without flock, FUSE, mounts of object stores, FAT).
UNKNOWN_CALL = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EPERM)
NO_DIRECTORY_SYNC = (errno.EACCES, errno.EBADF, errno.EISDIR)
_SAMPLE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20  # hashed and then written while it lies in the processor's cache
_POINTER_BYTES = 256


def fsync(fd: int) -> None:
    """Make a file durable, as far as its file system can: `eagle3.common.probe` says where it cannot."""
    with _tolerating(*UNKNOWN_CALL):
        os.fsync(fd)


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable, as far as its file system can."""
    with _tolerating(*UNKNOWN_CALL, *NO_DIRECTORY_SYNC):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _tolerating(*numbers: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


def make_directory(directory: Path) -> None:
    """Make a directory and those above it; PreconditionError where there can be none."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise disk_full(directory) from error
        raise PreconditionError("a directory cannot be made", where=directory, found=error.strerror,
                                fix="name another place with --run-dir or --out") from None


@contextlib.contextmanager
def replacing(path: Path, *, directory_too: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success sync it and rename it to `path`, which is synced too.

    Raises PreconditionError naming the path and the free bytes when the disk is full; the temporary file
    is removed on any error, so that nothing half-written stays under either name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}"
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            fsync(file.fileno())
        os.replace(temporary, path)
        if directory_too:
            fsync_directory(path.parent)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise disk_full(path) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def disk_full(path: Path) -> PreconditionError:
    """Return the error for a full disk, naming the path and what is free."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    stat = os.statvfs(existing)
    return PreconditionError(
        "the disk is full; what was finished before is intact",
        where=path,
        found=f"{stat.f_bavail * stat.f_frsize:,} bytes free",
        fix="free space (or name another disk with --out) and run the same command again",
    )


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` atomically with `data`."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_parts(path: Path, parts: Iterable[bytes | memoryview], seen: Callable[[bytes | memoryview], object]) -> None:
    """Replace `path` atomically with the bytes of `parts`, showing each block to `seen` (a hash's update) on the way.

    The name becomes durable with the next `fsync_directory` of its folder: one for a group of files.
    """
    with replacing(path, directory_too=False) as temporary, open(temporary, "wb", buffering=0) as file:
        for part in parts:
            for start in range(0, len(part), _BLOCK_BYTES):
                block = part[start : start + _BLOCK_BYTES]
                seen(block)
                while len(block):
                    block = block[file.write(block) :]


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically with `value` as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))


def point(pointer: Path, target: str) -> None:
    """Let `pointer` lead to the folder `target` beside it in one step.

    It becomes a symbolic link, or, where the file system has none, a text file of that name: `followed` reads both.
    """
    temporary = pointer.parent / f"{TEMPORARY_PREFIX}{pointer.name}"
    temporary.unlink(missing_ok=True)
    try:
        os.symlink(target, temporary)
    except OSError as error:
        if error.errno not in UNKNOWN_CALL:
            raise
        write_bytes(pointer, target.encode() + b"\n")
        return
    os.replace(temporary, pointer)
    fsync_directory(pointer.parent)


def followed(path: Path) -> Path:
    """Return where a pointer leads: the path itself, unless it is a text file that names a folder beside it."""
    if not path.is_file() or path.stat().st_size > _POINTER_BYTES:
        return path
    name = path.read_bytes().decode(errors="replace").strip()
    return path.parent / name if name and Path(name).name == name != ".." and (path.parent / name).is_dir() else path


def read_json(path: Path, *, fix: str = "") -> Any:
    """Return the JSON value in `path`; PreconditionError when it is missing or not JSON."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise PreconditionError("a file is missing", where=path, fix=fix) from None
    except (ValueError, IsADirectoryError) as error:
        raise PreconditionError("not a JSON file", where=path, found=error, fix=fix) from None


def parse_json(data: bytes) -> Any:
    """Return the JSON value in UTF-8 bytes; ValueError when there is none, also for one nested beyond reason."""
    try:
        return json.loads(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of a JSON value in canonical form (sorted keys, ASCII)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


# --- JSON lines -------------------------------------------------------------------------------------------


def repair_tail(path: Path) -> int:
    """Cut a torn last line (no newline at its end) off a JSON-lines file; return the bytes removed."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        keep = _end_of_last_line(file, size)
        if keep < size:
            file.truncate(keep)
            fsync(file.fileno())
        return size - keep


def _end_of_last_line(file: Any, size: int) -> int:
    """Return the offset just past the last newline, searching backwards in blocks."""
    end = size
    while end > 0:
        start = max(0, end - (1 << 20))
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_jsonl(path: Path, start: int = 0, parse: Callable[[bytes], Any] | None = None
               ) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line; a missing file is empty, a torn last line is skipped.

    Args:
        start: byte to begin at. parse: what reads a line, default `parse_json`.
    Raises PreconditionError with the line number when a line in the middle is not a JSON object.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(start)
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                value = (parse or parse_json)(line)
                if not isinstance(value, dict):
                    raise ValueError(f"a JSON {type(value).__name__}, not an object")
            except ValueError as error:
                raise PreconditionError(
                    "a line is not a JSON object",
                    where=f"{path} line {number}",
                    found=error,
                    fix="restore the file from a copy, or remove that line and run the stage again",
                ) from None
            yield number, value


class Appender:
    """A JSON-lines file to which rows are appended durably.

    Opening repairs a torn tail. `append` returns only when the rows are on disk (fsync), so a row counts as
    done as soon as the call has returned.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.repaired_bytes = repair_tail(path)
        # Unbuffered: a buffer would keep the rest of a row that did not fit on the disk and write it later.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the object
        fsync_directory(path.parent)

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write the rows and wait until they are durable."""
        self.append_lines(b"".join(encode_line(row) for row in rows))

    def append_lines(self, data: bytes) -> None:
        """Write encoded rows and wait until they are durable."""
        start = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
            fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), start)
            if error.errno in DISK_FULL:
                raise disk_full(self.path) from error
            raise

    def close(self) -> None:
        """Close the file; everything appended is already durable."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode_line(row: dict[str, Any]) -> bytes:
    """Return one row as a JSON line; ASCII escapes keep lone surrogates and U+2028 harmless."""
    return json.dumps(row, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


# --- identity ---------------------------------------------------------------------------------------------


def hash64(text: str) -> int:
    """Return 64 bits of a text's hash: ids are held as such, about 100 bytes each whatever their length."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def sampled_digest(path: Path) -> str:
    """Return a hash of a file's size and of 64 KiB at its start, middle and end.

    Fine-tunes of one model share names, sizes and configuration; their weights differ everywhere, so three
    samples tell them apart without reading 547 GB.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for offset in sorted({0, max(0, size // 2 - _SAMPLE_BYTES // 2), max(0, size - _SAMPLE_BYTES)}):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def model_identity(folder: Path) -> dict[str, str]:
    """Return {file name: hash} for a model folder: JSON and tokenizer files whole, weights sampled.

    Raises PreconditionError when the folder has no config.json.
    """
    if not (folder / "config.json").is_file():
        raise PreconditionError(
            "not a model folder: config.json is missing", where=folder, fix="give the folder with --model"
        )
    small = (".json", ".jinja", ".model", ".txt", ".py")
    hashers: list[tuple[Callable[[Path], str], tuple[str, ...]]] = [
        (sha256_file, small),
        (sampled_digest, (".safetensors",)),
    ]
    return {
        path.name: hasher(path)
        for path in sorted(folder.iterdir())
        for hasher, suffixes in hashers
        if path.suffix in suffixes
    }
