"""Loading ahead of training."""

import threading
from collections.abc import Callable, Iterator
from queue import Full, Queue
from typing import Any


class Prefetcher:
    """Runs `load(item)` for each item in a thread, a few ahead of the consumer, in order."""

    def __init__(self, items: list, load: Callable[[Any], Any], depth: int = 2) -> None:
        self._items, self._load = items, load
        self._queue: Queue[Any] = Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for item in self._items:
            try:
                value = self._load(item)
            except BaseException as error:  # noqa: BLE001 - handed to the consumer
                value = error
            while not self._closed.is_set():
                try:
                    self._queue.put(value, timeout=0.1)
                    break
                except Full:
                    continue
            if self._closed.is_set() or isinstance(value, BaseException):
                return

    def __iter__(self) -> Iterator[Any]:
        for _ in self._items:
            value = self._queue.get()
            if isinstance(value, BaseException):
                raise value
            yield value

    def close(self) -> None:
        """Stop loading ahead."""
        self._closed.set()
        self._thread.join(timeout=10)
