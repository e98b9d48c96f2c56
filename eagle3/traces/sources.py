"""Containers: where rows of prompts come from, each read as a stream and any number of times.

JSON lines, one JSON array, Parquet, a folder of such files, a folder that `datasets` has saved, a dataset on
the Hugging Face hub or in its local cache. What a row means is no concern of this room.
"""

import codecs
import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger

# (place, such as "p.jsonl line 3"; name of the file or dataset; the row)
Placed = tuple[str, str, dict[str, Any]]

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")
_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20  # characters of an array that are read at once
_NEAR_END = 16  # an error this close to the end of a chunk may come from the cut: no JSON word is longer
_DAMAGE = (OSError, EOFError, zlib.error, ValueError, NotImplementedError)  # of gzip, JSON and Arrow
_BATCH_ROWS = 256  # rows of a column store that are Python objects at the same time


def open_rows(name: str, split: str) -> Callable[[], Iterator[Placed]]:
    """Return a function that starts a new pass over the rows of a file, folder or dataset.

    Args:
        name: path, or `org/name` or `org/name:config` of a dataset.
        split: which part of a dataset that has several.
    Raises:
        PreconditionError: there is nothing of that name; in a pass: a file is damaged or not of its kind.
    """
    path = Path(name)
    with _readable(path):
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return partial(_dataset_rows, _saved_dataset(path, split), str(path), path.name)
        if path.is_dir():
            return partial(_folder_rows, _files_of(path))
        if path.is_file():
            return partial(_file_rows, path)
        if path.exists():
            raise PreconditionError("prompts are read twice, which a pipe or device does not allow", where=path,
                                    fix="write them into a file first")
        if _HUB_NAME.fullmatch(name) and not name.endswith(_SUFFIXES):
            return partial(_dataset_rows, _hub_dataset(name, split), name, name.partition(":")[0])
    raise PreconditionError("the prompts file is missing", where=path, fix="correct --prompts")


# --- files ------------------------------------------------------------------------------------------------


def _files_of(folder: Path) -> list[Path]:
    """Return the files with rows that lie in a folder, by name."""
    visible = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in visible if path.name.endswith(_SUFFIXES) and path.is_file()]
    if not files:
        raise PreconditionError("the folder holds no prompts", where=folder, expected="files ending in "
                                + ", ".join(_SUFFIXES), found=", ".join(path.name for path in visible[:5]) or "none",
                                fix="correct --prompts")
    if others := [path.name for path in visible if path not in files]:
        logger.info("%s: %d other entries are not read, such as %s", folder, len(others), others[0])
    return files


def _folder_rows(paths: list[Path]) -> Iterator[Placed]:
    for path in paths:
        yield from _file_rows(path)


