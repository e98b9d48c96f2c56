"""From the command line to an exit code: every ending of a script, once.

A script is `run(options, stage)` plus `main(__doc__, OptionsClass, run)`.
"""

import contextlib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from eagle3 import config, files, log
from eagle3.errors import Interrupted, PreconditionError, StageError, UsageError
from eagle3.log import logger
from eagle3.options import CommonOptions
from eagle3.stage import Stage

Options = TypeVar("Options")
EXIT_FILE = "EAGLE3_EXIT_FILE"


def main(documentation: str, options_class: type[Options], run: Callable[[Options, Stage], None]) -> None:
    """Run a stage as a script and exit with its documented code.

    Under a launcher that loses exit codes (torchrun), the first process that fails leaves its code in a file.
    """
    code = run_script(documentation, options_class, run, sys.argv)
    if code and (path := os.environ.get(EXIT_FILE)):
        with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
            file.write(str(code))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Threads of torch's process group now and then abort the interpreter's own shutdown ("terminate called
        # without an active exception"), and torchrun would report a finished run as failed.
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
        stage.last_line()
        return 0
    except StageError as error:
        return _fail(stage, error, error.exit_code)
    except Exception as error:  # noqa: BLE001 - the outermost frame of a script
        if (refusal := _refusal(error, stage)) is not None:
            return _fail(stage, refusal, refusal.exit_code)
        logger.error("%s\nThis is a bug in this stage; the whole log is in the log file.", traceback.format_exc())
        return _fail(stage, StageError(f"{type(error).__name__}: {error}"), 1)
    finally:
        if stage is not None:
            stage.release()


def _fail(stage: Stage | None, error: StageError, code: int) -> int:
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
