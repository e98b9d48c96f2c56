"""From the command line to an exit code: every ending of a script, once.

A script is `run(options, stage)` plus `main(__doc__, OptionsClass, run)`.
"""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from eagle3.common import config, files, log, workers
from eagle3.common.errors import Interrupted, PreconditionError, StageError, UsageError
from eagle3.common.log import logger
from eagle3.common.options import CommonOptions
from eagle3.common.stage import Stage

Options = TypeVar("Options")


def main(documentation: str, options_class: type[Options], run: Callable[[Options, Stage], None]) -> None:
    """Run a stage as a script and exit with its documented code."""
    script = Path(sys.argv[0]).stem
    workers.follow_parent(script)
    code = run_script(documentation, options_class, run, sys.argv)
    if workers.takes_part(script):
        # Threads of torch's process group now and then abort the interpreter's own shutdown ("terminate called
        # without an active exception"), and a finished run would count as failed.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run_script(
    documentation: str, options_class: type[Options], run: Callable[[Options, Stage], None], argv: list[str]
) -> int:
    """Parse, run, and turn every ending into an exit code: 0, 1, 2, 3, 4, or 128 + signal."""
    log.set_up(None, "info")
    stage = None
    try:
        options = config.parse(options_class, argv[1:], documentation)
        common: CommonOptions = options.common  # type: ignore[attr-defined]
        if common.print_config:
            print(config.to_yaml(options), end="")
            return 0
        if not common.run_dir and not common.out:
            raise UsageError("no run directory", where="--run-dir", fix="add --run-dir runs/NAME")
        stage = Stage(Path(argv[0]).stem, options, argv)
        run(options, stage)
        if workers.FOLDER is None:  # else the parent says it
            stage.last_line()
        return 0
    except StageError as error:
        return _fail(stage, error, error.exit_code)
    except Exception as error:  # noqa: BLE001 - the outermost frame of a script
        if (refusal := _refusal(error, stage)) is not None:
            return _fail(stage, refusal, refusal.exit_code)
        return _fail(stage, StageError(f"{type(error).__name__}: {error}"), 1, traceback.format_exc())
    finally:
        if stage is not None:
            stage.release()


def _fail(stage: Stage | None, error: StageError, code: int, bug: str = "") -> int:
    """Say an error once: a worker leaves that, and the manifest, to its parent."""
    lost_peer = stage is not None and workers.takes_part(stage.script) and _says_a_peer_is_gone(bug)
    if workers.report(error, code, bug, lost_peer):
        logger.debug("process %d: %s", workers.rank() + 1, traceback.format_exc())
        return code
    if lost_peer:  # under torchrun
        error = StageError("another process is gone", found=str(error), fix="what it said itself is the reason")
    elif bug:
        logger.error("%s\nThis is a bug in this stage; the whole log is in the log file.", bug)
    logger.error("%s", error)
    logger.debug("%s", traceback.format_exc())
    if stage is not None:
        status = "interrupted" if isinstance(error, Interrupted) else "partial" if code == 4 else "failed"
        stage.end(status, error=str(error))
    return code


def _refusal(error: Exception, stage: Stage | None) -> PreconditionError | None:
    """Return what an operating-system error tells the user, or None when it can only be a bug."""
    if not isinstance(error, OSError):
        return None
    path = Path(error.filename or (stage.directory / "manifest.json" if stage else "."))
    if error.errno in files.DISK_FULL:
        return files.disk_full(path)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return PreconditionError("cannot write there", where=path, found=error.strerror, fix="check it, or use --out")
    return None


def _says_a_peer_is_gone(bug: str) -> bool:
    """Whether a traceback ends in what gloo, NCCL or their store raise when another process is gone."""
    last = bug.rstrip().rpartition("\n  File ")[2]
    return any(word in last for word in ("gloo", "DistBackendError", "DistNetworkError", "DistStoreError"))
