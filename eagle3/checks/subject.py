"""What is looked at before anything expensive, and what is said of it: the terms of the doctor and of preflight."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3.common import machine
from eagle3.common.errors import StageError
from eagle3.common.findings import FAIL, Finding, said
from eagle3.common.options import EngineOptions, ModelOptions
from eagle3.engines import arguments

_PARTS = ("where", "expected", "found")


@dataclass(frozen=True)
class Subject:
    """What is about to be started.

    Attributes:
        serve_args: more arguments of the server. drafter: the exported drafter, if it is to be looked at.
        speculates: whether an engine is to serve a drafter. trains: whether processes train, without an engine.
        captures: whether the engine is to give hidden states.
        training: what is known of the drafter's training; None: what the manifests beside it say.
    """

    engine: EngineOptions = field(default_factory=EngineOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    run_dir: Path = Path()
    serve_args: Sequence[str] = ()
    drafter: Path | None = None
    speculates: bool = True
    trains: bool = False
    captures: bool = False
    training: dict[str, Any] | None = None

    @property
    def folder(self) -> Path | None:
        """The verifier's folder, None when no model is named."""
        return Path(self.model.path) if self.model.path else None

    @property
    def environment(self) -> dict[str, str]:
        """What the engine will find in its environment."""
        return {**os.environ, **self.engine.env}

    @property
    def arguments(self) -> list[str]:
        """What the engine is given on its command line."""
        return [*self.engine.args, *self.serve_args]

    @functools.cached_property
    def gpus(self) -> list[machine.Gpu]:
        """The GPUs that the engine will see."""
        return machine.gpus(self.environment.get("CUDA_VISIBLE_DEVICES"))

    def argument(self, *names: str) -> str | None:
        """Return the value of one of the engine's arguments, None when it is not given (see `arguments.value`)."""
        return arguments.value(self.arguments, *names)


Check = Callable[[Subject], Iterator[Finding]]


def look(subject: Subject, checks: Sequence[Check]) -> list[Finding]:
    """Return the findings of all checks in their order; what a check raises is a failure of its own.

    They wait for other programs most of the time, so they run side by side.
    """
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return [line for lines in pool.map(lambda check: _lines(check, subject), checks) for line in lines]


def _lines(check: Check, subject: Subject) -> list[Finding]:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    try:
        return [replace(finding, name=finding.name or name) for finding in check(subject)]
    except StageError as error:
        told = [error.what, *(f"{part} {error.parts[part]}" for part in _PARTS if error.parts[part])]
        return [said(FAIL, name, "; ".join(told), str(error.parts["fix"]))]
