"""Signals: the first one asks to finish the unit in hand and save, the second stops at once."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

from eagle3.common.log import logger

SAME_SIGNAL_S = 0.5  # one signal may arrive twice: through the process group and from a parent that hands it on


class Interrupt:
    """Takes over SIGINT, SIGTERM and SIGHUP of this process.

    Attributes:
        signal: the first signal's number once it has come.
    Args:
        led: another process started this one for a part of its work. It decides when to stop at once and says so, since
            a signal to a whole group, which it also hands on, arrives here any number of times.
    """

    def __init__(self, led: bool = False) -> None:
        self.signal: int | None = None
        self._led = led
        self._hooks: list[Callable[[], None]] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: leave it so
                signal.signal(number, self._on_signal)

    def on_stop(self, hook: Callable[[], None]) -> None:
        """Call `hook` when the second signal stops the process at once (to end process groups it started)."""
        self._hooks.append(hook)

    def _on_signal(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._signalled_at = number, now
            if not self._led:
                logger.warning("signal %d: finishing the unit in hand and saving; once more to stop at once", number)
            return
        if self._led or now - self._signalled_at < SAME_SIGNAL_S:
            return
        for hook in self._hooks:
            with contextlib.suppress(Exception):
                hook()
        os._exit(128 + number)