def _file_rows(path: Path) -> Iterator[Placed]:
    source = path.name.encode(errors="replace").decode()  # a name need not be UTF-8, what is sent must be
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    with _readable(path):
        for place, row in rows:
            yield f"{path} {place}", source, _object(row, f"{path} {place}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(where, f"{type(value).__name__} {str(value)[:60]!r}")
    return value


def _malformed(where: str, found: object) -> PreconditionError:
    return PreconditionError("a prompt row is malformed", where=where, expected="a JSON object", found=found,
                             fix="correct or remove that row")


@contextlib.contextmanager
def _readable(where: object, kinds: tuple[type[Exception], ...] = _DAMAGE) -> Iterator[None]:
    """Turn what a reader raises into an error that names the source."""
    try:
        yield
    except ImportError as error:
        raise PreconditionError("reading these prompts needs a package that is not installed", where=where,
                                found=error, fix="pip install datasets pyarrow") from None
    except kinds as error:
        found = f"{type(error).__name__}: {error}"
        raise PreconditionError("the prompts cannot be read", where=where, found=found) from None


# --- JSON -------------------------------------------------------------------------------------------------


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of a file of JSON lines or of one JSON array, also compressed by gzip."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        start = b""
        while not start and (block := file.read(4096)):
            start = block.removeprefix(_BOM).lstrip()
        file.seek(0)
        if start.startswith(b"["):
            yield from _array_elements(file, path)
            return
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield f"line {number}", _parsed(line, f"{path} line {number}")


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode(errors="surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise _malformed(where, error) from None


def _array_elements(file: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, object) for the elements of a JSON array, holding little more than one of them."""
    text = _Text(file, path)
    text.skip("[")
    for number in count(1):
        text.place = f"row {number}"
        if text.peek() == "]" and number == 1:
            break
        yield text.place, text.take_object()
        if text.peek() == "]":
            break
        text.skip(",")
    text.skip("]")
    if rest := text.peek():
        raise _malformed(f"{path} after row {number}", f"more text, starting with {rest!r}")


class _Text:
    """The characters of a JSON file, read chunk by chunk as a decoder asks for them."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path, self.place = file, path, "row 1"
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogatepass").decode
        self._json = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False

    def peek(self) -> str:
        """Return the next character that is not white space, without taking it; "" at the end."""
        while True:
            rest = len(self._text)
            while self._at < rest and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < rest:
                return self._text[self._at]
            if not self._more(_CHUNK):
                return ""

    def skip(self, character: str) -> None:
        """Take a character that must come next."""
        if self.peek() != character:
            raise _malformed(f"{self._path} {self.place}", f"{self.peek()!r} where {character!r} is due")
        self._at += 1

    def take_object(self) -> dict[str, Any]:
        """Take the object that must come next."""
        if self.peek() != "{":  # anything else need not show its own end
            raise _malformed(f"{self._path} {self.place}", self._text[self._at : self._at + 60] or "the end")
        while True:
            try:
                value, self._at = self._json.raw_decode(self._text, self._at)
                return value
            except (json.JSONDecodeError, RecursionError) as error:
                if not self._is_cut(error) or not self._more(max(_CHUNK, len(self._text) - self._at)):
                    raise _malformed(f"{self._path} {self.place}", getattr(error, "msg", error)) from None

    def _is_cut(self, error: Exception) -> bool:
        """Say whether an error may come from the end of what was read so far."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _NEAR_END

    def _more(self, size: int) -> bool:
        """Read on, dropping what is taken; False at the end. Doubling sizes keep long objects linear."""
        if self._ended:
            return False
        data = self._file.read(size)
        self._ended = not data
        try:
            self._text = self._text[self._at :] + self._decode(data, self._ended)
        except UnicodeDecodeError as error:
            raise _malformed(f"{self._path} {self.place} or soon after", error) from None
        self._at = 0
        return not self._ended


# --- column stores ----------------------------------------------------------------------------------------


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    # With these two, pages are read as they are needed; else a row group, which may be the file, lies in memory.
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        yield from _table_rows(file.iter_batches(batch_size=_BATCH_ROWS))


def _dataset_rows(dataset: Any, where: str, source: str) -> Iterator[Placed]:
    tables = dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS)  # arrow: images are not decoded
    with _readable(where, (Exception,)):  # `datasets` and the network raise whatever they like
        for place, row in _table_rows(tables):
            yield f"{where} {place}", source, row


def _table_rows(tables: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of Arrow tables or batches, as the same row in a JSON file would read."""
    import pyarrow

    number = 0
    for table in tables:
        plain = _plain_values(pyarrow.struct(list(table.schema)))
        for row in table.to_pylist():
            number += 1
            yield f"row {number}", plain(row)


def _plain_values(kind: Any) -> Any:
    """Return what makes plain values of an Arrow type's Python form, None where that is plain already.

    A struct has every member that any row has, null where this row has none: those are left out.
    """
    import pyarrow

    if getattr(kind, "extension_name", "") == "arrow.json":  # what `datasets` makes of mixed types
        return json.loads
    if pyarrow.types.is_struct(kind):
        members = {item.name: _plain_values(item.type) for item in kind}
        return lambda value: {
            name: members[name](item) if members[name] else item for name, item in value.items() if item is not None
        }
    if isinstance(kind, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType):
        inner = _plain_values(kind.value_type)
        return inner and (lambda values: [None if item is None else inner(item) for item in values])
    return None


def _saved_dataset(folder: Path, split: str) -> Any:
    """Return a dataset that save_to_disk wrote, mapped into memory, not read."""
    with _readable(folder, (Exception,)):
        import datasets

        saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise PreconditionError("the dataset has no such split", where=folder, expected=", ".join(saved),
                                    found=split, fix="choose one with --prompt-split")
        return saved[split]
    return saved


def _hub_dataset(name: str, split: str) -> Any:
    """Return a dataset of the hub, streamed where its files allow it, else of the local cache."""
    path, _, config = name.partition(":")
    try:
        import datasets

        try:
            return datasets.load_dataset(path, config or None, split=split, streaming=True)
        except NotImplementedError:  # archives that have to be unpacked first
            return datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # whatever the reason is: this name gives no rows
        raise PreconditionError(
            "no prompts under this name",
            where=name,
            expected=f"a file or folder, or a dataset on the Hugging Face hub or in its local cache with split {split}",
            found=f"no such file or folder; {type(error).__name__}: {error}",
            fix="correct --prompts (org/name:config for one of several configurations) or --prompt-split; without a "
            "network, download the dataset elsewhere and give the path of its folder",
        ) from None
