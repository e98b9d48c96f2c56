"""Logging and progress: human lines on stderr and in the stage's log file, nothing on stdout."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from eagle3.common.files import make_directory

logger = logging.getLogger("eagle3")
_LINE_EVERY_S = 30.0
_RATE_OVER_S = 120.0


def set_up(log_file: Path | None, level: str) -> None:
    """Send log lines to stderr and, appended, to `log_file`; repeated calls replace the handlers."""
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(level.upper())
    console.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logger.addHandler(console)
    if log_file is not None:
        make_directory(log_file.parent)
        file = logging.FileHandler(log_file, mode="a", encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        logger.addHandler(file)
    logging.raiseExceptions = False  # a full disk must not print a traceback for every line
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


def duration(seconds: float) -> str:
    """Return seconds as 1h02m, 3m07s or 8s."""
    seconds = round(max(0.0, seconds))
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def size(count: float) -> str:
    """Return bytes in decimal units: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


class Progress:
    """done/total, rate and ETA: a bar on a terminal, elsewhere a log line every 30 s.

    To be made when work begins, not before a model is loaded. The rate is that of the last minutes; the last line has
    that of the whole. `report` gets the same figures every few seconds; the stage stores them for `eagle3.status`.
    Units done by an earlier run count as done but not in the rate.
    """

    def __init__(
        self, label: str, total: int, unit: str, already_done: int = 0, report: Callable[[dict], None] | None = None
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.failed, self.note = already_done, 0, ""
        start = time.monotonic()
        self._seen = deque([(start, already_done)])  # (time, units done) of the last minutes
        self._begin = self._seen[0]
        self._last_line, self._last_report = start, 0.0
        self._report = report
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=already_done, desc=label, unit=unit, dynamic_ncols=True)

    def update(self, count: int = 1, *, failed: int = 0, note: str = "") -> None:
        """Count units as done (or failed) and print when it is time."""
        self.done += count
        self.failed += failed
        self.note = note or self.note
        now = time.monotonic()
        if now - self._seen[-1][0] >= 1.0:
            self._seen.append((now, self.done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_OVER_S:
            self._seen.popleft()
        if self._bar is not None:
            self._bar.set_postfix_str(self.note, refresh=False)
            self._bar.update(count)
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            logger.info(self.line())
        if self._report and now - self._last_report >= 2.0:
            self._last_report = now
            self._report(self.figures())

    def figures(self) -> dict:
        """Return done, total, failed, unit, rate in units/s and eta_s (None before the first unit)."""
        since, done = self._seen[0]
        rate = (self.done - done) / max(1e-9, time.monotonic() - since)
        eta = (self.total - self.done) / rate if rate > 0 else None
        return {"done": self.done, "total": self.total, "failed": self.failed, "unit": self.unit,
                "rate": rate, "eta_s": eta, "label": self.label}

    def line(self) -> str:
        """Return the progress line."""
        now = self.figures()
        percent = 100 * self.done / self.total if self.total else 100
        eta = "?" if now["eta_s"] is None else duration(now["eta_s"])
        failed = f", {self.failed} failed" if self.failed else ""
        note = f", {self.note}" if self.note else ""
        return (f"{self.label} {self.done}/{self.total} {self.unit} ({percent:.0f}%), "
                f"{now['rate']:.1f} {self.unit}/s, ETA {eta}{failed}{note}")

    def close(self) -> None:
        """Print the last line and report the last figures, with the rate of the whole."""
        self._seen = deque([self._begin])
        if self._bar is not None:
            self._bar.close()
        logger.info(self.line())
        if self._report:
            self._report(self.figures())
