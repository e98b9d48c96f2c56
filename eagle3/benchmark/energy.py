"""Energy of GPUs while a load runs, from nvidia-smi's power readings."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Sequence

_EVERY_MS = 200
_QUERY = ["--query-gpu=uuid,power.draw", "--format=csv,noheader,nounits", "-lms", str(_EVERY_MS)]


class Meter:
    """Reads the power of some GPUs from entry to exit; without any, or without nvidia-smi, it reads nothing.

    It is the whole board's, idle power included. On Ampere and newer a reading is the mean of the last second, so that
    a load of a few seconds is told poorly.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        """Take the GPUs' uuids."""
        self._gpus = gpus
        self._readings: dict[str, list[tuple[float, float]]] = {gpu: [] for gpu in gpus}

    def __enter__(self) -> "Meter":
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(OSError):
            if self._gpus:
                self._process = subprocess.Popen(["nvidia-smi", *_QUERY], text=True, stdout=subprocess.PIPE,
                                                 stderr=subprocess.DEVNULL)
        if self._process:
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def _read(self) -> None:
        assert self._process and self._process.stdout
        for line in self._process.stdout:
            uuid, _, watts = line.partition(",")
            with contextlib.suppress(ValueError, KeyError):  # "[N/A]", or another's GPU
                self._readings[uuid.strip()].append((time.monotonic(), float(watts)))

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._thread.join(timeout=5)

    def joules(self, start: float, end: float) -> float | None:
        """Return the energy of all GPUs between two times of the monotonic clock; None where a GPU did not tell."""
        spent = [_integral(readings, start, end) for readings in self._readings.values()]
        told = [joules for joules in spent if joules is not None]
        return sum(told) if told and len(told) == len(spent) else None


def _integral(readings: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """Return the time integral of readings, linear between them and level before the first and after the last."""
    inside = [(when, watts) for when, watts in readings if start <= when <= end]
    if len(inside) < 2:
        return None
    points = [(start, inside[0][1]), *inside, (end, inside[-1][1])]
    return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in zip(points, points[1:], strict=False))
