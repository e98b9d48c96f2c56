"""Figures for TensorBoard, Weights & Biases and trackio, as far as they are asked for and installed.

All of them write into the run's folder and send nothing: W&B is offline and trackio local, unless their own variables
(WANDB_MODE, TRACKIO_SPACE_ID) say otherwise.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle3.common.errors import PreconditionError, UsageError
from eagle3.common.log import logger

Log = Callable[[int, dict[str, float]], None]  # step, figures


def check(names: list[str]) -> None:
    """Refuse what is not known or not installed, before anything is trained."""
    for name in names:
        if name not in _OPENERS:
            raise UsageError("no such tracker", where="--track", expected=" or ".join(_OPENERS), found=name,
                             fix="correct it")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb makes, is no package
            raise PreconditionError(f"{name} is not installed", where=f"--track {name}",
                                    fix=f"pip install {name} (it is in no requirements file), or leave it out: "
                                    "metrics.jsonl and curves.html have all figures")


class Tracker:
    """Several trackers as one. Whatever one raises ends it with a warning, and never the training."""

    def __init__(self, names: list[str], folder: Path) -> None:
        """Take the names and the stage's folder; a tracker is opened with its first figures."""
        self._waiting, self._folder = names, folder
        self._open: dict[str, tuple[Log, Callable[[], None]]] = {}

    def log(self, row: dict[str, Any]) -> None:
        """Hand on a row of the metrics."""
        figures = dict(flat(row, row["kind"]))
        for name in self._waiting:
            self._guarded(name, self._start, name, row["step"])
        self._waiting = []
        for name, (log, _) in [*self._open.items()]:
            self._guarded(name, log, row["step"], figures)

    def close(self) -> None:
        """Write what is not written."""
        for name, (_, close) in [*self._open.items()]:
            self._guarded(name, close)
        self._open = {}

    def _start(self, name: str, step: int) -> None:
        self._open[name] = _OPENERS[name](self._folder, step)

    def _guarded(self, name: str, act: Callable[..., Any], *values: Any) -> None:
        try:
            act(*values)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises
            self._open.pop(name, None)
            logger.warning("%s gets no more figures: %s: %s", name, type(error).__name__, error)


def flat(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield (name/of/it, number) for every number within a row; lists count from 1."""
    if isinstance(value, dict):
        value = [*value.items()]
    elif isinstance(value, list):
        value = [*enumerate(value, start=1)] if all(isinstance(each, float) for each in value) else []
    elif isinstance(value, int | float):
        yield name, float(value)
        return
    else:
        return
    for key, each in value:
        if key not in ("step", "kind", "samples"):
            yield from flat(each, f"{name}/{key}")


def _tensorboard(folder: Path, step: int) -> tuple[Log, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)  # type: ignore[no-untyped-call]

    def log(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    return log, writer.close


def _wandb(folder: Path, _: int) -> tuple[Log, Callable[[], None]]:
    import wandb

    run = wandb.init(project="eagle3", name=folder.parent.name, dir=str(folder),
                     mode=os.environ.get("WANDB_MODE", "offline"))
    return (lambda step, figures: run.log(figures, step=step)), run.finish


def _trackio(folder: Path, _: int) -> tuple[Log, Callable[[], None]]:
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when it is imported
    import trackio

    trackio.init(project="eagle3", name=folder.parent.name)
    return (lambda step, figures: trackio.log(figures, step=step)), trackio.finish


_OPENERS: dict[str, Callable[[Path, int], tuple[Log, Callable[[], None]]]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
