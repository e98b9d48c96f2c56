"""The files of an exported drafter: which are written, and that all of them take their names together."""

import contextlib
import json
import os
from pathlib import Path

from eagle3.common import files, log, tensor_files
from eagle3.common.errors import PreconditionError
from eagle3.common.log import logger
from eagle3.common.machine import require_free_disk
from eagle3.drafter.checkpoint import Export

CONFIG = "config.json"


def files_to_write(export: Export, target: Path, in_place: bool) -> dict[Path, dict[str, tensor_files.Entry]]:
    """Return {file to write: its tensors by new name}; in place only files that change."""
    planned = {target / name: tensors for name, tensors in layout(export, in_place).items()}
    if not in_place:
        return planned
    return {path: tensors for path, tensors in planned.items()
            if tensors.keys() != tensor_files.read_header(path).keys()}


def layout(export: Export, in_place: bool) -> dict[str, dict[str, tensor_files.Entry]]:
    """Return {file name: its tensors by new name}: one file, or in place the files that there are."""
    own = sorted(path.name for path in {entry.file for entry in export.tensors.values()})
    planned: dict[str, dict[str, tensor_files.Entry]] = {}
    for name, entry in export.shipped.items():
        place = entry.file.name if entry.file.parent == export.folder else own[0]
        planned.setdefault(place if in_place else tensor_files.SINGLE, {})[name] = entry
    return planned


def write(
    export: Export, target: Path, changes: dict[Path, dict[str, tensor_files.Entry]], in_place: bool
) -> dict[str, Path]:
    """Write weights and config beside their final names, then rename all of them; return the files by name."""
    require_free_disk(target, sum(e.size for tensors in changes.values() for e in tensors.values()),
                      "the exported drafter")
    index = target / tensor_files.INDEX
    outputs = [*changes, target / CONFIG, *([index] if in_place and index.exists() else [])]
    backups = {path: path.with_name(f"{path.name}.bak") for path in outputs if in_place}
    for path, backup in backups.items():
        if backup.exists() and not backup.samefile(path):
            raise PreconditionError("an old file is kept there already", where=backup, fix="move it away")
    with contextlib.ExitStack() as stack:  # renames in reverse order: weights first
        temporary = {path: stack.enter_context(files.replacing(path)) for path in reversed(outputs)}
        for path, tensors in changes.items():
            tensor_files.write(temporary[path], tensors)
            logger.info("%s: %d tensors, %s", path, len(tensors), log.size(sum(e.size for e in tensors.values())))
        temporary[target / CONFIG].write_text(json.dumps(export.config(), indent=2) + "\n", encoding="utf-8")
        if index in temporary:
            tensor_files.write_index(temporary[index], layout(export, in_place))
        for path, backup in backups.items():
            keep(path, backup)
    return {path.name: path for path in outputs}


def keep(path: Path, backup: Path) -> None:
    """Give an old file a second name, so that its own can be taken over in one step."""
    try:
        os.link(path, backup)
    except FileExistsError:  # of a run that was killed right here
        return
    except OSError:  # a file system without hard links
        os.rename(path, backup)
