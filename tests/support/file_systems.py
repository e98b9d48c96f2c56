"""File systems that lack a call, for a process that is started with a folder on its PYTHONPATH."""

import errno
import os
from pathlib import Path

# What each file system does not know: {name: (module, function, error, condition on the arguments)}.
LACKS = {
    "flock": ("fcntl", "flock", errno.ENOSYS, "True"),
    "symlink": ("os", "symlink", errno.EOPNOTSUPP, "True"),
    "folder_sync": ("os", "fsync", errno.EINVAL, "stat.S_ISDIR(os.fstat(arguments[0]).st_mode)"),
    "file_sync": ("os", "fsync", errno.ENOTSUP, "stat.S_ISREG(os.fstat(arguments[0]).st_mode)"),
    "rename_over": ("os", "replace", errno.EPERM, "os.path.isfile(arguments[1])"),
    "append": ("os", "ftruncate", errno.ENOSYS, "True"),
}


def without(folder: Path, *lacking: str) -> str:
    """Write a `sitecustomize` that makes calls fail as such a file system does; return its folder for PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["import fcntl", "import os", "import stat"]
    for name in lacking:
        module, function, number, condition = LACKS[name]
        lines += ["", "", f"def {name}(*arguments, real={module}.{function}, **keywords):", f"    if {condition}:",
                  f"        raise OSError({number}, {os.strerror(number)!r})",
                  "    return real(*arguments, **keywords)", "", "", f"{module}.{function} = {name}"]
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    return str(folder)
